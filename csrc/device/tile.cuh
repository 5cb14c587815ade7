// The common part of the two portable GEMM kernels: the block tile of 128 output features x
// kBlockM, its warps, a block's main loop around its multiplications, and the epilogue store
// through shared memory.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "device/grouped.cuh"
#include "device/image_tiles.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/tile_copies.cuh"
#include "dispatch/ctas.h"

namespace cutlass_ops {

// A warp takes 32 rows and all rows of x. Small blocks, so that several share an SM: while one
// waits at a barrier, decodes or promotes, another multiplies.
template <int kBlockM_>
struct BlockTile {
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kRows = kMmaRows;
  static constexpr int kRowPanels = kRows / kRowsPerPanel;
  static constexpr int kThreads = kMmaThreads;  // four warps
  static constexpr int kRowBlocks = 2;          // 16-row fragments a warp owns
  static constexpr int kMBlocks = kBlockM / 8;  // fragments of 8 rows of x a warp owns
  static constexpr int kSumStride = kMmaSumStride;
  static_assert(kMBlocks % 2 == 0, "operand B is loaded for two blocks of rows of x at a time");

  using Sums = float[kRowBlocks][kMBlocks][4];
};

// The words of a k-slice, counted from those of a lane's 16 bytes (layout.h). A pointer, where that
// is enough: copies made kernels with few registers left spill.
template <class C, bool kSharesNibbles = nibble_columns(C::kBits) == 2>
struct Words {
  uint32_t const* words;

  __device__ __forceinline__ Words(uint32_t const* record, int k_slice)
      : words(record + k_slice * C::Decode::kWords) {}
};
template <class C>
struct Words<C, true> {
  static constexpr int kWords = C::Decode::kWords, kOfRecord = 4 / kWords;
  uint32_t words[kWords];

  __device__ __forceinline__ Words(uint32_t const* record, int k_slice) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = record[k_slice % kOfRecord * kWords + i] >> k_slice / kOfRecord * 2;
  }
};

// A thread's coordinates. Fragment registers: (e / 2) picks row g or g + 8, (e % 2) row 2t or 2t +
// 1 of x.
template <class Tile>
struct ThreadCoord {
  int g, t;
  int warp;
  int group_index;  // of the warp's first row in a group vector of the tile: its rows follow
                    // one another there
  int weights;      // byte of the lane's first 16 among the weights of a stage
  int x_rows;       // byte of the lane's first ldmatrix row among the activations of a stage

  __device__ __forceinline__ explicit ThreadCoord(int thread) {
    int lane = thread % 32;
    warp = thread / 32;
    g = lane / 4, t = lane % 4;
    int row_panel = warp / 2, first_block = warp % 2 * Tile::kRowBlocks;
    group_index = row_panel * kRowsPerPanel + g * 8 + first_block * 2;
    weights = row_panel * k_tile_bytes(Tile::kBits) + first_block * Tile::kUnits * kUnitBytes +
              lane * kLaneBytes;
    int x_row = lane / 16 * 8 + lane % 8, swizzle = lane / 8 % 2 ^ lane % 8;
    x_rows = x_row * Tile::kRowBytes + (swizzle << 4);
  }
};

// Sums of all warps to shared memory, [x_row][row].
template <class Tile>
__device__ __forceinline__ void gather_sums(typename Tile::Sums const& sums,
                                            ThreadCoord<Tile> const& coord,
                                            float* tiles_per_cluster) {
  __syncthreads();
#pragma unroll
  for (int rb = 0; rb < Tile::kRowBlocks; ++rb)
#pragma unroll
    for (int tb = 0; tb < Tile::kMBlocks; ++tb)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int row = (coord.warp * Tile::kRowBlocks + rb) * 16 + coord.g + 8 * (e / 2),
            x_row = tb * 8 + 2 * coord.t + e % 2;
        tiles_per_cluster[x_row * Tile::kSumStride + row] = sums[rb][tb][e];
      }
  __syncthreads();
}

