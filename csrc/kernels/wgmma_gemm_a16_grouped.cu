// wgmma_gemm_a16's instances for experts.
#include "kernels/wgmma_gemm_a16.cuh"

namespace cutlass_ops {
namespace {

template <class Element, class Format, int kBlockM, class Scale = void, int kWarpgroups = 2>
Status launch_zeros(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  auto const launch = [&](auto zeros) {
    using C = Config<Element, Format, kBlockM, decltype(zeros)::value, Scale, kWarpgroups, true>;
    return hopper::launch_grouped(hopper::LaunchConfig::of<C>(), wgmma_gemm_a16<C>, problem, plan,
                                  stream);
  };
  return problem.weight.zeros ? launch(std::true_type()) : launch(std::false_type());
}

template <class Element, class Format>
Status launch_tile(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  if constexpr (kFourWarpgroups[Format::kBits]) {
    if (plan.block_n == 512)
      return launch_zeros<Element, Format, 64, Element, 4>(problem, plan, stream);
  }
  return launch_height<64, 96, 144>(plan, plan.block_m, [&](auto height) {
    return launch_zeros<Element, Format, height()>(problem, plan, stream);
  });
}

}  // namespace

Status launch_grouped_gemm_a16(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return visit_exact(problem.weight.format, [&](auto format) {
    using Format = decltype(format);
    return problem.x_type == DataType::kFloat16
               ? launch_tile<__half, Format>(problem, plan, stream)
               : launch_tile<__nv_bfloat16, Format>(problem, plan, stream);
  });
}

}  // namespace cutlass_ops
