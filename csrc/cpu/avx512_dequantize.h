// The values of a panel's rows with codes of 4 bits, with AVX-512: the 16 values of a row in a
// scale block are computed once, and its codes look them up. Other codes are dequantised as with
// AVX2.
#pragma once

#include "cpu/avx2_dequantize.h"
#include "cpu/avx512_rows.h"

namespace cutlass_ops {
namespace {

// The table in which codes look up 16 values: floats or, in the first half, 16-bit words, rounded
// to bf16 as pair_bfloat16() does, or to fp16.
template <DataType kType>
__m512i table_of(__m512 values) {
  __m512i const bits = _mm512_castps_si512(values);
  if constexpr (kType == DataType::kFloat32) return bits;
  if constexpr (kType == DataType::kFloat16)
    return _mm512_castsi256_si512(_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  __m512i const even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i const sum = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  __mmask16 const nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_castsi256_si512(_mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000)), 16)));
}

// The values of a row by stored code; `index`: the row's place in its group's vectors.
__m512 values_of_row(PackedWeight const& w, __m512 stored, BlockVectors const& vectors,
                     int8_t const* zeros, int index) {
  if (zeros) stored = _mm512_sub_ps(stored, _mm512_set1_ps(float(zeros[index])));
  __m512 const value = _mm512_mul_ps(stored, _mm512_set1_ps(vectors.scales[index]));
  return w.offsets ? _mm512_add_ps(value, _mm512_set1_ps(vectors.offsets[index])) : value;
}

// The place in a lane group's 64 bytes of each of 32 columns, from `first` on (lane_column()).
__m512i places_of_columns(int first) {
  alignas(64) int16_t places[32];
  for (int i = 0; i < 32; ++i) {
    int const column = first + i, inside = column % 8;
    places[i] = int16_t(inside / 2 * 16 + column / 16 * 4 + inside % 2 * 2 + column % 16 / 8);
  }
  return _mm512_load_si512(places);
}

// Stores 32 values, of which `columns` exist, that words of codes look up in the tables of the runs
// that they belong to, at most two.
template <DataType kType>
[[gnu::always_inline]] inline void store_values(__m512i codes, __m512i const* tables, int runs,
                                                int columns, char* to) {
  uint32_t const exist = columns >= 32 ? ~0u : (1u << std::max(columns, 0)) - 1;
  if constexpr (kType == DataType::kFloat32) {
    for (int half = 0; half < 2; ++half) {
      __m256i const words =
          half ? _mm512_extracti64x4_epi64(codes, 1) : _mm512_castsi512_si256(codes);
      _mm512_mask_storeu_epi32(
          to + 64 * half, __mmask16(exist >> 16 * half),
          _mm512_permutexvar_epi32(_mm512_cvtepu16_epi32(words), tables[half * (runs - 1)]));
    }
  } else {
    __m512i found = _mm512_permutexvar_epi16(codes, tables[0]);
    if (runs == 2) found = _mm512_mask_permutexvar_epi16(found, 0xffff0000u, codes, tables[1]);
    _mm512_mask_storeu_epi16(to, exist, found);
  }
}

// SpanValues of codes of 4 bits, by kTable's tables.
template <DataType kType, __m512i (*kTable)(__m512) = table_of<kType>>
class SpanNibbles {
 public:
  static constexpr int kBytes = kType == DataType::kFloat32 ? 4 : 2;

  SpanNibbles(CpuProduct const& p, int panel)
      : w_(p.weight), tiles_(codes_of_panel<Nibbles::kBits>(p, panel)), stored_(stored_values(p)) {}

  void store(Runs const& runs, int rows, void* out, int64_t stride) const {
    constexpr int kBits = Nibbles::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
    __m512i const nibbles = _mm512_set1_epi8(15);
    uint8_t const* const codes = codes_at<kBits>(tiles_, runs.begin);
    alignas(64) BlockVectors vectors[kMostRuns];
    int8_t const* zeros[kMostRuns] = {};
    int const of_64 = std::max(kLaneColumns / runs.run, 1);  // runs
    for (int part = 0; part < of_64; ++part) {
      int const from = std::min(part, runs.count - 1);
      vectors[part] = BlockVectors(w_, runs.vector[from]);
      if (w_.zeros) zeros[part] = w_.zeros + runs.vector[from];
    }
    for (int row = 0; row < rows; ++row) {
      int const i = row / kRowsPerBlock, h = row / 8 % 2, g = row % 8, index = 8 * g + 2 * i + h;
      __m512i tables[kMostRuns];
      for (int part = 0; part < of_64; ++part)
        tables[part] = kTable(values_of_row(w_, stored_, vectors[part], zeros[part], index));
      for (int f = 0; f < runs.span / kLaneColumns; ++f) {
        __m512i bytes = _mm512_loadu_si512(codes + i * kBlockBytes + f * kUnitBytes + g * 64);
        if (h) bytes = _mm512_srli_epi16(bytes, 4);
        bytes = _mm512_and_si512(bytes, nibbles);
        __m512i const low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes)),
                      high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(bytes, 1));
        for (int half = 0; half < 2; ++half) {
          int const column = f * kLaneColumns + 32 * half;
          store_values<kType>(_mm512_permutex2var_epi16(low, places_[half], high),
                              tables + half * of_64 / 2, of_64 == 4 ? 2 : 1,
                              w_.k - runs.begin - column,
                              static_cast<char*>(out) + row * stride + column * kBytes);
        }
      }
    }
  }

 private:
  PackedWeight const& w_;
  uint8_t const* const tiles_;
  __m512 const stored_;
  __m512i const places_[2] = {places_of_columns(0), places_of_columns(32)};
};

[[maybe_unused]] void dequantize_any(CpuProduct const& p, int panel, int rows, void* out,
                                     DataType type) {
  if (info(p.weight.format).bits != Nibbles::kBits) return dequantize(p, panel, rows, out, type);
  KeepDenormals const keep;
  (type == DataType::kFloat32   ? store_all<SpanNibbles<DataType::kFloat32>>
   : type == DataType::kFloat16 ? store_all<SpanNibbles<DataType::kFloat16>>
                                : store_all<SpanNibbles<DataType::kBFloat16>>)(p, panel, rows, out);
}

}  // namespace
}  // namespace cutlass_ops
