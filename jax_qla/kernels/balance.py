"""Whether a packed batch's sequences keep a card busy until nearly the end, one block for each of them and head (kernels/backward.py).

    balanced = share ceil(64 n / share) max_i l_i <= limit_of_rounds sum_j l_j          of the n lengths l that are not 0, or
               max_i (64 sum_{j: l_j >= l_i} l_j + share l_i) <= limit sum_j l_j
               and the mean of those n is SHORTEST or more

`share` is multiprocessors over heads, in 64ths, the limits what the last block may take longer than all would if the work could be divided at will, in 64ths too. By the first
line no multiprocessor has more blocks than ceil(64 n / share), none of which is longer than the longest: sequences are alike, and fill the card in each of their rounds of
blocks, whatever places for others there are. The second is a bound: blocks begin in the order of their lengths, the longest first, each where a multiprocessor is free, so at
the latest when all multiprocessors have done, together, what is at least as long, and it ends its own length later.

Plan: one warp. Up to 32 sequences it takes one by one, of more those alike in eighths of the longest. In integers, so that it is the same wherever it runs. The kernels of
which some are to compute a batch and the others not read the result (macros().leave_unless): they have thousands of blocks, and what each does before it leaves
is what the batch takes longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla.kernels.common import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "SHORTEST", "Config", "balanced", "program", "specification"]

SHORTEST = 128
"""Rows of a sequence, on average, below which its block is mostly what it does before and after its chunks."""

PRELUDE = (
    f"constexpr int kShortest = {SHORTEST};"
    r"""
// What is said above, of `count` sequences (first row and end of each). To be called by a whole warp.
__device__ __forceinline__ int jax_qla_balanced(const int* segments, int count, int share, int limit, int limit_of_rounds) {
  const int lane = threadIdx.x & 31;
  const auto length = [=](int n) { return n < count ? segments[2 * n + 1] - segments[2 * n] : 0; };
  const int own = length(lane);
  int longest = 0, some = 0;
  long long all = 0;
  for (int n = lane; n < count; n += 32) {
    const int found = length(n);
    longest = max(longest, found);
    all += found;
    some += found > 0;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, step));
    all += __shfl_xor_sync(0xffffffffu, all, step);
    some += __shfl_xor_sync(0xffffffffu, some, step);
  }
  const long long latest = 8LL * limit * all;  // 8 times the bound, for the eighths
  bool late = false;
  if (count <= 32) {
    long long before = 0;  // rows of those at least as long as this lane's
    for (int n = 0; n < count; ++n) {
      const int other = __shfl_sync(0xffffffffu, own, n);
      before += other >= own ? other : 0;
    }
    late = 8LL * (64LL * before + static_cast<long long>(share) * own) > latest;
  } else {
    long long longer[9] = {};  // rows of those longer than so many eighths of the longest
    for (int n = lane; n < count; n += 32) {
      const int found = length(n);
#pragma unroll
      for (int i = 0; i < 8; ++i) longer[i] += 8LL * found > static_cast<long long>(longest) * i ? found : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) longer[i] += __shfl_xor_sync(0xffffffffu, longer[i], step);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      late = late || (longer[i] > longer[i + 1] && 512LL * longer[i] + static_cast<long long>(share) * longest * (i + 1) > latest);
    }
  }
  const long long rounds = (64LL * some + share - 1) / share;
  const bool alike = share * rounds * longest <= limit_of_rounds * all;
  return all >= static_cast<long long>(kShortest) * some && !__any_sync(0xffffffffu, late && !alike);
}
"""
)


@dataclass(frozen=True)
class Config:
    """Nothing: it is the same for all sizes and dtypes."""


def program(config: Config):
    """The TileLang program. The number of sequences is a run-time value."""
    import tilelang.language as T

    del config
    sequences = T.dynamic("sequences")

    @T.prim_func
    def balance(
        segments: T.Tensor((sequences, 2), "int32"),  # sequences, or their pieces
        balanced: T.Tensor((1,), "int32"),
        share: T.int32,
        limit: T.int32,
        limit_of_rounds: T.int32,
    ):
        with T.Kernel(1, threads=32, prelude=PRELUDE):
            T.pdl_sync()
            T.pdl_trigger()  # what follows goes by it only once this has ended
            found = T.alloc_var("int32")
            found = T.call_extern(
                *("int32", "jax_qla_balanced", T.address_of(segments[0, 0]), sequences),
                *(share, limit, limit_of_rounds),
            )
            if T.get_thread_binding() == 0:
                balanced[0] = found

    return balance


def balanced(lengths: Sequence[int], share: int, limit: int, limit_of_rounds: int) -> bool:
    """What the kernel finds of sequences of so many rows."""
    lengths = [int(length) for length in lengths]
    longest, everything, some = max(lengths), sum(lengths), sum(length > 0 for length in lengths)

    def late(before: int, length: int, eighths: int) -> bool:
        """Whether what is `eighths` eighths of `length`, the last of `before` rows, may end too late."""
        return 8 * 64 * before + share * length * eighths > 8 * limit * everything

    if everything < SHORTEST * some:
        return False
    if share * -(-64 * some // share) * longest <= limit_of_rounds * everything:
        return True
    if len(lengths) <= 32:
        return not any(late(sum(n for n in lengths if n >= length), length, 8) for length in lengths)
    longer = [sum(n for n in lengths if 8 * n > longest * i) for i in range(9)]
    return not any(longer[i] > longer[i + 1] and late(longer[i], longest, i + 1) for i in range(8))


def specification(segments: jax.Array, *, share: int, limit: int, limit_of_rounds: int) -> jax.Array:
    """int32 [1], from the sequences' [N, 2]."""

    def of_values(segments: Any) -> np.ndarray:
        lengths = np.diff(np.asarray(segments), axis=1)[:, 0].tolist()
        return np.array([balanced(lengths, share, limit, limit_of_rounds)], np.int32)

    return jax.pure_callback(of_values, jax.ShapeDtypeStruct((1,), jnp.int32), segments)
