"""The gated RMS norm of a layer on Hopper: what its kernels can take, and how they are called."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import launch
from jax_qla.checks import why_not_static
from jax_qla.kernels import gated_norm
from jax_qla.launch import Step, why_not_launchable

DTYPES = ("bfloat16", "float16")
"""Dtypes of o and z that kernels exist for."""

VALUE_DIMS = (64, 128)
"""Sizes of V that kernels exist for."""


def why_not(o: Any, z: Any, *, build: bool | None = None) -> str | None:
    """Why the kernels cannot take o and z [..., V] (arrays or ShapeDtypeStructs), or None; `build` as in
    `launch.why_not_launchable`."""
    if o.dtype.name not in DTYPES or z.dtype != o.dtype:
        return f"o and z must be both bfloat16 or float16 for the kernels of 'cuda', got {o.dtype.name}, {z.dtype.name}"
    if o.shape[-1] not in VALUE_DIMS:
        return f"V must be 64 or 128 for the kernels of 'cuda', got {o.shape[-1]}"
    if reason := why_not_static("o", o):
        return reason
    configs = [gated_norm.Config(o.shape[-1], o.dtype.name, backward) for backward in (False, True)]
    return why_not_launchable([("gated_norm", config) for config in configs], build=build)


def forward(o: jax.Array, z: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """y of o and z [..., V], with at least one row, in their dtype; weight [V] float32."""
    config, inputs = _call(o, z, weight, backward=False)
    (y,) = launch.launch([Step("gated_norm", config, {"eps": eps})], inputs, {"y": _like(inputs["o"])}).values()
    return y.reshape(o.shape)


def backward(
    o: jax.Array, z: jax.Array, weight: jax.Array, dy: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of o, z and weight, the last [V] float32."""
    config, inputs = _call(o, z, weight, backward=True)
    inputs["dy"] = dy.reshape(inputs["o"].shape)
    rows, value_dim = inputs["o"].shape
    blocks = -(-rows // gated_norm.rows_of_block(config))
    d_weight = jax.ShapeDtypeStruct((blocks, value_dim), jnp.float32)
    outputs = {"d_o": _like(inputs["o"]), "d_z": _like(inputs["o"]), "d_weight": d_weight}
    results = launch.launch([Step("gated_norm", config, {"eps": eps})], inputs, outputs)
    return results["d_o"].reshape(o.shape), results["d_z"].reshape(o.shape), jnp.sum(results["d_weight"], axis=0)


def _call(
    o: jax.Array, z: jax.Array, weight: jax.Array, *, backward: bool
) -> tuple[gated_norm.Config, dict[str, jax.Array]]:
    value_dim = o.shape[-1]
    inputs = {"o": o.reshape(-1, value_dim), "z": z.reshape(-1, value_dim), "weight": weight}
    return gated_norm.Config(value_dim, o.dtype.name, backward), inputs


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
