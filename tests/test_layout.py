"""The device code that finds pieces and chunks of packed batches, compiled for the CPU, against what defines them."""

from __future__ import annotations

import ctypes

import device_code
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_qla import segments as tables
from jax_qla.kernels import common, layout, preludes, summaries
from jax_qla.kernels.common import ALL, EARLIER, LATER

# What the device code takes from CUDA, for one thread of a block of one; and for a warp, 32 threads that vote together.
SHIM = r"""
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline bool __syncthreads_or(bool x) { return x; }
static thread_local struct { int x = 0; } threadIdx;
static const struct { int x = 1; } blockDim;
static std::mutex mutex;
static std::condition_variable all_voted;
static unsigned votes, result, voters, round;
inline unsigned __ballot_sync(unsigned, bool vote) {
  std::unique_lock<std::mutex> lock(mutex);
  votes |= static_cast<unsigned>(vote) << threadIdx.x;
  const unsigned mine = round;
  if (++voters == 32) {
    result = votes;
    votes = voters = 0;
    ++round;
    all_voted.notify_all();
  } else {
    all_voted.wait(lock, [&] { return round != mine; });
  }
  return result;
}
static int values[32];
inline int __shfl_sync(unsigned, int value, int lane) {
  values[threadIdx.x] = value;
  __ballot_sync(0, true);
  const int found = values[lane];
  __ballot_sync(0, true);
  return found;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
"""
ENTRY = r"""
extern "C" void layout(const int* bounds, int* segments, int* pieces, int* spans, int* cuts, int* chains, int count,
                       int parts, int places, int chain_places, int piece_rows, int cut_beyond) {
  for (int index = 0; index < parts; ++index)
    jax_qla_layout(bounds, segments, pieces, spans, cuts, chains, count, parts, places, chain_places, piece_rows,
                   cut_beyond, index);
}
// What `find(index, out)` says of every `step`th of `count` places, `size` numbers each, to `all`; whether all lanes of
// a warp say the same.
template <int size, typename F>
static bool by_a_warp(int* all, int count, int step, const F& find) {
  bool same = true;
  std::vector<std::thread> warp;
  for (int lane = 0; lane < 32; ++lane) {
    warp.emplace_back([=, &same] {
      threadIdx.x = lane;
      for (int index = 0; index < count; index += step) {
        int found[size];
        find(index, found);
        if (lane == 0) std::copy(found, found + size, all + size * index);
        __ballot_sync(0, true);
        const std::lock_guard<std::mutex> lock(mutex);
        same = same && std::equal(found, found + size, all + size * index);
      }
    });
  }
  for (std::thread& lane : warp) lane.join();
  return same;
}
// chunks [slots][3]
extern "C" bool find_chunks(const int* segments, int* chunks, int count, int slots, int tokens, int step) {
  return by_a_warp<3>(chunks, slots, step, [=](int slot, int* found) {
    jax_qla_find_chunk(found, segments, count, tokens, slot);
  });
}
// [slots][4]
extern "C" bool find_chunks_in_window(const int* segments, int* chunks, int count, int slots, int tokens, int step,
                                      int window) {
  return by_a_warp<4>(chunks, slots, step, [=](int slot, int* found) {
    jax_qla_find_chunk_in_window(found, segments, count, tokens, slot, window);
  });
}
// The head at every place of the order.
extern "C" bool slow_first(const float* sums, int* order, int heads) {
  return by_a_warp<1>(order, heads, 1, [=](int index, int* found) { *found = jax_qla_slow_first(sums, heads, index); });
}
// Head, piece and tile of every block of `summaries`.
extern "C" bool items(const float* sums, int* all, int heads, int pieces, int value_tiles, int map_tiles, int alone) {
  return by_a_warp<3>(all, heads * pieces * (value_tiles + map_tiles), 1, [=](int index, int* found) {
    found[1] = found[2] = 0;
    jax_qla_item(found, sums, heads, pieces, value_tiles, map_tiles, index, alone);
  });
}
"""


@pytest.fixture(scope="module")
def tables_code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = layout.PRELUDE + preludes.CHUNK_PRELUDE + preludes.ORDER_PRELUDE + summaries.ITEM_PRELUDE
    return device_code.compiled(tmp_path_factory.mktemp("layout"), SHIM + source + ENTRY)


