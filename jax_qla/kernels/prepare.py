"""Chunk-local preparation: in-chunk decay and the inverse that turns the delta rule into matrix products.

For every chunk of 64 tokens and every value head h (key head h // r, r = Hv / Hk):

    gamma_i = sum_{j <= i} max(g_j, -110)                                       [64]       float32
    L_ij    = beta_i <k_i, k_j> exp(gamma_i - gamma_j)   for i > j, else 0      [64, 64]   float32
    a       = (I + L)^{-1}                                                      [64, 64]   stored in the dtype of k, packed

A token maps the state by exp(g) (I - beta k k^T). Unless some beta <k, k> exceeds 2 or is negative, exp(gamma_C) therefore bounds the
spectral norm of what a chunk does to the state before it, which tells kernels/summaries.py what a run of tokens forgets. Chunks where one does
are marked in the lowest bit of their last gamma (kernels/common.py: STRETCHES), which costs gamma 6e-8 of itself and no memory.

With `l2norm`, beta is divided by |k|^2 first, which K K^T has on its diagonal, and 1 / |k| is written for
all that read keys with gates (kernels/common.py). 1 / |q| is written too, by blocks of their own beside those of their rows, unless `forward` finds it.

The *gated* matrix is inverted: the gate-free one can overflow where the recurrence itself is stable (long keys, strong decay).

Plan, one block per (chunk slot, four value heads side by side), 128 threads, a warp a value head. Within a block this is a chain
of waits, which other blocks fill: 128 registers let 4 share a multiprocessor (5, of 96, took longer), and what their 35 KiB each leave of
its memory is first-level cache, which the gates' loads need (docs/performance_versions.md, "The inverse"). The four heads have at most two key heads, or, by `keys`, one, with
19 KiB, or one each, which are taken two after two, with 55. Blocks of fewer heads, whose other warps only help with K K^T, are for calls
of few chunks (policy.prepared_together). Before the rows of a chunk, the rows of `o` that belong to no sequence become zero.

    each two warps    gates of their heads; meanwhile TMA loads the key tiles
    all               K K^T of the key heads by wgmma; meanwhile gamma by a scan over lanes. The products go to the warps of their heads
                      by where the key tiles were (PRELUDE: jax_qla_put_products)
    each              the inverse (kernels/inversion.py: jax_qla_invert), from registers to memory, packed (kernels/inverse.py)
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, LOG2_E, LONG, MIN_LOG_DECAY, PASS_CONFIGS
from jax_qla.kernels.inverse import KEPT
from jax_qla.kernels.inversion import INVERSION_PRELUDE
from jax_qla.kernels.macros import call, leave_first, over, place_of, unfenced
from jax_qla.kernels.preludes import CHUNK_PRELUDE, NORM_PRELUDE
from jax_qla.kernels.specification import (
    decay,
    gather_chunks,
    inverse_length,
    mark,
    pack_inverses,
    part_columns,
    scatter_chunks,
)
from jax_qla.segments import chunk_table

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim` 64 or 128, `dtype` "bfloat16" or "float16"; `l2norm`: whether q and k
    are to be normalised; `split` (kernels/common.py): with bfloat16 only; `keys`: how many key heads a block's value heads have: 1; 2, at most; or
    4, one each."""

    key_dim: int = 128
    dtype: str = "bfloat16"
    l2norm: bool = False
    split: bool = False
    keys: int = 2


UPPER_HALF = 10 * 16 * 16
"""Elements of K K^T that are exchanged."""

