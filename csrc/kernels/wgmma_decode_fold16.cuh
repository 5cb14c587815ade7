// wgmma_decode_fold16's launcher. Each format has its instances in a file of its own, wgmma_decode_fold16_<format>.cu.
#pragma once

#include "kernels/wgmma_decode.cuh"

namespace cutlass_ops {
namespace {

template <class Element, class Format, bool kQuantizes, bool kAlone>
Status launch_fold(GemmProblem const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  bool const narrow = w.scale_type == problem.x_type && (!w.offsets || w.offset_type == problem.x_type);
  auto const launch = [&](auto fold) {
    using F = decltype(fold);
    return launch_config<FoldConfig<Element, Format, F::kNarrow, F::kShift, kQuantizes, kAlone>>(problem, plan, stream);
  };
  if (!narrow) return launch(Fold<Element, Format, false, Shift::kAny>());
  if constexpr (Format::kIntegers) {
    if (w.zeros) return launch(Fold<Element, Format, true, Shift::kZeros>());
    if (w.offsets) return launch(Fold<Element, Format, true, Shift::kOffsets>());
  }
  return launch(Fold<Element, Format, true, Shift::kNone>());
}

template <class Element, class Format>
Status launch_ctas(GemmProblem const& problem, Plan const& plan, Stream stream) {
  if (plan.one_cta_per_sm) return launch_fold<Element, Format, false, true>(problem, plan, stream);
  if constexpr (Format::kIntegers) {
    if (plan.quantizes) return launch_fold<Element, Format, true, false>(problem, plan, stream);
  }
  return launch_fold<Element, Format, false, false>(problem, plan, stream);
}

}  // namespace

template <class Format>
Status launch_wgmma_decode_fold16(GemmProblem const& problem, Plan const& plan, float*, Stream stream) {
  return problem.x_type == DataType::kFloat16 ? launch_ctas<__half, Format>(problem, plan, stream)
                                              : launch_ctas<__nv_bfloat16, Format>(problem, plan, stream);
}

}  // namespace cutlass_ops
