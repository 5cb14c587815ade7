// Static int8 convolutions of any geometry by CUTLASS's implicit GEMM
// (conv::kernel::DefaultConv2dFprop) on mma.sync: its main loop, and an epilogue whose visitor
// requantises. sm_80 and later.
//
// K is taken tap by tap within 64 channels. x is loaded 16 channels at a time by cp.async, or a
// byte at a time where groups begin within a vector or the kernel has more taps than the iterator
// has masks for; taps outside of x, from a vector of its zero points (Padded). A CTA has one group
// of the convolution: CUTLASS sees a convolution of that group's channels, whose images and output
// channels begin with those of the CTA, because its offsets along images and output channels are
// products of 32 bits. The accumulators go through shared memory, from which each thread takes four
// output channels of several pixels.
#include <cutlass/conv/kernel/default_conv2d_fprop.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/epilogue/threadblock/epilogue_with_visitor.h>

#include <cute/arch/mma_sm80.hpp>

#include <iterator>
#include <type_traits>

#include "device/launch.cuh"
#include "device/requantize.cuh"

// CUTLASS has only the saturating m16n8k32 instructions of int8, but the sums of convolutions wrap.
namespace cutlass::arch {
template <class A>
struct Mma<gemm::GemmShape<16, 8, 32>, 32, A, layout::RowMajor, int8_t, layout::ColumnMajor, int,
           layout::RowMajor, OpMultiplyAdd> {
  using Shape = gemm::GemmShape<16, 8, 32>;
  using ElementA = A;
  using LayoutA = layout::RowMajor;
  using FragmentA = Array<A, 16>;
  using ElementB = int8_t;
  using LayoutB = layout::ColumnMajor;
  using FragmentB = Array<int8_t, 8>;
  using ElementC = int;
  using LayoutC = layout::RowMajor;
  using FragmentC = Array<int, 4>;
  using Operator = OpMultiplyAdd;
  using ArchTag = arch::Sm80;
  using Instruction =
      std::conditional_t<std::is_same_v<A, uint8_t>, cute::SM80_16x8x32_S32U8S8S32_TN,
                         cute::SM80_16x8x32_S32S8S8S32_TN>;

  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b,
                                 FragmentC const& c) const {
    auto const* const x = reinterpret_cast<uint32_t const*>(&a);
    auto const* const w = reinterpret_cast<uint32_t const*>(&b);
    auto const* const from = reinterpret_cast<uint32_t const*>(&c);
    auto* const to = reinterpret_cast<uint32_t*>(&d);
    Instruction::fma(to[0], to[1], to[2], to[3], x[0], x[1], x[2], x[3], w[0], w[1], from[0],
                     from[1], from[2], from[3]);
  }
};
}  // namespace cutlass::arch

namespace cutlass_ops {
namespace {

using cutlass::MatrixCoord;
using cutlass::conv::Conv2dProblemSize;
using cutlass::layout::TensorNHWC;

// Vectors of each code of 8 bits, for taps outside of x.
struct Codes {
  alignas(kConvVector) uint8_t of[256][kConvVector] = {};
  constexpr Codes() {
    for (int code = 0; code < 256; ++code)
      for (uint8_t& byte : of[code]) byte = uint8_t(code);
  }
};
__device__ constexpr Codes kCodes;

// A CUTLASS iterator of pixels that yields the zero point of x, instead of zeros, where there are
// none. The weight has zeros wherever else there is nothing: behind a tap's channels.
template <class Pixels>
class Padded : public Pixels {
  using Vector = typename Pixels::AccessType;
  Vector const* const padding_;  // null: zeros

 public:
  struct Params : Pixels::Params {
    int zero_point = 0;
    Params() = default;
    explicit Params(typename Pixels::Params const& params, int zero)
        : Pixels::Params(params), zero_point(zero) {}
  };

