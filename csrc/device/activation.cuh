// Activations (cutlass_ops/activation.h) of fp32 sums that are finite or NaN.
#pragma once

#include <cmath>

#include "cutlass_ops/activation.h"

namespace cutlass_ops {

// Comparisons are written so that NaN falls through them: nothing turns a NaN into a number.
__device__ __forceinline__ float clamp_keeping_nan(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

// x / 2 * (1 + erf(x / sqrt(2))) = max(x, 0) - h(|x|), where h(a) = a / 2 * erfc(a / sqrt(2)) is
// a * exp(-a * a / 2) times a polynomial of 1 / (1 + 0.36 a), fitted so that the largest relative
// error for a up to 14 is least: 9e-7, to which fp32 adds 4e-6 in the negative tail. erff takes
// twice as many instructions, and more registers than a tile's sums leave.
struct Gelu {
  static constexpr Activation kActivation = Activation::kGelu;
  __device__ __forceinline__ float operator()(float x) const {
    float const a = fabsf(x), t = __fdividef(1.0f, fmaf(0.36f, a, 1.0f));
    float polynomial = 0.04705644f;
    polynomial = fmaf(polynomial, t, -0.17976523f);
    polynomial = fmaf(polynomial, t, 0.18095477f);
    polynomial = fmaf(polynomial, t, 0.026548767f);
    polynomial = fmaf(polynomial, t, 0.13971949f);
    polynomial = fmaf(polynomial, t, 0.14177241f);
    polynomial = fmaf(polynomial, t, 0.14371305f);
    return fmaxf(x, 0.0f) - polynomial * t * __expf(x * (x * -0.5f)) * a;
  }
};

struct Silu {
  static constexpr Activation kActivation = Activation::kSilu;
  __device__ __forceinline__ float operator()(float x) const {
    return __fdividef(x, 1.0f + __expf(-x));
  }
};

template <class... Functions>
struct ActivationFunctions {
  static constexpr bool has(Activation activation) {
    return ((activation == Functions::kActivation) || ...);
  }

  // Whether there is one, with which f was called.
  template <class F>
  static __device__ __forceinline__ bool visit(Activation activation, F const& f) {
    return ((activation == Functions::kActivation && (f(Functions()), true)) || ...);
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
  if (Curves::visit(activation, f)) return;
  f([=](float x) { return clamp_keeping_nan(x, bounds.low, bounds.high); });
}

// A thread's sums of rows g and g + 8 two by two. Where these are gate's and up's, activation(gate) *
// up takes gate's place; otherwise both are activated. The code for gate's is that for row g: a
// kernel has an activation's instructions once for each sum.
template <int kSums>
__device__ __forceinline__ void activate_or_gate(float (&sums)[kSums], Activation activation,
                                                 ActivationBounds bounds, bool gated) {
  visit_activation(activation, bounds, [&](auto const& function) {
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      if (i % 4 < 2) sums[i] = function(sums[i]);
    if (gated) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      if (i % 4 >= 2) sums[i] = function(sums[i]);
  });
  if (!gated) return;
#pragma unroll
  for (int i = 0; i < kSums; ++i)
    if (i % 4 < 2) sums[i] *= sums[i + 2];
}

}  // namespace cutlass_ops
