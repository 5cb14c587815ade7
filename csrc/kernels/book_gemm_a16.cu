// A few fp16 or bf16 rows of x times 4-bit weights of a code book: up to 4 rows of x,
// sm_80 and later.
//
//   block    512 output features (a row panel of 64 for each of 8 warps) x all rows of x times a
//            split-K slice that all warps walk along together
//   x        16 tiles of K at a time in shared memory, in the order of operand B's registers
//   weights  from memory to registers, half a tile (64 features x 64 columns) by four 16-byte loads
//            a lane, the next tile's in flight
//   decode   by look-up in a table in shared memory (formats/decode.cuh), to the book's value
//            rounded to x's type
//   multiply mma.sync m16n8k16, fp32 sums of exact products. A look-up gives rows g and g + 8 for
//            one column, an operand wants two columns of one row. So that nothing is exchanged, the
//            pair goes in as it is, and a row of x takes two of the eight columns of operand B,
//            (x, 0) that picks row g, and (0, x) that picks row g + 8
//   promote  sum = fma(step's sum, absmax, sum): the scale never rounds a weight
//
// Every warp has different features, so that sums are added only where K is split
// (splitk_reduce.cu).
#include "device/launch.cuh"
#include "device/tile.cuh"
#include "dispatch/ctas.h"
#include "formats/decode.cuh"

namespace cutlass_ops {
namespace {

constexpr int kRowBlocks = kRowsPerPanel / 16;
constexpr int kHalfColumns = kKPerTile / 2;

// Blocks per SM: before sm_90 one block takes more than half of the shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMinCtasPerSm = 1;
#else
constexpr int kMinCtasPerSm = 2;
#endif

// kSteps: promotions in half a tile; two where groups are of 32 columns.
template <class Element_, int kSteps_>
struct Config {
  using Element = Element_;
  static constexpr Operand kOperand =
      std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr int kBlockM = CodebookA16Cta::kBlockM;
  // From the table on, x.
  static constexpr int kX = decode::Int4Codebook::kTableBytes;
  static constexpr CodebookA16Cta kCta{kX};
  static constexpr int kSteps = kSteps_;
  static constexpr int kWarps = kCta.warps, kThreads = kCta.threads;
  static constexpr int kRows = kRowsPerPanel * kWarps;
  static constexpr int kSumStride = kRows + 4;
  static constexpr int kTilesAtOnce = kCta.tiles_at_once, kXBytes = kCta.x_bytes,
                       kSharedBytes = kCta.shared_bytes;
  static_assert(kSharedBytes <= book_gemm_a16_tile().shared_bytes,
                "its tile promises less shared memory");
  static_assert(kSharedBytes >= kBlockM * kSumStride * int(sizeof(float)),
                "the sums leave through shared memory");
};

struct Params {
  PackedWeight weight;
  uint16_t const* x;
  int64_t x_stride;
  EpilogueParams epilogue;
  float* splitk_workspace;
  VectorRows rows;  // of the scales
  int k_tiles, n_pad, splits;
  bool vector_loads;  // rows of x start on 16 bytes, K is a multiple of 8, and no permutation
};

// Columns of x from `first` on to shared memory: [16 columns][(x, 0) of each row, (0, x) of each
// row][t][2t, 2t+8, 2t+1, 2t+9].
template <class C>
__device__ __forceinline__ void stage_x_rows(uint8_t* to, Params const& p, int first, int columns) {
  constexpr int kAtOnce = 4;  // whose loads are in flight together
  int runs = columns / 16, all = runs * C::kBlockM;
  for (int begin = threadIdx.x; begin < all; begin += kAtOnce * C::kThreads) {
    uint32_t words[kAtOnce][8] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int item = begin + i * C::kThreads, x_row = item / runs, k = first + item % runs * 16;
      if (item >= all || x_row >= p.epilogue.m) continue;
      uint16_t const* row = p.x + x_row * p.x_stride;
      if (p.vector_loads) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (k + 8 * j >= p.weight.k) break;
          uint4 v = __ldg(reinterpret_cast<uint4 const*>(row + k) + j);
          words[i][4 * j] = v.x, words[i][4 * j + 1] = v.y, words[i][4 * j + 2] = v.z,
                       words[i][4 * j + 3] = v.w;
        }
      } else {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (k + j >= p.weight.k) break;
          words[i][j / 2] |= uint32_t(row[p.weight.perm ? p.weight.perm[k + j] : k + j])
                             << j % 2 * 16;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int item = begin + i * C::kThreads, x_row = item / runs, run = item % runs;
      if (item >= all) break;
      uint8_t* destination = to + run * 512 + x_row * 64;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t a = words[i][t], b = words[i][4 + t];
        *reinterpret_cast<uint4*>(destination + t * 16) =
            make_uint4(a & 0xffffu, b & 0xffffu, a >> 16, b >> 16);
        *reinterpret_cast<uint4*>(destination + t * 16 + 256) =
            make_uint4(a << 16, b << 16, a & 0xffff0000u, b & 0xffff0000u);
      }
    }
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
  return make_uint2(
      __ldg(reinterpret_cast<uint32_t const*>(static_cast<uint16_t const*>(w.scales) + index)), 0);
}

