"""The forward pass along a sequence: the chunk recurrence of the state, and the outputs.

Per chunk, value head and sequence, with S the state before the chunk (a and gamma are kernels/prepare.py's, C is the chunk's last row, G_ij = exp(gamma_i - gamma_j) for i >= j):

    X  = diag(beta) (V - diag(exp(gamma)) K S)              [64, V]
    Vd = a X                                                [64, V]
    O  = scale (diag(exp(gamma)) Q S + (Q K^T o G) Vd)      [64, V]
    S' = exp(gamma_C) S + K^T diag(exp(gamma_C - gamma)) Vd [K, V]

Everything is computed transposed, value columns in the rows of the accumulators: S^T, X^T and Vd^T then are, in registers,
the A operands of the next wgmma, and neither the state nor an intermediate goes through shared memory.

Plan, one block per (sequence, value head, tile of `value_tile` value columns), long sequences first, three stages of chunk tiles (two with
`split` where h is kept and K is 128):

    warpgroup      registers  work
    0 (and 1)      208        "state": 64 value columns each: S^T in float32, the five products above that contain S or Vd. 240 where there is one
    then           72         "P": P = scale Q K^T o G into shared memory, ahead of the state; lengths of queries, with `measures`
    then           24         "loads": warp 0 loads Q, K, V, a with TMA, 1 and 2 fetch the gates, a row a lane
    last           40         beside one warpgroup of state, unless h is kept: warp 0 sends O (macros().send_results), and Vd where that is kept

    barrier         arrives   waits          says
    loaded[stage]   TMA       P              the tiles are there
    gated[stage]    loads, P  P, then state  tiles and gates are there, rows beyond the sequence are zero in K, V and a
    ready[stage]    P         state          P is there, which only the last of the five products needs, and in blocks of 128 columns what it has measured
    measured_last   P         state          in blocks of 64 columns those of the last chunk; those of others are there when P is at `gated` for the next
    free[stage]     state     loads, P       the products of the chunk are done: the stage may be overwritten, and so may its P, for which only blocks of 128
                                             columns that keep Vd wait, which have less tiles of P than stages
    taken           state     loads          the initial state has left the second and third stage of K and Q, by way of which a block of 128 columns
                                             takes it
    o_full[turn]    state     last           O is in its tile, of two in turn; so `vd_full` of Vd
    o_free[turn]    last      state          and has left, Vd too

The state need not wait for `loaded` itself: P's warpgroup has waited for it before it arrives at `gated`, and what is there for who arrives (which
releases) is there for who waits (which acquires).

What stands in the way of the recurrence is latency, so nothing waits that need not: the state goes on to the next chunk before its P is
there, the loads have a warp to themselves (when the warpgroup of P issued them, the state waited for P a third of its time) and the gates
two (P's warpgroup has no time to wait for them), O leaves through a tile of its own and not through V's, and while it does the next chunk's K S runs, whose state is the one just computed. Lengths of
keys and queries come with the gates, from `prepare`.

With `measures` those of queries do not, and `prepare` need not read Q for them, which is memory, what it is bound by: P's warpgroup reads Q's tile by
ldmatrix while its product Q K^T runs, and adds up squares, four in bf16 before they become float32, which halves the instructions. In blocks of 128
columns P is divided by what it finds, and so is Q S, beside the state's update and not before, when P has been awaited. In blocks of 64 P is not so far
ahead: there (`late`) P goes first, and what is divided is O, as it leaves. That is 32 multiplications a step more in what a step waits for, so it pays only
where each value head has a key head of its own, and queries are as much memory as values (policy.measured_by_forward).

The initial state of 128 columns comes by two bulk copies. Its elements, a load each, are requests of 32 bytes, which kept blocks waiting where
all begin at once. Blocks of 64 columns load elements: where V is 128 they are few (policy.value_tile), and loads as fast.

Where the sequences are pieces of longer ones, only the state after a sequence's last piece is a final state, and pieces begin with what kernels/compose.py
has found, but for those that are whole sequences: these take the initial state, as without pieces. Where all are, blocks look into the table of sequences
instead, and begin as without pieces, too (kernels/uncut.py).

Whole heads are neighbours on the card by two, which load the same Q and K as a rule (policy.neighbours).
A block begins while the kernel before it still runs elsewhere (STATE, PREPARED, NOTHING). Where the last round of blocks would leave most of the card idle,
a second launch computes its heads, in halves of their value columns (policy.whole_heads).

Where few sequences of a packed batch are long, or few of its places for sequences taken, the longest are what is waited for. With `halve_long` each of
these has two blocks a head, which compute 64 of their 128 columns (policy.halves): in either one warpgroup of state works, and the other arrives at `free`
as if it did. So have, where sequences are alike, those of a last round that would else leave most of the card idle. What takes longest comes first, as
without; which sequences are halved is found by every block for itself (HALVES_PRELUDE), by votes, so that
ptxas knows that a warp's threads agree: else it has addresses and the number of the chunk in each of them, 27 instructions of 650 a step, 3 to 4 % of a
full card's time.

With `split` X, Vd and `a` are sums of two numbers: Vd takes three products instead of one, and O and the state two each of Vd. So is the state
where X is computed from it, not where O is. A stage has a tile more, for the low part of `a`, and a block 64 value columns.

`keep` says what else the backward pass is to find: nothing; or Vd, as kernels/states.py has it, from which kernels/states_from_vd.py computes the
states before each chunk, h; or Vd and h. These leave from the registers that products read them from, by way of a tile of 64 columns each a warpgroup
(beside one warpgroup of state, of two tiles in turn), Vd, where h is kept too, by that of O, in turn with it. h leaves in halves of K, the first when the state has been rounded, the second while Vd is
computed. In blocks of 128 columns either leaves room for two tiles of P, not three. At 16, 32, 4x8192 a block that keeps h writes 64 KB a step and
reads 40: memory binds (450 of some 530 us), which it did not.

Operations a chunk and head at K = V = 128: 9.2 MFLOP, 1.5 us of an SM's share of 790 TFLOP/s; in blocks of 64 columns, which compute P twice, 10.2, and
with `split` 17.1.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jax_qla.kernels import states
from jax_qla.kernels.common import CHUNK, FIRST, LAST, LOG2_E, LONG, PASS_CONFIGS, ROUND, SHORT, cut_behind
from jax_qla.kernels.inverse import INVERSE_PRELUDE
from jax_qla.kernels.macros import (
    accumulator_layout,
    call,
    kept_first,
    leave_first,
    macros,
    over,
    place_of,
    rest_is_empty,
    unfenced,
)
from jax_qla.kernels.preludes import LENGTH_PRELUDE, NORM_PRELUDE, P_PRELUDE
from jax_qla.kernels.specification import (
    among_heads,
    decay,
    gather_chunks,
    gather_lengths,
    inverse_length,
    last_row,
    of_heads,
    scan_slots,
    scatter_chunks,
    states_given,
    unpack_inverses,
)
from jax_qla.kernels.uncut import UNCUT_PRELUDE

__all__ = ["NOTHING", "PASS_CONFIGS", "PREPARED", "STATE", "Config", "program", "specification"]


PRELUDE = (
    P_PRELUDE
    + INVERSE_PRELUDE
    + LENGTH_PRELUDE
    + UNCUT_PRELUDE
    + r"""
