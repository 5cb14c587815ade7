// The values of a panel's rows, with AVX2: codes are decoded as for products of many rows, and transposed to rows.
#pragma once

#include "cpu/avx2_tiles.h"

namespace cutlass_ops {
namespace {

// Of fp32 values, rounded to bf16 as store_float does it.
__m128i to_bfloat16(__m256 value) {
  __m256i const bits = _mm256_castps_si256(value);
  __m256i const even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i const rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
  __m256i const nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  __m256i const words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// The first `count` of eight values, to `index` of data and on.
void store_values(void* data, DataType type, int64_t index, int count, __m256 value) {
  int const size = type == DataType::kFloat32 ? 4 : 2;
  alignas(32) unsigned char memory[32];
  unsigned char* const place = static_cast<unsigned char*>(data) + size * index;
  unsigned char* const to = count == 8 ? place : memory;
  if (type == DataType::kFloat32) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to), value);
  } else {
    __m128i const halves = type == DataType::kFloat16 ? _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT) : to_bfloat16(value);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
  }
  if (to != place) std::memcpy(place, memory, size_t(size) * count);
}

template <class Format>
void dequantize_panel(CpuProduct const& p, int panel, int rows, void* out, DataType type) {
  constexpr int kBits = Format::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  PackedWeight const& w = p.weight;
  uint8_t const* const tiles = w.codes + int64_t(panel) * p.tiles * k_tile_bytes(kBits);
  Format const format(p);
  alignas(64) float tile[kRowsPerBlock * kKPerTile];
  for (int begin = 0; begin < w.k; begin += std::max(p.run(), kLaneColumns)) {
    Span const span(p, panel, begin);
    uint8_t const* const codes =
        tiles + int64_t(begin / kKPerTile) * k_tile_bytes(kBits) + begin % kKPerTile / kLaneColumns * (kUnitBytes * kBits / 4);
    int const places = span.columns / kLanes, columns = std::min(span.columns, w.k - begin);
    for (int first = 0; first < rows; first += 8) {
      int const i = first / kRowsPerBlock, h = first / 8 % 2;
      if (h == 0) decode_floats(p, format, span, codes + i * kBlockBytes, i, tile);
      for (int column = 0; column < columns; column += 8) {
        // Columns 2 * t and 2 * t + 1 of eight are two of the four elements of a word (lane_column).
        int const j = column % kLaneColumns / 16, element = column / 8 % 2;
        float const* const words = tile + (j * places + column / kLaneColumns * 8 + element) * kRowsPerBlock + 8 * h;
        Span::Run const& run = span.run[std::min(column / p.run(), span.runs - 1)];
        __m256 v[8];
        unrolled<8>([&](auto c) {
          constexpr int kT = c / 2, kPlace = 4 * (kT / 2) + 2 * (c % 2);
          v[c] = _mm256_load_ps(words + (kT % 2 * 4 * places + kPlace) * kRowsPerBlock);
          v[c] = _mm256_mul_ps(v[c], run.scales[first / 8]);
          if (w.offsets) v[c] = _mm256_add_ps(v[c], run.offsets[first / 8]);
        });
        transpose(v);
        int const count = std::min(8, columns - column), last = std::min(8, rows - first);
        for (int r = 0; r < last; ++r) store_values(out, type, int64_t(first + r) * w.k + begin + column, count, v[r]);
      }
    }
  }
}

void dequantize(CpuProduct const& p, int panel, int rows, void* out, DataType type) {
  KeepDenormals const keep;
  bool const four = p.weight.bits == 4;
  auto const run = p.weight.e4m3 ? dequantize_panel<E4m3>
                   : p.codebook  ? dequantize_panel<Codebook4>
                   : four        ? dequantize_panel<Int4>
                                 : dequantize_panel<Int8>;
  run(p, panel, rows, out, type);
}

}  // namespace
}  // namespace cutlass_ops
