"""The Gated DeltaNet layer between its input projections and its output projection, for every framework.

    q, k, v = silu(causal_convolution(qkv))        g = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)
    o = gated_delta_rule(q / |q|, k / |k|, v, g, beta)
    y = rms_norm(o) * silu(z)

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), in the form that Qwen3-Next gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_qla.api import chunk_gated_delta_rule, recurrent_gated_delta_rule
from jax_qla.checks import check_piece_rows, check_save_chunk_states
from jax_qla.implementations import check_implementation
from jax_qla.nn.cache import GatedDeltaNetCache, check_cache
from jax_qla.nn.config import GatedDeltaNetConfig
from jax_qla.nn.convolution import causal_convolution, tail_after
from jax_qla.nn.gates import log_decay, update_strength
from jax_qla.nn.normalization import gated_rms_norm
from jax_qla.nn.projections import Projected, by_heads, cut_like, heads_may_be_cut


class MixerWeights(NamedTuple):
    """The parameters between the projections."""

    conv1d: jax.Array
    """[conv_kernel_size, conv_channels]"""
    A_log: jax.Array
    """[Hv]"""
    dt_bias: jax.Array
    """[Hv]"""
    norm: jax.Array
    """[V]"""


def checked_options(
    implementation: str | Sequence[str] | None, piece_rows: int | None, save_chunk_states: bool | None
) -> tuple[str | tuple[str, ...] | None, int | None, bool | None]:
    """How a layer is to compute the rule, as `mix` takes it: hashable, as what is static in a layer must be.

    Raises:
        TypeError, ValueError: `jax_qla.chunk_gated_delta_rule` would refuse one of them.
    """
    check_implementation(implementation)
    check_save_chunk_states(save_chunk_states)
    names = implementation if isinstance(implementation, str | None) else tuple(implementation)
    return names, check_piece_rows(piece_rows), save_chunk_states


# Named in profiles.
_chunk_gated_delta_rule = jax.named_scope("gated_delta_rule")(chunk_gated_delta_rule)
_recurrent_gated_delta_rule = jax.named_scope("gated_delta_rule")(recurrent_gated_delta_rule)


def mix(
    projected: Projected,
    weights: MixerWeights,
    config: GatedDeltaNetConfig,
    *,
    segment_ids: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
    piece_rows: int | None = None,
    save_chunk_states: bool | None = None,
) -> jax.Array:
    """Mixes whole sequences in parallel, for training.

    Args:
        projected: the input projections' outputs.
        weights: the parameters between the projections.
        config: of the layer.
        segment_ids: int32 [B, T], which keeps packed sequences apart; as in `jax_qla.chunk_gated_delta_rule`.
        implementation, piece_rows, save_chunk_states: as in `jax_qla.chunk_gated_delta_rule`.

    Returns:
        [B, T, Hv * V] in the dtype of `projected`: the input of the output projection.
    """
    if len(projected.qkv) > 1 and not heads_may_be_cut(projected):
        # Gradients of one convolution take less time than those of three, by more than it takes to join what they read.
        projected = projected._replace(qkv=(_joined(projected.qkv),))
    qkv = _convolved(projected, weights, config, [None] * len(projected.qkv), segment_ids, implementation)
    o, _ = _chunk_gated_delta_rule(
        *_operands(qkv, projected, weights, config),
        segment_ids=segment_ids,
        use_qk_l2norm_in_kernel=True,
        implementation=implementation,
        precision=_precision(projected.z.dtype, config),
        piece_rows=piece_rows,
        save_chunk_states=save_chunk_states,
    )
    return _output(o, projected, weights, config, implementation)


def mix_prefill(
    projected: Projected,
    weights: MixerWeights,
    config: GatedDeltaNetConfig,
    *,
    cache: GatedDeltaNetCache | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
    piece_rows: int | None = None,
) -> tuple[jax.Array, GatedDeltaNetCache]:
    """As `mix`, from a cache, and with the cache after the last token.

    Args:
        cache: what precedes the input; nothing if None.
        segment_ids: int32 [B, T] with one sequence a row, the rest of which is 0: prompts of different lengths. The
            cache returned is that after each row's sequence, whether it is padded before or behind. Not together with
            `cache`.
        All others: as in `mix`.

    Raises:
        TypeError, ValueError: cache and segment_ids are both given, or the cache is not of this layer and batch.
    """
    if cache is not None and segment_ids is not None:
        raise ValueError("cache and segment_ids cannot be combined: continue sequences of equal length, or one by one")
    batch = projected.z.shape[0]
    if cache is not None:
        check_cache(cache, config, batch, projected.z.dtype)
    tails: Sequence[jax.Array | None] = [None] * len(projected.qkv)
    if cache is not None:
        tails = cut_like(cache.conv, projected.qkv)
    qkv = _convolved(projected, weights, config, tails, segment_ids, implementation)
    o, state = _chunk_gated_delta_rule(
        *_operands(qkv, projected, weights, config),
        initial_state=None if cache is None else cache.state,
        output_final_state=True,
        segment_ids=segment_ids,
        max_segments=None if segment_ids is None else 1,
        use_qk_l2norm_in_kernel=True,
        implementation=implementation,
        precision=_precision(projected.z.dtype, config),
        piece_rows=piece_rows,
    )
    assert state is not None
    pairs = zip(projected.qkv, tails, strict=True)
    conv = [tail_after(x, config.conv_kernel_size, tail, segment_ids) for x, tail in pairs]
    if segment_ids is not None:
        state = state[:, 0]
    return _output(o, projected, weights, config, implementation), GatedDeltaNetCache(_joined(conv), state)


def mix_step(
    projected: Projected,
    weights: MixerWeights,
    config: GatedDeltaNetConfig,
    cache: GatedDeltaNetCache,
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, GatedDeltaNetCache]:
    """As `mix_prefill`, token by token: for one or a few tokens.

    Raises:
        TypeError, ValueError: the cache is not of this layer and batch.
    """
    check_cache(cache, config, projected.z.shape[0], projected.z.dtype)
    # Of a few tokens XLA makes one kernel with what precedes it.
    projected = projected._replace(qkv=(_joined(projected.qkv),))
    qkv = _convolved(projected, weights, config, [cache.conv], None, "xla")
    o, state = _recurrent_gated_delta_rule(
        *_operands(qkv, projected, weights, config),
        initial_state=cache.state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        implementation=implementation,
    )
    assert state is not None
    conv = tail_after(projected.qkv[0], config.conv_kernel_size, cache.conv)
    return _output(o, projected, weights, config, "xla"), GatedDeltaNetCache(conv, state)


def _convolved(
    projected: Projected,
    weights: MixerWeights,
    config: GatedDeltaNetConfig,
    tails: Sequence[jax.Array | None],
    segment_ids: jax.Array | None,
    implementation: str | Sequence[str] | None,
) -> tuple[jax.Array, ...]:
    """q, k and v, each [B, T, heads * size]. `tails`: the tokens before each of `projected.qkv`, if any."""
    sizes = (config.key_size, config.key_size, config.value_size)
    together = len(projected.qkv) == 1
    y: list[jax.Array] = []
    kernels = cut_like(weights.conv1d, projected.qkv)
    for x, kernel, tail in zip(projected.qkv, kernels, tails, strict=True):
        parts = sizes if together else x.shape[-1:]
        y += causal_convolution(x, kernel, tail, segment_ids, parts=parts, implementation=implementation)
    return tuple(y)


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _operands(
    qkv: Sequence[jax.Array], projected: Projected, weights: MixerWeights, config: GatedDeltaNetConfig
) -> tuple[jax.Array, ...]:
    """q, k, v, g and beta of the gated delta rule, from the convolved q, k and v."""
    q, k, v = qkv
    return (
        by_heads(q, "Hk", config.num_key_heads, config.key_head_dim),
        by_heads(k, "Hk", config.num_key_heads, config.key_head_dim),
        by_heads(v, "Hv", config.num_value_heads, config.value_head_dim),
        log_decay(projected.a, weights.A_log, weights.dt_bias),
        update_strength(projected.b, config.allow_neg_eigval),
    )


def _precision(dtype: Any, config: GatedDeltaNetConfig) -> str | None:
    """Of the gated delta rule. With beta above 1 the kernels' errors in bfloat16 grow, unless it is high."""
    return "high" if config.allow_neg_eigval and dtype == jnp.bfloat16 else None


def _output(
    o: jax.Array,
    projected: Projected,
    weights: MixerWeights,
    config: GatedDeltaNetConfig,
    implementation: str | Sequence[str] | None,
) -> jax.Array:
    """The normalised and gated heads side by side: [B, T, Hv * V]."""
    z = by_heads(projected.z, "Hv", config.num_value_heads, config.value_head_dim)
    return gated_rms_norm(o, z, weights.norm, config.norm_eps, implementation).reshape(projected.z.shape)
