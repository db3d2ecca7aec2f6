"""The derivative of the gated delta rule: what is saved, what is recomputed, what is refused.

Reverse mode only. Between forward and backward live the operands (q, k, v, g, beta, initial_state, segments: no copies)
and, where the program may be lowered for the CUDA kernels, the residuals a [B, T, Hv, 64] in v's dtype and gamma
[B, T, Hv] in float32; the chunk states are recomputed. "xla" recomputes everything and saves no residuals.

Inside `jax.checkpoint` the residuals and the results carry names (`CHECKPOINT_NAMES`), by which a policy such as
`jax.checkpoint_policies.save_only_these_names(*jax_qla.CHECKPOINT_NAMES)` keeps them and so spares a second forward;
without such a policy the forward runs again.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from jax_qla import dispatch
from jax_qla.implementations import Choice
from jax_qla.refusal import refuse

RESIDUAL_NAMES = ("gated_delta_rule_a", "gated_delta_rule_gamma")
"""`checkpoint_name` of the residuals a and gamma."""

RESULT_NAMES = ("gated_delta_rule_o", "gated_delta_rule_final_state")
"""`checkpoint_name` of the results o and final_state."""

CHECKPOINT_NAMES = RESIDUAL_NAMES + RESULT_NAMES
"""All names. With all of them saved, `jax.checkpoint` never runs the forward again."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static in a call."""

    choice: Choice
    scale: float
    output_final_state: bool
    precision: Any = None


def gated_delta_rule(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """o and final_state (or None), differentiable once by reverse mode; operands as in `dispatch.forward`."""
    differentiable = jax.tree.map(_reverse_mode_only, (q, k, v, g, beta, initial_state))
    return _gated_delta_rule(options, *dispatch.match_varying((*differentiable, segments), (differentiable, segments)))


@jax.custom_jvp
def _reverse_mode_only(x: jax.Array) -> jax.Array:
    """The identity. Its tangent can be transposed but not computed.

    `jax.custom_vjp` alone refuses forward mode too, but cannot say what to do instead.
    """
    return x


@_reverse_mode_only.defjvp
def _reverse_mode_only_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], refuse(tangents[0], dispatch.SECOND_ORDER)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_delta_rule(options: Options, *operands: Any) -> tuple[jax.Array, jax.Array | None]:
    o, final_state, _ = _forward(options, operands, with_residuals=False)
    return o, final_state


def _forward(options: Options, operands: tuple[Any, ...], *, with_residuals: bool) -> Any:
    return dispatch.forward(
        *operands,
        choice=options.choice,
        scale=options.scale,
        output_final_state=options.output_final_state,
        with_residuals=with_residuals,
        precision=options.precision,
    )


def _gated_delta_rule_fwd(options: Options, *primals: Any) -> tuple[Any, Any]:
    operands = custom_vjp_primal_tree_values(primals)
    o, final_state, residuals = _forward(options, operands, with_residuals=True)
    if residuals is not None:
        residuals = tuple(map(checkpoint_name, residuals, RESIDUAL_NAMES))
    o = checkpoint_name(o, RESULT_NAMES[0])
    if final_state is not None:
        final_state = checkpoint_name(final_state, RESULT_NAMES[1])
    return (o, final_state), (operands, residuals)


def _gated_delta_rule_bwd(options: Options, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    operands, residuals = saved
    do, d_final_state = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    if do is None and d_final_state is None:
        return (None,) * len(operands)
    gradients = dispatch.backward(
        *operands,
        residuals,
        do,
        d_final_state,
        choice=options.choice,
        scale=options.scale,
        precision=options.precision,
    )
    return (*gradients, None)  # None: segments have no gradient.


_gated_delta_rule.defvjp(_gated_delta_rule_fwd, _gated_delta_rule_bwd, symbolic_zeros=True)
