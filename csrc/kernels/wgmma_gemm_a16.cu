// wgmma_gemm_a16's instances for a weight.
#include "kernels/wgmma_gemm_a16.cuh"

namespace cutlass_ops {
namespace {

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  constexpr auto kConfig = hopper::LaunchConfig::of<C>();
  CUtensorMap map;
  Status status = hopper::encode_x(
      problem, plan.ctas_along_m > 1 ? C::kBlockM : kConfig.half_x_rows(problem.m), &map);
  if (!status.ok()) return status;
  // Where 16 tiles of rows of x exceed the cache, only few features share it with them. Bands then
  // have fewer rows of x, which have twice or four times the bytes of a feature.
  constexpr ByWidth<int> kBand(4, 8);
  bool const large = int64_t(16) * C::kBlockM * problem.weight.k * 2 > 64 << 20;
  return hopper::launch_persistent(kConfig, wgmma_gemm_a16<C>, problem, plan, splitk_workspace, map,
                                   stream, large ? kBand[C::kBits] : 16);
}

template <class Element, class Format, int kBlockM, class Scale = void, int kWarpgroups = 2>
Status launch_zeros(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                    Stream stream) {
  return problem.weight.zeros
             ? launch_config<Config<Element, Format, kBlockM, true, Scale, kWarpgroups>>(
                   problem, plan, splitk_workspace, stream)
             : launch_config<Config<Element, Format, kBlockM, false, Scale, kWarpgroups>>(
                   problem, plan, splitk_workspace, stream);
}

template <class Element, class Format>
Status launch_tile(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                   Stream stream) {
  if constexpr (kFourWarpgroups[Format::kBits]) {
    if (plan.block_n == 512)
      return launch_zeros<Element, Format, 64, Element, 4>(problem, plan, splitk_workspace, stream);
  }
  int const block_m = plan.block_m / plan.ctas_along_m;
  return launch_height<32, 64, 96, 128, 144, 160, 208>(plan, block_m, [&](auto height) {
    return launch_zeros<Element, Format, height()>(problem, plan, splitk_workspace, stream);
  });
}

}  // namespace

Status launch_wgmma_gemm_a16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                             Stream stream) {
  return visit_exact(problem.weight.format, [&](auto format) {
    using Format = decltype(format);
    return problem.x_type == DataType::kFloat16
               ? launch_tile<__half, Format>(problem, plan, splitk_workspace, stream)
               : launch_tile<__nv_bfloat16, Format>(problem, plan, splitk_workspace, stream);
  });
}

}  // namespace cutlass_ops
