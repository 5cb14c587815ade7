// Products of many rows of x, with AVX2. Codes of 16 rows of the weight and of one run of
// columns are decoded into a buffer that stays in the cache while all rows of a chunk of x are
// multiplied by it.
//
// Vectors hold eight rows of the weight, and a value of x is broadcast: no vector is ever reduced.
// Each lane of the order of sums (lane_column) is a separate sum here, and eight of them are added
// as in the scalar kernel's reduce().
#pragma once

#include <memory>

#include "cpu/avx2_vectors.h"

namespace cutlass_ops {
namespace {

constexpr int kVectors = kRowsPerPanel / 8;  // of a panel's rows, in their natural order

// Calls use(t, j, rows 0 .. 7, rows 8 .. 15) with the words of columns 16 * j + 2 * t + {0, 8, 1,
// 9} of a fragment of 16 rows and 64 columns. Words of four bits have other rows' codes in the high
// halves of their bytes.
template <int kBits, class Use>
void for_each_word(uint8_t const* fragment, Use const& use) {
  for (int unit = 0; unit < kBits / 4; ++unit) {
    for (int half = 0; half < 2; ++half) {
      __m256 v[8];
      for (int g = 0; g < 8; ++g)
        v[g] = _mm256_castsi256_ps(load(fragment + unit * kUnitBytes + g * 64 + half * 32));
      transpose(v);
      for (int word = 0; word < 8; ++word) {
        __m256i const words = _mm256_castps_si256(v[word]);
        int const t = 2 * half + word / 4;
        if constexpr (byte_rows(kBits) == 2) {
          use(t, word % 4, words, _mm256_srli_epi32(words, 4));
        } else if (word % 2 == 0) {
          use(t, 2 * unit + word % 4 / 2, words, _mm256_castps_si256(v[word + 1]));
        }
      }
    }
  }
}

// Some columns, begin .. begin + span - 1, which are one run, or several of less than 64, and their
// scale blocks' vectors in natural order.
struct Span {
  struct Run {
    int block;
    bool last, whole;  // of the scale block, all of it
    __m256 scales[kVectors], offsets[kVectors];
    __m256i zeros[kVectors];
  };
  int begin, columns, runs = 0;
  Run run[kMostRuns];

  Span(CpuProduct const& p, Runs const& found) : begin(found.begin), columns(found.span) {
    PackedWeight const& w = p.weight;
    for (; runs < found.count; ++runs) {
      Run& r = run[runs];
      r.block = found.block[runs], r.last = found.last[runs];
      r.whole = p.block == p.run();
      int64_t const first = found.vector[runs];
      for (int g = 0; g < 8; ++g) r.scales[g] = load_floats(w.scales, w.scale_type, first + 8 * g);
      transpose(r.scales);
      if (w.offsets) {
        for (int g = 0; g < 8; ++g)
          r.offsets[g] = load_floats(w.offsets, w.offset_type, first + 8 * g);
        transpose(r.offsets);
      }
      __m256 zeros[8] = {};
      if (w.zeros) {
        for (int g = 0; g < 8; ++g) {
          __m128i const bytes =
              _mm_loadl_epi64(reinterpret_cast<__m128i const*>(w.zeros + first + 8 * g));
          zeros[g] = _mm256_castsi256_ps(_mm256_cvtepi8_epi32(bytes));
        }
        transpose(zeros);
      }
      for (int v = 0; v < kVectors; ++v) r.zeros[v] = _mm256_castps_si256(zeros[v]);
    }
  }
};

// Memory of one panel and one chunk of x.
struct TileMemory {
  static constexpr int kTileBytes = kRowsPerBlock * kKPerTile * 4;
  alignas(64) unsigned char tile[kFusedBlocks * kTileBytes];
  alignas(64) float total[kMostRows][kRowsPerPanel];
  alignas(64) float offsets[kMostRows][kRowsPerPanel];
  // sums of a scale block's runs, floats or integers
  alignas(64) int32_t pending[kMostRows][kRowsPerPanel];

