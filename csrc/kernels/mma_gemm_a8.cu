// int8 activations x int4 or int8 weights on mma.sync m16n8k32: the portable kernel for W8A8 and
// W4A8, sm_80 and later.
//
// A CTA computes 128 output features x kBlockM. Weights, activations, scales and zero points of a K
// tile of 128 columns go through a ring of stages in shared memory (cp.async). A scale block is 128
// columns, or 64 or 32 where groups are that short. A group of 16 is a scale block of 32 columns of
// which half are zeros; its scale, zero point and offset come from global memory, since a stage has
// no room for them. Per scale block:
//
//   load     weights: one 16-byte load a lane and unit (layout.h); activations: ldmatrix from rows
//            swizzled by x_row % 8
//   decode   int4 -> int8 in registers, minus the zero point
//   multiply exact int32 sums, which never leave registers
//   promote  sum = fma(float(I), activation scale * weight scale, sum)
//
// Integers become floats by a magic number: the sums of a scale block start at the bits of 1.5 *
// 2^23, whose unit in the last place is 1, so that for |I| < 2^22 the sum's bits are those of the
// float 1.5 * 2^23 + I, and one exact subtraction leaves I. It costs nothing, as the first
// instruction of a scale block adds those constant registers instead of zeros. |I| is at most 255 *
// 128 * 128, except with zero points of 8 bits, where kMagic is false.
//
// Asymmetric terms. With centred codes c, their zero point zc, activation codes q and their zero
// point za, the sum over a scale block is
//   I = sum (q - za)(c - zc)
//     = sum q (c - zc) - za * sum (c - zc)     2, 4 bit: the decoder makes c - zc
//     = sum q c - za * sum c - zc * Q          8 bit: c - zc would not fit; Q = sum q - width * za
// and a real offset o adds o * scale_a * Q. The tensor cores compute both sums by an mma whose
// operand B is all ones. For sum c operand A is the weight, so that a thread gets the sums of the
// rows whose outputs it holds. For sum q operand A is x: the registers of two B fragments of x, in
// another order, are one A fragment. Columns beyond K hold activations equal to za, so they add (za
// - za)(c - zc) = 0, whatever the weights' padding is.
#include "device/launch.cuh"
#include "device/tile.cuh"
#include "dispatch/ctas.h"
#include "formats/decode.cuh"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

// kSymmetric:  steps of 128 columns, no zero points.
// kZeroPoints: steps of 128 columns, zero points of the activations and of 2- and 4-bit weights.
// kGeneral64:  steps of 64 columns, everything.
// kGeneral32:  steps of 32 columns, everything.
enum class Form { kSymmetric, kZeroPoints, kGeneral64, kGeneral32 };

constexpr float kMagicNumber = 0x1.8p23f;
constexpr uint32_t kMagicBits = 0x4b400000u;

template <class Format, int kBlockM, Form kForm_>
struct Config : BlockTile<kBlockM> {
  using Tile = BlockTile<kBlockM>;
  static constexpr int kBits = Format::kBits;
  static constexpr int kUnits = kBits / 2;  // of a row block and tile of K (layout.h)
  static constexpr int kRowBytes = kKPerTile;
  static constexpr Form kForm = kForm_;
  static constexpr bool kGeneral = kForm == Form::kGeneral64 || kForm == Form::kGeneral32;
  static constexpr int kPieces = kKPerTile / 32;
  static constexpr int kRecordPieces = unit_k(kBits) / 32;  // in a lane's 16 bytes
  // K-slices (32 columns) of a step.
  static constexpr int kStepPieces = kForm == Form::kGeneral32   ? 1
                                     : kForm == Form::kGeneral64 ? 2
                                                                 : kPieces;
  // Zero points are subtracted from codes, or their contribution from sums: this may exceed the
  // magic number's range.
  static constexpr bool kZerosFitInt8 = Format::kZerosFitInt8;
  static constexpr bool kMinusZero = kForm != Form::kSymmetric && kZerosFitInt8;
  static constexpr bool kMagic = !kGeneral || kZerosFitInt8;
  using Decode = typename Format::template Int8Decoder<kMinusZero>;
  static constexpr int kStages = mma_gemm_a8_tile(kBits, kBlockM).stages;
  static constexpr int kMinBlocks =
      kForm == Form::kSymmetric ? mma_gemm_a8_tile(kBits, kBlockM).min_ctas_per_sm : 2;
  static constexpr int kCopiesAtOnce = 1;
  // Whether x may be an image, and groups of 16: 64 rows take all registers.
  static constexpr bool kImages = kBlockM <= 32,
                        kGroupsOf16 = kForm == Form::kGeneral32 && kBlockM <= kMmaRowsOfGroupsOf16;
  // the multiplication takes all registers
  static constexpr bool kCopiesFirst = kForm == Form::kZeroPoints && kBlockM == 64;

