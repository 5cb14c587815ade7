// int8 activations x int4 or int8 weights on Hopper's wgmma: W8A8 and W4A8 at prefill, sm_90a. The tile, its loads and its stores are
// device/hopper_gemm.cuh. Per 128 columns of K a warpgroup's turn is:
//
//   decode   the stage's weights, which were loaded piece by piece while the previous sums were promoted
//   multiply exact int32 sums of 128 columns, which never leave registers
//   promote  sum = fma(float(I), token scale * weight scale, sum), once a group and block
//   shift    with zero points za of the activations: I -= za * (sum of the weights' codes). With one of them for a token and block, the sums of a stage
//            start from that instead of zero; with one a token, it is a product of 32 more columns, which takes less time there. In every stage,
//            even so: beside outliers nearly all codes are the zero point, and fp32 sums that still hold it round away what is left
//   correct  instead, where results are rounded to 16 bits: of 16 or 32 tiles of K at once, in a stage that follows them (corrections.h), or, with one zero
//            point a token, of all of K at the end
#include <algorithm>

#include "device/decode.cuh"
#include "device/hopper_gemm.cuh"
#include "dispatch/launch_shape.h"
#include "kernels/kernels.h"

#pragma nv_diag_suppress 177  // for other GPUs the kernels have no bodies, which read the members of Config

namespace cutlass_ops {
namespace {

using hopper::Params;

enum class Promotion {
  kBlock,    // a scale for each token and 128 columns, and one for each row and 128 columns
  kToken,    // one for each row and 128 columns; the token's is applied at the end
  kChannel,  // none: int32 sums run over all of K
};

template <int kBits, int kTokens, Promotion kPromotion_, bool kZeros, bool kAsymmetric_, int kWarpgroups = 2,
          bool kCorrects = false>
struct Config : hopper::TileConfig<kBits, kTokens, 1, kPromotion_ != Promotion::kChannel, kPromotion_ == Promotion::kBlock,
                                   kAsymmetric_, kZeros, wgmma_gemm_a8_tile(kBits, kTokens, kWarpgroups).stages, kWarpgroups> {
  // Zero points are corrected by the window of K or, where a token has one, at the end.
  static constexpr bool kWindows = kCorrects && kPromotion_ == Promotion::kBlock;
  using Params = std::conditional_t<kWindows, hopper::CorrectedParams, hopper::Params>;
  static constexpr int kWindow = kWindows ? correction_window(kBits) : 0;
  static constexpr Promotion kPromotion = kPromotion_;
  static constexpr bool kAsymmetric = kAsymmetric_;                               // activations with zero points
  static constexpr bool kStart = kAsymmetric && kPromotion == Promotion::kBlock;  // where a stage's sums start from shifts
  static constexpr bool kShift = kAsymmetric && kPromotion == Promotion::kToken;  // where a product makes them good
  // What the decoder multiplies codes by.
  static constexpr float kCodeScale = kBits == 4 && !kZeros ? float(decode::Int4Int8::kScale) : 1.0f;
  static constexpr float kUnit = 1.0f / kCodeScale;
  // A warp that multiplies nothing makes the weights' scales fp32 numbers, times kUnit: instructions beside the products slow these down, even those that
  // nothing waits for. Likewise, stages are then found without asking for the block's place in its cluster. (Measured on an H200, where it is done.)
  static constexpr bool kPrepareScales = kPromotion_ == Promotion::kBlock && !kAsymmetric && !kZeros && kTokens >= 128;
  // Whether a warp's lanes wait for each other before they give a stage back. They need not, but the compiler then schedules the main loop of these another
  // way: 4096 tokens x 28672 x 4096 in W4A8 take 810 us instead of 899 with one scale a token, 1003 instead of 1014 with one a block. Other tiles, int8
  // weights and those with zero points take as long or up to 8 % longer. Where zero points are corrected it is int8 weights that gain, 1038 us instead of 1064, and int4
  // that lose, 1096 and 1072. (Measured on an H200.)
  static constexpr bool kMeetAtEnd =
      kWindows ? kBits == 8 : kBits == 4 && kTokens == 176 && !kZeros && !kAsymmetric && kPromotion != Promotion::kChannel;
  static_assert(Config::kSharedBytes <= wgmma_gemm_a8_tile(kBits, kTokens, kWarpgroups).shared_bytes,
                "its tile promises less shared memory");

  static __device__ void consume(uint8_t* stages, float* staging, hopper::Barriers<Config>& barriers,
                                 CUtensorMap const& out_map, hopper::Params const& p, hopper::Place<Config> const& at);
};

// With zero points of the activations, a stage's sums start from the bits of kBias - za * (sum of the row's codes): in its binade the unit is 1, so that
// int8 products add to them as to integers, and what they come to, kBias + I with |I| <= 255 * 128 * 128 < 2^22, is a float again. That takes as many
// instructions as the way without zero points, which converts integers. All of it is exact, but for a rounding of I * scale.
constexpr float kBias = 12582912.0f;  // 1.5 * 2^23

// A scale whose product with kBias is a float: 22 bits of it, rounded. Narrower ones stay as they are.
__device__ __forceinline__ float short_scale(float scale) {
  float high = __fmul_rn(scale, 5.0f);
  return __fsub_rn(high, __fsub_rn(high, scale));
}

// A stage's weights as they lie in shared memory, the fragments of 128 columns, and their scales and zero points for rows g and g + 8.
template <class C>
struct RawWeights {
  static constexpr int kLoads = C::kBits / 2;  // of 16 bytes
  uint32_t words[kLoads][4];
  float scale[2];
  uint32_t zeros;  // two bytes, in one register

