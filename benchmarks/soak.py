"""Runs two implementations on random calls for as long as you like, and compares everything they return.

    python benchmarks/soak.py --seconds 3600                        # on a Hopper GPU: "cuda" against "xla"
    python benchmarks/soak.py --seconds 420 --processes 9           # an hour's worth in seven minutes of one card
    python benchmarks/soak.py --seconds 60 --pair xla reference     # anywhere
    python benchmarks/soak.py --again 123456                        # the round with this seed, printed with a fault

Random are operations (soak_operations.py), sizes, dtypes, packings, gates, states and options. Every call runs in
memory that held NaN, twice, and must give the same bits; results and gradients must agree with the second
implementation's. Two threads call at the same time, each on a device of its own where there are several, and where
JAX can, a second call of one program runs on another stream. Command buffers (CUDA graphs) are on for half of the
time, each kind in processes of its own: one after the other, or, with `--processes`, side by side, each with its
share of the card's memory and its own seeds. After every round nothing may be left on the devices, of what this
process has taken; in what is left of the time, a tenth of it or `--repeating` so much, compiled calls are repeated some
thousand times each, all of which must give the same bits, and during which memory must not grow. Prints counts, the
largest errors and where they were; exits with 1 on any fault.

No round is begun that would not end in its time, if it took as long as the longest so far. A process that must be ended
is a fault; what it found in the rounds before counts. On SIGTERM (`timeout`) all processes are ended, and what there is
is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import repeats
from soak_operations import GatedDeltaRule, Operation, draw

from jax_qla import policy

THREADS = 2
BODIES = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vmap_call": "call"}
"""Primitives that stand for the function in one of their parameters."""
UNTIMED = "--xla_gpu_autotune_level=0"
"""XLA is not to choose its own kernels by timing them: that takes most of a round, beside others that use the card."""
MEMORY = 0.85
"""Of a card, shared by the processes."""
PATIENCE = 90
"""Seconds after its time until a process counts as hanging."""
AT_ONCE = 100
"""Equal calls between two looks at what they gave."""
REPETITIONS = 5000
"""Of one call, after which another is taken. Twice `AT_ONCE` at the least, the first of which say nothing of memory."""
STEADY_GROWTH = 32 * 2**20
"""Bytes that host memory may grow by while one compiled call is repeated."""
DEVICE_GROWTH = 2**20


class Fault(Exception):
    """What must not be, as a sentence."""


def compiled(operation: Operation, implementation: str, *, two_streams: bool = False) -> Any:
    """Jitted: `Operation.results`, twice if on two streams (equal, but for what XLA rounds: `compare`)."""

    def once(operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return operation.results(operands, implementation)

    if not two_streams:
        return jax.jit(lambda operands: (once(operands),))

    def twice(operands: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], ...]:
        return once(operands), on_other_stream(once)(operands)

    return jax.jit(twice)


def on_other_stream(function: Any) -> Any:
    """`function`, called on another stream of the device."""
    from jax.experimental import compute_on as module

    compute_on: Any = module.compute_on
    if "out_memory_spaces" not in inspect.signature(compute_on).parameters:
        return compute_on("gpu_stream:1")(jax.jit(function))
    # What jax 0.11 has under this name: of one traced function, whose results stay on the device.
    return compute_on(_without_calls(function), compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)


def _without_calls(function: Any) -> Any:
    """`function` with the bodies of all jitted functions in their places.

    JAX 0.11 annotates a call within such a region, too, and XLA then fails to find a stream for it.
    """

    def run(*operands: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
        results = _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _evaluate(jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *operands), strict=True))

    def value(x: Any) -> Any:
        return x.val if hasattr(x, "val") else values[x]  # a literal, or a variable

    for equation in jaxpr.eqns:
        given = [value(x) for x in equation.invars]
        if equation.primitive.name in BODIES:
            body = equation.params[BODIES[equation.primitive.name]]
            results = _evaluate(body.jaxpr, body.consts, given)
        else:
            found = equation.primitive.bind(*given, **equation.primitive.get_bind_params(equation.params))
            results = found if equation.primitive.multiple_results else [found]
        values |= dict(zip(equation.outvars, results, strict=True))
    return [value(x) for x in jaxpr.outvars]


def why_no_other_stream(implementation: str) -> str | None:
    """Why this JAX cannot put a part of a program on another stream, or None."""
    random = np.random.default_rng(0)
    call = GatedDeltaRule.draw(random, implementation == "cuda", 1)
    try:
        jax.block_until_ready(compiled(call, implementation, two_streams=True)(call.operands(random)))
    except Exception as error:  # Experimental in JAX: whatever it says is the reason.
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None


def poison(device: Any, size: int) -> None:
    """Leaves free memory of the device filled with NaN."""
    with jax.default_device(device):
        blocks = [jnp.full((size // 32,), jnp.nan, jnp.float32) for _ in range(8)]
        jax.block_until_ready(blocks)


def errors(operation: Operation, operands: dict[str, np.ndarray], found: Any, right: Any) -> dict[str, float]:
    """Relative error of each result."""
    wide = {name: np.asarray(x, np.float64) for name, x in right.items()}
    least = operation.least(operands, wide)
    measured = {}
    for name, expected in wide.items():
        size = max(float(np.linalg.norm(expected)), least.get(name, 0.0), 1e-30)
        measured[name] = float(np.linalg.norm(np.asarray(found[name], np.float64) - expected)) / size
    return measured


@dataclasses.dataclass
class Tally:
    """What was done, and the worst of what was found."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    worst: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    """The largest error, and the operation it was found with, by kind of operation, result and dtype."""
    faults: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.faults += other.faults
        for key, value in other.worst.items():
            self.worst[key] = max(self.worst.get(key, (0.0, "")), value)

    def to_json(self) -> dict[str, Any]:
        worst = {key: {"error": error, "with": where} for key, (error, where) in sorted(self.worst.items())}
        return {"counts": dict(sorted(self.counts.items())), "worst": worst, "faults": self.faults}

    def write(self, report: Path) -> None:
        """Whole at any time, for who reads it may end the process that writes it."""
        new = report.with_name(f"{report.name}.new")
        new.write_text(json.dumps(self.to_json(), indent=1))
        new.replace(report)

    @classmethod
    def from_json(cls, report: Mapping[str, Any]) -> Tally:
        worst = {key: (value["error"], value["with"]) for key, value in report["worst"].items()}
        return cls(Counter(report["counts"]), worst, list(report["faults"]))


def one_round(seed: int, device: Any, options: argparse.Namespace, streams: bool, *, until: float = math.inf) -> Tally:
    """One operation, compiled once and called with several sets of numbers, by both implementations.

    After `until`, of `time.monotonic`, no further call is begun; the first always is.
    """
    tally = Tally()
    random = np.random.default_rng(seed)
    operation = draw(random, options.pair, options.largest)
    two_streams = streams and bool(random.random() < 0.3)
    ours = compiled(operation, options.pair[0], two_streams=two_streams)
    theirs = compiled(operation, options.pair[1])
    tally.counts.update(["compiled", *operation.kinds])
    for i in range(operation.calls):
        if i > 0 and time.monotonic() > until:
            break
        operands = operation.operands(random)
        with jax.default_device(device):
            on_device = {name: jax.device_put(x, device) for name, x in operands.items()}
            try:
                right = jax.device_get(theirs(on_device)[0])
                calls = []
                for _ in range(2):
                    poison(device, options.poison)
                    calls.append(jax.device_get(ours(on_device)))
                compare(tally, operation, operands, calls, right, options.pair[0] == "cuda")
            except Fault as fault:
                tally.faults.append(f"--again {seed}: {operation}: {fault}")
            except Exception as error:  # A failing call is a finding; the others go on.
                tally.faults.append(f"--again {seed}: {operation}: {type(error).__name__}: {str(error)[:500]}")
    return tally


def compare(
    tally: Tally,
    operation: Operation,
    operands: dict[str, np.ndarray],
    calls: Sequence[Sequence[Any]],
    right: Any,
    by_kernels: bool = True,
) -> None:
    """Every call's results, one of each stream, with each other bit by bit, and the first's with what is right."""
    streams, runs = len(calls[0]), [results for call in calls for results in call]
    # The same bits are what the kernels promise; where XLA does a part, or all, a call is compared with those of its
    # stream.
    places = 1 if by_kernels and operation.alike else streams
    for name, x in runs[0].items():
        for i, other in enumerate(runs[places:], start=places):
            tally.counts["results compared bit by bit"] += 1
            if np.asarray(runs[i % places][name]).tobytes() != np.asarray(other[name]).tobytes():
                raise Fault(f"{name} differs from one call to the next")
        if not np.all(np.isfinite(np.asarray(x, np.float32))):
            raise Fault(f"{name} is not finite")
    tally.counts["calls"] += len(runs)
    if streams > 1:
        tally.counts["calls on two streams"] += len(runs)
    for name, error in errors(operation, operands, runs[0], right).items():
        tally.counts["results compared"] += 1
        key = f"{type(operation).__name__} {name} {operation.dtype}"
        tally.worst[key] = max(tally.worst.get(key, (0.0, "")), (error, str(operation)))
        limit = operation.limit(name)
        if not error <= limit:
            raise Fault(f"{name} is off by {error:.2e} of its norm, limit {limit:.0e}")


def device_bytes() -> int:
    """In use on all devices; 0 where JAX does not say (CPU)."""
    return sum((device.memory_stats() or {}).get("bytes_in_use", 0) for device in jax.local_devices())


def host_bytes() -> int:
    """Resident in this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def repeated(options: argparse.Namespace, seconds: float, device: Any) -> Tally:
    """Compiled calls, one after the other, each repeated: `steady`. One at the least, if there is any time."""
    tally = Tally()
    if not seconds:
        return tally
    random = np.random.default_rng(options.seed)
    end = time.monotonic() + seconds
    while not tally.counts["repeated calls"] or (time.monotonic() < end and not tally.faults):
        operation = draw(random, options.pair, options.largest)
        operands = {name: jax.device_put(x, device) for name, x in operation.operands(random).items()}
        tally.add(steady(operation, options.pair[0], operands, end))
        jax.clear_caches()
    return tally