  static constexpr MmaA8Cta kCta{kBits, kBlockM, kForm != Form::kSymmetric, kGeneral, kStages};
  static constexpr int kSteps = kCta.steps;
  static constexpr int kWeights = 0, kActivations = kCta.activations,
                       kActivationScales = kCta.activation_scales, kScales = kCta.scales,
                       kZeros = kCta.zeros, kActivationZeros = kCta.activation_zeros,
                       kOffsets = kCta.offsets;
  static constexpr int kStageBytes = kCta.stage_bytes, kSharedBytes = kCta.shared_bytes;
  static_assert(kSharedBytes <= mma_gemm_a8_tile(kBits, kBlockM).shared_bytes,
                "its tile promises less shared memory");
  static_assert(kSteps * Tile::kRows / 4 <= Tile::kThreads,
                "a thread copies one 16-byte piece of a vector's fp32 rows");
};

struct Params : TileParams {
  QuantizedActivations x;
  VectorRows activation_rows;
};

// The copies of a thread for every tile.
template <class C>
struct Copies {
  static constexpr int kVectors = C::kGeneral ? 3 : 1;
  static constexpr int kAll = WeightCopy<C>::kPieces + XRowCopy<C>::kPieces + kVectors;
  Params const& p;
  uint8_t* shared;
  WeightCopy<C> weights;
  XRowCopy<C> activations;
  VectorCopy vectors[kVectors];
  int m0;

  __device__ __forceinline__ Copies(Params const& p_, uint8_t* shared_, TileOrigin const& origin,
                                    int k_tile)
      : p(p_),
        shared(shared_),
        weights(shared_address(shared) + C::kWeights, p.weight.codes, origin.n0, p.n_pad, p.k_tiles,
                k_tile),
        activations(shared_address(shared) + C::kActivations, p.x.codes,
                    int64_t(p.k_tiles) * kKPerTile, origin, p.groups, k_tile),
        m0(origin.m0) {
    PackedWeight const& w = p.weight;
    // Threads from the first on copy vectors of weights, from the last on those of rows of x.
    int i = threadIdx.x, last = C::kThreads - 1 - i, n0 = origin.n0;
    uint32_t base = shared_address(shared);
    vectors[0] = VectorCopy(i, w.scales, p.weight_rows, p.log_scale_bytes, C::kRows, n0, p.n_pad,
                            base + C::kScales);
    if constexpr (C::kGeneral) {
      vectors[1] = VectorCopy(i, w.offsets, p.weight_rows, p.log_offset_bytes, C::kRows, n0,
                              p.n_pad, base + C::kOffsets);
    } else {
      i -= C::kRows / 4;
    }
    VectorCopy& others = vectors[kVectors - 1];
    if constexpr (C::kForm != Form::kSymmetric)
      others.take(
          VectorCopy(i, w.zeros, p.weight_rows, 0, C::kRows, n0, p.n_pad, base + C::kZeros));
    if (C::kImages && p.image.columns) return;  // special() copies what belongs to x
    if constexpr (C::kForm != Form::kSymmetric) {
      constexpr int kScalePieces = C::kSteps * C::kBlockM / 4;
      others.take(VectorCopy(last - kScalePieces, p.x.zeros, p.activation_rows, 0, C::kBlockM, m0,
                             p.x.stride, base + C::kActivationZeros));
    }
    others.take(VectorCopy(last, p.x.scales, p.activation_rows, 2, C::kBlockM, m0, p.x.stride,
                           base + C::kActivationScales));
  }

