"""Both frameworks' `GatedDeltaNet` behind one interface, so that every test of the layer runs for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jax_qla.nn.equinox
import jax_qla.nn.flax
from jax_qla.nn import GatedDeltaNetConfig, parameter_shapes

Weights = Mapping[str, Any]
Rules = Mapping[str, str | None]
QUICK = {"xla_backend_optimization_level": "0"}
"""Compiles in half the time: nearly all of these tests' time is compilation."""


class Framework(Protocol):
    """What the tests need of a framework; `layer` is its own kind of module."""

    def make(self, config: GatedDeltaNetConfig, weights: Weights | None = None, **options: Any) -> Any:
        """A layer, with the given weights if any."""

    def place(self, layer: Any, mesh: Any, rules: Rules) -> Any:
        """The layer with its parameters cut as rules map their logical axes to those of the mesh."""

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose first argument is a layer and whose others are arrays, compiled."""

    def split(self, layer: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The layer's arrays, and what makes a layer of such."""

    def outputs_and_gradients(self, layer: Any, x: Any, dy: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """layer(x), and for its cotangent dy the gradients by parameter, that of x under the name "x"."""
        arrays, whole = self.split(layer)

        @partial(jax.jit, compiler_options=QUICK)
        def run(arrays: Any, x: jax.Array, dy: jax.Array) -> Any:
            y, transpose = jax.vjp(lambda arrays, x: whole(arrays)(x), arrays, x)
            return y, transpose(dy)

        y, (by_array, by_x) = run(arrays, jnp.asarray(x), jnp.asarray(dy))
        return y, {**whole(by_array).get_weights(), "x": by_x}


class Flax(Framework):
    def make(self, config: GatedDeltaNetConfig, weights: Weights | None = None, **options: Any) -> Any:
        layer = jax_qla.nn.flax.GatedDeltaNet(config, rngs=nnx.Rngs(0), **options)
        if weights is not None:
            layer.set_weights(weights)
        return layer

    def place(self, layer: Any, mesh: Any, rules: Rules) -> Any:
        graphdef, state = nnx.split(layer)
        with nnx.logical_axis_rules(tuple(rules.items())):
            return nnx.merge(graphdef, jax.device_put(state, nnx.get_named_sharding(state, mesh)))

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(layer: Any, *arguments: Any) -> Any:
            graphdef, state = nnx.split(layer)
            return compiled(graphdef, state, *arguments)

        @partial(jax.jit, static_argnums=0, compiler_options=QUICK)
        def compiled(graphdef: Any, state: Any, *arguments: Any) -> Any:
            return function(nnx.merge(graphdef, state), *arguments)

        return run

    def split(self, layer: Any) -> tuple[Any, Callable[[Any], Any]]:
        graphdef, arrays = nnx.split(layer)
        return arrays, partial(nnx.merge, graphdef)


class Equinox(Framework):
    def make(self, config: GatedDeltaNetConfig, weights: Weights | None = None, **options: Any) -> Any:
        layer = jax_qla.nn.equinox.GatedDeltaNet(config, key=jax.random.key(0), **options)
        return layer if weights is None else layer.with_weights(weights)

    def place(self, layer: Any, mesh: Any, rules: Rules) -> Any:
        specs = jax_qla.nn.equinox.logical_axes(layer)
        return jax.device_put(
            layer, jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(*map(rules.get, spec))), specs)
        )

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(layer: Any, *arguments: Any) -> Any:
            arrays, rest = eqx.partition(layer, eqx.is_array)
            return compiled(rest, arrays, *arguments)

        @partial(jax.jit, static_argnums=0, compiler_options=QUICK)
        def compiled(rest: Any, arrays: Any, *arguments: Any) -> Any:
            return function(eqx.combine(arrays, rest), *arguments)

        return run

    def split(self, layer: Any) -> tuple[Any, Callable[[Any], Any]]:
        arrays, rest = eqx.partition(layer, eqx.is_array)
        return arrays, lambda arrays: eqx.combine(arrays, rest)


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
