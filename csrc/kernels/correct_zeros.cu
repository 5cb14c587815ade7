// The zero points and scales of int8 activations that are quantised already -> their zero values (corrections.h). A product waits for it: a block takes 32 tokens
// and one zero row, a warp four of its tiles of K, a lane a token, so that all that a thread reads is under way at once.
#include "device/launch.cuh"
#include "device/zero_values.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kTokens = 32, kTiles = 4, kWarps = kTilesPerZeroRow / kTiles;

struct Params {
  QuantizedActivations x;
  int m, tiles, rows;  // tokens, tiles of K, zero rows
};

__global__ void __launch_bounds__(kTokens* kWarps) correct_zeros(__grid_constant__ Params const p) {
  __shared__ float largest[kWarps][kTokens];
  int const lane = threadIdx.x % kTokens, warp = threadIdx.x / kTokens;
  int const token = blockIdx.x * kTokens + lane, row = blockIdx.y, first = row * kTilesPerZeroRow + warp * kTiles;
  let_successor_start();  // it asks for its weights meanwhile
  wait_alone();
  bool const there = token < p.m;
  float scales[kTiles] = {}, values[kTiles], most = 0.0f;
  int8_t zeros[kTiles] = {};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    int64_t const from = int64_t(first + i) * p.x.stride + token;
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
  if (warp == 0) p.x.zero_scales[int64_t(row) * p.x.stride + token] = by.scale;
  __half first_parts[kTiles], second_parts[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    ZeroParts const parts(values[i], by);
    first_parts[i] = parts.first, second_parts[i] = parts.second;
  }
  __half* to = zero_value_of(p.x, token, p.rows, row, warp * kTiles);
  *reinterpret_cast<uint2*>(to) = reinterpret_cast<uint2 const&>(first_parts);
  *reinterpret_cast<uint2*>(to + 16) = reinterpret_cast<uint2 const&>(second_parts);
}

}  // namespace

Status launch_correct_zeros(GemmProblem const& problem, Stream stream) {
  int const rows = int(zero_rows(problem.weight.k));
  Params const p{problem.quantized, problem.m, int(padded_k(problem.weight.k) / kKPerTile), rows};
  dim3 const grid(unsigned((problem.m + kTokens - 1) / kTokens), unsigned(rows));
  return launch(correct_zeros, grid, kTokens * kWarps, 0, stream, p);
}

}  // namespace cutlass_ops
