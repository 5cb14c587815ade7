// The kernel and the tile that are chosen for a problem. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_ops/layout.h"
#include "dispatch/spec.h"
#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

TEST(Dispatch, PlansACompleteLaunchOfEverySupportedProblem) {
  // Kernel, tile, and the fields that distinguish its candidates.
  std::set<std::tuple<std::string, int, int, bool, bool>> used, offered;
  for (Device const& device : kDevices)
    for (int bits : {2, 4, 8})
      for (int group_size : {-1, 16, 32, 64, 128, 256, 384, 1024})
        for (int m :
             {0, 1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 96, 128, 129, 160, 170, 192, 256, 4097, kMaxM})
          for (auto const& [n, k] : std::vector<std::pair<int, int>>{{1, 1},
                                                                     {192, 576},
                                                                     {1000, 10944},
                                                                     {49152, 576},
                                                                     {17000, 64},
                                                                     {17000, 4096},
                                                                     {14336, 4096},
                                                                     {28672, 4096},
                                                                     {8192, 28672}})
            for (Named const& input : inputs(problem(m, n, k, bits, group_size))) {
              SCOPED_TRACE("sm_" + std::to_string(device.architecture) + ", bits " +
                           std::to_string(bits) + ", group " + std::to_string(group_size) + ", m " +
                           std::to_string(m) + ", " + input.name);
              Plan const p = planned(input.problem, device);
              ASSERT_NE(p.spec, nullptr);
              EXPECT_STREQ(p.kernel, p.spec->name);
              EXPECT_TRUE(p.why && *p.why);
              EXPECT_EQ(p.spec->can_implement(input.problem, device), Field::kNone);
              EXPECT_EQ(p.spec->launch != nullptr, bool(CUTLASS_OPS_CUDA));
              EXPECT_GE(p.threads, 128);
              EXPECT_LE(p.threads, 1024);
              EXPECT_GE(p.stages, 1);
              EXPECT_LE(p.shared_bytes, device.shared_memory);
              EXPECT_EQ(p.grid_x % p.cluster_size, 0);
              // All persistent CTAs, and all that share K while decoding, run at a time.
              if (device.architecture == 90 && std::string(p.kernel).substr(0, 4) != "mma_" &&
                  input.problem.weight.format != Format::kCodebook) {
                EXPECT_LE(p.grid_x, device.multiprocessors);
              }
              // Operands of int8 products are quantised before or by the kernel.
              bool const floats = input.int8 && !input.problem.quantized.codes;
              EXPECT_EQ(p.quantizes || p.layout.block != 0, floats);
              std::vector<std::string> const order = names(p);
              EXPECT_EQ(std::count(order.begin(), order.end(), p.kernel), 1);
              EXPECT_EQ(std::count(order.begin(), order.end(), "weight_colsum"), p.layout.sums);
              EXPECT_EQ(order.front() == "quantize_activations", p.layout.block != 0);
              EXPECT_EQ(p.layout.sums, p.compensates && !input.problem.weight.sums);
              EXPECT_EQ(order.back() == "splitk_reduce", p.slices > 1 && p.tail_tiles == 0);
              used.emplace(p.kernel, p.block_n, p.block_m, p.compensates, p.one_cta_per_sm);
              // test_image_plans.cpp has those of clusters along M.
              for (Candidate const& c : p.spec->candidates(input.problem))
                if (c.tile.ctas_along_m == 1 && (!c.applies || c.applies(input.problem)))
                  offered.emplace(p.kernel, c.tile.block_n, c.tile.block_m, c.compensates,
                                  p.spec->decodes && c.tile.min_ctas_per_sm == 1);
              if (testing::Test::HasFailure()) return;
            }
  for (KernelSpec const& spec : kernel_specs())
    EXPECT_TRUE(std::any_of(used.begin(), used.end(), [&](auto const& u) {
      return std::get<0>(u) == spec.name;
    })) << spec.name;
  for (auto const& candidate : offered)
    EXPECT_TRUE(used.count(candidate))
        << std::get<0>(candidate) << ", " << std::get<1>(candidate) << " x "
        << std::get<2>(candidate) << ": no problem selects it";
}

