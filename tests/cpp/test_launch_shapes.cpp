// How a product is launched: slices of K, grids, stages, and the parts of its scratch
// memory. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_ops/layout.h"
#include "dispatch/decode_shape.h"
#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

// The tail after full waves is split along K over the idle clusters, where that is faster.
TEST(Splits, SplitTheTailAfterFullWaves) {
  struct Case {
    int m, n, k, tail_tiles, slices;
  };
  for (Case const& c : {Case{256, 28672, 4096, 26, 2},  // 3 x 66 + 26 tiles, BLOCK_M = 128
                        Case{17, 4096, 4096, 0, 4},     // 16 tiles: all are split, and
                                                        // splitk_reduce adds
                        Case{64, 4096, 4096, 16, 4},    // or, more sums, the clusters
                        Case{4096, 28672, 4096, 0, 1},  // 40 x 66 + 48 tiles, BLOCK_M = 176: no two
                                                        // clusters for each
                        Case{4224, 11264, 4096, 0, 1}}) {  // 16 x 66 tiles, BLOCK_M = 176
    SCOPED_TRACE(std::to_string(c.m) + " x " + std::to_string(c.n) + " x " + std::to_string(c.k));
    GemmProblem p = already_quantized(problem(c.m, c.n, c.k), 128);
    Plan chosen;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.tail_tiles, c.tail_tiles);
    EXPECT_EQ(chosen.slices, c.slices);
    // For each slice but the first a tile's sums, and a flag for each warp.
    if (c.tail_tiles) {
      EXPECT_EQ(chosen.workspace,
                size_t(c.tail_tiles * (c.slices - 1) * (256 * chosen.block_m * 4 + 16 * 8)));
    }
    p.batch_invariant = true;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.tail_tiles, 0);
  }
  // With a 16-bit x and a long K, clusters take the last slices of several tiles
  // where tiles are few.
  for (auto const& [m, tail_tiles, slices] :
       {std::tuple(1024, 28, 3),   // BLOCK_M = 208: two slices each, and 10 clusters with the
                                   // last slices of three
        std::tuple(512, 0, 1)}) {  // 62 of 128, for four with sixteen: these would take too long
    Plan chosen;
    ASSERT_TRUE(plan(problem(m, 8192, 28672, 8), kHopper, &chosen).ok());
    EXPECT_EQ(chosen.tail_tiles, tail_tiles) << m;
    EXPECT_EQ(chosen.slices, slices) << m;
  }
  // The clusters add two slices of all tiles, 32 with BLOCK_M = 128.
  for (auto const& [bits, k] : {std::tuple(8, 28672), std::tuple(4, 28672), std::tuple(8, 8192)}) {
    Plan chosen;
    ASSERT_TRUE(plan(problem(128, 8192, k, bits), kHopper, &chosen).ok());
    EXPECT_EQ(chosen.slices, 2);
    EXPECT_EQ(chosen.tail_tiles, 32) << bits << ", " << k;
  }
}

// Decoding: as many blocks share K as take the least time, and a product that does not fit in
// shared memory goes to another kernel.
TEST(Dispatch, SharesKAmongTheBlocksOfAClusterWhileDecoding) {
  struct Case {
    int m, n, k, cluster;
  };
  for (Case const& c :
       {Case{1, 4096, 4096, 2}, Case{1, 28672, 4096, 2}, Case{1, 4096, 512, 1},
        Case{1, 1024, 4096, 8}, Case{6, 4096, 28672, 8}, Case{8, 8192, 1 << 20, 0}}) {
    GemmProblem p = problem(c.m, c.n, c.k);
    DecodeShape const shape = decode_shape(p, kHopper);
    EXPECT_EQ(shape.cluster, c.cluster) << c.m << " x " << c.n << " x " << c.k;
    Plan chosen;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    EXPECT_TRUE(chosen.spec->decodes);  // by wgmma_decode, where decode_gemm has no shape
    if (!c.cluster) continue;
    EXPECT_EQ(chosen.workspace, 0u);
    EXPECT_LE(shape.cluster * shape.clusters, kHopper.multiprocessors);
    EXPECT_GE(shape.row_panels * shape.clusters * kRowsPerPanel, c.n);
    EXPECT_GE(shape.slice * shape.cluster * kKPerTile, c.k);
    EXPECT_LE(decode_memory(p, shape).total, kHopper.shared_memory);
  }
  // A long slice of x is quantised while additional stages are in flight, where these fit and no
  // block of the next launch would.
  auto stages = [](int m, int n, int k, ActQuant act_quant) {
    GemmProblem p = problem(m, n, k);
    p.act_quant = act_quant;
    DecodeShape const shape = decode_shape(p, kHopper);
    EXPECT_LE(decode_memory(p, shape).total, kHopper.shared_memory);
    return shape.stages;
  };
  EXPECT_EQ(stages(1, 8192, 28672, ActQuant::kBlock), 5);
  EXPECT_EQ(stages(1, 8192, 28672, ActQuant::kNone), 3);
  EXPECT_EQ(stages(4, 8192, 28672, ActQuant::kBlock), 3);
  EXPECT_EQ(stages(1, 28672, 4096, ActQuant::kBlock), 3);
  EXPECT_EQ(stages(8, 28672, 4096, ActQuant::kBlock), 3);
}

