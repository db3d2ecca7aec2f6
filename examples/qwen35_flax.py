"""The Qwen3.5 decoder in Flax NNX. Attributes have the names of transformers' modules, so that checkpoints map."""

# mypy: disallow-subclassing-any=False, warn-return-any=False
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import qwen35_layers as layers
from flax import nnx
from qwen35_config import Qwen35Config

from jax_qla.nn import GatedDeltaNetCache
from jax_qla.nn.flax import GatedDeltaNet

Cache = GatedDeltaNetCache | layers.KeyValueCache


class RMSNorm(nnx.Module):
    def __init__(self, features: int, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        return layers.rms_norm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Gated causal attention: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: Qwen35Config, rngs: nnx.Rngs):
        self.config = config
        linear = partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        heads, key_value_heads = config.attention_heads * config.head_dim, config.key_value_heads * config.head_dim
        self.q_proj = linear(config.width, 2 * heads)
        self.k_proj = linear(config.width, key_value_heads)
        self.v_proj = linear(config.width, key_value_heads)
        self.o_proj = linear(heads, config.width)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, cache: layers.KeyValueCache | None
    ) -> tuple[jax.Array, layers.KeyValueCache | None]:
        out, cache = layers.gated_attention(
            self.q_proj(x),
            self.k_proj(x),
            self.v_proj(x),
            self.q_norm.weight[...],
            self.k_norm.weight[...],
            self.config,
            segment_ids=segment_ids,
            cache=cache,
        )
        return self.o_proj(out), cache


class MLP(nnx.Module):
    """SwiGLU: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: Qwen35Config, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.gate_proj = linear(config.width, config.mlp_width)
        self.up_proj = linear(config.width, config.mlp_width)
        self.down_proj = linear(config.mlp_width, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(layers.swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nnx.Module):
    """Token mixing, then the MLP, each behind a norm and around a residual connection."""

    def __init__(self, config: Qwen35Config, index: int, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        if config.is_full_attention(index):
            self.self_attn = Attention(config, rngs)
        else:
            self.linear_attn = GatedDeltaNet(
                config.gated_deltanet, dtype=config.dtype, implementation=config.implementation, rngs=rngs
            )
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, cache: Any, step: bool
    ) -> tuple[jax.Array, Cache | None]:
        h = self.input_layernorm(x)
        if hasattr(self, "self_attn"):
            h, cache = self.self_attn(h, segment_ids, cache)
        elif cache is None:
            h = self.linear_attn(h, segment_ids=segment_ids)
        else:
            h, cache = self.linear_attn.step(h, cache) if step else self.linear_attn.prefill(h, cache)
        x = x + h
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Qwen35(nnx.Module):
    """tokens int32 [B, T] -> logits float32 [B, T, vocabulary] of the token that follows each one."""

    def __init__(self, config: Qwen35Config, rngs: nnx.Rngs):
        self.config = config
        initial = nnx.initializers.normal(0.02)
        self.embed_tokens = nnx.Embed(
            config.vocabulary, config.width, dtype=config.dtype, embedding_init=initial, rngs=rngs
        )
        self.layers = nnx.List([DecoderLayer(config, index, rngs) for index in range(config.layers)])
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tied_embeddings:
            self.lm_head = nnx.Linear(config.width, config.vocabulary, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Logits of a whole batch in parallel, for training. segment_ids int32 [B, T] keeps packed documents apart."""
        return self._run(tokens, segment_ids, [None] * len(self.layers), step=False)[0]

    def init_cache(self, batch_size: int, room: int) -> list[Cache]:
        """The caches before the first of at most `room` tokens."""
        return [
            layers.empty_key_value_cache(self.config, batch_size, room)
            if self.config.is_full_attention(index)
            else layer.linear_attn.init_cache(batch_size)
            for index, layer in enumerate(self.layers)
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
        x = self.embed_tokens(tokens)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, segment_ids, cache, step)
            new_caches.append(cache)
        x = self.norm(x)
        head = self.embed_tokens.embedding[...].T if self.config.tied_embeddings else self.lm_head.kernel[...]
        # Rounded to bfloat16, many tokens of a large vocabulary would be equally likely.
        logits = jnp.matmul(x, head.astype(x.dtype), preferred_element_type=jnp.float32)
        return logits, new_caches
