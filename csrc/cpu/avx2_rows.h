// Products of few rows of x, with AVX2. They use the codes in the packed order (layout.h): the 64
// bytes of the four lanes of a lane group g hold rows g and g + 8 of a fragment, so x is reordered
// once to match them, and codes are rarely shuffled.
//
// In group vectors the eight rows of a lane group are adjacent: eight sums of one panel's rows, of
// all its four row blocks, are reduced together to one vector, which multiplies eight scales.
#pragma once

#include "cpu/avx2_vectors.h"

namespace cutlass_ops {
namespace {

template <int kSelect>
__m256 select(__m256 a, __m256 b) {
  return _mm256_shuffle_ps(a, b, kSelect);
}
template <int kSelect>
__m256i select(__m256i a, __m256i b) {
  return _mm256_castps_si256(select<kSelect>(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
}

// The results of a panel and a row of x while they are summed, in the order of group vectors.
struct RowTotals {
  alignas(64) float total[kRowsPerPanel] = {};
  alignas(64) float offsets[kRowsPerPanel] = {};
  alignas(64) int32_t pending[kRowsPerPanel] = {};  // sums of a scale block's runs: integers or
                                                    // floats
  int64_t large[kRowsPerPanel] = {};                // those that may exceed 32 bits

  void store(CpuProduct const& p, int panel, int m) {
    if (p.weight.offsets) {
      for (int i = 0; i < kRowsPerPanel; ++i) total[i] += offsets[i];
    }
    store_group_order(p, panel, m, total);
  }
};

// A panel's sums of a span's runs, in the order of group vectors.
template <class T>
struct RunSums {
  alignas(64) T sums[kMostRuns][kRowsPerPanel];
};

// Calls use(i) for i = 0, 16, 32 and 48: rows of a panel.
template <class Use>
[[gnu::always_inline]] inline void for_sixteens(Use const& use) {
  for (int i = 0; i < kRowsPerPanel; i += 16) use(i);
}

// use(type) with a constant: a type of floats.
template <class Use>
[[gnu::always_inline]] inline void with_float_type(DataType type, Use const& use) {
  if (type == DataType::kFloat32)
    return use(std::integral_constant<DataType, DataType::kFloat32>());
  if (type == DataType::kFloat16)
    return use(std::integral_constant<DataType, DataType::kFloat16>());
  use(std::integral_constant<DataType, DataType::kBFloat16>());
}

// The panel's scales or offsets of a group as floats.
void load_panel(void const* data, DataType type, int64_t vector, float* out) {
  with_float_type(type, [&](auto of) {
    for_sixteens([&](int i) { Sixteen::load(data, of, vector + i).store(out + i); });
  });
}

// The group vectors of a scale block.
struct BlockVectors {
  alignas(64) float scales[kRowsPerPanel], offsets[kRowsPerPanel];

  BlockVectors() = default;
  BlockVectors(PackedWeight const& w, int64_t vector) {
    load_panel(w.scales, w.scale_type, vector, scales);
    if (w.offsets) load_panel(w.offsets, w.offset_type, vector, offsets);
  }

  void add_offsets(CpuProduct const& p, int64_t x_block, RowTotals& row) const {
    if (!p.weight.offsets) return;
    Sixteen const x_sum(p.offset_x[x_block]);
    for_sixteens([&](int i) {
      (Sixteen::load(row.offsets + i) + x_sum * Sixteen::load(offsets + i)).store(row.offsets + i);
    });
  }
};

// Lanes j and 4 + j of rows i and i + 4, to the rows' lanes of each j: store(j, lanes).
template <class Vector, class Store>
[[gnu::always_inline]] inline void store_lanes(Vector const (&rows)[4], Store const& store) {
  Vector const a = select<0x44>(rows[0], rows[1]), b = select<0xee>(rows[0], rows[1]);
  Vector const c = select<0x44>(rows[2], rows[3]), d = select<0xee>(rows[2], rows[3]);
  store(0, select<0x88>(a, c)), store(1, select<0xdd>(a, c));
  store(2, select<0x88>(b, d)), store(3, select<0xdd>(b, d));
}

// ---- floats

// The sums of the low and of the high 128 bits: four of a, then four of b.
inline __m256 add_halves(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
}

// Eight rows' lanes, 4 * (t % 2) + j, to each row's sums of runs.
[[gnu::always_inline]] inline void reduce(__m256 const (&v)[kRowVectors], int run, int g,
                                          RunSums<float>& out) {
  auto const store = [&](int part, __m256 sum) { _mm256_store_ps(out.sums[part] + 8 * g, sum); };
  if (run == 16) {  // of each j
    __m256 rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = add_halves(v[i], v[i + 4]);
    return store_lanes(rows, store);
  }
  auto const pairs = [&](int i) {
    return _mm256_add_ps(select<0x88>(v[i], v[i + 1]), select<0xdd>(v[i], v[i + 1]));
  };
  __m256 const a = pairs(0), b = pairs(2), c = pairs(4), d = pairs(6);
  __m256 const low = add_halves(select<0x88>(a, b), select<0x88>(c, d)),
               high = add_halves(select<0xdd>(a, b), select<0xdd>(c, d));
  if (run >= kLaneColumns) return store(0, _mm256_add_ps(low, high));
  store(0, low), store(1, high);
}

// Adds the runs' sums of rows m .. m + kRows - 1 of x to their results.
template <int kRows>
void promote(CpuProduct const& p, Runs const& runs, int m, RunSums<float> const (&sums)[kRows],
             RowTotals (&rows)[kRows]) {
  for (int part = 0; part < runs.count; ++part) {
    BlockVectors const vectors(p.weight, runs.vector[part]);
    for (int r = 0; r < kRows; ++r) {
      RowTotals& row = rows[r];
      float const* from = sums[r].sums[part];
      if (p.block > runs.run) {
        auto* const pending = reinterpret_cast<float*>(row.pending);
        for_sixteens([&](int i) {
          (Sixteen::load(pending + i) + Sixteen::load(from + i)).store(pending + i);
        });
        from = pending;
      }
      if (!runs.last[part]) continue;
      for_sixteens([&](int i) {
        Sixteen const product = Sixteen::load(from + i) * Sixteen::load(vectors.scales + i);
        (Sixteen::load(row.total + i) + product).store(row.total + i);
      });
      vectors.add_offsets(p, int64_t(m + r) * p.blocks + runs.block[part], row);
      if (p.block > runs.run) std::memset(row.pending, 0, sizeof row.pending);
    }
  }
}

// Zero points of rows g and g + 8 of row block i, as codes are counted (from 0), for the lanes
// of their runs; `row`: of a panel's vectors.
template <bool kZeros>
struct ZeroPoints {
  __m256 rows[2];

  [[gnu::always_inline]] ZeroPoints(CpuProduct const& p, Runs const& runs, int row, int middle) {
    rows[0] = rows[1] = _mm256_set1_ps(float(middle));
    if (!kZeros) return;
    for (int h = 0; h < 2; ++h) {
      rows[h] = by_run(runs, [&](int part) {
        return _mm256_set1_ps(float(middle + p.weight.zeros[runs.vector[part] + row + h]));
      });
    }
  }
};

template <class Format, int kRows, bool kZeros>
void multiply_floats(CpuProduct const& p, int panel, int m) {
  constexpr int kBits = Format::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  uint8_t const* const tiles = codes_of_panel<kBits>(p, panel);
  Avx2Decoder<Format> const decoder(p);
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
        ZeroPoints<kZeros> const zeros(p, runs, 8 * g + 2 * i, 1 << (kBits - 1));
        __m256 of_row[kRows][2];
        unrolled<kRows>([&](auto r) { of_row[r][0] = of_row[r][1] = _mm256_setzero_ps(); });
        float const* x = first;
        uint8_t const* bytes = codes + i * kBlockBytes + g * 64;
        for (int column = 0; column < runs.span;
             column += kLaneColumns, bytes += kUnitBytes * kBits / 4) {
          for (int unit = 0; unit < kLaneColumns / unit_k(kBits); ++unit) prefetch.line();
          for (int half = 0; half < 2; ++half, x += 32) {
            __m256i a = load(bytes + 32 * half), b;
            if constexpr (byte_rows(kBits) == 2) {
              b = _mm256_srli_epi32(a, 4);
            } else {
              // Words of both rows, j = 0 and 1, and those of j = 2 and 3.
              __m256i const next = load(bytes + kUnitBytes + 32 * half);
              b = select<0xdd>(a, next), a = select<0x88>(a, next);
            }
            unrolled<4>([&](auto e) {
              __m256 const low = decoder.template value<e>(a, zeros.rows[0]),
                           high = decoder.template value<e>(b, zeros.rows[1]);
              unrolled<kRows>([&](auto r) {
                __m256 const factor = _mm256_loadu_ps(x + r * stride + 8 * e);
                of_row[r][0] = _mm256_add_ps(of_row[r][0], _mm256_mul_ps(low, factor));
                of_row[r][1] = _mm256_add_ps(of_row[r][1], _mm256_mul_ps(high, factor));
              });
            });
          }
        }
        unrolled<kRows>(
            [&](auto r) { lanes[r][2 * i] = of_row[r][0], lanes[r][2 * i + 1] = of_row[r][1]; });
      });
      for (int r = 0; r < kRows; ++r) reduce(lanes[r], runs.run, g, sums[r]);
    }
    promote<kRows>(p, runs, m, sums, rows);
  }
  for (int r = 0; r < kRows; ++r) rows[r].store(p, panel, m + r);
}

