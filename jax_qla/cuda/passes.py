"""Forward and backward of the gated delta rule on one device.

Memory of the backward besides its operands and results, in elements of v's dtype: h and dh (h alone where it is known
here that one kernel computes all gradients), ceil(T / 64) * Hv * K * V each, and, unless it has been kept, Vd, as v
(twice v where operands are split); of one group of heads at a time (policy.head_groups), whose kernels take the memory
of the group before. (Kept Vd and h are operands, of all heads.) dh may be of half of the chunks at a time, and K V in
float32 a sequence and head more. Rows of dv where |beta| is tiny are dX until the gradients kernel scales them.
`backward` counts chunks, in 4 bytes a sequence or piece and head, where a key head has three value heads or more. In
pieces: K V in float32 per cut and value head, and K (K + V) more unless the forward pass has kept that, which is what
it has itself; 2 K (K + V) per piece in `summary`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import launch, policy
from jax_qla.cuda.call import Call
from jax_qla.cuda.steps import (
    UNMEASURED,
    entering_states,
    forward_steps,
    gradient_steps,
    leaving_gradients,
    prepare_step,
)
from jax_qla.kernels import balance as balance_kernel
from jax_qla.kernels import states as states_kernel
from jax_qla.kernels import states_from_vd as states_from_vd_kernel
from jax_qla.kernels.common import CHUNK
from jax_qla.launch import Step
from jax_qla.residuals import KEPT, Between, Keep, Pieces, Residuals

_COMPOSED = {"response": "entering", "adjoint_response": "leaving"}
"""What lies in whose memory, of cuts: a response becomes a state in its place (kernels/compose.py)."""


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None = None,
    pieces: Pieces | None = None,
    *,
    scale: float,
    output_final_state: bool,
    with_residuals: bool,
    cut: policy.Cut | None = None,
    piece_rows: int | None = None,
    l2norm: bool = False,
    precision: Any = None,
    asked_rows: int | None = None,
    keep: Keep = "nothing",
    with_lengths: bool = False,
) -> tuple[jax.Array, jax.Array | None, Residuals | None]:
    """o, final_state and residuals; the contract is `dispatch.forward`'s, whose choice asks for pieces of `asked_rows`.

    Without residuals, the final state takes the memory of the initial one, but on a shard.
    """
    del with_lengths  # residuals have them wherever `l2norm` is asked for
    # Who keeps residuals keeps the initial state with them. A block of `forward` has read its own when it writes the
    # final one; of a sequence that is cut `compose` keeps it, for the piece that begins may begin when another ends.
    in_place = output_final_state and initial_state is not None and pieces is None and not with_residuals
    call = Call(
        *(q, k, v, segments),
        l2norm=l2norm,
        precision=precision,
        # The backward pass cannot tell what pieces kept states are of, unless it has more of these.
        whole=keep == "states" and piece_rows is None,
        shard=None if pieces is None else cut,
        rows=piece_rows,
        asked_rows=asked_rows,
        differentiated=with_residuals,
        in_place=in_place,
    )
    inputs = call.flat(q=q, k=k, v=v, g=g, beta=beta) | call.tables | {"initial_state": call.states(initial_state)}
    outputs = {
        "o": jax.ShapeDtypeStruct((call.tokens, call.value_heads, call.value_dim), v.dtype),
        "final_state": call.state_shape(output_final_state, whole=pieces is None),
    }
    chunk_shapes = call.chunk_state_shapes(v, precision)
    outputs |= {name: chunk_shapes[name] for name in KEPT[keep]}
    inputs |= call.no_pieces()
    measures = False
    if residuals is None or pieces is None:  # one comes with the other
        measures = call.measures
        steps = [prepare_step(call, queries=not measures)]
        outputs |= call.prepared_shapes(v, precision)
        if measures:
            inputs[UNMEASURED] = jnp.zeros((0, call.key_heads), jnp.float32)
            if not with_residuals:
                outputs["query_lengths"] = outputs["query_lengths"].update(shape=inputs[UNMEASURED].shape)
    else:
        inputs |= call.prepared(residuals) | pieces._asdict()
        steps = []
    more_steps, between = entering_states(call, known=pieces is not None)
    outputs |= between | call.table_shapes
    results = launch.launch(
        [
            *steps,
            *call.table_steps,
            *more_steps,
            *forward_steps(call, scale, keep=keep, measures=measures),
        ],
        inputs,
        outputs,
        {"initial_state": "final_state"} if in_place else {},
        _composed(outputs),
    )
    final_state = None
    if output_final_state:
        final_state = results["final_state"] if pieces is None else call.of_last_pieces(results["final_state"])
    o = call.unflat(results["o"])
    if not with_residuals:
        return o, final_state, None
    if residuals is None:
        residuals = call.residuals(results)
        if piece_rows is not None:
            residuals = residuals._replace(between=Between(*(results[name] for name in Between._fields)))
    if keep != "nothing":
        residuals = residuals._replace(vd=call.unflat(results["vd"]), h=results.get("h"))
    return o, final_state, residuals


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    pieces: Pieces | None = None,
    adjoint_response: jax.Array | None = None,
    *,
    scale: float,
    cut: policy.Cut | None = None,
    piece_rows: int | None = None,
    l2norm: bool = False,
    precision: Any = None,
    asked_rows: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients; the contract is `dispatch.backward`'s, `asked_rows` as in `forward`."""
    between, h, vd = residuals.between, residuals.h, residuals.vd
    in_place = segments is not None and policy.gradients_in_place(k.shape[0] * k.shape[1], segments.shape[0])
    in_place = in_place and initial_state is not None and d_final_state is not None and pieces is None
    call = Call(
        *(q, k, v, segments),
        l2norm=l2norm,
        precision=precision,
        whole=h is not None and piece_rows is None,
        shard=None if pieces is None else cut,
        rows=piece_rows,
        asked_rows=asked_rows,
        backward=True,
        in_place=in_place,
    )
    if do is None:
        do = jnp.zeros_like(v)
    inputs = call.flat(q=q, k=k, v=v, g=g, beta=beta, do=do) | call.prepared(residuals) | call.tables
    inputs |= {"initial_state": call.states(initial_state), "d_final_state": call.states(d_final_state)}
    if pieces is not None and adjoint_response is not None:
        inputs |= {**pieces._asdict(), "adjoint_response": adjoint_response}
    elif between is not None:
        inputs |= between._asdict()
    gates = jax.ShapeDtypeStruct((call.tokens, call.value_heads), jnp.float32)
    flat_shape = {name: jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype) for name in ("q", "k", "v")}
    if h is None and call.split:
        vd = None  # nothing computes h from it
    inputs |= ({} if h is None else {"h": h}) | ({} if vd is None else call.flat(vd=vd))
    if between is not None or h is not None:
        steps, of_pieces = leaving_gradients(call, scale, known=adjoint_response is not None)
    else:
        steps, of_pieces = entering_states(call, adjoint=True, known=pieces is not None, scale=scale)
    inputs |= call.no_pieces()
    found = policy.head_groups(
        *(-(-call.tokens // CHUNK), call.recurrences, call.key_heads, call.value_heads, call.key_dim, call.value_dim),
        split=call.split,
        packed=segments is not None and call.sequences > 1,
        parts=call.parts,
        sequences=call.sequences if pieces is None else call.parts,
        # `transition`, `entering` and `leaving`, which has more where gradients are in place
        of_parts=3 * call.between + (call.chains if call.firsts >= 0 else 0),
        states=2 * call.sequences * ((initial_state is not None) + (d_final_state is not None)),
        with_states=h is not None,
    )
    of_pieces |= call.chunk_state_shapes(v, precision, groups=found.groups)
    if found.in_one != "always":
        of_pieces["dh"] = call.chunk_gradient_shape(v, precision, groups=found.groups, windows=found.windows)
        if found.windows > 1:
            of_pieces["carried"] = call.state_shape(True, whole=pieces is None)
        else:
            inputs["carried"] = call.states(None)
    if found.in_one == "if balanced":
        scalars = policy.balance(call.value_heads // found.groups, ratio=call.ratio)._asdict()
        steps = [Step("balance", balance_kernel.Config(), scalars), *steps]
        of_pieces["balanced"] = jax.ShapeDtypeStruct((1,), jnp.int32)
    else:
        inputs["balanced"] = jnp.zeros((1,), jnp.int32)
    of_h = None if h is not None else states_kernel if vd is None else states_from_vd_kernel
    steps = gradient_steps(call, [*call.table_steps, *steps], found, of_h, h_ahead=between is not None, scale=scale)
    progress: dict[str, jax.ShapeDtypeStruct] = {}
    aliases = {"d_final_state": "d_initial_state"} if in_place else {}
    if found.in_one != "never":
        counted = call.parts if call.ratio > policy.in_one_width(call.ratio) else 0
        progress = {"progress": jax.ShapeDtypeStruct((counted, call.value_heads), jnp.int32)}
        inputs["none_done"] = jnp.zeros((counted, call.value_heads), jnp.int32)
        aliases["none_done"] = "progress"
    outputs = {
        "dq": flat_shape["q"],
        "dk": flat_shape["k"],
        "dv": flat_shape["v"],
        "dg": gates,
        "dbeta": gates,
        "d_initial_state": call.state_shape(initial_state is not None, whole=pieces is None),
    }
    outputs |= {name: x for name, x in of_pieces.items() if name not in inputs} | progress | call.table_shapes
    results = launch.launch(steps, inputs, outputs, aliases, _composed(outputs))
    dq, dk, dv, dg, dbeta = (call.unflat(results[name]) for name in ("dq", "dk", "dv", "dg", "dbeta"))
    d_initial_state = None
    if initial_state is not None:
        d_initial_state = results["d_initial_state"]
        if pieces is not None:
            d_initial_state = call.of_first_pieces(d_initial_state)
    return dq, dk, dv, dg, dbeta, d_initial_state


def _composed(outputs: Collection[str]) -> dict[str, str]:
    """`_COMPOSED`, as far as a call has these outputs."""
    return {name: around for name, around in _COMPOSED.items() if name in outputs}
