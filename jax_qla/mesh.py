"""How a call is spread over a mesh: which mesh axes cut batch, heads and sequence, and how each device gets its part.

This is of any operation that is local in batch and heads. What JAX needs to be told so depends on the mesh:

| axes of the mesh | how each device gets its part | where the axes are read from |
|---|---|---|
| Auto | `custom_partitioning` with a sharding rule for Shardy | the compiler's propagation |
| Auto, named by `MeshAxes` | `jax.shard_map` | the names |
| Explicit | `jax.shard_map` | the operands' types |
| Manual, inside the caller's `jax.shard_map` | it has it; collectives if the sequence axis is named | the names |
| some Manual, others Explicit or named | a nested `jax.shard_map` over the others | the operands' types, the names |

`resolve` finds out which of these a call is, at trace time; `mapped` and `on_each_device` do it. What a device needs of
those before it in the sequence, `rows_before` and others fetch. Shapes are written as strings of one letter an axis: b
batch, t token, h key head (or channel), H value head, n sequence of a packed row, s shard of the sequence, p what goes
by batch and sequence at once; all other letters are axes that stay whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_qla.batching import of_members
from jax_qla.refusal import first_order, refuse_sharded_export, reverse_mode_only
from jax_qla.segments import segments_from_segment_ids
from jax_qla.varying import match_varying

Axes = tuple[str, ...]
"""Names of mesh axes, the first the slowest."""


class MeshAxes(NamedTuple):
    """Names of the mesh axes that cut the operands of a call. Each field is a name, a tuple of names, or None."""

    batch: str | tuple[str, ...] | None = None
    """Axes that cut the batch B."""
    heads: str | tuple[str, ...] | None = None
    """Axes that cut the key heads Hk and the value heads Hv (or the channels of a convolution) alike."""
    sequence: str | tuple[str, ...] | None = None
    """Axes that cut the tokens T, in order: the first devices of the axes have the first part of the sequence."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the operands of a call are cut. Static, and what all functions of this module go by."""

    batch: Axes = ()
    heads: Axes = ()
    sequence: Axes = ()
    mapped: frozenset[str] = frozenset()
    """Axes that this module makes manual by a `jax.shard_map`; those above are among them, or manual already."""
    alone: bool = False
    """Whether the axes of the sequence have one device, which then has all of it."""
    automatic: bool = False
    """Whether the compiler is to find out: all fields above are empty."""
    partly: bool = False
    """Whether it is to find out what Auto axes beside those above cut."""
    mesh: Any = None
    """The mesh to map over where it is not the one in context."""

    @property
    def manual_sequence(self) -> Axes:
        """Axes over which the caller has cut the sequence: what holds for all of it is summed over them by `vjp`."""
        return () if self.mapped.intersection(self.sequence) else self.sequence

    @property
    def batch_is_cut(self) -> bool:
        """Or may be, by the compiler."""
        return self.automatic or bool(self.batch)

    @property
    def sequence_is_cut(self) -> bool:
        """As far as can be seen: not where only the compiler knows."""
        return bool(self.sequence) and not self.alone

    def spec(self, dims: str) -> P:
        """The PartitionSpec, in mapped axes, of an array of this shape."""
        of = {"b": self.batch, "h": self.heads, "H": self.heads, "t": self.sequence, "s": self.sequence}
        of["p"] = self.batch + self.sequence
        return P(*(tuple(axis for axis in of.get(letter, ()) if axis in self.mapped) for letter in dims))


_NAMES = {"b": "B", "t": "T", "h": "Hk", "H": "Hv"}

LOCAL = Layout()
"""Nothing is cut, or all is cut already."""


