// The plans that a weight keeps: the same as plan() makes, whichever field of the problem changes.
// Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "dispatch/plan_cache.h"
#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

// The content of plans, as text.
std::string said(Plan const& p) {
  WorkspaceLayout const& l = p.layout;
  DecodeShape const& d = p.decode;
  WgmmaDecodeShape const& w = p.wgmma_decode;
  std::string text = p.kernel;
  for (int64_t number : {int64_t(p.block_n),
                         int64_t(p.block_m),
                         int64_t(p.grid_x),
                         int64_t(p.grid_y),
                         int64_t(p.cluster_size),
                         int64_t(p.threads),
                         int64_t(p.shared_bytes),
                         int64_t(p.stages),
                         int64_t(p.slices),
                         int64_t(p.tail_tiles),
                         int64_t(p.rounds),
                         int64_t(p.quantizes),
                         int64_t(p.compensates),
                         int64_t(p.quantizer_starts_early),
                         int64_t(p.quantizer_spreads),
                         int64_t(d.cluster),
                         int64_t(d.clusters),
                         int64_t(d.stages),
                         int64_t(w.cluster),
                         int64_t(w.clusters),
                         int64_t(w.shared_bytes),
                         int64_t(l.stride),
                         int64_t(l.rows),
                         int64_t(l.block),
                         int64_t(l.upcasts),
                         int64_t(l.compensates),
                         int64_t(l.sums),
                         int64_t(l.gates),
                         int64_t(l.gate_sums),
                         int64_t(p.gates),
                         int64_t(l.scales),
                         int64_t(l.zeros),
                         int64_t(l.splitk_workspace),
                         int64_t(p.workspace),
                         int64_t(p.tail.parts),
                         int64_t(p.tail.last),
                         int64_t(p.tail.tiles_per_cluster),
                         int64_t(p.tail.share_numerator),
                         int64_t(p.tail.share_denominator)})
    text += " " + std::to_string(number);
  return text;
}

// A problem, and the changes after which another plan is right.
struct Change {
  char const* name;
  GemmProblem before;
  std::function<void(GemmProblem&, Device&)> change;
};

std::vector<Change> changes() {
  using P = GemmProblem&;
  using D = Device&;
  GemmProblem const floats = problem(64, 4096, 4096), few = problem(3, 4096, 4096);
  GemmProblem const short_groups = problem(64, 4096, 4096, 4, 64);
  GemmProblem offsets = problem(16, 4096, 4096, 4, 64), no_offsets = floats;
  offsets.weight.offsets = &some_byte;
  offsets.weight.offset_type = no_offsets.weight.offset_type = DataType::kFloat16;
  GemmProblem const block = quantized_on_the_way(problem(300, 4096, 4096), ActQuant::kBlock, false);
  GemmProblem const codes = already_quantized(problem(300, 4096, 4096), 128);
  GemmProblem zeros = codes, no_codes = already_quantized(block, 128), gaps = floats;
  zeros.quantized.zeros = reinterpret_cast<int8_t*>(&some_byte);
  no_codes.quantized.codes = nullptr;
  gaps.x_stride = 8192;
  return {
      {"m", floats, [](P p, D) { p.m = 3; }},
      {"m of few", few, [](P p, D) { p.m = 9; }},
      {"x_stride", floats, [](P p, D) { p.x_stride = 4100; }},
      {"x", floats, [](P p, D) { p.x = &some_byte + 2; }},
      {"x_type", short_groups, [](P p, D) { p.x_type = DataType::kBFloat16; }},
      {"out_type", short_groups, [](P p, D) { p.out_type = DataType::kFloat32; }},
      {"act_quant", floats, [](P p, D) { p.act_quant = ActQuant::kBlock; }},
      {"token", block, [](P p, D) { p.act_quant = ActQuant::kToken; }},
      {"act_symmetric", block, [](P p, D) { p.act_symmetric = true; }},
      {"batch_invariant", few, [](P p, D) { p.batch_invariant = true; }},
      {"architecture", floats, [](P p, D) { p.architecture = 80; }},
      {"exact", short_groups, [](P p, D) { p.exact = true; }},
      {"codes", no_codes,
       [](P p, D) { p.quantized.codes = reinterpret_cast<int8_t*>(&some_byte); }},
      {"codes' zeros", codes,
       [](P p, D) { p.quantized.zeros = reinterpret_cast<int8_t*>(&some_byte); }},
      {"codes' block", codes, [](P p, D) { p.quantized.block = -1; }},
      {"codes' stride", zeros, [](P p, D) { p.quantized.stride = 4096; }},
      {"sums", block, [](P p, D) { p.weight.sums = &some_byte; }},
      {"zeros", quantized_on_the_way(problem(300, 4096, 4096), ActQuant::kBlock, true),
       [](P p, D) { p.weight.zeros = reinterpret_cast<int8_t*>(&some_byte); }},
      {"offsets", no_offsets, [](P p, D) { p.weight.offsets = &some_byte; }},
      {"offset_type", offsets, [](P p, D) { p.weight.offset_type = DataType::kFloat32; }},
      {"perm", floats, [](P p, D) { p.weight.perm = reinterpret_cast<int32_t*>(&some_byte); }},
      {"n", floats, [](P p, D) { p.weight.n = 4160; }},
      {"gated", floats, [](P p, D) { p.weight.gated = true; }},
      {"k", gaps, [](P p, D) { p.weight.k = 4224; }},
      {"group_size", floats, [](P p, D) { p.weight.group_size = 64; }},
      {"format", floats, [](P p, D) { p.weight.format = Format::kInt8; }},
      {"scale_type", few, [](P p, D) { p.weight.scale_type = DataType::kFloat32; }},
      {"GPU", floats, [](P, D d) { d.architecture = 80; }},
      {"multiprocessors", floats, [](P, D d) { d.multiprocessors = 78; }},
      {"shared memory", floats, [](P, D d) { d.shared_memory = 101376; }},
  };
}

