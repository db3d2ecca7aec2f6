"""The Hopper implementation: which kernels run, in which order, on which arrays.

Forward is two kernels in one FFI call (prepare, forward), backward three (states_from_vd, state_gradients, gradients)
or, where that fills the card, two (states_from_vd, backward: `policy.in_one`; of a packed batch balance finds out
whether it does, and the others leave by what it found), decoding one (recurrent, on a dense batch as it is).
The others work on flat token arrays, dense batches included: a dense batch is a packed one whose tables are constants.
Where sequences are cut into pieces (policy/), layout finds these in a packed batch, beside prepare, which does not go
by them, and the states that enter them come next: summaries and compose, for the backward pass also adjoint_summaries
and compose in reverse; what follows takes pieces for sequences.
A forward pass that keeps what it finds of the pieces (`residuals.Between`) spares the backward one summaries and
the first compose; `states_from_vd` then goes ahead of the other, unless the card has room for it beside
`state_gradients`.
The option `keep` (`residuals.Keep`) says what `forward` writes for the backward pass: "vd" Vd, from which
`states_from_vd` computes h there; "states" h too, of whole sequences or of these pieces, and the backward pass is
without that; "nothing" neither, and `states` computes both in its place. Where operands are split there is no "vd".
Where a sequence goes on beyond a device, this falls into two calls: `summary` (prepare, summaries, and compose for N
and for M) begins, and `forward`, given what it found, goes on (compose, forward) when the state before is known. So do
`state_gradient` (adjoint_summaries, compose in reverse) and `backward`; meanwhile `chunk_states` (compose,
states_from_vd) computes what the latter needs of the forward pass.
Where q and k are to be normalised, prepare finds their lengths, which are residuals (`Lengths`); all others read them.
Those of q it may leave to forward (policy.measured_by_forward).
Intermediate results (h, dh, Vd, states between pieces) are results of the call that are dropped here.

Memory of the backward besides its operands and results, in elements of v's dtype: h and dh (h alone where it is known
here that one kernel computes all gradients), ceil(T / 64) * Hv * K * V each, and, unless it has been kept, Vd, as v
(twice v where operands are split); of one group of heads at a time (policy.head_groups), whose kernels take the memory
of the group before. (Kept Vd and h are operands, of all heads. Where the device finds out which kernels compute a
batch, dh may be of fewer heads than h.) Rows of dv where |beta| is tiny are dX until the gradients kernel scales them.
`backward` counts chunks, in 4 bytes a sequence or piece and head, where a key head has three value heads or more. In
pieces: K V in float32 per cut and value head, and K (K + V) more unless the forward pass has kept that, which is what
it has itself; 2 K (K + V) per piece in `summary`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla import policy, store
from jax_qla import segments as tables
from jax_qla.checks import why_not_static
from jax_qla.implementations import RecurrentCall
from jax_qla.kernels import adjoint_summaries as adjoint_summaries_kernel
from jax_qla.kernels import backward as backward_kernel
from jax_qla.kernels import balance as balance_kernel
from jax_qla.kernels import compose as compose_kernel
from jax_qla.kernels import forward as forward_kernel
from jax_qla.kernels import gradients as gradients_kernel
from jax_qla.kernels import layout as layout_kernel
from jax_qla.kernels import prepare as prepare_kernel
from jax_qla.kernels import recurrent as recurrent_kernel
from jax_qla.kernels import state_gradients as state_gradients_kernel
from jax_qla.kernels import states as states_kernel
from jax_qla.kernels import states_from_vd as states_from_vd_kernel
from jax_qla.kernels import summaries as summaries_kernel
from jax_qla.kernels.common import ALWAYS, BALANCED, CHUNK, UNBALANCED, state_tile_rows
from jax_qla.kernels.packaged import PACKAGED
from jax_qla.launch import Step, launch, why_not_launchable
from jax_qla.residuals import KEPT, Between, ChunkStates, Keep, Lengths, Pieces, Residuals, splits

HEAD_DIMS = (64, 128)
"""Sizes of K and V that kernels exist for."""

DTYPES = ("bfloat16", "float16")
"""Dtypes of q, k and v that kernels exist for."""

L2NORM_DTYPES = ("bfloat16",)
"""Dtypes of q and k that the functions here normalise themselves, with `l2norm`. The range of float16 does not bear
what long or short keys make of Vd and dX."""

_OF_GRADIENTS = {"response": "adjoint_response", "initial_state": "d_final_state", "entering": "leaving"}
"""Operands of `compose` in reverse."""

_COMPOSED = {"response": "entering", "adjoint_response": "leaving"}
"""What lies in whose memory, of cuts: a response becomes a state in its place (kernels/compose.py)."""

_LENGTHS = ("lengths", "query_lengths")
"""The kernels' names of `Lengths`."""