// Up to sm_89 there are only the portable kernels, whose tiles follow M.
TEST(Dispatch, ChoosesTheTileThatFitsTheRows) {
  for (Device const& device : {kDevices[0], kDevices[1], kDevices[2]})
    for (int bits : {4, 8})
      for (bool int8 : {false, true})
        for (auto const& [m, block_m] : std::vector<std::pair<int, int>>{
                 {1, 16}, {16, 16}, {17, 32}, {33, 64}, {64, 64}, {65, 64}}) {
          GemmProblem p = problem(m, 192, 576, bits);
          if (int8) p.act_quant = ActQuant::kBlock;
          Plan chosen;
          ASSERT_TRUE(plan(p, device, &chosen).ok());
          EXPECT_STREQ(chosen.kernel, int8 ? "mma_gemm_a8" : "mma_gemm_a16");
          EXPECT_EQ(chosen.block_m, block_m);
        }
}

// wgmma_decode_fold16 applies scales of another type than x's in fp32, which is slow where weights
// are large; decode_gemm takes up to eight rows.
TEST(Dispatch, ComparesTilesWithDecodingForScalesOfAnotherType) {
  Device h100 = kHopper;
  h100.memory_bandwidth = 3352;
  auto const kernel = [&](int n, int k, int m, DataType scales, bool invariant = false) {
    GemmProblem p = problem(m, n, k, 4, 32);
    p.weight.scale_type = scales, p.batch_invariant = invariant;
    Plan const plan = planned(p, h100);
    EXPECT_TRUE(std::string(plan.kernel) != "wgmma_fold16" || plan.block_m == 32);
    return std::string(plan.kernel);
  };
  for (int m : {9, 16}) {
    EXPECT_EQ(kernel(5120, 13824, m, DataType::kFloat32), "wgmma_fold16");
    EXPECT_EQ(kernel(4096, 4096, m, DataType::kFloat32), "wgmma_decode_fold16");
    EXPECT_EQ(kernel(5120, 13824, m, DataType::kFloat16), "wgmma_decode_fold16");
    EXPECT_EQ(kernel(5120, 13824, m, DataType::kFloat32, true), "wgmma_decode_fold16");
  }
  EXPECT_EQ(kernel(5120, 13824, 8, DataType::kFloat32), "decode_gemm");
  EXPECT_EQ(kernel(5120, 13824, 17, DataType::kFloat32), "wgmma_fold16");
}

// Kernels that promote sums of 2 bits have no instances for more rows.
TEST(Dispatch, FoldsFewRowsOfBatchInvariantTwoBits) {
  auto const kernel = [](int m, bool invariant) {
    GemmProblem p = problem(m, 4096, 4096, 4, 128);
    p.weight.format = Format::kInt2, p.batch_invariant = invariant;
    return std::string(planned(p).kernel);
  };
  for (int m : {1, 16, 32}) {
    EXPECT_NE(kernel(m, false), "wgmma_decode_fold16");
    EXPECT_EQ(kernel(m, true), "wgmma_decode_fold16");
  }
  EXPECT_EQ(kernel(33, true), "wgmma_fold16");
}

