"""The short convolution: what its definition says, packed, continued, and cut over devices."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_sharding import FAST, MODES, Cut, assert_close, assert_nothing_gathered, collectives, mesh_of, spread
from thorough import every_value

import jax_qla
from jax_qla import MeshAxes, causal_conv1d

B, T, D, W = 2, 40, 6, 4


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def by_definition(x: Any, weight: Any, bias: Any = None, ids: Any = None) -> np.ndarray:
    """Token by token, in float64; a token sees back to its sequence's first token."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    y = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if ids is not None and ids[b, t] == 0:
                continue
            for distance in range(weight.shape[0]):
                if t < distance or (ids is not None and ids[b, t - distance] != ids[b, t]):
                    break
                y[b, t] += weight[-1 - distance] * x[b, t - distance]
            y[b, t] += 0 if bias is None else np.asarray(bias)
    return y


IDS = np.sort(np.random.default_rng(0).integers(0, 9, (B, T)), axis=1).astype(np.int32)
IDS[1, 20:] = np.array([1, 2, 1, 1, 0, 1, 1, 2, 2, 2] * 2)  # the same id again, within the filter's reach


@pytest.mark.parametrize("width", [1, 2, 4, 50])
def test_definition(width: int) -> None:
    x, weight, bias = normal(0, B, T, D), normal(1, width, D), normal(2, D)
    np.testing.assert_allclose(causal_conv1d(x, weight)[0], by_definition(x, weight), atol=1e-5)
    packed, _ = causal_conv1d(x, weight, bias, segment_ids=jnp.asarray(IDS))
    np.testing.assert_allclose(packed, by_definition(x, weight, bias, IDS), atol=1e-5)
    active, _ = causal_conv1d(x, weight, bias, activation="silu")
    np.testing.assert_allclose(active, jax.nn.silu(by_definition(x, weight, bias)), atol=1e-5)


def test_cu_seqlens_are_segment_ids() -> None:
    x, weight = normal(0, 1, T, D), normal(1, W, D)
    for cu_seqlens in ([0, 3, 3, 30, T], [2, 5, 38, 38, 38], [0], [7, 7]):
        ids = np.zeros((1, T), np.int32)
        for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
            ids[0, start:end] = n + 1
        y, _ = causal_conv1d(x, weight, cu_seqlens=jnp.array(cu_seqlens, jnp.int32))
        np.testing.assert_allclose(y, by_definition(x, weight, None, ids), atol=1e-5)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 30])
def test_continues_from_its_tail(first: int) -> None:
    x, weight = normal(0, B, T, D), normal(1, W, D)
    whole, whole_tail = causal_conv1d(x, weight, output_final_tail=True)
    start, tail = causal_conv1d(x[:, :first], weight, output_final_tail=True)
    end, end_tail = causal_conv1d(x[:, first:], weight, initial_tail=tail, output_final_tail=True)
    np.testing.assert_allclose(jnp.concatenate([start, end], axis=1), whole, atol=1e-6)
    assert np.array_equal(end_tail, whole_tail)


def test_sums_in_float32() -> None:
    x, weight = normal(0, B, T, D).astype(jnp.bfloat16), normal(1, W, D)
    y, _ = causal_conv1d(x, weight)
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(y, by_definition(x, weight).astype(jnp.bfloat16))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients_are_summed_in_float32(activation: Any) -> None:
    """Of one device they are rounded once, and float16 does not overflow on the way."""
    arrays = normal(0, B, 200, D), normal(1, W, D), normal(2, B, W - 1, D), normal(3, B, 200, D)

    def gradients(x: Any, weight: Any, tail: Any, dy: Any) -> Any:
        def convolve(x: Any, tail: Any) -> Any:
            return causal_conv1d(x, weight, initial_tail=tail, activation=activation, implementation="xla")[0]

        return jax.vjp(convolve, x, tail)[1](dy)

    x, weight, tail, dy = (x if n == 1 else x.astype(jnp.float16) for n, x in enumerate(arrays))
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        found = jax.jit(gradients)(x, weight, tail, dy)
        wanted = jax.jit(gradients)(*(x.astype(jnp.float32) for x in (x, weight, tail, dy)))
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == jnp.float16
            assert np.mean(a == b.astype(jnp.float16)) > 0.99  # else two float32 sums lie on either side of a tie
        large = jnp.full_like(dy, 60000)
        filter_ = jnp.array([-2.0, -1.0, 2.0, 1.5])[:, None] * jnp.ones((W, D))
        dx, _ = jax.jit(gradients)(jnp.zeros_like(x), filter_, jnp.zeros_like(tail), large)
        np.testing.assert_allclose(dx[:, : 1 - W], 30000 * (0.5 if activation else 1), rtol=1e-3)


