// Tiles of the persistent wgmma GEMM (hopper_gemm.cuh): the layout of a stage, arguments, the order
// of the tiles that a cluster computes, and the coordinates of a warpgroup's threads in them.
#pragma once

#include "cutlass_ops/layout.h"
#include "cutlass_ops/zero_compensation.h"
#include "device/epilogue.cuh"
#include "device/grouped.cuh"
#include "device/hopper.cuh"
#include "device/hopper_x_rows.cuh"
#include "dispatch/ctas.h"
#include "dispatch/problem.h"

namespace cutlass_ops::hopper {

struct Work;
struct Params;

// Sizes and the layout of a stage. A kernel's Config derives from it.
//   kElementBytes  of an activation
//   kScales        whether every stage brings the weights' scales
//   kZeros         whether every stage brings the weights' zero points
//   kXRowScales   whether every stage brings scales of the rows of x
//   kXRowZeros    whether activations have zero points, which come with their scales
//   kQuantizes     whether x arrives as 16-bit floats, which become codes in their place
//   kGrouped       whether rows of x and weights are experts' (GroupedWork)
//   kGroups        of columns in a K tile, each with scales and zero points of the weights
template <int kBits_, int kBlockM_, int kElementBytes, bool kScales_, bool kXRowScales_,
          bool kXRowZeros_, bool kZeros_, int kStages_, int kWarpgroups_ = 2,
          bool kQuantizes_ = false, bool kGrouped_ = false, int kGroups_ = 1>
struct TileConfig {
  static constexpr int kBits = kBits_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr bool kLoadScales = kScales_;
  static constexpr bool kLoadXRowScales = kXRowScales_;
  static constexpr bool kLoadXRowZeros = kXRowZeros_ && kXRowScales_;
  static constexpr bool kZeros = kZeros_;
  static constexpr int kStages = kStages_;
  static constexpr bool kPrepareScales = false;  // whether prepare_x_rows() prepares
                                                 // the weights' too
  static constexpr bool kGrouped = kGrouped_;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kImages = false;      // whether x may be an image
  static constexpr bool kSplitsRows = false;  // whether a cluster's CTAs may have different rows
                                              // of x (Params::splits_rows)
  static constexpr bool kShortTiles =
      false;  // whether a block loads less than half a tile where there are not as many rows of x
  using Work = hopper::Work;         // how clusters share tiles
  using Params = hopper::Params;     // of the kernel
  static constexpr int kLeastRows =  // of x, that a tile's MMAs take
      kGrouped ? least_taken_rows(kBlockM) : kBlockM;
  static constexpr int kWindowTiles = 0;            // tiles of K between one compensation
                                                    // (zero_compensation.h) and the next; 0: none
  static constexpr int kWarpgroups = kWarpgroups_;  // that multiply
  static constexpr bool kQuantizes = kQuantizes_;
  static constexpr int kLoadingWarpgroups = loading_warpgroups(kQuantizes);
  static constexpr int kThreads = wgmma_threads(kWarpgroups, kQuantizes);
  // Registers of a thread in a loading warpgroup, and in the others, which share the rest.
  static constexpr int kLoadingRegisters = kWarpgroups > 2 ? 32 : 40;
  static constexpr int kRegisters =
      ((65536 / kThreads / 8 * 8) * (kThreads / 128) - kLoadingRegisters * kLoadingWarpgroups) /
      kWarpgroups / 8 * 8;
  static constexpr int kRows = kRowsPerPanel * kWarpgroups;
  static constexpr int kCluster = 2;
  static constexpr int kSums = kBlockM / 2;  // registers of a thread

  static constexpr int kSwizzleBytes = 128;  // of a row of x, side by side in shared memory
  // a stage's rows of x: [panel][x_row][128 B]
  static constexpr int kColumnPanels = kKPerTile * (kQuantizes ? 2 : kElementBytes) / kSwizzleBytes;
  static constexpr int kPanelColumns = kKPerTile / kColumnPanels;
  static constexpr int kPanelBytes = kBlockM * kSwizzleBytes;

