"""Chunk-local preparation: in-chunk decay and the inverse that turns the delta rule into matrix products.

For every chunk of 64 tokens and every value head h (key head h // r, r = Hv / Hk), in the notation of ALGORITHM.md:

    gamma_i = sum_{j <= i} max(g_j, -110)                                       [64]       float32
    L_ij    = beta_i <k_i, k_j> exp(gamma_i - gamma_j)   for i > j, else 0      [64, 64]   float32
    a       = (I + L)^{-1}                                                      [64, 64]   stored in the dtype of k

A token maps the state by exp(g) (I - beta k k^T). Unless some beta <k, k> exceeds 2, exp(gamma_C) therefore bounds the spectral norm
of what a chunk does to the state before it, which tells kernels/summaries.py what a run of tokens forgets. Chunks where one does exceed
it are marked in the lowest bit of their last gamma (kernels/common.py: STRETCHES), which costs gamma 6e-8 of itself and no memory.

The *gated* matrix is inverted: the gate-free one can overflow where the recurrence itself is stable (long keys, strong decay).

Plan, one block per (chunk slot, key head), 160 threads:

    warp 4            loads the key tile with TMA and zeroes the rows of `o` which belong to no sequence
    warpgroup 0       K K^T once per key head (wgmma, kept in registers), then for two value heads at a time:
                        32 threads a head   gates: gamma by a scan over lanes, fetched one pair of heads ahead
                        all 128 threads     L to shared memory, column-major (PRELUDE: jax_qla_lower)
                        64 threads a head   the inverse, in place (PRELUDE: jax_qla_invert)

The inverse: each of the four 16x16 blocks on the diagonal by forward substitution (a thread owns a column), then twice

    [A 0; B D]^{-1} = [A^{-1} 0; -D^{-1} B A^{-1} D^{-1}]   (16 -> 32 -> 64)

with mma, whose operands are split into two bf16 numbers each (three products: 16 bits of mantissa). The products are chained in
registers. 120 FMA and 60 mma a warp, where substitution alone takes 2016 FMA.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, LOG2_E, MIN_LOG_DECAY, PASS_CONFIGS, STRETCHES, accumulator_layout
from jax_qla.kernels.specification import decay, gather_chunks, mark, scatter_chunks

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim` 64 or 128, `dtype` "bfloat16" or "float16"."""

    key_dim: int = 128
    dtype: str = "bfloat16"


