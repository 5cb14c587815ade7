// Floats -> int8 codes in kernel order, with a scale (and a zero point) for each row and block of
// K, or each row. What is quantised is x, or one of two functions of it that decoders compute in
// between, so that their results do not pass through memory:
//
//   rms norm     s = x + residual, which is also written; r = 1 / sqrt(mean of s^2 over the row +
//                eps); y = (s * r) * weight
//   silu x up    y = silu(x) * up,  silu(v) = v / (1 + exp(-v))
//
// The arithmetic is the reference's, operation by operation, so that codes and scales are the same
// bits on every device (but for the exponential, which is the device's own): each operation is
// rounded to fp32, each parenthesis and y to x's type.
//   symmetric    s = amax / 127          q = clamp(rint(y * (127 / amax)), -127, 127)
//   asymmetric   lo = min(0, min y), hi = max(0, max y)
//                s = (hi - lo) / 255     r = 255 / (hi - lo)
//                z = clamp(rint(-128 - lo * r), -128, 127)
//                q = clamp(rint(y * r) + z, -128, 127)
// A block of zeros has scale 1. A block that holds a NaN or an infinity has scale NaN and codes
// 0: every output of its row is NaN. Columns from K to the next multiple of 128 hold the zero
// point of their block.
//
// For a product of 16-bit floats the values of the codes are written instead (device/upcast.cuh);
// for one that compensates zero points for many blocks at once, their zero values too
// (device/zero_values.cuh).
//
// One lane owns 16 columns at a time: 16 bytes of the permuted codes, one store. Memory bandwidth
// is the limit, so loads are issued long before their use.
//   quantize_blocks   1, 2, 4 or 8 lanes share a block of 16, 32, 64 or 128 columns and find its
//                     range by shuffles. A thread has the same columns of two rows: their scales
//                     lie side by side and leave in one store
//   quantize_rows     a thread block takes a row, for one scale a row, or for the norm, or both;
//                     the row stays in registers while the next is loaded
//   quantize_row_parts the same for a few rows, which clusters of blocks share
//   quantize_any_rows the same for rows of any length, alignment and order of columns, read
//                     again for each pass
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

// ---- blocks of 16, 32, 64 or 128 columns

