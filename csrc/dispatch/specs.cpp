// The kernels of the product: the tiles of each with their costs, and where it was measured to be
// fastest.
#include <cstring>

#include "dispatch/cost.h"
#include "dispatch/kernel_limits.h"
#include "dispatch/launch_shape.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "dispatch/spec.h"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

#if CUTLASS_OPS_CUDA
#define LAUNCHER(function) function
Status launch_fold16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  return visit(problem.weight.format, [&](auto format) {
    return launch_wgmma_fold16<decltype(format)>(problem, plan, splitk_workspace, stream);
  });
}
Status launch_decode_fold16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                            Stream stream) {
  return visit(problem.weight.format, [&](auto format) {
    return launch_wgmma_decode_fold16<decltype(format)>(problem, plan, splitk_workspace, stream);
  });
}
#else
#define LAUNCHER(function) nullptr
#endif

template <size_t kCount>
constexpr Candidates all(Candidate const (&candidates)[kCount]) {
  return {candidates, kCount};
}

// Millions of weights.
bool has_millions(GemmProblem const& problem, int64_t least) {
  return padded_size(problem.weight) >= least << 20;
}

// ---- the decode kernels, by their costs

// Kernels can quantise x themselves if a tensor map can describe its rows.
bool has_regular_floats(GemmProblem const& problem) {
  return quantizes_x(problem) && problem.x_type != DataType::kFloat32 && !is_irregular(problem);
}
// Decode kernels do so in blocks of a tile's columns.
bool can_quantize_values(GemmProblem const& problem) {
  return problem.act_quant == ActQuant::kBlock && has_regular_floats(problem);
}
// Exact products also need scales of x's type.
bool can_quantize_blocks(GemmProblem const& problem) {
  return can_quantize_values(problem) && has_own_scales(problem.weight, problem.x_type);
}
// For large int4 weights and a long x with one scale a row, mma_gemm_a8 is chosen, which cuts K
// into more slices than a cluster.
bool is_long_and_quantized(GemmProblem const& problem) {
  return quantizes_rows(problem) && has_nibbles(problem.weight) && problem.weight.k >= 16384 &&
         has_millions(problem, 128);
}
bool is_not_long(GemmProblem const& problem) { return !is_long_and_quantized(problem); }
// Whether decode_gemm may be chosen. With groups of 16 it promotes sums after each operand A, which
// pays only where wgmma_decode_fold16 is slow: with scales of another type than x's and, if there
// are offsets, a large weight (docs/tuning-notes.md).
bool promotes_few_groups(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  if (w.group_size != 16) return is_not_long(problem);
  return !has_own_scales(w, problem.x_type) && (!w.offsets || has_millions(problem, 32));
}
// Whether wgmma_gemm_a16 may be chosen for more rows than decode_gemm takes and few enough for
// decode kernels: with scales of another type than x's. wgmma_decode cannot implement these, and
// wgmma_decode_fold16 is slow with them, since it applies them in fp32 to each value
// (docs/tuning-notes.md).
bool promotes_few_rows(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  return problem.m > kMostDecodeGemmRows && !is_image(problem) && !multiplies_int8(problem) &&
         multiplies_exactly(w) && !has_narrow_scales(w, problem.x_type);
}
// Whether wgmma_decode_fold16 may be chosen: only where wgmma_decode, whose products are exact,
// cannot implement the problem.
bool folds_few_rows(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  bool const own_scales = has_own_scales(w, problem.x_type);
  if (promotes_few_rows(problem)) return false;
  if (has_codebook(w))
    return w.group_size == 16 || w.group_size == 32 || is_irregular(problem) ||
           (!own_scales && w.scale_type != DataType::kFloat32);
  // decode_gemm takes a group of 64 at a time, and was faster up to four rows; its costs are those
  // of groups of 32.
  // Kernels that promote sums have other bits than wgmma_fold16: a batch-invariant product takes
  // them only where its more rows do.
  bool const decodes = multiplies_int8(problem) || problem.batch_invariant ? has_exact_kernels(w)
                                                                           : has_decode_kernels(w);
  if (w.group_size == 64 && has_nibbles(problem.weight) && decodes && !w.offsets)
    return problem.m > 4;
  if (multiplies_int8(problem)) return !has_int8_products(w);
  return has_short_groups(w) || w.offsets || !decodes || !own_scales;
}
bool folds_and_quantizes(GemmProblem const& problem) {
  return folds_few_rows(problem) && can_quantize_values(problem);
}
// With int4 and a short K the time of a product after the quantiser varies by a quarter between
// runs, so that a product that quantises x itself is preferred.
bool folds_alone(GemmProblem const& problem) {
  bool const erratic =
      has_nibbles(problem.weight) && folds_and_quantizes(problem) && problem.weight.k < 8192;
  return folds_few_rows(problem) && !erratic;
}

