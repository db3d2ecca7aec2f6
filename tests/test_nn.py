"""The Gated DeltaNet layer in both frameworks: formulas, caches, packing, precision, sharding and refusals."""

from __future__ import annotations

import dataclasses
import doctest
import itertools
import re
import subprocess
import sys
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import stand_in
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

pytest.importorskip("flax", reason="needs the flax extra")
pytest.importorskip("equinox", reason="needs the equinox extra")

import equinox as eqx
from flax import linen, nnx
from flax.nnx import bridge
from frameworks import FRAMEWORKS, Framework, assert_close, random_weights
from test_sharding import collectives
from thorough import every_value, rarely

import jax_qla.nn.equinox
import jax_qla.nn.flax
from jax_qla.nn import LOGICAL_AXES, GatedDeltaNetCache, GatedDeltaNetConfig, empty_cache, mixer, parameter_shapes
from jax_qla.nn.convolution import causal_convolution, tail_after
from jax_qla.nn.gates import log_decay, update_strength
from jax_qla.nn.normalization import gated_rms_norm
from jax_qla.nn.parameters import initial_a_log, initial_dt_bias
from jax_qla.nn.projections import Projected, dot_general

CONFIG = GatedDeltaNetConfig(16, num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6)
WEIGHTS = random_weights(CONFIG)
# Between two orders of the same float32 sums; the norm after the gated delta rule enlarges them where o is small.
LIMIT = 2e-5


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]


RARELY_FLAX, RARELY_EQUINOX = (
    pytest.mark.parametrize("framework", [rarely(name) if name == rare else name for name in FRAMEWORKS], indirect=True)
    for rare in FRAMEWORKS
)
"""Of tests of what both frameworks' layers call (jax_qla/nn/mixer.py), that take long to compile."""


def call(framework: Framework, layer: Any, x: Any) -> Any:
    """layer(x), compiled."""
    return framework.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x))


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def convolved(x: jax.Array, *operands: Any) -> jax.Array:
    (y,) = causal_convolution(x, *operands, parts=(x.shape[2],))
    return y


def test_convolution_is_causal_and_depthwise() -> None:
    x, kernel = random_array(1, 9, 2), random_array(4, 2, seed=1)
    channels = zip(np.asarray(x[0]).T, np.asarray(kernel)[::-1].T, strict=True)
    sums = np.stack([np.convolve(*channel)[:9] for channel in channels], axis=-1)
    whole = convolved(x, kernel)
    np.testing.assert_allclose(whole[0], sums / (1 + np.exp(-sums)), atol=1e-6)
    for border in (1, 2, 5):
        start, tail = convolved(x[:, :border], kernel), tail_after(x[:, :border], 4)
        end = convolved(x[:, border:], kernel, tail)
        np.testing.assert_allclose(jnp.concatenate([start, end], axis=1), whole, atol=1e-6)
        np.testing.assert_array_equal(tail_after(x[:, border:], 4, tail), x[:, -3:])


def test_convolution_keeps_sequences_apart_even_where_an_id_comes_back() -> None:
    x, kernel = random_array(1, 7, 2), random_array(4, 2, seed=1)
    packed = convolved(x, kernel, None, jnp.array([[1, 1, 2, 1, 0, 1, 1]]))
    bounds = [0, 2, 3, 4, 5, 7]
    separate = [convolved(x[:, a:b], kernel) for a, b in itertools.pairwise(bounds)]
    separate[3] = jnp.zeros_like(separate[3])  # padding
    np.testing.assert_allclose(packed, jnp.concatenate(separate, axis=1), atol=1e-6)


def test_tail_of_padded_rows() -> None:
    x = random_array(6, 5, 2)
    ids = jnp.array([[1, 1, 1, 1, 1], [0, 0, 7, 7, 7], [2, 2, 0, 0, 0], [0, 3, 0, 3, 3], [0] * 5, [0, 0, 0, 0, 1]])
    tails = tail_after(x, 4, None, ids)
    for row, (start, end) in enumerate([(0, 5), (2, 5), (0, 2), (1, 2), (0, 0), (4, 5)]):
        expected = np.concatenate([np.zeros((3, 2), np.float32), x[row, start:end]])[-3:]
        np.testing.assert_array_equal(tails[row], expected)


def test_gates() -> None:
    a, a_log, dt_bias = random_array(1, 5, 3) * 4, random_array(3, seed=1), random_array(3, seed=2)
    g = log_decay(a.astype(jnp.bfloat16), a_log, dt_bias)
    assert g.dtype == jnp.float32
    wide = np.asarray(a.astype(jnp.bfloat16), np.float64) + np.asarray(dt_bias, np.float64)
    np.testing.assert_allclose(g, -np.exp(np.asarray(a_log, np.float64)) * np.logaddexp(0, wide), rtol=1e-5)
    beta = update_strength(a, allow_neg_eigval=False)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-np.asarray(a, np.float64))), rtol=1e-5)
    np.testing.assert_array_equal(update_strength(a, allow_neg_eigval=True), 2 * beta)


def test_gated_norm() -> None:
    o, z, weight = random_array(2, 3, 8), random_array(2, 3, 8, seed=1), random_array(8, seed=2)
    wide_o, wide_z, wide_weight = (np.asarray(x, np.float64) for x in (o, z, weight))
    norm = wide_o / np.sqrt((wide_o**2).mean(-1, keepdims=True) + 0.5)
    expected = norm * wide_weight * wide_z / (1 + np.exp(-wide_z))
    np.testing.assert_allclose(gated_rms_norm(o, z, weight, 0.5), expected, rtol=1e-4, atol=1e-6)


def test_initial_decays_are_within_their_ranges() -> None:
    rate = jnp.exp(initial_a_log(jax.random.key(0), (1000,)))
    dt = jax.nn.softplus(initial_dt_bias(jax.random.key(0), (1000,)))
    assert 1 <= rate.min() < 1.5
    assert 15.5 < rate.max() <= 16
    assert 0.00099 < dt.min() < 0.0011
    assert 0.09 < dt.max() < 0.1001


