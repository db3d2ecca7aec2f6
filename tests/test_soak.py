"""benchmarks/soak.py: how processes side by side are started, added up, and found out if they fail or hang."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import soak

CHILD = """
import json, os, sys, time
sys.path.append({benchmarks!r})
import soak
options = soak.parse_arguments()
assert options.command_buffers == "as set" and options.processes is None, options
what = {behaviour}[(options.seed - {seed}) // 1_000_003]
if what == "hang":
    time.sleep(600)
if what == "crash":
    os.kill(os.getpid(), 11)
given = [os.environ["XLA_FLAGS"], os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"), options.seconds, options.pair]
given += [options.largest, options.poison, options.streams]
worst = {{"o float32": {{"error": float(options.seed), "with": json.dumps(given)}}}}
faults = ["o differs"] if what == "fault" else []
options.report.write_text(json.dumps({{"counts": {{"calls": 3}}, "worst": worst, "faults": faults}}))
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
    assert total.counts == {"calls": 9, "processes": 3}
    assert total.faults == ["o differs"]
    error, given = total.worst["o float32"]  # of the third
    assert error == SEED + 2 * 1_000_003
    assert json.loads(given) == ["--xla_foo=1", f"{soak.MEMORY / 3:.3f}", 8.0, ["xla", "reference"], 9, 99, False]


def test_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = outcome(tmp_path, monkeypatch, ["good", "good"])
    assert (total.counts, total.faults) == ({"calls": 6, "processes": 2}, [])
    flags = "--xla_foo=1 --xla_gpu_enable_command_buffer="
    assert json.loads(total.worst["o float32"][1]) == [flags, None, 4.0, ["xla", "reference"], 9, 99, True]


def test_processes_that_crash_or_hang_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PATIENCE", 7)
    total = outcome(tmp_path, monkeypatch, ["crash", "good", "hang"], "--processes", "3", "--seconds", "1")
    assert total.counts["calls"] == 3
    assert total.faults == [
        "process 0 left no report and ended with -11",
        "process 2 left no report and had to be ended",
    ]


def test_a_report_is_read_as_it_was_written() -> None:
    tally = soak.Tally(faults=["one"])
    tally.counts["calls"] = 2
    tally.worst["o float32"] = 1e-3, "a shape"
    assert soak.Tally.from_json(json.loads(json.dumps(tally.to_json()))) == tally


def test_a_function_without_calls_is_the_same_function() -> None:
    """What JAX 0.11 needs for a second stream: no call is left, and results are those there were."""
    shape = soak.Shape("dense", "float32", 1, 70, 1, 2, 8, 8, 1, state=True, l2norm=True, two_streams=False)
    function = soak.compiled(shape, "xla")
    operands = soak.draw_operands(np.random.default_rng(0), shape)
    flat = soak._without_calls(function)
    names = {equation.primitive.name for equation in jax.make_jaxpr(flat)(operands).eqns}
    assert "jit" in {equation.primitive.name for equation in jax.make_jaxpr(function)(operands).eqns}
    assert not names & {*soak.BODIES}
    for found, right in zip(jax.tree.leaves(flat(operands)), jax.tree.leaves(function(operands)), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


def test_calls_of_a_shape() -> None:
    """Many of a small one, few of a large one."""
    small = soak.Shape("dense", "float32", 2, 1, 1, 1, 8, 8, 1, state=False, l2norm=False, two_streams=False)
    shapes = [dataclasses.replace(small, tokens=tokens) for tokens in (1, 2**13, 2**20)]
    assert [shape.calls for shape in shapes] == [32, 16, 4]
