// The operators of ops.h on a GPU against a plain fp64 reference. Small sizes, so that compute-sanitizer gets through them.
//
// Results and scratch memory start as NaN and lie between guard bytes that nobody may touch. Scratch memory is left as it is
// where M is a multiple of 16: then all that a kernel reads of it must have been written, and initcheck can see whether it was.
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
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "cutlass_ops/pack.h"
#include "cutlass_ops/zero_compensation.h"
#include "dispatch/decode_shape.h"
#include "dispatch/problem.h"
#include "dispatch/spec.h"

#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // what GoogleTest's TEST_P declares and leaves unused
#endif

namespace cutlass_ops {
namespace {

// ---- memory on the GPU

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error));
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
    check(cudaMemcpy(guards.data() + kGuard, data<uint8_t>() + bytes_, kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(guards.begin(), guards.end(), [](uint8_t byte) { return byte == kGuardByte; });
  }

 private:
  static constexpr size_t kGuard = 256;  // keeps the alignment of the data
  static constexpr uint8_t kGuardByte = 0xa5;
  void* block_ = nullptr;
  size_t bytes_;
};

// ---- numbers as they are stored

int size_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// To the nearest number of the type.
float rounded(float v, DataType type) {
  if (type == DataType::kFloat16) return __half2float(__float2half_rn(v));
  if (type == DataType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(v));
  return v;
}

