"""The kernels' own CUDA source, run on a CPU (tests/emulator.py) as `jax_qla.cuda` launches it, on the battery."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import heapq
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import battery
import convolution_cases
import emulator
import jax
import jax.numpy as jnp
import norm_cases
import numpy as np
import programs
import pytest
import stand_in
import test_recurrent_cuda as decoding
from test_cuda import HIGH, IDENTICAL, LIMITS, MISSED, cuda, in_high_precision, that_keeps, that_recomputes
from thorough import THOROUGH, every_value, only_thorough, rarely

from jax_qla import implementations, policy, store
from jax_qla import segments as tables
from jax_qla.cuda import conv1d, norm, rule
from jax_qla.implementations import Choice
from jax_qla.kernels import (
    backward,
    balance,
    compose,
    forward,
    inversion,
    lowering,
    macros,
    prepare,
    specification,
    state_gradients,
    states,
    states_from_vd,
)
from jax_qla.kernels.common import ALWAYS, FAINT, FIRST, LAST, STRETCHES
from jax_qla.launch import Step
from jax_qla.policy import blocks, card, one_kernel

LACKING = store.why_not_buildable()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

LATE = (0, 40, 400)
"""Turns of the scheduler that a load takes at most: at once, about as long as what is done beside it, and longer."""
_seeds = itertools.count()


def launch(
    steps: Sequence[Step],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    aliases: Mapping[str, str] | None = None,
    within: Mapping[str, str] | None = None,
) -> dict[str, jax.Array]:
    """`launch.launch` on the CPU. What is not written is not a number."""
    results = {name: x for name, x in outputs.items() if name not in (within or {})}

    def run(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        have = {name: np.array(x) for name, x in given.items()}
        for name, x in outputs.items():
            have[name] = np.full(x.shape, np.nan if jnp.issubdtype(x.dtype, np.inexact) else -1, x.dtype)
        for source, target in (aliases or {}).items():
            have[target] = have[source]
        for name, around in (within or {}).items():
            have[name] = (
                have[around]
                .ravel()
                .view(np.uint8)[: have[name].nbytes]
                .view(have[name].dtype)
                .reshape(have[name].shape)
            )
        for step in steps:
            kernel = emulator.emulated(step.kernel, step.config)
            names = [operand["name"] for operand in kernel.plan["operands"]]
            arrays = {name: have[step.in_call(name)] for name in names}
            seed = next(_seeds)
            kernel(arrays, step.scalars, neighbours=step.neighbours, seed=seed, late=LATE[seed % len(LATE)])
        return {name: have[name] for name in results}

    return jax.pure_callback(run, results, dict(inputs))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("jax_qla.launch.launch", launch)
    monkeypatch.setattr(implementations, "choose", lambda *_, **__: Choice("cuda", "cuda", "", ""))
    stand_in.forget_traces()
    yield
    stand_in.forget_traces()


PACKED = next(case for case in battery.CASES if str(case) == "packed, long among short-bfloat16")
PACKED = dataclasses.replace(PACKED, name="emulated, packed, V 128", value_dim=128)
"""K and V differ, as in tests/test_build.py, which takes the same kernels."""
LONG = battery.Case("emulated, pieces of more chunks than stages", dtype="bfloat16", tokens=600)
WIDE = battery.Case("emulated, V 128", dtype="bfloat16", tokens=290, value_dim=128)
WIDE_NORMALISED = dataclasses.replace(WIDE, name="emulated, K and V 128, normalised", key_dim=128, l2norm=True)


def _used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that run from here on."""
    emulated = emulator.emulated
    used: list[str] = []

    def recording(name: str, config: Any) -> emulator.Emulated:
        used.append(name)
        return emulated(name, config)

    monkeypatch.setattr(emulator, "emulated", recording)
    return used