  static constexpr WgmmaCta kCta{kBits,        kBlockM,     kElementBytes, kScales_,
                                 kXRowScales_, kXRowZeros_, kZeros_,       kStages_,
                                 kWarpgroups_, kQuantizes_, kGroups_};
  static constexpr int kActivations = 0, kWeights = kCta.weights, kXRowScales = kCta.x_scales,
                       kXRowZeros = kCta.x_zeros, kXRowFactors = kCta.x_factors,
                       kScales = kCta.scales, kZeroPoints = kCta.zeros;
  // From a group's vectors to the next one's, in bytes.
  static constexpr int kNextScales = kRows * 4, kNextZeroPoints = kRows;
  static constexpr int kStageBytes = kCta.stage_bytes;

  static constexpr int kStoreRows = kCta.store_rows, kStoreStride = kCta.store_stride;
  static constexpr int kLineBytes = kCta.line_bytes, kLineRows = kCta.line_rows;
  // Lines of one copy.
  static constexpr int kXBoxRows = kGrouped ? kSlotRows : kCta.large ? 16 : kLineRows;
  static constexpr int kStoreBytes = kCta.store_bytes;
  static constexpr int kEndScales = kCta.end_scales, kEndZeros = kCta.end_zeros,
                       kEndBytes = kCta.end_bytes;
  static constexpr int kMoreBarrierBytes = kGrouped ? 128 : 0;
  static constexpr int kBarrierBytes = 256 + kMoreBarrierBytes,
                       kSharedBytes = kCta.shared_bytes + kMoreBarrierBytes;
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block may have");
  static_assert(kBlockM / kCluster % 8 == 0, "half of BLOCK_M is whole swizzle atoms");
};

struct Params {
  PackedWeight weight;
  QuantizedActivations x;  // int8 kernels: the scales
  EpilogueParams epilogue;
  float* splitk_workspace;  // for splitk_reduce or, in the order of registers, for the warps
                            // that add the slices
  uint64_t* flags;  // with the latter, [split tile][slice but the first][warp of the cluster]; null
                    // for splitk_reduce
  uint64_t flag;    // of this launch: a value that no other launch has
  int row_pairs, m_tiles, k_tiles, n_pad;
  int whole_tiles, split_tiles;  // the first tiles have all of K; the others are split
  int splits;                    // slices of a split tile
  StreamKTail tail_split;        // StreamKWork's slices
  int work_end, clusters;        // StreamKWork: a cluster takes each clusters-th from its number
                                 // on, below work_end
  int band_tiles;                // StreamKWork: of rows of x, that are computed together
  int group_tiles;               // tiles of K that share a weight scale, at least 1
  int tile_groups;               // groups in a tile of K, at least 1
  int scale_bytes;               // of one weight scale
  int offset_bytes;              // of one offset
  int half_x_rows;               // that a block loads of a tile
  bool store_halves;  // the outputs are 16-bit floats in whole lines, as is the residual, if there
                      // is one
  bool splits_rows;   // a cluster's CTAs have the same features and neighbouring tiles of rows of x
  ImageTiles image;   // whose pixels are the rows of x, if they are
  DataType x_type;    // of x that is quantised here,
  bool quantizes_rows;  // with one scale a row
};

// For kernels whose stages along K are tiles and, after each window of tiles, a compensation
// (zero_compensation.h). Params::k_tiles counts both.
struct CompensatedParams : Params {
  CUtensorMap zero_values;
  int weight_tiles;  // of K
};

// For experts' rows and weights; row_pairs counts those of one expert.
struct GroupedParams : Params {
  Groups groups;
  RowPieces rows;  // of x, where groups.positions names them
};

// The position of stage k among windows of kWindowTiles tiles, of which the last may be short.
template <int kWindowTiles>
struct WindowPosition {
  int window, compensation;  // the stage that ends the window
  int tile;                  // the next one, where this stage is the compensation
  __device__ __forceinline__ WindowPosition(int k, Params const& p)
      : window(k / (kWindowTiles + 1)),
        compensation(min(window * (kWindowTiles + 1) + kWindowTiles, p.k_tiles - 1)),
        tile(k - window) {}
};

// The first feature and the first row of x of a CTA's tile: the cluster's CTAs share one of the
// two. m_tiles and row_pairs count tiles of clusters. Features are those of one expert.
template <class C>
__device__ __forceinline__ int first_feature(int row_pair, int rank, Params const& p) {
  if (C::kSplitsRows && p.splits_rows) return row_pair * C::kRows;
  return (row_pair * C::kCluster + rank) * C::kRows;
}
template <class C>
__device__ __forceinline__ int first_x_row(typename C::Work const& work, int rank,
                                           Params const& p) {
  if constexpr (C::kGrouped) {
    return work.first_x_row;
  } else {
    int m_tile = work.m_tile;
    if (C::kSplitsRows && p.splits_rows) m_tile = m_tile * C::kCluster + rank;
    return m_tile * C::kBlockM;
  }
}

// The rows of x from a tile's first one on: an expert's, or as many as a tile has.
template <class C>
__device__ __forceinline__ int x_rows_of(typename C::Work const& work) {
  if constexpr (C::kGrouped) {
    return work.end_x_row - work.first_x_row;
  } else {
    return C::kBlockM;
  }
}

// A tile's MMAs take the least number of rows of x that has `rows`, of kMost, kMost - kStep and so
// on to kLeast. Calls f with it. Every lane has the same `rows`.
template <int kLeast, int kMost, int kStep, class F>
__device__ __forceinline__ void with_rows(int rows, F const& f) {
  constexpr int kSteps = (kMost - kLeast) / kStep;
  if constexpr (kSteps > 0) {
    constexpr int kUpper = kMost - kSteps / 2 * kStep;  // the least of the upper half
    if (rows <= kUpper - kStep) return with_rows<kLeast, kUpper - kStep, kStep>(rows, f);
    with_rows<kUpper, kMost, kStep>(rows, f);
  } else {
    f(std::integral_constant<int, kMost>());
  }
}

// with_rows()'s number for a tile of experts, and for the kernels' other tiles kBlockM.
template <class C, class F>
__device__ __forceinline__ void with_rows_of(typename C::Work const& work, F const& f) {
  with_rows<C::kLeastRows, C::kBlockM, row_step(C::kBlockM)>(x_rows_of<C>(work), f);
}
template <class C>
__device__ __forceinline__ int taken_rows(typename C::Work const& work) {
  constexpr int kStep = row_step(C::kBlockM), kMostSteps = (C::kBlockM - C::kLeastRows) / kStep;
  int const missing = max(0, C::kBlockM - x_rows_of<C>(work));
  return C::kBlockM - min(missing / kStep, kMostSteps) * kStep;
}

// The stage and phase of a ring's position.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ Ring before() const {
    return {stage == 0 ? kStages - 1 : stage - 1, stage == 0 ? phase ^ 1 : phase};
  }
};