  __device__ __forceinline__ void load(uint8_t const* stage, Params const& p, hopper::Place<C> const& at) {
    load_words(stage, at);
    load_vectors(stage, p, at);
  }

  __device__ __forceinline__ void load_words(uint8_t const* stage, hopper::Place<C> const& at) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_piece(stage, at, i);
  }

  __device__ __forceinline__ void load_piece(uint8_t const* stage, hopper::Place<C> const& at, int i) {
    load_shared(cute::cast_smem_ptr_to_uint(stage) + at.units + i * kUnitBytes, words[i]);
  }

  __device__ __forceinline__ void load_prepared_scales(uint8_t const* stage, hopper::Place<C> const& at) {
    float2 v = *reinterpret_cast<float2 const*>(stage + at.scales);
    scale[0] = v.x, scale[1] = v.y;
  }

  // Zero points, and scales that nothing prepares. They are waited for where they are loaded: best while products run.
  __device__ __forceinline__ void load_vectors(uint8_t const* stage, Params const& p, hopper::Place<C> const& at) {
    if (C::kLoadScales && !C::kPrepareScales) {
      if (p.weight.scale_type == DataType::kFloat32) {
        float2 v = *reinterpret_cast<float2 const*>(stage + at.scales);
        scale[0] = C::kStart ? short_scale(v.x) : v.x, scale[1] = C::kStart ? short_scale(v.y) : v.y;
      } else {
        uint32_t v = *reinterpret_cast<uint32_t const*>(stage + at.scales);
        float2 half = __half22float2(reinterpret_cast<__half2 const&>(v));
        bool is_half = p.weight.scale_type == DataType::kFloat16;
        scale[0] = is_half ? half.x : __uint_as_float(v << 16), scale[1] = is_half ? half.y : __uint_as_float(v & 0xffff0000u);
      }
    }
    if (C::kZeros) zeros = *reinterpret_cast<uint16_t const*>(stage + at.zeros);
  }
};

// The four operands of 32 columns each.
template <class C>
__device__ __forceinline__ void decode_weights(RawWeights<C> const& raw, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (C::kBits == 8) {
      decode::Int8Int8::fragment(raw.words[i], a[i]);
    } else if constexpr (C::kZeros) {
      decode::Int4MinusZeroInt8::fragment(raw.words[i / 2] + i % 2 * 2,
                                          decode::Int4MinusZeroInt8::zero_constants(int8_t(raw.zeros), int8_t(raw.zeros >> 8)),
                                          a[i]);
    } else {
      decode::Int4Int8::fragment(raw.words[i / 2] + i % 2 * 2, a[i]);
    }
  }
}

// Scales of the tile's tokens: those of a thread's four in 16 come by one load, kAhead sixteens before their use.
template <class C>
struct TokenFactors {
  static constexpr int kAhead = 2;
  uint32_t address;
  float sixteens[C::kTokens / 16][4];

  __device__ __forceinline__ explicit TokenFactors(uint32_t address) : address(address) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load(j);
  }
  __device__ __forceinline__ void load(int j) {
    if (C::kPromotion == Promotion::kBlock && j < C::kTokens / 16) load_shared(address + j * 64, sixteens[j]);
  }
};

