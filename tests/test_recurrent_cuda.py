"""The decoding kernel against the recurrence in float64, in place, repeated and on poisoned memory. Needs an H100 or
H200."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qla
from jax_qla.l2norm import normalize
from jax_qla.reference import recurrence

pytestmark = pytest.mark.gpu

ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Of one number, relative."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and dtypes of a call."""

    batch: int = 3
    tokens: int = 4
    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    initial_state: bool = True
    l2norm: bool = False
    """Whether q and k are to be normalised; they are then of lengths from 0.3 to 8, but for a key of zeros."""

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


CASES = (
    *(Case(batch=batch, tokens=tokens) for batch in (1, 3, 64) for tokens in (1, 2, 4)),
    *(
        Case(key_dim=key_dim, value_dim=value_dim, dtype=dtype, state_dtype=state_dtype)
        for key_dim in (64, 128)
        for value_dim in (64, 128)
        for dtype in ("bfloat16", "float16")
        for state_dtype in ("float32", "bfloat16")
    ),
    *(
        Case(tokens=1, key_dim=key_dim, value_dim=value_dim, dtype=dtype, state_dtype="bfloat16")
        for key_dim in (64, 128)
        for value_dim in (64, 128)
        for dtype in ("bfloat16", "float16")
    ),
    Case(key_heads=4, value_heads=4),
    Case(key_heads=1, value_heads=7, tokens=1),
    Case(batch=2, tokens=33),
    Case(batch=64, tokens=1, key_heads=16, value_heads=32),
    Case(batch=64, tokens=1, key_heads=16, value_heads=32, state_dtype="bfloat16"),
    Case(initial_state=False),
    Case(initial_state=False, tokens=1, key_dim=64),
    *(
        Case(tokens=tokens, dtype=dtype, state_dtype=state_dtype, l2norm=True)
        for tokens in (1, 3)
        for dtype in ("bfloat16", "float16")
        for state_dtype in ("float32", "bfloat16")
    ),
    Case(key_dim=64, value_dim=64, key_heads=1, value_heads=3, initial_state=False, l2norm=True),
)


def inputs(case: Case) -> tuple[Any, ...]:
    """q, k, v, g, beta and the state, in the dtypes of the call; a reset, no decay and a beta of zero among them."""
    random = np.random.default_rng(case.batch + case.tokens)
    keys = (case.batch, case.tokens, case.key_heads, case.key_dim)
    values = (case.batch, case.tokens, case.value_heads, case.value_dim)
    q, k, v = random.normal(size=keys), random.normal(size=keys), random.normal(size=values)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    if case.l2norm:
        k *= random.uniform(0.3, 8, keys[:3])[..., None]
        q *= random.uniform(0.3, 8, keys[:3])[..., None] / np.linalg.norm(q, axis=-1, keepdims=True)
        k[0, -1, 0] = 0.0
    g = -random.exponential(size=values[:3])
    beta = random.uniform(size=values[:3])
    g[:, -1, 0] = 0.0
    g[0, 0, -1] = -np.inf
    if case.initial_state:  # else nothing would be left to compare with
        beta[-1, 0, 0] = 0.0
    state = random.normal(size=(case.batch, case.value_heads, case.key_dim, case.value_dim))
    rows = [jnp.asarray(x, case.dtype) for x in (q, k, v)] + [jnp.asarray(x, jnp.float32) for x in (g, beta)]
    return *rows, jnp.asarray(state, case.state_dtype) if case.initial_state else None


def decode(*operands: Any, output_final_state: bool = True, l2norm: bool = False) -> Any:
    *rows, state = operands
    return jax_qla.recurrent_gated_delta_rule(
        *rows,
        initial_state=state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=l2norm,
        implementation="cuda",
    )


