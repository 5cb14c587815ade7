#include "cpu/cpu_ops.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>

#include "cpu/cpu_kernels.h"
#include "dispatch/problem.h"
#include "host_threads.h"

namespace cutlass_ops {
namespace {

std::vector<CpuKernels const*> const& available() {
  static std::vector<CpuKernels const*> const kernels = [] {
    std::vector<CpuKernels const*> found;
#if defined(CUTLASS_OPS_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) found.push_back(&kAvx2Kernels);
#endif
    found.push_back(&kScalarKernels);
    return found;
  }();
  return kernels;
}

std::atomic<CpuKernels const*>& chosen() {
  static std::atomic<CpuKernels const*> kernels{available().front()};
  return kernels;
}

// ---- activations

constexpr uint32_t kInfinity = 0x7f800000;

constexpr std::array<uint8_t, kLaneColumns> kLaneOrder = [] {
  std::array<uint8_t, kLaneColumns> columns{};
  for (int place = 0; place < kLaneColumns; ++place) columns[size_t(place)] = uint8_t(lane_column(place));
  return columns;
}();

// Rounded half to even, for magnitudes below 2^22: fp32 has no bits behind the point from 2^23 on.
float rounded(float value) {
  constexpr float kMagic = 0x1.8p23f;
  return value + kMagic - kMagic;
}

// One block as reference.quantize_activations defines it; zero is null if symmetric.
void quantize_block(float const* x, int count, int8_t* codes, float* scale, int8_t* zero) {
  // Bits of floats without a sign are ordered as integers, NaN above infinity.
  int32_t high = 0, low = 0;
  for (int i = 0; i < count; ++i) {
    int32_t const bits = int32_t(as_bits(x[i])), opposite = int32_t(as_bits(x[i]) ^ 0x80000000u);
    high = std::max(high, bits), low = std::max(low, opposite);
  }
  if (!zero) high = std::max(high, low);
  float const hi = as_float(uint32_t(high)), lo = as_float(uint32_t(low));  // lo: of -x
  float const span = zero ? hi + lo : hi, steps = zero ? 255.0f : 127.0f;
  bool const finite = uint32_t(high) < kInfinity && uint32_t(low) < kInfinity && as_bits(span) < kInfinity;
  *scale = finite ? 1.0f : as_float(0x7fc00000);
  if (zero) *zero = 0;
  if (!finite || span < 0x1p-100f) return void(std::fill_n(codes, count, int8_t(0)));
  *scale = span / steps;
  float const reciprocal = steps / span;
  float shift = 0.0f, least = -127.0f;
  if (zero) {
    shift = std::min(std::max(rounded(-128.0f + lo * reciprocal), -128.0f), 127.0f), least = -128.0f;
    *zero = int8_t(shift);
  }
  for (int i = 0; i < count; ++i) {
    float const code = rounded(x[i] * reciprocal) + shift;
    codes[i] = int8_t(std::min(std::max(code, least), 127.0f));
  }
}

// Row `row` of a matrix in fp32, columns in the order of `perm`.
void load_row(void const* x, DataType type, int64_t start, int k, int32_t const* perm, float* out) {
  if (perm) {
    for (int i = 0; i < k; ++i) out[i] = load_float(x, type, start + perm[i]);
  } else if (type == DataType::kFloat32) {
    std::memcpy(out, static_cast<float const*>(x) + start, size_t(k) * sizeof(float));
  } else {
    for (int i = 0; i < k; ++i) out[i] = load_float(x, type, start + i);
  }
}

// Memory for activations that a product quantises itself.
struct Quantized {
  std::vector<int8_t> codes, zeros;
  std::vector<float> scales;