def steady(operation: Operation, implementation: str, operands: Mapping[str, jax.Array], end: float) -> Tally:
    """One compiled call, repeated until `end` or `REPETITIONS` times: always the same bits, of the second call, say,
    as of the first, and neither host nor device memory grows."""
    tally = Tally()
    run, compare = compiled(operation, implementation), jax.jit(repeats.different)
    first = run(operands)[0]

    def repeat() -> None:
        found = [compare(tuple(run(operands)[0].values()), tuple(first.values())) for _ in range(AT_ONCE)]
        tally.counts["repeated calls"] += AT_ONCE
        differing = np.asarray(jax.device_get(found))
        if differing.any():
            tally.faults.append(f"{operation}, repeated: {repeats.described(differing, first)}")

    repeat()  # These bring in all that stays.
    gc.collect()
    before = host_bytes(), device_bytes()
    calls = AT_ONCE
    while not tally.faults and (calls < 2 * AT_ONCE or (calls < REPETITIONS and time.monotonic() < end)):
        repeat()
        calls += AT_ONCE
    gc.collect()
    for name, grown, allowed in (
        ("host", host_bytes() - before[0], STEADY_GROWTH),
        ("device", device_bytes() - before[1], DEVICE_GROWTH),
    ):
        if grown > allowed:
            tally.faults.append(f"{name} memory grew by {grown} bytes in {calls} equal calls of {operation}")
    return tally


