// int8 activations x int4 or int8 weights on Hopper's wgmma: W8A8 and W4A8 at prefill, sm_90a. The tile, its loads and its
// stores are device/hopper_gemm.cuh. Per 128 columns of K a warpgroup's turn is:
//
//   decode   the stage's weights, which were loaded during the promotion of the previous sums
//   multiply exact int32 sums of 128 columns, which never leave registers
//   promote  sum = fma(float(I), token scale * weight scale, sum), once a scale block
//   azp      with zero points za of the activations: I -= za * colsum(codes). With block zero points the sums of a stage start from this value
//            instead of zero; with token zero points it is a product of 32 more columns, which takes less time there. In every stage,
//            since with outliers nearly all codes are the zero point, and fp32 sums that still hold it round away what is left
//            Where results are rounded to 16 bits, 16 or 32 K tiles are compensated at once instead, in a stage that follows them
//            (zero_compensation.h), and token zero points once at the end of K
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

template <int kBits, int kBlockM, Promotion kPromotion_, bool kZeros, bool kAsymmetric_, int kWarpgroups = 2,
          bool kCompensates = false>
struct Config : hopper::TileConfig<kBits, kBlockM, 1, kPromotion_ != Promotion::kChannel, kPromotion_ == Promotion::kBlock,
                                   kAsymmetric_, kZeros, wgmma_gemm_a8_tile(kBits, kBlockM, kWarpgroups).stages, kWarpgroups> {
  // Zero points are compensated by the window of K or, where a token has one, at the end.
  static constexpr bool kCompensatesByWindow = kCompensates && kPromotion_ == Promotion::kBlock;
  using Params = std::conditional_t<kCompensatesByWindow, hopper::CompensatedParams, hopper::Params>;
  static constexpr int kWindowTiles = kCompensatesByWindow ? compensation_window(kBits) : 0;
  static constexpr Promotion kPromotion = kPromotion_;
  static constexpr bool kAsymmetric = kAsymmetric_;  // activations with zero points
  static constexpr bool kStartsFromZeroPoints =
      kAsymmetric && kPromotion == Promotion::kBlock;  // a stage's sums start from -za * colsum
  static constexpr bool kMultipliesZeroPoints = kAsymmetric && kPromotion == Promotion::kToken;  // a product compensates them
  // What the decoder multiplies codes by.
  static constexpr float kCodeScale = kBits == 4 && !kZeros ? float(decode::Int4Int8::kScale) : 1.0f;
  static constexpr float kUnit = 1.0f / kCodeScale;
  // A warp that multiplies nothing makes the weights' scales fp32 numbers, times kUnit: instructions concurrent with the MMAs
  // slow these down, even those that nothing waits for. For the same reason stages are then addressed without the block's rank
  // in its cluster. (Measured on an H200, where it is done.)
  static constexpr bool kPrepareScales = kPromotion_ == Promotion::kBlock && !kAsymmetric && !kZeros && kBlockM >= 128;
  // Whether a warp's lanes wait for each other before they give a stage back. They need not, but the compiler then schedules
  // the main loop of these another way: M = 4096, 28672 x 4096 in W4A8 take 810 us instead of 899 with one scale a token, 1003
  // instead of 1014 with one a block. Other tiles, int8 weights and those with zero points take as long or up to 8 % longer.
  // Where zero points are compensated it is int8 weights that gain, 1038 us instead of 1064, and int4 that lose, 1096 and 1072.
  // (Measured on an H200.)
  static constexpr bool kMeetAtEnd =
      kCompensatesByWindow ? kBits == 8
                           : kBits == 4 && kBlockM == 176 && !kZeros && !kAsymmetric && kPromotion != Promotion::kChannel;
  static_assert(Config::kSharedBytes <= wgmma_gemm_a8_tile(kBits, kBlockM, kWarpgroups).shared_bytes,
                "its tile promises less shared memory");

  static __device__ void consume(uint8_t* stages, float* staging, hopper::Barriers<Config>& barriers,
                                 CUtensorMap const& out_map, hopper::Params const& p, hopper::ThreadCoord<Config> const& coord);
};

// With zero points of the activations, a stage's sums start from the bits of kBias - za * (sum of the row's codes): in its
// binade the unit is 1, so that int8 products add to them as to integers, and what they come to, kBias + I with |I| <= 255 *
// 128 * 128 < 2^22, is a float again. That takes as many instructions as the way without zero points, which converts integers.
// All of it is exact, but for a rounding of I * scale.
constexpr float kBias = 12582912.0f;  // 1.5 * 2^23