  QuantizedActivations make_room(int m, int k, int block, bool symmetric) {
    int64_t const k_pad = padded_k(k), blocks = block == -1 ? 1 : k_pad / block;
    codes.resize(size_t(m * k_pad)), scales.resize(size_t(m * blocks));
    if (!symmetric) zeros.resize(size_t(m * blocks));
    QuantizedActivations out;
    out.codes = codes.data(), out.scales = scales.data(), out.zeros = symmetric ? nullptr : zeros.data();
    out.block = block, out.stride = m;
    return out;
  }
};

// What a product's activations are prepared in.
struct Prepared {
  std::vector<float> x, scales, offset_x, codebook, bias;
  std::vector<int8_t> codes;
  std::vector<int16_t> centred;
  std::vector<int32_t> zeros;
  std::vector<int64_t> sums;
};

float sum_run(float const* x, int first, int run) {
  // As products are summed: reduce() of the scalar kernel, of one of a fragment's two runs or of all.
  float lanes[kLanes] = {};
  int const fragments = std::max(run / kLaneColumns, 1);
  for (int place = 0; place < fragments * kLaneColumns; ++place)
    lanes[place % kLanes] += x[first / kLaneColumns * kLaneColumns + place];
  float const low = (lanes[0] + lanes[1]) + (lanes[4] + lanes[5]), high = (lanes[2] + lanes[3]) + (lanes[6] + lanes[7]);
  if (run >= kLaneColumns) return low + high;
  return first % kLaneColumns ? high : low;
}

void prepare_floats(GemmProblem const& problem, CpuProduct& p, Prepared& memory) {
  int const k = problem.weight.k, k_pad = p.tiles * kKPerTile;
  p.x_stride = k_pad;
  memory.x.resize(size_t(p.m) * k_pad);
  if (problem.weight.offsets) memory.offset_x.assign(size_t(p.m) * p.blocks, 0.0f);
  std::vector<float> natural(size_t(k_pad), 0.0f);
  for (int row = 0; row < p.m; ++row) {
    load_row(problem.x, problem.x_type, row * problem.x_stride, k, problem.weight.perm, natural.data());
    float* const x = memory.x.data() + size_t(row) * k_pad;
    for (int start = 0; start < k_pad; start += kLaneColumns) {
      for (int place = 0; place < kLaneColumns; ++place) x[start + place] = natural[size_t(start + kLaneOrder[size_t(place)])];
    }
    if (!problem.weight.offsets) continue;
    for (int first = 0; first < k_pad && first / p.block < p.blocks; first += p.run()) {
      memory.offset_x[size_t(row) * p.blocks + first / p.block] += sum_run(x, first, p.run());
    }
  }
  p.x = memory.x.data();
  p.offset_x = memory.offset_x.data();
}

void prepare_integers(GemmProblem const& problem, CpuKernels const& kernels, CpuProduct& p, Prepared& memory) {
  QuantizedActivations const& q = problem.quantized;
  int const k = problem.weight.k, k_pad = p.tiles * kKPerTile;
  auto const order = kernels.integer_order(problem.weight.bits);
  std::vector<int> positions(size_t(order.places));  // of codes in the order of QuantizedActivations
  for (int place = 0; place < order.places; ++place) {
    int const column = order.column(place);
    positions[size_t(place)] = column / 16 * 16 + activation_position(column);
  }
  p.x_stride = int64_t(k_pad) / order.columns * order.places;
  size_t const vectors = size_t(p.m) * p.blocks;
  (order.centred ? memory.centred.resize(size_t(p.m) * p.x_stride) : memory.codes.resize(size_t(p.m) * p.x_stride));
  memory.scales.resize(vectors), memory.sums.assign(vectors, 0);
  if (q.zeros) memory.zeros.resize(vectors);
  if (problem.weight.offsets) memory.offset_x.resize(vectors);
  for (int row = 0; row < p.m; ++row) {
    int8_t const* const codes = q.codes + int64_t(row) * k_pad;
    for (int block = 0; block < p.blocks; ++block) {
      int64_t const from = int64_t(q.block == -1 ? 0 : block) * q.stride + row;
      size_t const at = size_t(row) * p.blocks + block;
      int const zero = q.zeros ? q.zeros[from] : 0;
      // Padding holds zero points, at any position of the last sixteen columns: it adds nothing.
      int64_t const begin = int64_t(block) * p.block, end = std::min<int64_t>(begin + p.block, (int64_t(k) + 15) / 16 * 16);
      int64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) sum += codes[i] - zero;
      memory.scales[at] = q.scales[from], memory.sums[at] = sum;
      if (q.zeros) memory.zeros[at] = zero;
      if (problem.weight.offsets) memory.offset_x[at] = q.scales[from] * float(sum);
    }
    for (int64_t start = 0; start < k_pad; start += order.columns) {
      int64_t const to = row * p.x_stride + start / order.columns * order.places;
      for (int place = 0; place < order.places; ++place) {
        int64_t const from = start + positions[size_t(place)], block = from / p.block;
        int8_t const code = codes[from];
        if (!order.centred) {
          memory.codes[size_t(to + place)] = code;
        } else {
          int const zero = q.zeros && block < p.blocks ? memory.zeros[size_t(row) * p.blocks + block] : 0;
          memory.centred[size_t(to + place)] = int16_t(code - zero);
        }
      }
    }
  }
  p.codes = order.centred ? nullptr : memory.codes.data();
  p.centred = order.centred ? memory.centred.data() : nullptr;
  p.scales = memory.scales.data(), p.sums = memory.sums.data();
  p.zeros = q.zeros ? memory.zeros.data() : nullptr;
  p.offset_x = memory.offset_x.data();
}

// The values of codes that are no integers, by code: where another format begins.
void prepare_codebook(GemmProblem const& problem, CpuProduct& p, Prepared& memory) {
  if (has_integer_codes(problem.weight)) return;
  memory.codebook.resize(size_t(1) << problem.weight.bits);
  for (size_t code = 0; code < memory.codebook.size(); ++code) {
    float value;
    if (problem.weight.e4m3) {
      uint32_t const exponent = code >> 3 & 15, mantissa = code & 7;
      value = exponent ? as_float((exponent + 120) << 23 | mantissa << 20) : float(mantissa) * 0x1p-9f;
      if (code & 0x80) value = -value;
    } else {
      value = problem.weight.book[code];
    }
    float stored;  // in as many of its bytes as x's type has
    store_float(&stored, problem.x_type, 0, value);
    memory.codebook[code] = load_float(&stored, problem.x_type, 0);
  }
  p.codebook = memory.codebook.data();
}

}  // namespace

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  for (CpuKernels const* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

void use_cpu_instruction_set(std::string const& name) {
  for (CpuKernels const* kernels : available()) {
    if (name == kernels->name) return chosen().store(kernels);
  }
  throw std::invalid_argument("there are no kernels for the instruction set " + name + " on this machine");
}

void cpu_quantize_activations(QuantizeProblem const& problem) {
  QuantizedActivations const& out = problem.out;
  int const k = problem.k, k_pad = int(padded_k(k)), block = out.block == -1 ? k_pad : out.block;
  std::vector<float> natural(size_t(k_pad), 0.0f);
  std::vector<int8_t> codes(size_t(k_pad), 0);
  for (int index = 0; index < k_pad / block; ++index) {
    std::fill_n(out.scales + int64_t(index) * out.stride, out.stride, 1.0f);
    if (out.zeros) std::fill_n(out.zeros + int64_t(index) * out.stride, out.stride, int8_t(0));
  }
  for (int row = 0; row < problem.m; ++row) {
    load_row(problem.x, problem.x_type, row * problem.x_stride, k, problem.perm, natural.data());
    for (int begin = 0; begin < k; begin += block) {
      // Zeros behind the last column widen no range, and get the zero point for a code.
      int64_t const at = int64_t(begin / block) * out.stride + row;
      quantize_block(natural.data() + begin, block, codes.data() + begin, out.scales + at,
                     out.zeros ? out.zeros + at : nullptr);
    }
    int8_t* const to = out.codes + int64_t(row) * k_pad;
    for (int i = 0; i < k_pad; ++i) to[i / 16 * 16 + activation_position(i)] = codes[size_t(i)];
  }
}

void cpu_mixed_gemm(GemmProblem const& given, int threads) {
  PackedWeight const& w = given.weight;
  CpuKernels const& kernels = *chosen().load();
  if (given.m == 0) return;
  GemmProblem problem = given;
  Quantized quantized;
  if (!given.quantized.codes && given.act_quant != ActQuant::kNone) {
    problem.quantized = quantized.make_room(
        given.m, w.k, given.act_quant == ActQuant::kToken ? -1 : activation_block(w.group_size), given.act_symmetric);
    cpu_quantize_activations({given.x, given.x_type, given.x_stride, given.m, w.k, w.perm, problem.quantized});
  }
  CpuProduct p;
  p.weight = w, p.m = problem.m, p.out = problem.out, p.out_type = problem.out_type;
  p.tiles = int(padded_k(w.k) / kKPerTile);
  int const k_pad = p.tiles * kKPerTile;
  int const group = w.group_size == -1 ? k_pad : std::min(w.group_size, k_pad);
  p.block = problem.quantized.codes && problem.quantized.block != -1 ? std::min(group, problem.quantized.block) : group;
  p.blocks = int(ceil_div(w.k, p.block));
  p.group_blocks = group / p.block;
  Prepared memory;
  if (problem.bias) {
    memory.bias.resize(size_t(w.n));
    load_row(problem.bias, problem.bias_type, 0, w.n, nullptr, memory.bias.data());
    p.bias = memory.bias.data();
  }
  prepare_codebook(problem, p, memory);
  problem.quantized.codes ? prepare_integers(problem, kernels, p, memory) : prepare_floats(problem, p, memory);
  int64_t const panels = padded_rows(w.n) / kRowsPerSlab;
  // A thread starts in less time than so many products take.
  constexpr int64_t kProductsOfThread = 1 << 20;
  int64_t const products = padded_size(w) * p.m;
  int64_t const useful = std::min<int64_t>(threads, std::max<int64_t>(1, products / kProductsOfThread));
  int64_t const batch = std::max<int64_t>(1, panels / (8 * useful));
  for_each_index(panels, batch, int(useful), [&](int64_t panel) { kernels.multiply(p, int(panel)); });
}

}  // namespace cutlass_ops