def soak(options: argparse.Namespace) -> Tally:
    """All that this process does."""
    total = Tally()
    devices = jax.local_devices()
    reason = None if options.streams else "not wanted"
    reason = reason or why_no_other_stream(options.pair[0])
    overrides = (f"{name}={os.environ.get(name)}" for name in (policy.GROUPS_OVERRIDE, policy.IN_ONE_OVERRIDE))
    environment = ", ".join((f"XLA_FLAGS={options.flags!r}", *overrides))
    print(f"{jax.__version__}, {len(devices)} x {devices[0].device_kind}, {options.pair}, {environment}")
    print("a second stream: " + (f"no, {reason}" if reason else "yes"), flush=True)
    start, rounds, longest, base = time.monotonic(), 0, 0.0, None
    repeating = options.repeating * options.seconds
    until = start + options.seconds - repeating
    seeds = np.random.default_rng(options.seed)

    def note() -> None:
        total.counts["rounds"], total.counts["seconds"] = rounds, round(time.monotonic() - start)
        if options.report:  # All of it, should this process have to be ended.
            total.write(options.report)

    with ThreadPoolExecutor(THREADS) as pool:
        while rounds == 0 or (time.monotonic() + longest < until and len(total.faults) < 10):
            began = time.monotonic()
            drawn = [int(x) for x in seeds.integers(0, 2**31, THREADS)]
            jobs = [
                pool.submit(one_round, seed, devices[i % len(devices)], options, not reason, until=until)
                for i, seed in enumerate(drawn)
            ]
            for job in jobs:
                total.add(job.result())
            del jobs, job
            jax.clear_caches()
            gc.collect()
            rounds += 1
            in_use = device_bytes()
            base = in_use if base is None else base
            if in_use > base + DEVICE_GROWTH:
                total.faults.append(f"round {rounds} left {in_use - base} bytes on the devices, seeds {drawn}")
                base = in_use
            if rounds % 20 == 1:
                done, host = total.counts["calls"], host_bytes() / 2**20
                print(
                    f"{time.monotonic() - start:6.0f} s, seed {options.seed}, round {rounds}, {done} calls, "
                    f"{len(total.faults)} faults, devices {in_use / 2**20:.1f} MiB, host {host:.0f} MiB",
                    flush=True,
                )
            note()
            longest = max(longest, time.monotonic() - began)
    total.add(repeated(options, repeating, devices[0]))
    note()
    return total


