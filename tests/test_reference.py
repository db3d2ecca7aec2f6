"""The recurrence against loops in NumPy, and its derivatives of all kinds."""

from __future__ import annotations

import functools
from typing import Any

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import test_util
from thorough import rarely

from jax_qla import reference

# Called with operands of many shapes and kinds, which a type checker cannot follow.
recurrence: Any = reference.recurrence
recurrent: Any = reference.recurrent
check_grads: Any = test_util.check_grads
P: Any = jax.sharding.PartitionSpec

DENSE = battery.Case("dense", batch=2, tokens=37, key_heads=2, value_heads=6, key_dim=5, value_dim=3, gates="resets")
PACKED = battery.Case(
    "packed", tokens=50, value_heads=2, key_dim=5, value_dim=3, poisoned=True,
    segments=((0, 0), (4, 20), (20, 20), (20, 41), (44, 45)),
)  # fmt: skip
CASES = (DENSE, PACKED)


def _by_hand(x: battery.Inputs, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one sequence, head and token at a time, in float64."""
    q, k, v, g, beta = (array.astype(np.float64) for array in x[:5])
    ratio = v.shape[2] // q.shape[2]
    assert x.initial_state is not None
    final_state = x.initial_state.astype(np.float64)
    o = np.zeros(v.shape)
    if x.segments is None:
        sequences = [(n, n, 0, q.shape[1]) for n in range(len(q))]
    else:
        sequences = [(n, 0, start, end) for n, (start, end) in enumerate(x.segments)]
    for n, b, start, end in sequences:
        for h in range(v.shape[2]):
            state = final_state[n, h]
            for t in range(start, end):
                state = np.exp(g[b, t, h]) * state
                key = k[b, t, h // ratio]
                state = state + np.outer(key, beta[b, t, h] * (v[b, t, h] - state.T @ key))
                o[b, t, h] = scale * state.T @ q[b, t, h // ratio]
            final_state[n, h] = state
    return o, final_state


def _operands(case: battery.Case, dtype: Any) -> tuple[Any, ...]:
    return tuple(None if x is None else jnp.asarray(x, dtype) for x in battery.inputs(case)[:6])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "limit"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_against_loops(case: battery.Case, dtype: Any, limit: float) -> None:
    x = battery.inputs(case)
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(recurrence, scale=0.3))
        results = run(*_operands(case, dtype), x.segments)
    for result, expected in zip(results, _by_hand(x, 0.3), strict=True):
        assert result.dtype == dtype
        assert np.linalg.norm(np.asarray(result) - expected) <= limit * np.linalg.norm(expected)
    if x.segments is not None:
        assert not np.any(results[0][:, x.outside])
        for n in (0, 2):
            np.testing.assert_array_equal(results[1][n], x.initial_state[n])  # type: ignore[index]


def test_low_precision_operands_are_computed_in_float32() -> None:
    operands = _operands(DENSE, jnp.bfloat16)
    o, final_state = jax.jit(functools.partial(recurrence, scale=0.3))(*operands, None)
    wide, _ = jax.jit(functools.partial(recurrence, scale=0.3))(*(x.astype(jnp.float32) for x in operands), None)
    assert o.dtype == jnp.bfloat16
    assert final_state.dtype == jnp.float32
    np.testing.assert_array_equal(o, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize(("packed", "initial_state"), [rarely(False, True), (True, False)])
def test_derivatives_of_every_kind(packed: bool, initial_state: bool) -> None:
    """First and second order, forward and reverse, against differences."""
    segments = ((0, 2), (2, 2), (3, 5)) if packed else None
    case = battery.Case("tiny", tokens=6, key_dim=2, value_dim=2, segments=segments, initial_state=initial_state)
    x = battery.inputs(case)
    with jax.enable_x64(True):
        operands = tuple(y for y in _operands(case, np.float64) if y is not None)

        def function(*operands: Any) -> Any:
            return recurrence(*operands, *(() if initial_state else (None,)), x.segments, scale=0.5)

        check_grads(jax.jit(function), operands, order=2, modes=("fwd", "rev"))


def test_a_gate_of_minus_infinity_has_no_gradient() -> None:
    operands = _operands(DENSE, np.float32)
    gradient = jax.jit(jax.grad(lambda *x: recurrence(*x, None, scale=0.3)[0].sum(), argnums=(0, 1, 2, 3, 4, 5)))
    gradients = gradient(*operands)
    assert all(np.all(np.isfinite(x)) for x in gradients)
    assert not np.any(gradients[3][np.isneginf(operands[3])])


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("given", [True, False])
def test_recurrent_continues_from_a_state(tokens: int, given: bool) -> None:
    *rows, state = _operands(DENSE, np.float32)
    state = state if given else None
    rows = [x[:, :tokens] for x in rows]
    got = jax.jit(functools.partial(recurrent, scale=0.3))(*rows, state, None)
    expected = jax.jit(functools.partial(recurrence, scale=0.3))(*rows, state, None)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_recurrent_takes_any_length_and_packed_rows() -> None:
    run = jax.jit(functools.partial(recurrent, scale=0.3))
    for case in CASES:
        x, operands = battery.inputs(case), _operands(case, np.float32)
        for a, b in zip(run(*operands, x.segments), _by_hand(x, 0.3), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("segments", [None, ((0, 0), (0, 0))])
def test_no_tokens(segments: Any) -> None:
    case = battery.Case("no tokens", batch=1 if segments else 2, tokens=0, segments=segments)
    x = battery.inputs(case)
    o, final_state = jax.jit(functools.partial(recurrence, scale=1.0))(*_operands(case, np.float32), x.segments)
    assert o.shape == x.v.shape
    np.testing.assert_array_equal(final_state, x.initial_state)


def test_inside_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = _operands(DENSE, np.float32)[:5]

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def gradient(*rows: Any) -> Any:
        return jax.grad(lambda *x: recurrence(*x, None, None, scale=0.3)[0].sum(), argnums=2)(*rows)

    got = jax.jit(gradient)(*rows)
    expected = jax.jit(jax.grad(lambda *x: recurrence(*x, None, None, scale=0.3)[0].sum(), argnums=2))(*rows)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
