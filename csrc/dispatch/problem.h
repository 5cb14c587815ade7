// Properties of a problem, for dispatch, the launchers and the kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/problem.h"
#include "formats/width.h"

namespace cutlass_ops {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int bytes_of(DataType type) {
  return type == DataType::kFloat32 ? 4 : type == DataType::kInt8 ? 1 : 2;
}
constexpr int log2_bytes_of(DataType type) { return bytes_of(type) / 2; }
// The offset of the next part of a workspace.
constexpr size_t align_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The activation block for weights in groups of group_size.
constexpr int activation_block(int group_size) {
  return group_size == -1 || group_size > 128 ? 128 : group_size;
}

inline int64_t padded_size(PackedWeight const& w) { return padded_rows(w.n) * padded_k(w.k); }
inline int64_t k_tiles(PackedWeight const& w) { return ceil_div(w.k, kKPerTile); }
inline int code_bits(PackedWeight const& w) { return info(w.format).bits; }
// Whether codes fill nibbles or share them, for choices that were measured for each width.
inline bool has_nibbles(PackedWeight const& w) { return ByWidth<bool>(true, false)[code_bits(w)]; }
// Columns of a product's result.
inline int outputs(PackedWeight const& w) { return w.gated ? w.n / 2 : w.n; }
inline bool has_integer_codes(PackedWeight const& w) { return info(w.format).integers; }
// Whether decode_gemm, wgmma_decode, wgmma_gemm_a16 and wgmma_gemm_a8 have instances for its codes.
inline bool has_exact_kernels(PackedWeight const& w) { return info(w.format).exact; }
// Whether the first two have for these codes and 16-bit x.
inline bool has_decode_kernels(PackedWeight const& w) { return info(w.format).decodes; }
inline bool has_codebook(PackedWeight const& w) { return info(w.format).codebook; }
inline int table_bytes(PackedWeight const& w) { return info(w.format).table_bytes; }
// Whether products with int8 activations are of codes less zero points, if there are any.
inline bool zeros_fit_int8(PackedWeight const& w) {
  return !w.zeros || info(w.format).zeros_fit_int8;
}
inline bool is_short_group(int group_size) {
  return group_size == 16 || group_size == 32 || group_size == 64;
}
inline bool has_short_groups(PackedWeight const& w) { return is_short_group(w.group_size); }
// Whether weights may have groups of so many columns; -1: a group a row.
inline bool is_group_size(int group_size) {
  return group_size == -1 || is_short_group(group_size) ||
         (group_size > 0 && group_size % kKPerTile == 0);
}

// Whether scales have x's type.
inline bool has_own_scales(PackedWeight const& w, DataType x_type) {
  return w.scale_type == x_type;
}
// Whether kernels that round weights apply scales and offsets in x's type, which both have.
inline bool has_narrow_scales(PackedWeight const& w, DataType x_type) {
  return has_own_scales(w, x_type) && (!w.offsets || w.offset_type == x_type);
}

// Whether a K tile of wgmma_fold16 has room for scales, offsets and zero points: groups of 16
// columns may only have scales or, of codes of 2 bits, fp32 scales and offsets.
inline bool fits_fold16(PackedWeight const& w) {
  bool const wide_of_2_bits = code_bits(w) == 2 && w.scale_type == DataType::kFloat32;
  return w.group_size != 16 || (!w.zeros && (!w.offsets || wide_of_2_bits));
}

// Whether sums of codes are exact in wgmma's fp32 and scaled once a tile of K.
inline bool multiplies_exactly(PackedWeight const& w) {
  return !has_short_groups(w) && !w.offsets && has_exact_kernels(w);
}

// Whether x is an image, whose pixels in memory are rows of a matrix; and the number of rows and
// columns of that matrix.
inline bool is_image(GemmProblem const& problem) { return problem.image.batch > 0; }
inline int64_t stored_rows(GemmProblem const& problem) {
  ImageRows const& image = problem.image;
  return is_image(problem) ? int64_t(image.batch) * image.size[0] * image.size[1] * image.size[2]
                           : problem.m;
}
inline int stored_columns(GemmProblem const& problem) {
  return is_image(problem) ? problem.image.channels : problem.weight.k;
}

// Whether activations are multiplied as int8: quantised before, or in the call.
inline bool multiplies_int8(GemmProblem const& problem) {
  return problem.act_quant != ActQuant::kNone || problem.quantized.codes;
}
// Whether the int8 activations have zero points.
inline bool activations_have_zeros(GemmProblem const& problem) {
  return multiplies_int8(problem) &&
         (problem.quantized.codes ? problem.quantized.zeros != nullptr : !problem.act_symmetric);
}
// Products of int8 codes that an int32 sum holds: codes of the weight reach 128 on one side, and
// those of x on the other too or, less their zero points, 255.
constexpr int most_summed_codes(bool x_has_zeros) { return x_has_zeros ? 65535 : 131071; }

// Whether int32 sums of an image's products may run over all taps: all pixels have one scale, and a
// row of the weight has one.
inline bool sums_all_taps(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  return problem.act_quant == ActQuant::kTensor && w.group_size == -1 && !w.zeros &&
         w.k <= most_summed_codes(false);
}
// Whether activations have a scale for each block. A pixel's scale is used by each tap that covers
// the pixel.
inline bool activations_have_blocks(GemmProblem const& problem) {
  if (is_image(problem)) return multiplies_int8(problem) && !sums_all_taps(problem);
  return problem.quantized.codes ? problem.quantized.block != -1
                                 : problem.act_quant == ActQuant::kBlock;
}
// Whether the call quantises x, and whether with one scale a row.
inline bool quantizes_x(GemmProblem const& problem) {
  return problem.act_quant != ActQuant::kNone && !problem.quantized.codes;
}
inline bool quantizes_rows(GemmProblem const& problem) {
  return problem.act_quant == ActQuant::kToken && quantizes_x(problem);
}

// Whether int32 sums of int8 products run over all of K: no scale is a group's or a block's,
// and none overflows.
inline bool sums_whole_rows(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  return multiplies_int8(problem) && !activations_have_blocks(problem) && w.group_size == -1 &&
         !w.zeros && w.k <= most_summed_codes(activations_have_zeros(problem));
}

// Whether int32 sums run over a tap of an image, whose pixels have one scale: only over several K
// tiles, since nothing is saved with one.
inline bool sums_whole_taps(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  bool const pixel_scales =
      problem.act_quant == ActQuant::kToken || problem.act_quant == ActQuant::kTensor;
  return is_image(problem) && pixel_scales && !sums_all_taps(problem) &&
         !activations_have_zeros(problem) && w.group_size == -1 && !w.zeros &&
         problem.image.channels > kKPerTile && problem.image.channels <= most_summed_codes(false);
}

// Whether zero points of the weight, in groups of 128 or more, are compensated for many blocks
// at once (zero_compensation.h), where x is symmetric with a scale a block and the result is of
// 16 bits: this takes enough rows of x to pay for the launch that makes the terms. For fewer rows,
// zero points of int4 are subtracted from the codes; 8-bit codes minus zero points would not fit in
// int8, so wgmma_fold16 multiplies them.
inline bool compensates_weight_zeros(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  return w.zeros && has_exact_kernels(w) && !is_image(problem) && !has_short_groups(w) &&
         problem.m >= (zeros_fit_int8(w) ? 129 : 65) && multiplies_int8(problem) &&
         activations_have_blocks(problem) && !activations_have_zeros(problem) &&
         !problem.batch_invariant && !problem.exact && problem.out_type != DataType::kFloat32;
}

// Whether wgmma_gemm_a8 takes the weight: a promotion for each 128 columns or more by scales only,
// and codes minus zero points that fit int8.
inline bool has_int8_products(PackedWeight const& w) {
  return has_exact_kernels(w) && !has_short_groups(w) && !w.offsets && zeros_fit_int8(w);
}

// Whether the last cluster's second CTA would have no features if clusters were along N.
inline bool leaves_a_cta_idle(GemmProblem const& problem) {
  constexpr int kBlockN = 256;
  return (padded_rows(problem.weight.n) - 1) % kBlockN < kBlockN / 2;
}

// Whether a matrix is faster as an image whose kernel is one pixel: with few features on Hopper,
// since wgmma_gemm_a8 has clusters along M for one scale a pixel, but for one a row only where
// int32 sums run over all of K (docs/tuning-notes.md).
inline bool is_faster_as_image(GemmProblem const& problem, Device const& device) {
  constexpr int kManyRows = 1024;
  PackedWeight const& w = problem.weight;
  return device.architecture == 90 && problem.act_quant == ActQuant::kToken &&
         problem.act_symmetric && !w.zeros && !w.perm && has_int8_products(w) &&
         w.group_size != -1 && problem.m >= kManyRows && leaves_a_cta_idle(problem);
}

// Whether a tensor map cannot describe x: it needs 16-byte boundaries and no gathering.
inline bool is_irregular(GemmProblem const& problem) {
  return problem.weight.perm || reinterpret_cast<uintptr_t>(problem.x) % 16 != 0 ||
         problem.x_stride % 8 != 0 || problem.x_stride < stored_columns(problem);
}

// The rank of the tensor map by which TMA's im2col mode collects the pixels under a tap, channels
// and batch included; 0 if it cannot: it takes strides up to 8, and offsets in a byte, or of
// volumes in five bits.
inline int im2col_rank(ImageRows const& image) {
  int const rank = image.size[0] == 1 && image.taps[0] == 1 && image.padding[0] == 0 ? 4 : 5;
  int const limit = rank == 4 ? 128 : 16;
  for (int axis = 5 - rank; axis < 3; ++axis) {
    int const reach = image.dilation[axis] * (image.taps[axis] - 1);
    if (image.stride[axis] > 8 || image.padding[axis] > limit || reach >= 2 * limit ||
        image.padding[axis] - reach < -limit || image.padding[axis] - reach >= limit)
      return 0;
  }
  return rank;
}

// Whether weights, and the values of int8 activations, may be rounded to 16 bits: the result is
// rounded to the type of x, and exact is not set.
inline bool may_round(GemmProblem const& problem) {
  return !problem.exact && problem.out_type != DataType::kFloat32 &&
         problem.out_type == problem.x_type;
}

}  // namespace cutlass_ops
