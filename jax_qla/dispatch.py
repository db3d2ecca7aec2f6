"""The local functions on whichever implementation the platform lowered for has: forward and backward, and what these
begin with on a shard of a sequence, before the state at its start or the gradient of that at its end is known: summary
and state_gradient.

All take a batch axis of `jax.vmap` into the batch they have already (see `_fold`), so an implementation never sees
one, and all refuse to be differentiated: their derivative is `vjp.py`'s business, and a second one does not exist.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_qla import policy, refusal
from jax_qla.batching import of_members
from jax_qla.if_used import computed_if_used
from jax_qla.implementations import Choice, by_platform, load
from jax_qla.kernels.common import CHUNK
from jax_qla.l2norm import normalize, normalize_gradient
from jax_qla.residuals import Between, ChunkStates, Keep, Lengths, Pieces, Residuals
from jax_qla.segments import piece_count, rows_of_pieces
from jax_qla.varying import match_varying

_Tree = TypeVar("_Tree")

SECOND_ORDER = (
    "chunk_gated_delta_rule has first derivatives by reverse mode only (jax.grad, jax.vjp); "
    'for jvp and second derivatives use implementation="reference"'
)
"""What a program that needs more derivatives is told."""

_ROWS, _ROWS_OF_HEADS, _STATES, _SEGMENTS = "rows", "rows of heads", "states", "segments"
"""What the leading axes of an operand count: [B, T, ...], [Hv, B, T, ...], [N, ...] (or so many for each) or segments
[N, 2]."""

_KINDS_OF_RESIDUALS = Residuals(_ROWS_OF_HEADS, _ROWS, _ROWS, _STATES, _STATES, _ROWS)  # type: ignore[arg-type]

_KINDS = (*(_ROWS,) * 5, _STATES, _SEGMENTS, _KINDS_OF_RESIDUALS)
"""Of the operands that all functions begin with: q, k, v, g, beta, initial_state, segments and residuals."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static in a call, and the same in all the parts of it that the functions here are."""

    choice: Choice
    """The implementations, neither of which is "reference", and the pieces that were asked for."""
    scale: float
    """Factor of q."""
    l2norm: bool = False
    """Whether q and k are to be divided by sqrt(|x|^2 + 1e-6), over K."""
    precision: Any = None
    """Of the matrix products, as the API has it."""

    def keeps_lengths(self, dtype: Any) -> bool:
        """Whether residuals of q and k of this dtype have `Lengths`: where "cuda" may run, and normalises them."""
        return self.l2norm and self.choice.on_cuda == "cuda" and _normalises("cuda", dtype)


@functools.partial(jax.jit, static_argnames=("settings", "output_final_state", "with_residuals", "piece_rows", "keep"))
def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None = None,
    pieces: Pieces | None = None,
    *,
    settings: Settings,
    output_final_state: bool,
    with_residuals: bool,
    piece_rows: int | None = None,
    keep: Keep = "nothing",
) -> tuple[jax.Array, jax.Array | None, Residuals | None]:
    """o, final_state and residuals of the local gated delta rule.

    Args:
        q, k: [B, T, Hk, K]. v: [B, T, Hv, V] of the same dtype. g (log decay), beta: [B, T, Hv] float32.
        initial_state: [N, Hv, K, V] float32 or None for zeros; N = B without segments.
        segments: None (dense), or int32 [N, 2] with the start and end row of every sequence; B = 1.
        residuals, pieces: what `summary` has computed of these rows, or None.
        settings: by which implementations, and how.
        output_final_state: whether to return the final state.
        with_residuals: whether to return what the backward reads.
        piece_rows: from `policy.kept_rows`: sequences are cut so, which `jax.vmap` does not change then, and the
            residuals say what lies between the pieces. None lets the implementation cut, and keeps nothing of it.
        keep: what residuals have of vd and h, the latter of the given pieces, of those of `piece_rows`, or of whole
            sequences. Not "vd" where operands are split.

    Returns:
        o [B, T, Hv, V] in v's dtype; final_state [N, Hv, K, V] float32 or None; the residuals, or None where they were
        not asked for or no implementation reads them.
    """
    choice = settings.choice
    # "xla" recomputes: where it is the only implementation, residuals would be memory for nothing.
    with_residuals = with_residuals and choice.on_cuda == "cuda"
    if not with_residuals:
        keep = "nothing"
    if not with_residuals or pieces is not None:
        piece_rows = None
    options: dict[str, Any] = {
        "scale": settings.scale,
        "output_final_state": output_final_state,
        "with_residuals": with_residuals,
        "cut": None if pieces is None else _cut(k, v, segments, choice),
        "piece_rows": piece_rows,
        "asked_rows": choice.piece_rows,
        "with_lengths": with_residuals and settings.keeps_lengths(q.dtype),
    }

    def batchable(keep: Keep) -> Callable[..., Any]:
        local = _local(settings, "forward", _forward_of_nothing, {**options, "keep": keep})
        one_by_one = _one_by_one(v, segments, piece_rows=piece_rows, with_states=keep == "states")
        return _batchable(local, (*_KINDS, _STATES), (_ROWS, _STATES, _KINDS_OF_RESIDUALS), one_by_one=one_by_one)

    operands = (q, k, v, g, beta, initial_state, segments, residuals, pieces)
    operands = match_varying(operands, operands)
    if keep == "nothing":
        o, final_state, residuals = batchable(keep)(*operands)
        return o, final_state, residuals
    o, final_state, residuals = kept_if_used(batchable(keep), batchable("nothing"), operands)
    return o, final_state, residuals


