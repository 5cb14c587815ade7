// Products of few rows of bf16 with codes of 4 bits, by AVX-512's dot products of bf16. The kernel
// multiplies x by the codes' values, which are exact in bf16 (values of a code book are rounded to
// it), and sums of 64 columns, or of a shorter group, by the scales in fp32. The order of the sums
// is not the reference's.
//
// The 64 bytes of a lane group hold rows g and g + 8 of 64 columns (layout.h). Words of 16 bits are
// indices of a table: shifted by 0 and 4 bits for the columns of even bytes, by 8 and 12 for the
// columns of odd bytes. x is stored in that order.
#include "cpu/avx512_dequantize.h"

namespace cutlass_ops {
namespace {

constexpr int kUnit = 64;         // columns of a vector of codes
constexpr int kChunkUnits = 16;   // whose x, and numbers by rows, fit into the L1 cache
constexpr int kRowsTogether = 6;  // whose sums, of two rows of the weight, fit into registers
constexpr int kPairs = kRowsPerPanel / 2;  // rows g and g + 8 of a row block

// 16 vectors -> the sum of each.
[[gnu::always_inline]] inline __m512 sums_of(__m512 const (&v)[16]) {
  __m512 pairs[8], fours[4], halves[2];
  unrolled<8>([&](auto i) {
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  });
  unrolled<4>([&](auto i) {
    __m512d const a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  });
  auto const quarters = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  unrolled<2>([&](auto i) { halves[i] = quarters(fours[2 * i], fours[2 * i + 1]); });
  return quarters(halves[0], halves[1]);
}

// Numbers of a panel's rows, by which sums of a unit are multiplied: a lane's columns are of the
// group of its lane % 4, and neighbouring lanes' where there are fewer groups.
struct UnitFactors {
  alignas(64) float of_row[kRowsPerPanel][4];

  // From those of its groups' rows, 16 from `row` on.
  template <int kOfUnit>
  [[gnu::always_inline]] void set(int row, __m512 const (&groups)[kOfUnit]) {
    constexpr __mmask16 kLastTwo = 0xcccc;
    alignas(64) static constexpr int32_t kRows[16] = {0, 0, 0, 0, 1, 1, 1, 1,
                                                      2, 2, 2, 2, 3, 3, 3, 3};
    alignas(64) static constexpr int32_t kHalves[16] = {0, 0, 16, 16, 0, 0, 16, 16,
                                                        0, 0, 16, 16, 0, 0, 16, 16};
    alignas(64) static constexpr int32_t kInTurn[16] = {0, 16, 0, 16, 0, 16, 0, 16,
                                                        0, 16, 0, 16, 0, 16, 0, 16};
    __m512i const rows = _mm512_load_si512(kRows), halves = _mm512_load_si512(kHalves),
                  in_turn = _mm512_load_si512(kInTurn);
    unrolled<4>([&](auto q) {
      __m512i const four = _mm512_add_epi32(rows, _mm512_set1_epi32(4 * q));
      __m512 to;
      if constexpr (kOfUnit == 1) {
        to = _mm512_permutexvar_ps(four, groups[0]);
      } else if constexpr (kOfUnit == 2) {
        to = _mm512_permutex2var_ps(groups[0], _mm512_add_epi32(four, halves), groups[1]);
      } else {
        __m512i const index = _mm512_add_epi32(four, in_turn);
        to = _mm512_mask_blend_ps(kLastTwo, _mm512_permutex2var_ps(groups[0], index, groups[1]),
                                  _mm512_permutex2var_ps(groups[2], index, groups[3]));
      }
      _mm512_store_ps(of_row[row + 4 * q], to);
    });
  }
  [[gnu::always_inline]] __m512 operator[](int row) const {
    return _mm512_broadcast_f32x4(_mm_load_ps(of_row[row]));
  }
};

// The groups of a chunk. A group has a number of units, or a unit kOfUnit groups.
template <int kOfUnit>
class ChunkGroups {
  BlockVectors vectors_[kChunkUnits * kOfUnit];
  int first_, count_;
  int64_t vector_;  // the first group's
  bool continues_;  // whether the first group began in another chunk

 public:
  UnitFactors scales[kChunkUnits];

  void load(CpuProduct const& p, int panel, int begin, int end) {
    PackedWeight const& w = p.weight;
    int const group_units = kOfUnit > 1 ? 1 : p.block / kUnit, first_unit = begin / group_units;
    first_ = first_unit * kOfUnit, continues_ = first_unit * group_units < begin;
    // Groups beyond the last column have no vectors.
    count_ = std::min(((end - 1) / group_units + 1 - first_unit) * kOfUnit, p.blocks - first_);
    vector_ = first_ * p.vector_stride + panel * kRowsPerPanel;
    for (int i = 0; i < count_; ++i) {
      int64_t const vector = vector_ + i * p.vector_stride;
      if (w.zeros || w.offsets) vectors_[i] = BlockVectors(w, vector);
      // The scales of the next chunk of columns, or of the next panel's first chunk.
      int const next = first_ + i + count_;
      prefetch_vectors(w, next < p.blocks ? vector + count_ * p.vector_stride
                                          : i * p.vector_stride + (panel + 1) * kRowsPerPanel);
    }
    with_float_type(w.scale_type, [&](auto type) {
      for (int unit = begin; unit < end; ++unit) {
        int const group = (unit / group_units - first_unit) * kOfUnit;
        unrolled<kRowsPerPanel / 16>([&](auto part) {
          __m512 of_groups[kOfUnit];
          unrolled<kOfUnit>([&](auto i) {
            int64_t const vector = vector_ + std::min(group + i, count_ - 1) * p.vector_stride;
            of_groups[i] = Sixteen::load(w.scales, type, vector + 16 * part).v;
          });
          scales[unit - begin].set(16 * part, of_groups);
        });
      }
    });
  }