constexpr bool same(char const* a, char const* b) {
  return *a == *b && (*a == 0 || same(a + 1, b + 1));
}
// The index in kCards. Does not compile for an unknown name.
constexpr int card_index(char const* name) {
  for (int i = 0; i < kCardCount; ++i)
    if (same(kCards[i].name, name)) return i;
  throw "no such card";
}

// Costs fitted by tools/fit_costs.py.
struct MeasuredDecodeCost {
  char const *card, *kernel;
  int block_m, ctas_per_sm;
  bool quantizes;
  int bits;
  DecodeKind kind;
  DecodeCost cost;
};
constexpr MeasuredDecodeCost kMeasuredDecodeCosts[] = {
#include "dispatch/decode_costs.inc"
};

constexpr Candidate decode_candidate(char const* kernel, Tile const& tile, int max_m,
                                     bool (*applies)(GemmProblem const&), bool quantizes,
                                     char const* why = nullptr, int min_m = 0) {
  Candidate candidate{tile, min_m, max_m, {}, applies, quantizes, false, why};
  for (MeasuredDecodeCost const& c : kMeasuredDecodeCosts)
    if (c.block_m == tile.block_m && c.ctas_per_sm == tile.min_ctas_per_sm &&
        c.quantizes == quantizes && same(c.kernel, kernel))
      candidate.decode_costs[card_index(c.card)][width_index(c.bits)][int(c.kind)] = c.cost;
  return candidate;
}
// wgmma_fold16 is chosen where wgmma_gemm_a8 or wgmma_gemm_a16, whose products are exact, cannot
// implement the problem.
bool has_no_exact_kernel(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  return multiplies_int8(problem)
             ? !has_int8_products(w) || (is_image(problem) && activations_have_zeros(problem))
             : has_short_groups(w) || w.offsets || !has_exact_kernels(w);
}

// Whether decode kernels may be chosen for more rows than 16: where there are few features. The
// kernels for many rows then cut K, and add their sums in global memory. With more features they
// are as fast or faster (docs/tuning-notes.md).
bool has_few_features(GemmProblem const& problem) { return padded_rows(problem.weight.n) <= 6144; }
bool folds_more_rows(GemmProblem const& problem) {
  return has_few_features(problem) && has_no_exact_kernel(problem);
}
constexpr int kMoreRows = WgmmaDecodeShape::kMoreRows;
constexpr Candidate kWgmmaDecode[] = {
    decode_candidate("wgmma_decode", wgmma_decode_tile(1), 16, can_quantize_blocks, true,
                     "one CTA per SM quantises its own x"),
    decode_candidate("wgmma_decode", wgmma_decode_tile(1), 16, is_not_long, false,
                     "one CTA per SM"),
    decode_candidate("wgmma_decode", wgmma_decode_tile(2), 16, can_quantize_blocks, true,
                     "two CTAs per SM quantise their own x"),
    decode_candidate("wgmma_decode", wgmma_decode_tile(2), 16, is_not_long, false,
                     "two CTAs per SM"),
    decode_candidate("wgmma_decode", wgmma_decode_tile(2, kMoreRows), kMoreRows, has_few_features,
                     false, "two CTAs per SM, tiles of 32 rows", kMostDecodeRows + 1),
};
constexpr Candidate kWgmmaDecodeFold16[] = {
    decode_candidate("wgmma_decode_fold16", wgmma_decode_tile(1), 16, folds_few_rows, false,
                     "one CTA per SM, weights rounded to x's type"),
    decode_candidate("wgmma_decode_fold16", wgmma_decode_tile(2), 16, folds_and_quantizes, true,
                     "two CTAs per SM quantise their own x, weights rounded to its type"),
    decode_candidate("wgmma_decode_fold16", wgmma_decode_tile(2), 16, folds_alone, false,
                     "two CTAs per SM, weights rounded to x's type"),
    decode_candidate(
        "wgmma_decode_fold16", wgmma_decode_tile(2, kMoreRows), kMoreRows, folds_more_rows, false,
        "two CTAs per SM, tiles of 32 rows, weights rounded to x's type", kMostDecodeRows + 1),
};
constexpr Candidate kDecodeGemm[] = {
    decode_candidate("decode_gemm", decode_gemm_tile(4), 4, nullptr, true),
    decode_candidate("decode_gemm", decode_gemm_tile(8), 8, promotes_few_groups, true),
};

