// A few rows of x (16; 32 of 16 bits) times weights of any format on Hopper's wgmma, while a batch
// decodes, sm_90a.
//
//   cluster   up to nine row panels of 64 output features; its CTAs share K in equal slices
//   stage     a tile of K, 128 columns: the panels' codes and group vectors by bulk copies, x by
//             its tensor map once for all of them. One warp issues the copies, but those of x for
//             the first stages; those of weights before the kernel waits for its predecessor. Two
//             CTAs fit on an SM, so that the next launch's first stages arrive while this one ends.
//             With large 8-bit weights, or `one_cta`, one does, with the stages of two: the bytes
//             in flight on all SMs then cover the time from one launch's last product to the next
//             one's first. K is left whole there, and clusters get halves of panels, for equal
//             shares
//   quantise  x that is to be int8 becomes codes, or the values of codes, in its stage, every third
//             tile by one of the warpgroups that multiply
//   multiply  a warpgroup a panel at a time, weights through registers as operand A: a panel's
//             decoding in one hides behind products in the others. Three warpgroups, four of a CTA
//             that is alone, share the panels, or, where these are few, take turns at tiles
//   end       sums leave registers for the CTA of the cluster that ends with those features, by
//             st.async, and are added in a fixed order
//
// Experts' rows come in tiles of 16 of an expert. A cluster has a tile's row panels or, where these
// are `dealt`, each of the CTAs that run at a time an equal part of all tiles' row panels: it takes
// them in turns, without draining its stages between, and ends with each in registers.
//
// Two kernels differ in what they multiply:
//
//   wgmma_decode         codes minus zero points, exactly; after a tile, or with int8 x a group of
//                        32 or 64 columns, sum = fma(its sum, weight scale, sum), as in
//                        wgmma_gemm_a16.cu. Zero points of int8 x are compensated by sums of the
//                        tile's weights, which eight more columns of operand B, of ones, make
//   wgmma_decode_fold16  the weights' values, rounded to the 16 bits of x (device/fold.cuh): one
//                        set of sums over all of K
#pragma once

#include "kernels/wgmma_decode_config.cuh"
#include "kernels/wgmma_decode_load.cuh"
#include "kernels/wgmma_decode_multiply.cuh"

namespace cutlass_ops {
namespace {

// The sums of a piece in the order of wgmma's accumulators, of rows g, g + 8 and rows of x 2t,
// 2t + 1: the four lanes of neighbouring rows exchange theirs, until each has four neighbouring
// features of a row of x.
struct FeaturesOfRow {
  int x_row, feature;  // from the piece's first
  float sums[4];

  __device__ __forceinline__ FeaturesOfRow(float (&v)[4], int m_block) {
    int const lane = threadIdx.x % 32, i = lane / 4 % 4;
    bool const high = i & 2, odd = i & 1;
    float w[2][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float mine = high ? v[2 + c] : v[c], theirs = __shfl_xor_sync(~0u, high ? v[c] : v[2 + c], 8);
      w[0][c] = high ? theirs : mine, w[1][c] = high ? mine : theirs;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float mine = odd ? w[h][1] : w[h][0],
            theirs = __shfl_xor_sync(~0u, odd ? w[h][0] : w[h][1], 4);
      sums[2 * h] = odd ? theirs : mine, sums[2 * h + 1] = odd ? mine : theirs;
    }
    x_row = m_block * 8 + lane % 4 * 2 + odd;
    feature = i / 2 * 8 + lane / 16 * 4;
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& sum : sums) sum *= factor;
  }
};

// Stores the outputs of a piece: 16 features from n on and eight rows of x of an expert's tile.
__device__ __forceinline__ void finish_piece(float (&v)[4], int n, int m_block,
                                             SlotTile const& tile, Params const& p) {
  if (tile.rows <= m_block * 8) return;
  if (p.groups.gated) {
    finish_gated(v, end_scales(p), m_block * 8, n, tile, p.groups, p.epilogue);
  } else {
    FeaturesOfRow features(v, m_block);
    if (end_scales(p) && features.x_row < tile.rows)
      features.scale(p.x_row_scales[row_of_slot(p.groups, tile.slots[features.x_row])]);
    finish_group(features.sums, features.x_row, n + features.feature, tile, p.groups, p.epilogue);
  }
}

// Stores a piece without gate and bias straight from the lanes that have the sums: while other
// warps wait for weights, scattered stores cost less than the exchange between lanes that would
// coalesce them.
__device__ __forceinline__ void store_piece(float const* v, int n, int m_block,
                                            SlotTile const& tile, Params const& p) {
  int const lane = threadIdx.x % 32;
  if (tile.rows <= m_block * 8) return;
  n += lane / 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    int const x_row = m_block * 8 + lane % 4 * 2 + c;
    if (x_row >= tile.rows) continue;
    int const slot = tile.slots[x_row];
    float const scale = end_scales(p) ? p.x_row_scales[row_of_slot(p.groups, slot)] : 1.0f;
    float* const out = static_cast<float*>(p.epilogue.out) + int64_t(slot) * p.epilogue.n + n;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (n + 8 * h < p.epilogue.n) out[8 * h] = nan_unless_finite(v[2 * h + c] * scale);
  }
}

