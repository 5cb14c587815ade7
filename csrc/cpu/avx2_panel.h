// A panel's product on CPUs with AVX2 or more: of floats, and of few rows.
#pragma once

#include "cpu/avx2_rows.h"
#include "cpu/avx2_tiles.h"

namespace cutlass_ops {
namespace {

// kRowsTogether: rows of x that a kernel multiplies by codes decoded to registers. kMostFewFloats:
// rows of floats up to which it is faster than the kernel that decodes the codes once, to a tile.
constexpr int kRowsTogether = 4, kMostFewFloats = 4;
constexpr ByWidth<int> kMostFewIntegers(8, 2);

bool has_few_rows(CpuProduct const& p) {
  if (p.has_floats) return p.m <= kMostFewFloats;
  return p.m <= kMostFewIntegers[info(p.weight.format).bits] || p.block > kColumnsOf32Bits;
}

void multiply_few(CpuProduct const& p, int panel, int first, int rows) {
  for_parts<kRowsTogether>(rows, [&](int row, auto count) {
    multiply_rows<decltype(count)::value>(p, panel, first + row);
  });
}

void multiply_any_floats(CpuProduct const& p, int panel, int first, int rows) {
  if (has_few_rows(p)) return multiply_few(p, panel, first, rows);
  visit_nibbles_or_bytes(p.weight.format, [&](auto format) {
    using Format = decltype(format);
    p.fused ? multiply_tiles<FloatTiles<Format, true>>(p, panel, first, rows)
            : multiply_tiles<FloatTiles<Format, false>>(p, panel, first, rows);
  });
}

// The order of integers that multiply_few() reads.
CpuKernels::IntegerOrder order_of_few(CpuProduct const& p) {
  return with_nibbles_or_bytes(info(p.weight.format).bits, [](auto width) {
    using W = decltype(width);
    return CpuKernels::IntegerOrder{unit_k(W::kBits), 64, RowProducts<W>::kCentred,
                                    fragment_column<W::kBits>};
  });
}

}  // namespace
}  // namespace cutlass_ops
