// Products of one row of x, with AVX2. They use the codes in the packed order (layout.h): the 64
// bytes of the four lanes of a lane group g hold rows g and g + 8 of a fragment, so x is reordered
// once to match them, and codes are rarely shuffled.
//
// In group vectors the eight rows of a lane group are adjacent: eight sums of one panel's rows, of
// all its four row blocks, are reduced together to one vector, which multiplies eight scales.
#pragma once

#include "cpu/avx2_vectors.h"

namespace cutlass_ops {
namespace {

struct Ints {
  using Vector = __m256i;
  static Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
  static Vector add_pairs(Vector a, Vector b) { return _mm256_hadd_epi32(a, b); }
  static Vector cast(__m256 v) { return _mm256_castps_si256(v); }
  static __m256 floats(Vector v) { return _mm256_castsi256_ps(v); }
};

struct Floats {
  using Vector = __m256;
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector add_pairs(Vector a, Vector b) { return _mm256_hadd_ps(a, b); }
  static Vector cast(__m256 v) { return v; }
  static __m256 floats(Vector v) { return v; }
};

// The sums of the low and of the high 128 bits: four of a, then four of b.
template <class T>
typename T::Vector add_halves(typename T::Vector a, typename T::Vector b) {
  __m256 const x = T::floats(a), y = T::floats(b);
  return T::add(T::cast(_mm256_permute2f128_ps(x, y, 0x20)),
                T::cast(_mm256_permute2f128_ps(x, y, 0x31)));
}

template <class T, int kSelect>
typename T::Vector select(typename T::Vector a, typename T::Vector b) {
  return T::cast(_mm256_shuffle_ps(T::floats(a), T::floats(b), kSelect));
}

// Eight rows' lanes, 4 * (t % 2) + j, to each row's sums of runs.
template <class T>
void reduce(typename T::Vector const (&v)[kRowVectors], int run,
            typename T::Vector (&sums)[kMostRuns]) {
  using Vector = typename T::Vector;
  if (run == 16) {  // of each j
    Vector rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = add_halves<T>(v[i], v[i + 4]);
    Vector const a = select<T, 0x44>(rows[0], rows[1]), b = select<T, 0xee>(rows[0], rows[1]);
    Vector const c = select<T, 0x44>(rows[2], rows[3]), d = select<T, 0xee>(rows[2], rows[3]);
    sums[0] = select<T, 0x88>(a, c), sums[1] = select<T, 0xdd>(a, c);
    sums[2] = select<T, 0x88>(b, d), sums[3] = select<T, 0xdd>(b, d);
    return;
  }
  auto const a = T::add_pairs(v[0], v[1]), b = T::add_pairs(v[2], v[3]);
  auto const c = T::add_pairs(v[4], v[5]), d = T::add_pairs(v[6], v[7]);
  sums[0] = add_halves<T>(select<T, 0x88>(a, b), select<T, 0x88>(c, d));
  sums[1] = add_halves<T>(select<T, 0xdd>(a, b), select<T, 0xdd>(c, d));
  if (run >= kLaneColumns) sums[0] = T::add(sums[0], sums[1]);
}

// ---- floats

// Adds the products of 32 columns, eight values of x at a time.
template <class Decoder>
void add_products(Decoder const& decoder, __m256i words, __m256 zero, float const* x, __m256& sum) {
  auto const add = [&](__m256 value, int place) {
    sum = _mm256_add_ps(sum, _mm256_mul_ps(value, _mm256_loadu_ps(x + place)));
  };
  add(decoder.template value<0>(words, zero), 0);
  add(decoder.template value<1>(words, zero), 8);
  add(decoder.template value<2>(words, zero), 16);
  add(decoder.template value<3>(words, zero), 24);
}

// The steps that follow a scale block's sums.
struct Totals {
  alignas(32) float total[kRowsPerPanel] = {};
  alignas(32) float offsets[kRowsPerPanel] = {};

