// What the two portable GEMM kernels share: the block tile of 128 output features x kTokens, its warps, the order of tiles over the grid,
// the copies of weights and group vectors, and the way out through shared memory.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "device/mma.cuh"

namespace cutlass_ops {

// Four warps take 32 rows each, and all tokens. Tiles of 16 tokens have two parties of four: they share the columns of every tile of K,
// and their sums are added at the end, always in the same order. Small blocks, so that several share a multiprocessor: while one
// waits at a barrier, decodes or promotes, another multiplies.
template <int kTokens_>
struct BlockTile {
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = 128;
  static constexpr int kSlabs = kRows / kRowsPerSlab;
  static constexpr int kWarpsN = 4;
  static constexpr int kWarpsK = kTokens == 16 ? 2 : 1;
  static constexpr int kThreads = 32 * kWarpsN * kWarpsK;
  static constexpr int kRowBlocks = kRows / kWarpsN / 16;  // 16-row fragments a warp owns
  static constexpr int kTokenBlocks = kTokens / 8;         // 8-token fragments a warp owns
  static constexpr int kColumns = kKPerTile / kWarpsK;     // of each tile of K, those a warp multiplies
  static constexpr int kSumStride = kRows + 4;             // the padding keeps the transposing writes off each other's banks
  static constexpr int kSumBytes = kTokens * kSumStride * int(sizeof(float));
  static_assert(kTokenBlocks % 2 == 0, "operand B is loaded for two token blocks at a time");
  static_assert(kRowBlocks == 2, "a warp's rows are four neighbours in a group vector");

  using Sums = float[kRowBlocks][kTokenBlocks][4];
};

// Where a thread stands. Fragment registers: (e / 2) picks row g or g + 8, (e % 2) token 2t or 2t + 1.
template <class Tile>
struct Place {
  int g, t;
  int warp_n, warp_k;
  int group_index;  // of the warp's first row in a group vector of the tile: its rows follow one another there
  int weights;      // byte of the lane's first 16 among the weights of a stage
  int tokens;       // byte of the lane's first ldmatrix row among the activations of a stage

  __device__ __forceinline__ explicit Place(int thread) {
    int warp = thread / 32, lane = thread % 32;
    g = lane / 4, t = lane % 4;
    warp_n = warp % Tile::kWarpsN, warp_k = warp / Tile::kWarpsN;
    int slab = warp_n / 2, first_block = warp_n % 2 * Tile::kRowBlocks;
    group_index = slab * kRowsPerSlab + g * 8 + first_block * 2;
    weights = slab * chunk_bytes(Tile::kBits) +
              (first_block * Tile::kUnits + warp_k * Tile::kUnits / Tile::kWarpsK) * kUnitBytes + lane * kLaneBytes;
    int token = lane / 16 * 8 + lane % 8, swizzle = lane / 8 % 2 ^ lane % 8;
    tokens = token * Tile::kRowBytes + (swizzle << 4 ^ warp_k * (Tile::kRowBytes / Tile::kWarpsK));
  }
};

// threadIdx.x, read anew: what is derived from it need not stay in registers through the main loop.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

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
          int row = (at.warp_n * Tile::kRowBlocks + rb) * 16 + at.g + 8 * (e / 2), token = tb * 8 + 2 * at.t + e % 2;
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
  for (int i = thread_again(); i < Tile::kTokens * Tile::kRows / 8; i += Tile::kThreads) {
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

// Keeps the compiler from computing a loop constant anew wherever it is used.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

// One 16-byte piece of a group vector's rows, of the [row][width] that a stage holds; it is this thread's to copy for every tile.
struct VectorCopy {
  uint8_t const* source = nullptr;  // in the vector's first row
  uint32_t row_bytes = 0;
  int to = -1;  // byte in the stage; -1: nothing to copy

  VectorCopy() = default;

  // `i`: the thread's number among those that copy the vector. Values have 2^log_bytes bytes; the tile begins at column `begin` of rows of
  // `stride`. Columns from `stride` on repeat the last before it: no result that is stored depends on them.
  __device__ __forceinline__ VectorCopy(int i, void const* vector, VectorRows const& rows, int log_bytes, int width, int begin,
                                        int stride, int stage_offset)
      : row_bytes(uint32_t(stride) << log_bytes) {
    int log_pieces = log_bytes + 31 - __clz(width) - 4, log_values = 4 - log_bytes;
    int row = i >> log_pieces, piece = i - (row << log_pieces);
    int column = min(begin + (piece << log_values), stride - (1 << log_values));
    source = static_cast<uint8_t const*>(vector) + uint64_t(row) * row_bytes + (uint64_t(column) << log_bytes);
    if (vector && row < rows.count) to = stage_offset + i * 16;
  }

  __device__ __forceinline__ void operator()(uint8_t* stage, int first_row) const {
    if (to >= 0) copy_async_16(stage + to, source + uint64_t(uint32_t(first_row)) * row_bytes);
  }
};

// The weights of a tile's two slabs. A slab beyond the last repeats it; its rows are never stored.
template <class Tile>
struct WeightCopy {
  static constexpr int kChunk = chunk_bytes(Tile::kBits), kSlabPieces = kChunk / 16,
                       kPieces = Tile::kSlabs * kSlabPieces / Tile::kThreads;
  static_assert(Tile::kSlabs * kSlabPieces % Tile::kThreads == 0);
  uint8_t const* source;
  uint32_t slab_step;

  __device__ __forceinline__ WeightCopy(uint8_t const* codes, int n0, int n_pad, int k_tiles, int k_tile) {
    int slab = min(n0 / kRowsPerSlab + int(threadIdx.x) / kSlabPieces, n_pad / kRowsPerSlab - 1);
    source = codes + (int64_t(slab) * k_tiles + k_tile) * kChunk + threadIdx.x % kSlabPieces * 16;
    slab_step = n0 + kRowsPerSlab < n_pad ? uint32_t(k_tiles) * kChunk : 0;
    keep(slab_step);
  }

  // Copy a tile and step to the next.
  __device__ __forceinline__ void operator()(uint8_t* stage) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      int i = j * Tile::kThreads;
      copy_async_16(stage + (threadIdx.x + i) * 16, source + i / kSlabPieces * slab_step + i % kSlabPieces * 16);
    }
    source += kChunk;
  }
};

