// fp16 or bf16 activations x int4 or int8 weights on mma.sync m16n8k16: the portable kernel for W4A16 and W8A16, sm_80 and later.
//
// A block computes 128 output features x kTokens. Weights, activations, scales and zero points of 128 columns of K go through a ring of
// stages in shared memory (cp.async). Per step of 128 columns, or 32 where groups are shorter:
//
//   load     weights: one 16-byte load a lane and unit (layout.h);  activations: ldmatrix from rows swizzled by token % 8
//   decode   int4 or int8 -> code minus zero point, an integer that fp16 and bf16 hold exactly; or a code book's value, looked up
//   multiply fp32 sums of exact products
//   promote  sum = fma(step's sum, weight scale, sum): the scale never rounds a weight, and costs one FFMA an output and step
//
// A real offset o adds o * sum x, which comes from the tensor cores too, by an operand B of ones to the tokens as operand A: the registers
// of two operands B, in another order, are one.
#include "device/decode.cuh"
#include "device/launch.cuh"
#include "device/tile.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

// kGeneral: steps of 32 columns, offsets. Without it: steps of 128 columns, with or without zero points. kBook: values from a code book.
template <class Element_, int kBits_, int kTokens, bool kGeneral_, bool kBook_ = false>
struct Config : BlockTile<kTokens> {
  using Tile = BlockTile<kTokens>;
  using Element = Element_;
  static constexpr bool kBook = kBook_;
  using Decode = std::conditional_t<kBook, decode::Int4Book, decode::ToFloat<kBits_, Element>>;
  static constexpr Operand kOperand = std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr int kBits = kBits_;
  static constexpr int kUnits = kBits / 2;  // of a row block and tile of K (layout.h)
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kPieces = kKPerTile / 16;
  static constexpr int kStepPieces = kGeneral ? 2 : kPieces;  // of 16 columns
  static constexpr int kStages = kBook && kTokens == 64 ? 2 : mma_gemm_a16_tile(kBits, kTokens).stages;
  // The next tile is wanted soon, or the multiplication takes all registers.
  static constexpr bool kCopiesFirst = kStages == 2 || (kGeneral && kTokens == 32);
  static constexpr int kMinBlocks = kGeneral && kTokens == 16 ? 2 : mma_gemm_a16_tile(kBits, kTokens).resident;
  static constexpr int kRowBytes = kKPerTile * 2;   // of a token
  static constexpr int kGroups = kGeneral ? 4 : 1;  // in a tile of K, at most

  static constexpr int kWeights = 0;
  static constexpr int kActivations = kWeights + Tile::kSlabs * chunk_bytes(kBits);
  static constexpr int kScales = kActivations + kTokens * kRowBytes;
  static constexpr int kZeros = kScales + kGroups * Tile::kRows * 4;
  static constexpr int kOffsets = kZeros + (kBook ? 0 : kGroups * Tile::kRows);
  static constexpr int kStageBytes = kOffsets + (kGeneral && !kBook ? kGroups * Tile::kRows * 4 : 0);
  static constexpr int kTable = kStages * kStageBytes > Tile::kSumBytes ? kStages* kStageBytes : Tile::kSumBytes;
  static constexpr int kSharedBytes = kTable + (kBook ? decode::Int4Book::kTableBytes : 0);
  static_assert(kStageBytes % 128 == 0, "ldmatrix rows and their swizzle start on 128 bytes");
  static_assert(kSharedBytes <= mma_gemm_a16_tile(kBits, kTokens).shared_bytes,
                "the dispatch table promises less shared memory");
  static_assert(kGroups * Tile::kRows / 4 <= Tile::kThreads, "a thread copies one 16-byte piece of a vector's fp32 rows");
};

struct Params : TileParams {
  uint16_t const* x;
  int64_t x_stride;
  bool vector_loads;  // rows of x start on 16 bytes, K is a multiple of 8, and no permutation
};

// What a thread copies for every tile.
template <class C>
struct Copies {
  static constexpr int kVectors = C::kGeneral && !C::kBook ? 3 : 1;
  static constexpr int kAll = WeightCopy<C>::kPieces + TokenCopy<C>::kPieces + kVectors;
  Params const& p;
  WeightCopy<C> weights;
  TokenCopy<C> activations;
  VectorCopy vectors[kVectors];
  int m0;

  __device__ __forceinline__ Copies(Params const& p_, int n0, int m0_, int k_tile)
      : p(p_),
        weights(p.weight.codes, n0, p.n_pad, p.k_tiles, k_tile),
        activations(p.x, p.x_stride * 2, m0_, p.epilogue.m, k_tile),
        m0(m0_) {
    PackedWeight const& w = p.weight;
    int i = threadIdx.x;
    vectors[0] = VectorCopy(i, w.scales, p.weight_rows, p.log_scale_bytes, C::kRows, n0, p.n_pad, C::kScales);
    if constexpr (kVectors == 3) {
      vectors[1] = VectorCopy(i, w.zeros, p.weight_rows, 0, C::kRows, n0, p.n_pad, C::kZeros);
      vectors[2] = VectorCopy(i, w.offsets, p.weight_rows, p.log_offset_bytes, C::kRows, n0, p.n_pad, C::kOffsets);
    } else if constexpr (!C::kBook) {
      vectors[0].take(VectorCopy(i - C::kRows / 4, w.zeros, p.weight_rows, 0, C::kRows, n0, p.n_pad, C::kZeros));
    }
  }