// A scale whose product with kBias is a float: 22 bits of it, rounded. Narrower ones stay as they are.
__device__ __forceinline__ float short_scale(float scale) {
  float high = __fmul_rn(scale, 5.0f);
  return __fsub_rn(high, __fsub_rn(high, scale));
}

// A stage's weights as they lie in shared memory, the fragments of 128 columns, and their scales and zero points for rows g and
// g + 8.
template <class C>
struct RawWeights {
  static constexpr int kLoads = C::kBits / 2;  // of 16 bytes
  uint32_t words[kLoads][4];
  float scale[2];
  uint32_t zeros;  // two bytes, in one register

  __device__ __forceinline__ void load(uint8_t const* stage, Params const& p, hopper::ThreadCoord<C> const& coord) {
    load_words(stage, coord);
    load_vectors(stage, p, coord);
  }

  __device__ __forceinline__ void load_words(uint8_t const* stage, hopper::ThreadCoord<C> const& coord) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_piece(stage, coord, i);
  }

  __device__ __forceinline__ void load_piece(uint8_t const* stage, hopper::ThreadCoord<C> const& coord, int i) {
    load_shared(cute::cast_smem_ptr_to_uint(stage) + coord.units + i * kUnitBytes, words[i]);
  }

  __device__ __forceinline__ void load_prepared_scales(uint8_t const* stage, hopper::ThreadCoord<C> const& coord) {
    float2 v = *reinterpret_cast<float2 const*>(stage + coord.scales);
    scale[0] = v.x, scale[1] = v.y;
  }

  // Zero points, and scales that nothing prepares. They are waited for where they are loaded: best while products run.
  __device__ __forceinline__ void load_vectors(uint8_t const* stage, Params const& p, hopper::ThreadCoord<C> const& coord) {
    if (C::kLoadScales && !C::kPrepareScales) {
      if (p.weight.scale_type == DataType::kFloat32) {
        float2 v = *reinterpret_cast<float2 const*>(stage + coord.scales);
        scale[0] = C::kStartsFromZeroPoints ? short_scale(v.x) : v.x,
        scale[1] = C::kStartsFromZeroPoints ? short_scale(v.y) : v.y;
      } else {
        uint32_t v = *reinterpret_cast<uint32_t const*>(stage + coord.scales);
        float2 half = __half22float2(reinterpret_cast<__half2 const&>(v));
        bool is_half = p.weight.scale_type == DataType::kFloat16;
        scale[0] = is_half ? half.x : __uint_as_float(v << 16), scale[1] = is_half ? half.y : __uint_as_float(v & 0xffff0000u);
      }
    }
    if (C::kZeros) zeros = *reinterpret_cast<uint16_t const*>(stage + coord.zeros);
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

// Scales of the tile's rows of x: those of a thread's four in 16 come by one load, kAhead sixteens before their use.
template <class C>
struct TokenFactors {
  static constexpr int kAhead = 2;
  uint32_t address;
  float sixteens[C::kBlockM / 16][4];

  __device__ __forceinline__ explicit TokenFactors(uint32_t address) : address(address) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load(j);
  }
  __device__ __forceinline__ void load(int j) {
    if (C::kPromotion == Promotion::kBlock && j < C::kBlockM / 16) load_shared(address + j * 64, sixteens[j]);
  }
};

// Fold the integers of eight rows of x into the fp32 sums. Register 4j + e: row g + 8 (e / 2), token 8j + 2t + e % 2. The same
// three operations in two orders, of which each kernel runs faster in its own (by 2 to 5 %, measured on an H200).
template <class C>
__device__ __forceinline__ void promote(int j, float const* x_row, uint32_t const (&integers)[C::kSums],
                                        float const (&scale)[2], float (&sums)[C::kSums]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float v = float(int(integers[4 * j + e])), &sum = sums[4 * j + e];
    if (C::kPromotion == Promotion::kToken) {
      sum = fmaf(v, scale[e / 2], sum);
    } else if (C::kBits == 8 || C::kPrepareScales) {
      sum = fmaf(v * scale[e / 2], x_row[e % 2], sum);
    } else {
      sum = fmaf(v, x_row[e % 2] * scale[e / 2], sum);
    }
  }
}

