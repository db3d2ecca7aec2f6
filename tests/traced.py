"""What a function does, read off its traced program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax


def equations(function: Callable[..., Any], *operands: Any, leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Of the traced function and of the programs within, but those of equations that are a `leaf`."""

    def within(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            yield equation
            if leaf is None or not leaf(equation):
                for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from within(inner)

    yield from within(jax.make_jaxpr(function)(*operands).jaxpr)
