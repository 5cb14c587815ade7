// Configurations, arguments and parts of decode_gemm, and its copies of weights.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "device/even_partition.cuh"
#include "device/hopper.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/quantize.cuh"
#include "device/tile_copies.cuh"
#include "dispatch/checks.h"
#include "dispatch/decode_shape.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "formats/decode.cuh"
#include "formats/formats.h"

// for other GPUs the kernels have no bodies, which read the members of Config
#pragma nv_diag_suppress 177

namespace cutlass_ops {
namespace {

constexpr int kRowBlocks = kRowsPerPanel / 16;

enum class Weights {
  kAny,
  kPlain  // neither zero points nor offsets, and scales of type Element or, where activations are
          // integers, of any type of 16 bits
};

// Exact integers where nothing else needs the sums of x, and for codes that are looked up. With
// zero points or offsets, which need these sums, the biased decoder: it has the fewest
// instructions.
template <class Format, class Element, bool kBiased>
struct DecoderOf {
  using Type = typename Format::template Decoder<Element>;
};
template <class Format, class Element>
struct DecoderOf<Format, Element, true> {
  using Type = typename Format::BiasedDecoder;
};
template <class Format>
constexpr bool bias_fits(bool int8) {
  if constexpr (Format::kIntegers) return Format::kBiasFitsFloats || int8;
  return false;
}

// kBlockM: 8, or 4 with a code book. kShortGroup: 16, 32 or 64 columns where the weight has such
// groups, each of which is a scale block; or 0: a scale block is a piece. kInt8: activations are
// integers with scales. kWeights: a kernel for each kind of weight, since the test for zero points
// and offsets in every scale block takes a sixth of its time (instructions under a false predicate
// are issued, too).
template <class Element_, class Format, int kBlockM_, int kShortGroup_, bool kInt8_, int kWarps_,
          Weights kWeights>
struct Config {
  using Element = Element_;
  static constexpr Operand kOperand =
      std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr int kBits = Format::kBits;
  static constexpr int kBlockM = kBlockM_;
  static constexpr bool kPairs = kBlockM == 4;  // look-ups are operands as they are
  static constexpr int kMBlocks = 1;
  static constexpr int kBlockColumns = kPairs ? 4 : 8;  // rows of x of an operand B
  static constexpr int kSumBlocks = kPairs ? kRowBlocks / 2 : kRowBlocks;
  static constexpr bool kShortGroups = kShortGroup_ > 0;
  static constexpr bool kInt8 = kInt8_;
  static constexpr bool kHasCodebook = Format::kTableBytes > 0;
  static constexpr bool kPlain = kWeights == Weights::kPlain;
  // for zero points and offsets
  static constexpr bool kCompensates = Format::kIntegers && kWeights == Weights::kAny;
  // Whether stage_many() loads a long x.
  static constexpr bool kStagesMany = !kShortGroups && ByWidth<bool>(true, false)[kBits];
  static constexpr DataType kElementType =
      std::is_same_v<Element, __half> ? DataType::kFloat16 : DataType::kBFloat16;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kStages = decode_stages(kHasCodebook);
  static constexpr int kMoreStages = kInt8 ? decode_more_stages(kBits) : 0;
  // Two blocks per SM, one of this launch and one of the next, where 128 registers a thread are
  // enough.
  static constexpr int kMinCtasPerSm = kWarps == 8 && !(kShortGroups && kInt8) ? 2 : 1;

  using Decode = typename DecoderOf<Format, Element,
                                    !kPlain && std::is_same_v<Element, __half> &&
                                        bias_fits<Format>(kInt8)>::Type;

  static_assert(kHasCodebook || !kPairs);

