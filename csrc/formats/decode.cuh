// From packed codes to the registers of operand A. A decoder to fp16 or bf16 is two functions:
// `bits`, pure 32-bit assembly (host and device, tested exhaustively on the CPU), and `fragment`,
// the same followed by the vector instruction that makes numbers of it. A decoder to int8 is
// assembly alone.
//
// Words are those of a lane's 16 bytes (layout.h): codes centred, c = q - 2^(bits-1), two's
// complement; of 2-bit codes, for the second columns of nibbles, shifted by two bits. Decoders to
// fp16 and bf16 fill the four registers of an m16 x k16 fragment, for mma.sync and wgmma alike:
//     out[0] row g,   k 2t, 2t+1      out[2] row g,   k 2t+8, 2t+9
//     out[1] row g+8, k 2t, 2t+1      out[3] row g+8, k 2t+8, 2t+9
// the smaller k in the low half.
// Decoders to int8 fill the four of an m16 x k32 fragment: out[0], out[1] rows g, g+8 of the first
// 16 k, out[2], out[3] of the second. kWords is the number of words that a decoder consumes: word
// pointers advance by kWords from fragment to fragment along K.
//
// Zero points are centred too, zc = z - 2^(bits-1), and belong to a row: `zero_constants(zc of row
// g, zc of row g+8)` prepares, once per group, what `fragment` needs. Every result is exactly
// kUnit * (c - zc), of decoders to int8 kScale * (c - zc).
//
// The magic in the float decoders: a float of exponent e has a unit in the last place of 2^(e -
// mantissa bits), so an integer u put into the mantissa of a suitable power of two *is* that power
// plus u; one exact subtraction leaves u. fp16: 0x6400 | u = 1024 + u. A bf16 of exponent 0 is the
// integer in its mantissa times 2^-133, with nothing added, and so is one whose lowest bit of the
// exponent is the eighth bit of the integer. A two's complement code becomes unsigned, u = c +
// 2^(bits-1), by inverting its sign bit, in the XOR that sets the exponent: AND-XOR is one LOP3.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass_ops/layout.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace cutlass_ops::decode {

// One 32-bit constant for each of a lane's two rows.
struct RowConstants {
  uint32_t g;
  uint32_t g8;
};

// The 16 bits of an fp16 or bf16 number, twice: a half2 of equal halves.
CUTLASS_OPS_HD constexpr uint32_t both_halves(uint32_t bits16) { return bits16 * 0x00010001u; }

// The bits of a number of at most eight significant bits as bf16.
CUTLASS_OPS_HD constexpr uint32_t bfloat16_bits(float number) {
  return __builtin_bit_cast(uint32_t, number) >> 16;
}

// The 8 bits of a byte, four times.
CUTLASS_OPS_HD constexpr uint32_t all_bytes(uint32_t bits8) { return bits8 * 0x01010101u; }

// (value & mask) ^ flip. One LOP3, which the compiler does not find where mask and flip are both
// constants (it then uses two, each with an immediate).
CUTLASS_OPS_HD inline uint32_t and_xor(uint32_t value, uint32_t mask, uint32_t flip) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(value), "r"(mask), "r"(flip));
  return result;
#else
  return (value & mask) ^ flip;
#endif
}

// (value & mask) | bits: one LOP3, as and_xor.
CUTLASS_OPS_HD inline uint32_t and_or(uint32_t value, uint32_t mask, uint32_t bits) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "r"(mask), "r"(bits));
  return result;
#else
  return (value & mask) | bits;
#endif
}

// Picks bytes of the eight of (high, low): nibble i of the selector, 0..7, names the source of byte
// i. PRMT on the device.
CUTLASS_OPS_HD inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  uint64_t const source = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t const byte = uint32_t(source >> 8 * (selector >> 4 * i & 7)) & 0xffu;
    result |= byte << 8 * i;
  }
  return result;
#endif
}

