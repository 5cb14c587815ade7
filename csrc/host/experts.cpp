// The operators of experts: they launch the kernels of a plan. Without CUDA every call says so.
#include "cutlass_ops/experts.h"

#include <string>

#include "cutlass_ops/layout.h"
#include "dispatch/checks.h"
#include "dispatch/expert_plan.h"
#include "dispatch/expert_tiles.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "formats/formats.h"

namespace cutlass_ops {

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