  // Lane group g of row m: sums of block `block`, times a scale of the panel's group vector, and
  // the offsets' part.
  void add(CpuProduct const& p, int m, int block, int64_t vectors, int g, __m256 sums,
           bool integers) {
    PackedWeight const& w = p.weight;
    int64_t const vector = vectors + 8 * g;
    int64_t const at = int64_t(m) * p.blocks + block;
    __m256 scale = load_floats(w.scales, w.scale_type, vector);
    if (integers) scale = _mm256_mul_ps(_mm256_set1_ps(p.scales[at]), scale);
    float* const to = total + 8 * g;
    _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), _mm256_mul_ps(sums, scale)));
    if (!w.offsets) return;
    __m256 const offset = load_floats(w.offsets, w.offset_type, vector);
    float* const more = offsets + 8 * g;
    _mm256_store_ps(more, _mm256_add_ps(_mm256_load_ps(more),
                                        _mm256_mul_ps(_mm256_set1_ps(p.offset_x[at]), offset)));
  }

  void store(CpuProduct const& p, int panel, int m) {
    if (p.weight.offsets) {
      for (int i = 0; i < kRowsPerPanel; ++i) total[i] += offsets[i];
    }
    store_panel(p, panel, m, total);
  }
};

// Zero points of rows g and g + 8 of row block i, as codes are counted (from 0), for the lanes
// of their runs; `row`: of a panel's vectors.
struct ZeroPoints {
  __m256 rows[2];

  ZeroPoints(CpuProduct const& p, Runs const& runs, int row, int middle) {
    rows[0] = rows[1] = _mm256_set1_ps(float(middle));
    int8_t const* const zeros = p.weight.zeros;
    if (!zeros) return;
    for (int h = 0; h < 2; ++h) {
      rows[h] = by_run(runs, [&](int part) {
        return _mm256_set1_ps(float(middle + zeros[runs.vector[part] + row + h]));
      });
    }
  }
};

template <class Format>
void multiply_floats(CpuProduct const& p, int panel, int m) {
  PackedWeight const& w = p.weight;
  constexpr int kBits = Format::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  uint8_t const* const chunks = w.codes + int64_t(panel) * p.tiles * k_tile_bytes(kBits);
  Avx2Decoder<Format> const decoder(p);
  Totals totals;
  alignas(32) float pending[kRowsPerPanel] = {};  // sums of a scale block's runs
  int const run = p.run(), span = std::max(run, kLaneColumns), end_k = p.tiles * kKPerTile;
  for (int begin = 0; begin < end_k && begin / p.block < p.blocks; begin += span) {
    uint8_t const* const chunk = chunks + int64_t(begin / kKPerTile) * k_tile_bytes(kBits);
    Runs const runs(p, panel, begin);
    for (int g = 0; g < kGroups; ++g) {
      __m256 lanes[kRowVectors];
      for (int i = 0; i < kRowBlocks; ++i) {
        ZeroPoints const zeros(p, runs, 8 * g + 2 * i, 1 << (kBits - 1));
        __m256 low, high;
        low = high = _mm256_setzero_ps();
        float const* x = p.x + m * p.x_stride + begin;
        uint8_t const* bytes =
            chunk + i * kBlockBytes + begin % kKPerTile / 64 * (kUnitBytes * kBits / 4) + g * 64;
        for (int column = 0; column < span;
             column += kLaneColumns, bytes += kUnitBytes * kBits / 4) {
          for (int unit = 0; unit < kLaneColumns / unit_k(kBits); ++unit) {
            _mm_prefetch(
                reinterpret_cast<char const*>(bytes) + k_tile_bytes(kBits) + unit * kUnitBytes,
                _MM_HINT_T0);
          }
          for (int half = 0; half < 2; ++half, x += 32) {
            __m256i a = load(bytes + 32 * half), b;
            if constexpr (byte_rows(kBits) == 2) {
              b = _mm256_srli_epi32(a, 4);
            } else {
              // Words of both rows, j = 0 and 1, and those of j = 2 and 3.
              __m256i const next = load(bytes + kUnitBytes + 32 * half);
              b = select<Ints, 0xdd>(a, next), a = select<Ints, 0x88>(a, next);
            }
            add_products(decoder, a, zeros.rows[0], x, low);
            add_products(decoder, b, zeros.rows[1], x, high);
          }
        }
        lanes[2 * i] = low, lanes[2 * i + 1] = high;
      }
      __m256 sums[kMostRuns];
      reduce<Floats>(lanes, run, sums);
      for (int part = 0; part < runs.count; ++part) {
        float* const kept = pending + 8 * g;
        __m256 const sum = _mm256_add_ps(_mm256_load_ps(kept), sums[part]);
        _mm256_store_ps(kept, runs.last[part] ? _mm256_setzero_ps() : sum);
        if (runs.last[part]) totals.add(p, m, runs.block[part], runs.vector[part], g, sum, false);
      }
    }
  }
  totals.store(p, panel, m);
}

// ---- integers

