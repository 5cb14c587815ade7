// Reading and writing a float whose type is known at run time: scales, biases and residuals
// keep the type they came in, and the branch is the same for every thread. And pairs of 16-bit
// floats in a word, and the lesser and the larger of floats that may be NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "dispatch/problem.h"

namespace cutlass_ops {

// NaN goes through these, unlike through fminf and fmaxf. One instruction each, the
// absolute value included.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float load_float(void const* data, DataType type, int64_t index) {
  if (type == DataType::kFloat16) return __half2float(static_cast<__half const*>(data)[index]);
  if (type == DataType::kBFloat16)
    return __bfloat162float(static_cast<__nv_bfloat16 const*>(data)[index]);
  return static_cast<float const*>(data)[index];
}

__device__ __forceinline__ void store_float(void* data, DataType type, int64_t index, float v) {
  if (type == DataType::kFloat16) {
    static_cast<__half*>(data)[index] = __float2half_rn(v);
  } else if (type == DataType::kBFloat16) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(v);
  } else {
    static_cast<float*>(data)[index] = v;
  }
}

// Two neighbours, each rounded to T, in a word.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(v);
  } else {
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(v);
  }
}

// The neighbour in the lower (`half` 0) or upper half of such a word.
template <class T>
__device__ __forceinline__ float unpack_half(uint32_t word, int half) {
  if constexpr (std::is_same_v<T, __half>) {
    float2 pair = __half22float2(reinterpret_cast<__half2 const&>(word));
    return half ? pair.y : pair.x;
  } else {
    return __uint_as_float(half ? word & 0xffff0000u : word << 16);
  }
}

// Four neighbouring values; `index` is a multiple of 4.
__device__ __forceinline__ void load_float4(void const* data, DataType type, int64_t index,
                                            float (&out)[4]) {
  if (type == DataType::kFloat32) {
    float4 v = *reinterpret_cast<float4 const*>(static_cast<float const*>(data) + index);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    return;
  }
  uint2 v = *reinterpret_cast<uint2 const*>(static_cast<uint16_t const*>(data) + index);
  if (type == DataType::kFloat16) {
    float2 a = __half22float2(reinterpret_cast<__half2 const&>(v.x)),
           b = __half22float2(reinterpret_cast<__half2 const&>(v.y));
    out[0] = a.x, out[1] = a.y, out[2] = b.x, out[3] = b.y;
  } else {
    out[0] = __uint_as_float(v.x << 16), out[1] = __uint_as_float(v.x & 0xffff0000u);
    out[2] = __uint_as_float(v.y << 16), out[3] = __uint_as_float(v.y & 0xffff0000u);
  }
}

}  // namespace cutlass_ops
