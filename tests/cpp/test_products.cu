// Products on the GPU against fp64 sums of the dequantised operands: every kind, kind of
// activations and kernel.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "cutlass_ops/zero_compensation.h"
#include "dispatch/spec.h"
#include "gpu_problems.cuh"

#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // what GoogleTest's TEST_P declares and leaves unused
#endif

namespace cutlass_ops {
namespace {

class Products : public Kernels, public testing::WithParamInterface<std::tuple<int, Input>> {
 protected:
  int const bits = std::get<0>(GetParam());
  Input const input = std::get<1>(GetParam());

  // Every format with an M for every BLOCK_M.
  void multiply_all(bool exact) {
    for (WeightKind const& kind : kWeightKinds) {
      Weight const w(kN, kK, bits, kind, exact);
      DeviceWeight const packed(w);
      for (int m : {5, 16, 20, 33, 70}) {
        SCOPED_TRACE(kind.text() + ", m " + std::to_string(m));
        std::vector<float> const x = exact ? exact_floats(m, kK, input.act_quant, input.symmetric)
                                           : random_floats(m, kK, input.type);
        multiply(w, packed, x, m, exact);
        if (HasFatalFailure()) return;
      }
    }
  }

  void multiply(Weight const& w, DeviceWeight const& packed, std::vector<float> const& x, int m,
                bool exact) {
    DeviceBytes const from(stored(x, input.type)), out(size_t(m) * w.n * 4);
    GemmProblem p = problem(packed.view, from, m, input);
    DeviceBytes const workspace(workspace_bytes(p),
                                m % 16 ? DeviceBytes::kNaN : DeviceBytes::kLeave);
    p.out = out.data<void>();
    finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, nullptr));
    expect_close(out.read<float>(), product(w, x, m, input), exact, DataType::kFloat32);
    EXPECT_TRUE(out.guards_are_whole());
    EXPECT_TRUE(workspace.guards_are_whole());
  }
};

TEST_P(Products, AreExactWithPowerOfTwoScales) { multiply_all(true); }

TEST_P(Products, AreWithinToleranceWithAnyScales) { multiply_all(false); }

TEST_P(Products, OfAnActOrder) {
  Weight const w(kN, kK, bits, kWeightKinds[4], false, true);
  for (int m : {5, 70}) multiply(w, DeviceWeight(w), random_floats(m, kK, input.type), m, false);
}

TEST_P(Products, OfTinyAndOddShapes) {
  for (auto const& [n, k] :
       {std::pair(1, 1), std::pair(33, 7), std::pair(65, 129), std::pair(130, 100)}) {
    Weight const w(n, k, bits, kWeightKinds[4], false);
    SCOPED_TRACE(std::to_string(n) + " x " + std::to_string(k));
    for (int m : {1, 33}) multiply(w, DeviceWeight(w), random_floats(m, k, input.type), m, false);
  }
}

// Few rows of x and 17 K tiles give few enough CTAs on any GPU to split K.
TEST_P(Products, SplitK) {
  Weight const w(kN, 2100, bits, kWeightKinds[0], true);
  DeviceWeight const packed(w);
  Device device;
  finish(current_device(&device));
  for (int m : {20, 70}) {
    std::vector<float> const x = exact_floats(m, w.k, input.act_quant, input.symmetric);
    DeviceBytes const from(stored(x, input.type));
    Plan chosen;
    finish(plan(problem(packed.view, from, m, input), device, &chosen));
    EXPECT_GT(chosen.slices, 1);
    multiply(w, packed, x, m, true);
  }
}

// K that is a multiple of 8 and groups of at least a tile, as the Hopper kernels take them. The
// values of M reach each of their tiles, on 66 clusters with K split or not; elsewhere the portable
// kernels answer.
TEST_P(Products, OfTheShapesThatHopperTakes) {
  struct Case {
    int n, k, m;
    WeightKind kind;
  };
  Device device;
  finish(current_device(&device));
  std::set<std::pair<std::string, int>> tiles;
  for (Case const& c :
       {Case{520, 712, 40, kWeightKinds[0]}, Case{520, 712, 40, kWeightKinds[1]},
        Case{520, 712, 40, kWeightKinds[2]}, Case{520, 712, 24, kWeightKinds[0]},
        Case{520, 712, 24, kWeightKinds[1]}, Case{17000, 136, 40, kWeightKinds[0]},
        Case{4160, 136, 300, kWeightKinds[1]}, Case{8320, 136, 300, kWeightKinds[0]},
        Case{8320, 136, 170, kWeightKinds[0]}}) {
    SCOPED_TRACE(std::to_string(c.m) + " x " + std::to_string(c.n) + " x " + std::to_string(c.k) +
                 ", " + c.kind.text());
    Weight const w(c.n, c.k, bits, c.kind, true);
    DeviceWeight const packed(w);
    std::vector<float> const x = exact_floats(c.m, c.k, input.act_quant, input.symmetric);
    DeviceBytes const from(stored(x, input.type));
    Plan chosen;
    finish(plan(problem(packed.view, from, c.m, input), device, &chosen));
    tiles.insert({chosen.kernel, chosen.block_m});
    multiply(w, packed, x, c.m, true);
    if (HasFatalFailure()) return;
  }
  // BLOCK_M = 64, 128 and 160 or 176, and 96 for int8.
  if (device.architecture == 90 && device.multiprocessors == 132 && input.symmetric && bits > 2)
    EXPECT_GE(tiles.size(), 3u);
}

