#include "dispatch.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cut_tiles.h"
#include "cutlass_ops/corrections.h"
#include "cutlass_ops/layout.h"
#include "decode_shape.h"
#include "kernels/kernels.h"
#include "wgmma_decode_shape.h"

namespace cutlass_ops {
namespace {

constexpr int kAnyM = kMaxM;
constexpr int kLater = 1 << 30;  // architectures: PTX carries the kernels to those that come after

#if CUTLASS_OPS_CUDA
#define LAUNCHER(function) function
#else
#define LAUNCHER(function) nullptr
#endif

constexpr int64_t kDecodeSmall = 64 << 20, kDecodeMiddle = 128 << 20, kAnySize = int64_t(1) << 62;

constexpr int kAnyK = 1 << 30;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t tile_count(int n, int m, Tile const& tile) {
  return ceil_div(n, tile.rows) * std::max<int64_t>(1, ceil_div(m, tile.tokens));
}

int64_t padded_size(PackedWeight const& w) { return padded_rows(w.n) * padded_k(w.k); }

// Whether decode_gemm can cut a problem so that its blocks' x fits in shared memory, and the weight has as many elements as it was measured to win with.
template <int kTokens, int64_t kLeast, int64_t kMost>
bool decode_takes(GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  int64_t size = padded_size(w), groups = w.group_size == -1 ? 1 : padded_k(w.k) / w.group_size + 1;
  return size >= kLeast && size < kMost && groups * padded_rows(w.n) < (int64_t(1) << 29) &&
         decode_shape(problem, device, kTokens).cluster > 0;
}

// Whether wgmma_gemm_a8 takes the weight beside int8 activations: a promotion for each 128 columns or more by the scales alone, and codes less zero points that
// are int8.
bool has_int8_products(PackedWeight const& w) {
  return w.group_size != 32 && w.group_size != 64 && !w.offsets && !(w.zeros && w.bits == 8);
}

// Whether a tensor map cannot describe x: it wants 16-byte boundaries and no gathering.
bool is_irregular(GemmProblem const& problem) {
  return problem.weight.perm || reinterpret_cast<uintptr_t>(problem.x) % 16 != 0 || problem.x_stride % 8 != 0 ||
         problem.x_stride < problem.weight.k;
}

// Whether a code book has what wgmma_decode takes: no groups of 32, and scales in fp32 or x's type, which is a constant there.
bool usual_book(GemmProblem const& problem, Device const&) {
  PackedWeight const& w = problem.weight;
  return w.group_size != 32 && (w.scale_type == problem.x_type || w.scale_type == DataType::kFloat32);
}

// Whether weights, and the values of int8 activations, may be rounded to 16 bits: the result is rounded to the type of x, and exactness is not asked for.
bool may_round(GemmProblem const& problem) {
  return !problem.exact && problem.out_type != DataType::kFloat32 && problem.out_type == problem.x_type;
}
// Whether wgmma_fold16 is the choice: where wgmma_gemm_a8 or wgmma_gemm_a16, whose products are exact, does not take the problem.
bool folds(GemmProblem const& problem, Device const&) {
  PackedWeight const& w = problem.weight;
  bool const long_groups = w.group_size == -1 || w.group_size >= kKPerTile;
  bool const exact = multiplies_int8(problem) ? has_int8_products(w) : long_groups && !w.offsets && !w.book;
  return may_round(problem) && !exact;
}

// Whether wgmma_decode takes a problem: int8 x, or scales of x's type, or a usual code book; slabs that fit in a block's sums and stages; and as many
// elements as it was measured to win with.
template <int64_t kLeast, int64_t kMost>
bool wgmma_decode_takes(GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  bool const types = w.book ? usual_book(problem, device) : multiplies_int8(problem) || w.scale_type == problem.x_type;
  // Where rows are to be quantised as a whole, which takes few blocks long, large weights do better without being asked for meanwhile.
  bool const rows = problem.act_quant == ActQuant::kToken && !problem.quantized.codes;
  int64_t const size = padded_size(w);
  return types && size >= kLeast && size < (rows ? std::min(kMost, kDecodeMiddle) : kMost) &&
         WgmmaDecodeShape(problem, device, false, false).cluster > 0;
}
// The same of rows that are to be quantised as a whole.
template <int64_t kMost>
bool wgmma_decode_takes_rows(GemmProblem const& problem, Device const& device) {
  return problem.act_quant == ActQuant::kToken && !problem.quantized.codes && wgmma_decode_takes<0, kMost>(problem, device);
}
// Whether wgmma_decode can quantise x itself: by blocks of a tile's columns, rows that a tensor map describes, and scales of x's type.
bool quantizes_blocks(GemmProblem const& problem) {
  return problem.act_quant == ActQuant::kBlock && !problem.quantized.codes && problem.x_type != DataType::kFloat32 &&
         problem.weight.scale_type == problem.x_type && !is_irregular(problem);
}
// Whether it does.
template <int64_t kMost>
bool wgmma_decode_quantizes(GemmProblem const& problem, Device const& device) {
  return quantizes_blocks(problem) && padded_size(problem.weight) < kMost &&
         WgmmaDecodeShape(problem, device, true, false).cluster > 0;
}
// The same where K is so long that decode_gemm's x leaves no room for the next launch.
bool wgmma_decode_quantizes_long_k(GemmProblem const& problem, Device const& device) {
  return problem.weight.k >= 8192 && wgmma_decode_quantizes<int64_t(96) << 20>(problem, device);
}
// Whether its blocks that are alone take a problem: of as many elements as it was measured to win with, and of K up to kMostK. (Of a longer K clusters
// of two blocks with few features take a part each, and all of these quantise all of x.)
template <int64_t kLeast, int kMostK>
bool wgmma_decode_alone_takes(GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  return (multiplies_int8(problem) || w.scale_type == problem.x_type) && padded_size(w) >= kLeast && w.k <= kMostK &&
         WgmmaDecodeShape(problem, device, false, true).cluster > 0;
}
template <int64_t kLeast>
bool wgmma_decode_alone_quantizes(GemmProblem const& problem, Device const& device) {
  return quantizes_blocks(problem) && padded_size(problem.weight) >= kLeast && problem.weight.k < 8192 &&
         WgmmaDecodeShape(problem, device, true, true).cluster > 0;
}
// Whether tiles of 256 tokens take the problem, and the last of them has not few: rows beyond the last token come slowly, as zeros, so that 4097 tokens x
// 8192 x 8192 take 381 us, 353 by tiles of 176.
bool sums_large_tiles(GemmProblem const& problem, Device const&) {
  return sums_whole_rows(problem) && (problem.m % 256 == 0 || problem.m % 256 >= 64);
}
// Whether wgmma_gemm_a8 gives a row the same bits by tiles of less than 128 tokens beside int4 weights, or may give it others. Larger tiles multiply the
// integers by the scales in another order, where neither side has zero points and tokens have a scale a block.
bool small_tiles_have_the_bits(GemmProblem const& problem, Device const&) {
  return !problem.batch_invariant || problem.weight.zeros || activations_have_zeros(problem) ||
         !activations_have_blocks(problem);
}
// Whether the weight has as many elements as few int8 tokens were measured to want for wgmma_gemm_a8, or as they want beside zero points: of smaller ones,
// whose K it cuts into more parts, mma_gemm_a8 takes less time.
template <int64_t kLeast, int64_t kLeastWithZeros = kLeast>
bool is_large(GemmProblem const& problem, Device const&) {
  bool const zeros = problem.weight.zeros || activations_have_zeros(problem);
  return padded_size(problem.weight) >= (zeros ? kLeastWithZeros : kLeast);
}
// Whether zero points of activations are corrected for many blocks, or for a row of one block, at once: the sums of the weight's codes are there, and the
// result is rounded by more than fp32 sums lose that held zero points for a while. (However small the product is, that was measured to take at most 1.2 %
// longer.) Where neither side has blocks int32 sums run over all of K, from which zero points are taken exactly.
bool corrects(GemmProblem const& problem, Device const&) {
  PackedWeight const& w = problem.weight;
  bool const blocks = activations_have_blocks(problem) || w.group_size != -1 || w.zeros;
  return w.sums && blocks && has_int8_products(w) && activations_have_zeros(problem) && !problem.batch_invariant &&
         problem.out_type != DataType::kFloat32;
}
bool has_scales_of_x(GemmProblem const& problem, Device const&) { return problem.weight.scale_type == problem.x_type; }

// clang-format off
constexpr Row kTable[] = {
    {"wgmma_decode", kWeights4, kFloatInput, kWeightZeros, 90, 90, 0, 8, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4>)),
     "where the weight is large: 8 tokens x 8192 x 28672 take 30.8 us, 34.1 by decode_gemm; one 31.1 and 31.2", wgmma_decode_takes<kDecodeMiddle, int64_t(256) << 20>},
    {"wgmma_decode", kWeights4, kFloatInput, kWeightZeros, 90, 90, 7, 8, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4>)),
     "28672 x 4096 and 8 tokens by 17.9 us, 18.2 by decode_gemm; but 5 by 17.9 and 17.6", wgmma_decode_takes<int64_t(96) << 20, kDecodeMiddle>},
    {"wgmma_decode", kWeights4, kFloatInput, kWeightZeros, 90, 90, 5, 8, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4>)),
     "where the weight is small, as for 16 tokens: 4.8 us for 4096 x 4096 and 8 tokens, 6.0 by decode_gemm; 6.5 for 6144 x 4096, 8.0", wgmma_decode_takes<0, int64_t(40) << 20>},
    {"decode_gemm", kWeights4, kFloatInput, kAllFeatures, 90, 90, 0, 8, decode_gemm_tile(8), LAUNCHER((launch_decode_gemm<4, 8, false>)),
     "a ring of weights for each warp and x in shared memory: 16 us for 28672 x 4096, 22.5 by mma_gemm_a16", decode_takes<8, 0, kAnySize>},
    {"wgmma_decode", kWeights4, kFloatInput, kWeightZeros, 90, 90, 9, 16, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4>)),
     "two blocks a multiprocessor, weights by bulk copies: 4.7 us for 4096 x 4096, 7.0 by mma_gemm_a16; 33.5 for 8192 x 28672, 38.8; but for 57344 x 8192 90 and 81", wgmma_decode_takes<0, int64_t(256) << 20>},
    {"wgmma_decode", kWeights8, kFloatInput, kWeightZeros, 90, 90, 0, 16, wgmma_decode_alone_tile(), LAUNCHER((launch_wgmma_decode_alone<8>)),
     "a block a multiprocessor, where the weight is large: one token x 28672 x 4096 takes 30.0 us, 30.5 by mma_gemm_a16, 16 tokens 30.3 and 31.7", wgmma_decode_alone_takes<int64_t(96) << 20, 8192>},
    {"wgmma_decode", kWeights8, kFloatInput, kWeightZeros, 90, 90, 5, 16, wgmma_decode_alone_tile(), LAUNCHER((launch_wgmma_decode_alone<8>)),
     "the same beside smaller weights: 16 tokens x 14336 x 4096 take 16.8 us, 18.2 by mma_gemm_a16; x 8192 x 8192 19.4 and 20.2; but one 19.7 and 18.7", wgmma_decode_alone_takes<int64_t(48) << 20, 8192>},
    {"wgmma_decode", kWeights8, kFloatInput, kWeightZeros, 90, 90, 8, 16, wgmma_decode_alone_tile(), LAUNCHER((launch_wgmma_decode_alone<8>)),
     "and a long K: 16 tokens x 8192 x 28672 take 57.4 us, 59.2 by mma_gemm_a16; but one 57.8 and 56.5", wgmma_decode_alone_takes<kDecodeMiddle, kAnyK>},
    {"wgmma_decode", kWeights8, kFloatInput, kWeightZeros, 90, 90, 5, 16, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<8>)),
     "where the weight is small: 6.5 us for 4096 x 4096, 7.4 by mma_gemm_a16", wgmma_decode_takes<0, int64_t(32) << 20>},
    {"wgmma_decode", kCodeBook, kFloatInput, kShortGroups, 90, 90, 9, 16, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4, true>)),
     "as for int4, looked up in shared memory: 37 us for 8192 x 28672, 63 by mma_gemm_a16; 23 for 28672 x 4096, 27 by decode_gemm; 5.3 for 4096 x 4096, 7.9", wgmma_decode_takes<0, kAnySize>},
    {"decode_gemm", kWeights4, kFloatInput, kAllFeatures, 90, 90, 9, 16, decode_gemm_tile(16), LAUNCHER((launch_decode_gemm<4, 16, false>)),
     "what wgmma_decode lacks, as for 8 tokens, between small and large weights: 22.3 us for 28672 x 4096, 24.4 by mma_gemm_a16; for 4096 x 4096 7.6 and 7.0, for 8192 x 28672 46 and 41", decode_takes<16, kDecodeSmall, kDecodeMiddle>},
    {"decode_gemm", kCodeBook, kFloatInput, kAllFeatures, 90, 90, 0, 4, decode_gemm_tile(4), LAUNCHER((launch_decode_gemm<4, 4, false, true>)),
     "as for int4, looked up in shared memory: 34.5 us for 8192 x 28672, 43 by book_gemm_a16", decode_takes<8, 0, kAnySize>},
    {"decode_gemm", kCodeBook, kFloatInput, kAllFeatures, 90, 90, 5, 8, decode_gemm_tile(8), LAUNCHER((launch_decode_gemm<4, 8, false, true>)),
     "as for 4 tokens, with look-ups put together to operands: 41 us for 8192 x 28672, 52 by book_gemm_a16", decode_takes<8, 0, kAnySize>},
    {"decode_gemm", kCodeBook, kFloatInput, kAllFeatures, 90, 90, 9, 16, decode_gemm_tile(16), LAUNCHER((launch_decode_gemm<4, 16, false, true>)),
     "what wgmma_decode lacks, as for 8 tokens, where x fits in shared memory: 27 us for 28672 x 4096, 38 by mma_gemm_a16", decode_takes<16, 0, kAnySize>},
    {"decode_gemm", kWeights8, kFloatInput, kAllFeatures, 90, 90, 0, 4, decode_gemm_tile(8), LAUNCHER((launch_decode_gemm<8, 8, false>)),
     "where the weight is small: 6.2 us for 4096 x 4096, 7.1 by mma_gemm_a16", decode_takes<8, 0, kDecodeSmall>},
    {"wgmma_decode", kWeights4, kInt8Input | kQuantizes, kWeightZeros | kActivationZeros, 90, 90, 2, 3, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4, false, true>)),
     "where the weight is small, as for 16 tokens: 5.0 us for 4096 x 4096 and 2 tokens, 5.6 by decode_gemm; but for one 5.0 and 4.6", wgmma_decode_quantizes<int64_t(40) << 20>},
    {"wgmma_decode", kWeights4, kInt8Input | kQuantizes, kWeightZeros, 90, 90, 5, 8, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4, false, true>)),
     "28672 x 4096 and 8 tokens by 18.1 us, 19.9 by decode_gemm; but 4 by 18.3 and 18.2, and with zero points of x 22.8 and 21.0", wgmma_decode_quantizes<kDecodeMiddle>},
    {"wgmma_decode", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 2, 8, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4>)),
     "after the quantiser of rows: 6.4 us for 4096 x 4096 and 8 tokens, 8.6 by decode_gemm; but for one 6.3 and 5.2", wgmma_decode_takes_rows<int64_t(40) << 20>},
    {"wgmma_decode", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 3, 8, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4>)),
     "the same where the weight is large: 19.2 us for 28672 x 4096 and 8 tokens, 24.2 by decode_gemm; but for two 19.1 and 18.1", wgmma_decode_takes_rows<kDecodeMiddle>},
    {"wgmma_decode", kWeights4, kInt8Input | kQuantizes, kWeightZeros | kActivationZeros, 90, 90, 4, 8, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4, false, true>)),
     "where the weight is not large, as for 16 tokens: 5.2 us for 4096 x 4096 and 8 tokens, 6.8 by decode_gemm; 11.4 for 14336 x 4096, 12.5", wgmma_decode_quantizes<int64_t(96) << 20>},
    {"decode_gemm", kWeights4, kInt8Input | kQuantizes, kAllFeatures, 90, 90, 0, 8, decode_gemm_tile(8), LAUNCHER((launch_decode_gemm<4, 8, true>)),
     "the blocks quantise x themselves, which saves a launch: 17 us for 28672 x 4096, 19.6 by mma_gemm_a8; for 8192 x 28672 and two tokens 34.2 and 33.6", decode_takes<8, 0, kDecodeMiddle>},
    {"wgmma_decode", kWeights8, kInt8Input | kQuantizes, kActivationZeros, 90, 90, 0, 16, wgmma_decode_alone_tile(), LAUNCHER((launch_wgmma_decode_alone<8, true>)),
     "a block a multiprocessor, where the weight is large: one token x 28672 x 4096 takes 30.4 us, 31.0 by mma_gemm_a8, 16 tokens 30.4 and 32.1", wgmma_decode_alone_quantizes<int64_t(96) << 20>},
    {"wgmma_decode", kWeights8, kInt8Input | kQuantizes, kActivationZeros, 90, 90, 5, 16, wgmma_decode_alone_tile(), LAUNCHER((launch_wgmma_decode_alone<8, true>)),
     "the same beside smaller weights: 16.7 us for 14336 x 4096, 17.5 by two blocks a multiprocessor", wgmma_decode_alone_quantizes<int64_t(48) << 20>},
    {"wgmma_decode", kWeights8, kInt8Input, kActivationZeros, 90, 90, 0, 16, wgmma_decode_alone_tile(), LAUNCHER((launch_wgmma_decode_alone<8>)),
     "after the quantiser: 57.0 us for 8192 x 28672 and 8 tokens, 58.7 by mma_gemm_a8; 19.9 for 8192 x 8192 and 16, 20.2 by blocks that quantise", wgmma_decode_alone_takes<kDecodeSmall, kAnyK>},
    {"wgmma_decode", kWeights8, kInt8Input, kActivationZeros, 90, 90, 2, 4, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<8>)),
     "where the weight is small, after the quantiser of rows: 7.6 us for 4096 x 4096 and two tokens, 7.9 by decode_gemm", wgmma_decode_takes_rows<int64_t(32) << 20>},
    {"wgmma_decode", kWeights8, kInt8Input | kQuantizes, kActivationZeros, 90, 90, 2, 4, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<8, false, true>)),
     "where K is long: 14.3 us for 4096 x 11008 and 4 tokens, 16.4 by decode_gemm", wgmma_decode_quantizes_long_k},
    {"decode_gemm", kWeights8, kInt8Input | kQuantizes, kAllFeatures, 90, 90, 0, 4, decode_gemm_tile(8), LAUNCHER((launch_decode_gemm<8, 8, true>)),
     "where the weight is small: the blocks quantise x themselves, which saves a launch", decode_takes<8, 0, kDecodeSmall>},
    {"wgmma_decode", kWeights4, kInt8Input | kQuantizes, kWeightZeros | kActivationZeros, 90, 90, 9, 16, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4, false, true>)),
     "as for fp16, and the blocks quantise x themselves: 5.2 us for 4096 x 4096, 8.5 by mma_gemm_a8; 18.9 for 28672 x 4096, 22.1; but for 8192 x 28672 35 and, after the quantiser, 32.7", wgmma_decode_quantizes<int64_t(192) << 20>},
    {"wgmma_decode", kWeights8, kInt8Input | kQuantizes, kActivationZeros, 90, 90, 5, 16, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<8, false, true>)),
     "likewise, where the weight is small: 7.1 us for 4096 x 4096, 9.0 by mma_gemm_a8", wgmma_decode_quantizes<int64_t(96) << 20>},
    {"wgmma_decode", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 0, 8, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4>)),
     "where the weight is large, after the quantiser: 32.0 us for 8192 x 28672 and 8 tokens, 35.0 by mma_gemm_a8; with zero points of x 32.2 and 41.8; one 30.9 and, by decode_gemm, 31.1", wgmma_decode_takes<kDecodeMiddle, int64_t(256) << 20>},
    {"wgmma_decode", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 9, 16, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<4>)),
     "as for fp16, after the quantiser: 6.0 us for 4096 x 4096, 8.5 by mma_gemm_a8; 20.9 for 28672 x 4096, 22.1; 32.7 for 8192 x 28672, 36.7", wgmma_decode_takes<0, int64_t(256) << 20>},
    {"wgmma_decode", kWeights8, kInt8Input, kActivationZeros, 90, 90, 5, 16, wgmma_decode_tile(), LAUNCHER((launch_wgmma_decode<8>)),
     "where the weight is small: 8.3 us for 4096 x 4096, 9.0 by mma_gemm_a8", wgmma_decode_takes<0, int64_t(32) << 20>},
    {"wgmma_gemm_a8", kWeights4, kInt8Input | kCorrects, kWeightZeros | kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_corrected_tile(4, 176), LAUNCHER((launch_wgmma_gemm_a8_corrected<4, 176>)),
     "corrections of zero points for 16 tiles of K at once, beside fp16 and bf16 results: 1024 tokens x 28672 x 4096 take 277 us, 309 with sums that start from them; 4096 1061 and 1192", corrects},
    {"wgmma_gemm_a8", kWeights4, kInt8Input | kCorrects, kWeightZeros | kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_corrected_tile(4, 144), LAUNCHER((launch_wgmma_gemm_a8_corrected<4, 144>)),
     "tiles of 144 with such corrections: 129 tokens x 14336 x 4096 take 28.3 us, 34.0 by tiles of 176 with sums that start from zero points", corrects},
    {"wgmma_gemm_a8", kWeights4, kInt8Input | kCorrects, kWeightZeros | kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_corrected_tile(4, 128), LAUNCHER((launch_wgmma_gemm_a8_corrected<4, 128>)),
     "tiles of 128 with such corrections: 512 tokens x 4096 x 4096 take 26.4 us, 27.3 with sums that start from zero points", corrects},
    {"wgmma_gemm_a8", kWeights4, kInt8Input | kCorrects, kWeightZeros | kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_corrected_tile(4, 96), LAUNCHER((launch_wgmma_gemm_a8_corrected<4, 96>)),
     "tiles of 96 with such corrections: 768 tokens x 4096 x 4096 take 40.5 us, 42.3 with sums that start from zero points", corrects},
    {"wgmma_gemm_a8", kWeights8, kInt8Input | kCorrects, kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_corrected_tile(8, 176), LAUNCHER((launch_wgmma_gemm_a8_corrected<8, 176>)),
     "corrections of zero points for 32 tiles of K at once, beside fp16 and bf16 results: 1024 tokens x 28672 x 4096 take 267 us, 307 with sums that start from them; 4096 1027 and 1190", corrects},
    {"wgmma_gemm_a8", kWeights8, kInt8Input | kCorrects, kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_corrected_tile(8, 144), LAUNCHER((launch_wgmma_gemm_a8_corrected<8, 144>)),
     "tiles of 144 with such corrections: 129 tokens x 14336 x 4096 take 28.6 us, 35.1 by tiles of 176 with sums that start from zero points", corrects},
    {"wgmma_gemm_a8", kWeights8, kInt8Input | kCorrects, kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_corrected_tile(8, 128), LAUNCHER((launch_wgmma_gemm_a8_corrected<8, 128>)),
     "tiles of 128 with such corrections: 512 tokens x 4096 x 4096 take 26.3 us, 28.7 with sums that start from zero points", corrects},
    {"wgmma_gemm_a8", kWeights8, kInt8Input | kCorrects, kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_corrected_tile(8, 96), LAUNCHER((launch_wgmma_gemm_a8_corrected<8, 96>)),
     "tiles of 96 with such corrections: 768 tokens x 4096 x 4096 take 39.3 us, 44.5 with sums that start from zero points", corrects},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_tile(4, 256), LAUNCHER((launch_wgmma_gemm_a8<4, 256, 2>)),
     "sums over all of K need no others beside them: 4096 tokens x 8192 x 28672 take 1056 us instead of 1109, x 4096 x 4096 84.7 instead of 89.8", sums_large_tiles},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(4, 176), LAUNCHER((launch_wgmma_gemm_a8<4, 176, 2>)),
     "the largest tile whose int32 and fp32 sums fit in registers: the least work a token"},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kWeightZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(4, 144), LAUNCHER((launch_wgmma_gemm_a8<4, 144, 2>)),
     "where 176 or 128 would compute more tokens that are none: 288 of them x 8192 x 8192 take 47.6 us instead of 53.6, 129 32.9 instead of 36.1; but 720 x 4096 x 4096 37.7 instead of 36.7"},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(4, 128), LAUNCHER((launch_wgmma_gemm_a8<4, 128, 2>)),
     "where 176 would leave a wave of blocks less full"},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(4, 96), LAUNCHER((launch_wgmma_gemm_a8<4, 96, 2>)),
     "where 128 would leave a wave of blocks less full", small_tiles_have_the_bits},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(4, 64), LAUNCHER((launch_wgmma_gemm_a8<4, 64, 2>)),
     "few tokens, or few rows: more blocks than the larger tiles give", small_tiles_have_the_bits},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kWeightZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(4, 64, 4), LAUNCHER((launch_wgmma_gemm_a8<4, 64, 4>)),
     "few tokens and many rows: four warpgroups hide each other's latencies; 28672 x 4096 at M = 64 by 28 us instead of 32; no registers for the activations' zero points", small_tiles_have_the_bits},
    {"wgmma_gemm_a8", kWeights8, kInt8Input, kActivationZeros, 90, 90, 129, kAnyM, wgmma_gemm_a8_tile(8, 256), LAUNCHER((launch_wgmma_gemm_a8<8, 256, 2>)),
     "sums over all of K need no others beside them: 4096 tokens x 8192 x 28672 take 1120 us instead of 1189, x 4096 x 4096 87.1 instead of 92.1", sums_large_tiles},
    {"wgmma_gemm_a8", kWeights8, kInt8Input, kActivationZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(8, 176), LAUNCHER((launch_wgmma_gemm_a8<8, 176, 2>)),
     "the largest tile whose int32 and fp32 sums fit in registers: the least work a token"},
    {"wgmma_gemm_a8", kWeights8, kInt8Input, 0, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(8, 144), LAUNCHER((launch_wgmma_gemm_a8<8, 144, 2>)),
     "where 176 or 128 would compute more tokens that are none: 288 of them x 8192 x 8192 take 45.4 us instead of 52.6, 129 33.4 instead of 36.4"},
    {"wgmma_gemm_a8", kWeights8, kInt8Input, kActivationZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(8, 128), LAUNCHER((launch_wgmma_gemm_a8<8, 128, 2>)),
     "where 176 would leave a wave of blocks less full"},
    {"wgmma_gemm_a8", kWeights8, kInt8Input, kActivationZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(8, 96), LAUNCHER((launch_wgmma_gemm_a8<8, 96, 2>)),
     "where 128 would leave a wave of blocks less full"},
    {"wgmma_gemm_a8", kWeights8, kInt8Input, kActivationZeros, 90, 90, 33, kAnyM, wgmma_gemm_a8_tile(8, 64), LAUNCHER((launch_wgmma_gemm_a8<8, 64, 2>)),
     "few tokens, or few rows: more blocks than the larger tiles give"},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kWeightZeros | kActivationZeros, 90, 90, 17, 32, wgmma_gemm_a8_tile(4, 32), LAUNCHER((launch_wgmma_gemm_a8<4, 32, 2>)),
     "few tokens: 32 x 14336 x 4096 take 13.6 us, 17.2 by mma_gemm_a8, x 8192 x 8192 16.4 and 18.0, with zero points of x 19.0 and 27.8; but x 2048 x 4096 8.5 and 7.9", is_large<int64_t(16) << 20, int64_t(24) << 20>},
    {"wgmma_gemm_a8", kWeights4, kInt8Input, kWeightZeros, 90, 90, 17, 32, wgmma_gemm_a8_tile(4, 32, 4), LAUNCHER((launch_wgmma_gemm_a8<4, 32, 4>)),
     "few tokens and many rows: 28672 x 4096, which is one wave so, by 21.1 us, 23.7 by tiles of 256 rows, 24.0 by mma_gemm_a8; no registers for the activations' zero points", is_large<int64_t(16) << 20, int64_t(24) << 20>},
    {"wgmma_gemm_a8", kWeights8, kInt8Input, kActivationZeros, 90, 90, 17, 32, wgmma_gemm_a8_tile(8, 32), LAUNCHER((launch_wgmma_gemm_a8<8, 32, 2>)),
     "as for int4: 32 tokens x 8192 x 28672 take 61.9 us, 64.9 by mma_gemm_a8, x 14336 x 4096 19.2 and 23.1, with zero points of x 19.9 and 26.7; but x 6144 x 4096 13.1 and 12.9, and 17 x 28672 x 4096, which is two waves, 33.4 and 31.9", is_large<int64_t(32) << 20>},
    {"wgmma_fold16", kWeights4, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(32), LAUNCHER((launch_wgmma_fold16<formats::Int4>)),
     "int4, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights4, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(64), LAUNCHER((launch_wgmma_fold16<formats::Int4>)),
     "int4, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights4, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(128), LAUNCHER((launch_wgmma_fold16<formats::Int4>)),
     "int4, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights4, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(160), LAUNCHER((launch_wgmma_fold16<formats::Int4>)),
     "int4, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights4, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(208), LAUNCHER((launch_wgmma_fold16<formats::Int4>)),
     "int4, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights4, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(256), LAUNCHER((launch_wgmma_fold16<formats::Int4>)),
     "int4, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights8, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(32), LAUNCHER((launch_wgmma_fold16<formats::Int8>)),
     "int8, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights8, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(64), LAUNCHER((launch_wgmma_fold16<formats::Int8>)),
     "int8, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights8, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(128), LAUNCHER((launch_wgmma_fold16<formats::Int8>)),
     "int8, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights8, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(160), LAUNCHER((launch_wgmma_fold16<formats::Int8>)),
     "int8, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights8, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(208), LAUNCHER((launch_wgmma_fold16<formats::Int8>)),
     "int8, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kWeights8, kFloatInput | kInt8Input | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(256), LAUNCHER((launch_wgmma_fold16<formats::Int8>)),
     "int8, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kCodeBook, kFloatInput | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(32), LAUNCHER((launch_wgmma_fold16<formats::Codebook>)),
     "a code book, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kCodeBook, kFloatInput | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(64), LAUNCHER((launch_wgmma_fold16<formats::Codebook>)),
     "a code book, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kCodeBook, kFloatInput | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(128), LAUNCHER((launch_wgmma_fold16<formats::Codebook>)),
     "a code book, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kCodeBook, kFloatInput | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(160), LAUNCHER((launch_wgmma_fold16<formats::Codebook>)),
     "a code book, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kCodeBook, kFloatInput | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(208), LAUNCHER((launch_wgmma_fold16<formats::Codebook>)),
     "a code book, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_fold16", kCodeBook, kFloatInput | kUpcasts | kRounds, kAllFeatures, 90, 90, 17, kAnyM, wgmma_fold16_tile(256), LAUNCHER((launch_wgmma_fold16<formats::Codebook>)),
     "a code book, rounded to x's type: one main loop for groups of any length, offsets and act order", folds},
    {"wgmma_gemm_a16", kWeights4 | kWeights8, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 17, 32, wgmma_gemm_a16_tile(4, 32), LAUNCHER((launch_wgmma_gemm_a16<32>)),
     "few tokens: 32 take 24 us for 28672 x 4096, 44 by mma_gemm_a16; for 4096 x 4096 7.9 and 8.2, by int8 9.4 and 9.4"},
    {"wgmma_gemm_a16", kWeights4, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(4, 160), LAUNCHER((launch_wgmma_gemm_a16<160>)),
     "the largest tile whose two sets of fp32 sums fit in registers beside decoded weights"},
    {"wgmma_gemm_a16", kWeights4, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(4, 208), LAUNCHER((launch_wgmma_gemm_a16<208>)),
     "many tokens in halves that share a set of registers for products: fewer bytes and decoded weights a token, less power; 1024 of them x 8192 x 28672 take 588 us instead of 613, 192 130 instead of 156; but 4096 x 28672 x 4096 1211 by 208 and 1207"},
    {"wgmma_gemm_a16", kWeights4, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(4, 144), LAUNCHER((launch_wgmma_gemm_a16<144>)),
     "where 160 would compute more tokens that are none: 129 of them beside 28672 x 4096 in int4 take 49.6 us instead of 52.9, 1000 292 instead of 307"},
    {"wgmma_gemm_a16", kWeights4, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(4, 96), LAUNCHER((launch_wgmma_gemm_a16<96>)),
     "likewise between 64 and 128: 72 of them x 14336 x 4096 take 20.0 us instead of 29.8, 96 20.1 instead of 24.8, 192 x 8192 x 8192, where they are one wave, 38.6 instead of 46.2"},
    {"wgmma_gemm_a16", kWeights4, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(4, 128), LAUNCHER((launch_wgmma_gemm_a16<128>)),
     "where 160 would leave a wave of blocks less full"},
    {"wgmma_gemm_a16", kWeights4, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(4, 64), LAUNCHER((launch_wgmma_gemm_a16<64>)),
     "few tokens, or few rows: more blocks than the larger tiles give"},
    {"wgmma_gemm_a16", kWeights4, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(4, 64, 4), LAUNCHER((launch_wgmma_gemm_a16<64, 4>)),
     "few tokens and many rows: four warpgroups hide each other's latencies; 28672 x 4096 at M = 64 by 29.6 us instead of 32.4; no registers for short groups", has_scales_of_x},
    {"wgmma_gemm_a16", kWeights8, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(8, 160), LAUNCHER((launch_wgmma_gemm_a16<160>)),
     "the largest tile whose two sets of fp32 sums fit in registers beside decoded weights"},
    {"wgmma_gemm_a16", kWeights8, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(8, 208), LAUNCHER((launch_wgmma_gemm_a16<208>)),
     "as for int4: 1024 tokens x 8192 x 28672 take 629 us instead of 659, 8192 5042 instead of 5134; but 4096 x 28672 x 4096 1289 by 208 and 1270"},
    {"wgmma_gemm_a16", kWeights8, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(8, 144), LAUNCHER((launch_wgmma_gemm_a16<144>)),
     "where 160 would compute more tokens that are none: 1000 of them beside 28672 x 4096 take 313 us instead of 327"},
    {"wgmma_gemm_a16", kWeights8, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(8, 96), LAUNCHER((launch_wgmma_gemm_a16<96>)),
     "likewise between 64 and 128: 72 of them x 14336 x 4096 take 23.7 us instead of 33.1, 96 22.7 instead of 29.3, 192 x 8192 x 8192 42.9 instead of 49.9"},
    {"wgmma_gemm_a16", kWeights8, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(8, 128), LAUNCHER((launch_wgmma_gemm_a16<128>)),
     "where 160 would leave a wave of blocks less full"},
    {"wgmma_gemm_a16", kWeights8, kFloatInput | kUpcasts, kWeightZeros | kIrregularInput, 90, 90, 33, kAnyM, wgmma_gemm_a16_tile(8, 64), LAUNCHER((launch_wgmma_gemm_a16<64>)),
     "few tokens, or few rows: more blocks than the larger tiles give"},
    {"book_gemm_a16", kCodeBook, kFloatInput, kShortGroups | kIrregularInput, 80, kLater, 0, 4, book_gemm_a16_tile(4), LAUNCHER((launch_book_gemm_a16<4>)),
     "the weights are read once, straight to registers, and looked up in shared memory; K is split until the grid fills the GPU"},
    {"book_gemm_a16", kCodeBook, kFloatInput, kShortGroups | kIrregularInput, 80, kLater, 5, 8, book_gemm_a16_tile(8), LAUNCHER((launch_book_gemm_a16<8>)),
     "as for 4 tokens"},
    {"mma_gemm_a16", kWeights4 | kCodeBook, kFloatInput, kAllFeatures, 80, kLater, 0, 16, mma_gemm_a16_tile(4, 16), LAUNCHER((launch_mma_gemm_a16<4, 16>)),
     "the weights are read once; K is split until the grid fills the GPU"},
    {"mma_gemm_a16", kWeights4 | kCodeBook, kFloatInput, kAllFeatures, 80, kLater, 17, 32, mma_gemm_a16_tile(4, 32), LAUNCHER((launch_mma_gemm_a16<4, 32>)),
     "as for 16 tokens, every decoded weight used twice as often"},
    {"mma_gemm_a16", kWeights4 | kCodeBook, kFloatInput, kAllFeatures, 80, kLater, 33, kAnyM, mma_gemm_a16_tile(4, 64), LAUNCHER((launch_mma_gemm_a16<4, 64>)),
     "the largest tile whose sums leave registers for two blocks a multiprocessor"},
    {"mma_gemm_a16", kWeights8, kFloatInput, kAllFeatures, 80, kLater, 0, 16, mma_gemm_a16_tile(8, 16), LAUNCHER((launch_mma_gemm_a16<8, 16>)),
     "the weights are read once; K is split until the grid fills the GPU"},
    {"mma_gemm_a16", kWeights8, kFloatInput, kAllFeatures, 80, kLater, 17, 32, mma_gemm_a16_tile(8, 32), LAUNCHER((launch_mma_gemm_a16<8, 32>)),
     "as for 16 tokens, every decoded weight used twice as often"},
    {"mma_gemm_a16", kWeights8, kFloatInput, kAllFeatures, 80, kLater, 33, kAnyM, mma_gemm_a16_tile(8, 64), LAUNCHER((launch_mma_gemm_a16<8, 64>)),
     "the largest tile whose sums leave registers for two blocks a multiprocessor"},
    {"mma_gemm_a8", kWeights4, kInt8Input, kAllFeatures, 80, kLater, 0, 16, mma_gemm_a8_tile(4, 16), LAUNCHER((launch_mma_gemm_a8<4, 16>)),
     "the weights are read once; K is split until the grid fills the GPU"},
    {"mma_gemm_a8", kWeights4, kInt8Input, kAllFeatures, 80, kLater, 17, 32, mma_gemm_a8_tile(4, 32), LAUNCHER((launch_mma_gemm_a8<4, 32>)),
     "as for 16 tokens, every decoded weight used twice as often"},
    {"mma_gemm_a8", kWeights4, kInt8Input, kAllFeatures, 80, kLater, 33, kAnyM, mma_gemm_a8_tile(4, 64), LAUNCHER((launch_mma_gemm_a8<4, 64>)),
     "the largest tile whose sums leave registers for two blocks a multiprocessor"},
    {"mma_gemm_a8", kWeights8, kInt8Input, kAllFeatures, 80, kLater, 0, 16, mma_gemm_a8_tile(8, 16), LAUNCHER((launch_mma_gemm_a8<8, 16>)),
     "the weights are read once; K is split until the grid fills the GPU"},
    {"mma_gemm_a8", kWeights8, kInt8Input, kAllFeatures, 80, kLater, 17, 32, mma_gemm_a8_tile(8, 32), LAUNCHER((launch_mma_gemm_a8<8, 32>)),
     "as for 16 tokens, every decoded weight used twice as often"},
    {"mma_gemm_a8", kWeights8, kInt8Input, kAllFeatures, 80, kLater, 33, kAnyM, mma_gemm_a8_tile(8, 64), LAUNCHER((launch_mma_gemm_a8<8, 64>)),
     "the largest tile whose sums leave registers for two blocks a multiprocessor"},
};
// clang-format on
#undef LAUNCHER

