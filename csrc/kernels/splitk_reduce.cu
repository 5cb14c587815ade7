// Finishes a product whose K was split over blocks: adds the slices, always in the order of K, and
// applies the epilogue. Four neighbouring outputs a thread; the slices were just written and come
// from L2.
#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "device/launch.cuh"
#include "dispatch/launchers.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 128, kOutputs = 4;
constexpr int kAtOnce = 8;  // parts whose loads are in flight

__global__ void __launch_bounds__(kThreads)
    splitk_reduce(__grid_constant__ EpilogueParams const p,
                  float const* __restrict__ splitk_workspace, int splits, int n_pad) {
  pdl_launch_dependents();  // it loads its weights meanwhile
  pdl_wait_and_launch_dependents();
  int n = (blockIdx.y * kThreads + threadIdx.x) * kOutputs, m = blockIdx.x;
  if (n >= p.n) return;
  float const* from = splitk_workspace + int64_t(m) * n_pad + n;
  int64_t const stride = int64_t(p.m) * n_pad;
  float sums[kOutputs] = {};
#pragma unroll 1
  for (int s = 0; s < splits; s += kAtOnce, from += kAtOnce * stride) {
    float4 parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (s + i < splits) parts[i] = __ldcg(reinterpret_cast<float4 const*>(from + i * stride));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (s + i < splits)
        sums[0] += parts[i].x, sums[1] += parts[i].y, sums[2] += parts[i].z, sums[3] += parts[i].w;
  }
  store_outputs(sums, m, n, p);
}

}  // namespace

Status launch_splitk_reduce(GemmProblem const& problem, int splits, float const* splitk_workspace,
                            Stream stream) {
  // Rows along x: their number may exceed the limit of y, because a batch-invariant product is
  // split for any m.
  dim3 grid(problem.m, (problem.weight.n + kThreads * kOutputs - 1) / (kThreads * kOutputs));
  return launch(splitk_reduce, grid, kThreads, 0, stream, EpilogueParams(problem), splitk_workspace,
                splits, int(padded_rows(problem.weight.n)));
}

}  // namespace cutlass_ops
