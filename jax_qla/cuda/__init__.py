"""The Hopper implementation: which kernels run, in which order, on which arrays.

Files import those above them:

| file | what it knows |
|---|---|
| support.py | what the kernels of the gated delta rule can take |
| call.py | one call's sizes, where its sequences or their pieces lie, shapes of what kernels hand on |
| steps.py | its kernels in order, with their configurations |
| passes.py | the forward and the backward pass |
| over_devices.py | what is computed before, and beside, the exchange where sequences go on beyond a device |
| decoding.py | one or a few tokens from a state |
| conv1d.py | a layer's short convolution |
| norm.py | a layer's gated norm |

Each function makes one FFI call of all its kernels (`launch.launch`).
"""

from jax_qla.cuda.decoding import recurrent, why_not_recurrent
from jax_qla.cuda.over_devices import chunk_states, state_gradient, summary
from jax_qla.cuda.passes import backward, forward
from jax_qla.cuda.support import DTYPES, HEAD_DIMS, L2NORM_DTYPES, why_not

__all__ = [
    "DTYPES",
    "HEAD_DIMS",
    "L2NORM_DTYPES",
    "backward",
    "chunk_states",
    "forward",
    "recurrent",
    "state_gradient",
    "summary",
    "why_not",
    "why_not_recurrent",
]
