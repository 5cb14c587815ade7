// The quantiser's arguments, and what it quantises: floats as a lane reads and writes them, and the
// functions that it computes of them.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>
#include <cuda/annotated_ptr>
#include <type_traits>

#include "cutlass_ops/layout.h"
#include "device/hopper.cuh"
#include "device/launch.cuh"
#include "device/quantize.cuh"
#include "device/upcast.cuh"
#include "device/zero_values.cuh"
#include "dispatch/launchers.h"

namespace cutlass_ops {
namespace {

constexpr int kBlockThreads = 128;  // of quantize_blocks, at most
constexpr int kLeastThreads = 16;
constexpr int kZeroRowThreads =
    kTilesPerZeroRow * kKPerTile / kLaneColumns;  // where it writes zero values:
                                                  // lanes of a zero row
constexpr int kBlockRows = 2;                     // rows of a thread of quantize_blocks
constexpr int kMaxGridY = 65535;
constexpr int kAnyThreads = 256;  // of quantize_any_rows
constexpr int kDecodeBlockM = 16;
// A larger x is evicted from L2 first, so that the codes stay there until they are multiplied. A
// smaller x may still be in L2 from the kernel that made it (docs/tuning-notes.md).
constexpr int64_t kStreamedBytes = 12 << 20;

enum class Function { kNone, kRmsNorm, kSiluMul };

struct Params {
  QuantizeProblem problem;
  int pieces;      // of 16 columns in a padded row
  int log2_lanes;  // of a block; 31 where the row is one
  QuantizerStart start;
  cuda::access_property cached;  // how the cache keeps x, up and the residual
};

// ---- values of x's type

// Columns from `column` on of a row of `data`, in x's type; gathered by perm, if that is given;
// zeros from K on. Only T = float takes rows that do not start on 16 bytes, and numbers of columns
// that are no multiple of 8, and it leaves the cache its way.
template <class T>
__device__ __forceinline__ void load(Columns<T>& to, QuantizeProblem const& q, void const* data,
                                     int64_t stride, int row, int column, int32_t const* perm,
                                     cuda::access_property cached = {}) {
  if constexpr (std::is_same_v<T, float>) {
    load_columns(FloatRows(data, q.x_type, stride, q.k, perm), row, column, to.values);
  } else {
    uint4 const* source =
        reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(data) + row * stride + column);
    source = cuda::associate_access_property(source, cached);
    uint4 halves[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (column + 8 * h < q.k) halves[h] = source[h];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to.words[4 * h] = halves[h].x, to.words[4 * h + 1] = halves[h].y,
                   to.words[4 * h + 2] = halves[h].z, to.words[4 * h + 3] = halves[h].w;
    }
  }
}

// The inverse, without a permutation.
template <class T>
__device__ __forceinline__ void store(Columns<T> const& c, QuantizeProblem const& q, void* data,
                                      int64_t start, int column) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if (column + i < q.k) store_float(data, q.x_type, start + column + i, c.values[i]);
    }
  } else {
    uint4* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + start + column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (column + 8 * h < q.k)
        to[h] =
            make_uint4(c.words[4 * h], c.words[4 * h + 1], c.words[4 * h + 2], c.words[4 * h + 3]);
    }
  }
}

// ---- codes

// The codes of 16 columns, or their values as 16-bit floats.
template <bool kMayUpcast, class T, bool kSymmetric>
__device__ __forceinline__ void store_codes(Params const& p, int row, int piece,
                                            Columns<T> const& c,
                                            Quantizer<kSymmetric> const& quantizer) {
  int64_t const to = int64_t(row) * p.pieces + piece;
  uint4 const codes = codes_of(c, quantizer);
  // (Those of a block with NaN or infinity are 0, and so is its zero point; its scale is NaN.)
  if (kMayUpcast && p.problem.out.upcast)
    return store_upcast(p.problem.out, to, codes, quantizer.zero, quantizer.scale);
  reinterpret_cast<uint4*>(p.problem.out.codes)[to] = codes;
}

// ---- what is quantised

// v / (1 + exp(-v)), rounded as written. Beyond -88.7 the divisor is infinite; before, a
// quarter of both keeps its reciprocal from being subnormal. Near zero it is 2, and a quarter
// of v might be subnormal.
__device__ __forceinline__ float silu(float v) {
  float divisor = __fadd_rn(1.0f, expf(-v));
  float y = quotient(__fmul_rn(v, 0.25f), __fmul_rn(divisor, 0.25f));
  if (fabsf(v) < 0x1p-30f) y = __fmul_rn(v, 0.5f);
  if (divisor == __int_as_float(0x7f800000)) y = __fmul_rn(v, 0.0f);  // NaN for -infinity
  return y;
}

template <class T>
__device__ __forceinline__ void silu_mul(Columns<T>& gate, Columns<T> const& up, DataType type) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 v = gate.pair(i);
    gate.set(i, make_float2(silu(v.x), silu(v.y)), type);
  }
  gate.multiply(up, type);
}

// Squares are added in pairs, neighbours first: of 16 columns here, then of the 512 of a warp.
template <class T>
__device__ __forceinline__ float sum_of_squares(Columns<T> const& c) {
  float sums[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 v = c.pair(i);
    sums[i] = __fadd_rn(__fmul_rn(v.x, v.x), __fmul_rn(v.y, v.y));
  }
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 8; i += 2 * distance) sums[i] = __fadd_rn(sums[i], sums[i + distance]);
  }
  return sums[0];
}
__device__ __forceinline__ float sum_of_lanes(float v) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    v = __fadd_rn(v, __shfl_xor_sync(~0u, v, distance));
  return v;
}

// 1 / sqrt(sum / K + eps), every operation rounded as IEEE has it, from the sums of the runs
// of 512 columns. As eps is at least 1e-15, none but an infinite sum leaves the range in
// which a reciprocal square root that is nearly right and one compensation by the remainder
// make the square root.
__device__ __forceinline__ float norm_factor(float const* run_sums, int runs,
                                             QuantizeProblem const& q) {
  float sum = 0.0f, y;
  for (int run = threadIdx.x % 32; run < runs; run += 32) sum = __fadd_rn(sum, run_sums[run]);
  sum = sum_of_lanes(sum);
  float square = __fadd_rn(quotient(sum, float(q.k)), q.norm_eps);
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(square));
  float root = __fmul_rn(square, y);
  root = __fmaf_rn(__fmaf_rn(-root, root, square), __fmul_rn(0.5f, y), root);
  return sum == __int_as_float(0x7f800000) ? 0.0f : quotient(1.0f, root);
}

// Columns from K on stay zeros, although the factor may be NaN; weight may be anything there.
template <class T>
__device__ __forceinline__ void normalize(Columns<T>& c, Columns<T> const& weight, float factor,
                                          int missing, DataType type) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 v = c.pair(i);
    c.set(i, make_float2(__fmul_rn(v.x, factor), __fmul_rn(v.y, factor)), type);
  }
  c.multiply(weight, type);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 v = c.pair(i);
    if (2 * i + 1 >= missing) c.set(i, make_float2(2 * i >= missing ? 0.0f : v.x, 0.0f), type);
  }
}

}  // namespace
}  // namespace cutlass_ops
