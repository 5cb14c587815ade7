// Up to 16 tokens x int4, int8 or code-book weights on Hopper's wgmma: W4A16, W8A16, W4A8 and W8A8 while a batch decodes, sm_90a.
//
//   cluster   up to nine slabs of 64 output features; its blocks share K in equal slices
//   stage     a tile of K, 128 columns: the slabs' codes and scales by bulk copies, x by its tensor map once for all of them. One warp asks for
//             them; for weights before the kernel waits for its predecessor. Two blocks fit in a multiprocessor, so that the next launch's first
//             stages arrive while this one ends. Beside large weights of 8 bits, or `alone`, one does, with the stages of two: what is on its way in
//             all multiprocessors then covers the time from one launch's last product to the next one's first. K is left whole there, and clusters
//             get halves of slabs, for equal shares
//   quantise  x that is to be int8 becomes codes in its stage, every third tile by one of the warpgroups that multiply
//   multiply  a warpgroup a slab at a time, weights through registers as operand A: a slab's decoding in one hides behind products in the others.
//             Three warpgroups, four of a block that is alone, share the slabs, or, where these are few, take turns at tiles
//   promote   sum = fma(the tile's sum, weight scale, sum), as in wgmma_gemm_a16.cu. Zero points of int8 x take away so many sums of the tile's weights,
//             which eight columns of ones beside x's make on the way
//   end       sums leave registers for the block of the cluster that ends with those features, by st.async, and are added in a fixed order
#include <type_traits>

#include "device/decode.cuh"
#include "device/hopper_gemm.cuh"
#include "device/quantize.cuh"
#include "device/shares.cuh"
#include "device/tile.cuh"
#include "dispatch/problem.h"
#include "kernels/kernels.h"

#pragma nv_diag_suppress 177  // for other GPUs the kernels have no bodies, which read the members of Config

