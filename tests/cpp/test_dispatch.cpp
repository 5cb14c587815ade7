// Which kernel a problem gets, in how many slices of K, how it is launched, and where its scratch memory lies. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_ops/conv.h"
#include "cutlass_ops/experts.h"
#include "cutlass_ops/layout.h"
#include "cutlass_ops/zero_compensation.h"
#include "dispatch/decode_shape.h"
#include "dispatch/grouped.h"
#include "dispatch/problem.h"
#include "dispatch/spec.h"
#include "kernels/conv_int8.h"

namespace cutlass_ops {
namespace {

alignas(256) uint8_t some_bytes[32];  // what non-null pointers point to; nothing here reads it
uint8_t& some_byte = some_bytes[0];
alignas(16) float some_book[16];

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": A100, RTX 3090, RTX 4090, H100, B200, RTX
// 5090.
Device const kDevices[] = {{80, 108, 166912}, {86, 82, 101376},   {89, 128, 101376},
                           {90, 132, 232448}, {100, 148, 232448}, {120, 170, 101376}};
Device const kHopper = kDevices[3];

GemmProblem problem(int m, int n, int k, int bits = 4, int group_size = 128) {
  GemmProblem p;
  p.m = m;
  p.weight.n = n;
  p.weight.k = k;
  p.weight.bits = bits;
  p.weight.group_size = group_size;
  p.weight.codes = &some_byte, p.weight.scales = &some_byte;
  p.x = &some_byte, p.x_stride = k;
  return p;
}

GemmProblem quantized_on_the_way(GemmProblem p, ActQuant act_quant, bool symmetric) {
  p.act_quant = act_quant;
  p.act_symmetric = symmetric;
  return p;
}

GemmProblem already_quantized(GemmProblem p, int block) {
  p.quantized.codes = reinterpret_cast<int8_t*>(&some_byte), p.quantized.scales = some_book;
  p.quantized.block = block;
  p.quantized.stride = (p.m + 15) / 16 * 16;
  return p;
}

// The plan of a problem that has one.
Plan planned(GemmProblem const& p, Device const& device = kHopper) {
  Plan chosen;
  Status const status = plan(p, device, &chosen);
  EXPECT_TRUE(status.ok()) << status.text;
  return chosen;
}

// Of a kernel with BLOCK_N = 48 whose split-K slices are added by splitk_reduce.
Plan laid_out(GemmProblem const& p, int slices, bool upcasts = false, bool compensates = false) {
  Plan chosen;
  chosen.slices = slices;
  chosen.block_m = 48;
  chosen.compensates = compensates;
  lay_out_workspace(p, upcasts, &chosen);
  return chosen;
}

struct Named {
  std::string name;
  GemmProblem problem;
  bool int8;
};

// Every kind of activation that is supported with a weight.
std::vector<Named> inputs(GemmProblem const& p) {
  std::vector<Named> all;
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32}) {
    GemmProblem typed = p;
    typed.x_type = type;
    std::string name = "x_type " + std::to_string(int(type));
    if (type != DataType::kFloat32) all.push_back({name, typed, false});
    for (bool symmetric : {true, false}) {
      all.push_back({name + " token", quantized_on_the_way(typed, ActQuant::kToken, symmetric), true});
      all.push_back({name + " block", quantized_on_the_way(typed, ActQuant::kBlock, symmetric), true});
      if (symmetric) continue;
      all.push_back(all.back());
      all.back().name += ", sums of codes", all.back().problem.weight.sums = &some_byte;
    }
  }
  if (p.weight.bits == 4) {
    GemmProblem book = p;
    book.x_type = DataType::kFloat16;
    book.weight.book = some_book;
    all.push_back({"code book", book, false});
  } else {
    GemmProblem zeros = quantized_on_the_way(p, ActQuant::kBlock, true);
    zeros.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
    all.push_back({"zero points of 8 bits", zeros, true});
  }
  all.push_back({"codes, token", already_quantized(p, -1), true});
  all.push_back({"codes, block", already_quantized(p, activation_block(p.weight.group_size)), true});
  return all;
}

// The names of a plan's launches by value: equal literals may have several addresses.
std::vector<std::string> names(Plan const& plan) {
  std::vector<char const*> const order = launches(plan);
  return {order.begin(), order.end()};
}

TEST(Dispatch, PlansACompleteLaunchOfEverySupportedProblem) {
  // Kernel, tile, and what tells its candidates apart.
  std::set<std::tuple<std::string, int, int, bool, bool>> used, offered;
  for (Device const& device : kDevices)
    for (int bits : {4, 8})
      for (int group_size : {-1, 32, 64, 128, 256, 384, 1024})
        for (int m : {0, 1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 96, 128, 129, 160, 170, 192, 256, 4097, kMaxM})
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
              SCOPED_TRACE("sm_" + std::to_string(device.architecture) + ", bits " + std::to_string(bits) + ", group " +
                           std::to_string(group_size) + ", m " + std::to_string(m) + ", " + input.name);
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
              // Persistent CTAs, and those that share K while decoding, all run at a time.
              if (device.architecture == 90 && std::string(p.kernel).substr(0, 4) != "mma_" && !input.problem.weight.book) {
                EXPECT_LE(p.grid_x, device.multiprocessors);
              }
              // Something quantises what is multiplied as int8, or the kernel does.
              bool const floats = input.int8 && !input.problem.quantized.codes;
              EXPECT_EQ(p.quantizes || p.layout.block != 0, floats);
              std::vector<std::string> const order = names(p);
              EXPECT_EQ(std::count(order.begin(), order.end(), p.kernel), 1);
              EXPECT_EQ(std::count(order.begin(), order.end(), "weight_colsum"), p.layout.sums);
              EXPECT_EQ(order.front() == "quantize_activations", p.layout.block != 0);
              EXPECT_EQ(p.layout.sums, p.compensates && !input.problem.weight.sums);
              EXPECT_EQ(order.back() == "splitk_reduce", p.slices > 1 && p.tail_tiles == 0);
              used.emplace(p.kernel, p.block_n, p.block_m, p.compensates, p.one_cta_per_sm);
              for (Candidate const& c : p.spec->candidates(input.problem))
                if (!c.applies || c.applies(input.problem))
                  offered.emplace(p.kernel, c.tile.block_n, c.tile.block_m, c.compensates,
                                  p.spec->decodes && c.tile.min_ctas_per_sm == 1);
              if (testing::Test::HasFailure()) return;
            }
  for (KernelSpec const& spec : kernel_specs())
    EXPECT_TRUE(std::any_of(used.begin(), used.end(), [&](auto const& u) { return std::get<0>(u) == spec.name; })) << spec.name;
  for (auto const& candidate : offered)
    EXPECT_TRUE(used.count(candidate)) << std::get<0>(candidate) << ", " << std::get<1>(candidate) << " x "
                                       << std::get<2>(candidate) << ": no problem selects it";
}

// Up to sm_89 there are the portable kernels alone; their tiles follow M.
TEST(Dispatch, GivesTheTileThatFitsTheTokens) {
  for (Device const& device : {kDevices[0], kDevices[1], kDevices[2]})
    for (int bits : {4, 8})
      for (bool int8 : {false, true})
        for (auto const& [m, block_m] :
             std::vector<std::pair<int, int>>{{1, 16}, {16, 16}, {17, 32}, {33, 64}, {64, 64}, {65, 64}}) {
          GemmProblem p = problem(m, 192, 576, bits);
          if (int8) p.act_quant = ActQuant::kBlock;
          Plan chosen;
          ASSERT_TRUE(plan(p, device, &chosen).ok());
          EXPECT_STREQ(chosen.kernel, int8 ? "mma_gemm_a8" : "mma_gemm_a16");
          EXPECT_EQ(chosen.block_m, block_m);
        }
}

