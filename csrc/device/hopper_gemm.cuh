// What the wgmma kernels share: a persistent GEMM of clusters of two blocks whose ring of stages keeps turning from tile to
// tile.
//
// A block computes 128 output features x kBlockM (256 with four warpgroups that multiply). The two blocks of a cluster take
// neighbouring rows of W and the same rows of x, and each loads half of the rows of x for both.
//
//                       kBlockM ->
//             +---------------------------+
//   rows    0 | warpgroup 1: 64 x kBlockM |   block 0 of the cluster        A: weights, from shared memory through registers (one 16-byte load
//          64 | warpgroup 2               |                                    a lane is a fragment, layout.h), decoded on the way
//             +---------------------------+                                 B: rows of x, K-major in shared memory, 128-byte swizzle, by TMA multicast
//         128 | warpgroup 1               |   block 1
//         192 | warpgroup 2               |
//             +---------------------------+
//
// Warpgroup 0 loads: one warp the weights, one the rows of x, each waiting for a free stage; where stages bring token scales, a
// third brings them into the order of the accumulators. Warpgroups 1 and 2 run C::consume, each on its own, so that one keeps
// the tensor cores busy while the other promotes.
//
// Clusters take tiles in turn. The stream-K tail, which is left after full waves, may be split along K, so that all clusters
// end at about the same time (add_parts()); where the tiles fill no wave, all may be split, and splitk_reduce adds the slices.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/zero_compensation.h"
#include "device/epilogue.cuh"
#include "device/grouped.cuh"
#include "device/hopper.cuh"
#include "device/launch.cuh"
#include "dispatch/problem.h"
#include "dispatch/spec.h"

namespace cutlass_ops::hopper {

struct Work;
struct Params;

// Sizes and the layout of a stage. A kernel's Config derives from it.
//   kElementBytes: of an activation; kScales, kTokenScales: whether every stage brings them; kZeros: whether it brings the weights' zero points
//   kTokenZeros: whether activations have zero points, which come with their scales
template <int kBits_, int kBlockM_, int kElementBytes, bool kScales_, bool kTokenScales_, bool kTokenZeros_, bool kZeros_,
          int kStages_, int kWarpgroups_ = 2>
struct TileConfig {
  static constexpr int kBits = kBits_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr bool kLoadScales = kScales_;
  static constexpr bool kLoadTokenScales = kTokenScales_;
  static constexpr bool kLoadTokenZeros = kTokenZeros_ && kTokenScales_;
  static constexpr bool kZeros = kZeros_;
  static constexpr int kStages = kStages_;
  static constexpr bool kPrepareScales = false;  // whether prepare_x_rows() prepares the weights' too
  static constexpr bool kGrouped = false;        // whether rows of x and weights are experts' (GroupedWork)
  static constexpr bool kShortTiles =
      false;                              // whether a block loads less than half a tile where there are not as many rows of x
  using Work = hopper::Work;              // how clusters share tiles
  using Params = hopper::Params;          // of the kernel
  static constexpr int kWindowTiles = 0;  // tiles of K between one compensation (zero_compensation.h) and the next; 0: none
  static constexpr int kWarpgroups = kWarpgroups_;  // that multiply
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // Of a thread of the warpgroup that loads, and of the others, which have what is left of those of a launch.
  static constexpr int kLoadingRegisters = kWarpgroups > 2 ? 32 : 40;
  static constexpr int kRegisters = ((65536 / kThreads / 8 * 8) * (kWarpgroups + 1) - kLoadingRegisters) / kWarpgroups / 8 * 8;
  static constexpr int kRows = kRowsPerPanel * kWarpgroups;
  static constexpr int kCluster = 2;
  static constexpr int kSums = kBlockM / 2;  // registers of a thread

  static constexpr int kSwizzleBytes = 128;                                        // of a token, side by side in shared memory
  static constexpr int kColumnPanels = kKPerTile * kElementBytes / kSwizzleBytes;  // a stage's rows of x: [panel][token][128 B]
  static constexpr int kPanelColumns = kKPerTile / kColumnPanels;
  static constexpr int kPanelBytes = kBlockM * kSwizzleBytes;
  static constexpr int kActivations = 0;
  static constexpr int kWeights = kActivations + kColumnPanels * kPanelBytes;
  static constexpr int kTokenScales = kWeights + kWarpgroups * k_tile_bytes(kBits);
  static constexpr int kTokenZeros = kTokenScales + (kLoadTokenScales ? kBlockM * 4 : 0);
  static constexpr int kTokenFactors = kTokenZeros + (kLoadTokenZeros ? kBlockM : 0);  // what prepare_x_rows() makes of both
  static constexpr int kScales = kTokenFactors + (kLoadTokenScales ? kBlockM * 4 : 0) + (kLoadTokenZeros ? kBlockM * 4 : 0);
  static constexpr int kZeroPoints = kScales + (kLoadScales ? kRows * 4 : 0);
  static constexpr int kStageBytes =
      (kZeroPoints + (kZeros ? kRows : 0) + 1023) / 1024 * 1024;  // the swizzle repeats every 1024

