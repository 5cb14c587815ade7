// Up to 16 rows of x times weights of any format on Hopper's wgmma, while a batch decodes, sm_90a.
//
//   cluster   up to nine row panels of 64 output features; its CTAs share K in equal slices
//   stage     a tile of K, 128 columns: the panels' codes and group vectors by bulk copies, x by its tensor map once for all of them. One warp issues the
//             copies; those of weights before the kernel waits for its predecessor. Two CTAs fit on an SM, so that the next launch's first stages arrive
//             while this one ends. With large 8-bit weights, or `one_cta`, one does, with the stages of two: the bytes in flight on all SMs then cover
//             the time from one launch's last product to the next one's first. K is left whole there, and clusters get halves of panels, for equal shares
//   quantise  x that is to be int8 becomes codes, or the values of codes, in its stage, every third tile by one of the warpgroups that multiply
//   multiply  a warpgroup a panel at a time, weights through registers as operand A: a panel's decoding in one hides behind products in the others.
//             Three warpgroups, four of a CTA that is alone, share the panels, or, where these are few, take turns at tiles
//   end       sums leave registers for the CTA of the cluster that ends with those features, by st.async, and are added in a fixed order
//
// Two kernels differ in what they multiply:
//
//   wgmma_decode         codes minus zero points, exactly; after a tile, sum = fma(the tile's sum, weight scale, sum), as in wgmma_gemm_a16.cu. Zero points
//                        of int8 x take away so many sums of the tile's weights, which eight columns of ones with x's make on the way
//   wgmma_decode_fold16  the weights' values, rounded to the 16 bits of x (device/fold.cuh): one set of sums over all of K
#pragma once

#include <type_traits>

#include "device/decode.cuh"
#include "device/even_partition.cuh"
#include "device/fold.cuh"
#include "device/grouped.cuh"
#include "device/hopper_gemm.cuh"
#include "device/quantize.cuh"
#include "device/tile.cuh"
#include "dispatch/problem.h"
#include "formats/codebook.cuh"
#include "kernels/kernels.h"

#pragma nv_diag_suppress 177  // for other GPUs the kernels have no bodies, which read the members of Config

namespace cutlass_ops {
namespace {

// What both kernels have. Element: of x in memory. kInt8: x is int8 where it is multiplied; kQuantizes: and floats in memory,
// or they become the values of such codes; kTokenZeros: int8 x has zero points; what they take away are sums of weights, and
// operand B has eight more columns, of ones, that make these.
// kGrouped: rows of x and weights are experts' (device/grouped.cuh).
template <class Element_, int kBits_, bool kInt8_, bool kQuantizes_, bool kTokenZeros_, bool kOneCta_, bool kGrouped_ = false>
struct StageConfig {
  using Element = Element_;
  static constexpr bool kGrouped = kGrouped_;
  static constexpr bool kInt8 = kInt8_, kQuantizes = kQuantizes_, kTokenZeros = kTokenZeros_, kOneCta = kOneCta_;
  static constexpr int kBits = kBits_;
  static constexpr int kBlockM = WgmmaDecodeShape::kBlockM;
  static constexpr int kWarpgroups = WgmmaDecodeShape::warpgroups(kOneCta), kWarps = 4 * kWarpgroups;  // that multiply
  static constexpr int kMostRowPanels = WgmmaDecodeShape::most_row_panels_of(kOneCta, kTokenZeros);
  static constexpr int kThreads = 32 * kWarps + 32;
  static constexpr int kSums = kBlockM / 2;                         // registers of a row panel
  static constexpr int kColumns = kBlockM + (kTokenZeros ? 8 : 0);  // of operand B
  static constexpr int kXBytes = kBlockM * kKPerTile * int(sizeof(Element));
  static constexpr int kPanelBytes = kBlockM * 128;  // of x in shared memory: rows of 128 bytes, in the 128-byte swizzle
  // Codes that a block makes take the place of floats, and so do the ones behind them.
  static constexpr int kOnesBytes = kTokenZeros ? 8 * 128 : 0, kXStride = kXBytes + (kQuantizes ? 0 : kOnesBytes);
  static constexpr int kTokenScaleBytes = kInt8 ? kBlockM * 4 : 0, kTokenZeroBytes = kTokenZeros ? kBlockM : 0;
  // That come to a stage together with its weights.
  static constexpr int kXRowBytes = kQuantizes ? 0 : kXBytes + kTokenScaleBytes + kTokenZeroBytes;
  // Of 16 columns, or 32 of int8, that are multiplied together, in a step; of those in a tile.
  static constexpr int kPieces = 4, kSteps = kInt8 ? 1 : 2;
  // Lanes of a warpgroup that say when they have read a stage: all, where racecheck would not follow how one speaks for its
  // warp.
  static constexpr int kReaders = kInt8 ? 128 : 4;
  static constexpr int kChunk = k_tile_bytes(kBits), kStepBytes = kChunk / 4 / kSteps;  // of a row block
  static constexpr int kMBlocks = kBlockM / 8, kLogPieces = 3;  // of a row panel's sums: 16 features x 8 rows of x
  static_assert(4 * kMBlocks == 1 << kLogPieces);
  // Of weights that a block is still to ask for when it lets the next launch start: it takes a microsecond to, and two before
  // its weights where a quantiser comes between. But not much earlier: x, which all blocks wait for, stands behind the next
  // launch's weights.
  static constexpr int kEarlyBytes = (kOneCta ? 128 : kQuantizes ? 48 : kInt8 ? 80 : 32) * 1024;
};

// Of wgmma_decode. Element: of x in memory, fp16, bf16, or int8 with separate scales. Scale: of weight scales.
template <class Element_, int kBits_, bool kZeros_, bool kCodebook_ = false, class Scale_ = Element_, bool kQuantizes_ = false,
          bool kTokenZeros_ = false, bool kOneCta_ = false>
struct Config
    : StageConfig<Element_, kBits_, kQuantizes_ || std::is_same_v<Element_, int8_t>, kQuantizes_, kTokenZeros_, kOneCta_> {
  using Scale = Scale_;
  static constexpr bool kFolds = false, kCodebook = kCodebook_, kZeros = kZeros_, kOffsets = false;
  static constexpr int kScaleBytes = sizeof(Scale);
  static constexpr bool kIntegers = kQuantizes_ || std::is_same_v<Element_, int8_t>;
  using Int8Decode = std::conditional_t<kBits_ == 8, decode::Int8Int8,
                                        std::conditional_t<kZeros_, decode::Int4MinusZeroInt8, decode::Int4Int8>>;
  using Decode = std::conditional_t<kIntegers, Int8Decode,
                                    std::conditional_t<kCodebook, decode::Int4Codebook, decode::ToFloat<kBits_, Element_>>>;
  using Table = formats::Codebook::Unscaled<Element_>;
  static constexpr int kGroupSteps =
      kCodebook || kIntegers ? 1 : 2;                          // promoted together: a code book's groups may be of 64 columns
  using Sum = std::conditional_t<kIntegers, uint32_t, float>;  // of a tile's products
  static constexpr int kWords = 4 * Decode::kWords;            // of the four k-slices of a step
};

// Of wgmma_decode_fold16: x of 16 bits.
template <class Element_, class Format_, bool kNarrow, AffineTerm kAffineTerm, bool kQuantizes_, bool kOneCta_,
          bool kGrouped_ = false>
struct FoldConfig : StageConfig<Element_, Format_::kBits, false, kQuantizes_, false, kOneCta_, kGrouped_> {
  using Fold = cutlass_ops::Fold<Element_, Format_, kNarrow, kAffineTerm>;
  using Table = typename Fold::Unscaled;
  static constexpr bool kFolds = true, kCodebook = Format_::kTableBytes > 0;
  static constexpr bool kZeros = Fold::kZeros, kOffsets = Fold::kOffsets;
};

struct Maps {
  CUtensorMap x_rows;
  CUtensorMap codes;                   // in 64-bit words: [row panel][k_tiles * chunk / 2048][256]
  CUtensorMap scales, offsets, zeros;  // [group][row panel][row]
};

struct Params {
  PackedWeight weight;
  float const* token_scales;
  int8_t const* token_zeros;
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
};

constexpr int kCodeRun = 2048;  // bytes of codes that are a dimension of their map, whose boxes are of 256 words at most

// Of stages: all is there; all is read; x is there that is still to be quantised.
struct Barriers {
  static constexpr int kStages = WgmmaDecodeShape::kMostStages;
  uint64_t full[kStages], empty[kStages], raw[kStages], sums;
};

// A block's part of the product: its row panels, but for the features before `begin` and from `end` on, which count from the
// first row panel's.
struct Part {
  int rank, first_row_panel, row_panels, begin, end, first_tile, tiles;
  // Of experts: the tile's, and row panels whose outputs are wanted; where gate and up are multiplied at a time, as many of up
  // lie behind most_row_panels / 2.
  GroupTile group;
  int outputs;