// Where int32 sums run over all of K the tiles have separate costs, and BLOCK_M = 256 is available.
TEST(Dispatch, GivesLargeTilesToSumsOverAllOfK) {
  auto const block_m = [](int m, int n, int k, int bits, bool symmetric = true, int group_size = -1) {
    Plan const chosen = planned(quantized_on_the_way(problem(m, n, k, bits, group_size), ActQuant::kToken, symmetric));
    return std::string(chosen.kernel) == "wgmma_gemm_a8" ? chosen.block_m : 0;
  };
  for (int bits : {4, 8})
    for (bool symmetric : {true, false}) {
      // One wave over 66 clusters; waves and a cut rest; fewer tiles than clusters.
      for (auto const& [m, n, k] : {std::tuple(200, 16832, 392), std::tuple(256, 16832, 392), std::tuple(1000, 17000, 4104),
                                    std::tuple(200, 4060, 28680), std::tuple(4096, 4096, 4096)})
        EXPECT_EQ(block_m(m, n, k, bits, symmetric), 256) << m << " x " << n << " x " << k;
      EXPECT_EQ(block_m(1280, 4096, 4096, bits, symmetric), 176);  // two waves, three of 256
      EXPECT_EQ(block_m(512, 4096, 4096, bits, symmetric), 128);
      // Few rows of x in the last tile.
      EXPECT_NE(block_m(4096 + 63, 28672, 4096, bits, symmetric), 256);
      EXPECT_EQ(block_m(4096 + 64, 28672, 4096, bits, symmetric), 256);
      // Longer rows could overflow, and groups have scales.
      int const longest = symmetric ? 131071 : 65535;
      EXPECT_EQ(block_m(1024, 4096, longest, bits, symmetric), 256);
      EXPECT_NE(block_m(1024, 4096, longest + 1, bits, symmetric), 256);
      EXPECT_NE(block_m(1024, 4096, 4096, bits, symmetric, 128), 256);
    }
  // A batch-invariant product has the same kernel and number of split-K slices for every m, whichever tile is chosen.
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

// The tail after full waves is split along K over the idle clusters, where that is faster.
TEST(Splits, SplitTheTailAfterFullWaves) {
  struct Case {
    int m, n, k, tail_tiles, slices;
  };
  for (Case const& c : {Case{256, 28672, 4096, 26, 2},     // 3 x 66 + 26 tiles, BLOCK_M = 128
                        Case{64, 4096, 4096, 0, 4},        // 16 tiles: all are split, and splitk_reduce adds
                        Case{4096, 28672, 4096, 0, 1},     // 40 x 66 + 48 tiles, BLOCK_M = 176: no two clusters for each
                        Case{4224, 11264, 4096, 0, 1}}) {  // 16 x 66 tiles, BLOCK_M = 176
    SCOPED_TRACE(std::to_string(c.m) + " x " + std::to_string(c.n) + " x " + std::to_string(c.k));
    GemmProblem p = already_quantized(problem(c.m, c.n, c.k), 128);
    Plan chosen;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.tail_tiles, c.tail_tiles);
    EXPECT_EQ(chosen.slices, c.slices);
    // For each part but the first a tile's sums, and a mark of each warp's.
    if (c.tail_tiles) {
      EXPECT_EQ(chosen.workspace, size_t(c.tail_tiles * (c.slices - 1) * (256 * chosen.block_m * 4 + 16 * 8)));
    }
    p.batch_invariant = true;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.tail_tiles, 0);
  }
  // Beside floats and a long K clusters take the last parts of several tiles where there are too few of them.
  for (auto const& [m, tail_tiles, slices] :
       {std::tuple(1024, 28, 3),   // BLOCK_M = 208: two slices each, and 10 clusters with the last slices of three
        std::tuple(512, 0, 1)}) {  // 62 of 128, for four with sixteen: these would take too long
    Plan chosen;
    ASSERT_TRUE(plan(problem(m, 8192, 28672, 8), kHopper, &chosen).ok());
    EXPECT_EQ(chosen.tail_tiles, tail_tiles) << m;
    EXPECT_EQ(chosen.slices, slices) << m;
  }
  // All tiles where they fill no wave, K is long and x has 16 bits and the weight 8: 32 with BLOCK_M = 128.
  for (auto const& [bits, k, tail_tiles] : {std::tuple(8, 28672, 32), std::tuple(4, 28672, 0), std::tuple(8, 8192, 0)}) {
    Plan chosen;
    ASSERT_TRUE(plan(problem(128, 8192, k, bits), kHopper, &chosen).ok());
    EXPECT_EQ(chosen.slices, 2);
    EXPECT_EQ(chosen.tail_tiles, tail_tiles) << bits << ", " << k;
  }
}

// Weights, and values of int8 activations, are rounded to 16 bits only where no kernel of exact products is as fast, the result
// has the type of x, and exact=True is not set.
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
      for (int group_size : {32, 64, 128, -1})
        for (bool offsets : {false, true}) {
          GemmProblem p = problem(m, 8192, 4096, bits, group_size);
          if (offsets) p.weight.offsets = &some_byte, p.weight.offset_type = DataType::kFloat32;
          bool const has_exact_kernel = !offsets && group_size != 32 && group_size != 64;
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
  p.weight.book = some_book;
  rounds(p, "mma_gemm_a16");
  p = already_quantized(problem(100, 8192, 4096, 8), -1);
  p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
  rounds(p, "mma_gemm_a8");
}

