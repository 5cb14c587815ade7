// fp16 or bf16 activations x int4 or int8 weights on mma.sync m16n8k16: the portable kernel for W4A16 and W8A16, sm_80 and later.
//
// A block computes 128 output features x kTokens (device/tile.cuh). Weights, activations, scales and zero points of 128 columns of K go
// through a ring of stages in shared memory. Per group, or 128 columns of a longer one:
//
//   load     weights: 8 or 16 bytes a lane for 32 columns (layout.h);  activations: ldmatrix from rows swizzled by token % 8
//   decode   int4 or int8 -> code minus zero point, an integer that fp16 and bf16 hold exactly
//   multiply fp32 sums of exact products
//   promote  sum = fma(group's sum, weight scale, sum): the scale never rounds a weight, and costs one FFMA an output and group
//
// A real offset o adds o * sum x: operand A of ones gives sum x in the very registers that hold the outputs of those tokens.
#include "device/decode.cuh"
#include "device/launch.cuh"
#include "device/tile.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

// kGeneral: groups of 32 and 64, offsets. Without it: groups of at least 128, with or without zero points.
template <class Element_, int kBits_, int kTokens, bool kGeneral_>
struct Config : BlockTile<kTokens> {
  using Tile = BlockTile<kTokens>;
  using Element = Element_;
  using Decode = decode::ToFloat<kBits_, Element>;
  static constexpr Operand kOperand = std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr uint32_t kOnes = std::is_same_v<Element, __half> ? 0x3c003c00u : 0x3f803f80u;
  static constexpr int kBits = kBits_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kStages = mma_gemm_a16_tile(kBits, kTokens).stages;
  static constexpr int kMinBlocks = kGeneral ? 1 : mma_gemm_a16_tile(kBits, kTokens).resident;
  static constexpr int kSteps = kGeneral ? 4 : 1;  // groups in a tile of K, at most

  static constexpr int kWeights = 0;
  static constexpr int kActivations = kWeights + Tile::kSlabs * chunk_bytes(kBits);
  static constexpr int kScales = kActivations + kTokens * kKPerTile * 2;
  static constexpr int kZeros = kScales + kSteps * Tile::kRows * 4;
  static constexpr int kOffsets = kZeros + kSteps * Tile::kRows;
  static constexpr int kStageBytes = kOffsets + (kGeneral ? kSteps * Tile::kRows * 4 : 0);
  static constexpr int kSharedBytes = kStages * kStageBytes > Tile::kSumBytes ? kStages* kStageBytes : Tile::kSumBytes;
  static_assert(kStageBytes % 128 == 0, "ldmatrix rows and their swizzle start on 128 bytes");
  static_assert(kSharedBytes <= mma_gemm_a16_tile(kBits, kTokens).shared_bytes,
                "the dispatch table promises less shared memory");
};

struct Params {
  PackedWeight weight;
  uint16_t const* x;
  int64_t x_stride;
  EpilogueParams epilogue;
  float* partials;
  VectorRows weight_rows;
  int row_tiles, token_tiles, k_tiles, n_pad, splits;
  int log_scale_bytes, log_offset_bytes;
  bool vector_loads;  // rows of x start on 16 bytes, K is a multiple of 8, and no permutation
};

// 256 bytes a token: 16 pieces, the lower three bits of whose index are swizzled.
__device__ __forceinline__ int swizzled(int token, int piece) { return token * kKPerTile * 2 + ((piece ^ (token & 7)) << 4); }

// Each vector is copied by a warp of its own.
template <class C>
__device__ __forceinline__ void load_weights(uint8_t* stage, Params const& p, int n0, int k_tile) {
  PackedWeight const& w = p.weight;
  int warp = threadIdx.x / 32;
  copy_weights<C, C::kBits>(stage + C::kWeights, w.codes, n0, p.n_pad, k_tile, p.k_tiles);
  if (warp == 0)
    copy_vector_rows(stage + C::kScales, w.scales, p.weight_rows, k_tile, p.log_scale_bytes, C::kRows, n0, p.n_pad, p.n_pad);
  if (warp == 1 && w.zeros)
    copy_vector_rows(stage + C::kZeros, w.zeros, p.weight_rows, k_tile, 0, C::kRows, n0, p.n_pad, p.n_pad);
  if constexpr (C::kGeneral) {
    if (warp == 2 && w.offsets) {
      copy_vector_rows(stage + C::kOffsets, w.offsets, p.weight_rows, k_tile, p.log_offset_bytes, C::kRows, n0, p.n_pad,
                       p.n_pad);
    }
  }
}

