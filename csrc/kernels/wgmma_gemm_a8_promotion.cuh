// Configurations of wgmma_gemm_a8, its promotion of int32 sums to fp32, and the
// compensation of zero points.
#pragma once

#include <algorithm>

#include "device/hopper_gemm.cuh"
#include "dispatch/ctas.h"
#include "formats/decode.cuh"
#include "formats/formats.h"

// for other GPUs the kernels have no bodies, which read the members of Config
#pragma nv_diag_suppress 177

namespace cutlass_ops {
namespace {

enum class Promotion {
  kBlock,    // a scale for each row of x, each row of the weight and 128 columns
  kToken,    // one for each row of the weight and 128 columns; that of a row of x at the end
  kTap,      // one for each pixel of an image, after the sums of a tap; the weight's at the end
  kChannel,  // none: int32 sums run over all of K
};

template <class Format, int kBlockM, Promotion kPromotion_, bool kZeros, bool kAsymmetric_,
          int kWarpgroups = 2, bool kCompensates = false, bool kGrouped_ = false,
          bool kQuantizes = false, int kGroups_ = 1>
struct Config
    : hopper::TileConfig<Format::kBits, kBlockM, 1, (kPromotion_ < Promotion::kTap),
                         kPromotion_ == Promotion::kBlock || kPromotion_ == Promotion::kTap,
                         kAsymmetric_, kZeros,
                         wgmma_gemm_a8_tile(Format::kBits, kBlockM, kWarpgroups, kQuantizes).stages,
                         kWarpgroups, kQuantizes, kGrouped_, kGroups_> {
  static constexpr bool kImages =
      !kAsymmetric_ && !kCompensates && kPromotion_ != Promotion::kToken && !kGrouped_;
  static constexpr bool kSplitsRows = kImages && kWarpgroups == 2;
  // Zero points are compensated by the window of K or, where a row of x has one, at the end.
  static constexpr bool kCompensatesByWindow = kCompensates && kPromotion_ == Promotion::kBlock;
  using Params =
      std::conditional_t<kCompensatesByWindow, hopper::CompensatedParams,
                         std::conditional_t<kGrouped_, hopper::GroupedParams, hopper::Params>>;
  using Work = std::conditional_t<kGrouped_, hopper::GroupedWork<kBlockM>, hopper::Work>;
  static_assert(!kGrouped_ || (!kAsymmetric_ && kPromotion_ != Promotion::kTap),
                "experts have other kernels for these");
  static constexpr int kWindowTiles = kCompensatesByWindow ? compensation_window(Format::kBits) : 0;
  static constexpr Promotion kPromotion = kPromotion_;
  static constexpr bool kAsymmetric = kAsymmetric_;  // activations with zero points
  static constexpr bool kStartsFromZeroPoints =
      kAsymmetric && kPromotion == Promotion::kBlock;  // a stage's sums start from -za * colsum
  // a product compensates them
  static constexpr bool kMultipliesZeroPoints = kAsymmetric && kPromotion == Promotion::kToken;
  using Decode = typename Format::template Int8Decoder<kZeros>;
  static constexpr float kUnit = 1.0f / float(Decode::kScale);
  // A warp that does not multiply converts the weights' scales to fp32, times kUnit: instructions
  // that run concurrently with MMAs slow these down, even if nothing depends on them. For the same
  // reason stages are then addressed without the block's rank in its cluster. (Measured on an H200,
  // where it is done.)
  static constexpr bool kPrepareScales =
      kPromotion_ == Promotion::kBlock && !kAsymmetric && !kZeros && (kBlockM >= 128 || kQuantizes);
  // Whether a warp's lanes synchronise before they release a stage. It is not necessary, but
  // changes the compiler's schedule of the main loop. With one scale a block tiles of 176 rows and
  // int4 weights without zero points take less time; others take as long or longer. Where zero
  // points are compensated int8 weights gain, and int4 weights lose. (Times are in
  // docs/tuning-notes.md.)
  static constexpr bool kMeetAtEnd =
      kCompensatesByWindow
          ? ByWidth<bool>(false, true)[Format::kBits]
          : ByWidth<bool>(true, false)[Format::kBits] && kBlockM == 176 && !kZeros &&
                !kAsymmetric && (kPromotion == Promotion::kBlock || kPromotion == Promotion::kTap);
  // Whether promote() multiplies by the weight's scale first: each kernel is faster with one of the
  // two orders (docs/tuning-notes.md).
  static constexpr bool kWeightScaleFirst =
      kPrepareScales || ByWidth<bool>(false, true)[Format::kBits];
  // Whether the arguments of store() are pinned, which gives the best schedule of these tiles' main
  // loop (docs/tuning-notes.md).
  static constexpr bool kPinsStore =
      kStartsFromZeroPoints ? ByWidth<bool>(false, true)[Format::kBits] && kBlockM == 176
                            : kPromotion == Promotion::kToken && !kAsymmetric;
  // Whether a stage's scales are converted before its sums are complete, and the next stage's
  // scales are loaded at the same time. int4 without zero points loses by it
  // (docs/tuning-notes.md).
  static constexpr bool kConvertsScalesEarly =
      kPromotion == Promotion::kToken && !kAsymmetric &&
      (kZeros || ByWidth<bool>(false, true)[Format::kBits]);
  static_assert(
      Config::kSharedBytes <=
          wgmma_gemm_a8_tile(Format::kBits, kBlockM, kWarpgroups, kQuantizes).shared_bytes,
      "its tile promises less shared memory");

  static __device__ void consume(uint8_t* stages, float* staging,
                                 hopper::Barriers<Config>& barriers, CUtensorMap const& out_map,
                                 Params const& p, hopper::ThreadCoord<Config> const& coord);
};

// With zero points of the activations, a stage's sums start from the bits of kBias - za * (sum of
// the row's codes): in its binade the unit is 1, so that int8 products add to them as to integers,
// and what they come to, kBias + I with |I| <= 255 * 128 * 128 < 2^22, is a float again. This takes
// as many instructions as without zero points, where integers are converted. All of it is exact,
// but for a rounding of I * scale.
constexpr float kBias = 12582912.0f;  // 1.5 * 2^23

// A scale whose product with kBias is a float: 22 bits of it, rounded. Narrower ones
// stay as they are.
__device__ __forceinline__ float short_scale(float scale) {
  float high = __fmul_rn(scale, 5.0f);
  return __fsub_rn(high, __fsub_rn(high, scale));
}

// A stage's weights, as stored in shared memory: the fragments of 128 columns, and their scales and
// zero points for rows g and g + 8.
template <class C>
struct RawWeights {
  static constexpr int kLoads = C::kBits / 2;  // of 16 bytes
  uint32_t words[kLoads][4];
  float scale[2];
  uint32_t zeros[C::kGroups];  // two bytes, in one register

