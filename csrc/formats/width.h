// The widths of stored codes (layout.h): 2 bits, two columns in a nibble, 4 bits, with rows g and
// g + 8 in a byte, and 8.
#pragma once

#include "cutlass_ops/layout.h"

namespace cutlass_ops {

template <int kBits_>
struct Width {
  static constexpr int kBits = kBits_;
};
using HalfNibbles = Width<2>;
using Nibbles = Width<4>;
using WholeBytes = Width<8>;

constexpr bool is_code_width(int bits) {
  return bits == HalfNibbles::kBits || bits == Nibbles::kBits || bits == WholeBytes::kBits;
}

// Calls `function` with the width of so many bits.
template <class Function>
auto with_width(int bits, Function const& function) {
  return bits == HalfNibbles::kBits ? function(HalfNibbles())
         : bits == Nibbles::kBits   ? function(Nibbles())
                                    : function(WholeBytes());
}

// The same of kernels that take codes of 2 bits as nibbles.
template <class Function>
auto with_nibbles_or_bytes(int bits, Function const& function) {
  return bits == WholeBytes::kBits ? function(WholeBytes()) : function(Nibbles());
}

// Values that were measured or chosen for each width, by its bits: a missing width does not
// compile. Codes of 2 bits are loaded and decoded as nibbles are, and have their values.
template <class T>
class ByWidth {
 public:
  constexpr ByWidth(T nibbles, T whole_bytes) : nibbles_(nibbles), whole_bytes_(whole_bytes) {}
  constexpr T operator[](int bits) const {
    return bits == WholeBytes::kBits ? whole_bytes_ : nibbles_;
  }

 private:
  T nibbles_, whole_bytes_;
};
// The place of a width in tables by width.
constexpr int kWidths = 2;
constexpr int width_index(int bits) { return ByWidth<int>(0, 1)[bits]; }

}  // namespace cutlass_ops
