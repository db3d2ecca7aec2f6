"""The RMS norm between the gated delta rule and the output projection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import mesh
from jax_qla.batching import into_the_batch
from jax_qla.implementations import Choice, by_platform, choose_kernels, load, of_a_layer
from jax_qla.refusal import first_order, reverse_mode_only
from jax_qla.varying import match_varying
from jax_qla.widening import widen

_DIMS = ("bthv", "bthv", "v")
"""Shapes of o, z and weight, as `mesh` writes them."""

_FIRST_ORDER = (
    "the gated RMS norm of a layer in 16 bits has first derivatives by reverse mode only, as the layer has; "
    'for others use implementation="reference"'
)


@jax.named_scope("gated_rms_norm")
def gated_rms_norm(
    o: jax.Array, z: jax.Array, weight: jax.Array, eps: float, implementation: str | Sequence[str] | None = "xla"
) -> jax.Array:
    """o / sqrt(mean(o^2) + eps) * weight * silu(z), head by head, computed in float32.

    Args:
        o, z: [B, T, Hv, V], the output of the gated delta rule and its gate.
        weight: [V].
        eps: added to the mean square, a Python number.
        implementation: of the gated delta rule, as in `jax_qla.chunk_gated_delta_rule`. By "cuda" where that may be
            "cuda" and the kernels of the norm can take it (V 64 or 128, 16 bits), and else by "xla".

    Returns:
        [B, T, Hv, V] in o's dtype.
    """
    choice = choose_kernels(functools.partial(load("cuda.norm").why_not, o, z), of_a_layer(implementation))
    layout = None if choice.on_cuda != "cuda" or o.size == 0 else _layout(o, z, weight)
    if layout is None:
        return _plain(o, z, weight, eps)
    # What is differentiated is laid out as its gradients will be.
    aligned = (mesh.align(layout, x, d) for x, d in zip((o, z, widen(weight)), _DIMS, strict=True))
    operands = tuple(reverse_mode_only(x, _FIRST_ORDER) for x in aligned)
    return _with_gradient(_Options(choice, layout, eps), *match_varying(operands, operands))


# Rematerialized: its backward pass starts from o and z in their own dtype instead of float32 intermediate results.
@functools.partial(jax.checkpoint, static_argnums=3)
def _plain(o: jax.Array, z: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = widen(o)
    # No product with rsqrt, whose derivative has its cube, which vanishes for rows longer than 1e12.
    normalized = wide / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normalized * jnp.expand_dims(widen(weight), range(o.ndim - 1)) * jax.nn.silu(widen(z))).astype(o.dtype)


def _layout(*operands: jax.Array) -> mesh.Layout | None:
    """How a call is cut; None where that cannot be seen, so that only the compiler can tell."""
    try:
        return mesh.resolve(None, operands, _DIMS, whole="V")
    except NotImplementedError:
        return None


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is static in a call."""

    choice: Choice
    layout: mesh.Layout
    eps: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(options: _Options, o: jax.Array, z: jax.Array, weight: jax.Array) -> jax.Array:
    return _forward(options, o, z, weight)


@functools.partial(jax.jit, static_argnums=0)
def _forward(options: _Options, *operands: jax.Array) -> jax.Array:
    def implementation(name: str) -> Callable[..., jax.Array]:
        if name == "cuda":
            return functools.partial(load("cuda.norm").forward, eps=options.eps)
        return lambda *operands: _plain(*operands, options.eps)

    def local(axes: mesh.Axes, *operands: jax.Array) -> tuple[jax.Array]:
        return (by_platform(options.choice, implementation, *match_varying(operands, operands)),)

    def on_each_device(*operands: jax.Array) -> tuple[Any, ...]:
        return mesh.on_each_device(
            options.layout, local, operands, _DIMS, _DIMS[:1], (False,), heads=(1, 1), reason=_FIRST_ORDER
        )

    with_vmap = first_order(into_the_batch(on_each_device, (2,), behind=options.layout.batch_is_cut), _FIRST_ORDER)
    (y,) = with_vmap(*operands)
    return y


@functools.partial(jax.jit, static_argnums=0)
def _backward(options: _Options, *operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def in_plain_jax(o: jax.Array, z: jax.Array, weight: jax.Array, dy: jax.Array) -> Any:
        return jax.vjp(lambda *x: _plain(*x, options.eps), o, z, weight)[1](dy)

    def implementation(name: str) -> Callable[..., Any]:
        return functools.partial(load("cuda.norm").backward, eps=options.eps) if name == "cuda" else in_plain_jax

    def local(axes: mesh.Axes, *operands: jax.Array) -> tuple[jax.Array, ...]:
        operands = match_varying(operands, operands)
        d_o, d_z, d_weight = by_platform(options.choice, implementation, *operands)
        # As an array that is cut as o is, each device's at its first row and head, so that the whole is its sum.
        batch, _, heads, _ = d_o.shape
        of_first = jnp.zeros((batch, heads, *d_weight.shape), d_weight.dtype).at[:1, :1].set(d_weight)
        return d_o, d_z, of_first

    def on_each_device(*operands: jax.Array) -> tuple[Any, ...]:
        dims, out_dims = (*_DIMS, _DIMS[0]), (*_DIMS[:2], "bhv")
        return mesh.on_each_device(
            options.layout, local, operands, dims, out_dims, (False, False, True), heads=(1, 1), reason=_FIRST_ORDER
        )

    # The weight's gradient is of a whole batch, so members of a `jax.vmap` are computed one after the other.
    one_by_one = first_order(jax.custom_batching.sequential_vmap(on_each_device), _FIRST_ORDER)
    d_o, d_z, d_weight = one_by_one(*operands)
    return d_o, d_z, jnp.sum(d_weight, axis=(0, 1))


def _save(options: _Options, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _forward(options, *operands), operands


def _from_saved(options: _Options, operands: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
    return _backward(options, *operands, dy)


_with_gradient.defvjp(_save, _from_saved)
