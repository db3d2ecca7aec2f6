"""The gated delta rule over a mesh, forward and backward: what there is to cut, and what each device computes of it.

It is local in batch and heads. Where the sequence is cut, `context_parallel` carries the state from device to device.
`mesh` finds out how a call is cut and gives each device its part; here it is told the shapes of all that a call takes,
returns and keeps, in its letters, and decided what can be kept in which kind of mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_qla import context_parallel, dispatch, policy
from jax_qla.context_parallel import Carry
from jax_qla.dispatch import Settings
from jax_qla.implementations import Choice
from jax_qla.mesh import Axes, Layout, described, flattened, mapped, on_each_device, partitioned
from jax_qla.residuals import Between, Keep, Lengths, Pieces, Residuals, keeping, splits
from jax_qla.segments import state_count

OPERANDS = ("bthk", "bthk", "btHv", "btH", "btH")
"""Shapes of q, k, v, g and beta."""

_OF_ROWS, _OF_VD, _OF_PIECES, _OF_CHUNKS, _OF_LENGTHS = (
    ("Hbtc", "btH"),
    ("btHv",),
    ("pHkv", "pHyz", "pH"),
    ("pHxvk",),
    ("bth", "bth"),
)
"""Shapes of what `Residuals` holds, all but the first perhaps not (`_residual_dims`): p are all pieces or chunks of a
device, by batch and sequence."""
_CARRY = ("sbHkv", "sbHkj", "sbHkv", "sbHyz", "sbH")
"""Shapes of what `Carry` holds, the last three perhaps not. Pieces go with the rows of the batch that they are of."""


def _state_dims(segments: Any) -> str:
    return "bHkv" if segments is None else "bnHkv"


def _exchanging(layout: Layout, segments: jax.Array | None) -> Layout:
    """`layout`, by which devices exchange nothing where there is no sequence that could go on from one to the next."""
    return dataclasses.replace(layout, alone=True) if segments is not None and segments.shape[1] == 0 else layout


@functools.partial(jax.jit, static_argnames=("layout", "settings", "output_final_state", "with_residuals", "keep"))
def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    *,
    layout: Layout,
    settings: Settings,
    output_final_state: bool,
    with_residuals: bool,
    keep: Keep = "nothing",
) -> tuple[jax.Array, jax.Array | None, Residuals | None, Carry | None]:
    """o, final_state, residuals and what the backward needs of the exchange between the shards of the sequence.

    Shapes are those of `context_parallel`, of the whole batch as the caller sees it. Where `layout` says that the
    caller has cut the sequence (`manual_sequence`), final_state is this device's summand of it. `keep`: what
    residuals are to have of vd and h; h they have only where the compiler may not cut the operands.
    """
    layout = _exchanging(layout, segments)
    # In Auto mode nothing can leave whose size is the number of shards: the backward repeats the exchange.
    with_carry = layout.sequence_is_cut and with_residuals
    with_residuals = with_residuals and settings.choice.on_cuda == "cuda"
    piece_rows = None
    # Nor can what lies between pieces of sequences that the compiler may cut. Those of a dense shard are in the carry.
    without_h = keeping(None, settings.precision, q.dtype)
    if not with_residuals:
        keep = "nothing"
    elif layout.automatic and keep == "states":
        keep = without_h
    if with_residuals and not layout.automatic and not (layout.sequence_is_cut and segments is None):
        sizes, of_part = _part(layout, k, v, segments)
        of_part |= {"split": splits(settings.precision, q.dtype), "asked_rows": settings.choice.piece_rows}
        piece_rows = policy.kept_rows(*sizes, **of_part, with_states=keep == "states")
    function = functools.partial(
        _forward,
        layout=layout,
        settings=settings,
        output_final_state=output_final_state,
        with_residuals=with_residuals,
        with_carry=with_carry,
        piece_rows=piece_rows,
    )
    keeps, operands = functools.partial(function, keep=keep), (q, k, v, g, beta, initial_state, segments)
    if not layout.automatic or keep == "nothing":
        return keeps(*operands)
    # What the compiler partitions is one operation to JAX, which does not look inside for what nobody uses.
    o, final_state, residuals, carry = dispatch.kept_if_used(
        keeps, functools.partial(function, keep="nothing"), operands
    )
    return o, final_state, residuals, carry


def _forward(
    *operands: Any,
    layout: Layout,
    settings: Settings,
    output_final_state: bool,
    with_residuals: bool,
    with_carry: bool,
    piece_rows: int | None,
    keep: Keep,
) -> tuple[jax.Array, jax.Array | None, Residuals | None, Carry | None]:
    """`forward`, once it is known what residuals there are to be, and whether a carry."""
    q, v, segments = operands[0], operands[2], operands[6]
    residual_dims = _residual_dims(
        keep != "nothing", piece_rows is not None, keep == "states", settings.keeps_lengths(q.dtype)
    )
    carry_dims = _CARRY if with_residuals and segments is None else _CARRY[:2]
    states = _state_dims(segments)

    def local(axes: Axes, *operands: Any) -> tuple[jax.Array, ...]:
        o, final_state, residuals, carry = context_parallel.forward(
            *operands,
            axes=() if layout.alone else axes,
            settings=settings,
            output_final_state=output_final_state,
            with_residuals=with_residuals,
            piece_rows=piece_rows,
            keep=keep,
        )
        kept = (x[None] for x in jax.tree.leaves(carry)) if with_carry else ()
        return o, *([final_state] if output_final_state else []), *jax.tree.leaves(residuals), *kept

    out_dims: tuple[str, ...] = ("btHv",)
    sums: tuple[bool, ...] = (False,)
    for wanted, more, is_sum in (
        (output_final_state, (states,), True),
        (with_residuals, residual_dims, False),
        (with_carry, carry_dims, False),
    ):
        if wanted:
            out_dims, sums = out_dims + more, sums + (is_sum,) * len(more)
    results = list(
        on_each_device(
            layout,
            local,
            operands,
            (*OPERANDS, states, "bne"),
            out_dims,
            sums,
            (q.shape[-2], v.shape[-2]),
            dispatch.SECOND_ORDER,
        )
    )
    o = results.pop(0)
    final_state = results.pop(0) if output_final_state else None
    residuals = None
    if with_residuals:
        found, results = iter(results[: len(residual_dims)]), results[len(residual_dims) :]
        residuals = Residuals(next(found), next(found))
        if keep != "nothing":
            residuals = residuals._replace(vd=next(found))
        if piece_rows is not None:
            residuals = residuals._replace(between=Between(*(next(found) for _ in _OF_PIECES)))
        if keep == "states":
            residuals = residuals._replace(h=next(found))
        if lengths := tuple(found):
            residuals = residuals._replace(lengths=Lengths(*lengths))
    return o, final_state, residuals, _carry(results) if with_carry else None


def _residual_dims(vd: bool, between: bool, h: bool, lengths: bool) -> tuple[str, ...]:
    """Shapes of the arrays of `Residuals`, by which of those that may be missing are there."""
    return _OF_ROWS + _OF_VD * vd + _OF_PIECES * between + _OF_CHUNKS * h + _OF_LENGTHS * lengths


def _part(
    layout: Layout, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """What `policy.kept_rows` wants to know of the operands' shapes that each device computes."""
    cut_by = (layout.batch, layout.sequence, layout.heads)
    batch, tokens, heads = (n // _devices(layout, axes) for n, axes in zip(v.shape, cut_by, strict=False))
    sequences = batch if segments is None else batch * segments.shape[1]
    sizes = (batch * tokens, sequences, heads, k.shape[3], v.shape[3])
    return sizes, {"packed": segments is not None, "ratio": v.shape[2] // k.shape[2]}


def _devices(layout: Layout, axes: Axes) -> int:
    """Among which these axes divide the operands."""
    sizes = (jax.sharding.get_abstract_mesh() if layout.mesh is None else layout.mesh).shape
    return math.prod(sizes[axis] for axis in axes if axis in layout.mapped)


def state_places(
    layout: Layout, choice: Choice, k: jax.Array, v: jax.Array, segments: jax.Array | None, cuts: int
) -> int:
    """Places that all devices together have in `Residuals.h`, with so many for cuts in `Residuals.between`."""
    (tokens, sequences, *others), _ = _part(layout, k, v, segments)
    devices = _devices(layout, layout.batch + layout.sequence)
    pieces = sequences + cuts // devices
    if layout.sequence_is_cut and segments is None:
        longest = tokens // max(sequences, 1)
        cut = policy.shard_cut(longest, sequences, *others, asked_rows=choice.piece_rows)
        pieces = sequences * (cut.pieces + 2)  # two of which are empty
    return devices * state_count(tokens, pieces)


def _carry(arrays: Sequence[jax.Array]) -> Carry:
    """From its leaves."""
    incoming, transition, *pieces = arrays
    return Carry(incoming, transition, Pieces(*pieces) if pieces else None)


@functools.partial(jax.jit, static_argnames=("layout", "settings"))
def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    carry: Carry | None,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    *,
    layout: Layout,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of `forward`'s operands; d_initial_state is a summand where its final_state is."""
    layout, states = _exchanging(layout, segments), _state_dims(segments)
    stateful = initial_state is not None
    kept = None if carry is None else tuple(jax.tree.leaves(carry))
    if residuals is not None and layout.automatic:
        residuals = residuals._replace(between=None, h=None)
        if splits(settings.precision, q.dtype):  # two numbers are of use with h only
            residuals = residuals._replace(vd=None)
    residual_dims: tuple[str, ...] = ()
    if residuals is not None:
        residual_dims = _residual_dims(*(x is not None for x in residuals[2:]))

    def local(axes: Axes, *operands: Any) -> tuple[jax.Array, ...]:
        carry = None if operands[8] is None else _carry([x[0] for x in operands[8]])
        operands = (*operands[:8], carry, *operands[9:])
        gradients: tuple[Any, ...] = context_parallel.backward(
            *operands, axes=() if layout.alone else axes, settings=settings
        )
        return gradients if stateful else gradients[:5]

    results = on_each_device(
        layout,
        local,
        (q, k, v, g, beta, initial_state, segments, residuals, kept, do, d_final_state),
        (*OPERANDS, states, "bne", residual_dims, _CARRY, "btHv", states),
        (*OPERANDS, states) if stateful else OPERANDS,
        (*(False,) * 5, True)[: 6 if stateful else 5],
        (q.shape[-2], v.shape[-2]),
        dispatch.SECOND_ORDER,
    )
    dq, dk, dv, dg, dbeta = results[:5]
    return dq, dk, dv, dg, dbeta, results[5] if stateful else None


@functools.partial(
    jax.jit, static_argnames=("layout", "recurrence", "options", "output_final_state", "name", "instead")
)
def without_exchange(
    layout: Layout,
    recurrence: Callable[..., tuple[jax.Array, jax.Array | None]],
    operands: Sequence[Any],
    *,
    options: tuple[tuple[str, Any], ...],
    output_final_state: bool,
    name: str,
    instead: str,
) -> tuple[jax.Array, jax.Array | None]:
    """o and final states by a function that goes token by token, on each device for itself.

    Args:
        recurrence, options: a function of the operands in `dispatch.forward`'s form, and its keyword arguments.
        operands: those of `forward`.
        output_final_state: whether final states are wanted; `recurrence` returns them then, or always.
        name, instead: what computes whole sequences only, and what does not.

    Raises:
        NotImplementedError: the sequence is cut.
    """
    if layout.sequence_is_cut:
        raise NotImplementedError(
            f"the sequence is cut over {described(layout.sequence)}, and {name} computes whole sequences only: use "
            f"{instead}"
        )
    layout = dataclasses.replace(layout, sequence=())  # of one device, if any: nothing that varies over it
    flat = flattened(operands, (*OPERANDS, _state_dims(operands[6]), "bne"))

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        function = functools.partial(recurrence, **dict(options))
        o, final_state = context_parallel.on_one_row(function, *flat.rebuild(arrays))
        return (o,) if final_state is None or not output_final_state else (o, final_state)

    out_dims = ("btHv", _state_dims(operands[6])) if output_final_state else ("btHv",)
    o, *final_state = mapped(layout, local, flat.dims, out_dims, flat.arrays)
    return o, final_state[0] if output_final_state else None


def by_batch_and_heads(
    function: Callable[..., tuple[jax.Array, jax.Array | None]],
    operands: Sequence[jax.Array | None],
    *,
    output_final_state: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """o and final_state by `function`, of q, k, v, g, beta and initial_state of a dense batch, in an Auto mesh: each
    device computes the rows and heads that the compiler gives it, of whole sequences. Not to be differentiated."""
    flat = flattened(operands, (*(shape.replace("t", "w") for shape in OPERANDS), "bHkv"))

    def local(axes: Axes, summed: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        o, final_state = function(*flat.rebuild(arrays))
        return (o,) if final_state is None else (o, final_state)

    heads = (flat.arrays[0].shape[2], flat.arrays[2].shape[2])
    out_dims = ("bwHv", "bHkv") if output_final_state else ("bwHv",)
    o, *final_state = partitioned(local, flat.dims, out_dims, heads, dispatch.SECOND_ORDER)(*flat.arrays)
    return o, final_state[0] if output_final_state else None