// Stores the zero values of kBlockRows rows and the columns of this block's threads, which are a
// zero row: zero points times scales or, without zero points, sums of the codes times scales. All
// threads call this.
template <class T, bool kSymmetric>
__device__ __forceinline__ void store_zero_values(Params const& p,
                                                  Columns<T> const (&c)[kBlockRows],
                                                  Span<T, kSymmetric> (&spans)[kBlockRows],
                                                  int row) {
  __shared__ float largest[kBlockRows][kZeroRowThreads / 32];
  QuantizedActivations const& out = p.problem.out;
  int const thread = threadIdx.x, piece = blockIdx.x * kZeroRowThreads + thread,
            pieces_of_tile = kKPerTile / kLaneColumns;
  float values[kBlockRows];
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    Quantizer<kSymmetric> const quantizer(spans[i].range());
    float zero = quantizer.zero;
    if constexpr (kSymmetric) {
      int sum = sum_of_codes(codes_of(c[i], quantizer));
#pragma unroll
      for (int distance = 1; distance < pieces_of_tile; distance *= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
      zero = float(sum);
    }
    values[i] = piece < p.pieces ? quantizer.scale * zero : 0.0f;
    float most = fabsf(values[i]);
#pragma unroll
    for (int distance = pieces_of_tile; distance < 32; distance *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
    if (thread % 32 == 0) largest[i][thread / 32] = most;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    if (row + i >= p.problem.m || thread % pieces_of_tile) continue;
    float most = 0.0f;
#pragma unroll
    for (float v : largest[i]) most = fmaxf(most, v);
    ZeroScale const by(most);
    if (thread == 0) out.zero_scales[int64_t(blockIdx.x) * out.stride + row + i] = by.scale;
    ZeroParts const parts(values[i], by);
    __half* to = zero_value_of(out, row + i, gridDim.x, blockIdx.x, thread / pieces_of_tile);
    to[0] = parts.first, to[16] = parts.second;
  }
}

// A scale and a zero point of a row's block.
template <bool kSymmetric>
__device__ __forceinline__ void store_vectors(QuantizedActivations const& out, int row, int block,
                                              Quantizer<kSymmetric> const& quantizer) {
  int64_t const to = int64_t(block) * out.stride + row;
  out.scales[to] = quantizer.scale;
  if (!kSymmetric) out.zeros[to] = int8_t(quantizer.zero);
}

template <class T, bool kSymmetric, Function kFunction>
__global__ void __launch_bounds__(kFunction != Function::kNone ? kBlockThreads : kZeroRowThreads)
    quantize_blocks(__grid_constant__ Params const p) {
  if (p.start.early) pdl_launch_dependents();  // it loads its weights meanwhile
  pdl_wait_and_launch_dependents();
  QuantizeProblem const& q = p.problem;
  // find_range() has read the last rows last, so that these are in the cache.
  int const number = blockIdx.z * gridDim.y + blockIdx.y,
            block = q.range ? int(gridDim.z * gridDim.y) - 1 - number : number,
            row = (block * int(blockDim.y) + threadIdx.y) * kBlockRows;
  int const piece = blockIdx.x * blockDim.x + threadIdx.x, column = piece * kLaneColumns;
  Columns<T> c[kBlockRows], up[kFunction == Function::kSiluMul ? kBlockRows : 1];
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    int const limit = row + i < q.m ? column : q.k;  // nothing from K on is read
    load(c[i], q, q.x, q.x_stride, row + i, limit, q.perm, p.cached);
    if constexpr (kFunction == Function::kSiluMul)
      load(up[i], q, q.up, q.up_stride, row + i, limit, q.perm, p.cached);
  }
  Range<kSymmetric> given = {};
  if (q.range) given = given_range<kSymmetric>(q.range);
  Span<T, kSymmetric> spans[kBlockRows];
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    if constexpr (kFunction == Function::kSiluMul) silu_mul(c[i], up[i], q.x_type);
    if (!q.range) spans[i].add(c[i]);
  }
  if (!q.range) {
    for (int distance = 1; distance < 1 << p.log2_lanes; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) spans[i].add(spans[i].of_lane(distance));
    }
  }
  if constexpr (kFunction == Function::kNone) {
    if (q.out.zero_values) store_zero_values(p, c, spans, row);
  }
  if (piece >= p.pieces || row >= q.m) return;
  float scales[kBlockRows], zeros[kBlockRows];
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    Quantizer<kSymmetric> quantizer(q.range ? given : spans[i].range());
    scales[i] = quantizer.scale, zeros[i] = quantizer.zero;
    if (row + i >= q.m) continue;
    store_codes<kFunction == Function::kNone>(p, row + i, piece, c[i], quantizer);
  }
  if (!q.out.scales || (piece & ((1 << p.log2_lanes) - 1))) return;
  // out.stride is a multiple of 16, so the scale of a row beyond the last fits.
  int64_t to = int64_t(piece >> p.log2_lanes) * q.out.stride + row;
  *reinterpret_cast<float2*>(q.out.scales + to) = make_float2(scales[0], scales[1]);
  if (!kSymmetric)
    *reinterpret_cast<char2*>(q.out.zeros + to) = make_char2(int8_t(zeros[0]), int8_t(zeros[1]));
}

// ---- rows

// The block's range and codes of 16 columns of a row. `x_row` is the range of a row
// that is one block.
template <bool kMayUpcast, class T, bool kSymmetric>
__device__ __forceinline__ void quantize_piece(Params const& p, int row, int piece,
                                               Columns<T> const& c,
                                               Span<T, kSymmetric> const& x_row) {
  QuantizedActivations const& out = p.problem.out;
  Span<T, kSymmetric> span = x_row;
  if (out.block != -1) {
    span = {};
    span.add(c);
    for (int distance = 1; distance < 1 << p.log2_lanes; distance *= 2)
      span.add(span.of_lane(distance));
  }
  if (piece >= p.pieces) return;
  Quantizer<kSymmetric> quantizer(span.range());
  store_codes<kMayUpcast>(p, row, piece, c, quantizer);
  if (piece & ((1u << p.log2_lanes) - 1)) return;
  store_vectors(out, row, piece >> p.log2_lanes, quantizer);
}

