// Shared by the CPU kernels of all instruction sets: the prepared product, and one function for a
// row panel.
#pragma once

#include <cstdint>
#include <cstring>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

// fp32 sums over K have eight lanes for each 64 columns, so that vectors of eight hold them. This
// is the column, of 64, at a place of x in a kernel's order: the lane is place % 8, and a lane adds
// its places in order. A lane is a word of two neighbouring t of the layout (layout.h), so codes go
// from the packed order to lanes without a shuffle.
inline constexpr int kLanes = 8;
inline constexpr int kLaneColumns = 64;
constexpr int lane_column(int place) {
  int const half = place / 32, element = place / 8 % 4, t = 2 * half + place / 4 % 2;
  return 16 * (place % 4) + 2 * t + element / 2 + 8 * (element % 2);
}

// A product whose activations are prepared. A scale block is the longest run of K that
// shares all scales.
struct CpuProduct {
  PackedWeight weight;
  // Codes of 2 bits, whose row panels become the weight's codes as they are multiplied, or null.
  uint8_t const* half_nibbles = nullptr;
  int first_panel = 0;        // of the weight's codes
  int64_t vector_stride = 0;  // elements from a group's scales, zeros and offsets to the next's
  float const* codebook = nullptr;  // values by code (not centred), rounded to x's type; null
                                    // for integer codes
  int m = 0;
  int tiles = 0;                     // of 128 columns
  int block = 0;                     // columns of a scale block: 16, 32, 64, or a multiple of 128
  int blocks = 0;                    // scale blocks that hold real columns
  int group_blocks = 0;              // scale blocks of a group of weights
  bool has_floats = false;           // x is floats
  bool fused = false;                // whose products may be added in one rounding, in any order
  int64_t x_stride = 0;              // elements of a row of x, codes or centred
  float const* x = nullptr;          // floats, in the order of lane_column; null for integers
  uint16_t const* halves = nullptr;  // bf16, in the order of the kernel for it, or null
  bool in_pairs = false;             // whether that is HalvesOrder::kPairs
  int8_t const* codes = nullptr;  // integers in the order of the kernel's instruction set, or null
  int16_t const* centred = nullptr;  // integers less their zero points, in that order, or null
  float const* scales = nullptr;     // [m][blocks], of integers
  int32_t const* zeros = nullptr;    // [m][blocks], where codes are given and have any
  int64_t const* sums = nullptr;     // [m][blocks]: of integers less their zero points; null for
                                     // floats
  float const* offset_x = nullptr;   // [m][blocks]: sums of x, which offsets multiply (and zero
                                     // points, where x is `halves`);
                                     // null without offsets

  void* out = nullptr;  // [m][n] of out_type
  DataType out_type = DataType::kFloat32;
  float const* bias = nullptr;  // [n], or null

  // columns whose products are summed at a time
  int run() const { return block < kKPerTile ? block : kKPerTile; }
};

// The most runs in 64 columns, and the run that columns 16 * j .. 16 * j + 15 belong to.
inline constexpr int kMostRuns = 4;
constexpr int run_of(int j, int run) { return 16 * j / run; }

// Rows of x in one call of a kernel, and of bf16 in pairs.
inline constexpr int kMostRows = 96, kMostRowsInPairs = 512;

// The order of x in bf16 that a kernel expects. In columns: of each 64 places, the kernel's
// bfloat16_column. In pairs: 16 rows, or fewer and zeros, are [pair of columns][row][column].
enum class HalvesOrder { kNone, kColumns, kPairs };

struct CpuKernels {
  char const* name;
  // A product's integers, in what order: [0, columns) at each place, `places` a time; and
  // whether as `centred`.
  struct IntegerOrder {
    int columns, places;
    bool centred;
    int (*column)(int place);
  };
  IntegerOrder (*integer_order)(CpuProduct const& product);
  // Columns of out from 64 * panel on, of rows first .. first + rows - 1, at most kMostRows.
  void (*multiply)(CpuProduct const& product, int panel, int first, int rows);
  // The values [rows, k] of the weight's rows from 64 * panel on, at most 64, without an act order.
  void (*dequantize)(CpuProduct const& product, int panel, int rows, void* out, DataType type);
  // A block of activations as reference.quantize_activations defines it; zero is null if symmetric.
  void (*quantize_block)(float const* x, int count, int8_t* codes, float* scale, int8_t* zero);
  // Units of 2-bit codes to twice as many of nibbles.
  void (*expand_half_nibbles)(uint8_t const* from, int64_t units, uint8_t* to);
  // multiply() for m rows of x in bf16, the order that it expects (kNone where multiply() is for
  // such x, too), and the column at each of 64 places. Null without such a kernel.
  void (*multiply_bfloat16)(CpuProduct const& product, int panel, int first, int rows) = nullptr;
  HalvesOrder (*bfloat16_order)(int bits, int m) = nullptr;
  int (*bfloat16_column)(int place) = nullptr;
};

extern CpuKernels const kScalarKernels;
#if defined(CUTLASS_OPS_AVX2)
extern CpuKernels const kAvx2Kernels;
extern CpuKernels const kAvx512VnniKernels;
// For machines that also have AVX512_BF16 (avx512_bf16.cpp).
void multiply_bfloat16(CpuProduct const& product, int panel, int first, int rows);
int bfloat16_column(int place);
#if defined(CUTLASS_OPS_AMX)
// kAvx512VnniKernels, but for many rows of integers (amx_int8.cpp) and of bf16 (amx_bf16.cpp); for
// machines where may_use_amx().
extern CpuKernels const kAmxInt8Kernels;
bool may_use_amx();
void multiply_amx(CpuProduct const& product, int panel, int first, int rows);
void multiply_amx_bfloat16(CpuProduct const& product, int panel, int first, int rows);
#endif
#endif

// ---- numbers

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Elements of fp16, bf16 or fp32 data: one, or `count` from `index` on.
float load_float(void const* data, DataType type, int64_t index);
void load_row(void const* data, DataType type, int64_t index, int count, float* out);

// The nearest value of `type`, halfway between two the even one.
void store_float(void* data, DataType type, int64_t index, float value);

}  // namespace cutlass_ops
