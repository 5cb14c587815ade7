// From a fp32 sum to an output: + bias -> activation -> + residual -> one rounding. All
// arithmetic is fp32.
#pragma once

#include <cfloat>
#include <cmath>

#include "device/activation.cuh"
#include "device/scalar.cuh"
#include "dispatch/problem.h"

namespace cutlass_ops {

// threadIdx.x, read again, so that values derived from it need not stay in registers through the
// main loop.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The part of a GemmProblem that the epilogue reads, small enough for kernel parameters.
struct EpilogueParams {
  void* out;
  void const* bias;
  void const* residual;
  int64_t residual_stride;
  int m, n;
  ActivationBounds bounds;
  float limit;  // outputs are clamped to -limit .. limit: the largest number of their type, or
                // infinity where they do not saturate
  DataType out_type, bias_type, residual_type;
  Activation activation;
  bool vector_store;     // rows of `out` start on 16-byte boundaries
  bool vector_residual;  // there is no residual, or one of 16 bits whose rows do, too

  static float largest(DataType type) {
    return type == DataType::kFloat16    ? 65504.0f
           : type == DataType::kBFloat16 ? 0x1.fep127f
                                         : FLT_MAX;
  }

  explicit EpilogueParams(GemmProblem const& p)
      : out(p.out),
        bias(p.bias),
        residual(p.residual),
        residual_stride(p.residual_stride),
        m(p.m),
        n(outputs(p.weight)),
        bounds(p.activation, p.clamp_low, p.clamp_high),
        limit(p.saturate ? largest(p.out_type) : HUGE_VALF),
        out_type(p.out_type),
        bias_type(p.bias_type),
        residual_type(p.residual_type),
        activation(p.activation),
        vector_store(int64_t(outputs(p.weight)) * bytes_of(p.out_type) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(p.out) % 16 == 0),
        vector_residual(!p.residual ||
                        (p.residual_type != DataType::kFloat32 && p.residual_stride % 8 == 0 &&
                         reinterpret_cast<uintptr_t>(p.residual) % 16 == 0)) {}
};

// A sum that is not finite is NaN from the start: a NaN or infinity in x shows in its whole row,
// also after relu.
__device__ __forceinline__ float nan_unless_finite(float x) { return fmaf(x, 0.0f, x); }

// Residual and rounding.
template <int kCount>
__device__ __forceinline__ void finish_activated(float (&v)[kCount], int m, int n,
                                                 EpilogueParams const& p) {
  if (p.residual) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (n + i < p.n)
        v[i] += load_float(p.residual, p.residual_type, m * p.residual_stride + n + i);
  }
  if (p.limit < HUGE_VALF) {
#pragma unroll
    for (float& x : v) x = clamp_keeping_nan(x, -p.limit, p.limit);
  }
}

// Activation, residual and rounding.
template <int kCount>
__device__ __forceinline__ void finish_biased(float (&v)[kCount], int m, int n,
                                              EpilogueParams const& p) {
  visit_activation(p.activation, p.bounds, [&](auto const& function) {
#pragma unroll
    for (float& x : v) x = function(x);
  });
  finish_activated(v, m, n, p);
}

// Converts neighbouring sums of row m, the first at column n, to outputs. Every branch is taken
// once for all of them.
template <int kCount>
__device__ __forceinline__ void finish_outputs(float (&v)[kCount], int m, int n,
                                               EpilogueParams const& p) {
#pragma unroll
  for (float& x : v) x = nan_unless_finite(x);
  if (p.bias) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (n + i < p.n) v[i] += load_float(p.bias, p.bias_type, n + i);
  }
  finish_biased(v, m, n, p);
}

// Two neighbouring outputs of 16 bits.
__device__ __forceinline__ uint32_t to_half_bits(float low, float high, bool bfloat16) {
  if (bfloat16) return pack_pair<__nv_bfloat16>(low, high);
  return pack_pair<__half>(low, high);
}

// Store 4 or 8 finished outputs, those whose column is below p.n.
template <int kCount>
__device__ __forceinline__ void store_finished(float const (&v)[kCount], int m, int n,
                                               EpilogueParams const& p) {
  static_assert(kCount == 4 || kCount == 8);
  bool whole = p.vector_store && n + kCount <= p.n;
  int64_t index = int64_t(m) * p.n + n;
  if (p.out_type == DataType::kFloat32) {
    float* out = static_cast<float*>(p.out) + index;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4)
        *reinterpret_cast<float4*>(out + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (n + i < p.n) out[i] = v[i];
    }
    return;
  }
  uint32_t pairs[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i)
    pairs[i] = to_half_bits(v[2 * i], v[2 * i + 1], p.out_type == DataType::kBFloat16);
  uint16_t* out = static_cast<uint16_t*>(p.out) + index;
  if (whole) {
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      *reinterpret_cast<uint2*>(out) = make_uint2(pairs[0], pairs[1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (n + i < p.n) out[i] = uint16_t(pairs[i / 2] >> 16 * (i % 2));
  }
}

// Finish 4 or 8 sums and store those whose column is below p.n.
template <int kCount>
__device__ __forceinline__ void store_outputs(float (&v)[kCount], int m, int n,
                                              EpilogueParams const& p) {
  finish_outputs(v, m, n, p);
  store_finished(v, m, n, p);
}

// Rows of gate, or of up, that are side by side in a gated weight.
constexpr int kGatedRows = 8;

// Finish sums of four neighbouring rows of gate, and those of up, and store their outputs from
// column n on.
__device__ __forceinline__ void store_gated_outputs(float (&gate)[4], float (&up)[4], int m, int n,
                                                    EpilogueParams const& p) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    gate[i] = nan_unless_finite(gate[i]), up[i] = nan_unless_finite(up[i]);
  if (p.bias) {
    int const row = n / kGatedRows * (2 * kGatedRows) + n % kGatedRows;  // of the weight
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gate[i] += load_float(p.bias, p.bias_type, row + i);
      up[i] += load_float(p.bias, p.bias_type, row + kGatedRows + i);
    }
  }
  visit_activation(p.activation, p.bounds, [&](auto const& function) {
#pragma unroll
    for (int i = 0; i < 4; ++i) gate[i] = function(gate[i]) * factor_of_up(function, up[i]);
  });
  finish_activated(gate, m, n, p);
  store_finished(gate, m, n, p);
}

// Store a warp's outputs of 16 rows of a gated weight and eight rows of x, from column n on, which
// overwrite gate's sums in the order of wgmma's accumulators. `m`: the row of the outputs for x's
// row lane / 4 of the eight; negative where there is none.
__device__ __forceinline__ void store_gated_pairs(float const (&v)[4], int64_t m, int n,
                                                  EpilogueParams const& p) {
  // Exchanges two rows of x of a feature for two features of a row of x.
  uint32_t pair = to_half_bits(v[0], v[1], p.out_type == DataType::kBFloat16);
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(pair) : "r"(pair));
  n += threadIdx.x % 4 * 2;
  if (m >= 0 && n < p.n)
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + m * p.n + n) = pair;
}

}  // namespace cutlass_ops
