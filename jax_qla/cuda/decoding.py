"""One or a few tokens from a state: one kernel, on a dense batch as it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import launch
from jax_qla.checks import why_not_static
from jax_qla.cuda.support import RECURRENT, why_no_kernels
from jax_qla.implementations import RecurrentCall
from jax_qla.kernels import recurrent as recurrent_kernel
from jax_qla.launch import Step


def why_not_recurrent(q: Any, k: Any, v: Any, *, call: RecurrentCall, build: bool | None = None) -> str | None:
    """As `why_not`, for `recurrent`."""
    if call.packed:
        return "the decoding kernel of 'cuda' takes dense batches only, without cu_seqlens"
    if reason := why_not_static("q", q):
        return reason
    single = _single(q.shape[1], call.state_dtype)
    return why_no_kernels(q, k, v, build, RECURRENT, state_dtype=call.state_dtype, single=single)


def _single(tokens: int, state_dtype: str) -> bool:
    """Whether a decoding call takes the kernel of one token, which holds 16-bit states in half of the registers."""
    return tokens == 1 and state_dtype == "bfloat16"


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    *,
    scale: float,
    output_final_state: bool,
    l2norm: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """o and final_state of at least one token, from a dense batch; the contract is `decode.recurrent`'s.

    The final state takes the memory of the initial one.
    """
    batch, tokens, value_heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    state_dtype = jnp.dtype(jnp.float32) if initial_state is None else initial_state.dtype

    def state_shape(given: bool) -> jax.ShapeDtypeStruct:  # an empty array is "not given" and "not wanted"
        return jax.ShapeDtypeStruct((batch if given else 0, value_heads, key_dim, value_dim), state_dtype)

    single = _single(tokens, state_dtype.name)
    config = recurrent_kernel.Config(key_dim, value_dim, q.dtype.name, state_dtype.name, single)
    in_place = initial_state is not None and output_final_state
    if initial_state is None:
        initial_state = jnp.zeros(state_shape(False).shape, state_dtype)
    results = launch.launch(
        [Step("recurrent", config, {"scale": scale, "ratio": value_heads // key_heads, "normed": int(l2norm)})],
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state},
        {"o": jax.ShapeDtypeStruct(v.shape, v.dtype), "final_state": state_shape(output_final_state)},
        {"initial_state": "final_state"} if in_place else {},
    )
    return results["o"], results["final_state"] if output_final_state else None
