// Which tile a CTA of the portable GEMM kernels has, and its copies of weights, group vectors and
// rows of x to shared memory.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/grouped.cuh"
#include "device/image_tiles.cuh"
#include "device/mma.cuh"

namespace cutlass_ops {

// Blocks that run together share weights and rows of x in L2: the grid walks 16 tiles along M for
// one tile along N, then the next rows.
struct TileIndex {
  int n, m;
  __device__ __forceinline__ TileIndex(int block, int row_tiles, int m_tiles) {
    constexpr int kBand = 16;
    int band = block / (kBand * row_tiles), inside = block % (kBand * row_tiles);
    int height = min(kBand, m_tiles - band * kBand);
    m = band * kBand + inside % height;
    n = inside / height;
  }
};

// Which rows of a [groups][stride] vector a tile of K needs: several where groups are shorter than
// the tile. Made on the host: the kernels divide by multiplying.
struct VectorRows {
  static constexpr uint32_t kMostRows = 8;  // in a tile: reciprocals are larger
  int group;                                // columns a row covers; -1 for all of K
  int count;                                // rows in a tile
  int step;                                 // rows from a tile to the next
  uint32_t reciprocal;  // ceil(2^32 / tiles in a row) where a row covers several tiles, else 0

  explicit VectorRows(int group_size)
      : group(group_size),
        count(group_size > 0 && group_size < kKPerTile ? kKPerTile / group_size : 1),
        step(group_size > 0 && group_size <= kKPerTile ? count : 0),
        reciprocal(group_size > kKPerTile
                       ? uint32_t((uint64_t(1) << 32) / (group_size / kKPerTile) +
                                  (group_size / kKPerTile & (group_size / kKPerTile - 1) ? 1 : 0))
                       : 0) {}

  __device__ __forceinline__ int first(int k_tile) const {
    return reciprocal ? int(__umulhi(uint32_t(k_tile), reciprocal)) : k_tile * step;
  }
};

// A pointer into shared memory as instructions take it.
__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
  return cute::cast_smem_ptr_to_uint(pointer);
}

// 16 bytes from global memory to a shared address in the background, if `wanted`, without a branch;
// zeros, and nothing is read, where not `inside`.
__device__ __forceinline__ void copy_16_if(uint32_t shared, void const* source, bool wanted,
                                           bool inside = true) {
  asm volatile(
      "{\n"
      " .reg .pred wanted;\n"
      " setp.ne.b32 wanted, %2, 0;\n"
      " @wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %3;\n"
      "}" ::"r"(shared),
      "l"(source), "r"(int(wanted)), "r"(inside ? 16 : 0)
      : "memory");
}

// Groups of 16 columns, of which a stage would need eight, are read from global memory.
constexpr int kStagedGroups = 4;

// A CTA's tile: its first row of the weight (n0), that row's number among the features of its
// expert (feature; the same without experts), and its rows of x, m0 .. end - 1, which for experts
// are slots.
struct TileOrigin {
  int n0, feature, m0, end;

  TileOrigin() = default;
  template <class C, class Params>
  __device__ __forceinline__ TileOrigin(C, Params const& p) {
    if (p.groups.tiles) {
      // No __ldg(), which the compiler may move before pdl_wait().
      int4 const stored =
          reinterpret_cast<int4 const*>(p.groups.tiles)[blockIdx.x / unsigned(p.row_tiles)];
      TileIndex const tile(blockIdx.x - stored.w * p.row_tiles, p.row_tiles,
                           (stored.z + C::kBlockM - 1) / C::kBlockM);
      feature = tile.n * C::kRows, n0 = stored.x * p.groups.row_panels * kRowsPerPanel + feature;
      m0 = stored.y + tile.m * C::kBlockM, end = stored.y + stored.z;
    } else {
      TileIndex const tile(blockIdx.x, p.row_tiles, p.m_tiles);
      n0 = feature = tile.n * C::kRows, m0 = tile.m * C::kBlockM, end = p.epilogue.m;
    }
  }
};

// The CTA's tile, which multiply_tile stores before the main loop, so that it takes no registers
// during the loop.
__device__ __forceinline__ TileOrigin& stored_origin() {
  __shared__ TileOrigin origin;
  return origin;
}

// The position: the K tile, and the block's first rows of the weight and of x.
struct GlobalTile {
  int k_tile, n0, m0;

  __device__ __forceinline__ explicit GlobalTile(int k_tile_)
      : k_tile(k_tile_), n0(stored_origin().n0), m0(stored_origin().m0) {}
  // The element of a weight's group vectors that is row `index` of the block's in a group of the
  // tile. A row panel beyond the last repeats rows, which are never stored.
  template <class Params>
  __device__ __forceinline__ int64_t weight_element(Params const& p, int group, int index) const {
    return (int64_t(k_tile) * p.weight_rows.count + group) * p.n_pad + min(n0 + index, p.n_pad - 4);
  }
};

