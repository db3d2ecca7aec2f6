"""An operation that may be traced, batched and transposed, but neither run nor lowered.

JAX decides late what becomes of a traced operation: a tangent may be transposed away (reverse mode) or computed
(forward mode), a branch may be lowered or dropped with the platforms it was not meant for. `refuse` marks the fate that
is not implemented and says why to the user whose program meets it. It is our one primitive: no public transformation
of JAX expresses "an error if this is ever lowered".
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def refuse(x: jax.Array, reason: str) -> jax.Array:
    """The identity of x, which raises NotImplementedError(reason) when it is run or lowered."""
    refused: jax.Array = _refuse_p.bind(x, reason=reason)
    return refused


def _raise(*_: Any, reason: str) -> NoReturn:
    raise NotImplementedError(reason)


def _transpose(cotangent: jax.Array, x: Any, *, reason: str) -> list[jax.Array]:
    # Transposed, the operation is gone: reverse mode is what it lets pass.
    return [cotangent]


_refuse_p = Primitive("jax_qla_refuse")
_refuse_p.def_impl(_raise)
_refuse_p.def_abstract_eval(lambda x, *, reason: x)
ad.deflinear2(_refuse_p, _transpose)
batching.defvectorized(_refuse_p)
mlir.register_lowering(_refuse_p, _raise)
