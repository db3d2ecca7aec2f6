"""Building blocks of the kernels' plain-JAX specifications: tokens to chunk slots and back, and a scan over slots.

A specification has its kernel's inputs and outputs and its formulas, and none of its tiling. It computes in the promoted
dtype of its inputs and float32, so that a test may run it in float64.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla import l2norm as l2norm_module
from jax_qla import segments as tables
from jax_qla.kernels.common import (
    CHUNK,
    FIRST,
    FORGOTTEN,
    LAST,
    STRETCHES,
    cut_behind,
    map_block,
    map_blocks_shape,
    state_tile_rows,
)


def gather_chunks(x: jax.Array, chunks: jax.Array) -> jax.Array:
    """[tokens, ...] -> [slots, 64, ...], zero where a slot has no row, in at least float32."""
    beyond = jnp.pad(x, ((0, CHUNK), *((0, 0),) * (x.ndim - 1)))
    rows = jax.vmap(lambda first: jax.lax.dynamic_slice_in_dim(beyond, first, CHUNK))(chunks[:, 1])
    valid = (jnp.arange(CHUNK) < chunks[:, 2, None]).reshape(-1, CHUNK, *(1,) * (x.ndim - 1))
    return jnp.where(valid, rows, 0).astype(jnp.promote_types(x.dtype, jnp.float32))


def scatter_chunks(x: jax.Array, chunks: jax.Array, tokens: int, dtype: Any) -> jax.Array:
    """[slots, 64, ...] -> [tokens, ...], zero in rows of no sequence."""
    row = jnp.arange(CHUNK)
    index = jnp.where(row < chunks[:, 2, None], chunks[:, 1, None] + row, tokens)
    return jnp.zeros((tokens, *x.shape[2:]), dtype).at[index].set(x.astype(dtype), mode="drop")


def inverse_length(x: jax.Array, l2norm: int) -> jax.Array:
    """r = 1 / |x| of the last axis if `l2norm`, else 1.

    With `l2norm` the kernels compute with normalised keys and queries, but multiply by those they are given: beta r_k^2,
    V / r_k and scale r_q stand where their formulas have beta, V and scale. The states are those of normalised keys, while
    Vd is r_k times theirs, and dX 1 / r_k times.
    """
    if not l2norm:
        return jnp.ones(x.shape[:-1], x.dtype)
    return l2norm_module.inverse_length(x)


def gather_lengths(lengths: jax.Array, chunks: jax.Array, ratio: int) -> jax.Array:
    """1 / |k| or 1 / |q| [slots, 64, Hk ratio], from what `prepare` has written, [tokens, Hk]; 1 where there is no row."""
    found = jnp.repeat(gather_chunks(lengths, chunks), ratio, axis=2)
    return jnp.where(found > 0, found, 1)


def gather_parts(x: jax.Array, chunks: jax.Array, columns: int) -> jax.Array:
    """`gather_chunks` of what may be a high and a low part side by side, [tokens, heads, 2 columns]: their sum."""
    found = gather_chunks(x, chunks)
    return jnp.sum(found.reshape(*found.shape[:-1], -1, columns), axis=-2)


def pack_inverses(inverse: jax.Array, chunks: jax.Array, tokens: int, dtype: Any) -> jax.Array:
    """Lower triangular inverses of all slots [slots, 64, Hv, 64], or their high and low parts side by side [slots, 64, Hv, 128], as kernels/prepare.py
    writes them (kernels/inverse.py): the bits of `dtype`, [Hv, tokens, 64] or [Hv, tokens, 128]; zero where it writes nothing."""
    slots, _, heads, columns = inverse.shape
    parts = columns // CHUNK
    blocks = inverse.reshape(slots, _BLOCKS, CHUNK // _BLOCKS, heads, parts, _BLOCKS, CHUNK // _BLOCKS)
    blocks = blocks.transpose(0, 4, 1, 5, 3, 2, 6).reshape(slots, parts, _BLOCKS**2, heads, CHUNK)
    blocks = blocks[:, :, _below()]  # [slots, parts, 36, heads, 64]
    place, there = _places(chunks, parts)
    place = jnp.where(there, place, tokens * parts)
    found = jnp.zeros((tokens * parts, heads, CHUNK), dtype).at[place].set(blocks.astype(dtype), mode="drop")
    found = found.swapaxes(0, 1).reshape(heads, tokens, columns)
    return jax.lax.bitcast_convert_type(found, f"int{8 * jnp.dtype(dtype).itemsize}")


def unpack_inverses(a: jax.Array, chunks: jax.Array, dtype: Any) -> jax.Array:
    """`pack_inverses` undone, [slots, 64, Hv, 64], in at least float32; of two parts their sum."""
    heads, _, columns = a.shape
    x = jax.lax.bitcast_convert_type(a, dtype).reshape(heads, -1, CHUNK).swapaxes(0, 1)
    place, there = _places(chunks, columns // CHUNK)
    found = jnp.where(there[..., None, None], x[jnp.minimum(place, x.shape[0] - 1)], 0)
    found = jnp.sum(found.astype(jnp.promote_types(dtype, jnp.float32)), axis=1)  # [slots, 36, heads, 64]
    blocks = jnp.zeros((found.shape[0], _BLOCKS**2, *found.shape[2:]), found.dtype).at[:, _below()].set(found)
    blocks = blocks.reshape(-1, _BLOCKS, _BLOCKS, heads, CHUNK // _BLOCKS, CHUNK // _BLOCKS)
    inverse = blocks.transpose(0, 1, 4, 3, 2, 5).reshape(-1, CHUNK, heads, CHUNK)
    row = jnp.arange(CHUNK)
    return jnp.where((row < chunks[:, 2, None])[..., None, None], inverse, 0)


_BLOCKS = 8
"""Rows, and columns, of blocks of an inverse."""


def _below() -> np.ndarray:
    """Numbers of the blocks on and below the diagonal among all."""
    return np.flatnonzero(np.tril(np.ones((_BLOCKS, _BLOCKS), bool)))


def _places(chunks: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Where every block of every part of a slot's inverse is among all, [slots, parts, 36], one or two being a row of `a`; and whether it is there."""
    start, rows = (chunks[:, column, None, None] for column in (1, 2))
    number = jnp.arange(_below().size)
    in_use = (rows + _BLOCKS - 1) // _BLOCKS  # rows of blocks
    return start * parts + jnp.arange(parts)[:, None] * rows + number, number < in_use * (in_use + 1) // 2