std::vector<uint8_t> stored(std::vector<float> const& values, DataType type) {
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

std::vector<float> loaded(DeviceBytes const& memory, DataType type) {
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

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// ---- a weight, on the host and on the GPU

enum class Zero { kMiddle, kInteger, kReal };

struct Format {
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

// Of both families of each kernel: those of whole tiles without offsets, and the rest.
Format const kFormats[] = {{Zero::kMiddle, 128, DataType::kFloat16}, {Zero::kInteger, 256, DataType::kBFloat16},
                           {Zero::kMiddle, -1, DataType::kFloat32},  {Zero::kReal, 128, DataType::kFloat16},
                           {Zero::kInteger, 32, DataType::kFloat16}, {Zero::kReal, 64, DataType::kFloat32}};

struct Weight {
  int n, k, bits;
  Format format;
  bool exact;

  int groups, group;  // on the host: [n][groups], each of `group` columns
  std::vector<uint8_t> codes;
  std::vector<float> scales, offsets;
  std::vector<int> zeros;
  std::vector<int32_t> perm;

  // Scales of both signs: 1/4, 1/2 and 1 if `exact`, any if not.
  Weight(int n_, int k_, int bits_, Format format_, bool exact_, bool permuted = false)
      : n(n_), k(k_), bits(bits_), format(format_), exact(exact_) {
    std::mt19937 random(uint32_t(n * 31 + k * 7 + bits + exact));
    group = format.group_size == -1 ? k : format.group_size;
    groups = (k + group - 1) / group;
    codes.resize(size_t(n) * k);
    for (uint8_t& code : codes) code = uint8_t(random() & ((1u << bits) - 1));
    for (int i = 0; i < n * groups; ++i) {
      float const magnitude = exact ? std::ldexp(1.0f, -int(random() % 3)) : 0.001f + 0.02f * float(random() % 4096) / 4096;
      scales.push_back(rounded(random() % 2 ? magnitude : -magnitude, format.scale_type));
      float const offset = exact ? float(int(random() % 13) - 6) / 4 : (float(random() % 4096) / 4096 - 0.5f) * 0.2f;
      offsets.push_back(format.zero == Zero::kReal ? rounded(offset, format.scale_type) : 0.0f);
      zeros.push_back(format.zero == Zero::kInteger ? int(random() & ((1u << bits) - 1)) : 1 << (bits - 1));
    }
    if (permuted) {
      for (int j = 0; j < k; ++j) perm.push_back(j);
      std::shuffle(perm.begin(), perm.end(), random);
    }
  }

  int index(int row, int column) const { return row * groups + column / group; }
  int integer(int row, int column) const { return codes[size_t(row) * k + column] - zeros[index(row, column)]; }
  double value(int row, int column) const {
    return double(scales[index(row, column)]) * integer(row, column) + offsets[index(row, column)];
  }
  // As a dequantiser rounds it: product and sum each to fp32.
  float rounded_value(int row, int column) const {
    float volatile product = scales[index(row, column)] * float(integer(row, column));
    return format.zero == Zero::kReal ? product + offsets[index(row, column)] : product;
  }
};

// [n][groups] to [padded groups][n_pad] in the order of group_row.
template <class T>
std::vector<T> group_vectors(Weight const& w, std::vector<T> const& rows) {
  int const padded_groups = w.group < kKPerTile ? int(padded_k(w.k)) / w.group : w.groups;
  int const n_pad = int(padded_rows(w.n));
  std::vector<T> packed(size_t(w.format.group_size == -1 ? 1 : padded_groups) * n_pad);
  for (int row = 0; row < w.n; ++row)
    for (int g = 0; g < w.groups; ++g)
      packed[size_t(g) * n_pad + row / kRowsPerPanel * kRowsPerPanel + group_row(row)] = rows[size_t(row) * w.groups + g];
  return packed;
}

std::vector<uint8_t> packed_codes(Weight const& w) {
  std::vector<uint8_t> packed(size_t(packed_bytes(w.n, w.k, w.bits)));
  pack(w.codes.data(), packed.data(), w.n, w.k, w.bits, 1);
  return packed;
}

std::vector<int8_t> packed_zeros(Weight const& w) {
  std::vector<int8_t> centred;
  for (int zero : w.zeros) centred.push_back(int8_t(zero - (1 << (w.bits - 1))));
  return group_vectors(w, centred);
}

class DeviceWeight {
 public:
  explicit DeviceWeight(Weight const& w)
      : codes_(packed_codes(w)),
        scales_(stored(group_vectors(w, w.scales), w.format.scale_type)),
        zeros_(packed_zeros(w)),
        offsets_(stored(group_vectors(w, w.offsets), w.format.scale_type)),
        perm_(w.perm) {
    view.codes = codes_.data<uint8_t>();
    view.scales = scales_.data<void>();
    if (w.format.zero == Zero::kInteger) view.zeros = zeros_.data<int8_t>();
    if (w.format.zero == Zero::kReal) view.offsets = offsets_.data<void>();
    if (!w.perm.empty()) view.perm = perm_.data<int32_t>();
    view.n = w.n, view.k = w.k, view.bits = w.bits;
    view.group_size = w.format.group_size;
    view.scale_type = w.format.scale_type;
    view.offset_type = w.format.zero == Zero::kReal ? w.format.scale_type : DataType::kNone;
  }
  PackedWeight view;

 private:
  DeviceBytes codes_, scales_, zeros_, offsets_, perm_;
};

// ---- activations: what the quantiser must make of them

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

// Each operation rounded to fp32 by itself: `volatile` keeps a compiler from fusing them.
Quantized quantized(std::vector<float> const& x, int m, int k, int block, bool symmetric) {
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
      float const span = symmetric ? std::max(hi, -lo) : hi - lo, steps = symmetric ? 127.0f : 255.0f;
      finite = finite && std::isfinite(span);
      bool const regular = finite && span >= std::ldexp(1.0f, -100);
      q.scales.push_back(!finite ? std::numeric_limits<float>::quiet_NaN() : regular ? span / steps : 1.0f);
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
        q.codes[size_t(row) * k + j] = int(std::min(std::max(code, symmetric ? -127.0f : -128.0f), 127.0f));
      }
    }
  return q;
}

std::vector<float> random_floats(int m, int k, DataType type, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(m) * k);
  for (float& v : x) v = rounded(normal(random), type);
  return x;
}

