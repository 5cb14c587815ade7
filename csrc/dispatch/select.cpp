#include "dispatch/select.h"

#include <utility>
#include <vector>

#include "dispatch/cost.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

// A kernel's best candidate, or none. `any_m`: even one that is for more rows of x. Kernels that decode say of a candidate whether it fits by filling in the
// plan.
Candidate const* best_candidate(GemmProblem const& problem, Device const& device, KernelSpec const& spec, bool any_m,
                                Plan* plan) {
  Candidate const* best = nullptr;
  int64_t least = 0;
  for (Candidate const& candidate : spec.candidates(problem)) {
    bool const takes = (any_m || problem.m >= candidate.min_m) && problem.m <= candidate.max_m &&
                       (!problem.batch_invariant || candidate.max_m == kMaxM);
    if (!takes || (candidate.applies && !candidate.applies(problem))) continue;
    if (!spec.cost) {
      if (spec.decodes && !spec.shape(problem, device, candidate, plan)) continue;
      return &candidate;
    }
    int64_t const time = spec.cost(problem, device, spec, candidate);
    if (!best || time < least) best = &candidate, least = time;
  }
  return best;
}

// Says each field that forbids kernels, with these.
Status no_kernel(GemmProblem const& problem, Device const& device) {
  std::vector<std::pair<std::string, std::string>> fields;  // with the kernels' names
  for (KernelSpec const& spec : kernel_specs()) {
    std::string field = forbidden_by(spec, problem, device);
    if (field.empty()) field = "sizes that do not fit in its shared memory";
    auto at = fields.begin();
    while (at != fields.end() && at->first != field) ++at;
    if (at == fields.end()) {
      fields.emplace_back(std::move(field), spec.name);
    } else {
      at->second += std::string(", ") + spec.name;
    }
  }
  std::string text = "no kernel takes this problem; what forbids it:";
  for (auto const& [field, kernels] : fields) text += " " + field + " (" + kernels + ");";
  return unsupported(text + " kernels run on sm_80 and later");
}

void fill_in(KernelSpec const& spec, Candidate const& candidate, Plan* plan) {
  Tile const& tile = candidate.tile;
  plan->spec = &spec;
  plan->kernel = spec.name;
  plan->why = candidate.why ? candidate.why : spec.why;
  plan->block_n = tile.block_n, plan->block_m = tile.block_m;
  plan->rounds = spec.rounds;
  plan->corrects = candidate.corrects;
  plan->one_cta_per_sm = spec.decodes && tile.min_ctas_per_sm == 1;
}

// The kernel and its slices of K as for `asked`.
Status select_as(GemmProblem const& asked, GemmProblem const& problem, Device const& device, Plan* plan) {
  for (KernelSpec const& spec : kernel_specs()) {
    if (spec.can_implement(asked, device) != Field::kNone) continue;
    Candidate const* best = best_candidate(asked, device, spec, false, plan);
    if (!best) continue;
    Cut const cut = cut_of(asked, device, spec, *best);
    if (problem.batch_invariant) best = best_candidate(problem, device, spec, true, plan);
    plan->slices = cut.slices, plan->tail_tiles = int(cut.tail_tiles);
    fill_in(spec, *best, plan);
    plan->quantizes = best->quantizes && multiplies_int8(problem) && !problem.quantized.codes;
    if (!spec.decodes) spec.shape(problem, device, *best, plan);
    return {};
  }
  return no_kernel(asked, device);
}

}  // namespace

bool plan_candidate(GemmProblem const& problem, Device const& device, KernelSpec const& spec, Candidate const& candidate,
                    Plan* plan) {
  *plan = {};
  Cut const cut = cut_of(problem, device, spec, candidate);
  plan->slices = cut.slices, plan->tail_tiles = int(cut.tail_tiles);
  fill_in(spec, candidate, plan);
  plan->quantizes = candidate.quantizes && multiplies_int8(problem) && !problem.quantized.codes;
  if (!spec.shape(problem, device, candidate, plan)) return false;
  lay_out_workspace(problem, spec.upcasts, plan);
  return true;
}

Status select(GemmProblem const& problem, Device const& device, Plan* plan) {
  if (!problem.batch_invariant) return select_as(problem, problem, device, plan);
  // One kernel, and K in so many slices, for every m; m chooses the tile, which changes no bit.
  GemmProblem asked = problem;
  asked.m = kInvariantM;
  return select_as(asked, problem, device, plan);
}

}  // namespace cutlass_ops