// Zero points of activations are corrected for many blocks at once where the result is rounded to 16 bits, whether the weight
// has its column sums or not: they are made if not, and nothing else differs.
TEST(Dispatch, CorrectsZeroPointsWhereItMay) {
  auto const compensates = [](GemmProblem const& p) {
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_TRUE(status.ok()) << status.text;
    EXPECT_EQ(chosen.layout.compensates, chosen.compensates);
    return chosen.compensates;
  };
  for (int bits : {4, 8})
    for (int group_size : {-1, 128, 512}) {
      GemmProblem base = quantized_on_the_way(problem(1024, 28672, 4096, bits, group_size), ActQuant::kBlock, false);
      EXPECT_TRUE(compensates(base));
      GemmProblem summed = base;
      summed.weight.sums = &some_byte;
      EXPECT_TRUE(compensates(summed));
      for (ActQuant mode : {ActQuant::kBlock, ActQuant::kToken}) {
        base.act_quant = summed.act_quant = mode;
        Plan const makes = planned(base), reads = planned(summed);
        EXPECT_EQ(makes.layout.sums, makes.compensates);
        EXPECT_FALSE(reads.layout.sums);
        EXPECT_EQ(std::make_tuple(makes.spec, makes.block_m, makes.block_n, makes.grid_x, makes.slices, makes.tail_tiles,
                                  makes.compensates),
                  std::make_tuple(reads.spec, reads.block_m, reads.block_n, reads.grid_x, reads.slices, reads.tail_tiles,
                                  reads.compensates));
        size_t const bytes = makes.compensates ? size_t(colsum_bytes(base.weight) + 255) / 256 * 256 : 0;
        EXPECT_EQ(makes.workspace, reads.workspace + bytes);
        std::vector<std::string> expected = names(reads);
        if (makes.compensates) expected.insert(std::find(expected.begin(), expected.end(), makes.kernel), "weight_colsum");
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
            Change{"offsets", [](GemmProblem& p) { p.weight.offsets = &some_byte, p.weight.offset_type = DataType::kFloat16; },
                   false}}) {
        GemmProblem changed = base;
        change.make(changed);
        EXPECT_EQ(compensates(changed), change.compensated) << bits << " bits, groups of " << group_size << ": " << change.name;
      }
      // One zero point a token is corrected without zero values, and from int32 sums over all of K taken exactly.
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

// Zero points of weights are compensated in the same way, where x is symmetric and has a scale a block, by terms that are of no
// other use. Otherwise those of 4 bits are taken from the codes, and those of 8 are wgmma_fold16's or a portable kernel's.
TEST(Dispatch, CompensatesZeroPointsOfWeights) {
  for (int group_size : {-1, 128, 512}) {
    GemmProblem base = quantized_on_the_way(problem(1024, 28672, 4096, 8, group_size), ActQuant::kBlock, true);
    base.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte), base.weight.sums = &some_byte;
    Plan const chosen = planned(base);
    EXPECT_STREQ(chosen.kernel, "wgmma_gemm_a8");
    EXPECT_TRUE(chosen.compensates && chosen.layout.compensates && chosen.layout.sums && !chosen.rounds);
    struct Change {
      void (*make)(GemmProblem&);
      char const* kernel;
    };
    for (Change const& change : {Change{[](GemmProblem& p) { p.m = 64; }, "wgmma_fold16"},
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
      // Of 4 bits by the same kernel, which compensates zero points of x alone.
      changed.weight.bits = 4;
      Plan const int4 = planned(changed);
      EXPECT_STREQ(int4.kernel, "wgmma_gemm_a8");
      EXPECT_EQ(int4.compensates, !changed.act_symmetric);
      EXPECT_FALSE(int4.layout.sums);
    }
    base.weight.bits = 4;
    EXPECT_TRUE(planned(base).layout.sums);
  }
}

// Decoding: K is shared by as many blocks as make the least time, and what fits in no shared memory goes to another kernel.
TEST(Dispatch, SharesKAmongTheBlocksOfAClusterWhileDecoding) {
  struct Case {
    int m, n, k, cluster;
  };
  for (Case const& c : {Case{1, 4096, 4096, 2}, Case{1, 28672, 4096, 2}, Case{1, 4096, 512, 1}, Case{1, 1024, 4096, 8},
                        Case{6, 4096, 28672, 8}, Case{8, 8192, 1 << 20, 0}}) {
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
  // A long slice of x is quantised while more stages are on their way, where they fit and no block of the next launch would.
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

// Where it was measured to lose, another kernel decodes: int8 activations and M > 8 with large weights.
TEST(Dispatch, DecodesUpTo16Rows) {
  auto const kernel = [](GemmProblem const& p) { return std::string(planned(p).kernel); };
  auto const decodes = [&](GemmProblem const& p) { return planned(p).spec->decodes; };
  for (int bits : {4, 8})
    for (int m : {1, 8, 16}) {
      EXPECT_TRUE(decodes(problem(m, 4096, 4096, bits)));
      for (ActQuant mode : {ActQuant::kBlock, ActQuant::kToken})
        for (bool symmetric : {true, false})
          EXPECT_TRUE(decodes(quantized_on_the_way(problem(m, 14336, 4096, bits), mode, symmetric)));
    }
  EXPECT_EQ(kernel(problem(17, 4096, 4096)), "wgmma_gemm_a16");
  EXPECT_EQ(kernel(quantized_on_the_way(problem(17, 4096, 4096), ActQuant::kBlock, true)), "wgmma_gemm_a8");
  EXPECT_EQ(kernel(problem(16, 128256, 4096)), "mma_gemm_a16");  // more row panels than sums in registers
  EXPECT_EQ(kernel(quantized_on_the_way(problem(16, 8192, 28672), ActQuant::kToken, true)), "mma_gemm_a8");
  GemmProblem book = problem(8, 4096, 4096, 4, 64);
  book.weight.book = some_book;
  EXPECT_TRUE(decodes(book));
  book.m = 16;
  EXPECT_EQ(kernel(book), "wgmma_decode");
  book.weight.scale_type = DataType::kBFloat16;  // x is fp16
  EXPECT_EQ(kernel(book), "wgmma_decode_fold16");
  book.weight.scale_type = DataType::kFloat16, book.weight.group_size = 32;
  EXPECT_EQ(kernel(book), "wgmma_decode_fold16");
  book.m = 17;
  EXPECT_EQ(kernel(book), "wgmma_fold16");
  book.architecture = 80;
  EXPECT_EQ(kernel(book), "mma_gemm_a16");
  book.m = 9;
  EXPECT_EQ(kernel(book), "mma_gemm_a16");
  book.m = 8;
  EXPECT_EQ(kernel(book), "book_gemm_a16");
  EXPECT_EQ(planned(book).slices, 16);  // 8 tiles of 512 rows for 132 multiprocessors
}

// Whether wgmma_decode_fold16 quantises x itself, and whether it has an SM for each CTA: by the size of the weight and its
// bits.
TEST(Dispatch, UpcastsFewRowsOnlyWhereItMust) {
  // Rows that a tensor map does not describe, and codes that are there, are upcast before.
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
       {Case{4096, 4096, 4, 8, 1, false, true}, Case{28672, 4096, 4, 2, 1, false, true}, Case{8192, 8192, 4, 4, 1, false, true},
        Case{4096, 4096, 8, 2, 3, false, true}, Case{8192, 8192, 8, 2, 3, false, true}, Case{192, 1032, 8, 8, 1, false, true},
        Case{4096, 4096, 4, 2, 3}, Case{6144, 4096, 4, 8, 1}, Case{1024, 4096, 4, 4, 3}, Case{28672, 4096, 4, 2, 1},
        Case{8192, 28672, 4, 2, 3}, Case{4096, 4096, 8, 2, 3}, Case{8192, 8192, 8, 2, 3}, Case{64, 64, 4, 1, 1},
        Case{128256, 4096, 4, 0, 1}, Case{4096, 4096, 4, 2, 3, true}, Case{28672, 4096, 4, 2, 1, true},
        Case{8192, 28672, 4, 2, 3, true}}) {
    GemmProblem p = problem(16, c.n, c.k, c.bits);
    if (c.book) p.weight.book = some_book, p.weight.group_size = 64, p.weight.scale_type = DataType::kFloat32;
    if (c.quantizes) p.act_quant = ActQuant::kBlock;
    WgmmaDecodeShape const shape = wgmma_decode_shape(p, kHopper, c.quantizes, false, false);
    EXPECT_EQ(shape.cluster, c.cluster) << c.n << " x " << c.k;
    if (!c.cluster) continue;
    EXPECT_EQ(shape.sets, c.sets) << c.n << " x " << c.k;
    int const tiles = (c.k + kKPerTile - 1) / kKPerTile;
    EXPECT_TRUE(shape.stages % shape.sets == 0 || shape.stages * shape.cluster >= tiles) << c.n << " x " << c.k;
    EXPECT_LE(shape.stages, WgmmaDecodeShape::kMostStages);
    EXPECT_LE(2 * (shape.shared_bytes + 2048), kHopper.shared_memory);
    EXPECT_LE(shape.cluster * shape.clusters, kHopper.multiprocessors);
  }
}

// With one CTA per SM, halves of row panels are distributed, so that shares are equal; each of the four warpgroups has its
// stages.
TEST(Dispatch, SplitsLargeWeightsIntoHalvesOfRowPanels) {
  struct Case {
    int n, k, cluster, clusters, row_panels, sets;
    bool quantizes = false, zeros = false;
  };
  for (Case const& c :
       {Case{28672, 4096, 1, 128, 4, 1}, Case{28672, 4096, 1, 128, 4, 1, true}, Case{28672, 4096, 1, 128, 4, 1, true, true},
        Case{8192, 28672, 2, 64, 2, 4}, Case{14336, 4096, 2, 64, 4, 1}, Case{9056, 4096, 0, 0, 0, 1, false, true},
        Case{128256, 4096, 0, 0, 0, 1}}) {
    GemmProblem p = problem(16, c.n, c.k, 8);
    p.act_quant = c.quantizes || c.zeros ? ActQuant::kBlock : ActQuant::kNone;
    p.act_symmetric = !c.zeros;
    WgmmaDecodeShape const shape = wgmma_decode_shape(p, kHopper, c.quantizes, true, false);
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
    // No cluster's halves touch more row panels than it has room for.
    int const units = (c.n + kRowsPerPanel - 1) / kRowsPerPanel * 2, base = units / shape.clusters,
              rest = units % shape.clusters;
    for (int i = 0; i < shape.clusters; ++i) {
      int const first = base * i + std::min(i, rest), past = first + base + (i < rest);
      EXPECT_LE((past + 1) / 2 - first / 2, shape.most_row_panels) << c.n << " x " << c.k;
    }
  }
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
  p.weight.bits = 8;
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
  EXPECT_EQ(kernel(quantized_on_the_way(problem(512, 4096, 4096), ActQuant::kToken, false)), "wgmma_gemm_a8");
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
  EXPECT_EQ(kernel(p), "wgmma_decode_fold16");
  p.x_type = DataType::kBFloat16;
  EXPECT_EQ(kernel(p), "wgmma_decode");
  p = few;
  p.x_stride = 4097;
  EXPECT_EQ(kernel(p), "mma_gemm_a16");
}

TEST(Dispatch, RefusesArgumentsThatWouldBeMisread) {
  auto text = [](GemmProblem const& p) {
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_EQ(status.code, Status::kInvalid);
    return status.text;
  };
  GemmProblem p = problem(5, 192, 576);
  p.bias = &some_byte;
  p.bias_type = DataType::kInt8;
  EXPECT_NE(text(p).find("bias_type"), std::string::npos);
  p = problem(5, 192, 576);
  p.residual = &some_byte;
  EXPECT_NE(text(p).find("residual_type"), std::string::npos);
  for (int stride : {0, 8, 24}) {
    p = already_quantized(problem(17, 192, 576), 128);
    p.quantized.stride = stride;
    EXPECT_NE(text(p).find("stride is " + std::to_string(stride)), std::string::npos);
  }
  auto* const codes = reinterpret_cast<int8_t*>(&some_byte);
  QuantizeProblem const fits{codes, DataType::kFloat16, 576, 17, 576, nullptr, {codes, some_book, nullptr, 128, 32}};
  EXPECT_TRUE(check_quantize(fits).ok());
  QuantizeProblem q = fits;
  q.out.block = 16;
  EXPECT_NE(check_quantize(q).text.find("block is 16"), std::string::npos);
  q = fits;
  q.out.stride = 16;
  EXPECT_NE(check_quantize(q).text.find("stride is 16"), std::string::npos);
  q = fits;
  q.x_type = DataType::kInt8;
  EXPECT_EQ(check_quantize(q).code, Status::kUnsupported);
  EXPECT_EQ(check_dequantize({problem(1, 192, 576).weight, codes, DataType::kInt8}).code, Status::kUnsupported);
  EXPECT_EQ(check_dequantize({problem(1, 192, 576, 3).weight, codes, DataType::kFloat16}).code, Status::kUnsupported);
}

TEST(Dispatch, TakesEveryOptionOfTheEpilogueAndEveryType) {
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32}) {
    GemmProblem p = problem(5, 192, 576);
    p.out_type = p.bias_type = p.residual_type = p.weight.scale_type = p.weight.offset_type = type;
    p.bias = p.residual = p.weight.offsets = &some_byte, p.residual_stride = 192;
    for (Activation activation :
         {Activation::kNone, Activation::kRelu, Activation::kRelu6, Activation::kGelu, Activation::kSilu, Activation::kClamp}) {
      p.activation = activation;
      EXPECT_TRUE(planned(p).spec);
    }
  }
}