  // Two units of 16-byte loads, or at 2 bits one, which is read twice.
  static constexpr int kPieceColumns = decode_piece_columns(kBits);
  static constexpr int kPieceBytes = (nibble_columns(kBits) == 2 ? 1 : 2) * kUnitBytes;
  // From the unit of a piece's first half of columns to that of its second.
  static constexpr int kSecondHalf = kPieceBytes - kUnitBytes;
  static constexpr int kTilePieces = kKPerTile / kPieceColumns;
  static constexpr int kRowBlockBytes = k_tile_bytes(kBits) / kRowBlocks;
  static constexpr int kStepColumns = kShortGroups ? kShortGroup_ : kPieceColumns;
  static constexpr int kScales = kRowBlocks * kPieceBytes;  // of a stage: behind the codes
};

// Barriers between blocks and for copies: x has arrived; the other blocks' ranges of x have; their
// sums have.
struct Barriers {
  uint64_t x, ranges, sums;
};

// The decoder's unit, and the correction that biased ones require of the caller.
template <class Decode, class = void>
struct CodeBias {
  static constexpr float kCodeBias = 0.0f, kUnit = Decode::kUnit, kUpper = 1.0f;
};
template <class Decode>
struct CodeBias<Decode, std::enable_if_t<(Decode::kCodeBias > 0)>> {
  static constexpr float kCodeBias = Decode::kCodeBias, kUnit = Decode::kUnit,
                         kUpper = Decode::kUpper;
};
enum class Source { kFloats, kBlocks, kBlockM, kCodes };

// a / b and its remainder, for a below 2^31 and quotients below 2^22. The compiler's division takes
// several times as long.
struct Quotient {
  int quotient, remainder;
  __device__ __forceinline__ Quotient(int a, int b) {
    float estimate;
    asm("div.approx.f32 %0, %1, %2;" : "=f"(estimate) : "f"(float(a)), "f"(float(b)));
    quotient = int(estimate), remainder = a - quotient * b;
    if (remainder < 0) --quotient, remainder += b;
    if (remainder >= b) ++quotient, remainder -= b;
  }
};

struct Params {
  PackedWeight weight;
  FloatRows x;
  QuantizedActivations quantized;
  Source source;
  bool symmetric;
  EpilogueParams epilogue;
  VectorRows weight_rows;
  int k_tiles, n_pad, stages, cluster, clusters, log_cluster;
  EvenPartition row_panels, tiles;   // of the clusters, and of a cluster's blocks
  EvenPartition sum_step, end_step;  // from a thread's [row panel][x_row] to its next: row
                                     // panels and rows of x
  int log_scale_bytes, log_offset_bytes;
  DecodeMemory memory;
  bool plain_epilogue;       // sums become outputs of type Element, and no more
  bool vector_x, step_sums;  // rows of x are 16-bit floats to be copied whole; the sums of x over
                             // a step are needed
};

__device__ __forceinline__ void copy_weights(void* shared, void const* source) {
  uint32_t to = cute::cast_smem_ptr_to_uint(shared);
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(source)
               : "memory");
}

// A block's part of the product: row panels of output features x tiles of K.
struct Part {
  int first_row_panel, row_panels, first_tile, tiles;

  __device__ __forceinline__ Part(Params const& p, int cluster_index, int rank)
      : first_row_panel(p.row_panels.first(cluster_index)),
        row_panels(p.row_panels.count(cluster_index)),
        first_tile(p.tiles.first(rank)),
        tiles(p.tiles.count(rank)) {}
};

// A block's pieces, row panel after row panel, in equal runs for its warps: those that share a row
// panel are neighbours.
template <class C>
struct Pieces {
  int count, of_row_panel;
  __device__ __forceinline__ explicit Pieces(Part const& part)
      : count(part.row_panels * part.tiles * C::kTilePieces),
        of_row_panel(part.tiles * C::kTilePieces) {}
  __device__ __forceinline__ int begin(int warp) const {
    return int(uint32_t(count) * uint32_t(warp) / C::kWarps);
  }
  // The warp that has a piece. The CTA must have pieces: where there are fewer row panels than
  // clusters, some CTAs have none.
  __device__ __forceinline__ int warp_of(int piece) const {
    return Quotient((piece + 1) * C::kWarps - 1, count).quotient;
  }
};

// A warp's position among its pieces.
struct TileIterator {
  int row_panel;  // of the block's
  int piece;      // of the row panel's
};

// Copies pieces to the warp's ring.
template <class C>
struct WeightLoader {
  uint8_t const* codes;
  uint8_t* ring;
  TileIterator next;
  int left, row_panel_pieces, first_tile, first_row_panel;
  int stage = 0;  // to fill next, and the oldest that is full

