"""The RMS norm between the gated delta rule and the output projection."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax_qla.widening import widen


# Rematerialized: its backward pass starts from o and z in their own dtype instead of float32 intermediate results.
@partial(jax.checkpoint, static_argnums=3)
@jax.named_scope("gated_rms_norm")
def gated_rms_norm(o: jax.Array, z: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """o / sqrt(mean(o^2) + eps) * weight * silu(z), head by head, computed in float32.

    Args:
        o, z: [..., V], the output of the gated delta rule and its gate.
        weight: [V].
        eps: added to the mean square.

    Returns:
        [..., V] in o's dtype.
    """
    wide = widen(o)
    normalized = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normalized * jnp.expand_dims(widen(weight), range(o.ndim - 1)) * jax.nn.silu(widen(z))).astype(o.dtype)
