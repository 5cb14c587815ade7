// The common part of the wgmma kernels: a persistent GEMM of clusters of two blocks whose ring of
// stages continues from tile to tile.
//
// A block computes 128 output features x kBlockM (256 with four warpgroups that multiply). The two
// blocks of a cluster take neighbouring rows of W and the same rows of x, and each loads half of
// the rows of x for both.
//
//                       kBlockM ->
//             +---------------------------+
//   rows    0 | warpgroup 1: 64 x kBlockM |   block 0 of the cluster
//          64 | warpgroup 2               |
//             +---------------------------+
//         128 | warpgroup 1               |   block 1
//         192 | warpgroup 2               |
//             +---------------------------+
//
//   A   weights, from shared memory through registers (one 16-byte load of a lane is a fragment,
//       layout.h), where they are decoded
//   B   rows of x, K-major in shared memory, 128-byte swizzle, by TMA multicast
//
// Warpgroup 0 loads: one warp the weights, one the rows of x, each waiting for a free stage;
// where stages bring scales of rows of x, a third brings them into the order of the accumulators.
// Warpgroups 1 and 2 run C::consume, each on its own, so that one keeps the tensor cores busy while
// the other promotes.
//
// Clusters take tiles in turn. The stream-K tail, which is left after full waves, may be split
// along K, so that all clusters end at about the same time (add_parts()); where the tiles fill no
// wave, all may be split, and splitk_reduce adds the slices.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

#include "device/hopper_epilogue.cuh"
#include "device/hopper_producers.cuh"
#include "device/hopper_tiles.cuh"
#include "device/tensor_map.cuh"

