// A panel's product on CPUs with AVX2 or more. Tiles::Of<Width>: the tiles of integers with weights
// of a width.
#pragma once

#include "cpu/avx2_rows.h"
#include "cpu/avx2_tiles.h"

namespace cutlass_ops {
namespace {

// Other products process the rows of x one by one.
bool tiled(CpuProduct const& p) { return p.m > 1 && (p.has_floats || p.block <= kColumnsOf32Bits); }

template <class Tiles>
void multiply(CpuProduct const& p, int panel, int first, int rows) {
  KeepDenormals const keep;
  if (!tiled(p)) {
    for (int m = first; m < first + rows; ++m) multiply_row(p, panel, m);
    return;
  }
  if (p.has_floats) {
    return visit(p.weight.format, [&](auto format) {
      multiply_tiles<FloatTiles<decltype(format)>>(p, panel, first, rows);
    });
  }
  with_width(info(p.weight.format).bits, [&](auto width) {
    using Codes = typename Tiles::template Of<decltype(width)>;
    multiply_tiles<IntegerTiles<Codes>>(p, panel, first, rows);
  });
}

template <class Tiles>
CpuKernels::IntegerOrder integer_order(CpuProduct const& p) {
  return with_width(info(p.weight.format).bits, [&](auto width) {
    using W = decltype(width);
    constexpr bool kCentred = Tiles::template Of<W>::kCentred;
    if (tiled(p))
      return CpuKernels::IntegerOrder{64, 64, kCentred, kCentred ? half_column : byte_column};
    return CpuKernels::IntegerOrder{unit_k(W::kBits), 64, RowProducts<W>::kCentred,
                                    fragment_column<W::kBits>};
  });
}

}  // namespace
}  // namespace cutlass_ops
