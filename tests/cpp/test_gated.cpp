// Products of gated weights: plans and refusals. Needs no GPU.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cutlass_ops/cpu.h"
#include "dispatch/checks.h"
#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

GemmProblem gated(GemmProblem p) {
  p.weight.gated = true;
  return p;
}

bool stores_slices(Plan const& plan) { return plan.slices > 1 && plan.tail_tiles == 0; }

TEST(Gated, SumsAreFinishedByGateSumsUnlessTheKernelStoresOutputs) {
  int split = 0, whole = 0, fused = 0;
  for (Device const& device : kDevices) {
    for (int m : {1, 16, 100, 4096}) {
      for (Named const& input : inputs(problem(m, 4096, 4096))) {
        SCOPED_TRACE(input.name + ", m " + std::to_string(m));
        Plan const plain = planned(input.problem, device),
                   found = planned(gated(input.problem), device);
        EXPECT_STREQ(found.kernel, plain.kernel);
        EXPECT_EQ(found.slices, plain.slices);
        if (found.gates && !stores_slices(plain)) {
          EXPECT_FALSE(found.layout.gates);
          EXPECT_EQ(names(found), names(plain));
          EXPECT_EQ(found.workspace, plain.workspace);
          ++fused;
          continue;
        }
        EXPECT_TRUE(found.layout.gates);
        EXPECT_FALSE(plain.layout.gates);
        std::vector<std::string> expected = names(plain);
        if (expected.back() == "splitk_reduce") expected.pop_back();
        expected.push_back("gate_sums");
        EXPECT_EQ(names(found), expected);
        size_t const sums = stores_slices(plain) ? 0 : size_t(m) * 4096 * sizeof(float);
        EXPECT_EQ(found.workspace, plain.workspace + sums);
        EXPECT_EQ(found.layout.splitk_workspace, plain.layout.splitk_workspace + sums);
        EXPECT_EQ(found.layout.gate_sums, sums ? plain.layout.splitk_workspace : 0);
        ++(sums ? whole : split);
      }
    }
  }
  EXPECT_GT(split, 0);
  EXPECT_GT(whole, 0);
  EXPECT_GT(fused, 0);
}

TEST(Gated, KernelsThatStoreOutputsNeedNoOther) {
  for (int slices : {1, 3}) {
    Plan fused;
    fused.kernel = "fused", fused.gates = true, fused.slices = slices, fused.block_m = 48;
    lay_out_workspace(gated(problem(100, 4096, 4096)), false, &fused);
    EXPECT_EQ(fused.layout.gates, slices > 1);
    EXPECT_EQ(names(fused).size(), slices > 1 ? 2u : 1u);
    EXPECT_EQ(fused.workspace, slices > 1 ? size_t(slices) * 100 * 4096 * sizeof(float) : 0);
  }
}

TEST(Gated, SumsOfManyRowsAreCountedIn64Bits) {
  Plan plan;
  plan.block_m = 48;
  lay_out_workspace(gated(problem(kMaxM, 57344, 4096)), false, &plan);
  EXPECT_EQ(plan.workspace, size_t(kMaxM) * 57344 * sizeof(float));
}

TEST(Gated, AKernelMakes16BitOutputsWithoutAResidual) {
  GemmProblem p = gated(problem(4096, 4096, 4096));
  p.out = some_bytes;
  Plan const chosen = planned(p);
  EXPECT_TRUE(chosen.gates);
  Workspace const workspace{some_bytes, chosen.workspace};
  auto const refused = [&](auto change, char const* words) {
    GemmProblem changed = p;
    change(changed);
    Status const status = check_launch(changed, chosen, workspace);
    EXPECT_NE(status.text.find(words), std::string::npos) << status.text;
  };
  EXPECT_TRUE(check_launch(p, chosen, workspace).ok());
  refused([](auto& q) { q.residual = &some_byte; }, "without a residual");
  refused([](auto& q) { q.out_type = DataType::kFloat32; }, "16-bit outputs");
  refused([](auto& q) { q.out = some_bytes + 8; }, "out");
  p.out_type = DataType::kFloat32;
  EXPECT_FALSE(planned(p).gates);
  p = gated(problem(4096, 4096, 4096));
  p.residual = &some_byte, p.residual_type = DataType::kFloat16, p.residual_stride = 2048;
  EXPECT_FALSE(planned(p).gates);
}

TEST(Gated, SaysWhichFieldDoesNotFit) {
  struct Case {
    std::function<void(GemmProblem&)> change;
    Status::Code code;
    std::string words;
  };
  auto const residual = [](GemmProblem& p, int stride) {
    p.residual = &some_byte, p.residual_type = DataType::kFloat16, p.residual_stride = stride;
  };
  std::vector<Case> const cases = {
      {[&](auto& p) { residual(p, 96); }, Status::kOk, ""},
      {[&](auto& p) { residual(p, 95); }, Status::kInvalid, "residual_stride is 95; at least 96"},
      {[](auto& p) { p.weight.n = 200; }, Status::kInvalid, "n is 200; a gated weight has"},
      {[](auto& p) { p.weight.n = 8; }, Status::kInvalid, "n is 8; a gated weight has"},
      {[](auto& p) {
         p.image.batch = 1, p.image.channels = 576, p.image.out[2] = 5, p.image.size[2] = 5;
       },
       Status::kUnsupported, "the weight is gated; a product of an image takes plain weights"},
  };
  for (Case const& c : cases) {
    GemmProblem p = gated(problem(5, 192, 576));
    c.change(p);
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_EQ(status.code, c.code) << status.text;
    EXPECT_NE(status.text.find(c.words), std::string::npos) << status.text;
  }
}

TEST(Gated, OtherOperatorsTakePlainWeights) {
  GemmProblem const p = gated(problem(5, 192, 576));
  for (Status const& status : {check_finish(p, &some_byte), check_depthwise(p, some_book)}) {
    EXPECT_EQ(status.code, Status::kUnsupported);
    EXPECT_NE(status.text.find("the weight is gated"), std::string::npos) << status.text;
  }
  Status const status = cpu_gemm(p, 1);
  EXPECT_EQ(status.code, Status::kUnsupported);
  EXPECT_NE(status.text.find("a gated product"), std::string::npos) << status.text;
  EXPECT_TRUE(check_dequantize({p.weight, &some_byte, DataType::kFloat16}).ok());
}

TEST(Gated, APlanIsForGatedWeightsOrOthers) {
  GemmProblem plain = problem(5, 192, 576);
  plain.out = &some_byte;
  GemmProblem const other = gated(plain);
  Plan const of_plain = planned(plain), of_gated = planned(other);
  Workspace const workspace = {some_bytes, of_plain.workspace + of_gated.workspace};
  EXPECT_TRUE(check_launch(plain, of_plain, workspace).ok());
  EXPECT_TRUE(check_launch(other, of_gated, workspace).ok());
  EXPECT_NE(check_launch(other, of_plain, workspace).text.find("not gated; this one is"),
            std::string::npos);
  EXPECT_NE(check_launch(plain, of_gated, workspace).text.find("gated; this one is not"),
            std::string::npos);
  Plan fused = of_plain;
  fused.gates = true;
  EXPECT_TRUE(check_launch(other, fused, workspace).ok());
  GemmProblem odd = other;
  odd.out = &some_byte + 1;
  EXPECT_NE(check_launch(odd, of_gated, workspace).text.find("out starts at"), std::string::npos);
}

}  // namespace
}  // namespace cutlass_ops