__device__ __forceinline__ const int* jax_qla_either(int condition, const int* one, const int* other) { return condition != 0 ? one : other; }
#include <tl_templates/cuda/barrier.h>  // fence_barrier_init
// A state [key_dim, 128] in float32, at `corner` of `initial` or, where `between`, of `entering`, by way of shared memory, the first half of its rows
// by way of `near`, the others of `far`. One thread begins ...
__shared__ unsigned long long jax_qla_state_barrier;
template <int key_dim>
__device__ __forceinline__ void jax_qla_begin_state(const float* initial, const float* entering, long long corner, bool between, const void* near,
                                                    const void* far) {
  const float* state = (between ? entering : initial) + corner;
  const unsigned barrier = jax_qla_address(&jax_qla_state_barrier);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  tl::fence_barrier_init();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(key_dim * 512) : "memory");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(jax_qla_address(half == 0 ? near : far)), "l"(state + half * key_dim * 64), "n"(key_dim * 256), "r"(barrier) : "memory");
  }
}
// ... and, when all may see its barrier, a warpgroup takes the 64 columns from `first` on, transposed, as a wgmma accumulator [64, key_dim]. All rows
// begin in one bank: so lanes that are neighbours take the upper and the lower of their two elements in turn, of 16 banks then, not of 8.
template <int key_dim>
__device__ __forceinline__ void jax_qla_take_state(void* registers, const void* near, const void* far, int first) {
  float* state = static_cast<float*>(registers);
  const int lane = threadIdx.x & 31, column = first + ((threadIdx.x >> 5) & 3) * 16 + lane / 4;
  const bool odd = lane & 1;
  unsigned there = 0;
  while (!there) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(there) : "r"(jax_qla_address(&jax_qla_state_barrier)) : "memory");
  }
#pragma unroll
  for (int n = 0; n < key_dim / 8; ++n) {
    const float* rows = static_cast<const float*>(n < key_dim / 16 ? near : far) + n % (key_dim / 16) * 1024 + lane % 4 * 256 + column;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float one = rows[e * 128 + odd * 8], other = rows[e * 128 + !odd * 8];
      state[4 * n + e] = odd ? other : one;
      state[4 * n + 2 + e] = odd ? one : other;
    }
  }
}
// A warpgroup's 64 columns of a state [key_dim, pitch], the first of which `state` points to, from that accumulator to memory. Neighbours exchange an
// element each, so that an instruction writes 64 bytes of two rows, and not 32 of four.
template <int key_dim>
__device__ __forceinline__ void jax_qla_store_state(const void* registers, float* state, int pitch) {
  const float* c = static_cast<const float*>(registers);
  const int lane = threadIdx.x & 31;
  const bool odd = lane & 1;
  float* to = state + ((threadIdx.x >> 5) & 3) * 16 + odd * 8 + lane / 4 + (lane & 2) * 2 * pitch;
#pragma unroll
  for (int n = 0; n < key_dim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float upper = c[4 * n + e], lower = c[4 * n + 2 + e];
      const float taken = __shfl_xor_sync(0xffffffffu, odd ? upper : lower, 1);
      to[(8 * n + e) * pitch] = odd ? taken : upper;
      to[(8 * n + 2 + e) * pitch] = odd ? lower : taken;
    }
  }
}
"""
)


MEASURE_PRELUDE = (
    NORM_PRELUDE
    + r"""
// Two sums of bf16, each with one more square.
__device__ __forceinline__ unsigned jax_qla_with_squares(unsigned sums, unsigned pair) {
  unsigned found;
  asm("fma.rn.bf16x2 %0, %1, %1, %2;" : "=r"(found) : "r"(pair), "r"(sums));
  return found;
}
// sum += the squares of pairs[0], pairs[2], pairs[4], pairs[6], of bf16. Four are added in bf16 before they become float32, by half the instructions:
// lengths then are off by 3e-4 (rms; normal numbers), where numbers are all alike by 3e-3 at the most.
__device__ __forceinline__ void jax_qla_add_squares(float& sum, const unsigned* pairs) {
  unsigned both = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) both = jax_qla_with_squares(both, pairs[2 * n]);
  sum += jax_qla_low_half(both) + jax_qla_high_half(both);
}
// lengths_i = 1 / |q_i| of the tile `queries` [64][columns], 0 beyond `rows` rows; if it `scales` factors_i times that; and where they are `wanted`
// in memory, `pitch` elements apart. A warp measures the 16 rows that it has of P, which it divides by them in jax_qla_store_decayed.
template <int columns, bool scales, typename T>
__device__ __forceinline__ void jax_qla_measure_queries(const T* queries, float* lengths, float* factors, int rows, bool wanted, float* memory,
                                                        int pitch) {
  const int lane = threadIdx.x & 31, first = ((threadIdx.x >> 5) & 3) * 16, row = first + (lane & 15);
  const unsigned address = jax_qla_address(queries) + row * 128;
  float upper = 0.f, lower = 0.f;  // of rows lane / 4 and 8 further on, this lane's columns
#pragma unroll
  for (int at = 0; at < columns / 16; at += 2) {
    unsigned pairs[8];  // of either row in turn
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      jax_qla_load_matrices<false>(pairs + 4 * n, address + at / 4 * 8192 + ((((at + n) % 4 * 2 + (lane >> 4)) ^ (row & 7)) << 4));
    }
    jax_qla_add_squares(upper, pairs);
    jax_qla_add_squares(lower, pairs + 1);
  }
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    upper += __shfl_xor_sync(0xffffffffu, upper, step);
    lower += __shfl_xor_sync(0xffffffffu, lower, step);
  }
  if (lane % 4 < 2) {
    const int i = first + lane % 4 * 8 + lane / 4;
    const float length = i < rows ? jax_qla_over_norm(lane % 4 == 0 ? upper : lower) : 0.f;
    lengths[i] = length;
    if constexpr (scales) factors[i] *= length;
    if (wanted && i < rows) memory[static_cast<long long>(i) * pitch] = length;
  }
  __syncwarp();
}
"""
)


HALVES_PRELUDE = (
    f"constexpr int kAtOnce = {ROUND};  // blocks"
    r"""