  // Rows of x that leave through shared memory at a time, as floats and as lines of 16-bit outputs, and the lines of one copy.
  // Stages of more than 176 rows of x leave little room: least where these have two bytes.
  static constexpr bool kLargeBlockM = kBlockM > 176 && kElementBytes == 2;
  static constexpr int kStoreRows = kLargeBlockM ? 16 : kBlockM % 32 ? kBlockM / 2 : 32;
  static constexpr int kStoreStride = kRowsPerPanel + 4;  // floats; keeps the transposing writes off each other's banks
  static constexpr int kLineBytes = kRowsPerPanel * 2;
  static constexpr int kLineRows = kLargeBlockM ? (kBits == 8 ? 64 : 112) : kBlockM > 176 && kBits == 8 ? kBlockM / 2 : kBlockM;
  static constexpr int kXBoxRows = kLargeBlockM ? 16 : kLineRows;
  static constexpr int kStagedFloats = kStoreStride * 4 * kStoreRows, kStagedLines = kLineBytes * kLineRows;  // bytes
  static constexpr int kStoreBytes = kWarpgroups * (kStagedFloats > kStagedLines ? kStagedFloats : kStagedLines);
  // Behind the staged outputs: token zero points, 16 times where they are an operand (with group scales), for each warpgroup,
  // then token scales, which are applied at the end, for each. compute-sanitizer takes an operand whose rows repeat for twice
  // its length, so that much memory follows the last.
  static constexpr int kEndScales = kElementBytes == 1 && !kLoadTokenScales ? kBlockM : 0;
  static constexpr int kEndZeros = kTokenZeros_ ? kEndScales * (kLoadScales ? 16 : 1) : 0;  // bytes
  static constexpr int kEndScaleBytes = kWarpgroups * kEndScales * 4;
  static constexpr int kEndBytes = kWarpgroups * kEndZeros + (kEndScaleBytes > kEndZeros ? kEndScaleBytes : kEndZeros);
  static constexpr int kSharedBytes = kStages * kStageBytes + kStoreBytes + kEndBytes + 256;
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block may have");
  static_assert(kBlockM / kCluster % 8 == 0, "half of BLOCK_M is whole swizzle atoms");
};

struct Params {
  PackedWeight weight;
  QuantizedActivations x;  // int8 kernels: the scales
  EpilogueParams epilogue;
  float* splitk_workspace;  // for splitk_reduce or, in the order of registers, for the warps that add the slices
  uint64_t* flags;          // with the latter, [split tile][slice but the first][warp of the cluster]; null for splitk_reduce
  uint64_t flag;            // of this launch: it is found nowhere else
  int row_pairs, m_tiles, k_tiles, n_pad;
  int whole_tiles, split_tiles;  // the first tiles have all of K; the others are split
  int splits;                    // slices of a split tile
  StreamKTail tail_split;        // StreamKWork's slices
  int work_end, clusters;        // StreamKWork: a cluster takes each clusters-th from its number on, below work_end
  int band_tiles;                // StreamKWork: of rows of x, that are computed together
  int group_tiles;               // tiles of K that share a weight scale, at least 1
  int tile_groups;               // groups in a tile of K, at least 1
  int scale_bytes;               // of one weight scale
  int offset_bytes;              // of one offset
  int half_x_rows;               // that a block loads of a tile
  bool store_halves;             // the outputs are 16-bit floats in whole lines, of an epilogue that needs no more than bounds
};

// Of kernels whose stages of K are its tiles and, after each window of these, a compensation (zero_compensation.h).
// Params::k_tiles counts both.
struct CompensatedParams : Params {
  CUtensorMap zero_values;
  int weight_tiles;  // of K
};

// Of experts' rows and weights; row_pairs are of one expert.
struct GroupedParams : Params {
  Groups groups;
};

// Where stage k of K lies among windows of kWindowTiles tiles, of which the last may be short.
template <int kWindowTiles>
struct WindowPosition {
  int window, compensation;  // the stage that ends the window
  int tile;                  // the next one, where this stage is the compensation
  __device__ __forceinline__ WindowPosition(int k, Params const& p)
      : window(k / (kWindowTiles + 1)),
        compensation(min(window * (kWindowTiles + 1) + kWindowTiles, p.k_tiles - 1)),
        tile(k - window) {}
};

// The stage and phase of a ring's position.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// A slice of the K of a split tile.
struct Part {
  int split_tile, split;
  __device__ __forceinline__ Part(int index, Params const& p) {
    index -= p.whole_tiles;
    int part = index / p.split_tiles;
    split_tile = index - part * p.split_tiles, split = p.splits - 1 - part;
  }
};

// Work: (pair of row tiles, token tile, split of K), token tiles in bands (of 16) fastest, so that what runs together shares
// weights and rows of x in L2. First come the whole tiles, then the last slices of the split ones, then the slices before
// those.
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
  static __device__ __forceinline__ int count(Params const& p) { return p.whole_tiles + p.split_tiles * p.splits; }
  __device__ __forceinline__ int first_k(Params const& p) const { return p.k_tiles * split / splits; }
  __device__ __forceinline__ int end_k(Params const& p) const { return p.k_tiles * (split + 1) / splits; }
};

// The same where a cluster takes the last slices of p.tail_split.tiles_per_cluster tiles, which are shorter, one after another:
// those of neighbouring tiles are multiplied at a time, so that the columns of K in flight stay few, as the cache wants it.
// (Slices of equal length, which begin anywhere in K, took M = 1024, 8192 x 28672 in W8A16 from 675 to 720 us.)
struct StreamKSlice {
  int split_tile, split;
  __device__ __forceinline__ StreamKSlice(int index, Params const& p) {
    index -= p.whole_tiles;
    int const round = p.tail_split.tiles_per_cluster > 1 ? index / p.clusters : 0;
    index -= round * p.clusters;
    if (index < p.tail_split.last) {
      split_tile = index + round * p.tail_split.last, split = split_tile < p.split_tiles ? p.tail_split.parts - 1 : -1;
    } else {
      int const part = (index - p.tail_split.last) / p.split_tiles;
      split_tile = index - p.tail_split.last - part * p.split_tiles, split = round > 0 ? -1 : p.tail_split.parts - 2 - part;
    }
  }
  __device__ __forceinline__ bool empty() const { return split < 0; }
};