// The position of four rows of a weight's group in its vectors: scales, zero points and offsets.
template <class Index>
struct GroupRows {
  void const* scales;
  uint8_t const* zeros;
  void const* offsets;
  Index index;
};
// For a group that a stage holds; `index`: of the rows in the stage.
template <class C>
__device__ __forceinline__ GroupRows<int> staged_rows(uint8_t const* stage, int group, int index) {
  return {stage + C::kScales, stage + C::kZeros, stage + C::kOffsets, group * C::kRows + index};
}
// For a tile's group in global memory.
template <class Params>
__device__ __forceinline__ GroupRows<int64_t> global_rows(GlobalTile const& tile, Params const& p,
                                                          int group, int index) {
  return {p.weight.scales, reinterpret_cast<uint8_t const*>(p.weight.zeros), p.weight.offsets,
          tile.weight_element(p, group, index)};
}

// Issues all copies of a tile's multiplication before it.
template <class C, class IssueCopies>
__device__ __forceinline__ void issue_all(IssueCopies const& issue_copies) {
#pragma unroll
  for (int piece = 0; piece < C::kPieces; ++piece) issue_copies(piece);
}

// The copy of one 16-byte vector of scales, zero points or offsets, which a stage holds as
// [row][width]. A thread copies the same vector of every tile.
struct VectorCopy {
  uint8_t const* source = nullptr;  // in the vector's first row
  uint32_t row_bytes = 0;
  int to = -1;              // shared address in the first stage; -1: nothing to copy
  uint32_t multiplier = 0;  // VectorRows' step or reciprocal, whichever is not zero

  VectorCopy() = default;

  // `i`: the thread's number among those that copy the vector; those below zero do not. Values have
  // 2^log_bytes bytes; the tile begins at column `begin` of rows of `stride`. Columns from `stride`
  // on repeat the last before it: no result that is stored depends on them.
  __device__ __forceinline__ VectorCopy(int i, void const* vector, VectorRows const& rows,
                                        int log_bytes, int width, int begin, int stride,
                                        uint32_t shared)
      : row_bytes(uint32_t(stride) << log_bytes), multiplier(rows.step | rows.reciprocal) {
    int log_pieces = log_bytes + 31 - __clz(width) - 4, log_values = 4 - log_bytes;
    int row = i >> log_pieces, piece = i - (row << log_pieces);
    int column = min(begin + (piece << log_values), stride - (1 << log_values));
    source = static_cast<uint8_t const*>(vector) + int64_t(row) * row_bytes +
             (int64_t(column) << log_bytes);
    if (vector && i >= 0 && row < rows.count && rows.count <= kStagedGroups)
      to = int(shared) + i * 16;
    // Keeps the compiler from recomputing it for every tile.
    asm volatile("" : "+l"(source), "+r"(to));
  }

  // Copy the other's 16 bytes, if it has any. No thread copies for both.
  __device__ __forceinline__ void take(VectorCopy const& other) {
    if (other.to >= 0) *this = other;
  }

  // The row that a K tile begins with, as VectorRows::first computes it.
  __device__ __forceinline__ uint32_t row(int k_tile) const {
    return multiplier <= VectorRows::kMostRows ? k_tile * multiplier
                                               : __umulhi(uint32_t(k_tile), multiplier);
  }

  // `stage`: bytes from the first.
  __device__ __forceinline__ void operator()(int stage, uint32_t row, bool wanted) const {
    copy_16_if(uint32_t(to + stage), source + uint64_t(row) * row_bytes, wanted && to >= 0);
  }
};

// A warp's own rows of weights, which no other warp reads. A row panel beyond the last repeats it;
// its rows are never stored.
template <class Tile>
struct WeightCopy {
  static constexpr int kChunk = k_tile_bytes(Tile::kBits),
                       kWarpBytes = Tile::kRowBlocks * Tile::kUnits * kUnitBytes,
                       kPieces = kWarpBytes / kUnitBytes;
  static_assert(kWarpBytes * 2 == kChunk, "two warps share a row panel");
  uint8_t const* source;
  uint32_t to;  // shared address in the first stage

  __device__ __forceinline__ WeightCopy(uint32_t shared, uint8_t const* codes, int n0, int n_pad,
                                        int k_tiles, int k_tile) {
    int warp = threadIdx.x / 32, lane_byte = threadIdx.x % 32 * kLaneBytes;
    int row_panel = min(n0 / kRowsPerPanel + warp / 2, n_pad / kRowsPerPanel - 1);
    source = codes + (int64_t(row_panel) * k_tiles + k_tile) * kChunk + warp % 2 * kWarpBytes +
             lane_byte;
    to = shared + warp * kWarpBytes + lane_byte;
  }

