"""The short depthwise causal convolution of Gated DeltaNet layers: whole, packed, or cut over devices by tokens.

    y_t = activation(bias + sum_{i < W} weight_i x_{t - W + 1 + i})        channel by channel

Cut along the sequence, a device needs the W - 1 tokens before its own, which it receives from its neighbour: 2 (W - 1)
D bytes in bfloat16 for each row of the batch, in the backward pass again, and as much for their gradients. Where the
compiler cuts plain JAX, it exchanges them for each tap: W / 2 times that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import convolution, mesh
from jax_qla.batching import into_the_batch
from jax_qla.checks import (
    TOKEN_DTYPES,
    arrays,
    check_dtype,
    check_flag,
    check_packing,
    check_rank,
    check_shape,
    known_dtype,
    taking_numpy,
)
from jax_qla.convolution import Rows
from jax_qla.implementations import Choice, choose_kernels, load
from jax_qla.mesh import Axes, MeshAxes
from jax_qla.refusal import first_order, reverse_mode_only
from jax_qla.segments import segments_from_cu_seqlens
from jax_qla.varying import match_varying
from jax_qla.widening import widest

ACTIVATIONS = (None, "silu")

_DIMS = ("bth", "jh", "h", "bt", "n", "bjh")
"""Shapes of x, weight, bias, segment_ids, cu_seqlens and initial_tail, as `mesh` writes them."""

_FIRST_ORDER = (
    "causal_conv1d in 16 bits has first derivatives by reverse mode only (jax.grad, jax.vjp); "
    'for jvp and second derivatives use implementation="xla"'
)


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
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Convolves every channel with its own filter over the W last tokens; sums in float32 or wider.

        y_t = activation(bias + sum_{i < W} weight_i x_{t - W + 1 + i})

    Sharded as `chunk_gated_delta_rule` is, with channels in place of heads. With "xla" it is differentiable in every
    mode and order; with "cuda", and on every platform where the platform is to decide between the two, once in reverse
    mode. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), where it follows the projections
    to q, k and v.

    Args:
        x: [B, T, D], bfloat16, float16, float32 or float64.
        weight: [W, D], W >= 1; weight[W - 1] multiplies the token itself. Any floating dtype.
        bias: [D], or None.
        activation: None or "silu".
        segment_ids: int32 [B, T]: a token sees only the tokens of its sequence, a maximal run of equal ids other than 0
            within a row. Padding (0) has y = 0.
        cu_seqlens: int32 [N + 1]: the same for B = 1 and sequences in rows [cu_seqlens[n], cu_seqlens[n + 1]).
        initial_tail: [B, W - 1, D] in x's dtype, the tokens before the first; default zero. Not with a packed batch.
        output_final_tail: whether to return the last W - 1 tokens, from which the next call continues. In a packed
            batch too they are the last of the row, whatever sequences they belong to, or padding.
        mesh_axes: as in `chunk_gated_delta_rule`; `heads` names the axes that cut D.
        implementation: "cuda" (Hopper kernels; W = 4, D a multiple of 8, x in bfloat16 or float16), "xla" (any
            platform, size and dtype), or a sequence of these. Of a sequence, the first is taken that can compute the
            operands on the platform that the program is lowered for. None is ("cuda", "xla").

    Returns:
        y: [B, T, D] in x's dtype.
        final_tail: [B, W - 1, D] in x's dtype, or None unless output_final_tail.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, rank, size or value, or does not go with another.
        NotImplementedError: no implementation asked for can take the operands, or the mesh cuts them in a way that
            cannot be computed; W, or with output_final_tail T, is a symbol of `jax.export`; "cuda" alone was asked for
            and the platform is not CUDA (raised when the program is lowered); or forward mode or a second derivative
            was asked for where "cuda" may be taken.

    Example:
        >>> import jax.numpy as jnp, jax_qla
        >>> y, tail = jax_qla.causal_conv1d(jnp.ones((1, 5, 2)), jnp.ones((4, 2)), output_final_tail=True)
        >>> y[0, :, 0].tolist(), tail.shape
        ([1.0, 2.0, 3.0, 4.0, 4.0], (1, 3, 2))
    """
    (y,), tail = in_parts(
        *(x, weight, bias),
        parts=None,
        activation=activation,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        initial_tail=initial_tail,
        output_final_tail=output_final_tail,
        mesh_axes=mesh_axes,
        implementation=implementation,
    )
    return y, tail


