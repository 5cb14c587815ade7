// The loading warps of the persistent wgmma GEMM (hopper_gemm.cuh): copies of weights and of rows
// of x into the ring of stages.
#pragma once

#include "device/hopper_tiles.cuh"
#include "device/launch.cuh"
#include "device/quantize.cuh"

namespace cutlass_ops::hopper {

// A warp prefetches a tile's residual into the cache before the sums are finished, because all
// tiles of a wave need it at the same time.
template <class C>
__device__ __forceinline__ void prefetch_residual(Params const& p, int row0, int m0) {
  EpilogueParams const& e = p.epilogue;
  if (!e.residual || !p.store_halves) return;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < C::kBlockM * C::kWarpgroups; i += 32) {
    int const row = m0 + i / C::kWarpgroups, n = row0 + i % C::kWarpgroups * kRowsPerPanel;
    if (row < e.m && n < e.n)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<uint16_t const*>(e.residual) +
                                                    row * e.residual_stride + n));
  }
}

// Where a cluster's CTAs have the same features, each copies one of the row panels into both.
template <class C>
__device__ __forceinline__ void share_row_panel(uint8_t* stage, uint64_t* full, Params const& p,
                                                int row_panel, int chunk, int vector) {
  static_assert(!C::kSplitsRows || C::kWarpgroups == C::kCluster);
  constexpr int kChunk = k_tile_bytes(C::kBits);
  constexpr uint16_t kEveryCta = (1 << C::kCluster) - 1;
  auto const copy = [&](void const* from, int to, int bytes) {
    bulk_copy_multicast(from, full, kEveryCta, stage + to, bytes);
  };
  copy(p.weight.codes + int64_t(chunk) * kChunk, C::kWeights + row_panel * kChunk, kChunk);
  if (C::kLoadScales) {
    copy(static_cast<uint8_t const*>(p.weight.scales) + int64_t(vector) * p.scale_bytes,
         C::kScales + row_panel * kRowsPerPanel * p.scale_bytes, kRowsPerPanel * p.scale_bytes);
  }
  if (C::kZeros)
    copy(p.weight.zeros + vector, C::kZeroPoints + row_panel * kRowsPerPanel, kRowsPerPanel);
}

