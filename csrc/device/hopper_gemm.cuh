// What the wgmma kernels share: a persistent GEMM of clusters of two blocks whose ring of stages keeps turning from tile to tile.
//
// A block computes 128 output features x kTokens (256 with four warpgroups that multiply). The two blocks of a cluster take neighbouring rows and the same tokens, and each loads half of
// the tokens for both.
//
//                       kTokens ->
//             +---------------------------+
//   rows    0 | warpgroup 1: 64 x kTokens |   block 0 of the cluster        A: weights, from shared memory through registers (one 16-byte load
//          64 | warpgroup 2               |                                    a lane is a fragment, layout.h), decoded on the way
//             +---------------------------+                                 B: tokens, K-major in shared memory, 128-byte swizzle, by TMA multicast
//         128 | warpgroup 1               |   block 1
//         192 | warpgroup 2               |
//             +---------------------------+
//
// Warpgroup 0 loads: one warp the weights, one the tokens, each waiting for a free stage; where stages bring token scales, a third brings them into
// the order of the accumulators. Warpgroups 1 and 2 run C::consume, each on its own, so that one keeps the tensor cores busy while the other
// promotes.
//
// Clusters take whole tiles in turn. What whole waves leave over may have its K cut, so that all clusters end at about the same time (add_parts());
// where the tiles fill no wave, the K of all may be, and reduce_splits adds up.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "cutlass_ops/corrections.h"
#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "device/hopper.cuh"
#include "device/launch.cuh"
#include "dispatch/problem.h"
#include "dispatch/spec.h"

namespace cutlass_ops::hopper {

struct Work;
struct Params;

// Sizes and the layout of a stage. A kernel's Config derives from it.
//   kElementBytes: of an activation; kScales, kTokenScales: whether every stage brings them; kZeros: likewise the weights' zero points
//   kTokenZeros: whether activations have zero points, which come with their scales
template <int kBits_, int kTokens_, int kElementBytes, bool kScales_, bool kTokenScales_, bool kTokenZeros_, bool kZeros_,
          int kStages_, int kWarpgroups_ = 2>
struct TileConfig {
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kLoadScales = kScales_;
  static constexpr bool kLoadTokenScales = kTokenScales_;
  static constexpr bool kLoadTokenZeros = kTokenZeros_ && kTokenScales_;
  static constexpr bool kZeros = kZeros_;
  static constexpr int kStages = kStages_;
  static constexpr bool kPrepareScales = false;  // whether prepare_tokens() prepares the weights' too
  static constexpr bool kShortTiles = false;  // whether a block loads less than half a tile where there are not as many tokens
  using Work = hopper::Work;                  // how clusters share tiles
  using Params = hopper::Params;              // of the kernel
  static constexpr int kWindow = 0;           // tiles of K between one correction (corrections.h) and the next; 0: none
  static constexpr int kWarpgroups = kWarpgroups_;  // that multiply
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // Of a thread of the warpgroup that loads, and of the others, which have what is left of those of a launch.
  static constexpr int kLoadingRegisters = kWarpgroups > 2 ? 32 : 40;
  static constexpr int kRegisters = ((65536 / kThreads / 8 * 8) * (kWarpgroups + 1) - kLoadingRegisters) / kWarpgroups / 8 * 8;
  static constexpr int kRows = kRowsPerSlab * kWarpgroups;
  static constexpr int kCluster = 2;
  static constexpr int kSums = kTokens / 2;  // registers of a thread

  static constexpr int kSwizzleBytes = 128;                                        // of a token, side by side in shared memory
  static constexpr int kColumnPanels = kKPerTile * kElementBytes / kSwizzleBytes;  // a stage's tokens: [panel][token][128 B]
  static constexpr int kPanelColumns = kKPerTile / kColumnPanels;
  static constexpr int kPanelBytes = kTokens * kSwizzleBytes;
  static constexpr int kActivations = 0;
  static constexpr int kWeights = kActivations + kColumnPanels * kPanelBytes;
  static constexpr int kTokenScales = kWeights + kWarpgroups * chunk_bytes(kBits);
  static constexpr int kTokenZeros = kTokenScales + (kLoadTokenScales ? kTokens * 4 : 0);
  static constexpr int kTokenFactors = kTokenZeros + (kLoadTokenZeros ? kTokens : 0);  // what prepare_tokens() makes of both
  static constexpr int kScales = kTokenFactors + (kLoadTokenScales ? kTokens * 4 : 0) + (kLoadTokenZeros ? kTokens * 4 : 0);
  static constexpr int kZeroPoints = kScales + (kLoadScales ? kRows * 4 : 0);
  static constexpr int kStageBytes =
      (kZeroPoints + (kZeros ? kRows : 0) + 1023) / 1024 * 1024;  // the swizzle repeats every 1024