@taking_numpy
def in_parts(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    parts: tuple[int, ...] | None,
    activation: str | None = None,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    initial_tail: jax.Array | None = None,
    output_final_tail: bool = False,
    mesh_axes: MeshAxes | None = None,
    implementation: str | Sequence[str] | None = None,
    partly: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """`causal_conv1d` with y as one array for each of `parts`, which add up to D. The kernels write them as such; else
    y is cut afterwards. `partly`: as in `mesh.resolve`, for "xla" alone."""
    _check(x, weight, bias, activation, segment_ids, cu_seqlens, initial_tail, output_final_tail)
    operands = arrays(x, weight, bias, segment_ids, cu_seqlens, initial_tail, what="x, weight", instead="")
    parts = parts or (x.shape[2],)
    whole = "the filter and the number of sequences"
    layout = mesh.resolve(mesh_axes, operands, _DIMS, names={"h": "D"}, whole=whole, partly=partly)
    # What is differentiated is laid out as its gradients will be.
    operands = tuple(x if x is None else mesh.align(layout, x, d) for x, d in zip(operands, _DIMS, strict=True))
    # Where channels are cut, a part lies on some devices only.
    together = (sum(parts),) if layout.heads or layout.automatic else parts
    choice = choose_kernels(
        functools.partial(load("cuda.conv1d").why_not, x, weight, together), implementation, "the convolution"
    )
    by_kernels = choice.on_cuda == "cuda"
    either = by_kernels and layout.automatic and len(parts) > 1
    options = _Options(choice, layout, parts if either else together, activation == "silu", either)
    y = (_differentiable if by_kernels else _plain)(options, operands)
    if len(y) < len(parts):
        y = convolution.cut(y[0], parts)
    return y, _final_tail(options, operands) if output_final_tail else None


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is static in a call."""

    choice: Choice
    layout: mesh.Layout
    parts: tuple[int, ...]
    silu: bool
    either: bool = False
    """Whether a device is asked for y in one array and for its parts, since only the compiler knows if it cuts the
    channels. A device computes the parts if it has all channels, and else y; the other is zeros, which nobody reads
    once the compiler has found out, and which it then leaves out."""

    @property
    def out_dims(self) -> tuple[str, ...]:
        """Of the parts of y; of several, whose channels are not cut, each has a letter of its own."""
        return ("bth",) if len(self.parts) == 1 else tuple(f"bt{letter}" for letter in "xyz"[: len(self.parts)])

    def parts_of(self, rows: Rows) -> tuple[int, ...]:
        """Those of y on a device."""
        channels = rows.x.shape[2]
        return self.parts if channels == sum(self.parts) else (channels,)


@functools.partial(jax.jit, static_argnums=0)
def _plain(options: _Options, operands: Sequence[jax.Array | None]) -> tuple[jax.Array, ...]:
    """y in plain JAX on each device's part; compiled, so that calls outside of a program compile once."""
    by_compiler = options.layout.automatic or options.layout.partly

    def local(axes: Axes, *operands: Any) -> tuple[jax.Array, ...]:
        return convolution.cut(convolution.plain(_rows(axes, *operands), options.silu, by_compiler), options.parts)

    return _mapped(options.layout, local, operands, options.out_dims)


@functools.partial(jax.jit, static_argnums=0)
def _final_tail(options: _Options, operands: Sequence[jax.Array | None]) -> jax.Array:
    x, weight, _, _, _, initial_tail = operands

    def local(axes: Axes, x: Any, weight: Any, initial_tail: Any) -> tuple[jax.Array]:
        return (_tail(axes, x, _rows(axes, x, weight, None, None, None, initial_tail).before, weight.shape[0] - 1),)

    (tail,) = _mapped(options.layout, local, (x, weight, initial_tail), ("bjh",), dims=("bth", "jh", "bjh"))
    return tail


def _mapped(
    layout: mesh.Layout,
    local: Callable[..., tuple[jax.Array, ...]],
    operands: Sequence[jax.Array | None],
    out_dims: tuple[str, ...],
    dims: tuple[str, ...] = _DIMS,
) -> tuple[jax.Array, ...]:
    """local(axes, *operands) on each device's part, `axes` being those that cut the sequence, as JAX differentiates it;
    where the compiler cuts the operands, it cuts what `local` does with all of them."""
    tree = jax.tree.structure(tuple(operands))
    present = [(x, d) for x, d in zip(operands, dims, strict=True) if x is not None]
    arrays, shapes = zip(*present, strict=True)

    def on_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return local(layout.sequence, *jax.tree.unflatten(tree, arrays))

    return mesh.mapped(layout, on_device, shapes, out_dims, arrays)


def _differentiable(options: _Options, operands: Sequence[Any]) -> tuple[jax.Array, ...]:
    """y by whatever the platform has, differentiable once by reverse mode."""
    x, weight, bias, segment_ids, cu_seqlens, initial_tail = operands
    refusing = functools.partial(reverse_mode_only, reason=_FIRST_ORDER)
    x, weight, bias, initial_tail = jax.tree.map(refusing, (x, weight, bias, initial_tail))
    # What is the same on all devices has its gradient summed over them, in this dtype.
    wide = widest(x.dtype)
    weight, bias, initial_tail = (None if of is None else of.astype(wide) for of in (weight, bias, initial_tail))
    operands = (x, weight, bias, segment_ids, cu_seqlens, initial_tail)
    return _with_gradient(options, *match_varying(operands, operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(options: _Options, *operands: Any) -> tuple[jax.Array, ...]:
    return _forward(operands, options=options)


@functools.partial(jax.jit, static_argnames="options")
def _forward(operands: tuple[Any, ...], *, options: _Options) -> tuple[jax.Array, ...]:
    def local(axes: Axes, *operands: Any) -> tuple[jax.Array, ...]:
        rows = _rows(() if options.layout.alone else axes, *operands)
        parts = options.parts_of(rows)
        y = convolution.forward(options.choice, rows, parts=parts, silu=options.silu)
        if not options.either:
            return y
        apart, shape = len(parts) > 1, rows.x.shape
        whole = jnp.zeros_like(rows.x) if apart else y[0]
        if not apart:
            y = tuple(jnp.zeros((*shape[:2], part), whole.dtype) for part in options.parts)
        return (jnp.full(shape[0], apart), whole, *y)

    def on_each_device(*operands: Any) -> tuple[jax.Array, ...]:
        out_dims = (*("b", "bth") * options.either, *options.out_dims)
        return _on_each_device(options, local, operands, _DIMS, out_dims, (False,) * len(out_dims))

    y: tuple[jax.Array, ...] = _with_vmap(options, on_each_device)(*operands)
    if not options.either:
        return y
    apart, whole, *y_parts = y
    pairs = zip(y_parts, convolution.cut(whole, options.parts), strict=True)
    return tuple(jnp.where(apart[:, None, None], part, of_whole) for part, of_whole in pairs)


@functools.partial(jax.jit, static_argnames="options")
def _backward(operands: tuple[Any, ...], dys: tuple[jax.Array, ...], *, options: _Options) -> tuple[Any, ...]:
    x, weight, bias, _, _, initial_tail = operands
    given, halo = [operand is not None for operand in (x, weight, bias, initial_tail)], weight.shape[0] - 1

    def local(axes: Axes, *operands: Any) -> tuple[jax.Array, ...]:
        axes = () if options.layout.alone else axes
        operands, dys = operands[: len(_DIMS)], operands[len(_DIMS) :]
        rows = _rows(axes, *operands)
        if options.either:
            dys = dys[1:] if len(options.parts_of(rows)) > 1 else dys[:1]
        found = convolution.backward(options.choice, rows, dys, silu=options.silu)
        dx, d_tail = found.x, found.before
        if axes and found.before is not None:
            # What the rows before a shard have of the gradient goes back to the devices that they are of.
            # All varying: what is the same on all devices JAX would sum over them here.
            x, initial_tail = match_varying((operands[0], operands[5]), operands[0])
            initial_tail = None if initial_tail is None else initial_tail.astype(x.dtype)
            _, transpose = jax.vjp(lambda x, tail: _rows_before(axes, x, tail, halo), x, initial_tail)
            d_rows, d_tail = transpose(found.before)
            dx += d_rows
        return tuple(g for g in (dx, found.weight, found.bias, d_tail) if g is not None)

    def on_each_device(*operands: Any) -> tuple[jax.Array, ...]:
        dims, out_dims = (*_DIMS, *("bth",) * options.either, *options.out_dims), ("bth", "bjh", "bh", "bjh")
        summed = (False, True, True, True)
        wanted = [n for n, is_given in enumerate(given) if is_given]
        return _on_each_device(
            *(options, local, operands, dims), tuple(out_dims[n] for n in wanted), tuple(summed[n] for n in wanted)
        )

    if options.either:
        dys = (jnp.concatenate(dys, axis=2), *dys)
    results = iter(_with_vmap(options, on_each_device)(*operands, *dys))
    dx, d_weight, d_bias, d_tail = (next(results) if is_given else None for is_given in given)
    d_weight, d_bias = (None if g is None else jnp.sum(g, axis=0) for g in (d_weight, d_bias))
    like = (dx, d_weight, d_bias, d_tail), (x, weight, bias, initial_tail)
    dx, d_weight, d_bias, d_tail = (g if g is None else g.astype(of.dtype) for g, of in zip(*like, strict=True))
    return dx, d_weight, d_bias, None, None, d_tail


def _backward_of_saved(options: _Options, operands: Any, dys: Any) -> tuple[Any, ...]:
    return _backward(operands, dys, options=options)


_with_gradient.defvjp(lambda options, *operands: (_forward(operands, options=options), operands), _backward_of_saved)


def _with_vmap(options: _Options, function: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., Any]:
    return first_order(into_the_batch(function, (1, 2, 4), behind=options.layout.batch_is_cut), _FIRST_ORDER)


def _on_each_device(
    options: _Options,
    local: Callable[..., tuple[jax.Array, ...]],
    operands: Sequence[Any],
    dims: tuple[str, ...],
    out_dims: tuple[str, ...],
    sums: tuple[bool, ...],
) -> tuple[jax.Array, ...]:
    return mesh.on_each_device(options.layout, local, operands, dims, out_dims, sums, heads=(1, 1), reason=_FIRST_ORDER)


def _rows(
    axes: Axes,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    cu_seqlens: jax.Array | None,
    initial_tail: jax.Array | None,
) -> Rows:
    """What the convolution of one shard of the sequence reads; `axes` are those that it is cut over."""
    length, halo = x.shape[1], weight.shape[0] - 1
    if cu_seqlens is not None:
        shards, index = (jax.lax.axis_size(axes), jax.lax.axis_index(axes)) if axes else (1, 0)
        bounds = segments_from_cu_seqlens(cu_seqlens, length * shards)
        row = index * length + jnp.arange(length, dtype=jnp.int32)
        method = "sort" if isinstance(length, int) else "scan"  # a number of rows left open cannot be sorted
        of_row = jnp.searchsorted(bounds[:, 1], row, side="right", method=method)
        inside = (of_row < bounds.shape[0]) & (row >= jnp.min(bounds, initial=length * shards))
        segment_ids = jnp.where(inside, of_row + 1, 0)[None].astype(jnp.int32)
        segment_ids = jnp.broadcast_to(segment_ids, x.shape[:2])  # members of a `jax.vmap`
    if initial_tail is not None:
        initial_tail = initial_tail.astype(x.dtype)
    ids_before = None
    if axes and halo and segment_ids is not None:
        ids_before = mesh.rows_before(segment_ids, halo, axes)
    return Rows(x, weight, bias, _rows_before(axes, x, initial_tail, halo), segment_ids, ids_before)


def _rows_before(axes: Axes, x: jax.Array, initial_tail: jax.Array | None, halo: int) -> jax.Array | None:
    """The `halo` rows before this shard of x, or None for zeros."""
    if not (axes and halo):
        return initial_tail
    before = mesh.rows_before(x, halo, axes)
    if initial_tail is None:
        return before
    row = jax.lax.axis_index(axes) * x.shape[1] - halo + jnp.arange(halo, dtype=jnp.int32)
    tail = jnp.take(initial_tail, jnp.minimum(row + halo, halo - 1), axis=1)
    return jnp.where((row < 0)[:, None], tail, before)


def _tail(axes: Axes, x: jax.Array, before: jax.Array | None, halo: int) -> jax.Array:
    """The last `halo` rows of all shards, of which x and what is before it are one."""
    length = x.shape[1]
    if length >= halo:
        # Of a sharded x, `jnp.take` fetches these rows only, where a slice would gather all.
        tail = jnp.take(x, jnp.arange(length - halo, length), axis=1)
    else:
        known = jnp.zeros((x.shape[0], halo, x.shape[2]), x.dtype) if before is None else before
        tail = jnp.concatenate([known, x], axis=1)[:, length:]
    if axes:
        last = jax.lax.axis_index(axes) == jax.lax.axis_size(axes) - 1
        tail = jax.lax.psum(jnp.where(last, tail, jnp.zeros_like(tail)), axes)
    return tail


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
    def floating(name: str, array: Any) -> None:
        dtype = known_dtype(array)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{name} must be of a floating dtype, got {array.dtype}")

    check_rank("x", x, ("B", "T", "D"))
    check_dtype("x", x, TOKEN_DTYPES)
    batch, tokens, channels = x.shape
    check_rank("weight", weight, ("W", "D"))
    floating("weight", weight)
    width = weight.shape[0]
    if not isinstance(width, int):
        raise NotImplementedError(f"weight must have a static W, got shape {tuple(weight.shape)}")
    if width < 1 or weight.shape[1] != channels:
        raise ValueError(f"weight must have shape [W, D] with W >= 1 and D = {channels}, got {tuple(weight.shape)}")
    if bias is not None:
        check_rank("bias", bias, ("D",))
        check_shape("bias", bias, (channels,), "[D] with D of x")
        floating("bias", bias)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    check_flag("output_final_tail", output_final_tail)
    if output_final_tail and not isinstance(tokens, int):
        raise NotImplementedError(f"output_final_tail needs a static T, got x of shape {tuple(x.shape)}")
    check_packing(cu_seqlens, segment_ids, batch, tokens, "x")
    if initial_tail is not None:
        if segment_ids is not None or cu_seqlens is not None:
            raise ValueError("initial_tail goes with a batch that is not packed: leave out segment_ids and cu_seqlens")
        check_rank("initial_tail", initial_tail, ("B", "W - 1", "D"))
        check_shape("initial_tail", initial_tail, (batch, width - 1, channels), "[B, W - 1, D] with B and D of x")
        if initial_tail.dtype != x.dtype:
            raise TypeError(f"initial_tail must have x's dtype {x.dtype}, got {initial_tail.dtype}")
