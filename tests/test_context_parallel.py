"""Sequences cut over devices: what summarises a shard, how summaries are composed, packed sequences across borders."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_sharding import COLLECTIVE, assert_close
from thorough import THOROUGH, rarely

import jax_qla
from jax_qla import MeshAxes, context_parallel, policy, xla
from jax_qla.mesh import rows_before, shift

DEVICES = 8


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(numbers(seed, *shape))


def tokens(length: int, *, batch: int = 1, heads: tuple[int, int] = (1, 2), k: int = 8, v: int = 4) -> list[jax.Array]:
    """q, k, v, g, beta with unit keys and weak decay, one head without any."""
    key_heads, value_heads = heads
    q, keys = (numbers(i, batch, length, key_heads, k) / np.float32(k**0.5) for i in range(2))
    g = -0.01 * np.exp(numbers(3, batch, length, value_heads))
    g[..., 0] = 0
    beta = 1 / (1 + np.exp(-numbers(4, batch, length, value_heads)))
    return list(map(jnp.asarray, (q, keys, numbers(2, batch, length, value_heads, v), g, beta)))


def over_devices(function: Any, in_specs: Any, out_specs: Any, devices: int = DEVICES, **options: Any) -> Any:
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


SEGMENTS = jnp.array([[0, 70], [70, 70], [75, 130]], jnp.int32)


@pytest.mark.parametrize("packed", [rarely(False), True])
def test_results_are_affine_in_the_state(packed: bool) -> None:
    batch, segments = (1, SEGMENTS) if packed else (2, None)
    x = tokens(130, batch=batch, heads=(2, 6))
    state, other = (normal(seed, 3 if packed else batch, 6, 8, 4) for seed in (5, 6))
    forward = functools.partial(xla.forward, scale=0.3, output_final_state=True, with_residuals=False)
    _, final, _ = jax.jit(forward)(*x, state, segments)
    function = functools.partial(xla.summary, cut=policy.Cut(64, 3), with_residuals=True)
    transition, response, residuals, pieces = jax.jit(function)(*x, other, segments)
    assert_close(transition @ (state - other) + response, final)
    assert (residuals is None) == (pieces is None) == packed
    if not packed:
        assert [r.shape for r in residuals[:2]] == [(6, 2, 130, 64), (2, 130, 6)]
        assert [p.shape for p in pieces] == [(10, 6, 8, 4), (10, 6, 2, 64), (10, 6)]


@pytest.mark.parametrize("packed", [rarely(False), True])
def test_gradient_of_the_state_alone(packed: bool) -> None:
    batch, segments = (1, SEGMENTS) if packed else (2, None)
    x = tokens(130, batch=batch, heads=(2, 6))
    state, d_final = (normal(seed, 3 if packed else batch, 6, 8, 4) for seed in (5, 6))
    do = normal(7, *x[2].shape)
    for cotangents in ((do, d_final), (do, None), (None, d_final)):
        *_, expected = jax.jit(functools.partial(xla.backward, scale=0.3))(*x, state, segments, None, *cotangents)
        function = jax.jit(functools.partial(xla.state_gradient, scale=0.3))
        actual, _ = function(*x, None, segments, None, *cotangents)
        assert_close(actual, expected)


@pytest.mark.parametrize("devices", [1, 2, 3, rarely(4), 5, rarely(6), rarely(7), 8])
@pytest.mark.parametrize("reverse", [False, True])
def test_composition_over_any_number_of_devices(devices: int, reverse: bool) -> None:
    transition, response = numbers(0, devices, 3, 4, 4) / 2, numbers(1, devices, 3, 4, 2)
    function = functools.partial(context_parallel.response_before, axes=("seq",), reverse=reverse)
    compiled = over_devices(function, P("seq"), P("seq"), devices).lower(transition, response).compile()
    actual, _ = map(np.asarray, compiled(transition, response))
    state = np.zeros(response.shape[1:], np.float32)
    for i in reversed(range(devices)) if reverse else range(devices):
        assert np.allclose(actual[i], state, atol=1e-5)
        state = transition[i] @ state + response[i]
    # Every round sends what twice as many shards do as the one before; the last needs no transition.
    sent = [shape for shape, _ in COLLECTIVE.findall(compiled.as_text()) if "4,2]" in shape or "4,6]" in shape]
    rounds = int(np.ceil(np.log2(devices)))
    assert ["4,2]" in shape for shape in sent] == [False] * (rounds - 1) + [True] * (rounds > 0)


@pytest.mark.parametrize("order", [*itertools.permutations("xyz"), ("z", "x")], ids="".join)
def test_shards_follow_each_other_in_the_order_of_the_axes(order: tuple[str, ...]) -> None:
    """The first the slowest, however the mesh has them."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    devices = 2 ** len(order)
    for reverse, distance in ((False, 1), (True, 1), (False, 3), (True, 2), (False, devices)):
        function = functools.partial(shift, distance=distance, axes=order, reverse=reverse)
        shifted = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(order), out_specs=P(order)))
        x = np.arange(1.0, devices + 1)
        zeros = np.zeros(distance)
        expected = [*x[distance:], *zeros] if reverse else [*zeros, *x]
        assert np.array_equal(shifted(x), expected[:devices])


