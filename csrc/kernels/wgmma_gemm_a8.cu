// wgmma_gemm_a8's instances for a weight.
#include "kernels/wgmma_gemm_a8.cuh"

namespace cutlass_ops {
namespace {

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  CUtensorMap map;
  int const box_x_rows = plan.ctas_along_m > 1 ? C::kBlockM : C::kBlockM / C::kCluster;
  Status status = C::kQuantizes ? hopper::encode_x(problem, box_x_rows, &map)
                                : hopper::encode_codes(problem, box_x_rows, &map);
  return status.ok() ? hopper::launch_persistent(hopper::LaunchConfig::of<C>(), wgmma_gemm_a8<C>,
                                                 problem, plan, splitk_workspace, map, stream)
                     : status;
}

template <class Format, int kBlockM, int kWarpgroups, bool kZeros, bool kAsymmetric>
Status launch_promotion(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                        Stream stream) {
  auto const launch = [&](auto promotion) {
    using C = Config<Format, kBlockM, decltype(promotion)::value, kZeros, kAsymmetric, kWarpgroups>;
    return launch_config<C>(problem, plan, splitk_workspace, stream);
  };
  if constexpr (!kZeros) {
    if (sums_whole_rows(problem))
      return launch(std::integral_constant<Promotion, Promotion::kChannel>());
    if constexpr (!kAsymmetric && kBlockM <= 176) {
      if (sums_whole_taps(problem))
        return launch(std::integral_constant<Promotion, Promotion::kTap>());
    }
  }
  if constexpr (kBlockM > 176) {
    return {Status::kUnsupported,
            "BLOCK_M = " + std::to_string(kBlockM) + " is for int32 sums over all of K"};
  } else if (activations_have_blocks(problem)) {
    return launch(std::integral_constant<Promotion, Promotion::kBlock>());
  } else {
    return launch(std::integral_constant<Promotion, Promotion::kToken>());
  }
}

template <class Format, int kBlockM, int kWarpgroups, bool kZeros>
Status launch_zeros(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                    Stream stream) {
  if constexpr (kWarpgroups == 2 && kBlockM != 144) {
    if (problem.quantized.zeros) {
      return launch_promotion<Format, kBlockM, kWarpgroups, kZeros, true>(problem, plan,
                                                                          splitk_workspace, stream);
    }
  }
  return launch_promotion<Format, kBlockM, kWarpgroups, kZeros, false>(problem, plan,
                                                                       splitk_workspace, stream);
}

template <class Format, int kBlockM>
Status launch_compensated(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                          Stream stream) {
  auto const launch = [&](auto zeros) {
    constexpr bool kZeros = decltype(zeros)::value;
    if (problem.quantized.block == -1) {
      return launch_config<Config<Format, kBlockM, Promotion::kToken, kZeros, false, 2, true>>(
          problem, plan, splitk_workspace, stream);
    }
    return launch_config<Config<Format, kBlockM, Promotion::kBlock, kZeros, false, 2, true>>(
        problem, plan, splitk_workspace, stream);
  };
  // Codes minus zero points where the zero points of x are compensated; codes alone where those of
  // the weight are.
  if constexpr (Format::kZerosFitInt8) {
    if (problem.weight.zeros && problem.quantized.zeros) return launch(std::true_type());
  }
  return launch(std::false_type());
}

template <class Format, int kBlockM, int kWarpgroups = 2>
Status launch_plain(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                    Stream stream) {
  if constexpr (Format::kZerosFitInt8 && kBlockM <= 176) {
    if (problem.weight.zeros)
      return launch_zeros<Format, kBlockM, kWarpgroups, true>(problem, plan, splitk_workspace,
                                                              stream);
  }
  return launch_zeros<Format, kBlockM, kWarpgroups, false>(problem, plan, splitk_workspace, stream);
}

template <class Format>
Status launch_compensated_tile(GemmProblem const& problem, Plan const& plan,
                               float* splitk_workspace, Stream stream) {
  return launch_height<96, 128, 144, 176>(plan, plan.block_m, [&](auto height) {
    return launch_compensated<Format, height()>(problem, plan, splitk_workspace, stream);
  });
}

template <class Format>
Status launch_tile(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                   Stream stream) {
  if (plan.compensates)
    return launch_compensated_tile<Format>(problem, plan, splitk_workspace, stream);
  if constexpr (kFourWarpgroups[Format::kBits]) {
    if (plan.block_n == 512) {
      return launch_height<32, 64>(plan, plan.block_m, [&](auto height) {
        return launch_plain<Format, height(), 4>(problem, plan, splitk_workspace, stream);
      });
    }
  }
  int const block_m = plan.block_m / plan.ctas_along_m;
  if (plan.quantizes) {
    return launch_height<kQuantizingHeight>(plan, block_m, [&](auto height) {
      using C = Config<Format, height(), Promotion::kBlock, false, false, 2, false, false, true>;
      return launch_config<C>(problem, plan, splitk_workspace, stream);
    });
  }
  return launch_height<32, 64, 96, 128, 144, 176, 256>(plan, block_m, [&](auto height) {
    return launch_plain<Format, height()>(problem, plan, splitk_workspace, stream);
  });
}

}  // namespace

Status launch_wgmma_gemm_a8(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                            Stream stream) {
  return visit_exact(problem.weight.format, [&](auto format) {
    return launch_tile<decltype(format)>(problem, plan, splitk_workspace, stream);
  });
}

}  // namespace cutlass_ops