// Fold the integers of eight tokens into the fp32 sums. Register 4j + e: row g + 8 (e / 2), token 8j + 2t + e % 2. The same three operations in
// two orders, of which each kernel runs faster in its own (by 2 to 5 %, measured on an H200).
template <class C>
__device__ __forceinline__ void promote(int j, float const* token, uint32_t const (&integers)[C::kSums],
                                        float const (&scale)[2], float (&sums)[C::kSums]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float v = float(int(integers[4 * j + e])), &sum = sums[4 * j + e];
    if (C::kPromotion == Promotion::kToken) {
      sum = fmaf(v, scale[e / 2], sum);
    } else if (C::kBits == 8 || C::kPrepareScales) {
      sum = fmaf(v * scale[e / 2], token[e % 2], sum);
    } else {
      sum = fmaf(v, token[e % 2] * scale[e / 2], sum);
    }
  }
}

// This lane's part of the sums of 128 weights of rows g and g + 8: with them a product of codes becomes one of codes minus zero points.
__device__ __forceinline__ void add_weights(uint32_t const (&a)[4][4], uint32_t (&sum)[2]) {
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i % 2] = uint32_t(__dp4a(int(a[piece][i]), 0x01010101, int(sum[i % 2])));
  }
}

// The four lanes of a row each hold a part.
template <class T>
__device__ __forceinline__ T sum_of_row(T part) {
  part += __shfl_xor_sync(0xffffffffu, part, 1);
  return part + __shfl_xor_sync(0xffffffffu, part, 2);
}

// -1 times the sums of 128 codes of rows g and g + 8: a product with as many columns, on the tensor cores.
__device__ __forceinline__ void sum_codes(uint32_t const (&a)[4][4], float (&sums)[2]) {
  int products[4] = {};
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, %3};"
        : "+r"(products[0]), "+r"(products[1]), "+r"(products[2]), "+r"(products[3])
        : "r"(a[piece][0]), "r"(a[piece][1]), "r"(a[piece][2]), "r"(a[piece][3]), "r"(0xffffffffu));
  }
  sums[0] = float(products[0]), sums[1] = float(products[2]);
}

// The zero points of a thread's four of sixteen tokens, loaded to where these tokens' integers were.
template <class C>
__device__ __forceinline__ void load_zeros(int sixteen, uint32_t address, uint32_t (&integers)[C::kSums]) {
  uint32_t zeros[4];
  load_shared(address + sixteen * 64, zeros);
#pragma unroll
  for (int i = 0; i < 4; ++i) integers[8 * sixteen + i] = zeros[i];
}

// What the next stage's sums start from, made of zero points where load_zeros() left them.
template <class C>
__device__ __forceinline__ void start_sums(float const (&codes)[2], uint32_t (&integers)[C::kSums]) {
#pragma unroll
  for (int i = 0; i < C::kTokens / 16; ++i) {
#pragma unroll
    for (int e = 7; e >= 0; --e) {
      float zero = __uint_as_float(integers[8 * i + e / 4 * 2 + e % 2]);
      integers[8 * i + e] = __float_as_uint(fmaf(zero, codes[e % 4 / 2], kBias));
    }
  }
}

// promote() for sixteen tokens, whose integers have kBias added; `bias` is -kBias * scale. The products take the integers' place: the compiler would give
// them too few registers of their own to run side by side.
template <class C>
__device__ __forceinline__ void promote_biased(int sixteen, float const (&token)[4], float const (&scale)[2],
                                               float const (&bias)[2], uint32_t (&integers)[C::kSums],
                                               float (&sums)[C::kSums]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    asm volatile("fma.rn.f32 %0, %0, %1, %2;"
                 : "+f"(reinterpret_cast<float&>(integers[8 * sixteen + e]))
                 : "f"(scale[e % 4 / 2]), "f"(bias[e % 4 / 2]));
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float v = __uint_as_float(integers[8 * sixteen + e]), &sum = sums[8 * sixteen + e];
    sum = fmaf(v, token[e / 4 * 2 + e % 2], sum);
  }
}

// What makes good one zero point a token, in a stage: one more product, whose second operand is the zero point in each of 32 columns and
// whose first is -(sum of a row's weights), spread over as many bytes. What is beyond their range is left to subtract(), which works where a row of the
// warp has such a sum. All of it is exact. (Sums that start from shifts, as with a zero point for each block, take up to 6 % more time here, measured on
// an H200.)
template <class C>
class ZeroShift {
 public:
  uint32_t operand[4];

