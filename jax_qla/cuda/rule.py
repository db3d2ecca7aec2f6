"""The gated delta rule by the kernels: what "cuda" has of the contract that all implementations follow.

`implementations.load` takes this module for "cuda". It imports all kernels of the rule, which who calls conv1d.py or
norm.py alone has no use for.
"""

from jax_qla.cuda.decoding import recurrent, why_not_recurrent
from jax_qla.cuda.over_devices import chunk_states, state_gradient, summary
from jax_qla.cuda.passes import backward, forward
from jax_qla.cuda.support import L2NORM_DTYPES, why_not, why_not_operands

__all__ = [
    "L2NORM_DTYPES",
    "backward",
    "chunk_states",
    "forward",
    "recurrent",
    "state_gradient",
    "summary",
    "why_not",
    "why_not_operands",
    "why_not_recurrent",
]
