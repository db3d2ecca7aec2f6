"""Microseconds of a forward pass by the pieces that its sequences are cut into, and which packed sequences are cut.

Of sequences that are alike (`batches.Alike`), as a case of a batch supposes. What kernels/prepare.py takes, which does
not go by pieces, is left out.
"""

from __future__ import annotations

import functools
import math

from jax_qla.kernels.common import CHUNK
from jax_qla.policy import card, costs
from jax_qla.policy.batches import Alike, Batch, most_are_taken
from jax_qla.policy.blocks import composed, halves, summarised, value_tile
from jax_qla.segments import cut_count

_ROWS_COMPOSED = 512
"""Tokens of a sequence that take as long as `compose` of a chain of pieces and what goes before and after it
(docs/performance_policy.md, "Many places")."""

_UNLIKE = 1.125
"""Times their length, up to which sequences that are supposed to be alike may differ ("Fewer blocks, shorter
pieces")."""

_FEW_HEADS, _FEW_TOKENS = 8, 65536
"""Value heads and tokens of one sequence up to which pieces of a forward pass alone are chosen by how blocks of
kernels/summaries.py share multiprocessors. Of other calls the constants were fitted without that, and choices by it
are no better (docs/performance_policy.md, "How near to the best")."""

ASKED_AMONG = 256
"""Sequences up to which every block may find out for itself whether any is cut (kernels/uncut.py): two loads a lane."""


def forward_time(batch: Batch, alike: Alike, length: int | None, *, alone: bool = False) -> float:
    """The forward recurrence of these sequences of the batch, in pieces of `length` chunks or whole (None); `alone`:
    not to be added to what the backward pass takes."""
    if length is None or (length >= alike.chunks and not batch.packed):
        return max(1.0, _whole(batch, alike))
    if stays_whole(batch, alike, length):
        return _left_whole(batch, alike, length)
    return cut_time(batch, alike, length, by_sharing=alone and _sharing_counts(batch))


def shard_time(batch: Batch, alike: Alike, length: int) -> float:
    """The same of parts of sequences, whose first states other devices know. All their pieces are summarised, and they
    are composed twice: for the part's own summary, and when its first state is known."""
    pieces = pieces_of(alike, length)
    columns, _ = composed_in_turn(batch, alike, length)
    compose = costs.compose(2 * (pieces_each(alike, length) + 1), columns)
    return _in_pieces(batch, pieces, pieces.number, compose)