#ifdef __CUDACC__
namespace detail {
__device__ inline __half2 as_half2(uint32_t bits) {
  return *reinterpret_cast<__half2 const*>(&bits);
}
__device__ inline uint32_t as_bits(__half2 value) {
  return *reinterpret_cast<uint32_t const*>(&value);
}
__device__ inline __nv_bfloat162 as_bfloat162(uint32_t bits) {
  return *reinterpret_cast<__nv_bfloat162 const*>(&bits);
}
__device__ inline uint32_t as_bits(__nv_bfloat162 value) {
  return *reinterpret_cast<uint32_t const*>(&value);
}
}  // namespace detail
#endif

// 4 bits -> fp16, or 2, in the lower bits of nibbles whose upper bits are ignored. Row g's nibbles
// stand at bits 0..3 of each 16 (of w, then of w >> 8) and give 1024 + u; row g+8's stand at bits
// 4..7 and give 1024 + 16u: not shifted down, because HFMA2 by 1/16 costs no more than HSUB2.
//
// Worked example, 4 bits, w = 0x0000'00e3 (nibble 0: row g, c = 3; nibble 1: row g+8, c = -2; all
// others 0), no zero points:
//   out[0]: (w & 0x000f000f) ^ 0x64086408 = 0x6408'640b = (1032, 1035); minus 1032 = (0, 3)
//   out[1]: (w & 0x00f000f0) ^ 0x64806480 = 0x6480'6460 = (1152, 1120)
//           / 16 = (72, 70); minus 72 = (0, -2)
// 2 bits, w = 0x0000'00d3 (nibble 0: lower bits 3, c = -1; nibble 1: lower bits 1, c = 1):
//   out[0]: (w & 0x00030003) ^ 0x64026402 = 0x6402'6401 = (1026, 1025); minus 1026 = (0, -1)
//   out[1]: (w & 0x00300030) ^ 0x64206420 = 0x6420'6430 = (1056, 1072)
//           / 16 = (66, 67); minus 66 = (0, 1)
template <int kBits>
struct NibbleHalf {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1.0f;
  static constexpr uint32_t kSixteenth = 0x2c002c00u;  // half2 of 1/16, the factor of row g+8
  static constexpr uint32_t kMask = (1u << kBits) - 1, kBias = 1u << (kBits - 1);

  CUTLASS_OPS_HD static void bits(uint32_t const* word, uint32_t (&out)[4]) {
    constexpr uint32_t kMaskG = both_halves(kMask), kFlipG = both_halves(0x6400u + kBias),
                       kMaskG8 = kMaskG << 4, kFlipG8 = both_halves(0x6400u + 16 * kBias);
    uint32_t const low = word[0], high = word[0] >> 8;
    out[0] = and_xor(low, kMaskG, kFlipG), out[1] = and_xor(low, kMaskG8, kFlipG8);
    out[2] = and_xor(high, kMaskG, kFlipG), out[3] = and_xor(high, kMaskG8, kFlipG8);
  }

  // half2 of 1024 + bias + zc for row g, to be subtracted; of -(64 + bias + zc) for row g+8, the
  // addend. Built from their bits: a half in [1024, 2048) is 0x6400 + n, one in (-128, -64] is
  // 0xd400 + 16n. zc in [-bias, bias - 1].
  CUTLASS_OPS_HD static constexpr RowConstants zero_constants(int zero_g, int zero_g8) {
    return {both_halves(0x6400u + uint32_t(int(kBias) + zero_g)),
            both_halves(0xd400u + 16u * uint32_t(int(kBias) + zero_g8))};
  }

#ifdef __CUDACC__
  __device__ static void fragment(uint32_t const* word, RowConstants zero, uint32_t (&out)[4]) {
    using namespace detail;
    bits(word, out);
    out[0] = as_bits(__hsub2(as_half2(out[0]), as_half2(zero.g)));
    out[1] = as_bits(__hfma2(as_half2(out[1]), as_half2(kSixteenth), as_half2(zero.g8)));
    out[2] = as_bits(__hsub2(as_half2(out[2]), as_half2(zero.g)));
    out[3] = as_bits(__hfma2(as_half2(out[3]), as_half2(kSixteenth), as_half2(zero.g8)));
  }

  __device__ static void fragment(uint32_t const* word, uint32_t (&out)[4]) {
    fragment(word, no_zeros(), out);
  }
#endif
  CUTLASS_OPS_HD static constexpr RowConstants no_zeros() { return zero_constants(0, 0); }
};

