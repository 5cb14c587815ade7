// From a fp32 sum to an output: + bias -> activation -> + residual -> one rounding. All arithmetic is fp32.
#pragma once

#include <cfloat>
#include <cmath>

#include "device/scalar.cuh"

namespace cutlass_ops {

// The part of a GemmProblem that the epilogue reads, small enough for kernel parameters.
struct EpilogueParams {
  void* out;
  void const* bias;
  void const* residual;
  int64_t residual_stride;
  int m, n;
  float low, high;  // clamp
  float limit;      // of the output's magnitude: its type's largest number where it saturates, or infinity
  DataType out_type, bias_type, residual_type;
  Activation activation;
  bool vector_store;  // rows of `out` start on 16-byte boundaries

  static float largest(DataType type) {
    return type == DataType::kFloat16 ? 65504.0f : type == DataType::kBFloat16 ? 0x1.fep127f : FLT_MAX;
  }

  explicit EpilogueParams(GemmProblem const& p)
      : out(p.out),
        bias(p.bias),
        residual(p.residual),
        residual_stride(p.residual_stride),
        m(p.m),
        n(p.weight.n),
        low(p.activation == Activation::kClamp ? p.clamp_low : 0.0f),
        high(p.activation == Activation::kRelu6 ? 6.0f : p.clamp_high),
        limit(p.saturate ? largest(p.out_type) : HUGE_VALF),
        out_type(p.out_type),
        bias_type(p.bias_type),
        residual_type(p.residual_type),
        activation(p.activation),
        vector_store(int64_t(p.weight.n) * size_of(p.out_type) % 16 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0) {}
};

// Comparisons are written so that NaN falls through them: no activation turns a NaN into a number.
__device__ __forceinline__ float activate(float v, EpilogueParams const& p) {
  switch (p.activation) {
    case Activation::kRelu:
      return v < 0.0f ? 0.0f : v;
    case Activation::kRelu6:
    case Activation::kClamp:
      return v < p.low ? p.low : v > p.high ? p.high : v;
    case Activation::kGelu:
      return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
    case Activation::kSilu:
      return v / (1.0f + __expf(-v));
    default:
      return v;
  }
}

__device__ __forceinline__ float finish(float sum, int m, int n, EpilogueParams const& p) {
  // A sum that is not finite is NaN from here on: a NaN or infinity in x shows in its whole row, also after relu.
  float v = fmaf(sum, 0.0f, sum);
  if (p.bias) v += load_float(p.bias, p.bias_type, n);
  v = activate(v, p);
  if (p.residual) v += load_float(p.residual, p.residual_type, m * p.residual_stride + n);
  return v > p.limit ? p.limit : v < -p.limit ? -p.limit : v;
}

__device__ __forceinline__ uint16_t to_half_bits(float v, EpilogueParams const& p) {
  if (p.out_type == DataType::kBFloat16) return __bfloat16_as_ushort(__float2bfloat16_rn(v));
  return __half_as_ushort(__float2half_rn(v));
}

// Finish eight neighbouring sums of row m, the first at column n, and store those below p.n.
__device__ __forceinline__ void store_eight(float const (&sums)[8], int m, int n, EpilogueParams const& p) {
  if (p.out_type == DataType::kFloat32) {
    float* out = static_cast<float*>(p.out) + int64_t(m) * p.n + n;
    if (p.vector_store && n + 8 <= p.n) {
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = finish(sums[i], m, n + i, p);
      reinterpret_cast<float4*>(out)[0] = make_float4(v[0], v[1], v[2], v[3]);
      reinterpret_cast<float4*>(out)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (n + i < p.n) out[i] = finish(sums[i], m, n + i, p);
    }
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(p.out) + int64_t(m) * p.n + n;
  if (p.vector_store && n + 8 <= p.n) {
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = to_half_bits(finish(sums[2 * i], m, n + 2 * i, p), p) |
             uint32_t(to_half_bits(finish(sums[2 * i + 1], m, n + 2 * i + 1, p), p)) << 16;
    *reinterpret_cast<uint4*>(out) = make_uint4(v[0], v[1], v[2], v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (n + i < p.n) out[i] = to_half_bits(finish(sums[i], m, n + i, p), p);
  }
}

}  // namespace cutlass_ops
