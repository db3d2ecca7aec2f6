"""The backward pass in one kernel (jax_qla/kernels/backward.py): battery, many calls, where the policy chooses it.

Needs an H100 or H200.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import repeats
import stand_in
from test_cuda import (
    CASES,
    IDENTICAL,
    LIMITS,
    MISSED,
    OWN_KEYS,
    cuda,
    kernels_of_calls,
    same_in_poisoned_memory,
    that_keeps,
    that_recomputes,
)

import jax_qla
from jax_qla import policy
from jax_qla.kernels.balance import balanced as found_balanced

pytestmark = pytest.mark.gpu


def _fits(case: battery.Case) -> bool:
    return (case.key_dim, case.value_dim) == (128, 128)


# Enough blocks for more than one round of them.
MANY = battery.Case(
    "many heads, two of a key head", "bfloat16", tokens=500, key_heads=80, value_heads=160, key_dim=128, value_dim=128
)
GAPS = dataclasses.replace(MANY, name=f"{MANY.name}, packed, gaps", segments=((3, 130), (130, 130), (150, 499)))
OWN_KEYS_NORMALISED = dataclasses.replace(OWN_KEYS, name="own keys, normalised", l2norm=True)
HERE = (
    *(case for case in (*CASES, OWN_KEYS_NORMALISED) if _fits(case)),
    MANY,
    GAPS,
    dataclasses.replace(GAPS, name=f"{GAPS.name}, poisoned", poisoned=True),
    dataclasses.replace(MANY, name=f"{MANY.name}, normalised", l2norm=True),
    dataclasses.replace(GAPS, name="four of a key head, packed, gaps", key_heads=40),
    dataclasses.replace(MANY, name="three of a key head", key_heads=45, value_heads=135),
    dataclasses.replace(MANY, name=f"{MANY.name}, strong gates", gates="strong"),
    dataclasses.replace(MANY, name=f"{MANY.name}, resets", gates="resets"),
    dataclasses.replace(MANY, name=f"{MANY.name}, faint beta", beta="some faint"),
    dataclasses.replace(MANY, name=f"{MANY.name}, faint beta", beta="some faint", dtype="float16"),
    dataclasses.replace(MANY, name=f"{MANY.name}, zero keys", keys="some zero"),
)


@pytest.fixture(autouse=True)
def _traced_anew() -> Iterator[None]:
    stand_in.forget_traces()
    yield
    stand_in.forget_traces()


@pytest.fixture
def _in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.IN_ONE_OVERRIDE, "1")


def _parameter(case: battery.Case) -> Any:
    missed = MISSED.get(case.name) if case.dtype == "bfloat16" else None
    marks = [pytest.mark.xfail(reason=f"limits not reached: {missed}", strict=True)] if missed else []
    return pytest.param(case, marks=marks, id=str(case))


@pytest.mark.usefixtures("_in_one")
@pytest.mark.parametrize("case", [_parameter(case) for case in HERE])
def test_battery(case: battery.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.OVERRIDE, "0")
    battery.check(case, cuda, IDENTICAL if case.keys.startswith("identical") else LIMITS)


@pytest.mark.usefixtures("_in_one")
@pytest.mark.parametrize("case", [MANY, GAPS], ids=str)
@pytest.mark.parametrize("rows", ["0", "128"])
def test_a_gate_that_is_not_a_number(case: battery.Case, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.OVERRIDE, rows)
    battery.check_not_a_number(dataclasses.replace(case, gates="not a number"), cuda)


@pytest.mark.usefixtures("_in_one")
@pytest.mark.parametrize(
    "case", [MANY, GAPS, OWN_KEYS, *(case for case in HERE if case.name.startswith("packed"))], ids=str
)
def test_in_pieces(case: battery.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have pieces of sequences, and gradients of states that lie between them."""
    monkeypatch.setenv(policy.OVERRIDE, "128")
    battery.check(case, cuda, LIMITS)


@pytest.mark.usefixtures("_in_one")
@pytest.mark.parametrize("case", [GAPS, OWN_KEYS_NORMALISED], ids=str)
def test_that_recomputes(case: battery.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.OVERRIDE, "0")
    battery.check(case, that_recomputes, LIMITS)


