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
#include "device/scalar.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kLaneColumns = 16;
constexpr int kWarpColumns = 32 * kLaneColumns;
constexpr int kThreads = 256;
constexpr float kTiny = 0x1p-100f;  // a range below this is a range of zero

struct Params {
  QuantizeProblem problem;
  int k_pad;
  bool vector_loads;  // rows start on 16 bytes, K is a multiple of 16, and no permutation
};

// What a run of values spans. `top` is the largest |x| as bits: unlike a float maximum it does not lose a NaN.
struct Range {
  float low = 0.0f, high = 0.0f;
  uint32_t top = 0;

  __device__ __forceinline__ void add(float v) {
    low = fminf(low, v), high = fmaxf(high, v);
    top = max(top, __float_as_uint(v) & 0x7fffffffu);
  }
  __device__ __forceinline__ void add(Range const& other) {
    low = fminf(low, other.low), high = fmaxf(high, other.high);
    top = max(top, other.top);
  }
  // Of the range over the `lanes` lanes (a power of two) around this one.
  __device__ __forceinline__ void share(int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      Range other;
      other.low = __shfl_xor_sync(~0u, low, distance), other.high = __shfl_xor_sync(~0u, high, distance);
      other.top = __shfl_xor_sync(~0u, top, distance);
      add(other);
    }
  }
};

struct Quantizer {
  float scale = 1.0f, reciprocal = 0.0f;
  int zero = 0;

  __device__ __forceinline__ Quantizer(Range const& range, bool symmetric) {
    bool finite = range.top < 0x7f800000u;
    float span = symmetric ? __uint_as_float(range.top) : __fsub_rn(range.high, range.low);
    float levels = symmetric ? 127.0f : 255.0f;
    // hi - lo may overflow although both ends are finite.
    if (!finite || !(span < __int_as_float(0x7f800000))) {
      scale = __int_as_float(0x7fffffff);
    } else if (span >= kTiny) {
      scale = __fdiv_rn(span, levels);
      reciprocal = __fdiv_rn(levels, span);
      if (!symmetric) zero = int(fminf(fmaxf(rintf(__fsub_rn(-128.0f, __fmul_rn(range.low, reciprocal))), -128.0f), 127.0f));
    }
  }

  __device__ __forceinline__ int code(float v, bool symmetric) const {
    if (reciprocal == 0.0f) return zero;
    float low = symmetric ? -127.0f : -128.0f;
    return int(fminf(fmaxf(rintf(__fmul_rn(v, reciprocal)) + float(zero), low), 127.0f));
  }
};

__device__ __forceinline__ void load_columns(Params const& p, int row, int column, float (&v)[kLaneColumns]) {
  QuantizeProblem const& q = p.problem;
  int64_t start = row * q.x_stride;
  if (p.vector_loads) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      float four[4] = {};
      if (column < q.k) load_float4(q.x, q.x_type, start + column + i, four);
      v[i] = four[0], v[i + 1] = four[1], v[i + 2] = four[2], v[i + 3] = four[3];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    int k = column + i;
    v[i] = k < q.k ? load_float(q.x, q.x_type, start + (q.perm ? q.perm[k] : k)) : 0.0f;
  }
}

// The codes of 16 columns in kernel order.
__device__ __forceinline__ void store_codes(Params const& p, int row, int column, float const (&v)[kLaneColumns],
                                            Quantizer const& quantizer, bool symmetric) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    int code = column + i < p.problem.k ? quantizer.code(v[i], symmetric) : quantizer.zero;
    int position = activation_position(i);
    words[position / 4] |= (uint32_t(code) & 0xffu) << 8 * (position % 4);
  }
  *reinterpret_cast<uint4*>(p.problem.out.codes + int64_t(row) * p.k_pad + column) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_scale(Params const& p, int row, int block, Quantizer const& quantizer) {
  QuantizedActivations const& out = p.problem.out;
  out.scales[int64_t(block) * out.stride + row] = quantizer.scale;
  if (out.zeros) out.zeros[int64_t(block) * out.stride + row] = int8_t(quantizer.zero);
}

__global__ void __launch_bounds__(kThreads) quantize_blocks(__grid_constant__ Params const p) {
  wait_for_predecessor();
  int runs = (p.k_pad + kWarpColumns - 1) / kWarpColumns, warps = kThreads / 32;
  int64_t work = int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  int row = int(work / runs), column = int(work % runs) * kWarpColumns + threadIdx.x % 32 * kLaneColumns;
  if (row >= p.problem.m) return;
  bool symmetric = !p.problem.out.zeros;
  int lanes = p.problem.out.block / kLaneColumns;
  float v[kLaneColumns];
  load_columns(p, row, column, v);
  Range range;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) range.add(v[i]);
  range.share(lanes);
  if (column >= p.k_pad) return;
  Quantizer quantizer(range, symmetric);
  store_codes(p, row, column, v, quantizer, symmetric);
  if (threadIdx.x % lanes == 0) store_scale(p, row, column / p.problem.out.block, quantizer);
}

__global__ void __launch_bounds__(kThreads) quantize_tokens(__grid_constant__ Params const p) {
  wait_for_predecessor();
  __shared__ Range parts[kThreads / 32];
  int row = blockIdx.x;
  bool symmetric = !p.problem.out.zeros;
  float v[kLaneColumns];
  Range range;
  for (int column = threadIdx.x * kLaneColumns; column < p.k_pad; column += kThreads * kLaneColumns) {
    load_columns(p, row, column, v);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) range.add(v[i]);
  }
  range.share(32);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = range;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) range.add(parts[i]);
  Quantizer quantizer(range, symmetric);
  bool one_pass = p.k_pad <= kThreads * kLaneColumns;  // the row is still in v
  for (int column = threadIdx.x * kLaneColumns; column < p.k_pad; column += kThreads * kLaneColumns) {
    if (!one_pass) load_columns(p, row, column, v);
    store_codes(p, row, column, v, quantizer, symmetric);
  }
  if (threadIdx.x == 0) store_scale(p, row, 0, quantizer);
}

}  // namespace

Status launch_quantize_activations(QuantizeProblem const& problem, Stream stream) {
  int k_pad = int(padded_k(problem.k)), value = size_of(problem.x_type);
  bool aligned =
      reinterpret_cast<uintptr_t>(problem.x) % 16 == 0 && problem.x_stride * value % 16 == 0 && problem.k % kLaneColumns == 0;
  Params p{problem, k_pad, aligned && !problem.perm};
  if (problem.out.block == -1) return launch(quantize_tokens, dim3(problem.m), kThreads, 0, stream, p);
  int64_t warps = int64_t(problem.m) * ((k_pad + kWarpColumns - 1) / kWarpColumns);
  int64_t blocks = (warps + kThreads / 32 - 1) / (kThreads / 32);
  return launch(quantize_blocks, dim3(unsigned(blocks)), kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
