// A few fp16 or bf16 tokens x 4-bit weights of a code book: up to 16 tokens, sm_80 and later.
//
//   block    512 output features (a slab of 64 for each of 8 warps) x all tokens x a part of K that all warps walk along together
//   x        16 tiles of K at a time in shared memory, in the order of operand B's registers
//   weights  from memory to registers, half a tile (64 features x 64 columns) by four 16-byte loads a lane, the next tile's on their way
//   decode   by look-up in a table in shared memory (device/decode.cuh), to the book's value rounded to x's type
//   multiply mma.sync m16n8k16, fp32 sums of exact products
//   promote  sum = fma(step's sum, absmax, sum): the scale never rounds a weight
//
// Every warp has features of its own, so that sums meet only where K is split (reduce_splits.cu).
#include "device/decode.cuh"
#include "device/launch.cuh"
#include "device/tile.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kRowBlocks = kRowsPerSlab / 16;
constexpr int kHalfColumns = kKPerTile / 2;

// kSteps: promotions in half a tile; two where groups are of 32 columns, and where one would hold too many registers.
template <class Element_, int kTokens_, int kSteps_>
struct Config {
  using Element = Element_;
  static constexpr Operand kOperand = std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr int kTokens = kTokens_;
  static constexpr int kTokenBlocks = kTokens / 8;
  static constexpr int kSteps = kSteps_;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kRowsPerSlab * kWarps;
  static constexpr int kSumStride = kRows + 4;
  static constexpr int kTilesAtOnce = 16;  // of x in shared memory

  static constexpr int kTable = 0;
  static constexpr int kX = kTable + decode::Int4Book::kTableBytes;
  static constexpr int kSharedBytes = kX + kTilesAtOnce * kKPerTile * kTokens * 2;
  static_assert(kSharedBytes <= book_gemm_a16_tile(kTokens).shared_bytes, "the dispatch table promises less shared memory");
  static_assert(kSharedBytes >= kTokens * kSumStride * int(sizeof(float)), "the sums leave through shared memory");
};

struct Params {
  PackedWeight weight;
  uint16_t const* x;
  int64_t x_stride;
  EpilogueParams epilogue;
  float* partials;
  VectorRows rows;  // of the scales
  int k_tiles, n_pad, splits;
  bool vector_loads;  // rows of x start on 16 bytes, K is a multiple of 8, and no permutation
};

// Columns of x from `first` on to shared memory: [pair of 16 columns][token][t][2t, 2t+1, 2t+8, 2t+9 of either 16].
template <class C>
__device__ __forceinline__ void stage_tokens(uint8_t* to, Params const& p, int first, int columns) {
  int runs = columns / 16;
  for (int i = threadIdx.x; i < runs * C::kTokens; i += C::kThreads) {
    int token = i / runs, run = i % runs, k = first + run * 16;
    uint32_t words[8] = {};
    if (token < p.epilogue.m) {
      uint16_t const* row = p.x + token * p.x_stride;
      if (p.vector_loads) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (k + 8 * j >= p.weight.k) break;
          uint4 v = __ldg(reinterpret_cast<uint4 const*>(row + k) + j);
          words[4 * j] = v.x, words[4 * j + 1] = v.y, words[4 * j + 2] = v.z, words[4 * j + 3] = v.w;
        }
      } else {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (k + j >= p.weight.k) break;
          words[j / 2] |= uint32_t(row[p.weight.perm ? p.weight.perm[k + j] : k + j]) << j % 2 * 16;
        }
      }
    }
    uint8_t* at = to + (run / 2 * C::kTokens + token) * 64 + run % 2 * 8;
#pragma unroll
    for (int t = 0; t < 4; ++t) *reinterpret_cast<uint2*>(at + t * 16) = make_uint2(words[t], words[4 + t]);
  }
}

__device__ __forceinline__ uint4 load_codes(uint4 const* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// The scales of two neighbouring rows of a group vector as they are stored.
__device__ __forceinline__ uint2 load_scales(PackedWeight const& w, int64_t index) {
  if (w.scale_type == DataType::kFloat32)
    return __ldg(reinterpret_cast<uint2 const*>(static_cast<float const*>(w.scales) + index));
  return make_uint2(__ldg(reinterpret_cast<uint32_t const*>(static_cast<uint16_t const*>(w.scales) + index)), 0);
}

__device__ __forceinline__ float2 scale_values(DataType type, uint2 raw) {
  if (type == DataType::kFloat32) return make_float2(__uint_as_float(raw.x), __uint_as_float(raw.y));
  if (type == DataType::kFloat16) return __half22float2(reinterpret_cast<__half2 const&>(raw.x));
  return make_float2(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u));
}

template <class C>
using Sums = float[C::kTokenBlocks][kRowBlocks][4];

