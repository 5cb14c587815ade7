// Static int8 convolutions on Hopper, as implicit GEMMs: 128 pixels of the result x kBlockN output
// channels.
//
// K is taken tap by tap, 128 channels at a time. A stage holds, of x, the pixels under one tap,
// which TMA's im2col mode collects in the order of the result's pixels with zeros where there are
// none, and the weights of the tap. Both stay in shared memory for wgmma. One warp loads, two
// warpgroups multiply 64 pixels each; CTAs of a cluster take neighbouring pixels, and each loads a
// part of the weights for both. CTAs take tiles in turn, channels fastest, so that those at work
// share pixels in L2, and load the next tile's stages while they store one. Where two share an SM,
// one multiplies while the other stores.
//
// The zero point of x is taken from the sums afterwards (requantize.cuh), as if no tap lay outside
// of x, and put back for those that do. Outputs of four lanes are exchanged, so that a lane stores
// 8 bytes at a time.
#include <cutlass/arch/barrier.h>

#include "device/hopper.cuh"
#include "device/requantize.cuh"
#include "device/tensor_map.cuh"

// for other GPUs the kernels have no bodies, which read the members of Config
#pragma nv_diag_suppress 177

namespace cutlass_ops {
namespace {

struct Params : ConvParams {
  int stages;
  int n_tiles, group_tiles;   // of all output channels; of a group of the convolution
  int tiles;                  // of a cluster
  int k_blocks, last_slices;  // of a tap's channels; of 32, in the last block
};

template <bool kUnsigned_, int kBlockN_, int kCluster_>
struct Config {
  using Tile = ConvWgmmaTile;
  static constexpr Tile kTile = {kBlockN_, kCluster_};
  static constexpr bool kUnsigned = kUnsigned_;
  static constexpr int kBlockN = kBlockN_, kCluster = kCluster_;
  static constexpr int kPixelBytes = Tile::kBlockM * Tile::kBlockK,
                       kStageBytes = kTile.stage_bytes();
  static constexpr int kSums = kBlockN / 2;  // of a thread
  using Mma = decltype(cute::SM90::GMMA::ss_op_selector<
                       std::conditional_t<kUnsigned, uint8_t, int8_t>, int8_t, int32_t,
                       cute::Shape<cute::_64, cute::Int<kBlockN>, cute::_32>>());
};

struct Barriers {
  uint64_t full[ConvWgmmaTile::kMostStages], empty[ConvWgmmaTile::kMostStages];
};

struct Ring {
  int const stages;
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

template <class C>
struct Tile {
  int first_pixel, group, first_n, end_n;
  __device__ __forceinline__ Tile(Params const& p, int index, int rank) {
    int const row = index / p.n_tiles, column = index - row * p.n_tiles,
              channels = p.problem.weight.n / p.problem.groups;
    first_pixel = (row * C::kCluster + rank) * ConvWgmmaTile::kBlockM;
    group = column / p.group_tiles;
    first_n = group * channels + (column - group * p.group_tiles) * C::kBlockN;
    end_n = (group + 1) * channels;
  }
};

// ---- load

template <class C>
__device__ __forceinline__ void load_tiles(uint8_t* stages, Barriers& barriers,
                                           CUtensorMap const& pixels, CUtensorMap const& weights,
                                           Params const& p, int rank) {
  constexpr int kShare = C::kBlockN / C::kCluster;
  constexpr uint16_t kEveryCta = (1 << C::kCluster) - 1;
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  ConvProblem const& problem = p.problem;
  bool const leader = cute::elect_one_sync();
  Ring ring{p.stages};
  for (int index = blockIdx.x / C::kCluster; index < p.tiles; index += gridDim.x / C::kCluster) {
    Tile<C> const tile(p, index, rank);
    int const row = tile.first_pixel / p.out_width, image = row / p.out_height;
    int const x = (tile.first_pixel - row * p.out_width) * problem.stride[1] - problem.padding[1];
    int const y = (row - image * p.out_height) * problem.stride[0] - problem.padding[0];
    int const first_channel = tile.group * problem.weight.channels;
    int tap = 0;
    for (int i = 0; i < problem.weight.height; ++i) {
      for (int j = 0; j < problem.weight.width; ++j, ++tap) {
#pragma unroll 1
        for (int block = 0; block < p.k_blocks; ++block, ring.advance()) {
          uint8_t* const stage = stages + ring.stage * C::kStageBytes;
          uint64_t* const full = &barriers.full[ring.stage];
          int const channel = block * ConvWgmmaTile::kBlockK;
          ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
          if (!leader) continue;
          TransactionBarrier::arrive_and_expect_tx(full, C::kStageBytes);
          cute::SM90_TMA_LOAD_IM2COL_4D::copy(&pixels, full, stage, first_channel + channel, x, y,
                                              image, uint16_t(j * problem.dilation[1]),
                                              uint16_t(i * problem.dilation[0]));
          uint8_t* const to = stage + C::kPixelBytes + rank * kShare * ConvWgmmaTile::kBlockK;
          if constexpr (C::kCluster > 1) {
            cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&weights, full, kEveryCta, kHint, to, channel,
                                                   tap, tile.first_n + rank * kShare);
          } else {
            cute::SM90_TMA_LOAD_3D::copy(&weights, full, kHint, to, channel, tap, tile.first_n);
          }
        }
      }
    }
  }
}

// ---- multiply

template <class Mma, size_t... I>
__device__ __forceinline__ void multiply_slice(uint64_t a, uint64_t b, uint32_t* sums, bool add,
                                               std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  Mma::fma(a, b, sums[I]..., add ? ScaleOut::One : ScaleOut::Zero);
}

// The main loop of a warpgroup. Sums are those of one tile.
template <class C>
struct Multiplier {
  static constexpr int kSlices = ConvWgmmaTile::kBlockK / 32;