def test_gradients_are_exchanged_in_16_bits_where_the_compiler_cuts() -> None:
    x, weight, dy = (normal(n, *shape) for n, shape in enumerate(((B, T, D), (W, D), (B, T, D))))
    x, dy = x.astype(jnp.float16), dy.astype(jnp.float16)  # XLA for CPUs exchanges bfloat16 as float32

    def both(x: Any, dy: Any) -> Any:
        y, transpose = jax.vjp(lambda x: causal_conv1d(x, weight, activation="silu")[0], x)
        return y, *transpose(dy)

    by_token = NamedSharding(mesh_of("auto"), PartitionSpec(None, ("x", "y")))
    compiled = jax.jit(both).lower(*jax.device_put((x, dy), by_token)).compile()
    exchanged = [(dtype, size) for name, dtype, size in collectives(compiled.as_text()) if name == "collective-permute"]
    assert {dtype for dtype, _ in exchanged} == {"f16"}
    assert sum(size for _, size in exchanged) == 3 * (1 + 2 + 3) * B * D  # x, again backward, and gradients
    for a, b in zip(compiled(x, dy), both(x.astype(jnp.float32), dy.astype(jnp.float32)), strict=True):
        error = np.linalg.norm(np.asarray(a, np.float64) - b)
        assert error < 0.75 * 2**-11 * np.linalg.norm(b)  # two roundings


def test_a_scan_keeps_no_shifted_copies() -> None:
    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (causal_conv1d(x, w, activation="silu")[0], None), x, weights)[0])

    _, residuals = jax.eval_shape(lambda *x: jax.vjp(layers, *x), normal(0, B, T, D), normal(1, 3, W, D))
    assert sum(x.size >= B * T * D for x in jax.tree.leaves(residuals)) == 1  # x


CUT = {
    "auto": Cut(batch="x", sequence="y"),
    "named": Cut(heads="x", sequence="y"),
    "explicit": Cut(batch="x", sequence="y"),
    "manual": Cut(sequence=("x", "y")),
    "manual, unchecked": Cut(heads="x", sequence="y"),
    "partly manual": Cut(batch="x", sequence="y"),
    "partly manual, named": Cut(heads="x", sequence="y"),
}


@every_value
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_cut_over_devices(mode: str, packed: bool) -> None:
    arrays = [normal(0, B, T, D), normal(1, 7, D), normal(2, D), IDS if packed else normal(3, B, 6, D)]
    dims = ("bth", "jh", "h", "bt" if packed else "bjh")
    out_dims = ("bth", "bjh")

    def convolve(axes: MeshAxes | None, x: Any, weight: Any, bias: Any, more: Any) -> Any:
        option = {"segment_ids" if packed else "initial_tail": more}
        return causal_conv1d(x, weight, bias, activation="silu", output_final_tail=True, mesh_axes=axes, **option)

    def loss(function: Any, *x: Any) -> Any:
        y, tail = function(*x[:4])
        return jnp.sum(jnp.sin(y) * x[4]) + jnp.sum(tail**2), (y, tail)

    def gradients(function: Any) -> Any:
        argnums = (0, 1, 2) if packed else (0, 1, 2, 3)
        return jax.jit(
            jax.value_and_grad(functools.partial(loss, function), argnums, has_aux=True), compiler_options=FAST
        )

    weight = normal(4, B, T, D)
    expected = gradients(functools.partial(convolve, None))(*arrays, weight)
    cut = CUT[mode]
    mesh = mesh_of(mode)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, cut.spec(d)))
            for x, d in zip([*arrays, weight], (*dims, "bth"), strict=True)
        ]
        function = spread(mode, cut, convolve, dims, out_dims)
        compiled = gradients(function).lower(*placed).compile()
        actual = compiled(*placed)
    assert_close(actual, expected)
    if mode != "partly manual":
        assert_nothing_gathered(compiled, besides=B * 6 * D)  # tails


def test_fewer_tokens_than_the_filter_reaches_back_where_the_compiler_cuts_them() -> None:
    x, weight, tail = normal(0, B, 2, D), normal(1, W, D), normal(2, B, W - 1, D)

    def both(x: Any, tail: Any) -> Any:
        y, transpose = jax.vjp(lambda x, tail: causal_conv1d(x, weight, initial_tail=tail)[0], x, tail)
        return y, transpose(y)

    cut = jax.device_put(x, NamedSharding(mesh_of("auto"), PartitionSpec(None, "x")))
    assert_close(jax.jit(both)(cut, tail), both(x, tail))