LENGTHS_PRELUDE = (
    NORM_PRELUDE
    + r"""
// sums_0 becomes the sum, over as many lanes side by side as there are sums, of the one of this lane's number among them: of two halves of the
// sums the lanes of either keep one and give the other.
template <int half>
__device__ __forceinline__ void jax_qla_sum_rows(float* sums) {
  if constexpr (half > 0) {
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const float kept = upper ? sums[n + half] : sums[n], given = upper ? sums[n] : sums[n + half];
      sums[n] = kept + __shfl_xor_sync(0xffffffffu, given, half);
    }
    jax_qla_sum_rows<half / 2>(sums);
  }
}
// lengths [tokens, heads], 1 / |x| of 16 tokens from `token` on and of heads `head` and `head` + 1, as far as there are such, of x [tokens, heads,
// columns] of bf16; one warp, whose lanes have 16 bytes of a row each.
template <int columns, typename T>
__device__ __forceinline__ void jax_qla_measure(const T* x, float* lengths, int tokens, int heads, int token, int head) {
  constexpr int kLanes = columns / 8, kRows = 32 / kLanes;  // of a row; rows of a load, of which a warp takes as many as a row has lanes
  const int lane = threadIdx.x & 31, part = lane % kLanes, within = lane / kLanes;
  const auto at = [=](int load, bool& there) {  // the row of a load
    const int row = load * kRows + within, of_token = token + row / 2, of_head = head + row % 2;
    there = of_token < tokens && of_head < heads;
    return static_cast<long long>(of_token) * heads + of_head;
  };
  uint4 vectors[kLanes];
#pragma unroll
  for (int n = 0; n < kLanes; ++n) {
    bool there;
    const long long row = at(n, there);
    vectors[n] = there ? reinterpret_cast<const uint4*>(x + row * columns)[part] : uint4{0, 0, 0, 0};
  }
  float sums[kLanes];
#pragma unroll
  for (int n = 0; n < kLanes; ++n) {
    const unsigned pairs[4] = {vectors[n].x, vectors[n].y, vectors[n].z, vectors[n].w};
    float sum[2] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float low = jax_qla_low_half(pairs[e]), high = jax_qla_high_half(pairs[e]);
      sum[0] += low * low;
      sum[1] += high * high;
    }
    sums[n] = sum[0] + sum[1];
  }
  jax_qla_sum_rows<kLanes / 2>(sums);
  bool there;
  const long long row = at(part, there);
  if (there) lengths[row] = jax_qla_over_norm(sums[0]);
}
"""
)


