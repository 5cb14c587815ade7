// Kernels for CPUs with AVX2.
#include "cpu/avx2_rows.h"
#include "cpu/avx2_tiles.h"

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

// Other products take the rows of x one by one.
bool tiled(CpuProduct const& p) { return p.m > 1 && (p.has_floats || p.block <= kColumnsOf32Bits); }

void multiply(CpuProduct const& p, int panel, int first, int rows) {
  KeepDenormals const keep;
  if (!tiled(p)) {
    for (int m = first; m < first + rows; ++m) multiply_row(p, panel, m);
    return;
  }
  bool const four = p.weight.bits == 4;
  if (p.has_floats) {
    if (p.weight.e4m3) return multiply_tiles<FloatTiles<E4m3>>(p, panel, first, rows);
    if (p.codebook) return multiply_tiles<FloatTiles<Codebook4>>(p, panel, first, rows);
    return four ? multiply_tiles<FloatTiles<Int4>>(p, panel, first, rows)
                : multiply_tiles<FloatTiles<Int8>>(p, panel, first, rows);
  }
  return four ? multiply_tiles<IntegerTiles<ByteTiles<4, PairProduct>>>(p, panel, first, rows)
              : multiply_tiles<IntegerTiles<HalfTiles>>(p, panel, first, rows);
}

CpuKernels::IntegerOrder integer_order(CpuProduct const& p) {
  bool const four = p.weight.bits == 4;
  if (tiled(p))
    return four ? CpuKernels::IntegerOrder{64, 64, false, byte_column} : CpuKernels::IntegerOrder{64, 64, true, half_column};
  return four ? CpuKernels::IntegerOrder{64, 64, false, column4} : CpuKernels::IntegerOrder{32, 64, true, column8};
}

}  // namespace

CpuKernels const kAvx2Kernels = {"avx2", integer_order, multiply};

}  // namespace cutlass_ops