  __device__ __forceinline__ Padded(Params const& params,
                                    cutlass::conv::Conv2dProblemSize const& size,
                                    typename Pixels::Element const* x, int thread,
                                    cutlass::MatrixCoord const& first)
      : Pixels(params, size, x, thread, first),
        padding_(params.zero_point
                     ? reinterpret_cast<Vector const*>(kCodes.of[params.zero_point & 0xff])
                     : nullptr) {}
  __device__ __forceinline__ bool valid() { return Pixels::valid() || padding_; }
  __device__ __forceinline__ Vector const* get() {
    return Pixels::valid() || !padding_ ? Pixels::get() : padding_;
  }
  __device__ __forceinline__ Padded& operator++() {
    Pixels::operator++();
    return *this;
  }
};

// CUTLASS's main loops with such an iterator.
template <class Mma>
struct PaddedMma;
template <class Shape, class X, class XShared, cutlass::arch::CacheOperation::Kind kX, class W,
          class WShared, cutlass::arch::CacheOperation::Kind kW, class Policy, int kStages,
          class Enable>
struct PaddedMma<cutlass::conv::threadblock::ImplicitGemmMultistage<
    Shape, X, XShared, kX, W, WShared, kW, Policy, kStages, Enable>> {
  using Type = cutlass::conv::threadblock::ImplicitGemmMultistage<Shape, Padded<X>, XShared, kX, W,
                                                                  WShared, kW, Policy, kStages>;
};
template <class Shape, class X, class XShared, class W, class WShared, class Sums, class Order,
          class Policy, class TransformX, class TransformW, class Enable>
struct PaddedMma<cutlass::conv::threadblock::ImplicitGemmPipelined<
    Shape, cutlass::conv::threadblock::TileIterator<X>, XShared, W, WShared, Sums, Order, Policy,
    TransformX, TransformW, Enable>> {
  using Type = cutlass::conv::threadblock::ImplicitGemmPipelined<
      Shape, cutlass::conv::threadblock::TileIterator<Padded<X>>, XShared, W, WShared, Sums, Order,
      Policy>;
};

// the index of that tile, behind the others
constexpr int kBytewise = int(std::size(kConvImplicitTiles));

template <class X, int kIndex>
struct Config {
  static constexpr ConvImplicitTile kTile =
      kIndex == kBytewise ? kConvBytewiseTile : kConvImplicitTiles[kIndex];
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n,
                       kBlockK = ConvImplicitTile::kBlockK;
  static constexpr int kThreads = kTile.warps() * 32;
  using Element = X;
  // CUTLASS reads only types and the width (a thread's channels in the epilogue) of this operator.
  using OutputOperator = cutlass::epilogue::thread::LinearCombination<int, 4, int, int>;
  using Convolution = cutlass::conv::kernel::DefaultConv2dFprop<
      X, TensorNHWC, int8_t, TensorNHWC, int, TensorNHWC, int, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, cutlass::gemm::GemmShape<kBlockM, kBlockN, kBlockK>,
      cutlass::gemm::GemmShape<kTile.warp, kTile.warp, kBlockK>,
      cutlass::gemm::GemmShape<16, 8, 32>, OutputOperator,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, kTile.stages,
      cutlass::arch::OpMultiplyAdd,
      kTile.bytewise ? cutlass::conv::IteratorAlgorithm::kAnalytic
                     : cutlass::conv::IteratorAlgorithm::kOptimized,
      cutlass::conv::StrideSupport::kStrided, kTile.bytewise ? 1 : kConvVector, kConvVector>;
  using Mma = typename PaddedMma<typename Convolution::Mma>::Type;
};

template <class C>
struct Params : ConvParams {
  int n_tiles, group_tiles;  // of all output channels; of a group of the convolution
  int k_tiles;
  Conv2dProblemSize size;  // of a group
  typename C::Mma::IteratorA::Params x;
  typename C::Mma::IteratorB::Params weight;
};

// The epilogue's visitor (CUTLASS's EpilogueFusedVisitorConcept): requantises and stores four
// channels at a time.
template <class ThreadMap>
class Requantize {
  using Thread = cutlass::epilogue::threadblock::PredicatedTileIterator<ThreadMap, int>;
  static constexpr int kColumns = ThreadMap::Iterations::kColumn;

