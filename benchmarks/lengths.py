"""Times what a call takes by the lengths of its sequences.

    python benchmarks/lengths.py
    python benchmarks/lengths.py --parts uneven --heads 4,16 16,64 --long 0
    python benchmarks/lengths.py --parts uneven --heads 1,2 --batches '3<=70' --long 0 --implementation xla   # a CPU

Three parts, K = V = 128, bfloat16, states given and returned; device milliseconds of the forward pass (of a call
without gradients) and of the backward pass:

    tokens  one sequence, dense, of more and more tokens; over what the row before took, in proportion to its tokens;
            and temporary memory of both passes in one program, over operands, results and gradients
    places  one sequence of 32768 tokens among 0, 7, 63 and 511 that have none, packed; over the first
    uneven  packed batches of random lengths (always the same), and one long sequence beside a hundred short ones; over
            a dense batch of as many sequences, the last of one, and tokens

Sequences of more than 2^23 tokens times value heads are left out. Writes lengths.json to the output folder, row by row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import inputs
import jax
from measurement import SHORT_WARM_UP
from ours import JaxQla
from report import share_of_memory
from rows import Row, parse

PARTS = ("tokens", "places", "uneven")
HEADS = ("2,8", "16,32")
TOKENS = (2048, 4096, 8192, 32768, 131072, 1048576)
PLACES = (1, 8, 64, 512)
LONG = 32768
BATCHES = ("11<=33", "20<=512", "20x512", "7<=4321", "7x4321", "16<=4096")
SHORT = 100
"""Sequences of 1 to 512 tokens beside a long one."""
MOST = 2**23
"""Tokens times value heads of a sequence that is timed: a million tokens of eight heads."""


class OneLong(Row):
    """A sequence of `length` tokens, and then short ones."""

    @property
    def lengths(self) -> list[int]:
        drawn = random.Random("beside a long one")
        return [self.length, *(drawn.randint(1, 512) for _ in range(self.sequences - 1))]

    @property
    def batch(self) -> str:
        return f"{self.length} and {self.sequences - 1}<=512"


class Dense(JaxQla):
    """Calls without `cu_seqlens`, of batches whose sequences are alike. Operands are made as for packed calls."""

    def __init__(self, name: str, implementation: str) -> None:
        super().__init__(name, implementation)
        self._forward = functools.partial(_dense, self._forward)
        self._timed_forward = functools.partial(_dense, self._timed_forward)
        self._backward = functools.partial(_dense, self._backward)


def _dense(
    function: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    cu_seqlens: jax.Array,
    initial_state: jax.Array,
    *of_backward: Any,
) -> Any:
    del cu_seqlens

    def of_batch(x: jax.Array) -> jax.Array:
        return x.reshape(initial_state.shape[0], -1, *x.shape[2:])

    if of_backward:
        residuals, do, d_final_state = of_backward
        of_backward = (residuals, of_batch(do), d_final_state)
    return function(*map(of_batch, (q, k, v, g, beta)), None, initial_state, *of_backward)


class Timed(NamedTuple):
    """A row of the printed table."""

    part: str
    heads: str
    batch: str
    tokens: int
    forward: float
    """Milliseconds on the device, ..."""
    backward: float
    forward_ratio: float | None
    """... and over what it is compared with, if anything."""
    backward_ratio: float | None
    memory: float | None = None
    """Temporary memory of both passes over operands, results and gradients."""

    def __str__(self) -> str:
        ratios = ("-" if x is None else f"{x:.3f}" for x in (self.forward_ratio, self.backward_ratio))
        cells = (self.part, self.heads, self.batch, str(self.tokens), f"{self.forward:.4f}", f"{self.backward:.4f}")
        return " | ".join((*cells, *ratios, "-" if self.memory is None else f"{self.memory:.2f}"))


def time(row: Row, library: JaxQla, *, memory: bool = False) -> tuple[float, float, float | None]:
    """Milliseconds of the forward and the backward pass, and temporary memory of both if asked for."""
    backward = dataclasses.replace(row, direction="backward")
    library.prepare([row, backward], memory=memory)
    operands = inputs.make(row)
    found = [library.device_time(one, library.arguments(one, operands), SHORT_WARM_UP) for one in (row, backward)]
    if not memory:
        return found[0], found[1], None
    of_both = library.memory_found(row)
    return found[0], found[1], share_of_memory(of_both) if of_both else None


def part_of_tokens(heads: str, tokens: Sequence[int], implementation: str) -> Iterator[Timed]:
    before: tuple[int, float, float] | None = None
    for count in tokens:
        row = parse(f"forward/{heads}/1x{count}")
        forward, backward, memory = time(row, Dense("dense", implementation), memory=True)
        ratios: tuple[float | None, float | None] = (None, None)
        if before is not None:
            share = before[0] / count
            ratios = (forward / before[1] * share, backward / before[2] * share)
        yield Timed("tokens", heads, row.batch, count, forward, backward, *ratios, memory)
        before = (count, forward, backward)


def part_of_places(heads: str, places: Sequence[int], length: int, implementation: str) -> Iterator[Timed]:
    first: tuple[float, float] | None = None
    for count in places:
        row = parse(f"forward/{heads}/1x{length}of{count}")
        forward, backward, _ = time(row, JaxQla("packed", implementation))
        first = first or (forward, backward)
        ratios = (forward / first[0], backward / first[1])
        yield Timed("places", heads, row.batch, row.tokens, forward, backward, *ratios)


def part_of_batches(heads: str, batches: Sequence[str], long: int, implementation: str) -> Iterator[Timed]:
    uneven = [parse(f"forward/{heads}/{batch}") for batch in batches]
    if long:
        of_heads = parse(f"forward/{heads}/1x1")
        uneven.append(OneLong("forward", of_heads.key_heads, of_heads.value_heads, SHORT + 1, long))
    for row in uneven:
        sequences = 1 if isinstance(row, OneLong) else row.sequences
        even = parse(f"forward/{heads}/{sequences}x{-(-row.tokens // sequences)}")
        of_even = time(even, Dense("dense", implementation))
        forward, backward, _ = time(row, JaxQla("packed", implementation))
        ratios = (forward / of_even[0], backward / of_even[1])
        yield Timed("uneven", heads, row.batch, row.tokens, forward, backward, *ratios)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--heads", nargs="+", default=HEADS, metavar="Hk,Hv", help="default: 2,8 16,32")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of one sequence; default: to a million")
    parser.add_argument(
        "--batches", nargs="+", default=BATCHES, help="uneven ones, as benchmarks/compare.py names rows"
    )
    parser.add_argument("--long", type=int, default=TOKENS[-1], help="tokens beside short sequences, 0: no such batch")
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("runs/lengths"), metavar="DIR")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; ms of a pass, and ratios:")
    print("part | Hk, Hv | sequences | tokens | forward | backward | forward ratio | backward ratio | temporary memory")
    found: list[Timed] = []
    implementation = options.implementation
    for part, heads in ((part, heads) for part in options.parts for heads in options.heads):
        most = MOST // parse(f"forward/{heads}/1x1").value_heads
        if part == "tokens":
            rows = part_of_tokens(heads, [count for count in options.tokens if count <= most], implementation)
        elif part == "places":
            rows = part_of_places(heads, PLACES, LONG, implementation)
        else:
            rows = part_of_batches(heads, options.batches, options.long if options.long <= most else 0, implementation)
        for row in rows:
            print(row, flush=True)
            found.append(row)
            (options.output / "lengths.json").write_text(json.dumps([row._asdict() for row in found], indent=1))


if __name__ == "__main__":
    main()
