// Grid, threads and shared memory of each kernel: KernelSpec::shape.
#pragma once

#include "dispatch/spec.h"

namespace cutlass_ops {

bool shape_mma_gemm_a16(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan);
bool shape_mma_gemm_a8(GemmProblem const& problem, Device const& device, Candidate const& candidate,
                       Plan* plan);
bool shape_book_gemm_a16(GemmProblem const& problem, Device const& device,
                         Candidate const& candidate, Plan* plan);
bool shape_wgmma_gemm_a8(GemmProblem const& problem, Device const& device,
                         Candidate const& candidate, Plan* plan);
bool shape_wgmma_gemm_a16(GemmProblem const& problem, Device const& device,
                          Candidate const& candidate, Plan* plan);
bool shape_wgmma_fold16(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan);
bool shape_decode_gemm(GemmProblem const& problem, Device const& device, Candidate const& candidate,
                       Plan* plan);
bool shape_wgmma_decode(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan);
bool shape_wgmma_decode_fold16(GemmProblem const& problem, Device const& device,
                               Candidate const& candidate, Plan* plan);

}  // namespace cutlass_ops
