// The functions that an epilogue can apply. A new one is a member, a line of kActivations and,
// unless it is a clamp, a functor in device/activation.cuh; Python's reference and its gradient
// have their own (cutlass_ops/reference/gemm.py, ops/gradients.py).
#pragma once

#include <cmath>
#include <cstdint>

namespace cutlass_ops {

enum class Activation : int8_t {
  kNone = 0,
  kRelu,
  kRelu6,
  kGelu,
  kSilu,
  kClamp,
  kClampedSwiglu,
  kGeluTanh,
};

struct ActivationInfo {
  Activation activation;
  char const* name;
  bool clamps;  // to [low, high], which is all that static int8 and depthwise kernels can do
  float low, high;
  bool of_gate_and_up = false;  // a function of both, which layers of experts alone take
};

inline constexpr ActivationInfo kActivations[] = {
    {Activation::kNone, "none", true, -HUGE_VALF, HUGE_VALF},
    {Activation::kRelu, "relu", true, 0.0f, HUGE_VALF},
    {Activation::kRelu6, "relu6", true, 0.0f, 6.0f},
    {Activation::kGelu, "gelu", false, -HUGE_VALF, HUGE_VALF},  // x / 2 * (1 + erf(x / sqrt(2)))
    {Activation::kSilu, "silu", false, -HUGE_VALF, HUGE_VALF},  // x / (1 + exp(-x))
    {Activation::kClamp, "clamp", true, 0.0f, 0.0f},            // to bounds that are given
    // (u + 1) * g / (1 + exp(-low * g)) of g = min(gate, high) and u = up clamped to -high .. high,
    // of numbers that are given.
    {Activation::kClampedSwiglu, "clamped_swiglu", false, 0.0f, 0.0f, true},
    // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
    {Activation::kGeluTanh, "gelu_tanh", false, -HUGE_VALF, HUGE_VALF},
};

// Null if there is no activation with this number.
constexpr ActivationInfo const* find_activation(Activation activation) {
  for (ActivationInfo const& info : kActivations)
    if (info.activation == activation) return &info;
  return nullptr;
}

// The bounds of an existing activation, or the other numbers that are given for it.
struct ActivationBounds {
  float low, high;

  ActivationBounds(Activation activation, float clamp_low, float clamp_high)
      : low(clamp_low), high(clamp_high) {
    if (activation == Activation::kClamp || activation == Activation::kClampedSwiglu) return;
    ActivationInfo const& info = *find_activation(activation);
    low = info.low, high = info.high;
  }
};

}  // namespace cutlass_ops