PRELUDE = (
    INVERSION_PRELUDE
    + LENGTHS_PRELUDE
    + CHUNK_PRELUDE
    + f"constexpr float kMinLogDecay = {MIN_LOG_DECAY}f, kLog2e = {LOG2_E}f;"
    r"""
// Gates of heads `head` .. `head` + min(heads, 2), by two warps, two threads a row, which asks for half as many lines of memory as a warp
// a head would; g clamped to kMinLogDecay, but what is not a number stays so; zeros beyond the chunk's rows. g and beta: the chunk's first
// rows of `pitch` elements.
__device__ __forceinline__ void jax_qla_fetch(float* gamma_s, float* beta_s, const float* g, const float* beta, int pitch, int head,
                                              int heads, int rows) {
  const int h = threadIdx.x & 1;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int row = x * 32 + (threadIdx.x >> 1 & 31);
    const bool wanted = h < heads && row < rows;
    const float decay = wanted ? g[row * pitch + head + h] : 0.f;
    gamma_s[h * 64 + row] = decay < kMinLogDecay ? kMinLogDecay : decay;
    beta_s[h * 64 + row] = wanted ? beta[row * pitch + head + h] : 0.f;
  }
}
// The other way: gamma of all rows but the last, which is to be marked.
__device__ __forceinline__ void jax_qla_store_gamma(float* gamma, const float* gamma_s, int pitch, int head, int heads, int rows) {
  const int h = threadIdx.x & 1;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int row = x * 32 + (threadIdx.x >> 1 & 31);
    if (h < heads && row < rows - 1) gamma[row * pitch + head + h] = gamma_s[h * 64 + row];
  }
}
// Inclusive sums over the rows of a head, in place and in units of log2; one warp.
__device__ __forceinline__ void jax_qla_scan(float* gamma, float* log2_gamma) {
  const int lane = threadIdx.x & 31;
  float x = gamma[lane], y = gamma[32 + lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float first = __shfl_up_sync(0xffffffffu, x, step), second = __shfl_up_sync(0xffffffffu, y, step);
    if (lane >= step) {
      x += first;
      y += second;
    }
  }
  y += __shfl_sync(0xffffffffu, x, 31);
  gamma[lane] = x;
  gamma[32 + lane] = y;
  log2_gamma[lane] = x * kLog2e;
  log2_gamma[32 + lane] = y * kLog2e;
}

// Rows `rows`.. of the key tile of each warp of the block become zero.
__device__ __forceinline__ void jax_qla_zero_rows(void* tile, int rows) {
  for (int i = rows * 8 + (threadIdx.x & 31); i < 512; i += 32) static_cast<uint4*>(tile)[i] = uint4{0, 0, 0, 0};
}

// The upper half of K K^T in 10 blocks, from a wgmma accumulator [64, 64], of which a warp has 16 rows, to shared memory, a lane's
// elements of a block by 16 bytes side by side with its neighbours' ...
__device__ __forceinline__ void jax_qla_put_products(const void* accumulator, void* exchanged) {
  const float4* c = static_cast<const float4*>(accumulator);
  const int lane = threadIdx.x & 31, i = (threadIdx.x >> 5) & 3;
  float4* to = static_cast<float4*>(exchanged) + jax_qla_upper(i, 0) * 64 + lane;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k < i) continue;
    to[k * 64] = c[k * 2];
    to[k * 64 + 32] = c[k * 2 + 1];
  }
}
// ... and from there all of it to a warp.
__device__ __forceinline__ void jax_qla_get_products(void* kk, const void* exchanged) {
  const float4* from = static_cast<const float4*>(exchanged) + (threadIdx.x & 31);
#pragma unroll
  for (int n = 0; n < 20; ++n) static_cast<float4*>(kk)[n] = from[n * 32];
}

// beta_i / (|k_i|^2 + epsilon), in place, |k_i|^2 from the diagonal of K K^T, which eight lanes have and all share by way of `shared` memory, and
// lengths_i = 1 / |k_i| of the first `rows` rows, which are `pitch` elements apart; one warp.
__device__ __forceinline__ void jax_qla_normalise(const void* products, float* beta, void* shared, float* lengths, int pitch, int rows) {
  const float* kk = static_cast<const float*>(products);
  float* scratch = static_cast<float*>(shared);
  const int lane = threadIdx.x & 31, row = lane / 4;
  if (row / 2 == lane % 4) {
#pragma unroll
    for (int half = 0; half < 8; ++half) {
      const float* c = kk + jax_qla_upper(half / 2, half / 2) * 8 + half % 2 * 6;
      scratch[half * 8 + row] = row & 1 ? c[1] : c[0];
    }
  }
  __syncwarp();
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int i = x * 32 + lane;
    const float length = jax_qla_over_norm(scratch[i]);
    beta[i] *= length * length;
    if (i < rows) lengths[i * pitch] = length;
  }
  __syncwarp();
}

"""
)


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, value columns and sequences are run-time values."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    C, K, dtype = CHUNK, config.key_dim, config.dtype
    bf16 = "true" if dtype == "bfloat16" else "false"
    l2norm, split = config.l2norm, config.split
    keys = config.keys
    own_keys = keys == 4
    phases = 2 if own_keys else 1  # of two key heads each, or one
    tokens, key_heads, value_heads, value_dim, sequences = T.dynamic(
        "tokens, key_heads, value_heads, value_dim, sequences"
    )
    measured = T.dynamic("measured") if l2norm else tokens  # rows of queries: all or none
    slots = tokens // C + sequences + 1  # jax_qla/segments.py: slot_count
    pairs = (key_heads + 1) // 2
    measuring = T.min(measured * pairs, pairs) if l2norm else 0  # blocks that measure queries, of a slot

    @T.macro
    def load_keys(k, row, key_head, two, unit, half, tiles, loaded):
        """The first warp has TMA load the key tile of a key head, and, unless there is but one, the third that of the next one, if it is wanted:
        `two` is 1, else 0."""
        if half == 0 and unit < min(keys, 2):
            if unit <= two:
                for x in T.unroll(K // 64):
                    T.tma_copy(
                        k[row : row + C, key_head + unit, x * 64 : x * 64 + 64],
                        tiles[unit * 2 + x, :, :],
                        barrier=loaded[unit],
                        leader_scope_threads=32,
                    )
            T.barrier_arrive(loaded[unit])

    def exchanged(phase, which, kept, tiles):
        """Where the products of a key head, the first or second of its phase, are exchanged: where the key tiles were, unless others come there."""
        if phase < phases - 1:
            return T.address_of(kept[which * UPPER_HALF])
        return unfenced(tiles[which, which * 16, 0])

    def scratch(warp, tiles):
        """Where a warp has its blocks on the diagonal, 4 KiB."""
        return unfenced(tiles[warp // 2, warp % 2 * 32, 0] if keys == 1 else tiles[warp, 0, 0])

    @T.prim_func
    def prepare(
        q: T.Tensor((tokens, key_heads, K), dtype),  # with `l2norm` only
        k: T.Tensor((tokens, key_heads, K), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        bounds: T.Tensor((sequences, 2), "int32"),
        a: T.Tensor((value_heads, tokens, C * (1 + split)), "int16"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only, and so
        query_lengths: T.Tensor((measured, key_heads), "float32"),  # 1 / |q|, where wanted
        o: T.Tensor((tokens, value_heads, value_dim), dtype),
        ratio: T.int32,
        together: T.int32,  # value heads of a block: 4, with 4 `keys` always, or fewer (policy.prepared_together)
    ):
        with T.Kernel(
            (value_heads + together - 1) // together + measuring,
            *over(slots),
            threads=128,
            prelude=PRELUDE,
        ) as (number, low_slot, high_slot):
            T.annotate_min_blocks_per_sm(4)
            leave_first(
                T.call_extern(
                    *("bool", "jax_qla_slot_is_empty", T.address_of(bounds[0, 0]), sequences, tokens),
                    slots - 1 - place_of(low_slot, high_slot),
                )
            )
            # Neighbours work on the same rows: what they read and write together is contiguous. The first rows come last, for
            # `forward` begins with them, and finds in the second-level cache what has been read and written of late.
            slot = T.alloc_var("int32")
            first_key_head = T.alloc_var("int32")
            place = T.alloc_var("int32")
            which = T.alloc_var("int32")
            two = T.alloc_var("int32")
            heads = T.alloc_var("int32")
            pair = (together + 1) // 2  # value heads of two warps
            blocks = T.truncdiv(value_heads + together - 1, together) if l2norm else None  # of a slot
            tx = T.get_thread_binding()
            warp = tx // 32
            unit = warp // 2
            half = warp % 2
            lane = tx % 32
            slot = slots - 1 - place_of(low_slot, high_slot)
            of_block = number * together  # value heads from this one on
            first = of_block + unit * pair  # and from this one on of two warps
            head = first + half
            heads = T.Select(unit * pair < together, T.min(value_heads - first, pair), 0)
            if own_keys:
                first_key_head = of_block
                which = half
            else:
                first_key_head = T.truncdiv(of_block, ratio)
                place = head - first_key_head * ratio  # among those of the block's two key heads
                which = T.Select(place >= ratio, 1, 0) if keys == 2 else 0  # of these
            key_head = head if own_keys else first_key_head + which
            # whether the block has heads of two key heads
            if keys == 1:
                two = 0
            else:
                two = T.Select((first_key_head + 1) * ratio < T.min(value_heads, of_block + together), 1, 0)
            T.pdl_trigger()  # what follows waits by itself
            if l2norm:
                if number >= blocks:  # which is none of the heads above, nor of the rows below
                    call(
                        f"jax_qla_measure<{K}>",
                        T.address_of(q[0, 0, 0]),
                        T.address_of(query_lengths[0, 0]),
                        tokens,
                        key_heads,
                        slot * C + warp * 16,
                        (number - blocks) * 2,
                    )
            chunk = T.alloc_local((3,), "int32")
            call("jax_qla_find_chunk", chunk.data, T.address_of(bounds[0, 0]), sequences, tokens, slot)
            row = T.alloc_var("int32")
            rows = T.alloc_var("int32")
            fill = T.alloc_var("int32")
            row = chunk[0]
            rows = T.Select(number < blocks, chunk[1], 0) if l2norm else chunk[1]
            fill = chunk[2]
            if slot < 0:  # there are more blocks than slots
                rows = 0
                fill = 0

            # K of the key heads, 64 columns each; then K K^T of both; then what each value head's warp inverts
            tiles_s = T.alloc_shared((2 if keys == 1 else 4, C, 64), dtype)
            # K K^T of the first two key heads of four
            kept_s = T.alloc_shared((2 * UPPER_HALF,), "float32") if own_keys else None
            gamma_s = T.alloc_shared((4, C), "float32")
            log2_gamma_s = T.alloc_shared((4, C), "float32")  # gamma in units of log2
            beta_s = T.alloc_shared((4, C), "float32")
            loaded = T.alloc_barrier([32] * min(keys, 2))
            T.annotate_layout({tiles_s: make_full_bank_swizzled_layout(tiles_s)})

            if half < heads:
                for i in T.serial(fill):
                    for x in T.serial(value_dim // 32):
                        o[row + rows + i, head, x * 32 + lane] = T.cast(0, dtype)
            if rows > 0:
                near = T.alloc_fragment((C, C), "float32")  # K K^T of the first key head, of the second
                if keys > 1:
                    far = T.alloc_fragment((C, C), "float32")
                kk = T.alloc_local((80,), "float32")
                load_keys(k, row, first_key_head, two, unit, half, tiles_s, loaded)
                call(
                    "jax_qla_fetch",
                    unfenced(gamma_s[unit * 2, 0]),
                    unfenced(beta_s[unit * 2, 0]),
                    T.address_of(g[row, 0]),
                    T.address_of(beta[row, 0]),
                    value_heads,
                    first,
                    heads,
                    rows,
                )
                for phase in tuple(range(phases)):
                    for x in tuple(range(min(keys, 2))):
                        T.barrier_wait(loaded[x], phase)
                    if rows < C:
                        if (warp if keys == 1 else half) < K // 64:
                            call("jax_qla_zero_rows", unfenced(tiles_s[warp, 0, 0]), rows)
                        T.fence_proxy_async()
                        T.sync_threads(1, 128)
                    for x in tuple(range(K // 64)):
                        T.wgmma_gemm(tiles_s[x, :, :], tiles_s[x, :, :], near, transpose_B=True, clear_accum=x == 0)
                    for x in tuple(range(K // 64 if keys > 1 else 0)):
                        T.wgmma_gemm(
                            tiles_s[2 + x, :, :], tiles_s[2 + x, :, :], far, transpose_B=True, clear_accum=x == 0
                        )
                    if phase == 0:
                        T.sync_threads(1, 128)
                        call("jax_qla_scan", T.address_of(gamma_s[warp, 0]), T.address_of(log2_gamma_s[warp, 0]))
                        T.sync_threads(1, 128)
                        call(
                            "jax_qla_store_gamma",
                            T.address_of(gamma[row, 0]),
                            T.address_of(gamma_s[unit * 2, 0]),
                            value_heads,
                            first,
                            heads,
                            rows,
                        )
                    T.wait_wgmma(0)
                    if phase == phases - 1:
                        T.sync_threads(1, 128)  # the key tiles become what is exchanged
                    call("jax_qla_put_products", near.data, exchanged(phase, 0, kept_s, tiles_s))
                    if keys > 1:
                        if own_keys or two > 0:
                            call("jax_qla_put_products", far.data, exchanged(phase, 1, kept_s, tiles_s))
                    T.sync_threads(1, 128)  # the key tiles become those of the next key heads; or all is exchanged
                    if phase + 1 < phases:
                        load_keys(
                            k,
                            row,
                            first_key_head + 2 * phase + 2,
                            T.min(value_heads - first_key_head - 2 * phase - 3, 1),
                            unit,
                            half,
                            tiles_s,
                            loaded,
                        )
                for phase in tuple(range(phases)):
                    if phases == 1 or unit == phase:
                        call("jax_qla_get_products", T.address_of(kk[0]), exchanged(phase, which, kept_s, tiles_s))
                T.sync_threads(1, 128)  # what is exchanged becomes scratch
                if half < heads:
                    if l2norm:
                        call(
                            "jax_qla_normalise",
                            T.address_of(kk[0]),
                            T.address_of(beta_s[warp, 0]),
                            scratch(warp, tiles_s),
                            T.address_of(lengths[row, key_head]),
                            key_heads,
                            rows if own_keys else T.if_then_else(place == which * ratio, rows, 0),
                        )
                    call(
                        f"jax_qla_invert<{bf16}, {'true' if split else 'false'}, {KEPT[LONG]}>",
                        T.address_of(kk[0]),
                        T.address_of(log2_gamma_s[warp, 0]),
                        T.address_of(beta_s[warp, 0]),
                        scratch(warp, tiles_s),
                        T.address_of(a[0, 0, 0]),
                        (T.cast(head, "int64") * tokens + row) * (C * (1 + split)),
                        rows,
                        T.address_of(gamma[row, 0]),
                        (rows - 1) * value_heads + head,
                        gamma_s[warp, rows - 1],
                    )
            T.pdl_sync()  # ends after what came before, for what follows waits for this kernel alone

    return prepare


def specification(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    bounds: jax.Array,
    *,
    ratio: int,
    l2norm: int = 0,
    split: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(a [Hv, tokens, 64], or with `split` [Hv, tokens, 128], of bits of k's dtype, gamma [tokens, Hv], lengths and query_lengths [tokens, Hk]) of sequences
    `bounds` [N, 2], query_lengths of all rows, if they are wanted; `o` is not a result, only its unused rows are zeroed."""
    chunks = jnp.asarray(chunk_table(bounds, k.shape[0]))
    keys = gather_chunks(k, chunks)
    lengths = inverse_length(keys, l2norm)
    keys, of_key = (jnp.repeat(x, ratio, axis=2) for x in (keys, lengths))
    strength = gather_chunks(beta, chunks) * of_key**2
    gamma = jnp.cumsum(jnp.maximum(gather_chunks(g, chunks), MIN_LOG_DECAY), axis=1)
    product = jnp.einsum("sihk,sjhk->sijh", keys, keys) * strength[:, :, None]
    lower = jnp.moveaxis(product * decay(gamma, strict=True), 3, 1)
    identity = jnp.broadcast_to(jnp.eye(CHUNK, dtype=lower.dtype), lower.shape)
    inverse = jax.lax.linalg.triangular_solve(
        lower + identity, identity, left_side=True, lower=True, unit_diagonal=True
    )
    inverse = jnp.moveaxis(inverse, 1, 2)
    if split:
        inverse = part_columns(inverse)
    a = pack_inverses(inverse, chunks, k.shape[0], k.dtype)
    squares = strength * jnp.einsum("sihk,sihk->sih", keys, keys)
    stretches = jnp.any((squares > 2.001) | (squares < 0), axis=1)
    is_last = jnp.arange(CHUNK) == chunks[:, 2, None] - 1
    gamma = jnp.where(is_last[..., None], mark(gamma, stretches[:, None]), gamma)
    gamma, lengths = (scatter_chunks(x, chunks, k.shape[0], g.dtype) for x in (gamma, lengths))
    return a, gamma, lengths, inverse_length(q, l2norm) if l2norm else lengths