// ---- integers

// Products of a span's columns for rows g and g + 8 of a row block: lanes of kRows rows of x, and
// behind them, where x has zero points, of the codes. `bytes`: the codes from the span's
// first unit on; `offset`: of x. kCentred: x is integers minus their zero points; kAbove: the
// difference between stored and centred codes. Lanes are added, and then extended to 32 bits.
template <class Width>
struct RowProducts;

template <>
struct RowProducts<Nibbles> {
  static constexpr bool kCentred = false;
  static constexpr int kBits = Nibbles::kBits, kAbove = 1 << (kBits - 1);

  // 15 * 128 * 2 a product of pairs; eight of them are added: 30720 fits into 16 bits.
  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
  static __m256i to_32_bits(__m256i lanes) {
    return _mm256_madd_epi16(lanes, _mm256_set1_epi16(1));
  }

  template <int kRows, bool kXZeros>
  [[gnu::always_inline]] static void multiply(CpuProduct const& p, Prefetch& prefetch, int span,
                                              uint8_t const* bytes, int64_t offset,
                                              __m256i (&out)[kRows + kXZeros][2]) {
    __m256i const nibbles = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(char(0x88));
    __m256i sums[kRows + kXZeros][2];
    unrolled<2 * (kRows + kXZeros)>([&](auto v) { sums[v / 2][v % 2] = _mm256_setzero_si256(); });
    int8_t const* x = p.codes + offset;
    for (int column = 0; column < span; column += unit_k(kBits), bytes += kUnitBytes, x += 64) {
      prefetch.line();
      unrolled<2>([&](auto half) {
        __m256i const words = _mm256_xor_si256(load(bytes + 32 * half), flip);
        __m256i const low = _mm256_and_si256(words, nibbles);
        __m256i const high = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibbles);
        unrolled<kRows>([&](auto r) {
          __m256i const factors = load(x + r * p.x_stride + 32 * half);
          sums[r][0] = add(sums[r][0], _mm256_maddubs_epi16(low, factors));
          sums[r][1] = add(sums[r][1], _mm256_maddubs_epi16(high, factors));
        });
        if constexpr (kXZeros) {  // bytes, for now
          sums[kRows][0] = _mm256_add_epi8(sums[kRows][0], low);
          sums[kRows][1] = _mm256_add_epi8(sums[kRows][1], high);
        }
      });
    }
    if constexpr (kXZeros) {
      for (__m256i& sum : sums[kRows]) sum = _mm256_maddubs_epi16(sum, _mm256_set1_epi8(1));
    }
    unrolled<2 * (kRows + kXZeros)>([&](auto v) { out[v / 2][v % 2] = sums[v / 2][v % 2]; });
  }
};

