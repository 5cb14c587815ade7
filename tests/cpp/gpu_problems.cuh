// Memory of the GPU with guards, weights, activations and their exact products, for the
// tests of kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "cutlass_ops/pack.h"

namespace cutlass_ops {

// ---- memory on the GPU

inline void check(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(cudaGetErrorName(error)) + ": " +
                             cudaGetErrorString(error));
}

class DeviceBytes {
 public:
  enum Fill { kNaN, kLeave };

  explicit DeviceBytes(size_t bytes, Fill fill = kNaN) : bytes_(bytes) {
    check(cudaMalloc(&block_, bytes + 2 * kGuard));
    check(cudaMemset(block_, kGuardByte, kGuard));
    check(cudaMemset(data<uint8_t>() + bytes, kGuardByte, kGuard));
    if (fill == kNaN && bytes) check(cudaMemset(data<uint8_t>(), 0xff, bytes));
  }
  template <class T>
  explicit DeviceBytes(std::vector<T> const& values) : DeviceBytes(values.size() * sizeof(T)) {
    check(cudaMemcpy(data<T>(), values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  DeviceBytes(DeviceBytes const&) = delete;
  DeviceBytes& operator=(DeviceBytes const&) = delete;
  ~DeviceBytes() { cudaFree(block_); }

  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(block_) + kGuard);
  }
  size_t bytes() const { return bytes_; }

  template <class T>
  std::vector<T> read() const {
    std::vector<T> values(bytes_ / sizeof(T));
    check(cudaMemcpy(values.data(), data<T>(), bytes_, cudaMemcpyDeviceToHost));
    return values;
  }

  bool guards_are_whole() const {
    std::vector<uint8_t> guards(2 * kGuard);
    check(cudaMemcpy(guards.data(), block_, kGuard, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(guards.data() + kGuard, data<uint8_t>() + bytes_, kGuard,
                     cudaMemcpyDeviceToHost));
    return std::all_of(guards.begin(), guards.end(),
                       [](uint8_t byte) { return byte == kGuardByte; });
  }

 private:
  static constexpr size_t kGuard = 256;  // keeps the alignment of the data
  static constexpr uint8_t kGuardByte = 0xa5;
  void* block_ = nullptr;
  size_t bytes_;
};

// ---- numbers as they are stored

inline int size_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// To the nearest number of the type.
inline float rounded(float v, DataType type) {
  if (type == DataType::kFloat16) return __half2float(__float2half_rn(v));
  if (type == DataType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(v));
  return v;
}

inline std::vector<uint8_t> stored(std::vector<float> const& values, DataType type) {
  std::vector<uint8_t> bytes(values.size() * size_of(type));
  for (size_t i = 0; i < values.size(); ++i) {
    uint8_t* to = bytes.data() + i * size_of(type);
    if (type == DataType::kFloat16) {
      __half const h = __float2half_rn(values[i]);
      std::memcpy(to, &h, 2);
    } else if (type == DataType::kBFloat16) {
      __nv_bfloat16 const h = __float2bfloat16_rn(values[i]);
      std::memcpy(to, &h, 2);
    } else {
      std::memcpy(to, &values[i], 4);
    }
  }
  return bytes;
}

inline std::vector<float> loaded(DeviceBytes const& memory, DataType type) {
  std::vector<uint8_t> const bytes = memory.read<uint8_t>();
  std::vector<float> values(bytes.size() / size_of(type));
  for (size_t i = 0; i < values.size(); ++i) {
    uint8_t const* from = bytes.data() + i * size_of(type);
    if (type == DataType::kFloat16) {
      __half h;
      std::memcpy(&h, from, 2);
      values[i] = __half2float(h);
    } else if (type == DataType::kBFloat16) {
      __nv_bfloat16 h;
      std::memcpy(&h, from, 2);
      values[i] = __bfloat162float(h);
    } else {
      std::memcpy(&values[i], from, 4);
    }
  }
  return values;
}

inline bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// ---- a weight, on the host and on the GPU

enum class Zero { kMiddle, kInteger, kReal };

struct WeightKind {
  Zero zero;
  int group_size;
  DataType scale_type;

  std::string text() const {
    return std::string(zero == Zero::kMiddle    ? "symmetric"
                       : zero == Zero::kInteger ? "zeros"
                                                : "offsets") +
           ", group " + std::to_string(group_size);
  }
};

// Formats of both families of each kernel: whole tiles without offsets, and the others.
inline WeightKind const kWeightKinds[] = {
    {Zero::kMiddle, 128, DataType::kFloat16}, {Zero::kInteger, 256, DataType::kBFloat16},
    {Zero::kMiddle, -1, DataType::kFloat32},  {Zero::kReal, 128, DataType::kFloat16},
    {Zero::kInteger, 32, DataType::kFloat16}, {Zero::kReal, 64, DataType::kFloat32}};

struct Weight {
  int n, k, bits;
  WeightKind kind;
  bool exact;

  int groups, group;  // on the host: [n][groups], each of `group` columns
  std::vector<uint8_t> codes;
  std::vector<float> scales, offsets;
  std::vector<int> zeros;
  std::vector<int32_t> perm;

  // Scales of both signs: 1/4, 1/2 and 1 if `exact`, any if not.
  Weight(int n_, int k_, int bits_, WeightKind kind_, bool exact_, bool permuted = false)
      : n(n_), k(k_), bits(bits_), kind(kind_), exact(exact_) {
    std::mt19937 random(uint32_t(n * 31 + k * 7 + bits + exact));
    group = kind.group_size == -1 ? k : kind.group_size;
    groups = (k + group - 1) / group;
    codes.resize(size_t(n) * k);
    for (uint8_t& code : codes) code = uint8_t(random() & ((1u << bits) - 1));
    for (int i = 0; i < n * groups; ++i) {
      float const magnitude = exact ? std::ldexp(1.0f, -int(random() % 3))
                                    : 0.001f + 0.02f * float(random() % 4096) / 4096;
      scales.push_back(rounded(random() % 2 ? magnitude : -magnitude, kind.scale_type));
      float const offset =
          exact ? float(int(random() % 13) - 6) / 4 : (float(random() % 4096) / 4096 - 0.5f) * 0.2f;
      offsets.push_back(kind.zero == Zero::kReal ? rounded(offset, kind.scale_type) : 0.0f);
      zeros.push_back(kind.zero == Zero::kInteger ? int(random() & ((1u << bits) - 1))
                                                  : 1 << (bits - 1));
    }
    if (permuted) {
      for (int j = 0; j < k; ++j) perm.push_back(j);
      std::shuffle(perm.begin(), perm.end(), random);
    }
  }

  int index(int row, int column) const { return row * groups + column / group; }
  int integer(int row, int column) const {
    return codes[size_t(row) * k + column] - zeros[index(row, column)];
  }
  double value(int row, int column) const {
    return double(scales[index(row, column)]) * integer(row, column) + offsets[index(row, column)];
  }
  // As a dequantiser rounds it: product and sum each to fp32.
  float rounded_value(int row, int column) const {
    float volatile product = scales[index(row, column)] * float(integer(row, column));
    return kind.zero == Zero::kReal ? product + offsets[index(row, column)] : product;
  }
};

// [n][groups] to [padded groups][n_pad] in the order of group_row.
template <class T>
inline std::vector<T> group_vectors(Weight const& w, std::vector<T> const& rows) {
  int const padded_groups = w.group < kKPerTile ? int(padded_k(w.k)) / w.group : w.groups;
  int const n_pad = int(padded_rows(w.n));
  std::vector<T> packed(size_t(w.kind.group_size == -1 ? 1 : padded_groups) * n_pad);
  for (int row = 0; row < w.n; ++row)
    for (int g = 0; g < w.groups; ++g)
      packed[size_t(g) * n_pad + row / kRowsPerPanel * kRowsPerPanel + group_row(row)] =
          rows[size_t(row) * w.groups + g];
  return packed;
}

inline std::vector<uint8_t> packed_codes(Weight const& w) {
  std::vector<uint8_t> packed(size_t(packed_bytes(w.n, w.k, w.bits)));
  pack(w.codes.data(), packed.data(), w.n, w.k, w.bits, 1);
  return packed;
}

inline std::vector<int8_t> packed_zeros(Weight const& w) {
  std::vector<int8_t> centred;
  for (int zero : w.zeros) centred.push_back(int8_t(zero - (1 << (w.bits - 1))));
  return group_vectors(w, centred);
}

class DeviceWeight {
 public:
  explicit DeviceWeight(Weight const& w)
      : codes_(packed_codes(w)),
        scales_(stored(group_vectors(w, w.scales), w.kind.scale_type)),
        zeros_(packed_zeros(w)),
        offsets_(stored(group_vectors(w, w.offsets), w.kind.scale_type)),
        perm_(w.perm) {
    view.codes = codes_.data<uint8_t>();
    view.scales = scales_.data<void>();
    if (w.kind.zero == Zero::kInteger) view.zeros = zeros_.data<int8_t>();
    if (w.kind.zero == Zero::kReal) view.offsets = offsets_.data<void>();
    if (!w.perm.empty()) view.perm = perm_.data<int32_t>();
    view.n = w.n, view.k = w.k,
    view.format = w.bits == 2   ? Format::kInt2
                  : w.bits == 4 ? Format::kInt4
                                : Format::kInt8;
    view.group_size = w.kind.group_size;
    view.scale_type = w.kind.scale_type;
    view.offset_type = w.kind.zero == Zero::kReal ? w.kind.scale_type : DataType::kNone;
  }
  PackedWeight view;

 private:
  DeviceBytes codes_, scales_, zeros_, offsets_, perm_;
};

// ---- activations: the expected results of the quantiser

struct Quantized {
  int m, k, block, blocks;  // block in columns, never -1
  std::vector<int> codes;   // [m][k]
  std::vector<float> scales;
  std::vector<int> zeros;  // [m][blocks]

  double value(int row, int column) const {
    int const b = row * blocks + column / block;
    return double(scales[b]) * (codes[size_t(row) * k + column] - zeros[b]);
  }
};

// Each operation rounded to fp32 separately: `volatile` keeps a compiler from fusing them.
inline Quantized quantized(std::vector<float> const& x, int m, int k, int block, bool symmetric) {
  Quantized q{m, k, block == -1 ? k : block, 0, std::vector<int>(x.size()), {}, {}};
  q.blocks = (k + q.block - 1) / q.block;
  for (int row = 0; row < m; ++row)
    for (int b = 0; b < q.blocks; ++b) {
      int const begin = b * q.block, end = std::min(k, begin + q.block);
      float lo = 0, hi = 0;
      bool finite = true;
      for (int j = begin; j < end; ++j) {
        float const v = x[size_t(row) * k + j];
        finite = finite && std::isfinite(v);
        lo = std::min(lo, v), hi = std::max(hi, v);
      }
      float const span = symmetric ? std::max(hi, -lo) : hi - lo,
                  steps = symmetric ? 127.0f : 255.0f;
      finite = finite && std::isfinite(span);
      bool const regular = finite && span >= std::ldexp(1.0f, -100);
      q.scales.push_back(!finite   ? std::numeric_limits<float>::quiet_NaN()
                         : regular ? span / steps
                                   : 1.0f);
      float const r = regular ? steps / span : 0.0f;
      float zero = 0;
      if (!symmetric && regular) {
        float volatile product = lo * r;
        zero = std::min(std::max(std::nearbyint(-128.0f - product), -128.0f), 127.0f);
      }
      q.zeros.push_back(int(zero));
      for (int j = begin; j < end; ++j) {
        float volatile product = regular ? x[size_t(row) * k + j] * r : 0.0f;
        float const code = std::nearbyint(product) + zero;
        q.codes[size_t(row) * k + j] =
            int(std::min(std::max(code, symmetric ? -127.0f : -128.0f), 127.0f));
      }
    }
  return q;
}

inline std::vector<float> random_floats(int m, int k, DataType type, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(m) * k);
  for (float& v : x) v = rounded(normal(random), type);
  return x;
}

// Small integers; where they are to be quantised, every block of 32 columns (and so every longer
// one) spans a range whose scale is 1.
inline std::vector<float> exact_floats(int m, int k, ActQuant act_quant, bool symmetric) {
  std::mt19937 random(2);
  std::vector<float> x(size_t(m) * k);
  for (int row = 0; row < m; ++row)
    for (int j = 0; j < k; ++j) {
      float& v = x[size_t(row) * k + j];
      v = float(int(random() % 9) - 4);
      if (act_quant == ActQuant::kNone) continue;
      if (j % 32 == 0) v = symmetric ? 127.0f : -55.0f;
      if (j % 32 == 1 && !symmetric) v = 200.0f;
    }
  return x;
}

// ---- common to the tests

constexpr int kN = 200, kK = 700;  // neither a multiple of a tile; the last group is short

class Kernels : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    cudaError_t const error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no GPU: "
                   << (error == cudaSuccess ? "none is visible" : cudaGetErrorString(error));
    }
  }

  // Waits for everything that was launched, and checks that it succeeded.
  static void finish(Status const& status) {
    ASSERT_TRUE(status.ok()) << status.text;
    cudaError_t const error = cudaDeviceSynchronize();
    ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
  }
};

