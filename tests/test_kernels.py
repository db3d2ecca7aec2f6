"""The kernels' specifications in plain JAX, chained as `jax_qla.cuda` chains the kernels, against the recurrence."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_qla import segments as tables
from jax_qla.kernels import forward, gradients, prepare, recurrent, state_gradients, states
from jax_qla.reference import recurrence

TOLERANCE = 1e-12
SCALE = 0.3
KEY_DIM, VALUE_DIM = 8, 12

Arrays = dict[str, jax.Array]

TOKENS = 300
PACKED: dict[str, Sequence[tuple[int, int]]] = {
    "gaps and empty sequences": [(3, 3), (3, 70), (70, 71), (80, 80), (80, 208), (208, 290)],
    "whole chunks": [(0, 64), (64, 192), (192, 256), (256, 256), (256, 300), (300, 300)],
    "a long gap": [(0, 0), (0, 5), (215, 280), (299, 300), (300, 300), (300, 300)],
    "nothing at all": [(0, 0), (35, 35), (64, 64), (100, 100), (300, 300), (300, 300)],
}
"""Start and end of every sequence. All have one shape, and with it one compilation."""
DENSE = {"dense": (2, 130), "one token": (2, 1)}
HEADS = {"one for one": (2, 2), "grouped": (2, 6)}
"""Key heads and value heads."""

STATES = ("initial_state", "d_final_state")
"""Operands of the chain with a row for every sequence; the others have one for every token."""


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def inputs(batch: int, tokens: int, sequences: int, heads: tuple[int, int]) -> Arrays:
    """Operands and cotangents in float64; a strong gate, a reset and a beta of zero among them."""
    random = np.random.default_rng(tokens + sequences)
    key_heads, value_heads = heads

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape)

    k = normal(batch, tokens, key_heads, KEY_DIM)
    g = -np.abs(normal(batch, tokens, value_heads)) * 0.3
    beta = 1 / (1 + np.exp(-normal(batch, tokens, value_heads)))
    g[:, 10::50, 0] = -20.0
    g[:, 20::90, 1] = -np.inf
    beta[:, 5::30] = 0.0
    arrays = {
        "q": normal(*k.shape),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": normal(batch, tokens, value_heads, VALUE_DIM),
        "g": g,
        "beta": beta,
        "initial_state": normal(sequences, value_heads, KEY_DIM, VALUE_DIM),
        "do": normal(batch, tokens, value_heads, VALUE_DIM),
        "d_final_state": normal(sequences, value_heads, KEY_DIM, VALUE_DIM),
    }
    return {name: jnp.asarray(x) for name, x in arrays.items()}


@functools.partial(jax.jit, static_argnames="tokens")
def chain(given: Mapping[str, Any], segments: Any, *, tokens: int) -> Arrays:
    """Results of all kernels by name, each kernel fed by name: dense batches flattened, as in `jax_qla.cuda`."""
    ratio = given["v"].shape[2] // given["k"].shape[2]
    have = {name: x if name in STATES else x.reshape(tokens, *x.shape[2:]) for name, x in given.items()}
    have |= {"segments": segments, "chunks": jnp.asarray(tables.chunk_table(segments, tokens))}
    for kernel, names in (
        (prepare, "k g beta chunks -> a gamma"),
        (forward, "q k v a gamma beta initial_state segments chunks -> o final_state"),
        (states, "k v a gamma beta initial_state segments chunks -> h vd"),
        (
            state_gradients,
            "q k do a gamma beta d_final_state segments chunks -> dh dx d_initial_state",
        ),
        (gradients, "q k v g gamma beta do vd dx h dh chunks -> dq dk dv dg dbeta"),
    ):
        operands, results = (part.split() for part in names.split("->"))
        scalars = {"ratio": ratio} | ({"scale": SCALE} if kernel in (forward, state_gradients, gradients) else {})
        specification: Any = kernel.specification
        outputs = specification(*(have[name] for name in operands), **scalars)
        have |= dict(zip(results, outputs, strict=True))
    return have


@functools.partial(jax.jit, static_argnames="packed")
def expected(given: Mapping[str, Any], segments: Any, *, packed: bool) -> Arrays:
    """The same from the recurrence and its derivative."""
    names = ("q", "k", "v", "g", "beta", "initial_state")

    def function(*operands: Any) -> Any:
        q, k, v, g, beta, initial_state = operands
        return recurrence(q, k, v, g, beta, initial_state, segments if packed else None, scale=SCALE)

    # As the kernels clamp: exp(-110) is 0 to rounding.
    operands = [jnp.maximum(given[name], -110.0) if name == "g" else given[name] for name in names]
    (o, final_state), pull_back = jax.vjp(function, *operands)
    cotangents = pull_back((given["do"], given["d_final_state"]))
    results = {"o": o, "final_state": final_state, **{f"d{x}": y for x, y in zip(names, cotangents, strict=True)}}
    return {name.replace("dinitial", "d_initial"): x for name, x in results.items()}


def check(given: Arrays, segments: Any, *, packed: bool) -> Arrays:
    """Compares all results and returns what the chain has made."""
    batch, length = given["k"].shape[:2]
    found = chain(given, segments, tokens=batch * length)
    for name, right in expected(given, segments, packed=packed).items():
        if name == "dg":
            right = jnp.where(given["g"] < -110.0, 0.0, right)
        result = found[name].reshape(right.shape)
        assert result.dtype == jnp.float64
        error = float(jnp.linalg.norm(result - right))
        assert error <= TOLERANCE * float(jnp.linalg.norm(right)), f"{name}: {error}"
    return found


@pytest.mark.parametrize(
    ("case", "heads"), [*((case, "grouped") for case in PACKED), ("gaps and empty sequences", "one for one")]
)
def test_packed(case: str, heads: str) -> None:
    bounds = PACKED[case]
    segments = jnp.asarray(bounds, jnp.int32)
    given = inputs(1, TOKENS, len(bounds), HEADS[heads])
    # What lies outside of all sequences reaches no result.
    inside = np.zeros(TOKENS, bool)
    for start, end in bounds:
        inside[start:end] = True
    found = check(given, segments, packed=True)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not np.any(np.asarray(found[name])[~inside]), name
    poisoned = {name: x if name in STATES else x.at[:, ~inside].set(jnp.nan) for name, x in given.items()}
    again = chain(poisoned, segments, tokens=TOKENS)
    for name in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "d_initial_state"):
        np.testing.assert_array_equal(again[name], found[name], err_msg=name)
    # The state of an empty sequence passes through unchanged, and so does its gradient.
    for n, (start, end) in enumerate(bounds):
        if start == end:
            np.testing.assert_array_equal(found["final_state"][n], given["initial_state"][n])
            np.testing.assert_array_equal(found["d_initial_state"][n], given["d_final_state"][n])


@pytest.mark.parametrize(("case", "heads"), [("dense", "grouped"), ("dense", "one for one"), ("one token", "grouped")])
def test_dense(case: str, heads: str) -> None:
    batch, tokens = DENSE[case]
    segments = jnp.asarray(tables.dense_segments(batch, tokens))
    check(inputs(batch, tokens, batch, HEADS[heads]), segments, packed=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_the_kernels(dtype: str) -> None:
    """Inputs of the kernels' dtypes give results of the dtypes that `jax_qla.cuda` declares."""
    bounds = PACKED["gaps and empty sequences"]
    given = inputs(1, TOKENS, len(bounds), HEADS["grouped"])
    given = {name: x.astype(dtype if name in ("q", "k", "v", "do") else jnp.float32) for name, x in given.items()}
    found = jax.eval_shape(functools.partial(chain, tokens=TOKENS), given, jnp.asarray(bounds, jnp.int32))
    for name in ("a", "o", "h", "vd", "dh", "dx", "dq", "dk", "dv"):
        assert found[name].dtype == dtype, name
    for name in ("gamma", "final_state", "d_initial_state", "dg", "dbeta"):
        assert found[name].dtype == jnp.float32, name
    slots = tables.slot_count(TOKENS, len(bounds))
    assert found["h"].shape == found["dh"].shape == (slots, 6, VALUE_DIM, KEY_DIM)
    assert found["a"].shape == (TOKENS, 6, 64)


