"""Where the sequences of a packed batch lie, and how their chunks are numbered.

Words for it, here and in all kernels: a *segment* is a range of rows that a recurrence runs along, a sequence or, where
sequences are cut, a *piece* of one. A *cut* is the border behind a piece, and the row of what lies between pieces. The
pieces of a sequence that is cut are a *chain*; a sequence's *span* is its first piece and how many it has. A *slot* is
a chunk's number. *Places* and *parts* are capacities, known when a call is traced, of which some may be empty.

Everything here is shape-static, runs on the device (no host read of `cu_seqlens`) and stays in bounds whatever the
values say: lengths that lie give other segments, never rows outside [0, tokens).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla.kernels.common import CHUNK, FIRST, LAST

_COMPARE_ALL_LIMIT = 1024
"""Up to this many sequences a slot finds its own by comparing with all; beyond, by a sorted search or a scan."""


def segments_from_cu_seqlens(cu_seqlens: jax.Array, tokens: int) -> jax.Array:
    """Start and end row of every packed sequence.

    Args:
        cu_seqlens: int32 [N + 1], cumulative lengths; rows before the first and after the last entry are padding.
        tokens: number of rows T of the packed batch.

    Returns:
        int32 [N, 2], sorted and disjoint, 0 <= start <= end <= T. Entries are clipped to [0, T] and an entry below
        an earlier one is raised to it, so right values come back unchanged and wrong ones give other (perhaps empty)
        sequences inside the batch.
    """
    bounds = jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens)
    sequences = bounds.shape[0] - 1
    if sequences <= _COMPARE_ALL_LIMIT:
        # The same as below in one kernel, where XLA makes three of a scan and its surroundings.
        place = jnp.arange(sequences, dtype=jnp.int32)[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        before = jnp.arange(sequences + 1, dtype=jnp.int32)[None, None] <= place[..., None]
        return jnp.max(jnp.where(before, bounds[None, None], 0), axis=2)
    bounds = jax.lax.cummax(bounds)
    return jnp.stack([bounds[:-1], bounds[1:]], axis=1)


def _run_starts(segment_ids: jax.Array, before: jax.Array | None = None) -> jax.Array:
    """bool [B, T]: the token is the first of a run of equal non-zero ids; `before` [B, T] are the ids before each."""
    if before is None:
        before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return (segment_ids != 0) & (segment_ids != before)


def segments_from_segment_ids(segment_ids: jax.Array, max_segments: int) -> jax.Array:
    """Start and end of every run of equal non-zero ids, counted from its row's first token.

    Args:
        segment_ids: int32 [B, T]; 0 is padding, a segment is a maximal run of equal non-zero ids within a row.
        max_segments: slots a row has. Runs beyond it are treated as padding; unused slots are empty segments.

    Returns:
        int32 [B, max_segments, 2], sorted and disjoint within a row: run i of row b is entry [b, i].
    """
    batch, tokens = segment_ids.shape
    if tokens == 0:
        return jnp.zeros((batch, max_segments, 2), jnp.int32)
    after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    starts = _run_starts(segment_ids)
    ends = (segment_ids != 0) & (segment_ids != after)
    run = jnp.cumsum(starts, axis=1, dtype=jnp.int32) - 1
    position = jnp.arange(tokens, dtype=jnp.int32)

    # Row by row, for of all rows at once the compiler gathers the ids where it cuts the batch.
    @jax.vmap
    def in_slots(is_bound: jax.Array, run: jax.Array) -> jax.Array:
        """The position of every bound, in its run's slot."""
        # An unused slot is empty and lies at the row's end, which keeps the whole list sorted.
        unused = jnp.full((max_segments,), tokens, jnp.int32)
        return unused.at[jnp.where(is_bound, run, max_segments)].set(position, mode="drop")

    # An end is the position behind its run's last token, and that of an unused slot is the row's.
    start, last = in_slots(starts, run), in_slots(ends, run)
    return jnp.stack([start, jnp.minimum(last + 1, tokens)], axis=2)


