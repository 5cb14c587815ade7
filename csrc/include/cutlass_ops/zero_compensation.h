// Zero-point compensation (azp): y = sA sW (acc - zA colsum(W)), as one extra product for a window
// of K tiles. For dispatch/, compensate_zeros.cu and wgmma_gemm_a8.cu.
//
// Until that product the fp32 accumulators hold zero points, and round to about 2^-24 of their
// contribution. A zero point is at most 128 times its block's scale, and codes are rounded to one:
// with weights of both signs this rounding is about 1e-4 of the error that quantisation adds to y.
// It may exceed the last bits of an fp32 result, which is therefore computed another way
// (wgmma_gemm_a8.cu).
//
// For each K tile (128 columns) y lacks -(zA sA) (sW colsum(W)), an outer product over rows of x
// and output features; many tiles of it are one matrix product over the tiles. Zero points zW of
// 8-bit weights, which do not fit in int8 when subtracted from the codes, are compensated by the
// same product: with symmetric x, y lacks -(sA sum of the codes of x) (sW zW). Both factors are
// split into two fp16 numbers, the second of which holds the rounding error of the first, and three
// products of these are as accurate as one in fp32. Powers of two, one for each output feature and
// one for each row of x and kTilesPerZeroRow tiles, bring them into fp16's range.
//
//   W side   sW colsum(W), or sW zW of 8-bit weights with zero points. PackedWeight::sums has a
//            block for each row panel (64 rows) and window, as large as a K tile's codes, in the
//            order of wgmma's fragments: [warp][16 tiles][first, second][lane][8 halves];
//            sum_scales: the powers of two, a group vector of scale_type
//   x side   zA sA, or sA sum of the codes where x is symmetric. QuantizedActivations::zero_values
//            [m][zero_columns(k)]: the first parts of 16 tiles, then the second, and so on;
//            zero_scales [zero rows][stride]
#pragma once

#include <cstdint>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

constexpr int kTilesPerZeroRow = 32;  // K tiles whose zero values of a row of x take 128 bytes
constexpr int kZeroRow = 64;          // halves in that row

// K tiles in a window: the column sums of a row panel take as many bytes as a tile's codes.
constexpr int compensation_window(int bits) { return 4 * bits; }
// Number of windows; the last may be short.
constexpr int compensation_windows(int64_t tiles, int bits) {
  return int((tiles + compensation_window(bits) - 1) / compensation_window(bits));
}

constexpr int64_t zero_rows(int64_t k) {
  int64_t const tiles = padded_k(k) / kKPerTile;
  return (tiles + kTilesPerZeroRow - 1) / kTilesPerZeroRow;
}
constexpr int64_t zero_columns(int64_t k) { return zero_rows(k) * kZeroRow; }

// The column sums of a weight are one allocation, aligned to 16 bytes: PackedWeight::sums, then
// sum_scales, then total_colsum.
inline int64_t sums_bytes(PackedWeight const& w) {
  int const bits = info(w.format).bits;
  return padded_rows(w.n) / kRowsPerPanel * compensation_windows(padded_k(w.k) / kKPerTile, bits) *
         k_tile_bytes(bits);
}
inline int64_t sum_scales_bytes(PackedWeight const& w) {
  return padded_rows(w.n) * (w.scale_type == DataType::kFloat32 ? 4 : 2);
}
inline int64_t colsum_bytes(PackedWeight const& w) {
  return sums_bytes(w) + sum_scales_bytes(w) + padded_rows(w.n) * int64_t(sizeof(float));
}
inline void place_colsums(PackedWeight* w, void const* memory) {
  auto const* const sums = static_cast<uint8_t const*>(memory);
  w->sums = sums, w->sum_scales = sums + sums_bytes(*w);
  w->total_colsum = reinterpret_cast<float const*>(sums + sums_bytes(*w) + sum_scales_bytes(*w));
}

}  // namespace cutlass_ops
