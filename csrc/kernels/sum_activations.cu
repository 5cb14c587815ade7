// int8 activations that are quantised already -> QuantizedActivations::sums. A thread takes 16 columns of a row, eight of them one sum.
#include "device/code_sums.cuh"
#include "device/launch.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;

struct Params {
  QuantizedActivations x;
  int pieces;     // of 16 columns in a padded row
  int64_t count;  // of pieces in all rows
};

__global__ void __launch_bounds__(kThreads) sum_activations(__grid_constant__ Params const p) {
  let_successor_start();  // it asks for its weights meanwhile
  wait_alone();
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.count) return;  // pieces of a row are a multiple of eight: lanes of one sum are all here or none is
  int const row = int(index / p.pieces), piece = int(index % p.pieces);
  uint4 const codes = reinterpret_cast<uint4 const*>(p.x.codes)[index];
  int const tile = piece / (kKPerTile / 16);
  int const zero = p.x.zeros ? p.x.zeros[int64_t(p.x.block == -1 ? 0 : tile) * p.x.stride + row] : 0;
  store_code_sum(p.x, row, piece, codes, zero);
}

}  // namespace

Status launch_sum_activations(GemmProblem const& problem, Stream stream) {
  int const pieces = int(padded_k(problem.weight.k) / 16);
  Params const p{problem.quantized, pieces, int64_t(problem.m) * pieces};
  return launch(sum_activations, dim3(unsigned((p.count + kThreads - 1) / kThreads)), kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