// Only with 16-bit x: wgmma_gemm_a8's main loops are scheduled worse with it, M = 1024, 28672 x 4096 in W8A8 take 265 us
// instead of 256.
struct StreamKWork {
  using Part = StreamKSlice;
  int pair, m_tile;
  __device__ __forceinline__ StreamKWork(int index, Params const& p) : first_k_(0), end_k_(p.k_tiles) {
    if (index >= p.whole_tiles) {
      Part const part(index, p);
      first_k_ = p.tail_split.share_numerator * part.split / p.tail_split.share_denominator;
      if (part.split < p.tail_split.parts - 1)
        end_k_ = part.empty() ? first_k_ : p.tail_split.share_numerator * (part.split + 1) / p.tail_split.share_denominator;
      index = p.whole_tiles + part.split_tile;
    }
    int band = index / (p.band_tiles * p.row_pairs), inside = index - band * p.band_tiles * p.row_pairs;
    int height = min(p.band_tiles, p.m_tiles - band * p.band_tiles);
    pair = inside / height;
    m_tile = band * p.band_tiles + inside - pair * height;
  }
  static __device__ __forceinline__ int count(Params const& p) { return p.work_end; }
  // A cluster that finds nothing is at its end.
  __device__ __forceinline__ bool empty() const { return first_k_ == end_k_; }
  __device__ __forceinline__ int first_k(Params const&) const { return first_k_; }
  __device__ __forceinline__ int end_k(Params const&) const { return end_k_; }

 private:
  int first_k_, end_k_;
};

// Of experts: all pairs of row tiles for some tiles of an expert's rows of x, then for its others.
template <int kBlockM>
struct GroupedWork {
  using Part = hopper::Part;
  int expert, pair, first_x_row, end_x_row;
  __device__ __forceinline__ GroupedWork(int index, GroupedParams const& p, int const band_tiles) {
    int4 const stored = __ldg(reinterpret_cast<int4 const*>(p.groups.tiles) + index / p.row_pairs);
    index -= stored.w * p.row_pairs;
    int const tiles = (stored.z + kBlockM - 1) / kBlockM;
    int const band = index / (band_tiles * p.row_pairs), inside = index - band * band_tiles * p.row_pairs;
    int const height = min(band_tiles, tiles - band * band_tiles);
    pair = inside / height, expert = stored.x;
    first_x_row = stored.y + (band * band_tiles + inside - pair * height) * kBlockM, end_x_row = stored.y + stored.z;
  }
  static __device__ __forceinline__ int count(GroupedParams const& p) { return __ldg(p.groups.count) * p.row_pairs; }
  __device__ __forceinline__ int first_k(Params const&) const { return 0; }
  __device__ __forceinline__ int end_k(Params const& p) const { return p.k_tiles; }
};

template <class C>
struct Barriers {
  uint64_t full[C::kStages], empty[C::kStages];
  uint64_t prepared[C::kStages];  // where stages bring token scales: they are in the accumulators' order
};

// One warp starts the copies of weights, scales and zero points. They do not depend on the kernel before and start at once.
template <class C>
__device__ __forceinline__ void produce_weights(uint8_t* stages, Barriers<C>& barriers, typename C::Params const& p, int rank) {
  using Copy = cute::SM90_BULK_COPY_G2S;
  constexpr int kChunk = k_tile_bytes(C::kBits);
  bool leader = cute::elect_one_sync();
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
    int row0 = (work.pair * C::kCluster + rank) * C::kRows, k = work.first_k(p), end = work.end_k(p);
    int row_panels = max(0, min(C::kWarpgroups, (p.n_pad - row0) / kRowsPerPanel));  // the last pair may reach beyond N
    int bytes = row_panels * (kChunk + kRowsPerPanel * ((C::kLoadScales ? p.scale_bytes : 0) + (C::kZeros ? 1 : 0)));
    // 32-bit indices, not pointers: this role has 40 registers.
    int weight_tiles = p.k_tiles, tile = k;
    if constexpr (C::kWindowTiles > 0) weight_tiles = p.weight_tiles, tile = WindowPosition<C::kWindowTiles>(k, p).tile;
    int chunk = row0 / kRowsPerPanel * weight_tiles + tile, group = tile / p.group_tiles;
    int until_next = (group + 1) * p.group_tiles - tile, vector = group * p.n_pad + row0;
#pragma unroll 1
    for (; k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      uint64_t* full = &barriers.full[ring.stage];
      ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      if constexpr (C::kWindowTiles > 0) {
        WindowPosition<C::kWindowTiles> const coord(k, p);
        if (k == coord.compensation) {
          pdl_wait();  // the product's own launch may have made the sums
          if (leader) {
            int const windows = p.k_tiles - weight_tiles;
            TransactionBarrier::arrive_and_expect_tx(full, row_panels * (kChunk + kRowsPerPanel * p.scale_bytes));
#pragma unroll
            for (int row_panel = 0; row_panel < C::kWarpgroups; ++row_panel) {
              if (row_panel < row_panels)
                Copy::copy(p.weight.sums + (int64_t(row0 / kRowsPerPanel + row_panel) * windows + coord.window) * kChunk, full,
                           stage + C::kWeights + row_panel * kChunk, kChunk);
            }
            if (row_panels > 0)
              Copy::copy(static_cast<uint8_t const*>(p.weight.sum_scales) + int64_t(row0) * p.scale_bytes, full,
                         stage + C::kScales, row_panels * kRowsPerPanel * p.scale_bytes);
          }
          continue;
        }
      }
      if (leader) {
        TransactionBarrier::arrive_and_expect_tx(full, bytes);
#pragma unroll
        for (int row_panel = 0; row_panel < C::kWarpgroups; ++row_panel) {
          if (row_panel < row_panels)
            Copy::copy(p.weight.codes + int64_t(chunk + row_panel * weight_tiles) * kChunk, full,
                       stage + C::kWeights + row_panel * kChunk, kChunk);
        }
        if (C::kLoadScales && row_panels > 0) {
          Copy::copy(static_cast<uint8_t const*>(p.weight.scales) + int64_t(vector) * p.scale_bytes, full, stage + C::kScales,
                     row_panels * kRowsPerPanel * p.scale_bytes);
        }
        if (C::kZeros && row_panels > 0)
          Copy::copy(p.weight.zeros + vector, full, stage + C::kZeroPoints, row_panels * kRowsPerPanel);
      }
      ++chunk;
      if (--until_next == 0) until_next = p.group_tiles, vector += p.n_pad;
    }
  }
}

