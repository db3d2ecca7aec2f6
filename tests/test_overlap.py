"""jax_qla/overlap.py: which kernels may begin before the end of others, of all calls that jax_qla/cuda makes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import stand_in
from kernel_operands import RESULTS, named
from thorough import rarely

from jax_qla import overlap, policy
from jax_qla.cuda import rule
from jax_qla.kernels import compose as compose_kernel
from jax_qla.kernels import state_gradients as state_gradients_kernel
from jax_qla.kernels import states as states_kernel
from jax_qla.kernels.common import LATER
from jax_qla.launch import Step
from jax_qla.residuals import splits

END = ["states", "state_gradients", "gradients"]


def test_no_kernel_writes_early_what_another_may_still_read() -> None:
    """`state_gradients` writes at once: a second one may begin if `states`, which waits, stands between it and
    `gradients`, which reads what the first has written."""
    results = ["h", "vd", "dh", "dv", "d_initial_state", "dq", "dk", "dg", "dbeta", "adjoint_response", "leaving"]

    def early(*kernels: str, **within: str) -> list[bool]:
        awaits = dict.fromkeys(("states", "states_from_vd"), states_kernel.EVERYTHING)
        awaits["state_gradients"] = state_gradients_kernel.NOTHING
        renamed = {
            "gradients": {"d": "dv"},
            "state_gradients": {"leaving": "no_states"},
            "compose": {"response": "adjoint_response", "initial_state": "d_final_state", "entering": "leaving"},
        }
        config = compose_kernel.Config(reverse=True)
        steps = [Step(name, config, {"awaits": awaits.get(name, 0)}, renamed.get(name, {})) for name in kernels]
        plans = [{"operands": [{"name": name} for name in named(kernel)]} for kernel in kernels]
        return overlap.early_starts(steps, plans, results, within=within)

    assert early(*END, *END) == [False, True, True, True, True, True]
    assert early(*END, *END[1:]) == [False, True, True, False, True]
    assert early("states", "backward", "states", "backward") == [False, False, True, False]
    assert early(*END, "backward") == [False, True, True, True]
    of_pieces = ["prepare", "adjoint_summaries", "states", "compose", "state_gradients"]
    assert early(*of_pieces) == [False, True, True, True, True]
    assert early(*of_pieces, adjoint_response="dh") == [False, True, True, True, False]
    assert early(*of_pieces, adjoint_response="leaving") == [False, True, True, True, True]
    assert early("prepare", "adjoint_summaries", "compose", adjoint_response="leaving") == [False, True, False]
    of_vd = ["states_from_vd", *END[1:]]
    results.remove("vd")  # an operand
    assert early(*of_vd, *of_vd) == [False, True, True, True, True, True]
    assert early("states_from_vd", "backward", "states_from_vd", "backward") == [False, False, True, False]


@dataclasses.dataclass
class Launched:
    """What `launch` is given."""

    steps: Sequence[Step]
    outputs: Mapping[str, Any]
    aliases: Mapping[str, str]
    within: Mapping[str, str]

    def early(self) -> list[bool]:
        """Which kernels may begin early."""
        plans = [{"operands": [{"name": name} for name in named(step.kernel)]} for step in self.steps]
        return overlap.early_starts(self.steps, plans, self.outputs, self.aliases, self.within)


def in_conflict(call: Launched) -> Iterator[str]:
    """What a kernel uses early, by `overlap.uses_early`, while another that may still run writes it, or writes early
    while that uses it."""
    early, in_memory_of = call.early(), {**call.aliases, **call.within}

    def memory(step: Step, *, written: bool, before_waiting: bool) -> set[str]:
        results = {*RESULTS[step.kernel], *({"o"} if step.kernel == "prepare" else ())}
        if step.kernel == "forward" and step.config.measures:
            results.add("query_lengths")
        if step.kernel == "state_gradients" and (
            step.scalars["window"] != LATER or step.in_call("leaving") not in call.outputs
        ):
            results.remove("leaving")
        names = [name for name in named(step.kernel) if (name in results) == written]
        buffers = [step.in_call(x) for x in names if not before_waiting or overlap.uses_early(step, x)]
        return {in_memory_of.get(buffer, buffer) for buffer in buffers}

    running = 0  # from this kernel on, when the next one may begin
    for index, step in enumerate(call.steps):
        for other in call.steps[running:index] if early[index] else ():
            both = {step.kernel, other.kernel}
            if both == {"forward"} and step.scalars["first_head"] != other.scalars["first_head"]:
                continue  # heads of their own
            reads, writes = (memory(step, written=which, before_waiting=True) for which in (False, True))
            theirs = {which: memory(other, written=which, before_waiting=False) for which in (False, True)}
            found = (reads & theirs[True]) | (writes & (theirs[False] | theirs[True]))
            if both == {"prepare", "forward"}:
                found -= {"o"}  # rows of their own
            yield from (f"{step.kernel} uses {name} while {other.kernel} may" for name in found)
        if overlap.patient(step) or not early[index]:
            running = index


def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """All that follows."""
    calls = []

    def recording(
        steps: Sequence[Step], inputs: Any, outputs: Any, aliases: Any = None, within: Any = None
    ) -> dict[str, jax.Array]:
        calls.append(Launched(steps, outputs, aliases or {}, within or {}))
        return stand_in.launch_zeros(steps, inputs, outputs, aliases, within)

    monkeypatch.setattr("jax_qla.launch.launch", recording)
    return calls


HEADS = ((2, 8), (16, 32), (16, 64), (64, 64), (16, 16), (16, 48), (4, 4))
BATCHES = (
    (1, 8192, None),
    (3, 8192, None),
    (1, 32768, None),
    (1, 8192, 1),
    (1, 32768, 16),
    rarely(2, 16384, None),
    rarely(1, 32768, 4),
    rarely(1, 65536, 40),
    rarely(1, 16384, 200),
    rarely(1, 65536, 9),
)


@pytest.mark.parametrize(("key_heads", "value_heads"), HEADS)
@pytest.mark.parametrize(("batch", "tokens", "places"), BATCHES)
def test_no_call_has_kernels_in_conflict(
    batch: int, tokens: int, places: int | None, key_heads: int, value_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole sequences and of pieces, of all heads at once and of groups, with all that may be given and kept."""
    calls = launched(monkeypatch)
    module: Any = rule
    shape: Any = jax.ShapeDtypeStruct
    q = shape((batch, tokens, key_heads, 128), jnp.bfloat16)
    v, gates = shape((batch, tokens, value_heads, 128), jnp.bfloat16), shape((batch, tokens, value_heads), jnp.float32)
    sequences = places or batch
    state = shape((sequences, value_heads, 128, 128), jnp.float32)
    segments = shape((places, 2), jnp.int32) if places else None
    sizes = (batch * tokens, sequences, value_heads, 128, 128)

    def passes(l2norm: bool, precision: str | None, asked: int | None, given: bool, keep: str | None) -> None:
        options: Any = {"l2norm": l2norm, "precision": precision, "asked_rows": asked, "scale": 1.0}
        operands = (q, q, v, gates, gates, state if given else None, segments)
        if keep is None:
            alone = functools.partial(module.forward, output_final_state=given, with_residuals=False, **options)
            jax.eval_shape(alone, *operands)
            return
        of_kernels: Any = {"ratio": value_heads // key_heads, "split": splits(precision, q.dtype), "asked_rows": asked}
        of_kernels |= {"packed": places is not None}
        options["piece_rows"] = policy.kept_rows(*sizes, **of_kernels, with_states=keep == "states")
        forward = functools.partial(module.forward, output_final_state=given, with_residuals=True, keep=keep, **options)
        residuals = jax.eval_shape(forward, *operands)[2]
        for groups in ("", "2"):
            monkeypatch.setenv(policy.GROUPS_OVERRIDE, groups)
            backward = functools.partial(module.backward, **options)
            jax.eval_shape(backward, *operands, residuals, v, state if given else None)

    for precision, keeping in ((None, (None, "nothing", "vd", "states")), ("high", (None, "nothing", "states"))):
        for l2norm, given, asked in ((False, True, None), (True, False, None), (True, True, 0), (True, True, 1024)):
            for keep in keeping:
                passes(l2norm, precision, asked, given, keep)
    assert {step.kernel for call in calls for step in call.steps} > {"prepare", "forward"}
    assert [*dict.fromkeys(found for call in calls for found in in_conflict(call))] == []


def test_what_is_in_conflict_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were `forward` to write final states at once, those before would be lost: what they lie in is known."""
    calls, of_kernels = launched(monkeypatch), overlap.uses_early
    shape: Any = jax.ShapeDtypeStruct
    q, v = (shape((1, 8192, heads, 128), jnp.bfloat16) for heads in (2, 8))
    gates, state = shape((1, 8192, 8), jnp.float32), shape((1, 8, 128, 128), jnp.float32)
    module: Any = rule
    options: Any = {"scale": 1.0, "output_final_state": True, "with_residuals": False}
    jax.eval_shape(functools.partial(module.forward, **options), q, q, v, gates, gates, state, None)
    (call,) = calls
    assert [step.kernel for step in call.steps][-2:] == ["compose", "forward"]
    assert not [*in_conflict(call)]
    assert call.early()[-1]
    monkeypatch.setattr(overlap, "uses_early", lambda step, name: name == "final_state" or of_kernels(step, name))
    assert not call.early()[-1]
    monkeypatch.setattr(overlap, "early_starts", lambda steps, *_: [False, *[True] * (len(steps) - 1)])
    assert "forward uses final_state while compose may" in [*in_conflict(call)]


@pytest.mark.parametrize("measures", [True, False])
def test_what_launches_have_of_other_heads_makes_none_wait(measures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of queries are a result of both where `forward` finds them."""
    calls = launched(monkeypatch)
    shape: Any = jax.ShapeDtypeStruct
    q, v = (shape((3, 8192, heads, 128), jnp.bfloat16) for heads in (32, 64))
    gates, state = shape((3, 8192, 64), jnp.float32), shape((3, 64, 128, 128), jnp.float32)
    options: Any = {"scale": 1.0, "output_final_state": True, "with_residuals": True, "l2norm": measures}
    module: Any = rule
    jax.eval_shape(functools.partial(module.forward, **options), q, q, v, gates, gates, state, None)
    (call,) = calls
    assert [step.kernel for step in call.steps] == ["prepare", "forward", "forward"]
    assert [step.config.measures for step in call.steps[1:]] == [measures] * 2
    assert call.early() == [False, True, True]


@pytest.mark.parametrize(
    ("heads", "places", "asked", "first"),
    [
        (8, 16, None, True),
        (16, 8, None, True),
        (8, 8, None, False),  # by which no card is kept busy, so that they are cut as a rule
        (8, 512, 1024, False),  # blocks do not ask whether so many are whole
    ],
)
def test_what_leaves_pieces_is_computed_first_where_there_may_be_none(
    heads: int, places: int, asked: int | None, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`state_gradients` then begins where blocks of the states end, and waits for nothing."""
    calls = launched(monkeypatch)
    shape: Any = jax.ShapeDtypeStruct
    module: Any = rule
    q, v = (shape((1, 32768, count, 128), jnp.bfloat16) for count in (heads // 4, heads))
    gates, segments = shape((1, 32768, heads), jnp.float32), shape((places, 2), jnp.int32)
    options: Any = {"scale": 1.0, "asked_rows": asked}
    options["piece_rows"] = policy.kept_rows(
        *(32768, places, heads, 128, 128), ratio=4, split=False, packed=True, asked_rows=asked
    )
    forward = functools.partial(module.forward, output_final_state=False, with_residuals=True, keep="vd", **options)
    residuals = jax.eval_shape(forward, q, q, v, gates, gates, None, segments)[2]
    calls.clear()
    given = (q, q, v, gates, gates, None, segments, residuals, v, None)
    jax.eval_shape(functools.partial(module.backward, **options), *given)
    (call,) = calls
    kernels = [step.kernel for step in call.steps]
    at = kernels.index("adjoint_summaries") + 1
    behind = ["compose", "states_from_vd"] if first else ["states_from_vd", "compose"]
    assert kernels[at : at + 3] == [*behind, "state_gradients"]
    awaits = {step.kernel: step.scalars["awaits"] for step in call.steps[at : at + 3] if step.kernel != "compose"}
    of_gradients = state_gradients_kernel.NOTHING if first else state_gradients_kernel.STATE
    assert awaits == {"states_from_vd": states_kernel.NOTHING, "state_gradients": of_gradients}
    assert call.early()[at : at + 3] == [not first, True, True]
    assert not [*in_conflict(call)]


def test_both_passes_cut_the_same_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says by the time of the backward pass: of the length of the longest that stays whole
    nothing is kept."""
    calls = launched(monkeypatch)
    shape: Any = jax.ShapeDtypeStruct
    module: Any = rule
    q, v = (shape((1, 32768, count, 128), jnp.bfloat16) for count in (4, 16))
    gates, segments = shape((1, 32768, 16), jnp.float32), shape((8, 2), jnp.int32)
    sizes = (32768, 8, 16, 128, 128)
    rows = policy.kept_rows(*sizes, ratio=4, split=False, packed=True)
    assert rows
    assert policy.cut_beyond_in_both(rows, *sizes) != policy.cut_beyond(rows, *sizes)
    options: Any = {"scale": 1.0, "piece_rows": rows}
    forward = functools.partial(module.forward, output_final_state=False, with_residuals=True, keep="vd", **options)
    residuals = jax.eval_shape(forward, q, q, v, gates, gates, None, segments)[2]
    monkeypatch.setenv(policy.OVERRIDE, "128")
    given = (q, q, v, gates, gates, None, segments, residuals, v, None)
    jax.eval_shape(functools.partial(module.backward, **options), *given)
    limits = [step.scalars for call in calls for step in call.steps if step.kernel == "layout"]
    assert len(limits) == 2
    assert limits[0] == limits[1]
