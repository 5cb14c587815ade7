// int8 activations x int4 or int8 weights on Hopper's wgmma: W8A8 and W4A8 at prefill, sm_90a.
//
// A block computes 128 output features x kTokens and is persistent: it walks over tiles while its ring of stages keeps turning. Two blocks form a
// cluster; they take neighbouring rows and the same tokens, and each loads half of the tokens for both.
//
//                       kTokens ->
//             +---------------------------+
//   rows    0 | warpgroup 1: 64 x kTokens |   block 0 of the cluster        A: weights, from shared memory through registers (one 16-byte load
//          64 | warpgroup 2               |                                    a lane is a fragment, layout.h); int4 is decoded on the way
//             +---------------------------+                                 B: tokens, K-major in shared memory, 128-byte swizzle, by TMA multicast
//         128 | warpgroup 1               |   block 1
//         192 | warpgroup 2               |
//             +---------------------------+
//
// Warpgroup 0 loads: one thread waits for a free stage and starts its copies. Warpgroups 1 and 2 multiply, each on its own, so that one keeps the
// tensor cores busy while the other promotes. Per 128 columns of K:
//
//   decode   the stage's weights, which were loaded while the previous sums were promoted
//   multiply exact int32 sums of 128 columns, which never leave registers
//   promote  sum = fma(float(I), token scale * weight scale, sum), once a group and block
#include <cudaTypedefs.h>

#include "device/decode.cuh"
#include "device/epilogue.cuh"
#include "device/hopper.cuh"
#include "device/launch.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

enum class Promotion {
  kBlock,    // a scale for each token and 128 columns, and one for each row and 128 columns
  kToken,    // one for each row and 128 columns; the token's is applied at the end
  kChannel,  // none: int32 sums run over all of K
};

template <int kBits_, int kTokens_, Promotion kPromotion_, bool kZeros_>
struct Config {
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr Promotion kPromotion = kPromotion_;
  static constexpr bool kZeros = kZeros_;  // 4-bit weights with zero points
  static constexpr int kWarpgroups = 2;    // that multiply
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kRows = kRowsPerSlab * kWarpgroups;
  static constexpr int kCluster = 2;
  static constexpr int kSums = kTokens / 2;  // registers of a thread

  static constexpr int kActivations = 0;
  static constexpr int kActivationBytes = kTokens * kKPerTile;
  static constexpr int kWeights = kActivations + kActivationBytes;
  static constexpr int kTokenScales = kWeights + kWarpgroups * chunk_bytes(kBits);
  static constexpr int kScales = kTokenScales + kTokens * 4;
  static constexpr int kZeroPoints = kScales + kRows * 4;
  static constexpr int kStageBytes = (kZeroPoints + (kZeros ? kRows : 0) + 1023) / 1024 * 1024;
  static constexpr int kStoreTokens = kTokens % 64 ? kTokens / 2 : 64;  // that leave through shared memory at a time
  static constexpr int kStoreStride = kRowsPerSlab + 4;  // floats; keeps the transposing writes off each other's banks
  static constexpr int kStoreBytes = kWarpgroups * kStoreTokens * kStoreStride * 4;
  static constexpr int kStages = wgmma_gemm_a8_tile(kTokens).stages;
  static constexpr int kSharedBytes = kStages * kStageBytes + kStoreBytes + 256;
  static_assert(kSharedBytes <= wgmma_gemm_a8_tile(kTokens).shared_bytes, "the dispatch table promises less shared memory");
  static_assert(kTokens / kCluster % 8 == 0, "a half tile of tokens is whole swizzle atoms");
};

