"""compute-sanitizer on small packed calls of both passes, in the forms that the kernels have. On a Hopper card:

    python tests/sanitize.py             # racecheck: two accesses to shared memory that nothing orders
    python tests/sanitize.py memcheck    # accesses out of bounds

Prints a line a call, and ends with 1 if compute-sanitizer finds anything or cannot run. Several calls at once on one
card have ended in segmentation faults of the sanitizer's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # as pytest has it for test_cuda.py

import battery
import convolution_cases
import norm_cases
from test_cuda import (
    ONE_LONG,
    ONE_LONG_NORMALISED,
    cuda,
    in_high_precision,
    test_lying_cu_seqlens_stay_in_bounds,
    that_keeps,
    that_recomputes,
)

from jax_qla import policy
from jax_qla.cuda import conv1d, norm

PACKED = battery.Case("sanitized", "bfloat16", tokens=333, key_heads=2, value_heads=4, segments=((0, 300), (300, 333)))
WIDE = replace(PACKED, key_dim=128, value_dim=128, l2norm=True)
IN_ONE = replace(PACKED, key_dim=128, value_dim=128)
FOUR = replace(IN_ONE, value_heads=8)
MANY_KEY_HEADS = replace(PACKED, key_heads=72, value_heads=72)
CONVOLVED = convolution_cases.Case(ids=True, before=True, bias=True)
LIES = partial(test_lying_cu_seqlens_stay_in_bounds, [-5, 64, 64, 1 << 30], None, None)

CALLS: dict[str, tuple[int, Callable[[], object]]] = {
    "whole": (0, partial(battery.run, PACKED, cuda)),
    "whole, states kept": (0, partial(battery.run, PACKED, that_keeps)),
    "whole, Vd computed again": (0, partial(battery.run, PACKED, that_recomputes)),
    "whole, a long sequence in halves": (0, partial(battery.run, ONE_LONG, cuda)),
    "pieces of 64": (64, partial(battery.run, PACKED, cuda)),
    "pieces of 128": (128, partial(battery.run, PACKED, cuda)),
    "pieces of 128, of one sequence among others": (128, partial(battery.run, ONE_LONG, cuda)),
    "pieces of 256, which no sequence needs": (256, partial(battery.run, PACKED, cuda)),
    "pieces of 128, states kept": (128, partial(battery.run, PACKED, that_keeps)),
    "pieces of 128, Vd computed again": (128, partial(battery.run, PACKED, that_recomputes)),
    "K = V = 128, normalised": (0, partial(battery.run, WIDE, cuda)),
    "normalised, 36 heads with keys of their own": (
        0,
        partial(battery.run, replace(WIDE, key_heads=36, value_heads=36), cuda),
    ),
    "normalised, 72 heads, two of a key head": (
        0,
        partial(battery.run, replace(WIDE, key_heads=36, value_heads=72), cuda),
    ),
    "normalised, a long sequence in halves": (0, partial(battery.run, ONE_LONG_NORMALISED, cuda)),
    "normalised, 4 heads with keys of their own": (
        0,
        partial(battery.run, replace(WIDE, key_heads=4, value_heads=4), cuda),
    ),
    "backward pass in one kernel": (0, partial(battery.run, IN_ONE, cuda)),
    "backward pass in one kernel, normalised": (0, partial(battery.run, WIDE, cuda)),
    "backward pass in one kernel, four value heads a key head": (0, partial(battery.run, FOUR, cuda)),
    "cu_seqlens that lie, backward pass in one kernel": (0, LIES),
    "72 heads with keys of their own": (0, partial(battery.run, MANY_KEY_HEADS, cuda)),
    "high precision": (0, partial(battery.run, PACKED, in_high_precision)),
    "high precision, K = V = 128, normalised": (0, partial(battery.run, WIDE, in_high_precision)),
    "high precision, pieces of 64, states kept": (
        64,
        partial(battery.run, PACKED, partial(that_keeps, precision="high")),
    ),
    "cu_seqlens that lie": (0, LIES),
    "cu_seqlens that lie, pieces of 128": (128, LIES),
    "short convolution": (0, partial(convolution_cases.check, CONVOLVED, conv1d.forward, conv1d.backward)),
    "gated norm": (0, partial(norm_cases.check, *norm_cases.SMALL[1], norm.forward, norm.backward)),
}
"""Rows of a piece, 0 for whole sequences, and what is computed."""


def check(tool: str) -> bool:
    """Runs all calls under compute-sanitizer; whether it has found nothing."""
    # Of kernels whose names end like this, which ours do: XLA's are not looked at.
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--kernel-name",
        "kernel_substring=_kernel",
        "--error-exitcode",
        "9",
    ]
    if tool == "memcheck":  # The driver refuses a question by design: how many operands there are.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, __file__, "--compute"]
    clean = True
    for name, (rows, _) in CALLS.items():
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", policy.OVERRIDE: str(rows)}
        environment[policy.IN_ONE_OVERRIDE] = str(int("in one kernel" in name))
        done = subprocess.run([*command, name], capture_output=True, text=True, env=environment, check=False)
        found = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        print(f"{name}: {' '.join(found) or (done.stdout + done.stderr)[-2000:]}", flush=True)
        clean &= done.returncode == 0 and len(found) == 1 and "SUMMARY: 0 " in found[0]
    return clean


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--compute"]:
        CALLS[arguments[1]][1]()
    else:
        sys.exit(0 if check(*(arguments or ["racecheck"])) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
