"""The states between the pieces of a sequence, from what each piece does to the state before it (kernels/summaries.py).

    forward    entering[p + 1] = response[p] + M[p] entering[p],   entering[first] = initial_state
    reverse    entering[p - 1] = response[p] + M[p]^T entering[p], entering[last]  = d_final_state

A piece is entered from the side that the recurrence comes from: reversed, entering[p] is the gradient of the state after piece p.
Pieces that are `forgotten` take no product: those that decay, and a sequence's first (reversed, its last), whose response has been
computed from its own state.

Reversed, blocks begin where those of kernels/states.py leave room (jax_qla/overlap.py), some at once and most at the end: those with products
first, and where no piece takes one, responses are copied, several at a time. Forwards, all are waited for at once by whoever comes next,
and what finds this out takes longer than it gains.

Plan, one block per (sequence, value head, tile of `columns` value columns), K / 16 + 1 warps, two or three stages of M:

    last warp      loads M, in two bf16 parts, with TMA
    other warps    16 rows each of the state [K, columns], in float32, in accumulators of mma.sync. A product with M is three of bf16
                   parts (high low, high high, low high: 16 bits of mantissa). M is the left operand: a warp reads its own rows, once. The
                   state is the right one: every warp needs all of it, so it goes through a tile in shared memory, high and low. Responses
                   and states come from and go to global memory in registers

    barrier         arrives  waits   says
    loaded[stage]   TMA      others  M of a piece is there
    free[stage]     others   last    the stage may be overwritten: it is in registers
    1               others   others  the state is in its tile. There are two tiles in turn: one barrier a step is enough

The chain of pieces is serial, and most calls have few heads times sequences: so few columns a block (policy.composed_columns), which
fill more of the card and shorten the step. A step splits the state, stores it, meets, then computes products, and meanwhile everything
else: the state before leaves, the second half of this M and the first half of the next one become registers. So a step begins with
operands that are there, and an M that comes late is waited for after a quarter of the products, not before.

Cycles of a step at K = 128, by count. M, 64 KiB: 1000 from the second-level cache at 64 bytes a cycle, 512 to be read from shared memory.
The state's tile, read by every warp: 512, 1024 and 2048 for 16, 32 and 64 columns. Products: 96, 192 and 384 mma.sync a scheduler, 670,
1340 and 2690. To split, store and meet: 150. Measured: 1.2 us a piece with 16 columns, 1.8 with 32, 2.6 with 64 (docs/performance.md).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import MATRIX_PRELUDE, NTH_PRELUDE, PASS_CONFIGS

__all__ = ["COLUMNS", "PASS_CONFIGS", "Config", "program", "specification"]

COLUMNS = (16, 32, 64)
"""Value columns that a block may have."""


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, whether it runs in `reverse`, and
    `columns`, of COLUMNS."""

    key_dim: int = 128
    value_dim: int = 128
    reverse: bool = False
    columns: int = 16


