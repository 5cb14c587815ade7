// fp16 or bf16 activations x int4 or int8 weights on mma.sync m16n8k16: the portable kernel for
// W4A16 and W8A16, sm_80 and later.
//
// A CTA computes 128 output features x kBlockM. Weights, activations, scales and zero points of a K
// tile of 128 columns go through a ring of stages in shared memory (cp.async). A scale block is 128
// columns, or 32 where groups are shorter. Groups of 16 have scale blocks of 16, whose scales, zero
// points and offsets come from global memory, since a stage has no room for them. Per scale block:
//
//   load     weights: one 16-byte load a lane and unit (layout.h); activations: ldmatrix from rows
//            swizzled by x_row % 8
//   decode   int4 or int8 -> code minus zero point, an integer that fp16 and bf16 hold exactly; or
//            a code book's value, looked up
//   multiply fp32 sums of exact products
//   promote  sum = fma(block's sum, weight scale, sum): the scale never rounds a weight, and costs
//            one FFMA an output and scale block
//
// A real offset o adds o * sum x. The tensor cores compute sum x, too, by an mma whose operand A is
// x and whose operand B is all ones. (The registers of two B fragments of x, in another order, are
// one A fragment.)
#include "device/launch.cuh"
#include "device/tile.cuh"
#include "dispatch/ctas.h"
#include "dispatch/problem.h"
#include "formats/decode.cuh"
#include "formats/formats.h"

#pragma nv_diag_suppress 177  // not every kernel reads every member of its Config

namespace cutlass_ops {
namespace {

// kGeneral: steps of 32 columns, offsets. Without it: steps of 128 columns, with or without zero
// points. kStages_: 0 for the table's.
template <class Element_, class Format, int kBlockM, bool kGeneral_, int kStages_ = 0>
struct Config : BlockTile<kBlockM> {
  using Tile = BlockTile<kBlockM>;
  using Element = Element_;
  static constexpr bool kHasCodebook = Format::kTableBytes > 0;
  using Decode = typename Format::template Decoder<Element>;
  static constexpr Operand kOperand =
      std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr int kBits = Format::kBits;
  static constexpr int kUnits = kBits / 2;  // of a row block and tile of K (layout.h)
  static constexpr bool kGeneral = kGeneral_;
  // 64 rows take all registers.
  static constexpr bool kGroupsOf16 = kGeneral && kBlockM <= kMmaRowsOfGroupsOf16;
  static constexpr int kPieces = kKPerTile / 16;
  static constexpr int kRecordPieces = unit_k(kBits) / 16;  // in a lane's 16 bytes
  // of 16 columns
  static constexpr int kStepPieces = kGeneral ? 2 : kPieces;
  // multiply_tile_ahead
  static constexpr bool kAhead = kBlockM == 64 && !kGeneral;
  static constexpr int kStages =
      kStages_ ? kStages_ : mma_gemm_a16_stages(kBits, kBlockM, kGeneral, Format::kTableBytes);
  // The next tile is needed soon, or the multiplication takes all registers.
  static constexpr bool kCopiesFirst = kStages == 2 || (kGeneral && kBlockM == 32);
  // For sm_90 ptxas puts three dummy loads before each run of copies that follows an ldmatrix, so
  // longer runs have fewer of them. Measured.
  static constexpr int kCopiesAtOnce =
      kAhead || (kBlockM == 16 && !kGeneral && ByWidth<bool>(false, true)[kBits]) ? 3 : 1;
  static constexpr int kMinBlocks =
      kGeneral && kBlockM == 16 ? 2 : mma_gemm_a16_tile(kBits, kBlockM).min_ctas_per_sm;
  static constexpr int kRowBytes = kKPerTile * 2;  // of a row of x