TEST(Dispatch, SaysWhichFieldIsUnsupportedAndWhatIsSupported) {
  struct Case {
    std::function<void(GemmProblem&)> change;
    Status::Code code;
    std::vector<std::string> words;
  };
  int8_t const* zeros = reinterpret_cast<int8_t const*>(&some_byte);
  std::vector<Case> const cases = {
      {[](auto& p) { p.weight.bits = 3; }, Status::kUnsupported, {"bits", "3", "4 and 8"}},
      {[](auto& p) { p.weight.bits = 16; }, Status::kUnsupported, {"bits", "16", "4 and 8"}},
      {[](auto& p) { p.weight.n = 0; }, Status::kInvalid, {"shape", "[0, 576]", "at least 1"}},
      {[](auto& p) { p.weight.k = -5; }, Status::kInvalid, {"shape", "[192, -5]", "at least 1"}},
      {[](auto& p) { p.m = -1; }, Status::kInvalid, {"m is -1", std::to_string(kMaxM)}},
      {[](auto& p) { p.m = kMaxM + 1; }, Status::kInvalid, {"m is 16777217", std::to_string(kMaxM)}},
      {[](auto& p) { p.weight.group_size = 0; }, Status::kUnsupported, {"group_size", "0", "32, 64", "128", "-1"}},
      {[](auto& p) { p.weight.group_size = 16; }, Status::kUnsupported, {"group_size", "16", "32, 64"}},
      {[](auto& p) { p.weight.group_size = 96; }, Status::kUnsupported, {"group_size", "96", "32, 64"}},
      {[](auto& p) { p.weight.group_size = -2; }, Status::kUnsupported, {"group_size", "-2", "32, 64"}},
      {[](auto& p) { p.weight.group_size = -128; }, Status::kUnsupported, {"group_size", "-128", "32, 64"}},
      {[](auto& p) { p.weight.scale_type = DataType::kNone; }, Status::kInvalid, {"scale_type", "float"}},
      {[](auto& p) { p.weight.scale_type = DataType::kInt8; }, Status::kInvalid, {"scale_type", "float"}},
      {[](auto& p) { p.weight.offsets = &some_byte; }, Status::kInvalid, {"offset_type", "float"}},
      {[zeros](auto& p) {
         p.weight.zeros = zeros;
         p.weight.offsets = &some_byte;
         p.weight.offset_type = DataType::kFloat16;
       },
       Status::kInvalid,
       {"zeros and offsets", "at most one"}},
      {[](auto& p) { p = already_quantized(p, 64); }, Status::kUnsupported, {"block is 64", "groups of 128", "128 or -1"}},
      {[](auto& p) {
         p.weight.group_size = 32;
         p = already_quantized(p, 128);
       },
       Status::kUnsupported,
       {"block is 128", "groups of 32", "32 or -1"}},
      {[](auto& p) { p.x_type = DataType::kNone; }, Status::kUnsupported, {"x has a type", "fp16, bf16 or fp32"}},
      {[](auto& p) { p.x_type = DataType::kInt8; }, Status::kUnsupported, {"x has a type", "fp16, bf16 or fp32"}},
      {[](auto& p) { p.x_type = DataType::kFloat32; },
       Status::kUnsupported,
       {"x is float32", "act_quant=\"none\"", "float16 or bfloat16", "\"token\" or \"block\""}},
      {[](auto& p) {
         p.weight.book = some_book;
         p.act_quant = ActQuant::kBlock;
       },
       Status::kUnsupported,
       {"code book", "int8", "fp16 or bf16"}},
      {[](auto& p) { p.out_type = DataType::kNone; }, Status::kUnsupported, {"out_dtype", "float16, bfloat16 or float32"}},
      {[](auto& p) { p.out_type = DataType::kInt8; }, Status::kUnsupported, {"out_dtype", "float16, bfloat16 or float32"}},
      {[](auto& p) { p.activation = Activation(77); }, Status::kInvalid, {"activation is 77", "relu6", "clamp"}},
      {[](auto& p) { p.activation = Activation::kClamp, p.clamp_low = 2, p.clamp_high = 1; },
       Status::kInvalid,
       {"clamp_low is 2", "clamp_high 1"}},
      {[](auto& p) { p.act_quant = ActQuant(9); }, Status::kInvalid, {"act_quant is 9", "none, token and block"}},
      {[](auto& p) { p.x_stride = 0; }, Status::kInvalid, {"x_stride is 0", "576"}},
      {[](auto& p) { p.x_stride = 575; }, Status::kInvalid, {"x_stride is 575", "576"}},
      {[](auto& p) { p.x_stride = -576; }, Status::kInvalid, {"x_stride is -576", "576"}},
      {[](auto& p) { p.residual = &some_byte, p.residual_type = DataType::kFloat16, p.residual_stride = 191; },
       Status::kInvalid,
       {"residual_stride is 191", "192"}},
      {[](auto& p) { p.x = nullptr; }, Status::kInvalid, {"x is a null pointer"}},
      {[](auto& p) { p.x = &some_byte + 1; }, Status::kInvalid, {"x starts at", "no multiple of 2 bytes"}},
      {[](auto& p) { p.bias = &some_byte + 2, p.bias_type = DataType::kFloat32; },
       Status::kInvalid,
       {"bias starts at", "4 bytes"}},
      {[](auto& p) { p.residual = &some_byte + 1, p.residual_type = DataType::kFloat16, p.residual_stride = 192; },
       Status::kInvalid,
       {"residual starts at", "2 bytes"}},
      {[](auto& p) { p.weight.codes = nullptr; }, Status::kInvalid, {"codes is a null pointer"}},
      {[](auto& p) { p.weight.codes += 8; }, Status::kInvalid, {"codes starts at", "16 bytes"}},
      {[](auto& p) { p.weight.scales = nullptr; }, Status::kInvalid, {"scales is a null pointer"}},
      {[](auto& p) { p.weight.scales = &some_byte + 8; }, Status::kInvalid, {"scales starts at", "16 bytes"}},
      {[zeros](auto& p) { p.weight.zeros = zeros + 8; }, Status::kInvalid, {"zeros starts at", "16 bytes"}},
      {[](auto& p) { p.weight.offsets = &some_byte + 4, p.weight.offset_type = DataType::kFloat16; },
       Status::kInvalid,
       {"offsets starts at", "16 bytes"}},
      {[](auto& p) { p.weight.perm = reinterpret_cast<int32_t const*>(&some_byte + 4); },
       Status::kInvalid,
       {"perm starts at", "16 bytes"}},
      {[](auto& p) { p.weight.book = some_book + 1; }, Status::kInvalid, {"book starts at", "16 bytes"}},
      {[](auto& p) { p.weight.sums = &some_byte + 1; }, Status::kInvalid, {"sums starts at", "16 bytes"}},
      {[](auto& p) { p = already_quantized(p, -1), p.quantized.codes += 1; },
       Status::kInvalid,
       {"the activations' codes starts at", "16 bytes"}},
      {[](auto& p) { p = already_quantized(p, -1), p.quantized.scales = nullptr; },
       Status::kInvalid,
       {"the activations' scales is a null pointer"}},
      {[zeros](auto& p) { p = already_quantized(p, -1), p.quantized.zeros = const_cast<int8_t*>(zeros) + 1; },
       Status::kInvalid,
       {"the activations' zeros starts at", "16 bytes"}},
  };
  for (Case const& wrong : cases) {
    GemmProblem p = problem(5, 192, 576);
    wrong.change(p);
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_EQ(status.code, wrong.code) << status.text;
    for (std::string const& word : wrong.words) EXPECT_NE(status.text.find(word), std::string::npos) << status.text;
    EXPECT_EQ(chosen.kernel, nullptr);
  }
}

TEST(Dispatch, SaysWhatForbidsEachKernelWhereNoneIsLeft) {
  struct Case {
    Device device;
    std::vector<std::string> words;
  };
  for (Case const& c :
       {Case{{75, 68, 232448}, {"architecture 75 (wgmma_gemm_a8,", "mma_gemm_a16", "sm_80 and later"}},
        Case{{80, 108, 65536}, {"65536 bytes of shared memory (", "mma_gemm_a16", "architecture 80 (wgmma_gemm_a8,"}}}) {
    Plan chosen;
    Status const status = plan(problem(50, 192, 576), c.device, &chosen);
    EXPECT_EQ(status.code, Status::kUnsupported);
    for (std::string const& word : c.words) EXPECT_NE(status.text.find(word), std::string::npos) << status.text;
    EXPECT_NE(status.text.find("50 rows of x (wgmma_decode, wgmma_decode_fold16, decode_gemm,"), std::string::npos)
        << status.text;
  }
}

TEST(Dispatch, NamesTheFieldThatForbidsAKernel) {
  auto const forbids = [](char const* kernel, std::string const& field, std::function<void(GemmProblem&)> const& change,
                          Device const& device = kHopper) {
    GemmProblem p = problem(8, 4096, 4096);
    change(p);
    EXPECT_EQ(forbidden_by(*find_kernel(kernel), p, device), field) << kernel;
  };
  auto const nothing = [](GemmProblem&) {};
  auto const int8 = [](GemmProblem& p) { p.act_quant = ActQuant::kBlock; };
  auto const fp32 = [](GemmProblem& p) { p.x_type = DataType::kFloat32; };
  auto const offsets = [](GemmProblem& p) { p.weight.offsets = &some_byte, p.weight.offset_type = DataType::kFloat16; };
  auto const book = [](GemmProblem& p) { p.weight.book = some_book; };
  auto const e4m3 = [](GemmProblem& p) { p.weight.bits = 8, p.weight.e4m3 = true; };
  auto const perm = [](GemmProblem& p) { p.weight.perm = reinterpret_cast<int32_t const*>(&some_byte); };
  auto const zeros8 = [](GemmProblem& p) {
    p.weight.bits = 8, p.act_quant = ActQuant::kBlock, p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
  };
  for (char const* kernel : {"wgmma_decode", "decode_gemm", "wgmma_gemm_a16", "wgmma_fold16", "mma_gemm_a16"}) {
    forbids(kernel, "", nothing);
    forbids(kernel, std::string(kernel) == "mma_gemm_a16" ? "" : "architecture 80", nothing, kDevices[0]);
  }
  for (char const* kernel : {"wgmma_gemm_a8", "mma_gemm_a8"}) {
    forbids(kernel, "16-bit x", nothing);
    forbids(kernel, "", int8);
  }
  for (char const* kernel : {"wgmma_gemm_a16", "mma_gemm_a16"}) {
    forbids(kernel, "int8 x", int8);
    forbids(kernel, "fp32 x", fp32);
  }
  for (int group_size : {32, 64}) {
    auto const groups = [=](GemmProblem& p) { p.weight.group_size = group_size; };
    forbids("wgmma_gemm_a16", "groups of " + std::to_string(group_size), groups);
    forbids("wgmma_decode", "groups of " + std::to_string(group_size), groups);
    forbids("decode_gemm", "", groups);
    forbids("wgmma_fold16", "", groups);
  }
  forbids("wgmma_gemm_a16", "offsets", offsets);
  forbids("wgmma_decode", "offsets", offsets);
  forbids("wgmma_gemm_a16", "a code book", book);
  for (char const* kernel : {"wgmma_gemm_a16", "wgmma_decode", "decode_gemm"}) forbids(kernel, "e4m3 codes", e4m3);
  for (char const* kernel : {"wgmma_fold16", "wgmma_decode_fold16", "mma_gemm_a16"}) forbids(kernel, "", e4m3);
  forbids("book_gemm_a16", "a weight without a code book", [](GemmProblem& p) { p.m = 8; });
  forbids("wgmma_gemm_a8", "8-bit zero points", zeros8);
  forbids("wgmma_decode", "8-bit zero points", zeros8);
  forbids("wgmma_decode", "act order", perm);
  forbids("wgmma_decode", "rows of x that do not start on 16 bytes", [](GemmProblem& p) { p.x_stride = 4097; });
  forbids("wgmma_decode", "scales that are not of x's type", [](GemmProblem& p) { p.x_type = DataType::kBFloat16; });
  forbids("wgmma_decode", "17 rows of x", [](GemmProblem& p) { p.m = 17; });
  forbids("decode_gemm", "batch_invariant", [](GemmProblem& p) { p.batch_invariant = true; });
  forbids("wgmma_fold16", "exact", [](GemmProblem& p) { p.exact = true; });
  forbids("wgmma_fold16", "a result that is not of x's 16-bit type", [](GemmProblem& p) { p.out_type = DataType::kFloat32; });
  EXPECT_EQ(find_kernel("no_kernel"), nullptr);
}

