// The operators of experts: lay out the workspace, launch. Host code; without CUDA
// every call says so.
#include "cutlass_ops/experts.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "cutlass_ops/layout.h"
#include "dispatch/checks.h"
#include "dispatch/cost.h"
#include "dispatch/decode_shape.h"
#include "dispatch/grouped.h"
#include "dispatch/launch_shape.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

struct MoeLayout {
  size_t x = 0, x_values = 0, x_scales = 0, hidden = 0, hidden_gathered = 0, hidden_values = 0,
         outputs = 0, slices = 0, arrived = 0, total = 0;
  int64_t hidden_stride = 0;  // of rows, in elements
};

// The rows of a quantised tensor, with their scales and zero points.
struct QuantizedBytes {
  size_t values, scales, zeros;
  size_t total() const { return values + scales + zeros; }
};
QuantizedBytes quantized_bytes(int rows, int k, int group_size) {
  int64_t const k_pad = padded_k(k), blocks = k_pad / activation_block(group_size);
  return {align_256(size_t(rows) * k_pad * 2), align_256(size_t(blocks) * rows * sizeof(float)),
          align_256(size_t(blocks) * rows)};
}

// Scales of a row of x that the product applies: for int8 codes all block scales, or one; 16-bit
// values of codes include their block scales.
int scale_blocks(MoeProblem const& p, MoePlan const& plan, PackedWeight const& w) {
  return plan.int8 && p.act_quant == ActQuant::kBlock
             ? int(padded_k(w.k) / activation_block(w.group_size))
             : 1;
}

int padded_slots(RouteProblem const& r, bool routes) {
  int64_t const positions = r.positions(), touched = std::min<int64_t>(r.experts, positions);
  return int(ceil_div(positions + (routes ? touched * (kSlotRows - 1) : 0), kSlotRows) * kSlotRows);
}
int most_tiles(RouteProblem const& r, int height) {
  int64_t const positions = r.positions(), touched = std::min<int64_t>(r.experts, positions);
  return int(touched + (positions - touched) / height);
}
// Whether the tiles of down have another table than those of gate and up.
bool has_two_tables(MoePlan const& plan) { return plan.gate_up.block_m != plan.down.block_m; }
int stored_tiles(RouteProblem const& r, MoePlan const& plan) {
  return most_tiles(r, plan.gate_up.block_m) +
         (has_two_tables(plan) ? most_tiles(r, plan.down.block_m) : 0);
}

// One chunk has up to 4096 positions: several take another launch, some 2 us, which counts those of
// each.
int route_chunks(RouteProblem const& r) {
  constexpr int kMostOfOne = 4096, kOfEach = 2048, kMost = 128;
  return r.positions() <= kMostOfOne
             ? 1
             : int(std::min<int64_t>(kMost, ceil_div(r.positions(), kOfEach)));
}
int rounded_rows(int rows) { return int(ceil_div(rows, 16) * 16); }

// The sums of slices of K, and the counters of both products, where a portable kernel cuts K.
size_t slice_bytes(Plan const& plan) {
  return plan.slices == 1
             ? 0
             : size_t(plan.grid_x) * plan.slices * plan.block_m * plan.block_n * sizeof(float);
}
int arrivals(MoePlan const& plan) {
  return plan.gate_up.slices == 1 && plan.down.slices == 1 ? 0
                                                           : plan.gate_up.grid_x + plan.down.grid_x;
}