// One warp issues the copies of weights, scales and zero points. They do not depend on the previous
// kernel and start at once.
template <class C>
__device__ __forceinline__ void produce_weights(uint8_t* stages, Barriers<C>& barriers,
                                                typename C::Params const& p, int rank) {
  using Copy = cute::SM90_BULK_COPY_G2S;
  constexpr int kChunk = k_tile_bytes(C::kBits);
  bool leader = cute::elect_one_sync();
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
    int row0 = first_feature<C>(work.pair, rank, p), k = work.first_k(p), end = work.end_k(p);
    // The last pair may reach beyond N.
    int row_panels = max(0, min(C::kWarpgroups, (rows_of_weight<C>(p) - row0) / kRowsPerPanel));
    if constexpr (C::kGrouped) row0 += work.expert * p.groups.row_panels * kRowsPerPanel;
    int bytes =
        row_panels * (kChunk + kRowsPerPanel * C::kGroups *
                                   ((C::kLoadScales ? p.scale_bytes : 0) + (C::kZeros ? 1 : 0)));
    // 32-bit indices, not pointers: this role has 40 registers.
    int weight_tiles = p.k_tiles, tile = k;
    if constexpr (C::kWindowTiles > 0)
      weight_tiles = p.weight_tiles, tile = WindowPosition<C::kWindowTiles>(k, p).tile;
    int chunk = row0 / kRowsPerPanel * weight_tiles + tile, group = tile / p.group_tiles;
    int until_next = (group + 1) * p.group_tiles - tile,
        vector = group * C::kGroups * p.n_pad + row0;
#pragma unroll 1
    for (; k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      uint64_t* full = &barriers.full[ring.stage];
      ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      if constexpr (C::kWindowTiles > 0) {
        WindowPosition<C::kWindowTiles> const coord(k, p);
        if (k == coord.compensation) {
          pdl_wait();  // the product's own launch may have made the sums
          if (leader) {
            int const windows = p.k_tiles - weight_tiles;
            TransactionBarrier::arrive_and_expect_tx(
                full, row_panels * (kChunk + kRowsPerPanel * p.scale_bytes));
#pragma unroll
            for (int row_panel = 0; row_panel < C::kWarpgroups; ++row_panel) {
              if (row_panel < row_panels)
                Copy::copy(p.weight.sums + (int64_t(row0 / kRowsPerPanel + row_panel) * windows +
                                            coord.window) *
                                               kChunk,
                           full, stage + C::kWeights + row_panel * kChunk, kChunk);
            }
            if (row_panels > 0)
              Copy::copy(
                  static_cast<uint8_t const*>(p.weight.sum_scales) + int64_t(row0) * p.scale_bytes,
                  full, stage + C::kScales, row_panels * kRowsPerPanel * p.scale_bytes);
          }
          continue;
        }
      }
      if (C::kSplitsRows && p.splits_rows) {
        if (leader) {
          TransactionBarrier::arrive_and_expect_tx(full, bytes);
          if (rank < row_panels)
            share_row_panel<C>(stage, full, p, rank, chunk + rank * weight_tiles,
                               vector + rank * kRowsPerPanel);
        }
      } else if (leader) {
        if constexpr (C::kGrouped) {
          if (k == work.first_k(p)) barriers.tiles[ring.stage] = work.stored();
        }
        TransactionBarrier::arrive_and_expect_tx(full, bytes);
#pragma unroll
        for (int row_panel = 0; row_panel < C::kWarpgroups; ++row_panel) {
          if (row_panel < row_panels)
            bulk_copy(p.weight.codes + int64_t(chunk + row_panel * weight_tiles) * kChunk, full,
                      stage + C::kWeights + row_panel * kChunk, kChunk, work.reads_once(p));
        }
#pragma unroll
        for (int i = 0; i < C::kGroups; ++i) {
          int64_t const from = vector + i * p.n_pad;
          if (C::kLoadScales && row_panels > 0)
            Copy::copy(static_cast<uint8_t const*>(p.weight.scales) + from * p.scale_bytes, full,
                       stage + C::kScales + i * C::kNextScales,
                       row_panels * kRowsPerPanel * p.scale_bytes);
          if (C::kZeros && row_panels > 0)
            Copy::copy(p.weight.zeros + from, full, stage + C::kZeroPoints + i * C::kNextZeroPoints,
                       row_panels * kRowsPerPanel);
        }
      }
      ++chunk;
      if (--until_next == 0) until_next = p.group_tiles, vector += C::kGroups * p.n_pad;
    }
  }
  wait_until_read(barriers.empty, ring);
}

// The rows of x of a tile that a CTA copies, and the CTAs that receive them: its half for both or,
// if the CTAs have different rows, all rows of its tile.
template <class C>
struct XRowsShare {
  int first, copied, loaded;  // in the tile; loaded: of it in all
  uint16_t ctas;              // a bit each

  __device__ __forceinline__ XRowsShare(Params const& p, int rank) {
    if (C::kSplitsRows && p.splits_rows) {
      first = 0, copied = loaded = C::kBlockM, ctas = uint16_t(1 << rank);
    } else {
      copied = C::kShortTiles ? p.half_x_rows : C::kBlockM / C::kCluster;
      first = rank * copied, loaded = C::kCluster * copied, ctas = (1 << C::kCluster) - 1;
    }
  }
};

