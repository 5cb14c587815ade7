// AWQ weights as AutoAWQ stores them, not reordered: W transposed, [K][N], eight columns a word along N.
//
//   dequantise   a thread takes a word of eight codes to one 16-byte store, and keeps its columns' scales and zero points for the rows of a
//                group that it walks along: only codes are read once a store
//
// (code - zero) is exact in fp16 and bf16, and the product with the scale is rounded once. It is an FMA with +0, so that zero times a
// negative scale is +0, as the kernels have it that people use today.
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// The eight codes of a word, columns in order.
__device__ __forceinline__ void convert(uint32_t word, uint32_t (&out)[4], __half) {
  decode::to_half<decode::NibblesHalf<false, true>>(word, out);
}
__device__ __forceinline__ void convert(uint32_t word, uint32_t (&out)[4], __nv_bfloat16) {
  decode::to_bfloat16<decode::NibblesBfloat16<false, true>>(word, out);
}

struct DequantizeParams {
  AwqWeight weight;
  void* out;
  int words;       // of a row
  int group_rows;  // rows of a group
  int row_tiles;   // of kRows rows
};

// kRows rows of K a thread: all in one group where a group has a multiple of them.
template <class T, int kRows>
__global__ void __launch_bounds__(kThreads) dequantize_awq_rows(__grid_constant__ DequantizeParams const p) {
  wait_for_predecessor();
  AwqWeight const& w = p.weight;
  int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int word = int(index % p.words), first = int(index / p.words) * kRows;
  if (first >= w.k) return;
  uint32_t codes[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r < w.k) codes[r] = __ldcs(w.codes + int64_t(first + r) * p.words + word);
  uint32_t const nothing = 0;
  int now = -1;
  uint32_t zeros[4];
  uint4 scales = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= w.k) break;
    if (int group = (first + r) / p.group_rows; group != now) {
      now = group;
      convert(__ldg(w.zeros + int64_t(group) * p.words + word), zeros, T());
      scales = __ldg(reinterpret_cast<uint4 const*>(static_cast<T const*>(w.scales) + int64_t(group) * w.n) + word);
    }
    uint32_t values[4];
    convert(codes[r], values, T());
    uint32_t const scale[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair<T> integer = __hsub2(reinterpret_cast<Pair<T> const&>(values[i]), reinterpret_cast<Pair<T> const&>(zeros[i]));
      Pair<T> value = __hfma2(integer, reinterpret_cast<Pair<T> const&>(scale[i]), reinterpret_cast<Pair<T> const&>(nothing));
      values[i] = reinterpret_cast<uint32_t const&>(value);
    }
    __stcs(reinterpret_cast<uint4*>(static_cast<T*>(p.out) + int64_t(first + r) * w.n) + word,
           make_uint4(values[0], values[1], values[2], values[3]));
  }
}

template <class T, int kRows>
Status launch_rows(AwqWeight const& w, void* out, Stream stream) {
  DequantizeParams p{w, out, w.n / 8, w.k / w.groups, (w.k + kRows - 1) / kRows};
  int64_t blocks = (int64_t(p.words) * p.row_tiles + kThreads - 1) / kThreads;
  return launch(dequantize_awq_rows<T, kRows>, dim3(unsigned(blocks)), kThreads, 0, stream, p);
}

template <class T>
Status launch_type(AwqWeight const& w, void* out, Stream stream) {
  // Small weights: more threads rather than more work for each.
  return int64_t(w.k) * (w.n / 8) < (1 << 20) ? launch_rows<T, 2>(w, out, stream) : launch_rows<T, 8>(w, out, stream);
}

}  // namespace

Status launch_dequantize_awq(AwqWeight const& weight, void* out, Stream stream) {
  return weight.type == DataType::kFloat16 ? launch_type<__half>(weight, out, stream)
                                           : launch_type<__nv_bfloat16>(weight, out, stream);
}

}  // namespace cutlass_ops