  __device__ __forceinline__ Part(Params const& p, int unit) {
    int index = blockIdx.x >> p.log_cluster;
    rank = blockIdx.x & (p.shape.cluster - 1);
    if (unit == kRowsPerPanel) {
      first_row_panel = p.units.first(index), row_panels = p.units.count(index);
      begin = 0, end = row_panels * kRowsPerPanel;
    } else {
      begin = p.units.first(index) * unit, end = begin + p.units.count(index) * unit;
      first_row_panel = begin / kRowsPerPanel, row_panels = (end + kRowsPerPanel - 1) / kRowsPerPanel - first_row_panel;
      begin -= first_row_panel * kRowsPerPanel, end -= first_row_panel * kRowsPerPanel;
    }
    first_tile = p.tiles.first(rank), tiles = p.tiles.count(rank);
  }

  // Clusters of one tile of rows after another.
  static __device__ __forceinline__ Part of_group(Params const& p) {
    Part part;
    int const index = blockIdx.x >> p.log_cluster, tile = index / p.shape.clusters, share = index - tile * p.shape.clusters;
    part.rank = blockIdx.x & (p.shape.cluster - 1);
    part.group = GroupTile(p.groups, tile, WgmmaDecodeShape::kBlockM);
    part.first_row_panel = p.units.first(share), part.outputs = p.units.count(share);
    part.row_panels = p.shape.most_row_panels;
    if (!p.groups.gated) part.row_panels = part.outputs;
    part.begin = 0, part.end = part.row_panels * kRowsPerPanel;
    part.first_tile = p.tiles.first(part.rank), part.tiles = p.tiles.count(part.rank);
    return part;
  }

 private:
  Part() = default;
};

template <class C>
__device__ __forceinline__ void copy_weights(uint8_t* to, uint64_t* full, Maps const& maps, Params const& p, Part const& part,
                                             int tile) {
  using Copy = cute::SM90_TMA_LOAD_3D;
  constexpr auto kKeep = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  PackedWeight const& w = p.weight;
  int const features = p.shape.most_row_panels * kRowsPerPanel, group = p.weight_rows.first(tile);
  bool const zeros = C::kZeros && w.zeros, offsets = C::kOffsets && w.offsets;
  if constexpr (C::kGrouped) {
    // Boxes of gate's row panels and then of up's.
    using GroupedCopy = cute::SM90_TMA_LOAD_4D;
    int const row_panel = part.group.expert * p.groups.row_panels + part.first_row_panel;
    int const bytes = p.scale_bytes + (offsets ? p.offset_bytes : 0) + (zeros ? 1 : 0);
    TransactionBarrier::arrive_and_expect_tx(full, C::kXBytes / (part.group.rows > 8 ? 1 : 2) +
                                                       p.shape.most_row_panels * C::kChunk +
                                                       p.weight_rows.count * features * bytes);
    GroupedCopy::copy(&maps.codes, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), to, 0, tile * (C::kChunk / kCodeRun),
                      row_panel, 0);
    GroupedCopy::copy(&maps.scales, full, kKeep, to + p.shape.scales, 0, row_panel, 0, group);
    if (offsets) GroupedCopy::copy(&maps.offsets, full, kKeep, to + p.shape.offsets, 0, row_panel, 0, group);
    if (zeros) GroupedCopy::copy(&maps.zeros, full, kKeep, to + p.shape.zeros, 0, row_panel, 0, group);
  } else {
    // Few copies: each takes some twenty nanoseconds. So they are of as many row panels as any cluster has, and of all groups
    // of the tile.
    constexpr int kRowBytes = C::kChunk / kRowsPerPanel;  // on average: units are whole blocks of 16 rows
    int const code_bytes = C::kOneCta ? (part.end - part.begin) * kRowBytes : p.shape.most_row_panels * C::kChunk;
    int const row_bytes = p.scale_bytes + (offsets ? p.offset_bytes : 0) + (zeros ? 1 : 0);
    TransactionBarrier::arrive_and_expect_tx(
        full, C::kXRowBytes + code_bytes + (C::kFolds || C::kCodebook ? p.weight_rows.count : 1) * features * row_bytes);
    if constexpr (C::kOneCta) {
      uint8_t const* codes = w.codes + (int64_t(part.first_row_panel) * p.k_tiles + tile) * C::kChunk;
#pragma unroll 1
      for (int first = 0; first < part.end; first += kRowsPerPanel, codes += int64_t(p.k_tiles) * C::kChunk) {
        int const begin = first == 0 ? part.begin : 0, end = min(kRowsPerPanel, part.end - first);
        cute::SM90_BULK_COPY_G2S::copy(codes + begin * kRowBytes, full, to + (first + begin) * kRowBytes,
                                       (end - begin) * kRowBytes);
      }
    } else {
      Copy::copy(&maps.codes, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), to, 0, tile * (C::kChunk / kCodeRun),
                 part.first_row_panel);
    }
    Copy::copy(&maps.scales, full, kKeep, to + p.shape.scales, 0, part.first_row_panel, group);
    if (offsets) Copy::copy(&maps.offsets, full, kKeep, to + p.shape.offsets, 0, part.first_row_panel, group);
    if (zeros) Copy::copy(&maps.zeros, full, kKeep, to + p.shape.zeros, 0, part.first_row_panel, group);
  }
}

