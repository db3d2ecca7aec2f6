"""The kernels' specifications in plain JAX, chained as `jax_qla.cuda` chains the kernels, against the recurrence."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thorough import every_value, rarely

from jax_qla import segments as tables
from jax_qla.kernels import (
    adjoint_summaries,
    compose,
    forward,
    gradients,
    prepare,
    recurrent,
    state_gradients,
    states,
    states_from_vd,
    summaries,
)
from jax_qla.l2norm import normalize
from jax_qla.reference import recurrence

TOLERANCE = 1e-12
SPLIT_TOLERANCE = 2e-5
"""Where transitions are kept as the sum of two bf16 numbers."""
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
    beta[:, 6::30] *= 1e-4
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


def of_any_length(given: Arrays) -> Arrays:
    """With q and k of lengths far from 1, and some of zero."""
    random = np.random.default_rng(1)
    changed = dict(given)
    for name, first_zero in (("q", 8), ("k", 7)):
        lengths = random.choice([0.01, 0.3, 1.0, 30.0], size=given[name].shape[:3])
        lengths[:, first_zero::40, 0] = 0.0
        changed[name] = given[name] * lengths[..., None]
    return changed


SUMMARIES = (
    (summaries, "k v a gamma beta lengths initial_state pieces cuts chunks -> response transition forgotten"),
    (
        adjoint_summaries,
        "q k do a gamma beta lengths query_lengths d_final_state pieces cuts chunks -> adjoint_response",
    ),
)


@functools.partial(jax.jit, static_argnames=("tokens", "piece_rows", "l2norm", "split"))
def chain(
    given: Mapping[str, Any],
    segments: Any,
    *,
    tokens: int,
    piece_rows: int | None = None,
    l2norm: int = 0,
    split: int = 0,
) -> Arrays:
    """Results of all kernels by name, each kernel fed by name: dense batches flattened, as in `jax_qla.cuda`.

    With `piece_rows`, sequences are cut into pieces of so many rows; with `l2norm`, q and k are to be normalised; with
    `split`, what is kept in two parts is.
    """
    ratio = given["v"].shape[2] // given["k"].shape[2]
    have = {name: x if name in STATES else x.reshape(tokens, *x.shape[2:]) for name, x in given.items()}
    have |= {"bounds": segments, "segments": segments, "chunks": jnp.asarray(tables.chunk_table(segments, tokens))}
    have |= {"pieces": jnp.zeros((0, 4), jnp.int32), "spans": jnp.zeros((0, 2), jnp.int32)}
    have |= {"entering": have["initial_state"][:0]} | dict.fromkeys(("leaving", "carried"), have["d_final_state"][:0])
    kernels: Sequence[Any] = (
        (prepare, "q k g beta bounds -> a gamma lengths query_lengths"),
        (
            forward,
            "q k v a gamma beta lengths query_lengths initial_state segments pieces spans entering chunks "
            "-> o final_state",
        ),
        (states, "k v a gamma beta lengths initial_state segments pieces entering chunks -> h vd"),
        *(() if split else ((states_from_vd, "k vd gamma initial_state segments pieces entering chunks -> h"),)),
        (
            state_gradients,
            "q k do a gamma beta lengths query_lengths d_final_state segments pieces spans leaving carried chunks "
            "-> dh dv d_initial_state carried left",
        ),
        (gradients, "q k v g gamma beta lengths query_lengths do vd dv h dh segments -> dq dk dv dg dbeta"),
    )
    if piece_rows is not None:
        parts = tables.piece_count(tokens, segments.shape[0], piece_rows)
        pieces = jnp.asarray(tables.piece_table(segments, parts, piece_rows))
        first = tables.first_piece(segments[:, 0], jnp.arange(segments.shape[0]), piece_rows)
        spans = jnp.stack([first, tables.pieces_of(segments, piece_rows)], axis=1)
        have |= {"pieces": pieces, "segments": pieces[:, :2], "spans": spans}
        have["cuts"] = jnp.asarray(tables.cut_table(segments, tables.cut_count(tokens, piece_rows), piece_rows))
        have["chunks"] = jnp.asarray(tables.chunk_table(pieces[:, :2], tokens))
        kernels = (kernels[0], *SUMMARIES, *kernels[1:])
    for kernel, names in kernels:
        operands, results = (part.split() for part in names.split("->"))
        with_scale = kernel in (forward, adjoint_summaries, state_gradients, gradients)
        scalars = {"ratio": ratio} | ({"scale": SCALE} if with_scale else {})
        if kernel is not states_from_vd:
            scalars["l2norm"] = l2norm
        if kernel is prepare:
            scalars["split"] = split
        specification: Any = kernel.specification
        outputs = specification(*(have[name] for name in operands), **scalars)
        have |= dict(zip(results, outputs if len(results) > 1 else (outputs,), strict=True))
        if piece_rows is not None and kernel is adjoint_summaries:
            chains = tables.chain_table(segments, segments.shape[0], piece_rows)
            of = (have["transition"], have["response"], have["forgotten"], have["initial_state"], chains)
            have["entering"] = compose.specification(*of)
            of = (of[0], have["adjoint_response"], of[2], have["d_final_state"], chains)
            have["leaving"] = compose.specification(*of, reverse=True)
    return have


def inverse_length(x: jax.Array) -> jax.Array:
    return 1 / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


@functools.partial(jax.jit, static_argnames=("packed", "l2norm"))
def expected(given: Mapping[str, Any], segments: Any, *, packed: bool, l2norm: int) -> Arrays:
    """The same from the recurrence and its derivative."""
    names = ("q", "k", "v", "g", "beta", "initial_state")

    def function(*operands: Any) -> Any:
        q, k, v, g, beta, initial_state = operands
        if l2norm:
            q, k = inverse_length(q) * q, inverse_length(k) * k
        return recurrence(q, k, v, g, beta, initial_state, segments if packed else None, scale=SCALE)

    # As the kernels clamp: exp(-110) is 0 to rounding.
    operands = [jnp.maximum(given[name], -110.0) if name == "g" else given[name] for name in names]
    (o, final_state), pull_back = jax.vjp(function, *operands)
    cotangents = pull_back((given["do"], given["d_final_state"]))
    results = {"o": o, "final_state": final_state, **{f"d{x}": y for x, y in zip(names, cotangents, strict=True)}}
    return {name.replace("dinitial", "d_initial"): x for name, x in results.items()}


def check(given: Arrays, segments: Any, *, packed: bool, piece_rows: int | None = None, l2norm: int = 0) -> Arrays:
    """Compares all results and returns what the chain has made."""
    batch, length = given["k"].shape[:2]
    tolerance = TOLERANCE if piece_rows is None else SPLIT_TOLERANCE
    found = chain(given, segments, tokens=batch * length, piece_rows=piece_rows, l2norm=l2norm)
    for name, right in expected(given, segments, packed=packed, l2norm=l2norm).items():
        if name == "dg":
            right = jnp.where(given["g"] < -110.0, 0.0, right)
        result = found[name].reshape(right.shape)
        if l2norm and name in ("dq", "dk"):
            # Gradients are the longer the shorter what they belong to is: this way all rows count alike.
            of_row = inverse_length(given[name[1]])
            result, right = result / of_row, right / of_row
        assert result.dtype == jnp.float64
        error = float(jnp.linalg.norm(result - right))
        assert error <= tolerance * float(jnp.linalg.norm(right)), f"{name}: {error}"
    return found


@every_value
@pytest.mark.parametrize(
    ("case", "heads", "l2norm"),
    [
        *((case, "grouped", 0) for case in PACKED),
        ("gaps and empty sequences", "one for one", 0),
        ("gaps and empty sequences", "grouped", 1),
        ("whole chunks", "grouped", 1),
    ],
)
def test_packed(case: str, heads: str, l2norm: int) -> None:
    bounds = PACKED[case]
    segments = jnp.asarray(bounds, jnp.int32)
    given = inputs(1, TOKENS, len(bounds), HEADS[heads])
    if l2norm:
        given = of_any_length(given)
    # What lies outside of all sequences reaches no result.
    inside = np.zeros(TOKENS, bool)
    for start, end in bounds:
        inside[start:end] = True
    found = check(given, segments, packed=True, l2norm=l2norm)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not np.any(np.asarray(found[name])[~inside]), name
    poisoned = {name: x if name in STATES else x.at[:, ~inside].set(jnp.nan) for name, x in given.items()}
    again = chain(poisoned, segments, tokens=TOKENS, l2norm=l2norm)
    for name in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "d_initial_state"):
        np.testing.assert_array_equal(again[name], found[name], err_msg=name)
    # The state of an empty sequence passes through unchanged, and so does its gradient.
    for n, (start, end) in enumerate(bounds):
        if start == end:
            np.testing.assert_array_equal(found["final_state"][n], given["initial_state"][n])
            np.testing.assert_array_equal(found["d_initial_state"][n], given["d_final_state"][n])


@every_value
@pytest.mark.parametrize("l2norm", [0, 1])
@pytest.mark.parametrize(("case", "heads"), [("dense", "grouped"), ("dense", "one for one"), ("one token", "grouped")])
def test_dense(case: str, heads: str, l2norm: int) -> None:
    batch, tokens = DENSE[case]
    segments = jnp.asarray(tables.dense_segments(batch, tokens))
    given = inputs(batch, tokens, batch, HEADS[heads])
    check(of_any_length(given) if l2norm else given, segments, packed=False, l2norm=l2norm)


@every_value
@pytest.mark.parametrize("l2norm", [0, 1])
@pytest.mark.parametrize("gates", ["none", "weak", "strong", "strong, stretching", "strong, negative beta"])
def test_pieces(gates: str, l2norm: int) -> None:
    """Sequences in pieces give what whole ones give, whether heads decay (and pieces are forgotten) or not."""
    bounds = [(0, 5), (5, 5), (9, 700), (700, 764), (770, 1000)]
    segments = jnp.asarray(bounds, jnp.int32)
    given = inputs(1, 1000, len(bounds), HEADS["grouped"])
    factor = {"none": 0.0, "weak": 0.02, "strong": 5.0}.get(gates, 5.0)
    given["g"] = factor * jnp.where(jnp.isfinite(given["g"]), jnp.maximum(given["g"], -2.0), -2.0)
    if gates == "strong, stretching":
        # A token may then lengthen the state, by up to 2.2: gates alone are no bound.
        given["k"] = jnp.sqrt(3.2) * given["k"]
        given["beta"] = jnp.full_like(given["beta"], 3.2 if l2norm else 1.0)
        given["g"] = given["g"].at[..., 1].set(-0.7)
    if gates == "strong, negative beta":  # by up to 2
        given["beta"] = -given["beta"]
        given["g"] = given["g"].at[..., 1].set(-0.5)
    if l2norm:
        given = of_any_length(given)
    found = check(given, segments, packed=True, piece_rows=128, l2norm=l2norm)
    before = np.asarray(found["cuts"])[:, 0]
    # Of pieces that are neither a sequence's first nor its last.
    inside = (before >= 0) & (np.asarray(found["pieces"])[before, 3] == 0)
    forgotten = np.asarray(found["forgotten"])[inside]
    assert forgotten.shape[0] == 4
    assert np.all(forgotten == (gates == "strong"))


@pytest.mark.parametrize("piece_rows", [None, rarely(128)])
def test_split(piece_rows: int | None) -> None:
    """What leaves a kernel in bf16 in two parts gives float32 results as of float32, and others but for their own
    rounding, where 16 bits do not."""
    bounds = [(0, 100), (100, 300)]
    segments = jnp.asarray(bounds, jnp.int32)
    given = inputs(1, TOKENS, len(bounds), HEADS["grouped"])
    given["beta"] = jnp.full_like(given["beta"], 1.9)
    low = {name: x.astype(jnp.bfloat16 if name in ("q", "k", "v", "do") else jnp.float32) for name, x in given.items()}
    right = expected({name: x.astype(jnp.float64) for name, x in low.items()}, segments, packed=True, l2norm=0)

    def errors(split: int) -> dict[str, float]:
        found = chain(low, segments, tokens=TOKENS, piece_rows=piece_rows, split=split)
        assert (found["a"].dtype, found["a"].shape) == (jnp.int16, (6, TOKENS, 64 * (1 + split)))
        assert found["h"].shape[2] == 1 + split
        pairs = {name: (found[name].reshape(x.shape), x) for name, x in right.items()}
        return {name: float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for name, (x, y) in pairs.items()}

    of_float32 = {"final_state", "dg", "dbeta", "d_initial_state"}
    for name, error in errors(1).items():
        assert error < (5e-5 if name in of_float32 else 2e-3), name
    coarse = errors(0)
    assert min(coarse[name] for name in of_float32) > 5e-4


def test_pieces_of_a_dense_batch() -> None:
    batch, tokens = 2, 330
    segments = jnp.asarray(tables.dense_segments(batch, tokens))
    check(inputs(batch, tokens, batch, HEADS["one for one"]), segments, packed=False, piece_rows=64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_the_kernels(dtype: str) -> None:
    """Inputs of the kernels' dtypes give results of the dtypes that `jax_qla.cuda` declares."""
    bounds = PACKED["gaps and empty sequences"]
    given = inputs(1, TOKENS, len(bounds), HEADS["grouped"])
    given = {name: x.astype(dtype if name in ("q", "k", "v", "do") else jnp.float32) for name, x in given.items()}
    found = jax.eval_shape(functools.partial(chain, tokens=TOKENS), given, jnp.asarray(bounds, jnp.int32))
    for name in ("o", "h", "vd", "dh", "dq", "dk", "dv"):
        assert found[name].dtype == dtype, name
    for name in ("gamma", "final_state", "d_initial_state", "dg", "dbeta"):
        assert found[name].dtype == jnp.float32, name
    count = tables.state_count(TOKENS, len(bounds))
    assert found["h"].shape == found["dh"].shape == (count, 6, 1, VALUE_DIM, KEY_DIM)
    assert (found["a"].dtype, found["a"].shape) == (jnp.int16, (6, TOKENS, 64))


def expected_of_recurrent(*operands: Any) -> tuple[jax.Array, jax.Array]:
    q, k, v, g, beta, state = operands
    return recurrence(q, k, v, g, beta, state, None, scale=SCALE)


@every_value
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 25])
@pytest.mark.parametrize("given_state", [True, False])
@pytest.mark.parametrize("normed", [0, 1])
def test_recurrent(heads: str, tokens: int, given_state: bool, normed: int) -> None:
    given = inputs(3, tokens, 3, HEADS[heads])
    ratio = HEADS[heads][1] // HEADS[heads][0]
    rows: Any = [given[name] for name in ("q", "k", "v", "g", "beta")]
    state = given["initial_state"] if given_state else given["initial_state"][:0]
    q, k, v, g, beta = rows
    found = recurrent.specification(q, k, v, g, beta, state, ratio=ratio, scale=SCALE, normed=normed)
    if normed:
        rows[:2] = normalize(q), normalize(k)
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
