// Code that the AVX2 decoders of formats (csrc/formats/) share. Each source file that includes this
// has a separate copy, compiled for its instruction set.
#pragma once

#include <immintrin.h>

namespace cutlass_ops {
namespace {

// Floats of eight codes. A decoder is made of the product (CpuProduct, csrc/cpu/cpu_kernels.h),
// takes words of four codes, two rows of them in the order of lanes, and has `value<e>` of code e
// of each word, less zero points.
template <class Format>
struct Avx2Decoder;

// An integer below 2^kWidth at bit kFirstBit of a word, as a float: in the mantissa of 2^(23 -
// kFirstBit), whose last place that is.
template <int kFirstBit, int kWidth>
__m256 in_mantissa(__m256i words) {
  constexpr int kMask = ((1 << kWidth) - 1) << kFirstBit;
  // The highest bit of a stored code is inverted.
  constexpr int kBits = (127 + 23 - kFirstBit) << 23 | 1 << (kFirstBit + kWidth - 1);
  return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_and_si256(words, _mm256_set1_epi32(kMask)),
                                              _mm256_set1_epi32(kBits)));
}

// Minus the float above and the zero point.
template <int kFirstBit>
__m256 less(__m256 value, __m256 zero) {
  return _mm256_sub_ps(value, _mm256_add_ps(zero, _mm256_set1_ps(float(1 << (23 - kFirstBit)))));
}

}  // namespace
}  // namespace cutlass_ops
