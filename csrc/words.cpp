#include "cutlass_ops/words.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "host_memory.h"
#include "host_threads.h"
#include "host_vectors.h"

namespace cutlass_ops {
namespace {

// A tile is 64 bytes of words along either axis, a cache line, so that both strided reads and strided writes use all they fetch.
constexpr int kLineWords = 16;
constexpr int64_t kBatch = 16;  // tiles that a thread takes at a time

void check(int64_t n, int64_t k, int bits, int threads) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - 128;
  auto const fail = [](char const* name, int64_t value, std::string const& accepted) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; accepted: " + accepted);
  };
  std::string const range = "1 to " + std::to_string(kLargest);
  if (bits != 4 && bits != 8) fail("bits", bits, "4, 8");
  if (n < 1 || n > kLargest) fail("n", n, range);
  if (k < 1 || k > kLargest) fail("k", k, range);
  if (threads < 0) fail("threads", threads, "0 (every core) and up");
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row of sixteen words along K to its codes.
template <int kBits>
void expand_row(uint32_t const (&words)[kLineWords], uint8_t* codes) {
  for (int i = 0; i < kLineWords; i += 4) {
    Bytes const v = load(words + i);
    if constexpr (kBits == 8) {
      store(codes + 4 * i, v);
    } else {
      Bytes const low = v & splat(0x0f), high = v >> 4;
      store(codes + 8 * i, zip_low(low, high));
      store(codes + 8 * i + 16, zip_high(low, high));
    }
  }
}

template <int kBits>
void unpack_tile_along_k(uint32_t const* words, int64_t n_stride, int64_t k_stride, uint8_t* codes, int64_t n, int64_t k,
                         int64_t index) {
  constexpr int kPerWord = 32 / kBits, kColumns = kLineWords * kPerWord;
  int64_t const tiles = ceil_div(k, kColumns);
  int64_t const first_row = index / tiles * kLineWords, first_k = index % tiles * kColumns;
  int const rows = int(std::min<int64_t>(kLineWords, n - first_row));
  int const columns = int(std::min<int64_t>(kColumns, k - first_k));
  int const count = int(ceil_div(columns, kPerWord));
  words += first_row * n_stride + first_k / kPerWord * k_stride;
  uint32_t tile[kLineWords][kLineWords] = {};
  if (k_stride == 1) {
    for (int row = 0; row < rows; ++row) std::copy_n(words + row * n_stride, count, tile[row]);
  } else {
    for (int j = 0; j < count; ++j) {
      for (int row = 0; row < rows; ++row) tile[row][j] = words[row * n_stride + j * k_stride];
    }
  }
  for (int row = 0; row < rows; ++row) {
    uint8_t* destination = codes + (first_row + row) * k + first_k;
    if (columns == kColumns) {
      expand_row<kBits>(tile[row], destination);
    } else {
      uint8_t whole[kColumns];
      expand_row<kBits>(tile[row], whole);
      std::copy_n(whole, columns, destination);
    }
  }
}

// Bytes 0, 1, 2, 3 of sixteen words.
void split_bytes(Bytes const (&v)[4], Bytes (&bytes)[4]) {
  Bytes const even_low = even(v[0], v[1]), even_high = even(v[2], v[3]);
  Bytes const odd_low = odd(v[0], v[1]), odd_high = odd(v[2], v[3]);
  bytes[0] = even(even_low, even_high);
  bytes[1] = even(odd_low, odd_high);
  bytes[2] = odd(even_low, even_high);
  bytes[3] = odd(odd_low, odd_high);
}

constexpr int kTileK = 64;

void unpack_tile_along_n(uint32_t const* words, int64_t n_stride, int64_t k_stride, int const (&order)[8], uint8_t* codes,
                         int64_t n, int64_t k, int64_t index) {
  int64_t const tiles = ceil_div(k, kTileK);
  int64_t const first_word = index / tiles * kLineWords, first_k = index % tiles * kTileK;
  int const count = int(std::min<int64_t>(kLineWords, n / 8 - first_word));
  int const columns = int(std::min<int64_t>(kTileK, k - first_k));
  words += first_word * n_stride + first_k * k_stride;
  uint32_t tile[kLineWords][kTileK];
  for (int column = 0; column < columns; ++column) {
    for (int i = 0; i < count; ++i) tile[i][column] = words[i * n_stride + column * k_stride];
  }
  for (int i = 0; i < count; ++i) {
    uint8_t* rows = codes + (first_word + i) * 8 * k + first_k;
    std::fill(tile[i] + columns, tile[i] + kTileK, 0u);
    for (int column = 0; column < columns; column += 16) {
      Bytes v[4], bytes[4];
      for (int j = 0; j < 4; ++j) v[j] = load(tile[i] + column + 4 * j);
      split_bytes(v, bytes);
      for (int p = 0; p < 8; ++p) {
        Bytes const sixteen = p % 2 ? bytes[p / 2] >> 4 : bytes[p / 2] & splat(0x0f);
        uint8_t* destination = rows + order[p] * k + column;
        if (column + 16 <= columns) {
          store(destination, sixteen);
        } else {
          uint8_t part[16];
          store(part, sixteen);
          std::copy_n(part, columns - column, destination);
        }
      }
    }
  }
}

}  // namespace

void unpack_along_k(uint32_t const* words, int64_t n_stride, int64_t k_stride, uint8_t* codes, int64_t n, int64_t k, int bits,
                    int threads) {
  check(n, k, bits, threads);
  prefer_large_pages(codes, size_t(n) * k);
  int64_t const tiles = ceil_div(n, kLineWords) * ceil_div(k, kLineWords * 32 / bits);
  for_each_index(tiles, kBatch, threads, [=](int64_t index) {
    return bits == 4 ? unpack_tile_along_k<4>(words, n_stride, k_stride, codes, n, k, index)
                     : unpack_tile_along_k<8>(words, n_stride, k_stride, codes, n, k, index);
  });
}

void unpack_along_n(uint32_t const* words, int64_t n_stride, int64_t k_stride, int const (&order)[8], uint8_t* codes, int64_t n,
                    int64_t k, int threads) {
  check(n, k, 4, threads);
  if (n % 8 != 0) throw std::invalid_argument("n is " + std::to_string(n) + "; accepted: multiples of 8");
  unsigned seen = 0;
  for (int row : order) seen |= row >= 0 && row < 8 ? 1u << row : 0u;
  if (seen != 0xff) throw std::invalid_argument("order is no permutation of 0 .. 7");
  prefer_large_pages(codes, size_t(n) * k);
  int64_t const tiles = ceil_div(n / 8, kLineWords) * ceil_div(k, kTileK);
  for_each_index(tiles, kBatch, threads,
                 [&](int64_t index) { unpack_tile_along_n(words, n_stride, k_stride, order, codes, n, k, index); });
}

}  // namespace cutlass_ops
