// Up to 16 rows of x x weights of any format on Hopper's wgmma, while a batch decodes, sm_90a.
//
//   cluster   up to nine row panels of 64 output features; its CTAs share K in equal slices
//   stage     a tile of K, 128 columns: the panels' codes and group vectors by bulk copies, x by its tensor map once for all of them. One warp issues the
//             copies; those of weights before the kernel waits for its predecessor. Two CTAs fit on an SM, so that the next launch's first stages arrive
//             while this one ends. With large 8-bit weights, or `alone`, one does, with the stages of two: the bytes in flight on all SMs then cover
//             the time from one launch's last product to the next one's first. K is left whole there, and clusters get halves of panels, for equal shares
//   quantise  x that is to be int8 becomes codes, or the values of codes, in its stage, every third tile by one of the warpgroups that multiply
//   multiply  a warpgroup a panel at a time, weights through registers as operand A: a panel's decoding in one hides behind products in the others.
//             Three warpgroups, four of a CTA that is alone, share the panels, or, where these are few, take turns at tiles
//   end       sums leave registers for the CTA of the cluster that ends with those features, by st.async, and are added in a fixed order
//
// Two kernels differ in what they multiply:
//
//   wgmma_decode         codes minus zero points, exactly; after a tile, sum = fma(the tile's sum, weight scale, sum), as in wgmma_gemm_a16.cu. Zero points
//                        of int8 x take away so many sums of the tile's weights, which eight columns of ones beside x's make on the way
//   wgmma_decode_fold16  the weights' values, rounded to the 16 bits of x (device/fold.cuh): one set of sums over all of K
#pragma once

#include <type_traits>

#include "device/decode.cuh"
#include "device/fold.cuh"
#include "device/hopper_gemm.cuh"
#include "device/quantize.cuh"
#include "device/shares.cuh"
#include "device/tile.cuh"
#include "dispatch/problem.h"
#include "formats/codebook.cuh"
#include "kernels/kernels.h"

#pragma nv_diag_suppress 177  // for other GPUs the kernels have no bodies, which read the members of Config