def test_rows_before_reach_over_several_devices() -> None:
    x = jnp.arange(2 * 16.0).reshape(2, 16)
    for rows in (1, 2, 5, 16, 20):
        function = functools.partial(rows_before, rows=rows, axes=("seq",))
        actual = over_devices(function, P(None, "seq"), P(None, "seq"))(x)
        padded = jnp.pad(x, ((0, 0), (rows, 0)))
        expected = jnp.concatenate([padded[:, 2 * i : 2 * i + rows] for i in range(DEVICES)], axis=1)
        assert np.array_equal(actual, expected)


def call(*x: Any, axes: MeshAxes | None = None, **options: Any) -> tuple[jax.Array, jax.Array]:
    o, final_state = jax_qla.chunk_gated_delta_rule(
        *x[:5], initial_state=x[5], output_final_state=True, mesh_axes=axes, **options
    )
    assert final_state is not None
    return o, final_state


CUT = MeshAxes(sequence="seq")
SPECS = (*(P(None, "seq"),) * 5, P())


def test_shards_do_not_start_from_zero() -> None:
    """The trap: each shard computed for itself looks right, and is so on the first shard only."""
    x = (*tokens(DEVICES * 70, heads=(1, 2)), normal(5, 1, 2, 8, 4))  # more than a chunk on every device
    o, final_state = jax.jit(call)(*x)
    out_specs = (P(None, "seq"), P())
    assert_close(over_devices(functools.partial(call, axes=CUT), SPECS, out_specs)(*x), (o, final_state))
    wrong, _ = over_devices(call, SPECS, out_specs, check_vma=False)(*x)
    assert_close(wrong[:, :70], o[:, :70])
    for start in range(70, 70 * DEVICES, 70):
        part = slice(start, start + 70)
        assert np.linalg.norm(wrong[:, part] - o[:, part]) > 0.1 * np.linalg.norm(o[:, part])


