#include "dispatch/plan_cache.h"

#include "dispatch/checks.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

PlanCache::Key PlanCache::key_of(GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  QuantizedActivations const& q = problem.quantized;
  bool const flags[] = {problem.act_symmetric,
                        problem.batch_invariant,
                        problem.exact,
                        reinterpret_cast<uintptr_t>(problem.x) % 16 == 0,
                        q.codes != nullptr,
                        q.zeros != nullptr,
                        w.zeros != nullptr,
                        w.offsets != nullptr,
                        w.perm != nullptr,
                        w.sums != nullptr,
                        w.gated,
                        w.gated && problem.residual};
  int64_t set = 0;
  for (bool flag : flags) set = 2 * set + flag;
  return {problem.m,
          set,
          problem.x_stride,
          int64_t(problem.x_type),
          int64_t(problem.out_type),
          int64_t(problem.act_quant),
          problem.architecture,
          q.block,
          q.stride,
          w.n,
          w.k,
          int64_t(w.format),
          w.group_size,
          int64_t(w.scale_type),
          int64_t(w.offset_type),
          device.architecture,
          device.multiprocessors,
          device.shared_memory,
          device.memory_bandwidth};
}

Status PlanCache::find(GemmProblem const& problem, Device const& device, Plan* plan) {
  if (is_image(problem)) return cutlass_ops::plan(problem, device, plan);
  if (Status status = check_gemm(problem, device); !status.ok()) return status;
  Key const key = key_of(problem, device);
  for (Entry const& entry : entries_) {
    if (entry.key != key) continue;
    *plan = entry.plan;
    return {};
  }
  if (Status status = cutlass_ops::plan(problem, device, plan); !status.ok()) return status;
  if (entries_.size() < kMostPlans) {
    entries_.push_back({key, *plan});
  } else {
    entries_[oldest_] = {key, *plan};
    oldest_ = (oldest_ + 1) % kMostPlans;
  }
  return {};
}

}  // namespace cutlass_ops
