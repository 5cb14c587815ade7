#include "dispatch/select.h"

#include <utility>
#include <vector>

#include "dispatch/cost.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

// A kernel's best candidate, or none, and its time where it has one. `any_m`: candidates for more
// rows of x count too.
Candidate const* best_candidate(GemmProblem const& problem, Device const& device,
                                KernelSpec const& spec, bool any_m, int64_t* least) {
  Candidate const* best = nullptr;
  for (Candidate const& candidate : spec.candidates(problem)) {
    bool const takes = (any_m || is_image(problem) || problem.m >= candidate.min_m) &&
                       problem.m <= candidate.max_m &&
                       (!problem.batch_invariant || candidate.max_m == kMaxM);
    if (!takes || (candidate.applies && !candidate.applies(problem))) continue;
    if (!spec.cost) return &candidate;
    int64_t const time = spec.cost(problem, device, spec, candidate);
    if (time >= 0 && (!best || time < *least)) best = &candidate, *least = time;
  }
  return best;
}

// Names each field that forbids kernels, with the kernels.
Status no_kernel(GemmProblem const& problem, Device const& device) {
  std::vector<std::pair<std::string, std::string>> fields;  // with the kernels' names
  for (KernelSpec const& spec : kernel_specs()) {
    std::string field = forbidden_by(spec, problem, device);
    if (field.empty()) field = "sizes that do not fit in its shared memory";
    auto entry = fields.begin();
    while (entry != fields.end() && entry->first != field) ++entry;
    if (entry == fields.end()) {
      fields.emplace_back(std::move(field), spec.name);
    } else {
      entry->second += std::string(", ") + spec.name;
    }
  }
  std::string text = "no kernel takes this problem; what forbids it:";
  for (auto const& [field, kernels] : fields) text += " " + field + " (" + kernels + ");";
  return unsupported(text + " kernels run on sm_80 and later");
}

void fill_in(GemmProblem const& problem, KernelSpec const& spec, Candidate const& candidate,
             Plan* plan) {
  Tile const& tile = candidate.tile;
  plan->spec = &spec;
  plan->kernel = spec.name;
  plan->why = candidate.why ? candidate.why : spec.why;
  plan->block_n = tile.block_n, plan->block_m = tile.block_m,
  plan->ctas_along_m = tile.ctas_along_m;
  plan->rounds = spec.rounds;
  plan->compensates = candidate.compensates;
  plan->one_cta_per_sm = spec.decodes && tile.min_ctas_per_sm == 1;
  plan->quantizes = candidate.quantizes && quantizes_x(problem);
  plan->gates = problem.weight.gated && spec.gates && problem.out_type != DataType::kFloat32 &&
                !problem.residual;
}

// The first kernel that has a candidate; of kernels with costs the one of least time. Several
// kernels have costs for few rows, and for a 16-bit image, whose output channels may fill the tiles
// of only one of them.
KernelSpec const* best_kernel(GemmProblem const& problem, Device const& device,
                              Candidate const** best) {
  KernelSpec const* chosen = nullptr;
  int64_t least = 0;
  bool const several =
      is_image(problem) ? !multiplies_int8(problem) : problem.m <= kMostFloatDecodeRows;
  for (KernelSpec const& spec : kernel_specs()) {
    bool const competes = spec.decodes || (several && spec.cost);
    if (chosen && !competes) break;
    if (spec.can_implement(problem, device) != Field::kNone) continue;
    int64_t time = 0;
    Candidate const* const candidate = best_candidate(problem, device, spec, false, &time);
    if (!candidate || (chosen && time >= least)) continue;
    chosen = &spec, *best = candidate, least = time;
    if (!competes) break;
  }
  return chosen;
}

// Whether decode kernels sum in the order of the kernels for more rows: not where these have int32
// sums over all of K, sums that start from zero points, or multiply each slice's sums by the scales
// of rows of x.
bool few_rows_have_the_bits(GemmProblem const& problem, int slices) {
  if (!multiplies_int8(problem)) return true;
  if (activations_have_blocks(problem)) return !activations_have_zeros(problem);
  return slices == 1 && !sums_whole_rows(problem);
}

// A few rows of a batch-invariant product by the kernel with the bits of `spec`, if there is one.
bool plan_few_rows(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                   int slices, Plan* plan) {
  if (!spec.few_rows || !few_rows_have_the_bits(problem, slices)) return false;
  KernelSpec const& few = *find_kernel(spec.few_rows);
  GemmProblem free = problem;
  // Decode kernels refuse batch-invariant problems, since they choose slices of K by M. Here the
  // number of slices is given.
  free.batch_invariant = false;
  if (few.can_implement(free, device) != Field::kNone) return false;
  Candidate const* best = nullptr;
  int64_t least = 0;
  for (Candidate const& candidate : few.candidates(problem)) {
    if (problem.m < candidate.min_m || problem.m > candidate.max_m) continue;
    if (candidate.applies && !candidate.applies(problem)) continue;
    int64_t const time = decode_time_in(problem, device, few, candidate, slices);
    if (time >= 0 && (!best || time < least)) best = &candidate, least = time;
  }
  if (!best) return false;
  plan->slices = slices, plan->tail_tiles = 0;
  fill_in(problem, few, *best, plan);
  return few.shape(problem, device, *best, plan);
}

// The kernel and the slices of K that are chosen for `asked`.
Status select_as(GemmProblem const& asked, GemmProblem const& problem, Device const& device,
                 Plan* plan) {
  Candidate const* best = nullptr;
  KernelSpec const* const spec = best_kernel(asked, device, &best);
  if (!spec) return no_kernel(asked, device);
  TailSplit const tail_split = tail_split_of(asked, device, *spec, *best);
  if (problem.batch_invariant && plan_few_rows(problem, device, *spec, tail_split.slices, plan))
    return {};
  int64_t time = 0;
  if (problem.batch_invariant) best = best_candidate(problem, device, *spec, true, &time);
  plan->slices = tail_split.slices, plan->tail_tiles = int(tail_split.tail_tiles);
  fill_in(problem, *spec, *best, plan);
  spec->shape(problem, device, *best, plan);
  return {};
}

}  // namespace

bool plan_candidate(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                    Candidate const& candidate, Plan* plan) {
  *plan = {};
  TailSplit const tail_split = tail_split_of(problem, device, spec, candidate);
  plan->slices = tail_split.slices, plan->tail_tiles = int(tail_split.tail_tiles);
  fill_in(problem, spec, candidate, plan);
  if (!spec.shape(problem, device, candidate, plan)) return false;
  lay_out_workspace(problem, spec.upcasts, plan);
  start_quantizer(problem, plan);
  return true;
}

Status select(GemmProblem const& problem, Device const& device, Plan* plan) {
  if (!problem.batch_invariant) return select_as(problem, problem, device, plan);
  // Every m has the kernel and the number of slices that m = kInvariantM has. m then chooses the
  // tile, which changes no bit, and for few rows a decode kernel that has the same bits.
  GemmProblem asked = problem;
  asked.m = kInvariantM;
  return select_as(asked, problem, device, plan);
}

}  // namespace cutlass_ops
