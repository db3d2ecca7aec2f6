"""The gated delta rule on one shard of the batch, whose sequences may continue from device to device.

The state after a run of tokens is affine in the state before it: S_end = M S_start + N, per value head. So where the
sequence axis is sharded, every device summarises its tokens as (M, N) from a zero state, and the summaries are composed
over the devices. Then the ordinary local function runs, from the true first states. The backward pass mirrors it:
dS_start = M^T dS_end + N', with N' from the device's own cotangents. Of a dense batch, the local function goes on from
what the summary has computed (`dispatch.summary` says what that is).

Composition takes ceil(log2(D)) rounds of `ppermute` over D devices, each of at most one transition [K, K] and one
response [K, V] in float32 per value head and row of the batch. In the backward pass of a dense batch the kernels of
"cuda" recompute chunk states during the first of them.

In a packed batch at most one sequence of a row crosses a given border. Only it takes part: the one that leaves a shard
gives N, from its start if that lies in the shard, and M is zero unless one sequence covers the whole shard.

Shapes here, on one device: rows q, k, v, g, beta, o are [B, T, ...] with T the shard's tokens; a dense batch has states
[B, Hv, K, V] and `segments` None; a packed one has states [B, N, Hv, K, V] and segments int32 [B, N, 2], start and end
of N sequences in every row, counted from the first token of the row's first shard. With `axes`, the mesh axes over
which the rows are cut, every device passes the same initial states, segments and cotangents of final states; of states
and gradients of states that it returns, a device fills in those of the sequences that end or start with it, and zero
elsewhere: their sum over `axes` is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_qla import dispatch
from jax_qla.dispatch import Settings
from jax_qla.mesh import Axes, shift
from jax_qla.residuals import Keep, Pieces, Residuals

_Tree = TypeVar("_Tree")


class Carry(NamedTuple):
    """What a device keeps of the exchange between forward and backward."""

    incoming: jax.Array
    """[B, Hv, K, V] float32, the state before the shard."""
    transition: jax.Array
    """M [B, Hv, K, K] float32."""
    pieces: Pieces | None
    """Of a dense batch, where the kernels of "cuda" may read them."""


def _product(transition: jax.Array, y: jax.Array, packed: bool) -> jax.Array:
    product = jnp.matmul(transition, y, precision=jax.lax.Precision.HIGHEST)
    if not packed:
        return product
    # Zero where y is of another sequence, which must not matter, not even as 0 * NaN.
    return _mask(jnp.any(transition != 0, axis=(-2, -1)), product)


def response_before(
    transition: jax.Array,
    response: jax.Array,
    axes: Axes,
    *,
    reverse: bool = False,
    packed: bool = False,
    meanwhile: _Tree = None,  # type: ignore[assignment]
) -> tuple[jax.Array, _Tree]:
    """The state before this shard: the maps S -> transition S + response of all shards before it, applied to zero.

    Args:
        transition: [..., K, K], response: [..., K, V], of this shard.
        axes: the mesh axes along which the shards follow each other.
        reverse: whether they follow in reverse.
        packed: whether a transition may be zero because what is before the shard is another sequence's.
        meanwhile: arrays that are to be computed before what other devices send is looked at.

    Returns:
        The state, and `meanwhile`.
    """
    devices, columns = jax.lax.axis_size(axes), response.shape[-1]
    before, transition_before = jnp.zeros_like(response), None
    reach = 1
    # (response, transition) are of `reach` shards that end with this one, those `before` of the same without this one.
    while reach < devices:
        more = 2 * reach < devices
        # The last round needs no transition; in the others both are sent as one.
        sent = jnp.concatenate([response, transition], axis=-1) if more else response
        received = shift(sent, reach, axes, reverse=reverse)
        if reach == 1:
            received, meanwhile = jax.lax.optimization_barrier((received, meanwhile))
        # Where nothing is received the state before is zero, and so is the map: the response says it all.
        if transition_before is not None:
            received_before = _product(transition_before, received, packed)
            before, transition_before = before + received_before[..., :columns], received_before[..., columns:]
        else:
            before, transition_before = received[..., :columns], received[..., columns:]
        if more:
            needed = received if 4 * reach < devices else received[..., :columns]
            product = _product(transition, needed, packed)
            response, transition = response + product[..., :columns], product[..., columns:]
        reach *= 2
    return before, meanwhile


class _Shard:
    """Which sequences of a packed batch start, end, continue into and leave this shard: bool [B, N] each."""

    def __init__(self, segments: jax.Array, tokens: int, axes: Axes) -> None:
        index = jax.lax.axis_index(axes)
        first, last = index * tokens, (index + 1) * tokens
        start, end = segments[..., 0], segments[..., 1]
        self.tokens = tokens
        self.local = jnp.clip(segments - first, 0, tokens)
        """int32 [B, N, 2], the rows of each sequence in this shard."""
        self.continues = (start < first) & (end > first)
        self.leaves = (start < last) & (end > last)
        empty = (start >= end) & (index == 0)
        self.starts = ((start < end) & (start >= first) & (start < last)) | empty
        self.ends = ((start < end) & (end > first) & (end <= last)) | empty

    def covered(self) -> jax.Array:
        """bool [B]: one sequence covers all of the shard and goes beyond it on both sides."""
        return jnp.any(self.continues & self.leaves, axis=1)

    def leaving_rows(self) -> jax.Array:
        """int32 [B, 2]: rows of the sequence that leaves the shard, empty if none does."""
        start = jnp.max(jnp.where(self.leaves, self.local[..., 0], 0), axis=1)
        start = jnp.where(jnp.any(self.leaves, axis=1), start, self.tokens)
        return jnp.stack([start, jnp.full_like(start, self.tokens)], axis=1)

    def continuing_rows(self) -> jax.Array:
        """int32 [B, 2]: rows of the sequence that continues into the shard, empty if none does."""
        end = jnp.max(jnp.where(self.continues, self.local[..., 1], 0), axis=1)
        return jnp.stack([jnp.zeros_like(end), end], axis=1)


def _mask(which: jax.Array, x: jax.Array, otherwise: jax.Array | float = 0.0) -> jax.Array:
    """x where `which`, whose axes are the first of x's."""
    return jnp.where(which.reshape(*which.shape, *(1,) * (x.ndim - which.ndim)), x, otherwise)


