"""Whether a packed batch is cut into pieces at all, found by whoever asks from the sequences' bounds, before kernels/layout.py has said it.

Where none is, kernels/summaries.py and compose.py have nothing to do but to wait, and kernels/forward.py goes through the sequences as if the call had no
pieces: it begins while kernels/prepare.py runs, not when these have ended one after the other.
"""

UNCUT_PRELUDE = r"""
// Whether none of `count` sequences (first row and end of each) has more than `cut_beyond` rows; false where that is negative: not to be asked. To be
// called by whole warps.
__device__ __forceinline__ int jax_qla_uncut(const int* bounds, int count, int cut_beyond) {
  if (cut_beyond < 0) return 0;
  for (int first = 0; first < count; first += 128) {
    bool longer = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = first + 32 * i + (threadIdx.x & 31);
      if (n < count) longer |= bounds[2 * n + 1] - bounds[2 * n] > cut_beyond;
    }
    if (__any_sync(0xffffffffu, longer)) return 0;
  }
  return 1;
}
// The same for all blocks but the first, which must wait, to be asked before all else (macros.py: leave_first).
__device__ __forceinline__ bool jax_qla_others_uncut(const int* bounds, int count, int cut_beyond) {
  return blockIdx.x + blockIdx.y > 0 && jax_qla_uncut(bounds, count, cut_beyond);
}
"""


def macro():
    """The macro `leave_if_uncut`, built on demand so that importing this needs no TileLang."""
    import tilelang.language as T

    @T.macro
    def leave_if_uncut(bounds, sequences, cut_beyond, first_block):
        """Of a kernel that computes what lies between pieces: where there are none, all blocks return, and the next kernel may begin at once."""
        if T.call_extern("int32", "jax_qla_uncut", T.address_of(bounds[0, 0]), sequences, cut_beyond) != 0:
            T.pdl_trigger()
            if first_block:
                T.pdl_sync()  # one block is enough
            T.thread_return()

    return leave_if_uncut


def others_uncut(bounds, sequences, cut_beyond):
    """Whether blocks but the first, which must wait, have nothing to do for that, for `leave_first` (macros.py)."""
    import tilelang.language as T

    return T.call_extern("bool", "jax_qla_others_uncut", T.address_of(bounds[0, 0]), sequences, cut_beyond)
