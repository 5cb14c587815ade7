// The choice of a kernel and of its tile.
#pragma once

#include "dispatch/spec.h"

namespace cutlass_ops {

// Chooses the kernel for a problem that passed check_gemm(): the first that can implement it and
// has a candidate that applies, and its candidate with the least predicted time, or the first.
// Fills in the launch without the workspace. Otherwise a status that names what forbids each
// kernel.
Status select(GemmProblem const& problem, Device const& device, Plan* plan);

}  // namespace cutlass_ops