// Quantised rows up to which they have memory for whole tiles: zeros for rows that are not there come slowly, some 8 bytes a clock. Among many tiles that is
// nothing, and takes less power.
constexpr int kPaddedRows = 512;

constexpr size_t align_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

Status unsupported(std::string text) { return {Status::kUnsupported, std::move(text)}; }
Status invalid(std::string text) { return {Status::kInvalid, std::move(text)}; }

bool is_float(DataType type) { return type == DataType::kFloat32 || type == DataType::kFloat16 || type == DataType::kBFloat16; }

// The parts that K is cut into: enough that every multiprocessor has its `resident` blocks, of weights at least eight tiles of K by 128 rows each (two
// tiles in clusters). The count depends on shapes and the device alone, so a result's bits do too.
int split_count(GemmProblem const& problem, Device const& device, Tile const& tile) {
  if (tile.whole_k) return 1;
  int64_t wanted =
      int64_t(device.multiprocessors) * tile.resident / (tile_count(problem.weight.n, problem.m, tile) * tile.blocks);
  // A cluster's blocks fill a multiprocessor each: fewer tiles of K are enough for them.
  int const least = tile.blocks > 1 ? 2 : 1024 / tile.rows;
  int64_t most = std::max<int64_t>(1, ceil_div(problem.weight.k, kKPerTile) / least);
  return int(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(most, 16)));
}