  static constexpr MmaA16Cta kCta{kBits, kBlockM, kGeneral, Format::kTableBytes, kStages};
  static constexpr int kGroups = kCta.groups;
  static constexpr int kWeights = 0, kActivations = kCta.activations, kScales = kCta.scales,
                       kZeros = kCta.zeros, kOffsets = kCta.offsets;
  static constexpr int kStageBytes = kCta.stage_bytes, kTable = kCta.table,
                       kSharedBytes = kCta.shared_bytes;
  static_assert(kStageBytes % 128 == 0, "ldmatrix rows and their swizzle start on 128 bytes");
  static_assert(kSharedBytes <= mma_gemm_a16_tile(kBits, kBlockM).shared_bytes,
                "its tile promises less shared memory");
  static_assert(kGroups * Tile::kRows / 4 <= Tile::kThreads,
                "a thread copies one 16-byte piece of a vector's fp32 rows");
};

struct Params : TileParams {
  uint16_t const* x;
  int64_t x_stride;
  bool vector_loads;  // rows of x start on 16 bytes, K is a multiple of 8, and no permutation
  bool whole_copies;  // and K is one of a tile's columns
};

// The copies of a thread for every tile.
template <class C>
struct Copies {
  static constexpr int kVectors = C::kGeneral && !C::kHasCodebook ? 3 : 1;
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
        activations(shared_address(shared) + C::kActivations, p.x, p.x_stride * 2, origin, p.groups,
                    k_tile),
        m0(origin.m0) {
    PackedWeight const& w = p.weight;
    int i = threadIdx.x, n0 = origin.n0;
    uint32_t base = shared_address(shared);
    vectors[0] = VectorCopy(i, w.scales, p.weight_rows, p.log_scale_bytes, C::kRows, n0, p.n_pad,
                            base + C::kScales);
    if constexpr (kVectors == 3) {
      vectors[1] =
          VectorCopy(i, w.zeros, p.weight_rows, 0, C::kRows, n0, p.n_pad, base + C::kZeros);
      vectors[2] = VectorCopy(i, w.offsets, p.weight_rows, p.log_offset_bytes, C::kRows, n0,
                              p.n_pad, base + C::kOffsets);
    } else if constexpr (!C::kHasCodebook) {
      vectors[0].take(VectorCopy(i - C::kRows / 4, w.zeros, p.weight_rows, 0, C::kRows, n0, p.n_pad,
                                 base + C::kZeros));
    }
  }

  // `stage`: bytes from the first.
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

  // Copies rows of x that cannot be copied 16 bytes at a time, the tile in which K ends (columns
  // beyond K are zeros), and the pixels of an image.
  __device__ __forceinline__ bool special(int stage, int k_tile) const {
    if (p.whole_copies) return false;
    if (p.image.columns) {
      activations.copy_pixels(stage, p.image, k_tile, p.x, p.x_stride * 2, p.image.channels * 2,
                              m0);
      return true;
    }
    int first = k_tile * kKPerTile;
    if (p.vector_loads && first + kKPerTile <= p.weight.k) return false;
    if (p.vector_loads) {
#pragma unroll
      for (int i = 0; i < activations.kPieces; ++i)
        activations(stage, i, true, first + activations.piece(i) * 8 < p.weight.k);
      return true;
    }
#pragma unroll 1
    for (int i = 0; i < activations.kPieces; ++i) {
      int x_row = m0 + activations.first_x_row() + i / activations.kTurns * activations.kRowsAtOnce;
      if (x_row >= p.epilogue.m) break;
      uint16_t const* values = p.x + x_row * p.x_stride;
      int k = first + activations.piece(i) * 8;
      uint8_t* to = shared + (activations.place(i) - shared_address(shared)) + stage;
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        bool inside = k + j < p.weight.k;
        int column = inside && p.weight.perm ? p.weight.perm[k + j] : k + j;
        *reinterpret_cast<uint16_t*>(to + 2 * j) = inside ? values[column] : uint16_t(0);
      }
    }
    return true;
  }
};

// Scales, in the decoder's units, and zero points of a step's rows.
template <class C>
struct StepRows {
  float scales[4], offsets[4];
  decode::RowConstants zeros[C::kRowBlocks];