namespace cutlass_ops {
namespace {

// What both kernels have. Element: of x in memory. kInt8: x is int8 where it is multiplied; kQuantizes: and floats in memory, or they become the values of such
// codes; kTokenZeros: int8 x has zero points; what they take away are sums of weights, and operand B has eight more columns, of ones, that make these.
template <class Element_, int kBits_, bool kInt8_, bool kQuantizes_, bool kTokenZeros_, bool kAlone_>
struct StageConfig {
  using Element = Element_;
  static constexpr bool kInt8 = kInt8_, kQuantizes = kQuantizes_, kTokenZeros = kTokenZeros_, kAlone = kAlone_;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = WgmmaDecodeShape::kTokens;
  static constexpr int kWarpgroups = WgmmaDecodeShape::warpgroups(kAlone), kWarps = 4 * kWarpgroups;  // that multiply
  static constexpr int kMostSlabs = WgmmaDecodeShape::most_slabs_of(kAlone, kTokenZeros);
  static constexpr int kThreads = 32 * kWarps + 32;
  static constexpr int kSums = kTokens / 2;                         // registers of a slab
  static constexpr int kColumns = kTokens + (kTokenZeros ? 8 : 0);  // of operand B
  static constexpr int kXBytes = kTokens * kKPerTile * int(sizeof(Element));
  static constexpr int kPanelBytes = kTokens * 128;  // of x in shared memory: rows of 128 bytes, in the 128-byte swizzle
  // Codes that a block makes take the place of floats, and so do the ones behind them.
  static constexpr int kOnesBytes = kTokenZeros ? 8 * 128 : 0, kXStride = kXBytes + (kQuantizes ? 0 : kOnesBytes);
  static constexpr int kTokenScaleBytes = kInt8 ? kTokens * 4 : 0, kTokenZeroBytes = kTokenZeros ? kTokens : 0;
  // That come to a stage together with its weights.
  static constexpr int kTokenBytes = kQuantizes ? 0 : kXBytes + kTokenScaleBytes + kTokenZeroBytes;
  // Of 16 columns, or 32 of int8, that are multiplied together, in a step; of those in a tile.
  static constexpr int kPieces = 4, kSteps = kInt8 ? 1 : 2;
  // Lanes of a warpgroup that say when they have read a stage: all, where racecheck would not follow how one speaks for its warp.
  static constexpr int kReaders = kInt8 ? 128 : 4;
  static constexpr int kChunk = chunk_bytes(kBits), kStepBytes = kChunk / 4 / kSteps;  // of a row block
  static constexpr int kTokenBlocks = kTokens / 8, kLogPieces = 3;  // of a slab's sums: 16 features x 8 tokens
  static_assert(4 * kTokenBlocks == 1 << kLogPieces);
  // Of weights that a block is still to ask for when it lets the next launch start: it takes a microsecond to, and two before its weights where a quantiser
  // comes between. But not much earlier: x, which all blocks wait for, stands behind the next launch's weights.
  static constexpr int kEarlyBytes = (kAlone ? 128 : kQuantizes ? 48 : kInt8 ? 80 : 32) * 1024;
};

// Of wgmma_decode. Element: of x in memory, fp16, bf16, or int8 with scales of its own. Scale: of weight scales.
template <class Element_, int kBits_, bool kZeros_, bool kCodebook_ = false, class Scale_ = Element_, bool kQuantizes_ = false,
          bool kTokenZeros_ = false, bool kAlone_ = false>
struct Config
    : StageConfig<Element_, kBits_, kQuantizes_ || std::is_same_v<Element_, int8_t>, kQuantizes_, kTokenZeros_, kAlone_> {
  using Scale = Scale_;
  static constexpr bool kFolds = false, kCodebook = kCodebook_, kZeros = kZeros_, kOffsets = false;
  static constexpr int kScaleBytes = sizeof(Scale);
  static constexpr bool kIntegers = kQuantizes_ || std::is_same_v<Element_, int8_t>;
  using Int8Decode = std::conditional_t<kBits_ == 8, decode::Int8Int8,
                                        std::conditional_t<kZeros_, decode::Int4MinusZeroInt8, decode::Int4Int8>>;
  using Decode = std::conditional_t<kIntegers, Int8Decode,
                                    std::conditional_t<kCodebook, decode::Int4Book, decode::ToFloat<kBits_, Element_>>>;
  using Table = formats::Codebook::Unscaled<Element_>;
  static constexpr int kGroupSteps =
      kCodebook || kIntegers ? 1 : 2;                          // promoted together: a code book's groups may be of 64 columns
  using Sum = std::conditional_t<kIntegers, uint32_t, float>;  // of a tile's products
  static constexpr int kWords = 4 * Decode::kWords;            // of the four pieces of a step
};

// Of wgmma_decode_fold16: x of 16 bits.
template <class Element_, class Format_, bool kNarrow, Shift kShift, bool kQuantizes_, bool kAlone_>
struct FoldConfig : StageConfig<Element_, Format_::kBits, false, kQuantizes_, false, kAlone_> {
  using Fold = cutlass_ops::Fold<Element_, Format_, kNarrow, kShift>;
  using Table = typename Fold::Unscaled;
  static constexpr bool kFolds = true, kCodebook = Format_::kTableBytes > 0;
  static constexpr bool kZeros = Fold::kZeros, kOffsets = Fold::kOffsets;
};

struct Maps {
  CUtensorMap tokens;
  CUtensorMap codes;                   // in 64-bit words: [slab][k_tiles * chunk / 2048][256]
  CUtensorMap scales, offsets, zeros;  // [group][slab][row]
};

struct Params {
  PackedWeight weight;
  float const* token_scales;
  int8_t const* token_zeros;
  int token_stride;               // from a tile's scales, or zero points, to the next's
  bool symmetric;                 // of x that is quantised here
  int block_lanes;                // of 16 columns each, that share a block of x then
  int scale_bytes, offset_bytes;  // of one
  EpilogueParams epilogue;
  VectorRows weight_rows;
  WgmmaDecodeShape shape;
  Shares units, tiles;  // of the clusters, and of a cluster's blocks
  int k_tiles, n_pad, log_cluster;
};

constexpr int kCodeRun = 2048;  // bytes of codes that are a dimension of their map, whose boxes are of 256 words at most

// Of stages: all is there; all is read; x is there that is still to be quantised.
struct Barriers {
  static constexpr int kStages = WgmmaDecodeShape::kMostStages;
  uint64_t full[kStages], empty[kStages], raw[kStages], sums;
};

// A block's part of the product: its slabs, but for the features before `begin` and from `end` on, which count from the first slab's.
struct Part {
  int rank, first_slab, slabs, begin, end, first_tile, tiles;

