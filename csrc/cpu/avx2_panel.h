// A panel's product on CPUs with AVX2 or more: Four and Eight are the tiles of integers with
// weights of 4 and of 8 bits.
#pragma once

#include "cpu/avx2_rows.h"
#include "cpu/avx2_tiles.h"

namespace cutlass_ops {
namespace {

// Other products take the rows of x one by one.
bool tiled(CpuProduct const& p) { return p.m > 1 && (p.has_floats || p.block <= kColumnsOf32Bits); }

template <class Four, class Eight>
void multiply(CpuProduct const& p, int panel, int first, int rows) {
  KeepDenormals const keep;
  if (!tiled(p)) {
    for (int m = first; m < first + rows; ++m) multiply_row(p, panel, m);
    return;
  }
  if (p.has_floats) {
    return with_format(p, [&](auto format) {
      multiply_tiles<FloatTiles<decltype(format)>>(p, panel, first, rows);
    });
  }
  return p.weight.bits == 4 ? multiply_tiles<IntegerTiles<Four>>(p, panel, first, rows)
                            : multiply_tiles<IntegerTiles<Eight>>(p, panel, first, rows);
}

template <class Four, class Eight>
CpuKernels::IntegerOrder integer_order(CpuProduct const& p) {
  bool const four = p.weight.bits == 4;
  if (tiled(p)) {
    bool const centred = four ? Four::kCentred : Eight::kCentred;
    return {64, 64, centred, centred ? half_column : byte_column};
  }
  return four ? CpuKernels::IntegerOrder{64, 64, false, column4}
              : CpuKernels::IntegerOrder{32, 64, true, column8};
}

}  // namespace
}  // namespace cutlass_ops
