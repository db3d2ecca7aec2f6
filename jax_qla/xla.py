"""The chunked gated delta rule in plain JAX: any platform, any K and V.

Notation of one chunk of C = 64 rows, S0 the state before it and S1 after it (per value head):

    gamma_i = sum_{j<=i} g_j        G_ij = exp(gamma_i - gamma_j) for i >= j, else 0
    L  = strict_lower(diag(beta) K K^T o G)          T = (I + L)^-1
    Vd = T diag(beta) (V - diag(e^gamma) K S0) = U - Y S0
    P  = scale Q K^T o G
    O  = scale diag(e^gamma) Q S0 + P Vd
    S1 = e^gamma_C S0 + K^T diag(e^{gamma_C - gamma}) Vd

Everything but the two products with the state is parallel over chunks. So chunks are worked off in groups: in a group
all parallel parts are computed at once, then a short scan carries the state through, then the outputs follow at once.
Only the group's temporaries exist at a time. The backward keeps the states before each group and recomputes those
inside a group: (groups + chunks of a group) states of Hv * K * V * 4 bytes per sequence row, never one per chunk of
the whole sequence, and never what autodiff would save.

Arithmetic is float32. `precision` is that of the matrix products; by default HIGHEST for float32 inputs and HIGH for
bfloat16 and float16 inputs: their values and products are exact in TF32, which a GPU then uses for everything but the
inverse; a CPU computes in float32 either way. Sources: Yang et al., arXiv 2406.06484 and arXiv 2412.06464.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, MIN_LOG_DECAY
from jax_qla.policy import Cut
from jax_qla.residuals import KEPT, Between, ChunkStates, Keep, Lengths, Pieces, Residuals
from jax_qla.segments import chunk_table, first_slot, piece_count
from jax_qla.varying import match_varying

_GATE_GRID = 256.0
"""Gates are summed as multiples of 1 / 256 and a rest: 64 * 110 * 256 < 2^24, so sums of the former are exact."""

_AT_ONCE, _AT_ONCE_ON_CPU = 512, 64
"""Chunks x sequences x value heads whose temporaries (about 0.6 MB each at K = V = 128) exist at a time. On a CPU they
should stay in its caches; a GPU would take a tenth to a fifth less time with 4096, and twice the memory
(docs/performance_versions.md)."""

_DTYPES = ("bfloat16", "float16", "float32")

L2NORM_DTYPES: tuple[str, ...] = ()
"""Dtypes of q and k that the functions here would normalise themselves, with `l2norm`."""

Precision = jax.lax.PrecisionLike


def why_not(q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
    """Why this implementation cannot take these operands, in a sentence, or None where it can."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if jnp.dtype(x.dtype).name not in _DTYPES:
            instead = "; implementation='reference' takes it" if x.dtype == jnp.float64 else ""
            return f"implementation 'xla' takes {', '.join(_DTYPES)}, and {name} is {x.dtype}{instead}"
    return None


class _Marks(NamedTuple):
    """What the scan over the chunks of a packed batch must know of each chunk, [chunks]."""

    sequence: jax.Array
    """int32, the sequence the chunk belongs to."""
    first: jax.Array
    """bool, the state before the chunk is the sequence's initial state."""
    last: jax.Array
    """bool, the state after the chunk is the sequence's final state."""


class _Group(NamedTuple):
    """Where the rows of a group of chunks lie."""

    first_row: jax.Array
    """int32, of a dense batch; of a packed one in what `_Layout.put` fills."""
    marks: _Marks | None
    """Of its chunks, in a packed batch."""
    row_of: jax.Array | None
    """int32 [group, 64], the rows of its chunks in a packed batch."""
    row_exists: jax.Array | None
    """bool [group, 64], whether the chunk has so many."""