// Another warp issues the copies of the rows of x, and of their scales.
template <class C>
__device__ __forceinline__ void produce_x_rows(uint8_t* stages, Barriers<C>& barriers,
                                               typename C::Params const& p, CUtensorMap const& map,
                                               int rank) {
  XRowsShare<C> const share(p, rank);
  pdl_wait_and_launch_dependents();
  bool leader = cute::elect_one_sync();
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
    int m0 = first_x_row<C>(work, rank, p), end = work.end_k(p);
    if constexpr (!C::kGrouped) prefetch_residual<C>(p, first_feature<C>(work.pair, rank, p), m0);
    // prepare_pixels() loads the scales of an image. In a cluster along M, all rows of a CTA's tile
    // may be beyond the last row of x.
    int scaled = !C::kLoadXRowScales || C::kQuantizes || (C::kImages && p.image.columns)
                     ? 0
                     : min(C::kBlockM, max(0, p.x.stride - m0));
    int bytes =
        C::kColumnPanels * share.loaded * C::kSwizzleBytes + scaled * (C::kLoadXRowZeros ? 5 : 4);
    XRows<C::kPanelColumns, C::kImages> x_rows(p.image, m0 + share.first, work.first_k(p));
#pragma unroll 1
    for (int k = work.first_k(p); k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      uint64_t* full = &barriers.full[ring.stage];
      ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      if constexpr (C::kWindowTiles > 0) {
        WindowPosition<C::kWindowTiles> const coord(k, p);
        bool const compensates = k == coord.compensation;
        int const row =
            compensates ? coord.window * C::kWindowTiles / kTilesPerZeroRow : coord.tile;
        if (leader) {
          TransactionBarrier::arrive_and_expect_tx(full, bytes);
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(
              compensates ? &p.zero_values : &map, full, share.ctas,
              uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
              stage + C::kActivations + share.first * C::kSwizzleBytes,
              row * (compensates ? kZeroRow : kKPerTile), m0 + share.first);
          cute::SM90_BULK_COPY_G2S::copy(
              (compensates ? p.x.zero_scales : p.x.scales) + int64_t(row) * p.x.stride + m0, full,
              stage + C::kXRowScales, scaled * 4);
        }
      } else {
        if (leader) TransactionBarrier::arrive_and_expect_tx(full, bytes);
#pragma unroll
        for (int panel = 0; panel < C::kColumnPanels; ++panel)
          x_rows.copy_next(
              leader, map, full, share.ctas,
              stage + C::kActivations + panel * C::kPanelBytes + share.first * C::kSwizzleBytes,
              k * kKPerTile + panel * C::kPanelColumns, p.weight.k,
              share.copied * C::kSwizzleBytes);
        if (leader) {
          int64_t vector = int64_t(k) * p.x.stride + m0;
          if (scaled)
            cute::SM90_BULK_COPY_G2S::copy(p.x.scales + vector, full, stage + C::kXRowScales,
                                           scaled * 4);
          if (C::kLoadXRowZeros)
            cute::SM90_BULK_COPY_G2S::copy(p.x.zeros + vector, full, stage + C::kXRowZeros, scaled);
        }
      }
    }
  }
}

// Copies this CTA's half of experts' rows through an index, by one of kIndexWarps warps. run() has
// waited for the previous kernels.
template <class C>
__device__ __forceinline__ void produce_rows_by_index(uint8_t* stages, Barriers<C>& barriers,
                                                      typename C::Params const& p, int rank,
                                                      int warp) {
  uint32_t const first = cute::cast_smem_ptr_to_uint(stages) + C::kActivations;
  bool const leader = cute::elect_one_sync() && warp == 0;
  Ring<C::kStages> ring;
  int const clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work const work(index, p);
    with_rows_of<C>(work, [&](auto taken) {
      constexpr int kHalf = taken() / C::kCluster;
      RowsByIndex<kHalf, C::kColumnPanels, C::kPanelBytes, kIndexWarps> const rows(
          p.groups, p.rows, warp, [&](int row) { return slot_of_row(work, rank * kHalf + row); });
#pragma unroll 1
      for (int k = work.first_k(p), end = work.end_k(p); k < end; ++k, ring.advance()) {
        uint64_t* const full = &barriers.full[ring.stage];
        ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
        if (leader)  // the other CTA's half
          TransactionBarrier::arrive_and_expect_tx(full,
                                                   C::kColumnPanels * kHalf * C::kSwizzleBytes);
        rows.template copy<false>(
            p.rows, k * C::kColumnPanels * C::kSwizzleBytes,
            first + ring.stage * C::kStageBytes + rank * kHalf * C::kSwizzleBytes, full,
            &barriers.half[ring.stage]);
      }
    });
  }
}

