"""Times what `jax_qla/policy/pieces.py` chooses from: sequences whole, and cut into pieces of several lengths.

    python benchmarks/pieces.py                                          # the rows of docs/performance_policy.md
    python benchmarks/pieces.py --rows 2,8/1x32768 --lengths 0 1024 2048
    python benchmarks/pieces.py --rows 1,2/1x256 --lengths 0 64 --implementation xla       # a CPU, to try the script

A row is named Hk,Hv/sequences x length, or as in 2,8/4x8192of32 where there are places for more sequences than have
tokens; lengths are rows of a piece, 0 for whole sequences, and those of so many equal pieces of all tokens as
`--pieces` says; K = V = 128, bfloat16, packed. Prints device milliseconds of the forward pass alone, of one that keeps
what the backward pass reads, and of the backward pass, without and with kernels/backward.py (`policy.in_one`), what the
policy chooses, and how much more that takes than the best, of the forward pass alone and of both. Writes pieces.json to
the output folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import inputs
import jax
from measurement import SHORT_WARM_UP
from ours import JaxQla
from rows import CHUNK, HEAD_DIM, Row, parse

from jax_qla import policy
from jax_qla.kernels.balance import balanced
from jax_qla.segments import cut_count

ROWS = (
    *("2,8/1x32768", "2,8/1x8192", "2,8/1x2048", "2,8/2x16384", "2,8/4x8192", "4,16/1x32768", "16,16/1x8192"),
    *("16,32/1x32768", "16,32/1x16384", "16,32/1x8192", "16,32/1x2048", "16,32/2x16384", "16,32/4x8192"),
    *("16,64/1x32768", "16,64/1x8192", "16,64/4x8192", "16,48/1x32768", "16,48/1x8192", "16,48/4x8192"),
)
LENGTHS = (0, 512, 1024, 2048, 4096, 8192)
PIECES = (5, 6, 11)


class Times(NamedTuple):
    """Device milliseconds of pieces of one length."""

    forward: float
    """Alone, ..."""
    keeping: float
    """... and with all that it keeps for the backward pass."""
    backward: float
    """By `state_gradients` and `gradients`, ..."""
    in_one: float
    """... and by `backward`."""


def times(row: Row, length: int, implementation: str) -> Times:
    """Of both passes of sequences in pieces of `length` rows."""
    os.environ[policy.OVERRIDE] = str(length)
    backward = replace(row, direction="backward")
    operands = inputs.make(row)
    found = []
    for in_one, differentiated, passes in (
        ("0", False, (row,)),
        ("0", True, (row, backward)),
        ("1", False, (backward,)),
    ):
        os.environ[policy.IN_ONE_OVERRIDE] = in_one
        jax.clear_caches()  # The environment is read when a call is traced.
        library = JaxQla("jax_qla", implementation, differentiated=differentiated)
        library.prepare(passes, memory=False)
        found += [library.device_time(one, library.arguments(one, operands), SHORT_WARM_UP) for one in passes]
    return Times(*found)


class Choice(NamedTuple):
    """What the policy chooses; rows of a piece are 0 for whole sequences."""

    rows: int
    """Of the forward pass alone."""
    rows_for_both: int
    """Of the forward pass where the backward pass is computed too."""
    backward_rows: int
    in_one: bool


def chosen(row: Row) -> Choice:
    """Of a packed batch whose sequences, but the empty ones, are alike."""
    for override in (policy.OVERRIDE, policy.IN_ONE_OVERRIDE):
        os.environ.pop(override, None)
    sizes = (row.tokens, row.places, row.value_heads, HEAD_DIM, HEAD_DIM)
    of_kernel: dict[str, Any] = {"ratio": row.value_heads // row.key_heads, "split": False, "packed": True}
    alone = policy.piece_rows(*sizes, packed=True) or 0
    kept = policy.kept_rows(*sizes, **of_kernel) or 0
    forward = kept or policy.piece_rows(*sizes, packed=True, differentiated=True) or 0
    back = kept or policy.backward_rows(*sizes, **of_kernel) or 0
    recurrences = cut_count(row.tokens, back) if back else row.places
    in_one = policy.in_one(recurrences, *sizes[2:], **of_kernel) != "never"
    by_lengths = policy.balance(row.value_heads, ratio=of_kernel["ratio"])
    lengths = [row.tokens // recurrences] * recurrences if back else row.lengths
    in_one = in_one and balanced(lengths, *by_lengths)
    return Choice(alone, forward, back, in_one)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="Hk,Hv/NxT", help="default: those of the docs")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="default: 0 512 1024 ... 8192")
    parser.add_argument("--pieces", nargs="*", type=int, default=PIECES, help="default: 5 6 11")
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("runs/pieces"), metavar="DIR")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: ms of forward / forward that keeps / backward / "
        "in one, by rows of a piece"
    )
    found: dict[str, dict[str, Times]] = {}
    for name in options.rows:
        row = parse(f"forward/{name}")
        choice = chosen(row)
        # Pieces as long as the sequences are none.
        equal = (CHUNK * math.ceil(row.tokens / (CHUNK * pieces)) for pieces in options.pieces)
        wanted = (*options.lengths, *equal, choice.rows, choice.rows_for_both)
        lengths = sorted({length for length in wanted if length < row.length})
        measured = {length: times(row, length, options.implementation) for length in lengths}
        found[name] = {str(length): of for length, of in measured.items()}
        cells = " | ".join(f"{length}: " + " / ".join(f"{x:.3f}" for x in of) for length, of in measured.items())
        print(f"{name:14s} {cells} | {_judged(choice, measured)}", flush=True)
        (options.output / "pieces.json").write_text(json.dumps(found, indent=1))


def _judged(choice: Choice, measured: Mapping[int, Times]) -> str:
    """The choice, and how much more it takes than the best."""
    forward = measured[choice.rows].forward / min(of.forward for of in measured.values()) - 1
    of_backward = measured[choice.backward_rows]
    taken = measured[choice.rows_for_both].keeping + (of_backward.in_one if choice.in_one else of_backward.backward)
    best = min(
        measured[rows].keeping + min(measured[back].backward, measured[back].in_one)
        for rows in measured
        for back in measured
        if back in (0, rows)
    )
    in_one = " in one" if choice.in_one else ""
    return (
        f"the policy takes {choice.rows}, {forward:.1%} above the best, "
        f"with the backward pass {choice.rows_for_both} and {choice.backward_rows}{in_one}, {taken / best - 1:.1%}"
    )


if __name__ == "__main__":
    main()
