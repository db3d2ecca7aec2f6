"""The short causal convolution that precedes the gated delta rule in a layer, channel by channel.

    z_t = bias + sum_{d < 4} w_d x_{t - d}                      w_d = weight[3 - d]
    y_t = z_t / (1 + exp(-z_t)),  or z_t

The rows before the first are those of `before` [3] or zeros. Where rows are marked by `ids`, a tap reads no further than the sequence of row t
reaches back, a sequence being a run of equal ids other than 0; rows of id 0 give 0, whatever x holds there. y has up to three parts, arrays of
their own side by side in the channels: a layer's q, k and v, which need not be cut out of it afterwards. Arithmetic is float32; y is rounded once.

By bytes alone, x read and y written once, 8192 rows of 8192 channels in 16 bits take 62 us at 4.3 TB/s. This takes 78; XLA, which computes every
tap's place and bounds for every element, 140, and 150 with q, k and v apart (docs/performance_kernels.md).

Plan, blocks of 128 threads, numbered along the channels first:

    a thread   8 channels, 16 bytes of a row, and a stretch of `rows` rows one after the other; the last four of x stay in registers, a ring in
               which a row's place is its number modulo 4
    a warp     256 channels; the four warps have consecutive stretches
    loads      to shared memory, each thread for itself, 12 rows ahead: 96 KB of a multiprocessor are under way

Every row is read once, but for the three before a stretch. Where a sequence begins the ring is cleared, so that the sums know nothing of marks; of
these a warp looks at 32 at once (with an id loaded for every row by every thread this took 100 us). Four rows that are of one sequence, as the three
before them are, go a way of their own, which asks for nothing: no mark, no end, no SiLU or not. The walk along a stretch is C++, for its pointers: of
indices TileLang makes an address each row and array, which takes twice the registers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels import common
from jax_qla.kernels.macros import call
from jax_qla.kernels.sigmoid import SIGMOID_PRELUDE

__all__ = [
    "CHANNELS",
    "CONVOLUTION_PRELUDE",
    "KEPT",
    "PASS_CONFIGS",
    "TAPS",
    "WARPS",
    "Config",
    "program",
    "specification",
]

PASS_CONFIGS = common.PASS_CONFIGS | {"tl.disable_shared_memory_reuse": True}

TAPS = 4
"""Rows that one of y sees: the width of the filter."""
WARPS = 4
"""Stretches of rows of a block, one a warp."""
CHANNELS = 8
"""Channels of a thread, of which the parts of y have a multiple."""

KEPT = 16
"""Rows that a thread has in shared memory, or on their way there."""

_THREADS = 32 * WARPS

CONVOLUTION_PRELUDE = (
    SIGMOID_PRELUDE + f"constexpr int kTaps = {TAPS}, kKept = {KEPT};"
    r"""

// Channels of a row of 16-bit numbers, read and written at once.
template <class T, int channels>
struct alignas(2 * channels) JaxQlaChannels {
  T at[channels];

  __device__ __forceinline__ void load(const T* from) { *this = *reinterpret_cast<const JaxQlaChannels*>(from); }
  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<JaxQlaChannels*>(to) = *this; }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < channels; ++c) at[c] = T(0.f);
  }
};

// Where a thread is: row `start` of sequence n of a batch, and a group of channels. Of a warp that has more threads than there are groups, the last
// threads have the last group once more and write the same, since a warp looks at marks together.
struct JaxQlaPlace {
  int n, start, group, length, groups;

  __device__ __forceinline__ JaxQlaPlace(int n, int start, int group, int length, int groups)
      : n(n), start(start), group(min(group, groups - 1)), length(length), groups(groups) {}
  __device__ __forceinline__ int64_t row_of(int groups_of_array, int channels) const {
    return (static_cast<int64_t>(n) * length + start) * groups_of_array * channels;
  }
};