// A warp's position in the ring of stages.
struct RingPosition {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance(WgmmaDecodeShape const& shape) {
    stage += shape.sets;
    if (stage >= shape.stages) stage -= shape.stages, phase ^= 1;
  }
};

// A warpgroup's kRowPanels row panels, from `first` of the block's: their sums over the block's
// tiles, and those to the blocks that end with them, or, where row panels are dealt, to outputs.
template <class C, int kRowPanels>
__device__ __forceinline__ void consume(uint8_t* shared, Barriers& barriers, Params const& p,
                                        Part const& part, int warp, int first, RingPosition& ring,
                                        SlotTile const* tiles) {
  int const lane = threadIdx.x % 32, block = warp % 4, set = p.shape.sets > 1 ? warp / 4 : 0;
  float sums[kRowPanels][C::kSums] = {};
  // How many of these row panels are in the part's first tile: of three, for which there would be
  // too few registers, all.
  static_assert(WgmmaDecodeShape::kMostDealtPanels == 2);
  int const in_first = kRowPanels > 2 ? kRowPanels : part.in_first - first;
  // Pinned in registers, as in hopper_gemm.cuh.
  uint32_t row = first * kRowsPerPanel + lane / 4 * 8 + block * 2;  // in the order of group vectors
  uint32_t x_at = cute::cast_smem_ptr_to_uint(shared), base = x_at + p.shape.weights,
           weight_bytes = p.shape.weight_bytes;
  StageAddress address{base + first * C::kChunk + block * (C::kChunk / 4) + lane * kLaneBytes,
                       base + p.shape.scales + row * p.scale_bytes,
                       0,
                       base + p.shape.zeros + row,
                       base + p.shape.x_row_scales + lane % 4 * 8,
                       base + p.shape.x_row_scales + C::kXRowScaleBytes + lane % 4 * 2};
  uint64_t* full = barriers.full;
  asm volatile("" : "+r"(x_at), "+r"(address.units), "+r"(address.scales));
  if (!C::kFolds) asm volatile("" : "+l"(full));
  if (C::kFolds && (C::kZeros || C::kOffsets)) asm volatile("" : "+r"(row));
  if (C::kInt8 && !C::kGrouped) asm volatile("" : "+r"(address.x_rows));
  if (C::kXRowZeros) asm volatile("" : "+r"(address.x_row_zeros));
  int& stage = ring.stage;
  uint32_t& phase = ring.phase;
  int to_quantize = warp / 4 + C::kWarpgroups;
#pragma unroll 1
  for (int i = set; i < part.tiles; i += p.shape.sets) {
    if constexpr (C::kQuantizes) {
      // This warpgroup quantises every third tile, some time before it is multiplied: in another
      // stage than this one, if there are enough stages.
      int const ahead = p.shape.sets == 1                 ? 1
                        : p.shape.stages > C::kWarpgroups ? C::kWarpgroups
                                                          : 0;
      if (i + ahead == to_quantize) {
        bool const wraps = stage + ahead >= p.shape.stages;
        if (to_quantize < part.tiles)
          quantize<C>(x_at, stage + ahead - (wraps ? p.shape.stages : 0), phase ^ uint32_t(wraps),
                      full, p);
        // (Where a cluster has fewer row panels than warpgroups and these form one set, only
        // warpgroups with a panel quantise.)
        to_quantize += C::kMostRowPanels < C::kWarpgroups && p.shape.sets == 1
                           ? min(C::kWarpgroups, part.row_panels)
                           : C::kWarpgroups;
      }
    }
    uint32_t const offset = stage * weight_bytes;
    int const x_stride = C::kGrouped ? p.x_bytes : C::kXStride;
    uint64_t const x = uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 |
                       __shfl_sync(~0u, (x_at + stage * x_stride) >> 4 & 0x3fff, 0);
    TransactionBarrier::wait(full + stage, phase);
    StageAddress here{
        address.units + offset, address.scales + offset, 0,
        address.zeros + offset, address.x_rows + offset, address.x_row_zeros + offset};
    if (C::kFolds) {  // from the scales': registers
      here.offsets =
          here.scales + (p.shape.offsets - p.shape.scales) + row * (p.offset_bytes - p.scale_bytes);
      here.zeros = here.scales + (p.shape.zeros - p.shape.scales) - row * (p.scale_bytes - 1);
    }
    // int8: if another tile follows in that stage. (Without the branch the compiler needs more
    // registers than there are.)
    bool const releases = C::kInt8 && !C::kGrouped ? i + p.shape.stages < part.tiles : lane == 0;
    uint64_t* const empty = full + Barriers::kStages + stage;
    uint32_t const table = x_at + p.shape.table + lane * 4;
    if constexpr (C::kFolds) {
      if (p.weight_rows.count == 8) {
        multiply_values<C, kRowPanels, true>(x, in_first, here, table, p, releases, empty, sums);
      } else {
        multiply_values<C, kRowPanels, false>(x, in_first, here, table, p, releases, empty, sums);
      }
    } else if constexpr (!C::kInt8) {
      multiply_codes<C, kRowPanels>(x, in_first, here, table, p, releases, empty, sums);
    } else if constexpr (!C::kShortGroups) {
      multiply_int8<C, kRowPanels, 1>(x, in_first, here, p, releases, empty, sums);
    } else if (p.weight_rows.count == 2) {
      multiply_int8<C, kRowPanels, 2>(x, in_first, here, p, releases, empty, sums);
    } else {
      multiply_int8<C, kRowPanels, 4>(x, in_first, here, p, releases, empty, sums);
    }
    ring.advance(p.shape);
  }
#pragma unroll
  for (auto& of_row_panel : sums) decode::remove_unit<C>(of_row_panel);
  // For dealt row panels: the feature that a warp's sums begin with, and the tile of their rows.
  auto const first_feature = [&](int row_panel) {
    int const from = row_panel < in_first ? part.first_row_panel + first : -in_first;
    return (from + row_panel) * kRowsPerPanel + block * 16;
  };
  auto const tile_of = [&](int row_panel) -> SlotTile const& {
    return tiles[part.tile + (row_panel >= in_first)];
  };
  if (C::kDeals && p.shape.dealt && !p.groups.gated) {
#pragma unroll
    for (int i = 0; i < kRowPanels * C::kMBlocks; ++i) {
      int const row_panel = i / C::kMBlocks;
      store_piece(&sums[row_panel][i % C::kMBlocks * 4], first_feature(row_panel), i % C::kMBlocks,
                  tile_of(row_panel), p);
    }
    return;
  }
  if (C::kDeals && p.shape.dealt) {
    // Not unrolled: finish_piece is long.
#pragma unroll 1
    for (int i = 0; i < kRowPanels * C::kMBlocks; ++i) {
      float v[4] = {};
#pragma unroll
      for (int j = 0; j < kRowPanels * C::kMBlocks * 4; ++j)
        if (j / 4 == i) v[j % 4] = sums[j / 4 / C::kMBlocks][j % (4 * C::kMBlocks)];
      finish_piece(v, first_feature(i / C::kMBlocks), i % C::kMBlocks, tile_of(i / C::kMBlocks), p);
    }
    return;
  }
  cute::cluster_arrive_relaxed();  // all blocks have read their stages: sums overwrite them
  cute::cluster_wait();
  // [rank and set][row panel][piece][lane], a piece being 16 features of 8 rows of x.
  float4* received = reinterpret_cast<float4*>(shared);
  int const log_pieces = C::kLogPieces - p.log_cluster, from = part.rank * p.shape.sets + set;
#pragma unroll
  for (int row_panel = 0; row_panel < kRowPanels; ++row_panel)
#pragma unroll
    for (int tb = 0; tb < C::kMBlocks; ++tb) {
      int piece = block * C::kMBlocks + tb, to = piece >> log_pieces;
      float const* v = &sums[row_panel][tb * 4];
      int index =
          ((from * part.row_panels + first + row_panel) << log_pieces) + piece - (to << log_pieces);
      if (p.shape.cluster == 1) {
        received[index * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
      } else {
        store_remote(received + index * 32 + lane, make_float4(v[0], v[1], v[2], v[3]),
                     &barriers.sums, to);
      }
    }
}

// Stores the outputs of a piece of a matrix. Sums become outputs in the order of wgmma's
// accumulators, in which a thread has gate's and up's of the same outputs.
__device__ __forceinline__ void finish(float (&v)[4], int n, int m_block, float const* row_scales,
                                       bool gated, EpilogueParams const& p) {
  int const lane = threadIdx.x % 32, rows = gated ? 2 * p.n : p.n;
  if (n >= rows) return;
  if (row_scales) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      int const m = m_block * 8 + lane % 4 * 2 + c;
      float const scale = m < p.m ? row_scales[m] : 0.0f;
      v[c] *= scale, v[2 + c] *= scale;
    }
  }
