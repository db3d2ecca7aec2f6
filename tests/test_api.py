"""The public functions: values and gradients in every way to say where sequences lie, dtypes, and the choice made."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_in
from jax.sharding import AxisType
from thorough import every_value, rarely

import jax_qla
import jax_qla.api
from jax_qla import api, policy
from jax_qla.implementations import Choice
from jax_qla.l2norm import normalize_gradient
from jax_qla.reference import recurrence

KEY_DIM, VALUE_DIM, KEY_HEADS, VALUE_HEADS = 16, 8, 2, 4
STATE = (VALUE_HEADS, KEY_DIM, VALUE_DIM)
TOLERANCE = 2e-6
"""Between float32 sums in different orders, relative to the whole array's norm."""


def tokens(batch: int, length: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v, g, beta with keys that need no normalisation."""
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((batch, length, KEY_HEADS, KEY_DIM)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = random.standard_normal((batch, length, VALUE_HEADS, VALUE_DIM))
    g = -random.exponential(size=(batch, length, VALUE_HEADS))
    beta = random.uniform(size=(batch, length, VALUE_HEADS))
    return tuple(x.astype(np.float32) for x in (q, k, v, g, beta))


def states(*leading: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((*leading, *STATE)).astype(np.float32)


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= tolerance * max(float(np.linalg.norm(y)), 1e-6), (
            f"relative error {np.linalg.norm(x - y) / np.linalg.norm(y):.1e}"
        )


def with_gradients(function: Callable[..., Any], *operands: jax.Array, **options: Any) -> Any:
    """Results (o, final_state or None), and gradients of a sum over both that weighs every element differently."""

    def loss(*operands: jax.Array) -> Any:
        results = function(*operands, **options)
        weigh = lambda x: jnp.sum(jnp.sin(x) * jnp.cos(jnp.arange(x.size)).reshape(x.shape))  # noqa: E731
        return sum(map(weigh, jax.tree.leaves(results))), results

    gradients, results = jax.jit(jax.grad(loss, argnums=tuple(range(len(operands))), has_aux=True))(*operands)
    return results, gradients


def by_recurrence(spans: Sequence[Sequence[tuple[int, int]]], *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The recurrence over the given spans of tokens of each row.

    Operands are q, k, v, g, beta [B, T, ...] and the states [B, slots, Hv, K, V] before the spans; those of the results
    are the states after them.
    """
    *rows, initial = operands
    batch, length = rows[0].shape[:2]
    slots = initial.shape[1]
    segments = []
    for b in range(batch):
        segments += [(b * length + start, b * length + end) for start, end in spans[b][:slots]]
        segments += [((b + 1) * length,) * 2] * (slots - len(spans[b]))
    o, final = recurrence(
        *(x.reshape(1, batch * length, *x.shape[2:]) for x in rows),
        initial.reshape(-1, *initial.shape[2:]),
        jnp.array(segments, jnp.int32),
        scale=KEY_DIM**-0.5,
    )
    return o.reshape(rows[2].shape), final.reshape(initial.shape)


def of_xla_and_reference(function: Callable[..., Any], expected: Callable[..., Any], *operands: jax.Array) -> None:
    """Checks values and gradients with "xla", which is what None is here, and values with "reference"."""
    results, gradients = with_gradients(expected, *operands)
    assert_close(with_gradients(function, *operands, implementation=None), (results, gradients))
    assert_close(jax.jit(partial(function, implementation="reference"))(*operands), results)


def test_dense() -> None:
    def function(*x: jax.Array, implementation: str | None) -> Any:
        return jax_qla.chunk_gated_delta_rule(
            *x[:5], initial_state=x[5], output_final_state=True, implementation=implementation
        )

    def expected(*x: jax.Array) -> Any:
        return recurrence(*x, None, scale=KEY_DIM**-0.5)

    of_xla_and_reference(function, expected, *tokens(2, 70), states(2))


def test_cu_seqlens() -> None:
    cu_seqlens = jnp.array([0, 65, 65, 80, 84], jnp.int32)

    def function(*x: jax.Array, implementation: str | None) -> Any:
        return jax_qla.chunk_gated_delta_rule(
            *x[:5],
            initial_state=x[5],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            implementation=implementation,
        )

    def expected(*x: jax.Array) -> Any:
        o, final = by_recurrence([[(0, 65), (65, 65), (65, 80), (80, 84)]], *x[:5], x[5][None])
        return o, final[0]

    of_xla_and_reference(function, expected, *tokens(1, 90), states(4))


IDS = np.array([[1] * 3 + [2] * 66 + [0] * 3 + [2] * 8, [0] * 2 + [4] * 78], np.int32)
SPANS = [[(0, 3), (3, 69), (72, 80)], [(2, 80)]]


def test_segment_ids_with_states() -> None:
    """Two slots a row: the first row's third segment becomes padding, the second row's second slot stays unused."""

    def function(*x: jax.Array, implementation: str | None) -> Any:
        return jax_qla.chunk_gated_delta_rule(
            *x[:5],
            initial_state=x[5],
            output_final_state=True,
            segment_ids=IDS,
            max_segments=2,
            implementation=implementation,
        )

    of_xla_and_reference(function, partial(by_recurrence, SPANS), *tokens(2, 80), states(2, 2))


def test_segment_ids_without_states() -> None:
    def function(*x: jax.Array, implementation: str | None) -> Any:
        return jax_qla.chunk_gated_delta_rule(*x, segment_ids=IDS, implementation=implementation)[0]

    def expected(*x: jax.Array) -> Any:
        return by_recurrence(SPANS, *x, jnp.zeros((2, 3, *STATE)))[0]

    of_xla_and_reference(function, expected, *tokens(2, 80))


def test_segment_ids_with_max_segments_but_no_states() -> None:
    """max_segments means the same whether or not states are asked for."""
    operands = tokens(2, 80)
    o, final = jax_qla.chunk_gated_delta_rule(*operands, segment_ids=IDS, max_segments=2)
    assert final is None
    assert_close(o, jax.jit(partial(by_recurrence, SPANS))(*operands, jnp.zeros((2, 2, *STATE)))[0])


def test_dtypes() -> None:
    """Narrow gates are widened, results and gradients have the dtypes of what they belong to."""

    def function(*x: jax.Array) -> Any:
        return jax_qla.chunk_gated_delta_rule(*x, output_final_state=True)

    narrow = tuple(x.astype(jnp.bfloat16) for x in tokens(1, 70))
    results, gradients = with_gradients(function, *narrow)
    assert [x.dtype for x in (*results, *gradients)] == [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 5]
    wide = with_gradients(function, *narrow[:3], *(x.astype(jnp.float32) for x in narrow[3:]))
    assert_close(results, wide[0], 0)
    assert_close(gradients, tuple(x.astype(jnp.bfloat16) for x in wide[1]), 0)

    half = [jax.ShapeDtypeStruct(x.shape, jnp.float16) for x in narrow]
    assert [x.dtype for x in jax.eval_shape(function, *half)] == [jnp.float16, jnp.float32]


def test_l2norm_and_scale() -> None:
    q, k, v, g, beta = tokens(1, 70)
    k = 3 * k

    def in_kernel(*x: jax.Array) -> Any:
        return jax_qla.chunk_gated_delta_rule(*x, scale=0.3, use_qk_l2norm_in_kernel=True)[0]

    def before(q: jax.Array, k: jax.Array, *others: jax.Array) -> Any:
        q, k = (x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        return jax_qla.chunk_gated_delta_rule(0.3 * q, k, *others, scale=1.0, implementation="reference")[0]

    assert_close(with_gradients(in_kernel, q, k, v, g, beta), with_gradients(before, q, k, v, g, beta))
    default = jax_qla.chunk_gated_delta_rule(q, k / 3, v, g, beta)[0]
    assert_close(default, jax_qla.chunk_gated_delta_rule(q, k / 3, v, g, beta, scale=KEY_DIM**-0.5)[0], 0)


def of_any_length(x: np.ndarray, zero: int) -> np.ndarray:
    """With rows of lengths from 0.01 to 30, and some of zero."""
    lengths = np.exp(np.random.default_rng(zero).uniform(np.log(0.01), np.log(30), (*x.shape[:3], 1)))
    lengths[:, zero::20] = 0
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True) * lengths, x.dtype)


