// Words of 4-bit or 8-bit integers to pairs of fp16 or bf16, in plain or interleaved order, signed
// or unsigned. For tensors that are not in the packed order (formats/decode.cuh decodes packed
// ones).
//
// As there, a converter is pure 32-bit assembly (`bits`, host and device, tested exhaustively on
// the CPU) and one vector FMA with constants: an integer put into the mantissa of a power of two is
// that power plus the integer, in units of its last place. fp16: 0x6400 | u = 1024 + u and 0x6400 |
// u << 4 = 1024 + 16 u; bf16: 0x4300 | u = 128 + u. Signed (two's complement) integers become
// unsigned by inverting their sign bit, in the XOR that sets the exponent; the added constant is
// subtracted together with the power.
//
// Plain: element i is nibble or byte i of the word. Interleaved: element i is nibble [0, 4, 1, 5,
// 2, 6, 3, 7][i] (nibble i holds element [0, 2, 4, 6, 1, 3, 5, 7][i], AutoAWQ's order), or byte [0,
// 2, 1, 3][i], so that pairs stand sixteen bits apart.
#pragma once

#include "formats/decode.cuh"

namespace cutlass_ops::decode {

// 8 nibbles -> 4 pairs of fp16: pair i = fma(bits[i], factor(i), addend(i)).
//
// Worked example, w = 0x0000'00e3, interleaved, unsigned (elements 0 and 2 are 3 and
// 14, the others 0):
//   bits[0]: (w & 0x000f000f) ^ 0x64006400 = 0x6400'6403 = (1027, 1024);  * 1 - 1024 = (3, 0)
//   bits[1]: (w & 0x00f000f0) ^ 0x64006400 = 0x6400'64e0 = (1248, 1024);  / 16 - 64 = (14, 0)
// and plain, signed (element 0 is 3, element 1 is -2): byte 0 in both halves, 0x00e3'00e3,
//   bits[0]: (0x00e300e3 & 0x00f0000f) ^ 0x64806408 = 0x6460'640b = (1035, 1120); (* 1 - 1032, /
//   16 - 72) = (3, -2)
template <bool kSigned, bool kInterleaved>
struct NibblesHalf {
  static constexpr int kPairs = 4;

  CUTLASS_OPS_HD static void bits(uint32_t word, uint32_t (&out)[4]) {
    constexpr uint32_t kLow = kSigned ? 0x6408u : 0x6400u, kHigh = kSigned ? 0x6480u : 0x6400u;
    for (int i = 0; i < 4; ++i) {
      if (kInterleaved) {
        out[i] = i % 2 == 0 ? and_xor(word >> 4 * i, 0x000f000fu, both_halves(kLow))
                            : and_xor(word >> 4 * (i - 1), 0x00f000f0u, both_halves(kHigh));
      } else {
        out[i] = and_xor(permute_bytes(word, word, 0x1111u * uint32_t(i)), 0x00f0000fu,
                         kHigh << 16 | kLow);
      }
    }
  }

  // half2 of 1 or 1/16.
  CUTLASS_OPS_HD static constexpr uint32_t factor(int i) {
    return !kInterleaved ? 0x2c003c00u : i % 2 == 0 ? 0x3c003c00u : 0x2c002c00u;
  }

  // half2 of -1024 (signed: -1032) or -64 (-72).
  CUTLASS_OPS_HD static constexpr uint32_t addend(int i) {
    constexpr uint32_t kOne = kSigned ? 0xe408u : 0xe400u, kSixteenth = kSigned ? 0xd480u : 0xd400u;
    return !kInterleaved ? kSixteenth << 16 | kOne : both_halves(i % 2 == 0 ? kOne : kSixteenth);
  }
};

// 8 nibbles -> 4 pairs of bf16, in the same order. 16 u does not fit in its mantissa: odd nibbles
// are shifted down.
//
// Worked example, w = 0x0000'00e3, plain, unsigned (elements 0 and 1 are 3 and 14):
//   bits[0]: byte 0 of w and byte 0 of w >> 4, 0x0e0e'e3e3; & 0x000f000f, ^ 0x43004300 =
//   0x430e'4303 = (131, 142); - 128 = (3, 14)
template <bool kSigned, bool kInterleaved>
struct NibblesBfloat16 {
  static constexpr int kPairs = 4;

  CUTLASS_OPS_HD static void bits(uint32_t word, uint32_t (&out)[4]) {
    for (int i = 0; i < 4; ++i) {
      uint32_t const pair = kInterleaved
                                ? word >> 4 * i
                                : permute_bytes(word, word >> 4, 0x4400u + 0x1111u * uint32_t(i));
      out[i] = and_xor(pair, 0x000f000fu, both_halves(kSigned ? 0x4308u : 0x4300u));
    }
  }