struct Params {
  PackedWeight weight;
  QuantizedActivations x;
  EpilogueParams epilogue;
  float* partials;
  int row_pairs, token_tiles, k_tiles, n_pad, splits;
  int group_tiles;  // tiles of K that share a weight scale
  int scale_bytes;  // of one weight scale
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

// Work: (pair of row tiles, token tile, split of K), token tiles in bands of 16 fastest, so that what runs together shares weights and tokens in L2.
struct Work {
  int pair, token_tile, split;
  __device__ __forceinline__ Work(int index, Params const& p) {
    constexpr int kBand = 16;
    int tiles = p.row_pairs * p.token_tiles;
    split = index / tiles;
    index -= split * tiles;
    int band = index / (kBand * p.row_pairs), inside = index - band * kBand * p.row_pairs;
    int height = min(kBand, p.token_tiles - band * kBand);
    pair = inside / height;
    token_tile = band * kBand + inside - pair * height;
  }
  __device__ __forceinline__ int first_k(Params const& p) const { return p.k_tiles * split / p.splits; }
  __device__ __forceinline__ int end_k(Params const& p) const { return p.k_tiles * (split + 1) / p.splits; }
};

template <class C>
struct Barriers {
  uint64_t full[C::kStages], empty[C::kStages];
};

// One thread starts the copies of weights, scales and zero points. They do not depend on the kernel before and start at once.
template <class C>
__device__ __forceinline__ void produce_weights(uint8_t* stages, Barriers<C>& barriers, Params const& p, int rank) {
  using Copy = cute::SM90_BULK_COPY_G2S;
  constexpr int kChunk = chunk_bytes(C::kBits);
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = p.row_pairs * p.token_tiles * p.splits;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    Work work(index, p);
    int row0 = (work.pair * C::kCluster + rank) * C::kRows, k = work.first_k(p), end = work.end_k(p);
    int slabs = max(0, min(C::kWarpgroups, (p.n_pad - row0) / kRowsPerSlab));  // the last pair may reach beyond N
    constexpr bool kScales = C::kPromotion != Promotion::kChannel;
    int bytes = slabs * (kChunk + kRowsPerSlab * ((kScales ? p.scale_bytes : 0) + (C::kZeros ? 1 : 0)));
    // 32-bit indices, not pointers: this role has 40 registers.
    int chunk = row0 / kRowsPerSlab * p.k_tiles + k, group = k / p.group_tiles, until_next = (group + 1) * p.group_tiles - k;
    int vector = group * p.n_pad + row0;
#pragma unroll 1
    for (; k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      uint64_t* full = &barriers.full[ring.stage];
      ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      TransactionBarrier::arrive_and_expect_tx(full, bytes);
#pragma unroll 1
      for (int slab = 0; slab < slabs; ++slab) {
        Copy::copy(p.weight.codes + int64_t(chunk + slab * p.k_tiles) * kChunk, full, stage + C::kWeights + slab * kChunk,
                   kChunk);
      }
      if (kScales && slabs > 0) {
        Copy::copy(static_cast<uint8_t const*>(p.weight.scales) + int64_t(vector) * p.scale_bytes, full, stage + C::kScales,
                   slabs * kRowsPerSlab * p.scale_bytes);
      }
      if (C::kZeros && slabs > 0) Copy::copy(p.weight.zeros + vector, full, stage + C::kZeroPoints, slabs * kRowsPerSlab);
      ++chunk;
      if (--until_next == 0) until_next = p.group_tiles, vector += p.n_pad;
    }
  }
}

// Another starts those of the tokens, this block's half of the tile for both blocks, and of their scales.
template <class C>
__device__ __forceinline__ void produce_tokens(uint8_t* stages, Barriers<C>& barriers, Params const& p, CUtensorMap const& map,
                                               int rank) {
  constexpr int kHalf = C::kTokens / C::kCluster;
  constexpr uint16_t kEveryBlock = (1 << C::kCluster) - 1;
  wait_for_predecessor();
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = p.row_pairs * p.token_tiles * p.splits;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    Work work(index, p);
    int m0 = work.token_tile * C::kTokens, end = work.end_k(p);
    int scale_bytes = C::kPromotion == Promotion::kBlock ? min(C::kTokens, p.x.stride - m0) * 4 : 0;
#pragma unroll 1
    for (int k = work.first_k(p); k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      uint64_t* full = &barriers.full[ring.stage];
      ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      TransactionBarrier::arrive_and_expect_tx(full, C::kActivationBytes + scale_bytes);
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, full, kEveryBlock, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                             stage + C::kActivations + rank * kHalf * kKPerTile, k * kKPerTile,
                                             m0 + rank * kHalf);
      if (scale_bytes)
        cute::SM90_BULK_COPY_G2S::copy(p.x.scales + int64_t(k) * p.x.stride + m0, full, stage + C::kTokenScales, scale_bytes);
    }
  }
}

// Where a thread's parts of a stage lie. Pinned in registers: the compiler would compute them again in every turn of the main loop.
struct Offsets {
  int units, scales, zeros, token_scales;

