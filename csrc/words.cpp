#include "cutlass_ops/words.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "host_memory.h"
#include "host_threads.h"
#include "host_vectors.h"

namespace cutlass_ops {
namespace {

// A tile is 64 bytes of words along either axis, a cache line, so that both strided reads and strided writes use all they fetch.
constexpr int kLineWords = 16;
constexpr int64_t kBatch = 16;            // tiles that a thread takes at a time
constexpr int64_t kPieceBytes = 1 << 16;  // bytes of two codes that a thread takes at a time

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

// `count` bytes to codes: in turn to low[0 .. 2 count - 1], or to low[0 .. count - 1] and high[0 .. count - 1].
template <bool kInTurn>
void expand_bytes(uint8_t const* bytes, int64_t count, bool high_first, uint8_t* low, uint8_t* high) {
  if (high_first) std::swap(low, high);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    Bytes const v = load(bytes + i), a = v & splat(0x0f), b = v >> 4;
    if constexpr (kInTurn) {
      uint8_t* const to = std::min(low, high) + 2 * i;
      store(to, high_first ? zip_low(b, a) : zip_low(a, b));
      store(to + 16, high_first ? zip_high(b, a) : zip_high(a, b));
    } else {
      store(low + i, a);
      store(high + i, b);
    }
  }
  for (int64_t const step = kInTurn ? 2 : 1; i < count; ++i) {
    low[step * i] = bytes[i] & 0x0f;
    high[step * i] = bytes[i] >> 4;
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

void unpack_bytes(uint8_t const* bytes, int64_t blocks, int64_t stride, int64_t size, int64_t run, ByteOrder order,
                  uint8_t* codes, int threads) {
  constexpr int64_t kLargest = int64_t{1} << 61;
  if (blocks < 1 || size < 1 || stride < size || size > kLargest / blocks || run < 1 || size % run != 0 || threads < 0) {
    throw std::invalid_argument(
        "blocks, stride, size, run, threads are " + std::to_string(blocks) + ", " + std::to_string(stride) + ", " +
        std::to_string(size) + ", " + std::to_string(run) + ", " + std::to_string(threads) +
        "; accepted: blocks, size and run from 1 up, stride from size up, run that divides size, threads "
        "from 0 up");
  }
  prefer_large_pages(codes, size_t(blocks) * size * 2);
  bool const in_turn = order == ByteOrder::low_high_in_turn || order == ByteOrder::high_low_in_turn;
  bool const high_first = order == ByteOrder::high_low_in_turn || order == ByteOrder::high_then_low;
  // A piece is a part of a long run, or several blocks.
  int64_t const part = std::min(run, kPieceBytes), parts = ceil_div(run, part), runs = size / run;
  int64_t const together = std::max<int64_t>(1, kPieceBytes / size),
                pieces = parts > 1 ? blocks * runs * parts : ceil_div(blocks, together);
  auto const expand = [&](uint8_t const* from, int64_t count, uint8_t* to, int64_t first) {
    if (in_turn) {
      expand_bytes<true>(from + first, count, high_first, to + 2 * first, to + 2 * first + 1);
    } else {
      expand_bytes<false>(from + first, count, high_first, to + first, to + run + first);
    }
  };
  for_each_index(pieces, 1, threads, [&](int64_t index) {
    if (parts > 1) {
      int64_t const r = index / parts, first = index % parts * part;
      expand(bytes + r / runs * stride + r % runs * run, std::min(part, run - first), codes + r * 2 * run, first);
      return;
    }
    for (int64_t block = index * together; block < std::min(blocks, (index + 1) * together); ++block) {
      for (int64_t r = 0; r < runs; ++r) expand(bytes + block * stride + r * run, run, codes + (block * runs + r) * 2 * run, 0);
    }
  });
}

void permute_columns(uint8_t const* codes, uint8_t* permuted, int64_t n, int64_t k, int32_t const* perm, int threads) {
  check(n, k, 8, threads);
  prefer_large_pages(permuted, size_t(n) * k);
  for_each_index(n, kBatch, threads, [=](int64_t row) {
    uint8_t const* source = codes + row * k;
    uint8_t* destination = permuted + row * k;
    for (int64_t i = 0; i < k; ++i) destination[i] = source[perm[i]];
  });
}

}  // namespace cutlass_ops