@pytest.mark.parametrize("piece_rows", [64, 192, layout.WHOLE])
def test_pieces_are_the_definition(piece_rows: int, tables_code: ctypes.CDLL) -> None:
    random = np.random.default_rng(piece_rows)
    names = ("parts", "places", "chain_places", "piece_rows", "cut_beyond")
    specification = jax.jit(layout.specification, static_argnames=names)
    cut = 0
    for index in range(60):
        if index % 10 == 0:  # not for every case: the definition is compiled for each of these
            tokens, count = int(random.integers(1, 3000)), int(random.integers(1, 9))
        bounds = np.sort(random.integers(0, tokens + 1, 2 * count)).reshape(-1, 2).astype(np.int32)
        if random.random() < 0.4:  # without gaps, from the first token to the last
            bounds[1:, 0] = bounds[:-1, 1]
            bounds[0, 0], bounds[-1, 1] = 0, tokens
        parts = tables.piece_count(tokens, count, piece_rows)
        places = tables.cut_count(tokens, piece_rows)
        values = (parts, places, min(places, count), piece_rows, min(2 * piece_rows, layout.WHOLE))
        options = dict(zip(names, values, strict=True))
        cut += int((bounds[:, 1] - bounds[:, 0]).max() > options["cut_beyond"])
        shapes = ((parts, 2), (parts, 4), (count, 2), (places, 2), (min(places, count), 3))
        found = tuple(np.full(x, -7, np.int32) for x in shapes)
        tables_code.layout(*device_code.pointers(bounds, *found), count, *options.values())
        right = specification(jnp.asarray(bounds), **options)
        for name, x, y in zip(("segments", "pieces", "spans", "cuts", "chains"), found, right, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"{name} of {bounds.tolist()} in {tokens}")
    assert (cut > 10) == (piece_rows < layout.WHOLE)


@pytest.mark.parametrize("counts", [(1, 9), (29, 34), (90, 1500)], ids=str)
def test_chunks_are_the_definition(counts: tuple[int, int], tables_code: ctypes.CDLL) -> None:
    """With one step of the search, one or two, and two or three; with gaps, empty sequences and unused slots."""
    random = np.random.default_rng(counts[0])
    step = 1 if counts[0] < 90 else 7  # a vote of 32 threads takes its time
    for _ in range(8):
        tokens, count = int(random.integers(1, 3000)), int(random.integers(*counts))
        bounds = np.sort(random.integers(0, tokens + 1, 2 * count)).reshape(-1, 2).astype(np.int32)
        if random.random() < 0.4:  # without gaps, from the first token to the last
            bounds[1:, 0] = bounds[:-1, 1]
            bounds[0, 0], bounds[-1, 1] = 0, tokens
        slots = tables.slot_count(tokens, count)
        found = np.full((slots, 3), -1, np.int32)
        assert tables_code.find_chunks(*device_code.pointers(bounds, found), count, slots, tokens, step)
        right = tables.chunk_table(bounds, tokens)[:, 1:]
        np.testing.assert_array_equal(found[::step], right[::step], err_msg=f"{bounds.tolist()}")
        found = np.full((slots, 4), -1, np.int32)
        sizes = (count, slots, tokens, step, ALL)
        assert tables_code.find_chunks_in_window(*device_code.pointers(bounds, found), *sizes)
        np.testing.assert_array_equal(found[::step, :3], right[::step])
        taken = right[::step, 1] > 0
        np.testing.assert_array_equal(found[::step, 3][taken], np.arange(slots)[::step][taken])
        check_windows(bounds, tokens, tables_code, step)


