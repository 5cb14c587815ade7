// Activations (cutlass_ops/activation.h) of fp32 sums that are finite or NaN.
#pragma once

#include <cmath>

#include "cutlass_ops/activation.h"

namespace cutlass_ops {

// Comparisons are written so that NaN falls through them: nothing turns a NaN into a number.
__device__ __forceinline__ float clamp_keeping_nan(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

struct Gelu {
  static constexpr Activation kActivation = Activation::kGelu;
  __device__ __forceinline__ float operator()(float x) const {
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
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

}  // namespace cutlass_ops