  template <class C>
  static __device__ __forceinline__ Offsets of(Params const& p, int warpgroup, int warp, int lane) {
    int row = warpgroup * kRowsPerSlab + lane / 4 * 8 + warp * 2;
    Offsets at{C::kWeights + warpgroup * chunk_bytes(C::kBits) + warp * (C::kBits / 2) * kUnitBytes + lane * kLaneBytes,
               C::kScales + row * p.scale_bytes, C::kZeroPoints + row, C::kTokenScales + lane % 4 * 8};
    asm volatile("" : "+r"(at.units), "+r"(at.scales), "+r"(at.zeros), "+r"(at.token_scales));
    return at;
  }
};

// A stage's weights as they lie in shared memory: the fragments of 128 columns.
template <class C>
struct RawWeights {
  static constexpr int kLoads = C::kBits / 2;  // of 16 bytes
  uint4 q[kLoads];
  float scale[2];     // of rows g and g + 8
  uint32_t zeros[2];  // as the decoder takes them

  __device__ __forceinline__ void load(uint8_t const* stage, Params const& p, Offsets const& at) {
    uint4 const* units = reinterpret_cast<uint4 const*>(stage + at.units);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) q[i] = units[i * 32];
    if (C::kPromotion != Promotion::kChannel) {
      if (p.weight.scale_type == DataType::kFloat32) {
        float2 v = *reinterpret_cast<float2 const*>(stage + at.scales);
        scale[0] = v.x, scale[1] = v.y;
      } else {
        uint32_t v = *reinterpret_cast<uint32_t const*>(stage + at.scales);
        float2 half = __half22float2(reinterpret_cast<__half2 const&>(v));
        bool is_half = p.weight.scale_type == DataType::kFloat16;
        scale[0] = is_half ? half.x : __uint_as_float(v << 16), scale[1] = is_half ? half.y : __uint_as_float(v & 0xffff0000u);
      }
      // The decoder multiplies codes by this.
      if (C::kBits == 4 && !C::kZeros) scale[0] *= 1.0f / decode::Int4Int8::kScale, scale[1] *= 1.0f / decode::Int4Int8::kScale;
    }
    if constexpr (C::kZeros) {
      char2 z = *reinterpret_cast<char2 const*>(stage + at.zeros);
      decode::RowConstants constants = decode::Int4MinusZeroInt8::zero_constants(z.x, z.y);
      zeros[0] = constants.g, zeros[1] = constants.g8;
    }
  }

  // The four operands of 32 columns each.
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (C::kBits == 8) {
        a[i][0] = q[i].x, a[i][1] = q[i].y, a[i][2] = q[i].z, a[i][3] = q[i].w;
      } else {
        uint4 v = q[i / 2];
        uint32_t const words[2] = {i % 2 ? v.z : v.x, i % 2 ? v.w : v.y};
        if constexpr (C::kZeros) {
          decode::Int4MinusZeroInt8::fragment(words, {zeros[0], zeros[1]}, a[i]);
        } else {
          decode::Int4Int8::fragment(words, a[i]);
        }
      }
    }
  }
};