TEST(Dispatch, GivesGroupsOf16ToKernelsThatHaveRoomForThem) {
  struct Case {
    char const* name;
    bool zeros, offsets, book;
    DataType scales;
    bool fits;
  };
  for (Case const& c :
       {Case{"fp16 scales", false, false, false, DataType::kFloat16, true},
        Case{"fp32 scales", false, false, false, DataType::kFloat32, true},
        Case{"zero points", true, false, false, DataType::kFloat16, false},
        Case{"offsets", false, true, false, DataType::kFloat16, false},
        Case{"offsets and fp32 scales", false, true, false, DataType::kFloat32, false},
        Case{"a code book", false, false, true, DataType::kFloat16, true},
        Case{"a code book and fp32 scales", false, false, true, DataType::kFloat32, true}}) {
    auto const weight = [&](int m) {
      GemmProblem p = problem(m, 4096, 4096, 4, 16);
      if (c.zeros) p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
      if (c.offsets) p.weight.offsets = &some_byte, p.weight.offset_type = DataType::kFloat16;
      if (c.book) look_up(p.weight);
      p.weight.scale_type = c.scales;
      return p;
    };
    bool const promotes = c.scales == DataType::kFloat32 && !c.book && !c.offsets;
    EXPECT_STREQ(planned(weight(1)).kernel, promotes ? "decode_gemm" : "wgmma_decode_fold16")
        << c.name;
    GemmProblem large = weight(1);
    large.weight.n = 14336;
    bool const wide = c.scales == DataType::kFloat32;
    EXPECT_STREQ(planned(large).kernel, !wide    ? "wgmma_decode_fold16"
                                        : c.book ? "wgmma_fold16"
                                                 : "decode_gemm")
        << c.name;
    // tiles of 32 rows are for scales of x's type
    if (c.fits && c.scales == DataType::kFloat16)
      EXPECT_STREQ(planned(weight(20)).kernel, "wgmma_decode_fold16") << c.name;
    EXPECT_STREQ(planned(weight(100)).kernel, c.fits ? "wgmma_fold16" : "mma_gemm_a16") << c.name;
    GemmProblem exact = weight(100);
    exact.exact = true;
    EXPECT_STREQ(planned(exact).kernel, "mma_gemm_a16") << c.name;
    EXPECT_EQ(planned(exact).block_m, 32) << c.name;
    EXPECT_STREQ(planned(weight(1), kDevices[0]).kernel, "mma_gemm_a16") << c.name;
    if (c.book) continue;
    exact.act_quant = ActQuant::kBlock;
    Plan const plan = planned(exact);
    EXPECT_STREQ(plan.kernel, "mma_gemm_a8") << c.name;
    EXPECT_EQ(plan.block_m, 32) << c.name;
    EXPECT_EQ(plan.layout.block, 16) << c.name;
  }
}

// Where int32 sums run over all of K the tiles have separate costs, and BLOCK_M = 256 is available.
TEST(Dispatch, GivesLargeTilesToSumsOverAllOfK) {
  auto const block_m = [](int m, int n, int k, int bits, bool symmetric = true,
                          int group_size = -1) {
    Plan const chosen = planned(
        quantized_on_the_way(problem(m, n, k, bits, group_size), ActQuant::kToken, symmetric));
    return std::string(chosen.kernel) == "wgmma_gemm_a8" ? chosen.block_m : 0;
  };
  for (int bits : {4, 8})
    for (bool symmetric : {true, false}) {
      // One wave over 66 clusters; waves and a split remainder; fewer tiles than clusters.
      for (auto const& [m, n, k] :
           {std::tuple(200, 16832, 392), std::tuple(256, 16832, 392), std::tuple(3000, 28600, 4104),
            std::tuple(512, 8180, 28680), std::tuple(4096, 4096, 4096)})
        EXPECT_EQ(block_m(m, n, k, bits, symmetric), 256) << m << " x " << n << " x " << k;
      EXPECT_EQ(block_m(1280, 4096, 4096, bits, symmetric), 176);  // two waves, three of 256
      EXPECT_EQ(block_m(512, 4096, 4096, bits, symmetric), 128);
      // Few rows of x in the last tile.
      EXPECT_NE(block_m(16384 + 63, 28672, 4096, bits, symmetric), 256);
      EXPECT_EQ(block_m(16384 + 64, 28672, 4096, bits, symmetric), 256);
      // Longer rows could overflow, and groups have scales.
      int const longest = symmetric ? 131071 : 65535;
      EXPECT_EQ(block_m(1024, 4096, longest, bits, symmetric), 256);
      EXPECT_NE(block_m(1024, 4096, longest + 1, bits, symmetric), 256);
      EXPECT_NE(block_m(1024, 4096, 4096, bits, symmetric, 128), 256);
    }
  // A batch-invariant product has the same kernel and number of split-K slices for every m,
  // whichever tile is chosen.
  std::set<std::pair<std::string, int>> kept;
  for (int m : {1, 100, 256, 300, 1000, 4096}) {
    GemmProblem p = quantized_on_the_way(problem(m, 8192, 28672, 8, -1), ActQuant::kToken, true);
    p.batch_invariant = true;
    Plan chosen;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    kept.emplace(chosen.kernel, chosen.slices);
  }
  EXPECT_EQ(kept.size(), 1u);
}

