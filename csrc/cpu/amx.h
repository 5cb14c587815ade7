// AMX's tiles: their instructions and shapes.
#pragma once

#include <cstdint>

namespace cutlass_ops {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64;

// Instructions of tiles. Compilers' intrinsics take numbers of tiles as text alone, and GCC's do
// not say that they read memory.
inline void load_shapes(void const* shapes) {
  asm volatile("ldtilecfg (%0)" : : "r"(shapes) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease"); }
template <int kTile>
void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
void load_tile(void const* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
}
// kSums += rows of kRows times columns of kColumns: of signed bytes, four of which are a word of a
// row of kColumns, and of bf16, two of which are.
template <int kSums, int kRows, int kColumns>
void multiply_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
}
template <int kSums, int kRows, int kColumns>
void multiply_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
}

// The shapes of tiles as LDTILECFG loads them (Intel 64 and IA-32 Architectures Software
// Developer's Manual). Tiles 0 to 3 have `rows_of_first` rows, the others kTileRows.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  explicit TileShapes(int rows_of_first) {
    for (int tile = 0; tile < 8; ++tile)
      bytes[tile] = kTileBytes, rows[tile] = uint8_t(tile < 4 ? rows_of_first : kTileRows);
  }
};
static_assert(sizeof(TileShapes) == 64);

// The shapes of this thread, for a scope.
class Tiles {
 public:
  explicit Tiles(TileShapes const& shapes) { load_shapes(&shapes); }
  ~Tiles() { release_tiles(); }
  Tiles(Tiles const&) = delete;
  Tiles& operator=(Tiles const&) = delete;
};

}  // namespace
}  // namespace cutlass_ops