struct Input {
  char const* name;
  DataType type;
  ActQuant act_quant;
  bool symmetric;
};

inline Input const kInputs[] = {{"fp16", DataType::kFloat16, ActQuant::kNone, true},
                                {"bf16", DataType::kBFloat16, ActQuant::kNone, true},
                                {"token", DataType::kFloat16, ActQuant::kToken, true},
                                {"block", DataType::kFloat32, ActQuant::kBlock, true},
                                {"token_asymmetric", DataType::kFloat32, ActQuant::kToken, false},
                                {"block_asymmetric", DataType::kBFloat16, ActQuant::kBlock, false}};

inline int block_of(ActQuant act_quant, int group_size) {
  if (act_quant == ActQuant::kToken) return -1;
  return group_size == -1 ? 128 : std::min(group_size, 128);
}

// Product of the dequantised operands, [m][n].
inline std::vector<double> product(Weight const& w, std::vector<float> const& x, int m,
                                   Input const& input) {
  std::vector<float> tiles_per_cluster = x;
  if (!w.perm.empty()) {
    for (int row = 0; row < m; ++row)
      for (int j = 0; j < w.k; ++j)
        tiles_per_cluster[size_t(row) * w.k + j] = x[size_t(row) * w.k + w.perm[j]];
  }
  std::vector<double> a(tiles_per_cluster.begin(), tiles_per_cluster.end());
  if (input.act_quant != ActQuant::kNone) {
    Quantized const q = quantized(tiles_per_cluster, m, w.k,
                                  block_of(input.act_quant, w.kind.group_size), input.symmetric);
    for (int row = 0; row < m; ++row)
      for (int j = 0; j < w.k; ++j) a[size_t(row) * w.k + j] = q.value(row, j);
  }
  std::vector<double> values(w.codes.size()), y(size_t(m) * w.n);
  for (int n = 0; n < w.n; ++n)
    for (int j = 0; j < w.k; ++j) values[size_t(n) * w.k + j] = w.value(n, j);
  for (int row = 0; row < m; ++row)
    for (int n = 0; n < w.n; ++n) {
      double sum = 0;
      for (int j = 0; j < w.k; ++j) sum += a[size_t(row) * w.k + j] * values[size_t(n) * w.k + j];
      y[size_t(row) * w.n + n] = sum;
    }
  return y;
}