TEST(Dispatch, HasKernelsThatMakeSense) {
  std::set<std::string> names;
  for (KernelSpec const& spec : kernel_specs()) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    for (int bits : {4, 8})
      for (Candidate const& c : spec.candidates(problem(1, 192, 576, bits))) {
        EXPECT_EQ(c.tile.block_n % kRowsPerPanel, 0) << spec.name;
        EXPECT_LE(c.min_m, c.max_m) << spec.name;
        EXPECT_EQ(c.cost.k4096 > 0, spec.cost && !spec.decodes) << spec.name;
        int measured = 0;
        for (auto const& of_bits : c.decode_costs)
          for (DecodeCost const& cost : of_bits) measured += cost.start > 0;
        EXPECT_EQ(measured > 0, spec.decodes) << spec.name;
        EXPECT_FALSE(spec.decodes && c.max_m > 16) << spec.name;
      }
  }
}

// A launch states its shared memory and threads: a few of each kernel, with the values of their files.
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
        Case{already_quantized(problem(4096, 28672, 4096), 128), kHopper, "wgmma_gemm_a8", 132, 1, 2, 384, 179200, 4},
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

TEST(Splits, FillASmallGridAndLeaveALargeOneWhole) {
  struct Case {
    int m, n, k, slices;
  };
  Device const a100 = kDevices[0];
  for (Case const& c : {Case{1, 128, 16384, 16},     // one tile for 432 places: as many as the limit of 16 allows
                        Case{1, 128, 2048, 2},       // 16 tiles of K, at least eight each
                        Case{1, 128, 128, 1},        // nothing to split
                        Case{1, 128, 1024, 1},       // eight tiles of K, and a part has no less
                        Case{1, 4096, 8192, 8},      // 32 tiles for 432 places, 13 parts each: eight have eight tiles of K
                        Case{4096, 28672, 4096, 1},  // thousands of tiles
                        Case{0, 128, 16384, 16}}) {  // no rows: any number will do, but it must be one
    Plan chosen;
    ASSERT_TRUE(plan(problem(c.m, c.n, c.k), a100, &chosen).ok());
    EXPECT_EQ(chosen.slices, c.slices) << c.m << " x " << c.n << " x " << c.k;
  }
}

// The same shapes give the same sums in the same order, whatever the pointers and the epilogue.
TEST(Splits, DependOnShapesAlone) {
  for (int m : {1, 17, 64, 300}) {
    GemmProblem plain = problem(m, 1000, 7392);
    plain.x_stride = 7392;
    Plan expected;
    ASSERT_TRUE(plan(plain, kHopper, &expected).ok());
    GemmProblem p = plain;
    p.bias = p.residual = &some_byte;
    p.x = reinterpret_cast<void const*>(uintptr_t(4096));
    p.out = &some_byte;
    p.bias_type = p.residual_type = p.out_type = DataType::kFloat32;
    p.x_type = DataType::kBFloat16;
    p.x_stride = 9000;
    p.residual_stride = 2000;
    p.activation = Activation::kSilu;
    p.saturate = true;
    p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
    p.weight.scale_type = DataType::kFloat32;
    p.weight.group_size = -1;
    Plan chosen;
    ASSERT_TRUE(plan(p, kHopper, &chosen).ok());
    EXPECT_EQ(chosen.slices, expected.slices);
    EXPECT_EQ(chosen.block_m, expected.block_m);

    // Activations that are quantised on the way and those that were before.
    Plan before, on_the_way;
    ASSERT_TRUE(plan(already_quantized(plain, 128), kHopper, &before).ok());
    ASSERT_TRUE(plan(quantized_on_the_way(plain, ActQuant::kBlock, true), kHopper, &on_the_way).ok());
    EXPECT_EQ(before.slices, on_the_way.slices);
  }
}

TEST(Splits, AndTheKernelOfABatchInvariantProductAreThoseOf128Tokens) {
  for (Device const& device : kDevices)
    for (int bits : {4, 8})
      for (auto [n, k] : {std::pair(4096, 4096), std::pair(28672, 4096), std::pair(192, 576)}) {
        GemmProblem p = problem(kInvariantM, n, k, bits);
        p.batch_invariant = true;
        Plan expected;
        ASSERT_TRUE(plan(p, device, &expected).ok());
        for (int m : {0, 1, 3, 17, 64, 129, 1000, 100000}) {
          p.m = m;
          Plan chosen;
          ASSERT_TRUE(plan(p, device, &chosen).ok());
          EXPECT_STREQ(chosen.kernel, expected.kernel) << m;
          EXPECT_EQ(chosen.slices, expected.slices) << m;
        }
      }
}

// M = 17 to 32, int8: wgmma_gemm_a8 for weights of the sizes at which it was measured to win.
TEST(Dispatch, GivesFewInt8RowsBlockM32ForLargeWeights) {
  auto rows = [](int m, int n, int k, int bits, ActQuant act_quant, bool symmetric = true) {
    Plan const chosen = planned(quantized_on_the_way(problem(m, n, k, bits), act_quant, symmetric));
    bool const wgmma = std::string(chosen.kernel) == "wgmma_gemm_a8";
    EXPECT_EQ(wgmma ? chosen.block_m : 0, !wgmma ? 0 : m <= 32 ? 32 : 64);
    return wgmma ? chosen.block_n : 0;
  };
  for (ActQuant act_quant : {ActQuant::kBlock, ActQuant::kToken})
    for (int m : {17, 32}) {
      // 112 tiles of 256 features are two waves over 66 clusters, 56 of 512 are one; the latter have no registers for the
      // activations' zero points.
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
  EXPECT_EQ(rows(16, 14336, 4096, 4, ActQuant::kBlock) + rows(16, 14336, 4096, 8, ActQuant::kBlock), 0);
  EXPECT_EQ(rows(33, 2048, 4096, 8, ActQuant::kBlock), 256);
}

TEST(Dispatch, GivesBatchInvariantInt4ProductsOfBlocksNoSmallTiles) {
  GemmProblem p = problem(8, 4096, 4096, 4);
  p.batch_invariant = true;
  Plan chosen;
  ASSERT_TRUE(plan(quantized_on_the_way(p, ActQuant::kBlock, true), kHopper, &chosen).ok());
  EXPECT_STREQ(chosen.kernel, "wgmma_gemm_a8");
  EXPECT_GE(chosen.block_m, 128);
  ASSERT_TRUE(plan(already_quantized(p, 128), kHopper, &chosen).ok());
  EXPECT_GE(chosen.block_m, 128);
  // Their order of multiplication is that of larger tiles here.
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
    EXPECT_NE(status.text.find("architecture is 100; the GPU is sm_90"), std::string::npos) << status.text;
    // Hopper's own kernels run on Hopper alone.
    p.architecture = 90;
    ASSERT_TRUE(plan(p, kDevices[4], &chosen).ok());
    EXPECT_STREQ(chosen.kernel, "mma_gemm_a16");
  }
}

TEST(Quantize, RefusesFunctionsThatMeanNothing) {
  QuantizeProblem good;
  good.m = 3, good.k = 576, good.out.stride = 16, good.out.block = 128;
  good.x = &some_byte, good.x_stride = 576;
  good.out.codes = reinterpret_cast<int8_t*>(&some_byte), good.out.scales = some_book;
  ASSERT_TRUE(check_quantize(good).ok());
  QuantizeProblem norm = good;
  norm.norm_weight = &some_byte;
  norm.norm_eps = 1e-6f;
  ASSERT_TRUE(check_quantize(norm).ok());
  auto const refuses = [](QuantizeProblem const& p, char const* words) {
    Status const status = check_quantize(p);
    EXPECT_NE(status.text.find(words), std::string::npos) << status.text;
  };
  QuantizeProblem p = norm;
  p.up = &some_byte;
  refuses(p, "both norm_weight and up");
  p = norm;
  p.residual = &some_byte;
  refuses(p, "a residual comes with a norm, and has a place for the sum");
  p = good;
  p.residual = p.sum = &some_byte;
  refuses(p, "a residual comes with a norm");
  for (float eps : {0.0f, 2.0f, std::numeric_limits<float>::quiet_NaN()}) {
    p = norm;
    p.norm_eps = eps;
    refuses(p, "norm_eps is");
  }
  p = norm;
  p.k = kMaxNormK + 1;
  refuses(p, "a norm of at most 4194304 columns");
}

TEST(Checks, OneRowAndNoRowsHaveNoStride) {
  for (int m : {0, 1}) {
    GemmProblem p = problem(m, 192, 576);
    p.x_stride = 0;
    if (m == 0) p.x = nullptr;
    EXPECT_TRUE(planned(p).spec);
  }
}