  __device__ __forceinline__ Part(Params const& p, int unit) {
    int index = blockIdx.x >> p.log_cluster;
    rank = blockIdx.x & (p.shape.cluster - 1);
    if (unit == kRowsPerSlab) {
      first_slab = p.units.first(index), slabs = p.units.count(index);
      begin = 0, end = slabs * kRowsPerSlab;
    } else {
      begin = p.units.first(index) * unit, end = begin + p.units.count(index) * unit;
      first_slab = begin / kRowsPerSlab, slabs = (end + kRowsPerSlab - 1) / kRowsPerSlab - first_slab;
      begin -= first_slab * kRowsPerSlab, end -= first_slab * kRowsPerSlab;
    }
    first_tile = p.tiles.first(rank), tiles = p.tiles.count(rank);
  }
};

template <class C>
__device__ __forceinline__ void copy_weights(uint8_t* to, uint64_t* full, Maps const& maps, Params const& p, Part const& part,
                                             int tile) {
  using Copy = cute::SM90_TMA_LOAD_3D;
  constexpr auto kKeep = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  PackedWeight const& w = p.weight;
  int const features = p.shape.most_slabs * kRowsPerSlab, group = p.weight_rows.first(tile);
  bool const zeros = C::kZeros && w.zeros, offsets = C::kOffsets && w.offsets;
  // Few copies: each takes some twenty nanoseconds. So they are of as many slabs as any cluster has, and of all groups of the tile.
  constexpr int kRowBytes = C::kChunk / kRowsPerSlab;  // on average: units are whole blocks of 16 rows
  int const code_bytes = C::kAlone ? (part.end - part.begin) * kRowBytes : p.shape.most_slabs * C::kChunk;
  int const row_bytes = p.scale_bytes + (offsets ? p.offset_bytes : 0) + (zeros ? 1 : 0);
  TransactionBarrier::arrive_and_expect_tx(
      full, C::kTokenBytes + code_bytes + (C::kFolds || C::kCodebook ? p.weight_rows.count : 1) * features * row_bytes);
  if constexpr (C::kAlone) {
    uint8_t const* codes = w.codes + (int64_t(part.first_slab) * p.k_tiles + tile) * C::kChunk;
#pragma unroll 1
    for (int first = 0; first < part.end; first += kRowsPerSlab, codes += int64_t(p.k_tiles) * C::kChunk) {
      int const begin = first == 0 ? part.begin : 0, end = min(kRowsPerSlab, part.end - first);
      cute::SM90_BULK_COPY_G2S::copy(codes + begin * kRowBytes, full, to + (first + begin) * kRowBytes,
                                     (end - begin) * kRowBytes);
    }
  } else {
    Copy::copy(&maps.codes, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), to, 0, tile * (C::kChunk / kCodeRun),
               part.first_slab);
  }
  Copy::copy(&maps.scales, full, kKeep, to + p.shape.scales, 0, part.first_slab, group);
  if (offsets) Copy::copy(&maps.offsets, full, kKeep, to + p.shape.offsets, 0, part.first_slab, group);
  if (zeros) Copy::copy(&maps.zeros, full, kKeep, to + p.shape.zeros, 0, part.first_slab, group);
}

template <class C>
__device__ __forceinline__ void copy_tokens(uint8_t* to, uint8_t* to_scales, uint64_t* full, CUtensorMap const& map,
                                            Params const& p, int tile) {
#pragma unroll
  for (int panel = 0; panel < C::kXBytes / C::kPanelBytes; ++panel)
    cute::SM90_TMA_LOAD_2D::copy(&map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST), to + panel * C::kPanelBytes,
                                 tile * kKPerTile + panel * (kKPerTile / 2), 0);
  if (C::kInt8 && !C::kQuantizes) {
    int64_t const at = int64_t(tile) * p.token_stride;
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
  auto tokens = [&](int i, int stage) {
    uint64_t* const there = C::kQuantizes ? &barriers.raw[stage] : &barriers.full[stage];
    if (C::kQuantizes) TransactionBarrier::arrive_and_expect_tx(there, C::kXBytes);
    copy_tokens<C>(shared + stage * C::kXStride, first_weights + stage * p.shape.weight_bytes + p.shape.token_scales, there,
                   maps.tokens, p, part.first_tile + i);
  };
  int const ahead = min(part.tiles, p.shape.stages);
  for (int i = 0; i < ahead; ++i) weights(i, i);
  wait_alone();
  for (int i = 0; i < ahead; ++i) tokens(i, i);
  int stage = 0;
  uint32_t phase = 0;
  int const last = max(ahead, part.tiles - C::kEarlyBytes / p.shape.weight_bytes);
#pragma unroll 1
  for (int i = ahead; i < part.tiles; ++i) {
    if (i == last) let_successor_start();
    ClusterBarrier::wait(&barriers.empty[stage], phase);
    weights(i, stage);
    tokens(i, stage);
    if (++stage == p.shape.stages) stage = 0, phase ^= 1;
  }
  if (last >= part.tiles) let_successor_start();
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
                                            int token, int stage, Params const& p) {
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
  if (piece == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + token * 4), "f"(quantizer.scale) : "memory");
  if constexpr (C::kTokenZeros) {
    if (piece == 0)
      asm volatile("st.shared.s8 [%0], %1;" ::"r"(scales + C::kTokenScaleBytes + token), "r"(int(quantizer.zero)) : "memory");
    store_ones(x + stage * C::kXStride + C::kPanelBytes);
  }
}