// Sends the first `bytes` of panels of x, which this CTA's lanes have copied, to the other CTA of
// the cluster: by one lane.
template <int kPanels, int kPanelBytes>
__device__ __forceinline__ void send_panels(uint8_t* panels, uint64_t* full, int rank, int bytes) {
  cutlass::arch::fence_view_async_shared();  // TMA reads what lanes have written
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    send(panels + panel * kPanelBytes, full, rank ^ 1, bytes);
}

// The scales of a stage's weights as fp32 numbers, times C::kUnit, in their place.
template <class C>
__device__ __forceinline__ void prepare_weight_scales(uint8_t* stage, Params const& p, int lane) {
  static_assert(C::kRows % 128 == 0, "a lane takes four at a time");
  float scales[C::kRows / 32];
#pragma unroll
  for (int i = 0; i < C::kRows / 32; i += 4) {
    load_float4(stage + C::kScales, p.weight.scale_type, i * 32 + lane * 4,
                reinterpret_cast<float (&)[4]>(scales[i]));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < C::kRows / 32; i += 4) {
    reinterpret_cast<float4*>(stage + C::kScales)[i * 8 + lane] =
        make_float4(scales[i] * C::kUnit, scales[i + 1] * C::kUnit, scales[i + 2] * C::kUnit,
                    scales[i + 3] * C::kUnit);
  }
  cutlass::arch::fence_view_async_shared();  // before the copies that come next to this place
}

// A warp reorders the scales of x in every stage, and behind them zero points as floats, into the
// accumulators' order, so that a thread loads those of its four rows of x of 16 at once. Register
// 4j + e % 2 of a thread is of row 8j + 2t + e of x: place 4t + 2 (j % 2) + e. Where
// C::kPrepareScales, it also prepares the weights' scales.
template <class C>
__device__ __forceinline__ void prepare_x_rows(uint8_t* stages, Barriers<C>& barriers,
                                               typename C::Params const& p) {
  Ring<C::kStages> ring;
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p), lane = threadIdx.x % 32;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
#pragma unroll 1
    for (int k = work.first_k(p), end = work.end_k(p); k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
#pragma unroll
      for (int first = 0; first < C::kBlockM / 4; first += 32) {
        // and x_row + 1, + 8 and + 9
        int four = first + lane, x_row = four / 4 * 16 + four % 4 * 2;
        if (first + 32 <= C::kBlockM / 4 || four < C::kBlockM / 4) {
          float2 low, high;
          auto* scales = reinterpret_cast<float2 const*>(stage + C::kXRowScales + x_row * 4);
          low = scales[0], high = scales[4];
          auto* factors = reinterpret_cast<float4*>(stage + C::kXRowFactors) + four;
          factors[0] = make_float4(low.x, low.y, high.x, high.y);
          if constexpr (C::kLoadXRowZeros) {
            auto* zeros = reinterpret_cast<char2 const*>(stage + C::kXRowZeros + x_row);
            char2 low_zeros = zeros[0], high_zeros = zeros[4];
            factors[C::kBlockM / 4] =
                make_float4(low_zeros.x, low_zeros.y, high_zeros.x, high_zeros.y);
          }
        }
      }
      if constexpr (C::kPrepareScales) prepare_weight_scales<C>(stage, p, lane);
      ClusterBarrier::arrive(&barriers.prepared[ring.stage]);
    }
  }
}

// The place of a tile's row of x in that order.
__device__ __forceinline__ unsigned factor_place(unsigned row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
}
template <class C>
__device__ __forceinline__ void store_factor(float* factors, int row, float scale) {
  if (row < C::kBlockM) factors[factor_place(unsigned(row))] = scale;
}