// 4 bits -> fp16 without arithmetic: an integer in the mantissa of an fp16 whose exponent is zero
// is a subnormal number, which tensor cores multiply exactly. This saves a third of NibbleHalf's
// instructions, and the caller subtracts the constant: out = kUnit * (c + kCodeBias) for row g and
// kUpper times that for row g+8, whose nibbles stand four bits higher. The caller starts its sums
// at -kCodeBias * sum x. Two bits to the left, because the tensor cores align products by exponents
// alone: leading zeros of a mantissa are bits that the sums lose.
//
// Worked example, w = 0x0000'00e3 (row g: c = 3; row g+8: c = -2), w << 2 = 0x0000'038c:
//   out[0]: (w << 2 & 0x003c003c) ^ 0x00200020 = 0x0020'002c = (8, 11) * 2^-22
//   out[1]: (w << 2 & 0x03c003c0) ^ 0x02000200 = 0x0200'0180 = (8, 6) * 16 * 2^-22
struct Int4Subnormal {
  static constexpr int kWords = 1;
  static constexpr int kCodeBias = 8;
  static constexpr float kUnit = 0x1p-22f;
  static constexpr float kUpper = 16.0f;

  CUTLASS_OPS_HD static void fragment(uint32_t const* word, uint32_t (&out)[4]) {
    uint32_t const low = word[0] << 2, high = word[0] >> 6;
    out[0] = and_xor(low, 0x003c003cu, 0x00200020u);
    out[1] = and_xor(low, 0x03c003c0u, 0x02000200u);
    out[2] = and_xor(high, 0x003c003cu, 0x00200020u);
    out[3] = and_xor(high, 0x03c003c0u, 0x02000200u);
  }
};

// 2, 4 or 8 bits -> bf16. u in the low eight bits is u * 2^-133; row g+8's nibbles stand at bits
// 4..7, u * 2^-129, and codes of 2 bits in the lower bits of nibbles. One FMA takes bias and zero
// point away and leaves normal numbers. Where the code's scale has x's type, and there is no zero
// point, that FMA applies it, too (device/fold.cuh). Words as NibbleHalf's and Int8Half's.
//
// Worked example, 4 bits, w = 0x0000'00e3 as above, no zero points:
//   out[0]: (w & 0x000f000f) ^ 0x00080008 = 0x0008'000b = (8, 11) * 2^-133
//           * 2^127 - 8 / 64 = (0, 3) / 64
//   out[1]: (w & 0x00f000f0) ^ 0x00800080 = 0x0080'0060 = (8, 6) * 2^-129
//           * 2^123 - 8 / 64 = (0, -2) / 64
// 8 bits, word[0] = 0x0000'fe03 (byte 0: c = 3; byte 1: c = -2):
//   out[0], bytes 0, 2: (w & 0x00ff00ff) ^ 0x00800080 = 0x0080'0083 = (128, 131) * 2^-133
//           * 2^127 - 128 / 64 = (0, 3) / 64
template <int kBits>
struct IntegerBfloat16 {
  static constexpr int kWords = kBits == 8 ? 2 : 1;
  static constexpr float kUnit = 0x1p-6f;
  static constexpr int kBias = 1 << (kBits - 1);

  // A row's numbers in bits() are this unit times c + kBias.
  CUTLASS_OPS_HD static constexpr float bits_unit(int row) {
    return kBits == 8 || row == 0 ? 0x1p-133f : 0x1p-129f;
  }

  CUTLASS_OPS_HD static void bits(uint32_t const* words, uint32_t (&out)[4]) {
    constexpr uint32_t kMask = both_halves((1u << kBits) - 1), kFlip = both_halves(kBias);
    for (int row = 0; row < 2; ++row) {
      uint32_t const word = words[kBits == 8 ? row : 0];
      int const left = kBits == 8 ? 0 : 4 * row;
      out[row] = and_xor(word, kMask << left, kFlip << left);
      out[row + 2] = and_xor(word >> 8, kMask << left, kFlip << left);
    }
  }