def normalized(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def l2norm_options(layout: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """float32 operands of `chunk_gated_delta_rule`, without states, and its options."""
    every: dict[str, dict[str, Any]] = {
        "dense": {"output_final_state": True},
        "cu_seqlens": {"cu_seqlens": jnp.array([0, 65, 65, 80], jnp.int32), "output_final_state": True},
        "segment_ids": {"segment_ids": IDS, "max_segments": 2, "output_final_state": True},
        "resets": {"segment_ids": IDS},
    }
    q, k, *others = tokens(1 if layout == "cu_seqlens" else 2, 80)
    return (of_any_length(q, 3), of_any_length(k, 4), *others), every[layout]


@every_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [rarely("dense"), "cu_seqlens", rarely("segment_ids"), "resets"])
def test_l2norm_is_normalising_before(layout: str, dtype: str) -> None:
    """With "xla", values and the gradients with respect to q and k as given."""
    operands, options = l2norm_options(layout)
    operands = (*(x.astype(dtype) for x in operands[:3]), *operands[3:])

    def before(q: jax.Array, k: jax.Array, *others: jax.Array) -> Any:
        return jax_qla.chunk_gated_delta_rule(normalized(q), normalized(k), *others, **options)

    within = partial(jax_qla.chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True, **options)
    # XLA may leave out a rounding to bfloat16 between two operations; told not to, it finds the same bits.
    tolerance = TOLERANCE if dtype == "float32" else 5e-3
    assert_close(with_gradients(within, *operands), with_gradients(before, *operands), tolerance)


@pytest.mark.parametrize("layout", [rarely("dense"), "cu_seqlens", "segment_ids"])
def test_l2norm_of_all_implementations(layout: str) -> None:
    operands, options = l2norm_options(layout)
    options["use_qk_l2norm_in_kernel"] = True
    expected = with_gradients(jax_qla.chunk_gated_delta_rule, *operands, implementation="reference", **options)
    assert_close(with_gradients(jax_qla.chunk_gated_delta_rule, *operands, **options), expected)
    if layout != "segment_ids":
        recurrent = with_gradients(jax_qla.recurrent_gated_delta_rule, *operands, **options)
        assert_close(recurrent, expected)


@pytest.mark.parametrize("length", [1e-20, 1.0, 1e16])
def test_gradient_of_l2norm_for_keys_of_any_length(length: float) -> None:
    """It has no part along the key, which is no small part of it, until squares leave float32."""
    key, gradient = np.random.default_rng(3).standard_normal((2, 5, 64))
    key *= length
    inverse = 1 / np.sqrt(np.sum(key**2, axis=-1, keepdims=True) + 1e-6)
    unit = key * inverse
    right = inverse * (gradient - unit * np.sum(unit * gradient, axis=-1, keepdims=True))
    found = jax.jit(normalize_gradient)(key.astype(np.float32), gradient.astype(np.float32))
    assert np.linalg.norm(found / inverse - right / inverse) < 1e-6 * np.linalg.norm(right / inverse)


def test_l2norm_under_vmap() -> None:
    operands, _ = l2norm_options("dense")

    def gradients(*x: jax.Array) -> Any:
        function = partial(jax_qla.chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True, output_final_state=True)
        return with_gradients(function, *x)

    members = [x[:, None] for x in operands]
    one_by_one = [gradients(*(x[i] for x in members)) for i in range(2)]
    # k is the same for both members, and no batch axis of theirs.
    shared = [members[0], members[1][0], *members[2:]]
    one_by_one[1] = gradients(*(x if i == 1 else x[1] for i, x in enumerate(shared)))
    assert_close(
        jax.vmap(gradients, in_axes=(0, None, 0, 0, 0))(*shared), jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    )


def test_l2norm_keeps_q_and_k_as_given() -> None:
    """Between forward and backward no normalised copies live."""
    operands, _ = l2norm_options("dense")

    def saved(*x: Any) -> Any:
        return jax.vjp(lambda *x: jax_qla.chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True)[0], *x)[1]

    kept = jax.tree.leaves(jax.jit(saved)(*operands))
    of_their_shape = [x for x in kept if x.shape == operands[0].shape]
    assert len(of_their_shape) == 2
    for x, given in zip(of_their_shape, operands, strict=False):
        assert_close(x, given, 0)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("batch", "length", "sequences"), [(2, 0, None), (0, 5, None), (1, 5, 0), (1, 0, 2)], ids=str)