template <class C>
__device__ __forceinline__ void copy_x_rows(uint8_t* to, uint8_t* to_scales, uint64_t* full, CUtensorMap const& map,
                                            Params const& p, Part const& part, int tile) {
  if constexpr (C::kGrouped) {
    // Boxes of eight rows: most experts have fewer.
#pragma unroll
    for (int panel = 0; panel < C::kXBytes / C::kPanelBytes; ++panel)
      for (int row = 0; row < part.group.rows; row += 8)
        cute::SM90_TMA_LOAD_2D::copy(&map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST),
                                     to + panel * C::kPanelBytes + row * 128, tile * kKPerTile + panel * (kKPerTile / 2),
                                     part.group.first_row + row);
  } else {
#pragma unroll
    for (int panel = 0; panel < C::kXBytes / C::kPanelBytes; ++panel)
      cute::SM90_TMA_LOAD_2D::copy(&map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST), to + panel * C::kPanelBytes,
                                   tile * kKPerTile + panel * (kKPerTile / 2), 0);
  }
  if (C::kInt8 && !C::kQuantizes) {
    int64_t const at = int64_t(tile) * p.x_row_stride;
    cute::SM90_BULK_COPY_G2S::copy(p.token_scales + at, full, to_scales, C::kTokenScaleBytes);
    if (C::kTokenZeros)
      cute::SM90_BULK_COPY_G2S::copy(p.token_zeros + at, full, to_scales + C::kTokenScaleBytes, C::kTokenZeroBytes);
  }
}

// By one thread.
template <class C>
__device__ __forceinline__ void produce(uint8_t* shared, Barriers& barriers, Maps const& maps, Params const& p,
                                        Part const& part) {
  uint8_t* const first_weights = shared + p.shape.weights;
  auto weights = [&](int i, int stage) {
    copy_weights<C>(first_weights + stage * p.shape.weight_bytes, &barriers.full[stage], maps, p, part, part.first_tile + i);
  };
  auto x_rows = [&](int i, int stage) {
    uint64_t* const there = C::kQuantizes ? &barriers.raw[stage] : &barriers.full[stage];
    if (C::kQuantizes) TransactionBarrier::arrive_and_expect_tx(there, C::kXBytes);
    copy_x_rows<C>(shared + stage * C::kXStride, first_weights + stage * p.shape.weight_bytes + p.shape.token_scales, there,
                   maps.x_rows, p, part, part.first_tile + i);
  };
  int const ahead = min(part.tiles, p.shape.stages);
  for (int i = 0; i < ahead; ++i) weights(i, i);
  pdl_wait();
  for (int i = 0; i < ahead; ++i) x_rows(i, i);
  int stage = 0;
  uint32_t phase = 0;
  int const last = max(ahead, part.tiles - C::kEarlyBytes / p.shape.weight_bytes);
#pragma unroll 1
  for (int i = ahead; i < part.tiles; ++i) {
    if (i == last) pdl_launch_dependents();
    ClusterBarrier::wait(&barriers.empty[stage], phase);
    weights(i, stage);
    x_rows(i, stage);
    if (++stage == p.shape.stages) stage = 0, phase ^= 1;
  }
  if (last >= part.tiles) pdl_launch_dependents();
}

// Ones behind the codes of a stage, 8 bytes a thread.
__device__ __forceinline__ void store_ones(uint32_t to) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %1};" ::"r"(to + thread_again() % 128 * 8), "r"(0x01010101) : "memory");
}

// 16 columns to the values of their codes, rounded to 16 bits. `lanes`: that share a block.
template <bool kSymmetric, class Element>
__device__ __forceinline__ void to_values_of_codes(Columns<Element>& c, int lanes) {
  Span<Element, kSymmetric> span;
  span.add(c);
  for (int distance = 1; distance < lanes; distance *= 2) span.add(span.of_lane(distance));
  Quantizer<kSymmetric> const quantizer(span.range());
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 const v = c.pair(i);
    c.words[i] = pack_pair<Element>(quantizer.scale * quantizer.value(v.x), quantizer.scale * quantizer.value(v.y));
  }
}

