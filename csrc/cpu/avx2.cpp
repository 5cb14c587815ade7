// Kernels for CPUs with AVX2.
#include "cpu/avx2_dequantize.h"
#include "cpu/avx2_panel.h"
#include "cpu/half_nibbles.h"
#include "cpu/quantize_block.h"

namespace cutlass_ops {
namespace {

// 15 * 128 * 2 a product of pairs: eight of them fit into 16 bits.
struct PairProduct {
  static constexpr bool kDrains = true;
  static __m256i add(__m256i sum, __m256i codes, __m256i x) {
    __m256i const products = _mm256_maddubs_epi16(codes, x);
    asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products));  // as in HalfProduct
    return sum;
  }
  static __m256i words(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};

template <class Width>
struct CodesOf {
  using Type = HalfTiles;
};
template <>
struct CodesOf<Nibbles> {
  using Type = ByteTiles<Nibbles::kBits, PairProduct>;
};

void multiply_any(CpuProduct const& p, int panel, int first, int rows) {
  KeepDenormals const keep;
  if (p.has_floats) return multiply_any_floats(p, panel, first, rows);
  if (has_few_rows(p)) return multiply_few(p, panel, first, rows);
  with_nibbles_or_bytes(info(p.weight.format).bits, [&](auto width) {
    using Codes = typename CodesOf<decltype(width)>::Type;
    multiply_tiles<IntegerTiles<Codes>>(p, panel, first, rows);
  });
}

CpuKernels::IntegerOrder order_of_any(CpuProduct const& p) {
  if (has_few_rows(p)) return order_of_few(p);
  return with_nibbles_or_bytes(info(p.weight.format).bits, [](auto width) {
    constexpr bool kCentred = CodesOf<decltype(width)>::Type::kCentred;
    return CpuKernels::IntegerOrder{64, 64, kCentred, kCentred ? half_column : byte_column};
  });
}

}  // namespace

CpuKernels const kAvx2Kernels = {"avx2",     order_of_any,   multiply_any,
                                 dequantize, quantize_block, expand_half_nibbles};

}  // namespace cutlass_ops