template <>
struct RowProducts<WholeBytes> {
  static constexpr bool kCentred = true;
  static constexpr int kBits = WholeBytes::kBits, kAbove = 0;

  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static __m256i to_32_bits(__m256i lanes) { return lanes; }

  template <int kRows, bool kXZeros>
  [[gnu::always_inline]] static void multiply(CpuProduct const& p, Prefetch& prefetch, int span,
                                              uint8_t const* bytes, int64_t offset,
                                              __m256i (&out)[kRows][2]) {
    // Fragments of the first 32 columns of each 64, and of the others: in lanes j = 0
    // and 1, and 2 and 3.
    __m256i sums[kRows][2];
    unrolled<2 * kRows>([&](auto v) { sums[v / 2][v % 2] = _mm256_setzero_si256(); });
    int16_t const* x = p.centred + offset;
    for (int column = 0; column < span; column += kLaneColumns) {
      unrolled<2>([&](auto f) {
        prefetch.line();
        unrolled<4>([&](auto quarter) {
          // Pairs of bytes of the words of row g (j = 0), row g + 8, row g (j = 1), row g + 8.
          __m256i const codes = _mm256_cvtepi8_epi16(
              _mm_loadu_si128(reinterpret_cast<__m128i const*>(bytes + 16 * quarter)));
          unrolled<kRows>([&](auto r) {
            __m256i const factors = load(x + r * p.x_stride + 16 * quarter);
            sums[r][f] = add(sums[r][f], _mm256_madd_epi16(codes, factors));
          });
        });
        bytes += kUnitBytes, x += 64;
      });
    }
    // Eight lanes a fragment, two neighbours a word; words of a row are two apart. They
    // become lanes j and 4 + j.
    __m256i const in_turn = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
    unrolled<kRows>([&](auto r) {
      __m256i const first = sums[r][0], second = sums[r][1];
      out[r][0] = _mm256_permutevar8x32_epi32(select<0x44>(first, second), in_turn);
      out[r][1] = _mm256_permutevar8x32_epi32(select<0xee>(first, second), in_turn);
    });
  }
};

