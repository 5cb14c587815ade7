// wgmma_decode's instances for experts of few rows: int4 in groups of 128 or more; where x is int8,
// int8 weights too, and int4 in groups of 32 and 64. Scales of x's type.
#include "dispatch/problem.h"
#include "kernels/wgmma_decode_launch.cuh"

namespace cutlass_ops {
namespace {

// Element: of x in memory, floats or int8. Scale: the type of weight scales.
template <class Element, class Scale, class Format, bool kShortGroups>
Status launch_zeros(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  auto const launch = [&](auto zeros) {
    using C = Config<Element, Format, decltype(zeros)::value, Scale, false, false, false, true,
                     kShortGroups>;
    return launch_grouped_config<C>(problem, plan, stream);
  };
  if constexpr (Format::kZerosFitInt8 || !std::is_same_v<Element, int8_t>) {
    if (problem.weight.zeros) return launch(std::true_type());
  }
  return launch(std::false_type());
}

template <class Scale>
Status launch_scales(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  if (problem.x_codes == ActQuant::kNone)
    return launch_zeros<Scale, Scale, formats::Int4, false>(problem, plan, stream);
  if (has_short_groups(problem.weight))
    return launch_zeros<int8_t, Scale, formats::Int4, true>(problem, plan, stream);
  return visit_exact(problem.weight.format, [&](auto format) {
    return launch_zeros<int8_t, Scale, decltype(format), false>(problem, plan, stream);
  });
}

}  // namespace

Status launch_grouped_decode(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return problem.x_type == DataType::kFloat16 ? launch_scales<__half>(problem, plan, stream)
                                              : launch_scales<__nv_bfloat16>(problem, plan, stream);
}

}  // namespace cutlass_ops