// From shared memory to the output, or, where K is split, to this split's partial sums [m][n_pad].
// `plain`: the epilogue only rounds, to 16 bits, and rows of the output start on 16 bytes.
template <class Tile>
__device__ __forceinline__ void store_sums(float const* tiles_per_cluster, int m0, int n0,
                                           EpilogueParams const& p, float* splitk_workspace,
                                           int n_pad, bool plain = false) {
  constexpr int kRowThreads = Tile::kRows / 8, kXRowsAtOnce = Tile::kThreads / kRowThreads;
  int thread = thread_again(), row = thread % kRowThreads * 8, first = thread / kRowThreads,
      n = n0 + row;
  int x_rows = min(p.m - m0, Tile::kBlockM);
  if (n >= n_pad) return;
  auto store_rounded = [&](auto type) {
    using Type = decltype(type);
    uint16_t* to = static_cast<uint16_t*>(p.out) + int64_t(m0 + first) * p.n + n;
#pragma unroll
    for (int i = 0; i < Tile::kBlockM; i += kXRowsAtOnce) {
      float4 const* source =
          reinterpret_cast<float4 const*>(tiles_per_cluster + (first + i) * Tile::kSumStride + row);
      float4 a = source[0], b = source[1];
      float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (float& x : v) x = nan_unless_finite(x);
      if (first + i < x_rows)
        *reinterpret_cast<uint4*>(to + int64_t(i) * p.n) =
            make_uint4(pack_pair<Type>(v[0], v[1]), pack_pair<Type>(v[2], v[3]),
                       pack_pair<Type>(v[4], v[5]), pack_pair<Type>(v[6], v[7]));
    }
  };
  if (!splitk_workspace && plain && n + 8 <= p.n) {
    if (p.out_type == DataType::kFloat16) {
      store_rounded(__half());
    } else {
      store_rounded(__nv_bfloat16());
    }
    return;
  }
#pragma unroll 1
  for (int x_row = first; x_row < x_rows; x_row += kXRowsAtOnce) {
    float4 const* source =
        reinterpret_cast<float4 const*>(tiles_per_cluster + x_row * Tile::kSumStride + row);
    float4 a = source[0], b = source[1];
    if (splitk_workspace) {
      float4* to = reinterpret_cast<float4*>(splitk_workspace + int64_t(m0 + x_row) * n_pad + n);
      to[0] = a, to[1] = b;
    } else {
      float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      store_outputs(v, m0 + x_row, n, p);
    }
  }
}

// Operand B of two neighbouring blocks of 8 rows of x, 32 bytes of columns: k-slice `piece` of the
// warp's columns of a row. Rows are swizzled (XRowCopy).
template <class Tile>
__device__ __forceinline__ void load_x_rows(uint8_t const* activations,
                                            ThreadCoord<Tile> const& coord, int pair, int piece,
                                            uint32_t (&b)[4]) {
  load_tiles(activations + (coord.x_rows ^ (piece % 4 << 5)) + piece / 4 * 128 +
                 pair * 16 * Tile::kRowBytes,
             b);
}

// The zero points of a warp's rows in a group vector, or zeros.
template <class Index>
__device__ __forceinline__ void load_zeros(uint8_t const* vector, bool present, Index index,
                                           int (&out)[4]) {
  int four = present ? *reinterpret_cast<int const*>(vector + index) : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = int8_t(four >> 8 * i);
}

// K is cut into `splits` runs of tiles whose lengths differ by at most one.
struct KRange {
  int first, count;
  __device__ __forceinline__ KRange(int k_tiles, uint32_t split, uint32_t splits) {
    // 32 bits are enough: at most 2^24 tiles and 16 splits.
    first = int(uint32_t(k_tiles) * split / splits);
    count = int(uint32_t(k_tiles) * (split + 1) / splits) - first;
  }
};

// Parameters of both kernels.
struct TileParams {
  PackedWeight weight;
  EpilogueParams epilogue;
  float* splitk_workspace;
  VectorRows weight_rows;
  int row_tiles, m_tiles, k_tiles, n_pad, splits;
  int log_scale_bytes, log_offset_bytes;
  bool plain;  // outputs are the rounded sums, stored by vectors of 16 bytes
  ImageTiles image;
  // The experts' tiles; `groups.tiles` is null for other products.
  Groups groups;
  float const* x_row_scales = nullptr;  // [rows of x], applied to sums; or null
  int* arrived = nullptr;               // as in GroupedGemm; splitk_workspace is its `slices`

  TileParams(GemmProblem const& problem, Plan const& plan, float* splitk_workspace_, int rows,
             int x_rows)
      : weight(problem.weight),
        epilogue(problem),
        splitk_workspace(splitk_workspace_),
        weight_rows(weight.group_size),
        row_tiles((weight.n + rows - 1) / rows),
        m_tiles((problem.m + x_rows - 1) / x_rows),
        k_tiles(int(padded_k(weight.k) / kKPerTile)),
        n_pad(int(padded_rows(weight.n))),
        splits(plan.slices),
        log_scale_bytes(log2_bytes_of(weight.scale_type)),
        log_offset_bytes(log2_bytes_of(weight.offset_type)),
        plain(!problem.bias && !problem.residual && problem.activation == Activation::kNone &&
              !problem.saturate && problem.out_type != DataType::kFloat32 && epilogue.vector_store),
        image(problem) {}