// ---- tiles of the Hopper kernels, by their costs

// Whether tiles of 256 rows may be used (int32 sums over all of K) and the last tile is at least a
// quarter full: TMA fills rows beyond the last with zeros, slowly (docs/tuning-notes.md).
bool fills_large_tiles(GemmProblem const& problem) {
  return sums_whole_rows(problem) && (problem.m % 256 == 0 || problem.m % 256 >= 64);
}
// Whether wgmma_gemm_a8's tiles of fewer than 128 rows may be chosen. With int4 weights, no zero
// points and one scale of x a block, they multiply the integers by the scales in another order than
// larger tiles, so the bits of a row would depend on M.
bool small_tiles_have_the_bits(GemmProblem const& problem) {
  return !has_nibbles(problem.weight) || !problem.batch_invariant || problem.weight.zeros ||
         activations_have_zeros(problem) || !activations_have_blocks(problem);
}
// Whether the weight is large enough for wgmma_gemm_a8 with 17 to 32 rows of int8 x: with smaller
// weights mma_gemm_a8, which cuts K into more slices, is faster.
bool has_many_weights(GemmProblem const& problem) {
  bool const zeros = problem.weight.zeros || activations_have_zeros(problem);
  return has_millions(problem, !has_nibbles(problem.weight) ? 32 : zeros ? 24 : 16);
}
constexpr int kCompensatedRows = 129;  // of x, from which on it pays to compensate its zero points

// Whether zero points of x are compensated for many blocks, or a whole row, at once. fp32 sums hold
// the zero points' share until then, which costs less precision than rounding the result to 16
// bits. Whether the weight's column sums are kept already has no influence: the bits of a result
// must not depend on it. Where neither side has blocks, int32 sums run over all of K, and zero
// points are compensated exactly.
bool compensates_zeros(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  if (compensates_weight_zeros(problem)) return true;
  bool const blocks = activations_have_blocks(problem) || w.group_size != -1 || w.zeros;
  return !is_image(problem) && problem.m >= kCompensatedRows && blocks &&
         activations_have_zeros(problem) && !problem.batch_invariant &&
         problem.out_type != DataType::kFloat32;
}
bool no_x_zeros(GemmProblem const& problem) { return !activations_have_zeros(problem); }
bool four_warpgroups_without_x_zeros(GemmProblem const& problem) {
  return kFourWarpgroups[code_bits(problem.weight)] && no_x_zeros(problem) &&
         small_tiles_have_the_bits(problem);
}
bool four_warpgroups_of_many_weights(GemmProblem const& problem) {
  return four_warpgroups_without_x_zeros(problem) && has_many_weights(problem);
}
bool four_warpgroups_with_scales_of_x(GemmProblem const& problem) {
  return kFourWarpgroups[code_bits(problem.weight)] &&
         has_own_scales(problem.weight, problem.x_type);
}
bool folds_values(GemmProblem const& problem) {
  return has_no_exact_kernel(problem) || (is_image(problem) && !multiplies_int8(problem));
}
// Whether wgmma_fold16's tiles of 32 rows compete with wgmma_decode_fold16: for more rows or other
// groups than decode_gemm takes, with scales that are applied in fp32, which make the latter slow
// where weights are large (docs/tuning-notes.md).
bool folds_few_wide_rows(GemmProblem const& problem) {
  bool const beyond_decode_gemm =
      problem.m > kMostDecodeGemmRows || !decode_gemm_has_groups(problem);
  return beyond_decode_gemm && has_no_exact_kernel(problem) && !is_image(problem) &&
         !multiplies_int8(problem) && !has_narrow_scales(problem.weight, problem.x_type);
}

