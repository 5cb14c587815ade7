// Rows of 16-bit floats that a tensor map describes, [m][k_pad], for wgmma_fold16: from int8
// activations that are quantised already (device/upcast.cuh), or from floats whose columns
// are to be gathered (act order) or whose rows do not start on 16 bytes. A thread makes 16
// columns of a row.
#include "device/launch.cuh"
#include "device/upcast.cuh"
#include "dispatch/launchers.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256, kColumns = 16;

struct UpcastParams {
  QuantizedActivations x;
  int64_t total;  // threads with work
  int pieces;     // of 16 columns in a padded row
};

__global__ void __launch_bounds__(kThreads)
    upcast_activations(__grid_constant__ UpcastParams const p) {
  pdl_wait_and_launch_dependents();
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.total) return;
  int const row = int(index / p.pieces), piece = int(index - int64_t(row) * p.pieces);
  int64_t const from =
      int64_t(p.x.block == -1 ? 0 : piece * kColumns / p.x.block) * p.x.stride + row;
  store_upcast(p.x, index, reinterpret_cast<uint4 const*>(p.x.codes)[index],
               p.x.zeros ? p.x.zeros[from] : 0, p.x.scales[from]);
}

struct GatherParams {
  uint16_t const* x;
  int64_t stride;
  int32_t const* perm;  // or null
  uint16_t* out;
  int64_t total;
  int k, pieces;
};

__global__ void __launch_bounds__(kThreads)
    gather_activations(__grid_constant__ GatherParams const p) {
  pdl_wait_and_launch_dependents();
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.total) return;
  int const row = int(index / p.pieces), column = int(index - int64_t(row) * p.pieces) * kColumns;
  uint16_t const* x = p.x + int64_t(row) * p.stride;
  uint16_t values[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    int const k = column + i;
    values[i] = k < p.k ? x[p.perm ? __ldg(p.perm + k) : k] : uint16_t(0);
  }
  uint4* out = reinterpret_cast<uint4*>(p.out + index * kColumns);
  out[0] = reinterpret_cast<uint4 const*>(values)[0],
  out[1] = reinterpret_cast<uint4 const*>(values)[1];
}

}  // namespace

Status launch_upcast_activations(GemmProblem const& problem, Stream stream) {
  int const pieces = int(padded_k(problem.weight.k) / kColumns);
  int64_t const total = int64_t(problem.m) * pieces;
  dim3 const grid(unsigned((total + kThreads - 1) / kThreads));
  QuantizedActivations const& x = problem.quantized;
  if (x.codes)
    return launch(upcast_activations, grid, kThreads, 0, stream, UpcastParams{x, total, pieces});
  GatherParams const p{static_cast<uint16_t const*>(problem.x),
                       problem.x_stride,
                       problem.weight.perm,
                       static_cast<uint16_t*>(x.upcast),
                       total,
                       problem.weight.k,
                       pieces};
  return launch(gather_activations, grid, kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
