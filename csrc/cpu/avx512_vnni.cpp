// Kernels for CPUs with AVX-512 VNNI. Floats with codes of more than 4 bits take the AVX2 kernels,
// for many rows of x in vectors of 16 rows.
#include "cpu/avx2_panel.h"
#include "cpu/avx512_dequantize.h"
#include "cpu/avx512_rows.h"
#include "cpu/avx512_tiles.h"
#include "cpu/cpu_ops.h"
#include "cpu/half_nibbles.h"
#include "cpu/quantize_block.h"

namespace cutlass_ops {
namespace {

// Rows of x whose sums, eight vectors each in weights of 4 bits, fit into registers together; and
// rows up to which that is faster than decoding the codes once.
constexpr int kVnniRowsTogether = 3, kMostVnniRows = 3;

// Sums of longer blocks exceed 32 bits.
bool fits_32_bits(CpuProduct const& p) { return p.block <= kColumnsOf32Bits; }

// Whether codes are decoded once for all rows of integers.
bool decodes_once(CpuProduct const& p) { return fits_32_bits(p) && p.m > kMostVnniRows; }

void multiply_any_integers(CpuProduct const& p, int panel, int first, int rows) {
  if (!fits_32_bits(p)) return multiply_few(p, panel, first, rows);
  if (decodes_once(p)) {
    return with_nibbles_or_bytes(info(p.weight.format).bits, [&](auto width) {
      multiply_wide_panel<decltype(width)::kBits>(p, panel, first, rows);
    });
  }
  for_parts<kVnniRowsTogether>(rows, [&](int row, auto count) {
    multiply_vnni<decltype(count)::value>(p, panel, first + row);
  });
}

// Rows of floats that are multiplied by codes decoded to registers together; and rows up to which
// that is faster than a tile.
constexpr int kFloatsTogether = 4, kMostNibbleRows = 4;

void multiply_few_nibbles(CpuProduct const& p, int panel, int first, int rows) {
  for_parts<kFloatsTogether>(rows, [&](int row, auto count) {
    multiply_nibbles<decltype(count)::value>(p, panel, first + row);
  });
}

void multiply_any(CpuProduct const& p, int panel, int first, int rows) {
  KeepDenormals const keep;
  bool const nibbles = info(p.weight.format).bits == Nibbles::kBits;
  if (p.has_floats && nibbles && p.m <= kMostNibbleRows)
    return multiply_few_nibbles(p, panel, first, rows);
  (p.has_floats ? multiply_any_floats : multiply_any_integers)(p, panel, first, rows);
}

HalvesOrder bfloat16_order(int bits, int) {
  return bits == Nibbles::kBits ? HalvesOrder::kColumns : HalvesOrder::kNone;
}

#if defined(CUTLASS_OPS_AMX)
// Fewer rows leave too much of a tile of x empty, and shorter runs of a tile's columns.
constexpr int kLeastAmxRows = 16, kLeastAmxRun = 64;
// Rows of bf16 from which on a weight of 4 bits is dequantised in less time than AVX-512 multiplies
// it; others keep the reference's bits below kCpuPanelRows.
constexpr int kLeastAmxRowsOfNibbles = 8;

void multiply_any_or_amx(CpuProduct const& p, int panel, int first, int rows) {
  bool const few = p.m < kLeastAmxRows || p.run() < kLeastAmxRun;
  if (p.has_floats || few || !decodes_once(p)) return multiply_any(p, panel, first, rows);
  KeepDenormals const keep;
  multiply_amx(p, panel, first, rows);
}

void multiply_bfloat16_or_amx(CpuProduct const& p, int panel, int first, int rows) {
  (p.in_pairs ? multiply_amx_bfloat16 : multiply_bfloat16)(p, panel, first, rows);
}

HalvesOrder bfloat16_order_or_pairs(int bits, int m) {
  int const least = bits == Nibbles::kBits ? kLeastAmxRowsOfNibbles : kCpuPanelRows;
  return m >= least ? HalvesOrder::kPairs : bfloat16_order(bits, m);
}
#endif

CpuKernels::IntegerOrder order_of_any(CpuProduct const& p) {
  if (!fits_32_bits(p)) return order_of_few(p);
  if (decodes_once(p)) return {64, 64, false, byte_column};
  return with_nibbles_or_bytes(info(p.weight.format).bits, [](auto width) {
    constexpr int kBits = decltype(width)::kBits;
    return CpuKernels::IntegerOrder{unit_k(kBits), 64, false, fragment_column<kBits>};
  });
}

}  // namespace

CpuKernels const kAvx512VnniKernels = {"avx512_vnni",     order_of_any,   multiply_any,
                                       dequantize_any,    quantize_block, expand_half_nibbles,
                                       multiply_bfloat16, bfloat16_order, bfloat16_column};
#if defined(CUTLASS_OPS_AMX)
CpuKernels const kAmxInt8Kernels = {
    "amx_int8",     order_of_any,        multiply_any_or_amx,      dequantize_any,
    quantize_block, expand_half_nibbles, multiply_bfloat16_or_amx, bfloat16_order_or_pairs,
    bfloat16_column};
#endif

}  // namespace cutlass_ops