namespace cutlass_ops {
namespace {

// Element: of x, fp16, bf16, or int8 with scales of its own. Scale: of weight scales. kBook: codes are looked up. kQuantizes: x is floats in memory, and
// int8 where it is multiplied. kTokenZeros: int8 x has zero points; what they take away are sums of weights, and operand B has eight more columns, of ones,
// that make these.
template <class Element_, int kBits_, bool kZeros_, bool kBook_ = false, class Scale_ = Element_, bool kQuantizes_ = false,
          bool kTokenZeros_ = false, bool kAlone_ = false>
struct Config {
  using Element = Element_;
  using Scale = Scale_;
  static constexpr int kScaleBytes = sizeof(Scale);
  static constexpr bool kBook = kBook_, kQuantizes = kQuantizes_, kTokenZeros = kTokenZeros_, kAlone = kAlone_;
  static constexpr bool kInt8 = kQuantizes || std::is_same_v<Element, int8_t>;
  using Int8Decode = std::conditional_t<kBits_ == 8, decode::Int8Int8,
                                        std::conditional_t<kZeros_, decode::Int4MinusZeroInt8, decode::Int4Int8>>;
  using Decode =
      std::conditional_t<kInt8, Int8Decode, std::conditional_t<kBook, decode::Int4Book, decode::ToFloat<kBits_, Element>>>;
  using Sum = std::conditional_t<kInt8, uint32_t, float>;  // of a group's products
  static constexpr int kBits = kBits_;
  static constexpr bool kZeros = kZeros_;
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
  // That come to a stage beside its weights.
  static constexpr int kTokenBytes = kQuantizes ? 0 : kXBytes + kTokenScaleBytes + kTokenZeroBytes;
  // Of 16 columns, or 32 of int8, that are multiplied together, in a step; of those in a tile.
  static constexpr int kPieces = 4, kSteps = kInt8 ? 1 : 2;
  // Lanes of a warpgroup that say when they have read a stage: all, where racecheck would not follow how one speaks for its warp.
  static constexpr int kReaders = kInt8 ? 128 : 4;
  static constexpr int kGroupSteps = kBook ? 1 : kSteps;  // that are promoted together: a book's groups may be of 64 columns
  static constexpr int kWords = kPieces * Decode::kWords;
  static constexpr int kChunk = chunk_bytes(kBits), kStepBytes = kChunk / 4 / kSteps;  // of a row block
  static constexpr int kTokenBlocks = kTokens / 8, kLogPieces = 3;  // of a slab's sums: 16 features x 8 tokens
  static_assert(4 * kTokenBlocks == 1 << kLogPieces);
  // Of weights that a block is still to ask for when it lets the next launch start: it takes a microsecond to, and two before its weights where a quantiser
  // comes between. But not much earlier: x, which all blocks wait for, stands behind the next launch's weights.
  static constexpr int kEarlyBytes = (kAlone ? 128 : kQuantizes ? 48 : kInt8 ? 80 : 32) * 1024;
};

struct Maps {
  CUtensorMap tokens;
  CUtensorMap codes;   // in 64-bit words: [slab][k_tiles * chunk / 2048][256]
  CUtensorMap scales;  // [group][slab][row]
};

struct Params {
  PackedWeight weight;
  float const* token_scales;
  int8_t const* token_zeros;
  int token_stride;  // from a tile's scales, or zero points, to the next's
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
  int const features = p.shape.most_slabs * kRowsPerSlab, own_features = part.slabs * kRowsPerSlab;
  int const groups = C::kBook ? p.weight_rows.count : 1, group = p.weight_rows.first(tile);
  // Few copies: each takes some twenty nanoseconds. So they are of as many slabs as any cluster has.
  constexpr int kRowBytes = C::kChunk / kRowsPerSlab;  // on average: units are whole blocks of 16 rows
  int const code_bytes = C::kAlone ? (part.end - part.begin) * kRowBytes : p.shape.most_slabs * C::kChunk;
  TransactionBarrier::arrive_and_expect_tx(
      full, C::kTokenBytes + code_bytes + groups * features * C::kScaleBytes + (C::kZeros ? own_features : 0));
  if constexpr (C::kAlone) {
    uint8_t const* codes = p.weight.codes + (int64_t(part.first_slab) * p.k_tiles + tile) * C::kChunk;
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
  Copy::copy(&maps.scales, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), to + p.shape.scales, 0, part.first_slab,
             group);
  if (C::kZeros)
    cute::SM90_BULK_COPY_G2S::copy(p.weight.zeros + int64_t(group) * p.n_pad + part.first_slab * kRowsPerSlab, full,
                                   to + p.shape.zeros, own_features);
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

// x of a stage to codes, in its place, by a warpgroup: a thread has 16 columns of a token, eight threads share a block. What that takes is found anew each
// time: products need the registers.
template <class C>
__device__ __forceinline__ void quantize(uint32_t x, int stage, uint32_t phase, uint64_t* full, Params const& p) {
  using Element = typename C::Element;
  constexpr int kPieces = kKPerTile / kLaneColumns;
  int const thread = thread_again(), token = thread % 128 / kPieces, piece = thread % kPieces, swizzle = token & 7;
  uint32_t const row = x + stage * C::kXStride + token * 128, from = row + piece / 4 * C::kPanelBytes;
  TransactionBarrier::wait(full + 2 * Barriers::kStages + stage, phase);
  Columns<Element> c;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t v[4];
    load_shared(from + (((piece % 4 * 2 + half) ^ swizzle) << 4), v);
#pragma unroll
    for (int r = 0; r < 4; ++r) c.words[4 * half + r] = v[r];
  }
  Span<Element, !C::kTokenZeros> span;
  span.add(c);
#pragma unroll
  for (int distance = 1; distance < kPieces; distance *= 2) span.add(span.of_lane(distance));
  cutlass::arch::NamedBarrier::sync(128, 2 + thread / 128);  // all have read
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

// A warpgroup's kSlabs slabs, from `first` of the block's: their sums over the block's tiles, and those to the blocks that end with them.
template <class C, int kSlabs>
__device__ __forceinline__ void consume(uint8_t* shared, Barriers& barriers, Params const& p, Part const& part, int warp,
                                        int first) {
  int const lane = threadIdx.x % 32, block = warp % 4, set = p.shape.sets > 1 ? warp / 4 : 0;
  float sums[kSlabs][C::kSums] = {};
  // Pinned in registers, as in hopper_gemm.cuh.
  uint32_t const row = first * kRowsPerSlab + lane / 4 * 8 + block * 2;  // in the order of group vectors
  uint32_t x_at = cute::cast_smem_ptr_to_uint(shared), base = x_at + p.shape.weights, weight_bytes = p.shape.weight_bytes;
  uint32_t units = base + first * C::kChunk + block * (C::kChunk / 4) + lane * kLaneBytes;
  uint32_t scales = base + p.shape.scales + row * C::kScaleBytes, zeros = base + p.shape.zeros + row;
  uint32_t const table = C::kBook ? x_at + p.shape.table + lane * 4 : 0;
  int const group_bytes = p.weight_rows.count > 1 ? p.shape.most_slabs * kRowsPerSlab * C::kScaleBytes : 0;
  uint32_t tokens = base + p.shape.token_scales + lane % 4 * 8,
           token_zeros_at = base + p.shape.token_scales + C::kTokenScaleBytes + lane % 4 * 2;
  uint64_t* full = barriers.full;
  asm volatile("" : "+r"(x_at), "+r"(units), "+r"(scales), "+l"(full));
  if (C::kInt8) asm volatile("" : "+r"(tokens));
  if (C::kTokenZeros) asm volatile("" : "+r"(token_zeros_at));
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
    uint32_t words[C::kWords];
    StoredScales<typename C::Scale> stored, next_stored;
    auto load = [&](int step) {  // of all slabs' steps
#pragma unroll
      for (int j = 0; j < C::kWords / 4; ++j) {
        uint32_t v[4];
        load_shared(units + offset + step / C::kSteps * C::kChunk + step % C::kSteps * C::kStepBytes + j * kUnitBytes, v);
#pragma unroll
        for (int r = 0; r < 4; ++r) words[4 * j + r] = v[r];
      }
    };
    load(0);
    next_stored.load(scales + offset);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      typename C::Sum products[C::kColumns / 2];
      float token_scales[C::kTokenBlocks][2];
      int token_zeros[C::kTokenBlocks][2];
      decode::RowConstants zero = {};
      if (C::kZeros) {
        uint32_t two = 0;
        asm volatile("ld.shared.u16 %0, [%1];" : "=r"(two) : "r"(zeros + offset + slab * kRowsPerSlab));
        if constexpr (C::kZeros) zero = C::Decode::zero_constants(int8_t(two), int8_t(two >> 8));
      }
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        uint32_t a[C::kPieces][4];
#pragma unroll
        for (int j = 0; j < C::kPieces; ++j) {
          if constexpr (C::kBook) {
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
            next_stored.load(scales + offset + next_slab * kRowsPerSlab * C::kScaleBytes +
                             (next_slab == slab ? group_bytes : 0));
        }
        if (C::kInt8) {  // read again for every slab: registers
#pragma unroll
          for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
            float (&two)[2] = token_scales[tb];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two[0]), "=f"(two[1]) : "r"(tokens + offset + tb * 32));
            if constexpr (C::kTokenZeros) {
              uint32_t zeros_of_two;
              asm volatile("ld.shared.u16 %0, [%1];" : "=r"(zeros_of_two) : "r"(token_zeros_at + offset + tb * 8));
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
        // int8: if another tile is to come there. (Without a branch the compiler holds more registers than there are.)
        if (step + 1 == C::kSteps && slab + 1 == kSlabs && (C::kInt8 ? i + p.shape.stages < part.tiles : lane == 0))
          ClusterBarrier::arrive(full + Barriers::kStages + stage);
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
__device__ __forceinline__ void finish(float (&v)[4], int n, int token_block, EpilogueParams const& p) {
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
  if (token < p.m && n < p.n) store_outputs(out, token, n, p);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kAlone ? 64 : 0), C::kAlone ? 1 : 2)
    wgmma_decode(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  Part part(p, WgmmaDecodeShape::unit(C::kAlone));
  if constexpr (C::kBook)
    decode::Int4Book::fill<typename C::Element>(shared + p.shape.table, p.weight.book, threadIdx.x, C::kThreads);
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
    finish(v, (part.first_slab + slab) * kRowsPerSlab + piece / C::kTokenBlocks * 16, piece % C::kTokenBlocks, p.epilogue);
  }
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
  cuuint32_t const slab_box = shape.most_slabs, group_box = C::kBook ? rows.count : 1;
  status = hopper::encode<3>(CU_TENSOR_MAP_DATA_TYPE_UINT64, w.codes, {kCodeRun / 8, runs, slabs}, {kCodeRun, runs * kCodeRun},
                             {kCodeRun / 8, C::kChunk / kCodeRun, slab_box}, CU_TENSOR_MAP_SWIZZLE_NONE,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &maps.codes);
  if (!status.ok()) return status;
  status = hopper::encode<3>(
      C::kScaleBytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16, w.scales,
      {kRowsPerSlab, slabs, groups}, {cuuint64_t(kRowsPerSlab * C::kScaleBytes), cuuint64_t(n_pad) * C::kScaleBytes},
      {kRowsPerSlab, slab_box, group_box}, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, &maps.scales);
  if (!status.ok()) return status;
  int log_cluster = 0;
  while (1 << log_cluster < shape.cluster) ++log_cluster;
  Params p{w,
           q.scales,
           q.zeros,
           q.block == -1 ? 0 : q.stride,
           EpilogueParams(problem),
           rows,
           shape,
           Shares(n_pad / WgmmaDecodeShape::unit(C::kAlone), shape.clusters),
           Shares(k_tiles, shape.cluster),
           k_tiles,
           n_pad,
           log_cluster};
  return launch_plan(wgmma_decode<C>, plan, C::kThreads, shape.shared_bytes, stream, maps, p);
}

template <class Element, int kBits, bool kBook, bool kAlone>
Status launch_element(GemmProblem const& problem, Plan const& plan, Stream stream) {
  if constexpr (kBook) {
    return problem.weight.scale_type == DataType::kFloat32
               ? launch_config<Config<Element, kBits, false, true, float>>(problem, plan, stream)
               : launch_config<Config<Element, kBits, false, true>>(problem, plan, stream);
  } else {
    return problem.weight.zeros
               ? launch_config<Config<Element, kBits, true, false, Element, false, false, kAlone>>(problem, plan, stream)
               : launch_config<Config<Element, kBits, false, false, Element, false, false, kAlone>>(problem, plan, stream);
  }
}

// Element: of x in memory, floats or int8.
template <class Element, class Scale, int kBits, bool kTokenZeros, bool kAlone>
Status launch_int8(GemmProblem const& problem, Plan const& plan, Stream stream) {
  constexpr bool kQuantizes = !std::is_same_v<Element, int8_t>;
  if constexpr (kBits == 4) {
    if (problem.weight.zeros)
      return launch_config<Config<Element, 4, true, false, Scale, kQuantizes, kTokenZeros, kAlone>>(problem, plan, stream);
  }
  return launch_config<Config<Element, kBits, false, false, Scale, kQuantizes, kTokenZeros, kAlone>>(problem, plan, stream);
}

template <int kBits, bool kQuantizes, bool kAlone, bool kTokenZeros>
Status launch_scales(GemmProblem const& problem, Plan const& plan, Stream stream) {
  DataType const scale = problem.weight.scale_type;
  if constexpr (kQuantizes) {  // scales of x's type
    return scale == DataType::kFloat16
               ? launch_int8<__half, __half, kBits, kTokenZeros, kAlone>(problem, plan, stream)
               : launch_int8<__nv_bfloat16, __nv_bfloat16, kBits, kTokenZeros, kAlone>(problem, plan, stream);
  } else {
    return scale == DataType::kFloat16 ? launch_int8<int8_t, __half, kBits, kTokenZeros, kAlone>(problem, plan, stream)
           : scale == DataType::kBFloat16
               ? launch_int8<int8_t, __nv_bfloat16, kBits, kTokenZeros, kAlone>(problem, plan, stream)
               : launch_int8<int8_t, float, kBits, kTokenZeros, kAlone>(problem, plan, stream);
  }
}

template <int kBits, bool kAlone>
Status launch_input(GemmProblem const& problem, Plan const& plan, Stream stream) {
  auto const launch = [&](auto quantizes) {
    constexpr bool kQuantizes = decltype(quantizes)::value;
    return activations_have_zeros(problem) ? launch_scales<kBits, kQuantizes, kAlone, true>(problem, plan, stream)
                                           : launch_scales<kBits, kQuantizes, kAlone, false>(problem, plan, stream);
  };
  if (multiplies_int8(problem)) return plan.quantizes ? launch(std::true_type()) : launch(std::false_type());
  return problem.x_type == DataType::kFloat16 ? launch_element<__half, kBits, false, kAlone>(problem, plan, stream)
                                              : launch_element<__nv_bfloat16, kBits, false, kAlone>(problem, plan, stream);
}

}  // namespace

Status launch_wgmma_decode(GemmProblem const& problem, Plan const& plan, float*, Stream stream) {
  if (problem.weight.book) {
    return problem.x_type == DataType::kFloat16 ? launch_element<__half, 4, true, false>(problem, plan, stream)
                                                : launch_element<__nv_bfloat16, 4, true, false>(problem, plan, stream);
  }
  if (problem.weight.bits == 4) return launch_input<4, false>(problem, plan, stream);
  return plan.one_cta_per_sm ? launch_input<8, true>(problem, plan, stream) : launch_input<8, false>(problem, plan, stream);
}

}  // namespace cutlass_ops
