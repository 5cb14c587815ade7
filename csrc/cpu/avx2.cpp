// Kernels for CPUs with AVX2.
#include "cpu/avx2_dequantize.h"
#include "cpu/avx2_panel.h"
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
struct TilesOf {
  using Type = HalfTiles;
};
template <>
struct TilesOf<Nibbles> {
  using Type = ByteTiles<Nibbles::kBits, PairProduct>;
};
struct Tiles {
  template <class Width>
  using Of = typename TilesOf<Width>::Type;
};

}  // namespace

CpuKernels const kAvx2Kernels = {"avx2", integer_order<Tiles>, multiply<Tiles>, dequantize,
                                 quantize_block};

}  // namespace cutlass_ops
