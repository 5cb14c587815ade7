// fp16 or bf16 activations x the weights of a code book on Hopper's wgmma, for many tokens: NF4 and FP4 at prefill, sm_90a.
//
// A weight is the book's value in x's type times its scale, rounded to x's type: then nothing is left to do between products, and a thread has registers
// for one set of fp32 sums of 256 tokens, where wgmma_gemm_a16.cu has two of 160, whose operands' way through shared memory is what bounds it (look-ups in
// registers took longer). The clusters, their tiles' order, their parts of K and their outputs are device/hopper_gemm.cuh's; a block's tile is 128
// features x 256 tokens.
//
//   panel    64 columns of x for the tile's tokens, of which each block of the cluster loads half for both; a ring of them
//   chunk    128 columns of codes and their scales; another ring
//   decode   a step, 64 columns: look-ups, times the scale, while the step before is multiplied
//   multiply into sums that stay for all of K: a warpgroup's products never wait for each other
#include "device/decode.cuh"
#include "device/hopper_gemm.cuh"
#include "kernels/kernels.h"

#pragma nv_diag_suppress 177  // for other GPUs the kernels have no bodies, which read the members of Config

namespace cutlass_ops {
namespace {

using hopper::Params;

// Scale: of weight scales, Element or float.
template <class Element_, class Scale_>
struct Config {
  using Element = Element_;
  using Scale = Scale_;
  using Work = hopper::Work;
  using Params = hopper::Params;
  static constexpr int kWindow = 0;
  static constexpr int kBits = 4, kTokens = 256, kCluster = 2, kWarpgroups = 2;
  static constexpr int kRows = kRowsPerSlab * kWarpgroups, kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kLoadingRegisters = 40, kRegisters = 232;  // of a thread of the warpgroup that loads, and of the others
  static constexpr int kSums = kTokens / 2;                       // registers of a thread
  static constexpr int kPieces = 4;                               // of 16 columns, in a step
  static constexpr int kSteps = kKPerTile / 16 / kPieces;         // of a chunk
  static constexpr int kPanels = 5, kPanelBytes = kTokens * 128;
  static constexpr int kChunks = 2, kCodeBytes = kWarpgroups * chunk_bytes(kBits);
  static constexpr int kGroupBytes = kRows * int(sizeof(Scale));
  static constexpr int kChunkBytes = kCodeBytes + kSteps * kGroupBytes;
  static constexpr int kFirstChunk = kPanels * kPanelBytes;
  static constexpr int kTable = kFirstChunk + kChunks * kChunkBytes;
  static constexpr int kStaging = kTable + decode::Int4Book::kTableBytes;
  static constexpr int kStoreTokens = 16, kStoreStride = kRowsPerSlab + 4;  // as in hopper::TileConfig
  static constexpr int kLineTokens = 64, kBoxTokens = 64, kLineBytes = kRowsPerSlab * 2;
  static constexpr int kStoreBytes = kWarpgroups * kLineTokens * kLineBytes;
  static constexpr int kSharedBytes = kStaging + kStoreBytes + 256;
  // Of token tiles that are computed together: a token's bytes are four times a feature's, so that fewer of them pass through the cache (on an H200 2 %
  // less time than in bands of 16).
  static constexpr int kBand = 4;
  // Of a chunk, for hopper::Place.
  static constexpr int kWeights = 0, kScales = kCodeBytes, kZeroPoints = 0, kOffsets = 0, kStepFactors = 0, kTokenFactors = 0;
  static constexpr bool kFactors = false, kPrepareScales = false, kShortTiles = false;
  static_assert(kStoreStride * 4 * kStoreTokens <= kLineTokens * kLineBytes);
  static_assert(kStaging % 1024 == 0 && kSharedBytes <= 227 * 1024, "more shared memory than a block may have");
};

template <class C>
struct Barriers {
  uint64_t full_panels[C::kPanels], empty_panels[C::kPanels], full_chunks[C::kChunks], empty_chunks[C::kChunks];
};

// One warp starts the copies of codes and scales, at once: they do not depend on the kernel before.
template <class C>
__device__ __forceinline__ void produce_chunks(uint8_t* shared, Barriers<C>& barriers, Params const& p, int rank) {
  using Copy = cute::SM90_BULK_COPY_G2S;
  constexpr int kChunk = chunk_bytes(C::kBits);
  bool const leader = cute::elect_one_sync();
  hopper::Ring<C::kChunks> ring;
  int const clusters = gridDim.x / C::kCluster, total = hopper::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    hopper::Work const work(index, p, C::kBand);
    int const row0 = (work.pair * C::kCluster + rank) * C::kRows, end = work.end_k(p);
    int const slabs = max(0, min(C::kWarpgroups, (p.n_pad - row0) / kRowsPerSlab));  // the last pair may reach beyond N
    int const group_bytes = slabs * kRowsPerSlab * int(sizeof(typename C::Scale));
#pragma unroll 1
    for (int k = work.first_k(p); k < end; ++k, ring.advance()) {
      uint8_t* chunk = shared + C::kFirstChunk + ring.stage * C::kChunkBytes;
      uint64_t* full = &barriers.full_chunks[ring.stage];
      ClusterBarrier::wait(&barriers.empty_chunks[ring.stage], ring.phase ^ 1);
      if (leader) {
        TransactionBarrier::arrive_and_expect_tx(full, slabs * kChunk + p.tile_groups * group_bytes);
        for (int slab = 0; slab < slabs; ++slab) {
          Copy::copy(p.weight.codes + (int64_t(row0 / kRowsPerSlab + slab) * p.k_tiles + k) * kChunk, full,
                     chunk + slab * kChunk, kChunk);
        }
        int64_t const vector = int64_t(k / p.group_tiles * p.tile_groups) * p.n_pad + row0;
        for (int group = 0; slabs > 0 && group < p.tile_groups; ++group) {
          Copy::copy(static_cast<typename C::Scale const*>(p.weight.scales) + vector + int64_t(group) * p.n_pad, full,
                     chunk + C::kCodeBytes + group * C::kGroupBytes, group_bytes);
        }
      }
    }
  }
}

// Another starts those of x, this block's half of the tile's tokens for both blocks.
template <class C>
__device__ __forceinline__ void produce_panels(uint8_t* shared, Barriers<C>& barriers, Params const& p, CUtensorMap const& map,
                                               int rank) {
  constexpr int kHalf = C::kTokens / C::kCluster;
  constexpr uint16_t kEveryBlock = (1 << C::kCluster) - 1;
  wait_for_predecessor();
  bool const leader = cute::elect_one_sync();
  hopper::Ring<C::kPanels> ring;
  int const clusters = gridDim.x / C::kCluster, total = hopper::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    hopper::Work const work(index, p, C::kBand);
    int const m0 = work.token_tile * C::kTokens, end = work.end_k(p) * C::kSteps;
#pragma unroll 1
    for (int step = work.first_k(p) * C::kSteps; step < end; ++step, ring.advance()) {
      uint64_t* full = &barriers.full_panels[ring.stage];
      ClusterBarrier::wait(&barriers.empty_panels[ring.stage], ring.phase ^ 1);
      if (leader) {
        TransactionBarrier::arrive_and_expect_tx(full, C::kPanelBytes);
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, full, kEveryBlock, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                               shared + ring.stage * C::kPanelBytes + rank * kHalf * 128,
                                               step * C::kPieces * 16, m0 + rank * kHalf);
      }
    }
  }
}

