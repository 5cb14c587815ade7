// The interface of the kernel files to dispatch/ and ops.cpp: tiles, and one launch function for
// each kernel, with host types only.
#pragma once

#include "cutlass_ops/awq.h"
#include "cutlass_ops/flat_4bit.h"
#include "dispatch/grouped.h"
#include "dispatch/spec.h"

namespace cutlass_ops {

// ---- the product

// Shared memory that a CTA has on every GPU since sm_80, and on Hopper.
constexpr int kPortableSharedBytes = 99 * 1024, kHopperSharedBytes = 227 * 1024;

// Rows of x of a tile of mma_gemm_a16 and mma_gemm_a8 with groups of 16, at most.
constexpr int kMmaRowsOfGroupsOf16 = 32;
// With split-K slices of experts' products it is less, as adding the slices needs registers, too.
constexpr int kMmaRowsOfSlices = 16;

// mma_gemm_a16.cu: fp16 or bf16 activations, tensor cores through mma.sync (sm_80 and later).
constexpr Tile mma_gemm_a16_tile(int bits, int block_m) {
  constexpr ByWidth<int> kStages16(3, 4), kCtas16(4, 2);  // of 16 rows of x
  return {128, block_m, block_m == 16 ? kStages16[bits] : 3,
          block_m == 16   ? kCtas16[bits]
          : block_m == 32 ? 3
                          : 2,
          kPortableSharedBytes};
}
// Stages of a product, which may leave too little shared memory for the tile's: `general` as in
// its Config, `table` the bytes of the format's look-up table.
constexpr int mma_gemm_a16_stages(int bits, int block_m, bool general, int table) {
  constexpr ByWidth<bool> kShortOfMemory(false, true);
  bool const few = table > 0 || (general && kShortOfMemory[bits]);
  return block_m == 64 && few ? 2 : mma_gemm_a16_tile(bits, block_m).stages;
}
// Whether there is also an instance with two stages, which the plan may choose.
constexpr bool mma_gemm_a16_may_have_two_stages(int bits, int block_m, bool general) {
  return block_m == 64 && !general && ByWidth<bool>(false, true)[bits];
}
Status launch_mma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                           Stream stream);
// For experts; `route` has stored their tiles.
Status launch_grouped_mma_gemm_a16(GroupedGemm const& problem, Plan const& plan, Stream stream);

// book_gemm_a16.cu: fp16 or bf16 activations, weights of a code book, a few rows of x.
constexpr Tile book_gemm_a16_tile() { return {512, 4, 2, 2, kPortableSharedBytes}; }
Status launch_book_gemm_a16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                            Stream stream);

// mma_gemm_a8.cu: int8 activations, sm_80 and later.
constexpr Tile mma_gemm_a8_tile(int bits, int block_m) {
  constexpr ByWidth<int> kStages16(3, 4), kCtas16(4, 2), kStages32(4, 3);  // by rows of x
  switch (block_m) {
    case 16:
      return {128, 16, kStages16[bits], kCtas16[bits], kPortableSharedBytes};
    case 32:
      return {128, 32, kStages32[bits], 3, kPortableSharedBytes};
    default:
      return {128, block_m, 3, 2, kPortableSharedBytes};
  }
}
Status launch_mma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                          Stream stream);
// For experts; rows of x and their scales are in slots.
Status launch_grouped_mma_gemm_a8(GroupedGemm const& problem, Plan const& plan, Stream stream);