  // Copy the j-th of a thread's 16-byte vectors of a tile.
  __device__ __forceinline__ void operator()(int stage, int j, bool wanted) const {
    copy_16_if(to + stage + j * kUnitBytes, source + j * kUnitBytes, wanted);
  }

  __device__ __forceinline__ void next() { source += kChunk; }
};

// A tile's columns of row-major x to [x_row][kRowBytes], whose 16-byte vectors are swizzled by
// x_row % 8, so that ldmatrix meets every bank once. Rows of x beyond the last are left as they
// are: no result that is stored depends on them.
//
// Four threads share a row (eight, where there are no more rows) and take its vectors in turn: all
// addresses of a thread are constants away from a pointer or two, and one predicate serves a row.
template <class Tile>
struct XRowCopy {
  static constexpr int kRowBytes = Tile::kRowBytes, kRowPieces = kRowBytes / 16,
                       kRowThreads =
                           Tile::kThreads / Tile::kBlockM > 4 ? Tile::kThreads / Tile::kBlockM : 4,
                       kTurns = kRowPieces / kRowThreads,
                       kRowsAtOnce = Tile::kThreads / kRowThreads,
                       kRows = Tile::kBlockM / kRowsAtOnce, kPieces = kRows * kTurns;
  static_assert(kRowThreads == 4 || kRowThreads == 8);
  uint8_t const* source[kRows];
  bool wanted[kRows];
  uint32_t to;  // shared address in the first stage, a multiple of 128 for the first vector of
                // the first row of x

  // The first of a thread's rows of x. Eight lanes write at a time: of four to a row, those of rows
  // r and r + 4, which the swizzle keeps apart.
  static __device__ __forceinline__ int first_x_row() {
    int lane = threadIdx.x % 32, x_row = threadIdx.x / 32 * (32 / kRowThreads) + lane / 8;
    return kRowThreads == 4 ? x_row + lane / 4 % 2 * 4 : x_row;
  }
  // The number in its row of a thread's i-th vector.
  static __device__ __forceinline__ int piece(int i) {
    return threadIdx.x % kRowThreads + i % kTurns * kRowThreads;
  }

  // `groups`: of experts, whose slots are numbered as rows are elsewhere.
  __device__ __forceinline__ XRowCopy(uint32_t shared, void const* matrix, int64_t stride_bytes,
                                      TileOrigin const& origin, Groups const& groups, int k_tile) {
    int const first = first_x_row();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int row = origin.m0 + first + i * kRowsAtOnce;
      wanted[i] = row < origin.end;
      if (groups.positions) row = wanted[i] ? row_of_slot(groups, row) : 0;
      source[i] = static_cast<uint8_t const*>(matrix) + row * stride_bytes +
                  int64_t(k_tile) * kRowBytes + piece(0) * 16;
    }
    to = shared + first * kRowBytes + ((piece(0) ^ (first & 7)) << 4);
  }

  // The address of the i-th vector in the first stage.
  __device__ __forceinline__ uint32_t place(int i) const {
    int turn = i % kTurns * kRowThreads * 16;
    return (to ^ (turn & 64)) + turn / 128 * 128 + i / kTurns * kRowsAtOnce * kRowBytes;
  }

  // Copy the i-th of a thread's vectors of a tile; zeros without a read where not `inside`.
  __device__ __forceinline__ void operator()(int stage, int i, bool tile_wanted,
                                             bool inside = true) const {
    copy_16_if(place(i) + stage, source[i / kTurns] + i % kTurns * kRowThreads * 16,
               tile_wanted && wanted[i / kTurns], inside);
  }

  // Copy the pixels of an image under the tap of a tile of K instead, zeros where there are none. A
  // pixel's channels are `bytes` long, and the pixels stride_bytes apart.
  __device__ __forceinline__ void copy_pixels(int stage, ImageTiles const& image, int k_tile,
                                              void const* x, int64_t stride_bytes, int bytes,
                                              int m0) const {
    TapColumns const tap(image, k_tile);
    int const first = tap.channel / kKPerTile * kRowBytes;
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
      int const pixel = RowPixel(image, m0 + first_x_row() + row * kRowsAtOnce).under(image, tap);
      uint8_t const* const from = static_cast<uint8_t const*>(x) + max(pixel, 0) * stride_bytes;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        int const byte = first + piece(turn) * 16;
        bool const inside = pixel >= 0 && byte < bytes;
        copy_16_if(place(row * kTurns + turn) + stage, from + (inside ? byte : 0), true, inside);
      }
    }
  }

  __device__ __forceinline__ void next() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) source[i] += kRowBytes;
  }
};

}  // namespace cutlass_ops
