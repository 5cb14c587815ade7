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
constexpr int kEight = 8;   // rows of gate, or of up, side by side

__device__ __forceinline__ void add(float (&sums)[kOutputs], float4 const& part) {
  sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
}

// Sums of rows from `row` on of the weight, with their biases.
__device__ __forceinline__ void with_bias(float (&sums)[kOutputs], int row,
                                          EpilogueParams const& p) {
#pragma unroll
  for (float& x : sums) x = nan_unless_finite(x);
  if (!p.bias) return;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) sums[i] += load_float(p.bias, p.bias_type, row + i);
}

// p.n is the number of outputs.
__global__ void __launch_bounds__(kThreads)
    gate_sums(__grid_constant__ EpilogueParams const p, float const* __restrict__ slices, int count,
              int stride) {
  pdl_launch_dependents();  // it loads its weights meanwhile
  pdl_wait_and_launch_dependents();
  int const n = (blockIdx.y * kThreads + threadIdx.x) * kOutputs, m = blockIdx.x;
  if (n >= p.n) return;
  int const row = n / kEight * (2 * kEight) + n % kEight;
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
      ups[i] = __ldcg(reinterpret_cast<float4 const*>(from + i * slice + kEight));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (s + i < count) add(gate, gates[i]), add(up, ups[i]);
  }
  with_bias(gate, row, p);
  with_bias(up, row + kEight, p);
  visit_activation(p.activation, p.bounds, [&](auto const& function) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) gate[i] = function(gate[i]) * factor_of_up(function, up[i]);
  });
  finish_activated(gate, m, n, p);
  store_finished(gate, m, n, p);
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