  // This lane's part of the sums. The compiler would have it between the first products and the others, which then come late.
  __device__ __forceinline__ void add(uint32_t const (&weights)[4][4]) {
    int parts[4] = {};
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("dp4a.s32.s32 %0, %1, -1, %0;" : "+r"(parts[i]) : "r"(weights[piece][i]));
    }
    both_ = parts[0] + parts[2] + (parts[1] + parts[3]) * 65536;  // they reach 2^14: those of both rows share a word
  }

  // The rows' sums, and from them the operand.
  __device__ __forceinline__ void spread() {
    int both = sum_of_row(both_), sums[2] = {int(int16_t(both)), (both - int16_t(both)) >> 16};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int inside = min(max(sums[h], -32 * 127), 32 * 120);  // an eighth of a quarter, and up to 7 more, is a byte
      beyond_[h] = inside - sums[h];
      // Lane t takes a quarter, rounded down after t is added, so that the four make up the sum. Each of its eight bytes has an eighth of that, rounded
      // down, and one of them the rest.
      int quarter = (inside + int(threadIdx.x % 4)) >> 2, eighth = quarter >> 3;
      operand[h] = __byte_perm(eighth, eighth + (quarter & 7), 0x0004);
      operand[h + 2] = __byte_perm(eighth, 0, 0);
    }
    any_beyond_ = __any_sync(0xffffffffu, beyond_[0] | beyond_[1]);
  }

  // When the products have ended. `zeros` has a token's zero point every 16 bytes.
  __device__ __forceinline__ void subtract(uint8_t const* zeros, uint32_t (&integers)[C::kSums]) const {
    if (__builtin_expect(!any_beyond_, 1)) return;
#pragma unroll
    for (int j = 0; j < C::kTokens / 8; ++j) {
      int at = 8 * j + threadIdx.x % 4 * 2;
      char2 two = make_char2(zeros[at * 16], zeros[(at + 1) * 16]);
#pragma unroll
      for (int e = 0; e < 4; ++e) integers[4 * j + e] -= uint32_t((e % 2 ? two.y : two.x) * beyond_[e / 2]);
    }
  }

 private:
  int both_, beyond_[2];
  bool any_beyond_;
};

// A stage that corrects a window of tiles: products of 16-bit floats, whose weights are operands as they are loaded, promoted like others.
template <class C>
__device__ __forceinline__ void correct(int window, RawWeights<C>& raw, uint8_t* stages, hopper::Ring<C::kStages>& ring,
                                        hopper::Barriers<C>& barriers, Params const& p, hopper::Place<C> const& at,
                                        bool is_last, uint32_t (&integers)[C::kSums], float (&sums)[C::kSums]) {
  constexpr int kLoads = RawWeights<C>::kLoads, kSixteens = kLoads / 2;
  uint8_t const* stage = stages + ring.stage * C::kStageBytes;
  auto& products = reinterpret_cast<float (&)[C::kSums]>(integers);
  uint64_t zeros = operand_descriptor(cute::cast_smem_ptr_to_uint(stage) + C::kActivations);
  if (kSixteens == 1) zeros += window % 2 * 4;  // a row has two windows' zero values, 64 bytes each
#pragma unroll
  for (int i = 0; i < kLoads; ++i) fence_registers(raw.words[i]);
  fence_registers(products);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
    wgmma_float<__half, C::kTokens>(raw.words[2 * i], zeros + 4 * i, products, i > 0);
    wgmma_float<__half, C::kTokens>(raw.words[2 * i], zeros + 4 * i + 2, products, true);
    wgmma_float<__half, C::kTokens>(raw.words[2 * i + 1], zeros + 4 * i, products, true);
  }
  cute::warpgroup_commit_batch();
  fence_registers(products);
  ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
  if constexpr (C::kPrepareScales) raw.load_prepared_scales(stage, at);
  constexpr float kUnit = C::kPrepareScales ? 1.0f : C::kUnit;
  float const scale[2] = {raw.scale[0] * kUnit, raw.scale[1] * kUnit};
  uint64_t* const empty = &barriers.empty[ring.stage];
  ring.advance();
  uint8_t const* next = stages + ring.stage * C::kStageBytes;
  if (!is_last) {
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    raw.load_vectors(next, p, at);
  }
  TokenFactors<C> token_scales(cute::cast_smem_ptr_to_uint(stage) + at.token_factors);
  cute::warpgroup_wait<0>();
  fence_registers(products);
  if (!is_last) raw.load_words(next, at);
#pragma unroll
  for (int j = 0; j < C::kTokens / 8; ++j) {
    if (j % 2 == 0) token_scales.load(j / 2 + token_scales.kAhead);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& sum = sums[4 * j + e];
      sum = fmaf(products[4 * j + e] * scale[e / 2], token_scales.sixteens[j / 2][j % 2 * 2 + e % 2], sum);
    }
  }
  if (at.lane < C::kCluster) ClusterBarrier::arrive(empty, at.lane, true);
}