  // bf16x2 of the factor that makes kUnit of a row's unit.
  CUTLASS_OPS_HD static constexpr uint32_t factor(int row) {
    return both_halves(bfloat16_bits(kUnit / bits_unit(row)));
  }
  // bf16x2 of -kUnit * (bias + zc), the addend. zc in [-bias, bias - 1].
  CUTLASS_OPS_HD static RowConstants zero_constants(int zero_g, int zero_g8) {
    return {minus_units(uint32_t(kBias + zero_g)), minus_units(uint32_t(kBias + zero_g8))};
  }
  // zero_constants(0, 0), as a constant.
  CUTLASS_OPS_HD static constexpr RowConstants no_zeros() {
    constexpr uint32_t kMinusBias = both_halves(bfloat16_bits(-kUnit * kBias));
    return {kMinusBias, kMinusBias};
  }

  CUTLASS_OPS_HD static uint32_t minus_units(uint32_t u) {
#ifdef __CUDA_ARCH__
    using namespace detail;
    return as_bits(__hmul2_rn(as_bfloat162(both_halves(u)),
                              as_bfloat162(both_halves(bfloat16_bits(-0x1p127f)))));
#else
    return both_halves(bfloat16_bits(-kUnit * float(u)));
#endif
  }

#ifdef __CUDACC__
  __device__ static void fragment(uint32_t const* words, RowConstants zero, uint32_t (&out)[4]) {
    using namespace detail;
    bits(words, out);
    for (int r = 0; r < 4; ++r)
      out[r] = as_bits(__hfma2(as_bfloat162(out[r]), as_bfloat162(factor(r % 2)),
                               as_bfloat162(r % 2 ? zero.g8 : zero.g)));
  }

  __device__ static void fragment(uint32_t const* words, uint32_t (&out)[4]) {
    fragment(words, no_zeros(), out);
  }
#endif
};

// 8 bits -> fp16: 0x64 put above each byte gives 1024 + u. Words: row g, row g+8 (words 2c and 2c+1
// of a lane's four, 16-column c); bytes 0, 2 of a word are k 2t, 2t+1 and bytes 1, 3 are k 2t+8,
// 2t+9.
//
// Worked example, word[0] = 0x0000'fe03 (byte 0: c = 3; byte 1: c = -2), no zero points: inverted
// signs 0x8080'7e83;
//   out[0]: bytes 0, 2: 0x6480'6483 = (1152, 1155); minus 1152 = (0, 3)
//   out[2]: bytes 1, 3: 0x6480'647e = (1152, 1150); minus 1152 = (0, -2)
struct Int8Half {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1.0f;

  CUTLASS_OPS_HD static void bits(uint32_t const* words, uint32_t (&out)[4]) {
    for (int row = 0; row < 2; ++row) {
      uint32_t const unsigned_codes = words[row] ^ 0x80808080u;
      out[row] = permute_bytes(unsigned_codes, 0x64646464u, 0x4240u);
      out[row + 2] = permute_bytes(unsigned_codes, 0x64646464u, 0x4341u);
    }
  }

  // half2 of 1024 + 128 + zc for both rows, to be subtracted. zc in [-128, 127].
  CUTLASS_OPS_HD static constexpr RowConstants zero_constants(int zero_g, int zero_g8) {
    return {both_halves(uint32_t(0x6480 + zero_g)), both_halves(uint32_t(0x6480 + zero_g8))};
  }

#ifdef __CUDACC__
  __device__ static void fragment(uint32_t const* words, RowConstants zero, uint32_t (&out)[4]) {
    using namespace detail;
    bits(words, out);
    out[0] = as_bits(__hsub2(as_half2(out[0]), as_half2(zero.g)));
    out[1] = as_bits(__hsub2(as_half2(out[1]), as_half2(zero.g8)));
    out[2] = as_bits(__hsub2(as_half2(out[2]), as_half2(zero.g)));
    out[3] = as_bits(__hsub2(as_half2(out[3]), as_half2(zero.g8)));
  }

  __device__ static void fragment(uint32_t const* words, uint32_t (&out)[4]) {
    fragment(words, no_zeros(), out);
  }
#endif
  CUTLASS_OPS_HD static constexpr RowConstants no_zeros() { return zero_constants(0, 0); }
};