// What a launch adds to a plan.
TEST(Checks, ALaunchHasItsMemory) {
  GemmProblem p = problem(5, 192, 576);
  p.out = &some_byte, p.out_type = DataType::kFloat32;
  Plan chosen;
  chosen.workspace = 512;
  EXPECT_TRUE(check_launch(p, chosen, {&some_byte, 512}).ok());
  EXPECT_NE(check_launch(p, chosen, {&some_byte, 511}).text.find("the workspace has 511 bytes"), std::string::npos);
  EXPECT_NE(check_launch(p, chosen, {nullptr, 512}).text.find("the workspace is a null pointer"), std::string::npos);
  EXPECT_NE(check_launch(p, chosen, {&some_byte + 16, 512}).text.find("the workspace starts at"), std::string::npos);
  p.out = &some_byte + 2;
  EXPECT_NE(check_launch(p, chosen, {&some_byte, 512}).text.find("out starts at"), std::string::npos);
  p.out = nullptr;
  EXPECT_NE(check_launch(p, chosen, {&some_byte, 512}).text.find("out is a null pointer"), std::string::npos);
}

// The operators beside the product: a field that is missing, misaligned or too short is named.
TEST(Checks, NameThePointerOfEveryOperator) {
  auto const names = [](Status const& status, char const* words) {
    EXPECT_EQ(status.code, Status::kInvalid);
    EXPECT_NE(status.text.find(words), std::string::npos) << status.text;
  };
  auto* const codes = reinterpret_cast<int8_t*>(&some_byte);
  auto* const words = reinterpret_cast<uint32_t*>(&some_byte);

  QuantizeProblem const quantizes{codes, DataType::kFloat16, 576, 17, 576, nullptr, {codes, some_book, nullptr, 128, 32}};
  ASSERT_TRUE(check_quantize(quantizes).ok());
  QuantizeProblem q = quantizes;
  q.x = nullptr;
  names(check_quantize(q), "x is a null pointer");
  q = quantizes, q.x_stride = 0;
  names(check_quantize(q), "x_stride is 0");
  q = quantizes, q.up = codes, q.up_stride = 575;
  names(check_quantize(q), "up_stride is 575");
  q = quantizes, q.norm_weight = q.residual = q.sum = codes, q.norm_eps = 1e-6f, q.residual_stride = 1;
  names(check_quantize(q), "residual_stride is 1");
  q = quantizes, q.out.codes = nullptr;
  names(check_quantize(q), "out.codes is a null pointer");
  q = quantizes, q.out.scales = some_book + 1;
  names(check_quantize(q), "out.scales starts at");
  names(check_sums(problem(1, 200, 576).weight, &some_byte + 8), "colsums starts at");
  names(check_dequantize({problem(1, 200, 576).weight, nullptr}), "out is a null pointer");

  PackProblem packs{&some_byte, &some_byte, 576, 1, 200, 576, 4};
  ASSERT_TRUE(check_pack(packs).ok());
  packs.codes = nullptr;
  names(check_pack(packs), "codes is a null pointer");
  packs.codes = &some_byte, packs.packed = &some_byte + 8;
  names(check_pack(packs), "packed starts at");

  FlatProblem flat;
  flat.count = 64, flat.floats = flat.packed = &some_byte, flat.absmax = some_book, flat.cuts = some_book;
  names(check_flat(flat, true), "codes is a null pointer");
  flat.codes = &some_byte;
  EXPECT_TRUE(check_flat(flat, true).ok());
  names(check_flat(flat, false), "book is a null pointer");
  flat.book = some_book;
  EXPECT_TRUE(check_flat(flat, false).ok());
  flat.nested_codes = &some_byte;
  names(check_flat(flat, false), "nested_absmax is a null pointer");

  AwqWeight const awq{words, &some_byte, words, 64, 128, 4};
  EXPECT_TRUE(check_awq(awq, &some_byte).ok());
  names(check_awq({nullptr, &some_byte, words, 64, 128, 4}, &some_byte), "codes is a null pointer");
  EXPECT_TRUE(check_awq_gemm(awq, &some_byte, 128, 3, &some_byte).ok());
  names(check_awq_gemm(awq, &some_byte, 0, 3, &some_byte), "x_stride is 0");
  names(check_awq_gemm(awq, &some_byte, 129, 3, &some_byte), "x_stride is 129");
  names(check_awq_gemm(awq, &some_byte + 2, 128, 3, &some_byte), "x starts at");
  names(check_awq_gemm(awq, &some_byte, 128, 3, nullptr), "out is a null pointer");
  EXPECT_EQ(check_awq_gemm(awq, &some_byte, 128, 65, &some_byte).code, Status::kUnsupported);
}

TEST(Checks, NameTheFieldOfAConvolution) {
  auto const text = [](std::function<void(ConvProblem&)> const& change) {
    ConvProblem p;
    p.weight.n = p.weight.channels = p.channels = 32, p.weight.height = p.weight.width = 3;
    p.weight.codes = reinterpret_cast<int8_t*>(&some_byte), p.weight.scales = some_book;
    p.x = &some_byte, p.batch = 1, p.height = p.width = 8;
    change(p);
    ConvPlan chosen;
    return plan_conv_int8(p, kHopper, &chosen).text;
  };
  EXPECT_EQ(text([](auto&) {}), "");
  for (auto const& [change, words] : std::vector<std::pair<std::function<void(ConvProblem&)>, std::string>>{
           {[](auto& p) { p.activation = Activation(77); }, "activation is 77"},
           {[](auto& p) { p.activation = Activation::kGelu; }, "activation is gelu or silu"},
           {[](auto& p) { p.activation = Activation::kClamp, p.clamp_low = 1; }, "clamp_low is 1"},
           {[](auto& p) { p.weight.scale_type = DataType::kInt8; }, "scale_type"},
           {[](auto& p) { p.x = nullptr; }, "x is a null pointer"},
           {[](auto& p) { p.weight.codes = nullptr; }, "the weight's codes is a null pointer"},
           {[](auto& p) { p.weight.codes += 8; }, "the weight's codes starts at"},
           {[](auto& p) { p.weight.scales = nullptr; }, "the weight's scales is a null pointer"},
           {[](auto& p) { p.x_zero_point = 3; }, "the weight's sums is a null pointer"},
           {[](auto& p) { p.bias = &some_byte + 1, p.bias_int32 = true; }, "bias starts at"},
           {[](auto& p) { p.weight.cut_sums = reinterpret_cast<int32_t*>(&some_byte + 4); }, "the weight's cut sums starts at"},
           {[](auto& p) {
              p.weight.cut_sums = reinterpret_cast<int32_t*>(&some_byte);
              p.weight.height = p.weight.width = 9, p.padding[0] = p.padding[1] = 4;
            },
            "cut sums of 625 classes of pixels"},
       })
    EXPECT_NE(text(change).find(words), std::string::npos) << words << ": " << text(change);
}

// Images of 9 x 9 pixels, whose kernel of taps x taps keeps their size.
ConvProblem int8_images(int batch, int channels, int n, int taps, int groups = 1) {
  ConvProblem p;
  p.weight.n = n, p.weight.channels = channels / groups, p.weight.height = p.weight.width = taps, p.groups = groups;
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
  plans.erase(std::remove_if(plans.begin(), plans.end(), [&](ConvPlan const& plan) { return plan.kernel != kernel; }),
              plans.end());
  return plans;
}

TEST(Int8Plans, OfImplicitGemmsCoverTheResultOnEveryGpu) {
  for (Device const& device : kDevices)
    for (auto [channels, n, taps, groups] : std::vector<std::array<int, 4>>{
             {3, 17, 7, 1}, {20, 65, 3, 1}, {64, 1, 1, 1}, {96, 96, 3, 3}, {15, 30, 3, 3}, {64, 640, 33, 1}})
      for (int zero_point : {0, 3}) {
        ConvProblem p = int8_images(100, channels, n, taps, groups);
        p.x_zero_point = zero_point;
        std::vector<ConvPlan> const plans = of_kernel("conv_int8_implicit_gemm", int8_plans(p, device));
        ASSERT_FALSE(plans.empty()) << channels << " channels, " << taps << " taps";
        for (ConvPlan const& plan : plans) {
          EXPECT_EQ(plan.grid, ceil_div(8100, plan.block_m) * groups * ceil_div(n / groups, plan.block_n));
          EXPECT_LE(plan.stages * (plan.block_m + plan.block_n) * ConvImplicitTile::kBlockK, device.shared_memory);
          EXPECT_EQ(plan.pads, zero_point != 0 && taps > 1 && taps != 7);  // taps of few channels are gathered
        }
        for (size_t i = 1; i < plans.size(); ++i) EXPECT_LE(plans[i - 1].predicted_clocks, plans[i].predicted_clocks);
      }
}

