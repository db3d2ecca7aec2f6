"""One decode step of one token, beside a copy of the state, which is the least that a step must move.

    python benchmarks/decode.py [--batch 1 8 64] [--state float32 bfloat16] [--tokens 1]

A step reads and writes the state of every sequence once; its time is that of one of STEPS steps in a jitted function,
each from the state that the one before it left in place. The copy is as many multiplications of the same state by a
number that XLA does not know. Small states stay in the card's second-level cache in both. q and k are normalised, as
layers ask for. FlashInfer, where it is installed, replays a CUDA graph of as many steps; it computes the gates from
their own inputs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # FlashInfer's tensors need memory of the card, too

import jax
import jax.numpy as jnp
from measurement import CALLS, repeat
from peers import captured, seconds_of_replays

import jax_qla

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128
STEPS = 20


def step_time(batch: int, tokens: int, state_dtype: str, implementation: str | None) -> float:
    """Microseconds of a step."""
    keys, values = (batch, tokens, KEY_HEADS, HEAD_DIM), (batch, tokens, VALUE_HEADS, HEAD_DIM)
    q, k, v, g, beta = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((keys, keys, *[values] * 3))
    )
    rows = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    rows += [jax.nn.log_sigmoid(g[..., 0]), jax.nn.sigmoid(beta[..., 0])]

    def chain(state: jax.Array, *rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jnp.zeros((), jnp.float32)
        for _ in range(STEPS):
            o, new_state = jax_qla.recurrent_gated_delta_rule(
                *rows,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                implementation=implementation,
            )
            assert new_state is not None
            # The whole of both is computed, and nothing of a step moves into the next.
            o, state = jax.lax.optimization_barrier((o, new_state))
            total += o[0, 0, 0, 0].astype(jnp.float32)
        return state, total

    return 1e3 * repeat(partial(_seconds, _compiled(chain, batch, state_dtype, *rows)), STEPS)


def copy_time(batch: int, state_dtype: str) -> float:
    """Microseconds of reading and writing a state."""

    def chain(state: jax.Array, one: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(STEPS):
            state = jax.lax.optimization_barrier(state * one)
        return state, one

    return 1e3 * repeat(partial(_seconds, _compiled(chain, batch, state_dtype, jnp.ones((), state_dtype))), STEPS)


def _compiled(chain: Callable[..., Any], batch: int, state_dtype: str, *operands: Any) -> Callable[[], Any]:
    """A function that runs the chain on a state that it keeps, in place, and returns what else the chain returns."""
    state = jnp.zeros((batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM), state_dtype)
    run = jax.jit(chain, donate_argnums=0).lower(state, *operands).compile()

    def once() -> Any:
        nonlocal state
        state, other = run(state, *operands)
        return other

    jax.block_until_ready(once())
    return once


def _seconds(run: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        result = run()
    jax.block_until_ready(result)
    return time.perf_counter() - start


def flashinfer_time(batch: int, state_dtype: str) -> float:
    """Microseconds of FlashInfer's step of one token: K before V in float32 states, V before K in bfloat16 ones.

    Raises:
        ImportError: PyTorch or FlashInfer is not installed.
    """
    torch = importlib.import_module("torch")
    module = importlib.import_module("flashinfer.gdn_decode")
    name = "gated_delta_rule_decode" if state_dtype == "float32" else "gated_delta_rule_decode_pretranspose"
    function = getattr(module, name)

    def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(shape, device="cuda").to(dtype)

    q, k = (normal(batch, 1, KEY_HEADS, HEAD_DIM) for _ in range(2))
    arguments = {
        "q": q,
        "k": k,
        "v": normal(batch, 1, VALUE_HEADS, HEAD_DIM),
        "state": normal(batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM, dtype=getattr(torch, state_dtype)),
        "A_log": normal(VALUE_HEADS, dtype=torch.float32),
        "a": normal(batch, 1, VALUE_HEADS),
        "dt_bias": normal(VALUE_HEADS, dtype=torch.float32),
        "b": normal(batch, 1, VALUE_HEADS),
        "use_qk_l2norm": True,
    }
    graph = captured(lambda: function(**arguments))
    return 1e3 * repeat(partial(seconds_of_replays, graph), CALLS)


def _row(batch: int, tokens: int, state_dtype: str, implementation: str | None) -> list[str]:
    bytes_moved = 2 * batch * VALUE_HEADS * HEAD_DIM**2 * jnp.dtype(state_dtype).itemsize
    step, copy = step_time(batch, tokens, state_dtype, implementation), copy_time(batch, state_dtype)
    rates = [f"{bytes_moved / time / 1e3:.0f}" for time in (step, copy)]
    try:
        peer = f"{flashinfer_time(batch, state_dtype):.1f}" if tokens == 1 else "-"
    except Exception as error:  # what another library cannot run is no reason to stop
        peer = f"{type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}"
    return [state_dtype, str(batch), f"{step:.1f}", f"{copy:.1f}", *rates, f"{100 * copy / step:.0f} %", peer]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times decode steps beside copies of the state.")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="sequences")
    parser.add_argument("--state", nargs="+", default=["float32", "bfloat16"], help="dtypes of the state")
    parser.add_argument("--tokens", type=int, default=1, help="tokens of a step")
    parser.add_argument("--implementation", help="of jax_qla; the default is its own choice")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, jax_qla {jax_qla.__version__}; ", end="")
    print(f"Hk {KEY_HEADS}, Hv {VALUE_HEADS}, K = V = {HEAD_DIM}, bfloat16, {options.tokens} token(s) a step\n")
    header = ["state", "batch", "step us", "copy us", "step GB/s", "copy GB/s", "of copy", "FlashInfer us"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for state_dtype in options.state:
        for batch in options.batch:
            row = _row(batch, options.tokens, state_dtype, options.implementation)
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