__device__ __forceinline__ float2 scale_values(DataType type, uint2 raw) {
  if (type == DataType::kFloat32)
    return make_float2(__uint_as_float(raw.x), __uint_as_float(raw.y));
  if (type == DataType::kFloat16) return __half22float2(reinterpret_cast<__half2 const&>(raw.x));
  return make_float2(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u));
}

using Sums = float[kRowBlocks / 2][4];

// Half a tile. `x`: this lane's first column; `scales`: the index of the scale of this lane's first
// row. next(rb) loads the next codes of a row block as soon as its codes are decoded. Sums:
// [two row blocks][rows of either, columns 2t and 2t + 1 of operand B].
template <class C, class Next>
__device__ __forceinline__ void multiply_half(uint4 (&codes)[kRowBlocks], Next next, uint32_t table,
                                              uint8_t const* x, Params const& p, int64_t scales,
                                              Sums& sums) {
  constexpr int kPieces = kHalfColumns / 16 / C::kSteps;  // of 16 columns, in a step
  int upper = threadIdx.x % 4 / 2;                        // columns 4 .. 7: rows g + 8
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    int64_t const index = scales + (p.rows.count == 4 ? int64_t(step) * p.n_pad : 0);
    uint2 raw[kRowBlocks];
    float products[2][4];
    auto word = [&](int rb, int i) {
      uint4 const& four = codes[rb];
      uint32_t w = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
      asm volatile("" : "+r"(w));  // not looked up before its turn: registers
      return w;
    };
    uint32_t pairs[2][2][4];  // of this turn, and of the next: of two row blocks
#pragma unroll
    for (int j = 0; j < 2; ++j)
      decode::Int4Codebook::look_up<0>(word(j, step * kPieces), table, pairs[0][j]);
    uint4 b = {};
#pragma unroll
    for (int turn = 0; turn < 2 * kPieces; ++turn) {
      int const i = turn / 2, two = turn % 2;
      if (turn == kPieces) {  // in time for the end, and not before registers are free
#pragma unroll
        for (int rb = 0; rb < kRowBlocks; ++rb) raw[rb] = load_scales(p.weight, index + 2 * rb);
      }
      if (two == 0) b = *reinterpret_cast<uint4 const*>(x + (step * kPieces + i) * 512);
      if (turn + 1 < 2 * kPieces) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
          decode::Int4Codebook::look_up<0>(
              word((turn + 1) % 2 * 2 + j, step * kPieces + (turn + 1) / 2), table,
              pairs[(turn + 1) % 2][j]);
      }
      uint32_t (&now)[2][4] = pairs[turn % 2];
      uint32_t const first[4] = {now[0][0], now[1][0], now[0][1], now[1][1]},
                     second[4] = {now[0][2], now[1][2], now[0][3], now[1][3]};
      multiply_add<C::kOperand>(products[two], first, b.x, b.y, i == 0, 0.0f);
      multiply_add<C::kOperand>(products[two], second, b.z, b.w, false, 0.0f);
      if (step == C::kSteps - 1 && turn + 2 >= 2 * kPieces) next(2 * two), next(2 * two + 1);
    }
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb) {
      float2 both = scale_values(p.weight.scale_type, raw[rb]);
      float scale = upper ? both.y : both.x;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& sum = sums[rb / 2][rb % 2 * 2 + e];
        sum = fmaf(products[rb / 2][rb % 2 * 2 + e], scale, sum);
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, kMinCtasPerSm)
    book_gemm_a16(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) uint8_t all_shared[];
  uint32_t const start = uint32_t(__cvta_generic_to_shared(all_shared)),
                 table_bytes = decode::Int4Codebook::kTableBytes;
  // the table
  uint8_t* shared = all_shared + ((start + table_bytes - 1) / table_bytes * table_bytes - start);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int row_panel = blockIdx.x * C::kWarps + warp;
  bool there = row_panel < p.n_pad / kRowsPerPanel;
  KRange range(p.k_tiles, blockIdx.y, p.splits);
  uint4 const* from =
      reinterpret_cast<uint4 const*>(
          p.weight.codes + (int64_t(row_panel) * p.k_tiles + range.first) * k_tile_bytes(4)) +
      lane;
  uint4 ahead[2][kRowBlocks];
  auto load = [&](int half, int rb) {
    ahead[half][rb] = load_codes(from + (rb * 2 + half) * (kUnitBytes / kLaneBytes));
  };
  if (there && range.count > 0) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) load(i / kRowBlocks, i % kRowBlocks);
  }
  decode::Int4Codebook::fill<typename C::Element>(shared, p.weight.codebook, threadIdx.x,
                                                  C::kThreads);
  pdl_wait_and_launch_dependents();

  Sums sums = {};
  int const half_rows = p.rows.count / 2;  // rows of scales in half a tile, 0 where a
                                           // row covers it all
  for (int first = 0; first < range.count; first += C::kTilesAtOnce) {
    int tiles = min(C::kTilesAtOnce, range.count - first);
    __syncthreads();
    stage_x_rows<C>(shared + C::kX, p, (range.first + first) * kKPerTile, tiles * kKPerTile);
    __syncthreads();
    if (!there) continue;
    uint8_t const* x = shared + C::kX + g * 64 + t * 16;
    uint32_t const table = uint32_t(__cvta_generic_to_shared(shared)) + lane * 4;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      from += k_tile_bytes(4) / kLaneBytes;
      bool more = first + tile + 1 < range.count;
      int64_t scales = int64_t(p.rows.first(range.first + first + tile)) * p.n_pad +
                       row_panel * kRowsPerPanel + g * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto next = [&](int rb) {
          if (more) load(half, rb);
        };
        int64_t const row = scales + int64_t(half) * half_rows * p.n_pad;
        multiply_half<C>(ahead[half], next, table, x, p, row, sums);
        x += kHalfColumns / 32 * C::kXBytes;
      }
    }
  }

  float* tiles_per_cluster = reinterpret_cast<float*>(shared);
  __syncthreads();