// The end of a warp that loads: waits until all stages have been read. A CTA must not exit before
// the last arrivals of its neighbour at its barriers, which the relaxed barrier at a kernel's end
// does not order.
template <int kStages>
__device__ __forceinline__ void wait_until_read(uint64_t* empty, Ring<kStages> ring) {
#pragma unroll 1
  for (int i = 0; i < kStages; ++i, ring.advance())
    ClusterBarrier::wait(&empty[ring.stage], ring.phase ^ 1);
}

// A slice of the K of a split tile.
struct Part {
  int split_tile, split;
  __device__ __forceinline__ Part(int index, Params const& p) {
    index -= p.whole_tiles;
    int part = index / p.split_tiles;
    split_tile = index - part * p.split_tiles, split = p.splits - 1 - part;
  }
};

// Work: (pair of tiles along N, tile along M, split of K), tiles along M in bands (of 16) fastest,
// so that concurrent clusters share weights and rows of x in L2. First come the whole tiles, then
// the last slices of the split ones, then the slices before those.
struct Work {
  using Part = hopper::Part;
  int pair, m_tile, split = 0, splits = 1;
  __device__ __forceinline__ Work(int index, Params const& p, int const band_tiles = 16) {
    if (index >= p.whole_tiles) {
      Part part(index, p);
      split = part.split, splits = p.splits, index = p.whole_tiles + part.split_tile;
    }
    int band = index / (band_tiles * p.row_pairs), inside = index - band * band_tiles * p.row_pairs;
    int height = min(band_tiles, p.m_tiles - band * band_tiles);
    pair = inside / height;
    m_tile = band * band_tiles + inside - pair * height;
  }
  static __device__ __forceinline__ int count(Params const& p) {
    return p.whole_tiles + p.split_tiles * p.splits;
  }
  // Whether no other tile has the same weights.
  static __device__ __forceinline__ bool reads_once(Params const& p) { return p.m_tiles == 1; }
  __device__ __forceinline__ int first_k(Params const& p) const {
    return p.k_tiles * split / splits;
  }
  __device__ __forceinline__ int end_k(Params const& p) const {
    return p.k_tiles * (split + 1) / splits;
  }
};

