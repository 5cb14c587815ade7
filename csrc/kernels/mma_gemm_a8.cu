// int8 activations x int4 or int8 weights on mma.sync m16n8k32: the portable kernel for W8A8 and W4A8, sm_80 and later.
//
// A block computes 128 output features x kTokens (device/tile.cuh). Weights, activations, scales and zero points of 128 columns of K go
// through a ring of stages in shared memory (cp.async). Per step, the shorter of group and activation block:
//
//   load     weights: one 16-byte load a lane and unit (layout.h);  activations: ldmatrix from rows swizzled by token % 8
//   decode   int4 -> int8 in registers, minus the zero point
//   multiply exact int32 sums, which never leave registers
//   promote  sum = fma(float(I), activation scale * weight scale, sum), once a step
//
// Asymmetric terms. With centred codes c, their zero point zc, activation codes q and their zero point za, the sum over a step is
//   I = sum (q - za)(c - zc) = sum q c  -  zc * Q  -  za * sum c,    Q = sum q - width * za
// and a real offset o adds o * scale_a * Q. sum c comes from the tensor cores too, by an operand B of ones, in the registers that hold the
// outputs of those rows; sum q is added up by dp4a (an operand A of ones would take half as long as the product itself). Columns beyond K hold activations equal to za, so they add
// (za - za)(c - zc) = 0, whatever the weights' padding is.
#include "device/decode.cuh"
#include "device/launch.cuh"
#include "device/tile.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

// kGeneral: any group size, zero points on either side, offsets. Without it: symmetric, and steps of 128 columns.
template <int kBits_, int kTokens, bool kGeneral_>
struct Config : BlockTile<kTokens> {
  using Tile = BlockTile<kTokens>;
  static constexpr int kBits = kBits_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kStages = mma_gemm_a8_tile(kBits, kTokens).stages;
  static constexpr int kMinBlocks = kGeneral ? 1 : mma_gemm_a8_tile(kBits, kTokens).resident;
  static constexpr int kSteps = kGeneral ? 4 : 1;  // steps in a tile of K, at most

  static constexpr int kWeights = 0;
  static constexpr int kActivations = kWeights + Tile::kSlabs * chunk_bytes(kBits);
  static constexpr int kActivationScales = kActivations + kTokens * kKPerTile;
  static constexpr int kScales = kActivationScales + kSteps * kTokens * 4;
  static constexpr int kOffsets = kScales + kSteps * Tile::kRows * 4;
  static constexpr int kZeros = kOffsets + (kGeneral ? kSteps * Tile::kRows * 4 : 0);
  static constexpr int kActivationZeros = kZeros + (kGeneral ? kSteps * Tile::kRows : 0);
  // ldmatrix rows and their swizzle want every stage to start on 128 bytes.
  static constexpr int kStageBytes = (kActivationZeros + (kGeneral ? kSteps * kTokens : 0) + 127) / 128 * 128;
  static constexpr int kSharedBytes = kStages * kStageBytes > Tile::kSumBytes ? kStages* kStageBytes : Tile::kSumBytes;
  static_assert(kSharedBytes <= mma_gemm_a8_tile(kBits, kTokens).shared_bytes,
                "the dispatch table promises less shared memory");
};

struct Params {
  PackedWeight weight;
  QuantizedActivations x;
  EpilogueParams epilogue;
  float* partials;
  VectorRows weight_rows, activation_rows;
  int row_tiles, token_tiles, k_tiles, n_pad, splits;
  int log_scale_bytes, log_offset_bytes;
};

__device__ __forceinline__ int swizzled(int token, int chunk) { return token * kKPerTile + ((chunk ^ (token & 7)) << 4); }

// Each vector is copied by a warp of its own.
template <class C>
__device__ __forceinline__ void load_weights(uint8_t* stage, Params const& p, int n0, int k_tile) {
  PackedWeight const& w = p.weight;
  int warp = threadIdx.x / 32;
  copy_weights<C, C::kBits>(stage + C::kWeights, w.codes, n0, p.n_pad, k_tile, p.k_tiles);
  if (warp == 0)
    copy_vector_rows(stage + C::kScales, w.scales, p.weight_rows, k_tile, p.log_scale_bytes, C::kRows, n0, p.n_pad, p.n_pad);
  if constexpr (C::kGeneral) {
    if (warp == 1 && w.zeros)
      copy_vector_rows(stage + C::kZeros, w.zeros, p.weight_rows, k_tile, 0, C::kRows, n0, p.n_pad, p.n_pad);
    if (warp == 2 && w.offsets) {
      copy_vector_rows(stage + C::kOffsets, w.offsets, p.weight_rows, k_tile, p.log_offset_bytes, C::kRows, n0, p.n_pad,
                       p.n_pad);
    }
  }
}