PRELUDE = (
    f"constexpr int kStretches = {STRETCHES};"
    r"""
constexpr int kStride = 68;  // floats from a column of a matrix in shared memory to the next: a bank apart for every row

__device__ __forceinline__ float jax_qla_scan(float x) {  // inclusive sum over the lanes up to this one
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float below = __shfl_up_sync(0xffffffffu, x, step);
    if ((threadIdx.x & 31) >= step) x += below;
  }
  return x;
}

// L of one head: `kk` is this thread's part of K K^T, a wgmma accumulator [64, 64]; gamma in units of log2.
// Blocks above the diagonal are not written, nor read by jax_qla_invert. The first call stores the diagonal of K K^T.
template <bool first>
__device__ __forceinline__ void jax_qla_lower(const void* kk, float* lower, const float* gamma, const float* beta, float* diagonal,
                                              int rows) {
  const float* product = static_cast<const float*>(kk);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, top = warp * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n > warp * 2 + 1) break;
    const int column = n * 8 + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = top + h * 8;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float decay = exp2f(gamma[row] - gamma[column + e]);
        const float value = beta[row] * product[n * 4 + h * 2 + e] * decay;
        if (row > column + e) lower[(column + e) * kStride + row] = row < rows ? value : 0.f;
        if (first && row == column + e) diagonal[row] = product[n * 4 + h * 2 + e];
      }
    }
  }
}

// The last gamma of a chunk, marked. One warp; beta is 0 beyond the chunk's rows.
__device__ __forceinline__ void jax_qla_mark(float* gamma, float last, const float* beta, const float* diagonal) {
  const int lane = threadIdx.x & 31;
  const bool stretches = beta[lane] * diagonal[lane] > 2.001f || beta[lane + 32] * diagonal[lane + 32] > 2.001f;
  const int mark = __any_sync(0xffffffffu, stretches) ? kStretches : 0;
  if (lane == 0) *gamma = __int_as_float((__float_as_int(last) & ~kStretches) | mark);
}

struct Split {  // two float32 numbers as high + low, both pairs of bf16
  unsigned high, low;
};
__device__ __forceinline__ Split jax_qla_split(float x, float y) {
  Split s;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(s.high) : "f"(y), "f"(x));
  const float left_x = x - __uint_as_float(s.high << 16), left_y = y - __uint_as_float(s.high & 0xffff0000u);
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(s.low) : "f"(left_y), "f"(left_x));
  return s;
}
__device__ __forceinline__ void jax_qla_mma(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c [16, 8 tiles] += a [16, 16] (split) times the matrix [16, 8 tiles] whose first element is `b`
template <int tiles>
__device__ __forceinline__ void jax_qla_multiply(float (*c)[4], const Split* a, const float* b) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < tiles; ++n) {
    const float* column = b + (n * 8 + lane / 4) * kStride + lane % 4 * 2;
    const float2 near = *reinterpret_cast<const float2*>(column), far = *reinterpret_cast<const float2*>(column + 8);
    const Split b0 = jax_qla_split(near.x, near.y), b1 = jax_qla_split(far.x, far.y);
    jax_qla_mma(c[n], a[0].low, a[1].low, a[2].low, a[3].low, b0.high, b1.high);
    jax_qla_mma(c[n], a[0].high, a[1].high, a[2].high, a[3].high, b0.low, b1.low);
    jax_qla_mma(c[n], a[0].high, a[1].high, a[2].high, a[3].high, b0.high, b1.high);
  }
}
// The [16, 16] matrix at `m` as a left operand.
__device__ __forceinline__ void jax_qla_left(Split* a, const float* m) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float* first = m + (k * 8 + lane % 4 * 2) * kStride + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) a[k * 2 + h] = jax_qla_split(first[h * 8], first[h * 8 + kStride]);
  }
}
// Minus the accumulators of two adjoining tiles as a left operand.
__device__ __forceinline__ void jax_qla_chain(Split* a, const float (*c)[4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int h = 0; h < 2; ++h) a[k * 2 + h] = jax_qla_split(-c[k][h * 2], -c[k][h * 2 + 1]);
  }
}

template <typename T>
struct alignas(4) Pair {
  T x, y;
};

// `lower`: L as jax_qla_lower leaves it; `out`: the first element of a, whose rows are `pitch` elements apart. 64 threads, which
// `barrier` synchronises.
template <typename T>
__device__ __forceinline__ void jax_qla_invert(float* lower, T* out, int pitch, int rows, int barrier) {
  const int thread = threadIdx.x & 63, lane = threadIdx.x & 31, warp = thread >> 5;
  {  // blocks on the diagonal
    const int block = thread >> 4, c = thread & 15;
    float* diagonal = lower + block * 16 * (kStride + 1);
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == c ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < 15; ++j) {
#pragma unroll
      for (int i = j + 1; i < 16; ++i) x[i] -= diagonal[j * kStride + i] * x[j];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) diagonal[c * kStride + i] = x[i];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (block * 16 + i < rows) out[(block * 16 + i) * pitch + thread] = static_cast<T>(x[i]);
    }
    // zeros above them
    if (thread < rows) {
      for (int i = block * 2 + 2; i < 8; ++i) reinterpret_cast<uint4*>(out + thread * pitch)[i] = uint4{0, 0, 0, 0};
    }
    __syncwarp();
  }
  const int top = lane / 4, left = lane % 4 * 2;
  {  // 16 -> 32: each warp its half
    float* half = lower + warp * 32 * (kStride + 1);
    Split a[4];
    float u[2][4] = {}, x[2][4] = {};
    jax_qla_left(a, half + 16 * (kStride + 1));
    jax_qla_multiply<2>(u, a, half + 16);
    jax_qla_chain(a, u);
    jax_qla_multiply<2>(x, a, half);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * 32 + 16 + top + h * 8, column = n * 8 + left;
        float* to = half + column * kStride + 16 + top + h * 8;
        to[0] = x[n][h * 2];
        to[kStride] = x[n][h * 2 + 1];
        if (row < rows) {
          *reinterpret_cast<Pair<T>*>(out + row * pitch + warp * 32 + column) =
              Pair<T>{static_cast<T>(x[n][h * 2]), static_cast<T>(x[n][h * 2 + 1])};
        }
      }
    }
  }
  asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory");
  {  // 32 -> 64: each warp 16 rows
    const float* last = lower + 32 * (kStride + 1) + warp * 16;
    Split a[4];
    float u[4][4] = {}, x[4][4] = {};
    jax_qla_left(a, last);
    jax_qla_multiply<4>(u, a, lower + 32);
    if (warp == 1) {
      jax_qla_left(a, last + 16 * kStride);
      jax_qla_multiply<4>(u, a, lower + 48);
    }
    jax_qla_chain(a, u);
    jax_qla_multiply<2>(x, a, lower);
    jax_qla_chain(a, u + 2);
    jax_qla_multiply<2>(x, a, lower + 16);
    jax_qla_multiply<2>(x + 2, a, lower + 16 * (kStride + 1));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 32 + warp * 16 + top + h * 8;
        if (row < rows) {
          *reinterpret_cast<Pair<T>*>(out + row * pitch + n * 8 + left) =
              Pair<T>{static_cast<T>(x[n][h * 2]), static_cast<T>(x[n][h * 2 + 1])};
        }
      }
    }
  }
}
"""
)


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, value columns and chunk slots are run-time values."""
    import tilelang.language as T

    C, K, dtype = CHUNK, config.key_dim, config.dtype
    tokens, key_heads, value_heads, value_dim, slots = T.dynamic("tokens, key_heads, value_heads, value_dim, slots")

    @T.macro
    def fetch(g, beta, row, rows, head, wanted, lane, fetched):
        """Gates of rows `lane` and `lane` + 32 of a head; 0 beyond `rows`, and where no head is `wanted`."""
        for x in T.unroll(2):
            if wanted and x * 32 + lane < rows:
                fetched[x] = T.max(g[row + x * 32 + lane, head], T.float32(MIN_LOG_DECAY))
                fetched[2 + x] = beta[row + x * 32 + lane, head]
            else:
                fetched[x] = 0.0
                fetched[2 + x] = 0.0

    @T.prim_func
    def prepare(
        k: T.Tensor((tokens, key_heads, K), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        chunks: T.Tensor((slots, 4), "int32"),
        a: T.Tensor((tokens, value_heads, C), dtype),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        o: T.Tensor((tokens, value_heads, value_dim), dtype),
        ratio: T.int32,
    ):
        with T.Kernel(slots, key_heads, threads=160, prelude=PRELUDE) as (slot, key_head):
            T.annotate_min_blocks_per_sm(4)
            T.pdl_sync()  # the tables are there
            T.pdl_trigger()  # what follows waits by itself
            row = chunks[slot, 1]
            rows = chunks[slot, 2]
            fill = chunks[slot, 3]
            tx = T.get_thread_binding()

            k_s = T.alloc_shared((C, K), dtype)
            lower_s = T.alloc_shared((2, C, C + 4), "float32")
            gamma_s = T.alloc_shared((2, C), "float32")  # in units of log2
            beta_s = T.alloc_shared((2, C), "float32")
            diagonal_s = T.alloc_shared((C,), "float32")  # of K K^T
            loaded = T.alloc_barrier(32)

            if tx >= 128:
                if rows > 0:
                    T.tma_copy(k[row : row + C, key_head, 0:K], k_s, barrier=loaded, leader_scope_threads=32)
                    T.barrier_arrive(loaded)
                for i in T.serial(fill):
                    for h in T.serial(ratio):
                        for x in T.serial(value_dim // 32):
                            o[row + rows + i, key_head * ratio + h, x * 32 + tx - 128] = T.cast(0, dtype)
            else:
                if rows > 0:
                    kk = T.alloc_fragment((C, C), "float32")
                    T.annotate_layout({kk: accumulator_layout(C)})
                    fetched = T.alloc_local((4,), "float32")
                    sums = T.alloc_local((2,), "float32")
                    half = tx // 64
                    lane = tx % 64  # 32.. have no part in the gates
                    fetch(g, beta, row, rows, key_head * ratio + half, half < ratio and lane < 32, lane, fetched)
                    T.barrier_wait(loaded, 0)
                    T.gemm(k_s, k_s, kk, transpose_B=True, clear_accum=True)
                    for pair in T.serial((ratio + 1) // 2):
                        own = pair * 2 + half < ratio
                        head = key_head * ratio + pair * 2 + half
                        if lane < 32:
                            for x in T.unroll(2):
                                sums[x] = T.call_extern("float32", "jax_qla_scan", fetched[x])
                            sums[1] = sums[1] + T.shfl_sync(sums[0], 31)
                            for x in T.unroll(2):
                                gamma_s[half, x * 32 + lane] = sums[x] * T.float32(LOG2_E)
                                beta_s[half, x * 32 + lane] = fetched[2 + x]
                                if own and x * 32 + lane < rows - 1:
                                    gamma[row + x * 32 + lane, head] = sums[x]
                        T.sync_threads(1, 128)
                        fetch(g, beta, row, rows, head + 2, pair * 2 + 2 + half < ratio and lane < 32, lane, fetched)
                        for s in (0, 1):
                            T.call_extern(
                                "handle",
                                "jax_qla_lower<true>" if s == 0 else "jax_qla_lower<false>",
                                T.address_of(kk[0, 0]),
                                T.address_of(lower_s[s, 0, 0]),
                                T.address_of(gamma_s[s, 0]),
                                T.address_of(beta_s[s, 0]),
                                T.address_of(diagonal_s[0]),
                                rows,
                            )
                        T.sync_threads(1, 128)
                        if own:
                            if lane < 32:
                                T.call_extern(
                                    "handle",
                                    "jax_qla_mark",
                                    T.address_of(gamma[row + rows - 1, head]),
                                    gamma_s[half, C - 1] * T.float32(1 / LOG2_E),
                                    T.address_of(beta_s[half, 0]),
                                    T.address_of(diagonal_s[0]),
                                )
                            T.call_extern(
                                "handle",
                                "jax_qla_invert",
                                T.address_of(lower_s[half, 0, 0]),
                                T.address_of(a[row, head, 0]),
                                value_heads * C,
                                rows,
                                2 + half,
                            )

    return prepare


def specification(
    k: jax.Array, g: jax.Array, beta: jax.Array, chunks: jax.Array, *, ratio: int
) -> tuple[jax.Array, jax.Array]:
    """(a [tokens, Hv, 64] in k's dtype, gamma [tokens, Hv]); `o` is not a result, only its unused rows are zeroed."""
    keys = jnp.repeat(gather_chunks(k, chunks), ratio, axis=2)
    strength = gather_chunks(beta, chunks)
    gamma = jnp.cumsum(jnp.maximum(gather_chunks(g, chunks), MIN_LOG_DECAY), axis=1)
    product = jnp.einsum("sihk,sjhk->sijh", keys, keys) * strength[:, :, None]
    lower = jnp.moveaxis(product * decay(gamma, strict=True), 3, 1)
    identity = jnp.broadcast_to(jnp.eye(CHUNK, dtype=lower.dtype), lower.shape)
    inverse = jax.lax.linalg.triangular_solve(
        lower + identity, identity, left_side=True, lower=True, unit_diagonal=True
    )
    a = scatter_chunks(jnp.moveaxis(inverse, 1, 2), chunks, k.shape[0], k.dtype)
    stretches = jnp.any(strength * jnp.einsum("sihk,sihk->sih", keys, keys) > 2.001, axis=1)
    is_last = jnp.arange(CHUNK) == chunks[:, 2, None] - 1
    gamma = jnp.where(is_last[..., None], mark(gamma, stretches[:, None]), gamma)
    return a, scatter_chunks(gamma, chunks, k.shape[0], g.dtype)