def axes_of(entry: Any) -> Axes:
    """The mesh axes of an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def entries_of(x: jax.Array) -> tuple[Any, ...]:
    """How x's type says that each of its axes is cut: the entries of a PartitionSpec, of the mesh's Explicit axes.

    Raises:
        NotImplementedError: it says that x is to be summed over devices (unreduced), or its gradient is (reduced).
    """
    spec, summed = jax.typeof(x).sharding.spec, jax.typeof(x).mat.unreduced
    reshard = "jax.sharding.reshard(x, jax.P(...))"
    for what, axes, first in (
        ("unreduced", summed, "jax.lax.psum(x, ...)"),
        ("unreduced", spec.unreduced, reshard),
        ("reduced", spec.reduced, reshard),
    ):
        if axes:
            raise NotImplementedError(
                f"an array of shape {tuple(x.shape)} is {what} over {described(sorted(axes))}, which only JAX's own "
                f"operations take: {first} first"
            )
    return tuple(spec)


def described(axes: Iterable[str]) -> str:
    names = [repr(axis) for axis in axes]
    return ("mesh axis " if len(names) == 1 else "mesh axes ") + ", ".join(names)


def resolve(
    mesh_axes: MeshAxes | None,
    operands: Sequence[jax.Array | None],
    dims: Sequence[str],
    *,
    names: Mapping[str, str] = _NAMES,
    whole: str = "K, V and the number of sequences",
    partly: bool = False,
) -> Layout:
    """Finds out how operands of the given shapes are cut and are to be.

    Args:
        mesh_axes: what the caller says, or None for nothing.
        operands, dims: arrays (None is left out) and their shapes, see the module.
        names: what the axes b, t, h and H are called in messages; and `whole`, what those are that stay whole.
        partly: whether Auto axes beside others, which hide what they cut, stay with the compiler; else refused.

    Raises:
        TypeError, ValueError, NotImplementedError: the names do not fit the mesh, or the mesh the shapes.
    """
    present = [(x, d) for x, d in zip(operands, dims, strict=True) if x is not None]
    mesh, in_context = jax.sharding.get_abstract_mesh(), True
    for x, _ in present:
        of_type = jax.typeof(x).sharding.mesh
        if mesh.empty and not of_type.empty:
            mesh, in_context = of_type, False
    batch, heads, sequence = _check_names(mesh_axes, mesh)
    if mesh.empty:
        # Of one device there is nothing to find out.
        return LOCAL if jax.device_count() == 1 else Layout(automatic=True)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = {axis for axis, kind in kinds.items() if kind == AxisType.Manual}
    explicit = {axis for axis, kind in kinds.items() if kind == AxisType.Explicit}
    hidden: list[str] = []
    if mesh_axes is None:
        if not manual and not explicit:
            return LOCAL if mesh.size == 1 else Layout(automatic=True)
        hidden = [axis for axis, kind in kinds.items() if kind == AxisType.Auto and mesh.shape[axis] > 1]
        if hidden and not partly:
            raise NotImplementedError(
                f"in a mesh that is not Auto as a whole, how the operands are cut over its Auto {described(hidden)} "
                "cannot be seen: name what they cut, as in mesh_axes=jax_qla.MeshAxes(batch='data'), or MeshAxes() "
                "for nothing"
            )
    if (within := manual.intersection(sequence)) and within != set(sequence):
        raise NotImplementedError(
            f"the sequence is cut over {described(sequence)}, of which only {', '.join(sorted(within))} is manual: "
            "all or none must be"
        )
    # What is manual already is local, except that the sequence goes on beyond it.
    batch, heads = (tuple(axis for axis in axes if axis not in manual) for axes in (batch, heads))
    used = {*batch, *heads, *sequence}
    found: dict[str, list[str]] = {"b": list(batch), "t": list(sequence), "h": list(heads)}
    for x, d in present:
        for letter, entry in zip(d, entries_of(x), strict=False):
            for axis in axes_of(entry):
                if axis not in explicit or axis in used:
                    continue
                if letter.lower() in found:
                    found[letter.lower()].append(axis)
                    used.add(axis)
    layout = Layout(
        batch=tuple(found["b"]),
        heads=tuple(found["h"]),
        sequence=tuple(found["t"]),
        mapped=frozenset(kinds) - manual - frozenset(hidden),
        partly=bool(hidden),
        mesh=None if in_context else mesh,
    )
    layout = _fitted(layout, mesh.shape, present, {*batch, *heads, *sequence}, {**_NAMES, **names})
    layout = dataclasses.replace(layout, alone=math.prod(mesh.shape[axis] for axis in layout.sequence) == 1)
    _warn_of_gathering(layout, present, explicit, whole)
    return layout


def _check_names(mesh_axes: MeshAxes | None, mesh: Any) -> tuple[Axes, Axes, Axes]:
    if mesh_axes is None:
        return (), (), ()
    if not isinstance(mesh_axes, MeshAxes):
        raise TypeError(
            f"mesh_axes must be a jax_qla.MeshAxes, such as MeshAxes(batch='data'), got {type(mesh_axes).__name__}"
        )
    seen: set[str] = set()
    for field, entry in zip(mesh_axes._fields, mesh_axes, strict=True):
        if not isinstance(entry, str | tuple | None) or not all(isinstance(axis, str) for axis in axes_of(entry)):
            raise TypeError(f"mesh_axes.{field} must be a name, a tuple of names or None, got {entry!r}")
        for axis in axes_of(entry):
            if axis not in mesh.axis_names:
                there = (
                    f"its axes are {', '.join(map(repr, mesh.axis_names))}" if mesh.axis_names else "there is no mesh"
                )
                hint = "" if mesh.axis_names else "; set one with jax.set_mesh, or call inside jax.shard_map"
                raise ValueError(f"mesh_axes.{field} names {axis!r}, which is no axis of the mesh: {there}{hint}")
            if axis in seen:
                raise ValueError(f"mesh_axes names the mesh axis {axis!r} twice")
            seen.add(axis)
    return axes_of(mesh_axes.batch), axes_of(mesh_axes.heads), axes_of(mesh_axes.sequence)


def _fitted(
    layout: Layout, sizes: Any, present: Sequence[tuple[Any, str]], named: set[str], names: Mapping[str, str]
) -> Layout:
    """`layout` without axes that do not divide what they cut: refused if asked for, else left out with a warning, the
    last first. (An operand's type says none that do not, but operands may be cut over different ones.)"""
    fields = {"b": "batch", "t": "sequence", "h": "heads", "H": "heads"}
    for x, d in present:
        for letter, length in zip(d, x.shape, strict=True):
            if letter not in fields:
                continue
            field, name = fields[letter], names[letter]
            axes = tuple(axis for axis in getattr(layout, field) if axis in layout.mapped)
            kept = axes
            while length % math.prod(sizes[axis] for axis in kept):
                kept = kept[:-1]
            if kept == axes:
                continue
            advice = {
                "t": "pad the sequences to a multiple, with segment_ids 0",
                "b": "use a multiple, or fewer devices for it",
            }.get(letter, "use fewer devices for the heads")
            parts = math.prod(sizes[axis] for axis in axes)
            problem = f"{name} = {length} cannot be cut evenly over the {parts} devices of {described(axes)}"
            lost = axes[len(kept) :]
            if named.intersection(lost):
                raise ValueError(f"{problem}: {advice}")
            warnings.warn(f"{problem}, so it is gathered over {described(lost)}: {advice}", stacklevel=2)
            remaining: Any = {field: tuple(axis for axis in getattr(layout, field) if axis not in lost)}
            layout = dataclasses.replace(layout, **remaining)
    return layout


def _warn_of_gathering(layout: Layout, present: Sequence[tuple[Any, str]], explicit: set[str], whole: str) -> None:
    """Warns of explicit axes that an operand is cut over and will not be."""
    for x, d in present:
        wanted = layout.spec(d)
        for position, entry in enumerate(entries_of(x)):
            lost = [axis for axis in axes_of(entry) if axis in explicit and axis not in axes_of(wanted[position])]
            if not lost:
                continue
            problem = f"an operand of shape {tuple(x.shape)} is cut over {described(lost)} along its axis {position}"
            if d[position] not in "bthH":
                warnings.warn(
                    f"{problem}, and is gathered there: only batch, sequence and heads can be cut, {whole} stay whole",
                    stacklevel=2,
                )
            elif set(lost) & {*layout.batch, *layout.heads, *layout.sequence}:
                warnings.warn(f"{problem}, others along another, and is resharded like those", stacklevel=2)


def align(layout: Layout, x: jax.Array, dims: str) -> jax.Array:
    """x laid out as `layout` says, where its type says how it is laid out (Explicit axes)."""
    sharding = jax.typeof(x).sharding
    # An array from outside of a mesh that is current has none.
    mesh = jax.sharding.get_abstract_mesh() if sharding.mesh.empty else sharding.mesh
    explicit = {a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}
    if not layout.mapped or not explicit:
        return x
    spec = P(*(tuple(axis for axis in axes_of(entry) if axis in explicit) for entry in layout.spec(dims)))
    if tuple(sharding.spec) == tuple(spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def mapped(
    layout: Layout,
    function: Callable[..., Any],
    dims: Sequence[str],
    out_dims: Sequence[str],
    operands: Sequence[Any],
    *,
    differentiable: bool = True,
) -> tuple[Any, ...]:
    """function(*operands) on each device's part of arrays of the given shapes, by `jax.shard_map`.

    Args:
        differentiable: whether JAX is to differentiate it.
    """
    if not layout.mapped:
        return tuple(function(*operands))
    if 0 in operands[0].shape:
        # XLA (jax 0.10.2) does not compile a map none of whose operands has elements.
        function, dims, operands = _with_an_element(function), ("w", *dims), (jnp.zeros(1), *operands)
    context = jax.sharding.get_abstract_mesh()
    nested = not context.empty and bool(context.manual_axes)
    checked = not nested or _checks_varying(context.manual_axes[0])

    def spread(function: Callable[..., Any], dims: Sequence[str], out_dims: Sequence[str]) -> Callable[..., Any]:
        return jax.shard_map(
            lambda *x: tuple(function(*x)),
            mesh=layout.mesh,
            in_specs=tuple(map(layout.spec, dims)),
            out_specs=tuple(map(layout.spec, out_dims)),
            axis_names=set(layout.mapped),
            check_vma=checked,
        )

    call = spread(function, dims, out_dims)
    operands = [align(layout, x, d) for x, d in zip(operands, dims, strict=True)]
    if nested and not differentiable:
        call = _unsplit(call)
    elif nested and any(jnp.issubdtype(x.dtype, jnp.inexact) for x in operands):
        if checked:
            operands = match_varying(operands, operands)
            call = _unsplit_with_gradient(spread, function, dims, out_dims)
        else:
            call = first_order(
                _unsplit(call),
                "inside a jax.shard_map over a part of the mesh's axes and with check_vma=False, this cannot be "
                "differentiated over the others: leave check_vma=True",
            )
    try:
        return tuple(call(*operands))
    except ValueError as error:
        # All axes mapped are the mesh's, unless jax.vmap has taken one away, which no type shows.
        if "to be a subset of mesh.axis_names" not in str(error):
            raise
        raise NotImplementedError(
            "inside a jax.vmap over an axis that an Explicit mesh cuts, this cannot be mapped over the mesh: put that "
            "axis into the batch B in place of jax.vmap, or use a mesh with Auto axes"
        ) from error


def _with_an_element(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose first operand has none, of a zero [1] before its operands."""
    return lambda zero, first, *others: function(first + zero.astype(first.dtype), *others)


def _unsplit_with_gradient(
    spread: Callable[..., Callable[..., Any]],
    function: Callable[..., Any],
    dims: Sequence[str],
    out_dims: Sequence[str],
) -> Callable[..., Any]:
    """spread(function, dims, out_dims), unsplit (see there), and so its gradients by the operands, of any order."""
    call: Any = jax.custom_vjp(_unsplit(spread(function, dims, out_dims)))

    def backward(operands: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
        real = [jnp.issubdtype(x.dtype, jnp.inexact) for x in operands]

        def gradients(*x: jax.Array) -> tuple[jax.Array, ...]:
            arrays = list(x[: len(operands)])

            def of_real(*y: jax.Array) -> tuple[jax.Array, ...]:
                remaining = iter(y)
                return tuple(function(*(next(remaining) if r else z for r, z in zip(real, arrays, strict=True))))

            _, transpose = jax.vjp(of_real, *(z for r, z in zip(real, arrays, strict=True) if r))
            return tuple(transpose(tuple(x[len(operands) :])))

        of_gradients = tuple(d for r, d in zip(real, dims, strict=True) if r)
        differentiable = _unsplit_with_gradient(spread, gradients, (*dims, *out_dims), of_gradients)
        found = iter(differentiable(*operands, *cotangents))
        return tuple(next(found) if r else None for r in real)

    call.defvjp(lambda *operands: (call(*operands), operands), backward)
    reason = (
        "inside a jax.shard_map over a part of the mesh's axes, this has derivatives by reverse mode only (jax.grad, "
        "jax.vjp), over the others: for forward mode, use a jax.shard_map over all axes"
    )
    return lambda *operands: call(*(reverse_mode_only(x, reason) for x in operands))


def _checks_varying(manual_axis: str) -> bool:
    """Whether the surrounding `jax.shard_map` tracks what varies over its axes (check_vma): one inside must, too."""
    return bool(jax.typeof(jax.lax.axis_index(manual_axis)).mat.varying)


def _unsplit(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` as one operation with a rule for `jax.vmap`.

    When JAX splits a program into what is known in the forward pass and the rest (jax.checkpoint, jax.grad), it splits
    `jax.shard_map` too, and of a nested one it makes a program that does not lower (jax 0.10.2). A custom_vmap stays
    whole.
    """
    whole = jax.custom_batching.custom_vmap(call)

    @whole.def_vmap
    def one_more(axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        batched = jax.vmap(call, in_axes=tuple(0 if is_batched else None for is_batched in in_batched))
        results = _unsplit(batched)(*arrays)
        return results, jax.tree.map(lambda _: True, results)

    return whole


def shift(x: jax.Array, distance: int, axes: Axes, *, reverse: bool = False) -> jax.Array:
    """x of the device `distance` before this one along `axes` (after it if `reverse`), zero where there is none."""
    in_order = _in_order_of_the_mesh(axes)
    devices = jax.lax.axis_size(axes)
    if distance >= devices:
        return match_varying(jnp.zeros_like(x), x)
    # `ppermute` numbers devices in the mesh's order of its axes, whatever order it is given.
    sizes = [jax.lax.axis_size(axis) for axis in in_order]
    number = np.arange(devices).reshape(sizes).transpose([in_order.index(axis) for axis in axes]).ravel().tolist()
    pairs = zip(number[:-distance], number[distance:], strict=True)
    return jax.lax.ppermute(x, in_order, [(j, i) if reverse else (i, j) for i, j in pairs])


def _in_order_of_the_mesh(axes: Axes) -> Axes:
    """The same axes. Where there is no mesh to ask, in what a compiler partitions, they are so given."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(sorted(axes, key=names.index)) if set(axes) <= set(names) else axes


def rows_before(x: jax.Array, rows: int, axes: Axes) -> jax.Array:
    """The `rows` rows [B, rows, ...] before this shard of x [B, T, ...], zero before the first shard."""
    devices, tokens = jax.lax.axis_size(axes), x.shape[1]
    parts: list[jax.Array] = []
    distance = 0
    while rows > 0:
        distance += 1
        taken = min(rows, tokens)
        if tokens == 0 or distance >= devices:
            first = jnp.zeros((x.shape[0], rows, *x.shape[2:]), x.dtype)
            return jnp.concatenate([match_varying(first, x), *parts], axis=1)
        parts.insert(0, shift(x[:, tokens - taken :], distance, axes))
        rows -= taken
    return jnp.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnames="layout")
def previous_ids(layout: Layout, segment_ids: jax.Array) -> jax.Array:
    """The segment id before each token, int32 [B, T], 0 before a row's first."""

    def previous(ids: jax.Array) -> tuple[jax.Array]:
        if ids.shape[1] == 0:
            return (ids,)
        first = jnp.zeros_like(ids[:, :1])
        if layout.sequence:
            first = rows_before(ids, 1, layout.sequence)
        return (jnp.concatenate([first, ids[:, :-1]], axis=1),)

    return mapped(layout, previous, ("bt",), ("bt",), (segment_ids,))[0]


@functools.partial(jax.jit, static_argnames=("layout", "max_segments"))
def segments_of_rows(layout: Layout, segment_ids: jax.Array, max_segments: int) -> jax.Array:
    """int32 [B, max_segments, 2]: start and end of each run of equal non-zero ids, counted from its row's first token.

    The ids of a row are gathered, 4 bytes a token.
    """

    def find(ids: jax.Array) -> tuple[jax.Array]:
        if layout.sequence:
            parts = jax.lax.axis_size(layout.sequence)
            ids_everywhere = jnp.zeros((parts, *ids.shape), ids.dtype)
            index = jax.lax.axis_index(layout.sequence)
            # A sum of parts in place, which unlike a gather counts as the same on all devices.
            ids_everywhere = jax.lax.psum(ids_everywhere.at[index].set(ids), layout.sequence)
            ids = jnp.moveaxis(ids_everywhere, 0, 1).reshape(ids.shape[0], parts * ids.shape[1])
        return (segments_from_segment_ids(ids, max_segments),)

    return mapped(layout, find, ("bt",), ("bne",), (segment_ids,))[0]


class Flat(NamedTuple):
    """Arrays of a tree without its Nones, their shapes, and where they were."""

    arrays: tuple[jax.Array, ...]
    dims: tuple[str, ...]
    rebuild: Callable[[Sequence[Any]], list[Any]]


def flattened(operands: Sequence[Any], dims: Sequence[Any]) -> Flat:
    """Operands are arrays, None, or trees of arrays whose `dims` are tuples, perhaps of more."""
    tree = jax.tree.structure(tuple(operands))
    pairs = [
        pair
        for x, d in zip(operands, dims, strict=True)
        if x is not None
        for pair in (zip(jax.tree.leaves(x), d, strict=False) if isinstance(d, tuple) else ((x, d),))
    ]
    arrays, shapes = zip(*pairs, strict=True)
    return Flat(arrays, shapes, lambda flat: list(jax.tree.unflatten(tree, list(flat))))


def on_each_device(
    layout: Layout,
    function: Callable[..., Any],
    operands: Sequence[Any],
    dims: Sequence[Any],
    out_dims: tuple[str, ...],
    sums: tuple[bool, ...],
    heads: tuple[int, int],
    reason: str,
) -> tuple[Any, ...]:
    """function(axes, *operands) on each device's part.

    `function` takes the axes over which the sequence is cut, and returns a tuple of arrays of shapes `out_dims`, those
    of `sums` to be summed over these axes. `heads`: the numbers of key and value heads. `reason`: what who
    differentiates it is told, where the compiler cuts it.
    """
    flat = flattened(operands, dims)
    rebuild = flat.rebuild  # all that outlives a trace: the arrays may be of it

    def local(axes: Axes, summed: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        results = function(axes, *rebuild(arrays))
        if not (axes and summed):
            return tuple(results)
        return tuple(jax.lax.psum(x, axes) if is_sum else x for x, is_sum in zip(results, sums, strict=True))

    if layout.automatic:
        return partitioned(local, flat.dims, out_dims, heads, reason)(*flat.arrays)
    part = functools.partial(local, layout.sequence, bool(layout.mapped.intersection(layout.sequence)))
    return mapped(layout, part, flat.dims, out_dims, flat.arrays, differentiable=False)


def partitioned(
    local: Callable[..., tuple[jax.Array, ...]],
    dims: tuple[str, ...],
    out_dims: tuple[str, ...],
    heads: tuple[int, int],
    reason: str,
    mapped_axes: str = "",
) -> Callable[..., tuple[jax.Array, ...]]:
    """local(axes, summed, *arrays) as one operation that Shardy partitions, with a rule for `jax.vmap`.

    `heads`: the numbers of key and value heads.
    `reason`: what who differentiates it is told.
    `mapped_axes`: a letter for each axis of `jax.vmap` that leads all arrays, before those that `dims` say.
    """
    lead = len(mapped_axes)

    def folded(axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The axes of `jax.vmap` go into the batch, on each device for itself."""
        if lead == 0:
            return local(axes, True, *arrays)
        # No size is left open: of an array without elements it could not be told.
        sizes, batch = arrays[0].shape[:lead], arrays[0].shape[lead + dims[0].index("b")]

        def fold(x: jax.Array, shape: str) -> jax.Array:
            at = shape.index("b")
            x = jnp.moveaxis(x, range(lead), range(at, at + lead))
            return x.reshape(*x.shape[:at], math.prod(sizes) * batch, *x.shape[at + lead + 1 :])

        def unfold(x: jax.Array, shape: str) -> jax.Array:
            at = shape.index("b")
            x = x.reshape(*x.shape[:at], *sizes, batch, *x.shape[at + 1 :])
            return jnp.moveaxis(x, range(at, at + lead), range(lead))

        results = local(axes, True, *map(fold, arrays, dims))
        return tuple(map(unfold, results, out_dims))

    def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return folded((), *arrays)

    operation = custom_partitioning(whole)
    operation.def_partition(
        partition=functools.partial(_partition, folded, mapped_axes, dims, out_dims, jax.sharding.get_abstract_mesh()),
        # JAX decodes no sharding by a part of a mesh axis, which Shardy chooses where an axis has more devices than
        # there are heads.
        decode_shardings=False,
        sharding_rule=_sharding_rule(mapped_axes, dims, out_dims, heads),
    )
    # Within the custom_vmap too: of what is around it, differentiation loses sight in a scan.
    refusing = first_order(lambda *arrays: operation(refuse_sharded_export(arrays[0]), *arrays[1:]), reason)

    def together(_: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        letter = chr(ord("A") + 25 - lead)
        return partitioned(local, dims, out_dims, heads, reason, letter + mapped_axes)(*arrays)

    return first_order(of_members(lambda *arrays: refusing(*arrays), together), reason)


def _sharding_rule(mapped_axes: str, dims: tuple[str, ...], out_dims: tuple[str, ...], heads: tuple[int, int]) -> Any:
    """The rule for Shardy: all letters are factors, a value head being (key head, one of its r value heads).

    `heads`: the numbers of key and value heads.
    """
    ratio = heads[1] // heads[0]
    # Shardy wants no factor of size 1 in a compound.
    compound = heads[0] > 1 and ratio > 1
    value_head = "(h r)" if compound else "h" if ratio == 1 else "fH"

    def factors(shape: str) -> str:
        names = (value_head if letter == "H" else letter if letter == "h" else f"f{letter}" for letter in shape)
        return " ".join(names)

    def rule(mesh: Any, value_types: Any, result_types: Any) -> Any:
        def array(shape: str) -> str:
            return factors(mapped_axes + shape)

        notation = ", ".join(map(array, dims)) + " -> " + ", ".join(map(array, out_dims))
        # In order of appearance, as Shardy wants them.
        letters = dict.fromkeys("".join((*dims, *out_dims)))
        whole = tuple(f"f{letter}" for letter in letters if letter not in "bthH")
        return notation, {"need_replication_factors": whole} | ({"r": ratio} if compound else {})

    return rule


def _partition(
    folded: Callable[..., Any],
    mapped_axes: str,
    dims: tuple[str, ...],
    out_dims: tuple[str, ...],
    context: AbstractMesh,
    mesh: Any,
    arguments: Any,
    results: Any,
) -> tuple[Any, Any, Any, Any]:
    """What each device computes, once the compiler has decided how the operands are cut.

    Args:
        context: the current mesh of the call. Where a program has no other shardings than constraints, JAX names none.
    """
    if mesh.empty:
        mesh = context
    found: dict[str, Axes] = {}
    used: set[str] = set()
    shapes = [
        (x, mapped_axes + d) for x, d in (*zip(arguments, dims, strict=True), *zip(results, out_dims, strict=True))
    ]
    for x, d in shapes:
        for letter, axes in zip(d, _axes_that_cut(x, mesh), strict=True):
            letter = "h" if letter == "H" else letter
            if axes and letter in "bth" + mapped_axes and letter not in found and not used.intersection(axes):
                # What is computed knows no mesh, so shards follow each other in its order (`shift`).
                found[letter] = tuple(sorted(axes, key=mesh.axis_names.index)) if letter == "t" else axes
                used.update(axes)
    for x, d in shapes:
        for letter, length in zip(d, x.shape, strict=True):
            letter = "h" if letter == "H" else letter
            axes = found.get(letter, ())
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if length % parts:
                warnings.warn(
                    f"{length} cannot be cut evenly over the {parts} devices of {described(axes)}: operands "
                    f"of shape {tuple(x.shape)} are gathered there",
                    stacklevel=2,
                )
                del found[letter]

    def sharding(shape: str) -> NamedSharding:
        entries = [found.get("h" if letter == "H" else letter) for letter in mapped_axes + shape]
        return NamedSharding(mesh, P(*entries))

    return (
        mesh,
        functools.partial(folded, found.get("t", ())),
        tuple(map(sharding, out_dims)),
        tuple(map(sharding, dims)),
    )


def _axes_that_cut(x: Any, mesh: Any) -> list[Axes]:
    """The mesh axes that cut each axis of x, a ShapeDtypeStruct; none where a part of a mesh axis does."""
    # Of any size that all numbers of parts divide, by device in the order of the mesh.
    indices = x.sharding.devices_indices_map((mesh.size,) * x.ndim).values()
    starts = np.array([[part.start or 0 for part in index] for index in indices])
    starts = starts.reshape(*mesh.shape.values(), x.ndim)
    found: list[Axes] = []
    lost: dict[int, Axes] = {}
    for d in range(x.ndim):
        steps = {axis: int(np.ptp(starts[..., d], axis=i).max()) for i, axis in enumerate(mesh.axis_names)}
        axes = tuple(sorted((axis for axis, step in steps.items() if step), key=lambda axis: -steps[axis]))
        if len(np.unique(starts[..., d])) != math.prod(mesh.shape[axis] for axis in axes):
            lost[d], axes = axes, ()
        found.append(axes)
    if lost:
        warnings.warn(
            f"an operand of shape {tuple(x.shape)} is cut along its axis "
            f"{' and '.join(map(str, lost))} over parts of {described(dict.fromkeys(sum(lost.values(), ())))}, and is "
            "gathered there: use no more devices than there are key heads to cut heads",
            stacklevel=2,
        )
    return found