@every_value
@pytest.mark.parametrize("projections", ["split", "fused"])
@pytest.mark.parametrize("shape", [(0, 5, 16), (2, 0, 16)])
def test_nothing_to_compute(framework: Framework, projections: Any, shape: tuple[int, ...]) -> None:
    config = dataclasses.replace(CONFIG, projections=projections)
    layer = framework.make(config, random_weights(config))
    assert call(framework, layer, jnp.zeros(shape)).shape == shape


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("projections", ["split", "fused"])
def test_layer_follows_its_formulas(framework: Framework, projections: Any) -> None:
    """Token by token in float64 NumPy, head by head, from the definition alone."""
    config = dataclasses.replace(CONFIG, projections=projections, allow_neg_eigval=True)
    weights = random_weights(config)
    x = np.asarray(random_array(1, 5, 16, seed=3))
    y = call(framework, framework.make(config, weights), x)
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    projected = {name: x[0].astype(np.float64) @ w[name] for name in config.input_projections}
    if projections == "split":
        qkv, z = projected["in_proj_qkv"], projected["in_proj_z"].reshape(5, 4, 6)
        b, a = projected["in_proj_b"], projected["in_proj_a"]
    else:
        groups = projected["in_proj_qkvz"].reshape(5, 2, 8 + 8 + 12 + 12)
        qkv = np.concatenate([groups[..., s].reshape(5, -1) for s in (slice(8), slice(8, 16), slice(16, 28))], -1)
        z = groups[..., 28:].reshape(5, 4, 6)
        b, a = (projected["in_proj_ba"].reshape(5, 2, 2, 2)[:, :, i].reshape(5, 4) for i in (0, 1))
    padded = np.concatenate([np.zeros((3, qkv.shape[1])), qkv])
    qkv = silu(sum(padded[i : i + 5] * w["conv1d"][i] for i in range(4)))
    q, k = qkv[:, :16].reshape(5, 2, 8), qkv[:, 16:32].reshape(5, 2, 8)
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v = qkv[:, 32:].reshape(5, 4, 6)
    decay = np.exp(-np.exp(w["A_log"]) * np.logaddexp(0, a + w["dt_bias"]))
    beta = 2 / (1 + np.exp(-b))
    heads = np.zeros((5, 4, 6))
    for head in range(4):
        state = np.zeros((8, 6))
        for t in range(5):
            key = k[t, head // 2]
            state = state * decay[t, head]
            state = state + np.outer(key, beta[t, head] * (v[t, head] - key @ state))
            heads[t, head] = q[t, head // 2] @ state * 8**-0.5
    normed = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * w["norm"] * silu(z)
    assert_close(y[0], normed.reshape(5, -1) @ w["out_proj"], LIMIT)


@pytest.mark.parametrize(
    ("allow_neg_eigval", "dtype", "implementation", "expected"),
    [
        (True, "bfloat16", None, "high"),
        (True, "bfloat16", ("cuda", "xla"), "high"),
        (True, "bfloat16", ("cuda", "reference"), "high"),
        (True, "float32", None, None),
        (False, "bfloat16", None, None),
    ],
)
def test_strengths_above_one_ask_for_high_precision(
    allow_neg_eigval: bool, dtype: str, implementation: Any, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(CONFIG, allow_neg_eigval=allow_neg_eigval)
    sizes = (config.conv_channels, config.value_size, config.num_value_heads, config.num_value_heads)
    qkv, *others = (random_array(1, 5, size).astype(dtype) for size in sizes)
    projected = Projected((qkv,), *others)
    weights = mixer.MixerWeights(*(jnp.asarray(WEIGHTS[name]) for name in mixer.MixerWeights._fields))
    asked = []

    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
        asked.append(options["precision"])
        return v, None

    monkeypatch.setattr(mixer, "_chunk_gated_delta_rule", rule)
    mixer.mix(projected, weights, config, implementation=implementation)
    assert asked == [expected]


def test_prefill_in_pieces_and_steps_equal_the_whole(framework: Framework) -> None:
    layer = framework.make(CONFIG, WEIGHTS)
    x = random_array(2, 150, 16)
    expected = framework.jit(type(layer).__call__)(layer, x)
    prefill = framework.jit(type(layer).prefill)
    whole, whole_cache = prefill(layer, x)
    assert_close(whole, expected, LIMIT)
    cache, pieces = None, []
    for start, end in [(0, 1), (1, 71), (71, 147)]:
        y, cache = prefill(layer, x[:, start:end], cache)
        pieces.append(y)

    @framework.jit
    def scan_steps(layer: Any, x: jax.Array, cache: GatedDeltaNetCache) -> Any:
        def step(cache: GatedDeltaNetCache, token: jax.Array) -> tuple[GatedDeltaNetCache, jax.Array]:
            y, cache = layer.step(token[:, None], cache)
            return cache, y[:, 0]

        cache, y = jax.lax.scan(step, cache, jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(y, 0, 1), cache

    y, cache = scan_steps(layer, x[:, 147:], cache)
    assert_close(jnp.concatenate([*pieces, y], axis=1), expected, LIMIT)
    assert_close(cache.conv, whole_cache.conv, 1e-6)
    assert_close(cache.state, whole_cache.state, LIMIT)


@RARELY_FLAX
@pytest.mark.parametrize("projections", ["fused", rarely("split")])
def test_cache_and_layer_that_were_kept_on_the_host(framework: Framework, projections: Any) -> None:
    """NumPy's arrays go on as JAX's do, also where no program is traced around them."""
    config = dataclasses.replace(CONFIG, projections=projections)
    layer, x = framework.make(config, random_weights(config)), random_array(2, 5, 16)
    prefill = framework.jit(type(layer).prefill)
    expected, expected_cache = prefill(layer, x)
    _, cache = prefill(layer, x[:, :3])
    arrays, whole = framework.split(layer)
    y, after = whole(jax.device_get(arrays)).prefill(x[:, 3:], jax.device_get(cache))
    assert_close(y, expected[:, 3:], LIMIT)
    assert_close(after.conv, expected_cache.conv, LIMIT)
    assert_close(after.state, expected_cache.state, LIMIT)


@RARELY_FLAX
def test_steps_from_an_empty_cache(framework: Framework) -> None:
    layer = framework.make(CONFIG, WEIGHTS, dtype=jnp.bfloat16)
    x = random_array(2, 3, 16)
    cache = layer.init_cache(2)
    y, after = framework.jit(lambda layer, x, cache: layer.step(x, cache))(layer, x, cache)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    assert (cache.conv.dtype, cache.state.dtype, y.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    assert_close(y, call(framework, layer, x), 0.02)


@every_value
@pytest.mark.parametrize("projections", ["split", "fused"])
def test_a_single_token_is_one_of_several(framework: Framework, projections: Any) -> None:
    """Of one sequence, whose product with a kernel is computed in another way, and with its derivative."""
    config = dataclasses.replace(CONFIG, projections=projections)
    layer, x = framework.make(config, random_weights(config)), random_array(2, 1, 16)

    @framework.jit
    def step(layer: Any, x: jax.Array) -> Any:
        (y, state), transpose = jax.vjp(
            lambda x: (lambda y, cache: (y, cache.state))(*layer.step(x, layer.init_cache(len(x)))), x
        )
        return y, state, *transpose((y, state))

    for one, both in zip(step(layer, x[:1]), step(layer, x), strict=True):
        assert one.shape == (1, *both.shape[1:])
        assert_close(one[0], both[0], LIMIT)


@RARELY_EQUINOX
def test_a_step_is_exported_for_any_batch(framework: Framework) -> None:
    layer, x = framework.make(CONFIG, WEIGHTS), random_array(3, 1, 16)
    (batch,) = jax.export.symbolic_shape("batch")
    operands = x, layer.init_cache(3)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), operands)
    exported = jax.export.export(jax.jit(lambda x, cache: layer.step(x, cache)))(*shapes)
    for found, right in zip(
        jax.tree.leaves(exported.call(*operands)), jax.tree.leaves(layer.step(*operands)), strict=True
    ):
        assert_close(found, right, LIMIT)


def test_programs_of_caches_are_serialised() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    cache = jax.tree.map(lambda x: x + 1, empty_cache(CONFIG, 2, jnp.bfloat16))
    exported = jax.export.export(jax.jit(lambda cache: cache))(cache)
    found = jax.export.deserialize(exported.serialize()).call(cache)
    assert isinstance(found, GatedDeltaNetCache)
    jax.tree.map(np.testing.assert_array_equal, found, cache)


@RARELY_EQUINOX
def test_packed_documents_do_not_see_each_other(framework: Framework) -> None:
    layer = framework.make(CONFIG, WEIGHTS)
    documents = random_array(4, 35, 16)
    segment_ids = jnp.repeat(jnp.array([[1, 2, 1, 0]]), 35, axis=1)
    run_packed = framework.jit(lambda layer, x, ids: layer(x, segment_ids=ids))
    packed = run_packed(layer, documents.reshape(1, 140, 16), segment_ids).reshape(4, 35, 16)
    assert_close(packed[:3], call(framework, layer, documents)[:3], LIMIT)
    assert not packed[3].any()


@RARELY_FLAX
def test_prompts_of_different_lengths(framework: Framework) -> None:
    layer = framework.make(CONFIG, WEIGHTS)
    prompts = random_array(3, 66, 16)
    padding = [(4, 0), (0, 4), (1, 3)]
    padded = jnp.stack([jnp.pad(x, (widths, (0, 0))) for x, widths in zip(prompts, padding, strict=True)])
    ids = jnp.stack([jnp.pad(jnp.full(66, 5), widths) for widths in padding])
    y, cache = framework.jit(lambda layer, x, ids: layer.prefill(x, segment_ids=ids))(layer, padded, ids)
    expected, expected_cache = framework.jit(lambda layer, x: layer.prefill(x))(layer, prompts)
    assert_close(jnp.stack([row[a : 70 - b] for row, (a, b) in zip(y, padding, strict=True)]), expected, LIMIT)
    assert_close(cache.conv, expected_cache.conv, LIMIT)
    assert_close(cache.state, expected_cache.state, LIMIT)


def test_gradients_agree_between_the_frameworks() -> None:
    x, dy = random_array(2, 20, 16), random_array(2, 20, 16, seed=1)
    results = [
        framework.outputs_and_gradients(framework.make(CONFIG, WEIGHTS), x, dy) for framework in FRAMEWORKS.values()
    ]
    assert_close(results[0][0], results[1][0], LIMIT)
    assert results[0][1].keys() == {*parameter_shapes(CONFIG), "x"}
    for name, gradient in results[0][1].items():
        assert np.abs(gradient).max() > 0, name
        assert_close(results[1][1][name], gradient, LIMIT, name)


def test_dtypes_are_separate(framework: Framework) -> None:
    layer = framework.make(CONFIG, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert {array.dtype.name for array in layer.get_weights().values()} == {"float32"}
    half = framework.make(CONFIG, dtype=jnp.float32, param_dtype=jnp.bfloat16)
    dtypes = {name: array.dtype.name for name, array in half.get_weights().items()}
    assert dtypes.pop("A_log") == dtypes.pop("dt_bias") == "float32"
    assert set(dtypes.values()) == {"bfloat16"}
    x = random_array(1, 4, 16)
    assert jax.eval_shape(layer, x).dtype == jnp.bfloat16
    assert jax.eval_shape(half, x.astype(jnp.bfloat16)).dtype == jnp.float32


def test_where_jax_promotes_nothing(framework: Framework) -> None:
    layer = framework.make(CONFIG, dtype=jnp.bfloat16)
    x, ids = random_array(1, 4, 16), jnp.ones((1, 4), jnp.int32)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(lambda x, dy: jax.vjp(lambda x: layer(x, segment_ids=ids), x)[1](dy), x, x.astype(jnp.bfloat16))
        jax.eval_shape(lambda x: layer.step(x[:, :1], layer.prefill(x)[1]), x)


def test_implementation_is_handed_on(framework: Framework) -> None:
    with pytest.raises(NotImplementedError, match="cuda"):
        call(framework, framework.make(CONFIG, implementation="cuda"), random_array(1, 4, 16))
    x = random_array(1, 70, 16)
    by_reference = call(framework, framework.make(CONFIG, WEIGHTS, implementation=["reference"]), x)
    assert_close(call(framework, framework.make(CONFIG, WEIGHTS, implementation="xla"), x), by_reference, LIMIT)


def test_piece_rows_are_handed_on(framework: Framework) -> None:
    """To what computes whole sequences, for both passes; decoding has none."""
    layer, x = framework.make(CONFIG, piece_rows=128), random_array(1, 4, 16)
    for function in (lambda layer, x: layer(x), lambda layer, x: layer.prefill(x)):
        with pytest.raises(NotImplementedError, match="piece_rows=128"):
            framework.jit(function)(layer, x)
    y, _ = framework.jit(lambda layer, x: layer.step(x, layer.init_cache(1)))(layer, x)
    assert y.shape == x.shape
    with pytest.raises(ValueError, match="piece_rows must be a multiple of 64"):
        call(framework, framework.make(CONFIG, piece_rows=65), x)


def test_save_chunk_states_is_handed_on(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """To what is differentiated; without the kernels it changes nothing."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x = random_array(1, 70, 16)
    with stand_in.kernels():
        counts = []
        for save in (False, None, True):
            layer = framework.make(CONFIG, WEIGHTS, save_chunk_states=save)
            kept = jax.eval_shape(lambda x, layer=layer: jax.vjp(layer, x)[1], x.astype(jnp.bfloat16))
            tiles = (1 + 70 // 64, CONFIG.num_value_heads, 1, CONFIG.value_head_dim, CONFIG.key_head_dim)
            vd = (1, 70, CONFIG.num_value_heads, CONFIG.value_head_dim)
            shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
            assert shapes.count(tiles) == (save is True)
            counts.append(shapes.count(vd))
        assert [n - counts[0] for n in counts] == [0, 1, 1]
    y = call(framework, framework.make(CONFIG, WEIGHTS), x)
    assert_close(call(framework, framework.make(CONFIG, WEIGHTS, save_chunk_states=True), x), y, 0)


def test_weights_come_back_and_wrong_ones_are_refused(framework: Framework) -> None:
    layer = framework.make(CONFIG, WEIGHTS)
    for name, array in layer.get_weights().items():
        np.testing.assert_array_equal(array, WEIGHTS[name])
    wrong = {**WEIGHTS, "extra": np.zeros(1), "norm": np.zeros(7), "dt_bias": [0.0]}
    del wrong["A_log"]
    with pytest.raises(
        ValueError, match=r"A_log is missing; extra .*; dt_bias must be an array, got list; norm must have shape \(6,\)"
    ):
        framework.make(CONFIG, wrong)
    for dtype in (object, np.complex64, np.int8):  # nan, half of each number, and quantised ones
        with pytest.raises(ValueError, match=rf"norm must be of a floating dtype, got {np.dtype(dtype)}$"):
            framework.make(CONFIG, {**WEIGHTS, "norm": np.full(6, None if dtype is object else 1, dtype)})


def test_wrong_calls_are_refused(framework: Framework) -> None:
    layer = framework.make(CONFIG, WEIGHTS)
    x, ids = random_array(2, 4, 16), jnp.ones((2, 4), jnp.int32)
    with pytest.raises(ValueError, match="cache and segment_ids cannot be combined"):
        layer.prefill(x, layer.init_cache(2), segment_ids=ids)
    with pytest.raises(ValueError, match=r"cache\.conv must have shape \(2, 3, 56\) .* got \(3, 3, 56\)"):
        layer.prefill(x, layer.init_cache(3))
    wider = empty_cache(dataclasses.replace(CONFIG, key_head_dim=4, value_head_dim=14), 2)
    with pytest.raises(ValueError, match=r"cache\.state must have shape \(2, 4, 8, 6\)"):
        layer.step(x, wider._replace(conv=layer.init_cache(2).conv))
    cache = layer.init_cache(2)
    narrower = cache._replace(state=cache.state.astype(jnp.bfloat16))
    for goes_on in (layer.prefill, layer.step):
        with pytest.raises(TypeError, match=r"cache\.state must be float32, got bfloat16"):
            goes_on(x, narrower)
    with pytest.raises(TypeError, match=r"cache\.conv must be an array of shape \(2, 3, 56\), got NoneType"):
        layer.step(x, cache._replace(conv=None))
    with pytest.raises(TypeError, match=r"cache\.conv must be of a floating dtype, got complex64"):
        layer.step(x, cache._replace(conv=cache.conv.astype(jnp.complex64)))


def test_other_inputs_are_refused(framework: Framework) -> None:
    layer, x = framework.make(CONFIG), random_array(2, 4, 16)
    for method in (layer, layer.prefill, lambda x: layer.step(x, layer.init_cache(2))):
        with pytest.raises(ValueError, match=r"x must have shape \[B, T, 16\], got \(2, 16\)"):
            method(x[:, 0])
        with pytest.raises(ValueError, match=r"x must have shape \[B, T, 16\], got \(2, 4, 15\)$"):
            method(x[..., :15])
        with pytest.raises(TypeError, match=r"x must be an array \[B, T, 16\], got list"):
            method(x.tolist())
        with pytest.raises(TypeError, match="x must be of real numbers, got complex64"):
            method(x.astype(jnp.complex64))
        with pytest.raises(TypeError, match=r"x must have values, got a jax\.ShapeDtypeStruct; .* jax\.eval_shape"):
            method(jax.ShapeDtypeStruct(x.shape, x.dtype))
    if isinstance(layer, eqx.Module):
        with pytest.raises(ValueError, match=r"got \(4, 16\); the layer takes the batch itself, with no jax\.vmap"):
            jax.vmap(layer)(x)


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
@pytest.mark.parametrize("dtype", [None, jnp.int32, jnp.complex64, "bf16"])
def test_dtypes_that_are_not_floating_are_refused(framework: Framework, name: str, dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a floating dtype such as jnp.bfloat16, got "):
        framework.make(CONFIG, **{name: dtype})
    with pytest.raises(TypeError, match=r"^dtype must be bfloat16, float16, float32 or float64, got float8_e4m3fn"):
        framework.make(CONFIG, dtype=jnp.float8_e4m3fn)


def test_wrong_options_are_refused(framework: Framework) -> None:
    with pytest.raises(ValueError, match="piece_rows must be a multiple of 64"):
        framework.make(CONFIG, piece_rows=10)
    with pytest.raises(TypeError, match="save_chunk_states must be True, False or None, got 'yes' of type str"):
        framework.make(CONFIG, save_chunk_states="yes")


def test_wrong_implementations_are_refused(framework: Framework) -> None:
    """When a layer is made, not when it is first called."""
    with pytest.raises(ValueError, match="be made of the names 'cuda', 'xla', 'reference', got 'xIa'"):
        framework.make(CONFIG, WEIGHTS, implementation="xIa")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_value_heads": 3}, ValueError, r"num_value_heads must be a multiple of num_key_heads \(2\), got 3"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"key_head_dim": 8.0}, TypeError, "key_head_dim must be an integer, got float"),
        ({"projections": "joined"}, ValueError, 'projections must be "split" or "fused"'),
        ({"norm_eps": "1e-6"}, TypeError, "norm_eps must be a number, got '1e-6' of type str"),
        ({"norm_eps": -1e-6}, ValueError, "norm_eps must be positive, .* got -1e-06"),
        ({"norm_eps": 0}, ValueError, "norm_eps must be positive, .* got 0"),
        ({"norm_eps": float("nan")}, ValueError, "norm_eps must be positive, .* got nan"),
        ({"norm_eps": 1e-50}, ValueError, "norm_eps must be positive, and within the range of float32, got 1e-50"),
        ({"norm_eps": 10**400}, ValueError, "norm_eps must be positive, and within the range of float32, got 1"),
        ({"allow_neg_eigval": "false"}, TypeError, "allow_neg_eigval must be True or False, got 'false' of type str"),
    ],
)
def test_wrong_configurations_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **change)


def test_sizes_of_numpy() -> None:
    """Are Python's afterwards, whose products do not overflow."""
    sizes: Any = (np.int64(16), *np.asarray((2, 4, 64, 100), np.int8))
    config = GatedDeltaNetConfig(*sizes)
    assert config.conv_channels == 656
    assert config == GatedDeltaNetConfig(16, 2, 4, 64, 100)


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (-1, ValueError, "batch_size must not be negative, got -1"),
        (2.5, TypeError, "batch_size must be an integer, got 2.5 of type float"),
        (True, TypeError, "batch_size must be an integer, got True of type bool"),
    ],
)
def test_what_is_no_number_of_sequences_is_refused(batch_size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        empty_cache(CONFIG, batch_size)


def test_what_is_no_configuration_is_refused(framework: Framework) -> None:
    with pytest.raises(TypeError, match=r"config must be a GatedDeltaNetConfig, .* got dict$"):
        framework.make({"hidden_size": 16})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config must be a GatedDeltaNetConfig, .* got dict$"):
        empty_cache({"hidden_size": 16}, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config must be a mapping, .* got str$"):
        GatedDeltaNetConfig.from_huggingface("config.json")


def test_a_huggingface_configuration_that_is_not_whole() -> None:
    with pytest.raises(ValueError, match="config lacks 'rms_norm_eps', which says"):
        GatedDeltaNetConfig.from_huggingface(
            {
                "model_type": "qwen3_next",
                "hidden_act": "silu",
                "hidden_size": 16,
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 4,
            }
        )


def of_arrays(framework: Framework, **options: Any) -> tuple[Any, Any]:
    """A function of a layer's arrays and x, and the arrays."""
    arrays, whole = framework.split(framework.make(**options))
    return lambda arrays, x: whole(arrays)(x), arrays


def test_the_input_is_kept_once_for_the_backward_pass(framework: Framework) -> None:
    """In the layer's dtype, and not for every projection, nor behind a barrier."""
    (run, arrays), x = of_arrays(framework, config=CONFIG, dtype=jnp.bfloat16), random_array(2, 150, 16)
    kept = jax.eval_shape(lambda *operands: jax.vjp(run, *operands)[1], arrays, x)
    assert [leaf.dtype.name for leaf in jax.tree.leaves(kept) if leaf.shape == x.shape] == ["bfloat16"]


def test_what_a_checkpoint_keeps_of_the_projections(framework: Framework) -> None:
    """All their products where the policy keeps products, z's, which the compiler may not merge, among them."""
    (run, arrays), x = of_arrays(framework, config=CONFIG, dtype=jnp.bfloat16), random_array(2, 150, 16)
    sizes = CONFIG.input_projections.values()
    policies = jax.checkpoint_policies
    for policy, keeps in ((policies.nothing_saveable, False), (policies.dots_saveable, True)):
        layer = jax.checkpoint(run, policy=policy)
        kept = jax.eval_shape(lambda *operands, layer=layer: jax.vjp(layer, *operands)[1], arrays, x)
        shapes = {leaf.shape for leaf in jax.tree.leaves(kept)}
        assert [(2, 150, size) in shapes for size in sizes] == [keeps] * len(sizes)


@pytest.mark.gpu
def test_projections_are_not_merged(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are not joined on the way to a product, but for the gates'; without a barrier XLA joins those of x."""
    config, x = GatedDeltaNetConfig(256, 1, 2), jnp.zeros((1, 256, 256), jnp.bfloat16)

    def joined() -> set[int]:
        """How many features kernels have together that are joined."""
        run, arrays = of_arrays(framework, config=config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
        text = jax.jit(run).lower(arrays, x).compile().as_text() or ""
        shapes = re.findall(r"bf16\[(\d+),(\d+)\]\S* concatenate\(", text)
        return {int(b if a == "256" else a) for a, b in shapes if "256" in (a, b)}

    assert joined() <= {2 * config.num_value_heads}
    for module in (jax_qla.nn.flax, jax_qla.nn.equinox):
        monkeypatch.setattr(module, "dot_general_of", lambda _: dot_general)
    assert config.conv_channels + config.value_size in joined()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_in_the_layer(framework: Framework, head_dim: int) -> None:
    """In bfloat16 the kernels are as near to "xla" in float32 as bfloat16 allows, and the cache goes on from theirs."""
    config = GatedDeltaNetConfig(256, 1, 2, head_dim, head_dim)
    weights, x, dy = random_weights(config), random_array(2, 200, 256), random_array(2, 200, 256, seed=1)
    kernels = framework.make(config, weights, dtype=jnp.bfloat16, implementation="cuda")
    with jax.default_matmul_precision("float32"):
        exact = framework.make(config, weights, implementation="xla")
        expected, expected_gradients = framework.outputs_and_gradients(exact, x, dy)

    def distance(computed: Any, expected: Any) -> float:
        computed, expected = np.asarray(computed, np.float64), np.asarray(expected, np.float64)
        return float(np.linalg.norm(computed - expected) / np.linalg.norm(expected))

    y, gradients = framework.outputs_and_gradients(kernels, x, dy.astype(jnp.bfloat16))
    assert distance(y, expected) < 2e-2
    for name, gradient in expected_gradients.items():
        # Two numbers, the sums of what 400 tokens contribute with both signs.
        cancels = name in ("A_log", "dt_bias")
        assert distance(gradients[name], gradient) < (0.15 if cancels else 3e-2), name
    start, cache = framework.jit(lambda layer, x: layer.prefill(x))(kernels, x[:, :199])
    last, _ = framework.jit(lambda layer, x, cache: layer.step(x, cache))(kernels, x[:, 199:], cache)
    assert distance(jnp.concatenate([start, last], axis=1), expected) < 2e-2


RULES = (
    ("embed", None),
    ("value", "model"),
    ("qkv", "model"),
    ("qkvz", "model"),
    ("ba", None),
    ("value_heads", "model"),
)


def mesh_of_two() -> Any:
    return jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))


@RARELY_EQUINOX
def test_prefill_and_step_in_an_explicit_mesh(framework: Framework) -> None:
    """Padding, an empty cache and one token, each device for its rows."""
    layer, x = framework.make(CONFIG, WEIGHTS), random_array(2, 12, 16)
    ids = jnp.asarray([[1] * 12, [0] * 3 + [1] * 7 + [0] * 2], jnp.int32)

    @jax.jit
    def run(x: jax.Array, ids: jax.Array) -> Any:
        y, cache = layer.prefill(x, segment_ids=ids)
        return y, cache, layer.step(x[:, :1], cache), layer.step(x[:, :1], layer.init_cache(2))

    expected = run(x, ids)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        found = run(*jax.device_put((x, ids), NamedSharding(mesh, PartitionSpec("data"))))
    for y, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert y.sharding.spec[0] == "data"
        assert_close(y, right, LIMIT)


@RARELY_EQUINOX
@pytest.mark.parametrize("manual", [True, rarely(False)], ids=["beside manual ones", "beside Explicit ones"])
def test_steps_over_auto_axes_beside_others(framework: Framework, manual: bool) -> None:
    """What these cut only the compiler knows, and plain JAX is its business."""
    layer, x = framework.make(CONFIG, WEIGHTS), random_array(2, 2, 16)
    kinds = (AxisType.Auto if manual else AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds)
    by_row, cache = PartitionSpec("data"), jax.tree.map(lambda a: a + 0.1, layer.init_cache(2))
    arrays, whole = framework.split(layer)

    def run(arrays: Any, x: jax.Array, cache: Any) -> Any:
        return whole(arrays).step(x, cache)

    expected = jax.jit(run)(arrays, x, cache)
    with jax.set_mesh(mesh):
        arrays, _ = framework.split(framework.place(layer, mesh, {**dict(RULES), "ba": "model"}))
        x, cache = jax.device_put((x, cache), NamedSharding(mesh, by_row))
        specs: dict[str, Any] = {
            "in_specs": (PartitionSpec(), by_row, by_row),
            "out_specs": by_row,
            "axis_names": {"data"},
        }
        found = jax.jit(jax.shard_map(run, **specs) if manual else run)(arrays, x, cache)
    for y, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(y, right, LIMIT)


def explicit_mesh() -> Any:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


@RARELY_FLAX
def test_parameters_cut_in_an_explicit_mesh(framework: Framework) -> None:
    """Batch and "embed" over one axis (fully sharded data parallelism), heads over the other."""
    layer, x, dy = framework.make(CONFIG, WEIGHTS), random_array(4, 5, 16), random_array(4, 5, 16, seed=1)

    def run(layer: Any, x: jax.Array) -> Any:
        y, cache = layer.prefill(x)
        return y, layer.step(x[:, :1], cache)

    expected, expected_gradients = framework.jit(run)(layer, x), framework.outputs_and_gradients(layer, x, dy)[1]
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        cut = framework.place(layer, mesh, {**dict(RULES), "embed": "data"})
        x, dy = jax.device_put((x, dy), NamedSharding(mesh, PartitionSpec("data")))
        found, (y, gradients) = framework.jit(run)(cut, x), framework.outputs_and_gradients(cut, x, dy)
        # Added to, as in a model.
        assert jax.typeof(x + y).sharding.spec == PartitionSpec("data", None, None)
    assert_close(y, expected[0], LIMIT)
    assert found[1][1].state.sharding.spec == PartitionSpec("data", "model", None, None)
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(one, right, LIMIT)
    placed = {**cut.get_weights(), "x": x}
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], LIMIT, name)
        assert gradient.sharding.is_equivalent_to(placed[name].sharding, gradient.ndim), name


@pytest.mark.parametrize("projections", ["split", "fused"])
def test_heads_that_explicit_axes_would_cut_apart_are_refused(framework: Framework, projections: Any) -> None:
    config = GatedDeltaNetConfig(16, 2, 4, 8, 8, projections=projections)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        cut = framework.place(framework.make(config), mesh, {**dict(RULES), "ba": "model"})
        with pytest.raises(ValueError, match="Hk = 2 cannot be cut evenly over the 4 devices of mesh axis 'model', wh"):
            jax.eval_shape(cut, jax.device_put(random_array(2, 4, 16), NamedSharding(mesh, PartitionSpec())))


def test_scan_in_an_explicit_mesh_from_the_cache_after_no_token() -> None:
    layer, x, mesh = FRAMEWORKS["equinox"].make(CONFIG, WEIGHTS), random_array(2, 3, 16), explicit_mesh()

    def run(layer: Any, x: jax.Array) -> jax.Array:
        def step(cache: Any, token: jax.Array) -> Any:
            y, cache = layer.step(token[:, None], cache)
            return cache, y[:, 0]

        return jax.lax.scan(step, layer.prefill(x[:, :0])[1], jnp.swapaxes(x, 0, 1))[1].swapaxes(0, 1)

    with jax.set_mesh(mesh):
        cut = FRAMEWORKS["equinox"].place(layer, mesh, dict(RULES))
        found = eqx.filter_jit(run)(cut, jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))))
    assert_close(found, layer(x), LIMIT)