  __device__ __forceinline__ void operator()(int stage, int k_tile, int i, bool wanted,
                                             bool x_rows_wanted) const {
    if (i < weights.kPieces) {
      weights(stage, i, wanted);
    } else if (i -= weights.kPieces; i < activations.kPieces) {
      activations(stage, i, x_rows_wanted);
    } else {
      VectorCopy const& vector = vectors[i - activations.kPieces];
      vector(stage, vector.row(k_tile), wanted);
    }
  }

  // An image's pixels, and their scales and zero points: zeros where there are none.
  __device__ __forceinline__ bool special(int stage, int k_tile) const {
    if (!C::kImages || p.image.columns == 0) return false;
    activations.copy_pixels(stage, p.image, k_tile, p.x.codes, p.image.columns, p.image.columns,
                            m0);
    TapColumns const tap(p.image, k_tile);
    int const first = p.activation_rows.first(tap.channel / kKPerTile);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.activation_rows.count * C::kBlockM; i += C::kThreads) {
      int const pixel = RowPixel(p.image, m0 + i % C::kBlockM).under(p.image, tap);
      int64_t const from = int64_t(first + i / C::kBlockM) * p.x.stride + max(pixel, 0);
      reinterpret_cast<float*>(shared + stage + C::kActivationScales)[i] =
          pixel < 0 ? 0.0f : __ldg(p.x.scales + from);
      if (C::kForm != Form::kSymmetric && p.x.zeros)
        reinterpret_cast<int8_t*>(shared + stage + C::kActivationZeros)[i] =
            pixel < 0 ? int8_t(0) : __ldg(p.x.zeros + from);
    }
    return true;
  }
};

// Scales and zero points of a step's rows.
template <class C>
struct StepRows {
  float scales[4], offsets[4];
  int zeros[4];
  uint32_t sums[C::kRowBlocks][4];  // of c (4 bit: c - zc); registers 1, 3 repeat 0, 2

  template <class Index>
  __device__ __forceinline__ StepRows(Params const& p, GroupRows<Index> const& from)
      : offsets(), sums() {
    load_float4(from.scales, p.weight.scale_type, from.index, scales);
    load_zeros(from.zeros, (C::kMinusZero || C::kGeneral) && p.weight.zeros, from.index, zeros);
    if (C::kGeneral && p.weight.offsets)
      load_float4(from.offsets, p.weight.offset_type, from.index, offsets);
  }
};

// The scales and zero points of rows of x in a step.
template <class C>
struct XVectors {
  float const* scales;
  int8_t const* zeros;
  int last = C::kBlockM;  // of the rows, of which two are read at a time, the last that there are

  // `block`: row of the stage's vectors.
  __device__ __forceinline__ XVectors(uint8_t const* stage, int block)
      : scales(reinterpret_cast<float const*>(stage + C::kActivationScales) + block * C::kBlockM),
        zeros(reinterpret_cast<int8_t const*>(stage + C::kActivationZeros) + block * C::kBlockM) {}
  // For a block of 16 columns of a tile, in global memory.
  __device__ __forceinline__ XVectors(GlobalTile const& tile, Params const& p, int block)
      : last(p.x.stride - 2 - tile.m0) {
    int64_t const from =
        (int64_t(tile.k_tile) * p.activation_rows.count + block) * p.x.stride + tile.m0;
    scales = p.x.scales + from, zeros = p.x.zeros + from;
  }
};