@pytest.mark.parametrize(
    ("case", "rows", "room", "together"),
    [rarely(PACKED, 0, True, 4), (PACKED, 128, False, 2), rarely(LONG, 320, True, 4)],
)
def test_whole_and_in_pieces(
    case: battery.Case, rows: int, room: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = _used(monkeypatch)
    assert PACKED.segments
    sizes = (PACKED.tokens, len(PACKED.segments), PACKED.value_heads, PACKED.key_dim, PACKED.value_dim)
    beyond = policy.cut_beyond_in_both(128, *sizes)
    assert max(end - start for start, end in PACKED.segments) > beyond
    monkeypatch.setenv(policy.OVERRIDE, str(rows))
    monkeypatch.setattr(policy, "room_for_both", lambda blocks: room)
    monkeypatch.setattr(policy, "prepared_together", lambda *sizes, **places: together)
    stand_in.forget_traces()
    battery.check(case, cuda, LIMITS)
    assert used.count("compose") == (2 if rows else 0)


@pytest.mark.parametrize("rows", ["0", rarely("128")])
def test_a_gate_that_is_not_a_number(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for one that forgets everything."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    battery.check_not_a_number(dataclasses.replace(PACKED, gates="not a number"), cuda)


@pytest.mark.parametrize("rows", [rarely("0"), rarely("64"), "128"])
def test_final_states_in_place_of_initial_ones(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as apart, in places for more sequences than cuts (pieces of 128 rows) and for fewer: of one that is
    cut, two that are not, and an empty one, whose state stays where it is."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    segments = ((0, 300), (300, 300), (310, 330), (330, 400))
    case = battery.Case("emulated, in place", dtype="bfloat16", segments=segments, tokens=400, value_dim=128)
    x = battery.inputs(case)
    operands: Any = [jnp.asarray(y) for y in (*x[:5], x.initial_state, x.segments)]
    forward_pass: Any = functools.partial(rule.forward, scale=0.1, output_final_state=True)
    apart = forward_pass(*operands, with_residuals=True)
    in_place = forward_pass(*operands, with_residuals=False)
    for a, b in zip(in_place[:2], apart[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    np.testing.assert_array_equal(in_place[1][1], operands[5][1])


@pytest.mark.parametrize(
    ("case", "rows", "function"),
    [
        (PACKED, "128", cuda),
        rarely(PACKED, "0", in_high_precision),
        rarely(LONG, "0", cuda),
        rarely(LONG, "320", that_keeps),
        rarely(WIDE_NORMALISED, "0", cuda),
    ],
)
def test_one_half_of_every_sequence_after_the_other(
    case: battery.Case, rows: str, function: battery.Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `state_gradients` and `gradients` keep of the chunks of one is written over by the other's."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    monkeypatch.setattr(policy, "head_groups", lambda *_, **__: policy.HeadGroups(1, "never", 2))
    used = _used(monkeypatch)
    battery.check(case, functools.partial(function), LIMITS)  # another function, for that one may be compiled
    assert used.count("gradients") == used.count("state_gradients") == 2


@pytest.mark.parametrize("in_one", ["never", rarely("always")])
@pytest.mark.parametrize("rows", [rarely("0"), rarely("64"), "128"])
def test_gradients_of_initial_states_in_place_of_those_of_final_ones(
    rows: str, in_one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, where places are many: the same bits, and that of the empty sequence stays where it is."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    monkeypatch.setattr(one_kernel, "in_one", lambda *_, **__: in_one)
    segments = ((0, 300), (300, 300), (310, 330), (330, 390))
    key_dim = 128 if THOROUGH or in_one == "always" else 64  # of which other tests have most kernels
    case = battery.Case(
        "emulated, in place", dtype="bfloat16", segments=segments, tokens=400, key_dim=key_dim, value_dim=128
    )
    x = battery.inputs(case)
    operands: Any = [jnp.asarray(y) for y in (*x[:5], x.initial_state, x.segments)]
    kernels: Any = rule
    o, final, residuals = kernels.forward(*operands, scale=0.1, output_final_state=True, with_residuals=True, keep="vd")
    used = _used(monkeypatch)
    found = []
    for in_place in (False, True):
        monkeypatch.setattr(policy, "gradients_in_place", lambda *_, found=in_place: found)
        found.append(kernels.backward(*operands, residuals, o, jnp.flip(final, 0), scale=0.1))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    np.testing.assert_array_equal(found[1][5][1], final[2])
    assert used.count("backward") == (2 if in_one == "always" else 0)
    assert used.count("compose") == (4 if int(rows) else 0)


@only_thorough
@pytest.mark.parametrize("initial_state", [True, False])
@pytest.mark.parametrize("pieces", [128, 256])
def test_sequences_that_are_not_cut_have_the_same_bits(
    pieces: int, initial_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card (test_cuda.py). In pieces of 256 rows none is cut."""
    case = dataclasses.replace(PACKED, initial_state=initial_state)
    assert case.segments
    longest = max(end - start for start, end in case.segments)
    sizes = (case.tokens, len(case.segments), case.value_heads, case.key_dim, case.value_dim)
    some = longest > policy.cut_beyond_in_both(pieces, *sizes)
    assert some == (pieces == 128)
    results = []
    for rows in ("0", str(pieces)):
        monkeypatch.setenv(policy.OVERRIDE, rows)
        stand_in.forget_traces()
        results.append(battery.run(case, cuda))
    uncut = [n for n, (start, end) in enumerate(case.segments) if end - start <= 128 or not some]
    rows_of = np.concatenate([np.arange(*case.segments[n]) for n in uncut])
    assert 0 < len(uncut) < len(case.segments) or not some
    for name in results[0]:
        whole, beside = (a[uncut] if name.endswith("state") else a[:, rows_of] for a in (x[name] for x in results))
        assert whole.tobytes() == beside.tobytes(), name


@only_thorough
@pytest.mark.parametrize(
    ("gates", "slow"), [(0.0, 2), (0.0, 1), (-1.0, 2)], ids=["the first", "the second", "the second too"]
)
def test_whichever_launch_summarises_has_the_same_bits(
    gates: float, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card (test_cuda.py), of two heads."""
    case = dataclasses.replace(PACKED, gates=gates)
    x = battery.inputs(case)
    operands = (x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.segments)
    monkeypatch.setenv(policy.OVERRIDE, "128")
    results = []
    for found in (policy.Summarised("shared", 0), policy.Summarised("either", slow)):
        monkeypatch.setattr(policy, "summarised", lambda *_, found=found, **__: found)
        stand_in.forget_traces()
        alone: Any = functools.partial(cuda, scale=case.key_dim**-0.5, save=False)
        results.append(jax.jit(alone)(*(jnp.asarray(operand) for operand in operands)))
    assert np.isfinite(results[0][1]).all()
    for one, other in zip(*results, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


MEASURED = dataclasses.replace(
    WIDE_NORMALISED, name="emulated, lengths", segments=((2, 40), (45, 45), (45, 280)), poisoned=True
)


@pytest.fixture(params=[rarely(128), 64])
def _by_forward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures queries, also where two heads share a key head, of which one then writes what is kept; in blocks of
    either width, of which those of 64 columns have lengths as factors of O."""
    monkeypatch.setattr(policy, "measured_by_forward", lambda *sizes: True)
    monkeypatch.setattr(policy, "value_tile", lambda *sizes: request.param)
    stand_in.forget_traces()


@pytest.mark.parametrize("queries", ["unit", "alike"])
@pytest.mark.usefixtures("_by_forward")
def test_lengths_of_queries_by_forward(queries: Any) -> None:
    """Of numbers alike, too, whose squares, four of which are added in bfloat16, are all rounded the same way."""
    case = dataclasses.replace(MEASURED, queries=queries)
    x, expected = battery.inputs(case), battery.reference(case)
    alone: Any = functools.partial(cuda, scale=case.key_dim**-0.5, l2norm=True)
    operands = (x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.segments)
    found = jax.jit(alone)(*(jnp.asarray(operand) for operand in operands))
    for name, result in zip(("o", "final_state"), found, strict=True):
        difference = np.asarray(result, np.float64) - expected[name]
        assert np.linalg.norm(difference) <= LIMITS.of(name) * np.linalg.norm(expected[name]), name


@only_thorough
@pytest.mark.parametrize("rows", [0, 128])
@pytest.mark.parametrize("save", [None, True, False])
@pytest.mark.usefixtures("_by_forward")
def test_lengths_of_queries_kept_by_forward(rows: int, save: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.OVERRIDE, str(rows))
    battery.check(MEASURED, functools.partial(cuda, save=save), LIMITS)


IN_ONE = [
    battery.Case(f"in one, {name}", dtype=dtype, key_dim=128, value_dim=128, **sizes)
    for name, dtype, sizes in (
        ("one chunk", "bfloat16", {"tokens": 64, "key_heads": 2, "value_heads": 2}),
        ("a tail", "bfloat16", {"tokens": 200, "key_heads": 1, "value_heads": 2}),
        ("a tail", "float16", {"tokens": 200, "key_heads": 1, "value_heads": 2}),
        ("faint beta", "bfloat16", {"tokens": 300, "key_heads": 1, "value_heads": 1, "beta": "some faint"}),
        ("normalised", "bfloat16", {"tokens": 300, "key_heads": 1, "value_heads": 2, "l2norm": True}),
        ("three of a key head", "bfloat16", {"tokens": 100, "key_heads": 1, "value_heads": 3}),
        ("four of a key head", "bfloat16", {"tokens": 130, "key_heads": 2, "value_heads": 8}),
        (
            "packed",
            "bfloat16",
            {
                "tokens": 500,
                "key_heads": 2,
                "value_heads": 4,
                "segments": ((3, 3), (5, 330), (340, 341), (350, 470)),
                "poisoned": True,
            },
        ),
    )
]


@pytest.mark.parametrize(
    "case", [case if case.name == "in one, four of a key head" else rarely(case) for case in IN_ONE], ids=str
)
def test_recurrence_and_gradients_in_one(case: battery.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one and of two value heads of a key head, which then read each other's shared memory."""
    monkeypatch.setenv(policy.IN_ONE_OVERRIDE, "1")
    used = _used(monkeypatch)
    battery.check(case, cuda, LIMITS)
    assert "backward" in used
    assert not {"state_gradients", "gradients"} & set(used)


@pytest.mark.parametrize("fenced", [rarely(True), False])
def test_a_fence_before_another_block_is_told(fenced: bool) -> None:
    """Without it a Hopper card once in a while reads what a tile held before (`test_thousands_of_calls_repeat`)."""
    source, plan = emulator.lowered("backward", backward.Config())
    assert source.count("jax_qla_tell<true>(") == 2
    if not fenced:
        source = source.replace("jax_qla_tell<true>(", "jax_qla_tell<false>(")
    kernel = emulator.Emulated(source, plan)
    random = np.random.default_rng(0)
    tokens, dtype = 100, jnp.bfloat16

    def rows(*shape: int, dtype: Any = dtype) -> np.ndarray:
        return random.normal(size=shape).astype(dtype) / 8

    of_keys, of_values, of_gates = (tokens, 1, 128), (tokens, 2, 128), (tokens, 2)
    arrays = {name: rows(*of_keys) for name in ("q", "k", "dq", "dk")}
    arrays |= {name: rows(*of_values) for name in ("v", "do", "vd", "dv")}
    arrays |= {name: -np.abs(rows(*of_gates, dtype=np.float32)) for name in ("g", "gamma", "beta", "dg", "dbeta")}
    state = (1, 2, 128, 128)
    arrays |= {name: rows(*state, dtype=np.float32) for name in ("d_final_state", "d_initial_state")}
    arrays |= {"a": rows(2, tokens, 64).view(np.int16), "h": rows(2, 2, 2, 128, 64)}
    arrays |= {"segments": np.array([[0, tokens]], np.int32), "progress": np.zeros((0, 2), np.int32)}
    arrays["balanced"] = np.zeros(1, np.int32)
    arrays |= {name: np.zeros((0, width), np.int32) for name, width in (("pieces", 4), ("spans", 2))}
    arrays["leaving"] = np.zeros((0, 2, 128, 128), np.float32)
    scalars = {
        "ratio": 2,
        "scale": 0.1,
        "first_head": 0,
        "heads": 2,
        "width": 2,
        "only": ALWAYS,
        "in_place": 0,
        "firsts": -1,
    }
    with nullcontext() if fenced else pytest.raises(RuntimeError, match="without a fence of the block that wrote it"):
        kernel(arrays, scalars, neighbours=2, seed=0)


@pytest.mark.parametrize("fenced", [rarely(True), False])
def test_a_fence_before_keys_come_over_a_first_state(fenced: bool) -> None:
    """Without it an H200 has now and then read some of them (`test_thousands_of_forward_passes_repeat`)."""
    source, plan = emulator.lowered("forward", forward.Config())
    fence = r"(jax_qla_take_state<128>\([^\n]*\n\s*)tl::fence_proxy_async\(\);"
    assert len(re.findall(fence, source)) == 1
    if not fenced:
        source = re.sub(fence, r"\1", source)
    kernel = emulator.Emulated(source, plan)
    random = np.random.default_rng(0)
    tokens = 200

    def rows(*shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
        return random.normal(size=shape).astype(dtype) / 8

    arrays = {name: rows(tokens, 1, 128) for name in ("q", "k")}
    arrays |= {name: rows(tokens, 1, 128) for name in ("v", "o")}
    arrays |= {name: -np.abs(rows(tokens, 1, dtype=np.float32)) for name in ("gamma", "beta")}
    arrays |= {name: rows(1, 1, 128, 128, dtype=np.float32) for name in ("initial_state", "final_state")}
    arrays |= {"a": rows(1, tokens, 64).view(np.int16), "segments": np.array([[0, tokens]], np.int32)}
    arrays |= {name: np.zeros((0, width), np.int32) for name, width in (("pieces", 4), ("spans", 2))}
    arrays |= {"entering": np.zeros((0, 1, 128, 128), np.float32), "bounds": arrays["spans"]}
    scalars = {"ratio": 1, "scale": 0.1, "first_head": 0, "heads": 1, "awaits": forward.NOTHING, "cut_beyond": -1}
    scalars |= {"in_place": 0, "firsts": -1}
    scalars |= policy.NO_HALVES._asdict()
    with nullcontext() if fenced else pytest.raises(RuntimeError, match="arrives at a barrier, without a proxy fence"):
        kernel(arrays, scalars, seed=0)


@only_thorough
@pytest.mark.parametrize("balanced", [True, False])
def test_packed_sequences_in_one_if_balanced(balanced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three kernels run, and what one of them would write if it took the batch for its own is looked for."""
    segments = ((0, 130), (140, 270), (270, 398)) if balanced else ((0, 130), (140, 290), (290, 398))
    sizes: Any = {"tokens": 400, "key_dim": 128, "value_dim": 128, "key_heads": 1, "value_heads": 2}
    case = battery.Case(f"in one if balanced, {balanced}", dtype="bfloat16", segments=segments, poisoned=True, **sizes)
    monkeypatch.setattr(one_kernel, "in_one", lambda *_, **__: "if balanced")
    monkeypatch.setattr(policy, "balance", lambda *_, **__: policy.Balance(64 * 66, 72, 1500))
    written: dict[str, bool] = {}
    run = emulator.Emulated.__call__

    def recording(kernel: emulator.Emulated, arrays: Mapping[str, Any], *more: Any, **options: Any) -> None:
        before = np.array(arrays["dv"]) if "dv" in arrays else None
        run(kernel, arrays, *more, **options)
        if before is not None:
            written[kernel.plan["name"]] = not np.array_equal(before.view(np.int16), arrays["dv"].view(np.int16))

    monkeypatch.setattr(emulator.Emulated, "__call__", recording)
    battery.check(case, cuda, LIMITS)
    assert written.pop("backward_kernel") is balanced
    assert written.pop("state_gradients_kernel") is not balanced
    assert set(written) == {"gradients_kernel"}


@only_thorough
@pytest.mark.parametrize("value_heads", [2, 4])
def test_a_shard_in_one(value_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence that goes on beyond a device: pieces that each have a state, the first and the last empty."""
    monkeypatch.setenv(policy.OVERRIDE, "64")
    sizes: Any = {"tokens": 200, "key_dim": 128, "value_dim": 128, "key_heads": 1, "value_heads": value_heads}
    x = battery.inputs(battery.Case("a shard in one", dtype="bfloat16", **sizes))
    rows: Any = [jnp.asarray(y) for y in x[:5]]
    state, do, d_final = (jnp.asarray(y) for y in (x.initial_state, x.do, x.d_final_state))
    cut = policy.shard_cut(200, 1, value_heads, 128, 128)
    assert cut.pieces == 4
    kernels: Any = rule
    used = _used(monkeypatch)

    def gradients(chosen: str) -> list[np.ndarray]:
        monkeypatch.setattr(one_kernel, "in_one", lambda *_, **__: chosen)
        _, _, residuals, pieces = kernels.summary(*rows, state, None, cut=cut, with_residuals=True)
        options: dict[str, Any] = {"cut": cut, "scale": 0.1}
        _, adjoint = kernels.state_gradient(*rows, None, None, residuals, do, d_final, pieces, **options)
        found = kernels.backward(*rows, state, None, residuals, do, d_final, pieces, adjoint, **options)
        return [np.asarray(y, np.float32) for y in found]

    expected = gradients("never")
    assert "backward" not in used
    for found, wanted in zip(gradients("always"), expected, strict=True):
        assert np.linalg.norm(found - wanted) <= 5e-3 * np.linalg.norm(wanted)
    assert "backward" in used


@only_thorough
@pytest.mark.parametrize("precision", [None, "high"])
def test_heads_with_keys_of_their_own(precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "prepared_together", lambda *sizes, **places: 4)
    emulated = emulator.emulated

    def of_own_keys(name: str, config: Any) -> emulator.Emulated:
        assert name != "prepare" or config.keys == 4
        return emulated(name, config)

    monkeypatch.setattr(emulator, "emulated", of_own_keys)
    case = next(case for case in battery.CASES if str(case) == "ratio 1, K 64, V 128, batch 2-bfloat16")
    battery.check(case, functools.partial(cuda, precision=precision), HIGH if precision else LIMITS)


@only_thorough
@pytest.mark.parametrize("precision", [None, "high"])
def test_dg_over_draws(precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of one shape over 16 draws of its inputs. All results' hardly differ but dg's, from 1 to 8e-3 (3.5e-3
    in the mean of 320 draws, more than 6e-3 in 6 % of them), so that one draw says little of dg, unless in high
    precision."""
    monkeypatch.setenv(policy.OVERRIDE, "0")
    case = next(case for case in battery.CASES if str(case) == "packed, all but one empty-bfloat16")
    anything = battery.Limits(o=1, final_state=1, gradients=1, head=100, position=100, of_terms=precision is None)
    function = functools.partial(cuda, precision=precision)
    draws = [battery.check(dataclasses.replace(case, name=f"draw {n}"), function, anything) for n in range(16)]
    found = {name: float(np.mean([draw[name].whole for draw in draws])) for name in draws[0]}
    limits = {
        "o": 3.6e-3,
        "final_state": 7.0e-4,
        "dq": 3.6e-3,
        "dk": 4.5e-3,
        "dv": 3.0e-3,
        "dg": 4.5e-3,
        "dbeta": 3.6e-3,
        "d_initial_state": 2.5e-4,
    }
    if precision:
        limits |= {"o": 2.8e-3, "final_state": 2e-5, "dq": 2e-3, "dk": 2e-3, "dv": 2e-3, "dg": 3e-4, "dbeta": 4e-4}
        assert max(draw["dg"].whole for draw in draws) <= 1e-3
    assert {name: error for name, error in found.items() if error > limits[name]} == {}


@only_thorough
@pytest.mark.parametrize("key_dim", [64, 128])
def test_heads_of_a_block_of_prepare(key_dim: int) -> None:
    random = np.random.default_rng(0)
    bounds = np.array([[0, 64], [70, 103]], np.int32)
    rows = np.concatenate([np.arange(start, end) for start, end in bounds])
    tokens = 103
    beyond = np.ones(tokens * 64, bool)  # elements of a head's a that are in no block of an inverse
    for start, end in bounds:
        count = -(-(end - start) // 8)
        beyond[start * 64 : (start + count * (count + 1) // 2) * 64] = False
    sizes = ((3, 1), (2, 2), (3, 3), (1, 4), (2, 5))  # key heads, value heads of each
    of_one_key = ((3, 1), (2, 2), (1, 4), (2, 4))
    of_own_keys = ((1, 1), (2, 1), (7, 1), (8, 1))
    for (key_heads, ratio), keys in [
        *((x, 2) for x in sizes),
        *((x, 1) for x in of_one_key),
        *((x, 4) for x in of_own_keys),
    ]:
        kernel = emulator.emulated("prepare", prepare.Config(key_dim, l2norm=True, keys=keys))
        heads = key_heads * ratio
        given = {
            **{x: (random.normal(size=(tokens, key_heads, key_dim)) / 4).astype(jnp.bfloat16) for x in ("q", "k")},
            "g": -random.uniform(size=(tokens, heads)).astype(np.float32),
            "beta": random.uniform(size=(tokens, heads)).astype(np.float32),
            "bounds": bounds,
        }
        given["q"][0, 0] = given["k"][0, 0] = 0
        expected = jax.jit(functools.partial(prepare.specification, ratio=ratio, l2norm=1))(*given.values())
        of_a_block = (4,) if keys == 4 else (1, 2) if ratio == 1 else (2, 4)
        for together in (n for n in of_a_block if keys > 1 or ratio % n == 0):
            of_rows = {"lengths": (key_heads,), "query_lengths": (key_heads,)}
            shapes = {"gamma": (heads,), **of_rows, "o": (heads, 64)}
            found = {name: np.full((tokens, *shape), np.nan, np.float32) for name, shape in shapes.items()}
            found["a"] = np.full((heads, tokens, 64), -1, np.int16)
            found["o"] = found["o"].astype(jnp.bfloat16)
            kernel(given | found, {"ratio": ratio, "together": together})
            results = dict(zip(("a", "gamma", *of_rows), expected, strict=True))
            chunks = jnp.asarray(tables.chunk_table(jnp.asarray(bounds), tokens))
            unpack = functools.partial(specification.unpack_inverses, chunks=chunks, dtype=jnp.bfloat16)
            inverse, correct = (np.asarray(unpack(jnp.asarray(x))) for x in (found["a"], results.pop("a")))
            np.testing.assert_allclose(inverse, correct, rtol=2e-2, atol=1e-3, err_msg="a")
            assert np.all(found["a"].reshape(heads, -1)[:, beyond] == -1)
            for name, reference in results.items():
                which = slice(None) if name == "query_lengths" else rows
                ours, right = (np.asarray(x, np.float32)[which] for x in (found[name], reference))
                what = f"{name} of {key_heads} key heads, {ratio} value heads each, {together} a block"
                np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-3, err_msg=what)
            np.testing.assert_array_equal(np.asarray(found["o"], np.float32)[64:70], 0)


def test_prepare_where_slots_take_another_dimension_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the grid's second dimension, which ends at 65535, of one that ends after two, and a block too many."""
    random = np.random.default_rng(0)
    bounds = np.array([[0, 64], [70, 103], [103, 103]], np.int32)
    tokens = 103
    given: dict[str, np.ndarray] = {
        "q": np.zeros((tokens, 2, 64), jnp.bfloat16),
        "k": (random.normal(size=(tokens, 2, 64)) / 4).astype(jnp.bfloat16),
        "g": -random.uniform(size=(tokens, 4)).astype(np.float32),
        "beta": random.uniform(size=(tokens, 4)).astype(np.float32),
        "bounds": bounds,
    }
    config = prepare.Config(key_dim=64, keys=1)
    as_it_is = emulator.emulated("prepare", config)
    monkeypatch.setattr(macros, "PLACES", 2)
    program = functools.partial(prepare.program, config)
    results: list[dict[str, np.ndarray]] = []
    for kernel in (as_it_is, emulator.Emulated(*lowering.lower_program(program, prepare.PASS_CONFIGS))):
        found: dict[str, np.ndarray] = {
            "a": np.full((4, tokens, 64), -1, np.int16),
            "gamma": np.full((tokens, 4), np.nan, np.float32),
            "o": np.full((tokens, 4, 64), np.nan, jnp.bfloat16),
        }
        kernel(given | found, {"ratio": 2, "together": 2})
        results.append(found)
    assert tables.slot_count(tokens, len(bounds)) % 2 == 1, "no block too many"
    for name, x in results[0].items():
        assert x.tobytes() == results[1][name].tobytes(), name
    assert not np.isnan(results[1]["gamma"][70:103]).any()


@only_thorough
@pytest.mark.parametrize("in_one", ["0", "1"])
def test_sequences_that_take_another_dimension_of_the_grid(in_one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, of kernels that go along sequences."""
    recurrences = (forward, states, states_from_vd, state_gradients, backward)
    modules: dict[str, Any] = {module.__name__.rpartition(".")[2]: module for module in recurrences}
    monkeypatch.setattr(macros, "PLACES", 2)
    monkeypatch.setenv(policy.OVERRIDE, "0")
    monkeypatch.setenv(policy.IN_ONE_OVERRIDE, in_one)
    used: set[str] = set()
    others = emulator.emulated

    @functools.cache
    def emulated(name: str, config: Any) -> emulator.Emulated:
        used.add(name)
        if name not in modules:
            return others(name, config)
        program = functools.partial(modules[name].program, config)
        return emulator.Emulated(*lowering.lower_program(program, modules[name].PASS_CONFIGS))

    monkeypatch.setattr(emulator, "emulated", emulated)
    segments = ((0, 130), (130, 130), (140, 200), (200, 290), (290, 290))
    sizes: Any = {"dtype": "bfloat16", "tokens": 290, "key_dim": 128, "value_dim": 128}
    case = battery.Case("another dimension of the grid", segments=segments, **sizes)
    for function in (cuda, that_recomputes):
        stand_in.forget_traces()
        battery.check(case, function, LIMITS)
    wanted = {"backward" if in_one == "1" else "state_gradients"}
    assert {"forward", "states", "states_from_vd"} | wanted <= used


def test_products_of_prepare_by_how_large_the_matrix_is() -> None:
    """Single numbers of fp16 where L is small, else sums of two of bf16. Either way products
    with the inverse are as accurate as with the exact one rounded, or nearly; and chunks are marked that may lengthen a
    state."""
    random = np.random.default_rng(0)
    ones, apart = np.ones(64), random.normal(size=(5, 64, 128))
    alike = random.normal(size=128)
    beta = 1 / (1 + np.exp(-random.normal(size=64)))
    cases = {  # keys, beta, g, whether L is small
        "random keys": (apart[0], beta, 0 * ones, True),
        "keys somewhat alike": (apart[1] + 0.3 * alike, beta, -0.05 * ones, True),
        "keys alike that decay": (0.2 * apart[2] + alike, beta, -0.3 * ones, True),
        "some beta 0": (apart[2], np.where(np.arange(64) % 3 == 0, 0, beta), 0 * ones, True),
        "a negative beta": (apart[0], np.where(np.arange(64) == 40, -beta, beta), 0 * ones, True),
        "a faint row": (apart[0], np.where(np.arange(64) == 40, FAINT / 8, beta), 0 * ones, False),
        "large beta": (apart[3], 2.1 * ones, 0 * ones, False),
        "keys alike": (0.5 * apart[4] + alike, ones, -0.01 * ones, False),
    }
    heads = len(cases)
    keys = np.stack([k / np.linalg.norm(k, axis=1, keepdims=True) for k, *_ in cases.values()], 1).astype(jnp.bfloat16)
    given: dict[str, np.ndarray] = {
        "q": keys,
        "k": keys,
        "g": np.stack([g for *_, g, _ in cases.values()], 1).astype(np.float32),
        "beta": np.stack([b for _, b, *_ in cases.values()], 1).astype(np.float32),
        "bounds": np.array([[0, 64]], np.int32),
    }
    chunks = jnp.asarray(tables.chunk_table(jnp.asarray(given["bounds"]), 64))
    inverses: list[np.ndarray] = []
    source, plan = emulator.lowered("prepare", prepare.Config())
    threshold = f"kSmall = {inversion.SMALL}f"
    assert source.count(threshold) == 1
    for text in (source, source.replace(threshold, "kSmall = -1.f")):  # as it is, and always by splits
        found: dict[str, np.ndarray] = {
            "a": np.full((heads, 64, 64), -1, np.int16),
            "gamma": np.full((64, heads), np.nan, np.float32),
            "o": np.zeros((64, heads, 64), jnp.bfloat16),
        }
        emulator.Emulated(text, plan)(given | found, {"ratio": 1, "together": 2})
        unpacked = specification.unpack_inverses(jnp.asarray(found["a"]), chunks, jnp.bfloat16)
        inverses.append(np.asarray(unpacked, np.float64)[1])  # slot 0 is of rows before the sequence
    gamma = np.cumsum(given["g"].astype(np.float64), 0)
    vectors = random.normal(size=(64, 100))
    for head, (name, (*_, small)) in enumerate(cases.items()):
        k, b = keys[:, head].astype(np.float64), given["beta"][:, head]
        decays = np.exp(np.minimum(gamma[:, None, head] - gamma[None, :, head], 0))
        lower = np.tril(b[:, None] * (k @ k.T) * decays, -1)
        assert (np.sum(lower**2) <= inversion.SMALL and np.min(b[b > 0]) >= FAINT) == small, name
        ours, by_splits = (x[:, head] for x in inverses)
        assert np.array_equal(ours, by_splits) != small, name
        strength = b * np.sum(k**2, 1)
        marked = bool(found["gamma"][-1, head].view(np.int32) & STRETCHES)
        assert marked == np.any((strength > 2.001) | (strength < 0)), name
        inverse = np.linalg.inv(np.eye(64) + lower)
        rounded = inverse.astype(jnp.bfloat16).astype(np.float64)
        error, least = (np.linalg.norm((x - inverse) @ vectors) for x in (ours, rounded))
        assert error <= (1.05 if small else 1.01) * least, f"{name}: {error / least}"


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "tile", "dtype"),
    [(128, 128, 128, "bfloat16"), rarely(64, 128, 64, "bfloat16"), rarely(128, 64, 64, "float16")],
)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_states_from_vd(key_dim: int, value_dim: int, tile: int, dtype: str, in_pieces: bool) -> None:
    """More chunks than stages, none, one of a few rows; of all heads and of the second half of them."""
    random = np.random.default_rng(tile)
    bounds = np.array([[0, 400], [405, 405], [410, 420], [420, 548]], np.int32)
    tokens, key_heads, heads = 560, 2, 4
    gamma = -np.abs(random.normal(size=(tokens, heads))).astype(np.float32)
    given = {
        "k": (random.normal(size=(tokens, key_heads, key_dim)) / 8).astype(dtype),
        "vd": random.normal(size=(tokens, heads, value_dim)).astype(dtype),
        "gamma": gamma,
        "initial_state": random.normal(size=(len(bounds), heads, key_dim, value_dim)).astype(np.float32),
        "segments": bounds,
        "pieces": np.zeros((0, 4), np.int32),
        "entering": np.zeros((0, heads, key_dim, value_dim), np.float32),
    }
    if in_pieces:  # the first is cut behind 256 rows, and the last is a place that no piece has
        position, sequence = [FIRST, LAST, FIRST + LAST, FIRST + LAST], [0, 0, 1, 1]
        bounds = np.array([[0, 256], [256, 400], [405, 548], [548, 548]], np.int32)
        given["segments"] = bounds
        given["pieces"] = np.concatenate([bounds, np.stack([sequence, position], axis=1)], axis=1).astype(np.int32)
        given["entering"] = random.normal(size=given["initial_state"][:1].shape).astype(np.float32)
        given["initial_state"] = given["initial_state"][:2]
    chunks = jnp.asarray(tables.chunk_table(jnp.asarray(bounds), tokens))
    right_states: Any = states_from_vd.specification
    kernel = emulator.emulated("states_from_vd", states_from_vd.Config(key_dim, value_dim, dtype, tile))
    for first, count in ((0, heads), (2, 2)):
        wide = [jnp.asarray(x, jnp.int32 if x.dtype == np.int32 else jnp.float32) for x in given.values()]
        expected = right_states(*wide, chunks, ratio=2, first_head=first, heads=count)
        found = np.full(expected.shape, np.nan, dtype)
        scalars = {"ratio": 2, "first_head": first, "awaits": states.EVERYTHING, "cut_beyond": -1}
        kernel(given | {"h": found, "bounds": bounds}, scalars)
        filled = np.flatnonzero(np.asarray(chunks[:, 2] > 0)) - 1
        ours, right = (np.asarray(x, np.float32)[filled] for x in (found, expected))
        assert np.linalg.norm(ours - right) <= 4e-3 * np.linalg.norm(right)
        np.testing.assert_allclose(ours, right, atol=3e-2 * np.abs(right).max())


@every_value
@pytest.mark.parametrize("of_pieces", [0, 1])
@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize(("columns", "reverse"), [(16, False), (16, True), (64, True)])
def test_pieces_with_and_without_products(columns: int, reverse: bool, together: int, of_pieces: int) -> None:
    """Of the first head no piece takes a product, of the second every one between the ends, of the third some. One
    after the other by the same blocks, or so many sequences `together`."""
    random = np.random.default_rng(columns)
    counts, heads = (6, 1, 5), 3
    rows = sum(counts) if of_pieces else sum(counts) - len(counts)
    chains = np.array([[0, 6, 0], [0, 0, 0], [7, 5, 2]], np.int32)  # the second sequence is not cut
    forgotten = np.stack([np.ones(rows), np.zeros(rows), random.integers(0, 2, rows)], axis=1).astype(np.int32)
    for first, count, n in chains[::2]:
        forgotten[[first, first + count - 1] if of_pieces else [first - n]] = 1

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    arrays = {
        "transition": np.asarray(specification.map_blocks(jnp.asarray(normal(rows, heads, 64, 64) / 16))),
        "response": normal(rows, heads, 64, 64),
        "forgotten": forgotten,
        "initial_state": normal(len(counts), heads, 64, 64),
        "chains": chains,
    }
    firsts = -1 if of_pieces else rows  # where first states go
    operands = map(jnp.asarray, arrays.values())
    expected = np.asarray(compose.specification(*operands, reverse=reverse, of_pieces=of_pieces, firsts=firsts))
    arrays |= {"entering": np.full(expected.shape, np.nan, np.float32), "bounds": np.zeros((3, 2), np.int32)}
    if not of_pieces:
        arrays["entering"][:rows] = arrays["response"]
        arrays["response"] = arrays["entering"][:rows]
    scalars = {"cut_beyond": -1, "of_pieces": of_pieces, "firsts": firsts, "together": together}
    emulator.emulated("compose", compose.Config(64, 64, reverse, columns))(arrays, scalars)
    np.testing.assert_allclose(arrays["entering"], expected, rtol=1e-4, atol=1e-4)
    assert np.isnan(expected).any() == (bool(of_pieces) or firsts >= 0)  # of the sequence that is not cut


CASES = [case for case in battery.CASES if case.dtype != "float32" and case.tokens <= 400]


@pytest.mark.parametrize("precision", [None, "high"])
@pytest.mark.parametrize("rows", ["0", "128"], ids=["whole", "in pieces"])
@pytest.mark.parametrize("case", CASES if THOROUGH else [], ids=str)
def test_battery(case: battery.Case, rows: str, precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.dtype == "float16" and precision:
        pytest.skip("bfloat16 only")
    if case.name in MISSED and not precision:
        pytest.skip("limits not reached")
    monkeypatch.setenv(policy.OVERRIDE, rows)
    if precision:
        battery.check(case, functools.partial(cuda, precision=precision), HIGH)
    else:
        battery.check(case, cuda, IDENTICAL if case.keys.startswith("identical") else LIMITS)


@functools.cache
def _order() -> emulator.Emulated:
    return emulator.Emulated(*lowering.lower_program(programs.order, {}))


@pytest.mark.parametrize("count", [1, 2, 31, 32, 70, 300])
@pytest.mark.parametrize("longest", [0, 64, 700])
def test_blocks_of_long_sequences_come_first(count: int, longest: int) -> None:
    """Each comes once, up to 32 in the order of their lengths, of more those of a kind among every 256 in a row as they
    come, and all where they are short."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(0, longest + 1, count) * rng.integers(0, 2, count)
    segments = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1).astype(np.int32)
    found, tokens = np.full(count, -1, np.int32), int(lengths.sum())
    _order()({"segments": segments, "found": found}, {"tokens": tokens})
    kind = np.sum([lengths * count <= tokens * factor for factor in (2, 1, 0.5)], axis=0) if count > 32 else -lengths
    in_order = np.lexsort((np.arange(count), kind, np.arange(count) // 256))
    np.testing.assert_array_equal(found, in_order if tokens // 64 >= count else np.arange(count))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("count", "heads"), [(33, 4), (70, 1), (300, 2)])
@pytest.mark.parametrize("tokens", [640, 64 * 1024])
def test_blocks_of_places_that_nobody_takes_leave_first(count: int, heads: int, tokens: int, cut: bool) -> None:
    """But for the first 32 places, the last of every 256 and a round of blocks. None leaves that has a sequence, or a
    piece of one, or rows of none behind it."""
    kernel, rows = emulator.Emulated(*lowering.lower_program(programs.leaving, {})), tokens // 8
    rng = np.random.default_rng(count + heads)
    for taken, gap in ((1, 0), (20, 0), (20, 9), (count // 2, 0), (count, 0)):
        lengths = np.zeros(count, int)
        lengths[:taken] = rng.multinomial(tokens, np.ones(taken) / taken) * (rng.random(taken) < 0.8)
        starts = np.cumsum(lengths) - lengths
        starts[taken + 9 :] += gap  # behind a place that nobody takes
        segments = np.stack([starts, starts + lengths], axis=1).astype(np.int32)
        cuts = tables.cut_count(tokens + gap, rows) if cut else 0
        stays = np.zeros((count + cuts, heads), np.int32)
        kernel({"segments": segments, "stays": stays}, {"cuts": cuts})
        pieces = [segments]  # or whole sequences, if none is cut
        if cut:
            pieces += [tables.piece_table(segments, count + cuts, x)[:, :2] for x in (rows, 1 << 20)]
        for lies in map(np.ascontiguousarray, pieces):
            order = np.full(len(lies), -1, np.int32)
            _order()({"segments": lies, "found": order}, {"tokens": tokens})
            begins, ends = lies[order].T
            assert stays[: len(order)][ends > begins].all()
        if not cut:
            beyond = np.append(starts[1:], max(tokens, starts[-1]))[order]  # what lies before these rows is of none
            assert stays[beyond > ends].all()
        place, head = np.indices(stays.shape)
        last = np.full_like(place, count - 1) if cut else np.minimum(place | 255, count - 1)
        asked = (
            (place >= 32) & (place >= cuts) & (place - cuts < last) & (place * heads + head >= policy.MULTIPROCESSORS)
        )
        empty = starts[np.minimum(place - cuts, count - 1)] == segments[last, 1]
        np.testing.assert_array_equal(stays == 0, asked & empty)


@pytest.mark.parametrize("count", [1, 33, 256])
def test_all_blocks_leave_where_no_sequence_is_cut(count: int) -> None:
    kernel, lengths = emulator.Emulated(*lowering.lower_program(programs.leaving_uncut, {})), np.full(count, 100)
    lengths[count // 2] = 200
    bounds = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1).astype(np.int32)
    for beyond, stay in ((-1, True), (199, True), (200, False)):
        stays = np.zeros((3, 2), np.int32)
        kernel({"bounds": bounds, "stays": stays}, {"cut_beyond": beyond})
        assert (stays == stay).all()


@pytest.mark.parametrize("in_one", ["if balanced", rarely("always"), rarely("never")])
@pytest.mark.parametrize("rows", ["0", rarely("64")])
def test_places_that_nobody_takes_change_nothing(rows: str, in_one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a call without them: whole sequences, pieces, slots of chunks, states in place or none at all."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    monkeypatch.setattr(policy, "cut_beyond_in_both", lambda rows, *_: rows)  # which goes by how many places there are
    monkeypatch.setattr(one_kernel, "in_one", lambda *_, **__: in_one)
    taken = ((0, 100), (100, 100), (110, 180))
    case = battery.Case("emulated, places", dtype="bfloat16", segments=taken, tokens=200, key_dim=128, value_dim=128)
    x = battery.inputs(case)
    kernels: Any = rule

    def of_places(count: int) -> list[Any]:
        segments = np.pad(np.asarray(taken, np.int32), ((0, count - 3), (0, 0)), constant_values=180)
        state = jnp.pad(jnp.asarray(x.initial_state), ((0, count - 3), *((0, 0),) * 3), constant_values=1)
        operands: Any = [jnp.asarray(y) for y in (*x[:5], state, segments)]
        o, final, _ = kernels.forward(*operands, scale=0.1, output_final_state=True, with_residuals=False)
        assert (final[3:] == 1).all()
        operands[5] = None
        of_none, _, residuals = kernels.forward(
            *operands, scale=0.1, output_final_state=False, with_residuals=True, keep="vd"
        )
        return [o, final[:3], of_none, *kernels.backward(*operands, residuals, o, None, scale=0.1)[:5]]

    for a, b in zip(of_places(150), of_places(3), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@functools.cache
def _in_halves() -> emulator.Emulated:
    return emulator.Emulated(*lowering.lower_program(programs.in_halves, {}))


def _halved(lengths: Sequence[int], heads: int, halves: policy.Halves) -> list[tuple[int, int, int]]:
    """(sequence, head, half) of the blocks of sequences of so many tokens, those first that take longest."""
    chunks = [-(-int(length) // 64) for length in lengths]
    everything, some = sum(chunks), sum(count > 0 for count in chunks)
    is_long = [
        count >= halves.least
        and 64 * count > halves.share * everything
        and (halves.share * some <= 48 or 4 * count * some > 5 * everything)
        for count in chunks
    ]
    times = [count * (11 if long else 16) for count, long in zip(chunks, is_long, strict=True)]
    order = sorted(range(len(chunks)), key=lambda n: (-times[n], n))
    halved = {n for n in order if is_long[n]}
    # Of sequences that are alike, those of a last round of blocks, if their halves run at once.
    last = -(-(some * heads % policy.MULTIPROCESSORS) // heads)
    alike = not halved and 8 * max(chunks) * some <= 9 * everything
    if alike and some * heads > policy.MULTIPROCESSORS >= 2 * last * heads:
        halved = set(order[some - last : some])
    return [(n, head, half) for n in order for head in range(heads) for half in ((0, 1) if n in halved else (-1,))]


@pytest.mark.parametrize(("count", "heads"), [(2, 64), (3, 32), (9, 8), (16, 8), (32, 3), (20, 8), (10, 32)])
def test_blocks_where_sequences_are_halved(count: int, heads: int) -> None:
    """Each half and each whole head comes once; there are blocks for as many sequences in halves as there can be."""
    rng = np.random.default_rng(count)
    halves = policy.halves(count, heads)
    assert halves
    found_halved = []
    for spread, empty in ((0, 0), (0.02, 0.1), (0.5, 0.1), (1, 0.1), (3, 0.1), (0.3, 0.95), (-4, 0)):
        lengths = np.round(500 * np.exp(spread * rng.normal(size=count))).astype(int) * (rng.random(count) >= empty)
        lengths[0] = 3000 if spread > 0 else 500
        if spread < 0:
            lengths = np.arange(count) % 3
        segments = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1).astype(np.int32)
        blocks = np.full((heads * (count + halves.halved), 4), -2, np.int32)
        scalars = {"heads": heads, "share": halves.share, "least": halves.least}
        _in_halves()({"segments": segments, "found": blocks}, scalars)
        expected = _halved(lengths.tolist(), heads, halves)
        assert len(expected) <= len(blocks)
        np.testing.assert_array_equal(blocks[:, 0] != 0, np.arange(len(blocks)) < len(expected))
        found = [tuple(block) for block in blocks[: len(expected), 1:].tolist()]
        found_halved.append(len(expected) > heads * count)
        assert found == expected
    assert any(found_halved)
    rounds = count * heads > policy.MULTIPROCESSORS
    assert rounds or not all(found_halved)
    assert found_halved[0] == rounds  # of equal ones the last round


def _ends(lengths: Sequence[int], blocks: int, multiprocessors: int) -> int:
    """When the last block ends, of so many a sequence, each of which begins where a multiprocessor is free."""
    busy = [0] * multiprocessors
    for length in lengths:
        for _ in range(blocks):
            heapq.heappush(busy, heapq.heappop(busy) + length)
    return max(busy)


@pytest.mark.parametrize("count", [2, 7, 16, 32, 33, 64, 200])
def test_balanced_sequences(count: int) -> None:
    """The kernel finds what the definition says; and what is balanced ends in time."""
    kernel = emulator.emulated("balance", balance.Config())
    rng = np.random.default_rng(count)
    found = []
    for spread in (0.02, 0.3, 1.0, 3.0):
        for heads in (8, 32, 64):
            lengths = (
                np.round(500 * np.exp(spread * rng.normal(size=count))).astype(int) * rng.integers(0, 4, count) // 3
            )
            segments = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1).astype(np.int32)
            scalars = policy.balance(heads, ratio=2)
            result = np.full(1, -1, np.int32)
            kernel({"segments": segments, "balanced": result}, scalars._asdict())
            found.append(balance.balanced(lengths.tolist(), *scalars))
            assert result == found[-1]
            if found[-1]:
                divided = sum(lengths) * heads / policy.MULTIPROCESSORS
                last = _ends(sorted(lengths, reverse=True), heads, policy.MULTIPROCESSORS)
                assert last <= max(scalars.limit, scalars.limit_of_rounds) / 64 * divided
    assert any(found) == (count > 7)
    assert not all(found)


@only_thorough
@pytest.mark.parametrize(
    ("case", "function"),
    [(WIDE, cuda), (WIDE, that_keeps), (WIDE, that_recomputes), (WIDE_NORMALISED, cuda)],
    ids=["Vd kept", "states kept", "anew", "normalised"],
)
def test_two_warpgroups_of_state(
    case: battery.Case, function: battery.Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where heads fill a card: blocks of 128 value columns."""
    monkeypatch.setattr(card, "MULTIPROCESSORS", 1)
    assert policy.value_tile(case.value_heads, case.value_dim) == 128
    battery.check(case, function, LIMITS)


@pytest.mark.parametrize(
    ("keep", "l2norm", "rows"),
    [("nothing", False, "0"), rarely("vd", True, "0"), rarely("nothing", True, "128"), rarely("vd", False, "128")],
)
def test_halves_of_long_sequences(keep: Any, l2norm: bool, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and (thorough) the bits that one block a head finds, where there might be pieces too and are none."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    segments = ((0, 200), (200, 230), (240, 240), (245, 290))
    case = dataclasses.replace(WIDE, name="emulated, a long sequence", segments=segments, l2norm=l2norm)
    x = jax.tree.map(jnp.asarray, battery.inputs(case))
    places = 7  # for pieces of 128 rows
    monkeypatch.setattr(card, "MULTIPROCESSORS", places * case.value_heads)
    monkeypatch.setattr(blocks, "_LONG_CHUNKS", 2)
    emulated, halved = emulator.emulated, []

    def recording(name: str, config: Any) -> emulator.Emulated:
        if name == "forward":
            halved.append(config.halve_long)
        return emulated(name, config)

    monkeypatch.setattr(emulator, "emulated", recording)

    def found() -> list[np.ndarray]:
        options: dict[str, Any] = {"scale": case.key_dim**-0.5, "output_final_state": True, "l2norm": l2norm}
        options |= {"with_residuals": keep != "nothing", "keep": keep}
        q, k, v, g, beta = x[:5]
        o, state, residuals = rule.forward(q, k, v, g, beta, x.initial_state, x.segments, **options)
        return [np.asarray(y, np.float32) for y in (o, state, *([] if residuals is None else [residuals.vd]))]

    results = found()
    assert halved == [True]
    errors = battery.errors(case, dict(zip(("o", "final_state"), results, strict=False)))
    assert all(error.whole <= LIMITS.of(name) for name, error in errors.items())
    if THOROUGH:
        monkeypatch.setattr(policy, "halves", lambda *_, **__: None)
        for a, b in zip(results, found(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("rows", "precision"), [(128, None), rarely(0, "high")])
def test_states_are_kept(rows: int, precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    used = _used(monkeypatch)
    monkeypatch.setenv(policy.OVERRIDE, str(rows))
    battery.check(PACKED, functools.partial(that_keeps, precision=precision), HIGH if precision else LIMITS)
    assert "gradients" in used
    assert not {"states", "states_from_vd"} & set(used)


@only_thorough
@pytest.mark.parametrize(("save", "kernel"), [(None, "states_from_vd"), (False, "states")], ids=["Vd kept", "anew"])
@pytest.mark.parametrize("in_one", ["0", "1"])
def test_states_are_computed_again(
    in_one: str, save: bool | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces and in two groups of heads, so that h is of some heads where Vd, if kept, is of all."""
    used = _used(monkeypatch)
    monkeypatch.setenv(policy.OVERRIDE, "128")
    monkeypatch.setenv(policy.GROUPS_OVERRIDE, "2")
    monkeypatch.setenv(policy.IN_ONE_OVERRIDE, in_one)
    sizes: Any = {"tokens": 330, "key_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128}
    battery.check(battery.Case("in groups", dtype="bfloat16", **sizes), functools.partial(cuda, save=save), LIMITS)
    assert used.count(kernel) == 2
    assert ("backward" in used) == (in_one == "1")
    assert len({"states", "states_from_vd"} & set(used)) == 1


@pytest.mark.parametrize(
    "case",
    [
        decoding.Case(batch=2, value_dim=64, state_dtype="bfloat16"),
        decoding.Case(batch=2, tokens=1, key_dim=64, state_dtype="bfloat16", l2norm=True),
        decoding.Case(batch=2, tokens=2, initial_state=False, l2norm=True),
    ],
    ids=str,
)
def test_decoding(case: decoding.Case) -> None:
    scale = case.key_dim**-0.5
    decoding.check(case, functools.partial(rule.recurrent, scale=scale, output_final_state=True))


@pytest.mark.parametrize("case", [*convolution_cases.SMALL[:2], *map(rarely, convolution_cases.SMALL[2:])], ids=str)
def test_convolution(case: convolution_cases.Case) -> None:
    convolution_cases.check(case, conv1d.forward, conv1d.backward)


@pytest.mark.parametrize(("shape", "dtype"), [rarely(*norm_cases.SMALL[0]), norm_cases.SMALL[1]])
def test_gated_norm(shape: tuple[int, ...], dtype: str) -> None:
    norm_cases.check(shape, dtype, norm.forward, norm.backward)


@pytest.mark.parametrize("name", [rarely("convolution"), "convolution_gradients"])
def test_copies_of_the_convolution_are_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting, results are wrong."""
    lowered = emulator.lowered

    def hasty(kernel: str, config: Any) -> emulator.Emulated:
        source, plan = lowered(kernel, config)
        waiting = "jax_qla_await_copies<kKept / kTaps - 1>();"
        assert waiting in source
        return emulator.Emulated(source.replace(waiting, "") if kernel == name else source, plan)

    monkeypatch.setattr(emulator, "emulated", hasty)
    with pytest.raises(AssertionError, match="y" if name == "convolution" else "x"):
        convolution_cases.check(convolution_cases.Case(), conv1d.forward, conv1d.backward)


@functools.cache
def _states(tile: int) -> tuple[emulator.Emulated, list[str]]:
    """`states` in blocks of so many of 128 columns, with a variable `removed`, the number of a statement to leave out,
    and what these are."""
    source, plan = emulator.lowered("states", states.Config(key_dim=64, value_tile=tile))
    ordering: list[str] = []

    def numbered(found: re.Match[str]) -> str:
        ordering.append(found[2])
        return f"{found[1]}if (removed != {len(ordering) - 1}) {found[2]}"

    waits = r"[\w:<>]+(?:\[.*\])?\.wait\(|tl::(?:__sync_thread_partial|fence_proxy_async|tma_store_wait|wait_wgmma)\b"
    source = re.sub(rf"^( *)((?:{waits}).*;)$", numbered, source, flags=re.M)
    return emulator.Emulated('extern "C" int removed; int removed;\n' + source, plan), ordering


def _run_states(removed: tuple[str, int] | None, tile: int = 64, tokens: int = 230) -> dict[str, np.ndarray]:
    """Results for one head, without one of the statements that have a text in them (text, which one)."""
    kernel, ordering = _states(tile)
    number = -1 if removed is None else [n for n, text in enumerate(ordering) if removed[0] in text][removed[1]]
    ctypes.c_int.in_dll(kernel.library, "removed").value = number
    random = np.random.default_rng(0)
    heads = 1

    def rows(width: int) -> np.ndarray:
        return random.normal(size=(tokens, heads, width)).astype(jnp.bfloat16) / 8

    arrays = {
        "k": rows(64),
        "v": rows(128),
        "a": rows(64).transpose(1, 0, 2).copy().view(np.int16),
        "gamma": -random.uniform(size=(tokens, heads)).astype(np.float32),
        "beta": random.uniform(size=(tokens, heads)).astype(np.float32),
        "initial_state": np.zeros((0, heads, 64, 128), np.float32),
        "pieces": np.zeros((0, 4), np.int32),
        "entering": np.zeros((0, heads, 64, 128), np.float32),
        "segments": np.array([[0, tokens]], np.int32),
        "h": np.full((tokens // 64 + 1, heads, 1, 128, 64), np.nan, jnp.bfloat16),
        "vd": np.full((tokens, heads, 128), np.nan, jnp.bfloat16),
    }
    kernel(arrays, {"ratio": 1, "first_head": 0, "awaits": states.EVERYTHING}, seed=1, late=400)
    return arrays


KEYS_TOO_SOON = r"k_s is written by a bulk load .* and read by wgmma .*, in no order"
H_OVERWRITTEN = r"h_s is read by a bulk store .* and written by thread .*, in no order"
H_TOO_SOON = r"h_s is written by thread .* and read by a bulk store .*, in no order"
H_UNFENCED = r"h_s is written by thread .* and read by a bulk store .*, without a proxy fence"

REMOVED: dict[str, tuple[int, str, int, str]] = {
    "the wait for a stage": (
        64,
        "free[",
        0,
        r"k_s is written by a bulk load .* and written by a bulk load .*, in no order",
    ),
    "the helper's wait for a chunk": (64, "loaded[", 0, KEYS_TOO_SOON),
    "the state's wait for the helper": (64, "ready[", 0, KEYS_TOO_SOON),
    "the fence behind rows that are zero": (64, "fence", -1, r"k_s is written by .* wgmma .*, without a proxy fence"),
    "the wait for the last product": (64, "wgmma<0", -1, r"k_s is read by wgmma .* and written by a bulk load"),
    "the wait for h": (64, "h_full", 0, H_OVERWRITTEN),
    "the fence before h leaves": (64, "fence", 0, H_UNFENCED),
    "the wait for h to have been read": (64, "tma_store_wait<0", 0, H_OVERWRITTEN),
    "the wait for h to have left": (64, "h_free", 0, H_TOO_SOON),
    "the wait for Vd": (64, "vd_full", 0, r"vd_s is written by thread .* and read by a bulk store .*, in no order"),
    "the fence before Vd leaves": (64, "fence", 1, r"vd_s is written by .* a bulk store .*, without a proxy fence"),
    "two, the wait for h to have left": (128, "wait<1, true", 0, H_OVERWRITTEN),
    "two, the meeting before h is written": (128, "thread_partial", 0, H_OVERWRITTEN),
    "two, the fence behind h": (128, "fence", -2, H_UNFENCED),
    "two, the wait for Vd to have left": (
        128,
        "wait<1, true",
        1,
        r"v_s is read by a bulk store .* written by a bulk load",
    ),
    "two, the meeting behind Vd": (128, "thread_partial", -1, r"v_s is written by .* a bulk store .*, in no order"),
}
"""Statements of `states` with one or two warpgroups of state: columns of a block, part of the text, which of those that
have it, what is wrong without it."""


@pytest.mark.parametrize("removed", REMOVED)
def test_what_orders_accesses_is_missed(removed: str) -> None:
    tile, text, which, wrong = REMOVED[removed]
    with pytest.raises(RuntimeError, match=wrong):
        _run_states((text, which), tile)


def test_what_orders_threads_is_missed() -> None:
    """Less than a chunk: threads send Vd, which other threads have written, themselves."""
    _run_states(None, 128, tokens=30)
    either = r"v_s is (written by thread \d+ and read|read by thread \d+ and written) by thread \d+, in no order"
    with pytest.raises(RuntimeError, match=either):
        _run_states(("thread_partial", -1), 128, tokens=30)


def test_products_come_late() -> None:
    """They are no accesses to memory: who does not wait has what was there before."""
    right = _run_states(None)["vd"].astype(np.float32)
    assert np.isfinite(right).all()
    assert not np.array_equal(right, _run_states(("wgmma<0", 0))["vd"].astype(np.float32))
