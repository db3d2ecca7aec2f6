"""Which form of the kernels runs: value columns and heads of a block, and pieces that one card computes side by side.

Everything here follows from static shapes. A block of the recurrent kernels owns a multiprocessor for as many steps as
its sequence has chunks, so few heads times sequences leave a card idle. Two ways out, one after the other: blocks of 64
value columns, for all heads, in a last round (`whole_heads`) or for the longest sequences (`halves`), and cutting
sequences into pieces (jax_qla/kernels/summaries.py), which costs a summary of every piece but the last. `piece_rows`
weighs them by a model of a few measured numbers; `backward_rows` says whether the backward pass cuts them too, and
`kept_rows` how both passes of a call whose gradients are wanted are cut. A shard of a sequence must be summarised
anyway, and is always cut: `shard_cut`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax_qla.kernels.common import CHUNK, ROUND
from jax_qla.kernels.compose import COLUMNS
from jax_qla.segments import cut_count, piece_count

MULTIPROCESSORS = ROUND
"""Of an H100 or H200 SXM."""

# Measured on an H200, microseconds (docs/performance_policy.md).
_STEP = {64: 1.4, 128: 2.2}
"""A chunk step of the forward kernel by value columns of its block; one block runs on a multiprocessor."""
_ADJOINT_STEP = 1.9
"""A chunk step of kernels/adjoint_summaries.py, of whose blocks a multiprocessor runs one."""
_SUMMARY_STEP, _SHARED_STEP = 1.1, 1.5
"""A chunk step of kernels/summaries.py: of the longest blocks, and of two that share a multiprocessor all the time."""
_COMPOSE_STEP, _COMPOSE_STEP_BACK = {16: 0.9, 32: 1.5, 64: 2.3}, {16: 1.2, 32: 1.9, 64: 2.7}
"""One piece in kernels/compose.py by value columns of its block, beside other kernels and alone."""
_PREPARED_ALONE = 2
"""Blocks of kernels/prepare.py of a multiprocessor up to which they take less time with half as many heads each."""
_PREPARE, _PREPARED = 8.0, 4.6e-3
"""All of kernels/prepare.py, which precedes, at the least, and a chunk and value head of it."""
_FEW_LONG = 100
"""Long blocks of kernels/summaries.py up to which each takes less time with a multiprocessor to itself."""
_BLOCK = 1.0
"""Reading and writing the states of a block."""
_STATES = 0.15
"""Moving what is kept of a piece and head: response, transition, the states that enter and leave it."""
_STEP_IN_ONE, _ROUND = 7.6, 40.0
"""A chunk step of kernels/backward.py; from one round of its blocks and of those of `states` to the next, together."""
_BETWEEN_BACK, _COMPOSED = 25.0, 6.0
"""Three kernels, `states` to `gradients`, beside what their blocks take; from the end of `states` to that of `compose`,
which both follow `adjoint_summaries`."""
_GAIN, _GAIN_OF_SEVERAL = 0.03, 0.06
"""Of both passes of several sequences, where the forward pass is cut for the backward pass's sake, at the least: of a
dense batch, and of a packed one."""
_GAIN_OF_FITTED = 0.03
"""Of a forward pass of several packed sequences, where pieces are not of 2^n rows but fill the card if these are alike,
at the least."""
_HEAD, _FIRST_HEAD = 6.1, 1.0
"""A value head of one chunk in kernels/gradients.py, and what a block's first one takes longer."""
_GROUP = 15.0
"""From the end of one group of heads to the next one's full card."""
_LITTLE_FOR_MEMORY = 0.09
"""Of the time of the backward pass, what less memory than operands and results is worth in any case, ..."""
_OF_UNEVEN = 2.0
"""... times what it is worth where only batches whose pieces are not alike take that time."""
_BETWEEN = 3.0
"""From one of the kernels of pieces to the next, together."""
_OVERHEAD = 8.0
"""Two more kernels of the backward pass, ..."""
_NOT_CUT = 6.0
"""... and those of a forward pass that finds no sequence long enough to be cut, beside their blocks, ..."""
_EMPTY = 0.002
"""... each of kernels/summaries.py or compose.py, which find nothing to do."""
_SHORT = 6
"""Chunks that are summarised of a head that decays."""

_ROWS_OF_MEMORY = 512
"""Tokens for every cut, or piece of a dense batch, at the least: what is kept of it and a head then is no more than its
part of v and o."""

_ROWS_IN_ONE = 768
"""Rows of a piece from which on both passes are cut so that kernels/backward.py fills the card: of shorter ones what is
kept takes the memory that it spares."""

_ROWS_COMPOSED = 512
"""Tokens of a sequence that take as long as `compose` of a chain of pieces and what goes before and after it."""

_LENGTHS = tuple(n << shift for shift in range(10) for n in (8, 12))
"""Chunks of a piece that are considered, ..."""
_PIECES = range(2, 34)
"""... and equal pieces of a row, or of all tokens of a packed batch."""

OVERRIDE = "JAX_QLA_PIECE_ROWS"
"""Environment variable, read when a call that does not say it itself is traced: rows of a piece (a multiple of 64), or
0 for no pieces."""

GROUPS_OVERRIDE = "JAX_QLA_HEAD_GROUPS"
"""Environment variable, read when a backward pass is traced: groups of heads that it computes one after another; if so
many do not divide its key heads, the next number below that does."""

IN_ONE_OVERRIDE = "JAX_QLA_IN_ONE"
"""Environment variable, read when a backward pass is traced: whether kernels/backward.py computes it always (1), where
it can, or never (0)."""

MORE_THAN_HALF = 116 * 1024
"""Bytes of shared memory of which a multiprocessor has no two."""