// Measured costs of tiles, fitted by tools/fit_costs.py.
struct MeasuredCost {
  char const *card, *kernel;
  int bits, block_n, block_m;
  bool compensates;
  TileCost cost;
};
constexpr MeasuredCost kMeasuredCosts[] = {
#include "dispatch/tile_costs.inc"
};
// Does not compile for a tile that was not measured on every card. (Four warpgroups of the exact
// kernels are for int4.)
constexpr TileCosts costs_of(char const* kernel, int bits, Tile const& tile,
                             bool compensates = false) {
  TileCosts costs{};
  int found = 0;
  for (MeasuredCost const& c : kMeasuredCosts)
    if (c.bits == bits && c.block_n == tile.block_n && c.block_m == tile.block_m &&
        c.compensates == compensates && same(c.kernel, kernel))
      costs[card_index(c.card)] = c.cost, ++found;
  return found == kCardCount ? costs : throw "no measured cost";
}

template <int kBits>
constexpr Candidate wgmma_gemm_a8_of(int block_m, int min_m, int max_m,
                                     bool (*applies)(GemmProblem const&) = nullptr,
                                     int warpgroups = 2) {
  Tile const tile = wgmma_gemm_a8_tile(kBits, block_m, warpgroups);
  return {tile, min_m, max_m, costs_of("wgmma_gemm_a8", warpgroups == 4 ? 4 : kBits, tile),
          applies};
}
// For few features: the CTAs of a cluster are placed along M. A CTA then loads its x without
// multicast, for which int32 sums over all of K would wait if there were many features
// (docs/tuning-notes.md).
bool a8_along_m(GemmProblem const& problem) {
  if (is_image(problem)) return true;
  bool const whole_rows = sums_whole_rows(problem) && padded_rows(problem.weight.n) <= 640;
  return no_x_zeros(problem) && (activations_have_blocks(problem) || whole_rows) &&
         leaves_a_cta_idle(problem);
}
bool a8_along_m_in_small_tiles(GemmProblem const& problem) {
  return a8_along_m(problem) && small_tiles_have_the_bits(problem);
}
bool a16_along_m(GemmProblem const& problem) {
  return is_image(problem) || leaves_a_cta_idle(problem);
}
// Tiles of 208 rows of 16-bit x leave room for only a part of their outputs in shared memory, and
// each part waits until the previous one has been stored. With one or two K tiles no load hides
// that wait (docs/tuning-notes.md).
bool has_long_sums(GemmProblem const& problem) { return k_tiles(problem.weight) > 2; }
bool a16_along_m_of_long_sums(GemmProblem const& problem) {
  return a16_along_m(problem) && has_long_sums(problem);
}
// Whether tiles of wgmma_gemm_a8 may quantise x themselves: with a scale for each row of x and K
// tile, with one that is known before the product, or with one for rows of few columns (where other
// tiles sum all integers of a row first, the bits would then depend on M). Not under several taps,
// each of which would read the same pixels as 16-bit floats and quantise them.
bool can_quantize_tiles(GemmProblem const& problem) {
  ImageRows const& image = problem.image;
  bool const one_tap = !is_image(problem) || image.taps[0] * image.taps[1] * image.taps[2] == 1;
  bool const rows = problem.act_quant == ActQuant::kToken && !problem.batch_invariant &&
                    stored_columns(problem) <= kMostQuantizedRowTiles * kKPerTile,
             others =
                 problem.act_quant == ActQuant::kBlock || problem.act_quant == ActQuant::kTensor;
  return one_tap && (rows || others) && problem.act_symmetric && !problem.weight.zeros &&
         has_regular_floats(problem);
}
bool can_quantize_tiles_along_m(GemmProblem const& problem) {
  return can_quantize_tiles(problem) && (is_image(problem) || leaves_a_cta_idle(problem));
}
// Faster than the separate quantiser where few features need the codes. The costs, the same on all
// cards, are of the instructions that quantise a tile's rows, whatever is multiplied
// (docs/tuning-notes.md).
template <int kBits>
constexpr Candidate quantizes(bool (*applies)(GemmProblem const&)) {
  TileCost of_tile;
  of_tile.k4096 = 400, of_tile.end = 8;
  Candidate candidate = wgmma_gemm_a8_of<kBits>(kQuantizingHeight, 33, kMaxM);
  candidate.tile = wgmma_gemm_a8_tile(kBits, kQuantizingHeight, 2, true);
  for (TileCost& cost : candidate.costs) cost = of_tile;
  candidate.applies = applies, candidate.quantizes = true;
  candidate.why = "it quantises its own x";
  return candidate;
}
constexpr Candidate clusters_along_m(Candidate candidate, bool (*applies)(GemmProblem const&)) {
  candidate.tile = along_m(candidate.tile), candidate.applies = applies;
  return candidate;
}
// Each CTA then loads its 16-bit x without multicast, so that L2 limits a K tile
// (docs/tuning-notes.md).
constexpr Candidate loads_alone(Candidate candidate) {
  for (TileCost& cost : candidate.costs) cost.k4096 = cost.k4096 * 4 / 3;
  return candidate;
}
template <int kBits>
constexpr Candidate compensated(int block_m) {
  Tile const tile = wgmma_gemm_a8_tile(kBits, block_m);
  return {tile,    0,     kMaxM, costs_of("wgmma_gemm_a8", kBits, tile, true),
          nullptr, false, true,  "zero-point correction for many tiles of K at once"};
}
template <int kBits>
constexpr Candidate kCompensated[] = {compensated<kBits>(176), compensated<kBits>(144),
                                      compensated<kBits>(128), compensated<kBits>(96)};
