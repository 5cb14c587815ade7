// Products of many rows of int8 x, with AVX-512 VNNI. As in avx2_tiles.h, codes are first decoded
// into a buffer, here the codes of a whole panel, and values of x are broadcast. A vector has the
// bytes of four columns of the 16 rows of a row block.
#pragma once

#include "cpu/avx2_tiles.h"

namespace cutlass_ops {
namespace {

// out(t) = quarters t of all four.
template <class Store>
[[gnu::always_inline]] inline void store_quarters(__m512i const (&v)[4], Store const& store) {
  __m512i const a = _mm512_shuffle_i32x4(v[0], v[1], 0x44),
                b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
  __m512i const c = _mm512_shuffle_i32x4(v[0], v[1], 0xee),
                d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
  store(0, _mm512_shuffle_i32x4(a, b, 0x88)), store(1, _mm512_shuffle_i32x4(a, b, 0xdd));
  store(2, _mm512_shuffle_i32x4(c, d, 0x88)), store(3, _mm512_shuffle_i32x4(c, d, 0xdd));
}

// Calls use(t, j, codes) with the codes plus kAbove of columns 16 * j + 2 * t + {0, 8, 1, 9} of a
// fragment of 16 rows and 64 columns.
template <int kBits, int kAbove, class Use>
[[gnu::always_inline]] inline void for_each_wide_word(uint8_t const* fragment, Use const& use) {
  constexpr int kMiddle = 1 << (kBits - 1);
  __m512i const flip = _mm512_set1_epi8(char(kMiddle)),
                code = _mm512_set1_epi8(char(2 * kMiddle - 1)),
                less = _mm512_set1_epi8(char(kMiddle - kAbove));
  auto const codes = [&](__m512i words) {
    if constexpr (kBits == 8 && kAbove == 0) return words;
    __m512i const above = flipped_codes(words, flip, code);
    return kAbove == kMiddle ? above : _mm512_sub_epi8(above, less);
  };
  for (int unit = 0; unit < kBits / 4; ++unit) {
    // Words c of lanes t of rows 0 .. 3, and of rows 4 .. 7, in quarter t.
    __m512i rows[2][4];
    for (int four = 0; four < 2; ++four) {
      __m512i v[4];
      for (int g = 0; g < 4; ++g)
        v[g] = _mm512_loadu_si512(fragment + unit * kUnitBytes + (4 * four + g) * 64);
      __m512i const a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
      __m512i const c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
      rows[four][0] = _mm512_unpacklo_epi64(a, b), rows[four][1] = _mm512_unpackhi_epi64(a, b);
      rows[four][2] = _mm512_unpacklo_epi64(c, d), rows[four][3] = _mm512_unpackhi_epi64(c, d);
    }
    if constexpr (byte_rows(kBits) == 2) {
      for (int j = 0; j < 4; ++j) {
        __m512i const low = rows[0][j], high = rows[1][j];
        store_quarters({codes(low), codes(high), codes(_mm512_srli_epi32(low, 4)),
                        codes(_mm512_srli_epi32(high, 4))},
                       [&](int t, __m512i v) { use(t, j, v); });
      }
    } else {
      for (int j = 0; j < 2; ++j) {
        store_quarters({codes(rows[0][2 * j]), codes(rows[1][2 * j]), codes(rows[0][2 * j + 1]),
                        codes(rows[1][2 * j + 1])},
                       [&](int t, __m512i v) { use(t, 2 * unit + j, v); });
      }
    }
  }
}

// The tile of a panel: [row block][word of four columns], and the sums of its runs' codes. The
// codes are signed, or above 0.
template <int kBits, bool kSigned = false>
struct WideTile {
  static constexpr int kMostWords = kKPerTile / 4;
  static constexpr int kLines = kRowsPerPanel * 4 * kBits / 8 / 64;  // of cache, of a word's codes
  static constexpr int kAbove = kSigned ? 0 : 1 << (kBits - 1);      // what they are more
  __m512i words[kRowBlocks][kMostWords];
  __m512i colsums[kMostRuns][kRowBlocks];

