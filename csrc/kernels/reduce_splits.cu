// The end of a product whose K was split over blocks: add the parts, always in the order of K, and apply the epilogue. Eight neighbouring
// outputs a thread; the parts were just written and come from L2.
#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "device/launch.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    reduce_splits(__grid_constant__ EpilogueParams const p, float const* __restrict__ partials, int splits, int n_pad) {
  wait_for_predecessor();
  int n = (blockIdx.y * kThreads + threadIdx.x) * 8, m = blockIdx.x;
  if (n >= p.n) return;
  float const* from = partials + int64_t(m) * n_pad + n;
  int64_t const stride = int64_t(p.m) * n_pad;
  float sums[8] = {};
  for (int s = 0; s < splits; ++s, from += stride) {
    float4 a = __ldcg(reinterpret_cast<float4 const*>(from)), b = __ldcg(reinterpret_cast<float4 const*>(from) + 1);
    sums[0] += a.x, sums[1] += a.y, sums[2] += a.z, sums[3] += a.w;
    sums[4] += b.x, sums[5] += b.y, sums[6] += b.z, sums[7] += b.w;
  }
  store_eight(sums, m, n, p);
}

}  // namespace

Status launch_reduce_splits(GemmProblem const& problem, int splits, float const* partials, Stream stream) {
  // Rows along x, of which there may be more than y can count: a batch-invariant product is split for any m.
  dim3 grid(problem.m, (problem.weight.n + kThreads * 8 - 1) / (kThreads * 8));
  return launch(reduce_splits, grid, kThreads, 0, stream, EpilogueParams(problem), partials, splits,
                int(padded_rows(problem.weight.n)));
}

}  // namespace cutlass_ops
