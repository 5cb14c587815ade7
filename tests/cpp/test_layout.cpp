// layout.h against the tables it draws. test_fragments.cu checks it against the instructions.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "cutlass_ops/layout.h"

namespace cutlass_ops {
namespace {

struct Coordinate {
  int row, k;
};

// Walks memory in the documented order and calls check(bit offset, coordinate) for each code.
template <class Check>
void walk(int bits, int n_pad, int k_pad, Check const& check) {
  std::array<int, 4> const ks = {0, 8, 1, 9};  // + 2t: the elements of a word
  int const k_per_unit = 256 / bits;
  int64_t bit = 0;
  for (int panel = 0; panel < n_pad / 64; ++panel)
    for (int tile = 0; tile < k_pad / 128; ++tile)
      for (int block = 0; block < 4; ++block)
        for (int unit = 0; unit < 128 / k_per_unit; ++unit)
          for (int lane = 0; lane < 32; ++lane)
            for (int word = 0; word < 4; ++word)
              for (int i = 0; i < 32 / bits; ++i) {
                int const g = lane / 4, t = lane % 4;
                int const nibble = i * bits / 4;
                int const half = bits < 8 ? nibble % 2 : word % 2;  // row g or row g + 8
                int const column = bits < 8 ? word : word / 2;      // which 16 k
                int const further = bits == 2 ? 64 * (i % 2) : 0;   // the nibble's other column
                int const element = nibble / 2;
                check(bit, Coordinate{64 * panel + 16 * block + g + 8 * half,
                                      128 * tile + k_per_unit * unit + further + 16 * column +
                                          2 * t + ks[element]});
                bit += bits;
              }
}

class Layout : public testing::TestWithParam<int> {};  // bits

TEST_P(Layout, IsTheDocumentedOrder) {
  int const bits = GetParam(), n_pad = 192, k_pad = 384;
  walk(bits, n_pad, k_pad, [&](int64_t bit, Coordinate code) {
    CodePosition const position = code_position(code.row, code.k, k_pad, bits);
    ASSERT_EQ(position.byte * 8 + position.shift, bit) << "row " << code.row << ", k " << code.k;
  });
}

TEST_P(Layout, IsABijection) {
  int const bits = GetParam(), n_pad = 128, k_pad = 256;
  std::vector<int> used(size_t(n_pad) * k_pad, 0);
  for (int n = 0; n < n_pad; ++n) {
    for (int k = 0; k < k_pad; ++k) {
      CodePosition const position = code_position(n, k, k_pad, bits);
      ASSERT_EQ(position.shift % bits, 0);
      ASSERT_LE(position.shift + bits, 8);
      ++used.at(size_t(position.byte * 8 + position.shift) / bits);
    }
  }
  for (int count : used) ASSERT_EQ(count, 1);
  EXPECT_EQ(packed_bytes(n_pad, k_pad, bits) * 8 / bits, int64_t(used.size()));
}

INSTANTIATE_TEST_SUITE_P(Bits, Layout, testing::Values(2, 4, 8), testing::PrintToStringParamName());

TEST(Layout, Sizes) {
  EXPECT_EQ(k_tile_bytes(2), 2048);
  EXPECT_EQ(k_tile_bytes(4), 4096);
  EXPECT_EQ(k_tile_bytes(8), 8192);
  EXPECT_EQ(packed_bytes(1, 1, 4), 4096);
  EXPECT_EQ(packed_bytes(64, 128, 8), 8192);
  EXPECT_EQ(packed_bytes(65, 129, 8), 4 * 8192);
  EXPECT_EQ(packed_bytes(192, 576, 4), 192 * 640 / 2);
  EXPECT_EQ(packed_bytes(57344, 57344, 8), int64_t(57344) * 57344);  // beyond 2^31
}

TEST(Layout, OffsetsBeyondTwoGigabytes) {
  CodePosition const last = code_position(57343, 57343, 57344, 8);
  EXPECT_EQ(last.byte, int64_t(57344) * 57344 - 1);
}

TEST(Layout, GroupRows) {
  std::array<int, 64> used{};
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 4; ++i)
      for (int h = 0; h < 2; ++h) {
        EXPECT_EQ(group_row(16 * i + 8 * h + g), 8 * g + 2 * i + h);
        ++used.at(group_row(16 * i + 8 * h + g));
      }
  for (int count : used) EXPECT_EQ(count, 1);
  EXPECT_EQ(group_row(64 + 9), group_row(9));  // the position inside a row panel
}

TEST(Layout, ActivationPositions) {
  std::array<int, 16> const stored = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
  for (int position = 0; position < 16; ++position) {
    EXPECT_EQ(activation_position(stored[position]), position);
    EXPECT_EQ(activation_position(48 + stored[position]), position);
  }
}

// Constant expressions, so that kernels and tables can be built from them.
static_assert(code_position(0, 0, 128, 4).byte == 0);
static_assert(code_position(8, 0, 128, 4).byte == 0 && code_position(8, 0, 128, 4).shift == 4);
static_assert(code_position(0, 8, 128, 4).byte == 1);
static_assert(code_position(8, 0, 128, 8).byte == 4);

}  // namespace
}  // namespace cutlass_ops