// This lane's part of the sums of 128 weights of rows g and g + 8: with them a product of codes becomes one of codes minus zero
// points.
__device__ __forceinline__ void add_weights(uint32_t const (&a)[4][4], uint32_t (&sum)[2]) {
#pragma unroll
  for (int k_slice = 0; k_slice < 4; ++k_slice) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i % 2] = uint32_t(__dp4a(int(a[k_slice][i]), 0x01010101, int(sum[i % 2])));
  }
}

// The four lanes of a row each hold a part.
template <class T>
__device__ __forceinline__ T sum_of_row(T part) {
  part += __shfl_xor_sync(0xffffffffu, part, 1);
  return part + __shfl_xor_sync(0xffffffffu, part, 2);
}

// -1 times the sums of 128 codes of rows g and g + 8: a product with as many columns, on the tensor cores.
__device__ __forceinline__ void code_colsum(uint32_t const (&a)[4][4], float (&sums)[2]) {
  int products[4] = {};
#pragma unroll
  for (int k_slice = 0; k_slice < 4; ++k_slice) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, %3};"
        : "+r"(products[0]), "+r"(products[1]), "+r"(products[2]), "+r"(products[3])
        : "r"(a[k_slice][0]), "r"(a[k_slice][1]), "r"(a[k_slice][2]), "r"(a[k_slice][3]), "r"(0xffffffffu));
  }
  sums[0] = float(products[0]), sums[1] = float(products[2]);
}

// The zero points of a thread's four of sixteen rows of x, loaded to the registers of their integers.
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
  for (int i = 0; i < C::kBlockM / 16; ++i) {
#pragma unroll
    for (int e = 7; e >= 0; --e) {
      float zero = __uint_as_float(integers[8 * i + e / 4 * 2 + e % 2]);
      integers[8 * i + e] = __float_as_uint(fmaf(zero, codes[e % 4 / 2], kBias));
    }
  }
}

// promote() for sixteen rows of x, whose integers have kBias added; `bias` is -kBias * scale. The products take the integers'
// place: the compiler would give them too few separate registers to run in parallel.
template <class C>
__device__ __forceinline__ void promote_biased(int sixteen, float const (&x_row)[4], float const (&scale)[2],
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
    sum = fmaf(v, x_row[e / 4 * 2 + e % 2], sum);
  }
}

// Compensation of token zero points in a stage: one more product, whose second operand is the zero point in each of 32 columns
// and whose first is -(sum of a row's weights), spread over as many bytes. What is beyond their range is left to subtract(),
// which works where a row of the warp has such a sum. All of it is exact. (Sums that start from -za * colsum, as with block
// zero points, take up to 6 % more time here, measured on an H200.)
template <class C>
class ZeroPointProduct {
 public:
  uint32_t operand[4];

  // This lane's part of the sums. The compiler would have it between the first products and the others, which then come late.
  __device__ __forceinline__ void add(uint32_t const (&weights)[4][4]) {
    int parts[4] = {};
#pragma unroll
    for (int k_slice = 0; k_slice < 4; ++k_slice) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("dp4a.s32.s32 %0, %1, -1, %0;" : "+r"(parts[i]) : "r"(weights[k_slice][i]));
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
      // Lane t takes a quarter, rounded down after t is added, so that the four make up the sum. Each of its eight bytes has an
      // eighth of that, rounded down, and one of them the rest.
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
    for (int j = 0; j < C::kBlockM / 8; ++j) {
      int coord = 8 * j + threadIdx.x % 4 * 2;
      char2 two = make_char2(zeros[coord * 16], zeros[(coord + 1) * 16]);
#pragma unroll
      for (int e = 0; e < 4; ++e) integers[4 * j + e] -= uint32_t((e % 2 ? two.y : two.x) * beyond_[e / 2]);
    }
  }

 private:
  int both_, beyond_[2];
  bool any_beyond_;
};