template <int kBits>
constexpr Candidate kWgmmaGemmA8[] = {
    wgmma_gemm_a8_of<kBits>(256, 129, kMaxM, fills_large_tiles),
    wgmma_gemm_a8_of<kBits>(176, 33, kMaxM),
    wgmma_gemm_a8_of<kBits>(144, 33, kMaxM, no_x_zeros),
    wgmma_gemm_a8_of<kBits>(128, 33, kMaxM),
    wgmma_gemm_a8_of<kBits>(96, 33, kMaxM, small_tiles_have_the_bits),
    wgmma_gemm_a8_of<kBits>(64, 33, kMaxM, small_tiles_have_the_bits),
    wgmma_gemm_a8_of<kBits>(64, 33, kMaxM, four_warpgroups_without_x_zeros, 4),
    wgmma_gemm_a8_of<kBits>(32, 17, 32, has_many_weights),
    wgmma_gemm_a8_of<kBits>(32, 17, 32, four_warpgroups_of_many_weights, 4),
    clusters_along_m(wgmma_gemm_a8_of<kBits>(176, 33, kMaxM), a8_along_m),
    clusters_along_m(wgmma_gemm_a8_of<kBits>(144, 33, kMaxM), a8_along_m),
    clusters_along_m(wgmma_gemm_a8_of<kBits>(128, 33, kMaxM), a8_along_m),
    clusters_along_m(wgmma_gemm_a8_of<kBits>(96, 33, kMaxM), a8_along_m_in_small_tiles),
    quantizes<kBits>(can_quantize_tiles),
    clusters_along_m(quantizes<kBits>(nullptr), can_quantize_tiles_along_m),
};
Candidates wgmma_gemm_a8_candidates(GemmProblem const& problem) {
  return with_nibbles_or_bytes(code_bits(problem.weight), [&](auto width) {
    constexpr int kBits = decltype(width)::kBits;
    return compensates_zeros(problem) ? all(kCompensated<kBits>) : all(kWgmmaGemmA8<kBits>);
  });
}

