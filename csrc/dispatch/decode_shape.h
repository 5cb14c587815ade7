// How the decode kernels divide a product over the GPU: clusters of CTAs that share K.
#pragma once

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "formats/width.h"

namespace cutlass_ops {

// ---- decode_gemm

// The most warps of a CTA; 8 where more would need too much memory, or leave no room for the next
// launch's CTA if a CTA's part of the product is small. `table`: codes are looked up in shared
// memory.
constexpr int decode_warps(bool table) { return table ? 12 : 8; }
constexpr int decode_stages(bool table) { return table ? 2 : 3; }  // of each warp's ring
// Additional stages for int8 activations where a CTA leaves no room for one of the next launch:
// more weights are then in flight while a long x is quantised. 8-bit weights need none.
constexpr int decode_more_stages(int bits) { return ByWidth<int>(2, 0)[bits]; }
// Columns that a warp takes at a time.
constexpr int decode_piece_columns(int bits) { return ByWidth<int>(128, 64)[bits]; }
// Floats of a row of x in a slot: the sums of a row panel, and four more to avoid bank conflicts.
constexpr int kSlotFloats = kRowsPerPanel + 4;

// The shape of least time; cluster is 0 if none fits.
DecodeShape decode_shape(GemmProblem const& problem, Device const& device);
DecodeMemory decode_memory(GemmProblem const& problem, DecodeShape const& shape);

// ---- wgmma_decode

static_assert(WgmmaDecodeShape::unit(false) == kRowsPerPanel);

// `quantizes`: the CTAs quantise x themselves. `one_cta`: one CTA per SM. `folds`: the shape is for
// wgmma_decode_fold16. `slices`: the number of slices of K, which the warpgroups of a CTA do not
// cut further; 0: the number with the least time. `block_m`: rows of x of a tile.
WgmmaDecodeShape wgmma_decode_shape(GemmProblem const& problem, Device const& device,
                                    bool quantizes, bool one_cta, bool folds, int slices,
                                    int block_m = WgmmaDecodeShape::kBlockM);

}  // namespace cutlass_ops