def _chosen(which: jax.Array, states: jax.Array) -> jax.Array:
    """States [B, N, ...] of the one sequence of each row where `which` [B, N], zero where there is none: [B, ...]."""
    index = jnp.argmax(which, axis=1).reshape(-1, *(1,) * (states.ndim - 1))
    return _mask(jnp.any(which, axis=1), jnp.take_along_axis(states, index, axis=1)[:, 0])


def _is_first(axes: Axes) -> jax.Array:
    return jax.lax.axis_index(axes) == 0


def _is_last(axes: Axes) -> jax.Array:
    return jax.lax.axis_index(axes) == jax.lax.axis_size(axes) - 1


def flatten(rows: Any, states: Any, segments: jax.Array | None) -> tuple[Any, Any, jax.Array | None]:
    """The form that `dispatch` takes: a packed batch becomes one row.

    Args:
        rows: arrays [B, T, ...] and `Residuals` of these alone. states: arrays [B, N, ...]. segments: [B, N, 2]. Of a
            dense batch (None) all are returned as they are.

    Returns:
        rows [1, B T, ...], states [B N, ...], segments [B N, 2].
    """
    if segments is None:
        return rows, states, None
    batch, tokens = jax.tree.leaves(rows)[0].shape[:2]
    offset = tokens * jnp.arange(batch, dtype=jnp.int32)
    return (
        _with_rows(rows, 1, batch * tokens),
        jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states),
        (segments + offset[:, None, None]).reshape(-1, 2),
    )


def _unflatten(rows: Any, states: Any, like: jax.Array, segments: jax.Array | None) -> tuple[Any, Any]:
    """The inverse of `flatten` for its first two results, with B and T those of `like`."""
    if segments is None:
        return rows, states
    batch, tokens = like.shape[:2]
    return (
        _with_rows(rows, batch, tokens),
        jax.tree.map(lambda x: x.reshape(*segments.shape[:2], *x.shape[1:]), states),
    )