  __device__ __forceinline__ void load(uint8_t const* stage, hopper::Params const& p,
                                       hopper::ThreadCoord<C> const& coord) {
    load_words(stage, coord);
    load_vectors(stage, p, coord);
  }

  __device__ __forceinline__ void load_words(uint8_t const* stage,
                                             hopper::ThreadCoord<C> const& coord) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_piece(stage, coord, i);
  }

  __device__ __forceinline__ void load_piece(uint8_t const* stage,
                                             hopper::ThreadCoord<C> const& coord, int i) {
    load_shared(cute::cast_smem_ptr_to_uint(stage) + coord.units + i * kUnitBytes, words[i]);
  }

  __device__ __forceinline__ void load_prepared_scales(uint8_t const* stage,
                                                       hopper::ThreadCoord<C> const& coord) {
    float2 v = *reinterpret_cast<float2 const*>(stage + coord.scales);
    scale[0] = v.x, scale[1] = v.y;
  }

  // A group's scales that are not prepared.
  __device__ __forceinline__ static void load_scales(uint8_t const* stage, int group,
                                                     hopper::Params const& p,
                                                     hopper::ThreadCoord<C> const& coord,
                                                     float (&scale)[2]) {
    uint8_t const* const from = stage + coord.scales + group * C::kNextScales;
    if (p.weight.scale_type == DataType::kFloat32) {
      float2 v = *reinterpret_cast<float2 const*>(from);
      scale[0] = C::kStartsFromZeroPoints ? short_scale(v.x) : v.x,
      scale[1] = C::kStartsFromZeroPoints ? short_scale(v.y) : v.y;
    } else {
      uint32_t v = *reinterpret_cast<uint32_t const*>(from);
      float2 half = __half22float2(reinterpret_cast<__half2 const&>(v));
      bool is_half = p.weight.scale_type == DataType::kFloat16;
      scale[0] = is_half ? half.x : __uint_as_float(v << 16),
      scale[1] = is_half ? half.y : __uint_as_float(v & 0xffff0000u);
    }
  }