// Of a tile's rows of x, those that a block loads for both: half, or, of C::kShortTiles, half of all rows of x, in eights, if
// they are fewer. (Rows beyond the last come as zeros, at 8 bytes a clock: M = 40, 14336 x 4096 in W8A16 took 21.2 us, and 64
// rows of x 19.4.)
template <class C>
constexpr int half_x_rows(int m) {
  constexpr int kHalf = C::kBlockM / C::kCluster, kAtom = 8;  // rows that the swizzle repeats after
  static_assert(C::kCluster == 2);
  return C::kShortTiles ? std::min(kHalf, (m + 2 * kAtom - 1) / (2 * kAtom) * kAtom) : kHalf;
}

// Another starts those of the rows of x, this block's half of the tile for both blocks, and of their scales.
template <class C>
__device__ __forceinline__ void produce_x_rows(uint8_t* stages, Barriers<C>& barriers, typename C::Params const& p,
                                               CUtensorMap const& map, int rank) {
  int const half = C::kShortTiles ? p.half_x_rows : C::kBlockM / C::kCluster;
  constexpr uint16_t kEveryBlock = (1 << C::kCluster) - 1;
  pdl_wait_and_launch_dependents();
  bool leader = cute::elect_one_sync();
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
    int m0 = work.m_tile * C::kBlockM, end = work.end_k(p);
    int scaled = C::kLoadTokenScales ? min(C::kBlockM, p.x.stride - m0) : 0;
    int bytes = C::kColumnPanels * C::kCluster * half * C::kSwizzleBytes + scaled * (C::kLoadTokenZeros ? 5 : 4);
#pragma unroll 1
    for (int k = work.first_k(p); k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      uint64_t* full = &barriers.full[ring.stage];
      ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      if constexpr (C::kWindowTiles > 0) {
        WindowPosition<C::kWindowTiles> const coord(k, p);
        bool const compensates = k == coord.compensation;
        int const row = compensates ? coord.window * C::kWindowTiles / kTilesPerZeroRow : coord.tile;
        if (leader) {
          TransactionBarrier::arrive_and_expect_tx(full, bytes);
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(compensates ? &p.zero_values : &map, full, kEveryBlock,
                                                 uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                                 stage + C::kActivations + rank * half * C::kSwizzleBytes,
                                                 row * (compensates ? kZeroRow : kKPerTile), m0 + rank * half);
          cute::SM90_BULK_COPY_G2S::copy((compensates ? p.x.zero_scales : p.x.scales) + int64_t(row) * p.x.stride + m0, full,
                                         stage + C::kTokenScales, scaled * 4);
        }
      } else if (leader) {
        TransactionBarrier::arrive_and_expect_tx(full, bytes);
#pragma unroll
        for (int panel = 0; panel < C::kColumnPanels; ++panel) {
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(
              &map, full, kEveryBlock, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
              stage + C::kActivations + panel * C::kPanelBytes + rank * half * C::kSwizzleBytes,
              k * kKPerTile + panel * C::kPanelColumns, m0 + rank * half);
        }
        int64_t vector = int64_t(k) * p.x.stride + m0;
        if (scaled) cute::SM90_BULK_COPY_G2S::copy(p.x.scales + vector, full, stage + C::kTokenScales, scaled * 4);
        if (C::kLoadTokenZeros) cute::SM90_BULK_COPY_G2S::copy(p.x.zeros + vector, full, stage + C::kTokenZeros, scaled);
      }
    }
  }
}

