// Static int8 convolutions on Hopper, as implicit GEMMs: 128 pixels of the result x kBlockN output
// channels.
//
// K is taken tap by tap, in blocks of 128 channels. A stage of the ring holds the weights of one
// tap and block. The pixels of x come from one of two sources:
//   taps     the stage also holds the pixels under the tap. TMA's im2col mode collects them in the
//            order of the result's pixels, with zeros where there are none
//   windows  64 pixels are a patch of 8 x 8 in one image. All pixels under all taps of the patch
//            are loaded once a block of channels, as a box of the image. The operand of a tap is
//            eight lines of eight pixels inside it. wgmma can read them in place: the 128-byte
//            swizzle is a function of the address, so an operand may begin at any pixel, and the
//            stride from line to line is a field of the descriptor. With 3 x 3 taps a tile needs
//            200 pixels instead of 1152. Only for strides of 1
// A block of at most 64 channels, the last of a tap, has lines of 64 bytes in the 64-byte swizzle:
// TMA would fill the missing half of 128 bytes with zeros at 8 bytes a clock.
//
// All operands stay in shared memory. One warp loads; two warpgroups multiply, in turn a tile each,
// so that one stores while the other multiplies, or, where an SM has few tiles, 64 pixels each of
// every tile. The CTAs of a cluster take neighbouring pixels, and each loads a part of the weights
// for both; or, where there are few tiles, they share one tile, and each multiplies a slice of its
// channels. CTAs take tiles in turn, channels fastest, so that concurrent CTAs share pixels in L2,
// and load the next tile's stages while they store the current tile.
//
// The zero point of x is taken from the sums afterwards (requantize.cuh). TMA writes zeros for
// pixels outside of x; where x has a zero point, a warp writes it over them between loading and
// multiplying. Outputs of four lanes are exchanged, so that a lane stores 8 bytes at a time.
#include "device/tensor_map.cuh"
#include "kernels/conv_int8_wgmma_store.cuh"

// for other GPUs the kernels have no bodies, which read the members of Config
#pragma nv_diag_suppress 177

namespace cutlass_ops {
namespace {

// ---- multiply

template <class Mma, size_t... I>
__device__ __forceinline__ void multiply_step(uint64_t a, uint64_t b, uint32_t* sums,
                                              std::index_sequence<I...>) {
  Mma::fma(a, b, sums[I]...);
}

// The sums of a tile that a warpgroup has.
template <class C>
using Sums = uint32_t[C::kBands][C::kSums];

template <class C>
__device__ __forceinline__ void fence_sums(Sums<C>& sums) {
#pragma unroll
  for (auto& band : sums) fence_registers(band);
}

// The main loop of a warpgroup. Sums are those of one tile.
template <class C>
struct Multiplier {
  static constexpr int kSteps = ConvWgmmaTile::kBlockK / 32;

  uint8_t const* windows;
  uint8_t const* stages;
  Barriers& barriers;
  Params const& p;
  int const first, blocks;  // of its bands of 64 pixels in a tile; of channels
  uint64_t* const full;     // barriers where operands are whole: of stages or, of x, of windows
  Ring ring, buffer{ConvWindow::kBuffers};
  int previous = -1, read = -1;  // a stage, and a window, to be released after its last products

  __device__ __forceinline__ void release() {
    int const lane = threadIdx.x % 32;
    if constexpr (C::kCluster > 1) {
      ClusterBarrier::arrive(&barriers.empty[previous], lane, lane < C::kCluster);
    } else {
      if (lane == 0) ClusterBarrier::arrive(&barriers.empty[previous]);
    }
    if (C::kLoadsWindows && read >= 0) {
      if (lane == 0) ClusterBarrier::arrive(&barriers.window_empty[read]);
      read = -1;
    }
  }

  // Leaves out the stages of a tile of the other warpgroup.
  __device__ __forceinline__ void skip_tile() {
    ring.advance(blocks * p.problem.weight.height * p.problem.weight.width);
    if constexpr (C::kLoadsWindows) buffer.advance(blocks);
  }