def test_nothing(implementation: str, batch: int, length: int, sequences: int | None) -> None:
    """No tokens, no rows or no sequences: o is zero and every state stays what it was."""
    cu_seqlens = None if sequences is None else jnp.zeros((sequences + 1,), jnp.int32)
    initial = states(batch if sequences is None else sequences)

    def function(*x: jax.Array) -> Any:
        return jax_qla.chunk_gated_delta_rule(
            *x[:5],
            initial_state=x[5],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            implementation=implementation,
        )

    operands = (*tokens(batch, length), initial)
    (o, final), vjp = jax.vjp(function, *operands)
    assert_close(o, jnp.zeros((batch, length, VALUE_HEADS, VALUE_DIM)), 0)
    assert_close(final, initial, 0)
    *gradients, d_initial = vjp((o, 2 * final))
    assert_close(gradients, [jnp.zeros_like(x) for x in operands[:5]], 0)
    assert_close(d_initial, 2 * initial, 0)
    zero = jax_qla.chunk_gated_delta_rule(
        *operands[:5], output_final_state=True, cu_seqlens=cu_seqlens, implementation=implementation
    )[1]
    assert_close(zero, jnp.zeros_like(initial), 0)


def test_numpy_operands() -> None:
    operands = tokens(1, 5)
    expected = jax_qla.chunk_gated_delta_rule(*map(jnp.asarray, operands))
    assert_close(jax_qla.chunk_gated_delta_rule(*operands), expected, 0)