 public:
  static constexpr int kIterations = Thread::kIterations,
                       kElementsPerAccess = Thread::kElementsPerAccess;
  using AccumulatorFragment = cutlass::Array<int, kElementsPerAccess>;
  static_assert(kElementsPerAccess == 4, "four channels are a word of the result");

  __device__ __forceinline__ Requantize(ConvParams const& params, int of, MatrixCoord first)
      : p(params),
        end_n((of + 1) * (params.problem.weight.n / params.problem.groups)),
        thread({}, nullptr, {p.pixels, end_n}, int(threadIdx.x), first) {}

  __device__ __forceinline__ void begin_epilogue() {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int i = 0; i < kElementsPerAccess; ++i) {
        int const n = min(channel(column) + i, end_n - 1);
        float const scale = row_scale(p.problem.weight, n);
        factors[column][i] = requantize_factor(p.problem, scale),
        biases[column][i] = compensated_bias(p.problem, n, scale);
      }
    }
  }

  __device__ __forceinline__ void visit(int, int, int column, int fragment,
                                        AccumulatorFragment const& sums) {
    int const row = thread.thread_start_row() + ThreadMap::iteration_offset(fragment).row(),
              n = channel(column);
    if (row >= p.pixels || n >= end_n) return;
    int64_t const index = int64_t(row) * p.problem.weight.n + n;
    int acc[kElementsPerAccess];
#pragma unroll
    for (int i = 0; i < kElementsPerAccess; ++i) acc[i] = wrapping_add(sums[i], biases[column][i]);
    if (p.whole_vectors) {
      uint32_t y[kElementsPerAccess];
#pragma unroll
      for (int i = 0; i < kElementsPerAccess; ++i)
        y[i] = uint32_t(requantize(p, acc[i], factors[column][i]));
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.problem.out) + index) =
          __byte_perm(__byte_perm(y[0], y[1], 0x0040), __byte_perm(y[2], y[3], 0x0040), 0x5410);
    } else {
#pragma unroll
      for (int i = 0; i < kElementsPerAccess; ++i)
        if (n + i < end_n) store_output(p, index + i, acc[i], factors[column][i]);
    }
  }

  __device__ __forceinline__ void end_step(int) { ++thread; }

  __device__ __forceinline__ void begin_step(int) {}
  __device__ __forceinline__ void begin_row(int) {}
  __device__ __forceinline__ void end_row(int) {}
  __device__ __forceinline__ void end_epilogue() {}

 private:
  __device__ __forceinline__ int channel(int column) const {
    return thread.thread_start_column() + column * ThreadMap::Delta::kColumn;
  }

  ConvParams const& p;
  int const end_n;  // of the group
  Thread thread;    // knows where the thread's pixels and channels are; it loads and stores nothing
  float factors[kColumns][kElementsPerAccess];
  int biases[kColumns][kElementsPerAccess];
};

template <class C>
struct EpilogueOf {
  using Existing = typename C::Convolution::Epilogue;
  using Visitor = Requantize<typename Existing::OutputTileIterator::ThreadMap>;
  using Type = typename cutlass::epilogue::threadblock::EpilogueWithVisitorFromExistingEpilogue<
      Visitor, Existing>::Epilogue;
};

