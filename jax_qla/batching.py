"""`jax.vmap` of what has a batch already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla.refusal import first_order
from jax_qla.varying import match_varying


def into_the_batch(
    function: Callable[..., tuple[jax.Array, ...]], whole: Sequence[int], reason: str, *, behind: bool = False
) -> Callable[..., Any]:
    """`function` with a rule for `jax.vmap`, which takes the new axis into the batch, and none for differentiation.

    Args:
        function: of arrays (or None), all but those of `whole` with a batch as their first axis, as all results have.
        whole: the positions of operands without a batch. Where `jax.vmap` maps one of these, members are computed one
            after the other.
        reason: what who differentiates it is told.
        behind: whether members of the batch lie behind one another, not batches: costs copies, but what the batch is
            cut over stays as it is.
    """
    at = int(behind)
    batched = jax.custom_batching.custom_vmap(function)

    @batched.def_vmap
    def one_more(axis_size: int, in_batched: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        mapped = [is_batched is True for is_batched in in_batched]

        def again(*operands: Any) -> tuple[jax.Array, ...]:
            results: tuple[jax.Array, ...] = into_the_batch(function, whole, reason, behind=behind)(*operands)
            return results

        def spread(x: Any, is_mapped: bool) -> Any:
            return x if x is None or is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))

        def fold(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x, 0, at).reshape(axis_size * x.shape[1], *x.shape[2:])

        def unfold(x: jax.Array) -> jax.Array:
            size = x.shape[0] // axis_size
            return jnp.moveaxis(x.reshape(*((size, axis_size) if behind else (axis_size, size)), *x.shape[1:]), at, 0)

        if axis_size == 0:
            results = results_of_no_members(function, tuple(map(spread, operands, mapped)))
        elif any(mapped[n] for n in whole):
            results = jax.lax.map(lambda x: again(*x), tuple(map(spread, operands, mapped)))
        else:
            folded = [x if x is None or n in whole else fold(spread(x, mapped[n])) for n, x in enumerate(operands)]
            results = tuple(map(unfold, again(*folded)))
        return results, tuple(True for _ in results)

    return first_order(batched, reason)


def results_of_no_members(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """What `jax.vmap` of `function` returns for operands [0, ...]: empty arrays, shaped as its results for a member."""
    member = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tuple(operands))
    shapes = jax.eval_shape(function, *member)
    return match_varying(jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes), tuple(operands))