  // Zero points, and scales that are not prepared: of several groups, each is loaded when its sums
  // are promoted. Loading them waits for them: best while products run.
  __device__ __forceinline__ void load_vectors(uint8_t const* stage, hopper::Params const& p,
                                               hopper::ThreadCoord<C> const& coord) {
    if (C::kLoadScales && !C::kPrepareScales && C::kGroups == 1)
      load_scales(stage, 0, p, coord, scale);
#pragma unroll
    for (int i = 0; i < C::kGroups; ++i) {
      if (C::kZeros)
        zeros[i] = *reinterpret_cast<uint16_t const*>(stage + coord.zeros + i * C::kNextZeroPoints);
    }
  }
};

// The four operands of 32 columns each.
template <class C>
__device__ __forceinline__ void decode_weights(RawWeights<C> const& raw, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    using Decode = typename C::Decode;
    constexpr int kOfLoad = 4 / Decode::kWords;  // operands in 16 bytes
    uint32_t const* words = raw.words[i / kOfLoad] + i % kOfLoad * Decode::kWords;
    if constexpr (C::kZeros) {
      uint32_t const both = raw.zeros[i * C::kGroups / 4];
      auto const zeros = Decode::zero_constants(int8_t(both), int8_t(both >> 8));
      Decode::fragment(words, zeros, a[i]);
    } else {
      Decode::fragment(words, a[i]);
    }
  }
}

// Scales of the tile's rows of x: one load has those of a thread's four rows in 16, kAhead steps of
// 16 rows before their use.
template <class C>
struct XRowFactors {
  static constexpr int kAhead = 2;
  uint32_t address;
  float sixteens[C::kBlockM / 16][4];

  __device__ __forceinline__ explicit XRowFactors(uint32_t address) : address(address) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load(j);
  }
  __device__ __forceinline__ void load(int j) {
    if (C::kLoadXRowScales && j < C::kBlockM / 16) load_shared(address + j * 64, sixteens[j]);
  }
};

// Fold the integers of eight rows of x into the fp32 sums. Register 4j + e: row g + 8 (e / 2), row
// 8j + 2t + e % 2 of x.
template <class C>
__device__ __forceinline__ void promote(int j, float const* x_row, uint32_t const* integers,
                                        float const (&scale)[2], float (&sums)[C::kSums]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float v = float(int(integers[4 * j + e])), &sum = sums[4 * j + e];
    if (C::kPromotion == Promotion::kToken) {
      sum = fmaf(v, scale[e / 2], sum);
    } else if (C::kWeightScaleFirst) {
      sum = fmaf(v * scale[e / 2], x_row[e % 2], sum);
    } else {
      sum = fmaf(v, x_row[e % 2] * scale[e / 2], sum);
    }
  }
}

// This lane's part of the sums of 128 weights of rows g and g + 8: with them a product of codes
// becomes one of codes minus zero points.
__device__ __forceinline__ void add_weights(uint32_t const (&a)[4][4], uint32_t (&sum)[2]) {
#pragma unroll
  for (int k_slice = 0; k_slice < 4; ++k_slice) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum[i % 2] = uint32_t(__dp4a(int(a[k_slice][i]), 0x01010101, int(sum[i % 2])));
  }
}

