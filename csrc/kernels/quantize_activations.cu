// Floats -> int8 codes in kernel order, with a scale (and a zero point) for each row and block of K, or each row.
//
// The arithmetic is the reference's, operation by operation, so that codes and scales are the same bits on every device:
//   symmetric    s = amax / 127          q = clamp(rint(x * (127 / amax)), -127, 127)
//   asymmetric   s = (hi - lo) / 255     z = clamp(rint(-128 - lo * r), -128, 127)     q = clamp(rint(x * r) + z, -128, 127),   r = 255 / (hi - lo)
//                lo = min(0, min x), hi = max(0, max x)
// A block of zeros has scale 1. A block that holds a NaN or an infinity has scale NaN and codes 0: every output of its row is NaN.
// Columns from K to the next multiple of 128 hold the zero point of their block.
//
// One lane owns 16 columns: a whole 16-byte piece of the permuted codes, which it stores at once.
//   block mode   2, 4 or 8 lanes share a block of 32, 64 or 128 columns and find its range by shuffles; a warp takes 512 columns of a row
//   token mode   a thread block takes a row; its range is found in a first pass over the row, which the second then finds in cache
#include "cutlass_ops/layout.h"
#include "device/launch.cuh"
#include "device/quantize.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kWarpColumns = 32 * kLaneColumns;
constexpr int kThreads = 256;

struct Params {
  QuantizeProblem problem;
  FloatRows rows;
  int k_pad;
};

// The codes of 16 columns in kernel order: 0, 8, 1, 9, ..., 7, 15.
template <bool kSymmetric>
__device__ __forceinline__ void store_codes(Params const& p, int row, int column, float const (&v)[kLaneColumns],
                                            Quantizer<kSymmetric> const& quantizer) {
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    static_assert(activation_position(0) == 0 && activation_position(8) == 1 && activation_position(1) == 2 &&
                  activation_position(15) == 15);
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int k = 2 * w + i / 2 + i % 2 * 8;  // activation_position(k) = 4 w + i
      // Beyond K the zero point: what a value of zero becomes.
      codes[i] = quantizer.code(v[k]);
    }
    words[w] = __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
  }
  *reinterpret_cast<uint4*>(p.problem.out.codes + int64_t(row) * p.k_pad + column) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

template <bool kSymmetric>
__device__ __forceinline__ void store_scale(Params const& p, int row, int block, Quantizer<kSymmetric> const& quantizer) {
  QuantizedActivations const& out = p.problem.out;
  out.scales[int64_t(block) * out.stride + row] = quantizer.scale;
  if (!kSymmetric) out.zeros[int64_t(block) * out.stride + row] = int8_t(quantizer.zero);
}

template <bool kSymmetric>
__global__ void __launch_bounds__(kThreads) quantize_blocks(__grid_constant__ Params const p) {
  wait_for_predecessor();
  int runs = (p.k_pad + kWarpColumns - 1) / kWarpColumns, warps = kThreads / 32;
  int64_t work = int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  int row = int(work / runs), column = int(work % runs) * kWarpColumns + threadIdx.x % 32 * kLaneColumns;
  if (row >= p.problem.m) return;
  int lanes = p.problem.out.block / kLaneColumns;
  float v[kLaneColumns];
  load_columns(p.rows, row, column, v);
  Range<kSymmetric> range{};
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) range.add(v[i]);
  range.share(lanes);
  if (column >= p.k_pad) return;
  Quantizer<kSymmetric> quantizer(range);
  store_codes(p, row, column, v, quantizer);
  if (threadIdx.x % lanes == 0) store_scale(p, row, column / p.problem.out.block, quantizer);
}

template <bool kSymmetric>
__global__ void __launch_bounds__(kThreads, 4) quantize_tokens(__grid_constant__ Params const p) {
  wait_for_predecessor();
  __shared__ Range<kSymmetric> parts[kThreads / 32];
  int row = blockIdx.x;
  float v[kLaneColumns];
  Range<kSymmetric> range{};
  for (int column = threadIdx.x * kLaneColumns; column < p.k_pad; column += kThreads * kLaneColumns) {
    load_columns(p.rows, row, column, v);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) range.add(v[i]);
  }
  range.share(32);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = range;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) range.add(parts[i]);
  Quantizer<kSymmetric> quantizer(range);
  bool one_pass = p.k_pad <= kThreads * kLaneColumns;  // the row is still in v
  for (int column = threadIdx.x * kLaneColumns; column < p.k_pad; column += kThreads * kLaneColumns) {
    if (!one_pass) load_columns(p.rows, row, column, v);
    store_codes(p, row, column, v, quantizer);
  }
  if (threadIdx.x == 0) store_scale(p, row, 0, quantizer);
}

}  // namespace

Status launch_quantize_activations(QuantizeProblem const& problem, Stream stream) {
  int k_pad = int(padded_k(problem.k));
  Params p{problem, FloatRows(problem.x, problem.x_type, problem.x_stride, problem.k, problem.perm), k_pad};
  bool symmetric = !problem.out.zeros;
  if (problem.out.block == -1) {
    return launch(symmetric ? quantize_tokens<true> : quantize_tokens<false>, dim3(problem.m), kThreads, 0, stream, p);
  }
  int64_t warps = int64_t(problem.m) * ((k_pad + kWarpColumns - 1) / kWarpColumns);
  int64_t blocks = (warps + kThreads / 32 - 1) / (kThreads / 32);
  return launch(symmetric ? quantize_blocks<true> : quantize_blocks<false>, dim3(unsigned(blocks)), kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
