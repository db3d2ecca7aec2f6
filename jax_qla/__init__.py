"""Gated DeltaNet for JAX: `chunk_gated_delta_rule` on Hopper GPUs by TileLang kernels, everywhere else by XLA."""

from jax_qla.api import (
    Implementation,
    PieceChoice,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    recurrent_gated_delta_rule,
    which_implementation,
    which_pieces,
)
from jax_qla.causal_conv1d import causal_conv1d
from jax_qla.mesh import MeshAxes
from jax_qla.vjp import CARRY_NAMES, CHECKPOINT_NAMES, CHUNK_STATE_NAMES, RESIDUAL_NAMES, RESULT_NAMES

__version__ = "0.1.0"

__all__ = [
    "CARRY_NAMES",
    "CHECKPOINT_NAMES",
    "CHUNK_STATE_NAMES",
    "RESIDUAL_NAMES",
    "RESULT_NAMES",
    "Implementation",
    "MeshAxes",
    "PieceChoice",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "recurrent_gated_delta_rule",
    "which_implementation",
    "which_pieces",
]
