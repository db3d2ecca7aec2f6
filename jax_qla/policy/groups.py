"""Groups of heads that the backward pass computes one after another, and windows of sequences, so that they take the
same memory in turn."""

from __future__ import annotations

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
"""The part of the time of the backward pass that may be given for less memory than operands and results, but no more
than four times as large a part as what exceeds these (docs/performance_policy.md, "Groups of heads in the backward
pass")."""


class HeadGroups(NamedTuple):
    """How the backward pass divides the value heads and the sequences. Most of its memory, the states before every
    chunk and their gradients, is that of one group, and the gradients those of one window."""

    groups: int
    """Of heads, that are computed one after the other."""
    in_one: InOne
    """Whether kernels/backward.py computes each of them (`in_one`)."""
    windows: int
    """Of every sequence, where kernels/state_gradients.py and gradients.py compute it: 2 if these take the later half
    of its chunks and then the earlier one (kernels/state_gradients.py)."""


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
    sequences: int = 0,
    of_parts: int = 0,
    states: int = 0,
    with_states: bool = False,
) -> HeadGroups:
    """The groups of heads of the backward pass, and the windows.

    Of a dense batch, as many groups as each fill the card, once or several times. Of a packed batch, whose sequences
    may be uneven so that each group waits for the longest of them, as few of these as bring temporary memory below that
    of operands and results.

    If memory still exceeds that, and three kernels compute, or may have to because sequences or pieces are not alike,
    two windows, or more groups of those that nearly fill the card or whose halves fill it, or both are worth some time:
    as large a part of it as memory exceeds operands and results by with one group, or up to four times as large a part
    if that is no more than 9 %. It is then the way that takes the least time of those that bring it below; if none
    does, the one that spares the most memory for its time.

    Args:
        chunks: of all sequences.
        recurrences: of a head: sequences, or the pieces of them that are computed side by side.
        key_heads, value_heads, key_dim, value_dim: Hk, Hv, K and V.
        split, packed: as in `in_one`.
        parts: places for pieces, or sequences, of which each has a state more than chunks.
        sequences: of which each has a gradient that goes from window to window, but where it goes between pieces.
        of_parts: states [K, V] of a head, in float32, that are in memory for pieces.
        states: such states of a head among the operands and results of both passes.
        with_states: whether the states before every chunk have been kept, of all heads, so that nothing computes them.

    Raises:
        ValueError: the environment says what cannot be.
    """
    sizes = (chunks, recurrences, key_heads, value_heads, key_dim, value_dim)
    of_memory = {"parts": parts, "sequences": sequences, "of_parts": of_parts, "states": states}
    heads = _Heads(*sizes, split=split, packed=packed, **of_memory, with_states=with_states)
    if (most := overrides.groups_override()) is not None:
        groups = max(n for n in divisors(key_heads) if n <= most)
        return HeadGroups(groups, heads.in_one(groups), 1)
    filling = heads.filling()
    groups, windows = filling[-1], 1
    if packed:
        groups = next((n for n in filling if heads.excess(n) <= 0), groups)
    chosen = heads.in_one(groups)
    if chosen != "always" and heads.excess(groups) > 0:
        may_divide = not with_states and (chosen == "never" or of_parts > 0)
        groups, windows = heads.in_less_memory(groups, may_divide=may_divide)
    return HeadGroups(groups, heads.in_one(groups), windows)


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
    sequences: int
    of_parts: int
    states: int
    with_states: bool

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

    def time(self, groups: int, windows: int = 1) -> float:
        """Microseconds of what computes states, their gradients and all others, by three kernels."""
        keys, values = self.key_heads // groups, self.value_heads // groups
        tile = value_tile(self.recurrences * values, self.value_dim)
        longest = -(-self.chunks // max(self.recurrences, 1))
        of = self._recurrences
        between = (groups - 1) * costs.GROUP + (longest * of.step_of_groups if groups > 1 else 0)
        parts = Alike(self.recurrences, longest)
        found = groups * three_kernels(self.chunks, parts, keys, values, tile, self.value_dim, of) + between
        return found if windows == 1 else (1 + costs.PART_OF_WINDOWS) * found + groups * costs.WINDOWS

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
        return card.fills(self._together / groups, card.FULL if self.split else card.NEARLY_FULL)

    @cached_property
    def _given(self) -> int:
        """Memory of operands and results of both passes, in elements of v's dtype, of which a number in float32 takes
        two."""
        rows = 4 * (self.key_heads * self.key_dim + self.value_heads * self.value_dim) + 8 * self.value_heads
        return CHUNK * self.chunks * rows + 2 * self.value_heads * self.states * self.key_dim * self.value_dim

    def excess(self, groups: int, windows: int = 1) -> float:
        """Of temporary memory over that, in the same elements. Vd, as a rule kept, is of all heads, and so are kept
        states before all chunks."""
        state, places = self.key_dim * self.value_dim, self.chunks + self.parts
        of_vd, of_states = CHUNK * self.chunks * self.value_dim, 1 if self.with_states else groups
        of_window = places if windows == 1 else self.chunks // 2 + self.parts
        in_states, in_gradients = places * state / of_states, of_window * state / groups
        if self.split:  # into two; Vd is computed again, and behind dh is what dv leaves
            in_states, in_gradients = 2 * (in_states + of_vd / of_states), 2 * in_gradients
            in_gradients += of_window * CHUNK * self.value_dim / groups
            of_vd = 0
        of_inverses = CHUNK * self.chunks * CHUNK * (1 + self.split)
        carried = self.sequences if windows > 1 else 0
        of_all = of_inverses + of_vd + in_states + in_gradients + 2 * (self.of_parts + carried) * state
        return self.value_heads * of_all - self._given

    def in_less_memory(self, groups: int, *, may_divide: bool) -> tuple[int, int]:
        """Groups, at least `groups`, and more only if it `may_divide` them, and windows, as `head_groups` says."""
        exceeds = self.excess(1) / self._given
        worth = max(exceeds, min(4 * exceeds, _LITTLE_FOR_MEMORY))
        limit = worth * (self.time(1) + costs.BETWEEN_BACK)
        more = [n for n in divisors(self.key_heads) if n > groups and self._nearly_fill(n)] if may_divide else []
        ways = [(n, windows) for n in (groups, *more) for windows in (1, 2)]
        worth_it = [way for way in ways if self.time(*way) - self.time(1) <= limit]
        enough = [way for way in worth_it if self.excess(*way) <= 0]
        if enough:
            return min(enough, key=lambda way: self.time(*way))

        def given_and_spared(way: tuple[int, int]) -> float:
            """Parts of the time that it takes more and of the memory that it takes less, one for the other."""
            time, memory = self.time(1) + costs.BETWEEN_BACK, self._given + self.excess(1)
            return (self.time(*way) - self.time(1)) / time + (self.excess(*way) - self.excess(1)) / memory

        return min([(groups, 1), *worth_it], key=given_and_spared)
