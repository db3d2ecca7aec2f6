"""Whether calls give the same bits again, and where they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np


def different(results: Sequence[jax.Array], first: Sequence[jax.Array]) -> jax.Array:
    """Of every result how many elements have not the bits of those of `first`, and the first and the last of them, by
    their place in the flattened array: int32 [results, 3], zeros where all have. To be traced."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    def of_one(x: jax.Array, y: jax.Array) -> jax.Array:
        found = (bits(x) != bits(y)).ravel()
        some = jnp.any(found)
        begin, end = jnp.argmax(found), found.size - 1 - jnp.argmax(found[::-1])
        places = (jnp.where(some, place, 0) for place in (begin, end))
        return jnp.stack([jnp.sum(found, dtype=jnp.int32), *(place.astype(jnp.int32) for place in places)])

    return jnp.stack([of_one(x, y) for x, y in zip(results, first, strict=True)])


def described(found: np.ndarray, first: Mapping[str, jax.Array]) -> str:
    """`different` of some calls [calls, results, 3], in words: of the calls that differ, the results that do."""
    calls = np.flatnonzero(found.any(axis=(1, 2)))
    lines = [f"{len(calls)} of {len(found)} calls differ"]
    for call in calls[:20]:
        for (name, x), (count, begin, end) in zip(first.items(), found[call].tolist(), strict=True):
            if count:
                at = [tuple(map(int, np.unravel_index(place, x.shape))) for place in (begin, end)]
                lines.append(f"call {call}: {count} of {name} {list(x.shape)}, from {at[0]} to {at[1]}")
    return "\n".join(lines)