// A warp brings every stage's token scales, and behind them zero points as floats, into the accumulators' order, so that a
// thread has those of its four rows of x of 16 by one load. Register 4j + e % 2 of a thread is of token 8j + 2t + e: place 4t +
// 2 (j % 2) + e. Where C::kPrepareScales, it also makes the weights' scales fp32 numbers, times C::kUnit, in their place.
template <class C>
__device__ __forceinline__ void prepare_x_rows(uint8_t* stages, Barriers<C>& barriers, Params const& p) {
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p), lane = threadIdx.x % 32;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
#pragma unroll 1
    for (int k = work.first_k(p), end = work.end_k(p); k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
#pragma unroll
      for (int first = 0; first < C::kBlockM / 4; first += 32) {
        int four = first + lane, x_row = four / 4 * 16 + four % 4 * 2;  // and token + 1, + 8 and + 9
        if (first + 32 <= C::kBlockM / 4 || four < C::kBlockM / 4) {
          auto* scales = reinterpret_cast<float2 const*>(stage + C::kTokenScales + x_row * 4);
          float2 low = scales[0], high = scales[4];
          auto* factors = reinterpret_cast<float4*>(stage + C::kTokenFactors) + four;
          factors[0] = make_float4(low.x, low.y, high.x, high.y);
          if constexpr (C::kLoadTokenZeros) {
            auto* zeros = reinterpret_cast<char2 const*>(stage + C::kTokenZeros + x_row);
            char2 low_zeros = zeros[0], high_zeros = zeros[4];
            factors[C::kBlockM / 4] = make_float4(low_zeros.x, low_zeros.y, high_zeros.x, high_zeros.y);
          }
        }
      }
      if constexpr (C::kPrepareScales) {
        static_assert(C::kRows % 128 == 0, "a lane takes four at a time");
        float scales[C::kRows / 32];
#pragma unroll
        for (int i = 0; i < C::kRows / 32; i += 4) {
          load_float4(stage + C::kScales, p.weight.scale_type, i * 32 + lane * 4, reinterpret_cast<float (&)[4]>(scales[i]));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < C::kRows / 32; i += 4) {
          reinterpret_cast<float4*>(stage + C::kScales)[i * 8 + lane] =
              make_float4(scales[i] * C::kUnit, scales[i + 1] * C::kUnit, scales[i + 2] * C::kUnit, scales[i + 3] * C::kUnit);
        }
        cutlass::arch::fence_view_async_shared();  // before the copies that come next to this place
      }
      ClusterBarrier::arrive(&barriers.prepared[ring.stage]);
    }
  }
}

// The warpgroups that multiply leave zeros in the place of rows of x that no copy brings, while the first copies are in flight:
// with zeros products took less time than with stale data (M = 40, 8192 x 28672 in W8A16 63 us, and 67).
template <class C>
__device__ __forceinline__ void clear_missing_x_rows(uint8_t* stages, Params const& p) {
  int const loaded = C::kCluster * p.half_x_rows * C::kSwizzleBytes;
  if (loaded == C::kPanelBytes) return;
  constexpr int kMultiplying = C::kThreads - 128;
  for (int panel = 0; panel < C::kStages * C::kColumnPanels; ++panel) {
    uint8_t* x_rows =
        stages + panel / C::kColumnPanels * C::kStageBytes + C::kActivations + panel % C::kColumnPanels * C::kPanelBytes;
    for (int byte = loaded + (threadIdx.x - 128) * 16; byte < C::kPanelBytes; byte += kMultiplying * 16)
      *reinterpret_cast<uint4*>(x_rows + byte) = uint4{};
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kMultiplying, C::kWarpgroups + 1);
}

// A thread's coordinates in a tile, and the offsets of its operands in a stage. The offsets are pinned in registers: the
// compiler would recompute them in every turn of the main loop.
template <class C>
struct ThreadCoord {
  int rank, warpgroup, warp, lane;
  int units, scales, zeros, token_factors;  // bytes from a stage's start

  __device__ __forceinline__ ThreadCoord(Params const& p, int rank, int warpgroup)
      : rank(rank), warpgroup(warpgroup), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
    int row = warpgroup * kRowsPerPanel + lane / 4 * 8 + warp * 2;  // in the order of group vectors
    units = C::kWeights + warpgroup * k_tile_bytes(C::kBits) + warp * (C::kBits / 2) * kUnitBytes + lane * kLaneBytes;
    scales = C::kScales + row * (C::kPrepareScales ? 4 : p.scale_bytes);
    zeros = C::kZeroPoints + row;
    token_factors = C::kTokenFactors + lane % 4 * 16;
    asm volatile("" : "+r"(units), "+r"(scales), "+r"(zeros), "+r"(token_factors));
  }
};

// The scales of a thread's rows as they are stored: a load from shared memory takes long while an MMA reads shared memory, and
// nothing should wait for one between products and their promotion. The second of fp32 is loaded first: otherwise the compiler
// let that load wait until the next weights were loaded too.
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

// The usual outputs: a thread finishes and rounds its own sums, whose rows it holds two of; transposing stores put each token's
// 64 outputs side by side, in the 128-byte swizzle, and one thread's copy stores them while the next tile is begun. The general
// path below takes many times as long, and meanwhile the ring of stages stands still for both blocks.
template <class C>
__device__ __forceinline__ void store_halves(float (&sums)[C::kSums], float* staging, CUtensorMap const& map, Params const& p,
                                             ThreadCoord<C> const& coord, int row0, int m0, int end) {
  EpilogueParams const& e = p.epilogue;
  int n = row0 + coord.warpgroup * kRowsPerPanel, barrier = 1 + coord.warpgroup;
  bool copies = coord.warp == 0 && coord.lane == 0;
  // Each choice is made once for all sums: made for each of them, they take twice as many instructions.
  bool clamped = e.activation != Activation::kNone;
#pragma unroll
  for (float& sum : sums) sum = nan_unless_finite(sum);
  if (e.bias) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = n + coord.warp * 16 + coord.lane / 4 + h * 8;
      float bias = row < e.n ? load_float(e.bias, e.bias_type, row) : 0.0f;
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) {
        if (i % 4 / 2 == h) sums[i] += bias;
      }
    }
  }
  if (clamped || e.limit < HUGE_VALF) {
    float low = fmaxf(clamped ? e.low : -HUGE_VALF, -e.limit), high = fminf(clamped ? e.high : HUGE_VALF, e.limit);
#pragma unroll
    for (float& sum : sums) sum = clamp_keeping_nan(sum, low, high);
  }