  void clear(CpuProduct const& p, int rows) {
    std::memset(total, 0, size_t(rows) * sizeof total[0]);
    if (p.block > p.run()) std::memset(pending, 0, size_t(rows) * sizeof pending[0]);
    if (p.weight.offsets) std::memset(offsets, 0, size_t(rows) * sizeof offsets[0]);
  }
};

// Adds the terms of the offsets for one scale block and row block i. `rows` rows of x, of which the
// first is `row` of its chunk, have the block's vectors at `x_block`.
void add_offsets(CpuProduct const& p, TileMemory& memory, Span::Run const& run, int64_t x_block,
                 int i, int row, int rows) {
  if (!p.weight.offsets) return;
  for (int r = 0; r < rows; ++r) {
    __m256 const x_sum = _mm256_set1_ps(p.offset_x[x_block + int64_t(r) * p.blocks]);
    for (int h = 0; h < 2; ++h)
      add_product(memory.offsets[row + r] + 16 * i + 8 * h, x_sum, run.offsets[2 * i + h]);
  }
}

// ---- floats

// Codes of row block i, less their zero points, or the weight's values: [lane][place of the
// lane][two vectors of rows].
template <bool kScaled, bool kZeros, class Format>
void decode_floats(CpuProduct const& p, Avx2Decoder<Format> const& decoder, Span const& span,
                   uint8_t const* codes, int i, float* tile) {
  constexpr int kMiddle = 1 << (Format::kBits - 1);
  __m256 zeros[4][2], scales[4][2];  // of words j
  for (int j = 0; (kZeros || kScaled) && j < 4; ++j) {
    Span::Run const& run = span.run[std::min(run_of(j, p.run()), span.runs - 1)];
    for (int h = 0; h < 2; ++h) {
      __m256i const zero = run.zeros[2 * i + h];
      zeros[j][h] = _mm256_cvtepi32_ps(_mm256_add_epi32(zero, _mm256_set1_epi32(kMiddle)));
      scales[j][h] = run.scales[2 * i + h];
    }
  }
  __m256 const middle = _mm256_set1_ps(float(kMiddle));
  int const places = span.columns / kLanes;
  for (int f = 0; f < span.columns / kLaneColumns; ++f) {
    for_each_word<Format::kBits>(
        codes + f * (kUnitBytes * Format::kBits / 4), [&](int t, int j, __m256i low, __m256i high) {
          float* const to =
              tile + ((4 * (t % 2) + j) * places + 8 * f + 4 * (t / 2)) * kRowsPerBlock;
          unrolled<4>([&](auto e) {
            for (int h = 0; h < 2; ++h) {
              __m256 const value =
                  decoder.template value<e>(h ? high : low, kZeros ? zeros[j][h] : middle);
              _mm256_store_ps(to + 16 * e + 8 * h,
                              kScaled ? _mm256_mul_ps(value, scales[j][h]) : value);
            }
          });
        });
  }
}

template <bool kScaled, class Format>
void decode_floats(CpuProduct const& p, Avx2Decoder<Format> const& decoder, Span const& span,
                   uint8_t const* codes, int i, float* tile) {
  p.weight.zeros ? decode_floats<kScaled, true>(p, decoder, span, codes, i, tile)
                 : decode_floats<kScaled, false>(p, decoder, span, codes, i, tile);
}

// Sums of one lane: of kRows of x.
template <int kRows>
[[gnu::always_inline]] inline void sum_lane(float const* tile, float const* x, int64_t stride,
                                            int places, int lane, Sixteen (&out)[kRows]) {
  float const* codes = tile + lane * places * kRowsPerBlock;
  Sixteen sums[kRows];
  x += lane;
  unrolled<kRows>([&](auto r) { sums[r] = Sixteen(0.0f); });
  for (int place = 0; place < places; ++place, codes += kRowsPerBlock, x += kLanes) {
    Sixteen const rows = Sixteen::load(codes);
    unrolled<kRows>([&](auto r) { sums[r] = sums[r] + rows * Sixteen(x[r * stride]); });
  }
  unrolled<kRows>([&](auto r) { out[r] = sums[r]; });
}

template <int kRows>
[[gnu::always_inline]] inline void add_to(Sixteen (&sums)[kRows], Sixteen const (&more)[kRows]) {
  unrolled<kRows>([&](auto r) { sums[r] = sums[r] + more[r]; });
}

// Sums of the lanes of j.
template <int kRows>
void sum_16_columns(float const* tile, float const* x, int64_t stride, int places, int j,
                    Sixteen (&sums)[kRows]) {
  Sixteen lanes[kRows];
  sum_lane<kRows>(tile, x, stride, places, j, sums);
  sum_lane<kRows>(tile, x, stride, places, j + 4, lanes);
  add_to<kRows>(sums, lanes);
}

// Sums of the lanes of j = 2 * half and 2 * half + 1.
template <int kRows>
void sum_32_columns(float const* tile, float const* x, int64_t stride, int places, int half,
                    Sixteen (&sums)[kRows]) {
  Sixteen lanes[kRows], pair[kRows];
  sum_lane<kRows>(tile, x, stride, places, 2 * half, sums);
  sum_lane<kRows>(tile, x, stride, places, 2 * half + 1, lanes);
  add_to<kRows>(sums, lanes);
  sum_lane<kRows>(tile, x, stride, places, 2 * half + 4, pair);
  sum_lane<kRows>(tile, x, stride, places, 2 * half + 5, lanes);
  add_to<kRows>(pair, lanes);
  add_to<kRows>(sums, pair);
}

// Sums of a run of columns in the reference's order; `part`: of a span of shorter runs.
template <int kRows>
[[gnu::always_inline]] inline void sum_run(float const* tile, float const* x, int64_t stride,
                                           int places, int run, int part, Sixteen (&sums)[kRows]) {
  if (run == 16) return sum_16_columns<kRows>(tile, x, stride, places, part, sums);
  sum_32_columns<kRows>(tile, x, stride, places, part, sums);
  if (run < kLaneColumns) return;
  Sixteen more[kRows];
  sum_32_columns<kRows>(tile, x, stride, places, 1, more);
  add_to<kRows>(sums, more);
}

// Row block i of rows m .. m + kRows - 1 of x, which are `row` and so on of their chunk.
template <int kRows>
void multiply_tile(CpuProduct const& p, TileMemory& memory, Span const& span, int i, int m,
                   int row) {
  auto const* const tile = reinterpret_cast<float const*>(memory.tile);
  float const* const x = p.x + m * p.x_stride + span.begin;
  for (int part = 0; part < span.runs; ++part) {
    Span::Run const& run = span.run[part];
    Sixteen sums[kRows];
    sum_run<kRows>(tile, x, p.x_stride, span.columns / kLanes, p.run(), part, sums);
    if (!run.whole) {
      unrolled<kRows>([&](auto r) {
        float* const to = reinterpret_cast<float*>(memory.pending[row + r]) + 16 * i;
        sums[r] = Sixteen::load(to) + sums[r];
        (run.last ? Sixteen(0.0f) : sums[r]).store(to);
      });
    }
    if (!run.last) continue;
    Sixteen const scales = Sixteen::load(reinterpret_cast<float const*>(run.scales + 2 * i));
    unrolled<kRows>([&](auto r) {
      float* const to = memory.total[row + r] + 16 * i;
      (Sixteen::load(to) + sums[r] * scales).store(to);
    });
    add_offsets(p, memory, run, int64_t(m) * p.blocks + run.block, i, row, kRows);
  }
}

// multiply_tile() of the values of row blocks i .. i + kFusedBlocks - 1 by fused multiply-adds, in
// another order than the reference's, without sums of lanes and of groups.
template <int kRows, int kPlaces>
void multiply_tile_fused(CpuProduct const& p, TileMemory& memory, Span const& span, int i, int m,
                         int row) {
  constexpr int kTileFloats = TileMemory::kTileBytes / int(sizeof(float));
  auto const* tile = reinterpret_cast<float const*>(memory.tile);
  float const* x = p.x + m * p.x_stride + span.begin;
  Sixteen sums[kRows][kFusedBlocks];
  unrolled<kRows>([&](auto r) {
    for (Sixteen& sum : sums[r]) sum = Sixteen(0.0f);
  });
#pragma GCC unroll 1
  for (int place = 0; place < kPlaces; ++place, tile += kRowsPerBlock, x += kLanes) {
    unrolled<kLanes>([&](auto lane) {
      Sixteen rows[kFusedBlocks];
      unrolled<kFusedBlocks>([&](auto b) {
        rows[b] = Sixteen::load(tile + b * kTileFloats + lane * kPlaces * kRowsPerBlock);
      });
      unrolled<kRows>([&](auto r) {
        Sixteen const factor(x[r * p.x_stride + lane]);
        unrolled<kFusedBlocks>(
            [&](auto b) { sums[r][b] = Sixteen::fused(rows[b], factor, sums[r][b]); });
      });
    });
  }
  unrolled<kRows>([&](auto r) {
    unrolled<kFusedBlocks>([&](auto b) {
      float* const to = memory.total[row + r] + 16 * (i + b);
      (Sixteen::load(to) + sums[r][b]).store(to);
    });
  });
  for (int part = 0; part < span.runs; ++part) {
    Span::Run const& run = span.run[part];
    if (!run.last) continue;
    for (int block = i; block < i + kFusedBlocks; ++block)
      add_offsets(p, memory, run, int64_t(m) * p.blocks + run.block, block, row, kRows);
  }
}

template <class Format, bool kFused>
struct FloatTiles {
  static constexpr int kBits = Format::kBits, kBlocks = kFused ? kFusedBlocks : 1;
  Avx2Decoder<Format> decoder;

