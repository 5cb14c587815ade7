#include "cutlass_ops/words.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "formats/width.h"
#include "host/memory.h"
#include "host/threads.h"
#include "host/vectors.h"

namespace cutlass_ops {
namespace {

constexpr int64_t kBatch = 4;             // tiles that a thread takes at a time
constexpr int64_t kRowBatch = 16;         // the same of rows
constexpr int64_t kPieceBytes = 1 << 16;  // bytes of two codes that a thread takes at a time

void check(int64_t n, int64_t k, int bits, int threads) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - 128;
  auto const fail = [](char const* name, int64_t value, std::string const& accepted) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                "; accepted: " + accepted);
  };
  std::string const range = "1 to " + std::to_string(kLargest);
  if (!is_code_width(bits) || nibble_columns(bits) > 1) fail("bits", bits, "4, 8");
  if (n < 1 || n > kLargest) fail("n", n, range);
  if (k < 1 || k > kLargest) fail("k", k, range);
  if (threads < 0) fail("threads", threads, "0 (every core) and up");
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Row r of 8 and 128 columns: sixteen words [t, j].
void unpack_tile_row(uint32_t const* words, uint8_t* codes) {
  Bytes v[4];
  for (int t = 0; t < 4; ++t) v[t] = load(words + 4 * t);
  transpose_words(v);  // v[j]: the words of t = 0 .. 3
  for (int j = 0; j < 4; ++j) {
    // Bytes 0 and 2 of the words are columns 2 t and 2 t + 1 (low halves) and those plus 8 (high
    // halves), bytes 1 and 3 the same plus 16.
    Bytes const pairs = unzip_halves(v[j]);
    Longs const low = Longs(pairs & splat(0x0f)), high = Longs(pairs >> 4);
    store(codes + 32 * j, Bytes(CUTLASS_OPS_SHUFFLE(Longs, low, high, 0, 2)));
    store(codes + 32 * j + 16, Bytes(CUTLASS_OPS_SHUFFLE(Longs, low, high, 1, 3)));
  }
}

