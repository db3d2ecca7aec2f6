"""The battery: one list of cases that every implementation is measured on, against the float64 recurrence.

`check(case, function, limits)` runs a function of the internal contract's flat signature

    function(q, k, v, g, beta, initial_state, segments, scale) -> (o, final_state)

(with l2norm=True besides where a case says so) on a case, takes its gradients from random cotangents of both results,
compares o, the final state and all gradients with `jax_qla.reference` in float64 on the same (rounded) inputs, and
returns the measured errors.

Three relative errors are measured of each result, in the Euclidean norm:
    whole      over everything
    head       the worst value of it over (value or key) heads
    position   the worst row of K or V elements (states: the worst matrix; dg, dbeta: the worst element), relative to
               that row or to the root mean square row of its head, whichever is larger
No reference norm is taken smaller than float32 can resolve (`UNDERFLOW`).

dg_t and dbeta_t are inner products, <dS_t, S_t> and <k_t^T dS_t, delta_t>, of K V and of V terms with random signs. By
chance such a sum can be far smaller than the Euclidean length of its terms (`terms`), and what the rounding of its
operands does to it is in proportion to the latter. With `Limits.of_terms`, the reference value of either counts as at
least that length. Everything else is purely relative.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla import policy
from jax_qla.reference import recurrence

Function = Callable[..., tuple[jax.Array, jax.Array]]

VANISHED = 1e-9
"""A head counts as this part of all heads at the least: what has decayed to nothing may be left out."""

UNDERFLOW = 1e-33
"""Root mean square below which a reference counts as this large: float32 flushes products below 1.2e-38 to zero, so
smaller numbers cannot be right to 1e-5. (exp(-70) = 4e-31 is still a real test.)"""

RESULTS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "d_initial_state")


NOT_A_NUMBER = 100
"""The token whose gate is not a number."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs. Everything random follows from the name, whatever the dtype."""

    name: str
    dtype: str = "float32"
    batch: int = 1
    tokens: int = 129
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    gates: str | float = "random"
    """A constant, or "random" (a quarter of the heads zero), "alternating" (0, -30), "single" (small, one of -1e4),
    "strong" (half small, half down to -70, none a round number), "resets" (random, some -inf), "not a number" (random,
    one so of the first head, at NOT_A_NUMBER)."""
    keys: str = "unit"
    """"unit" (random of length 1), "identical" (of length 1), "identical long" (of length 4), "zero" or "some zero"."""
    queries: Literal["unit", "alike"] = "unit"
    """Of length 1: random, or of numbers that differ in sign only."""
    beta: float | Literal["some zero", "some faint"] | None = None
    """A constant, None for random in (0, 1), or every third of these zero, or times 2^-12 (every other one zero)."""
    segments: tuple[tuple[int, int], ...] | None = None
    """Start and end row of each sequence, or None for a dense batch."""
    initial_state: bool = True
    poisoned: bool = False
    """Rows outside every segment hold NaN in q, k, v, g, beta and do."""
    l2norm: bool = False
    """Whether q and k are to be normalised; they are then of lengths from 0.3 to 8."""

    @property
    def sequences(self) -> int:
        return self.batch if self.segments is None else len(self.segments)

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"


class Inputs(NamedTuple):
    """Operands of a case and the cotangents of its results, as NumPy arrays."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    initial_state: np.ndarray | None
    segments: np.ndarray | None
    do: np.ndarray
    d_final_state: np.ndarray
    outside: np.ndarray
    """bool [T], rows outside every segment."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest relative errors allowed, see the module."""

    o: float
    final_state: float
    gradients: float
    gates: float | None = None
    """Of dg and dbeta; None = as the other gradients."""
    head: float = 1.0
    """Allowed of `head`, as a multiple of what is allowed of `whole`."""
    position: float = 4.0
    """Allowed of `position`, as a multiple of what is allowed of `whole`."""
    of_terms: bool = False
    """Whether dg and dbeta are measured against the Euclidean length of their terms where that is larger."""
    plain_gates: float | None = None
    """Of dg and dbeta as a whole, measured against themselves, whatever `of_terms`."""

    def of(self, result: str) -> float:
        gates = self.gradients if self.gates is None else self.gates
        own = {"o": self.o, "final_state": self.final_state, "dg": gates, "dbeta": gates}
        return own.get(result, self.gradients)


