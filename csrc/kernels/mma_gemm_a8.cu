// int8 activations x int4 or int8 weights on mma.sync m16n8k32: the portable kernel for W8A8 and W4A8, sm_80 and later.
//
// A block computes 128 output features x kTokens. Weights, activations, scales and zero points of 128 columns of K go through a ring of
// stages in shared memory (cp.async). Per step, the shorter of group and activation block, but 128 columns at most:
//
//   for every 32 columns
//     load     weights: one 16-byte load a lane and unit (layout.h);  activations: ldmatrix from rows swizzled by token % 8
//     decode   int4 -> int8 in registers, minus the zero point
//     multiply exact int32 sums, which never leave registers
//   promote  sum = fma(float(I), activation scale * weight scale, sum)
//
// Integers become floats by a magic number: the sums of a step start at the bits of 1.5 * 2^23, whose unit in the last place is 1, so that
// for |I| < 2^22 the sum's bits are those of the float 1.5 * 2^23 + I, and one exact subtraction leaves I. It costs nothing, as the first
// instruction of a step adds those constant registers instead of zeros. |I| is at most 255 * 128 * 128 here.
//
// Asymmetric terms. With centred codes c, their zero point zc, activation codes q and their zero point za, the sum over a step is
//   I = sum (q - za)(c - zc) = sum q (c - zc) - za * sum (c - zc)         4 bit: c - zc is what the decoder makes
//     = sum q c - za * sum c - zc * Q,   Q = sum q - width * za           8 bit: c - zc would not fit
// and a real offset o adds o * scale_a * Q. sum c comes from the tensor cores too, by an operand B of ones, in the registers that hold the
// outputs of those rows; sum q by an operand B of ones to the tokens as operand A: the registers of two operands B, in another order, are
// one. Columns beyond K hold activations equal to za, so they add (za - za)(c - zc) = 0, whatever the weights' padding is.
#include "device/decode.cuh"
#include "device/launch.cuh"
#include "device/tile.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

// kSymmetric:  steps of 128 columns, no zero points.
// kZeroPoints: steps of 128 columns, zero points of the activations and of 4-bit weights.
// kGeneral:    steps of 32 columns or more, everything.
enum class Form { kSymmetric, kZeroPoints, kGeneral };

template <int kBits_, int kTokens, Form kForm_>
struct Config : BlockTile<kTokens> {
  using Tile = BlockTile<kTokens>;
  static constexpr int kBits = kBits_;
  static constexpr int kUnits = kBits / 2;  // of a row block and tile of K (layout.h)
  static constexpr int kRowBytes = kKPerTile;
  static constexpr Form kForm = kForm_;
  static constexpr bool kGeneral = kForm == Form::kGeneral;
  static constexpr int kStages = mma_gemm_a8_tile(kBits, kTokens).stages;
  static constexpr int kMinBlocks = kForm == Form::kSymmetric ? mma_gemm_a8_tile(kBits, kTokens).resident : kGeneral ? 1 : 2;
  static constexpr int kSteps = kGeneral ? 4 : 1;  // steps in a tile of K, at most
  static constexpr bool kMinusZero = kForm != Form::kSymmetric && kBits == 4;
  static constexpr uint32_t kStart =
      kGeneral ? 0 : 0x4b400000u;  // 8-bit weights' zero points may exceed the magic number's range

