"""The gated delta rule where sequences go on beyond a device.

A call falls into two. `summary` begins (prepare, summaries, and compose for N and for M), and `forward`, given what it
found, goes on when the state before is known. So do `state_gradient` and `backward`; meanwhile `chunk_states` computes
what the latter needs of the forward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import launch, policy
from jax_qla.cuda.call import Call
from jax_qla.cuda.steps import OF_GRADIENTS, compose_step, entering_states, kernel_step, prepare_step, summaries_steps
from jax_qla.kernels import adjoint_summaries as adjoint_summaries_kernel
from jax_qla.kernels import states as states_kernel
from jax_qla.kernels import states_from_vd as states_from_vd_kernel
from jax_qla.residuals import ChunkStates, Pieces, Residuals


def summary(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None = None,
    *,
    cut: policy.Cut,
    with_residuals: bool,
    l2norm: bool = False,
    precision: Any = None,
    with_lengths: bool = False,
) -> tuple[jax.Array, jax.Array, Residuals | None, Pieces | None]:
    """Transition and response of each sequence, and what is kept; the contract is `dispatch.summary`'s.

    N by `compose` from the initial state. M by the reversed one from the identity, as the product of the transposes,
    with nothing added between: so the two run side by side.
    """
    del with_lengths  # as in `forward`
    call = Call(q, k, v, segments, l2norm=l2norm, precision=precision, whole=True)
    shapes = Pieces.shapes(call.sequences, cut.pieces, call.value_heads, call.key_dim, call.value_dim)
    products = jax.ShapeDtypeStruct((*shapes["transition"].shape[:2], call.key_dim, call.key_dim), jnp.float32)
    inputs = call.flat(q=q, k=k, v=v, g=g, beta=beta) | call.tables | call.shard_tables(segments, cut)
    inputs |= {
        "initial_state": call.states(initial_state),
        "identity": jnp.broadcast_to(
            jnp.eye(call.key_dim, dtype=jnp.float32), (call.sequences, call.value_heads, call.key_dim, call.key_dim)
        ),
        "nothing": jnp.zeros(products.shape, products.dtype),
    }
    outputs = {**shapes, "entering": shapes["response"], "products": products}
    if residuals is None:
        steps = [prepare_step(call)]
        # `prepare` writes zeros to the rows of o that no sequence has: of no columns, here.
        outputs |= call.prepared_shapes(v, precision) | {
            "o": jax.ShapeDtypeStruct((call.tokens, call.value_heads, 0), v.dtype)
        }
    else:
        inputs |= call.prepared(residuals, queries=False)
        steps = []
    of_maps = {"response": "nothing", "initial_state": "identity", "entering": "products"}
    steps += [
        *summaries_steps(call, cut),
        compose_step(call, "entered"),
        compose_step(call, "left", rename=of_maps, value_dim=call.key_dim, reverse=True),
    ]
    results = launch.launch(steps, inputs, outputs)
    response = results["entering"][jnp.sum(inputs["entered"][:, :2], axis=1) - 1]
    transition = jnp.swapaxes(results["products"][inputs["left"][:, 0]], -1, -2)
    if segments is not None or not with_residuals:
        return transition, response, None, None
    if residuals is None:
        residuals = call.residuals(results)
    return transition, response, residuals, Pieces(*(results[name] for name in Pieces._fields))


def state_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    pieces: Pieces | None = None,
    *,
    cut: policy.Cut,
    scale: float,
    l2norm: bool = False,
    precision: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of the initial states, and what is kept; the contract is `dispatch.state_gradient`'s."""
    del g, initial_state
    call = Call(q, k, v, segments, l2norm=l2norm, precision=precision, whole=True)
    shapes = Pieces.shapes(call.sequences, cut.pieces, call.value_heads, call.key_dim, call.value_dim)
    inputs = call.flat(q=q, k=k, v=v, beta=beta, do=jnp.zeros_like(v) if do is None else do)
    inputs |= call.prepared(residuals) | call.tables | call.shard_tables(segments, cut)
    inputs |= {"initial_state": call.states(None), "d_final_state": call.states(d_final_state)}
    outputs = {"adjoint_response": shapes["response"], "leaving": shapes["response"]}
    steps = []
    if pieces is None:
        steps += summaries_steps(call, cut)
        outputs |= shapes
    else:
        inputs |= pieces._asdict()
    steps += [
        kernel_step(
            call, adjoint_summaries_kernel, rename={"pieces": "shard_pieces", "cuts": "shard_cuts"}, scale=scale
        ),
        compose_step(call, "left", rename=OF_GRADIENTS, reverse=True),
    ]
    results = launch.launch(steps, inputs, outputs)
    gradient = results["leaving"][inputs["left"][:, 0]]
    return gradient, None if pieces is None else results["adjoint_response"]


def chunk_states(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    segments: None,
    residuals: Residuals,
    pieces: Pieces,
    *,
    cut: policy.Cut,
    l2norm: bool = False,
    precision: Any = None,
) -> ChunkStates:
    """The contract is `dispatch.chunk_states`'s."""
    del g
    call = Call(q, k, v, segments, l2norm=l2norm, precision=precision, shard=cut)
    vd = None if call.split else residuals.vd
    if vd is None:
        inputs = call.flat(k=k, v=v, beta=beta) | call.prepared(residuals, queries=False)
    else:
        inputs = call.flat(k=k, vd=vd, gamma=residuals.gamma)
    inputs |= call.tables | pieces._asdict() | {"initial_state": call.states(initial_state)} | call.no_pieces()
    steps, of_pieces = entering_states(call, known=True)
    of = {"first_head": 0, "awaits": states_kernel.EVERYTHING}
    kernel = states_kernel if vd is None else states_from_vd_kernel
    steps.append(kernel_step(call, kernel, rename=call.of_pieces("initial_state", "entering"), **of))
    shapes = call.chunk_state_shapes(v, precision)
    results = launch.launch(steps, inputs, of_pieces | {name: x for name, x in shapes.items() if name not in inputs})
    return ChunkStates(results["h"], call.unflat(results["vd"]) if vd is None else vd)