inline GemmProblem problem(PackedWeight const& weight, DeviceBytes const& x, int m,
                           Input const& input) {
  GemmProblem p;
  p.m = m;
  p.weight = weight;
  p.x = x.data<void>();
  p.x_type = input.type;
  p.x_stride = weight.k;
  p.act_quant = input.act_quant;
  p.act_symmetric = input.symmetric;
  p.out_type = DataType::kFloat32;
  return p;
}

inline size_t workspace_bytes(GemmProblem const& p) {
  Device device;
  Plan chosen;
  Status status = current_device(&device);
  if (status.ok()) status = plan(p, device, &chosen);
  EXPECT_TRUE(status.ok()) << status.text;
  return chosen.workspace;
}

// Per element, as the specification bounds it: exact, or within fp32 sums and one rounding.
inline void expect_close(std::vector<float> const& y, std::vector<double> const& exact, bool equal,
                         DataType type) {
  ASSERT_EQ(y.size(), exact.size());
  double squares = 0, errors = 0;
  for (double v : exact) squares += v * v;
  double const rms = std::sqrt(squares / double(exact.size()));
  double const unit = type == DataType::kFloat16    ? 0x1p-10
                      : type == DataType::kBFloat16 ? 0x1p-8
                                                    : 0;
  for (size_t i = 0; i < y.size(); ++i) {
    double const error = std::abs(y[i] - exact[i]);
    errors += error * error;
    if (equal) {
      ASSERT_EQ(y[i], exact[i]) << "element " << i;
    }
    ASSERT_LE(error, unit * std::abs(exact[i]) + 1e-5 * rms)
        << "element " << i << ": " << y[i] << ", " << exact[i];
  }
  if (type == DataType::kFloat32) {
    EXPECT_LE(std::sqrt(errors), 1e-6 * std::sqrt(squares));
  }
}

}  // namespace cutlass_ops