// wgmma_gemm_a8.cu: int8 activations on Hopper (sm_90a alone), clusters of two CTAs.
// `warpgroups`: of a CTA, that multiply. Four have half the registers of two, for no more than 64
// rows of x, and kFourWarpgroups. 144 rows are for activations without zero points, 256 for int32
// sums over all of K, which need no second set of sums.
constexpr ByWidth<bool> kFourWarpgroups(true, false);
// The warpgroups of a tile for experts.
constexpr int grouped_warpgroups(int bits, int block_m) {
  return block_m == 64 && kFourWarpgroups[bits] ? 4 : 2;
}
constexpr Tile wgmma_gemm_a8_tile(int bits, int block_m, int warpgroups = 2,
                                  bool quantizes = false) {
  int const few_rows = ByWidth<int>(warpgroups == 4 ? 8 : 10, 9)[bits];
  int stages = block_m >= 128 ? 4 : block_m >= 64 ? 6 : few_rows;
  if (quantizes) stages = ByWidth<int>(6, 4)[bits];
  return {128 * warpgroups, block_m, stages, 1, kHopperSharedBytes, 2};
}
// Rows of x of a CTA that quantises them itself, in blocks of a K tile's columns.
constexpr int kQuantizingHeight = 96;
// K tiles of rows with one scale that a CTA quantises: all of them are in its stages, and so are
// those of the next rows. So few are never cut into slices.
constexpr int kMostQuantizedRowTiles = 2;
Status launch_wgmma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                            Stream stream);
// For experts: tile heights are kGroupedInt8Heights.
Status launch_grouped_gemm_a8(GroupedGemm const& problem, Plan const& plan, Stream stream);

// wgmma_gemm_a16.cu: fp16 or bf16 activations, groups of 128 or more without offsets, in clusters
// of two CTAs. Four warpgroups are for 64 rows, kFourWarpgroups, and scales of x's type.
constexpr Tile wgmma_gemm_a16_tile(int bits, int block_m, int warpgroups = 2) {
  constexpr ByWidth<int> kStages128(4, 3);  // of 128 and 144 rows of x
  int stages = block_m == 32   ? 6
               : block_m == 64 ? 5
               : block_m == 96 ? 4
               : block_m < 160 ? kStages128[bits]
                               : 3;
  return {128 * warpgroups, block_m, stages, 1, kHopperSharedBytes, 2};
}
Status launch_wgmma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                             Stream stream);
// For experts: tile heights are those of kGroupedHeights from kLeastExactHeight on.
Status launch_grouped_gemm_a16(GroupedGemm const& problem, Plan const& plan, Stream stream);

// wgmma_fold16.cuh: 16-bit activations x weights of every format, rounded once to their type;
// clusters of two CTAs. `stages`: those of weights. `narrow`: scales and offsets are of x's type;
// others need more registers.
constexpr Tile wgmma_fold16_tile(int block_m, int bits, bool narrow = true) {
  constexpr ByWidth<int> kStages(4, 3);
  int const warpgroups = block_m <= (narrow ? 96 : 64) ? 4 : block_m <= 144 ? 3 : 2;
  return {128 * warpgroups, block_m, block_m == 256 ? 2 : kStages[bits], 1, kHopperSharedBytes, 2};
}
template <class Format>
Status launch_wgmma_fold16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                           Stream stream);

// For experts: tile heights are kGroupedHeights.
template <class Format>
Status launch_grouped_fold16(GroupedGemm const& problem, Plan const& plan, Stream stream);

// decode_gemm.cu: up to 8 rows of x, clusters that split K. 8 rows leave room for the next launch's
// CTAs. (Stages are the plan's.)
constexpr Tile decode_gemm_tile(int block_m) {
  return {64, block_m, 2, block_m == 8 ? 2 : 1, kPortableSharedBytes};
}
Status launch_decode_gemm(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                          Stream stream);

// wgmma_decode.cu: up to 32 rows of x on Hopper (sm_90a alone), clusters that split K; two CTAs per
// SM or, where kDecodesWithOneCta, one with as much memory.
constexpr ByWidth<bool> kDecodesWithOneCta(false, true);
constexpr Tile wgmma_decode_tile(int ctas_per_sm, int block_m = WgmmaDecodeShape::kBlockM) {
  return {kRowsPerPanel, block_m, 2, ctas_per_sm, kHopperSharedBytes};
}
Status launch_wgmma_decode(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                           Stream stream);
// wgmma_decode_grouped.cu: of experts, a tile of 16 rows after another, where
// decodes_exactly() says so.
Status launch_grouped_decode(GroupedGemm const& problem, Plan const& plan, Stream stream);

// wgmma_decode_fold16.cuh: as wgmma_decode.cu, weights of every format rounded once to the type of
// x; two CTAs per SM.
template <class Format>
Status launch_wgmma_decode_fold16(GemmProblem const& problem, Plan const& plan,
                                  float* splitk_workspace, Stream stream);