#pragma unroll
  for (int first = 0; first < C::kBlockM; first += C::kLineRows) {
    if (copies) cute::tma_store_wait<0>();  // the lines before have been read
    cutlass::arch::NamedBarrier::sync(128, barrier);
    uint8_t* lines = reinterpret_cast<uint8_t*>(staging) + coord.warpgroup * C::kLineRows * C::kLineBytes;
    // Four 8 x 8 matrices an instruction: rows g and g + 8 of eight rows of x, then of the next eight. The lane gives the
    // address of one line of one.
    int matrix =
        (coord.lane / 16 * 8 + coord.lane % 8) * C::kLineBytes + ((coord.warp * 2 + coord.lane / 8 % 2) ^ coord.lane % 8) * 16;
    auto const stage = [&](auto type) {
#pragma unroll
      for (int j = 0; j < C::kLineRows / 16 && first + 16 * j < C::kBlockM; ++j) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float const* pair = sums + first / 2 + 8 * j + 2 * i;
          pairs[i] = pack_pair<decltype(type)>(pair[0], pair[1]);
        }
        cute::SM90_U16x8_STSM_T::copy(pairs[0], pairs[1], pairs[2], pairs[3],
                                      *reinterpret_cast<cute::uint128_t*>(lines + matrix + j * 16 * C::kLineBytes));
      }
    };
    if (e.out_type == DataType::kFloat16) {
      stage(__half());
    } else {
      stage(__nv_bfloat16());
    }
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(128, barrier);
    if (copies && n < e.n) {
#pragma unroll
      for (int i = 0; i < C::kLineRows && first + i < C::kBlockM; i += C::kXBoxRows) {
        if (!C::kGrouped || m0 + first + i < end)
          cute::SM90_TMA_STORE_2D::copy(&map, lines + i * C::kLineBytes, n, m0 + first + i);
      }
      cute::tma_store_arrive();
    }
  }
}

// A slice of a tile of the stream-K tail: the warps of all clusters but the one with the first slice store their sums in the
// workspace, in the order of registers, and set their flags; those of the first wait for the flags, add in the order of K, and
// return true: they store the tile. They wait only for clusters of lower numbers, which were started before. The workspace is
// uninitialised, but holds no flag of this launch: a flag is cleared by its reader, so that a graph replays the same launch
// correctly.
template <class C>
__device__ __forceinline__ bool add_parts(float (&sums)[C::kSums], Params const& p, ThreadCoord<C> const& coord,
                                          typename C::Work::Part part) {
  constexpr int kStride = C::kCluster * C::kWarpgroups * C::kSums * 128;  // floats of a slice
  int row_panel = coord.rank * C::kWarpgroups + coord.warpgroup, others = p.splits - 1;
  float* parts = p.splitk_workspace + int64_t(part.split_tile * others) * kStride + row_panel * C::kSums * 128 +
                 coord.warp * 32 + coord.lane;
  constexpr int kFlags = C::kCluster * C::kWarpgroups * 4;
  uint64_t* flags = p.flags + part.split_tile * others * kFlags + row_panel * 4 + coord.warp;
  // One float at a time: a vector needs consecutive registers, and the main loop runs slower (up to 4 %) with such a register
  // assignment.
  if (part.split > 0) {
    float* to = parts + int64_t(part.split - 1) * kStride;
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) __stcg(to + i * 128, sums[i]);
    __syncwarp();
    if (coord.lane == 0) {
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flags + (part.split - 1) * kFlags), "l"(p.flag) : "memory");
    }
    return false;
  }
  if (coord.lane < others) {
    uint64_t found;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flags + coord.lane * kFlags) : "memory");
    } while (found != p.flag);
    flags[coord.lane * kFlags] = 0;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < others; ++i, parts += kStride) {
#pragma unroll
    for (int j = 0; j < C::kSums; ++j) sums[j] += __ldcg(parts + j * 128);
  }
  return true;
}

