"""What the passes of the gated delta rule hand each other, and what decides its shapes.

All implementations have these types in common, though only "cuda" reads what they hold. `forward` keeps `Residuals`
for `backward`; `chunk_states` finds the `ChunkStates` that it has not kept; where a sequence goes on beyond a device,
`summary` and `state_gradient` come first, and the `Pieces` of the one are for all that follows. Which fields are there
is a matter of options. How large they are, operands, precision and dtype say: numbers may be sums of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, map_blocks_shape, state_tile_rows
from jax_qla.segments import state_count

Keep = Literal["nothing", "vd", "states"]
"""What the forward pass of "cuda" keeps for the backward pass of what that else computes again, besides what it keeps
anyway: nothing, Vd (`Residuals.vd`), or Vd and the states before all chunks (`Residuals.h`)."""

KEPT: Mapping[Keep, tuple[str, ...]] = {"nothing": (), "vd": ("vd",), "states": ("vd", "h")}
"""The fields of `Residuals` that these are."""


class Between(NamedTuple):
    """What `forward` keeps of the C cuts between the pieces of whole sequences, so that `backward` need not summarise
    these again. Each of the B rows of a dense batch has C / B cuts; in a packed one they lie as `segments.cut_table`
    says, and places that no sequence has hold anything.
    """

    entering: jax.Array
    """[C, Hv, K, V] float32, the state at each cut."""
    transition: jax.Array
    """As of `Pieces`, of the piece before each cut; anything of a sequence's first."""
    forgotten: jax.Array
    """As of `Pieces`, likewise, but 1 of a sequence's first."""

    @staticmethod
    def shapes(rows: int, heads: int, key_dim: int, value_dim: int) -> dict[str, jax.ShapeDtypeStruct]:
        """By field, of C = `rows` cuts."""
        return {
            "entering": jax.ShapeDtypeStruct((rows, heads, key_dim, value_dim), jnp.float32),
            "transition": jax.ShapeDtypeStruct((rows, heads, *map_blocks_shape(key_dim)), jnp.bfloat16),
            "forgotten": jax.ShapeDtypeStruct((rows, heads), jnp.int32),
        }


class ChunkStates(NamedTuple):
    """What the backward pass of "cuda" recomputes of the forward one, for Hv value heads, unless that has kept it (the
    fields of `Residuals` with these names); the first part of it, which does not wait for the gradient of the state
    after the rows."""

    h: jax.Array
    """The state before each chunk, in v's dtype, in tiles of 64 rows of K, transposed; one [Hv, K / 64, V, 64] a chunk
    slot but the first, which no chunk has; [Hv, 2 K / 64, V, 64], its high and its low part, where operands are split.
    Where T is a multiple of 64, those of equal batches side by side are those of all of them."""
    vd: jax.Array
    """Vd [B, T, Hv, V] in v's dtype, what each token writes to the state; [B, T, Hv, 2 V], its high and its low part,
    where operands are split. Of rows of no sequence anything."""

    @staticmethod
    def shapes(
        pieces: int, v: jax.Array, key_dim: int, precision: Any, *, groups: int = 1
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """By field, of rows v [B, T, Hv, V] in `pieces` pieces altogether, for the heads of one of so many groups."""
        batch, length, all_heads, value_dim = v.shape
        heads = all_heads // groups
        count, parts = state_count(batch * length, pieces), 2 if splits(precision, v.dtype) else 1
        rows = state_tile_rows(key_dim)
        return {
            "h": jax.ShapeDtypeStruct((count, heads, key_dim // rows * parts, value_dim, rows), v.dtype),
            "vd": jax.ShapeDtypeStruct((batch, length, heads, value_dim * parts), v.dtype),
        }


class Lengths(NamedTuple):
    """What "cuda" multiplies by where it normalises q and k, [B, T, Hk] float32; of rows of no sequence anything."""

    of_keys: jax.Array
    """1 / |k|."""
    of_queries: jax.Array
    """1 / |q|."""

    @staticmethod
    def shapes(q: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """By field, of rows q [..., Hk, K]."""
        return dict.fromkeys(Lengths._fields, jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))


class Residuals(NamedTuple):
    """What forward keeps for backward."""

    a: jax.Array
    """[Hv, B, T, 64] integers of the size of v's elements, whose bits they are: the gated inverse of every chunk, in
    blocks (kernels/inverse.py) that begin at the chunk's first row; what they leave of its rows is undefined. With 128
    columns its high and its low part, where operands are split (`splits`)."""
    gamma: jax.Array
    """[B, T, Hv] float32, the cumulative sum of g within the chunk."""
    vd: jax.Array | None = None
    """As of `ChunkStates`, unless backward is to compute it again; where operands are split, only with h."""
    between: Between | None = None
    """Where sequences have been cut into pieces, unless backward is to compute it again."""
    h: jax.Array | None = None
    """As of `ChunkStates`, where the caller wants it kept, of the same pieces or of whole sequences; with vd."""
    lengths: Lengths | None = None
    """Where "cuda" normalises q and k (`dispatch.Settings.keeps_lengths`)."""

    @staticmethod
    def shapes(v: Any, precision: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Of a and gamma by field, of rows v [B, T, Hv, V]."""
        batch, tokens, heads, _ = v.shape
        columns = CHUNK * (2 if splits(precision, v.dtype) else 1)
        return {
            "a": jax.ShapeDtypeStruct((heads, batch, tokens, columns), f"int{8 * jnp.dtype(v.dtype).itemsize}"),
            "gamma": jax.ShapeDtypeStruct(v.shape[:-1], jnp.float32),
        }


class Pieces(NamedTuple):
    """What the pieces of B sequences do to the state before them (jax_qla/kernels/summaries.py), which `forward` and
    `backward` then need not compute again. P = B (count + 2): a sequence's pieces stand between two empty ones.
    """

    response: jax.Array
    """N [P, Hv, K, V] float32."""
    transition: jax.Array
    """M as the sum of two bfloat16 numbers, by blocks (kernels/specification.py), [P, Hv, K K / 128, 256]."""
    forgotten: jax.Array
    """int32 [P, Hv], 1 where M counts as zero and is not there."""

    @staticmethod
    def shapes(sequences: int, count: int, heads: int, key_dim: int, value_dim: int) -> dict[str, jax.ShapeDtypeStruct]:
        """By field, where a sequence has `count` pieces."""
        shapes = Between.shapes(sequences * (count + 2), heads, key_dim, value_dim)
        return {"response": shapes.pop("entering"), **shapes}


def precision_of_kernels(precision: Any) -> jax.lax.Precision | None:
    """What the option of the same name is to "cuda": DEFAULT or HIGH, or None: nothing that its kernels have."""
    try:
        named = jax.lax.Precision(precision)
    except ValueError:  # a pair, or an algorithm
        return None
    return None if named == jax.lax.Precision.HIGHEST else named


def splits(precision: Any, dtype: Any) -> bool:
    """Whether the kernels take what meets a chunk's inverse as the sum of two numbers (kernels/common.py): with HIGH
    precision in bfloat16. The numbers of float16 are an eighth as far apart as those of bfloat16, and are not split."""
    return precision_of_kernels(precision) == jax.lax.Precision.HIGH and jnp.dtype(dtype) == jnp.bfloat16


def keeping(save_chunk_states: bool | None, precision: Any, dtype: Any) -> Keep:
    """What the option of the public functions asks for, with q, k and v of this dtype: None is Vd, but nothing where
    operands are split, for no kernel computes h from it then."""
    if save_chunk_states is None:
        return "nothing" if splits(precision, dtype) else "vd"
    return "states" if save_chunk_states else "nothing"
