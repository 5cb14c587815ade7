// How long a product takes by a tile, and the slices that K is cut into for it.
#pragma once

#include "dispatch/spec.h"

namespace cutlass_ops {

// The stream-K tail of a product, or its split-K slices, and the time so in 32nds of TileCost's unit.
struct Cut {
  int64_t tail_tiles;
  int slices;
  int64_t time;
};

// Slices of K of all tiles: enough that every SM has the CTAs that the grid is made for.
int slice_count(GemmProblem const& problem, Device const& device, KernelSpec const& spec, Tile const& tile);

// KernelSpec::cost of the persistent kernels.
int64_t predicted_time(GemmProblem const& problem, Device const& device, KernelSpec const& spec, Candidate const& candidate);

// How K is cut for a candidate.
Cut cut_of(GemmProblem const& problem, Device const& device, KernelSpec const& spec, Candidate const& candidate);

}  // namespace cutlass_ops