// Tokens beyond the last repeat it; they are never stored.
template <class C>
__device__ __forceinline__ void load_activations(uint8_t* stage, Params const& p, int m0, int k_tile) {
  constexpr int kPieces = C::kTokens * kKPerTile / 16;
  int warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < (kPieces + C::kThreads - 1) / C::kThreads; ++j) {
    int i = threadIdx.x + j * C::kThreads;
    if (kPieces % C::kThreads && i >= kPieces) break;
    int token = i / 8, chunk = i % 8, row = min(m0 + token, p.epilogue.m - 1);
    copy_async_16(stage + C::kActivations + swizzled(token, chunk),
                  p.x.codes + (int64_t(row) * p.k_tiles + k_tile) * kKPerTile + chunk * 16);
  }
  if (warp == 4) {
    copy_vector_rows(stage + C::kActivationScales, p.x.scales, p.activation_rows, k_tile, 2, C::kTokens, m0, p.x.stride,
                     p.x.stride);
  }
  if constexpr (C::kGeneral) {
    if (warp == 5 && p.x.zeros) {
      copy_vector_rows(stage + C::kActivationZeros, p.x.zeros, p.activation_rows, k_tile, 0, C::kTokens, m0, p.x.stride,
                       p.x.stride);
    }
  }
}

// The integer sums of one step, and the two correction sums of the asymmetric forms.
template <class C>
struct StepSums {
  uint32_t main[C::kRowBlocks][C::kTokenBlocks][4] = {};
  int tokens[C::kGeneral ? C::kTokenBlocks : 1] = {};      // of token g of the block, sum of the q that this lane holds
  uint32_t rows[C::kGeneral ? C::kRowBlocks : 1][4] = {};  // sum of c (4 bit: c - zc); registers 1, 3 repeat 0, 2

  // Sums of q of tokens 2t and 2t + 1, which four lanes each hold a part of.
  __device__ __forceinline__ int2 token_sums(int tb, Place<C> const& at) const {
    int sum = tokens[tb];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return {__shfl_sync(~0u, sum, 8 * at.t), __shfl_sync(~0u, sum, 8 * at.t + 4)};
  }
};

// 32 columns: `piece` of the tile's four.
template <class C, class Fragment>
__device__ __forceinline__ void multiply(uint8_t const* stage, Params const& p, Place<C> const& at, int piece,
                                         Fragment const& weight_fragment, StepSums<C>& sums) {
  constexpr uint32_t kOnes = 0x01010101u;
  uint32_t a[C::kRowBlocks][4];
#pragma unroll
  for (int rb = 0; rb < C::kRowBlocks; ++rb) {
    weight_fragment(rb, piece, a[rb]);
    if (C::kGeneral && p.x.zeros) multiply_add<Operand::kInt8>(sums.rows[C::kGeneral ? rb : 0], a[rb], kOnes, kOnes);
  }
#pragma unroll
  for (int tb = 0; tb < C::kTokenBlocks; tb += 2) {
    uint32_t b[4];
    int token = at.first_token + tb * 8 + at.lane / 16 * 8 + at.lane % 8;
    load_tiles(stage + C::kActivations + swizzled(token, piece * 2 + at.lane / 8 % 2), b);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int rb = 0; rb < C::kRowBlocks; ++rb)
        multiply_add<Operand::kInt8>(sums.main[rb][tb + j], a[rb], b[2 * j], b[2 * j + 1]);
      if (C::kGeneral && (p.weight.offsets || (C::kBits == 8 && p.weight.zeros))) {
        int& sum = sums.tokens[C::kGeneral ? tb + j : 0];
        sum = __dp4a(int(b[2 * j + 1]), int(kOnes), __dp4a(int(b[2 * j]), int(kOnes), sum));
      }
    }
  }
}