// The codes of a thread's columns, their scale and zero point into the stage.
template <class C, class Element>
__device__ __forceinline__ void store_codes(Columns<Element> const& c, uint32_t x, uint32_t row, int piece, int swizzle,
                                            int x_row, int stage, Params const& p) {
  constexpr int kPieces = kKPerTile / kLaneColumns;
  Span<Element, !C::kTokenZeros> span;
  span.add(c);
#pragma unroll
  for (int distance = 1; distance < kPieces; distance *= 2) span.add(span.of_lane(distance));
  cutlass::arch::NamedBarrier::sync(128, 2 + thread_again() / 128);  // all have read
  Quantizer<!C::kTokenZeros> quantizer(span.range());
  uint4 const v = codes_of(c, quantizer);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(row + ((piece ^ swizzle) << 4)), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
  uint32_t const scales = x + p.shape.weights + stage * p.shape.weight_bytes + p.shape.token_scales;
  if (piece == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + x_row * 4), "f"(quantizer.scale) : "memory");
  if constexpr (C::kTokenZeros) {
    if (piece == 0)
      asm volatile("st.shared.s8 [%0], %1;" ::"r"(scales + C::kTokenScaleBytes + x_row), "r"(int(quantizer.zero)) : "memory");
    store_ones(x + stage * C::kXStride + C::kPanelBytes);
  }
}

// x of a stage to codes, or their values, in its place, by a warpgroup: a thread has 16 columns of a token, eight threads share
// a tile. What that takes is computed again each time: products need the registers.
template <class C>
__device__ __forceinline__ void quantize(uint32_t x, int stage, uint32_t phase, uint64_t* full, Params const& p) {
  using Element = typename C::Element;
  constexpr int kPieces = kKPerTile / kLaneColumns;
  int const thread = thread_again(), x_row = thread % 128 / kPieces, piece = thread % kPieces, swizzle = x_row & 7;
  uint32_t const row = x + stage * C::kXStride + x_row * 128, from = row + piece / 4 * C::kPanelBytes;
  TransactionBarrier::wait(full + 2 * Barriers::kStages + stage, phase);
  Columns<Element> c;
  uint32_t address[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    address[half] = from + (((piece % 4 * 2 + half) ^ swizzle) << 4);
    uint32_t v[4];
    load_shared(address[half], v);
#pragma unroll
    for (int r = 0; r < 4; ++r) c.words[4 * half + r] = v[r];
  }
  if constexpr (C::kFolds) {
    if (p.symmetric) {
      to_values_of_codes<true>(c, p.block_lanes);
    } else {
      to_values_of_codes<false>(c, p.block_lanes);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t const* v = c.words + 4 * half;
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address[half]), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                   : "memory");
    }
  } else {
    store_codes<C>(c, x, row, piece, swizzle, x_row, stage, p);
  }
  cutlass::arch::fence_view_async_shared();
  ClusterBarrier::arrive(full + stage);
}

// The scales of a thread's two rows as they lie in shared memory.
template <class Scale>
struct StoredScales {
  uint32_t words[sizeof(Scale) / 2];

  __device__ __forceinline__ void load(uint32_t from) {
    if constexpr (sizeof(Scale) == 4) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from));
    }
  }
  __device__ __forceinline__ float2 values() const {
    if constexpr (sizeof(Scale) == 4)
      return make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
    else if constexpr (std::is_same_v<Scale, __half>)
      return __half22float2(reinterpret_cast<__half2 const&>(words[0]));
    else
      return make_float2(__uint_as_float(words[0] << 16), __uint_as_float(words[0] & 0xffff0000u));
  }
};

// Where a thread's part of a stage lies: that of its warpgroup's first row panel.
struct StageAddress {
  uint32_t units, scales, offsets, zeros, x_rows, token_zeros;
};

// A tile's products of codes and their promotion. `releases`: whether this lane says that the stage is read.
template <class C, int kRowPanels>
__device__ __forceinline__ void multiply_codes(uint64_t x, StageAddress const& at, uint32_t table, Params const& p,
                                               bool releases, uint64_t* empty, float (&sums)[kRowPanels][C::kSums]) {
  int const next_group = p.weight_rows.count > 1 ? p.shape.most_row_panels * kRowsPerPanel * C::kScaleBytes : 0;
  uint32_t words[C::kWords];
  StoredScales<typename C::Scale> stored, next_stored;
  auto load = [&](int step) {  // of all row panels' steps
#pragma unroll
    for (int j = 0; j < C::kWords / 4; ++j) {
      uint32_t v[4];
      load_shared(at.units + step / C::kSteps * C::kChunk + step % C::kSteps * C::kStepBytes + j * kUnitBytes, v);
#pragma unroll
      for (int r = 0; r < 4; ++r) words[4 * j + r] = v[r];
    }
  };
  load(0);
  next_stored.load(at.scales);
#pragma unroll
  for (int row_panel = 0; row_panel < kRowPanels; ++row_panel) {
    typename C::Sum products[C::kColumns / 2];
    float token_scales[C::kMBlocks][2];
    int token_zeros[C::kMBlocks][2];
    decode::RowConstants zero = {};
    if (C::kZeros) {
      uint32_t two = 0;
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(two) : "r"(at.zeros + row_panel * kRowsPerPanel));
      if constexpr (C::kZeros) zero = C::Decode::zero_constants(int8_t(two), int8_t(two >> 8));
    }
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      uint32_t a[C::kPieces][4];
#pragma unroll
      for (int j = 0; j < C::kPieces; ++j) {
        if constexpr (C::kCodebook) {
          uint32_t pairs[4];
          C::Decode::look_up(words[j], table, pairs);
          C::Decode::combine(pairs, a[j]);
        } else if constexpr (C::kZeros) {
          C::Decode::fragment(words + j * C::Decode::kWords, zero, a[j]);
        } else {
          C::Decode::fragment(words + j * C::Decode::kWords, a[j]);
        }
        fence_registers(a[j]);
      }
      fence_registers(products);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < C::kPieces; ++j) {
        uint64_t const at = x + step * (C::kPanelBytes / 16) + j * 2;
        bool const add = step % C::kGroupSteps > 0 || j > 0;
        if constexpr (C::kInt8) {
          wgmma_int8<C::kColumns>(a[j], at, products, add);
        } else {
          wgmma_float<typename C::Element, C::kBlockM>(a[j], at, products, add);
        }
      }
      cute::warpgroup_commit_batch();
      fence_registers(products);
      int const next = row_panel * C::kSteps + step + 1;
      if (!C::kInt8 && next < kRowPanels * C::kSteps) load(next);
      if (step % C::kGroupSteps == 0) {
        stored = next_stored;
        int const next_row_panel = step + C::kGroupSteps < C::kSteps ? row_panel : row_panel + 1;
        if (next_row_panel < kRowPanels)
          next_stored.load(at.scales + next_row_panel * kRowsPerPanel * C::kScaleBytes +
                           (next_row_panel == row_panel ? next_group : 0));
      }
      if (C::kInt8) {  // read again for every row panel: registers
#pragma unroll
        for (int tb = 0; tb < C::kMBlocks; ++tb) {
          float (&two)[2] = token_scales[tb];
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two[0]), "=f"(two[1]) : "r"(at.x_rows + tb * 32));
          if constexpr (C::kTokenZeros) {
            uint32_t zeros_of_two;
            asm volatile("ld.shared.u16 %0, [%1];" : "=r"(zeros_of_two) : "r"(at.token_zeros + tb * 8));
            token_zeros[tb][0] = int8_t(zeros_of_two), token_zeros[tb][1] = int8_t(zeros_of_two >> 8);
          }
        }
      }
      cute::warpgroup_wait<0>();