  explicit FloatTiles(CpuProduct const& p) : decoder(p) {}
  void decode(CpuProduct const& p, TileMemory& memory, Span const& span, uint8_t const* codes,
              int i) {
    decode_floats<kFused>(
        p, decoder, span, codes, i,
        reinterpret_cast<float*>(memory.tile + i % kBlocks * TileMemory::kTileBytes));
  }
  template <int kRows>
  void multiply(CpuProduct const& p, TileMemory& memory, Span const& span, int i, int m,
                int row) const {
    constexpr int kShort = kLaneColumns / kLanes, kLong = kKPerTile / kLanes;
    auto const multiply = !kFused                        ? multiply_tile<kRows>
                          : span.columns == kLaneColumns ? multiply_tile_fused<kRows, kShort>
                                                         : multiply_tile_fused<kRows, kLong>;
    multiply(p, memory, span, i, m, row);
  }
};

// ---- integers

// Words of 16 adjacent columns, and the number of words that are summed in 16 bits.
constexpr int kWordsOf16 = 4, kDrainedWords = 8;

// Unsigned bytes of codes times int8, by the instructions of Dot.
template <int kCodeBits, class Dot>
struct ByteTiles {
  // what codes are above centred ones
  static constexpr int kBits = kCodeBits, kAbove = 1 << (kBits - 1);
  static constexpr int kVectorsOfWord = 1;
  static constexpr bool kCentred = false;
  static __m256i codes(__m256i words) {
    return _mm256_and_si256(_mm256_xor_si256(words, _mm256_set1_epi8(char(kAbove))),
                            _mm256_set1_epi8(char(2 * kAbove - 1)));
  }
  static void decode_word(__m256i words, __m256i* to, int) { _mm256_store_si256(to, codes(words)); }
  using Product = Dot;
};

// Centred codes of 16 bits times integers of 16 bits.
struct HalfProduct {
  static constexpr bool kDrains = false;
  static __m256i add(__m256i sum, __m256i a, __m256i b) {
    __m256i const products = _mm256_madd_epi16(a, b);
    // Compilers would reorder sums of integers, and have no registers for so many products.
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
  }
};

struct HalfTiles {
  static constexpr int kBits = 8, kAbove = 0;
  static constexpr int kVectorsOfWord = 2;
  static constexpr bool kCentred = true;
  static void decode_word(__m256i words, __m256i* to, int step) {
    _mm256_store_si256(to, _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8));
    _mm256_store_si256(to + step, _mm256_srai_epi16(words, 8));
  }
  using Product = HalfProduct;
};

// Sums of so many words: of kRows of x, and of eight rows of the weight and the next eight.
template <class Dot, int kRows>
[[gnu::always_inline]] inline void sum_words(__m256i const* codes, char const* x, int64_t stride,
                                             int words, __m256i (&out)[kRows][2]) {
  __m256i sums[kRows][2];
  unrolled<kRows>([&](auto r) { sums[r][0] = sums[r][1] = _mm256_setzero_si256(); });
#pragma GCC unroll 1
  for (int step = 0; step < words; ++step, codes += 2, x += 4) {
    __m256i const low = _mm256_load_si256(codes), high = _mm256_load_si256(codes + 1);
    unrolled<kRows>([&](auto r) {
      int32_t word;
      std::memcpy(&word, x + r * stride, sizeof word);
      __m256i const values = _mm256_set1_epi32(word);
      sums[r][0] = Dot::add(sums[r][0], low, values);
      sums[r][1] = Dot::add(sums[r][1], high, values);
    });
  }
  unrolled<2 * kRows>([&](auto v) { out[v / 2][v % 2] = sums[v / 2][v % 2]; });
}

// sum_words() for products whose sums have 16 bits: they are added to sums of 32 bits before they
// overflow. The 16-bit sums take all registers, so the 32-bit sums are in memory.
template <class Dot, int kRows>
[[gnu::noinline]] void sum_drained(__m256i const* codes, char const* x, int64_t stride, int words,
                                   __m256i (&sums)[kRows][2]) {
  for (int begin = 0; begin < words; begin += kDrainedWords) {
    __m256i more[kRows][2];
    sum_words<Dot, kRows>(codes + 2 * begin, x + 4 * begin, stride,
                          std::min(words - begin, kDrainedWords), more);
    unrolled<2 * kRows>([&](auto v) {
      __m256i const sum = Dot::words(more[v / 2][v % 2]);
      sums[v / 2][v % 2] = begin == 0 ? sum : _mm256_add_epi32(sums[v / 2][v % 2], sum);
    });
  }
}

template <class Codes>
struct IntegerTiles {
  static constexpr int kBits = Codes::kBits, kBlocks = 1;
  static constexpr int kStepsOf16 = kWordsOf16 * Codes::kVectorsOfWord;  // of 16 columns
  __m256i colsums[kMostRuns][2];  // of a run's codes, where x has zero points
  __m256i zeros[kMostRuns][2];    // of a run, of codes as they are in the tile

