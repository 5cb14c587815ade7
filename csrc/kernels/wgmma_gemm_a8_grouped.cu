// wgmma_gemm_a8's instances for experts: x without zero points.
#include "kernels/wgmma_gemm_a8.cuh"

namespace cutlass_ops {
namespace {

constexpr int kMostWholeK = 131071;  // whose int32 sums of products do not overflow, as in
                                     // sums_whole_rows()

constexpr ByWidth<bool> kSumsWholeRows(false, true);  // int4 with a scale a row is rare

template <class Format, int kBlockM, bool kZeros>
Status launch_promotion(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  constexpr std::integral_constant<int, 1> kOne;
  constexpr std::integral_constant<int, 2> kTwo;
  auto const launch = [&](auto promotion, auto groups) {
    constexpr int kWarpgroups = grouped_warpgroups(Format::kBits, kBlockM);
    using C = Config<Format, kBlockM, decltype(promotion)::value, kZeros, false, kWarpgroups, false,
                     true, false, groups()>;
    return hopper::launch_grouped(hopper::LaunchConfig::of<C>(), wgmma_gemm_a8<C>, problem, plan,
                                  stream);
  };
  if (problem.x_codes == ActQuant::kBlock)
    return launch(std::integral_constant<Promotion, Promotion::kBlock>(), kOne);
  if constexpr (kSumsWholeRows[Format::kBits]) {
    if (problem.weight.group_size == -1 && problem.weight.k <= kMostWholeK)
      return launch(std::integral_constant<Promotion, Promotion::kChannel>(), kOne);
  }
  constexpr std::integral_constant<Promotion, Promotion::kToken> kToken;
  return problem.weight.group_size == kKPerTile / 2 ? launch(kToken, kTwo) : launch(kToken, kOne);
}

template <class Format, int kBlockM>
Status launch_zeros(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  if constexpr (Format::kZerosFitInt8) {
    if (problem.weight.zeros) return launch_promotion<Format, kBlockM, true>(problem, plan, stream);
  }
  return launch_promotion<Format, kBlockM, false>(problem, plan, stream);
}

template <class Format>
Status launch_tile(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return launch_height<64, 96, 144, 176>(plan, plan.block_m, [&](auto height) {
    return launch_zeros<Format, height()>(problem, plan, stream);
  });
}

}  // namespace

Status launch_grouped_gemm_a8(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return visit_exact(problem.weight.format, [&](auto format) {
    return launch_tile<decltype(format)>(problem, plan, stream);
  });
}

}  // namespace cutlass_ops