// A problem goes to a kernel that can implement it.
TEST(Dispatch, ChoosesNoKernelThatCannotImplementAProblem) {
  auto kernel = [](GemmProblem const& p) {
    Plan const chosen = planned(p);
    return std::string(chosen.kernel);
  };
  GemmProblem const plain = already_quantized(problem(512, 4096, 4096), 128);
  EXPECT_EQ(kernel(plain), "wgmma_gemm_a8");
  GemmProblem p = plain;
  p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
  EXPECT_EQ(kernel(p), "wgmma_gemm_a8");
  p.weight.format = Format::kInt8;
  EXPECT_EQ(kernel(p), "wgmma_gemm_a8");
  p.m = 64;
  EXPECT_EQ(kernel(p), "wgmma_fold16");
  p = plain;
  p.weight.offsets = &some_byte;
  p.weight.offset_type = DataType::kFloat32;
  EXPECT_EQ(kernel(p), "wgmma_fold16");
  p.architecture = 80;
  EXPECT_EQ(kernel(p), "mma_gemm_a8");
  p = plain;
  p.quantized.zeros = reinterpret_cast<int8_t*>(&some_byte);
  EXPECT_EQ(kernel(p), "wgmma_gemm_a8");
  p = plain;
  p.weight.group_size = p.quantized.block = 64;
  EXPECT_EQ(kernel(p), "wgmma_fold16");
  p.quantized.block = -1;
  EXPECT_EQ(kernel(p), "wgmma_fold16");
  p.architecture = 80;
  EXPECT_EQ(kernel(p), "mma_gemm_a8");
  GemmProblem floats = problem(512, 4096, 4096);
  floats.x_stride = 4096;
  EXPECT_EQ(kernel(floats), "wgmma_gemm_a16");
  p = floats;
  p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
  EXPECT_EQ(kernel(p), "wgmma_gemm_a16");
  p.weight.zeros = nullptr;
  p.weight.perm = reinterpret_cast<int32_t const*>(&some_byte);
  EXPECT_EQ(kernel(p), "wgmma_gemm_a16");
  for (int stride : {4097, 4100}) {
    p = floats;
    p.x_stride = stride;
    EXPECT_EQ(kernel(p), "wgmma_gemm_a16") << stride;
  }
  p = floats;
  p.x = reinterpret_cast<void const*>(uintptr_t(4096 + 2));
  EXPECT_EQ(kernel(p), "wgmma_gemm_a16");
  EXPECT_EQ(kernel(quantized_on_the_way(problem(512, 4096, 4096), ActQuant::kToken, false)),
            "wgmma_gemm_a8");
  p = quantized_on_the_way(problem(16, 4096, 4096), ActQuant::kBlock, true);
  auto quantizes = [](GemmProblem const& q) {
    Plan chosen;
    EXPECT_TRUE(plan(q, kHopper, &chosen).ok());
    EXPECT_EQ(std::string(chosen.kernel), "wgmma_decode");
    return chosen.quantizes;
  };
  p.x_type = DataType::kFloat16;
  EXPECT_TRUE(quantizes(p));
  p.x_type = DataType::kBFloat16;  // with scales in fp16
  EXPECT_FALSE(quantizes(p));
  p.weight.scale_type = DataType::kBFloat16;
  EXPECT_TRUE(quantizes(p));
  p.x_type = p.weight.scale_type = DataType::kFloat32;
  EXPECT_FALSE(quantizes(p));
  p.x_type = p.weight.scale_type = DataType::kFloat16;
  p.weight.perm = reinterpret_cast<int32_t const*>(&some_byte);
  EXPECT_FALSE(quantizes(p));
  p.weight.perm = nullptr;
  p.x_stride = 4100;
  EXPECT_FALSE(quantizes(p));
  EXPECT_EQ(kernel(already_quantized(problem(16, 4096, 4096), 128)), "wgmma_decode");
  p = already_quantized(problem(16, 4096, 4096, 8), -1);
  EXPECT_EQ(kernel(p), "wgmma_decode");
  p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
  EXPECT_EQ(kernel(p), "wgmma_decode_fold16");
  p.out_type = DataType::kFloat32;
  EXPECT_EQ(kernel(p), "mma_gemm_a8");
  GemmProblem const few = problem(16, 4096, 4096);
  EXPECT_EQ(kernel(few), "wgmma_decode");
  p = few;
  p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
  EXPECT_EQ(kernel(p), "wgmma_decode");
  p = few;
  p.weight.offsets = &some_byte;
  p.weight.offset_type = DataType::kFloat16;
  EXPECT_EQ(kernel(p), "wgmma_decode_fold16");
  p.exact = true;
  EXPECT_EQ(kernel(p), "mma_gemm_a16");
  p = few;
  p.weight.group_size = 64;
  EXPECT_EQ(kernel(p), "wgmma_decode_fold16");
  p.m = 4;
  EXPECT_EQ(kernel(p), "decode_gemm");
  p = few;
  p.weight.scale_type = DataType::kBFloat16;  // x is fp16
  EXPECT_EQ(kernel(p), "wgmma_gemm_a16");
  p.m = 8;
  EXPECT_EQ(kernel(p), "decode_gemm");
  p.weight.group_size = 32, p.m = 4;
  EXPECT_EQ(kernel(p), "decode_gemm");
  p.m = 9;
  EXPECT_EQ(kernel(p), "wgmma_decode_fold16");
  p = few;
  p.weight.scale_type = p.x_type = DataType::kBFloat16;
  EXPECT_EQ(kernel(p), "wgmma_decode");
  p = few;
  p.x_stride = 4097;
  EXPECT_EQ(kernel(p), "mma_gemm_a16");
}