  explicit IntegerTiles(CpuProduct const&) {}

  // [16 columns][word][vector of the word][two vectors of rows]
  void decode(CpuProduct const& p, TileMemory& memory, Span const& span, uint8_t const* codes,
              int i) {
    auto* const tile = reinterpret_cast<__m256i*>(memory.tile);
    for (int f = 0; f < span.columns / kLaneColumns; ++f) {
      for_each_word<kBits>(codes + f * (kUnitBytes * kBits / 4),
                           [&](int t, int j, __m256i low, __m256i high) {
                             int const word = kWordsOf16 * (4 * f + j) + t;
                             __m256i* const to = tile + word * Codes::kVectorsOfWord * 2;
                             Codes::decode_word(low, to, 2);
                             Codes::decode_word(high, to + 1, 2);
                           });
    }
    int const steps = p.run() / 16 * kStepsOf16;
    for (int part = 0; part < span.runs; ++part) {
      for (int h = 0; h < 2; ++h) {
        zeros[part][h] =
            _mm256_add_epi32(span.run[part].zeros[2 * i + h], _mm256_set1_epi32(Codes::kAbove));
        __m256i sum = _mm256_setzero_si256();
        if (!Codes::kCentred && p.zeros) {
          __m256i const* const from = tile + part * steps * 2 + h;
          for (int step = 0; step < steps; ++step) {
            __m256i const pairs = _mm256_maddubs_epi16(from[2 * step], _mm256_set1_epi8(1));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
          }
        }
        colsums[part][h] = sum;
      }
    }
  }