// CTAs of the next launch find shared memory while decode_gemm runs, unless its launch is long.
TEST(Dispatch, LongLaunchesOfFewRowsRequestHalfTheSharedMemory) {
  auto const leaves_room = [&](char const* kernel, int n, int k, int bits, Device const& device) {
    KernelSpec const& spec = *find_kernel(kernel);
    GemmProblem const p = problem(1, n, k, bits);
    Plan shaped;
    bool room = false;  // for two CTAs of a candidate
    for (Candidate const& candidate : spec.candidates(p)) {
      if (p.m < candidate.min_m) continue;
      EXPECT_TRUE(plan_candidate(p, device, spec, candidate, &shaped));
      room = room || 2 * (shaped.shared_bytes + 1024) <= device.shared_memory;
    }
    return room;
  };
  Device slower = kHopper;
  slower.memory_bandwidth = 3352;
  for (char const* kernel : {"decode_gemm", "wgmma_decode"}) {
    EXPECT_TRUE(leaves_room(kernel, 4096, 4096, 4, kHopper));
    EXPECT_TRUE(leaves_room(kernel, 16384, 4096, 4, kHopper)) << kernel;
    EXPECT_TRUE(leaves_room(kernel, 22528, 4096, 4, kHopper)) << kernel;
    EXPECT_FALSE(leaves_room(kernel, 22528, 4096, 4, slower)) << kernel;
    EXPECT_FALSE(leaves_room(kernel, 28672, 4096, 4, kHopper));
    EXPECT_FALSE(leaves_room(kernel, 28672, 4096, 8, kHopper));
  }
}

