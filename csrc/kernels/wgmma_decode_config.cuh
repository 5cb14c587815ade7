// Configurations, arguments and parts of wgmma_decode and wgmma_decode_fold16 (wgmma_decode.cuh).
#pragma once

#include <type_traits>

#include "device/even_partition.cuh"
#include "device/fold.cuh"
#include "device/grouped.cuh"
#include "device/hopper_x_rows.cuh"
#include "device/quantize.cuh"
#include "device/tensor_map.cuh"
#include "device/tile_copies.cuh"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "formats/decode.cuh"
#include "formats/formats.h"

// for other GPUs the kernels have no bodies, which read the members of Config
#pragma nv_diag_suppress 177

namespace cutlass_ops {
namespace {

// The common part of both kernels. Element: the type of x in memory. kInt8: x is multiplied as
// int8. kQuantizes: x is floats in memory, and becomes int8 codes or their values. kXRowZeros:
// int8 x has zero points; to compensate them the kernel needs sums of weights, for which operand B
// has eight more columns, all ones. kGrouped: rows of x and weights are experts'
// (device/grouped.cuh). kBlockM: rows of x of a tile.
template <class Element_, int kBits_, bool kInt8_, bool kQuantizes_, bool kXRowZeros_,
          bool kOneCta_, bool kGrouped_ = false, int kBlockM_ = WgmmaDecodeShape::kBlockM>
struct StageConfig {
  using Element = Element_;
  static constexpr bool kGrouped = kGrouped_;
  static constexpr bool kInt8 = kInt8_, kQuantizes = kQuantizes_, kXRowZeros = kXRowZeros_,
                        kOneCta = kOneCta_;
  static constexpr int kBits = kBits_;
  static constexpr int kBlockM = kBlockM_;
  // that multiply
  static constexpr int kWarpgroups = WgmmaDecodeShape::warpgroups(kOneCta),
                       kWarps = 4 * kWarpgroups;
  static constexpr int kMostRowPanels =
      WgmmaDecodeShape::most_row_panels_of(kOneCta, kXRowZeros, kBlockM);
  static constexpr int kThreads = WgmmaDecodeShape::threads(kOneCta);
  static constexpr int kSums = kBlockM / 2;                        // registers of a row panel
  static constexpr int kColumns = kBlockM + (kXRowZeros ? 8 : 0);  // of operand B
  static constexpr int kXBytes = kBlockM * kKPerTile * int(sizeof(Element));
  static constexpr int kPanelBytes = kBlockM * 128;  // of x in shared memory: rows of 128 bytes, in
                                                     // the 128-byte swizzle
  // Codes that a block makes, and the ones behind them, overwrite the floats.
  static constexpr int kOnesBytes = kXRowZeros ? 8 * 128 : 0,
                       kXStride = kXBytes + (kQuantizes ? 0 : kOnesBytes);
  static constexpr int kXRowScaleBytes = kInt8 ? kBlockM * 4 : 0,
                       kXRowZeroBytes = kXRowZeros ? kBlockM : 0;
  // Bytes of x that are copied to a stage together with its weights.
  static constexpr int kXRowBytes = kQuantizes ? 0 : kXBytes + kXRowScaleBytes + kXRowZeroBytes;
  // K-slices of 16 columns, 32 with int8, that are multiplied together in a step; steps of a tile.
  static constexpr int kPieces = 4, kSteps = kInt8 ? 1 : 2;
  // Lanes of a warpgroup that arrive when they have read a stage. All of them with int8 x, since
  // racecheck misreads one arrival a warp; one of each warp for experts, whose stages go on from
  // one tile to the next.
  static constexpr int kReaders = kInt8 && !kGrouped ? 128 : 4;
  // of a row block
  static constexpr int kChunk = k_tile_bytes(kBits);
  // From a step's codes to the next's, which may be in the same nibbles.
  static constexpr bool kStepsShareNibbles = nibble_columns(kBits) == 2;
  static constexpr int kStepBytes = kStepsShareNibbles ? 0 : kChunk / 4 / kSteps;
  // of a row panel's sums: 16 features x 8 rows of x
  static constexpr int kMBlocks = kBlockM / 8, kLogPieces = log2_of(4 * kMBlocks);
  static_assert(4 * kMBlocks == 1 << kLogPieces);
  // Bytes of weights that a block has not requested yet when it lets the next launch start. The
  // start takes a microsecond, and two until that launch requests weights if a quantiser runs
  // before it. Much earlier is worse: x, which all blocks wait for, would queue behind the next
  // launch's weights.
  static constexpr int kEarlyBytes = (kOneCta ? 128 : kQuantizes ? 48 : kInt8 ? 80 : 32) * 1024;
};

// How wgmma_decode decodes weights: to int8, or to the 16 bits of x.
template <class Format, class Element, bool kInt8, bool kZeros>
struct DecoderOf {
  using Type = typename Format::template Decoder<Element>;
  static constexpr float kUnit = Type::kUnit;  // of sums
};
template <class Format, class Element, bool kZeros>
struct DecoderOf<Format, Element, true, kZeros> {
  using Type = typename Format::template Int8Decoder<kZeros>;
  static constexpr float kUnit = 1.0f;  // promote() applies the decoder's
};

// Configuration of wgmma_decode. Element: the type of x in memory, fp16, bf16, or int8 with
// separate scales. Scale: the type of weight scales. kShortGroups: these are of groups of 32 or 64.
template <class Element_, class Format, bool kZeros_, class Scale_ = Element_,
          bool kQuantizes_ = false, bool kXRowZeros_ = false, bool kOneCta_ = false,
          bool kGrouped_ = false, bool kShortGroups_ = false,
          int kBlockM_ = WgmmaDecodeShape::kBlockM>
struct Config
    : StageConfig<Element_, Format::kBits, kQuantizes_ || std::is_same_v<Element_, int8_t>,
                  kQuantizes_, kXRowZeros_, kOneCta_, kGrouped_, kBlockM_> {
  using Scale = Scale_;
  static constexpr bool kFolds = false, kCodebook = Format::kTableBytes > 0, kZeros = kZeros_,
                        kOffsets = false, kDeals = kGrouped_, kShortGroups = kShortGroups_;
  static constexpr int kScaleBytes = sizeof(Scale);
  static constexpr bool kIntegers = kQuantizes_ || std::is_same_v<Element_, int8_t>;
  using Decoder = DecoderOf<Format, Element_, kIntegers, kZeros_>;
  using Decode = typename Decoder::Type;
  using Table = typename Format::template Unscaled<Element_>;
  static constexpr float kUnit = Decoder::kUnit;
  static constexpr int kGroupSteps = kCodebook ? 1 : 2;  // promoted together: a code book's groups
                                                         // may be of 64 columns
  static constexpr int kWords = 4 * Decode::kWords;      // of the four k-slices of a step
};

// Configuration of wgmma_decode_fold16: x has 16 bits.
template <class Element_, class Format_, bool kNarrow, AffineTerm kAffineTerm, bool kQuantizes_,
          bool kOneCta_, bool kGrouped_ = false, int kBlockM_ = WgmmaDecodeShape::kBlockM>
struct FoldConfig : StageConfig<Element_, Format_::kBits, false, kQuantizes_, false, kOneCta_,
                                kGrouped_, kBlockM_> {
  using Fold = cutlass_ops::Fold<Element_, Format_, kNarrow, kAffineTerm>;
  using Table = typename Fold::Unscaled;
  static constexpr float kUnit = Fold::kUnit;
  static constexpr bool kFolds = true, kCodebook = Format_::kTableBytes > 0;
  static constexpr bool kZeros = Fold::kZeros, kOffsets = Fold::kOffsets;
  // the others need the registers
  static constexpr bool kDeals = kGrouped_ && Fold::kNarrow && !kOffsets;
};

struct Maps {
  CUtensorMap x_rows;
  CUtensorMap codes;                   // in 64-bit words: [row panel][k_tiles * chunk / 2048][256]
  CUtensorMap scales, offsets, zeros;  // [group][row panel][row]
};

struct Params {
  PackedWeight weight;
  float const* x_row_scales;
  int8_t const* x_row_zeros;
  int x_row_stride;               // from a tile's scales, or zero points, to the next's
  bool symmetric;                 // of x that is quantised here
  int block_lanes;                // of 16 columns each, that share a block of x then
  int scale_bytes, offset_bytes;  // of one
  EpilogueParams epilogue;
  VectorRows weight_rows;
  WgmmaDecodeShape shape;
  EvenPartition units, tiles;  // of the clusters, and of a cluster's blocks
  int k_tiles, n_pad, log_cluster;
  Groups groups;
  RowPieces rows;   // of experts' x
  int x_bytes = 0;  // of a stage's x. Experts': of a tile, or of two where row panels are dealt; of
                    // tiles of more than 16 rows of a matrix: of those that are copied
};

// Bytes of the inner dimension of the codes' tensor map: a box has at most 256 elements in one,
// here 64-bit words.
constexpr int kCodeRun = 2048;

// Barriers of stages: all copies have arrived; all has been read; x has arrived and must still be
// quantised.
struct Barriers {
  static constexpr int kStages = WgmmaDecodeShape::kMostStages;
  uint64_t full[kStages], empty[kStages], raw[kStages], sums;
};

// A block's share of the row panels of experts, numbered over all tiles: from `begin` to `end`; the
// first is in tile `first_tile`.
struct Dealt {
  int begin, end, first_tile;
  int of_part;  // row panels that a block takes at a time