MoeLayout lay_out(MoeProblem const& p, MoePlan const& plan) {
  int const slots = plan.slots;
  MoeLayout layout;
  RouteProblem const& r = p.route;
  int const hidden = p.gate_up.stack.k, intermediate = p.down.stack.k;
  bool const quantizes = p.act_quant != ActQuant::kNone,
             gathers_first = quantizes && p.gate_up.perm;
  int const x_slots = plan.gathers ? slots : 0;
  // tiles of both products, their counts and that of slots, positions of slots and slots of
  // positions, counts of chunks
  size_t const table_ints = size_t(stored_tiles(r, plan)) * 4 + 8 + size_t(slots) +
                            size_t(r.positions()) +
                            (size_t(r.experts) + 1) * size_t(route_chunks(r));
  layout.x = plan.routes ? align_256(table_ints * sizeof(int) + 64) : 0;
  layout.x_values = layout.x + align_256(size_t(x_slots) * padded_k(hidden) * 2);
  layout.x_scales = layout.x_values;
  if (quantizes)
    layout.x_scales += quantized_bytes(gathers_first ? slots : rounded_rows(r.tokens), hidden,
                                       p.gate_up.stack.group_size)
                           .total();
  layout.hidden =
      layout.x_scales +
      (quantizes
           ? align_256(size_t(x_slots) * scale_blocks(p, plan, p.gate_up.stack) * sizeof(float))
           : 0);
  layout.hidden_stride = ceil_div(intermediate, 8) * 8;
  size_t const hidden_bytes = align_256(size_t(slots) * layout.hidden_stride * 2);
  layout.hidden_gathered = layout.hidden + hidden_bytes;
  layout.hidden_values = layout.hidden_gathered + (p.down.perm ? hidden_bytes : 0);
  layout.outputs =
      layout.hidden_values +
      (quantizes ? quantized_bytes(slots, intermediate, p.down.stack.group_size).total() : 0);
  layout.slices = layout.outputs + align_256(size_t(slots) * hidden * sizeof(float));
  layout.arrived =
      layout.slices + align_256(std::max(slice_bytes(plan.gate_up), slice_bytes(plan.down)));
  layout.total = layout.arrived + align_256(size_t(arrivals(plan)) * sizeof(int));
  return layout;
}

Status unsupported_experts(std::string const& what) {
  return {Status::kUnsupported, "experts: " + what};
}

Status check_route(RouteProblem const& r) {
  if (r.experts < 1 || r.tokens < 0 || r.top < 0) {
    return invalid("experts is " + std::to_string(r.experts) + ", tokens " +
                   std::to_string(r.tokens) + " and top " + std::to_string(r.top) +
                   "; at least 1, 0 and 0 are expected");
  }
  if (r.experts > kMostExperts || int64_t(r.tokens) * r.top > kMostPositions) {
    return unsupported_experts("up to " + std::to_string(kMostExperts) + " experts and " +
                               std::to_string(kMostPositions) + " ids are supported");
  }
  return check_addresses({{"ids", r.ids, r.wide_ids ? 8 : 4, r.positions() > 0},
                          {"expert_map", r.expert_map, int(sizeof(int32_t)), r.map_size > 0}});
}

Status check_memory(MoeProblem const& p) {
  for (PackedExperts const* experts : {&p.gate_up, &p.down}) {
    if (Status status = check_weight(experts->stack); !status.ok()) return status;
    // The layer says how rows of gate and up are ordered; the stack does not.
    if (Status status = check_plain_rows(experts->stack, "a layer of experts"); !status.ok())
      return status;
    if (!fits_fold16(experts->stack))
      return unsupported_experts(
          "groups of 16 have neither zero points nor offsets, nor fp32 scales beside a code book");
    if (experts->bias && !is_float(experts->bias_type))
      return invalid("bias_type is not a float type");
    Status status = check_addresses(
        {{"perm", experts->perm, int(sizeof(int32_t)), false},
         {"bias", experts->bias, experts->bias_type == DataType::kFloat32 ? 4 : 2, false}});
    if (!status.ok()) return status;
  }
  if (!is_float(p.weight_type)) return invalid("weight_type is not a float type");
  bool const any = p.route.positions() > 0;
  Status status = check_addresses(
      {{"x", p.x, 2, any},
       {"topk_weights", p.topk_weights, p.weight_type == DataType::kFloat32 ? 4 : 2, any}});
  return status.ok() ? check_stride("x_stride", p.x_stride, p.gate_up.stack.k, p.route.tokens)
                     : status;
}