  // Tokens that leave through shared memory at a time, as floats and as lines of 16-bit outputs, and the lines of one copy. Stages of more than 176 tokens leave
  // little room: least where these have two bytes.
  static constexpr bool kManyTokens = kTokens > 176 && kElementBytes == 2;
  static constexpr int kStoreTokens = kManyTokens ? 16 : kTokens % 32 ? kTokens / 2 : 32;
  static constexpr int kStoreStride = kRowsPerSlab + 4;  // floats; keeps the transposing writes off each other's banks
  static constexpr int kLineBytes = kRowsPerSlab * 2;
  static constexpr int kLineTokens = kManyTokens                   ? (kBits == 8 ? 64 : 112)
                                     : kTokens > 176 && kBits == 8 ? kTokens / 2
                                                                   : kTokens;
  static constexpr int kBoxTokens = kManyTokens ? 16 : kLineTokens;
  static constexpr int kStagedFloats = kStoreStride * 4 * kStoreTokens, kStagedLines = kLineBytes * kLineTokens;  // bytes
  static constexpr int kStoreBytes = kWarpgroups * (kStagedFloats > kStagedLines ? kStagedFloats : kStagedLines);
  // Behind the staged outputs: int8 tokens' one zero point, 16 times where it is an operand (beside scales of groups), for each warpgroup, and then their one
  // scale, which is applied at the end, for each. compute-sanitizer takes an operand whose rows repeat for twice its length: so much lies behind the last.
  static constexpr int kEndScales = kElementBytes == 1 && !kLoadTokenScales ? kTokens : 0;
  static constexpr int kEndZeros = kTokenZeros_ ? kEndScales * (kLoadScales ? 16 : 1) : 0;  // bytes
  static constexpr int kEndScaleBytes = kWarpgroups * kEndScales * 4;
  static constexpr int kEndBytes = kWarpgroups * kEndZeros + (kEndScaleBytes > kEndZeros ? kEndScaleBytes : kEndZeros);
  static constexpr int kSharedBytes = kStages * kStageBytes + kStoreBytes + kEndBytes + 256;
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block may have");
  static_assert(kTokens / kCluster % 8 == 0, "a half tile of tokens is whole swizzle atoms");
};

struct Params {
  PackedWeight weight;
  QuantizedActivations x;  // int8 kernels: the scales
  EpilogueParams epilogue;
  float* partials;  // of parts of K: for reduce_splits, or, in the order of registers, for the warps that add them up
  uint64_t* marks;  // left beside the latter, [cut tile][part but the first][warp of the cluster]; null for reduce_splits
  uint64_t mark;    // of this launch: it is found nowhere else
  int row_pairs, token_tiles, k_tiles, n_pad;
  int whole_tiles, cut_tiles;  // the first tiles have all of K; that of the others is cut
  int splits;                  // parts that it is cut into
  CutTiles cut;                // GatheredWork: likewise
  int work_end, clusters;      // GatheredWork: a cluster takes each clusters-th from its number on, below work_end
  int band_tiles;              // GatheredWork: of tokens, that are computed together
  int group_tiles;             // tiles of K that share a weight scale, at least 1
  int tile_groups;             // groups in a tile of K, at least 1
  int scale_bytes;             // of one weight scale
  int offset_bytes;            // of one offset
  int half_tokens;             // that a block loads of a tile
  bool store_halves;           // the outputs are 16-bit floats in whole lines, of an epilogue that needs no more than bounds
};

// Of kernels whose stages of K are its tiles and, after each window of these, a correction (corrections.h). Params::k_tiles counts both.
struct CorrectedParams : Params {
  CUtensorMap zero_values;
  int weight_tiles;  // of K
};

// Where stage k of K lies among windows of kWindow tiles, of which the last may be short.
template <int kWindow>
struct WindowPlace {
  int window, correction;  // the stage that ends the window
  int tile;                // the next one, where this stage is the correction
  __device__ __forceinline__ WindowPlace(int k, Params const& p)
      : window(k / (kWindow + 1)), correction(min(window * (kWindow + 1) + kWindow, p.k_tiles - 1)), tile(k - window) {}
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

// A part of the K of a cut tile.
struct Part {
  int cut_tile, split;
  __device__ __forceinline__ Part(int index, Params const& p) {
    index -= p.whole_tiles;
    int part = index / p.cut_tiles;
    cut_tile = index - part * p.cut_tiles, split = p.splits - 1 - part;
  }
};

// Work: (pair of row tiles, token tile, split of K), token tiles in bands (of 16) fastest, so that what runs together shares weights and tokens in L2.
// First come the whole tiles, then of the cut ones the last part of K, then that before it.
struct Work {
  using Part = hopper::Part;
  int pair, token_tile, split = 0, splits = 1;
  __device__ __forceinline__ Work(int index, Params const& p, int const band_tiles = 16) {
    if (index >= p.whole_tiles) {
      Part part(index, p);
      split = part.split, splits = p.splits, index = p.whole_tiles + part.cut_tile;
    }
    int band = index / (band_tiles * p.row_pairs), inside = index - band * band_tiles * p.row_pairs;
    int height = min(band_tiles, p.token_tiles - band * band_tiles);
    pair = inside / height;
    token_tile = band * band_tiles + inside - pair * height;
  }
  static __device__ __forceinline__ int count(Params const& p) { return p.whole_tiles + p.cut_tiles * p.splits; }
  __device__ __forceinline__ int first_k(Params const& p) const { return p.k_tiles * split / splits; }
  __device__ __forceinline__ int end_k(Params const& p) const { return p.k_tiles * (split + 1) / splits; }
};

// The same where a cluster takes the last parts of p.cut.gathered tiles, which are shorter, one after another: those of neighbouring tiles are multiplied
// at a time, so that the columns of K under way stay few, as the cache wants it. (Shares of one length, which begin anywhere in K, took 1024 tokens x 8192
// x 28672 beside int8 from 675 to 720 us.)
struct GatheredPart {
  int cut_tile, split;
  __device__ __forceinline__ GatheredPart(int index, Params const& p) {
    index -= p.whole_tiles;
    int const round = p.cut.gathered > 1 ? index / p.clusters : 0;
    index -= round * p.clusters;
    if (index < p.cut.last) {
      cut_tile = index + round * p.cut.last, split = cut_tile < p.cut_tiles ? p.cut.parts - 1 : -1;
    } else {
      int const part = (index - p.cut.last) / p.cut_tiles;
      cut_tile = index - p.cut.last - part * p.cut_tiles, split = round > 0 ? -1 : p.cut.parts - 2 - part;
    }
  }
  __device__ __forceinline__ bool empty() const { return split < 0; }
};

// Beside floats alone: wgmma_gemm_a8's main loops are scheduled worse with it, 1024 tokens x 28672 x 4096 in W8A8 take 265 us instead of 256.
struct GatheredWork {
  using Part = GatheredPart;
  int pair, token_tile;
  __device__ __forceinline__ GatheredWork(int index, Params const& p) : first_k_(0), end_k_(p.k_tiles) {
    if (index >= p.whole_tiles) {
      Part const part(index, p);
      first_k_ = p.cut.dealt * part.split / p.cut.pieces;
      if (part.split < p.cut.parts - 1) end_k_ = part.empty() ? first_k_ : p.cut.dealt * (part.split + 1) / p.cut.pieces;
      index = p.whole_tiles + part.cut_tile;
    }
    int band = index / (p.band_tiles * p.row_pairs), inside = index - band * p.band_tiles * p.row_pairs;
    int height = min(p.band_tiles, p.token_tiles - band * p.band_tiles);
    pair = inside / height;
    token_tile = band * p.band_tiles + inside - pair * height;
  }
  static __device__ __forceinline__ int count(Params const& p) { return p.work_end; }
  // A cluster that finds nothing is at its end.
  __device__ __forceinline__ bool empty() const { return first_k_ == end_k_; }
  __device__ __forceinline__ int first_k(Params const&) const { return first_k_; }
  __device__ __forceinline__ int end_k(Params const&) const { return end_k_; }

