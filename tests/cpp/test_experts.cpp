// Kernels, tiles and workspaces of layers of experts. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_ops/experts.h"
#include "cutlass_ops/layout.h"
#include "dispatch/decode_shape.h"
#include "dispatch/grouped.h"
#include "dispatch/problem.h"
#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

MoeProblem experts(int tokens, int count, int top, int hidden, int intermediate,
                   int group_size = 128) {
  MoeProblem p;
  p.route.tokens = tokens, p.route.top = top, p.route.experts = count, p.route.ids = &some_byte;
  p.x = p.topk_weights = &some_byte, p.x_stride = hidden;
  p.gate_up = {problem(1, count * int(padded_rows(2 * intermediate)), hidden, 4, group_size).weight,
               count, 2 * intermediate};
  p.down = {problem(1, count * int(padded_rows(hidden)), intermediate, 4, group_size).weight, count,
            hidden};
  return p;
}

// The largest number of a layer's tiles.
int most_tiles(MoeProblem const& p, int height) {
  int const positions = p.route.positions(), touched = std::min(p.route.experts, positions);
  return touched + (positions - touched) / height;
}

TEST(Experts, UseHigherTilesForMoreRows) {
  for (auto [tokens, group_size, height, kernel] : {std::tuple(1, 128, 16, "wgmma_decode_fold16"),
                                                    {32, 128, 16, "wgmma_decode_fold16"},  // 2
                                                    {256, 128, 64, "wgmma_gemm_a16"},      // 16
                                                    // 32 rows of an expert
                                                    {512, 128, 64, "wgmma_gemm_a16"},
                                                    // 64 of most, and not of all
                                                    {1024, 128, 96, "wgmma_gemm_a16"},
                                                    {2048, 128, 144, "wgmma_gemm_a16"},  // 128
                                                    {2048, -1, 144, "wgmma_gemm_a16"},
                                                    {16384, 128, 144, "wgmma_gemm_a16"},
                                                    {512, 64, 64, "wgmma_fold16"},
                                                    {1024, 32, 96, "wgmma_fold16"},
                                                    {3072, 32, 96, "wgmma_fold16"},  // 192
                                                    {16384, 32, 144, "wgmma_fold16"}}) {
    MoePlan chosen;
    MoeProblem const p = experts(tokens, 128, 8, 2048, 768, group_size);
    ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.gate_up.block_m, height) << tokens;
    EXPECT_STREQ(chosen.kernel, kernel);
    // Enough for any routing: a slot for each position, and the largest possible number of tiles.
    int const positions = tokens * 8, touched = std::min(128, positions);
    EXPECT_EQ(chosen.routes, positions > 256);
    EXPECT_GE(chosen.slots, positions + (chosen.routes ? touched * 15 - 15 : 0));
    EXPECT_EQ(chosen.slots % 16, 0);
    if (height == 16) {
      EXPECT_EQ(chosen.gate_up.grid_x % most_tiles(p, height), 0);
    }
    for (Plan const* product : {&chosen.gate_up, &chosen.down}) {
      EXPECT_EQ(product->grid_x % product->cluster_size, 0);
      EXPECT_LE(product->shared_bytes, kHopper.shared_memory);
    }
  }
}

TEST(Experts, LeaveTilesOf16RowsEarlyWithWideScales) {
  for (auto [tokens, count, group_size, height] : {std::tuple(4, 64, 32, 16),
                                                   {6, 64, 32, 32},
                                                   {4, 128, 32, 16},
                                                   {8, 128, 32, 32},
                                                   {1, 64, 16, 16},
                                                   {2, 64, 16, 32}}) {
    MoeProblem p = experts(tokens, count, 8, 2048, 768, group_size);
    p.x_type = DataType::kFloat16;  // the scales'
    MoePlan chosen;
    ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.gate_up.block_m, 16) << tokens;
    p.gate_up.stack.scale_type = p.down.stack.scale_type = DataType::kFloat32;
    ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.gate_up.block_m, height) << tokens << ", groups of " << group_size;
  }
}

TEST(Experts, HaveNoTilesOf96RowsForNarrowGroupsOf16) {
  for (DataType scales : {DataType::kBFloat16, DataType::kFloat32}) {
    MoeProblem p = experts(1024, 128, 8, 2048, 768, 16);
    p.gate_up.stack.scale_type = p.down.stack.scale_type = scales;
    MoePlan chosen;
    ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.gate_up.block_m == 96, scales == DataType::kFloat32);
    EXPECT_STREQ(chosen.kernel, "wgmma_fold16");
  }
}

