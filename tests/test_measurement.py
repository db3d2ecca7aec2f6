"""benchmarks/measurement.py: what precedes a timing, and what is made of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import lengths
import measurement
import numpy as np
import ours
import power
import pytest
import rows
import timeline
import versions
from profile_split import Kernel

START = 1e-3
"""Seconds that starting and ending a run take, ..."""
ONE = 1e-4
"""... and those of each call in it."""


@pytest.mark.parametrize(
    ("measure", "least", "warm_up"),
    [
        (lambda run: measurement.repeat(run, 1), 1e3 * ONE, measurement.WARM_UP),
        (lambda run: 10 * measurement.repeat(run, 10, 0.2), 1e3 * ONE, 0.2),
        (measurement.repeat_calls, 1e3 * (ONE + START / measurement.USER_CALLS), measurement.SHORT_WARM_UP),
    ],
    ids=["one call", "ten calls", "as a user sees it"],
)
def test_the_card_is_warmed_up_first(
    measure: Callable[[Callable[[int], float]], float], least: float, warm_up: float
) -> None:
    """Though one run by itself takes much longer than one of many; and what is timed then is what counts."""
    taken: list[float] = []

    def run(times: int) -> float:
        warm = sum(taken) >= warm_up
        taken.append(START + (1 if warm else 3) * ONE * times)
        return taken[-1]

    found = measure(run)
    assert least <= found * (1 + 1e-9)
    assert found < 2 * least
    assert sum(taken[1 : -measurement.REPETITIONS]) >= warm_up
    assert sum(taken[: -measurement.REPETITIONS]) < 1.1 * warm_up + 3 * START


def test_runs_take_turns() -> None:
    timed: list[tuple[str, int]] = []

    def run(name: str, one: float, times: int) -> float:
        timed.append((name, times))
        return one * times

    short, long = measurement.in_turn([functools.partial(run, "short", 1e-3), functools.partial(run, "long", 5e-2)], 10)
    assert short == pytest.approx([0.1] * measurement.REPETITIONS)
    assert long == pytest.approx([5.0] * measurement.REPETITIONS)
    assert timed[-2 * measurement.REPETITIONS :] == [("short", 20), ("long", 1)] * measurement.REPETITIONS


def test_steady_turns_go_both_ways() -> None:
    order: list[str] = []

    def run(name: str, one: float, times: int) -> float:
        if order[-1:] != [name]:
            order.append(name)
        return one * times

    runs = [functools.partial(run, "short", 1e-3), functools.partial(run, "long", 5e-2)]
    short, long = measurement.in_steady_turns(runs, 10)
    assert short == pytest.approx([0.1] * measurement.STEADY_ROUNDS)
    assert long == pytest.approx([5.0] * measurement.STEADY_ROUNDS)
    assert order == ["short", "long", "short", "long", "short"]  # the turns of two rounds meet


class Version:
    """In place of `versions.Version`: numbers, and what it answers round after round."""

    def __init__(self, name: str, numbers: str, *answers: Any, order: list[str], operands: int = 0) -> None:
        begun = {"operands": [operands], "numbers": [numbers]}
        self.name, self._answers, self._order = name, [begun, *answers], order
        self.asked: list[str] = []

    def ask(self, question: str) -> None:
        self.asked.append(question)
        if question in ("time", "steady"):
            self._order.append(self.name)

    def answer(self) -> Any:
        return self._answers[len(self.asked) - 1]


def test_versions_take_turns_and_are_compared_round_by_round() -> None:
    """A card that becomes slower makes no version slower than another, nor does coming first after a pause."""
    row = rows.parse("forward/1,2/1x64")
    order: list[str] = []
    before = Version("before", "00", 0.1, 1.0, 2.0, 4.0, order=order)
    same = Version("same", "00", 9.0, 0.5, 1.0, 2.2, order=order)
    other = Version("other", "01", 9.0, 1.0, 2.0, 4.0, order=order)
    fed = Version("fed", "01", 9.0, 1.0, 2.0, 4.0, order=order, operands=1)
    four: list[Any] = [before, same, other, fed]
    found = versions.measure(row, four, rounds=3)
    assert before.asked == ["begin forward/1,2/1x64", *["time"] * 4]
    names = ["before", "same", "other", "fed"]
    assert order == [*names, *names[::-1], *names, *names[::-1]]
    *_, line = versions.table({row.name: found})
    assert line == (
        "| forward/1,2/1x64 | 2.0000 | 1.0000 = 0.500 (0.500 to 0.550) | 2.0000 = 1.000 (1.000 to 1.000) * |"
        " 2.0000 = 1.000 (1.000 to 1.000) * (other operands) |"
    )


def test_operands_are_known_by_their_bits() -> None:
    row = rows.parse("forward/1,2/1x64")
    operands = inputs.make(row)
    found = inputs.fingerprint(operands)
    assert found == inputs.fingerprint(inputs.make(row))
    q = operands["q"].at[0, 3, 0, 5].add(1)
    swapped = operands["v"].at[0, jnp.array([1, 2])].set(operands["v"][0, jnp.array([2, 1])])
    for name, x in (("q", q), ("v", swapped)):
        others = inputs.fingerprint({**operands, name: x})
        assert [key for key, a, b in zip(operands, found, others, strict=True) if a != b] == [name]


def test_versions_at_a_steady_state() -> None:
    row, order = rows.parse("forward/1,2/1x64"), list[str]()
    before: Any = Version("before", "00", [9.0, 500.0], [2.0, 690.0], [2.0, 692.0], order=order)
    after: Any = Version("after", "00", [9.0, None], [1.0, None], [1.5, None], order=order)
    found = versions.measure(row, [before, after], rounds=2, steady=True)
    assert order == ["before", "after", "after", "before", "before", "after"]
    *_, line = versions.table({row.name: found})
    assert line == "| forward/1,2/1x64 | 2.0000, 691 W | 1.2500 = 0.625 (0.500 to 0.750) |"


@pytest.mark.parametrize("counts", [True, False])
def test_watts_are_joules_by_seconds(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([1000.0, 1070.0] if counts else [None, None])
    clock = iter([5.0, 5.1])
    monkeypatch.setattr(power, "joules", lambda: next(found))
    monkeypatch.setattr("power.time.perf_counter", lambda: next(clock))
    assert power.Meter().watts() == (pytest.approx(700.0) if counts else None)


def test_rows_of_uneven_batches() -> None:
    row = rows.parse("backward/2,8/7<=4321")
    assert row.name == "backward/2,8/7<=4321"
    assert len(row.lengths) == 7
    assert 1 <= min(row.lengths) < max(row.lengths) <= 4321
    assert row.lengths == rows.parse("forward/16,32/7<=4321").lengths
    assert row.offsets[-1] == row.tokens == sum(row.lengths)
    assert [b - a for a, b in itertools.pairwise(row.offsets)] == row.lengths
    assert rows.parse("forward/2,8/4x8192").lengths == [8192] * 4


def test_rows_of_places_that_are_not_taken() -> None:
    row = rows.parse("forward/2,8/4x8192of32")
    assert row.name == "forward/2,8/4x8192of32"
    assert (row.sequences, row.places, row.tokens) == (4, 32, 32768)
    assert row.lengths == [8192] * 4 + [0] * 28
    assert rows.parse("forward/2,8/4x8192of4") == rows.parse("forward/2,8/4x8192")
    given = inputs.shapes(rows.parse("forward/2,8/2<=70of3"))
    assert (given["cu_seqlens"].shape, given["initial_state"].shape[0]) == ((4,), 3)
    with pytest.raises(ValueError, match=r"there must be places for all sequences, got 'forward/2,8/4x64of3'"):
        rows.parse("forward/2,8/4x64of3")


def chain(start: float, calls: int, parts: int) -> list[Kernel]:
    """Of calls of three kernels, 41 us apart: one at the beginning, and two that overlap once a part."""
    found = []
    for number in range(calls):
        at = start + number * 41e3
        found.append(Kernel(at + 1e3, at + 3e3, "segments", ""))
        for part in range(parts):
            begin = at + 4e3 + part * 36e3 / parts
            found += [
                Kernel(begin, begin + 9e3, "states_kernel", ""),
                Kernel(begin + 1e3, begin + 36e3 / parts, "gradients_kernel", ""),
            ]
    return found


def test_dense_calls_compute_what_packed_ones_do() -> None:
    """benchmarks/lengths.py times both of the same operands."""
    row = rows.parse("backward/1,2/2x70")
    packed, dense = ours.JaxQla("", "xla"), lengths.Dense("", "xla")
    results = []
    for library in (packed, dense):
        arguments = library.arguments(row, inputs.make(row))
        results.append(jax.tree.leaves(jax.jit(library._single(row))(*arguments)))
    for a, b in zip(*results, strict=True):
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        assert np.linalg.norm(a.reshape(b.shape) - b) <= 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("name", ["forward/1,2/2x70", "backward/1,2/2x70"])
def test_calls_that_are_timed_go_on_from_the_state_before(name: str) -> None:
    """Of a chain, and of the chain run before it, whose state is donated; the operands' own is not."""
    row = rows.parse(name)
    library = ours.JaxQla("", "xla", calls=2)
    library.prepare([row], memory=False)
    *others, state = arguments = library.arguments(row, inputs.make(row))
    single = jax.jit(library._single(row))
    run = library.run(row, arguments)
    for _ in range(2):
        assert run(1) > 0
        for _ in range(2):
            results = single(*others, state)
            state = results[1] if row.direction == "forward" else results[-1]
        np.testing.assert_allclose(run.state, state, rtol=1e-2, atol=1e-3)
    # All of each call's results in plain JAX, and those of the last call.
    of_a_call = 1 if row.direction == "forward" else 5
    assert len(run.numbers) == 3 * of_a_call
    first, again = (library.numbers(row, arguments) for _ in range(2))
    assert [x.tobytes() for x in first] == [x.tobytes() for x in again]
    assert any(x != 0 for x in first)


