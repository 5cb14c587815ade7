// 4-bit integers: value = scale * (code - zero point), or scale * code + offset.
#pragma once

#include "device/decode.cuh"

namespace cutlass_ops::formats {

struct Int4 {
  static constexpr int kBits = 4;
  static constexpr int kTableBytes = 0;    // of a look-up table in shared memory
  static constexpr bool kIntegers = true;  // they may have zero points or offsets, and x of int8

  template <class Element>
  using Decoder = decode::ToFloat<kBits, Element>;

  // Codes minus zero points of a thread's rows g and g + 8, exact in Element (__half
  // or __nv_bfloat16).
  template <class Element>
  struct Unscaled {
    static constexpr int kWords = Decoder<Element>::kWords;  // 32-bit words of codes in 16 columns
    decode::RowConstants zeros;

    // `packed`: the centred zero points of rows g and g + 8, one a byte.
    __device__ __forceinline__ explicit Unscaled(uint32_t packed)
        : zeros(Decoder<Element>::zero_constants(int(int8_t(packed)), int(int8_t(packed >> 8)))) {}
    __device__ __forceinline__ void fragment(uint32_t const* words, uint32_t,
                                             uint32_t (&out)[4]) const {
      Decoder<Element>::fragment(words, zeros, out);
    }
  };

  // Of a centred code, unscaled.
  static __device__ __forceinline__ float value(int code, int zero, float const*) {
    return float(code - zero);
  }
};

}  // namespace cutlass_ops::formats