// `count` bytes to codes: interleaved in low[0 .. 2 count - 1], or in low[0 .. count - 1] and
// high[0 .. count - 1].
template <bool kInTurn>
void expand_bytes(uint8_t const* bytes, int64_t count, bool high_first, uint8_t* low,
                  uint8_t* high) {
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

// k codes along K, in words side by side.
void expand_run(Nibbles, uint32_t const* words, uint8_t* codes, int64_t k) {
  auto const* bytes = reinterpret_cast<uint8_t const*>(words);
  expand_bytes<true>(bytes, k / 2, false, codes, codes + 1);
  if (k % 2 != 0) codes[k - 1] = bytes[k / 2] & 0x0f;
}
void expand_run(WholeBytes, uint32_t const* words, uint8_t* codes, int64_t k) {
  std::memcpy(codes, words, size_t(k));
}

// Codes of 16 bytes.
void store_codes(Nibbles, uint8_t* to, Bytes v) {
  Bytes const low = v & splat(0x0f), high = v >> 4;
  store(to, zip_low(low, high));
  store(to + 16, zip_high(low, high));
}
void store_codes(WholeBytes, uint8_t* to, Bytes v) { store(to, v); }

// Words that are not adjacent along K are transposed a tile at a time: 512 rows by 64 codes, one
// cache line of the result each. Measured: longer pieces of the result are slower, as are fewer
// rows, whose words are shorter pieces of the source.
constexpr int kTileRows = 512;
constexpr int kTileK = 64;

template <int kBits>
void unpack_tile_along_k(uint32_t const* words, int64_t n_stride, int64_t k_stride, uint8_t* codes,
                         int64_t n, int64_t k, int64_t index) {
  constexpr int kWords = kTileK * kBits / 32;
  int64_t const tiles = ceil_div(k, kTileK);
  int64_t const first_row = index / tiles * kTileRows, first_word = index % tiles * kWords;
  int const rows = int(std::min<int64_t>(kTileRows, n - first_row));
  int const columns = int(std::min<int64_t>(kTileK, k - index % tiles * kTileK));
  int const count = int(ceil_div(columns * kBits, 32));
  words += first_row * n_stride + first_word * k_stride;
  codes += first_row * k + index % tiles * kTileK;
  uint32_t tile[kWords][kTileRows];
  if (count < kWords || rows < kTileRows) std::memset(tile, 0, sizeof tile);
  for (int j = 0; j < count; ++j) {
    uint32_t const* source = words + j * k_stride;
    if (n_stride == 1) {
      std::copy_n(source, rows, tile[j]);
    } else {
      for (int row = 0; row < rows; ++row) tile[j][row] = source[row * n_stride];
    }
  }
  for (int row = 0; row < rows; row += 4) {
    int const together = std::min(4, rows - row);
    uint8_t lines[4][kTileK];
    bool const whole = columns == kTileK;
    for (int j = 0; j < kWords; j += 4) {
      Bytes v[4];
      for (int i = 0; i < 4; ++i) v[i] = load(&tile[j + i][row]);
      transpose_words(v);  // four words of each of four rows
      for (int r = 0; r < together; ++r) {
        uint8_t* to = (whole ? codes + (row + r) * k : lines[r]) + j * 32 / kBits;
        store_codes(Width<kBits>(), to, v[r]);
      }
    }
    for (int r = 0; r < (whole ? 0 : together); ++r)
      std::copy_n(lines[r], columns, codes + (row + r) * k);
  }
}

// Bytes 0, 1, 2, 3 of sixteen words.
void split_bytes(Bytes const* v, Bytes (&bytes)[4]) {
  Bytes const even_low = even(v[0], v[1]), even_high = even(v[2], v[3]);
  Bytes const odd_low = odd(v[0], v[1]), odd_high = odd(v[2], v[3]);
  bytes[0] = even(even_low, even_high);
  bytes[1] = even(odd_low, odd_high);
  bytes[2] = odd(even_low, even_high);
  bytes[3] = odd(odd_low, odd_high);
}

// Unpacks a tile of words along N: 64 words, of 512 rows.
constexpr int kTileWords = kTileRows / 8;

void unpack_tile_along_n(uint32_t const* words, int64_t n_stride, int64_t k_stride,
                         int const (&order)[8], uint8_t* codes, int64_t n, int64_t k,
                         int64_t index) {
  int64_t const tiles = ceil_div(k, kTileK);
  int64_t const first_word = index / tiles * kTileWords, first_k = index % tiles * kTileK;
  int const count = int(std::min<int64_t>(kTileWords, n / 8 - first_word));
  int const columns = int(std::min<int64_t>(kTileK, k - first_k));
  words += first_word * n_stride + first_k * k_stride;
  uint32_t tile[kTileK][kTileWords];
  if (columns < kTileK || count < kTileWords) std::memset(tile, 0, sizeof tile);
  for (int column = 0; column < columns; ++column) {
    uint32_t const* source = words + column * k_stride;
    if (n_stride == 1) {
      std::copy_n(source, count, tile[column]);
    } else {
      for (int i = 0; i < count; ++i) tile[column][i] = source[i * n_stride];
    }
  }
  for (int word = 0; word < count; word += 4) {
    int const together = std::min(4, count - word);
    Bytes turned[4][kTileK / 4];  // of each of four words, all k of the tile
    for (int j = 0; j < kTileK / 4; ++j) {
      Bytes v[4];
      for (int i = 0; i < 4; ++i) v[i] = load(&tile[4 * j + i][word]);
      transpose_words(v);
      for (int i = 0; i < 4; ++i) turned[i][j] = v[i];
    }
    for (int i = 0; i < together; ++i) {
      Bytes bytes[kTileK / 16][4];
      for (int j = 0; j < kTileK / 16; ++j) split_bytes(&turned[i][4 * j], bytes[j]);
      uint8_t* rows = codes + (first_word + word + i) * 8 * k + first_k;
      // One cache line at a time: rows are a power of two apart, so few of their lines fit in the
      // cache at once.
      for (int p = 0; p < 8; ++p) {
        uint8_t line[kTileK];
        bool const whole = columns == kTileK;
        uint8_t* to = whole ? rows + order[p] * k : line;
        for (int j = 0; j < kTileK / 16; ++j) {
          store(to + 16 * j, p % 2 ? bytes[j][p / 2] >> 4 : bytes[j][p / 2] & splat(0x0f));
        }
        if (!whole) std::copy_n(line, columns, rows + order[p] * k);
      }
    }
  }
}

}  // namespace