  // The first so many steps of 32 channels of a stage. `pixels`: of the bands, where those of all
  // taps are loaded at once.
  template <int kCount>
  __device__ __forceinline__ void multiply_stage(Sums<C>& sums, uint64_t (&pixels)[C::kBands]) {
    constexpr int kLine = kCount <= 2 ? 64 : ConvWgmmaTile::kBlockK;
    uint8_t const* const stage = stages + ring.stage * C::kStageBytes;
    if constexpr (!C::kLoadsWindows) {
#pragma unroll
      for (int i = 0; i < C::kBands; ++i)
        pixels[i] = uniform_operand_descriptor<kLine>(stage + (first + i) * 64 * kLine);
    }
    uint64_t const weights = uniform_operand_descriptor<kLine>(stage + C::kPixelBytes);
    TransactionBarrier::wait(&(C::kLoadsWindows ? barriers.full : full)[ring.stage], ring.phase);
    fence_sums<C>(sums);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
#pragma unroll
      for (int i = 0; i < C::kBands; ++i)
        multiply_step<typename C::Mma>(pixels[i] + step * 2, weights + step * 2, sums[i],
                                       std::make_index_sequence<C::kSums>{});
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (previous >= 0) release();
    fence_sums<C>(sums);
    previous = ring.stage;
    ring.advance();
  }

  // All taps of a block of channels.
  template <int kCount>
  __device__ __forceinline__ void multiply_taps(Sums<C>& sums) {
    ConvProblem const& problem = p.problem;
    uint64_t pixels[C::kBands];
    if constexpr (C::kLoadsWindows) {
      constexpr int kLine = kCount <= 2 ? 64 : ConvWgmmaTile::kBlockK;
      constexpr int kStep = kLine / 16;  // of descriptors, from pixel to pixel
      uint64_t corners[C::kBands];
#pragma unroll
      for (int i = 0; i < C::kBands; ++i)
        corners[i] = uniform_operand_descriptor<kLine>(
            windows + (buffer.stage * C::Tile::kPatches + first + i) * p.window.bytes(),
            p.window.width);
      TransactionBarrier::wait(&full[buffer.stage], buffer.phase);
#pragma unroll 1
      for (int i = 0; i < problem.weight.height; ++i) {
        int step = i * problem.dilation[0] * p.window.width * kStep;
#pragma unroll 1
        for (int j = 0; j < problem.weight.width; ++j, step += problem.dilation[1] * kStep) {
#pragma unroll
          for (int band = 0; band < C::kBands; ++band) pixels[band] = corners[band] + step;
          multiply_stage<kCount>(sums, pixels);
        }
      }
      read = buffer.stage;
      buffer.advance();
    } else {
#pragma unroll 1
      for (int tap = problem.weight.height * problem.weight.width; tap > 0; --tap)
        multiply_stage<kCount>(sums, pixels);
    }
  }

  // A tile; of the last block of channels, kLast steps. `next`: the named barrier where the other
  // warpgroup waits for its turn; 0: there is none.
  template <int kLast>
  __device__ __forceinline__ void multiply_tile(Sums<C>& sums, int next) {
    previous = -1;
    fence_sums<C>(sums);
    if constexpr (kLast == kSteps) {
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) multiply_taps<kSteps>(sums);
    } else {
#pragma unroll 1
      for (int block = 1; block < blocks; ++block) multiply_taps<kSteps>(sums);
      multiply_taps<kLast>(sums);
    }
    if (C::kTurns && next) cutlass::arch::NamedBarrier::arrive(C::kWarpgroups * 128, next);
    cute::warpgroup_wait<0>();
    fence_sums<C>(sums);
    release();
  }
};

// ---- slices

// Adds the other slices' sums of a tile to the first slice's; returns false in the other CTAs. All
// stages have been read, and the first CTA receives the sums in their memory. The sums are
// integers, so their order is free.
template <class C>
__device__ __forceinline__ bool add_slices(uint32_t (&sums)[C::kSums], uint8_t const* received,
                                           Barriers& barriers, Params const& p, int rank) {
  auto const* const first = reinterpret_cast<float4 const*>(received) + threadIdx.x;
  constexpr int kVectors = C::kSums / 4, kStep = C::kWarpgroups * 128;
  static_assert(kVectors * kStep * 16 == C::Tile::slice_bytes(C::kBlockN));
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
  if (rank > 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float4 const v =
          make_float4(__uint_as_float(sums[4 * i]), __uint_as_float(sums[4 * i + 1]),
                      __uint_as_float(sums[4 * i + 2]), __uint_as_float(sums[4 * i + 3]));
      store_remote(const_cast<float4*>(first) + ((rank - 1) * kVectors + i) * kStep, v,
                   &barriers.sums, 0);
    }
    return false;
  }
  TransactionBarrier::wait(&barriers.sums, 0);
  for (int slice = 1; slice < p.slices; ++slice) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float4 const v = first[((slice - 1) * kVectors + i) * kStep];
      sums[4 * i] += __float_as_uint(v.x), sums[4 * i + 1] += __float_as_uint(v.y);
      sums[4 * i + 2] += __float_as_uint(v.z), sums[4 * i + 3] += __float_as_uint(v.w);
    }
  }
  return true;
}