def in_processes(options: argparse.Namespace) -> Tally:
    """Command buffers on and off, in a process each and one after the other; or in so many, side by side.

    On SIGTERM all of them are ended.
    """
    count = options.processes or 2
    seconds = options.seconds if options.processes else options.seconds / 2
    total = Tally()
    ended: list[int] = []
    """Signals that told this process to end."""
    handler = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with tempfile.TemporaryDirectory() as folder:
        for together in [range(count)] if options.processes else [[i] for i in range(count)]:
            reports = {i: Path(folder, f"{i}.json") for i in together}
            running = {i: _start(options, i, seconds, report) for i, report in reports.items() if not ended}
            end = time.monotonic() + seconds + PATIENCE
            for i, process in running.items():
                _add(total, i, _wait(process, end, ended), reports[i])
    if ended:
        total.faults.append("was ended before its time")
    signal.signal(signal.SIGTERM, handler)
    return total


def _start(options: argparse.Namespace, i: int, seconds: float, report: Path) -> subprocess.Popen[bytes]:
    # Far from each other, for what is drawn from them must be, too.
    command = [sys.executable, __file__, "--seed", str(options.seed + 1_000_003 * i), "--report", str(report)]
    command += ["--seconds", str(seconds), "--pair", *options.pair, "--command-buffers", "as set"]
    command += ["--largest", str(options.largest), "--poison", str(options.poison)]
    command += ["--repeating", str(options.repeating)]
    command += [] if options.streams else ["--no-streams"]
    return subprocess.Popen(command, env=os.environ | _variables(options, i))


