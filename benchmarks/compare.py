"""Times jax_qla and other libraries side by side on one card.

    python benchmarks/compare.py                                            # every row, every library installed
    python benchmarks/compare.py --rows '*/4x8192' 'forward/2,8/*'          # some rows, by shell patterns
    python benchmarks/compare.py --rows forward/8,16/3x5000 --libraries jax_qla flash_qla

A row is named pass/Hk,Hv/sequences x length, or as in forward/2,8/7<=4321 where the sequences have 1 to so many tokens,
or as in forward/2,8/4x8192of32 where there are places for more sequences, which are empty; K = V = 128, bfloat16,
float32 gates, an initial state given and the final state returned. Every library gets the same operands. Prints each
row as it comes, and writes comparison.json, comparison.md and the plots of benchmarks/plots.py to the output folder.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Two frameworks share the card: neither may take all of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")

import inputs
import jax
import plots
from measurement import Library
from ours import JaxQla
from peers import PEERS
from report import OURS, Report, joined
from rows import Row, select

SAVING, RECOMPUTING, ON_XLA = f"{OURS}_saving", f"{OURS}_recomputing", f"{OURS}_xla"
"""With `save_chunk_states` True and False; by the other implementation. Only compared if asked for."""

GPU_STATE = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw"


def libraries(**options: bool) -> dict[str, Callable[[], Library]]:
    """Every library that can be compared, by name; options of ours."""
    known: dict[str, Callable[[], Library]] = {
        OURS: lambda: JaxQla(OURS, "cuda", **options),
        SAVING: lambda: JaxQla(SAVING, "cuda", saving=True, **options),
        RECOMPUTING: lambda: JaxQla(RECOMPUTING, "cuda", saving=False, **options),
        # So much slower that two calls are enough.
        ON_XLA: lambda: JaxQla(ON_XLA, "xla", calls=2, **options),
    }
    return known | {peer.name: peer for peer in PEERS}


def gpu_state() -> str:
    """Clocks, temperature and power as nvidia-smi reports them now."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={GPU_STATE}", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "no nvidia-smi"
    return f"{GPU_STATE}: {done.stdout.strip() or done.stderr.strip()}"


def environment() -> dict[str, str]:
    """What the numbers depend on, beside the libraries compared."""
    found = {
        "device": jax.devices()[0].device_kind,
        "gpu before": gpu_state(),
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    for package in ("jaxlib", "torch", "tilelang"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    summary, _, details = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=[], metavar="PATTERN", help="default: all rows of the table")
    parser.add_argument(
        "--libraries",
        nargs="+",
        choices=list(libraries()),
        help=f"default: all but {SAVING}, {RECOMPUTING} and {ON_XLA}",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/comparison"), metavar="DIR")
    parser.add_argument(
        "--shared-segments",
        action="store_true",
        help="let the calls of jax_qla that are timed together derive the chunks from cu_seqlens once",
    )
    parser.add_argument(
        "--differentiated",
        action="store_true",
        help="time forward passes of jax_qla as those of a gradient, with all that they keep for the backward pass",
    )
    options = parser.parse_args(arguments)
    try:
        options.rows = select(options.rows)
    except ValueError as error:
        parser.error(str(error))
    return options


def installed(names: Sequence[str] | None, **options: bool) -> tuple[list[Library], dict[str, str]]:
    """The libraries asked for, and their versions. A library that is not installed is left out, with a message."""
    known = libraries(**options)
    found, versions = [], {}
    for name in names or [name for name in known if name not in (SAVING, RECOMPUTING, ON_XLA)]:
        library = known[name]()
        try:
            versions[name] = library.version()
        except ImportError as error:
            print(f"{name} is not installed ({error})", flush=True)
        else:
            found.append(library)
    return found, versions


def compare(rows: Sequence[Row], found: Sequence[Library], report: Report, output: Path) -> None:
    """Times every row by every library, one after the other; prints and writes each row when it is there."""
    operands: dict[str, jax.Array] = {}
    made_for = None
    for row in rows:
        if row.both != made_for:
            operands.clear()  # Before the next ones take their memory.
            operands, made_for = inputs.make(row), row.both
        report.rows[row] = {}
        for library in found:
            if row.direction not in library.directions:
                continue
            try:
                report.rows[row][library.name] = library.measure(row, operands)
            except Exception as error:  # One library's failure is a finding, and must not cost the other rows.
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                report.failures.setdefault(row, {})[library.name] = reason
                print(f"{row.name} {library.name}: {reason}", flush=True)
            gc.collect()
        print(report.line(row), flush=True)
        report.write(output)


def main() -> int:
    options = parse_arguments()
    of_ours = {"shared_segments": options.shared_segments, "differentiated": options.differentiated}
    found, versions = installed(options.libraries, **of_ours)
    print(f"{len(options.rows)} rows; libraries: {joined([f'{name} {x}' for name, x in versions.items()])}", flush=True)
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda library: library.prepare(options.rows), found))
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    report = Report(environment(), versions)
    for name, value in report.environment.items():
        print(f"{name}: {value}", flush=True)
    compare(options.rows, found, report, options.output)
    report.environment = {**report.environment, "gpu after": gpu_state()}
    print(f"gpu after: {report.environment['gpu after']}", flush=True)
    report.write(options.output)
    print("\n".join([*report.table(), "", *report.goals()]), flush=True)
    plots.draw(report, options.output)
    print(f"written to {options.output}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