def test_heads_of_fused_projections_need_no_others() -> None:
    """Cut by key head, devices exchange what tensor parallelism must: sums of the output, and of x's gradient. (And of
    the filter's, which all devices have whole.)"""
    config, flax = dataclasses.replace(CONFIG, projections="fused"), FRAMEWORKS["flax"]
    layer, (x, dy) = flax.make(config, random_weights(config)), (random_array(2, 70, 16, seed=n) for n in range(2))
    expected = flax.outputs_and_gradients(layer, x, dy)
    with jax.set_mesh(mesh_of_two()):
        cut = flax.place(layer, jax.sharding.get_mesh(), {**dict(RULES), "qkv": None, "ba": "model"})
        graphdef, parameters = nnx.split(cut)

        def run(parameters: Any, x: jax.Array, dy: jax.Array) -> Any:
            y, transpose = jax.vjp(lambda parameters, x: nnx.merge(graphdef, parameters)(x), parameters, x)
            return y, transpose(dy)

        compiled = jax.jit(run).lower(parameters, jnp.asarray(x), jnp.asarray(dy)).compile()
        y, (by_parameter, by_x) = compiled(parameters, jnp.asarray(x), jnp.asarray(dy))
    assert_close(y, expected[0], LIMIT)
    for name, gradient in (*nnx.merge(graphdef, by_parameter).get_weights().items(), ("x", by_x)):
        assert_close(gradient, expected[1][name], LIMIT, name)
    exchanged = collectives(compiled.as_text() or "")
    assert {operation for operation, _, _ in exchanged} == {"all-reduce"}
    largest = sorted(elements for _, _, elements in exchanged)[-4:]
    assert largest == [4 * config.conv_channels, *[x.size] * 3]  # x has two projections