// x of a stage to codes, or their values, in its place, by a warpgroup: a thread has 16 columns of a token, eight threads share a tile. What that takes is
// computed again each time: products need the registers.
template <class C>
__device__ __forceinline__ void quantize(uint32_t x, int stage, uint32_t phase, uint64_t* full, Params const& p) {
  using Element = typename C::Element;
  constexpr int kPieces = kKPerTile / kLaneColumns;
  int const thread = thread_again(), token = thread % 128 / kPieces, piece = thread % kPieces, swizzle = token & 7;
  uint32_t const row = x + stage * C::kXStride + token * 128, from = row + piece / 4 * C::kPanelBytes;
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
    store_codes<C>(c, x, row, piece, swizzle, token, stage, p);
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

// Where a thread's part of a stage lies: that of its warpgroup's first slab.
struct StageAddress {
  uint32_t units, scales, offsets, zeros, tokens, token_zeros;
};

// A tile's products of codes and their promotion. `releases`: whether this lane says that the stage is read.
template <class C, int kSlabs>
__device__ __forceinline__ void multiply_codes(uint64_t x, StageAddress const& at, uint32_t table, Params const& p,
                                               bool releases, uint64_t* empty, float (&sums)[kSlabs][C::kSums]) {
  int const next_group = p.weight_rows.count > 1 ? p.shape.most_slabs * kRowsPerSlab * C::kScaleBytes : 0;
  uint32_t words[C::kWords];
  StoredScales<typename C::Scale> stored, next_stored;
  auto load = [&](int step) {  // of all slabs' steps
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
  for (int slab = 0; slab < kSlabs; ++slab) {
    typename C::Sum products[C::kColumns / 2];
    float token_scales[C::kTokenBlocks][2];
    int token_zeros[C::kTokenBlocks][2];
    decode::RowConstants zero = {};
    if (C::kZeros) {
      uint32_t two = 0;
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(two) : "r"(at.zeros + slab * kRowsPerSlab));
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
          wgmma_float<typename C::Element, C::kTokens>(a[j], at, products, add);
        }
      }
      cute::warpgroup_commit_batch();
      fence_registers(products);
      int const next = slab * C::kSteps + step + 1;
      if (!C::kInt8 && next < kSlabs * C::kSteps) load(next);
      if (step % C::kGroupSteps == 0) {
        stored = next_stored;
        int const next_slab = step + C::kGroupSteps < C::kSteps ? slab : slab + 1;
        if (next_slab < kSlabs)
          next_stored.load(at.scales + next_slab * kRowsPerSlab * C::kScaleBytes + (next_slab == slab ? next_group : 0));
      }
      if (C::kInt8) {  // read again for every slab: registers
#pragma unroll
        for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
          float (&two)[2] = token_scales[tb];
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two[0]), "=f"(two[1]) : "r"(at.tokens + tb * 32));
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
      if (C::kInt8 && next < kSlabs * C::kSteps) load(next);  // once the operands' registers are free
      if ((step + 1) % C::kGroupSteps) continue;
      if (step + 1 == C::kSteps && slab + 1 == kSlabs && releases) ClusterBarrier::arrive(empty);
      float2 scale = stored.values();
      if constexpr (C::kInt8) scale.x *= 1.0f / C::Decode::kScale, scale.y *= 1.0f / C::Decode::kScale;
#pragma unroll
      for (int e = 0; e < C::kSums; ++e) {
        float const row_scale = e % 4 < 2 ? scale.x : scale.y;
        if constexpr (C::kInt8) {
          int sum = int(products[e]);
          if constexpr (C::kTokenZeros) sum -= token_zeros[e / 4][e % 2] * int(products[C::kSums + e % 4 / 2 * 2]);
          sums[slab][e] = fmaf(float(sum), row_scale * token_scales[e / 4][e % 2], sums[slab][e]);
        } else {
          sums[slab][e] = fmaf(products[e], row_scale, sums[slab][e]);
        }
      }
    }
  }
}