int cost_of(GemmProblem const& problem, Row const& row) {
  Tile const& tile = row.tile;
  if (tile.row_cost > 0 && sums_whole_rows(problem)) return tile.row_cost;
  bool const tokens = !activations_have_blocks(problem) && (row.inputs & kCorrects || !activations_have_zeros(problem));
  return tile.token_cost > 0 && tokens ? tile.token_cost : tile.cost;
}

// The parts that the K of the tiles is cut into that whole waves of clusters leave over, so that more of them share the end, and the time of the product
// in 32nds of the unit of Tile::cost. Where a last part for each tile is one too many, a cluster takes those of several, and all others are so much
// longer: not in wgmma_fold16, nor for int8 activations, where that was measured to lose 2 % (of 512, 1024 and 8192 tokens x 8192 x 28672), nor of more than eight, which
// lost 1 %. Tiles that fill no wave are split_count's; reduce_splits takes 2.5 us, and 2 a million sums.
struct Tail {
  int64_t tiles;
  int splits;
  int64_t time;
};
Tail cut_tail(GemmProblem const& problem, Device const& device, Row const& row) {
  Tile const& tile = row.tile;
  int const m = problem.m, n = problem.weight.n, tile_cost = cost_of(problem, row);
  int64_t const k_tiles = ceil_div(problem.weight.k, kKPerTile), clusters = std::max(1, device.multiprocessors / tile.blocks);
  int64_t const tiles = tile_count(n, m, tile), rest = tiles % clusters;
  int64_t const whole = tile_cost * k_tiles + tile.end_cost * 32;
  Tail best{0, 1, ceil_div(tiles, clusters) * whole};
  if (tiles < clusters) {
    int const splits = split_count(problem, device, tile);
    if (splits > 1)
      best.time = ceil_div(k_tiles, splits) * tile_cost + (25 + 2 * tile.end_cost + int64_t(splits) * m * n / 50000) * 32;
    return best;
  }
  if (rest == 0) return best;
  constexpr int64_t kMostParts = 16;  // a lane of a warp waits for each
  int const most_gathered = tile.gathers ? 8 : 1;
  for (int64_t parts = 2; parts <= kMostParts && rest * (parts - 1) < clusters; ++parts) {
    CutTiles const cut{int(rest), int(parts), int(clusters), int(k_tiles)};
    if (cut.gathered > most_gathered || k_tiles - cut.dealt * (parts - 1) / cut.pieces < 2) continue;
    // Tenths of a microsecond on an H200: to leave parts in the workspace and add them up.
    int64_t const exchange = 25 + 2 * tile.end_cost + 8 * (parts - 1) * tile.tokens / 128;
    int64_t const time = tiles / clusters * whole + ceil_div(cut.dealt, cut.pieces) * tile_cost + exchange * 32;
    if (time < best.time) best = {rest, int(parts), time};
  }
  return best;
}