@every_value
@pytest.mark.parametrize("projections", ["split", "fused"])
@pytest.mark.parametrize(
    ("rules", "spec"),
    [
        ({**dict(RULES), "ba": "model"}, ("data",)),
        ({**dict(RULES), "embed": "data"}, (None, "data")),
        ({**dict(RULES), "embed": "data"}, (None, None, "model")),
        (dict.fromkeys(dict(RULES), "data") | {"embed": "model"}, ("data", None, "model")),
        (dict.fromkeys(dict(RULES)), ("data", None, "model")),
    ],
)
@pytest.mark.filterwarnings("ignore:an operand of shape")  # the filter of the convolution is not cut like B
def test_any_cut_in_an_explicit_mesh(
    framework: Framework, projections: Any, rules: dict[str, str | None], spec: tuple[str | None, ...]
) -> None:
    """The output is cut as x is, whatever the parameters are: also where both cut over one axis."""
    layer, mesh = framework.make(dataclasses.replace(CONFIG, projections=projections)), explicit_mesh()
    with jax.set_mesh(mesh):
        cut = framework.place(layer, mesh, rules)
        x = jax.device_put(random_array(4, 6, 16), NamedSharding(mesh, PartitionSpec(*spec)))
        y, dx = jax.eval_shape(lambda x: (y := jax.vjp(cut, x))[:1] + y[1](x), x)
    assert y.sharding.spec == dx.sharding.spec == PartitionSpec(*spec, *[None] * (3 - len(spec)))