// The range of a row from the ranges of its warps, exchanged in `parts`.
template <class T, bool kSymmetric>
__device__ __forceinline__ void share_with_block(Span<T, kSymmetric>& span,
                                                 Span<T, kSymmetric>* parts) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) span.add(span.of_lane(distance));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = span;
  __syncthreads();
  for (int i = 0; i < int(blockDim.x) / 32; ++i) span.add(parts[i]);
}

template <int kPieces>
constexpr int kRowThreads = kPieces == 1 ? 1024 : 448;  // at most: rows of 16384 or 28672 columns

template <class T, bool kSymmetric, Function kFunction, int kPieces>
__global__ void __launch_bounds__(kRowThreads<kPieces>)
    quantize_rows(__grid_constant__ Params const p) {
  constexpr bool kNorm = kFunction == Function::kRmsNorm, kTwo = kFunction != Function::kNone;
  constexpr int kWarps = kRowThreads<kPieces> / 32;
  // Alternating for even and odd rows, so that a warp may begin a row while others finish the
  // previous one.
  __shared__ float run_sums[2][kWarps * kPieces];
  __shared__ Span<T, kSymmetric> spans[2][kWarps];
  if (p.start.early) pdl_launch_dependents();  // it loads its weights meanwhile
  pdl_wait_and_launch_dependents();
  QuantizeProblem const& q = p.problem;
  int const first = threadIdx.x, step = blockDim.x, runs = (p.pieces + 31) / 32;
  void const* const other_rows = kNorm ? q.residual : q.up;
  int64_t const other_stride = kNorm ? q.residual_stride : q.up_stride;
  Columns<T> x[kPieces], other[kTwo ? kPieces : 1], weight[kNorm ? kPieces : 1];
  auto const load_row = [&](int row) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      int const column = (first + i * step) * kLaneColumns;
      load(x[i], q, q.x, q.x_stride, row, column, nullptr, p.cached);
      if (kTwo && other_rows)
        load(other[i], q, other_rows, other_stride, row, column, nullptr, p.cached);
    }
  };
  load_row(blockIdx.x);
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      load(weight[i], q, q.norm_weight, 0, 0, (first + i * step) * kLaneColumns, nullptr);
  }
  for (int row = blockIdx.x, odd = 0; row < q.m; row += gridDim.x, odd ^= 1) {
    Columns<T> c[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      c[i] = x[i];
      if constexpr (kFunction == Function::kSiluMul) silu_mul(c[i], other[i], q.x_type);
      if (kNorm && other_rows) c[i].add(other[i], q.x_type);
    }
    if (row + int(gridDim.x) < q.m) load_row(row + gridDim.x);
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        int const piece = first + i * step;
        if (q.sum) store(c[i], q, q.sum, int64_t(row) * q.k, piece * kLaneColumns);
        float sum = sum_of_lanes(sum_of_squares(c[i]));
        if (first % 32 == 0) run_sums[odd][piece / 32] = sum;
      }
      __syncthreads();
      float const factor = norm_factor(run_sums[odd], runs, q);
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        normalize(c[i], weight[i], factor, q.k - (first + i * step) * kLaneColumns, q.x_type);
    }
    Span<T, kSymmetric> x_row;
    if (q.out.block == -1) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) x_row.add(c[i]);
      share_with_block(x_row, spans[odd]);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      quantize_piece<kFunction == Function::kNone>(p, row, first + i * step, c[i], x_row);
  }
}

// A few rows of one scale each, by clusters: a row is divided among as many blocks as keep it in
// registers, and all of them receive the ranges of all.
constexpr int kPartThreads = 128, kPartPieces = 2, kMostParts = 8;  // rows of 32768 columns