  // For experts: a CTA for each of the largest possible number of tiles.
  TileParams(GroupedGemm const& problem, Plan const& plan, float*, int rows, int x_rows)
      : TileParams(rows_of_all(problem), plan, problem.slices, rows, x_rows) {
    groups = problem.groups;
    row_tiles = int(ceil_div(int64_t(groups.row_panels) * kRowsPerPanel, rows));
    n_pad = int(padded_rows(problem.weight.n)), weight = problem.weight;
    arrived = problem.arrived;
    if (problem.x_codes == ActQuant::kNone) x_row_scales = problem.x_scales;
  }
};

// Whether a CTA has no tile: the grid is for the largest number of tiles of experts.
template <class Params>
__device__ __forceinline__ bool has_no_tile(Params const& p) {
  if (!p.groups.tiles) return false;
  pdl_wait();  // the kernels before write the tiles
  return blockIdx.x >= unsigned(*p.groups.count * p.row_tiles);
}

// With split-K slices, adds the sums of a tile's other slices to `sums`, in the order of the
// slices, in the last CTA of the tile to arrive; returns false in the others.
template <class C, class Params>
__device__ __forceinline__ bool add_slices(float* sums, Params const& p) {
  if (C::kBlockM > kMmaRowsOfSlices || p.splits == 1) return true;
  constexpr int kRowPieces = C::kRows / 4, kPieces = C::kBlockM * kRowPieces;
  auto const address = [&](int i) {
    return sums + i / kRowPieces * C::kSumStride + i % kRowPieces * 4;
  };
  auto* const slices =
      reinterpret_cast<float4*>(p.splitk_workspace) + int64_t(blockIdx.x) * p.splits * kPieces;
  for (int i = thread_again(); i < kPieces; i += C::kThreads)
    __stcg(slices + blockIdx.y * kPieces + i, *reinterpret_cast<float4 const*>(address(i)));
  __threadfence();
  __syncthreads();
  __shared__ int arrived;
  if (threadIdx.x == 0) arrived = atomicAdd(p.arrived + blockIdx.x, 1);
  __syncthreads();
  if (arrived != p.splits - 1) return false;
  __threadfence();
  for (int i = thread_again(); i < kPieces; i += C::kThreads) {
    float4 sum = __ldcg(slices + i);
#pragma unroll 4
    for (int slice = 1; slice < p.splits; ++slice) {
      float4 const more = __ldcg(slices + slice * kPieces + i);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    *reinterpret_cast<float4*>(address(i)) = sum;
  }
  __syncthreads();
  return true;
}

// A tile's sums in shared memory to the outputs of an expert's rows: its features, or
// activation(gate) * up of every eight features and the eight after them.
template <class C, class Params>
__device__ __forceinline__ void store_group(float const* sums, Params const& p) {
  TileOrigin const& origin = stored_origin();
  Groups const& groups = p.groups;
  EpilogueParams const& e = p.epilogue;
  int const each = groups.gated ? 16 : 8, row_threads = C::kRows / each, thread = thread_again(),
            row = thread % row_threads * each, feature = origin.feature + row,
            n = groups.gated ? feature / 2 : feature;
  if (n >= e.n) return;
#pragma unroll 1
  for (int x_row = thread / row_threads; x_row < min(origin.end - origin.m0, C::kBlockM);
       x_row += C::kThreads / row_threads) {
    int const slot = origin.m0 + x_row;
    float const scale = p.x_row_scales ? p.x_row_scales[row_of_slot(groups, slot)] : 1.0f;
    auto const load = [&](int from, float (&v)[8]) {
      float4 const* const four =
          reinterpret_cast<float4 const*>(sums + x_row * C::kSumStride + row + from);
      float4 const a = four[0], b = four[1];
      float const values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = nan_unless_finite(values[i] * scale);
      if (!groups.bias) return;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i] += load_float(groups.bias, groups.bias_type, int64_t(origin.n0) + row + from + i);
    };
    float v[8];
    load(0, v);
    if (groups.gated) {
      float up[8];
      load(8, up);
      visit_activation(groups.activation, groups.bounds, [&](auto const& function) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = function(v[i]) * factor_of_up(function, up[i]);
      });
    }
    store_finished(v, slot, n, e);
  }
}