  // The row panels of a cluster in one tile, or an equal share of the panels of all `tiles`.
  __device__ __forceinline__ Dealt(Params const& p, int tiles) {
    int const index = blockIdx.x >> p.log_cluster, row_panels = p.groups.row_panels;
    if (p.shape.dealt) {
      EvenPartition const shares(tiles * row_panels, p.shape.clusters);
      begin = shares.first(index), end = begin + shares.count(index);
      first_tile = begin / row_panels;
    } else {
      first_tile = index / p.shape.clusters;
      int const share = index - first_tile * p.shape.clusters;
      begin = first_tile * row_panels + p.units.first(share);
      end = first_tile < tiles ? begin + p.units.count(share) : begin;
    }
    int const most = p.shape.most_row_panels, parts = max(1, (end - begin + most - 1) / most);
    of_part = (end - begin + parts - 1) / parts;
  }
  Dealt() = default;

  __device__ __forceinline__ int tiles(int row_panels) const {
    return begin < end ? (end - 1) / row_panels - first_tile + 1 : 0;
  }
};

// A block's part of the product: its row panels, but for the features before `begin` and from `end`
// on, which count from the first row panel's.
struct Part {
  int rank, first_row_panel, row_panels, begin, end, first_tile, tiles;
  // For experts: the tile of the first row panels, so many; the others are the first of the next
  // tile.
  int tile = 0, in_first = 0;