// Part where a cluster takes the last slices of p.tail_split.tiles_per_cluster tiles, which are
// shorter, one after another. Slices of neighbouring tiles are multiplied at the same time, so that
// few columns of K are in flight and stay in L2; slices of equal length, which begin anywhere in K,
// are slower for that reason (docs/tuning-notes.md).
struct StreamKSlice {
  int split_tile, split;
  __device__ __forceinline__ StreamKSlice(int index, Params const& p) {
    index -= p.whole_tiles;
    int const round = p.tail_split.tiles_per_cluster > 1 ? index / p.clusters : 0;
    index -= round * p.clusters;
    if (index < p.tail_split.last) {
      split_tile = index + round * p.tail_split.last,
      split = split_tile < p.split_tiles ? p.tail_split.parts - 1 : -1;
    } else {
      int const part = (index - p.tail_split.last) / p.split_tiles;
      split_tile = index - p.tail_split.last - part * p.split_tiles,
      split = round > 0 ? -1 : p.tail_split.parts - 2 - part;
    }
  }
  __device__ __forceinline__ bool empty() const { return split < 0; }
};

// Only with 16-bit x: with it the compiler schedules wgmma_gemm_a8's main loops worse.
struct StreamKWork {
  using Part = StreamKSlice;
  int pair, m_tile;
  __device__ __forceinline__ StreamKWork(int index, Params const& p)
      : first_k_(0), end_k_(p.k_tiles) {
    if (index >= p.whole_tiles) {
      Part const part(index, p);
      first_k_ = p.tail_split.share_numerator * part.split / p.tail_split.share_denominator;
      if (part.split < p.tail_split.parts - 1)
        end_k_ = part.empty() ? first_k_
                              : p.tail_split.share_numerator * (part.split + 1) /
                                    p.tail_split.share_denominator;
      index = p.whole_tiles + part.split_tile;
    }
    int band = index / (p.band_tiles * p.row_pairs),
        inside = index - band * p.band_tiles * p.row_pairs;
    int height = min(p.band_tiles, p.m_tiles - band * p.band_tiles);
    pair = inside / height;
    m_tile = band * p.band_tiles + inside - pair * height;
  }
  static __device__ __forceinline__ int count(Params const& p) { return p.work_end; }
  // A cluster that finds no tile ends.
  __device__ __forceinline__ bool empty() const { return first_k_ == end_k_; }
  static __device__ __forceinline__ bool reads_once(Params const& p) { return p.m_tiles == 1; }
  __device__ __forceinline__ int first_k(Params const&) const { return first_k_; }
  __device__ __forceinline__ int end_k(Params const&) const { return end_k_; }

 private:
  int first_k_, end_k_;
};