def test_vmap_and_forward_mode() -> None:
    x, weight = normal(0, 3, B, T, D), normal(1, W, D)
    mapped = jax.vmap(lambda x: causal_conv1d(x, weight)[0])(x)
    np.testing.assert_allclose(mapped[1], causal_conv1d(x[1], weight)[0], atol=1e-6)
    _, tangent = jax.jvp(lambda x: causal_conv1d(x, weight)[0], (x[0],), (x[1],))
    np.testing.assert_allclose(tangent, mapped[1], atol=1e-5)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_padding_need_not_be_finite(activation: Any) -> None:
    """Neither for y nor for any gradient."""
    x, weight, bias = normal(0, 1, 8, D), normal(1, W, D), normal(2, D)
    ids = jnp.asarray([[1, 1, 1, 0, 2, 2, 0, 0]], jnp.int32)
    cu_seqlens = jnp.asarray([0, 3, 6], jnp.int32)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def gradients(x: Any, weight: Any, bias: Any, **packing: Any) -> Any:
        y, _ = causal_conv1d(x, weight, bias, activation=activation, **packing)
        return jnp.sum(jnp.sin(y)), y

    for packing, padding in (({"segment_ids": ids}, (3, 6, 7)), ({"cu_seqlens": cu_seqlens}, (6, 7))):
        expected = gradients(x, weight, bias, **packing)
        found = gradients(x.at[:, padding].set(jnp.nan).at[:, padding[0]].set(jnp.inf), weight, bias, **packing)
        assert_close(found, expected)


X, WEIGHT = np.ones((2, 8, 3), np.float32), np.ones((4, 3), np.float32)
FOREIGN = SimpleNamespace(shape=X.shape, dtype="torch.float32")


@pytest.mark.parametrize(
    ("error", "match", "arguments", "options"),
    [
        (TypeError, "x must be an array", ([1.0], WEIGHT), {}),
        (ValueError, r"x must have 3 axes, \[B, T, D\], got 2", (X[0], WEIGHT), {}),
        (TypeError, "x must be bfloat16 or", (X.astype(np.int32), WEIGHT), {}),
        (TypeError, "x must be .*, got torch.float32", (FOREIGN, WEIGHT), {}),
        (TypeError, "weight must be of a floating dtype, got object", (X, WEIGHT.astype(object)), {}),
        (ValueError, r"weight must have shape \[W, D\] with W >= 1 and D = 3", (X, WEIGHT[:, :2]), {}),
        (TypeError, "weight must be of a floating dtype, got complex64", (X, WEIGHT.astype(np.complex64)), {}),
        (TypeError, "bias must be of a floating dtype, got int32", (X, WEIGHT, WEIGHT[0].astype(np.int32)), {}),
        (ValueError, r"bias must have shape \(3,\)", (X, WEIGHT, WEIGHT[0, :2]), {}),
        (ValueError, "activation must be one of None, 'silu', got 'relu'", (X, WEIGHT), {"activation": "relu"}),
        (TypeError, "output_final_tail must be", (X, WEIGHT), {"output_final_tail": 1}),
        (ValueError, "segment_ids must have shape", (X, WEIGHT), {"segment_ids": np.ones((2, 7), np.int32)}),
        (TypeError, "segment_ids must be int32", (X, WEIGHT), {"segment_ids": np.ones((2, 8), np.int16)}),
        (
            TypeError,
            "x, weight and all others must have values, got a jax.Shape",
            (jax.ShapeDtypeStruct(X.shape, X.dtype), WEIGHT),
            {},
        ),
        (ValueError, "B must be 1", (X, WEIGHT), {"cu_seqlens": np.zeros(2, np.int32)}),
        (ValueError, "got none", (X[:1], WEIGHT), {"cu_seqlens": np.zeros(0, np.int32)}),
        (
            ValueError,
            "give only one",
            (X[:1], WEIGHT),
            {"cu_seqlens": np.zeros(2, np.int32), "segment_ids": np.ones((1, 8), np.int32)},
        ),
        (
            ValueError,
            "not packed",
            (X, WEIGHT),
            {"initial_tail": X[:, :3], "segment_ids": np.ones((2, 8), np.int32)},
        ),
        (ValueError, r"initial_tail must have shape \(2, 3, 3\)", (X, WEIGHT), {"initial_tail": X[:, :2]}),
        (TypeError, "initial_tail must have x's dtype", (X, WEIGHT), {"initial_tail": X[:, :3].astype(np.float16)}),
        (ValueError, "'seq', which is no axis", (X, WEIGHT), {"mesh_axes": MeshAxes(sequence="seq")}),
    ],
)
def test_errors(error: type[Exception], match: str, arguments: Any, options: Any) -> None:
    with pytest.raises(error, match=match):
        jax_qla.causal_conv1d(*arguments, **options)


def test_numpy_arrays_are_taken_as_jax_has_them() -> None:
    """In 32 bits, where JAX has no others."""
    x, weight = np.ones((2, 9, 8)), np.ones((4, 8))
    y, tail = causal_conv1d(x, weight, output_final_tail=True)
    assert tail is not None
    assert y.dtype == tail.dtype == jnp.float32
    assert causal_conv1d(x, weight, initial_tail=tail)[0].dtype == jnp.float32
    assert causal_conv1d(x[:1], weight, cu_seqlens=np.array([0, 9]))[0].shape == (1, 9, 8)
