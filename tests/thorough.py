"""Cases that `make thorough` runs and `make test` leaves out: they alone find little, and take minutes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

THOROUGH = os.environ.get("JAX_QLA_THOROUGH") == "1"

only_thorough = pytest.mark.skipif(not THOROUGH, reason="`make thorough` runs it")

every_value = pytest.mark.every_value
"""Of a test's cases `make test` runs few, in which every value of every parameter occurs (`few`, conftest.py)."""


def rarely(*values: Any) -> Any:
    """A parameter, or several of one test, that only `make thorough` takes."""
    return pytest.param(*values, marks=only_thorough)


def few(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of a few of the cases (values by parameter) that have every value of every parameter between them: one
    after the other, the first of those with most values that none before it has."""
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    missing = set[tuple[str, str]]().union(*values)
    found = []
    while missing:
        found.append(max(range(len(cases)), key=lambda n: len(values[n] & missing)))
        missing -= values[found[-1]]
    return sorted(found)
