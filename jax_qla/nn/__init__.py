"""Gated DeltaNet layers: `jax_qla.nn.flax.GatedDeltaNet` and `jax_qla.nn.equinox.GatedDeltaNet`.

What is here needs no framework; import the module of yours beside it.
"""

from jax_qla.nn.cache import GatedDeltaNetCache, empty_cache
from jax_qla.nn.checkpoint import load_gated_deltanet_weights
from jax_qla.nn.config import GatedDeltaNetConfig
from jax_qla.nn.parameters import LOGICAL_AXES, parameter_shapes

__all__ = [
    "LOGICAL_AXES",
    "GatedDeltaNetCache",
    "GatedDeltaNetConfig",
    "empty_cache",
    "load_gated_deltanet_weights",
    "parameter_shapes",
]
