"""The kernels' own CUDA source, run on a CPU (tests/emulator.py) as `jax_qla.cuda` launches it, on the battery."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import battery
import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_in
from test_cuda import IDENTICAL, LIMITS, MISSED
from test_cuda import cuda as rule

from jax_qla import cuda, implementations, policy, store
from jax_qla.implementations import Choice
from jax_qla.kernels import build, states
from jax_qla.launch import Step

LACKING = store.why_not_buildable()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

LATE = (0, 40, 400)
"""Turns of the scheduler that a load takes at most: at once, about as long as what is done beside it, and longer."""
_seeds = itertools.count()


def launch(
    steps: Sequence[Step],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    aliases: Mapping[str, str] | None = None,
) -> dict[str, jax.Array]:
    """`launch.launch` on the CPU. What is not written is not a number."""

    def run(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        have = {name: np.array(x) for name, x in given.items()}
        for name, x in outputs.items():
            have[name] = np.full(x.shape, np.nan if jnp.issubdtype(x.dtype, np.inexact) else -1, x.dtype)
        for source, target in (aliases or {}).items():
            have[target] = have[source]
        for step in steps:
            kernel = emulator.emulated(step.kernel, step.config)
            names = [operand["name"] for operand in kernel.plan["operands"]]
            arrays = {name: have[step.rename.get(name, name)] for name in names}
            seed = next(_seeds)
            kernel(arrays, step.scalars, seed=seed, late=LATE[seed % len(LATE)])
        return {name: have[name] for name in outputs}

    return jax.pure_callback(run, dict(outputs), dict(inputs))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(implementations, "choose", lambda *_, **__: Choice("cuda", "cuda", "", ""))
    stand_in.forget_traces()
    yield
    stand_in.forget_traces()


PACKED = battery.Case(
    "emulated, packed, gaps of NaN",
    dtype="bfloat16",
    tokens=300,
    segments=((3, 3), (3, 200), (200, 264), (270, 300)),
    poisoned=True,
)
WIDE = battery.Case("emulated, V 128", dtype="bfloat16", tokens=150, value_dim=128)


def test_whole_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = emulator.emulated
    used: list[str] = []

    def recording(name: str, config: Any) -> emulator.Emulated:
        used.append(name)
        return emulated(name, config)

    monkeypatch.setattr(emulator, "emulated", recording)
    for rows in (0, 128):
        monkeypatch.setenv(policy.OVERRIDE, str(rows))
        stand_in.forget_traces()
        used.clear()
        battery.check(PACKED, rule, LIMITS)
        assert used.count("compose") == (2 if rows else 0)


THOROUGH = os.environ.get("JAX_QLA_EMULATED_BATTERY") == "1"
"""Minutes: `make thorough`."""
CASES = [case for case in battery.CASES if case.dtype != "float32" and case.tokens <= 400 and case.name not in MISSED]


@pytest.mark.parametrize("precision", [None, "high"])
@pytest.mark.parametrize("rows", ["0", "128"], ids=["whole", "in pieces"])
@pytest.mark.parametrize("case", CASES if THOROUGH else [], ids=str)
def test_battery(case: battery.Case, rows: str, precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.dtype == "float16" and precision:
        pytest.skip("bfloat16 only")
    monkeypatch.setenv(policy.OVERRIDE, rows)
    function = functools.partial(rule, precision=precision) if precision else rule
    battery.check(case, function, IDENTICAL if case.keys.startswith("identical") else LIMITS)


def test_two_warpgroups_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where heads fill a card: blocks of 128 value columns."""
    monkeypatch.setattr(policy, "MULTIPROCESSORS", 1)
    assert policy.value_tile(WIDE.value_heads, WIDE.value_dim) == 128
    battery.check(WIDE, rule, LIMITS)


def test_a_kernel_that_does_not_wait_is_wrong() -> None:
    """What may come late does, and what is not there yet is not a number."""
    config = states.Config(key_dim=64, value_dim=64, value_tile=64)
    source, plan = build.lower_program(lambda: states.program(config), states.PASS_CONFIGS)
    random = np.random.default_rng(0)
    tokens, heads = 256, 1

    def rows(width: int) -> np.ndarray:
        return random.normal(size=(tokens, heads, width)).astype(jnp.bfloat16) / 8

    given = {
        "k": rows(64),
        "v": rows(64),
        "a": rows(64),
        "gamma": -random.uniform(size=(tokens, heads)).astype(np.float32),
        "beta": random.uniform(size=(tokens, heads)).astype(np.float32),
        "initial_state": np.zeros((0, heads, 64, 64), np.float32),
        "segments": np.array([[0, tokens]], np.int32),
    }

    def without(*barriers: str) -> str:
        """The source less the last wait for each of these."""
        lines = source.splitlines()
        for barrier in barriers:
            waits = (n for n, line in enumerate(lines) if line.strip().startswith(f"{barrier}[") and ".wait(" in line)
            lines[max(waits)] = ""
        return "\n".join(lines)

    found: list[np.ndarray] = []
    for text in (source, without("free"), without("ready", "loaded")):
        results = {
            "h": np.full((tokens // 64 + 1, heads, 64, 64), np.nan, jnp.bfloat16),
            "vd": np.full((tokens, heads, 64), np.nan, jnp.bfloat16),
        }
        kernel = emulator.Emulated(text, plan)
        # What is out of turn may also arrive at a barrier more often than is counted.
        with contextlib.suppress(RuntimeError) if found else contextlib.nullcontext():
            kernel({**given, **results}, {"ratio": 1, "first_head": 0}, seed=1, late=400)
        found.append(results["vd"].astype(np.float32))
    right, *wrong = found
    assert np.isfinite(right).all()
    assert not any(np.array_equal(right, x, equal_nan=True) for x in wrong)
