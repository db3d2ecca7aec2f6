"""The parameters of a Gated DeltaNet layer: names, shapes, logical axes and initial values, for every framework.

Names are those of Hugging Face's Qwen modules. Matrices are [inputs, outputs] and the convolution is [width, channels]
here; a framework that stores them otherwise transposes where it stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jax_qla.checks import known_dtype
from jax_qla.nn.config import GatedDeltaNetConfig, check_config

LOGICAL_AXES: Mapping[str, tuple[str | None, ...]] = {
    "in_proj_qkv": ("embed", "qkv"),
    "in_proj_z": ("embed", "value"),
    "in_proj_b": ("embed", "value_heads"),
    "in_proj_a": ("embed", "value_heads"),
    "in_proj_qkvz": ("embed", "qkvz"),
    "in_proj_ba": ("embed", "ba"),
    "conv1d": (None, "qkv"),
    "A_log": ("value_heads",),
    "dt_bias": ("value_heads",),
    "norm": (None,),
    "out_proj": ("value", "embed"),
}
"""The name of every axis of every parameter, for sharding rules such as {"embed": "fsdp", "value": "tensor"}.

"embed" is the width of the model, "value" the Hv * V features of all value heads, "value_heads" the Hv heads. "qkv" is
q, k and v side by side. "qkvz" and "ba" are grouped by key head, so they divide evenly among at most Hk devices. Where
these two are cut, "qkv" should not be: it is then the axis of the convolution's filters alone. None is never worth
sharding.
"""


def parameter_shapes(config: GatedDeltaNetConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a layer with this configuration, by name.

    Matrices are [inputs, outputs], conv1d is [width, channels].

    Raises:
        TypeError: config is not a GatedDeltaNetConfig.
    """
    check_config(config)
    return {
        **{name: (config.hidden_size, features) for name, features in config.input_projections.items()},
        "conv1d": (config.conv_kernel_size, config.conv_channels),
        "A_log": (config.num_value_heads,),
        "dt_bias": (config.num_value_heads,),
        "norm": (config.value_head_dim,),
        "out_proj": (config.value_size, config.hidden_size),
    }


def check_dtypes(dtype: Any, param_dtype: Any) -> None:
    """Whether a layer can compute in `dtype` and have parameters in `param_dtype`; None would be float64.

    Raises:
        TypeError: one is not floating, or the first none that the gated delta rule is computed in.
    """
    for name, given in (("dtype", dtype), ("param_dtype", param_dtype)):
        try:
            floating = given is not None and jnp.issubdtype(given, jnp.floating)
        except TypeError:
            floating = False
        if not floating:
            raise TypeError(f"{name} must be a floating dtype such as jnp.bfloat16, got {given!r}")
    if jnp.dtype(dtype).itemsize < 2:
        raise TypeError(f"dtype must be bfloat16, float16, float32 or float64, got {jnp.dtype(dtype).name}")


def check_weights(weights: Mapping[str, Any], config: GatedDeltaNetConfig) -> None:
    """Whether `weights` are all the parameters of a layer, and nothing else.

    Raises:
        ValueError: a parameter is missing, is one too many, is no array, has another shape, or is not floating; all
            such are named.
    """
    shapes = parameter_shapes(config)
    wrong = [f"{name} is missing" for name in shapes if name not in weights]
    wrong += [f"{name} does not belong to the layer" for name in weights if name not in shapes]
    for name in (name for name in shapes if name in weights):
        given = getattr(weights[name], "shape", None)
        if given is None:
            wrong.append(f"{name} must be an array, got {type(weights[name]).__name__}")
        elif tuple(given) != shapes[name]:
            wrong.append(f"{name} must have shape {shapes[name]}, got {tuple(given)}")
        elif (dtype := known_dtype(weights[name])) is not None and not jnp.issubdtype(dtype, jnp.floating):
            wrong.append(f"{name} must be of a floating dtype, got {dtype}")
    if wrong:
        raise ValueError(f"weights do not fit the layer with projections={config.projections!r}: {'; '.join(wrong)}")


def in_place_of(old: Any, new: Any) -> jax.Array:
    """`new` in the dtype of `old`, and cut like it if it was put somewhere, or, a shape alone, names devices."""
    sharding = getattr(old, "sharding", None)
    nowhere = sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    traced = any(isinstance(x, jax.core.Tracer) for x in (old, new))
    if nowhere or traced or (isinstance(old, jax.Array) and not old.committed):
        return jnp.asarray(new, old.dtype)
    # Not by way of one device, which may have no room for all of it.
    new = new if isinstance(new, jax.Array) else np.asarray(new)
    return jax.device_put(new.astype(old.dtype), sharding)


def initial_conv1d(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Uniform in +-width**-0.5, for a kernel [width, channels]."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def initial_a_log(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """The logarithm of decay rates that are uniform in [1, 16], as in Mamba-2 (Dao, Gu, arXiv 2405.21060)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def initial_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """The inverse softplus of time steps dt whose logarithms are uniform between those of 0.001 and 0.1.

    As in Mamba-2: together with the decay rates, heads start with memories of very different lengths.
    """
    dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(0.001), jnp.log(0.1)))
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)
