"""What a Gated DeltaNet layer remembers of the text before the next token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_qla.checks import is_integer, type_name
from jax_qla.nn.config import GatedDeltaNetConfig, check_config
from jax_qla.widening import widest


class GatedDeltaNetCache(NamedTuple):
    """What one layer carries from token to token. Its size does not grow with the text. A pytree."""

    conv: jax.Array
    """[B, conv_kernel_size - 1, conv_channels] in the layer's dtype: the last inputs of the convolution."""
    state: jax.Array
    """[B, Hv, K, V], float32 (float64 in a layer of float64): the state of the gated delta rule."""


# So that programs which take and return caches can be serialised.
jax.export.register_namedtuple_serialization(GatedDeltaNetCache, serialized_name="jax_qla.nn.GatedDeltaNetCache")


def empty_cache(config: GatedDeltaNetConfig, batch_size: int, dtype: Any = jnp.float32) -> GatedDeltaNetCache:
    """The cache before the first token: zeros.

    Args:
        config: of the layer.
        batch_size: B, the number of sequences, an integer.
        dtype: the layer's computation dtype, in which the convolution's inputs are kept.

    Returns:
        The cache, of the shapes and dtypes that `GatedDeltaNetCache` has.

    Raises:
        TypeError: config is not a GatedDeltaNetConfig, or batch_size is not an integer.
        ValueError: batch_size is negative.
    """
    check_config(config)
    if not is_integer(batch_size) and not jax.export.is_symbolic_dim(batch_size):
        raise TypeError(f"batch_size must be an integer, got {batch_size!r} of type {type_name(batch_size)}")
    if batch_size < 0:
        raise ValueError(f"batch_size must not be negative, got {batch_size}")
    return GatedDeltaNetCache(
        jnp.zeros((batch_size, config.conv_kernel_size - 1, config.conv_channels), dtype),
        jnp.zeros((batch_size, config.num_value_heads, config.key_head_dim, config.value_head_dim), widest(dtype)),
    )


def check_cache(cache: GatedDeltaNetCache, config: GatedDeltaNetConfig, batch_size: int, dtype: Any) -> None:
    """Whether the cache is one of this layer, which computes in `dtype`, and batch.

    Raises:
        TypeError: it is no cache, or not of floating arrays, or its state is narrower or wider than the layer's.
        ValueError: an array has another shape.
    """
    if not isinstance(cache, GatedDeltaNetCache):
        raise TypeError(
            f"cache must be a GatedDeltaNetCache, as prefill and init_cache return, got {type(cache).__name__}"
        )
    expected = jax.eval_shape(lambda: empty_cache(config, batch_size))
    for name in cache._fields:
        array, wanted = getattr(cache, name), tuple(getattr(expected, name).shape)
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"cache.{name} must be an array of shape {wanted}, got {type(array).__name__}")
        shape = tuple(array.shape)
        if shape != wanted:
            raise ValueError(f"cache.{name} must have shape {wanted} for this layer and input, got {shape}")
    if not jnp.issubdtype(jnp.result_type(cache.conv), jnp.floating):
        raise TypeError(f"cache.conv must be of a floating dtype, got {cache.conv.dtype}")
    given, accepted = jnp.result_type(cache.state).name, dict.fromkeys(("float32", widest(dtype).name))
    if given not in accepted:
        raise TypeError(f"cache.state must be {' or '.join(accepted)}, got {given}")
