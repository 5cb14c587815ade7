#include "cpu/cpu_ops.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>

#include "cpu/cpu_kernels.h"
#include "cutlass_ops/cpu.h"
#include "dispatch/checks.h"
#include "dispatch/problem.h"
#include "formats/formats.h"
#include "formats/width.h"
#include "host/threads.h"
#include "host/vectors.h"

namespace cutlass_ops {
namespace {

std::vector<CpuKernels const*> const& available() {
  static std::vector<CpuKernels const*> const kernels = [] {
    std::vector<CpuKernels const*> found;
#if defined(CUTLASS_OPS_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
        __builtin_cpu_supports("fma")) {
      bool const avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
      if (avx512 && __builtin_cpu_supports("avx512vnni")) {
#if defined(CUTLASS_OPS_AMX)
        if (may_use_amx()) found.push_back(&kAmxInt8Kernels);
#endif
        found.push_back(&kAvx512VnniKernels);
      }
      found.push_back(&kAvx2Kernels);
    }
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

constexpr std::array<uint8_t, kLaneColumns> kLaneOrder = [] {
  std::array<uint8_t, kLaneColumns> columns{};
  for (int place = 0; place < kLaneColumns; ++place)
    columns[size_t(place)] = uint8_t(lane_column(place));
  return columns;
}();

// A row in fp32, columns in the order of `perm`.
void gather_row(void const* x, DataType type, int64_t start, int k, int32_t const* perm,
                float* out) {
  if (!perm) return load_row(x, type, start, k, out);
  for (int i = 0; i < k; ++i) out[i] = load_float(x, type, start + perm[i]);
}

// At most all columns, with padding.
int columns_of_group(PackedWeight const& w) {
  int const k_pad = int(padded_k(w.k));
  return w.group_size == -1 ? k_pad : std::min(w.group_size, k_pad);
}

// Memory that grows: a product's may be used by the next, as fresh pages take as long as what is
// written to them.
template <class T>
class Room {
 public:
  T* of(int64_t count) {
    if (count > count_) elements_.reset(new T[size_t(count)]), count_ = count;
    return elements_.get();
  }
  size_t bytes() const { return size_t(count_) * sizeof(T); }

 private:
  std::unique_ptr<T[]> elements_;
  int64_t count_ = 0;
};

// Memory for activations that a product quantises itself.
struct Quantized {
  Room<int8_t> codes;
  std::vector<int8_t> zeros;
  std::vector<float> scales;

  QuantizedActivations make_room(int m, int k, int block, bool symmetric) {
    int64_t const k_pad = padded_k(k), blocks = block == -1 ? 1 : k_pad / block;
    scales.resize(size_t(m * blocks));
    if (!symmetric) zeros.resize(size_t(m * blocks));
    QuantizedActivations out;
    out.codes = codes.of(m * k_pad), out.scales = scales.data(),
    out.zeros = symmetric ? nullptr : zeros.data();
    out.block = block, out.stride = m;
    return out;
  }
};

// The memory for a product's prepared activations.
struct Prepared {
  Room<float> x;
  Room<int8_t> codes;
  Room<int16_t> centred;
  Room<uint16_t> halves;
  std::vector<float> scales, offset_x, codebook, bias;
  std::vector<int32_t> zeros;
  std::vector<int64_t> sums;
};

float sum_run(float const* x, int first, int run) {
  // Sums in the order of the products: reduce() of the scalar kernel, for one run of a fragment or
  // for all.
  float lanes[kLanes] = {};
  int const fragments = std::max(run / kLaneColumns, 1);
  for (int place = 0; place < fragments * kLaneColumns; ++place)
    lanes[place % kLanes] += x[first / kLaneColumns * kLaneColumns + place];
  if (run == 16) return lanes[first / 16 % 4] + lanes[first / 16 % 4 + 4];
  float const low = (lanes[0] + lanes[1]) + (lanes[4] + lanes[5]),
              high = (lanes[2] + lanes[3]) + (lanes[6] + lanes[7]);
  if (run >= kLaneColumns) return low + high;
  return first % kLaneColumns ? high : low;
}

// work(first row, last row + 1) for all rows, on several threads if there is enough work.
template <class Work>
void for_rows(int m, int k_pad, int threads, Work const& work) {
  constexpr int kElementsOfBatch = 1 << 15;
  int const batch = std::max(1, kElementsOfBatch / k_pad);
  for_each_index(ceil_div(m, batch), 1, threads, [&](int64_t index) {
    work(int(index) * batch, int(std::min<int64_t>(m, (index + 1) * batch)));
  });
}

// Elements from a row of x to the next where a row has `elements`: rows whose distance is a power
// of two would share a few sets of the caches.
int64_t spread_stride(int64_t elements, size_t size) {
  constexpr int kLineBytes = 64;
  return elements + kLineBytes / int(size);
}

void prepare_floats(GemmProblem const& problem, CpuProduct& p, Prepared& memory, int threads) {
  int const k = problem.weight.k, k_pad = p.tiles * kKPerTile;
  p.x_stride = spread_stride(k_pad, sizeof(float));
  float* const prepared = memory.x.of(p.m * p.x_stride);
  if (problem.weight.offsets) memory.offset_x.assign(size_t(p.m) * p.blocks, 0.0f);
  for_rows(p.m, k_pad, threads, [&](int first, int last) {
    std::vector<float> natural(size_t(k_pad), 0.0f);
    for (int row = first; row < last; ++row) {
      gather_row(problem.x, problem.x_type, row * problem.x_stride, k, problem.weight.perm,
                 natural.data());
      float* const x = prepared + row * p.x_stride;
      for (int start = 0; start < k_pad; start += kLaneColumns) {
        for (int place = 0; place < kLaneColumns; ++place)
          x[start + place] = natural[size_t(start + kLaneOrder[size_t(place)])];
      }
      if (!problem.weight.offsets) continue;
      for (int begin = 0; begin < k_pad && begin / p.block < p.blocks; begin += p.run()) {
        memory.offset_x[size_t(row) * p.blocks + begin / p.block] += sum_run(x, begin, p.run());
      }
    }
  });
  p.x = prepared;
  if (problem.weight.offsets) p.offset_x = memory.offset_x.data();
}

// prepare_floats() for HalvesOrder::kPairs.
void prepare_pairs(GemmProblem const& problem, CpuProduct& p, Prepared& memory, int threads) {
  constexpr int kTogether = 16;  // rows
  constexpr int kColumns = 32;   // of the lines of some pairs, which stay in the cache
  int const k = problem.weight.k, k_pad = p.tiles * kKPerTile;
  int32_t const* const perm = problem.weight.perm;
  int64_t const tiles = ceil_div(p.m, kTogether);
  p.x_stride = spread_stride(k_pad, sizeof(uint16_t)), p.in_pairs = true;
  uint16_t* const prepared = memory.halves.of(tiles * kTogether * p.x_stride);
  for_rows(int(tiles), kTogether * k_pad, threads, [&](int first, int last) {
    for (int64_t tile = first; tile < last; ++tile) {
      uint16_t* to = prepared + tile * kTogether * p.x_stride;
      int const rows = int(std::min<int64_t>(kTogether, p.m - tile * kTogether));
      auto const* const x =
          static_cast<uint16_t const*>(problem.x) + tile * kTogether * problem.x_stride;
      for (int begin = 0; begin < k_pad; begin += kColumns, to += kColumns * kTogether) {
        bool const whole = !perm && begin + kColumns <= k;
        if (!whole || rows < kTogether) std::fill_n(to, kColumns * kTogether, uint16_t(0));
        for (int row = 0; row < rows; ++row) {
          uint16_t const* const from = x + row * problem.x_stride;
          for (int i = 0; whole && i < kColumns; i += 2)
            std::memcpy(to + i * kTogether + row * 2, from + begin + i, 4);
          for (int i = 0; !whole && i < std::min(kColumns, k - begin); ++i)
            to[i / 2 * (2 * kTogether) + row * 2 + i % 2] =
                from[perm ? perm[begin + i] : begin + i];
        }
      }
    }
  });
  p.halves = prepared;
}

// prepare_floats() for HalvesOrder::kColumns.
void prepare_halves(GemmProblem const& problem, CpuKernels const& kernels, CpuProduct& p,
                    Prepared& memory, int threads) {
  int const k = problem.weight.k, k_pad = p.tiles * kKPerTile;
  int32_t const* const perm = problem.weight.perm;
  int columns[kLaneColumns];
  for (int place = 0; place < kLaneColumns; ++place)
    columns[place] = kernels.bfloat16_column(place);
  p.x_stride = spread_stride(k_pad, sizeof(uint16_t));
  uint16_t* const prepared = memory.halves.of(p.m * p.x_stride);
  bool const sums = problem.weight.zeros || problem.weight.offsets;
  if (sums) memory.offset_x.assign(size_t(p.m) * p.blocks, 0.0f);
  for_rows(p.m, k_pad, threads, [&](int first, int last) {
    for (int row = first; row < last; ++row) {
      auto const* const x = static_cast<uint16_t const*>(problem.x) + row * problem.x_stride;
      uint16_t* const to = prepared + row * p.x_stride;
      float* const of_blocks = memory.offset_x.data() + size_t(row) * p.blocks;
      for (int start = 0; start < k_pad; start += kLaneColumns) {
        for (int place = 0; place < kLaneColumns; ++place) {
          int const column = start + columns[place];
          to[start + place] = column >= k ? 0 : x[perm ? perm[column] : column];
        }
        if (!sums) continue;
        // Places so many apart are of the same group.
        constexpr int kApart = 16;
        float parts[kApart] = {};
        for (int place = 0; place < kLaneColumns; ++place)
          parts[place % kApart] += as_float(uint32_t(to[start + place]) << 16);
        for (int part = 0; part < kApart; ++part) {
          int const block = (start + columns[part]) / p.block;
          if (block < p.blocks) of_blocks[block] += parts[part];
        }
      }
    }
  });
  p.halves = prepared;
  if (sums) p.offset_x = memory.offset_x.data();
}

// Sums of less than 2^23 codes fit.
int32_t sum_codes(int8_t const* codes, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += codes[i];
  return sum;
}

void prepare_integers(GemmProblem const& problem, CpuKernels const& kernels, CpuProduct& p,
                      Prepared& memory, int threads) {
  QuantizedActivations const& q = problem.quantized;
  int const k = problem.weight.k, k_pad = p.tiles * kKPerTile;
  auto const order = kernels.integer_order(p);
  int const columns = order.columns, places = order.places;
  uint8_t positions[kLaneColumns];  // of codes in the order of QuantizedActivations; four of one
                                    // word stay side by side
  for (int place = 0; place < places; ++place) {
    int const column = order.column(place);
    positions[place] = uint8_t(column / 16 * 16 + activation_position(column));
  }
  bool const in_order = columns == places && std::is_sorted(positions, positions + places);
  int64_t const stride = p.x_stride =
      spread_stride(int64_t(k_pad) / columns * places, order.centred ? sizeof(int16_t) : 1);
  size_t const vectors = size_t(p.m) * p.blocks;
  int16_t* const centred = order.centred ? memory.centred.of(p.m * stride) : nullptr;
  int8_t* const bytes = order.centred ? nullptr : memory.codes.of(p.m * stride);
  memory.scales.resize(vectors), memory.sums.resize(vectors);
  if (q.zeros) memory.zeros.resize(vectors);
  if (problem.weight.offsets) memory.offset_x.resize(vectors);
  for_rows(p.m, k_pad, threads, [&](int first, int last) {
    for (int row = first; row < last; ++row) {
      int8_t const* const codes = q.codes + int64_t(row) * k_pad;
      size_t const vector = size_t(row) * p.blocks;
      for (int block = 0; block < p.blocks; ++block) {
        int64_t const from = int64_t(q.block == -1 ? 0 : block) * q.stride + row;
        size_t const index = vector + size_t(block);
        int const zero = q.zeros ? q.zeros[from] : 0;
        // Padding holds zero points, at any position of the last sixteen columns: it adds nothing.
        int64_t const begin = int64_t(block) * p.block,
                      end = std::min<int64_t>(begin + p.block, (int64_t(k) + 15) / 16 * 16);
        int64_t const sum = sum_codes(codes + begin, end - begin) - zero * (end - begin);
        memory.scales[index] = q.scales[from], memory.sums[index] = sum;
        if (q.zeros) memory.zeros[index] = zero;
        if (problem.weight.offsets) memory.offset_x[index] = q.scales[from] * float(sum);
      }
      int8_t const* from = codes;
      if (!order.centred) {
        int8_t* to = bytes + row * stride;
        if (in_order) {
          std::memcpy(to, codes, size_t(k_pad));
          continue;
        }
        for (int start = 0; start < k_pad; start += columns, from += columns, to += places) {
          for (int place = 0; place < places; place += 4)
            std::memcpy(to + place, from + positions[place], 4);
        }
        continue;
      }
      int16_t* to = centred + row * stride;
      for (int start = 0; start < k_pad; start += columns, from += columns, to += places) {
        int zeros[kLaneColumns / 16];  // of each 16 columns
        for (int j = 0; j < kLaneColumns / 16; ++j) {
          int const block = (start + 16 * j) / p.block;
          zeros[j] = q.zeros && block < p.blocks ? memory.zeros[vector + size_t(block)] : 0;
        }
        for (int place = 0; place < places; ++place) {
          int const position = positions[place];
          to[place] = int16_t(from[position] - zeros[position / 16]);
        }
      }
    }
  });
  p.codes = bytes, p.centred = centred;
  p.scales = memory.scales.data(), p.sums = memory.sums.data();
  if (q.zeros) p.zeros = memory.zeros.data();
  if (problem.weight.offsets) p.offset_x = memory.offset_x.data();
}

// Has the row panels of 2-bit codes expanded to the nibbles of the same integers.
void prepare_half_nibbles(CpuProduct& p) {
  if (nibble_columns(info(p.weight.format).bits) == 1) return;
  p.half_nibbles = p.weight.codes, p.weight.codes = nullptr, p.weight.format = Format::kInt4;
}

// Calls `work` with the product for a row panel, whose codes are those of the weight or expanded.
template <class Work>
void with_panel(CpuProduct const& p, CpuKernels const& kernels, int panel, Work const& work) {
  if (!p.half_nibbles) return work(p);
  int64_t const stored = int64_t(p.tiles) * k_tile_bytes(HalfNibbles::kBits);
  thread_local Room<uint8_t> room;
  CpuProduct expanded = p;
  uint8_t* const codes = room.of(stored * 2);
  kernels.expand_half_nibbles(p.half_nibbles + panel * stored, stored / kUnitBytes, codes);
  expanded.weight.codes = codes, expanded.first_panel = panel;
  work(expanded);
}

// The values of codes that are no integers, by code, rounded to `type`: where another format
// begins.
void prepare_codebook(DataType type, CpuProduct& p, Prepared& memory) {
  PackedWeight const& w = p.weight;
  visit(w.format, [&](auto format) {
    using F = decltype(format);
    if constexpr (!F::kIntegers) {
      memory.codebook.resize(size_t(1) << F::kBits);
      for (int code = 0; code < 1 << F::kBits; ++code) {
        float stored;  // in as many of its bytes as the type has
        store_float(&stored, type, 0, F::host_value(code, w.codebook));
        memory.codebook[code] = load_float(&stored, type, 0);
      }
      p.codebook = memory.codebook.data();
    }
  });
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
  throw std::invalid_argument("there are no kernels for the instruction set " + name +
                              " on this machine");
}

bool cpu_multiplies_bfloat16() {
#if defined(CUTLASS_OPS_AVX2)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

namespace {

HalvesOrder halves_order(PackedWeight const& weight, int m, DataType x_type, bool exact,
                         CpuKernels const& kernels) {
  bool const may = x_type == DataType::kBFloat16 && !exact && m > 0 && kernels.bfloat16_order &&
                   cpu_multiplies_bfloat16();
  // codes of 2 bits are expanded
  int const bits = ByWidth<int>(Nibbles::kBits, WholeBytes::kBits)[info(weight.format).bits];
  return may ? kernels.bfloat16_order(bits, m) : HalvesOrder::kNone;
}

}  // namespace

bool cpu_uses_bfloat16(PackedWeight const& weight, int m, DataType x_type, bool exact) {
  return halves_order(weight, m, x_type, exact, *chosen().load()) != HalvesOrder::kNone;
}

bool cpu_rounds_weight(PackedWeight const& weight, int m, DataType x_type, bool exact) {
  return halves_order(weight, m, x_type, exact, *chosen().load()) == HalvesOrder::kPairs;
}

bool cpu_fuses(int m, bool exact) {
  return !exact && m >= kCpuFusedRows && chosen().load() != &kScalarKernels;
}

std::string cpu_kernel() { return std::string("cpu_") + chosen().load()->name; }

void cpu_quantize_activations(QuantizeProblem const& problem, int threads) {
  QuantizedActivations const& out = problem.out;
  CpuKernels const& kernels = *chosen().load();
  int const k = problem.k, k_pad = int(padded_k(k)), block = out.block == -1 ? k_pad : out.block;
  bool const as_it_is = problem.x_type == DataType::kFloat32 && !problem.perm && k == k_pad;
  for (int index = 0; index < k_pad / block; ++index) {
    std::fill_n(out.scales + int64_t(index) * out.stride, out.stride, 1.0f);
    if (out.zeros) std::fill_n(out.zeros + int64_t(index) * out.stride, out.stride, int8_t(0));
  }
  for_rows(problem.m, k_pad, threads, [&](int first, int last) {
    std::vector<float> natural(as_it_is ? 0 : size_t(k_pad), 0.0f);
    for (int row = first; row < last; ++row) {
      float const* x = natural.data();
      if (as_it_is) {
        x = static_cast<float const*>(problem.x) + row * problem.x_stride;
      } else {
        gather_row(problem.x, problem.x_type, row * problem.x_stride, k, problem.perm,
                   natural.data());
      }
      int8_t* const codes = out.codes + int64_t(row) * k_pad;
      for (int begin = 0; begin < k_pad; begin += block) {
        if (begin >= k) {
          std::fill_n(codes + begin, block, int8_t(0));
          continue;
        }
        // Zeros behind the last column do not extend the range, and their code is the zero point.
        int64_t const index = int64_t(begin / block) * out.stride + row;
        kernels.quantize_block(x + begin, block, codes + begin, out.scales + index,
                               out.zeros ? out.zeros + index : nullptr);
      }
      for (int i = 0; i < k_pad; i += 16) store(codes + i, zip_halves(load(codes + i)));
    }
  });
}

namespace {

// A product whose activations are prepared, and their memory.
struct Product {
  CpuProduct p;
  Quantized quantized;
  Prepared memory;

  void prepare(GemmProblem const& given, int64_t vector_stride, CpuKernels const& kernels,
               int threads) {
    PackedWeight const& w = given.weight;
    GemmProblem problem = given;
    if (!given.quantized.codes && given.act_quant != ActQuant::kNone) {
      problem.quantized = quantized.make_room(
          given.m, w.k, given.act_quant == ActQuant::kToken ? -1 : activation_block(w.group_size),
          given.act_symmetric);
      cpu_quantize_activations(
          {given.x, given.x_type, given.x_stride, given.m, w.k, w.perm, problem.quantized},
          threads);
    }
    p = CpuProduct();
    p.weight = w, p.vector_stride = vector_stride;
    prepare_half_nibbles(p);
    p.m = problem.m, p.out = problem.out, p.out_type = problem.out_type;
    p.has_floats = !problem.quantized.codes;
    p.tiles = int(padded_k(w.k) / kKPerTile);
    int const group = columns_of_group(w);
    p.block = problem.quantized.codes && problem.quantized.block != -1
                  ? std::min(group, problem.quantized.block)
                  : group;
    p.blocks = int(ceil_div(w.k, p.block));
    p.group_blocks = group / p.block;
    if (problem.bias) {
      memory.bias.resize(size_t(w.n));
      load_row(problem.bias, problem.bias_type, 0, w.n, memory.bias.data());
      p.bias = memory.bias.data();
    }
    prepare_codebook(problem.x_type, p, memory);
    if (problem.quantized.codes) return prepare_integers(problem, kernels, p, memory, threads);
    bool const exact = problem.exact || problem.batch_invariant;
    HalvesOrder const order = halves_order(w, p.m, problem.x_type, exact, kernels);
    if (order == HalvesOrder::kPairs) return prepare_pairs(problem, p, memory, threads);
    if (order == HalvesOrder::kColumns) return prepare_halves(problem, kernels, p, memory, threads);
    p.fused = cpu_fuses(p.m, exact);
    prepare_floats(problem, p, memory, threads);
  }

  // What is allocated for every row of x.
  size_t bytes() const {
    auto const of = [](auto const& vector) { return vector.capacity() * sizeof vector[0]; };
    return quantized.codes.bytes() + of(quantized.zeros) + of(quantized.scales) + memory.x.bytes() +
           memory.codes.bytes() + memory.centred.bytes() + memory.halves.bytes() +
           of(memory.scales) + of(memory.offset_x) + of(memory.zeros) + of(memory.sums);
  }

  // Calls of a kernel: a row panel of the weight and one of these parts of the rows of x each.
  int64_t panels() const { return padded_rows(p.weight.n) / kRowsPerPanel; }
  int64_t parts() const { return ceil_div(p.m, p.in_pairs ? kMostRowsInPairs : kMostRows); }
};

// All products, whose calls of kernels the threads share.
void multiply(Product const* products, size_t count, CpuKernels const& kernels, int threads) {
  std::vector<int64_t> ends(count);  // of each product's calls
  int64_t calls = 0, work = 0;
  for (size_t i = 0; i < count; ++i) {
    ends[i] = calls += products[i].panels() * products[i].parts();
    work += padded_size(products[i].p.weight) * products[i].p.m;
  }
  // Starting threads takes less time than this many multiplications.
  constexpr int64_t kProductsOfThread = 1 << 17;
  int const used = int(std::min<int64_t>(threads, std::max<int64_t>(1, work / kProductsOfThread)));
  for_each_index(calls, std::max<int64_t>(1, calls / (8 * used)), used, [&](int64_t index) {
    size_t const i = size_t(std::upper_bound(ends.begin(), ends.end(), index) - ends.begin());
    CpuProduct const& p = products[i].p;
    int64_t const panels = products[i].panels(), parts = products[i].parts();
    int64_t const call = index - (ends[i] - panels * parts), part = call / panels;
    int const together = p.in_pairs ? 16 : 1;  // rows
    auto const begin = [&](int64_t of) {
      return std::min<int64_t>(p.m, ceil_div(p.m, together) * of / parts * together);
    };
    int64_t const first = begin(part), last = begin(part + 1);
    auto const multiply = p.halves ? kernels.multiply_bfloat16 : kernels.multiply;
    int const panel = int(call % panels);
    with_panel(p, kernels, panel, [&](CpuProduct const& of_panel) {
      multiply(of_panel, panel, int(first), int(last - first));
    });
  });
}

void const* offset_by(void const* data, int64_t elements, DataType type) {
  return data ? static_cast<char const*>(data) + elements * bytes_of(type) : nullptr;
}

}  // namespace

void cpu_mixed_gemm(GemmProblem const& problem, int threads) {
  if (problem.m == 0) return;
  constexpr size_t kKeptBytes = size_t(64) << 20;
  thread_local Product kept;
  Product& product = kept;  // a thread that shares the work would see a `kept` that is not this one
  product.prepare(problem, padded_rows(problem.weight.n), *chosen().load(), threads);
  multiply(&product, 1, *chosen().load(), threads);
  if (product.bytes() > kKeptBytes) product = Product();
}

void cpu_grouped_gemm(GemmProblem const& problem, int n, std::vector<ExpertRows> const& groups,
                      int32_t const* perms, int threads) {
  PackedWeight const& w = problem.weight;
  CpuKernels const& kernels = *chosen().load();
  int64_t const n_pad = padded_rows(n);
  std::vector<Product> products(groups.size());
  // Preparing a row takes little time: threads have several experts each.
  int64_t const count = int64_t(groups.size()), batch = ceil_div(count, 4 * threads);
  for_each_index(count, batch, threads, [&](int64_t index) {
    ExpertRows const& group = groups[size_t(index)];
    int64_t const row = n_pad * group.expert;  // of the weight
    GemmProblem one = problem;
    one.m = group.rows;
    one.x = offset_by(problem.x, group.first * problem.x_stride, problem.x_type);
    one.out = const_cast<void*>(offset_by(problem.out, int64_t(group.first) * n, problem.out_type));
    one.bias = offset_by(problem.bias, row, problem.bias_type);
    one.weight.n = n;
    one.weight.codes += packed_bytes(row, w.k, info(w.format).bits);
    one.weight.scales = offset_by(w.scales, row, w.scale_type);
    one.weight.offsets = offset_by(w.offsets, row, w.offset_type);
    if (w.zeros) one.weight.zeros += row;
    one.weight.perm = perms ? perms + int64_t(group.expert) * w.k : nullptr;
    products[size_t(index)].prepare(one, padded_rows(w.n), kernels, count == 1 ? threads : 1);
  });
  multiply(products.data(), products.size(), kernels, threads);
}

Status cpu_gemm(GemmProblem const& problem, int threads) {
  if (Status status = check_product(problem); !status.ok()) return status;
  char const* const refused = is_image(problem)                         ? "an image"
                              : problem.activation != Activation::kNone ? "an activation"
                              : problem.residual                        ? "a residual"
                              : problem.saturate                        ? "saturate"
                              : problem.weight.gated                    ? "a gated product"
                                                                        : nullptr;
  if (refused)
    return {Status::kUnsupported,
            std::string(refused) + " is in the problem; products on a CPU end with the bias"};
  if (threads < 0)
    return {Status::kInvalid,
            "threads is " + std::to_string(threads) + "; 0 (every core) and up is expected"};
  Status const status =
      check_addresses({{"out", problem.out, bytes_of(problem.out_type), problem.m > 0}});
  if (!status.ok() || problem.m == 0) return status;
  cpu_mixed_gemm(problem, threads > 0 ? threads : core_count());
  return {};
}

void cpu_dequantize(DequantizeProblem const& problem, int threads) {
  PackedWeight const& w = problem.weight;
  CpuKernels const& kernels = *chosen().load();
  CpuProduct p;
  p.weight = w, p.vector_stride = padded_rows(w.n);
  prepare_half_nibbles(p);
  p.tiles = int(padded_k(w.k) / kKPerTile);
  p.block = columns_of_group(w), p.blocks = int(ceil_div(w.k, p.block)), p.group_blocks = 1;
  Prepared memory;
  prepare_codebook(DataType::kFloat32, p, memory);
  int const all = problem.rows < 0 ? w.n - problem.first_row : problem.rows;
  int64_t const size = problem.out_type == DataType::kFloat32 ? 4 : 2,
                panels = ceil_div(all, kRowsPerPanel);
  // Starting threads takes less time than this many values.
  constexpr int64_t kValuesOfThread = 1 << 16;
  int const used =
      int(std::min<int64_t>(threads, std::max<int64_t>(1, int64_t(all) * w.k / kValuesOfThread)));
  for_each_index(panels, 1, used, [&](int64_t index) {
    int const panel = int(problem.first_row / kRowsPerPanel + index);
    int const rows = int(std::min<int64_t>(kRowsPerPanel, all - index * kRowsPerPanel));
    char* const out = static_cast<char*>(problem.out) + index * kRowsPerPanel * w.k * size;
    auto const dequantize = [&](void* to, DataType type) {
      with_panel(p, kernels, panel, [&](CpuProduct const& of_panel) {
        kernels.dequantize(of_panel, panel, rows, to, type);
      });
    };
    if (!w.perm) return dequantize(out, problem.out_type);
    std::unique_ptr<float[]> const values(new float[size_t(rows) * size_t(w.k)]);
    dequantize(values.get(), DataType::kFloat32);
    for (int64_t start = 0; start < int64_t(rows) * w.k; start += w.k) {
      for (int i = 0; i < w.k; ++i)
        store_float(out, problem.out_type, start + w.perm[i], values[size_t(start + i)]);
    }
  });
}

}  // namespace cutlass_ops
