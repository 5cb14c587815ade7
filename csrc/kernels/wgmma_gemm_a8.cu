// int8 activations x int4 or int8 weights on Hopper's wgmma: W8A8 and W4A8 at prefill, sm_90a. The tile, its loads and its stores are
// device/hopper_gemm.cuh. Per 128 columns of K a warpgroup's turn is:
//
//   decode   the stage's weights, which were loaded while the previous sums were promoted
//   multiply exact int32 sums of 128 columns, which never leave registers
//   promote  sum = fma(float(I), token scale * weight scale, sum), once a group and block
#include "device/decode.cuh"
#include "device/hopper_gemm.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

using hopper::Params;

enum class Promotion {
  kBlock,    // a scale for each token and 128 columns, and one for each row and 128 columns
  kToken,    // one for each row and 128 columns; the token's is applied at the end
  kChannel,  // none: int32 sums run over all of K
};

template <int kBits, int kTokens, Promotion kPromotion_, bool kZeros>
struct Config : hopper::TileConfig<kBits, kTokens, 1, kPromotion_ != Promotion::kChannel, kPromotion_ == Promotion::kBlock,
                                   kZeros, wgmma_gemm_a8_tile(kTokens).stages> {
  static constexpr Promotion kPromotion = kPromotion_;
  // What the decoder multiplies codes by.
  static constexpr float kCodeScale = kBits == 4 && !kZeros ? float(decode::Int4Int8::kScale) : 1.0f;
  static_assert(Config::kSharedBytes <= wgmma_gemm_a8_tile(kTokens).shared_bytes,
                "the dispatch table promises less shared memory");

  static __device__ void consume(uint8_t* stages, float* staging, hopper::Barriers<Config>& barriers, Params const& p,
                                 hopper::Place<Config> const& at);
};

// The four operands of 32 columns each.
template <class C>
__device__ __forceinline__ void decode_weights(hopper::RawWeights<C> const& raw, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (C::kBits == 8) {
      decode::Int8Int8::fragment(raw.words + 4 * i, a[i]);
    } else if constexpr (C::kZeros) {
      decode::Int4MinusZeroInt8::fragment(raw.words + 2 * i,
                                          decode::Int4MinusZeroInt8::zero_constants(raw.zero[0], raw.zero[1]), a[i]);
    } else {
      decode::Int4Int8::fragment(raw.words + 2 * i, a[i]);
    }
  }
}

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

template <int kBits, int kTokens, Promotion kPromotion, bool kZeros>
__device__ __forceinline__ void Config<kBits, kTokens, kPromotion, kZeros>::consume(uint8_t* stages, float* staging,
                                                                                    hopper::Barriers<Config>& barriers,
                                                                                    Params const& p,
                                                                                    hopper::Place<Config> const& at) {
  using C = Config;
  int clusters = gridDim.x / C::kCluster, total = p.row_pairs * p.token_tiles * p.splits;
  int const t = at.lane % 4;
  hopper::Ring<C::kStages> ring;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    hopper::Work work(index, p);
    int row0 = (work.pair * C::kCluster + at.rank) * C::kRows, m0 = work.token_tile * C::kTokens;
    int count = work.end_k(p) - work.first_k(p);
    uint32_t integers[C::kSums];
    float sums[C::kPromotion == Promotion::kChannel ? 1 : C::kSums] = {};
    hopper::RawWeights<C> raw;
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    raw.load(stages + ring.stage * C::kStageBytes, p, at);
    for (int i = 0; i < count; ++i) {
      uint8_t const* stage = stages + ring.stage * C::kStageBytes;
      uint32_t a[4][4];
      decode_weights<C>(raw, a);
      float scale[2] = {raw.scale[0] * (1.0f / C::kCodeScale), raw.scale[1] * (1.0f / C::kCodeScale)};
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
      if constexpr (C::kPromotion != Promotion::kChannel) promote<C>(stage + C::kTokenScales + t * 8, integers, scale, sums);
      if (at.lane < C::kCluster) ClusterBarrier::arrive(empty, at.lane, true);
    }
    if constexpr (C::kPromotion == Promotion::kBlock) {
      hopper::store<C>([&](int i) { return sums[i]; }, staging, p, at, row0, m0, work.split);
    } else {
      // The scales that do not change along K come last.
      float row_scale[2] = {1.0f, 1.0f};
      if (C::kPromotion == Promotion::kChannel) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int position = row0 + at.warpgroup * kRowsPerSlab + at.lane / 4 * 8 + at.warp * 2 + h;
          if (position < p.n_pad) row_scale[h] = load_float(p.weight.scales, p.weight.scale_type, position);
          row_scale[h] *= 1.0f / C::kCodeScale;
        }
      }
      auto value = [&](int i) {
        int token = min(m0 + i / 4 * 8 + 2 * t + i % 2, p.x.stride - 1);
        float sum = C::kPromotion == Promotion::kChannel ? float(int(integers[i])) * row_scale[i % 4 / 2] : sums[i];
        return sum * __ldg(p.x.scales + token);
      };
      hopper::store<C>(value, staging, p, at, row0, m0, work.split);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_gemm_a8(__grid_constant__ CUtensorMap const map, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  hopper::run<C>(stages, map, p);
#endif
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  int64_t k_pad = padded_k(problem.weight.k);
  CUtensorMap map;
  Status status =
      hopper::encode_tokens(problem.quantized.codes, 1, problem.m, int(k_pad), k_pad, C::kTokens / C::kCluster, &map);
  return status.ok() ? hopper::launch_persistent<C>(wgmma_gemm_a8<C>, problem, plan, partials, map, stream) : status;
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