@functools.cache
def cut_beyond(rows: int, tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Rows of a sequence: a packed batch is cut, into pieces of `rows` rows, if any of its sequences is longer than
    this, which the device finds out.

    - One sequence: a piece.
    - Few, most of which are supposed to have tokens: one and a half.
    - Many, which may be uneven anyway: a piece, or what a multiprocessor has to do if all do as much, and then half a
      piece and 512 rows, which is what it takes to summarise and to compose; and no less than sequences have that are
      alike, in all places or in half of them, where these take no longer whole.

    Args:
        rows: of a piece.
        tokens, sequences, heads, key_dim, value_dim: as in `piece_rows`.
    """
    if most_are_taken(sequences):
        return rows if sequences == 1 else rows + rows // 2
    beyond = max(rows, tokens * heads // card.MULTIPROCESSORS) + rows // 2 + _ROWS_COMPOSED
    batch, length = Batch(tokens, sequences, heads, key_dim, value_dim, packed=True), rows // CHUNK
    for alike in (batch.equal, batch.half_as_many):
        if _left_whole(batch, alike, length) <= cut_time(batch, alike, length):
            beyond = max(beyond, math.ceil(_UNLIKE * alike.chunks) * CHUNK)
    return beyond


def cut_time(batch: Batch, alike: Alike, length: int, *, by_sharing: bool = False) -> float:
    """`forward_time` of sequences that are cut; `by_sharing`: as in `_in_pieces`."""
    pieces = pieces_of(alike, length)
    columns, turns = composed_in_turn(batch, alike, length)
    compose = costs.compose(pieces_each(alike, length) * turns, columns)
    return _in_pieces(batch, pieces, pieces.number - alike.number, compose, by_sharing=by_sharing)


def longest_whole(batch: Batch, length: int) -> int:
    """Chunks of a sequence of the batch that takes as long whole, all others beside it, as all tokens do in pieces, as
    those of one sequence; in halves of its columns if there are any (`blocks.halves`; of few places always)."""
    places, cuts = batch.sequences, cut_count(batch.chunks, length)
    few = most_are_taken(places)  # of which choices were measured with all pieces counted as alike
    time = cut_time(batch, Alike(1, batch.chunks), length) if few else _all_in_pieces(batch, length)
    time -= nothing_to_cut(batch, batch.equal, length)
    if few or halves(places + cuts, batch.heads):
        return costs.steps_of_half(time)
    return costs.steps(time, value_tile(max(places, cuts) * batch.heads, batch.value_dim))


def _all_in_pieces(batch: Batch, length: int) -> float:
    """`cut_time` of one sequence with all tokens, the last of whose pieces is shorter, so that its blocks may end with
    others though they begin when these have ended, or one behind the other where some multiprocessors have nothing to
    do in the last round."""
    whole, rest = divmod(batch.chunks, length)
    time = cut_time(batch, Alike(1, batch.chunks), length)
    if whole == 0 or rest == 0:
        return time
    blocks_each = batch.heads * (batch.value_dim // value_tile((whole + 1) * batch.heads, batch.value_dim))
    rounds, part = card.rounds(whole * blocks_each), rest / length
    idle = rounds * card.MULTIPROCESSORS - whole * blocks_each
    in_turn = math.ceil(blocks_each / idle) * part - 1 if idle > 0 else part
    without = cut_time(batch, Alike(1, whole * length), length)
    return without + min(max(in_turn, 0.0), part) * (time - without)


def nothing_to_cut(batch: Batch, alike: Alike, length: int) -> float:
    """What summarises and composes pieces of `length` chunks, where none of these packed sequences is cut."""
    cuts = cut_count(alike.number * alike.chunks, length)  # for which there is room
    columns, together = composed(min(cuts, batch.sequences), batch.heads, batch.value_dim, packed=True)
    each = (batch.key_dim + batch.value_dim) / 64
    return costs.nothing_to_cut(batch.heads * (cuts * each + together * batch.value_dim / columns))


def stays_whole(batch: Batch, alike: Alike, length: int) -> bool:
    """Whether these sequences are so short that the device does not cut them into pieces of `length` chunks."""
    return batch.packed and alike.chunks * CHUNK <= cut_beyond(length * CHUNK, *batch.sizes)


def pieces_each(alike: Alike, length: int) -> int:
    """Pieces of up to `length` chunks of each of these sequences."""
    return -(-alike.chunks // length)


def pieces_of(alike: Alike, length: int) -> Alike:
    """Those of all of them, as if they were alike."""
    return Alike(pieces_each(alike, length) * alike.number, length)


def composed_in_turn(batch: Batch, alike: Alike, length: int) -> tuple[int, int]:
    """Value columns of a block of kernels/compose.py, and sequences that it takes one after the other."""
    if not batch.packed:
        return composed(alike.number, batch.heads, batch.value_dim, packed=False).columns, 1
    chains = min(batch.sequences, cut_count(alike.number * alike.chunks, length))
    columns, together = composed(chains, batch.heads, batch.value_dim, packed=True)
    return columns, -(-alike.number // together)


def _whole(batch: Batch, alike: Alike) -> float:
    """kernels/forward.py alone, where sequences or pieces are `alike`."""
    recurrences = alike.number * batch.heads
    tile = value_tile(recurrences, batch.value_dim)
    return costs.forward(alike.chunks, recurrences * (batch.value_dim // tile), tile)


def _in_pieces(batch: Batch, pieces: Alike, cuts: int, compose: float, *, by_sharing: bool = False) -> float:
    """The kernels of a forward pass in pieces.

    Args:
        batch: the batch.
        pieces: of all its sequences.
        cuts: pieces that are summarised.
        compose: us of kernels/compose.py.
        by_sharing: whether blocks of kernels/summaries.py are counted by how they share multiprocessors.
    """
    key_dim, value_dim = batch.key_dim, batch.value_dim
    recurrences = pieces.number * batch.heads
    blocks = costs.summary_blocks(pieces.chunks, cuts * batch.heads, (key_dim + value_dim) / 64, value_dim / 64)
    rounds = card.rounds(recurrences * (value_dim // value_tile(recurrences, value_dim)))
    rounds += card.rounds(blocks.whole + blocks.short, 2)
    summaries = _summaries_by_sharing(batch, pieces, cuts, blocks) if by_sharing else costs.summaries(blocks)
    return costs.in_pieces(_whole(batch, pieces) + summaries + compose, rounds, recurrences)


def _sharing_counts(batch: Batch) -> bool:
    """Whether `_summaries_by_sharing` is known to make better choices."""
    few = batch.sequences == 1 and batch.heads <= _FEW_HEADS and batch.tokens <= _FEW_TOKENS
    return few and batch.key_dim == batch.value_dim == 128


def _summaries_by_sharing(batch: Batch, pieces: Alike, cuts: int, blocks: costs.SummaryBlocks) -> float:
    """kernels/summaries.py by how its blocks share multiprocessors, if a quarter of the heads does not decay: then they
    do not where the device finds out whether to."""
    sharing, _ = summarised(cuts, cuts, pieces.chunks, batch.heads, batch.key_dim, batch.value_dim)
    if sharing == "shared":
        return costs.summaries_shared(blocks)
    return costs.summaries_alone(blocks) + (costs.SECOND_LAUNCH if sharing == "either" else 0.0)


def _left_whole(batch: Batch, alike: Alike, length: int) -> float:
    """`forward_time` of packed sequences that might have been cut and are not. Of few places most are taken, it is
    supposed, so what pieces cost that find nothing to cut counts twice there."""
    places, heads, value_dim = batch.sequences, batch.heads, batch.value_dim
    cuts, few = cut_count(alike.number * alike.chunks, length), most_are_taken(places)
    recurrences = max(cuts, alike.number if few else places)
    if not few and halves(places + cuts, heads):  # of all, where they run at once
        recurrences = alike.number
    tile = value_tile(recurrences * heads, value_dim)
    whole = costs.forward(alike.chunks, alike.number * heads * (value_dim // tile), tile)
    return whole + (2 if few else 1) * nothing_to_cut(batch, alike, length)