// A row's scale, by which pairs of the book's values are multiplied, each product rounded once.
template <class Element, class Scale>
struct RowScale {
  uint32_t pair;

  __device__ __forceinline__ uint32_t times(uint32_t v) const {
    uint32_t out;
    if constexpr (std::is_same_v<Element, __half>) {
      asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(v), "r"(pair));
    } else {
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(v), "r"(pair));
    }
    return out;
  }
};
template <class Element>
struct RowScale<Element, float> {
  float scale;

  __device__ __forceinline__ uint32_t times(uint32_t v) const {
    float2 pair;
    if constexpr (std::is_same_v<Element, __half>) {
      pair = __half22float2(reinterpret_cast<__half2 const&>(v));
    } else {
      pair = make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
    }
    return pack_pair<Element>(__fmul_rn(pair.x, scale), __fmul_rn(pair.y, scale));
  }
};

// A thread's codes of a step and the scales of its rows g and g + 8, as they lie in shared memory.
template <class C>
struct StoredStep {
  uint32_t words[C::kPieces], scales[sizeof(typename C::Scale) / 2];

  __device__ __forceinline__ void load(uint32_t codes, uint32_t from) {
    load_shared(codes, words);
    if constexpr (sizeof(typename C::Scale) == 4) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(scales[0]), "=r"(scales[1]) : "r"(from));
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales[0]) : "r"(from));
    }
  }

  // The step's operands.
  __device__ __forceinline__ void decode(uint32_t table, uint32_t (&a)[C::kPieces][4]) const {
    using Row = RowScale<typename C::Element, typename C::Scale>;
    auto multiply = [&](Row const& g, Row const& g8) {
#pragma unroll
      for (int i = 0; i < C::kPieces; ++i) {
        uint32_t pairs[4];
        decode::Int4Book::look_up(words[i], table, pairs);
        decode::Int4Book::combine(pairs, a[i]);
#pragma unroll
        for (int r = 0; r < 4; ++r) a[i][r] = (r % 2 ? g8 : g).times(a[i][r]);
      }
    };
    if constexpr (sizeof(typename C::Scale) == 4) {
      multiply({__uint_as_float(scales[0])}, {__uint_as_float(scales[1])});
    } else {
      multiply({decode::permute_bytes(scales[0], 0, 0x1010u)}, {decode::permute_bytes(scales[0], 0, 0x3232u)});
    }
  }
};

