"""benchmarks/repeats.py: whether calls gave the same bits, and where they did not."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import repeats


def test_where_calls_differ() -> None:
    first = {"o": jnp.zeros((2, 3, 4)), "state": jnp.arange(6.0).reshape(2, 3)}
    calls = [
        tuple(first.values()),
        (first["o"].at[0, 2, 1].set(1).at[1, 0, 3].set(jnp.nan), first["state"]),
        (first["o"], first["state"].at[0, 0].set(-1)),
        (first["o"].at[1, 1, 1].set(-0.0), first["state"]),
    ]
    found = np.stack([np.asarray(repeats.different(x, tuple(first.values()))) for x in calls])
    assert not found[0].any()
    assert repeats.described(found, first).splitlines() == [
        "3 of 4 calls differ",
        "call 1: 2 of o [2, 3, 4], from (0, 2, 1) to (1, 0, 3)",
        "call 2: 1 of state [2, 3], from (0, 0) to (0, 0)",
        "call 3: 1 of o [2, 3, 4], from (1, 1, 1) to (1, 1, 1)",
    ]
