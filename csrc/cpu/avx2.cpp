// Kernels for CPUs with AVX2. They use the codes in the packed order (layout.h): the 64 bytes of the four lanes of a lane group
// g hold rows g and g + 8 of a fragment, so x is put in their order once, and codes are hardly ever shuffled.
//
// Group vectors have the eight rows of a lane group side by side: eight sums of one panel's rows, of all its four row blocks,
// are reduced together to one vector, which multiplies eight scales.
#include <immintrin.h>

#include <algorithm>

#include "cpu/cpu_kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kGroups = 8;      // lane groups of a panel
constexpr int kRowBlocks = 4;   // of a panel
constexpr int kRowVectors = 8;  // rows of a lane group: two of each row block

__m256i load(void const* from) { return _mm256_loadu_si256(static_cast<__m256i const*>(from)); }

__m256 load_floats(void const* data, DataType type, int64_t index) {
  if (type == DataType::kFloat32) return _mm256_loadu_ps(static_cast<float const*>(data) + index);
  __m128i const halves = _mm_loadu_si128(reinterpret_cast<__m128i const*>(static_cast<char const*>(data) + 2 * index));
  if (type == DataType::kFloat16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

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
  return T::add(T::cast(_mm256_permute2f128_ps(x, y, 0x20)), T::cast(_mm256_permute2f128_ps(x, y, 0x31)));
}

template <class T, int kSelect>
typename T::Vector select(typename T::Vector a, typename T::Vector b) {
  return T::cast(_mm256_shuffle_ps(T::floats(a), T::floats(b), kSelect));
}

// Eight rows' lanes, 4 * (t % 2) + j, to the sums of j = 0 and 1 and those of j = 2 and 3 of each row.
template <class T>
void reduce(typename T::Vector const (&v)[kRowVectors], typename T::Vector (&sums)[2]) {
  auto const a = T::add_pairs(v[0], v[1]), b = T::add_pairs(v[2], v[3]);
  auto const c = T::add_pairs(v[4], v[5]), d = T::add_pairs(v[6], v[7]);
  sums[0] = add_halves<T>(select<T, 0x88>(a, b), select<T, 0x88>(c, d));
  sums[1] = add_halves<T>(select<T, 0xdd>(a, b), select<T, 0xdd>(c, d));
}

// ---- formats: floats of eight codes. A format takes words of four codes, two rows of them in the order of lanes, and has
// `value<e>` of code e of each word.

// An integer below 2^kWidth at bit kShift of a word, as a float: in the mantissa of 2^(23 - kShift), whose last place that is.
template <int kShift, int kWidth>
__m256 in_mantissa(__m256i words) {
  constexpr int kMask = ((1 << kWidth) - 1) << kShift;
  // The highest bit of a stored code is inverted.
  constexpr int kBits = (127 + 23 - kShift) << 23 | 1 << (kShift + kWidth - 1);
  return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_and_si256(words, _mm256_set1_epi32(kMask)), _mm256_set1_epi32(kBits)));
}

// Minus the float above and the zero point.
template <int kShift>
__m256 less(__m256 value, __m256 zero) {
  return _mm256_sub_ps(value, _mm256_add_ps(zero, _mm256_set1_ps(float(1 << (23 - kShift)))));
}

struct Int4 {
  static constexpr int kBits = 4;
  explicit Int4(CpuProduct const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256 zero) const {
    if constexpr (kElement == 3) words = _mm256_srli_epi32(words, 8);
    constexpr int kShift = kElement == 3 ? 16 : 8 * kElement;
    return less<kShift>(in_mantissa<kShift, 4>(words), zero);
  }
};

struct Int8 {
  static constexpr int kBits = 8;
  explicit Int8(CpuProduct const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256 zero) const {
    if constexpr (kElement > 1) words = _mm256_srli_epi32(words, 16);
    constexpr int kShift = 8 * (kElement % 2);
    return less<kShift>(in_mantissa<kShift, 8>(words), zero);
  }
};