TEST(Dispatch, ChoosesTheSameInt8TilesForScalesOfAnyType) {
  for (int m : {96, 128, 300, 1024, 4096})
    for (ActQuant act_quant : {ActQuant::kBlock, ActQuant::kToken}) {
      GemmProblem p = quantized_on_the_way(problem(m, 14336, 4096), act_quant, true);
      Plan own, other;
      ASSERT_TRUE(plan(p, kHopper, &own).ok());
      for (DataType type : {DataType::kBFloat16, DataType::kFloat32}) {
        p.weight.scale_type = type;
        ASSERT_TRUE(plan(p, kHopper, &other).ok());
        EXPECT_STREQ(other.kernel, own.kernel) << m;
        EXPECT_EQ(other.quantizes, own.quantizes) << m;
        EXPECT_EQ(other.block_m, own.block_m) << m;
      }
    }
}

TEST(Dispatch, HasConsistentKernelSpecs) {
  std::set<std::string> names;
  for (KernelSpec const& spec : kernel_specs()) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    for (int bits : {4, 8})
      for (Candidate const& c : spec.candidates(problem(1, 192, 576, bits))) {
        EXPECT_EQ(c.tile.block_n % kRowsPerPanel, 0) << spec.name;
        EXPECT_LE(c.min_m, c.max_m) << spec.name;
        for (int card = 0; card < kCardCount; ++card) {
          EXPECT_EQ(c.costs[card].k4096 > 0, spec.cost && !spec.decodes) << spec.name;
          int measured = 0;
          for (auto const& of_bits : c.decode_costs[card])
            for (DecodeCost const& cost : of_bits) measured += cost.start > 0;
          EXPECT_EQ(measured > 0, spec.decodes) << spec.name;
        }
        EXPECT_FALSE(spec.decodes && c.max_m > kMostFloatDecodeRows) << spec.name;
      }
  }
}

