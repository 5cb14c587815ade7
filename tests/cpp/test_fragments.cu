// The packed layout and its decoders against the instructions: CuTe's traits give the element of A
// in each place of a thread's fragment registers; decoding the packed words must give these
// elements. Host code only; a .cu file because CuTe's headers need nvcc.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <vector>

#include "cutlass_ops/layout.h"
#include "emulate.h"
#include "formats/decode.cuh"

namespace cutlass_ops {
namespace {

using Half16816 = cute::SM80_16x8x16_F32F16F16F32_TN;
using Bfloat16816 = cute::SM80_16x8x16_F32BF16BF16F32_TN;
using Int16832 = cute::SM80_16x8x32_S32S8S8S32_TN;
constexpr auto kKMajor = cute::SM90::GMMA::Major::K;
using HalfWgmma = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<kKMajor, kKMajor>;
using Bfloat16Wgmma = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<kKMajor, kKMajor>;
using IntWgmma = cute::SM90::GMMA::MMA_64x128x32_S32S8S8_RS_TN;

constexpr int kChunkCodes = kRowsPerPanel * kKPerTile;

// A chunk that holds, as its codes, digit `digit` (base 2^bits) of each code's own index
// row * 128 + k. Decoding all digits identifies the code of an element.
std::vector<uint32_t> chunk_of_digits(int bits, int digit) {
  std::vector<uint32_t> chunk(size_t(k_tile_bytes(bits)) / 4);
  for (int index = 0; index < kChunkCodes; ++index) {
    CodePosition const position =
        code_position(index / kKPerTile, index % kKPerTile, kKPerTile, bits);
    int const code = (index >> bits * digit) - (1 << (bits - 1));
    uint32_t const field = uint32_t(code) & ((1u << bits) - 1);
    chunk[size_t(position.byte) / 4] |= field << (position.byte % 4 * 8 + position.shift);
  }
  return chunk;
}

// Words that a lane feeds to a decoder.
using Words = std::array<uint32_t, 4>;

// Those of a lane of the warp of `block` for the fragment at column k of the chunk, and what
// follows.
Words lane_words(std::vector<uint32_t> const& chunk, int bits, int block, int lane, int k) {
  int const k_per_unit = 256 / bits;
  int const unit = block * (kKPerTile / k_per_unit) + k / k_per_unit;
  // one word for 16 k, two at 8 bits; at 2 bits k of 64 .. 127 in the upper bits of nibbles
  int const word = k % k_per_unit % 64 / 16 * (bits == 8 ? 2 : 1),
            right = bits == 2 ? k / 64 * 2 : 0;
  uint32_t const* const from = chunk.data() + (unit * kUnitBytes + lane * kLaneBytes) / 4;
  Words words = {};
  for (int i = 0; word + i < 4; ++i) words[size_t(i)] = from[word + i] >> right;
  return words;
}

// Element v of a fragment, decoded without zero points, to its centred code.
template <int kBits>
int element(decode::NibbleHalf<kBits>, uint32_t const* words, int v) {
  using Decoder = decode::NibbleHalf<kBits>;
  uint32_t r[4];
  Decoder::bits(words, r);
  decode::RowConstants const zero = Decoder::no_zeros();
  double const operand = emulate::half(r[v / 2], v % 2);
  return int(v / 2 % 2 == 0 ? operand - emulate::half(zero.g, 0)
                            : operand / 16 + emulate::half(zero.g8, 0));
}

template <int kBits>
int element(decode::IntegerBfloat16<kBits>, uint32_t const* words, int v) {
  using Decoder = decode::IntegerBfloat16<kBits>;
  uint32_t r[4];
  Decoder::bits(words, r);
  return int(emulate::bfloat16(r[v / 2], v % 2) / double(Decoder::bits_unit(v / 2 % 2))) -
         Decoder::kBias;
}

int element(decode::Int2Int8, uint32_t const* words, int v) {
  uint32_t r[4];
  decode::Int2Int8::fragment(words, r);
  return int8_t(r[v / 4] >> v % 4 * 8) / decode::Int2Int8::kScale;
}

int element(decode::Int2MinusZeroInt8, uint32_t const* words, int v) {
  uint32_t r[4];
  decode::Int2MinusZeroInt8::fragment(words, decode::Int2MinusZeroInt8::zero_constants(0, 0), r);
  return int8_t(r[v / 4] >> v % 4 * 8);
}

int element(decode::Int8Half, uint32_t const* words, int v) {
  uint32_t r[4];
  decode::Int8Half::bits(words, r);
  uint32_t const zero = decode::Int8Half::zero_constants(0, 0).g;
  return int(emulate::half(r[v / 2], v % 2) - emulate::half(zero, 0));
}

int element(decode::Int4Int8, uint32_t const* words, int v) {
  uint32_t r[4];
  decode::Int4Int8::fragment(words, r);
  return int8_t(r[v / 4] >> v % 4 * 8) / decode::Int4Int8::kScale;
}

int element(decode::Int4MinusZeroInt8, uint32_t const* words, int v) {
  uint32_t r[4];
  decode::Int4MinusZeroInt8::fragment(words, decode::Int4MinusZeroInt8::zero_constants(0, 0), r);
  return int8_t(r[v / 4] >> v % 4 * 8);
}

int element(decode::Int8Int8, uint32_t const* words, int v) {
  uint32_t r[4];
  decode::Int8Int8::fragment(words, r);
  return int8_t(r[v / 4] >> v % 4 * 8);
}

// The column whose weight meets the activation at position `position` of operand B: int8
// activations are stored permuted, 16-bit ones are not.
int column_at(int position, bool int8) {
  if (!int8) return position;
  for (int k = 0; k < 16; ++k) {
    if (activation_position(k) == position % 16) return position / 16 * 16 + k;
  }
  return -1;
}

template <int bits, class Decoder, class Instruction>
void check_fragments() {
  // (thread, value) -> m + k * rows
  using ALayout = typename cute::MMA_Traits<Instruction>::ALayout;
  constexpr int kThreads = cute::size<0>(ALayout{}), kValues = cute::size<1>(ALayout{});
  constexpr int kRows = kThreads / 2;    // 16 for a warp, 64 for a warpgroup
  constexpr int kK = 32 * kValues / 16;  // 16 or 32
  static_assert((kThreads == 32 || kThreads == 128) && kRows * kK == cute::cosize_v<ALayout>);

  std::vector<std::vector<uint32_t>> chunks;
  for (int digit = 0; digit * bits < 13; ++digit) chunks.push_back(chunk_of_digits(bits, digit));

  for (int k = 0; k < kKPerTile; k += kK) {
    for (int block = 0; block < kRowsPerPanel / kRowsPerBlock; ++block) {  // that is, for each warp
      for (int lane = 0; lane < 32; ++lane) {
        int const thread = kThreads == 32 ? lane : 32 * block + lane;
        int const first_row = kThreads == 32 ? 16 * block : 0;
        for (int v = 0; v < kValues; ++v) {
          int index = 0;
          for (size_t digit = 0; digit < chunks.size(); ++digit) {
            Words const words = lane_words(chunks[digit], bits, block, lane, k);
            index |= (element(Decoder{}, words.data(), v) + (1 << (bits - 1))) << bits * int(digit);
          }
          int const place = ALayout{}(thread, v);
          int const row = first_row + place % kRows;
          int const column = k + column_at(place / kRows, kK == 32);
          ASSERT_EQ(index / kKPerTile, row)
              << "thread " << thread << ", value " << v << ", k " << k;
          ASSERT_EQ(index % kKPerTile, column) << "thread " << thread << ", value " << v;
        }
      }
    }
  }
}

TEST(Fragments, MmaSyncHalf) {
  check_fragments<2, decode::NibbleHalf<2>, Half16816>();
  check_fragments<4, decode::NibbleHalf<4>, Half16816>();
  check_fragments<8, decode::Int8Half, Half16816>();
}

TEST(Fragments, MmaSyncBfloat16) {
  check_fragments<2, decode::IntegerBfloat16<2>, Bfloat16816>();
  check_fragments<4, decode::IntegerBfloat16<4>, Bfloat16816>();
  check_fragments<8, decode::IntegerBfloat16<8>, Bfloat16816>();
}

TEST(Fragments, MmaSyncInt8) {
  check_fragments<2, decode::Int2Int8, Int16832>();
  check_fragments<2, decode::Int2MinusZeroInt8, Int16832>();
  check_fragments<4, decode::Int4Int8, Int16832>();
  check_fragments<4, decode::Int4MinusZeroInt8, Int16832>();
  check_fragments<8, decode::Int8Int8, Int16832>();
}

TEST(Fragments, WgmmaHalf) {
  check_fragments<2, decode::NibbleHalf<2>, HalfWgmma>();
  check_fragments<4, decode::NibbleHalf<4>, HalfWgmma>();
  check_fragments<8, decode::Int8Half, HalfWgmma>();
}

TEST(Fragments, WgmmaBfloat16) {
  check_fragments<2, decode::IntegerBfloat16<2>, Bfloat16Wgmma>();
  check_fragments<4, decode::IntegerBfloat16<4>, Bfloat16Wgmma>();
  check_fragments<8, decode::IntegerBfloat16<8>, Bfloat16Wgmma>();
}

TEST(Fragments, WgmmaInt8) {
  check_fragments<2, decode::Int2Int8, IntWgmma>();
  check_fragments<2, decode::Int2MinusZeroInt8, IntWgmma>();
  check_fragments<4, decode::Int4Int8, IntWgmma>();
  check_fragments<4, decode::Int4MinusZeroInt8, IntWgmma>();
  check_fragments<8, decode::Int8Int8, IntWgmma>();
}

}  // namespace
}  // namespace cutlass_ops
