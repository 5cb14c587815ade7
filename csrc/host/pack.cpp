#include "cutlass_ops/pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "cutlass_ops/layout.h"
#include "formats/width.h"
#include "host/memory.h"
#include "host/threads.h"
#include "host/vectors.h"

namespace cutlass_ops {
namespace {

constexpr int64_t kBatch = 64;  // K tiles that a thread takes at a time

// One K tile of a row panel in natural order: 64 rows of 128 codes.
using Tile = std::array<uint8_t, kRowsPerPanel * kKPerTile>;

// Stored codes are centred, in two's complement; subtracting 2^(bits-1) modulo 2^bits is inverting
// the top bit, either way.
template <int kBits>
constexpr uint8_t kSignBit = uint8_t(1 << (kBits - 1));

// layout.h's order, sixteen bytes at a time. Lane t takes columns 2t, 2t+8, 2t+1, 2t+9 of each
// sixteen: `zip_halves` interleaves the first eight bytes with the last eight, so that each of the
// four lanes gets four adjacent bytes. The sixteen bytes of lane t are its four words, adjacent
// after a transposition of 4 x 4 words. tests/cpp/test_pack.cpp compares every code with
// code_position().

// A unit of rows g (codes from `low` on) and g + 8 (from `high` on). At 4 bits a word has four
// columns of sixteen, and a byte rows g and g + 8.
void write_unit(Nibbles, uint8_t const* low, uint8_t const* high, Bytes flip, uint8_t* lanes) {
  Bytes words[4];
  for (int j = 0; j < 4; ++j) {
    words[j] = zip_halves((load(low + 16 * j) ^ flip) | (load(high + 16 * j) ^ flip) << 4);
  }
  transpose_words(words);
  for (int t = 0; t < 4; ++t) store(lanes + t * kLaneBytes, words[t]);
}
// At 2 bits a nibble also has the column 64 further, in its upper two bits.
void write_unit(HalfNibbles, uint8_t const* low, uint8_t const* high, Bytes flip, uint8_t* lanes) {
  Bytes words[4];
  for (int j = 0; j < 4; ++j) {
    uint8_t const *const a = low + 16 * j, *const b = high + 16 * j;
    words[j] = zip_halves((load(a) ^ flip) | (load(a + kNibbleDistance) ^ flip) << 2 |
                          (load(b) ^ flip) << 4 | (load(b + kNibbleDistance) ^ flip) << 6);
  }
  transpose_words(words);
  for (int t = 0; t < 4; ++t) store(lanes + t * kLaneBytes, words[t]);
}
void write_unit(WholeBytes, uint8_t const* low, uint8_t const* high, Bytes flip, uint8_t* lanes) {
  Bytes words[4] = {zip_halves(load(low) ^ flip), zip_halves(load(high) ^ flip),
                    zip_halves(load(low + 16) ^ flip), zip_halves(load(high + 16) ^ flip)};
  transpose_words(words);
  for (int t = 0; t < 4; ++t) store(lanes + t * kLaneBytes, words[t]);
}

void read_unit(Nibbles, uint8_t const* lanes, Bytes flip, uint8_t* low, uint8_t* high) {
  Bytes words[4];
  for (int t = 0; t < 4; ++t) words[t] = load(lanes + t * kLaneBytes);
  transpose_words(words);
  for (int j = 0; j < 4; ++j) {
    Bytes const both = unzip_halves(words[j]);
    store(low + 16 * j, (both & splat(0x0f)) ^ flip);
    store(high + 16 * j, (both >> 4) ^ flip);
  }
}
void read_unit(HalfNibbles, uint8_t const* lanes, Bytes flip, uint8_t* low, uint8_t* high) {
  Bytes words[4];
  for (int t = 0; t < 4; ++t) words[t] = load(lanes + t * kLaneBytes);
  transpose_words(words);
  Bytes const mask = splat(0x03);
  for (int j = 0; j < 4; ++j) {
    Bytes const four = unzip_halves(words[j]);
    store(low + 16 * j, (four & mask) ^ flip);
    store(low + 16 * j + kNibbleDistance, (four >> 2 & mask) ^ flip);
    store(high + 16 * j, (four >> 4 & mask) ^ flip);
    store(high + 16 * j + kNibbleDistance, (four >> 6) ^ flip);
  }
}
void read_unit(WholeBytes, uint8_t const* lanes, Bytes flip, uint8_t* low, uint8_t* high) {
  Bytes words[4];
  for (int t = 0; t < 4; ++t) words[t] = load(lanes + t * kLaneBytes);
  transpose_words(words);
  store(low, unzip_halves(words[0]) ^ flip);
  store(high, unzip_halves(words[1]) ^ flip);
  store(low + 16, unzip_halves(words[2]) ^ flip);
  store(high + 16, unzip_halves(words[3]) ^ flip);
}

template <int kBits>
void write_chunk(uint8_t const* codes, int64_t stride, uint8_t* chunk) {
  Bytes const flip = splat(kSignBit<kBits>);
  for (int row = 0; row < kRowsPerPanel; row += row % 8 == 7 ? 9 : 1) {
    uint8_t const* low = codes + row * stride;
    uint8_t const* high = low + 8 * stride;
    // Prefetch the next tile, two cache lines a row: 64 rows are more streams than processors
    // predict. Measured: a quarter less time. Behind the last tile the address may be invalid,
    // which a prefetch ignores.
    for (uint8_t const* next : {low, high}) {
      __builtin_prefetch(next + kKPerTile);
      __builtin_prefetch(next + kKPerTile + 64);
    }
    uint8_t* lanes = chunk + row / kRowsPerBlock * (kRowsPerBlock * kKPerTile * kBits / 8) +
                     row % 8 * 4 * kLaneBytes;
    for (int k = 0; k < kKPerTile; k += unit_k(kBits), lanes += kUnitBytes)
      write_unit(Width<kBits>(), low + k, high + k, flip, lanes);
  }
}

template <int kBits>
void read_chunk(uint8_t const* chunk, uint8_t* codes, int64_t stride) {
  Bytes const flip = splat(kSignBit<kBits>);
  for (int row = 0; row < kRowsPerPanel; row += row % 8 == 7 ? 9 : 1) {
    uint8_t* low = codes + row * stride;
    uint8_t* high = low + 8 * stride;
    uint8_t const* lanes = chunk + row / kRowsPerBlock * (kRowsPerBlock * kKPerTile * kBits / 8) +
                           row % 8 * 4 * kLaneBytes;
    for (int k = 0; k < kKPerTile; k += unit_k(kBits), lanes += kUnitBytes)
      read_unit(Width<kBits>(), lanes, flip, low + k, high + k);
  }
}

// The part of an n x k matrix that K tile number `index` covers.
struct Window {
  int64_t first_row, first_k;
  int rows, columns;

