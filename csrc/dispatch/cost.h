// The predicted time of a product with a tile, and the slices of K that the tile needs.
#pragma once

#include "dispatch/spec.h"

namespace cutlass_ops {

// A predicted time in 32nds of TileCost's unit, linear in the costs of a tile, so that these can be
// fitted to measured times (tools/fit_costs.py).
struct PredictedTime {
  int64_t k_tiles = 0;   // times the cost of a tile of K, a 32nd of TileCost::k4096
  int64_t ends = 0;      // times TileCost::end
  int64_t constant = 0;  // whatever the tile is
};

// The stream-K tail of a product, or its split-K slices, and the resulting time.
struct TailSplit {
  int64_t tail_tiles;
  int slices;
  PredictedTime time;
};

// Slices of K of all tiles: enough that every SM has the CTAs that the grid is made for.
int slice_count(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                Tile const& tile);

// The index in kCards of the card whose costs a device has.
int card_of(Device const& device);
int bandwidth_of(Device const& device);  // that card's, GB/s

// The cost of a tile for K = 4096 that applies.
int TileCost::* cost_kind(GemmProblem const& problem, Device const& device,
                          Candidate const& candidate);

// Whether most rows of a large tile would be empty. Such tiles are neither chosen nor measured.
constexpr bool is_mostly_empty(Tile const& tile, int m) {
  return tile.block_m > 128 && tile.block_m > 2 * m;
}

// KernelSpec::cost of the persistent kernels; negative for mostly empty tiles.
int64_t predicted_time(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                       Candidate const& candidate);

// The predicted time of decode kernels, also linear in their costs.
// `rounds`: of a kernel that rounds weights, which for some formats is not the only one.
DecodeKind decode_kind(GemmProblem const& problem, bool rounds);
struct DecodeTerms {
  double chunks, share, x;
  int rows;
};
DecodeTerms decode_terms(GemmProblem const& problem, Device const& device, Plan const& shaped);
int64_t decode_time(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                    Candidate const& candidate);
// With the slices of K of a batch-invariant product.
int64_t decode_time_in(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                       Candidate const& candidate, int slices);

// How K is cut for a candidate.
TailSplit tail_split_of(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                        Candidate const& candidate);

}  // namespace cutlass_ops
