"""What a Qwen3.5 decoder computes around its Gated DeltaNet layers, as functions of arrays for both frameworks.

B is the batch, T the length, H and G the numbers of query and of key/value heads of the full attention, d their size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import meshes
from qwen35_config import Qwen35Config


class KeyValueCache(NamedTuple):
    """What a full-attention layer remembers: room for a number of tokens, of which the first `length` are there."""

    key: jax.Array
    """[B, room, G, d], rotated."""
    value: jax.Array
    """[B, room, G, d]"""
    length: jax.Array
    """int32 []"""


def empty_key_value_cache(config: Qwen35Config, batch_size: int, room: int) -> KeyValueCache:
    shape = (batch_size, room, config.key_value_heads, config.head_dim)
    return KeyValueCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype), jnp.zeros((), jnp.int32))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * (1 + weight), in float32, returned in x's dtype: a weight of 0 changes nothing."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, rotary_dim: int, theta: float) -> jax.Array:
    """Rotary position embedding of the first `rotary_dim` features of each head; feature i turns with i + rotary_dim/2.

    x [B, T, heads, d], positions int32 [T].
    """
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, None].astype(jnp.float32) * frequency
    cosine, sine = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second, rest = jnp.split(x, [half, rotary_dim], axis=-1)
    wide_first, wide_second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = [wide_first * cosine - wide_second * sine, wide_second * cosine + wide_first * sine]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), rest], axis=-1)


@jax.named_scope("gated_attention")
def gated_attention(
    query_and_gate: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_norm: jax.Array,
    key_norm: jax.Array,
    config: Qwen35Config,
    *,
    segment_ids: jax.Array | None = None,
    cache: KeyValueCache | None = None,
) -> tuple[jax.Array, KeyValueCache | None]:
    """Causal attention whose output is multiplied by a sigmoid gate.

    On a mesh that cuts the sequence, its devices share out the heads for the attention itself, so that each sees whole
    sequences of its heads. Where they are more than the key/value heads, these are repeated.

    Args:
        query_and_gate: [B, T, H * 2 * d]: of each head the query, then the gate.
        key, value: [B, T, G * d].
        query_norm, key_norm: [d], weights of the RMS norms of queries and keys.
        segment_ids: int32 [B, T], a number of its own for each document of a row. Not with a cache.
        cache: what precedes the input, with room for it.

    Returns:
        [B, T, H * d], and the cache after the input (None without one).
    """
    batch, length, _ = key.shape
    heads = query_and_gate.reshape(batch, length, config.attention_heads, 2 * config.head_dim)
    query, gate = jnp.split(heads, 2, axis=-1)
    key, value = (x.reshape(batch, length, config.key_value_heads, config.head_dim) for x in (key, value))
    positions = jnp.arange(length, dtype=jnp.int32) + (0 if cache is None else cache.length)
    query, key = (
        rotate(rms_norm(x, weight, config.norm_eps), positions, config.rotary_dim, config.rope_theta)
        for x, weight in ((query, query_norm), (key, key_norm))
    )
    attention: dict[str, Any]
    if cache is None:
        query, key, value = _shared_out(query, key, value)
        segment_ids = None if segment_ids is None else meshes.whole_rows(segment_ids)
        mask = None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        attention = {"mask": mask, "is_causal": True, "implementation": config.attention_implementation}
    else:
        key, value = (
            jax.lax.dynamic_update_slice_in_dim(room, new, cache.length, axis=1)
            for room, new in ((cache.key, key), (cache.value, value))
        )
        cache = KeyValueCache(key, value, cache.length + length)
        attention = {"mask": (jnp.arange(key.shape[1]) <= positions[:, None])[None, None]}
    out = jax.nn.dot_product_attention(query, key, value, **attention)
    if cache is None:
        out = meshes.from_heads_to_tokens(out)
    return (out * jax.nn.sigmoid(gate)).reshape(batch, length, -1), cache


def _shared_out(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Heads shared out among the devices that cut the sequence; key and value with as many heads as that takes."""
    parts, query_heads, key_value_heads = meshes.parts(), query.shape[2], key.shape[2]
    if query_heads % parts:
        raise ValueError(
            f"{query_heads} attention heads cannot be shared out among the {parts} devices that cut the sequence: "
            "use a mesh whose axis seq divides them"
        )
    times = math.lcm(parts, key_value_heads) // key_value_heads
    key, value = (jnp.repeat(x, times, axis=2) for x in (key, value))
    to_heads = meshes.from_tokens_to_heads
    return to_heads(query), to_heads(key), to_heads(value)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up
