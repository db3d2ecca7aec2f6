"""Gradients of the short causal convolution (kernels/convolution.py), in one pass over x and the gradient of y.

    dz_t = dy_t s_t (1 + z_t (1 - s_t)),  s = 1 / (1 + exp(-z)),  or dy_t            z computed again from x
    dx_t = sum_{d < 4} w_d dz_{t + d}
    dw_d = sum_t dz_t x_{t - d}        dbias = sum_t dz_t

where, of marked rows, only those pairs (t, t - d) count that one sequence has. `dbefore` is dx of the three rows before the first. Arithmetic is
float32, dx is rounded once. dw and dbias come as one summand a block, in the order of `weight` and dbias last, which XLA adds up: the same bits
every time.

By bytes alone, x and dy read and dx written once, 8192 rows of 8192 channels in 16 bits take 94 us at 4.3 TB/s. This takes 109, XLA 524 in three
kernels (docs/performance_kernels.md).

Plan, as `convolution`'s, with 4 channels a thread for what it has to hold of each: the filter, the last four rows of x, the sums of dx that are not
complete, and those of dw. A row of dx is complete when the third row behind it has been seen. So a thread goes three rows beyond its own, whose dz
count in dx alone, and the warp that has those rows computes them again. The four warps' dw meet in shared memory.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels import common
from jax_qla.kernels.convolution import CONVOLUTION_PRELUDE, KEPT, TAPS, WARPS, seen, sums, taps
from jax_qla.kernels.macros import call

__all__ = ["CHANNELS", "PASS_CONFIGS", "Config", "program", "specification"]

PASS_CONFIGS = common.PASS_CONFIGS | {"tl.disable_shared_memory_reuse": True}

CHANNELS = 4
"""Channels of a thread, of which the parts of dy have a multiple."""

_THREADS = 32 * WARPS

_PRELUDE = (
    CONVOLUTION_PRELUDE
    + r"""