def test_loaded_weights_stay_where_the_parameters_were(framework: Framework) -> None:
    for mesh in (mesh_of_two(), explicit_mesh()):
        layer = framework.place(framework.make(CONFIG, param_dtype=jnp.bfloat16), mesh, dict(RULES))
        before = {name: (array.sharding, array.dtype) for name, array in layer.get_weights().items()}
        layer = with_weights(layer)
        for name, array in layer.get_weights().items():
            assert array.sharding.is_equivalent_to(before[name][0], array.ndim), name
            assert array.dtype == before[name][1]
            np.testing.assert_array_equal(array, jnp.asarray(WEIGHTS[name], array.dtype))


def with_weights(layer: Any) -> Any:
    """The layer, of either framework, with WEIGHTS."""
    if isinstance(layer, eqx.Module):
        return layer.with_weights(WEIGHTS)
    layer.set_weights(WEIGHTS)
    return layer


def test_weights_of_layers_without_arrays_on_devices(framework: Framework) -> None:
    """Shapes of parameters take weights too, on the devices that they name, and so do NumPy's arrays, not to be written
    to."""
    arrays, whole = framework.split(framework.make(CONFIG, param_dtype=jnp.bfloat16))
    for mesh in (None, explicit_mesh().abstract_mesh, mesh_of_two()):
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        shapes = jax.tree.map(lambda x, to=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), arrays)
        for name, x in with_weights(whole(shapes)).get_weights().items():
            np.testing.assert_array_equal(x, jnp.asarray(WEIGHTS[name], x.dtype))
            assert x.dtype == (jnp.float32 if name in ("A_log", "dt_bias") else jnp.bfloat16)
            assert x.committed == isinstance(mesh, Mesh)
            assert not x.committed or x.sharding.is_equivalent_to(sharding, x.ndim)
    on_host = jax.tree.map(np.asarray, arrays)
    np.testing.assert_array_equal(with_weights(whole(on_host)).norm, jnp.asarray(WEIGHTS["norm"], jnp.bfloat16))