  void decode(CpuProduct const& p, Span const& span, uint8_t const* codes) {
    constexpr int kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
    for (int i = 0; i < kRowBlocks; ++i) {
      for (int f = 0; f < span.columns / kLaneColumns; ++f) {
        for_each_wide_word<kBits, kAbove>(
            codes + i * kBlockBytes + f * (kUnitBytes * kBits / 4),
            [&](int t, int j, __m512i v) { words[i][kWordsOf16 * (4 * f + j) + t] = v; });
      }
    }
    if (!p.zeros) return;
    int const steps = p.run() / 4;
    for (int part = 0; part < span.runs; ++part) {
      for (int i = 0; i < kRowBlocks; ++i) {
        __m512i sum = _mm512_setzero_si512();
        for (int step = 0; step < steps; ++step) {
          __m512i const word = words[i][part * steps + step], one = _mm512_set1_epi8(1);
          sum = kSigned ? _mm512_dpbusd_epi32(sum, one, word) : _mm512_dpbusd_epi32(sum, word, one);
        }
        colsums[part][i] = sum;
      }
    }
  }
};

// A run's sums of kRows rows of x and of kBlocks row blocks.
template <int kRows, int kBlocks>
using WideSums = __m512i[kRows][kBlocks];

// Adds a run to the results of rows m .. m + kRows - 1 of x (`row` .. of their chunk) and of row
// blocks `block` .. block + kBlocks - 1. multiply(sums) adds the products with the tile's codes.
template <int kRows, int kBlocks, class Tile, class Multiply>
[[gnu::always_inline]] inline void add_run(CpuProduct const& p, Tile const& tile,
                                           TileMemory& memory, Span const& span, int part,
                                           int block, int m, int row, Multiply const& multiply) {
  constexpr int kAbove = Tile::kAbove;
  // Addresses of the first row: the other rows are at constant distances.
  int64_t const blocks = p.blocks;
  float* const total = memory.total[row] + 16 * block;
  int32_t* const pending = memory.pending[row] + 16 * block;
  Span::Run const& run = span.run[part];
  int64_t const x_block = m * blocks + run.block;
  WideSums<kRows, kBlocks> sums;
  auto const for_each_sum = [&](auto const& use) {
    unrolled<kRows>([&](auto r) { unrolled<kBlocks>([&](auto i) { use(r, i); }); });
  };
  // The zero points' terms are subtracted once a scale block, before its products are added.
  if (!run.last) {
    for_each_sum([&](auto r, auto i) { sums[r][i] = _mm512_setzero_si512(); });
  } else if (p.weight.zeros) {
    int64_t const* const x_sums = p.sums + x_block;
    __m512i zeros[kBlocks];
    unrolled<kBlocks>([&](auto i) {
      zeros[i] = _mm512_sub_epi32(_mm512_set1_epi32(-kAbove),
                                  _mm512_loadu_si512(run.zeros + 2 * (block + i)));
    });
    for_each_sum([&](auto r, auto i) {
      sums[r][i] = _mm512_mullo_epi32(zeros[i], _mm512_set1_epi32(int(x_sums[r * blocks])));
    });
  } else {
    int64_t const* const x_sums = p.sums + x_block;
    for_each_sum(
        [&](auto r, auto i) { sums[r][i] = _mm512_set1_epi32(-kAbove * int(x_sums[r * blocks])); });
  }
  multiply(sums);
  if (p.zeros) {
    int32_t const* const x_zeros = p.zeros + x_block;
    __m512i const* const colsums = tile.colsums[part] + block;
    for_each_sum([&](auto r, auto i) {
      __m512i const zero = _mm512_set1_epi32(x_zeros[r * blocks]);
      sums[r][i] = _mm512_sub_epi32(sums[r][i], _mm512_mullo_epi32(zero, colsums[i]));
    });
  }
  if (!run.whole) {
    for_each_sum([&](auto r, auto i) {
      sums[r][i] =
          _mm512_add_epi32(_mm512_load_si512(pending + r * kRowsPerPanel + 16 * i), sums[r][i]);
    });
    if (!run.last) {
      for_each_sum([&](auto r, auto i) {
        _mm512_store_si512(pending + r * kRowsPerPanel + 16 * i, sums[r][i]);
      });
      return;
    }
    for_each_sum([&](auto r, auto i) {
      _mm512_store_si512(pending + r * kRowsPerPanel + 16 * i, _mm512_setzero_si512());
    });
  }
  float const* const x_scales = p.scales + x_block;
  __m512 scales[kBlocks];
  unrolled<kBlocks>([&](auto i) {
    scales[i] = _mm512_loadu_ps(reinterpret_cast<float const*>(run.scales + 2 * (block + i)));
  });
  for_each_sum([&](auto r, auto i) {
    float* const to = total + r * kRowsPerPanel + 16 * i;
    __m512 const factor = _mm512_mul_ps(_mm512_set1_ps(x_scales[r * blocks]), scales[i]);
    __m512 const value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][i]), factor);
    _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), value));
  });
  for (int i = block; i < block + kBlocks; ++i) add_offsets(p, memory, run, x_block, i, row, kRows);
}

