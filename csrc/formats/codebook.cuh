// 4-bit codes of 16 values (NF4, FP4 and others): value = scale * codebook[code].
#pragma once

#include "cutlass_ops/format.h"
#include "formats/decode.cuh"
#ifdef __AVX2__
#include "formats/avx2_mantissa.h"
#endif

namespace cutlass_ops {
namespace formats {

struct Codebook {
  static constexpr Format kFormat = Format::kCodebook;
  static constexpr char const *kName = "codebook", *kCodes = "a code book";
  static constexpr int kBits = 4;
  static constexpr bool kIntegers = false, kZerosFitInt8 = false, kDecodes = false, kExact = false,
                        kCodebook = true;
  static constexpr int kTableBytes = decode::Int4Codebook::kTableBytes;

  // The unscaled value of a code that is not centred.
  static float host_value(int code, float const* codebook) { return codebook[code]; }

#ifdef __CUDACC__
  template <class>
  using Decoder = decode::Int4Codebook;

  // Values of the code book, rounded to Element.
  template <class Element>
  struct Unscaled {
    using Decoder = decode::Int4Codebook;
    static constexpr int kWords = Decoder::kWords;

    // The look-up table of a code book, by `threads` threads, which synchronise afterwards.
    static __device__ __forceinline__ void fill_table(uint8_t* table, float const* codebook,
                                                      int thread, int threads) {
      decode::Int4Codebook::fill<Element>(table, codebook, thread, threads);
    }

    __device__ __forceinline__ explicit Unscaled(uint32_t = 0) {}
    // `table`: address of the lane's column of the look-up table.
    __device__ __forceinline__ void fragment(uint32_t const* words, uint32_t table,
                                             uint32_t (&out)[4]) const {
      uint32_t pairs[4];
      decode::Int4Codebook::look_up(words[0], table, pairs);
      decode::Int4Codebook::combine(pairs, out);
    }
  };

  // The unscaled value of a centred code; `codebook` by its four bits.
  static __device__ __forceinline__ float value(int code, int, float const* codebook) {
    return codebook[code & 15];
  }
#endif
};

}  // namespace formats

#ifdef __AVX2__
namespace {

template <>
struct Avx2Decoder<formats::Codebook> {
  __m256 low, high;  // by stored codes: values of 8 .. 15, then of 0 .. 7
  template <class Product>
  explicit Avx2Decoder(Product const& p)
      : low(_mm256_loadu_ps(p.codebook + 8)), high(_mm256_loadu_ps(p.codebook)) {}
  template <int kElement>
  __m256 value(__m256i words, __m256) const {
    if constexpr (kElement > 0) words = _mm256_srli_epi32(words, 8 * kElement);
    __m256 const a = _mm256_permutevar8x32_ps(low, words),
                 b = _mm256_permutevar8x32_ps(high, words);
    return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(words, 28)));
  }
};

}  // namespace
#endif

}  // namespace cutlass_ops
