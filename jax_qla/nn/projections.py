"""What a layer projects from its input, whichever linear layers do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_qla.nn.config import GatedDeltaNetConfig


class Projected(NamedTuple):
    """The projections of the input [B, T, D]."""

    qkv: jax.Array
    """[B, T, 2 * Hk * K + Hv * V]: all heads of q, then of k, then of v."""
    z: jax.Array
    """[B, T, Hv * V], the output gate."""
    b: jax.Array
    """[B, T, Hv], from which beta comes."""
    a: jax.Array
    """[B, T, Hv], from which the decay comes."""


def arrange(outputs: Mapping[str, jax.Array], config: GatedDeltaNetConfig) -> Projected:
    """Brings the outputs of `config.input_projections` into one form.

    A fused projection is grouped by key head: q, k, and then v and z of the value heads that read this key head; in
    the same way b, and then a.

    Args:
        outputs: [B, T, features] of every input projection.
    """
    if config.projections == "split":
        return Projected(*(outputs[name] for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")))
    qkvz, ba = outputs["in_proj_qkvz"], outputs["in_proj_ba"]
    shape = qkvz.shape[:-1]
    heads, key_dim = config.num_key_heads, config.key_head_dim
    ratio = config.num_value_heads // heads
    value_dim = ratio * config.value_head_dim
    # No size is left open: of an array without elements it could not be told.
    qkvz = qkvz.reshape(*shape, heads, 2 * (key_dim + value_dim))
    q, k, v, z = jnp.split(qkvz, [key_dim, 2 * key_dim, 2 * key_dim + value_dim], axis=-1)
    b, a = jnp.split(ba.reshape(*shape, heads, 2 * ratio), [ratio], axis=-1)
    q, k, v, z, b, a = (x.reshape(*shape, heads * x.shape[-1]) for x in (q, k, v, z, b, a))
    return Projected(jnp.concatenate([q, k, v], axis=-1), z, b, a)