def _variables(options: argparse.Namespace, i: int) -> dict[str, str]:
    """What distinguishes process i: command buffers, groups of heads in the backward pass, whether one kernel computes
    that wherever it can, and no more than its share of memory if others run beside it."""
    off = [] if i % 2 == 0 else ["--xla_gpu_enable_command_buffer="]
    variables = {"XLA_FLAGS": " ".join([*os.environ.get("XLA_FLAGS", "").split(), UNTIMED, *off])}
    variables[policy.GROUPS_OVERRIDE] = ("", "2", "4")[i % 3]
    variables[policy.IN_ONE_OVERRIDE] = ("", "1")[i // 2 % 2]
    if options.processes:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{MEMORY / options.processes:.3f}"
    return variables


def _wait(process: subprocess.Popen[bytes], end: float, ended: Sequence[int]) -> str:
    """How a process ended; one that hangs, or goes on when this one has `ended`, is killed."""
    while process.poll() is None:
        if ended or time.monotonic() > end:
            process.kill()
            process.wait()
            return "had to be ended"
        time.sleep(0.1)
    return f"ended with {process.returncode}"


def _add(total: Tally, i: int, how: str, report: Path) -> None:
    """What process i found, if only until it was ended; that it did not end by itself is a fault."""
    total.counts["processes"] += 1
    if not report.exists():
        total.faults.append(f"process {i} left no report and {how}")
        return
    found = Tally.from_json(json.loads(report.read_text()))
    total.add(found)
    if how != f"ended with {exit_code(found)}":
        total.faults.append(f"process {i} {how}, after {found.counts['rounds']} rounds")


def exit_code(tally: Tally) -> int:
    return 1 if tally.faults else 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    summary, _, details = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pair", nargs=2, metavar="NAME", help='default: "cuda xla" on a GPU, else "xla reference"')
    parser.add_argument("--processes", type=int, help="side by side, each for all of the time (default: two in turn)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--again", type=int, metavar="SEED", help="only the round with this seed")
    parser.add_argument("--no-streams", dest="streams", action="store_false", help="leave the second stream alone")
    parser.add_argument("--largest", type=int, help="tokens times value heads of a call")
    parser.add_argument("--poison", type=int, help="bytes of NaN before each call")
    parser.add_argument("--repeating", type=float, default=0.1, help="share of the time for equal calls (default: 0.1)")
    kinds = ("both", "as set")
    parser.add_argument("--command-buffers", choices=kinds, help='default: "both" on a GPU or with --processes')
    parser.add_argument("--report", type=Path, help="write what was found there as JSON, instead of printing it")
    options = parser.parse_args(arguments)
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    if not 0 <= options.repeating <= 1:
        parser.error(f"--repeating must be from 0 to 1, got {options.repeating}")
    options.flags = os.environ.get("XLA_FLAGS", "")
    return options


def main() -> int:
    options = parse_arguments()
    # Asked in another process where this one only starts two more, which need the card.
    ask = "import jax; print(jax.default_backend())"
    gpu = subprocess.run([sys.executable, "-c", ask], text=True, capture_output=True).stdout.strip() == "gpu"
    options.pair = options.pair or (["cuda", "xla"] if gpu else ["xla", "reference"])
    options.largest = options.largest or (2**18 if gpu else 300)
    options.poison = options.poison or (2**30 if gpu else 2**22)
    if options.again is not None:
        total = one_round(
            options.again,
            jax.local_devices()[0],
            options,
            options.streams and why_no_other_stream(options.pair[0]) is None,
        )
    elif (options.command_buffers or ("both" if gpu or options.processes else "as set")) == "both":
        print(f"seed {options.seed}", flush=True)
        total = in_processes(options)
    else:
        print(f"seed {options.seed}", flush=True)
        total = soak(options)
    if options.report:
        total.write(options.report)
    else:
        print(json.dumps(total.to_json(), indent=1))
        if options.again is None:
            done = total.counts
            print(f"ran {done['seconds']} s in all: {done['rounds']} rounds in {done['processes'] or 1} processes")
    return exit_code(total)


if __name__ == "__main__":
    sys.exit(main())
