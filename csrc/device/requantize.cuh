// What becomes of the int32 sums of a static int8 convolution: bias, zero points of x, scale, rounding, bounds. Each operation is rounded by itself, so that
// every kernel finds the reference's bits.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/scalar.cuh"
#include "dispatch/problem.h"
#include "kernels/conv_int8.h"

namespace cutlass_ops {

// Where the scale of the weight's row n is, and the scale.
__device__ __forceinline__ int scale_position(int n) { return n / kRowsPerSlab * kRowsPerSlab + group_row(n % kRowsPerSlab); }
__device__ __forceinline__ float row_scale(ConvWeight const& w, int n) {
  return load_float(w.scales, w.scale_type, scale_position(n));
}

// The factor of channel n's sums.
__device__ __forceinline__ float requantize_factor(ConvProblem const& p, float w_scale) {
  return __fdiv_rn(__fmul_rn(p.x_scale, w_scale), p.y_scale);
}

// The bias of channel n, in steps of x_scale * w_scale.
__device__ __forceinline__ int int32_bias(ConvProblem const& p, int n, float w_scale) {
  if (!p.bias) return 0;
  if (p.bias_int32) return __ldg(static_cast<int const*>(p.bias) + n);
  // The conversion saturates, and makes 0 of NaN.
  return __float2int_rn(__fdiv_rn(load_float(p.bias, p.bias_type, n), __fmul_rn(p.x_scale, w_scale)));
}

// The sum of all codes of row n.
__device__ __forceinline__ int const* all_taps(ConvWeight const& w, int n) {
  return w.tap_sums + ((w.height + 1) * (w.width + 1) - 1) * w.n + n;
}

// Start loading what the functions above and below load for channel n.
__device__ __forceinline__ void prefetch_channel(ConvProblem const& p, int n) {
  auto const prefetch = [](void const* base, int offset) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(static_cast<char const*>(base) + offset));
  };
  prefetch(p.weight.scales, scale_position(n) * size_of(p.weight.scale_type));
  if (p.bias) prefetch(p.bias, n * (p.bias_int32 ? 4 : size_of(p.bias_type)));
  if (p.x_zero_point != 0) prefetch(all_taps(p.weight, n), 0);
}

// Sums wrap: unsigned, which may.
__device__ __forceinline__ int wrapping_multiply(int a, int b) { return int(unsigned(a) * unsigned(b)); }
__device__ __forceinline__ int wrapping_add(int a, int b) { return int(unsigned(a) + unsigned(b)); }

// The bias minus what the zero point of x adds to the sums of all taps.
__device__ __forceinline__ int compensated_bias(ConvProblem const& p, int n, float w_scale) {
  int const bias = int32_bias(p, n, w_scale);
  if (p.x_zero_point == 0) return bias;
  return wrapping_add(bias, -wrapping_multiply(p.x_zero_point, *all_taps(p.weight, n)));
}

// y, or its low byte if it is unsigned.
__device__ __forceinline__ int requantize(ConvParams const& p, int acc, float factor) {
  // As above, NaN counts as 0.
  int const rounded = __float2int_rn(__fmul_rn(__int2float_rn(acc), factor));
  return min(max(rounded, p.low), p.high) + p.problem.y_zero_point;
}

// The taps of one axis that lie inside of x, those from `first` to `end` - 1.
struct TapRange {
  int first, end;
  __device__ __forceinline__ TapRange(int start, int size, int taps, int dilation) {
    first = start >= 0 ? 0 : min(taps, (-start + dilation - 1) / dilation);
    end = start >= size ? first : max(first, min(taps, (size - 1 - start) / dilation + 1));
  }
};

// What compensated_bias() took too much from a pixel's sums: the codes of the taps outside of x.
struct BorderTaps {
  bool any = false;
  int end_end, first_end, end_first, first_first;  // of tap_sums: where the taps inside end and begin, along height and width

  __device__ __forceinline__ BorderTaps(ConvParams const& params, bool looks, int pixel) {
    if (!looks) return;
    ConvProblem const& p = params.problem;
    ConvWeight const& w = p.weight;
    int const row = pixel / params.out_width, column = pixel - row * params.out_width, line = row % params.out_height;
    TapRange const i(line * p.stride[0] - p.padding[0], p.height, w.height, p.dilation[0]);
    TapRange const j(column * p.stride[1] - p.padding[1], p.width, w.width, p.dilation[1]);
    any = i.end - i.first < w.height || j.end - j.first < w.width;
    auto const at = [&](int y, int x) { return (y * (w.width + 1) + x) * w.n; };
    end_end = at(i.end, j.end), first_end = at(i.first, j.end), end_first = at(i.end, j.first),
    first_first = at(i.first, j.first);
  }
  __device__ __forceinline__ int sum(ConvParams const& params, int n) const {
    ConvWeight const& w = params.problem.weight;
    int const* const sums = w.tap_sums + n;
    int const inside = sums[end_end] - sums[first_end] - sums[end_first] + sums[first_first];
    return *all_taps(w, n) - inside;
  }
};

// One output.
__device__ __forceinline__ void store_output(ConvParams const& p, int64_t index, int acc, float factor) {
  if (p.problem.out_type == ConvOutput::kInt32) {
    static_cast<int*>(p.problem.out)[index] = acc;
  } else {
    static_cast<uint8_t*>(p.problem.out)[index] = uint8_t(requantize(p, acc, factor));
  }
}

}  // namespace cutlass_ops