// Whether clusters add up the two parts of each tile's K themselves where the tiles fill no wave. It was measured to be faster than reduce_splits for many
// sums of long parts: floats beside int8 8192 x 28672 at M = 128 take 97.5 us, 99.7 by reduce_splits.
bool adds_two_parts(GemmProblem const& problem, Tile const& tile, int splits) {
  PackedWeight const& w = problem.weight;
  return splits == 2 && tile.cost > 0 && !problem.batch_invariant && !multiplies_int8(problem) && w.bits == 8 && w.k >= 16384 &&
         int64_t(problem.m) * w.n >= 1 << 20;
}

}  // namespace

Row const* table(size_t* count) {
  *count = sizeof(kTable) / sizeof(kTable[0]);
  return kTable;
}

Status check_weight(PackedWeight const& w) {
  if (w.bits != 4 && w.bits != 8) {
    return unsupported("bits is " + std::to_string(w.bits) + "; supported are 4 and 8");
  }
  if (w.n < 1 || w.k < 1) {
    return invalid("the weight's shape is [" + std::to_string(w.n) + ", " + std::to_string(w.k) + "]; both must be at least 1");
  }
  bool group_fits =
      w.group_size == -1 || w.group_size == 32 || w.group_size == 64 || (w.group_size > 0 && w.group_size % 128 == 0);
  if (!group_fits) {
    return unsupported("group_size is " + std::to_string(w.group_size) + "; supported are 32, 64, multiples of 128, and -1");
  }
  if (!is_float(w.scale_type)) return invalid("scale_type is not a float type");
  if (w.offsets && !is_float(w.offset_type)) return invalid("offset_type is not a float type");
  if (w.zeros && w.offsets) return invalid("the weight has zeros and offsets; at most one is supported");
  if (w.book && (w.bits != 4 || w.zeros || w.offsets)) {
    return unsupported("the weight has a code book and " +
                       std::string(w.bits != 4 ? "8 bits"
                                   : w.zeros   ? "zeros"
                                               : "offsets") +
                       "; a code book gives values to 4-bit codes, without zero points or offsets");
  }
  return {};
}

