// Where operands are rounded to 16 bits, and where zero points are compensated for many blocks at
// once. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cutlass_ops/zero_compensation.h"
#include "dispatch/checks.h"
#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

// Weights, and values of int8 activations, are rounded to 16 bits only where no kernel of exact
// products is as fast, the result has the type of x, and exact=True is not set.
TEST(Dispatch, RoundsOperandsOnlyWhereItMay) {
  auto const choice = [](GemmProblem const& p) {
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_TRUE(status.ok()) << status.text;
    return std::pair{std::string(chosen.kernel), chosen.rounds};
  };
  auto const rounds = [&](GemmProblem p, char const* exact_kernel) {
    EXPECT_EQ(choice(p), (std::pair{std::string("wgmma_fold16"), true}));
    GemmProblem other = p;
    other.exact = true;
    EXPECT_EQ(choice(other), (std::pair{std::string(exact_kernel), false}));
    for (DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
      other = p;
      other.out_type = type;
      EXPECT_EQ(choice(other), (std::pair{std::string(exact_kernel), false}));
    }
  };
  for (int m : {17, 100, 4096})
    for (int bits : {4, 8})
      for (int group_size : {16, 32, 64, 128, -1})
        for (bool offsets : {false, true}) {
          GemmProblem p = problem(m, 8192, 4096, bits, group_size);
          if (offsets) p.weight.offsets = &some_byte, p.weight.offset_type = DataType::kFloat32;
          bool const has_exact_kernel = !offsets && (group_size == -1 || group_size >= 128);
          if (offsets && group_size == 16) continue;
          if (has_exact_kernel) {
            EXPECT_EQ(choice(p), (std::pair{std::string("wgmma_gemm_a16"), false}));
            p.weight.perm = reinterpret_cast<int32_t const*>(&some_byte);
            EXPECT_EQ(choice(p), (std::pair{std::string("wgmma_gemm_a16"), false}));
          } else {
            rounds(p, "mma_gemm_a16");
            int const block = group_size == -1 || group_size > 128 ? 128 : group_size;
            for (int b : {block, -1}) rounds(already_quantized(p, b), "mma_gemm_a8");
          }
        }
  GemmProblem p = problem(100, 8192, 4096);
  look_up(p.weight);
  rounds(p, "mma_gemm_a16");
  p = already_quantized(problem(100, 8192, 4096, 8), -1);
  p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
  rounds(p, "mma_gemm_a8");
}

// A K tile has room for the offsets of groups of 16 only beside codes of 2 bits with fp32 scales.
TEST(Dispatch, RoundsTwoBitsWithOffsetsInGroupsOf16) {
  auto const kernel = [](int m, int bits, DataType type, bool zeros) {
    GemmProblem p = problem(m, 8192, 4096, bits, 16);
    p.weight.scale_type = p.weight.offset_type = type;
    if (zeros) {
      p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
    } else {
      p.weight.offsets = &some_byte;
    }
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_TRUE(status.ok()) << status.text;
    return std::string(chosen.kernel);
  };
  for (int m : {17, 64, 777}) {
    EXPECT_EQ(kernel(m, 2, DataType::kFloat32, false), "wgmma_fold16") << m;
    EXPECT_EQ(kernel(m, 2, DataType::kFloat16, false), "mma_gemm_a16") << m;
    EXPECT_EQ(kernel(m, 2, DataType::kFloat32, true), "mma_gemm_a16") << m;
    EXPECT_EQ(kernel(m, 4, DataType::kFloat32, false), "mma_gemm_a16") << m;
  }
}