// Adds what this thread's rows have of dw and dbias to `sums` [5][channels], in the order of the taps.
template <bool silu, int channels, int threads, class T, class... Marks>
__device__ __forceinline__ void jax_qla_convolution_gradients_if(const T* x, const float* weight, const float* bias, const T* before, const T* first,
                                                                 const T* second, const T* third, T* d_x, T* d_before, T* kept, float* sums, int n,
                                                                 int start, int group, int length, int groups, int befores, int biases,
                                                                 int first_part, int second_part, int third_part, int rows,
                                                                 Marks... marks) {
  const JaxQlaPlace place(n, start, group, length, groups);
  JaxQlaReach<Marks...> reach(place, marks...);
  const int64_t stride = static_cast<int64_t>(groups) * channels;
  x += place.row_of(groups, channels) + place.group * channels;
  d_x += place.row_of(groups, channels) + place.group * channels;
  d_before += (static_cast<int64_t>(n) * (kTaps - 1)) * stride + place.group * channels;
  const int own = min(rows, length - start), all = min(rows + kTaps - 1, length - start);
  const JaxQlaPart<const T> part(place, channels, first, second, third, first_part, second_part, third_part);
  auto* slots = reinterpret_cast<JaxQlaChannels<T, channels>*>(kept) + threadIdx.x;
  JaxQlaStream<T, channels, threads> of_x{slots, x, stride}, of_dy{slots + kKept * threads, part.row, part.stride};
#pragma unroll
  for (int t = 0; t < kKept - kTaps; t += kTaps) {
    of_x.fetch(t, all);
    of_dy.fetch(t, all);
    jax_qla_end_copies();
  }
  JaxQlaFilter<T, channels> filter(place, reach, x, weight, bias, before, biases, befores, all);
  float dx[kTaps][channels] = {};  // of the rows whose gradients are not complete, in their places of the ring
  // A row at place r of the ring: dz, and what it adds to dx, dw and dbias; the last two if it is the thread's own.
  const auto row = [&](const auto& reach, int r, int t, bool is_own) {
    filter.take(reach, r, *of_x.slot(t));
    const JaxQlaChannels<T, channels> dy = *of_dy.slot(t);
    float dz[channels];
#pragma unroll
    for (int c = 0; c < channels; ++c) {
      const float z = filter.sum(r, c), s = jax_qla_sigmoid(z);
      dz[c] = reach.padding() ? 0.f : static_cast<float>(dy.at[c]) * (silu ? fmaf(z, s - s * s, s) : 1.f);
      dx[r][c] = filter.w[0][c] * dz[c];
    }
#pragma unroll
    for (int d = 1; d < kTaps; ++d) {
      if (reach.includes(d)) {
#pragma unroll
        for (int c = 0; c < channels; ++c) {
          float& sum = dx[(r + kTaps - d) % kTaps][c];
          sum = fmaf(filter.w[d][c], dz[c], sum);
        }
      }
    }
    if (is_own) {
#pragma unroll
      for (int c = 0; c < channels; ++c) {
#pragma unroll
        for (int d = 0; d < kTaps; ++d) sums[d * channels + c] = fmaf(dz[c], filter.tap(r, d, c), sums[d * channels + c]);
        sums[kTaps * channels + c] += dz[c];
      }
    }
  };
  // dx of the row whose place comes after r, which is complete.
  const auto complete = [&](int r, T* to) {
    JaxQlaChannels<T, channels> result;
#pragma unroll
    for (int c = 0; c < channels; ++c) result.at[c] = static_cast<T>(dx[(r + 1) % kTaps][c]);
    result.store(to);
  };
  for (int t = 0; t < own + kTaps - 1; t += kTaps) {
    of_x.fetch(t + kKept - kTaps, all);
    of_dy.fetch(t + kKept - kTaps, all);
    jax_qla_end_copies();
    jax_qla_await_copies<kKept / kTaps - 1>();
    reach.look(t, all);
    T* to = d_x + (t - (kTaps - 1)) * stride;
    if (t > 0 && t + kTaps <= own && reach.pass(t)) {
#pragma unroll
      for (int r = 0; r < kTaps; ++r) {
        row(JaxQlaUnmarked(), r, t + r, true);
        complete(r, to + r * stride);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kTaps; ++r) {
        if (t + r >= own + kTaps - 1) break;
        if (t + r < all) {
          reach.see(t + r);
          row(reach, r, t + r, t + r < own);
        }
        if (t + r >= kTaps - 1) complete(r, to + r * stride);
        else if (start == 0 && befores) complete(r, d_before + (t + r) * stride);
      }
    }
  }
}

template <int channels, int threads, class... Given>
__device__ __forceinline__ void jax_qla_convolution_gradients(int silu, Given... given) {
  if (silu) jax_qla_convolution_gradients_if<true, channels, threads>(given...);
  else jax_qla_convolution_gradients_if<false, channels, threads>(given...);
}
"""
)


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for, as of kernels/convolution.py."""

    dtype: str = "bfloat16"
    marked: bool = False