Status check_quantize(QuantizeProblem const& p) {
  if (!is_float(p.x_type)) return unsupported("x has a type that is not fp16, bf16 or fp32");
  if (p.m < 0 || p.m > kMaxM || p.k < 1) {
    return invalid("x is [" + std::to_string(p.m) + ", " + std::to_string(p.k) + "]; 0 to " + std::to_string(kMaxM) +
                   " rows of at least 1 column are supported");
  }
  if (p.out.block != -1 && p.out.block != 32 && p.out.block != 64 && p.out.block != 128) {
    return unsupported("block is " + std::to_string(p.out.block) + "; supported are 32, 64, 128 and -1");
  }
  if (p.out.stride < p.m || p.out.stride % 16 != 0) {
    return invalid("stride is " + std::to_string(p.out.stride) +
                   "; a multiple of 16 that is at least m = " + std::to_string(p.m) + " is expected");
  }
  if (p.norm_weight && p.up) return invalid("both norm_weight and up are given; at most one is supported");
  if (!p.residual != !p.sum || (p.residual && !p.norm_weight)) {
    return invalid("residual, sum and norm_weight: a residual comes with a norm, and has a place for the sum");
  }
  if (p.norm_weight && !(p.norm_eps >= kLeastNormEps && p.norm_eps <= 1.0f)) {
    return unsupported("norm_eps is " + std::to_string(p.norm_eps) + "; 1e-15 to 1 is supported");
  }
  if (p.norm_weight && p.k > kMaxNormK) {
    return unsupported("k is " + std::to_string(p.k) + "; a norm of at most " + std::to_string(kMaxNormK) +
                       " columns is supported");
  }
  return {};
}