// Blocks that fit on an SM together with two of wgmma_decode.cu: 40 registers a thread.
template <class T, bool kSymmetric>
__global__ void __launch_bounds__(kPartThreads, 12)
    quantize_row_parts(__grid_constant__ Params const p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kWarps = kPartThreads / 32;
  __shared__ Span<T, kSymmetric> spans[kMostParts * kWarps];
  if (p.start.early) pdl_launch_dependents();  // it loads its weights meanwhile
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();  // all blocks have started and can be written to
  pdl_wait_and_launch_dependents();
  QuantizeProblem const& q = p.problem;
  int const row = blockIdx.y, first = blockIdx.x * (kPartThreads * kPartPieces) + threadIdx.x,
            lane = threadIdx.x % 32;
  Columns<T> c[kPartPieces];
  Span<T, kSymmetric> span;
#pragma unroll
  for (int i = 0; i < kPartPieces; ++i)
    load(c[i], q, q.x, q.x_stride, row, (first + i * kPartThreads) * kLaneColumns, nullptr);
#pragma unroll
  for (int i = 0; i < kPartPieces; ++i) span.add(c[i]);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) span.add(span.of_lane(distance));
  if (lane < int(gridDim.x)) {
    uint32_t const to = cute::cast_smem_ptr_to_uint(spans + blockIdx.x * kWarps + threadIdx.x / 32);
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cute::set_block_rank(to, lane)),
                 "r"(reinterpret_cast<uint32_t const&>(span))
                 : "memory");
  }
  cute::cluster_arrive();
  cute::cluster_wait();
  for (int i = 0; i < int(gridDim.x) * kWarps; ++i) span.add(spans[i]);
#pragma unroll
  for (int i = 0; i < kPartPieces; ++i)
    quantize_piece<false>(p, row, first + i * kPartThreads, c[i], span);
#endif
}

template <bool kSymmetric, Function kFunction>
__global__ void __launch_bounds__(kAnyThreads, 4)
    quantize_any_rows(__grid_constant__ Params const p) {
  extern __shared__ float run_sums[];
  __shared__ Span<float, kSymmetric> spans[kAnyThreads / 32];
  if (p.start.early) pdl_launch_dependents();  // it loads its weights meanwhile
  pdl_wait_and_launch_dependents();
  QuantizeProblem const& q = p.problem;
  int const row = blockIdx.x, runs = (p.pieces + 31) / 32;
  float factor = 0.0f;
  if constexpr (kFunction == Function::kRmsNorm) {
    for (int piece = threadIdx.x; piece < runs * 32; piece += kAnyThreads) {
      Columns<float> c, residual;
      load(c, q, q.x, q.x_stride, row, piece * kLaneColumns, nullptr);
      if (q.residual) {
        load(residual, q, q.residual, q.residual_stride, row, piece * kLaneColumns, nullptr);
        c.add(residual, q.x_type);
        store(c, q, q.sum, int64_t(row) * q.k, piece * kLaneColumns);
      }
      float sum = sum_of_lanes(sum_of_squares(c));
      if (threadIdx.x % 32 == 0) run_sums[piece / 32] = sum;
    }
    __syncthreads();
    factor = norm_factor(run_sums, runs, q);
  }
  auto const values = [&](int piece) {
    Columns<float> c, other;
    int const column = piece * kLaneColumns;
    if constexpr (kFunction == Function::kRmsNorm) {
      load(c, q, q.sum ? q.sum : q.x, q.sum ? q.k : q.x_stride, row, column, q.perm);
      load(other, q, q.norm_weight, 0, 0, column, q.perm);
      normalize(c, other, factor, q.k - column, q.x_type);
    } else {
      load(c, q, q.x, q.x_stride, row, column, q.perm);
      if constexpr (kFunction == Function::kSiluMul) {
        load(other, q, q.up, q.up_stride, row, column, q.perm);
        silu_mul(c, other, q.x_type);
      }
    }
    return c;
  };
  Span<float, kSymmetric> x_row;
  if (q.out.block == -1) {
    for (int piece = threadIdx.x; piece < p.pieces; piece += kAnyThreads) x_row.add(values(piece));
    share_with_block(x_row, spans);
  }
  for (int piece = threadIdx.x; piece < runs * 32; piece += kAnyThreads)
    quantize_piece<kFunction == Function::kNone>(p, row, piece, values(piece), x_row);
}