// Products of a span's columns for rows g and g + 8 of a row block. `bytes`: their codes from the
// span's first unit on; `at`: the position in x; x_zeros: negative zero points in 16 bits, for the
// lanes of runs. kCentred: x is integers minus their zero points; kAbove: the difference between
// stored and centred codes.
template <class Width>
struct RowProducts;

template <>
struct RowProducts<Nibbles> {
  static constexpr bool kCentred = false;
  static constexpr int kBits = Nibbles::kBits, kAbove = 1 << (kBits - 1);

  [[gnu::always_inline]] static void add(CpuProduct const& p, __m256i x_zeros, int span,
                                         uint8_t const* bytes, int64_t at, __m256i (&rows)[2]) {
    __m256i const nibbles = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(char(0x88));
    __m256i const one_bytes = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
    __m256i low, high;
    low = high = _mm256_setzero_si256();
    __m256i codes_low = _mm256_setzero_si256(), codes_high = codes_low;
    for (int column = 0; column < span; column += unit_k(kBits), bytes += kUnitBytes, at += 64) {
      _mm_prefetch(reinterpret_cast<char const*>(bytes) + k_tile_bytes(kBits), _MM_HINT_T0);
      for (int half = 0; half < 2; ++half) {
        __m256i const words = _mm256_xor_si256(load(bytes + 32 * half), flip);
        __m256i const a = _mm256_and_si256(words, nibbles);
        __m256i const b = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibbles);
        if (p.zeros)
          codes_low = _mm256_add_epi8(codes_low, a), codes_high = _mm256_add_epi8(codes_high, b);
        // 15 * 128 * 2 a product; four of them are added: 15360 fits into 16 bits.
        __m256i const x = load(p.codes + at + 32 * half);
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16(a, x));
        high = _mm256_add_epi16(high, _mm256_maddubs_epi16(b, x));
      }
    }
    __m256i const pairs_low = _mm256_maddubs_epi16(codes_low, one_bytes);
    __m256i const pairs_high = _mm256_maddubs_epi16(codes_high, one_bytes);
    __m256i a = _mm256_madd_epi16(low, ones), b = _mm256_madd_epi16(high, ones);
    if (p.zeros) {
      a = _mm256_add_epi32(a, _mm256_madd_epi16(pairs_low, x_zeros));
      b = _mm256_add_epi32(b, _mm256_madd_epi16(pairs_high, x_zeros));
    }
    rows[0] = a, rows[1] = b;
  }
};

template <>
struct RowProducts<WholeBytes> {
  static constexpr bool kCentred = true;
  static constexpr int kBits = WholeBytes::kBits, kAbove = 0;

  [[gnu::always_inline]] static void add(CpuProduct const& p, __m256i, int span,
                                         uint8_t const* bytes, int64_t at, __m256i (&rows)[2]) {
    // Fragments of the first 32 columns of each 64, and of the others: in lanes j = 0
    // and 1, and 2 and 3.
    __m256i sums[2][2] = {};
    for (int column = 0; column < span; column += unit_k(kBits), bytes += kUnitBytes, at += 64) {
      _mm_prefetch(reinterpret_cast<char const*>(bytes) + k_tile_bytes(kBits), _MM_HINT_T0);
      int const f = column / unit_k(kBits) % 2;
      for (int half = 0; half < 2; ++half) {
        __m256i const words = load(bytes + 32 * half);
        __m256i const a = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(words));
        __m256i const b = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(words, 1));
        int16_t const* const x = p.centred + at + 32 * half;
        // Pairs of bytes of the words of row g (j = 0), row g + 8, row g (j = 1), row g + 8.
        sums[f][0] = _mm256_add_epi32(sums[f][0], _mm256_madd_epi16(a, load(x)));
        sums[f][1] = _mm256_add_epi32(sums[f][1], _mm256_madd_epi16(b, load(x + 16)));
      }
    }
    // Eight lanes a fragment, two neighbours a word; words of a row are two apart. They
    // become lanes j and 4 + j.
    __m256i const first = _mm256_add_epi32(sums[0][0], sums[0][1]);
    __m256i const second = _mm256_add_epi32(sums[1][0], sums[1][1]);
    __m256i const in_turn = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
    rows[0] = _mm256_permutevar8x32_epi32(select<Ints, 0x44>(first, second), in_turn);
    rows[1] = _mm256_permutevar8x32_epi32(select<Ints, 0xee>(first, second), in_turn);
  }
};