// ---- tiles

// Named barriers, two each: for the threads of a warpgroup, and where it waits for its turn.
constexpr int kOwnBarriers = 1, kTurnBarriers = 3;

template <class C>
__device__ __forceinline__ void multiply_tiles(uint8_t const* windows, uint8_t const* stages,
                                               ChannelVectors* vectors, int* staging,
                                               Barriers& barriers, Params const& p, int rank,
                                               int warpgroup) {
  // Warpgroups that share a tile share its channels' vectors.
  constexpr int kThreads = C::kTile.sharing() * 128;
  constexpr int kColumns = (C::kBlockN + kThreads - 1) / kThreads;  // of a thread
  int const thread = threadIdx.x % kThreads, own = kOwnBarriers + (C::kTurns ? warpgroup : 0);
  auto* const biases = reinterpret_cast<float*>(vectors + C::kTile.vector_sets() * C::kBlockN) +
                       (C::kTurns ? warpgroup * C::kBlockN : 0);
  if (C::kTurns) vectors += warpgroup * C::kBlockN;
  XNumbers& x = barriers.x[C::kTurns ? warpgroup : 0];
  if (p.x_range && thread == 0) x = XNumbers(p);
  Blocks<C> const blocks(p, rank);
  int const band = C::kTurns ? 0 : warpgroup;
  uint64_t* const full = C::kLoadsWindows
                             ? p.fills_padding ? barriers.window_filled : barriers.window_full
                         : p.fills_padding ? barriers.filled
                                           : barriers.full;
  Multiplier<C> multiplier{windows, stages,        barriers, p, band, blocks.end - blocks.first,
                           full,    Ring{p.stages}};
  int const last_steps = blocks.end == p.k_blocks ? p.last_steps : Multiplier<C>::kSteps;
  int const clusters = gridDim.x / cluster_size<C>(p),
            step = C::kTurns ? C::kWarpgroups * clusters : clusters,
            first = blockIdx.x / cluster_size<C>(p) + (C::kTurns ? warpgroup * clusters : 0);
  if (C::kTurns && warpgroup > 0) multiplier.skip_tile();
  bool const keeps =
      step % p.n_tiles.divisor == 0;  // all tiles of a warpgroup have the same channels
  for (int index = first; index < p.tiles; index += step) {
    Tile<C> const tile(p, index, rank);
    Sums<C> sums = {};
    // Prefetched to L1 during the main loop, which has few registers.
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      prefetch_channel(p.problem, min(tile.first_n + i * kThreads + thread, tile.end_n - 1));
    // A wait for a stage tells apart two phases, so all stages of the tile before must be full.
    if (C::kTurns && index >= clusters)
      cutlass::arch::NamedBarrier::sync(C::kWarpgroups * 128, kTurnBarriers + warpgroup);
    int const next = index + clusters < p.tiles ? kTurnBarriers + (warpgroup ^ 1) : 0;
    if (last_steps == 1) {
      multiplier.template multiply_tile<1>(sums, next);
    } else if (last_steps == 2) {
      multiplier.template multiply_tile<2>(sums, next);
    } else {
      multiplier.template multiply_tile<4>(sums, next);
    }
    if constexpr (C::kTurns) multiplier.skip_tile();
    if constexpr (C::kSlices) {
      if (!add_slices<C>(sums[0], windows, barriers, p, rank)) return;
    }
    // The last tile's vectors have been read.
    cutlass::arch::NamedBarrier::sync(kThreads, own);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      int const column = i * kThreads + thread, n = min(tile.first_n + column, tile.end_n - 1);
      if (column < C::kBlockN && !(keeps && index != first)) {
        float const scale = row_scale(p.problem.weight, n);
        vectors[column] =
            p.x_range ? channel_vectors(p, n, scale, x) : channel_vectors(p, n, scale);
        if (p.x_range) biases[column] = float_bias(p.problem, n);
      }
    }
    cutlass::arch::NamedBarrier::sync(kThreads, own);
#pragma unroll
    for (int i = 0; i < C::kBands; ++i)
      store<C>(sums[i], vectors, biases, staging, p, tile, band + i);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kTile.threads(), C::kTile.ctas_per_sm())
    conv_int8_wgmma(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t windows[];
  uint8_t* const stages = windows + C::Tile(C::kTile).window_bytes(p.window);
  auto* const vectors = reinterpret_cast<ChannelVectors*>(stages + p.stages * C::kStageBytes);
  auto* const staging = reinterpret_cast<int*>(
      reinterpret_cast<float*>(vectors + C::kTile.vector_sets() * C::kBlockN) +
      C::kTile.vector_sets() * C::kBlockN);
  auto& barriers =
      *reinterpret_cast<Barriers*>(staging + 4 * C::kWarpgroups * C::Tile::kStagedInts);
  constexpr bool kClusters = C::kCluster > 1 || C::kSlices;
  int const rank = kClusters ? int(cute::block_rank_in_cluster()) : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      TransactionBarrier::init(&barriers.full[i], 1);
      ClusterBarrier::init(&barriers.filled[i], 1);
      ClusterBarrier::init(&barriers.empty[i],
                           C::kCluster * C::kTile.sharing() * 4);  // the warps that multiply
    }
    for (int i = 0; C::kLoadsWindows && i < ConvWindow::kBuffers; ++i) {
      TransactionBarrier::init(&barriers.window_full[i], 1);
      ClusterBarrier::init(&barriers.window_filled[i], 1);
      ClusterBarrier::init(&barriers.window_empty[i], C::kTile.sharing() * 4);
    }
    if constexpr (C::kSlices) {
      TransactionBarrier::init(&barriers.sums, 1);
      TransactionBarrier::arrive_and_expect_tx(&barriers.sums,
                                               (p.slices - 1) * C::Tile::slice_bytes(C::kBlockN));
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (kClusters) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    __syncthreads();
  }
  pdl_wait_and_launch_dependents();
  // Provably the same in all lanes, so that addresses of copies and MMAs stay in uniform registers.
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= 4 * C::kWarpgroups) {
    if constexpr (C::kTile.moves_registers()) cutlass::arch::warpgroup_reg_dealloc<56>();
    if (warp == 4 * C::kWarpgroups) load_tiles<C>(windows, stages, barriers, maps, p, rank);
    if (warp > 4 * C::kWarpgroups && p.fills_padding)
      fill_tiles<C>(windows, stages, barriers, p, rank, warp - 4 * C::kWarpgroups - 1);
    if constexpr (C::kSlices) {  // as add_slices()
      __syncwarp();
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    }
  } else {
    if constexpr (C::kTile.moves_registers()) cutlass::arch::warpgroup_reg_alloc<224>();
    multiply_tiles<C>(windows, stages, vectors, staging, barriers, p, rank, warp / 4);
  }
