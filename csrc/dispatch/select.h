// The choice of a kernel and of its tile.
#pragma once

#include "dispatch/spec.h"

namespace cutlass_ops {

// The kernel for a problem that passed check_gemm(): the first that can implement it and has a
// candidate that applies, and of its candidates the one of least predicted time, or the first.
// Fills in how it is launched, but for the workspace. Otherwise a status that names what
// forbids each kernel.
Status select(GemmProblem const& problem, Device const& device, Plan* plan);

}  // namespace cutlass_ops
