#include "dispatch/expert_tiles.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "cutlass_ops/layout.h"
#include "dispatch/cost.h"
#include "dispatch/decode_shape.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

// Whether x has int8 codes without zero points, and kernels that take `takes` of a weight multiply
// them in both products. (A single one would have other tile heights.)
template <class Takes>
bool multiplies_codes(MoeProblem const& p, Takes const& takes) {
  return p.act_quant != ActQuant::kNone && p.act_symmetric && takes(p.gate_up.stack) &&
         takes(p.down.stack);
}

}  // namespace

bool multiplies_codes(MoeProblem const& p, bool portable) {
  // Where x has one scale a row, wgmma_gemm_a8 promotes twice a K tile. With scales for 64 columns
  // of x, too, or for 32 of weights, that takes longer than products of 16-bit values.
  bool const halves = !portable && p.act_quant == ActQuant::kToken;
  return multiplies_codes(p, [&](PackedWeight const& w) {
    bool const fits = !w.offsets && zeros_fit_int8(w),
               integers = portable ? has_integer_codes(w) : has_exact_kernels(w);
    return integers && fits && (!has_short_groups(w) || (halves && w.group_size == kKPerTile / 2));
  });
}

Loop loop_of(PackedWeight const& w, bool int8, int height) {
  if (int8) return Loop::kInt8;
  return height >= kLeastExactHeight && multiplies_exactly(w) ? Loop::kExact : Loop::kRounded;
}

Tile tile_of(PackedWeight const& w, DataType x_type, Loop loop, int height) {
  int const bits = code_bits(w), warpgroups = grouped_warpgroups(bits, height);
  return loop == Loop::kInt8 ? wgmma_gemm_a8_tile(bits, height, warpgroups)
         : loop == Loop::kExact
             ? wgmma_gemm_a16_tile(bits, height, has_own_scales(w, x_type) ? warpgroups : 2)
             : wgmma_fold16_tile(height, bits, has_narrow_scales(w, x_type));
}

GroupedGemm product_of(PackedExperts const& experts, bool gated) {
  GroupedGemm gemm;
  gemm.weight = experts.stack, gemm.experts = experts.experts;
  gemm.groups.row_panels = int(padded_rows(experts.n) / kRowsPerPanel), gemm.groups.gated = gated;
  gemm.groups.bias = experts.bias, gemm.groups.bias_type = experts.bias_type;
  gemm.n = gated ? experts.n / 2 : experts.n;
  return gemm;
}

int most_tiles(RouteProblem const& r, int height) {
  int64_t const positions = r.positions(), touched = std::min<int64_t>(r.experts, positions);
  return int(touched + (positions - touched) / height);
}

// With 4 bits in groups of 64 or more, and of 32 where x has one scale a row. With one scale a
// block, sums of 32 columns take longer than the product of 16-bit values.
bool decodes_codes(MoeProblem const& p) {
  return multiplies_codes(p, [&](PackedWeight const& w) {
    int const least = code_bits(w) == 8 ? kKPerTile : p.act_quant == ActQuant::kToken ? 32 : 64;
    return has_exact_kernels(w) && !w.offsets && zeros_fit_int8(w) && has_own_scales(w, p.x_type) &&
           (w.group_size == -1 || w.group_size >= least);
  });
}