// Another kernel decodes where it was measured to be faster: int8 activations and M > 8 with large
// weights.
TEST(Dispatch, DecodesFewRows) {
  auto const kernel = [](GemmProblem const& p) { return std::string(planned(p).kernel); };
  auto const decodes = [&](GemmProblem const& p) { return planned(p).spec->decodes; };
  for (int bits : {4, 8})
    for (int m : {1, 8, 16}) {
      EXPECT_TRUE(decodes(problem(m, 4096, 4096, bits)));
      for (ActQuant mode : {ActQuant::kBlock, ActQuant::kToken})
        for (bool symmetric : {true, false})
          EXPECT_TRUE(
              decodes(quantized_on_the_way(problem(m, 14336, 4096, bits), mode, symmetric)));
    }
  // up to 32 rows of floats where there are few features
  EXPECT_EQ(kernel(problem(17, 4096, 4096)), "wgmma_decode");
  EXPECT_EQ(kernel(problem(32, 4096, 14336, 8)), "wgmma_decode");
  EXPECT_EQ(kernel(problem(33, 4096, 4096)), "wgmma_gemm_a16");
  EXPECT_EQ(kernel(problem(17, 14336, 4096)), "wgmma_gemm_a16");
  EXPECT_EQ(kernel(quantized_on_the_way(problem(17, 4096, 4096), ActQuant::kBlock, true)),
            "wgmma_gemm_a8");
  // more row panels than sums in registers
  EXPECT_EQ(kernel(problem(16, 128256, 4096)), "mma_gemm_a16");
  EXPECT_EQ(kernel(quantized_on_the_way(problem(16, 8192, 28672), ActQuant::kToken, true)),
            "mma_gemm_a8");
  GemmProblem book = problem(8, 4096, 4096, 4, 64);
  look_up(book.weight);
  EXPECT_TRUE(decodes(book));
  book.m = 16;
  EXPECT_EQ(kernel(book), "wgmma_decode");
  book.weight.scale_type = DataType::kBFloat16;  // x is fp16
  EXPECT_EQ(kernel(book), "wgmma_decode_fold16");
  book.weight.scale_type = DataType::kFloat16, book.weight.group_size = 32;
  EXPECT_EQ(kernel(book), "wgmma_decode_fold16");
  book.m = 32;
  EXPECT_EQ(kernel(book), "wgmma_decode_fold16");
  book.weight.scale_type = DataType::kFloat32;
  EXPECT_EQ(kernel(book), "wgmma_fold16");
  book.weight.scale_type = DataType::kFloat16;
  book.m = 33;
  EXPECT_EQ(kernel(book), "wgmma_fold16");
  book.architecture = 80;
  EXPECT_EQ(kernel(book), "mma_gemm_a16");
  book.m = 5;
  EXPECT_EQ(kernel(book), "mma_gemm_a16");
  book.m = 4;
  EXPECT_EQ(kernel(book), "book_gemm_a16");
  EXPECT_EQ(planned(book).slices, 16);  // 8 tiles of 512 rows for 132 multiprocessors
}

// The size of the weight and its bits decide whether wgmma_decode_fold16 quantises x itself, and
// whether each CTA has its own SM.
TEST(Dispatch, UpcastsFewRowsOnlyWhereItMust) {
  // Rows that a tensor map cannot describe, and x that is quantised already, are upcast first.
  GemmProblem p = problem(16, 4096, 4096, 4, 32);
  EXPECT_FALSE(planned(p).layout.upcasts);
  p.x_stride = 4097;
  EXPECT_TRUE(planned(p).layout.upcasts);
  Plan const chosen = planned(already_quantized(problem(16, 4096, 4096, 4, 32), 32));
  EXPECT_TRUE(chosen.layout.upcasts);
  EXPECT_FALSE(chosen.quantizes);
}

// M = 9 to 16: only the ring has stages, and a stage always belongs to the same set of warpgroups.
TEST(Dispatch, CutsSmallBatchesIntoStagesThatFit) {
  struct Case {
    int n, k, bits, cluster, sets;
    bool book = false, quantizes = false;
  };
  for (Case const& c :
       {Case{4096, 4096, 4, 8, 1, false, true}, Case{28672, 4096, 4, 2, 1, false, true},
        Case{8192, 8192, 4, 4, 1, false, true}, Case{4096, 4096, 8, 2, 3, false, true},
        Case{8192, 8192, 8, 2, 3, false, true}, Case{192, 1032, 8, 8, 1, false, true},
        Case{4096, 4096, 4, 2, 3}, Case{6144, 4096, 4, 8, 1}, Case{1024, 4096, 4, 4, 3},
        Case{28672, 4096, 4, 2, 1}, Case{8192, 28672, 4, 2, 3}, Case{4096, 4096, 8, 2, 3},
        Case{8192, 8192, 8, 2, 3}, Case{64, 64, 4, 1, 1}, Case{128256, 4096, 4, 0, 1},
        Case{4096, 4096, 4, 2, 3, true}, Case{28672, 4096, 4, 2, 1, true},
        Case{8192, 28672, 4, 2, 3, true}}) {
    GemmProblem p = problem(16, c.n, c.k, c.bits);
    if (c.book)
      look_up(p.weight), p.weight.group_size = 64, p.weight.scale_type = DataType::kFloat32;
    if (c.quantizes) p.act_quant = ActQuant::kBlock;
    WgmmaDecodeShape const shape = wgmma_decode_shape(p, kHopper, c.quantizes, false, false, 0);
    EXPECT_EQ(shape.cluster, c.cluster) << c.n << " x " << c.k;
    if (!c.cluster) continue;
    EXPECT_EQ(shape.sets, c.sets) << c.n << " x " << c.k;
    int const tiles = (c.k + kKPerTile - 1) / kKPerTile;
    EXPECT_TRUE(shape.stages % shape.sets == 0 || shape.stages * shape.cluster >= tiles)
        << c.n << " x " << c.k;
    EXPECT_LE(shape.stages, WgmmaDecodeShape::kMostStages);
    EXPECT_LE(2 * (shape.shared_bytes + 2048), kHopper.shared_memory);
    EXPECT_LE(shape.cluster * shape.clusters, kHopper.multiprocessors);
  }
}

