"""Packing tables against lists made in plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_qla import reference
from jax_qla import segments as sg
from jax_qla.kernels.common import FIRST, LAST

recurrence: Any = reference.recurrence


def _table_by_hand(segments: Any, tokens: int) -> list[tuple[int, int, int, int]]:
    """Slots as their definition reads: the chunks of each sequence, then the gap after it."""
    starts = [start for start, _ in segments]
    firsts = [start // 64 + n + 1 for n, start in enumerate(starts)] + [tokens // 64 + len(segments) + 1]
    table = []
    for n, (start, end), gap_end, first, next_first in zip(
        range(-1, len(segments)), [(0, 0), *segments], [*starts, tokens], [0, *firsts], firsts, strict=False
    ):
        chunks = [(row, min(64, end - row), 0) for row in range(start, end, 64)] or [(start, 0, 0)]
        row, rows, _ = chunks[-1]
        chunks[-1] = (row, rows, min(64, gap_end - end))
        chunks += [(row, 0, min(64, gap_end - row)) for row in range(end + 64, gap_end, 64)]
        assert len(chunks) <= next_first - first
        chunks += [(gap_end, 0, 0)] * (next_first - first - len(chunks))
        table += [(max(n, 0), *chunk) for chunk in chunks]
    return table


def _random_segments(random: np.random.Generator, tokens: int, sequences: int) -> np.ndarray:
    """Half the time without gaps; some sequences empty."""
    if random.random() < 0.5:
        bounds = np.sort(random.integers(0, tokens + 1, sequences + 1))
        return np.stack([bounds[:-1], bounds[1:]], axis=1).astype(np.int32)
    return np.sort(random.integers(0, tokens + 1, 2 * sequences)).reshape(-1, 2).astype(np.int32)


def test_chunk_table_covers_every_row_once() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        tokens, sequences = int(random.integers(0, 700)), int(random.integers(0, 9))
        segments = _random_segments(random, tokens, sequences)
        table = sg.chunk_table(segments, tokens)
        assert table.shape == (sg.slot_count(tokens, sequences), 4)
        assert table.dtype == np.int32
        assert [tuple(row) for row in table.tolist()] == _table_by_hand(segments.tolist(), tokens)
        covered = np.zeros(tokens, int)
        inside = np.zeros(tokens, bool)
        for _, first, rows, fill in table:
            assert 0 <= first <= first + rows + fill <= tokens
            covered[first : first + rows + fill] += 1
            inside[first : first + rows] = True
        assert np.all(covered == 1)
        expected = np.zeros(tokens, bool)
        for start, end in segments:
            expected[start:end] = True
        np.testing.assert_array_equal(inside, expected)


@pytest.mark.parametrize("limit", [1024, 3])
def test_chunk_table_on_the_device(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing with all and searching give what NumPy gives."""
    monkeypatch.setattr(sg, "_COMPARE_ALL_LIMIT", limit)
    random = np.random.default_rng(1)
    table = jax.jit(lambda segments: sg.chunk_table(segments, 700))
    for _ in range(20):
        segments = _random_segments(random, 700, 8)
        got = table(segments)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, sg.chunk_table(segments, 700))