@jax.jit
def gates_with_resets(
    segment_ids: jax.Array, g: jax.Array, beta: jax.Array, before: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packing expressed by gates alone, for a batch without initial and final states.

    A decay of exp(-inf) = 0 at a segment's first token forgets everything before it; beta = 0 and g = 0 let padding
    pass without a trace. So any number of segments stays one dense call. q, k and v of padding tokens still enter the
    arithmetic (times zero) and must be finite.

    Args:
        segment_ids: int32 [B, T], 0 = padding.
        g, beta: [B, T, Hv].
        before: int32 [B, T], the id before each token where that is not simply the row's previous one: a row may be
            one shard of a sequence.

    Returns:
        g and beta so changed (their gradients are zero where replaced), and bool [B, T], False at padding, where the
        caller sets o to zero.
    """
    valid = segment_ids != 0
    first = _run_starts(segment_ids, before)[..., None]
    g = jnp.where(valid[..., None], jnp.where(first, -jnp.inf, g), jnp.zeros((), g.dtype))
    beta = jnp.where(valid[..., None], beta, jnp.zeros((), beta.dtype))
    return g, beta, valid


def dense_segments(batch: int, tokens: int) -> np.ndarray:
    """Segments of a dense batch flattened to one row: int32 [B, 2], entry b is (b * T, (b + 1) * T)."""
    start = np.arange(batch, dtype=np.int32) * np.int32(tokens)
    return np.stack([start, start + np.int32(tokens)], axis=1)


def piece_count(tokens: int, sequences: int, rows: int, *, packed: bool = True) -> int:
    """Number of pieces of at most `rows` rows that any packing of `sequences` segments into `tokens` rows fits into, or
    that a dense batch of `sequences` rows has."""
    return cut_count(tokens, rows) + sequences if packed else sequences * -(-tokens // (sequences * rows))


def cut_count(tokens: int, rows: int) -> int:
    """Number of places for cuts, between pieces of at most `rows` rows of a packed batch: enough for any packing, and
    so many that they say how long pieces are (`rows_of_pieces`)."""
    return -(-tokens // rows)


def rows_of_pieces(tokens: int, sequences: int, parts: int, *, packed: bool) -> int:
    """Length of a piece, from their number: the least multiple of 64 with which there are so many. Zero where there is
    no token."""
    filled = parts - sequences if packed else parts
    return -(-tokens // (max(filled, 1) * CHUNK)) * CHUNK


def dense_pieces(batch: int, tokens: int, rows: int) -> tuple[np.ndarray, ...]:
    """As `piece_table`, `cut_table` and `chain_table` of a dense batch, every row of which has equally many pieces, and
    none is unused.

    Returns:
        pieces: int32 [B ceil(T / rows), 4]. spans: int32 [B, 2], number of the first piece of a row, and how many.
        cuts: int32 [B (ceil(T / rows) - 1), 2]. chains: int32 [B, 3].
    """
    count = -(-tokens // rows)
    number, sequence = np.arange(count), np.arange(batch)[:, None]
    start, end = (sequence * tokens + np.minimum(number * rows + more, tokens) for more in (0, rows))
    position = np.where(number == 0, FIRST, 0) + np.where(number == count - 1, LAST, 0)
    pieces = np.stack(np.broadcast_arrays(start, end, sequence, position), axis=2)
    chains = np.stack([np.arange(batch) * count, np.full(batch, count), np.arange(batch)], axis=1).astype(np.int32)
    before = (chains[:, :1] + number[:-1]).reshape(-1, 1)
    cuts = np.concatenate([before, before + 1], axis=1)
    return pieces.reshape(-1, 4).astype(np.int32), chains[:, :2], cuts.astype(np.int32), chains


def first_piece(start: Any, n: Any, rows: Any) -> Any:
    """First piece of sequence n, which starts at row `start` (integers or integer arrays)."""
    return start // rows + n


def _last_begun(first: Any, places: Any) -> Any:
    """Number of the last of `first`, which do not decrease, that is not beyond each of `places`; -1 where none is."""
    if isinstance(first, np.ndarray):
        return np.searchsorted(first, places, side="right") - 1
    if first.shape[0] <= _COMPARE_ALL_LIMIT:
        return jnp.sum(first[None] <= places[:, None], axis=1, dtype=jnp.int32) - 1
    return jnp.searchsorted(first, places, side="right", method="sort") - 1


def pieces_of(segments: Any, rows: Any) -> Any:
    """Number of pieces of every sequence, int32 [N]; an empty one has one piece, which is empty."""
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    return xp.maximum((segments[:, 1] - segments[:, 0] + rows - 1) // rows, 1)


def piece_table(segments: jax.Array | np.ndarray, parts: int, rows: Any) -> Any:
    """All sequences cut into pieces of `rows` rows, the last of a sequence being shorter.

    Args:
        segments: int32 [N, 2], as `chunk_table` takes them. NumPy in, NumPy out.
        parts: number of pieces there is room for, at least piece_count(T, N, rows).
        rows: length of a piece, a multiple of 64, so that its chunks are the sequence's; an integer or integer array.

    Returns:
        int32 [parts, 4] with columns start, end, sequence and position: FIRST if the piece is its
        sequence's first, plus LAST if it is its last. The first two columns are segments again, sorted and disjoint.
        Pieces that no sequence needs are empty and marked as both.
    """
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    sequences = segments.shape[0]
    piece = xp.arange(parts, dtype=np.int32)
    # Sequence -1 = [0, 0) owns what precedes the first piece of sequence 0.
    start, end = (xp.concatenate([xp.zeros((1,), np.int32), segments[:, i]]) for i in range(2))
    first = xp.concatenate([xp.zeros((1,), np.int32), first_piece(segments[:, 0], xp.arange(sequences), rows)])
    count = xp.concatenate([xp.zeros((1,), np.int32), pieces_of(segments, rows)])
    entry = _last_begun(first, piece)
    start, end, count, number = start[entry], end[entry], count[entry], piece - first[entry]
    begins = xp.minimum(start + xp.minimum(number, count) * rows, end)
    ends = xp.minimum(begins + rows, end)
    unused = number >= count
    position = xp.where(unused | (number == 0), FIRST, 0) + xp.where(unused | (number == count - 1), LAST, 0)
    return xp.stack([begins, ends, xp.maximum(entry - 1, 0), position], axis=1).astype(np.int32)


def cut_table(segments: jax.Array | np.ndarray, places: int, rows: Any) -> Any:
    """Where sequences are cut, of all `piece_table` says with the same arguments.

    Sequence n has the places from start // rows on, of which no two have any together, for the next one begins where
    as many rows have passed as all pieces but the last of this one have. So the cut behind its piece p is at p - n
    (`first_piece`), there and in `dense_pieces`.

    Args:
        segments: int32 [N, 2], as `piece_table` takes them. NumPy in, NumPy out.
        places: at least cut_count(T, rows).
        rows: length of a piece.

    Returns:
        int32 [places, 2], the piece before every cut and the piece after it; -1 and -1 where there is no cut.
    """
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    n, number = _cuts(segments, places, rows)
    start = segments[n, 0]
    before = xp.where(number >= 0, first_piece(start, n, rows) + number, -1)
    return xp.stack([before, xp.where(number >= 0, before + 1, -1)], axis=1).astype(np.int32)


def chain_table(segments: jax.Array | np.ndarray, places: int, rows: Any) -> Any:
    """The sequences that are cut into more pieces than one.

    Args:
        segments: int32 [N, 2], as `piece_table` takes them. NumPy in, NumPy out.
        places: N, or cut_count(T, rows), which is less.
        rows: length of a piece.

    Returns:
        int32 [places, 3]: the first piece, how many there are, and the sequence; of `places` = N at the sequence's
        number, else at the place of its first cut. Zero where there is none.
    """
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    count = segments.shape[0]
    if places == count:
        n, number = xp.arange(count, dtype=np.int32), xp.zeros((count,), np.int32)
    else:
        n, number = _cuts(segments, places, rows)
    pieces = pieces_of(segments, rows)[n]
    chains = xp.stack([first_piece(segments[n, 0], n, rows), pieces, n], axis=1)
    return xp.where(((number == 0) & (pieces > 1))[:, None], chains, 0).astype(np.int32)


def _cuts(segments: Any, places: int, rows: Any) -> tuple[Any, Any]:
    """Sequence, and number among its cuts, of every place for a cut; -1 instead of the number where there is none."""
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    place, first = xp.arange(places, dtype=np.int32), segments[:, 0] // rows
    n = _last_begun(first, place)
    found = xp.maximum(n, 0)
    number = place - first[found]
    return found, xp.where((n >= 0) & (number < pieces_of(segments, rows)[found] - 1), number, -1)


def shard_pieces(segments: jax.Array | np.ndarray, rows: int, count: int) -> tuple[Any, Any, Any]:
    """Sequences cut into pieces of `rows` rows, for what these do to states that are not known yet.

    Args:
        segments: int32 [N, 2], as `chunk_table` takes them, none longer than rows * count. NumPy in, NumPy out.
        rows: length of a piece, a multiple of 64.
        count: pieces of a sequence.

    Returns:
        pieces int32 [N (count + 2), 4], as of `piece_table`: of every sequence an empty one at its start, `count`, and
        an empty one at its end. None is marked as the first or the last, so of all of them everything is computed.
        entered, left: int32 [N, 3], as of `chain_table`, number of the first piece, how many there are, and the
        sequence, for going through a sequence forwards and reversed. Its last empty piece is entered with the state
        after the sequence; reversed, its first with the gradient of the state before it.
    """
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    start, end = segments[:, :1], segments[:, 1:]
    bounds = xp.clip(start + rows * xp.arange(-1, count + 2, dtype=np.int32), start, end)
    number = xp.arange(segments.shape[0], dtype=np.int32)
    sequence = xp.broadcast_to(number[:, None], (segments.shape[0], count + 2))
    pieces = xp.stack([bounds[:, :-1], bounds[:, 1:], sequence, xp.zeros_like(sequence)], axis=2)
    first, used = number * (count + 2), (end - start)[:, 0] // rows + ((end - start)[:, 0] % rows > 0) + 1
    entered, left = (xp.stack([x, used, number], axis=1).astype(np.int32) for x in (first + 1, first))
    return pieces.reshape(-1, 4).astype(np.int32), entered, left


def slot_count(tokens: int, sequences: int) -> int:
    """Number of chunk slots that any packing of `sequences` segments into `tokens` rows fits into."""
    return tokens // CHUNK + sequences + 1


def first_slot(start: Any, n: Any) -> Any:
    """Slot of the first chunk of sequence n, which starts at row `start` (integers or integer arrays)."""
    return start // CHUNK + n + 1


def state_count(tokens: int, sequences: int) -> int:
    """Number of places for what is kept of every chunk: one a slot but the first, which no chunk has."""
    return slot_count(tokens, sequences) - 1


def window_count(tokens: int, sequences: int) -> int:
    """Number of places for what is kept of every chunk of a window (`of_window`)."""
    return tokens // CHUNK // 2 + sequences


def of_window(segments: Any, *, later: bool) -> Any:
    """The later half of every segment's chunks, of an odd number one more than half, or the earlier one, as segments,
    int32 [N, 2], whose chunks have the slots that they have in the whole ones."""
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    start, end = segments[:, 0], segments[:, 1]
    border = xp.minimum(start + (end - start + CHUNK - 1) // CHUNK // 2 * CHUNK, end)
    return xp.stack([border, end] if later else [start, border], axis=1)


def slot_in_window(segments: Any, chunks: Any, *, later: bool) -> Any:
    """Where the chunks of a window of `segments` lie among each other, int [slots], by their chunk table. Segment n
    has places from (slot + n) // 2 on, `slot` being its first one counted from 0: as many as half of those that it
    has there, and half a one more."""
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    n = chunks[:, 0]
    number = xp.arange(chunks.shape[0]) - first_slot(of_window(segments, later=later)[n, 0], n)
    return (first_slot(segments[n, 0], n) - 1 + n) // 2 + number


def chunk_table(segments: jax.Array | np.ndarray, tokens: int) -> Any:
    """Chunks of all sequences, one slot each, such that every row of [0, tokens) is covered exactly once.

    Slots [0, first_slot(start_0, 0)) cover the rows before the first sequence. Sequence n owns the slots from
    first_slot(start_n, n) up to the next sequence's: first its chunks, then the gap that follows it. The gap's first
    64 rows belong to the last chunk's slot (they follow its rows directly), further ones to slots without rows.

    Args:
        segments: int32 [N, 2], sorted and disjoint, 0 <= start <= end <= tokens (N may be 0). NumPy in, NumPy out.
        tokens: number of rows T.

    Returns:
        int32 [slot_count(T, N), 4] with columns
        sequence: n in [0, N), 0 for the rows before the first sequence;
        first_row: the first of the slot's rows, and of its fill rows if it has no rows;
        rows: 0 to 64, rows of the sequence;
        fill_rows: 0 to 64, rows outside every sequence, at [first_row + rows, first_row + rows + fill_rows).
    """
    xp: ModuleType = np if isinstance(segments, np.ndarray) else jnp
    sequences = segments.shape[0]
    slot = xp.arange(slot_count(tokens, sequences), dtype=np.int32)
    # Sequence -1 = [0, 0) owns what precedes sequence 0; its entries stand first in these lists.
    nothing = xp.zeros((1,), np.int32)
    start = xp.concatenate([nothing, segments[:, 0]])
    end = xp.concatenate([nothing, segments[:, 1]])
    gap_end = xp.concatenate([segments[:, 0], xp.full((1,), tokens, np.int32)])
    first = xp.concatenate([nothing, first_slot(segments[:, 0], xp.arange(sequences, dtype=np.int32))])
    entry = _last_begun(first, slot)
    start, end, gap_end, first = start[entry], end[entry], gap_end[entry], first[entry]
    chunk = slot - first
    last_chunk = xp.maximum((end - start + CHUNK - 1) // CHUNK, 1) - 1
    rows = xp.clip(end - start - chunk * CHUNK, 0, CHUNK)
    # Both ends of the fill are clipped, so a slot past the last gap row has no fill and an address inside the batch.
    fill_start = xp.minimum(end + xp.maximum(chunk - last_chunk, 0) * CHUNK, gap_end)
    fill_rows = xp.where(chunk >= last_chunk, xp.clip(gap_end - fill_start, 0, CHUNK), 0)
    first_row = xp.where(chunk <= last_chunk, start + chunk * CHUNK, fill_start)
    sequence = xp.maximum(entry - 1, 0)
    return xp.stack([sequence, first_row, rows, fill_rows], axis=1).astype(np.int32)
