"""The short causal convolution over q, k and v, for dense, packed and continued sequences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import mesh
from jax_qla.causal_conv1d import in_parts
from jax_qla.implementations import of_a_layer


@jax.named_scope("causal_convolution")
def causal_convolution(
    x: jax.Array,
    kernel: jax.Array,
    tail: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    *,
    parts: tuple[int, ...],
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, ...]:
    """silu(sum_i kernel_i x_{t - width + 1 + i}), channel by channel; the sum is float32.

    Args:
        x: [B, T, channels].
        kernel: [width, channels].
        tail: [B, width - 1, channels], the tokens before x; zeros if None.
        segment_ids: int32 [B, T]: a token sees tokens of its own sequence only, where a sequence is a maximal run of
            equal ids other than 0 within a row; where the id is 0, so is the result. Not together with `tail`, whose
            tokens have no ids.
        parts: the channels of each array to return, side by side in x.
        implementation: of the gated delta rule, as in `jax_qla.chunk_gated_delta_rule`. By "cuda" where that may be
            "cuda" and the kernels of the convolution can take it, and else by "xla", as in `jax_qla.causal_conv1d`.

    Returns:
        [B, T, part] in x's dtype for each of `parts`.
    """
    tail = None if tail is None else tail.astype(x.dtype)
    options: dict[str, Any] = {
        "segment_ids": segment_ids,
        "initial_tail": tail,
        "implementation": of_a_layer(implementation),
        # What Auto axes beside others cut the compiler knows, of plain JAX.
        "partly": implementation == "xla",
    }
    return in_parts(x, kernel, parts=parts, activation="silu", **options)[0]


@functools.partial(jax.jit, static_argnames="width")
def tail_after(
    x: jax.Array, width: int, tail: jax.Array | None = None, segment_ids: jax.Array | None = None
) -> jax.Array:
    """What the convolution must remember to continue after x: the last width - 1 tokens.

    Args:
        x, tail, segment_ids: as given to `causal_convolution`. With segment_ids, the tail is that of each row's first
            sequence (a run of equal ids other than 0), wherever it ends, and zeros for a row without one.
        width: of the convolution.

    Returns:
        [B, width - 1, channels] in x's dtype; zeros stand for tokens before the first one.
    """
    operands, dims = (x, tail, segment_ids), ("bth", "bjh", "bt")
    layout = mesh.resolve(None, operands, dims, names={"h": "channels"}, whole="the filter", partly=True)
    bounds = None if segment_ids is None else mesh.segments_of_rows(layout, segment_ids, 1)[:, 0]
    operands, dims = (x, tail, bounds), ("bth", "bjh", "be")
    tree = jax.tree.structure(operands)

    def local(*arrays: jax.Array) -> tuple[jax.Array]:
        return (_tail_after(width, layout.sequence, *jax.tree.unflatten(tree, arrays)),)

    given = [d for x, d in zip(operands, dims, strict=True) if x is not None]
    return mesh.mapped(layout, local, given, ("bjh",), jax.tree.leaves(operands))[0]


def _tail_after(
    width: int, axes: mesh.Axes, x: jax.Array, tail: jax.Array | None, bounds: jax.Array | None
) -> jax.Array:
    """`tail_after` of a sequence that mesh axes cut: x is this device's part; `bounds` [B, 2] those of the sequence."""
    extended = _extended(x, tail, width)
    if bounds is None and not axes:
        return extended[:, x.shape[1] :]
    parts, part = (jax.lax.axis_size(axes), jax.lax.axis_index(axes)) if axes else (1, 0)
    first = part * x.shape[1]
    start, end = (1 - width, parts * x.shape[1]) if bounds is None else jnp.split(bounds, 2, axis=1)
    row = jnp.broadcast_to(end - (width - 1) + jnp.arange(width - 1)[None], (x.shape[0], width - 1))
    index = row - first + width - 1
    # Rows before `start` are no tokens of the sequence, and those before x are another device's, but for the first.
    here = (row >= start) & (index >= jnp.where(first == 0, 0, width - 1)) & (index < extended.shape[1])
    index = jnp.clip(index, 0, extended.shape[1] - 1)
    found = jnp.where(here[..., None], jnp.take_along_axis(extended, index[..., None], axis=1), 0)
    return jax.lax.psum(found, axes) if axes else found


def _extended(x: jax.Array, tail: jax.Array | None, width: int) -> jax.Array:
    """x behind the width - 1 tokens before it: [B, width - 1 + T, channels]."""
    if tail is None:
        return jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return jnp.concatenate([tail.astype(x.dtype), x], axis=1)