TEST(Int8Plans, OfCollectivesAreProductsThatStoreWholeVectors) {
  auto const count = [](ConvProblem const& p, Device const& device = kHopper) {
    return of_kernel("gemm_int8_collective", int8_plans(p, device)).size();
  };
  ConvProblem const product = int8_images(5, 70, 64, 1);
  EXPECT_EQ(count(product), std::size(kGemmCollectiveTiles));
  EXPECT_EQ(count(int8_images(5, 3, 64, 3)), std::size(kGemmCollectiveTiles));  // the taps are gathered
  EXPECT_EQ(count(int8_images(5, 70, 64, 3)), 0u);
  EXPECT_EQ(count(int8_images(5, 70, 72, 1)), 0u);
  EXPECT_EQ(count(int8_images(5, 96, 96, 1, 3)), 0u);
  for (Device const& device : kDevices) EXPECT_EQ(count(product, device) > 0, device.architecture == 90);
  for (auto const& change : std::vector<std::function<void(ConvProblem&)>>{
           [](auto& p) { p.out = &some_byte + 8; }, [](auto& p) { p.out_type = ConvOutput::kInt32; },
           [](auto& p) { p.stride[1] = 2; }, [](auto& p) { p.padding[0] = 1; }}) {
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

TEST(Int8Plans, AreRefusedWhereATileSpansMoreThan32Bits) {
  ConvProblem p = int8_images(2, 1 << 23, 16, 1);
  EXPECT_TRUE(of_kernel("conv_int8_implicit_gemm", int8_plans(p)).empty());
  ConvPlan plan;
  Status const status = plan_conv_int8(p, kDevices[0], &plan);
  EXPECT_EQ(status.code, Status::kUnsupported);
  EXPECT_NE(status.text.find("2^31 bytes"), std::string::npos) << status.text;
  // Images of 679 MB, of which a tile of 256 pixels has up to five, in lines of 75 MB and pixels of 8 MB.
  ConvProblem const images = int8_images(2, (1 << 23) - 16, 16, 1);
  EXPECT_EQ(of_kernel("conv_int8_implicit_gemm", int8_plans(images)).size(), std::size(kConvImplicitTiles));
  for (auto const& change : std::vector<std::function<void(ConvProblem&)>>{
           [](auto& q) { q.batch = 5; }, [](auto& q) { q.padding[0] = 20; }, [](auto& q) { q.padding[1] = 127; }}) {
    ConvProblem q = images;
    change(q);
    EXPECT_TRUE(of_kernel("conv_int8_implicit_gemm", int8_plans(q)).empty());
  }
}

TEST(Checks, SumsOfCodesAreForWeightsWhoseProductsTakeThem) {
  for (int bits : {4, 8})
    for (int group_size : {-1, 32, 64, 128, 256})
      for (bool zeros : {false, true})
        for (bool offsets : {false, true}) {
          PackedWeight w = problem(1, 200, 576, bits, group_size).weight;
          if (zeros) w.zeros = reinterpret_cast<int8_t*>(&some_byte);
          if (offsets) w.offsets = &some_byte, w.offset_type = DataType::kFloat16;
          bool const fits = !offsets && !(zeros && bits == 8) && group_size != 32 && group_size != 64;
          EXPECT_EQ(check_sums(w, &some_byte).ok(), fits)
              << bits << " bits, groups of " << group_size << ", " << zeros << offsets;
        }
  PackedWeight book = problem(1, 200, 576).weight;
  book.book = some_book;
  EXPECT_EQ(check_sums(book, &some_byte).code, Status::kUnsupported);
}

struct Part {
  size_t begin, bytes;
};

TEST(Workspace, HasAlignedPartsThatDoNotOverlap) {
  for (int m : {1, 3, 16, 17, 129, 512, 513, 4097})
    for (int k : {1, 7, 576, 10944})
      for (int group_size : {-1, 32, 64, 128, 512})
        for (ActQuant act_quant : {ActQuant::kNone, ActQuant::kToken, ActQuant::kBlock})
          for (bool symmetric : {true, false})
            for (auto const& [slices, upcasts] :
                 std::vector<std::pair<int, bool>>{{1, false}, {2, false}, {7, false}, {1, true}, {7, true}}) {
              int const n = 200;
              GemmProblem const p = quantized_on_the_way(problem(m, n, k, 4, group_size), act_quant, symmetric);
              Plan const plan = laid_out(p, slices, upcasts);
              WorkspaceLayout const& layout = plan.layout;
              std::vector<Part> parts;
              if (act_quant != ActQuant::kNone) {
                int const block = group_size == -1 || group_size > 128 ? 128 : group_size;
                EXPECT_EQ(layout.block, act_quant == ActQuant::kToken ? -1 : block);
                EXPECT_EQ(layout.stride, (m + 15) / 16 * 16);
                EXPECT_EQ(layout.rows, m > 512 ? m : (m + 47) / 48 * 48);  // whole tiles of few rows may be read
                size_t const blocks = act_quant == ActQuant::kToken ? 1 : size_t(padded_k(k) / block);
                if (!upcasts) parts.push_back({layout.codes, size_t(layout.rows) * size_t(padded_k(k))});
                parts.push_back({layout.scales, blocks * size_t(layout.stride) * 4});
                if (!symmetric) parts.push_back({layout.zeros, blocks * size_t(layout.stride)});
              } else {
                EXPECT_EQ(layout.block, 0);
              }
              // Floats whose rows no tensor map describes are copied to rows that one does.
              EXPECT_EQ(layout.upcasts, upcasts && (act_quant != ActQuant::kNone || p.x_stride % 8 != 0 || p.x_stride < k));
              if (layout.upcasts) parts.push_back({layout.upcast, size_t(m) * size_t(padded_k(k)) * 2});
              if (slices > 1) parts.push_back({layout.splitk_workspace, size_t(slices) * m * 256 * 4});  // n is padded to 256
              std::sort(parts.begin(), parts.end(), [](Part a, Part b) { return a.begin < b.begin; });
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
      // The column sums: 4 row panels of windows of 16 tiles of K, each as large as the codes of a tile, 256 scales in fp16,
      // and as many floats.
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

TEST(Workspace, IsOnlyPartsOfKForActivationsThatAreQuantizedAlready) {
  GemmProblem const p = quantized_on_the_way(already_quantized(problem(5, 200, 576), 128), ActQuant::kBlock, true);
  EXPECT_EQ(laid_out(p, 1).workspace, 0u);
  EXPECT_EQ(laid_out(p, 3).workspace, 3u * 5 * 256 * 4);
}

TEST(Workspace, IsCountedIn64Bits) {
  GemmProblem const p = quantized_on_the_way(problem(kMaxM, 28672, 65536), ActQuant::kBlock, true);
  EXPECT_GE(laid_out(p, 1).workspace, size_t(kMaxM) * 65536);
  EXPECT_GE(laid_out(p, 16).workspace, size_t(kMaxM) * 28672 * 16 * 4);
}

// ---- experts

MoeProblem experts(int tokens, int count, int top, int hidden, int intermediate, int group_size = 128) {
  MoeProblem p;
  p.route.tokens = tokens, p.route.top = top, p.route.experts = count, p.route.ids = &some_byte;
  p.x = p.topk_weights = &some_byte, p.x_stride = hidden;
  p.gate_up = {problem(1, count * int(padded_rows(2 * intermediate)), hidden, 4, group_size).weight, count, 2 * intermediate};
  p.down = {problem(1, count * int(padded_rows(hidden)), intermediate, 4, group_size).weight, count, hidden};
  return p;
}

TEST(Experts, TakeHigherTilesTheMoreRowsTheyHave) {
  for (auto [tokens, group_size, height, kernel] : {std::tuple(1, 128, 16, "wgmma_decode_fold16"),
                                                    {128, 128, 16, "wgmma_decode_fold16"},
                                                    {512, 128, 64, "wgmma_gemm_a16"},    // 32 rows of an expert
                                                    {1024, 128, 96, "wgmma_gemm_a16"},   // 64 of most, and not of all
                                                    {2048, 128, 144, "wgmma_gemm_a16"},  // 128
                                                    {2048, -1, 144, "wgmma_gemm_a16"},
                                                    {16384, 128, 208, "wgmma_gemm_a16"},
                                                    {512, 64, 64, "wgmma_fold16"},
                                                    {1024, 32, 96, "wgmma_fold16"},
                                                    {16384, 32, 208, "wgmma_fold16"}}) {
    MoePlan chosen;
    ASSERT_TRUE(plan_moe(experts(tokens, 128, 8, 2048, 768, group_size), kHopper, &chosen).ok());
    EXPECT_EQ(chosen.block_m, height) << tokens;
    EXPECT_STREQ(chosen.kernel, kernel);
    // Enough for any routing: all positions' own slots, and the most tiles that they can be cut into.
    int const positions = tokens * 8, touched = std::min(128, positions);
    EXPECT_EQ(chosen.routes, positions > 256);
    EXPECT_GE(chosen.slots, positions + (chosen.routes ? touched * 15 - 15 : 0));
    EXPECT_EQ(chosen.slots % 16, 0);
    EXPECT_EQ(chosen.tiles, touched + (positions - touched) / height);
    for (Plan const* product : {&chosen.gate_up, &chosen.down}) {
      EXPECT_EQ(product->grid_x % product->cluster_size, 0);
      EXPECT_LE(product->shared_bytes, kHopper.shared_memory);
    }
  }
}

TEST(Experts, FindTheirRowsInTheIdsWhereTheseAreFew) {
  MoePlan chosen;
  for (auto [tokens, count, routes] : {std::tuple(1, 128, false),
                                       {32, 128, false},
                                       {33, 128, true},
                                       {32, 8192, false},
                                       {32, 8, true}}) {  // 32 rows of an expert, in higher tiles
    ASSERT_TRUE(plan_moe(experts(tokens, count, 8, 2048, 768), kHopper, &chosen).ok());
    EXPECT_EQ(chosen.routes, routes) << tokens << " tokens, " << count << " experts";
    if (routes) continue;
    EXPECT_EQ(chosen.block_m, 16);
    EXPECT_EQ(chosen.slots, (tokens * 8 + 15) / 16 * 16);
  }
}

TEST(Experts, ShareAllFeaturesOfGateAndUpByClusters) {
  MoePlan chosen;
  for (int intermediate : {8, 64, 136, 192, 640, 704, 14336}) {
    ASSERT_TRUE(plan_moe(experts(1, 8, 2, 4096, intermediate, 64), kHopper, &chosen).ok());
    WgmmaDecodeShape const& shape = chosen.gate_up.wgmma_decode;
    ASSERT_GT(shape.cluster, 0);
    EXPECT_GE(shape.most_row_panels * shape.clusters * 64, 2 * intermediate);
    EXPECT_EQ(chosen.gate_up.grid_x, chosen.tiles * shape.clusters * shape.cluster);
  }
}

TEST(Experts, AreDealtToAllCtasWhereEachGetsSeveralRowPanels) {
  MoePlan chosen;
  auto const dealt = [&](MoeProblem const& p) {
    EXPECT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    WgmmaDecodeShape const& shape = chosen.gate_up.wgmma_decode;
    if (!shape.dealt) return false;
    EXPECT_EQ(shape.cluster, 1);
    EXPECT_EQ(shape.sets, 1);
    EXPECT_EQ(chosen.gate_up.grid_x, 2 * kHopper.multiprocessors);
    EXPECT_LE(shape.most_row_panels, 9);
    EXPECT_GE(shape.stages, 3);
    return true;
  };
  auto const experts = [](auto... sizes) {
    MoeProblem p = cutlass_ops::experts(sizes...);
    p.x_type = DataType::kFloat16;
    return p;
  };
  EXPECT_TRUE(dealt(experts(32, 128, 8, 2048, 768)));
  EXPECT_TRUE(dealt(experts(128, 128, 8, 2048, 768)));
  EXPECT_FALSE(dealt(experts(1, 128, 8, 2048, 768)));
  EXPECT_FALSE(dealt(experts(4096, 8192, 8, 512, 32)));  // a CTA would have parts of too many tiles
  MoeProblem p = experts(32, 128, 8, 2048, 768);
  p.gate_up.stack.scale_type = DataType::kFloat32;  // which the kernel keeps in registers
  EXPECT_FALSE(dealt(p));
}

TEST(Experts, TakeTheExactKernelWhereItsGroupsAndCodesAllowIt) {
  auto const kernels = [](std::function<void(PackedWeight&)> const& change) {
    MoeProblem p = experts(1024, 8, 2, 4096, 1024);
    change(p.down.stack);
    MoePlan chosen;
    EXPECT_TRUE(plan_moe(p, kHopper, &chosen).ok());
    EXPECT_STREQ(chosen.gate_up.kernel, "wgmma_gemm_a16");
    // Tiles are those of both products.
    EXPECT_EQ(chosen.gate_up.block_m, chosen.down.block_m);
    return std::string(chosen.down.kernel);
  };
  EXPECT_EQ(kernels([](PackedWeight&) {}), "wgmma_gemm_a16");
  EXPECT_EQ(kernels([](PackedWeight& w) { w.bits = 8, w.zeros = reinterpret_cast<int8_t const*>(&some_byte); }),
            "wgmma_gemm_a16");
  EXPECT_EQ(kernels([](PackedWeight& w) { w.scale_type = DataType::kFloat32; }), "wgmma_gemm_a16");
  EXPECT_EQ(kernels([](PackedWeight& w) { w.group_size = 64; }), "wgmma_fold16");
  EXPECT_EQ(kernels([](PackedWeight& w) { w.offsets = &some_byte, w.offset_type = DataType::kFloat16; }), "wgmma_fold16");
  EXPECT_EQ(kernels([](PackedWeight& w) { w.book = reinterpret_cast<float const*>(&some_byte); }), "wgmma_fold16");
}

TEST(Experts, MultiplyCodesWhereBothProductsCan) {
  for (auto act_quant : {ActQuant::kToken, ActQuant::kBlock}) {
    auto const plan = [&](int tokens, std::function<void(MoeProblem&)> const& change) {
      MoeProblem p = experts(tokens, 8, 2, 4096, 1024);
      p.act_quant = act_quant;
      change(p);
      MoePlan chosen;
      EXPECT_TRUE(plan_moe(p, kHopper, &chosen).ok());
      EXPECT_EQ(chosen.gate_up.block_m, chosen.down.block_m);
      EXPECT_EQ(chosen.int8, std::string(chosen.gate_up.kernel) == "wgmma_gemm_a8");
      EXPECT_EQ(chosen.int8, std::string(chosen.down.kernel) == "wgmma_gemm_a8");
      return chosen;
    };
    MoePlan const many = plan(1 << 14, [](MoeProblem&) {});
    EXPECT_TRUE(many.int8);
    EXPECT_EQ(many.block_m, 176);
    EXPECT_TRUE(plan(1024, [](MoeProblem& p) { p.gate_up.stack.bits = 8; }).int8);
    EXPECT_TRUE(plan(1024, [](MoeProblem& p) { p.down.stack.zeros = reinterpret_cast<int8_t*>(&some_byte); }).int8);
    EXPECT_FALSE(plan(16, [](MoeProblem&) {}).int8);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) { p.act_quant = ActQuant::kNone; }).int8);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) { p.act_symmetric = false; }).int8);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) { p.down.stack.group_size = 64; }).int8);
    EXPECT_FALSE(plan(1024, [](MoeProblem& p) {
                   p.down.stack.bits = 8, p.down.stack.zeros = reinterpret_cast<int8_t*>(&some_byte);
                 }).int8);
  }
}

