// Loads, stores and transpositions for the AVX2 kernels. Each source file that includes this has a
// separate copy, compiled for its instruction set.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cpu/cpu_kernels.h"
#include "formats/avx2_mantissa.h"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

constexpr int kGroups = 8;      // lane groups of a panel
constexpr int kRowBlocks = 4;   // of a panel
constexpr int kRowVectors = 8;  // rows of a lane group: two of each row block

// Sums of this many columns fit into 32 bits: 255 * 255 * 2^14 < 2^31.
constexpr int kColumnsOf32Bits = 1 << 14;

__m256i load(void const* from) { return _mm256_loadu_si256(static_cast<__m256i const*>(from)); }

__m256i load_ints(int32_t const* from) {
  return _mm256_load_si256(reinterpret_cast<__m256i const*>(from));
}
void store_ints(int32_t* to, __m256i value) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), value);
}

// to += a * b
void add_product(float* to, __m256 a, __m256 b) {
  _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), _mm256_mul_ps(a, b)));
}

__m256 load_floats(void const* data, DataType type, int64_t index) {
  if (type == DataType::kFloat32) return _mm256_loadu_ps(static_cast<float const*>(data) + index);
  __m128i const halves =
      _mm_loadu_si128(reinterpret_cast<__m128i const*>(static_cast<char const*>(data) + 2 * index));
  if (type == DataType::kFloat16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Floats, and integers, of 16 rows of the weight, in as few vectors as there are.
#if defined(__AVX512F__)
struct Sixteen {
  __m512 v;
  Sixteen() = default;
  Sixteen(__m512 all) : v(all) {}
  explicit Sixteen(float all) : v(_mm512_set1_ps(all)) {}
  static Sixteen load(float const* from) { return _mm512_loadu_ps(from); }
  // Sixteen values of a float type, as fp32.
  static Sixteen load(void const* data, DataType type, int64_t index) {
    if (type == DataType::kFloat32) return load(static_cast<float const*>(data) + index);
    __m256i const halves = _mm256_loadu_si256(
        reinterpret_cast<__m256i const*>(static_cast<uint16_t const*>(data) + index));
    if (type == DataType::kFloat16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  void store(float* to) const { _mm512_storeu_ps(to, v); }
  friend Sixteen operator+(Sixteen a, Sixteen b) { return _mm512_add_ps(a.v, b.v); }
  friend Sixteen operator*(Sixteen a, Sixteen b) { return _mm512_mul_ps(a.v, b.v); }
  // a * b + c, rounded once.
  static Sixteen fused(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
};
struct SixteenInts {
  __m512i v;
  SixteenInts(__m512i all) : v(all) {}
  explicit SixteenInts(int all) : v(_mm512_set1_epi32(all)) {}
  static SixteenInts load(int32_t const* from) { return _mm512_loadu_si512(from); }
  static SixteenInts load(int8_t const* from) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<__m128i const*>(from)));
  }
  void store(int32_t* to) const { _mm512_storeu_si512(to, v); }
  Sixteen floats() const { return _mm512_cvtepi32_ps(v); }
  friend SixteenInts operator+(SixteenInts a, SixteenInts b) { return _mm512_add_epi32(a.v, b.v); }
  friend SixteenInts operator-(SixteenInts a, SixteenInts b) { return _mm512_sub_epi32(a.v, b.v); }
  friend SixteenInts operator*(SixteenInts a, SixteenInts b) {
    return _mm512_mullo_epi32(a.v, b.v);
  }
};
constexpr int kMostTileRows = 12;  // of x, whose sums and products fit into registers
// Row blocks that floats are multiplied by together, by fused multiply-adds: with one, loads of x
// take longer than the arithmetic.
constexpr int kFusedBlocks = 2;

// The codes that are the bits of `mask` in bytes, with the bits of `flip` inverted.
[[gnu::always_inline]] inline __m512i flipped_codes(__m512i bytes, __m512i flip, __m512i mask) {
  constexpr int kXorAnd = 0x28;
  return _mm512_ternarylogic_epi32(bytes, flip, mask, kXorAnd);
}
#else
struct Sixteen {
  __m256 low, high;
  Sixteen() = default;
  Sixteen(__m256 first, __m256 second) : low(first), high(second) {}
  explicit Sixteen(float all) : low(_mm256_set1_ps(all)), high(low) {}
  static Sixteen load(float const* from) {
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
  }
  static Sixteen load(void const* data, DataType type, int64_t index) {
    return {load_floats(data, type, index), load_floats(data, type, index + 8)};
  }
  void store(float* to) const { _mm256_storeu_ps(to, low), _mm256_storeu_ps(to + 8, high); }
  friend Sixteen operator+(Sixteen a, Sixteen b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  friend Sixteen operator*(Sixteen a, Sixteen b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  // a * b + c, rounded once.
  static Sixteen fused(Sixteen a, Sixteen b, Sixteen c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
};
struct SixteenInts {
  __m256i low, high;
  SixteenInts(__m256i first, __m256i second) : low(first), high(second) {}
  explicit SixteenInts(int all) : low(_mm256_set1_epi32(all)), high(low) {}
  static SixteenInts load(int32_t const* from) { return {load_ints(from), load_ints(from + 8)}; }
  static SixteenInts load(int8_t const* from) {
    __m128i const bytes = _mm_loadu_si128(reinterpret_cast<__m128i const*>(from));
    return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
  }
  void store(int32_t* to) const { store_ints(to, low), store_ints(to + 8, high); }
  Sixteen floats() const { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }
  friend SixteenInts operator+(SixteenInts a, SixteenInts b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
  }
  friend SixteenInts operator-(SixteenInts a, SixteenInts b) {
    return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
  }
  friend SixteenInts operator*(SixteenInts a, SixteenInts b) {
    return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
  }
};
constexpr int kMostTileRows = 6;  // 12 sums, two vectors of codes and two more fill the registers
constexpr int kFusedBlocks = 1;
#endif

// The codes of a panel, and of its columns from `column` on, a multiple of 64.
template <int kBits>
uint8_t const* codes_of_panel(CpuProduct const& p, int panel) {
  return p.weight.codes + int64_t(panel - p.first_panel) * p.tiles * k_tile_bytes(kBits);
}
template <int kBits>
uint8_t const* codes_at(uint8_t const* panel, int column) {
  return panel + int64_t(column / kKPerTile) * k_tile_bytes(kBits) +
         column % kKPerTile / unit_k(kBits) * kUnitBytes;
}

// use(0) .. use(kCount - 1), with constants: arrays with such indices alone are kept in registers.
template <class Use, int... kIndices>
[[gnu::always_inline]] inline void unrolled(std::integer_sequence<int, kIndices...>,
                                            Use const& use) {
  (use(std::integral_constant<int, kIndices>()), ...);
}
template <int kCount, class Use>
[[gnu::always_inline]] inline void unrolled(Use const& use) {
  unrolled(std::make_integer_sequence<int, kCount>(), use);
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

// The nearest values in bf16, of NaN the quiet one.
inline __m128i bfloat16_of(__m256 value) {
  __m256i const bits = _mm256_castps_si256(value),
                even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1)),
                more = _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff));
  __m256 const rounded = _mm256_castsi256_ps(_mm256_srli_epi32(_mm256_add_epi32(bits, more), 16)),
               nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc0)),
               is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  __m256i const all = _mm256_castps_si256(_mm256_blendv_ps(rounded, nan, is_nan));
  return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

// Writes eight sums plus the bias to a row of the result; sums that are not finite become NaN.
inline void store_vector(CpuProduct const& p, int m, int column, __m256 value) {
  __m256 const nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  __m256 const finite = _mm256_cmp_ps(_mm256_sub_ps(value, value), _mm256_setzero_ps(), _CMP_EQ_OQ);
  value = _mm256_blendv_ps(nan, value, finite);
  int const n = p.weight.n, count = n - column;
  int64_t const index = int64_t(m) * n + column;
  if (count < 8) {
    alignas(32) float values[8];
    _mm256_store_ps(values, value);
    for (int i = 0; i < count; ++i)
      store_float(p.out, p.out_type, index + i,
                  p.bias ? values[i] + p.bias[column + i] : values[i]);
    return;
  }
  if (p.bias) value = _mm256_add_ps(value, _mm256_loadu_ps(p.bias + column));
  if (p.out_type == DataType::kFloat32)
    return _mm256_storeu_ps(static_cast<float*>(p.out) + index, value);
  auto* const to = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(p.out) + index);
  _mm_storeu_si128(to, p.out_type == DataType::kFloat16
                           ? _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)
                           : bfloat16_of(value));
}