template <class Format>
Status launch_grouped_decode_fold16(GroupedGemm const& problem, Plan const& plan, Stream stream);

// ---- before and after it

// splitk_reduce.cu: add the slices of K in their order and apply the epilogue.
Status launch_splitk_reduce(GemmProblem const& problem, int slices, float const* splitk_workspace,
                            Stream stream);

// gate_sums.cu: add the slices of K, [slices][m][stride], in their order, and make the outputs of a
// gated weight; one slice is the sums of the product.
Status launch_gate_sums(GemmProblem const& problem, int slices, int stride, float const* sums,
                        Stream stream);

// quantize_activations.cu
struct QuantizerStart {
  bool early = false;  // the next kernel may start before those before this one have ended
  bool spread = true;  // few CTAs take shared memory that they do not use, so that not
                       // many share an SM
};
Status launch_quantize_activations(QuantizeProblem const& problem, Stream stream,
                                   QuantizerStart start = {});

// The range of all x to problem.range, for the quantiser after it.
Status launch_find_range(QuantizeProblem const& problem, bool symmetric, Stream stream);

// The codes alone, by the range of all x: `columns` of a row, k rounded up to a multiple of 16.
Status launch_quantize_codes(QuantizeProblem const& problem, int columns, bool symmetric,
                             Stream stream);

// quantized_values.cu: as quantized_values(); of one range, if problem.range has it
Status launch_quantized_values(QuantizedValues const& problem, Stream stream);
// quantize_activations.cu: the same for 16-bit outputs of rows of whole pieces, which start on 16
// bytes. If a row has one scale, there are more than 16 rows of at most 32 pieces.
Status launch_quantized_pieces(QuantizedValues const& problem, Stream stream);

// compensate_zeros.cu: problem.quantized.zero_values and zero_scales
Status launch_compensate_zeros(GemmProblem const& problem, Stream stream);

// upcast_activations.cu: problem.quantized.upcast, of quantised activations or, where
// these are none, of x
Status launch_upcast_activations(GemmProblem const& problem, Stream stream);

// ---- other operators

// conv_depthwise.cu: as depthwise_conv()
Status launch_conv_depthwise(GemmProblem const& problem, float const* taps, Stream stream);

// finish_sums.cu: as finish_sums()
Status launch_finish_sums(GemmProblem const& problem, void const* sums, Stream stream);

// route.cu: as route(); the slots of positions and their tiles; rows of x to their slots, `rows` at
// most; and the weighted sums of rows [slots][n] to y. The last two take positions for slots where
// `slots` is empty.
Status launch_route(RouteProblem const& problem, Routing const& routing, Stream stream);
Status launch_assign_slots(RouteProblem const& problem, RowSlots const& slots, Stream stream);
Status launch_gather_rows(RouteProblem const& route, RowSlots const& slots,
                          GatherProblem const& problem, int rows, Stream stream);
Status launch_sum_experts(RouteProblem const& route, RowSlots const& slots, void const* rows,
                          DataType row_type, int n, void const* weights, DataType weight_type,
                          void* out, DataType out_type, Stream stream);

// weight_colsum.cu: sums of codes or, with `of_zeros`, the zero points of an asymmetric weight.
// `follows`: the previous kernel belongs to the same call and launches its dependents when all
// earlier kernels have ended; then this one runs concurrently with it.
Status launch_weight_colsum(PackedWeight const& weight, bool of_zeros, bool follows, void* colsums,
                            Stream stream);

// flat_4bit.cu
Status launch_quantize_flat(FlatProblem const& problem, Stream stream);
Status launch_dequantize_flat(FlatProblem const& problem, Stream stream);

// awq.cu
Status launch_dequantize_awq(AwqWeight const& weight, void* out, Stream stream);
Status launch_awq_gemm(AwqWeight const& weight, void const* x, int64_t x_stride, int m, void* out,
                       Stream stream);

// pack.cu
Status launch_pack(PackProblem const& problem, Stream stream);
Status launch_unpack(PackProblem const& problem, Stream stream);

// dequantize.cu
Status launch_dequantize(DequantizeProblem const& problem, Stream stream);

}  // namespace cutlass_ops