// Zero points of activations are compensated for many blocks at once where the result is rounded to
// 16 bits, whether the weight has column sums or not: without them the call computes them, and
// nothing else differs.
TEST(Dispatch, CompensatesZeroPointsOfActivationsWhereItMay) {
  auto const compensates = [](GemmProblem const& p) {
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_TRUE(status.ok()) << status.text;
    EXPECT_EQ(chosen.layout.compensates, chosen.compensates);
    return chosen.compensates;
  };
  for (int bits : {4, 8})
    for (int group_size : {-1, 128, 512}) {
      GemmProblem base = quantized_on_the_way(problem(1024, 28672, 4096, bits, group_size),
                                              ActQuant::kBlock, false);
      EXPECT_TRUE(compensates(base));
      GemmProblem summed = base;
      summed.weight.sums = &some_byte;
      EXPECT_TRUE(compensates(summed));
      for (ActQuant mode : {ActQuant::kBlock, ActQuant::kToken}) {
        base.act_quant = summed.act_quant = mode;
        Plan const makes = planned(base), reads = planned(summed);
        EXPECT_EQ(makes.layout.sums, makes.compensates);
        EXPECT_FALSE(reads.layout.sums);
        EXPECT_EQ(std::make_tuple(makes.spec, makes.block_m, makes.block_n, makes.grid_x,
                                  makes.slices, makes.tail_tiles, makes.compensates),
                  std::make_tuple(reads.spec, reads.block_m, reads.block_n, reads.grid_x,
                                  reads.slices, reads.tail_tiles, reads.compensates));
        size_t const bytes =
            makes.compensates ? size_t(colsum_bytes(base.weight) + 255) / 256 * 256 : 0;
        EXPECT_EQ(makes.workspace, reads.workspace + bytes);
        std::vector<std::string> expected = names(reads);
        if (makes.compensates)
          expected.insert(std::find(expected.begin(), expected.end(), makes.kernel),
                          "weight_colsum");
        EXPECT_EQ(names(makes), expected);
      }
      base.act_quant = ActQuant::kBlock;
      struct Change {
        char const* name;
        void (*make)(GemmProblem&);
        bool compensated;
      };
      for (Change const& change :
           {Change{"few rows", [](GemmProblem& p) { p.m = 128; }, false},
            Change{"symmetric", [](GemmProblem& p) { p.act_symmetric = true; }, false},
            Change{"fp32", [](GemmProblem& p) { p.out_type = DataType::kFloat32; }, false},
            Change{"bf16", [](GemmProblem& p) { p.out_type = DataType::kBFloat16; }, true},
            Change{"batch_invariant", [](GemmProblem& p) { p.batch_invariant = true; }, false},
            Change{"sm_89", [](GemmProblem& p) { p.architecture = 89; }, false},
            Change{"offsets",
                   [](GemmProblem& p) {
                     p.weight.offsets = &some_byte, p.weight.offset_type = DataType::kFloat16;
                   },
                   false}}) {
        GemmProblem changed = base;
        change.make(changed);
        EXPECT_EQ(compensates(changed), change.compensated)
            << bits << " bits, groups of " << group_size << ": " << change.name;
      }
      // One zero point a token is compensated without zero values, and exactly in int32 sums over
      // all of K.
      GemmProblem token = base;
      token.act_quant = ActQuant::kToken;
      Plan const chosen = planned(token);
      EXPECT_EQ(chosen.compensates, group_size != -1);
      EXPECT_FALSE(chosen.layout.compensates);
      GemmProblem codes = already_quantized(base, 128);
      codes.act_quant = ActQuant::kNone;
      EXPECT_FALSE(compensates(codes));
      codes.quantized.zeros = reinterpret_cast<int8_t*>(&some_byte);
      EXPECT_TRUE(compensates(codes));
    }
}