// A tile's products of values, by groups of 32 columns: more operands at a time want more registers than two CTAs leave.
template <class C, int kSlabs>
__device__ __forceinline__ void multiply_values(uint64_t x, StageAddress const& at, uint32_t table, Params const& p,
                                                bool releases, uint64_t* empty, float (&sums)[kSlabs][C::kSums]) {
  using Fold = typename C::Fold;
  constexpr int kGroups = C::kSteps * Fold::kGroups;  // of 32 columns
  // From what belongs to a group of 32, 64 or 128 columns to what belongs to the next.
  int const rows = p.shape.most_slabs * kRowsPerSlab, shift = p.weight_rows.count == 4 ? 0 : p.weight_rows.count == 2 ? 1 : 2;
  constexpr int kBuffers =
      C::kAlone ? 2 : 1;  // of operands: one is decoded while the other is multiplied, where there are registers
  uint32_t operands[kBuffers][Fold::kGroupPieces][4];
  StoredCodes<Fold> codes;
  StoredGroup<Fold> vectors;
  auto fence = [](uint32_t (&a)[Fold::kGroupPieces][4]) {
#pragma unroll
    for (int j = 0; j < Fold::kGroupPieces; ++j) fence_registers(a[j]);
  };
  auto load = [&](int i) {  // of all slabs' groups
    int const slab = i / kGroups, group = i % kGroups, step = group / Fold::kGroups, part = group % Fold::kGroups;
    if (part < Fold::kLoads) codes.load_part(at.units + slab * C::kChunk + step * C::kStepBytes, part);
    uint32_t const row = slab * kRowsPerSlab + (group >> shift) * rows;
    vectors.load({at.scales + row * p.scale_bytes, at.offsets + row * p.offset_bytes, at.zeros + row}, p);
  };
  load(0);
#pragma unroll
  for (int i = 0; i < kSlabs * kGroups; ++i) {
    int const slab = i / kGroups, group = i % kGroups;
    uint32_t (&a)[Fold::kGroupPieces][4] = operands[i % kBuffers];
    vectors.decode(codes.words + group % Fold::kGroups * Fold::kGroupWords, table, p, a);
    fence(a);
    fence_registers(sums[slab]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < Fold::kGroupPieces; ++j)
      wgmma_float<typename C::Element, C::kTokens>(a[j], x + group / 2 * (C::kPanelBytes / 16) + group % 2 * 4 + j * 2,
                                                   sums[slab], true);
    cute::warpgroup_commit_batch();
    fence_registers(sums[slab]);
    bool const more = i + 1 < kSlabs * kGroups;
    if (Fold::kNarrow && more) load(i + 1);
    cute::warpgroup_wait<kBuffers - 1>();
    fence(operands[(i + 1) % kBuffers]);
    if (kBuffers == 1) fence_registers(sums[slab]);
    if (!Fold::kNarrow && more) load(i + 1);  // once the operands' registers are free
  }
  cute::warpgroup_wait<0>();
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) fence_registers(sums[slab]);
#pragma unroll
  for (int i = 0; i < kBuffers; ++i) fence(operands[i]);
  if (releases) ClusterBarrier::arrive(empty);
}

