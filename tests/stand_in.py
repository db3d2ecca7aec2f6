"""A stand-in for `jax_qla.cuda.rule`, for tests of what surrounds the kernels on machines that have none."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jax_qla import decode, dispatch, reference, sharding, xla
from jax_qla.l2norm import normalize
from jax_qla.varying import match_varying

TARGET = "jax_qla.tests.stand_in"
"""Custom call target in programs that are lowered to the stand-in."""


def _mark(x: jax.Array) -> jax.Array:
    """The identity, as a custom call: present in a program lowered for CUDA, never run."""
    mark = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype), vmap_method="sequential")
    return match_varying(mark(x), x)


def _forward(*operands: Any, with_residuals: bool, **options: Any) -> Any:
    o, final_state, residuals = xla.forward(*operands, with_residuals=with_residuals, **options)
    return _mark(o), final_state, residuals and residuals._replace(a=_mark(residuals.a))


def _backward(*operands: Any, **options: Any) -> Any:
    dq, *others = xla.backward(*operands, **options)
    return _mark(dq), *others


def _recurrent(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any,
    *,
    scale: float,
    output_final_state: bool,
    l2norm: bool,
) -> Any:
    if l2norm:
        q, k = normalize(q), normalize(k)
    o, final_state = reference.recurrent(q, k, v, g, beta, initial_state, None, scale=scale)
    if not output_final_state:
        return _mark(o), None
    return _mark(o), final_state if initial_state is None else final_state.astype(initial_state.dtype)


def _summary(*operands: Any, **options: Any) -> Any:
    transition, *others = xla.summary(*operands, **options)
    return _mark(transition), *others


def launch_zeros(
    steps: Any, inputs: Any, outputs: Any, aliases: Any = None, within: Any = None
) -> dict[str, jax.Array]:
    """In place of `launch.launch`, for tests of the real `jax_qla.cuda.rule`: results of the right shapes."""
    del steps, aliases
    wanted = {name: x for name, x in outputs.items() if name not in (within or {})}
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in wanted.items()}
    return match_varying(zeros, inputs)


def forget_traces() -> None:
    """Makes the next calls of the functions that are traced once trace the implementations again."""
    for function in (
        sharding.forward,
        sharding.backward,
        sharding.without_exchange,
        dispatch.forward,
        dispatch.summary,
        dispatch.backward,
        dispatch.state_gradient,
        dispatch.chunk_states,
        decode.kernel_where_it_runs,
    ):
        jitted: Any = function
        jitted.clear_cache()


@contextlib.contextmanager
def kernels(objection: str | None = None) -> Iterator[None]:
    """`jax_qla.cuda.rule` replaced by a module that takes everything but, as the kernel, packed calls token by token;
    or nothing because of `objection`."""
    module = types.ModuleType("jax_qla.cuda.rule")
    functions: dict[str, Any] = {
        "L2NORM_DTYPES": (),
        "forward": _forward,
        "summary": _summary,
        "backward": _backward,
        "state_gradient": xla.state_gradient,
        "chunk_states": xla.chunk_states,
        "recurrent": _recurrent,
    }
    functions["why_not"] = lambda q, k, v, **_: objection
    functions["why_not_recurrent"] = lambda q, k, v, *, call, **_: "dense only" if call.packed else objection
    vars(module).update(functions)
    with mock.patch.dict("sys.modules", {module.__name__: module}):
        try:
            yield
        finally:
            # What was traced with the stand-in must not be found by a call that means the real kernels.
            forget_traces()
