// wgmma_gemm_a8's instances for experts: x without zero points.
#include "kernels/wgmma_gemm_a8.cuh"

namespace cutlass_ops {
namespace {

constexpr int kMostWholeK = 131071;  // whose int32 sums of products do not overflow, as in
                                     // sums_whole_rows()

template <int kBits, int kBlockM, bool kZeros>
Status launch_promotion(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  auto const launch = [&](auto promotion) {
    using C = Config<kBits, kBlockM, decltype(promotion)::value, kZeros, false, 2, false, true>;
    return hopper::launch_grouped<C>(wgmma_gemm_a8<C>, problem, plan, stream);
  };
  if (problem.x_codes == ActQuant::kBlock)
    return launch(std::integral_constant<Promotion, Promotion::kBlock>());
  if constexpr (kBits == 8) {  // int4 with a scale a row is rare
    if (problem.weight.group_size == -1 && problem.weight.k <= kMostWholeK)
      return launch(std::integral_constant<Promotion, Promotion::kChannel>());
  }
  return launch(std::integral_constant<Promotion, Promotion::kToken>());
}

template <int kBlockM>
Status launch_bits(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  if (problem.weight.bits == 8) return launch_promotion<8, kBlockM, false>(problem, plan, stream);
  return problem.weight.zeros ? launch_promotion<4, kBlockM, true>(problem, plan, stream)
                              : launch_promotion<4, kBlockM, false>(problem, plan, stream);
}

}  // namespace

Status launch_grouped_gemm_a8(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  switch (plan.block_m) {
    case 64:
      return launch_bits<64>(problem, plan, stream);
    case 96:
      return launch_bits<96>(problem, plan, stream);
    case 144:
      return launch_bits<144>(problem, plan, stream);
    default:
      return launch_bits<176>(problem, plan, stream);
  }
}

}  // namespace cutlass_ops
