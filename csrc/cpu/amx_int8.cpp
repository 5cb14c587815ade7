// Products of many rows of int8 x by AMX's tiles. A tile of codes is 16 words of avx512_tiles.h as
// they are: four columns in each word of a row, 16 rows of the weight. A tile of x has at most 16
// rows. Products go through memory, where AVX-512 adds them to the results while the tiles
// multiply the next row block.
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/amx.h"
#include "cpu/avx512_tiles.h"

namespace cutlass_ops {
namespace {

static_assert(kRowsPerBlock == kTileRows && kKPerTile == 2 * kTileBytes);

// Tiles 0 and 1 are products, 2 and 3 x, 4 to 7 codes.

// The sums of a tile of x and a row block.
struct alignas(64) Products {
  int32_t sums[kTileRows][kRowsPerBlock];
};

// Multiplies the loaded x by the codes of row block kBlock: by one tile of columns or two.
// Neighbouring blocks have tiles apart.
template <int kBlock>
void multiply_block(__m512i const* words, bool two, Products& products) {
  constexpr int kSums = kBlock % 2, kCodes = 4 + 2 * kSums;
  zero_tile<kSums>();
  load_tile<kCodes>(words, kTileBytes);
  multiply_bytes<kSums, 2, kCodes>();
  if (two) {
    load_tile<kCodes + 1>(words + kTileRows, kTileBytes);
    multiply_bytes<kSums, 3, kCodes + 1>();
  }
  store_tile<kSums>(products.sums, kTileBytes);
}

// Rows of a tile of x: from `begin` of the chunk on, and those that no tile before has.
struct XRows {
  int begin, first_new, end;
};

// Adds the products with a row block to the results.
template <class Tile>
void add_products(CpuProduct const& p, Tile const& tile, TileMemory& memory, Span const& span,
                  int block, Products const& products, int first, XRows const& x) {
  for_parts<kTileRows>(x.end - x.first_new, [&](int of_new, auto count) {
    constexpr int kRows = decltype(count)::value;
    int const row = x.first_new + of_new;
    auto const* const from = products.sums + (row - x.begin);
    add_run<kRows, 1>(p, tile, memory, span, 0, block, first + row, row,
                      [&](WideSums<kRows, 1>& sums) [[gnu::always_inline]] {
                        unrolled<kRows>([&](auto r) {
                          sums[r][0] = _mm512_add_epi32(sums[r][0], _mm512_load_si512(from[r]));
                        });
                      });
  });
}

template <int kBits>
void multiply_panel(CpuProduct const& p, int panel, int first, int rows) {
  int const tiles = (rows + kTileRows - 1) / kTileRows, x_rows = (rows + tiles - 1) / tiles;
  bool const two = p.run() > kTileBytes;
  TileShapes const shapes(x_rows);
  Tiles const loaded(shapes);
  Products products[2];  // of a block, and of the one before
  for_each_wide_tile<kBits, true>(
      p, panel, first, rows,
      [&](auto const& tile, TileMemory& memory, Span const& span, FarPrefetch& prefetch) {
        prefetch.lines(span.columns / 4 * tile.kLines);
        XRows before = {};
        auto const add = [&](int block, XRows const& x) {
          add_products(p, tile, memory, span, block, products[block % 2], first, x);
        };
        for (int index = 0; index < tiles; ++index) {
          int const begin = std::min(index * x_rows, rows - x_rows);
          XRows const x_of = {begin, index * x_rows, begin + x_rows};
          int8_t const* const x = p.codes + (first + begin) * p.x_stride + span.begin;
          load_tile<2>(x, p.x_stride);
          if (two) load_tile<3>(x + kTileBytes, p.x_stride);
          unrolled<kRowBlocks>([&](auto block) {
            constexpr int kBlock = decltype(block)::value;
            multiply_block<kBlock>(tile.words[kBlock], two, products[kBlock % 2]);
            if (kBlock > 0) {
              add(kBlock - 1, x_of);
            } else if (index > 0) {
              add(kRowBlocks - 1, before);
            }
          });
          before = x_of;
        }
        add(kRowBlocks - 1, before);
      });
}

}  // namespace

bool may_use_amx() {
  // The kernel gives tiles to processes that ask for them (Linux, x86/xstate.rst).
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void multiply_amx(CpuProduct const& p, int panel, int first, int rows) {
  with_nibbles_or_bytes(info(p.weight.format).bits, [&](auto width) {
    multiply_panel<decltype(width)::kBits>(p, panel, first, rows);
  });
}

}  // namespace cutlass_ops