// 8 bits -> fp16 without arithmetic, as Int4Subnormal: out = kUnit * (c + kCodeBias) for both rows.
//
// Worked example, word[0] = 0x0000'fe03 (byte 0: c = 3; byte 1: c = -2):
//   out[0], bytes 0, 2: (w & 0x00ff00ff) ^ 0x00800080 = 0x0080'0083 = (128, 131) * 2^-24
//   out[2], bytes 1, 3: ((w >> 8) & 0x00ff00ff) ^ 0x00800080 = 0x0080'007e = (128, 126) * 2^-24
struct Int8Subnormal {
  static constexpr int kWords = 2;
  static constexpr int kCodeBias = 128;
  static constexpr float kUnit = 0x1p-24f;
  static constexpr float kUpper = 1.0f;

  CUTLASS_OPS_HD static void fragment(uint32_t const* words, uint32_t (&out)[4]) {
    for (int row = 0; row < 2; ++row) {
      out[row] = and_xor(words[row], 0x00ff00ffu, 0x00800080u);
      out[row + 2] = and_xor(words[row] >> 8, 0x00ff00ffu, 0x00800080u);
    }
  }
};

// 4 bits -> int8, symmetric: the bytes 16 * c, a nibble in the upper half of a byte; the caller
// divides the group's scale by kScale. Three instructions for eight codes. |16 c| <= 128, so a sum
// over 128 k is at most 2^21.
//
// Worked example, words[0] = 0x0000'00e3 (row g: c = 3, row g+8: c = -2):
//   out[0] = (w << 4) & 0xf0f0f0f0 = 0x0000'0030: 48 = 16 * 3
//   out[1] = w & 0xf0f0f0f0 = 0x0000'00e0: -32 = 16 * -2
struct Int4Int8 {
  static constexpr int kWords = 2;
  static constexpr int kScale = 16;

  CUTLASS_OPS_HD static constexpr void fragment(uint32_t const* words, uint32_t (&out)[4]) {
    for (int column = 0; column < 2; ++column) {
      out[2 * column] = (words[column] << 4) & 0xf0f0f0f0u;
      out[2 * column + 1] = words[column] & 0xf0f0f0f0u;
    }
  }
};

// 4 bits -> int8 with zero points: the bytes c - zc, in [-15, 15] (16 times that would not fit). In
// each byte u = c + 8, then u + (120 - zc) = 128 + (c - zc) lies in [113, 143]: no carry leaves the
// byte, so one 32-bit addition serves four codes. Inverting bit 7 takes the 128 away. Seven
// instructions for eight codes.
//
// Worked example, words[0] = 0x0000'00e3 (row g: c = 3, row g+8: c = -2), zc = -5 for both, byte 0:
//   out[0]: (0x03 ^ 0x08) + 125 = 0x88;  ^ 0x80 = 0x08 = 3 + 5
//   out[1]: (0x0e ^ 0x08) + 125 = 0x83;  ^ 0x80 = 0x03 = -2 + 5
struct Int4MinusZeroInt8 {
  static constexpr int kWords = 2;
  static constexpr int kScale = 1;

  // zc in [-8, 7].
  CUTLASS_OPS_HD static constexpr RowConstants zero_constants(int zero_g, int zero_g8) {
    return {all_bytes(uint32_t(120 - zero_g)), all_bytes(uint32_t(120 - zero_g8))};
  }

  CUTLASS_OPS_HD static void fragment(uint32_t const* words, RowConstants zero,
                                      uint32_t (&out)[4]) {
    for (int column = 0; column < 2; ++column) {
      uint32_t const row_g = words[column], row_g8 = words[column] >> 4;
      out[2 * column] = (and_xor(row_g, 0x0f0f0f0fu, 0x08080808u) + zero.g) ^ 0x80808080u;
      out[2 * column + 1] = (and_xor(row_g8, 0x0f0f0f0fu, 0x08080808u) + zero.g8) ^ 0x80808080u;
    }
  }
};

// 2 bits -> int8, symmetric, as Int4Int8: the bytes 64 * c.
//
// Worked example, words[0] = 0x0000'00d3 (lower bits of nibbles: row g: c = -1, row g+8: c = 1):
//   out[0] = (w << 6) & 0xc0c0c0c0 = 0x0000'00c0: -64 = 64 * -1
//   out[1] = (w << 2) & 0xc0c0c0c0 = 0x0000'0040: 64 = 64 * 1
struct Int2Int8 {
  static constexpr int kWords = 2;
  static constexpr int kScale = 64;

