// Plans of products whose rows of x are an image's pixels. Needs no GPU.

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <tuple>

#include "dispatch/problem.h"
#include "dispatch/spec.h"

namespace cutlass_ops {
namespace {

alignas(256) uint8_t some_bytes[32];  // what non-null pointers point to; nothing here reads it
Device const kHopper = {90, 132, 232448, 4916};

// A convolution of a batch of images of size x size pixels by 3 x 3 taps, with padding.
GemmProblem convolution(int batch, int size, int channels, int n, int bits, ActQuant act_quant,
                        int group_size = 128) {
  GemmProblem p;
  p.image.batch = batch, p.image.channels = channels;
  for (int axis = 0; axis < 3; ++axis) {
    bool const deep = axis == 0;
    p.image.size[axis] = p.image.out[axis] = deep ? 1 : size, p.image.taps[axis] = deep ? 1 : 3;
    p.image.stride[axis] = p.image.dilation[axis] = 1, p.image.padding[axis] = deep ? 0 : 1;
  }
  p.m = batch * size * size;
  p.weight.n = n, p.weight.k = 9 * int(padded_k(channels)),
  p.weight.format = bits == 4 ? Format::kInt4 : Format::kInt8, p.weight.group_size = group_size;
  p.weight.codes = some_bytes, p.weight.scales = some_bytes;
  p.x = some_bytes, p.x_stride = channels, p.act_quant = act_quant;
  p.out = some_bytes;
  return p;
}

Plan planned(GemmProblem const& p) {
  Plan chosen;
  Status const status = plan(p, kHopper, &chosen);
  EXPECT_TRUE(status.ok()) << status.text;
  return chosen;
}

TEST(ImagePlans, AreForMatricesOfFewFeaturesOnHopperAlone) {
  GemmProblem p;
  p.m = 1024, p.weight.n = 112, p.weight.k = 256, p.act_quant = ActQuant::kToken;
  p.weight.format = Format::kInt4, p.weight.group_size = 128;
  EXPECT_TRUE(is_faster_as_image(p, kHopper));
  EXPECT_FALSE(is_faster_as_image(p, {80, 108, 166912}));
  EXPECT_FALSE(is_faster_as_image(p, {100, 148, 232448}));
  auto const without = [&](auto const& change) {
    GemmProblem other = p;
    change(other);
    return is_faster_as_image(other, kHopper);
  };
  EXPECT_FALSE(without([](GemmProblem& q) { q.m = 1023; }));
  EXPECT_FALSE(without([](GemmProblem& q) { q.weight.n = 256; }));
  EXPECT_FALSE(without([](GemmProblem& q) { q.weight.group_size = -1; }));
  EXPECT_FALSE(without([](GemmProblem& q) { q.act_quant = ActQuant::kBlock; }));
  // An act order gathers columns of matrices alone.
  EXPECT_FALSE(without(
      [](GemmProblem& q) { q.weight.perm = reinterpret_cast<int32_t const*>(some_bytes); }));
}

TEST(ImagePlans, PutTheCtasOfAClusterAlongMForFewOutputChannels) {
  std::set<std::tuple<std::string, int, int, int>> used, offered;
  for (int bits : {4, 8})
    for (ActQuant act_quant :
         {ActQuant::kNone, ActQuant::kToken, ActQuant::kBlock, ActQuant::kTensor})
      for (int batch : {1, 3, 16, 17, 40, 64})
        for (int size : {7, 14, 28, 33, 56})
          for (int n : {64, 128, 256, 320, 640}) {
            GemmProblem const p = convolution(batch, size, 128, n, bits, act_quant);
            Plan const chosen = planned(p);
            int const loading = chosen.quantizes ? 4 : 1;
            EXPECT_EQ(chosen.threads, 128 * (chosen.block_n * chosen.ctas_along_m / 128 + loading));
            used.emplace(chosen.kernel, chosen.block_n, chosen.block_m, chosen.ctas_along_m);
            for (Candidate const& c : chosen.spec->candidates(p))
              if (c.tile.ctas_along_m > 1)
                offered.emplace(chosen.kernel, c.tile.block_n, c.tile.block_m, c.tile.ctas_along_m);
            if (n == 128 && p.m > 10000) {
              EXPECT_EQ(chosen.ctas_along_m, 2) << chosen.kernel << " of " << p.m << " pixels";
            }
            if (n == 256) {
              EXPECT_EQ(chosen.ctas_along_m, 1) << chosen.kernel << " of " << p.m << " pixels";
            }
          }
  for (auto const& candidate : offered)
    EXPECT_TRUE(used.count(candidate))
        << std::get<0>(candidate) << ", " << std::get<1>(candidate) << " x "
        << std::get<2>(candidate) << ": no problem selects it";
}

TEST(MatrixPlans, OfFewFeaturesPutTheCtasOfAClusterAlongM) {
  auto const ctas = [](int n, ActQuant act_quant, bool symmetric, int group_size) {
    GemmProblem p = convolution(0, 0, 1024, n, 8, act_quant, group_size);
    p.m = 60000, p.weight.k = 1024, p.act_symmetric = symmetric;
    return planned(p).ctas_along_m;
  };
  for (int n : {64, 128, 320}) {
    EXPECT_EQ(ctas(n, ActQuant::kNone, true, 128), 2);
    EXPECT_EQ(ctas(n, ActQuant::kBlock, true, 128), 2);
    EXPECT_EQ(ctas(n, ActQuant::kToken, true, -1), 2);
    // Kernels that have no such clusters.
    EXPECT_EQ(ctas(n, ActQuant::kToken, true, 128), 1);
    EXPECT_EQ(ctas(n, ActQuant::kBlock, false, 128), 1);
  }
  for (int n : {192, 256, 512}) EXPECT_EQ(ctas(n, ActQuant::kNone, true, 128), 1);
}

TEST(MatrixPlans, OfFewFeaturesQuantiseXInTheProduct) {
  auto const of = [](int n, int k, ActQuant act_quant) {
    GemmProblem p = convolution(0, 0, k, n, 8, act_quant);
    p.m = 60000, p.weight.k = k;
    return p;
  };
  for (int n : {64, 128}) {
    Plan const p = planned(of(n, 1024, ActQuant::kBlock));
    EXPECT_TRUE(p.quantizes);
    EXPECT_EQ(p.threads, 768);
    EXPECT_EQ(p.layout.block, 0);
    // A row's scale needs all of its K tiles: they are few, and never split.
    for (int k : {128, 256}) {
      for (int m : {20001, 31999, 60000}) {
        GemmProblem rows = of(n, k, ActQuant::kToken);
        rows.m = m;
        EXPECT_TRUE(planned(rows).quantizes);
        EXPECT_EQ(planned(rows).slices, 1);
      }
    }
    EXPECT_FALSE(planned(of(n, 384, ActQuant::kToken)).quantizes);
  }
  // An image's pixels under one tap, and not under several.
  GemmProblem image = convolution(16, 64, 128, 128, 8, ActQuant::kTensor);
  EXPECT_FALSE(planned(image).quantizes);
  for (int axis : {1, 2}) {
    image.image.taps[axis] = 1, image.image.padding[axis] = 0, image.image.stride[axis] = 2,
    image.image.out[axis] = 32;
  }
  image.m = 16 * 32 * 32, image.weight.k = 128;
  Plan const strided = planned(image);
  EXPECT_TRUE(strided.quantizes);
  EXPECT_TRUE(strided.layout.ranges);
  EXPECT_EQ(launches(strided), (std::vector<char const*>{"quantize_activations", strided.kernel}));
  // Not where the tiles fill no wave.
  GemmProblem few = of(64, 1024, ActQuant::kBlock);
  few.m = 4096;
  EXPECT_FALSE(planned(few).quantizes);
  // Each tile of features quantises x again.
  EXPECT_FALSE(planned(of(4096, 1024, ActQuant::kBlock)).quantizes);
  auto const changed = [&](auto change) {
    GemmProblem p = of(64, 1024, ActQuant::kBlock);
    change(p);
    return planned(p).quantizes;
  };
  // Kernels for fewer rows of x have other sums of a row with one scale.
  GemmProblem row_scales = of(64, 128, ActQuant::kToken);
  row_scales.batch_invariant = true;
  EXPECT_FALSE(planned(row_scales).quantizes);
  EXPECT_FALSE(changed([](GemmProblem& p) { p.act_symmetric = false; }));
  EXPECT_FALSE(changed([](GemmProblem& p) { p.x_type = DataType::kFloat32; }));
  EXPECT_FALSE(changed([](GemmProblem& p) { p.x_stride = 1026; }));
  EXPECT_FALSE(changed([](GemmProblem& p) {
    p.weight.format = Format::kInt4, p.weight.zeros = reinterpret_cast<int8_t*>(some_bytes);
  }));
}

// 320 of 384 features, and not of 512.
TEST(ImagePlans, ChooseTheKernelWhoseTilesTheOutputChannelsFill) {
  Plan const p = planned(convolution(2, 64, 320, 320, 4, ActQuant::kNone));
  EXPECT_STREQ(p.kernel, "wgmma_fold16");
  EXPECT_EQ(p.block_n, 384);
  EXPECT_STREQ(planned(convolution(2, 64, 256, 256, 4, ActQuant::kNone)).kernel, "wgmma_gemm_a16");
  GemmProblem exact = convolution(2, 64, 320, 320, 4, ActQuant::kNone);
  exact.exact = true;
  EXPECT_STREQ(planned(exact).kernel, "wgmma_gemm_a16");
}

TEST(ImagePlans, HaveRoomForAScaleOfEachBlockOfAPixel) {
  for (ActQuant act_quant : {ActQuant::kToken, ActQuant::kBlock, ActQuant::kTensor}) {
    Plan const p = planned(convolution(2, 20, 320, 256, 8, act_quant));
    int64_t const blocks = act_quant == ActQuant::kBlock ? 3 : 1;
    EXPECT_EQ(p.layout.block, act_quant == ActQuant::kBlock ? 128 : -1);
    EXPECT_EQ(p.layout.stride, 800);
    EXPECT_EQ(p.layout.zeros - p.layout.scales, align_256(blocks * 800 * 4));
    EXPECT_EQ(p.layout.range != 0, act_quant == ActQuant::kTensor);
  }
}

}  // namespace
}  // namespace cutlass_ops
