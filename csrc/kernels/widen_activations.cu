// int8 activations that are quantised already -> fp16 integers and factors (device/widen.cuh). A thread widens 16 columns of a row.
#include "device/launch.cuh"
#include "device/widen.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;

struct Params {
  QuantizedActivations x;
  int64_t total;  // threads with work, a multiple of 8
  int pieces;     // of 16 columns in a padded row
};

__global__ void __launch_bounds__(kThreads) widen_activations(__grid_constant__ Params const p) {
  wait_for_predecessor();
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.total) return;
  int const row = int(index / p.pieces), piece = int(index - int64_t(row) * p.pieces);
  int64_t const from = int64_t(p.x.block == -1 ? 0 : piece * 16 / p.x.block) * p.x.stride + row;
  int sum = store_wide(p.x, index, reinterpret_cast<uint4 const*>(p.x.codes)[index], p.x.zeros ? p.x.zeros[from] : 0);
  if (!p.x.factors) return;
  sum = sum_of_step(p.x, sum);
  if (piece * 16 % p.x.step) return;
  float* to = factors_of(p.x, row, piece);
  float const scale = p.x.scales[from];
  to[0] = scale, to[16] = scale * float(sum);
}

}  // namespace

Status launch_widen_activations(GemmProblem const& problem, Stream stream) {
  int const pieces = int(padded_k(problem.weight.k) / 16);
  Params const p{problem.quantized, int64_t(problem.m) * pieces, pieces};
  return launch(widen_activations, dim3(unsigned((p.total + kThreads - 1) / kThreads)), kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