  static constexpr int kWeights = 0;
  static constexpr int kActivations = kWeights + Tile::kSlabs * chunk_bytes(kBits);
  static constexpr int kActivationScales = kActivations + kTokens * kKPerTile;
  static constexpr int kScales = kActivationScales + kSteps * kTokens * 4;
  static constexpr int kZeros = kScales + kSteps * Tile::kRows * 4;
  static constexpr int kActivationZeros = kZeros + (kForm != Form::kSymmetric ? kSteps * Tile::kRows : 0);
  static constexpr int kOffsets = kActivationZeros + (kForm != Form::kSymmetric ? kSteps * kTokens : 0);
  // ldmatrix rows and their swizzle want every stage to start on 128 bytes.
  static constexpr int kStageBytes = (kOffsets + (kGeneral ? kSteps * Tile::kRows * 4 : 0) + 127) / 128 * 128;
  static constexpr int kSharedBytes = kStages * kStageBytes > Tile::kSumBytes ? kStages* kStageBytes : Tile::kSumBytes;
  static_assert(kSharedBytes <= mma_gemm_a8_tile(kBits, kTokens).shared_bytes,
                "the dispatch table promises less shared memory");
  static_assert(kSteps * Tile::kRows / 4 <= Tile::kThreads, "a thread copies one 16-byte piece of a vector's fp32 rows");
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

// What a thread copies for every tile.
template <class C>
struct Copies {
  WeightCopy<C> weights;
  TokenCopy<C> activations;
  VectorCopy scales, zeros, offsets, activation_scales, activation_zeros;

  __device__ __forceinline__ Copies(Params const& p, int n0, int m0, int k_tile)
      : weights(p.weight.codes, n0, p.n_pad, p.k_tiles, k_tile),
        activations(p.x.codes, int64_t(p.k_tiles) * kKPerTile, m0, p.epilogue.m, k_tile) {
    PackedWeight const& w = p.weight;
    int i = threadIdx.x, last = C::kThreads - 1 - i;  // short vectors of weights and activations are not one warp's to copy
    scales = VectorCopy(i, w.scales, p.weight_rows, p.log_scale_bytes, C::kRows, n0, p.n_pad, C::kScales);
    activation_scales = VectorCopy(last, p.x.scales, p.activation_rows, 2, C::kTokens, m0, p.x.stride, C::kActivationScales);
    if constexpr (C::kForm != Form::kSymmetric) {
      zeros = VectorCopy(i, w.zeros, p.weight_rows, 0, C::kRows, n0, p.n_pad, C::kZeros);
      activation_zeros = VectorCopy(last, p.x.zeros, p.activation_rows, 0, C::kTokens, m0, p.x.stride, C::kActivationZeros);
    }
    if (C::kGeneral) offsets = VectorCopy(i, w.offsets, p.weight_rows, p.log_offset_bytes, C::kRows, n0, p.n_pad, C::kOffsets);
  }

  // All but the weights.
  __device__ __forceinline__ void copy_rest(uint8_t* stage, Params const& p, int k_tile) {
    int row = p.weight_rows.first(k_tile), activation_row = p.activation_rows.first(k_tile);
    activations(stage + C::kActivations);
    scales(stage, row);
    activation_scales(stage, activation_row);
    if constexpr (C::kForm != Form::kSymmetric) {
      zeros(stage, row);
      activation_zeros(stage, activation_row);
    }
    if (C::kGeneral) offsets(stage, row);
  }
};

// The integer sums of a step, and the two correction sums of the asymmetric forms.
template <class C>
struct StepSums {
  uint32_t main[C::kRowBlocks][C::kTokenBlocks][4] = {};                    // kGeneral: restarted at 0 inside a tile
  uint32_t rows[C::kForm == Form::kSymmetric ? 1 : C::kRowBlocks][4] = {};  // of c (4 bit: c - zc); registers 1, 3 repeat 0, 2
  uint32_t tokens[C::kGeneral ? C::kTokenBlocks / 2 : 1][4] =
      {};  // of two token blocks, sum q of tokens g in registers 0 and 2
};

// What a step's rows have in common.
template <class C>
struct StepRows {
  float scales[4], offsets[4];
  int zeros[4];