TEST(Experts, FindRowsInTheIdsIfTheseAreFew) {
  MoePlan chosen;
  for (auto [tokens, count, routes] : {std::tuple(1, 128, false),
                                       {32, 128, false},
                                       {33, 128, true},
                                       {32, 1024, false},
                                       {32, 1025, true},
                                       {32, 8, true}}) {  // 32 rows of an expert, in higher tiles
    ASSERT_TRUE(plan_moe(experts(tokens, count, 8, 2048, 768), kHopper, &chosen).ok());
    EXPECT_EQ(chosen.routes, routes) << tokens << " tokens, " << count << " experts";
    if (routes) continue;
    EXPECT_EQ(chosen.gate_up.block_m, 16);
    EXPECT_EQ(chosen.slots, (tokens * 8 + 15) / 16 * 16);
  }
}

TEST(Experts, CoverAllFeaturesOfGateAndUpByClusters) {
  MoePlan chosen;
  for (int intermediate : {8, 64, 136, 192, 640, 704, 14336}) {
    MoeProblem const p = experts(1, 8, 2, 4096, intermediate, 64);
    ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    WgmmaDecodeShape const& shape = chosen.gate_up.wgmma_decode;
    ASSERT_GT(shape.cluster, 0);
    EXPECT_GE(shape.most_row_panels * shape.clusters * 64, 2 * intermediate);
    EXPECT_EQ(chosen.gate_up.grid_x, most_tiles(p, 16) * shape.clusters * shape.cluster);
  }
}

TEST(Experts, UsePersistentCtasIfEachGetsSeveralRowPanels) {
  MoePlan chosen;
  auto const dealt = [&](MoeProblem const& p) {
    EXPECT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    WgmmaDecodeShape const& shape = chosen.gate_up.wgmma_decode;
    if (!shape.dealt) return false;
    EXPECT_EQ(shape.cluster, 1);
    EXPECT_EQ(shape.sets, 1);
    EXPECT_EQ(chosen.gate_up.grid_x, 2 * kHopper.multiprocessors);
    EXPECT_LE(shape.most_row_panels, 3 * WgmmaDecodeShape::kMostDealtPanels);
    EXPECT_GE(shape.stages, 3);
    return true;
  };
  auto const experts = [](auto... sizes) {
    MoeProblem p = cutlass_ops::experts(sizes...);
    p.x_type = DataType::kFloat16;
    return p;
  };
  EXPECT_TRUE(dealt(experts(32, 128, 8, 2048, 768)));
  EXPECT_TRUE(dealt(experts(64, 128, 8, 2048, 768)));
  EXPECT_FALSE(dealt(experts(1, 128, 8, 2048, 768)));
  EXPECT_FALSE(dealt(experts(4096, 8192, 8, 512, 32)));  // a CTA would have parts of too many tiles
  MoeProblem p = experts(32, 128, 8, 2048, 768);
  p.gate_up.stack.scale_type = DataType::kFloat32;  // which the kernel keeps in registers
  EXPECT_FALSE(dealt(p));
}

TEST(Experts, HavePortableKernels) {
  Device const other{100, 148, 228 * 1024, 8000};
  for (auto [tokens, group_size, height] :
       {std::tuple(1, 128, 16), {128, 128, 16}, {4096, 128, 64}, {4096, 16, 32}}) {
    for (ActQuant act_quant : {ActQuant::kNone, ActQuant::kBlock}) {
      for (auto const& [device, architecture] :
           {std::pair(kDevices[0], 0), {kHopper, 80}, {other, 0}}) {
        MoeProblem p = experts(tokens, 128, 8, 2048, 768, group_size);
        p.act_quant = act_quant, p.architecture = architecture;
        MoePlan chosen;
        ASSERT_TRUE(plan_moe(p, device, &chosen).ok());
        bool const int8 = act_quant == ActQuant::kBlock && group_size == 128;
        EXPECT_STREQ(chosen.kernel, int8 ? "mma_gemm_a8" : "mma_gemm_a16");
        EXPECT_EQ(chosen.int8, int8);
        EXPECT_TRUE(chosen.portable && chosen.routes);
        EXPECT_EQ(chosen.gate_up.block_m, height) << tokens;
        // Every tile of an expert's rows has CTAs for all of its features.
        EXPECT_EQ(chosen.gate_up.grid_x, most_tiles(p, height) * 1536 / 128);
        EXPECT_EQ(chosen.down.grid_x, most_tiles(p, height) * 2048 / 128);
        EXPECT_LE(chosen.gate_up.shared_bytes, 99 * 1024);
      }
    }
  }
}