template <int kBits>
constexpr Candidate wgmma_gemm_a16_of(int block_m, int min_m, int max_m,
                                      bool (*applies)(GemmProblem const&) = nullptr,
                                      int warpgroups = 2) {
  Tile const tile = wgmma_gemm_a16_tile(kBits, block_m, warpgroups);
  return {tile, min_m, max_m, costs_of("wgmma_gemm_a16", warpgroups == 4 ? 4 : kBits, tile),
          applies};
}
template <int kBits>
constexpr Candidate kWgmmaGemmA16[] = {
    wgmma_gemm_a16_of<kBits>(32, 17, 32),
    wgmma_gemm_a16_of<kBits>(32, kMostDecodeGemmRows + 1, kMostDecodeRows, promotes_few_rows),
    wgmma_gemm_a16_of<kBits>(160, 33, kMaxM),
    wgmma_gemm_a16_of<kBits>(208, 33, kMaxM, has_long_sums),
    wgmma_gemm_a16_of<kBits>(144, 33, kMaxM),
    wgmma_gemm_a16_of<kBits>(96, 33, kMaxM),
    wgmma_gemm_a16_of<kBits>(128, 33, kMaxM),
    wgmma_gemm_a16_of<kBits>(64, 33, kMaxM),
    wgmma_gemm_a16_of<kBits>(64, 33, kMaxM, four_warpgroups_with_scales_of_x, 4),
    clusters_along_m(loads_alone(wgmma_gemm_a16_of<kBits>(208, 33, kMaxM)),
                     a16_along_m_of_long_sums),
    clusters_along_m(loads_alone(wgmma_gemm_a16_of<kBits>(160, 33, kMaxM)), a16_along_m),
    clusters_along_m(loads_alone(wgmma_gemm_a16_of<kBits>(128, 33, kMaxM)), a16_along_m),
    clusters_along_m(loads_alone(wgmma_gemm_a16_of<kBits>(96, 33, kMaxM)), a16_along_m),
};

template <int kBits>
constexpr Candidate wgmma_fold16_of(int block_m, int min_m = kMostDecodeRows + 1, int max_m = kMaxM,
                                    bool (*applies)(GemmProblem const&) = folds_values) {
  Tile const tile = wgmma_fold16_tile(block_m, kBits);
  return {tile, min_m, max_m, costs_of("wgmma_fold16", kBits, tile), applies};
}
template <int kBits>
constexpr Candidate kWgmmaFold16[] = {
    wgmma_fold16_of<kBits>(32, 0, kMostDecodeRows, folds_few_wide_rows),
    wgmma_fold16_of<kBits>(32),
    wgmma_fold16_of<kBits>(64),
    wgmma_fold16_of<kBits>(128),
    wgmma_fold16_of<kBits>(160),
    wgmma_fold16_of<kBits>(208),
    wgmma_fold16_of<kBits>(256)};

// ---- tiles of the portable kernels, by M

constexpr Candidate kCodebookGemmA16[] = {{book_gemm_a16_tile(), 0, 4}};
// Problems for which tiles of 64 rows have no registers left.
bool has_groups_of_16(GemmProblem const& problem) { return problem.weight.group_size == 16; }
bool is_image_or_has_groups_of_16(GemmProblem const& problem) {
  return is_image(problem) || has_groups_of_16(problem);
}
template <int kBits>
constexpr Candidate kMmaGemmA16[] = {{mma_gemm_a16_tile(kBits, 16), 0, 16},
                                     {mma_gemm_a16_tile(kBits, 32), 0, 32},
                                     {mma_gemm_a16_tile(kBits, 32), 0, kMaxM, {}, has_groups_of_16},
                                     {mma_gemm_a16_tile(kBits, 64)}};
