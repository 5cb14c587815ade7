// 8-bit floats: a sign, 4 bits of exponent of bias 7, 3 of mantissa (e4m3): value = scale * float.
// The codes that are no number, 0x7f and 0xff, are in no packed weight; here they are 480 and -480.
//
// Moved to the sign, exponent and mantissa of an fp16, the bits of such a float are its value over
// 2^(15 - 7); of a bf16, over 2^(127 - 7); subnormal ones too. So one exact multiplication gives
// the value. Codes are stored with their sign bit inverted (layout.h): the factor is negative.
//
// Worked example, fp16, word[0] = 0x0000'38b9 (byte 0: stored 0xb9, the float 0x39 = 1.125; byte 1:
// stored 0x38, the float 0xb8 = -1):
//   out[0], bytes 0, 2: 0x8000'9c80 = -0x1.2p-8, times -2^8 = 1.125
//   out[2], bytes 1, 3: 0x0000'1c00 =  0x1p-8,   times -2^8 = -1
#pragma once

#include <cmath>

#include "cutlass_ops/format.h"
#include "formats/decode.cuh"
#ifdef __AVX2__
#include "formats/avx2_mantissa.h"
#endif

namespace cutlass_ops {
namespace formats {

struct E4m3 {
  static constexpr Format kFormat = Format::kE4m3;
  static constexpr char const *kName = "e4m3", *kCodes = "e4m3 codes";
  static constexpr int kBits = 8;
  static constexpr bool kIntegers = false, kZerosFitInt8 = false, kDecodes = false, kExact = false,
                        kCodebook = false;
  static constexpr int kTableBytes = 0;  // of a look-up table in shared memory

  // The unscaled value of a code that is not centred.
  static float host_value(int code, float const*) {
    int const exponent = code >> 3 & 15, mantissa = code & 7;
    float const magnitude =
        exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
    return code & 0x80 ? -magnitude : magnitude;
  }

  // Words in the order of decode::Int8Half. kMantissa: bits of the mantissa of fp16 or bf16.
  template <int kMantissa>
  CUTLASS_OPS_HD static void bits(uint32_t const* words, uint32_t (&out)[4]) {
    // from the upper byte of a half, whose bit 14 is the exponent's first
    constexpr int kExponentShift = 14 - (kMantissa + 3);
    constexpr uint32_t kNumber = decode::both_halves(0x7f00 >> kExponentShift),
                       kSign = decode::both_halves(0x8000);
    for (int row = 0; row < 2; ++row) {
      uint32_t const low = words[row] << 8, high = words[row];
      out[row] = decode::and_or(low, kSign, low >> kExponentShift & kNumber);
      out[row + 2] = decode::and_or(high, kSign, high >> kExponentShift & kNumber);
    }
  }

#ifdef __CUDACC__
  struct ToHalf {
    static constexpr int kWords = 2;  // 32-bit words of codes in 16 columns
    static constexpr float kUnit = 1.0f;

    __device__ __forceinline__ static decode::RowConstants zero_constants(int, int) { return {}; }
    __device__ __forceinline__ static void fragment(uint32_t const* words, decode::RowConstants,
                                                    uint32_t (&out)[4]) {
      using namespace decode::detail;
      E4m3::bits<10>(words, out);
#pragma unroll
      // -2^8
      for (uint32_t& v : out)
        v = as_bits(__hmul2(as_half2(v), as_half2(decode::both_halves(0xdc00))));
    }
  };

  struct ToBfloat16 {
    static constexpr int kWords = 2;
    static constexpr float kUnit = 1.0f;
    static constexpr int kBias = 0;

    // bits() and its unit: as decode::IntegerBfloat16's.
    CUTLASS_OPS_HD static constexpr float bits_unit(int) { return -0x1p-120f; }
    __device__ __forceinline__ static void bits(uint32_t const* words, uint32_t (&out)[4]) {
      E4m3::bits<7>(words, out);
    }
    __device__ __forceinline__ static decode::RowConstants zero_constants(int, int) { return {}; }
    __device__ __forceinline__ static void fragment(uint32_t const* words, decode::RowConstants,
                                                    uint32_t (&out)[4]) {
      using namespace decode::detail;
      bits(words, out);
#pragma unroll
      // -2^120
      for (uint32_t& v : out)
        v = as_bits(__hmul2(as_bfloat162(v), as_bfloat162(decode::both_halves(0xfb80))));
    }
  };

  template <class Element>
  using Decoder = decode::Chosen<Element, ToHalf, ToBfloat16>;

  template <class Element>
  struct Unscaled {
    using Decoder = E4m3::Decoder<Element>;
    static constexpr int kWords = Decoder::kWords;

    __device__ __forceinline__ explicit Unscaled(uint32_t = 0) {}
    __device__ __forceinline__ void fragment(uint32_t const* words, uint32_t,
                                             uint32_t (&out)[4]) const {
      Decoder::fragment(words, {}, out);
    }
  };

  // The value of a centred code.
  __device__ __forceinline__ static float value(int code, int, float const*) {
    return __fmul_rn(__uint_as_float(uint32_t(code & 0x80) << 24 | uint32_t(code & 0x7f) << 20),
                     -0x1p120f);
  }
#endif
};

}  // namespace formats

#ifdef __AVX2__
namespace {

template <>
struct Avx2Decoder<formats::E4m3> {
  template <class Product>
  explicit Avx2Decoder(Product const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256) const {
    if constexpr (kElement < 3) words = _mm256_slli_epi32(words, 24 - 8 * kElement);
    // Sign, exponent and mantissa are in the bits of fp32; its exponents are those of e4m3 plus
    // 120. Stored signs are inverted.
    __m256i const bits =
        _mm256_and_si256(_mm256_srai_epi32(words, 4), _mm256_set1_epi32(int(0x87f00000)));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(-0x1p120f));
  }
};

}  // namespace
#endif

}  // namespace cutlass_ops