// The products of the first rows of x fetch the next tile's codes: fetched all at once, they are
// more than can be in flight.
template <int kRows, int kBlocks, class Tile>
void multiply_wide(CpuProduct const& p, Tile const& tile, TileMemory& memory, Span const& span,
                   int block, int m, int row, FarPrefetch& prefetch) {
  constexpr int kLines = Tile::kLines * kBlocks / kRowBlocks;
  bool const ahead = row == 0;
  int const steps = p.run() / 4;
  int64_t const x_stride = p.x_stride;
  for (int part = 0; part < span.runs; ++part) {
    add_run<kRows, kBlocks>(
        p, tile, memory, span, part, block, m, row,
        [&](WideSums<kRows, kBlocks>& sums) [[gnu::always_inline]] {
          int8_t const* x = p.codes + m * x_stride + span.begin + part * p.run();
          __m512i const* codes = tile.words[block] + part * steps;
#pragma GCC unroll 1
          for (int step = 0; step < steps; ++step, ++codes, x += 4) {
            if (ahead) prefetch.lines(kLines);
            __m512i words[kBlocks];
            unrolled<kBlocks>([&](auto i) { words[i] = codes[i * Tile::kMostWords]; });
            unrolled<kRows>([&](auto r) {
              int32_t word;
              std::memcpy(&word, x + r * x_stride, sizeof word);
              __m512i const values = _mm512_set1_epi32(word);
              unrolled<kBlocks>(
                  [&](auto i) { sums[r][i] = _mm512_dpbusd_epi32(sums[r][i], words[i], values); });
            });
          }
        });
  }
}

// Calls multiply(tile, memory, span) for all spans of a panel.
template <int kBits, bool kSigned, class Multiply>
void for_each_wide_tile(CpuProduct const& p, int panel, int first, int rows,
                        Multiply const& multiply) {
  std::unique_ptr<TileMemory> const memory(new TileMemory);
  memory->clear(p, rows);
  WideTile<kBits, kSigned> tile;
  uint8_t const* const chunks = codes_of_panel<kBits>(p, panel);
  FarPrefetch prefetch(chunks);
  for (Runs runs(p, panel); runs.next();) {
    Span const span(p, runs);
    tile.decode(p, span, codes_at<kBits>(chunks, span.begin));
    multiply(tile, *memory, span, prefetch);
  }
  store_rows(p, *memory, panel, first, rows);
}

template <int kBits>
void multiply_wide_panel(CpuProduct const& p, int panel, int first, int rows) {
  for_each_wide_tile<kBits, false>(
      p, panel, first, rows,
      [&](auto const& tile, TileMemory& memory, Span const& span, FarPrefetch& prefetch) {
        for_parts<kMostTileRows>(rows, [&](int row, auto count) {
          // Row blocks whose sums fit into registers.
          constexpr int kRows = decltype(count)::value,
                        kBlocks = kRows <= kMostTileRows / 2 ? 4 : 2;
          for (int block = 0; block < kRowBlocks; block += kBlocks)
            multiply_wide<kRows, kBlocks>(p, tile, memory, span, block, first + row, row, prefetch);
        });
      });
}

}  // namespace
}  // namespace cutlass_ops
