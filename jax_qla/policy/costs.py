"""The cost model: microseconds of each kernel, from the blocks that it is launched with.

The constants were fitted to times of an H200 SXM. Beside each stands its unit and where it comes from: the section of
docs/performance_policy.md or, where no page has it, the commit that brought it. A *chunk step* is what a block does for
one chunk of 64 tokens; a *round* is as many blocks as the card runs at once. All functions return microseconds. They
decide nothing: which blocks there are, the other files of this package say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jax_qla.policy import card

# kernels/prepare.py, which precedes the forward pass.

_PREPARE = 8.0
"""us, at the least ("Fewer blocks, shorter pieces")."""
_PREPARE_CHUNK = 4.6e-3
"""us for a chunk of a value head, all blocks of the card together (ibid.)."""


def prepare(chunks: int, heads: int) -> float:
    """kernels/prepare.py, for so many chunks of each of the value heads."""
    return max(_PREPARE, _PREPARE_CHUNK * chunks * heads)


# kernels/forward.py.

_FORWARD_STEP = {64: 1.4, 128: 2.2}
"""us of a chunk step, by the block's value columns, one block on a multiprocessor ("Pieces")."""


_HALF_STEP = 1.5
"""us of a chunk step of half of a sequence's columns, in a block that has room for all of them ("Few places")."""


def forward(chunks: int, blocks: int, columns: int) -> float:
    """kernels/forward.py, where each block goes through so many chunks."""
    return card.rounds(blocks) * chunks * _FORWARD_STEP[columns]


def steps(us: float, columns: int) -> int:
    """Chunks that a block goes through in that time."""
    return int(us / _FORWARD_STEP[columns])


def half(chunks: int) -> float:
    """The same of long sequences in halves of their columns, all of which run at once."""
    return chunks * _HALF_STEP


def steps_of_half(us: float) -> int:
    """Chunks of the longest sequence that takes no more, if it is computed in halves."""
    return int(us / _HALF_STEP)


# kernels/summaries.py and adjoint_summaries.py, which summarise pieces.

_SUMMARY_STEP = 1.1
"""us of a chunk step of kernels/summaries.py: of the longest block, which is waited for ("Pieces"), ..."""
_SHARED_STEP = 1.5
"""... and of two blocks that share a multiprocessor all the time (ibid.)."""
_ADJOINT_STEP = 1.9
"""us of a chunk step of kernels/adjoint_summaries.py, of which a multiprocessor runs one block (fc09707)."""
FORGETFUL = 6
"""Chunks that are summarised of a head that decays, since what came before them is forgotten (a146742)."""


class SummaryBlocks(NamedTuple):
    """Blocks that summarise pieces. Of four heads three are supposed to decay, which is between the extremes: of a
    piece of these only N is found, from its last few chunks."""

    length: int
    """Chunks of a piece."""
    whole: float
    """Blocks that go through all of them, ..."""
    short: float
    """... and that go through the last few."""

    @property
    def steps(self) -> float:
        """Chunk steps of all blocks together."""
        return self.whole * self.length + self.short * min(self.length, FORGETFUL)


def summary_blocks(length: int, cuts: int, slow: float, decaying: float) -> SummaryBlocks:
    """The blocks of a kernel that summarises pieces.

    Args:
        length: chunks of a piece.
        cuts: pieces of a value head that are summarised, of all heads.
        slow, decaying: blocks for each of them, of a head that does not decay and of one that does.
    """
    return SummaryBlocks(length, cuts * slow / 4, cuts * 3 / 4 * decaying)


SHARED = 1.38
"""Times as long as alone that a block of kernels/summaries.py takes where two share a multiprocessor ("Blocks that
share a multiprocessor")."""
SECOND_LAUNCH = 2.0
"""us of kernels/summaries.py where it is launched twice, and one launch leaves (ibid.)."""


def summaries(of: SummaryBlocks) -> float:
    """kernels/summaries.py, of which a multiprocessor runs two blocks at once, whether or not the longest share one."""
    shared = of.steps / (2 * card.MULTIPROCESSORS)
    return max(_SUMMARY_STEP * of.length, _SHARED_STEP * shared)


def summaries_shared(of: SummaryBlocks) -> float:
    """The same where the longest block shares a multiprocessor with another one."""
    return max(SHARED * _SUMMARY_STEP * of.length, summaries(of))


def summaries_alone(of: SummaryBlocks) -> float:
    """The same where each block has a multiprocessor to itself. If they do not run all at once, a short one is last."""
    steps = of.steps / card.MULTIPROCESSORS
    if of.whole + of.short > card.MULTIPROCESSORS:
        steps += min(of.length, FORGETFUL)
    return _SUMMARY_STEP * max(of.length, steps)


