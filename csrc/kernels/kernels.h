// What the kernel files offer to dispatch.cpp and ops.cpp: one launch function a kernel, pure host signatures.
#pragma once

#include "dispatch.h"

namespace cutlass_ops {

namespace formats {
struct Int4;
struct Int8;
struct Codebook;
}  // namespace formats

// mma_gemm_a16.cu: fp16 or bf16 activations, tensor cores through mma.sync (sm_80 and later).
// Blocks of up to 99 KB run on every GPU since sm_80.
constexpr Tile mma_gemm_a16_tile(int bits, int tokens) {
  int stages = tokens == 16 && bits == 8 ? 4 : 3;
  return {128, tokens, stages, tokens == 16 && bits == 4 ? 4 : tokens == 32 ? 3 : 2, 99 * 1024};
}
template <int Bits, int Tokens>
Status launch_mma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

// book_gemm_a16.cu: fp16 or bf16 activations, weights of a code book, a few tokens.
constexpr Tile book_gemm_a16_tile(int tokens) { return {512, tokens, 2, 2, 95 * 1024}; }
template <int Tokens>
Status launch_book_gemm_a16(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

// mma_gemm_a8.cu: int8 activations, likewise.
constexpr Tile mma_gemm_a8_tile(int bits, int tokens) {
  int stages = (tokens == 16 && bits == 8) || (tokens == 32 && bits == 4) ? 4 : 3;
  return {128, tokens, stages, tokens == 16 && bits == 4 ? 4 : tokens == 32 ? 3 : 2, 99 * 1024};
}
template <int Bits, int Tokens>
Status launch_mma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

// wgmma_gemm_a8.cu: int8 activations on Hopper (sm_90a alone), clusters of two blocks.
// Costs are fitted to 512 products and, sums over all of K, 264 more, timed by up to seven tiles each: the tiles chosen by them take 0.2, 0.1 and 0.1 % longer
// than the best in the mean. (Those of 32 tokens are single measurements.)
struct WgmmaInt8Tile {
  int tokens, warpgroups;
  int cost, token_cost, row_cost;
};
constexpr WgmmaInt8Tile kWgmmaInt8Tiles[] = {
    {32, 2, 100, 100, 56},   {32, 4, 190, 190, 106},  {64, 2, 129, 95, 75},    {64, 4, 239, 189, 131},  {96, 2, 168, 126, 87},
    {128, 2, 205, 168, 114}, {144, 2, 231, 187, 123}, {176, 2, 266, 210, 143}, {256, 2, 201, 201, 201},
};
// `warpgroups`: of a block, that multiply. Four have half the registers of two, for no more than 64 tokens. 144 tokens are for activations without zero points,
// 256 for int32 sums over all of K, which need no others beside them.
constexpr Tile wgmma_gemm_a8_tile(int bits, int tokens, int warpgroups = 2) {
  int stages = tokens >= 128 ? 4 : tokens >= 64 ? 6 : bits == 8 ? 9 : warpgroups == 4 ? 8 : 10;
  Tile tile{128 * warpgroups, tokens, stages, 1, 227 * 1024, 2};
  for (WgmmaInt8Tile const& t : kWgmmaInt8Tiles) {
    if (t.tokens == tokens && t.warpgroups == warpgroups)
      tile.cost = t.cost, tile.token_cost = t.token_cost, tile.row_cost = t.row_cost;
  }
  return tile;
}
template <int Bits, int Tokens, int Warpgroups>
Status launch_wgmma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);
// The same with corrections of the activations' zero points (corrections.h): tiles of 96 to 176 tokens. Beside zero points those above take 12 to 25 % longer than
// their costs say: so that both compare, these are measured times over 1.18, 0.85 to 0.92 of the costs above; one part for all where zero points are of blocks.
constexpr Tile wgmma_gemm_a8_corrected_tile(int bits, int tokens) {
  Tile tile = wgmma_gemm_a8_tile(bits, tokens);
  tile.cost = tile.cost * 86 / 100;
  tile.token_cost = tokens == 176 ? 227 : tokens == 144 ? 196 : tokens == 128 ? 181 : 149;
  tile.end_cost = 8;
  return tile;
}
template <int Bits, int Tokens>
Status launch_wgmma_gemm_a8_corrected(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

// wgmma_gemm_a16.cu: fp16 or bf16 activations, groups of 128 or more without offsets, likewise. Four warpgroups are for 64 tokens, int4, and scales of x's
// type.
constexpr Tile wgmma_gemm_a16_tile(int bits, int tokens, int warpgroups = 2) {
  int cost = warpgroups == 4 ? 291
             : tokens == 208 ? (bits == 8 ? 359 : 340)
             : tokens == 160 ? (bits == 8 ? 279 : 269)
             : tokens == 144 ? (bits == 8 ? 265 : 252)
             : tokens == 128 ? (bits == 8 ? 240 : 231)
             : tokens == 96  ? (bits == 8 ? 206 : 195)
             : tokens == 64  ? 162
                             : 122;
  return {128 * warpgroups,
          tokens,
          tokens == 32                                  ? 6
          : tokens == 64                                ? 5
          : tokens == 96 || (tokens < 160 && bits == 4) ? 4
                                                        : 3,
          1,
          227 * 1024,
          2,
          cost,
          tokens == 208 ? 15 : 0,
          false,
          0,
          0,
          true};
}
template <int Tokens, int Warpgroups = 2>
Status launch_wgmma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

// wgmma_fold16.cuh: 16-bit activations x weights of every format, rounded once to their type; clusters likewise.
// Costs of its tiles: of 69 products in results/h200-fold16-tiles.json, those chosen by them take 0.1 % longer than the best in the mean.
struct Fold16Tile {
  int tokens, cost;
};
constexpr Fold16Tile kFold16Tiles[] = {{32, 315}, {64, 360}, {128, 425}, {160, 308}, {208, 358}, {256, 432}};
constexpr Tile wgmma_fold16_tile(int tokens) {
  int const warpgroups = tokens <= 64 ? 4 : tokens <= 128 ? 3 : 2;
  Tile tile{128 * warpgroups, tokens, tokens == 256 ? 2 : 3, 1, 227 * 1024, 2};
  for (Fold16Tile const& t : kFold16Tiles) {
    if (t.tokens == tokens) tile.cost = t.cost;
  }
  return tile;
}
template <class Format>
Status launch_wgmma_fold16(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

// decode_gemm.cu: up to 16 tokens, clusters that share K. 8 tokens leave room for the next launch's blocks beside them.
constexpr Tile decode_gemm_tile(int tokens) {
  return {64, tokens, tokens == 8 ? 3 : 2, tokens == 8 ? 2 : 1, 99 * 1024, 1, 0, 0, true};
}
template <int Bits, int Tokens, bool Int8, bool Book = false>
Status launch_decode_gemm(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

// wgmma_decode.cu: up to 16 tokens on Hopper (sm_90a alone), clusters that share K, two blocks a multiprocessor. A code book's groups are of 64 columns or
// more, and its scales fp32 or of x's type.
constexpr Tile wgmma_decode_tile() { return {64, 16, 3, 2, 227 * 1024, 1, 0, 0, true}; }
template <int Bits, bool Book = false, bool Quantizes = false>
Status launch_wgmma_decode(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);
// The same with a block for each multiprocessor, and as much memory for it, beside large weights of 8 bits.
constexpr Tile wgmma_decode_alone_tile() { return {64, 16, 4, 1, 227 * 1024, 1, 0, 0, true}; }
template <int Bits, bool Quantizes = false>
Status launch_wgmma_decode_alone(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

// reduce_splits.cu: add the parts of K in their order and apply the epilogue.
Status launch_reduce_splits(GemmProblem const& problem, int splits, float const* partials, Stream stream);

// quantize_activations.cu
struct QuantizerStart {
  bool early = false;  // the next kernel may start before those before this one have ended
  bool spread = true;  // few blocks take shared memory that they do not use, so that not many share a multiprocessor
};
Status launch_quantize_activations(QuantizeProblem const& problem, Stream stream, QuantizerStart start = {});

// correct_zeros.cu: problem.quantized.zero_values and zero_scales
Status launch_correct_zeros(GemmProblem const& problem, Stream stream);

// sum_weights.cu
Status launch_sum_weights(PackedWeight const& weight, uint8_t* sums, void* sum_scales, float* row_sums, Stream stream);

// upcast_activations.cu: problem.quantized.upcast, of quantised activations or, where these are none, of x
Status launch_upcast_activations(GemmProblem const& problem, Stream stream);

// flat_4bit.cu
Status launch_quantize_flat(FlatProblem const& problem, Stream stream);
Status launch_dequantize_flat(FlatProblem const& problem, Stream stream);

// awq.cu
Status launch_dequantize_awq(AwqWeight const& weight, void* out, Stream stream);
Status launch_awq_gemm(AwqWeight const& weight, void const* x, int64_t x_stride, int m, void* out, Stream stream);

// pack.cu
Status launch_pack(PackProblem const& problem, Stream stream);
Status launch_unpack(PackProblem const& problem, Stream stream);

// dequantize.cu
Status launch_dequantize(DequantizeProblem const& problem, Stream stream);

}  // namespace cutlass_ops