// The array of y, or of its gradient, that has the place's channels: its row and the step to the next one.
template <class T>
struct JaxQlaPart {
  T* row;
  int64_t stride;

  __device__ __forceinline__ JaxQlaPart(const JaxQlaPlace& place, int channels, T* first, T* second, T* third, int of_first, int of_second,
                                        int of_third) {
    int at = place.group, groups = of_first;
    row = first;
    if (at >= groups) {
      at -= groups;
      row = second;
      groups = of_second;
      if (at >= groups) {
        at -= groups;
        row = third;
        groups = of_third;
      }
    }
    row += place.row_of(groups, channels) + at * channels;
    stride = static_cast<int64_t>(groups) * channels;
  }
};

// How far back the sequence of the row seen last reaches, of rows without marks ...
struct JaxQlaUnmarked {
  __device__ __forceinline__ JaxQlaUnmarked() {}
  __device__ __forceinline__ explicit JaxQlaUnmarked(const JaxQlaPlace&) {}
  __device__ __forceinline__ void look(int, int) {}
  __device__ __forceinline__ void see(int) {}
  __device__ __forceinline__ bool pass(int) { return true; }
  __device__ __forceinline__ bool padding() const { return false; }
  __device__ __forceinline__ bool begins() const { return false; }
  // Whether that row and the one `distance` before it are of one sequence.
  __device__ __forceinline__ bool includes(int) const { return true; }
};

// ... and with them. Rows are seen one after the other, from the third before the place on. A warp looks at 32 ids at once, a lane at one.
struct JaxQlaMarked {
  const int *ids, *before;
  int start, rows = 0, last = 0;
  unsigned changes = 0, empty = 0;  // of the 32 rows: whose id is not that of the row before, whose id is 0

  __device__ __forceinline__ JaxQlaMarked(const JaxQlaPlace& place, const int* all, const int* all_before, int befores)
      : ids(all + place.row_of(1, 1)), before(befores ? all_before + place.n * (kTaps - 1) : nullptr), start(place.start) {}
  // Before the rows t to t + 3 from the place, of `count`, are seen. t is a multiple of 4 from -4 on.
  __device__ __forceinline__ void look(int t, int count) {
    if (bit(t)) return;
    const int lane = threadIdx.x % 32, row = start + t + lane;
    int id = 0;
    if (row < 0) id = before && row >= 1 - kTaps ? before[row + kTaps - 1] : 0;
    else if (t + lane < count) id = ids[t + lane];
    const int above = __shfl_up_sync(0xffffffffu, id, 1);
    changes = __ballot_sync(0xffffffffu, id != (lane ? above : last));
    empty = __ballot_sync(0xffffffffu, id == 0);
    last = __shfl_sync(0xffffffffu, id, 31);
  }
  // The next row, `t` from the place.
  __device__ __forceinline__ void see(int t) { rows = empty >> bit(t) & 1 ? 0 : changes >> bit(t) & 1 ? 1 : rows + 1; }
  // Sees the next four rows if they and the three before them are of one sequence; whether they are.
  __device__ __forceinline__ bool pass(int t) {
    if (rows < kTaps - 1 || ((changes | empty) >> bit(t) & ((1u << kTaps) - 1))) return false;
    rows += kTaps;
    return true;
  }
  __device__ __forceinline__ bool padding() const { return rows == 0; }
  __device__ __forceinline__ bool begins() const { return rows < 2; }
  __device__ __forceinline__ bool includes(int distance) const { return rows > distance; }

 private:
  __device__ __forceinline__ static int bit(int t) { return (t + kTaps) % 32; }
};

template <class... Given>
struct JaxQlaReach : JaxQlaMarked {
  using JaxQlaMarked::JaxQlaMarked;
};
template <>
struct JaxQlaReach<> : JaxQlaUnmarked {
  using JaxQlaUnmarked::JaxQlaUnmarked;
};

