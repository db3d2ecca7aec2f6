"""The short depthwise causal convolution of Gated DeltaNet layers: whole, packed, or cut over devices by tokens.

    y_t = activation(bias + sum_{i < W} weight_i x_{t - W + 1 + i})        channel by channel

Cut along the sequence, a device needs the W - 1 tokens before its own, which it receives from its neighbour: 2 (W - 1)
D bytes in bfloat16 for each row of the batch, forwards, and as much backwards. Source: Yang, Kautz, Hatamizadeh, "Gated
Delta Networks" (arXiv 2412.06464), where it follows the projections to q, k and v.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import context_parallel, sharding
from jax_qla.context_parallel import Axes
from jax_qla.segments import segments_from_cu_seqlens
from jax_qla.sharding import MeshAxes
from jax_qla.widening import widest

ACTIVATIONS = (None, "silu")

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    initial_tail: jax.Array | None = None,
    output_final_tail: bool = False,
    mesh_axes: MeshAxes | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Convolves every channel with its own filter over the W last tokens; sums in float32.

    Sharded as `chunk_gated_delta_rule` is, with channels in place of heads. Differentiable in every mode and order.

    Args:
        x: [B, T, D], bfloat16, float16, float32 or float64.
        weight: [W, D], W >= 1; weight[W - 1] multiplies the token itself. Any floating dtype.
        bias: [D], or None.
        activation: None or "silu".
        segment_ids: int32 [B, T]: a token sees only the tokens of its sequence, a maximal run of equal ids other than 0
            within a row. Padding (0) has y = 0.
        cu_seqlens: int32 [N + 1]: the same for B = 1 and sequences in rows [cu_seqlens[n], cu_seqlens[n + 1]).
        initial_tail: [B, W - 1, D] in x's dtype, the tokens before the first, default zero. For a batch that is not
            packed.
        output_final_tail: whether to return the last W - 1 tokens, from which the next call continues.
        mesh_axes: as in `chunk_gated_delta_rule`; `heads` names axes that cut D.

    Returns:
        y: [B, T, D] in x's dtype.
        final_tail: [B, W - 1, D] in x's dtype, or None unless output_final_tail.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is wrong, or does not go with another or with the mesh.

    Example:
        >>> import jax.numpy as jnp, jax_qla
        >>> y, tail = jax_qla.causal_conv1d(jnp.ones((1, 5, 2)), jnp.ones((4, 2)), output_final_tail=True)
        >>> y[0, :, 0].tolist(), tail.shape
        ([1.0, 2.0, 3.0, 4.0, 4.0], (1, 3, 2))
    """
    _check(x, weight, bias, activation, segment_ids, cu_seqlens, initial_tail, output_final_tail)
    operands: Sequence[Any] = [
        None if operand is None else jnp.asarray(operand)
        for operand in (x, weight, bias, segment_ids, cu_seqlens, initial_tail)
    ]
    dims = ("bth", "jh", "h", "bt", "n", "bjh")
    layout = sharding.resolve(
        mesh_axes, operands, dims, names={"h": "D"}, whole="the filter and the number of sequences"
    )
    y, *tail = _spread(operands, layout=layout, dims=dims, activation=activation, output_final_tail=output_final_tail)
    return y, tail[0] if tail else None


@functools.partial(jax.jit, static_argnames=("layout", "dims", "activation", "output_final_tail"))
def _spread(
    operands: Sequence[jax.Array | None],
    *,
    layout: sharding.Layout,
    dims: tuple[str, ...],
    activation: str | None,
    output_final_tail: bool,
) -> tuple[jax.Array, ...]:
    """`_local` on each device's part; compiled, so that calls outside of a program compile once."""
    present = [(operand, d) for operand, d in zip(operands, dims, strict=True) if operand is not None]
    tree = jax.tree.structure(operands)

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _local(
            *jax.tree.unflatten(tree, arrays),
            activation=activation,
            output_final_tail=output_final_tail,
            axes=layout.sequence,
        )

    arrays, shapes = zip(*present, strict=True)
    return sharding.mapped(layout, local, shapes, ("bth", "bjh") if output_final_tail else ("bth",), arrays)


def _local(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    cu_seqlens: jax.Array | None,
    initial_tail: jax.Array | None,
    *,
    activation: str | None,
    output_final_tail: bool,
    axes: Axes,
) -> tuple[jax.Array, ...]:
    """y and, if wanted, the final tail, of one shard of the sequence; `axes` are those that it is cut over."""
    length, halo = x.shape[1], weight.shape[0] - 1
    shards, index = (jax.lax.axis_size(axes), jax.lax.axis_index(axes)) if axes else (1, 0)
    first = index * length
    if cu_seqlens is not None:
        bounds = segments_from_cu_seqlens(cu_seqlens, length * shards)
        row = first + jnp.arange(length, dtype=jnp.int32)
        of_row = jnp.searchsorted(bounds[:, 1], row, side="right", method="sort")
        inside = (of_row < bounds.shape[0]) & (row >= jnp.min(bounds, initial=length * shards))
        segment_ids = jnp.where(inside, of_row + 1, 0)[None].astype(jnp.int32)
    before = ids_before = None
    if axes and halo:
        before = context_parallel.rows_before(x, halo, axes)
        ids_before = None if segment_ids is None else context_parallel.rows_before(segment_ids, halo, axes)
    if initial_tail is not None:
        row = first - halo + jnp.arange(halo, dtype=jnp.int32)
        tail = jnp.take(initial_tail, jnp.minimum(row + halo, halo - 1), axis=1) if axes and halo else initial_tail
        before = tail if before is None else jnp.where((row < 0)[:, None], tail, before)
    y = _convolve(x, before, weight, bias, segment_ids, ids_before, activation)
    if not output_final_tail:
        return (y,)
    if length >= halo:
        # Of a sharded x, `jnp.take` fetches these rows only, where a slice would gather all.
        tail = jnp.take(x, jnp.arange(length - halo, length), axis=1)
    else:
        known = jnp.zeros((x.shape[0], halo, x.shape[2]), x.dtype) if before is None else before
        tail = jnp.concatenate([known, x], axis=1)[:, length:]
    if axes:
        tail = jax.lax.psum(jnp.where(index == shards - 1, tail, jnp.zeros_like(tail)), axes)
    return y, tail


