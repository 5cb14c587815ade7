// Products on the host.
#pragma once

#include "cutlass_ops/ops.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

// y = x @ W^T + bias by up to `threads` threads (0: every core); all memory is the host's. x is
// fp16, bf16 or fp32, and quantised first where the problem says so, or quantised already. A row of
// y has the bits of the Python package's reference, whatever m, the threads and the instruction set
// are, unless the problem is neither exact nor batch_invariant and x is floats: five rows and more
// are multiplied in fused multiply-adds and, where the CPU has products of bf16, rows of bf16 by
// the values of codes of 4 bits, in another order; AMX multiplies many rows of bf16 by the weight's
// values, rounded to bf16. The rules of mixed_gemm hold, but x may be fp32,
// and these are kUnsupported: an image, an activation, a residual, saturate, and a gated weight,
// which a caller applies to fp32 sums.
Status cpu_gemm(GemmProblem const& problem, int threads = 0);

}  // namespace cutlass_ops