// prepare_x_rows() for an image, by kPixelWarps warps: reads the scales of the pixels under a
// tile's tap from global memory. The next tile's scales are in flight while a tile's are stored.
constexpr int kPixelWarps = 2;
template <class C>
__device__ __forceinline__ void prepare_pixels(uint8_t* stages, Barriers<C>& barriers,
                                               typename C::Params const& p, int warp) {
  constexpr int kStep = kPixelWarps * 32, kEach = (C::kBlockM + kStep - 1) / kStep;
  ImageTiles const& image = p.image;
  Ring<C::kStages> ring;
  int const clusters = gridDim.x / C::kCluster, total = C::Work::count(p), lane = threadIdx.x % 32,
            first = warp * 32 + lane;
  int const rank = int(cute::block_rank_in_cluster());
  pdl_wait();
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work work(index, p);
    int const m0 = first_x_row<C>(work, rank, p), end = work.end_k(p);
    int k = work.first_k(p);
    TapColumns tap(image, k);
    RowPixel pixels[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) pixels[i] = RowPixel(image, m0 + first + i * kStep);
    float scales[kEach];
    auto const load = [&](bool first_tile) {
      if (!first_tile && image.scale_step == 0 && tap.channel > 0)
        return tap.advance(image, kKPerTile);
      float const* const from =
          p.x.scales + int64_t(tap.channel / kKPerTile * image.scale_step) * p.x.stride;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        int const pixel = pixels[i].under(image, tap);
        scales[i] = pixel < 0 ? 0.0f : from[pixel];
      }
      tap.advance(image, kKPerTile);
    };
    load(true);
#pragma unroll 1
    for (; k < end; ++k, ring.advance()) {
      uint8_t* stage = stages + ring.stage * C::kStageBytes;
      TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
      auto* factors = reinterpret_cast<float*>(stage + C::kXRowFactors);
#pragma unroll
      for (int i = 0; i < kEach; ++i) store_factor<C>(factors, first + i * kStep, scales[i]);
      if (k + 1 < end) load(false);
      if constexpr (C::kPrepareScales) {
        if (warp == 0) prepare_weight_scales<C>(stage, p, lane);
      }
      ClusterBarrier::arrive(&barriers.prepared[ring.stage]);
    }
  }
}

// Where experts' rows are read through an index, a warp sends this CTA's half of a stage to the
// other CTA. It is prepare_x_rows(), too, one stage behind, since a stage is full only when the
// other CTA has sent its half.
template <class C>
__device__ __forceinline__ void send_rows(uint8_t* stages, Barriers<C>& barriers,
                                          typename C::Params const& p, int rank) {
  constexpr int kEach = (C::kBlockM + 31) / 32;
  Ring<C::kStages> ring;
  int const clusters = gridDim.x / C::kCluster, total = C::Work::count(p), lane = threadIdx.x % 32;
  bool const leader = cute::elect_one_sync();
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work const work(index, p);
    int const half_bytes = taken_rows<C>(work) / C::kCluster * C::kSwizzleBytes;
    int const begin = work.first_k(p), end = work.end_k(p);
    int rows[kEach];
    float scales[kEach];
    auto const load = [&](int k) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) scales[i] = p.x.scales[int64_t(k) * p.x.stride + rows[i]];
    };
    if constexpr (C::kLoadXRowScales) {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        rows[i] = row_of_slot(p.groups, slot_of_row(work, i * 32 + lane));
      load(begin);
    }
    auto const prepare = [&](int k) {
      Ring<C::kStages> const before = ring.before();
      uint8_t* const stage = stages + before.stage * C::kStageBytes;
      TransactionBarrier::wait(&barriers.full[before.stage], before.phase);
      auto* factors = reinterpret_cast<float*>(stage + C::kXRowFactors);
#pragma unroll
      for (int i = 0; i < kEach; ++i) store_factor<C>(factors, i * 32 + lane, scales[i]);
      if (k + 1 < end) load(k + 1);
      if constexpr (C::kPrepareScales) prepare_weight_scales<C>(stage, p, lane);
      ClusterBarrier::arrive(&barriers.prepared[before.stage]);
    };