// Zero points of weights are compensated in the same way, where x is symmetric and has a scale a
// block, by terms that have no other use. Otherwise 4-bit zero points are subtracted from the
// codes, and weights with 8-bit ones are multiplied by wgmma_fold16 or a portable kernel.
TEST(Dispatch, CompensatesZeroPointsOfWeights) {
  for (int group_size : {-1, 128, 512}) {
    GemmProblem base =
        quantized_on_the_way(problem(1024, 28672, 4096, 8, group_size), ActQuant::kBlock, true);
    base.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte), base.weight.sums = &some_byte;
    Plan const chosen = planned(base);
    EXPECT_STREQ(chosen.kernel, "wgmma_gemm_a8");
    EXPECT_TRUE(chosen.compensates && chosen.layout.compensates && chosen.layout.sums &&
                !chosen.rounds);
    struct Change {
      void (*make)(GemmProblem&);
      char const* kernel;
    };
    for (Change const& change :
         {Change{[](GemmProblem& p) { p.m = 64; }, "wgmma_fold16"},
          Change{[](GemmProblem& p) { p.act_symmetric = false; }, "wgmma_fold16"},
          Change{[](GemmProblem& p) { p.act_quant = ActQuant::kToken; }, "wgmma_fold16"},
          Change{[](GemmProblem& p) { p.out_type = DataType::kFloat32; }, "mma_gemm_a8"},
          Change{[](GemmProblem& p) { p.exact = true; }, "mma_gemm_a8"},
          Change{[](GemmProblem& p) { p.batch_invariant = true; }, "wgmma_fold16"}}) {
      GemmProblem changed = base;
      change.make(changed);
      Plan const other = planned(changed);
      EXPECT_STREQ(other.kernel, change.kernel);
      EXPECT_FALSE(other.compensates || other.layout.sums);
      // 4-bit weights use the same kernel, which then compensates zero points of x only.
      changed.weight.format = Format::kInt4;
      Plan const int4 = planned(changed);
      EXPECT_STREQ(int4.kernel, "wgmma_gemm_a8");
      EXPECT_EQ(int4.compensates, !changed.act_symmetric);
      EXPECT_FALSE(int4.layout.sums);
    }
    base.weight.format = Format::kInt4;
    EXPECT_TRUE(planned(base).layout.sums);
  }
}

TEST(Checks, SumsOfCodesAreForWeightsWhoseProductsTakeThem) {
  for (int bits : {4, 8})
    for (int group_size : {-1, 16, 32, 64, 128, 256})
      for (bool zeros : {false, true})
        for (bool offsets : {false, true}) {
          PackedWeight w = problem(1, 200, 576, bits, group_size).weight;
          if (zeros) w.zeros = reinterpret_cast<int8_t*>(&some_byte);
          if (offsets) w.offsets = &some_byte, w.offset_type = DataType::kFloat16;
          bool const fits =
              !offsets && !(zeros && bits == 8) && (group_size == -1 || group_size >= 128);
          EXPECT_EQ(check_sums(w, &some_byte).ok(), fits)
              << bits << " bits, groups of " << group_size << ", " << zeros << offsets;
        }
  PackedWeight book = problem(1, 200, 576).weight;
  look_up(book);
  EXPECT_EQ(check_sums(book, &some_byte).code, Status::kUnsupported);
}

TEST(Workspace, HasZeroValuesForCorrections) {
  for (int k : {1, 4096, 4224})
    for (bool codes : {true, false}) {
      GemmProblem p = problem(129, 200, k);
      p = codes ? already_quantized(p, 128) : quantized_on_the_way(p, ActQuant::kBlock, false);
      size_t const before = laid_out(p, 1).workspace;
      Plan const plan = laid_out(p, 3, false, true);
      WorkspaceLayout const& layout = plan.layout;
      size_t const rows = (k + 4095) / 4096;
      EXPECT_EQ(layout.zero_values, before);
      EXPECT_EQ(layout.zero_values % 256, 0u);
      EXPECT_EQ(layout.zero_scales % 256, 0u);
      EXPECT_GE(layout.zero_scales, layout.zero_values + 129 * rows * 128);
      // The column sums: 4 row panels of windows of 16 tiles of K, each as large as the codes of a
      // tile, 256 scales in fp16, and as many floats.
      size_t const windows = (k + 2047) / 2048;
      EXPECT_TRUE(layout.sums);
      EXPECT_EQ(layout.colsums % 256, 0u);
      EXPECT_GE(layout.colsums, layout.zero_scales + rows * 144 * 4);
      EXPECT_EQ(colsum_bytes(p.weight), 4 * windows * 4096 + 256 * 2 + 256 * 4);
      EXPECT_EQ(layout.splitk_workspace, layout.colsums + 4 * windows * 4096 + 256 * 2 + 256 * 4);
      EXPECT_EQ(plan.workspace, layout.splitk_workspace + 3u * 129 * 256 * 4);
      // The weight may hold its column sums already.
      p.weight.sums = &some_byte;
      EXPECT_FALSE(laid_out(p, 3, false, true).layout.sums);
      EXPECT_EQ(laid_out(p, 3, false, true).layout.splitk_workspace, layout.colsums);
    }
}

}  // namespace
}  // namespace cutlass_ops
