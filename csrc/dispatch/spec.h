// The description of a kernel for dispatch: the problems it can implement, its tiles and their
// costs, and its launch.
#pragma once

#include <array>
#include <iterator>
#include <string>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "dispatch/checks.h"
#include "formats/width.h"

namespace cutlass_ops {

// The tile of a cluster of CTAs, or of a CTA without a cluster.
struct Tile {
  int block_n;           // output features
  int block_m;           // rows of x
  int stages;            // tiles of K in flight
  int min_ctas_per_sm;   // that the grid is made for
  int shared_bytes;      // shared memory of a CTA, at most
  int cluster_size = 1;  // CTAs
  int ctas_along_m = 1;  // of a cluster; the others are along N
};
// Rows of x of a CTA, and its warpgroups that multiply where a CTA of a cluster has 64
// features for each.
constexpr int cta_block_m(Tile const& tile) { return tile.block_m / tile.ctas_along_m; }
constexpr int warpgroups(Tile const& tile) {
  return tile.block_n * tile.ctas_along_m / (tile.cluster_size * kRowsPerPanel);
}
// A tile of the same CTAs with both CTAs of a cluster along M: half the features, twice the rows of
// x.
constexpr Tile along_m(Tile tile) {
  tile.block_n /= 2, tile.block_m *= 2, tile.ctas_along_m = 2;
  return tile;
}

// The cards that costs were measured on. A device has the costs of the card whose memory bandwidth
// is nearest to its own (card_of() in cost.h).
struct Card {
  char const* name;
  int memory_bandwidth;  // Device::memory_bandwidth
};
constexpr Card kCards[] = {
#include "dispatch/cards.inc"
};
constexpr int kCardCount = int(std::size(kCards));

// Measured times of a tile, in tenths of a microsecond; all 0 for candidates that are chosen by M
// alone. A tile takes `end` and, in proportion to K, one of the other times (cost_kind() in
// cost.h). A time of 0 is that of k4096.
struct TileCost {
  int k4096 = 0;       // K = 4096
  int row_scales = 0;  // int8 x has a scale a row and no zero points, or compensated ones
  int whole_rows = 0;  // int32 sums run over all of K or of a tap (sums_whole_rows(), _taps())
  int wide = 0;        // scales are applied in fp32 (not has_narrow_scales())
  int end = 0;         // whatever K is; twice for a tile of split-K slices
};

// The costs of decode kernels depend on how x is multiplied, and on whether the weight is integers
// in groups of 128 or more (4-bit zero points included), another weight that is rounded to 16 bits,
// or a code book. Wide: scales or offsets are of another type than x.
enum class DecodeKind {
  kFloats,
  kFloatsRounded,
  kFloatsWide,
  kFloatsRoundedWide,
  kCodebook,
  kBlock,
  kBlockRounded,
  kToken,
  kTokenRounded
};
constexpr int kDecodeKinds = 9;

// Measured times of a decode kernel, in nanoseconds.
struct DecodeCost {
  int start = 0;  // of a launch
  int chunk = 0;  // of 64 rows x 128 columns of weights that the busiest CTA has
  int share = 0;  // and that an SM has in the mean
  int x = 0;      // of 4096 columns of x of a CTA
  int row = 0;    // of a row of x
};

// By kCards.
using TileCosts = std::array<TileCost, kCardCount>;

// Rows of x of the kernels for few; of 16-bit x with scales and offsets of its type.
constexpr int kMostDecodeRows = WgmmaDecodeShape::kBlockM,
              kMostFloatDecodeRows = WgmmaDecodeShape::kMoreRows;

// One way in which a kernel may compute a product.
struct Candidate {
  Tile tile;
  int min_m = 0, max_m = kMaxM;  // rows of x that it is for
  TileCosts costs = {};
  bool (*applies)(GemmProblem const& problem) = nullptr;  // null: always
  bool quantizes = false;                                 // it quantises floats itself
  bool compensates = false;   // it compensates zero points of int8 x, or of W, for many blocks,
                              // or a row, at once
  char const* why = nullptr;  // null: the kernel's reason
  // Costs of a decode kernel, by kCards and the width of codes. All 0: it is never chosen, because
  // it was slower wherever it was measured, or was not compiled.
  DecodeCost decode_costs[kCardCount][kWidths][kDecodeKinds] = {};
};

struct Candidates {
  Candidate const* first;
  size_t count;
  Candidate const* begin() const { return first; }
  Candidate const* end() const { return first + count; }
};

// The reason why a kernel cannot implement a problem: a property of the problem or of the GPU.
enum class Field {
  kNone,
  kArchitecture,
  kSharedMemory,
  kRows,
  kBatchInvariant,
  kInt8X,
  kFp32X,
  k16BitX,
  kXLayout,
  kImage,
  kImageGeometry,
  kXZeros,
  kGroups,
  kGroupVectors,
  kFormat,
  kNoCodebook,
  kScaleType,
  kWeightZeros,
  kOffsets,
  kResult,
};

struct KernelSpec {
  char const* name;
  char const* why;
  bool rounds;   // weights to 16 bits
  bool upcasts;  // it takes regular rows of 16-bit floats alone: others, and int8 activations, are
                 // made such before
  bool combines_slices;  // its clusters may take the last split-K slices of several tiles
                         // (hopper::StreamKWork)
  bool gates;            // it can store 16-bit outputs of a gated weight without a residual
  bool decodes;          // for a few rows of x: it cuts K itself, where it does, and no
                         // partial sums leave it
  // kNone, or what forbids it; `device` has the architecture whose kernels are requested.
  Field (*can_implement)(GemmProblem const& problem, Device const& device);
  Candidates (*candidates)(GemmProblem const& problem);
  // The time of a candidate, in eighths of a nanosecond; negative if it does not fit. Null where
  // the first candidate that can implement the problem is chosen.
  int64_t (*cost)(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                  Candidate const& candidate);
  // Fill in the launch of a candidate, whose slices of K the plan has: in a batch-invariant product
  // a decode kernel's clusters share K by these slices. False if it does not fit.
  bool (*shape)(GemmProblem const& problem, Device const& device, Candidate const& candidate,
                Plan* plan);
  // Start it. problem.quantized is filled for int8 kernels, but for those that quantise floats
  // themselves. `splitk_workspace` is null if plan.slices is 1; otherwise it holds
  // plan.slices x [m][n_pad] sums or, with a stream-K tail, part_floats(plan) of them and then
  // flag_count(plan) 64-bit flags.
  Status (*launch)(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                   Stream stream);
  // The kernel that decodes with the same bits, if its clusters share K by this one's slices; or
  // null.
  char const* few_rows = nullptr;
};

struct KernelSpecs {
  KernelSpec const* first;
  size_t count;
  KernelSpec const* begin() const { return first; }
  KernelSpec const* end() const { return first + count; }
};

// All kernels in order of preference: the first that can implement a problem and has a candidate
// that applies is chosen.
KernelSpecs kernel_specs();
KernelSpec const* find_kernel(char const* name);  // null if there is none

// What forbids `spec`, in words with the problem's value ("groups of 32", "architecture 80"); empty
// if nothing does.
std::string forbidden_by(KernelSpec const& spec, GemmProblem const& problem, Device const& device);

// The plan of a given candidate, chosen or not. False if it does not fit.
bool plan_candidate(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                    Candidate const& candidate, Plan* plan);

// The sums of a stream-K tail's split-K slices but the first, and a flag for each
// warp's part of them.
constexpr int64_t part_floats(Plan const& plan) {
  return int64_t(plan.tail_tiles) * (plan.slices - 1) * plan.block_n * plan.block_m;
}
constexpr int64_t flag_count(Plan const& plan) {
  return int64_t(plan.tail_tiles) * (plan.slices - 1) * (plan.block_n * plan.ctas_along_m / 16);
}

// Lays out the workspace; plan->workspace gets its size.
void lay_out_workspace(GemmProblem const& problem, bool upcasts, Plan* plan);
// Chooses when the quantiser, if there is one, lets the product start.
void start_quantizer(GemmProblem const& problem, Plan* plan);

constexpr int kInvariantM = 128;  // rows of x for which a batch-invariant product's kernel and
                                  // slices are chosen, whatever m is

}  // namespace cutlass_ops
