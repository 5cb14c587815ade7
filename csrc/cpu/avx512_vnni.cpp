// Kernels for CPUs with AVX-512 VNNI: those for AVX2, and sums of four products of bytes by one instruction.
#include "cpu/avx2_dequantize.h"
#include "cpu/avx2_panel.h"

namespace cutlass_ops {
namespace {

struct QuadProduct {
  static constexpr bool kDrains = false;
  static __m256i add(__m256i sum, __m256i codes, __m256i x) { return _mm256_dpbusd_epi32(sum, codes, x); }
};

using Four = ByteTiles<4, QuadProduct>;
using Eight = ByteTiles<8, QuadProduct>;

}  // namespace

CpuKernels const kAvx512VnniKernels = {"avx512_vnni", integer_order<Four, Eight>, multiply<Four, Eight>, dequantize};

}  // namespace cutlass_ops