  CUTLASS_OPS_HD static constexpr void fragment(uint32_t const* words, uint32_t (&out)[4]) {
    for (int column = 0; column < 2; ++column) {
      out[2 * column] = (words[column] << 6) & 0xc0c0c0c0u;
      out[2 * column + 1] = (words[column] << 2) & 0xc0c0c0c0u;
    }
  }
};

// 2 bits -> int8 with zero points, as Int4MinusZeroInt8: the bytes c - zc, in [-3, 3]. In each byte
// u = c + 2, then u + (126 - zc) = 128 + (c - zc).
//
// Worked example, words[0] = 0x0000'00d3 as above, zc = -2 for both, byte 0:
//   out[0]: (0x03 ^ 0x02) + 128 = 0x81;  ^ 0x80 = 0x01 = -1 + 2
//   out[1]: (0x01 ^ 0x02) + 128 = 0x83;  ^ 0x80 = 0x03 = 1 + 2
struct Int2MinusZeroInt8 {
  static constexpr int kWords = 2;
  static constexpr int kScale = 1;

  // zc in [-2, 1].
  CUTLASS_OPS_HD static constexpr RowConstants zero_constants(int zero_g, int zero_g8) {
    return {all_bytes(uint32_t(126 - zero_g)), all_bytes(uint32_t(126 - zero_g8))};
  }

  CUTLASS_OPS_HD static void fragment(uint32_t const* words, RowConstants zero,
                                      uint32_t (&out)[4]) {
    for (int column = 0; column < 2; ++column) {
      uint32_t const row_g = words[column], row_g8 = words[column] >> 4;
      out[2 * column] = (and_xor(row_g, 0x03030303u, 0x02020202u) + zero.g) ^ 0x80808080u;
      out[2 * column + 1] = (and_xor(row_g8, 0x03030303u, 0x02020202u) + zero.g8) ^ 0x80808080u;
    }
  }
};

// 8 bits -> int8: the words are the fragment.
struct Int8Int8 {
  static constexpr int kWords = 4;
  static constexpr int kScale = 1;

  CUTLASS_OPS_HD static constexpr void fragment(uint32_t const* words, uint32_t (&out)[4]) {
    for (int r = 0; r < 4; ++r) out[r] = words[r];
  }
};

// 4 bits -> a code book's values, fp16 and bf16 alike, by look-up in shared memory. A byte of a
// word is the codes of rows g and g+8 for one k, so a table of 256 entries gives both values at
// once, row g's in the low half. Each lane has a separate table, in its own bank: entry e of lane
// l is word 32 * e + l, and the 32 look-ups of a warp never meet in a bank. (By PRMT from 16
// values in registers it would be 21 instructions for eight codes, all of them on the pipe that
// does 64 a clock and SM; here that pipe has 4, the multiplier 4, and the loads, at 32 a clock,
// take as long as both.)
//
// Worked example, word[0] = 0x0000'00e3 (byte 0: row g stored 3, code 11; row g+8 stored 14, code
// 6; the others: code 8 twice):
//   offsets: lane 5 reads the words at 0xe3 * 128 + 20 = 29076 and three times at 20
//   out[0] = low halves of look-ups 0 and 2 = (book[11], book[8]); out[1] = their high halves =
//   (book[6], book[8])
struct Int4Codebook {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1.0f;
  static constexpr int kEntries = 256;
  static constexpr int kTableBytes = kEntries * 32 * 4;

  // Entry e of the table, given the bits of the 16 values by code: stored nibbles are centred,
  // code = nibble ^ 8.
  template <class Bits>
  CUTLASS_OPS_HD static uint32_t entry(int e, Bits const& value_bits) {
    return uint32_t(value_bits((e & 15) ^ 8)) | uint32_t(value_bits((e >> 4) ^ 8)) << 16;
  }

