"""Device code that decays P, compiled for the CPU, against its formula: also where a sequence ends inside a chunk."""

from __future__ import annotations

import ctypes

import device_code
import numpy as np
import pytest

from jax_qla.kernels import common, state_gradients

# What the device code takes from CUDA and from kernels/common.py, for one thread after the other. Instead of rounding
# a warpgroup's accumulator into a tile, its elements are handed out as they are.
SHIM = r"""
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct float2 { float x, y; };
struct bfloat16_t;
template <typename T> unsigned jax_qla_pack(float low, float high);
static struct { int x; } threadIdx;
static float* found;
inline int element(int thread, int r) {  // register r of a thread, in a tile [64, 64]
  const int lane = thread % 32, row = thread / 32 * 16 + r % 4 / 2 * 8 + lane / 4;
  return row * 64 + r / 4 * 8 + lane % 4 * 2 + r % 2;
}
inline float jax_qla_exp2(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
template <typename T> void jax_qla_store_tile(const void* registers, T*) {
  for (int r = 0; r < 32; ++r) found[element(threadIdx.x, r)] = static_cast<const float*>(registers)[r];
}
"""
ENTRY = r"""
extern "C" void decayed(const float* product, const float* gamma, float scale, const float* query, float* p) {
  found = p;
  for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
    float x[32];
    for (int r = 0; r < 32; ++r) x[r] = product[element(threadIdx.x, r)];
    if (query)
      jax_qla_store_decayed<bfloat16_t, true>(x, gamma, scale, query, static_cast<bfloat16_t*>(nullptr));
    else
      jax_qla_store_decayed<bfloat16_t, false>(x, gamma, scale, query, static_cast<bfloat16_t*>(nullptr));
  }
}
"""


@pytest.fixture(scope="module")
def decay_code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = state_gradients.PRELUDE.removeprefix(common.TILE_PRELUDE)
    assert source != state_gradients.PRELUDE
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
    p = np.full((64, 64), np.nan, np.float32)
    of_product, of_gamma, of_query, of_p = device_code.pointers(product, gamma, query, p)
    decay_code.decayed(of_product, of_gamma, ctypes.c_float(scale), of_query if normed else None, of_p)
    growth = np.minimum(gamma[:, None] - gamma, np.float32(0)).astype(np.float64)
    scales = scale * query[:, None] if normed else scale
    right = np.tril(product * scales * np.where(growth < -126, 0, np.exp2(growth)))
    np.testing.assert_array_equal(p[~inside], 0)
    np.testing.assert_allclose(p, right, rtol=1e-5, atol=1e-37)
