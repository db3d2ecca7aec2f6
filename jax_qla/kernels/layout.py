"""Where the pieces of a packed batch lie, from the sequences' bounds.

What `piece_table`, `cut_table` and `chain_table` of jax_qla/segments.py say, the definitions, in one small kernel instead of several operations of XLA.
Whether sequences are cut at all is decided here, where lengths are known: only if the longest has more than
`cut_beyond` rows; otherwise all pieces are whole sequences.

Plan: one thread per piece, sequence, cut and chain; a thread finds its sequence by bisection. Every block finds the longest sequence for
itself.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla import segments as tables
from jax_qla.kernels.common import FIRST, LAST, PASS_CONFIGS
from jax_qla.kernels.macros import call

__all__ = ["PASS_CONFIGS", "WHOLE", "Config", "program", "specification"]

WHOLE = 1 << 30
"""Rows of a piece that no sequence exceeds."""

_THREADS = 128

PRELUDE = (
    f"constexpr int kFirst = {FIRST}, kLast = {LAST}, kWhole = {WHOLE};"
    r"""

// Sequences [count][2], start and end, cut into pieces of `rows` rows.
struct JaxQlaSequences {
  const int* bounds;
  int count, rows;

  __device__ int start(int n) const { return bounds[2 * n]; }
  __device__ int end(int n) const { return bounds[2 * n + 1]; }
  __device__ int first_piece(int n) const { return start(n) / rows + n; }
  __device__ int pieces(int n) const { return max((end(n) - start(n) + rows - 1) / rows, 1); }

  // The last sequence of which `key`, which does not decrease, is not beyond `limit`; -1 if there is none.
  template <typename F>
  __device__ int last(int limit, const F& key) const {
    int below = -1, above = count;
    while (above - below > 1) {
      const int middle = (below + above) / 2;
      if (key(middle) <= limit) below = middle;
      else above = middle;
    }
    return below;
  }
  __device__ int at(int piece) const {
    return last(piece, [this](int n) { return first_piece(n); });
  }
  // The sequence that may be cut at place `cut` for cuts, of which it has those from start / rows on.
  __device__ int cut_at(int cut) const {
    return last(cut, [this](int n) { return start(n) / rows; });
  }
};

__device__ __forceinline__ int4 jax_qla_piece(const JaxQlaSequences& s, int piece) {
  const int n = s.at(piece);
  if (n < 0) return make_int4(0, 0, 0, kFirst + kLast);
  const int number = piece - s.first_piece(n), pieces = s.pieces(n);
  if (number >= pieces) return make_int4(s.end(n), s.end(n), n, kFirst + kLast);
  const int start = s.start(n) + number * s.rows, end = pieces - number == 1 ? s.end(n) : start + s.rows;
  return make_int4(start, end, n, (number == 0 ? kFirst : 0) + (number == pieces - 1 ? kLast : 0));
}

// All five tables, but for `chains` 8-byte aligned and `pieces` 16; `index` is this thread's piece, sequence, cut and chain.
__device__ __forceinline__ void jax_qla_layout(const int* bounds, int* segments, int* pieces, int* spans, int* cuts, int* chains, int count,
                                               int parts, int places, int chain_places, int piece_rows, int cut_beyond, int index) {
  int longest = 0;
  for (int n = threadIdx.x; n < count; n += blockDim.x) longest = max(longest, bounds[2 * n + 1] - bounds[2 * n]);
  const bool cut = __syncthreads_or(longest > cut_beyond);
  const JaxQlaSequences s{bounds, count, cut ? piece_rows : kWhole};
  if (index < parts) {
    const int4 piece = jax_qla_piece(s, index);
    reinterpret_cast<int4*>(pieces)[index] = piece;
    reinterpret_cast<int2*>(segments)[index] = make_int2(piece.x, piece.y);
  }
  if (index < count) reinterpret_cast<int2*>(spans)[index] = make_int2(s.first_piece(index), s.pieces(index));
  int n = -1, number = -1;  // sequence and number of this place's cut
  if (index < places) {
    n = s.cut_at(index);
    number = n < 0 ? -1 : index - s.start(n) / s.rows;
    const bool is_cut = number >= 0 && number < s.pieces(n) - 1;
    const int piece = is_cut ? s.first_piece(n) + number : -1;
    reinterpret_cast<int2*>(cuts)[index] = make_int2(piece, is_cut ? piece + 1 : -1);
  }
  if (index < chain_places) {
    if (chain_places == count) n = index;
    else if (number != 0) n = -1;
    const bool is_cut = n >= 0 && s.pieces(n) > 1;
    chains[3 * index] = is_cut ? s.first_piece(n) : 0;
    chains[3 * index + 1] = is_cut ? s.pieces(n) : 0;
    chains[3 * index + 2] = is_cut ? n : 0;
  }
}
"""
)


@dataclass(frozen=True)
class Config:
    """Nothing: the tables are the same for all sizes and dtypes."""


def program(config: Config):
    """The TileLang program. Numbers of sequences and pieces are run-time values."""
    import tilelang.language as T

    del config
    sequences, parts, places, chain_places = T.dynamic("sequences, parts, places, chain_places")

    @T.prim_func
    def layout(
        bounds: T.Tensor((sequences, 2), "int32"),
        segments: T.Tensor((parts, 2), "int32"),
        pieces: T.Tensor((parts, 4), "int32"),
        spans: T.Tensor((sequences, 2), "int32"),
        cuts: T.Tensor((places, 2), "int32"),
        chains: T.Tensor((chain_places, 3), "int32"),
        piece_rows: T.int32,
        cut_beyond: T.int32,
    ):
        with T.Kernel(T.ceildiv(parts, _THREADS), threads=_THREADS, prelude=PRELUDE) as block:
            T.pdl_trigger()  # what follows waits by itself
            call(
                "jax_qla_layout",
                T.address_of(bounds[0, 0]),
                T.address_of(segments[0, 0]),
                T.address_of(pieces[0, 0]),
                T.address_of(spans[0, 0]),
                T.address_of(cuts[0, 0]),
                T.address_of(chains[0, 0]),
                sequences,
                parts,
                places,
                chain_places,
                piece_rows,
                cut_beyond,
                block * _THREADS + T.get_thread_binding(),
            )
            T.pdl_sync()  # ends after what came before, for what follows waits for this kernel alone

    return layout


def specification(
    bounds: jax.Array, *, parts: int, places: int, chain_places: int, piece_rows: int, cut_beyond: int
) -> tuple[jax.Array, ...]:
    """(segments [P, 2], pieces [P, 4], spans [N, 2], cuts [`places`, 2], chains [`chain_places`, 3]) of the sequences' bounds [N, 2], all int32, for
    P = `parts`.

    spans: the number of the first piece of each sequence, and how many it has.
    """
    number = jnp.arange(bounds.shape[0], dtype=jnp.int32)
    rows = jnp.where(jnp.max(bounds[:, 1] - bounds[:, 0]) > cut_beyond, piece_rows, WHOLE)
    pieces = tables.piece_table(bounds, parts, rows)
    spans = jnp.stack([tables.first_piece(bounds[:, 0], number, rows), tables.pieces_of(bounds, rows)], axis=1)
    cuts, chains = tables.cut_table(bounds, places, rows), tables.chain_table(bounds, chain_places, rows)
    return pieces[:, :2], pieces, spans, cuts, chains