// Fold a group's integers into the fp32 sums. Register 4j + e: row g + 8 (e / 2), token 8j + 2t + e % 2.
template <class C>
__device__ __forceinline__ void promote(uint8_t const* token_scales, uint32_t const (&integers)[C::kSums],
                                        float const (&scale)[2], float (&sums)[C::kSums]) {
#pragma unroll
  for (int j = 0; j < C::kTokens / 8; j += 2) {
    float token[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (C::kPromotion == Promotion::kBlock) {
      float2 v = *reinterpret_cast<float2 const*>(token_scales + j * 32),
             u = *reinterpret_cast<float2 const*>(token_scales + j * 32 + 32);
      token[0] = v.x, token[1] = v.y, token[2] = u.x, token[3] = u.y;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float factor = C::kPromotion == Promotion::kBlock ? token[e / 4 * 2 + e % 2] * scale[e % 4 / 2] : scale[e % 4 / 2];
      sums[4 * j + e] = fmaf(float(int(integers[4 * j + e])), factor, sums[4 * j + e]);
    }
  }
}

// Out through shared memory, kStoreTokens at a time, so that whole lines are stored. `value(i)` is the sum in register i.
template <class C, class Value>
__device__ __forceinline__ void store(Value const& value, float* staging, Params const& p, int row0, int m0, int split,
                                      int warpgroup, int warp, int lane) {
  int n = row0 + warpgroup * kRowsPerSlab, thread = warp * 32 + lane, barrier = 1 + warpgroup;
  float* partials = p.partials ? p.partials + int64_t(split) * p.epilogue.m * p.n_pad : nullptr;
#pragma unroll
  for (int first = 0; first < C::kTokens; first += C::kStoreTokens) {
    cutlass::arch::NamedBarrier::sync(128, barrier);  // what was staged before has been read
#pragma unroll
    for (int i = 0; i < C::kStoreTokens / 2; ++i) {
      int token = i / 4 * 8 + lane % 4 * 2 + i % 2, row = warp * 16 + lane / 4 + i % 4 / 2 * 8;
      staging[token * C::kStoreStride + row] = value(first / 2 + i);
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
        store_eight(v, m0 + first + token, n + column, p.epilogue);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void consume(uint8_t* stages, float* staging, Barriers<C>& barriers, Params const& p, int rank,
                                        int warpgroup) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4;
  int clusters = gridDim.x / C::kCluster, total = p.row_pairs * p.token_tiles * p.splits;
  Offsets at = Offsets::of<C>(p, warpgroup, warp, lane);
  Ring<C::kStages> ring;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    Work work(index, p);
    int row0 = (work.pair * C::kCluster + rank) * C::kRows, m0 = work.token_tile * C::kTokens;
    int count = work.end_k(p) - work.first_k(p);
    uint32_t integers[C::kSums];
    float sums[C::kPromotion == Promotion::kChannel ? 1 : C::kSums] = {};
    RawWeights<C> raw;
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    raw.load(stages + ring.stage * C::kStageBytes, p, at);
    for (int i = 0; i < count; ++i) {
      uint8_t const* stage = stages + ring.stage * C::kStageBytes;
      uint32_t a[4][4];
      raw.decode(a);
      float scale[2] = {raw.scale[0], raw.scale[1]};
      uint64_t tokens = operand_descriptor(stage + C::kActivations);
#pragma unroll
      for (int piece = 0; piece < 4; ++piece) fence_registers(a[piece]);
      fence_registers(integers);
      cute::warpgroup_arrive();
#pragma unroll
      for (int piece = 0; piece < 4; ++piece) {
        wgmma_int8<C::kTokens>(a[piece], tokens + piece * 2, integers,
                               piece > 0 || (C::kPromotion == Promotion::kChannel && i > 0));
      }
      cute::warpgroup_commit_batch();
      fence_registers(integers);
      cute::warpgroup_wait<0>();
      uint64_t* empty = &barriers.empty[ring.stage];
      ring.advance();
      if (i + 1 < count) {
        TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
        raw.load(stages + ring.stage * C::kStageBytes, p, at);
      }
      if constexpr (C::kPromotion != Promotion::kChannel) promote<C>(stage + at.token_scales, integers, scale, sums);
      if (lane < C::kCluster) ClusterBarrier::arrive(empty, lane, true);
    }
    if constexpr (C::kPromotion == Promotion::kBlock) {
      store<C>([&](int at) { return sums[at]; }, staging, p, row0, m0, work.split, warpgroup, warp, lane);
    } else {
      // The scales that do not change along K come last.
      float row_scale[2] = {1.0f, 1.0f};
      if (C::kPromotion == Promotion::kChannel) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int position = row0 + warpgroup * kRowsPerSlab + lane / 4 * 8 + warp * 2 + h;
          if (position < p.n_pad) row_scale[h] = load_float(p.weight.scales, p.weight.scale_type, position);
          if (C::kBits == 4 && !C::kZeros) row_scale[h] *= 1.0f / decode::Int4Int8::kScale;
        }
      }
      auto value = [&](int at) {
        int token = min(m0 + at / 4 * 8 + 2 * t + at % 2, p.x.stride - 1);
        float sum = C::kPromotion == Promotion::kChannel ? float(int(integers[at])) * row_scale[at % 4 / 2] : sums[at];
        return sum * __ldg(p.x.scales + token);
      };
      store<C>(value, staging, p, row0, m0, work.split, warpgroup, warp, lane);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_gemm_a8(__grid_constant__ CUtensorMap const map, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];  // the 128-byte swizzle repeats every 1024 bytes
  uint8_t* stages = shared;
  auto* staging = reinterpret_cast<float*>(stages + C::kStages * C::kStageBytes);
  auto& barriers = *reinterpret_cast<Barriers<C>*>(stages + C::kStages * C::kStageBytes + C::kStoreBytes);
  int rank = int(cute::block_rank_in_cluster());
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      TransactionBarrier::init(&barriers.full[i], 2);  // the two producers
      ClusterBarrier::init(&barriers.empty[i], C::kCluster * C::kWarpgroups * 4);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
  int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce_weights<C>(stages, barriers, p, rank);
    if (threadIdx.x == 32) produce_tokens<C>(stages, barriers, p, map, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    wait_for_predecessor();
    --warpgroup;
    consume<C>(stages, staging + warpgroup * C::kStoreTokens * C::kStoreStride, barriers, p, rank, warpgroup);
  }
  // A block's barriers must outlive its neighbour's arrivals and copies.
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
#endif
}

Status encode_tokens(QuantizedActivations const& x, int m, int k_pad, int box_tokens, CUtensorMap* map) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  if (!encode) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) return cuda_error("cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)", error);
    encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }
  cuuint64_t dims[2] = {cuuint64_t(k_pad), cuuint64_t(m)}, strides[1] = {cuuint64_t(k_pad)};
  cuuint32_t box[2] = {kKPerTile, cuuint32_t(box_tokens)}, steps[2] = {1, 1};
  CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, x.codes, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {Status::kCuda, "cuTensorMapEncodeTiled: error " + std::to_string(int(result))};
  return {};
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  PackedWeight const& w = problem.weight;
  int k_tiles = int(padded_k(w.k) / kKPerTile), n_pad = int(padded_rows(w.n));
  Params p{w,
           problem.quantized,
           EpilogueParams(problem),
           partials,
           (n_pad + C::kRows * C::kCluster - 1) / (C::kRows * C::kCluster),
           (problem.m + C::kTokens - 1) / C::kTokens,
           k_tiles,
           n_pad,
           plan.splits,
           w.group_size == -1 ? k_tiles : w.group_size / kKPerTile,
           size_of(w.scale_type)};
  CUtensorMap map;
  if (Status status = encode_tokens(problem.quantized, problem.m, k_tiles * kKPerTile, C::kTokens / C::kCluster, &map);
      !status.ok())
    return status;
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  int work = p.row_pairs * p.token_tiles * p.splits, clusters = device.multiprocessors / C::kCluster;
  int grid = (work < clusters ? work : clusters) * C::kCluster;
  return launch_clusters(wgmma_gemm_a8<C>, dim3(grid), C::kCluster, C::kThreads, C::kSharedBytes, stream, map, p);
}

}  // namespace