def _earlier(x: jax.Array, before: jax.Array | None, distance: int) -> jax.Array:
    """[B, T, ...]: the rows `distance` before those of x, from `before` [B, W - 1, ...] (None: zero) where x begins.

    By padding alone, which the compiler partitions along T with an exchange of the border rows; of a concatenation it
    would gather all of x.
    """
    length, zero = x.shape[1], jnp.zeros((), x.dtype)

    def pad(rows: jax.Array, low: int, high: int) -> jax.Array:
        return jax.lax.pad(rows, zero, [(0, 0, 0), (low, high, 0), *((0, 0, 0),) * (x.ndim - 2)])

    within = pad(x, distance, -distance)
    if before is None:
        return within
    start = before.shape[1] - distance
    rows = before[:, start : start + length]
    return within + pad(rows, 0, length - rows.shape[1])


@functools.partial(jax.checkpoint, static_argnums=(6,))
def _convolve(
    x: jax.Array,
    before: jax.Array | None,
    weight: jax.Array,
    bias: jax.Array | None,
    ids: jax.Array | None,
    ids_before: jax.Array | None,
    activation: str | None,
) -> jax.Array:
    """y of x and the rows before it. Checkpointed: else a scan over layers would keep W shifted copies of x."""
    width = weight.shape[0]
    wide = widest(x.dtype)
    weight = weight.astype(wide)[:, None, None]
    visible = own = None if ids is None else ids != 0
    if own is not None:
        # What padding holds must not matter, not even in a product with a gradient of zero.
        x = jnp.where(own[..., None], x, 0)
    # A sum of shifted copies, which XLA fuses with the mask and the activation into one elementwise kernel.
    y = x.astype(wide) * weight[-1]
    later = ids
    for distance in range(1, width):
        part = _earlier(x, before, distance).astype(wide)
        if ids is not None and visible is not None:
            earlier = _earlier(ids, ids_before, distance)
            visible &= earlier == later
            part = jnp.where(visible[..., None], part, 0)
            later = earlier
        y += part * weight[width - 1 - distance]
    if bias is not None:
        y += bias.astype(wide)[None, None]
    if activation == "silu":
        y = jax.nn.silu(y)
    if own is not None:
        y = jnp.where(own[..., None], y, 0)
    return y.astype(x.dtype)


def _check(
    x: Any,
    weight: Any,
    bias: Any,
    activation: Any,
    segment_ids: Any,
    cu_seqlens: Any,
    initial_tail: Any,
    output_final_tail: Any,
) -> None:
    def rank(name: str, array: Any, axes: str) -> None:
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{name} must be an array [{axes}], got {type(array).__name__}")
        if len(array.shape) != axes.count(",") + 1:
            raise ValueError(f"{name} must have shape [{axes}], got {tuple(array.shape)}")

    def shape(name: str, array: Any, axes: str, expected: tuple[int, ...]) -> None:
        rank(name, array, axes)
        if tuple(array.shape) != expected:
            raise ValueError(f"{name} must have shape {expected}, [{axes}], got {tuple(array.shape)}")

    def integers(name: str, array: Any) -> None:
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} must be int32, got {array.dtype}")

    rank("x", x, "B, T, D")
    if jnp.dtype(x.dtype).name not in _DTYPES:
        raise TypeError(f"x must be {' or '.join(_DTYPES)}, got {x.dtype}")
    batch, tokens, channels = x.shape
    rank("weight", weight, "W, D")
    width = weight.shape[0]
    if width < 1 or weight.shape[1] != channels:
        raise ValueError(f"weight must have shape [W, D] with W >= 1 and D = {channels}, got {tuple(weight.shape)}")
    if bias is not None:
        shape("bias", bias, "D", (channels,))
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    if not isinstance(output_final_tail, bool):
        raise TypeError(f"output_final_tail must be True or False, got {output_final_tail!r}")
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("cu_seqlens and segment_ids both say where the sequences lie: give only one of them")
    if segment_ids is not None:
        shape("segment_ids", segment_ids, "B, T", (batch, tokens))
        integers("segment_ids", segment_ids)
    if cu_seqlens is not None:
        rank("cu_seqlens", cu_seqlens, "N + 1")
        integers("cu_seqlens", cu_seqlens)
        if batch != 1:
            raise ValueError(f"cu_seqlens packs all sequences into one row: B must be 1, got x with B = {batch}")
        if cu_seqlens.shape[0] == 0:
            raise ValueError("cu_seqlens must have N + 1 entries, the first of which is 0, got none")
    if initial_tail is not None:
        if segment_ids is not None or cu_seqlens is not None:
            raise ValueError("initial_tail goes with a batch that is not packed: leave out segment_ids and cu_seqlens")
        shape("initial_tail", initial_tail, "B, W - 1, D", (batch, width - 1, channels))
        if initial_tail.dtype != x.dtype:
            raise TypeError(f"initial_tail must have x's dtype {x.dtype}, got {initial_tail.dtype}")
