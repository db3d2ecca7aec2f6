"""Results that are computed only where something uses them.

The compiler drops what nobody uses, but of a custom call it drops all or nothing. JAX drops too, where `jax.checkpoint`
runs a function for the first time, whose residuals nobody keeps: what costs more for what it keeps should be another
function there. `jax.custom_vjp` offers that (`optimize_remat`), but not with symbolic zeros, and no other public
transformation does; hence this primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir, partial_eval


def computed_if_used(
    function: Callable[..., tuple[Any, Any]], without: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, Any]:
    """function(*operands), which are results and extras; of `without`, which returns the results alone, where nothing
    uses the extras and JAX finds that out, as it does inside `jax.checkpoint`.

    Args:
        function, without: of pytrees of arrays. What they take from elsewhere must not be traced.
        operands: theirs.

    Returns:
        What `function` returns, two pytrees.
    """
    leaves, tree = jax.tree.flatten(operands)
    full, shapes = jax.make_jaxpr(lambda *x: function(*jax.tree.unflatten(tree, x)), return_shape=True)(*leaves)
    count = len(jax.tree.leaves(shapes[0]))

    def lean(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(without(*jax.tree.unflatten(tree, leaves)))

    found = _computed_if_used_p.bind(*leaves, full=full, lean=lean, count=count)
    results, extras = jax.tree.unflatten(jax.tree.structure(shapes), found)
    return results, extras


def _run(*leaves: Any, full: ClosedJaxpr, lean: Callable[..., Any], count: int) -> Any:
    del lean, count
    return jaxpr_as_fun(full)(*leaves)


def _eliminate(used: Sequence[bool], *others: Any) -> tuple[list[bool], JaxprEqn | None]:
    """The equation, last of the arguments, that computes what is `used`, and which of its operands that needs.

    Only here is traced what does without. JAX promises no such interface: 0.12 says before the equation which operands
    are live.
    """
    equation = others[-1]
    lean, count = equation.params["lean"], equation.params["count"]
    if not any(used):
        return [False] * len(equation.invars), None
    if count < len(used) and not any(used[count:]):
        full = jax.make_jaxpr(lean)(*(x.aval for x in equation.invars))
        params = {"full": full, "lean": lean, "count": count}
        equation = equation.replace(outvars=equation.outvars[:count], params=params)
    return [True] * len(equation.invars), equation


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], *, full: ClosedJaxpr, lean: Callable[..., Any], count: int
) -> Any:
    mapped = [isinstance(axis, int) for axis in axes]
    size = next(x.shape[axis] for x, axis, is_mapped in zip(operands, axes, mapped, strict=True) if is_mapped)
    in_axes = [axis if is_mapped else None for axis, is_mapped in zip(axes, mapped, strict=True)]

    def batched(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(function, in_axes=in_axes, axis_size=size)

    full = jax.make_jaxpr(batched(jaxpr_as_fun(full)))(*operands)
    results = _computed_if_used_p.bind(*operands, full=full, lean=batched(lean), count=count)
    return results, [0] * len(results)


_computed_if_used_p: Any = Primitive("jax_qla_computed_if_used")
_computed_if_used_p.multiple_results = True
_computed_if_used_p.to_lojax = _run  # JAX 0.12 asks for it where the programs have operations that it calls high
_computed_if_used_p.def_impl(_run)
_computed_if_used_p.def_abstract_eval(lambda *_, full, **__: full.out_avals)
batching.primitive_batchers[_computed_if_used_p] = _batch
partial_eval.dce_rules[_computed_if_used_p] = _eliminate
mlir.register_lowering(_computed_if_used_p, mlir.lower_fun(_run, multiple_results=True))