struct Codebook4 {
  static constexpr int kBits = 4;
  __m256 low, high;  // by stored codes: values of 8 .. 15, then of 0 .. 7
  explicit Codebook4(CpuProduct const& p) : low(_mm256_loadu_ps(p.codebook + 8)), high(_mm256_loadu_ps(p.codebook)) {}
  template <int kElement>
  __m256 value(__m256i words, __m256) const {
    if constexpr (kElement > 0) words = _mm256_srli_epi32(words, 8 * kElement);
    __m256 const a = _mm256_permutevar8x32_ps(low, words), b = _mm256_permutevar8x32_ps(high, words);
    return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(words, 28)));
  }
};

struct E4m3 {
  static constexpr int kBits = 8;
  explicit E4m3(CpuProduct const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256) const {
    if constexpr (kElement < 3) words = _mm256_slli_epi32(words, 24 - 8 * kElement);
    // Sign, exponent and mantissa where fp32 has them; its exponents are those of e4m3 plus 120. Stored signs are inverted.
    __m256i const bits = _mm256_and_si256(_mm256_srai_epi32(words, 4), _mm256_set1_epi32(int(0x87f00000)));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(-0x1p120f));
  }
};

// ---- floats: rows m .. m + kRows - 1 of x

// Adds the products of 32 columns: kRows of x, eight values at a time.
template <class Format, int kRows>
void add_products(Format const& format, __m256i words, __m256 zero, float const* x, int64_t stride, __m256 (&sums)[kRows]) {
  auto const add = [&](__m256 value, int place) {
    for (int r = 0; r < kRows; ++r) {
      sums[r] = _mm256_add_ps(sums[r], _mm256_mul_ps(value, _mm256_loadu_ps(x + r * stride + place)));
    }
  };
  add(format.template value<0>(words, zero), 0);
  add(format.template value<1>(words, zero), 8);
  add(format.template value<2>(words, zero), 16);
  add(format.template value<3>(words, zero), 24);
}

// What a scale block's sums become.
template <int kRows>
struct Totals {
  alignas(32) float total[kRows][kRowsPerSlab] = {};
  alignas(32) float offsets[kRows][kRowsPerSlab] = {};

  // Lane group g of row m + r: sums of block `block`, times a scale, and the offsets' part.
  void add(CpuProduct const& p, int m, int r, int block, int panel, int g, __m256 sums, bool integers) {
    PackedWeight const& w = p.weight;
    int64_t const vector = block / p.group_blocks * padded_rows(w.n) + panel * kRowsPerSlab + 8 * g;
    int64_t const at = int64_t(m + r) * p.blocks + block;
    __m256 scale = load_floats(w.scales, w.scale_type, vector);
    if (integers) scale = _mm256_mul_ps(_mm256_set1_ps(p.scales[at]), scale);
    float* const to = total[r] + 8 * g;
    _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), _mm256_mul_ps(sums, scale)));
    if (!w.offsets) return;
    __m256 const offset = load_floats(w.offsets, w.offset_type, vector);
    float* const more = offsets[r] + 8 * g;
    _mm256_store_ps(more, _mm256_add_ps(_mm256_load_ps(more), _mm256_mul_ps(_mm256_set1_ps(p.offset_x[at]), offset)));
  }

  void store(CpuProduct const& p, int panel, int m) {
    for (int r = 0; r < kRows; ++r) {
      if (p.weight.offsets) {
        for (int i = 0; i < kRowsPerSlab; ++i) total[r][i] += offsets[r][i];
      }
      store_panel(p, panel, m + r, total[r]);
    }
  }
};

// Zero points of rows g and g + 8 of row block i, as codes are counted (from 0), for the lanes of their blocks.
struct ZeroPoints {
  __m256 rows[2];

  ZeroPoints(CpuProduct const& p, int first_block, int64_t vector, int middle) {
    rows[0] = rows[1] = _mm256_set1_ps(float(middle));
    int8_t const* const zeros = p.weight.zeros;
    if (!zeros) return;
    for (int h = 0; h < 2; ++h) {
      rows[h] = _mm256_set1_ps(float(middle + zeros[vector + h]));
      if (p.block < kLaneColumns && first_block + 1 < p.blocks) {  // words 2 and 3 are another group's
        __m256 const next = _mm256_set1_ps(float(middle + zeros[vector + padded_rows(p.weight.n) + h]));
        rows[h] = _mm256_blend_ps(rows[h], next, 0xcc);
      }
    }
  }
};

