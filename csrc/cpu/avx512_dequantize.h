// The values of a panel's rows with codes of 4 bits, with AVX-512: the 16 values of a row in a
// scale block are computed once, those of two runs of columns together, and its codes look them up.
// Other codes are dequantised as with AVX2.
#pragma once

#include <array>

#include "cpu/avx2_dequantize.h"
#include "cpu/avx512_rows.h"

namespace cutlass_ops {
namespace {

constexpr int kSecondRun = 16;  // in a code that looks up a value of the second of two runs

// The bits of values whose upper halves are bf16, rounded as pair_bfloat16() does.
[[gnu::always_inline]] inline __m512i rounded_bfloat16(__m512 values) {
  __m512i const bits = _mm512_castps_si512(values),
                even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1)),
                sum = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q),
                               _mm512_set1_epi32(0x7fc00000));
}

// Tables in which codes look up the values of two runs, 16 each: of floats, or one of 16-bit words,
// in which the second run's are 16 to 31.
template <DataType kType>
struct Tables {
  static constexpr int kCount = kType == DataType::kFloat32 ? 2 : 1;
  __m512i of[kCount];

  [[gnu::always_inline]] Tables(__m512 first, __m512 second) {
    if constexpr (kType == DataType::kFloat32) {
      of[0] = _mm512_castps_si512(first), of[1] = _mm512_castps_si512(second);
    } else if constexpr (kType == DataType::kFloat16) {
      of[0] = _mm512_inserti64x4(
          _mm512_castsi256_si512(_mm512_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT)),
          _mm512_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT), 1);
    } else {
      alignas(64) static constexpr auto kUpperHalves = [] {
        std::array<int16_t, 32> places{};
        for (int i = 0; i < 32; ++i) places[i] = int16_t(2 * i + 1);
        return places;
      }();
      of[0] =
          _mm512_permutex2var_epi16(rounded_bfloat16(first), _mm512_load_si512(kUpperHalves.data()),
                                    rounded_bfloat16(second));
    }
  }
};

// The values of a row by stored code; `index`: the row's place in its group's vectors.
[[gnu::always_inline]] inline __m512 values_of_row(PackedWeight const& w, __m512 stored,
                                                   BlockVectors const& vectors, int8_t const* zeros,
                                                   int index) {
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

// Stores 32 values, of which `columns` exist, that words of codes look up. `run`: of the first 16
// columns, and of the others.
template <DataType kType, class RunTables>
[[gnu::always_inline]] inline void store_values(__m512i codes, RunTables const& tables,
                                                int const (&run)[2], int columns, char* to) {
  uint32_t const exist = columns >= 32 ? ~0u : (1u << std::max(columns, 0)) - 1;
  if constexpr (kType == DataType::kFloat32) {
    for (int half = 0; half < 2; ++half) {
      __m512i const words = _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64(codes, 1)
                                                       : _mm512_castsi512_si256(codes));
      _mm512_mask_storeu_epi32(to + 64 * half, __mmask16(exist >> 16 * half),
                               _mm512_permutexvar_epi32(words, tables.of[run[half]]));
    }
  } else {
    _mm512_mask_storeu_epi16(to, exist, _mm512_permutexvar_epi16(codes, tables.of[0]));
  }
}

// SpanValues of codes of 4 bits, by tables.
template <DataType kType, class RunTables = Tables<kType>>
class SpanNibbles {
 public:
  static constexpr int kBytes = kType == DataType::kFloat32 ? 4 : 2;

  SpanNibbles(CpuProduct const& p, int panel)
      : w_(p.weight), tiles_(codes_of_panel<Nibbles::kBits>(p, panel)), stored_(stored_values(p)) {
    // Codes of every second run have a bit more, in the bytes' order.
    alignas(64) uint8_t bits[kLaneColumns];
    alignas(64) int16_t places[2][32];
    for (int half = 0; half < 2; ++half) _mm512_store_si512(places[half], places_[half]);
    for (int column = 0; column < kLaneColumns; ++column)
      bits[places[column / 32][column % 32]] = column / p.run() % 2 ? kSecondRun : 0;
    second_bits_ = _mm512_load_si512(bits);
  }

  void store(Runs const& runs, int rows, void* out, int64_t stride) const {
    constexpr int kBits = Nibbles::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
    constexpr int kNibbleOrRun = 0xea;  // (a & b) | c
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
      auto const values = [&](int part) {
        return values_of_row(w_, stored_, vectors[part], zeros[part], index);
      };
      auto const tables_of = [&](int part) {
        __m512 const first = values(part);
        return RunTables(first, of_64 > 1 ? values(part + 1) : first);
      };
      RunTables const low_tables = tables_of(0),
                      high_tables = of_64 == kMostRuns ? tables_of(2) : low_tables;
      int const low_runs[2] = {0, of_64 == 4}, high_runs[2] = {of_64 == 2, of_64 > 1};
      for (int f = 0; f < runs.span / kLaneColumns; ++f) {
        uint8_t const* const line = codes + i * kBlockBytes + f * kUnitBytes + g * 64;
        __m512i bytes = _mm512_loadu_si512(line);
        if (h) {
          bytes = _mm512_srli_epi16(bytes, 4);
        } else {
          _mm_prefetch(line + k_tile_bytes(kBits), _MM_HINT_T0);
        }
        bytes = _mm512_ternarylogic_epi32(bytes, nibbles, second_bits_, kNibbleOrRun);
        __m512i const low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes)),
                      high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(bytes, 1));
        for (int half = 0; half < 2; ++half) {
          int const column = f * kLaneColumns + 32 * half;
          store_values<kType>(_mm512_permutex2var_epi16(low, places_[half], high),
                              half ? high_tables : low_tables, half ? high_runs : low_runs,
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
  __m512i second_bits_;
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
