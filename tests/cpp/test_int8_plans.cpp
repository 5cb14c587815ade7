// The plans of static int8 products and convolutions. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "cutlass_ops/conv.h"
#include "dispatch/conv_int8.h"
#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

// Images of 9 x 9 pixels, whose kernel of taps x taps keeps their size.
ConvProblem int8_images(int batch, int channels, int n, int taps, int groups = 1) {
  ConvProblem p;
  p.weight.n = n, p.weight.channels = channels / groups, p.weight.height = p.weight.width = taps,
  p.groups = groups;
  p.weight.order = conv_order(n, channels / groups, taps * taps, groups);
  p.weight.codes = reinterpret_cast<int8_t*>(&some_byte), p.weight.scales = some_book;
  p.weight.sums = reinterpret_cast<int32_t*>(&some_byte);
  p.x = p.out = &some_byte, p.batch = batch, p.height = p.width = 9, p.channels = channels;
  p.padding[0] = p.padding[1] = taps / 2;
  return p;
}

std::vector<ConvPlan> int8_plans(ConvProblem const& p, Device const& device = kHopper) {
  std::vector<ConvPlan> plans;
  Status const status = plans_conv_int8(p, device, &plans);
  EXPECT_TRUE(status.ok()) << status.text;
  return plans;
}

std::vector<ConvPlan> of_kernel(std::string const& kernel, std::vector<ConvPlan> plans) {
  plans.erase(std::remove_if(plans.begin(), plans.end(),
                             [&](ConvPlan const& plan) { return plan.kernel != kernel; }),
              plans.end());
  return plans;
}

TEST(Int8Plans, OfImplicitGemmsCoverTheResultOnEveryGpu) {
  for (Device const& device : kDevices)
    for (auto [channels, n, taps, groups] : std::vector<std::array<int, 4>>{{3, 17, 7, 1},
                                                                            {20, 65, 3, 1},
                                                                            {64, 1, 1, 1},
                                                                            {96, 96, 3, 3},
                                                                            {15, 30, 3, 3},
                                                                            {64, 640, 33, 1}})
      for (int zero_point : {0, 3}) {
        ConvProblem p = int8_images(100, channels, n, taps, groups);
        p.x_zero_point = zero_point;
        std::vector<ConvPlan> const plans =
            of_kernel("conv_int8_implicit_gemm", int8_plans(p, device));
        ASSERT_FALSE(plans.empty()) << channels << " channels, " << taps << " taps";
        for (ConvPlan const& plan : plans) {
          EXPECT_EQ(plan.grid,
                    ceil_div(8100, plan.block_m) * groups * ceil_div(n / groups, plan.block_n));
          EXPECT_LE(plan.stages * (plan.block_m + plan.block_n) * ConvImplicitTile::kBlockK,
                    device.shared_memory);
        }
        for (size_t i = 1; i < plans.size(); ++i)
          EXPECT_LE(plans[i - 1].predicted_clocks, plans[i].predicted_clocks);
      }
}

TEST(Int8Plans, OfCollectivesAreProductsThatStoreWholeVectors) {
  auto const count = [](ConvProblem const& p, Device const& device = kHopper) {
    return of_kernel("gemm_int8_collective", int8_plans(p, device)).size();
  };
  ConvProblem const product = int8_images(5, 70, 64, 1);
  EXPECT_EQ(count(product), std::size(kGemmCollectiveTiles));
  // the taps are gathered
  EXPECT_EQ(count(int8_images(5, 3, 64, 3)), std::size(kGemmCollectiveTiles));
  EXPECT_EQ(count(int8_images(5, 70, 64, 3)), 0u);
  EXPECT_EQ(count(int8_images(5, 70, 72, 1)), 0u);
  EXPECT_EQ(count(int8_images(5, 96, 96, 1, 3)), 0u);
  for (Device const& device : kDevices)
    EXPECT_EQ(count(product, device) > 0, device.architecture == 90);
  for (auto const& change : std::vector<std::function<void(ConvProblem&)>>{
           [](auto& p) { p.out = &some_byte + 8; },
           [](auto& p) { p.out_type = ConvOutput::kInt32; }, [](auto& p) { p.stride[1] = 2; },
           [](auto& p) { p.padding[0] = 1; }}) {
    ConvProblem p = product;
    change(p);
    EXPECT_EQ(count(p), 0u);
  }
  for (ConvPlan const& plan : of_kernel("gemm_int8_collective", int8_plans(product))) {
    EXPECT_EQ(plan.copied_channels, 80);
    EXPECT_EQ(plan.grid % plan.cluster_size, 0);
    EXPECT_EQ(plan.workspace, size_t(5 * 81 * 80));
  }
}