// A panel's sums, in the order of group vectors, to row m of the result.
inline void store_group_order(CpuProduct const& p, int panel, int m, float const* total) {
  __m256 v[8];
  for (int g = 0; g < 8; ++g) v[g] = _mm256_load_ps(total + 8 * g);
  transpose(v);
  int const first = panel * kRowsPerPanel;
  for (int i = 0; i < 8 && first + 8 * i < p.weight.n; ++i) store_vector(p, m, first + 8 * i, v[i]);
}

// use(count) with a constant, from 1 to kMost.
template <int kMost, class Use>
void with_count(int count, Use const& use) {
  if constexpr (kMost > 0) {
    if (count == kMost) return use(std::integral_constant<int, kMost>());
    with_count<kMost - 1>(count, use);
  }
}

// use(first, count), count being a constant, for parts of `rows` rows: as few, and as like, as rows
// of at most kMost allow.
template <int kMost, class Use>
void for_parts(int rows, Use const& use) {
  int const parts = (rows + kMost - 1) / kMost;
  for (int part = 0; part < parts; ++part) {
    int const first = rows * part / parts;
    with_count<kMost>(rows * (part + 1) / parts - first, [&](auto count) { use(first, count); });
  }
}

// Prefetches a group's vectors of a panel, which begin with `index`: they are few, and far from
// those of other groups.
inline void prefetch_vectors(PackedWeight const& w, int64_t index) {
  auto const panel = [&](void const* data, int bytes) {
    for (int line = 0; line < bytes; ++line)
      _mm_prefetch(static_cast<char const*>(data) + index * bytes + 64 * line, _MM_HINT_T0);
  };
  panel(w.scales, w.scale_type == DataType::kFloat32 ? 4 : 2);
  if (w.zeros) panel(w.zeros, 1);
  if (w.offsets) panel(w.offsets, w.offset_type == DataType::kFloat32 ? 4 : 2);
}