#pragma unroll
      for (int j = 0; j < C::kPieces; ++j) fence_registers(a[j]);
      fence_registers(products);
      if (C::kInt8 && next < kRowPanels * C::kSteps) load(next);  // once the operands' registers are free
      if ((step + 1) % C::kGroupSteps) continue;
      if (step + 1 == C::kSteps && row_panel + 1 == kRowPanels && releases) ClusterBarrier::arrive(empty);
      float2 scale = stored.values();
      if constexpr (C::kInt8) scale.x *= 1.0f / C::Decode::kScale, scale.y *= 1.0f / C::Decode::kScale;
#pragma unroll
      for (int e = 0; e < C::kSums; ++e) {
        float const row_scale = e % 4 < 2 ? scale.x : scale.y;
        if constexpr (C::kInt8) {
          int sum = int(products[e]);
          if constexpr (C::kTokenZeros) sum -= token_zeros[e / 4][e % 2] * int(products[C::kSums + e % 4 / 2 * 2]);
          sums[row_panel][e] = fmaf(float(sum), row_scale * token_scales[e / 4][e % 2], sums[row_panel][e]);
        } else {
          sums[row_panel][e] = fmaf(products[e], row_scale, sums[row_panel][e]);
        }
      }
    }
  }
}

// A tile's products of values, by groups of 32 columns: more operands at a time want more registers than two CTAs leave.
template <class C, int kRowPanels>
__device__ __forceinline__ void multiply_values(uint64_t x, StageAddress const& at, uint32_t table, Params const& p,
                                                bool releases, uint64_t* empty, float (&sums)[kRowPanels][C::kSums]) {
  using Fold = typename C::Fold;
  constexpr int kGroups = C::kSteps * Fold::kGroups;  // of 32 columns
  // From what belongs to a group of 32, 64 or 128 columns to what belongs to the next.
  int const rows = p.shape.most_row_panels * kRowsPerPanel, shift = p.weight_rows.count == 4   ? 0
                                                                    : p.weight_rows.count == 2 ? 1
                                                                                               : 2;
  constexpr int kBuffers =
      C::kOneCta ? 2 : 1;  // of operands: one is decoded while the other is multiplied, where there are registers
  uint32_t operands[kBuffers][Fold::kGroupKSlices][4];
  StoredCodes<Fold> codes;
  StoredGroup<Fold> vectors;
  auto fence = [](uint32_t (&a)[Fold::kGroupKSlices][4]) {
#pragma unroll
    for (int j = 0; j < Fold::kGroupKSlices; ++j) fence_registers(a[j]);
  };
  auto load = [&](int i) {  // of all row panels' groups
    int const row_panel = i / kGroups, group = i % kGroups, step = group / Fold::kGroups, part = group % Fold::kGroups;
    if (part < Fold::kLoads) codes.load_part(at.units + row_panel * C::kChunk + step * C::kStepBytes, part);
    uint32_t const row = row_panel * kRowsPerPanel + (group >> shift) * rows;
    vectors.load({at.scales + row * p.scale_bytes, at.offsets + row * p.offset_bytes, at.zeros + row}, p);
  };
  load(0);
#pragma unroll
  for (int i = 0; i < kRowPanels * kGroups; ++i) {
    int const row_panel = i / kGroups, group = i % kGroups;
    uint32_t (&a)[Fold::kGroupKSlices][4] = operands[i % kBuffers];
    vectors.decode(codes.words + group % Fold::kGroups * Fold::kGroupWords, table, p, a);
    fence(a);
    fence_registers(sums[row_panel]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < Fold::kGroupKSlices; ++j)
      wgmma_float<typename C::Element, C::kBlockM>(a[j], x + group / 2 * (C::kPanelBytes / 16) + group % 2 * 4 + j * 2,
                                                   sums[row_panel], true);
    cute::warpgroup_commit_batch();
    fence_registers(sums[row_panel]);
    bool const more = i + 1 < kRowPanels * kGroups;
    if (Fold::kNarrow && more) load(i + 1);
    cute::warpgroup_wait<kBuffers - 1>();
    fence(operands[(i + 1) % kBuffers]);
    if (kBuffers == 1) fence_registers(sums[row_panel]);
    if (!Fold::kNarrow && more) load(i + 1);  // once the operands' registers are free
  }
  cute::warpgroup_wait<0>();
#pragma unroll
  for (int row_panel = 0; row_panel < kRowPanels; ++row_panel) fence_registers(sums[row_panel]);
#pragma unroll
  for (int i = 0; i < kBuffers; ++i) fence(operands[i]);
  if (releases) ClusterBarrier::arrive(empty);
}