def test_weights_of_layers_without_devices() -> None:
    """What was put nowhere is not put anywhere."""
    layer = FRAMEWORKS["equinox"].make(CONFIG)
    assert not layer.with_weights(WEIGHTS).A_log.committed
    traced = jax.jit(lambda weights: layer.with_weights(weights).get_weights())(WEIGHTS)
    np.testing.assert_array_equal(traced["out_proj"], WEIGHTS["out_proj"])


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
def test_tail_of_a_cut_sequence(sizes: tuple[int, int]) -> None:
    """Wherever the tokens lie on devices of 3 (or all 6), also with a tail before them, or a sequence of one token."""
    x, tail = random_array(4, 6, 5), random_array(4, 3, 5)
    ids = jnp.asarray([[0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 2], [0] * 6], jnp.int32)

    def run(x: jax.Array, tail: jax.Array, ids: jax.Array) -> Any:
        return tail_after(x, 4), tail_after(x, 8), tail_after(x, 4, tail), tail_after(x, 4, None, ids)

    mesh = jax.make_mesh(sizes, ("data", "seq"), axis_types=(AxisType.Explicit,) * 2)
    by_token = NamedSharding(mesh, PartitionSpec("data", "seq"))
    with jax.set_mesh(mesh):
        found = jax.jit(run)(jax.device_put(x, by_token), tail, jax.device_put(ids, by_token))
    for y, right in zip(found, run(x, tail, ids), strict=True):
        assert np.array_equal(y, right)