#pragma unroll 1
    for (int k = begin; k < end; ++k, ring.advance()) {
      ClusterBarrier::wait(&barriers.half[ring.stage], ring.phase);
      if (leader)
        send_panels<C::kColumnPanels, C::kPanelBytes>(
            stages + ring.stage * C::kStageBytes + C::kActivations + rank * half_bytes,
            &barriers.full[ring.stage], rank, half_bytes);
      if constexpr (C::kLoadXRowScales) {
        if (k > begin) prepare(k - 1);
      }
    }
    if constexpr (C::kLoadXRowScales) prepare(end - 1);
  }
}

struct NoBegin {
  template <class Ring>
  __device__ void operator()(Ring const&, int) const {}
};

// Calls f with the number of each stage that a CTA receives, in turn, and at the start of each tile
// begin with the tile's first place in the ring and its number of stages.
template <class C, class F, class Begin = NoBegin>
__device__ __forceinline__ void for_each_stage(Barriers<C>& barriers, typename C::Params const& p,
                                               F const& f, Begin const& begin = {}) {
  Ring<C::kStages> ring;
  int const clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work const work(index, p);
    int k = work.first_k(p), end = work.end_k(p);
    begin(ring, end - k);
#pragma unroll 1
    for (; k < end; ++k, ring.advance()) {
      TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
      f(ring.stage);
    }
  }
}

// Calls f with each stage of x and weights, which a warp prepares by it.
template <class C, class F, class Begin = NoBegin>
__device__ __forceinline__ void prepare_each_stage(uint8_t* stages, Barriers<C>& barriers,
                                                   typename C::Params const& p, F const& f,
                                                   Begin const& begin = {}) {
  for_each_stage<C>(
      barriers, p,
      [&](int stage) {
        f(stages + stage * C::kStageBytes);
        __syncwarp();
        if (threadIdx.x % 32 == 0) ClusterBarrier::arrive(&barriers.prepared[stage]);
      },
      begin);
}

// A warp prepares the weights' scales where others quantise x.
template <class C>
__device__ __forceinline__ void prepare_all_weight_scales(uint8_t* stages, Barriers<C>& barriers,
                                                          typename C::Params const& p) {
  prepare_each_stage<C>(stages, barriers, p, [&](uint8_t* stage) {
    prepare_weight_scales<C>(stage, p, threadIdx.x % 32);
  });
}

// A lane's columns of a row of a stage's x. Lanes share a row by eights: each has 16 columns, of 64
// in a panel.
template <class C, class T>
struct StageColumns {
  int sixteen = threadIdx.x % 8, panel = sixteen / 4;
  Columns<T> columns;  // in the second panel the last eight come first
  uint8_t* codes;      // of the row: they lie where its first panel was

  __device__ __forceinline__ StageColumns(uint8_t* stage, int row)
      : codes(stage + C::kActivations + row * C::kSwizzleBytes) {
    // Lanes of the second panel load their halves in the other order, since both panels have the
    // same banks.
    int const half = sixteen % 4 * 2 + panel;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint4 const v = *reinterpret_cast<uint4 const*>(codes + panel * C::kPanelBytes +
                                                      (((half ^ h) ^ row % 8) << 4));
      columns.words[4 * h] = v.x, columns.words[4 * h + 1] = v.y;
      columns.words[4 * h + 2] = v.z, columns.words[4 * h + 3] = v.w;
    }
  }

  // of the row's columns in this stage
  __device__ __forceinline__ Range<true> range() const {
    Span<T, true> span;
    span.add(columns);
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) span.add(span.of_lane(distance));
    return span.range();
  }

  // The codes in place of the floats, which all lanes have loaded, and the row's scale in the
  // accumulators' order.
  __device__ __forceinline__ void quantize(uint8_t* stage, int row, Range<true> const& range) {
    __syncwarp();
    Quantizer<true> const quantizer(range);
    *reinterpret_cast<uint4*>(codes + ((sixteen ^ row % 8) << 4)) =
        codes_of(columns, quantizer, panel == 1);
    if (sixteen == 0)
      reinterpret_cast<float*>(stage + C::kXRowFactors)[factor_place(row)] = quantizer.scale;
  }
};