  template <int kRows>
  void multiply(CpuProduct const& p, TileMemory& memory, Span const& span, int i, int m,
                int row) const {
    using Dot = typename Codes::Product;
    constexpr int kBytes = Codes::kCentred ? 2 : 1;  // of an integer of x
    auto const* codes = reinterpret_cast<__m256i const*>(memory.tile);
    auto const* x = Codes::kCentred ? reinterpret_cast<char const*>(p.centred)
                                    : reinterpret_cast<char const*>(p.codes);
    int64_t const stride = p.x_stride * kBytes;
    x += m * stride + span.begin * kBytes;
    int const steps = p.run() / 16 * kStepsOf16;
    for (int part = 0; part < span.runs; ++part) {
      __m256i sums[kRows][2];
      if constexpr (Dot::kDrains) {
        sum_drained<Dot, kRows>(codes, x, stride, steps, sums);
      } else {
        sum_words<Dot, kRows>(codes, x, stride, steps, sums);
      }
      codes += 2 * steps, x += 4 * steps;
      promote(p, memory, span.run[part], part, i, m, row, kRows, sums);
    }
  }

  // Adds a run's sums of `rows` rows of x from m on to their results.
  void promote(CpuProduct const& p, TileMemory& memory, Span::Run const& run, int part, int i,
               int m, int row, int rows, __m256i (*sums)[2]) const {
    int64_t const blocks = p.blocks, x_block = m * blocks + run.block;
    if (!Codes::kCentred && p.zeros) {
      for (int r = 0; r < rows; ++r) {
        __m256i const zero = _mm256_set1_epi32(p.zeros[x_block + r * blocks]);
        for (int h = 0; h < 2; ++h)
          sums[r][h] = _mm256_sub_epi32(sums[r][h], _mm256_mullo_epi32(zero, colsums[part][h]));
      }
    }
    if (!run.whole) {
      for (int r = 0; r < rows; ++r) {
        for (int h = 0; h < 2; ++h) {
          int32_t* const to = memory.pending[row + r] + 16 * i + 8 * h;
          sums[r][h] = _mm256_add_epi32(load_ints(to), sums[r][h]);
          store_ints(to, run.last ? _mm256_setzero_si256() : sums[r][h]);
        }
      }
    }
    if (!run.last) return;
    int64_t const* x_sum = p.sums + x_block;
    float const* x_scale = p.scales + x_block;
    float* to = memory.total[row] + 16 * i;
    __m256 const scales[2] = {run.scales[2 * i], run.scales[2 * i + 1]};
    __m256i const zero[2] = {zeros[part][0], zeros[part][1]};
    for (int r = 0; r < rows; ++r, x_sum += blocks, x_scale += blocks, to += kRowsPerPanel) {
      __m256 const factor = _mm256_set1_ps(*x_scale);
      __m256i const less = _mm256_set1_epi32(int(*x_sum));
      for (int h = 0; h < 2; ++h) {
        __m256i const integers = _mm256_sub_epi32(sums[r][h], _mm256_mullo_epi32(zero[h], less));
        add_product(to + 8 * h, _mm256_cvtepi32_ps(integers), _mm256_mul_ps(factor, scales[h]));
      }
    }
    add_offsets(p, memory, run, x_block, i, row, rows);
  }
};

// Order of bytes in words: unchanged, or the pairs of bytes 0 and 2, 1 and 3.
int word_column(int place, int element) {
  int const word = place / 4, j = word / kWordsOf16, t = word % kWordsOf16;
  return 16 * j + 2 * t + element / 2 + 8 * (element % 2);
}
[[maybe_unused]] int byte_column(int place) { return word_column(place, place % 4); }
[[maybe_unused]] int half_column(int place) {
  return word_column(place, place % 4 / 2 + place % 2 * 2);
}

// ---- a panel

// The rows of a chunk, behind the last scale block.
void store_rows(CpuProduct const& p, TileMemory const& memory, int panel, int first, int rows) {
  int const columns = std::min(kRowsPerPanel, p.weight.n - panel * kRowsPerPanel);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; column += 8) {
      __m256 value = _mm256_load_ps(memory.total[row] + column);
      if (p.weight.offsets)
        value = _mm256_add_ps(value, _mm256_load_ps(memory.offsets[row] + column));
      store_vector(p, first + row, panel * kRowsPerPanel + column, value);
    }
  }
}

template <class Tiles>
void multiply_tiles(CpuProduct const& p, int panel, int first, int rows) {
  constexpr int kBits = Tiles::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  std::unique_ptr<TileMemory> const memory(new TileMemory);
  memory->clear(p, rows);
  uint8_t const* const chunks = codes_of_panel<kBits>(p, panel);
  Prefetch prefetch(chunks);
  Tiles tiles(p);
  for (Runs runs(p, panel); runs.next();) {
    Span const span(p, runs);
    uint8_t const* const codes = codes_at<kBits>(chunks, span.begin);
    for (int i = 0; i < kRowBlocks; i += Tiles::kBlocks) {
      for (int block = i; block < i + Tiles::kBlocks; ++block) {
        prefetch.lines(span.columns * kRowsPerBlock * kBits / 8 / 64);
        tiles.decode(p, *memory, span, codes + block * kBlockBytes, block);
      }
      for_parts<kMostTileRows>(rows, [&](int row, auto count) {
        tiles.template multiply<decltype(count)::value>(p, *memory, span, i, first + row, row);
      });
    }
  }
  store_rows(p, *memory, panel, first, rows);
}

}  // namespace
}  // namespace cutlass_ops
