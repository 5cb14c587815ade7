// The list of formats, each with one header, and the functions that dispatch on a format. A header
// has
//
//   kFormat, kName, kBits; kCodes: in messages
//   kIntegers       there may be zero points or offsets, and x of int8; kZerosFitInt8: codes less
//                   zero points are int8
//   kDecodes        decode_gemm and wgmma_decode have instances for its integers and 16-bit x
//   kExact          and for int8 x, as wgmma_gemm_a16 and wgmma_gemm_a8 have; the other kernels
//                   take every format
//   kCodebook       values are PackedWeight::codebook's
//   kTableBytes     of a look-up table in a CTA's shared memory
//   Decoder, Unscaled, value  on the GPU: fragments of 16-bit floats, of values before they are
//                   multiplied by scales, in units of Decoder::kUnit, and one such value. A decoder
//                   may have bits(), bits_unit() and kBias: numbers that one FMA makes values of
//                   (device/fold.cuh)
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
using All = List<Int4, Int8, Codebook, E4m3, Int2>;

template <class Function, class First, class... More>
auto visit(Format format, Function const& function, List<First, More...>) {
  if constexpr (sizeof...(More) > 0) {
    if (format != First::kFormat) return visit(format, function, List<More...>());
  }
  return function(First());
}

// The formats of a list that `Wanted` has a true `value` for.
template <template <class> class Wanted, class Chosen, class... Formats>
struct Filtered {
  using Type = Chosen;
};
template <template <class> class Wanted, class... Chosen, class First, class... More>
struct Filtered<Wanted, List<Chosen...>, First, More...>
    : Filtered<Wanted,
               std::conditional_t<Wanted<First>::value, List<Chosen..., First>, List<Chosen...>>,
               More...> {};
template <template <class> class Wanted, class... Formats>
typename Filtered<Wanted, List<>, Formats...>::Type filter(List<Formats...>);

template <class Format>
using HasIntegers = std::bool_constant<Format::kIntegers>;
template <class Format>
using IsExact = std::bool_constant<Format::kExact>;
template <class Format>
using FillsNibbles = std::bool_constant<nibble_columns(Format::kBits) == 1>;

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
// visit() for formats whose codes are integers, for those with exact products, and for those whose
// codes fill nibbles or bytes. Each is compiled for these formats only.
template <class Function>
auto visit_integers(Format format, Function const& function) {
  using List = decltype(formats::filter<formats::HasIntegers>(formats::All()));
  return formats::visit(format, function, List());
}
template <class Function>
auto visit_exact(Format format, Function const& function) {
  using List = decltype(formats::filter<formats::IsExact>(formats::All()));
  return formats::visit(format, function, List());
}
template <class Function>
auto visit_nibbles_or_bytes(Format format, Function const& function) {
  using List = decltype(formats::filter<formats::FillsNibbles>(formats::All()));
  return formats::visit(format, function, List());
}

}  // namespace cutlass_ops
