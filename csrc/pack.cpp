#include "cutlass_ops/pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cutlass_ops/layout.h"

namespace cutlass_ops {
namespace {

constexpr int kCodesPerChunk = kRowsPerSlab * kKPerTile;

// One chunk in natural order: 64 rows of 128 codes. 8 KB, so it stays in the L1 cache.
using Tile = std::array<uint8_t, kCodesPerChunk>;

// kSources[i]: which code of a Tile is code i of a chunk, counting from the chunk's first byte and
// in a byte from its low bits. It is layout.h's formula, inverted by the compiler: every chunk has
// the same order inside, so this table is all that packing needs.
template <int kBits>
constexpr std::array<uint16_t, kCodesPerChunk> chunk_sources() {
  std::array<uint16_t, kCodesPerChunk> sources{};
  for (int row = 0; row < kRowsPerSlab; ++row) {
    for (int k = 0; k < kKPerTile; ++k) {
      CodePosition const position = code_position(row, k, kKPerTile, kBits);
      sources[(position.byte * 8 + position.shift) / kBits] = uint16_t(row * kKPerTile + k);
    }
  }
  return sources;
}

template <int kBits>
constexpr std::array<uint16_t, kCodesPerChunk> kSources = chunk_sources<kBits>();

// Stored codes are centred, in two's complement; subtracting 2^(bits-1) modulo 2^bits is inverting
// the top bit, either way.
template <int kBits>
constexpr uint8_t kSignBit = uint8_t(1 << (kBits - 1));

template <int kBits>
void write_chunk(Tile const& tile, uint8_t* chunk) {
  auto const& sources = kSources<kBits>;
  if constexpr (kBits == 8) {
    for (int i = 0; i < kCodesPerChunk; ++i) chunk[i] = tile[sources[i]];
  } else {
    for (int i = 0; i < kCodesPerChunk / 2; ++i) {
      chunk[i] = uint8_t(tile[sources[2 * i]] | tile[sources[2 * i + 1]] << 4);
    }
  }
}

template <int kBits>
void read_chunk(uint8_t const* chunk, Tile& tile) {
  auto const& sources = kSources<kBits>;
  if constexpr (kBits == 8) {
    for (int i = 0; i < kCodesPerChunk; ++i) tile[sources[i]] = chunk[i];
  } else {
    for (int i = 0; i < kCodesPerChunk / 2; ++i) {
      tile[sources[2 * i]] = chunk[i] & 0x0f;
      tile[sources[2 * i + 1]] = chunk[i] >> 4;
    }
  }
}

// The part of an n x k matrix that chunk number `index` covers.
struct Window {
  int64_t first_row, first_k;
  int rows, columns;

  Window(int64_t index, int64_t n, int64_t k) {
    int64_t const tiles = padded_k(k) / kKPerTile;
    first_row = index / tiles * kRowsPerSlab;
    first_k = index % tiles * kKPerTile;
    rows = int(std::min<int64_t>(kRowsPerSlab, n - first_row));
    columns = int(std::min<int64_t>(kKPerTile, k - first_k));
  }
};

template <int kBits>
void pack_chunk(uint8_t const* codes, uint8_t* packed, int64_t n, int64_t k, int64_t index) {
  Window const window(index, n, k);
  Tile tile;
  if (window.rows < kRowsPerSlab || window.columns < kKPerTile) tile.fill(0);
  for (int row = 0; row < window.rows; ++row) {
    uint8_t const* source = codes + (window.first_row + row) * k + window.first_k;
    uint8_t* destination = tile.data() + row * kKPerTile;
    for (int i = 0; i < window.columns; ++i) destination[i] = source[i] ^ kSignBit<kBits>;
  }
  write_chunk<kBits>(tile, packed + index * chunk_bytes(kBits));
}

template <int kBits>
void unpack_chunk(uint8_t const* packed, uint8_t* codes, int64_t n, int64_t k, int64_t index) {
  Window const window(index, n, k);
  Tile tile;
  read_chunk<kBits>(packed + index * chunk_bytes(kBits), tile);
  for (int row = 0; row < window.rows; ++row) {
    uint8_t const* source = tile.data() + row * kKPerTile;
    uint8_t* destination = codes + (window.first_row + row) * k + window.first_k;
    for (int i = 0; i < window.columns; ++i) destination[i] = source[i] ^ kSignBit<kBits>;
  }
}

// Runs work(0) .. work(count - 1), in any order, on up to `threads` threads (0: every core).
template <class Work>
void for_each_index(int64_t count, int threads, Work const& work) {
  // Threads take a batch at a time: 64 chunks are some tens of microseconds of work.
  constexpr int64_t kBatch = 64;
  std::atomic<int64_t> next{0};
  auto const run = [&] {
    for (;;) {
      int64_t const first = next.fetch_add(kBatch);
      if (first >= count) return;
      int64_t const last = std::min(count, first + kBatch);
      for (int64_t index = first; index < last; ++index) work(index);
    }
  };

  int64_t const batches = (count + kBatch - 1) / kBatch;
  int64_t const wanted = threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  helpers.reserve(std::min(wanted, batches));
  try {
    while (int64_t(helpers.size()) + 1 < std::min(wanted, batches)) helpers.emplace_back(run);
  } catch (std::system_error const&) {
    // The system gives no more threads: those that run, and this one, do all of the work.
  }
  run();
  for (std::thread& helper : helpers) helper.join();
}

void check(int64_t n, int64_t k, int bits, int threads) {
  // code_position takes ints, padding included.
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - kKPerTile;
  auto const fail = [](char const* name, int64_t value, std::string const& accepted) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; accepted: " + accepted);
  };
  std::string const range = "1 to " + std::to_string(kLargest);
  if (bits != 4 && bits != 8) fail("bits", bits, "4, 8");
  if (n < 1 || n > kLargest) fail("n", n, range);
  if (k < 1 || k > kLargest) fail("k", k, range);
  if (threads < 0) fail("threads", threads, "0 (every core) and up");
}

int64_t chunk_count(int64_t n, int64_t k) { return padded_rows(n) / kRowsPerSlab * (padded_k(k) / kKPerTile); }

}  // namespace

void pack(uint8_t const* codes, uint8_t* packed, int64_t n, int64_t k, int bits, int threads) {
  check(n, k, bits, threads);
  for_each_index(chunk_count(n, k), threads, [=](int64_t index) {
    return bits == 4 ? pack_chunk<4>(codes, packed, n, k, index) : pack_chunk<8>(codes, packed, n, k, index);
  });
}

void unpack(uint8_t const* packed, uint8_t* codes, int64_t n, int64_t k, int bits, int threads) {
  check(n, k, bits, threads);
  for_each_index(chunk_count(n, k), threads, [=](int64_t index) {
    return bits == 4 ? unpack_chunk<4>(packed, codes, n, k, index) : unpack_chunk<8>(packed, codes, n, k, index);
  });
}

}  // namespace cutlass_ops