  Window(int64_t index, int64_t n, int64_t k) {
    int64_t const tiles = padded_k(k) / kKPerTile;
    first_row = index / tiles * kRowsPerPanel;
    first_k = index % tiles * kKPerTile;
    rows = int(std::min<int64_t>(kRowsPerPanel, n - first_row));
    columns = int(std::min<int64_t>(kKPerTile, k - first_k));
  }

  bool full() const { return rows == kRowsPerPanel && columns == kKPerTile; }
};

// Whether all codes have kBits bits: larger ones would overwrite their neighbours.
template <int kBits>
bool codes_fit(uint8_t const* codes, int64_t stride, Window const& window) {
  uint8_t bits = 0;
  for (int row = 0; row < window.rows; ++row)
    for (int column = 0; column < window.columns; ++column) bits |= codes[row * stride + column];
  return bits < 1 << kBits;
}

// Whether the codes fit.
template <int kBits>
bool pack_chunk(uint8_t const* codes, uint8_t* packed, int64_t n, int64_t k, int64_t index) {
  Window const window(index, n, k);
  uint8_t const* source = codes + window.first_row * k + window.first_k;
  uint8_t* chunk = packed + index * k_tile_bytes(kBits);
  if (!codes_fit<kBits>(source, k, window)) return false;
  if (window.full()) return write_chunk<kBits>(source, k, chunk), true;
  Tile tile;
  tile.fill(kSignBit<kBits>);  // codes of value zero
  for (int row = 0; row < window.rows; ++row) {
    std::memcpy(tile.data() + row * kKPerTile, source + row * k, size_t(window.columns));
  }
  write_chunk<kBits>(tile.data(), kKPerTile, chunk);
  return true;
}

template <int kBits>
void unpack_chunk(uint8_t const* packed, uint8_t* codes, int64_t n, int64_t k, int64_t index) {
  Window const window(index, n, k);
  uint8_t* destination = codes + window.first_row * k + window.first_k;
  uint8_t const* chunk = packed + index * k_tile_bytes(kBits);
  if (window.full()) return read_chunk<kBits>(chunk, destination, k);
  Tile tile;
  read_chunk<kBits>(chunk, tile.data(), kKPerTile);
  for (int row = 0; row < window.rows; ++row) {
    std::memcpy(destination + row * k, tile.data() + row * kKPerTile, size_t(window.columns));
  }
}

void check(uint8_t const* codes, uint8_t const* packed, int64_t n, int64_t k, int bits,
           int threads) {
  // code_position takes ints, padding included.
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - kKPerTile;
  auto const fail = [](char const* name, int64_t value, std::string const& accepted) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                "; accepted: " + accepted);
  };
  std::string const range = "1 to " + std::to_string(kLargest);
  if (!is_code_width(bits)) fail("bits", bits, "2, 4, 8");
  if (n < 1 || n > kLargest) fail("n", n, range);
  if (k < 1 || k > kLargest) fail("k", k, range);
  if (!codes || !packed)
    throw std::invalid_argument(std::string(codes ? "packed" : "codes") + " is a null pointer");
  if (threads < 0) fail("threads", threads, "0 (every core) and up");
}