// Whether Hopper's kernels are used, not those of sm_80 and later.
bool uses_hopper(MoeProblem const& p, Device const& device) {
  return device.architecture == 90 && (p.architecture == 0 || p.architecture == 90);
}

Status check_moe(MoeProblem const& p, Device const& device) {
  if (Status status = check_architecture(p.architecture, device); !status.ok()) return status;
  int const architecture = p.architecture ? p.architecture : device.architecture;
  if (architecture < 80)
    return unsupported_experts("kernels run on sm_80 and later; architecture is " +
                               std::to_string(architecture));
  if (uses_hopper(p, device) && device.shared_memory < kHopperSharedBytes)
    return unsupported_experts("too little shared memory");
  if (p.x_type != DataType::kFloat16 && p.x_type != DataType::kBFloat16)
    return unsupported_experts("x is of fp16 or bf16");
  if (p.down.stack.k % 8)
    return unsupported_experts("intermediate is " + std::to_string(p.down.stack.k) +
                               "; multiples of 8 are supported");
  if (p.down.n % 8)
    return unsupported_experts("hidden is " + std::to_string(p.down.n) +
                               "; multiples of 8 are supported");
  Status status = check_act_quant(p.act_quant);
  if (status.ok()) status = check_activation(p.activation, p.clamp_low, p.clamp_high, true);
  if (status.ok()) status = check_route(p.route);
  return status.ok() ? check_memory(p) : status;
}

// The kernel for experts of many rows: wgmma_gemm_a8, of int8 codes of x; wgmma_gemm_a16, whose
// products are exact too; or wgmma_fold16, which takes all formats and, alone, tiles of 32 rows.
enum class Loop { kInt8, kExact, kRounded };

// Whether x has int8 codes without zero points, and kernels that take `takes` of a weight multiply
// them in both products. (A single one would have other tile heights.)
template <class Takes>
bool multiplies_codes(MoeProblem const& p, Takes const& takes) {
  return p.act_quant != ActQuant::kNone && p.act_symmetric && takes(p.gate_up.stack) &&
         takes(p.down.stack);
}
bool multiplies_codes(MoeProblem const& p) {
  return multiplies_codes(
      p, [](PackedWeight const& w) { return has_int8_products(w) && has_integer_codes(w); });
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
             : wgmma_fold16_tile(height, bits, folds_narrow_scales(w, x_type));
}

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
  int const step = row_step(height),
            least = height - (height - least_taken_rows(height)) / step * step;
  double const rows = double(r.positions()) / (tiles + 1e-9) + step / 2;
  return 0.6 + 0.4 * std::clamp(rows, double(least), double(height)) / height;
}

GroupedGemm product_of(PackedExperts const& experts, bool gated) {
  GroupedGemm gemm;
  gemm.weight = experts.stack, gemm.experts = experts.experts;
  gemm.groups.row_panels = int(padded_rows(experts.n) / kRowsPerPanel), gemm.groups.gated = gated;
  gemm.groups.bias = experts.bias, gemm.groups.bias_type = experts.bias_type;
  gemm.n = gated ? experts.n / 2 : experts.n;
  return gemm;
}

