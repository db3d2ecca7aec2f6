"""compute-sanitizer on small packed calls of both passes, in the forms that the kernels have. On a Hopper card:

    python tests/sanitize.py             # racecheck: two accesses to shared memory that nothing orders
    python tests/sanitize.py memcheck    # accesses out of bounds

Prints a line a call, and ends with 1 if compute-sanitizer finds anything or cannot run. A call takes some 6 s; several
at once on one card have ended in segmentation faults of the sanitizer's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Call(NamedTuple):
    """What is computed: 333 tokens, in sequences of 300 and 33, or as `cu_seqlens` that lie have them."""

    key_heads: int = 2
    value_heads: int = 4
    head_dim: int = 64
    piece_rows: int = 0
    """Rows of a piece, 0 for whole sequences."""
    save_chunk_states: int = 0
    l2norm: int = 0
    lies: int = 0
    high: int = 0
    """Whether in high precision."""


CALLS = {
    "whole": Call(),
    "whole, states kept": Call(save_chunk_states=1),
    "pieces of 64": Call(piece_rows=64),
    "pieces of 128": Call(piece_rows=128),
    "pieces of 128, states kept": Call(piece_rows=128, save_chunk_states=1),
    "K = V = 128, normalised": Call(head_dim=128, l2norm=1),
    "72 heads with keys of their own": Call(key_heads=72, value_heads=72),
    "high precision": Call(high=1),
    "high precision, pieces of 64, states kept": Call(high=1, piece_rows=64, save_chunk_states=1),
    "cu_seqlens that lie": Call(lies=1),
    "cu_seqlens that lie, pieces of 64": Call(lies=1, piece_rows=64),
}


OPTIONS = {"memcheck": ("--report-api-errors", "no")}


def compute(call: Call) -> None:
    """Both passes, once."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_qla

    random = np.random.default_rng(0)
    tokens, cu_seqlens = 333, jnp.array([20, -5, 4000] if call.lies else [0, 300, 333], jnp.int32)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / 4, jnp.bfloat16)

    q, k = (drawn(1, tokens, call.key_heads, call.head_dim) for _ in range(2))
    v = drawn(1, tokens, call.value_heads, call.head_dim)
    g = -jnp.asarray(random.uniform(size=(1, tokens, call.value_heads)), jnp.float32) / 8
    beta = jnp.asarray(random.uniform(size=(1, tokens, call.value_heads)), jnp.float32)
    state = jnp.asarray(random.normal(size=(2, call.value_heads, call.head_dim, call.head_dim)), jnp.float32)

    def loss(*operands: jax.Array) -> jax.Array:
        o, final_state = jax_qla.chunk_gated_delta_rule(
            *operands[:5],
            initial_state=operands[5],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=bool(call.l2norm),
            piece_rows=call.piece_rows,
            precision="high" if call.high else None,
            save_chunk_states=bool(call.save_chunk_states),
            implementation="cuda",
        )
        assert final_state is not None
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final_state**2)

    gradients = jax.jit(jax.grad(loss, argnums=tuple(range(6))))(q, k, v, g, beta, state)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in gradients)


def check(tool: str) -> bool:
    """Runs all calls under compute-sanitizer; whether it has found nothing."""
    clean = True
    for name, call in CALLS.items():
        # Of kernels whose names end like this, which ours do: XLA's are not looked at. The driver refuses a question by
        # design, how many operands there are, and memcheck would call that an error.
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--kernel-name",
            "kernel_substring=_kernel",
            *OPTIONS.get(tool, ()),
        ]
        command += ["--error-exitcode", "9", sys.executable, __file__, "--compute", *map(str, call)]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        found = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        print(f"{name}: {' '.join(found) or (done.stdout + done.stderr)[-2000:]}", flush=True)
        clean &= done.returncode == 0 and len(found) == 1 and "SUMMARY: 0 " in found[0]
    return clean


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--compute"]:
        compute(Call(*map(int, arguments[1:])))
    else:
        sys.exit(0 if check(*(arguments or ["racecheck"])) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