// A warpgroup's kSlabs slabs, from `first` of the block's: their sums over the block's tiles, and those to the blocks that end with them.
template <class C, int kSlabs>
__device__ __forceinline__ void consume(uint8_t* shared, Barriers& barriers, Params const& p, Part const& part, int warp,
                                        int first) {
  int const lane = threadIdx.x % 32, block = warp % 4, set = p.shape.sets > 1 ? warp / 4 : 0;
  float sums[kSlabs][C::kSums] = {};
  // Pinned in registers, as in hopper_gemm.cuh.
  uint32_t row = first * kRowsPerSlab + lane / 4 * 8 + block * 2;  // in the order of group vectors
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
  if (C::kInt8) asm volatile("" : "+r"(at.tokens));
  if (C::kTokenZeros) asm volatile("" : "+r"(at.token_zeros));
  int stage = set, to_quantize = warp / 4 + C::kWarpgroups;
  uint32_t phase = 0;
#pragma unroll 1
  for (int i = set; i < part.tiles; i += p.shape.sets) {
    if constexpr (C::kQuantizes) {
      // Every third tile is this warpgroup's, some time before it is multiplied: in a stage that is another than this one, if there are enough.
      int const ahead = p.shape.sets == 1 ? 1 : p.shape.stages > C::kWarpgroups ? C::kWarpgroups : 0;
      if (i + ahead == to_quantize) {
        bool const wraps = stage + ahead >= p.shape.stages;
        if (to_quantize < part.tiles)
          quantize<C>(x_at, stage + ahead - (wraps ? p.shape.stages : 0), phase ^ uint32_t(wraps), full, p);
        // (Where a cluster has fewer slabs than warpgroups, which then are one set if a warpgroup takes few, by those that have one.)
        to_quantize += C::kMostSlabs < C::kWarpgroups && p.shape.sets == 1 ? min(C::kWarpgroups, part.slabs) : C::kWarpgroups;
      }
    }
    uint32_t const offset = stage * weight_bytes;
    uint64_t const x =
        uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | __shfl_sync(~0u, (x_at + stage * C::kXStride) >> 4 & 0x3fff, 0);
    TransactionBarrier::wait(full + stage, phase);
    StageAddress here{at.units + offset, at.scales + offset, 0, at.zeros + offset, at.tokens + offset, at.token_zeros + offset};
    if (C::kFolds) {  // from the scales': registers
      here.offsets = here.scales + (p.shape.offsets - p.shape.scales) + row * (p.offset_bytes - p.scale_bytes);
      here.zeros = here.scales + (p.shape.zeros - p.shape.scales) - row * (p.scale_bytes - 1);
    }
    // int8: if another tile is to come there. (Without a branch the compiler holds more registers than there are.)
    bool const releases = C::kInt8 ? i + p.shape.stages < part.tiles : lane == 0;
    uint64_t* const empty = full + Barriers::kStages + stage;
    uint32_t const table = x_at + p.shape.table + lane * 4;
    if constexpr (C::kFolds) {
      multiply_values<C, kSlabs>(x, here, table, p, releases, empty, sums);
    } else {
      multiply_codes<C, kSlabs>(x, here, table, p, releases, empty, sums);
    }
    stage += p.shape.sets;
    if (stage >= p.shape.stages) stage -= p.shape.stages, phase ^= 1;
  }
  cute::cluster_arrive_relaxed();  // all blocks are done with their stages: sums take their place
  cute::cluster_wait();
  // [rank and set][slab][piece][lane], a piece being 16 features of 8 tokens.
  float4* received = reinterpret_cast<float4*>(shared);
  int const log_pieces = C::kLogPieces - p.log_cluster, from = part.rank * p.shape.sets + set;
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
    for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
      int piece = block * C::kTokenBlocks + tb, to = piece >> log_pieces;
      float const* v = &sums[slab][tb * 4];
      int place = ((from * part.slabs + first + slab) << log_pieces) + piece - (to << log_pieces);
      if (p.shape.cluster == 1) {
        received[place * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
      } else {
        store_remote(received + place * 32 + lane, make_float4(v[0], v[1], v[2], v[3]), &barriers.sums, to);
      }
    }
}

