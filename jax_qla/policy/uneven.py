"""Both passes of a packed batch whose sequences would keep a card busy if they were alike: how they are cut where they
are not, and what comes first in the backward pass.

Sequences that are alike stay whole then. Of uneven ones the longest keeps few multiprocessors busy when all others have
ended, in both passes, until it takes longer than all tokens in pieces. Measured are batches of 8 and of 16 value heads
(docs/performance_policy.md, "Uneven sequences in both passes").
"""

from __future__ import annotations

from jax_qla.kernels.common import CHUNK
from jax_qla.policy import card
from jax_qla.policy.batches import Batch, most_are_taken
from jax_qla.policy.forward_time import cut_beyond

_HEADS, _MOST_PLACES = range(8, 17), 32
"""Value heads with which pieces were measured, and places for sequences up to which they were."""

_MOST_OF_MEAN = 2
"""Of the sequences' mean length, that a piece has at the most."""

_SHARED, _SHORT = 3, 32
"""Value heads of a key head from which on, and chunks of the sequences' mean length below which, pieces that are not
much longer than the sequences have so much memory beside operands and results that the backward pass would have to
spare as much (groups.py), which takes longer than they gain."""

_PIECES_WHOLE = 2.25
"""Pieces that a sequence has which takes as long whole, in a batch that is not cut, as all tokens do in pieces."""

_OF_UNEVEN = 1.25
"""Of the sequences' mean length, that a batch of many lengths must be allowed to have before it is cut, for it to be
supposed that it may not be."""


def _keeps_busy(batch: Batch) -> bool:
    """Whether sequences that are alike nearly fill the card, in the first round if there are several."""
    return batch.several and batch.sequences * batch.heads >= card.NEARLY_FULL * card.MULTIPROCESSORS


def _is_measured(batch: Batch) -> bool:
    return _keeps_busy(batch) and batch.heads in _HEADS and batch.sequences <= _MOST_PLACES


def piece_length(batch: Batch, ratio: int) -> int | None:
    """Chunks of a piece of both passes, with `ratio` value heads of a key head: as many pieces as multiprocessors have
    heads, but none much longer than the sequences are. None of other batches, and where that would take too much
    memory."""
    if not _is_measured(batch):
        return None
    filling, longest = -(-batch.chunks // (card.MULTIPROCESSORS // batch.heads)), _MOST_OF_MEAN * batch.equal.chunks
    if longest < filling and ratio >= _SHARED and batch.equal.chunks < _SHORT:
        return None
    return min(filling, longest)


def cut_beyond_in_both(rows: int, tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int) -> int:
    """As `cut_beyond`, of pieces of both passes, whoever chose them.

    Args:
        rows: of a piece.
        tokens, sequences, heads, key_dim, value_dim: as in `piece_rows`.
    """
    beyond = cut_beyond(rows, tokens, sequences, heads, key_dim, value_dim)
    batch = Batch(tokens, sequences, heads, key_dim, value_dim, packed=True)
    if not _is_measured(batch):
        return beyond
    longest = int(_PIECES_WHOLE * rows)
    return longest if most_are_taken(sequences) else min(beyond, longest)


def composed_first(beyond: int, tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int) -> bool:
    """Whether the backward pass computes what leaves the pieces (kernels/compose.py) before the states before every
    chunk, of a packed batch that is cut `beyond` so many rows; else behind them.

    Behind them its blocks do not keep from memory those of the states. But state_gradients.py, which begins behind
    both, then begins late where nothing is cut. Arguments as of `cut_beyond_in_both`.
    """
    batch = Batch(tokens, sequences, heads, key_dim, value_dim, packed=True)
    return _keeps_busy(batch) and beyond >= _OF_UNEVEN * batch.equal.chunks * CHUNK
