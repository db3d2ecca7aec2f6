"""Which arithmetic is wider than the activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def widen(x: jax.Array) -> jax.Array:
    """x in float32, or as it is if it is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