@RARELY_FLAX
def test_cache_of_float64(framework: Framework) -> None:
    """A scan over steps from the empty cache keeps its dtypes; and what is no cache is refused."""
    with jax.enable_x64(True):
        dtypes = {"dtype": jnp.float64, "implementation": "reference"}
        layer = framework.make(CONFIG, WEIGHTS, **dtypes)
        assert layer.init_cache(2).state.dtype == jnp.float64
        steps = jnp.moveaxis(jnp.asarray(random_array(2, 3, 16), jnp.float64), 1, 0)
        cache, _ = jax.lax.scan(lambda c, x: layer.step(x[:, None], c)[::-1], layer.init_cache(2), steps)
        assert cache.state.dtype == jnp.float64
        with pytest.raises(TypeError, match=r"cache must be a GatedDeltaNetCache, .* got tuple"):
            layer.step(steps[0][:, None], tuple(cache))


@pytest.mark.parametrize("projections", ["split", rarely("fused")])
def test_flax_parameters_are_sharded_by_logical_names(projections: Any) -> None:
    config = dataclasses.replace(CONFIG, projections=projections)
    weights, x, flax = random_weights(config), random_array(2, 70, 16), FRAMEWORKS["flax"]
    layer = jax_qla.nn.flax.GatedDeltaNet(config, rngs=nnx.Rngs(0))
    layer.set_weights(weights)
    expected = call(flax, layer, x)
    graphdef, state = nnx.split(layer)
    logical = nnx.merge(graphdef, nnx.get_partition_spec(state))
    for name in weights:
        assert logical._parameter(name).get_raw_value() == PartitionSpec(*LOGICAL_AXES[name])
    with nnx.logical_axis_rules(RULES):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh_of_two()))
    placed = nnx.merge(graphdef, state)
    assert placed.get_weights()["out_proj"].sharding.spec == PartitionSpec("model", None)
    assert_close(call(flax, placed, x), expected, LIMIT)


