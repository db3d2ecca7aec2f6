"""A forward pass by itself of a packed batch of two to eight sequences: what it takes, and which batches are cut.
`cut_beyond_alone` has also those of more sequences.

A batch that is not cut waits for its longest sequence, of which kernels/forward.py computes halves of the value columns
side by side (`blocks.halves`). One that is cut takes about as long however its tokens are divided. So the device cuts
where the longest sequence would take longer than all of them in pieces, and pieces may be as short as such a batch
wants them, for sequences that are alike stay whole.

Where the backward pass has the same pieces, it is otherwise (`forward_time.cut_beyond`): that gains by pieces, which
are alike, whatever the sequences are.
"""

from __future__ import annotations

import functools

from jax_qla.kernels.common import CHUNK
from jax_qla.policy import costs
from jax_qla.policy.batches import Alike, Batch, if_alike, most_are_taken
from jax_qla.policy.blocks import halves, value_tile, whole_heads
from jax_qla.policy.forward_time import cut_beyond, cut_time, longest_whole, nothing_to_cut
from jax_qla.segments import cut_count

_MAY_BE_CUT = 4.0
"""us that a batch which might be cut, and is not, counts beside what it takes by the model, so that short ones are left
whole (docs/performance_policy.md, "Few places")."""


def has_few_places(batch: Batch) -> bool:
    """Whether it is packed, of two to eight sequences."""
    return batch.several and most_are_taken(batch.sequences)


def cases(batch: Batch) -> list[tuple[float, Alike]]:
    """As `Batch.cases`, but that half as many sequences have no more tokens where their number is odd."""
    of_all, (weight, _), of_one = batch.cases
    return [of_all, (weight, _half_as_many(batch)), of_one]


def few_time(batch: Batch, alike: Alike, length: int | None) -> float:
    """As `forward_time`, of these sequences of such a batch, which is cut beyond `cut_beyond_alone`."""
    if length is None:
        return _whole(batch, alike, 0)
    if alike.chunks * CHUNK <= cut_beyond_alone(length * CHUNK, *batch.sizes):
        return _left_whole(batch, alike, length) + _MAY_BE_CUT
    return cut_time(batch, alike, length)


@functools.cache
def cut_beyond_alone(rows: int, tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int) -> int:
    """As `cut_beyond`, of a forward pass by itself whose pieces nobody asked for: no less than what takes as long whole
    as all sequences in pieces, unless few places' sequences take less time in pieces if they are alike.

    Args:
        rows: of a piece.
        tokens, sequences, heads, key_dim, value_dim: as in `piece_rows`.
    """
    beyond = cut_beyond(rows, tokens, sequences, heads, key_dim, value_dim)
    batch, length = Batch(tokens, sequences, heads, key_dim, value_dim, packed=True), rows // CHUNK
    if not batch.several:
        return beyond
    if not has_few_places(batch):
        return max(beyond, CHUNK * longest_whole(batch, length))
    cut = cut_time(batch, Alike(1, batch.chunks), length)
    if _left_whole(batch, batch.equal, length) > cut:
        return beyond
    longest = longest_whole(batch, length)
    half = _half_as_many(batch)
    if _left_whole(batch, half, length) > cut_time(batch, half, length):  # other sequences may be nearly as long
        longest = min(longest, (batch.equal.chunks + half.chunks) // 2)
    return max(beyond, CHUNK * max(longest, batch.equal.chunks))


def _half_as_many(batch: Batch) -> Alike:
    return if_alike(batch.tokens, -(-batch.sequences // 2))


def _left_whole(batch: Batch, alike: Alike, length: int) -> float:
    """Of sequences that might have been cut and are not."""
    cuts = cut_count(batch.chunks, length)
    return _whole(batch, alike, cuts) + nothing_to_cut(batch, alike, length)


def _whole(batch: Batch, alike: Alike, cuts: int) -> float:
    """kernels/forward.py, where sequences are `alike` and there are places for so many cuts."""
    places, heads, value_dim = batch.sequences, batch.heads, batch.value_dim
    tile = value_tile(max(cuts, places) * heads, value_dim)
    at_once = value_tile(alike.number * heads, value_dim) < tile
    if at_once and halves(places + cuts, heads, taken=places):
        return costs.half(alike.chunks)
    full = whole_heads(places, heads, value_dim)
    if cuts == 0 and full < heads and alike.number == places:  # the last round is of halves
        return costs.forward(alike.chunks, alike.number * full, tile) + costs.half(alike.chunks)
    return costs.forward(alike.chunks, alike.number * heads * (value_dim // tile), tile)