  CUTLASS_OPS_HD static constexpr uint32_t factor(int) { return both_halves(0x3f80u); }

  // bf16x2 of -128 (signed: -136).
  CUTLASS_OPS_HD static constexpr uint32_t addend(int) {
    return both_halves(kSigned ? 0xc308u : 0xc300u);
  }
};

// 4 bytes -> 2 pairs of fp16: PRMT puts 0x64 above each byte.
//
// Worked example, w = 0x0000'fe03, plain, signed (elements 0 and 1 are 3 and -2): inverted
// signs 0x8080'7e83;
//   bits[0]: bytes 0, 1: 0x647e'6483 = (1155, 1150);  - 1152 = (3, -2)
template <bool kSigned, bool kInterleaved>
struct BytesHalf {
  static constexpr int kPairs = 2;

  CUTLASS_OPS_HD static void bits(uint32_t word, uint32_t (&out)[2]) {
    uint32_t const codes = kSigned ? word ^ 0x80808080u : word;
    out[0] = permute_bytes(codes, 0x64646464u, kInterleaved ? 0x4240u : 0x4140u);
    out[1] = permute_bytes(codes, 0x64646464u, kInterleaved ? 0x4341u : 0x4342u);
  }

  CUTLASS_OPS_HD static constexpr uint32_t factor(int) { return both_halves(0x3c00u); }

  // half2 of -1024 (signed: -1152).
  CUTLASS_OPS_HD static constexpr uint32_t addend(int) {
    return both_halves(kSigned ? 0xe480u : 0xe400u);
  }
};

// 4 bytes -> 2 pairs of bf16, whose mantissa is one bit short. A signed byte is low7 - 128 * sign:
// 128 + low7 and 128 * (1 + sign) are both bf16 by the magic (0x4380 is 256), and their difference
// is the byte. An unsigned byte's sign bit is inverted first, and 128 added last, by the FMA.
//
// Worked example, w = 0x0000'fe03, interleaved, unsigned (elements 0 and 2 are 3 and 254):
// 0x8080'7e83, as signed numbers (-125, -128), (126, -128)
//   bytes 0, 2: 0x4300'4303 - 0x4380'4380 = (-125, -128);  * 1 + 128 = (3, 0)
//   bytes 1, 3: 0x4300'437e - 0x4380'4300 = (126, -128);   * 1 + 128 = (254, 0)
template <bool kSigned, bool kInterleaved>
struct BytesBfloat16 {
  static constexpr int kPairs = 2;

  // minuend - subtrahend = the byte as a signed number (unsigned: minus 128).
  CUTLASS_OPS_HD static void bits(uint32_t word, uint32_t (&minuend)[2],
                                  uint32_t (&subtrahend)[2]) {
    uint32_t const codes = kSigned ? word : word ^ 0x80808080u;
    for (int i = 0; i < 2; ++i) {
      uint32_t const pair =
          kInterleaved ? codes >> 8 * i : permute_bytes(codes, 0u, i == 0 ? 0x4140u : 0x4342u);
      minuend[i] = and_xor(pair, 0x007f007fu, 0x43004300u);
      subtrahend[i] = and_xor(pair, 0x00800080u, 0x43004300u);
    }
  }

  CUTLASS_OPS_HD static constexpr uint32_t factor(int) { return both_halves(0x3f80u); }
  CUTLASS_OPS_HD static constexpr uint32_t addend(int) {
    return both_halves(kSigned ? 0u : 0x4300u);
  }
};

#ifdef __CUDACC__
// The pairs of a word as numbers.
template <class Converter>
__device__ __forceinline__ void to_half(uint32_t word, uint32_t (&out)[Converter::kPairs]) {
  using namespace detail;
  Converter::bits(word, out);
  for (int i = 0; i < Converter::kPairs; ++i)
    out[i] = as_bits(
        __hfma2(as_half2(out[i]), as_half2(Converter::factor(i)), as_half2(Converter::addend(i))));
}

template <class Converter>
__device__ __forceinline__ void to_bfloat16(uint32_t word, uint32_t (&out)[Converter::kPairs]) {
  using namespace detail;
  if constexpr (Converter::kPairs == 4) {
    Converter::bits(word, out);
  } else {
    uint32_t subtrahend[2];
    Converter::bits(word, out, subtrahend);
    for (int i = 0; i < 2; ++i)
      out[i] = as_bits(__hsub2(as_bfloat162(out[i]), as_bfloat162(subtrahend[i])));
  }
  for (int i = 0; i < Converter::kPairs; ++i)
    out[i] = as_bits(__hfma2(as_bfloat162(out[i]), as_bfloat162(Converter::factor(i)),
                             as_bfloat162(Converter::addend(i))));
}
#endif

}  // namespace cutlass_ops::decode
