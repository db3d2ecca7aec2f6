"""The device code of kernels/layout.py, compiled for the CPU, against the tables that define it."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_qla import segments as tables
from jax_qla.kernels import layout

# What the device code takes from CUDA, for one thread of a block of one.
SHIM = r"""
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline bool __syncthreads_or(bool x) { return x; }
static const struct { int x = 0; } threadIdx;
static const struct { int x = 1; } blockDim;
"""
ENTRY = r"""
extern "C" void layout(const int* bounds, int* segments, int* pieces, int* spans, int* chunks, int count, int parts,
                       int slots, int tokens, int piece_rows, int cut_beyond) {
  for (int index = 0; index < slots; ++index)
    jax_qla_layout(bounds, segments, pieces, spans, chunks, count, parts, slots, tokens, piece_rows, cut_beyond, index);
}
"""

Tables = tuple[np.ndarray, ...]


@pytest.fixture(scope="module")
def device_code(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tables]:
    folder: Path = tmp_path_factory.mktemp("layout")
    (folder / "layout.cc").write_text(SHIM + layout.PRELUDE + ENTRY)
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", "layout.so", "layout.cc"]
    subprocess.run(command, cwd=folder, check=True)
    function = ctypes.CDLL(str(folder / "layout.so")).layout

    def run(bounds: np.ndarray, tokens: int, piece_rows: int, cut_beyond: int) -> Tables:
        count = len(bounds)
        parts = tables.piece_count(tokens, count, piece_rows)
        slots = tables.slot_count(tokens, parts)
        results = tuple(np.full(x, -1, np.int32) for x in ((parts, 2), (parts, 4), (count, 2), (slots, 4)))
        arrays = [x.ctypes.data_as(ctypes.c_void_p) for x in (np.ascontiguousarray(bounds), *results)]
        function(*arrays, count, parts, slots, tokens, piece_rows, cut_beyond)
        return results

    return run


@pytest.mark.parametrize("piece_rows", [64, 192, layout.WHOLE])
def test_device_code_is_the_definition(piece_rows: int, device_code: Callable[..., Tables]) -> None:
    random = np.random.default_rng(piece_rows)
    specification = jax.jit(layout.specification, static_argnames=("tokens", "piece_rows", "cut_beyond"))
    cut = 0
    for index in range(60):
        if index % 5 == 0:  # not for every case: the definition is compiled for each of these
            tokens, count = int(random.integers(1, 3000)), int(random.integers(1, 9))
        bounds = np.sort(random.integers(0, tokens + 1, 2 * count)).reshape(-1, 2).astype(np.int32)
        if random.random() < 0.4:  # without gaps, from the first token to the last
            bounds[1:, 0] = bounds[:-1, 1]
            bounds[0, 0], bounds[-1, 1] = 0, tokens
        options = {"tokens": tokens, "piece_rows": piece_rows, "cut_beyond": min(2 * piece_rows, layout.WHOLE)}
        cut += int((bounds[:, 1] - bounds[:, 0]).max() > options["cut_beyond"])
        found = device_code(bounds, *options.values())
        right = specification(jnp.asarray(bounds), **options)
        for name, x, y in zip(("segments", "pieces", "spans", "chunks"), found, right, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"{name} of {bounds.tolist()} in {tokens}")
    assert (cut > 10) == (piece_rows < layout.WHOLE)