template <int kBits>
constexpr Candidate kMmaGemmA8[] = {
    {mma_gemm_a8_tile(kBits, 16), 0, 16},
    {mma_gemm_a8_tile(kBits, 32), 0, 32},
    {mma_gemm_a8_tile(kBits, 32), 0, kMaxM, {}, is_image_or_has_groups_of_16},
    {mma_gemm_a8_tile(kBits, 64)}};

#define OF_WIDTH(candidates)                                                 \
  [](GemmProblem const& problem) {                                           \
    return with_nibbles_or_bytes(code_bits(problem.weight), [](auto width) { \
      return all(candidates<decltype(width)::kBits>);                        \
    });                                                                      \
  }
#define OF_ALL(candidates) [](GemmProblem const&) { return all(candidates); }

constexpr KernelSpec kSpecs[] = {
    {"wgmma_decode", "few rows of x", false, false, false, true, true, wgmma_decode_can,
     OF_ALL(kWgmmaDecode), decode_time, shape_wgmma_decode, LAUNCHER(launch_wgmma_decode)},
    {"wgmma_decode_fold16", "few rows of x, weights rounded to its type", true, true, false, true,
     true, wgmma_decode_fold16_can, OF_ALL(kWgmmaDecodeFold16), decode_time,
     shape_wgmma_decode_fold16, LAUNCHER(launch_decode_fold16)},
    {"decode_gemm", "few rows of x, a ring of weights for each warp and x in shared memory", false,
     false, false, true, true, decode_gemm_can, OF_ALL(kDecodeGemm), decode_time, shape_decode_gemm,
     LAUNCHER(launch_decode_gemm)},
    {"wgmma_gemm_a8", "exact int8 products, the tile of least predicted time", false, false, false,
     true, false, wgmma_gemm_a8_can, wgmma_gemm_a8_candidates, predicted_time, shape_wgmma_gemm_a8,
     LAUNCHER(launch_wgmma_gemm_a8), "wgmma_decode"},
    {"wgmma_gemm_a16", "exact products of 16-bit x, the tile of least predicted time", false, true,
     true, true, false, wgmma_gemm_a16_can, OF_WIDTH(kWgmmaGemmA16), predicted_time,
     shape_wgmma_gemm_a16, LAUNCHER(launch_wgmma_gemm_a16), "wgmma_decode"},
    {"wgmma_fold16", "weights rounded to x's type, the tile of least predicted time", true, true,
     false, true, false, wgmma_fold16_can, OF_WIDTH(kWgmmaFold16), predicted_time,
     shape_wgmma_fold16, LAUNCHER(launch_fold16), "wgmma_decode_fold16"},
    {"book_gemm_a16",
     "few rows of x; weights go straight to registers, and are looked up in shared memory", false,
     false, false, false, false, book_gemm_a16_can, OF_ALL(kCodebookGemmA16), nullptr,
     shape_book_gemm_a16, LAUNCHER(launch_book_gemm_a16)},
    {"mma_gemm_a16", "the portable kernel of 16-bit x", false, false, false, false, false,
     mma_gemm_a16_can, OF_WIDTH(kMmaGemmA16), nullptr, shape_mma_gemm_a16,
     LAUNCHER(launch_mma_gemm_a16)},
    {"mma_gemm_a8", "the portable kernel of int8 x", false, false, false, false, false,
     mma_gemm_a8_can, OF_WIDTH(kMmaGemmA8), nullptr, shape_mma_gemm_a8,
     LAUNCHER(launch_mma_gemm_a8)},
};
#undef OF_WIDTH
#undef OF_ALL
#undef LAUNCHER

}  // namespace

KernelSpecs kernel_specs() { return {kSpecs, sizeof(kSpecs) / sizeof(kSpecs[0])}; }

KernelSpec const* find_kernel(char const* name) {
  for (KernelSpec const& spec : kSpecs)
    if (std::strcmp(spec.name, name) == 0) return &spec;
  return nullptr;
}

}  // namespace cutlass_ops