// For experts: all pairs of row tiles for some tiles of an expert's rows of x, then for its other
// tiles.
template <int kBlockM>
struct GroupedWork {
  using Part = hopper::Part;
  int expert, pair, first_x_row, end_x_row;
  bool alone = false;  // whether it is the expert's only tile; StoredTiles do not pass it on
  __device__ __forceinline__ GroupedWork(int index, GroupedParams const& p,
                                         int const band_tiles = 16)
      : GroupedWork(index, p, band_tiles, read(index, p)) {}
  // `stored`: of the tile's rows, read ahead.
  static __device__ __forceinline__ int4 read(int index, GroupedParams const& p) {
    // No __ldg(), which the compiler may move before pdl_wait().
    return reinterpret_cast<int4 const*>(p.groups.tiles)[index / p.row_pairs];
  }
  __device__ __forceinline__ GroupedWork(int index, GroupedParams const& p, int const band_tiles,
                                         int4 const& stored) {
    int const rows = uniform(stored.z);
    expert = uniform(stored.x), first_x_row = uniform(stored.y), end_x_row = first_x_row + rows;
    index -= uniform(stored.w) * p.row_pairs;
    int const tiles = (rows + kBlockM - 1) / kBlockM;
    alone = tiles == 1;
    int const band = index / (band_tiles * p.row_pairs),
              inside = index - band * band_tiles * p.row_pairs;
    int const height = min(band_tiles, tiles - band * band_tiles);
    pair = inside / height;
    first_x_row += (band * band_tiles + inside - pair * height) * kBlockM;
  }
  // The producer of weights passes the tile to the consumers in shared memory (StoredTiles):
  // finding a tile takes a read of global memory and divisions, as many instructions as a K tile.
  __device__ __forceinline__ explicit GroupedWork(int4 const& stored)
      : expert(uniform(stored.x)),
        pair(uniform(stored.y)),
        first_x_row(uniform(stored.z)),
        end_x_row(uniform(stored.w)) {}
  __device__ __forceinline__ int4 stored() const {
    return make_int4(expert, pair, first_x_row, end_x_row);
  }
  static __device__ __forceinline__ int count(GroupedParams const& p) {
    return uniform(*p.groups.count) * p.row_pairs;
  }
  __device__ __forceinline__ bool empty() const { return false; }
  __device__ __forceinline__ bool reads_once(Params const&) const { return alone; }
  __device__ __forceinline__ int first_k(Params const&) const { return 0; }
  __device__ __forceinline__ int end_k(Params const& p) const { return p.k_tiles; }

 private:
  // The loaded values are the same in all lanes; this makes it visible to the compiler, so that
  // loops, ring positions and barriers stay in uniform registers.
  static __device__ __forceinline__ int uniform(int loaded) { return __shfl_sync(~0u, loaded, 0); }
};

// The end of the weight's rows for a tile: of an expert's rows, or of all.
template <class C>
__device__ __forceinline__ int rows_of_weight(typename C::Params const& p) {
  if constexpr (C::kGrouped) {
    return p.groups.row_panels * kRowsPerPanel;
  } else {
    return p.n_pad;
  }
}

// Whether the rows of x of a tile are read through an index, and by how many warps.
constexpr int kIndexWarps = 2;
template <class C>
__device__ __forceinline__ bool by_index(typename C::Params const& p) {
  if constexpr (C::kGrouped) {
    return p.groups.positions != nullptr;
  } else {
    return false;
  }
}

// The tiles of a cluster, for a warp that loads. Tiles of experts are read one tile ahead: for
// short sums the latency would be most of a tile's time.
template <class C>
class ClusterTiles {
  int index_, total_;
  int4 next_;  // of experts

  __device__ __forceinline__ void read(typename C::Params const& p) {
    if constexpr (C::kGrouped)
      if (index_ < total_) next_ = C::Work::read(index_, p);
  }

