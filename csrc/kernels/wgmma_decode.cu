// wgmma_decode's instances: W4A16, W8A16, W4A8 and W8A8, groups of 128 or more without offsets, and
// code books in groups of 64 or more.
#include "kernels/wgmma_decode.cuh"

namespace cutlass_ops {
namespace {

template <class Element>
Status launch_codebook(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return problem.weight.scale_type == DataType::kFloat32
             ? launch_config<Config<Element, 4, false, true, float>>(problem, plan, stream)
             : launch_config<Config<Element, 4, false, true>>(problem, plan, stream);
}

template <class Element, int kBits, bool kOneCta>
Status launch_element(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return problem.weight.zeros
             ? launch_config<Config<Element, kBits, true, false, Element, false, false, kOneCta>>(
                   problem, plan, stream)
             : launch_config<Config<Element, kBits, false, false, Element, false, false, kOneCta>>(
                   problem, plan, stream);
}

// Element: of x in memory, floats or int8.
template <class Element, class Scale, int kBits, bool kTokenZeros, bool kOneCta>
Status launch_int8(GemmProblem const& problem, Plan const& plan, Stream stream) {
  constexpr bool kQuantizes = !std::is_same_v<Element, int8_t>;
  if constexpr (kBits == 4) {
    if (problem.weight.zeros)
      return launch_config<
          Config<Element, 4, true, false, Scale, kQuantizes, kTokenZeros, kOneCta>>(problem, plan,
                                                                                    stream);
  }
  return launch_config<
      Config<Element, kBits, false, false, Scale, kQuantizes, kTokenZeros, kOneCta>>(problem, plan,
                                                                                     stream);
}

template <int kBits, bool kQuantizes, bool kOneCta, bool kTokenZeros>
Status launch_scales(GemmProblem const& problem, Plan const& plan, Stream stream) {
  DataType const scale = problem.weight.scale_type;
  if constexpr (kQuantizes) {  // scales of x's type
    return scale == DataType::kFloat16
               ? launch_int8<__half, __half, kBits, kTokenZeros, kOneCta>(problem, plan, stream)
               : launch_int8<__nv_bfloat16, __nv_bfloat16, kBits, kTokenZeros, kOneCta>(
                     problem, plan, stream);
  } else {
    return scale == DataType::kFloat16
               ? launch_int8<int8_t, __half, kBits, kTokenZeros, kOneCta>(problem, plan, stream)
           : scale == DataType::kBFloat16
               ? launch_int8<int8_t, __nv_bfloat16, kBits, kTokenZeros, kOneCta>(problem, plan,
                                                                                 stream)
               : launch_int8<int8_t, float, kBits, kTokenZeros, kOneCta>(problem, plan, stream);
  }
}

template <int kBits, bool kOneCta>
Status launch_input(GemmProblem const& problem, Plan const& plan, Stream stream) {
  auto const launch = [&](auto quantizes) {
    constexpr bool kQuantizes = decltype(quantizes)::value;
    return activations_have_zeros(problem)
               ? launch_scales<kBits, kQuantizes, kOneCta, true>(problem, plan, stream)
               : launch_scales<kBits, kQuantizes, kOneCta, false>(problem, plan, stream);
  };
  if (multiplies_int8(problem))
    return plan.quantizes ? launch(std::true_type()) : launch(std::false_type());
  return problem.x_type == DataType::kFloat16
             ? launch_element<__half, kBits, kOneCta>(problem, plan, stream)
             : launch_element<__nv_bfloat16, kBits, kOneCta>(problem, plan, stream);
}

}  // namespace

Status launch_wgmma_decode(GemmProblem const& problem, Plan const& plan, float*, Stream stream) {
  if (problem.weight.book) {
    return problem.x_type == DataType::kFloat16
               ? launch_codebook<__half>(problem, plan, stream)
               : launch_codebook<__nv_bfloat16>(problem, plan, stream);
  }
  if (problem.weight.bits == 4) return launch_input<4, false>(problem, plan, stream);
  return plan.one_cta_per_sm ? launch_input<8, true>(problem, plan, stream)
                             : launch_input<8, false>(problem, plan, stream);
}

}  // namespace cutlass_ops