// Half a tile: `x` is where its columns begin for this lane, `scales` the index of its first row's for this lane. next(rb) asks for the codes of
// a row block anew, as soon as they are decoded.
template <class C, class Next>
__device__ __forceinline__ void multiply_half(uint4 (&codes)[kRowBlocks], Next next, uint8_t const* table, uint8_t const* x,
                                              Params const& p, int64_t scales, Sums<C>& sums) {
  int lane = threadIdx.x % 32;
  constexpr int kPieces = kHalfColumns / 16 / C::kSteps;  // of 16 columns, in a step
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    int64_t const step_scales = scales + (p.rows.count == 4 ? int64_t(step) * p.n_pad : 0);
    uint2 ahead = load_scales(p.weight, step_scales);
    uint4 b[C::kTokenBlocks][kPieces / 2];
#pragma unroll
    for (int tb = 0; tb < C::kTokenBlocks; ++tb)
#pragma unroll
      for (int i = 0; i < kPieces / 2; ++i)
        b[tb][i] = *reinterpret_cast<uint4 const*>(x + ((step * kPieces / 2 + i) * C::kTokens + tb * 8) * 64);
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb) {
      uint2 raw = ahead;
      if (rb + 1 < kRowBlocks) ahead = load_scales(p.weight, step_scales + 2 * (rb + 1));
      float products[C::kTokenBlocks][4];
      uint32_t words[4] = {codes[rb].x, codes[rb].y, codes[rb].z, codes[rb].w};
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        asm volatile("" : "+r"(words[step * kPieces + i]));  // not decoded before its turn: registers
        uint32_t a[4];
        decode::Int4Book::fragment(words + step * kPieces + i, table, lane, a);
#pragma unroll
        for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
          uint4 const& two = b[tb][i / 2];
          multiply_add<C::kOperand>(products[tb], a, i % 2 ? two.z : two.x, i % 2 ? two.w : two.y, i == 0, 0.0f);
        }
      }
      if (step == C::kSteps - 1) next(rb);
      float2 scale = scale_values(p.weight.scale_type, raw);
#pragma unroll
      for (int tb = 0; tb < C::kTokenBlocks; ++tb)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[tb][rb][e] = fmaf(products[tb][e], e < 2 ? scale.x : scale.y, sums[tb][rb][e]);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 2) book_gemm_a16(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) uint8_t shared[];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int slab = blockIdx.x * C::kWarps + warp;
  bool there = slab < p.n_pad / kRowsPerSlab;
  KRange range(p.k_tiles, blockIdx.y, p.splits);
  uint4 const* from =
      reinterpret_cast<uint4 const*>(p.weight.codes + (int64_t(slab) * p.k_tiles + range.first) * chunk_bytes(4)) + lane;
  uint4 ahead[2][kRowBlocks];
  auto load = [&](int half, int rb) { ahead[half][rb] = load_codes(from + (rb * 2 + half) * (kUnitBytes / kLaneBytes)); };
  if (there && range.count > 0) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) load(i / kRowBlocks, i % kRowBlocks);
  }
  decode::Int4Book::fill<typename C::Element>(shared + C::kTable, p.weight.book, threadIdx.x, C::kThreads);
  wait_for_predecessor();

  Sums<C> sums = {};
  int const half_rows = p.rows.count / 2;  // rows of scales in half a tile, 0 where a row covers it all
  for (int first = 0; first < range.count; first += C::kTilesAtOnce) {
    int tiles = min(C::kTilesAtOnce, range.count - first);
    __syncthreads();
    stage_tokens<C>(shared + C::kX, p, (range.first + first) * kKPerTile, tiles * kKPerTile);
    __syncthreads();
    if (!there) continue;
    uint8_t const* x = shared + C::kX + g * 64 + t * 16;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      from += chunk_bytes(4) / kLaneBytes;
      bool more = first + tile + 1 < range.count;
      int64_t scales = int64_t(p.rows.first(range.first + first + tile)) * p.n_pad + slab * kRowsPerSlab + g * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto next = [&](int rb) {
          if (more) load(half, rb);
        };
        multiply_half<C>(ahead[half], next, shared + C::kTable, x, p, scales + int64_t(half) * half_rows * p.n_pad, sums);
        x += kHalfColumns / 32 * C::kTokens * 64;
      }
    }
  }

  float* gathered = reinterpret_cast<float*>(shared);
  __syncthreads();
#pragma unroll
  for (int tb = 0; tb < C::kTokenBlocks; ++tb)
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        gathered[(tb * 8 + 2 * t + e % 2) * C::kSumStride + warp * kRowsPerSlab + rb * 16 + g + 8 * (e / 2)] = sums[tb][rb][e];
  __syncthreads();
  float* partials = p.partials ? p.partials + int64_t(blockIdx.y) * p.epilogue.m * p.n_pad : nullptr;
  store_sums<C>(gathered, 0, blockIdx.x * C::kRows, p.epilogue, partials, p.n_pad);
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
           int(padded_k(w.k) / kKPerTile),
           int(padded_rows(w.n)),
           plan.splits,
           aligned && !w.perm};
  dim3 grid(unsigned((w.n + C::kRows - 1) / C::kRows), unsigned(plan.splits));
  return launch(book_gemm_a16<C>, grid, C::kThreads, C::kSharedBytes, stream, p);
}

template <class Element, int kTokens>
Status launch_element(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  if constexpr (kTokens == 8) {
    if (problem.weight.group_size != 32) return launch_config<Config<Element, 8, 1>>(problem, plan, partials, stream);
  }
  return launch_config<Config<Element, kTokens, 2>>(problem, plan, partials, stream);
}

}  // namespace

template <int kTokens>
Status launch_book_gemm_a16(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  return problem.x_type == DataType::kFloat16 ? launch_element<__half, kTokens>(problem, plan, partials, stream)
                                              : launch_element<__nv_bfloat16, kTokens>(problem, plan, partials, stream);
}

template Status launch_book_gemm_a16<8>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_book_gemm_a16<16>(GemmProblem const&, Plan const&, float*, Stream);

}  // namespace cutlass_ops
