// fp16 or bf16 activations x int4 or int8 weights on Hopper's wgmma: W4A16 and W8A16 at prefill, sm_90a. The tile, its loads and its stores are
// device/hopper_gemm.cuh. Per 128 columns of K a warpgroup's turn is:
//
//   decode   the stage's weights, which were loaded while the previous MMAs ran, to code minus zero point: exact in fp16 and bf16
//   multiply fp32 sums of exact products
//   promote  sum = fma(the 128 columns' sum, weight scale, sum): the scale never rounds a weight, and costs one FFMA an output
#include "device/decode.cuh"
#include "device/hopper_gemm.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

using hopper::Params;

template <class Element_, int kBits, int kTokens, bool kZeros>
struct Config : hopper::TileConfig<kBits, kTokens, 2, true, false, false, kZeros, wgmma_gemm_a16_tile(kTokens).stages> {
  using Element = Element_;
  using Decode = decode::ToFloat<kBits, Element>;
  static constexpr int kPieces = kKPerTile / 16;
  static_assert(Config::kSharedBytes <= wgmma_gemm_a16_tile(kTokens).shared_bytes,
                "the dispatch table promises less shared memory");

  static __device__ void consume(uint8_t* stages, float* staging, hopper::Barriers<Config>& barriers,
                                 CUtensorMap const& out_map, Params const& p, hopper::Place<Config> const& at);
};

// A warpgroup's weights of a stage as they lie in shared memory, and their scales and zero points for a thread's rows g and g + 8. Scales become
// floats only where they are used: a load takes long while an MMA reads shared memory, and nothing should wait for it before the MMAs are done.
template <class C>
struct StoredWeights {
  static constexpr int kLoads = C::kBits / 2;  // of 16 bytes
  uint32_t words[4 * kLoads], scales[2];
  int8_t zeros[2];

  __device__ __forceinline__ void load(uint8_t const* stage, Params const& p, hopper::Place<C> const& at) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint4 q = reinterpret_cast<uint4 const*>(stage + at.units)[i * 32];
      words[4 * i] = q.x, words[4 * i + 1] = q.y, words[4 * i + 2] = q.z, words[4 * i + 3] = q.w;
    }
    if (C::kZeros) {
      char2 z = *reinterpret_cast<char2 const*>(stage + at.zeros);
      zeros[0] = z.x, zeros[1] = z.y;
    }
    scales[0] = *reinterpret_cast<uint32_t const*>(stage + at.scales);
    if (p.weight.scale_type == DataType::kFloat32) scales[1] = *reinterpret_cast<uint32_t const*>(stage + at.scales + 4);
  }

  // The eight operands of 16 columns each.
  __device__ __forceinline__ void decode(uint32_t (&a)[C::kPieces][4]) const {
#pragma unroll
    for (int i = 0; i < C::kPieces; ++i) {
      if constexpr (C::kZeros) {
        C::Decode::fragment(words + i * C::Decode::kWords, C::Decode::zero_constants(zeros[0], zeros[1]), a[i]);
      } else {
        C::Decode::fragment(words + i * C::Decode::kWords, a[i]);
      }
    }
  }
};

// What StoredWeights::scales hold, as numbers.
__device__ __forceinline__ void scale_values(uint32_t const (&stored)[2], DataType type, float (&values)[2]) {
  if (type == DataType::kFloat32) {
    values[0] = __uint_as_float(stored[0]), values[1] = __uint_as_float(stored[1]);
  } else {
    float2 half = __half22float2(reinterpret_cast<__half2 const&>(stored[0]));
    bool is_half = type == DataType::kFloat16;
    values[0] = is_half ? half.x : __uint_as_float(stored[0] << 16);
    values[1] = is_half ? half.y : __uint_as_float(stored[0] & 0xffff0000u);
  }
}

template <class Element, int kBits, int kTokens, bool kZeros>
__device__ __forceinline__ void Config<Element, kBits, kTokens, kZeros>::consume(uint8_t* stages, float* staging,
                                                                                 hopper::Barriers<Config>& barriers,
                                                                                 CUtensorMap const& out_map, Params const& p,
                                                                                 hopper::Place<Config> const& at) {
  using C = Config;
  int clusters = gridDim.x / C::kCluster, total = p.row_pairs * p.token_tiles * p.splits;
  hopper::Ring<C::kStages> ring;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    hopper::Work work(index, p);
    int row0 = (work.pair * C::kCluster + at.rank) * C::kRows, m0 = work.token_tile * C::kTokens;
    int count = work.end_k(p) - work.first_k(p);
    float products[C::kSums], sums[C::kSums] = {};
    StoredWeights<C> weights;
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    weights.load(stages + ring.stage * C::kStageBytes, p, at);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      int stage = ring.stage;
      uint32_t a[C::kPieces][4], stored_scales[2] = {weights.scales[0], weights.scales[1]};
      weights.decode(a);
      uint64_t tokens = uniform_operand_descriptor(stages + stage * C::kStageBytes + C::kActivations);
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) fence_registers(a[piece]);
      fence_registers(products);
      cute::warpgroup_arrive();
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) {
        constexpr int kInPanel = C::kPanelColumns / 16;
        wgmma_float<Element, C::kTokens>(a[piece], tokens + piece / kInPanel * (C::kPanelBytes / 16) + piece % kInPanel * 2,
                                         products, piece > 0);
      }
      cute::warpgroup_commit_batch();
      fence_registers(products);
      ring.advance();
      if (i + 1 < count) {
        TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
        weights.load(stages + ring.stage * C::kStageBytes, p, at);
      }
      cute::warpgroup_wait<0>();
      fence_registers(products);
      if (at.lane < C::kCluster) ClusterBarrier::arrive(&barriers.empty[stage], at.lane, true);
      float scale[2];
      scale_values(stored_scales, p.weight.scale_type, scale);
#pragma unroll
      for (int j = 0; j < C::kSums; ++j) sums[j] = fmaf(products[j], scale[j % 4 / 2], sums[j]);
    }
    hopper::store<C>([&](int i) { return sums[i]; }, staging, out_map, p, at, row0, m0, work.split);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_gemm_a16(__grid_constant__ CUtensorMap const map, __grid_constant__ CUtensorMap const out_map,
                   __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  hopper::run<C>(stages, map, out_map, p);
#endif
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  CUtensorMap map;
  Status status =
      hopper::encode_tokens(problem.x, 2, problem.m, problem.weight.k, problem.x_stride * 2, C::kTokens / C::kCluster, &map);
  return status.ok() ? hopper::launch_persistent<C>(wgmma_gemm_a16<C>, problem, plan, partials, map, stream) : status;
}

template <class Element, int kBits, int kTokens>
Status launch_element(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  return problem.weight.zeros ? launch_config<Config<Element, kBits, kTokens, true>>(problem, plan, partials, stream)
                              : launch_config<Config<Element, kBits, kTokens, false>>(problem, plan, partials, stream);
}

}  // namespace

template <int kBits, int kTokens>
Status launch_wgmma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  return problem.x_type == DataType::kFloat16 ? launch_element<__half, kBits, kTokens>(problem, plan, partials, stream)
                                              : launch_element<__nv_bfloat16, kBits, kTokens>(problem, plan, partials, stream);
}

template Status launch_wgmma_gemm_a16<4, 64>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a16<4, 128>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a16<4, 160>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a16<8, 64>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a16<8, 128>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_wgmma_gemm_a16<8, 160>(GemmProblem const&, Plan const&, float*, Stream);

}  // namespace cutlass_ops