Status check_sums(PackedWeight const& w) {
  if (Status status = check_weight(w); !status.ok()) return status;
  if (has_int8_products(w) && !w.book) return {};
  return unsupported("sums of codes are for groups of 128 or more, without offsets, a code book, or zero points of 8 bits");
}

Status check_dequantize(DequantizeProblem const& p) {
  if (Status status = check_weight(p.weight); !status.ok()) return status;
  return is_float(p.out_type) ? Status{} : unsupported("out_type is not fp16, bf16 or fp32");
}

Status check_flat(FlatProblem const& p) {
  if (!is_float(p.type)) return unsupported("the floats have a type that is not fp16, bf16 or fp32");
  if (p.blocksize < 32 || p.blocksize > 4096 || (p.blocksize & (p.blocksize - 1))) {
    return unsupported("blocksize is " + std::to_string(p.blocksize) + "; supported are powers of two from 32 to 4096");
  }
  return p.count >= 0 ? Status{} : invalid("count is " + std::to_string(p.count));
}

Status check_awq(AwqWeight const& w) {
  if (w.type != DataType::kFloat16 && w.type != DataType::kBFloat16) {
    return unsupported("the scales have a type that is not fp16 or bf16");
  }
  if (w.n < 8 || w.n % 8 || w.k < 1 || w.groups < 1 || w.k % w.groups) {
    return invalid("the weight is k = " + std::to_string(w.k) + " by n = " + std::to_string(w.n) + " in " +
                   std::to_string(w.groups) + " groups; n must be a multiple of 8, and k of the groups");
  }
  return {};
}