def program(config: Config):
    """The TileLang program. Numbers of rows and channels are run-time values."""
    import tilelang.language as T

    dtype, marked = config.dtype, config.marked
    batch, length, groups = T.dynamic("batch, length, groups")  # of channels
    first_part, second_part, third_part = T.dynamic("first_part, second_part, third_part")  # groups of the parts
    befores, ids_befores, biases, summands = T.dynamic("befores, ids_befores, biases, summands")

    @T.prim_func
    def convolution_gradients(
        x: T.Tensor((batch, length, groups, CHANNELS), dtype),
        weight: T.Tensor((TAPS, groups, CHANNELS), "float32"),
        bias: T.Tensor((biases, CHANNELS), "float32"),
        before: T.Tensor((befores, TAPS - 1, groups, CHANNELS), dtype),
        ids: T.Tensor((batch, length), "int32"),
        ids_before: T.Tensor((ids_befores, TAPS - 1), "int32"),
        first: T.Tensor((batch, length, first_part, CHANNELS), dtype),
        second: T.Tensor((batch, length, second_part, CHANNELS), dtype),
        third: T.Tensor((batch, length, third_part, CHANNELS), dtype),
        d_x: T.Tensor((batch, length, groups, CHANNELS), dtype),
        d_before: T.Tensor((befores, TAPS - 1, groups, CHANNELS), dtype),
        d_filter: T.Tensor((summands, TAPS + 1, groups, CHANNELS), "float32"),
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
            sums = T.alloc_local(((TAPS + 1) * CHANNELS,), "float32")
            total = T.alloc_local((CHANNELS,), "float32")
            kept_s = T.alloc_shared((2, KEPT, _THREADS, CHANNELS), dtype)
            sums_s = T.alloc_shared((WARPS, TAPS + 1, 32, CHANNELS), "float32")
            for i in T.unroll((TAPS + 1) * CHANNELS):
                sums[i] = 0.0
            if start < length:
                marks = (T.address_of(ids[0, 0]), T.address_of(ids_before[0, 0]), ids_befores) if marked else ()
                call(
                    f"jax_qla_convolution_gradients<{CHANNELS}, {_THREADS}>",
                    silu,
                    T.address_of(x[0, 0, 0, 0]),
                    T.address_of(weight[0, 0, 0]),
                    T.address_of(bias[0, 0]),
                    T.address_of(before[0, 0, 0, 0]),
                    T.address_of(first[0, 0, 0, 0]),
                    T.address_of(second[0, 0, 0, 0]),
                    T.address_of(third[0, 0, 0, 0]),
                    T.address_of(d_x[0, 0, 0, 0]),
                    T.address_of(d_before[0, 0, 0, 0]),
                    T.access_ptr(kept_s[0, 0, 0, 0], "rw"),
                    sums.data,
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
            for d in T.unroll(TAPS + 1):
                for c in T.vectorized(CHANNELS):
                    sums_s[tx // 32, d, tx % 32, c] = sums[d * CHANNELS + c]
            T.sync_threads()
            for d in T.unroll(TAPS + 1):
                if d % WARPS == tx // 32 and group < groups:
                    for c in T.unroll(CHANNELS):
                        total[c] = 0.0
                        for p in T.unroll(WARPS):
                            total[c] += sums_s[p, d, tx % 32, c]
                    for c in T.vectorized(CHANNELS):
                        d_filter[T.truncdiv(block, tiles), T.if_then_else(d < TAPS, TAPS - 1 - d, TAPS), group, c] = (
                            total[c]
                        )

    return convolution_gradients


def specification(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    before: jax.Array,
    ids: jax.Array | None,
    ids_before: jax.Array | None,
    first: jax.Array,
    second: jax.Array,
    third: jax.Array,
    *,
    rows: int,
    blocks_of_rows: int,
    silu: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_x, d_before, d_filter) from the gradients of y's parts, shapes as the program has them; `ids` None if rows are not marked."""
    wide, (batch, length) = weight.dtype, x.shape[:2]
    visible = None if ids is None or ids_before is None else seen(ids, ids_before)
    dz = jnp.concatenate([first, second, third], axis=2).astype(wide)
    if silu:
        z = sums(x, weight, bias, before, visible)
        s = jax.nn.sigmoid(z)
        dz = dz * s * (1 + z * (1 - s))
    if visible is not None:
        dz = jnp.where(visible[0][..., None, None], dz, 0)
    extended = jnp.zeros((batch, length + TAPS - 1, *x.shape[2:]), wide)
    summed = blocks_of_rows * WARPS * rows
    terms = []
    for d, tap in enumerate(taps(x, before)):
        of_pair, tap = dz, tap.astype(wide)
        if visible is not None:
            of_pair, tap = (jnp.where(visible[d][..., None, None], a, 0) for a in (dz, tap))
        begin = TAPS - 1 - d
        extended = extended.at[:, begin : begin + length].add(weight[begin] * of_pair)
        terms.append(of_pair * tap)
    terms = [*terms[::-1], dz]
    d_filter = [
        jnp.pad(term, ((0, 0), (0, summed - length), (0, 0), (0, 0)))
        .reshape(batch * blocks_of_rows, -1, *x.shape[2:])
        .sum(axis=1)
        for term in terms
    ]
    d_before = extended[: before.shape[0], : TAPS - 1]
    return extended[:, TAPS - 1 :].astype(x.dtype), d_before.astype(x.dtype), jnp.stack(d_filter, axis=1)
