// wgmma_decode's instances: W4A16 and W8A16 (up to 32 rows of x), W4A8 and W8A8, groups of 128 or
// more without offsets, and code books in groups of 64 or more.
#include "dispatch/checks.h"
#include "kernels/wgmma_decode_launch.cuh"

namespace cutlass_ops {
namespace {

template <class Element, class Format>
Status launch_codebook(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return problem.weight.scale_type == DataType::kFloat32
             ? launch_config<Config<Element, Format, false, float>>(problem, plan, stream)
             : launch_config<Config<Element, Format, false>>(problem, plan, stream);
}

template <class Element, class Format, bool kOneCta, int kBlockM>
Status launch_element(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return problem.weight.zeros
             ? launch_config<Config<Element, Format, true, Element, false, false, kOneCta, false,
                                    false, kBlockM>>(problem, plan, stream)
             : launch_config<Config<Element, Format, false, Element, false, false, kOneCta, false,
                                    false, kBlockM>>(problem, plan, stream);
}

template <class Format, bool kOneCta, int kBlockM = WgmmaDecodeShape::kBlockM>
Status launch_floats(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return problem.x_type == DataType::kFloat16
             ? launch_element<__half, Format, kOneCta, kBlockM>(problem, plan, stream)
             : launch_element<__nv_bfloat16, Format, kOneCta, kBlockM>(problem, plan, stream);
}

// Element: of x in memory, floats or int8.
template <class Element, class Scale, class Format, bool kXRowZeros, bool kOneCta>
Status launch_int8(GemmProblem const& problem, Plan const& plan, Stream stream) {
  constexpr bool kQuantizes = !std::is_same_v<Element, int8_t>;
  if constexpr (Format::kZerosFitInt8) {
    if (problem.weight.zeros)
      return launch_config<Config<Element, Format, true, Scale, kQuantizes, kXRowZeros, kOneCta>>(
          problem, plan, stream);
  }
  return launch_config<Config<Element, Format, false, Scale, kQuantizes, kXRowZeros, kOneCta>>(
      problem, plan, stream);
}

template <class Format, bool kQuantizes, bool kOneCta, bool kXRowZeros>
Status launch_scales(GemmProblem const& problem, Plan const& plan, Stream stream) {
  DataType const scale = problem.weight.scale_type;
  if constexpr (kQuantizes) {  // scales of x's type
    return scale == DataType::kFloat16
               ? launch_int8<__half, __half, Format, kXRowZeros, kOneCta>(problem, plan, stream)
               : launch_int8<__nv_bfloat16, __nv_bfloat16, Format, kXRowZeros, kOneCta>(
                     problem, plan, stream);
  } else {
    return scale == DataType::kFloat16
               ? launch_int8<int8_t, __half, Format, kXRowZeros, kOneCta>(problem, plan, stream)
           : scale == DataType::kBFloat16
               ? launch_int8<int8_t, __nv_bfloat16, Format, kXRowZeros, kOneCta>(problem, plan,
                                                                                 stream)
               : launch_int8<int8_t, float, Format, kXRowZeros, kOneCta>(problem, plan, stream);
  }
}

template <class Format, bool kOneCta>
Status launch_input(GemmProblem const& problem, Plan const& plan, Stream stream) {
  auto const launch = [&](auto quantizes) {
    constexpr bool kQuantizes = decltype(quantizes)::value;
    return activations_have_zeros(problem)
               ? launch_scales<Format, kQuantizes, kOneCta, true>(problem, plan, stream)
               : launch_scales<Format, kQuantizes, kOneCta, false>(problem, plan, stream);
  };
  if (multiplies_int8(problem))
    return plan.quantizes ? launch(std::true_type()) : launch(std::false_type());
  return launch_floats<Format, kOneCta>(problem, plan, stream);
}

}  // namespace

Status launch_wgmma_decode(GemmProblem const& problem, Plan const& plan, float*, Stream stream) {
  return visit(problem.weight.format, [&](auto format) -> Status {
    using Format = decltype(format);
    if constexpr (Format::kCodebook) {
      return problem.x_type == DataType::kFloat16
                 ? launch_codebook<__half, Format>(problem, plan, stream)
                 : launch_codebook<__nv_bfloat16, Format>(problem, plan, stream);
    } else if constexpr (Format::kDecodes) {
      if (plan.block_m == WgmmaDecodeShape::kMoreRows)
        return launch_floats<Format, false, WgmmaDecodeShape::kMoreRows>(problem, plan, stream);
      if constexpr (Format::kExact) {
        if constexpr (kDecodesWithOneCta[Format::kBits]) {
          if (plan.one_cta_per_sm) return launch_input<Format, true>(problem, plan, stream);
        }
        return launch_input<Format, false>(problem, plan, stream);
      } else {
        return launch_floats<Format, false>(problem, plan, stream);
      }
    } else {
      return unsupported(std::string("wgmma_decode has no instances of ") + Format::kCodes);
    }
  });
}

}  // namespace cutlass_ops
