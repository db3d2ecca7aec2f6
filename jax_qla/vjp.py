"""The derivative of the gated delta rule: what is saved, what is recomputed, what is refused.

Reverse mode only. Between forward and backward live the operands (q, k, v, g, beta, initial_state, segments: no copies,
and none normalised) and, where the program may be lowered for the CUDA kernels, the residuals a [Hv, B, T, 64] of 16
bits ([Hv, B, T, 128] in bfloat16 with precision="high"), gamma [B, T, Hv] in float32, Vd [B, T, Hv, V] in v's dtype,
what each token writes to the state, and, where these kernels normalise q and k, the lengths of both, [B, T, Hk] in
float32 each; from k, gamma and Vd the states before all chunks are recomputed. (`save_chunk_states=True` keeps these
too, 768 bytes per token and value head with Vd at K = V = 128; False keeps neither, and nor does None with
precision="high" in bfloat16.) Where one card computes long sequences in pieces (policy/), so do the state at each cut
between them and a transition, 4 K (V + K) bytes per cut and value head (128 KiB at K = V = 128: 8 cuts of 32 heads take
32 MiB), so that the backward pass need not summarise the pieces again. It does where the compiler may spread the call
over several devices, so that the number of pieces is not known in time: in Auto meshes without names, and without a
mesh where JAX sees several. "xla" recomputes everything and saves no residuals.

Where the sequence is sharded, a device keeps the state before its tokens and their transition, [K, V + K] in float32
per value head and row of the batch, so that the backward pass need not repeat the exchange (in Auto meshes it does);
and for the CUDA kernels as much of every piece of a dense batch.

Inside `jax.checkpoint` the residuals and the results carry names (`CHECKPOINT_NAMES`), by which a policy such as
`jax.checkpoint_policies.save_only_these_names(*jax_qla.CHECKPOINT_NAMES)` keeps them and so spares a second forward;
without such a policy the forward runs again. At K = V = 128 these are, in bytes per token and value head: a 128, gamma
4, Vd 256, o 256, the chunk states, if kept, 512; the lengths are 8 per token and key head. Of what a call keeps the
policy must name all, for the forward runs as a whole. What it does not keep of Vd and the chunk states is written only
by the forward pass that runs again (`if_used.py`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from jax_qla import dispatch, sharding
from jax_qla.context_parallel import Carry
from jax_qla.dispatch import Settings
from jax_qla.mesh import LOCAL, Layout
from jax_qla.refusal import reverse_mode_only
from jax_qla.residuals import Keep, Residuals
from jax_qla.varying import match_varying

RESIDUAL_NAMES = (
    "gated_delta_rule_a",
    "gated_delta_rule_gamma",
    "gated_delta_rule_lengths",
    "gated_delta_rule_vd",
)
"""`checkpoint_name` of the residuals a and gamma, of both lengths where the CUDA kernels normalise q and k, and of what
each token writes to the state, unless `save_chunk_states` is False."""

RESULT_NAMES = ("gated_delta_rule_o", "gated_delta_rule_final_state")
"""`checkpoint_name` of the results o and final_state."""

CARRY_NAMES = ("gated_delta_rule_incoming", "gated_delta_rule_transition", "gated_delta_rule_pieces")
"""`checkpoint_name` of what a shard of a sequence keeps: the state before it, its transition, those of its pieces. The
last is also that of what is kept of the pieces of a whole sequence, which come with the residuals."""

CHUNK_STATE_NAMES = ("gated_delta_rule_h",)
"""`checkpoint_name` of the states before all chunks, with `save_chunk_states=True`."""

CHECKPOINT_NAMES = RESIDUAL_NAMES + CARRY_NAMES + CHUNK_STATE_NAMES + RESULT_NAMES
"""All names. With all of them saved, `jax.checkpoint` never runs the forward again."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static in a call."""

    settings: Settings
    output_final_state: bool
    layout: Layout = LOCAL
    keep: Keep = "nothing"
    """What to keep of Vd and the states before all chunks."""


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
    """o and final_state (or None), differentiable once by reverse mode; operands as in `sharding.forward`."""
    refusing = partial(reverse_mode_only, reason=dispatch.SECOND_ORDER)
    differentiable = jax.tree.map(refusing, (q, k, v, g, beta, initial_state))
    o, final_state = _gated_delta_rule(options, *match_varying((*differentiable, segments), (differentiable, segments)))
    if final_state is not None and options.layout.manual_sequence:
        # Outside of the custom_vjp, so that JAX transposes the sum by the conventions of the caller's shard_map.
        final_state = jax.lax.psum(final_state, options.layout.manual_sequence)
    return o, final_state


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_delta_rule(options: Options, *operands: Any) -> tuple[jax.Array, jax.Array | None]:
    o, final_state, _, _ = _forward(options, operands, with_residuals=False)
    return o, final_state


def _forward(options: Options, operands: tuple[Any, ...], *, with_residuals: bool) -> Any:
    return sharding.forward(
        *operands,
        layout=options.layout,
        settings=options.settings,
        output_final_state=options.output_final_state,
        with_residuals=with_residuals,
        keep=options.keep,
    )


def _gated_delta_rule_fwd(options: Options, *primals: Any) -> tuple[Any, Any]:
    operands = custom_vjp_primal_tree_values(primals)
    o, final_state, residuals, carry = _forward(options, operands, with_residuals=True)
    if residuals is not None:
        residuals = Residuals(
            a=checkpoint_name(residuals.a, RESIDUAL_NAMES[0]),
            gamma=checkpoint_name(residuals.gamma, RESIDUAL_NAMES[1]),
            vd=checkpoint_name(residuals.vd, RESIDUAL_NAMES[3]),
            between=checkpoint_name(residuals.between, CARRY_NAMES[2]),
            h=checkpoint_name(residuals.h, CHUNK_STATE_NAMES[0]),
            lengths=checkpoint_name(residuals.lengths, RESIDUAL_NAMES[2]),
        )
    if carry is not None:
        carry = Carry(*map(checkpoint_name, carry, CARRY_NAMES))
    o = checkpoint_name(o, RESULT_NAMES[0])
    if final_state is not None:
        final_state = checkpoint_name(final_state, RESULT_NAMES[1])
    return (o, final_state), (operands, residuals, carry)


def _gated_delta_rule_bwd(options: Options, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    operands, residuals, carry = saved
    do, d_final_state = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    if do is None and d_final_state is None:
        return (None,) * len(operands)
    gradients = sharding.backward(
        *(*operands, residuals, carry, do, d_final_state),
        layout=options.layout,
        settings=options.settings,
    )
    return (*gradients, None)  # None: segments have no gradient.


_gated_delta_rule.defvjp(_gated_delta_rule_fwd, _gated_delta_rule_bwd, symbolic_zeros=True)