// A group of channels' filter, and the rows of x before the next one, each in its place of the ring.
template <class T, int channels>
struct JaxQlaFilter {
  float w[kTaps][channels], bias[channels], ring[kTaps][channels];

  // All pointers but that of x, which is that of the place, are the arrays'.
  template <class Reach>
  __device__ __forceinline__ JaxQlaFilter(const JaxQlaPlace& place, Reach& reach, const T* x, const float* weight, const float* biases,
                                          const T* before, int given_biases, int befores, int count) {
    const int64_t stride = static_cast<int64_t>(place.groups) * channels;
    const int channel = place.group * channels;
#pragma unroll
    for (int c = 0; c < channels; ++c) {
      bias[c] = given_biases ? biases[channel + c] : 0.f;
#pragma unroll
      for (int d = 0; d < kTaps; ++d) w[d][c] = weight[(kTaps - 1 - d) * stride + channel + c];
    }
    reach.look(-kTaps, count);
#pragma unroll
    for (int p = 1; p < kTaps; ++p) {
      const int t = p - kTaps, row = place.start + t;
      JaxQlaChannels<T, channels> found;
      found.clear();
      if (row >= 0) found.load(x + t * stride);
      else if (befores) found.load(before + (static_cast<int64_t>(place.n) * (kTaps - 1) + row + kTaps - 1) * stride + channel);
      reach.see(t);
      take(reach, p, found);
    }
  }

  // The row seen last, whose place in the ring is `r`. Rows of other sequences count as zeros from then on, and so does padding.
  template <class Reach>
  __device__ __forceinline__ void take(const Reach& reach, int r, const JaxQlaChannels<T, channels>& x) {
    if (reach.begins()) {
#pragma unroll
      for (int p = 0; p < kTaps; ++p) {
#pragma unroll
        for (int c = 0; c < channels; ++c) ring[p][c] = 0.f;
      }
    }
    if (!reach.padding()) {
#pragma unroll
      for (int c = 0; c < channels; ++c) ring[r][c] = static_cast<float>(x.at[c]);
    }
  }
  // x of the row `distance` before the one at `r`, in channel c.
  __device__ __forceinline__ float tap(int r, int distance, int c) const { return ring[(r - distance) & (kTaps - 1)][c]; }
  // z of the row at `r`.
  __device__ __forceinline__ float sum(int r, int c) const {
    float z = bias[c];
#pragma unroll
    for (int d = 0; d < kTaps; ++d) z = fmaf(w[d][c], tap(r, d, c), z);
    return z;
  }
};

// Copies 16, 8 or 4 bytes to shared memory, in the background; no thread but this one may read them.
template <int bytes>
__device__ __forceinline__ void jax_qla_copy(void* to, const void* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if (bytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(bytes) : "memory");
}
// Ends a group of copies; waits for all groups but the last `but`.
__device__ __forceinline__ void jax_qla_end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int but>
__device__ __forceinline__ void jax_qla_await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(but) : "memory"); }

// The rows of an array that a thread goes through, four at a time, each read some groups of four ahead. A thread's memory for so many rows lies
// `threads` rows apart, so that a warp's is contiguous.
template <class T, int channels, int threads>
struct JaxQlaStream {
  using Row = JaxQlaChannels<T, channels>;
  Row* kept;
  const T* next;
  int64_t stride;

  __device__ __forceinline__ void fetch(int t, int count) {
#pragma unroll
    for (int r = 0; r < kTaps; ++r) {
      if (t + r < count) {
        jax_qla_copy<sizeof(Row)>(slot(t + r), next);
        next += stride;
      }
    }
  }
  __device__ __forceinline__ Row* slot(int t) const { return kept + t % kKept * threads; }
};
"""
)

_PRELUDE = (
    CONVOLUTION_PRELUDE
    + r"""
