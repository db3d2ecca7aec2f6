"""Shapes of blocks: how many value columns and heads each kernel's blocks have, and where the device puts them.

A block of a recurrent kernel has a multiprocessor for as many steps as its sequence has chunks. So its shape is chosen
to let as many multiprocessors as possible work until the end.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from jax_qla.kernels.compose import COLUMNS
from jax_qla.policy import card, costs
from jax_qla.policy.batches import most_are_taken

_LONG = 1.5
"""Times what a multiprocessor has to do if all do as much: of what takes longer the block becomes two of half as many
columns. The best of random batches in a simulation (docs/performance_policy.md, "Long sequences in halves of their
columns"). The kernel goes by it too, where it finds whether halves of all sequences run at once: then `Halves.share`
times their number is at most 64 _LONG / 2."""

_LONG_CHUNKS = 16
"""Chunks of a sequence from which on its halves are worth a block more (docs/performance_versions.md)."""

_HALVED_AMONG = 32
"""Sequences among which each block looks for long ones: as many as a warp has lanes."""

_SHORT_ROWS = 512
"""Rows of a sequence, on average, up to which copies of states are 5 % or more of the bytes of a backward pass
(docs/performance_policy.md, "What leaves sooner")."""

_CUT_AT_ONCE = 2
"""Sequences of a packed batch that are supposed to be cut, at the most (docs/performance_policy.md, "Fewer blocks,
shorter pieces")."""

_PREPARED_ALONE = 2
"""Blocks of kernels/prepare.py that a multiprocessor gets up to which they take less time with half as many heads each
(docs/performance_versions.md)."""

_LAUNCHED_TWICE = 12
"""Chunks of a piece from which on it is worth a launch more of kernels/summaries.py that its blocks share no
multiprocessor, if gates decide about it (docs/performance_policy.md, "Blocks that share a multiprocessor")."""


def value_tile(recurrences: int, value_dim: int) -> int:
    """Value columns of a block of the recurrent kernels.

    With few recurrences (heads times sequences) every multiprocessor that gets half a head saves time; with many,
    sharing a head's keys and Q K^T between two warpgroups of one block saves more.
    """
    return 64 if 2 * recurrences <= card.MULTIPROCESSORS else value_dim


def room_for_both(blocks: int) -> bool:
    """Whether so many blocks of kernels/states.py and as many of state_gradients.py run at once."""
    return 2 * blocks <= card.MULTIPROCESSORS


def whole_heads(sequences: int, heads: int, value_dim: int) -> int:
    """Heads whose blocks of the forward kernel have all value columns; those of the others have 64 each.

    Blocks of all columns fill the card a whole number of times. Where halves of the rest all run at once, the last
    round takes the shorter time of a half.

    Args:
        sequences: number of sequences.
        heads: value heads.
        value_dim: V.
    """
    if value_dim <= 64 or value_tile(sequences * heads, value_dim) == 64:
        return heads
    full = sequences * heads // card.MULTIPROCESSORS * card.MULTIPROCESSORS // sequences
    halves = sequences * (heads - full) * (value_dim // 64)
    return full if full > 0 and halves <= card.MULTIPROCESSORS else heads


class Halves(NamedTuple):
    """Which of a packed batch's sequences kernels/forward.py computes in halves of their value columns: long ones, or,
    where none is and all are alike, those of a last round of blocks."""

    share: int
    """64ths of all chunks, of which a long sequence has more (and more than 5/4 of the mean, unless all halves run at
    once)."""
    least: int
    """Chunks that it has at the least: a block begins and ends in the time of four."""
    halved: int
    """Sequences that may be halved, at most."""


NO_HALVES = Halves(0, 0, 0)
"""Where all blocks have as many value columns."""


def halves(sequences: int, heads: int, *, taken: int | None = None) -> Halves | None:
    """Which of several packed sequences, or of their pieces, are to be computed in halves where blocks have 128 value
    columns, or None: none.

    Where few sequences are long, or most are empty, the longest is what is waited for, and its halves take two thirds
    of the time. Long is what takes more than one and a half times what a multiprocessor has to do if all do as much.
    Where sequences are alike, and blocks come in rounds, it is a last round that is waited for, if it leaves half of
    the card idle or more. Which sequences are halved, the device finds out. That costs every block some 0.5 us, so it
    is left out where sequences are few, so that most are taken, it is supposed, and fill the card more than once: then
    none is waited for.

    Args:
        sequences: places for sequences, or pieces.
        heads: value heads.
        taken: places of few that are supposed to be; all if it is None.
    """
    share = math.ceil(64 * _LONG * heads / card.MULTIPROCESSORS)
    halved = min(sequences - 1, -(-64 // share) - 1)
    full = most_are_taken(sequences) and (taken or sequences) * heads > card.MULTIPROCESSORS
    return Halves(share, _LONG_CHUNKS, halved) if halved > 0 and sequences <= _HALVED_AMONG and not full else None


def gradients_in_place(tokens: int, sequences: int) -> bool:
    """Whether gradients of a packed batch's initial states are to take the memory of those of final states, where both
    are wanted. Then nothing is copied for places without a sequence, of which batches of so short ones may have many.
    But `compose` keeps those of sequences that are cut elsewhere, and XLA all if it needs them afterwards.

    Args:
        tokens, sequences: of the batch.
    """
    return not most_are_taken(sequences) and tokens <= _SHORT_ROWS * sequences


def neighbours(kernel: str, value_tile: int, value_dim: int) -> int:
    """Blocks of a recurrence that the device is to put side by side (`launch.Step.neighbours`), because they load the
    same: otherwise it spreads consecutive blocks over its parts, and each part fetches for itself.

    Halves of heads in `states`, beside those in `state_gradients`, are 10 to 14 % faster for it, whole heads in
    `forward`, which share key heads, 1 to 2 %; of other recurrences nothing was gained (docs/performance_versions.md).
    `states_from_vd` is taken to be like `states`.

    Args:
        kernel: module of jax_qla.kernels.
        value_tile, value_dim: value columns of a block, and V.
    """
    halves = value_tile < value_dim
    return 2 if kernel in (("states", "states_from_vd", "state_gradients") if halves else ("forward",)) else 1


class Summarised(NamedTuple):
    """How blocks of kernels/summaries.py share multiprocessors."""

    sharing: Literal["alone", "shared", "either"]
    """Whether each has one to itself, two may share one, or the device finds out: then the kernel is launched twice."""
    slow: int
    """Heads that do not decay, one at the least, up to which blocks should have one each."""


def summarised(
    responses: int,
    transitions: int,
    length: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    split: bool = False,
) -> Summarised:
    """How blocks of kernels/summaries.py are to share multiprocessors.

    Two that share one take 1.38 times as long as one. So where the long ones, of heads that do not decay, are so few
    that each can have one to itself, and all others end soon enough, they should.

    Args:
        responses, transitions: pieces of which N, and M, may be wanted.
        length: chunks of a piece.
        heads: value heads, of which a quarter is supposed not to decay.
        key_dim, value_dim: K and V.
        split: whether operands are sums of two numbers. Of such a multiprocessor has room for one block where K is 128;
            of two where it is 64, for which nothing was measured.
    """
    quick = responses * value_dim // 64
    slow = quick + transitions * key_dim // 64
    if split or heads * slow <= card.MULTIPROCESSORS:
        return Summarised("alone", heads)

    def end_sooner_alone(count: int) -> bool:
        """Whether all blocks do, if so many heads do not decay."""
        blocks = count * slow, (heads - count) * quick
        alone, last = float(length), min(length, costs.FORGETFUL)
        if sum(blocks) > card.MULTIPROCESSORS:  # short ones come one after the other, and the last may begin late
            steps = blocks[0] * length + blocks[1] * last
            alone = max(alone, steps / card.MULTIPROCESSORS + last)
        return blocks[0] <= card.MULTIPROCESSORS and alone <= costs.SHARED * length

    most = max((n for n in range(1, heads + 1) if end_sooner_alone(n)), default=0)
    if 4 * most < heads:
        return Summarised("shared", most)
    return Summarised("alone" if length < _LAUNCHED_TWICE else "either", most)


class Composed(NamedTuple):
    """Blocks of kernels/compose.py. Those of a value head and some value columns are `together`, and take the sequences
    that are cut in turn, each of them every `together`-th."""

    columns: int
    """Value columns of a block."""
    together: int
    """Sequences that are composed at once."""


def composed(chains: int, heads: int, value_dim: int, *, packed: bool) -> Composed:
    """As few columns, for the shorter step, as let all blocks run at once.

    Of a packed batch, whose lengths are known on the device only, no more than two sequences are supposed to be cut, or
    as many as run at once: the more they are, the fewer pieces each has.

    Args:
        chains: sequences that may be cut.
        heads, value_dim: value heads, and V.
        packed: whether it may be fewer.
    """
    most = min(chains, _CUT_AT_ONCE) if packed else chains

    def blocks(columns: int) -> int:
        return heads * -(-value_dim // columns)

    columns = next((n for n in COLUMNS if most * blocks(n) <= card.MULTIPROCESSORS), COLUMNS[-1])
    return Composed(columns, max(most, min(chains, card.MULTIPROCESSORS // blocks(columns))))


def prepared_together(slots: int, key_heads: int, value_heads: int, *, chunks: int = 0, beside: int = 0) -> int:
    """Value heads that a block of kernels/prepare.py computes: two, or one where each has a key head of its own, where
    blocks are then so few that each has much of a multiprocessor; else four, or two if these are so few.

    Where blocks of kernels/forward.py begin beside them that need a multiprocessor each, as many heads as leave one to
    each of these, if that is possible: a block that finds none begins when others have ended.

    Args:
        slots: of chunks (`segments.slot_count`), each of which has blocks.
        key_heads, value_heads: Hk and Hv.
        chunks: slots that have one, if sequences are alike. Blocks of the others leave at once.
        beside: blocks of kernels/forward.py that have 128 value columns, and so all registers of a multiprocessor; 0
            where they wait for more than `prepare`.
    """
    numbers = (1, 2, 4) if key_heads == value_heads else (2, 4)

    def blocks(of: int, heads: int) -> int:
        return of * -(-value_heads // heads)

    for heads in numbers:
        if beside > 0 and beside + blocks(chunks, heads) < card.MULTIPROCESSORS:
            return heads
    return next((n for n in numbers if blocks(slots, n) <= _PREPARED_ALONE * card.MULTIPROCESSORS), 4)


def measured_by_forward(ratio: int, value_tile: int) -> bool:
    """Whether kernels/forward.py finds the lengths of queries that are to be normalised, anew for every value head, and
    not kernels/prepare.py, which must read them for it.

    In blocks of 128 value columns normalised forward passes take 1 to 4 % less time with the first, and 3 to 11 % less
    where each value head has a key head of its own, in blocks of 64 too. Where heads share one, it delays the state of
    these: from 1 % less to 7 % more (docs/performance_policy.md, "What stands before the rule").

    Args:
        ratio: value heads of a key head.
        value_tile: value columns of a block of kernels/forward.py.
    """
    return ratio == 1 or value_tile == 128


def key_heads_together(chunks: int, key_heads: int, value_heads: int) -> int:
    """Key heads of one chunk that a block of kernels/gradients.py takes one after the other.

    A block begins with a wait, so blocks should be few; but they should end together, and the last of them is to have
    as many heads as the others.

    Args:
        chunks: of all sequences.
        key_heads, value_heads: of all of them.
    """
    return min(divisors(key_heads), key=lambda n: costs.gradients(chunks, key_heads, value_heads, n))


def divisors(n: int) -> list[int]:
    """All of a positive integer, from 1 on."""
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]
