"""The states between the pieces of a sequence, from what each piece does to the state before it (kernels/summaries.py).

    forward    entering[p + 1] = response[p] + M[p] entering[p],   entering[first] = initial_state
    reverse    entering[p - 1] = response[p] + M[p]^T entering[p], entering[last]  = d_final_state

A piece is entered from the side that the recurrence comes from: reversed, entering[p] is the gradient of the state after piece p.
Pieces that are `forgotten` take no product: those that decay, and a sequence's first (reversed, its last), whose response has been
computed from its own state.

Rows of the arrays are cuts (jax_qla/segments.py: cut_table): what is found of a piece lies at the cut behind it, but a reversed response at the cut
before it, and a state at the cut that it crosses. So there is no row for the state that a sequence begins with: who takes it finds it where it is
given, or, where that memory is of what leaves sequences too (final states; reversed, gradients of initial ones), in a row for every chain from `firsts` on. And a state's row is that of the response it is made
of: `response` is in the memory of `entering`, its first rows. A thread has read what it overwrites. With `of_pieces`, of a shard's pieces
(shard_pieces), rows are pieces, and have first states too; `response` is elsewhere.

Reversed, blocks begin where those of kernels/states.py leave room (jax_qla/overlap.py), some at once and most at the end: those with products
first, and where no piece takes one, responses are the states; of pieces they are copied, several at a time. Forwards, all are waited for at once by
whoever comes next, and what finds this out takes longer than it gains.

Plan, one block per (one of `together` sequences that are cut, value head, tile of `columns` value columns), K / 16 + 1 warps, two or three stages
of M. It takes every `together`-th of these sequences, one after the other: there may be places for many more than are cut, and a block of so much
shared memory takes a microsecond of its multiprocessor to find nothing in one.

    last warp      loads M, in two bf16 parts, with TMA
    other warps    16 rows each of the state [K, columns], in float32, in accumulators of mma.sync. A product with M is three of bf16
                   parts (high low, high high, low high: 16 bits of mantissa). M is the left operand: a warp reads its own rows, once, in
                   blocks that lie as ldmatrix takes them (kernels/specification.py: map_blocks). The state is the right one: every warp
                   needs all of it, so it goes through a tile in shared memory, high and low. Responses and states come from and go to
                   global memory in registers

    barrier         arrives  waits   says
    loaded[stage]   last     others  M of a piece is there, and whether it takes a product
    free[stage]     others   last    the stage may be overwritten
    1               others   others  the state is in its tile. There are two tiles in turn: one barrier a step is enough

The chain of pieces is serial, and most calls have few heads times sequences: so few columns a block (policy.composed), which
fill more of the card and shorten the step: it splits the state, stores it, meets, then computes products, and meanwhile everything else.

Cycles of a step at K = 128, by count. M, 64 KiB: 690 to 880 from the second-level cache by one copy (measured), 512 of shared memory to be
written there, 512 to be read. The state's tile, read by every warp: 512, 1024 and 2048 for 16, 32 and 64 columns. Products: 96, 192 and 384
mma.sync a scheduler, 670, 1340 and 2690. To split, store and meet: 150. Measured with 16 columns: 2040, 1.08 us.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels import common, uncut
from jax_qla.kernels.common import cut_behind, map_blocks_shape
from jax_qla.kernels.macros import call, unfenced
from jax_qla.kernels.preludes import MATRIX_PRELUDE, NTH_PRELUDE
from jax_qla.kernels.specification import of_map_blocks

__all__ = ["COLUMNS", "PASS_CONFIGS", "Config", "program", "specification"]

# Of the state's tile TileLang sees that its address is taken, before the loop, and would give its memory away there.
PASS_CONFIGS = common.PASS_CONFIGS | {"tl.disable_shared_memory_reuse": True}

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
    + uncut.UNCUT_PRELUDE
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

// A warp's rows of a map, or with `reverse` of the transposed map, as left operands. `map`: the transposed map's blocks in shared memory,
// [key_dim / 16][key_dim / 16][high, low] of 512 bytes. Where this lane's 16 bytes of the first block lie: the block's four matrices [8, 8] are a left
// operand as they lie there, and once the two off the diagonal have changed places, transposed.
template <int key_dim, bool reverse>
__device__ __forceinline__ unsigned jax_qla_map_corner(const void* map) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, matrix = lane >> 3;
  const int place = !reverse && (matrix == 1 || matrix == 2) ? lane ^ 24 : lane;
  return jax_qla_keep(jax_qla_address(map) + (reverse ? warp * (key_dim / 16) : warp) * 1024 + place * 16);
}
// Of columns 16 k to 16 k + 15 the high parts, then the low ones.
template <int key_dim, bool reverse>
__device__ __forceinline__ void jax_qla_load_left(unsigned* left, unsigned from, int k) {
  const unsigned at = from + k * (reverse ? 1 : key_dim / 16) * 1024;
  jax_qla_load_matrices<!reverse>(left, at);
  jax_qla_load_matrices<!reverse>(left + 4, at + 512);
}

// state = response + map state. Meanwhile response becomes that of the next piece. An mma waits for the one before it in the same sum: with few
// columns the products have sums of their own. Operands are loaded some products ahead, left ones from `map`, right ones, in groups of columns,
// those of 16 rows, from `shared`.
template <int key_dim, int columns, int pitch, bool reverse>
__device__ __forceinline__ void jax_qla_multiply(float* state, float* response, unsigned map, unsigned shared, const float* responses, long long next) {
  constexpr int kSize = columns / 2;  // elements of a lane
  constexpr int kSums = columns == 16 ? 3 : columns == 32 ? 2 : 1;
  constexpr int kWidth = columns == 32 ? 32 : 16, kGroups = columns / kWidth, kRights = kWidth / 2;
  constexpr int kAhead = columns == 16 ? 2 : 1, kRing = kAhead + 1, kSteps = key_dim / 16;
  float sums[kSums * kSize];
  unsigned left[kRing * 8], right[kRing * kRights];
  const auto load = [&](int group) {
    if (group < kSteps * kGroups) {
      jax_qla_load_shared<key_dim, columns, kWidth>(right + group % kRing * kRights, shared, group / kGroups, group % kGroups * (kWidth / 16));
    }
  };
  const auto load_left = [&](int k) {
    if (k < kSteps) jax_qla_load_left<key_dim, reverse>(left + k % kRing * 8, map, k);
  };
#pragma unroll
  for (int i = 0; i < kSums * kSize; ++i) sums[i] = i < kSize ? response[i] : 0.f;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    load_left(i);
    load(i);
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    load_left(k + kAhead);
#pragma unroll
    for (int group = k * kGroups; group < (k + 1) * kGroups; ++group) {
      load(group + kAhead);
#pragma unroll
      for (int product = 0; product < 3; ++product) {  // high low, high high, low high: the first and the last share a sum
        float* c = sums + (kSums == 3 ? product : kSums == 2 ? product % 2 : 0) * kSize + group % kGroups * kRights;
        const unsigned* a = left + k % kRing * 8 + (product == 2 ? 4 : 0);
        const unsigned* b = right + group % kRing * kRights + (product == 0 ? kRights / 2 : 0);
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n) jax_qla_mma<true>(c + n * 4, a, b[n * 2], b[n * 2 + 1]);
      }
    }
    if (k == 0) jax_qla_fetch<columns, pitch>(response, responses, next);
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    state[i] = sums[i];
    if constexpr (kSums > 1) state[i] += kSums == 3 ? sums[kSize + i] + sums[2 * kSize + i] : sums[kSize + i];
  }
}
// The states at `to` become the responses at `from`, `count` of them, `pace` elements apart.
template <int columns, int pitch>
__device__ __forceinline__ void jax_qla_copy_responses(float* entering, const float* response, long long from, long long to, long long pace, int count) {
  constexpr int together = columns == 64 ? 1 : 128 / columns;  // as many as registers bear
  for (int step = 0; step < count; step += together) {
    float c[together][columns / 2];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (step + i < count) jax_qla_fetch<columns, pitch>(c[i], response, from + (step + i) * pace);
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (step + i < count) jax_qla_leave<columns, pitch>(entering, c[i], to + (step + i) * pace);
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
"""
)