// Small integers; where they are to be quantised, every block of 32 columns (and so every longer one) spans a range whose scale
// is 1.
std::vector<float> exact_floats(int m, int k, ActQuant act_quant, bool symmetric) {
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

// ---- the tests

constexpr int kN = 200, kK = 700;  // neither a multiple of a tile; the last group is short

class Kernels : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    cudaError_t const error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no GPU: " << (error == cudaSuccess ? "none is visible" : cudaGetErrorString(error));
    }
  }

  // Everything that was launched has ended, and well.
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

Input const kInputs[] = {{"fp16", DataType::kFloat16, ActQuant::kNone, true},
                         {"bf16", DataType::kBFloat16, ActQuant::kNone, true},
                         {"token", DataType::kFloat16, ActQuant::kToken, true},
                         {"block", DataType::kFloat32, ActQuant::kBlock, true},
                         {"token_asymmetric", DataType::kFloat32, ActQuant::kToken, false},
                         {"block_asymmetric", DataType::kBFloat16, ActQuant::kBlock, false}};

int block_of(ActQuant act_quant, int group_size) {
  if (act_quant == ActQuant::kToken) return -1;
  return group_size == -1 ? 128 : std::min(group_size, 128);
}

// Product of the dequantised operands, [m][n].
std::vector<double> product(Weight const& w, std::vector<float> const& x, int m, Input const& input) {
  std::vector<float> tiles_per_cluster = x;
  if (!w.perm.empty()) {
    for (int row = 0; row < m; ++row)
      for (int j = 0; j < w.k; ++j) tiles_per_cluster[size_t(row) * w.k + j] = x[size_t(row) * w.k + w.perm[j]];
  }
  std::vector<double> a(tiles_per_cluster.begin(), tiles_per_cluster.end());
  if (input.act_quant != ActQuant::kNone) {
    Quantized const q = quantized(tiles_per_cluster, m, w.k, block_of(input.act_quant, w.format.group_size), input.symmetric);
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

GemmProblem problem(PackedWeight const& weight, DeviceBytes const& x, int m, Input const& input) {
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

size_t workspace_bytes(GemmProblem const& p) {
  Device device;
  Plan chosen;
  Status status = current_device(&device);
  if (status.ok()) status = plan(p, device, &chosen);
  EXPECT_TRUE(status.ok()) << status.text;
  return chosen.workspace;
}

// Per element, as the specification bounds it: exact, or within fp32 sums and one rounding.
void expect_close(std::vector<float> const& y, std::vector<double> const& exact, bool equal, DataType type) {
  ASSERT_EQ(y.size(), exact.size());
  double squares = 0, errors = 0;
  for (double v : exact) squares += v * v;
  double const rms = std::sqrt(squares / double(exact.size()));
  double const unit = type == DataType::kFloat16 ? 0x1p-10 : type == DataType::kBFloat16 ? 0x1p-8 : 0;
  for (size_t i = 0; i < y.size(); ++i) {
    double const error = std::abs(y[i] - exact[i]);
    errors += error * error;
    if (equal) {
      ASSERT_EQ(y[i], exact[i]) << "element " << i;
    }
    ASSERT_LE(error, unit * std::abs(exact[i]) + 1e-5 * rms) << "element " << i << ": " << y[i] << ", " << exact[i];
  }
  if (type == DataType::kFloat32) {
    EXPECT_LE(std::sqrt(errors), 1e-6 * std::sqrt(squares));
  }
}

class Products : public Kernels, public testing::WithParamInterface<std::tuple<int, Input>> {
 protected:
  int const bits = std::get<0>(GetParam());
  Input const input = std::get<1>(GetParam());

  // Every format with an M for every BLOCK_M.
  void multiply_all(bool exact) {
    for (Format const& format : kFormats) {
      Weight const w(kN, kK, bits, format, exact);
      DeviceWeight const packed(w);
      for (int m : {5, 16, 20, 33, 70}) {
        SCOPED_TRACE(format.text() + ", m " + std::to_string(m));
        std::vector<float> const x =
            exact ? exact_floats(m, kK, input.act_quant, input.symmetric) : random_floats(m, kK, input.type);
        multiply(w, packed, x, m, exact);
        if (HasFatalFailure()) return;
      }
    }
  }

  void multiply(Weight const& w, DeviceWeight const& packed, std::vector<float> const& x, int m, bool exact) {
    DeviceBytes const from(stored(x, input.type)), out(size_t(m) * w.n * 4);
    GemmProblem p = problem(packed.view, from, m, input);
    DeviceBytes const workspace(workspace_bytes(p), m % 16 ? DeviceBytes::kNaN : DeviceBytes::kLeave);
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
  Weight const w(kN, kK, bits, kFormats[4], false, true);
  for (int m : {5, 70}) multiply(w, DeviceWeight(w), random_floats(m, kK, input.type), m, false);
}

TEST_P(Products, OfTinyAndOddShapes) {
  for (auto const& [n, k] : {std::pair(1, 1), std::pair(33, 7), std::pair(65, 129), std::pair(130, 100)}) {
    Weight const w(n, k, bits, kFormats[4], false);
    SCOPED_TRACE(std::to_string(n) + " x " + std::to_string(k));
    for (int m : {1, 33}) multiply(w, DeviceWeight(w), random_floats(m, k, input.type), m, false);
  }
}

// Few rows of x and 17 K tiles give few enough CTAs on any GPU to split K.
TEST_P(Products, SplitK) {
  Weight const w(kN, 2100, bits, kFormats[0], true);
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

// K that is a multiple of 8 and groups of at least a tile: what the Hopper kernels take. The values of M reach each of their
// tiles, on 66 clusters with K split or not; elsewhere the portable kernels answer.
TEST_P(Products, OfTheShapesThatHopperTakes) {
  struct Case {
    int n, k, m;
    Format format;
  };
  Device device;
  finish(current_device(&device));
  std::set<std::pair<std::string, int>> tiles;
  for (Case const& c :
       {Case{520, 712, 40, kFormats[0]}, Case{520, 712, 40, kFormats[1]}, Case{520, 712, 40, kFormats[2]},
        Case{520, 712, 24, kFormats[0]}, Case{520, 712, 24, kFormats[1]}, Case{17000, 136, 40, kFormats[0]},
        Case{4160, 136, 300, kFormats[1]}, Case{8320, 136, 300, kFormats[0]}, Case{8320, 136, 170, kFormats[0]}}) {
    SCOPED_TRACE(std::to_string(c.m) + " x " + std::to_string(c.n) + " x " + std::to_string(c.k) + ", " + c.format.text());
    Weight const w(c.n, c.k, bits, c.format, true);
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
  if (device.architecture == 90 && device.multiprocessors == 132 && input.symmetric) EXPECT_GE(tiles.size(), 3u);
}

// The shapes that reach every cluster of decode_gemm: single CTAs, and 2, 4 and 8 that split K; x copied unchanged (K is a
// multiple of 8), and not; row panels shared by several warps, one per warp, and fewer than the clusters. The kernel is called
// directly, whatever dispatch chooses.
TEST_P(Products, OfTheShapesThatDecodeTakes) {
  struct Case {
    int n, k, m, cluster;
    Format format;
  };
  Device device;
  finish(current_device(&device));
  if (device.architecture != 90) GTEST_SKIP() << "decode_gemm is for sm_90; this GPU is sm_" << device.architecture;
  size_t ran = 0;
  KernelSpec const& decode_gemm = *find_kernel("decode_gemm");
  for (Candidate const& candidate : decode_gemm.candidates({})) {
    int const most = candidate.tile.block_m;
    if (most == 4) continue;  // a code book's
    for (Case const& c :
         {Case{200, 264, 3, 1, kFormats[0]}, Case{8500, 256, 2, 1, kFormats[1]}, Case{4160, 1000, 4, 2, kFormats[3]},
          Case{1024, 3096, 2, 4, kFormats[4]}, Case{136, 2100, 1, 8, kFormats[5]}, Case{136, 2104, 4, 8, kFormats[2]}}) {
      int const m = c.m;
      SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(c.n) + " x " + std::to_string(c.k) + ", " + c.format.text());
      Weight const w(c.n, c.k, bits, c.format, true);
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
  Weight const w(kN, kK, bits, kFormats[0], false);
  DeviceWeight const packed(w);
  std::vector<float> const x = random_floats(m, kK, input.type);
  // The first row starts at an odd place, and NaN lies between the rows.
  std::vector<float> apart(size_t(m) * stride + 1, std::numeric_limits<float>::quiet_NaN());
  for (int row = 0; row < m; ++row) std::copy_n(x.begin() + row * kK, kK, apart.begin() + 1 + row * stride);
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
  Weight const w(kN, kK, bits, kFormats[4], false);
  DeviceWeight const packed(w);
  std::vector<float> const x = random_floats(m, kK, input.type);
  DeviceBytes const from(stored(x, input.type)), first(size_t(m) * kN * 4), second(size_t(m) * kN * 4);
  GemmProblem p = problem(packed.view, from, m, input);
  DeviceBytes const workspace(workspace_bytes(p));
  p.out = first.data<void>();
  finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, nullptr));

  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  p.out = second.data<void>();
  int const block = block_of(input.act_quant, 32), stride = 48;
  size_t const blocks = block == -1 ? 1 : size_t(padded_k(kK)) / block;
  DeviceBytes const codes(size_t(m) * padded_k(kK)), scales(blocks * stride * 4), zeros(blocks * stride);
  check(cudaDeviceSynchronize());  // the memory was poisoned on the null stream, which this one does not wait for
  if (input.act_quant != ActQuant::kNone) {
    QuantizedActivations const q{codes.data<int8_t>(), scales.data<float>(), input.symmetric ? nullptr : zeros.data<int8_t>(),
                                 block, stride};
    ASSERT_TRUE(quantize_activations({from.data<void>(), input.type, kK, m, kK, nullptr, q}, stream).ok());
    p.quantized = q;
    p.x = nullptr;
  }
  finish(mixed_gemm(p, {workspace.data<void>(), workspace.bytes()}, stream));
  check(cudaStreamDestroy(stream));
  EXPECT_EQ(first.read<uint32_t>(), second.read<uint32_t>());
}

// Zero points of x with 16-bit results need column sums of the weight: stored ones, or sums made by the product.
TEST_P(Products, AreTheSameBitsWithColumnSumsOfTheWeight) {
  Weight const w(4160, 2200, bits, kFormats[0], false);
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
    EXPECT_EQ(mixed_gemm(p, reads, {workspace.data<void>(), workspace.bytes()}, nullptr).code, Status::kInvalid);
  }
}

TEST_P(Products, OfNoRowsTouchNothing) {
  Weight const w(kN, kK, bits, kFormats[0], true);
  DeviceWeight const packed(w);
  DeviceBytes const out(64);
  GemmProblem p = problem(packed.view, out, 0, input);
  p.out = out.data<void>();
  finish(mixed_gemm(p, {}, nullptr));
  EXPECT_EQ(out.read<uint8_t>(), std::vector<uint8_t>(64, 0xff));
}

TEST_P(Products, WantTheirWorkspace) {
  int const m = 20, k = 2100;
  Weight const w(kN, k, bits, kFormats[0], true);
  DeviceWeight const packed(w);
  DeviceBytes const x(stored(random_floats(m, k, input.type), input.type)), out(m * kN * 4);
  GemmProblem p = problem(packed.view, x, m, input);
  p.out = out.data<void>();
  size_t const bytes = workspace_bytes(p);
  ASSERT_GT(bytes, 0u);  // K is split
  Status const status = mixed_gemm(p, {out.data<void>(), bytes - 1}, nullptr);
  EXPECT_EQ(status.code, Status::kInvalid);
  for (std::string const& word :
       {std::to_string(bytes - 1), std::to_string(bytes), std::string("workspace"), std::string("k=2100")})
    EXPECT_NE(status.text.find(word), std::string::npos) << status.text;
  check(cudaDeviceSynchronize());
  EXPECT_EQ(out.read<uint8_t>(), std::vector<uint8_t>(out.bytes(), 0xff));
}

INSTANTIATE_TEST_SUITE_P(Kernels, Products, testing::Combine(testing::Values(4, 8), testing::ValuesIn(kInputs)),
                         [](auto const& info) {
                           return "w" + std::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
                         });

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
    case Activation::kClamp:
      return std::min(std::max(v, double(low)), double(high));
    default:
      return v;
  }
}

TEST_P(Epilogue, AddsBiasActivatesAndAddsTheResidual) {
  DataType const type = GetParam();
  // n = 200: whole 16-byte stores. n = 33: none. Few columns of K: one part; many: several.
  for (auto const& [n, k, m] :
       {std::tuple(200, 100, 20), std::tuple(33, 100, 5), std::tuple(200, 700, 5), std::tuple(33, 700, 70)}) {
    Weight const w(n, k, 4, kFormats[0], false);
    DeviceWeight const packed(w);
    Input const input = kInputs[0];
    std::vector<float> const x = random_floats(m, k, input.type);
    std::vector<double> const total = product(w, x, m, input);
    int const residual_stride = n + 3;
    std::vector<float> const bias = random_floats(1, n, type, 3), residual = random_floats(m, residual_stride, type, 4);
    DeviceBytes const from(stored(x, input.type)), device_bias(stored(bias, type)), device_residual(stored(residual, type));
    for (Activation activation :
         {Activation::kNone, Activation::kRelu, Activation::kRelu6, Activation::kGelu, Activation::kSilu, Activation::kClamp}) {
      SCOPED_TRACE("activation " + std::to_string(int(activation)) + ", n " + std::to_string(n) + ", k " + std::to_string(k));
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
          exact[size_t(row) * n + j] = activated(total[size_t(row) * n + j] + bias[j], activation, -0.5f, 0.75f) +
                                       residual[size_t(row) * residual_stride + j];
      expect_close(loaded(out, type), exact, false, type);
      EXPECT_TRUE(out.guards_are_whole());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Epilogue, OverflowsToInfinityOrSaturates) {
  DataType const type = GetParam();
  float const largest = type == DataType::kFloat16 ? 65504.0f : type == DataType::kBFloat16 ? 0x1.fep127f : 0x1.fffffep127f;
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
      float const expected = i / n == 2 ? std::numeric_limits<float>::quiet_NaN() : i % n % 2 ? -magnitude : magnitude;
      ASSERT_TRUE(same(y[i], expected)) << "element " << i << ": " << y[i] << ", " << expected;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Epilogue, testing::Values(DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32),
                         [](auto const& info) { return "type_" + std::to_string(int(info.param)); });

// ---- the quantiser

class Quantizer : public Kernels, public testing::WithParamInterface<std::tuple<DataType, bool>> {};

// Rows of random numbers, zeros, constants, subnormals, ties, a NaN, infinities, and ranges that overflow.
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
    for (int block : {32, 64, 128, -1})
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
            for (int j = 0; j < k; ++j) tiles_per_cluster[size_t(row) * k + j] = x[size_t(row) * k + perm[j]];
        }
        Quantized const q = quantized(tiles_per_cluster, m, k, block, symmetric);
        DeviceBytes const from(stored(x, type)), device_perm(perm), codes(size_t(m) * k_pad),
            scales(size_t(blocks) * stride * 4), zeros(size_t(blocks) * stride);
        QuantizeProblem p{from.data<void>(), type, k, m, k, permuted ? device_perm.data<int32_t>() : nullptr, {}};
        p.out = {codes.data<int8_t>(), scales.data<float>(), symmetric ? nullptr : zeros.data<int8_t>(), block, stride};
        finish(quantize_activations(p, nullptr));
        std::vector<int8_t> const got_codes = codes.read<int8_t>(), got_zeros = zeros.read<int8_t>();
        std::vector<float> const got_scales = scales.read<float>();
        for (int row = 0; row < m; ++row) {
          for (int b = 0; b < blocks; ++b) {
            // Blocks that hold no column of x are blocks of zeros.
            bool const real = b < q.blocks;
            ASSERT_TRUE(same(got_scales[size_t(b) * stride + row], real ? q.scales[row * q.blocks + b] : 1.0f))
                << "row " << row << ", block " << b << ": " << got_scales[size_t(b) * stride + row];
            if (!symmetric) {
              ASSERT_EQ(got_zeros[size_t(b) * stride + row], real ? q.zeros[row * q.blocks + b] : 0)
                  << "row " << row << ", block " << b;
            }
          }
          for (int j = 0; j < k_pad; ++j) {
            int const b = j / (block == -1 ? k_pad : block);
            int const expected = j < k ? q.codes[size_t(row) * k + j] : b < q.blocks ? q.zeros[row * q.blocks + b] : 0;
            ASSERT_EQ(got_codes[size_t(row) * k_pad + j / 16 * 16 + activation_position(j)], expected)
                << "row " << row << ", k " << j;
          }
        }
        EXPECT_TRUE(codes.guards_are_whole());
        EXPECT_TRUE(scales.guards_are_whole());
        EXPECT_TRUE(zeros.guards_are_whole());
      }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Quantizer,
                         testing::Combine(testing::Values(DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32),
                                          testing::Bool()),
                         [](auto const& info) {
                           return "type_" + std::to_string(int(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_symmetric" : "_asymmetric");
                         });

// ---- dequantise

class Dequantize : public Kernels, public testing::WithParamInterface<std::tuple<int, DataType>> {};

TEST_P(Dequantize, GivesEveryValueRoundedOnce) {
  auto const [bits, type] = GetParam();
  for (Format const& format : kFormats)
    for (auto const& [n, k] : {std::pair(kN, kK), std::pair(33, 7)})
      for (bool permuted : {false, true}) {
        SCOPED_TRACE(format.text() + ", " + std::to_string(n) + " x " + std::to_string(k));
        Weight const w(n, k, bits, format, false, permuted);
        DeviceWeight const packed(w);
        DeviceBytes const out(size_t(n) * k * size_of(type));
        finish(dequantize({packed.view, out.data<void>(), type}, nullptr));
        std::vector<float> const y = loaded(out, type);
        for (int row = 0; row < n; ++row)
          for (int j = 0; j < k; ++j)
            ASSERT_EQ(y[size_t(row) * k + (permuted ? w.perm[j] : j)], rounded(w.rounded_value(row, j), type))
                << "row " << row << ", k " << j;
        EXPECT_TRUE(out.guards_are_whole());
      }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Dequantize,
                         testing::Combine(testing::Values(4, 8),
                                          testing::Values(DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32)),
                         [](auto const& info) {
                           return "w" + std::to_string(std::get<0>(info.param)) + "_type_" +
                                  std::to_string(int(std::get<1>(info.param)));
                         });

// ---- packing

TEST_F(Kernels, PackAsTheHostDoesAndUnpack) {
  for (int bits : {4, 8}) {
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
  Weight const w(kN, kK, 4, kFormats[0], true);
  DeviceWeight const packed(w);
  DeviceBytes const x(stored(random_floats(5, kK, DataType::kFloat32), DataType::kFloat32)), out(5 * kN * 4);
  GemmProblem p = problem(packed.view, x, 5, {"fp32", DataType::kFloat32, ActQuant::kNone, true});
  p.out = out.data<void>();
  Status const status = mixed_gemm(p, {}, nullptr);
  EXPECT_EQ(status.code, Status::kUnsupported);
  EXPECT_NE(status.text.find("float32"), std::string::npos) << status.text;
  check(cudaDeviceSynchronize());
  EXPECT_EQ(out.read<uint8_t>(), std::vector<uint8_t>(out.bytes(), 0xff));
}

}  // namespace
TEST(DeviceGuard, SaysThatADeviceIsNotThere) {
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

}  // namespace cutlass_ops
