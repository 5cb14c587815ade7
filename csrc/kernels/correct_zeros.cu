// The zero points and scales of int8 activations -> QuantizedActivations::zero_values and zero_scales (corrections.h). A product waits for it: a block takes 32
// tokens and one zero row, a warp four of its tiles of K, a lane a token, so that all that a thread reads is under way at once.
#include <cuda_fp16.h>

#include "cutlass_ops/corrections.h"
#include "device/launch.cuh"
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
  // Powers of two by which values come below 2^14: the second parts of all that counts are normal numbers then.
  int const exponent = max(int(__float_as_uint(most) >> 23) - 127 - 13, -126);
  float const inverse = __uint_as_float(uint32_t(127 - exponent) << 23);
  if (!there) return;
  if (warp == 0) p.x.zero_scales[int64_t(row) * p.x.stride + token] = __uint_as_float(uint32_t(exponent + 127) << 23);
  __half2 parts[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const low = values[2 * i] * inverse, high = values[2 * i + 1] * inverse;
    parts[0][i] = __floats2half2_rn(low, high);
    parts[1][i] = __floats2half2_rn(low - __low2float(parts[0][i]), high - __high2float(parts[0][i]));
  }
  // Of 16 tiles the first parts, then the second: 32 bytes each.
  auto* to =
      static_cast<uint8_t*>(p.x.zero_values) + (int64_t(token) * p.rows + row) * (kZeroRow * 2) + warp / 4 * 64 + warp % 4 * 8;
#pragma unroll
  for (int part = 0; part < 2; ++part) *reinterpret_cast<uint2*>(to + part * 32) = reinterpret_cast<uint2 const&>(parts[part]);
}

}  // namespace

Status launch_correct_zeros(GemmProblem const& problem, Stream stream) {
  int const rows = int(zero_rows(problem.weight.k));
  Params const p{problem.quantized, problem.m, int(padded_k(problem.weight.k) / kKPerTile), rows};
  dim3 const grid(unsigned((problem.m + kTokens - 1) / kTokens), unsigned(rows));
  return launch(correct_zeros, grid, kTokens * kWarps, 0, stream, p);
}

}  // namespace cutlass_ops
