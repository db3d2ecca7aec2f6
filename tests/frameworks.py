"""Both frameworks' `GatedDeltaNet` behind one interface, so that every test of the layer runs for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import equinox as eqx
import jax
import numpy as np
from flax import nnx

import jax_qla.nn.equinox
import jax_qla.nn.flax
from jax_qla.nn import GatedDeltaNetConfig, parameter_shapes

Weights = Mapping[str, Any]


class Framework(Protocol):
    """What the tests need of a framework; `layer` is its own kind of module."""

    def make(self, config: GatedDeltaNetConfig, weights: Weights | None = None, **options: Any) -> Any:
        """A layer, with the given weights if any."""

    def jit(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, whose first argument is a layer, compiled."""

    def gradients(self, loss: Callable[[Any, jax.Array], jax.Array], layer: Any, x: jax.Array) -> dict[str, jax.Array]:
        """The gradients of loss(layer, x) by parameter, and of x under the name "x"."""


class Flax:
    def make(self, config: GatedDeltaNetConfig, weights: Weights | None = None, **options: Any) -> Any:
        layer = jax_qla.nn.flax.GatedDeltaNet(config, rngs=nnx.Rngs(0), **options)
        if weights is not None:
            layer.set_weights(weights)
        return layer

    def jit(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return nnx.jit(method)

    def gradients(self, loss: Callable[[Any, jax.Array], jax.Array], layer: Any, x: jax.Array) -> dict[str, jax.Array]:
        graphdef, parameters = nnx.split(layer)
        function = jax.jit(jax.grad(lambda parameters, x: loss(nnx.merge(graphdef, parameters), x), argnums=(0, 1)))
        by_parameter, by_x = function(parameters, x)
        return {**nnx.merge(graphdef, by_parameter).get_weights(), "x": by_x}


class Equinox:
    def make(self, config: GatedDeltaNetConfig, weights: Weights | None = None, **options: Any) -> Any:
        layer = jax_qla.nn.equinox.GatedDeltaNet(config, key=jax.random.key(0), **options)
        return layer if weights is None else layer.with_weights(weights)

    def jit(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return eqx.filter_jit(method)

    def gradients(self, loss: Callable[[Any, jax.Array], jax.Array], layer: Any, x: jax.Array) -> dict[str, jax.Array]:
        function = eqx.filter_jit(eqx.filter_grad(lambda both: loss(*both)))
        by_layer, by_x = function((layer, x))
        return {**by_layer.get_weights(), "x": by_x}


FRAMEWORKS: dict[str, Framework] = {"flax": Flax(), "equinox": Equinox()}


def random_weights(config: GatedDeltaNetConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of which none is at a special value: activations stay near 1 and no norm's weight is 1."""
    generator = np.random.default_rng(seed)

    def of(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = generator.standard_normal(shape)
        match name:
            case "A_log" | "dt_bias":
                return values
            case "norm":
                return 1 + 0.3 * values
            case _:
                return values * shape[0] ** -0.5

    return {name: of(name, shape).astype(np.float32) for name, shape in parameter_shapes(config).items()}


def assert_close(computed: Any, expected: Any, limit: float, name: str = "") -> None:
    """The whole differs by at most `limit` of its norm, and no element by more than `limit` of the largest one."""
    computed, expected = np.asarray(computed, np.float64), np.asarray(expected, np.float64)
    assert computed.shape == expected.shape, f"{name}: {computed.shape} instead of {expected.shape}"
    assert np.isfinite(expected).all()
    assert np.isfinite(computed).all()
    difference = np.abs(computed - expected)
    assert np.linalg.norm(difference) <= limit * np.linalg.norm(expected), name
    assert difference.max(initial=0) <= limit * np.abs(expected).max(initial=0), name