// Denormal numbers are what they are, whatever the caller's thread does with them.
class KeepDenormals {
 public:
  KeepDenormals() { _mm_setcsr(before_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(before_); }
  KeepDenormals(KeepDenormals const&) = delete;
  KeepDenormals& operator=(KeepDenormals const&) = delete;

 private:
  unsigned const before_ = _mm_getcsr();
};

template <class Format, int kRows>
void multiply_floats(CpuProduct const& p, int panel, int m) {
  PackedWeight const& w = p.weight;
  constexpr int kBits = Format::kBits, kBlockBytes = chunk_bytes(kBits) / kRowBlocks;
  int64_t const n_pad = padded_rows(w.n);
  uint8_t const* const chunks = w.codes + int64_t(panel) * p.tiles * chunk_bytes(kBits);
  Format const format(p);
  Totals<kRows> totals;
  alignas(32) float pending[kRows][kRowsPerSlab] = {};  // sums of a scale block's runs
  int const run = p.run(), span = std::max(run, kLaneColumns), end_k = p.tiles * kKPerTile;
  for (int begin = 0; begin < end_k && begin / p.block < p.blocks; begin += span) {
    uint8_t const* const chunk = chunks + int64_t(begin / kKPerTile) * chunk_bytes(kBits);
    int const first_block = begin / p.block;
    for (int g = 0; g < kGroups; ++g) {
      int64_t const vector = first_block / p.group_blocks * n_pad + panel * kRowsPerSlab + 8 * g;
      __m256 lanes[kRows][kRowVectors];
      for (int i = 0; i < kRowBlocks; ++i) {
        ZeroPoints const zeros(p, first_block, vector + 2 * i, 1 << (kBits - 1));
        __m256 low[kRows], high[kRows];
        for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm256_setzero_ps();
        float const* x = p.x + m * p.x_stride + begin;
        uint8_t const* bytes = chunk + i * kBlockBytes + begin % kKPerTile / 64 * (kUnitBytes * kBits / 4) + g * 64;
        for (int column = 0; column < span; column += kLaneColumns, bytes += kUnitBytes * kBits / 4) {
          _mm_prefetch(reinterpret_cast<char const*>(bytes) + chunk_bytes(kBits), _MM_HINT_T0);
          if constexpr (kBits == 8)
            _mm_prefetch(reinterpret_cast<char const*>(bytes) + chunk_bytes(kBits) + kUnitBytes, _MM_HINT_T0);
          for (int half = 0; half < 2; ++half, x += 32) {
            __m256i a = load(bytes + 32 * half), b;
            if constexpr (kBits == 4) {
              b = _mm256_srli_epi32(a, 4);
            } else {
              // Words of both rows, j = 0 and 1, and those of j = 2 and 3.
              __m256i const next = load(bytes + kUnitBytes + 32 * half);
              b = select<Ints, 0xdd>(a, next), a = select<Ints, 0x88>(a, next);
            }
            add_products<Format, kRows>(format, a, zeros.rows[0], x, p.x_stride, low);
            add_products<Format, kRows>(format, b, zeros.rows[1], x, p.x_stride, high);
          }
        }
        for (int r = 0; r < kRows; ++r) lanes[r][2 * i] = low[r], lanes[r][2 * i + 1] = high[r];
      }
      for (int r = 0; r < kRows; ++r) {
        __m256 sums[2];
        reduce<Floats>(lanes[r], sums);
        if (run >= kLaneColumns) sums[0] = _mm256_add_ps(sums[0], sums[1]);
        for (int part = 0; part < span / run; ++part) {
          int const end = begin + (part + 1) * run, block = (end - 1) / p.block;
          if (block >= p.blocks) break;
          float* const kept = pending[r] + 8 * g;
          __m256 const sum = _mm256_add_ps(_mm256_load_ps(kept), sums[part]);
          bool const last = end % p.block == 0 || end == end_k;
          _mm256_store_ps(kept, last ? _mm256_setzero_ps() : sum);
          if (last) totals.add(p, m, r, block, panel, g, sum, false);
        }
      }
    }
  }
  totals.store(p, panel, m);
}

// ---- integers

template <int kBits, int kRows>
void multiply_integers(CpuProduct const& p, int panel, int m) {
  PackedWeight const& w = p.weight;
  constexpr int kColumns = kBits == 4 ? 64 : 32, kBlockBytes = chunk_bytes(kBits) / kRowBlocks;
  int64_t const n_pad = padded_rows(w.n);
  uint8_t const* const chunks = w.codes + int64_t(panel) * p.tiles * chunk_bytes(kBits);
  __m256i const nibbles = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(char(0x88));
  __m256i const one_bytes = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
  Totals<kRows> totals;
  alignas(32) int32_t pending[kRows][kRowsPerSlab] = {};
  int64_t wide[kRows][kRowsPerSlab] = {};
  // So many columns' sums fit into 32 bits: 255 * 255 * 2^14 < 2^31.
  constexpr int kColumnsOf32Bits = 1 << 14;
  bool const overflows = p.block > kColumnsOf32Bits;
  int const run = p.run(), span = std::max(run, kLaneColumns), end_k = p.tiles * kKPerTile;
  for (int begin = 0; begin < end_k && begin / p.block < p.blocks; begin += span) {
    uint8_t const* const chunk = chunks + int64_t(begin / kKPerTile) * chunk_bytes(kBits);
    int const first_block = begin / p.block;
    for (int g = 0; g < kGroups; ++g) {
      __m256i lanes[kRows][kRowVectors];
      for (int i = 0; i < kRowBlocks; ++i) {
        __m256i low[kRows], high[kRows];
        for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm256_setzero_si256();
        uint8_t const* bytes = chunk + i * kBlockBytes + begin % kKPerTile / kColumns * kUnitBytes + g * 64;
        int64_t at = m * p.x_stride + int64_t(begin) / kColumns * 64;
        if constexpr (kBits == 4) {
          __m256i codes_low = _mm256_setzero_si256(), codes_high = codes_low;
          for (int column = 0; column < span; column += kColumns, bytes += kUnitBytes, at += 64) {
            _mm_prefetch(reinterpret_cast<char const*>(bytes) + chunk_bytes(kBits), _MM_HINT_T0);
            for (int half = 0; half < 2; ++half) {
              __m256i const words = _mm256_xor_si256(load(bytes + 32 * half), flip);
              __m256i const a = _mm256_and_si256(words, nibbles);
              __m256i const b = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibbles);
              if (p.zeros) codes_low = _mm256_add_epi8(codes_low, a), codes_high = _mm256_add_epi8(codes_high, b);
              for (int r = 0; r < kRows; ++r) {
                // 15 * 128 * 2 a product; four of them are added: 15360 fits into 16 bits.
                __m256i const x = load(p.codes + at + r * p.x_stride + 32 * half);
                low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(a, x));
                high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(b, x));
              }
            }
          }
          __m256i const pairs_low = _mm256_maddubs_epi16(codes_low, one_bytes);
          __m256i const pairs_high = _mm256_maddubs_epi16(codes_high, one_bytes);
          for (int r = 0; r < kRows; ++r) {
            __m256i a = _mm256_madd_epi16(low[r], ones), b = _mm256_madd_epi16(high[r], ones);
            if (p.zeros) {
              int32_t const* const zeros = p.zeros + int64_t(m + r) * p.blocks + first_block;
              __m256i zero = _mm256_set1_epi16(short(-zeros[0]));
              if (span > run && first_block + 1 < p.blocks) {
                zero = _mm256_blend_epi32(zero, _mm256_set1_epi16(short(-zeros[1])), 0xcc);
              }
              a = _mm256_add_epi32(a, _mm256_madd_epi16(pairs_low, zero));
              b = _mm256_add_epi32(b, _mm256_madd_epi16(pairs_high, zero));
            }
            lanes[r][2 * i] = a, lanes[r][2 * i + 1] = b;
          }
        } else {
          // Fragments of the first 32 columns of each 64, and of the others: in lanes j = 0 and 1, and 2 and 3.
          __m256i sums[kRows][2][2] = {};
          for (int column = 0; column < span; column += kColumns, bytes += kUnitBytes, at += 64) {
            _mm_prefetch(reinterpret_cast<char const*>(bytes) + chunk_bytes(kBits), _MM_HINT_T0);
            int const f = column / kColumns % 2;
            for (int half = 0; half < 2; ++half) {
              __m256i const words = load(bytes + 32 * half);
              __m256i const a = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(words));
              __m256i const b = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(words, 1));
              for (int r = 0; r < kRows; ++r) {
                int16_t const* const x = p.centred + at + r * p.x_stride + 32 * half;
                // Pairs of bytes of the words of row g (j = 0), row g + 8, row g (j = 1), row g + 8.
                sums[r][f][0] = _mm256_add_epi32(sums[r][f][0], _mm256_madd_epi16(a, load(x)));
                sums[r][f][1] = _mm256_add_epi32(sums[r][f][1], _mm256_madd_epi16(b, load(x + 16)));
              }
            }
          }
          for (int r = 0; r < kRows; ++r) {
            // Eight lanes a fragment, two neighbours a word; words of a row are two apart.
            __m256i const first = _mm256_add_epi32(sums[r][0][0], sums[r][0][1]);
            __m256i const second = _mm256_add_epi32(sums[r][1][0], sums[r][1][1]);
            lanes[r][2 * i] = select<Ints, 0x44>(first, second);
            lanes[r][2 * i + 1] = select<Ints, 0xee>(first, second);
          }
        }
      }
      for (int r = 0; r < kRows; ++r) {
        __m256i sums[2];
        reduce<Ints>(lanes[r], sums);
        if (run >= kLaneColumns) sums[0] = _mm256_add_epi32(sums[0], sums[1]);
        for (int part = 0; part < span / run; ++part) {
          int const end = begin + (part + 1) * run, block = (end - 1) / p.block;
          if (block >= p.blocks) break;
          auto* const kept = reinterpret_cast<__m256i*>(pending[r] + 8 * g);
          __m256i const sum = _mm256_add_epi32(_mm256_load_si256(kept), sums[part]);
          bool const last = end % p.block == 0 || end == end_k;
          _mm256_store_si256(kept, last ? _mm256_setzero_si256() : sum);
          int64_t* const large = wide[r] + 8 * g;
          if (overflows && (last || end % kColumnsOf32Bits == 0)) {
            alignas(32) int32_t values[8];
            _mm256_store_si256(reinterpret_cast<__m256i*>(values), sum);
            _mm256_store_si256(kept, _mm256_setzero_si256());
            for (int j = 0; j < 8; ++j) large[j] += values[j];
          }
          if (!last) continue;
          int64_t const vector = block / p.group_blocks * n_pad + panel * kRowsPerSlab + 8 * g;
          int64_t const x_sum = p.sums[int64_t(m + r) * p.blocks + block];
          __m256i zero = _mm256_set1_epi32(kBits == 4 ? 8 : 0);  // what the codes above are above centred ones
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
            integers = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_mullo_epi32(zero, _mm256_set1_epi32(int(x_sum)))));
          }
          totals.add(p, m, r, block, panel, g, integers, true);
        }
      }
    }
  }
  totals.store(p, panel, m);
}

