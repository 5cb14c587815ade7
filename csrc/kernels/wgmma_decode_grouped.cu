// wgmma_decode's instances for experts (kGroupedDecodeIsExact): W4A16, groups of 128 or more
// without offsets, scales of x's type.
#include "kernels/wgmma_decode.cuh"

namespace cutlass_ops {
namespace {

template <class Element>
Status launch_element(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  auto const launch = [&](auto zeros) {
    using C =
        Config<Element, formats::Int4, decltype(zeros)::value, Element, false, false, false, true>;
    return launch_grouped_config<C>(problem, plan, stream);
  };
  return problem.weight.zeros ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace

Status launch_grouped_decode(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return problem.x_type == DataType::kFloat16
             ? launch_element<__half>(problem, plan, stream)
             : launch_element<__nv_bfloat16>(problem, plan, stream);
}

}  // namespace cutlass_ops