  __device__ __forceinline__ WeightLoader(Params const& p, Part const& part,
                                          Pieces<C> const& pieces, int begin, int end,
                                          uint8_t* ring_)
      : ring(ring_),
        left(end - begin),
        row_panel_pieces(pieces.of_row_panel),
        first_tile(part.first_tile),
        first_row_panel(part.first_row_panel) {
    Quotient position(begin, row_panel_pieces);
    next = {position.quotient, position.remainder};
    find(p);
  }

  // The codes of the piece at `next`.
  __device__ __forceinline__ void find(Params const& p) {
    codes = p.weight.codes +
            (int64_t(first_row_panel + next.row_panel) * p.k_tiles + first_tile +
             next.piece / C::kTilePieces) *
                k_tile_bytes(C::kBits) +
            next.piece % C::kTilePieces * C::kPieceBytes + threadIdx.x % 32 * kLaneBytes;
  }

  // The rows of a group vector that belong to a piece, by 16 bytes a lane. A vector has less than
  // 2^32 bytes (decode_shape).
  __device__ __forceinline__ void vector(Params const& p, uint8_t* to, void const* from, int row,
                                         int rows, int log_bytes) const {
    int log_pieces = 2 + log_bytes,
        row_panel_begin = (first_row_panel + next.row_panel) * kRowsPerPanel;
    auto copy = [&](int i) {
      uint32_t index = uint32_t((row + (i >> log_pieces)) * p.n_pad + row_panel_begin);
      copy_async_16(to + i * 16,
                    static_cast<uint8_t const*>(from) +
                        ((index << log_bytes) + uint32_t(i & ((1 << log_pieces) - 1)) * 16));
    };
    int i = threadIdx.x % 32;
    if constexpr (C::kShortGroups) {
      // of 4 bytes each, or less
      constexpr int kMostPieces = C::kPieceColumns / C::kStepColumns * kRowsPerPanel * 4 / 16;
#pragma unroll
      for (int j = 0; j < kMostPieces; j += 32)
        if (i + j < rows << log_pieces) copy(i + j);
    } else if (i < 4 << log_bytes) {
      copy_async_16(to + i * 16, static_cast<uint8_t const*>(from) +
                                     ((uint32_t(row * p.n_pad + row_panel_begin) << log_bytes) +
                                      uint32_t(i) * 16));
    }
  }

  // Issue the loads of the next piece, if any: half of its codes at a time (two
  // calls), then the rest.
  __device__ __forceinline__ void copy_codes(Params const& p, int half) const {
    // A unit of both halves is replaced when both have been read.
    if (left <= 0 || (C::kSecondHalf == 0 && half == 0)) return;
    uint8_t* to =
        ring + stage * p.memory.stage + half * C::kSecondHalf + threadIdx.x % 32 * kLaneBytes;
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb)
      copy_weights(to + rb * C::kPieceBytes,
                   codes + rb * C::kRowBlockBytes + half * C::kSecondHalf);
  }
  __device__ __forceinline__ void copy_rest(Params const& p) {
    if (left > 0) {
      --left;
      uint8_t* to = ring + stage * p.memory.stage;
      PackedWeight const& w = p.weight;
      int row = p.weight_rows.first(first_tile + next.piece / C::kTilePieces), rows = 1;
      if constexpr (C::kShortGroups) {
        rows = p.weight_rows.count / C::kTilePieces;
        row += next.piece % C::kTilePieces * rows;
      }
      vector(p, to + C::kScales, w.scales, row, rows, C::kPlain ? 1 : p.log_scale_bytes);
      if (C::kCompensates && w.zeros) vector(p, to + p.memory.zeros, w.zeros, row, rows, 0);
      if (C::kCompensates && w.offsets)
        vector(p, to + p.memory.offsets, w.offsets, row, rows, p.log_offset_bytes);
      if (C::kTilePieces == 1) {
        codes += k_tile_bytes(C::kBits);
      } else {
        codes += next.piece % 2 == 0 ? C::kPieceBytes : k_tile_bytes(C::kBits) - C::kPieceBytes;
      }
      if (++next.piece == row_panel_pieces) {
        next.piece = 0, ++next.row_panel;
        find(p);
      }
    }
    commit_copies();
    stage = stage + 1 == (C::kMoreStages ? p.stages : C::kStages) ? 0 : stage + 1;
  }
};

}  // namespace
}  // namespace cutlass_ops