def expected_of_recurrent(*operands: Any) -> tuple[jax.Array, jax.Array]:
    q, k, v, g, beta, state = operands
    return recurrence(q, k, v, g, beta, state, None, scale=SCALE)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 25])
@pytest.mark.parametrize("given_state", [True, False])
def test_recurrent(heads: str, tokens: int, given_state: bool) -> None:
    given = inputs(3, tokens, 3, HEADS[heads])
    ratio = HEADS[heads][1] // HEADS[heads][0]
    rows: Any = [given[name] for name in ("q", "k", "v", "g", "beta")]
    state = given["initial_state"] if given_state else given["initial_state"][:0]
    q, k, v, g, beta = rows
    found = recurrent.specification(q, k, v, g, beta, state, ratio=ratio, scale=SCALE)
    right = expected_of_recurrent(*rows, state if given_state else None)
    for name, x, y in zip(("o", "final_state"), found, right, strict=True):
        assert x.dtype == jnp.float64
        assert float(jnp.linalg.norm(x - y)) <= TOLERANCE * float(jnp.linalg.norm(y)), name


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_dtypes_of_recurrent(state_dtype: str) -> None:
    given = inputs(2, 3, 2, HEADS["grouped"])
    rows: Any = [
        given[name].astype("bfloat16" if name in ("q", "k", "v") else "float32")
        for name in ("q", "k", "v", "g", "beta")
    ]
    state = given["initial_state"].astype(state_dtype)
    q, k, v, g, beta = rows
    o, final_state = recurrent.specification(q, k, v, g, beta, state, ratio=3, scale=SCALE)
    assert (o.dtype, o.shape) == (jnp.bfloat16, v.shape)
    assert (final_state.dtype, final_state.shape) == (state.dtype, state.shape)