  // `group`: row of the stage's vectors.
  __device__ __forceinline__ StepRows(uint8_t const* stage, Params const& p, Place<C> const& at, int group) : offsets() {
    int index = group * C::kRows + at.group_index;
    load_float4(stage + C::kScales, p.weight.scale_type, index, scales);
    load_zeros(stage + C::kZeros, (C::kMinusZero || C::kGeneral) && p.weight.zeros, index, zeros);
    if (C::kGeneral && p.weight.offsets) load_float4(stage + C::kOffsets, p.weight.offset_type, index, offsets);
  }
};

// Fold a step's integers into the fp32 sums. `block`: row of the stage's token vectors; `width`: columns summed.
template <class C>
__device__ __forceinline__ void promote(uint8_t const* stage, Params const& p, Place<C> const& at, int block, int width,
                                        StepRows<C> const& rows, StepSums<C> const& step, typename C::Sums& sums) {
  constexpr float kMagic = 12582912.0f;  // the bits kStart
  constexpr float kDecodedScale = C::kBits == 4 && !C::kMinusZero ? 1.0f / decode::Int4Int8::kScale : 1.0f;
#pragma unroll
  for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
    int token = block * C::kTokens + tb * 8 + 2 * at.t;
    float2 scale_pair = *reinterpret_cast<float2 const*>(stage + C::kActivationScales + token * 4);
    float const token_scale[2] = {scale_pair.x, scale_pair.y};
    int za[2] = {0, 0}, q[2] = {0, 0};
    if (C::kForm != Form::kSymmetric && p.x.zeros) {
      char2 z = *reinterpret_cast<char2 const*>(stage + C::kActivationZeros + token);
      za[0] = z.x, za[1] = z.y;
    }
    if constexpr (C::kGeneral) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        q[e] = __shfl_sync(~0u, int(step.tokens[tb / 2][tb % 2 * 2]), 8 * at.t + 4 * e) - width * za[e];
      }
    }
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int row = 2 * rb + e / 2, integer = int(step.main[rb][tb][e]);
        float& sum = sums[rb][tb][e];
        if constexpr (C::kForm != Form::kSymmetric) integer -= za[e % 2] * int(step.rows[rb][e / 2 * 2]);
        if (C::kGeneral && C::kBits == 8) integer -= rows.zeros[row] * q[e % 2];
        float number = C::kGeneral ? float(integer) : __int_as_float(integer) - kMagic;
        sum = fmaf(number, token_scale[e % 2] * (rows.scales[row] * kDecodedScale), sum);
        if (C::kGeneral) sum = fmaf(rows.offsets[row], token_scale[e % 2] * float(q[e % 2]), sum);
      }
  }
}

// One tile of K out of shared memory.
template <class C>
__device__ __forceinline__ void compute(uint8_t const* stage, Params const& p, Place<C> const& at, typename C::Sums& sums) {
  constexpr int kPieces = C::kColumns / 32;
  constexpr int kRecordPieces = 8 / C::kBits;  // of 32 columns in a lane's 16 bytes
  constexpr uint32_t kOnes = 0x01010101u;
  int step_pieces = C::kGeneral ? min(4 / p.weight_rows.count, kPieces) : kPieces;  // a power of two
  bool row_sums = C::kForm != Form::kSymmetric && p.x.zeros;
  bool token_sums = C::kGeneral && (p.weight.offsets || (C::kBits == 8 && p.weight.zeros));
  auto group = [&](int piece) { return C::kGeneral ? (at.warp_k * kPieces + piece) * p.weight_rows.count / 4 : 0; };
  auto block = [&](int piece) { return C::kGeneral && p.activation_rows.count > 1 ? group(piece) : 0; };

  StepRows<C> rows(stage, p, at, group(0));
  StepSums<C> step;
  uint4 records[C::kRowBlocks];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (C::kGeneral && i > 0 && (i & (step_pieces - 1)) == 0) {
      promote<C>(stage, p, at, block(i - 1), step_pieces * 32, rows, step, sums);
      rows = StepRows<C>(stage, p, at, group(i));
      step = {};
    }
    uint32_t a[C::kRowBlocks][4];
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb) {
      uint8_t const* unit = stage + C::kWeights + at.weights + (rb * C::kUnits + i / kRecordPieces) * kUnitBytes;
      if (i % kRecordPieces == 0) records[rb] = *reinterpret_cast<uint4 const*>(unit);
      uint32_t const words[4] = {records[rb].x, records[rb].y, records[rb].z, records[rb].w};
      if constexpr (C::kBits == 8) {
        decode::Int8Int8::fragment(words, a[rb]);
      } else if constexpr (C::kMinusZero) {
        auto zero = decode::Int4MinusZeroInt8::zero_constants(rows.zeros[2 * rb], rows.zeros[2 * rb + 1]);
        decode::Int4MinusZeroInt8::fragment(words + i % 2 * 2, zero, a[rb]);
      } else {
        decode::Int4Int8::fragment(words + i % 2 * 2, a[rb]);
      }
      if (row_sums)
        multiply_add<Operand::kInt8>(step.rows[C::kForm == Form::kSymmetric ? 0 : rb], a[rb], kOnes, kOnes, false, 0u);
    }
