// A weight from quantisers' tensors to the packed one, and products with it on the host.
#include "cutlass_ops/weight.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cutlass_ops/cpu.h"
#include "cutlass_ops/layout.h"

namespace cutlass_ops {
namespace {

struct Source {
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales, offsets, codebook;
  CanonicalWeight weight;

  Source(int n, int k, Format format, int group_size, bool has_zeros, bool has_offsets) {
    int const groups = group_size == -1 ? 1 : (k + group_size - 1) / group_size;
    int const largest = (1 << info(format).bits) - 1;
    for (int i = 0; i < n * k; ++i) codes.push_back(uint8_t((i * 7 + i / k) & largest));
    for (int i = 0; i < n * groups; ++i) {
      scales.push_back(std::ldexp(i % 2 ? 1.0f : -1.0f, i % 5 - 2));
      zeros.push_back(uint8_t((i * 11) & largest));
      offsets.push_back(float(i % 13 - 6));
    }
    for (int i = 0; i < 16; ++i) codebook.push_back(float(i * i - 40));
    weight.n = n, weight.k = k, weight.format = format, weight.group_size = group_size;
    weight.codes = codes.data(), weight.scales = scales.data();
    weight.scale_type = DataType::kFloat32;
    if (has_zeros) weight.zeros = zeros.data();
    if (has_offsets) weight.offsets = offsets.data(), weight.offset_type = DataType::kFloat32;
    if (info(format).codebook) weight.codebook = codebook.data();
  }