// With one CTA per SM, halves of row panels are distributed, so that shares are equal; each of the
// four warpgroups has its stages.
TEST(Dispatch, SplitsLargeWeightsIntoHalvesOfRowPanels) {
  struct Case {
    int n, k, cluster, clusters, row_panels, sets;
    bool quantizes = false, zeros = false;
  };
  for (Case const& c : {Case{28672, 4096, 1, 128, 4, 1}, Case{28672, 4096, 1, 128, 4, 1, true},
                        Case{28672, 4096, 1, 128, 4, 1, true, true}, Case{8192, 28672, 2, 64, 2, 4},
                        Case{14336, 4096, 2, 64, 4, 1}, Case{9056, 4096, 0, 0, 0, 1, false, true},
                        Case{128256, 4096, 0, 0, 0, 1}}) {
    GemmProblem p = problem(16, c.n, c.k, 8);
    p.act_quant = c.quantizes || c.zeros ? ActQuant::kBlock : ActQuant::kNone;
    p.act_symmetric = !c.zeros;
    WgmmaDecodeShape const shape = wgmma_decode_shape(p, kHopper, c.quantizes, true, false, 0);
    if (c.row_panels || c.n > 100000) {
      EXPECT_EQ(shape.cluster, c.cluster) << c.n << " x " << c.k;
    }
    if (!shape.cluster) continue;
    if (c.row_panels) {
      EXPECT_EQ(shape.clusters, c.clusters) << c.n << " x " << c.k;
      EXPECT_EQ(shape.most_row_panels, c.row_panels) << c.n << " x " << c.k;
      EXPECT_EQ(shape.sets, c.sets) << c.n << " x " << c.k;
    }
    EXPECT_GE(shape.stages, 4);
    EXPECT_LE(shape.shared_bytes + 1024, kHopper.shared_memory);
    // The halves of a cluster lie in no more row panels than it has room for.
    int const units = (c.n + kRowsPerPanel - 1) / kRowsPerPanel * 2, base = units / shape.clusters,
              rest = units % shape.clusters;
    for (int i = 0; i < shape.clusters; ++i) {
      int const first = base * i + std::min(i, rest), past = first + base + (i < rest);
      EXPECT_LE((past + 1) / 2 - first / 2, shape.most_row_panels) << c.n << " x " << c.k;
    }
  }
}

// A launch states its shared memory and threads: a few of each kernel, with the
// values of their files.
TEST(Launch, HasTheThreadsAndTheSharedMemoryOfTheKernel) {
  struct Case {
    GemmProblem problem;
    Device device;
    char const* kernel;
    int grid_x, grid_y, cluster, threads, shared_bytes, stages;
  };
  for (Case const& c :
       {Case{problem(1, 4096, 4096), kHopper, "decode_gemm", 132, 1, 2, 256, 106016, 3},
        Case{problem(16, 4096, 4096), kHopper, "wgmma_decode", 128, 1, 2, 416, 99840, 12},
        Case{problem(16, 28672, 4096, 8), kHopper, "wgmma_decode", 128, 1, 1, 544, 224256, 6},
        Case{problem(4096, 28672, 4096), kHopper, "wgmma_gemm_a16", 132, 1, 2, 384, 191744, 3},
        Case{problem(64, 28672, 4096), kHopper, "wgmma_gemm_a16", 112, 1, 2, 640, 204032, 5},
        Case{already_quantized(problem(4096, 28672, 4096), 128), kHopper, "wgmma_gemm_a8", 132, 1,
             2, 384, 179200, 4},
        Case{problem(4096, 28672, 4096, 4, 32), kHopper, "wgmma_fold16", 132, 1, 2, 384, 201984, 2},
        Case{problem(100, 4096, 4096), kDevices[0], "mma_gemm_a16", 64, 3, 1, 128, 75648, 3},
        Case{problem(100, 4096, 4096, 8), kDevices[0], "mma_gemm_a16", 64, 3, 1, 128, 66816, 2}}) {
    Plan const p = planned(c.problem, c.device);
    SCOPED_TRACE(c.kernel);
    EXPECT_STREQ(p.kernel, c.kernel);
    EXPECT_EQ(p.grid_x, c.grid_x);
    EXPECT_EQ(p.grid_y, c.grid_y);
    EXPECT_EQ(p.cluster_size, c.cluster);
    EXPECT_EQ(p.threads, c.threads);
    EXPECT_EQ(p.shared_bytes, c.shared_bytes);
    EXPECT_EQ(p.stages, c.stages);
  }
}