// Epilogue store of a tile, or of a slice of one, through shared memory, kStoreRows at a time, so that whole lines are stored.
// `end`: of an expert's rows of x.
template <class C>
__device__ __forceinline__ void store(float (&sums)[C::kSums], float* staging, CUtensorMap const& map, Params const& p,
                                      ThreadCoord<C> const& coord, int index, int row0, int m0, int end = 0) {
  float* splitk_workspace = nullptr;
  if (!C::kGrouped && index >= p.whole_tiles) {
    typename C::Work::Part const part(index, p);
    if (!p.flags) {
      splitk_workspace = p.splitk_workspace + int64_t(part.split) * p.epilogue.m * p.n_pad;
    } else if (!add_parts<C>(sums, p, coord, part)) {
      return;
    }
  }
  if (p.store_halves) return store_halves<C>(sums, staging, map, p, coord, row0, m0, end);
  int n = row0 + coord.warpgroup * kRowsPerPanel, thread = coord.warp * 32 + coord.lane, barrier = 1 + coord.warpgroup;
  staging += coord.warpgroup * C::kStoreRows * C::kStoreStride;
#pragma unroll
  for (int first = 0; first < C::kBlockM; first += C::kStoreRows) {
    cutlass::arch::NamedBarrier::sync(128, barrier);  // what was staged before has been read
#pragma unroll
    for (int i = 0; i < C::kStoreRows / 2; ++i) {
      int x_row = i / 4 * 8 + coord.lane % 4 * 2 + i % 2, row = coord.warp * 16 + coord.lane / 4 + i % 4 / 2 * 8;
      staging[x_row * C::kStoreStride + row] = sums[first / 2 + i];
    }
    cutlass::arch::NamedBarrier::sync(128, barrier);
    int column = thread % 8 * 8;
    if (n + column >= (splitk_workspace ? p.n_pad : p.epilogue.n)) continue;
#pragma unroll 1
    for (int x_row = thread / 8; x_row < C::kStoreRows && m0 + first + x_row < (C::kGrouped ? end : p.epilogue.m);
         x_row += 16) {
      float4 const* source = reinterpret_cast<float4 const*>(staging + x_row * C::kStoreStride + column);
      float4 a = source[0], b = source[1];
      if (splitk_workspace) {
        float4* to = reinterpret_cast<float4*>(splitk_workspace + int64_t(m0 + first + x_row) * p.n_pad + n + column);
        to[0] = a, to[1] = b;
      } else {
        float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        store_outputs(v, m0 + first + x_row, n + column, p.epilogue);
      }
    }
  }
}

// The body of a kernel; `stages` is its dynamic shared memory.
template <class C>
__device__ __forceinline__ void run(uint8_t* stages, CUtensorMap const& map, CUtensorMap const& out_map,
                                    typename C::Params const& p) {
  auto* staging = reinterpret_cast<float*>(stages + C::kStages * C::kStageBytes);
  static_assert(sizeof(Barriers<C>) <= 256);
  auto& barriers = *reinterpret_cast<Barriers<C>*>(stages + C::kSharedBytes - 256);
  int rank = int(cute::block_rank_in_cluster()), warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      TransactionBarrier::init(&barriers.full[i], 2);  // the two loading threads
      ClusterBarrier::init(&barriers.empty[i], C::kCluster * C::kWarpgroups * 4);
      ClusterBarrier::init(&barriers.prepared[i], 32);  // the lanes of a warp
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::kLoadingRegisters>();
    // The same in all lanes, as the compiler can see: then a role's addresses stay in the uniform registers that copies take
    // them from. Otherwise every copy becomes a loop over the lanes that might differ, and its instructions slow down
    // concurrent MMAs.
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) produce_weights<C>(stages, barriers, p, rank);
    if (warp == 1) produce_x_rows<C>(stages, barriers, p, map, rank);
    if (C::kLoadTokenScales && warp == 2) prepare_x_rows<C>(stages, barriers, p);
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kRegisters>();
    if constexpr (C::kShortTiles) clear_missing_x_rows<C>(stages, p);
    pdl_wait_and_launch_dependents();
    C::consume(stages, staging, barriers, out_map, p, ThreadCoord<C>(p, rank, warpgroup - 1));
    cute::tma_store_wait<0>();
  }
  // A block's barriers must outlive its neighbour's arrivals and copies.
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
}

// The driver's function that makes tensor maps, or why there is none; looked up once.
struct Encoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  Status status;

  Encoder() {
    constexpr char const* kCall = "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)";
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) {
      status = cuda_error(kCall, error);
    } else if (found != cudaDriverEntryPointSuccess || !function) {
      status = {Status::kCuda, std::string(kCall) + ": the driver has no such function (" + std::to_string(int(found)) +
                                   "); one of CUDA 12.0 or later is needed"};
    } else {
      encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }
  }
};
inline Encoder const& tensor_map_encoder() {
  static Encoder const encoder;
  return encoder;
}

