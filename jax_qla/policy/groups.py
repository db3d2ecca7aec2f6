"""Groups of heads that the backward pass computes one after another, so that they take the same memory in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jax_qla.kernels.common import CHUNK
from jax_qla.policy import card, costs, one_kernel, overrides
from jax_qla.policy.backward_time import three_kernels
from jax_qla.policy.batches import Alike
from jax_qla.policy.blocks import divisors, value_tile
from jax_qla.policy.one_kernel import InOne

_LITTLE_FOR_MEMORY = 0.09
"""The part of the time of the backward pass that may be given, in any case, for less memory than operands and results
(docs/performance_policy.md, "Groups of heads in the backward pass")."""

_OF_UNEVEN = 2.0
"""Times as much time may be given where only batches take it whose pieces are not alike ("Several packed sequences,
counted as one")."""

_NEARLY_FULL = 0.88
"""The part of the multiprocessors, over all rounds of blocks, that is enough where groups of heads spare memory, of
operands that are not split ("Several packed sequences, counted as one")."""


class HeadGroups(NamedTuple):
    """How the backward pass divides the value heads. Most of its memory, the states before every chunk and their
    gradients, is that of one group."""

    groups: int
    """That are computed one after the other."""
    in_one: InOne
    """Whether kernels/backward.py computes each of them (`in_one`)."""
    uneven: int
    """Groups into which each is divided again where "if balanced" pieces are not, by the kernels that then compute it:
    their gradients of states take memory of every batch, and no time of one whose pieces are."""


def head_groups(
    chunks: int,
    recurrences: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    split: bool = False,
    packed: bool = False,
    parts: int = 0,
    of_parts: int = 0,
    states: int = 0,
    with_states: bool = False,
) -> HeadGroups:
    """The groups of heads of the backward pass.

    Of a dense batch, as many as each fill the card, once or several times. Of a packed batch, whose sequences may be
    uneven so that each group waits for the longest of them, as few of these as bring temporary memory below that of
    operands and results.

    If memory still exceeds that, and three kernels compute, or may have to because pieces are not alike, more groups
    are worth some time: 9 % of it, or as large a part as memory exceeds operands and results by with one group. There
    are then as few as bring it below, of those that nearly fill the card or whose halves fill it; if none does, as many
    as that time allows. Where only pieces that are not alike take the time, the kernels for these alone divide the
    heads first (`HeadGroups.uneven`), for up to twice the time. Whole sequences that are not alike are not divided
    again.

    Args:
        chunks: of all sequences.
        recurrences: of a head: sequences, or the pieces of them that are computed side by side.
        key_heads, value_heads, key_dim, value_dim: Hk, Hv, K and V.
        split, packed: as in `in_one`.
        parts: places for pieces, or sequences, of which each has a state more than chunks.
        of_parts: states [K, V] of a head, in float32, that are in memory for pieces.
        states: such states of a head among the operands and results of both passes.
        with_states: whether the states before every chunk have been kept, of all heads, so that nothing computes them.

    Raises:
        ValueError: the environment says what cannot be.
    """
    sizes = (chunks, recurrences, key_heads, value_heads, key_dim, value_dim)
    heads = _Heads(*sizes, split=split, packed=packed, parts=parts, of_parts=of_parts, states=states)
    if (most := overrides.groups_override()) is not None:
        groups = max(n for n in divisors(key_heads) if n <= most)
        return HeadGroups(groups, heads.in_one(groups), 1)
    filling = heads.filling()
    groups = filling[-1]
    if packed:
        groups = next((n for n in filling if heads.excess(1 if with_states else n, n) <= 0), groups)
    chosen, uneven = heads.in_one(groups), 1
    of_pieces = chosen == "if balanced" and of_parts > 0
    if of_pieces and groups == 1:
        uneven = heads.in_less_memory(1, lambda n: heads.excess(1, n), _OF_UNEVEN)
    if (of_pieces or chosen == "never") and not with_states and heads.excess(groups, groups * uneven) > 0:
        groups, uneven = heads.in_less_memory(groups, lambda n: heads.excess(n, n)), 1
    return HeadGroups(groups, heads.in_one(groups), uneven)


@dataclass(frozen=True)
class _Heads:
    """The heads of a backward pass, and what groups of them take. Arguments as of `head_groups`."""

    chunks: int
    recurrences: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    split: bool
    packed: bool
    parts: int
    of_parts: int
    states: int

    @property
    def _together(self) -> int:
        """Recurrences of all value heads."""
        return self.recurrences * self.value_heads

    @cached_property
    def _recurrences(self) -> costs.Recurrences:
        """The constants by which states and their gradients are counted."""
        return costs.recurrences(self.key_dim, self.value_dim, split=self.split, several=self.packed)

    def in_one(self, groups: int) -> InOne:
        """Whether kernels/backward.py computes each of so many groups."""
        sizes = (self.recurrences, self.value_heads // groups, self.key_dim, self.value_dim)
        ratio = self.value_heads // self.key_heads
        return one_kernel.in_one(*sizes, ratio=ratio, split=self.split, packed=self.packed)

    def time(self, groups: int) -> float:
        """Microseconds of what computes states, their gradients and all others, by three kernels."""
        keys, values = self.key_heads // groups, self.value_heads // groups
        tile = value_tile(self.recurrences * values, self.value_dim)
        longest = -(-self.chunks // max(self.recurrences, 1))
        of = self._recurrences
        between = (groups - 1) * costs.GROUP + (longest * of.step_of_groups if groups > 1 else 0)
        parts = Alike(self.recurrences, longest)
        return groups * three_kernels(self.chunks, parts, keys, values, tile, self.value_dim, of) + between

    def filling(self) -> list[int]:
        """Numbers of groups, one first, that each fill the card, where what is between them is little."""
        more = [n for n in divisors(self.key_heads) if n > 1 and card.fills(self._together / n)]
        return [1, *(n for n in more if (n - 1) * costs.GROUP <= self._recurrences.little * self.time(1))]

    def _nearly_fill(self, groups: int) -> bool:
        """Whether recurrences of each of so many groups nearly fill the card, or halves of them fill it."""
        tile = value_tile(self._together // groups, self.value_dim)
        in_halves = tile < self.value_dim
        if in_halves and card.fills(2 * self._together * (self.value_dim // tile) / groups):
            return True
        return card.fills(self._together / groups, card.FULL if self.split else _NEARLY_FULL)

    @cached_property
    def _given(self) -> int:
        """Memory of operands and results of both passes, in elements of v's dtype, of which a number in float32 takes
        two."""
        rows = 4 * (self.key_heads * self.key_dim + self.value_heads * self.value_dim) + 8 * self.value_heads
        return CHUNK * self.chunks * rows + 2 * self.value_heads * self.states * self.key_dim * self.value_dim

    def excess(self, of_states: int, of_gradients: int) -> float:
        """Of temporary memory over that, in the same elements, with so many groups for states before all chunks and so
        many for their gradients. Vd, as a rule kept, is of all heads."""
        state, places = self.key_dim * self.value_dim, self.chunks + self.parts
        of_vd = CHUNK * self.chunks * self.value_dim
        in_states, in_gradients = places * state / of_states, places * state / of_gradients
        if self.split:  # into two; Vd is computed again, and behind dh is what dv leaves
            in_states, in_gradients = 2 * (in_states + of_vd / of_states), 2 * in_gradients
            in_gradients += places * CHUNK * self.value_dim / of_gradients
            of_vd = 0
        of_inverses = CHUNK * self.chunks * CHUNK * (1 + self.split)
        of_all = of_inverses + of_vd + in_states + in_gradients + 2 * self.of_parts * state
        return self.value_heads * of_all - self._given

    def in_less_memory(self, groups: int, excess: Callable[[int], float], weight: float = 1.0) -> int:
        """As few groups, no fewer than `groups`, as do not exceed the memory of operands and results, of those that are
        worth the time; or, where all exceed it, as many as these are.

        Args:
            groups: from which on.
            excess: of so many groups.
            weight: times as much time may be given as otherwise.
        """
        worth = max(self.excess(1, 1) / self._given, _LITTLE_FOR_MEMORY)
        limit = weight * worth * (self.time(1) + costs.BETWEEN_BACK)
        more = [n for n in divisors(self.key_heads) if n > groups and self._nearly_fill(n)]
        enough = [groups, *(n for n in more if self.time(n) - self.time(1) <= limit)]
        return next((n for n in enough if excess(n) <= 0), enough[-1])