TEST(Splits, CutSmallGridsAndNotLargeOnes) {
  struct Case {
    int m, n, k, slices;
  };
  Device const a100 = kDevices[0];
  for (Case const& c : {Case{1, 128, 16384, 16},  // one tile for 432 places: as many as the
                                                  // limit of 16 allows
                        Case{1, 128, 2048, 2},    // 16 tiles of K, at least eight each
                        Case{1, 128, 128, 1},     // nothing to split
                        Case{1, 128, 1024, 1},    // eight tiles of K, and a part has no less
                        Case{1, 4096, 8192, 8},   // 32 tiles for 432 places, 13 parts each: eight
                                                  // have eight tiles of K
                        Case{4096, 28672, 4096, 1},  // thousands of tiles
                        Case{0, 128, 16384, 16}}) {  // no rows: any number will do,
                                                     // but it must be one
    Plan chosen;
    ASSERT_TRUE(plan(problem(c.m, c.n, c.k), a100, &chosen).ok());
    EXPECT_EQ(chosen.slices, c.slices) << c.m << " x " << c.n << " x " << c.k;
  }
}

// The same shapes give the same sums in the same order, whatever the pointers and the epilogue.
TEST(Splits, DependOnShapesAlone) {
  for (int m : {1, 33, 64, 300}) {
    GemmProblem plain = problem(m, 1000, 7392);
    plain.x_stride = 7392;
    Plan expected;
    ASSERT_TRUE(plan(plain, kHopper, &expected).ok());
    GemmProblem p = plain;
    p.bias = p.residual = &some_byte;
    p.x = reinterpret_cast<void const*>(uintptr_t(4096));
    p.out = &some_byte;
    p.bias_type = p.residual_type = p.out_type = DataType::kFloat32;
    p.x_type = p.weight.scale_type = DataType::kBFloat16;
    p.x_stride = 9000;
    p.residual_stride = 2000;
    p.activation = Activation::kSilu;
    p.saturate = true;
    p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
    p.weight.group_size = -1;
    Plan chosen;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.slices, expected.slices);
    EXPECT_EQ(chosen.block_m, expected.block_m);

    // Activations that the call quantises, and activations that are quantised already.
    Plan before, on_the_way;
    ASSERT_TRUE(plan(already_quantized(plain, 128), kHopper, &before).ok());
    ASSERT_TRUE(
        plan(quantized_on_the_way(plain, ActQuant::kBlock, true), kHopper, &on_the_way).ok());
    EXPECT_EQ(before.slices, on_the_way.slices);
  }
}

TEST(Splits, BatchInvariantProductsHaveTheSlicesOf128Rows) {
  for (Device const& device : kDevices)
    for (int bits : {4, 8})
      for (auto [n, k] : {std::pair(4096, 4096), std::pair(28672, 4096), std::pair(192, 576)}) {
        GemmProblem p = problem(kInvariantM, n, k, bits);
        p.batch_invariant = true;
        Plan expected;
        ASSERT_TRUE(plan(p, device, &expected).ok());
        for (int m : {0, 1, 16, 17, 64, 129, 1000, 100000}) {
          p.m = m;
          Plan chosen;
          ASSERT_TRUE(plan(p, device, &chosen).ok());
          bool const few = m <= (n <= 4096 ? 32 : 16);
          char const* const few_rows = few ? find_kernel(expected.kernel)->few_rows : nullptr;
          EXPECT_STREQ(chosen.kernel, few_rows ? few_rows : expected.kernel) << m;
          EXPECT_EQ(few_rows ? chosen.cluster_size : chosen.slices, expected.slices) << m;
          EXPECT_EQ(chosen.wgmma_decode.sets, 1) << m;
        }
      }
}

