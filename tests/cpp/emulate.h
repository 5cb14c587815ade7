// The vector instructions of formats/decode.cuh on the host, in double. Their operands are 16-bit
// floats and their results a unit times integers below 2^8, so that double is exact, and so are the
// instructions, provided that the results are of that kind, which the tests check.
#pragma once

#include <cmath>
#include <cstdint>

namespace cutlass_ops::emulate {

// The number in the low or the high half of a register, read as fp16.
inline double half(uint32_t reg, int high) {
  uint32_t const bits = high ? reg >> 16 : reg & 0xffff;
  int const exponent = int(bits >> 10 & 31), mantissa = int(bits & 1023);
  double const magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

// The same, read as bf16.
inline double bfloat16(uint32_t reg, int high) {
  uint32_t const bits = high ? reg >> 16 : reg & 0xffff;
  int const exponent = int(bits >> 7 & 255), mantissa = int(bits & 127);
  double const magnitude =
      exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
  return bits >> 15 ? -magnitude : magnitude;
}

}  // namespace cutlass_ops::emulate