  // Columns beyond K are zeros.
  __device__ __forceinline__ void operator()(uint8_t* stage, int k_tile, int i, bool wanted) const {
    if (i < weights.kPieces) {
      weights(stage + C::kWeights, i, wanted);
    } else if (i -= weights.kPieces; i < activations.kPieces) {
      int k = k_tile * kKPerTile + int(threadIdx.x) % 16 * 8;
      activations(stage + C::kActivations, i, wanted && p.vector_loads, k < p.weight.k);
    } else {
      vectors[i - activations.kPieces](stage, p.weight_rows.first(k_tile), wanted);
    }
  }

  // Rows of x that cannot be copied 16 bytes at a time.
  __device__ __forceinline__ void gather(uint8_t* stage, int k_tile) const {
    if (p.vector_loads) return;
    int k = k_tile * kKPerTile + threadIdx.x % 16 * 8;
    uint8_t* to = stage + C::kActivations + activations.to;
#pragma unroll 1
    for (int token = m0 + threadIdx.x / 16, j = 0; j < C::kTokens; j += C::kThreads / 16) {
      if (token + j >= p.epilogue.m) break;
      uint16_t const* values = p.x + (token + j) * p.x_stride;
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        bool inside = k + i < p.weight.k;
        int column = inside && p.weight.perm ? p.weight.perm[k + i] : k + i;
        *reinterpret_cast<uint16_t*>(to + j * C::kRowBytes + 2 * i) = inside ? values[column] : uint16_t(0);
      }
    }
  }
};

// What a step's rows have in common.
template <class C>
struct StepRows {
  float scales[4], offsets[4];
  decode::RowConstants zeros[C::kRowBlocks];

  // `group`: row of the stage's vectors.
  __device__ __forceinline__ StepRows(uint8_t const* stage, Params const& p, Place<C> const& at, int group) : offsets() {
    int index = group * C::kRows + at.group_index, codes[4];
    if constexpr (!C::kBook) {
      load_zeros(stage + C::kZeros, p.weight.zeros, index, codes);
#pragma unroll
      for (int rb = 0; rb < C::kRowBlocks; ++rb) zeros[rb] = C::Decode::zero_constants(codes[2 * rb], codes[2 * rb + 1]);
    }
    load_float4(stage + C::kScales, p.weight.scale_type, index, scales);
    if (C::kGeneral && p.weight.offsets) load_float4(stage + C::kOffsets, p.weight.offset_type, index, offsets);
  }
};

// The sums of a step over two token blocks.
template <class C>
struct PairSums {
  float main[2][C::kRowBlocks][4];
  float tokens[4];  // sum x of tokens g in registers 0 and 2
};

// Fold them into the total.
template <class C, bool kOffsets>
__device__ __forceinline__ void promote(Place<C> const& at, int pair, StepRows<C> const& rows, PairSums<C> const& step,
                                        typename C::Sums& sums) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float x[2] = {};
    if constexpr (kOffsets) {
#pragma unroll
      for (int e = 0; e < 2; ++e) x[e] = __shfl_sync(~0u, step.tokens[2 * j], 8 * at.t + 4 * e);
    }
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums[rb][pair * 2 + j][e];
        sum = fmaf(step.main[j][rb][e], rows.scales[2 * rb + e / 2], sum);
        if (kOffsets) sum = fmaf(rows.offsets[2 * rb + e / 2], x[e % 2], sum);
      }
  }
}

// One step: its pieces of 16 columns begin with `first` of the tile's.
template <class C, bool kOffsets, class Beside>
__device__ __forceinline__ void add_step(uint8_t const* stage, uint8_t const* table, Params const& p, Place<C> const& at,
                                         int first, typename C::Sums& sums, Beside beside) {
  using Decode = typename C::Decode;
  constexpr int kPieces = C::kStepPieces, kPairs = C::kTokenBlocks / 2;
  // Long steps multiply all tokens by a piece and then the next. In short ones promotion weighs more: 16 tokens are multiplied by all
  // pieces while the 16 before are promoted.
  constexpr int kBatch = C::kGeneral ? 1 : kPairs, kSets = kBatch < kPairs ? 2 * kBatch : kPairs;
  constexpr int kRecordPieces = 4 / Decode::kWords;  // in a lane's 16 bytes
  StepRows<C> rows(stage, p, at, C::kGeneral ? first * p.weight_rows.count / C::kPieces : 0);

  PairSums<C> step[kSets];
  uint32_t a[kPieces][C::kRowBlocks][4];
  uint4 records[C::kRowBlocks];
  auto load_weights = [&](int i) {
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb) {
      int piece = first + i;
      uint8_t const* unit = stage + C::kWeights + at.weights + (rb * C::kUnits + piece / kRecordPieces) * kUnitBytes;
      if (i % kRecordPieces == 0) records[rb] = *reinterpret_cast<uint4 const*>(unit);
      uint32_t const words[4] = {records[rb].x, records[rb].y, records[rb].z, records[rb].w};
      if constexpr (C::kBook) {
        Decode::fragment(words + piece % kRecordPieces * Decode::kWords, table, threadIdx.x % 32, a[i][rb]);
      } else {
        Decode::fragment(words + piece % kRecordPieces * Decode::kWords, rows.zeros[rb], a[i][rb]);
      }
    }
  };
  auto promote_batch = [&](int begin) {
#pragma unroll
    for (int pair = begin; pair < begin + kBatch; ++pair) promote<C, kOffsets>(at, pair, rows, step[pair % kSets], sums);
  };