#endif
}

// ---- launch

// The pixels under one tap, for each pixel of the result, or windows; lines of `line` bytes.
Status encode_pixels(Params const& params, bool windows, int line, CUtensorMap* map) {
  ConvProblem const& p = params.problem;
  ConvWindow const& window = params.window;
  if (windows) {
    cuuint64_t const channels = cuuint64_t(p.channels), width = cuuint64_t(p.width),
                     height = cuuint64_t(p.height);
    return hopper::encode<4>(
        CU_TENSOR_MAP_DATA_TYPE_UINT8, p.x, {channels, width, height, cuuint64_t(p.batch)},
        {channels, channels * width, channels * width * height},
        {cuuint32_t(line), cuuint32_t(window.width), cuuint32_t(window.height), 1},
        hopper::swizzle_of(line), CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
  }
  ImageRows image;
  image.batch = p.batch;
  image.size[1] = p.height, image.size[2] = p.width, image.taps[1] = p.weight.height,
  image.taps[2] = p.weight.width;
  for (int axis : {0, 1}) {
    image.stride[axis + 1] = p.stride[axis], image.padding[axis + 1] = p.padding[axis];
    image.dilation[axis + 1] = p.dilation[axis];
  }
  return hopper::encode_pixels(p.x, 1, p.channels, p.channels, image, params.tile_pixels, map,
                               line);
}

template <class C>
Status encode_maps(Params const& params, Maps* maps) {
  ConvWeight const& w = params.problem.weight;
  cuuint64_t const stored = cuuint64_t(stored_channels(w.channels)),
                   taps = cuuint64_t(w.height * w.width);
  for (int narrow : {0, 1}) {
    int const line = narrow ? 64 : ConvWgmmaTile::kBlockK;
    Status status = encode_pixels(params, C::kLoadsWindows, line, &maps->pixels[narrow]);
    if (status.ok())
      status = hopper::encode<3>(
          CU_TENSOR_MAP_DATA_TYPE_UINT8, w.codes, {stored, taps, cuuint64_t(w.n)},
          {stored, stored * taps}, {cuuint32_t(line), 1, cuuint32_t(C::kBlockN / C::kCluster)},
          hopper::swizzle_of(line), CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &maps->weights[narrow]);
    if (!status.ok()) return status;
  }
  return {};
}

template <class C>
Status launch_config(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  ConvProblem const& problem = params.problem;
  ConvWeight const& w = problem.weight;
  Params p;
  static_cast<ConvParams&>(p) = params;
  p.stages = plan.stages;
  p.group_channels = w.n / problem.groups;
  int const group_tiles = ceil_div(p.group_channels, C::kBlockN),
            n_tiles = problem.groups * group_tiles;
  p.group_tiles = group_tiles, p.n_tiles = n_tiles;
  p.tile_pixels = std::min(C::kBlockM, params.pixels);
  p.slices = plan.slices, p.window = ConvWindow(problem);
  int const width = ceil_div(params.out_width, ConvWindow::kPatch),
            height = ceil_div(params.out_height, ConvWindow::kPatch);
  p.columns = params.out_width, p.lines = params.out_height;
  p.patches[0] = width, p.patches[1] = height, p.all_patches = problem.batch * width * height;
  int const rows =
      C::kLoadsWindows ? p.all_patches * ConvWindow::kPatch * ConvWindow::kPatch : params.pixels;
  p.tiles = ceil_div(rows, C::kCluster * C::kBlockM) * n_tiles;
  p.k_blocks = ceil_div(w.channels, ConvWgmmaTile::kBlockK);
  p.last_steps = ceil_div(w.channels - (p.k_blocks - 1) * ConvWgmmaTile::kBlockK, 32);
  Maps maps;
  Status const status = encode_maps<C>(p, &maps);
  if (!status.ok()) return status;
  LaunchShape const shape = {dim3(unsigned(plan.grid)), dim3(C::kTile.threads()), plan.cluster_size,
                             C::kTile.shared_bytes(plan.stages, p.window), plan.overlaps};
  return launch_shape(conv_int8_wgmma<C>, shape, stream, maps, p);
}

template <bool kUnsigned, bool kLoadsWindows>
Status launch_source(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  if (plan.slices > 1)
    return launch_config<Config<kUnsigned, 64, 1, kLoadsWindows, true>>(params, plan, stream);
  if (plan.block_n == 160)
    return launch_config<Config<kUnsigned, 160, 2, kLoadsWindows>>(params, plan, stream);
  if constexpr (!kLoadsWindows) {
    if (plan.block_n == 128 && plan.turns)
      return launch_config<Config<kUnsigned, 128, 1, false, false, true>>(params, plan, stream);
    if (plan.block_n == 128)
      return launch_config<Config<kUnsigned, 128, 1, false>>(params, plan, stream);
    if (!plan.turns) return launch_config<Config<kUnsigned, 64, 1, false>>(params, plan, stream);
  }
  return launch_config<Config<kUnsigned, 64, 1, kLoadsWindows, false, true>>(params, plan, stream);
}

template <bool kUnsigned>
Status launch_type(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  return plan.windows ? launch_source<kUnsigned, true>(params, plan, stream)
                      : launch_source<kUnsigned, false>(params, plan, stream);
}

}  // namespace

Status launch_conv_int8_wgmma(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  return params.problem.x_unsigned ? launch_type<true>(params, plan, stream)
                                   : launch_type<false>(params, plan, stream);
}

}  // namespace cutlass_ops