def test_equinox_parameters_are_sharded_by_logical_names() -> None:
    layer = FRAMEWORKS["equinox"].make(CONFIG, WEIGHTS)
    x, rules, mesh = random_array(2, 70, 16), dict(RULES), mesh_of_two()
    specs = jax_qla.nn.equinox.logical_axes(layer)
    assert specs.out_proj.weight == PartitionSpec("embed", "value")
    assert specs.conv1d == PartitionSpec(None, "qkv")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(*map(rules.get, spec))), specs)
    placed = jax.device_put(layer, shardings)
    assert placed.in_proj_z.weight.sharding.spec == PartitionSpec("model", None)
    equinox = FRAMEWORKS["equinox"]
    assert_close(call(equinox, placed, x), call(equinox, layer, x), LIMIT)


def test_layer_in_linen_by_the_bridge_of_flax() -> None:
    """The same results and gradients as of the NNX layer, from the same parameters."""
    module = bridge.to_linen(jax_qla.nn.flax.GatedDeltaNet, CONFIG)
    x = random_array(2, 9, CONFIG.hidden_size)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    layer = jax_qla.nn.flax.GatedDeltaNet(CONFIG, rngs=nnx.Rngs(1))
    state = nnx.state(layer)
    nnx.replace_by_pure_dict(state, linen.meta.unbox(variables["params"]))
    nnx.update(layer, state)
    assert_close(jax.jit(module.apply)(variables, x), call(FRAMEWORKS["flax"], layer, x), LIMIT)

    by_linen = jax.jit(jax.grad(lambda params: jnp.sum(module.apply({"params": params}, x) ** 2)))(variables["params"])
    by_nnx = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(x) ** 2)))(layer)
    gradients = [jax.tree.leaves(tree) for tree in (linen.meta.unbox(by_linen), nnx.to_pure_dict(by_nnx))]
    assert len(gradients[0]) == len(gradients[1]) == len(parameter_shapes(CONFIG))
    for found, expected in zip(*gradients, strict=True):
        assert_close(found, expected, LIMIT)


def test_logical_axes_of_layers_that_linen_scans() -> None:
    """With the boxes of Linen, which move their names where `nn.scan` puts its axis; those of the bridge do not."""

    def boxed(variable: Any) -> Any:
        names = variable.get_metadata().get("out_sharding")
        return linen.Partitioned(variable.get_raw_value(), names) if names else variable.get_raw_value()

    class Block(linen.Module):  # type: ignore[misc]
        @linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: jax.Array, _: None) -> Any:
            return x + bridge.to_linen(jax_qla.nn.flax.GatedDeltaNet, CONFIG, metadata_fn=boxed, name="mixer")(x), None

    blocks = linen.scan(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={"partition_name": "layers"},
    )()
    variables = jax.eval_shape(blocks.init, jax.random.key(0), random_array(1, 4, 16), None)
    specs = linen.get_partition_spec(variables)["params"]["mixer"]
    assert specs["out_proj"]["kernel"] == PartitionSpec("layers", "value", "embed")
    assert specs["conv1d"] == PartitionSpec("layers", None, "qkv")
    assert specs["A_log"] == PartitionSpec("layers", "value_heads")


def test_layers_work_under_the_transforms_of_equinox() -> None:
    layer = FRAMEWORKS["equinox"].make(CONFIG, WEIGHTS)
    x = random_array(3, 1, 5, 16)
    assert_close(eqx.filter_jit(eqx.filter_vmap(layer))(x)[:, 0], eqx.filter_jit(layer)(x[:, 0]), LIMIT)
    assert_close(eqx.nn.Sequential([layer])(x[0], key=jax.random.key(0)), layer(x[0]), LIMIT)


@pytest.mark.parametrize("name", ["flax", "equinox"])
def test_a_missing_framework_is_named(name: str) -> None:
    program = f"""
import sys
sys.modules["flax"] = sys.modules["equinox"] = None
import jax_qla, jax_qla.nn
try:
    import jax_qla.nn.{name}
except ModuleNotFoundError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"pip install 'jax_qla[{name}]'" in result.stdout


@pytest.mark.parametrize("module", [jax_qla.nn.config, jax_qla.nn.flax, jax_qla.nn.equinox])
def test_examples_in_docstrings(module: Any) -> None:
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
