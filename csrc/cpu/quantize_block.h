// Quantises a block of activations. Each source file that includes this has its own copy, which the
// compiler vectorises for the file's instruction set: only the extrema depend on several elements,
// and their order does not matter.
#pragma once

#include <algorithm>

#include "cpu/cpu_kernels.h"

namespace cutlass_ops {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;

// Rounded half to even, for magnitudes below 2^22: fp32 has no bits behind the point from 2^23 on.
float rounded(float value) {
  constexpr float kMagic = 0x1.8p23f;
  return value + kMagic - kMagic;
}

// One block as reference.quantize_activations defines it; zero is null if symmetric.
void quantize_block(float const* x, int count, int8_t* codes, float* scale, int8_t* zero) {
  // Bits of floats without a sign are ordered as integers, NaN above infinity.
  int32_t high = 0, low = 0;
  for (int i = 0; i < count; ++i) {
    int32_t const bits = int32_t(as_bits(x[i])), opposite = int32_t(as_bits(x[i]) ^ 0x80000000u);
    high = std::max(high, bits), low = std::max(low, opposite);
  }
  if (!zero) high = std::max(high, low);
  float const hi = as_float(uint32_t(high)), lo = as_float(uint32_t(low));  // lo: of -x
  float const span = zero ? hi + lo : hi, steps = zero ? 255.0f : 127.0f;
  bool const finite =
      uint32_t(high) < kInfinity && uint32_t(low) < kInfinity && as_bits(span) < kInfinity;
  *scale = finite ? 1.0f : as_float(0x7fc00000);
  if (zero) *zero = 0;
  if (!finite || span < 0x1p-100f) return void(std::fill_n(codes, count, int8_t(0)));
  *scale = span / steps;
  float const reciprocal = steps / span;
  float shift = 0.0f, least = -127.0f;
  if (zero) {
    shift = std::min(std::max(rounded(-128.0f + lo * reciprocal), -128.0f), 127.0f),
    least = -128.0f;
    *zero = int8_t(shift);
  }
  for (int i = 0; i < count; ++i) {
    float const code = rounded(x[i] * reciprocal) + shift;
    codes[i] = int8_t(std::min(std::max(code, least), 127.0f));
  }
}

}  // namespace
}  // namespace cutlass_ops
