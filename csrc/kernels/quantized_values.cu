// The values that int8 codes of floats stand for, scale * (code - zero point), in the order of the
// floats. Another library multiplies these values where kernels here would multiply the codes of
// quantize_activations.cu; codes, scales and zero points are the same bits.
//
// 16-bit values of rows of whole pieces of 16 columns are that kernel's, which keeps a block in
// registers. Here some lanes share a run of columns with one scale: they find its range, then read
// it again from the cache.
#include <algorithm>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "device/epilogue.cuh"
#include "device/launch.cuh"
#include "device/quantize.cuh"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256, kVector = 8;

struct Params {
  QuantizedValues problem;
  int runs;        // of a row
  int log2_lanes;  // of a run
};

// kVectors: runs are of vectors of eight 16-bit floats, which start on 16 bytes.
template <bool kSymmetric, bool kVectors>
__global__ void __launch_bounds__(kThreads) round_to_codes(__grid_constant__ Params const p) {
  pdl_wait_and_launch_dependents();
  constexpr int kEach = kVectors ? kVector : 1;
  QuantizedValues const& q = p.problem;
  int64_t const thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, run = thread >> p.log2_lanes;
  int64_t const row = p.runs == 1 ? run : run / p.runs;
  int const lanes = 1 << p.log2_lanes, first = int(run - row * p.runs) * q.block;
  int const count = row < q.rows ? min(q.block, q.columns - first) / kEach : 0;
  int64_t const start = row * q.columns + first;
  auto const load = [&](int i, float (&v)[kEach]) {
    if constexpr (kVectors) {
      uint4 const four =
          reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(q.x) + start)[i];
      uint32_t const words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 const pair = floats_of(words[j], q.x_type);
        v[2 * j] = pair.x, v[2 * j + 1] = pair.y;
      }
    } else {
      v[0] = load_float(q.x, q.x_type, start + i);
    }
  };
  int const lane = int(thread) & (lanes - 1);
  Range<kSymmetric> range{};
  if (q.range) {
    range = given_range<kSymmetric>(q.range);
  } else {
#pragma unroll 2
    for (int i = lane; i < count; i += lanes) {
      float v[kEach];
      load(i, v);
#pragma unroll
      for (float value : v) range.add(value);
    }
    range.share(lanes);
  }
  Quantizer<kSymmetric> const quantizer(range);
#pragma unroll 2
  for (int i = lane; i < count; i += lanes) {
    float v[kEach];
    load(i, v);
#pragma unroll
    for (float& value : v) value = __fmul_rn(quantizer.scale, quantizer.value(value));
    if constexpr (!kVectors) {
      store_float(q.out, q.out_type, start + i, v[0]);
    } else if (q.out_type == DataType::kFloat32) {
      float4* const to =
          reinterpret_cast<float4*>(static_cast<float*>(q.out) + start + i * kVector);
      to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
      bool const bfloat = q.out_type == DataType::kBFloat16;
      reinterpret_cast<uint4*>(static_cast<uint16_t*>(q.out) + start)[i] =
          make_uint4(to_half_bits(v[0], v[1], bfloat), to_half_bits(v[2], v[3], bfloat),
                     to_half_bits(v[4], v[5], bfloat), to_half_bits(v[6], v[7], bfloat));
    }
  }
}

}  // namespace

Status launch_quantized_values(QuantizedValues const& problem, Stream stream) {
  Params p{problem, 1, 0};
  QuantizedValues& q = p.problem;
  if (q.block == -1 || q.range) q.block = q.columns;
  bool const vectors = bytes_of(q.x_type) == 2 && q.columns % kVector == 0 &&
                       reinterpret_cast<uintptr_t>(q.x) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(q.out) % 16 == 0;
  constexpr int kPiece = 2 * kVector, kMostPieces = 32, kFewRows = 16;
  bool const in_blocks =
      q.range || problem.block != -1 || (q.rows > kFewRows && q.columns <= kMostPieces * kPiece);
  if (vectors && in_blocks && q.columns % kPiece == 0 && bytes_of(q.out_type) == 2)
    return launch_quantized_pieces(problem, stream);
  // A lane of scalars has four, where a warp has enough.
  int const pieces = int(ceil_div(std::min(q.block, q.columns), vectors ? kVector : 4));
  while (p.log2_lanes < 5 && 1 << p.log2_lanes < pieces) ++p.log2_lanes;
  p.runs = int(ceil_div(q.columns, q.block));
  int64_t const blocks = ceil_div((q.rows * p.runs) << p.log2_lanes, int64_t(kThreads));
  auto const kernel =
      vectors ? (q.symmetric ? round_to_codes<true, true> : round_to_codes<false, true>)
              : (q.symmetric ? round_to_codes<true, false> : round_to_codes<false, false>);
  return launch(kernel, dim3(unsigned(blocks)), kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
