"""benchmarks/soak.py: how processes side by side are started, added up, and found out if they fail or hang."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soak
import soak_meshes
import soak_operations
from jax.sharding import AxisType
from soak_operations import GatedDeltaRule
from thorough import THOROUGH, only_thorough

from jax_qla.mesh import axes_of


@pytest.fixture(autouse=True)
def _beside_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests before these have left in the process is neither looked through nor dropped: that took longer than
    what is tested here, and the tests after these need it."""
    gc.freeze()
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


CHILD = """
import json, os, signal, sys, time
given = dict(zip(sys.argv, sys.argv[1:]))
seed, report = int(given["--seed"]), given["--report"]
what = {behaviour}[(seed - {seed}) // 1_000_003]
if what == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if what.endswith("later"):
    with open(report, "w") as file:
        json.dump({{"counts": {{"rounds": 2, "calls": 5, "seconds": 4}}, "worst": {{}}, "faults": []}}, file)
if what == "crash later":
    os.kill(os.getpid(), signal.SIGSEGV)
if what == "end all later":
    os.kill(os.getppid(), signal.SIGTERM)
if what.startswith(("hang", "end all")):
    time.sleep(600)
sys.path.append({benchmarks!r})
import soak
options = soak.parse_arguments()
assert options.command_buffers == "as set" and options.processes is None, options
given = [os.environ["XLA_FLAGS"], os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"), options.seconds, options.pair]
given += [options.largest, options.poison, options.streams]
worst = {{"o float32": {{"error": float(options.seed), "with": json.dumps(given)}}}}
faults = ["o differs"] if what == "fault" else []
counts = {{"calls": 3, "rounds": 1, "seconds": 7}}
options.report.write_text(json.dumps({{"counts": counts, "worst": worst, "faults": faults}}))
sys.exit(1 if faults else 0)
"""
SEED = 5


def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: list[str], *arguments: str) -> Any:
    """What `soak.in_processes` makes of processes that behave so."""
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(benchmarks=str(Path(soak.__file__).parent), behaviour=behaviour, seed=SEED))
    monkeypatch.setattr(soak, "__file__", str(script))
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    given = ["--seed", str(SEED), "--seconds", "8", "--pair", "xla", "reference", "--largest", "9", "--poison", "99"]
    return soak.in_processes(soak.parse_arguments([*given, *arguments]))


def test_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = outcome(tmp_path, monkeypatch, ["good", "fault", "good"], "--processes", "3", "--no-streams")
    assert total.counts == {"calls": 9, "processes": 3, "rounds": 3, "seconds": 21}
    assert total.faults == ["o differs"]
    error, given = total.worst["o float32"]  # of the third
    assert error == SEED + 2 * 1_000_003
    assert json.loads(given) == [
        f"--xla_foo=1 {soak.UNTIMED}",
        f"{soak.MEMORY / 3:.3f}",
        8.0,
        ["xla", "reference"],
        9,
        99,
        False,
    ]


def test_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = outcome(tmp_path, monkeypatch, ["good", "good"])
    assert (total.counts, total.faults) == ({"calls": 6, "processes": 2, "rounds": 2, "seconds": 14}, [])
    flags = f"--xla_foo=1 {soak.UNTIMED} --xla_gpu_enable_command_buffer="
    assert json.loads(total.worst["o float32"][1]) == [flags, None, 4.0, ["xla", "reference"], 9, 99, True]