// ---- the range of all x

template <class T>
constexpr int kRangeBlocks = std::is_same_v<T, float> ? 4 : 8;  // of an SM

struct RangeParams : Params {
  cutlass::FastDivmodU64 row_pieces;
};

// A thread has two pieces at a time, so that enough of x is on its way.
template <class T, bool kSymmetric>
__global__ void __launch_bounds__(kAnyThreads, kRangeBlocks<T>)
    find_range(__grid_constant__ RangeParams const p) {
  __shared__ Span<T, kSymmetric> spans[kAnyThreads / 32];
  pdl_wait_and_launch_dependents();
  QuantizeProblem const& q = p.problem;
  Span<T, kSymmetric> span;
  int64_t const step = int64_t(gridDim.x) * kAnyThreads, total = int64_t(q.m) * p.pieces;
  for (int64_t i = int64_t(blockIdx.x) * kAnyThreads + threadIdx.x; i < total; i += 2 * step) {
    Columns<T> c[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint64_t const number = i + j * step, row = p.row_pieces.divide(number);
      int const column = int(p.row_pieces.modulus(row, number)) * kLaneColumns;
      bool const exists = int64_t(number) < total;
      load(c[j], q, q.x, q.x_stride, exists ? int(row) : 0, exists ? column : q.k, q.perm,
           p.cached);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) span.add(c[j]);
  }
  share_with_block(span, spans);
  if (threadIdx.x) return;
  // Floats that are not negative are ordered as their bits are, and NaN comes last.
  Range<kSymmetric> const range = span.range();
  if (!kSymmetric) atomicMax(q.range, __float_as_uint(fabsf(range.low)));
  atomicMax(q.range + 1, __float_as_uint(fabsf(range.high)));
}

// ---- launch

// A grid of few blocks requests shared memory that it does not use, so that its blocks spread over
// the GPU. They start while the previous kernel still runs; without that memory they would all be
// placed on the first SMs that become free, and share the bandwidth of those. Up to kDecodeBlockM
// rows of x, where two blocks of a decode kernel must fit on an SM together with a block of the
// quantiser, this is done only if most SMs get a block. For more rows of x a quarter of the memory
// is requested, which leaves room for two blocks of mma_gemm_a8; with half, some blocks for 24 rows
// would wait for others to end.
Status launch_spread(void (*kernel)(Params), dim3 grid, dim3 threads, Stream stream,
                     Params const& p) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  constexpr int kFew = 8;  // for each SM
  int64_t const blocks = int64_t(grid.x) * grid.y * grid.z;
  int64_t const each = (blocks + device.multiprocessors - 1) / device.multiprocessors;
  bool const few = p.problem.m <= kDecodeBlockM;
  int const unused = int(device.shared_memory / std::max<int64_t>(each + 1, few ? 0 : 4));
  bool const spread = p.start.spread && device.architecture >= 90 && each <= kFew &&
                      (!few || 2 * blocks >= device.multiprocessors);
  return launch(kernel, grid, threads, spread ? unused : 0, stream, p);
}

bool starts_on_16_bytes(void const* data, int64_t stride, int element) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * element % 16 == 0;
}

template <class T, bool kSymmetric, Function kFunction>
Status launch_blocks(Params const& p, Stream stream) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  // A thread block has whole blocks of columns, and several rows where rows are short. With few
  // rows of x, which the product waits for, it has at most an SM's share of all columns.
  int const groups = (p.problem.m + kBlockRows - 1) / kBlockRows,
            share = p.pieces * groups / device.multiprocessors;
  int const threads = p.problem.m > kDecodeBlockM
                          ? kBlockThreads
                          : std::clamp((share + 7) / 8 * 8, kLeastThreads, kBlockThreads);
  if (p.problem.out.zero_values) {
    int const y = std::min(groups, kMaxGridY), z = (groups + kMaxGridY - 1) / kMaxGridY;
    dim3 const grid((p.pieces + kZeroRowThreads - 1) / kZeroRowThreads, y, z);
    return launch_spread(quantize_blocks<T, kSymmetric, kFunction>, grid, dim3(kZeroRowThreads),
                         stream, p);
  }
  int const chunks = (p.pieces + threads - 1) / threads;
  bool const row_ranges = p.problem.out.block == -1 && !p.problem.range;
  int const lanes = row_ranges ? 1 << p.log2_lanes : 8;  // that share a thread block
  int const wide = (p.pieces + chunks * lanes - 1) / (chunks * lanes) * lanes,
            high = std::clamp(threads / wide, 1, groups);
  int const y = (groups + high - 1) / high, z = (y + kMaxGridY - 1) / kMaxGridY;
  dim3 const grid((p.pieces + wide - 1) / wide, std::min(y, kMaxGridY), z);
  return launch_spread(quantize_blocks<T, kSymmetric, kFunction>, grid, dim3(wide, high), stream,
                       p);
}