# kernels/compose.py, which goes from piece to piece.

_COMPOSE_STEP = {16: 0.9, 32: 1.5, 64: 2.3}
"""us of a piece, by the block's value columns, in the forward pass, beside other kernels (138adf7), ..."""
_COMPOSE_STEP_BACK = {16: 1.2, 32: 1.9, 64: 2.7}
"""... and in the backward pass, alone (ibid.)."""


def compose(pieces: int, columns: int, *, backward: bool = False) -> float:
    """kernels/compose.py, whose blocks go through so many pieces one after the other."""
    return pieces * (_COMPOSE_STEP_BACK if backward else _COMPOSE_STEP)[columns]


# What a forward pass in pieces takes beside that.

_BLOCK = 1.0
"""us for reading and writing the states of a block, in every round ("Pieces")."""
_STATES = 0.15
"""us for moving what is kept of a piece and value head: response, transition, the states that enter and leave it
(ibid.)."""
_BETWEEN = 3.0
"""us from one of the kernels of pieces to the next, together (ibid.)."""

_NOTHING_TO_CUT = 6.0
"""us of kernels/summaries.py and compose.py where nothing needs to be cut ("Places that are not taken"), ..."""
_EMPTY_BLOCK = 0.002
"""... and of each of their blocks, which leaves at once (ibid.)."""


def in_pieces(kernels: float, rounds: float, pieces: int) -> float:
    """A forward pass in pieces.

    Args:
        kernels: us of what all its kernels go through step by step.
        rounds: of the blocks of kernels/forward.py and summaries.py, together.
        pieces: of all value heads.
    """
    return kernels + rounds * _BLOCK + pieces * _STATES + _BETWEEN


def nothing_to_cut(blocks: float) -> float:
    """kernels/summaries.py and compose.py, which have so many blocks and find nothing to do."""
    return _NOTHING_TO_CUT + _EMPTY_BLOCK * blocks


# kernels/backward.py, which does the work of kernels/state_gradients.py and gradients.py (`Recurrences.in_one`).

_STEP_IN_ONE = 7.6
"""us of a chunk step (6eb7600, "Both passes together")."""
_ROUND_IN_ONE = 40.0
"""us from one round of its blocks to the next, with that of the kernel of states (ibid.)."""
_BEHIND_COMPOSE = 6.0
"""us from the end of the kernel of states to that of `compose`, which both follow `adjoint_summaries`, if sequences are
cut (ibid.)."""

# The two recurrences of the backward pass: the kernel of states and kernels/state_gradients.py.


class BesideSummaries(NamedTuple):
    """kernels/adjoint_summaries.py where its blocks run beside those of the kernel of states. What is left to wait for
    is in proportion to the chunk steps of a multiprocessor, if all of these have as many."""

    step: float
    """us of such a step where three kernels follow, ..."""
    step_in_one: float
    """... and where kernels/backward.py does."""
    before_one: float
    """us that precede kernels/backward.py in any case."""