@only_thorough
def test_processes_that_crash_or_hang_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have found counts nevertheless."""
    monkeypatch.setattr(soak, "PATIENCE", 7)
    behaviour = ["crash", "good", "hang", "crash later", "hang later"]
    total = outcome(tmp_path, monkeypatch, behaviour, "--processes", "5", "--seconds", "1")
    assert total.counts == {"calls": 3 + 5 + 5, "processes": 5, "rounds": 1 + 2 + 2, "seconds": 7 + 4 + 4}
    assert total.faults == [
        "process 0 left no report and ended with -11",
        "process 2 left no report and had to be ended",
        "process 3 ended with -11, after 2 rounds",
        "process 4 had to be ended, after 2 rounds",
    ]


@pytest.mark.parametrize("processes", [None, 3], ids=["in turn", "side by side"])
def test_all_are_ended_on_sigterm(processes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        side_by_side = ["--processes", str(processes)] if processes else []
        begun = time.monotonic()
        total = outcome(tmp_path, monkeypatch, ["end all later", "hang", "hang"], "--seconds", "100", *side_by_side)
        assert time.monotonic() < begun + 50
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]  # not the one before
    finally:
        signal.signal(signal.SIGTERM, handler)
    first, *others, last = total.faults
    assert first == "process 0 had to be ended, after 2 rounds"
    assert set(others) <= {f"process {i} left no report and had to be ended" for i in (1, 2)}
    assert last == "was ended before its time"
    assert soak.exit_code(total) == 1
    assert total.counts == {"calls": 5, "processes": 1 + len(others), "rounds": 2, "seconds": 4}
    assert processes or not others


class Clock:
    """In place of the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@only_thorough
