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

// NaN goes through these, unlike through fminf and fmaxf. One instruction each, the absolute value included.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// What a run of values spans: [low, high] around zero, or, symmetric, [0, high] of the absolute values.
template <bool kSymmetric>
struct Range {
  float low, high;

  __device__ __forceinline__ void add(float v) {
    high = max_or_nan(high, kSymmetric ? fabsf(v) : v);
    if (!kSymmetric) low = min_or_nan(low, v);
  }
  __device__ __forceinline__ void add(Range const& other) {
    high = max_or_nan(high, other.high);
    if (!kSymmetric) low = min_or_nan(low, other.low);
  }
  // Of the `lanes` lanes (a power of two) around this one.
  __device__ __forceinline__ void share(int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      Range other{kSymmetric ? 0.0f : __shfl_xor_sync(~0u, low, distance), __shfl_xor_sync(~0u, high, distance)};
      add(other);
    }
  }
};

template <bool kSymmetric>
struct Quantizer {
  float scale = 1.0f, reciprocal = 0.0f, zero = 0.0f;

  __device__ __forceinline__ explicit Quantizer(Range<kSymmetric> const& range) {
    float span = kSymmetric ? range.high : __fsub_rn(range.high, range.low);
    constexpr float kLevels = kSymmetric ? 127.0f : 255.0f;
    if (!(span < __int_as_float(0x7f800000))) {  // also NaN; and high - low may overflow although both are finite
      scale = __int_as_float(0x7fffffff);
    } else if (span >= kTiny) {
      scale = __fdiv_rn(span, kLevels);
      reciprocal = __fdiv_rn(kLevels, span);
      if (!kSymmetric) zero = fminf(fmaxf(rintf(__fsub_rn(-128.0f, __fmul_rn(range.low, reciprocal))), -128.0f), 127.0f);
    }
  }

  // The code of v in the lowest byte. Adding 1.5 * 2^23 rounds half to even and leaves the integer in the lowest bits of the sum. Symmetric codes
  // need no clamp: |v| * (127 / amax) is at most 127 and a few units in its last place.
  __device__ __forceinline__ uint32_t code(float v) const {
    float rounded = __fmul_rn(v, reciprocal);
    if (reciprocal == 0.0f) rounded = 0.0f;  // v may be NaN or infinite
    constexpr float kMagic = 12582912.0f;
    if (kSymmetric) return __float_as_uint(__fadd_rn(rounded, kMagic));
    return __float_as_uint(__fadd_rn(fminf(fmaxf(rintf(rounded) + zero, -128.0f), 127.0f), kMagic));
  }
};

__device__ __forceinline__ void load_columns(Params const& p, int row, int column, float (&v)[kLaneColumns]) {
  QuantizeProblem const& q = p.problem;
  int64_t start = row * q.x_stride;
  if (!p.vector_loads) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      int k = column + i;
      v[i] = k < q.k ? load_float(q.x, q.x_type, start + (q.perm ? q.perm[k] : k)) : 0.0f;
    }
  } else if (q.x_type == DataType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      float4 four =
          column < q.k ? *reinterpret_cast<float4 const*>(static_cast<float const*>(q.x) + start + column + i) : float4{};
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
  } else {
    uint4 const* source = reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(q.x) + start + column);
    uint4 halves[2] = {};
    if (column < q.k) halves[0] = source[0], halves[1] = source[1];
    uint32_t const words[8] = {halves[0].x, halves[0].y, halves[0].z, halves[0].w,
                               halves[1].x, halves[1].y, halves[1].z, halves[1].w};
    bool is_half = q.x_type == DataType::kFloat16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float2 pair = is_half ? __half22float2(reinterpret_cast<__half2 const&>(words[i]))
                            : make_float2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u));
      v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
  }
}

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
  load_columns(p, row, column, v);
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
    load_columns(p, row, column, v);
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
    if (!one_pass) load_columns(p, row, column, v);
    store_codes(p, row, column, v, quantizer);
  }
  if (threadIdx.x == 0) store_scale(p, row, 0, quantizer);
}

}  // namespace

Status launch_quantize_activations(QuantizeProblem const& problem, Stream stream) {
  int k_pad = int(padded_k(problem.k)), value = size_of(problem.x_type);
  bool aligned =
      reinterpret_cast<uintptr_t>(problem.x) % 16 == 0 && problem.x_stride * value % 16 == 0 && problem.k % kLaneColumns == 0;
  Params p{problem, k_pad, aligned && !problem.perm};
  bool symmetric = !problem.out.zeros;
  if (problem.out.block == -1) {
    return launch(symmetric ? quantize_tokens<true> : quantize_tokens<false>, dim3(problem.m), kThreads, 0, stream, p);
  }
  int64_t warps = int64_t(problem.m) * ((k_pad + kWarpColumns - 1) / kWarpColumns);
  int64_t blocks = (warps + kThreads / 32 - 1) / (kThreads / 32);
  return launch(symmetric ? quantize_blocks<true> : quantize_blocks<false>, dim3(unsigned(blocks)), kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
