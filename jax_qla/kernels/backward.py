"""The backward pass along a sequence, in one kernel: the recurrence of the state's gradient and all gradients beside it.

What kernels/state_gradients.py and kernels/gradients.py compute, whose notation and formulas this is, but neither dh nor D go by way of memory: a chunk and
value head is 117 KB of traffic instead of 229, with two value heads a key head, and memory holds no dh. Of K = V = 128.

Plan, one block per (sequence, value head), the last chunk first; the blocks of `width` (1 or 2) value heads of a key head are a cluster:

    warpgroup   registers   work
    0, "A"      208         dS of the first 64 value columns; E, dQ
    1, "B"      208         dS of the others; F, dK
    2, "C"      64          P of the next chunk; <dh, h>; the sums of dq and dk over the cluster
    3           32          warps 0, 1: gates, dg and dbeta; 2: loads; 3: loads `a`, sends dv

A tile of shared memory is used again and again in a step, for 227 KB hold each once (keys and queries twice):

    tile   written by                    read by                    then
    dh     A, B (dS before the chunk)    B (Y), C (<dh, h>)
    d      A, B (D)                      B (F, Z), dv's warp        A: dQ, read by C of both blocks
    e, f   A (E), B (M + M^T)            B (dK)                     B: dK, in both, read by C of both blocks

dQ and dK of a value head are rounded before C adds them, for there is no room for float32. A block's C adds, and writes, half of the rows, and reads those of the other
block where they lie. Each block may be behind the other by what lies between a tile's last use in one step and its first in the next, some 3000 cycles: where they waited for
each other earlier in a step, all took a tenth longer (docs/performance_versions.md).

Of more value heads a key head, each cluster adds to dq and dk what the one before it has written, a chunk behind it, by reductions in memory, for reads, four in a row of
some 800 cycles each, would make C what is waited for. A block awaits the one with its rank in the cluster before, whose chunks done `progress` counts, from zero. That has a
lower number, and blocks begin in the order of their numbers where all need the same, so that it has begun: a launch ends however few multiprocessors there are. (A cluster
of four would need no counts; of these a card runs 30, not 33.)

Addresses are computed where they are needed, from a threadIdx.x and a stage that the compiler cannot know to be the same as before (jax_qla_thread, jax_qla_again): a
spilled register costs up to 470 cycles, since shared memory leaves no first-level cache.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax

from jax_qla.kernels import first_state, gradients, state_gradients
from jax_qla.kernels.common import CHUNK, FAINT, LONG, PASS_CONFIGS, SHORT
from jax_qla.kernels.gradient_parts import PRELUDE as GRADIENTS_PRELUDE
from jax_qla.kernels.gradient_parts import gate_gradients, gate_parts, operations
from jax_qla.kernels.inverse import INVERSE_PRELUDE
from jax_qla.kernels.macros import (
    accumulator_layout,
    call,
    leave_first,
    macros,
    over,
    place_of,
    rest_is_empty,
    unfenced,
)
from jax_qla.kernels.preludes import LENGTH_PRELUDE, P_PRELUDE, TILE_PRELUDE

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]

THREAD = r"""
// threadIdx.x, not to be known outside of the loop: addresses kept from chunk to chunk would cost registers.
__device__ __forceinline__ int jax_qla_thread() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}
__device__ __forceinline__ int jax_qla_again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
"""

PRELUDE = THREAD + (
    P_PRELUDE
    + GRADIENTS_PRELUDE.removeprefix(TILE_PRELUDE)
    + INVERSE_PRELUDE
    + LENGTH_PRELUDE
    + r"""
// The diagonal of x, a wgmma accumulator [64, 64].
__device__ __forceinline__ void jax_qla_put_diagonal(const void* registers, float* out) {
  const float* x = static_cast<const float*>(registers);
  const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float found = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int at = 4 * (2 * w + h) + 2 * h;
      if (w == warp) found = lane & 4 ? x[at + 1] : x[at];
    }
    if (lane % 4 == lane / 8) out[warp * 16 + h * 8 + lane / 4] = found;
  }
}
// From x = D Vd^T and y = K K^T, wgmma accumulators [64, 64]: x_ij = x_ij exp(gamma_i - gamma_j) for j < i < rows, else 0; sums as jax_qla_decayed.
template <bool normed>
__device__ __forceinline__ void jax_qla_decay_below(void* x_registers, const void* y_registers, const float* gamma, const float* weight,
                                                    const float* norm, int rows, float* sums) {
  float* x = static_cast<float*>(x_registers);
  const float* y = static_cast<const float*>(y_registers);
  const int thread = threadIdx.x, lane = thread & 31, top = (thread >> 5 & 3) * 16 + lane / 4, left = lane % 4 * 2;
  float at_row[2], of_sum[2];
  int limit[2];  // columns before limit + left are below the diagonal
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = top + h * 8;
    at_row[h] = gamma[row];
    of_sum[h] = weight[row] * (normed ? norm[row] : 1.f);
    limit[h] = row < rows ? row - left : -1;
  }
  float *of_row = sums, *of_column = sums + 2;
  of_row[0] = of_row[1] = 0.f;
  const float* columns_at = gamma + left;
