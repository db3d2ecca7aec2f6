"""The two gates of the gated delta rule, per token and value head.

Both are float32 whatever the activations are: the logarithm of the decay is summed over many tokens before it is
exponentiated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_qla.nn.projections import beside
from jax_qla.widening import widen


def log_decay(a: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """g = -exp(a_log) * softplus(a + dt_bias), the logarithm of the state's decay.

    Args:
        a: [B, T, Hv], projected from the token.
        a_log, dt_bias: [Hv], parameters.

    Returns:
        float32 [B, T, Hv], <= 0.
    """
    a_log, dt_bias = (widen(beside(x, a))[None, None] for x in (a_log, dt_bias))
    return -jnp.exp(a_log) * jax.nn.softplus(widen(a) + dt_bias)


def update_strength(b: jax.Array, allow_neg_eigval: bool) -> jax.Array:
    """beta = sigmoid(b), or twice that with `allow_neg_eigval`.

    Args:
        b: [B, T, Hv], projected from the token.
        allow_neg_eigval: whether an update may overshoot: the state's transition then has eigenvalues in (-1, 1), not
            only in (0, 1) (Grazzi et al., arXiv 2411.12537).

    Returns:
        float32 [B, T, Hv].
    """
    beta = jax.nn.sigmoid(widen(b))
    return 2 * beta if allow_neg_eigval else beta