// The runs of a span of columns, which is one, or 64 columns of shorter ones (CpuProduct::run):
// their scale blocks, and the place of the panel's group vectors. Counted from span to span: a
// division takes as long as the products of 64 columns.
struct Runs {
  int const run, span;
  int begin = 0, count = 0, block[kMostRuns] = {};
  bool last[kMostRuns] = {};  // of the scale block
  int64_t vector[kMostRuns] = {};

  Runs(CpuProduct const& p, int panel)
      : run(p.run()), span(std::max(run, kLaneColumns)), p_(p), at_(panel * kRowsPerPanel) {}

  // The next span; false behind the last.
  [[gnu::noinline]] bool next() {
    begin = end_;
    for (count = 0; end_ < begin + span && block_ < p_.blocks; ++count) {
      end_ += run, columns_ += run;
      bool const done = columns_ == p_.block || end_ == p_.tiles * kKPerTile;
      block[count] = block_, last[count] = done, vector[count] = at_;
      if (!done) continue;
      columns_ = 0, ++block_;
      if (++group_block_ < p_.group_blocks) continue;
      group_block_ = 0, at_ += stride_;
      prefetch_vectors(p_.weight, at_ + kGroupsAhead * stride_);
    }
    return count > 0;
  }

 private:
  static constexpr int kGroupsAhead = 4;

  CpuProduct const& p_;
  int end_ = 0, columns_ = 0, block_ = 0, group_block_ = 0;
  int64_t at_, stride_ = p_.vector_stride;
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

// Prefetches the codes of a panel one cache line at a time, in the order of memory, in which the
// hardware's prefetcher does not see them used. kHint: into which caches; kAhead: bytes.
template <_mm_hint kHint, int kAhead>
class PrefetchTo {
 public:
  explicit PrefetchTo(uint8_t const* codes, int ahead = kAhead)
      : next_(reinterpret_cast<char const*>(codes) + ahead) {}
  void line() { _mm_prefetch(next_, kHint), next_ += 64; }
  void lines(int count) {
    for (int i = 0; i < count; ++i) line();
  }

 private:
  char const* next_;
};
using Prefetch = PrefetchTo<_MM_HINT_T0, 4096>;
// For products that take less time for a line than memory does: into the second cache, where more
// lines may be on their way.
using FarPrefetch = PrefetchTo<_MM_HINT_T1, 8192>;

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