class _Layout:
    """How the rows of a dense or packed batch become groups of chunks and back.

    Rows of a group are [group, B, ..., 64, D] with heads before rows; rows that do not exist are zero. They are taken
    out of the whole batch, and put into it, where the group is computed: of the whole batch that would be copies of all
    operands and results, beside which the rest fits into a CPU's caches.
    """

    def __init__(self, batch: int, tokens: int, value_heads: int, segments: jax.Array | None) -> None:
        self.batch, self.tokens = batch, tokens
        table = None if segments is None else chunk_table(segments, tokens)
        chunks = math.ceil(tokens / CHUNK) if table is None else table.shape[0]
        # Where the program will run is not known yet. If this guess is wrong it takes longer, no more.
        at_once = _AT_ONCE_ON_CPU if jax.default_backend() == "cpu" else _AT_ONCE
        limit = min(max(at_once // (batch * value_heads), 4), 32)
        self.groups = math.ceil(chunks / limit)
        self.group = math.ceil(chunks / self.groups)
        self.rows = self.groups * self.group * CHUNK
        self.packed = segments is not None
        first_row = self.group * CHUNK * jnp.arange(self.groups, dtype=jnp.int32)
        self.each = _Group(first_row, None, None, None)
        """Of all groups, [groups, ...]."""
        if segments is None or table is None:
            return
        table = jnp.pad(table, ((0, self.groups * self.group - chunks), (0, 0)))
        sequence, first, rows, _ = table.T
        start, end = segments[sequence].T
        marks = _Marks(sequence, (rows > 0) & (first == start), (rows > 0) & (first + rows == end))
        offset = jnp.arange(CHUNK, dtype=jnp.int32)[None]
        of_chunks = (marks, jnp.minimum(first[:, None] + offset, tokens - 1), offset < rows[:, None])
        of_groups = jax.tree.map(lambda x: x.reshape(self.groups, self.group, *x.shape[1:]), of_chunks)
        self.each = _Group(first_row, *of_groups)
        # The way back: a row lies in the last sequence that starts at or before it, if that has not ended.
        row = jnp.arange(tokens, dtype=jnp.int32)
        of_row = jnp.searchsorted(segments[:, 0], row, side="right", method="sort") - 1
        start, end = segments[jnp.maximum(of_row, 0)].T
        self.row_valid = (of_row >= 0) & (row < end)
        slot = first_slot(start, of_row) + (row - start) // CHUNK
        self.place_of = jnp.where(self.row_valid, slot * CHUNK + (row - start) % CHUNK, 0)

    def whole(self, x: jax.Array) -> jax.Array:
        """[B, T, ...], with as many rows as all groups of a dense batch have."""
        if self.packed or self.tokens == self.rows:
            return x
        return jnp.pad(x, ((0, 0), (0, self.rows - self.tokens), *((0, 0),) * (x.ndim - 2)))

    def take(self, x: jax.Array, group: _Group, *heads: int) -> jax.Array:
        """The rows of a group, [group, B, *heads, 64, ...], where the product of `heads` is H, of `whole`'s x."""
        features = x.shape[3:]
        if group.row_of is None or group.row_exists is None:
            x = jax.lax.dynamic_slice_in_dim(x, group.first_row, self.group * CHUNK, axis=1)
        else:
            exists = group.row_exists.reshape(*group.row_exists.shape, *(1,) * (x.ndim - 2))
            x = jnp.where(exists, x[0][group.row_of], 0)
        x = x.reshape(self.batch, self.group, CHUNK, *heads, *features)
        return jnp.moveaxis(x, (0, 2), (1, 2 + len(heads)))

    def nothing(self, x: jax.Array, zero: jax.Array) -> jax.Array:
        """What `put` fills, for results of the shape and dtype of x [B, T, ...]; `zero` as of `_zero`."""
        return jnp.broadcast_to(zero.astype(x.dtype), (self.batch, self.rows, *x.shape[2:]))

    def put(self, filled: jax.Array, group: _Group, x: jax.Array) -> jax.Array:
        """`filled` with what a group's rows x [group, B, *heads, 64, ...] have, as `take` orders them."""
        heads, *features = filled.shape[2:]
        x = jnp.moveaxis(x.reshape(self.group, self.batch, heads, CHUNK, *features), (1, 3), (0, 2))
        x = x.reshape(self.batch, self.group * CHUNK, heads, *features).astype(filled.dtype)
        return jax.lax.dynamic_update_slice_in_dim(filled, x, group.first_row, axis=1)

    def join(self, filled: jax.Array) -> jax.Array:
        """What all groups have put there, [B, T, ...], zero outside every segment."""
        if self.packed:
            valid = self.row_valid.reshape(-1, *(1,) * (filled.ndim - 2))
            return jnp.where(valid, filled[0][self.place_of], 0)[None]
        if self.tokens < CHUNK:
            # XLA for GPUs (jax 0.11.2) fails to compile a fusion of the slice with a sum, for 2 or 3 tokens.
            filled = jax.lax.optimization_barrier(filled)
        return filled[:, : self.tokens]


class _Chunks(NamedTuple):
    """What the chunks of a group hold that does not depend on the state; leading axes [group, B, Hk]."""

    k: jax.Array
    """[..., 64, K]"""
    v: jax.Array
    """[..., r, 64, V]"""
    beta: jax.Array
    """[..., r, 64]"""
    kk: jax.Array
    """K K^T, [..., 1, 64, 64]"""
    weight: jax.Array
    """G, [..., r, 64, 64]"""
    decay: jax.Array
    """e^gamma, [..., r, 64]"""
    decay_to_end: jax.Array
    """e^(gamma_C - gamma), [..., r, 64]"""
    total: jax.Array
    """e^gamma_C, [..., r, 1, 1]"""
    inverse: jax.Array
    """T, [..., r, 64, 64]"""
    u: jax.Array
    """U = T diag(beta) V, [..., r, 64, V]"""
    y: jax.Array
    """Y = T diag(beta e^gamma) K, [..., r, 64, K]"""


def _gates(g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """G [..., 64, 64], e^gamma and e^(gamma_C - gamma) [..., 64] of the chunk's gates g [..., 64].

    Differences of a plain float32 running sum lose what its largest gates round away: after gates of -70 they are wrong
    by 2e-4. So each gate is cut into a multiple of 1/256, whose sums and differences are exact, and a rest below 1/512,
    whose sums stay small; the difference of both together is right to the last bits.
    """
    g = jnp.maximum(g, MIN_LOG_DECAY)
    coarse = jnp.round(g * _GATE_GRID) / _GATE_GRID
    gamma = _sums(jnp.stack([coarse, g - coarse]), _lower(0).T)
    pairs = (gamma[0, ..., :, None] - gamma[0, ..., None, :]) + (gamma[1, ..., :, None] - gamma[1, ..., None, :])
    to_end = (gamma[0, ..., -1:] - gamma[0]) + (gamma[1, ..., -1:] - gamma[1])
    # Above the diagonal pairs are positive and may overflow: masked before the exponential.
    pairs = jnp.where(_lower(0), pairs, -jnp.inf)
    return jnp.exp(pairs), jnp.exp(gamma[0] + gamma[1]), jnp.exp(to_end)


def _lower(diagonal: int) -> jax.Array:
    """bool [64, 64], on and below this diagonal. Not NumPy's: what the compiler partitions may hold no constants."""
    return jnp.tri(CHUNK, k=diagonal, dtype=bool)


def _sums(x: jax.Array, which: jax.Array) -> jax.Array:
    """sum_j x_j which_jt of x [..., 64], for every t: cumulative sums, as exact as `jnp.cumsum`'s, for each of which
    XLA for CPUs compiles six kernels, and for a product one."""
    return _product("...j,jt->...t", x, which.astype(jnp.float32), jax.lax.Precision.HIGHEST)


def _strictly_lower(x: jax.Array) -> jax.Array:
    return jnp.where(_lower(-1), x, 0)


def _product(subscripts: str, x: jax.Array, y: jax.Array, precision: Precision) -> jax.Array:
    """An einsum over float32 matrices; letters: r value head of a key head, i j rows, k v dimensions."""
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=jnp.float32)


def _of_each(x: jax.Array, y: jax.Array) -> jax.Array:
    """x [..., h, i, k] as [..., h, r, i, k] for the value heads of y [..., h, r, :, :]: a product that a key head has
    with all of its value heads at once would be of transposed copies of these, and give one to be transposed."""
    return jnp.broadcast_to(x[..., None, :, :], (*y.shape[:-2], *x.shape[-2:]))


def _product_of_blocks(x: jax.Array, y: jax.Array) -> jax.Array:
    """Of matrices [..., h, r, n, :, :]. These three axes become one: on some CPUs the XLA of JAX 0.10.0 cannot run
    products of 8 to 32 rows with more than four such axes, and two are before these, or three under `jax.vmap`."""
    left, right = (a.reshape(*a.shape[:-5], math.prod(a.shape[-5:-2]), *a.shape[-2:]) for a in (x, y))
    found = _product("...ij,...jk->...ik", left, right, jax.lax.Precision.HIGHEST)
    return found.reshape(*x.shape[:-1], y.shape[-1])


def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of strictly lower triangular matrices [..., h, r, 64, 64], always in float32.

    Diagonal blocks are doubled from one row to all: with the halves A and D of a block inverted,
    [[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]. Not by `jax.lax.linalg.triangular_solve`: on a CPU that is
    a LAPACK call which waits for its own thread pool, and two devices of one process wait for ever (jax 0.10.2).
    """
    rows = 1
    inverse = jnp.ones_like(lower[..., :1])[..., None]
    while rows < CHUNK:
        blocks = lower.reshape(*lower.shape[:-2], CHUNK // (2 * rows), 2 * rows, CHUNK // (2 * rows), 2 * rows)
        corner = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., rows:, :rows]
        upper, below = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product_of_blocks(_product_of_blocks(below, corner), upper)
        first = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([first, jnp.concatenate([corner, below], axis=-1)], axis=-2)
        rows *= 2
    return inverse[..., 0, :, :]


def _chunks(layout: _Layout, rows: Sequence[jax.Array], at: _Group, precision: Precision) -> _Chunks:
    """The state-free part of a group of chunks, of `layout.whole`'s k, v, g and beta."""
    k, v, g, beta = rows
    heads = (k.shape[2], v.shape[2] // k.shape[2])
    v, g, beta = (layout.take(x, at, *heads) for x in (v, g, beta))
    k, v = layout.take(k, at, heads[0]).astype(jnp.float32), v.astype(jnp.float32)
    weight, decay, decay_to_end = _gates(g)
    kk = _product("...ik,...jk->...ij", k, k, precision)[..., None, :, :]
    lower = _strictly_lower(weight * kk) * beta[..., None]
    # The gated matrix is inverted, since the gate-free inverse can overflow.
    inverse = _unit_lower_inverse(lower)
    scaled = inverse * beta[..., None, :]
    u = _product("...ij,...jv->...iv", scaled, v, precision)
    y = _product("...rij,...jk->...rik", scaled * decay[..., None, :], k, precision)
    total = decay[..., -1, None, None]
    return _Chunks(k, v, beta, kk, weight, decay, decay_to_end, total, inverse, u, y)


class _States(NamedTuple):
    """What the forward scan over a group's chunks yields; leading axes [group, B, Hk, r]."""

    before: jax.Array
    """S0, [..., K, V]"""
    after: jax.Array | None
    """S1, [..., K, V]; packed only"""
    delta: jax.Array
    """Vd, [..., 64, V]"""


def _scan_states(
    chunks: _Chunks, state: jax.Array, first_states: jax.Array, marks: _Marks | None, precision: Precision
) -> tuple[jax.Array, _States]:
    """Carries the state [B, Hk, r, K, V] through a group; a sequence's first chunk starts from `first_states`."""

    def step(state: jax.Array, x: tuple[_Chunks, _Marks | None]) -> tuple[jax.Array, _States]:
        chunk, mark = x
        if mark is not None:
            state = jnp.where(mark.first, first_states[mark.sequence], state)
        delta = chunk.u - _product("...ik,...kv->...iv", chunk.y, state, precision)
        weighted = chunk.decay_to_end[..., None] * delta
        after = chunk.total * state + _product("...ik,...iv->...kv", _of_each(chunk.k, weighted), weighted, precision)
        return after, _States(state, None if mark is None else after, delta)

    return jax.lax.scan(step, state, (chunks, marks))


def _scan_dstates(
    q: jax.Array,
    chunks: _Chunks,
    do: jax.Array,
    dstate: jax.Array,
    last_dstates: jax.Array,
    marks: _Marks | None,
    scale: float,
    precision: Precision,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
    """Carries the state's gradient [B, Hk, r, K, V] back through a group; a sequence's last chunk starts anew.

    q, do: rows in float32; last_dstates: gradients of the final states. Yields dVd, dS1 and, packed only, dS0, each of
    every chunk.
    """
    qk = _product("...ik,...jk->...ij", q, chunks.k, precision)[..., None, :, :]
    scaled = scale * do
    ddelta = _product("...ij,...iv->...jv", qk * chunks.weight, scaled, precision)
    decayed = chunks.decay[..., None] * scaled
    dstate_rows = _product("...ik,...iv->...kv", _of_each(q, decayed), decayed, precision)

    def step(dstate: jax.Array, x: tuple[Any, ...]) -> tuple[jax.Array, Any]:
        chunk, ddelta, dstate_rows, mark = x
        if mark is not None:
            dstate = jnp.where(mark.last, last_dstates[mark.sequence], dstate)
        from_state = _product("...ik,...kv->...iv", _of_each(chunk.k, dstate), dstate, precision)
        ddelta += chunk.decay_to_end[..., None] * from_state
        before = chunk.total * dstate + dstate_rows
        before -= _product("...ik,...iv->...kv", chunk.y, ddelta, precision)
        return before, (ddelta, dstate, None if mark is None else before)

    return jax.lax.scan(step, dstate, (chunks, ddelta, dstate_rows, marks), reverse=True)


def _store(states: jax.Array, sequence: jax.Array, which: jax.Array, values: jax.Array) -> jax.Array:
    """`states` [N, ...] with those of `values` [chunks, 1, ...] put at `sequence` where `which`."""
    nowhere = states.shape[0]
    return states.at[jnp.where(which, sequence, nowhere)].set(values[:, 0], mode="drop")


def _zero(*operands: jax.Array | None) -> jax.Array:
    """A float32 zero that varies over the same manual mesh axes as the operands together, as a scan's carry must from
    its start on."""
    return match_varying(jnp.zeros((), jnp.float32), operands)


def _first_states(initial_state: jax.Array | None, shape: tuple[int, ...], zero: jax.Array) -> jax.Array:
    """The initial states, zero if None, as `shape` = [N, Hk, r, K, V], varying as `zero` does."""
    if initial_state is None:
        return jnp.broadcast_to(zero, shape)
    return match_varying(initial_state.reshape(shape), zero)


def _precision(precision: Precision, v: jax.Array) -> Precision:
    if precision is not None:
        return precision
    return jax.lax.Precision.HIGHEST if v.dtype == jnp.float32 else jax.lax.Precision.HIGH


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None = None,
    pieces: Pieces | None = None,
    *,
    scale: float,
    output_final_state: bool,
    with_residuals: bool,
    cut: Cut | None = None,
    piece_rows: int | None = None,
    precision: Precision = None,
    asked_rows: int | None = None,
    keep: Keep = "nothing",
    with_lengths: bool = False,
) -> tuple[jax.Array, jax.Array | None, Residuals | None]:
    """The chunked forward pass, of at least one token and one sequence.

    Args:
        q, k: [B, T, Hk, K]. v: [B, T, Hv, V], Hv a multiple of Hk; bfloat16, float16 or float32.
        g (log decay), beta: [B, T, Hv] float32.
        initial_state: [N, Hv, K, V] float32, or None for zeros; N = B when dense.
        segments: None (dense), or int32 [N, 2], start and end row of each sequence, sorted and disjoint; B = 1.
        residuals, pieces: not read: nothing is kept from `summary`. cut: how "cuda" cuts the sequences, if it has.
        scale: factor of q.
        output_final_state, with_residuals: whether to return these (else None).
        piece_rows: how "cuda" cuts the sequences, if it keeps what it finds of the pieces.
        precision: of the matrix products; None chooses as the module says.
        asked_rows: not read: nothing is cut.
        keep: what "cuda" keeps of vd and h.
        with_lengths: whether it keeps lengths of q and k.

    Returns:
        o [B, T, Hv, V] in v's dtype, zero outside every segment; final_state [N, Hv, K, V] float32; residuals of the
        structure that all implementations share, filled with zeros: this backward recomputes what it needs.
    """
    del residuals, pieces, asked_rows
    batch, tokens, key_heads, k_dim = q.shape
    value_heads, v_dim = v.shape[2:]
    heads = (key_heads, value_heads // key_heads)
    parts = sequences = batch if segments is None else segments.shape[0]
    if piece_rows is not None:
        parts = piece_count(batch * tokens, sequences, piece_rows, packed=segments is not None)
    elif cut is not None:
        parts = sequences * (cut.pieces + 2)
    kept = Residuals.shapes(v, precision)
    kept_states = ChunkStates.shapes(parts, v, k_dim, precision)
    precision = _precision(precision, v)
    state_shape = (sequences, *heads, k_dim, v_dim)
    zero = _zero(q, k, v, g, beta, initial_state)
    first_states = _first_states(initial_state, state_shape, zero)

    layout = _Layout(batch, tokens, value_heads, segments)
    whole_q, *rows = map(layout.whole, (q, k, v, g, beta))

    def group(carry: tuple[jax.Array, Any, jax.Array], at: _Group) -> tuple[Any, None]:
        state, final, o = carry
        chunks = _chunks(layout, rows, at, precision)
        state, states = _scan_states(chunks, state, first_states, at.marks, precision)
        if final is not None and at.marks is not None and states.after is not None:
            final = _store(final, at.marks.sequence, at.marks.last, states.after)
        q = layout.take(whole_q, at, key_heads).astype(jnp.float32)
        qk = _product("...ik,...jk->...ij", q, chunks.k, precision)[..., None, :, :]
        of_group = _product("...ij,...jv->...iv", qk * chunks.weight, states.delta, precision)
        from_state = _product("...ik,...kv->...iv", _of_each(q, states.before), states.before, precision)
        of_group += chunks.decay[..., None] * from_state
        return (state, final, layout.put(o, at, scale * of_group)), None

    packed = segments is not None
    # What a packed scan starts from is never used: every sequence's first chunk starts anew.
    final = first_states if packed and output_final_state else None
    state = first_states[:1] if packed else first_states
    (state, final, o), _ = jax.lax.scan(group, (state, final, layout.nothing(v, zero)), layout.each)
    final = final if packed else state
    o = layout.join(o)

    empty = None
    if with_residuals:
        empty = _empty_residuals(kept, zero, q if with_lengths else None)
        if piece_rows is not None:
            of_pieces = _filled(Between.shapes(parts - sequences, value_heads, k_dim, v_dim), zero)
            empty = empty._replace(between=Between(**of_pieces))
        of_states = _filled({name: kept_states[name] for name in KEPT[keep]}, zero)
        empty = empty._replace(vd=of_states.get("vd"), h=of_states.get("h"))
    if not output_final_state or final is None:
        return o, None, empty
    return o, final.reshape(sequences, value_heads, k_dim, v_dim), empty


def _filled(shapes: Mapping[str, jax.ShapeDtypeStruct], zero: jax.Array) -> dict[str, jax.Array]:
    return {name: jnp.broadcast_to(zero.astype(x.dtype), x.shape) for name, x in shapes.items()}


def _empty_residuals(
    shapes: Mapping[str, jax.ShapeDtypeStruct], zero: jax.Array, measured: jax.Array | None
) -> Residuals:
    """With lengths if those of the rows `measured` would be kept."""
    of_rows = _filled(shapes, zero)
    lengths = None if measured is None else Lengths(**_filled(Lengths.shapes(measured), zero))
    return Residuals(of_rows["a"], of_rows["gamma"], lengths=lengths)


def _gradients(
    q: jax.Array,
    chunks: _Chunks,
    states: _States,
    do: jax.Array,
    ddelta: jax.Array,
    dstate: jax.Array,
    scale: float,
    precision: Precision,
) -> tuple[jax.Array, ...]:
    """Gradients dq, dk, dv, dg, dbeta of a group's rows once the states and their gradients are known.

    q, do: rows in float32; ddelta: dVd [..., r, 64, V]; dstate: dS1, of the state after each chunk, [..., r, K, V].
    """
    product = functools.partial(_product, precision=precision)
    k, v, beta, kk, weight, decay, decay_to_end, total = chunks[:8]
    decay, decay_to_end, column = decay[..., None], decay_to_end[..., None], beta[..., None]
    q_row, k_row = q[..., None, :, :], k[..., None, :, :]
    qk = product("...ik,...jk->...ij", q, k)[..., None, :, :]

    dx = product("...ji,...jv->...iv", chunks.inverse, ddelta)
    # dP o G and dL o G, the gradients of Q K^T and of diag(beta) K K^T.
    dqk = scale * weight * product("...iv,...jv->...ij", do, states.delta)
    dlower = -_strictly_lower(weight * product("...iv,...jv->...ij", dx, states.delta))
    # Products with the states; each is also what its gate's gradient needs.
    dq_state = scale * decay * product("...iv,...kv->...ik", do, states.before)
    dk_state = decay * product("...iv,...kv->...ik", dx, states.before)
    dk_next = decay_to_end * product("...iv,...kv->...ik", states.delta, dstate)

    dqk_heads = jnp.sum(dqk, axis=-3)
    dkk = column * dlower
    dkk_heads = jnp.sum(dkk, axis=-3)
    dq = jnp.sum(dq_state, axis=-3) + product("...ij,...jk->...ik", dqk_heads, k)
    dk = jnp.sum(dk_next - column * dk_state, axis=-3) + product("...ji,...jk->...ik", dqk_heads, q)
    dk += product("...ij,...jk->...ik", dkk_heads + jnp.swapaxes(dkk_heads, -1, -2), k)
    dv = column * dx
    dbeta = jnp.sum(dx * v, axis=-1) - jnp.sum(k_row * dk_state, axis=-1) + jnp.sum(dlower * kk, axis=-1)

    # Every gate's gradient is a sum of the terms whose exponent holds it, never a difference of larger sums:
    # e^gamma_i holds the gates up to i, e^(gamma_C - gamma_i) those after i, G_ij those after j up to i.
    up_to = jnp.sum(q_row * dq_state, axis=-1) - beta * jnp.sum(k_row * dk_state, axis=-1)
    after = _sums(jnp.sum(k_row * dk_next, axis=-1), _lower(-1).T)
    whole = jnp.sum(total * dstate * states.before, axis=(-2, -1))[..., None]
    columns_before = _lower(-1).T.astype(jnp.float32)
    pairs = product("...ij,jt->...it", dqk * qk + dkk * kk, columns_before)
    dg = jnp.sum(jnp.where(_lower(0), pairs + up_to[..., None], 0), axis=-2) + after + whole
    return dq, dk, dv, dg, dbeta


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    pieces: Pieces | None = None,
    adjoint_response: jax.Array | None = None,
    *,
    scale: float,
    cut: Cut | None = None,
    piece_rows: int | None = None,
    precision: Precision = None,
    asked_rows: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of `forward` from those of o and final_state (None = zero; not both).

    The states before each group are recomputed first, forwards; then the groups are walked in reverse, each recomputing
    its own states, carrying the state's gradient back, and finishing all gradients of its rows.

    Args:
        residuals, pieces, adjoint_response, cut, piece_rows, asked_rows: not read, see `forward`.
        do: [B, T, Hv, V]. d_final_state: [N, Hv, K, V] float32. All others as in `forward`.

    Returns:
        dq, dk in q's dtype, dv in v's, dg, dbeta float32, and d_initial_state float32 (None without initial_state).
        Rows outside every segment have zero gradients.
    """
    del residuals, pieces, adjoint_response, cut, piece_rows, asked_rows
    if v.shape[3] == 1:
        # XLA for CPUs (jax 0.10.2) reads memory that nobody has written for dg where V is 1: so there is a column more.
        given = (v, initial_state, do, d_final_state)
        wide: Any = [None if x is None else jnp.pad(x, (*((0, 0),) * 3, (0, 1))) for x in given]
        operands: Any = (q, k, wide[0], g, beta, wide[1], segments, None, *wide[2:])
        dq, dk, dv, dg, dbeta, d_state = backward(*operands, scale=scale, precision=precision)
        return dq, dk, dv[..., :1], dg, dbeta, None if d_state is None else d_state[..., :1]
    precision = _precision(precision, v)
    batch, tokens, key_heads, k_dim = q.shape
    value_heads, v_dim = v.shape[2:]
    heads = (key_heads, value_heads // key_heads)
    sequences = batch if segments is None else segments.shape[0]
    state_shape = (sequences, *heads, k_dim, v_dim)
    zero = _zero(q, k, v, g, beta, initial_state, do, d_final_state)
    first_states = _first_states(initial_state, state_shape, zero)
    last_dstates = _first_states(d_final_state, state_shape, zero)

    layout = _Layout(batch, tokens, value_heads, segments)
    packed = segments is not None
    do = jnp.zeros_like(v) if do is None else do
    operands = (q, k, v, g, beta)
    whole_q, *rows, whole_do = map(layout.whole, (*operands, do))

    def group_states(state: jax.Array, at: _Group) -> tuple[jax.Array, jax.Array]:
        chunks = _chunks(layout, rows, at, precision)
        return _scan_states(chunks, state, first_states, at.marks, precision)[0], state

    state = first_states[:1] if packed else first_states
    group_starts = state[None]
    if layout.groups > 1:  # `jax.disable_jit` has no scan over nothing
        leading = jax.tree.map(lambda x: x[:-1], layout.each)
        last_start, group_starts = jax.lax.scan(group_states, state, leading)
        group_starts = jnp.concatenate([group_starts, last_start[None]])

    def group(carry: tuple[jax.Array, Any, Any], x: tuple[jax.Array, _Group]) -> tuple[Any, None]:
        dstate, d_initial, filled = carry
        start, at = x
        chunks = _chunks(layout, rows, at, precision)
        _, states = _scan_states(chunks, start, first_states, at.marks, precision)
        q, do = layout.take(whole_q, at, key_heads), layout.take(whole_do, at, *heads)
        q, do = q.astype(jnp.float32), do.astype(jnp.float32)
        dstate, (ddelta, dstates, before) = _scan_dstates(
            q, chunks, do, dstate, last_dstates, at.marks, scale, precision
        )
        if d_initial is not None and at.marks is not None and before is not None:
            d_initial = _store(d_initial, at.marks.sequence, at.marks.first, before)
        gradients = _gradients(q, chunks, states, do, ddelta, dstates, scale, precision)
        filled = [layout.put(x, at, y) for x, y in zip(filled, gradients, strict=True)]
        return (dstate, d_initial, filled), None

    dstate = last_dstates[:1] if packed else last_dstates
    d_initial = last_dstates if packed and initial_state is not None else None
    nothing = [layout.nothing(x, zero) for x in operands]
    (dstate, d_initial, filled), _ = jax.lax.scan(
        group, (dstate, d_initial, nothing), (group_starts, layout.each), reverse=True
    )
    d_initial = d_initial if packed else dstate
    dq, dk, dv, dg, dbeta = map(layout.join, filled)

    if initial_state is None or d_initial is None:
        return dq, dk, dv, dg, dbeta, None
    return dq, dk, dv, dg, dbeta, d_initial.reshape(initial_state.shape)


def summary(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None = None,
    *,
    cut: Cut,
    with_residuals: bool,
    precision: Precision = None,
    with_lengths: bool = False,
) -> tuple[jax.Array, jax.Array, Residuals | None, Pieces | None]:
    """What the rows of each sequence do to the state: S -> transition S + response.

    The columns of the state evolve alike and apart, so the identity is carried beside the initial state, as K more
    columns whose values are zero: `forward` without its outputs.

    Args:
        residuals: not read. cut: how "cuda" cuts the sequences.
        with_residuals: whether to return what "cuda" keeps.
        All others: as in `forward`; of q the shape alone.

    Returns:
        transition [N, Hv, K, K] and response [N, Hv, K, V], float32. The response is the final state that follows from
        the initial state; a sequence without rows has the identity and its initial state. Then, of a dense batch,
        residuals and pieces of the structure that all implementations share, filled with zeros.
    """
    del residuals
    kept = Residuals.shapes(v, precision)
    precision = _precision(precision, v)
    batch, tokens, key_heads, k_dim = k.shape
    value_heads, v_dim = v.shape[2:]
    heads = (key_heads, value_heads // key_heads)
    sequences = batch if segments is None else segments.shape[0]
    zero = _zero(k, v, g, beta, initial_state)
    initial = _first_states(initial_state, (sequences, *heads, k_dim, v_dim), zero)
    identity = jnp.broadcast_to(jnp.eye(k_dim, dtype=jnp.float32) + zero, (*initial.shape[:-1], k_dim))
    first_states = jnp.concatenate([initial, identity], axis=-1)
    layout = _Layout(batch, tokens, value_heads, segments)
    packed = segments is not None
    rows = [layout.whole(x) for x in (k, v, g, beta)]

    def group(carry: tuple[jax.Array, Any], at: _Group) -> tuple[Any, None]:
        state, final = carry
        chunks = _chunks(layout, rows, at, precision)
        u = jnp.concatenate([chunks.u, jnp.zeros((*chunks.u.shape[:-1], k_dim), jnp.float32)], axis=-1)
        state, states = _scan_states(chunks._replace(u=u), state, first_states, at.marks, precision)
        if final is not None and at.marks is not None and states.after is not None:
            final = _store(final, at.marks.sequence, at.marks.last, states.after)
        return (state, final), None

    carry = (first_states[:1], first_states) if packed else (first_states, None)
    (state, final), _ = jax.lax.scan(group, carry, layout.each)
    both = (state if final is None else final).reshape(sequences, value_heads, k_dim, v_dim + k_dim)
    transition, response = both[..., v_dim:], both[..., :v_dim]
    if packed or not with_residuals:
        return transition, response, None, None
    pieces = Pieces(**_filled(Pieces.shapes(sequences, cut.pieces, value_heads, k_dim, v_dim), zero))
    return transition, response, _empty_residuals(kept, zero, q if with_lengths else None), pieces


def state_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    pieces: Pieces | None = None,
    *,
    cut: Cut | None = None,
    scale: float,
    precision: Precision = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of the initial states alone, float32 [N, Hv, K, V]: `backward` without all others.

    Args:
        initial_state, residuals, cut: not read; the gradient of a state does not depend on the state.
        pieces: for the structure of the second result, zeros of the shape of their response, or None.
        All others: as in `backward`.
    """
    del initial_state, residuals, cut
    precision = _precision(precision, v)
    batch, tokens, key_heads, k_dim = q.shape
    value_heads, v_dim = v.shape[2:]
    heads = (key_heads, value_heads // key_heads)
    sequences = batch if segments is None else segments.shape[0]
    zero = _zero(q, k, v, g, beta, do, d_final_state)
    last_dstates = _first_states(d_final_state, (sequences, *heads, k_dim, v_dim), zero)
    do = jnp.zeros_like(v) if do is None else do
    layout = _Layout(batch, tokens, value_heads, segments)
    packed = segments is not None
    whole_q, *rows, whole_do = map(layout.whole, (q, k, v, g, beta, do))

    def group(carry: tuple[jax.Array, Any], at: _Group) -> tuple[Any, None]:
        dstate, d_initial = carry
        chunks = _chunks(layout, rows, at, precision)
        q, do = layout.take(whole_q, at, key_heads), layout.take(whole_do, at, *heads)
        q, do = q.astype(jnp.float32), do.astype(jnp.float32)
        dstate, (_, _, before) = _scan_dstates(q, chunks, do, dstate, last_dstates, at.marks, scale, precision)
        if d_initial is not None and at.marks is not None and before is not None:
            d_initial = _store(d_initial, at.marks.sequence, at.marks.first, before)
        return (dstate, d_initial), None

    carry = (last_dstates[:1], last_dstates) if packed else (last_dstates, None)
    (dstate, d_initial), _ = jax.lax.scan(group, carry, layout.each, reverse=True)
    d_initial = dstate if d_initial is None else d_initial
    of_pieces = None if pieces is None else jnp.broadcast_to(zero, pieces.response.shape)
    return d_initial.reshape(sequences, value_heads, k_dim, v_dim), of_pieces


def chunk_states(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    segments: None,
    residuals: Residuals,
    pieces: Pieces,
    *,
    cut: Cut,
    precision: Precision = None,
) -> ChunkStates:
    """For the structure that all implementations share, zeros: `backward` does not read it."""
    del segments, residuals, cut
    zero = _zero(q, k, v, g, beta, initial_state)
    shapes = ChunkStates.shapes(pieces.forgotten.shape[0], v, k.shape[3], precision)
    return ChunkStates(**_filled(shapes, zero))
