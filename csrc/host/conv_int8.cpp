// Static int8 convolutions: they launch the kernel of a plan. Without CUDA every call says so.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "cutlass_ops/conv.h"
#include "dispatch/checks.h"
#include "dispatch/conv_int8.h"
#include "dispatch/conv_int8_plan.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

#if CUTLASS_OPS_CUDA

namespace {

Status quantize(ConvProblem const& p, uint8_t* workspace, Stream stream) {
  QuantizeProblem q;
  q.x = p.x, q.x_type = p.x_type, q.x_stride = p.channels, q.m = p.batch * p.height * p.width,
  q.k = p.channels;
  q.range = reinterpret_cast<uint32_t*>(workspace);
  q.out.codes = reinterpret_cast<int8_t*>(workspace + kRangeBytes);
  Status const status = launch_find_range(q, p.x_symmetric, stream);
  return status.ok() ? launch_quantize_codes(q, stored_channels(p.channels), p.x_symmetric, stream)
                     : status;
}

int out_limit(float bound, ConvProblem const& p) {
  int const low = p.out_type == ConvOutput::kInt8 ? -128 : 0;
  double const code = double(std::nearbyint(bound / p.y_scale)) + p.y_zero_point;
  return int(std::clamp(code, double(low), double(low + 255)));
}

// The bounds of y by its type and the activation.
std::pair<int, int> limits(ConvProblem const& p) {
  ActivationBounds const bounds(p.activation, p.clamp_low, p.clamp_high);
  return {out_limit(bounds.low, p), out_limit(bounds.high, p)};
}

struct Launcher {
  std::string_view kernel;
  Status (*launch)(ConvParams const&, ConvPlan const&, Stream);
};
constexpr Launcher kLaunchers[] = {{kWgmma, &launch_conv_int8_wgmma},
                                   {kCollective, &launch_gemm_int8_collective},
                                   {kImplicit, &launch_conv_int8_implicit_gemm},
                                   {kDepthwise, &launch_conv_int8_depthwise},
                                   {kStem, &launch_conv_int8_stem}};

}  // namespace

Status conv_int8(ConvProblem const& problem, ConvPlan const& plan, Workspace workspace,
                 Stream stream) {
  if (!plan.kernel) return invalid("the plan is empty; plan_conv_int8() fills it");
  if (workspace.bytes < plan.workspace) {
    return invalid("the workspace has " + std::to_string(workspace.bytes) + " bytes; " +
                   std::to_string(plan.workspace) + " are needed" + shape(problem));
  }
  auto const* const launcher =
      std::find_if(std::begin(kLaunchers), std::end(kLaunchers),
                   [&](Launcher const& known) { return known.kernel == plan.kernel; });
  if (launcher == std::end(kLaunchers))
    return invalid(std::string("there is no kernel ") + plan.kernel);
  bool const vectors = plan.kernel == std::string_view(kCollective) || is_float(problem.out_type);
  int const out_bytes = vectors ? kConvVector : 1;
  Status status = check_addresses(
      {{"the workspace", workspace.data, kWorkspaceBytes, plan.workspace > 0},
       {"out", problem.out, problem.out_type == ConvOutput::kInt32 ? 4 : out_bytes}});
  if (!status.ok()) return {status.code, status.text + shape(problem)};
  ConvParams params;
  ConvProblem& p = params.problem =
      plan.kernel == std::string_view(kStem) ? problem : multiplied(problem);
  params.out_height = p.out_height(), params.out_width = p.out_width(),
  params.pixels = int(p.pixels());
  int const n = p.weight.n;
  params.whole_vectors =
      p.out_type != ConvOutput::kInt32 && n / p.groups % 8 == 0 && aligned(p.out, 8);
  params.fills_padding = has_zero_point(p) && p.padded();
  if (is_float(p.out_type)) {
    ActivationBounds const bounds(p.activation, p.clamp_low, p.clamp_high);
    params.low = bounds.low, params.high = bounds.high;
    params.x_range = static_cast<uint32_t const*>(workspace.data);
    status = quantize(problem, static_cast<uint8_t*>(workspace.data), stream);
    p.x = static_cast<uint8_t*>(workspace.data) + kRangeBytes;
  } else {
    auto const [low, high] = limits(p);
    params.low = float(low - p.y_zero_point), params.high = float(high - p.y_zero_point);
    auto const twice = [](int value) { return (unsigned(value) & 0xffff) * 0x10001; };
    params.low_twice = twice(low - p.y_zero_point);
    params.high_twice = twice(high - p.y_zero_point), params.zero_twice = twice(p.y_zero_point);
    if (plan.copied_channels) {
      status = problem.weight.order == ConvOrder::kFlat
                   ? launch_gather_taps(problem, workspace.data, plan.copied_channels, stream)
                   : launch_copy_image(problem, workspace.data, plan.copied_channels, stream);
      p.x = workspace.data, p.channels = plan.copied_channels;
    }
  }
  if (status.ok()) status = launcher->launch(params, plan, stream);
  if (!status.ok()) status.text += shape(problem);
  return status;
}

#else

Status conv_int8(ConvProblem const&, ConvPlan const&, Workspace, Stream) {
  return unsupported("this build of cutlass_ops has no CUDA kernels; it was compiled without nvcc");
}

#endif

}  // namespace cutlass_ops