template <class C>
__device__ __forceinline__ void consume(uint8_t* shared, Barriers<C>& barriers, CUtensorMap const& out_map, Params const& p,
                                        hopper::Place<C> const& at) {
  decode::Int4Book::fill<typename C::Element>(shared + C::kTable, p.weight.book, threadIdx.x - 128, C::kThreads - 128);
  cutlass::arch::NamedBarrier::sync(C::kThreads - 128, C::kWarpgroups + 1);
  uint32_t const first = cute::cast_smem_ptr_to_uint(shared), table = first + C::kTable + at.lane * 4;
  int const clusters = gridDim.x / C::kCluster, total = hopper::Work::count(p);
  int const group_bytes = p.tile_groups > 1 ? C::kGroupBytes : 0;
  auto* staging = reinterpret_cast<float*>(shared + C::kStaging);
  hopper::Ring<C::kPanels> panels;
  hopper::Ring<C::kChunks> chunks;
  int last_panel = 0;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    hopper::Work const work(index, p, C::kBand);
    int const row0 = (work.pair * C::kCluster + at.rank) * C::kRows, m0 = work.token_tile * C::kTokens;
    int const count = work.end_k(p) - work.first_k(p);
    float sums[C::kSums] = {};
    uint32_t a[2][C::kPieces][4];
    StoredStep<C> stored;
    auto chunk = [&] { return first + C::kFirstChunk + chunks.stage * C::kChunkBytes; };
    auto load = [&](int step) {
      if (step == 0) TransactionBarrier::wait(&barriers.full_chunks[chunks.stage], chunks.phase);
      stored.load(chunk() + at.units + step * kUnitBytes, chunk() + at.scales + step * group_bytes);
    };
    auto release = [&](int panel) {
      if (at.lane < C::kCluster) ClusterBarrier::arrive(&barriers.empty_panels[panel], at.lane, true);
    };
    load(0);
    stored.decode(table, a[0]);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        uint64_t const tokens = uniform_operand_descriptor(shared + panels.stage * C::kPanelBytes);
        TransactionBarrier::wait(&barriers.full_panels[panels.stage], panels.phase);
#pragma unroll
        for (int piece = 0; piece < C::kPieces; ++piece) fence_registers(a[step][piece]);
        fence_registers(sums);
        cute::warpgroup_arrive();
#pragma unroll
        for (int piece = 0; piece < C::kPieces; ++piece)
          wgmma_float<typename C::Element, C::kTokens>(a[step][piece], tokens + piece * 2, sums, true);
        cute::warpgroup_commit_batch();
        fence_registers(sums);
        bool const more = step + 1 < C::kSteps || i + 1 < count;
        if (step + 1 == C::kSteps) chunks.advance();
        if (more) load((step + 1) % C::kSteps);
        cute::warpgroup_wait<1>();  // the step before is done
#pragma unroll
        for (int piece = 0; piece < C::kPieces; ++piece) fence_registers(a[1 - step][piece]);
        if (i + step > 0) release(last_panel);
        last_panel = panels.stage;
        panels.advance();
        if (more) stored.decode(table, a[(step + 1) % C::kSteps]);
        if (step == 0) ClusterBarrier::arrive(&barriers.empty_chunks[chunks.stage]);  // all of the chunk is in registers
      }
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) fence_registers(a[C::kSteps - 1][piece]);
    fence_registers(sums);
    release(last_panel);
    hopper::store<C>(sums, staging, out_map, p, at, index, row0, m0);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_book_gemm(__grid_constant__ CUtensorMap const map, __grid_constant__ CUtensorMap const out_map,
                    __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& barriers = *reinterpret_cast<Barriers<C>*>(shared + C::kSharedBytes - 256);
  int const rank = int(cute::block_rank_in_cluster()), warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kPanels; ++i) {
      TransactionBarrier::init(&barriers.full_panels[i], 1);
      ClusterBarrier::init(&barriers.empty_panels[i], C::kCluster * C::kWarpgroups * 4);
    }
    for (int i = 0; i < C::kChunks; ++i) {
      TransactionBarrier::init(&barriers.full_chunks[i], 1);
      ClusterBarrier::init(&barriers.empty_chunks[i], C::kWarpgroups * 128);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::kLoadingRegisters>();
    int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform, as in hopper::run
    if (warp == 0) produce_chunks<C>(shared, barriers, p, rank);
    if (warp == 1) produce_panels<C>(shared, barriers, p, map, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kRegisters>();
    wait_for_predecessor();
    consume<C>(shared, barriers, out_map, p, hopper::Place<C>(p, rank, warpgroup - 1));
    cute::tma_store_wait<0>();
  }
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
#endif
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  CUtensorMap map;
  Status status =
      hopper::encode_tokens(problem.x, 2, problem.m, problem.weight.k, problem.x_stride * 2, C::kTokens / C::kCluster, &map);
  return status.ok() ? hopper::launch_persistent<C>(wgmma_book_gemm<C>, problem, plan, partials, map, stream) : status;
}

}  // namespace

Status launch_wgmma_book_gemm(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  bool const wide = problem.weight.scale_type == DataType::kFloat32;
  if (problem.x_type == DataType::kFloat16) {
    return wide ? launch_config<Config<__half, float>>(problem, plan, partials, stream)
                : launch_config<Config<__half, __half>>(problem, plan, partials, stream);
  }
  return wide ? launch_config<Config<__nv_bfloat16, float>>(problem, plan, partials, stream)
              : launch_config<Config<__nv_bfloat16, __nv_bfloat16>>(problem, plan, partials, stream);
}

}  // namespace cutlass_ops