  uint8_t const* stages;
  Barriers& barriers;
  Params const& p;
  int const warpgroup;
  Ring ring;
  int previous = -1;

  __device__ __forceinline__ void release(int stage) {
    int const lane = threadIdx.x % 32;
    ClusterBarrier::arrive(&barriers.empty[stage], lane, lane < C::kCluster);
  }

  // The first so many slices of 32 channels of a stage.
  template <int kCount>
  __device__ __forceinline__ void multiply_stage(uint32_t (&sums)[C::kSums]) {
    uint8_t const* const stage = stages + ring.stage * C::kStageBytes;
    uint64_t const a = uniform_operand_descriptor(stage + warpgroup * 64 * ConvWgmmaTile::kBlockK);
    uint64_t const b = uniform_operand_descriptor(stage + C::kPixelBytes);
    TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
    fence_registers(sums);
    cute::warpgroup_arrive();
#pragma unroll
    for (int slice = 0; slice < kCount; ++slice) {
      multiply_slice<typename C::Mma>(a + slice * 2, b + slice * 2, sums,
                                      previous >= 0 || slice > 0,
                                      std::make_index_sequence<C::kSums>{});
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (previous >= 0) release(previous);
    fence_registers(sums);
    previous = ring.stage;
    ring.advance();
  }

  // A tile; of the last block of a tap's channels, kLast slices.
  template <int kLast>
  __device__ __forceinline__ void multiply_tile(uint32_t (&sums)[C::kSums]) {
    previous = -1;
    int const taps = p.problem.weight.height * p.problem.weight.width;
    if constexpr (kLast == kSlices) {
#pragma unroll 1
      for (int k = taps * p.k_blocks; k > 0; --k) multiply_stage<kSlices>(sums);
    } else {
#pragma unroll 1
      for (int tap = 0; tap < taps; ++tap) {
#pragma unroll 1
        for (int block = 1; block < p.k_blocks; ++block) multiply_stage<kSlices>(sums);
        multiply_stage<kLast>(sums);
      }
    }
    cute::warpgroup_wait<0>();
    fence_registers(sums);
    release(previous);
  }
};

// ---- store

// 16 rows of a warp whose outputs are bytes in whole vectors. kCuts: the zero point of x is put
// back for taps outside of x; `number` is the border class of row lane / 2.
template <class C, bool kCuts>
__device__ __forceinline__ void store_vectors(uint32_t (&sums)[C::kSums],
                                              ChannelVectors const* vectors, Params const& p,
                                              Tile<C> const& tile, int first_row, int number) {
  int const t = threadIdx.x % 4, row = first_row + threadIdx.x % 32 / 4, n = tile.first_n + t * 8;
  int cuts[2];  // where the sums of those taps' codes are; negative: nowhere
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!kCuts) break;
    int const own = __shfl_sync(~0u, number, int(threadIdx.x) % 32 / 4 * 2 + half * 16);
    int const group_n = tile.end_n - p.problem.weight.n / p.problem.groups;
    cuts[half] = own ? cut_sums_at(p, own, tile.group) + tile.first_n - group_n + t * 2 : -1;
  }
  uint8_t* const out = static_cast<uint8_t*>(p.problem.out) + int64_t(row) * p.problem.weight.n + n;
  uint32_t const shared = cute::cast_smem_ptr_to_uint(vectors + t * 2);
#pragma unroll
  for (int j = 0; j < C::kBlockN / 8; j += 4) {
    uint32_t pairs[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t v[4];
      load_shared(shared + (j + i) * 8 * int(sizeof(ChannelVectors)), v);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const* const own = sums + (j + i) * 4 + half * 2;
        int2 acc = make_int2(int(own[0] + v[1]), int(own[1] + v[3]));
        if (kCuts && cuts[half] >= 0 && tile.first_n + (j + i) * 8 < tile.end_n) {
          int2 outside;  // volatile: loaded ahead, they would take the registers of the sums
          asm volatile("ld.global.nc.v2.s32 {%0, %1}, [%2];"
                       : "=r"(outside.x), "=r"(outside.y)
                       : "l"(p.problem.weight.cut_sums + cuts[half] + (j + i) * 8));
          acc.x = wrapping_add(acc.x, wrapping_multiply(p.problem.x_zero_point, outside.x));
          acc.y = wrapping_add(acc.y, wrapping_multiply(p.problem.x_zero_point, outside.y));
        }
        int const first = requantize(p, acc.x, __uint_as_float(v[0]));
        int const second = requantize(p, acc.y, __uint_as_float(v[2]));
        pairs[half][i] = __byte_perm(first, second, 0x0040);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint2 const bytes = exchange_pairs(pairs[half], t);
      if (row + half * 8 < p.pixels && n + j * 8 < tile.end_n)
        *reinterpret_cast<uint2*>(out + half * 8 * p.problem.weight.n + j * 8) = bytes;
    }
  }
}

// Four neighbouring outputs of a row, or `count` of them. `outside`: sums of the codes of
// taps outside of x.
__device__ __forceinline__ void finish_four(Params const& p, int const (&sums)[4],
                                            int const (&outside)[4], ChannelVectors const* vectors,
                                            int64_t index, int count) {
  int y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ChannelVectors const v = vectors[i];
    int const acc = wrapping_add(wrapping_add(sums[i], v.bias),
                                 wrapping_multiply(p.problem.x_zero_point, outside[i]));
    y[i] = p.problem.out_type == ConvOutput::kInt32 ? acc : requantize(p, acc, v.factor);
  }
  if (p.whole_vectors) {
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.problem.out) + index) =
        __byte_perm(__byte_perm(y[0], y[1], 0x0040), __byte_perm(y[2], y[3], 0x0040), 0x5410);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= count) break;
    if (p.problem.out_type == ConvOutput::kInt32) {
      static_cast<int*>(p.problem.out)[index + i] = y[i];
    } else {
      static_cast<uint8_t*>(p.problem.out)[index + i] = uint8_t(y[i]);
    }
  }
}