// A tensor map of boxes, innermost dimension first; strides are bytes. Loads bring zeros from beyond the dimensions, stores
// write nothing there.
template <int kRank>
Status encode(CUtensorMapDataType type, void const* data, cuuint64_t const (&dims)[kRank],
              cuuint64_t const (&strides)[kRank - 1], cuuint32_t const (&box)[kRank], CUtensorMapSwizzle swizzle,
              CUtensorMapL2promotion promotion, CUtensorMap* map) {
  Encoder const& encoder = tensor_map_encoder();
  if (!encoder.status.ok()) return encoder.status;
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  CUresult result = encoder.encode(map, type, kRank, const_cast<void*>(data), dims, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {Status::kCuda, "cuTensorMapEncodeTiled: error " + std::to_string(int(result))};
  return {};
}

// Of rows of x [m][columns], rows `stride_bytes` apart, in boxes of 128 bytes x box_x_rows and the 128-byte swizzle.
inline Status encode_x_rows(void const* x, int element_bytes, int m, int columns, int64_t stride_bytes, int box_x_rows,
                            CUtensorMap* map) {
  return encode<2>(element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, x,
                   {cuuint64_t(columns), cuuint64_t(m)}, {cuuint64_t(stride_bytes)},
                   {cuuint32_t(128 / element_bytes), cuuint32_t(box_x_rows)}, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
}

// A number that no other launch of this process has, and that arbitrary memory holds with a chance of 2^-64: a counter's bits,
// well mixed.
inline uint64_t new_flag() {
  static std::atomic<uint64_t> launches{uint64_t(std::chrono::steady_clock::now().time_since_epoch().count())};
  uint64_t x = launches.fetch_add(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Of experts: as many clusters as the GPU has places for, each with every so many tiles.
template <class C>
Status launch_grouped(void (*kernel)(CUtensorMap, CUtensorMap, GroupedParams), GroupedGemm const& problem, Plan const& plan,
                      Stream stream) {
  PackedWeight const& w = problem.weight;
  int const weight_tiles = int(padded_k(w.k) / kKPerTile);
  bool const short_groups = w.group_size > 0 && w.group_size < kKPerTile;
  GemmProblem rows_of_all;
  rows_of_all.m = problem.rows, rows_of_all.weight = w, rows_of_all.weight.n = problem.n;
  rows_of_all.out = problem.out, rows_of_all.out_type = problem.out_type;
  GroupedParams p{{w, {}, EpilogueParams(rows_of_all)}, problem.groups};
  p.x.scales = const_cast<float*>(problem.row_scales), p.x.stride = problem.rows;
  p.row_pairs = int(ceil_div(problem.groups.row_panels, C::kWarpgroups * C::kCluster));
  p.k_tiles = weight_tiles, p.n_pad = int(padded_rows(w.n));
  p.group_tiles = w.group_size == -1 ? weight_tiles : short_groups ? 1 : w.group_size / kKPerTile;
  p.tile_groups = short_groups ? kKPerTile / w.group_size : 1;
  p.scale_bytes = size_of(w.scale_type), p.offset_bytes = size_of(w.offset_type);
  p.half_x_rows = C::kBlockM / C::kCluster;
  EpilogueParams const& e = p.epilogue;
  p.store_halves = e.vector_store && e.out_type != DataType::kFloat32;
  CUtensorMap map, out_map = {};
  Status status = encode_x_rows(problem.x, 2, problem.rows, w.k, problem.x_stride * 2, p.half_x_rows, &map);
  if (status.ok() && p.store_halves) status = encode_x_rows(e.out, 2, e.m, e.n, int64_t(e.n) * 2, C::kXBoxRows, &out_map);
  if (!status.ok()) return status;
  return launch_plan(kernel, plan, C::kThreads, C::kSharedBytes, stream, map, out_map, p);
}

template <class C>
Status launch_persistent(void (*kernel)(CUtensorMap, CUtensorMap, typename C::Params), GemmProblem const& problem,
                         Plan const& plan, float* splitk_workspace, CUtensorMap const& map, Stream stream,
                         int band_tiles = 16) {
  PackedWeight const& w = problem.weight;
  int const clusters = plan.grid_x / C::kCluster;
  int const weight_tiles = int(padded_k(w.k) / kKPerTile), n_pad = int(padded_rows(w.n));
  int k_tiles = weight_tiles;
  if constexpr (C::kWindowTiles > 0) k_tiles += compensation_windows(weight_tiles, C::kBits);
  bool short_groups = w.group_size > 0 && w.group_size < kKPerTile;
  Params p{w,
           problem.quantized,
           EpilogueParams(problem),
           splitk_workspace,
           plan.tail_tiles ? reinterpret_cast<uint64_t*>(splitk_workspace + part_floats(plan)) : nullptr,
           plan.tail_tiles ? new_flag() : 0,
           (n_pad + C::kRows * C::kCluster - 1) / (C::kRows * C::kCluster),
           (problem.m + C::kBlockM - 1) / C::kBlockM,
           k_tiles,
           n_pad,
           0,
           plan.tail_tiles,
           plan.slices,
           plan.tail,
           0,
           clusters,
           band_tiles,
           w.group_size == -1 ? weight_tiles
           : short_groups     ? 1
                              : w.group_size / kKPerTile,
           short_groups ? kKPerTile / w.group_size : 1,
           size_of(w.scale_type),
           size_of(w.offset_type),
           half_x_rows<C>(problem.m),
           false};
  int const tiles = p.row_pairs * p.m_tiles;
  if (plan.slices > 1 && plan.tail_tiles == 0) p.split_tiles = tiles;  // split-K
  p.whole_tiles = tiles - p.split_tiles;
  p.work_end = p.tail_split.tiles_per_cluster > 1
                   ? p.whole_tiles + p.tail_split.tiles_per_cluster * clusters
                   : p.whole_tiles + p.split_tiles * (p.tail_split.parts - 1) + p.tail_split.last;
  EpilogueParams const& e = p.epilogue;
  p.store_halves = (!splitk_workspace || p.flags) && !e.residual && e.vector_store && e.out_type != DataType::kFloat32 &&
                   (e.activation == Activation::kNone || is_clamp(e.activation));
  CUtensorMap out_map = {};
  if (p.store_halves) {
    if (Status status = encode_x_rows(e.out, 2, e.m, e.n, int64_t(e.n) * 2, C::kXBoxRows, &out_map); !status.ok())
      return status;
  }
  if constexpr (C::kWindowTiles > 0) {
    CompensatedParams compensated{p, {}, weight_tiles};
    int const columns = int(zero_columns(w.k));
    Status status = encode_x_rows(problem.quantized.zero_values, 2, problem.m, columns, int64_t(columns) * 2,
                                  C::kBlockM / C::kCluster, &compensated.zero_values);
    if (!status.ok()) return status;
    return launch_plan(kernel, plan, C::kThreads, C::kSharedBytes, stream, map, out_map, compensated);
  } else {
    return launch_plan(kernel, plan, C::kThreads, C::kSharedBytes, stream, map, out_map, p);
  }
}

}  // namespace cutlass_ops::hopper