// A warpgroup's kRowPanels row panels, from `first` of the block's: their sums over the block's tiles, and those to the blocks
// that end with them.
template <class C, int kRowPanels>
__device__ __forceinline__ void consume(uint8_t* shared, Barriers& barriers, Params const& p, Part const& part, int warp,
                                        int first) {
  int const lane = threadIdx.x % 32, block = warp % 4, set = p.shape.sets > 1 ? warp / 4 : 0;
  float sums[kRowPanels][C::kSums] = {};
  // Pinned in registers, as in hopper_gemm.cuh.
  uint32_t row = first * kRowsPerPanel + lane / 4 * 8 + block * 2;  // in the order of group vectors
  uint32_t x_at = cute::cast_smem_ptr_to_uint(shared), base = x_at + p.shape.weights, weight_bytes = p.shape.weight_bytes;
  StageAddress at{base + first * C::kChunk + block * (C::kChunk / 4) + lane * kLaneBytes,
                  base + p.shape.scales + row * p.scale_bytes,
                  0,
                  base + p.shape.zeros + row,
                  base + p.shape.token_scales + lane % 4 * 8,
                  base + p.shape.token_scales + C::kTokenScaleBytes + lane % 4 * 2};
  uint64_t* full = barriers.full;
  asm volatile("" : "+r"(x_at), "+r"(at.units), "+r"(at.scales));
  if (!C::kFolds) asm volatile("" : "+l"(full));
  if (C::kFolds && (C::kZeros || C::kOffsets)) asm volatile("" : "+r"(row));
  if (C::kInt8) asm volatile("" : "+r"(at.x_rows));
  if (C::kTokenZeros) asm volatile("" : "+r"(at.token_zeros));
  int stage = set, to_quantize = warp / 4 + C::kWarpgroups;
  uint32_t phase = 0;
#pragma unroll 1
  for (int i = set; i < part.tiles; i += p.shape.sets) {
    if constexpr (C::kQuantizes) {
      // Every third tile is this warpgroup's, some time before it is multiplied: in a stage that is another than this one, if
      // there are enough.
      int const ahead = p.shape.sets == 1 ? 1 : p.shape.stages > C::kWarpgroups ? C::kWarpgroups : 0;
      if (i + ahead == to_quantize) {
        bool const wraps = stage + ahead >= p.shape.stages;
        if (to_quantize < part.tiles)
          quantize<C>(x_at, stage + ahead - (wraps ? p.shape.stages : 0), phase ^ uint32_t(wraps), full, p);
        // (Where a cluster has fewer row panels than warpgroups, which then are one set if a warpgroup takes few, by those that
        // have one.)
        to_quantize +=
            C::kMostRowPanels < C::kWarpgroups && p.shape.sets == 1 ? min(C::kWarpgroups, part.row_panels) : C::kWarpgroups;
      }
    }
    uint32_t const offset = stage * weight_bytes;
    uint64_t const x =
        uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | __shfl_sync(~0u, (x_at + stage * C::kXStride) >> 4 & 0x3fff, 0);
    TransactionBarrier::wait(full + stage, phase);
    StageAddress here{at.units + offset, at.scales + offset, 0, at.zeros + offset, at.x_rows + offset, at.token_zeros + offset};
    if (C::kFolds) {  // from the scales': registers
      here.offsets = here.scales + (p.shape.offsets - p.shape.scales) + row * (p.offset_bytes - p.scale_bytes);
      here.zeros = here.scales + (p.shape.zeros - p.shape.scales) - row * (p.scale_bytes - 1);
    }
    // int8: if another tile is to come there. (Without a branch the compiler holds more registers than there are.)
    bool const releases = C::kInt8 ? i + p.shape.stages < part.tiles : lane == 0;
    uint64_t* const empty = full + Barriers::kStages + stage;
    uint32_t const table = x_at + p.shape.table + lane * 4;
    if constexpr (C::kFolds) {
      multiply_values<C, kRowPanels>(x, here, table, p, releases, empty, sums);
    } else {
      multiply_codes<C, kRowPanels>(x, here, table, p, releases, empty, sums);
    }
    stage += p.shape.sets;
    if (stage >= p.shape.stages) stage -= p.shape.stages, phase ^= 1;
  }
  cute::cluster_arrive_relaxed();  // all blocks are done with their stages: sums take their place
  cute::cluster_wait();
  // [rank and set][row panel][piece][lane], a piece being 16 features of 8 rows of x.
  float4* received = reinterpret_cast<float4*>(shared);
  int const log_pieces = C::kLogPieces - p.log_cluster, from = part.rank * p.shape.sets + set;
#pragma unroll
  for (int row_panel = 0; row_panel < kRowPanels; ++row_panel)
#pragma unroll
    for (int tb = 0; tb < C::kMBlocks; ++tb) {
      int piece = block * C::kMBlocks + tb, to = piece >> log_pieces;
      float const* v = &sums[row_panel][tb * 4];
      int place = ((from * part.row_panels + first + row_panel) << log_pieces) + piece - (to << log_pieces);
      if (p.shape.cluster == 1) {
        received[place * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
      } else {
        store_remote(received + place * 32 + lane, make_float4(v[0], v[1], v[2], v[3]), &barriers.sums, to);
      }
    }
}

// The sums of a piece in the order of wgmma's accumulators, of rows g, g + 8 and rows of x 2t, 2t + 1: the four lanes of
// neighbouring rows exchange theirs, until each has four neighbouring features of a token.
struct FeaturesOfRow {
  int x_row, feature;  // from the piece's first
  float sums[4];

  __device__ __forceinline__ FeaturesOfRow(float (&v)[4], float const* row_scales, int m_block, int x_rows) {
    int const lane = threadIdx.x % 32, i = lane / 4 % 4;
    bool const high = i & 2, odd = i & 1;
    float w[2][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float mine = high ? v[2 + c] : v[c], theirs = __shfl_xor_sync(~0u, high ? v[c] : v[2 + c], 8);
      w[0][c] = high ? theirs : mine, w[1][c] = high ? mine : theirs;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float mine = odd ? w[h][1] : w[h][0], theirs = __shfl_xor_sync(~0u, odd ? w[h][0] : w[h][1], 4);
      sums[2 * h] = odd ? theirs : mine, sums[2 * h + 1] = odd ? mine : theirs;
    }
    x_row = m_block * 8 + lane % 4 * 2 + odd;
    feature = i / 2 * 8 + lane / 16 * 4;
    if (row_scales && x_row < x_rows) {
#pragma unroll
      for (float& sum : sums) sum *= row_scales[x_row];
    }
  }
};

__device__ __forceinline__ void finish(float (&v)[4], int n, int m_block, float const* row_scales, EpilogueParams const& p) {
  FeaturesOfRow at(v, row_scales, m_block, p.m);
  n += at.feature;
  if (at.x_row >= p.m || n >= p.n) return;
  store_outputs(at.sums, at.x_row, n, p);
}

// A thread's part of either kernel.
template <class C>
__device__ __forceinline__ void decode_rows(Maps const& maps, Params const& p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  Part part = [&] {
    if constexpr (C::kGrouped) {
      return Part::of_group(p);
    } else {
      return Part(p, WgmmaDecodeShape::unit(C::kOneCta));
    }
  }();
  if constexpr (C::kGrouped) {
    if (part.group.rows == 0) return pdl_wait();  // the grid is for as many tiles as there may be
  }
  if constexpr (C::kCodebook) C::Table::fill_table(shared + p.shape.table, p.weight.book, threadIdx.x, C::kThreads);
  if constexpr (C::kTokenZeros && !C::kQuantizes) {
    if (threadIdx.x < 128)
      for (int i = 0; i < p.shape.stages; ++i) store_ones(cute::cast_smem_ptr_to_uint(shared) + i * C::kXStride + C::kXBytes);
    cutlass::arch::fence_view_async_shared();
  }
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 32 * C::kWarps) {
    for (int i = 0; i < p.shape.stages; ++i) {
      TransactionBarrier::init(&barriers.full[i], C::kQuantizes ? 1 + 128 : 1);
      TransactionBarrier::init(&barriers.raw[i], 1);
      ClusterBarrier::init(&barriers.empty[i], C::kReaders * (p.shape.sets > 1 ? 1 : min(C::kWarpgroups, part.row_panels)));
    }
    TransactionBarrier::init(&barriers.sums, 1);
    cutlass::arch::fence_barrier_init();
    TransactionBarrier::arrive_and_expect_tx(&barriers.sums, p.shape.sets * part.row_panels * kRowsPerPanel * C::kBlockM * 4);
  }
  __syncthreads();
  if (warp == C::kWarps) {
    if (cute::elect_one_sync()) produce<C>(shared, barriers, maps, p, part);
    __syncwarp();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    return;
  }
  pdl_wait();
  if constexpr (C::kQuantizes) {
    if (warp / 4 < part.tiles) quantize<C>(cute::cast_smem_ptr_to_uint(shared), warp / 4, 0, barriers.full, p);
  }
  int first = 0, count = part.row_panels;
  if (p.shape.sets == 1) {
    int base = part.row_panels / C::kWarpgroups, rest = part.row_panels % C::kWarpgroups, group = warp / 4;
    first = group * base + min(group, rest), count = base + (group < rest);
  }
  switch (count) {
    case 0:
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
      break;
    case 1:
      consume<C, 1>(shared, barriers, p, part, warp, first);
      break;
    case 2:
      consume<C, 2>(shared, barriers, p, part, warp, first);
      break;
    case 3:
      if constexpr (C::kMostRowPanels >= 3) consume<C, 3>(shared, barriers, p, part, warp, first);
      break;
  }
  if (p.shape.cluster == 1) {
    cutlass::arch::NamedBarrier::sync(32 * C::kWarps, 1);
  } else {
    TransactionBarrier::wait(&barriers.sums, 0);
  }
  int const log_pieces = C::kLogPieces - p.log_cluster, pieces = part.row_panels << log_pieces;
  auto const total = [&](int i, float (&v)[4]) {
    float4 const* from = reinterpret_cast<float4 const*>(shared) + i * 32 + threadIdx.x % 32;
#pragma unroll 2
    for (int r = 0; r < p.shape.sets << p.log_cluster; ++r, from += pieces * 32) {
      float4 theirs = *from;
      v[0] += theirs.x, v[1] += theirs.y, v[2] += theirs.z, v[3] += theirs.w;
    }
  };
  for (int i = warp; i < (C::kGrouped ? part.outputs << log_pieces : pieces); i += C::kWarps) {
    int const row_panel = i >> log_pieces, piece = (part.rank << log_pieces) + i - (row_panel << log_pieces);
    int const row = row_panel * kRowsPerPanel + piece / C::kMBlocks * 16, x_rows = piece % C::kMBlocks;
    if constexpr (C::kOneCta) {
      if (row < part.begin || row >= part.end) continue;
    }
    float v[4] = {};
    total(i, v);
    int const n = part.first_row_panel * kRowsPerPanel + row;
    if constexpr (C::kGrouped) {
      if (part.group.rows <= x_rows * 8) continue;
      float up[4] = {};
      if (p.groups.gated) total(i + (part.row_panels / 2 << log_pieces), up);
      float const* row_scales = p.token_scales ? p.token_scales + part.group.first_row : nullptr;
      FeaturesOfRow gate(v, row_scales, x_rows, part.group.rows);
      FeaturesOfRow const other(up, row_scales, x_rows, part.group.rows);
      finish_group(gate.sums, other.sums, gate.x_row, n + gate.feature, part.group, p.groups, p.epilogue);
    } else {
      finish(v, n, x_rows, C::kFolds ? p.token_scales : nullptr, p.epilogue);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kOneCta ? 64 : 0), C::kOneCta ? 1 : 2)
    wgmma_decode(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  decode_rows<C>(maps, p);
#endif
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kOneCta ? 64 : 0), C::kOneCta ? 1 : 2)
    wgmma_decode_fold16(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  decode_rows<C>(maps, p);
#endif
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  WgmmaDecodeShape const& shape = plan.wgmma_decode;
  Maps maps;
  QuantizedActivations const& q = problem.quantized;
  int64_t const k_pad = padded_k(w.k);
  Status status = std::is_same_v<typename C::Element, int8_t>
                      ? hopper::encode_x_rows(q.codes, 1, problem.m, int(k_pad), k_pad, C::kBlockM, &maps.x_rows)
                      : hopper::encode_x_rows(problem.x, 2, problem.m, w.k, problem.x_stride * 2, C::kBlockM, &maps.x_rows);
  if (!status.ok()) return status;
  int const k_tiles = int(k_pad / kKPerTile), n_pad = int(padded_rows(w.n));
  VectorRows const rows(w.group_size);
  cuuint64_t const row_panels = n_pad / kRowsPerPanel, runs = cuuint64_t(k_tiles) * (C::kChunk / kCodeRun),
                   groups = w.group_size == -1 ? 1 : (k_pad + w.group_size - 1) / w.group_size;
  cuuint32_t const row_panel_box = shape.most_row_panels, group_box = C::kFolds || C::kCodebook ? rows.count : 1;
  status = hopper::encode<3>(CU_TENSOR_MAP_DATA_TYPE_UINT64, w.codes, {kCodeRun / 8, runs, row_panels},
                             {kCodeRun, runs * kCodeRun}, {kCodeRun / 8, C::kChunk / kCodeRun, row_panel_box},
                             CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &maps.codes);
  // Of `bytes` for each row and group.
  auto const encode_vectors = [&](void const* vectors, int bytes, CUtensorMap* map) {
    if (!vectors || !status.ok()) return;
    CUtensorMapDataType const type = bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    status = hopper::encode<3>(
        type, vectors, {kRowsPerPanel, row_panels, groups}, {cuuint64_t(kRowsPerPanel * bytes), cuuint64_t(n_pad) * bytes},
        {kRowsPerPanel, row_panel_box, group_box}, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, map);
  };
  int const scale_bytes = size_of(w.scale_type), offset_bytes = w.offsets ? size_of(w.offset_type) : 0;
  encode_vectors(w.scales, scale_bytes, &maps.scales);
  encode_vectors(w.offsets, offset_bytes, &maps.offsets);
  encode_vectors(w.zeros, 1, &maps.zeros);
  if (!status.ok()) return status;
  int log_cluster = 0;
  while (1 << log_cluster < shape.cluster) ++log_cluster;
  Params p{w,
           q.scales,
           q.zeros,
           q.block == -1 ? 0 : q.stride,
           problem.act_symmetric,
           activation_block(w.group_size) / kLaneColumns,
           scale_bytes,
           offset_bytes,
           EpilogueParams(problem),
           rows,
           shape,
           EvenPartition(n_pad / WgmmaDecodeShape::unit(C::kOneCta), shape.clusters),
           EvenPartition(k_tiles, shape.cluster),
           k_tiles,
           n_pad,
           log_cluster,
           {}};
  if constexpr (C::kFolds) {
    return launch_plan(wgmma_decode_fold16<C>, plan, C::kThreads, shape.shared_bytes, stream, maps, p);
  } else {
    return launch_plan(wgmma_decode<C>, plan, C::kThreads, shape.shared_bytes, stream, maps, p);
  }
}

