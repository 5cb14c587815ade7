// Products of few rows of x, with AVX-512: int8 ones with VNNI, and floats with codes of 4 bits.
//
// int8 x: the 64 bytes of a lane group (layout.h) are one vector, which is multiplied by x in the
// order of the codes. A vector has rows g and g + 8 of a fragment, and its lanes are added only at
// the end of a scale block. Floats: a vector has the 16 lanes of rows g and g + 8, whose sums have
// the order of the AVX2 kernel, and codes look up their values.
#pragma once

#include "cpu/avx2_rows.h"

namespace cutlass_ops {
namespace {

// Quarters 0 and 1, and 2 and 3, of a, then of b: their sums.
[[maybe_unused]] __m512i add_quarters(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// The products of a span of columns with the rows of a lane group, in the order of group vectors. 4
// bits: a vector for each row, whose words are of 16 columns each. 8 bits: a vector for each row
// block, words of both rows in turn, one set for the columns of even and one for those of odd
// fragments.
template <int kBits>
struct LaneSums {
  static constexpr int kSets = words_of_16_k(kBits);
  __m512i v[kSets][kRowBlocks * byte_rows(kBits)];

  [[gnu::always_inline]] LaneSums() {
    for (auto& set : v) {
      for (__m512i& sum : set) sum = _mm512_setzero_si512();
    }
  }

  // Sums of the quarters: a row, or a row block's two rows, a quarter. 4 bits: of rows 0 .. 3, and
  // of rows 4 .. 7. 8 bits: of each set.
  [[gnu::always_inline]] void add_up(__m512i (&out)[2]) const {
    for (int i = 0; i < 2; ++i) {
      __m512i const* const from = kSets == 1 ? v[0] + 4 * i : v[i % kSets];
      out[i] = add_quarters(add_quarters(from[0], from[1]), add_quarters(from[2], from[3]));
    }
  }
};

// store(part, sums) of each run of two lane groups' rows, from what add_up() made of each. A
// quarter's words are those of row q and row q + 4, or of row block q's two, of the first group,
// then of the second.
template <int kBits, class Store>
[[gnu::always_inline]] inline void store_runs(__m512i const (&groups)[2][2], int run,
                                              Store const& store) {
  __m512i of_16[4];  // columns
  for (int i = 0; i < 2; ++i) {
    if constexpr (kBits == Nibbles::kBits) {
      auto const words = [&](int g) {
        return i ? _mm512_unpackhi_epi32(groups[g][0], groups[g][1])
                 : _mm512_unpacklo_epi32(groups[g][0], groups[g][1]);
      };
      __m512i const a = words(0), b = words(1);
      of_16[2 * i] = _mm512_unpacklo_epi64(a, b), of_16[2 * i + 1] = _mm512_unpackhi_epi64(a, b);
    } else {
      of_16[2 * i] = _mm512_unpacklo_epi64(groups[0][i], groups[1][i]),
                of_16[2 * i + 1] = _mm512_unpackhi_epi64(groups[0][i], groups[1][i]);
    }
  }
  if (run == 16) return unrolled<4>([&](auto part) { store(part, of_16[part]); });
  __m512i const first = _mm512_add_epi32(of_16[0], of_16[1]),
                second = _mm512_add_epi32(of_16[2], of_16[3]);
  if (run > 32) return store(0, _mm512_add_epi32(first, second));
  store(0, first), store(1, second);
}

template <int kBits, int kRows, bool kXZeros>
void multiply_vnni(CpuProduct const& p, int panel, int m) {
  constexpr int kColumns = unit_k(kBits), kRowsOfByte = byte_rows(kBits), kSums = kRows + kXZeros,
                kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  uint8_t const* const tiles = codes_of_panel<kBits>(p, panel);
  // A row's code in a byte, and its sign bit. Nibbles of rows g + 8 are not shifted: their sums are
  // 16 times as large, which 32 bits hold.
  constexpr int kCode = (1 << kBits) - 1, kRowShift = 8 - kBits;
  __m512i const flip = _mm512_set1_epi8(char(0xff / kCode << (kBits - 1))),
                ones = _mm512_set1_epi8(1);
  __m512i const of_row[2] = {_mm512_set1_epi8(char(kCode)),
                             _mm512_set1_epi8(char(kCode << kRowShift))};
  __m512i const shifts = _mm512_set1_epi64(int64_t(kRowShift) << 32);
  // From the order of store_runs() to that of group vectors.
  __m512i const order =
      kBits == Nibbles::kBits
          ? _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
          : _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  FarPrefetch prefetch(tiles);
  RowTotals totals[kRows];
  RunSums<int32_t> sums[kSums];  // of rows of x, then of codes
  for (Runs runs(p, panel); runs.next();) {
    uint8_t const* const codes = codes_at<kBits>(tiles, runs.begin);
    int8_t const* const x = p.codes + m * p.x_stride + int64_t(runs.begin) / kColumns * 64;
    for (int g = 0; g < kGroups; g += 2) {
      __m512i of_groups[kSums][2][2];
      for (int pair = 0; pair < 2; ++pair) {
        LaneSums<kBits> lanes[kSums];
        uint8_t const* bytes = codes + (g + pair) * 64;
        for (int unit = 0; unit < runs.span / kColumns; unit += LaneSums<kBits>::kSets) {
          unrolled<LaneSums<kBits>::kSets>([&](auto set) {
            __m512i values[kSums];
            unrolled<kRows>([&](auto r) {
              values[r] = _mm512_loadu_si512(x + r * p.x_stride + (unit + set) * 64);
            });
            if constexpr (kXZeros) values[kRows] = ones;
            unrolled<kRowBlocks>([&](auto i) {
              prefetch.line();
              __m512i const words =
                  _mm512_loadu_si512(bytes + i * kBlockBytes + (unit + set) * kUnitBytes);
              unrolled<kRowsOfByte>([&](auto row) {
                __m512i const factors = flipped_codes(words, flip, of_row[row]);
                unrolled<kSums>([&](auto s) {
                  __m512i& sum = lanes[s].v[set][kRowsOfByte * i + row];
                  sum = _mm512_dpbusd_epi32(sum, factors, values[s]);
                });
              });
            });
          });
        }
        unrolled<kSums>([&](auto s) { lanes[s].add_up(of_groups[s][pair]); });
      }
      unrolled<kSums>([&](auto s) {
        store_runs<kBits>(of_groups[s], runs.run, [&](int part, __m512i mixed) {
          __m512i const rows = _mm512_permutexvar_epi32(order, mixed);
          _mm512_storeu_si512(sums[s].sums[part] + 8 * g,
                              kRowShift > 0 ? _mm512_srav_epi32(rows, shifts) : rows);
        });
      });
    }
    promote<1 << (kBits - 1)>(p, runs, m, sums, totals);
  }
  for (int r = 0; r < kRows; ++r) totals[r].store(p, panel, m + r);
}

template <int kRows>
void multiply_vnni(CpuProduct const& p, int panel, int m) {
  with_nibbles_or_bytes(info(p.weight.format).bits, [&](auto width) {
    constexpr int kBits = decltype(width)::kBits;
    p.zeros ? multiply_vnni<kBits, kRows, true>(p, panel, m)
            : multiply_vnni<kBits, kRows, false>(p, panel, m);
  });
}

// ---- floats

// The values of a product with codes of 4 bits by stored code, whose highest bit is inverted.
__m512 stored_values(CpuProduct const& p) {
  constexpr int kMiddle = 8;
  alignas(64) float values[2 * kMiddle];
  for (int c = 0; c < 2 * kMiddle; ++c)
    values[c] = p.codebook ? p.codebook[c ^ kMiddle] : float((c ^ kMiddle) - kMiddle);
  return _mm512_load_ps(values);
}

__m512i both(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
[[maybe_unused]] __m512 both(__m256 low, __m256 high) {
  return _mm512_castsi512_ps(both(_mm256_castps_si256(low), _mm256_castps_si256(high)));
}

template <int kRows, bool kZeros>
void multiply_nibbles(CpuProduct const& p, int panel, int m) {
  constexpr int kBits = Nibbles::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  uint8_t const* const tiles = codes_of_panel<kBits>(p, panel);
  __m512 const values = stored_values(p);
  Prefetch prefetch(tiles);
  RowTotals rows[kRows];
  RunSums<float> sums[kRows];
  int64_t const stride = p.x_stride;
  for (Runs runs(p, panel); runs.next();) {
    uint8_t const* const codes = codes_at<kBits>(tiles, runs.begin);
    float const* const first = p.x + m * stride + runs.begin;
    for (int g = 0; g < kGroups; ++g) {
      __m256 lanes[kRows][kRowVectors];
      unrolled<kRowBlocks>([&](auto i) {
        ZeroPoints<kZeros> const points(p, runs, 8 * g + 2 * i, 0);
        __m512 const zeros = both(points.rows[0], points.rows[1]);
        __m512 of_rows[kRows];
        unrolled<kRows>([&](auto r) { of_rows[r] = _mm512_setzero_ps(); });
        float const* x = first;
        uint8_t const* bytes = codes + i * kBlockBytes + g * 64;
        for (int column = 0; column < runs.span; column += kLaneColumns, bytes += kUnitBytes) {
          prefetch.line();
          for (int half = 0; half < 2; ++half, x += 32) {
            __m256i const a = load(bytes + 32 * half);
            __m512i const words = both(a, _mm256_srli_epi32(a, 4));
            unrolled<4>([&](auto e) {
              __m512 value = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 8 * e), values);
              if constexpr (kZeros) value = _mm512_sub_ps(value, zeros);
              unrolled<kRows>([&](auto r) {
                __m512 const factor = _mm512_castpd_ps(_mm512_broadcast_f64x4(
                    _mm256_loadu_pd(reinterpret_cast<double const*>(x + r * stride + 8 * e))));
                of_rows[r] = _mm512_add_ps(of_rows[r], _mm512_mul_ps(value, factor));
              });
            });
          }
        }
        unrolled<kRows>([&](auto r) {
          lanes[r][2 * i] = _mm512_castps512_ps256(of_rows[r]);
          lanes[r][2 * i + 1] =
              _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(of_rows[r]), 1));
        });
      });
      for (int r = 0; r < kRows; ++r) reduce(lanes[r], runs.run, g, sums[r]);
    }
    promote<kRows>(p, runs, m, sums, rows);
  }
  for (int r = 0; r < kRows; ++r) rows[r].store(p, panel, m + r);
}

template <int kRows>
void multiply_nibbles(CpuProduct const& p, int panel, int m) {
  (p.weight.zeros ? multiply_nibbles<kRows, true> : multiply_nibbles<kRows, false>)(p, panel, m);
}

}  // namespace
}  // namespace cutlass_ops