_IN_ONE_LIMITS = {1: 80, 2: 72, 4: 68}
"""Value heads of a key head with which kernels/backward.py computes anything, and how long its blocks of uneven
sequences may take, in 64ths of what they took if their work could be divided at will. With three, whose blocks are no
clusters, it takes 1.1 times as long as three kernels, and with eight, whose dq and dk it rounds eight times and sums in
four steps, errors of dk exceed 5e-3."""

_FULL, _NEARLY_FULL = 0.95, 0.88
"""Of the multiprocessors in all rounds of blocks, so many are a full card, or nearly one, which is enough where groups
of heads spare memory (measured of operands that are not split)."""

_LONG = 1.5
"""Of what a multiprocessor has to do if all do as much, what one block may take before it becomes two of half as many
columns: the best of random batches by a simulation (docs/performance_policy.md). The kernel goes by it too, where it
finds whether halves of all sequences run at once: then `Halves.share` times their number is at most 64 _LONG / 2."""

_LONG_CHUNKS = 16
"""Chunks of a sequence from which on its halves are worth a block more."""

_HALVED_AMONG = 32
"""Sequences among which each block looks for long ones: as many as a warp has lanes."""

ASKED_AMONG = 256
"""Sequences up to which every block may find out for itself whether any is cut (kernels/uncut.py): two loads a lane."""

_ALL_TAKEN = 8
"""Places for sequences, of which it is supposed that most are taken."""

_SHORT_ROWS = 512
"""Rows of a sequence, on average, up to which copies of states are 5 % or more of the bytes of a backward pass."""

_CUT_AT_ONCE = 2
"""Sequences of a packed batch that are supposed to be cut, at the most."""

_ONE_OF_FEW, _ONE_OF_MANY = 0.12, 0.25
"""What the case counts that one of a packed batch's sequences has nearly all tokens, where all places being taken by
equal ones counts one."""

_UNLIKE = 1.125
"""Sequences that are supposed to be alike differ by so much."""

_ROUNDS_OF_ANY = 2
"""Rounds of blocks from which on a card may be busy to the end whatever the sequences' lengths."""

_LIMIT_OF_ROUNDS = 70
"""As `_IN_ONE_LIMITS`, of as many rounds of the longest block as there are, which is nearly what blocks take."""


class _Recurrences(NamedTuple):
    """Microseconds of what computes the states before all chunks and of kernels/state_gradients.py, and what was fitted
    with them. By value columns of a block where it is a dictionary."""

    step: Mapping[int, float]
    """A chunk step of a round of blocks of either, on average, at the least, ..."""
    both: Mapping[int, float]
    """... of both side by side, where there is room, at the least, ..."""
    block: Mapping[int, float]
    """... and of each block that runs at once: with many, memory is what they wait for."""
    states: float
    """The part of a step that is the states'."""
    share: float | None
    """Of what blocks of kernels/adjoint_summaries.py take of the card, what is not beside the states; None: all of it,
    and the longest block at the least, ..."""
    share_in_one: float
    """... and where kernels/backward.py follows."""
    before_one: float
    """What else precedes kernels/backward.py."""
    groups: float
    """A chunk step of several groups of heads, together, longer than that of one."""
    little: float
    """Of the time of all, what the ends of groups may be."""


_OF_VD = _Recurrences(
    step={64: 1.2, 128: 1.4},
    both={64: 1.25, 128: 2.0},
    block={64: 0.0117, 128: 0.0208},
    states=0.76,
    share=0.5,
    share_in_one=2.9,
    before_one=15.0,
    groups=0.35,
    little=0.022,
)
"""With kernels/states_from_vd.py, K = V = 128."""
_OF_STATES = _Recurrences(
    step={64: 1.75, 128: 3.2},
    both={64: 1.65, 128: 4.3},
    block={64: 0.0, 128: 0.0},
    states=1.0,
    share=None,
    share_in_one=0.0,
    before_one=0.0,
    groups=0.6,
    little=0.02,
)
"""With kernels/states.py; and what has other sizes or split operands is chosen as if it were so, as are groups of heads
of several packed sequences, and pieces of more than a few of these, or of any where no one kernel computes the
gradients: by `_OF_VD` some took 1.02 to 1.20 times as long (docs/performance_policy.md)."""


def _recurrences(key_dim: int, value_dim: int, *, split: bool, several: bool) -> _Recurrences:
    """Of operands so split, or not, and of several packed sequences, or none that count as such."""
    return _OF_VD if key_dim == value_dim == 128 and not split and not several else _OF_STATES


InOne = Literal["never", "if balanced", "always"]
"""Whether kernels/backward.py computes a backward pass; "if balanced": if the device finds that its sequences keep all
multiprocessors busy until nearly the end."""


class Cut(NamedTuple):
    """How a shard of a sequence is cut."""

    rows: int
    """Of a piece, a multiple of 64."""
    pieces: int
    """Their number."""


def value_tile(recurrences: int, value_dim: int) -> int:
    """Value columns of a block of the recurrent kernels.

    With few recurrences (heads times sequences) every multiprocessor that gets half a head saves time; with many,
    sharing a head's keys and Q K^T between two warpgroups of one block saves more.
    """
    return 64 if 2 * recurrences <= MULTIPROCESSORS else value_dim