#pragma unroll
  for (int rb = 0; rb < kRowBlocks / 2; ++rb)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      tiles_per_cluster[(2 * t + e % 2) % 4 * C::kSumStride + warp * kRowsPerPanel +
                        (2 * rb + e / 2) * 16 + g + t / 2 * 8] = sums[rb][e];
  __syncthreads();
  float* splitk_workspace = p.splitk_workspace
                                ? p.splitk_workspace + int64_t(blockIdx.y) * p.epilogue.m * p.n_pad
                                : nullptr;
  store_sums<C>(tiles_per_cluster, 0, blockIdx.x * C::kRows, p.epilogue, splitk_workspace, p.n_pad);
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  PackedWeight const& w = problem.weight;
  bool aligned =
      reinterpret_cast<uintptr_t>(problem.x) % 16 == 0 && problem.x_stride % 8 == 0 && w.k % 8 == 0;
  Params p{w,
           static_cast<uint16_t const*>(problem.x),
           problem.x_stride,
           EpilogueParams(problem),
           splitk_workspace,
           VectorRows(w.group_size),
           int(padded_k(w.k) / kKPerTile),
           int(padded_rows(w.n)),
           plan.slices,
           aligned && !w.perm};
  return launch_plan(book_gemm_a16<C>, plan, C::kThreads, C::kSharedBytes, stream, p);
}

template <class Element>
Status launch_groups(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  return problem.weight.group_size == 32
             ? launch_config<Config<Element, 2>>(problem, plan, splitk_workspace, stream)
             : launch_config<Config<Element, 1>>(problem, plan, splitk_workspace, stream);
}

}  // namespace

Status launch_book_gemm_a16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                            Stream stream) {
  return problem.x_type == DataType::kFloat16
             ? launch_groups<__half>(problem, plan, splitk_workspace, stream)
             : launch_groups<__nv_bfloat16>(problem, plan, splitk_workspace, stream);
}

}  // namespace cutlass_ops