#pragma unroll
  for (int part = 0; part < 8; ++part) {  // of 8 columns
    const float2 columns = *reinterpret_cast<const float2*>(columns_at + part * 8);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = part * 4 + h * 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float decayed = -x[n + e] * jax_qla_exp2(at_row[h] - (e ? columns.y : columns.x));
        x[n + e] = part * 8 + e < limit[h] ? decayed : 0.f;
        const float product = x[n + e] * y[n + e];
        of_row[h] += product;
        of_column[part * 2 + e] = h ? of_column[part * 2 + e] + of_sum[h] * product : of_sum[h] * product;
      }
    }
  }
}
// All threads of all blocks of the cluster meet.
__device__ __forceinline__ void jax_qla_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Of an address in shared memory, the same in block `rank` of the cluster; 16 bytes from such a one.
__device__ __forceinline__ unsigned jax_qla_of_block(unsigned address, int rank) {
  unsigned mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ uint4 jax_qla_read_of_block(unsigned address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint4 jax_qla_read_16(unsigned address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void jax_qla_write_16(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Adds 8 numbers to those in memory.
template <typename T>
__device__ __forceinline__ void jax_qla_add_16(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  if constexpr (std::is_same_v<T, half_t>) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  }
}
// A warp tells both, or the only one, of the `blocks` of the cluster: at each, 8 / blocks of the arrivals that `barrier` awaits, 8 of each warp. What the warp has
// `written` to its shared memory is there before. An arrival at another block's barrier does not wait for stmatrix: without the fence, three of 2000 calls read what
// a tile had held before. The fence is one of a block, though the other block reads; that of a cluster, MEMBAR.ALL.GPU, waits for the multiprocessor's stores to
// global memory too, some 1600 cycles, and so does mbarrier.arrive.release.cluster.
template <bool written, typename Barrier>
__device__ __forceinline__ void jax_qla_tell(Barrier& barrier, int blocks) {
  const int lane = threadIdx.x & 31;
  if (written) asm volatile("fence.acq_rel.cta;" ::: "memory");
  __syncwarp();
  if (lane < blocks) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;"
                 ::"r"(jax_qla_of_block(jax_qla_address(&barrier), lane)), "r"(blocks == 1 ? 8 : 4) : "memory");
  }
}
// Sums over the `blocks` (1 or 2) of the cluster of their tiles [64, 128] (halves of 64 columns at near and far, swizzled): of rows 64 / blocks rank .. those that
// are there (`rows` in all) to rows of `out` that are `stride` elements apart, beside what is there if `add`; 128 threads.
template <typename T>
__device__ __forceinline__ void jax_qla_sum(const void* near, const void* far, T* out, int rows, int stride, int blocks, int rank, int add) {
  const int thread = threadIdx.x & 127, row = thread >> 4, vector = thread & 15, first = 32 * rank + row;
  unsigned own = jax_qla_address(vector & 8 ? far : near) + first * 128 + (((vector & 7) ^ row) << 4);
  unsigned others = jax_qla_of_block(own, blocks - 1 - rank);
  T* to = out + static_cast<long long>(first) * stride + vector * 8;
  int left = rows - first;
#pragma unroll 1
  for (int turn = 0; turn < 4 / blocks; ++turn) {
    uint4 x[2], y[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) y[n] = jax_qla_read_of_block(others + n * 1024);
#pragma unroll
    for (int n = 0; n < 2; ++n) x[n] = jax_qla_read_16(own + n * 1024);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const unsigned from[4] = {x[n].x, x[n].y, x[n].z, x[n].w}, and_from[4] = {y[n].x, y[n].y, y[n].z, y[n].w};
      unsigned sum[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 a = jax_qla_unpack<T>(from[e]), b = jax_qla_unpack<T>(and_from[e]);
        sum[e] = blocks == 1 ? from[e] : jax_qla_pack<T>(a.x + b.x, a.y + b.y);
      }
      T* line = to + static_cast<long long>(n * 8) * stride;
      if (n * 8 < left && add) jax_qla_add_16<T>(line, sum[0], sum[1], sum[2], sum[3]);
      if (n * 8 < left && !add) jax_qla_write_16(line, sum[0], sum[1], sum[2], sum[3]);
    }
    own += 2048, others += 2048, left -= 16, to += static_cast<long long>(16) * stride;
  }
}
// Of a count in global memory: what 128 threads, who have met, wrote before is there for whoever finds `count`, as a warp does that awaits it.
__device__ __forceinline__ void jax_qla_publish(int* progress, int place, int count) {
  if ((threadIdx.x & 127) == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(progress + place), "r"(count) : "memory");
}
__device__ __forceinline__ void jax_qla_await(const int* progress, int place, int count) {
  int found = count;
  do {
    if ((threadIdx.x & 31) == 0) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(progress + place) : "memory");
  } while (__any_sync(0xffffffffu, found < count));
}
__device__ __forceinline__ int jax_qla_read(const int* x) { return *static_cast<const volatile int*>(x); }
// dots_i = <x_i, y_i> for i < rows of a tile x [64, 128] in shared memory (halves of 64 columns, 128-byte swizzled) and y [.., heads, 128] in global memory, by one warp.
template <typename T>
__device__ __forceinline__ void jax_qla_warp_dots(const void* x, const T* y, int rows, int heads, float* dots) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    const char* line = static_cast<const char*>(x) + lane / 16 * 8192 + row * 128 + ((lane % 16 / 2) ^ (row & 7)) * 16 + lane % 2 * 8;
    const uint2 a = *reinterpret_cast<const uint2*>(line);
    const uint2 b = *reinterpret_cast<const uint2*>(y + static_cast<long long>(row) * (heads * 128) + lane * 4);
    const float2 p = jax_qla_unpack<T>(a.x), q = jax_qla_unpack<T>(b.x), r = jax_qla_unpack<T>(a.y), s = jax_qla_unpack<T>(b.y);
    float sum = p.x * q.x + p.y * q.y + r.x * s.x + r.y * s.y;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) dots[row] = sum;
  }
}
// <x_i, t_i> norm_i^2 of x, a wgmma accumulator [64, 64 parts], and a tile in shared memory (parts of 64 columns, swizzled), of this lane's two rows i.
template <typename T, int parts>
__device__ __forceinline__ void jax_qla_along(const void* registers, const void* tiles, const float* norm, float* dots) {
  const float* x = static_cast<const float*>(registers);
  const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3, matrix = lane >> 3, row = warp * 16 + lane / 4;
  const unsigned line = jax_qla_address(tiles) + (warp * 16 + (matrix & 1) * 8 + (lane & 7)) * 128;
  const unsigned first = (matrix >> 1) ^ (lane & 7);
  dots[0] = dots[1] = 0.f;
#pragma unroll
  for (int n = 0; n < 4 * parts; ++n) {
    unsigned t[4];
    jax_qla_load_matrices<false>(t, line + n / 4 * 8192 + ((first ^ (2 * (n % 4))) << 4));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 pair = jax_qla_unpack<T>(t[m]);
      dots[m % 2] += x[8 * n + 2 * m] * pair.x;
      dots[m % 2] += x[8 * n + 2 * m + 1] * pair.y;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    dots[h] += __shfl_xor_sync(0xffffffffu, dots[h], 1);
    dots[h] += __shfl_xor_sync(0xffffffffu, dots[h], 2);
    dots[h] *= norm[row + h * 8] * norm[row + h * 8];
  }
}
// x - dots t, rounded, to a tile `out` laid out alike.
template <typename T>
__device__ __forceinline__ void jax_qla_store_across(const void* registers, const void* tile, const float* dots, T* out) {
  const float* x = static_cast<const float*>(registers);
  const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3, matrix = lane >> 3;
  const unsigned place = (warp * 16 + (matrix & 1) * 8 + (lane & 7)) * 128;
  const unsigned from = jax_qla_address(tile) + place, to = jax_qla_address(out) + place;
  const unsigned first = (matrix >> 1) ^ (lane & 7);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const unsigned at = (first ^ (2 * n)) << 4;
    unsigned t[4];
    jax_qla_load_matrices<false>(t, from + at);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 pair = jax_qla_unpack<T>(t[m]);
      t[m] = jax_qla_pack<T>(x[8 * n + 2 * m] - dots[m % 2] * pair.x, x[8 * n + 2 * m + 1] - dots[m % 2] * pair.y);
    }
    jax_qla_store_matrices<false>(to + at, t[0], t[1], t[2], t[3]);
  }
}
// Of x, a wgmma accumulator [64, 64], and a tile t [64][64] in shared memory, 128-byte swizzled: this lane's part of <x_i, t_i> for its two rows i is added to dots [2], and
// sum_ij = (sum_ij if `add`, else 0) + scale factor_i (norm_i, if normed) x_ij. `sum` may be x. t: jax_qla_load_tile.
template <typename T, bool normed, bool add>
__device__ __forceinline__ void jax_qla_weigh_rows(void* sum_registers, const void* registers, const float* factor, const float* norm,
                                                   float scale, const unsigned* tile, float* dots) {
  float* sum = static_cast<float*>(sum_registers);
  const float* x = static_cast<const float*>(registers);
  const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3, row = warp * 16 + lane / 4;
  float f[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) f[h] = factor[row + h * 8] * (normed ? norm[row + h * 8] : 1.f) * scale;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int h = m % 2, at = 8 * n + 2 * m;
      const float2 pair = jax_qla_unpack<T>(tile[4 * n + m]);
      dots[h] += x[at] * pair.x;
      dots[h] += x[at + 1] * pair.y;
      sum[at] = add ? sum[at] + f[h] * x[at] : f[h] * x[at];
      sum[at + 1] = add ? sum[at + 1] + f[h] * x[at + 1] : f[h] * x[at + 1];
    }
  }
}
"""
).replace("threadIdx.x", "jax_qla_thread()")


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim` and `value_dim`, 128, `dtype` "bfloat16" or "float16"; `l2norm`: whether q and k
    are to be normalised."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    l2norm: bool = False


REGISTERS = (208, 208, 64, 32)

FIRST_ROW, BEYOND, IN_H, WITHIN, IN_PROGRESS, IN_VD = range(6)
"""What is kept of a block's work in shared memory, for registers are few: the first row of its last chunk and the one behind it; its head's number in h,
among the key head's, in `progress` and in Vd."""


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, sequences and chunk slots are run-time values."""
    import tilelang.language as T

    C, K, V, dtype = CHUNK, config.key_dim, config.value_dim, config.dtype
    ctype = {"bfloat16": "bfloat16_t", "float16": "half_t"}[dtype]
    l2norm, normed = config.l2norm, "true" if config.l2norm else "false"
    ops = operations(ctype, l2norm)
    m, begin_with = macros(), first_state.macros().begin_with
    write_gates, allocate_parts = gate_gradients(dtype, l2norm), gate_parts()
    tokens, key_heads, value_heads, sequences, state_slots = T.dynamic(
        "tokens, key_heads, value_heads, sequences, state_slots"
    )
    kept_heads, vd_heads = T.dynamic("kept_heads, vd_heads")  # of h, and of Vd: all, or those of this launch
    initial_states, final_states = T.dynamic("initial_states, final_states")  # sequences, or 0: not wanted, not given
    cut_sequences, cut_pieces = T.dynamic("cut_sequences, cut_pieces")  # or 0: each of `segments` has an initial state
    cuts = T.dynamic("cuts")  # places for them, or 0
    counted = T.dynamic("counted")  # sequences, or 0: nobody counts

    def of_length(c):
        """Where the lengths of a chunk's rows are."""
        return c % 4 if l2norm else c % 2

    @T.macro
    def publish_gates(gates, of_rows, rows, i, c, stage, scale, vectors, gated):
        """Thread i, of 64, has fetched the `gates` of its row, and its lengths: these, and what follows from them, are there, in `vectors` by their names."""
        m.store_gates(gates, rows, i, stage, vectors.gamma_s, vectors.rise_s, vectors.fall_s, vectors.beta_s)
        vectors.drop_s[stage, i] = -(vectors.rise_s[stage, i] * vectors.beta_s[stage, i])
        vectors.lift_s[stage, i] = scale * vectors.rise_s[stage, i]
        vectors.weight_s[stage, i] = T.Select(
            T.abs(vectors.beta_s[stage, i]) < T.float32(FAINT), vectors.beta_s[stage, i], T.float32(1)
        )
        vectors.out_s[stage, i] = T.Select(
            T.abs(vectors.beta_s[stage, i]) < T.float32(FAINT), T.float32(1), vectors.beta_s[stage, i]
        )
        vectors.sink_s[stage, i] = -(vectors.rise_s[stage, i] * vectors.weight_s[stage, i])
        if l2norm:
            vectors.key_s[of_length(c), i] = T.Select(i < rows, of_rows[0], T.float32(0))
            vectors.query_s[of_length(c), i] = T.Select(i < rows, of_rows[1], T.float32(0))
            if i < rows:
                vectors.lift_s[stage, i] = vectors.lift_s[stage, i] * of_rows[1]
                vectors.drop_s[stage, i] = vectors.drop_s[stage, i] * (of_rows[0] * of_rows[0])
                vectors.out_s[stage, i] = vectors.out_s[stage, i] * of_rows[0]
        vectors.faint_s[stage, i // 32] = T.call_extern(
            "int32", "jax_qla_any", T.cast(i < rows and T.abs(gates[2]) < T.float32(FAINT), "int32")
        )
        T.barrier_arrive(gated[stage])

    @T.macro
    def load_state(states, tile, slot, head, loaded):
        for x in T.unroll(K // 64):
            T.tma_copy(
                states[slot, head, x, 0:V, 0:64],
                tile[:, x * 64 : x * 64 + 64],
                barrier=loaded[0],
                leader_scope_threads=32,
                eviction_policy=SHORT,
            )
        T.barrier_arrive(loaded[0])

    def known(bounds_s, which):
        return T.call_extern("int32", "jax_qla_read", unfenced(bounds_s[which]))

    def add_tiles(near, far, target, bounds_s, turn, key_head, key_heads, width, behind):
        """dQ or dK of the chunk before this `turn`, halves of the columns at `near` and `far`, is added up over the blocks of a cluster, and to what `behind`
        heads of the key head before theirs have left, if any."""
        row = known(bounds_s, FIRST_ROW) - (turn - 1) * C
        rows = known(bounds_s, BEYOND) - known(bounds_s, FIRST_ROW) + (turn - 1) * C
        rank, others = behind & (width - 1), behind & -width
        to = T.address_of(target[row, key_head, 0])
        return call("jax_qla_sum", unfenced(near), unfenced(far), to, rows, key_heads * K, width, rank, others)

    @T.prim_func
    def backward(
        q: T.Tensor((tokens, key_heads, K), dtype),
        k: T.Tensor((tokens, key_heads, K), dtype),
        v: T.Tensor((tokens, value_heads, V), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only, and so
        query_lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |q|
        do: T.Tensor((tokens, value_heads, V), dtype),
        a: T.Tensor((value_heads, tokens, C), "int16"),
        vd: T.Tensor((tokens, vd_heads, V), dtype),
        h: T.Tensor((state_slots, kept_heads, K // 64, V, 64), dtype),
        d_final_state: T.Tensor((final_states, value_heads, K, V), "float32"),
        segments: T.Tensor((sequences, 2), "int32"),  # sequences, or their pieces
        balanced: T.Tensor((1,), "int32"),  # needed unless ALWAYS
        pieces: T.Tensor((cut_pieces, 4), "int32"),
        spans: T.Tensor((cut_sequences, 2), "int32"),
        leaving: T.Tensor((cuts, value_heads, K, V), "float32"),  # gradients of the states between pieces
        dq: T.Tensor((tokens, key_heads, K), dtype),
        dk: T.Tensor((tokens, key_heads, K), dtype),
        dv: T.Tensor((tokens, value_heads, V), dtype),
        dg: T.Tensor((tokens, value_heads), "float32"),
        dbeta: T.Tensor((tokens, value_heads), "float32"),
        d_initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        progress: T.Tensor(
            (counted, value_heads), "int32"
        ),  # chunks done, zero at first; needed where `width` is less than `ratio`
        ratio: T.int32,
        scale: T.float32,
        first_head: T.int32,
        heads: T.int32,  # of this launch
        width: T.int32,  # blocks of a cluster
        only: T.int32,  # ALWAYS, or sequences for which it computes anything, BALANCED or UNBALANCED
        in_place: T.int32,  # 1: gradients of initial states take the place of those of final ones, where those of empty sequences lie already
        firsts: T.int32,  # row of `leaving` from which on it has gradients of final states of sequences that are cut (kernels/compose.py), or -1
    ):
        with T.Kernel(heads, *over(sequences), threads=512, prelude=PRELUDE) as (number, low_place, high_place):
            T.annotate_min_blocks_per_sm(1)
            leave_first((initial_states == 0 or in_place != 0) and rest_is_empty(segments, sequences))
            place = T.alloc_var("int32")  # among the sequences
            place = place_of(low_place, high_place)
            key_head = T.alloc_var("int32")
            within = T.alloc_var("int32")  # among the key head's
            key_head = T.truncdiv(number, ratio)
            within = number - key_head * ratio
            key_head = T.truncdiv(first_head, ratio) + key_head
            head = key_head * ratio + within
            target = T.alloc_var("int32")  # where the gradient of the initial state goes, if anywhere
            first_slot = T.alloc_var("int32")
            T.pdl_sync()
            m.leave_unless(only, balanced, place + number == 0)
            n = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            m.find_sequence(n, start, end, count, segments, sequences, tokens, place)
            first_slot = start // C + n
            beyond = T.alloc_var("int32")  # the row behind those of no sequence that follow
            beyond = T.Select(n + 1 < sequences, segments[T.min(n + 1, sequences - 1), 0], tokens)
            before = T.Select(n == 0, start, 0)  # and as many are before all sequences
            alone = count == 0 and beyond == end and before == 0
            m.leave_if(alone and (initial_states == 0 or in_place != 0), False)
            m.find_target(target, n, pieces, spans, cut_pieces)
            m.leave_if(alone and target < 0, False)
            tx = T.get_thread_binding()

            q_s = T.alloc_shared((2, C, K), dtype)
            k_s = T.alloc_shared((2, C, K), dtype)
            do_s = T.alloc_shared((1, C, V), dtype)
            vd_s = T.alloc_shared((1, C, V), dtype)
            d_s = T.alloc_shared((1, C, V), dtype)  # D, then dv
            h_s = T.alloc_shared((V, K), dtype)
            dh_s = T.alloc_shared((V, K), dtype)
            a_s = T.alloc_shared((1, C, C), dtype)  # without its diagonal
            p_s = T.alloc_shared((1, C, C), dtype)
            e_s = T.alloc_shared((C, C), dtype)  # scale (dO Vd^T o G)
            f_s = T.alloc_shared((C, C), dtype)  # M + M^T, M = -w (D Vd^T o G) strictly lower
            gamma_s = T.alloc_shared((2, C), "float32")
            rise_s = T.alloc_shared((2, C), "float32")
            fall_s = T.alloc_shared((2, C), "float32")
            beta_s = T.alloc_shared((2, C), "float32")
            drop_s = T.alloc_shared((2, C), "float32")  # -exp(gamma) beta, over |k|^2 if keys are normalised
            lift_s = T.alloc_shared((2, C), "float32")  # scale exp(gamma), over |q| if queries are normalised
            out_s = T.alloc_shared((2, C), "float32")  # factor of dX in D
            weight_s = T.alloc_shared((2, C), "float32")  # w: 1, or beta of faint rows
            sink_s = T.alloc_shared((2, C), "float32")  # -exp(gamma) w
            query_s = T.alloc_shared((4, C), "float32") if l2norm else gamma_s  # 1 / |q|, else not needed
            key_s = T.alloc_shared((4, C), "float32") if l2norm else gamma_s  # 1 / |k|
            faint_s = T.alloc_shared((2, 2), "int32")  # whether a row of a warp's is
            vectors = SimpleNamespace(
                gamma_s=gamma_s,
                rise_s=rise_s,
                fall_s=fall_s,
                beta_s=beta_s,
                drop_s=drop_s,
                lift_s=lift_s,
                out_s=out_s,
                weight_s=weight_s,
                sink_s=sink_s,
                query_s=query_s,
                key_s=key_s,
                faint_s=faint_s,
            )
            parts = allocate_parts()
            bounds_s = T.alloc_shared((6,), "int32")
            keys_loaded = T.alloc_barrier([32] * 2)
            keys_free = T.alloc_barrier([256] * 2)
            do_loaded = T.alloc_barrier([32])
            do_free = T.alloc_barrier([256])
            a_loaded = T.alloc_barrier([32])
            a_free = T.alloc_barrier([256])
            vd_loaded = T.alloc_barrier([32])
            vd_free = T.alloc_barrier([256])
            dq_full = T.alloc_barrier([32])
            dk_full = T.alloc_barrier([32])
            dq_free = T.alloc_barrier([32])
            dk_free = T.alloc_barrier([32])
            h_loaded = T.alloc_barrier([32])
            h_free = T.alloc_barrier([384])
            gated = T.alloc_barrier([64] * 2)
            ready = T.alloc_barrier([128])
            taken = T.alloc_barrier([256])
            dh_full = T.alloc_barrier([256])
            dh_free = T.alloc_barrier([256])
            d_full = T.alloc_barrier([256])
            d_free = T.alloc_barrier([160])
            e_ready = T.alloc_barrier([128])
            parts_ready = T.alloc_barrier([256] * 2)
            dots_ready = T.alloc_barrier([160] * 2)

            if tx == 0:
                bounds_s[FIRST_ROW] = start + (count - 1) * C
                bounds_s[BEYOND] = end
                bounds_s[IN_H] = T.Select(kept_heads == value_heads, head, number)
                bounds_s[WITHIN] = within
                bounds_s[IN_PROGRESS] = place * value_heads + head
                bounds_s[IN_VD] = T.Select(vd_heads == value_heads, head, number)
            call("jax_qla_meet")
            if tx >= 384:
                T.set_max_nreg(REGISTERS[3], 0)
                if tx < 448:
                    i = tx - 384
                    gates = T.alloc_local((3,), "float32")
                    of_rows = T.alloc_local((2,), "float32")  # 1 / |k|, 1 / |q|
                    decay = T.alloc_var("float32")
                    for c in T.serial(T.min(count, 2)):
                        row = start + (count - 1 - c) * C
                        m.fetch_gates(gamma, beta, row, T.min(end - row, C), head, i, gates)
                        if l2norm:
                            m.fetch_lengths(lengths, query_lengths, row, T.min(end - row, C), key_head, i, of_rows)
                        publish_gates(gates, of_rows, T.min(end - row, C), i, c, c, scale, vectors, gated)
                    for c in T.serial(count):
                        at = c % 2
                        row = start + (count - 1 - c) * C
                        rows = T.min(end - row, C)
                        if i < rows:
                            decay = g[row + i, head]
                        if c + 2 < count:
                            m.fetch_gates(gamma, beta, row - 2 * C, C, head, i, gates)
                            if l2norm:
                                m.fetch_lengths(lengths, query_lengths, row - 2 * C, C, key_head, i, of_rows)
                        T.barrier_wait(dots_ready[at], c // 2 % 2)
                        T.barrier_wait(parts_ready[at], c // 2 % 2)
                        write_gates(vectors, parts, at, of_length(c), row, rows, head, i, scale, decay, dg, dbeta)
                        T.sync_threads(5, 64)
                        if c + 2 < count:
                            publish_gates(gates, of_rows, C, i, c + 2, at, scale, vectors, gated)
                elif tx < 480:
                    kept = T.alloc_var("int32")
                    of_vd = T.alloc_var("int32")
                    kept = known(bounds_s, IN_H)
                    of_vd = known(bounds_s, IN_VD)
                    if count > 0:
                        last = start + (count - 1) * C
                        m.load_rows(k, last, key_head, 0, K, k_s, 0, keys_loaded, LONG)
                        m.load_rows(q, last, key_head, 0, K, q_s, 0, keys_loaded, LONG)
                        T.barrier_arrive(keys_loaded[0])
                        m.load_rows(do, last, head, 0, V, do_s, 0, do_loaded)
                        T.barrier_arrive(do_loaded[0])
                        m.load_rows(vd, last, of_vd, 0, V, vd_s, 0, vd_loaded, SHORT)
                        T.barrier_arrive(vd_loaded[0])
                        load_state(h, h_s, first_slot + count - 1, kept, h_loaded)
                        if count > 1:
                            m.load_rows(k, last - C, key_head, 0, K, k_s, 1, keys_loaded, LONG)
                            m.load_rows(q, last - C, key_head, 0, K, q_s, 1, keys_loaded, LONG)
                            T.barrier_arrive(keys_loaded[1])
                    for c_l in T.serial(count):
                        row_l = start + (count - 2 - c_l) * C
                        if c_l + 1 < count:
                            T.barrier_wait(do_free[0], c_l % 2)
                            m.load_rows(do, row_l, head, 0, V, do_s, 0, do_loaded)
                            T.barrier_arrive(do_loaded[0])
                            T.barrier_wait(vd_free[0], c_l % 2)
                            m.load_rows(vd, row_l, of_vd, 0, V, vd_s, 0, vd_loaded, SHORT)
                            T.barrier_arrive(vd_loaded[0])
                            T.barrier_wait(h_free[0], c_l % 2)
                            load_state(h, h_s, first_slot + count - 2 - c_l, kept, h_loaded)
                        if c_l + 2 < count:
                            T.barrier_wait(keys_free[c_l % 2], c_l // 2 % 2)
                            m.load_rows(k, row_l - C, key_head, 0, K, k_s, c_l % 2, keys_loaded, LONG)
                            m.load_rows(q, row_l - C, key_head, 0, K, q_s, c_l % 2, keys_loaded, LONG)
                            T.barrier_arrive(keys_loaded[c_l % 2])
                else:
                    if count > 0:
                        last = start + (count - 1) * C
                        m.load_inverse(a, head, last, end - last, 0, a_s, 0, a_loaded, LONG)
                        T.barrier_arrive(a_loaded[0])
                    for c_v in T.serial(count):
                        at_v = c_v % 2
                        row_v = start + (count - 1 - c_v) * C
                        rows_v = T.min(end - row_v, C)
                        if c_v + 1 < count:
                            T.barrier_wait(a_free[0], c_v % 2)
                            m.load_inverse(a, head, row_v - C, C, 0, a_s, 0, a_loaded, LONG)
                            T.barrier_arrive(a_loaded[0])
                        T.barrier_wait(d_full[0], c_v % 2)
                        T.fence_proxy_async()
                        if faint_s[at_v, 0] + faint_s[at_v, 1] != 0:
                            call(
                                "jax_qla_warp_dots",
                                unfenced(d_s[0, 0, 0]),
                                T.address_of(v[row_v, head, 0]),
                                rows_v,
                                value_heads,
                                unfenced(parts.dot_v_s[at_v, 0]),
                            )
                            for y in T.serial(rows_v * (V // 32)):
                                column = y % (V // 32) * 32 + tx - 480
                                dv[row_v + y // (V // 32), head, column] = T.cast(
                                    weight_s[at_v, y // (V // 32)] * T.cast(d_s[0, y // (V // 32), column], "float32"),
                                    dtype,
                                )
                        else:
                            # Not by T.unroll: TileLang would have one lane do all of the loop, what is not TMA's too.
                            m.send_rows(d_s, 0, 0, dv, row_v, rows_v, head, 0, tx - 480, SHORT, 32)
                            m.send_rows(d_s, 0, 64, dv, row_v, rows_v, head, 64, tx - 480, SHORT, 32)
                            T.tma_store_wait(0)
                        T.barrier_arrive(d_free[0])
                        T.barrier_arrive(dots_ready[at_v])
            elif tx >= 256:
                T.set_max_nreg(REGISTERS[2], 0)
                i = tx - 256
                p = T.alloc_fragment((C, C), "float32")
                m.zero_above(a_s, None, 1, i, 128)
                for turn in T.serial(count + 1):
                    if turn < count:  # P of this chunk, before the inner products of the one before
                        T.barrier_wait(keys_loaded[turn % 2], turn // 2 % 2)
                        if turn == 0 and end - start < count * C:
                            rows = end - start - (count - 1) * C
                            m.zero_tail(q_s, 0, rows, K, i, 128)
                            m.zero_tail(k_s, 0, rows, K, i, 128)
                            T.barrier_wait(do_loaded[0], 0)
                            m.zero_tail(do_s, 0, rows, V, i, 128)
                            T.fence_proxy_async()
                            T.sync_threads(3, 128)
                        T.barrier_wait(gated[turn % 2], turn // 2 % 2)
                        if turn > 0:
                            T.barrier_wait(taken[0], (turn + 1) % 2)
                        T.gemm(q_s[turn % 2, :, :], k_s[turn % 2, :, :], p, transpose_B=True, clear_accum=True)
                        call(
                            f"jax_qla_store_decayed<{normed}, true>",
                            p.data,
                            unfenced(gamma_s[turn % 2, 0]),
                            scale,
                            unfenced(query_s[of_length(turn), 0]),
                            unfenced(p_s[0, 0, 0]),
                        )
                        T.barrier_wait(a_loaded[0], turn % 2)
                        if i < C:
                            call("jax_qla_zero_diagonal", unfenced(a_s[0, 0, 0]), i)
                        if turn == 0 and end - start < count * C:
                            m.zero_beyond(a_s, None, 0, end - start - (count - 1) * C, i, 128)
                        T.fence_proxy_async()
                        T.barrier_arrive(ready[0])
                    if turn > 0:
                        T.barrier_wait(h_loaded[0], (turn + 1) % 2)
                        T.barrier_wait(dh_full[0], (turn + 1) % 2)
                        call(
                            f"jax_qla_inner<{ctype}, {V}, {K}>",
                            unfenced(h_s[0, 0]),
                            unfenced(dh_s[0, 0]),
                            unfenced(parts.states_dot_s[(turn + 1) % 2, 0]),
                        )
                        T.barrier_arrive(h_free[0])
                        T.barrier_arrive(dh_free[0])
                        T.barrier_arrive(dots_ready[(turn + 1) % 2])
                        T.barrier_wait(dq_full[0], (turn + 1) % 2)
                        behind = T.alloc_var("int32")  # as many value heads of the key head come before
                        behind = known(bounds_s, WITHIN)
                        if behind >= width:
                            call(
                                "jax_qla_await",
                                T.address_of(progress[0, 0]),
                                known(bounds_s, IN_PROGRESS) - width,
                                turn,
                            )
                        add_tiles(d_s[0, 0, 0], d_s[0, 0, 64], dq, bounds_s, turn, key_head, key_heads, width, behind)
                        call("jax_qla_tell<false>", dq_free[0], width)
                        T.barrier_wait(dk_full[0], (turn + 1) % 2)
                        add_tiles(e_s[0, 0], f_s[0, 0], dk, bounds_s, turn, key_head, key_heads, width, behind)
                        call("jax_qla_tell<false>", dk_free[0], width)
                        if behind < ratio - width:
                            T.sync_threads(3, 128)
                            call("jax_qla_publish", T.address_of(progress[0, 0]), known(bounds_s, IN_PROGRESS), turn)
                for side in tuple(range(2)):  # rows of no sequence that follow, and those before all
                    begin = end if side == 0 else 0
                    for x in T.serial(beyond - end if side == 0 else before):
                        if known(bounds_s, WITHIN) == 0:
                            dq[begin + x, key_head, i] = T.cast(0, dtype)
                            dk[begin + x, key_head, i] = T.cast(0, dtype)
                        dv[begin + x, head, i] = T.cast(0, dtype)
                        if i == 0:
                            dg[begin + x, head] = 0.0
                            dbeta[begin + x, head] = 0.0
            else:
                for wg in tuple(range(2)):
                    part = wg * 64  # first of this warpgroup's columns
                    if tx < 128 if wg == 0 else tx >= 128:
                        T.set_max_nreg(REGISTERS[wg], 1)
                        d = T.alloc_fragment((64, K), "float32")
                        d_b = T.alloc_fragment((64, K), dtype)
                        u = T.alloc_fragment((64, C), "float32")
                        from_output = T.alloc_fragment((64, C), "float32")  # P^T dO
                        dvd_b = T.alloc_fragment((64, C), dtype)
                        dw_b = T.alloc_fragment((64, C), dtype)
                        do_t = T.alloc_fragment((64, C), dtype)
                        do_b = T.alloc_fragment((64, C), dtype)  # dO^T diag(scale exp(gamma))
                        of_column = T.alloc_fragment((C,), "float32")
                        whole = T.alloc_var("float32")
                        lines = T.alloc_var("int32")
                        s = T.alloc_fragment((C, C), "float32")
                        products = T.alloc_fragment((C, C), "float32")
                        e_b = T.alloc_fragment((C, C), dtype)
                        sums = T.alloc_local((18,), "float32")
                        result = T.alloc_fragment((C, K), "float32")  # of dQ, or of dK
                        y = T.alloc_fragment((C, 64), "float32")
                        dots = T.alloc_local((4,), "float32")
                        t = T.alloc_local((16,), "uint32")
                        T.annotate_layout(
                            {x: accumulator_layout(x.shape[1], wg * 128) for x in (s, products, result, y)}
                        )
                        begin_with(
                            *(d, d_final_state, leaving, pieces, final_states, cut_pieces),
                            *(n, head, part, (spans, cut_sequences, firsts)),
                        )
                        for c in T.serial(count):
                            at = c % 2
                            lines = T.min(known(bounds_s, BEYOND) - known(bounds_s, FIRST_ROW) + c * C, C)
                            T.barrier_wait(ready[0], c % 2)
                            T.barrier_wait(do_loaded[0], c % 2)
                            # dVd = exp(gamma_C - gamma) K dS + P^T dO
                            T.copy(d, d_b)
                            T.wgmma_gemm(
                                do_s[0, :, part : part + 64],
                                p_s[0, :, :],
                                from_output,
                                transpose_A=True,
                                clear_accum=True,
                            )
                            m.forget(u)
                            T.wgmma_gemm(d_b, k_s[at, :, :], u, transpose_B=True, clear_accum=True)
                            if c > 0:
                                T.barrier_wait(dh_free[0], (c + 1) % 2)
                            for x in T.unroll(K // 64):
                                call("jax_qla_store_operand<false>", d_b.data, x, unfenced(dh_s[part, x * 64]))
                            T.barrier_arrive(dh_full[0])
                            call("jax_qla_load_transposed", do_t.data, unfenced(do_s[0, 0, part]))
                            for i, j in T.Parallel(64, C):
                                do_b[i, j] = T.cast(do_t[i, j], "float32") * lift_s[at, j]
                            whole = rise_s[at, lines - 1]
                            for i, j in T.Parallel(64, K):
                                d[i, j] = d[i, j] * whole
                            T.wait_wgmma(0)
                            T.barrier_arrive(taken[0])
                            for i, j in T.Parallel(64, C):
                                u[i, j] = u[i, j] * fall_s[at, j] + from_output[i, j]
                            T.copy(u, dvd_b)
                            m.multiply_inverse(dvd_b, a_s, 0, u, True, False)
                            for j in T.Parallel(C):
                                of_column[j] = drop_s[at, j]
                            T.wgmma_gemm(do_b, q_s[at, :, :], d)
                            T.wait_wgmma(1)
                            T.barrier_arrive(a_free[0])
                            m.begin_update(d, u, of_column, dw_b, k_s, at, None)
                            for i, j in T.Parallel(64, C):
                                u[i, j] = u[i, j] * out_s[at, j]
                            if c > 0:
                                T.barrier_wait(dq_free[0], (c + 1) % 2)
                            m.put_rows(u, d_s, 0, part)
                            T.barrier_arrive(d_full[0])
                            T.wait_wgmma(0)
                            at2 = T.alloc_var("int32")
                            at2 = T.call_extern("int32", "jax_qla_again", at)
                            if wg == 0:
                                T.barrier_wait(vd_loaded[0], c % 2)
                                T.wgmma_gemm(do_s[0, :, :], vd_s[0, :, :], s, transpose_B=True, clear_accum=True)
                                T.wgmma_gemm(
                                    q_s[at2, :, :], k_s[at2, :, :], products, transpose_B=True, clear_accum=True
                                )
                                T.wait_wgmma(0)
                                T.barrier_arrive(vd_free[0])
                                call(
                                    f"jax_qla_decayed<false, {normed}>",
                                    T.address_of(s[0, 0]),
                                    T.address_of(products[0, 0]),
                                    unfenced(gamma_s[at2, 0]),
                                    unfenced(beta_s[at2, 0]),
                                    unfenced(query_s[of_length(c), 0]),
                                    scale,
                                    lines,
                                    T.address_of(sums[0]),
                                )
                                T.copy(s, e_b)
                                if c > 0:
                                    T.barrier_wait(dk_free[0], (c + 1) % 2)
                                call("jax_qla_store_tile", T.address_of(s[0, 0]), unfenced(e_s[0, 0]))
                                T.fence_proxy_async()
                                T.barrier_arrive(e_ready[0])
                                ops.write_sums(sums, parts.rows_q_s[at2, 0], parts.columns_q_s[at2, 0, 0])
                                T.barrier_wait(h_loaded[0], c % 2)
                                T.wgmma_gemm(do_s[0, :, :], h_s, result, clear_accum=True)  # dO h^T
                                for x in T.unroll(2):
                                    dots[x] = 0.0
                                for half in tuple(range(K // 64)):
                                    ops.load_tile(t, q_s[at2, 0, half * 64])
                                    if half == 0:
                                        T.wait_wgmma(0)
                                        T.barrier_arrive(do_free[0])
                                        T.barrier_arrive(h_free[0])
                                    call(
                                        f"jax_qla_weigh_rows<{ctype}, {normed}, false>",
                                        T.address_of(result[0, half * 64]),
                                        T.address_of(result[0, half * 64]),
                                        unfenced(rise_s[at2, 0]),
                                        unfenced(query_s[of_length(c), 0]),
                                        scale,
                                        T.address_of(t[0]),
                                        T.address_of(dots[0]),
                                    )
                                T.wgmma_gemm(e_b, k_s[at2, :, :], result)
                                ops.write_rows(dots[0], parts.q_dots_s[at2, 0])
                                T.wait_wgmma(0)
                                if l2norm:
                                    call(
                                        f"jax_qla_along<{ctype}, {K // 64}>",
                                        T.address_of(result[0, 0]),
                                        unfenced(q_s[at2, 0, 0]),
                                        unfenced(query_s[of_length(c), 0]),
                                        T.address_of(dots[0]),
                                    )
                                T.barrier_wait(d_free[0], c % 2)
                                if l2norm:
                                    for half in tuple(range(K // 64)):
                                        call(
                                            "jax_qla_store_across",
                                            T.address_of(result[0, half * 64]),
                                            unfenced(q_s[at2, 0, half * 64]),
                                            T.address_of(dots[0]),
                                            unfenced(d_s[0, 0, half * 64]),
                                        )
                                else:
                                    for half in tuple(range(K // 64)):
                                        call(
                                            "jax_qla_store_tile",
                                            T.address_of(result[0, half * 64]),
                                            unfenced(d_s[0, 0, half * 64]),
                                        )
                                call("jax_qla_tell<true>", dq_full[0], width)
                                T.barrier_arrive(parts_ready[at2])
                                T.barrier_arrive(keys_free[at2])
                            else:
                                T.barrier_arrive(do_free[0])
                                T.barrier_wait(vd_loaded[0], c % 2)
                                T.barrier_wait(dh_full[0], c % 2)
                                T.barrier_wait(d_full[0], c % 2)
                                T.fence_proxy_async()  # of what both warpgroups have written
                                T.wgmma_gemm(d_s[0, :, :], vd_s[0, :, :], s, transpose_B=True, clear_accum=True)
                                T.wgmma_gemm(
                                    k_s[at2, :, :], k_s[at2, :, :], products, transpose_B=True, clear_accum=True
                                )
                                T.wait_wgmma(0)
                                call("jax_qla_put_diagonal", T.address_of(s[0, 0]), unfenced(parts.dot_s[at2, 0]))
                                call(
                                    f"jax_qla_decay_below<{normed}>",
                                    T.address_of(s[0, 0]),
                                    T.address_of(products[0, 0]),
                                    unfenced(gamma_s[at2, 0]),
                                    unfenced(weight_s[at2, 0]),
                                    unfenced(key_s[of_length(c), 0]),
                                    lines,
                                    T.address_of(sums[0]),
                                )
                                if c > 0:
                                    T.barrier_wait(dk_free[0], (c + 1) % 2)
                                call(
                                    f"jax_qla_store_symmetric<{ctype}, {normed}>",
                                    T.address_of(s[0, 0]),
                                    unfenced(weight_s[at2, 0]),
                                    unfenced(key_s[of_length(c), 0]),
                                    unfenced(f_s[0, 0]),
                                )
                                T.fence_proxy_async()
                                T.sync_threads(2, 128)
                                T.barrier_wait(h_loaded[0], c % 2)
                                T.wgmma_gemm(vd_s[0, :, :], dh_s, result, clear_accum=True)  # Y
                                T.wgmma_gemm(d_s[0, :, :], h_s[:, 0:64], y, clear_accum=True)  # Z
                                ops.write_sums(sums, parts.rows_k_s[at2, 0], parts.columns_k_s[at2, 0, 0])
                                for x in T.unroll(4):
                                    dots[x] = 0.0
                                for half in tuple(range(K // 64)):
                                    ops.load_tile(t, k_s[at2, 0, half * 64])
                                    if half == 0:
                                        T.wait_wgmma(1)
                                        T.barrier_arrive(vd_free[0])
                                        T.barrier_arrive(dh_free[0])
                                    call(
                                        f"jax_qla_weigh_rows<{ctype}, false, false>",
                                        T.address_of(result[0, half * 64]),
                                        T.address_of(result[0, half * 64]),
                                        unfenced(fall_s[at2, 0]),
                                        unfenced(key_s[of_length(c), 0]),
                                        T.float32(1),
                                        T.address_of(t[0]),
                                        T.address_of(dots[2]),
                                    )
                                    T.wait_wgmma(0)
                                    call(
                                        f"jax_qla_weigh_rows<{ctype}, {normed}, true>",
                                        T.address_of(result[0, half * 64]),
                                        T.address_of(y[0, 0]),
                                        unfenced(sink_s[at2, 0]),
                                        unfenced(key_s[of_length(c), 0]),
                                        T.float32(1),
                                        T.address_of(t[0]),
                                        T.address_of(dots[0]),
                                    )
                                    if half == 0:
                                        T.wgmma_gemm(d_s[0, :, :], h_s[:, 64:128], y, clear_accum=True)
                                T.barrier_arrive(h_free[0])
                                T.barrier_arrive(d_free[0])
                                T.barrier_wait(e_ready[0], c % 2)
                                T.wgmma_gemm(e_s, q_s[at2, :, :], result, transpose_A=True)
                                ops.write_rows(dots[0], parts.z_dots_s[at2, 0])
                                ops.write_rows(dots[2], parts.y_dots_s[at2, 0])
                                T.barrier_arrive(parts_ready[at2])
                                T.wgmma_gemm(f_s, k_s[at2, :, :], result)
                                T.wait_wgmma(0)
                                if l2norm:
                                    call(
                                        f"jax_qla_along<{ctype}, {K // 64}>",
                                        T.address_of(result[0, 0]),
                                        unfenced(k_s[at2, 0, 0]),
                                        unfenced(key_s[of_length(c), 0]),
                                        T.address_of(dots[0]),
                                    )
                                T.sync_threads(2, 128)  # nobody's products read them any more
                                if l2norm:
                                    for half in tuple(range(K // 64)):
                                        call(
                                            "jax_qla_store_across",
                                            T.address_of(result[0, half * 64]),
                                            unfenced(k_s[at2, 0, half * 64]),
                                            T.address_of(dots[0]),
                                            unfenced((e_s if half == 0 else f_s)[0, 0]),
                                        )
                                else:
                                    for half in tuple(range(K // 64)):
                                        call(
                                            "jax_qla_store_tile",
                                            T.address_of(result[0, half * 64]),
                                            unfenced((e_s if half == 0 else f_s)[0, 0]),
                                        )
                                T.barrier_arrive(keys_free[at2])
                                call("jax_qla_tell<true>", dk_full[0], width)
                        if initial_states > 0 and target >= 0:
                            for i, j in T.Parallel(64, K):
                                d_initial_state[target, head, j, part + i] = d[i, j]
            call("jax_qla_meet")

    return backward


def specification(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    do: jax.Array,
    a: jax.Array,
    vd: jax.Array,
    h: jax.Array,
    d_final_state: jax.Array,
    segments: jax.Array,
    pieces: jax.Array,
    spans: jax.Array,
    leaving: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    scale: float,
    l2norm: int = 0,
    first_head: int = 0,
    heads: int | None = None,
    width: int | None = None,
    only: int = 0,
    firsts: int = -1,
) -> tuple[jax.Array, ...]:
    """(dq, dk [tokens, Hk, K], dv [tokens, Hv, V], dg, dbeta [tokens, Hv], d_initial_state [N, Hv, K, V]): what the two kernels' specifications give, one
    after the other, of so many value heads from `first_head` on, or of all. `segments` are sequences or, with `pieces`, `spans` and `leaving`, their pieces; without,
    these are empty."""
    del width  # but for roundings, results do not go by it
    scalars: dict[str, Any] = {"ratio": ratio, "scale": scale, "l2norm": l2norm, "first_head": first_head, "only": only}
    of_keys = (gamma, beta, lengths, query_lengths)
    tables = (segments, pieces, spans, leaving, leaving[:0], chunks)
    dh, d, d_initial_state, *_ = state_gradients.specification(
        q, k, do, a, *of_keys, d_final_state, *tables, heads=heads, firsts=firsts, **scalars
    )
    results = gradients.specification(q, k, v, g, *of_keys, do, vd, d, h, dh, segments, **scalars)
    return (*results, d_initial_state)