#pragma unroll
  for (int begin = 0; begin < kPairs; begin += kBatch) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (begin == 0) load_weights(i);
#pragma unroll
      for (int pair = begin; pair < begin + kBatch; ++pair) {
        PairSums<C>& d = step[pair % kSets];
        uint32_t b[4];
        load_tokens<C>(stage + C::kActivations, at, pair, first + i, b);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int rb = 0; rb < C::kRowBlocks; ++rb)
            multiply_add<C::kOperand>(d.main[j][rb], a[i][rb], b[2 * j], b[2 * j + 1], i == 0, 0.0f);
        if constexpr (kOffsets) {
          constexpr uint32_t kOnes = C::kOperand == Operand::kHalf ? 0x3c003c00u : 0x3f803f80u;
          uint32_t const both[4] = {b[0], b[2], b[1], b[3]};
          multiply_add<C::kOperand>(d.tokens, both, kOnes, kOnes, i == 0, 0.0f);
        }
      }
      if (begin == 0) beside(first + i);
    }
    if (begin > 0) promote_batch(begin - kBatch);
  }
  promote_batch(kPairs - kBatch);
}

// One tile of K out of shared memory.
template <class C, class Beside>
__device__ __forceinline__ void compute(uint8_t const* stage, uint8_t const* table, Params const& p, Place<C> const& at,
                                        typename C::Sums& sums, Beside beside) {
#pragma unroll
  for (int first = 0; first < C::kPieces; first += C::kStepPieces) {
    if (C::kGeneral && !C::kBook && p.weight.offsets) {
      add_step<C, C::kGeneral>(stage, table, p, at, first, sums, beside);
    } else {
      add_step<C, false>(stage, table, p, at, first, sums, beside);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) mma_gemm_a16(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto prepare = [&] {
    if constexpr (C::kBook)
      decode::Int4Book::fill<typename C::Element>(shared + C::kTable, p.weight.book, threadIdx.x, C::kThreads);
  };
  multiply_tile<C, Copies<C>>(p, shared, prepare,
                              [&](uint8_t const* stage, Place<C> const& at, typename C::Sums& sums, auto beside) {
                                compute<C>(stage, shared + C::kTable, p, at, sums, beside);
                              });
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  PackedWeight const& w = problem.weight;
  bool aligned = reinterpret_cast<uintptr_t>(problem.x) % 16 == 0 && problem.x_stride % 8 == 0 && w.k % 8 == 0 &&
                 problem.x_stride * 2 <= TokenCopy<C>::kLargestStride;
  Params p{TileParams(problem, plan, partials, C::kRows, C::kTokens), static_cast<uint16_t const*>(problem.x), problem.x_stride,
           aligned && !w.perm};
  return launch(mma_gemm_a16<C>, p.grid(), C::kThreads, C::kSharedBytes, stream, p);
}

}  // namespace

template <int kBits, int kTokens>
Status launch_mma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  PackedWeight const& w = problem.weight;
  if constexpr (kBits == 4) {
    if (w.book) {
      return problem.x_type == DataType::kFloat16
                 ? launch_config<Config<__half, 4, kTokens, true, true>>(problem, plan, partials, stream)
                 : launch_config<Config<__nv_bfloat16, 4, kTokens, true, true>>(problem, plan, partials, stream);
    }
  }
  bool general = w.offsets || w.group_size == 32 || w.group_size == 64;
  if (problem.x_type == DataType::kFloat16) {
    return general ? launch_config<Config<__half, kBits, kTokens, true>>(problem, plan, partials, stream)
                   : launch_config<Config<__half, kBits, kTokens, false>>(problem, plan, partials, stream);
  }
  return general ? launch_config<Config<__nv_bfloat16, kBits, kTokens, true>>(problem, plan, partials, stream)
                 : launch_config<Config<__nv_bfloat16, kBits, kTokens, false>>(problem, plan, partials, stream);
}

template Status launch_mma_gemm_a16<4, 16>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a16<4, 32>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a16<4, 64>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a16<8, 16>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a16<8, 32>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a16<8, 64>(GemmProblem const&, Plan const&, float*, Stream);

}  // namespace cutlass_ops
