"""One call of the gated delta rule: its sizes, where sequences or pieces lie, and shapes of what kernels hand on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla import policy
from jax_qla import segments as tables
from jax_qla.kernels import layout as layout_kernel
from jax_qla.kernels.common import CHUNK, state_tile_rows
from jax_qla.launch import Step
from jax_qla.residuals import Between, ChunkStates, Lengths, Residuals, splits

_LENGTHS = ("lengths", "query_lengths")
"""The kernels' names of `Lengths`."""


class Call:
    """Sizes, tables and kernel configurations of one call, whose sequences are perhaps `cut` into pieces.

    The kernels take the pieces for sequences, from states that `entering_states` computes.
    """

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None,
        *,
        l2norm: bool,
        precision: Any,
        whole: bool = False,
        shard: policy.Cut | None = None,
        rows: int | None = None,
        asked_rows: int | None = None,
        backward: bool = False,
        differentiated: bool = False,
        in_place: bool = False,
    ) -> None:
        """Cut as `shard` says, not at all if `whole`, into pieces of `rows`, or as `policy` says to `asked_rows` of the
        forward or the `backward` pass; `differentiated`: a forward pass that the backward pass follows; `in_place`:
        final states take the memory of initial ones, in the backward pass gradients of initial states that of those of
        final ones."""
        self.batch, self.length, self.key_heads, self.key_dim = k.shape
        self.value_heads, self.value_dim = v.shape[2:]
        self.ratio = self.value_heads // self.key_heads
        self.tokens = self.batch * self.length
        self.dtype = q.dtype.name
        self.l2norm = l2norm
        self.split = splits(precision, q.dtype)
        self.packed = packed = segments is not None
        self.sequences = segments.shape[0] if segments is not None else self.batch
        self.sizes = (self.tokens, self.sequences, self.value_heads, self.key_dim, self.value_dim)
        """As `policy` takes them."""
        alone = not (backward or differentiated) and rows is None and policy.wanted_rows(asked_rows) is None
        if rows is None and shard is None and not whole:
            options: dict[str, Any] = {"packed": packed, "asked_rows": asked_rows}
            if backward:
                rows = policy.backward_rows(*self.sizes, ratio=self.ratio, split=self.split, **options)
            else:
                rows = policy.piece_rows(*self.sizes, **options, differentiated=differentiated)
        self.shard = shard
        """How the sequences, of a dense batch, are cut if their pieces have been summarised before."""
        self.rows = rows if shard is None else shard.rows
        """Of a piece, at the most; None for whole sequences."""
        self.is_cut = self.rows is not None
        self.parts = self.sequences
        self.taken: int | None = None
        """Sequences of a forward pass by itself, if these are supposed to stay whole though they may be cut."""
        self.between = 0
        """Rows of what lies between pieces: cuts, or all pieces of a shard."""
        self.chains = 0
        """Places for sequences that are cut (segments.chain_table)."""
        self.in_place = in_place
        self.backward = backward
        self.cut_beyond = -1
        """Rows beyond which sequences are cut, where kernels find out themselves whether any is (kernels/uncut.py)."""
        if rows is not None:
            self.parts = tables.piece_count(self.tokens, self.sequences, rows, packed=packed)
            self.between = self.parts - self.sequences
        self.recurrences = self.parts  # of a head
        if packed and rows is not None:
            self.recurrences = max(self.parts - self.sequences, self.sequences)
        if shard is not None:  # two more pieces a sequence, which are empty
            self.parts, self.recurrences = self.sequences * (shard.pieces + 2), self.sequences * shard.pieces
            self.between = self.parts
            self.chains = self.sequences
        self.value_tile = self.value_tile_of(self.value_heads)
        bounds = tables.dense_segments(self.batch, self.length) if segments is None else segments
        self.tables = {"bounds": jnp.asarray(bounds, jnp.int32)}
        """Operands from which the kernels know where sequences and pieces lie, ..."""
        self.table_steps: list[Step] = []
        """... the kernel, if any, that computes them, ..."""
        self.table_shapes: dict[str, jax.ShapeDtypeStruct] = {}
        """... and what it writes."""
        if shard is not None:
            self.tables |= self.shard_tables(None, shard)
            self.tables["segments"] = self.tables["shard_pieces"][:, :2]
        elif rows is None:
            self.tables["segments"] = self.tables["bounds"]
        elif packed:
            self._find_pieces(rows, alone=alone)
        else:
            self._list_pieces(rows)

    def _find_pieces(self, rows: int, *, alone: bool) -> None:
        """Leaves tables of a packed batch's pieces to the device; `alone`: of those of a forward pass by itself.

        Of two passes both must cut alike, whatever the environment says by the time of the second.
        """
        of_both = policy.cut_beyond if self.split else policy.cut_beyond_in_both
        beyond = (policy.cut_beyond_alone if alone else of_both)(rows, *self.sizes)
        if alone and policy.if_alike(self.tokens, self.sequences).chunks * CHUNK <= beyond:
            self.taken = self.sequences
        if self.sequences <= policy.ASKED_AMONG:
            self.cut_beyond = beyond
        places = tables.cut_count(self.tokens, rows)
        self.chains = min(self.sequences, places)
        shapes = {"segments": (self.parts, 2), "pieces": (self.parts, 4), "spans": (self.sequences, 2)}
        shapes |= {"cuts": (places, 2), "chains": (self.chains, 3)}
        self.table_steps = [Step("layout", layout_kernel.Config(), {"piece_rows": rows, "cut_beyond": beyond})]
        self.table_shapes = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}

    def _list_pieces(self, rows: int) -> None:
        """Makes constants of tables of a dense batch's pieces."""
        pieces, spans, cuts, chains = tables.dense_pieces(self.batch, self.length, rows)
        self.chains = len(chains)
        constants = {"segments": pieces[:, :2], "pieces": pieces, "spans": spans, "cuts": cuts, "chains": chains}
        self.tables |= {name: jnp.asarray(x, jnp.int32) for name, x in constants.items()}

    def value_tile_of(self, heads: int) -> int:
        """Value columns of a block where so many heads are computed at once."""
        return 64 if self.split else policy.value_tile(self.recurrences * heads, self.value_dim)

    @property
    def whole(self) -> int:
        """Heads whose blocks of `forward` have `value_tile` columns; those of the others have 64."""
        if self.is_cut or self.split:
            return self.value_heads
        return policy.whole_heads(self.sequences, self.value_heads, self.value_dim)

    @property
    def beside_prepare(self) -> int:
        """Blocks of `forward` that begin while `prepare` runs and need a multiprocessor each."""
        return 0 if self.is_cut or self.value_tile <= 64 else self.recurrences * self.value_heads

    @property
    def measures(self) -> bool:
        """Whether `forward`, and not `prepare`, is to find lengths of queries."""
        return self.l2norm and not self.split and policy.measured_by_forward(self.ratio, self.value_tile)

    def shard_tables(self, segments: jax.Array | None, cut: policy.Cut) -> dict[str, jax.Array]:
        """Pieces of all sequences and how to go through them, for what is computed before first states are known."""
        bounds = tables.dense_segments(self.batch, self.length) if segments is None else segments
        pieces, entered, left = tables.shard_pieces(bounds, cut.rows, cut.pieces)
        all_of_them = np.repeat(np.arange(len(pieces))[:, None], 2, axis=1)  # as if each stood before a cut, and behind
        found = {"shard_pieces": pieces, "shard_cuts": all_of_them, "entered": entered, "left": left}
        return {name: jnp.asarray(x, jnp.int32) for name, x in found.items()}

    @property
    def firsts(self) -> int:
        """Row of what enters pieces, or leaves them in the backward pass, from which on `compose` keeps what sequences
        that are cut begin with, or end with, or -1."""
        return self.between if self.in_place and self.chains else -1

    def shapes_between(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What lies between the pieces."""
        return Between.shapes(self.between, self.value_heads, self.key_dim, self.value_dim)

    def no_pieces(self) -> dict[str, jax.Array]:
        """What kernels that go through sequences have as operands where they have no pieces of these."""
        if self.is_cut and self.shard is None:
            return {}
        empty = {"pieces": jnp.zeros((0, 4), jnp.int32), "spans": jnp.zeros((0, 2), jnp.int32)}
        return empty | {"no_states": self.states(None)}

    def of_pieces(self, of_sequences: str, between: str) -> dict[str, str]:
        """What these kernels begin with, by their names for it: states `of_sequences` and, where these are cut, those
        `between` their pieces; only those where pieces, of a shard, are to be taken for sequences."""
        without = {between: "no_states", "bounds": "spans"}  # which are empty there
        if self.shard is not None:
            return without | {of_sequences: between}
        return {} if self.is_cut else without

    def prepared_shapes(self, v: jax.Array, precision: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """What `prepare` writes."""
        a, gamma = Residuals.shapes(v, precision).values()
        found = {
            "a": a.update(shape=(self.value_heads, self.tokens, a.shape[3])),
            "gamma": gamma.update(shape=(self.tokens, self.value_heads)),
        }
        of_key_heads = jax.ShapeDtypeStruct((self.tokens, self.key_heads), jnp.float32)
        return found | (dict.fromkeys(_LENGTHS, of_key_heads) if self.l2norm else {})

    def chunk_state_shapes(self, v: jax.Array, precision: Any, *, groups: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        """What `states` writes, for the heads of one of so many groups."""
        shapes = ChunkStates.shapes(self.parts, v, self.key_dim, precision, groups=groups)
        vd = shapes["vd"]
        return shapes | {"vd": vd.update(shape=(self.tokens, *vd.shape[2:]))}

    def chunk_gradient_shape(self, v: jax.Array, precision: Any, *, groups: int, windows: int) -> jax.ShapeDtypeStruct:
        """dh, what `state_gradients` writes: as h, and where operands are split behind it what dv leaves of 64 rows; of
        the chunks of one of so many `windows`."""
        h = self.chunk_state_shapes(v, precision, groups=groups)["h"]
        tiles = h.shape[2] + self.split * CHUNK // state_tile_rows(self.key_dim)
        places = h.shape[0] if windows == 1 else tables.window_count(self.tokens, self.parts)
        return h.update(shape=(places, h.shape[1], tiles, *h.shape[3:]))

    def prepared(self, residuals: Residuals, *, queries: bool = True) -> dict[str, jax.Array]:
        """What `prepare` has written, as operands; without the lengths of `queries` for who does not read them."""
        found = {"gamma": residuals.gamma}
        if self.l2norm:
            assert residuals.lengths is not None
            found |= dict(zip(_LENGTHS[: 1 + queries], residuals.lengths, strict=False))
        return self.flat(**found) | {"a": residuals.a.reshape(self.value_heads, self.tokens, -1)}

    def residuals(self, results: Mapping[str, jax.Array]) -> Residuals:
        """What `prepare` has written, for other calls."""
        lengths = Lengths(*(self.unflat(results[name]) for name in _LENGTHS)) if self.l2norm else None
        a = results["a"].reshape(self.value_heads, self.batch, self.length, -1)
        return Residuals(a, self.unflat(results["gamma"]), lengths=lengths)

    def with_firsts(self, states: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """States between pieces, with room behind them for what `firsts` says."""
        rows = states.shape[0] if self.firsts < 0 else self.firsts + self.chains
        return states.update(shape=(rows, *states.shape[1:]))

    def of_first_pieces(self, states: jax.Array) -> jax.Array:
        """States of all pieces of a shard, of those that a sequence begins with: [P, ...] -> [N, ...]."""
        return self._of_rows(states)[:, 1]

    def of_last_pieces(self, states: jax.Array) -> jax.Array:
        """States of all pieces of a shard, of those that a sequence ends with: [P, ...] -> [N, ...]."""
        return self._of_rows(states)[:, -2]

    def _of_rows(self, states: jax.Array) -> jax.Array:
        """[P, ...] of a dense batch's pieces, summarised before, by rows of the batch: [B, count + 2, ...]."""
        return states.reshape(self.batch, -1, *states.shape[1:])

    def flat(self, **arrays: jax.Array) -> dict[str, jax.Array]:
        """[B, T, ...] -> [B T, ...]."""
        return {name: x.reshape(self.tokens, *x.shape[2:]) for name, x in arrays.items()}

    def unflat(self, x: jax.Array) -> jax.Array:
        """[B T, ...] -> [B, T, ...]."""
        return x.reshape(self.batch, self.length, *x.shape[1:])

    def states(self, state: jax.Array | None) -> jax.Array:
        """The state, or an empty array, which the kernels take for "not given"."""
        return jnp.zeros(self.state_shape(False).shape, jnp.float32) if state is None else state

    def state_shape(self, wanted: bool, *, whole: bool = False) -> jax.ShapeDtypeStruct:
        """[P, Hv, K, V] of all pieces, or `whole` sequences, or P = 0, which the kernels take for "not wanted"."""
        count = self.sequences if whole else self.parts
        shape = (count if wanted else 0, self.value_heads, self.key_dim, self.value_dim)
        return jax.ShapeDtypeStruct(shape, jnp.float32)