// A piece's sums as wgmma leaves them in a warp, of rows g, g + 8 and tokens 2t, 2t + 1, to outputs: the four lanes of neighbouring rows exchange
// theirs, until each has four neighbouring features of a token.
__device__ __forceinline__ void finish(float (&v)[4], int n, int token_block, float const* row_scales,
                                       EpilogueParams const& p) {
  int const lane = threadIdx.x % 32, i = lane / 4 % 4;
  bool const high = i & 2, odd = i & 1;
  float w[2][2], out[4];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float mine = high ? v[2 + c] : v[c], theirs = __shfl_xor_sync(~0u, high ? v[c] : v[2 + c], 8);
    w[0][c] = high ? theirs : mine, w[1][c] = high ? mine : theirs;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float mine = odd ? w[h][1] : w[h][0], theirs = __shfl_xor_sync(~0u, odd ? w[h][0] : w[h][1], 4);
    out[2 * h] = odd ? theirs : mine, out[2 * h + 1] = odd ? mine : theirs;
  }
  int const token = token_block * 8 + lane % 4 * 2 + odd;
  n += i / 2 * 8 + lane / 16 * 4;
  if (token >= p.m || n >= p.n) return;
  if (row_scales) {
#pragma unroll
    for (float& sum : out) sum *= row_scales[token];
  }
  store_outputs(out, token, n, p);
}

