"""What one library's measurement of one row holds, and the interface that every library is measured through."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from rows import Row

CALLS = 10
"""Calls in one graph or one jitted function, whose device time is divided by this."""
INTERVAL = 0.02
"""The least seconds that one timing covers, so that what starts and ends it does not count."""
REPETITIONS = 7
WARM_UP = 1.0
"""Seconds of the same calls before the first timing. At its power limit an H200 takes a second to find its clocks:
until then it is up to 10 % faster after a pause, which favours whoever comes first, and slower after other load."""
SHORT_WARM_UP = 0.3
"""The same where versions are timed in turn, and of calls as a user sees them, which precede what the device takes."""
STEADY_WARM_UP, STEADY_INTERVAL = 0.5, 0.1
"""The same, and for `INTERVAL`, of versions at a steady state: seven timings are 0.7 s then."""
STEADY_ROUNDS = 4
"""Turns of each in `in_steady_turns`."""
USER_CALLS = 20


@dataclass
class Measurement:
    """Milliseconds of one call, and what shows that the libraries compute the same."""

    device: float
    """On the device, from the first kernel to the last, without the host's dispatch."""
    call: float
    """As a user sees it: the host's clock over 20 calls that are not waited for in between."""
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    """A few rows of each result, float32, by the names of jax_qla."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of forward and backward in one jitted function: temporary, arguments, results."""


class Library(Protocol):
    """A library that the comparison can run."""

    name: str
    directions: tuple[str, ...]
    """The passes that it has, of "forward" and "backward"."""

    def version(self) -> str:
        """Its version. Raises ImportError if it is not installed."""
        ...

    def prepare(self, rows: Sequence[Row]) -> None:
        """Compiles what the rows need, as far as that takes long; called once, before `measure`."""
        ...

    def measure(self, row: Row, operands: Mapping[str, Any]) -> Measurement:
        """Times the row. The operands are those of `inputs.make`, which must not be written to; keeps none of them."""
        ...


def repeat(run: Callable[[int], float], calls: int, warm_up: float = WARM_UP, interval: float = INTERVAL) -> float:
    """Median milliseconds of one call, where `run(times)` takes seconds for `times` runs of `calls` calls each."""
    (found,) = in_turn([run], calls, warm_up, interval)
    return statistics.median(found)


def in_turn(
    runs: Sequence[Callable[[int], float]], calls: int, warm_up: float = WARM_UP, interval: float = INTERVAL
) -> list[list[float]]:
    """Milliseconds of one call of each, all timings; as `repeat` takes them, but of all runs in turn, for a card's
    clocks drift by more than what tells them apart."""
    times = [max(1, round(interval / _warmed_up(run, warm_up))) for run in runs]
    rounds = [
        [1e3 * run(count) / count / calls for run, count in zip(runs, times, strict=True)] for _ in range(REPETITIONS)
    ]
    return [list(found) for found in zip(*rounds, strict=True)]


def in_steady_turns(runs: Sequence[Callable[[int], float]], calls: int) -> list[list[float]]:
    """The same at a steady state: each turn is a second of one run, and every other round goes the other way round."""
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(STEADY_ROUNDS):
        for run, times in [*zip(runs, found, strict=True)][:: -1 if turn % 2 else 1]:
            times.append(repeat(run, calls, STEADY_WARM_UP, STEADY_INTERVAL))
    return found


def repeat_calls(run: Callable[[int], float]) -> float:
    """Median milliseconds of one call as a user sees it, where `run(times)` takes seconds for `times` calls."""
    _warmed_up(run, SHORT_WARM_UP)
    return 1e3 * statistics.median(run(USER_CALLS) for _ in range(REPETITIONS)) / USER_CALLS


def _warmed_up(run: Callable[[int], float], seconds: float) -> float:
    """Seconds of the first run, once more of them have kept the card busy for so many."""
    once, busy = run(1), 0.0
    while busy < seconds:  # One run by itself may take longer than one of many.
        busy += run(max(1, round((seconds - busy) / once)))
    return once


def sampled_rows(count: int) -> slice:
    """Which of `count` rows of tokens are compared: about 64, in every part of a chunk."""
    return slice(None, None, max(1, count // 64 + 1))