TEST(Int8Plans, LoadWindowsWhereStridesAre1) {
  auto const windows = [](ConvProblem const& p) {
    std::vector<ConvPlan> plans = of_kernel("conv_int8_wgmma", int8_plans(p));
    plans.erase(std::remove_if(plans.begin(), plans.end(),
                               [](ConvPlan const& plan) { return !plan.windows; }),
                plans.end());
    return plans;
  };
  size_t const all =
      size_t(std::count_if(std::begin(kConvWgmmaTiles), std::end(kConvWgmmaTiles),
                           [](ConvWgmmaTile const& tile) { return tile.windows && !tile.slices; }));
  EXPECT_GT(all, 0u);
  for (int taps : {3, 5, 9}) {
    ConvProblem const p = int8_images(100, 64, 320, taps);
    std::vector<ConvPlan> const plans = windows(p);
    EXPECT_EQ(plans.size(), all) << taps;
    for (ConvPlan const& plan : plans) {
      ConvWgmmaTile const tile{plan.block_n, plan.cluster_size, true, false, plan.turns};
      EXPECT_GE(plan.stages, 3);
      EXPECT_LE(plan.ctas_per_sm * (tile.shared_bytes(plan.stages, ConvWindow(p)) + 1024),
                228 * 1024);
      // 9 x 9 pixels are 4 patches
      EXPECT_LE(plan.grid, 200 * ceil_div(320, plan.block_n));
      EXPECT_EQ(plan.grid % plan.cluster_size, 0);
    }
  }
  EXPECT_TRUE(windows(int8_images(100, 64, 320, 1)).empty());
  for (auto const& change : std::vector<std::function<void(ConvProblem&)>>{
           [](auto& p) { p.stride[0] = 2; }, [](auto& p) { p.stride[1] = 2; },
           // no room for windows of 24 x 24 pixels
           [](auto& p) { p.dilation[0] = p.dilation[1] = p.padding[0] = p.padding[1] = 8; }}) {
    ConvProblem p = int8_images(100, 64, 320, 3);
    change(p);
    EXPECT_TRUE(windows(p).empty());
    EXPECT_FALSE(of_kernel("conv_int8_wgmma", int8_plans(p)).empty());
  }
}

TEST(Int8Plans, WaitWhereOneSmMayGetTheLongerCtas) {
  auto const first = [](int tiles, int channels) {  // of 128 pixels and 128 channels
    ConvProblem p = int8_images(1, channels, 128, 3);
    p.stride[0] = p.stride[1] = 2, p.padding[0] = p.padding[1] = 0;
    p.height = 3, p.width = 2 * 128 * tiles + 1;
    std::vector<ConvPlan> plans = of_kernel("conv_int8_wgmma", int8_plans(p));
    return *std::find_if(plans.begin(), plans.end(),
                         [](ConvPlan const& plan) { return plan.block_n == 128 && !plan.turns; });
  };
  for (int tiles : {100, 132, 264, 528}) EXPECT_TRUE(first(tiles, 128).overlaps) << tiles;
  EXPECT_FALSE(first(392, 128).overlaps);  // three an SM, of which CTAs have one or two
}

TEST(Int8Plans, TakeTurnsWhereAnSmHasManyTiles) {
  auto const turns = [](int batch, int channels, int n, int taps) {
    ConvPlan const plan = int8_plans(int8_images(batch, channels, n, taps)).front();
    EXPECT_EQ(plan.kernel, std::string("conv_int8_wgmma"));
    return plan.turns;
  };
  EXPECT_TRUE(turns(1000, 128, 128, 3));
  EXPECT_TRUE(turns(1000, 64, 64, 3));
  EXPECT_FALSE(turns(100, 2048, 128, 1));
}

TEST(Int8Plans, SliceTheChannelsOfFewTiles) {
  auto const slices = [](ConvProblem const& p) {
    std::vector<ConvPlan> plans = int8_plans(p);
    plans.erase(std::remove_if(plans.begin(), plans.end(),
                               [](ConvPlan const& plan) { return plan.slices == 1; }),
                plans.end());
    return plans;
  };
  for (int taps : {1, 3}) {
    for (int channels : {129, 512, 2560}) {
      ConvProblem const p = int8_images(2, channels, 1280, taps);
      std::vector<ConvPlan> const plans = slices(p);
      EXPECT_EQ(plans.size(), taps == 1 ? 1u : 2u) << channels;
      for (ConvPlan const& plan : plans) {
        // 162 pixels, or 8 patches
        EXPECT_EQ(plan.grid, ceil_div(1280, plan.block_n) * (plan.windows ? 4 : 2) * plan.slices);
        EXPECT_EQ(plan.cluster_size, plan.slices);
        EXPECT_LE(plan.slices, ceil_div(channels, 128));
        ConvWgmmaTile const tile{plan.block_n, 1, plan.windows, true, false};
        EXPECT_LE((plan.slices - 1) * ConvWgmmaTile::slice_bytes(plan.block_n),
                  tile.shared_bytes(plan.stages, ConvWindow(p)) - tile.other_bytes());
      }
    }
    EXPECT_TRUE(slices(int8_images(2, 128, 1280, taps)).empty());      // one block of channels
    EXPECT_TRUE(slices(int8_images(1000, 2560, 1280, taps)).empty());  // many tiles
  }
}

TEST(Int8Plans, AreRefusedWhereATileSpansMoreThan32Bits) {
  ConvProblem p = int8_images(2, 1 << 23, 16, 1);
  EXPECT_TRUE(of_kernel("conv_int8_implicit_gemm", int8_plans(p)).empty());
  ConvPlan plan;
  Status const status = plan_conv_int8(p, kDevices[0], &plan);
  EXPECT_EQ(status.code, Status::kUnsupported);
  EXPECT_NE(status.text.find("2^31 bytes"), std::string::npos) << status.text;
  // Images of 679 MB, of which a tile of 256 pixels has up to five, in lines of 75 MB
  // and pixels of 8 MB.
  ConvProblem const images = int8_images(2, (1 << 23) - 16, 16, 1);
  EXPECT_EQ(of_kernel("conv_int8_implicit_gemm", int8_plans(images)).size(),
            std::size(kConvImplicitTiles));
  for (auto const& change : std::vector<std::function<void(ConvProblem&)>>{
           [](auto& q) { q.batch = 5; }, [](auto& q) { q.padding[0] = 20; },
           [](auto& q) { q.padding[1] = 127; }}) {
    ConvProblem q = images;
    change(q);
    EXPECT_TRUE(of_kernel("conv_int8_implicit_gemm", int8_plans(q)).empty());
  }
}

}  // namespace
}  // namespace cutlass_ops