template <class C>
union Storage {
  typename C::Mma::SharedStorage main_loop;
  typename EpilogueOf<C>::Type::SharedStorage epilogue;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads)
    conv_int8_implicit_gemm(__grid_constant__ Params<C> const p) {
  using Mma = typename C::Mma;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& storage = *reinterpret_cast<Storage<C>*>(shared);
  pdl_wait_and_launch_dependents();
  ConvProblem const& problem = p.problem;
  ConvWeight const& w = problem.weight;
  int const row = blockIdx.x / p.n_tiles, column = blockIdx.x - row * p.n_tiles,
            group = column / p.group_tiles;
  int const group_n = w.n / problem.groups, first_pixel = row * C::kBlockM;
  int const first_n = group * group_n + (column - group * p.group_tiles) * C::kBlockN,
            end_n = (group + 1) * group_n;
  int const image_pixels = p.size.P * p.size.Q, image = first_pixel / image_pixels;
  Conv2dProblemSize size = p.size;
  size.N -= image, size.K = end_n - first_n;
  int64_t const image_bytes = int64_t(problem.height) * problem.width * problem.channels;
  int64_t const row_bytes = int64_t(w.height) * w.width * stored_channels(w.channels);
  typename Mma::IteratorA x(
      p.x, size,
      static_cast<typename C::Element const*>(problem.x) + image * image_bytes + group * w.channels,
      int(threadIdx.x), {first_pixel - image * image_pixels, 0});
  typename Mma::IteratorB weight(p.weight, size, w.codes + first_n * row_bytes, int(threadIdx.x),
                                 {0, 0});
  int const warp = cutlass::canonical_warp_idx_sync(), lane = int(threadIdx.x) % 32;
  typename Mma::FragmentC sums;
  sums.clear();
  Mma(storage.main_loop, int(threadIdx.x), warp, lane)(p.k_tiles, sums, x, weight, sums);
  typename EpilogueOf<C>::Visitor requantize(p, group, {first_pixel, first_n});
  typename EpilogueOf<C>::Type(storage.epilogue, int(threadIdx.x), warp, lane)(requantize, sums);
}

// ---- launch

template <class C>
Status launch_config(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  using Mma = typename C::Mma;
  ConvProblem const& problem = params.problem;
  ConvWeight const& w = problem.weight;
  Params<C> p;
  static_cast<ConvParams&>(p) = params;
  p.group_tiles = int(ceil_div(w.n / problem.groups, C::kBlockN)),
  p.n_tiles = problem.groups * p.group_tiles;
  // Vectors of x have zeros behind a tap's channels, as vectors of the weight have.
  int const stored = stored_channels(w.channels),
            channels = C::kTile.bytewise ? w.channels : stored;
  p.size = Conv2dProblemSize(problem.batch, problem.height, problem.width, channels,
                             w.n / problem.groups, w.height, w.width, params.out_height,
                             params.out_width, problem.padding[0], problem.padding[1],
                             problem.stride[0], problem.stride[1], problem.dilation[0],
                             problem.dilation[1], cutlass::conv::Mode::kCrossCorrelation);
  p.k_tiles = cutlass::conv::implicit_gemm_k_iterations(cutlass::conv::Operator::kFprop, C::kBlockK,
                                                        p.size);
  int const line = problem.width * problem.channels;
  p.x = typename Mma::IteratorA::Params(
      C::Convolution::Mma::IteratorA::getParams(
          p.size, TensorNHWC(problem.channels, line, problem.height * line)),
      params.fills_padding ? problem.x_zero_point : 0);
  p.weight = typename Mma::IteratorB::Params(
      p.size, TensorNHWC(stored, w.width * stored, w.height * w.width * stored));
  return launch(conv_int8_implicit_gemm<C>, dim3(unsigned(plan.grid)), C::kThreads,
                int(sizeof(Storage<C>)), stream, p);
}

template <class X, int kIndex = 0>
Status launch_tile(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  using C = Config<X, kIndex>;
  if constexpr (kIndex < kBytewise)
    if (plan.block_m != C::kBlockM || plan.stages != C::kTile.stages)
      return launch_tile<X, kIndex + 1>(params, plan, stream);
  return launch_config<C>(params, plan, stream);
}

}  // namespace

Status launch_conv_int8_implicit_gemm(ConvParams const& params, ConvPlan const& plan,
                                      Stream stream) {
  return params.problem.x_unsigned ? launch_tile<uint8_t>(params, plan, stream)
                                   : launch_tile<int8_t>(params, plan, stream);
}

}  // namespace cutlass_ops