template <bool silu, int channels, int threads, class T, class... Marks>
__device__ __forceinline__ void jax_qla_convolution_if(const T* x, const float* weight, const float* bias, const T* before, T* first, T* second,
                                                       T* third, T* kept, int n, int start, int group, int length, int groups, int befores,
                                                       int biases, int first_part, int second_part, int third_part, int rows,
                                                       Marks... marks) {
  const JaxQlaPlace place(n, start, group, length, groups);
  JaxQlaReach<Marks...> reach(place, marks...);
  const int64_t stride = static_cast<int64_t>(groups) * channels;
  x += place.row_of(groups, channels) + place.group * channels;
  const int count = min(rows, length - start);
  JaxQlaStream<T, channels, threads> stream{reinterpret_cast<JaxQlaChannels<T, channels>*>(kept) + threadIdx.x, x, stride};
#pragma unroll
  for (int t = 0; t < kKept - kTaps; t += kTaps) {
    stream.fetch(t, count);
    jax_qla_end_copies();
  }
  const JaxQlaPart<T> part(place, channels, first, second, third, first_part, second_part, third_part);
  T* y = part.row;
  JaxQlaFilter<T, channels> filter(place, reach, x, weight, bias, before, biases, befores, count);
  const auto row = [&](const auto& reach, int r, int t) {
    filter.take(reach, r, *stream.slot(t));
    JaxQlaChannels<T, channels> result;
    result.clear();
    if (!reach.padding()) {
#pragma unroll
      for (int c = 0; c < channels; ++c) {
        const float z = filter.sum(r, c);
        result.at[c] = static_cast<T>(z * (silu ? jax_qla_sigmoid(z) : 1.f));
      }
    }
    result.store(y);
    y += part.stride;
  };
  for (int t = 0; t < count; t += kTaps) {
    stream.fetch(t + kKept - kTaps, count);
    jax_qla_end_copies();
    jax_qla_await_copies<kKept / kTaps - 1>();
    reach.look(t, count);
    if (t + kTaps <= count && reach.pass(t)) {
#pragma unroll
      for (int r = 0; r < kTaps; ++r) row(JaxQlaUnmarked(), r, t + r);
    } else {
#pragma unroll
      for (int r = 0; r < kTaps; ++r) {
        if (t + r >= count) break;
        reach.see(t + r);
        row(reach, r, t + r);
      }
    }
  }
}

template <int channels, int threads, class... Given>
__device__ __forceinline__ void jax_qla_convolution(int silu, Given... given) {
  if (silu) jax_qla_convolution_if<true, channels, threads>(given...);
  else jax_qla_convolution_if<false, channels, threads>(given...);
}
"""
)


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `dtype` of x and y, "bfloat16" or "float16", and whether rows are `marked` by ids."""

    dtype: str = "bfloat16"
    marked: bool = False


