"""Operands of more than 2^31 elements, of which what lies beyond is as if it were alone. Needs an H200.

test_large_cuda.py runs these one after the other in a process of their own, which gives the memory back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_qla
from jax_qla.nn.normalization import gated_rms_norm

pytestmark = pytest.mark.gpu

LENGTH, SEQUENCES, HEADS, DIM = 4160, 64, 64, 128
TOKENS = LENGTH * SEQUENCES
assert (TOKENS - LENGTH) * HEADS * DIM < 2**31 < TOKENS * HEADS * DIM, "the last sequence goes beyond"
Tree = Any


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random(seed: int, shape: Sequence[int], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@jax.jit
def lengths(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the difference and of the second."""
    one, other = (x.astype(jnp.float32).ravel() for x in (one, other))
    return jnp.linalg.norm(one - other), jnp.linalg.norm(other)


def near(found: Tree, expected: Tree) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        difference, length = map(float, lengths(one, other))
        assert difference <= 1e-2 * length > 0


@pytest.fixture(scope="module")
def operands() -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(q, k, v, g, beta), the length of keys about 1, and do; of one row."""
    wide = (1, TOKENS, HEADS, DIM)
    q, k, v, do = (random(seed, wide) for seed in range(4))
    g = -0.2 * jnp.abs(random(4, wide[:3], jnp.float32))
    beta = jax.nn.sigmoid(random(5, wide[:3], jnp.float32))
    return (q, k * DIM**-0.5, v, g, beta), do


@functools.partial(jax.jit, static_argnames="options")
def both_passes(
    x: Sequence[jax.Array], do: jax.Array, options: tuple[tuple[str, Any], ...] = (), cu_seqlens: Any = None
) -> Tree:
    """o and the gradients of all operands."""
    rule: Callable[..., Any] = functools.partial(
        jax_qla.chunk_gated_delta_rule, implementation="cuda", cu_seqlens=cu_seqlens, **dict(options)
    )
    o, transpose = jax.vjp(lambda *x: rule(*x)[0], *x)
    return o, transpose(do)


def of_rows(tree: Tree, start: int, end: int) -> Tree:
    return jax.tree.map(lambda x: x[:, start:end], tree)


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "high"}, {"save_chunk_states": True, "use_qk_l2norm_in_kernel": True}],
    ids=["default", "high", "states kept and normalised"],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_sequences(packed: bool, options: Mapping[str, Any], operands: Any) -> None:
    hashable = tuple(options.items())
    if packed:
        found = both_passes(*operands, hashable, jnp.arange(SEQUENCES + 1) * LENGTH)
    else:
        dense = jax.tree.map(lambda x: x.reshape(SEQUENCES, LENGTH, *x.shape[2:]), operands)
        found = jax.tree.map(lambda x: x.reshape(1, TOKENS, *x.shape[2:]), both_passes(*dense, hashable))
    for n in (0, SEQUENCES // 2, SEQUENCES - 1):
        rows = n * LENGTH, (n + 1) * LENGTH
        near(of_rows(found, *rows), both_passes(*of_rows(operands, *rows), hashable))


def test_one_sequence_in_pieces(operands: Any) -> None:
    """Heads forget within some hundred tokens what is before."""
    found = both_passes(*operands)
    alone = both_passes(*of_rows(operands, TOKENS - LENGTH, TOKENS))
    near(of_rows(found, TOKENS - LENGTH // 2, TOKENS), of_rows(alone, LENGTH // 2, LENGTH))


def alone_at_the_end(function: Callable[..., jax.Array], x: Sequence[jax.Array], before: int) -> None:
    """The last rows of a function of rows, and of its gradients, are those of these rows alone, and some before."""

    @jax.jit
    def both(x: Sequence[jax.Array], dy: jax.Array) -> Tree:
        y, transpose = jax.vjp(function, *x)
        return y, transpose(dy)

    dy = random(9, x[0].shape)
    found, alone = both(x, dy), both(of_rows(x, TOKENS - 1000, TOKENS), of_rows(dy, TOKENS - 1000, TOKENS))
    near(of_rows(found, TOKENS - 1000 + before, TOKENS), of_rows(alone, before, 1000))


def test_convolution() -> None:
    weight = random(1, (4, HEADS * DIM))
    convolution = functools.partial(jax_qla.causal_conv1d, activation="silu", implementation="cuda")
    alone_at_the_end(lambda x: convolution(x, weight)[0], [random(0, (1, TOKENS, HEADS * DIM))], 3)


def test_gated_norm() -> None:
    wide = (1, TOKENS, HEADS, DIM)
    weight = jnp.ones(DIM)
    alone_at_the_end(lambda o, z: gated_rms_norm(o, z, weight, 1e-6, "cuda"), [random(0, wide), random(1, wide)], 0)


def test_decoding() -> None:
    batch = 2**31 // (HEADS * DIM * DIM) + 8
    q, k, v = (random(seed, (batch, 1, HEADS, DIM)) for seed in range(3))
    g, beta = -jnp.ones((batch, 1, HEADS)), jnp.full((batch, 1, HEADS), 0.5)
    x = [q, k * DIM**-0.5, v, g, beta, random(3, (batch, HEADS, DIM, DIM), jnp.float32)]

    @jax.jit
    def step(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Tree:
        options: dict[str, Any] = {"initial_state": state, "output_final_state": True, "implementation": "cuda"}
        return jax_qla.recurrent_gated_delta_rule(q, k, v, g, beta, **options)

    near(jax.tree.map(lambda x: x[-4:], step(*x)), step(*(x[-4:] for x in x)))
