// The epilogue of sums that another library made and rounded to 16 bits. Eight neighbouring
// outputs a thread.
#include "device/epilogue.cuh"
#include "device/launch.cuh"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256, kOutputs = 8;

// `sums` may be p.out: a thread reads what it writes.
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_rows(__grid_constant__ EpilogueParams const p, uint16_t const* sums, int vectors) {
  pdl_wait_and_launch_dependents();
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int const m = int(index / vectors), n = int(index - int64_t(m) * vectors) * kOutputs;
  if (m >= p.m) return;
  uint16_t const* const from = sums + int64_t(m) * p.n + n;
  uint32_t pairs[kOutputs / 2] = {};
  if (p.n % kOutputs == 0 && reinterpret_cast<uintptr_t>(sums) % sizeof(uint4) == 0) {
    uint4 const v = *reinterpret_cast<uint4 const*>(from);
    pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
      if (n + i < p.n) pairs[i / 2] |= uint32_t(from[i]) << i % 2 * 16;
  }
  float values[kOutputs];
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) values[i] = unpack_half<T>(pairs[i / 2], i % 2);
  store_outputs(values, m, n, p);
}

}  // namespace

Status launch_finish_sums(GemmProblem const& problem, void const* sums, Stream stream) {
  int const vectors = int(ceil_div(problem.weight.n, kOutputs));
  auto const kernel =
      problem.x_type == DataType::kBFloat16 ? finish_rows<__nv_bfloat16> : finish_rows<__half>;
  return launch(kernel, dim3(unsigned(ceil_div(int64_t(problem.m) * vectors, int64_t(kThreads)))),
                kThreads, 0, stream, EpilogueParams(problem), static_cast<uint16_t const*>(sums),
                vectors);
}

}  // namespace cutlass_ops
