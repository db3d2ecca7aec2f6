"""Where the pieces and chunks of a packed batch lie: the tables that all other kernels go by, from the sequences' bounds.

What `piece_table` and `chunk_table` of jax_qla/segments.py say, which are the definition, in one small kernel instead of a dozen
operations of XLA. Whether sequences are cut at all is decided here, where lengths are known: only if the longest has more than
`cut_beyond` rows; otherwise all pieces are whole sequences.

Plan: one thread per slot, piece and sequence; a thread finds its sequence by bisection. Every block finds the longest sequence for
itself.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, FIRST, LAST, PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "WHOLE", "Config", "program", "specification"]

WHOLE = 1 << 30
"""Rows of a piece that no sequence exceeds."""

_THREADS = 128

PRELUDE = (
    f"constexpr int kChunk = {CHUNK}, kFirst = {FIRST}, kLast = {LAST}, kWhole = {WHOLE};"
    r"""

// Sequences [count][2], start and end, cut into pieces of `rows` rows.
struct JaxQlaSequences {
  const int* bounds;
  int count, rows, parts, tokens;

  __device__ int start(int n) const { return n < count ? bounds[2 * n] : tokens; }
  __device__ int end(int n) const { return bounds[2 * n + 1]; }
  __device__ int first_piece(int n) const { return n < count ? bounds[2 * n] / rows + n : parts; }
  __device__ int pieces(int n) const { return max((end(n) - start(n) + rows - 1) / rows, 1); }
  __device__ int first_slot(int n) const { return bounds[2 * n] / kChunk + first_piece(n) + 1; }

  // The last sequence whose first piece (first slot) is not beyond `index`; -1 if there is none.
  template <bool slots>
  __device__ int at(int index) const {
    int below = -1, above = count;
    while (above - below > 1) {
      const int middle = (below + above) / 2;
      if ((slots ? first_slot(middle) : first_piece(middle)) <= index) below = middle;
      else above = middle;
    }
    return below;
  }
};

__device__ __forceinline__ int4 jax_qla_piece(const JaxQlaSequences& s, int piece) {
  const int n = s.at<false>(piece);
  if (n < 0) return make_int4(0, 0, 0, kFirst + kLast);
  const int number = piece - s.first_piece(n), pieces = s.pieces(n);
  if (number >= pieces) return make_int4(s.end(n), s.end(n), n, kFirst + kLast);
  const int start = s.start(n) + number * s.rows, end = pieces - number == 1 ? s.end(n) : start + s.rows;
  return make_int4(start, end, n, (number == 0 ? kFirst : 0) + (number == pieces - 1 ? kLast : 0));
}

__device__ __forceinline__ int4 jax_qla_chunk(const JaxQlaSequences& s, int slot) {
  const int n = s.at<true>(slot);
  // the piece that the slot belongs to, its first slot, and the end of the gap that follows it
  int piece, start = 0, end = 0, first, gap_end = 0;
  if (n < 0) {  // pieces before those of sequence 0 are empty, and before them is slot 0
    const int pieces = s.first_piece(0);
    piece = min(slot, pieces) - 1;
    first = piece + 1;
    if (piece == pieces - 1) gap_end = s.start(0);
  } else {
    const int pieces = s.pieces(n), begin = s.first_piece(n), unused = s.first_piece(n + 1) - begin - pieces;
    const int first_unused = s.end(n) / kChunk + begin + pieces + 1;
    int number;
    if (unused > 0 && slot >= first_unused) {
      number = pieces + min(slot - first_unused, unused - 1);
      first = first_unused + number - pieces;
      start = end = s.end(n);
    } else {
      const int each = s.rows / kChunk + 1;
      number = min((slot - s.first_slot(n)) / each, pieces - 1);
      first = s.first_slot(n) + number * each;
      start = s.start(n) + number * s.rows;
      end = number == pieces - 1 ? s.end(n) : start + s.rows;
    }
    piece = begin + number;
    gap_end = number == pieces + unused - 1 ? s.start(n + 1) : end;
  }
  const int chunk = slot - first, last = max((end - start + kChunk - 1) / kChunk, 1) - 1;
  const int rows = min(max(end - start - chunk * kChunk, 0), kChunk);
  const int fill = min(end + max(chunk - last, 0) * kChunk, gap_end);
  const int fill_rows = chunk >= last ? min(max(gap_end - fill, 0), kChunk) : 0;
  return make_int4(max(piece, 0), chunk <= last ? start + chunk * kChunk : fill, rows, fill_rows);
}

