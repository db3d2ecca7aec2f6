"""In which dtype is computed what must not be narrower than float32.

Without JAX's promotion, which `jax_numpy_dtype_promotion="strict"` refuses.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def widest(*dtypes: Any) -> np.dtype[Any]:
    """The widest of these floating dtypes and float32."""
    return max(map(jnp.dtype, (jnp.float32, *dtypes)), key=lambda dtype: dtype.itemsize)


def widen(x: jax.Array) -> jax.Array:
    """x in float32, or as it is if it is wider."""
    return x.astype(widest(x.dtype))