PRELUDE = (
    MATRIX_PRELUDE
    + NTH_PRELUDE
    + r"""
// What a lane finds from its number, once: ptxas would find it again in every step.
__device__ __forceinline__ int jax_qla_keep(int x) { return __shfl_sync(0xffffffffu, x, threadIdx.x & 31); }

// A warp's part of a state, [16 rows][columns]: element 4 n + 2 h + e of lane l is at row 8 h + l / 4, column 8 n + 2 (l % 4) + e. So are sums of
// products, and a response. In global memory rows are `pitch` elements apart; where the lane's first one is:
__device__ __forceinline__ int jax_qla_corner(int pitch) {
  const int lane = threadIdx.x & 31;
  return jax_qla_keep(((threadIdx.x >> 5) * 16 + lane / 4) * pitch + lane % 4 * 2);
}
template <int columns, int pitch>
__device__ __forceinline__ void jax_qla_fetch(float* c, const float* x, long long corner) {
  const float* from = x + corner;
#pragma unroll
  for (int i = 0; i < columns / 4; ++i) {
    const int row = i % 2 * 8, column = i / 2 * 8;
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(c[i * 2]), "=f"(c[i * 2 + 1]) : "l"(from + row * pitch + column) : "memory");
  }
}
template <int columns, int pitch>
__device__ __forceinline__ void jax_qla_leave(float* x, const float* c, long long corner) {
  float* to = x + corner;
#pragma unroll
  for (int i = 0; i < columns / 4; ++i) {
    const int row = i % 2 * 8, column = i / 2 * 8;
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to + row * pitch + column), "f"(c[i * 2]), "f"(c[i * 2 + 1]) : "memory");
  }
}

// The state as a right operand: `shared` holds [2][key_dim][columns] of bf16, high and low. Of a row's units of 16 bytes number u lies where u
// xor the number of the row among those that begin at the same bank says: neither stmatrix nor ldmatrix meets a bank twice. Where a lane's
// unit of the first 16 rows and columns is; the next 16 columns are at `address ^ 32`.
template <int columns>
__device__ __forceinline__ unsigned jax_qla_unit(const void* shared) {
  const int lane = threadIdx.x & 31, row = lane & 15;
  return jax_qla_keep(jax_qla_address(shared) + row * columns * 2 + (((lane >> 4) ^ (row % 8 / (64 / columns))) << 4));
}
template <int key_dim, int columns>
__device__ __forceinline__ void jax_qla_share(unsigned to, const float* c) {
#pragma unroll
  for (int i = 0; i < columns / 16; ++i) {
    const unsigned at = to ^ (i << 5);
    unsigned high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) jax_qla_split(high[j], low[j], c[i * 8 + j * 2], c[i * 8 + j * 2 + 1]);
    jax_qla_store_matrices<false>(at, high[0], high[1], high[2], high[3]);
    jax_qla_store_matrices<false>(at + key_dim * columns * 2, low[0], low[1], low[2], low[3]);
  }
}
// Rows 16 k to 16 k + 15 of it, `width` columns from 16 n on: r[2 i] and r[2 i + 1] are the high part of the i-th 8 columns, and the low part
// follows.
template <int key_dim, int columns, int width>
__device__ __forceinline__ void jax_qla_load_shared(unsigned* r, unsigned from, int k, int n) {
#pragma unroll
  for (int i = 0; i < width / 16; ++i) {
    jax_qla_load_matrices<true>(r + i * 4, (from ^ (n + i << 5)) + k * columns * 32);
    jax_qla_load_matrices<true>(r + width / 4 + i * 4, (from ^ (n + i << 5)) + k * columns * 32 + key_dim * columns * 2);
  }
}

// A warp's rows of a map as left operands: of columns 16 k to 16 k + 15 the high parts, then the low ones, from m[8 k] on.
// `map`: the transposed map's parts in shared memory, [2][key_dim / 64][key_dim][64], 128-byte swizzled. `reverse` takes it as it lies there.
template <int key_dim, bool reverse>
__device__ __forceinline__ unsigned jax_qla_map_row(const void* map) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, near = lane >> 3 & 1, far = lane >> 4;
  int row = (warp * 16 + (lane & 15)) * 128 + ((far ^ (lane & 7)) << 4);
  if constexpr (!reverse) {
    row = (warp >> 2) * key_dim * 128 + (far * 8 + (lane & 7)) * 128 + ((((warp & 3) * 2 + near) ^ (lane & 7)) << 4);
  }
  return jax_qla_keep(jax_qla_address(map) + row);
}
template <int key_dim, bool reverse>
__device__ __forceinline__ void jax_qla_load_columns(unsigned* m, unsigned from, int k) {
  const unsigned at = reverse ? (from ^ (k % 4 << 5)) + k / 4 * key_dim * 128 : from + k * 2048;
  jax_qla_load_matrices<!reverse>(m + k * 8, at);
  jax_qla_load_matrices<!reverse>(m + k * 8 + 4, at + key_dim * key_dim * 2);
}
template <int key_dim, bool reverse>
__device__ __forceinline__ void jax_qla_load_map(unsigned* m, unsigned from) {  // its first half
#pragma unroll
  for (int k = 0; k < key_dim / 32; ++k) jax_qla_load_columns<key_dim, reverse>(m, from, k);
}

// A state's product with a map, in two parts. An mma waits for the one before it in the same sum: with few columns the products have
// sums of their own. Right operands come in groups of columns, those of 16 rows, and are loaded some groups ahead.
template <int columns>
struct Product {
  static constexpr int kSize = columns / 2;  // elements of a lane
  static constexpr int kSums = columns == 16 ? 3 : columns == 32 ? 2 : 1;
  static constexpr int kWidth = columns == 32 ? 32 : 16, kGroups = columns / kWidth;
  static constexpr int kAhead = columns == 16 ? 2 : 1, kRing = kAhead + 1;
};
// The first part, a quarter, meanwhile loads the second half of m. The second part replaces the first half by that of the map after this, each
// column when its last product is behind it, and none at the end: there the state is awaited. `row`: of the map to load from. `r` holds right
// operands between the parts.
template <int key_dim, int columns, bool reverse, bool second>
__device__ __forceinline__ void jax_qla_multiply(float* sums, unsigned* m, unsigned* r, unsigned state, unsigned row) {
  using P = Product<columns>;
  constexpr int steps = key_dim / 16, quarter = steps / 4, first = second ? quarter : 0, last = second ? steps : quarter, size = P::kWidth / 2;
  const auto load = [&](int group) {
    if (group < steps * P::kGroups) {
      jax_qla_load_shared<key_dim, columns, P::kWidth>(r + group % P::kRing * size, state, group / P::kGroups,
                                                       group % P::kGroups * (P::kWidth / 16));
    }
  };
  if constexpr (!second) {
#pragma unroll
    for (int i = 0; i < P::kSize * P::kSums; ++i) sums[i] = 0.f;
#pragma unroll
    for (int i = 0; i < P::kAhead; ++i) load(i);
  }
#pragma unroll
  for (int k = first; k < last; ++k) {
#pragma unroll
    for (int group = k * P::kGroups; group < (k + 1) * P::kGroups; ++group) {
      load(group + P::kAhead);
#pragma unroll
      for (int product = 0; product < 3; ++product) {  // high low, high high, low high: the first and the last share a sum
        float* c = sums + (P::kSums == 3 ? product : P::kSums == 2 ? product % 2 : 0) * P::kSize + group % P::kGroups * size;
        const unsigned* right = r + group % P::kRing * size + (product == 0 ? size / 2 : 0);
#pragma unroll
        for (int n = 0; n < P::kWidth / 8; ++n) {
          jax_qla_mma<true>(c + n * 4, m + k * 8 + (product == 2 ? 4 : 0), right[n * 2], right[n * 2 + 1]);
        }
      }
    }
    if constexpr (second) {
      if (k - first < steps / 2) jax_qla_load_columns<key_dim, reverse>(m, row, k - first);
      __syncwarp();  // or ptxas would load all of it at the end
    } else {
      jax_qla_load_columns<key_dim, reverse>(m, row, steps / 2 + k * 2);
      jax_qla_load_columns<key_dim, reverse>(m, row, steps / 2 + k * 2 + 1);
    }
  }
}
template <int columns>
__device__ __forceinline__ void jax_qla_end(float* state, const float* sums, const float* response) {
  using P = Product<columns>;
#pragma unroll
  for (int i = 0; i < P::kSize; ++i) {
    float sum = sums[i] + response[i];
    if constexpr (P::kSums > 1) sum += P::kSums == 3 ? sums[P::kSize + i] + sums[2 * P::kSize + i] : sums[P::kSize + i];
    state[i] = sum;
  }
}
// entering of the pieces behind the first becomes the response of the piece before, of all `count` but the last; pieces are `pace` elements apart.
template <int columns, int pitch>
__device__ __forceinline__ void jax_qla_copy_responses(float* entering, const float* response, long long corner, long long pace, int count) {
  constexpr int together = columns == 64 ? 1 : 128 / columns;  // as many as registers bear
  for (int step = 0; step < count - 1; step += together) {
    float c[together][columns / 2];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (step + i < count - 1) jax_qla_fetch<columns, pitch>(c[i], response, corner + (step + i) * pace);
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (step + i < count - 1) jax_qla_leave<columns, pitch>(entering, c[i], corner + (step + i + 1) * pace);
    }
  }
}

// Of the flags of a piece which head comes at `index` in an order that has those first whose flag is 0, ...
__device__ __forceinline__ int jax_qla_zero_first(const int* flags, int heads, int index) {
  return jax_qla_those_first(heads, index, [&](int head) { return flags[head] == 0; });
}
// ... and whether none of `count` flags, `pitch` apart, is 0. To be called by whole warps.
__device__ __forceinline__ int jax_qla_none_is_zero(const int* flags, int pitch, int count) {
  bool zero = false;
  for (int i = threadIdx.x & 31; i < count; i += 32) zero |= flags[static_cast<long long>(i) * pitch] == 0;
  return !__any_sync(0xffffffffu, zero);
}
__device__ __forceinline__ int jax_qla_flag(const int* x, int at) { return x[at]; }
__device__ __forceinline__ int jax_qla_any(int x) { return __any_sync(0xffffffffu, x); }
"""
)