// Where a token has one zero point: less that times all of a row's weights. `zeros` is shared memory for a warpgroup's tokens, which nothing waits for.
template <class C>
__device__ __forceinline__ void correct_rows(float (&sums)[C::kSums], float* zeros, Params const& p, hopper::Place<C> const& at,
                                             int row0, int m0) {
  int const position = row0 + at.warpgroup * kRowsPerSlab + at.lane / 4 * 8 + at.warp * 2;
  float2 rows = {};
  if (position < p.n_pad) rows = __ldg(reinterpret_cast<float2 const*>(p.weight.row_sums + position));
#pragma unroll
  for (int token = at.warp * 32 + at.lane; token < C::kTokens; token += 128)
    zeros[token] = float(__ldg(p.x.zeros + min(m0 + token, p.x.stride - 1)));
  cutlass::arch::NamedBarrier::sync(128, 1 + at.warpgroup);
#pragma unroll
  for (int i = 0; i < C::kSums; ++i) {
    sums[i] = fmaf(-zeros[i / 4 * 8 + at.lane % 4 * 2 + i % 2], i % 4 / 2 ? rows.y : rows.x, sums[i]);
  }
  cutlass::arch::NamedBarrier::sync(128, 1 + at.warpgroup);
}

template <int kBits, int kTokens, Promotion kPromotion, bool kZeros, bool kAsymmetric, int kWarpgroups, bool kCorrects>
__device__ __forceinline__ void Config<kBits, kTokens, kPromotion, kZeros, kAsymmetric, kWarpgroups, kCorrects>::consume(
    uint8_t* stages, float* staging, hopper::Barriers<Config>& barriers, CUtensorMap const& out_map, hopper::Params const& p,
    hopper::Place<Config> const& at) {
  using C = Config;
  constexpr bool kBlock = kPromotion == Promotion::kBlock, kChannel = kPromotion == Promotion::kChannel;
  int clusters = gridDim.x / C::kCluster, total = hopper::Work::count(p);
  int const t = at.lane % 4;
  // The same in all lanes, as the compiler can see, and nothing that it would work out again in every turn.
  uint32_t const first_stage = C::kPrepareScales ? __shfl_sync(~0u, cute::cast_smem_ptr_to_uint(stages), 0) : 0;
  hopper::Ring<C::kStages> ring;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    hopper::Work work(index, p);
    int row0 = (work.pair * C::kCluster + at.rank) * C::kRows, m0 = work.token_tile * C::kTokens;
    int count = work.end_k(p) - work.first_k(p);
    uint32_t integers[C::kSums];
    float sums[kChannel ? 1 : C::kSums] = {};
    uint32_t row_sums[2] = {};  // of the weights of rows g and g + 8 over all of K; this lane's part until the end
    RawWeights<C> raw;
    // One scale a token, and one a row, come last; they are on their way until then.
    float end_scale[(C::kEndScales + 127) / 128 + 1];
    uint32_t end_zero[(C::kEndScales + 127) / 128 + 1];
#pragma unroll
    for (int i = 0; i * 128 < C::kEndScales; ++i) {
      int token = min(m0 + at.warp * 32 + at.lane + i * 128, p.x.stride - 1);
      end_scale[i] = __ldg(p.x.scales + token);
      if (kAsymmetric) end_zero[i] = uint32_t(uint8_t(__ldg(p.x.zeros + token))) * 0x01010101;
    }
    [[maybe_unused]] hopper::StoredScales row_scales;
    if constexpr (kChannel) {
      int const position = row0 + at.warpgroup * kRowsPerSlab + at.lane / 4 * 8 + at.warp * 2;
      row_scales.load(static_cast<uint8_t const*>(p.weight.scales) + min(position, p.n_pad - 2) * p.scale_bytes,
                      p.weight.scale_type);
    }
    uint8_t* const ends = reinterpret_cast<uint8_t*>(staging) + C::kStoreBytes;
    uint8_t* const end_zeros = ends + at.warpgroup * C::kEndZeros;
    auto* end_scales = reinterpret_cast<float*>(ends + C::kWarpgroups * C::kEndZeros) + at.warpgroup * C::kEndScales;
    if constexpr (C::kShift) {
#pragma unroll
      for (int i = 0; i * 128 < C::kEndScales; ++i) {
        int token = at.warp * 32 + at.lane + i * 128;
        if (token < C::kTokens) {
          reinterpret_cast<uint4*>(end_zeros)[token] = make_uint4(end_zero[i], end_zero[i], end_zero[i], end_zero[i]);
        }
      }
      cutlass::arch::fence_view_async_shared();
      cutlass::arch::NamedBarrier::sync(128, 1 + at.warpgroup);
    }
    [[maybe_unused]] auto zeros_address = [&](uint8_t const* stage) {
      return cute::cast_smem_ptr_to_uint(stage) + at.token_factors + C::kTokens * 4;
    };
    if constexpr (kChannel) {
      // Were the first product to start from zeros itself, sums of 256 tokens would live from tile to tile, and not all in registers.
#pragma unroll
      for (uint32_t& sum : integers) sum = 0;
    }
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    raw.load(stages + ring.stage * C::kStageBytes, p, at);
    uint32_t a[4][4];
    float codes[2];
    if constexpr (C::kStart) {
      ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
      uint32_t zeros = zeros_address(stages + ring.stage * C::kStageBytes);
#pragma unroll
      for (int j = 0; j < C::kTokens / 16; ++j) load_zeros<C>(j, zeros, integers);
      decode_weights<C>(raw, a);
      sum_codes(a, codes);
      start_sums<C>(codes, integers);
    }
    // Tiles up to the next correction, and that, in turn. The same in all lanes, as the compiler can see.
    int i = 0;
    [[maybe_unused]] int correction = 0, window = 0;
    if constexpr (C::kWindows) {
      hopper::WindowPlace<C::kWindow> const first(work.first_k(p), p);
      window = __shfl_sync(~0u, first.window, 0), correction = __shfl_sync(~0u, first.correction - work.first_k(p), 0);
    }
    do {
      int const until = C::kWindows ? min(count, correction) : count;
      for (; i < until; ++i) {
        uint8_t const* stage = stages + ring.stage * C::kStageBytes;
        if constexpr (!C::kStart) decode_weights<C>(raw, a);
        float scale[2];
        if (!C::kPrepareScales) scale[0] = raw.scale[0] * C::kUnit, scale[1] = raw.scale[1] * C::kUnit;
        uint64_t tokens = operand_descriptor(
            (C::kPrepareScales ? first_stage + ring.stage * C::kStageBytes : cute::cast_smem_ptr_to_uint(stage)) +
            C::kActivations);
        [[maybe_unused]] ZeroShift<C> shift;
        if constexpr (C::kShift) shift.add(a);
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) fence_registers(a[piece]);
        fence_registers(integers);
        cute::warpgroup_arrive();
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
          wgmma_int8<C::kTokens>(a[piece], tokens + piece * 2, integers, C::kStart || kChannel || piece > 0);
        }
        cute::warpgroup_commit_batch();
        fence_registers(integers);
        // While the products run.
        if constexpr (kAsymmetric && kChannel) add_weights(a, row_sums);
        if constexpr (C::kShift) shift.spread();
        if (kBlock && !C::kStart) ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
        if constexpr (C::kPrepareScales) {
          raw.load_prepared_scales(stage, at);
          scale[0] = raw.scale[0], scale[1] = raw.scale[1];
        }
        if constexpr (C::kShift) {
          fence_registers(shift.operand);
          cute::warpgroup_arrive();
          wgmma_int8<C::kTokens>(shift.operand, repeated_descriptor(end_zeros), integers, true);
          cute::warpgroup_commit_batch();
          fence_registers(integers);
        }
        uint64_t* empty = &barriers.empty[ring.stage];
        ring.advance();
        uint8_t const* next = stages + ring.stage * C::kStageBytes;
        if (i + 1 < count) {
          TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
          raw.load_vectors(next, p, at);
          if (C::kStart) ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
        }
        uint32_t factors = cute::cast_smem_ptr_to_uint(stage) + at.token_factors;
        TokenFactors<C> token_scales(factors);
        cute::warpgroup_wait<0>();
        fence_registers(integers);
        if constexpr (C::kShift) shift.subtract(end_zeros, integers);
        if constexpr (C::kStart) {
          // A sixteen's zero points come kLate sixteens after its integers have gone, and the next weights and their sums in between: what is loaded
          // needs registers, and time.
          constexpr int kSixteens = C::kTokens / 16, kLate = 2;
          constexpr int kWeightsAt = kTokens == 176  ? 4
                                     : kTokens == 32 ? 0
                                                     : 2,
                        kCodesAt = kTokens == 64 ? 3 : kSixteens * 2 / 3;
          float bias[2] = {scale[0] * -kBias, scale[1] * -kBias};
          uint32_t zeros = zeros_address(i + 1 < count ? next : stage);
#pragma unroll
          for (int j = 0; j < kSixteens + kLate; ++j) {
            if (j < kSixteens) {
              token_scales.load(j + token_scales.kAhead);
#pragma unroll
              for (int piece = 0; piece < RawWeights<C>::kLoads; ++piece) {
                if (j == kWeightsAt + piece / 2 && i + 1 < count) raw.load_piece(next, at, piece);
              }
              promote_biased<C>(j, token_scales.sixteens[j], scale, bias, integers, sums);
            }
            if (j >= kLate) load_zeros<C>(j - kLate, zeros, integers);
            if (j == kCodesAt) {
              decode_weights<C>(raw, a);
              sum_codes(a, codes);
            }
          }
          start_sums<C>(codes, integers);
        } else {
          constexpr int kEvery =
              kTokens / 8 < 2 * RawWeights<C>::kLoads ? 1 : 2;  // eights of tokens between one piece of weights and the next
#pragma unroll
          for (int j = 0; j < C::kTokens / 8; ++j) {
            if (j % 2 == 0) token_scales.load(j / 2 + token_scales.kAhead);
            // The next weights, a piece at a time: before the products end there is no register to spare, and none for 8-bit ones at all.
            if (j % kEvery == kEvery - 1 && j / kEvery < RawWeights<C>::kLoads && i + 1 < count)
              raw.load_piece(next, at, j / kEvery);
            if constexpr (!kChannel) promote<C>(j, token_scales.sixteens[j / 2] + j % 2 * 2, integers, scale, sums);
          }
        }
        if (C::kMeetAtEnd) __syncwarp();
        if (at.lane < C::kCluster) ClusterBarrier::arrive(empty, at.lane, true);
      }
      if constexpr (C::kWindows) {
        if (i < count) {
          correct<C>(window, raw, stages, ring, barriers, p, at, i + 1 == count, integers, sums);
          ++i, ++window;
          correction = min(correction + C::kWindow + 1, p.k_tiles - 1 - work.first_k(p));
        }
      }
    } while (C::kWindows && i < count);
    if constexpr (kBlock) {
      // With these pinned, the main loop of this tile is scheduled as well as can be: 4 % (measured on an H200).
      if (C::kStart && C::kBits == 8 && C::kTokens == 176) asm volatile("" : "+r"(row0), "+r"(m0));
      hopper::store<C>(sums, staging, out_map, p, at, index, row0, m0);
    } else {
      if constexpr (kCorrects) {
        // Of parts of K one does it.
        if (work.first_k(p) == 0) correct_rows<C>(sums, end_scales, p, at, row0, m0);
      }
#pragma unroll
      for (int i = 0; i * 128 < C::kEndScales; ++i) {
        int token = at.warp * 32 + at.lane + i * 128;
        if (token >= C::kTokens) continue;
        end_scales[token] = end_scale[i];
        if (kAsymmetric && kChannel) end_zeros[token] = uint8_t(end_zero[i]);
      }
      float row_scale[2];
      if constexpr (kChannel) {
        row_scales.values(p.weight.scale_type, row_scale);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          row_scale[h] *= C::kUnit;
          if (kAsymmetric) row_sums[h] = sum_of_row(row_sums[h]);
        }
      }
      cutlass::arch::NamedBarrier::sync(128, 1 + at.warpgroup);
      float outputs[kChannel ? C::kSums : 1];
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) {
        int token = i / 4 * 8 + 2 * t + i % 2, h = i % 4 / 2;
        if constexpr (kChannel) {
          // In int32: differences are exact where they fit, whatever the sums did.
          uint32_t shift = kAsymmetric ? row_sums[h] * uint32_t(int(int8_t(end_zeros[token]))) : 0;
          outputs[i] = float(int(integers[i] - shift)) * row_scale[h] * end_scales[token];
        } else {
          sums[i] *= end_scales[token];
        }
      }
      if constexpr (kChannel) {
        hopper::store<C>(outputs, staging, out_map, p, at, index, row0, m0);
      } else {
        hopper::store<C>(sums, staging, out_map, p, at, index, row0, m0);
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_gemm_a8(__grid_constant__ CUtensorMap const map, __grid_constant__ CUtensorMap const out_map,
                  __grid_constant__ typename C::Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  hopper::run<C>(stages, map, out_map, p);
#endif
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  static_assert(C::kSharedBytes == wgmma_gemm_shared_bytes({C::kBits, C::kTokens, 1, C::kPromotion != Promotion::kChannel,
                                                            C::kPromotion == Promotion::kBlock, C::kAsymmetric, C::kZeros,
                                                            C::kStages, C::kWarpgroups}),
                "the plan has other shared memory");
  int64_t k_pad = padded_k(problem.weight.k);
  int const rows = std::max(problem.m, problem.quantized.rows);
  CUtensorMap map;
  Status status = hopper::encode_tokens(problem.quantized.codes, 1, rows, int(k_pad), k_pad, C::kTokens / C::kCluster, &map);
  return status.ok() ? hopper::launch_persistent<C>(wgmma_gemm_a8<C>, problem, plan, partials, map, stream) : status;
}

template <int kBits, int kTokens, int kWarpgroups, bool kZeros, bool kAsymmetric>
Status launch_promotion(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  auto const launch = [&](auto promotion) {
    using C = Config<kBits, kTokens, decltype(promotion)::value, kZeros, kAsymmetric, kWarpgroups>;
    return launch_config<C>(problem, plan, partials, stream);
  };
  if constexpr (!kZeros) {
    if (sums_whole_rows(problem)) return launch(std::integral_constant<Promotion, Promotion::kChannel>());
  }
  if constexpr (kTokens > 176) {
    return {Status::kUnsupported, "tiles of " + std::to_string(kTokens) + " int8 tokens are for sums over all of K"};
  } else if (problem.quantized.block == -1) {
    return launch(std::integral_constant<Promotion, Promotion::kToken>());
  } else {
    return launch(std::integral_constant<Promotion, Promotion::kBlock>());
  }
}

template <int kBits, int kTokens, int kWarpgroups, bool kZeros>
Status launch_zeros(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  if constexpr (kWarpgroups == 2 && kTokens != 144) {
    if (problem.quantized.zeros) {
      return launch_promotion<kBits, kTokens, kWarpgroups, kZeros, true>(problem, plan, partials, stream);
    }
  }
  return launch_promotion<kBits, kTokens, kWarpgroups, kZeros, false>(problem, plan, partials, stream);
}

template <int kBits, int kTokens>
Status launch_corrected(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  auto const launch = [&](auto zeros) {
    constexpr bool kZeros = decltype(zeros)::value;
    if (problem.quantized.block == -1) {
      return launch_config<Config<kBits, kTokens, Promotion::kToken, kZeros, false, 2, true>>(problem, plan, partials, stream);
    }
    return launch_config<Config<kBits, kTokens, Promotion::kBlock, kZeros, false, 2, true>>(problem, plan, partials, stream);
  };
  // Codes less zero points, where those of x are compensated; where those of the weight are, codes alone.
  if constexpr (kBits == 4) {
    if (problem.weight.zeros && problem.quantized.zeros) return launch(std::true_type());
  }
  return launch(std::false_type());
}

template <int kBits, int kTokens, int kWarpgroups = 2>
Status launch_plain(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  if constexpr (kBits == 4 && kTokens <= 176) {
    if (problem.weight.zeros) return launch_zeros<4, kTokens, kWarpgroups, true>(problem, plan, partials, stream);
  }
  return launch_zeros<kBits, kTokens, kWarpgroups, false>(problem, plan, partials, stream);
}

template <int kBits>
Status launch_corrected_tile(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  switch (plan.block_m) {
    case 96:
      return launch_corrected<kBits, 96>(problem, plan, partials, stream);
    case 128:
      return launch_corrected<kBits, 128>(problem, plan, partials, stream);
    case 144:
      return launch_corrected<kBits, 144>(problem, plan, partials, stream);
    default:
      return launch_corrected<kBits, 176>(problem, plan, partials, stream);
  }
}

template <int kBits>
Status launch_tile(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  if (plan.corrects) return launch_corrected_tile<kBits>(problem, plan, partials, stream);
  if constexpr (kBits == 4) {
    if (plan.block_n == 512) {
      return plan.block_m == 32 ? launch_plain<4, 32, 4>(problem, plan, partials, stream)
                                : launch_plain<4, 64, 4>(problem, plan, partials, stream);
    }
  }
  switch (plan.block_m) {
    case 32:
      return launch_plain<kBits, 32>(problem, plan, partials, stream);
    case 64:
      return launch_plain<kBits, 64>(problem, plan, partials, stream);
    case 96:
      return launch_plain<kBits, 96>(problem, plan, partials, stream);
    case 128:
      return launch_plain<kBits, 128>(problem, plan, partials, stream);
    case 144:
      return launch_plain<kBits, 144>(problem, plan, partials, stream);
    case 256:
      return launch_plain<kBits, 256>(problem, plan, partials, stream);
    default:
      return launch_plain<kBits, 176>(problem, plan, partials, stream);
  }
}

}  // namespace

Status launch_wgmma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream) {
  return problem.weight.bits == 4 ? launch_tile<4>(problem, plan, partials, stream)
                                  : launch_tile<8>(problem, plan, partials, stream);
}

}  // namespace cutlass_ops