TEST(Experts, CutKWhereAPortableKernelHasFewTiles) {
  auto const slices = [](int tokens, int count, int hidden, int intermediate) {
    MoePlan chosen;
    MoeProblem const p = experts(tokens, count, 8, hidden, intermediate);
    EXPECT_TRUE(plan_moe(p, kDevices[0], &chosen).ok());
    EXPECT_EQ(chosen.gate_up.grid_y, chosen.gate_up.slices);
    EXPECT_LE(chosen.gate_up.slices, k_tiles(p.gate_up.stack));
    // There is room for the sums of all slices.
    size_t const bytes = size_t(chosen.gate_up.grid_x) * chosen.gate_up.slices * 16 * 128 * 4;
    EXPECT_TRUE(chosen.gate_up.slices == 1 || chosen.workspace > bytes);
    return chosen.gate_up.slices;
  };
  EXPECT_EQ(slices(1, 256, 7168, 256), 8);
  EXPECT_EQ(slices(1, 256, 512, 256), 1);     // K has four tiles
  EXPECT_EQ(slices(1, 256, 7168, 14336), 1);  // features enough
  EXPECT_EQ(slices(128, 256, 7168, 256), 1);  // tiles enough
}

TEST(Experts, TakeTheExactKernelWhereItsGroupsAndCodesAllowIt) {
  auto const kernels = [](std::function<void(PackedWeight&)> const& change) {
    MoeProblem p = experts(1024, 8, 2, 4096, 1024);
    change(p.down.stack);
    MoePlan chosen;
    EXPECT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    EXPECT_STREQ(chosen.gate_up.kernel, "wgmma_gemm_a16");
    return std::string(chosen.down.kernel);
  };
  EXPECT_EQ(kernels([](PackedWeight&) {}), "wgmma_gemm_a16");
  EXPECT_EQ(kernels([](PackedWeight& w) {
              w.format = Format::kInt8, w.zeros = reinterpret_cast<int8_t const*>(&some_byte);
            }),
            "wgmma_gemm_a16");
  EXPECT_EQ(kernels([](PackedWeight& w) { w.scale_type = DataType::kFloat32; }), "wgmma_gemm_a16");
  EXPECT_EQ(kernels([](PackedWeight& w) { w.group_size = 64; }), "wgmma_fold16");
  EXPECT_EQ(
      kernels([](PackedWeight& w) { w.offsets = &some_byte, w.offset_type = DataType::kFloat16; }),
      "wgmma_fold16");
  EXPECT_EQ(kernels(look_up), "wgmma_fold16");
  EXPECT_EQ(kernels([](PackedWeight& w) { w.format = Format::kE4m3; }), "wgmma_fold16");
}

TEST(Experts, UseInt8IfBothProductsCan) {
  for (auto act_quant : {ActQuant::kToken, ActQuant::kBlock}) {
    auto const plan = [&](int tokens, std::function<void(MoeProblem&)> const& change) {
      MoeProblem p = experts(tokens, 8, 2, 4096, 1024);
      p.act_quant = act_quant;
      change(p);
      MoePlan chosen;
      EXPECT_TRUE(plan_moe(p, kHopper, &chosen).ok());
      EXPECT_EQ(chosen.int8, std::string(chosen.gate_up.kernel) == "wgmma_gemm_a8");
      EXPECT_EQ(chosen.int8, std::string(chosen.down.kernel) == "wgmma_gemm_a8");
      return chosen;
    };
    MoePlan const many = plan(1 << 14, [](MoeProblem&) {});
    EXPECT_TRUE(many.int8);
    EXPECT_EQ(many.gate_up.block_m, 176);
    EXPECT_TRUE(plan(1024, [](MoeProblem& p) { p.gate_up.stack.format = Format::kInt8; }).int8);
    EXPECT_TRUE(plan(1024, [](MoeProblem& p) {
                  p.down.stack.zeros = reinterpret_cast<int8_t*>(&some_byte);
                }).int8);
    EXPECT_FALSE(plan(16, [](MoeProblem&) {}).int8);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) { p.act_quant = ActQuant::kNone; }).int8);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) { p.act_symmetric = false; }).int8);
    auto const halves = [](MoeProblem& p) { p.down.stack.group_size = 64; };
    EXPECT_EQ(plan(1024, halves).int8, act_quant == ActQuant::kToken);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) { p.down.stack.group_size = 32; }).int8);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) {
                   p.down.stack.group_size = 64;
                   p.down.stack.offsets = &some_byte, p.down.stack.offset_type = DataType::kFloat16;
                 }).int8);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) {
                   p.down.stack.format = Format::kInt8,
                   p.down.stack.zeros = reinterpret_cast<int8_t*>(&some_byte);
                 }).int8);
  }
}