  // Adds what zero points and offsets multiply: sums of x, of groups that begin in the chunk.
  template <int kRows>
  void add_shifts(CpuProduct const& p, int m, float (&total)[kRows][kRowsPerPanel]) const {
    PackedWeight const& w = p.weight;
    if (!w.zeros && !w.offsets) return;
    for (int row = 0; row < kRowsPerPanel; row += 16) {
      __m512 sums[kRows];
      unrolled<kRows>([&](auto r) { sums[r] = _mm512_load_ps(total[r] + row); });
      for (int i = continues_; i < count_; ++i) {
        __m512 shift = w.offsets ? _mm512_load_ps(vectors_[i].offsets + row) : _mm512_setzero_ps();
        if (w.zeros) {
          __m128i const zeros = _mm_loadu_si128(
              reinterpret_cast<__m128i const*>(w.zeros + vector_ + i * p.vector_stride + row));
          shift = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(zeros)),
                                   _mm512_load_ps(vectors_[i].scales + row), shift);
        }
        float const* const of_x = p.offset_x + int64_t(m) * p.blocks + first_ + i;
        unrolled<kRows>([&](auto r) {
          sums[r] = _mm512_fmadd_ps(shift, _mm512_set1_ps(of_x[r * p.blocks]), sums[r]);
        });
      }
      unrolled<kRows>([&](auto r) { _mm512_store_ps(total[r] + row, sums[r]); });
    }
  }
};

template <int kOfUnit, int kRows>
void multiply_rows_of_bfloat16(CpuProduct const& p, int panel, int m) {
  constexpr int kBits = Nibbles::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks,
                kUnitsOfTile = kKPerTile / kUnit;
  // Lane groups whose sums are in registers together.
  constexpr int kTogether = kRows == 1 ? 8 : kRows == 2 ? 4 : kRows <= 4 ? 2 : 1;
  uint8_t const* const tiles = codes_of_panel<kBits>(p, panel);
  uint16_t const* const x = p.halves + m * p.x_stride;
  // In both halves: bits above an index's four are those of another code.
  __m512i const values = _mm512_broadcast_i64x4(__m256i(_mm512_cvtneps_pbh(stored_values(p))));
  __m512 const none = _mm512_setzero_ps();
  int const units = (p.weight.k + kUnit - 1) / kUnit;
  Prefetch prefetch(tiles, kChunkUnits / kUnitsOfTile * k_tile_bytes(kBits));  // the next chunk
  ChunkGroups<kOfUnit> groups;
  alignas(64) float total[kRows][kRowsPerPanel] = {};
  for (int begin = 0; begin < units; begin += kChunkUnits) {
    int const end = std::min(begin + kChunkUnits, units);
    groups.load(p, panel, begin, end);
    groups.add_shifts(p, m, total);
    for (int part = 0; part < kPairs; part += kTogether) {
      int const i = part / kGroups, first = part % kGroups;
      __m512 of_rows[16];
      unrolled<16>([&](auto v) { of_rows[v] = _mm512_setzero_ps(); });
      for (int unit = begin; unit < end; ++unit) {
        uint8_t const* const bytes = tiles + unit / kUnitsOfTile * k_tile_bytes(kBits) +
                                     i * kBlockBytes + unit % kUnitsOfTile * kUnitBytes;
        uint16_t const* const of_unit = x + int64_t(unit) * kUnit;
        __m512bh of_x[kRows][2];
        unrolled<kRows>([&](auto r) {
          unrolled<2>([&](auto odd) {
            of_x[r][odd] = __m512bh(_mm512_loadu_si512(of_unit + r * p.x_stride + 32 * odd));
          });
        });
        unrolled<kTogether>([&](auto j) {
          int const g = first + j;
          prefetch.line();
          __m512i const codes = _mm512_loadu_si512(bytes + g * 64);
          unrolled<2>([&](auto h) {
            auto const look_up = [&](int bit) {
              return __m512bh(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, bit), values));
            };
            __m512bh const even = look_up(4 * h), odd = look_up(8 + 4 * h);
            int const row = 8 * g + 2 * i + h;
            __m512 const scale = groups.scales[unit - begin][row];
            unrolled<kRows>([&](auto r) {
              __m512& sum = of_rows[2 * (kTogether * r + j) + h];
              __m512 const products =
                  _mm512_dpbf16_ps(_mm512_dpbf16_ps(none, even, of_x[r][0]), odd, of_x[r][1]);
              sum = _mm512_fmadd_ps(products, scale, sum);
            });
          });
        });
      }
      alignas(64) float sums[16];
      _mm512_store_ps(sums, sums_of(of_rows));
      for (int v = 0; v < 2 * kTogether * kRows; ++v) {
        int const r = v / (2 * kTogether), g = first + v / 2 % kTogether;
        total[r][8 * g + 2 * i + v % 2] += sums[v];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) store_group_order(p, panel, m + r, total[r]);
}

}  // namespace

int bfloat16_column(int place) {
  return fragment_column<Nibbles::kBits>(place % (kUnit / 2) * 2 + place / (kUnit / 2));
}

void multiply_bfloat16(CpuProduct const& p, int panel, int first, int rows) {
  KeepDenormals const keep;
  for_parts<kRowsTogether>(rows, [&](int row, auto count) {
    constexpr int kRows = decltype(count)::value;
    (p.block == 16   ? multiply_rows_of_bfloat16<4, kRows>
     : p.block == 32 ? multiply_rows_of_bfloat16<2, kRows>
                     : multiply_rows_of_bfloat16<1, kRows>)(p, panel, first + row);
  });
}

}  // namespace cutlass_ops
