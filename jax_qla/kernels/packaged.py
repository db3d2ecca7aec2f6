"""The complete list of the kernels that the API can reach on CUDA, hence of what a wheel carries.

Apart from the package's other modules, because it imports every kernel's, which other modules than `jax_qla.cuda.rule` can do
without.
"""

from __future__ import annotations

import itertools
from typing import Any

from jax_qla.kernels import (
    adjoint_summaries,
    backward,
    balance,
    compose,
    convolution,
    convolution_gradients,
    forward,
    gated_norm,
    gradients,
    layout,
    prepare,
    recurrent,
    state_gradients,
    states,
    states_from_vd,
    summaries,
)

_HEAD_DIMS = (64, 128)
_DTYPES = (
    ("bfloat16", False, False),
    ("bfloat16", True, False),
    ("float16", False, False),
    ("bfloat16", False, True),
    ("bfloat16", True, True),
)
"""With whether q and k are normalised there (kernels/common.py says why not in float16), and whether operands are split."""
_STATE_DTYPES = ("float32", "bfloat16")  # for decoding, where the state is what there is to read


def _packaged() -> tuple[tuple[str, Any], ...]:
    kernels: list[tuple[str, Any]] = [("layout", layout.Config()), ("balance", balance.Config())]
    for dtype, l2norm, split in _DTYPES:
        for key_dim in _HEAD_DIMS:
            kernels.extend(("prepare", prepare.Config(key_dim, dtype, l2norm, split, keys)) for keys in (1, 2, 4))
        if not split:
            kernels.append(("backward", backward.Config(128, 128, dtype, l2norm)))
        for key_dim, value_dim in itertools.product(_HEAD_DIMS, _HEAD_DIMS):
            kernels.append(("gradients", gradients.Config(key_dim, value_dim, dtype, l2norm, split)))
            kernels.append(("summaries", summaries.Config(key_dim, value_dim, dtype, l2norm, split)))
            kernels.append(("adjoint_summaries", adjoint_summaries.Config(key_dim, value_dim, dtype, l2norm, split)))
            for value_tile in (64,) if split else sorted({64, value_dim}):
                sizes = (key_dim, value_dim, dtype, value_tile, l2norm, split)
                keeps = ("nothing", "states") if split else ("nothing", "vd", "states")
                kernels.extend(("forward", forward.Config(*sizes, keep)) for keep in keeps)
                if l2norm and not split:
                    kernels.extend(("forward", forward.Config(*sizes, keep, False, True)) for keep in keeps)
                if value_tile > 64:  # packed, and no shards: where `prepare` leaves queries to `forward` (steps.py)
                    kernels.extend(("forward", forward.Config(*sizes, keep, True, l2norm)) for keep in keeps[:2])
                kernels.append(("states", states.Config(*sizes)))
                if not split and not l2norm:
                    kernels.append(("states_from_vd", states_from_vd.Config(*sizes[:4])))
                kernels.append(("state_gradients", state_gradients.Config(*sizes)))
    for key_dim, value_dim, dtype, state_dtype in itertools.product(
        _HEAD_DIMS, _HEAD_DIMS, ("bfloat16", "float16"), _STATE_DTYPES
    ):
        for single in (False, True) if state_dtype == "bfloat16" else (False,):
            kernels.append(("recurrent", recurrent.Config(key_dim, value_dim, dtype, state_dtype, single)))
    for key_dim, value_dim, reverse in itertools.product(_HEAD_DIMS, _HEAD_DIMS, (False, True)):
        kernels.extend(("compose", compose.Config(key_dim, value_dim, reverse, columns)) for columns in compose.COLUMNS)
    for dtype, marked in itertools.product(("bfloat16", "float16"), (False, True)):
        kernels.append(("convolution", convolution.Config(dtype, marked)))
        kernels.append(("convolution_gradients", convolution_gradients.Config(dtype, marked)))
    for value_dim, dtype, is_backward in itertools.product(_HEAD_DIMS, ("bfloat16", "float16"), (False, True)):
        kernels.append(("gated_norm", gated_norm.Config(value_dim, dtype, is_backward)))
    return tuple(kernels)


PACKAGED = _packaged()
"""(module name, Config) of every kernel of the wheel."""
