// The list of formats, each with one header, and the functions that dispatch on a format. A header
// has
//
//   kFormat, kName, kBits; kCodes: in messages
//   kIntegers       there may be zero points or offsets, and x of int8; kZerosFitInt8: codes less
//                   zero points are int8
//   kCodebook       values are PackedWeight::codebook's
//   kTableBytes     of a look-up table in a CTA's shared memory
//   Decoder, Unscaled, value  on the GPU: fragments of 16-bit floats, of values before they are
//                   multiplied by scales, and one such value
//   host_value      one by its code, unless codes are integers
//   Avx2Decoder     on CPUs with AVX2
#pragma once

#include "formats/codebook.cuh"
#include "formats/e4m3.cuh"
#include "formats/integers.cuh"

namespace cutlass_ops {
namespace formats {

template <class... Formats>
struct List {};
using All = List<Int4, Int8, Codebook, E4m3>;

template <class Function, class First, class... More>
auto visit(Format format, Function const& function, List<First, More...>) {
  if constexpr (sizeof...(More) > 0) {
    if (format != First::kFormat) return visit(format, function, List<More...>());
  }
  return function(First());
}

// The formats of a list whose codes are integers.
template <class Chosen, class... Formats>
struct IntegersOf {
  using Type = Chosen;
};
template <class... Chosen, class First, class... More>
struct IntegersOf<List<Chosen...>, First, More...>
    : IntegersOf<std::conditional_t<First::kIntegers, List<Chosen..., First>, List<Chosen...>>,
                 More...> {};
template <class... Formats>
typename IntegersOf<List<>, Formats...>::Type integers_of(List<Formats...>);

}  // namespace formats

// Calls `function` with an object of each format's type.
template <class Function, class... Formats>
void for_each_format(Function const& function, formats::List<Formats...>) {
  (function(Formats()), ...);
}
template <class Function>
void for_each_format(Function const& function) {
  for_each_format(function, formats::All());
}
// Calls `function` with an object of the format's type. It is compiled for every format.
template <class Function>
auto visit(Format format, Function const& function) {
  return formats::visit(format, function, formats::All());
}
// visit() for formats whose codes are integers. It is compiled for these formats only.
template <class Function>
auto visit_integers(Format format, Function const& function) {
  return formats::visit(format, function, decltype(formats::integers_of(formats::All()))());
}

}  // namespace cutlass_ops