def room_for_both(blocks: int) -> bool:
    """Whether so many blocks of kernels/states.py and as many of state_gradients.py run at once."""
    return 2 * blocks <= MULTIPROCESSORS


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
    full = sequences * heads // MULTIPROCESSORS * MULTIPROCESSORS // sequences
    halves = sequences * (heads - full) * (value_dim // 64)
    return full if full > 0 and halves <= MULTIPROCESSORS else heads


class Halves(NamedTuple):
    """Long ones of a packed batch's sequences, which kernels/forward.py computes in halves of their value columns."""

    share: int
    """64ths of all chunks, of which a long sequence has more (and more than 5/4 of the mean, unless all halves run at
    once)."""
    least: int
    """Chunks that it has at the least: a block begins and ends in the time of four."""
    halved: int
    """Sequences that may be long, at most."""


NO_HALVES = Halves(0, 0, 0)
"""Where all blocks have as many value columns."""


def halves(sequences: int, heads: int) -> Halves | None:
    """Which of several packed sequences, or of their pieces, are to be computed in halves where blocks have 128 value
    columns, or None: none.

    Where few sequences are long, or most are empty, the longest is what is waited for, and its halves take two thirds
    of the time. Long is what takes more than one and a half times what a multiprocessor has to do if all do as much;
    which sequences are, the device finds out. That costs every block some 0.5 us, so it is left out where sequences are
    few, so that most are taken, it is supposed, and fill the card more than once: then none is waited for.

    Args:
        sequences: places for sequences, or pieces.
        heads: value heads.
    """
    share = math.ceil(64 * _LONG * heads / MULTIPROCESSORS)
    halved = min(sequences - 1, -(-64 // share) - 1)
    full = sequences <= _ALL_TAKEN and sequences * heads > MULTIPROCESSORS
    return Halves(share, _LONG_CHUNKS, halved) if halved > 0 and sequences <= _HALVED_AMONG and not full else None


def gradients_in_place(tokens: int, sequences: int) -> bool:
    """Whether gradients of a packed batch's initial states are to take the memory of those of final states, where both
    are wanted. Then nothing is copied for places without a sequence, of which batches of so short ones may have many.
    But `compose` keeps those of sequences that are cut elsewhere, and XLA all if it needs them afterwards.

    Args:
        tokens, sequences: of the batch.
    """
    return sequences > _ALL_TAKEN and tokens <= _SHORT_ROWS * sequences


def neighbours(kernel: str, value_tile: int, value_dim: int) -> int:
    """Blocks of a recurrence that the device is to put side by side (`launch.Step.neighbours`), because they load the
    same: otherwise it spreads consecutive blocks over its parts, and each part fetches for itself.

    Halves of heads in `states`, beside those in `state_gradients`, are 10 to 14 % faster for it, whole heads in
    `forward`, which share key heads, 1 to 2 %; of other recurrences nothing was gained (docs/performance_policy.md).
    `states_from_vd` is taken to be like `states`.

    Args:
        kernel: module of jax_qla.kernels.
        value_tile, value_dim: value columns of a block, and V.
    """
    halves = value_tile < value_dim
    return 2 if kernel in (("states", "states_from_vd", "state_gradients") if halves else ("forward",)) else 1


def summarised_alone(responses: int, transitions: int, heads: int, key_dim: int, value_dim: int) -> bool:
    """Whether each block of kernels/summaries.py is to have a multiprocessor to itself.

    Two that share one take 1.4 times as long as one. Where the long ones, of heads that do not decay, are so few that
    each can have one for itself, they should: they are what is waited for. (If no head decays, there are four times as
    many as expected here; by count a call then takes 6 to 8 % longer than if they shared.)

    Args:
        responses, transitions: pieces of which N, and M, may be wanted.
        heads: value heads, of which a quarter is taken not to decay.
        key_dim, value_dim: K and V.
    """
    return heads / 4 * (responses * value_dim + transitions * key_dim) / 64 <= _FEW_LONG


class Composed(NamedTuple):
    """Blocks of kernels/compose.py."""

    columns: int
    """Value columns of each, ..."""
    together: int
    """... and sequences that are cut, of which each has a block for every head and so many columns. A block takes every
    `together`-th of them."""


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

    columns = next((n for n in COLUMNS if most * blocks(n) <= MULTIPROCESSORS), COLUMNS[-1])
    return Composed(columns, max(most, min(chains, MULTIPROCESSORS // blocks(columns))))


def prepared_together(slots: int, key_heads: int, value_heads: int) -> int:
    """Value heads that a block of kernels/prepare.py computes: two, or one where each has a key head of its own, where
    blocks are then so few that each has much of a multiprocessor; else four, or two if these are so few.

    Args:
        slots: of chunks (`segments.slot_count`), each of which has blocks.
        key_heads, value_heads: Hk and Hv.
    """
    few = (1, 2) if key_heads == value_heads else (2,)
    return next((n for n in few if slots * -(-value_heads // n) <= _PREPARED_ALONE * MULTIPROCESSORS), 4)


def measured_by_forward(ratio: int) -> bool:
    """Whether kernels/forward.py finds the lengths of queries that are to be normalised, by a product more of every
    value head, and not kernels/prepare.py, which must read them for it.

    Where each value head has a key head of its own, forward passes take 7 to 10 % less time with the first in blocks of
    128 value columns, and 2 to 4 % less in blocks of 64; where two share a key head as much as with the second, where
    three or four do up to 8 % more (docs/performance_policy.md, "What stands before the rule").

    Args:
        ratio: value heads of a key head.
    """
    return ratio == 1


def key_heads_together(chunks: int, key_heads: int, value_heads: int) -> int:
    """Key heads of one chunk that a block of kernels/gradients.py takes one after the other.

    A block begins with a wait, so blocks should be few; but they should end together, and the last of them is to have
    as many heads as the others.

    Args:
        chunks: of all sequences.
        key_heads, value_heads: of all of them.
    """
    return min(_divisors(key_heads), key=lambda n: _gradients(chunks, key_heads, value_heads, n))


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

    As many as fill the card each, once or several times; of packed batches, whose sequences may be uneven so that each
    group waits for the longest of them, as few of these as bring temporary memory below operands and results. Where
    one group's does not, and a group's recurrences nearly fill the card, or halves of them fill it, as few as do so, if
    they take little longer, or no larger part of the time than the memory exceeds these by, or twice that where only
    uneven batches take it; or, where none does, as many as these limits let there be. Whole sequences that are not
    balanced are not divided again.

    Args:
        chunks: of all sequences.
        recurrences: of a head: sequences, or the pieces of them that are computed side by side.
        key_heads, value_heads, key_dim, value_dim: Hk, Hv, K and V.
        split, packed: as in `in_one`.
        parts: places for pieces, or sequences, of which each has a state more than chunks.
        of_parts: states [K, V] of a head, in float32, that are in memory for pieces.
        states: such states of a head among the operands and results of both passes.
        with_states: whether the states before every chunk have been kept, of all heads, so that nothing computes them.
    """
    ratio = value_heads // key_heads

    def one(groups: int) -> InOne:
        heads = value_heads // groups
        return in_one(recurrences, heads, key_dim, value_dim, ratio=ratio, split=split, packed=packed)

    if override := os.environ.get(GROUPS_OVERRIDE):
        if not override.isdecimal() or int(override) == 0:
            raise ValueError(f"{GROUPS_OVERRIDE} must be a positive integer, got {override!r}")
        groups = max(n for n in _divisors(key_heads) if n <= int(override))
        return HeadGroups(groups, one(groups), 1)
    together = recurrences * value_heads
    of = _recurrences(key_dim, value_dim, split=split, several=packed)
    time = functools.partial(_time_of_groups, chunks, recurrences, key_heads, value_heads, value_dim, of)

    def fill(groups: int) -> bool:
        """Whether recurrences of such a group nearly fill the card, or halves of them fill it."""
        tile = value_tile(together // groups, value_dim)
        of_halves = tile < value_dim and _fills(2 * together * (value_dim // tile) / groups)
        return of_halves or _fills(together / groups, _FULL if split else _NEARLY_FULL)

    # Elements of v's dtype, of which a number in float32 takes two. Vd, as a rule kept, is of all heads.
    state = key_dim * value_dim
    given = CHUNK * chunks * (4 * (key_heads * key_dim + value_heads * value_dim) + 8 * value_heads)
    given += 2 * value_heads * states * state

    def excess(of_states: int, of_gradients: int) -> float:
        """Of temporary memory, with so many groups for states and for their gradients."""
        places, of_vd = chunks + parts, CHUNK * chunks * value_dim
        in_states, in_gradients = places * state / of_states, places * state / of_gradients
        if split:  # into two; Vd is computed again, and behind dh is what dv leaves
            in_states, in_gradients = 2 * (in_states + of_vd / of_states), 2 * in_gradients
            in_gradients += places * CHUNK * value_dim / of_gradients
            of_vd = 0
        of_inverses = CHUNK * chunks * CHUNK * (1 + split)
        return value_heads * (of_inverses + of_vd + in_states + in_gradients + 2 * of_parts * state) - given

    def in_less_memory(groups: int, exceeds: Callable[[int], float], weight: float = 1.0) -> int:
        """As few groups, of those that are worth the time, as do not exceed anything, or as many as there are."""
        worth = weight * max(excess(1, 1) / given, _LITTLE_FOR_MEMORY) * (time(1) + _BETWEEN_BACK)
        more = [n for n in _divisors(key_heads) if n > groups and fill(n) and time(n) - time(1) <= worth]
        return next((n for n in (groups, *more) if exceeds(n) <= 0), (groups, *more)[-1])

    filling = [
        n for n in _divisors(key_heads) if n == 1 or (_fills(together / n) and (n - 1) * _GROUP <= of.little * time(1))
    ]
    groups = filling[-1]
    if packed:
        groups = next((n for n in filling if excess(1 if with_states else n, n) <= 0), groups)
    chosen, uneven = one(groups), 1
    of_pieces = chosen == "if balanced" and of_parts > 0
    if of_pieces and groups == 1:
        uneven = in_less_memory(1, lambda n: excess(1, n), _OF_UNEVEN)
    if (of_pieces or chosen == "never") and not with_states and excess(groups, groups * uneven) > 0:
        groups, uneven = in_less_memory(groups, lambda n: excess(n, n)), 1
    return HeadGroups(groups, one(groups), uneven)


def _time_of_groups(
    chunks: int, recurrences: int, key_heads: int, value_heads: int, value_dim: int, of: _Recurrences, groups: int
) -> float:
    """Microseconds of what computes states, their gradients and all others, in so many groups of heads."""
    keys, values = key_heads // groups, value_heads // groups
    tile = value_tile(recurrences * values, value_dim)
    longest = -(-chunks // max(recurrences, 1))
    between = (groups - 1) * _GROUP + (longest * of.groups if groups > 1 else 0)
    return groups * _three_kernels(chunks, longest, recurrences, keys, values, tile, value_dim, of) + between


def in_one(
    recurrences: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    ratio: int,
    split: bool,
    packed: bool,
) -> InOne:
    """Whether kernels/backward.py computes the backward pass, instead of state_gradients.py and gradients.py.

    It can with K = V = 128 and operands that are not split. It should where its
    blocks, one a recurrence, keep all multiprocessors busy: where they fill the card in each of their rounds and are
    alike, or are so many, and so few of them much longer than others, that the last ones end nearly together. Which
    packed batches are like that is known on the device only: all three are launched then, and leave or stay by what
    kernels/balance.py finds (`balance`).

    Args:
        recurrences: of a head: sequences, or the pieces of them that are computed side by side.
        value_heads: that are computed at once.
        key_dim, value_dim: K and V.
        ratio: value heads of a key head, for which it should be one of `_IN_ONE_LIMITS`.
        split: whether operands are sums of two numbers.
        packed: whether lengths of several sequences are known on the device only. (Of one, all but the last piece are.)
    """
    if split or key_dim != 128 or value_dim != 128:
        return "never"
    if override := os.environ.get(IN_ONE_OVERRIDE):
        if override not in ("0", "1"):
            raise ValueError(f"{IN_ONE_OVERRIDE} must be 0 or 1, got {override!r}")
        return "always" if override == "1" else "never"
    blocks = recurrences * value_heads
    if ratio not in _IN_ONE_LIMITS:
        return "never"
    if packed:
        return "if balanced" if _fills(blocks) or blocks >= _ROUNDS_OF_ANY * MULTIPROCESSORS else "never"
    return "always" if _fills(blocks) else "never"


class Balance(NamedTuple):
    """By what kernels/balance.py finds whether the sequences of a packed batch are balanced, in 64ths."""

    share: int
    """Multiprocessors over blocks of a sequence, which has one for each head."""
    limit: int
    """The most that blocks may take, by a bound, of what they took if their work could be divided at will."""
    limit_of_rounds: int
    """The same of as many rounds of the longest block as all blocks make."""


def balance(value_heads: int, *, ratio: int) -> Balance:
    """Of so many value heads that are computed at once, `ratio` of a key head."""
    limit = _IN_ONE_LIMITS.get(ratio, 0)
    return Balance(-(-64 * MULTIPROCESSORS // value_heads), limit, max(limit, _LIMIT_OF_ROUNDS))


def _fills(blocks: float, full: float = _FULL) -> bool:
    """Whether blocks that are alike fill the card in each of their rounds."""
    rounds = blocks / MULTIPROCESSORS
    return rounds >= full * math.ceil(rounds)


def in_one_width(ratio: int) -> int:
    """Blocks of a cluster of kernels/backward.py, value heads of a key head, which has `ratio`. Clusters of the same
    key head go through a sequence one behind the other. (Of clusters of four a card runs 30, not 33.)"""
    return 2 if ratio % 2 == 0 else 1


def _divisors(n: int) -> list[int]:
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


def _gradients(chunks: int, key_heads: int, value_heads: int, together: int) -> float:
    """Microseconds of the kernel `gradients`, whose blocks take `together` key heads each."""
    blocks = chunks * -(-key_heads // together)
    return _rounds(blocks, 1) * (together * value_heads // key_heads * _HEAD + _FIRST_HEAD)


def piece_rows(
    tokens: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    packed: bool,
    asked_rows: int | None = None,
) -> int | None:
    """Rows of the pieces that sequences are cut into, or None to leave them whole.

    Args:
        tokens: of the whole batch, B T.
        sequences: number of sequences.
        heads: value heads.
        key_dim, value_dim: K and V.
        packed: whether the lengths are values. One sequence may then have all tokens; if they turn out to be equal,
            a cut that was made for that finds nothing to do.
        asked_rows: what the caller wants, a multiple of 64, 0 for whole sequences, or None.
    """
    override = _override(asked_rows)
    if tokens == 0 or sequences == 0 or override == 0:
        return None
    divided = _divided(tokens, sequences, packed)
    if override is not None:
        return _even(override // CHUNK, divided)

    def time(length: int | None, count: int, chunks: int) -> float:
        recurrence = _time(length, chunks, count, heads, key_dim, value_dim, packed, tokens=tokens, places=sequences)
        fitted = length is not None and packed and sequences > 1 and not _is_power(length)
        prepared = max(_PREPARE, _PREPARED * -(-tokens // CHUNK) * heads)
        return (recurrence + prepared) / (1 - fitted * _GAIN_OF_FITTED)

    best = _best((None, *_lengths(tokens, sequences, packed)), time, tokens, sequences, packed)
    return None if best is None else _even(best, divided)


def backward_rows(
    tokens: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    ratio: int,
    split: bool,
    packed: bool,
    asked_rows: int | None = None,
) -> int | None:
    """Rows of the pieces of the backward pass: those of `piece_rows`, with the same arguments, or None.

    Sequences that are cut in the forward pass may be better left whole here: two recurrences then run side by side.
    They should be cut where kernels/backward.py then fills the card (`in_one`).

    Args:
        tokens, sequences, heads, key_dim, value_dim, packed, asked_rows: as in `piece_rows`.
        ratio: value heads of a key head.
        split: whether operands are sums of two numbers.
    """
    sizes = (tokens, sequences, heads, key_dim, value_dim)
    rows = piece_rows(*sizes, packed=packed, asked_rows=asked_rows)
    if rows is None or _override(asked_rows) is not None:
        return rows
    time = _backward_time(*sizes, ratio=ratio, split=split, packed=packed)
    return rows if _best((None, rows // CHUNK), time, tokens, sequences, packed) else None


def _backward_time(
    tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int, *, ratio: int, split: bool, packed: bool
) -> Callable[[int | None, int, int], float]:
    """Microseconds of the backward pass, as `_best` asks for them. The forward pass has summarised the pieces. Where
    there are as many sequences as the call has, or it has many places, they and their pieces are taken to be alike."""
    few = _ALL_TAKEN if ratio in _IN_ONE_LIMITS else 1
    of = _recurrences(key_dim, value_dim, split=split, several=packed and sequences > few)

    def by_one_kernel(count: int, chunks: int, *, share: float = 0.0, beside: float = 0.0) -> float:
        recurrences = count * heads
        tile = value_tile(recurrences, value_dim)
        step = _step_of_rounds(recurrences * (value_dim // tile), 128 if tile > 64 else 64, of)
        states = max(of.states * chunks * step + of.share_in_one * share, beside) + of.before_one
        behind = ratio // in_one_width(ratio) - 1  # steps of the last cluster of a key head, behind the first
        rounds = _rounds(recurrences, 1)
        return states + (rounds * chunks + behind) * _STEP_IN_ONE + (rounds - 1) * _ROUND

    def by_three_kernels(count: int, chunks: int, tile: int) -> float:
        kernels = _three_kernels(chunks * count, chunks, count, heads // ratio, heads, tile, value_dim, of)
        return kernels + _BETWEEN_BACK

    def time(length: int | None, count: int, chunks: int) -> float:
        def in_one_of(recurrences: int) -> bool:
            chosen = in_one(recurrences, heads, key_dim, value_dim, ratio=ratio, split=split, packed=False)
            return chosen != "never" and (count == sequences or sequences > _ALL_TAKEN)

        if length is None or (length >= chunks and not packed):
            if in_one_of(count):
                return max(1.0, by_one_kernel(count, chunks))
            return max(1.0, by_three_kernels(count, chunks, value_tile(max(count, sequences) * heads, value_dim)))
        beyond = cut_beyond(length * CHUNK, tokens, sequences, heads, key_dim, value_dim) if packed else 0
        if chunks * CHUNK <= beyond:  # left whole
            if chunks <= length and in_one_of(count):
                return by_one_kernel(count, chunks) + _OVERHEAD
            tile = value_tile(max(cut_count(count * chunks, length), sequences) * heads, value_dim)
            return by_three_kernels(count, chunks, tile) + _OVERHEAD
        pieces = -(-chunks // length)
        recurrences = count * heads
        exact, short = (part * (pieces - 1) * recurrences * (value_dim // 64) for part in (0.25, 0.75))  # as in `_cut`
        share = (exact * length + short * min(length, _SHORT)) / MULTIPROCESSORS
        summaries = _ADJOINT_STEP * max(length, share) if of.share is None else of.share * share
        places = sequences if packed else None
        columns, turns = _composed_in_turn(length, chunks, count, heads, value_dim, places=places)
        compositions = pieces * turns * _COMPOSE_STEP_BACK[columns]
        if in_one_of(pieces * count):
            if of.share is None:
                return by_one_kernel(pieces * count, length, beside=compositions) + summaries + _COMPOSED
            beside = max(_ADJOINT_STEP * length, compositions)
            return by_one_kernel(pieces * count, length, share=share, beside=beside) + _COMPOSED
        tile = value_tile(max(pieces * count, sequences) * heads, value_dim)
        return by_three_kernels(pieces * count, length, tile) + summaries + compositions + _OVERHEAD

    return time


def _three_kernels(
    chunks: int,
    longest: int,
    recurrences: int,
    key_heads: int,
    value_heads: int,
    tile: int,
    value_dim: int,
    of: _Recurrences,
) -> float:
    """Microseconds of what computes states, of `state_gradients` and of `gradients`, of so many chunks altogether and
    in the longest recurrence of a head."""
    gradients = _gradients(chunks, key_heads, value_heads, key_heads_together(chunks, key_heads, value_heads))
    return _whole_back(longest, recurrences * value_heads, tile, value_dim, of) + gradients


def _rows_for_both(
    sizes: tuple[int, int, int, int, int],
    forward: int | None,
    back: int | None,
    *,
    ratio: int,
    split: bool,
    packed: bool,
) -> int | None:
    """Rows of pieces with which both passes together gain enough against `forward` and `back`, those of each by itself;
    None if there are none. Only where kernels/backward.py then fills the card, unless there is one sequence, whose
    pieces are known to be alike, and what it takes has been measured."""
    tokens, sequences, heads, key_dim, value_dim = sizes
    divided = _divided(tokens, sequences, packed)
    backward_time = _backward_time(*sizes, ratio=ratio, split=split, packed=packed)

    def of_passes(forward: int | None, back: int | None, count: int, chunks: int) -> float:
        of_batch: dict[str, Any] = {"packed": packed, "tokens": tokens, "places": sequences}
        of_forward = _time(forward, chunks, count, heads, key_dim, value_dim, **of_batch)
        return of_forward + backward_time(back, count, chunks)

    def fills(rows: int) -> bool:
        pieces = piece_count(tokens, sequences, rows, packed=packed) - packed * sequences
        one = in_one(pieces, heads, key_dim, value_dim, ratio=ratio, split=split, packed=False)
        return pieces > sequences and one != "never"

    # Whether the forward pass cuts sequences that are alike by itself.
    cuts = forward is not None and (not packed or tokens > sequences * cut_beyond(forward, *sizes))
    gain = 0.0 if sequences == 1 or cuts else _GAIN_OF_SEVERAL if packed else _GAIN
    alone = sequences == 1 and _recurrences(key_dim, value_dim, split=split, several=False) is _OF_VD
    fitting = []
    for length in _lengths(tokens, sequences, packed):
        rows = _even(length, divided)
        if rows is not None and (rows >= _ROWS_IN_ONE if fills(rows) else alone):
            fitting.append(length)

    def time(length: int | None, count: int, chunks: int) -> float:
        if length is None:
            return of_passes(forward and forward // CHUNK, back and back // CHUNK, count, chunks)
        return of_passes(length, length, count, chunks) / (1 - gain)

    best = _best((None, *fitting), time, tokens, sequences, packed)
    return None if best is None else _even(best, divided)


def _lengths(tokens: int, sequences: int, packed: bool) -> list[int]:
    """Chunks of a piece that are considered, also those of all small numbers of equal pieces, so that these fill the
    card whatever the number of heads is. Of a packed batch that has many places, of whose sequences less is known, only
    powers of two."""
    lengths = _lengths_of(_divided(tokens, sequences, packed))
    if packed and sequences > 1:
        many = sequences > _ALL_TAKEN
        return [n for n in lengths if n * CHUNK >= _ROWS_OF_MEMORY and (_is_power(n) or not many)]
    return [n for n in lengths if _ROWS_OF_MEMORY * piece_count(tokens, sequences, n * CHUNK, packed=False) <= tokens]


def _lengths_of(chunks: int) -> list[int]:
    """The same of a sequence that has so many, whatever memory they take."""
    return list(dict.fromkeys((*_LENGTHS, *(-(-chunks // pieces) for pieces in _PIECES))))


def _divided(tokens: int, sequences: int, packed: bool) -> int:
    """Chunks that are cut into equal pieces: those of each row of a dense batch, of all tokens of a packed one."""
    return -(-tokens // (CHUNK if packed else sequences * CHUNK))


def _is_power(length: int) -> bool:
    """Whether it is one of two."""
    return length & (length - 1) == 0


def _best(
    lengths: Sequence[int | None],
    time: Callable[[int | None, int, int], float],
    tokens: int,
    sequences: int,
    packed: bool,
) -> int | None:
    """The one of `lengths` (chunks of a piece, None for whole sequences) with the least `time`, a function of it, of
    the sequences' number and of their chunks."""
    layouts = _layouts(tokens, sequences, packed)
    table = {length: [time(length, count, chunks) for _, count, chunks in layouts] for length in lengths}
    least = [min(column) for column in zip(*table.values(), strict=True)]

    def excess(length: int | None) -> float:
        return sum(
            weight * time / limit for (weight, _, _), time, limit in zip(layouts, table[length], least, strict=True)
        )

    return min(lengths, key=excess)


def _layouts(tokens: int, sequences: int, packed: bool) -> list[tuple[float, int, int]]:
    """(weight, number, chunks of each) of sequences that are alike, as which a batch is considered."""
    mean, total = -(-tokens // (sequences * CHUNK)), -(-tokens // CHUNK)
    if not packed or sequences == 1:
        return [(1.0, sequences, mean)]
    # Of packed sequences nothing is known but their number. What is chosen must be good if they are equal and, of
    # less weight, if half of them are twice as long, or if one has nearly all tokens, as it may where places are many.
    of_one = _ONE_OF_FEW if sequences <= _ALL_TAKEN else _ONE_OF_MANY
    return [(1.0, sequences, mean), (0.4, -(-sequences // 2), 2 * mean), (of_one, 1, total)]


def _even(length: int, chunks: int) -> int | None:
    """Rows of the as many pieces, but as equal as can be, that `chunks` have of `length` chunks; None if it is one."""
    pieces = -(-chunks // length)
    return None if pieces <= 1 else -(-chunks // pieces) * CHUNK


def kept_rows(
    tokens: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    ratio: int,
    split: bool,
    packed: bool,
    asked_rows: int | None = None,
    with_states: bool = False,
) -> int | None:
    """Rows of the pieces of both passes, with the arguments of `backward_rows`, if what the forward pass finds of the
    pieces can be kept for the backward pass; else None. Each then cuts as it is faster by itself.

    The backward pass finds out from their number how long they are (`segments.rows_of_pieces`). It is not kept where
    the backward pass leaves the sequences whole, unless `with_states`, where the states before all chunks are kept too,
    which are those of the pieces of the forward pass and more than what is found of these.
    """
    if tokens == 0 or sequences == 0:
        return None
    sizes = (tokens, sequences, heads, key_dim, value_dim)
    asked = _override(asked_rows) is not None
    of_kernel: dict[str, Any] = {"ratio": ratio, "split": split, "packed": packed}
    forward = piece_rows(*sizes, packed=packed, asked_rows=asked_rows)
    back = backward_rows(*sizes, **of_kernel, asked_rows=asked_rows)
    both = None if asked else _rows_for_both(sizes, forward, back, **of_kernel)
    considered = (both, back, forward if with_states else None)
    return next((rows for rows in considered if rows is not None), None)


def shard_cut(
    tokens: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    asked_rows: int | None = None,
) -> Cut:
    """The pieces of sequences whose first state another device knows, so that all of them are summarised.

    Args:
        tokens: of the longest of the sequences on this device.
        sequences, heads, key_dim, value_dim, asked_rows: as in `piece_rows`; a shard left whole is one piece.
    """
    chunks = max(-(-tokens // CHUNK), 1)
    override = _override(asked_rows)
    if override is not None:
        length = min(override // CHUNK or chunks, chunks)
    else:
        lengths = [n for n in _lengths_of(chunks) if n < chunks and n * CHUNK >= _ROWS_OF_MEMORY] + [chunks]
        length = min(lengths, key=lambda n: _cut(n, chunks, sequences, heads, key_dim, value_dim, shard=True))
    return Cut(length * CHUNK, -(-chunks // length))


def _override(asked_rows: int | None) -> int | None:
    """Rows of a piece as the caller says, else as the environment does, 0 for no pieces, None where neither says it."""
    if asked_rows is not None:
        return asked_rows
    override = os.environ.get(OVERRIDE)
    if not override:
        return None
    if not override.isdecimal() or int(override) % CHUNK:
        raise ValueError(f"{OVERRIDE} must be a multiple of {CHUNK}, or 0 for no pieces, got {override!r}")
    return int(override)


@functools.cache
def cut_beyond(rows: int, tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Packed sequences are cut into pieces of `rows` rows if any is longer than this, which the device finds out.

    Of one that is a piece; of few, most of which have tokens, it is supposed, one and a half. Many may be uneven
    anyway: one is worth cutting if it is longer than a piece, and than what a multiprocessor has to do if all do as
    much, by what it takes to summarise a piece, and to compose; and longer than sequences are if all places, or half of
    them, are taken by some that are alike, where these take no longer whole.

    Args:
        rows: of a piece.
        tokens, sequences, heads, key_dim, value_dim: as in `piece_rows`.
    """
    if sequences <= _ALL_TAKEN:
        return rows if sequences == 1 else rows + rows // 2
    beyond = max(rows, tokens * heads // MULTIPROCESSORS) + rows // 2 + _ROWS_COMPOSED
    for _, count, chunks in _layouts(tokens, sequences, packed=True)[:2]:
        sizes = (rows // CHUNK, chunks, count, heads, key_dim, value_dim)
        if _left_whole(*sizes, places=sequences) <= _cut(*sizes, places=sequences):
            beyond = max(beyond, math.ceil(_UNLIKE * chunks) * CHUNK)
    return beyond


def _time(
    length: int | None,
    chunks: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    packed: bool,
    *,
    tokens: int,
    places: int,
) -> float:
    """Microseconds of the forward recurrence of sequences of `chunks` chunks, in pieces of `length` or whole.

    Of the `places` for packed sequences, which have up to `tokens`, no more than these are taken.
    """
    if length is None or (length >= chunks and not packed):
        return max(1.0, _whole(chunks, sequences * heads, value_dim))
    sizes = (length, chunks, sequences, heads, key_dim, value_dim)
    if not packed:
        return _cut(*sizes)
    if chunks * CHUNK <= cut_beyond(length * CHUNK, tokens, places, heads, key_dim, value_dim):
        return _left_whole(*sizes, places=places)
    return _cut(*sizes, places=places)


def _left_whole(
    length: int, chunks: int, sequences: int, heads: int, key_dim: int, value_dim: int, *, places: int
) -> float:
    """The same of packed sequences that might have been cut and are not. Of few places most are taken, it is supposed,
    so what pieces cost that find nothing to cut counts twice there."""
    cuts, few = cut_count(sequences * chunks, length), places <= _ALL_TAKEN
    blocks = max(cuts, sequences if few else places)
    if not few and halves(places + cuts, heads):  # of all, where they run at once
        blocks = sequences
    tile = value_tile(blocks * heads, value_dim)
    whole = _rounds(sequences * heads * (value_dim // tile), 1) * chunks * _STEP[tile]
    return whole + (2 if few else 1) * _not_cut(cuts, places, heads, key_dim, value_dim)


def _not_cut(cuts: int, places: int, heads: int, key_dim: int, value_dim: int) -> float:
    """Microseconds of summaries and compose where nothing is cut, which have room for so many cuts."""
    columns, together = composed(min(cuts, places), heads, value_dim, packed=True)
    blocks = cuts * heads * (key_dim + value_dim) / 64 + together * heads * value_dim / columns
    return _NOT_CUT + _EMPTY * blocks


def _whole_back(chunks: int, recurrences: int, tile: int, value_dim: int, of: _Recurrences) -> float:
    """Microseconds of what computes states, and of `state_gradients`."""
    blocks, columns = recurrences * (value_dim // tile), 128 if tile > 64 else 64
    if room_for_both(blocks):
        return chunks * max(of.both[columns], 2 * blocks * of.block[columns])
    return 2 * chunks * _step_of_rounds(blocks, columns, of)


def _step_of_rounds(blocks: int, columns: int, of: _Recurrences) -> float:
    """Microseconds of a chunk step of all rounds of so many blocks."""
    rounds, rest = divmod(blocks, MULTIPROCESSORS)
    last = max(of.step[columns], rest * of.block[columns]) if rest else 0.0
    return rounds * max(of.step[columns], MULTIPROCESSORS * of.block[columns]) + last


def _whole(chunks: int, recurrences: int, value_dim: int) -> float:
    """Microseconds of the forward kernel."""
    tile = value_tile(recurrences, value_dim)
    return _rounds(recurrences * (value_dim // tile), 1) * chunks * _STEP[tile]


def _cut(
    length: int,
    chunks: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    places: int | None = None,
    shard: bool = False,
) -> float:
    """Microseconds of summaries, compose and forward for pieces of `length` chunks, packed if there are `places`.

    Of a `shard` all pieces are summarised, and composed twice: for its summary, and when its first state is known.
    """
    pieces = -(-chunks // length)
    recurrences = pieces * sequences * heads
    cuts = recurrences if shard else (pieces - 1) * sequences * heads
    columns, turns = _composed_in_turn(length, chunks, sequences, heads, value_dim, places=places)
    steps = 2 * (pieces + 1) if shard else pieces * turns
    # Three of four heads decay, so that nothing is summarised of them but N over a few chunks: between the extremes.
    exact, short = cuts / 4 * (key_dim + value_dim) / 64, cuts * 3 / 4 * value_dim / 64
    slots = 2 * MULTIPROCESSORS
    shared = (exact * length + short * min(length, _SHORT)) / slots
    summaries = max(_SUMMARY_STEP * length, _SHARED_STEP * shared)
    rounds = _rounds(recurrences * (value_dim // value_tile(recurrences, value_dim)), 1) + _rounds(exact + short, 2)
    serial = _whole(length, recurrences, value_dim) + summaries + steps * _COMPOSE_STEP[columns]
    return serial + rounds * _BLOCK + recurrences * _STATES + _BETWEEN


def _composed_in_turn(
    length: int, chunks: int, sequences: int, heads: int, value_dim: int, *, places: int | None
) -> tuple[int, int]:
    """Value columns of a block of kernels/compose.py, and sequences that it takes one after the other; as `_cut`."""
    if places is None:
        return composed(sequences, heads, value_dim, packed=False).columns, 1
    chains = min(places, cut_count(sequences * chunks, length))
    columns, together = composed(chains, heads, value_dim, packed=True)
    return columns, -(-sequences // together)


def _rounds(blocks: float, together: int) -> float:
    """Times that a multiprocessor's share of blocks takes, relative to one block's, `together` of which run at once."""
    return max(1.0, -(-blocks // (MULTIPROCESSORS * together)))