template <int kBits, int kTokens>
Status launch_wgmma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  static_assert(wgmma_gemm_a8_tile(kTokens).rows == 256, "the table speaks of what a cluster computes");
  PackedWeight const& w = problem.weight;
  bool token = problem.quantized.block == -1;
  // int32 sums over all of K must not overflow: |codes| reach 128 on both sides.
  bool channel = token && w.group_size == -1 && w.k <= 131071;
  if constexpr (kBits == 4) {
    if (w.zeros) {
      return token ? launch_config<Config<4, kTokens, Promotion::kToken, true>>(problem, plan, partials, stream)
                   : launch_config<Config<4, kTokens, Promotion::kBlock, true>>(problem, plan, partials, stream);
    }
  }
  if (channel) return launch_config<Config<kBits, kTokens, Promotion::kChannel, false>>(problem, plan, partials, stream);
  return token ? launch_config<Config<kBits, kTokens, Promotion::kToken, false>>(problem, plan, partials, stream)
               : launch_config<Config<kBits, kTokens, Promotion::kBlock, false>>(problem, plan, partials, stream);
}

template Status launch_wgmma_gemm_a8<4, 64>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a8<4, 96>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a8<4, 128>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a8<4, 176>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a8<8, 64>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a8<8, 96>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a8<8, 128>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a8<8, 176>(GemmProblem const&, Plan const&, float*, Stream);

}  // namespace cutlass_ops
