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
#include "kernels/quantize_activations_kernels.cuh"

namespace cutlass_ops {
namespace {

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
  // Twice as many where half of them or more have no columns (docs/tuning-notes.md).
  bool const sparse = kFunction == Function::kNone && 2 * p.problem.k <= p.pieces * kLaneColumns;
  int const threads = p.problem.m > kDecodeBlockM
                          ? (sparse ? 2 : 1) * kBlockThreads
                          : std::clamp((share + 7) / 8 * 8, kLeastThreads, kBlockThreads);
  if (p.problem.out.zero_values) {
    int const y = std::min(groups, kMaxGridY), z = (groups + kMaxGridY - 1) / kMaxGridY;
    dim3 const grid((p.pieces + kZeroRowThreads - 1) / kZeroRowThreads, y, z);
    return launch_spread(quantize_blocks<T, kSymmetric, kFunction>, grid, dim3(kZeroRowThreads),
                         stream, p);
  }
  int const chunks = (p.pieces + threads - 1) / threads;
  bool const row_ranges = p.problem.out.block == -1 && !p.problem.range;
  // That share a thread block. Values alone have no padding.
  int const lanes =
      row_ranges || (!p.problem.out.scales && p.log2_lanes < 3) ? 1 << p.log2_lanes : 8;
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

Status launch_quantized_pieces(QuantizedValues const& v, Stream stream) {
  QuantizeProblem q;
  q.x = v.x, q.x_type = v.x_type, q.m = int(v.rows), q.k = v.columns, q.x_stride = v.columns;
  q.out.block = v.range ? -1 : v.block, q.range = v.range;
  q.out.upcast = v.out, q.out.upcast_type = v.out_type, q.out.upcast_row_scales = true;
  auto [p, fast] = parameters(q, {});
  p.pieces = q.k / kLaneColumns;
  return visit(p, fast, v.symmetric, [&, &p = p](auto type, auto is_symmetric) {
    return launch_function<decltype(type), is_symmetric, Function::kNone>(p, stream);
  });
}

Status launch_quantize_activations(QuantizeProblem const& q, Stream stream, QuantizerStart start) {
  auto const [p, fast] = parameters(q, start);
  return visit(p, fast, !q.out.zeros, [&, &p = p](auto type, auto is_symmetric) {
    return launch_typed<decltype(type), is_symmetric>(p, stream);
  });
}

}  // namespace cutlass_ops
