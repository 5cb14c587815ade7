// How one product a window of tiles of K makes good the zero points of activations: for dispatch/, correct_zeros.cu and wgmma_gemm_a8.cu.
//
// Meanwhile fp32 sums hold zero points, and round by some 2^-24 of what these come to. A zero point is at most 128 steps of its block's scale, and codes are
// rounded to one: beside weights of both signs the sums' rounding is about 1e-4 of what that costs y. It may be more than the last bits of a result in fp32,
// which is made in another way (wgmma_gemm_a8.cu).
//
// Of a tile of K, 128 columns, y lacks -(zA sA) (sW sum of the codes of W): an outer product of what tokens and rows have there, so that those of many tiles are
// one matrix product over these. Zero points zW of 8-bit weights, which do not fit in int8 once they are taken from the codes, are compensated by the same
// product: with symmetric x, y lacks -(sA sum of the codes of x) (sW zW). Both factors are split into two fp16 numbers, the second of which holds what the first rounds off, and three products of these
// are as good as one in fp32. Powers of two, one for each row and one for each token and kTilesPerZeroRow tiles, bring them into fp16's range.
//
//   rows     sW sum of the codes, or sW zW of 8-bit weights with zero points. PackedWeight::sums: of each slab of 64 and window a chunk as large as a tile's codes, in the order of wgmma's fragments: [warp][16 tiles][first,
//            second][lane][8 halves]; sum_scales: the powers of two, a group vector of scale_type
//   tokens   zA sA, or sA sum of the codes where x is symmetric. QuantizedActivations::zero_values [m][zero_columns(k)]: of 16 tiles the first parts, then the second, and so on; zero_scales [zero rows][stride]
#pragma once

#include <cstdint>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

constexpr int kTilesPerZeroRow = 32;  // tiles of K whose zero values of a token take 128 bytes
constexpr int kZeroRow = 64;          // halves in these

// Tiles of K in a window: the sums of 64 rows take as many bytes as a tile's codes.
constexpr int correction_window(int bits) { return 4 * bits; }
// Windows of so many tiles of K, of which the last may be short.
constexpr int correction_windows(int64_t tiles, int bits) {
  return int((tiles + correction_window(bits) - 1) / correction_window(bits));
}

constexpr int64_t zero_rows(int64_t k) {
  int64_t const tiles = padded_k(k) / kKPerTile;
  return (tiles + kTilesPerZeroRow - 1) / kTilesPerZeroRow;
}
constexpr int64_t zero_columns(int64_t k) { return zero_rows(k) * kZeroRow; }

// The column sums of a weight lie in one piece of memory that starts on 16 bytes: PackedWeight::sums, then sum_scales, then row_sums.
inline int64_t sums_bytes(PackedWeight const& w) {
  return padded_rows(w.n) / kRowsPerSlab * correction_windows(padded_k(w.k) / kKPerTile, w.bits) * chunk_bytes(w.bits);
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
  w->row_sums = reinterpret_cast<float const*>(sums + sums_bytes(*w) + sum_scales_bytes(*w));
}

}  // namespace cutlass_ops
