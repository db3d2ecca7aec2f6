"""What a layer projects from its input, and how its linear layers go over a mesh, whichever linear layers do it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_qla.checks import known_dtype
from jax_qla.convolution import cut
from jax_qla.mesh import Axes, axes_of, described, entries_of, resolve
from jax_qla.nn.config import GatedDeltaNetConfig

_MANY_TOKENS = 256
"""From so many on what XLA joins for merged products, and cuts out of their results, are copies in memory."""


class Projected(NamedTuple):
    """The projections of the input [B, T, D]."""

    qkv: tuple[jax.Array, ...]
    """All heads of q, then of k, then of v: one array [B, T, 2 * Hk * K + Hv * V], or three, [B, T, Hk * K] twice and
    [B, T, Hv * V]. Three where they come by key head: devices that have some of the heads then need nothing of others,
    where a part of the one array would be q alone."""
    z: jax.Array
    """[B, T, Hv * V], the output gate."""
    b: jax.Array
    """[B, T, Hv], from which beta comes."""
    a: jax.Array
    """[B, T, Hv], from which the decay comes."""


def check_input(x: Any, config: GatedDeltaNetConfig, hint: str = "") -> None:
    """Whether x is an input of the layer. `hint` ends the message.

    Raises:
        TypeError: it is no array, a shape without values, or not of real numbers.
        ValueError: it has another shape than [B, T, D].
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError("x must have values, got a jax.ShapeDtypeStruct; for shapes alone use jax.eval_shape")
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"x must be an array [B, T, {config.hidden_size}], got {type(x).__name__}")
    dtype = known_dtype(x)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"x must be of real numbers, got {x.dtype}")
    if len(x.shape) != 3 or x.shape[-1] != config.hidden_size:
        raise ValueError(f"x must have shape [B, T, {config.hidden_size}], got {tuple(x.shape)}{hint}")


def sharding_like(x: jax.Array, *others: jax.Array) -> NamedSharding | None:
    """How x is cut over the Explicit axes of its mesh, or of the others' if it has none; None without such axes.

    The result of the output projection is to be cut so, like the layer's input x, which it is added to.
    """
    mesh = _explicit_mesh(x, *others)
    return None if mesh is None else NamedSharding(mesh, P(*entries_of(x)))


def dot_general_of(name: str) -> Callable[..., jax.Array]:
    """What the linear layer of this name computes its product by: `dot_general`, z's by itself.

    Nothing else would be merged then: the gates' products are too small, but for each other, which spares one.
    """
    return dot_general_alone if name == "in_proj_z" else dot_general


def dot_general_alone(*operands: Any, **options: Any) -> jax.Array:
    """`dot_general` with `alone`."""
    return dot_general(*operands, alone=True, **options)


def dot_general(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: Any,
    *,
    out_sharding: Any = None,
    alone: bool = False,
    **options: Any,
) -> jax.Array:
    """`jax.lax.dot_general` of x [B, T, D] and a kernel [D, features], also where Explicit axes cut any axes of both.

    Of the kernel, what is cut like what it meets stays so: its D like x's, its features like the result's. The rest is
    gathered, as fully sharded data parallelism means, and its gradient scattered.

    Args:
        out_sharding: of the result; None for x's with the features cut as the kernel's, but over axes that cut B or T.
        alone: whether the compiler may not merge it with other products of x, if there are many tokens. XLA for GPUs
            makes one of those that share an operand, if one of them is small (its pass "dot-merger"): it joins their
            kernels before and cuts the result after, which of many tokens takes longer than one product spares.
    """
    mesh = _explicit_mesh(x, kernel)
    if mesh is not None:
        *rows, inner = entries_of(x)
        contracted, features = entries_of(kernel)
        if out_sharding is None:
            out_sharding = NamedSharding(mesh, P(*rows, _untaken(features, rows)))
        outer = out_sharding.spec[-1]
        met = P(
            contracted if axes_of(contracted) == axes_of(inner) else None,
            outer if set(axes_of(outer)) <= set(axes_of(features)) else None,
        )
        if met != P(contracted, features):
            kernel = jax.sharding.reshard(kernel, NamedSharding(mesh, met))

    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, kernel, dimension_numbers, out_sharding=out_sharding, **options)

    # Rematerialized, so that what is kept for the backward pass is x, and not what the barrier makes of it beside it.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def product_alone(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return product(jax.lax.optimization_barrier(x), kernel)

    tokens: Any = x.shape[0] * x.shape[1]
    if mesh is None and x.shape[:2] == (1, 1):
        # Of one row XLA for GPUs writes all multiples to memory, and adds them up from there: twice the time.
        return product(jnp.broadcast_to(x, (2, *x.shape[1:])), kernel)[:1]
    many = isinstance(tokens, int) and tokens >= _MANY_TOKENS  # of a symbolic batch, for decoding, few
    return (product_alone if alone and many else product)(x, kernel)