def of_heads(x: jax.Array, first: int, count: int) -> jax.Array:
    """[rows, heads, ...], so many of its heads from the first on."""
    return x[:, first : first + count]


def among_heads(x: jax.Array, first: int, heads: int) -> jax.Array:
    """`of_heads` undone, to so many heads; not a number in others."""
    return jnp.full((x.shape[0], heads, *x.shape[2:]), jnp.nan, x.dtype).at[:, first : first + x.shape[1]].set(x)


def states_given(
    state: jax.Array,
    between: jax.Array,
    pieces: jax.Array,
    spans: jax.Array | None = None,
    firsts: int = -1,
    *,
    reverse: bool = False,
) -> jax.Array:
    """Of every segment the state that a kernel begins with, [segments, heads, K, V]: `state` where these are sequences; where they are `pieces` [P, 4] of
    such, `between` [cuts, ...], but `state`, of their sequence, of those that are their sequence's first or, in `reverse`, last. Of sequences that are cut,
    `spans` [N, 2] being those of all, that is in `between` too where `firsts` is a row of it and not -1, from there on."""
    if not pieces.shape[0]:
        return state
    piece, sequence, position = jnp.arange(pieces.shape[0]), pieces[:, 2], pieces[:, 3]
    ends = position >= LAST if reverse else position % LAST == FIRST
    crossed = jnp.where(ends, 0, cut_behind(piece, sequence) - (not reverse))
    of_sequence = state[sequence] if state.shape[0] else jnp.zeros((1,), between.dtype)
    found = jnp.where(ends[:, None, None, None], of_sequence, between[crossed])
    if spans is None or firsts < 0:
        return found
    chain = sequence if spans.shape[0] <= firsts else cut_behind(spans[sequence, 0], sequence)
    cut = position == (LAST if reverse else FIRST)
    return jnp.where(cut[:, None, None, None], between[firsts + chain], found)


