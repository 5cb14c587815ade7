// What the two portable GEMM kernels share: the block tile of 128 output features x kTokens, its eight warps, the order of tiles over
// the grid, and the way out through shared memory.
//
//              tokens ->                 warps of a tile of 64 or 128 tokens (4 x 2), each 32 rows x kTokens / 2
//            +---------+---------+
//   rows   0 | warp 0  | warp 4  |       tiles of 16 and 32 tokens have 4 x 1 warps twice: the second four take the upper 64 columns
//         32 | warp 1  | warp 5  |       of every 128, and their sums are added at the end, always in the same order
//         64 | warp 2  | warp 6  |
//         96 | warp 3  | warp 7  |
//            +---------+---------+
#pragma once

#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "device/mma.cuh"

namespace cutlass_ops {

template <int kTokens_>
struct BlockTile {
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = 128;
  static constexpr int kSlabs = kRows / kRowsPerSlab;
  static constexpr int kThreads = 256;
  static constexpr int kWarpsN = 4;
  static constexpr int kWarpsM = kTokens >= 64 ? 2 : 1;
  static constexpr int kWarpsK = 8 / kWarpsN / kWarpsM;
  static constexpr int kRowBlocks = kRows / kWarpsN / 16;     // 16-row fragments a warp owns
  static constexpr int kTokenBlocks = kTokens / kWarpsM / 8;  // 8-token fragments a warp owns
  static constexpr int kColumns = kKPerTile / kWarpsK;        // of each tile of K, those a warp multiplies
  static constexpr int kSumStride = kRows + 4;                // the padding keeps the transposing writes off each other's banks
  static constexpr int kSumBytes = kTokens * kSumStride * int(sizeof(float));
  static_assert(kTokenBlocks % 2 == 0, "operand B is loaded for two token blocks at a time");

  using Sums = float[kRowBlocks][kTokenBlocks][4];
};

// Where a thread stands. Fragment registers: (e / 2) picks row g or g + 8, (e % 2) token 2t or 2t + 1.
template <class Tile>
struct Place {
  int lane, g, t;
  int warp_n, warp_m, warp_k;
  int slab;         // of the tile's two
  int first_block;  // first of the warp's 16-row blocks inside the slab
  int group_index;  // of the warp's first row in a group vector of the tile: its rows follow one another there
  int first_token;  // of the warp in the tile

  __device__ __forceinline__ Place() {
    int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    g = lane / 4, t = lane % 4;
    warp_n = warp % Tile::kWarpsN;
    warp_m = warp / Tile::kWarpsN % Tile::kWarpsM;
    warp_k = warp / (Tile::kWarpsN * Tile::kWarpsM);
    slab = warp_n / 2;
    first_block = warp_n % 2 * Tile::kRowBlocks;
    group_index = slab * kRowsPerSlab + g * 8 + first_block * 2;
    first_token = warp_m * Tile::kTokenBlocks * 8;
  }
};

// Blocks that run together share weights and tokens in L2: the grid walks 16 token tiles for one row tile, then the next rows.
struct TileIndex {
  int n, m;
  __device__ __forceinline__ TileIndex(int block, int row_tiles, int token_tiles) {
    constexpr int kBand = 16;
    int band = block / (kBand * row_tiles), inside = block % (kBand * row_tiles);
    int height = min(kBand, token_tiles - band * kBand);
    m = band * kBand + inside % height;
    n = inside / height;
  }
};

// Sums of all warps to shared memory, [token][row]. Warps that share outputs (kWarpsK > 1) add in the order of their columns.
template <class Tile>
__device__ __forceinline__ void gather_sums(typename Tile::Sums const& sums, Place<Tile> const& at, float* gathered) {
#pragma unroll
  for (int k = 0; k < Tile::kWarpsK; ++k) {
    __syncthreads();
    if (at.warp_k != k) continue;
#pragma unroll
    for (int rb = 0; rb < Tile::kRowBlocks; ++rb)
#pragma unroll
      for (int tb = 0; tb < Tile::kTokenBlocks; ++tb)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int row = at.warp_n * 32 + rb * 16 + at.g + 8 * (e / 2), token = at.first_token + tb * 8 + 2 * at.t + e % 2;
          float& place = gathered[token * Tile::kSumStride + row];
          place = k == 0 ? sums[rb][tb][e] : place + sums[rb][tb][e];
        }
  }
  __syncthreads();
}