def program(config: Config):
    """The TileLang program. Numbers of heads, pieces and sequences are run-time values."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    K, V, tile, reverse = config.key_dim, config.value_dim, config.columns, config.reverse
    tiles = V // tile
    warps = K // 16
    stages = 3 if tile < 64 or K == 64 else 2  # 64 KiB each where K = 128
    size = tile // 2  # elements of a lane
    # PRELUDE: Product
    sums_size = size * {16: 3, 32: 2, 64: 1}[tile]
    rights = {16: 24, 32: 32, 64: 16}[tile]
    truth = "true" if reverse else "false"
    value_heads, parts, sequences = T.dynamic("value_heads, parts, sequences")
    initial_states = T.dynamic("initial_states")  # sequences, or 0: not given

    @T.macro
    def fetch(target, source, at):
        T.call_extern("handle", f"jax_qla_fetch<{tile}, {V}>", target.data, T.address_of(source[0, 0, 0, 0]), at)

    @T.macro
    def leave(target, source, at):
        T.call_extern("handle", f"jax_qla_leave<{tile}, {V}>", T.address_of(target[0, 0, 0, 0]), source.data, at)

    @T.macro
    def load_map(m, row, stage):
        T.call_extern(
            "handle", f"jax_qla_load_map<{K}, {truth}>", m.data, row + T.cast(stage, "uint32") * T.uint32(4 * K * K)
        )

    @T.macro
    def multiply(second, sums, m, right, unit, row, stage):
        T.call_extern(
            "handle",
            f"jax_qla_multiply<{K}, {tile}, {truth}, {second}>",
            sums.data,
            m.data,
            right.data,
            unit,
            row + T.cast(stage, "uint32") * T.uint32(4 * K * K),
        )

    @T.prim_func
    def compose(
        transition: T.Tensor((parts, value_heads, 2, K, K), "bfloat16"),
        response: T.Tensor((parts, value_heads, K, V), "float32"),
        forgotten: T.Tensor((parts, value_heads), "int32"),
        initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        spans: T.Tensor((sequences, 2), "int32"),
        entering: T.Tensor((parts, value_heads, K, V), "float32"),
    ):
        with T.Kernel(sequences * tiles, value_heads, threads=warps * 32 + 32, prelude=PRELUDE) as (block, number):
            T.annotate_min_blocks_per_sm(1)
            if not reverse:
                T.pdl_sync()
            # After the wait: what follows begins with what the kernels before this one wrote (kernels/forward.py: STATE).
            T.pdl_trigger()
            n = T.alloc_var("int32")
            first = T.alloc_var("int32")  # piece that is entered first
            count = T.alloc_var("int32")
            n = block // tiles
            first = spans[n, 0]
            count = spans[n, 1]
            part = (block % tiles) * tile
            tx = T.get_thread_binding()
            head = T.alloc_var("int32")
            none = T.alloc_var("int32")  # 1 if no piece takes a product
            head = number
            none = 0
            if reverse:
                # By a piece in the midst of the first sequence; its last one takes no product.
                head = T.call_extern(
                    "int32",
                    "jax_qla_zero_first",
                    T.address_of(forgotten[spans[0, 0] + spans[0, 1] // 2, 0]),
                    value_heads,
                    number,
                )
                none = T.call_extern(
                    "int32", "jax_qla_none_is_zero", T.address_of(forgotten[first, head]), value_heads, count
                )

            m_s = T.alloc_shared((stages, 2, K // 64, K, 64), "bfloat16")  # M transposed, high and low
            s_s = T.alloc_shared((2, 2, K, tile), "bfloat16")  # the state, high and low, of a step and of the one after
            T.annotate_layout({m_s: make_full_bank_swizzled_layout(m_s)})
            loaded = T.alloc_barrier([32] * stages)
            free = T.alloc_barrier([warps * 32] * stages)

            if tx >= warps * 32:
                if none == 0:
                    for step in T.serial(count - 1):
                        if step >= stages:
                            T.barrier_wait(free[step % stages], (step // stages + 1) % 2)
                        if forgotten[first + (count - 1 - step if reverse else step), head] == 0:
                            for half in T.unroll(2):
                                for x in T.unroll(K // 64):
                                    T.tma_copy(
                                        transition[
                                            first + (count - 1 - step if reverse else step),
                                            head,
                                            half,
                                            0:K,
                                            x * 64 : x * 64 + 64,
                                        ],
                                        m_s[step % stages, half, x, :, :],
                                        barrier=loaded[step % stages],
                                        leader_scope_threads=32,
                                    )
                        T.barrier_arrive(loaded[step % stages])
            else:
                state = T.alloc_local((size,), "float32")
                answer = T.alloc_local((size,), "float32")
                sums = T.alloc_local((sums_size,), "float32")
                m = T.alloc_local((K // 2,), "uint32")
                right = T.alloc_local((rights,), "uint32")
                corner = T.alloc_var("int32")
                piece = T.alloc_var("int64")  # of this lane's elements
                pace = T.alloc_var("int64")
                flag = T.alloc_var("int32")  # number of the piece's `forgotten`
                alone = T.alloc_var("int32")
                product = T.alloc_var("int32")
                row = T.alloc_var("uint32")  # of the first stage's M
                written = T.alloc_var("uint32")  # where this warp puts its part of the state
                unit = T.alloc_var("uint32")  # and where it begins to read
                at = T.alloc_var("uint32")  # of the two places for a state
                stage = T.alloc_var("int32")
                phase = T.alloc_var("int32")
                corner = T.call_extern("int32", "jax_qla_corner", V) + part
                row = T.call_extern("uint32", f"jax_qla_map_row<{K}, {truth}>", T.access_ptr(m_s[0, 0, 0, 0, 0], "r"))
                unit = T.call_extern("uint32", f"jax_qla_unit<{tile}>", T.access_ptr(s_s[0, 0, 0, 0], "r"))
                written = T.call_extern("uint32", "jax_qla_keep", unit + T.cast(tx // 32 * (tile * 32), "uint32"))
                flag = (first + (count - 1 if reverse else 0)) * value_heads + head
                piece = T.cast(flag, "int64") * (K * V) + corner
                pace = T.cast(value_heads, "int64") * (-K * V if reverse else K * V)
                at = T.uint32(0)
                stage = 0
                phase = 0
                if count > 1:
                    alone = T.call_extern("int32", "jax_qla_flag", T.address_of(forgotten[0, 0]), flag)
                if initial_states > 0:
                    fetch(state, initial_state, T.cast(n * value_heads + head, "int64") * (K * V) + corner)
                else:
                    for i in T.unroll(size):
                        state[i] = 0
                if none != 0:
                    if count > 0:
                        T.call_extern(
                            "handle",
                            f"jax_qla_copy_responses<{tile}, {V}>",
                            T.address_of(entering[0, 0, 0, 0]),
                            T.address_of(response[0, 0, 0, 0]),
                            piece,
                            pace,
                            count,
                        )
                        leave(entering, state, piece)
                else:
                    if count > 1:
                        T.barrier_wait(loaded[0], 0)
                        load_map(m, row, 0)
                    for step in T.serial(count - 1):
                        product = T.call_extern("int32", "jax_qla_any", alone == 0)
                        if product != 0:
                            T.call_extern("handle", f"jax_qla_share<{K}, {tile}>", written + at, state.data)
                            if tile < 64:
                                fetch(answer, response, piece)
                            T.sync_threads(1, warps * 32)
                            multiply("false", sums, m, right, unit + at, row, stage)
                        leave(entering, state, piece)
                        if tile == 64:  # where the state was, for want of registers
                            fetch(answer, response, piece)
                        else:
                            if product == 0:
                                fetch(answer, response, piece)
                        piece += pace
                        T.barrier_arrive(free[stage])
                        if step < count - 2:
                            stage = T.if_then_else(stage == stages - 1, 0, stage + 1)
                            phase = T.if_then_else(stage == 0, 1 - phase, phase)
                            flag += -value_heads if reverse else value_heads
                            alone = T.call_extern("int32", "jax_qla_flag", T.address_of(forgotten[0, 0]), flag)
                            T.barrier_wait(loaded[stage], phase)
                        if product != 0:
                            # After the last piece M is an earlier one, which nothing uses.
                            multiply("true", sums, m, right, unit + at, row, stage)
                            T.call_extern("handle", f"jax_qla_end<{tile}>", state.data, sums.data, answer.data)
                            at = T.uint32(4 * K * tile) - at
                        else:
                            for i in T.unroll(size):
                                state[i] = answer[i]
                            load_map(m, row, stage)
                    leave(entering, state, piece)
            if reverse:
                T.pdl_sync()  # ends after the forward one, for what follows waits for this kernel alone

    return compose


def specification(
    transition: jax.Array,
    response: jax.Array,
    forgotten: jax.Array,
    initial_state: jax.Array,
    spans: jax.Array,
    *,
    reverse: bool = False,
) -> jax.Array:
    """entering [P, Hv, K, V]; that of a piece which no sequence has is not a number here."""
    parts = response.shape[0]
    first, counts = spans[:, 0], spans[:, 1]
    maps = jnp.swapaxes(jnp.sum(transition.astype(response.dtype), axis=2), -1, -2)
    if reverse:
        maps = jnp.swapaxes(maps, -1, -2)
    begin = jnp.zeros((spans.shape[0], *response.shape[1:]), response.dtype)
    if initial_state.shape[0]:
        begin = initial_state

    def step(carry, i):
        state, entering = carry
        inside = i < counts
        piece = first + (counts - 1 - i if reverse else i)
        entering = entering.at[jnp.where(inside, piece, parts)].set(state, mode="drop")
        alone = (forgotten[piece] != 0)[..., None, None]
        product = jnp.einsum("nhij,nhjv->nhiv", jnp.where(alone, 0, maps[piece]), state)
        return (jnp.where((i < counts - 1)[:, None, None, None], response[piece] + product, state), entering), None

    entering = jnp.full_like(response, jnp.nan)
    (_, entering), _ = jax.lax.scan(step, (begin, entering), jnp.arange(parts))
    return entering