def random_lengths(random: np.random.Generator, total: int, sequences: int) -> np.ndarray:
    """cu_seqlens: some sequences empty, some one token long, some over many shards, padding before and after."""
    points = np.sort(random.integers(0, total + 1, sequences + 1))
    kind = random.integers(0, 4)
    if kind == 0:
        points[: sequences // 2] = points[sequences // 2]
    elif kind == 1:
        points = np.minimum(points // (total // DEVICES) * (total // DEVICES), total)
    elif kind == 2:
        points[1:] = total
        points[0] = random.integers(0, 3)
    return points.astype(np.int32)


CASES = 40 if THOROUGH else 12
"""Of random lengths; each kind of `random_lengths` is among them."""


def test_packed_sequences_cross_borders_in_every_way() -> None:
    length, sequences = DEVICES * 5, 6
    x = (*tokens(length), normal(5, sequences, 2, 8, 4))
    weight, state_weight = normal(6, *x[2].shape), normal(7, *x[5].shape)

    def loss(function: Any, cu_seqlens: jax.Array, *x: jax.Array) -> Any:
        o, final_state = function(*x, cu_seqlens)
        return jnp.sum(jnp.sin(o) * weight) + jnp.sum(final_state**2 * state_weight), (o, final_state)

    def differentiated(function: Any) -> Any:
        return jax.jit(jax.value_and_grad(functools.partial(loss, function), argnums=tuple(range(1, 7)), has_aux=True))

    def local(*x: Any) -> Any:
        return call(*x[:6], axes=CUT, cu_seqlens=x[6])

    cut = differentiated(over_devices(local, (*SPECS, P()), (P(None, "seq"), P())))
    whole = differentiated(lambda *x: call(*x[:6], cu_seqlens=x[6]))
    random = np.random.default_rng(0)
    cases = [np.zeros(sequences + 1, np.int32), *(random_lengths(random, length, sequences) for _ in range(CASES))]
    cases.append(np.array([7, 3, 50, 20, 60, -4, 39], np.int32))  # lies: neither sorted nor within
    for cu_seqlens in cases:
        (value, (o, final_state)), gradients = cut(cu_seqlens, *x)
        (expected_value, expected), expected_gradients = whole(cu_seqlens, *x)
        assert_close((o, final_state), expected)
        np.testing.assert_allclose(value, expected_value, rtol=1e-4)
        for actual, wanted in zip(gradients, expected_gradients, strict=True):
            assert np.linalg.norm(actual - wanted) <= 1e-5 * np.linalg.norm(wanted) + 1e-6, cu_seqlens


def test_empty_sequences_keep_their_state_bit_for_bit() -> None:
    x = (*tokens(DEVICES), normal(5, 4, 2, 8, 4))
    cu_seqlens = jnp.array([0, 0, 3, 3, 8], jnp.int32)
    function = over_devices(lambda *x: call(*x[:6], axes=CUT, cu_seqlens=x[6]), (*SPECS, P()), (P(None, "seq"), P()))
    _, final_state = function(*x, cu_seqlens)
    for n in (0, 2):
        assert np.asarray(final_state[n]).tobytes() == np.asarray(x[5][n]).tobytes()


def test_what_is_not_a_number_stays_in_its_sequence() -> None:
    """Both cross borders, and beside the border between them each covers whole shards."""
    length = DEVICES * 2
    x = (*tokens(length), normal(5, 2, 2, 8, 4))
    cu_seqlens = jnp.array([0, 9, length], jnp.int32)
    function = over_devices(lambda *x: call(*x[:6], axes=CUT, cu_seqlens=x[6]), (*SPECS, P()), (P(None, "seq"), P()))

    @jax.jit
    def with_gradients(*x: jax.Array) -> Any:
        results, transpose = jax.vjp(lambda *x: function(*x, cu_seqlens), *x)
        return *results, *transpose(results)

    expected = with_gradients(*x)
    rows = (slice(0, 9), slice(9, length))
    for sequence, other in ((0, 1), (1, 0)):
        for poisoned in range(5):
            of_nan = (y.at[:, rows[sequence]].set(jnp.nan) if i == poisoned else y for i, y in enumerate(x))
            found = with_gradients(*of_nan)
            for a, b in zip(found, expected, strict=True):
                kept = other if a.shape == x[5].shape else (slice(None), rows[other])
                np.testing.assert_array_equal(a[kept], b[kept])


def test_documents_by_segment_ids_without_states() -> None:
    """Equal ids on both sides of a border are one document, and so are not where a border of documents lies there."""
    ids = jnp.array([[0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 0, 0, 3, 3]], jnp.int32)
    x = tokens(16)

    def apply(ids: jax.Array, *x: jax.Array, axes: MeshAxes | None = None) -> jax.Array:
        return jax_qla.chunk_gated_delta_rule(*x, segment_ids=ids, mesh_axes=axes)[0]

    cut = over_devices(functools.partial(apply, axes=CUT), (P(None, "seq"),) * 6, P(None, "seq"))

    def both(function: Any) -> Any:
        return jax.jit(
            lambda ids, *x: (
                function(ids, *x),
                jax.grad(lambda x: jnp.sum(jnp.sin(function(ids, *x))))(x),
            )
        )

    assert_close(both(cut)(ids, *x), both(apply)(ids, *x))