// Tokens beyond the last repeat it; they are never stored. Columns beyond K are zeros.
template <class C>
__device__ __forceinline__ void load_activations(uint8_t* stage, Params const& p, int m0, int k_tile) {
  static_assert(C::kTokens * kKPerTile / 8 % C::kThreads == 0);
  int piece = threadIdx.x % 16, k = k_tile * kKPerTile + piece * 8;
  bool inside = k < p.weight.k;
#pragma unroll
  for (int j = 0; j < C::kTokens * 16 / C::kThreads; ++j) {
    int token = threadIdx.x / 16 + j * (C::kThreads / 16);
    uint16_t const* row = p.x + min(m0 + token, p.epilogue.m - 1) * p.x_stride;
    void* to = stage + C::kActivations + swizzled(token, piece);
    if (p.vector_loads) {
      copy_async_16_or_zero(to, row + (inside ? k : 0), inside);
    } else {
      uint32_t values[4] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (k + i >= p.weight.k) break;
        int column = p.weight.perm ? p.weight.perm[k + i] : k + i;
        values[i / 2] |= uint32_t(row[column]) << 16 * (i % 2);
      }
      *static_cast<uint4*>(to) = make_uint4(values[0], values[1], values[2], values[3]);
    }
  }
}

template <class C>
struct GroupSums {
  float main[C::kRowBlocks][C::kTokenBlocks][4] = {};
  float tokens[C::kGeneral ? C::kTokenBlocks : 1][4] = {};  // sum of x; registers 2, 3 repeat 0, 1
};