@pytest.mark.parametrize("limit", [1024, 3])
def test_piece_table(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence is cut into its pieces, in order, and the table is a list of segments itself."""
    monkeypatch.setattr(sg, "_COMPARE_ALL_LIMIT", limit)
    random = np.random.default_rng(3)
    on_device = jax.jit(lambda segments: sg.piece_table(segments, sg.piece_count(700, 8, 128), 128))
    for _ in range(50):
        segments = _random_segments(random, 700, 8)
        table = sg.piece_table(segments, sg.piece_count(700, 8, 128), 128)
        np.testing.assert_array_equal(on_device(segments), table)
        assert table.shape == (sg.piece_count(700, 8, 128), 4)
        assert np.all(np.diff(table[:, :2].reshape(-1)) >= 0)
        used = np.zeros(len(table), bool)
        for n, (start, end) in enumerate(segments):
            first, count = sg.first_piece(start, n, 128), sg.pieces_of(segments, 128)[n]
            own = table[first : first + count]
            used[first : first + count] = True
            bounds = [(row, min(row + 128, end)) for row in range(start, end, 128)] or [(start, end)]
            assert own[:, :2].tolist() == [list(bound) for bound in bounds]
            assert np.all(own[:, 2] == n)
            position = [FIRST * (i == 0) + LAST * (i == count - 1) for i in range(count)]
            assert own[:, 3].tolist() == position
        unused = table[~used]
        assert np.all(unused[:, 0] == unused[:, 1])
        assert np.all(unused[:, 3] == FIRST + LAST)


@pytest.mark.parametrize("limit", [1024, 3])
@pytest.mark.parametrize("sequences", [2, 8])
def test_cuts_and_chains(sequences: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut of every sequence has a place of its own, and every sequence that is cut one; there are five for cuts,
    which are more than sequences, or fewer."""
    monkeypatch.setattr(sg, "_COMPARE_ALL_LIMIT", limit)
    random = np.random.default_rng(sequences)
    cuts, parts = sg.cut_count(700, 128), sg.piece_count(700, sequences, 128)
    chains = min(cuts, sequences)
    on_device = jax.jit(lambda x: (sg.cut_table(x, cuts, 128), sg.chain_table(x, chains, 128)))
    most = 0
    for _ in range(60):
        segments = _random_segments(random, 700, sequences)
        tables = sg.cut_table(segments, cuts, 128), sg.chain_table(segments, chains, 128)
        for ours, traced in zip(tables, on_device(segments), strict=True):
            np.testing.assert_array_equal(ours, traced)
            assert ours.dtype == np.int32 == traced.dtype
        before, after = tables[0][tables[0][:, 0] >= 0].T
        pieces = sg.piece_table(segments, parts, 128)
        assert np.all(tables[0][tables[0][:, 0] < 0] == -1)
        assert before.tolist() == np.flatnonzero(pieces[:, 3] < LAST).tolist()
        assert after.tolist() == np.flatnonzero(pieces[:, 3] % LAST != FIRST).tolist()
        count = sg.pieces_of(segments, 128)
        first = sg.first_piece(segments[:, 0], np.arange(sequences), 128)
        chained = tables[1][tables[1][:, 1] > 0]
        assert not np.any(tables[1][tables[1][:, 1] == 0])
        assert chained.tolist() == [[first[n], count[n], n] for n in np.flatnonzero(count > 1)]
        most = max(most, len(chained))
    assert most > 1


def test_dense_pieces() -> None:
    """They are those of a packed batch with the same bounds, without unused ones; their number says their length."""
    for batch, tokens, rows in ((1, 1, 64), (2, 200, 64), (3, 256, 128), (2, 320, 192), (4, 100, 100)):
        pieces, spans, cuts, chains = sg.dense_pieces(batch, tokens, rows)
        segments = sg.dense_segments(batch, tokens)
        table = sg.piece_table(segments, sg.piece_count(batch * tokens, batch, rows), rows)
        first = sg.first_piece(segments[:, 0], np.arange(batch), rows)
        count = sg.pieces_of(segments, rows)
        used = np.concatenate([np.arange(n, n + m) for n, m in zip(first, count, strict=True)])
        np.testing.assert_array_equal(pieces, table[used])
        np.testing.assert_array_equal(spans, np.stack([np.cumsum(count) - count, count], axis=1))
        ends = np.flatnonzero(pieces[:, 3] < LAST)
        np.testing.assert_array_equal(cuts, np.stack([ends, ends + 1], axis=1))
        np.testing.assert_array_equal(chains, np.concatenate([spans, np.arange(batch)[:, None]], axis=1))
        assert pieces.dtype == spans.dtype == cuts.dtype == chains.dtype == np.int32
        parts = sg.piece_count(batch * tokens, batch, rows, packed=False)
        assert parts == len(pieces)
        if rows % 64 == 0:
            found = sg.rows_of_pieces(batch * tokens, batch, parts, packed=False)
            assert found <= rows
            assert sg.piece_count(batch * tokens, batch, found, packed=False) == parts


@pytest.mark.parametrize("sequences", [1, 7])
def test_number_of_pieces_says_how_long_they_are(sequences: int) -> None:
    """Of as equal ones as tokens can be cut into, whatever their number is."""
    for tokens in (1, 64, 65, 700, 4096, 30000, 32768):
        chunks, lengths = -(-tokens // 64), set()
        for pieces in range(1, min(chunks, 70) + 1):
            rows = 64 * -(-chunks // pieces)
            parts = sg.piece_count(tokens, sequences, rows)
            assert sg.rows_of_pieces(tokens, sequences, parts, packed=True) == rows
            assert sg.cut_count(tokens, rows) == parts - sequences
            lengths.add(rows)
        assert 64 in lengths or chunks > 70
    assert sg.rows_of_pieces(0, 3, 3, packed=True) == 0


def test_first_slot_finds_each_sequence() -> None:
    segments = np.array(((5, 70), (70, 70), (80, 208), (250, 290)), np.int32)
    table = sg.chunk_table(segments, 300)
    for n, (start, end) in enumerate(segments):
        sequence, first_row, rows, _ = table[sg.first_slot(start, n)]
        assert (sequence, first_row, rows) == (n, start, min(64, end - start))


def test_states_of_equal_batches_are_side_by_side() -> None:
    """Where rows are whole chunks, as many batches have as many places as one of all of them."""
    for tokens, sequences in ((64, 1), (128, 2), (448, 5)):
        assert 3 * sg.state_count(tokens, sequences) == sg.state_count(3 * tokens, 3 * sequences)


def test_dense_tables() -> None:
    np.testing.assert_array_equal(sg.dense_segments(3, 100), [[0, 100], [100, 200], [200, 300]])
    table = sg.chunk_table(sg.dense_segments(3, 100), 300)
    assert isinstance(table, np.ndarray)
    assert [tuple(row) for row in table.tolist() if row[2]] == [
        (0, 0, 64, 0), (0, 64, 36, 0), (1, 100, 64, 0), (1, 164, 36, 0), (2, 200, 64, 0), (2, 264, 36, 0),
    ]  # fmt: skip
    assert not np.any(table[:, 3])


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([0, 3, 3, 10], [[0, 3], [3, 3], [3, 10]]),
        ([2, 5, 8], [[2, 5], [5, 8]]),
        ([0, 100, 50, 200], [[0, 10], [10, 10], [10, 10]]),
        ([0, 7, 3, 9], [[0, 7], [7, 7], [7, 9]]),
        ([-4, -2, 20], [[0, 0], [0, 10]]),
        ([2**31 - 1, -(2**31)], [[10, 10]]),
        ([4], np.zeros((0, 2))),
    ],
)
@pytest.mark.parametrize("limit", [1024, -1], ids=["compare", "scan"])
def test_cu_seqlens(lengths: list[int], expected: Any, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sg, "_COMPARE_ALL_LIMIT", limit)
    segments = jax.jit(lambda x: sg.segments_from_cu_seqlens(x, 10))(np.array(lengths, np.int32))
    assert segments.dtype == jnp.int32
    np.testing.assert_array_equal(segments, expected)


def test_tables_of_lying_lengths_stay_in_bounds() -> None:
    random = np.random.default_rng(2)
    table = jax.jit(lambda x: sg.chunk_table(sg.segments_from_cu_seqlens(x, 300), 300))
    for _ in range(50):
        _, first, rows, fill = np.asarray(table(random.integers(-400, 800, 9, dtype=np.int32))).T
        assert np.all((first >= 0) & (rows >= 0) & (fill >= 0) & (first + rows + fill <= 300))
        assert np.sum(rows + fill) == 300


def _runs(row: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of every maximal run of equal non-zero ids."""
    cuts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    return [(start, end) for start, end in itertools.pairwise(cuts) if row[start] != 0]


def test_segment_ids() -> None:
    random = np.random.default_rng(3)
    find = jax.jit(lambda ids: sg.segments_from_segment_ids(ids, 4))
    for _ in range(30):
        ids = np.repeat(random.integers(0, 3, (3, 6)), random.integers(1, 6, 6), axis=1)[:, :12].astype(np.int32)
        ids = np.pad(ids, ((0, 0), (0, 12 - ids.shape[1])))
        expected = []
        for row in ids:
            runs = _runs(row)[:4]
            expected.append(runs + [(12, 12)] * (4 - len(runs)))
        segments = find(ids)
        assert segments.dtype == jnp.int32
        np.testing.assert_array_equal(segments, expected)
        assert np.all(np.diff(np.asarray(segments).reshape(3, -1), axis=1) >= 0)


def test_segment_ids_of_nothing() -> None:
    for shape in ((2, 0), (0, 4), (0, 0)):
        assert sg.segments_from_segment_ids(jnp.zeros(shape, jnp.int32), 3).shape == (shape[0], 3, 2)


def test_resets_are_a_dense_way_to_pack() -> None:
    """With gates and beta replaced, the dense recurrence gives what the packed one gives, values and gradients."""
    case = battery.Case("resets", tokens=40, key_dim=5, value_dim=3, initial_state=False)
    rows = [jnp.asarray(x) for x in battery.inputs(case)[:5]]
    ids = jnp.asarray(np.repeat([2, 1, 0, 1, 3, 0], [9, 4, 3, 11, 6, 7])[None], jnp.int32)
    do = battery.inputs(case).do

    def dense(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        g, beta, valid = sg.gates_with_resets(ids, g, beta)
        o, _ = recurrence(q, k, v, g, beta, None, None, scale=0.3)
        return jnp.where(valid[..., None, None], o, 0)

    def packed(*rows: Any) -> Any:
        return recurrence(*rows, None, sg.segments_from_segment_ids(ids, 6)[0], scale=0.3)[0]

    results = []
    for function in (dense, packed):
        o, vjp = jax.vjp(jax.jit(function), *rows)
        results.append((o, *vjp(do)))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_gates_keep_their_dtype() -> None:
    ids = jnp.array([[1, 1, 0, 2]], jnp.int32)
    g = jnp.full((1, 4, 2), -0.5, jnp.bfloat16)
    out, beta, valid = jax.jit(sg.gates_with_resets)(ids, g, g)
    assert out.dtype == beta.dtype == jnp.bfloat16
    np.testing.assert_array_equal(valid, [[True, True, False, True]])
    np.testing.assert_array_equal(out[0, :, 0].astype(np.float32), [-np.inf, -0.5, 0, -np.inf])
    np.testing.assert_array_equal(beta[0, :, 0].astype(np.float32), [-0.5, -0.5, 0, -0.5])


def test_gates_of_padding_need_not_be_finite() -> None:
    """They are replaced, and leave no trace in what follows."""
    ids, padding = jnp.array([[1, 0, 2]], jnp.int32), jnp.array([[[False], [True], [False]]])
    g = beta = jnp.where(padding, jnp.nan, -0.5)
    for gates in sg.gates_with_resets(ids, g, beta)[:2]:
        assert not np.any(np.isnan(gates))


@pytest.mark.parametrize("bounds", [[(0, 200), (200, 400)], [(60, 200), (200, 200), (450, 600)], [(0, 1)], [(3, 67)]])
def test_pieces_of_a_shard(bounds: list[tuple[int, int]]) -> None:
    """They cover each sequence in order, between two empty ones, and the way through them meets no other empty one."""
    segments, rows, count = np.asarray(bounds, np.int32), 64, 4
    pieces, entered, left = sg.shard_pieces(segments, rows, count)
    on_device = jax.jit(lambda segments: sg.shard_pieces(segments, rows, count))(segments)
    for ours, traced in zip((pieces, entered, left), on_device, strict=True):
        assert np.array_equal(ours, traced)
        assert ours.dtype == np.int32 == traced.dtype
    assert not np.any(pieces[:, 3])
    assert np.all(np.diff(pieces[:, :2].reshape(-1)) >= 0)
    for n, (start, end) in enumerate(bounds):
        first, used, sequence = entered[n]
        assert sequence == n
        assert tuple(left[n]) == (first - 1, used, n)
        through = pieces[first - 1 : first + used]
        assert np.all(through[:, 2] == n)
        assert tuple(through[0, :2]) == (start, start)
        assert tuple(through[-1, :2]) == (end, end)
        assert [tuple(x) for x in through[1:-1, :2]] == [(x, min(x + rows, end)) for x in range(start, end, rows)]