// M = 17 to 32, int8: wgmma_gemm_a8 for weights of the sizes at which it was measured to be faster.
TEST(Dispatch, GivesFewInt8RowsBlockM32ForLargeWeights) {
  auto rows = [](int m, int n, int k, int bits, ActQuant act_quant, bool symmetric = true) {
    Plan const chosen = planned(quantized_on_the_way(problem(m, n, k, bits), act_quant, symmetric));
    bool const wgmma = std::string(chosen.kernel) == "wgmma_gemm_a8";
    EXPECT_EQ(wgmma ? chosen.block_m : 0, !wgmma ? 0 : m <= 32 ? 32 : 64);
    return wgmma ? chosen.block_n : 0;
  };
  for (ActQuant act_quant : {ActQuant::kBlock, ActQuant::kToken})
    for (int m : {17, 32}) {
      // 112 tiles of 256 features are two waves over 66 clusters, 56 of 512 are one; the latter
      // have no registers for the activations' zero points.
      EXPECT_EQ(rows(m, 28672, 4096, 4, act_quant), 512);
      EXPECT_EQ(rows(m, 28672, 4096, 4, act_quant, false), 256);
      EXPECT_EQ(rows(m, 28672, 4096, 8, act_quant), 256);
      EXPECT_EQ(rows(m, 14336, 4096, 4, act_quant), 256);
      for (bool symmetric : {true, false}) {
        EXPECT_EQ(rows(m, 8192, 28672, 8, act_quant, symmetric), 256);
        EXPECT_EQ(rows(m, 8192, 4096, 8, act_quant, symmetric), 256);
        EXPECT_EQ(rows(m, 8128, 4096, 8, act_quant, symmetric), 0);
        EXPECT_EQ(rows(m, symmetric ? 4096 : 6144, 4096, 4, act_quant, symmetric), 256);
        EXPECT_EQ(rows(m, symmetric ? 4032 : 6080, 4096, 4, act_quant, symmetric), 0);
      }
    }
  EXPECT_EQ(rows(16, 14336, 4096, 4, ActQuant::kBlock) + rows(16, 14336, 4096, 8, ActQuant::kBlock),
            0);
  EXPECT_EQ(rows(33, 2048, 4096, 8, ActQuant::kBlock), 256);
}

TEST(Dispatch, GivesBatchInvariantInt4ProductsOfBlocksNoSmallTiles) {
  GemmProblem p = problem(40, 4096, 4096, 4);
  p.batch_invariant = true;
  Plan chosen;
  ASSERT_TRUE(plan(quantized_on_the_way(p, ActQuant::kBlock, true), kHopper, &chosen).ok());
  EXPECT_STREQ(chosen.kernel, "wgmma_gemm_a8");
  EXPECT_GE(chosen.block_m, 128);
  ASSERT_TRUE(plan(already_quantized(p, 128), kHopper, &chosen).ok());
  EXPECT_GE(chosen.block_m, 128);
  // These multiply in the order of larger tiles.
  ASSERT_TRUE(plan(quantized_on_the_way(p, ActQuant::kBlock, false), kHopper, &chosen).ok());
  EXPECT_EQ(chosen.block_m, 64);
  ASSERT_TRUE(plan(quantized_on_the_way(p, ActQuant::kToken, true), kHopper, &chosen).ok());
  EXPECT_EQ(chosen.block_m, 64);
}

TEST(Dispatch, TakesTheKernelsOfAnEarlierArchitectureIfAsked) {
  for (int m : {1, 40, 4096}) {
    GemmProblem p = problem(m, 4096, 4096);
    Plan old;
    ASSERT_TRUE(plan(p, kDevices[0], &old).ok());
    p.architecture = 80;
    Plan chosen;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    EXPECT_STREQ(chosen.kernel, old.kernel);
    p.architecture = 100;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_EQ(status.code, Status::kUnsupported);
    EXPECT_NE(status.text.find("architecture is 100; the GPU is sm_90"), std::string::npos)
        << status.text;
    // Kernels for Hopper run on Hopper only.
    p.architecture = 90;
    ASSERT_TRUE(plan(p, kDevices[4], &chosen).ok());
    EXPECT_STREQ(chosen.kernel, "mma_gemm_a16");
  }
}

}  // namespace
}  // namespace cutlass_ops