template <class T, bool kSymmetric>
Status launch_row_parts(Params const& p, Stream stream) {
  int const parts = (p.pieces + kPartThreads * kPartPieces - 1) / (kPartThreads * kPartPieces);
  dim3 const grid(parts, p.problem.m);
  return launch_shape(quantize_row_parts<T, kSymmetric>, {grid, dim3(kPartThreads), parts}, stream,
                      p);
}

template <class T, bool kSymmetric, Function kFunction, int kPieces>
Status launch_rows(Params const& p, Stream stream) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  int const threads = ((p.pieces + kPieces - 1) / kPieces + 31) / 32 * 32;
  // As many CTAs as run at a time; each quantises further rows in turn.
  int const blocks = std::min(p.problem.m, device.multiprocessors * std::max(1, 1024 / threads));
  return launch_spread(quantize_rows<T, kSymmetric, kFunction, kPieces>, dim3(blocks),
                       dim3(threads), stream, p);
}

template <bool kSymmetric, Function kFunction>
Status launch_any_rows(Params const& p, Stream stream) {
  int const shared =
      kFunction == Function::kRmsNorm ? (p.pieces + 31) / 32 * int(sizeof(float)) : 0;
  return launch(quantize_any_rows<kSymmetric, kFunction>, dim3(p.problem.m), dim3(kAnyThreads),
                shared, stream, p);
}

template <class T, bool kSymmetric, Function kFunction>
Status launch_function(Params const& p, Stream stream) {
  if constexpr (kFunction != Function::kRmsNorm) {
    if (p.problem.out.block != -1 || p.problem.range)
      return launch_blocks<T, kSymmetric, kFunction>(p, stream);
    // Many rows that a warp can hold are treated as blocks of a power-of-two number of lanes.
    if (p.pieces <= 32 && p.problem.m > kDecodeBlockM) {
      Params lanes = p;
      lanes.log2_lanes = 3;
      while (1 << lanes.log2_lanes < p.pieces) ++lanes.log2_lanes;
      return launch_blocks<T, kSymmetric, kFunction>(lanes, stream);
    }
  }
  if constexpr (!std::is_same_v<T, float>) {
    if constexpr (kFunction == Function::kNone) {
      Device device;
      if (Status status = current_device(&device); !status.ok()) return status;
      bool const fits =
          p.pieces <= kMostParts * kPartThreads * kPartPieces && !p.problem.out.upcast;
      if (device.architecture >= 90 && p.problem.m <= kDecodeBlockM && fits)
        return launch_row_parts<T, kSymmetric>(p, stream);
    }
    if (p.pieces <= kRowThreads<1>) return launch_rows<T, kSymmetric, kFunction, 1>(p, stream);
    if constexpr (kFunction == Function::kNone) {
      if (p.pieces <= kRowThreads<4> * 4)
        return launch_rows<T, kSymmetric, kFunction, 4>(p, stream);
    }
  }
  return launch_any_rows<kSymmetric, kFunction>(p, stream);
}

template <class T, bool kSymmetric>
Status launch_typed(Params const& p, Stream stream) {
  if (p.problem.norm_weight) return launch_function<T, kSymmetric, Function::kRmsNorm>(p, stream);
  if (p.problem.up) return launch_function<T, kSymmetric, Function::kSiluMul>(p, stream);
  return launch_function<T, kSymmetric, Function::kNone>(p, stream);
}

}  // namespace

