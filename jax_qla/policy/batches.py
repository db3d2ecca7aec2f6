"""A batch by its static shapes, and the lengths that its sequences are supposed to have.

Lengths of packed sequences are values, which only the device knows. What is chosen for such a batch must be good for
several batches of as many tokens, each of sequences that are alike (`Batch.cases`).
"""

from __future__ import annotations

from typing import NamedTuple

from jax_qla.kernels.common import CHUNK

_MOST_TAKEN = 8
"""Places of a packed batch up to which most are supposed to be taken by a sequence."""

_TWICE_AS_LONG = 0.4
"""Weight of the case that half of the places are taken; that all are, by equal sequences, has a weight of one, ..."""
_ONE_OF_FEW, _ONE_OF_MANY = 0.12, 0.25
"""... and that one sequence has all tokens these, where most places are supposed to be taken and where not
(docs/performance_policy.md, "Fewer blocks, shorter pieces")."""


class Alike(NamedTuple):
    """Sequences, or pieces, that are equally long."""

    number: int
    """How many there are."""
    chunks: int
    """Of each."""


def if_alike(tokens: int, sequences: int) -> Alike:
    """So many sequences, if all places for them are taken and all lengths the same."""
    return Alike(sequences, -(-tokens // (sequences * CHUNK)))


class Batch(NamedTuple):
    """What is known of a call when it is traced."""

    tokens: int
    """Of all sequences, B T."""
    sequences: int
    """Their number; of a packed batch, the places that there are for them, of which some may be empty."""
    heads: int
    """Value heads, Hv."""
    key_dim: int
    """K."""
    value_dim: int
    """V."""
    packed: bool
    """Whether lengths are values. Those of a dense batch are all the same."""

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """All numbers, as the functions of this package take them."""
        return self.tokens, self.sequences, self.heads, self.key_dim, self.value_dim

    @property
    def several(self) -> bool:
        """Whether there are sequences whose lengths are not known."""
        return self.packed and self.sequences > 1

    @property
    def chunks(self) -> int:
        """Of all tokens, as if these were one sequence."""
        return -(-self.tokens // CHUNK)

    @property
    def divided(self) -> int:
        """Chunks that are cut into equal pieces: those of each row of a dense batch, of all tokens of a packed one."""
        return self.chunks if self.packed else self.equal.chunks

    @property
    def equal(self) -> Alike:
        """Its sequences, if all places are taken and all lengths the same."""
        return if_alike(self.tokens, self.sequences)

    @property
    def half_as_many(self) -> Alike:
        """Half as many sequences of twice the length."""
        return Alike(-(-self.sequences // 2), 2 * self.equal.chunks)

    @property
    def cases(self) -> list[tuple[float, Alike]]:
        """The sequences as which the batch is considered, each case with its weight. A dense batch has one."""
        if not self.several:
            return [(1.0, self.equal)]
        of_one = _ONE_OF_FEW if most_are_taken(self.sequences) else _ONE_OF_MANY
        return [(1.0, self.equal), (_TWICE_AS_LONG, self.half_as_many), (of_one, Alike(1, self.chunks))]


def most_are_taken(places: int) -> bool:
    """Whether most of so many places of a packed batch are supposed to be taken by a sequence. Where there are more,
    a few long sequences may have all tokens."""
    return places <= _MOST_TAKEN