 private:
  int first_k_, end_k_;
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
  constexpr int kChunk = chunk_bytes(C::kBits);
  bool leader = cute::elect_one_sync();
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
    int row0 = (work.pair * C::kCluster + rank) * C::kRows, k = work.first_k(p), end = work.end_k(p);
    int slabs = max(0, min(C::kWarpgroups, (p.n_pad - row0) / kRowsPerSlab));  // the last pair may reach beyond N
    int bytes = slabs * (kChunk + kRowsPerSlab * ((C::kLoadScales ? p.scale_bytes : 0) + (C::kZeros ? 1 : 0)));
    // 32-bit indices, not pointers: this role has 40 registers.
    int weight_tiles = p.k_tiles, tile = k;
    if constexpr (C::kWindow > 0) weight_tiles = p.weight_tiles, tile = WindowPlace<C::kWindow>(k, p).tile;
    int chunk = row0 / kRowsPerSlab * weight_tiles + tile, group = tile / p.group_tiles;
    int until_next = (group + 1) * p.group_tiles - tile, vector = group * p.n_pad + row0;
#pragma unroll 1
    for (; k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      uint64_t* full = &barriers.full[ring.stage];
      ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      if constexpr (C::kWindow > 0) {
        WindowPlace<C::kWindow> const at(k, p);
        if (k == at.correction) {
          wait_alone();  // the product's own launch may have made the sums
          if (leader) {
            int const windows = p.k_tiles - weight_tiles;
            TransactionBarrier::arrive_and_expect_tx(full, slabs * (kChunk + kRowsPerSlab * p.scale_bytes));
#pragma unroll
            for (int slab = 0; slab < C::kWarpgroups; ++slab) {
              if (slab < slabs)
                Copy::copy(p.weight.sums + (int64_t(row0 / kRowsPerSlab + slab) * windows + at.window) * kChunk, full,
                           stage + C::kWeights + slab * kChunk, kChunk);
            }
            if (slabs > 0)
              Copy::copy(static_cast<uint8_t const*>(p.weight.sum_scales) + int64_t(row0) * p.scale_bytes, full,
                         stage + C::kScales, slabs * kRowsPerSlab * p.scale_bytes);
          }
          continue;
        }
      }
      if (leader) {
        TransactionBarrier::arrive_and_expect_tx(full, bytes);
#pragma unroll
        for (int slab = 0; slab < C::kWarpgroups; ++slab) {
          if (slab < slabs)
            Copy::copy(p.weight.codes + int64_t(chunk + slab * weight_tiles) * kChunk, full,
                       stage + C::kWeights + slab * kChunk, kChunk);
        }
        if (C::kLoadScales && slabs > 0) {
          Copy::copy(static_cast<uint8_t const*>(p.weight.scales) + int64_t(vector) * p.scale_bytes, full, stage + C::kScales,
                     slabs * kRowsPerSlab * p.scale_bytes);
        }
        if (C::kZeros && slabs > 0) Copy::copy(p.weight.zeros + vector, full, stage + C::kZeroPoints, slabs * kRowsPerSlab);
      }
      ++chunk;
      if (--until_next == 0) until_next = p.group_tiles, vector += p.n_pad;
    }
  }
}

// Of a tile's tokens, those that a block loads for both: half, or, of C::kShortTiles, half of all tokens, in eights, if they are fewer. (Rows beyond the
// last come as zeros, at 8 bytes a clock: 40 tokens x 14336 x 4096 in W8A16 took 21.2 us, and 64 tokens 19.4.)
template <class C>
constexpr int half_tokens(int m) {
  constexpr int kHalf = C::kTokens / C::kCluster, kAtom = 8;  // rows that the swizzle repeats after
  static_assert(C::kCluster == 2);
  return C::kShortTiles ? std::min(kHalf, (m + 2 * kAtom - 1) / (2 * kAtom) * kAtom) : kHalf;
}

// Another starts those of the tokens, this block's half of the tile for both blocks, and of their scales.
template <class C>
__device__ __forceinline__ void produce_tokens(uint8_t* stages, Barriers<C>& barriers, typename C::Params const& p,
                                               CUtensorMap const& map, int rank) {
  int const half = C::kShortTiles ? p.half_tokens : C::kTokens / C::kCluster;
  constexpr uint16_t kEveryBlock = (1 << C::kCluster) - 1;
  wait_for_predecessor();
  bool leader = cute::elect_one_sync();
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
    int m0 = work.token_tile * C::kTokens, end = work.end_k(p);
    int scaled = C::kLoadTokenScales ? min(C::kTokens, p.x.stride - m0) : 0;
    int bytes = C::kColumnPanels * C::kCluster * half * C::kSwizzleBytes + scaled * (C::kLoadTokenZeros ? 5 : 4);
#pragma unroll 1
    for (int k = work.first_k(p); k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      uint64_t* full = &barriers.full[ring.stage];
      ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      if constexpr (C::kWindow > 0) {
        WindowPlace<C::kWindow> const at(k, p);
        bool const corrects = k == at.correction;
        int const row = corrects ? at.window * C::kWindow / kTilesPerZeroRow : at.tile;
        if (leader) {
          TransactionBarrier::arrive_and_expect_tx(full, bytes);
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(corrects ? &p.zero_values : &map, full, kEveryBlock,
                                                 uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                                 stage + C::kActivations + rank * half * C::kSwizzleBytes,
                                                 row * (corrects ? kZeroRow : kKPerTile), m0 + rank * half);
          cute::SM90_BULK_COPY_G2S::copy((corrects ? p.x.zero_scales : p.x.scales) + int64_t(row) * p.x.stride + m0, full,
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

// A warp brings every stage's token scales, and behind them zero points as floats, into the accumulators' order, so that a thread has those of its
// four tokens of 16 by one load. Register 4j + e % 2 of a thread is of token 8j + 2t + e: place 4t + 2 (j % 2) + e. Where C::kPrepareScales, it also makes
// the weights' scales fp32 numbers, times C::kUnit, in their place.
template <class C>
__device__ __forceinline__ void prepare_tokens(uint8_t* stages, Barriers<C>& barriers, Params const& p) {
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p), lane = threadIdx.x % 32;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
#pragma unroll 1
    for (int k = work.first_k(p), end = work.end_k(p); k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
#pragma unroll
      for (int first = 0; first < C::kTokens / 4; first += 32) {
        int four = first + lane, token = four / 4 * 16 + four % 4 * 2;  // and token + 1, + 8 and + 9
        if (first + 32 <= C::kTokens / 4 || four < C::kTokens / 4) {
          auto* scales = reinterpret_cast<float2 const*>(stage + C::kTokenScales + token * 4);
          float2 low = scales[0], high = scales[4];
          auto* factors = reinterpret_cast<float4*>(stage + C::kTokenFactors) + four;
          factors[0] = make_float4(low.x, low.y, high.x, high.y);
          if constexpr (C::kLoadTokenZeros) {
            auto* zeros = reinterpret_cast<char2 const*>(stage + C::kTokenZeros + token);
            char2 low_zeros = zeros[0], high_zeros = zeros[4];
            factors[C::kTokens / 4] = make_float4(low_zeros.x, low_zeros.y, high_zeros.x, high_zeros.y);
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

// The warpgroups that multiply leave zeros in the place of tokens that no copy brings, while the first copies are under way: beside zeros products took
// less time than beside whatever lies there (40 tokens x 8192 x 28672 in W8A16 63 us, and 67).
template <class C>
__device__ __forceinline__ void clear_missing_tokens(uint8_t* stages, Params const& p) {
  int const loaded = C::kCluster * p.half_tokens * C::kSwizzleBytes;
  if (loaded == C::kPanelBytes) return;
  constexpr int kMultiplying = C::kThreads - 128;
  for (int panel = 0; panel < C::kStages * C::kColumnPanels; ++panel) {
    uint8_t* tokens =
        stages + panel / C::kColumnPanels * C::kStageBytes + C::kActivations + panel % C::kColumnPanels * C::kPanelBytes;
    for (int byte = loaded + (threadIdx.x - 128) * 16; byte < C::kPanelBytes; byte += kMultiplying * 16)
      *reinterpret_cast<uint4*>(tokens + byte) = uint4{};
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kMultiplying, C::kWarpgroups + 1);
}

// Where a thread stands in a tile, and where its parts of a stage lie. The offsets are pinned in registers: the compiler would compute them
// again in every turn of the main loop.
template <class C>
struct Place {
  int rank, warpgroup, warp, lane;
  int units, scales, zeros, token_factors;  // bytes from a stage's start

  __device__ __forceinline__ Place(Params const& p, int rank, int warpgroup)
      : rank(rank), warpgroup(warpgroup), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
    int row = warpgroup * kRowsPerSlab + lane / 4 * 8 + warp * 2;  // in the order of group vectors
    units = C::kWeights + warpgroup * chunk_bytes(C::kBits) + warp * (C::kBits / 2) * kUnitBytes + lane * kLaneBytes;
    scales = C::kScales + row * (C::kPrepareScales ? 4 : p.scale_bytes);
    zeros = C::kZeroPoints + row;
    token_factors = C::kTokenFactors + lane % 4 * 16;
    asm volatile("" : "+r"(units), "+r"(scales), "+r"(zeros), "+r"(token_factors));
  }
};

// The scales of a thread's rows as they are stored: a load from shared memory takes long while an MMA reads shared memory, and nothing should wait for one between
// products and their promotion. The second of fp32 is loaded first: otherwise the compiler let that load wait until the next weights were loaded too.
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

// The usual outputs: a thread finishes and rounds its own sums, whose rows it holds two of; transposing stores put each token's 64 outputs side
// by side, in the 128-byte swizzle, and one thread's copy takes them away while the next tile is begun. The general way below takes many times
// as long, and meanwhile the ring of stages stands still for both blocks.
template <class C>
__device__ __forceinline__ void store_halves(float (&sums)[C::kSums], float* staging, CUtensorMap const& map, Params const& p,
                                             Place<C> const& at, int row0, int m0) {
  EpilogueParams const& e = p.epilogue;
  int n = row0 + at.warpgroup * kRowsPerSlab, barrier = 1 + at.warpgroup;
  bool copies = at.warp == 0 && at.lane == 0;
  // Each choice is made once for all sums: made for each of them, they take twice as many instructions.
  bool clamped = e.activation != Activation::kNone;
#pragma unroll
  for (float& sum : sums) sum = nan_unless_finite(sum);
  if (e.bias) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = n + at.warp * 16 + at.lane / 4 + h * 8;
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
  for (int first = 0; first < C::kTokens; first += C::kLineTokens) {
    if (copies) cute::tma_store_wait<0>();  // the lines before have been read
    cutlass::arch::NamedBarrier::sync(128, barrier);
    uint8_t* lines = reinterpret_cast<uint8_t*>(staging) + at.warpgroup * C::kLineTokens * C::kLineBytes;
    // Four 8 x 8 matrices an instruction: rows g and g + 8 of eight tokens, then of the next eight. The lane gives the address of one line of one.
    int matrix = (at.lane / 16 * 8 + at.lane % 8) * C::kLineBytes + ((at.warp * 2 + at.lane / 8 % 2) ^ at.lane % 8) * 16;
    auto const stage = [&](auto type) {
#pragma unroll
      for (int j = 0; j < C::kLineTokens / 16 && first + 16 * j < C::kTokens; ++j) {
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
      for (int i = 0; i < C::kLineTokens && first + i < C::kTokens; i += C::kBoxTokens)
        cute::SM90_TMA_STORE_2D::copy(&map, lines + i * C::kLineBytes, n, m0 + first + i);
      cute::tma_store_arrive();
    }
  }
}

// A part of a tile whose K is cut where whole tiles come before: the warps of all clusters that have one but the first part of K leave their sums in the
// workspace, as they lie in registers, and mark them; those of the first wait for the marks, add up in the order of K, and return true: the tile is theirs.
// They wait only for clusters of lower numbers, which were started before. The workspace holds anything at first, but no mark of this launch: whoever
// finds one takes it away, and a graph that launches the same again starts without.
template <class C>
__device__ __forceinline__ bool add_parts(float (&sums)[C::kSums], Params const& p, Place<C> const& at,
                                          typename C::Work::Part part) {
  constexpr int kStride = C::kCluster * C::kWarpgroups * C::kSums * 128;  // floats of a part
  int slab = at.rank * C::kWarpgroups + at.warpgroup, others = p.splits - 1;
  float* parts = p.partials + int64_t(part.cut_tile * others) * kStride + slab * C::kSums * 128 + at.warp * 32 + at.lane;
  constexpr int kMarks = C::kCluster * C::kWarpgroups * 4;
  uint64_t* marks = p.marks + part.cut_tile * others * kMarks + slab * 4 + at.warp;
  // One float at a time: a vector's would have to lie side by side, and the main loop runs slower (up to 4 %) with its registers dealt out so.
  if (part.split > 0) {
    float* to = parts + int64_t(part.split - 1) * kStride;
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) __stcg(to + i * 128, sums[i]);
    __syncwarp();
    if (at.lane == 0) {
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(marks + (part.split - 1) * kMarks), "l"(p.mark) : "memory");
    }
    return false;
  }
  if (at.lane < others) {
    uint64_t found;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(marks + at.lane * kMarks) : "memory");
    } while (found != p.mark);
    marks[at.lane * kMarks] = 0;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < others; ++i, parts += kStride) {
#pragma unroll
    for (int j = 0; j < C::kSums; ++j) sums[j] += __ldcg(parts + j * 128);
  }
  return true;
}

// The end of a tile, or of a part of one. Out through shared memory, kStoreTokens at a time, so that whole lines are stored.
template <class C>
__device__ __forceinline__ void store(float (&sums)[C::kSums], float* staging, CUtensorMap const& map, Params const& p,
                                      Place<C> const& at, int index, int row0, int m0) {
  float* partials = nullptr;
  if (index >= p.whole_tiles) {
    typename C::Work::Part const part(index, p);
    if (!p.marks) {
      partials = p.partials + int64_t(part.split) * p.epilogue.m * p.n_pad;
    } else if (!add_parts<C>(sums, p, at, part)) {
      return;
    }
  }
  if (p.store_halves) return store_halves<C>(sums, staging, map, p, at, row0, m0);
  int n = row0 + at.warpgroup * kRowsPerSlab, thread = at.warp * 32 + at.lane, barrier = 1 + at.warpgroup;
  staging += at.warpgroup * C::kStoreTokens * C::kStoreStride;
#pragma unroll
  for (int first = 0; first < C::kTokens; first += C::kStoreTokens) {
    cutlass::arch::NamedBarrier::sync(128, barrier);  // what was staged before has been read
#pragma unroll
    for (int i = 0; i < C::kStoreTokens / 2; ++i) {
      int token = i / 4 * 8 + at.lane % 4 * 2 + i % 2, row = at.warp * 16 + at.lane / 4 + i % 4 / 2 * 8;
      staging[token * C::kStoreStride + row] = sums[first / 2 + i];
    }
    cutlass::arch::NamedBarrier::sync(128, barrier);
    int column = thread % 8 * 8;
    if (n + column >= (partials ? p.n_pad : p.epilogue.n)) continue;
#pragma unroll 1
    for (int token = thread / 8; token < C::kStoreTokens && m0 + first + token < p.epilogue.m; token += 16) {
      float4 const* source = reinterpret_cast<float4 const*>(staging + token * C::kStoreStride + column);
      float4 a = source[0], b = source[1];
      if (partials) {
        float4* to = reinterpret_cast<float4*>(partials + int64_t(m0 + first + token) * p.n_pad + n + column);
        to[0] = a, to[1] = b;
      } else {
        float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        store_outputs(v, m0 + first + token, n + column, p.epilogue);
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
    // The same in all lanes, as the compiler can see: then a role's addresses stay in the uniform registers that copies take them from.
    // Otherwise every copy becomes a loop over the lanes that might differ, and its instructions slow down the MMAs beside it.
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) produce_weights<C>(stages, barriers, p, rank);
    if (warp == 1) produce_tokens<C>(stages, barriers, p, map, rank);
    if (C::kLoadTokenScales && warp == 2) prepare_tokens<C>(stages, barriers, p);
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kRegisters>();
    if constexpr (C::kShortTiles) clear_missing_tokens<C>(stages, p);
    wait_for_predecessor();
    C::consume(stages, staging, barriers, out_map, p, Place<C>(p, rank, warpgroup - 1));
    cute::tma_store_wait<0>();
  }
  // A block's barriers must outlive its neighbour's arrivals and copies.
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
}

// The driver's function that makes tensor maps, or why there is none; asked for once.
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

// A tensor map of boxes, innermost dimension first; strides are bytes. Loads bring zeros from beyond the dimensions, stores write nothing there.
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

// Of tokens [m][columns], rows `stride_bytes` apart, in boxes of 128 bytes x box_tokens and the 128-byte swizzle.
inline Status encode_tokens(void const* x, int element_bytes, int m, int columns, int64_t stride_bytes, int box_tokens,
                            CUtensorMap* map) {
  return encode<2>(element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, x,
                   {cuuint64_t(columns), cuuint64_t(m)}, {cuuint64_t(stride_bytes)},
                   {cuuint32_t(128 / element_bytes), cuuint32_t(box_tokens)}, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
}

// A number that no other launch of this process has, and that arbitrary memory holds with a chance of 2^-64: a counter's bits, well mixed.
inline uint64_t new_mark() {
  static std::atomic<uint64_t> launches{uint64_t(std::chrono::steady_clock::now().time_since_epoch().count())};
  uint64_t x = launches.fetch_add(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

template <class C>
Status launch_persistent(void (*kernel)(CUtensorMap, CUtensorMap, typename C::Params), GemmProblem const& problem,
                         Plan const& plan, float* partials, CUtensorMap const& map, Stream stream, int band_tiles = 16) {
  PackedWeight const& w = problem.weight;
  int const clusters = plan.grid_x / C::kCluster;
  int const weight_tiles = int(padded_k(w.k) / kKPerTile), n_pad = int(padded_rows(w.n));
  int k_tiles = weight_tiles;
  if constexpr (C::kWindow > 0) k_tiles += correction_windows(weight_tiles, C::kBits);
  bool short_groups = w.group_size > 0 && w.group_size < kKPerTile;
  Params p{w,
           problem.quantized,
           EpilogueParams(problem),
           partials,
           plan.tail_tiles ? reinterpret_cast<uint64_t*>(partials + part_floats(plan)) : nullptr,
           plan.tail_tiles ? new_mark() : 0,
           (n_pad + C::kRows * C::kCluster - 1) / (C::kRows * C::kCluster),
           (problem.m + C::kTokens - 1) / C::kTokens,
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
           half_tokens<C>(problem.m),
           false};
  int const tiles = p.row_pairs * p.token_tiles;
  if (plan.slices > 1 && plan.tail_tiles == 0) p.cut_tiles = tiles;  // split-K
  p.whole_tiles = tiles - p.cut_tiles;
  p.work_end = p.cut.gathered > 1 ? p.whole_tiles + p.cut.gathered * clusters
                                  : p.whole_tiles + p.cut_tiles * (p.cut.parts - 1) + p.cut.last;
  EpilogueParams const& e = p.epilogue;
  p.store_halves = (!partials || p.marks) && !e.residual && e.vector_store && e.out_type != DataType::kFloat32 &&
                   (e.activation == Activation::kNone || is_clamp(e.activation));
  CUtensorMap out_map = {};
  if (p.store_halves) {
    if (Status status = encode_tokens(e.out, 2, e.m, e.n, int64_t(e.n) * 2, C::kBoxTokens, &out_map); !status.ok())
      return status;
  }
  if constexpr (C::kWindow > 0) {
    CorrectedParams corrected{p, {}, weight_tiles};
    int const columns = int(zero_columns(w.k));
    Status status = encode_tokens(problem.quantized.zero_values, 2, problem.m, columns, int64_t(columns) * 2,
                                  C::kTokens / C::kCluster, &corrected.zero_values);
    if (!status.ok()) return status;
    return launch_plan(kernel, plan, C::kThreads, C::kSharedBytes, stream, map, out_map, corrected);
  } else {
    return launch_plan(kernel, plan, C::kThreads, C::kSharedBytes, stream, map, out_map, p);
  }
}

}  // namespace cutlass_ops::hopper