  template <class Index>
  __device__ __forceinline__ StepRows(Params const& p, GroupRows<Index> const& from) : offsets() {
    int codes[4];
    if constexpr (!C::kHasCodebook) {
      load_zeros(from.zeros, p.weight.zeros, from.index, codes);
#pragma unroll
      for (int rb = 0; rb < C::kRowBlocks; ++rb)
        zeros[rb] = C::Decode::zero_constants(codes[2 * rb], codes[2 * rb + 1]);
    }
    load_float4(from.scales, p.weight.scale_type, from.index, scales);
    decode::remove_unit<typename C::Decode>(scales);
    if (C::kGeneral && p.weight.offsets)
      load_float4(from.offsets, p.weight.offset_type, from.index, offsets);
  }
};

// The sums of a step over two blocks of 8 rows of x.
template <class C>
struct PairSums {
  float main[2][C::kRowBlocks][4];
  float x_rows[4];  // sum x of rows of x g in registers 0 and 2
};

// Fold them into the total.
template <class C, bool kOffsets>
__device__ __forceinline__ void promote(ThreadCoord<C> const& coord, int pair,
                                        StepRows<C> const& rows, PairSums<C> const& step,
                                        typename C::Sums& sums) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float x[2] = {};
    if constexpr (kOffsets) {
#pragma unroll
      for (int e = 0; e < 2; ++e) x[e] = __shfl_sync(~0u, step.x_rows[2 * j], 8 * coord.t + 4 * e);
    }
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums[rb][pair * 2 + j][e];
        sum = fmaf(step.main[j][rb][e], rows.scales[2 * rb + e / 2], sum);
        if (kOffsets) sum = fmaf(rows.offsets[2 * rb + e / 2], x[e % 2], sum);
      }
  }
}

