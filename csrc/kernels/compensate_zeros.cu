// int8 activations that are quantised already -> their zero values (zero_compensation.h): of their
// zero points or, without these, of the sums of their codes. A product waits for it.
#include "device/launch.cuh"
#include "device/quantize.cuh"
#include "device/zero_values.cuh"
#include "dispatch/launchers.h"

namespace cutlass_ops {
namespace {

constexpr int kBlockM = 32, kTiles = 4, kWarps = kTilesPerZeroRow / kTiles;  // of compensate_zeros
constexpr int kSumRows = 8;  // of compensate_zeros_of_weight: a warp each

struct Params {
  QuantizedActivations x;
  int m, tiles, rows;  // rows of x, tiles of K, zero rows
};

// A CTA takes 32 rows of x and one zero row, a warp four of its tiles of K, a lane one row of x, so
// that all that a thread reads is in flight at once.
__global__ void __launch_bounds__(kBlockM* kWarps)
    compensate_zeros(__grid_constant__ Params const p) {
  __shared__ float largest[kWarps][kBlockM];
  int const lane = threadIdx.x % kBlockM, warp = threadIdx.x / kBlockM;
  int const x_row = blockIdx.x * kBlockM + lane, row = blockIdx.y,
            first = row * kTilesPerZeroRow + warp * kTiles;
  pdl_wait_and_launch_dependents();  // in this order: weight_colsum relies on it
  bool const there = x_row < p.m;
  float scales[kTiles] = {}, values[kTiles], most = 0.0f;
  int8_t zeros[kTiles] = {};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    int64_t const from = int64_t(first + i) * p.x.stride + x_row;
    if (there && first + i < p.tiles) scales[i] = p.x.scales[from], zeros[i] = p.x.zeros[from];
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    values[i] = scales[i] * float(zeros[i]);
    most = fmaxf(most, fabsf(values[i]));
  }
  largest[warp][lane] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = fmaxf(most, largest[i][lane]);
  if (!there) return;
  ZeroScale const by(most);
  if (warp == 0) p.x.zero_scales[int64_t(row) * p.x.stride + x_row] = by.scale;
  __half first_parts[kTiles], second_parts[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    ZeroParts const parts(values[i], by);
    first_parts[i] = parts.first, second_parts[i] = parts.second;
  }
  __half* to = zero_value_of(p.x, x_row, p.rows, row, warp * kTiles);
  *reinterpret_cast<uint2*>(to) = reinterpret_cast<uint2 const&>(first_parts);
  *reinterpret_cast<uint2*>(to + 16) = reinterpret_cast<uint2 const&>(second_parts);
}

// A warp takes one row of x and one zero row, and then a lane one of its tiles of K; eight lanes
// load the codes of a tile.
__global__ void __launch_bounds__(32 * kSumRows)
    compensate_zeros_of_weight(__grid_constant__ Params const p) {
  // lanes of a tile; tiles that a warp loads at once
  constexpr int kPieces = kKPerTile / kLaneBytes, kAtOnce = 32 / kPieces;
  int const lane = threadIdx.x % 32, x_row = blockIdx.x * kSumRows + threadIdx.x / 32,
            row = blockIdx.y;
  int const first = row * kTilesPerZeroRow, tile = first + lane;
  pdl_wait_and_launch_dependents();  // in this order: weight_colsum relies on it
  if (x_row >= p.m) return;
  uint4 const* codes = reinterpret_cast<uint4 const*>(p.x.codes) +
                       (int64_t(x_row) * p.tiles + first) * kPieces + lane;
  float const scale = tile < p.tiles ? p.x.scales[int64_t(tile) * p.x.stride + x_row] : 0.0f;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kTilesPerZeroRow / kAtOnce; ++i) {
    int part = first + i * kAtOnce + lane / kPieces < p.tiles ? sum_of_codes(codes[i * 32]) : 0;
#pragma unroll
    for (int distance = 1; distance < kPieces; distance *= 2)
      part += __shfl_xor_sync(~0u, part, distance);
    part = __shfl_sync(~0u, part, lane % kAtOnce * kPieces);
    if (lane / kAtOnce == i) sum = part;
  }
  float const value = scale * float(sum);
  float most = fabsf(value);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  ZeroScale const by(most);
  if (lane == 0) p.x.zero_scales[int64_t(row) * p.x.stride + x_row] = by.scale;
  ZeroParts const parts(value, by);
  __half* to = zero_value_of(p.x, x_row, p.rows, row, lane);
  to[0] = parts.first, to[16] = parts.second;
}

}  // namespace

Status launch_compensate_zeros(GemmProblem const& problem, Stream stream) {
  int const rows = int(zero_rows(problem.weight.k));
  Params const p{problem.quantized, problem.m, int(padded_k(problem.weight.k) / kKPerTile), rows};
  int const x_rows = problem.quantized.zeros ? kBlockM : kSumRows;
  dim3 const grid(unsigned((problem.m + x_rows - 1) / x_rows), unsigned(rows));
  if (problem.quantized.zeros)
    return launch(compensate_zeros, grid, kBlockM * kWarps, 0, stream, p);
  return launch(compensate_zeros_of_weight, grid, 32 * kSumRows, 0, stream, p);
}

}  // namespace cutlass_ops
