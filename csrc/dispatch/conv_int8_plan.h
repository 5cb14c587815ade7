// Static int8 convolutions: what checks, plans and launches share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cutlass_ops/conv.h"
#include "dispatch/checks.h"

namespace cutlass_ops {

// What is wrong with a convolution, without its shapes.
Status check_conv(ConvProblem const& p);
// The shapes of a convolution, for messages.
std::string shape(ConvProblem const& p);

inline bool aligned(void const* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Whether x is floats, which the call quantises.
inline bool quantizes_x(ConvProblem const& p) { return p.x_type != DataType::kNone; }
// Whether x has a zero point other than 0, or may have.
inline bool has_zero_point(ConvProblem const& p) {
  return quantizes_x(p) ? !p.x_symmetric : p.x_zero_point != 0;
}

// The problem that the kernels compute from a copy of x. If the weight is flat, a pixel of the copy
// has the channels of all taps of one pixel of the result.
ConvProblem multiplied(ConvProblem const& p);

constexpr char kWgmma[] = "conv_int8_wgmma", kCollective[] = "gemm_int8_collective",
               kImplicit[] = "conv_int8_implicit_gemm", kDepthwise[] = "conv_int8_depthwise",
               kStem[] = "conv_int8_stem";

// The workspace of a convolution of floats: their range, and their codes.
constexpr size_t kRangeBytes = 256;

}  // namespace cutlass_ops
