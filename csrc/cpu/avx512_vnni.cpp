// Kernels for CPUs with AVX-512 VNNI: the AVX2 kernels with one instruction for the sum of four
// products of bytes, and a kernel for few rows of int8 x.
#include "cpu/avx2_dequantize.h"
#include "cpu/avx2_panel.h"
#include "cpu/avx512_rows.h"
#include "cpu/quantize_block.h"

namespace cutlass_ops {
namespace {

struct QuadProduct {
  static constexpr bool kDrains = false;
  static __m256i add(__m256i sum, __m256i codes, __m256i x) {
    return _mm256_dpbusd_epi32(sum, codes, x);
  }
};

struct Tiles {
  template <class Width>
  using Of = ByteTiles<Width::kBits, QuadProduct>;
};

// Rows of x whose sums, eight vectors each in weights of 4 bits, fit into registers together; and
// rows up to which that is faster than decoding the codes once.
constexpr int kVnniRowsTogether = 3, kMostVnniRows = 16;

bool has_vnni_rows(CpuProduct const& p) {
  return !p.has_floats && p.m <= kMostVnniRows && p.block <= kColumnsOf32Bits;
}

void multiply_any(CpuProduct const& p, int panel, int first, int rows) {
  if (!has_vnni_rows(p)) return multiply<Tiles>(p, panel, first, rows);
  KeepDenormals const keep;
  int const parts = (rows + kVnniRowsTogether - 1) / kVnniRowsTogether;
  for (int part = 0; part < parts; ++part) {
    int const row = rows * part / parts, count = rows * (part + 1) / parts - row;
    (count == 1   ? multiply_vnni<1>
     : count == 2 ? multiply_vnni<2>
                  : multiply_vnni<3>)(p, panel, first + row);
  }
}

CpuKernels::IntegerOrder order_of_any(CpuProduct const& p) {
  if (!has_vnni_rows(p)) return integer_order<Tiles>(p);
  return with_width(info(p.weight.format).bits, [](auto width) {
    constexpr int kBits = decltype(width)::kBits;
    return CpuKernels::IntegerOrder{unit_k(kBits), 64, false, fragment_column<kBits>};
  });
}

}  // namespace

CpuKernels const kAvx512VnniKernels = {"avx512_vnni", order_of_any, multiply_any, dequantize,
                                       quantize_block};

}  // namespace cutlass_ops