_UNMEASURED = "unmeasured"
"""Lengths of queries where `prepare` is to find none: empty."""

_RECURRENT = frozenset({"recurrent"})
_OF_LAYERS = frozenset({"convolution", "convolution_gradients", "gated_norm"})  # cuda_conv1d.py, cuda_norm.py
_CHUNKED = frozenset(name for name, _ in PACKAGED) - _RECURRENT - _OF_LAYERS
_OF_PLAIN_OPERANDS = frozenset({"backward", "states_from_vd"})
"""Kernels that take no split operands."""


def why_not(q: Any, k: Any, v: Any, *, precision: Any = None, build: bool | None = None) -> str | None:
    """Why the kernels cannot take these operands (arrays or ShapeDtypeStructs), or None.

    Args:
        q, k, v: the operands.
        precision: one that the kernels have.
        build: as in `launch.why_not_launchable`.
    """
    split = splits(precision, q.dtype)
    return _why_not(q, k, v, build, _CHUNKED - _OF_PLAIN_OPERANDS if split else _CHUNKED, split=split)


def why_not_recurrent(q: Any, k: Any, v: Any, *, call: RecurrentCall, build: bool | None = None) -> str | None:
    """As `why_not`, for `recurrent`."""
    if call.packed:
        return "the decoding kernel of 'cuda' takes dense batches only, without cu_seqlens"
    if reason := why_not_static("q", q):
        return reason
    single = _single(q.shape[1], call.state_dtype)
    return _why_not(q, k, v, build, _RECURRENT, state_dtype=call.state_dtype, single=single)


def _single(tokens: int, state_dtype: str) -> bool:
    """Whether a decoding call takes the kernel of one token, which holds 16-bit states in half of the registers."""
    return tokens == 1 and state_dtype == "bfloat16"


def _why_not(q: Any, k: Any, v: Any, build: bool | None, kernels: frozenset[str], **options: Any) -> str | None:
    if q.dtype.name not in DTYPES:
        return f"q, k and v must be bfloat16 or float16 for the kernels of 'cuda', got {q.dtype.name}"
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    if key_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
        return f"K and V must be 64 or 128 for the kernels of 'cuda', got K={key_dim} and V={value_dim}"
    needed = _needed(kernels, key_dim=key_dim, value_dim=value_dim, dtype=q.dtype.name, **options)
    return why_not_launchable(needed, build=build)


