"""`jax.vmap` of what has a batch already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla.varying import match_varying


def of_members(
    function: Callable[..., Any], together: Callable[..., Any], whole: Collection[int] = ()
) -> Callable[..., Any]:
    """`function` of arrays, or trees of these, with a rule for `jax.vmap`.

    Args:
        together: computes n members, one at the least, given n and the operands [n, ...]; results are [n, ...] too.
        whole: the positions of operands that `together` takes as `function` does. Where `jax.vmap` maps one of these,
            members are computed one after the other.
    """
    batched = jax.custom_batching.custom_vmap(function)

    @batched.def_vmap
    def one_more(axis_size: int, in_batched: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        def spread(x: jax.Array, is_mapped: bool) -> jax.Array:
            return x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))

        one_by_one = any(in_batched[n] is True for n in whole)
        kept = () if axis_size == 0 or one_by_one else whole
        operands = tuple(
            x if n in kept else jax.tree.map(spread, x, is_mapped)
            for n, (x, is_mapped) in enumerate(zip(operands, in_batched, strict=True))
        )
        if axis_size == 0:
            results = _of_no_members(function, operands)
        elif one_by_one:
            results = jax.lax.map(lambda x: of_members(function, together, whole)(*x), operands)
        else:
            results = together(axis_size, *operands)
        return results, jax.tree.map(lambda _: True, results)

    return batched


def into_the_batch(
    function: Callable[..., tuple[Any, ...]], whole: Collection[int] = (), *, behind: bool = False
) -> Callable[..., Any]:
    """`function` with a rule for `jax.vmap`, which takes the new axis into the batch.

    Args:
        function: of arrays (or None), all but those of `whole` with a batch as their first axis, as all results have.
        whole: the positions of operands without a batch, as in `of_members`.
        behind: whether members of the batch lie behind one another, not batches: costs copies, but what the batch is
            cut over stays as it is.
    """
    at = int(behind)

    def together(axis_size: int, *operands: Any) -> Any:
        def fold(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x, 0, at).reshape(axis_size * x.shape[1], *x.shape[2:])

        def unfold(x: jax.Array) -> jax.Array:
            size = x.shape[0] // axis_size
            return jnp.moveaxis(x.reshape(*((size, axis_size) if behind else (axis_size, size)), *x.shape[1:]), at, 0)

        folded = [x if x is None or n in whole else fold(x) for n, x in enumerate(operands)]
        return jax.tree.map(unfold, into_the_batch(function, whole, behind=behind)(*folded))

    return of_members(function, together, whole)


def _of_no_members(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """What `jax.vmap` of `function` returns for operands [0, ...]: empty arrays, shaped as its results for a member."""
    member = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tuple(operands))
    shapes = jax.eval_shape(function, *member)
    return match_varying(jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes), tuple(operands))