  float value(int row, int column) const {
    int const groups =
        weight.group_size == -1 ? 1 : (weight.k + weight.group_size - 1) / weight.group_size;
    int const group = row * groups + (weight.group_size == -1 ? 0 : column / weight.group_size);
    int const code = codes[size_t(row * weight.k + column)];
    if (weight.codebook) return scales[group] * codebook[code];
    int const zero = weight.zeros ? zeros[group] : 1 << (info(weight.format).bits - 1);
    return scales[group] * float(code - zero) + (weight.offsets ? offsets[group] : 0.0f);
  }
};

// The buffer from a multiple of 16 bytes on.
struct Packed {
  std::vector<std::max_align_t> memory;
  explicit Packed(CanonicalWeight const& weight)
      : memory(weight_bytes(weight) / sizeof(std::max_align_t) + 1) {}
  void* data() { return memory.data(); }
};

TEST(Weight, ProductsOnTheHostAreThoseOfItsValues) {
  for (Format format : {Format::kInt4, Format::kInt8, Format::kCodebook}) {
    for (int group_size : {16, 32, 128, -1}) {
      for (int kind = 0; kind < (info(format).integers ? 3 : 1); ++kind) {
        int const n = 70, k = 200, m = 3;
        Source const source(n, k, format, group_size, kind == 1, kind == 2);
        Packed packed(source.weight);
        Status const status = pack_weight(source.weight, packed.data());
        ASSERT_TRUE(status.ok()) << status.text;
        std::vector<float> x, bias(n, 0.5f), y(m * n);
        for (int i = 0; i < m * k; ++i) x.push_back(float(i % 7 - 3));
        GemmProblem problem;
        problem.m = m, problem.weight = make_weight(source.weight, packed.data());
        problem.x = x.data(), problem.x_type = DataType::kFloat32, problem.x_stride = k;
        problem.bias = bias.data(), problem.bias_type = DataType::kFloat32;
        problem.out = y.data(), problem.out_type = DataType::kFloat32;
        Status const done = cpu_gemm(problem, 2);
        ASSERT_TRUE(done.ok()) << done.text;
        for (int row = 0; row < m; ++row) {
          for (int feature = 0; feature < n; ++feature) {
            float expected = 0.5f;  // all terms are multiples of 1/4 and small: sums are exact
            for (int column = 0; column < k; ++column)
              expected += x[size_t(row * k + column)] * source.value(feature, column);
            ASSERT_EQ(y[size_t(row * n + feature)], expected)
                << "format " << int(format) << " group_size " << group_size << " kind " << kind
                << " at " << row << ", " << feature;
          }
        }
      }
    }
  }
}

TEST(Weight, PaddingIsZero) {
  Source const source(3, 5, Format::kInt8, -1, true, false);
  Packed packed(source.weight);
  std::memset(packed.data(), 0x55, weight_bytes(source.weight));
  ASSERT_TRUE(pack_weight(source.weight, packed.data()).ok());
  PackedWeight const w = make_weight(source.weight, packed.data());
  for (int row = 3; row < 64; ++row) {
    EXPECT_EQ(static_cast<float const*>(w.scales)[group_row(row)], 0.0f);
    EXPECT_EQ(w.zeros[group_row(row)], 0);
  }
  for (int row = 0; row < 3; ++row)
    EXPECT_EQ(w.zeros[group_row(row)], int(source.zeros[row]) - 128);
}

void expect_refused(CanonicalWeight const& weight, void* buffer, char const* text) {
  Status const status = pack_weight(weight, buffer);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.text.find(text), std::string::npos) << status.text;
}

TEST(Weight, NamesTheFieldThatDoesNotFit) {
  Source source(70, 200, Format::kInt4, 128, true, false);
  Packed packed(source.weight);
  auto const changed = [&](auto change) {
    CanonicalWeight weight = source.weight;
    change(weight);
    return weight;
  };
  expect_refused(source.weight, nullptr, "buffer");
  expect_refused(source.weight, static_cast<char*>(packed.data()) + 8, "buffer");
  expect_refused(changed([](auto& w) { w.codes = nullptr; }), packed.data(), "codes");
  expect_refused(changed([](auto& w) { w.scales = nullptr; }), packed.data(), "scales");
  expect_refused(changed([](auto& w) { w.n = 0; }), packed.data(), "shape is [0, 200]");
  expect_refused(changed([](auto& w) { w.group_size = 48; }), packed.data(), "group_size is 48");
  expect_refused(changed([](auto& w) { w.format = Format(99); }), packed.data(), "format 99");
  expect_refused(changed([](auto& w) { w.offsets = w.scales; }), packed.data(), "offset_type");
  expect_refused(changed([](auto& w) { w.scale_type = DataType::kNone; }), packed.data(),
                 "scale_type");
  EXPECT_EQ(weight_bytes(changed([](auto& w) { w.format = Format(99); })), 0u);
  for (int group_size : {0, 7, 48})
    EXPECT_EQ(weight_bytes(changed([=](auto& w) { w.group_size = group_size; })), 0u);
  EXPECT_EQ(weight_bytes(changed([](auto& w) { w.k = 0; })), 0u);
  source.zeros[3] = 16;
  expect_refused(source.weight, packed.data(),
                 "zeros[1, 1] is 16; accepted with bits = 4: 0 to 15");
  source.zeros[3] = 15, source.codes[201] = 200;
  expect_refused(source.weight, packed.data(), "codes[1, 1] is 200");
}

TEST(Weight, RefusesOptionsThatHostProductsLack) {
  Source const source(70, 200, Format::kInt4, 128, false, false);
  Packed packed(source.weight);
  ASSERT_TRUE(pack_weight(source.weight, packed.data()).ok());
  std::vector<float> x(200), y(70);
  GemmProblem problem;
  problem.m = 1, problem.weight = make_weight(source.weight, packed.data());
  problem.x = x.data(), problem.x_type = DataType::kFloat32, problem.x_stride = 200;
  problem.out = y.data(), problem.out_type = DataType::kFloat32;
  ASSERT_TRUE(cpu_gemm(problem).ok());
  GemmProblem empty = problem;
  empty.m = 0, empty.x = nullptr, empty.out = nullptr;  // what an empty std::vector has
  EXPECT_TRUE(cpu_gemm(empty).ok());
  auto const refused = [&](auto change, char const* text) {
    GemmProblem changed = problem;
    change(changed);
    Status const status = cpu_gemm(changed);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.text.find(text), std::string::npos) << status.text;
  };
  refused([](auto& p) { p.activation = Activation::kRelu; }, "an activation");
  refused([](auto& p) { p.saturate = true; }, "saturate");
  refused([&](auto& p) { p.residual = y.data(), p.residual_type = DataType::kFloat32; },
          "a residual");
  refused([](auto& p) { p.out = nullptr; }, "out");
  refused([](auto& p) { p.m = 2, p.x_stride = 100; }, "x_stride is 100");
  Status const status = cpu_gemm(problem, -1);
  EXPECT_NE(status.text.find("threads is -1"), std::string::npos) << status.text;
}

}  // namespace
}  // namespace cutlass_ops