namespace {

// Measured times of a tile of kGroupedInt8Heights or kGroupedHeights and 256 features, in tenths of
// a microsecond for K = 4096 on an H200, by loop and width: of the first two loops the times of a
// weight in dispatch/tile_costs.inc, of wgmma_fold16 those that layers of 4-bit weights fit, where
// each CTA reads its rows itself. (Of 8 bits two layers were measured, with 96 and 144 rows.) Those
// of 32 rows, and of 64 with 4 bits, are set so that the choice between 32, 64 and 96 rows is right
// for layers of 4-bit weights (docs/tuning-notes.md, experts of few rows).
constexpr int kTileCosts[3][kWidths][4] = {{{118, 170, 210, 243}, {118, 143, 193, 235}},
                                           {{115, 124, 176, 230}, {124, 160, 190, 246}},
                                           {{108, 158, 213, 300}, {115, 170, 245, 334}}};
constexpr int kTokenTileCosts[kWidths][4] = {{86, 120, 171, 194}, {94, 116, 174, 209}};
static_assert(std::size(kGroupedHeights) == 4 && std::size(kGroupedInt8Heights) == 4);
constexpr int kTwoWarpgroupsCost = 137;  // of kExact's 64 rows and 4 bits, where they are not four

int tile_cost(MoeProblem const& p, PackedWeight const& w, Loop loop, Tile const& tile,
              int height_index) {
  int const width = width_index(code_bits(w));
  if (loop == Loop::kInt8 && p.act_quant != ActQuant::kBlock)
    return kTokenTileCosts[width][height_index];
  bool const two = loop == Loop::kExact && tile.block_m == 64 && kFourWarpgroups[code_bits(w)] &&
                   tile.block_n == 256;
  return two ? kTwoWarpgroupsCost : kTileCosts[int(loop)][width][height_index];
}

// The expected number of tiles if all experts are equally likely: for each expert the sum over i of
// the probability that it has more than `height` * i rows. The number of rows is binomial and
// approximated as normal.
double expected_tiles(RouteProblem const& r, int height) {
  double const rows = double(r.positions()) / r.experts, chance = 1.0 / r.experts;
  double const deviation = std::sqrt(rows * (1 - chance)) + 1e-9;
  double tiles = std::max(0.0, std::floor((rows - 8 * deviation) / height));
  // a token's experts differ
  if (tiles == 0) tiles = 1 - std::pow(1 - std::min(1.0, double(r.top) / r.experts), r.tokens);
  for (double more = std::max(1.0, std::ceil(tiles));; ++more) {
    double const likely =
        0.5 * std::erfc((more * height + 0.5 - rows) / (deviation * std::sqrt(2.0)));
    if (likely < 1e-4) return tiles * r.experts;
    tiles += likely;
  }
}

// The deviation of the number of tiles: each expert has one more than others or not, and as a
// token's experts differ, it is some 0.6 of that of independent choices.
double tiles_deviation(RouteProblem const& r, double tiles) {
  double const more = tiles / r.experts - std::floor(tiles / r.experts);
  return 0.6 * std::sqrt(r.experts * more * (1 - more));
}

// The expected number of waves in which clusters take so many tiles each.
double expected_waves(RouteProblem const& r, double tiles, double of_tile) {
  constexpr int kMany = 16;  // of which the last is half full on average
  double const mean = tiles * of_tile, deviation = tiles_deviation(r, tiles) * of_tile + 1e-9;
  if (mean > kMany) return mean + 0.5;
  double waves = 1;
  for (double full = 1;; ++full) {
    double const likely =
        0.5 * std::erfc((full + 0.5 * of_tile - mean) / (deviation * std::sqrt(2.0)));
    if (likely < 1e-4) return waves;
    waves += likely;
  }
}

// The mean time of tiles, of that of full ones: those of 64 rows or more multiply the rows that
// there are, in steps (hopper::with_rows). Measured with layers of 4-bit weights on an H200.
double share_of_time(RouteProblem const& r, double tiles, int height) {
  double const rows = double(r.positions()) / (tiles + 1e-9) + row_step(height) / 2,
               least = least_taken_rows(height);
  return 0.6 + 0.4 * std::clamp(rows, least, double(height)) / height;
}

// Rows of an expert on average up to which tiles of 16 rows are faster than higher ones, of a card
// in cards.inc: 16 rows wait for memory, and decode weights again for an expert's next 16; higher
// tiles, whose time is that of decoding, take the same on both cards (docs/tuning-notes.md).
// int8_rows() may be less.
struct DecodeRows {  // all of 4 bits
  int exact;         // products of 16-bit x
  int rounded;       // weights, in groups of 64 or more
  int short_groups;  // and in others, with scales of x's type, without offsets and biases
  int blocks;        // with scales for blocks of codes of x
  int tokens;        // with one for each row
};
constexpr DecodeRows kDecodeRows[] = {{4, 2, 2, 4, 6}, {10, 8, 6, 12, 12}};
static_assert(std::size(kDecodeRows) == kCardCount);
constexpr int kOtherRoundedRows = 2;  // other rounded weights
constexpr int kCodesOf8BitsRows = 3;  // codes of x times weights of 8 bits
constexpr int kMostDecodeRows = 12;   // of all: with more, many an expert has more than 16

// The same where higher tiles multiply int8 codes, too. Their ends take longer than those of 16
// rows: with 42 tiles of K from one end to the next (Mixtral), 10 (Qwen3-30B-A3B) and 6 (an eighth
// of DeepSeek-V3) these are 1.5, 3.5 and 6.5 rows on an H200. Where groups have 64 columns, higher
// tiles promote twice as often: between 4 and 8 rows where 13 tiles are 3.4 (GLM-4.5-Air, a half).
double int8_rows(MoeProblem const& p) {
  double features = 0, tiles = 0;
  for (PackedExperts const* experts : {&p.gate_up, &p.down})
    features += experts->n, tiles += double(experts->n) * k_tiles(experts->stack);
  bool const halves = has_short_groups(p.gate_up.stack) || has_short_groups(p.down.stack);
  return 1 + (halves ? 45 : 30) * features / tiles;
}

// The waves of clusters that one tile of rows takes with all of an expert's features.
double waves_of_tile(PackedExperts const& experts, Tile const& tile, Device const& device) {
  return double(ceil_div(padded_rows(experts.n), tile.block_n)) /
         std::max(1, device.multiprocessors / tile.cluster_size);
}

// Short groups whose scales are applied in fp32 make tiles of 16 rows slow, so that tiles of 32 are
// faster where they fill the GPU more than so many times, in the mean of both products
// (docs/tuning-notes.md).
constexpr double kWideWaves = 1.7, kWideWavesOf16 = 0.7;  // the latter with groups of 16

bool fills_tiles_of_32_rows(MoeProblem const& p, Device const& device) {
  double waves = 0, most = kWideWaves;
  for (PackedExperts const* experts : {&p.gate_up, &p.down}) {
    PackedWeight const& w = experts->stack;
    if (!has_short_groups(w) || !has_integer_codes(w) || has_narrow_scales(w, p.x_type))
      return false;
    int const height = kGroupedHeights[0];
    Tile const tile = tile_of(w, p.x_type, Loop::kRounded, height);
    waves += expected_tiles(p.route, height) * waves_of_tile(*experts, tile, device) / 2;
    if (w.group_size == 16) most = kWideWavesOf16;
  }
  return waves > most;
}

double most_decode_rows(MoeProblem const& p, Device const& device) {
  GroupedGemm gate_up = product_of(p.gate_up, true), down = product_of(p.down, false);
  gate_up.x_type = down.x_type = p.x_type;
  DecodeRows const& most = kDecodeRows[card_of(device)];
  auto const both = [&](auto const& are) { return are(gate_up.weight) && are(down.weight); };
  bool const nibbles = both(has_nibbles);
  if (decodes_codes(p)) {
    int const rows = !nibbles                          ? kCodesOf8BitsRows
                     : p.act_quant == ActQuant::kToken ? most.tokens
                                                       : most.blocks;
    return multiplies_codes(p, false) ? std::min<double>(rows, int8_rows(p)) : rows;
  }
  if (fills_tiles_of_32_rows(p, device)) return 0;
  // Tiles of 32 rows have 512 features. Where these would be badly filled, tiles of 16 rows are
  // faster up to more rows.
  double wanted = 0, used = 0;
  for (GroupedGemm const* gemm : {&gate_up, &down}) {
    int const features = gemm->groups.row_panels * kRowsPerPanel,
              block_n = wgmma_fold16_tile(kGroupedHeights[0], code_bits(gemm->weight)).block_n;
    double const columns = gemm->weight.k;
    wanted += columns * features, used += columns * ceil_div(features, block_n) * block_n;
  }
  bool const exact = decodes_exactly(gate_up) && decodes_exactly(down),
             long_groups = both(
                 [](PackedWeight const& w) { return w.group_size == -1 || w.group_size >= 64; }),
             dealt = !p.gate_up.bias && !p.down.bias && both([&](PackedWeight const& w) {
               return has_narrow_scales(w, p.x_type) && !w.offsets;
             });
  int const rows = exact                    ? most.exact
                   : nibbles && long_groups ? most.rounded
                   : nibbles && dealt       ? most.short_groups
                                            : kOtherRoundedRows;
  return used > 1.15 * wanted ? std::min(2 * rows, kMostDecodeRows) : rows;
}

// The heights of the portable kernels and their costs, with 16-bit x and with int8: measured on an
// H100 with int4 weights (docs/tuning-notes.md).
constexpr int kPortableHeights[] = {16, 32, 64};
constexpr int kPortableCosts[2][3] = {{100, 148, 268}, {100, 158, 290}};

}  // namespace