// The integer sums of a step over two blocks of 8 rows of x.
template <class C>
struct PairSums {
  uint32_t main[2][C::kRowBlocks][4];
  uint32_t x_rows[4];  // sum q of rows of x g in registers 0 and 2
};

// Fold them into the fp32 sums, of kColumns columns.
template <class C, bool kXRowSums, int kColumns>
__device__ __forceinline__ void promote(Params const& p, ThreadCoord<C> const& coord, int pair,
                                        XVectors<C> const& x, StepRows<C> const& rows,
                                        PairSums<C> const& step, typename C::Sums& sums) {
  constexpr float kDecodedScale = 1.0f / C::Decode::kScale;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    int tb = pair * 2 + j, x_row = tb * 8 + 2 * coord.t;
    if (kColumns < 32) x_row = min(x_row, x.last);
    float2 scale_pair = *reinterpret_cast<float2 const*>(x.scales + x_row);
    float const x_row_scale[2] = {scale_pair.x, scale_pair.y};
    int za[2] = {0, 0}, q[2] = {0, 0};
    if (C::kForm != Form::kSymmetric && p.x.zeros) {
      char2 z = *reinterpret_cast<char2 const*>(x.zeros + x_row);
      za[0] = z.x, za[1] = z.y;
    }
    if constexpr (kXRowSums) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        q[e] = __shfl_sync(~0u, int(step.x_rows[2 * j]), 8 * coord.t + 4 * e) - kColumns * za[e];
    }
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int row = 2 * rb + e / 2, integer = int(step.main[j][rb][e]);
        float& sum = sums[rb][tb][e];
        if (C::kForm != Form::kSymmetric) integer -= za[e % 2] * int(rows.sums[rb][e / 2 * 2]);
        if (kXRowSums && !C::kZerosFitInt8) integer -= rows.zeros[row] * q[e % 2];
        float number = C::kMagic ? __int_as_float(integer) - kMagicNumber : float(integer);
        sum = fmaf(number, x_row_scale[e % 2] * (rows.scales[row] * kDecodedScale), sum);
        if (kXRowSums) sum = fmaf(rows.offsets[row], x_row_scale[e % 2] * float(q[e % 2]), sum);
      }
  }
}

// Half of an operand A, of 16 columns; the other half is zeros.
template <int kHalf>
__device__ __forceinline__ void clear_other_half(uint32_t (&a)[4]) {
  a[2 - 2 * kHalf] = a[3 - 2 * kHalf] = 0;
}