def test_both_halves() -> None:
    """They are what the derivative of the whole is made of."""
    operands = (*tokens(1, 70), states(2))
    packed = {"cu_seqlens": jnp.array([0, 20, 70], jnp.int32), "scale": 0.5}

    @jax.jit
    def whole(*x: jax.Array) -> Any:
        results, vjp = jax.vjp(
            lambda *x: jax_qla.chunk_gated_delta_rule(*x[:5], initial_state=x[5], output_final_state=True, **packed), *x
        )
        return results, vjp(results)

    @jax.jit
    def halves(*x: jax.Array) -> Any:
        state = {"initial_state": x[5]}
        *results, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x[:5], **state, output_final_state=True, **packed)
        return tuple(results), jax_qla.chunk_gated_delta_rule_bwd(*x[:5], residuals, *results, **state, **packed)

    assert_close(halves(*operands), whole(*operands), 0)


PACKED: dict[str, Any] = {"cu_seqlens": jnp.array([0, 20, 70], jnp.int32)}


@pytest.mark.parametrize("packed", [False, rarely(True)], ids=["dense", "packed"])
def test_halves_in_pieces(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one card the residuals have a fourth part, which may be left out, as the third may."""
    monkeypatch.setenv(policy.OVERRIDE, "64")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x, options = tokens(1, 200), PACKED if packed else {}
    with stand_in.kernels():
        o, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, **options)
        assert residuals is not None
        a, gamma, vd, between = residuals
        assert [len(x) for x in between] == [3 + packed] * 3  # cuts, or places for them
        whole = jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o, **options)
        for fewer in ([a, gamma], (a, gamma, vd), (a, gamma, None, between)):
            assert_close(whole, jax_qla.chunk_gated_delta_rule_bwd(*x, fewer, o, **options), 0)
        o, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*(y[:, :64] for y in x))
        assert residuals is not None
        assert len(residuals) == 3  # nothing is cut


def test_residuals_of_other_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.OVERRIDE, "64")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x = tokens(1, 200)
    with stand_in.kernels():
        _, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, **PACKED)
        assert residuals is not None
        a, gamma, vd, between = residuals
        for wrong, error, sentence in (
            ((a, gamma, vd, 1), TypeError, r"residuals\[3\] must be what .* or be left out, got int"),
            ((a, gamma, None, (*between[:2], between[2][:2])), ValueError, r"residuals\[3\]\[2\] must have shape"),
            ((a, gamma, vd, [x[:3] for x in between]), ValueError, "the residuals are of 5 pieces"),
        ):
            with pytest.raises(error, match=sentence):
                jax_qla.chunk_gated_delta_rule_bwd(*x, wrong, jnp.zeros_like(x[2]), **PACKED)


@pytest.mark.parametrize("rows", [rarely("0"), "64"], ids=["whole", "in pieces"])
@pytest.mark.parametrize("packed", [rarely(False), True], ids=["dense", "packed"])
def test_halves_that_save_chunk_states(packed: bool, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are the fifth part of the residuals, Vd is the third, and they may be left out."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x, options = tokens(1, 200), PACKED if packed else {}
    parts = (-(-200 // 64) + 2 if packed else 4) if rows == "64" else 1 + packed
    with stand_in.kernels():
        for save in (False, None):
            _, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, **options, save_chunk_states=save)
            present = [True, True, save is None, True] if rows == "64" else [True] * (2 + (save is None))
            assert [y is not None for y in residuals or ()] == present
        o, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, **options, save_chunk_states=True)
        assert residuals is not None
        a, gamma, vd, between, h = residuals
        assert (between is None) == (rows == "0")
        assert h.shape == (200 // 64 + parts, x[2].shape[2], 1, x[2].shape[3], x[0].shape[3])
        assert (vd.shape, vd.dtype) == (x[2].shape, x[2].dtype)
        saved = jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o, **options)
        for fewer in ([a, gamma], (a, gamma, vd), residuals[:4], (a, gamma, None, between, None)):
            assert_close(saved, jax_qla.chunk_gated_delta_rule_bwd(*x, fewer, o, **options), 0)
        for wrong, error, sentence in (
            ((vd, 1), TypeError, r"residuals\[4\] must be an array, got int"),
            ((1, h), TypeError, r"residuals\[2\] must be an array, got int"),
            ((vd[:, :5], h), ValueError, r"residuals\[2\] must have shape .*, \[B, T, Hv, \d+\]"),
            ((vd, h[:, :1]), ValueError, r"residuals\[4\] must have shape"),
            ((vd, h[1:]), ValueError, r"residuals\[4\] must have shape .* residuals\[3\] where that was"),
            ((None, h), ValueError, r"residuals\[2\] is None but residuals\[4\] is not"),
        ):
            given = (a, gamma, wrong[0], between, wrong[1])
            with pytest.raises(error, match=sentence):
                jax_qla.chunk_gated_delta_rule_bwd(*x, given, o, **options)
        with pytest.raises(TypeError, match="residuals must be what chunk_gated_delta_rule_fwd returned, got tuple"):
            jax_qla.chunk_gated_delta_rule_bwd(*x, (*residuals, None), o, **options)
    for save in (None, True):
        _, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, **options, save_chunk_states=save)
        assert residuals is None  # "xla" saves nothing


def test_halves_in_pieces_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    # What "xla" does in place of the kernels, of which it stands in for the residuals.
    monkeypatch.setattr(api, "choose", lambda *_, piece_rows, **__: Choice("cuda", "xla", "", "", piece_rows))
    x = tokens(1, 200)
    with stand_in.kernels():
        for piece_rows, parts in ((64, 4), (128, 2)):
            o, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, piece_rows=piece_rows)
            assert residuals is not None
            assert [len(y) for y in residuals[3]] == [parts - 1] * 3
            found = jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o, piece_rows=piece_rows)
            assert_close(found, jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o), 0)
            for other in (0, 192 - piece_rows):
                with pytest.raises(ValueError, match=f"are of {parts} pieces, .* not those of piece_rows={other}"):
                    jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o, piece_rows=other)
        assert len(jax_qla.chunk_gated_delta_rule_fwd(*x, piece_rows=0)[2] or ()) == 3


def test_recurrent_continues() -> None:
    """Prefill by chunks, then token by token, gives what one pass gives."""
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    chunks = jax.jit(partial(jax_qla.chunk_gated_delta_rule, **options))
    token = jax.jit(partial(jax_qla.recurrent_gated_delta_rule, **options))
    operands = tokens(2, 70)
    o, state = chunks(*(x[:, :67] for x in operands))
    outputs = [o]
    for t in range(67, 70):
        o, state = token(*(x[:, t : t + 1] for x in operands), initial_state=state)
        outputs.append(o)
    assert_close((jnp.concatenate(outputs, axis=1), state), chunks(*operands))
    assert jax.eval_shape(jax_qla.recurrent_gated_delta_rule, *operands)[1] is None


def test_recurrent_packed_and_differentiated() -> None:
    packed = {"cu_seqlens": jnp.array([0, 2, 5], jnp.int32), "output_final_state": True}
    operands = tokens(1, 5)
    recurrent = with_gradients(partial(jax_qla.recurrent_gated_delta_rule, **packed), *operands)
    assert_close(recurrent, with_gradients(partial(jax_qla.chunk_gated_delta_rule, **packed), *operands))


def test_halves_of_another_precision() -> None:
    """The inverse has two parts in high precision; residuals of one precision are refused in the other."""
    q, k, v, g, beta = tokens(1, 5)
    x = (*(y.astype(jnp.bfloat16) for y in (q, k, v)), g, beta)
    with stand_in.kernels(), on_hopper():
        for made, columns, asked in (("high", 128, None), (None, 64, "high")):
            o, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, precision=made)
            assert residuals is not None
            assert residuals[0].shape == (4, 1, 5, columns)
            jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o, precision=made)
            sentence = rf"residuals\[0\] must have shape \(4, 1, 5, {192 - columns}\)"
            with pytest.raises(ValueError, match=sentence):
                jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o, precision=asked)


def test_precision() -> None:
    """It reaches the matrix products of "xla"."""
    operands = tokens(1, 5)

    def exact_products(precision: str | None) -> int:
        function = partial(jax_qla.chunk_gated_delta_rule, precision=precision)
        return str(jax.make_jaxpr(function)(*operands)).count("Precision.HIGHEST")

    assert exact_products("default") < exact_products(None)


@pytest.mark.parametrize("implementation", ["reference", ("cuda", "reference")])
def test_the_reference_is_exact_whatever_is_asked(implementation: Any) -> None:
    operands = [x.astype(jnp.bfloat16) for x in tokens(1, 5)]
    function = partial(jax_qla.chunk_gated_delta_rule, *operands, implementation=implementation)
    expected, _ = function()
    for precision in ("default", "high", "highest"):
        found, _ = function(precision=precision)
        np.testing.assert_array_equal(found, expected)


def test_reference_in_float64() -> None:
    with jax.enable_x64(True):
        operands = tuple(x.astype(jnp.float64) for x in tokens(1, 5))
        o, final = jax_qla.chunk_gated_delta_rule(*operands, output_final_state=True, implementation="reference")
    assert final is not None
    assert (o.dtype, final.dtype) == (jnp.float64, jnp.float64)


# The choice


def on_hopper(capability: str = "9.0") -> Any:
    """JAX believes that this process has a CUDA device (of compute capability `capability`)."""
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA Test", compute_capability=capability)
    return mock.patch.multiple(jax, local_devices=lambda **_: [device], default_backend=lambda: "gpu")


SHAPES = tuple(jax.ShapeDtypeStruct((1, 5, *shape), jnp.float32) for shape in ((2, 16), (2, 16), (4, 8), (4,), (4,)))


def test_choice_on_cpu() -> None:
    with stand_in.kernels():
        for operands in (SHAPES, tuple(map(jnp.asarray, tokens(1, 5)))):
            name, reason = jax_qla.which_implementation(*operands)
            assert name == "xla"
            assert reason == "'cuda' was passed over: the kernels of 'cuda' run on NVIDIA Hopper GPUs only"
        asked = {"implementation": "xla", "save_chunk_states": True, "mesh_axes": None}
        assert jax_qla.which_implementation(*SHAPES, **asked) == ("xla", "it was asked for")
        assert jax_qla.which_implementation(*SHAPES, implementation=["reference", "xla"]).name == "reference"
        assert jax_qla.which_implementation(*SHAPES, implementation=("cuda", "reference")).name == "reference"
        with pytest.raises(NotImplementedError, match="'cuda' was asked for, but the program is not lowered for CUDA"):
            jax_qla.which_implementation(*SHAPES, implementation="cuda")
        wide = [x.update(dtype=np.float64) for x in SHAPES]
        with pytest.raises(NotImplementedError, match=r"; 'xla' was passed over: .* q is float64; implementation="):
            jax_qla.which_implementation(*wide)


def test_choice_on_hopper() -> None:
    with stand_in.kernels(), on_hopper():
        assert jax_qla.which_implementation(*SHAPES) == ("cuda", "its kernels can take these inputs")
        assert jax_qla.which_implementation(*SHAPES, implementation="cuda") == ("cuda", "it was asked for")
        assert jax_qla.which_implementation(*SHAPES, implementation=("xla", "cuda")).name == "xla"
        for known in (None, "default", "high", jax.lax.Precision.HIGH):
            assert jax_qla.which_implementation(*SHAPES, precision=known).name == "cuda"
        unknown: tuple[Any, ...] = ("highest", ("high", "high"))
        for precision in unknown:
            name, reason = jax_qla.which_implementation(*SHAPES, precision=precision)
            assert name == "xla"
            assert reason == (
                "'cuda' was passed over: the precision of the kernels of 'cuda' is None, 'default' or 'high', "
                f"got precision={precision!r}"
            )
        # An array says by its device where it will be computed.
        assert jax_qla.which_implementation(*map(jnp.asarray, tokens(1, 5))).name == "xla"


def test_pieces_are_of_the_kernels_only() -> None:
    with stand_in.kernels():
        with pytest.raises(
            NotImplementedError, match=r"piece_rows=64 was asked for, but .*; leave it out to take 'xla'"
        ):
            jax_qla.which_implementation(*SHAPES, piece_rows=64)
        with on_hopper():
            assert jax_qla.which_implementation(*SHAPES, piece_rows=0).name == "cuda"
            assert jax_qla.which_implementation(*SHAPES, piece_rows=64, implementation=("xla", "cuda")).name == "cuda"


def test_which_pieces() -> None:
    def shapes(batch: int, tokens: int, heads: int = 8, key_heads: int = 2) -> list[jax.ShapeDtypeStruct]:
        rows = [(key_heads, 128), (key_heads, 128), (heads, 128), (heads,), (heads,)]
        dtypes = [jnp.bfloat16] * 3 + [jnp.float32] * 2
        return [jax.ShapeDtypeStruct((batch, tokens, *row), dtype) for row, dtype in zip(rows, dtypes, strict=True)]

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    one = shapes(1, 32768)
    assert jax_qla.which_pieces(*one) == (2048, 16)
    assert jax_qla.which_pieces(*one, piece_rows=0) == (0, 1)
    assert jax_qla.which_pieces(*one, piece_rows=np.uint8(64)) == (64, 512)
    assert jax_qla.which_pieces(*shapes(4, 8192, 64)) == (0, 4)
    assert jax_qla.which_pieces(*shapes(1, 32768, 64, 16)) == (0, 1)
    assert jax_qla.which_pieces(*shapes(1, 32768, 64, 16), differentiated=True) == (16384, 2)
    assert jax_qla.which_pieces(*one, differentiated=True) == (2048, 16)
    assert jax_qla.which_pieces(*shapes(3, 640), piece_rows=512) == (320, 6)  # as equal as two can be
    assert jax_qla.which_pieces(*one, piece_rows=1024, cu_seqlens=integers(6)) == (1024, 32 + 5)
    assert jax_qla.which_pieces(*one, piece_rows=1024, cu_seqlens=integers(1)) == (0, 0)
    packed = {"segment_ids": integers(2, 4096), "max_segments": 3}
    assert jax_qla.which_pieces(*shapes(2, 4096), piece_rows=1024, **packed) == (1024, 8 + 6)
    assert jax_qla.which_pieces(*shapes(2, 4096), piece_rows=0, **packed) == (0, 6)
    # Without states segments are gates of a dense batch.
    assert jax_qla.which_pieces(*shapes(2, 4096), piece_rows=1024, segment_ids=packed["segment_ids"]) == (1024, 8)
    with pytest.raises(ValueError, match="piece_rows must be a multiple of 64"):
        jax_qla.which_pieces(*one, piece_rows=1)
    # What no kernel takes has no pieces.
    rows, gates = jax.ShapeDtypeStruct((3, 8192, 8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((3, 8192, 8), jnp.float32)
    assert jax_qla.which_pieces(rows, rows, rows, gates, gates) == (0, 3)
    assert jax_qla.which_pieces(*(x.update(dtype=jnp.float32) for x in one)) == (0, 1)
    assert jax_qla.which_pieces(*one, precision="highest") == (0, 1)


@pytest.mark.parametrize("precision", [None, "high"])
@pytest.mark.parametrize("save", [None, True, False])
@pytest.mark.parametrize(("batch", "tokens", "heads"), [(1, 8192, 48), (1, 32768, 64), (1, 8192, 8), (4, 8192, 8)])
def test_which_pieces_are_those_of_a_call(
    batch: int, tokens: int, heads: int, save: bool | None, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the forward pass, differentiated or not, in either precision and with whatever is kept."""
    sequences: list[int] = []

    def recording(steps: Any, inputs: Any, *others: Any) -> dict[str, jax.Array]:
        sequences.append(inputs["segments"].shape[0])
        return stand_in.launch_zeros(steps, inputs, *others)

    monkeypatch.setattr("jax_qla.launch.launch", recording)
    monkeypatch.setattr("jax_qla.cuda.support.why_no_kernels", lambda *_, **__: None)
    rows = [(8, 128), (8, 128), (heads, 128), (heads,), (heads,)]
    dtypes = [jnp.bfloat16] * 3 + [jnp.float32] * 2
    operands = [jax.ShapeDtypeStruct((batch, tokens, *row), dtype) for row, dtype in zip(rows, dtypes, strict=True)]
    options: Any = {"precision": precision, "save_chunk_states": save}

    def o(*operands: Any) -> Any:
        return jax_qla.chunk_gated_delta_rule(*operands, implementation="cuda", **options)[0]

    def transposed(*operands: Any) -> Any:
        results, transpose = jax.vjp(o, *operands)
        return transpose(results)

    # Where the compiler may cut the operands nothing is kept of the pieces.
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        for differentiated, function in ((False, o), (True, transposed)):
            stand_in.forget_traces()
            sequences.clear()
            jax.eval_shape(function, *operands)
            pieces = jax_qla.which_pieces(*operands, differentiated=differentiated, **options).pieces
            assert sequences[0] == pieces, differentiated
    stand_in.forget_traces()


def test_choice_where_the_kernels_do_not_fit() -> None:
    objection = "K must be 64 or 128, got 16"
    with stand_in.kernels(objection), on_hopper():
        assert jax_qla.which_implementation(*SHAPES) == ("xla", f"'cuda' was passed over: {objection}")
        with pytest.raises(NotImplementedError, match=f"implementation='cuda' cannot take these inputs: {objection}"):
            jax_qla.which_implementation(*SHAPES, implementation="cuda")


def test_choice_on_another_card() -> None:
    with stand_in.kernels(), on_hopper("8.0"):
        name, reason = jax_qla.which_implementation(*SHAPES)
        assert name == "xla"
        assert "NVIDIA Test (compute capability 8.0)" in reason
        # By name alone it is obeyed: the program may be meant for another machine, and the extension refuses the card.
        assert jax_qla.which_implementation(*SHAPES, implementation="cuda").name == "cuda"


def test_choice_without_the_extension() -> None:
    with mock.patch.dict("sys.modules", {"jax_qla.cuda.rule": None}), on_hopper():
        name, reason = jax_qla.which_implementation(*SHAPES)
        assert name == "xla"
        assert "its modules cannot be imported" in reason


def lowered(platforms: Sequence[str], gradient: bool = False, **options: Any) -> str:
    """The module of a program on SHAPES that is exported for the platforms."""

    def function(*x: jax.Array) -> Any:
        return jax_qla.chunk_gated_delta_rule(*x, **options)[0]

    program = jax.grad(lambda *x: jnp.sum(function(*x))) if gradient else function
    allowed = [jax.export.DisabledSafetyCheck.custom_call(stand_in.TARGET)]
    return jax.export.export(jax.jit(program), platforms=platforms, disabled_checks=allowed)(*SHAPES).mlir_module()


@pytest.mark.parametrize("gradient", [False, True])
def test_lowering_by_platform(gradient: bool) -> None:
    with stand_in.kernels():
        assert stand_in.TARGET in lowered(["cuda"], gradient)
        assert stand_in.TARGET not in lowered(["cpu"], gradient)
        assert stand_in.TARGET in lowered(["cpu", "cuda"], gradient)
        assert stand_in.TARGET in lowered(["cuda"], gradient, implementation="cuda")
        assert stand_in.TARGET not in lowered(["cuda"], gradient, implementation="xla")
        assert stand_in.TARGET in lowered(["cuda"], gradient, implementation=("cuda", "reference"))
        for platforms in (["cpu"], ["tpu"], ["cpu", "cuda"]):
            with pytest.raises(NotImplementedError, match="'cuda' was asked for, but the program is not lowered for"):
                lowered(platforms, gradient, implementation="cuda")
        with pytest.raises(NotImplementedError, match="'cuda' was asked for, but the program is not lowered for CUDA"):
            jax_qla.chunk_gated_delta_rule(*tokens(1, 5), implementation="cuda")


def test_sequence_of_names_computes() -> None:
    """Kernels where they run, else the reference, with all that JAX can do to it."""
    operands = tokens(1, 5)
    with stand_in.kernels():
        function = lambda *x: jax_qla.chunk_gated_delta_rule(*x, implementation=("cuda", "reference"))[0]  # noqa: E731
        actual = jax.jit(lambda *x: jax.jvp(function, x, x))(*operands)
    expected = lambda *x: jax_qla.chunk_gated_delta_rule(*x, implementation="reference")[0]  # noqa: E731
    assert_close(actual, jax.jvp(expected, operands, operands))


def test_examples_in_docstrings() -> None:
    failed, tried = doctest.testmod(jax_qla.api)
    assert not failed
    assert tried


@pytest.mark.parametrize("function", ["chunk", "recurrent"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_numpy_arrays_are_taken_as_jax_has_them(function: str, implementation: str) -> None:
    """In 32 bits, where JAX has no others."""
    rule = getattr(jax_qla, f"{function}_gated_delta_rule")
    q, k, v, g, beta = (np.full((1, 6, *shape), -0.1) for shape in ((1, 8), (1, 8), (2, 4), (2,), (2,)))
    options = {"output_final_state": True, "implementation": implementation}
    o, state = rule(q, k, v, g, -beta, cu_seqlens=np.array([0, 2, 6]), initial_state=np.zeros((2, 2, 8, 4)), **options)
    assert o.dtype == state.dtype == jnp.float32
    operands = [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, -beta)]
    expected, _ = rule(*operands, cu_seqlens=jnp.array([0, 2, 6], jnp.int32), **options)
    np.testing.assert_allclose(o, expected, atol=1e-6)


def test_bounds_of_numpy_have_32_bits_where_others_have_64() -> None:
    bounds = np.array([0, 2, 6])
    assert bounds.dtype == np.int64
    with jax.enable_x64(True):
        x = [a.astype(jnp.float64) for a in tokens(1, 6)]
        o, _ = jax_qla.chunk_gated_delta_rule(*x, cu_seqlens=bounds, implementation="reference")
        assert o.dtype == jnp.float64
        y, _ = jax_qla.causal_conv1d(x[0][..., 0], x[0][0, :4, :, 0], cu_seqlens=bounds)
        assert y.dtype == jnp.float64
        with pytest.raises(TypeError, match="cu_seqlens must be int32, got int64"):
            jax_qla.chunk_gated_delta_rule(*x, cu_seqlens=jnp.asarray(bounds), implementation="reference")


@pytest.mark.parametrize("rule", [jax_qla.chunk_gated_delta_rule, jax_qla.recurrent_gated_delta_rule])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("packing", ["cu_seqlens", "segment_ids"])
def test_rows_of_no_sequence_may_hold_anything(rule: Any, implementation: str, packing: str) -> None:
    """Not a number, say: no gradient is of them, also where q and k are normalised."""
    options: dict[str, Any] = {"cu_seqlens": jnp.array([3, 9], jnp.int32)}
    if packing == "segment_ids":
        if rule is jax_qla.recurrent_gated_delta_rule:
            pytest.skip("it has cu_seqlens only")
        options = {"segment_ids": jnp.array([[0] * 3 + [1] * 6 + [0] * 3]), "max_segments": 2}
    x = [jnp.asarray(a).at[:, :3].set(jnp.nan) for a in tokens(1, 12)]

    def loss(*x: jax.Array) -> jax.Array:
        return jnp.sum(rule(*x, use_qk_l2norm_in_kernel=True, implementation=implementation, **options)[0])

    for gradient in jax.grad(loss, range(5))(*x):
        assert np.all(np.isfinite(gradient))
        assert not np.any(gradient[:, :3])
        assert np.any(gradient[:, 3:9])


@pytest.mark.parametrize("rule", [jax_qla.chunk_gated_delta_rule, jax_qla.recurrent_gated_delta_rule])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_nothing_packed_and_normalised(rule: Any, implementation: str) -> None:
    x = tokens(1, 0)
    options = {"use_qk_l2norm_in_kernel": True, "implementation": implementation, "output_final_state": True}
    o, state = rule(*x, cu_seqlens=jnp.array([0, 0, 0], jnp.int32), **options)
    assert o.shape == x[2].shape
    assert state.shape[0] == 2
    assert not state.any()
