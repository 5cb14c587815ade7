// The quantiser's kernels (quantize_activations.cu).
#pragma once

#include "kernels/quantize_activations_values.cuh"

namespace cutlass_ops {
namespace {

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

}  // namespace
}  // namespace cutlass_ops
