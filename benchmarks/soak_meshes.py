"""Runs random calls cut over random meshes of several devices, and compares everything they return.

    python benchmarks/soak_meshes.py --seconds 300              # on Hopper GPUs: "cuda" against "xla"
    python benchmarks/soak_meshes.py --pair xla reference       # anywhere, with JAX_NUM_CPU_DEVICES=4
    python benchmarks/soak_meshes.py --again 123456             # the call with this seed, printed with a fault

Operations are those of soak_operations.py, of sizes that a mesh divides. Random are the mesh, of one axis or two, Auto
or Explicit ones, and what each cuts: batch, tokens (of which the recurrence and the convolution then exchange
something), heads or channels, or nothing, two perhaps the same, in any order. The second implementation computes each
on one device. Calls are compiled some at a time and run one after the other, twice each in memory that held NaN, and
must give the same bits. Prints counts, the largest errors and where they were; exits with 1 on any fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import soak
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from soak_operations import Convolution, GatedDeltaRule, GatedNorm, Operation, Recurrence, draw

SHAPES = {2: ((2,), (2, 1), (1, 2)), 4: ((4,), (2, 2), (4, 1)), 8: ((8,), (2, 4), (4, 2))}
"""Of meshes, by their number of devices."""
AXES = "x", "y"
AT_ONCE = 8
"""Calls compiled at once."""
FEWER = 32
"""Tokens times value heads of a call are `soak.py`'s over this: nearly all the time is the compiler's."""

_OF_TOKENS = ("batch", "tokens", "heads")
_DIMENSIONS: dict[type[Operation], dict[str, tuple[str | None, ...]]] = {
    GatedDeltaRule: {**dict.fromkeys(("q", "k", "v", "do", "g", "beta"), _OF_TOKENS), "segment_ids": _OF_TOKENS[:2]},
    Recurrence: {**dict.fromkeys(("q", "k", "v", "g", "beta"), _OF_TOKENS), "initial_state": ("batch", "heads")},
    GatedNorm: dict.fromkeys(("o", "z", "dy"), _OF_TOKENS),
    Convolution: {
        **dict.fromkeys(("x", "dy"), ("batch", "tokens", "channels")),
        **dict.fromkeys(("initial_tail", "d_tail"), ("batch", None, "channels")),
        "segment_ids": ("batch", "tokens"),
        "weight": (None, "channels"),
        "bias": ("channels",),
    },
}
"""What the axes of operands are; of others, and beyond these, nothing that is cut."""
_STATES = {"dense": ("batch", "heads"), "cu_seqlens": (None, "heads"), "segment_ids": ("batch", None, "heads")}
"""The same of the states of the gated delta rule, by its form."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """An operation, and how its operands lie on several devices."""

    operation: Operation
    shape: tuple[int, ...]
    """Of the mesh."""
    kind: AxisType
    """Of its axes."""
    cuts: Mapping[str, tuple[str, ...]]
    """Axes of the mesh by what they cut, the first the slowest."""

    def mesh(self) -> jax.sharding.Mesh:
        devices = np.array(jax.devices()[: math.prod(self.shape)]).reshape(self.shape)
        return jax.sharding.Mesh(devices, AXES[: len(self.shape)], axis_types=(self.kind,) * len(self.shape))

    def spec(self, name: str) -> PartitionSpec:
        dimensions = _DIMENSIONS[type(self.operation)].get(name, ())
        if isinstance(self.operation, GatedDeltaRule) and name.endswith("_state"):
            dimensions = _STATES[self.operation.form]
        return PartitionSpec(*(self.cuts.get(dimension or "") for dimension in dimensions))


def draw_placed(seed: int, pair: Sequence[str], largest: int, devices: int) -> tuple[Placed, np.random.Generator]:
    """Any operation, of sizes that the mesh drawn for it divides, and the generator that its operands come from."""
    random = np.random.default_rng(seed)
    operation = draw(random, pair, largest)
    count = int(random.choice([n for n in SHAPES if n <= devices]))
    shape = SHAPES[count][int(random.integers(len(SHAPES[count])))]
    kind = (AxisType.Auto, AxisType.Explicit)[int(random.integers(2))]
    if isinstance(operation, Convolution):
        # Parts of channels that are cut are no equal parts of what a device has.
        able = ["batch", "tokens"] if len(operation.parts) > 1 else ["batch", "tokens", "channels"]
    elif isinstance(operation, Recurrence):
        able = ["batch", "heads"]  # a token follows from the one before it
    else:
        able = ["batch", "tokens", "heads"]
    if getattr(operation, "form", "") == "cu_seqlens":
        able.remove("batch")
    cuts: dict[str, tuple[str, ...]] = {}
    for axis in random.permutation(AXES[: len(shape)]).tolist():
        if random.random() < 0.9:
            dimension = able[int(random.integers(len(able)))]
            cuts[dimension] = (*cuts.get(dimension, ()), axis)
    sizes = {dimension: math.prod(shape[AXES.index(axis)] for axis in axes) for dimension, axes in cuts.items()}
    return Placed(_divisible(operation, sizes), shape, kind, cuts), random


def _divisible(operation: Operation, sizes: Mapping[str, int]) -> Operation:
    """The operation with sizes that are multiples of these."""

    def multiple(size: int, of: str) -> int:
        return -(-size // sizes.get(of, 1)) * sizes.get(of, 1)

    more: dict[str, Any] = {"batch": multiple(operation.batch, "batch"), "tokens": multiple(operation.tokens, "tokens")}
    if isinstance(operation, GatedDeltaRule | Recurrence):
        more["key_heads"] = multiple(operation.key_heads, "heads")
        more["value_heads"] = more["key_heads"] * (operation.value_heads // operation.key_heads)
    if isinstance(operation, GatedNorm):
        more["value_heads"] = multiple(operation.value_heads, "heads")
    if isinstance(operation, Convolution):
        more["parts"] = tuple(size * sizes.get("channels", 1) for size in operation.parts)
    return dataclasses.replace(operation, **more)


def one_call(seed: int, pair: Sequence[str], largest: int, devices: int) -> tuple[Placed, Any]:
    """What is drawn with this seed, and a function that runs it, compiled, in so many bytes of NaN on each device, and
    returns a Tally."""
    placed, random = draw_placed(seed, pair, largest, devices)
    operation, mesh = placed.operation, placed.mesh()
    operands = operation.operands(random)
    with jax.set_mesh(mesh):
        on_mesh = {name: jax.device_put(x, NamedSharding(mesh, placed.spec(name))) for name, x in operands.items()}
        ours = soak.compiled(operation, pair[0]).lower(on_mesh).compile()
    on_one = jax.device_put(operands, jax.devices()[0])
    theirs = soak.compiled(operation, pair[1]).lower(on_one).compile()

    def run(poison: int) -> soak.Tally:
        tally = soak.Tally()
        tally.counts.update(["compiled", *operation.kinds, f"{placed.kind.name}, {placed.shape}"])
        tally.counts.update([f"{type(operation).__name__}, {dimension} cut" for dimension in placed.cuts])
        right = jax.device_get(theirs(on_one)[0])
        calls = []
        for _ in range(2):
            for device in mesh.devices.flat:
                soak.poison(device, poison)
            calls.append(jax.device_get(ours(on_mesh)))
        soak.compare(tally, operation, operands, calls, right)
        where = f"--again {seed}: {placed}"
        tally.worst = {result: (error, where) for result, (error, _) in tally.worst.items()}
        return tally

    return placed, run


def calls(seeds: Iterator[int], pair: Sequence[str], largest: int, poison: int, until: float) -> soak.Tally:
    """As many as there is time for, and no round of `AT_ONCE` that would not end in it if it took as long as the
    longest so far."""
    total = soak.Tally()
    devices, longest = len(jax.devices()), 0.0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while not total.counts["rounds"] or time.monotonic() + longest < until:
            began = time.monotonic()
            drawn = [next(seeds) for _ in range(AT_ONCE)]
            jobs = [pool.submit(one_call, seed, pair, largest, devices) for seed in drawn]
            for seed, job in zip(drawn, jobs, strict=True):
                placed: Any = "not compiled"
                try:
                    placed, run = job.result()
                    total.add(run(poison))
                except Exception as error:  # A failing call is a finding; the others go on.
                    kind = "" if isinstance(error, soak.Fault) else f"{type(error).__name__}: "
                    total.faults.append(f"--again {seed}: {placed}: {kind}{str(error)[:500]}")
            del jobs, job
            jax.clear_caches()
            total.counts["rounds"] += 1
            longest = max(longest, time.monotonic() - began)
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pair", nargs=2, default=("cuda", "xla"), metavar="NAME", help="default: cuda xla")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--again", type=int, metavar="SEED", help="only the call with this seed")
    options = parser.parse_args(arguments)
    devices = jax.devices()
    if len(devices) < 2:
        parser.error(f"a mesh needs two devices, found {len(devices)}")
    gpu = devices[0].platform == "gpu"
    sizes: Any = {"largest": (2**18 if gpu else 2**14) // FEWER, "poison": 2**28 if gpu else 2**20}
    of_devices = f"{len(devices)} x {devices[0].device_kind}"
    print(f"{jax.__version__}, {of_devices}, {options.pair}, seed {options.seed}", flush=True)
    if options.again is not None:
        placed, run = one_call(options.again, options.pair, sizes["largest"], len(devices))
        print(placed, flush=True)
        total = run(sizes["poison"])
    else:
        random = np.random.default_rng(options.seed)
        seeds = (int(random.integers(2**31)) for _ in itertools.count())
        total = calls(seeds, options.pair, until=time.monotonic() + options.seconds, **sizes)
    print(json.dumps(total.to_json(), indent=1))
    return soak.exit_code(total)


if __name__ == "__main__":
    sys.exit(main())
