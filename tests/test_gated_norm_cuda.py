"""The kernels of the gated RMS norm on a card. Needs an H100 or H200."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import norm_cases as cases
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_qla.cuda import norm
from jax_qla.nn.normalization import gated_rms_norm

pytestmark = pytest.mark.gpu

forward = functools.partial(jax.jit, static_argnames="eps")(norm.forward)
backward = functools.partial(jax.jit, static_argnames="eps")(norm.backward)


@pytest.mark.parametrize(("shape", "dtype"), cases.LARGE)
def test_right(shape: tuple[int, ...], dtype: str) -> None:
    cases.check(shape, dtype, forward, backward)


def test_repeatable_on_poisoned_memory() -> None:
    o, z, weight, dy = cases.given((2, 3000, 8, 128), "bfloat16")
    results = []
    for poison in (0.0, jnp.nan, jnp.inf) * 5:
        freed = [jnp.full(o.shape, poison, o.dtype) for _ in range(6)]
        jax.block_until_ready(freed)
        del freed
        found = forward(o, z, weight, eps=1e-6), backward(o, z, weight, dy, eps=1e-6)
        results.append(jax.tree.map(lambda x: np.asarray(x).tobytes(), found))
    assert all(result == results[0] for result in results)


def test_function() -> None:
    """By kernels as by XLA, and it is kernels."""
    o, z, weight, dy = cases.given((2, 100, 4, 128), "bfloat16")

    def both(implementation: Any) -> Any:
        y, transpose = jax.vjp(lambda o, z, w: gated_rms_norm(o, z, w, 1e-6, implementation), o, z, weight)
        return y, transpose(dy)

    found, expected = (jax.jit(functools.partial(both, name))() for name in (None, "xla"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        assert np.linalg.norm(a - b) <= 6e-3 * np.linalg.norm(b)
    lowered = jax.jit(functools.partial(both, None)).lower().as_text()
    assert "gated_norm_kernel" in lowered
    assert "gated_norm_gradients_kernel" in lowered


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs several devices")
@pytest.mark.parametrize("cut", range(3), ids=["batch", "sequence", "heads"])
def test_over_cards(cut: int) -> None:
    """Cut by the compiler, as on one."""
    cards = jax.devices()
    o, z, weight, dy = cases.given((len(cards), 20 * len(cards), 4 * len(cards), 128), "bfloat16")

    def both(o: Any, z: Any, weight: Any, dy: Any) -> Any:
        y, transpose = jax.vjp(lambda o, z, w: gated_rms_norm(o, z, w, 1e-6, None), o, z, weight)
        return y, transpose(dy)

    expected = jax.device_get(jax.jit(both)(o, z, weight, dy))
    mesh = jax.make_mesh((len(cards),), ("x",), axis_types=(AxisType.Auto,))
    spec = P(*("x" if axis == cut else None for axis in range(3)))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(t, NamedSharding(mesh, spec)) for t in (o, z)]
        compiled = jax.jit(both).lower(*placed, weight, dy).compile()
        found = jax.device_get(compiled(*placed, weight, dy))
    assert "gated_norm_gradients_kernel" in (compiled.as_text() or "")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