// The shapes that reach every cluster of decode_gemm: single CTAs, and 2, 4 and 8 that split K; x
// copied unchanged (K is a multiple of 8), and not; row panels shared by several warps, one per
// warp, and fewer than the clusters. The kernel is called directly, whatever dispatch chooses.
TEST_P(Products, OfTheShapesThatDecodeTakes) {
  struct Case {
    int n, k, m, cluster;
    WeightKind kind;
  };
  Device device;
  finish(current_device(&device));
  if (device.architecture != 90)
    GTEST_SKIP() << "decode_gemm is for sm_90; this GPU is sm_" << device.architecture;
  if (bits == 2 && input.act_quant != ActQuant::kNone)
    GTEST_SKIP() << "decode_gemm multiplies 2-bit codes by floats alone";
  size_t ran = 0;
  KernelSpec const& decode_gemm = *find_kernel("decode_gemm");
  for (Candidate const& candidate : decode_gemm.candidates({})) {
    int const most = candidate.tile.block_m;
    if (most == 4) continue;  // a code book's
    for (Case const& c :
         {Case{200, 264, 3, 1, kWeightKinds[0]}, Case{8500, 256, 2, 1, kWeightKinds[1]},
          Case{4160, 1000, 4, 2, kWeightKinds[3]}, Case{1024, 3096, 2, 4, kWeightKinds[4]},
          Case{136, 2100, 1, 8, kWeightKinds[5]}, Case{136, 2104, 4, 8, kWeightKinds[2]}}) {
      int const m = c.m;
      SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(c.n) + " x " + std::to_string(c.k) +
                   ", " + c.kind.text());
      Weight const w(c.n, c.k, bits, c.kind, true);
      DeviceWeight const packed(w);
      std::vector<float> const x = exact_floats(m, c.k, input.act_quant, input.symmetric);
      DeviceBytes const from(stored(x, input.type)), out(size_t(m) * w.n * 4);
      GemmProblem p = problem(packed.view, from, m, input);
      p.out = out.data<void>();
      Plan chosen;
      ASSERT_TRUE(plan_candidate(p, device, decode_gemm, candidate, &chosen));
      if (device.multiprocessors == 132 && bits == 4) EXPECT_EQ(chosen.cluster_size, c.cluster);
      finish(decode_gemm.launch(p, chosen, nullptr, nullptr));
      expect_close(out.read<float>(), product(w, x, m, input), true, DataType::kFloat32);
      EXPECT_TRUE(out.guards_are_whole());
      if (HasFatalFailure()) return;
      ++ran;
    }
  }
  EXPECT_GT(ran, 0u);
}

TEST_P(Products, OfRowsThatAreApart) {
  int const m = 9, stride = kK + 5;
  Weight const w(kN, kK, bits, kWeightKinds[0], false);
  DeviceWeight const packed(w);
  std::vector<float> const x = random_floats(m, kK, input.type);
  // The first row starts at an odd address, and NaN is between the rows.
  std::vector<float> apart(size_t(m) * stride + 1, std::numeric_limits<float>::quiet_NaN());
  for (int row = 0; row < m; ++row)
    std::copy_n(x.begin() + row * kK, kK, apart.begin() + 1 + row * stride);
  DeviceBytes const from(stored(apart, input.type)), out(size_t(m) * kN * 4);
  GemmProblem p = problem(packed.view, from, m, input);
  p.x = from.data<uint8_t>() + size_of(input.type);
  p.x_stride = stride;
  p.out = out.data<void>();
  DeviceBytes const workspace(workspace_bytes(p));
  finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, nullptr));
  expect_close(out.read<float>(), product(w, x, m, input), false, DataType::kFloat32);
}