template <class Width>
void multiply_integers(CpuProduct const& p, int panel, int m) {
  PackedWeight const& w = p.weight;
  constexpr int kBits = Width::kBits, kColumns = unit_k(kBits),
                kBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  uint8_t const* const chunks = w.codes + int64_t(panel) * p.tiles * k_tile_bytes(kBits);
  Totals totals;
  alignas(32) int32_t pending[kRowsPerPanel] = {};
  int64_t wide[kRowsPerPanel] = {};
  bool const overflows = p.block > kColumnsOf32Bits;
  int const run = p.run(), span = std::max(run, kLaneColumns), end_k = p.tiles * kKPerTile;
  for (int begin = 0; begin < end_k && begin / p.block < p.blocks; begin += span) {
    uint8_t const* const chunk = chunks + int64_t(begin / kKPerTile) * k_tile_bytes(kBits);
    Runs const runs(p, panel, begin);
    __m256i x_zeros = _mm256_setzero_si256();
    if (p.zeros) {
      int32_t const* const zeros = p.zeros + int64_t(m) * p.blocks + runs.block[0];
      x_zeros = _mm256_castps_si256(by_run(runs, [&](int part) {
        return _mm256_castsi256_ps(_mm256_set1_epi16(short(-zeros[part])));
      }));
    }
    for (int g = 0; g < kGroups; ++g) {
      __m256i lanes[kRowVectors];
      for (int i = 0; i < kRowBlocks; ++i) {
        uint8_t const* const bytes =
            chunk + i * kBlockBytes + begin % kKPerTile / kColumns * kUnitBytes + g * 64;
        int64_t const at = m * p.x_stride + int64_t(begin) / kColumns * 64;
        __m256i rows[2];
        RowProducts<Width>::add(p, x_zeros, span, bytes, at, rows);
        lanes[2 * i] = rows[0], lanes[2 * i + 1] = rows[1];
      }
      __m256i sums[kMostRuns];
      reduce<Ints>(lanes, run, sums);
      for (int part = 0; part < runs.count; ++part) {
        int const end = begin + (part + 1) * run, block = runs.block[part];
        auto* const kept = reinterpret_cast<__m256i*>(pending + 8 * g);
        __m256i const sum = _mm256_add_epi32(_mm256_load_si256(kept), sums[part]);
        bool const last = runs.last[part];
        _mm256_store_si256(kept, last ? _mm256_setzero_si256() : sum);
        int64_t* const large = wide + 8 * g;
        if (overflows && (last || end % kColumnsOf32Bits == 0)) {
          alignas(32) int32_t values[8];
          _mm256_store_si256(reinterpret_cast<__m256i*>(values), sum);
          _mm256_store_si256(kept, _mm256_setzero_si256());
          for (int j = 0; j < 8; ++j) large[j] += values[j];
        }
        if (!last) continue;
        int64_t const vector = runs.vector[part] + 8 * g;
        int64_t const x_sum = p.sums[int64_t(m) * p.blocks + block];
        __m256i zero = _mm256_set1_epi32(RowProducts<Width>::kAbove);
        if (w.zeros) {
          __m128i const bytes = _mm_loadl_epi64(reinterpret_cast<__m128i const*>(w.zeros + vector));
          zero = _mm256_add_epi32(zero, _mm256_cvtepi8_epi32(bytes));
        }
        __m256 integers;
        if (overflows) {
          alignas(32) int32_t zeros[8];
          alignas(32) float values[8];
          _mm256_store_si256(reinterpret_cast<__m256i*>(zeros), zero);
          for (int j = 0; j < 8; ++j) values[j] = float(large[j] - zeros[j] * x_sum), large[j] = 0;
          integers = _mm256_load_ps(values);
        } else {
          integers = _mm256_cvtepi32_ps(
              _mm256_sub_epi32(sum, _mm256_mullo_epi32(zero, _mm256_set1_epi32(int(x_sum)))));
        }
        totals.add(p, m, block, runs.vector[part], g, integers, true);
      }
    }
  }
  totals.store(p, panel, m);
}

void multiply_row(CpuProduct const& p, int panel, int m) {
  if (!p.has_floats)
    return with_width(info(p.weight.format).bits,
                      [&](auto width) { multiply_integers<decltype(width)>(p, panel, m); });
  visit(p.weight.format, [&](auto format) { multiply_floats<decltype(format)>(p, panel, m); });
}

// The parts of a fragment's 64 bytes: lane t's sixteen, words, bytes.
template <int kBits>
int fragment_column(int place) {
  return place / 4 % 4 / words_of_16_k(kBits) * 16 + place / 16 * 2 + place % 4 / 2 + place % 2 * 8;
}

}  // namespace
}  // namespace cutlass_ops
