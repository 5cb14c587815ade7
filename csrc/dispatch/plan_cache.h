// The plans of a weight's last products: a call like one of those before chooses no kernel again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cutlass_ops/ops.h"

namespace cutlass_ops {

class PlanCache {
 public:
  static constexpr size_t kMostPlans = 8;

  // Finds the plan of an equal problem, or calls plan(). The problem is checked in both cases.
  // Plans of images are not kept.
  Status find(GemmProblem const& problem, Device const& device, Plan* plan);

  size_t size() const { return entries_.size(); }

 private:
  // Everything that plan() reads after its checks.
  using Key = std::array<int64_t, 19>;
  static Key key_of(GemmProblem const& problem, Device const& device);

  struct Entry {
    Key key;
    Plan plan;
  };
  std::vector<Entry> entries_;
  size_t oldest_ = 0;  // of kMostPlans, which the next one replaces
};

}  // namespace cutlass_ops