def states_kept(
    state: jax.Array, cuts: int, pieces: jax.Array, spans: jax.Array, firsts: int = -1
) -> tuple[jax.Array, jax.Array]:
    """`states_given` in `reverse` undone, of the `state` of every segment [segments, heads, K, V]: those of sequences, [N, ...], and those between, [cuts,
    ...], not a number in what none is of."""
    if not pieces.shape[0]:
        return state, jnp.full((cuts, *state.shape[1:]), jnp.nan, state.dtype)
    piece, sequence, position = jnp.arange(pieces.shape[0]), pieces[:, 2], pieces[:, 3]
    first = spans[sequence, 0]
    used = (piece >= first) & (piece < first + spans[sequence, 1])
    row = jnp.where(position < LAST, cut_behind(piece, sequence), cuts)
    if firsts >= 0:
        chain = sequence if spans.shape[0] <= firsts else cut_behind(first, sequence)
        row = jnp.where(position == LAST, firsts + chain, row)
    of_sequence, between = (jnp.full((n, *state.shape[1:]), jnp.nan, state.dtype) for n in (spans.shape[0], cuts))
    given = jnp.where(used & (row == cuts), sequence, spans.shape[0])
    return of_sequence.at[given].set(state, mode="drop"), between.at[row].set(state, mode="drop")


def part_columns(x: jax.Array) -> jax.Array:
    """[..., columns] -> [..., 2 columns]: bf16's part of each, and what that leaves."""
    return jnp.concatenate(_parts(x), axis=-1)


def part_tiles(x: jax.Array) -> jax.Array:
    """[..., tiles, V, 64] -> [..., 2 tiles, V, 64], likewise."""
    return jnp.concatenate(_parts(x), axis=-3)


def of_part_tiles(x: jax.Array, key_dim: int) -> jax.Array:
    """[..., tiles, V, rows of a tile], those of one part or the high and low ones, perhaps with more behind them -> [..., those of one part, V, rows]: their
    sum, in at least float32."""
    of_part = key_dim // state_tile_rows(key_dim)
    parts = 2 if x.shape[-3] >= 2 * of_part else 1
    found = x[..., : parts * of_part, :, :].astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(found.reshape(*x.shape[:-3], parts, of_part, *x.shape[-2:]), axis=-4)


def rows_as_tiles(x: jax.Array, key_dim: int) -> jax.Array:
    """Rows of chunks [slots, 64, heads, V] as tiles of the size of those of states, [slots, heads, 64 / rows of a tile, V, rows]: one where K is a multiple
    of 64."""
    return state_tiles(jnp.swapaxes(x, 1, 2), state_tile_rows(key_dim))


def tiles_as_rows(x: jax.Array) -> jax.Array:
    """`rows_as_tiles` undone."""
    return jnp.swapaxes(states_of_tiles(x), 1, 2)


def decay(gamma: jax.Array, strict: bool = False) -> jax.Array:
    """G [slots, 64, 64, Hv]: exp(gamma_i - gamma_j) for i >= j (i > j if strict), else 0, from gamma [slots, 64, Hv]."""
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool), -1 if strict else 0)[:, :, None]
    difference = gamma[:, :, None] - gamma[:, None]
    return jnp.where(lower, jnp.exp(jnp.where(lower, difference, 0)), 0)


def last_row(gamma: jax.Array, chunks: jax.Array) -> jax.Array:
    """gamma of the last row of each slot, [slots, Hv]; 0 for a slot without rows."""
    end = jnp.maximum(chunks[:, 2] - 1, 0)[:, None, None]
    return jnp.take_along_axis(gamma, end, axis=1)[:, 0]