  // The table entries of the four bytes of a word, k 2t, 2t+8, 2t+1, 2t+9, in a lane's table that
  // begins at `first`, an offset or an address. A byte takes one instruction, a dot product of
  // bytes with a constant that selects one of them, and the constant takes a register. If there are
  // registers for only kConstants of them, each other byte takes one instruction to extract it and
  // one to multiply and add (the compiler would shift, mask and add).
  template <int kConstants = 4>
  CUTLASS_OPS_HD static void places(uint32_t word, uint32_t first, uint32_t (&out)[4]) {
    for (int i = 0; i < 4; ++i) {
#ifdef __CUDA_ARCH__
      uint32_t const byte = i == 0   ? word & 0xffu
                            : i == 3 ? word >> 24
                                     : permute_bytes(word, 0, 0x4440u + i);
      if (i < kConstants) {
        asm("dp4a.u32.u32 %0, %1, %2, %3;"
            : "=r"(out[i])
            : "r"(word), "r"(128u << 8 * i), "r"(first));
      } else if (i < 3) {
        asm("mad.lo.u32 %0, %1, 128, %2;" : "=r"(out[i]) : "r"(byte), "r"(first));
      } else {
        out[i] = byte * 128 + first;
      }
#else
      out[i] = (word >> 8 * i & 0xffu) * 128 + first;
#endif
    }
  }

  // The two halves of `fragment`: loads, and the use of the loaded values.
  CUTLASS_OPS_HD static void look_up(uint32_t word, uint8_t const* table, int lane,
                                     uint32_t (&pairs)[4]) {
    uint32_t offsets[4];
    places(word, uint32_t(lane) * 4, offsets);
    for (int i = 0; i < 4; ++i) pairs[i] = *reinterpret_cast<uint32_t const*>(table + offsets[i]);
  }
#ifdef __CUDACC__
  // look_up() in a table in shared memory; `lane_address`: the lane's first entry.
  template <int kConstants = 4>
  __device__ static void look_up(uint32_t word, uint32_t lane_address, uint32_t (&pairs)[4]) {
    uint32_t addresses[4];
    places<kConstants>(word, lane_address, addresses);
    for (int i = 0; i < 4; ++i) asm("ld.shared.u32 %0, [%1];" : "=r"(pairs[i]) : "r"(addresses[i]));
  }
#endif
  CUTLASS_OPS_HD static void combine(uint32_t const (&pairs)[4], uint32_t (&out)[4]) {
    for (int i = 0; i < 2; ++i) {
      out[2 * i] = permute_bytes(pairs[i], pairs[i + 2], 0x5410u);
      out[2 * i + 1] = permute_bytes(pairs[i], pairs[i + 2], 0x7632u);
    }
  }

  CUTLASS_OPS_HD static void fragment(uint32_t const* word, uint8_t const* table, int lane,
                                      uint32_t (&out)[4]) {
    uint32_t pairs[4];
    look_up(word[0], table, lane, pairs);
    combine(pairs, out);
  }

#ifdef __CUDACC__
  // Fill the table with a book's values, rounded to Element; the caller synchronises. 16 bytes at a
  // time: the same entry for four lanes.
  template <class Element>
  __device__ static void fill(uint8_t* table, float const* book, int thread, int threads) {
    auto bits = [&](int code) {
      if constexpr (std::is_same_v<Element, __half>) {
        return __half_as_ushort(__float2half_rn(book[code]));
      } else {
        return __bfloat16_as_ushort(__float2bfloat16_rn(book[code]));
      }
    };
    for (int i = thread; i < kEntries * 8; i += threads) {
      uint32_t const value = entry(i / 8, bits);
      reinterpret_cast<uint4*>(table)[i] = make_uint4(value, value, value, value);
    }
  }
#endif
};

#ifdef __CUDACC__
// Takes a decoder's unit, Units::kUnit, away from sums of products, or from what multiplies them.
template <class Units, int kCount>
__device__ __forceinline__ void remove_unit(float (&sums)[kCount]) {
  if constexpr (Units::kUnit != 1.0f) {
#pragma unroll
    for (float& sum : sums) sum *= 1.0f / Units::kUnit;
  }
}

// The decoder for activations of type Element, __half or __nv_bfloat16.
template <class Element, class ToHalf, class ToBfloat16>
using Chosen = std::conditional_t<std::is_same_v<Element, __half>, ToHalf, ToBfloat16>;
#endif

}  // namespace cutlass_ops::decode
