// What the operators take, whichever kernel runs: limits, and a status that names the argument that does not fit.
#pragma once

#include "cutlass_ops/ops.h"

namespace cutlass_ops {

constexpr int kMaxM = 1 << 24;
constexpr int kMaxNormK = 1 << 22;  // the sums of 512 columns each take 32 KB of shared memory
constexpr double kLeastNormEps = 1e-15;
// Quantised rows up to which they have memory for whole tiles: zeros for rows that are not there come slowly, some 8 bytes a
// clock. Among many tiles that is nothing, and takes less power.
constexpr int kPaddedRows = 512;

Status unsupported(std::string text);
Status invalid(std::string text);

Status check_weight(PackedWeight const& weight);
Status check_gemm(GemmProblem const& problem, Device const& device);
Status check_depthwise(GemmProblem const& problem, float const* taps);
Status check_quantize(QuantizeProblem const& problem);
Status check_sums(PackedWeight const& weight);
Status check_dequantize(DequantizeProblem const& problem);
Status check_flat(FlatProblem const& problem);
Status check_awq(AwqWeight const& weight);
Status check_pack(PackProblem const& problem);

}  // namespace cutlass_ops