TEST(PlanCache, FindsWhatPlanFinds) {
  for (Change const& c : changes()) {
    SCOPED_TRACE(c.name);
    PlanCache cache;
    Plan found;
    Device device = kHopper;
    GemmProblem p = c.before;
    ASSERT_TRUE(cache.find(p, device, &found).ok());
    EXPECT_EQ(said(found), said(planned(p)));
    found = {};
    ASSERT_TRUE(cache.find(p, device, &found).ok());
    EXPECT_EQ(cache.size(), 1u);
    EXPECT_EQ(said(found), said(planned(p)));
    c.change(p, device);
    EXPECT_NE(said(planned(p, device)), said(planned(c.before))) << "nothing is tested";
    ASSERT_TRUE(cache.find(p, device, &found).ok());
    EXPECT_EQ(said(found), said(planned(p, device)));
    EXPECT_EQ(cache.size(), 2u);
  }
}

// Whether the measured costs of two cards make a difference or not.
TEST(PlanCache, KeepsCardsApart) {
  PlanCache cache;
  Plan found;
  GemmProblem const p = problem(64, 4096, 4096);
  Device slower = kHopper;
  slower.memory_bandwidth /= 2;
  for (Device const& device : {kHopper, slower, kHopper})
    ASSERT_TRUE(cache.find(p, device, &found).ok());
  EXPECT_EQ(cache.size(), 2u);
}

TEST(PlanCache, ChecksWhatPlansDoNotDependOn) {
  PlanCache cache;
  Plan found;
  GemmProblem const good = problem(3, 4096, 4096);
  ASSERT_TRUE(cache.find(good, kHopper, &found).ok());
  float numbers[2] = {};
  auto const refused = [&](auto change) {
    GemmProblem bad = good;
    change(bad);
    Status const status = cache.find(bad, kHopper, &found);
    Plan ignored;
    EXPECT_EQ(status.text, plan(bad, kHopper, &ignored).text);
    return !status.ok();
  };
  EXPECT_TRUE(refused([](GemmProblem& p) { p.x = &some_byte + 1; }));
  EXPECT_TRUE(refused([](GemmProblem& p) { p.x_stride = 8; }));
  EXPECT_TRUE(refused([&](GemmProblem& p) { p.bias = numbers; }));
  EXPECT_TRUE(refused([&](GemmProblem& p) {
    p.residual = numbers, p.residual_type = DataType::kFloat32, p.residual_stride = 8;
  }));
  EXPECT_TRUE(refused([](GemmProblem& p) {
    p.activation = Activation::kClamp, p.clamp_low = 2.0f, p.clamp_high = 1.0f;
  }));
  EXPECT_TRUE(refused([](GemmProblem& p) { p.weight.codes = nullptr; }));
  EXPECT_TRUE(refused([](GemmProblem& p) { p.architecture = 100; }));
  EXPECT_EQ(cache.size(), 1u);
}

TEST(PlanCache, KeepsTheLastPlansAlone) {
  PlanCache cache;
  Plan found;
  for (int m = 1; m <= 5 * int(PlanCache::kMostPlans); ++m) {
    ASSERT_TRUE(cache.find(problem(m, 4096, 4096), kHopper, &found).ok());
    EXPECT_EQ(said(found), said(planned(problem(m, 4096, 4096)))) << m;
    EXPECT_EQ(cache.size(), std::min(size_t(m), PlanCache::kMostPlans));
  }
  for (int m = 1; m <= 5 * int(PlanCache::kMostPlans); ++m) {
    ASSERT_TRUE(cache.find(problem(m, 4096, 4096), kHopper, &found).ok());
    EXPECT_EQ(said(found), said(planned(problem(m, 4096, 4096)))) << m;
  }
}

TEST(PlanCache, KeepsNoPlansOfImages) {
  GemmProblem p = problem(6 * 6, 64, 9 * 128);
  p.image.batch = 1, p.image.channels = 128, p.x_stride = 128;
  for (int axis = 1; axis < 3; ++axis) {
    p.image.size[axis] = p.image.out[axis] = 6, p.image.taps[axis] = 3, p.image.padding[axis] = 1;
  }
  PlanCache cache;
  Plan found;
  ASSERT_TRUE(cache.find(p, kHopper, &found).ok());
  EXPECT_EQ(said(found), said(planned(p)));
  EXPECT_EQ(cache.size(), 0u);
}

}  // namespace
}  // namespace cutlass_ops
