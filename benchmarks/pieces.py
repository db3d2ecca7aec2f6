"""Times what `jax_qla/policy.py` chooses from: sequences whole, and cut into pieces of several lengths.

    python benchmarks/pieces.py                                          # the rows of docs/performance.md
    python benchmarks/pieces.py --rows 2,8/1x32768 --lengths 0 1024 2048
    python benchmarks/pieces.py --rows 1,2/1x256 --lengths 0 64 --implementation xla       # a CPU, to try the script

A row is named Hk,Hv/sequences x length; lengths are rows of a piece, 0 for whole sequences; K = V = 128, bfloat16,
packed. Prints device milliseconds of the forward and the backward pass, what the policy chooses, and how much more
that takes than the best by the sum of both; writes pieces.json to the output folder.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import inputs
import jax
from ours import JaxQla
from rows import HEAD_DIM, Row, parse

from jax_qla import policy

ROWS = (
    *("2,8/1x32768", "2,8/1x8192", "2,8/1x2048", "2,8/2x16384", "2,8/4x8192"),
    *("16,32/1x32768", "16,32/1x8192", "16,32/1x2048", "16,32/2x16384"),
    *("16,64/1x32768", "16,64/1x8192", "16,48/1x8192", "16,48/4x8192"),
)
LENGTHS = (0, 512, 1024, 2048, 4096, 8192)


def times(row: Row, length: int, implementation: str) -> tuple[float, float]:
    """Device milliseconds of both passes of sequences in pieces of `length` rows."""
    os.environ[policy.OVERRIDE] = str(length)
    jax.clear_caches()  # The environment is read when a call is traced.
    library = JaxQla("jax_qla", implementation)
    passes = (row, replace(row, direction="backward"))
    library.prepare(passes)
    operands = inputs.make(row)
    forward, backward = (library.measure(one, operands).device for one in passes)
    return forward, backward


def chosen(row: Row) -> int:
    """What the policy chooses, 0 for whole sequences."""
    os.environ.pop(policy.OVERRIDE, None)
    rows = policy.piece_rows(row.tokens, row.sequences, row.value_heads, HEAD_DIM, HEAD_DIM, packed=True)
    return rows or 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="Hk,Hv/NxT", help="default: those of the docs")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="default: 0 512 1024 ... 8192")
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("runs/pieces"), metavar="DIR")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: ms of forward / backward by rows of a piece")
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name in options.rows:
        row = parse(f"forward/{name}")
        choice = chosen(row)
        # Pieces as long as the sequences are none.
        lengths = sorted({length for length in (*options.lengths, choice) if length < row.length})
        measured = {length: times(row, length, options.implementation) for length in lengths}
        found[name] = {str(length): pair for length, pair in measured.items()}
        sums = {length: sum(pair) for length, pair in measured.items()}
        cells = " | ".join(f"{length}: {pair[0]:.3f} / {pair[1]:.3f}" for length, pair in measured.items())
        excess = sums[choice] / min(sums.values()) - 1
        print(f"{name:14s} {cells} | the policy takes {choice}, {excess:.1%} above the best", flush=True)
        (options.output / "pieces.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