Status check_pack(PackProblem const& p) {
  constexpr int kLargest = std::numeric_limits<int32_t>::max() - kKPerTile;  // padding is counted in ints, too
  if (p.bits != 4 && p.bits != 8) return unsupported("bits is " + std::to_string(p.bits) + "; supported are 4 and 8");
  if (p.n < 1 || p.n > kLargest || p.k < 1 || p.k > kLargest) {
    return invalid("the weight is n = " + std::to_string(p.n) + " by k = " + std::to_string(p.k) + "; accepted are 1 to " +
                   std::to_string(kLargest));
  }
  if (reinterpret_cast<uintptr_t>(p.packed) % kLaneBytes) {
    return invalid("the packed codes start at an address that is no multiple of 16 bytes");
  }
  return {};
}

Status select(GemmProblem const& problem, Device const& device, Row const** row, Plan* plan) {
  PackedWeight const& w = problem.weight;
  if (Status status = check_weight(w); !status.ok()) return status;
  if (problem.m < 0 || problem.m > kMaxM) {
    return invalid("m is " + std::to_string(problem.m) + "; 0 to " + std::to_string(kMaxM) + " is supported");
  }
  bool quantized = problem.quantized.codes != nullptr;
  if (quantized) {
    int block = problem.quantized.block, fits = activation_block(w.group_size);
    if (block != -1 && block != fits) {
      return unsupported("the activations' block is " + std::to_string(block) + "; beside weights in groups of " +
                         std::to_string(w.group_size) + " it must be " + std::to_string(fits) + " or -1");
    }
  } else if (!is_float(problem.x_type)) {
    return unsupported("x has a type that is not fp16, bf16 or fp32");
  } else if (problem.act_quant == ActQuant::kNone && problem.x_type == DataType::kFloat32) {
    return unsupported(
        "x is float32 with act_quant=\"none\"; on a GPU that takes float16 or bfloat16 (float32 with \"token\" or \"block\")");
  }
  if (problem.bias && !is_float(problem.bias_type)) return invalid("bias_type is not a float type");
  if (problem.residual && !is_float(problem.residual_type)) return invalid("residual_type is not a float type");
  if (quantized && (problem.quantized.stride < problem.m || problem.quantized.stride % 16 != 0)) {
    return invalid("the activations' stride is " + std::to_string(problem.quantized.stride) +
                   "; a multiple of 16 that is at least m = " + std::to_string(problem.m) + " is expected");
  }
  if (!is_float(problem.out_type)) return unsupported("out_dtype is not float16, bfloat16 or float32");
  if (problem.architecture < 0 || problem.architecture > device.architecture) {
    return unsupported("architecture is " + std::to_string(problem.architecture) + "; the GPU is sm_" +
                       std::to_string(device.architecture) +
                       ", which runs kernels of its own architecture and of earlier ones");
  }
  int const architecture = problem.architecture ? problem.architecture : device.architecture;
  if (w.book && multiplies_int8(problem)) {
    return unsupported("the weight has a code book and the activations are int8; a code book takes fp16 or bf16 activations");
  }
  unsigned input = multiplies_int8(problem) ? kInt8Input : kFloatInput;
  unsigned weight = w.book ? kCodeBook : w.bits == 4 ? kWeights4 : kWeights8;
  unsigned features = (w.group_size == 32 || w.group_size == 64 ? kShortGroups : 0) | (w.zeros ? kWeightZeros : 0) |
                      (w.offsets ? kWeightOffsets : 0) | (activations_have_zeros(problem) ? kActivationZeros : 0) |
                      (input == kFloatInput && is_irregular(problem) ? kIrregularInput : 0);
  Device seen = device;
  seen.architecture = architecture;
  // A row's architectures are the GPU's too: code for sm_90a, say, runs on no later GPU.
  // The best row for as many tokens as `asked` has; of `kernel` alone, for any number of them, if that is given.
  auto const choose = [&](GemmProblem const& asked, char const* kernel) {
    int const m = asked.m;
    Row const* best = nullptr;
    int64_t best_cost = 0;
    for (Row const& candidate : kTable) {
      bool takes = (candidate.weights & weight) && (candidate.inputs & input) && !(features & ~candidate.features) &&
                   architecture >= candidate.min_architecture && device.architecture <= candidate.max_architecture &&
                   device.shared_memory >= candidate.tile.shared_bytes && (kernel || m >= candidate.min_m) &&
                   m <= candidate.max_m && (!problem.batch_invariant || candidate.max_m == kAnyM);
      takes = takes && (!candidate.takes || candidate.takes(asked, seen));
      char const* same = best ? best->kernel : kernel;
      if (!takes || (same && std::strcmp(same, candidate.kernel) != 0)) continue;
      Tile const& tile = candidate.tile;
      int64_t places = std::max(1, device.multiprocessors * tile.resident / tile.blocks);
      int64_t cost = problem.batch_invariant || tile.cost == 0
                         ? ceil_div(tile_count(w.n, m, tile), places) * cost_of(problem, candidate)
                         : cut_tail(asked, device, candidate).time;
      if (best && cost >= best_cost) continue;
      best = &candidate;
      best_cost = cost;
    }
    return best;
  };
  // A batch-invariant product has one kernel, and K in so many parts, for every m; m chooses the tile, which changes no bit.
  GemmProblem asked = problem;
  if (problem.batch_invariant) asked.m = kInvariantM;
  if (Row const* best = choose(asked, nullptr)) {
    *row = problem.batch_invariant ? choose(problem, best->kernel) : best;
    if (!plan) return {};
    plan->splits = split_count(asked, device, best->tile), plan->cut_tiles = 0;
    if (adds_two_parts(asked, best->tile, plan->splits)) plan->cut_tiles = int(tile_count(w.n, asked.m, best->tile));
    if (plan->splits == 1 && best->tile.cost > 0 && !problem.batch_invariant) {
      Tail const tail = cut_tail(asked, device, *best);
      plan->splits = tail.splits, plan->cut_tiles = int(tail.tiles);
    }
    return {};
  }
  return unsupported("the GPU is sm_" + std::to_string(architecture) + "; the kernels run on sm_80 and later");
}