namespace cutlass_ops::hopper {

// The body of a kernel; `stages` is its dynamic shared memory.
template <class C>
__device__ __forceinline__ void run(uint8_t* stages, CUtensorMap const& map,
                                    CUtensorMap const& out_map, typename C::Params const& p) {
  auto* staging = reinterpret_cast<float*>(stages + C::kStages * C::kStageBytes);
  static_assert(sizeof(Barriers<C>) <= C::kBarrierBytes);
  auto& barriers = *reinterpret_cast<Barriers<C>*>(stages + C::kSharedBytes - C::kBarrierBytes);
  int rank = int(cute::block_rank_in_cluster()), warpgroup = threadIdx.x / 128;
  int const preparing_warps = C::kImages && p.image.columns ? kPixelWarps : 1;
  int const preparing = C::kQuantizes ? kQuantizingWarps + 1 : 32 * preparing_warps;
  bool const index = by_index<C>(p);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      // The two loading threads; and the lanes that copy rows through an index.
      TransactionBarrier::init(&barriers.full[i], index ? 2 + 32 * kIndexWarps : 2);
      if constexpr (C::kGrouped) ClusterBarrier::init(&barriers.half[i], 32 * kIndexWarps);
      ClusterBarrier::init(&barriers.empty[i], C::kCluster * C::kWarpgroups * 4);
      // The lanes; or the warps that quantise, and the one that prepares the weights' scales.
      ClusterBarrier::init(&barriers.prepared[i], preparing);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
  if (index) pdl_wait();  // the previous kernel writes the tiles
  if (warpgroup < C::kLoadingWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<C::kLoadingRegisters>();
    // Provably the same in all lanes: then a role's addresses stay in the uniform registers that
    // copies need. Otherwise every copy becomes a loop over the lanes that might differ, and its
    // instructions slow down concurrent MMAs.
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) produce_weights<C>(stages, barriers, p, rank);
    if (warp == 1 && !index) produce_x_rows<C>(stages, barriers, p, map, rank);
    if constexpr (C::kGrouped) {
      if (index && warp % 2 == 1) produce_rows_by_index<C>(stages, barriers, p, rank, warp / 2);
      if (index && warp == 2) send_rows<C>(stages, barriers, p, rank);
    }
    if constexpr (C::kQuantizes) {
      if (warp == 2) prepare_all_weight_scales<C>(stages, barriers, p);
      if (warp >= 4) quantize_x_rows<C>(stages, barriers, p, warp - 4);
    } else if constexpr (C::kLoadXRowScales) {
      if (index) {
        // send_rows() prepares them
      } else if (preparing_warps == 1) {
        if (warp == 2) prepare_x_rows<C>(stages, barriers, p);
      } else if (warp >= 2) {
        prepare_pixels<C>(stages, barriers, p, warp - 2);
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kRegisters>();
    if constexpr (C::kShortTiles) clear_missing_x_rows<C>(stages, p);
    pdl_wait_and_launch_dependents();
    int const multiplying = warpgroup - C::kLoadingWarpgroups;
    // The second warpgroup has none of at most 64 features. Where tiles quantise x, the limit is
    // the number of instructions, and it would issue as many as the first.
    if (C::kQuantizes && multiplying * kRowsPerPanel >= p.n_pad) {
      release_stages<C>(barriers, p);
    } else {
      C::consume(stages, staging, barriers, out_map, p, ThreadCoord<C>(p, rank, multiplying));
      cute::tma_store_wait<0>();
    }
  }
  // A block must not exit before its neighbour's last arrivals and copies.
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
}

// A number that no other launch of this process has, and that arbitrary memory equals with a
// probability of 2^-64: a counter's bits, hashed.
inline uint64_t new_flag() {
  static std::atomic<uint64_t> launches{
      uint64_t(std::chrono::steady_clock::now().time_since_epoch().count())};
  uint64_t x = launches.fetch_add(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// What a launch reads of a kernel's Config: the code that fills in its parameters is compiled once.
struct LaunchConfig {
  int block_m, cluster, warpgroups, x_box_rows, threads, shared_bytes, bits;
  bool short_tiles, splits_rows, windows;

  template <class C>
  static constexpr LaunchConfig of() {
    static_assert(C::kCluster == 2, "half_x_rows() halves a tile");
    return {C::kBlockM,      C::kCluster, C::kWarpgroups, C::kXBoxRows,   C::kThreads,
            C::kSharedBytes, C::kBits,    C::kShortTiles, C::kSplitsRows, C::kWindowTiles > 0};
  }

  // Rows of x of a tile that a CTA loads for its cluster: half of the tile or, where x has fewer
  // rows than the tile, half of these rounded up to eights: TMA fills rows beyond the last with
  // zeros at only 8 bytes a clock.
  int half_x_rows(int m) const {
    constexpr int kAtom = 8;  // rows that the swizzle repeats after
    int const half = block_m / cluster;
    return short_tiles ? std::min(half, (m + 2 * kAtom - 1) / (2 * kAtom) * kAtom) : half;
  }
};

// Tiles of K that share a group of scales, groups of a tile of K, and the sizes of scales.
inline void set_groups(PackedWeight const& w, int weight_tiles, Params& p) {
  bool const short_groups = w.group_size > 0 && w.group_size < kKPerTile;
  p.group_tiles = w.group_size == -1 ? weight_tiles : short_groups ? 1 : w.group_size / kKPerTile;
  p.tile_groups = short_groups ? kKPerTile / w.group_size : 1;
  p.scale_bytes = bytes_of(w.scale_type), p.offset_bytes = bytes_of(w.offset_type);
}

// The map of 16-bit outputs, whose rows start on 16 bytes.
inline Status encode_outputs(EpilogueParams const& e, bool gated, int box_rows, CUtensorMap* map) {
  return gated ? encode_gated_rows(e.out, e.m, e.n, box_rows, map)
               : encode_x_rows(e.out, 2, e.m, e.n, int64_t(e.n) * 2, box_rows, map);
}

// For experts: as many clusters as fit on the GPU at once; each takes every n-th tile, n being the
// number of clusters.
inline Status launch_grouped(LaunchConfig const& c,
                             void (*kernel)(CUtensorMap, CUtensorMap, GroupedParams),
                             GroupedGemm const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  GroupedParams p{
      {w, {}, EpilogueParams(rows_of_all(problem))}, problem.groups, RowPieces(problem)};
  p.x.scales = const_cast<float*>(problem.x_scales), p.x.stride = problem.x_rows;
  p.row_pairs = int(ceil_div(problem.groups.row_panels, c.warpgroups * c.cluster));
  p.k_tiles = int(padded_k(w.k) / kKPerTile), p.n_pad = int(padded_rows(w.n));
  set_groups(w, p.k_tiles, p);
  p.half_x_rows = c.block_m / c.cluster, p.clusters = plan.grid_x / c.cluster;
  CUtensorMap map = {}, out_map;
  bool const codes = problem.x_codes != ActQuant::kNone;
  int const columns = codes ? int(padded_k(w.k)) : w.k, x_bytes = codes ? 1 : 2;
  Status status;
  if (!problem.groups.positions)
    status = encode_x_rows(problem.x, x_bytes, problem.rows, columns, problem.x_stride * x_bytes,
                           p.half_x_rows, &map);
  if (status.ok())
    status = encode_outputs(p.epilogue, problem.groups.gated, c.x_box_rows, &out_map);
  if (!status.ok()) return status;
  return launch_plan(kernel, plan, c.threads, c.shared_bytes, stream, map, out_map, p);
}

// The other parameters of launch_persistent(), and the map of its outputs where TMA stores them.
inline Status persistent_params(LaunchConfig const& c, GemmProblem const& problem, Plan const& plan,
                                float* splitk_workspace, int band_tiles, Params* params,
                                CUtensorMap* out_map) {
  PackedWeight const& w = problem.weight;
  Params& p = *params;
  bool const along_m = plan.ctas_along_m > 1;
  if (along_m && !c.splits_rows)
    return {Status::kInvalid, std::string(plan.kernel) + " has no clusters along M"};
  int const weight_tiles = int(padded_k(w.k) / kKPerTile);
  p.splitk_workspace = splitk_workspace;
  if (plan.tail_tiles) {
    p.flags = reinterpret_cast<uint64_t*>(splitk_workspace + part_floats(plan));
    p.flag = new_flag();
  }
  p.n_pad = int(padded_rows(w.n)), p.row_pairs = int(ceil_div(p.n_pad, plan.block_n));
  p.m_tiles = int(ceil_div(problem.m, plan.block_m));
  p.k_tiles = weight_tiles + (c.windows ? compensation_windows(weight_tiles, c.bits) : 0);
  set_groups(w, weight_tiles, p);
  p.splits = plan.slices, p.tail_split = plan.tail;
  p.clusters = plan.grid_x / c.cluster, p.band_tiles = band_tiles;
  p.half_x_rows = along_m ? c.block_m / c.cluster : c.half_x_rows(problem.m);
  p.splits_rows = along_m, p.image = ImageTiles(problem), p.x_type = problem.x_type;
  p.quantizes_rows = quantizes_rows(problem);
  int const tiles = p.row_pairs * p.m_tiles;
  bool const split_k = plan.slices > 1 && plan.tail_tiles == 0;
  p.split_tiles = split_k ? tiles : plan.tail_tiles, p.whole_tiles = tiles - p.split_tiles;
  p.work_end = p.tail_split.tiles_per_cluster > 1
                   ? p.whole_tiles + p.tail_split.tiles_per_cluster * p.clusters
                   : p.whole_tiles + p.split_tiles * (p.tail_split.parts - 1) + p.tail_split.last;
  EpilogueParams const& e = p.epilogue;
  p.store_halves = (!splitk_workspace || p.flags) && e.vector_store && e.vector_residual &&
                   e.out_type != DataType::kFloat32;
  return p.store_halves ? encode_outputs(e, w.gated, c.x_box_rows, out_map) : Status();
}

inline Status launch_persistent(LaunchConfig const& c,
                                void (*kernel)(CUtensorMap, CUtensorMap, Params),
                                GemmProblem const& problem, Plan const& plan,
                                float* splitk_workspace, CUtensorMap const& map, Stream stream,
                                int band_tiles = 16) {
  Params p{problem.weight, problem.quantized, EpilogueParams(problem)};
  CUtensorMap out_map = {};
  Status status = persistent_params(c, problem, plan, splitk_workspace, band_tiles, &p, &out_map);
  if (!status.ok()) return status;
  return launch_plan(kernel, plan, c.threads, c.shared_bytes, stream, map, out_map, p);
}

// For kernels that compensate zero points by windows of K.
inline Status launch_persistent(LaunchConfig const& c,
                                void (*kernel)(CUtensorMap, CUtensorMap, CompensatedParams),
                                GemmProblem const& problem, Plan const& plan,
                                float* splitk_workspace, CUtensorMap const& map, Stream stream) {
  CompensatedParams p{{problem.weight, problem.quantized, EpilogueParams(problem)}};
  CUtensorMap out_map = {};
  Status status = persistent_params(c, problem, plan, splitk_workspace, 16, &p, &out_map);
  if (!status.ok()) return status;
  p.weight_tiles = int(padded_k(problem.weight.k) / kKPerTile);
  int const columns = int(zero_columns(problem.weight.k));
  status = encode_x_rows(problem.quantized.zero_values, 2, problem.m, columns, int64_t(columns) * 2,
                         c.block_m / c.cluster, &p.zero_values);
  if (!status.ok()) return status;
  return launch_plan(kernel, plan, c.threads, c.shared_bytes, stream, map, out_map, p);
}

}  // namespace cutlass_ops::hopper