def program(config: Config):
    """The TileLang program. Numbers of heads, pieces and sequences are run-time values."""
    import tilelang.language as T

    K, V, tile, reverse = config.key_dim, config.value_dim, config.columns, config.reverse
    tiles = V // tile
    warps = K // 16
    stages = 3 if tile < 64 or K == 64 else 2  # 64 KiB each where K = 128
    size = tile // 2  # elements of a lane
    truth = "true" if reverse else "false"
    leave_if_uncut = uncut.macro()
    value_heads, rows, entering_rows = T.dynamic("value_heads, rows, entering_rows")
    chain_places, sequences = T.dynamic("chain_places, sequences")
    initial_states = T.dynamic("initial_states")  # sequences, or 0: not given

    @T.macro
    def fetch(target, source, at):
        call(f"jax_qla_fetch<{tile}, {V}>", target.data, T.address_of(source[0, 0, 0, 0]), at)

    @T.macro
    def leave(target, source, at):
        call(f"jax_qla_leave<{tile}, {V}>", T.address_of(target[0, 0, 0, 0]), source.data, at)

    @T.macro
    def wait(waited: T.Ref):
        """Once, and not reversed."""
        if not reverse:
            if waited == 0:
                T.pdl_sync()  # `summaries` has ended, before which the tables and initial states were there
                T.pdl_trigger()  # only now: what follows begins with what the kernels before this one wrote (kernels/forward.py: STATE)
            waited = 1

    @T.macro
    def go_on(stage: T.Ref, phase: T.Ref):
        """To the next stage."""
        stage = T.if_then_else(stage == stages - 1, 0, stage + 1)
        phase = T.if_then_else(stage == 0, 1 - phase, phase)

    @T.prim_func
    def compose(
        transition: T.Tensor((rows, value_heads, *map_blocks_shape(K)), "bfloat16"),
        response: T.Tensor((rows, value_heads, K, V), "float32"),
        forgotten: T.Tensor((rows, value_heads), "int32"),
        initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        chains: T.Tensor((chain_places, 3), "int32"),  # jax_qla/segments.py: chain_table
        bounds: T.Tensor((sequences, 2), "int32"),
        entering: T.Tensor((entering_rows, value_heads, K, V), "float32"),
        cut_beyond: T.int32,  # rows, or -1 (kernels/uncut.py); not reversed
        of_pieces: T.int32,  # 1: rows of the arrays are pieces, 0: cuts
        firsts: T.int32,  # or -1: no such rows
        together: T.int32,  # sequences that are cut, of so many blocks
    ):
        with T.Kernel(together * tiles, value_heads, threads=warps * 32 + 32, prelude=PRELUDE) as (block, number):
            T.annotate_min_blocks_per_sm(1)
            if reverse:
                T.pdl_trigger()  # what follows waits by itself
            else:
                leave_if_uncut(bounds, sequences, cut_beyond, block + number == 0)
            part = (block % tiles) * tile
            tx = T.get_thread_binding()
            chain = T.alloc_var("int32")
            n = T.alloc_var("int32")
            first = T.alloc_var("int32")  # row of the sequence's first piece
            count = T.alloc_var("int32")  # of its pieces
            head = T.alloc_var("int32")
            none = T.alloc_var("int32")  # 1 if no piece takes a product
            waited = T.alloc_var("int32")  # whether this thread has
            waited = 0

            m_s = T.alloc_shared((stages, *map_blocks_shape(K)), "bfloat16")
            s_s = T.alloc_shared((2, 2, K, tile), "bfloat16")  # the state, high and low, of a step and of the one after
            flag_s = T.alloc_shared((stages,), "int32")  # `forgotten` of a step's piece
            loaded = T.alloc_barrier([32] * stages)
            free = T.alloc_barrier([warps * 32] * stages)

            flag = T.alloc_var("int32")
            begun = T.alloc_var("int32")  # steps of this chain and those before
            begun = 0
            state = T.alloc_local((size,), "float32")
            answer = T.alloc_local((size,), "float32")
            corner = T.alloc_var("int32")
            map_corner = T.alloc_var("uint32")
            at_response = T.alloc_var("int64")  # of this lane's elements, and so
            at_state = T.alloc_var("int64")
            apart = T.alloc_var("int64")  # what a response makes of a state lies so far behind it
            pace = T.alloc_var("int64")
            left = T.alloc_var("int32")  # whether the state is
            row = T.alloc_var("int32")
            written = T.alloc_var("uint32")  # where this warp puts its part of the state
            unit = T.alloc_var("uint32")  # and where it begins to read
            at = T.alloc_var("uint32")  # of the two places for a state
            stage = T.alloc_var("int32")
            phase = T.alloc_var("int32")
            at = T.uint32(0)
            stage = 0
            phase = 0
            pace = T.cast(value_heads, "int64") * (-K * V if reverse else K * V)
            apart = T.Select(of_pieces != 0, pace, T.int64(0))
            if tx < warps * 32:
                corner = T.call_extern("int32", "jax_qla_corner", V) + part
                map_corner = T.call_extern("uint32", f"jax_qla_map_corner<{K}, {truth}>", unfenced(m_s[0, 0, 0]))
                unit = T.call_extern("uint32", f"jax_qla_unit<{tile}>", unfenced(s_s[0, 0, 0, 0]))
                written = T.call_extern("uint32", "jax_qla_keep", unit + T.cast(tx // 32 * (tile * 32), "uint32"))

            for turn in T.serial((chain_places - block // tiles + together - 1) // together):
                chain = block // tiles + turn * together
                count = chains[chain, 1]
                if count > 0:
                    n = chains[chain, 2]
                    first = cut_behind(chains[chain, 0], T.Select(of_pieces != 0, 0, n))
                    head = number
                    none = 0
                    if reverse:
                        # By a piece in the midst of the sequence; its last one takes no product.
                        head = T.call_extern(
                            "int32",
                            "jax_qla_zero_first",
                            T.address_of(forgotten[first + (count - 1 + of_pieces) // 2, 0]),
                            *(value_heads, number),
                        )
                        none = T.call_extern(
                            "int32",
                            "jax_qla_none_is_zero",
                            T.address_of(forgotten[first, head]),
                            *(value_heads, count - 1 + of_pieces),
                        )
                    if tx >= warps * 32:
                        wait(waited)
                        if none == 0:
                            for step in T.serial(count - 1):
                                if begun >= stages:
                                    T.barrier_wait(free[stage], 1 - phase)
                                if reverse:
                                    flag = 1
                                    if step > 0 or of_pieces != 0:  # behind the last piece there is no cut
                                        flag = forgotten[first + (count - 1 - step), head]
                                else:
                                    flag = forgotten[first + step, head]
                                if flag == 0:
                                    T.tma_copy(
                                        transition[first + (count - 1 - step if reverse else step), head, :, :],
                                        m_s[stage, :, :],
                                        barrier=loaded[stage],
                                        leader_scope_threads=32,
                                    )
                                if tx % 32 == 0:
                                    flag_s[stage] = flag
                                T.barrier_arrive(loaded[stage])
                                begun += 1
                                go_on(stage, phase)
                    else:
                        row = first + (count - 2 + of_pieces if reverse else 0)  # of the first response
                        at_response = T.cast(row * value_heads + head, "int64") * (K * V) + corner
                        at_state = at_response  # of the first one, if it is wanted
                        if firsts >= 0:
                            at_state = T.cast((firsts + chain) * value_heads + head, "int64") * (K * V) + corner
                        left = T.Select(of_pieces != 0 or firsts >= 0, 1, 0)
                        if initial_states > 0:
                            fetch(state, initial_state, T.cast(n * value_heads + head, "int64") * (K * V) + corner)
                        else:
                            for i in T.unroll(size):
                                state[i] = 0
                        wait(waited)
                        if none != 0:
                            if of_pieces != 0:
                                call(
                                    f"jax_qla_copy_responses<{tile}, {V}>",
                                    T.address_of(entering[0, 0, 0, 0]),
                                    T.address_of(response[0, 0, 0, 0]),
                                    *(at_response, at_response + pace, pace, count - 1),
                                )
                            if left != 0:
                                leave(entering, state, at_state)
                        else:
                            if count > 1:
                                fetch(answer, response, at_response)
                            call(f"jax_qla_share<{K}, {tile}>", written + at, state.data)
                            for step in T.serial(count - 1):
                                T.sync_threads(1, warps * 32)
                                if left != 0:
                                    leave(entering, state, at_state)
                                left = 1
                                at_state = at_response + apart
                                if step + 2 < count:  # else there is no other response
                                    at_response += pace
                                T.barrier_wait(loaded[stage], phase)
                                if T.call_extern("int32", "jax_qla_any", flag_s[stage] == 0) != 0:
                                    call(
                                        f"jax_qla_multiply<{K}, {tile}, {V}, {truth}>",
                                        state.data,
                                        answer.data,
                                        map_corner + T.cast(stage, "uint32") * T.uint32(4 * K * K),
                                        unit + at,
                                        T.address_of(response[0, 0, 0, 0]),
                                        at_response,
                                    )
                                else:
                                    for i in T.unroll(size):
                                        state[i] = answer[i]
                                    fetch(answer, response, at_response)
                                T.barrier_arrive(free[stage])
                                at = T.uint32(4 * K * tile) - at
                                call(f"jax_qla_share<{K}, {tile}>", written + at, state.data)
                                go_on(stage, phase)
                            if left != 0:
                                leave(entering, state, at_state)
            if reverse:
                T.pdl_sync()  # ends after the forward one, for what follows waits for this kernel alone
            else:
                if waited == 0 and block + number == 0:
                    T.pdl_sync()  # nothing is cut; one block of all is enough

    return compose


def specification(
    transition: jax.Array,
    response: jax.Array,
    forgotten: jax.Array,
    initial_state: jax.Array,
    chains: jax.Array,
    *,
    reverse: bool = False,
    of_pieces: int = 0,
    firsts: int = -1,
) -> jax.Array:
    """entering [rows, Hv, K, V], of cuts or, with `of_pieces`, of pieces, and with `firsts` of chains; what no chain has is not a number here."""
    rows = response.shape[0]
    counts, sequence = chains[:, 1], chains[:, 2]
    first = cut_behind(chains[:, 0], 0 if of_pieces else sequence)
    maps = of_map_blocks(transition, response.shape[2], response.dtype)
    if reverse:
        maps = jnp.swapaxes(maps, -1, -2)
    begin = jnp.zeros((chains.shape[0], *response.shape[1:]), response.dtype)
    if initial_state.shape[0]:
        begin = initial_state[sequence]

    def step(carry, i):
        state, entering = carry
        # Of the piece that is gone through; of cuts that behind it.
        here = first + (counts - 1 - i if reverse else i)
        at_response = here - (reverse and not of_pieces)
        at_state = here - (not reverse and not of_pieces)
        inside = (i < counts) & ((i > 0) | bool(of_pieces))
        entering = entering.at[jnp.where(inside, at_state, rows)].set(state, mode="drop")
        alone = ((forgotten[here] != 0) | (reverse and not of_pieces and i == 0))[..., None, None]
        product = jnp.einsum("nhij,nhjv->nhiv", jnp.where(alone, 0, maps[here]), state)
        after = response[at_response] + product
        return (jnp.where((i < counts - 1)[:, None, None, None], after, state), entering), None

    entering = jnp.full_like(response, jnp.nan)
    (_, entering), _ = jax.lax.scan(step, (begin, entering), jnp.arange(rows + 1))
    if firsts >= 0:
        entering = jnp.concatenate([entering, jnp.where((counts > 0)[:, None, None, None], begin, jnp.nan)])
    return entering