template <int kRows>
void multiply_rows(CpuProduct const& p, int panel, int m) {
  int const bits = p.weight.bits;
  if (!p.x) return bits == 4 ? multiply_integers<4, kRows>(p, panel, m) : multiply_integers<8, kRows>(p, panel, m);
  if (p.weight.e4m3) return multiply_floats<E4m3, kRows>(p, panel, m);
  if (p.codebook) return multiply_floats<Codebook4, kRows>(p, panel, m);
  return bits == 4 ? multiply_floats<Int4, kRows>(p, panel, m) : multiply_floats<Int8, kRows>(p, panel, m);
}

void multiply(CpuProduct const& p, int panel) {
  KeepDenormals const keep;
  int m = 0;
  for (; m + 4 <= p.m; m += 4) multiply_rows<4>(p, panel, m);
  for (; m < p.m; ++m) multiply_rows<1>(p, panel, m);
}

// Of a fragment's 64 bytes: lane t's sixteen, words, bytes.
int column4(int place) { return place / 4 % 4 * 16 + place / 16 * 2 + place % 4 / 2 + place % 2 * 8; }
int column8(int place) { return place / 4 % 4 / 2 * 16 + place / 16 * 2 + place % 4 / 2 + place % 2 * 8; }

CpuKernels::IntegerOrder integer_order(int bits) {
  return bits == 4 ? CpuKernels::IntegerOrder{64, 64, false, column4} : CpuKernels::IntegerOrder{32, 64, true, column8};
}

}  // namespace

CpuKernels const kAvx2Kernels = {"avx2", integer_order, multiply};

}  // namespace cutlass_ops