def program(config: Config):
    """The TileLang program. Numbers of rows and channels are run-time values."""
    import tilelang.language as T

    dtype, marked = config.dtype, config.marked
    batch, length, groups = T.dynamic("batch, length, groups")  # of channels
    first_part, second_part, third_part = T.dynamic("first_part, second_part, third_part")  # groups of the parts
    befores, ids_befores, biases = T.dynamic("befores, ids_befores, biases")  # batch, batch and groups, or 0: not given

    @T.prim_func
    def convolution(
        x: T.Tensor((batch, length, groups, CHANNELS), dtype),
        weight: T.Tensor((TAPS, groups, CHANNELS), "float32"),
        bias: T.Tensor((biases, CHANNELS), "float32"),
        before: T.Tensor((befores, TAPS - 1, groups, CHANNELS), dtype),
        ids: T.Tensor((batch, length), "int32"),
        ids_before: T.Tensor((ids_befores, TAPS - 1), "int32"),
        first: T.Tensor((batch, length, first_part, CHANNELS), dtype),
        second: T.Tensor((batch, length, second_part, CHANNELS), dtype),
        third: T.Tensor((batch, length, third_part, CHANNELS), dtype),
        rows: T.int32,
        blocks_of_rows: T.int32,
        silu: T.int32,
    ):
        tiles = T.ceildiv(groups, 32)
        with T.Kernel(batch * blocks_of_rows * tiles, threads=_THREADS, prelude=_PRELUDE) as block:
            T.annotate_min_blocks_per_sm(4)
            tx = T.get_thread_binding()
            n = T.truncdiv(block, tiles * blocks_of_rows)
            start = (T.truncmod(T.truncdiv(block, tiles), blocks_of_rows) * WARPS + tx // 32) * rows
            group = T.truncmod(block, tiles) * 32 + tx % 32
            kept_s = T.alloc_shared((KEPT, _THREADS, CHANNELS), dtype)
            if start < length:
                marks = (T.address_of(ids[0, 0]), T.address_of(ids_before[0, 0]), ids_befores) if marked else ()
                call(
                    f"jax_qla_convolution<{CHANNELS}, {_THREADS}>",
                    silu,
                    T.address_of(x[0, 0, 0, 0]),
                    T.address_of(weight[0, 0, 0]),
                    T.address_of(bias[0, 0]),
                    T.address_of(before[0, 0, 0, 0]),
                    T.address_of(first[0, 0, 0, 0]),
                    T.address_of(second[0, 0, 0, 0]),
                    T.address_of(third[0, 0, 0, 0]),
                    T.access_ptr(kept_s[0, 0, 0], "rw"),
                    n,
                    start,
                    group,
                    length,
                    groups,
                    befores,
                    biases,
                    first_part,
                    second_part,
                    third_part,
                    rows,
                    *marks,
                )

    return convolution


def taps(x: jax.Array, before: jax.Array) -> list[jax.Array]:
    """x_{t - d} for d = 0, 1, 2, 3, each as x [B, T, ...], with `before` [B or 0, 3, ...] before the first."""
    if not before.shape[0]:
        before = jnp.zeros((x.shape[0], TAPS - 1, *x.shape[2:]), x.dtype)
    extended = jnp.concatenate([before, x], axis=1)
    return [extended[:, TAPS - 1 - d : extended.shape[1] - d] for d in range(TAPS)]


def seen(ids: jax.Array, ids_before: jax.Array) -> list[jax.Array]:
    """For d = 0, 1, 2, 3 whether row t and those up to d before it are of one sequence, bool [B, T]."""
    marks = taps(ids, ids_before)
    found = [marks[0] != 0]
    for d in range(1, TAPS):
        found.append(found[-1] & (marks[d] == marks[d - 1]))
    return found


def sums(
    x: jax.Array, weight: jax.Array, bias: jax.Array, before: jax.Array, visible: list[jax.Array] | None
) -> jax.Array:
    """z [B, T, G, C]."""
    wide = weight.dtype
    z = jnp.zeros(x.shape, wide) + (bias if bias.shape[0] else 0)
    for d, tap in enumerate(taps(x, before)):
        part = weight[TAPS - 1 - d] * tap.astype(wide)
        z += part if visible is None else jnp.where(visible[d][..., None, None], part, 0)
    return z


def specification(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    before: jax.Array,
    ids: jax.Array | None,
    ids_before: jax.Array | None,
    *,
    parts: tuple[int, int, int],
    silu: int,
) -> tuple[jax.Array, ...]:
    """(first, second, third) of x [B, T, G, CHANNELS], each with so many groups of channels as `parts` says; `ids` None if rows are not marked."""
    visible = None if ids is None or ids_before is None else seen(ids, ids_before)
    z = sums(x, weight, bias, before, visible)
    y = z * jax.nn.sigmoid(z) if silu else z
    if visible is not None:
        y = jnp.where(visible[0][..., None, None], y, 0)
    first, second, third = jnp.split(y.astype(x.dtype), (parts[0], parts[0] + parts[1]), axis=2)
    return first, second, third