// Of experts: a cluster has a tile of rows and a share of its expert's features.
template <class C>
Status launch_grouped_config(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  WgmmaDecodeShape const& shape = plan.wgmma_decode;
  Groups const& groups = problem.groups;
  Maps maps;
  constexpr int kBoxRows = 8;
  Status status = hopper::encode_x_rows(problem.x, 2, problem.rows, w.k, problem.x_stride * 2, kBoxRows, &maps.x_rows);
  if (!status.ok()) return status;
  int64_t const k_pad = padded_k(w.k);
  int const k_tiles = int(k_pad / kKPerTile), n_pad = int(padded_rows(w.n)), halves = groups.gated ? 2 : 1;
  VectorRows const rows(w.group_size);
  // The second half of an expert's features is a dimension of the map: its row panels lie as many behind.
  cuuint64_t const half = groups.row_panels / halves, row_panels = n_pad / kRowsPerPanel - (halves - 1) * half,
                   runs = cuuint64_t(k_tiles) * (C::kChunk / kCodeRun),
                   vectors = w.group_size == -1 ? 1 : (k_pad + w.group_size - 1) / w.group_size;
  cuuint32_t const row_panel_box = shape.most_row_panels / halves, half_box = halves, vector_box = rows.count;
  status = hopper::encode<4>(CU_TENSOR_MAP_DATA_TYPE_UINT64, w.codes, {kCodeRun / 8, runs, row_panels, cuuint64_t(halves)},
                             {kCodeRun, runs * kCodeRun, half * runs * kCodeRun},
                             {kCodeRun / 8, C::kChunk / kCodeRun, row_panel_box, half_box}, CU_TENSOR_MAP_SWIZZLE_NONE,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &maps.codes);
  auto const encode_vectors = [&](void const* data, int bytes, CUtensorMap* map) {
    if (!data || !status.ok()) return;
    CUtensorMapDataType const type = bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    cuuint64_t const row_panel_bytes = kRowsPerPanel * bytes;
    status = hopper::encode<4>(type, data, {kRowsPerPanel, row_panels, cuuint64_t(halves), vectors},
                               {row_panel_bytes, half * row_panel_bytes, cuuint64_t(n_pad) * bytes},
                               {kRowsPerPanel, row_panel_box, half_box, vector_box}, CU_TENSOR_MAP_SWIZZLE_NONE,
                               CU_TENSOR_MAP_L2_PROMOTION_NONE, map);
  };
  int const scale_bytes = size_of(w.scale_type), offset_bytes = w.offsets ? size_of(w.offset_type) : 0;
  encode_vectors(w.scales, scale_bytes, &maps.scales);
  encode_vectors(w.offsets, offset_bytes, &maps.offsets);
  encode_vectors(w.zeros, 1, &maps.zeros);
  if (!status.ok()) return status;
  int log_cluster = 0;
  while (1 << log_cluster < shape.cluster) ++log_cluster;
  GemmProblem rows_of_all;
  rows_of_all.m = problem.rows, rows_of_all.weight = w, rows_of_all.weight.n = problem.n;
  rows_of_all.out = problem.out, rows_of_all.out_type = problem.out_type;
  Params const p{w,
                 problem.row_scales,
                 nullptr,
                 0,
                 true,
                 0,
                 scale_bytes,
                 offset_bytes,
                 EpilogueParams(rows_of_all),
                 rows,
                 shape,
                 EvenPartition(groups.row_panels / halves, shape.clusters),
                 EvenPartition(k_tiles, shape.cluster),
                 k_tiles,
                 n_pad,
                 log_cluster,
                 groups};
  return launch_plan(wgmma_decode_fold16<C>, plan, C::kThreads, shape.shared_bytes, stream, maps, p);
}

}  // namespace
}  // namespace cutlass_ops
