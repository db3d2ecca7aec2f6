"""The operands, made once per row and handed to every library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from rows import HEAD_DIM, Row


def shapes(row: Row) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what `make` returns."""
    keys = jax.ShapeDtypeStruct((1, row.tokens, row.key_heads, HEAD_DIM), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((1, row.tokens, row.value_heads, HEAD_DIM), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((1, row.tokens, row.value_heads), jnp.float32)
    states = jax.ShapeDtypeStruct((row.places, row.value_heads, HEAD_DIM, HEAD_DIM), jnp.float32)
    offsets = jax.ShapeDtypeStruct((row.places + 1,), jnp.int32)
    return {
        "q": keys,
        "k": keys,
        "v": values,
        "g": gates,
        "beta": gates,
        "initial_state": states,
        "cu_seqlens": offsets,
        "do": values,
        "d_final_state": states,
    }


def make(row: Row, seed: int = 0) -> dict[str, jax.Array]:
    """Random operands: q and k of length 1, a quarter of the heads without decay (g = 0), ready on the device."""
    # The threefry generator would take longer to compile than the row to measure.
    return jax.block_until_ready(_make(jax.random.key(seed, impl="unsafe_rbg"), row=row))


def fingerprint(operands: Mapping[str, jax.Array]) -> list[int]:
    """A number of each operand's bits: where one differs, so do the operands."""
    return [int(_bits(x)) for x in operands.values()]


@jax.jit
def _bits(x: jax.Array) -> jax.Array:
    words = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32).ravel()
    weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    return (words * weights).sum(dtype=jnp.uint32)


@partial(jax.jit, static_argnames="row")
def _make(key: jax.Array, row: Row) -> dict[str, jax.Array]:
    wanted = shapes(row)
    keys = dict(zip(wanted, jax.random.split(key, len(wanted)), strict=True))
    x = {name: jax.random.normal(keys[name], wanted[name].shape) for name in wanted if name != "cu_seqlens"}
    for name in ("q", "k"):
        x[name] = x[name] / jnp.linalg.norm(x[name], axis=-1, keepdims=True)
    x["g"] = (jax.nn.log_sigmoid(x["g"]) / 16).at[..., row.value_heads * 3 // 4 :].set(0.0)
    x["beta"] = jax.nn.sigmoid(x["beta"])
    x["d_final_state"] = x["d_final_state"] / 8
    x["cu_seqlens"] = jnp.array(row.offsets)
    return {name: x[name].astype(wanted[name].dtype) for name in wanted}
