// The bit tricks of formats/decode.cuh, exhaustively: every code at every place of a word, with
// every zero point. The place of a code in a word is restated here, from the table in layout.h.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "emulate.h"
#include "formats/decode.cuh"
#include "formats/e4m3.cuh"

namespace cutlass_ops::decode {
namespace {

// The value of nibble p, in two's complement.
int nibble(uint32_t word, int p) { return int(word << (28 - 4 * p)) >> 28; }

int byte(uint32_t word, int e) { return int8_t(word >> 8 * e); }

// Nibble of a 4-bit word that register r of a 16 x 16 fragment takes for its low or high half: rows
// g, g+8, g, g+8; k 2t and 2t+1, then 2t+8 and 2t+9.
constexpr int kNibble[4][2] = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};

// Byte of an 8-bit word: k 2t, 2t+8, 2t+1, 2t+9.
constexpr int kByte[4][2] = {{0, 2}, {0, 2}, {1, 3}, {1, 3}};

// Every 16-bit pattern in the low half of a word, and, in another order, in the high half.
template <class Check>
void for_each_word(Check const& check) {
  for (uint32_t low = 0; low < 0x10000; ++low) {
    uint32_t const high = low * 40503u & 0xffff;  // odd factor: a permutation of the 2^16
    check(high << 16 | low);
    if (testing::Test::HasFailure()) return;  // one report, not millions
  }
}

// Every zero point for both rows, never the same for both.
template <int kBits, class Check>
void for_each_zero_pair(Check const& check) {
  constexpr int kCodes = 1 << kBits;
  for (int z = 0; z < kCodes; ++z) check(z - kCodes / 2, (z + 5) % kCodes - kCodes / 2);
}

// The code in the lower two bits of nibble p.
int half_nibble(uint32_t word, int p) { return int(word << (30 - 4 * p)) >> 30; }

int nibble_of(std::integral_constant<int, 2>, uint32_t word, int p) { return half_nibble(word, p); }
int nibble_of(std::integral_constant<int, 4>, uint32_t word, int p) { return nibble(word, p); }

template <int kBits>
void check_nibbles_to_half() {
  using Decoder = NibbleHalf<kBits>;
  ASSERT_EQ(emulate::half(Decoder::kSixteenth, 0), 1.0 / 16);
  ASSERT_EQ(emulate::half(Decoder::kSixteenth, 1), 1.0 / 16);
  for_each_word([](uint32_t word) {
    uint32_t bits[4];
    Decoder::bits(&word, bits);
    for_each_zero_pair<kBits>([&](int zero_g, int zero_g8) {
      RowConstants const zero = Decoder::zero_constants(zero_g, zero_g8);
      for (int r = 0; r < 4; ++r) {
        for (int h = 0; h < 2; ++h) {
          double const operand = emulate::half(bits[r], h);
          double const value = r % 2 == 0 ? operand - emulate::half(zero.g, h)
                                          : operand / 16 + emulate::half(zero.g8, h);
          int const code = nibble_of(std::integral_constant<int, kBits>(), word, kNibble[r][h]);
          ASSERT_EQ(value, code - (r % 2 == 0 ? zero_g : zero_g8))
              << std::hex << word << " register " << r << " half " << h;
        }
      }
    });
  });
}

TEST(Decode, TwoBitsToHalf) { check_nibbles_to_half<2>(); }
TEST(Decode, FourBitsToHalf) { check_nibbles_to_half<4>(); }

// By bits(), which one FMA of any factor follows, and by the FMA of fragment(). `code_at`: of
// register r and half h.
template <int kBits, class CodeAt>
void check_bfloat16(uint32_t const* words, CodeAt const& code_at) {
  using Decoder = IntegerBfloat16<kBits>;
  uint32_t bits[4];
  Decoder::bits(words, bits);
  auto const check = [&](RowConstants zero, int zero_g, int zero_g8) {
    for (int r = 0; r < 4; ++r) {
      for (int h = 0; h < 2; ++h) {
        double const value =
            emulate::bfloat16(bits[r], h) * emulate::bfloat16(Decoder::factor(r % 2), h) +
            emulate::bfloat16(r % 2 == 0 ? zero.g : zero.g8, h);
        ASSERT_EQ(value, double(Decoder::kUnit) * (code_at(r, h) - (r % 2 == 0 ? zero_g : zero_g8)))
            << std::hex << words[0] << " register " << r << " half " << h;
      }
    }
  };
  for (int r = 0; r < 4; ++r) {
    for (int h = 0; h < 2; ++h)
      ASSERT_EQ(emulate::bfloat16(bits[r], h),
                double(Decoder::bits_unit(r % 2)) * (code_at(r, h) + Decoder::kBias))
          << std::hex << words[0] << " register " << r << " half " << h;
  }
  check(Decoder::no_zeros(), 0, 0);
  for_each_zero_pair<kBits>([&](int zero_g, int zero_g8) {
    check(Decoder::zero_constants(zero_g, zero_g8), zero_g, zero_g8);
  });
}

TEST(Decode, TwoBitsToBfloat16) {
  for_each_word([](uint32_t word) {
    check_bfloat16<2>(&word, [&](int r, int h) { return half_nibble(word, kNibble[r][h]); });
  });
}

TEST(Decode, FourBitsToBfloat16) {
  for_each_word([](uint32_t word) {
    check_bfloat16<4>(&word, [&](int r, int h) { return nibble(word, kNibble[r][h]); });
  });
}

TEST(Decode, EightBitsToBfloat16) {
  for_each_word([](uint32_t word) {
    uint32_t const words[2] = {word, ~word};
    check_bfloat16<8>(words, [&](int r, int h) { return byte(words[r % 2], kByte[r][h]); });
  });
}

TEST(Decode, TwoBitsToInt8) {
  for_each_word([](uint32_t word) {
    uint32_t const words[2] = {word, ~word};
    uint32_t out[4];
    auto const check = [&](int scale, int zero_g, int zero_g8) {
      for (int r = 0; r < 4; ++r) {
        for (int e = 0; e < 4; ++e) {
          int const code = half_nibble(words[r / 2], 2 * e + r % 2);
          ASSERT_EQ(byte(out[r], e), scale * (code - (r % 2 == 0 ? zero_g : zero_g8)))
              << std::hex << word << " register " << r << " byte " << e;
        }
      }
    };
    Int2Int8::fragment(words, out);
    check(Int2Int8::kScale, 0, 0);
    for_each_zero_pair<2>([&](int zero_g, int zero_g8) {
      Int2MinusZeroInt8::fragment(words, Int2MinusZeroInt8::zero_constants(zero_g, zero_g8), out);
      check(1, zero_g, zero_g8);
    });
  });
}

// Subnormal numbers: units of the code plus a bias, row g+8's kUpper times as large.
TEST(Decode, FourBitsToSubnormalHalf) {
  for_each_word([](uint32_t word) {
    uint32_t out[4];
    Int4Subnormal::fragment(&word, out);
    for (int r = 0; r < 4; ++r) {
      for (int h = 0; h < 2; ++h) {
        double const unit =
            double(Int4Subnormal::kUnit) * (r % 2 == 0 ? 1.0 : Int4Subnormal::kUpper);
        ASSERT_EQ(emulate::half(out[r], h),
                  unit * (nibble(word, kNibble[r][h]) + Int4Subnormal::kCodeBias))
            << std::hex << word;
      }
    }
  });
}

TEST(Decode, EightBitsToSubnormalHalf) {
  for_each_word([](uint32_t word) {
    uint32_t const words[2] = {word, ~word};
    uint32_t out[4];
    Int8Subnormal::fragment(words, out);
    for (int r = 0; r < 4; ++r) {
      for (int h = 0; h < 2; ++h) {
        ASSERT_EQ(emulate::half(out[r], h),
                  double(Int8Subnormal::kUnit) *
                      (byte(words[r % 2], kByte[r][h]) + Int8Subnormal::kCodeBias))
            << std::hex << word;
      }
    }
  });
}

TEST(Decode, EightBitsToHalf) {
  for_each_word([](uint32_t word) {
    uint32_t const words[2] = {word, ~word};
    uint32_t bits[4];
    Int8Half::bits(words, bits);
    for_each_zero_pair<8>([&](int zero_g, int zero_g8) {
      RowConstants const zero = Int8Half::zero_constants(zero_g, zero_g8);
      for (int r = 0; r < 4; ++r) {
        for (int h = 0; h < 2; ++h) {
          double const value =
              emulate::half(bits[r], h) - emulate::half(r % 2 == 0 ? zero.g : zero.g8, h);
          int const expected = byte(words[r % 2], kByte[r][h]) - (r % 2 == 0 ? zero_g : zero_g8);
          if (value != expected) {
            ADD_FAILURE() << std::hex << word << " register " << r << " half " << h << ": " << value
                          << ", not " << std::dec << expected;
          }
        }
      }
    });
  });
}

TEST(Decode, FourBitsByCodeBook) {
  std::vector<uint8_t> table(Int4Codebook::kTableBytes);
  // 16 values that differ in either byte
  auto value_bits = [](int code) { return 0x3c00 + 257 * code; };
  for (int i = 0; i < Int4Codebook::kEntries * 32; ++i) {
    // and differ by lane
    uint32_t const entry = Int4Codebook::entry(i / 32, value_bits) + (i % 32 << 16);
    std::memcpy(&table[i * 4], &entry, 4);
  }
  for (int lane : {0, 5, 31}) {
    for_each_word([&](uint32_t word) {
      uint32_t out[4];
      Int4Codebook::fragment(&word, table.data(), lane, out);
      for (int r = 0; r < 4; ++r) {
        for (int h = 0; h < 2; ++h) {
          int const code = nibble(word, kNibble[r][h]) + 8;
          uint32_t const expected = uint32_t(value_bits(code) + (r % 2 ? lane : 0)),
                         found = out[r] >> 16 * h & 0xffff;
          if (found != expected)
            ADD_FAILURE() << std::hex << word << " register " << r << " half " << h << ": "
                          << found;
        }
      }
    });
  }
}

TEST(Decode, FourBitsToInt8) {
  for_each_word([](uint32_t word) {
    uint32_t const words[2] = {word, ~word};
    uint32_t out[4];
    Int4Int8::fragment(words, out);
    for (int r = 0; r < 4; ++r) {
      for (int e = 0; e < 4; ++e) {
        int const expected = Int4Int8::kScale * nibble(words[r / 2], 2 * e + r % 2);
        if (byte(out[r], e) != expected) {
          ADD_FAILURE() << std::hex << word << " register " << r << " byte " << e << ": "
                        << byte(out[r], e) << ", not " << std::dec << expected;
        }
      }
    }
  });
}

TEST(Decode, FourBitsMinusZeroToInt8) {
  for_each_word([](uint32_t word) {
    uint32_t const words[2] = {word, ~word};
    for_each_zero_pair<4>([&](int zero_g, int zero_g8) {
      uint32_t out[4];
      Int4MinusZeroInt8::fragment(words, Int4MinusZeroInt8::zero_constants(zero_g, zero_g8), out);
      for (int r = 0; r < 4; ++r) {
        for (int e = 0; e < 4; ++e) {
          int const code = nibble(words[r / 2], 2 * e + r % 2);
          int const expected = code - (r % 2 == 0 ? zero_g : zero_g8);
          if (byte(out[r], e) != expected) {
            ADD_FAILURE() << std::hex << word << " register " << r << " byte " << e << ": "
                          << byte(out[r], e) << ", not " << std::dec << expected;
          }
        }
      }
    });
  });
}

// The worked examples of decode.cuh, bit for bit.
TEST(Decode, WorkedExamples) {
  uint32_t const four_bits[2] = {0x000000e3u, 0};
  uint32_t const eight_bits[2] = {0x0000fe03u, 0};
  uint32_t const two_bits[2] = {0x000000d3u, 0};
  uint32_t out[4];

  NibbleHalf<2>::bits(two_bits, out);
  EXPECT_EQ(out[0], 0x64026401u);
  EXPECT_EQ(out[1], 0x64206430u);
  EXPECT_EQ(emulate::half(NibbleHalf<2>::zero_constants(0, 0).g, 0), 1026);
  EXPECT_EQ(emulate::half(NibbleHalf<2>::zero_constants(0, 0).g8, 0), -66);

  IntegerBfloat16<2>::bits(two_bits, out);
  EXPECT_EQ(out[0], 0x00020001u);
  EXPECT_EQ(out[1], 0x00200030u);
  EXPECT_EQ(emulate::bfloat16(IntegerBfloat16<2>::no_zeros().g, 0), -2.0 / 64);

  Int2Int8::fragment(two_bits, out);
  EXPECT_EQ(out[0], 0x000000c0u);
  EXPECT_EQ(out[1], 0x00000040u);

  Int2MinusZeroInt8::fragment(two_bits, Int2MinusZeroInt8::zero_constants(-2, -2), out);
  EXPECT_EQ(out[0], 0x02020201u);
  EXPECT_EQ(out[1], 0x02020203u);

  NibbleHalf<4>::bits(four_bits, out);
  EXPECT_EQ(out[0], 0x6408640bu);
  EXPECT_EQ(out[1], 0x64806460u);
  EXPECT_EQ(emulate::half(NibbleHalf<4>::zero_constants(0, 0).g, 0), 1032);
  EXPECT_EQ(emulate::half(NibbleHalf<4>::zero_constants(0, 0).g8, 0), -72);

  IntegerBfloat16<4>::bits(four_bits, out);
  EXPECT_EQ(out[0], 0x0008000bu);
  EXPECT_EQ(out[1], 0x00800060u);
  EXPECT_EQ(IntegerBfloat16<4>::factor(0), 0x7f007f00u);
  EXPECT_EQ(IntegerBfloat16<4>::factor(1), 0x7d007d00u);
  EXPECT_EQ(emulate::bfloat16(IntegerBfloat16<4>::no_zeros().g8, 1), -8.0 / 64);

  Int8Half::bits(eight_bits, out);
  EXPECT_EQ(out[0], 0x64806483u);
  EXPECT_EQ(out[2], 0x6480647eu);

  IntegerBfloat16<8>::bits(eight_bits, out);
  EXPECT_EQ(out[0], 0x00800083u);
  EXPECT_EQ(out[2], 0x0080007eu);
  EXPECT_EQ(emulate::bfloat16(IntegerBfloat16<8>::no_zeros().g, 0), -128.0 / 64);

  Int4Int8::fragment(four_bits, out);
  EXPECT_EQ(out[0], 0x00000030u);
  EXPECT_EQ(out[1], 0x000000e0u);

  Int4MinusZeroInt8::fragment(four_bits, Int4MinusZeroInt8::zero_constants(-5, -5), out);
  EXPECT_EQ(out[0], 0x05050508u);
  EXPECT_EQ(out[1], 0x05050503u);
}

TEST(Decode, E4m3) {
  // By the format's definition; stored codes have their sign bit inverted.
  auto const expected = [](int stored) {
    int const code = (stored ^ 0x80) & 0xff, exponent = code >> 3 & 15, mantissa = code & 7;
    double const value =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return code & 0x80 ? -value : value;
  };
  EXPECT_EQ(expected(0xb9), 1.125);
  EXPECT_EQ(expected(0x7e), -448.0);
  for_each_word([&](uint32_t first) {
    uint32_t const words[2] = {first, first * 2654435761u};
    uint32_t half[4], bfloat[4];
    formats::E4m3::bits<10>(words, half);
    formats::E4m3::bits<7>(words, bfloat);
    for (int r = 0; r < 4; ++r)
      for (int h = 0; h < 2; ++h) {
        double const value = expected(byte(words[r % 2], kByte[r][h]));
        EXPECT_EQ(emulate::half(half[r], h) * emulate::half(0xdc00, 0), value);
        EXPECT_EQ(emulate::bfloat16(bfloat[r], h) * emulate::bfloat16(0xfb80, 0), value);
      }
  });
}

}  // namespace
}  // namespace cutlass_ops::decode