// 16 rows of a warp with any outputs, through shared memory, which needs few registers. A lane has
// four channels of row lane / 2, whose border class is `number`.
template <class C>
__device__ __forceinline__ void store_any(uint32_t (&sums)[C::kSums], ChannelVectors const* vectors,
                                          int* staging, Params const& p, Tile<C> const& tile,
                                          int first_row, int number) {
  int const lane = threadIdx.x % 32, row = first_row + lane / 2, own = lane % 2 * 4;
  int64_t const line = int64_t(row) * p.problem.weight.n;
  int const group_n = tile.end_n - p.problem.weight.n / p.problem.groups;
  int const cut = cut_sums_at(p, number, tile.group) + tile.first_n - group_n;
#pragma unroll
  for (int j = 0; j < C::kBlockN / 8; ++j) {
    int* const staged = staging + j % 2 * (C::Tile::kStagedInts / 2);
    int const channel = j * 8 + own, n = tile.first_n + channel;
    bool const there = row < p.pixels && n < tile.end_n;
    int4 outside = make_int4(0, 0, 0, 0);
    if (there && number)
      outside = __ldg(reinterpret_cast<int4 const*>(p.problem.weight.cut_sums + cut + channel));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<uint2*>(staged + (lane / 4 + half * 8) * 8 + lane % 4 * 2) =
          make_uint2(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]);
    }
    __syncwarp();  // the other half has been read, too
    if (!there) continue;
    int4 const found = *reinterpret_cast<int4 const*>(staged + lane * 4);
    int const acc[4] = {found.x, found.y, found.z, found.w},
              added[4] = {outside.x, outside.y, outside.z, outside.w};
    finish_four(p, acc, added, vectors + channel, line + n, tile.end_n - n);
  }
}