// Whether tiles of 16 rows multiply int8 codes on Hopper: with 4 bits in groups of 64 or more, and
// of 32 where x has one scale a row. With one scale a block, sums of 32 columns take longer than
// the product of 16-bit values.
bool decodes_codes(MoeProblem const& p) {
  return multiplies_codes(p, [&](PackedWeight const& w) {
    int const least = code_bits(w) == 8 ? kKPerTile : p.act_quant == ActQuant::kToken ? 32 : 64;
    return has_integer_codes(w) && !w.offsets && zeros_fit_int8(w) && has_own_scales(w, p.x_type) &&
           (w.group_size == -1 || w.group_size >= least);
  });
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
// of DeepSeek-V3) these are 1.5, 3.5 and 6.5 rows on an H200.
double int8_rows(MoeProblem const& p) {
  double features = 0, tiles = 0;
  for (PackedExperts const* experts : {&p.gate_up, &p.down})
    features += experts->n, tiles += double(experts->n) * k_tiles(experts->stack);
  return 1 + 30 * features / tiles;
}

double most_decode_rows(MoeProblem const& p, Device const& device) {
  GroupedGemm gate_up = product_of(p.gate_up, true), down = product_of(p.down, false);
  gate_up.x_type = down.x_type = p.x_type;
  DecodeRows const& most = kDecodeRows[card_of(device)];
  auto const both = [&](auto const& are) { return are(gate_up.weight) && are(down.weight); };
  bool const nibbles = both([](PackedWeight const& w) { return code_bits(w) == 4; });
  if (decodes_codes(p)) {
    int const rows = !nibbles                          ? kCodesOf8BitsRows
                     : p.act_quant == ActQuant::kToken ? most.tokens
                                                       : most.blocks;
    return multiplies_codes(p) ? std::min<double>(rows, int8_rows(p)) : rows;
  }
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

// Whether experts have few rows, for both products: 16 a tile.
bool decodes(MoeProblem const& p, Device const& device) {
  int64_t const positions = p.route.positions(),
                touched = std::min<int64_t>(p.route.experts, positions);
  return double(positions) <= most_decode_rows(p, device) * double(touched);
}

// BLOCK_M of gate and up, and of down. Smaller tiles waste fewer rows of an expert; larger ones
// decode its weights less often, but a product may fill their features badly. Both products have
// tiles of 16 or 32 rows, or neither has, because these are less exact.
std::pair<int, int> tile_heights(MoeProblem const& p, Device const& device) {
  if (decodes(p, device)) return {WgmmaDecodeShape::kBlockM, WgmmaDecodeShape::kBlockM};
  bool const int8 = multiplies_codes(p);
  int const* const heights = int8 ? kGroupedInt8Heights : kGroupedHeights;
  int const count = int(int8 ? std::size(kGroupedInt8Heights) : std::size(kGroupedHeights));
  auto const time = [&](PackedExperts const& experts, int i) {
    PackedWeight const& w = experts.stack;
    Tile const tile = tile_of(w, p.x_type, loop_of(w, int8, heights[i]), heights[i]);
    Loop const costs = loop_of(w, int8, kLeastExactHeight);  // also of 32 rows
    double const of_tile = double(ceil_div(padded_rows(experts.n), tile.block_n)) /
                           std::max(1, device.multiprocessors / tile.cluster_size);
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

// The same of the portable kernels, by the costs of their tiles, of 16-bit x and of int8: measured
// on an H100 with int4 weights (docs/tuning-notes.md).
constexpr int kPortableHeights[] = {16, 32, 64};
constexpr int kPortableCosts[2][3] = {{100, 148, 268}, {100, 158, 290}};
int portable_height(MoeProblem const& p) {
  int const* const costs = kPortableCosts[multiplies_codes(p)];
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

// Whether rows of x are copied to their slots first. An act order differs by expert, and reading
// rows through an index needs whole 16-byte pieces that 32 bits can number. With many features and
// tiles of many rows the copy is a small part of the product, and clusters then share the rows by
// TMA multicast. Times of both ways are in docs/tuning-notes.md.
bool gathers(MoeProblem const& p, Device const& device, MoePlan const& plan) {
  constexpr int kManyFeatures = 4096;
  if (plan.portable && multiplies_codes(p)) return true;
  if (!plan.portable && !decodes(p, device) && p.gate_up.n >= kManyFeatures) return true;
  bool const quantizes = p.act_quant != ActQuant::kNone;
  bool const pieces =
      quantizes || (reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride % 8 == 0);
  int64_t const stride = quantizes ? padded_k(p.gate_up.stack.k) : p.x_stride;
  return p.gate_up.perm || !pieces || p.gate_up.stack.k % 8 ||
         p.route.tokens * stride > int64_t(INT_MAX) * 8;
}

// A number of tiles that most routings do not exceed, so that the choice does not miss a wave of
// CTAs by one tile.
double likely_tiles(RouteProblem const& r, int height) {
  double const tiles = expected_tiles(r, height);
  return std::min(double(most_tiles(r, height)), tiles + tiles_deviation(r, tiles));
}

// The plan of one product by a portable kernel: a CTA for each tile that there may be. K is cut
// where the expected tiles would leave most of the GPU idle.
void plan_portable(GroupedGemm const& gemm, RouteProblem const& r, Device const& device,
                   MoePlan const& moe, int height, Plan* plan) {
  constexpr int kLeastTilesOfK = 6, kMostSlices = 8;  // of a slice
  GemmProblem rows = rows_of_all(gemm);
  int const bits = code_bits(gemm.weight);
  Candidate candidate;
  candidate.tile = moe.int8 ? mma_gemm_a8_tile(bits, height) : mma_gemm_a16_tile(bits, height);
  *plan = {};
  plan->kernel = moe.int8 ? "mma_gemm_a8" : "mma_gemm_a16";
  plan->block_m = height, plan->block_n = candidate.tile.block_n;
  (moe.int8 ? shape_mma_gemm_a8 : shape_mma_gemm_a16)(rows, device, candidate, plan);
  int const columns =
      int(ceil_div(int64_t(gemm.groups.row_panels) * kRowsPerPanel, candidate.tile.block_n));
  double const places = double(device.multiprocessors) * candidate.tile.min_ctas_per_sm;
  if (height <= kMmaRowsOfSlices)
    plan->slices =
        std::clamp(int(places / (likely_tiles(r, height) * columns)), 1,
                   std::clamp(int(k_tiles(gemm.weight)) / kLeastTilesOfK, 1, kMostSlices));
  plan->grid_x = most_tiles(r, height) * columns, plan->grid_y = plan->slices;
}

// The plan of one product: its grid covers the largest possible number of tiles, its shape suits
// the expected number.
bool plan_product(GroupedGemm const& gemm, RouteProblem const& r, Device const& device,
                  MoePlan const& moe, int height, Plan* plan) {
  PackedWeight const& w = gemm.weight;
  int const tiles = most_tiles(r, height);
  *plan = {};
  plan->block_m = height;
  if (height == WgmmaDecodeShape::kBlockM) {
    plan->kernel = decodes_exactly(gemm) ? "wgmma_decode" : "wgmma_decode_fold16";
    plan->wgmma_decode = grouped_decode_shape(gemm, device, likely_tiles(r, height), tiles);
    WgmmaDecodeShape const& shape = plan->wgmma_decode;
    if (!shape.cluster) return false;
    plan->block_n = shape.most_row_panels * kRowsPerPanel, plan->cluster_size = shape.cluster;
    plan->grid_x = (shape.dealt ? 1 : tiles) * shape.clusters * shape.cluster;
    plan->threads = WgmmaDecodeShape::threads(false);
    plan->shared_bytes = shape.shared_bytes, plan->stages = shape.stages;
    return true;
  }
  Loop const loop = loop_of(w, moe.int8, height);
  Tile const tile = tile_of(w, gemm.x_type, loop, height);
  plan->kernel = loop == Loop::kInt8    ? "wgmma_gemm_a8"
                 : loop == Loop::kExact ? "wgmma_gemm_a16"
                                        : "wgmma_fold16";
  plan->block_n = tile.block_n, plan->cluster_size = tile.cluster_size, plan->stages = tile.stages;
  int64_t const pairs = ceil_div(int64_t(gemm.groups.row_panels) * kRowsPerPanel, tile.block_n);
  plan->grid_x = int(std::min<int64_t>(tiles * pairs, device.multiprocessors / tile.cluster_size)) *
                 tile.cluster_size;
  plan->threads = tile.block_n + 128, plan->shared_bytes = kHopperSharedBytes;
  return true;
}

}  // namespace

Status plan_moe(MoeProblem const& problem, Device const& device, MoePlan* plan) {
  if (Status status = check_moe(problem, device); !status.ok()) return status;
  *plan = {};
  RouteProblem const& r = problem.route;
  plan->portable = !uses_hopper(problem, device);
  plan->gathers = gathers(problem, device, *plan);
  auto const fill_in = [&](int gate_up_height, int down_height) {
    bool const few = !plan->portable && down_height == WgmmaDecodeShape::kBlockM;
    plan->routes = !few || r.positions() > kMostFoundPositions || r.experts > kMostFoundExperts;
    plan->slots = padded_slots(r, plan->routes);
    plan->int8 = plan->portable ? multiplies_codes(problem)
                 : few ? decodes_codes(problem)
                       : gate_up_height >= kGroupedInt8Heights[0] && multiplies_codes(problem);
    GroupedGemm gate_up = product_of(problem.gate_up, true), down = product_of(problem.down, false);
    gate_up.x_type = down.x_type = problem.x_type;
    if (plan->int8) gate_up.x_codes = down.x_codes = problem.act_quant;
    if (plan->portable) {
      plan_portable(gate_up, r, device, *plan, gate_up_height, &plan->gate_up);
      plan_portable(down, r, device, *plan, down_height, &plan->down);
      return true;
    }
    return plan_product(gate_up, r, device, *plan, gate_up_height, &plan->gate_up) &&
           plan_product(down, r, device, *plan, down_height, &plan->down);
  };
  int const portable = plan->portable ? portable_height(problem) : 0;
  auto const [gate_up_height, down_height] =
      plan->portable ? std::pair(portable, portable) : tile_heights(problem, device);
  if (!fill_in(gate_up_height, down_height))  // groups whose vectors leave too little room
    fill_in(kGroupedHeights[0], kGroupedHeights[0]);
  plan->kernel = plan->gate_up.kernel;
  plan->workspace = lay_out(problem, *plan).total;
  return {};
}

#if CUTLASS_OPS_CUDA
namespace {

Status launch_product(GroupedGemm const& gemm, MoePlan const& moe, Plan const& plan,
                      Stream stream) {
  PackedWeight const& w = gemm.weight;
  if (moe.portable)
    return moe.int8 ? launch_grouped_mma_gemm_a8(gemm, plan, stream)
                    : launch_grouped_mma_gemm_a16(gemm, plan, stream);
  if (plan.wgmma_decode.cluster > 0) {
    if (decodes_exactly(gemm)) return launch_grouped_decode(gemm, plan, stream);
    return visit(w.format, [&](auto format) {
      return launch_grouped_decode_fold16<decltype(format)>(gemm, plan, stream);
    });
  }
  switch (loop_of(w, gemm.x_codes != ActQuant::kNone, plan.block_m)) {
    case Loop::kInt8:
      return launch_grouped_gemm_a8(gemm, plan, stream);
    case Loop::kExact:
      return launch_grouped_gemm_a16(gemm, plan, stream);
    case Loop::kRounded:
      break;
  }
  return visit(w.format, [&](auto format) {
    return launch_grouped_fold16<decltype(format)>(gemm, plan, stream);
  });
}

// Experts' outputs are fp32 where they are few. Otherwise they are most of a layer's memory
// traffic, and are rounded to x's type.
DataType outputs_type(MoeProblem const& p, MoePlan const& plan) {
  return plan.down.block_m == WgmmaDecodeShape::kBlockM ? DataType::kFloat32 : p.x_type;
}

// Quantises rows of 16-bit floats to int8 codes, or to their values in 16 bits. The product applies
// all scales of codes, or one scale per row of values.
struct Quantized {
  void* values = nullptr;
  float* scales = nullptr;  // or null
  int stride = 0;           // from those of a block to those of the next
};
Status quantize_rows(MoeProblem const& p, MoePlan const& plan, void const* x, int64_t stride,
                     int rows, int k, int group_size, uint8_t* memory, bool early, Stream stream,
                     Quantized* out) {
  int const room = rounded_rows(rows);
  QuantizedBytes const bytes = quantized_bytes(room, k, group_size);
  QuantizeProblem problem{x, p.x_type, stride, rows, k, nullptr, {}};
  QuantizedActivations& q = problem.out;
  q.codes = reinterpret_cast<int8_t*>(memory),
  q.scales = reinterpret_cast<float*>(memory + bytes.values);
  q.zeros =
      p.act_symmetric ? nullptr : reinterpret_cast<int8_t*>(memory + bytes.values + bytes.scales);
  q.block = p.act_quant == ActQuant::kToken ? -1 : activation_block(group_size);
  q.stride = room, q.rows = rows;
  if (!plan.int8) q.upcast = memory, q.upcast_type = p.x_type;
  out->values = memory, out->scales = q.block == -1 || plan.int8 ? q.scales : nullptr,
  out->stride = room;
  return launch_quantize_activations(problem, stream, {early});
}

}  // namespace

Status route(RouteProblem const& problem, Routing const& routing, Stream stream) {
  Status status = check_route(problem);
  if (status.ok()) {
    status =
        check_addresses({{"offsets", routing.offsets, int(sizeof(int32_t))},
                         {"order", routing.order, int(sizeof(int32_t)), problem.positions() > 0}});
  }
  if (!status.ok()) return status;
  return launch_route(problem, routing, stream);
}

Status mixed_moe(MoeProblem const& p, MoePlan const& plan, Workspace workspace, Stream stream) {
  if (!plan.kernel) return {Status::kInvalid, "the plan is empty; plan_moe() fills it"};
  if (p.route.positions() == 0)
    return {Status::kInvalid, "there are no tokens, or these have no experts"};
  if (workspace.bytes < plan.workspace) {
    return {Status::kInvalid, "the workspace has " + std::to_string(workspace.bytes) + " bytes; " +
                                  std::to_string(plan.workspace) + " are needed"};
  }
  Status status = check_addresses(
      {{"the workspace", workspace.data, kWorkspaceBytes, plan.workspace > 0}, {"out", p.out, 2}});
  if (!status.ok()) return status;
  MoeLayout const layout = lay_out(p, plan);
  auto* const base = static_cast<uint8_t*>(workspace.data);
  RouteProblem const& r = p.route;
  int const slots = plan.slots, hidden = p.gate_up.stack.k, intermediate = p.down.stack.k;
  RowSlots table;
  if (plan.routes) {
    auto* const tiles = reinterpret_cast<StoredTile*>(base);
    auto* ints = reinterpret_cast<int*>(tiles + stored_tiles(r, plan));
    table.tables[0] = {tiles, ints, plan.gate_up.block_m};
    if (has_two_tables(plan))
      table.tables[1] = {tiles + most_tiles(r, plan.gate_up.block_m), ints + 1, plan.down.block_m};
    table.used = ints + 2, table.position = ints + 8, table.of_position = table.position + slots;
    table.counts = table.of_position + r.positions(), table.chunks = route_chunks(r);
    table.arrived = reinterpret_cast<int*>(base + layout.arrived),
    table.arrived_count = arrivals(plan);
    status = launch_assign_slots(r, table, stream);
  }

  bool const quantizes = p.act_quant != ActQuant::kNone;
  GroupedGemm gate_up = product_of(p.gate_up, true), down = product_of(p.down, false);
  // x is quantised once per token, unless an act order, which differs by expert, must be applied
  // first.
  bool const quantizes_first = quantizes && !p.gate_up.perm;
  gate_up.x = p.x, gate_up.x_stride = p.x_stride, gate_up.x_rows = r.tokens;
  Quantized quantized;
  auto const quantize = [&](void const* x, int64_t stride, int rows) {
    if (!status.ok()) return;
    status = quantize_rows(p, plan, x, stride, rows, hidden, p.gate_up.stack.group_size,
                           base + layout.x_values, false, stream, &quantized);
    gate_up.x = quantized.values, gate_up.x_stride = padded_k(hidden),
    gate_up.x_scales = quantized.scales;
    gate_up.x_rows = quantized.stride;
  };
  if (quantizes_first) quantize(p.x, p.x_stride, r.tokens);
  if (plan.gathers) {
    GatherProblem gather;
    gather.x = gate_up.x, gather.x_stride = gate_up.x_stride, gather.perm = p.gate_up.perm,
    gather.k = hidden;
    gather.out = base + layout.x, gather.out_stride = padded_k(hidden);
    if (quantizes_first && plan.int8)  // pairs of codes
      gather.x_stride /= 2, gather.out_stride /= 2, gather.k = int(gather.x_stride);
    if (gate_up.x_scales) {
      gather.scales = gate_up.x_scales, gather.scale_stride = gate_up.x_rows;
      gather.blocks = scale_blocks(p, plan, p.gate_up.stack);
      gather.out_scales = reinterpret_cast<float*>(base + layout.x_scales),
      gather.out_scale_stride = slots;
    }
    if (status.ok()) status = launch_gather_rows(r, table, gather, slots, stream);
    gate_up.x = gather.out, gate_up.x_stride = padded_k(hidden),
    gate_up.x_scales = gather.out_scales, gate_up.x_rows = slots;
    if (quantizes && !quantizes_first) quantize(gather.out, gather.out_stride, slots);
  } else {
    gate_up.groups.positions = table.position, gate_up.groups.top = r.top;
  }

  gate_up.x_type = gate_up.out_type = down.x_type = p.x_type;
  gate_up.rows = down.rows = down.x_rows = slots;
  if (plan.int8) gate_up.x_codes = down.x_codes = p.act_quant;
  gate_up.out = base + layout.hidden;
  for (GroupedGemm* gemm : {&gate_up, &down}) {
    TileTable const& tiles = table.tables[gemm == &down && has_two_tables(plan)];
    gemm->groups.tiles = tiles.tiles, gemm->groups.count = tiles.count, gemm->groups.route = r,
    gemm->slices = reinterpret_cast<float*>(base + layout.slices);
  }
  gate_up.arrived = table.arrived, down.arrived = table.arrived + plan.gate_up.grid_x;
  gate_up.groups.written = quantizes || plan.gathers, down.groups.written = true;
  gate_up.groups.activation = p.activation;
  gate_up.groups.bounds = {p.activation, p.clamp_low, p.clamp_high};
  if (status.ok()) status = launch_product(gate_up, plan, plan.gate_up, stream);

  down.x = gate_up.out, down.x_stride = layout.hidden_stride;
  if (p.down.perm) {
    GatherProblem columns;
    columns.x = down.x, columns.x_stride = down.x_stride, columns.in_slots = true,
    columns.perm = p.down.perm;
    columns.k = intermediate, columns.out_stride = down.x_stride;
    columns.out = base + layout.hidden_gathered;
    if (status.ok()) status = launch_gather_rows(r, table, columns, slots, stream);
    down.x = columns.out;
  }
  if (quantizes) {
    if (status.ok())
      status = quantize_rows(p, plan, down.x, down.x_stride, slots, intermediate,
                             p.down.stack.group_size, base + layout.hidden_values,
                             plan.down.wgmma_decode.cluster > 0, stream, &quantized);
    down.x = quantized.values, down.x_stride = padded_k(intermediate),
    down.x_scales = quantized.scales;
  }
  down.out = base + layout.outputs, down.out_type = outputs_type(p, plan);
  if (status.ok()) status = launch_product(down, plan, plan.down, stream);
  if (status.ok()) {
    status = launch_sum_experts(r, table, down.out, down.out_type, p.down.n, p.topk_weights,
                                p.weight_type, p.out, p.x_type, stream);
  }
  return status;
}

#else

Status route(RouteProblem const&, Routing const&, Stream) {
  return {Status::kUnsupported,
          "this build of cutlass_ops has no CUDA kernels; it was compiled without nvcc"};
}
Status mixed_moe(MoeProblem const&, MoePlan const&, Workspace, Stream) {
  return route({}, {}, nullptr);
}

#endif

}  // namespace cutlass_ops
