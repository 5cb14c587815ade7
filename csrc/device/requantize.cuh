// Requantises the int32 sums of a static int8 convolution: bias, zero points of x, scale, rounding,
// bounds. Each operation is rounded separately, so that every kernel has the reference's bits.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "device/quantize.cuh"
#include "device/scalar.cuh"
#include "dispatch/conv_int8.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

// The index of the scale of the weight's row n, and the scale.
__device__ __forceinline__ int scale_position(int n) {
  return n / kRowsPerPanel * kRowsPerPanel + group_row(n % kRowsPerPanel);
}
__device__ __forceinline__ float row_scale(ConvWeight const& w, int n) {
  return load_float(w.scales, w.scale_type, scale_position(n));
}

// The factor of channel n's sums: finite, so that no product is NaN. A factor that would be NaN
// counts as 0; an infinite one would take all sums but 0 to a limit, as the largest finite number
// does.
__device__ __forceinline__ float requantize_factor(ConvProblem const& p, float w_scale) {
  constexpr float kMost = 3.402823466e+38f;
  float const factor = __fdiv_rn(__fmul_rn(p.x_scale, w_scale), p.y_scale);
  return isnan(factor) ? 0.0f : fminf(fmaxf(factor, -kMost), kMost);
}

// The bias of channel n, in steps of x_scale * w_scale.
__device__ __forceinline__ int int32_bias(ConvProblem const& p, int n, float w_scale) {
  if (!p.bias) return 0;
  if (p.bias_int32) return __ldg(static_cast<int const*>(p.bias) + n);
  // The conversion saturates, and makes 0 of NaN.
  return __float2int_rn(
      __fdiv_rn(load_float(p.bias, p.bias_type, n), __fmul_rn(p.x_scale, w_scale)));
}

// Prefetch the operands of channel n for the functions above and below.
__device__ __forceinline__ void prefetch_channel(ConvProblem const& p, int n) {
  auto const prefetch = [](void const* base, int offset) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(static_cast<char const*>(base) + offset));
  };
  prefetch(p.weight.scales, scale_position(n) * bytes_of(p.weight.scale_type));
  if (p.bias) prefetch(p.bias, n * (p.bias_int32 ? 4 : bytes_of(p.bias_type)));
  if (p.x_zero_point != 0) prefetch(p.weight.sums, n * 4);
}

// Sums wrap, so they are unsigned.
__device__ __forceinline__ int wrapping_multiply(int a, int b) {
  return int(unsigned(a) * unsigned(b));
}
__device__ __forceinline__ int wrapping_add(int a, int b) { return int(unsigned(a) + unsigned(b)); }

// The bias minus what the zero point of x adds to the sums.
__device__ __forceinline__ int compensated_bias(ConvProblem const& p, int n, float w_scale) {
  int const bias = int32_bias(p, n, w_scale);
  if (p.x_zero_point == 0) return bias;
  return wrapping_add(bias, -wrapping_multiply(p.x_zero_point, __ldg(p.weight.sums + n)));
}

// The scale and the zero point of x.
struct XNumbers {
  float scale;
  int zero;
  XNumbers() = default;
  __device__ __forceinline__ explicit XNumbers(ConvParams const& p)
      : scale(p.problem.x_scale), zero(p.problem.x_zero_point) {
    if (!p.x_range) return;
    if (p.problem.x_symmetric) {
      scale = Quantizer<true>(given_range<true>(p.x_range)).scale;
    } else {
      Quantizer<false> const quantizer(given_range<false>(p.x_range));
      scale = quantizer.scale, zero = int(quantizer.zero);
    }
  }
};

// A value whose low byte is y.
__device__ __forceinline__ int requantize(ConvParams const& p, int acc, float factor) {
  // The sum with 1.5 * 2^23 is rounded to an integer, half to even, in the low bits. A conversion
  // instruction would take four times as long as the rest, as the one to float does.
  constexpr float kRound = 12582912.0f;
  float const value = fminf(fmaxf(__fmul_rn(__int2float_rn(acc), factor), p.low), p.high);
  return __float_as_int(__fadd_rn(value, kRound)) + p.problem.y_zero_point;
}

// One output.
__device__ __forceinline__ void store_output(ConvParams const& p, int64_t index, int acc,
                                             float factor) {
  if (p.problem.out_type == ConvOutput::kInt32) {
    static_cast<int*>(p.problem.out)[index] = acc;
  } else {
    static_cast<uint8_t*>(p.problem.out)[index] = uint8_t(requantize(p, acc, factor));
  }
}

// ---- of accumulators of MMAs, of which four lanes have two neighbouring channels each of every 8

// Factor and bias of an output channel.
struct ChannelVectors {
  float factor;
  int bias;
};

__device__ __forceinline__ ChannelVectors channel_vectors(ConvParams const& p, int n,
                                                          float w_scale) {
  return {requantize_factor(p.problem, w_scale), compensated_bias(p.problem, n, w_scale)};
}
// Where x was floats, whose bias is added to the scaled sums.
__device__ __forceinline__ float float_bias(ConvProblem const& p, int n) {
  return p.bias ? load_float(p.bias, p.bias_type, n) : 0.0f;
}
__device__ __forceinline__ ChannelVectors channel_vectors(ConvParams const& p, int n, float w_scale,
                                                          XNumbers const& x) {
  int const sum = x.zero ? __ldg(p.problem.weight.sums + n) : 0;
  return {__fmul_rn(x.scale, w_scale), -wrapping_multiply(x.zero, sum)};
}

// requantize() of two values, by fewer instructions: the low bytes of the halves of the result are
// the two y. Integers are clamped, and the zero point is added, in pairs of 16 bits. Conversions to
// 32 and then to 16 bits saturate, so values beyond them stay beyond the bounds.
__device__ __forceinline__ uint32_t requantize_two(ConvParams const& p, int first, int second,
                                                   float first_factor, float second_factor) {
  int const low = __float2int_rn(__fmul_rn(__int2float_rn(first), first_factor)),
            high = __float2int_rn(__fmul_rn(__int2float_rn(second), second_factor));
  uint32_t both;
  asm("cvt.pack.sat.s16.s32 %0, %1, %2;" : "=r"(both) : "r"(high), "r"(low));
  both = __vmins2(__vmaxs2(both, p.low_twice), p.high_twice);
  return __viaddmax_s16x2(both, p.zero_twice, 0x80008000u);  // the maximum with -2^15: the sum
}

// The low bytes of the halves of four groups of 8 channels -> 8 bytes of one, in lanes of fours:
// lane t has group t.
__device__ __forceinline__ uint2 exchange_pairs(uint32_t (&pairs)[4], int t) {
  uint32_t const even = __byte_perm(pairs[0], pairs[2], 0x6420),
                 odd = __byte_perm(pairs[1], pairs[3], 0x6420);
  uint32_t const own = t % 2 ? odd : even, other = __shfl_xor_sync(~0u, t % 2 ? even : odd, 1);
  // Groups t % 2 and t % 2 + 2, of lanes t & ~1 and t | 1.
  uint32_t const low = t % 2 ? 0x1054 : 0x5410, high = t % 2 ? 0x3276 : 0x7632;
  uint32_t const kept = __byte_perm(own, other, t < 2 ? low : high),
                 found = __shfl_xor_sync(~0u, __byte_perm(own, other, t < 2 ? high : low), 2);
  return t < 2 ? make_uint2(kept, found) : make_uint2(found, kept);
}

}  // namespace cutlass_ops
