"""The short causal convolution of one device's rows, forward and backward: in plain JAX, or by the kernels of "cuda"
where the program is lowered for CUDA.

    y_t = activation(bias + sum_{i < W} weight_i x_{t - W + 1 + i})        channel by channel
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_qla.implementations import Choice, by_platform, load
from jax_qla.varying import match_varying
from jax_qla.widening import widest


class Rows(NamedTuple):
    """What the convolution of some rows reads."""

    x: jax.Array
    """[B, T, D]."""
    weight: jax.Array
    """[W, D]."""
    bias: jax.Array | None = None
    """[D]."""
    before: jax.Array | None = None
    """[B, W - 1, D] in x's dtype, the rows before x; None for zeros."""
    ids: jax.Array | None = None
    """int32 [B, T], or None: every row of the batch is one sequence. A tap sees no further than a run of equal ids
    other than 0 reaches back; rows of id 0 have y = 0, and what x holds there does not matter."""
    ids_before: jax.Array | None = None
    """int32 [B, W - 1], of the rows before; None for 0."""


class Gradients(NamedTuple):
    """Cotangents of what `Rows` has; those of the filter are of each row of the batch."""

    x: jax.Array
    """In x's dtype."""
    weight: jax.Array
    """[B, W, D], at least float32."""
    bias: jax.Array | None
    """[B, D], likewise."""
    before: jax.Array | None
    """In x's dtype."""


def forward(choice: Choice, rows: Rows, *, parts: Sequence[int], silu: bool) -> tuple[jax.Array, ...]:
    """y [B, T, D] in x's dtype, as one array for each of `parts`, which add up to D. Not to be differentiated."""

    def by_kernel(rows: Rows) -> Any:
        return load("cuda.conv1d").forward(rows, parts=parts, silu=silu)

    def in_plain_jax(rows: Rows) -> Any:
        return cut(plain(rows, silu, False), parts)

    return _on_platform(choice, rows, parts, by_kernel, in_plain_jax)


def backward(choice: Choice, rows: Rows, dys: Sequence[jax.Array], *, silu: bool) -> Gradients:
    """Gradients from those of the parts of y. Not to be differentiated."""

    def in_plain_jax(rows: Rows, *dys: jax.Array) -> Gradients:
        wide = widest(rows.x.dtype)
        weight, bias = (None if x is None else x.astype(wide) for x in (rows.weight, rows.bias))

        def of_row(x: Any, before: Any, ids: Any, ids_before: Any, dy: jax.Array) -> Gradients:
            def function(x: Any, weight: Any, bias: Any, before: Any) -> jax.Array:
                one = jax.tree.map(lambda x: x[None], (x, before, ids, ids_before))
                return plain(Rows(one[0], weight, bias, *one[1:]), silu, False)[0]

            return Gradients(*jax.vjp(function, x, weight, bias, before)[1](dy))

        of_rows = (rows.x, rows.before, rows.ids, rows.ids_before, jnp.concatenate(dys, axis=-1))
        return jax.vmap(of_row)(*of_rows)

    def by_kernel(rows: Rows, *dys: jax.Array) -> Gradients:
        return Gradients(*load("cuda.conv1d").backward(rows, dys, silu=silu))

    return _on_platform(choice, rows, [dy.shape[2] for dy in dys], by_kernel, in_plain_jax, *dys)


def _on_platform(
    choice: Choice,
    rows: Rows,
    parts: Sequence[int],
    by_kernel: Callable[..., Any],
    in_plain_jax: Callable[..., Any],
    *more: jax.Array,
) -> Any:
    """Calls one of two functions of rows and more operands, by what the program is lowered for."""

    operands: tuple[Any, ...] = match_varying((rows, *more), (rows, *more))
    # A device may have fewer channels than the whole call has, or nothing at all.
    granule = load("cuda.conv1d").GRANULE if choice.on_cuda == "cuda" else 0
    if not granule or rows.x.size == 0 or any(part % granule for part in parts):
        return match_varying(in_plain_jax(*operands), operands)
    return by_platform(choice, {"cuda": by_kernel, "xla": in_plain_jax}.__getitem__, *operands)


def cut(y: jax.Array, parts: Sequence[int]) -> tuple[jax.Array, ...]:
    """y [..., D] as one array for each of `parts`, which add up to D."""
    bounds = [sum(parts[:n]) for n in range(1, len(parts))]
    return tuple(jnp.split(y, bounds, axis=-1))


@functools.partial(jax.checkpoint, static_argnums=(1, 2))
def plain(rows: Rows, silu: bool, by_compiler: bool) -> jax.Array:
    """y in plain JAX, in x's dtype; sums are at least float32, backward too. Checkpointed: else a scan over layers
    would keep W shifted copies of x.

    Args:
        by_compiler: whether the compiler may cut T. Then what it exchanges is in x's dtype, and each tap's part of the
            gradients of x and `before` is rounded to that before these are added up.
    """
    x, weight, bias, before, ids, ids_before = rows
    width, dtype = weight.shape[0], x.dtype
    wide = widest(dtype)
    shifted = dtype if by_compiler else wide
    weight = weight.astype(wide)[:, None, None]
    visible = own = None if ids is None else ids != 0
    if own is not None:
        # What padding holds must not matter, not even in a product with a gradient of zero.
        x = jnp.where(own[..., None], x, 0)
    # A sum of shifted copies, which XLA fuses with the mask and the activation into one elementwise kernel.
    # Widened before it is narrowed for the shifts, so that gradients of these are added up wide.
    x, before = x.astype(wide), None if before is None else before.astype(wide)
    y = x * weight[-1]
    later = ids
    for distance in range(1, width):
        rows_before = None if before is None else before.astype(shifted)
        part = _earlier(x.astype(shifted), rows_before, distance).astype(wide)
        if ids is not None and visible is not None:
            earlier = _earlier(ids, ids_before, distance)
            visible &= earlier == later
            part = jnp.where(visible[..., None], part, 0)
            later = earlier
        y += part * weight[width - 1 - distance]
    if bias is not None:
        y += bias.astype(wide)[None, None]
    if silu:
        y = jax.nn.silu(y)
    if own is not None:
        y = jnp.where(own[..., None], y, 0)
    return y.astype(dtype)


def _earlier(x: jax.Array, before: jax.Array | None, distance: int) -> jax.Array:
    """[B, T, ...]: the rows `distance` before those of x, from `before` [B, W - 1, ...] (None: zero) where x begins.

    By padding alone, which the compiler partitions along T with an exchange of the border rows; of a concatenation it
    would gather all of x.
    """
    length, zero = x.shape[1], jnp.zeros((), x.dtype)

    def pad(rows: jax.Array, low: int, high: int) -> jax.Array:
        return jax.lax.pad(rows, zero, [(0, 0, 0), (low, high, 0), *((0, 0, 0),) * (x.ndim - 2)])

    # Of nothing but padding XLA's partitioner makes wrong numbers, or aborts (jax 0.10.2).
    within = jnp.zeros_like(x) if isinstance(length, int) and distance >= length else pad(x, distance, -distance)
    if before is None:
        return within
    start = before.shape[1] - distance
    rows = before[:, start : start + length]
    return within + pad(rows, 0, length - rows.shape[1])