def scan_slots(
    step: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
    initial: jax.Array,
    segments: jax.Array,
    chunks: jax.Array,
    per_slot: Any,
    *,
    reverse: bool = False,
) -> tuple[jax.Array, Any]:
    """Runs `step(state, slot's inputs) -> (state, outputs)` over the slots of every sequence.

    `initial` [N, ...] is the state a sequence is entered with: at its first chunk, or, reversed, at its last. Returns the
    states the sequences are left with, [N, ...], and the outputs of all slots.
    """
    sequence = chunks[:, 0]
    entered = jnp.concatenate([sequence[1:] != sequence[:-1], jnp.ones((1,), bool)])
    if not reverse:
        # the rows before sequence 0 are numbered 0 as well: it is entered at its own first slot
        slot = jnp.arange(chunks.shape[0])
        entered = slot == segments[sequence, 0] // CHUNK + sequence + 1

    def body(carry: tuple[jax.Array, jax.Array], inputs: Any) -> tuple[Any, Any]:
        state, left = carry
        n, is_entered, xs = inputs
        state, outputs = step(jnp.where(is_entered, initial[n], state), xs)
        return (state, left.at[n].set(state)), outputs

    carry = (jnp.zeros_like(initial[0]), initial)
    (_, left), outputs = jax.lax.scan(body, carry, (sequence, entered, per_slot), reverse=reverse)
    return left, outputs


def state_tiles(states: jax.Array, tile_rows: int | None = None) -> jax.Array:
    """States [..., K, V] as kernels/states.py and state_gradients.py write them, in tiles of 64 rows (of all, where K is no
    multiple of that; or of so many), transposed: [..., K / 64, V, 64]."""
    *axes, rows, columns = states.shape
    return jnp.swapaxes(states.reshape(*axes, -1, tile_rows or state_tile_rows(rows), columns), -1, -2)


def states_of_tiles(tiles: jax.Array) -> jax.Array:
    """`state_tiles` undone."""
    *axes, count, columns, rows = tiles.shape
    return jnp.swapaxes(tiles, -1, -2).reshape(*axes, count * rows, columns)


def of_chunk_slots(x: jax.Array) -> jax.Array:
    """[slots, ...] of those that may have a chunk, [slots - 1, ...]: all but the first, which is of the rows before all sequences."""
    chunk_slots: jax.Array = x[1:]
    return chunk_slots


