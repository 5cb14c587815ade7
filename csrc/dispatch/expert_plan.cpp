#include "dispatch/expert_plan.h"

#include <algorithm>
#include <climits>
#include <string>

#include "cutlass_ops/layout.h"
#include "dispatch/checks.h"
#include "dispatch/decode_shape.h"
#include "dispatch/expert_tiles.h"
#include "dispatch/launch_shape.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "formats/formats.h"

namespace cutlass_ops {

QuantizedBytes quantized_bytes(int rows, int k, int group_size) {
  int64_t const k_pad = padded_k(k), blocks = k_pad / activation_block(group_size);
  return {align_256(size_t(rows) * k_pad * 2), align_256(size_t(blocks) * rows * sizeof(float)),
          align_256(size_t(blocks) * rows)};
}

int scale_blocks(MoeProblem const& p, MoePlan const& plan, PackedWeight const& w) {
  return plan.int8 && p.act_quant == ActQuant::kBlock
             ? int(padded_k(w.k) / activation_block(w.group_size))
             : 1;
}

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
int arrivals(MoePlan const& plan) {
  return plan.gate_up.slices == 1 && plan.down.slices == 1 ? 0
                                                           : plan.gate_up.grid_x + plan.down.grid_x;
}

namespace {

int padded_slots(RouteProblem const& r, bool routes) {
  int64_t const positions = r.positions(), touched = std::min<int64_t>(r.experts, positions);
  return int(ceil_div(positions + (routes ? touched * (kSlotRows - 1) : 0), kSlotRows) * kSlotRows);
}

// The sums of slices of K, where a portable kernel cuts K.
size_t slice_bytes(Plan const& plan) {
  return plan.slices == 1
             ? 0
             : size_t(plan.grid_x) * plan.slices * plan.block_m * plan.block_n * sizeof(float);
}

Status unsupported_experts(std::string const& what) {
  return {Status::kUnsupported, "experts: " + what};
}

}  // namespace

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

namespace {

Status check_memory(MoeProblem const& p) {
  for (PackedExperts const* experts : {&p.gate_up, &p.down}) {
    if (Status status = check_weight(experts->stack); !status.ok()) return status;
    // The layer says how rows of gate and up are ordered; the stack does not.
    if (Status status = check_plain_rows(experts->stack, "a layer of experts"); !status.ok())
      return status;
    if (!fits_fold16(experts->stack))
      return unsupported_experts(
          "groups of 16 have no zero points, and offsets only with 2 bits and fp32 scales");
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

// Whether rows of x are copied to their slots first. An act order differs by expert, and reading
// rows through an index needs whole 16-byte pieces that 32 bits can number. With many features and
// tiles of many rows the copy is a small part of the product, and clusters then share the rows by
// TMA multicast. Times of both ways are in docs/tuning-notes.md.
bool gathers(MoeProblem const& p, Device const& device, MoePlan const& plan) {
  constexpr int kManyFeatures = 4096;
  if (plan.portable && multiplies_codes(p, true)) return true;
  if (!plan.portable && !decodes(p, device) && p.gate_up.n >= kManyFeatures) return true;
  bool const quantizes = p.act_quant != ActQuant::kNone;
  bool const pieces =
      quantizes || (reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride % 8 == 0);
  int64_t const stride = quantizes ? padded_k(p.gate_up.stack.k) : p.x_stride;
  return p.gate_up.perm || !pieces || p.gate_up.stack.k % 8 ||
         p.route.tokens * stride > int64_t(INT_MAX) * 8;
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
  if (!plan) return invalid("plan is a null pointer");
  if (Status status = check_moe(problem, device); !status.ok()) return status;
  *plan = {};
  RouteProblem const& r = problem.route;
  plan->portable = !uses_hopper(problem, device);
  plan->gathers = gathers(problem, device, *plan);
  auto const fill_in = [&](int gate_up_height, int down_height) {
    bool const few = !plan->portable && down_height == WgmmaDecodeShape::kBlockM;
    plan->routes = !few || r.positions() > kMostFoundPositions || r.experts > kMostFoundExperts;
    plan->slots = padded_slots(r, plan->routes);
    plan->int8 = plan->portable ? multiplies_codes(problem, true)
                 : few
                     ? decodes_codes(problem)
                     : gate_up_height >= kGroupedInt8Heights[0] && multiplies_codes(problem, false);
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

}  // namespace cutlass_ops
