// Products of few rows of bf16 with codes of 4 bits, by AVX-512's dot products of bf16. Weights are
// rounded once to bf16, and sums have another order than the reference's.
//
// A row's 16 values in a group are computed once; its codes look them up. The 64 bytes of a lane
// group hold rows g and g + 8 of 64 columns (layout.h): words of 16 bits, moved by 0 and 4 bits, are
// indices for the columns of even bytes, by 8 and 12 for those of odd bytes. x is stored in that
// order.
#include "cpu/avx512_dequantize.h"

namespace cutlass_ops {
namespace {

constexpr int kUnit = 64;         // columns of a vector of codes
constexpr int kChunkUnits = 8;    // whose x, and vectors of groups, fit into the L1 cache
constexpr int kRowsTogether = 8;  // whose sums, of two rows of the weight, fit into registers
constexpr int kPairs = kRowsPerPanel / 2;  // rows g and g + 8 of a row block

// The bits of two rows' values by code, in bf16. kTables groups share 64 columns: a code's table is
// the higher bits of its index.
template <int kTables>
struct Tables {
  __m512i low, high;

  template <class Of>
  [[gnu::always_inline]] explicit Tables(Of const& of) {
    auto const rounded = [&](int table) {
      return __m512i(_mm512_cvtne2ps_pbh(of(table + 1), of(table)));
    };
    if constexpr (kTables == 1) {
      low = high = _mm512_broadcast_i64x4(__m256i(_mm512_cvtneps_pbh(of(0))));
    } else {
      low = high = rounded(0);
      if constexpr (kTables == 4) high = rounded(2);
    }
  }

  // Of codes in the low bits of words; `tables`: those of the words, in the bits above.
  [[gnu::always_inline]] __m512bh find(__m512i codes, __m512i tables) const {
    if constexpr (kTables == 1) {
      return __m512bh(_mm512_permutexvar_epi16(codes, low));  // both halves are the same
    } else {
      constexpr int kAndOr = 0xea;
      __m512i const index = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(15), tables, kAndOr);
      return __m512bh(kTables == 2 ? _mm512_permutexvar_epi16(index, low)
                                   : _mm512_permutex2var_epi16(low, index, high));
    }
  }
};

// The tables of words of codes: those of columns 16 * j .. 16 * j + 15 are neighbours.
template <int kTables>
__m512i tables_of_words() {
  alignas(64) int16_t tables[32];
  for (int word = 0; word < 32; ++word)
    tables[word] = int16_t(word / 2 % 4 * kTables / 4 << Nibbles::kBits);
  return _mm512_load_si512(tables);
}

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

// The vectors of the groups of a chunk. A group has a number of units, or a unit of groups.
template <int kTables>
struct ChunkVectors {
  BlockVectors of_group[kChunkUnits * kTables];
  int8_t const* zeros[kChunkUnits * kTables];