// What the block that is launched as the `index`-th computes where some of `count` sequences (first row and end of each), 32 at most, are computed
// in halves: sequence, which of `heads` heads, and half of its value columns, or -1 for both. False: nothing. Halved are long ones, of `least` chunks or
// more, that have more than `share` 64ths of all chunks, and more than 5/4 of the mean of those that have any, unless halves of all these run at once (2 some
// heads blocks; share says what 3 heads / 2 are of the multiprocessors, so share some is 48 at most). Where none is long and all are alike, so that blocks
// come in rounds, those of a last round are, if their halves run at once: what is longer than 9/8 of the mean is not alike. Those come first that take
// longest, a half by 11/16 of what both take. To be called by whole warps.
__device__ __forceinline__ int jax_qla_in_halves(int* item, const int* segments, int count, int heads, int share, int least, int index) {
  const int lane = threadIdx.x & 31;
  const int own = lane < count ? (segments[2 * lane + 1] - segments[2 * lane] + 63) / 64 : 0;
  int all = own;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
  const int some = __popc(__ballot_sync(0xffffffffu, own > 0));
  const bool is_long =
      own >= least && 64LL * own > static_cast<long long>(share) * all && (share * some <= 48 || 4LL * own * some > 5LL * all);
  // Votes: of what they find ptxas knows that it is the same for all of a warp.
  unsigned in_halves = __ballot_sync(0xffffffffu, is_long);
  const int key = is_long ? 11 * own : 16 * own;
  int before = 0;  // as many sequences come before this lane's
  for (int base = 0; base < count; base += 8) {
#pragma unroll
    for (int n = base; n < base + 8; ++n) {
      const int other = __shfl_sync(0xffffffffu, key, n);
      before += other > key || (other == key && n < lane);
    }
  }
  if (in_halves == 0 && !__any_sync(0xffffffffu, 8LL * own * some > 9LL * all)) {
    const int last = (some * heads % kAtOnce + heads - 1) / heads;  // sequences that have blocks in the last round
    if (some * heads > kAtOnce && 2 * last * heads <= kAtOnce) in_halves = __ballot_sync(0xffffffffu, own > 0 && before >= some - last);
  }
  int of_sequence = index, n = 0, blocks = 0;
  if (in_halves == 0) {
    const int place = index / heads;
    n = __ffs(__ballot_sync(0xffffffffu, lane < count && before == place)) - 1;
    of_sequence -= place * heads;
  } else {
    for (int place = 0; place < count; ++place) {
      n = __ffs(__ballot_sync(0xffffffffu, lane < count && before == place)) - 1;
      blocks = heads << (in_halves >> n & 1);
      if (of_sequence < blocks) break;
      of_sequence -= blocks;
      n = -1;
    }
  }
  const int halved = n < 0 ? 0 : in_halves >> n & 1;
  item[0] = max(n, 0);
  item[1] = of_sequence >> halved;
  item[2] = halved ? of_sequence & 1 : -1;
  return n >= 0;
}
"""
)

IDLE = -2
"""In place of a final state's number, of a warpgroup without chunks of its own."""

OF_NOTHING, OF_SEQUENCE, OF_PIECE = range(3)
"""What a block begins with: zero, the initial state of a sequence, or that which enters a piece of one that is cut."""

