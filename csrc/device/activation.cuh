// Activations (cutlass_ops/activation.h) of fp32 sums that are finite or NaN.
#pragma once

#include <cmath>

#include "cutlass_ops/activation.h"
#include "device/scalar.cuh"

namespace cutlass_ops {

// Comparisons are written so that NaN falls through them: nothing turns a NaN into a number.
__device__ __forceinline__ float clamp_keeping_nan(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

// Subnormal numbers are zeros here, and in what follows: 2^-126 is too small for any outputs but
// fp32's, and caring for less takes three more instructions each.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
constexpr float kLog2E = 1.44269504f;

// x / 2 * (1 + erf(x / sqrt(2))) = max(x, 0) - h(|x|), where h(a) = a / 2 * erfc(a / sqrt(2)) is
// a * exp(-a * a / 2) times a polynomial of 1 / (1 + 0.36 a), fitted so that the largest relative
// error for a up to 14 is least: 9e-7, to which fp32 adds 4e-6 in the negative tail. erff takes
// twice as many instructions, and more registers than a tile's sums leave.
struct Gelu {
  static constexpr bool is(Activation activation) { return activation == Activation::kGelu; }
  __device__ __forceinline__ Gelu(Activation, ActivationBounds) {}
  __device__ __forceinline__ float operator()(float x) const {
    float const a = fabsf(x), t = fast_reciprocal(fmaf(0.36f, a, 1.0f));
    float polynomial = 0.04705644f;
    polynomial = fmaf(polynomial, t, -0.17976523f);
    polynomial = fmaf(polynomial, t, 0.18095477f);
    polynomial = fmaf(polynomial, t, 0.026548767f);
    polynomial = fmaf(polynomial, t, 0.13971949f);
    polynomial = fmaf(polynomial, t, 0.14177241f);
    polynomial = fmaf(polynomial, t, 0.14371305f);
    return fmaxf(x, 0.0f) - polynomial * t * fast_exp2(x * (x * (-0.5f * kLog2E))) * a;
  }
};

// x / (1 + exp(-x)); or the functions that it is a case of: of gate and up (kClampedSwiglu), whose
// numbers make the clamps and the sum with 1 do nothing, where -0 is what changes no zero's sign;
// and with x^3 added to x (kGeluTanh), as (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)).
struct Silu {
  float slope = -kLog2E, cubic = 0.0f, limit = HUGE_VALF, shift = -0.0f;

  static constexpr bool is(Activation activation) {
    return activation == Activation::kSilu || activation == Activation::kClampedSwiglu ||
           activation == Activation::kGeluTanh;
  }
  __device__ __forceinline__ Silu(Activation activation, ActivationBounds bounds) {
    if (activation == Activation::kClampedSwiglu)
      slope = -kLog2E * bounds.low, limit = bounds.high, shift = 1.0f;
    if (activation == Activation::kGeluTanh)
      slope = -kLog2E * 1.5957691216f, cubic = 0.044715f * slope;  // 2 * sqrt(2 / pi)
  }
  __device__ __forceinline__ float operator()(float x) const {
    x = min_or_nan(x, limit);
    // cubic * x first: 0 for any x, where x * x may be infinite
    return x * fast_reciprocal(1.0f + fast_exp2(x * fmaf(cubic * x, x, slope)));
  }
  __device__ __forceinline__ float of_up(float x) const {
    return max_or_nan(min_or_nan(x, limit), -limit) + shift;
  }
};

// What the functor's value of gate is multiplied by.
template <class F>
__device__ __forceinline__ float factor_of_up(F const&, float up) {
  return up;
}
__device__ __forceinline__ float factor_of_up(Silu const& silu, float up) { return silu.of_up(up); }

template <class... Functions>
struct ActivationFunctions {
  static constexpr bool has(Activation activation) { return (Functions::is(activation) || ...); }

  // Whether the activation exists; f was called with it.
  template <class F>
  static __device__ __forceinline__ bool visit(Activation activation, ActivationBounds bounds,
                                               F const& f) {
    return ((Functions::is(activation) && (f(Functions(activation, bounds)), true)) || ...);
  }
};
using Curves = ActivationFunctions<Gelu, Silu>;

constexpr bool curves_are_complete() {
  for (ActivationInfo const& info : kActivations)
    if (Curves::has(info.activation) == info.clamps) return false;
  return true;
}
static_assert(curves_are_complete(), "each activation that is no clamp has a functor");

// Call f with the functor of an activation, once for all of a thread's sums: choosing for each of
// them takes twice as many instructions.
template <class F>
__device__ __forceinline__ void visit_activation(Activation activation, ActivationBounds bounds,
                                                 F const& f) {
  if (activation == Activation::kNone) return f([](float x) { return x; });
  if (Curves::visit(activation, bounds, f)) return;
  f([=](float x) { return clamp_keeping_nan(x, bounds.low, bounds.high); });
}

// A thread's sums of rows g and g + 8, in pairs. If these are gate's and up's, activation(gate) *
// up replaces gate's; otherwise both are activated. The same code serves gate's and row g's sums.
//
// A loop rotates the sums through the code in two or four parts, so that a kernel has an
// activation's instructions only once a part: ptxas divides integer instructions between two units
// by the load of the whole kernel, and int8 main loops are slower in kernels with GELU unrolled for
// each sum (docs/tuning-notes.md).
template <int kSums>
__device__ __forceinline__ void activate_or_gate(float (&sums)[kSums], Activation activation,
                                                 ActivationBounds bounds, bool gated) {
  constexpr int kParts = kSums % 16 == 0 ? 4 : kSums % 8 == 0 ? 2 : 1, kPart = kSums / kParts;
  static_assert(kPart % 4 == 0, "a part begins with a row g");
  if (activation != Activation::kNone) {
    visit_activation(activation, bounds, [&](auto const& function) {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        float done[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i)
          if (i % 4 < 2) done[i] = function(sums[i]);
        if (gated) {
#pragma unroll
          for (int i = 0; i < kPart; ++i)
            if (i % 4 >= 2) done[i] = factor_of_up(function, sums[i]);
        } else {
#pragma unroll
          for (int i = 0; i < kPart; ++i)
            if (i % 4 >= 2) done[i] = function(sums[i]);
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i)
          sums[i] = i + kPart < kSums ? sums[i + kPart] : done[i + kPart - kSums];
      }
    });
  }
  if (!gated) return;
#pragma unroll
  for (int i = 0; i < kSums; ++i)
    if (i % 4 < 2) sums[i] *= sums[i + 2];
}

}  // namespace cutlass_ops
