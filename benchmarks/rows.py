"""The rows of the comparison: what is computed in each, and how long the card needs for it at the least."""

from __future__ import annotations

import fnmatch
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

HEAD_DIM = 128
CHUNK = 64

# Operations per chunk and value head of the chunked algorithm at K = V = 128, and rates measured on an H200.
OPERATIONS = {"forward": 10.66e6, "backward": 31.5e6}
OPERATIONS_PER_SECOND = 790e12
BYTES_PER_SECOND = 4.3e12


@dataclass(frozen=True)
class Row:
    """One pass over `sequences` packed sequences of `length` tokens each, or of 1 to `length` if `ragged`, and `empty`
    more that have none; K = V = 128, bfloat16."""

    direction: str
    """"forward" or "backward"."""
    key_heads: int
    value_heads: int
    sequences: int
    length: int
    ragged: bool = False
    empty: int = 0

    @property
    def places(self) -> int:
        """Sequences, empty ones too: what `cu_seqlens` has room for."""
        return self.sequences + self.empty

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, of the empty ones last; always the same ones."""
        drawn = random.Random(f"{self.sequences} of up to {self.length}")
        of_each = (drawn.randint(1, self.length) if self.ragged else self.length for _ in range(self.sequences))
        return [*of_each, *[0] * self.empty]

    @property
    def offsets(self) -> list[int]:
        """Where each sequence begins, and where the last one ends: cu_seqlens."""
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def batch(self) -> str:
        """Sequences and length as the name of the row has them."""
        places = f"of{self.places}" if self.empty else ""
        return f"{self.sequences}{'<=' if self.ragged else 'x'}{self.length}{places}"

    @property
    def name(self) -> str:
        return f"{self.direction}/{self.key_heads},{self.value_heads}/{self.batch}"

    @property
    def both(self) -> Row:
        """What forward and backward rows of the same inputs have in common: the forward row."""
        return replace(self, direction="forward")

    @property
    def bytes_moved(self) -> int:
        """Bytes of all operands and results, each moved once."""
        keys, values = (2 * self.tokens * heads * HEAD_DIM for heads in (self.key_heads, self.value_heads))
        gates = 4 * self.tokens * self.value_heads
        state = 4 * self.places * self.value_heads * HEAD_DIM**2
        if self.direction == "forward":  # q k | v o | g beta | both states
            return 2 * keys + 2 * values + 2 * gates + 2 * state
        # q k dq dk | v do dv | g beta dg dbeta | initial_state, d_final_state, d_initial_state
        return 4 * keys + 3 * values + 4 * gates + 3 * state

    @property
    def limit(self) -> float:
        """The least milliseconds: the larger of operations and bytes, each at the rate measured on an H200."""
        chunks = sum(-(-length // CHUNK) for length in self.lengths)
        operations = OPERATIONS[self.direction] * chunks * self.value_heads
        return 1e3 * max(operations / OPERATIONS_PER_SECOND, self.bytes_moved / BYTES_PER_SECOND)


def parse(name: str) -> Row:
    """The row of a name such as "forward/2,8/4x8192", "forward/2,8/7<=4321" for sequences of 1 to 4321 tokens, or
    "forward/2,8/4x8192of32" for four of 32 places taken.

    Raises:
        ValueError: this is no such name.
    """
    match = re.fullmatch(r"(forward|backward)/(\d+),(\d+)/(\d+)(x|<=)(\d+)(?:of(\d+))?", name)
    if not match:
        raise ValueError(f"rows must be named like forward/2,8/4x8192 or match a row of the table, got {name!r}")
    key_heads, value_heads, sequences, length = (int(match[i]) for i in (2, 3, 4, 6))
    empty = int(match[7] or sequences) - sequences
    row = Row(match[1], key_heads, value_heads, sequences, length, ragged=match[5] != "x", empty=empty)
    if min(row.key_heads, row.value_heads, row.sequences, row.length) < 1 or row.value_heads % row.key_heads:
        raise ValueError(f"heads must be Hk,Hv with Hv a multiple of Hk, and all numbers positive, got {name!r}")
    if empty < 0:
        raise ValueError(f"there must be places for all sequences, got {name!r}")
    return row


def _table() -> tuple[Row, ...]:
    lengths = ((1, 32768), (1, 8192), (1, 2048), (2, 16384), (4, 8192), (8, 1024))
    forward = (
        Row("forward", *heads, *packed)
        for heads, packed in itertools.product(((2, 8), (16, 32), (16, 64), (16, 48)), lengths)
    )
    backward = (
        Row("backward", *heads, *packed)
        for heads, packed in itertools.product(((16, 32), (2, 8)), ((1, 8192), (4, 8192), (1, 32768), (8, 1024)))
    )
    more = (Row("backward", 16, 64, *packed) for packed in ((4, 8192), (1, 8192)))
    return (*forward, *backward, *more)


TABLE = _table()


def select(patterns: Sequence[str]) -> list[Row]:
    """The rows of TABLE that match any of the shell patterns, and those that are named in full; all without patterns.

    Rows with the same inputs are neighbours in the result.

    Raises:
        ValueError: a pattern matches nothing and is no name.
    """
    chosen: dict[Row, None] = {}
    for pattern in patterns or ("*",):
        matches = [row for row in TABLE if fnmatch.fnmatchcase(row.name, pattern)] or [parse(pattern)]
        chosen.update(dict.fromkeys(matches))
    groups: dict[Row, list[Row]] = {}
    for row in chosen:
        groups.setdefault(row.both, []).append(row)
    return list(itertools.chain.from_iterable(groups.values()))
