// wgmma_decode_fold16's launcher. Each format has its instances in a file of its own, wgmma_decode_fold16_<format>.cu.
#pragma once

#include "kernels/wgmma_decode.cuh"

namespace cutlass_ops {
namespace {

template <class Element, class Format, bool kQuantizes, bool kAlone>
Status launch_fold(GemmProblem const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  bool const narrow = w.scale_type == problem.x_type && (!w.offsets || w.offset_type == problem.x_type);
  if (!narrow) return launch_config<FoldConfig<Element, Format, false, true, kQuantizes, kAlone>>(problem, plan, stream);
  if constexpr (Format::kTableBytes == 0) {
    if (w.zeros || w.offsets)
      return launch_config<FoldConfig<Element, Format, true, true, kQuantizes, kAlone>>(problem, plan, stream);
  }
  return launch_config<FoldConfig<Element, Format, true, false, kQuantizes, kAlone>>(problem, plan, stream);
}

template <class Element, class Format, bool kAlone>
Status launch_x(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return plan.quantizes ? launch_fold<Element, Format, true, kAlone>(problem, plan, stream)
                        : launch_fold<Element, Format, false, kAlone>(problem, plan, stream);
}

template <class Element, class Format>
Status launch_ctas(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return plan.one_cta_per_sm ? launch_x<Element, Format, true>(problem, plan, stream)
                             : launch_x<Element, Format, false>(problem, plan, stream);
}

}  // namespace

template <class Format>
Status launch_wgmma_decode_fold16(GemmProblem const& problem, Plan const& plan, float*, Stream stream) {
  return problem.x_type == DataType::kFloat16 ? launch_ctas<__half, Format>(problem, plan, stream)
                                              : launch_ctas<__nv_bfloat16, Format>(problem, plan, stream);
}

}  // namespace cutlass_ops