// The four lanes of a row each hold a part.
template <class T>
__device__ __forceinline__ T sum_of_row(T part) {
  part += __shfl_xor_sync(0xffffffffu, part, 1);
  return part + __shfl_xor_sync(0xffffffffu, part, 2);
}

// -1 times the sums of 128 codes of rows g and g + 8: a product with as many columns, on
// the tensor cores.
__device__ __forceinline__ void code_colsum(uint32_t const (&a)[4][4], float (&sums)[2]) {
  int products[4] = {};
#pragma unroll
  for (int k_slice = 0; k_slice < 4; ++k_slice) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
        "%8}, {%0, %1, %2, %3};"
        : "+r"(products[0]), "+r"(products[1]), "+r"(products[2]), "+r"(products[3])
        : "r"(a[k_slice][0]), "r"(a[k_slice][1]), "r"(a[k_slice][2]), "r"(a[k_slice][3]),
          "r"(0xffffffffu));
  }
  sums[0] = float(products[0]), sums[1] = float(products[2]);
}

// The zero points of a thread's four of sixteen rows of x, loaded to the registers of their
// integers.
template <class C>
__device__ __forceinline__ void load_zeros(int sixteen, uint32_t address,
                                           uint32_t (&integers)[C::kSums]) {
  uint32_t zeros[4];
  load_shared(address + sixteen * 64, zeros);
#pragma unroll
  for (int i = 0; i < 4; ++i) integers[8 * sixteen + i] = zeros[i];
}

// The start of the next stage's sums, computed from zero points in the registers where load_zeros()
// left them.
template <class C>
__device__ __forceinline__ void start_sums(float const (&codes)[2],
                                           uint32_t (&integers)[C::kSums]) {
#pragma unroll
  for (int i = 0; i < C::kBlockM / 16; ++i) {
#pragma unroll
    for (int e = 7; e >= 0; --e) {
      float zero = __uint_as_float(integers[8 * i + e / 4 * 2 + e % 2]);
      integers[8 * i + e] = __float_as_uint(fmaf(zero, codes[e % 4 / 2], kBias));
    }
  }
}

// promote() for sixteen rows of x, whose integers have kBias added; `bias` is -kBias * scale. The
// products overwrite the integers: the compiler would give them too few separate registers to run
// in parallel.
template <class C>
__device__ __forceinline__ void promote_biased(int sixteen, float const (&x_row)[4],
                                               float const (&scale)[2], float const (&bias)[2],
                                               uint32_t (&integers)[C::kSums],
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

// Compensation of zero points of whole rows of x in a stage: one more product, whose second operand
// is the zero point in each of 32 columns and whose first is -(sum of a row's weights), spread over
// as many bytes. Sums beyond the range of bytes are handled by subtract(), if a row of the warp has
// one. All of it is exact. It is faster here than sums that start from -za * colsum, which block
// zero points use (docs/tuning-notes.md).
template <class C>
class ZeroPointProduct {
 public:
  uint32_t operand[4];

  // This lane's part of the sums. The compiler would place it between the first products and the
  // others, delaying those.
  __device__ __forceinline__ void add(uint32_t const (&weights)[4][4]) {
    int parts[4] = {};
#pragma unroll
    for (int k_slice = 0; k_slice < 4; ++k_slice) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        asm volatile("dp4a.s32.s32 %0, %1, -1, %0;" : "+r"(parts[i]) : "r"(weights[k_slice][i]));
    }
    // they reach 2^14: those of both rows share a word
    both_ = parts[0] + parts[2] + (parts[1] + parts[3]) * 65536;
  }

  // The rows' sums, and from them the operand.
  __device__ __forceinline__ void spread() {
    int both = sum_of_row(both_), sums[2] = {int(int16_t(both)), (both - int16_t(both)) >> 16};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // an eighth of a quarter, and up to 7 more, is a byte
      int inside = min(max(sums[h], -32 * 127), 32 * 120);
      beyond_[h] = inside - sums[h];
      // Lane t takes a quarter, rounded down after t is added, so that the four make up the sum.
      // Each of its eight bytes has an eighth of that, rounded down, and one of them the rest.
      int quarter = (inside + int(threadIdx.x % 4)) >> 2, eighth = quarter >> 3;
      operand[h] = __byte_perm(eighth, eighth + (quarter & 7), 0x0004);
      operand[h + 2] = __byte_perm(eighth, 0, 0);
    }
    any_beyond_ = __any_sync(0xffffffffu, beyond_[0] | beyond_[1]);
  }

  // Called after the products have ended. `zeros` has the zero point of a row of x every 16 bytes.
  __device__ __forceinline__ void subtract(uint8_t const* zeros,
                                           uint32_t (&integers)[C::kSums]) const {
    if (__builtin_expect(!any_beyond_, 1)) return;
#pragma unroll
    for (int j = 0; j < C::kBlockM / 8; ++j) {
      int coord = 8 * j + threadIdx.x % 4 * 2;
      char2 two = make_char2(zeros[coord * 16], zeros[(coord + 1) * 16]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        integers[4 * j + e] -= uint32_t((e % 2 ? two.y : two.x) * beyond_[e / 2]);
    }
  }

 private:
  int both_, beyond_[2];
  bool any_beyond_;
};