def kept_if_used(
    keeping: Callable[..., Any], without: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """o, final_state, residuals and perhaps more by `keeping`; by `without`, whose residuals lack vd and h, where
    nobody uses these, as inside `jax.checkpoint` at first. Not to be differentiated."""

    def with_extras(*operands: Any) -> tuple[Any, Any]:
        o, final_state, residuals, *more = keeping(*operands)
        return (o, final_state, residuals._replace(vd=None, h=None), *more), (residuals.vd, residuals.h)

    function = _first_order(lambda *operands: computed_if_used(with_extras, without, operands))
    (o, final_state, residuals, *more), (vd, h) = function(*operands)
    return (o, final_state, residuals._replace(vd=vd, h=h), *more)


@functools.partial(jax.jit, static_argnames=("settings",))
def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    pieces: Pieces | None = None,
    adjoint_response: jax.Array | None = None,
    *,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Cotangents of the operands of `forward` from those of its results.

    Args:
        q, k, v, g, beta, initial_state, segments, settings: as in `forward`.
        residuals: from `forward`; with `pieces`, perhaps with what `chunk_states` has computed.
        do: [B, T, Hv, V] in v's dtype, or None for zero.
        d_final_state: [N, Hv, K, V] float32, or None for zero. At most one of the two is None.
        pieces, adjoint_response: what `summary` and `state_gradient` have computed of these rows, or both None.

    Returns:
        dq, dk in q's dtype, dv in v's, dg, dbeta in float32, and d_initial_state in float32, or None without an initial
        state.
    """
    choice = settings.choice
    piece_rows = None if residuals is None else _rows_of(residuals.between, k, v, segments, choice)
    options = {
        "scale": settings.scale,
        "cut": None if pieces is None else _cut(k, v, segments, choice),
        "piece_rows": piece_rows,
        "asked_rows": choice.piece_rows,
    }
    local = _local(settings, "backward", _backward_of_nothing, options)
    with_states = residuals is not None and residuals.h is not None
    one_by_one = _one_by_one(v, segments, piece_rows=piece_rows, with_states=with_states)
    kinds = (*_KINDS, _ROWS, *(_STATES,) * 3)
    batchable = _batchable(local, kinds, (*(_ROWS,) * 5, _STATES), one_by_one=one_by_one)
    rows, of_shard = (q, k, v, g, beta), (pieces, adjoint_response)
    operands = (*rows, initial_state, segments, residuals, do, d_final_state, *of_shard)
    dq, dk, dv, dg, dbeta, d_initial_state = batchable(*match_varying(operands, operands))
    return dq, dk, dv, dg, dbeta, d_initial_state


@functools.partial(jax.jit, static_argnames=("settings",))
def summary(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    *,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, Residuals | None, Pieces | None]:
    """What the rows of each sequence do to the state before them: S -> transition S + response, per value head.

    `forward` begins with it where the state before the rows is not known yet.

    Args:
        segments: as in `forward`, but the n-th of N lies in the n-th of N equal parts of the rows.
        residuals: from an earlier call for the same rows, or None.
        All others: as in `forward`; of q the shape alone counts, and its lengths where "cuda" keeps them.

    Returns:
        transition [N, Hv, K, K] and response [N, Hv, K, V], float32. The response is the final state that follows from
        the initial state; a sequence without rows has the identity and its initial state. Then, of a dense batch,
        residuals and pieces that spare `forward` and `backward` to compute them again; None where they were not asked
        for or no implementation reads them.
    """
    options = {
        "cut": _cut(k, v, segments, settings.choice),
        "with_residuals": settings.choice.on_cuda == "cuda",
        "with_lengths": settings.keeps_lengths(q.dtype),
    }
    local = _local(settings, "summary", _summary_of_nothing, options)
    batchable = _batchable(local, _KINDS, (_STATES, _STATES, _KINDS_OF_RESIDUALS, _STATES))
    operands = (q, k, v, g, beta, initial_state, segments, residuals)
    transition, response, residuals, pieces = batchable(*match_varying(operands, operands))
    return transition, response, residuals, pieces


@functools.partial(jax.jit, static_argnames=("settings",))
def state_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    segments: jax.Array | None,
    residuals: Residuals | None,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    pieces: Pieces | None,
    *,
    settings: Settings,
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of the initial states alone, which depends on no state.

    `backward` begins with it where the gradient of the state after the rows is not known yet.

    Args:
        segments: as in `summary`. pieces: from it, or None.
        All others: as in `backward`, residuals included; v only says its shape.

    Returns:
        float32 [N, Hv, K, V]; and, with `pieces`, what spares `backward` to compute it again.
    """
    options = {"cut": _cut(k, v, segments, settings.choice), "scale": settings.scale}
    local = _local(settings, "state_gradient", _state_gradient_of_nothing, options)
    batchable = _batchable(local, (*_KINDS, _ROWS, _STATES, _STATES), (_STATES, _STATES))
    operands = (q, k, v, g, beta, None, segments, residuals, do, d_final_state, pieces)
    d_initial_state, adjoint_response = batchable(*match_varying(operands, operands))
    return d_initial_state, adjoint_response


@functools.partial(jax.jit, static_argnames=("settings",))
def chunk_states(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    residuals: Residuals,
    pieces: Pieces,
    *,
    settings: Settings,
) -> ChunkStates:
    """What `backward` needs of the forward pass of a dense batch, computed before the gradient of the state after the
    rows is known.

    Args:
        residuals, pieces: from `summary`, perhaps with vd of `forward`, which is then returned as it is.
        All others: as in `backward`.
    """
    options = {"cut": _cut(k, v, None, settings.choice)}
    local = _local(settings, "chunk_states", _chunk_states_of_nothing, options)
    one_by_one = _one_by_one(v, None, piece_rows=None, with_states=True)
    batchable = _batchable(local, (*_KINDS, _STATES), (_STATES, _ROWS), one_by_one=one_by_one)
    operands = (q, k, v, g, beta, initial_state, None, residuals, pieces)
    return ChunkStates(*batchable(*match_varying(operands, operands)))


def _one_by_one(v: jax.Array, segments: jax.Array | None, *, piece_rows: int | None, with_states: bool) -> bool:
    """Whether `jax.vmap` computes its members one after the other, since what is kept holds for the same call only:
    where the pieces of packed sequences lie depends on all sequences of a call; and states of chunks of several batches
    are not those of one of them all where tokens are no multiple of a chunk."""
    of_packed_pieces = piece_rows is not None and segments is not None
    return of_packed_pieces or (with_states and v.shape[0] * v.shape[1] % CHUNK != 0)


def _sequences(v: jax.Array, segments: jax.Array | None) -> int:
    """How many there are, of rows v [B, T, Hv, V]."""
    return v.shape[0] if segments is None else segments.shape[0]


def _cut(k: jax.Array, v: jax.Array, segments: jax.Array | None, choice: Choice) -> policy.Cut:
    """The pieces of a dense batch, or of one sequence in each of N equal parts of a row.

    By the shapes that the caller sees, so that `jax.vmap` does not change how many there are.
    """
    batch, tokens, value_heads, value_dim = v.shape
    sequences = _sequences(v, segments)
    longest = batch * tokens // max(sequences, 1)
    return policy.shard_cut(longest, sequences, value_heads, k.shape[3], value_dim, asked_rows=choice.piece_rows)


def _rows_of(
    between: Between | None, k: jax.Array, v: jax.Array, segments: jax.Array | None, choice: Choice
) -> int | None:
    """Rows of the pieces that `forward` has cut the sequences into, whatever `policy` says by now; refused where other
    pieces are asked for."""
    if between is None:
        return None
    batch, tokens = v.shape[:2]
    sequences, packed = _sequences(v, segments), segments is not None
    parts = between.entering.shape[0] + sequences
    rows = rows_of_pieces(batch * tokens, sequences, parts, packed=packed)
    if rows == 0 or parts != piece_count(batch * tokens, sequences, rows, packed=packed):
        raise ValueError(
            f"the residuals are of {parts} pieces, which {sequences} sequences of {batch * tokens} tokens are not cut "
            "into: give those of the same operands, or only their first two arrays"
        )
    if choice.piece_rows is not None:
        sizes = (batch * tokens, sequences, v.shape[2], k.shape[3], v.shape[3])
        asked = policy.piece_rows(*sizes, packed=packed, asked_rows=choice.piece_rows)
        if asked is None or parts != piece_count(batch * tokens, sequences, asked, packed=packed):
            raise ValueError(
                f"the residuals are of {parts} pieces, which are not those of piece_rows={choice.piece_rows}: give "
                "piece_rows as to the forward pass, or only the first two arrays"
            )
    return rows


def _local(
    settings: Settings, function: str, of_nothing: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., tuple[Any, ...]]:
    """`_on_platform` as a function of the operands; `of_nothing`, of these and the options, where there is no token or
    no sequence, which no implementation needs to consider. The options get the precision, which all functions have."""
    options = {**options, "precision": settings.precision}

    def local(*operands: Any) -> tuple[Any, ...]:
        v, segments = operands[2], operands[6]
        if v.shape[0] * v.shape[1] == 0 or _sequences(v, segments) == 0:
            return tuple(of_nothing(*operands, **options))
        return tuple(_on_platform(settings, function, operands, options))

    return local


def _on_platform(settings: Settings, function: str, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """Calls `function` of the implementation that the choice has for the platform this is lowered for."""

    def implementation(name: str) -> Callable[..., Any]:
        call = functools.partial(getattr(load(name), function), **options)
        if not settings.l2norm:
            return call
        if _normalises(name, operands[0].dtype):
            return functools.partial(call, l2norm=True)
        return functools.partial(_of_normalized, call, with_gradients=function == "backward")

    return by_platform(settings.choice, implementation, *operands)


def _normalises(name: str, dtype: Any) -> bool:
    """Whether the implementation normalises q and k of this dtype itself."""
    return jnp.dtype(dtype).name in load(name).L2NORM_DTYPES


def _of_normalized(
    function: Callable[..., tuple[Any, ...]], q: jax.Array, k: jax.Array, *others: Any, with_gradients: bool
) -> tuple[Any, ...]:
    """`function` of q and k normalised; with_gradients: of those it returns, the first two become those of q and k."""
    results = function(normalize(q), normalize(k), *others)
    if not with_gradients:
        return results
    dq, dk, *gradients = match_varying(results, (q, k, others))
    return normalize_gradient(q, dq), normalize_gradient(k, dk), *gradients


def _batchable(
    local: Callable[..., Any], kinds: Sequence[Any], out_kinds: Sequence[Any], *, one_by_one: bool = False
) -> Callable[..., Any]:
    """`local` with a rule for `jax.vmap` and none for differentiation.

    Args:
        kinds, out_kinds: of operands and results.
        one_by_one: whether members of a batch are computed one after the other.
    """
    if one_by_one:
        return _first_order(jax.custom_batching.sequential_vmap(local))

    def together(axis_size: int, *operands: Any) -> tuple[Any, ...]:
        tokens, packed = operands[2].shape[2], operands[6] is not None
        folded = [_fold(kind, x, tokens, packed=packed) for kind, x in zip(kinds, operands, strict=True)]
        results = _batchable(local, kinds, out_kinds)(*folded)
        return tuple(_unfold(kind, x, axis_size, packed=packed) for kind, x in zip(out_kinds, results, strict=True))

    return _first_order(of_members(local, together))


def _first_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which refuses to be differentiated."""
    return refusal.first_order(function, SECOND_ORDER)


def _fold(kind: Any, operand: Any, tokens: int, *, packed: bool) -> Any:
    """Takes the leading axis of the arrays in `operand` into the batch.

    A dense batch gets more rows of B: [n, B, ...] -> [n B, ...]. A packed one, where B = 1, gets longer:
    [n, 1, T, ...] -> [1, n T, ...], with the n N segments of all, those of member i moved by i T. Where heads come
    before the rows, they still do.
    """

    if isinstance(kind, Residuals) and operand is not None:
        return Residuals(*(_fold(*pair, tokens, packed=packed) for pair in zip(kind, operand, strict=True)))

    def fold(x: jax.Array) -> jax.Array:
        if kind == _SEGMENTS:
            x = x + (tokens * jnp.arange(x.shape[0], dtype=jnp.int32))[:, None, None]
        if kind == _ROWS_OF_HEADS:
            members, heads, batch, length, columns = x.shape
            shape = (1, members * length) if packed else (members * batch, length)
            return jnp.moveaxis(x, 0, 1).reshape(heads, *shape, columns)
        if kind == _ROWS and packed:
            return x.reshape(1, x.shape[0] * x.shape[2], *x.shape[3:])
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(fold, operand)


def _unfold(kind: Any, result: Any, axis_size: int, *, packed: bool) -> Any:
    """The inverse of `_fold`."""
    if isinstance(kind, Residuals) and result is not None:
        return Residuals(*(_unfold(*pair, axis_size, packed=packed) for pair in zip(kind, result, strict=True)))

    def unfold(x: jax.Array) -> jax.Array:
        if kind == _ROWS_OF_HEADS:
            heads, batch, length, columns = x.shape
            of_member = (1, length // axis_size) if packed else (batch // axis_size, length)
            return jnp.moveaxis(x.reshape(heads, axis_size, *of_member, columns), 1, 0)
        if kind == _ROWS and packed:
            return x.reshape(axis_size, 1, x.shape[1] // axis_size, *x.shape[2:])
        return x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:])

    return jax.tree.map(unfold, result)


def _forward_of_nothing(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    pieces: Pieces | None,
    *,
    output_final_state: bool,
    with_residuals: bool,
    with_lengths: bool,
    precision: Any,
    keep: Keep,
    **_: Any,
) -> tuple[jax.Array, jax.Array | None, Residuals | None]:
    state = None
    if output_final_state:
        state = _zero_states(q, v, segments) if initial_state is None else initial_state
    residuals = _empty_residuals(q, v, precision, with_lengths) if with_residuals else None
    if residuals is not None and keep != "nothing":
        parts = _sequences(v, segments) if pieces is None else pieces.forgotten.shape[0]
        states = _zeros(ChunkStates, ChunkStates.shapes(parts, v, q.shape[3], precision))
        residuals = residuals._replace(vd=states.vd, h=states.h if keep == "states" else None)
    o, state, residuals = match_varying(
        (jnp.zeros_like(v), state, residuals), (q, k, v, g, beta, initial_state, segments)
    )
    return o, state, residuals


def _backward_of_nothing(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    pieces: Pieces | None,
    adjoint_response: jax.Array | None,
    **_: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    dq, dk, dv, dg, dbeta = map(jnp.zeros_like, (q, k, v, g, beta))
    d_initial_state = None
    if initial_state is not None:
        d_initial_state = jnp.zeros_like(initial_state) if d_final_state is None else d_final_state
    return dq, dk, dv, dg, dbeta, d_initial_state


def _zero_states(q: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    return jnp.zeros((_sequences(v, segments), v.shape[2], q.shape[3], v.shape[3]), jnp.float32)


def _empty_residuals(q: jax.Array, v: jax.Array, precision: Any, with_lengths: bool) -> Residuals:
    lengths = _zeros(Lengths, Lengths.shapes(q)) if with_lengths else None
    return _zeros(Residuals, Residuals.shapes(v, precision))._replace(lengths=lengths)


def _zeros(kind: Callable[..., _Tree], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> _Tree:
    return kind(**{name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()})


def _summary_of_nothing(
    *operands: Any, cut: policy.Cut, with_residuals: bool, with_lengths: bool, precision: Any
) -> Any:
    q, _, v, _, _, initial_state, segments, _ = operands
    response = _zero_states(q, v, segments) if initial_state is None else initial_state
    identity = jnp.broadcast_to(jnp.eye(q.shape[3], dtype=jnp.float32), (*response.shape[:3], q.shape[3]))
    kept: Any = (None, None)
    if with_residuals and segments is None:
        shapes = Pieces.shapes(v.shape[0], cut.pieces, v.shape[2], q.shape[3], v.shape[3])
        kept = (_empty_residuals(q, v, precision, with_lengths), _zeros(Pieces, shapes))
    return match_varying((identity, response, *kept), operands)


def _state_gradient_of_nothing(*operands: Any, **_: Any) -> tuple[jax.Array, jax.Array | None]:
    q, _, v, _, _, _, segments, _, _, d_final_state, pieces = operands
    gradient = _zero_states(q, v, segments) if d_final_state is None else d_final_state
    gradient, of_pieces = match_varying((gradient, None if pieces is None else pieces.response), operands)
    return gradient, of_pieces


def _chunk_states_of_nothing(*operands: Any, precision: Any, **_: Any) -> ChunkStates:
    k, v, pieces = operands[1], operands[2], operands[-1]
    shapes = ChunkStates.shapes(pieces.forgotten.shape[0], v, k.shape[3], precision)
    return match_varying(_zeros(ChunkStates, shapes), operands)