// One step: its k-slices (32 columns) begin with the tile's k-slice `first`. kHalf: the 16 columns
// of a single k-slice that are used; -1: all.
template <class C, bool kXRowSums, int kHalf, class IssueCopies>
__device__ __forceinline__ void add_step(uint8_t const* stage, Params const& p,
                                         ThreadCoord<C> const& coord, XVectors<C> const& x,
                                         StepRows<C> rows, int first, typename C::Sums& sums,
                                         IssueCopies issue_copies) {
  constexpr int kPieces = C::kStepPieces, kPairs = C::kMBlocks / 2;
  // Long steps multiply all rows of x by one k-slice after another. In short ones promotion weighs
  // more: 16 rows of x are multiplied by all k-slices while the 16 before are promoted.
  constexpr int kBatch = C::kGeneral ? 1 : kPairs, kSets = kBatch < kPairs ? 2 * kBatch : kPairs;
  constexpr int kRecordPieces = C::kRecordPieces;
  constexpr uint32_t kOnes = 0x01010101u, kInitialSum = C::kMagic ? kMagicBits : 0;
  constexpr int kColumns = kHalf < 0 ? kPieces * 32 : 16;

  PairSums<C> step[kSets];
  uint32_t a[kPieces][C::kRowBlocks][4];
  uint4 records[C::kRowBlocks];
  auto load_weights = [&](int i) {
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb) {
      int piece = first + i;
      uint8_t const* unit = stage + C::kWeights + coord.weights +
                            (rb * C::kUnits + piece / kRecordPieces) * kUnitBytes;
      if (i % kRecordPieces == 0) records[rb] = *reinterpret_cast<uint4 const*>(unit);
      uint32_t const words[4] = {records[rb].x, records[rb].y, records[rb].z, records[rb].w};
      using Decode = typename C::Decode;
      Words<C> const from(words, piece % kRecordPieces);
      if constexpr (C::kMinusZero) {
        auto zero = Decode::zero_constants(rows.zeros[2 * rb], rows.zeros[2 * rb + 1]);
        Decode::fragment(from.words, zero, a[i][rb]);
      } else {
        Decode::fragment(from.words, a[i][rb]);
      }
      if constexpr (kHalf >= 0) clear_other_half<kHalf>(a[i][rb]);
      if (C::kForm != Form::kSymmetric && p.x.zeros) {
        multiply_add<Operand::kInt8>(rows.sums[rb], a[i][rb], kOnes, kOnes, false, 0u);
      }
    }
  };
  auto promote_batch = [&](int begin) {
#pragma unroll
    for (int pair = begin; pair < begin + kBatch; ++pair)
      promote<C, kXRowSums, kColumns>(p, coord, pair, x, rows, step[pair % kSets], sums);
  };

#pragma unroll
  for (int begin = 0; begin < kPairs; begin += kBatch) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (begin == 0) load_weights(i);
#pragma unroll
      for (int pair = begin; pair < begin + kBatch; ++pair) {
        PairSums<C>& d = step[pair % kSets];
        uint32_t b[4];
        load_x_rows<C>(stage + C::kActivations, coord, pair, first + i, b);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int rb = 0; rb < C::kRowBlocks; ++rb)
            multiply_add<Operand::kInt8>(d.main[j][rb], a[i][rb], b[2 * j], b[2 * j + 1], i == 0,
                                         kInitialSum);
        if constexpr (kXRowSums) {
          uint32_t both[4] = {b[0], b[2], b[1], b[3]};
          if constexpr (kHalf >= 0) clear_other_half<kHalf>(both);
          multiply_add<Operand::kInt8>(d.x_rows, both, kOnes, kOnes, i == 0, 0u);
        }
      }
      if (begin == 0) issue_copies(first + i);
    }
    if (begin > 0) promote_batch(begin - kBatch);
  }
  promote_batch(kPairs - kBatch);
}