def test_one_long_sequence_beside_short_ones() -> None:
    row = lengths.OneLong("forward", 2, 8, sequences=4, length=1000)
    assert row.lengths[0] == 1000
    assert all(1 <= length <= 512 for length in row.lengths[1:])
    assert (row.places, row.tokens, row.offsets[1]) == (4, sum(row.lengths), 1000)
    assert inputs.shapes(row)["cu_seqlens"].shape == (5,)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (1, [("segments", 2, 4), ("states_kernel", 5, 14), ("gradients_kernel", 6, 41)]),
        (
            2,
            [
                *[("segments", 2, 4), ("states_kernel", 5, 14), ("gradients_kernel", 6, 23)],
                *[("states_kernel", 23, 32), ("gradients_kernel", 24, 41)],
            ],
        ),
    ],
)
def test_when_kernels_of_a_call_begin_and_end(parts: int, expected: list[tuple[str, float, float]]) -> None:
    """Of calls in two chains, between which the host is waited for and other kernels run."""
    events = [*chain(0, 5, parts), Kernel(206e3, 207e3, "probe", ""), *chain(9e6, 5, parts)]
    assert timeline.of_a_call(events, "gradients_kernel", 10) == [pytest.approx(x) for x in expected]


def test_which_kernel_ends_a_call() -> None:
    """In packed batches `backward` comes behind `gradients`, one of which does nothing."""
    events = chain(0, 3, 1)
    assert timeline.ending(events, "backward") == "gradients_kernel"
    assert timeline.ending([*events, Kernel(50e3, 60e3, "backward_kernel", "")], "backward") == "backward_kernel"
    assert timeline.ending(events, "forward") == "forward_kernel"


def test_a_profile_that_lacks_calls() -> None:
    events = chain(0, 3, 1)
    with pytest.raises(ValueError, match="3 times gradients_kernel, expected a multiple of 2 calls"):
        timeline.of_a_call(events, "gradients_kernel", 2)
    with pytest.raises(ValueError, match="0 times forward_kernel"):
        timeline.of_a_call(events, "forward_kernel", 3)
    with pytest.raises(ValueError, match="no call of the profile follows another at once"):
        timeline.of_a_call(events[:3], "gradients_kernel", 1)
