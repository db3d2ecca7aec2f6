"""The kernels of a call, in order, with their configurations.

    forward    prepare, forward
    backward   states_from_vd, state_gradients, gradients; or, where that fills the card, states_from_vd, backward

- All go by flat arrays of tokens. A dense batch is a packed one whose tables are constants.
- Where sequences are cut into pieces (policy/), `layout` finds these in a packed batch, beside `prepare`, which does
  not go by them. The states that enter them come next: `summaries` and `compose`, in the backward pass also
  `adjoint_summaries` and `compose` in reverse. What follows takes pieces for sequences.
- A forward pass that keeps what it finds of the pieces (`residuals.Between`) spares the backward one `summaries` and
  the first `compose`. `states_from_vd` then goes ahead of the other `compose`, unless the card has room for it beside
  `state_gradients`, or it may well be that no sequence is cut (`policy.composed_first`).
- `keep` (`residuals.Keep`) says what `forward` writes for the backward pass. "vd": Vd, from which `states_from_vd`
  computes h. "states": h too, of whole sequences or of the forward pass's pieces; the backward pass computes no h then.
  "nothing": neither, and `states` computes both. Where operands are split there is no "vd".
- Which kernels compute the gradients of a packed batch, the device finds out where it is not known here
  (`policy.in_one`): `balance` does, all are launched, and leave or stay by what it found.
- Where q and k are to be normalised, `prepare` finds their lengths, which are residuals (`Lengths`), and all others
  read them. Those of q it may leave to `forward` (`policy.measured_by_forward`).
- Intermediate results (h, dh, Vd, states between pieces) are results of the FFI call that nobody reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jax_qla import policy
from jax_qla import segments as tables
from jax_qla.cuda.call import Call
from jax_qla.kernels import adjoint_summaries as adjoint_summaries_kernel
from jax_qla.kernels import backward as backward_kernel
from jax_qla.kernels import compose as compose_kernel
from jax_qla.kernels import forward as forward_kernel
from jax_qla.kernels import gradients as gradients_kernel
from jax_qla.kernels import prepare as prepare_kernel
from jax_qla.kernels import state_gradients as state_gradients_kernel
from jax_qla.kernels import states as states_kernel
from jax_qla.kernels import states_from_vd as states_from_vd_kernel
from jax_qla.kernels import summaries as summaries_kernel
from jax_qla.kernels.common import ALL, ALWAYS, BALANCED, CHUNK, EARLIER, LATER, UNBALANCED
from jax_qla.launch import Step
from jax_qla.residuals import Keep

OF_GRADIENTS = {"response": "adjoint_response", "initial_state": "d_final_state", "entering": "leaving"}
"""Operands of `compose` in reverse."""

UNMEASURED = "unmeasured"
"""Lengths of queries where `prepare` is to find none: empty."""


def prepare_step(call: Call, *, queries: bool = True) -> Step:
    """`prepare`, of all heads; with lengths of `queries` where q and k are to be normalised."""
    slots = tables.slot_count(call.tokens, call.sequences)
    sequences = policy.if_alike(call.tokens, call.sequences)
    chunks = sequences.number * sequences.chunks
    heads = call.key_heads, call.value_heads
    together = policy.prepared_together(slots, *heads, chunks=chunks, beside=call.beside_prepare)
    keys = 1 if call.ratio % together == 0 else 2
    if together == 4 and call.key_heads == call.value_heads:
        keys = 4
    rename = {} if queries else {"query_lengths": UNMEASURED}
    return kernel_step(call, prepare_kernel, rename=rename, together=together, keys=keys)


def forward_steps(call: Call, scale: float, *, keep: Keep = "nothing", measures: bool = False) -> list[Step]:
    """The kernel `forward`, of heads whose blocks have all value columns and of others in halves, or of sequences
    of which it halves long ones; `keep`: what it writes of `ChunkStates`; `measures`: whether it finds lengths of
    queries."""
    awaits, whole = forward_kernel.STATE if call.is_cut else forward_kernel.PREPARED, call.whole
    may_be_uneven = call.packed and call.sequences > 1 and whole == call.value_heads
    has_halves = call.value_tile > 64 and keep != "states"  # `forward`, in this form
    halves = None
    if may_be_uneven and has_halves:
        halves = policy.halves(call.parts, call.value_heads, taken=call.taken)
    rename = call.of_pieces("initial_state", "entering")
    options: dict[str, Any] = {"rename": rename, "scale": scale, "keep": keep, "measures": measures}
    options |= {"halve_long": halves is not None, **(halves or policy.NO_HALVES)._asdict()}
    steps = [kernel_step(call, forward_kernel, first_head=0, heads=whole, awaits=awaits, **options)]
    if (rest := call.value_heads - whole) > 0:
        options |= {"value_tile": 64, "awaits": forward_kernel.NOTHING}
        steps.append(kernel_step(call, forward_kernel, first_head=whole, heads=rest, **options))
    return steps


def entering_states(
    call: Call, *, adjoint: bool = False, known: bool = False, scale: float = 1.0
) -> tuple[list[Step], dict[str, jax.ShapeDtypeStruct]]:
    """Kernels that compute the states `entering` all pieces and, if `adjoint`, gradients of those `leaving` them.

    Args:
        adjoint: whether the gradients are wanted.
        known: whether the pieces have been summarised before.
        scale: factor of q.

    Returns:
        The kernels, none where sequences are whole, and the shapes of what they write.
    """
    if not call.is_cut:
        return [], {}
    outputs = call.shapes_between()
    states = outputs["entering"]
    if known:
        steps = [compose_step(call, "entered")]
        if adjoint:
            steps.append(compose_step(call, "left", rename=OF_GRADIENTS, reverse=True))
        return steps, {"entering": states} | ({"leaving": states} if adjoint else {})
    outputs["response"] = states
    outputs["entering"] = states if adjoint else call.with_firsts(states)
    steps = summaries_steps(call)
    if adjoint:
        outputs |= {"adjoint_response": states, "leaving": call.with_firsts(states)}
        steps.append(kernel_step(call, adjoint_summaries_kernel, scale=scale))
    steps.append(compose_step(call))
    if adjoint:
        steps.append(compose_step(call, rename=OF_GRADIENTS, reverse=True))
    return steps, outputs


def leaving_gradients(
    call: Call, scale: float, *, known: bool = False
) -> tuple[list[Step], dict[str, jax.ShapeDtypeStruct]]:
    """Steps and shapes as of `entering_states`, of the gradients alone, where the states are known."""
    if not call.is_cut:
        return [], {}
    states = call.shapes_between()["entering"]
    if known:
        return [compose_step(call, "left", rename=OF_GRADIENTS, reverse=True)], {"leaving": states}
    steps = [
        kernel_step(call, adjoint_summaries_kernel, scale=scale),
        compose_step(call, rename=OF_GRADIENTS, reverse=True),
    ]
    return steps, {"adjoint_response": states, "leaving": call.with_firsts(states)}


def summaries_steps(call: Call, shard: policy.Cut | None = None) -> list[Step]:
    """`summaries` of all pieces but those that sequences end with, or of all of a `shard`: once, or twice where the
    device finds out how its blocks are to share multiprocessors."""
    if shard is None:
        assert call.rows is not None
        # Of places for more sequences than there can be pieces it is supposed that one is taken.
        sequences = call.sequences if call.sequences < call.recurrences else 1
        rows, responses, rename = call.rows, call.between - (sequences if call.packed else 0), {}
        transitions = max(responses - sequences, 0)  # none of those that sequences begin with
    else:
        rows = shard.rows
        responses = transitions = shard.pieces * call.sequences
        rename = {"pieces": "shard_pieces", "cuts": "shard_cuts"}
    sizes = (call.value_heads, call.key_dim, call.value_dim)
    found = policy.summarised(responses, transitions, -(-rows // CHUNK), *sizes, split=call.split)
    alone = found.slow if found.sharing == "either" else 0
    steps = []
    if found.sharing != "shared":
        step = kernel_step(call, summaries_kernel, rename=rename, alone=alone)
        steps.append(dataclasses.replace(step, shared_at_least=policy.MORE_THAN_HALF))
    if found.sharing != "alone":
        steps.append(kernel_step(call, summaries_kernel, rename=rename, alone=-alone))
    return steps


def compose_step(
    call: Call,
    of_shard: str | None = None,
    *,
    rename: Mapping[str, str] | None = None,
    reverse: bool = False,
    **options: Any,
) -> Step:
    """`compose` of all sequences that are cut, or of those of a shard by its table `of_shard` (`shard_tables`)."""
    chains = {} if of_shard is None else {"chains": of_shard}
    sizes = (call.chains or call.sequences, call.value_heads, options.get("value_dim", call.value_dim))
    options |= {"reverse": reverse, "of_pieces": int(of_shard is not None)}
    options["firsts"] = call.firsts if reverse == call.backward else -1
    options |= policy.composed(*sizes, packed=call.packed and of_shard is None)._asdict()
    return kernel_step(call, compose_kernel, rename={**(rename or {}), **chains}, **options)


def kernel_step(call: Call, kernel: Any, *, rename: Mapping[str, str] | None = None, **options: Any) -> Step:
    """One kernel of the sequence, by its module; options that are not fields of its Config are scalars. Besides
    these it may have those of every call.
    """
    sizes = {"key_dim": call.key_dim, "value_dim": call.value_dim, "dtype": call.dtype}
    values = sizes | {"value_tile": call.value_tile, "l2norm": call.l2norm, "split": call.split} | options
    fields = [field.name for field in dataclasses.fields(kernel.Config)]
    config = kernel.Config(**{field: values[field] for field in fields})
    scalars = {name: x for name, x in options.items() if name not in fields}
    # Kernels of the backward pass go by tables, which are not there before they have waited.
    asked = -1 if call.backward else call.cut_beyond
    of_call = {"cut_beyond": asked, "in_place": int(call.in_place), "firsts": call.firsts}
    scalars = {"ratio": call.ratio, **of_call, **scalars}
    name = kernel.__name__.rpartition(".")[2]
    neighbours = policy.neighbours(name, getattr(config, "value_tile", call.value_dim), call.value_dim)
    return Step(name, config, scalars, rename or {}, neighbours=neighbours)


def gradient_steps(
    call: Call, steps: list[Step], found: policy.HeadGroups, of_h: Any, *, h_ahead: bool, scale: float
) -> list[Step]:
    """`steps`, what stands before, and the kernels of one group of heads after the other.

    Args:
        call: the call.
        steps: that find the tables, and what enters and leaves the pieces.
        found: the groups, and which kernels compute them.
        of_h: the kernel that computes h, None where that is kept.
        h_ahead: whether it may begin before what `steps` end with has ended.
        scale: factor of q.
    """
    initial = call.of_pieces("initial_state", "entering")
    final = call.of_pieces("d_final_state", "leaving")
    heads = call.value_heads // found.groups
    chunks = -(-call.tokens // CHUNK)
    together = policy.key_heads_together(chunks // found.windows, heads // call.ratio, heads)
    tile = call.value_tile_of(heads)
    beside = policy.room_for_both(call.recurrences * heads * (call.value_dim // tile))
    composed_first = of_h is states_from_vd_kernel and policy.composed_first(call.cut_beyond, *call.sizes)
    windows = [] if found.in_one == "always" else [ALL] if found.windows == 1 else [LATER, EARLIER]
    of_two, of_one = (UNBALANCED, BALANCED) if found.in_one == "if balanced" else (ALWAYS, ALWAYS)
    common: dict[str, Any] = {"scale": scale}
    for first in range(0, call.value_heads, heads):
        if of_h is not None:
            # Unless there is room for it beside `state_gradients`, what computes h begins where blocks of
            # `adjoint_summaries` end, before `compose`, which begins where its own end; or behind that.
            early = first == 0 and h_ahead and not beside
            awaits = states_kernel.NOTHING if early else states_kernel.EVERYTHING
            place = len(steps) - 1 if early and not composed_first else len(steps)
            of_states = {"awaits": awaits, "value_tile": tile, "cut_beyond": call.cut_beyond}
            steps.insert(place, kernel_step(call, of_h, rename=initial, first_head=first, **of_states))
        for window in windows:
            # `compose` writes what it begins with, and `gradients` of the later window reads what it writes.
            behind = window == EARLIER or (bool(steps) and steps[-1].kernel == "compose")
            awaits = state_gradients_kernel.STATE if behind else state_gradients_kernel.NOTHING
            of = common | {"first_head": first, "window": window, "only": of_two}
            step = kernel_step(call, state_gradients_kernel, rename=final, awaits=awaits, value_tile=tile, **of)
            steps.append(step)
            steps.append(kernel_step(call, gradients_kernel, rename={"d": "dv"}, group=together, **of))
        if found.in_one != "never":
            width = policy.in_one_width(call.ratio)
            of = common | {"first_head": first, "only": of_one, "heads": heads, "width": width}
            step = kernel_step(call, backward_kernel, rename=final, **of)
            steps.append(dataclasses.replace(step, neighbours=width))  # a cluster
    return steps