struct Part {
  size_t begin, bytes;
};

TEST(Workspace, HasAlignedPartsThatDoNotOverlap) {
  for (int m : {1, 3, 16, 17, 129, 512, 513, 4097})
    for (int k : {1, 7, 576, 10944})
      for (int group_size : {-1, 16, 32, 64, 128, 512})
        for (ActQuant act_quant : {ActQuant::kNone, ActQuant::kToken, ActQuant::kBlock})
          for (bool symmetric : {true, false})
            for (auto const& [slices, upcasts] : std::vector<std::pair<int, bool>>{
                     {1, false}, {2, false}, {7, false}, {1, true}, {7, true}}) {
              int const n = 200;
              GemmProblem const p =
                  quantized_on_the_way(problem(m, n, k, 4, group_size), act_quant, symmetric);
              Plan const plan = laid_out(p, slices, upcasts);
              WorkspaceLayout const& layout = plan.layout;
              std::vector<Part> parts;
              if (act_quant != ActQuant::kNone) {
                int const block = group_size == -1 || group_size > 128 ? 128 : group_size;
                EXPECT_EQ(layout.block, act_quant == ActQuant::kToken ? -1 : block);
                EXPECT_EQ(layout.stride, (m + 15) / 16 * 16);
                // whole tiles of few rows may be read
                EXPECT_EQ(layout.rows, m > 512 ? m : (m + 47) / 48 * 48);
                size_t const blocks =
                    act_quant == ActQuant::kToken ? 1 : size_t(padded_k(k) / block);
                if (!upcasts)
                  parts.push_back({layout.codes, size_t(layout.rows) * size_t(padded_k(k))});
                parts.push_back({layout.scales, blocks * size_t(layout.stride) * 4});
                if (!symmetric) parts.push_back({layout.zeros, blocks * size_t(layout.stride)});
              } else {
                EXPECT_EQ(layout.block, 0);
              }
              // Floats whose rows no tensor map describes are copied to rows that one does.
              EXPECT_EQ(layout.upcasts, upcasts && (act_quant != ActQuant::kNone ||
                                                    p.x_stride % 8 != 0 || p.x_stride < k));
              if (layout.upcasts)
                parts.push_back({layout.upcast, size_t(m) * size_t(padded_k(k)) * 2});
              // n is padded to 256
              if (slices > 1)
                parts.push_back({layout.splitk_workspace, size_t(slices) * m * 256 * 4});
              std::sort(parts.begin(), parts.end(),
                        [](Part a, Part b) { return a.begin < b.begin; });
              size_t end = 0;
              for (Part const& part : parts) {
                EXPECT_EQ(part.begin % 256, 0u);
                EXPECT_GE(part.begin, end);
                end = part.begin + part.bytes;
              }
              EXPECT_GE(plan.workspace, end);
              EXPECT_LT(plan.workspace, end + 256);
              if (testing::Test::HasFailure()) return;
            }
}

TEST(Workspace, IsOnlySplitKSlicesForActivationsThatAreQuantizedAlready) {
  GemmProblem const p =
      quantized_on_the_way(already_quantized(problem(5, 200, 576), 128), ActQuant::kBlock, true);
  EXPECT_EQ(laid_out(p, 1).workspace, 0u);
  EXPECT_EQ(laid_out(p, 3).workspace, 3u * 5 * 256 * 4);
}

TEST(Workspace, IsCountedIn64Bits) {
  GemmProblem const p = quantized_on_the_way(problem(kMaxM, 28672, 65536), ActQuant::kBlock, true);
  EXPECT_GE(laid_out(p, 1).workspace, size_t(kMaxM) * 65536);
  EXPECT_GE(laid_out(p, 16).workspace, size_t(kMaxM) * 28672 * 16 * 4);
}

}  // namespace
}  // namespace cutlass_ops
