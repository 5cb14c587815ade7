// Static int8 products on Hopper (sm_90a alone) by CUTLASS's collectives: GemmUniversal,
// persistent, with a main loop of the CollectiveBuilder (TMA, wgmma with both operands in shared
// memory) and an epilogue whose visitor tree is one node that requantises. TMA stores the result,
// so its rows are multiples of 16 bytes.
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <iterator>
#include <string>
#include <type_traits>

#include "device/launch.cuh"
#include "device/requantize.cuh"

namespace cutlass_ops {
namespace {

namespace fusion = cutlass::epilogue::fusion;

// Scale and bias of an output channel.
struct Vectors {
  float factor;
  int bias;
};

// A node of an epilogue visitor tree (the members are CUTLASS's interface): the bytes of the result
// of the accumulators.
template <int kBlockN>
struct Requantize {
  struct SharedStorage {
    alignas(16) Vectors vectors[kBlockN];  // of the tile's channels
  };
  struct Arguments {
    ConvParams problem;
  };
  using Params = Arguments;

  template <class Shape>
  static constexpr Params to_underlying_arguments(Shape const&, Arguments const& arguments, void*) {
    return arguments;
  }
  template <class Shape>
  static bool can_implement(Shape const&, Arguments const&) {
    return true;
  }
  template <class Shape>
  static size_t get_workspace_size(Shape const&, Arguments const&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE Requantize() {}
  CUTLASS_HOST_DEVICE Requantize(Params const& params, SharedStorage const& shared)
      : p(&params.problem), vectors(const_cast<Vectors*>(shared.vectors)) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::ProducerLoadArgs<Args...> const&) {
    return fusion::EmptyProducerLoadCallbacks{};
  }

  // The callbacks of a thread for a tile. `channels`: the coordinates of the thread's accumulators,
  // relative to the first one, which belongs to channel `first` of the tile.
  template <class Coordinates>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    ConvParams const& p;
    Vectors* vectors;
    Coordinates coordinates;
    int first_n, first, thread, threads;

    CUTLASS_DEVICE Callbacks(ConvParams const& params, Vectors* shared,
                             Coordinates const& of_thread, int tile_n, int channel, int index,
                             int count)
        : p(params),
          vectors(shared),
          coordinates(of_thread),
          first_n(tile_n),
          first(channel),
          thread(index),
          threads(count) {}

    CUTLASS_DEVICE void begin() {
      for (int i = thread; i < kBlockN; i += threads) {
        int const n = min(first_n + i, p.problem.weight.n - 1);
        float const scale = row_scale(p.problem.weight, n);
        vectors[i] = {requantize_factor(p.problem, scale), compensated_bias(p.problem, n, scale)};
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    template <int kCount>
    CUTLASS_DEVICE cutlass::Array<int8_t, kCount> visit(cutlass::Array<int, kCount> const& sums,
                                                        int fragment, int m, int n) {
      cutlass::Array<int8_t, kCount> y;
      auto const of_fragment = coordinates(cute::_, cute::_, cute::_, m, n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        Vectors const v = vectors[first + cute::get<1>(of_fragment(fragment * kCount + i))];
        y[i] = int8_t(requantize(p, wrapping_add(sums[i], v.bias), v.factor));
      }
      return y;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    int const first_n = int(cute::get<1>(args.tile_coord_mnkl)) * kBlockN;
    int const first =
        int(cute::get<1>(args.problem_shape_mnkl)) - int(cute::get<1>(args.residue_tCcD)) - first_n;
    return Callbacks<decltype(args.tCcD)>(*p, vectors, args.tCcD, first_n, first, args.thread_idx,
                                          int(cute::size(args.tiled_copy)));
  }

  ConvParams const* p;
  Vectors* vectors;
};

template <class X_, int kIndex>
struct Config {
  using X = X_;
  static constexpr GemmCollectiveTile kTile = kGemmCollectiveTiles[kIndex];
  using Tile =
      cute::Shape<cute::Int<kTile.block_m>, cute::Int<kTile.block_n>, cute::Int<kTile.block_k>>;
  using Cluster = cute::Shape<cute::Int<kTile.cluster_size>, cute::_1, cute::_1>;
  using Schedule =
      std::conditional_t<kTile.cooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                         cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using EpilogueSchedule =
      std::conditional_t<kTile.cooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                         cutlass::epilogue::TmaWarpSpecialized>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, int, int, void, cutlass::layout::RowMajor,
      kConvVector, int8_t, cutlass::layout::RowMajor, kConvVector, EpilogueSchedule,
      Requantize<kTile.block_n>>::CollectiveOp;
  using MainLoop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, X, cutlass::layout::RowMajor,
      kConvVector, int8_t, cutlass::layout::ColumnMajor, kConvVector, int, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<int(
          sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int>, MainLoop, Epilogue>;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, 1)
    gemm_int8_collective(__grid_constant__ typename Kernel::Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  pdl_wait_and_launch_dependents();
  Kernel()(p, shared);
#endif
}

// ---- launch

template <class C>
Status launch_config(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  using Kernel = typename C::Kernel;
  ConvProblem const& problem = params.problem;
  ConvWeight const& w = problem.weight;
  typename Kernel::StrideA const strides{problem.channels, cute::_1{}, 0};
  typename Kernel::Arguments arguments;
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {params.pixels, w.n, problem.channels};
  arguments.mainloop.ptr_A = static_cast<typename C::X const*>(problem.x);
  arguments.mainloop.ptr_B = w.codes;
  arguments.mainloop.dA = arguments.mainloop.dB = strides;
  arguments.epilogue.thread = {params};
  arguments.epilogue.ptr_D = static_cast<int8_t*>(problem.out);
  arguments.epilogue.dD = typename Kernel::StrideD{w.n, cute::_1{}, 0};
  arguments.hw_info.sm_count = plan.grid;
  if (!Kernel::can_implement(arguments)) {
    return {Status::kInvalid, "n is " + std::to_string(w.n) + " and x has " +
                                  std::to_string(problem.channels) + " channels; " + plan.kernel +
                                  " takes multiples of " + std::to_string(kConvVector)};
  }
  auto const p = Kernel::to_underlying_arguments(arguments, nullptr);
  LaunchShape const shape{Kernel::get_grid_shape(p), dim3(unsigned(Kernel::MaxThreadsPerBlock)),
                          C::kTile.cluster_size, int(Kernel::SharedStorageSize)};
  return launch_shape(gemm_int8_collective<Kernel>, shape, stream, p);
}

template <class X, int kIndex = 0>
Status launch_tile(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  constexpr GemmCollectiveTile kTile = kGemmCollectiveTiles[kIndex];
  if constexpr (kIndex + 1 < int(std::size(kGemmCollectiveTiles)))
    if (plan.block_m != kTile.block_m || plan.block_n != kTile.block_n)
      return launch_tile<X, kIndex + 1>(params, plan, stream);
  return launch_config<Config<X, kIndex>>(params, plan, stream);
}

}  // namespace

Status launch_gemm_int8_collective(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  return params.problem.x_unsigned ? launch_tile<uint8_t>(params, plan, stream)
                                   : launch_tile<int8_t>(params, plan, stream);
}

}  // namespace cutlass_ops