@pytest.mark.parametrize(
    ("lengths", "rounds"),
    [
        ([300, 10], 1),  # the first, always
        ([30, 20, 60, 60, 10], 4),  # 10 s remain
        ([20, 50, 40, 30, 10], 4),  # 40 s remain, and 50 may be needed
        ([50, 60, 60, 60], 3),
    ],
)
def test_no_round_is_begun_that_would_not_end_in_time(
    lengths: list[int], rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """180 of 200 s are for rounds; after each there is a report."""
    report = tmp_path / "report"
    options = soak.parse_arguments(["--seconds", "200", "--no-streams", "--report", str(report)])
    clock, begun = Clock(), []

    def one_round(*_: Any, until: float) -> soak.Tally:
        assert until == 1000 + 180
        tally = soak.Tally()
        tally.counts["calls"] = 1
        if report.exists():
            begun.append(soak.Tally.from_json(json.loads(report.read_text())).counts)
        clock.now += lengths[len(begun)]
        return tally

    monkeypatch.setattr(soak, "time", clock)
    monkeypatch.setattr(soak, "THREADS", 1)
    monkeypatch.setattr(soak, "one_round", one_round)
    monkeypatch.setattr(soak, "repeated", lambda *_: soak.Tally())
    total = soak.soak(options)
    assert begun == [{"calls": n, "rounds": n, "seconds": sum(lengths[:n])} for n in range(1, rounds)]
    assert total.counts == {"calls": rounds, "rounds": rounds, "seconds": sum(lengths[:rounds])}
    assert json.loads(report.read_text()) == total.to_json()


@pytest.mark.parametrize(("until", "calls"), [(0.0, 1), (1025.0, 3), (math.inf, None)])
def test_no_call_is_begun_after_the_time(until: float, calls: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    options = soak.parse_arguments(["--pair", "xla", "reference", "--largest", "9", "--poison", "99"])
    clock, operations = Clock(), []

    def compare(tally: soak.Tally, operation: soak_operations.Operation, *_: Any) -> None:
        operations.append(operation)
        tally.counts["calls"] += 1
        clock.now += 10

    monkeypatch.setattr(soak, "time", clock)
    monkeypatch.setattr(soak, "compiled", lambda *_, **__: lambda operands: (operands,))
    monkeypatch.setattr(soak, "compare", compare)
    total = soak.one_round(3, jax.local_devices()[0], options, False, until=until)
    assert (total.counts["calls"], total.faults) == (operations[0].calls if calls is None else calls, [])


@pytest.mark.parametrize(
    ("odd", "grown", "calls", "fault"),
    [
        (None, 0, 20, None),
        (7, 0, 10, "repeated: 1 of 5 calls differ\ncall 1: 1 of o [2, 3], from (1, 2) to (1, 2)"),
        (None, soak.STEADY_GROWTH, 20, f"host memory grew by {3 * soak.STEADY_GROWTH} bytes in 20 equal calls"),
    ],
    ids=["the same", "another", "growing"],
)
def test_one_call_again_and_again(
    odd: int | None, grown: int, calls: int, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the same bits, and memory does not grow, or that is a fault."""
    begun = itertools.count()
    zeros = jnp.zeros((2, 3))

    def run(_: Any) -> Any:
        return ({"o": zeros.at[1, 2].set(1) if next(begun) == odd else zeros},)

    monkeypatch.setattr(soak, "AT_ONCE", 5)
    monkeypatch.setattr(soak, "REPETITIONS", 20)
    monkeypatch.setattr(soak, "compiled", lambda *_: run)
    looks = itertools.count(step=3)
    monkeypatch.setattr(soak, "host_bytes", lambda: grown * next(looks))
    tally = soak.steady(rule(tokens=7), "xla", {}, math.inf)
    assert tally.counts == {"repeated calls": calls}
    assert [fault in x for x in tally.faults] == [True] if fault else not tally.faults


def test_several_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the time is over, one at the least where there is any, and none after a fault."""
    options = soak.parse_arguments(["--pair", "xla", "reference", "--largest", "9", "--seed", "1"])
    clock, operations = Clock(), []

    def steady(operation: soak_operations.Operation, *_: Any) -> soak.Tally:
        operations.append(operation)
        clock.now += 10
        return soak.Tally(Counter({"repeated calls": 3}), faults=["one"] if len(operations) == 5 else [])

    monkeypatch.setattr(soak, "time", clock)
    monkeypatch.setattr(soak, "steady", steady)
    device = jax.local_devices()[0]
    assert [soak.repeated(options, s, device).counts["repeated calls"] for s in (0, 1, 25, 100)] == [0, 3, 9, 3]
    assert len(set(map(str, operations[1:4]))) == 3


def test_a_report_is_read_as_it_was_written() -> None:
    tally = soak.Tally(faults=["one"])
    tally.counts["calls"] = 2
    tally.worst["o float32"] = 1e-3, "a shape"
    assert soak.Tally.from_json(json.loads(json.dumps(tally.to_json()))) == tally


def test_a_function_without_calls_is_the_same_function() -> None:
    """What JAX 0.11 needs for a second stream: no call is left, and results are those there were."""
    operation = rule(tokens=70)
    function = soak.compiled(operation, "xla")
    operands = operation.operands(np.random.default_rng(0))
    flat = soak._without_calls(function)
    names = {equation.primitive.name for equation in jax.make_jaxpr(flat)(operands).eqns}
    assert "jit" in {equation.primitive.name for equation in jax.make_jaxpr(function)(operands).eqns}
    assert not names & {*soak.BODIES}
    for found, right in zip(jax.tree.leaves(flat(operands)), jax.tree.leaves(function(operands)), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


def rule(**changes: Any) -> GatedDeltaRule:
    sizes = {"batch": 1, "key_heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 8, "sequences": 1}
    return GatedDeltaRule(**{"dtype": "float32", "form": "dense", **sizes, "state": True, "l2norm": True, **changes})


def test_calls_of_an_operation() -> None:
    """Many of a small one, few of a large one."""
    calls = [rule(tokens=tokens, batch=2, value_heads=1).calls for tokens in (1, 2**13, 2**20)]
    assert calls == [32, 16, 4]


@pytest.mark.parametrize("kind", soak_operations.KINDS, ids=lambda kind: kind.__name__)
def test_what_an_operation_compares(kind: Any) -> None:
    """Gradients of all its operands, finite though memory beside the sequences is not; and an error is found."""
    random = np.random.default_rng(1)
    for _ in range(2 if THOROUGH else 1):
        operation = kind.draw(random, True, 40)
        operands = operation.operands(random)
        right = jax.device_get(soak.compiled(operation, "xla")(operands)[0])
        gradients = {name.removeprefix("d").removeprefix("_") for name in right if name.startswith("d")}
        given = {name for name in operands if not name.startswith("d")} - {"cu_seqlens", "segment_ids"}
        assert gradients == (given if kind is not soak_operations.Recurrence else set())
        least = operation.least(operands, right)
        soak.compare(soak.Tally(), operation, operands, [(right,)] * 2, right)
        for name, x in right.items():
            off = 2 * operation.limit(name) * max(np.linalg.norm(np.asarray(x, np.float64)), least.get(name, 0), 1e-9)
            wrong = {**right, name: np.asarray(x, np.float64) + off / max(1, x.size) ** 0.5}
            with pytest.raises(soak.Fault, match=f"{name} is off"):
                soak.compare(soak.Tally(), operation, operands, [(wrong,)] * 2, right)
            with pytest.raises(soak.Fault, match=f"{name} differs"):
                soak.compare(soak.Tally(), operation, operands, [(right,), (wrong,)], right)
            with pytest.raises(soak.Fault, match=f"{name} is not finite"):
                soak.compare(soak.Tally(), operation, operands, [({**right, name: np.nan * x},)] * 2, right)


def test_a_program_that_xla_compiles_may_differ_on_a_second_stream() -> None:
    """But not from one call to the next."""
    operation = rule(tokens=2, batch=1, value_heads=1)
    operands = operation.operands(np.random.default_rng(1))
    right = jax.device_get(soak.compiled(operation, "xla")(operands)[0])
    other = {name: np.nextafter(x, np.float32(np.inf)) for name, x in right.items()}
    soak.compare(soak.Tally(), operation, operands, [(right, other)] * 2, right, False)
    for calls, by_kernels in (([(right, other)] * 2, True), ([(right, other), (other, other)], False)):
        with pytest.raises(soak.Fault, match="differs"):
            soak.compare(soak.Tally(), operation, operands, calls, right, by_kernels)


def test_what_is_drawn_for_a_mesh() -> None:
    """Of every kind of operation whatever it can be cut over, by axes of either kind, and sizes that these divide."""
    drawn = [soak_meshes.draw_placed(seed, ("cuda", "xla"), 2**13, devices=8) for seed in range(300)]
    cut = {(type(placed.operation).__name__, dimension) for placed, _ in drawn for dimension in placed.cuts}
    tokens = {(kind, "tokens") for kind in ("GatedDeltaRule", "GatedNorm", "Convolution")}
    heads = {(kind, "heads") for kind in ("GatedDeltaRule", "GatedNorm", "Recurrence")} | {("Convolution", "channels")}
    assert cut == tokens | heads | {(kind.__name__, "batch") for kind in soak_operations.KINDS}
    assert {placed.kind for placed, _ in drawn} == {AxisType.Auto, AxisType.Explicit}
    by_tokens = {placed.cuts.get("tokens", ()) for placed, _ in drawn}
    assert by_tokens == {(), ("x",), ("y",), ("x", "y"), ("y", "x")}
    for placed, random in drawn[:40]:
        for name, x in placed.operation.operands(random).items():
            spec = placed.spec(name)
            sizes = [math.prod(placed.mesh().shape[axis] for axis in axes_of(entry)) for entry in spec]
            assert all(n % size == 0 for n, size in zip(x.shape, sizes, strict=False)), (placed, name)


def test_calls_cut_over_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of whose results would be wrong is a fault, with the seed that gives it again, and so is an error's place."""
    seed = next(
        seed
        for seed in range(1000)
        for placed in [soak_meshes.draw_placed(seed, ("xla", "reference"), 100, devices=2)[0]]
        if isinstance(placed.operation, soak_operations.Recurrence) and placed.cuts
    )
    monkeypatch.setattr(soak_meshes, "SHAPES", {2: ((2,), (2, 1), (1, 2))})
    placed, run = soak_meshes.one_call(seed, ("xla", "reference"), 100, devices=2)
    found = run(poison=2**10)
    assert found.counts["calls"] == 2
    assert not found.faults
    assert {where for _, where in found.worst.values()} == {f"--again {seed}: {placed}"}
    monkeypatch.setattr(soak_operations.Recurrence, "limit", lambda *_: -1.0)
    monkeypatch.setattr(soak_meshes, "one_call", lambda *_: (placed, run))
    total = soak_meshes.calls(iter(range(7, 100)), ("xla", "reference"), 100, 2**10, until=0)
    assert len(total.faults) == soak_meshes.AT_ONCE
    assert total.faults[0].startswith(f"--again 7: {placed}: final_state is off")