double likely_tiles(RouteProblem const& r, int height) {
  double const tiles = expected_tiles(r, height);
  return std::min(double(most_tiles(r, height)), tiles + tiles_deviation(r, tiles));
}

bool decodes(MoeProblem const& p, Device const& device) {
  int64_t const positions = p.route.positions(),
                touched = std::min<int64_t>(p.route.experts, positions);
  return double(positions) <= most_decode_rows(p, device) * double(touched);
}

// Smaller tiles waste fewer rows of an expert; larger ones decode its weights less often, but a
// product may fill their features badly. Both products have tiles of 16 or 32 rows, or neither has,
// because these are less exact.
std::pair<int, int> tile_heights(MoeProblem const& p, Device const& device) {
  if (decodes(p, device)) return {WgmmaDecodeShape::kBlockM, WgmmaDecodeShape::kBlockM};
  bool const int8 = multiplies_codes(p, false);
  int const* const heights = int8 ? kGroupedInt8Heights : kGroupedHeights;
  int const count = int(int8 ? std::size(kGroupedInt8Heights) : std::size(kGroupedHeights));
  auto const time = [&](PackedExperts const& experts, int i) {
    PackedWeight const& w = experts.stack;
    if (heights[i] == kHeightWithoutGroupsOf16 && w.group_size == 16 &&
        has_narrow_scales(w, p.x_type))
      return HUGE_VAL;
    Tile const tile = tile_of(w, p.x_type, loop_of(w, int8, heights[i]), heights[i]);
    Loop const costs = loop_of(w, int8, kLeastExactHeight);  // also of 32 rows
    double const of_tile = waves_of_tile(experts, tile, device);
    double const tiles = expected_tiles(p.route, heights[i]);
    return expected_waves(p.route, tiles, of_tile) * tile_cost(p, w, costs, tile, i) *
           share_of_time(p.route, tiles, heights[i]) * tile.block_n * k_tiles(w);
  };
  auto const best = [&](auto const& time_of) {
    int found = 0;
    for (int i = 1; i < count; ++i)
      if (time_of(i) < time_of(found)) found = i;
    return heights[found];
  };
  int const both = best([&](int i) { return time(p.gate_up, i) + time(p.down, i); });
  if (both < kLeastExactHeight) return {both, both};
  auto const of = [&](PackedExperts const& experts) {
    return best(
        [&](int i) { return heights[i] < kLeastExactHeight ? HUGE_VAL : time(experts, i); });
  };
  return {of(p.gate_up), of(p.down)};
}

int portable_height(MoeProblem const& p) {
  int const* const costs = kPortableCosts[multiplies_codes(p, true)];
  bool const short_groups = p.gate_up.stack.group_size == 16 || p.down.stack.group_size == 16;
  int best = 0;
  double least = 0;
  for (size_t i = 0; i < std::size(kPortableHeights); ++i) {
    if (short_groups && kPortableHeights[i] > kMmaRowsOfGroupsOf16) break;
    double const time = expected_tiles(p.route, kPortableHeights[i]) * costs[i];
    if (best && time >= least) continue;
    best = kPortableHeights[i], least = time;
  }
  return best;
}

}  // namespace cutlass_ops
