// Integers of 2, 4 and 8 bits: value = scale * (code - zero point), or scale * code + offset.
#pragma once

#include "cutlass_ops/format.h"
#include "formats/decode.cuh"
#include "formats/width.h"
#ifdef __AVX2__
#include "formats/avx2_mantissa.h"
#endif

namespace cutlass_ops {
namespace formats {

// The common part of all. Format: the class that derives from it.
template <class Format, int kBits_>
struct Integers {
  static constexpr int kBits = kBits_;
  static constexpr bool kIntegers = true, kCodebook = false;
  static constexpr int kTableBytes = 0;  // of a look-up table in shared memory

#ifdef __CUDACC__
  // Codes minus zero points of a thread's rows g and g + 8, in units of Decoder::kUnit, exact in
  // Element (__half or __nv_bfloat16).
  template <class Element>
  struct Unscaled {
    using Decoder = typename Format::template Decoder<Element>;
    static constexpr int kWords = Decoder::kWords;  // 32-bit words of codes in 16 columns
    decode::RowConstants zeros;

    __device__ __forceinline__ Unscaled() : zeros(Decoder::no_zeros()) {}
    // `packed`: the centred zero points of rows g and g + 8, one a byte.
    __device__ __forceinline__ explicit Unscaled(uint32_t packed)
        : zeros(Decoder::zero_constants(int(int8_t(packed)), int(int8_t(packed >> 8)))) {}
    __device__ __forceinline__ void fragment(uint32_t const* words, uint32_t,
                                             uint32_t (&out)[4]) const {
      Decoder::fragment(words, zeros, out);
    }
  };

  // The unscaled value of a centred code.
  static __device__ __forceinline__ float value(int code, int zero, float const*) {
    return float(code - zero);
  }
#endif
};

// Decoders (formats/decode.cuh):
//   Decoder         to 16-bit floats, less zero points, exact, in units of kUnit
//   BiasedDecoder   to subnormal fp16 with a bias, which the caller takes from sums
//   Int8Decoder     to int8, less zero points if kZeros and kZerosFitInt8
// kBiasFitsFloats: the sums of products with 16-bit x hold the bias. Those of 8 bits would be of
// products as large as 128 times x, and lose what small weights, or values of x of one sign, leave
// of them (an error of 1e-4 instead of 1e-7 was seen). Products of integers lose nothing.
struct Int4 : Integers<Int4, 4> {
  static constexpr Format kFormat = Format::kInt4;
  static constexpr char const *kName = "int4", *kCodes = "4-bit integers";
  static constexpr bool kDecodes = true, kExact = true, kZerosFitInt8 = true,
                        kBiasFitsFloats = true;
#ifdef __CUDACC__
  template <class Element>
  using Decoder = decode::Chosen<Element, decode::NibbleHalf<4>, decode::IntegerBfloat16<4>>;
#endif
  using BiasedDecoder = decode::Int4Subnormal;
  template <bool kZeros>
  using Int8Decoder = std::conditional_t<kZeros, decode::Int4MinusZeroInt8, decode::Int4Int8>;
};

struct Int8 : Integers<Int8, 8> {
  static constexpr Format kFormat = Format::kInt8;
  static constexpr char const *kName = "int8", *kCodes = "8-bit integers";
  static constexpr bool kDecodes = true, kExact = true, kZerosFitInt8 = false,
                        kBiasFitsFloats = false;
#ifdef __CUDACC__
  template <class Element>
  using Decoder = decode::Chosen<Element, decode::Int8Half, decode::IntegerBfloat16<8>>;
#endif
  using BiasedDecoder = decode::Int8Subnormal;
  template <bool kZeros>
  using Int8Decoder = decode::Int8Int8;
};

// Two a nibble: decoders take a word of a unit's first 64 columns, or such a word shifted by two
// bits (layout.h).
struct Int2 : Integers<Int2, 2> {
  static constexpr Format kFormat = Format::kInt2;
  static constexpr char const *kName = "int2", *kCodes = "2-bit integers";
  static constexpr bool kDecodes = true, kExact = false, kZerosFitInt8 = true,
                        kBiasFitsFloats = false;
#ifdef __CUDACC__
  template <class Element>
  using Decoder = decode::Chosen<Element, decode::NibbleHalf<2>, decode::IntegerBfloat16<2>>;
#endif
  template <bool kZeros>
  using Int8Decoder = std::conditional_t<kZeros, decode::Int2MinusZeroInt8, decode::Int2Int8>;
};

}  // namespace formats

#ifdef __AVX2__
namespace {

template <>
struct Avx2Decoder<formats::Int4> {
  template <class Product>
  explicit Avx2Decoder(Product const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256 zero) const {
    if constexpr (kElement == 3) words = _mm256_srli_epi32(words, 8);
    constexpr int kFirstBit = kElement == 3 ? 16 : 8 * kElement;
    return less<kFirstBit>(in_mantissa<kFirstBit, 4>(words), zero);
  }
};

template <>
struct Avx2Decoder<formats::Int8> {
  template <class Product>
  explicit Avx2Decoder(Product const&) {}
  template <int kElement>
  __m256 value(__m256i words, __m256 zero) const {
    if constexpr (kElement > 1) words = _mm256_srli_epi32(words, 16);
    constexpr int kFirstBit = 8 * (kElement % 2);
    return less<kFirstBit>(in_mantissa<kFirstBit, 8>(words), zero);
  }
};

}  // namespace
#endif

}  // namespace cutlass_ops