#pragma unroll
  for (float& x : v) x = nan_unless_finite(x);
  if (p.bias) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const row = n + lane / 4 + h * 8;
      float const bias = row < rows ? load_float(p.bias, p.bias_type, row) : 0.0f;
      v[2 * h] += bias, v[2 * h + 1] += bias;
    }
  }
  activate_or_gate(v, p.activation, p.bounds, gated);
  if (gated) {
    if (p.limit < HUGE_VALF) {
#pragma unroll
      for (float& x : v) x = clamp_keeping_nan(x, -p.limit, p.limit);
    }
    int const m = m_block * 8 + lane / 4;
    return store_gated_pairs(v, m < p.m ? m : -1, n / 2, p);
  }
  FeaturesOfRow features(v, m_block);
  n += features.feature;
  if (features.x_row >= p.m || n >= p.n) return;
  finish_activated(features.sums, features.x_row, n, p);
  store_finished(features.sums, features.x_row, n, p);
}

// A thread's part of either kernel.
template <class C>
__device__ __forceinline__ void decode_rows(Maps const& maps, Params const& p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  __shared__ SlotTile tiles[WgmmaDecodeShape::kMostDealtTiles];  // of experts
  __shared__ Dealt dealt;
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == 0 && cute::elect_one_sync()) {
    if (!C::kGrouped) cute::prefetch_tma_descriptor(&maps.x_rows);
    if (!C::kOneCta) cute::prefetch_tma_descriptor(&maps.codes);
    cute::prefetch_tma_descriptor(&maps.scales);
    if (p.weight.offsets) cute::prefetch_tma_descriptor(&maps.offsets);
    if (p.weight.zeros) cute::prefetch_tma_descriptor(&maps.zeros);
  }
  auto const init_barriers = [&](int row_panels) {
    for (int i = 0; i < p.shape.stages; ++i) {
      TransactionBarrier::init(&barriers.full[i], C::kQuantizes ? 1 + 128
                                                  : C::kGrouped ? 1 + 32
                                                                : 1);
      TransactionBarrier::init(&barriers.raw[i], 1);
      ClusterBarrier::init(
          &barriers.empty[i],
          C::kReaders * (p.shape.sets > 1             ? 1
                         : C::kDeals && p.shape.dealt ? C::kWarpgroups
                                                      : min(C::kWarpgroups, row_panels)));
    }
    TransactionBarrier::init(&barriers.sums, 1);
    cutlass::arch::fence_barrier_init();
    TransactionBarrier::arrive_and_expect_tx(
        &barriers.sums, p.shape.sets * row_panels * kRowsPerPanel * C::kBlockM * 4);
  };
  Part part = [&] {
    if constexpr (C::kGrouped) {
      // A cluster's number of row panels does not depend on its tile.
      if (threadIdx.x == 32 * C::kWarps)
        init_barriers(p.units.count((blockIdx.x >> p.log_cluster) % p.shape.clusters));
      uint2* const counts = reinterpret_cast<uint2*>(shared);
      if (!p.groups.tiles) FoundTiles::clear(counts, p.groups.route.experts, C::kThreads);
      if (!p.groups.written) pdl_wait();
      auto const share_of = [&](int count) {
        Dealt const mine(p, count);
        if (threadIdx.x == 0) dealt = mine;
        return make_int2(mine.first_tile, mine.tiles(p.groups.row_panels));
      };
      if (p.groups.tiles) {
        int2 const share = share_of(*p.groups.count);
        for (int i = warp; i < share.y; i += C::kWarps + 1) tiles[i].load(p.groups, share.x + i);
      } else {
        __syncthreads();
        FoundTiles::store(p.groups.route, counts, tiles, share_of);
        cutlass::arch::fence_view_async_shared();  // before copies to the same memory
      }
      __syncthreads();
      return Part(p, dealt);
    } else {
      return Part(p, WgmmaDecodeShape::unit(C::kOneCta));
    }
  }();
  if constexpr (C::kGrouped) {
    // the grid covers the largest possible number of tiles
    if (!part.take(p, dealt)) return pdl_wait();
  } else if (threadIdx.x == 32 * C::kWarps) {
    init_barriers(part.row_panels);
  }
  if constexpr (C::kCodebook)
    C::Table::fill_table(shared + p.shape.table, p.weight.codebook, threadIdx.x, C::kThreads);
  if constexpr (C::kXRowZeros && !C::kQuantizes) {
    if (threadIdx.x < 128)
      for (int i = 0; i < p.shape.stages; ++i)
        store_ones(cute::cast_smem_ptr_to_uint(shared) + i * C::kXStride + C::kXBytes);
    cutlass::arch::fence_view_async_shared();
  }
  __syncthreads();
  if (warp == C::kWarps) {
    if constexpr (C::kGrouped) {
      produce_groups<C>(shared, barriers, maps, p, dealt, tiles);
    } else {
      if (cute::elect_one_sync()) produce<C>(shared, barriers, maps, p, part);
    }
    __syncwarp();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    return;
  }
  pdl_wait();
  if constexpr (!C::kGrouped) {
    if (warp == 0 && cute::elect_one_sync()) request_first_x<C>(shared, barriers, maps, p, part);
  }
  if constexpr (C::kQuantizes) {
    if (warp / 4 < part.tiles)
      quantize<C>(cute::cast_smem_ptr_to_uint(shared), warp / 4, 0, barriers.full, p);
  }
  RingPosition ring{p.shape.sets > 1 ? warp / 4 : 0, 0};
  bool more = false;
  do {
    int first = 0, count = part.row_panels;
    if (p.shape.sets == 1) {
      int base = part.row_panels / C::kWarpgroups, rest = part.row_panels % C::kWarpgroups,
          group = warp / 4;
      first = group * base + min(group, rest), count = base + (group < rest);
    }
    switch (count) {
      case 0:
        if (C::kDeals && p.shape.dealt) {  // a stage is free when all warpgroups have arrived
          for (int i = 0; i < part.tiles; ++i, ring.advance(p.shape)) {
            TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
            if (threadIdx.x % 32 == 0) ClusterBarrier::arrive(&barriers.empty[ring.stage]);
          }
        } else {
          cute::cluster_arrive_relaxed();
          cute::cluster_wait();
        }
        break;
      case 1:
        consume<C, 1>(shared, barriers, p, part, warp, first, ring, tiles);
        break;
      case 2:
        if constexpr (C::kMostRowPanels >= 2)
          consume<C, 2>(shared, barriers, p, part, warp, first, ring, tiles);
        break;
      case 3:
        if constexpr (C::kMostRowPanels >= 3)
          consume<C, 3>(shared, barriers, p, part, warp, first, ring, tiles);
        break;
    }
    if constexpr (C::kDeals) more = p.shape.dealt && part.take(p, dealt);
  } while (more);
  if (C::kDeals && p.shape.dealt) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    return;
  }
  if (p.shape.cluster == 1) {
    cutlass::arch::NamedBarrier::sync(32 * C::kWarps, 1);
  } else {
    TransactionBarrier::wait(&barriers.sums, 0);
  }
  int const log_pieces = C::kLogPieces - p.log_cluster, pieces = part.row_panels << log_pieces;
  auto const total = [&](int i, float (&v)[4]) {
    float4 const* from = reinterpret_cast<float4 const*>(shared) + i * 32 + threadIdx.x % 32;
#pragma unroll 2
    for (int r = 0; r < p.shape.sets << p.log_cluster; ++r, from += pieces * 32) {
      float4 theirs = *from;
      v[0] += theirs.x, v[1] += theirs.y, v[2] += theirs.z, v[3] += theirs.w;
    }
  };
  for (int i = warp; i < pieces; i += C::kWarps) {
    int const row_panel = i >> log_pieces,
              piece = (part.rank << log_pieces) + i - (row_panel << log_pieces);
    int const row = row_panel * kRowsPerPanel + piece / C::kMBlocks * 16,
              x_rows = piece % C::kMBlocks;
    if constexpr (C::kOneCta) {
      if (row < part.begin || row >= part.end) continue;
    }
    float v[4] = {};
    total(i, v);
    int const n = part.first_row_panel * kRowsPerPanel + row;
    if constexpr (C::kGrouped) {
      finish_piece(v, n, x_rows, tiles[part.tile], p);
    } else {
      bool const scales = C::kFolds || ends_with_x_row_scales<C>(p);
      finish(v, n, x_rows, scales ? p.x_row_scales : nullptr, p.weight.gated, p.epilogue);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kOneCta ? 64 : 0), C::kOneCta ? 1 : 2)
    wgmma_decode(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  decode_rows<C>(maps, p);
#endif
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kOneCta ? 64 : 0), C::kOneCta ? 1 : 2)
    wgmma_decode_fold16(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  decode_rows<C>(maps, p);
#endif
}

}  // namespace
}  // namespace cutlass_ops
