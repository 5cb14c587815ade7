// plan(): the complete launch of a product.
#include "cutlass_ops/layout.h"
#include "cutlass_ops/zero_compensation.h"
#include "dispatch/problem.h"
#include "dispatch/select.h"

namespace cutlass_ops {
void lay_out_workspace(GemmProblem const& problem, bool upcasts, Plan* plan) {
  PackedWeight const& w = problem.weight;
  WorkspaceLayout layout;
  int64_t const k_pad = padded_k(stored_columns(problem)), x_rows = stored_rows(problem);
  if (quantizes_x(problem) && !plan->quantizes) {
    layout.block = problem.act_quant == ActQuant::kBlock ? activation_block(w.group_size) : -1;
    layout.stride = int(ceil_div(x_rows, 16) * 16);
    layout.rows =
        int(x_rows > kPaddedRows ? x_rows : ceil_div(x_rows, plan->block_m) * plan->block_m);
    int64_t const blocks = layout.block == -1 ? 1 : k_pad / layout.block;
    layout.scales = upcasts ? 0 : align_256(size_t(layout.rows) * k_pad);
    size_t const vectors = size_t(blocks) * layout.stride;
    layout.zeros = layout.scales + align_256(vectors * sizeof(float));
    layout.splitk_workspace = layout.zeros + (problem.act_symmetric ? 0 : align_256(vectors));
  }
  layout.ranges = quantizes_x(problem) && problem.act_quant == ActQuant::kTensor;
  if (layout.ranges) layout.range = layout.splitk_workspace, layout.splitk_workspace += 256;
  if (upcasts && !plan->quantizes && (multiplies_int8(problem) || is_irregular(problem))) {
    layout.upcasts = true, layout.upcast = layout.splitk_workspace;
    layout.splitk_workspace = layout.upcast + align_256(size_t(x_rows) * k_pad * 2);
  }
  if (plan->compensates && activations_have_blocks(problem)) {
    int const stride = problem.quantized.codes ? problem.quantized.stride : layout.stride;
    layout.compensates = true, layout.zero_values = layout.splitk_workspace;
    layout.zero_scales = layout.zero_values + align_256(size_t(problem.m) * zero_columns(w.k) * 2);
    layout.splitk_workspace =
        layout.zero_scales + align_256(size_t(zero_rows(w.k)) * stride * sizeof(float));
  }
  if (plan->compensates && (!w.sums || compensates_weight_zeros(problem))) {
    layout.sums = true, layout.colsums = layout.splitk_workspace;
    layout.splitk_workspace = layout.colsums + align_256(size_t(colsum_bytes(w)));
  }
  bool const stores_slices = plan->slices > 1 && plan->tail_tiles == 0;
  layout.gates = w.gated && (stores_slices || !plan->gates);
  if (layout.gates && !stores_slices) {
    layout.gate_sums = layout.splitk_workspace;
    layout.splitk_workspace += align_256(size_t(problem.m) * w.n * sizeof(float));
  }
  plan->layout = layout;
  plan->workspace = layout.splitk_workspace;
  if (plan->tail_tiles > 0) {
    plan->workspace += part_floats(*plan) * sizeof(float) + flag_count(*plan) * sizeof(uint64_t);
  } else if (plan->slices > 1) {
    plan->workspace += size_t(plan->slices) * problem.m * padded_rows(w.n) * sizeof(float);
  }
}

// For a few rows of x the product starts together with the quantiser and loads its weights
// meanwhile, unless it has fewer CTAs than the GPU has room for: then the quantiser's CTAs
// would slow down only some of them. Four rows or fewer are quantised so quickly that the
// quantiser's CTAs need not spread over the SMs. (Times are in docs/tuning-notes.md.)
void start_quantizer(GemmProblem const& problem, Plan* plan) {
  bool const few = problem.m <= 16, decodes = plan->spec->decodes,
             fills = plan->slices > 1 && plan->layout.block != -1;
  plan->quantizer_starts_early = few && (decodes || fills);
  plan->quantizer_spreads = !few || (decodes && !plan->one_cta_per_sm && problem.m > 4);
}

Status plan(GemmProblem const& problem, Device const& device, Plan* plan) {
  if (!plan) return invalid("plan is a null pointer");
  if (Status status = check_gemm(problem, device); !status.ok()) return status;
  *plan = {};
  if (Status status = select(problem, device, plan); !status.ok()) return status;
  lay_out_workspace(problem, plan->spec->upcasts, plan);
  start_quantizer(problem, plan);
  return {};
}

// In the order of mixed_gemm (ops.cpp).
std::vector<char const*> launches(Plan const& plan) {
  std::vector<char const*> names;
  if (plan.layout.block || plan.layout.ranges) {
    names.push_back("quantize_activations");
  } else if (plan.layout.upcasts) {
    names.push_back("upcast_activations");
  }
  if (plan.layout.compensates && !plan.layout.block) names.push_back("compensate_zeros");
  if (plan.layout.sums) names.push_back("weight_colsum");
  names.push_back(plan.kernel);
  if (plan.layout.gates) {
    names.push_back("gate_sums");
  } else if (plan.slices > 1 && plan.tail_tiles == 0) {
    names.push_back("splitk_reduce");
  }
  return names;
}

}  // namespace cutlass_ops