STATE, PREPARED, NOTHING = range(3)
"""What a block awaits of the kernel launched before. It is `compose`, and has what the state's warpgroups begin with: all else was there before
that kernel let this one begin. Or `prepare`, and has `a` and gamma, for which only the warps wait that read them. Or this kernel, of other
heads, which has awaited what both need."""


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16", and
    `value_tile`, the value columns of a block: 64, or 128 where V is; `l2norm`: whether q and k
    are to be normalised; `split` (kernels/common.py): with bfloat16 and blocks of 64 columns only; `keep`: "nothing", "vd" (not with `split`) or
    "states", h and Vd; `halve_long`, with blocks of 128 columns only and not with "states": whether long sequences are computed by two blocks a head;
    `measures`, with `l2norm` only and not with `split`: whether lengths of queries are found here."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    value_tile: int = 128
    l2norm: bool = False
    split: bool = False
    keep: str = "nothing"
    halve_long: bool = False
    measures: bool = False


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads and sequences are run-time values."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    C, K, V, W, dtype = CHUNK, config.key_dim, config.value_dim, config.value_tile, config.dtype
    tiles = V // W  # blocks a head
    parts = W // 64  # warpgroups that hold the state
    l2norm, split, halve_long, measures = config.l2norm, config.split, config.halve_long, config.measures
    late = measures and parts == 1  # lengths of queries are factors of O, and not of what it is a sum of
    keeps, keeps_h = config.keep != "nothing", config.keep == "states"
    stages = 2 if split and keeps_h and K > 64 else 3
    length_places = stages + late  # lengths that O is multiplied by are read when its chunk's stage is free already
    p_stages = 2 if keeps and parts > 1 else stages
    sends = W == 64 and not keeps_h  # a warp of its own sends O and Vd
    # How long the second-level cache is to keep what other blocks or kernels read too, and what nobody does soon.
    kept, passed, written = (LONG, LONG, None) if keeps_h else (None, SHORT, SHORT)
    S = 128 * parts  # threads that hold the state
    prelude = PRELUDE + HALVES_PRELUDE * halve_long + MEASURE_PRELUDE * measures
    m = macros()
    by_rows = T.GemmWarpPolicy.FullRow  # a warpgroup has 64 rows, not columns, of a product
    tokens, key_heads, value_heads, sequences = T.dynamic("tokens, key_heads, value_heads, sequences")
    initial_states, final_states = T.dynamic("initial_states, final_states")  # sequences, or 0: not given, not wanted
    state_slots = T.dynamic("state_slots")
    cut_sequences, cut_pieces = T.dynamic("cut_sequences, cut_pieces")  # or 0: `segments` are sequences
    cuts = T.dynamic("cuts")  # places for them, or 0
    measured = T.dynamic("measured") if measures else tokens  # or 0: nobody else wants lengths of queries

    def either(condition, one, other):
        """The address of one of two tables."""
        addresses = T.address_of(one[0, 0]), T.address_of(other[0, 0])
        return call("jax_qla_either", condition, *addresses)

    def unless_measured(query_lengths):
        """Lengths of queries that are read, if any."""
        return None if measures else query_lengths

    @T.macro
    def put(operand, part, transposed, tiles, wg):
        """A warpgroup's tile becomes columns from 64 `part` on of what products read from its registers, or their transpose."""
        call(f"jax_qla_store_operand<{transposed}>", operand.data, part, T.address_of(tiles[wg, 0, 0]))

    def measure(c, q_s, query_s, scaled_s, rows, wanted, memory):
        """`jax_qla_measure_queries` of chunk c, whose lengths become numbers in memory from the element `memory` on."""
        name = f"jax_qla_measure_queries<{K}, {'false' if late else 'true'}>"
        at, place = c % stages, c % length_places
        addresses = unfenced(q_s[at, 0, 0]), unfenced(query_s[place, 0]), unfenced(scaled_s[at, 0])
        return call(name, *addresses, rows, wanted, T.address_of(memory), key_heads)

    @T.macro
    def send_parts(state_b, h_s, h, slot, head, first):
        """The state in `state_b` becomes the high tile of `h_s`, where the low one is, and both leave."""
        m.put_state(state_b, h_s, 0)
        T.fence_proxy_async()
        T.sync_threads(4, 128)
        for part in T.unroll(2):
            for x in T.unroll(K // 64):
                m.send_state(h_s, part, x * 64, h, slot, head, part * (K // 64) + x, first)

    @T.macro
    def send_both(vd, o, start, end, count, head, first, lane, sent):
        """One warp, which does nothing else, sends Vd and O of a sequence's chunks, of `head`, from value column `first` on. `sent` holds by their names
        the tiles by which these leave, two each, and their barriers: of 128 arrivals when one is there, and of 32 when both have left."""
        for c in T.serial(count):
            row = start + c * C
            T.barrier_wait(sent.vd_full[c % 2], c // 2 % 2)
            T.fence_proxy_async()
            m.send_rows(sent.vd_s, c % 2, 0, vd, row, T.min(end - row, C), head, first, lane, SHORT, 32)
            T.barrier_wait(sent.rows_full[c % 2], c // 2 % 2)
            T.fence_proxy_async()
            m.send_rows(sent.rows_s, c % 2, 0, o, row, T.min(end - row, C), head, first, lane, SHORT, 32)
            T.tma_store_wait(0)
            T.barrier_arrive(sent.rows_free[c % 2])

    @T.prim_func
    def forward(
        q: T.Tensor((tokens, key_heads, K), dtype),
        k: T.Tensor((tokens, key_heads, K), dtype),
        v: T.Tensor((tokens, value_heads, V), dtype),
        a: T.Tensor((value_heads, tokens, C * (1 + split)), "int16"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only, and so
        query_lengths: T.Tensor((measured, key_heads), "float32"),  # 1 / |q|; with `measures` a result
        initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        segments: T.Tensor((sequences, 2), "int32"),  # sequences, or their pieces
        pieces: T.Tensor((cut_pieces, 4), "int32"),
        spans: T.Tensor((cut_sequences, 2), "int32"),
        entering: T.Tensor((cuts, value_heads, K, V), "float32"),  # the states between pieces
        bounds: T.Tensor((cut_sequences, 2), "int32"),  # of which `segments` are pieces
        o: T.Tensor((tokens, value_heads, V), dtype),
        final_state: T.Tensor((final_states, value_heads, K, V), "float32"),
        h: T.Tensor((state_slots, value_heads, K // 64 * (1 + split), V, 64), dtype),  # where it is kept, and so
        vd: T.Tensor((tokens, value_heads, V * (1 + split)), dtype),
        ratio: T.int32,
        scale: T.float32,
        first_head: T.int32,
        heads: T.int32,  # of this launch, from first_head on
        awaits: T.int32,
        cut_beyond: T.int32,  # rows, or -1 (kernels/uncut.py)
        in_place: T.int32,  # 1: final states take the place of initial ones, where those of empty sequences lie already
        firsts: T.int32,  # row of `entering` from which on it has first states of sequences that are cut (kernels/compose.py), or -1
        share: T.int32,  # with `halve_long` only, and so
        least: T.int32,
        halved: T.int32,  # sequences that may be, at most
    ):
        places = sequences + halved if halve_long else sequences
        with T.Kernel(
            heads * tiles,
            *over(places),
            threads=S + 256 + 128 * sends,
            prelude=prelude,
        ) as (of_place, low_place, high_place):
            T.annotate_min_blocks_per_sm(1)
            if not halve_long:  # of 32 sequences at most
                leaves = final_states == 0 or in_place != 0
                # Of pieces by their sequences: where kernels/uncut.py is asked, `segments` may not be there yet.
                leave_first(leaves and cut_pieces == 0 and rest_is_empty(segments, sequences))
                leave_first(leaves and cut_pieces > 0 and rest_is_empty(bounds, cut_sequences, cuts))
            place = T.alloc_var("int32")  # among the sequences
            place = place_of(low_place, high_place)
            if halve_long:
                item = T.alloc_local((3,), "int32")
                head = T.alloc_var("int32")
                half = T.alloc_var("int32")  # that this block computes, -1: both
                found = T.alloc_var("int32")
            else:
                number = of_place // tiles
                head = first_head + number
            n = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            target = T.alloc_var("int32")  # where the final state goes, if anywhere
            source = T.alloc_var("int32")  # which state is taken
            begins = T.alloc_var("int32")  # and of what it is one
            waits = T.alloc_var("int32")
            waits = awaits
            listed = T.alloc_var("int32")  # sequences or pieces
            listed = sequences
            uncut = T.alloc_var("int32")  # 1: of pieces, all are whole sequences
            uncut = 0
            if cut_pieces > 0:
                uncut = T.call_extern("int32", "jax_qla_uncut", T.address_of(bounds[0, 0]), cut_sequences, cut_beyond)
                if uncut != 0:
                    waits = PREPARED
                    listed = cut_sequences
            if halve_long:
                found = T.call_extern(
                    "int32",
                    "jax_qla_in_halves",
                    *(
                        item.data,
                        either(uncut, bounds, segments),
                        listed,
                        heads,
                        share,
                        least,
                        place * heads + of_place,
                    ),
                )
                if found == 0:  # there are blocks for as many sequences in halves as there can be
                    T.thread_return()
                n = item[0]
                head = first_head + item[1]
                half = item[2]
            else:
                if place >= listed:
                    T.thread_return()
                n = T.call_extern("int32", "jax_qla_long_first", either(uncut, bounds, segments), listed, tokens, place)
            if uncut != 0:
                start = bounds[n, 0]
                end = bounds[n, 1]
            else:
                start = segments[n, 0]
                end = segments[n, 1]
            count = (end - start + C - 1) // C
            m.leave_if(count == 0 and (final_states == 0 or in_place != 0), place + of_place == 0)
            key_head = T.truncdiv(head, ratio)
            first = 0 if halve_long else (of_place % tiles) * W  # first value column of this block
            target = n
            source = n
            begins = T.Select(initial_states > 0, OF_SEQUENCE, OF_NOTHING)
            if cut_pieces > 0 and uncut == 0:  # only the state after a sequence's last piece
                source = pieces[n, 2]
                target = T.Select(n == spans[source, 0] + spans[source, 1] - 1, source, -1)
                if pieces[n, 3] % LAST != FIRST:
                    source = cut_behind(n, source) - 1
                    begins = OF_PIECE
                elif firsts >= 0 and pieces[n, 3] == FIRST:
                    source = kept_first(firsts, cut_sequences, source, n)
                    begins = OF_PIECE
            m.leave_if(count == 0 and target < 0, place + of_place == 0)
            tx = T.get_thread_binding()

            q_s = T.alloc_shared((stages, C, K), dtype)
            k_s = T.alloc_shared((stages, C, K), dtype)
            v_s = T.alloc_shared((stages * parts, C, 64), dtype)
            o_s = T.alloc_shared((2 if sends else parts, C, 64), dtype)
            # which nothing else here asks for
            T.annotate_layout({x: make_full_bank_swizzled_layout(x) for x in (v_s, o_s)})
            if keeps_h:
                h_s = T.alloc_shared((2, 64, K) if split else (parts, C, 64), dtype)
                T.annotate_layout({h_s: make_full_bank_swizzled_layout(h_s)})
                if split:
                    vd_low_s = T.alloc_shared((parts, C, 64), dtype)
                    T.annotate_layout({vd_low_s: make_full_bank_swizzled_layout(vd_low_s)})
            elif keeps:
                vd_s = T.alloc_shared((2 if sends else parts, C, 64), dtype)
                T.annotate_layout({vd_s: make_full_bank_swizzled_layout(vd_s)})
            a_s = T.alloc_shared((stages, C, C), dtype)
            if split:
                low_s = T.alloc_shared((stages, C, C), dtype)  # the low part of a
            p_s = T.alloc_shared((p_stages, C, C), dtype)
            gamma_s = T.alloc_shared((stages, C), "float32")
            rise_s = T.alloc_shared((stages, C), "float32")
            fall_s = T.alloc_shared((stages, C), "float32")
            beta_s = T.alloc_shared((stages, C), "float32")
            query_s = T.alloc_shared((length_places, C), "float32") if l2norm else gamma_s  # 1 / |q|, else not needed
            scaled_s = T.alloc_shared((stages, C), "float32")  # scale exp(gamma), over |q| if queries are normalised
            whole_s = T.alloc_shared((stages,), "float32")  # exp(gamma_C)
            loaded = T.alloc_barrier([32] * stages)
            gated = T.alloc_barrier([64 + 128] * stages)
            ready = T.alloc_barrier([128] * stages)
            free = T.alloc_barrier([S] * stages)
            taken = T.alloc_barrier([S])
            if late:
                measured_last = T.alloc_barrier([128])

            if sends:
                o_full = T.alloc_barrier([128] * 2)
                o_free = T.alloc_barrier([32] * 2)
                sent = SimpleNamespace(rows_s=o_s, rows_full=o_full, rows_free=o_free)
                if keeps:
                    vd_full = T.alloc_barrier([128] * 2)
                    sent = SimpleNamespace(**vars(sent), vd_s=vd_s, vd_full=vd_full)

            if tx >= S + 256:
                T.set_max_nreg(40, 0)
                if sends:
                    if tx < S + 288:
                        if keeps:
                            send_both(vd, o, start, end, count, head, first, tx - (S + 256), sent)
                        else:
                            m.send_results(
                                None, o, None, start, end, count, 0, 0, head, first, False, tx - (S + 256), sent
                            )
            elif tx >= S + 128:
                T.set_max_nreg(24, 0)
                if tx < S + 160:
                    for c in T.serial(count):
                        at = c % stages
                        if W == 128:
                            if begins != OF_NOTHING:
                                if c == 1:
                                    T.barrier_wait(taken[0], 0)
                        if c >= stages:
                            T.barrier_wait(free[at], (c // stages + 1) % 2)
                        m.load_rows(k, start + c * C, key_head, 0, K, k_s, at, loaded, kept)
                        m.load_rows(q, start + c * C, key_head, 0, K, q_s, at, loaded, kept)
                        for part in T.unroll(parts):
                            T.tma_copy(
                                v[start + c * C : start + c * C + C, head, first + part * 64 : first + part * 64 + 64],
                                v_s[at * parts + part, :, :],
                                barrier=loaded[at],
                                leader_scope_threads=32,
                                eviction_policy=passed,
                            )
                        if c == 0:
                            if waits == PREPARED:
                                T.pdl_sync()
                        rows = T.min(end - (start + c * C), C)
                        m.load_inverse(a, head, start + c * C, rows, 0, a_s, at, loaded, passed)
                        if split:
                            m.load_inverse(a, head, start + c * C, rows, 1, low_s, at, loaded, passed)
                        T.barrier_arrive(loaded[at])
                elif tx < S + 224:
                    row = tx - (S + 160)
                    fetched = T.alloc_local((3,), "float32")  # gates of the chunk to come
                    of_rows = T.alloc_local((2,), "float32")  # and 1 / |k|, 1 / |q|
                    if waits == PREPARED:
                        T.pdl_sync()
                    m.fetch_gates(gamma, beta, start, T.min(end - start, C), head, row, fetched)
                    if l2norm:
                        m.fetch_lengths(
                            lengths,
                            unless_measured(query_lengths),
                            start,
                            T.min(end - start, C),
                            key_head,
                            row,
                            of_rows,
                        )
                    for c in T.serial(count):
                        at = c % stages
                        rows = T.min(end - (start + c * C), C)
                        if c >= stages:
                            T.barrier_wait(free[at], (c // stages + 1) % 2)
                        m.store_gates(fetched, rows, row, at, gamma_s, rise_s, fall_s, beta_s)
                        scaled_s[at, row] = scale * rise_s[at, row]
                        # With lengths X = beta / |k| (V - exp(gamma) / |k| K S), O = scale / |q| ..
                        if l2norm:
                            if row < rows:
                                beta_s[at, row] = beta_s[at, row] * of_rows[0]
                                rise_s[at, row] = rise_s[at, row] * of_rows[0]
                                if not measures:
                                    scaled_s[at, row] = scaled_s[at, row] * of_rows[1]
                                    query_s[at, row] = of_rows[1]
                            elif not measures:
                                query_s[at, row] = 0.0
                        if row == 0:
                            whole_s[at] = T.exp2(fetched[1] * T.float32(LOG2_E))
                        T.barrier_arrive(gated[at])
                        m.fetch_gates(
                            gamma, beta, start + (c + 1) * C, T.min(end - (start + (c + 1) * C), C), head, row, fetched
                        )
                        if l2norm:
                            m.fetch_lengths(
                                lengths,
                                unless_measured(query_lengths),
                                start + (c + 1) * C,
                                T.min(end - (start + (c + 1) * C), C),
                                key_head,
                                row,
                                of_rows,
                            )
            elif tx >= S:
                T.set_max_nreg(72, 0)
                p = T.alloc_fragment((C, C), "float32")
                T.annotate_layout({p: accumulator_layout(C, S)})
                if waits == PREPARED:
                    T.pdl_sync()
                T.pdl_trigger()  # another launch, of other heads, may begin where blocks of this end
                m.zero_above(a_s, low_s if split else None, stages, tx - S, 128)
                T.fence_proxy_async()
                for c in T.serial(count):
                    at = c % stages
                    rows = T.min(end - (start + c * C), C)
                    T.barrier_wait(loaded[at], (c // stages) % 2)
                    if rows < C:
                        m.zero_tail(k_s, at, rows, K, tx - S, 128)
                        for part in T.unroll(parts):
                            m.zero_tail(v_s, at * parts + part, rows, 64, tx - S, 128)
                        m.zero_beyond(a_s, low_s if split else None, at, rows, tx - S, 128)
                        T.fence_proxy_async()
                        T.sync_threads(3, 128)
                    T.barrier_arrive(gated[at])
                    wanted = measured > 0 and key_head * ratio == head and (half < 1 if halve_long else first == 0)
                    T.barrier_wait(gated[at], (c // stages) % 2)
                    T.wgmma_gemm(q_s[at, :, :], k_s[at, :, :], p, transpose_B=True, clear_accum=True)
                    if measures and not late:
                        measure(c, q_s, query_s, scaled_s, rows, wanted, query_lengths[start + c * C, key_head])
                    if p_stages < stages:
                        if c >= p_stages:
                            T.barrier_wait(free[(c - p_stages) % stages], ((c - p_stages) // stages) % 2)
                    T.wait_wgmma(0)
                    call(
                        f"jax_qla_store_decayed<{'true' if l2norm and not late else 'false'}, false>",
                        p.data,
                        T.address_of(gamma_s[at, 0]),
                        scale,
                        T.address_of(query_s[at, 0]),
                        T.address_of(p_s[c % p_stages, 0, 0]),
                    )
                    T.fence_proxy_async()
                    T.barrier_arrive(ready[at])
                    if late:
                        measure(c, q_s, query_s, scaled_s, rows, wanted, query_lengths[start + c * C, key_head])
                if late:
                    T.barrier_arrive(measured_last[0])
            else:
                # One program for the warpgroups of the state, whose fragments have 64 rows each: a loop over them TileLang would write out.
                wg = tx // 128 if parts > 1 else 0
                part = wg * 64  # first of this warpgroup's columns
                T.set_max_nreg(208 if W == 128 else 240, 1)
                state = T.alloc_fragment((W, K), "float32")
                state_b = T.alloc_fragment((W, K), dtype)
                u = T.alloc_fragment((W, C), "float32")
                x_b = T.alloc_fragment((W, C), dtype)
                vd_b = T.alloc_fragment((W, C), dtype)
                vk_b = T.alloc_fragment((W, C), dtype)
                acc = T.alloc_fragment((W, C), "float32")
                v_t = T.alloc_fragment((W, C), dtype)
                if split:
                    low = T.alloc_fragment((W, C), dtype)  # of X, then of Vd
                    low_vk = T.alloc_fragment((W, C), dtype)
                T.annotate_layout({acc: accumulator_layout(C, 0, W)})
                whole = T.alloc_var("float32")
                if waits == STATE:
                    T.pdl_sync()
                if begins != OF_NOTHING:
                    if W == 128:
                        if tx == 0:
                            call(
                                f"jax_qla_begin_state<{K}>",
                                T.address_of(initial_state[0, 0, 0, 0]),
                                T.address_of(entering[0, 0, 0, 0]),
                                T.cast(source * value_heads + head, "int64") * (K * V),
                                begins == OF_PIECE,
                                unfenced(k_s[1, 0, 0]),
                                unfenced(q_s[1, 0, 0]),
                            )
                        T.sync_threads(6, S)
                        call(
                            f"jax_qla_take_state<{K}>", state.data, unfenced(k_s[1, 0, 0]), unfenced(q_s[1, 0, 0]), part
                        )
                        # An arrival does not wait for what is being loaded from shared memory, 64 instructions a warp here, of four cycles
                        # each: without the fence K and Q came over the last of them, in one of 33,000 forward passes.
                        T.fence_proxy_async()
                        T.barrier_arrive(taken[0])
                    else:
                        if begins == OF_PIECE:
                            for i, j in T.Parallel(W, K):
                                state[i, j] = entering[source, head, j, first + i]
                        else:
                            for i, j in T.Parallel(W, K):
                                state[i, j] = initial_state[source, head, j, first + i]
                else:
                    T.clear(state)
                if not split:
                    T.copy(state, state_b)
                if count > 0:
                    T.barrier_wait(gated[0], 0)
                if split:
                    m.multiply_state_split(state, state_b, k_s, 0, u, h_s if keeps_h else None)
                else:
                    m.forget(u)
                    T.wgmma_gemm(state_b, k_s[0, :, :], u, transpose_B=True, clear_accum=True, policy=by_rows)
                call("jax_qla_load_transposed", v_t.data, unfenced(v_s[wg, 0, 0]))
                if keeps_h:
                    if count > 0:
                        if split:
                            send_parts(state_b, h_s, h, start // C + n, head, first)
                        else:
                            put(state_b, 0, "false", h_s, wg)
                            T.fence_proxy_async()
                            T.sync_threads(4 + wg, 128)
                            m.send_state(h_s, wg, 0, h, start // C + n, head, 0, first + part)
                T.wait_wgmma(0)
                if halve_long:
                    # The warpgroup whose half another block computes has no chunk of its own; it only arrives.
                    found = T.call_extern("int32", "__any_sync", T.uint32(0xFFFFFFFF), T.cast(half == 1 - wg, "int32"))
                    if found != 0:
                        target = IDLE
                        count = 0
                for c in T.serial(count):
                    at = c % stages
                    after = (c + 1) % stages
                    line = start + c * C
                    lines = end - line
                    # U = S^T K^T is there. S^T Q^T
                    T.wgmma_gemm(state_b, q_s[at, :, :], acc, transpose_B=True, clear_accum=True, policy=by_rows)
                    # X = beta (V^T - exp(gamma) U)
                    if split:
                        for i, j in T.Parallel(W, C):
                            u[i, j] = beta_s[at, j] * (T.cast(v_t[i, j], "float32") - rise_s[at, j] * u[i, j])
                        T.copy(u, x_b)
                        m.keep_low(u, x_b, low)
                    else:
                        for i, j in T.Parallel(W, C):
                            x_b[i, j] = beta_s[at, j] * (T.cast(v_t[i, j], "float32") - rise_s[at, j] * u[i, j])
                    # Vd = X A^T
                    m.multiply_inverse(x_b, a_s, at, u, False, True)
                    if split:
                        m.multiply_inverse(low, a_s, at, u, False, False)
                        m.multiply_inverse(x_b, low_s, at, u, False, False)
                    whole = whole_s[at]
                    for i, j in T.Parallel(W, K):
                        state[i, j] = state[i, j] * whole
                    if not sends:
                        T.tma_store_wait(0)
                        T.sync_threads(4 + wg, 128)  # by now the previous chunk's outputs have left
                    if keeps_h and K > 64 and not split:
                        put(state_b, 1, "false", h_s, wg)
                        T.fence_proxy_async()
                        T.sync_threads(4 + wg, 128)
                        m.send_state(h_s, wg, 0, h, start // C + n + c, head, 1, first + part)
                    T.wait_wgmma(1 + 2 * split)
                    if late or not measures:
                        for i, j in T.Parallel(W, C):
                            acc[i, j] = acc[i, j] * scaled_s[at, j]
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(W, C):
                        vk_b[i, j] = u[i, j] * fall_s[at, j]
                    T.copy(u, vd_b)
                    # S = exp(gamma_C) S + (exp(gamma_C - gamma) Vd) K and O = scale exp(gamma) S^T Q^T + Vd P^T
                    T.wgmma_gemm(vk_b, k_s[at, :, :], state, policy=by_rows)
                    if split:
                        m.keep_low(u, vd_b, low)
                        for i, j in T.Parallel(W, C):
                            u[i, j] = u[i, j] * fall_s[at, j]
                        m.keep_low(u, vk_b, low_vk)
                        T.wgmma_gemm(low_vk, k_s[at, :, :], state, policy=by_rows)
                    T.barrier_wait(ready[at], (c // stages) % 2)
                    if measures and not late:
                        for i, j in T.Parallel(W, C):
                            acc[i, j] = acc[i, j] * scaled_s[at, j]
                    T.wgmma_gemm(vd_b, p_s[c % p_stages, :, :], acc, transpose_B=True, policy=by_rows)
                    if split:
                        T.wgmma_gemm(low, p_s[c % p_stages, :, :], acc, transpose_B=True, policy=by_rows)
                    if keeps_h:
                        put(vd_b, 0, "true", o_s, wg)
                        if split:
                            put(low, 0, "true", vd_low_s, wg)
                        T.fence_proxy_async()
                        T.sync_threads(4 + wg, 128)
                        m.send_rows(o_s, wg, 0, vd, line, lines, head, first + part, tx - wg * 128)
                        if split:
                            m.send_rows(vd_low_s, wg, 0, vd, line, lines, head, V + first, tx)
                    elif keeps and sends:
                        if c >= 2:
                            T.barrier_wait(o_free[c % 2], (c // 2 + 1) % 2)
                        call("jax_qla_store_operand<true>", vd_b.data, 0, unfenced(vd_s[c % 2, 0, 0]))
                        T.barrier_arrive(vd_full[c % 2])
                    elif keeps:
                        put(vd_b, 0, "true", vd_s, wg)
                        T.fence_proxy_async()
                        T.sync_threads(4 + wg, 128)
                        m.send_rows(vd_s, wg, 0, vd, line, lines, head, first + part, tx - wg * 128, written)
                    # The next chunk's U begins before O leaves; after the last chunk it is of whatever lies there, and unused.
                    if c + 1 < count:
                        T.barrier_wait(gated[after], ((c + 1) // stages) % 2)
                    elif late:
                        T.barrier_wait(measured_last[0], 0)
                    T.wait_wgmma(0 if split else 1)
                    if split:
                        if keeps_h:
                            T.tma_store_wait(0)
                            T.sync_threads(4 + wg, 128)  # by now Vd and h have left
                        m.multiply_state_split(state, state_b, k_s, after, u, h_s if keeps_h else None)
                    else:
                        T.copy(state, state_b)
                        m.forget(u)
                        T.wgmma_gemm(state_b, k_s[after, :, :], u, transpose_B=True, clear_accum=True, policy=by_rows)
                    T.wait_wgmma(1)
                    T.barrier_arrive(free[at])
                    if late:  # who has arrived for the next chunk has measured this one's queries
                        for i, j in T.Parallel(W, C):
                            acc[i, j] = acc[i, j] * query_s[c % length_places, j]
                    if keeps_h and not split:
                        T.tma_store_wait(0)
                        T.sync_threads(4 + wg, 128)  # by now Vd and the second half of h have
                        if c + 1 < count:
                            put(state_b, 0, "false", h_s, wg)
                    if sends:
                        if not keeps:  # else Vd has waited for both
                            if c >= 2:
                                T.barrier_wait(o_free[c % 2], (c // 2 + 1) % 2)
                        m.put_rows(acc, sent.rows_s, c % 2, 0)
                        T.barrier_arrive(sent.rows_full[c % 2])
                    else:
                        m.put_rows(acc, o_s, wg, 0)
                        if keeps_h and split:
                            if c + 1 < count:
                                send_parts(state_b, h_s, h, start // C + n + c + 1, head, first)
                        T.fence_proxy_async()
                        T.sync_threads(4 + wg, 128)
                        if keeps_h and not split:
                            if c + 1 < count:
                                m.send_state(h_s, wg, 0, h, start // C + n + c + 1, head, 0, first + part)
                        m.send_rows(o_s, wg, 0, o, line, lines, head, first + part, tx - wg * 128, written)
                    call("jax_qla_load_transposed", v_t.data, unfenced(v_s[after * parts + wg, 0, 0]))
                    T.wait_wgmma(0)
                if final_states > 0 and target >= 0:
                    call(
                        f"jax_qla_store_state<{K}>",
                        state.data,
                        T.address_of(final_state[target, head, 0, first + part]),
                        V,
                    )
                if halve_long:
                    for c in T.serial(T.Select(target == IDLE, (end - start + C - 1) // C, 0)):
                        T.barrier_wait(gated[c % stages], (c // stages) % 2)
                        T.barrier_arrive(free[c % stages])
                T.tma_store_wait(0)
            T.pdl_sync()  # ends after what came before, for what follows waits for this kernel alone

    return forward


def specification(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    initial_state: jax.Array,
    segments: jax.Array,
    pieces: jax.Array,
    spans: jax.Array,
    entering: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    scale: float,
    l2norm: int = 0,
    first_head: int = 0,
    heads: int | None = None,
    keep: str = "nothing",
    measures: bool = False,
    firsts: int = -1,
) -> tuple[jax.Array, ...]:
    """(o [tokens, Hv, V] in v's dtype, final_state [N, Hv, K, V]) and, as `keep` says, Vd, or Vd and h, of `states`, and with `measures` query_lengths, which
    are no operand then; not a number in other heads than `heads` from `first_head` on.

    `segments` are sequences or, with `pieces`, `spans` and `entering`, their pieces; without, these are empty.
    """
    keys, queries = (jnp.repeat(gather_chunks(x, chunks), ratio, axis=2) for x in (k, q))
    values, gates, strength = (gather_chunks(x, chunks) for x in (v, gamma, beta))
    inverse = unpack_inverses(a, chunks, k.dtype)
    scales = jnp.full_like(strength, scale)
    if measures:
        query_lengths = scatter_chunks(inverse_length(gather_chunks(q, chunks), 1), chunks, q.shape[0], lengths.dtype)
    if l2norm:
        of_key = gather_lengths(lengths, chunks, ratio)
        scales = scale * gather_lengths(query_lengths, chunks, ratio)
        strength, values = strength * of_key**2, values / of_key[..., None]
    p = scales[:, :, None] * jnp.einsum("sihk,sjhk->sijh", queries, keys) * decay(gates)
    end = last_row(gates, chunks)

    def step(state, xs):
        queries, keys, values, inverse, p, gates, strength, scales, end = xs
        rise = jnp.exp(gates)[..., None]
        x = strength[..., None] * (values - rise * jnp.einsum("ihk,hkv->ihv", keys, state))
        vd = jnp.einsum("ihj,jhv->ihv", inverse, x)
        o = scales[..., None] * rise * jnp.einsum("ihk,hkv->ihv", queries, state) + jnp.einsum("ijh,jhv->ihv", p, vd)
        update = jnp.einsum("ihk,ihv->hkv", keys, jnp.exp(end - gates)[..., None] * vd)
        return jnp.exp(end)[:, None, None] * state + update, o

    xs = (queries, keys, values, inverse, p, gates, strength, scales, end)
    begin = states_given(initial_state, entering, pieces, spans, firsts)
    final_state, o = scan_slots(step, begin, segments, chunks, xs)
    if pieces.shape[0] > 0:
        final_state = final_state[jnp.sum(spans, axis=1) - 1]
    o = scatter_chunks(o, chunks, v.shape[0], v.dtype)
    computed = v.shape[1] if heads is None else heads
    results = [of_heads(x, first_head, computed) for x in (o, final_state)]
    if keep != "nothing":
        scalars = {"ratio": ratio, "l2norm": l2norm, "first_head": first_head, "heads": computed}
        h, vd = states.specification(
            k, v, a, gamma, beta, lengths, initial_state, segments, pieces, entering, chunks, **scalars
        )
        results += [vd, h] if keep == "states" else [vd]
    found = tuple(among_heads(x, first_head, v.shape[1]) for x in results)
    return (*found, query_lengths) if measures else found
