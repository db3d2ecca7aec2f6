"""What varies over the manual axes of a mesh, as JAX tracks it inside `jax.shard_map`."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

_Tree = TypeVar("_Tree")


def match_varying(tree: _Tree, like: Any) -> _Tree:
    """`tree` with all arrays marked as varying over the manual mesh axes (`jax.shard_map`) that any in `like` does."""
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(like)))

    def mark(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)
