"""When the kernels of a call begin and end, from a profile of calls that follow each other.

    python benchmarks/timeline.py --rows backward/16,32/1x8192 'forward/2,8/*'
    python benchmarks/timeline.py --rows 'forward/*' --normalised    # with use_qk_l2norm_in_kernel
    PYTHONPATH=../before python benchmarks/timeline.py --rows forward/2,8/1x8192    # another checkout

Needs an NVIDIA GPU. Prints of every kernel of a call the microseconds from the end of the call before to its beginning
and its end, medians of the calls. Kernels that overlap (programmatic dependent launch) begin early and wait.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import inputs
import jax
from measurement import CALLS, SHORT_WARM_UP
from ours import JaxQla
from profile_split import Kernel, kernels
from rows import Row, select

RUNS = 3
"""Of a chain of calls, in a profile."""
LAST = {"forward": ("forward_kernel",), "backward": ("backward_kernel", "gradients_kernel")}
"""The kernels that may end a call: the first of them that runs."""
PAUSE = 20e3
"""Nanoseconds between two calls of which the second did not follow the first at once: the host was waited for."""


def of_a_call(events: Sequence[Kernel], last: str, calls: int) -> list[tuple[str, float, float]]:
    """(name, beginning, end) of the kernels of a call, microseconds from the end of the call before, medians.

    Args:
        events: of chains of equal calls, in order of their beginnings, perhaps with others between the chains.
        last: the name of the kernel that ends a call, or each of its parts (heads in groups, or in halves).
        calls: how many there are in all.

    Raises:
        ValueError: there are not so many calls, or none that follows another at once.
    """
    ends = [index for index, event in enumerate(events) if event.name == last]
    if not ends or len(ends) % calls:
        raise ValueError(f"the profile has {len(ends)} times {last}, expected a multiple of {calls} calls")
    ends = ends[len(ends) // calls - 1 :: len(ends) // calls]
    found: dict[tuple[str, ...], list[list[tuple[float, float]]]] = collections.defaultdict(list)
    for before, end in itertools.pairwise(ends):
        of_call, since = events[before + 1 : end + 1], events[before].end
        if of_call[0].begin - since < PAUSE:
            times = [((kernel.begin - since) / 1e3, (kernel.end - since) / 1e3) for kernel in of_call]
            found[tuple(kernel.name for kernel in of_call)].append(times)
    if not found:
        raise ValueError("no call of the profile follows another at once")
    names, of_calls = max(found.items(), key=lambda item: len(item[1]))
    return [
        (name, statistics.median(begin for begin, _ in times), statistics.median(end for _, end in times))
        for name, times in zip(names, zip(*of_calls, strict=True), strict=True)
    ]


def profile(row: Row, normalised: bool) -> list[tuple[str, float, float]]:
    """`of_a_call` of jax_qla's calls of a row, by the kernels, after 0.3 s of the same calls and more.

    Raises:
        ValueError: as `of_a_call`; the kernels of a GPU are not in the profile.
    """
    library = JaxQla("jax_qla", "cuda", normalised=normalised)
    library.prepare([row], memory=False)
    arguments = library.arguments(row, inputs.make(row))
    library.device_time(row, arguments, SHORT_WARM_UP)
    run = library.run(row, arguments)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(RUNS):
                run(1)
        events = sorted(kernels(Path(folder)))
    return of_a_call(events, ending(events, row.direction), RUNS * CALLS)


def ending(events: Sequence[Kernel], direction: str) -> str:
    """The kernel that ends a call of a pass: the first of `LAST` among the events."""
    running = {event.name for event in events}
    return next((name for name in LAST[direction] if name in running), LAST[direction][-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", required=True, metavar="PATTERN", help="as in benchmarks/compare.py")
    parser.add_argument("--normalised", action="store_true", help="as in benchmarks/versions.py")
    options = parser.parse_args(arguments)
    rows = select(options.rows)
    if options.normalised and any(row.direction != "forward" for row in rows):
        parser.error("--normalised is for forward rows")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: us from the end of the call before", flush=True)
    for row in rows:
        print(row.name)
        for name, begin, end in profile(row, options.normalised):
            print(f"    {name[:40]:40s} {begin:8.1f} {end:8.1f}", flush=True)


if __name__ == "__main__":
    main()