WorkspaceLayout workspace_layout(GemmProblem const& problem, Plan const& plan, unsigned inputs) {
  PackedWeight const& w = problem.weight;
  WorkspaceLayout layout;
  int64_t k_pad = padded_k(w.k);
  if (problem.act_quant != ActQuant::kNone && !problem.quantized.codes && !(inputs & kQuantizes)) {
    layout.block = problem.act_quant == ActQuant::kToken ? -1 : activation_block(w.group_size);
    layout.stride = int(ceil_div(problem.m, 16) * 16);
    layout.rows = problem.m > kPaddedRows ? problem.m : int(ceil_div(problem.m, plan.tile_tokens) * plan.tile_tokens);
    int64_t blocks = layout.block == -1 ? 1 : k_pad / layout.block;
    layout.scales = inputs & kUpcasts ? 0 : align_256(size_t(layout.rows) * k_pad);
    layout.zeros = layout.scales + align_256(size_t(blocks) * layout.stride * sizeof(float));
    layout.partials = layout.zeros + (problem.act_symmetric ? 0 : align_256(size_t(blocks) * layout.stride));
  }
  if (inputs & kUpcasts && (multiplies_int8(problem) || is_irregular(problem))) {
    layout.upcasts = true, layout.upcast = layout.partials;
    layout.partials = layout.upcast + align_256(size_t(problem.m) * k_pad * 2);
  }
  if (inputs & kCorrects && activations_have_blocks(problem)) {
    int const stride = problem.quantized.codes ? problem.quantized.stride : layout.stride;
    layout.corrects = true, layout.zero_values = layout.partials;
    layout.zero_scales = layout.zero_values + align_256(size_t(problem.m) * zero_columns(w.k) * 2);
    layout.partials = layout.zero_scales + align_256(size_t(zero_rows(w.k)) * stride * sizeof(float));
  }
  layout.total = layout.partials;
  if (plan.cut_tiles > 0) {
    layout.total += part_floats(plan) * sizeof(float) + mark_count(plan) * sizeof(uint64_t);
  } else if (plan.splits > 1) {
    layout.total += size_t(plan.splits) * problem.m * padded_rows(w.n) * sizeof(float);
  }
  return layout;
}

Status plan(GemmProblem const& problem, Device const& device, Plan* plan) {
  Row const* row = nullptr;
  if (Status status = select(problem, device, &row, plan); !status.ok()) return status;
  plan->row = row;
  plan->kernel = row->kernel;
  plan->why = row->why;
  plan->tile_rows = row->tile.rows;
  plan->tile_tokens = row->tile.tokens;
  plan->stages = row->tile.stages;
  plan->quantizes = row->inputs & kQuantizes;
  plan->rounds = row->inputs & kRounds;
  plan->workspace = workspace_layout(problem, *plan, row->inputs).total;
  return {};
}

}  // namespace cutlass_ops
