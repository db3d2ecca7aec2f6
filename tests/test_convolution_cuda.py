"""The kernels of the short convolution on a card: right, repeatable, and on poisoned memory. Needs an H100 or H200."""

from __future__ import annotations

import functools
from typing import Any

import convolution_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_qla
from jax_qla.cuda import conv1d
from jax_qla.nn.convolution import causal_convolution

pytestmark = pytest.mark.gpu

forward = functools.partial(jax.jit, static_argnames=("parts", "silu"))(conv1d.forward)
backward = functools.partial(jax.jit, static_argnames="silu")(conv1d.backward)


@pytest.mark.parametrize("case", cases.LARGE, ids=str)
def test_right(case: cases.Case) -> None:
    cases.check(case, forward, backward)


def test_repeatable_on_poisoned_memory() -> None:
    case = cases.Case(batch=2, tokens=1000, parts=(256, 256, 512), ids=True, before=True, bias=True)
    rows, dys = cases.given(case)
    results = []
    for poison in (0.0, jnp.nan, jnp.inf) * 5:
        freed = [jnp.full(x.shape, poison, x.dtype) for x in (*dys, rows.x, rows.x) for _ in range(3)]
        jax.block_until_ready(freed)
        del freed
        found = forward(rows, parts=case.parts, silu=True), backward(rows, dys, silu=True)
        results.append(jax.tree.map(lambda x: np.asarray(x).tobytes(), found))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("packed", [False, True])
def test_public_function(packed: bool) -> None:
    """By "cuda" as by "xla", forward and backward, with a tail that goes on."""
    random = np.random.default_rng(0)
    x, dy = (jnp.asarray(random.standard_normal((2, 300, 192)), jnp.bfloat16) for _ in range(2))
    weight, bias = jnp.asarray(random.standard_normal((4, 192)), jnp.bfloat16), jnp.zeros(192, jnp.bfloat16)
    more: dict[str, Any] = {"initial_tail": x[:, -3:]}
    if packed:
        more = {"segment_ids": jnp.asarray(np.sort(random.integers(0, 9, (2, 300)), axis=1), jnp.int32)}

    def both(implementation: str) -> Any:
        def function(x: Any, weight: Any, bias: Any) -> Any:
            option: dict[str, Any] = {"activation": "silu", "output_final_tail": True, "implementation": implementation}
            return jax_qla.causal_conv1d(x, weight, bias, **more, **option)

        (y, tail), transpose = jax.vjp(function, x, weight, bias)
        return y, tail, transpose((dy, jnp.ones_like(tail)))

    found, expected = (jax.jit(functools.partial(both, name))() for name in ("cuda", "xla"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        assert np.linalg.norm(a - b) <= 6e-3 * np.linalg.norm(b)
    lowered = jax.jit(functools.partial(both, "cuda")).lower().as_text()
    assert "convolution_kernel" in lowered
    assert "convolution_gradients_kernel" in lowered


def test_vmap() -> None:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((3, 2, 100, 64)), jnp.bfloat16)
    weights = jnp.asarray(random.standard_normal((3, 4, 64)), jnp.float32)

    def loss(x: Any, weight: Any) -> Any:
        y, _ = jax_qla.causal_conv1d(x, weight, activation="silu", implementation="cuda")
        return jnp.sum(y.astype(jnp.float32))

    for axes, given in (((0, None), (x, weights[0])), ((0, 0), (x, weights))):
        found = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), axes))(*given)
        for n in range(3):
            one = jax.grad(loss, (0, 1))(x[n], given[1] if axes[1] is None else weights[n])
            for a, b in zip(found, one, strict=True):
                np.testing.assert_allclose(
                    np.asarray(a[n], np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-5
                )


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs several devices")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", ["batch", "sequence", "channels"])
def test_parts_over_cards(cut: str, packed: bool) -> None:
    """Cut by the compiler, as on one; unless it cuts channels, parts are neither cut out nor put together."""
    random, cards = np.random.default_rng(0), jax.devices()
    parts, tokens = (128, 128, 256), 320 * len(cards)
    x = jnp.asarray(random.standard_normal((len(cards), tokens, sum(parts))), jnp.bfloat16)
    weight = jnp.asarray(random.standard_normal((4, sum(parts))), jnp.float32)
    ids = jnp.asarray(np.sort(random.integers(0, 9, x.shape[:2]), axis=1), jnp.int32) if packed else None

    def both(x: Any, weight: Any, ids: Any) -> Any:
        y, transpose = jax.vjp(lambda x, weight: causal_convolution(x, weight, None, ids, parts=parts), x, weight)
        return y, transpose(y)

    expected = jax.device_get(jax.jit(both)(x, weight, ids))
    mesh = jax.make_mesh((len(cards),), ("x",), axis_types=(AxisType.Auto,))
    spec = {"batch": P("x"), "sequence": P(None, "x"), "channels": P(None, None, "x")}[cut]
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = jax.jit(both).lower(placed, weight, ids).compile()
        found = jax.device_get(compiled(placed, weight, ids))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
    text = compiled.as_text() or ""
    assert "convolution_gradients_kernel" in text
    if cut != "channels":
        assert "select_n" not in text
        assert "concatenate(" not in text