// A thread's part of either kernel.
template <class C>
__device__ __forceinline__ void decode_rows(Maps const& maps, Params const& p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  Part part(p, WgmmaDecodeShape::unit(C::kAlone));
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
      ClusterBarrier::init(&barriers.empty[i], C::kReaders * (p.shape.sets > 1 ? 1 : min(C::kWarpgroups, part.slabs)));
    }
    TransactionBarrier::init(&barriers.sums, 1);
    cutlass::arch::fence_barrier_init();
    TransactionBarrier::arrive_and_expect_tx(&barriers.sums, p.shape.sets * part.slabs * kRowsPerSlab * C::kTokens * 4);
  }
  __syncthreads();
  if (warp == C::kWarps) {
    if (cute::elect_one_sync()) produce<C>(shared, barriers, maps, p, part);
    __syncwarp();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    return;
  }
  wait_alone();
  if constexpr (C::kQuantizes) {
    if (warp / 4 < part.tiles) quantize<C>(cute::cast_smem_ptr_to_uint(shared), warp / 4, 0, barriers.full, p);
  }
  int first = 0, count = part.slabs;
  if (p.shape.sets == 1) {
    int base = part.slabs / C::kWarpgroups, rest = part.slabs % C::kWarpgroups, group = warp / 4;
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
      if constexpr (C::kMostSlabs >= 3) consume<C, 3>(shared, barriers, p, part, warp, first);
      break;
  }
  if (p.shape.cluster == 1) {
    cutlass::arch::NamedBarrier::sync(32 * C::kWarps, 1);
  } else {
    TransactionBarrier::wait(&barriers.sums, 0);
  }
  int const log_pieces = C::kLogPieces - p.log_cluster, pieces = part.slabs << log_pieces;
  for (int i = warp; i < pieces; i += C::kWarps) {
    if constexpr (C::kAlone) {
      int const slab = i >> log_pieces, piece = (part.rank << log_pieces) + i - (slab << log_pieces);
      int const row = slab * kRowsPerSlab + piece / C::kTokenBlocks * 16;
      if (row < part.begin || row >= part.end) continue;
    }
    float4 const* from = reinterpret_cast<float4 const*>(shared) + i * 32 + threadIdx.x % 32;
    float v[4] = {};
#pragma unroll 2
    for (int r = 0; r < p.shape.sets << p.log_cluster; ++r, from += pieces * 32) {
      float4 theirs = *from;
      v[0] += theirs.x, v[1] += theirs.y, v[2] += theirs.z, v[3] += theirs.w;
    }
    int slab = i >> log_pieces, piece = (part.rank << log_pieces) + i - (slab << log_pieces);
    finish(v, (part.first_slab + slab) * kRowsPerSlab + piece / C::kTokenBlocks * 16, piece % C::kTokenBlocks,
           C::kFolds ? p.token_scales : nullptr, p.epilogue);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kAlone ? 64 : 0), C::kAlone ? 1 : 2)
    wgmma_decode(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  decode_rows<C>(maps, p);
#endif
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kAlone ? 64 : 0), C::kAlone ? 1 : 2)
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
                      ? hopper::encode_tokens(q.codes, 1, problem.m, int(k_pad), k_pad, C::kTokens, &maps.tokens)
                      : hopper::encode_tokens(problem.x, 2, problem.m, w.k, problem.x_stride * 2, C::kTokens, &maps.tokens);
  if (!status.ok()) return status;
  int const k_tiles = int(k_pad / kKPerTile), n_pad = int(padded_rows(w.n));
  VectorRows const rows(w.group_size);
  cuuint64_t const slabs = n_pad / kRowsPerSlab, runs = cuuint64_t(k_tiles) * (C::kChunk / kCodeRun),
                   groups = w.group_size == -1 ? 1 : (k_pad + w.group_size - 1) / w.group_size;
  cuuint32_t const slab_box = shape.most_slabs, group_box = C::kFolds || C::kCodebook ? rows.count : 1;
  status = hopper::encode<3>(CU_TENSOR_MAP_DATA_TYPE_UINT64, w.codes, {kCodeRun / 8, runs, slabs}, {kCodeRun, runs * kCodeRun},
                             {kCodeRun / 8, C::kChunk / kCodeRun, slab_box}, CU_TENSOR_MAP_SWIZZLE_NONE,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &maps.codes);
  // Of `bytes` for each row and group.
  auto const encode_vectors = [&](void const* vectors, int bytes, CUtensorMap* map) {
    if (!vectors || !status.ok()) return;
    CUtensorMapDataType const type = bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    status = hopper::encode<3>(
        type, vectors, {kRowsPerSlab, slabs, groups}, {cuuint64_t(kRowsPerSlab * bytes), cuuint64_t(n_pad) * bytes},
        {kRowsPerSlab, slab_box, group_box}, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, map);
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
           Shares(n_pad / WgmmaDecodeShape::unit(C::kAlone), shape.clusters),
           Shares(k_tiles, shape.cluster),
           k_tiles,
           n_pad,
           log_cluster};
  if constexpr (C::kFolds) {
    return launch_plan(wgmma_decode_fold16<C>, plan, C::kThreads, shape.shared_bytes, stream, maps, p);
  } else {
    return launch_plan(wgmma_decode<C>, plan, C::kThreads, shape.shared_bytes, stream, maps, p);
  }
}

}  // namespace
}  // namespace cutlass_ops