def of_all_slots(x: jax.Array) -> jax.Array:
    """`of_chunk_slots` undone, with zeros."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x])


def window_slots(x: jax.Array, segments: jax.Array, chunks: jax.Array, tokens: int, *, later: bool) -> jax.Array:
    """[slots - 1, ...] of `of_chunk_slots` -> [window_count, ...], those of a window of all `segments`, whose `chunks` are given; zero where there is none."""
    count = tables.window_count(tokens, segments.shape[0])
    place = jnp.where(chunks[1:, 2] > 0, tables.slot_in_window(segments, chunks, later=later)[1:], count)
    return jnp.zeros((count, *x.shape[1:]), x.dtype).at[place].set(x, mode="drop")


def from_window_slots(x: jax.Array, segments: jax.Array, chunks: jax.Array, *, later: bool) -> jax.Array:
    """`window_slots` undone, with anything in slots of no chunk."""
    place = tables.slot_in_window(segments, chunks, later=later)
    return of_chunk_slots(x[jnp.clip(place, 0, x.shape[0] - 1)])


def rows_of(segments: jax.Array, tokens: int) -> jax.Array:
    """bool [tokens]: rows of any of these."""
    row = jnp.arange(tokens)[:, None]
    return jnp.any((row >= segments[:, 0]) & (row < segments[:, 1]), axis=1)


def chunk_in_piece(pieces: jax.Array, chunks: jax.Array) -> jax.Array:
    """Number of every slot's chunk in its piece, from 0, [slots]."""
    piece = chunks[:, 0]
    return jnp.arange(chunks.shape[0]) - (pieces[piece, 0] // CHUNK + piece + 1)


def mark(gamma: jax.Array, stretches: jax.Array) -> jax.Array:
    """gamma with `stretches` in its lowest bit."""
    bits = jax.lax.bitcast_convert_type(gamma, jnp.int64 if gamma.dtype == jnp.float64 else jnp.int32)
    return jax.lax.bitcast_convert_type((bits & ~STRETCHES) | (STRETCHES * stretches.astype(bits.dtype)), gamma.dtype)


def marked(gamma: jax.Array) -> jax.Array:
    """bool: the lowest bit of gamma."""
    bits = jax.lax.bitcast_convert_type(gamma, jnp.int64 if gamma.dtype == jnp.float64 else jnp.int32)
    return (bits & STRETCHES) != 0


def reach(
    gamma: jax.Array, pieces: jax.Array, chunks: jax.Array, *, from_end: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which chunks of a piece matter beyond it.

    Args:
        gamma: [tokens, Hv], from kernels/prepare.py.
        pieces, chunks: [P, 4] and their chunk table.
        from_end: whether the chunks at a piece's end matter, or those at its beginning.

    Returns:
        forgotten int32 [P, Hv], whether the bounds of all chunks of the piece add up to less than FORGOTTEN (none
        bounds a chunk that is marked); whole bool
        [P, Hv], whether all of them matter nevertheless; matters bool [slots, Hv], the chunks.
    """
    number = jnp.arange(chunks.shape[0])
    counts = (pieces[:, 1] - pieces[:, 0] + CHUNK - 1) // CHUNK
    chunk = counts[:, None] - 1 - number if from_end else number[None]
    inside = (number < counts[:, None])[..., None]
    row = jnp.minimum(pieces[:, :1] + chunk * CHUNK + CHUNK, pieces[:, 1:2]) - 1
    of_chunk = gamma[jnp.clip(row, 0, gamma.shape[0] - 1)]
    sums = jnp.cumsum(jnp.where(inside, jnp.where(marked(of_chunk), jnp.inf, of_chunk), 0), axis=1)
    forgotten = sums[:, -1] < FORGOTTEN
    matter = jnp.where(forgotten, jnp.argmax(inside & (sums < FORGOTTEN), axis=1) + 1, counts[:, None])
    at = chunk_in_piece(pieces, chunks)[:, None]
    piece = chunks[:, 0]
    matters = at >= (counts[:, None] - matter)[piece] if from_end else at < matter[piece]
    return forgotten.astype(jnp.int32), matter == counts[:, None], matters


def map_blocks(maps: jax.Array) -> jax.Array:
    """Maps [..., K, K] as kernels/summaries.py writes them: the transposed map in blocks [16, 16] (or one, where K is no multiple of that), each the
    sum of two bf16 numbers, high and low, and these in quarters as ldmatrix takes them, the left ones and then the right ones: [..., K K / 128, 256]."""
    *axes, size, _ = maps.shape
    block = map_block(size)
    parts = jnp.stack(_parts(jnp.swapaxes(maps, -1, -2)), axis=-3)
    parts = parts.reshape(*axes, 2, size // block, 2, block // 2, size // block, 2, block // 2)
    n = len(axes)
    order = (*range(n), *(n + i for i in (1, 4, 0, 5, 2, 3, 6)))
    return parts.transpose(order).reshape(*axes, *map_blocks_shape(size)).astype(jnp.bfloat16)


def of_map_blocks(blocks: jax.Array, size: int, dtype: Any) -> jax.Array:
    """`map_blocks` of maps [..., size, size] undone."""
    axes, block = blocks.shape[:-2], map_block(size)
    parts = blocks.astype(dtype).reshape(*axes, size // block, size // block, 2, 2, 2, block // 2, block // 2)
    n = len(axes)
    order = (*range(n), *(n + i for i in (0, 3, 4, 1, 2, 5)))
    maps = jnp.sum(parts, axis=n + 2).transpose(order).reshape(*axes, size, size)
    return jnp.swapaxes(maps, -1, -2)


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounded to bf16, and what that leaves."""
    high = x.astype(jnp.bfloat16).astype(x.dtype)
    return high, x - high
