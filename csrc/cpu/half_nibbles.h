// Codes of 2 bits become nibbles, which the kernels of each instruction set multiply: included by
// each, to be compiled for it.
#pragma once

#include <cstdint>
#include <cstring>

#include "cutlass_ops/layout.h"

namespace cutlass_ops {
namespace {

// Units of 2-bit codes to twice as many of nibbles, which are codes of the same values.
inline void expand_half_nibbles(uint8_t const* from, int64_t units, uint8_t* to) {
  constexpr uint64_t kCodes = 0x3333333333333333u, kSigns = 0x2222222222222222u;
  for (int64_t unit = 0; unit < units; ++unit, from += kUnitBytes) {
    for (int half = 0; half < 2; ++half, to += kUnitBytes) {
      for (int i = 0; i < kUnitBytes; i += int(sizeof(uint64_t))) {
        uint64_t v;
        std::memcpy(&v, from + i, sizeof v);
        v = v >> 2 * half & kCodes;
        uint64_t const signs = v & kSigns;
        v |= signs << 1 | signs << 2;
        std::memcpy(to + i, &v, sizeof v);
      }
    }
  }
}

}  // namespace
}  // namespace cutlass_ops