def _with_rows(rows: Any, batch: int, tokens: int) -> Any:
    """Arrays [B, T, ...], and a [Hv, B, T, ..] of residuals, with other B and T."""

    def change(x: Any) -> Any:
        if isinstance(x, Residuals):
            a = x.a.reshape(x.a.shape[0], batch, tokens, *x.a.shape[3:])
            return Residuals(a, *jax.tree.map(change, x[1:]))
        return x.reshape(batch, tokens, *x.shape[2:])

    return jax.tree.map(change, rows, is_leaf=lambda x: isinstance(x, Residuals))


def _of_rows(residuals: Residuals | None) -> Residuals | None:
    """The residuals that have rows."""
    return None if residuals is None else residuals._replace(between=None, h=None)


def _of_pieces(residuals: Residuals) -> dict[str, Any]:
    """The others, by field."""
    return {"between": residuals.between, "h": residuals.h}


def on_one_row(
    function: Callable[..., tuple[jax.Array, jax.Array | None]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """o and final states of uncut sequences, by a function of the operands as `dispatch` takes them."""
    rows, states, flat_segments = flatten((q, k, v, g, beta), initial_state, segments)
    return _unflatten(*function(*rows, states, flat_segments), v, segments)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    *,
    axes: Axes,
    settings: Settings,
    output_final_state: bool,
    with_residuals: bool,
    piece_rows: int | None = None,
    keep: Keep = "nothing",
) -> tuple[jax.Array, jax.Array | None, Residuals | None, Carry | None]:
    """o, final_state, residuals and, with `axes`, what `backward` needs of the exchange.

    Args:
        q, k, v, g, beta, initial_state, segments, axes: see the module; g and beta float32, states float32 or None.
        settings, output_final_state, with_residuals, piece_rows, keep: as in `dispatch.forward`.
    """
    states, local_segments = initial_state, segments
    carry = residuals = None
    ends = None
    if axes:
        carry, residuals = _exchange(q, k, v, g, beta, initial_state, segments, None, axes=axes, settings=settings)
        states, ends = carry.incoming, _is_last(axes)
        if segments is not None:
            shard = _Shard(segments, v.shape[1], axes)
            local_segments, ends = shard.local, shard.ends
            states = _true_first_states(shard, carry, initial_state)
    rows, states, flat_segments = flatten((q, k, v, g, beta), states, local_segments)
    pieces = None if carry is None else carry.pieces
    o, final_state, residuals = dispatch.forward(
        *(*rows, states, flat_segments, residuals, pieces),
        settings=settings,
        output_final_state=output_final_state,
        with_residuals=with_residuals,
        piece_rows=piece_rows,
        keep=keep,
    )
    (o, of_rows), final_state = _unflatten((o, _of_rows(residuals)), final_state, v, segments)
    if residuals is not None:
        residuals = of_rows._replace(**_of_pieces(residuals))
    if final_state is not None and ends is not None:
        final_state = _mask(ends, final_state)
    return o, final_state, residuals, carry


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    carry: Carry | None,
    do: jax.Array | None,
    d_final_state: jax.Array | None,
    *,
    axes: Axes,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """dq, dk, dv, dg, dbeta and d_initial_state (None without initial_state).

    Args:
        residuals, carry: from `forward`; without `carry` the exchange is repeated.
        do: [B, T, Hv, V], d_final_state: of final_state's shape, the same on all shards of a row; None for zero.
        All others: as in `forward`.
    """
    states, d_states = initial_state, d_final_state
    shard = pieces = adjoint_response = None
    local_segments = segments
    if axes:
        if carry is None:
            of_summary = residuals and residuals._replace(vd=None, between=None, h=None)
            carry, _ = _exchange(q, k, v, g, beta, initial_state, segments, of_summary, axes=axes, settings=settings)
        rows: Any = (q, k, v, g, beta)
        if segments is None:
            if d_final_state is not None:
                d_final_state = _mask(_is_last(axes), d_final_state)
            pieces = carry.pieces
            response, adjoint_response = dispatch.state_gradient(
                *rows, None, residuals, do, d_final_state, pieces, settings=settings
            )
            states = carry.incoming
            if pieces is not None and residuals is not None and residuals.h is None:
                # While the others answer: after the response is known and before what is received is looked at.
                response, entering = jax.lax.optimization_barrier((response, states))
                chunk_states = dispatch.chunk_states(*rows, entering, residuals, pieces, settings=settings)
                residuals = residuals._replace(**chunk_states._asdict())
            outgoing, residuals = response_before(
                jnp.swapaxes(carry.transition, -1, -2), response, axes, reverse=True, meanwhile=residuals
            )
            d_states = outgoing if d_final_state is None else outgoing + d_final_state
        else:
            shard = _Shard(segments, v.shape[1], axes)
            local_segments = shard.local
            if d_final_state is not None:
                d_final_state = _mask(shard.ends, d_final_state)
            d_of_continuing = None if d_final_state is None else _chosen(shard.continues, d_final_state)[:, None]
            (rows, flat_residuals, flat_do), d_of_continuing, continuing = flatten(
                (rows, _of_rows(residuals), do), d_of_continuing, shard.continuing_rows()[:, None]
            )
            response, _ = dispatch.state_gradient(
                *rows, continuing, flat_residuals, flat_do, d_of_continuing, None, settings=settings
            )
            transposed = jnp.swapaxes(carry.transition, -1, -2)
            outgoing, _ = response_before(transposed, response, axes, reverse=True, packed=True)
            states = _true_first_states(shard, carry, initial_state)
            d_states = _mask(shard.leaves, outgoing[:, None], 0.0 if d_final_state is None else d_final_state)
    flat, (states, d_states), flat_segments = flatten(
        (q, k, v, g, beta, _of_rows(residuals), do), (states, d_states), local_segments
    )
    flat_residuals = None if residuals is None else flat[5]._replace(**_of_pieces(residuals))
    *gradients, d_states = dispatch.backward(
        *(*flat[:5], states, flat_segments, flat_residuals, flat[6], d_states),
        *(pieces, adjoint_response),
        settings=settings,
    )
    gradients, d_states = _unflatten(tuple(gradients), d_states, v, segments)
    if initial_state is None:
        return (*gradients, None)
    if axes:
        d_states = _mask(shard.starts if shard is not None else _is_first(axes), d_states)
    return (*gradients, d_states)


def _exchange(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    segments: jax.Array | None,
    residuals: Residuals | None,
    *,
    axes: Axes,
    settings: Settings,
) -> tuple[Carry, Residuals | None]:
    """Summarises this shard and receives the state before it; and what the summary knows of the residuals.

    Arguments as in `forward`, and `residuals` from it if it has run, of which a summary reads (and "xla" returns, where
    the platform decides) no vd, between nor h.
    """
    if segments is None:
        # The first shard's response includes the initial state, so what any shard receives does.
        first = None if initial_state is None else _mask(_is_first(axes), initial_state)
        transition, response, residuals, pieces = dispatch.summary(
            *(q, k, v, g, beta, first, None, residuals), settings=settings
        )
        incoming, _ = response_before(transition, response, axes)
        return Carry(incoming if first is None else incoming + first, transition, pieces), residuals
    shard = _Shard(segments, v.shape[1], axes)
    first = None if initial_state is None else _chosen(shard.leaves & shard.starts, initial_state)[:, None]
    (rows, residuals), first, leaving = flatten(
        ((q, k, v, g, beta), _of_rows(residuals)), first, shard.leaving_rows()[:, None]
    )
    transition, response, _, _ = dispatch.summary(*rows, first, leaving, residuals, settings=settings)
    transition = _mask(shard.covered(), transition)
    incoming, _ = response_before(transition, response, axes, packed=True)
    return Carry(incoming, transition, None), None


def _true_first_states(shard: _Shard, carry: Carry, initial_state: jax.Array | None) -> jax.Array:
    """[B, N, Hv, K, V]: the states before the rows that each sequence has in this shard."""
    return _mask(shard.continues, carry.incoming[:, None], 0.0 if initial_state is None else initial_state)
