"""A byte-level language model of Gated DeltaNet layers, in Flax NNX.

    x = embed(tokens)
    x = x + GatedDeltaNet(RMSNorm(x));  x = x + SwiGLU(RMSNorm(x))        (once per layer)
    logits = RMSNorm(x) embed^T

In shapes, B is the batch, T the length and D the width of the model.
"""

# mypy: disallow-subclassing-any=False, warn-return-any=False
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jax_qla.nn import GatedDeltaNetCache, GatedDeltaNetConfig
from jax_qla.nn.flax import GatedDeltaNet


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a `LanguageModel`. `dtype` is that of the activations; parameters are float32."""

    vocabulary: int
    layers: int
    gated_deltanet: GatedDeltaNetConfig
    """Of every layer; its hidden_size is the width of the model."""
    mlp_width: int
    dtype: str = "float32"
    implementation: str | None = None
    """Which implementation of `jax_qla.chunk_gated_delta_rule` to run; None lets jax_qla choose."""


class SwiGLU(nnx.Module):
    """The MLP of a block: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.gate_and_up = linear(config.gated_deltanet.hidden_size, 2 * config.mlp_width)
        self.down = linear(config.mlp_width, config.gated_deltanet.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_and_up(x), 2, axis=-1)
        return self.down(nnx.silu(gate) * up)


class Block(nnx.Module):
    """One layer: token mixing, then the MLP, each behind a norm and around a residual connection."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        norm = partial(nnx.RMSNorm, config.gated_deltanet.hidden_size, dtype=config.dtype, rngs=rngs)
        self.mixer_norm = norm()
        self.mixer = GatedDeltaNet(
            config.gated_deltanet, dtype=config.dtype, implementation=config.implementation, rngs=rngs
        )
        self.mlp_norm = norm()
        self.mlp = SwiGLU(config, rngs)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, cache: GatedDeltaNetCache | None, step: bool
    ) -> tuple[jax.Array, GatedDeltaNetCache | None]:
        h = self.mixer_norm(x)
        if cache is None:
            h = self.mixer(h, segment_ids=segment_ids)
        else:
            h, cache = self.mixer.step(h, cache) if step else self.mixer.prefill(h, cache)
        x = x + h
        return x + self.mlp(self.mlp_norm(x)), cache


class LanguageModel(nnx.Module):
    """tokens int32 [B, T] -> logits float32 [B, T, vocabulary] of the token that follows each one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.gated_deltanet.hidden_size
        self.embed = nnx.Embed(config.vocabulary, width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Logits of a whole batch in parallel, for training. segment_ids int32 [B, T] keeps packed documents apart."""
        return self._run(tokens, segment_ids, [None] * len(self.blocks), step=False)[0]

    def init_cache(self, batch_size: int, room: int | None = None) -> list[GatedDeltaNetCache]:
        """The caches before the first token; they have room for any number."""
        return [block.mixer.init_cache(batch_size) for block in self.blocks]

    def prefill(
        self, tokens: jax.Array, caches: Sequence[GatedDeltaNetCache]
    ) -> tuple[jax.Array, list[GatedDeltaNetCache]]:
        """Logits of the tokens that follow what `caches` remember, in parallel, and the caches after them."""
        return self._run(tokens, None, caches, step=False)

    def decode(
        self, tokens: jax.Array, caches: Sequence[GatedDeltaNetCache]
    ) -> tuple[jax.Array, list[GatedDeltaNetCache]]:
        """As `prefill`, token by token."""
        return self._run(tokens, None, caches, step=True)

    def _run(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None,
        caches: Sequence[GatedDeltaNetCache | None],
        step: bool,
    ) -> tuple[jax.Array, list[GatedDeltaNetCache]]:
        x = self.embed(tokens)
        new_caches = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, segment_ids, cache, step)
            new_caches.append(cache)
        return self.embed.attend(self.norm(x)).astype(jnp.float32), new_caches