// One tile of K out of shared memory.
template <class C, class IssueCopies>
__device__ __forceinline__ void compute(uint8_t const* stage, Params const& p,
                                        ThreadCoord<C> const& coord, int k_tile,
                                        typename C::Sums& sums, IssueCopies issue_copies) {
  bool x_sums = C::kGeneral && (p.weight.offsets || (!C::kZerosFitInt8 && p.weight.zeros));
  if constexpr (C::kGroupsOf16) {
    if (p.weight_rows.count > kStagedGroups) {
      GlobalTile const tile(k_tile);
      auto const add_half = [&](auto half, int piece) {
        int const group = 2 * piece + half;
        XVectors<C> const x =
            p.activation_rows.count > 1 ? XVectors<C>(tile, p, group) : XVectors<C>(stage, 0);
        StepRows<C> const rows(p, global_rows(tile, p, group, coord.group_index));
        if (x_sums) {
          add_step<C, true, half>(stage, p, coord, x, rows, piece, sums, [](int) {});
        } else {
          add_step<C, false, half>(stage, p, coord, x, rows, piece, sums, [](int) {});
        }
      };
      issue_all<C>(issue_copies);
      constexpr int kRecordPieces = C::kRecordPieces;
#pragma unroll 1
      for (int record = 0; record < C::kPieces; record += kRecordPieces) {
#pragma unroll
        for (int i = 0; i < kRecordPieces; ++i) {
          add_half(std::integral_constant<int, 0>(), record + i);
          add_half(std::integral_constant<int, 1>(), record + i);
        }
      }
      return;
    }
  }
#pragma unroll
  for (int first = 0; first < C::kPieces; first += C::kStepPieces) {
    int const group = C::kGeneral ? first * p.weight_rows.count / C::kPieces : 0;
    XVectors<C> const x(stage, C::kGeneral && p.activation_rows.count > 1 ? group : 0);
    StepRows<C> const rows(p, staged_rows<C>(stage, group, coord.group_index));
    if (x_sums) {
      add_step<C, C::kGeneral, -1>(stage, p, coord, x, rows, first, sums, issue_copies);
    } else {
      add_step<C, false, -1>(stage, p, coord, x, rows, first, sums, issue_copies);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    mma_gemm_a8(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) uint8_t shared[];
  int k_tile = KRange(p.k_tiles, blockIdx.y, p.splits).first;
  multiply_tile<C, Copies<C>>(
      p, shared, [] {},
      [&](uint8_t const* stage, ThreadCoord<C> const& coord, typename C::Sums& sums,
          auto issue_copies) { compute<C>(stage, p, coord, k_tile++, sums, issue_copies); });
}

// Rows of x of experts are symmetric, in slots.
QuantizedActivations quantized_rows(GroupedGemm const& problem) {
  QuantizedActivations x;
  x.codes = static_cast<int8_t*>(const_cast<void*>(problem.x));
  x.scales = const_cast<float*>(problem.x_scales), x.stride = problem.x_rows;
  x.block = problem.x_codes == ActQuant::kBlock ? kKPerTile : -1;
  return x;
}
QuantizedActivations const& quantized_rows(GemmProblem const& problem) { return problem.quantized; }

// Problem: GemmProblem or GroupedGemm.
template <class C, class Problem>
Status launch_config(Problem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  QuantizedActivations const x = quantized_rows(problem);
  Params const p{TileParams(problem, plan, splitk_workspace, C::kRows, C::kBlockM), x,
                 VectorRows(x.block)};
  return launch_plan(mma_gemm_a8<C>, plan, C::kThreads, C::kSharedBytes, stream, p);
}

template <class Format, int kBlockM, class Problem>
Status launch_form(Problem const& problem, Plan const& plan, float* splitk_workspace,
                   Stream stream) {
  PackedWeight const& w = problem.weight;
  if (w.group_size == 16 || w.group_size == 32)
    return launch_config<Config<Format, kBlockM, Form::kGeneral32>>(problem, plan, splitk_workspace,
                                                                    stream);
  if (w.offsets || w.group_size == 64 || (w.zeros && !Format::kZerosFitInt8)) {
    return launch_config<Config<Format, kBlockM, Form::kGeneral64>>(problem, plan, splitk_workspace,
                                                                    stream);
  }
  return w.zeros || quantized_rows(problem).zeros
             ? launch_config<Config<Format, kBlockM, Form::kZeroPoints>>(problem, plan,
                                                                         splitk_workspace, stream)
             : launch_config<Config<Format, kBlockM, Form::kSymmetric>>(problem, plan,
                                                                        splitk_workspace, stream);
}

template <class Problem>
Status launch_problem(Problem const& problem, Plan const& plan, float* splitk_workspace,
                      Stream stream) {
  return visit_integers(problem.weight.format, [&](auto format) {
    return launch_height<16, 32, 64>(plan, plan.block_m, [&](auto height) {
      return launch_form<decltype(format), height()>(problem, plan, splitk_workspace, stream);
    });
  });
}

}  // namespace

Status launch_mma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                          Stream stream) {
  return launch_problem(problem, plan, splitk_workspace, stream);
}

Status launch_grouped_mma_gemm_a8(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return launch_problem(problem, plan, nullptr, stream);
}

}  // namespace cutlass_ops