// The sums of the low and of the high 128 bits: four of a, then four of b.
template <class Products>
__m256i add_halves(__m256i a, __m256i b) {
  return Products::add(_mm256_blend_epi32(a, b, 0xf0), _mm256_permute2x128_si256(a, b, 0x21));
}

// Lanes j of rows i and i + 4 of a lane group, to each row's sums of runs.
[[gnu::always_inline]] inline void reduce(__m256i const (&rows)[4], int run, int g,
                                          RunSums<int32_t>& out) {
  auto const store = [&](int part, __m256i sum) { store_ints(out.sums[part] + 8 * g, sum); };
  if (run == 16) return store_lanes(rows, store);
  auto const pairs = [&](int i) {
    return _mm256_add_epi32(select<0x88>(rows[i], rows[i + 1]), select<0xdd>(rows[i], rows[i + 1]));
  };
  __m256i const a = pairs(0), b = pairs(2);
  __m256i const low = select<0x88>(a, b), high = select<0xdd>(a, b);
  if (run >= kLaneColumns) return store(0, _mm256_add_epi32(low, high));
  store(0, low), store(1, high);
}

// Adds the runs' sums of rows m .. m + kRows - 1 of x to their results. Behind them, where x has
// zero points, are sums of the codes. kAbove: the difference between stored and centred codes.
template <int kAbove, int kRows, int kSums>
void promote(CpuProduct const& p, Runs const& runs, int m, RunSums<int32_t> (&sums)[kSums],
             RowTotals (&rows)[kRows]) {
  PackedWeight const& w = p.weight;
  bool const overflows = p.block > kColumnsOf32Bits;
  for (int part = 0; part < runs.count; ++part) {
    bool const last = runs.last[part];
    BlockVectors const vectors(w, runs.vector[part]);
    int8_t const* const zeros = w.zeros ? w.zeros + runs.vector[part] : nullptr;
    for (int r = 0; r < kRows; ++r) {
      RowTotals& row = rows[r];
      int64_t const x_block = int64_t(m + r) * p.blocks + runs.block[part], x_sum = p.sums[x_block];
      int32_t* sum = sums[r].sums[part];
      if constexpr (kSums > kRows) {
        int32_t const* const codes = sums[kRows].sums[part];
        SixteenInts const zero(p.zeros[x_block]);
        for_sixteens([&](int i) {
          (SixteenInts::load(sum + i) - zero * SixteenInts::load(codes + i)).store(sum + i);
        });
      }
      if (p.block > runs.run) {
        for_sixteens([&](int i) {
          (SixteenInts::load(row.pending + i) + SixteenInts::load(sum + i)).store(row.pending + i);
        });
        sum = row.pending;
      }
      if (overflows && (last || (runs.begin + runs.span) % kColumnsOf32Bits == 0)) {
        for (int i = 0; i < kRowsPerPanel; ++i) row.large[i] += sum[i], sum[i] = 0;
      }
      if (!last) continue;
      Sixteen const x_scale(p.scales[x_block]);
      auto const add = [&](int i, Sixteen integers) {
        Sixteen const scale = x_scale * Sixteen::load(vectors.scales + i);
        (Sixteen::load(row.total + i) + integers * scale).store(row.total + i);
      };
      if (overflows) {
        alignas(64) float values[kRowsPerPanel];
        for (int i = 0; i < kRowsPerPanel; ++i) {
          values[i] = float(row.large[i] - (kAbove + (zeros ? zeros[i] : 0)) * x_sum);
          row.large[i] = 0;
        }
        for_sixteens([&](int i) { add(i, Sixteen::load(values + i)); });
      } else if (zeros) {
        SixteenInts const factor{int(x_sum)}, above{kAbove};
        for_sixteens([&](int i) {
          SixteenInts const less = (above + SixteenInts::load(zeros + i)) * factor;
          add(i, (SixteenInts::load(sum + i) - less).floats());
        });
      } else {
        SixteenInts const less(kAbove * int(x_sum));
        for_sixteens([&](int i) { add(i, (SixteenInts::load(sum + i) - less).floats()); });
      }
      vectors.add_offsets(p, x_block, row);
      if (p.block > runs.run) std::memset(row.pending, 0, sizeof row.pending);
    }
  }
}

