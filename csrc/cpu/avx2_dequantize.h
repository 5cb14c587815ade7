// The values of a panel's rows, with AVX2: codes are decoded as for products of many rows, and
// transposed to rows.
#pragma once

#include "cpu/avx2_tiles.h"

namespace cutlass_ops {
namespace {

// Two values of eight rows as 16-bit words of 32 bits, rounded to the nearest, halfway
// to the even one.
__m256 pair_bfloat16(__m256 low, __m256 high) {
  auto const rounded = [](__m256 value) {
    __m256i const bits = _mm256_castps_si256(value),
                  even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i const sum = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    // The bits of a NaN, for example of scales in uninitialised memory, may overflow to those of a
    // number.
    __m256i const nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), nan);
  };
  return _mm256_castsi256_ps(
      _mm256_blend_epi16(_mm256_srli_epi32(rounded(low), 16), rounded(high), 0xaa));
}

__m256 pair_float16(__m256 low, __m256 high) {
  __m128i const a = _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT),
                b = _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT);
  return _mm256_castsi256_ps(_mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b)));
}

// The first `bytes` of a vector.
void store_bytes(char* to, __m256 value, int bytes) {
  alignas(32) char memory[32];
  _mm256_storeu_ps(reinterpret_cast<float*>(bytes == 32 ? to : memory), value);
  if (bytes < 32) std::memcpy(to, memory, size_t(bytes));
}

// The values of a span's columns, those of a row `stride` bytes after those of the row before.
template <class Format, DataType kType>
class SpanValues {
 public:
  static constexpr int kBytes = kType == DataType::kFloat32 ? 4 : 2;  // of a value

  SpanValues(CpuProduct const& p, int panel)
      : p_(p), tiles_(codes_of_panel<Format::kBits>(p, panel)), decoder_(p) {}

  void store(Runs const& runs, int rows, void* out, int64_t stride) {
    constexpr int kBits = Format::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
    constexpr int kColumns = 32 / kBytes;
    PackedWeight const& w = p_.weight;
    Span const span(p_, runs);
    uint8_t const* const codes = codes_at<kBits>(tiles_, span.begin);
    int const places = span.columns / kLanes, columns = std::min(span.columns, w.k - span.begin);
    for (int first = 0; first < rows; first += 8) {
      int const i = first / kRowsPerBlock, h = first / 8 % 2;
      if (h == 0) decode_floats<true>(p_, decoder_, span, codes + i * kBlockBytes, i, tile_);
      for (int column = 0; column < columns; column += kColumns) {
        Span::Run const& run = span.run[std::min(column / p_.run(), span.runs - 1)];
        __m256 const offset = w.offsets ? run.offsets[first / 8] : _mm256_setzero_ps();
        // The values of columns 2 * t and 2 * t + 1 of eight: two of the four elements of a word
        // (lane_column).
        int const j = column % kLaneColumns / 16, element = column / 8 % 2;
        float const* const words =
            tile_ + (j * places + column / kLaneColumns * 8 + element) * kRowsPerBlock + 8 * h;
        auto const value = [&](int t, int place) {
          __m256 const product =
              _mm256_load_ps(words + (t % 2 * 4 * places + t / 2 * 4 + place) * kRowsPerBlock);
          return w.offsets ? _mm256_add_ps(product, offset) : product;
        };
        __m256 v[8];
        unrolled<8>([&](auto c) {
          if constexpr (kType == DataType::kFloat32) {
            v[c] = value(c / 2, c % 2 * 2);
          } else {
            __m256 const low = value(c % 4, c / 4), high = value(c % 4, c / 4 + 2);
            v[c] = kType == DataType::kFloat16 ? pair_float16(low, high) : pair_bfloat16(low, high);
          }
        });
        transpose(v);
        int const bytes = std::min(kColumns, columns - column) * kBytes,
                  last = std::min(8, rows - first);
        char* const to = static_cast<char*>(out) + first * stride + column * kBytes;
        for (int r = 0; r < last; ++r) store_bytes(to + r * stride, v[r], bytes);
      }
    }
  }

 private:
  CpuProduct const& p_;
  uint8_t const* const tiles_;
  Avx2Decoder<Format> const decoder_;
  alignas(64) float tile_[kRowsPerBlock * kKPerTile];
};

// Stores the values of a panel's rows, one row after the other.
template <class Values>
void store_all(CpuProduct const& p, int panel, int rows, void* out) {
  Values values(p, panel);
  for (Runs runs(p, panel); runs.next();)
    values.store(runs, rows, static_cast<char*>(out) + int64_t(runs.begin) * Values::kBytes,
                 int64_t(p.weight.k) * Values::kBytes);
}

template <class Format>
void dequantize_panel(CpuProduct const& p, int panel, int rows, void* out, DataType type) {
  auto const run = type == DataType::kFloat32 ? store_all<SpanValues<Format, DataType::kFloat32>>
                   : type == DataType::kFloat16
                       ? store_all<SpanValues<Format, DataType::kFloat16>>
                       : store_all<SpanValues<Format, DataType::kBFloat16>>;
  run(p, panel, rows, out);
}

void dequantize(CpuProduct const& p, int panel, int rows, void* out, DataType type) {
  KeepDenormals const keep;
  visit_nibbles_or_bytes(p.weight.format, [&](auto format) {
    dequantize_panel<decltype(format)>(p, panel, rows, out, type);
  });
}

}  // namespace
}  // namespace cutlass_ops
