#include "cutlass_ops/words.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace cutlass_ops {
namespace {

constexpr int kSequential[8] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr int kAwq[8] = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr uint8_t kPoison = 0xa5;

TEST(Words, GoldenWords) {
  // Codes 0 .. 7 at places 0 .. 7: GPTQ and compressed-tensors, and AWQ.
  std::vector<uint8_t> codes(8);
  uint32_t word = 0x76543210;
  unpack_along_k(&word, 1, 1, codes.data(), 1, 8, 4);
  EXPECT_EQ(codes, (std::vector<uint8_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  word = 0x75316420;
  unpack_along_n(&word, 1, 1, kAwq, codes.data(), 8, 1);
  EXPECT_EQ(codes, (std::vector<uint8_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  word = 0xff80017f;
  codes.resize(4);
  unpack_along_k(&word, 1, 1, codes.data(), 1, 4, 8);
  EXPECT_EQ(codes, (std::vector<uint8_t>{0x7f, 0x01, 0x80, 0xff}));
}

std::vector<uint32_t> random_words(int64_t count) {
  std::mt19937 random{uint32_t(count)};
  std::vector<uint32_t> words(size_t(count), 0u);
  for (uint32_t& word : words) word = uint32_t(random());
  return words;
}

class WordShapes : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int const n = std::get<0>(GetParam());
  int const k = std::get<1>(GetParam());
};

TEST_P(WordShapes, AlongKWithAnyStrides) {
  for (int bits : {4, 8}) {
    int const per_word = 32 / bits, columns = (k + per_word - 1) / per_word;
    std::vector<uint32_t> const words = random_words(int64_t(n) * columns);
    for (bool transposed : {false, true}) {
      int64_t const n_stride = transposed ? 1 : columns, k_stride = transposed ? n : 1;
      for (int threads : {0, 1}) {
        std::vector<uint8_t> codes(size_t(n) * k + 1, kPoison);
        unpack_along_k(words.data(), n_stride, k_stride, codes.data(), n, k, bits, threads);
        for (int row = 0; row < n; ++row) {
          for (int column = 0; column < k; ++column) {
            uint32_t const word = words[size_t(row * n_stride + column / per_word * k_stride)];
            uint32_t const code = word >> column % per_word * bits & ((1u << bits) - 1);
            ASSERT_EQ(codes[size_t(row) * k + column], code)
                << "row " << row << ", k " << column << ", " << bits << " bits";
          }
        }
        EXPECT_EQ(codes.back(), kPoison);  // nothing written past the end
      }
    }
  }
}

TEST_P(WordShapes, AlongNWithAnyStrides) {
  int const groups = (n + 7) / 8, rows = 8 * groups;
  std::vector<uint32_t> const words = random_words(int64_t(groups) * k);
  for (bool transposed : {false, true}) {
    int64_t const n_stride = transposed ? k : 1, k_stride = transposed ? 1 : groups;
    for (auto const* order : {&kSequential, &kAwq}) {
      std::vector<uint8_t> codes(size_t(rows) * k + 1, kPoison);
      unpack_along_n(words.data(), n_stride, k_stride, *order, codes.data(), rows, k);
      for (int group = 0; group < groups; ++group) {
        for (int column = 0; column < k; ++column) {
          uint32_t const word = words[size_t(group * n_stride + column * k_stride)];
          for (int p = 0; p < 8; ++p) {
            ASSERT_EQ(codes[size_t(8 * group + (*order)[p]) * k + column], word >> 4 * p & 15u)
                << group << " " << column;
          }
        }
      }
      EXPECT_EQ(codes.back(), kPoison);
    }
  }
}

// Below, at and beyond one tile along either axis; the last has more tiles than a thread
// takes at a time.
INSTANTIATE_TEST_SUITE_P(Shapes, WordShapes,
                         testing::Values(std::make_tuple(1, 1), std::make_tuple(3, 5),
                                         std::make_tuple(16, 128), std::make_tuple(17, 129),
                                         std::make_tuple(128, 64), std::make_tuple(136, 79),
                                         std::make_tuple(1000, 1736)));

TEST(WordErrors, NameTheValueAndWhatIsAccepted) {
  uint32_t word = 0;
  uint8_t code = 0;
  auto const message = [&](auto const& call) {
    try {
      call();
    } catch (std::invalid_argument const& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(message([&] { unpack_along_k(&word, 1, 1, &code, 1, 1, 3); }),
            "bits is 3; accepted: 4, 8");
  EXPECT_EQ(message([&] { unpack_along_k(&word, 1, 1, &code, 0, 1, 4); }),
            "n is 0; accepted: 1 to 2147483519");
  EXPECT_EQ(message([&] { unpack_along_k(&word, 1, 1, &code, 1, 1, 4, -1); }),
            "threads is -1; accepted: 0 (every core) and up");
  EXPECT_EQ(message([&] { unpack_along_n(&word, 1, 1, kAwq, &code, 4, 1); }),
            "n is 4; accepted: multiples of 8");
  EXPECT_EQ(message([&] { unpack_along_n(&word, 1, 1, {0, 1, 2, 3, 4, 5, 6, 6}, &code, 8, 1); }),
            "order is no permutation of 0 .. 7");
}

TEST(Words, Tiles) {
  constexpr int kColumns[8] = {0, 8, 16, 24, 1, 9, 17, 25};
  for (auto [n, k] : {std::tuple{8, 128}, std::tuple{16, 384}, std::tuple{8 * 37, 256}}) {
    std::vector<uint32_t> const words = random_words(int64_t(n) * k / 8);
    for (int threads : {0, 1}) {
      std::vector<uint8_t> codes(size_t(n) * k + 1, kPoison);
      unpack_tiles(words.data(), codes.data(), n, k, threads);
      for (size_t i = 0; i < words.size(); ++i) {
        size_t const j = i % 4, lane = i / 4 % 32, b = i / 128 % size_t(k / 128),
                     a = i / (size_t(k / 128) * 128);
        for (int p = 0; p < 8; ++p) {
          size_t const row = 8 * a + lane / 4,
                       column = 128 * b + 32 * j + 2 * (lane % 4) + size_t(kColumns[p]);
          ASSERT_EQ(codes[row * size_t(k) + column], words[i] >> 4 * p & 15)
              << "word " << i << ", nibble " << p;
        }
      }
      ASSERT_EQ(codes.back(), kPoison);
    }
  }
  uint32_t word = 0;
  uint8_t code;
  EXPECT_THROW(unpack_tiles(&word, &code, 4, 128), std::invalid_argument);
  EXPECT_THROW(unpack_tiles(&word, &code, 8, 64), std::invalid_argument);
  EXPECT_THROW(unpack_tiles(&word, &code, 0, 128), std::invalid_argument);
}

std::vector<uint8_t> random_bytes(size_t count) {
  std::mt19937 random{uint32_t(count)};
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = uint8_t(random());
  return bytes;
}

TEST(Words, BytesOfTwoCodes) {
  struct Shape {
    int64_t blocks, stride, size, run;
  };
  for (Shape const& s :
       {Shape{1, 1, 1, 1}, Shape{7, 18, 16, 16}, Shape{9000, 20, 16, 16}, Shape{5, 144, 128, 32},
        Shape{3, 40, 33, 11}, Shape{1, 200001, 200001, 200001}, Shape{2, 140007, 140000, 70000}}) {
    std::vector<uint8_t> const bytes = random_bytes(size_t(s.blocks * s.stride));
    for (ByteOrder order : {ByteOrder::low_high_in_turn, ByteOrder::high_low_in_turn,
                            ByteOrder::low_then_high, ByteOrder::high_then_low}) {
      bool const in_turn =
          order == ByteOrder::low_high_in_turn || order == ByteOrder::high_low_in_turn;
      bool const high_first =
          order == ByteOrder::high_low_in_turn || order == ByteOrder::high_then_low;
      for (int threads : {0, 1}) {
        std::vector<uint8_t> codes(size_t(s.blocks * s.size * 2 + 1), kPoison);
        unpack_bytes(bytes.data(), s.blocks, s.stride, s.size, s.run, order, codes.data(), threads);
        for (int64_t block = 0; block < s.blocks; ++block) {
          for (int64_t i = 0; i < s.size; ++i) {
            uint8_t const byte = bytes[size_t(block * s.stride + i)];
            int64_t const start = (block * s.size + i / s.run * s.run) * 2, place = i % s.run;
            uint8_t const first = codes[size_t(start + (in_turn ? 2 * place : place))];
            uint8_t const second = codes[size_t(start + (in_turn ? 2 * place + 1 : s.run + place))];
            ASSERT_EQ(first, high_first ? byte >> 4 : byte & 0x0f)
                << "block " << block << ", byte " << i;
            ASSERT_EQ(second, high_first ? byte & 0x0f : byte >> 4)
                << "block " << block << ", byte " << i;
          }
        }
        ASSERT_EQ(codes.back(), kPoison);
      }
    }
  }
}

TEST(Words, RefusesBytesThatMakeNoRuns) {
  uint8_t byte = 0, codes[2];
  auto const unpack = [&](int64_t blocks, int64_t stride, int64_t size, int64_t run,
                          int threads = 0) {
    unpack_bytes(&byte, blocks, stride, size, run, ByteOrder::low_then_high, codes, threads);
  };
  EXPECT_THROW(unpack(0, 1, 1, 1), std::invalid_argument);
  EXPECT_THROW(unpack(1, 1, 0, 1), std::invalid_argument);
  EXPECT_THROW(unpack(1, 1, 2, 1), std::invalid_argument);
  EXPECT_THROW(unpack(1, 4, 4, 3), std::invalid_argument);
  EXPECT_THROW(unpack(1, 4, 4, 0), std::invalid_argument);
  EXPECT_THROW(unpack(1, 1, 1, 1, -1), std::invalid_argument);
  EXPECT_THROW(unpack(int64_t{1} << 40, int64_t{1} << 40, int64_t{1} << 40, 1),
               std::invalid_argument);
}

TEST(PermuteColumns, TakesEachColumnByItsNumber) {
  int const n = 37, k = 130;
  std::vector<uint8_t> codes(size_t(n) * k), permuted(size_t(n) * k + 1, 0xa5);
  std::vector<int32_t> perm(k);
  for (int j = 0; j < k; ++j) perm[size_t(j)] = j * 7 % k;  // 7 and 130 have no common divisor
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = uint8_t(i * 31 + i / 251);
  permute_columns(codes.data(), permuted.data(), n, k, perm.data(), 2);
  for (int row = 0; row < n; ++row) {
    for (int j = 0; j < k; ++j)
      ASSERT_EQ(permuted[size_t(row * k + j)], codes[size_t(row * k + j * 7 % k)]);
  }
  EXPECT_EQ(permuted.back(), 0xa5);  // nothing written past the end
  EXPECT_THROW(permute_columns(codes.data(), permuted.data(), 0, k, perm.data()),
               std::invalid_argument);
}

}  // namespace
}  // namespace cutlass_ops