// From shared memory to the output, or, where K is split, to this split's partial sums [m][n_pad].
template <class Tile>
__device__ __forceinline__ void store_sums(float const* gathered, int m0, int n0, EpilogueParams const& p, float* partials,
                                           int n_pad) {
  for (int i = threadIdx.x; i < Tile::kTokens * Tile::kRows / 8; i += Tile::kThreads) {
    int token = i / (Tile::kRows / 8), row = i % (Tile::kRows / 8) * 8;
    int m = m0 + token, n = n0 + row;
    if (m >= p.m || n >= n_pad) continue;
    float4 const* source = reinterpret_cast<float4 const*>(gathered + token * Tile::kSumStride + row);
    float4 a = source[0], b = source[1];
    if (partials) {
      float4* to = reinterpret_cast<float4*>(partials + int64_t(m) * n_pad + n);
      to[0] = a, to[1] = b;
    } else {
      float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      store_eight(v, m, n, p);
    }
  }
}

// Which rows of a [groups][stride] vector a tile of K needs: several where groups are shorter than the tile. Made on the host: the
// kernels divide by multiplying.
struct VectorRows {
  int group;            // columns a row covers; -1 for all of K
  int count;            // rows in a tile
  int step;             // rows from a tile to the next
  uint32_t reciprocal;  // ceil(2^32 / tiles in a row) where a row covers several tiles, else 0

  explicit VectorRows(int group_size)
      : group(group_size),
        count(group_size > 0 && group_size < kKPerTile ? kKPerTile / group_size : 1),
        step(group_size > 0 && group_size <= kKPerTile ? count : 0),
        reciprocal(group_size > kKPerTile ? uint32_t((uint64_t(1) << 32) / (group_size / kKPerTile) +
                                                     (group_size / kKPerTile & (group_size / kKPerTile - 1) ? 1 : 0))
                                          : 0) {}

  __device__ __forceinline__ int first(int k_tile) const {
    return reciprocal ? int(__umulhi(uint32_t(k_tile), reciprocal)) : k_tile * step;
  }
};

// One warp copies those rows, `width` values of 2^log_bytes bytes from column `begin`, to [row][width]. Columns from `end` on repeat the
// last ones before it: no result that is stored depends on them.
__device__ __forceinline__ void copy_vector_rows(uint8_t* shared, void const* source, VectorRows const& rows, int k_tile,
                                                 int log_bytes, int width, int begin, int end, int stride) {
  int lane = threadIdx.x % 32, log_pieces = log_bytes + 31 - __clz(width) - 4, log_values = 4 - log_bytes;
  uint8_t const* first = static_cast<uint8_t const*>(source) + (int64_t(rows.first(k_tile)) * stride << log_bytes);
  for (int i = lane; i < rows.count << log_pieces; i += 32) {
    int row = i >> log_pieces, piece = i - (row << log_pieces);
    int column = min(begin + (piece << log_values), end - (1 << log_values));
    copy_async_16(shared + i * 16, first + ((int64_t(row) * stride + column) << log_bytes));
  }
}

// The chunks of a tile's two slabs. A slab beyond the last repeats it; its rows are never stored.
template <class Tile, int kBits>
__device__ __forceinline__ void copy_weights(uint8_t* shared, uint8_t const* codes, int n0, int n_pad, int k_tile,
                                             int k_tiles) {
  constexpr int kChunk = chunk_bytes(kBits), kPieces = Tile::kSlabs * kChunk / 16;
  static_assert(kPieces % Tile::kThreads == 0);
#pragma unroll
  for (int j = 0; j < kPieces / Tile::kThreads; ++j) {
    int i = threadIdx.x + j * Tile::kThreads;
    int slab = min((n0 / kRowsPerSlab + i / (kChunk / 16)), n_pad / kRowsPerSlab - 1);
    copy_async_16(shared + i * 16, codes + (int64_t(slab) * k_tiles + k_tile) * kChunk + i % (kChunk / 16) * 16);
  }
}

// K is cut into `splits` runs of tiles whose lengths differ by at most one.
struct KRange {
  int first, count;
  __device__ __forceinline__ KRange(int k_tiles, int split, int splits) {
    first = int(int64_t(k_tiles) * split / splits);
    count = int(int64_t(k_tiles) * (split + 1) / splits) - first;
  }
};

}  // namespace cutlass_ops
