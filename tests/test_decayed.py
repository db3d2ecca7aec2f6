"""Device code that decays P, compiled for the CPU, against its formula: also where a sequence ends inside a chunk."""

from __future__ import annotations

import ctypes

import device_code
import ml_dtypes
import numpy as np
import pytest

from jax_qla.kernels import common, preludes

# What the device code takes from CUDA and from kernels/preludes.py, for one thread after the other. What a warp does
# together, stmatrix, waits until the last thread has run: of matrix m, lane 8 m + r has the address of row r, and lanes
# 4 r to 4 r + 3 have its elements.
SHIM = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
struct float2 { float x, y; };
struct bfloat16_t;
static struct { int x; } threadIdx;
static struct Stored { unsigned address, registers[4]; } stored[128][4];
static int count[128];
inline unsigned jax_qla_address(const void*) { return 0; }
inline float jax_qla_exp2(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
inline unsigned rounded(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fffu;
}
template <typename T> unsigned jax_qla_pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
template <bool transposed> void jax_qla_store_matrices(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  stored[threadIdx.x][count[threadIdx.x]++] = {to, {a, b, c, d}};
}
"""
ENTRY = r"""
extern "C" void decayed(const float* product, const float* gamma, float scale, const float* query, uint16_t* p) {
  for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
    float x[32];
    for (int r = 0; r < 32; ++r) {
      const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + r % 4 / 2 * 8 + lane / 4;
      x[r] = product[row * 64 + r / 4 * 8 + lane % 4 * 2 + r % 2];
    }
    count[threadIdx.x] = 0;
    if (query)
      jax_qla_store_decayed<true, true>(x, gamma, scale, query, static_cast<bfloat16_t*>(nullptr));
    else
      jax_qla_store_decayed<false, true>(x, gamma, scale, query, static_cast<bfloat16_t*>(nullptr));
  }
  uint16_t tile[64 * 64];
  memset(tile, 0xff, sizeof tile);
  for (int thread = 0; thread < 128; ++thread)
    for (int call = 0; call < count[thread]; ++call) {
      const int lane = thread % 32, matrix = lane / 8, row = lane % 8;
      uint16_t* to = tile + stored[thread][call].address / 2;
      for (int from = 0; from < 4; ++from)
        memcpy(to + from * 2, stored[thread - lane + row * 4 + from][call].registers + matrix, 4);
    }
  for (int i = 0; i < 64; ++i)  // the swizzle: 16 bytes are found where their number in the row, xor the row, says
    for (int j = 0; j < 64; ++j) p[i * 64 + j] = tile[i * 64 + (j / 8 ^ i % 8) * 8 + j % 8];
}
"""


@pytest.fixture(scope="module")
def decay_code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = preludes.P_PRELUDE.removeprefix(preludes.TILE_PRELUDE)
    assert source != preludes.P_PRELUDE
    return device_code.compiled(tmp_path_factory.mktemp("decayed"), SHIM + source + ENTRY)


@pytest.mark.parametrize("normed", [False, True], ids=["as given", "normalised"])
@pytest.mark.parametrize("rows", [1, 2, 17, 36, 63, 64])
@pytest.mark.parametrize("gate", [0.0, -1e-2, -3.0, -20.0, -70.0, -1e4])
def test_p_transposed_is_zero_beyond_the_sequence(
    gate: float, rows: int, normed: bool, decay_code: ctypes.CDLL
) -> None:
    """P^T dO sums over all rows of P. Beyond the sequence those of Q K^T are zero, and so is gamma, which after strong
    gates is far above that of the sequence: zero times an infinite growth would not be a number."""
    random = np.random.default_rng(rows)
    inside = np.arange(64) < rows
    product = np.where(inside[:, None] & inside, random.standard_normal((64, 64)), 0).astype(np.float32)
    gamma = np.where(inside, np.float32(gate * common.LOG2_E) * np.arange(1, 65), 0).astype(np.float32)
    query = np.where(inside, random.random(64) + 0.5, 1e3).astype(np.float32)
    scale = 0.25
    rounded = np.zeros((64, 64), ml_dtypes.bfloat16)
    of_product, of_gamma, of_query, of_p = device_code.pointers(product, gamma, query, rounded)
    decay_code.decayed(of_product, of_gamma, ctypes.c_float(scale), of_query if normed else None, of_p)
    growth = np.minimum(gamma[:, None] - gamma, np.float32(0)).astype(np.float64)
    scales = scale * query[:, None] if normed else scale
    right = np.tril(product * scales * np.where(growth < -126, 0, np.exp2(growth)))
    p = rounded.astype(np.float64)
    np.testing.assert_array_equal(p[~inside], 0)
    np.testing.assert_allclose(p, right, rtol=2.0**-8, atol=1e-37)
