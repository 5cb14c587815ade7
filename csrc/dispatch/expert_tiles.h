// The kernels for the products of a layer of experts, and the heights of their tiles: chosen by the
// rows of an expert on average and by measured times.
#pragma once

#include <utility>

#include "cutlass_ops/experts.h"
#include "dispatch/grouped.h"
#include "dispatch/spec.h"

namespace cutlass_ops {

// The kernel for experts of many rows: wgmma_gemm_a8, of int8 codes of x; wgmma_gemm_a16, whose
// products are exact too; or wgmma_fold16, which takes all formats and, alone, tiles of 32 rows.
enum class Loop { kInt8, kExact, kRounded };

Loop loop_of(PackedWeight const& w, bool int8, int height);
Tile tile_of(PackedWeight const& w, DataType x_type, Loop loop, int height);

// Whether tiles of more than 16 rows multiply int8 codes on Hopper, or portable ones of all heights
// do.
bool multiplies_codes(MoeProblem const& p, bool portable);
// Whether tiles of 16 rows do on Hopper.
bool decodes_codes(MoeProblem const& p);

// Whether experts have few rows, for both products: 16 a tile.
bool decodes(MoeProblem const& p, Device const& device);
// BLOCK_M of gate and up, and of down.
std::pair<int, int> tile_heights(MoeProblem const& p, Device const& device);
// The same of the portable kernels, for both.
int portable_height(MoeProblem const& p);

// The largest possible number of tiles, and one that most routings do not exceed, so that the
// choice does not miss a wave of CTAs by one tile.
int most_tiles(RouteProblem const& r, int height);
double likely_tiles(RouteProblem const& r, int height);

// A product of a layer without its addresses.
GroupedGemm product_of(PackedExperts const& experts, bool gated);

}  // namespace cutlass_ops