  __device__ __forceinline__ Part(Params const& p, int unit) {
    int index = blockIdx.x >> p.log_cluster;
    rank = blockIdx.x & (p.shape.cluster - 1);
    if (unit == kRowsPerPanel) {
      first_row_panel = p.units.first(index), row_panels = p.units.count(index);
      begin = 0, end = row_panels * kRowsPerPanel;
    } else {
      begin = p.units.first(index) * unit, end = begin + p.units.count(index) * unit;
      first_row_panel = begin / kRowsPerPanel,
      row_panels = (end + kRowsPerPanel - 1) / kRowsPerPanel - first_row_panel;
      begin -= first_row_panel * kRowsPerPanel, end -= first_row_panel * kRowsPerPanel;
    }
    first_tile = p.tiles.first(rank), tiles = p.tiles.count(rank);
  }

  // For experts, before the first row panels.
  __device__ __forceinline__ Part(Params const& p, Dealt const& dealt) {
    rank = blockIdx.x & (p.shape.cluster - 1);
    first_row_panel = dealt.begin - dealt.first_tile * p.groups.row_panels, row_panels = 0;
    first_tile = p.tiles.first(rank), tiles = p.tiles.count(rank);
  }

  // Takes the next row panels of `dealt`, of two tiles at most; false: there are none.
  __device__ __forceinline__ bool take(Params const& p, Dealt const& dealt) {
    int const of_tile = p.groups.row_panels;
    for (first_row_panel += row_panels; first_row_panel >= of_tile; first_row_panel -= of_tile)
      ++tile;
    int const left = dealt.end - (dealt.first_tile + tile) * of_tile - first_row_panel;
    in_first = of_tile - first_row_panel;
    row_panels = min(min(left, dealt.of_part), in_first + of_tile);
    return row_panels > 0;
  }
};

}  // namespace
}  // namespace cutlass_ops