TEST_P(Products, AreTheSameBitsOnAnotherStreamAndOfActivationsQuantizedBefore) {
  int const m = 33;
  Weight const w(kN, kK, bits, kWeightKinds[4], false);
  DeviceWeight const packed(w);
  std::vector<float> const x = random_floats(m, kK, input.type);
  DeviceBytes const from(stored(x, input.type)), first(size_t(m) * kN * 4),
      second(size_t(m) * kN * 4);
  GemmProblem p = problem(packed.view, from, m, input);
  DeviceBytes const workspace(workspace_bytes(p));
  p.out = first.data<void>();
  finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, nullptr));

  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  p.out = second.data<void>();
  int const block = block_of(input.act_quant, 32), stride = 48;
  size_t const blocks = block == -1 ? 1 : size_t(padded_k(kK)) / block;
  DeviceBytes const codes(size_t(m) * padded_k(kK)), scales(blocks * stride * 4),
      zeros(blocks * stride);
  check(cudaDeviceSynchronize());  // the memory was poisoned on the null stream, which this one
                                   // does not wait for
  if (input.act_quant != ActQuant::kNone) {
    QuantizedActivations const q{codes.data<int8_t>(), scales.data<float>(),
                                 input.symmetric ? nullptr : zeros.data<int8_t>(), block, stride};
    ASSERT_TRUE(
        quantize_activations({from.data<void>(), input.type, kK, m, kK, nullptr, q}, stream).ok());
    p.quantized = q;
    p.x = nullptr;
  }
  finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, stream));
  check(cudaStreamDestroy(stream));
  EXPECT_EQ(first.read<uint32_t>(), second.read<uint32_t>());
}

// Zero points of x with 16-bit results need column sums of the weight: stored ones, or sums
// made by the product.
TEST_P(Products, AreTheSameBitsWithColumnSumsOfTheWeight) {
  if (bits == 2) GTEST_SKIP() << "no kernel reads column sums of 2-bit codes";
  Weight const w(4160, 2200, bits, kWeightKinds[0], false);
  DeviceWeight const packed(w);
  int const m = 200;  // for which Hopper has corrected tiles, here of two windows of int4
  DeviceBytes const from(stored(random_floats(m, w.k, input.type), input.type));
  GemmProblem p = problem(packed.view, from, m, input);
  p.out_type = DataType::kFloat16;
  DeviceBytes const colsums(size_t(colsum_bytes(packed.view)));
  finish(weight_colsum(packed.view, colsums.data<void>(), nullptr));
  EXPECT_TRUE(colsums.guards_are_whole());
  std::vector<uint16_t> results[2];
  for (bool has_sums : {false, true}) {
    if (has_sums) place_colsums(&p.weight, colsums.data<void>());
    DeviceBytes const out(size_t(m) * w.n * 2), workspace(workspace_bytes(p));
    p.out = out.data<void>();
    finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, nullptr));
    EXPECT_TRUE(out.guards_are_whole());
    EXPECT_TRUE(workspace.guards_are_whole());
    results[has_sums] = out.read<uint16_t>();
  }
  EXPECT_EQ(results[0], results[1]);
  Device device;
  Plan reads;
  finish(current_device(&device));
  finish(plan(p, device, &reads));
  bool const hopper = device.architecture == 90;
  EXPECT_EQ(reads.compensates, hopper && input.act_quant != ActQuant::kNone && !input.symmetric);
  if (reads.compensates) {  // a plan is for weights like the one that it was made for
    p.weight = packed.view;
    DeviceBytes const workspace(reads.workspace);
    EXPECT_EQ(mixed_gemm(p, reads, {workspace.data<void>(), workspace.bytes()}, nullptr).code,
              Status::kInvalid);
  }
}

TEST_P(Products, OfNoRowsWriteNothing) {
  Weight const w(kN, kK, bits, kWeightKinds[0], true);
  DeviceWeight const packed(w);
  DeviceBytes const out(64);
  GemmProblem p = problem(packed.view, out, 0, input);
  p.out = out.data<void>();
  finish(mixed_gemm(p, {}, nullptr));
  EXPECT_EQ(out.read<uint8_t>(), std::vector<uint8_t>(64, 0xff));
}

TEST_P(Products, NeedTheirWorkspace) {
  int const m = 20, k = 2100;
  Weight const w(kN, k, bits, kWeightKinds[0], true);
  DeviceWeight const packed(w);
  DeviceBytes const x(stored(random_floats(m, k, input.type), input.type)), out(m * kN * 4);
  GemmProblem p = problem(packed.view, x, m, input);
  p.out = out.data<void>();
  size_t const bytes = workspace_bytes(p);
  ASSERT_GT(bytes, 0u);  // K is split
  Status const status = mixed_gemm(p, {out.data<void>(), bytes - 1}, nullptr);
  EXPECT_EQ(status.code, Status::kInvalid);
  for (std::string const& word : {std::to_string(bytes - 1), std::to_string(bytes),
                                  std::string("workspace"), std::string("k=2100")})
    EXPECT_NE(status.text.find(word), std::string::npos) << status.text;
  check(cudaDeviceSynchronize());
  EXPECT_EQ(out.read<uint8_t>(), std::vector<uint8_t>(out.bytes(), 0xff));
}

INSTANTIATE_TEST_SUITE_P(Kernels, Products,
                         testing::Combine(testing::Values(2, 4, 8), testing::ValuesIn(kInputs)),
                         [](auto const& info) {
                           return "w" + std::to_string(std::get<0>(info.param)) + "_" +
                                  std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace cutlass_ops