namespace {

// The kernels' parameters, and whether rows of x are read 16 bytes at a time in its type.
std::pair<Params, bool> parameters(QuantizeProblem const& q, QuantizerStart start) {
  int const block = q.out.block, element = bytes_of(q.x_type);
  bool const streamed = int64_t(q.m) * q.k * element > kStreamedBytes;
  int const log2_lanes = block == 16    ? 0
                         : block == 32  ? 1
                         : block == 64  ? 2
                         : block == 128 ? 3
                                        : 31;
  bool const fast =
      element == 2 && !q.perm && q.k % 8 == 0 && starts_on_16_bytes(q.x, q.x_stride, element) &&
      starts_on_16_bytes(q.up, q.up_stride, element) &&
      starts_on_16_bytes(q.residual, q.residual_stride, element) &&
      starts_on_16_bytes(q.sum, q.k, element) && starts_on_16_bytes(q.norm_weight, 0, element);
  return {{q, int(padded_k(q.k) / kLaneColumns), log2_lanes, start,
           streamed ? cuda::access_property::streaming{} : cuda::access_property{}},
          fast};
}

// f(T(), whether there are no zero points): the kernels' types.
template <class F>
Status visit(Params const& p, bool fast, bool symmetric, F const& f) {
  auto const typed = [&](auto type) {
    return symmetric ? f(type, std::true_type()) : f(type, std::false_type());
  };
  if (!fast) return typed(float());
  return p.problem.x_type == DataType::kFloat16 ? typed(__half()) : typed(__nv_bfloat16());
}

// Rows without gaps between them as rows of kKPerTile columns, where these are whole: the range of
// all x does not depend on where its rows end, nor on the order of columns.
QuantizeProblem without_rows(QuantizeProblem q) {
  int64_t const rows = int64_t(q.m) * q.k / kKPerTile;
  if (q.x_stride != q.k || int64_t(q.m) * q.k % kKPerTile || rows > INT32_MAX) return q;
  q.m = int(rows), q.k = kKPerTile, q.x_stride = q.k, q.perm = nullptr;
  return q;
}

template <class T, bool kSymmetric>
Status launch_range(Params const& params, Stream stream) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  RangeParams p{params, cutlass::FastDivmodU64(params.pieces)};
  cudaError_t const error =
      cudaMemsetAsync(p.problem.range, 0, 2 * sizeof(uint32_t), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return cuda_error("cudaMemsetAsync", error);
  p.cached = cuda::access_property{};  // the quantiser reads x again
  int64_t const blocks = (int64_t(p.problem.m) * p.pieces + kAnyThreads - 1) / kAnyThreads;
  int const grid = int(std::min<int64_t>(blocks, kRangeBlocks<T> * device.multiprocessors));
  return launch(find_range<T, kSymmetric>, dim3(grid), dim3(kAnyThreads), 0, stream, p);
}

}  // namespace

Status launch_find_range(QuantizeProblem const& problem, bool symmetric, Stream stream) {
  auto const [p, fast] = parameters(without_rows(problem), {});
  return visit(p, fast, symmetric, [&, &p = p](auto type, auto is_symmetric) {
    return launch_range<decltype(type), is_symmetric>(p, stream);
  });
}

Status launch_quantize_codes(QuantizeProblem const& problem, int columns, bool symmetric,
                             Stream stream) {
  bool const whole = columns == problem.k;
  auto [p, fast] = parameters(whole ? without_rows(problem) : problem, {});
  p.pieces = (whole ? p.problem.k : columns) / kLaneColumns;
  return visit(p, fast, symmetric, [&, &p = p](auto type, auto is_symmetric) {
    return launch_blocks<decltype(type), is_symmetric, Function::kNone>(p, stream);
  });
}

Status launch_quantize_activations(QuantizeProblem const& q, Stream stream, QuantizerStart start) {
  auto const [p, fast] = parameters(q, start);
  return visit(p, fast, !q.out.zeros, [&, &p = p](auto type, auto is_symmetric) {
    return launch_typed<decltype(type), is_symmetric>(p, stream);
  });
}

}  // namespace cutlass_ops