template <class C>
__device__ __forceinline__ void store(uint32_t (&sums)[C::kSums], ChannelVectors const* vectors,
                                      int* staging, Params const& p, Tile<C> const& tile) {
  int const warp = threadIdx.x / 32, first_row = tile.first_pixel + warp * 16;
  int const number =
      p.cuts_taps ? border_class(p, min(first_row + int(threadIdx.x) % 32 / 2, p.pixels - 1)) : 0;
  if (p.whole_vectors && __any_sync(~0u, number != 0)) {
    store_vectors<C, true>(sums, vectors, p, tile, first_row, number);
  } else if (p.whole_vectors) {
    store_vectors<C, false>(sums, vectors, p, tile, first_row, number);
  } else {
    store_any<C>(sums, vectors, staging + warp * C::Tile::kStagedInts, p, tile, first_row, number);
  }
}

template <class C>
__device__ __forceinline__ void multiply_tiles(uint8_t const* stages, ChannelVectors* vectors,
                                               int* staging, Barriers& barriers, Params const& p,
                                               int rank, int warpgroup) {
  constexpr int kColumns = (C::kBlockN + 127) / 128;  // of a thread
  int const thread = threadIdx.x % 128;
  vectors += warpgroup * C::kBlockN;
  Multiplier<C> multiplier{stages, barriers, p, warpgroup, Ring{p.stages}};
  uint32_t sums[C::kSums];
  for (int index = blockIdx.x / C::kCluster; index < p.tiles; index += gridDim.x / C::kCluster) {
    Tile<C> const tile(p, index, rank);
    // Prefetched to L1 during the main loop, which has few registers.
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      prefetch_channel(p.problem, min(tile.first_n + i * 128 + thread, tile.end_n - 1));
    if (p.last_slices == 1) {
      multiplier.template multiply_tile<1>(sums);
    } else if (p.last_slices == 2) {
      multiplier.template multiply_tile<2>(sums);
    } else {
      multiplier.template multiply_tile<4>(sums);
    }
    // the last tile's vectors have been read
    cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      int const n = min(tile.first_n + i * 128 + thread, tile.end_n - 1);
      float const scale = row_scale(p.problem.weight, n);
      if (i * 128 + thread < C::kBlockN)
        vectors[i * 128 + thread] = {requantize_factor(p.problem, scale),
                                     compensated_bias(p.problem, n, scale)};
    }
    cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup);
    store<C>(sums, vectors, staging, p, tile);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kTile.threads(), C::kTile.ctas_per_sm())
    conv_int8_wgmma(__grid_constant__ CUtensorMap const pixels,
                    __grid_constant__ CUtensorMap const weights, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  auto* const vectors = reinterpret_cast<ChannelVectors*>(stages + p.stages * C::kStageBytes);
  auto* const staging = reinterpret_cast<int*>(vectors + 2 * C::kBlockN);
  auto& barriers = *reinterpret_cast<Barriers*>(staging + 8 * C::Tile::kStagedInts);
  int const rank = C::kCluster > 1 ? int(cute::block_rank_in_cluster()) : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      TransactionBarrier::init(&barriers.full[i], 1);
      ClusterBarrier::init(&barriers.empty[i], C::kCluster * 8);  // the warps that multiply
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (C::kCluster > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    __syncthreads();
  }
  pdl_wait();
  // Provably the same in all lanes, so that addresses of copies and MMAs stay in uniform registers.
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= 8) {
    if constexpr (C::kTile.moves_registers()) cutlass::arch::warpgroup_reg_dealloc<24>();
    if (warp == 8) load_tiles<C>(stages, barriers, pixels, weights, p, rank);
  } else {
    if constexpr (C::kTile.moves_registers()) cutlass::arch::warpgroup_reg_alloc<240>();
    multiply_tiles<C>(stages, vectors, staging, barriers, p, rank, warp / 4);
  }
  // A CTA must not exit before its neighbour's last arrivals and copies.
  if constexpr (C::kCluster > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
#endif
}