#pragma unroll
    for (int pair = 0; pair < C::kTokenBlocks / 2; ++pair) {
      uint32_t b[4];
      load_tokens<C>(stage + C::kActivations, at, pair, i, b);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int rb = 0; rb < C::kRowBlocks; ++rb)
          multiply_add<Operand::kInt8>(step.main[rb][pair * 2 + j], a[rb], b[2 * j], b[2 * j + 1], i == 0, C::kStart);
      if (token_sums) {
        uint32_t const both[4] = {b[0], b[2], b[1], b[3]};
        multiply_add<Operand::kInt8>(step.tokens[C::kGeneral ? pair : 0], both, kOnes, kOnes, false, 0u);
      }
    }
  }
  promote<C>(stage, p, at, block(kPieces - 1), step_pieces * 32, rows, step, sums);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) mma_gemm_a8(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) uint8_t shared[];
  Place<C> at(threadIdx.x);
  TileIndex tile(blockIdx.x, p.row_tiles, p.token_tiles);
  int n0 = tile.n * C::kRows, m0 = tile.m * C::kTokens;
  KRange range(p.k_tiles, blockIdx.y, p.splits);
  Copies<C> copies(p, n0, m0, range.first);

#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i)
    if (i < range.count) copies.weights(shared + i * C::kStageBytes);
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < range.count) copies.copy_rest(shared + i * C::kStageBytes, p, range.first + i);
    commit_copies();
  }

  typename C::Sums sums = {};
  int now = 0, next = (C::kStages - 1) * C::kStageBytes;  // the stages to compute from and to fill
  for (int i = 0; i < range.count; ++i) {
    wait_copies<C::kStages - 2>();
    __syncthreads();
    if (int ahead = i + C::kStages - 1; ahead < range.count) {
      copies.weights(shared + next);
      copies.copy_rest(shared + next, p, range.first + ahead);
    }
    commit_copies();
    compute<C>(shared + now, p, at, sums);
    next = now;
    now = now == (C::kStages - 1) * C::kStageBytes ? 0 : now + C::kStageBytes;
  }
  wait_copies<0>();

  float* gathered = reinterpret_cast<float*>(shared);
  gather_sums<C>(sums, Place<C>(thread_again()), gathered);
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
  if (w.offsets || w.group_size == 32 || w.group_size == 64 || (w.zeros && kBits == 8)) {
    constexpr int kFewTokens = kTokens < 32 ? kTokens : 32;  // the corrections take the registers of the others
    return launch_config<Config<kBits, kFewTokens, Form::kGeneral>>(problem, plan, partials, stream);
  }
  return w.zeros || problem.quantized.zeros
             ? launch_config<Config<kBits, kTokens, Form::kZeroPoints>>(problem, plan, partials, stream)
             : launch_config<Config<kBits, kTokens, Form::kSymmetric>>(problem, plan, partials, stream);
}

template Status launch_mma_gemm_a8<4, 16>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<4, 32>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<4, 64>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<8, 16>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<8, 32>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a8<8, 64>(GemmProblem const&, Plan const&, float*, Stream);

}  // namespace cutlass_ops
