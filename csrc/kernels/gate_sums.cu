// Finishes a product with a gated weight whose kernel stored fp32 sums: adds the slices of K in
// order if it was split, then bias, activation(gate) * up, residual, one rounding. Four
// neighbouring outputs a thread; the sums were just written and come from L2 as far as they fit.
//
//   sums of a row of x   | gate 0..7 | up 0..7 | gate 8..15 | up 8..15 | ...
//   its outputs          |    0..7   |   8..15   | ...
#include "device/epilogue.cuh"
#include "device/launch.cuh"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 128, kOutputs = 4;
constexpr int kAtOnce = 4;  // slices whose loads are in flight

__device__ __forceinline__ void add(float (&sums)[kOutputs], float4 const& part) {
  sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
}

// p.n is the number of outputs.
__global__ void __launch_bounds__(kThreads)
    gate_sums(__grid_constant__ EpilogueParams const p, float const* __restrict__ slices, int count,
              int stride) {
  pdl_launch_dependents();  // it loads its weights meanwhile
  pdl_wait_and_launch_dependents();
  int const n = (blockIdx.y * kThreads + threadIdx.x) * kOutputs, m = blockIdx.x;
  if (n >= p.n) return;
  int const row = n / kGatedRows * (2 * kGatedRows) + n % kGatedRows;
  float const* from = slices + int64_t(m) * stride + row;
  int64_t const slice = int64_t(p.m) * stride;
  float gate[kOutputs] = {}, up[kOutputs] = {};
#pragma unroll 1
  for (int s = 0; s < count; s += kAtOnce, from += kAtOnce * slice) {
    float4 gates[kAtOnce], ups[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (s + i >= count) continue;
      gates[i] = __ldcg(reinterpret_cast<float4 const*>(from + i * slice));
      ups[i] = __ldcg(reinterpret_cast<float4 const*>(from + i * slice + kGatedRows));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (s + i < count) add(gate, gates[i]), add(up, ups[i]);
  }
  store_gated_outputs(gate, up, m, n, p);
}

}  // namespace

Status launch_gate_sums(GemmProblem const& problem, int slices, int stride, float const* sums,
                        Stream stream) {
  // Rows along x: their number may exceed the limit of y.
  dim3 const grid(unsigned(problem.m),
                  unsigned(ceil_div(outputs(problem.weight), kThreads * kOutputs)));
  return launch(gate_sums, grid, kThreads, 0, stream, EpilogueParams(problem), sums, slices,
                stride);
}

}  // namespace cutlass_ops
