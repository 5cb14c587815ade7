// 4-bit codes of 16 values (NF4, FP4 and others): value = scale * codebook[code].
#pragma once

#include "device/decode.cuh"

namespace cutlass_ops::formats {

struct Codebook {
  static constexpr int kBits = 4;
  static constexpr int kTableBytes = decode::Int4Codebook::kTableBytes;
  static constexpr bool kIntegers = false;

  template <class>
  using Decoder = decode::Int4Codebook;

  // Values of the code book, rounded to Element.
  template <class Element>
  struct Unscaled {
    static constexpr int kWords = decode::Int4Codebook::kWords;

    // The look-up table of a code book, by `threads` threads, which synchronise afterwards.
    static __device__ __forceinline__ void fill_table(uint8_t* table, float const* codebook,
                                                      int thread, int threads) {
      decode::Int4Codebook::fill<Element>(table, codebook, thread, threads);
    }

    __device__ __forceinline__ explicit Unscaled(uint32_t) {}
    // `table`: address of the lane's column of the look-up table.
    __device__ __forceinline__ void fragment(uint32_t const* words, uint32_t table,
                                             uint32_t (&out)[4]) const {
      uint32_t pairs[4];
      decode::Int4Codebook::look_up(words[0], table, pairs);
      decode::Int4Codebook::combine(pairs, out);
    }
  };

  // Of a centred code, unscaled; `codebook` by its four bits.
  static __device__ __forceinline__ float value(int code, int, float const* codebook) {
    return codebook[code & 15];
  }
};

}  // namespace cutlass_ops::formats