def beside(weight: jax.Array, x: jax.Array) -> jax.Array:
    """A weight [Hv] to be combined with x [B, T, Hv]: gathered over Explicit axes that cut x's B or T."""
    mesh = _explicit_mesh(weight, x)
    if mesh is None:
        return weight
    (entry,) = entries_of(weight)
    left = _untaken(entry, entries_of(x)[:-1])
    return weight if left == axes_of(entry) else jax.sharding.reshard(weight, NamedSharding(mesh, P(left)))


def heads_may_be_cut(projected: Projected) -> bool:
    """Whether devices have, or the compiler may give them, parts of the heads only."""
    qkv = projected.qkv
    layout = resolve(None, qkv, ("bth",) * len(qkv), names={"h": "channels"}, whole="the filter")
    return layout.automatic or bool(layout.heads)


def cut_like(x: jax.Array, parts: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """x [..., channels], which is small, cut into as many channels as each of `parts` has.

    Of several parts every device has all of x first: what it has of each part are other channels than of x.
    """
    if len(parts) == 1:
        return [x]
    x = jnp.asarray(x)  # NumPy's of a cache or layer that was kept on the host
    sizes = [part.shape[-1] for part in parts]
    mesh = _explicit_mesh(x)
    if mesh is not None:
        x = jax.sharding.reshard(x, NamedSharding(mesh, P(*entries_of(x)[:-1], None)))
        return cut(x, sizes)
    # Indexed, not sliced, for of a slice that is cut the compiler cuts x likewise.
    return [
        x.at[..., jnp.arange(*pair)].get(indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds")
        for pair in itertools.pairwise(itertools.accumulate(sizes, initial=0))
    ]


def _untaken(entry: Any, others: Iterable[Any]) -> Axes:
    """The mesh axes of an entry of a PartitionSpec without those of others, which one array cannot have twice."""
    taken = {axis for other in others for axis in axes_of(other)}
    return tuple(axis for axis in axes_of(entry) if axis not in taken)


def _explicit_mesh(*arrays: jax.Array) -> Any:
    """The mesh of these arrays, or else the current one, if it has Explicit axes; otherwise None."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    mesh = next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())
    return mesh if AxisType.Explicit in mesh.axis_types else None


def by_heads(x: jax.Array, name: str, heads: int, size: int) -> jax.Array:
    """x [B, T, heads * size] as [B, T, heads, size].

    Raises:
        ValueError: Explicit axes cut the columns finer than the heads, whose number `name` is.
    """
    mesh = _explicit_mesh(x)
    axes = () if mesh is None else axes_of(entries_of(x)[-1])
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if heads > 1 and heads % parts:
        raise ValueError(
            f"{name} = {heads} cannot be cut evenly over the {parts} devices of {described(axes)}, which cut the "
            "columns of the layer's projections: use fewer devices for the columns, or an Auto mesh"
        )
    # No size is left open: of an array without elements it could not be told.
    return x.reshape(*x.shape[:-1], heads, size)


def arrange(outputs: Mapping[str, jax.Array], config: GatedDeltaNetConfig) -> Projected:
    """Brings the outputs of `config.input_projections` into one form.

    A fused projection is grouped by key head: q, k, and then v and z of the value heads that read this key head; in
    the same way b, and then a.

    Args:
        outputs: [B, T, features] of every input projection.
    """
    if config.projections == "split":
        qkv, *others = (outputs[name] for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
        return Projected((qkv,), *others)
    qkvz, ba = outputs["in_proj_qkvz"], outputs["in_proj_ba"]
    shape = qkvz.shape[:-1]
    heads, key_dim = config.num_key_heads, config.key_head_dim
    ratio = config.num_value_heads // heads
    value_dim = ratio * config.value_head_dim
    qkvz = by_heads(qkvz, "Hk", heads, 2 * (key_dim + value_dim))
    q, k, v, z = jnp.split(qkvz, [key_dim, 2 * key_dim, 2 * key_dim + value_dim], axis=-1)
    b, a = jnp.split(by_heads(ba, "Hk", heads, 2 * ratio), [ratio], axis=-1)
    q, k, v, z, b, a = (x.reshape(*shape, heads * x.shape[-1]) for x in (q, k, v, z, b, a))
    return Projected((q, k, v), z, b, a)
