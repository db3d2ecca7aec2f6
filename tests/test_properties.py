"""The plain JAX implementation on random packings, gates and inputs, against the recurrence in float64 and itself.

Sizes come from a short list, because each new one compiles; what varies freely is what the arrays hold.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qla
from jax_qla.reference import recurrence

pytest.importorskip("hypothesis")
import hypothesis
from hypothesis import strategies

EXAMPLES = int(os.environ.get("JAX_QLA_EXAMPLES", "25"))
"""Of each property; `make thorough` asks for more."""
recur: Any = recurrence  # called with operands that a type checker cannot follow
settings = hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None)
SEQUENCES = 4
SIZES = [(129, 1, 2), (64, 1, 1), (65, 2, 2), (200, 1, 3)][: max(1, EXAMPLES // 50)]
"""Tokens, key heads, value heads."""
K, V = 8, 16

seeds = strategies.integers(0, 2**32 - 1)
gates = strategies.sampled_from([0.0, -1e-6, -1e-3, -0.1, -1.0, -20.0, -80.0, -1e4, -np.inf])


@strategies.composite
def packings(draw: Any, tokens: int) -> list[int]:
    """cu_seqlens of SEQUENCES sequences from 0 to at most `tokens`; empty ones, tails and gaps of every kind."""
    inner = draw(strategies.lists(strategies.integers(0, tokens), min_size=SEQUENCES, max_size=SEQUENCES))
    return [0, *sorted(inner)]


class Inputs:
    """Random operands; some gates are replaced by those that were drawn."""

    def __init__(self, size: tuple[int, int, int], seed: int, drawn: list[float]) -> None:
        tokens, key_heads, value_heads = size
        random = np.random.default_rng(seed)
        q, k = (random.standard_normal((1, tokens, key_heads, K)) for _ in range(2))
        self.q, self.k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        self.v = random.standard_normal((1, tokens, value_heads, V))
        self.g = -np.exp(2 * random.standard_normal((1, tokens, value_heads)) - 2)
        for gate in drawn:
            self.g[0, random.integers(tokens), random.integers(value_heads)] = gate
        if drawn and seed % 3 == 0:  # a head of nothing else
            self.g[0, :, 0] = drawn[0]
        self.beta = random.random((1, tokens, value_heads))
        self.state = random.standard_normal((SEQUENCES, value_heads, K, V))
        self.cotangents = random.standard_normal(self.v.shape), random.standard_normal(self.state.shape)

    def operands(self, dtype: Any) -> tuple[np.ndarray, ...]:
        return tuple(x.astype(dtype) for x in (self.q, self.k, self.v, self.g, self.beta, self.state))


@functools.cache
def implementation(name: str) -> Any:
    """Jitted: o, final state and the gradients of all operands, of a packed call."""

    @jax.jit
    def run(operands: Any, cu_seqlens: Any, cotangents: Any) -> Any:
        def rule(*operands: Any) -> Any:
            if name == "reference":
                segments = jnp.stack([cu_seqlens[:-1], cu_seqlens[1:]], 1)
                return recur(*operands, segments, scale=K**-0.5)
            *rows, state = operands
            options: Any = {"output_final_state": True, "cu_seqlens": cu_seqlens, "implementation": name}
            return jax_qla.chunk_gated_delta_rule(*rows, initial_state=state, **options)

        results, vjp = jax.vjp(rule, *operands)
        return *results, *vjp(cotangents)

    return run


def both(inputs: Inputs, cu_seqlens: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What "xla" computes in float32, and the recurrence in float64 on the same numbers."""
    offsets = np.array(cu_seqlens, np.int32)
    low = inputs.operands(np.float32)
    cotangents = tuple(x.astype(np.float32) for x in inputs.cotangents)
    found = implementation("xla")(low, offsets, cotangents)
    with jax.enable_x64(True):
        wide = tuple(x.astype(np.float64) for x in low)
        expected = implementation("reference")(wide, offsets, tuple(x.astype(np.float64) for x in cotangents))
    return [np.asarray(x, np.float64) for x in found], [np.asarray(x) for x in expected]


@settings
@hypothesis.given(
    size=strategies.sampled_from(SIZES), seed=seeds, drawn=strategies.lists(gates, max_size=12), data=strategies.data()
)
def test_packed_calls_are_the_recurrence(size: tuple[int, int, int], seed: int, drawn: list[float], data: Any) -> None:
    cu_seqlens = data.draw(packings(size[0]))
    found, expected = both(Inputs(size, seed, drawn), cu_seqlens)
    names = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "d_initial_state")
    for name, x, y in zip(names, found, expected, strict=True):
        assert np.all(np.isfinite(x)), name
        assert np.linalg.norm(x - y) <= 2e-5 * max(float(np.linalg.norm(y)), 1e-3), name
    o, final_state = found[:2]
    assert np.all(o[:, cu_seqlens[-1] :] == 0)
    for n in range(SEQUENCES):
        if cu_seqlens[n] == cu_seqlens[n + 1]:
            state = Inputs(size, seed, drawn).operands(np.float32)[5][n]
            np.testing.assert_array_equal(final_state[n], state)


@settings
@hypothesis.given(size=strategies.sampled_from(SIZES), seed=seeds, data=strategies.data())
def test_a_sequence_may_be_cut_anywhere(size: tuple[int, int, int], seed: int, data: Any) -> None:
    """Two sequences, the second from the first one's final state, are one: the same o, and the same last state."""
    tokens = size[0]
    cut = data.draw(strategies.integers(0, tokens))
    inputs = Inputs(size, seed, [])
    *rows, state = inputs.operands(np.float32)
    whole, last = _forward(*rows, state, np.array([0, tokens, tokens, tokens, tokens], np.int32))
    _, middle = _forward(*rows, state, np.array([0, cut, tokens, tokens, tokens], np.int32))
    continued = state.copy()
    continued[1] = middle[0]
    parts, ends = _forward(*rows, continued, np.array([0, cut, tokens, tokens, tokens], np.int32))
    np.testing.assert_allclose(parts, whole, rtol=0, atol=2e-5)
    np.testing.assert_allclose(ends[1], last[0], rtol=0, atol=2e-5)


@settings
@hypothesis.given(size=strategies.sampled_from(SIZES), seed=seeds, data=strategies.data())
def test_cu_seqlens_that_lie_do_no_harm(size: tuple[int, int, int], seed: int, data: Any) -> None:
    """Not sorted, negative, beyond the end: finite numbers, and what lies before the first lie is right."""
    tokens = size[0]
    anything = strategies.integers(-(2**31), 2**31 - 1) | strategies.integers(-2, tokens + 2)
    lies = data.draw(strategies.lists(anything, min_size=SEQUENCES - 1, max_size=SEQUENCES - 1))
    first = data.draw(strategies.integers(0, tokens))
    *rows, state = Inputs(size, seed, []).operands(np.float32)
    o, final_state = _forward(*rows, state, np.array([0, first, *lies], np.int32))
    assert np.all(np.isfinite(o))
    assert np.all(np.isfinite(final_state))
    _, right = _forward(*rows, state, np.array([0, *[first] * SEQUENCES], np.int32))
    np.testing.assert_array_equal(final_state[0], right[0])


def _forward(*operands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """o and the final state, by the function that is compiled already."""
    *given, cu_seqlens = operands
    v, state = given[2], given[5]
    o, final_state, *_ = implementation("xla")(tuple(given), cu_seqlens, (np.zeros_like(v), np.zeros_like(state)))
    return np.asarray(o), np.asarray(final_state)