template <class Width, int kRows, bool kXZeros>
void multiply_integers(CpuProduct const& p, int panel, int m) {
  using Products = RowProducts<Width>;
  constexpr int kBits = Width::kBits, kColumns = unit_k(kBits), kSums = kRows + kXZeros,
                kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  uint8_t const* const tiles = codes_of_panel<kBits>(p, panel);
  Prefetch prefetch(tiles);
  RowTotals totals[kRows];
  RunSums<int32_t> sums[kSums];
  for (Runs runs(p, panel); runs.next();) {
    uint8_t const* const codes = codes_at<kBits>(tiles, runs.begin);
    int64_t const x = m * p.x_stride + int64_t(runs.begin) / kColumns * 64;
    for (int g = 0; g < kGroups; ++g) {
      __m256i rows[kSums][4];
      unrolled<2>([&](auto i) {
        __m256i lanes[2][kSums][2];  // of row blocks i and i + 2
        unrolled<2>([&](auto other) {
          Products::template multiply<kRows, kXZeros>(
              p, prefetch, runs.span, codes + (i + 2 * other) * kBlockBytes + g * 64, x,
              lanes[other]);
        });
        unrolled<kSums>([&](auto s) {
          for (int h = 0; h < 2; ++h)
            rows[s][2 * i + h] =
                Products::to_32_bits(add_halves<Products>(lanes[0][s][h], lanes[1][s][h]));
        });
      });
      unrolled<kSums>([&](auto s) { reduce(rows[s], runs.run, g, sums[s]); });
    }
    promote<Products::kAbove, kRows, kSums>(p, runs, m, sums, totals);
  }
  for (int r = 0; r < kRows; ++r) totals[r].store(p, panel, m + r);
}

template <int kRows>
void multiply_rows(CpuProduct const& p, int panel, int m) {
  visit_nibbles_or_bytes(p.weight.format, [&](auto format) {
    using Format = decltype(format);
    using W = Width<Format::kBits>;
    if (p.has_floats) {
      p.weight.zeros ? multiply_floats<Format, kRows, true>(p, panel, m)
                     : multiply_floats<Format, kRows, false>(p, panel, m);
    } else if constexpr (!RowProducts<W>::kCentred) {
      p.zeros ? multiply_integers<W, kRows, true>(p, panel, m)
              : multiply_integers<W, kRows, false>(p, panel, m);
    } else {
      multiply_integers<W, kRows, false>(p, panel, m);
    }
  });
}

// The parts of a fragment's 64 bytes: lane t's sixteen, words, bytes.
template <int kBits>
int fragment_column(int place) {
  return place / 4 % 4 / words_of_16_k(kBits) * 16 + place / 16 * 2 + place % 4 / 2 + place % 2 * 8;
}

}  // namespace
}  // namespace cutlass_ops
