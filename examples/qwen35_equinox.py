"""The Qwen3.5 decoder in Equinox. Attributes have the names of transformers' modules, so that checkpoints map."""

# mypy: disallow-subclassing-any=False, warn-return-any=False
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import qwen35_layers as layers
from qwen35_config import Qwen35Config

from jax_qla.nn import GatedDeltaNetCache
from jax_qla.nn.equinox import GatedDeltaNet

Cache = GatedDeltaNetCache | layers.KeyValueCache


class Linear(eqx.Module):
    """x W^T at every token, in x's dtype; `weight` [outputs, inputs] is float32."""

    weight: jax.Array

    def __init__(self, inputs: int, outputs: int, key: jax.Array):
        self.weight = inputs**-0.5 * jax.random.normal(key, (outputs, inputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight.T.astype(x.dtype)


class Embedding(eqx.Module):
    weight: jax.Array
    """[vocabulary, D]"""

    def __init__(self, vocabulary: int, width: int, key: jax.Array):
        self.weight = 0.02 * jax.random.normal(key, (vocabulary, width))


class RMSNorm(eqx.Module):
    weight: jax.Array
    eps: float = eqx.field(static=True)

    def __init__(self, features: int, eps: float):
        self.weight = jnp.zeros(features)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return layers.rms_norm(x, self.weight, self.eps)


class Attention(eqx.Module):
    """Gated causal attention: [B, T, D] -> [B, T, D]."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    config: Qwen35Config = eqx.field(static=True)

    def __init__(self, config: Qwen35Config, key: jax.Array):
        keys = jax.random.split(key, 4)
        heads, key_value_heads = config.attention_heads * config.head_dim, config.key_value_heads * config.head_dim
        self.q_proj = Linear(config.width, 2 * heads, keys[0])
        self.k_proj = Linear(config.width, key_value_heads, keys[1])
        self.v_proj = Linear(config.width, key_value_heads, keys[2])
        self.o_proj = Linear(heads, config.width, keys[3])
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.config = config

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, cache: layers.KeyValueCache | None
    ) -> tuple[jax.Array, layers.KeyValueCache | None]:
        out, cache = layers.gated_attention(
            self.q_proj(x),
            self.k_proj(x),
            self.v_proj(x),
            self.q_norm.weight,
            self.k_norm.weight,
            self.config,
            segment_ids=segment_ids,
            cache=cache,
        )
        return self.o_proj(out), cache


class MLP(eqx.Module):
    """SwiGLU: [B, T, D] -> [B, T, D]."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __init__(self, config: Qwen35Config, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.gate_proj = Linear(config.width, config.mlp_width, keys[0])
        self.up_proj = Linear(config.width, config.mlp_width, keys[1])
        self.down_proj = Linear(config.mlp_width, config.width, keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(layers.swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(eqx.Module):
    """Token mixing, then the MLP, each behind a norm and around a residual connection."""

    input_layernorm: RMSNorm
    linear_attn: GatedDeltaNet | None
    self_attn: Attention | None
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def __init__(self, config: Qwen35Config, index: int, key: jax.Array):
        mixer_key, mlp_key = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.linear_attn = self.self_attn = None
        if config.is_full_attention(index):
            self.self_attn = Attention(config, mixer_key)
        else:
            self.linear_attn = GatedDeltaNet(
                config.gated_deltanet, dtype=config.dtype, implementation=config.implementation, key=mixer_key
            )
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config, mlp_key)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, cache: Any, step: bool
    ) -> tuple[jax.Array, Cache | None]:
        h = self.input_layernorm(x)
        if self.linear_attn is None:
            assert self.self_attn is not None
            h, cache = self.self_attn(h, segment_ids, cache)
        elif cache is None:
            h = self.linear_attn(h, segment_ids=segment_ids)
        else:
            h, cache = self.linear_attn.step(h, cache) if step else self.linear_attn.prefill(h, cache)
        x = x + h
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Qwen35(eqx.Module):
    """tokens int32 [B, T] -> logits float32 [B, T, vocabulary] of the token that follows each one."""

    embed_tokens: Embedding
    layers: list[DecoderLayer]
    norm: RMSNorm
    lm_head: Linear | None
    config: Qwen35Config = eqx.field(static=True)

    def __init__(self, config: Qwen35Config, key: jax.Array):
        embed_key, head_key, *layer_keys = jax.random.split(key, 2 + config.layers)
        self.embed_tokens = Embedding(config.vocabulary, config.width, embed_key)
        self.layers = [DecoderLayer(config, index, key) for index, key in enumerate(layer_keys)]
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.lm_head = None if config.tied_embeddings else Linear(config.width, config.vocabulary, head_key)
        self.config = config

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Logits of a whole batch in parallel, for training. segment_ids int32 [B, T] keeps packed documents apart."""
        return self._run(tokens, segment_ids, [None] * len(self.layers), step=False)[0]

    def init_cache(self, batch_size: int, room: int) -> list[Cache]:
        """The caches before the first of at most `room` tokens."""
        return [
            layers.empty_key_value_cache(self.config, batch_size, room)
            if layer.linear_attn is None
            else layer.linear_attn.init_cache(batch_size)
            for layer in self.layers
        ]

    def prefill(self, tokens: jax.Array, caches: Sequence[Cache]) -> tuple[jax.Array, list[Cache]]:
        """Logits of the tokens that follow what `caches` remember, in parallel, and the caches after them."""
        return self._run(tokens, None, caches, step=False)

    def decode(self, tokens: jax.Array, caches: Sequence[Cache]) -> tuple[jax.Array, list[Cache]]:
        """As `prefill`, token by token."""
        return self._run(tokens, None, caches, step=True)

    def _run(
        self, tokens: jax.Array, segment_ids: jax.Array | None, caches: Sequence[Any], step: bool
    ) -> tuple[jax.Array, list[Any]]:
        embedding = self.embed_tokens.weight.astype(self.config.dtype)
        x = embedding[tokens]
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, segment_ids, cache, step)
            new_caches.append(cache)
        x = self.norm(x)
        head = embedding if self.lm_head is None else self.lm_head.weight.astype(x.dtype)
        # Rounded to bfloat16, many tokens of a large vocabulary would be equally likely.
        logits = jnp.matmul(x, head.T, preferred_element_type=jnp.float32)
        return logits, new_caches