void unpack_along_k(uint32_t const* words, int64_t n_stride, int64_t k_stride, uint8_t* codes,
                    int64_t n, int64_t k, int bits, int threads) {
  check(n, k, bits, threads);
  prefer_large_pages(codes, size_t(n) * k);
  if (k_stride == 1) {
    return for_each_index(n, kRowBatch, threads, [=](int64_t row) {
      uint32_t const* run = words + row * n_stride;
      with_nibbles_or_bytes(bits, [&](auto width) { expand_run(width, run, codes + row * k, k); });
    });
  }
  for_each_index(ceil_div(n, kTileRows) * ceil_div(k, kTileK), kBatch, threads, [=](int64_t index) {
    with_nibbles_or_bytes(bits, [&](auto width) {
      constexpr int kBits = decltype(width)::kBits;
      unpack_tile_along_k<kBits>(words, n_stride, k_stride, codes, n, k, index);
    });
  });
}

void unpack_along_n(uint32_t const* words, int64_t n_stride, int64_t k_stride,
                    int const (&order)[8], uint8_t* codes, int64_t n, int64_t k, int threads) {
  check(n, k, 4, threads);
  if (n % 8 != 0)
    throw std::invalid_argument("n is " + std::to_string(n) + "; accepted: multiples of 8");
  unsigned seen = 0;
  for (int row : order) seen |= row >= 0 && row < 8 ? 1u << row : 0u;
  if (seen != 0xff) throw std::invalid_argument("order is no permutation of 0 .. 7");
  prefer_large_pages(codes, size_t(n) * k);
  int64_t const tiles = ceil_div(n / 8, kTileWords) * ceil_div(k, kTileK);
  for_each_index(tiles, kBatch, threads, [&](int64_t index) {
    unpack_tile_along_n(words, n_stride, k_stride, order, codes, n, k, index);
  });
}

void unpack_tiles(uint32_t const* words, uint8_t* codes, int64_t n, int64_t k, int threads) {
  check(n, k, 4, threads);
  if (n % 8 != 0 || k % 128 != 0) {
    throw std::invalid_argument("n, k are " + std::to_string(n) + ", " + std::to_string(k) +
                                "; accepted: multiples of 8 and of 128");
  }
  prefer_large_pages(codes, size_t(n) * k);
  for_each_index(n / 8 * (k / 128), kBatch, threads, [=](int64_t index) {
    int64_t const a = index / (k / 128), b = index % (k / 128);
    for (int r = 0; r < 8; ++r)
      unpack_tile_row(words + index * 128 + r * 16, codes + (a * 8 + r) * k + b * 128);
  });
}

void unpack_bytes(uint8_t const* bytes, int64_t blocks, int64_t stride, int64_t size, int64_t run,
                  ByteOrder order, uint8_t* codes, int threads) {
  constexpr int64_t kLargest = int64_t{1} << 61;
  if (blocks < 1 || size < 1 || stride < size || size > kLargest / blocks || run < 1 ||
      size % run != 0 || threads < 0) {
    throw std::invalid_argument("blocks, stride, size, run, threads are " + std::to_string(blocks) +
                                ", " + std::to_string(stride) + ", " + std::to_string(size) + ", " +
                                std::to_string(run) + ", " + std::to_string(threads) +
                                "; accepted: blocks, size and run from 1 up, stride from size up, "
                                "run that divides size, threads "
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
      expand(bytes + r / runs * stride + r % runs * run, std::min(part, run - first),
             codes + r * 2 * run, first);
      return;
    }
    for (int64_t block = index * together; block < std::min(blocks, (index + 1) * together);
         ++block) {
      for (int64_t r = 0; r < runs; ++r)
        expand(bytes + block * stride + r * run, run, codes + (block * runs + r) * 2 * run, 0);
    }
  });
}

void permute_columns(uint8_t const* codes, uint8_t* permuted, int64_t n, int64_t k,
                     int32_t const* perm, int threads) {
  check(n, k, 8, threads);
  prefer_large_pages(permuted, size_t(n) * k);
  for_each_index(n, kRowBatch, threads, [=](int64_t row) {
    uint8_t const* source = codes + row * k;
    uint8_t* destination = permuted + row * k;
    for (int64_t i = 0; i < k; ++i) destination[i] = source[perm[i]];
  });
}

}  // namespace cutlass_ops
