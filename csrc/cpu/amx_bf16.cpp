// Products of rows of bf16 with a weight's values, rounded to bf16, by AMX's tiles: the fp32 sums
// of a tile are all of K's, in the order of K. A tile of values has 16 rows of the weight and 32
// columns, as they are dequantised; a tile of x has 16 rows in the words that the instruction
// expects (HalvesOrder::kPairs).
#include "cpu/amx.h"
#include "cpu/avx512_dequantize.h"

namespace cutlass_ops {
namespace {

constexpr int kColumns = kTileBytes / 2;        // of a tile
constexpr int kTileOfX = kColumns * kTileRows;  // elements
// Columns whose values, of the row blocks that are multiplied together, stay in the L1 cache.
constexpr int kChunk = 512;
constexpr int kBlocksTogether = 2, kXTogether = 2;  // whose sums are in tiles together

// A table of bf16. Numbers below the least normal one are 0, as products of tiles take them.
struct TableOfNormals {
  __m512i of[1];

  [[gnu::always_inline]] TableOfNormals(__m512 first, __m512 second)
      : of{__m512i(_mm512_cvtne2ps_pbh(second, first))} {}
};

// The values of a panel's rows in a chunk of columns. Columns beyond the last, which x has as
// zeros, keep those of an earlier chunk, or 0.
struct Values {
  // Rows apart by a power of two would share a few sets of the cache.
  static constexpr int kRow = kChunk + kColumns;
  alignas(64) uint16_t of_row[kRowsPerPanel][kRow];
};

// The sums of a tile of x.
struct alignas(64) Sums {
  float of_row[kRowsPerPanel][kTileRows];
};

// Adds the products of the rows from `row` on, kBlocksTogether blocks of them, and kOfX tiles of x
// to their sums. The chunk has `steps` tiles of columns.
template <int kOfX>
void multiply_blocks(Values const& values, int row, uint16_t const* x, int64_t next_x, int steps,
                     bool begins, Sums* sums) {
  auto const for_each_product = [&](auto const& use) {
    unrolled<kOfX>([&](auto t) { unrolled<kBlocksTogether>([&](auto i) { use(t, i); }); });
  };
  auto const sums_of = [&](int t, int i) { return sums[t].of_row[row + i * kTileRows]; };
  for_each_product([&](auto t, auto i) {
    constexpr int kSums = decltype(t)::value * kBlocksTogether + decltype(i)::value;
    if (begins) {
      zero_tile<kSums>();
    } else {
      load_tile<kSums>(sums_of(t, i), kTileBytes);
    }
  });
  for (int step = 0; step < steps; ++step, x += kTileOfX) {
    unrolled<kBlocksTogether>([&](auto i) {
      load_tile<4 + decltype(i)::value>(values.of_row[row + i * kTileRows] + step * kColumns,
                                        sizeof values.of_row[0]);
    });
    unrolled<kOfX>([&](auto t) { load_tile<6 + decltype(t)::value>(x + t * next_x, kTileBytes); });
    for_each_product([&](auto t, auto i) {
      constexpr int kT = decltype(t)::value, kI = decltype(i)::value;
      multiply_pairs<kT * kBlocksTogether + kI, 4 + kI, 6 + kT>();
    });
  }
  for_each_product([&](auto t, auto i) {
    store_tile<decltype(t)::value * kBlocksTogether + decltype(i)::value>(sums_of(t, i),
                                                                          kTileBytes);
  });
}

// The sums of a tile of x, which has `rows` rows from m on, to the results.
void store_sums(CpuProduct const& p, int panel, int m, int rows, Sums const& sums) {
  int const columns = std::min(kRowsPerPanel, p.weight.n - panel * kRowsPerPanel);
  for (int row = 0; row < rows; row += 8) {
    for (int column = 0; column < columns; column += 8) {
      __m256 v[8];
      for (int i = 0; i < 8; ++i) v[i] = _mm256_load_ps(sums.of_row[column + i] + row);
      transpose(v);
      for (int i = 0; i < std::min(8, rows - row); ++i)
        store_vector(p, m + row + i, panel * kRowsPerPanel + column, v[i]);
    }
  }
}

template <class Span>
void multiply_panel(CpuProduct const& p, int panel, int first, int rows) {
  int const tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t const next_x = p.x_stride * kTileRows;
  std::unique_ptr<Values> const values(p.weight.k % kColumns ? new Values() : new Values);
  std::unique_ptr<Sums[]> const sums(new Sums[size_t(tiles)]);
  Tiles const loaded{TileShapes(kTileRows)};
  Span spans(p, panel);
  Runs runs(p, panel);
  bool more = runs.next();
  for (int begin = 0; begin < p.weight.k; begin += kChunk) {
    for (; more && runs.begin < begin + kChunk; more = runs.next())
      spans.store(runs, kRowsPerPanel, values->of_row[0] + (runs.begin - begin),
                  sizeof values->of_row[0]);
    int const steps = (std::min(kChunk, p.weight.k - begin) + kColumns - 1) / kColumns;
    uint16_t const* const x = p.halves + first * p.x_stride + int64_t(begin) * kTileRows;
    for (int row = 0; row < kRowsPerPanel; row += kBlocksTogether * kTileRows) {
      for (int tile = 0; tile < tiles; tile += kXTogether) {
        auto const multiply = tile + 1 < tiles ? multiply_blocks<2> : multiply_blocks<1>;
        multiply(*values, row, x + tile * next_x, next_x, steps, begin == 0, sums.get() + tile);
      }
    }
  }
  for (int tile = 0; tile < tiles; ++tile) {
    int const row = tile * kTileRows;
    store_sums(p, panel, first + row, std::min(kTileRows, rows - row), sums[size_t(tile)]);
  }
}

}  // namespace

void multiply_amx_bfloat16(CpuProduct const& p, int panel, int first, int rows) {
  KeepDenormals const keep;
  visit_nibbles_or_bytes(p.weight.format, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::kBits == Nibbles::kBits) {
      multiply_panel<SpanNibbles<DataType::kBFloat16, TableOfNormals>>(p, panel, first, rows);
    } else {
      multiply_panel<SpanValues<F, DataType::kBFloat16>>(p, panel, first, rows);
    }
  });
}

}  // namespace cutlass_ops