// A stage that compensates a window of tiles: products of 16-bit floats, whose weights are operands as they are loaded,
// promoted like others.
template <class C>
__device__ __forceinline__ void compensate(int window, RawWeights<C>& raw, uint8_t* stages, hopper::Ring<C::kStages>& ring,
                                           hopper::Barriers<C>& barriers, Params const& p, hopper::ThreadCoord<C> const& coord,
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
    wgmma_float<__half, C::kBlockM>(raw.words[2 * i], zeros + 4 * i, products, i > 0);
    wgmma_float<__half, C::kBlockM>(raw.words[2 * i], zeros + 4 * i + 2, products, true);
    wgmma_float<__half, C::kBlockM>(raw.words[2 * i + 1], zeros + 4 * i, products, true);
  }
  cute::warpgroup_commit_batch();
  fence_registers(products);
  ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
  if constexpr (C::kPrepareScales) raw.load_prepared_scales(stage, coord);
  constexpr float kUnit = C::kPrepareScales ? 1.0f : C::kUnit;
  float const scale[2] = {raw.scale[0] * kUnit, raw.scale[1] * kUnit};
  uint64_t* const empty = &barriers.empty[ring.stage];
  ring.advance();
  uint8_t const* next = stages + ring.stage * C::kStageBytes;
  if (!is_last) {
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    raw.load_vectors(next, p, coord);
  }
  TokenFactors<C> token_scales(cute::cast_smem_ptr_to_uint(stage) + coord.token_factors);
  cute::warpgroup_wait<0>();
  fence_registers(products);
  if (!is_last) raw.load_words(next, coord);
#pragma unroll
  for (int j = 0; j < C::kBlockM / 8; ++j) {
    if (j % 2 == 0) token_scales.load(j / 2 + token_scales.kAhead);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& sum = sums[4 * j + e];
      sum = fmaf(products[4 * j + e] * scale[e / 2], token_scales.sixteens[j / 2][j % 2 * 2 + e % 2], sum);
    }
  }
  if (coord.lane < C::kCluster) ClusterBarrier::arrive(empty, coord.lane, true);
}

// Where a token has one zero point: less that times all of a row's weights. `zeros` is shared memory for a warpgroup's rows of
// x, which nothing waits for.
template <class C>
__device__ __forceinline__ void compensate_rows(float (&sums)[C::kSums], float* zeros, Params const& p,
                                                hopper::ThreadCoord<C> const& coord, int row0, int m0) {
  int const position = row0 + coord.warpgroup * kRowsPerPanel + coord.lane / 4 * 8 + coord.warp * 2;
  float2 rows = {};
  if (position < p.n_pad) rows = __ldg(reinterpret_cast<float2 const*>(p.weight.total_colsum + position));
#pragma unroll
  for (int x_row = coord.warp * 32 + coord.lane; x_row < C::kBlockM; x_row += 128)
    zeros[x_row] = float(__ldg(p.x.zeros + min(m0 + x_row, p.x.stride - 1)));
  cutlass::arch::NamedBarrier::sync(128, 1 + coord.warpgroup);
#pragma unroll
  for (int i = 0; i < C::kSums; ++i) {
    sums[i] = fmaf(-zeros[i / 4 * 8 + coord.lane % 4 * 2 + i % 2], i % 4 / 2 ? rows.y : rows.x, sums[i]);
  }
  cutlass::arch::NamedBarrier::sync(128, 1 + coord.warpgroup);
}