// One step: its kPieces k-slices (16 columns) begin with the tile's k-slice `first`.
template <class C, bool kOffsets, int kPieces, class IssueCopies>
__device__ __forceinline__ void add_step(uint8_t const* stage, uint8_t const* table,
                                         Params const& p, ThreadCoord<C> const& coord,
                                         StepRows<C> const& rows, int first, typename C::Sums& sums,
                                         IssueCopies issue_copies) {
  using Decode = typename C::Decode;
  constexpr int kPairs = C::kMBlocks / 2;
  // Long steps multiply all rows of x by one k-slice after another. In short ones promotion weighs
  // more: 16 rows of x are multiplied by all k-slices while the 16 before are promoted.
  constexpr int kBatch = C::kGeneral ? 1 : kPairs, kSets = kBatch < kPairs ? 2 * kBatch : kPairs;
  constexpr int kRecordPieces = C::kRecordPieces;

  PairSums<C> step[kSets];
  uint32_t a[kPieces][C::kRowBlocks][4];
  uint4 records[C::kRowBlocks];
  auto load_weights = [&](int i) {
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb) {
      int piece = first + i;
      uint8_t const* unit = stage + C::kWeights + coord.weights +
                            (rb * C::kUnits + piece / kRecordPieces) * kUnitBytes;
      if (kPieces > 1 && i % kRecordPieces == 0)
        records[rb] = *reinterpret_cast<uint4 const*>(unit);
      uint32_t const words[4] = {records[rb].x, records[rb].y, records[rb].z, records[rb].w};
      auto const* const record = kPieces > 1 ? words : reinterpret_cast<uint32_t const*>(unit);
      Words<C> const from(record, piece % kRecordPieces);
      if constexpr (C::kHasCodebook) {
        Decode::fragment(from.words, table, threadIdx.x % 32, a[i][rb]);
      } else {
        Decode::fragment(from.words, rows.zeros[rb], a[i][rb]);
      }
    }
  };
  auto promote_batch = [&](int begin) {
#pragma unroll
    for (int pair = begin; pair < begin + kBatch; ++pair)
      promote<C, kOffsets>(coord, pair, rows, step[pair % kSets], sums);
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
            multiply_add<C::kOperand>(d.main[j][rb], a[i][rb], b[2 * j], b[2 * j + 1], i == 0,
                                      0.0f);
        if constexpr (kOffsets) {
          constexpr uint32_t kOnes = C::kOperand == Operand::kHalf ? 0x3c003c00u : 0x3f803f80u;
          uint32_t const both[4] = {b[0], b[2], b[1], b[3]};
          multiply_add<C::kOperand>(d.x_rows, both, kOnes, kOnes, i == 0, 0.0f);
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
__device__ __forceinline__ void compute(uint8_t const* stage, uint8_t const* table, Params const& p,
                                        ThreadCoord<C> const& coord, int k_tile,
                                        typename C::Sums& sums, IssueCopies issue_copies) {
  bool const offsets = C::kGeneral && !C::kHasCodebook && p.weight.offsets;
  if (C::kGroupsOf16 && p.weight_rows.count > kStagedGroups) {
    GlobalTile const tile(k_tile);
    issue_all<C>(issue_copies);
#pragma unroll 1
    for (int piece = 0; piece < C::kPieces; ++piece) {
      StepRows<C> const rows(p, global_rows(tile, p, piece, coord.group_index));
      if (offsets) {
        add_step<C, C::kGeneral, 1>(stage, table, p, coord, rows, piece, sums, [](int) {});
      } else {
        add_step<C, false, 1>(stage, table, p, coord, rows, piece, sums, [](int) {});
      }
    }
    return;
  }
#pragma unroll
  for (int first = 0; first < C::kPieces; first += C::kStepPieces) {
    int const group = C::kGeneral ? first * p.weight_rows.count / C::kPieces : 0;
    StepRows<C> const rows(p, staged_rows<C>(stage, group, coord.group_index));
    if (offsets) {
      add_step<C, C::kGeneral, C::kStepPieces>(stage, table, p, coord, rows, first, sums,
                                               issue_copies);
    } else {
      add_step<C, false, C::kStepPieces>(stage, table, p, coord, rows, first, sums, issue_copies);
    }
  }
}

// Four neighbouring values of a group vector in shared memory, as they stand: 8
// bytes, or 16 of fp32.
struct RawFour {
  uint32_t words[4];
};

__device__ __forceinline__ RawFour load_raw_four(uint8_t const* vector, bool wide, int index) {
  RawFour raw;
  asm volatile(
      "{\n"
      " .reg .pred wide;\n"
      " setp.ne.b32 wide, %5, 0;\n"
      " @wide ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      " @!wide ld.shared.v2.b32 {%0, %1}, [%4];\n"
      "}"
      : "=r"(raw.words[0]), "=r"(raw.words[1]), "=r"(raw.words[2]), "=r"(raw.words[3])
      : "r"(shared_address(vector) + (index << (wide ? 2 : 1))), "r"(int(wide)));
  return raw;
}

// The main loop of multiply_tile for steps of a whole tile with all rows of x at once, where
// registers allow software pipelining: while the MMAs of one k-slice run, the operands of the next
// one are loaded and decoded, also across tiles.
template <class C>
__device__ __forceinline__ void multiply_tile_ahead(Params const& p, uint8_t* shared) {
  using Decode = typename C::Decode;
  constexpr int kPieces = C::kPieces, kPairs = C::kMBlocks / 2, kLast = kPieces - 1;
  constexpr int kRecordPieces = C::kRecordPieces;
  constexpr int kAll = Copies<C>::kAll;
  static_assert((kAll - 1) / C::kCopiesAtOnce + 1 < kLast,
                "all copies of a stage are issued before they are committed");
  if (has_no_tile(p)) return;
  TileOrigin const origin(C(), p);
  if (threadIdx.x == 0) stored_origin() = origin;
  KRange range(p.k_tiles, blockIdx.y, p.splits);
  ThreadCoord<C> coord(threadIdx.x);
  Copies<C> copies(p, shared, origin, range.first);
  fill_first_stages<C>(copies, range, [] {});

  typename C::Sums sums = {};
  uint32_t a[2][C::kRowBlocks][4], b[kPairs][4];
  uint4 records[C::kRowBlocks];
  decode::RowConstants zeros[C::kRowBlocks];
  auto load_records = [&](uint8_t const* stage, int piece) {
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb)
      records[rb] =
          *reinterpret_cast<uint4 const*>(stage + C::kWeights + coord.weights +
                                          (rb * C::kUnits + piece / kRecordPieces) * kUnitBytes);
  };
  auto load_row_zeros = [&](uint8_t const* stage) {
    int codes[4];
    load_zeros(stage + C::kZeros, p.weight.zeros, coord.group_index, codes);
#pragma unroll
    for (int rb = 0; rb < C::kRowBlocks; ++rb)
      zeros[rb] = Decode::zero_constants(codes[2 * rb], codes[2 * rb + 1]);
  };
  auto decode_piece = [&](int piece, int rb) {
    uint32_t const words[4] = {records[rb].x, records[rb].y, records[rb].z, records[rb].w};
    Words<C> const from(words, piece % kRecordPieces);
    Decode::fragment(from.words, zeros[rb], a[piece % 2][rb]);
  };

  bool const wide = p.weight.scale_type == DataType::kFloat32,
             half = p.weight.scale_type == DataType::kFloat16;

  int now = 0, next = (C::kStages - 1) * C::kStageBytes;  // the stages to compute from and to fill
  wait_copies<C::kStages - 2>();
  __syncthreads();
  load_records(shared, 0);
  load_row_zeros(shared);
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair)
    load_x_rows<C>(shared + C::kActivations, coord, pair, 0, b[pair]);
#pragma unroll
  for (int rb = 0; rb < C::kRowBlocks; ++rb) decode_piece(0, rb);

#pragma unroll 1
  for (int i = 0; i < range.count; ++i) {
    int ahead = i + C::kStages - 1,
        after = now == (C::kStages - 1) * C::kStageBytes ? 0 : now + C::kStageBytes;
    bool wanted = ahead < range.count,
         x_rows_wanted = wanted && !copies.special(next, range.first + ahead);
    RawFour raw_scales;
    float scales[4];
    typename C::Sums step;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      uint8_t const* stage = shared + (piece == kLast ? after : now);  // of the piece that follows
      int following = (piece + 1) % kPieces;
      if (piece == kLast) {
        commit_copies();
        wait_copies<C::kStages - 2>();
        __syncthreads();
        if (p.weight.zeros) load_row_zeros(stage);
        // The branch costs least next to the barrier.
        if (half) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            scales[e] = unpack_half<__half>(raw_scales.words[e / 2], e % 2);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            scales[e] = wide ? __uint_as_float(raw_scales.words[e])
                             : unpack_half<__nv_bfloat16>(raw_scales.words[e / 2], e % 2);
        }
        decode::remove_unit<Decode>(scales);
      }
      if (following % kRecordPieces == 0) load_records(stage, following);
      if (piece == kLast - 2)
        raw_scales = load_raw_four(stage + C::kScales, wide, coord.group_index);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int rb = 0; rb < C::kRowBlocks; ++rb)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            multiply_add<C::kOperand>(step[rb][pair * 2 + j], a[piece % 2][rb], b[pair][2 * j],
                                      b[pair][2 * j + 1], piece == 0, 0.0f);
        load_x_rows<C>(stage + C::kActivations, coord, pair, following, b[pair]);
        if (pair >= kPairs - C::kRowBlocks) decode_piece(following, pair - kPairs + C::kRowBlocks);
      }
