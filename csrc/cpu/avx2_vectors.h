// What kernels for AVX2 share: loads, transpositions, formats. Each source file that includes this
// has its own copy, compiled for its instruction set.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "cpu/cpu_kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kGroups = 8;      // lane groups of a panel
constexpr int kRowBlocks = 4;   // of a panel
constexpr int kRowVectors = 8;  // rows of a lane group: two of each row block

// So many columns' sums fit into 32 bits: 255 * 255 * 2^14 < 2^31.
constexpr int kColumnsOf32Bits = 1 << 14;

__m256i load(void const* from) { return _mm256_loadu_si256(static_cast<__m256i const*>(from)); }

__m256 load_floats(void const* data, DataType type, int64_t index) {
  if (type == DataType::kFloat32) return _mm256_loadu_ps(static_cast<float const*>(data) + index);
  __m128i const halves =
      _mm_loadu_si128(reinterpret_cast<__m128i const*>(static_cast<char const*>(data) + 2 * index));
  if (type == DataType::kFloat16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Vector j of rows becomes row j of vectors. Inlined, as a call would pass the
// vectors through memory.
[[gnu::always_inline]] inline void transpose(__m256 (&v)[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]),
    pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
    }
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

// ---- formats: floats of eight codes. A format takes words of four codes, two rows of them in the
// order of lanes, and has `value<e>` of code e of each word.

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

struct Int4 {
  static constexpr int kBits = 4;
  explicit Int4(CpuProduct const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256 zero) const {
    if constexpr (kElement == 3) words = _mm256_srli_epi32(words, 8);
    constexpr int kFirstBit = kElement == 3 ? 16 : 8 * kElement;
    return less<kFirstBit>(in_mantissa<kFirstBit, 4>(words), zero);
  }
};

struct Int8 {
  static constexpr int kBits = 8;
  explicit Int8(CpuProduct const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256 zero) const {
    if constexpr (kElement > 1) words = _mm256_srli_epi32(words, 16);
    constexpr int kFirstBit = 8 * (kElement % 2);
    return less<kFirstBit>(in_mantissa<kFirstBit, 8>(words), zero);
  }
};

struct Codebook4 {
  static constexpr int kBits = 4;
  __m256 low, high;  // by stored codes: values of 8 .. 15, then of 0 .. 7
  explicit Codebook4(CpuProduct const& p)
      : low(_mm256_loadu_ps(p.codebook + 8)), high(_mm256_loadu_ps(p.codebook)) {}
  template <int kElement>
  __m256 value(__m256i words, __m256) const {
    if constexpr (kElement > 0) words = _mm256_srli_epi32(words, 8 * kElement);
    __m256 const a = _mm256_permutevar8x32_ps(low, words),
                 b = _mm256_permutevar8x32_ps(high, words);
    return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(words, 28)));
  }
};

struct E4m3 {
  static constexpr int kBits = 8;
  explicit E4m3(CpuProduct const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256) const {
    if constexpr (kElement < 3) words = _mm256_slli_epi32(words, 24 - 8 * kElement);
    // Sign, exponent and mantissa are in the bits of fp32; its exponents are those of e4m3 plus
    // 120. Stored signs are inverted.
    __m256i const bits =
        _mm256_and_si256(_mm256_srai_epi32(words, 4), _mm256_set1_epi32(int(0x87f00000)));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(-0x1p120f));
  }
};

// Calls `function` with the format of the weight's codes.
template <class Function>
void with_format(CpuProduct const& p, Function const& function) {
  if (p.weight.e4m3) return function(E4m3(p));
  if (p.codebook) return function(Codebook4(p));
  return p.weight.bits == 4 ? function(Int4(p)) : function(Int8(p));
}

// The runs of a span of columns, which is one or two of 32 (CpuProduct::run): their scale blocks,
// and the place of the panel's group vectors. Found once for all rows: a division takes as long as
// the products of 64 columns.
struct Runs {
  int count = 0, block[2] = {};
  bool last[2] = {};  // of the scale block
  int64_t vector[2] = {};

  Runs(CpuProduct const& p, int panel, int begin) {
    int const run = p.run(), span = std::max(run, kLaneColumns), end_k = p.tiles * kKPerTile;
    for (int part = 0; part < span / run; ++part) {
      int const end = begin + (part + 1) * run;
      block[part] = (end - 1) / p.block, last[part] = end % p.block == 0 || end == end_k;
      if (block[part] >= p.blocks) break;
      vector[part] =
          int64_t(block[part] / p.group_blocks) * padded_rows(p.weight.n) + panel * kRowsPerPanel;
      ++count;
    }
  }
};

// Denormal numbers are what they are, whatever the caller's thread does with them.
class KeepDenormals {
 public:
  KeepDenormals() { _mm_setcsr(before_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(before_); }
  KeepDenormals(KeepDenormals const&) = delete;
  KeepDenormals& operator=(KeepDenormals const&) = delete;

 private:
  unsigned const before_ = _mm_getcsr();
};

}  // namespace
}  // namespace cutlass_ops
