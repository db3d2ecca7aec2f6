"""Operations that may be traced, batched or transposed, but not run, not lowered or not differentiated.

JAX decides late what becomes of a traced operation: a tangent may be transposed away (reverse mode) or computed
(forward mode), a branch may be lowered or dropped with the platforms it was not meant for. `refuse` marks the fate that
is not implemented and says why to the user whose program meets it. No public transformation of JAX expresses "an error
if this is ever lowered", nor `refuse_sharded_export`'s "if it is lowered so"; hence these primitives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def refuse(x: jax.Array, reason: str) -> jax.Array:
    """The identity of x, which raises NotImplementedError(reason) when it is run or lowered."""
    return _refuse_p.bind(x, reason=reason)


def on_cuda_only(x: jax.Array, reason: str) -> jax.Array:
    """The identity of x, which raises NotImplementedError(reason) where it is lowered for other platforms than CUDA."""
    return jax.lax.platform_dependent(x, cuda=lambda x: x, default=functools.partial(refuse, reason=reason))


def reverse_mode_only(x: jax.Array, reason: str) -> jax.Array:
    """The identity of x. Its tangent can be transposed but not computed, which raises NotImplementedError(reason).

    `jax.custom_vjp` alone refuses forward mode too, but cannot say what to do instead.
    """
    return _reverse_mode_only_p.bind(x, reason=reason)


def first_order(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function`, which raises NotImplementedError(reason) where it is to be differentiated."""

    def refusing(*operands: Any) -> Any:
        return function(*jax.tree.map(functools.partial(_first_order_p.bind, reason=reason), operands))

    return refusing


def _raise(*_: Any, reason: str) -> NoReturn:
    raise NotImplementedError(reason)


def _with_refused_tangent(primals: Any, tangents: Any, *, reason: str) -> tuple[jax.Array, jax.Array]:
    return primals[0], _refuse_tangent_p.bind(tangents[0], reason=reason)


def _transpose(cotangent: jax.Array, x: Any, *, reason: str) -> list[jax.Array]:
    # Transposed, the operation is gone: reverse mode is what it lets pass.
    return [cotangent]


def _operation(name: str, *, refused: bool = False) -> Primitive:
    """An identity, which is batched as it is; `refused` where it is run or lowered, and transposed away."""
    operation = Primitive(name)
    operation.def_abstract_eval(lambda x, **_: x)
    batching.defvectorized(operation)
    if refused:
        operation.def_impl(_raise)
        mlir.register_lowering(operation, _raise)
        ad.deflinear2(operation, _transpose)
    else:
        operation.def_impl(lambda x, **_: x)
        mlir.register_lowering(operation, lambda _, x, **__: [x])
    return operation


_refuse_p = _operation("jax_qla_refuse", refused=True)

# Reverse mode transposes it before `jax.vmap` would batch it, so what batches it is forward mode; `jax.custom_vjp`, the
# next to be batched, would refuse in its own words.
_refuse_tangent_p = _operation("jax_qla_refuse_tangent", refused=True)
batching.primitive_batchers[_refuse_tangent_p] = _raise

# Operations, since functions with `jax.custom_jvp` lose their rule where JAX takes apart what is known and what is not,
# as in a scan, and have it batched under `jax.vmap`, tangents too.
_reverse_mode_only_p = _operation("jax_qla_reverse_mode_only")
ad.primitive_jvps[_reverse_mode_only_p] = _with_refused_tangent

_first_order_p = _operation("jax_qla_first_order")
ad.primitive_jvps[_first_order_p] = _raise


def refuse_sharded_export(x: jax.Array) -> jax.Array:
    """The identity of x, which raises NotImplementedError where `jax.export` lowers it for several devices.

    What Shardy partitions by our rule is a callback into this process, which no exported program can carry.
    """
    return _not_exported_p.bind(x)


def _lower_unless_exported(ctx: mlir.LoweringRuleContext, x: Any) -> list[Any]:
    module = ctx.module_context
    devices = getattr(module.axis_context, "num_devices", None)
    if getattr(module.lowering_parameters, "for_export", False) and devices is not None and devices > 1:
        raise NotImplementedError(
            "a sharded call of jax_qla cannot be exported from a mesh with Auto axes, since the compiler asks this "
            "process how to partition it: use a mesh with Explicit axes, call it inside jax.shard_map, or name what "
            "the axes cut by mesh_axes=jax_qla.MeshAxes(...)"
        )
    return [x]


_not_exported_p = _operation("jax_qla_not_exported_sharded")
mlir.register_lowering(_not_exported_p, _lower_unless_exported)