TEST(Experts, GatherRowsOfXWhereTheyCannotBeReadByTheirNumbers) {
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
  EXPECT_TRUE(gathers([](MoeProblem& p) { p.gate_up.perm = reinterpret_cast<int32_t const*>(uintptr_t(4096)); }));
  EXPECT_TRUE(gathers([](MoeProblem& p) { p.x_stride = int64_t(1) << 30; }));
  EXPECT_TRUE(gathers([](MoeProblem& p) { p.gate_up = experts(1024, 8, 2, 4096, 2048).gate_up; }));   // many features
  EXPECT_FALSE(gathers([](MoeProblem& p) { p = experts(4, 8, 2, 4096, 2048), p.x_stride = 4096; }));  // of few rows
  // Quantised rows lie in the workspace.
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
        auto const& heights = chosen.int8 ? kGroupedInt8Heights : kGroupedHeights;
        EXPECT_TRUE(chosen.block_m == 16 || std::count(std::begin(heights), std::end(heights), chosen.block_m));
      }
}

TEST(Experts, SayWhatForbidsThem) {
  MoePlan chosen;
  auto const text = [&](MoeProblem const& p, Device const& device = kHopper) { return plan_moe(p, device, &chosen).text; };
  EXPECT_NE(text(experts(1, 8, 2, 4096, 100)).find("intermediate is 100; multiples of 8"), std::string::npos);
  EXPECT_NE(text(experts(1, 8, 2, 4100, 128)).find("hidden is 4100; multiples of 8"), std::string::npos);
  EXPECT_NE(text(experts(1, 9000, 2, 4096, 128)).find("up to 8192 experts"), std::string::npos);
  EXPECT_NE(text(experts(1, 8, 2, 4096, 128), kDevices[0]).find("the device is sm_80"), std::string::npos);
  EXPECT_NE(text(experts(1, 0, 2, 4096, 128)).find("experts is 0"), std::string::npos);
  for (auto const& [change, words] : std::vector<std::pair<std::function<void(MoeProblem&)>, std::string>>{
           {[](auto& p) { p.activation = Activation(77); }, "activation is 77"},
           {[](auto& p) { p.act_quant = ActQuant(9); }, "act_quant is 9"},
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

#if !CUTLASS_OPS_CUDA
TEST(WithoutCuda, EveryOperatorSaysSo) {
  Device device;
  for (Status const& status :
       {current_device(&device), mixed_gemm(problem(5, 192, 576), {}, nullptr), quantize_activations({}, nullptr),
        weight_colsum({}, nullptr, nullptr), dequantize({}, nullptr), route({}, {}, nullptr), mixed_moe({}, {}, {}, nullptr)}) {
    EXPECT_EQ(status.code, Status::kUnsupported);
    EXPECT_NE(status.text.find("no CUDA kernels"), std::string::npos) << status.text;
  }
}
#endif

}  // namespace
TEST(Checks, LeavesOutWhatPadsTaps) {
  DequantizeProblem problem;
  problem.weight = cutlass_ops::problem(1, 64, 2 * 256).weight, problem.out = &some_byte;
  for (int channels : {0, 129, 256}) {
    problem.tap_channels = channels;
    EXPECT_TRUE(check_dequantize(problem).ok()) << channels;
  }
  for (int channels : {-1, 257, 1000}) {
    problem.tap_channels = channels;
    EXPECT_EQ(check_dequantize(problem).code, Status::kInvalid) << channels;
  }
}

TEST(Checks, FinishesSumsOf16Bits) {
  GemmProblem problem = cutlass_ops::problem(5, 64, 256);
  problem.out = &some_byte;
  EXPECT_TRUE(check_finish(problem, &some_byte).ok());
  EXPECT_EQ(check_finish(problem, nullptr).code, Status::kInvalid);
  problem.x_type = DataType::kFloat32;
  EXPECT_EQ(check_finish(problem, &some_byte).code, Status::kUnsupported);
}

TEST(Checks, DequantizesRowsFromAWholePanelOn) {
  DequantizeProblem problem;
  problem.weight = cutlass_ops::problem(1, 200, 128).weight, problem.out = &some_byte;
  auto const ok = [&](int first_row, int rows) {
    problem.first_row = first_row, problem.rows = rows;
    return check_dequantize(problem).ok();
  };
  EXPECT_TRUE(ok(0, -1) && ok(0, 200) && ok(64, 1) && ok(192, 8) && ok(192, -1));
  EXPECT_FALSE(ok(-64, -1) || ok(32, -1) || ok(256, -1) || ok(192, 9) || ok(0, 0) || ok(0, -2));
}

}  // namespace cutlass_ops
