"""How many rows the pieces have that sequences are cut into, so that one card computes them side by side.

Each function considers pieces of several lengths, and whole sequences, and takes what the model says is fastest
(forward_time.py, backward_time.py) over all cases of the batch (`batches.Batch.cases`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_qla.kernels.common import CHUNK
from jax_qla.policy import costs, few_places, one_kernel, overrides, uneven
from jax_qla.policy.backward_time import BackwardTime
from jax_qla.policy.batches import Alike, Batch, most_are_taken
from jax_qla.policy.forward_time import cut_beyond, forward_time, shard_time
from jax_qla.segments import cut_count, piece_count

_LENGTHS = tuple(n << shift for shift in range(10) for n in (8, 12))
"""Chunks of a piece that are considered, ..."""
_PIECES = range(2, 34)
"""... and numbers of equal pieces (docs/performance_policy.md, "Packed sequences in pieces of any length")."""

_ROWS_OF_MEMORY = 512
"""Tokens for every cut, or piece of a dense batch, at the least: what is kept of it and a head then is no more than its
part of v and o (docs/performance_policy.md, "Pieces")."""

_ROWS_IN_ONE = 768
"""Rows of a piece from which on both passes are cut so that kernels/backward.py fills the card: of shorter ones what is
kept takes the memory that it spares (a35810d)."""

# What the model has to promise, as a part of the time, before something is cut otherwise than without it.

_GAIN_OF_ODD = 0.03
"""Of a forward pass of several packed sequences, for pieces that are not of 2^n rows. They fill the card only if the
sequences are alike (docs/performance_policy.md, "Packed sequences in pieces of any length")."""
_GAIN_OF_FEW = 0.02
"""Of a forward pass by itself of few packed sequences, for any pieces ("Few places")."""
_GAIN_OF_BOTH = 0.03
"""Of both passes of a dense batch, for cutting the forward pass where it would not be by itself
(docs/performance_policy.md, "Both passes together"), ..."""
_GAIN_OF_BOTH_PACKED = 0.06
"""... and of several packed sequences ("Several packed sequences, counted as one")."""


class Cut(NamedTuple):
    """How a shard of a sequence is cut."""

    rows: int
    """Of a piece, a multiple of 64."""
    pieces: int
    """Their number."""


def piece_rows(
    tokens: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    packed: bool,
    asked_rows: int | None = None,
    differentiated: bool = False,
) -> int | None:
    """Rows of the pieces that sequences are cut into in the forward pass, or None to leave them whole.

    Args:
        tokens: of the whole batch, B T.
        sequences: number of sequences.
        heads: value heads.
        key_dim, value_dim: K and V.
        packed: whether the lengths are values. One sequence may then have all tokens; if they turn out to be equal,
            a cut that was made for that finds nothing to do.
        asked_rows: what the caller wants, a multiple of 64, 0 for whole sequences, or None.
        differentiated: whether a backward pass follows, which has other pieces (`kept_rows`).

    Raises:
        ValueError: the environment does not say a multiple of 64.
    """
    batch, wanted = Batch(tokens, sequences, heads, key_dim, value_dim, packed), wanted_rows(asked_rows)
    return _forward_rows(batch, wanted, by_itself=not differentiated)


def _forward_rows(batch: Batch, wanted: int | None, *, by_itself: bool = False) -> int | None:
    """`piece_rows`, where `wanted_rows` has been found; `by_itself`: no backward pass follows."""
    if batch.tokens == 0 or batch.sequences == 0 or wanted == 0:
        return None
    if wanted is not None:
        return _even(wanted // CHUNK, batch.divided)
    few = by_itself and few_places.has_few_places(batch)

    def time(alike: Alike, length: int | None) -> float:
        kernels = few_places.few_time(batch, alike, length) if few else forward_time(batch, alike, length, alone=True)
        found = kernels + costs.prepare(batch.chunks, batch.heads)
        if length is None:
            return found
        if few:
            found /= 1 - _GAIN_OF_FEW
        return found / (1 - _GAIN_OF_ODD) if batch.several and not _is_power(length) else found

    best = _best((None, *_lengths(batch)), time, few_places.cases(batch) if few else batch.cases)
    return None if best is None else _even(best, batch.divided)


def backward_rows(
    tokens: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    ratio: int,
    split: bool,
    packed: bool,
    asked_rows: int | None = None,
) -> int | None:
    """Rows of the pieces of the backward pass: those of `piece_rows`, with the same arguments, or None.

    Sequences that are cut in the forward pass may be better left whole here: two recurrences then run side by side.
    They should be cut where kernels/backward.py then fills the card (`in_one`).

    Args:
        tokens, sequences, heads, key_dim, value_dim, packed, asked_rows: as in `piece_rows`.
        ratio: value heads of a key head.
        split: whether operands are sums of two numbers.

    Raises:
        ValueError: the environment says what cannot be.
    """
    batch, wanted = Batch(tokens, sequences, heads, key_dim, value_dim, packed), wanted_rows(asked_rows)
    rows = _forward_rows(batch, wanted)
    return rows if wanted is not None else _backward_rows(rows, BackwardTime(batch, ratio, split))


def _backward_rows(rows: int | None, backward: BackwardTime) -> int | None:
    """`rows`, of the forward pass, or None where the backward pass is faster with whole sequences."""
    if rows is None:
        return None
    best = _best((None, rows // CHUNK), backward, backward.batch.cases)
    return None if best is None else rows


def kept_rows(
    tokens: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    ratio: int,
    split: bool,
    packed: bool,
    asked_rows: int | None = None,
    with_states: bool = False,
) -> int | None:
    """Rows of the pieces of both passes, with the arguments of `backward_rows`, if what the forward pass finds of the
    pieces can be kept for the backward pass; else None. Each then cuts as it is faster by itself.

    Where sequences would fill the card if they were alike, they have the length that suits uneven ones (uneven.py).

    The backward pass finds out from their number how long they are (`segments.rows_of_pieces`). It is not kept where
    the backward pass leaves the sequences whole, unless `with_states`, where the states before all chunks are kept too,
    which are those of the pieces of the forward pass and more than what is found of these.

    Raises:
        ValueError: the environment says what cannot be.
    """
    if tokens == 0 or sequences == 0:
        return None
    batch, wanted = Batch(tokens, sequences, heads, key_dim, value_dim, packed), wanted_rows(asked_rows)
    forward = _forward_rows(batch, wanted)
    if wanted is not None:
        return forward
    backward = BackwardTime(batch, ratio, split)
    back = _backward_rows(forward, backward)
    considered = (_rows_for_both(forward, back, backward), back, forward if with_states else None)
    rows = next((rows for rows in considered if rows is not None), None)
    if rows is None or split or (length := uneven.piece_length(batch, ratio)) is None:
        return rows
    return _even(length, batch.divided)


def _rows_for_both(forward: int | None, back: int | None, backward: BackwardTime) -> int | None:
    """Rows of pieces with which both passes together gain enough against `forward` and `back`, those of each by itself;
    None if there are none."""
    batch = backward.batch

    def of_passes(alike: Alike, forward: int | None, back: int | None) -> float:
        return forward_time(batch, alike, forward) + backward(alike, back)

    gain = _gain_of_both(batch, forward)
    fitting = [length for length in _lengths(batch) if _is_for_both(_even(length, batch.divided), backward)]

    def time(alike: Alike, length: int | None) -> float:
        if length is None:
            return of_passes(alike, forward and forward // CHUNK, back and back // CHUNK)
        return of_passes(alike, length, length) / (1 - gain)

    best = _best((None, *fitting), time, batch.cases)
    return None if best is None else _even(best, batch.divided)


def _is_for_both(rows: int | None, backward: BackwardTime) -> bool:
    """Whether both passes may be cut into pieces of so many rows for each other's sake: if kernels/backward.py then
    fills the card, or, in pieces of any length, there is one sequence, whose pieces are known to be alike, and what
    three kernels take has been measured."""
    if rows is None:
        return False
    batch, ratio, split = backward.batch, backward.ratio, backward.split
    if batch.packed:
        pieces = cut_count(batch.tokens, rows)
    else:
        pieces = piece_count(batch.tokens, batch.sequences, rows, packed=False)
    sizes = (pieces, batch.heads, batch.key_dim, batch.value_dim)
    chosen = one_kernel.in_one(*sizes, ratio=ratio, split=split, packed=False)
    if chosen != "never" and pieces > batch.sequences:
        return rows >= _ROWS_IN_ONE
    return batch.sequences == 1 and costs.of_vd(batch.key_dim, batch.value_dim, split=split)


def _gain_of_both(batch: Batch, forward: int | None) -> float:
    """What both passes have to gain by pieces for each other's sake, where the forward pass has `forward` by itself:
    nothing if there is one sequence, or if sequences that are alike are cut anyway."""
    if batch.sequences == 1:
        return 0.0
    if forward is not None and (not batch.packed or batch.tokens > batch.sequences * cut_beyond(forward, *batch.sizes)):
        return 0.0
    return _GAIN_OF_BOTH_PACKED if batch.packed else _GAIN_OF_BOTH


def shard_cut(
    tokens: int,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    asked_rows: int | None = None,
) -> Cut:
    """The pieces of sequences whose first state another device knows, so that all of them are summarised.

    Args:
        tokens: of the longest of the sequences on this device.
        sequences, heads, key_dim, value_dim, asked_rows: as in `piece_rows`; a shard left whole is one piece.

    Raises:
        ValueError: the environment does not say a multiple of 64.
    """
    chunks = max(-(-tokens // CHUNK), 1)
    wanted = wanted_rows(asked_rows)
    if wanted is not None:
        length = min(wanted // CHUNK or chunks, chunks)
    else:
        batch = Batch(tokens * sequences, sequences, heads, key_dim, value_dim, packed=False)
        lengths = [n for n in _lengths_of(chunks) if n < chunks and n * CHUNK >= _ROWS_OF_MEMORY] + [chunks]
        length = min(lengths, key=lambda n: shard_time(batch, Alike(sequences, chunks), n))
    return Cut(length * CHUNK, -(-chunks // length))


def wanted_rows(asked_rows: int | None) -> int | None:
    """Rows of a piece as the caller says, else as the environment does, 0 for no pieces, None where neither says it."""
    return overrides.rows_override() if asked_rows is None else asked_rows


def _lengths(batch: Batch) -> list[int]:
    """Chunks of a piece that are considered, also those of all small numbers of equal pieces, so that these fill the
    card whatever the number of heads is. Of a packed batch that has many places, of whose sequences less is known, only
    powers of two."""
    lengths = _lengths_of(batch.divided)
    if batch.several:
        many = not most_are_taken(batch.sequences)
        return [n for n in lengths if n * CHUNK >= _ROWS_OF_MEMORY and (_is_power(n) or not many)]

    def pieces(length: int) -> int:
        return piece_count(batch.tokens, batch.sequences, length * CHUNK, packed=False)

    return [n for n in lengths if _ROWS_OF_MEMORY * pieces(n) <= batch.tokens]


def _lengths_of(chunks: int) -> list[int]:
    """The same of a sequence that has so many, whatever memory they take."""
    return list(dict.fromkeys((*_LENGTHS, *(-(-chunks // pieces) for pieces in _PIECES))))


def _is_power(length: int) -> bool:
    """Whether it is one of two."""
    return length & (length - 1) == 0


def _even(length: int, chunks: int) -> int | None:
    """Rows of the pieces, as equal as can be, that `chunks` fall into if these have up to `length` chunks each; None if
    that is one piece."""
    pieces = -(-chunks // length)
    return None if pieces <= 1 else -(-chunks // pieces) * CHUNK


def _best(
    lengths: Sequence[int | None], time: Callable[[Alike, int | None], float], cases: Sequence[tuple[float, Alike]]
) -> int | None:
    """The one of `lengths` (chunks of a piece, None for whole sequences) with the least `time`, as a part of the least
    of each case and by the cases' weights."""
    weights, batches = zip(*cases, strict=True)
    table = {length: [time(alike, length) for alike in batches] for length in lengths}
    least = [min(times) for times in zip(*table.values(), strict=True)]

    def excess(length: int | None) -> float:
        return sum(weight * time / limit for weight, time, limit in zip(weights, table[length], least, strict=True))

    return min(lengths, key=excess)
