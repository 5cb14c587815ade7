// The warp-level instructions of the portable kernels: CuTe's copy and MMA atoms under names for
// their use here.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>

#include <cstdint>

namespace cutlass_ops {

// 16 bytes from global to shared memory in the background.
__device__ __forceinline__ void copy_async_16(void* shared, void const* source) {
  using Copy = cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>;
  Copy::copy(*static_cast<cute::uint128_t const*>(source), *static_cast<cute::uint128_t*>(shared));
}

// copy_async_16(), or zeros where `valid` is false; `source` is not read then.
__device__ __forceinline__ void copy_async_16_or_zero(void* shared, void const* source,
                                                      bool valid) {
  using Copy = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
  Copy::copy(*static_cast<cute::uint128_t const*>(source), *static_cast<cute::uint128_t*>(shared),
             valid);
}

__device__ __forceinline__ void commit_copies() { cute::cp_async_fence(); }

// Wait until at most `Pending` of the latest groups of copies are in flight.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  cute::cp_async_wait<Pending>();
}

// Four 8x8 tiles of 16-bit values; lane i passes the address of row i % 8 of tile i / 8.
__device__ __forceinline__ void load_tiles(void const* row, uint32_t (&out)[4]) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<cute::uint128_t const*>(row), out[0], out[1], out[2],
                                out[3]);
}

enum class Operand { kHalf, kBFloat16, kInt8 };

// d[16 x 8] = a[16 x 16] b[16 x 8] + c (16-bit floats) or a[16 x 32] b[32 x 8] + c (int8).
template <Operand Type, class Sum>
__device__ __forceinline__ void multiply_add(Sum (&d)[4], uint32_t const (&a)[4], uint32_t b0,
                                             uint32_t b1, Sum c0, Sum c1, Sum c2, Sum c3) {
  if constexpr (Type == Operand::kHalf) {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1,
                                            c0, c1, c2, c3);
  } else if constexpr (Type == Operand::kBFloat16) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0,
                                              b1, c0, c1, c2, c3);
  } else {
    cute::SM80_16x8x32_S32S8S8S32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1,
                                          c0, c1, c2, c3);
  }
}

// The first of a chain sets d, to the product plus `start`; the others add to it.
template <Operand Type, class Sum>
__device__ __forceinline__ void multiply_add(Sum (&d)[4], uint32_t const (&a)[4], uint32_t b0,
                                             uint32_t b1, bool first, Sum start) {
  if (first) {
    multiply_add<Type>(d, a, b0, b1, start, start, start, start);
  } else {
    multiply_add<Type>(d, a, b0, b1, d[0], d[1], d[2], d[3]);
  }
}

}  // namespace cutlass_ops
