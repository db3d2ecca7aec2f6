"""Training on several devices, as the option --mesh says: `--mesh data=2,seq=2` cuts batches in two and windows in two.

The mesh is made the current one (`jax.set_mesh`), with Auto axes: the training cuts its batches with `cut`, keeps its
parameters whole with `whole`, and the compiler derives the rest. How jax_qla takes part is told in docs/sharding.md.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import TypeVar

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

AXES = ("data", "seq")
"""The axis that cuts the batch, and the one that cuts the sequence."""

_Tree = TypeVar("_Tree")


def sizes(text: str) -> dict[str, int]:
    """The argument of --mesh: "data=2,seq=2" -> {"data": 2, "seq": 2}; an axis left out has size 1."""
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in found or not size.isdecimal() or int(size) == 0:
            raise argparse.ArgumentTypeError(f"must be like data=2,seq=2, got {text!r}")
        found[axis] = int(size)
    return {axis: found.get(axis, 1) for axis in AXES}


def use(mesh: dict[str, int] | None) -> contextlib.AbstractContextManager[object]:
    """Makes a mesh of these sizes the current one; without sizes, does nothing."""
    if mesh is None:
        return contextlib.nullcontext()
    devices = math.prod(mesh.values())
    # On a machine without GPUs the devices are made here. Once JAX has computed anything it is too late for that.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", devices)
    if jax.device_count() < devices:
        raise SystemExit(f"--mesh: {devices} devices are needed, and there are {jax.device_count()}")
    return jax.set_mesh(jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh)))


def cut(x: jax.Array) -> jax.Array:
    """x [B, T] cut over the current mesh; as it is where there is none."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, P(*AXES))


def parts() -> int:
    """Into how many parts the current mesh cuts the sequence."""
    return int(jax.sharding.get_abstract_mesh().shape.get("seq", 1))


def by_heads(x: jax.Array) -> jax.Array:
    """x [B, T, heads, d] with whole sequences: the devices that cut the sequence cut the heads instead."""
    return x if parts() == 1 else jax.lax.with_sharding_constraint(x, P("data", None, "seq"))


def from_tokens_to_heads(x: jax.Array) -> jax.Array:
    """x [B, T, heads, d], which `cut` cuts, as `by_heads` does; each device sends a part to each other (all-to-all)."""
    # Both are said, on the way back too: of one the compiler knows only where x goes, and may gather it instead.
    return by_heads(cut(x))


def from_heads_to_tokens(x: jax.Array) -> jax.Array:
    """The way back."""
    return cut(by_heads(x))


def whole_rows(x: jax.Array) -> jax.Array:
    """x [B, T] with whole sequences on every device that has a part of them."""
    return x if parts() == 1 else jax.lax.with_sharding_constraint(x, P("data"))


def whole(tree: _Tree) -> _Tree:
    """Arrays that every device of the current mesh holds whole."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    constrained: _Tree = jax.lax.with_sharding_constraint(tree, P())
    return constrained
