"""q and k divided by their lengths, and gradients taken back through that, around implementations that do not do it.

Those that do multiply by q and k as they are, and the lengths go into beta, v and scale (`inverse_length` in
kernels/specification.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import L2NORM_EPSILON
from jax_qla.widening import widen


def inverse_length(x: jax.Array) -> jax.Array:
    """1 / sqrt(|x|^2 + 1e-6) over the last axis, in at least float32."""
    return jax.lax.rsqrt(_squares(widen(x)))


def normalize(x: jax.Array) -> jax.Array:
    """x / sqrt(|x|^2 + 1e-6) over the last axis, computed in at least float32, in x's dtype."""
    wide = widen(x)
    # No product with `inverse_length`, whose derivative has its cube, which vanishes for rows longer than 1e12.
    return (wide / jnp.sqrt(_squares(wide, keepdims=True))).astype(x.dtype)


def _squares(wide: jax.Array, *, keepdims: bool = False) -> jax.Array:
    """|x|^2 + 1e-6 over the last axis."""
    return jnp.sum(wide * wide, axis=-1, keepdims=keepdims) + L2NORM_EPSILON


def normalize_gradient(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient with respect to x from that with respect to `normalize(x)`, computed and returned likewise.

    Rows without a gradient, such as those of no sequence, get none even where x is not a number.
    """
    _, transpose = jax.vjp(normalize, x)
    (dx,) = transpose(gradient)
    return jnp.where(jnp.any(gradient != 0, axis=-1, keepdims=True), dx, jnp.zeros_like(dx))