// 16 columns: `piece` of the tile's eight.
template <class C>
__device__ __forceinline__ void multiply(uint8_t const* stage, Params const& p, Place<C> const& at, int piece,
                                         uint32_t const (&a)[C::kRowBlocks][4], GroupSums<C>& sums) {
#pragma unroll
  for (int tb = 0; tb < C::kTokenBlocks; tb += 2) {
    uint32_t b[4];
    int token = at.first_token + tb * 8 + at.lane / 16 * 8 + at.lane % 8;
    load_tiles(stage + C::kActivations + swizzled(token, piece * 2 + at.lane / 8 % 2), b);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int rb = 0; rb < C::kRowBlocks; ++rb)
        multiply_add<C::kOperand>(sums.main[rb][tb + j], a[rb], b[2 * j], b[2 * j + 1]);
      if (C::kGeneral && p.weight.offsets) {
        uint32_t const ones[4] = {C::kOnes, C::kOnes, C::kOnes, C::kOnes};
        multiply_add<C::kOperand>(sums.tokens[C::kGeneral ? tb + j : 0], ones, b[2 * j], b[2 * j + 1]);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void promote(uint8_t const* stage, Params const& p, Place<C> const& at, int group,
                                        GroupSums<C>& step, typename C::Sums& sums) {
  float scale[4], offset[4] = {};
  int index = group * C::kRows + at.group_index;
  load_float4(stage + C::kScales, p.weight.scale_type, index, scale);
  bool offsets = C::kGeneral && p.weight.offsets;
  if (offsets) load_float4(stage + C::kOffsets, p.weight.offset_type, index, offset);
#pragma unroll
  for (int rb = 0; rb < C::kRowBlocks; ++rb)
#pragma unroll
    for (int tb = 0; tb < C::kTokenBlocks; ++tb)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums[rb][tb][e];
        sum = fmaf(step.main[rb][tb][e], scale[2 * rb + e / 2], sum);
        if (offsets) sum = fmaf(offset[2 * rb + e / 2], step.tokens[C::kGeneral ? tb : 0][e % 2], sum);
      }
  step = {};
}

// The zero points of a lane's rows as the decoder takes them; `group` is a row of the stage's vectors.
template <class C>
__device__ __forceinline__ void load_zeros(uint8_t const* stage, Params const& p, Place<C> const& at, int group,
                                           decode::RowConstants (&zero)[C::kRowBlocks]) {
  uint32_t zeros = 0;
  if (p.weight.zeros) zeros = *reinterpret_cast<uint32_t const*>(stage + C::kZeros + group * C::kRows + at.group_index);
#pragma unroll
  for (int rb = 0; rb < C::kRowBlocks; ++rb)
    zero[rb] = C::Decode::zero_constants(int8_t(zeros >> 16 * rb), int8_t(zeros >> (16 * rb + 8)));
}

// One tile of K out of shared memory.
template <class C>
__device__ __forceinline__ void compute(uint8_t const* stage, Params const& p, Place<C> const& at, typename C::Sums& sums) {
  using Decode = typename C::Decode;
  constexpr int kHalves = C::kColumns / 32;  // the warp's columns, 32 at a time: 8 bytes of a lane's record at 4 bits, 16 at 8
  uint8_t const* weights = stage + C::kWeights + at.slab * chunk_bytes(C::kBits) + at.lane * kLaneBytes;
  int columns = C::kGeneral ? kKPerTile / p.weight_rows.count : kKPerTile;
  decode::RowConstants zero[C::kRowBlocks];
  GroupSums<C> step;

  auto multiply_32 = [&](int half) {
    uint32_t words[C::kRowBlocks][C::kBits / 2];
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb) {
      int block = at.first_block + rb;
      if constexpr (C::kBits == 4) {
        uint2 v = *reinterpret_cast<uint2 const*>(weights + (block * 2 + half / 2) * kUnitBytes + half % 2 * 8);
        words[rb][0] = v.x, words[rb][1] = v.y;
      } else {
        uint4 v = *reinterpret_cast<uint4 const*>(weights + (block * 4 + half) * kUnitBytes);
        words[rb][0] = v.x, words[rb][1] = v.y, words[rb][2] = v.z, words[rb][3] = v.w;
      }
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      uint32_t a[C::kRowBlocks][4];
#pragma unroll
      for (int rb = 0; rb < C::kRowBlocks; ++rb) Decode::fragment(words[rb] + piece * Decode::kWords, zero[rb], a[rb]);
      multiply<C>(stage, p, at, half * 2 + piece, a, step);
    }
  };

  int first = at.warp_k * kHalves;
  if constexpr (!C::kGeneral) {
    load_zeros<C>(stage, p, at, 0, zero);
#pragma unroll
    for (int i = 0; i < kHalves; ++i) multiply_32(first + i);
    promote<C>(stage, p, at, 0, step, sums);
  } else {
    int halves = min(columns, C::kColumns) / 32;  // until a group, or the warp's part of it, ends
#pragma unroll 1
    for (int begin = first; begin < first + kHalves; begin += halves) {
      int group = begin * 32 / columns;
      load_zeros<C>(stage, p, at, group, zero);
#pragma unroll 1
      for (int i = 0; i < halves; ++i) multiply_32(begin + i);
      promote<C>(stage, p, at, group, step, sums);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) mma_gemm_a16(__grid_constant__ Params const p) {
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
  bool aligned = reinterpret_cast<uintptr_t>(problem.x) % 16 == 0 && problem.x_stride % 8 == 0 && w.k % 8 == 0;
  Params p{w,
           static_cast<uint16_t const*>(problem.x),
           problem.x_stride,
           EpilogueParams(problem),
           partials,
           VectorRows(w.group_size),
           (w.n + C::kRows - 1) / C::kRows,
           (problem.m + C::kTokens - 1) / C::kTokens,
           int(padded_k(w.k) / kKPerTile),
           int(padded_rows(w.n)),
           plan.splits,
           log2_size_of(w.scale_type),
           log2_size_of(w.offset_type),
           aligned && !w.perm};
  dim3 grid(unsigned(p.row_tiles) * unsigned(p.token_tiles), unsigned(plan.splits));
  return launch(mma_gemm_a16<C>, grid, C::kThreads, C::kSharedBytes, stream, p);
}

}  // namespace

template <int kBits, int kTokens>
Status launch_mma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  PackedWeight const& w = problem.weight;
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
template Status launch_mma_gemm_a16<4, 128>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a16<8, 16>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a16<8, 32>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_mma_gemm_a16<8, 64>(GemmProblem const&, Plan const&, float*, Stream);

}  // namespace cutlass_ops