TEST(Experts, CopyRowsOfXThatCannotBeReadThroughAnIndex) {
  auto const gathers = [](std::function<void(MoeProblem&)> const& change) {
    MoeProblem p = experts(1024, 8, 2, 4096, 1024);
    p.x = reinterpret_cast<void const*>(uintptr_t(4096)), p.x_stride = 4096;
    change(p);
    MoePlan chosen;
    EXPECT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    return chosen.gathers;
  };
  EXPECT_FALSE(gathers([](MoeProblem&) {}));
  EXPECT_FALSE(gathers([](MoeProblem& p) { p.x_stride = 4104; }));
  EXPECT_TRUE(gathers([](MoeProblem& p) { p.x_stride = 4100; }));
  EXPECT_TRUE(gathers([](MoeProblem& p) { p.x = reinterpret_cast<void const*>(uintptr_t(4104)); }));
  EXPECT_TRUE(gathers(
      [](MoeProblem& p) { p.gate_up.perm = reinterpret_cast<int32_t const*>(uintptr_t(4096)); }));
  EXPECT_TRUE(gathers([](MoeProblem& p) { p.x_stride = int64_t(1) << 30; }));
  // many features
  EXPECT_TRUE(gathers([](MoeProblem& p) { p.gate_up = experts(1024, 8, 2, 4096, 2048).gate_up; }));
  // of few rows
  EXPECT_FALSE(gathers([](MoeProblem& p) { p = experts(4, 8, 2, 4096, 2048), p.x_stride = 4096; }));
  // Quantised rows are in the workspace.
  EXPECT_FALSE(gathers([](MoeProblem& p) { p.act_quant = ActQuant::kToken, p.x_stride = 4100; }));
}

TEST(Experts, HaveTilesForAnyNumberOfRows) {
  for (int experts_of_layer : {1, 2, 8, 128, 8192})
    for (int tokens : {1, 2, 17, 300, 5000, 1 << 20})
      for (auto act_quant : {ActQuant::kNone, ActQuant::kBlock}) {
        MoeProblem p = experts(tokens, experts_of_layer, 1, 512, 128);
        p.act_quant = act_quant;
        MoePlan chosen;
        ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
        auto const has = [&](auto const& heights) {
          return std::count(std::begin(heights), std::end(heights), chosen.gate_up.block_m) > 0;
        };
        EXPECT_TRUE(chosen.gate_up.block_m == 16 ||
                    (chosen.int8 ? has(kGroupedInt8Heights) : has(kGroupedHeights)));
      }
}

TEST(Experts, UseTilesOfAnotherHeightForEachProduct) {
  MoePlan chosen;
  // 64 rows of an expert. Tiles of 96 rows have 384 features, which gate's and up's 512 fill badly.
  MoeProblem const p = experts(2048, 256, 8, 7168, 256, 32);
  ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
  EXPECT_EQ(chosen.gate_up.block_m, 64);
  EXPECT_EQ(chosen.down.block_m, 96);
  EXPECT_EQ(chosen.down.block_n, 384);
  // Few rows are 16 of both.
  MoeProblem few = experts(32, 384, 8, 7168, 256, 32);
  few.x_type = DataType::kFloat16;  // the scales'
  ASSERT_TRUE(plan_moe(few, kHopper, &chosen).ok());
  EXPECT_EQ(chosen.gate_up.block_m, 16);
  EXPECT_EQ(chosen.down.block_m, 16);
}