class Error(NamedTuple):
    """Relative errors of one result, see the module."""

    whole: float
    head: float
    position: float


def _unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def _gates(case: Case, random: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    g = -np.exp(1.5 * random.standard_normal(shape) - 2)
    if isinstance(case.gates, float):
        return np.full(shape, case.gates)
    if case.gates == "alternating":
        return np.where(np.arange(shape[1])[None, :, None] % 2 == 0, 0.0, -30.0) + np.zeros(shape)
    if case.gates == "single":
        g *= 0.1
        g[:, shape[1] // 3] = -1e4
        return g
    if case.gates == "strong":
        return np.where(random.random(shape) < 0.5, 0.1 * g, -70 * random.random(shape))
    if case.gates == "resets":
        g[:, random.integers(0, shape[1], 5)] = -np.inf
        return g
    g[:, :, ::4] = 0
    if case.gates == "not a number":
        g[0, NOT_A_NUMBER, 0] = np.nan
        return g
    assert case.gates == "random"
    return g


@functools.cache
def inputs(case: Case) -> Inputs:
    """The case's inputs, rounded to its dtype (g, beta and states: float32)."""
    random = np.random.default_rng(zlib.crc32(case.name.encode()))
    normal = random.standard_normal
    batch, tokens, key_heads, value_heads = case.batch, case.tokens, case.key_heads, case.value_heads
    q = _unit(normal((batch, tokens, key_heads, case.key_dim)))
    if case.queries == "alike":
        q = np.sign(q) / np.sqrt(case.key_dim)
    k = _unit(normal((batch, tokens, key_heads, case.key_dim)))
    if case.keys.startswith("identical"):
        k = np.broadcast_to(k[:, :1], k.shape) * (4 if case.keys == "identical long" else 1)
    elif case.keys == "zero":
        k = np.zeros_like(k)
    elif case.keys == "some zero":
        k[:, ::5] = 0
    v = normal((batch, tokens, value_heads, case.value_dim))
    g = _gates(case, random, (batch, tokens, value_heads))
    beta = 1 / (1 + np.exp(-normal((batch, tokens, value_heads))))
    if case.beta == "some zero":
        beta[:, ::3] = 0
    elif case.beta == "some faint":
        beta[:, ::3] *= 2.0**-12
        beta[:, ::6] = 0
        beta[:, 1::9] *= 2.0**-26  # less than float16 has
    elif case.beta is not None:
        beta = np.full_like(beta, case.beta)
    state_shape = (case.sequences, value_heads, case.key_dim, case.value_dim)
    initial_state = normal(state_shape) if case.initial_state else None
    do = normal(v.shape)
    d_final_state = normal(state_shape)
    if case.l2norm:
        q, k = (x * np.exp(random.uniform(np.log(0.3), np.log(8), (*x.shape[:3], 1))) for x in (q, k))

    segments = None
    outside = np.zeros(tokens, bool)
    if case.segments is not None:
        segments = np.array(case.segments, np.int32)
        outside[:] = True
        for start, end in case.segments:
            outside[start:end] = False
    if case.poisoned:
        for x in (q, k, v, g, beta, do):
            x[:, outside] = np.nan
    low, f32 = jnp.dtype(case.dtype), np.float32
    states = (None if initial_state is None else initial_state.astype(f32), segments)
    rows = (q.astype(low), k.astype(low), v.astype(low), g.astype(f32), beta.astype(f32))
    return Inputs(*rows, *states, do.astype(low), d_final_state.astype(f32), outside)


@functools.cache
def _with_gradients(
    function: Function, scale: float, initial_state: bool, l2norm: bool, overrides: tuple[str | None, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Jitted: results of `function` and gradients by its operands, in the order of RESULTS.

    `overrides` are what the environment says of the policy, for a trace is of one such value.
    """

    options = {"l2norm": True} if l2norm else {}

    @jax.jit
    def run(
        rows: tuple[jax.Array, ...],
        state: jax.Array | None,
        segments: jax.Array | None,
        cotangents: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        def of(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            return function(*operands[:5], operands[5] if initial_state else None, segments, scale, **options)

        results, vjp = jax.vjp(of, *rows, *((state,) if initial_state else ()))
        return *results, *vjp(cotangents)

    return run


def _normalized(x: Any) -> Any:
    return x / ((x * x).sum(axis=-1, keepdims=True) + 1e-6) ** 0.5


def _float64_recurrence(q: Any, k: Any, *others: Any, l2norm: bool = False) -> tuple[jax.Array, jax.Array]:
    if l2norm:
        # Rows of NaN, which no sequence has, have gradients of zero.
        q, k = (_normalized(jnp.nan_to_num(x)) for x in (q, k))
    return recurrence(q, k, *others[:-1], scale=others[-1])


def _scale(case: Case) -> float:
    return float(case.key_dim**-0.5)


def run(case: Case, function: Function) -> dict[str, np.ndarray]:
    """Results and gradients of `function` on the case, by the names in RESULTS."""
    x = inputs(case)
    overrides = tuple(
        os.environ.get(name) for name in (policy.OVERRIDE, policy.GROUPS_OVERRIDE, policy.IN_ONE_OVERRIDE)
    )
    run = _with_gradients(function, _scale(case), case.initial_state, case.l2norm, overrides)
    values = run(x[:5], x.initial_state, x.segments, (x.do, x.d_final_state))
    return {name: np.asarray(value) for name, value in zip(RESULTS, values, strict=False)}


@functools.cache
def reference(case: Case, platform: str | None = None) -> dict[str, np.ndarray]:
    """Results and gradients of the float64 recurrence on the case, computed once a session, by XLA on `platform` or
    where JAX computes."""
    x = inputs(case)
    # Trailing rows that change nothing let short dense cases share one compilation.
    padding = max(0, 144 - case.tokens)

    def wide(array: np.ndarray) -> np.ndarray:
        array = array.astype(np.float64)
        return np.pad(array, ((0, 0), (0, padding), *((0, 0),) * (array.ndim - 2)))

    with jax.enable_x64(True), jax.default_device(jax.devices(platform)[0]):
        run = _with_gradients(_float64_recurrence, _scale(case), case.initial_state, case.l2norm, ())
        state = None if x.initial_state is None else x.initial_state.astype(np.float64)
        cotangents = (wide(x.do), x.d_final_state.astype(np.float64))
        values = run(tuple(wide(array) for array in x[:5]), state, x.segments, cotangents)
    result = {name: np.asarray(value) for name, value in zip(RESULTS, values, strict=False)}
    return {name: x if name.endswith("state") else x[:, : case.tokens] for name, x in result.items()}


class _Token(NamedTuple):
    """What `_lengths` goes by of a token; of several, with a dimension more in front."""

    q: jax.Array
    """[Hv, K], times the scale; k likewise."""
    k: jax.Array
    v: jax.Array
    """[Hv, V]; do likewise."""
    do: jax.Array
    g: jax.Array
    """[Hv]; beta likewise."""
    beta: jax.Array
    first: jax.Array
    """The sequence that begins here, or -1."""
    last: jax.Array
    """The sequence that ends here, or -1."""


@jax.jit
def _lengths(tokens: _Token, initial_states: jax.Array, final_gradients: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of dg and of dbeta, [T, Hv]: what `terms` says, in float32. States and their gradients are [N, Hv, K, V]."""

    def forward(state: jax.Array, x: _Token) -> tuple[jax.Array, jax.Array]:
        state = jnp.where(x.first >= 0, initial_states[x.first], state)
        decayed = jnp.exp(x.g)[:, None, None] * state
        delta = x.v - jnp.einsum("hk,hkv->hv", x.k, decayed)
        return decayed + jnp.einsum("hk,hv->hkv", x.k, x.beta[:, None] * delta), decayed

    def backward(gradient: jax.Array, xs: tuple[_Token, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, decayed = xs
        gradient = jnp.where(x.last >= 0, final_gradients[x.last], gradient)
        gradient = gradient + jnp.einsum("hk,hv->hkv", x.q, x.do)
        read = jnp.einsum("hk,hkv->hv", x.k, gradient)
        of_beta = jnp.linalg.norm(read * (x.v - jnp.einsum("hk,hkv->hv", x.k, decayed)), axis=-1)
        gradient = gradient - jnp.einsum("hk,hv->hkv", x.k, x.beta[:, None] * read)
        of_gate = jnp.sqrt(jnp.sum((gradient * decayed) ** 2, axis=(1, 2)))
        return jnp.exp(x.g)[:, None, None] * gradient, (of_gate, of_beta)

    with jax.default_matmul_precision("highest"):
        nothing = jnp.zeros_like(initial_states[0])
        decayed = jax.lax.scan(forward, nothing, tokens)[1]
        return jax.lax.scan(backward, nothing, (tokens, decayed), reverse=True)[1]


@functools.cache
def terms(case: Case) -> dict[str, np.ndarray]:
    """For dg and dbeta, the Euclidean length of the terms that each of their elements is the sum of, [B, T, Hv]."""
    x = inputs(case)
    rows = case.batch * case.tokens
    padded = max(rows, 144)  # as in `reference`
    inside = np.zeros(padded, bool)
    first, last = np.full((2, padded), -1, np.int32)
    dense = tuple((b * case.tokens, (b + 1) * case.tokens) for b in range(case.batch))
    for n, (start, end) in enumerate(dense if case.segments is None else case.segments):
        if start < end:
            first[start] = last[end - 1] = n
            inside[start:end] = True

    def in_one(array: np.ndarray) -> np.ndarray:
        """[rows, ..], sequences one behind the other, zero outside."""
        array = array.astype(np.float32).reshape(rows, *array.shape[2:])
        array = np.pad(array, ((0, padded - rows), *((0, 0),) * (array.ndim - 1)))
        return np.where(inside.reshape(-1, *(1,) * (array.ndim - 1)), array, np.float32(0))

    q, k, v, g, beta, do = (in_one(array) for array in (*x[:5], x.do))
    if case.l2norm:
        q, k = _normalized(q), _normalized(k)
    q, k = (np.repeat(array, case.value_heads // case.key_heads, axis=1) for array in (_scale(case) * q, k))
    state = np.zeros_like(x.d_final_state) if x.initial_state is None else x.initial_state
    if not inside.any():
        return dict.fromkeys(("dg", "dbeta"), np.zeros(x.g.shape, np.float32))
    state = np.zeros_like(x.d_final_state) if x.initial_state is None else x.initial_state
    tokens = _Token(*map(jnp.asarray, (q, k, v, do, g, beta, first, last)))
    lengths = _lengths(tokens, jnp.asarray(state), jnp.asarray(x.d_final_state))
    of_gate, of_beta = (np.asarray(length)[:rows].reshape(x.g.shape) for length in lengths)
    return {"dg": of_gate, "dbeta": of_beta}


def _error(name: str, measured: np.ndarray, expected: np.ndarray, least: np.ndarray | float) -> Error:
    """`least`: magnitudes that the reference's elements count as at the least."""

    def by_head(x: np.ndarray) -> np.ndarray:
        """[heads, positions, elements]"""
        if name.endswith("state"):
            return np.moveaxis(x, 1, 0).reshape(x.shape[1], x.shape[0], -1)
        return np.moveaxis(x, 2, 0).reshape(x.shape[2], x.shape[0] * x.shape[1], -1)

    def norm(x: np.ndarray, axis: int | tuple[int, int] | None = None) -> np.ndarray:
        return np.asarray(np.sqrt(np.sum(x * x, axis=axis)))

    difference = by_head(measured.astype(np.float64) - expected)
    expected = by_head(np.maximum(np.abs(expected), least))
    _, positions, elements = expected.shape
    floor = UNDERFLOW * np.sqrt(positions * elements)
    whole = norm(difference) / np.maximum(norm(expected), floor)
    head_norm = np.maximum(norm(expected, (1, 2)), np.maximum(floor, VANISHED * norm(expected)))
    head = np.max(norm(difference, (1, 2)) / head_norm)
    row = np.maximum(norm(expected, 2), head_norm[:, None] / np.sqrt(positions))
    position = np.max(norm(difference, 2) / row)
    return Error(float(whole), float(head), float(position))


def errors(case: Case, results: Mapping[str, np.ndarray], of_terms: bool = False) -> dict[str, Error]:
    """Errors of `results`, named as in RESULTS, against the reference."""
    least = terms(case) if of_terms else {}
    return {name: _error(name, value, reference(case)[name], least.get(name, 0.0)) for name, value in results.items()}


def _exact(case: Case, results: Mapping[str, np.ndarray]) -> Iterator[str]:
    """What must hold exactly, as sentences about what does not."""
    x = inputs(case)
    dtypes = dict.fromkeys(RESULTS, "float32") | dict.fromkeys(("o", "dq", "dk", "dv"), case.dtype)
    for name, value in results.items():
        if value.shape != reference(case)[name].shape:
            yield f"{name} has shape {value.shape}, not {reference(case)[name].shape}"
        if value.dtype.name != dtypes[name]:
            yield f"{name} has dtype {value.dtype.name}, not {dtypes[name]}"
        if not name.endswith("state") and np.any(value[:, x.outside] != 0):
            yield f"{name} is not zero in rows outside every segment"
    if case.segments is None:
        return
    for n, (start, end) in enumerate(case.segments):
        if start == end:
            first = np.zeros_like(x.d_final_state[n]) if x.initial_state is None else x.initial_state[n]
            if results["final_state"][n].tobytes() != first.tobytes():
                yield f"the final state of empty sequence {n} is not its initial state"
            if case.initial_state and np.any(results["d_initial_state"][n] != x.d_final_state[n]):
                yield f"the gradient of empty sequence {n}'s initial state is not that of its final state"


def check_not_a_number(case: Case, function: Function) -> None:
    """Asserts that what is not a number by the reference, where a gate is none, is none by `function` either, in every
    sequence and head of which the reference says so, and in no other."""
    assert case.gates == "not a number"
    bounds = case.segments or ((0, case.tokens),) * case.batch
    for name, found in run(case, function).items():
        expected = np.isnan(reference(case)[name])
        assert expected.any(), name
        assert np.isnan(found[expected]).all(), f"{name} has numbers where it should have none"
        for n, (start, end) in enumerate(bounds):
            if name.endswith("state"):
                of_sequence = (slice(n, n + 1), slice(None))
            else:
                row = n if case.segments is None else 0
                of_sequence = (slice(row, row + 1), slice(start, end))
            by_head = [np.moveaxis(x[of_sequence], 1 if name.endswith("state") else 2, 0) for x in (expected, found)]
            for there, values in zip(*by_head, strict=True):
                assert there.any() or np.isfinite(values.astype(np.float32)).all(), f"{name} of sequence {n}"


def check(case: Case, function: Function, limits: Limits) -> dict[str, Error]:
    """Asserts that `function` is within `limits` on the case; returns what was measured."""
    results = run(case, function)
    measured = errors(case, results, limits.of_terms)
    wrong = list(_exact(case, results))
    for name, error in measured.items():
        for kind, factor in (("whole", 1.0), ("head", limits.head), ("position", limits.position)):
            limit, value = factor * limits.of(name), getattr(error, kind)
            if not value <= limit:
                wrong.append(f"{name}: relative error {value:.2e} ({kind}) exceeds {limit:.2e}")
    if limits.plain_gates is not None:
        for name, error in errors(case, {name: results[name] for name in ("dg", "dbeta")}).items():
            if not error.whole <= limits.plain_gates:
                wrong.append(
                    f"{name}: relative error {error.whole:.2e} (not of terms) exceeds {limits.plain_gates:.2e}"
                )
    assert not wrong, f"{case}: " + "; ".join(wrong)
    return measured


def table(measured: Mapping[str, Mapping[str, Error]]) -> str:
    """A printable table of errors: a line a case (the keys), "whole/head/position" a result."""
    width = max(map(len, measured), default=0)
    lines = [" " * width + "".join(f" {name:>23}" for name in RESULTS)]
    for case, results in measured.items():
        cells = ("/".join(f"{e:.1e}" for e in results[name]) if name in results else "" for name in RESULTS)
        lines.append(f"{case:<{width}}" + "".join(f" {cell:>23}" for cell in cells))
    return "\n".join(lines)


LENGTHS = (1, 15, 63, 64, 65, 127, 129, 1000)

_GAPS = ((5, 70), (70, 70), (80, 208), (208, 209), (209, 209), (250, 290))
_UNEVEN = ((3, 3), (3, 300), (300, 364), (370, 400))
"""In pieces of 128 tokens the second has three; none is cut where none is longer than one and a half
(policy.cut_beyond_in_both)."""
_MANY = tuple(itertools.pairwise(itertools.accumulate((66, 0, 1, 190) * 9, initial=0)))
"""More than a warp has lanes, and long enough for an order by length (kernels/preludes.py: LENGTH_PRELUDE)."""
_TIGHT = ((0, 0), (0, 64), (64, 64), (64, 193), (193, 193), (193, 300))


def _cases() -> Iterator[Case]:
    for tokens in LENGTHS:
        yield Case(f"length {tokens}", tokens=tokens)
    for name, gates in (("0", 0.0), ("-1e-6", -1e-6), ("-20", -20.0), ("-70", -70.0)):
        yield Case(f"gates {name}", gates=gates)
    yield Case("gates -20, a last chunk of 36", tokens=100, gates=-20.0)
    yield Case("gates 0 and -30 alternating", gates="alternating")
    yield Case("gates with a single -1e4", gates="single")
    yield Case("gates weak and strong", gates="strong")
    yield Case("gates with resets", gates="resets")
    yield Case("identical keys, beta 1", keys="identical", beta=1.0, gates=0.0)
    yield Case("identical keys, beta 1, decaying", keys="identical", beta=1.0)
    yield Case("identical keys, beta 2", keys="identical", beta=2.0, gates=0.0)
    yield Case("identical keys of length 4, gates -3", keys="identical long", beta=1.0, gates=-3.0)
    yield Case("zero keys", keys="zero")
    yield Case("beta 0", beta=0.0)
    yield Case("some beta faint", beta="some faint")
    yield Case("beta 2", beta=2.0)
    yield Case("no initial state", initial_state=False)
    yield Case("packed, empty sequences", tokens=300, segments=_TIGHT)
    yield Case("packed, gaps", tokens=300, segments=_GAPS)
    yield Case("packed, all but one empty", tokens=300, segments=((0, 0),) * 3 + ((0, 300),) + ((300, 300),) * 2)
    yield Case("packed, nothing at all", tokens=300, segments=((7, 7),) * 6)
    yield Case("packed, gaps of NaN", tokens=300, segments=_GAPS, poisoned=True)
    yield Case("packed, long among short", tokens=400, segments=_UNEVEN, poisoned=True)
    yield Case("packed, many sequences", tokens=2313, segments=_MANY)
    yield Case("packed, no initial state", tokens=300, segments=_GAPS, initial_state=False)
    yield Case("ratio 1, K 64, V 128, batch 2", batch=2, tokens=100, key_heads=2, value_dim=128)
    yield Case("ratio 4, K 128, V 64", tokens=100, value_heads=4, key_dim=128)
    yield Case("ratio 3, K and V 128, batch 3", batch=3, tokens=100, value_heads=3, key_dim=128, value_dim=128)
    yield Case(
        "ratio 2, packed, K and V 128",
        tokens=300,
        key_heads=2,
        value_heads=4,
        key_dim=128,
        value_dim=128,
        segments=_TIGHT,
    )
    normalised = functools.partial(Case, l2norm=True)
    for tokens in (1, 63, 65, 1000):
        yield normalised(f"normalised, length {tokens}", tokens=tokens)
    yield normalised("normalised, batch 2, ratio 3", batch=2, tokens=100, value_heads=3)
    yield normalised("normalised, zero keys", keys="zero")
    yield normalised("normalised, some keys zero", keys="some zero")
    yield normalised("normalised, beta 0", beta=0.0)
    yield normalised("normalised, some beta 0", beta="some zero")
    yield normalised("normalised, some beta faint", beta="some faint")
    yield normalised("normalised, packed, empty sequences", tokens=300, segments=_TIGHT)
    yield normalised("normalised, packed, gaps of NaN", tokens=300, segments=_GAPS, poisoned=True)
    each = functools.partial(normalised, key_heads=2)
    yield each("normalised, ratio 1, packed, gaps of NaN", tokens=300, segments=_GAPS, poisoned=True)
    yield each("normalised, ratio 1, batch 2, some keys zero", batch=2, tokens=100, keys="some zero")
    yield each("normalised, ratio 1, packed, K and V 128", tokens=300, key_dim=128, value_dim=128, segments=_TIGHT)


CASES: tuple[Case, ...] = (
    *(
        dataclasses.replace(case, dtype=dtype)
        for case in _cases()
        for dtype in ("float32", "bfloat16")
        # q and k are normalised before whatever computes in float32: once, with sequences and gaps, is enough.
        if not (case.l2norm and dtype == "float32") or case.poisoned
    ),
    Case("float16", dtype="float16"),
    Case("float16, normalised", dtype="float16", l2norm=True),
    Case("float16, some beta faint", dtype="float16", beta="some faint"),
)
"""All cases, nearly all in float32 and bfloat16; K and V in {64, 128}."""
