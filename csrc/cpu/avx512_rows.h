// Products of few rows of int8 x, with AVX-512 VNNI. The 64 bytes of a lane group (layout.h) are
// one vector: in it, x in the order of the codes is multiplied with rows g and g + 8 of a fragment,
// and nothing is shuffled before the sums of a scale block.
#pragma once

#include "cpu/avx2_rows.h"
#include "cpu/avx2_tiles.h"

namespace cutlass_ops {
namespace {

// Rows of x whose sums, eight vectors each with 4-bit weights, fit into the registers together.
constexpr int kRowsTogether = 3;
// Up to this many rows it is faster than decoding the codes once.
constexpr int kMostFewRows = 16;

__m512 load_16_floats(void const* data, DataType type, int64_t index) {
  if (type == DataType::kFloat32) return _mm512_loadu_ps(static_cast<float const*>(data) + index);
  __m256i const halves = load(static_cast<char const*>(data) + 2 * index);
  if (type == DataType::kFloat16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Quarters 0 and 1, and 2 and 3, of a, then of b: their sums.
__m512i add_quarters(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// The products of a span of columns with the rows of a lane group. 4 bits: words of one row, two
// vectors for each row block. 8 bits: words of both rows alternate, one vector for the columns of
// even and of odd fragments.
template <int kBits>
struct LaneSums {
  static constexpr int kSets = words_of_16_k(kBits);
  __m512i v[kSets][kRowBlocks * byte_rows(kBits)];

  [[gnu::always_inline]] LaneSums() {
    for (auto& set : v) {
      for (__m512i& sum : set) sum = _mm512_setzero_si512();
    }
  }

  // Sums of runs of rows 0 .. 3 and of rows 4 .. 7, of each quarter of the vectors.
  [[gnu::always_inline]] void reduce(int run, __m512i (&sums)[kMostRuns][2]) const {
    for (int four = 0; four < 2; ++four) {
      if (run == 16) {
        of_each_16(four, sums);
        continue;
      }
      __m512i first, second;
      if constexpr (kSets == 1) {
        __m512i pairs[2];  // words of j = 0 and 1 of two rows, then of j = 2 and 3
        for (int i = 0; i < 2; ++i) {
          __m512i const a = v[0][4 * four + 2 * i], b = v[0][4 * four + 2 * i + 1];
          __m512i const other =
              _mm512_shuffle_epi32(_mm512_mask_blend_epi32(0xaaaa, b, a), _MM_PERM_ENUM(0xb1));
          pairs[i] = _mm512_add_epi32(_mm512_mask_blend_epi32(0xaaaa, a, b), other);
        }
        first = _mm512_unpacklo_epi64(pairs[0], pairs[1]),
        second = _mm512_unpackhi_epi64(pairs[0], pairs[1]);
      } else {
        auto const of_set = [&](int set) {
          __m512i const a = v[set][2 * four], b = v[set][2 * four + 1];
          return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        };
        first = of_set(0), second = of_set(1);
      }
      sums[0][four] = run == 32 ? first : _mm512_add_epi32(first, second);
      sums[1][four] = second;
    }
  }

 private:
  [[gnu::always_inline]] void of_each_16(int four, __m512i (&sums)[kMostRuns][2]) const {
    if constexpr (kSets == 1) {
      __m512i pairs[2][2];  // words of j = 0 and 1, and of j = 2 and 3, of two rows
      for (int i = 0; i < 2; ++i) {
        __m512i const a = v[0][4 * four + 2 * i], b = v[0][4 * four + 2 * i + 1];
        pairs[0][i] = _mm512_unpacklo_epi32(a, b), pairs[1][i] = _mm512_unpackhi_epi32(a, b);
      }
      for (int half = 0; half < 2; ++half) {
        sums[2 * half][four] = _mm512_unpacklo_epi64(pairs[half][0], pairs[half][1]);
        sums[2 * half + 1][four] = _mm512_unpackhi_epi64(pairs[half][0], pairs[half][1]);
      }
    } else {
      for (int set = 0; set < kSets; ++set) {
        __m512i const a = v[set][2 * four], b = v[set][2 * four + 1];
        sums[2 * set][four] = _mm512_unpacklo_epi64(a, b);
        sums[2 * set + 1][four] = _mm512_unpackhi_epi64(a, b);
      }
    }
  }
};

// Prefetch the scales of the next group: a panel has few of them, far from those of other groups.
void prefetch_next(CpuProduct const& p, int64_t vector) {
  int64_t const size = p.weight.scale_type == DataType::kFloat32 ? 4 : 2;
  char const* const scales =
      static_cast<char const*>(p.weight.scales) + size * (vector + padded_rows(p.weight.n));
  _mm_prefetch(scales, _MM_HINT_T0);
}

template <int kBits, int kRows, bool kXZeros>
void multiply_few(CpuProduct const& p, int panel, int m) {
  PackedWeight const& w = p.weight;
  constexpr int kColumns = unit_k(kBits), kRowsOfByte = byte_rows(kBits),
                kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  uint8_t const* const tiles = w.codes + int64_t(panel) * p.tiles * k_tile_bytes(kBits);
  // A row's code in a byte, and its sign bit. Nibbles of rows g + 8 are not shifted: their sums are
  // 16 times as large, which 32 bits hold.
  constexpr int kCode = (1 << kBits) - 1, kRowShift = 8 - kBits;
  __m512i const flip = _mm512_set1_epi8(char(0xff / kCode << (kBits - 1))),
                ones = _mm512_set1_epi8(1);
  __m512i const of_row[2] = {_mm512_set1_epi8(char(kCode)),
                             _mm512_set1_epi8(char(kCode << kRowShift))};
  __m512i const shifts = _mm512_set1_epi64(int64_t(kRowShift) << 32);
  alignas(64) float total[kRows][kRowsPerPanel] = {}, offsets[kRows][kRowsPerPanel] = {};
  alignas(64) int32_t pending[kRows][kRowsPerPanel] = {};  // sums of a scale block's runs
  int const run = p.run(), span = std::max(run, kLaneColumns), end_k = p.tiles * kKPerTile;
  for (int begin = 0; begin < end_k && begin / p.block < p.blocks; begin += span) {
    uint8_t const* const codes = tiles + int64_t(begin / kKPerTile) * k_tile_bytes(kBits) +
                                 begin % kKPerTile / kColumns * kUnitBytes;
    int8_t const* const x = p.codes + m * p.x_stride + int64_t(begin) / kColumns * 64;
    Runs const runs(p, panel, begin);
    for (int g = 0; g < kGroups; g += 2) {
      // [lane group][part][four of its rows]
      __m512i sums[kRows][2][kMostRuns][2], colsums[2][kMostRuns][2];
      for (int pair = 0; pair < 2; ++pair) {
        LaneSums<kBits> lanes[kRows], columns;
        uint8_t const* bytes = codes + (g + pair) * 64;
        for (int unit = 0; unit < span / kColumns; unit += LaneSums<kBits>::kSets) {
          unrolled<LaneSums<kBits>::kSets>([&](auto set) {
            __m512i values[kRows];
            unrolled<kRows>([&](auto r) {
              values[r] = _mm512_loadu_si512(x + r * p.x_stride + (unit + set) * 64);
            });
            unrolled<kRowBlocks>([&](auto i) {
              uint8_t const* const from = bytes + i * kBlockBytes + (unit + set) * kUnitBytes;
              _mm_prefetch(reinterpret_cast<char const*>(from) + k_tile_bytes(kBits), _MM_HINT_T0);
              __m512i const words = _mm512_loadu_si512(from);
              auto const add = [&](auto place, __m512i factors) {
                unrolled<kRows>([&](auto r) {
                  lanes[r].v[set][place] =
                      _mm512_dpbusd_epi32(lanes[r].v[set][place], factors, values[r]);
                });
                if (kXZeros)
                  columns.v[set][place] = _mm512_dpbusd_epi32(columns.v[set][place], factors, ones);
              };
              constexpr int kXorAnd = 0x28;
              unrolled<kRowsOfByte>([&](auto row) {
                add(std::integral_constant<int, kRowsOfByte * i + row>(),
                    _mm512_ternarylogic_epi32(words, flip, of_row[row], kXorAnd));
              });
            });
          });
        }
        unrolled<kRows>([&](auto r) { lanes[r].reduce(run, sums[r][pair]); });
        if (kXZeros) columns.reduce(run, colsums[pair]);
      }
      for (int part = 0; part < runs.count; ++part) {
        int const block = runs.block[part];
        bool const last = runs.last[part];
        int64_t const vector = runs.vector[part] + 8 * g;
        prefetch_next(p, vector);
        __m512i zero = _mm512_set1_epi32(1 << (kBits - 1));  // what codes are above centred ones
        if (w.zeros) {
          __m128i const bytes = _mm_loadu_si128(reinterpret_cast<__m128i const*>(w.zeros + vector));
          zero = _mm512_add_epi32(zero, _mm512_cvtepi8_epi32(bytes));
        }
        __m512 const scale = load_16_floats(w.scales, w.scale_type, vector);
        auto const rows_of = [part, shifts](__m512i const(&lanes)[2][kMostRuns][2]) {
          __m512i const rows = add_quarters(add_quarters(lanes[0][part][0], lanes[0][part][1]),
                                            add_quarters(lanes[1][part][0], lanes[1][part][1]));
          return kRowShift > 0 ? _mm512_srav_epi32(rows, shifts) : rows;
        };
        __m512i const colsum = kXZeros ? rows_of(colsums) : _mm512_setzero_si512();
        for (int r = 0; r < kRows; ++r) {
          int64_t const at = int64_t(m + r) * p.blocks + block;
          __m512i sum = rows_of(sums[r]);
          if (kXZeros)
            sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(_mm512_set1_epi32(p.zeros[at]), colsum));
          if (p.block > run) {
            auto* const kept = pending[r] + 8 * g;
            sum = _mm512_add_epi32(_mm512_load_si512(kept), sum);
            _mm512_store_si512(kept, last ? _mm512_setzero_si512() : sum);
          }
          if (!last) continue;
          __m512i const above = _mm512_mullo_epi32(zero, _mm512_set1_epi32(int(p.sums[at])));
          __m512 const integers = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, above));
          float* const to = total[r] + 8 * g;
          __m512 const product =
              _mm512_mul_ps(integers, _mm512_mul_ps(_mm512_set1_ps(p.scales[at]), scale));
          _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), product));
          if (!w.offsets) continue;
          float* const more = offsets[r] + 8 * g;
          __m512 const offset = load_16_floats(w.offsets, w.offset_type, vector);
          __m512 const part_of_x = _mm512_mul_ps(_mm512_set1_ps(p.offset_x[at]), offset);
          _mm512_store_ps(more, _mm512_add_ps(_mm512_load_ps(more), part_of_x));
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; w.offsets && i < kRowsPerPanel; ++i) total[r][i] += offsets[r][i];
    store_panel(p, panel, m + r, total[r]);
  }
}

template <int kRows>
void multiply_few(CpuProduct const& p, int panel, int m) {
  with_width(info(p.weight.format).bits, [&](auto width) {
    constexpr int kBits = decltype(width)::kBits;
    p.zeros ? multiply_few<kBits, kRows, true>(p, panel, m)
            : multiply_few<kBits, kRows, false>(p, panel, m);
  });
}

}  // namespace
}  // namespace cutlass_ops
