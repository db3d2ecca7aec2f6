"""The gated delta rule as its definition reads: one token after the other.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T        o_t = scale * S_t^T q_t

This is the measure for every other implementation and the one that has jvp and derivatives of any order. It computes
in float32, or in float64 when an operand is float64, whatever the platform's default matmul precision. Source: Yang,
Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jax_qla.l2norm import normalize
from jax_qla.varying import match_varying
from jax_qla.widening import widest

_BLOCK = 32
"""Tokens between the states that reverse-mode differentiation keeps; those inside a block are recomputed."""

_UNROLL_LIMIT = 16
"""`recurrent` writes out the tokens of calls up to this length instead of looping over them."""


def _token(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: state [..., Hk, r, K, V]; q, k [..., Hk, K]; v [..., Hk, r, V]; g, beta [..., Hk, r]."""
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    state = jnp.exp(g)[..., None, None] * state
    delta = beta[..., None] * (v - einsum("...hk,...hrkv->...hrv", k, state))
    state = state + k[..., :, None, :, None] * delta[..., None, :]
    return state, einsum("...hk,...hrkv->...hrv", q, state)


def _prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    sequences: int,
    scale: float,
    l2norm: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Operands in the computing dtype with value heads split into [Hk, r], and the first state [N, Hk, r, K, V]."""
    if l2norm:
        q, k = normalize(q), normalize(k)
    operands = (q, k, v, g, beta) if initial_state is None else (q, k, v, g, beta, initial_state)
    dtype = widest(*(x.dtype for x in operands))
    key_heads, key_dim = q.shape[2:]
    value_heads, value_dim = v.shape[2:]
    ratio = value_heads // key_heads
    q, k, v, g, beta = (x.astype(dtype) for x in (q, k, v, g, beta))
    split = (*v.shape[:2], key_heads, ratio)
    tokens = (q * jnp.asarray(scale, dtype), k, v.reshape(*split, value_dim), g.reshape(split), beta.reshape(split))
    shape = (sequences, key_heads, ratio, key_dim, value_dim)
    state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype).reshape(shape)
    return tokens, match_varying(state, (tokens, state))  # as a scan's carry must


def recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    *,
    scale: float,
    l2norm: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over all tokens of a dense or packed batch, differentiable by JAX in every mode and order.

    Args:
        q, k: [B, T, Hk, K]. v: [B, T, Hv, V], Hv a multiple of Hk. g (log decay), beta: [B, T, Hv].
        initial_state: [N, Hv, K, V], or None for zeros; N = B when dense.
        segments: None (dense), or int32 [N, 2], start and end row of each sequence, sorted and disjoint; B = 1.
        scale: factor of q.
        l2norm: whether q and k are to be divided by sqrt(|x|^2 + 1e-6), over K, and rounded to their dtype.

    Returns:
        o [B, T, Hv, V] in v's dtype, zero in rows outside every segment, and final_state [N, Hv, K, V] in float32 or
        float64. The final state of an empty segment is its initial state, bit for bit.
    """
    batch, length, value_heads, value_dim = v.shape
    sequences = batch if segments is None else segments.shape[0]
    if segments is None:
        valid = jnp.ones((length,), bool)
        sequence = jnp.zeros((length,), jnp.int32)
    else:
        row = jnp.arange(length, dtype=jnp.int32)
        inside = (row[:, None] >= segments[None, :, 0]) & (row[:, None] < segments[None, :, 1])
        valid = jnp.any(inside, axis=1)
        sequence = jnp.argmax(inside, axis=1) if sequences else jnp.zeros((length,), jnp.int32)
        # What a row outside every segment holds must not matter, not even in a product with zero.
        q, k, v, g, beta = (jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 2)), x, 0) for x in (q, k, v, g, beta))
    tokens, state = _prepare(q, k, v, g, beta, initial_state, sequences, scale, l2norm)

    def step(state: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        valid, sequence, *token = row
        before = state if segments is None else jax.lax.dynamic_slice_in_dim(state, sequence, 1)
        after, o = _token(before, *token)
        after = jnp.where(valid, after, before)
        if segments is not None:
            after = jax.lax.dynamic_update_slice_in_dim(state, after, sequence, 0)
        return after, jnp.where(valid, o, 0)

    # Differentiation keeps one state a block, not one a token.
    blocks = math.ceil(length / _BLOCK)
    block = math.ceil(length / max(blocks, 1))
    padding = blocks * block - length

    def in_blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(blocks, block, *x.shape[1:])

    rows = jax.tree.map(in_blocks, (valid, sequence, *(jnp.moveaxis(x, 1, 0) for x in tokens)))
    if length == 0 or sequences == 0:
        o = jnp.zeros(v.shape, v.dtype)
    else:
        state, o = jax.lax.scan(jax.checkpoint(lambda state, rows: jax.lax.scan(step, state, rows)), state, rows)
        o = jnp.moveaxis(o.reshape(blocks * block, batch, value_heads, value_dim)[:length], 0, 1).astype(v.dtype)
    return o, state.reshape(sequences, value_heads, *state.shape[3:])


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    *,
    scale: float,
    l2norm: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """One or a few tokens from a state, for decoding: `recurrence`, without a loop for short dense calls.

    Arguments and results as in `recurrence`.
    """
    batch, length, value_heads, value_dim = v.shape
    if segments is not None or not 0 < length <= _UNROLL_LIMIT:
        return recurrence(q, k, v, g, beta, initial_state, segments, scale=scale, l2norm=l2norm)
    tokens, state = _prepare(q, k, v, g, beta, initial_state, batch, scale, l2norm)
    outputs = []
    for t in range(length):
        state, o = _token(state, *(x[:, t] for x in tokens))
        outputs.append(o)
    o = jnp.stack(outputs, axis=1).reshape(batch, length, value_heads, value_dim).astype(v.dtype)
    return o, state.reshape(batch, value_heads, *state.shape[3:])
