// The problems that each kernel of the product can implement: Field::kNone, or what forbids it.
#pragma once

#include "dispatch/spec.h"

namespace cutlass_ops {

constexpr int kMostDecodeGemmRows = 8;

Field mma_gemm_a16_can(GemmProblem const& problem, Device const& device);
Field mma_gemm_a8_can(GemmProblem const& problem, Device const& device);
Field book_gemm_a16_can(GemmProblem const& problem, Device const& device);
Field wgmma_gemm_a8_can(GemmProblem const& problem, Device const& device);
Field wgmma_gemm_a16_can(GemmProblem const& problem, Device const& device);
Field wgmma_fold16_can(GemmProblem const& problem, Device const& device);
Field decode_gemm_can(GemmProblem const& problem, Device const& device);
// Whether decode_gemm multiplies weights in groups of this size.
bool decode_gemm_has_groups(GemmProblem const& problem);
Field wgmma_decode_can(GemmProblem const& problem, Device const& device);
Field wgmma_decode_fold16_can(GemmProblem const& problem, Device const& device);

}  // namespace cutlass_ops