// Fold a step's integers into the fp32 sums. `group`, `block`: rows of the stage's vectors; `width`: columns summed.
template <class C>
__device__ __forceinline__ void promote(uint8_t const* stage, Params const& p, Place<C> const& at, int group, int block,
                                        int width, float decoded_scale, uint32_t zeros, StepSums<C>& step,
                                        typename C::Sums& sums) {
  float scale[4], offset[4] = {};
  int index = group * C::kRows + at.group_index;
  load_float4(stage + C::kScales, p.weight.scale_type, index, scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] *= decoded_scale;
  bool offsets = C::kGeneral && p.weight.offsets;
  if (offsets) load_float4(stage + C::kOffsets, p.weight.offset_type, index, offset);
#pragma unroll
  for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
    int token = block * C::kTokens + at.first_token + tb * 8 + 2 * at.t;
    float2 pair = *reinterpret_cast<float2 const*>(stage + C::kActivationScales + token * 4);
    float const token_scale[2] = {pair.x, pair.y};
    int za[2] = {0, 0}, q[2] = {0, 0};
    if constexpr (C::kGeneral) {
      if (p.x.zeros) {
        char2 z = *reinterpret_cast<char2 const*>(stage + C::kActivationZeros + token);
        za[0] = z.x, za[1] = z.y;
      }
      int2 total = step.token_sums(tb, at);
      q[0] = total.x - width * za[0], q[1] = total.y - width * za[1];
    }
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int integer = int(step.main[rb][tb][e]);
        float& sum = sums[rb][tb][e];
        if constexpr (C::kGeneral) {
          int zc = C::kBits == 8 ? int8_t(zeros >> 8 * (2 * rb + e / 2)) : 0;  // 4 bit: subtracted while decoding
          integer -= zc * q[e % 2] + za[e % 2] * int(step.rows[rb][e / 2 * 2]);
        }
        sum = fmaf(float(integer), token_scale[e % 2] * scale[2 * rb + e / 2], sum);
        if (offsets) sum = fmaf(offset[2 * rb + e / 2], token_scale[e % 2] * float(q[e % 2]), sum);
      }
  }
  step = {};
}