class Recurrences(NamedTuple):
    """What was fitted together: the kernel of states, kernels/state_gradients.py, and what depends on how long these
    take. Of two dictionaries by value columns of a block."""

    step: Mapping[int, float]
    """us of a chunk step of a round of blocks of either kernel, on average, at the least, ..."""
    both: Mapping[int, float]
    """... of both kernels side by side, where all their blocks run at once, at the least, ..."""
    block: Mapping[int, float]
    """... and of each block that runs at once, of either: with many blocks, memory is what they wait for."""
    states: float
    """Of `step`, the part that the kernel of states takes where kernels/backward.py follows."""
    beside: BesideSummaries | None
    """Whether kernels/adjoint_summaries.py runs beside the states, and what it then takes; None: it is counted as if
    it came first and the states behind it."""
    step_of_groups: float
    """us of a chunk step of several groups of heads, together, that those of one group do not take."""
    little: float
    """The part of the time of all kernels up to which ends of groups of heads do not matter."""

    def round_step(self, blocks: int, columns: int) -> float:
        """A chunk step of all rounds of so many blocks of either kernel."""
        rounds, rest = divmod(blocks, card.MULTIPROCESSORS)
        step, block = self.step[columns], self.block[columns]
        last = max(step, rest * block) if rest else 0.0
        return rounds * max(step, card.MULTIPROCESSORS * block) + last

    def one_after_the_other(self, chunks: int, blocks: int, columns: int) -> float:
        """Both kernels, each of which has so many blocks, which go through so many chunks."""
        return 2 * chunks * self.round_step(blocks, columns)

    def side_by_side(self, chunks: int, blocks: int, columns: int) -> float:
        """The same where all blocks of both run at once."""
        return chunks * max(self.both[columns], 2 * blocks * self.block[columns])

    def summaries_ahead(self, of: SummaryBlocks) -> float:
        """kernels/adjoint_summaries.py as far as states, and the two kernels behind them, wait for it."""
        steps = of.steps / card.MULTIPROCESSORS
        return _ADJOINT_STEP * max(of.length, steps) if self.beside is None else self.beside.step * steps

    def in_one(
        self,
        chunks: int,
        blocks: int,
        columns: int,
        heads: int,
        behind: int,
        pieces: SummaryBlocks | None = None,
        composed: float = 0.0,
    ) -> float:
        """The kernel of states and kernels/backward.py, and in pieces what finds the states between these.

        Args:
            chunks: that each block goes through.
            blocks, columns: of the kernel of states.
            heads: blocks of kernels/backward.py, one for each value head of each sequence or piece.
            behind: steps by which the last cluster of a key head is behind the first.
            pieces: that are summarised, if sequences are cut.
            composed: us of kernels/compose.py then.
        """
        states = self.states * chunks * self.round_step(blocks, columns)
        ahead = 0.0
        if self.beside is None:
            states = max(states, composed)
            ahead = 0.0 if pieces is None else self.summaries_ahead(pieces)
        else:
            if pieces is not None:
                longest = _ADJOINT_STEP * pieces.length
                states += self.beside.step_in_one * (pieces.steps / card.MULTIPROCESSORS)
                states = max(states, longest, composed)
            states += self.beside.before_one
        rounds = card.rounds(heads)
        found = states + (rounds * chunks + behind) * _STEP_IN_ONE + (rounds - 1) * _ROUND_IN_ONE + ahead
        return found if pieces is None else found + _BEHIND_COMPOSE


_OF_VD = Recurrences(
    step={64: 1.2, 128: 1.4},
    both={64: 1.25, 128: 2.0},
    block={64: 0.0117, 128: 0.0208},
    states=0.76,
    beside=BesideSummaries(step=0.5, step_in_one=2.9, before_one=15.0),
    step_of_groups=0.35,
    little=0.022,
)
"""With kernels/states_from_vd.py, K = V = 128 ("Both passes of single sequences, and of dense batches, by three
kernels"; `step_in_one` is of "As few pieces as fill the card once")."""

_OF_STATES = Recurrences(
    step={64: 1.75, 128: 3.2},
    both={64: 1.65, 128: 4.3},
    block={64: 0.0, 128: 0.0},
    states=1.0,
    beside=None,
    step_of_groups=0.6,
    little=0.02,
)
"""With kernels/states.py, which few calls have by now (ibid.; `step_of_groups` is of "Groups of heads in the backward
pass")."""


def of_vd(key_dim: int, value_dim: int, *, split: bool) -> bool:
    """Whether constants of kernels/states_from_vd.py were measured of such operands: K = V = 128, not split."""
    return key_dim == value_dim == 128 and not split


def recurrences(key_dim: int, value_dim: int, *, split: bool, several: bool) -> Recurrences:
    """The constants by which a backward pass is counted.

    Those of kernels/states.py are taken for operands of which no others were measured, and where lengths of `several`
    sequences count as not known, whichever kernel runs: by the others some such calls took 1.02 to 1.20 times as long
    ("Both passes of single sequences, and of dense batches, by three kernels").
    """
    return _OF_VD if of_vd(key_dim, value_dim, split=split) and not several else _OF_STATES


# kernels/gradients.py, which goes through all chunks at once.

_HEAD = 6.1
"""us of a value head of one chunk (d8989f9), ..."""
_FIRST_HEAD = 1.0
"""... and what the first one of a block takes longer (ibid.)."""


def gradients(chunks: int, key_heads: int, value_heads: int, together: int) -> float:
    """kernels/gradients.py, whose blocks take `together` key heads of a chunk each."""
    blocks = chunks * -(-key_heads // together)
    return card.rounds(blocks) * (together * value_heads // key_heads * _HEAD + _FIRST_HEAD)


# From kernel to kernel of the backward pass.

BETWEEN_BACK = 25.0
"""us of three kernels, from that of states to `gradients`, beside what their blocks take (6eb7600, "Both
passes together")."""
TWO_MORE_KERNELS = 8.0
"""us of a backward pass that has `adjoint_summaries` and `compose`, beside what these take (e924255)."""
WINDOWS, PART_OF_WINDOWS = 12.0, 0.02
"""us that two windows of a group take more than one, and the part of the time, which is of last rounds of blocks
("Windows")."""
GROUP = 15.0
"""us from the end of one group of heads until the next one fills the card ("Groups of heads in the backward pass")."""