  void load(CpuProduct const& p, int panel, int first_group, int groups) {
    PackedWeight const& w = p.weight;
    for (int i = 0; i < groups; ++i) {
      int64_t const vector = (first_group + i) * p.vector_stride + panel * kRowsPerPanel;
      of_group[i] = BlockVectors(w, vector);
      zeros[i] = w.zeros ? w.zeros + vector : nullptr;
      // Those of the next chunk, or of the next panel.
      int const next = first_group + i + groups;
      prefetch_vectors(w, next < p.blocks ? vector + groups * p.vector_stride
                                          : i * p.vector_stride + (panel + 1) * kRowsPerPanel);
    }
  }
};

template <int kTables, int kRows>
void multiply_rounded(CpuProduct const& p, int panel, int m) {
  constexpr int kBits = Nibbles::kBits, kBlockBytes = k_tile_bytes(kBits) / kRowBlocks,
                kUnitsOfTile = kKPerTile / kUnit, kSets = kRows <= 4 ? 2 : 1;
  PackedWeight const& w = p.weight;
  uint8_t const* const tiles = codes_of_panel<kBits>(p, panel);
  uint16_t const* const x = p.halves + m * p.x_stride;
  __m512 const stored = stored_values(p);
  __m512i const tables = tables_of_words<kTables>();
  int const units = (w.k + kUnit - 1) / kUnit;
  int const group_units = kTables > 1 ? 1 : p.block / kUnit;  // a scale block is a group
  Prefetch prefetch(tiles, kChunkUnits / kUnitsOfTile * k_tile_bytes(kBits));  // the next chunk
  ChunkVectors<kTables> vectors;
  alignas(64) float sums[kPairs][16] = {};  // of row 2 * r + h, h being that of the pair
  for (int begin = 0; begin < units; begin += kChunkUnits) {
    int const end = std::min(begin + kChunkUnits, units), first_group = begin / group_units;
    // Groups beyond the last column have no vectors.
    int const groups = (end - 1) / group_units + 1 - first_group;
    vectors.load(p, panel, first_group * kTables,
                 std::min(groups * kTables, p.blocks - first_group * kTables));
    for (int pair = 0; pair < kPairs; ++pair) {
      int const g = pair % kGroups, i = pair / kGroups, at = 8 * g + 2 * i;
      // Those of even and of odd bytes apart where that leaves enough registers: the products of
      // one sum wait for one another.
      __m512 of_rows[kSets][16];
      unrolled<kSets * 16>([&](auto v) { of_rows[v / 16][v % 16] = _mm512_setzero_ps(); });
      for (int unit = begin; unit < end;) {
        int const group = unit / group_units, index = (group - first_group) * kTables;
        auto const tables_of = [&](int h) {
          return Tables<kTables>([&](int table) {
            int const in = std::min(index + table, p.blocks - 1 - first_group * kTables);
            return values_of_row(w, stored, vectors.of_group[in], vectors.zeros[in], at + h);
          });
        };
        Tables<kTables> const low = tables_of(0), high = tables_of(1);
        for (int last = std::min((group + 1) * group_units, end); unit < last; ++unit) {
          uint8_t const* const bytes = tiles + unit / kUnitsOfTile * k_tile_bytes(kBits) +
                                       i * kBlockBytes + unit % kUnitsOfTile * kUnitBytes + g * 64;
          prefetch.line();
          __m512i const codes = _mm512_loadu_si512(bytes);
          uint16_t const* const of_unit = x + int64_t(unit) * kUnit;
          unrolled<2>([&](auto odd) {
            __m512bh const a = low.find(_mm512_srli_epi16(codes, 8 * odd), tables),
                           b = high.find(_mm512_srli_epi16(codes, 8 * odd + 4), tables);
            unrolled<kRows>([&](auto r) {
              __m512bh const factors =
                  __m512bh(_mm512_loadu_si512(of_unit + r * p.x_stride + 32 * odd));
              __m512* const pair_sums = of_rows[odd % kSets] + 2 * r;
              pair_sums[0] = _mm512_dpbf16_ps(pair_sums[0], a, factors);
              pair_sums[1] = _mm512_dpbf16_ps(pair_sums[1], b, factors);
            });
          });
        }
      }
      if constexpr (kSets == 2)
        unrolled<16>([&](auto v) { of_rows[0][v] = _mm512_add_ps(of_rows[0][v], of_rows[1][v]); });
      _mm512_store_ps(sums[pair], _mm512_add_ps(_mm512_load_ps(sums[pair]), sums_of(of_rows[0])));
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float total[kRowsPerPanel];
    for (int pair = 0; pair < kPairs; ++pair) {
      for (int h = 0; h < 2; ++h)
        total[8 * (pair % kGroups) + 2 * (pair / kGroups) + h] = sums[pair][2 * r + h];
    }
    store_panel(p, panel, m + r, total);
  }
}

template <int kTables>
void multiply_parts(CpuProduct const& p, int panel, int first, int rows) {
  for_parts<kRowsTogether>(rows, [&](int row, auto count) {
    multiply_rounded<kTables, decltype(count)::value>(p, panel, first + row);
  });
}

}  // namespace

int bfloat16_column(int place) {
  return fragment_column<Nibbles::kBits>(place % (kUnit / 2) * 2 + place / (kUnit / 2));
}

void multiply_bfloat16(CpuProduct const& p, int panel, int first, int rows) {
  KeepDenormals const keep;
  (p.block == 16   ? multiply_parts<4>
   : p.block == 32 ? multiply_parts<2>
                   : multiply_parts<1>)(p, panel, first, rows);
}

}  // namespace cutlass_ops
