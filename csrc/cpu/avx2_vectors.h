// Loads and transpositions for the AVX2 kernels. Each source file that includes this has its own
// copy, compiled for its instruction set.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "cpu/avx2_mantissa.h"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

constexpr int kGroups = 8;      // lane groups of a panel
constexpr int kRowBlocks = 4;   // of a panel
constexpr int kRowVectors = 8;  // rows of a lane group: two of each row block

// Sums of this many columns fit into 32 bits: 255 * 255 * 2^14 < 2^31.
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

// The runs of a span of columns, which is one, or 64 columns of shorter ones (CpuProduct::run):
// their scale blocks, and the place of the panel's group vectors. Found once for all rows: a
// division takes as long as the products of 64 columns.
struct Runs {
  int run, count = 0, block[kMostRuns] = {};
  bool last[kMostRuns] = {};  // of the scale block
  int64_t vector[kMostRuns] = {};

  Runs(CpuProduct const& p, int panel, int begin) : run(p.run()) {
    int const span = std::max(run, kLaneColumns), end_k = p.tiles * kKPerTile;
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

// of(part), a vector of one number, in the lanes 4 * (t % 2) + j of each run's columns.
template <class Of>
[[gnu::always_inline]] inline __m256 by_run(Runs const& runs, Of const& of) {
  __m256 all = of(0);
  auto const put = [&](auto lanes, int part) {
    if (part < runs.count) all = _mm256_blend_ps(all, of(part), lanes());
  };
  if (runs.run == 32) {
    put(std::integral_constant<int, 0xcc>(), 1);
  } else if (runs.run == 16) {
    put(std::integral_constant<int, 0x22>(), 1);
    put(std::integral_constant<int, 0x44>(), 2);
    put(std::integral_constant<int, 0x88>(), 3);
  }
  return all;
}

// Denormal numbers keep their values here, whatever mode the caller's thread has set.
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