// All four tables, each 16-byte aligned; `index` is this thread's slot, piece and sequence.
__device__ __forceinline__ void jax_qla_layout(const int* bounds, int* segments, int* pieces, int* spans, int* chunks, int count,
                                               int parts, int slots, int tokens, int piece_rows, int cut_beyond, int index) {
  int longest = 0;
  for (int n = threadIdx.x; n < count; n += blockDim.x) longest = max(longest, bounds[2 * n + 1] - bounds[2 * n]);
  const bool cut = __syncthreads_or(longest > cut_beyond);
  const JaxQlaSequences s{bounds, count, cut ? piece_rows : kWhole, parts, tokens};
  if (index < slots) reinterpret_cast<int4*>(chunks)[index] = jax_qla_chunk(s, index);
  if (index < parts) {
    const int4 piece = jax_qla_piece(s, index);
    reinterpret_cast<int4*>(pieces)[index] = piece;
    reinterpret_cast<int2*>(segments)[index] = make_int2(piece.x, piece.y);
  }
  if (index < count) reinterpret_cast<int2*>(spans)[index] = make_int2(s.first_piece(index), s.pieces(index));
}
"""
)


@dataclass(frozen=True)
class Config:
    """Nothing: the tables are the same for all sizes and dtypes."""


def program(config: Config):
    """The TileLang program. Numbers of sequences, pieces and slots are run-time values."""
    import tilelang.language as T

    del config
    sequences, parts, slots = T.dynamic("sequences, parts, slots")

    @T.prim_func
    def layout(
        bounds: T.Tensor((sequences, 2), "int32"),
        segments: T.Tensor((parts, 2), "int32"),
        pieces: T.Tensor((parts, 4), "int32"),
        spans: T.Tensor((sequences, 2), "int32"),
        chunks: T.Tensor((slots, 4), "int32"),
        tokens: T.int32,
        piece_rows: T.int32,
        cut_beyond: T.int32,
    ):
        with T.Kernel(T.ceildiv(slots, _THREADS), threads=_THREADS, prelude=PRELUDE) as block:
            T.pdl_trigger()  # what follows waits by itself
            T.call_extern(
                "handle",
                "jax_qla_layout",
                T.address_of(bounds[0, 0]),
                T.address_of(segments[0, 0]),
                T.address_of(pieces[0, 0]),
                T.address_of(spans[0, 0]),
                T.address_of(chunks[0, 0]),
                sequences,
                parts,
                slots,
                tokens,
                piece_rows,
                cut_beyond,
                block * _THREADS + T.get_thread_binding(),
            )

    return layout


def specification(
    bounds: jax.Array, *, tokens: int, piece_rows: int, cut_beyond: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(segments [P, 2], pieces [P, 4], spans [N, 2], chunks [slots, 4]) of the sequences' bounds [N, 2], all int32.

    spans: the number of the first piece of each sequence, and how many it has.
    """
    from jax_qla import segments as tables  # the definition, which takes the constants of kernels/common.py

    number = jnp.arange(bounds.shape[0], dtype=jnp.int32)
    rows = jnp.where(jnp.max(bounds[:, 1] - bounds[:, 0]) > cut_beyond, piece_rows, WHOLE)
    pieces = tables.piece_table(bounds, tables.piece_count(tokens, bounds.shape[0], piece_rows), rows)
    spans = jnp.stack([tables.first_piece(bounds[:, 0], number, rows), tables.pieces_of(bounds, rows)], axis=1)
    return pieces[:, :2], pieces, spans, tables.chunk_table(pieces[:, :2], tokens)