// By the rows of an expert on average: tiles of 16 rows up to some, which are more where memory is
// faster; then of 32 where weights are rounded, and of 64 where products are exact.
TEST(Experts, HaveTilesOf16RowsForLongerWhereMemoryIsFaster) {
  using Choice = std::pair<int, std::string>;
  auto const choice = [](Device const& device, int rows, ActQuant act_quant, int group_size = 128,
                         Format format = Format::kInt4, DataType scales = DataType::kFloat16) {
    MoeProblem p = experts(32 * rows, 256, 8, 7168, 256, group_size);
    p.gate_up.stack.format = p.down.stack.format = format;
    p.gate_up.stack.scale_type = p.down.stack.scale_type = scales;
    p.act_quant = act_quant;
    p.x_type = DataType::kFloat16;  // the scales', so that few rows are decoded exactly
    MoePlan chosen;
    EXPECT_TRUE(plan_moe(p, device, &chosen).ok());
    return Choice(chosen.gate_up.block_m, chosen.gate_up.kernel);
  };
  Choice const exact(16, "wgmma_decode"), rounded(16, "wgmma_decode_fold16");
  Choice const values(32, "wgmma_fold16"), floats(64, "wgmma_gemm_a16"), codes(64, "wgmma_gemm_a8");
  for (auto const& [device, exact_rows, rounded_rows, short_rows, block_rows, token_rows] :
       {std::tuple(kH100, 4, 2, 2, 4, 6), {kHopper, 10, 8, 6, 6, 6}}) {
    EXPECT_EQ(choice(device, exact_rows, ActQuant::kNone), exact);
    EXPECT_EQ(choice(device, exact_rows + 1, ActQuant::kNone), floats);
    EXPECT_EQ(choice(device, 48, ActQuant::kNone), floats);
    EXPECT_EQ(choice(device, rounded_rows, ActQuant::kNone, 64), rounded);
    EXPECT_EQ(choice(device, rounded_rows + 1, ActQuant::kNone, 64), values);
    EXPECT_EQ(choice(device, short_rows, ActQuant::kNone, 32), rounded);
    EXPECT_EQ(choice(device, short_rows + 1, ActQuant::kNone, 32), values);
    // row panels are not dealt
    EXPECT_EQ(choice(device, 3, ActQuant::kNone, 32, Format::kInt4, DataType::kFloat32), values);
    EXPECT_EQ(choice(device, block_rows, ActQuant::kBlock), exact);
    EXPECT_EQ(choice(device, block_rows + 1, ActQuant::kBlock), codes);
    EXPECT_EQ(choice(device, 23, ActQuant::kBlock), codes);
    EXPECT_EQ(choice(device, token_rows, ActQuant::kToken), exact);
    EXPECT_EQ(choice(device, token_rows + 1, ActQuant::kToken), codes);
    // codes in short groups: 16 rows, and more are values
    EXPECT_EQ(choice(device, 4, ActQuant::kBlock, 64), exact);
    EXPECT_EQ(choice(device, 4, ActQuant::kToken, 32), exact);
    EXPECT_EQ(choice(device, 2, ActQuant::kBlock, 32), rounded);
    EXPECT_EQ(choice(device, 16, ActQuant::kToken, 32), values);
    // of 8 bits in groups of 128 or more alone
    EXPECT_EQ(choice(device, 3, ActQuant::kBlock, 128, Format::kInt8), exact);
    EXPECT_EQ(choice(device, 4, ActQuant::kBlock, 128, Format::kInt8), codes);
    EXPECT_EQ(choice(device, 2, ActQuant::kToken, 64, Format::kInt8), rounded);
  }
}

// int8 tiles of 64 rows follow sooner where K is long, since their ends take longer.
TEST(Experts, HaveInt8TilesForFewerRowsWhereKIsLong) {
  MoePlan chosen;
  for (auto [tokens, count, hidden, intermediate, height] :
       {std::tuple(4, 8, 4096, 14336, 16),  // a row of an expert
        {8, 8, 4096, 14336, 64},            // 2
        {48, 128, 2048, 768, 16},           // 3
        {64, 128, 2048, 768, 64}}) {
    for (auto act_quant : {ActQuant::kBlock, ActQuant::kToken}) {
      MoeProblem p = experts(tokens, count, count == 8 ? 2 : 8, hidden, intermediate);
      p.act_quant = act_quant, p.x_type = DataType::kFloat16;
      ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
      EXPECT_EQ(chosen.gate_up.block_m, height) << tokens << ", " << hidden;
    }
  }
}

// Half of the experts have more rows than 64, the average. Tiles of 96 rows fill 14 waves for gate
// and up; of the larger ones of 64 rows, ten waves are not quite enough.
TEST(Experts, CountWholeWaves) {
  MoePlan chosen;
  for (auto act_quant : {ActQuant::kBlock, ActQuant::kToken}) {
    MoeProblem p = experts(256, 8, 2, 4096, 14336);
    p.act_quant = act_quant;
    ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.gate_up.block_m, 96);
    EXPECT_EQ(chosen.down.block_m, 96);
  }
}