 public:
  __device__ __forceinline__ explicit ClusterTiles(typename C::Params const& p)
      : index_(blockIdx.x / C::kCluster), total_(C::Work::count(p)) {
    read(p);
  }
  __device__ __forceinline__ bool more() const { return index_ < total_; }
  __device__ __forceinline__ typename C::Work next(typename C::Params const& p,
                                                   int band_tiles = 16) {
    int const index = index_;
    index_ += gridDim.x / C::kCluster;
    if constexpr (C::kGrouped) {
      int4 const stored = next_;
      read(p);
      return typename C::Work(index, p, band_tiles, stored);
    } else {
      return typename C::Work(index, p, band_tiles);
    }
  }
};

// In shared memory, the tiles of experts that begin with one of kStages stages.
template <int kStages>
struct StoredTiles {
  int4 tiles[kStages];
};
template <>
struct StoredTiles<0> {};

// Barriers of kStages stages of experts' rows by index: this CTA's half has arrived.
template <int kStages>
struct HalfBarriers {
  uint64_t half[kStages];
};
template <>
struct HalfBarriers<0> {};

template <class C>
struct Barriers : StoredTiles<C::kGrouped ? C::kStages : 0>,
                  HalfBarriers<C::kGrouped ? C::kStages : 0> {
  uint64_t full[C::kStages], empty[C::kStages];
  uint64_t prepared[C::kStages];  // where stages bring scales of x: they are in the
                                  // accumulators' order
};

// The next tile of a thread that multiplies.
template <class C>
__device__ __forceinline__ typename C::Work next_tile(int index, typename C::Params const& p,
                                                      Barriers<C>& barriers,
                                                      Ring<C::kStages> const& ring) {
  if constexpr (C::kGrouped) {
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    return typename C::Work(barriers.tiles[ring.stage]);
  } else {
    return typename C::Work(index, p);
  }
}

// A thread's coordinates in a tile, and the offsets of its operands in a stage. The offsets are
// pinned in registers: the compiler would recompute them in every turn of the main loop.
template <class C>
struct ThreadCoord {
  int rank, warpgroup, warp, lane;
  int units, scales, zeros, x_row_factors;  // bytes from a stage's start

  __device__ __forceinline__ ThreadCoord(Params const& p, int rank, int warpgroup)
      : rank(rank), warpgroup(warpgroup), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
    int row = warpgroup * kRowsPerPanel + lane / 4 * 8 + warp * 2;  // in the order of group vectors
    units = C::kWeights + warpgroup * k_tile_bytes(C::kBits) + warp * (C::kBits / 2) * kUnitBytes +
            lane * kLaneBytes;
    scales = C::kScales + row * (C::kPrepareScales ? 4 : p.scale_bytes);
    zeros = C::kZeroPoints + row;
    x_row_factors = C::kXRowFactors + lane % 4 * 16;
    asm volatile("" : "+r"(units), "+r"(scales), "+r"(zeros), "+r"(x_row_factors));
  }
};

// The scales of a thread's rows as stored: a load from shared memory is slow while an MMA reads
// shared memory, and nothing should wait for one between products and their promotion. The second
// fp32 scale is loaded first: otherwise the compiler made that load wait for the loads of the next
// weights.
struct StoredScales {
  uint32_t words[2];

  StoredScales() = default;
  __device__ __forceinline__ StoredScales(uint8_t const* from, DataType type) { load(from, type); }

  __device__ __forceinline__ void load(uint8_t const* from, DataType type) {
    if (type == DataType::kFloat32) words[1] = *reinterpret_cast<uint32_t const*>(from + 4);
    words[0] = *reinterpret_cast<uint32_t const*>(from);
  }

  __device__ __forceinline__ void values(DataType type, float (&out)[2]) const {
    if (type == DataType::kFloat32) {
      out[0] = __uint_as_float(words[0]), out[1] = __uint_as_float(words[1]);
    } else {
      float2 half = __half22float2(reinterpret_cast<__half2 const&>(words[0]));
      bool is_half = type == DataType::kFloat16;
      out[0] = is_half ? half.x : __uint_as_float(words[0] << 16);
      out[1] = is_half ? half.y : __uint_as_float(words[0] & 0xffff0000u);
    }
  }
};

}  // namespace cutlass_ops::hopper