def check_windows(bounds: np.ndarray, tokens: int, code: ctypes.CDLL, step: int) -> None:
    """Every chunk is of one window, at its place there, and in the later one is every row of no sequence."""
    count, chunks = tables.window_count(tokens, len(bounds)) + 1, tables.chunk_table(bounds, tokens)
    used, outside = np.zeros(len(chunks), bool), np.ones(tokens, bool)
    for start, end in bounds:
        outside[start:end] = False
    sizes = (len(bounds), count, tokens, step)
    for window in (LATER, EARLIER):
        found = np.full((count, 4), -1, np.int32)
        assert code.find_chunks_in_window(*device_code.pointers(bounds, found), *sizes, window)
        of_window = tables.chunk_table(tables.of_window(bounds, later=window == LATER), tokens)
        place = tables.slot_in_window(bounds, of_window, later=window == LATER)
        right = np.zeros((count, 4), np.int32)
        (slots,) = np.nonzero(of_window[:, 2])
        right[place[slots] + 1] = np.stack([*of_window[slots, 1:3].T, 0 * slots, slots], axis=1)
        right, found = right[::step], found[::step]
        taken = right[:, 1] > 0
        np.testing.assert_array_equal(found[:, 1], right[:, 1], err_msg=f"{bounds.tolist()}")
        np.testing.assert_array_equal(found[taken][:, [0, 1, 3]], right[taken][:, [0, 1, 3]])
        assert len(set(place[slots])) == len(slots)
        assert not used[slots].any()
        used[slots] = True
        for row, rows, gap, _ in found[found[:, 2] > 0]:
            assert window == LATER
            assert outside[row + rows : row + rows + gap].all()
            outside[row + rows : row + rows + gap] = False
    np.testing.assert_array_equal(used, chunks[:, 2] > 0)
    assert step > 1 or not outside.any()


@pytest.mark.parametrize("heads", [1, 8, 31, 32, 33, 64, 96])
def test_blocks_of_heads_that_forget_slowly_begin_first(heads: int, tables_code: ctypes.CDLL) -> None:
    """Every head has its blocks, whatever the memory holds that says which are slow, numbers or not."""
    random = np.random.default_rng(heads)
    for slow in (0.0, 0.3, 1.0):
        sums = np.where(random.random(heads) < slow, 0.9, 1.1).astype(np.float32) * common.SLOW
        sums[:: max(heads // 3, 2)] = np.nan
        order = np.full(heads, -1, np.int32)
        assert tables_code.slow_first(*device_code.pointers(sums, order), heads)
        expected = np.argsort(~(sums > common.SLOW), kind="stable")
        np.testing.assert_array_equal(order, expected)


@pytest.mark.parametrize(("heads", "value_tiles", "map_tiles"), [(1, 2, 2), (8, 1, 2), (33, 2, 1)])
def test_blocks_that_find_nothing_to_do_begin_last(
    heads: int, value_tiles: int, map_tiles: int, tables_code: ctypes.CDLL
) -> None:
    """Each of `summaries` has a piece, head and tile of its own: all tiles of slow heads, N of the others, their M."""
    random = np.random.default_rng(heads)
    pieces, tiles = 5, value_tiles + map_tiles
    for share in (0.0, 0.3, 1.0):
        sums = np.where(random.random(heads) < share, 0.9, 1.1).astype(np.float32) * common.SLOW
        found = np.full((heads * pieces * tiles, 3), -1, np.int32)
        assert tables_code.items(*device_code.pointers(sums, found), heads, pieces, value_tiles, map_tiles, 0)
        slow, others = (np.flatnonzero(which).tolist() for which in (sums > common.SLOW, sums <= common.SLOW))
        groups = ((slow, range(tiles)), (others, range(value_tiles)), (others, range(value_tiles, tiles)))
        expected = [(h, p, t) for of, which in groups for h in of for p in range(pieces) for t in which]
        assert [tuple(item) for item in found.tolist()] == expected


@pytest.mark.parametrize("slow", [0, 1, 4, 5, 33])
def test_one_of_two_launches_summarises(slow: int, tables_code: ctypes.CDLL) -> None:
    """With 1 to 4 heads that are slow the first, else the other: all blocks of one have an item, none of the other."""
    sums = np.full(33, 1.1 * common.SLOW, np.float32)
    sums[np.random.default_rng(slow).permutation(33)[:slow]] = 0.9 * common.SLOW
    found = np.full((3, 33 * 2 * 4, 3), -7, np.int32)
    for alone, items in zip((0, 4, -4), found, strict=True):
        assert tables_code.items(*device_code.pointers(sums, items), 33, 2, 2, 2, alone)
    computes, leaves = (1, 2) if 1 <= slow <= 4 else (2, 1)
    np.testing.assert_array_equal(found[computes], found[0])
    assert (found[leaves, :, 0] == -1).all()
    assert (found[0] >= 0).all()