TEST(Experts, MultiplyFewRowsByFourWarpgroups) {
  MoePlan chosen;
  for (auto [act_quant, scales, format, features] :
       {std::tuple(ActQuant::kNone, DataType::kFloat16, Format::kInt4, 512),
        {ActQuant::kNone, DataType::kFloat32, Format::kInt4, 256},
        {ActQuant::kNone, DataType::kFloat16, Format::kInt8, 256},
        {ActQuant::kBlock, DataType::kFloat16, Format::kInt4, 512},
        {ActQuant::kBlock, DataType::kFloat32, Format::kInt4, 512},
        {ActQuant::kToken, DataType::kFloat16, Format::kInt8, 256}}) {
    MoeProblem p = experts(1400, 256, 8, 7168, 256);
    p.x_type = DataType::kFloat16, p.act_quant = act_quant;
    for (PackedExperts* part : {&p.gate_up, &p.down})
      part->stack.scale_type = scales, part->stack.format = format;
    ASSERT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.gate_up.block_m, 64);
    EXPECT_EQ(chosen.gate_up.block_n, features);
    EXPECT_EQ(chosen.gate_up.threads, features + 128);
  }
}

TEST(Experts, UseTilesOf16RowsForLongerWhereLargerOnesWasteFeatures) {
  MoePlan chosen;
  for (auto [tokens, intermediate, height] :
       {std::tuple(64, 384, 16), {128, 384, 64}, {64, 256, 64}, {32, 256, 16}}) {
    ASSERT_TRUE(plan_moe(experts(tokens, 128, 8, 4096, intermediate), kH100, &chosen).ok());
    EXPECT_EQ(chosen.gate_up.block_m, height) << tokens << ", " << intermediate;
  }
}

TEST(Experts, NameTheFieldThatForbidsThem) {
  MoePlan chosen;
  auto const text = [&](MoeProblem const& p, Device const& device = kHopper) {
    return plan_moe(p, device, &chosen).text;
  };
  EXPECT_NE(text(experts(1, 8, 2, 4096, 100)).find("intermediate is 100; multiples of 8"),
            std::string::npos);
  EXPECT_NE(text(experts(1, 8, 2, 4100, 128)).find("hidden is 4100; multiples of 8"),
            std::string::npos);
  EXPECT_NE(text(experts(1, 9000, 2, 4096, 128)).find("up to 8192 experts"), std::string::npos);
  Device old = kDevices[0];
  old.architecture = 75;
  EXPECT_NE(text(experts(1, 8, 2, 4096, 128), old).find("architecture is 75"), std::string::npos);
  EXPECT_NE(text(experts(1, 0, 2, 4096, 128)).find("experts is 0"), std::string::npos);
  for (auto const& [change, words] :
       std::vector<std::pair<std::function<void(MoeProblem&)>, std::string>>{
           {[](auto& p) { p.activation = Activation(77); }, "activation is 77"},
           {[](auto& p) { p.activation = Activation::kClampedSwiglu; },
            "clamped_swiglu takes a finite factor and a limit above 0"},
           {[](auto& p) { p.act_quant = ActQuant(9); }, "act_quant is 9"},
           {[](auto& p) { p.architecture = 100; }, "architecture is 100; the GPU is sm_90"},
           {[](auto& p) { p.architecture = 75; }, "architecture is 75"},
           {[](auto& p) { p.x_stride = 0; }, "x_stride is 0"},
           {[](auto& p) { p.x = nullptr; }, "x is a null pointer"},
           {[](auto& p) { p.topk_weights = nullptr; }, "topk_weights is a null pointer"},
           {[](auto& p) { p.route.ids = nullptr; }, "ids is a null pointer"},
           {[](auto& p) { p.route.map_size = 8; }, "expert_map is a null pointer"},
           {[](auto& p) { p.down.stack.codes = nullptr; }, "codes is a null pointer"},
           {[](auto& p) { p.gate_up.bias = &some_byte; }, "bias_type"},
       }) {
    MoeProblem p = experts(5, 8, 2, 4096, 128);
    change(p);
    EXPECT_NE(text(p).find(words), std::string::npos) << words << ": " << text(p);
  }
}

}  // namespace
}  // namespace cutlass_ops