#pragma unroll
      for (int j = 0; j < kAll; ++j)
        if (j / C::kCopiesAtOnce + 1 == piece)
          copies(next, range.first + ahead, j, wanted, x_rows_wanted);
    }
#pragma unroll
    for (int tb = 0; tb < C::kMBlocks; ++tb)
#pragma unroll
      for (int rb = 0; rb < C::kRowBlocks; ++rb)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sums[rb][tb][e] = fmaf(step[rb][tb][e], scales[2 * rb + e / 2], sums[rb][tb][e]);
    copies.weights.next(), copies.activations.next();
    next = now;
    now = after;
  }
  wait_copies<0>();
  store_tile<C>(p, sums, shared);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    mma_gemm_a16(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) uint8_t shared[];
  if constexpr (C::kAhead) {
    multiply_tile_ahead<C>(p, shared);
  } else {
    auto prepare = [&] {
      if constexpr (C::kHasCodebook)
        decode::Int4Codebook::fill<typename C::Element>(shared + C::kTable, p.weight.codebook,
                                                        threadIdx.x, C::kThreads);
    };
    int k_tile = KRange(p.k_tiles, blockIdx.y, p.splits).first;
    multiply_tile<C, Copies<C>>(p, shared, prepare,
                                [&](uint8_t const* stage, ThreadCoord<C> const& coord,
                                    typename C::Sums& sums, auto issue_copies) {
                                  compute<C>(stage, shared + C::kTable, p, coord, k_tile++, sums,
                                             issue_copies);
                                });
  }
}