// Epilogue store: a block's sums to the output or the slice's partial sums, through shared memory
// that nothing else uses any more.
template <class C, class Params>
__device__ __forceinline__ void store_tile(Params const& p, typename C::Sums const& sums,
                                           uint8_t* shared) {
  float* tiles_per_cluster = reinterpret_cast<float*>(shared);
  gather_sums<C>(sums, ThreadCoord<C>(thread_again()), tiles_per_cluster);
  if (p.groups.tiles) {
    if (add_slices<C>(tiles_per_cluster, p)) store_group<C>(tiles_per_cluster, p);
    return;
  }
  TileOrigin const& origin = stored_origin();
  float* splitk_workspace = p.splitk_workspace
                                ? p.splitk_workspace + int64_t(blockIdx.y) * p.epilogue.m * p.n_pad
                                : nullptr;
  store_sums<C>(tiles_per_cluster, origin.m0, origin.n0, p.epilogue, splitk_workspace, p.n_pad,
                p.plain);
}

// The copies of a block's first stages: those of weights may start before the previous kernels have
// ended. `prepare`: as in multiply_tile.
template <class C, class Copies, class Prepare>
__device__ __forceinline__ void fill_first_stages(Copies& copies, KRange const& range,
                                                  Prepare prepare) {
  constexpr int kWeightCopies = WeightCopy<C>::kPieces;
#pragma unroll 1
  for (int i = 0; i < C::kStages - 1; ++i) {
#pragma unroll
    for (int j = 0; j < kWeightCopies; ++j)
      copies(i * C::kStageBytes, range.first + i, j, i < range.count, false);
    copies.weights.next();
  }
  prepare();
  pdl_wait_and_launch_dependents();
#pragma unroll 1
  for (int i = 0; i < C::kStages - 1; ++i) {
    int stage = i * C::kStageBytes;
    bool wanted = i < range.count,
         x_rows_wanted = wanted && !copies.special(stage, range.first + i);
#pragma unroll
    for (int j = kWeightCopies; j < Copies::kAll; ++j)
      copies(stage, range.first + i, j, wanted, x_rows_wanted);
    copies.activations.next();
    commit_copies();
  }
}

// A block's main loop. Its K tiles go through a ring of C::kStages stages; C::kPieces times in the
// multiplication of a tile, a share of the copies for the stage that is filled meanwhile is issued,
// C::kCopiesAtOnce together: between the matrix instructions they cost next to nothing, before them
// a tenth of the time. (All are issued before it where C::kCopiesFirst.)
//
//   copies     Copies<C>(p, shared, origin, k_tile): weights, activations; copies(stage, k_tile, i,
//              wanted, x_rows_wanted) for i below kAll, the weights' first; copies.special(stage,
//              k_tile): handles the tile's rows of x if they cannot be copied that way, and says so
//   prepare()  what else must be in shared memory, independent of the kernels before
//   compute(stage, coord, sums, issue_copies): adds a tile's product, and calls issue_copies(i) for
//              i from 0 to C::kPieces - 1
template <class C, class Copies, class Params, class Prepare, class Compute>
__device__ __forceinline__ void multiply_tile(Params const& p, uint8_t* shared, Prepare prepare,
                                              Compute compute) {
  if (has_no_tile(p)) return;
  TileOrigin const origin(C(), p);
  if (threadIdx.x == 0) stored_origin() = origin;
  KRange range(p.k_tiles, blockIdx.y, p.splits);
  ThreadCoord<C> coord(threadIdx.x);
  Copies copies(p, shared, origin, range.first);
  fill_first_stages<C>(copies, range, prepare);

  typename C::Sums sums = {};
  int now = 0, next = (C::kStages - 1) * C::kStageBytes;  // the stages to compute from and to fill
#pragma unroll 1
  for (int i = 0; i < range.count; ++i) {
    wait_copies<C::kStages - 2>();
    __syncthreads();
    int ahead = i + C::kStages - 1;
    bool wanted = ahead < range.count,
         x_rows_wanted = wanted && !copies.special(next, range.first + ahead);
    auto copy = [&](int piece) {
#pragma unroll
      for (int j = 0; j < Copies::kAll; ++j)
        if (C::kCopiesFirst ||
            j / C::kCopiesAtOnce * C::kCopiesAtOnce * C::kPieces / Copies::kAll == piece)
          copies(next, range.first + ahead, j, wanted, x_rows_wanted);
    };
    if constexpr (C::kCopiesFirst) {
      if (wanted) copy(0);  // the branch keeps the compiler from moving them into the
                            // multiplication
      compute(shared + now, coord, sums, [](int) {});
    } else {
      compute(shared + now, coord, sums, copy);
    }
    commit_copies();
    copies.weights.next(), copies.activations.next();
    next = now;
    now = now == (C::kStages - 1) * C::kStageBytes ? 0 : now + C::kStageBytes;
  }
  wait_copies<0>();
  store_tile<C>(p, sums, shared);
}

}  // namespace cutlass_ops
