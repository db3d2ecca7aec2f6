"""benchmarks/measurement.py: what precedes a timing, and what is made of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import measurement

START = 1e-3
"""Seconds that starting and ending a run take, ..."""
ONE = 1e-4
"""... and those of each call in it."""


@pytest.mark.parametrize(
    ("measure", "least"),
    [
        (lambda run: measurement.repeat(run, 1), 1e3 * ONE),
        (lambda run: 10 * measurement.repeat(run, 10), 1e3 * ONE),
        (measurement.repeat_calls, 1e3 * (ONE + START / measurement.USER_CALLS)),
    ],
    ids=["one call", "ten calls", "as a user sees it"],
)
def test_the_card_is_warmed_up_first(measure: Callable[[Callable[[int], float]], float], least: float) -> None:
    """Though one run by itself takes much longer than one of many; and what is timed then is what counts."""
    taken: list[float] = []

    def run(times: int) -> float:
        warm = sum(taken) >= measurement.WARM_UP
        taken.append(START + (1 if warm else 3) * ONE * times)
        return taken[-1]

    found = measure(run)
    assert least <= found * (1 + 1e-9)
    assert found < 2 * least
    assert sum(taken[1 : -measurement.REPETITIONS]) >= measurement.WARM_UP
    assert sum(taken[: -measurement.REPETITIONS]) < 1.1 * measurement.WARM_UP + 3 * START