// A stage that compensates a window of tiles: products of 16-bit floats, whose weights are loaded
// as operands, promoted like others.
template <class C>
__device__ __forceinline__ void compensate(int window, RawWeights<C>& raw, uint8_t* stages,
                                           hopper::Ring<C::kStages>& ring,
                                           hopper::Barriers<C>& barriers, hopper::Params const& p,
                                           hopper::ThreadCoord<C> const& coord, bool is_last,
                                           uint32_t (&integers)[C::kSums],
                                           float (&sums)[C::kSums]) {
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
  XRowFactors<C> x_row_scales(cute::cast_smem_ptr_to_uint(stage) + coord.x_row_factors);
  cute::warpgroup_wait<0>();
  fence_registers(products);
  if (!is_last) raw.load_words(next, coord);
#pragma unroll
  for (int j = 0; j < C::kBlockM / 8; ++j) {
    if (j % 2 == 0) x_row_scales.load(j / 2 + x_row_scales.kAhead);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& sum = sums[4 * j + e];
      sum = fmaf(products[4 * j + e] * scale[e / 2],
                 x_row_scales.sixteens[j / 2][j % 2 * 2 + e % 2], sum);
    }
  }
  if (coord.lane < C::kCluster) ClusterBarrier::arrive(empty, coord.lane, true);
}

// For one zero point a row of x: subtracts it times the sum of all of a row's weights. `zeros` is
// shared memory for a warpgroup's rows of x, which nothing waits for.
template <class C>
__device__ __forceinline__ void compensate_rows(float (&sums)[C::kSums], float* zeros,
                                                hopper::Params const& p,
                                                hopper::ThreadCoord<C> const& coord, int row0,
                                                int m0) {
  int const position = row0 + coord.warpgroup * kRowsPerPanel + coord.lane / 4 * 8 + coord.warp * 2;
  float2 rows = {};
  if (position < p.n_pad)
    rows = __ldg(reinterpret_cast<float2 const*>(p.weight.total_colsum + position));
#pragma unroll
  for (int x_row = coord.warp * 32 + coord.lane; x_row < C::kBlockM; x_row += 128)
    zeros[x_row] = float(__ldg(p.x.zeros + min(m0 + x_row, p.x.stride - 1)));
  cutlass::arch::NamedBarrier::sync(128, 1 + coord.warpgroup);
#pragma unroll
  for (int i = 0; i < C::kSums; ++i) {
    sums[i] =
        fmaf(-zeros[i / 4 * 8 + coord.lane % 4 * 2 + i % 2], i % 4 / 2 ? rows.y : rows.x, sums[i]);
  }
  cutlass::arch::NamedBarrier::sync(128, 1 + coord.warpgroup);
}

}  // namespace
}  // namespace cutlass_ops