// A tile's columns of a row-major matrix, a token a row, to [token][kRowBytes] whose 16-byte pieces are swizzled by token % 8, so that
// ldmatrix meets every bank once. Tokens beyond the last are left as they are: no result that is stored depends on them.
template <class Tile>
struct TokenCopy {
  static constexpr int kRowBytes = Tile::kRowBytes, kRowPieces = kRowBytes / 16, kRowsAtOnce = Tile::kThreads / kRowPieces;
  static constexpr int64_t kLargestStride = (int64_t(1) << 32) / kRowsAtOnce - 1;  // bytes: row_step has 32 bits
  uint8_t const* source;
  uint32_t row_step;
  int tokens;  // of those this thread may copy
  int to;

  __device__ __forceinline__ TokenCopy(void const* matrix, int64_t stride_bytes, int m0, int m, int k_tile) {
    int token = threadIdx.x / kRowPieces, piece = threadIdx.x % kRowPieces;
    source = static_cast<uint8_t const*>(matrix) + (m0 + token) * stride_bytes + int64_t(k_tile) * kRowBytes + piece * 16;
    row_step = uint32_t(kRowsAtOnce * stride_bytes);
    keep(row_step);
    tokens = min(m - m0, Tile::kTokens) - token;
    to = token * kRowBytes + ((piece ^ (token & 7)) << 4);
  }

  // Copy a tile, zeros (and nothing is read) where not `inside`, and step to the next.
  template <class... Inside>
  __device__ __forceinline__ void operator()(uint8_t* shared, Inside... inside) {
    uint8_t const* from = source;
#pragma unroll
    for (int j = 0; j < (Tile::kTokens + kRowsAtOnce - 1) / kRowsAtOnce; ++j) {
      if (j * kRowsAtOnce < tokens) {
        void* row = shared + to + j * kRowsAtOnce * kRowBytes;
        if constexpr (sizeof...(Inside)) {
          copy_async_16_or_zero(row, from, inside...);
        } else {
          copy_async_16(row, from);
        }
      }
      from += row_step;
    }
    source += kRowBytes;
  }
};

// Operand B of two neighbouring token blocks, 32 bytes of columns: `piece` of the warp's part of a row. Rows are swizzled (TokenCopy).
template <class Tile>
__device__ __forceinline__ void load_tokens(uint8_t const* activations, Place<Tile> const& at, int pair, int piece,
                                            uint32_t (&b)[4]) {
  load_tiles(activations + (at.tokens ^ (piece % 4 << 5)) + piece / 4 * 128 + pair * 16 * Tile::kRowBytes, b);
}

// The zero points of a warp's rows in a group vector, or zeros.
__device__ __forceinline__ void load_zeros(uint8_t const* vector, bool present, int index, int (&out)[4]) {
  int four = present ? *reinterpret_cast<int const*>(vector + index) : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = int8_t(four >> 8 * i);
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
