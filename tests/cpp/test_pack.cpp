#include <gtest/gtest.h>

#include <cstdint>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/pack.h"
#include "host/threads.h"

namespace cutlass_ops {
namespace {

constexpr uint8_t kPoison = 0xa5;

std::vector<uint8_t> random_codes(int64_t n, int64_t k, int bits) {
  std::mt19937 random(uint32_t(n * 31 + k));
  std::vector<uint8_t> codes(size_t(n * k));
  for (uint8_t& code : codes) code = uint8_t(random() & ((1u << bits) - 1));
  return codes;
}

class Pack : public testing::TestWithParam<std::tuple<int, std::tuple<int, int>>> {
 protected:
  int const bits = std::get<0>(GetParam());
  int const n = std::get<0>(std::get<1>(GetParam()));
  int const k = std::get<1>(std::get<1>(GetParam()));
  std::vector<uint8_t> const codes = random_codes(n, k, bits);
};

TEST_P(Pack, PutsEveryCodeWhereTheLayoutSaysAndZeroInThePadding) {
  std::vector<uint8_t> packed(size_t(packed_bytes(n, k, bits)) + 1, kPoison);
  pack(codes.data(), packed.data(), n, k, bits);
  int const k_pad = int(padded_k(k)), mask = (1 << bits) - 1;
  for (int row = 0; row < padded_rows(n); ++row) {
    for (int column = 0; column < k_pad; ++column) {
      CodePosition const position = code_position(row, column, k_pad, bits);
      int const stored = packed[size_t(position.byte)] >> position.shift & mask;
      bool const inside = row < n && column < k;
      int const code = inside ? codes[size_t(row) * k + column] - (1 << (bits - 1)) : 0;
      ASSERT_EQ(stored, code & mask) << "row " << row << ", k " << column;
    }
  }
  EXPECT_EQ(packed.back(), kPoison);  // nothing written past the end
}

TEST_P(Pack, RoundTripsOnAnyNumberOfThreads) {
  for (int threads : {0, 1, 2, 5}) {
    std::vector<uint8_t> packed(size_t(packed_bytes(n, k, bits)), kPoison);
    std::vector<uint8_t> unpacked(codes.size() + 1, kPoison);
    pack(codes.data(), packed.data(), n, k, bits, threads);
    unpack(packed.data(), unpacked.data(), n, k, bits, threads);
    EXPECT_EQ(unpacked.back(), kPoison);
    unpacked.pop_back();
    EXPECT_TRUE(unpacked == codes) << threads << " threads";
  }
}

TEST_P(Pack, UnpackIgnoresThePadding) {
  std::vector<uint8_t> packed(size_t(packed_bytes(n, k, bits)), 0xff);
  pack(codes.data(), packed.data(), n, k, bits);
  int const k_pad = int(padded_k(k)), mask = (1 << bits) - 1;
  for (int row = 0; row < padded_rows(n); ++row) {
    for (int column = 0; column < k_pad; ++column) {
      if (row < n && column < k) continue;
      CodePosition const position = code_position(row, column, k_pad, bits);
      packed[size_t(position.byte)] |= uint8_t(mask << position.shift);
    }
  }
  std::vector<uint8_t> unpacked(codes.size());
  unpack(packed.data(), unpacked.data(), n, k, bits);
  EXPECT_TRUE(unpacked == codes);
}

// Sizes below, at and beyond one row panel and one K tile; the last has more tiles than a thread
// handles at a time.
INSTANTIATE_TEST_SUITE_P(
    Shapes, Pack,
    testing::Combine(testing::Values(2, 4, 8),
                     testing::Values(std::make_tuple(1, 1), std::make_tuple(3, 5),
                                     std::make_tuple(64, 128), std::make_tuple(65, 129),
                                     std::make_tuple(32, 576), std::make_tuple(192, 576),
                                     std::make_tuple(1000, 200), std::make_tuple(127, 10944))));

TEST(PackErrors, NameTheValueAndWhatIsAccepted) {
  uint8_t byte = 0;
  auto const message = [&](int64_t n, int64_t k, int bits, int threads) {
    try {
      pack(&byte, &byte, n, k, bits, threads);
    } catch (std::invalid_argument const& error) {
      try {
        unpack(&byte, &byte, n, k, bits, threads);
      } catch (std::invalid_argument const&) {
        return std::string(error.what());
      }
    }
    return std::string("accepted");
  };
  EXPECT_EQ(message(1, 1, 3, 0), "bits is 3; accepted: 2, 4, 8");
  EXPECT_EQ(message(0, 1, 4, 0), "n is 0; accepted: 1 to 2147483519");
  EXPECT_EQ(message(2147483520, 1, 4, 0), "n is 2147483520; accepted: 1 to 2147483519");
  EXPECT_EQ(message(1, -7, 4, 0), "k is -7; accepted: 1 to 2147483519");
  EXPECT_EQ(message(1, int64_t(1) << 31, 4, 0), "k is 2147483648; accepted: 1 to 2147483519");
  EXPECT_EQ(message(1, 1, 8, -1), "threads is -1; accepted: 0 (every core) and up");
}

// Codes of more bits would run into those of other rows. Inside of whole tiles, and in
// those that end early.
TEST(PackErrors, NameTheFirstCodeThatDoesNotFit) {
  int const n = 130, k = 300;
  std::vector<uint8_t> packed(size_t(packed_bytes(n, k, 8)));
  for (auto [row, column] : {std::pair(3, 5), {63, 127}, {129, 4}, {70, 299}, {129, 299}}) {
    std::vector<uint8_t> codes = random_codes(n, k, 4);
    codes[row * k + column] = 200, codes.back() = 16;
    for (int threads : {1, 3}) {
      try {
        pack(codes.data(), packed.data(), n, k, 4, threads);
        ADD_FAILURE() << "accepted";
      } catch (std::invalid_argument const& error) {
        std::string const value = row == n - 1 && column == k - 1 ? "16" : "200";
        EXPECT_EQ(error.what(), "codes[" + std::to_string(row) + ", " + std::to_string(column) +
                                    "] is " + value + "; accepted with bits = 4: 0 to 15");
      }
    }
    EXPECT_NO_THROW(pack(codes.data(), packed.data(), n, k, 8));
  }
}

TEST(PackErrors, NameANullPointer) {
  uint8_t byte = 0;
  for (auto [codes, packed, name] :
       {std::tuple(static_cast<uint8_t*>(nullptr), &byte, "codes"), {&byte, nullptr, "packed"}}) {
    for (bool packs : {true, false}) {
      try {
        packs ? pack(codes, packed, 1, 1, 4) : unpack(packed, codes, 1, 1, 4);
        ADD_FAILURE() << "accepted";
      } catch (std::invalid_argument const& error) {
        EXPECT_EQ(error.what(), std::string(name) + " is a null pointer");
      }
    }
  }
}

TEST(Threads, ThrowWhatWorkThrows) {
  for (int threads : {1, 2, 4}) {
    for (int64_t at : {0, 500, 999}) {
      auto const work = [at](int64_t index) {
        if (index == at) throw std::bad_alloc();
      };
      EXPECT_THROW(for_each_index(1000, 1, threads, work), std::bad_alloc);
    }
    std::atomic<int> calls{0};
    for_each_index(1000, 7, threads, [&](int64_t) { ++calls; });
    EXPECT_EQ(calls, 1000);
  }
}

}  // namespace
}  // namespace cutlass_ops