def in_float64(*operands: Any, l2norm: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """o and final_state by the recurrence, on the host."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide: list[Any] = [
            None if x is None else jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in operands
        ]
        q, k, v, g, beta, state = wide
        if l2norm:
            q, k = normalize(q), normalize(k)
        o, final_state = jax.jit(functools.partial(recurrence, scale=q.shape[3] ** -0.5))(q, k, v, g, beta, state, None)
        return np.asarray(o), np.asarray(final_state)


def relative_error(x: Any, right: np.ndarray, axes: tuple[int, ...]) -> float:
    """The largest, in the Euclidean norm over `axes`."""
    error = np.sqrt(np.sum(np.square(np.asarray(x.astype(jnp.float32), np.float64) - right), axis=axes))
    return float(np.max(error / np.sqrt(np.sum(np.square(right), axis=axes))))


def error_of_o(o: Any, right: np.ndarray) -> float:
    """The largest of a token and head."""
    return relative_error(o, right, (3,))


def error_of_state(state: Any, right: np.ndarray) -> float:
    """The largest of a sequence and head."""
    return relative_error(state, right, (2, 3))


def check(case: Case, function: Callable[..., Any]) -> None:
    """`function`, of these operands and `l2norm`, whether to normalise, to o and the final state, is right."""
    operands = inputs(case)
    o, final_state = jax.jit(functools.partial(function, l2norm=case.l2norm))(*operands)
    right_o, right_state = in_float64(*operands, l2norm=case.l2norm)
    assert o.dtype == case.dtype
    assert final_state.dtype == (case.state_dtype if case.initial_state else "float32")
    # Vectors of V numbers, each rounded once; sums of K products, some of which cancel.
    arithmetic = 64 * ROUNDING["float32"]
    assert error_of_o(o, right_o) <= ROUNDING[case.dtype] + arithmetic
    assert error_of_state(final_state, right_state) <= ROUNDING[final_state.dtype.name] + arithmetic


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case) -> None:
    check(case, decode)


def test_without_final_state() -> None:
    operands = inputs(Case())
    o, none = jax.jit(functools.partial(decode, output_final_state=False))(*operands)
    assert none is None
    assert np.array_equal(o, jax.jit(decode)(*operands)[0])


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_donated_state_is_updated_in_place(state_dtype: str) -> None:
    case = Case(batch=64, tokens=1, state_dtype=state_dtype)
    operands = inputs(case)
    kept = jax.jit(decode)(*operands)  # of a copy
    again = jax.jit(decode)(*operands)
    *rows, state = operands
    address = state.unsafe_buffer_pointer()
    o, final_state = jax.jit(decode, donate_argnums=5)(*rows, state)
    assert state.is_deleted()
    assert final_state.unsafe_buffer_pointer() == address
    for x, y, z in zip(kept, again, (o, final_state), strict=True):
        assert np.array_equal(x, y)
        assert np.array_equal(x, z)


def test_a_loop_that_carries_the_state_copies_nothing() -> None:
    case = Case(batch=4, tokens=16)
    *rows, state = inputs(case)

    def loop(state: Any, *rows: Any) -> Any:
        def step(state: Any, token: Any) -> Any:
            o, state = decode(*(x[:, None] for x in token), state)
            return state, o[:, 0]

        return jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in rows))

    compiled = jax.jit(loop, donate_argnums=0).lower(state, *rows).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < state.nbytes
    right_o, right_state = in_float64(*rows, state)
    final_state, o = compiled(state, *rows)
    assert error_of_o(jnp.moveaxis(o, 0, 1), right_o) <= ROUNDING["bfloat16"] + 64 * ROUNDING["float32"]
    assert error_of_state(final_state, right_state) <= 64 * ROUNDING["float32"]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_bitwise_repeatable(state_dtype: str) -> None:
    operands = inputs(Case(batch=64, tokens=4, key_heads=8, value_heads=32, state_dtype=state_dtype))
    run = jax.jit(decode)
    first = run(*operands)
    for _ in range(50):
        assert all(bool(jnp.array_equal(x, y)) for x, y in zip(run(*operands), first, strict=True))


@pytest.mark.parametrize("initial_state", [True, False])
def test_poisoned_memory(initial_state: bool) -> None:
    """Results do not depend on what the memory of the results held before."""
    operands = inputs(Case(batch=8, initial_state=initial_state))
    run = jax.jit(decode)
    first = [np.asarray(x) for x in run(*operands)]
    for value in (np.nan, np.inf):
        # Freed at once: the next call's results are cut from these.
        poison = [jnp.full((64, 1 << 20), value, jnp.bfloat16) for _ in range(8)]
        jax.block_until_ready(poison)
        del poison
        for x, y in zip(run(*operands), first, strict=True):
            assert np.asarray(x).tobytes() == y.tobytes()


def test_default_is_the_kernel_and_vmap_and_gradients_agree() -> None:
    operands = inputs(Case(batch=4))
    *rows, state = operands

    def default(*operands: Any) -> Any:
        *rows, state = operands
        return jax_qla.recurrent_gated_delta_rule(*rows, initial_state=state, output_final_state=True)

    plain = jax.jit(default)
    assert "recurrent_kernel" in plain.lower(*operands).as_text()
    results = plain(*operands)
    for x, y in zip(results, jax.jit(decode)(*operands), strict=True):
        assert np.array_equal(x, y)
    mapped = jax.jit(jax.vmap(default))(*(x[:, None] for x in operands))
    for x, y in zip(results, mapped, strict=True):
        assert np.array_equal(x, y[:, 0])

    def loss(implementation: str | None, *operands: Any) -> Any:
        *rows, state = operands
        o, final_state = jax_qla.recurrent_gated_delta_rule(
            *rows, initial_state=state, output_final_state=True, implementation=implementation
        )
        assert final_state is not None
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(jnp.square(final_state))

    found, right = (jax.jit(jax.grad(functools.partial(loss, name), argnums=5))(*rows, state) for name in (None, "xla"))
    assert float(jnp.linalg.norm(found - right)) <= 1e-5 * float(jnp.linalg.norm(right))
