// The converters of device/convert.cuh, exhaustively: every integer at every place of a word,
// against every integer at its partner's place.
#include <gtest/gtest.h>

#include <cstdint>

#include "device/convert.cuh"
#include "emulate.h"

namespace cutlass_ops::decode {
namespace {

constexpr int kNibbleOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7}, kByteOrder[4] = {0, 2, 1, 3};

// Element i of a word, by the definition of the order.
template <int kBits>
int element(uint32_t word, int i, bool is_signed, bool interleaved) {
  int place = !interleaved ? i : kBits == 4 ? kNibbleOrder[i] : kByteOrder[i];
  int code = int(word >> kBits * place & ((1u << kBits) - 1));
  return is_signed && code >= 1 << (kBits - 1) ? code - (1 << kBits) : code;
}

// Every 16-bit pattern in the low half of a word, and, in another order, in the high half.
template <class Check>
void for_each_word(Check const& check) {
  for (uint32_t low = 0; low < 0x10000; ++low) check((low * 40503u & 0xffff) << 16 | low);
}

template <int kBits, bool kHalf, class Converter>
int wrong(bool is_signed, bool interleaved) {
  auto number = [](uint32_t bits, int high) {
    return kHalf ? emulate::half(bits, high) : emulate::bfloat16(bits, high);
  };
  int count = 0;
  for_each_word([&](uint32_t word) {
    uint32_t bits[Converter::kPairs], subtrahend[Converter::kPairs] = {};
    if constexpr (kBits == 8 && !kHalf) {
      Converter::bits(word, bits, subtrahend);
    } else {
      Converter::bits(word, bits);
    }
    for (int i = 0; i < 2 * Converter::kPairs; ++i) {
      int pair = i / 2, high = i % 2;
      double value = (number(bits[pair], high) - number(subtrahend[pair], high)) *
                         number(Converter::factor(pair), high) +
                     number(Converter::addend(pair), high);
      count += value != element<kBits>(word, i, is_signed, interleaved);
    }
  });
  return count;
}

template <bool kSigned, bool kInterleaved>
void check_all() {
  EXPECT_EQ((wrong<4, true, NibblesHalf<kSigned, kInterleaved>>(kSigned, kInterleaved)), 0);
  EXPECT_EQ((wrong<4, false, NibblesBfloat16<kSigned, kInterleaved>>(kSigned, kInterleaved)), 0);
  EXPECT_EQ((wrong<8, true, BytesHalf<kSigned, kInterleaved>>(kSigned, kInterleaved)), 0);
  EXPECT_EQ((wrong<8, false, BytesBfloat16<kSigned, kInterleaved>>(kSigned, kInterleaved)), 0);
}

TEST(Convert, UnsignedPlain) { check_all<false, false>(); }
TEST(Convert, UnsignedInterleaved) { check_all<false, true>(); }
TEST(Convert, SignedPlain) { check_all<true, false>(); }
TEST(Convert, SignedInterleaved) { check_all<true, true>(); }

TEST(Convert, WorkedExamples) {
  uint32_t out[4], pairs[2];
  NibblesHalf<false, true>::bits(0xe3, out);
  EXPECT_EQ(out[0], 0x64006403u);
  EXPECT_EQ(out[1], 0x640064e0u);
  NibblesHalf<true, false>::bits(0xe3, out);
  EXPECT_EQ(out[0], 0x6460640bu);
  NibblesBfloat16<false, false>::bits(0xe3, out);
  EXPECT_EQ(out[0], 0x430e4303u);
  BytesHalf<true, false>::bits(0xfe03, pairs);
  EXPECT_EQ(pairs[0], 0x647e6483u);
}

}  // namespace
}  // namespace cutlass_ops::decode
