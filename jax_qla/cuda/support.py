"""What the kernels of the gated delta rule can take."""

from __future__ import annotations

import functools
from typing import Any

from jax_qla import store
from jax_qla.kernels.packaged import PACKAGED
from jax_qla.launch import why_not_launchable
from jax_qla.residuals import splits

HEAD_DIMS = (64, 128)
"""Sizes of K and V that kernels exist for."""

DTYPES = ("bfloat16", "float16")
"""Dtypes of q, k and v that kernels exist for."""

L2NORM_DTYPES = ("bfloat16",)
"""Dtypes of q and k that the functions here normalise themselves, with `l2norm`. The range of float16 does not bear
what long or short keys make of Vd and dX."""

RECURRENT = frozenset({"recurrent"})
_OF_LAYERS = frozenset({"convolution", "convolution_gradients", "gated_norm"})  # conv1d.py, norm.py
_CHUNKED = frozenset(name for name, _ in PACKAGED) - RECURRENT - _OF_LAYERS
_OF_PLAIN_OPERANDS = frozenset({"backward", "states_from_vd"})
"""Kernels that take no split operands."""


def why_not(q: Any, k: Any, v: Any, *, precision: Any = None, build: bool | None = None) -> str | None:
    """Why the kernels cannot take these operands (arrays or ShapeDtypeStructs), or None.

    Args:
        q, k, v: the operands.
        precision: one that the kernels have.
        build: as in `launch.why_not_launchable`.
    """
    split = splits(precision, q.dtype)
    return why_no_kernels(q, k, v, build, _CHUNKED - _OF_PLAIN_OPERANDS if split else _CHUNKED, split=split)


def why_no_kernels(q: Any, k: Any, v: Any, build: bool | None, kernels: frozenset[str], **options: Any) -> str | None:
    """As `why_not`, of kernels with these names, in configurations that have these `options`."""
    if reason := why_not_operands(q, k, v):
        return reason
    needed = _needed(kernels, key_dim=k.shape[-1], value_dim=v.shape[-1], dtype=q.dtype.name, **options)
    return why_not_launchable(needed, build=build)


def why_not_operands(q: Any, k: Any, v: Any) -> str | None:
    """Why there are no kernels for operands of these dtypes and sizes, in whatever installation, or None."""
    if q.dtype.name not in DTYPES:
        return f"q, k and v must be bfloat16 or float16 for the kernels of 'cuda', got {q.dtype.name}"
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    if key_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
        return f"K and V must be 64 or 128 for the kernels of 'cuda', got K={key_dim} and V={value_dim}"
    return None


@functools.cache
def _needed(kernels: frozenset[str], **sizes: Any) -> tuple[tuple[str, Any], ...]:
    """(name, Config) of all packaged kernels with these names, for these sizes."""

    def fits(config: Any) -> bool:
        return all(sizes.get(field, value) == value for field, value in store.config_fields(config).items())

    return tuple((name, config) for name, config in PACKAGED if name in kernels and fits(config))
