// wgmma_decode_fold16's launchers. Each format has its instances in a separate file,
// wgmma_decode_fold16_<format>.cu.
#pragma once

#include "dispatch/checks.h"
#include "kernels/wgmma_decode_launch.cuh"

namespace cutlass_ops {
namespace {

// `launch` with the Fold that a weight with x of `Element` takes.
template <class Element, class Format, class Launch>
Status with_fold(PackedWeight const& w, DataType x_type, Launch launch) {
  if (!has_narrow_scales(w, x_type))
    return launch(Fold<Element, Format, false, AffineTerm::kAny>());
  if constexpr (Format::kIntegers) {
    if (w.zeros) return launch(Fold<Element, Format, true, AffineTerm::kZeros>());
    if (w.offsets) return launch(Fold<Element, Format, true, AffineTerm::kOffsets>());
  }
  return launch(Fold<Element, Format, true, AffineTerm::kNone>());
}

template <class Element, class Format, bool kQuantizes, bool kOneCta,
          int kBlockM = WgmmaDecodeShape::kBlockM>
Status launch_fold(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return with_fold<Element, Format>(problem.weight, problem.x_type, [&](auto fold) -> Status {
    using F = decltype(fold);
    if constexpr (F::kNarrow || kBlockM == WgmmaDecodeShape::kBlockM) {
      return launch_config<FoldConfig<Element, Format, F::kNarrow, F::kAffineTerm, kQuantizes,
                                      kOneCta, false, kBlockM>>(problem, plan, stream);
    } else {
      return unsupported("wgmma_decode_fold16 applies scales of another type to 16 rows of x");
    }
  });
}

template <class Element, class Format>
Status launch_ctas(GemmProblem const& problem, Plan const& plan, Stream stream) {
  if (plan.block_m == WgmmaDecodeShape::kMoreRows)
    return launch_fold<Element, Format, false, false, WgmmaDecodeShape::kMoreRows>(problem, plan,
                                                                                   stream);
  if (plan.one_cta_per_sm) return launch_fold<Element, Format, false, true>(problem, plan, stream);
  if constexpr (Format::kIntegers) {
    if (plan.quantizes) return launch_fold<Element, Format, true, false>(problem, plan, stream);
  }
  return launch_fold<Element, Format, false, false>(problem, plan, stream);
}

template <class Element, class Format>
Status launch_groups(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return with_fold<Element, Format>(problem.weight, problem.x_type, [&](auto fold) {
    using F = decltype(fold);
    return launch_grouped_config<
        FoldConfig<Element, Format, F::kNarrow, F::kAffineTerm, false, false, true>>(problem, plan,
                                                                                     stream);
  });
}

}  // namespace

template <class Format>
Status launch_wgmma_decode_fold16(GemmProblem const& problem, Plan const& plan, float*,
                                  Stream stream) {
  return problem.x_type == DataType::kFloat16
             ? launch_ctas<__half, Format>(problem, plan, stream)
             : launch_ctas<__nv_bfloat16, Format>(problem, plan, stream);
}

template <class Format>
Status launch_grouped_decode_fold16(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return problem.x_type == DataType::kFloat16
             ? launch_groups<__half, Format>(problem, plan, stream)
             : launch_groups<__nv_bfloat16, Format>(problem, plan, stream);
}

}  // namespace cutlass_ops
