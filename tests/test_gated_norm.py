"""The gated RMS norm by kernels, as far as no card is needed: what they are specified to compute, when they are taken,
and what surrounds them."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import convolution_cases
import jax
import jax.numpy as jnp
import norm_cases as cases
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_convolution import at_hand  # noqa: F401
from test_sharding import FAST, mesh_of

from jax_qla import store
from jax_qla.cuda import conv1d, norm
from jax_qla.kernels import gated_norm
from jax_qla.kernels.packaged import PACKAGED
from jax_qla.nn.normalization import gated_rms_norm

pytestmark = pytest.mark.usefixtures("at_hand")


@pytest.mark.parametrize(("shape", "dtype"), cases.SMALL)
def test_specification(shape: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(steps: Any, inputs: Any, outputs: Any) -> Any:
        (step,) = steps
        given: Any = {name: x.astype(jnp.float64) for name, x in inputs.items()}
        found: Any
        if step.config.backward:
            rows = gated_norm.rows_of_block(step.config)
            found = gated_norm.specification_of_gradients(**given, **step.scalars, rows=rows)
        else:
            found = (gated_norm.specification(**given, **step.scalars),)
        assert [x.shape for x in found] == [x.shape for x in outputs.values()]
        return {name: x.astype(like.dtype) for (name, like), x in zip(outputs.items(), found, strict=True)}

    monkeypatch.setattr("jax_qla.launch.launch", launch)
    with jax.enable_x64(True):
        # Compiled as wholes: one operation after the other, it takes longer.
        forward, backward = (
            jax.jit(functools.partial(function), static_argnames="eps") for function in (norm.forward, norm.backward)
        )
        cases.check(shape, dtype, forward, backward)


@pytest.mark.parametrize("length", [1e-20, 1.0, 1e16])
def test_gradient_of_rows_of_any_length(length: float) -> None:
    """In plain JAX it has no part along the row, until squares leave float32."""
    _, o, weight, dy = cases.given((1, 3, 1, 64), "float32")
    o, z = length * o, jnp.ones_like(o)
    row, upstream = np.asarray(o, np.float64), np.asarray(dy * weight, np.float64) / (1 + np.exp(-1))
    inverse = 1 / np.sqrt(np.mean(row**2, axis=-1, keepdims=True) + 1e-6)
    normal = row * inverse
    right = upstream - normal * np.mean(normal * upstream, axis=-1, keepdims=True)
    found = jax.jit(jax.grad(lambda o: jnp.sum(gated_rms_norm(o, z, weight, 1e-6) * dy)))(o) / inverse
    assert np.linalg.norm(found - right) < 1e-6 * np.linalg.norm(right)


def test_when_kernels_are_taken() -> None:
    o, z, weight, dy = cases.given((1, 8, 2, 64), "bfloat16")

    def kernels(o: Any, z: Any, weight: Any, implementation: Any) -> list[str]:
        def both(o: Any, z: Any, weight: Any) -> Any:
            y, transpose = jax.vjp(lambda o, z, w: gated_rms_norm(o, z, w, 1e-6, implementation), o, z, weight)
            return y, transpose(y)

        lowered = jax.jit(both).trace(o, z, weight).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r'functions = "([^"]*)"', lowered)

    assert kernels(o, z, weight, None) == ["gated_norm_kernel", "gated_norm_gradients_kernel"]
    assert kernels(o, z, weight, ("cuda", "xla")) == kernels(o, z, weight, "cuda") == kernels(o, z, weight, None)
    assert kernels(o, z, weight, "xla") == kernels(o, z, weight, "reference") == []
    assert kernels(o.astype(jnp.float32), z, weight, None) == []
    assert kernels(o[..., :32], z[..., :32], weight[:32], None) == []
    with pytest.raises(NotImplementedError, match="reverse mode only"):
        jax.jvp(lambda o: gated_rms_norm(o, z, weight, 1e-6, None), (o,), (dy,))


@pytest.mark.parametrize("mode", ["auto", "explicit", "manual", "partly manual"])
def test_cut_over_devices(mode: str) -> None:
    o, z, weight, dy = cases.given((2, 40, 4, 64), "bfloat16")

    def both(o: Any, z: Any, weight: Any, dy: Any) -> Any:
        y, transpose = jax.vjp(lambda o, z, w: gated_rms_norm(o, z, w, 1e-6, None), o, z, weight)
        return y, *transpose(dy)

    expected = jax.jit(both)(o, z, weight, dy)
    mesh, rows = mesh_of(mode), P("x", "y")

    def summed(o: Any, z: Any, weight: Any, dy: Any) -> Any:
        return jax.shard_map(
            both, in_specs=(rows, rows, P(), rows), out_specs=(rows, rows, rows, P()), axis_names={"x", "y"}
        )(o, z, weight, dy)

    def partly(o: Any, z: Any, weight: Any, dy: Any) -> Any:
        of_y = P(None, "y")
        return jax.shard_map(
            both, in_specs=(of_y, of_y, P(), of_y), out_specs=(of_y, of_y, of_y, P()), axis_names={"y"}
        )(o, z, weight, dy)

    function = {"manual": summed, "partly manual": partly}.get(mode, both)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, rows if x.ndim > 1 else P())) for x in (o, z, weight, dy)]
        found = jax.jit(function, compiler_options=FAST)(*placed)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 4e-3 * np.linalg.norm(b)


@pytest.mark.parametrize("members", [False, True], ids=["", "vmap"])
def test_operands_that_are_not_cut_alike(members: bool) -> None:
    """In an Explicit mesh, where gradients are cut as their operands are; and members beside a batch that is cut."""
    o, z, weight, dy = cases.given((2, 40, 4, 64), "bfloat16")

    def gradients(*x: Any) -> Any:
        def of_scale(scale: jax.Array) -> Any:
            return jax.vjp(lambda o, z, w: gated_rms_norm(o * scale, z, w, 1e-6, None), *x)[1](dy)

        scales = jnp.array([0.5, 1], o.dtype)
        return jax.vmap(of_scale)(scales) if members else of_scale(scales[0])

    expected = jax.jit(gradients)(o, z, weight)
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        dy = jax.device_put(dy, NamedSharding(mesh, P("x", None, "y")))
        placed = (
            jax.device_put(o, NamedSharding(mesh, P("x", None, "y"))),
            jax.device_put(z, NamedSharding(mesh, P("x"))),
        )
        found = jax.jit(gradients, compiler_options=FAST)(*placed, weight)
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


def test_vmap() -> None:
    o, z, weight, dy = cases.given((3, 20, 2, 64), "bfloat16")
    o, z, dy = (x[:, None] for x in (o, z, dy))

    def gradient(o: Any, z: Any, weight: Any, dy: Any) -> Any:
        return jax.vjp(lambda o, z, w: gated_rms_norm(o, z, w, 1e-6, None), o, z, weight)[1](dy)

    found = jax.vmap(gradient, (0, 0, None, 0))(o, z, weight, dy)
    for n in range(3):
        for a, b in zip(found, gradient(o[n], z[n], weight, dy[n]), strict=True):
            np.testing.assert_allclose(np.asarray(a[n], np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-2)
    found = jax.vmap(lambda o, z: gated_rms_norm(o, z, weight, 1e-6, None))(o, z)
    assert np.array_equal(found[1], gated_rms_norm(o[1], z[1], weight, 1e-6, None))


def test_every_kernel_of_a_layer_that_a_call_can_ask_for_is_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the convolution too, for all sizes and dtypes; and they are what is looked for before."""
    asked: set[tuple[str, Any]] = set()
    looked_for: set[tuple[str, Any]] = set()

    def launch(steps: Any, inputs: Any, outputs: Any) -> Any:
        asked.update((step.kernel, step.config) for step in steps)
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in outputs.items()}

    monkeypatch.setattr(store, "why_not_at_hand", lambda name, config, *, build: looked_for.add((name, config)))
    monkeypatch.setattr("jax_qla.launch.launch", launch)
    for dtype, value_dim in itertools.product(norm.DTYPES, norm.VALUE_DIMS):
        o, z, weight, dy = cases.given((1, 2, 1, value_dim), dtype)
        jax.eval_shape(functools.partial(norm.forward, eps=1e-6), o, z, weight)
        jax.eval_shape(functools.partial(norm.backward, eps=1e-6), o, z, weight, dy)
        assert norm.why_not(o, z, build=False) is None
    for dtype, marked in itertools.product(conv1d.DTYPES, (False, True)):
        case = convolution_cases.Case(dtype=dtype, ids=marked)
        rows, dys = convolution_cases.given(case)
        jax.eval_shape(functools.partial(conv1d.forward, parts=case.parts, silu=True), rows)
        jax.eval_shape(functools.partial(conv1d.backward, silu=True), rows, dys)
        assert conv1d.why_not(rows.x, rows.weight, case.parts, build=False) is None
    names = {"convolution", "convolution_gradients", "gated_norm"}
    assert asked == looked_for == {(name, config) for name, config in PACKAGED if name in names}