int64_t chunk_count(int64_t n, int64_t k) {
  return padded_rows(n) / kRowsPerPanel * (padded_k(k) / kKPerTile);
}

}  // namespace

void pack(uint8_t const* codes, uint8_t* packed, int64_t n, int64_t k, int bits, int threads) {
  check(codes, packed, n, k, bits, threads);
  prefer_large_pages(packed, size_t(packed_bytes(n, k, bits)));
  std::atomic<bool> fit{true};
  for_each_index(chunk_count(n, k), kBatch, threads, [=, &fit](int64_t index) {
    bool const fits = with_width(bits, [&](auto width) {
      return pack_chunk<decltype(width)::kBits>(codes, packed, n, k, index);
    });
    if (!fits) fit = false;
  });
  if (fit) return;
  int64_t const index =
      std::find_if(codes, codes + n * k, [=](uint8_t code) { return code >> bits; }) - codes;
  throw std::invalid_argument("codes[" + std::to_string(index / k) + ", " +
                              std::to_string(index % k) + "] is " + std::to_string(codes[index]) +
                              "; accepted with bits = " + std::to_string(bits) + ": 0 to " +
                              std::to_string((1 << bits) - 1));
}

void unpack(uint8_t const* packed, uint8_t* codes, int64_t n, int64_t k, int bits, int threads) {
  check(codes, packed, n, k, bits, threads);
  prefer_large_pages(codes, size_t(n) * k);
  for_each_index(chunk_count(n, k), kBatch, threads, [=](int64_t index) {
    with_width(bits, [&](auto width) {
      unpack_chunk<decltype(width)::kBits>(packed, codes, n, k, index);
    });
  });
}

}  // namespace cutlass_ops
