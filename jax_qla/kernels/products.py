"""Products with a triangular matrix, by wgmma, that leave out what of it is zero.

wgmma has 64 rows and a multiple of 8 columns. So x b of a triangular b [64, 64] is two products of 32 columns, one of them over half of x's columns: three quarters of the
work for the same bits. By what calls take, a wgmma of 32 columns is some 21 cycles and one of 64 is 36 (docs/performance_versions.md), so finer steps would gain nothing.

To ptxas an accumulator is one vector of registers, and a half of it another. Where a value may pass from one to the other, be it only that wgmma names the registers that it
overwrites as operands, it makes every wgmma of the kernel wait for the one before (C7511: "insufficient register resources", whatever there are). So what an accumulator held
is forgotten (`jax_qla_forget`) wherever whole products follow products by halves or the other way round.
"""

PRODUCTS_PRELUDE = r"""
#include <tl_templates/cuda/common.h>  // half_t
#include <tl_templates/cuda/intrin.h>
#include <tl_templates/cuda/instruction/wgmma.h>
template <typename T>
constexpr tl::DataType kTypeOf = std::is_same_v<T, half_t> ? tl::DataType::kFloat16 : tl::DataType::kBFloat16;
// What the registers of an accumulator [64, 64] hold is not needed any more.
__device__ __forceinline__ void jax_qla_forget(void* accumulator) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "=f"(static_cast<float*>(accumulator)[i]));
}
// Begins c += x b, with `clear` c = x b. x is a left operand of wgmma [64, 64] in registers, c an accumulator [64, 64], b triangular: `lower` and stored by rows, or the
// transpose of such a matrix. `first` describes its first 16 rows and 32 columns; at(k, half) is how far 16 k rows and 32 half columns are from there, in 16 bytes.
template <tl::DataType type, bool lower, bool clear, typename At>
__device__ __forceinline__ void jax_qla_multiply_triangle(void* accumulator, void* operand, const tl::GmmaDescriptor& first, const At& at) {
  uint32_t* c = static_cast<uint32_t*>(accumulator);
  uint32_t* x = static_cast<uint32_t*>(operand);
  if constexpr (clear) jax_qla_forget(c);
  tl::warpgroup_fence_operand(x, 16);
  tl::warpgroup_fence_operand(reinterpret_cast<float*>(c), 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = lower ? half * 2 : 0, end = lower ? 4 : half * 2 + 2;
#pragma unroll
    for (int k = begin; k < end; ++k) {
      tl::wgmma_rs<type, type, tl::DataType::kFloat32, 64, 32, 16, false, lower, 1, 1>(x + k * 4, uint64_t(first + at(k, half)), c + half * 16,
                                                                                        !clear || k > begin);
    }
  }
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(reinterpret_cast<float*>(c), 32);
  tl::warpgroup_fence_operand(x, 16);
}
// Begins c = x t, t being the lower triangular tile [64, 64] number `stage` of `tiles` in shared memory, 128-byte swizzled.
template <typename T>
__device__ __forceinline__ void jax_qla_multiply_lower(void* accumulator, void* operand, const T* tiles, int stage) {
  tl::GmmaDescriptor t;
  tl::initialize_wgmma_descriptor<1, 0, 64>(t, tiles);
  tl::increase_descriptor_offset<int>(t, stage * 8192);
  jax_qla_multiply_triangle<kTypeOf<T>, true, true>(accumulator, operand, t, [](int k, int half) { return k * 128 + half * 4; });
}
"""
