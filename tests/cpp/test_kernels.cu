// The operators of ops.h on a GPU against a plain fp64 reference. Small sizes, so that
// compute-sanitizer gets through them.
//
// Results and scratch memory start as NaN, between guard bytes that must not change. Where M is a
// multiple of 16, scratch memory is not initialised: all that a kernel reads of it must have been
// written, which initcheck can see.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "cutlass_ops/pack.h"
#include "gpu_problems.cuh"

#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // what GoogleTest's TEST_P declares and leaves unused
#endif

namespace cutlass_ops {
namespace {

// ---- epilogue

class Epilogue : public Kernels, public testing::WithParamInterface<DataType> {};

double activated(double v, Activation activation, float low, float high) {
  switch (activation) {
    case Activation::kRelu:
      return std::max(v, 0.0);
    case Activation::kRelu6:
      return std::min(std::max(v, 0.0), 6.0);
    case Activation::kGelu:
      return 0.5 * v * (1 + std::erf(v / std::sqrt(2.0)));
    case Activation::kSilu:
      return v / (1 + std::exp(-v));
    case Activation::kGeluTanh:
      return 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
    case Activation::kClamp:
      return std::min(std::max(v, double(low)), double(high));
    default:
      return v;
  }
}

TEST_P(Epilogue, AddsBiasActivatesAndAddsTheResidual) {
  DataType const type = GetParam();
  // n = 200: whole 16-byte stores. n = 33: none. Few columns of K: one part; many: several.
  for (auto const& [n, k, m] : {std::tuple(200, 100, 20), std::tuple(33, 100, 5),
                                std::tuple(200, 700, 5), std::tuple(33, 700, 70)}) {
    Weight const w(n, k, 4, kWeightKinds[0], false);
    DeviceWeight const packed(w);
    Input const input = kInputs[0];
    std::vector<float> const x = random_floats(m, k, input.type);
    std::vector<double> const total = product(w, x, m, input);
    int const residual_stride = n + 3;
    std::vector<float> const bias = random_floats(1, n, type, 3),
                             residual = random_floats(m, residual_stride, type, 4);
    DeviceBytes const from(stored(x, input.type)), device_bias(stored(bias, type)),
        device_residual(stored(residual, type));
    for (Activation activation :
         {Activation::kNone, Activation::kRelu, Activation::kRelu6, Activation::kGelu,
          Activation::kSilu, Activation::kClamp, Activation::kGeluTanh}) {
      SCOPED_TRACE("activation " + std::to_string(int(activation)) + ", n " + std::to_string(n) +
                   ", k " + std::to_string(k));
      DeviceBytes const out(size_t(m) * n * size_of(type));
      GemmProblem p = problem(packed.view, from, m, input);
      p.out = out.data<void>();
      p.out_type = p.bias_type = p.residual_type = type;
      p.bias = device_bias.data<void>();
      p.residual = device_residual.data<void>();
      p.residual_stride = residual_stride;
      p.activation = activation;
      p.clamp_low = -0.5f, p.clamp_high = 0.75f;
      DeviceBytes const workspace(workspace_bytes(p));
      finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, nullptr));
      std::vector<double> exact(total.size());
      for (int row = 0; row < m; ++row)
        for (int j = 0; j < n; ++j)
          exact[size_t(row) * n + j] =
              activated(total[size_t(row) * n + j] + bias[j], activation, -0.5f, 0.75f) +
              residual[size_t(row) * residual_stride + j];
      expect_close(loaded(out, type), exact, false, type);
      EXPECT_TRUE(out.guards_are_whole());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Epilogue, OverflowsToInfinityOrSaturates) {
  DataType const type = GetParam();
  float const largest = type == DataType::kFloat16    ? 65504.0f
                        : type == DataType::kBFloat16 ? 0x1.fep127f
                                                      : 0x1.fffffep127f;
  int const n = 33, m = 5;
  Weight w(n, 16, 4, {Zero::kMiddle, -1, DataType::kFloat32}, true);
  std::fill(w.codes.begin(), w.codes.end(), uint8_t(9));  // ones
  for (int row = 0; row < n; ++row) w.scales[row] = row % 2 ? -1.0f : 1.0f;
  DeviceWeight const packed(w);
  Input const input = kInputs[1];
  std::vector<float> x(size_t(m) * 16, 0.0f), residual(size_t(m) * n);
  for (int row = 0; row < m; ++row) x[size_t(row) * 16] = rounded(largest / 2, DataType::kBFloat16);
  x[2 * 16 + 1] = std::numeric_limits<float>::quiet_NaN();
  for (int i = 0; i < m * n; ++i) residual[i] = i % n % 2 ? -largest : largest;
  DeviceBytes const from(stored(x, input.type)), device_residual(stored(residual, type));
  for (bool saturate : {false, true}) {
    DeviceBytes const out(size_t(m) * n * size_of(type));
    GemmProblem p = problem(packed.view, from, m, input);
    p.out = out.data<void>();
    p.out_type = p.residual_type = type;
    p.residual = device_residual.data<void>();
    p.residual_stride = n;
    p.saturate = saturate;
    DeviceBytes const workspace(workspace_bytes(p));
    finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, nullptr));
    std::vector<float> const y = loaded(out, type);
    for (int i = 0; i < m * n; ++i) {
      float const magnitude = saturate ? largest : std::numeric_limits<float>::infinity();
      float const expected = i / n == 2  ? std::numeric_limits<float>::quiet_NaN()
                             : i % n % 2 ? -magnitude
                                         : magnitude;
      ASSERT_TRUE(same(y[i], expected)) << "element " << i << ": " << y[i] << ", " << expected;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, Epilogue, testing::Values(DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32),
    [](auto const& info) { return "type_" + std::to_string(int(info.param)); });

// ---- the quantiser

class Quantizer : public Kernels, public testing::WithParamInterface<std::tuple<DataType, bool>> {};

// Rows of random numbers, zeros, constants, subnormals, ties, a NaN, infinities, and
// ranges that overflow.
std::vector<float> special_rows(int m, int k, DataType type) {
  std::vector<float> x = random_floats(m, k, type, 5);
  float const largest = type == DataType::kFloat16 ? 65504.0f : 0x1.fep127f;
  for (int row = 0; row < m; ++row)
    for (int j = 0; j < k; ++j) {
      float& v = x[size_t(row) * k + j];
      switch (row % 11) {
        case 1:
          v = 0;
          break;
        case 2:
          v = 3.7f;
          break;
        case 3:
          v = -0.1f;
          break;
        case 4:
          v *= 0x1p-126f;
          break;
        case 5:
          v = float(j % 255 - 127) * 0.5f;
          break;
        case 6:
          v = j == k - 1 ? std::numeric_limits<float>::quiet_NaN() : v;
          break;
        case 7:
          v = j == 0 ? std::numeric_limits<float>::infinity() : v;
          break;
        case 8:
          v = j == k / 2 ? -std::numeric_limits<float>::infinity() : v;
          break;
        case 9:
          v = j % 2 ? largest : -largest;
          break;
        case 10:
          v = j % 2 ? 0x1p-100f : -0x1p-101f;
          break;
        default:
          break;
      }
      v = rounded(v, type);
    }
  return x;
}

TEST_P(Quantizer, WritesTheSpecificationsCodesScalesAndZeroPoints) {
  auto const [type, symmetric] = GetParam();
  int const m = 33, stride = 48;
  for (int k : {7, 33, 128, 700, 4224})  // 4224: a row's range and its codes are two passes
    for (int block : {16, 32, 64, 128, -1})
      for (bool permuted : {false, true}) {
        SCOPED_TRACE("k " + std::to_string(k) + ", block " + std::to_string(block));
        int const k_pad = int(padded_k(k)), blocks = block == -1 ? 1 : k_pad / block;
        std::vector<float> const x = special_rows(m, k, type);
        std::vector<int32_t> perm;
        std::vector<float> tiles_per_cluster = x;
        if (permuted) {
          for (int j = 0; j < k; ++j) perm.push_back(j);
          std::shuffle(perm.begin(), perm.end(), std::mt19937(7));
          for (int row = 0; row < m; ++row)
            for (int j = 0; j < k; ++j)
              tiles_per_cluster[size_t(row) * k + j] = x[size_t(row) * k + perm[j]];
        }
        Quantized const q = quantized(tiles_per_cluster, m, k, block, symmetric);
        DeviceBytes const from(stored(x, type)), device_perm(perm), codes(size_t(m) * k_pad),
            scales(size_t(blocks) * stride * 4), zeros(size_t(blocks) * stride);
        QuantizeProblem p{
            from.data<void>(), type, k, m, k, permuted ? device_perm.data<int32_t>() : nullptr, {}};
        p.out = {codes.data<int8_t>(), scales.data<float>(),
                 symmetric ? nullptr : zeros.data<int8_t>(), block, stride};
        finish(quantize_activations(p, nullptr));
        std::vector<int8_t> const got_codes = codes.read<int8_t>(),
                                  got_zeros = zeros.read<int8_t>();
        std::vector<float> const got_scales = scales.read<float>();
        for (int row = 0; row < m; ++row) {
          for (int b = 0; b < blocks; ++b) {
            // Blocks that hold no column of x are blocks of zeros.
            bool const real = b < q.blocks;
            ASSERT_TRUE(same(got_scales[size_t(b) * stride + row],
                             real ? q.scales[row * q.blocks + b] : 1.0f))
                << "row " << row << ", block " << b << ": " << got_scales[size_t(b) * stride + row];
            if (!symmetric) {
              ASSERT_EQ(got_zeros[size_t(b) * stride + row], real ? q.zeros[row * q.blocks + b] : 0)
                  << "row " << row << ", block " << b;
            }
          }
          for (int j = 0; j < k_pad; ++j) {
            int const b = j / (block == -1 ? k_pad : block);
            int const expected = j < k          ? q.codes[size_t(row) * k + j]
                                 : b < q.blocks ? q.zeros[row * q.blocks + b]
                                                : 0;
            ASSERT_EQ(got_codes[size_t(row) * k_pad + j / 16 * 16 + activation_position(j)],
                      expected)
                << "row " << row << ", k " << j;
          }
        }
        EXPECT_TRUE(codes.guards_are_whole());
        EXPECT_TRUE(scales.guards_are_whole());
        EXPECT_TRUE(zeros.guards_are_whole());
      }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Quantizer,
                         testing::Combine(testing::Values(DataType::kFloat16, DataType::kBFloat16,
                                                          DataType::kFloat32),
                                          testing::Bool()),
                         [](auto const& info) {
                           return "type_" + std::to_string(int(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_symmetric" : "_asymmetric");
                         });

// ---- dequantise

class Dequantize : public Kernels, public testing::WithParamInterface<std::tuple<int, DataType>> {};

TEST_P(Dequantize, GivesEveryValueRoundedOnce) {
  auto const [bits, type] = GetParam();
  for (WeightKind const& kind : kWeightKinds)
    for (auto const& [n, k] : {std::pair(kN, kK), std::pair(33, 7)})
      for (bool permuted : {false, true}) {
        SCOPED_TRACE(kind.text() + ", " + std::to_string(n) + " x " + std::to_string(k));
        Weight const w(n, k, bits, kind, false, permuted);
        DeviceWeight const packed(w);
        DeviceBytes const out(size_t(n) * k * size_of(type));
        finish(dequantize({packed.view, out.data<void>(), type}, nullptr));
        std::vector<float> const y = loaded(out, type);
        for (int row = 0; row < n; ++row)
          for (int j = 0; j < k; ++j)
            ASSERT_EQ(y[size_t(row) * k + (permuted ? w.perm[j] : j)],
                      rounded(w.rounded_value(row, j), type))
                << "row " << row << ", k " << j;
        EXPECT_TRUE(out.guards_are_whole());
      }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Dequantize,
                         testing::Combine(testing::Values(2, 4, 8),
                                          testing::Values(DataType::kFloat16, DataType::kBFloat16,
                                                          DataType::kFloat32)),
                         [](auto const& info) {
                           return "w" + std::to_string(std::get<0>(info.param)) + "_type_" +
                                  std::to_string(int(std::get<1>(info.param)));
                         });

// ---- packing

TEST_F(Kernels, PackAsTheHostDoesAndUnpack) {
  for (int bits : {2, 4, 8}) {
    for (int n : {1, 70, 192}) {
      for (int k : {33, 128, 576}) {
        std::mt19937 random(uint32_t(n * 31 + k));
        std::vector<uint8_t> codes(size_t(n) * k), expected(size_t(packed_bytes(n, k, bits)));
        for (uint8_t& code : codes) code = uint8_t(random() & ((1u << bits) - 1));
        pack(codes.data(), expected.data(), n, k, bits);
        DeviceBytes const on_gpu(codes), packed(expected.size()), unpacked(codes.size());
        PackProblem problem{on_gpu.data<uint8_t>(), packed.data<uint8_t>(), k, 1, n, k, bits};
        Status status = pack(problem, nullptr);
        ASSERT_TRUE(status.ok()) << status.text;
        problem.codes = unpacked.data<uint8_t>();
        status = unpack(problem, nullptr);
        ASSERT_TRUE(status.ok()) << status.text;
        check(cudaDeviceSynchronize());
        EXPECT_EQ(packed.read<uint8_t>(), expected) << n << " x " << k << ", " << bits << " bits";
        EXPECT_EQ(unpacked.read<uint8_t>(), codes) << n << " x " << k << ", " << bits << " bits";
        EXPECT_TRUE(packed.guards_are_whole() && unpacked.guards_are_whole());
      }
    }
  }
}

// ---- errors

TEST_F(Kernels, UnsupportedProblemsAreRefusedBeforeAnythingIsLaunched) {
  Weight const w(kN, kK, 4, kWeightKinds[0], true);
  DeviceWeight const packed(w);
  DeviceBytes const x(stored(random_floats(5, kK, DataType::kFloat32), DataType::kFloat32)),
      out(5 * kN * 4);
  GemmProblem p = problem(packed.view, x, 5, {"fp32", DataType::kFloat32, ActQuant::kNone, true});
  p.out = out.data<void>();
  Status const status = mixed_gemm(p, {}, nullptr);
  EXPECT_EQ(status.code, Status::kUnsupported);
  EXPECT_NE(status.text.find("float32"), std::string::npos) << status.text;
  check(cudaDeviceSynchronize());
  EXPECT_EQ(out.read<uint8_t>(), std::vector<uint8_t>(out.bytes(), 0xff));
}

TEST(DeviceGuard, ReportsAMissingDevice) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  {
    DeviceGuard const there(0), missing(devices);
    EXPECT_TRUE(there.status().ok());
    EXPECT_EQ(missing.status().code, Status::kCuda);
    EXPECT_NE(missing.status().text.find("cudaSetDevice"), std::string::npos);
  }
  cudaGetLastError();
}

}  // namespace
}  // namespace cutlass_ops
