// The costs of a candidate: those of the measured card that the device resembles.
#include "dispatch/cost.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

Device hopper(int memory_bandwidth) {
  Device device = kHopper;
  device.memory_bandwidth = memory_bandwidth;
  return device;
}

TEST(Cost, IsOfTheCardOfTheNearestBandwidth) {
  int slowest = 0, fastest = 0;
  for (int i = 0; i < kCardCount; ++i) {
    int const bandwidth = kCards[i].memory_bandwidth;
    for (int change : {-100, 0, 100})
      EXPECT_EQ(card_of(hopper(bandwidth + change)), i) << kCards[i].name;
    if (bandwidth < kCards[slowest].memory_bandwidth) slowest = i;
    if (bandwidth > kCards[fastest].memory_bandwidth) fastest = i;
  }
  EXPECT_EQ(card_of(hopper(0)), slowest) << "not known";
  EXPECT_EQ(card_of(hopper(std::numeric_limits<int>::max())), fastest);
}

// A candidate whose costs are doubled on one card takes longer on that card only.
TEST(Cost, AppliesToItsCardOnly) {
  for (int m : {3, 200, 3000})
    for (auto [invariant, scales] : {std::pair(false, DataType::kFloat16),
                                     {true, DataType::kFloat16},
                                     {false, DataType::kFloat32}}) {
      GemmProblem p = problem(m, 4096, 4096, 4, scales == DataType::kFloat32 ? 32 : 128);
      p.batch_invariant = invariant, p.weight.scale_type = scales;
      KernelSpec const& spec = *planned(p).spec;
      if (!spec.cost) continue;
      for (Candidate const& candidate : spec.candidates(p)) {
        auto const time = [&](Candidate const& c, int card) {
          return spec.cost(p, hopper(kCards[card].memory_bandwidth), spec, c);
        };
        for (int changed = 0; changed < kCardCount; ++changed) {
          Candidate slow = candidate;
          TileCost& tile = slow.costs[changed];
          tile.k4096 *= 2, tile.row_scales *= 2, tile.whole_rows *= 2, tile.wide *= 2;
          for (auto& of_width : slow.decode_costs[changed])
            for (DecodeCost& cost : of_width) cost.start *= 2, cost.chunk *= 2;
          for (int card = 0; card < kCardCount; ++card) {
            bool const fits = time(candidate, card) >= 0;
            EXPECT_EQ(time(slow, card) > time(candidate, card), fits && card == changed)
                << spec.name << ", m = " << m << ", " << kCards[card].name;
          }
        }
      }
    }
}

}  // namespace
}  // namespace cutlass_ops