template <int kBits, int kBlockM, Promotion kPromotion, bool kZeros, bool kAsymmetric, int kWarpgroups, bool kCompensates>
__device__ __forceinline__ void Config<kBits, kBlockM, kPromotion, kZeros, kAsymmetric, kWarpgroups, kCompensates>::consume(
    uint8_t* stages, float* staging, hopper::Barriers<Config>& barriers, CUtensorMap const& out_map, hopper::Params const& p,
    hopper::ThreadCoord<Config> const& coord) {
  using C = Config;
  constexpr bool kBlock = kPromotion == Promotion::kBlock, kChannel = kPromotion == Promotion::kChannel;
  int clusters = gridDim.x / C::kCluster, total = hopper::Work::count(p);
  int const t = coord.lane % 4;
  // Provably uniform over the lanes, and not recomputed in every turn.
  uint32_t const first_stage = C::kPrepareScales ? __shfl_sync(~0u, cute::cast_smem_ptr_to_uint(stages), 0) : 0;
  hopper::Ring<C::kStages> ring;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    hopper::Work work(index, p);
    int row0 = (work.pair * C::kCluster + coord.rank) * C::kRows, m0 = work.m_tile * C::kBlockM;
    int count = work.end_k(p) - work.first_k(p);
    uint32_t integers[C::kSums];
    float sums[kChannel ? 1 : C::kSums] = {};
    uint32_t total_colsum[2] = {};  // of the weights of rows g and g + 8 over all of K; this lane's part until the end
    RawWeights<C> raw;
    // One scale a token, and one a row, come last; they are on their way until then.
    float end_scale[(C::kEndScales + 127) / 128 + 1];
    uint32_t end_zero[(C::kEndScales + 127) / 128 + 1];
#pragma unroll
    for (int i = 0; i * 128 < C::kEndScales; ++i) {
      int x_row = min(m0 + coord.warp * 32 + coord.lane + i * 128, p.x.stride - 1);
      end_scale[i] = __ldg(p.x.scales + x_row);
      if (kAsymmetric) end_zero[i] = uint32_t(uint8_t(__ldg(p.x.zeros + x_row))) * 0x01010101;
    }
    [[maybe_unused]] hopper::StoredScales row_scales;
    if constexpr (kChannel) {
      int const position = row0 + coord.warpgroup * kRowsPerPanel + coord.lane / 4 * 8 + coord.warp * 2;
      row_scales.load(static_cast<uint8_t const*>(p.weight.scales) + min(position, p.n_pad - 2) * p.scale_bytes,
                      p.weight.scale_type);
    }
    uint8_t* const ends = reinterpret_cast<uint8_t*>(staging) + C::kStoreBytes;
    uint8_t* const end_zeros = ends + coord.warpgroup * C::kEndZeros;
    auto* end_scales = reinterpret_cast<float*>(ends + C::kWarpgroups * C::kEndZeros) + coord.warpgroup * C::kEndScales;
    if constexpr (C::kMultipliesZeroPoints) {
#pragma unroll
      for (int i = 0; i * 128 < C::kEndScales; ++i) {
        int x_row = coord.warp * 32 + coord.lane + i * 128;
        if (x_row < C::kBlockM) {
          reinterpret_cast<uint4*>(end_zeros)[x_row] = make_uint4(end_zero[i], end_zero[i], end_zero[i], end_zero[i]);
        }
      }
      cutlass::arch::fence_view_async_shared();
      cutlass::arch::NamedBarrier::sync(128, 1 + coord.warpgroup);
    }
    [[maybe_unused]] auto zeros_address = [&](uint8_t const* stage) {
      return cute::cast_smem_ptr_to_uint(stage) + coord.token_factors + C::kBlockM * 4;
    };
    if constexpr (kChannel) {
      // Were the first product to start from zeros itself, sums of 256 rows of x would live from tile to tile, and not all in
      // registers.
#pragma unroll
      for (uint32_t& sum : integers) sum = 0;
    }
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    raw.load(stages + ring.stage * C::kStageBytes, p, coord);
    uint32_t a[4][4];
    float codes[2];
    if constexpr (C::kStartsFromZeroPoints) {
      ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
      uint32_t zeros = zeros_address(stages + ring.stage * C::kStageBytes);
#pragma unroll
      for (int j = 0; j < C::kBlockM / 16; ++j) load_zeros<C>(j, zeros, integers);
      decode_weights<C>(raw, a);
      code_colsum(a, codes);
      start_sums<C>(codes, integers);
    }
    // Tiles up to the next compensation, and that, in turn. The same in all lanes, as the compiler can see.
    int i = 0;
    [[maybe_unused]] int compensation = 0, window = 0;
    if constexpr (C::kCompensatesByWindow) {
      hopper::WindowPosition<C::kWindowTiles> const first(work.first_k(p), p);
      window = __shfl_sync(~0u, first.window, 0), compensation = __shfl_sync(~0u, first.compensation - work.first_k(p), 0);
    }
    do {
      int const until = C::kCompensatesByWindow ? min(count, compensation) : count;
      for (; i < until; ++i) {
        uint8_t const* stage = stages + ring.stage * C::kStageBytes;
        if constexpr (!C::kStartsFromZeroPoints) decode_weights<C>(raw, a);
        float scale[2];
        if (!C::kPrepareScales) scale[0] = raw.scale[0] * C::kUnit, scale[1] = raw.scale[1] * C::kUnit;
        uint64_t x_rows = operand_descriptor(
            (C::kPrepareScales ? first_stage + ring.stage * C::kStageBytes : cute::cast_smem_ptr_to_uint(stage)) +
            C::kActivations);
        [[maybe_unused]] ZeroPointProduct<C> zero_point_product;
        if constexpr (C::kMultipliesZeroPoints) zero_point_product.add(a);
#pragma unroll
        for (int k_slice = 0; k_slice < 4; ++k_slice) fence_registers(a[k_slice]);
        fence_registers(integers);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k_slice = 0; k_slice < 4; ++k_slice) {
          wgmma_int8<C::kBlockM>(a[k_slice], x_rows + k_slice * 2, integers,
                                 C::kStartsFromZeroPoints || kChannel || k_slice > 0);
        }
        cute::warpgroup_commit_batch();
        fence_registers(integers);
        // While the products run.
        if constexpr (kAsymmetric && kChannel) add_weights(a, total_colsum);
        if constexpr (C::kMultipliesZeroPoints) zero_point_product.spread();
        if (kBlock && !C::kStartsFromZeroPoints) ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
        if constexpr (C::kPrepareScales) {
          raw.load_prepared_scales(stage, coord);
          scale[0] = raw.scale[0], scale[1] = raw.scale[1];
        }
        if constexpr (C::kMultipliesZeroPoints) {
          fence_registers(zero_point_product.operand);
          cute::warpgroup_arrive();
          wgmma_int8<C::kBlockM>(zero_point_product.operand, repeated_descriptor(end_zeros), integers, true);
          cute::warpgroup_commit_batch();
          fence_registers(integers);
        }
        uint64_t* empty = &barriers.empty[ring.stage];
        ring.advance();
        uint8_t const* next = stages + ring.stage * C::kStageBytes;
        if (i + 1 < count) {
          TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
          raw.load_vectors(next, p, coord);
          if (C::kStartsFromZeroPoints) ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
        }
        uint32_t factors = cute::cast_smem_ptr_to_uint(stage) + coord.token_factors;
        TokenFactors<C> token_scales(factors);
        cute::warpgroup_wait<0>();
        fence_registers(integers);
        if constexpr (C::kMultipliesZeroPoints) zero_point_product.subtract(end_zeros, integers);
        if constexpr (C::kStartsFromZeroPoints) {
          // A sixteen's zero points come kLate sixteens after its integers have gone, and the next weights and their sums in
          // between: what is loaded needs registers, and time.
          constexpr int kSixteens = C::kBlockM / 16, kLate = 2;
          constexpr int kWeightsAt = kBlockM == 176  ? 4
                                     : kBlockM == 32 ? 0
                                                     : 2,
                        kCodesAt = kBlockM == 64 ? 3 : kSixteens * 2 / 3;
          float bias[2] = {scale[0] * -kBias, scale[1] * -kBias};
          uint32_t zeros = zeros_address(i + 1 < count ? next : stage);
#pragma unroll
          for (int j = 0; j < kSixteens + kLate; ++j) {
            if (j < kSixteens) {
              token_scales.load(j + token_scales.kAhead);
#pragma unroll
              for (int k_slice = 0; k_slice < RawWeights<C>::kLoads; ++k_slice) {
                if (j == kWeightsAt + k_slice / 2 && i + 1 < count) raw.load_piece(next, coord, k_slice);
              }
              promote_biased<C>(j, token_scales.sixteens[j], scale, bias, integers, sums);
            }
            if (j >= kLate) load_zeros<C>(j - kLate, zeros, integers);
            if (j == kCodesAt) {
              decode_weights<C>(raw, a);
              code_colsum(a, codes);
            }
          }
          start_sums<C>(codes, integers);
        } else {
          constexpr int kEvery =
              kBlockM / 8 < 2 * RawWeights<C>::kLoads ? 1 : 2;  // groups of eight rows of x between two loads of weights
#pragma unroll
          for (int j = 0; j < C::kBlockM / 8; ++j) {
            if (j % 2 == 0) token_scales.load(j / 2 + token_scales.kAhead);
            // The next weights, 16 bytes at a time: before the products end there is no register to spare, and none for 8-bit
            // ones at all.
            if (j % kEvery == kEvery - 1 && j / kEvery < RawWeights<C>::kLoads && i + 1 < count)
              raw.load_piece(next, coord, j / kEvery);
            if constexpr (!kChannel) promote<C>(j, token_scales.sixteens[j / 2] + j % 2 * 2, integers, scale, sums);
          }
        }
        if (C::kMeetAtEnd) __syncwarp();
        if (coord.lane < C::kCluster) ClusterBarrier::arrive(empty, coord.lane, true);
      }
      if constexpr (C::kCompensatesByWindow) {
        if (i < count) {
          compensate<C>(window, raw, stages, ring, barriers, p, coord, i + 1 == count, integers, sums);
          ++i, ++window;
          compensation = min(compensation + C::kWindowTiles + 1, p.k_tiles - 1 - work.first_k(p));
        }
      }
    } while (C::kCompensatesByWindow && i < count);
    if constexpr (kBlock) {
      // With these pinned, the main loop of this tile is scheduled as well as can be: 4 % (measured on an H200).
      if (C::kStartsFromZeroPoints && C::kBits == 8 && C::kBlockM == 176) asm volatile("" : "+r"(row0), "+r"(m0));
      hopper::store<C>(sums, staging, out_map, p, coord, index, row0, m0);
    } else {
      if constexpr (kCompensates) {
        // Of split-K slices one does it.
        if (work.first_k(p) == 0) compensate_rows<C>(sums, end_scales, p, coord, row0, m0);
      }
#pragma unroll
      for (int i = 0; i * 128 < C::kEndScales; ++i) {
        int x_row = coord.warp * 32 + coord.lane + i * 128;
        if (x_row >= C::kBlockM) continue;
        end_scales[x_row] = end_scale[i];
        if (kAsymmetric && kChannel) end_zeros[x_row] = uint8_t(end_zero[i]);
      }
      float row_scale[2];
      if constexpr (kChannel) {
        row_scales.values(p.weight.scale_type, row_scale);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          row_scale[h] *= C::kUnit;
          if (kAsymmetric) total_colsum[h] = sum_of_row(total_colsum[h]);
        }
      }
      cutlass::arch::NamedBarrier::sync(128, 1 + coord.warpgroup);
      float outputs[kChannel ? C::kSums : 1];
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) {
        int x_row = i / 4 * 8 + 2 * t + i % 2, h = i % 4 / 2;
        if constexpr (kChannel) {
          // In int32: differences are exact where they fit, whatever the sums did.
          uint32_t zero_point_product = kAsymmetric ? total_colsum[h] * uint32_t(int(int8_t(end_zeros[x_row]))) : 0;
          outputs[i] = float(int(integers[i] - zero_point_product)) * row_scale[h] * end_scales[x_row];
        } else {
          sums[i] *= end_scales[x_row];
        }
      }
      if constexpr (kChannel) {
        hopper::store<C>(outputs, staging, out_map, p, coord, index, row0, m0);
      } else {
        hopper::store<C>(sums, staging, out_map, p, coord, index, row0, m0);
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
Status launch_config(GemmProblem const& problem, Plan const& plan, float* splitk_workspace, Stream stream) {
  static_assert(C::kSharedBytes == wgmma_gemm_shared_bytes({C::kBits, C::kBlockM, 1, C::kPromotion != Promotion::kChannel,
                                                            C::kPromotion == Promotion::kBlock, C::kAsymmetric, C::kZeros,
                                                            C::kStages, C::kWarpgroups}),
                "the plan has other shared memory");
  int64_t k_pad = padded_k(problem.weight.k);
  int const rows = std::max(problem.m, problem.quantized.rows);
  CUtensorMap map;
  Status status = hopper::encode_x_rows(problem.quantized.codes, 1, rows, int(k_pad), k_pad, C::kBlockM / C::kCluster, &map);
  return status.ok() ? hopper::launch_persistent<C>(wgmma_gemm_a8<C>, problem, plan, splitk_workspace, map, stream) : status;
}

template <int kBits, int kBlockM, int kWarpgroups, bool kZeros, bool kAsymmetric>
Status launch_promotion(GemmProblem const& problem, Plan const& plan, float* splitk_workspace, Stream stream) {
  auto const launch = [&](auto promotion) {
    using C = Config<kBits, kBlockM, decltype(promotion)::value, kZeros, kAsymmetric, kWarpgroups>;
    return launch_config<C>(problem, plan, splitk_workspace, stream);
  };
  if constexpr (!kZeros) {
    if (sums_whole_rows(problem)) return launch(std::integral_constant<Promotion, Promotion::kChannel>());
  }
  if constexpr (kBlockM > 176) {
    return {Status::kUnsupported, "BLOCK_M = " + std::to_string(kBlockM) + " is for int32 sums over all of K"};
  } else if (problem.quantized.block == -1) {
    return launch(std::integral_constant<Promotion, Promotion::kToken>());
  } else {
    return launch(std::integral_constant<Promotion, Promotion::kBlock>());
  }
}

template <int kBits, int kBlockM, int kWarpgroups, bool kZeros>
Status launch_zeros(GemmProblem const& problem, Plan const& plan, float* splitk_workspace, Stream stream) {
  if constexpr (kWarpgroups == 2 && kBlockM != 144) {
    if (problem.quantized.zeros) {
      return launch_promotion<kBits, kBlockM, kWarpgroups, kZeros, true>(problem, plan, splitk_workspace, stream);
    }
  }
  return launch_promotion<kBits, kBlockM, kWarpgroups, kZeros, false>(problem, plan, splitk_workspace, stream);
}

template <int kBits, int kBlockM>
Status launch_compensated(GemmProblem const& problem, Plan const& plan, float* splitk_workspace, Stream stream) {
  auto const launch = [&](auto zeros) {
    constexpr bool kZeros = decltype(zeros)::value;
    if (problem.quantized.block == -1) {
      return launch_config<Config<kBits, kBlockM, Promotion::kToken, kZeros, false, 2, true>>(problem, plan, splitk_workspace,
                                                                                              stream);
    }
    return launch_config<Config<kBits, kBlockM, Promotion::kBlock, kZeros, false, 2, true>>(problem, plan, splitk_workspace,
                                                                                            stream);
  };
  // Codes less zero points, where those of x are compensated; where those of the weight are, codes alone.
  if constexpr (kBits == 4) {
    if (problem.weight.zeros && problem.quantized.zeros) return launch(std::true_type());
  }
  return launch(std::false_type());
}

template <int kBits, int kBlockM, int kWarpgroups = 2>
Status launch_plain(GemmProblem const& problem, Plan const& plan, float* splitk_workspace, Stream stream) {
  if constexpr (kBits == 4 && kBlockM <= 176) {
    if (problem.weight.zeros) return launch_zeros<4, kBlockM, kWarpgroups, true>(problem, plan, splitk_workspace, stream);
  }
  return launch_zeros<kBits, kBlockM, kWarpgroups, false>(problem, plan, splitk_workspace, stream);
}

template <int kBits>
Status launch_compensated_tile(GemmProblem const& problem, Plan const& plan, float* splitk_workspace, Stream stream) {
  switch (plan.block_m) {
    case 96:
      return launch_compensated<kBits, 96>(problem, plan, splitk_workspace, stream);
    case 128:
      return launch_compensated<kBits, 128>(problem, plan, splitk_workspace, stream);
    case 144:
      return launch_compensated<kBits, 144>(problem, plan, splitk_workspace, stream);
    default:
      return launch_compensated<kBits, 176>(problem, plan, splitk_workspace, stream);
  }
}

template <int kBits>
Status launch_tile(GemmProblem const& problem, Plan const& plan, float* splitk_workspace, Stream stream) {
  if (plan.compensates) return launch_compensated_tile<kBits>(problem, plan, splitk_workspace, stream);
  if constexpr (kBits == 4) {
    if (plan.block_n == 512) {
      return plan.block_m == 32 ? launch_plain<4, 32, 4>(problem, plan, splitk_workspace, stream)
                                : launch_plain<4, 64, 4>(problem, plan, splitk_workspace, stream);
    }
  }
  switch (plan.block_m) {
    case 32:
      return launch_plain<kBits, 32>(problem, plan, splitk_workspace, stream);
    case 64:
      return launch_plain<kBits, 64>(problem, plan, splitk_workspace, stream);
    case 96:
      return launch_plain<kBits, 96>(problem, plan, splitk_workspace, stream);
    case 128:
      return launch_plain<kBits, 128>(problem, plan, splitk_workspace, stream);
    case 144:
      return launch_plain<kBits, 144>(problem, plan, splitk_workspace, stream);
    case 256:
      return launch_plain<kBits, 256>(problem, plan, splitk_workspace, stream);
    default:
      return launch_plain<kBits, 176>(problem, plan, splitk_workspace, stream);
  }
}

}  // namespace

Status launch_wgmma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* splitk_workspace, Stream stream) {
  return problem.weight.bits == 4 ? launch_tile<4>(problem, plan, splitk_workspace, stream)
                                  : launch_tile<8>(problem, plan, splitk_workspace, stream);
}

}  // namespace cutlass_ops