// Rows of x of experts start on 16 bytes.
bool loads_vectors(GroupedGemm const&) { return true; }
bool loads_vectors(GemmProblem const& problem) {
  return reinterpret_cast<uintptr_t>(problem.x) % 16 == 0 && problem.x_stride % 8 == 0 &&
         problem.weight.k % 8 == 0 && !problem.weight.perm;
}

// Problem: GemmProblem or GroupedGemm.
template <class C, class Problem>
Status launch_config(Problem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  TileParams const tile(problem, plan, splitk_workspace, C::kRows, C::kBlockM);
  bool const vector_loads = loads_vectors(problem),
             whole_copies = vector_loads && tile.weight.k % kKPerTile == 0 && !tile.image.columns;
  Params const p{tile, static_cast<uint16_t const*>(problem.x), problem.x_stride, vector_loads,
                 whole_copies};
  return launch_plan(mma_gemm_a16<C>, plan, C::kThreads, C::kSharedBytes, stream, p);
}

template <class Element, class Format, int kBlockM, class Problem>
Status launch_groups(Problem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  PackedWeight const& w = problem.weight;
  if constexpr (Format::kIntegers) {
    if (!w.offsets && !has_short_groups(w)) {
      if constexpr (mma_gemm_a16_may_have_two_stages(Format::kBits, kBlockM, false)) {
        if (plan.stages == 2)
          return launch_config<Config<Element, Format, kBlockM, false, 2>>(
              problem, plan, splitk_workspace, stream);
      }
      return launch_config<Config<Element, Format, kBlockM, false>>(problem, plan, splitk_workspace,
                                                                    stream);
    }
  }
  return launch_config<Config<Element, Format, kBlockM, true>>(problem, plan, splitk_workspace,
                                                               stream);
}

template <class Element, class Problem>
Status launch_element(Problem const& problem, Plan const& plan, float* splitk_workspace,
                      Stream stream) {
  return visit(problem.weight.format, [&](auto format) {
    return launch_height<16, 32, 64>(plan, plan.block_m, [&](auto height) {
      return launch_groups<Element, decltype(format), height()>(problem, plan, splitk_workspace,
                                                                stream);
    });
  });
}

template <class Problem>
Status launch_problem(Problem const& problem, Plan const& plan, float* splitk_workspace,
                      Stream stream) {
  return problem.x_type == DataType::kFloat16
             ? launch_element<__half>(problem, plan, splitk_workspace, stream)
             : launch_element<__nv_bfloat16>(problem, plan, splitk_workspace, stream);
}

}  // namespace

Status launch_mma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                           Stream stream) {
  return launch_problem(problem, plan, splitk_workspace, stream);
}

Status launch_grouped_mma_gemm_a16(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return launch_problem(problem, plan, nullptr, stream);
}

}  // namespace cutlass_ops
