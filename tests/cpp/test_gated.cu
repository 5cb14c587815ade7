// Products of gated weights on the GPU against fp64 products of their rows.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "cutlass_ops/ops.h"
#include "gpu_problems.cuh"

#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // what GoogleTest's TEST_P declares and leaves unused
#endif

namespace cutlass_ops {
namespace {

class Gated : public Kernels, public testing::WithParamInterface<std::tuple<int, Input>> {
 protected:
  int const bits = std::get<0>(GetParam());
  Input const input = std::get<1>(GetParam());

  // relu(gate + bias) * (up + bias) + residual of a weight of which rows 16 i to 16 i + 7 are
  // gate's, the next eight up's. Every sum is exact. Whether K was split.
  bool multiply(Weight const& w, int m, DataType out_type) {
    DeviceWeight packed(w);
    packed.view.gated = true;
    int const n = w.n / 2, residual_stride = n + 3;
    std::vector<float> const x = exact_floats(m, w.k, input.act_quant, input.symmetric);
    std::vector<float> bias(size_t(w.n)), residual(size_t(m) * residual_stride);
    for (int i = 0; i < w.n; ++i) bias[size_t(i)] = float(i % 7 - 3);
    for (size_t i = 0; i < residual.size(); ++i) residual[i] = float(int(i % 5) - 2);
    DeviceBytes const from(stored(x, input.type)), biases(stored(bias, DataType::kFloat32)),
        added(stored(residual, DataType::kFloat16)), out(size_t(m) * n * size_of(out_type));
    GemmProblem p = problem(packed.view, from, m, input);
    p.out = out.data<void>(), p.out_type = out_type;
    p.bias = biases.data<void>(), p.bias_type = DataType::kFloat32;
    p.residual = added.data<void>(), p.residual_type = DataType::kFloat16,
    p.residual_stride = residual_stride;
    p.activation = Activation::kRelu, p.exact = true;
    Device device;
    Plan chosen;
    EXPECT_TRUE(current_device(&device).ok());
    EXPECT_TRUE(plan(p, device, &chosen).ok());
    DeviceBytes const workspace(chosen.workspace);
    finish(mixed_gemm(p, chosen, {workspace.data<void>(), workspace.bytes()}, nullptr));
    std::vector<double> const sums = product(w, x, m, input);
    std::vector<float> const y = loaded(out, out_type);
    int wrong = 0;
    for (int row = 0; row < m; ++row) {
      for (int i = 0; i < n; ++i) {
        int const gate = i / 8 * 16 + i % 8, up = gate + 8;
        auto const sum = [&](int column) {
          return float(sums[size_t(row) * w.n + column]) + bias[size_t(column)];
        };
        float volatile factors = std::max(sum(gate), 0.0f) * sum(up);
        float const expected =
            rounded(factors + residual[size_t(row) * residual_stride + i], out_type);
        float const found = y[size_t(row) * n + i];
        if (!same(found, expected) && ++wrong < 5)
          ADD_FAILURE() << "row " << row << ", output " << i << ": " << found << ", not "
                        << expected;
      }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(out.guards_are_whole());
    EXPECT_TRUE(workspace.guards_are_whole());
    return chosen.slices > 1 && chosen.tail_tiles == 0;
  }
};

TEST_P(Gated, AreExactProductsOfTheirFactors) {
  for (WeightKind const& kind : {kWeightKinds[0], kWeightKinds[1], kWeightKinds[4]}) {
    for (DataType type : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
      for (auto const& [n, k, m] : {std::tuple(16, 136, 1), std::tuple(208, 712, 5),
                                    std::tuple(208, 700, 40), std::tuple(2000, 136, 170)}) {
        SCOPED_TRACE(kind.text() + ", " + std::to_string(m) + " x " + std::to_string(n) + " x " +
                     std::to_string(k));
        multiply(Weight(n, k, bits, kind, true), m, type);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Gated, OfSlicesOfK) {
  for (int m : {20, 70})
    EXPECT_TRUE(multiply(Weight(208, 2100, bits, kWeightKinds[0], true), m, DataType::kFloat16));
}

INSTANTIATE_TEST_SUITE_P(All, Gated,
                         testing::Combine(testing::Values(2, 4, 8), testing::ValuesIn(kInputs)),
                         [](auto const& info) {
                           return "W" + std::to_string(std::get<0>(info.param)) + "_" +
                                  std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace cutlass_ops