@functools.cache
def _needed(kernels: frozenset[str], **sizes: Any) -> tuple[tuple[str, Any], ...]:
    """(name, Config) of all packaged kernels with these names, for these sizes."""

    def fits(config: Any) -> bool:
        return all(sizes.get(field, value) == value for field, value in store.config_fields(config).items())

    return tuple((name, config) for name, config in PACKAGED if name in kernels and fits(config))


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
    call = _Call(
        *(q, k, v, segments),
        l2norm=l2norm,
        precision=precision,
        # The backward pass cannot tell what pieces kept states are of, unless it has more of these.
        whole=keep == "states" and piece_rows is None,
        shard=None if pieces is None else cut,
        rows=piece_rows,
        asked_rows=asked_rows,
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
        steps = [call.prepare_step(queries=not measures)]
        outputs |= call.prepared_shapes(v, precision)
        if measures:
            inputs[_UNMEASURED] = jnp.zeros((0, call.key_heads), jnp.float32)
            if not with_residuals:
                outputs["query_lengths"] = outputs["query_lengths"].update(shape=inputs[_UNMEASURED].shape)
    else:
        inputs |= call.prepared(residuals) | pieces._asdict()
        steps = []
    more_steps, between = call.entering_states(known=pieces is not None)
    outputs |= between | call.table_shapes
    results = launch(
        [
            *steps,
            *call.table_steps,
            *more_steps,
            *call.forward_steps(scale, keep=keep, measures=measures),
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
    call = _Call(
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
        steps, of_pieces = call.leaving_gradients(scale, known=adjoint_response is not None)
    else:
        steps, of_pieces = call.entering_states(adjoint=True, known=pieces is not None, scale=scale)
    inputs |= call.no_pieces()
    found = policy.head_groups(
        *(-(-call.tokens // CHUNK), call.recurrences, call.key_heads, call.value_heads, call.key_dim, call.value_dim),
        split=call.split,
        packed=segments is not None and call.sequences > 1,
        parts=call.parts,
        # `transition`, `entering` and `leaving`, which has more where gradients are in place
        of_parts=3 * call.between + (call.chains if call.firsts >= 0 else 0),
        states=2 * call.sequences * ((initial_state is not None) + (d_final_state is not None)),
        with_states=h is not None,
    )
    of_pieces |= call.chunk_state_shapes(v, precision, groups=found.groups)
    if found.in_one != "always":
        of_pieces["dh"] = call.chunk_gradient_shape(v, precision, groups=found.groups * found.uneven)
    if found.in_one == "if balanced":
        scalars = policy.balance(call.value_heads // found.groups, ratio=call.ratio)._asdict()
        steps = [Step("balance", balance_kernel.Config(), scalars), *steps]
        of_pieces["balanced"] = jax.ShapeDtypeStruct((1,), jnp.int32)
    else:
        inputs["balanced"] = jnp.zeros((1,), jnp.int32)
    of_h = None if h is not None else states_kernel if vd is None else states_from_vd_kernel
    steps = _gradient_steps(call, [*call.table_steps, *steps], found, of_h, h_ahead=between is not None, scale=scale)
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
    results = launch(steps, inputs, outputs, aliases, _composed(outputs))
    dq, dk, dv, dg, dbeta = (call.unflat(results[name]) for name in ("dq", "dk", "dv", "dg", "dbeta"))
    d_initial_state = None
    if initial_state is not None:
        d_initial_state = results["d_initial_state"]
        if pieces is not None:
            d_initial_state = call.of_first_pieces(d_initial_state)
    return dq, dk, dv, dg, dbeta, d_initial_state


def _gradient_steps(
    call: _Call, steps: list[Step], found: policy.HeadGroups, of_h: Any, *, h_ahead: bool, scale: float
) -> list[Step]:
    """`steps`, what stands before, and the kernels of one group of heads after the other.

    Args:
        call: the call.
        steps: that find the tables, and what enters and leaves the pieces.
        found: the groups, and which kernels compute them.
        of_h: the kernel that computes h, None where that is kept.
        h_ahead: whether it may begin before what `steps` end with.
        scale: factor of q.
    """
    initial = call.of_pieces("initial_state", "entering")
    final = call.of_pieces("d_final_state", "leaving")
    heads = call.value_heads // found.groups
    divided = heads // found.uneven
    chunks = -(-call.tokens // CHUNK)
    together = policy.key_heads_together(chunks, divided // call.ratio, divided)
    tile = call.value_tile_of(heads)
    beside = policy.room_for_both(call.recurrences * heads * (call.value_dim // tile))
    of_two, of_one = (UNBALANCED, BALANCED) if found.in_one == "if balanced" else (ALWAYS, ALWAYS)
    common: dict[str, Any] = {"scale": scale}
    for first in range(0, call.value_heads, heads):
        if of_h is not None:
            # Unless there is room for it beside `state_gradients`, what computes h begins where blocks of
            # `adjoint_summaries` end, before `compose`, which begins where its own end.
            ahead = first == 0 and h_ahead and not beside
            awaits = states_kernel.NOTHING if ahead else states_kernel.EVERYTHING
            place = len(steps) - 1 if ahead else len(steps)
            steps.insert(place, call.step(of_h, rename=initial, first_head=first, awaits=awaits, value_tile=tile))
        for begin in range(first, first + heads, divided) if found.in_one != "always" else ():
            behind = bool(steps) and steps[-1].kernel == "compose"  # which writes what it begins with
            awaits = state_gradients_kernel.STATE if behind else state_gradients_kernel.NOTHING
            of = common | {"first_head": begin, "only": of_two}
            of_states = {"awaits": awaits, "value_tile": call.value_tile_of(divided)}
            steps.append(call.step(state_gradients_kernel, rename=final, **of_states, **of))
            steps.append(call.step(gradients_kernel, rename={"d": "dv"}, group=together, **of))
        if found.in_one != "never":
            width = policy.in_one_width(call.ratio)
            of = common | {"first_head": first, "only": of_one, "heads": heads, "width": width}
            step = call.step(backward_kernel, rename=final, **of)
            steps.append(dataclasses.replace(step, neighbours=width))  # a cluster
    return steps


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    *,
    scale: float,
    output_final_state: bool,
    l2norm: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """o and final_state of at least one token, from a dense batch; the contract is `decode.recurrent`'s.

    The final state takes the memory of the initial one.
    """
    batch, tokens, value_heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    state_dtype = jnp.dtype(jnp.float32) if initial_state is None else initial_state.dtype

    def state_shape(given: bool) -> jax.ShapeDtypeStruct:  # an empty array is "not given" and "not wanted"
        return jax.ShapeDtypeStruct((batch if given else 0, value_heads, key_dim, value_dim), state_dtype)

    single = _single(tokens, state_dtype.name)
    config = recurrent_kernel.Config(key_dim, value_dim, q.dtype.name, state_dtype.name, single)
    in_place = initial_state is not None and output_final_state
    if initial_state is None:
        initial_state = jnp.zeros(state_shape(False).shape, state_dtype)
    results = launch(
        [Step("recurrent", config, {"scale": scale, "ratio": value_heads // key_heads, "normed": int(l2norm)})],
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state},
        {"o": jax.ShapeDtypeStruct(v.shape, v.dtype), "final_state": state_shape(output_final_state)},
        {"initial_state": "final_state"} if in_place else {},
    )
    return results["o"], results["final_state"] if output_final_state else None


def summary(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None = None,
    *,
    cut: policy.Cut,
    with_residuals: bool,
    l2norm: bool = False,
    precision: Any = None,
    with_lengths: bool = False,
) -> tuple[jax.Array, jax.Array, Residuals | None, Pieces | None]:
    """Transition and response of each sequence, and what is kept; the contract is `dispatch.summary`'s.

    N by `compose` from the initial state. M by the reversed one from the identity, as the product of the transposes,
    with nothing added between: so the two run side by side.
    """
    del with_lengths  # as in `forward`
    call = _Call(q, k, v, segments, l2norm=l2norm, precision=precision, whole=True)
    shapes = Pieces.shapes(call.sequences, cut.pieces, call.value_heads, call.key_dim, call.value_dim)
    products = jax.ShapeDtypeStruct((*shapes["transition"].shape[:2], call.key_dim, call.key_dim), jnp.float32)
    inputs = call.flat(q=q, k=k, v=v, g=g, beta=beta) | call.tables | call.shard_tables(segments, cut)
    inputs |= {
        "initial_state": call.states(initial_state),
        "identity": jnp.broadcast_to(
            jnp.eye(call.key_dim, dtype=jnp.float32), (call.sequences, call.value_heads, call.key_dim, call.key_dim)
        ),
        "nothing": jnp.zeros(products.shape, products.dtype),
    }
    outputs = {**shapes, "entering": shapes["response"], "products": products}
    if residuals is None:
        steps = [call.prepare_step()]
        # `prepare` writes zeros to the rows of o that no sequence has: of no columns, here.
        outputs |= call.prepared_shapes(v, precision) | {
            "o": jax.ShapeDtypeStruct((call.tokens, call.value_heads, 0), v.dtype)
        }
    else:
        inputs |= call.prepared(residuals, queries=False)
        steps = []
    of_maps = {"response": "nothing", "initial_state": "identity", "entering": "products"}
    steps += [
        call.summaries_step(cut),
        call.compose_step("entered"),
        call.compose_step("left", rename=of_maps, value_dim=call.key_dim, reverse=True),
    ]
    results = launch(steps, inputs, outputs)
    response = results["entering"][jnp.sum(inputs["entered"][:, :2], axis=1) - 1]
    transition = jnp.swapaxes(results["products"][inputs["left"][:, 0]], -1, -2)
    if segments is not None or not with_residuals:
        return transition, response, None, None
    if residuals is None:
        residuals = call.residuals(results)
    return transition, response, residuals, Pieces(*(results[name] for name in Pieces._fields))


def state_gradient(
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
    *,
    cut: policy.Cut,
    scale: float,
    l2norm: bool = False,
    precision: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of the initial states, and what is kept; the contract is `dispatch.state_gradient`'s."""
    del g, initial_state
    call = _Call(q, k, v, segments, l2norm=l2norm, precision=precision, whole=True)
    shapes = Pieces.shapes(call.sequences, cut.pieces, call.value_heads, call.key_dim, call.value_dim)
    inputs = call.flat(q=q, k=k, v=v, beta=beta, do=jnp.zeros_like(v) if do is None else do)
    inputs |= call.prepared(residuals) | call.tables | call.shard_tables(segments, cut)
    inputs |= {"initial_state": call.states(None), "d_final_state": call.states(d_final_state)}
    outputs = {"adjoint_response": shapes["response"], "leaving": shapes["response"]}
    steps = []
    if pieces is None:
        steps.append(call.summaries_step(cut))
        outputs |= shapes
    else:
        inputs |= pieces._asdict()
    steps += [
        call.step(adjoint_summaries_kernel, rename={"pieces": "shard_pieces", "cuts": "shard_cuts"}, scale=scale),
        call.compose_step("left", rename=_OF_GRADIENTS, reverse=True),
    ]
    results = launch(steps, inputs, outputs)
    gradient = results["leaving"][inputs["left"][:, 0]]
    return gradient, None if pieces is None else results["adjoint_response"]


def chunk_states(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    segments: None,
    residuals: Residuals,
    pieces: Pieces,
    *,
    cut: policy.Cut,
    l2norm: bool = False,
    precision: Any = None,
) -> ChunkStates:
    """The contract is `dispatch.chunk_states`'s."""
    del g
    call = _Call(q, k, v, segments, l2norm=l2norm, precision=precision, shard=cut)
    vd = None if call.split else residuals.vd
    if vd is None:
        inputs = call.flat(k=k, v=v, beta=beta) | call.prepared(residuals, queries=False)
    else:
        inputs = call.flat(k=k, vd=vd, gamma=residuals.gamma)
    inputs |= call.tables | pieces._asdict() | {"initial_state": call.states(initial_state)} | call.no_pieces()
    steps, of_pieces = call.entering_states(known=True)
    of = {"first_head": 0, "awaits": states_kernel.EVERYTHING}
    kernel = states_kernel if vd is None else states_from_vd_kernel
    steps.append(call.step(kernel, rename=call.of_pieces("initial_state", "entering"), **of))
    shapes = call.chunk_state_shapes(v, precision)
    results = launch(steps, inputs, of_pieces | {name: x for name, x in shapes.items() if name not in inputs})
    return ChunkStates(results["h"], call.unflat(results["vd"]) if vd is None else vd)


def _composed(outputs: Collection[str]) -> dict[str, str]:
    """`_COMPOSED`, as far as a call has these outputs."""
    return {name: around for name, around in _COMPOSED.items() if name in outputs}


class _Call:
    """Sizes, tables and kernel configurations of one call, whose sequences are perhaps `cut` into pieces.

    The kernels take the pieces for sequences, from states that `entering_states` computes.
    """

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None,
        *,
        l2norm: bool,
        precision: Any,
        whole: bool = False,
        shard: policy.Cut | None = None,
        rows: int | None = None,
        asked_rows: int | None = None,
        backward: bool = False,
        in_place: bool = False,
    ) -> None:
        """Cut as `shard` says, not at all if `whole`, into pieces of `rows`, or as `policy` says to `asked_rows` of the
        forward or the `backward` pass; `in_place`: final states take the memory of initial ones, in the backward pass
        gradients of initial states that of those of final ones."""
        self.batch, self.length, self.key_heads, self.key_dim = k.shape
        self.value_heads, self.value_dim = v.shape[2:]
        self.ratio = self.value_heads // self.key_heads
        self.tokens = self.batch * self.length
        self.dtype = q.dtype.name
        self.l2norm = l2norm
        self.split = splits(precision, q.dtype)
        self.packed = packed = segments is not None
        self.sequences = segments.shape[0] if segments is not None else self.batch
        self.sizes = (self.tokens, self.sequences, self.value_heads, self.key_dim, self.value_dim)
        """As `policy` takes them."""
        if rows is None and shard is None and not whole:
            options: dict[str, Any] = {"packed": packed, "asked_rows": asked_rows}
            if backward:
                rows = policy.backward_rows(*self.sizes, ratio=self.ratio, split=self.split, **options)
            else:
                rows = policy.piece_rows(*self.sizes, **options)
        self.shard = shard
        """How the sequences, of a dense batch, are cut if their pieces have been summarised before."""
        self.cut = rows is not None or shard is not None
        self.parts = self.sequences
        self.between = 0
        """Rows of what lies between pieces: cuts, or all pieces of a shard."""
        self.chains = 0
        """Places for sequences that are cut (segments.chain_table)."""
        self.in_place = in_place
        self.backward = backward
        self.asked_beyond = -1
        """Rows beyond which sequences are cut, where kernels find out themselves whether any is (kernels/uncut.py)."""
        if rows is not None:
            self.parts = tables.piece_count(self.tokens, self.sequences, rows, packed=packed)
            self.between = self.parts - self.sequences
        self.recurrences = self.parts  # of a head
        if packed and rows is not None:
            self.recurrences = max(self.parts - self.sequences, self.sequences)
        if shard is not None:  # two more pieces a sequence, which are empty
            self.parts, self.recurrences = self.sequences * (shard.pieces + 2), self.sequences * shard.pieces
            self.between = self.parts
            self.chains = self.sequences
        self.value_tile = self.value_tile_of(self.value_heads)
        bounds = tables.dense_segments(self.batch, self.length) if segments is None else segments
        self.tables = {"bounds": jnp.asarray(bounds, jnp.int32)}
        """Operands from which the kernels know where sequences and pieces lie, ..."""
        self.table_steps: list[Step] = []
        """... the kernel, if any, that computes them, ..."""
        self.table_shapes: dict[str, jax.ShapeDtypeStruct] = {}
        """... and what it writes."""
        if shard is not None:
            self.tables |= self.shard_tables(None, shard)
            self.tables["segments"] = self.tables["shard_pieces"][:, :2]
        elif rows is None:
            self.tables["segments"] = self.tables["bounds"]
        elif packed:
            self._find_pieces(rows)
        else:
            self._list_pieces(rows)

    def _find_pieces(self, rows: int) -> None:
        """Leaves tables of a packed batch's pieces to the device."""
        beyond = policy.cut_beyond(rows, *self.sizes)
        if not self.backward and self.sequences <= policy.ASKED_AMONG:
            self.asked_beyond = beyond
        places = tables.cut_count(self.tokens, rows)
        self.chains = min(self.sequences, places)
        shapes = {"segments": (self.parts, 2), "pieces": (self.parts, 4), "spans": (self.sequences, 2)}
        shapes |= {"cuts": (places, 2), "chains": (self.chains, 3)}
        self.table_steps = [Step("layout", layout_kernel.Config(), {"piece_rows": rows, "cut_beyond": beyond})]
        self.table_shapes = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}

    def _list_pieces(self, rows: int) -> None:
        """Makes constants of tables of a dense batch's pieces."""
        pieces, spans, cuts, chains = tables.dense_pieces(self.batch, self.length, rows)
        self.chains = len(chains)
        constants = {"segments": pieces[:, :2], "pieces": pieces, "spans": spans, "cuts": cuts, "chains": chains}
        self.tables |= {name: jnp.asarray(x, jnp.int32) for name, x in constants.items()}

    def value_tile_of(self, heads: int) -> int:
        """Value columns of a block where so many heads are computed at once."""
        return 64 if self.split else policy.value_tile(self.recurrences * heads, self.value_dim)

    @property
    def whole(self) -> int:
        """Heads whose blocks of `forward` have `value_tile` columns; those of the others have 64."""
        if self.cut or self.split:
            return self.value_heads
        return policy.whole_heads(self.sequences, self.value_heads, self.value_dim)

    @property
    def measures(self) -> bool:
        """Whether `forward`, and not `prepare`, is to find lengths of queries."""
        return self.l2norm and not self.split and policy.measured_by_forward(self.ratio)

    def shard_tables(self, segments: jax.Array | None, cut: policy.Cut) -> dict[str, jax.Array]:
        """Pieces of all sequences and how to go through them, for what is computed before first states are known."""
        bounds = tables.dense_segments(self.batch, self.length) if segments is None else segments
        pieces, entered, left = tables.shard_pieces(bounds, cut.rows, cut.pieces)
        all_of_them = np.repeat(np.arange(len(pieces))[:, None], 2, axis=1)  # as if each stood before a cut, and behind
        found = {"shard_pieces": pieces, "shard_cuts": all_of_them, "entered": entered, "left": left}
        return {name: jnp.asarray(x, jnp.int32) for name, x in found.items()}

    @property
    def firsts(self) -> int:
        """Row of what enters pieces, or leaves them in the backward pass, from which on `compose` keeps what sequences
        that are cut begin with, or end with, or -1."""
        return self.between if self.in_place and self.chains else -1

    def shapes_between(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What lies between the pieces."""
        return Between.shapes(self.between, self.value_heads, self.key_dim, self.value_dim)

    def no_pieces(self) -> dict[str, jax.Array]:
        """What kernels that go through sequences have as operands where they have no pieces of these."""
        if self.cut and self.shard is None:
            return {}
        empty = {"pieces": jnp.zeros((0, 4), jnp.int32), "spans": jnp.zeros((0, 2), jnp.int32)}
        return empty | {"no_states": self.states(None)}

    def of_pieces(self, of_sequences: str, between: str) -> dict[str, str]:
        """What these kernels begin with, by their names for it: states `of_sequences` and, where these are cut, those
        `between` their pieces; only those where pieces, of a shard, are to be taken for sequences."""
        without = {between: "no_states", "bounds": "spans"}  # which are empty there
        if self.shard is not None:
            return without | {of_sequences: between}
        return {} if self.cut else without

    def prepared_shapes(self, v: jax.Array, precision: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """What `prepare` writes."""
        a, gamma = Residuals.shapes(v, precision).values()
        found = {
            "a": a.update(shape=(self.value_heads, self.tokens, a.shape[3])),
            "gamma": gamma.update(shape=(self.tokens, self.value_heads)),
        }
        of_key_heads = jax.ShapeDtypeStruct((self.tokens, self.key_heads), jnp.float32)
        return found | (dict.fromkeys(_LENGTHS, of_key_heads) if self.l2norm else {})

    def chunk_state_shapes(self, v: jax.Array, precision: Any, *, groups: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        """What `states` writes, for the heads of one of so many groups."""
        shapes = ChunkStates.shapes(self.parts, v, self.key_dim, precision, groups=groups)
        vd = shapes["vd"]
        return shapes | {"vd": vd.update(shape=(self.tokens, *vd.shape[2:]))}

    def chunk_gradient_shape(self, v: jax.Array, precision: Any, *, groups: int) -> jax.ShapeDtypeStruct:
        """dh, what `state_gradients` writes: as h, and where operands are split behind it what dv leaves of 64 rows."""
        h = self.chunk_state_shapes(v, precision, groups=groups)["h"]
        tiles = h.shape[2] + self.split * CHUNK // state_tile_rows(self.key_dim)
        return h.update(shape=(*h.shape[:2], tiles, *h.shape[3:]))

    def prepared(self, residuals: Residuals, *, queries: bool = True) -> dict[str, jax.Array]:
        """What `prepare` has written, as operands; without the lengths of `queries` for who does not read them."""
        found = {"gamma": residuals.gamma}
        if self.l2norm:
            assert residuals.lengths is not None
            found |= dict(zip(_LENGTHS[: 1 + queries], residuals.lengths, strict=False))
        return self.flat(**found) | {"a": residuals.a.reshape(self.value_heads, self.tokens, -1)}

    def residuals(self, results: Mapping[str, jax.Array]) -> Residuals:
        """What `prepare` has written, for other calls."""
        lengths = Lengths(*(self.unflat(results[name]) for name in _LENGTHS)) if self.l2norm else None
        a = results["a"].reshape(self.value_heads, self.batch, self.length, -1)
        return Residuals(a, self.unflat(results["gamma"]), lengths=lengths)

    def forward_steps(self, scale: float, *, keep: Keep = "nothing", measures: bool = False) -> list[Step]:
        """The kernel `forward`, of heads whose blocks have all value columns and of others in halves, or of sequences
        of which it halves long ones; `keep`: what it writes of `ChunkStates`; `measures`: whether it finds lengths of
        queries."""
        awaits, whole = forward_kernel.STATE if self.cut else forward_kernel.PREPARED, self.whole
        may_be_uneven = self.packed and self.sequences > 1 and whole == self.value_heads
        has_halves = self.value_tile > 64 and keep != "states"  # `forward`, in this form
        halves = policy.halves(self.parts, self.value_heads) if may_be_uneven and has_halves else None
        rename = self.of_pieces("initial_state", "entering")
        options: dict[str, Any] = {"rename": rename, "scale": scale, "keep": keep, "measures": measures}
        options |= {"halve_long": halves is not None, **(halves or policy.NO_HALVES)._asdict()}
        steps = [self.step(forward_kernel, first_head=0, heads=whole, awaits=awaits, **options)]
        if (rest := self.value_heads - whole) > 0:
            options |= {"value_tile": 64, "awaits": forward_kernel.NOTHING}
            steps.append(self.step(forward_kernel, first_head=whole, heads=rest, **options))
        return steps

    def entering_states(
        self, *, adjoint: bool = False, known: bool = False, scale: float = 1.0
    ) -> tuple[list[Step], dict[str, jax.ShapeDtypeStruct]]:
        """Kernels that compute the states `entering` all pieces and, if `adjoint`, gradients of those `leaving` them.

        Args:
            adjoint: whether the gradients are wanted.
            known: whether the pieces have been summarised before.
            scale: factor of q.

        Returns:
            The kernels, none where sequences are whole, and the shapes of what they write.
        """
        if not self.cut:
            return [], {}
        outputs = self.shapes_between()
        states = outputs["entering"]
        if known:
            steps = [self.compose_step("entered")]
            if adjoint:
                steps.append(self.compose_step("left", rename=_OF_GRADIENTS, reverse=True))
            return steps, {"entering": states} | ({"leaving": states} if adjoint else {})
        outputs["response"] = states
        outputs["entering"] = states if adjoint else self.with_firsts(states)
        steps = [self.summaries_step(), self.compose_step()]
        if adjoint:
            outputs |= {"adjoint_response": states, "leaving": self.with_firsts(states)}
            steps.insert(1, self.step(adjoint_summaries_kernel, scale=scale))
            steps.append(self.compose_step(rename=_OF_GRADIENTS, reverse=True))
        return steps, outputs

    def leaving_gradients(
        self, scale: float, *, known: bool = False
    ) -> tuple[list[Step], dict[str, jax.ShapeDtypeStruct]]:
        """Steps and shapes as of `entering_states`, of the gradients alone, where the states are known."""
        if not self.cut:
            return [], {}
        states = self.shapes_between()["entering"]
        if known:
            return [self.compose_step("left", rename=_OF_GRADIENTS, reverse=True)], {"leaving": states}
        steps = [
            self.step(adjoint_summaries_kernel, scale=scale),
            self.compose_step(rename=_OF_GRADIENTS, reverse=True),
        ]
        return steps, {"adjoint_response": states, "leaving": self.with_firsts(states)}

    def with_firsts(self, states: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """States between pieces, with room behind them for what `firsts` says."""
        rows = states.shape[0] if self.firsts < 0 else self.firsts + self.chains
        return states.update(shape=(rows, *states.shape[1:]))

    def of_first_pieces(self, states: jax.Array) -> jax.Array:
        """States of all pieces of a shard, of those that a sequence begins with: [P, ...] -> [N, ...]."""
        return self._of_rows(states)[:, 1]

    def of_last_pieces(self, states: jax.Array) -> jax.Array:
        """States of all pieces of a shard, of those that a sequence ends with: [P, ...] -> [N, ...]."""
        return self._of_rows(states)[:, -2]

    def _of_rows(self, states: jax.Array) -> jax.Array:
        """[P, ...] of a dense batch's pieces, summarised before, by rows of the batch: [B, count + 2, ...]."""
        return states.reshape(self.batch, -1, *states.shape[1:])

    def flat(self, **arrays: jax.Array) -> dict[str, jax.Array]:
        """[B, T, ...] -> [B T, ...]."""
        return {name: x.reshape(self.tokens, *x.shape[2:]) for name, x in arrays.items()}

    def unflat(self, x: jax.Array) -> jax.Array:
        """[B T, ...] -> [B, T, ...]."""
        return x.reshape(self.batch, self.length, *x.shape[1:])

    def states(self, state: jax.Array | None) -> jax.Array:
        """The state, or an empty array, which the kernels take for "not given"."""
        return jnp.zeros(self.state_shape(False).shape, jnp.float32) if state is None else state

    def state_shape(self, wanted: bool, *, whole: bool = False) -> jax.ShapeDtypeStruct:
        """[P, Hv, K, V] of all pieces, or `whole` sequences, or P = 0, which the kernels take for "not wanted"."""
        count = self.sequences if whole else self.parts
        shape = (count if wanted else 0, self.value_heads, self.key_dim, self.value_dim)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def prepare_step(self, *, queries: bool = True) -> Step:
        """`prepare`, of all heads; with lengths of `queries` where q and k are to be normalised."""
        slots = tables.slot_count(self.tokens, self.sequences)
        together = policy.prepared_together(slots, self.key_heads, self.value_heads)
        keys = 1 if self.ratio % together == 0 else 2
        if together == 4 and self.key_heads == self.value_heads:
            keys = 4
        rename = {} if queries else {"query_lengths": _UNMEASURED}
        return self.step(prepare_kernel, rename=rename, together=together, keys=keys)

    def summaries_step(self, shard: policy.Cut | None = None) -> Step:
        """`summaries` of all pieces but those that sequences end with, or of all of a `shard`."""
        if shard is None:
            # Of places for more sequences than there can be pieces it is supposed that one is taken.
            sequences = self.sequences if self.sequences < self.recurrences else 1
            responses, rename = self.between - (sequences if self.packed else 0), {}
            transitions = max(responses - sequences, 0)  # none of those that sequences begin with
        else:
            responses = transitions = shard.pieces * self.sequences
            rename = {"pieces": "shard_pieces", "cuts": "shard_cuts"}
        step = self.step(summaries_kernel, rename=rename)
        sizes = (self.value_heads, self.key_dim, self.value_dim)
        if policy.summarised_alone(responses, transitions, *sizes):
            return dataclasses.replace(step, shared_at_least=policy.MORE_THAN_HALF)
        return step

    def compose_step(
        self,
        of_shard: str | None = None,
        *,
        rename: Mapping[str, str] | None = None,
        reverse: bool = False,
        **options: Any,
    ) -> Step:
        """`compose` of all sequences that are cut, or of those of a shard by its table `of_shard` (`shard_tables`)."""
        chains = {} if of_shard is None else {"chains": of_shard}
        sizes = (self.chains or self.sequences, self.value_heads, options.get("value_dim", self.value_dim))
        options |= {"reverse": reverse, "of_pieces": int(of_shard is not None)}
        options["firsts"] = self.firsts if reverse == self.backward else -1
        options |= policy.composed(*sizes, packed=self.packed and of_shard is None)._asdict()
        return self.step(compose_kernel, rename={**(rename or {}), **chains}, **options)

    def step(self, kernel: Any, *, rename: Mapping[str, str] | None = None, **options: Any) -> Step:
        """One kernel of the sequence, by its module; options that are not fields of its Config are scalars. Besides
        these it may have those of every call.
        """
        sizes = {"key_dim": self.key_dim, "value_dim": self.value_dim, "dtype": self.dtype}
        values = sizes | {"value_tile": self.value_tile, "l2norm": self.l2norm, "split": self.split} | options
        fields = [field.name for field in dataclasses.fields(kernel.Config)]
        config = kernel.Config(**{field: values[field] for field in fields})
        scalars = {name: x for name, x in options.items() if name not in fields}
        of_call = {"cut_beyond": self.asked_beyond, "in_place": int(self.in_place), "firsts": self.firsts}
        scalars = {"ratio": self.ratio, **of_call, **scalars}
        name = kernel.__name__.rpartition(".")[2]
        neighbours = policy.neighbours(name, getattr(config, "value_tile", self.value_dim), self.value_dim)
        return Step(name, config, scalars, rename or {}, neighbours=neighbours)
