"""Which cases `make test` runs of tests marked `every_value`."""

from __future__ import annotations

import itertools

from thorough import few

CASES = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product((1, 2, 3), ("x", "y"), (None, [0]))]


def test_few_cases_have_every_value() -> None:
    kept = few(CASES)
    assert kept == sorted(kept)
    assert len(kept) == 3
    for name in ("a", "b", "c"):
        assert {repr(CASES[n][name]) for n in kept} == {repr(case[name]) for case in CASES}


def test_values_without_others() -> None:
    assert few([{"a": 1}, {"a": 1}, {"a": 2}]) == [0, 2]
    assert few([{}]) == []
    assert few([{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 3}]) == [0, 2, 3]
