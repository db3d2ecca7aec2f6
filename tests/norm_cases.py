"""Calls of the gated RMS norm by kernels, and what they are held to, whatever runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from convolution_cases import ROUNDING

from jax_qla.nn.normalization import gated_rms_norm

EPS = 1e-5
SMALL = (((1, 3, 1, 64), "float16"), ((2, 45, 3, 128), "bfloat16"))
"""Shapes of o and dtypes."""
LARGE = (*SMALL, ((1, 1, 1, 128), "float16"), ((2, 500, 16, 64), "bfloat16"), ((3, 1000, 7, 128), "bfloat16"))


def given(shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, ...]:
    """o, whose rows have lengths from 0 to 100, z, weight and dy."""
    random = np.random.default_rng(sum(shape))
    rows = random.standard_normal((3, *shape))
    rows[0] *= 10.0 ** random.uniform(-3, 1, (*shape[:-1], 1))
    rows[0, 0, 0, 0] = 0
    o, z, dy = (jnp.asarray(x, jnp.float32).astype(dtype) for x in (rows[0], 3 * rows[1], rows[2]))
    return o, z, jnp.asarray(random.standard_normal(shape[-1]), jnp.float32), dy


def check(shape: tuple[int, ...], dtype: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """That forward(o, z, weight, eps=) and backward(o, z, weight, dy, eps=) are right to the rounding of results."""
    o, z, weight, dy = given(shape, dtype)

    @jax.jit
    def right(*wide: jax.Array) -> tuple[jax.Array, ...]:
        y, transpose = jax.vjp(lambda o, z, w: gated_rms_norm(o, z, w, EPS), *wide[:3])
        return y, *transpose(wide[3])

    expected = right(*(x.astype(jnp.float32) for x in (o, z, weight, dy)))
    found = forward(o, z, weight, eps=EPS), *backward(o, z, weight, dy, eps=EPS)
    for name, a, b in zip(("y", "d_o", "d_z", "d_weight"), found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, jnp.float32 if name == "d_weight" else dtype), name
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), name
        rounding = 1e-5 if name == "d_weight" else ROUNDING[dtype]
        error = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)  # of a row of zeros all is zero
        assert error <= rounding / (2 if a.size > 1000 else 1), (name, error)
