"""Microseconds of a backward pass by the pieces that its sequences are cut into, with the kernels that it then has.

As in forward_time.py, of sequences that are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jax_qla.policy import costs, one_kernel
from jax_qla.policy.batches import Alike, Batch, most_are_taken
from jax_qla.policy.blocks import key_heads_together, room_for_both, value_tile
from jax_qla.policy.forward_time import composed_in_turn, pieces_each, pieces_of, stays_whole
from jax_qla.segments import cut_count


@dataclass(frozen=True)
class BackwardTime:
    """Of a batch whose forward pass has summarised the pieces, if there are any.

    Where a case has as many sequences as the batch, or this has many places, they and their pieces are taken to be
    alike, so that kernels/backward.py computes them where blocks that are alike fill the card.
    """

    batch: Batch
    ratio: int
    """Value heads of a key head."""
    split: bool
    """Whether operands are sums of two numbers."""

    def __call__(self, alike: Alike, length: int | None) -> float:
        """Of these sequences, in pieces of `length` chunks or whole (None)."""
        if length is None or (length >= alike.chunks and not self.batch.packed):
            return max(1.0, self._whole(alike))
        return self._left_whole(alike, length) if stays_whole(self.batch, alike, length) else self._cut(alike, length)

    def _whole(self, alike: Alike) -> float:
        if self._in_one(alike, alike):
            return self._one_kernel(alike)
        return self._three_kernels(alike, max(alike.number, self.batch.sequences))

    def _left_whole(self, alike: Alike, length: int) -> float:
        """Of packed sequences that might have been cut and are not."""
        if alike.chunks <= length and self._in_one(alike, alike):
            return self._one_kernel(alike) + costs.TWO_MORE_KERNELS
        places = max(cut_count(alike.number * alike.chunks, length), self.batch.sequences)
        return self._three_kernels(alike, places) + costs.TWO_MORE_KERNELS

    def _cut(self, alike: Alike, length: int) -> float:
        pieces = pieces_of(alike, length)
        columns = self.batch.value_dim // 64
        cuts = (pieces.number - alike.number) * self.batch.heads
        blocks = costs.summary_blocks(length, cuts, columns, columns)
        width, turns = composed_in_turn(self.batch, alike, length)
        composed = costs.compose(pieces_each(alike, length) * turns, width, backward=True)
        if self._in_one(alike, pieces):
            return self._one_kernel(pieces, blocks, composed)
        kernels = self._three_kernels(pieces, max(pieces.number, self.batch.sequences))
        return kernels + self._recurrences.summaries_ahead(blocks) + composed + costs.TWO_MORE_KERNELS

    @cached_property
    def _recurrences(self) -> costs.Recurrences:
        """The constants by which states and their gradients are counted."""
        batch = self.batch
        counted_as_one = most_are_taken(batch.sequences) if one_kernel.is_measured(self.ratio) else batch.sequences <= 1
        several = batch.packed and not counted_as_one
        return costs.recurrences(batch.key_dim, batch.value_dim, split=self.split, several=several)

    def _in_one(self, alike: Alike, parts: Alike) -> bool:
        """Whether kernels/backward.py computes sequences, or `parts` of them, that are known to be alike."""
        sizes = (parts.number, self.batch.heads, self.batch.key_dim, self.batch.value_dim)
        chosen = one_kernel.in_one(*sizes, ratio=self.ratio, split=self.split, packed=False)
        known = alike.number == self.batch.sequences or not most_are_taken(self.batch.sequences)
        return chosen != "never" and known

    def _one_kernel(self, parts: Alike, blocks: costs.SummaryBlocks | None = None, composed: float = 0.0) -> float:
        """kernels/backward.py and the kernel of states; in pieces with the `blocks` that summarise these, and us of
        `compose`."""
        heads, value_dim = parts.number * self.batch.heads, self.batch.value_dim
        tile = value_tile(heads, value_dim)
        of_states = (parts.chunks, heads * (value_dim // tile), _columns(tile))
        behind = self.ratio // one_kernel.in_one_width(self.ratio) - 1
        return self._recurrences.in_one(*of_states, heads, behind, blocks, composed)

    def _three_kernels(self, parts: Alike, places: int) -> float:
        """The kernel of states, kernels/state_gradients.py and gradients.py, of which the first two have blocks for so
        many sequences or pieces."""
        heads, value_dim = self.batch.heads, self.batch.value_dim
        chunks, key_heads = parts.chunks * parts.number, heads // self.ratio
        tile = value_tile(places * heads, value_dim)
        kernels = three_kernels(chunks, parts, key_heads, heads, tile, value_dim, self._recurrences)
        return kernels + costs.BETWEEN_BACK


def three_kernels(
    chunks: int,
    parts: Alike,
    key_heads: int,
    value_heads: int,
    tile: int,
    value_dim: int,
    of: costs.Recurrences,
) -> float:
    """The kernel of states, kernels/state_gradients.py and gradients.py, without what is between them.

    Args:
        chunks: of a head, altogether.
        parts: the sequences, or pieces of them, along which states go; if they are not alike, with the longest one's
            chunks.
        key_heads, value_heads: that are computed at once.
        tile, value_dim: value columns of a block, and V.
        of: the constants of the first two.
    """
    blocks, columns = parts.number * value_heads * (value_dim // tile), _columns(tile)
    both = of.side_by_side if room_for_both(blocks) else of.one_after_the_other
    together = key_heads_together(chunks, key_heads, value_heads)
    return both(parts.chunks, blocks, columns) + costs.gradients(chunks, key_heads, value_heads, together)


def _columns(tile: int) -> int:
    """Those of the constants that a block of so many value columns is counted by."""
    return 128 if tile > 64 else 64
