"""A byte-level language model of Gated DeltaNet layers, in Flax NNX.

    x = embed(tokens)
    x = x + GatedDeltaNet(RMSNorm(x));  x = x + SwiGLU(RMSNorm(x))        (once per layer)
    logits = RMSNorm(x) embed^T

The layer follows Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). In shapes, B is the batch, T the
length, D the width of the model, Hk and Hv the numbers of key and value heads, K and V their sizes.
"""

# mypy: disallow-subclassing-any=False, warn-return-any=False
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jax_qla

CONVOLUTION_WIDTH = 4


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a `LanguageModel`. `dtype` is that of the activations; parameters are float32."""

    vocabulary: int
    layers: int
    width: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    mlp_width: int
    dtype: str = "float32"
    implementation: str | None = None
    """Which implementation of `jax_qla.chunk_gated_delta_rule` to run; None lets jax_qla choose."""


class Cache(NamedTuple):
    """What one Gated DeltaNet layer carries from token to token when it generates: constant in the length of the text.

    `tail` [B, CONVOLUTION_WIDTH - 1, channels] holds the convolution's last inputs, `state` float32 [B, Hv, K, V] the
    state of the gated delta rule.
    """

    tail: jax.Array
    state: jax.Array


def causal_convolution(
    x: jax.Array, kernel: jax.Array, tail: jax.Array | None = None, segment_ids: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Depthwise causal convolution: y_t = sum_i kernel_i x_{t - width + 1 + i}, channel by channel.

    x [B, T, channels], kernel [width, channels], tail [B, width - 1, channels] = the inputs before x (zeros if None).
    With segment_ids [B, T] a token sees tokens of its own segment only. Returns (y, the tail after x).
    """
    batch, length, channels = x.shape
    width = kernel.shape[0]
    if tail is None:
        tail = jnp.zeros((batch, width - 1, channels), x.dtype)
    extended = jnp.concatenate([tail, x], axis=1)
    # A sum of shifted copies: XLA fuses it, the mask and the activation that follows into one elementwise kernel.
    shifted = [extended[:, i : i + length] for i in range(width)]
    if segment_ids is not None:
        ids = jnp.pad(segment_ids, ((0, 0), (width - 1, 0)))
        shifted = [
            jnp.where((ids[:, i : i + length] == segment_ids)[..., None], part, 0) for i, part in enumerate(shifted)
        ]
    y = sum((part * kernel[i] for i, part in enumerate(shifted)), jnp.zeros_like(x))
    return y, extended[:, length:]


class GatedDeltaNet(nnx.Module):
    """Token mixing by the gated delta rule: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        linear = partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.to_qkv = linear(config.width, 2 * keys + values)
        self.to_decay_and_beta = linear(config.width, 2 * config.value_heads)
        self.to_gate = linear(config.width, values)
        self.to_out = linear(values, config.width)
        self.norm = nnx.RMSNorm(config.value_dim, dtype=config.dtype, rngs=rngs)

        bound = CONVOLUTION_WIDTH**-0.5
        self.convolution = nnx.Param(
            jax.random.uniform(rngs.params(), (CONVOLUTION_WIDTH, 2 * keys + values), minval=-bound, maxval=bound)
        )
        # Initial decay rates as in Mamba-2: A in [1, 16] and time steps dt in [0.001, 0.1], so that the heads start
        # with memories of very different lengths. dt_bias is the inverse softplus of dt.
        heads = (config.value_heads,)
        self.a_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), heads, minval=1.0, maxval=16.0)))
        dt = jnp.exp(jax.random.uniform(rngs.params(), heads, minval=jnp.log(0.001), maxval=jnp.log(0.1)))
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
    ) -> tuple[jax.Array, Cache | None]:
        """Mixes the tokens of x.

        Without `cache` all tokens are computed in parallel, by chunks (training and prefill). With `cache` the text
        before x is what the cache remembers, and x is computed token by token (generation).
        """
        config = self.config
        batch, length, _ = x.shape
        mixed, tail = causal_convolution(
            self.to_qkv(x), self.convolution[...].astype(config.dtype), cache.tail if cache else None, segment_ids
        )
        keys = config.key_heads * config.key_dim
        q, k, v = jnp.split(nnx.silu(mixed), [keys, 2 * keys], axis=-1)
        q = q.reshape(batch, length, config.key_heads, config.key_dim)
        k = k.reshape(batch, length, config.key_heads, config.key_dim)
        v = v.reshape(batch, length, config.value_heads, config.value_dim)

        # Gates stay in float32: g is summed over many tokens and then exponentiated.
        a, b = jnp.split(self.to_decay_and_beta(x).astype(jnp.float32), 2, axis=-1)
        g = -jnp.exp(self.a_log[...]) * jax.nn.softplus(a + self.dt_bias[...])
        beta = jax.nn.sigmoid(b)

        if cache is None:
            o, state = jax_qla.chunk_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                segment_ids=segment_ids,
                output_final_state=return_cache,
                use_qk_l2norm_in_kernel=True,
                implementation=config.implementation,
            )
        else:
            o, state = jax_qla.recurrent_gated_delta_rule(
                q, k, v, g, beta, initial_state=cache.state, output_final_state=True, use_qk_l2norm_in_kernel=True
            )

        gate = nnx.silu(self.to_gate(x)).reshape(v.shape)
        out = self.to_out((self.norm(o) * gate).reshape(batch, length, -1))
        return out, None if state is None else Cache(tail, state)


class SwiGLU(nnx.Module):
    """The MLP of a block: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.gate_and_up = linear(config.width, 2 * config.mlp_width)
        self.down = linear(config.mlp_width, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_and_up(x), 2, axis=-1)
        return self.down(nnx.silu(gate) * up)


class Block(nnx.Module):
    """One layer: token mixing, then the MLP, each behind a norm and around a residual connection."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.mixer_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.mixer = GatedDeltaNet(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(
        self, x: jax.Array, *, segment_ids: jax.Array | None, cache: Cache | None, return_cache: bool
    ) -> tuple[jax.Array, Cache | None]:
        mixed, cache = self.mixer(self.mixer_norm(x), segment_ids=segment_ids, cache=cache, return_cache=return_cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class LanguageModel(nnx.Module):
    """tokens int32 [B, T] -> logits float32 [B, T, vocabulary] of the token that follows each one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocabulary, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Logits of a whole batch in parallel, for training. segment_ids int32 [B, T] keeps packed documents apart."""
        return self._run(tokens, segment_ids, [None] * len(self.blocks), return_cache=False)[0]

    def prefill(self, tokens: jax.Array) -> tuple[jax.Array, list[Cache]]:
        """Logits of a prompt, computed in parallel, and the caches from which `decode` continues."""
        return self._run(tokens, None, [None] * len(self.blocks), return_cache=True)

    def decode(self, tokens: jax.Array, caches: Sequence[Cache]) -> tuple[jax.Array, list[Cache]]:
        """Logits of the tokens that follow what `caches` remembers, computed one by one, and the caches after them."""
        return self._run(tokens, None, caches, return_cache=True)

    def _run(
        self, tokens: jax.Array, segment_ids: jax.Array | None, caches: Sequence[Cache | None], return_cache: bool
    ) -> tuple[jax.Array, list[Cache]]:
        x = self.embed(tokens)
        new_caches = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, new_cache = block(x, segment_ids=segment_ids, cache=cache, return_cache=return_cache)
            new_caches.append(new_cache)
        return self.embed.attend(self.norm(x)).astype(jnp.float32), new_caches