// Quantises a tile's rows of x in blocks of a K tile's columns, by the range of all x, or by those
// of whole rows, whose K tiles the ring then holds at once; by kQuantizingWarps warps, as
// quantize_activations does.
constexpr int kQuantizingWarps = 12;
template <class C>
__device__ __forceinline__ void quantize_x_rows(uint8_t* stages, Barriers<C>& barriers,
                                                typename C::Params const& p, int warp) {
  constexpr int kRows = C::kBlockM / kQuantizingWarps;
  static_assert(C::kBlockM % kQuantizingWarps == 0 && kRows % 4 == 0 && kRows <= 32);
  static_assert(C::kStages >= kMostQuantizedRowTiles);
  int const first = warp * kRows + threadIdx.x % 32 / 8;
  bool const one_range = p.x.range, whole_rows = p.quantizes_rows;
  // The ends of ranges that are known before a stage is quantised: lane i of eight has that of its
  // row of the i-th four.
  float known = 0.0f;
  if (one_range) {
    pdl_wait();
    known = given_range<true>(p.x.range).high;
  }
  auto const quantize = [&](auto type) {
    using Lane = StageColumns<C, decltype(type)>;
    prepare_each_stage<C>(
        stages, barriers, p,
        [&](uint8_t* stage) {
#pragma unroll 1
          for (int i = 0; i < kRows / 4; ++i) {
            Lane lane(stage, first + i * 4);
            Range<true> const range = one_range || whole_rows
                                          ? Range<true>{0.0f, __shfl_sync(~0u, known, i, 8)}
                                          : lane.range();
            lane.quantize(stage, first + i * 4, range);
          }
          cutlass::arch::fence_view_async_shared();  // before the products read the codes
        },
        [&](Ring<C::kStages> ring, int count) {
          if (!whole_rows) return;
          known = 0.0f;
#pragma unroll 1
          for (; count > 0; --count, ring.advance()) {
            TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
#pragma unroll 1
            for (int i = 0; i < kRows / 4; ++i) {
              Lane const lane(stages + ring.stage * C::kStageBytes, first + i * 4);
              float const high = lane.range().high;
              if (lane.sixteen == i) known = max_or_nan(known, high);
            }
          }
        });
  };
  p.x_type == DataType::kFloat16 ? quantize(__half()) : quantize(__nv_bfloat16());
}

// Releases all stages, for a warpgroup that has no features.
template <class C>
__device__ __forceinline__ void release_stages(Barriers<C>& barriers, typename C::Params const& p) {
  int const lane = threadIdx.x % 32;
  for_each_stage<C>(barriers, p, [&](int stage) {
    if (lane < C::kCluster) ClusterBarrier::arrive(&barriers.empty[stage], lane, true);
  });
}

// The warpgroups that multiply set rows of x that no copy writes to zero while the first copies are
// in flight: products with zeros took less time than with stale data.
template <class C>
__device__ __forceinline__ void clear_missing_x_rows(uint8_t* stages, Params const& p) {
  int const loaded = C::kCluster * p.half_x_rows * C::kSwizzleBytes;
  if (loaded == C::kPanelBytes) return;
  constexpr int kMultiplying = C::kThreads - 128;
  for (int panel = 0; panel < C::kStages * C::kColumnPanels; ++panel) {
    uint8_t* x_rows = stages + panel / C::kColumnPanels * C::kStageBytes + C::kActivations +
                      panel % C::kColumnPanels * C::kPanelBytes;
    for (int byte = loaded + (threadIdx.x - 128) * 16; byte < C::kPanelBytes;
         byte += kMultiplying * 16)
      *reinterpret_cast<uint4*>(x_rows + byte) = uint4{};
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kMultiplying, C::kWarpgroups + 1);
}

}  // namespace cutlass_ops::hopper