@pytest.mark.usefixtures("_in_one")
@pytest.mark.parametrize("groups", ["1", "2", "5"])
@pytest.mark.parametrize(
    ("case", "function"),
    [
        *((case, function) for case in (MANY, GAPS, OWN_KEYS) for function in (cuda, that_keeps)),
        (GAPS, that_recomputes),
    ],
    ids=[f"{case}-{way}" for case in (MANY, GAPS, OWN_KEYS) for way in ("Vd kept", "states kept")] + [f"{GAPS}-anew"],
)
def test_the_same_bits(
    case: battery.Case, function: battery.Function, groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of heads, whatever memory held before, and again."""
    monkeypatch.setenv(policy.OVERRIDE, "0")
    first = battery.run(case, function)
    monkeypatch.setenv(policy.GROUPS_OVERRIDE, groups)
    stand_in.forget_traces()
    same_in_poisoned_memory(case, function, first)


def _operands(batch: int, tokens: int, key_heads: int, value_heads: int) -> tuple[jax.Array, ...]:
    """q, k, of length 1, v, g, beta and a cotangent of o."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key, (batch, tokens, key_heads, 128)) for key in keys[:2])
    q, k = ((x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16) for x in (q, k))
    v, do = (jax.random.normal(key, (batch, tokens, value_heads, 128), jnp.bfloat16) for key in keys[2:4])
    g = -jnp.exp(jax.random.normal(keys[4], (batch, tokens, value_heads)) - 3)
    beta = jax.nn.sigmoid(jax.random.normal(keys[5], (batch, tokens, value_heads)))
    return q, k, v, g, beta, do


def _gradients(**options: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """Of these operands, traced at its first call."""
    given: Any = {"use_qk_l2norm_in_kernel": True, "implementation": "cuda"} | options

    def function(*operands: jax.Array) -> jax.Array:
        o, _ = jax_qla.chunk_gated_delta_rule(*operands, **given)
        return o

    return jax.jit(lambda *x: jax.vjp(function, *x[:5])[1](x[5]))


@pytest.mark.parametrize("l2norm", [False, True], ids=["as given", "normalised"])
@pytest.mark.parametrize("key_heads", [8, 16, 32])
def test_thousands_of_calls_repeat(key_heads: int, l2norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one block reads of another's shared memory, with two or four value heads a key head, is there: without a
    fence before the barrier that says so, three of 2000 calls, as given, differed. And what a cluster adds to,
    with four, is what the one before it has written."""
    monkeypatch.setenv(policy.OVERRIDE, "0")
    used = kernels_of_calls(monkeypatch)
    function, operands = _gradients(use_qk_l2norm_in_kernel=l2norm), _operands(4, 2048, key_heads, 32)
    first = function(*operands)
    assert "backward" in used
    assert "gradients" not in used
    compare = jax.jit(repeats.different)
    found = np.asarray(jnp.stack([compare(function(*operands), first) for _ in range(3000)]))
    assert not found.any(), repeats.described(found, dict(zip(("dq", "dk", "dv", "dg", "dbeta"), first, strict=True)))


@pytest.mark.parametrize(
    ("lengths", "balanced"),
    [
        ((500, 500, 500, 500), True),
        ((500, 490, 500, 505), True),
        ((800, 200, 500, 400), False),
        ((2000, 0, 0, 0), False),
        (tuple(range(471, 126, -18)), True),
        ((2700, *range(336, 24, -18)), False),
        ((300, 0, 60, 90) * 13, True),
        ((100, 0, 20, 30) * 13, False),
    ],
    ids=str,
)
def test_packed_batches(lengths: tuple[int, ...], balanced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences that keep the card busy to the end one kernel computes the gradients, of others two: whichever
    would, and whether or not these two go through one half of every sequence after the other."""
    assert found_balanced(lengths, *policy.balance(32, ratio=2)) == balanced
    monkeypatch.setenv(policy.OVERRIDE, "0")
    ends = np.cumsum((0, *lengths))
    operands = _operands(1, max(2000, sum(lengths)), 16, 32)
    used = kernels_of_calls(monkeypatch)

    def computed(in_one: str | None) -> list[np.ndarray]:
        if in_one is not None:
            monkeypatch.setenv(policy.IN_ONE_OVERRIDE, in_one)
        stand_in.forget_traces()
        function = _gradients(cu_seqlens=jnp.asarray(ends, jnp.int32))
        return [np.asarray(x, np.float32) for x in function(*operands)]

    found = computed(None)
    once = used.count("gradients")
    assert {"state_gradients", "gradients", "backward"} <= set(used)
    of_heads = policy.head_groups
    with monkeypatch.context() as patch:
        patch.setattr(policy, "head_groups", lambda *x, **options: of_heads(*x, **options)._replace(windows=2))
        used.clear()
        for mine, other in zip(found, computed(None), strict=True):
            np.testing.assert_array_equal(mine, other)
        assert used.count("gradients") == 2 * once
    by_two, by_one = computed("0"), computed("1")
    for mine, other in zip(found, by_one if balanced else by_two, strict=True):
        np.testing.assert_array_equal(mine, other)
    for one, two in zip(by_one, by_two, strict=True):
        assert np.linalg.norm(one - two) <= 1e-2 * np.linalg.norm(two)
    # dq and dk are rounded before they are summed over value heads, so one can tell who has computed them.
    assert not np.array_equal(by_one[0], by_two[0])


@pytest.mark.parametrize("rows", ["0", "128", "256"])
@pytest.mark.parametrize("in_one", ["0", "1"])
def test_gradients_of_initial_states_in_place_of_those_of_final_ones(
    in_one: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as apart, of sequences that are cut, that are not, and that are empty; and cotangents that are
    needed later are left as they were."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    monkeypatch.setenv(policy.IN_ONE_OVERRIDE, in_one)
    ends = jnp.asarray(np.cumsum((0, 700, 0, 90, 128, 0, 0, 1000, 60, 0, 400, 0, 0)), jnp.int32)
    q, k, v, g, beta, do = _operands(1, 2400, 16, 32)
    state, d_state = (jax.random.normal(jax.random.key(n), (len(ends) - 1, 32, 128, 128)) for n in (7, 8))

    def function(*operands: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        *rows, initial = operands
        options: Any = {"output_final_state": True, "cu_seqlens": ends, "implementation": "cuda"}
        return jax_qla.chunk_gated_delta_rule(*rows, initial_state=initial, **options)

    def gradients() -> list[np.ndarray]:
        stand_in.forget_traces()
        both = jax.jit(lambda *x: jax.vjp(function, *x[:6])[1]((x[6], x[7])))
        return [np.asarray(x, np.float32) for x in both(q, k, v, g, beta, state, do, d_state)]

    before = np.asarray(d_state)
    found = gradients()
    np.testing.assert_array_equal(d_state, before)
    empty = np.diff(ends) == 0
    np.testing.assert_array_equal(found[5][empty], before[empty])
    monkeypatch.setattr(policy, "gradients_in_place", lambda *_: False)
    for mine, other in zip(found, gradients(), strict=True):
        np.testing.assert_array_equal(mine, other)
