// The dispatch table's types. A row says which problems a kernel takes and why it is the choice for them; first match wins.
#pragma once

#include <cstddef>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"

namespace cutlass_ops {

// What a kernel instance computes at a time, as its Config states it.
struct Tile {
  int rows;  // output features
  int tokens;
  int stages;            // tiles of K in flight
  int resident;          // blocks that share one multiprocessor
  int shared_bytes;      // shared memory of a block, at most
  int blocks = 1;        // that compute the tile together, as a cluster
  int cost = 0;          // tenths of a microsecond that the tile takes for K = 4096 (measured); 0 where M alone decides
  int end_cost = 0;      // and besides whatever K is, where that is not in it; twice for one whose K is cut
  bool whole_k = false;  // the kernel cuts K itself, where it does: no partial sums leave it
  int token_cost = 0;  // instead of `cost` where int8 tokens have one scale, and zero points are none or corrected; 0: no other
  int row_cost = 0;    // and where int32 sums run over all of K (sums_whole_rows())
  bool gathers = false;  // a cluster may take the last parts of K of several tiles (hopper::GatheredWork)
};

// Start the kernel of a row. problem.quantized is filled for int8 kernels, but for those that quantise floats themselves (kQuantizes);
// `partials` is null if plan.splits is 1. Otherwise it holds plan.splits x [m][n_pad] sums or, where plan.cut_tiles is not 0, part_floats(plan) of them
// and then mark_count(plan) 64-bit marks.
using Launcher = Status (*)(GemmProblem const& problem, Plan const& plan, float* partials, Stream stream);

constexpr unsigned kWeights4 = 1, kWeights8 = 2, kCodeBook = 4;  // Row::weights
constexpr unsigned kFloatInput = 1, kInt8Input = 2;              // Row::inputs
constexpr unsigned kQuantizes = 4;                               // beside kInt8Input: the kernel quantises floats itself
constexpr unsigned kUpcasts =
    8;  // it takes 16-bit floats alone: the values of int8 activations, and irregular floats copied to regular rows
constexpr unsigned kRounds = 32;    // it rounds weights to 16 bits
constexpr unsigned kCorrects = 16;  // beside kInt8Input: it makes zero points good at once for many blocks

// Row::features: what a problem may have beyond symmetric groups of 128 or more.
constexpr unsigned kShortGroups = 1;  // groups of 32 or 64
constexpr unsigned kWeightZeros = 2;
constexpr unsigned kWeightOffsets = 4;
constexpr unsigned kActivationZeros = 8;
constexpr unsigned kIrregularInput =
    16;  // floats whose columns are gathered (act order) or whose rows do not start on 16 bytes
constexpr unsigned kAllFeatures = 31;

struct Row {
  char const* kernel;
  unsigned weights;
  unsigned inputs;
  unsigned features;
  int min_architecture, max_architecture;
  int min_m, max_m;
  Tile tile;
  Launcher launch;
  char const* why;
  bool (*takes)(GemmProblem const& problem, Device const& device) = nullptr;  // null: every problem that the fields above admit
};

// The row for a problem: the first that takes it, or, where its kernel has tiles with a cost, the one of that kernel's rows whose
// waves over the GPU cost least. Otherwise a status that names the field which no row takes.
// `plan`, if given, gets the parts that K is cut into.
Status select(GemmProblem const& problem, Device const& device, Row const** row, Plan* plan = nullptr);

// Where whole tiles come before the cut ones: the sums of a cut tile's parts of K but the first, and a mark for each warp's part of them.
constexpr int64_t part_floats(Plan const& plan) {
  return int64_t(plan.cut_tiles) * (plan.splits - 1) * plan.tile_rows * plan.tile_tokens;
}
constexpr int64_t mark_count(Plan const& plan) { return int64_t(plan.cut_tiles) * (plan.splits - 1) * (plan.tile_rows / 16); }

// Whether activations are int8 where they are multiplied: quantised before, or on the way.
inline bool multiplies_int8(GemmProblem const& problem) {
  return problem.act_quant != ActQuant::kNone || problem.quantized.codes;
}
// Whether they have zero points then.
inline bool activations_have_zeros(GemmProblem const& problem) {
  return multiplies_int8(problem) && (problem.quantized.codes ? problem.quantized.zeros != nullptr : !problem.act_symmetric);
}

// Whether they have a scale a block then.
inline bool activations_have_blocks(GemmProblem const& problem) {
  return problem.quantized.codes ? problem.quantized.block != -1 : problem.act_quant == ActQuant::kBlock;
}
// Whether int32 sums of int8 products run over all of K: no scale is a group's or a block's, and none overflows, where codes reach 128 on one side, and on
// the other too or, less their zero points, 255.
inline bool sums_whole_rows(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  return multiplies_int8(problem) && !activations_have_blocks(problem) && w.group_size == -1 && !w.zeros &&
         w.k <= (activations_have_zeros(problem) ? 65535 : 131071);
}

// Whether the other operators take their arguments.
Status check_quantize(QuantizeProblem const& problem);
Status check_sums(PackedWeight const& weight);
Status check_dequantize(DequantizeProblem const& problem);
Status check_flat(FlatProblem const& problem);
Status check_awq(AwqWeight const& weight);
Status check_pack(PackProblem const& problem);

// Rows of the table, for tests.
Row const* table(size_t* count);

// Where the parts of a call's workspace lie, in bytes from its start.
struct WorkspaceLayout {
  size_t codes = 0, scales = 0, zeros = 0, upcast = 0, zero_values = 0, zero_scales = 0, partials = 0, total = 0;
  int stride = 0;         // QuantizedActivations::stride
  int rows = 0;           // QuantizedActivations::rows
  int block = 0;          // QuantizedActivations::block; 0: nothing is quantised
  bool upcasts = false;   // the row is kUpcasts, and needs it: there are no codes where floats are quantised
  bool corrects = false;  // the row is kCorrects, and there are zero values
};
// `inputs`: of the row.
WorkspaceLayout workspace_layout(GemmProblem const& problem, Plan const& plan, unsigned inputs = kInt8Input);

// The activation block for weights in groups of group_size.
constexpr int activation_block(int group_size) { return group_size == -1 || group_size > 128 ? 128 : group_size; }

constexpr int kMaxM = 1 << 24;
constexpr int kInvariantM = 128;    // tokens for which a batch-invariant product's kernel and splits are chosen, whatever m is
constexpr int kMaxNormK = 1 << 22;  // the sums of 512 columns each take 32 KB of shared memory
constexpr float kLeastNormEps = 1e-15f;

}  // namespace cutlass_ops
