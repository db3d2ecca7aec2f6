"""One or a few tokens from a state, on whichever implementation the platform lowered for has.

Unlike the chunked rule, this is differentiable in every mode and order: the derivatives are those of the recurrence in
plain JAX, whatever computes the values. A batch axis of `jax.vmap` becomes part of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import reference
from jax_qla.batching import into_the_batch
from jax_qla.implementations import Choice, by_platform, load
from jax_qla.sharding import by_batch_and_heads
from jax_qla.varying import match_varying

_Results = tuple[jax.Array, jax.Array | None]


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    *,
    choice: Choice,
    scale: float,
    output_final_state: bool,
    l2norm: bool = False,
    automatic: bool = False,
) -> _Results:
    """o and final_state of the gated delta rule, token by token.

    Args:
        q, k: [B, T, Hk, K]. v: [B, T, Hv, V] of the same dtype. g (log decay), beta: [B, T, Hv], at least float32.
        initial_state: [N, Hv, K, V] or None for zeros; N = B without segments.
        segments: None (dense), or int32 [N, 2] with the start and end row of every sequence; B = 1.
        choice: the implementations; "cuda" is dense only.
        scale: factor of q.
        output_final_state: whether to return the final state.
        l2norm: whether q and k are to be divided by sqrt(|x|^2 + 1e-6), over K.
        automatic: whether the compiler may cut the operands, and then is told what a kernel does not say: that batch
            and heads are for themselves.

    Returns:
        o [B, T, Hv, V] in v's dtype; final_state [N, Hv, K, V], or None, in bfloat16 if initial_state is, and else in
        float32, or float64 with a float64 operand.
    """
    operands = (q, k, v, g, beta, initial_state)
    options: dict[str, Any] = {"scale": scale, "output_final_state": output_final_state, "l2norm": l2norm}
    # Without a token there is nothing to compute, and the kernel reads at least one.
    if choice.on_cuda != "cuda" or v.shape[0] * v.shape[1] == 0:
        return _plain(choice.on_cuda, operands, segments, **options)
    return kernel_where_it_runs(*operands, choice=choice, automatic=automatic, **options)


@functools.partial(jax.jit, static_argnames=("choice", "scale", "output_final_state", "l2norm", "automatic"))
def kernel_where_it_runs(
    *operands: Any,
    choice: Choice,
    scale: float,
    output_final_state: bool,
    l2norm: bool = False,
    automatic: bool = False,
) -> _Results:
    """`recurrent` of a dense batch with at least one token where `choice.on_cuda` is "cuda"."""
    options: dict[str, Any] = {"scale": scale, "output_final_state": output_final_state, "l2norm": l2norm}

    def implementation(name: str) -> Callable[..., _Results]:
        return functools.partial(load("cuda").recurrent, **options) if name == "cuda" else by_recurrence

    def by_recurrence(*operands: Any) -> _Results:
        name = choice.elsewhere or "xla"  # for derivatives alone, where there is no other implementation
        return match_varying(_plain(name, operands, None, **options), operands)

    on_platform = functools.partial(by_platform, choice, implementation)

    def partitioned(*operands: Any) -> _Results:
        return by_batch_and_heads(on_platform, operands, output_final_state=output_final_state)

    differentiable = jax.custom_jvp(partitioned if automatic else into_the_batch(on_platform))

    @differentiable.defjvp
    def of_the_recurrence(primals: Any, tangents: Any) -> tuple[_Results, _Results]:
        return differentiable(*primals), jax.jvp(by_recurrence, primals, tangents)[1]

    return differentiable(*match_varying(operands, operands))


def _plain(
    name: str,
    operands: Sequence[Any],
    segments: jax.Array | None,
    *,
    scale: float,
    output_final_state: bool,
    l2norm: bool,
) -> _Results:
    """The recurrence in plain JAX: "xla" without a loop where tokens are few, "reference" as a loop."""
    function = reference.recurrent if name == "xla" else reference.recurrence
    q, k, v, g, beta, initial_state = operands
    o, final_state = function(q, k, v, g, beta, initial_state, segments, scale=scale, l2norm=l2norm)
    if initial_state is not None and initial_state.dtype == jnp.bfloat16:
        final_state = final_state.astype(jnp.bfloat16)
    return o, final_state if output_final_state else None