// ---- launch

// The pixels under one tap, for each pixel of the result.
Status encode_pixels(ConvProblem const& p, CUtensorMap* map) {
  ImageRows image;
  image.batch = p.batch;
  image.size[1] = p.height, image.size[2] = p.width, image.taps[1] = p.weight.height,
  image.taps[2] = p.weight.width;
  for (int axis : {0, 1}) {
    image.stride[axis + 1] = p.stride[axis], image.padding[axis + 1] = p.padding[axis];
    image.dilation[axis + 1] = p.dilation[axis];
  }
  return hopper::encode_pixels(p.x, 1, p.channels, p.channels, image, ConvWgmmaTile::kBlockM, map);
}

template <class C>
Status launch_config(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  ConvWeight const& w = params.problem.weight;
  Params p;
  static_cast<ConvParams&>(p) = params;
  p.stages = plan.stages;
  p.group_tiles = ceil_div(w.n / params.problem.groups, C::kBlockN),
  p.n_tiles = params.problem.groups * p.group_tiles;
  p.tiles = ceil_div(params.pixels, C::kCluster * ConvWgmmaTile::kBlockM) * p.n_tiles;
  p.k_blocks = ceil_div(w.channels, ConvWgmmaTile::kBlockK);
  p.last_slices = ceil_div(w.channels - (p.k_blocks - 1) * ConvWgmmaTile::kBlockK, 32);
  CUtensorMap pixels, weights;
  Status status = encode_pixels(params.problem, &pixels);
  cuuint64_t const stored = cuuint64_t(stored_channels(w.channels)),
                   taps = cuuint64_t(w.height * w.width);
  if (status.ok())
    status = hopper::encode<3>(
        CU_TENSOR_MAP_DATA_TYPE_UINT8, w.codes, {stored, taps, cuuint64_t(w.n)},
        {stored, stored * taps},
        {cuuint32_t(ConvWgmmaTile::kBlockK), 1, cuuint32_t(C::kBlockN / C::kCluster)},
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &weights);
  if (!status.ok()) return status;
  return launch_clusters(conv_int8_wgmma<C>, dim3(unsigned(plan.grid)), C::kCluster,
                         C::kTile.threads(), C::kTile.shared_bytes(plan.stages), stream, pixels,
                         weights, p);
}

template <bool kUnsigned>
Status launch_type(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  if (plan.block_n == 64) return launch_config<Config<kUnsigned, 64, 1>>(params, plan, stream);
  if (plan.block_n == 256) return launch_config<Config<kUnsigned, 256, 2>>(params, plan, stream);
  if (plan.block_n == 160) return launch_config<Config<kUnsigned, 160, 2>>(params, plan, stream);
  return launch_config<Config<kUnsigned, 128, 1>>(params, plan, stream);
}

}  // namespace

Status launch_conv_int8_wgmma(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  return params.problem.x_unsigned ? launch_type<true>(params, plan, stream)
                                   : launch_type<false>(params, plan, stream);
}

}  // namespace cutlass_ops