// One tile of K out of shared memory.
template <class C>
__device__ __forceinline__ void compute(uint8_t const* stage, Params const& p, Place<C> const& at, typename C::Sums& sums) {
  constexpr int kUnits = C::kBits == 4 ? 2 : 4, kPieces = C::kColumns / 32;
  uint8_t const* weights = stage + C::kWeights + at.slab * chunk_bytes(C::kBits) + at.lane * kLaneBytes;
  int first_piece = at.warp_k * kPieces;
  StepSums<C> step;

  if constexpr (!C::kGeneral) {
    using Decode = std::conditional_t<C::kBits == 4, decode::Int4Int8, decode::Int8Int8>;
    uint4 q[C::kRowBlocks];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      int piece = first_piece + i;
      if (C::kBits == 8 || i % 2 == 0) {
#pragma unroll
        for (int rb = 0; rb < C::kRowBlocks; ++rb)
          q[rb] = *reinterpret_cast<uint4 const*>(weights + ((at.first_block + rb) * kUnits + piece * kUnits / 4) * kUnitBytes);
      }
      auto fragment = [&](int rb, int, uint32_t (&a)[4]) {
        uint32_t const words[4] = {q[rb].x, q[rb].y, q[rb].z, q[rb].w};
        Decode::fragment(words + (C::kBits == 4 ? i % 2 * 2 : 0), a);
      };
      multiply<C>(stage, p, at, piece, fragment, step);
    }
    promote<C>(stage, p, at, 0, 0, C::kColumns, 1.0f / Decode::kScale, 0, step, sums);
  } else {
    int columns = kKPerTile / p.weight_rows.count;
    int width = min(columns, C::kColumns), pieces = width / 32;
#pragma unroll 1
    for (int piece = first_piece; piece < first_piece + kPieces; piece += pieces) {
      int group = piece * 32 / columns, block = p.x.block == -1 ? 0 : group;
      uint32_t zeros = 0;
      if (p.weight.zeros) zeros = *reinterpret_cast<uint32_t const*>(stage + C::kZeros + group * C::kRows + at.group_index);
      decode::RowConstants constants[C::kRowBlocks];
#pragma unroll
      for (int rb = 0; rb < C::kRowBlocks; ++rb)
        constants[rb] = decode::Int4MinusZeroInt8::zero_constants(int8_t(zeros >> 16 * rb), int8_t(zeros >> (16 * rb + 8)));
#pragma unroll 1
      for (int i = 0; i < pieces; ++i) {
        auto fragment = [&](int rb, int at_piece, uint32_t (&a)[4]) {
          uint8_t const* unit = weights + ((at.first_block + rb) * kUnits + at_piece * kUnits / 4) * kUnitBytes;
          if constexpr (C::kBits == 4) {
            uint2 v = *reinterpret_cast<uint2 const*>(unit + at_piece % 2 * 8);
            uint32_t const words[2] = {v.x, v.y};
            decode::Int4MinusZeroInt8::fragment(words, constants[rb], a);
          } else {
            uint4 v = *reinterpret_cast<uint4 const*>(unit);
            a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
          }
        };
        multiply<C>(stage, p, at, piece + i, fragment, step);
      }
      promote<C>(stage, p, at, group, block, width, 1.0f, zeros, step, sums);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) mma_gemm_a8(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) uint8_t shared[];
  Place<C> at;
  TileIndex tile(blockIdx.x, p.row_tiles, p.token_tiles);
  int n0 = tile.n * C::kRows, m0 = tile.m * C::kTokens;
  KRange range(p.k_tiles, blockIdx.y, p.splits);
  auto stage = [&](int i) { return shared + i % C::kStages * C::kStageBytes; };

#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i)
    if (i < range.count) load_weights<C>(stage(i), p, n0, range.first + i);
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < range.count) load_activations<C>(stage(i), p, m0, range.first + i);
    commit_copies();
  }

  typename C::Sums sums = {};
  for (int i = 0; i < range.count; ++i) {
    wait_copies<C::kStages - 2>();
    __syncthreads();
    if (int ahead = i + C::kStages - 1; ahead < range.count) {
      load_weights<C>(stage(ahead), p, n0, range.first + ahead);
      load_activations<C>(stage(ahead), p, m0, range.first + ahead);
    }
    commit_copies();
    compute<C>(stage(i), p, at, sums);
  }
  wait_copies<0>();

  float* gathered = reinterpret_cast<float*>(shared);
  gather_sums<C>(sums, at, gathered);
  float* partials = p.partials ? p.partials + int64_t(blockIdx.y) * p.epilogue.m * p.n_pad : nullptr;
  store_sums<C>(gathered, m0, n0, p.epilogue, partials, p.n_pad);
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  PackedWeight const& w = problem.weight;
  Params p{w,
           problem.quantized,
           EpilogueParams(problem),
           partials,
           VectorRows(w.group_size),
           VectorRows(problem.quantized.block),
           (w.n + C::kRows - 1) / C::kRows,
           (problem.m + C::kTokens - 1) / C::kTokens,
           int(padded_k(w.k) / kKPerTile),
           int(padded_rows(w.n)),
           plan.splits,
           log2_size_of(w.scale_type),
           log2_size_of(w.offset_type)};
  dim3 grid(unsigned(p.row_tiles) * unsigned(p.token_tiles), unsigned(plan.splits));
  return launch(mma_gemm_a8<C>, grid, C::kThreads, C::kSharedBytes, stream, p);
}

}  // namespace

template <int kBits, int kTokens>
Status launch_mma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  PackedWeight const& w = problem.weight;
  bool general = w.zeros || w.offsets || problem.quantized.zeros || w.group_size == 32 || w.group_size == 64;
  return general ? launch_config<Config<kBits, kTokens, true>>(problem, plan, partials, stream)
                 : launch_config<Config<kBits, kTokens, false>>(problem, plan, partials, stream);
}

template Status launch_mma_gemm_a8<4, 16>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<4, 32>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<4, 64>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<4, 128>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<8, 16>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<8, 32>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<8, 64>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<8, 128>(GemmProblem const&, Plan const&, float*, Stream);

}  // namespace cutlass_ops
