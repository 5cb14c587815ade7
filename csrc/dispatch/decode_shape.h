// How the decode kernels divide a product over the GPU: clusters of CTAs that share K.
#pragma once

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "formats/width.h"

namespace cutlass_ops {

// ---- decode_gemm

// Warps of a CTA, at most: or 8, where those need too much memory, or leave no room for the next
// launch's CTA in a small part of a product. `table`: codes are looked up in shared memory.
constexpr int decode_warps(bool table) { return table ? 12 : 8; }
constexpr int decode_stages(bool table) { return table ? 2 : 3; }  // of each warp's ring
// What is added to them, all or nothing, with int8 activations where a CTA leaves no room for
// one of the next launch: weights are in flight while a long x is quantised. 8-bit ones take
// long enough without.
constexpr int decode_more_stages(int bits) { return ByWidth<int>(2, 0)[bits]; }
// Of a row of x in a slot, the sums of a row panel: four more keep lanes on different banks.
constexpr int kSlotFloats = kRowsPerPanel + 4;

// The shape of least time; cluster is 0 if none fits.
DecodeShape decode_shape(GemmProblem const& problem, Device const& device);
DecodeMemory decode_memory(GemmProblem const& problem, DecodeShape const& shape);

// ---- wgmma_decode

static_assert(WgmmaDecodeShape::unit(false) == kRowsPerPanel);

// `quantizes`: the CTAs quantise x themselves. `one_cta`: one CTA per SM. `folds`:
// wgmma_decode_fold16's. `slices`: that K is cut into, a CTA's by none of its warpgroups; 0: as many
// as take least time.
WgmmaDecodeShape wgmma_decode_shape(GemmProblem const& problem, Device const& device,
                                    bool quantizes, bool one_cta, bool folds, int slices);

}  // namespace cutlass_ops
