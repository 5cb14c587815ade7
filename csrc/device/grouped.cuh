// Products whose rows of x and weights belong to experts. Rows are sorted by expert, and each
// expert's rows begin at a multiple of 16 ("slots"); an earlier kernel has written the tiles of
// these (kernels/route.cu). Only the GPU knows their number. If there are few rows, no kernel sorts
// them: slots are positions, and each CTA finds the rows of its tile from the ids.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "dispatch/grouped.h"

namespace cutlass_ops {

// The experts of positions `first`, `first` + kStep, and so on before `end`; p.experts: none. Loads
// are in flight together.
template <int kStep, int kCount>
__device__ __forceinline__ void load_experts(RouteProblem const& p, int first, int end,
                                             int (&experts)[kCount]) {
  int64_t const known = p.expert_map ? p.map_size : p.experts;
  auto const load = [&](auto const* ids) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int64_t const id = first + i * kStep < end ? int64_t(ids[first + i * kStep]) : -1;
      experts[i] = id >= 0 && id < known ? int(id) : -1;
    }
  };
  if (p.wide_ids) {
    load(static_cast<int64_t const*>(p.ids));
  } else {
    load(static_cast<int32_t const*>(p.ids));
  }
  if (p.expert_map) {
#pragma unroll
    for (int& expert : experts) expert = expert >= 0 ? p.expert_map[expert] : -1;
  }
#pragma unroll
  for (int& expert : experts) expert = unsigned(expert) < unsigned(p.experts) ? expert : p.experts;
}

__device__ __forceinline__ int expert_of(RouteProblem const& p, int position) {
  int expert[1];
  load_experts<1>(p, position, position + 1, expert);
  return expert[0];
}

// A tile of at most kSlotRows rows of an expert, in shared memory.
struct SlotTile {
  int expert, rows;
  int slots[kSlotRows];

  // Reads a tile that `assign_slots` stored, by a warp.
  __device__ __forceinline__ void load(Groups const& groups, int index) {
    // No __ldg(): the compiler may move one before pdl_wait(), and the kernel before writes these.
    int4 const stored = reinterpret_cast<int4 const*>(groups.tiles)[index];
    int const lane = threadIdx.x % 32, before = (index - stored.w) * kSlotRows;
    if (lane < kSlotRows) slots[lane] = stored.y + before + lane;
    if (lane == 0) expert = stored.x, rows = min(kSlotRows, stored.z - before);
  }
};

// The tiles of at most kMostFoundPositions positions, which each CTA finds from their ids.
// Positions are the slots then; experts come in the order of their first positions, and an expert's
// rows in the order of their positions.
class FoundTiles {
  static constexpr int kWarps = kMostFoundPositions / 32;  // each counts 32 positions

 public:
  // `counts`: of every expert, a byte for each warp; then its first tile.
  static constexpr int kBytes = kFoundTilesBytes;
  static_assert(kWarps == sizeof(uint2) && kBytes == kMostFoundExperts * kWarps);

  // By all `threads` of the CTA, before they synchronise.
  __device__ __forceinline__ static void clear(uint2* counts, int experts, int threads) {
    for (int i = threadIdx.x; i < experts; i += threads) counts[i] = make_uint2(0, 0);
  }

  // By all threads of the CTA. share_of(count) returns which of `count` tiles are this CTA's, to be
  // stored in `tiles`: the number of the first, and how many there are.
  template <class ShareOf>
  __device__ __forceinline__ static void store(RouteProblem const& route, uint2* counts,
                                               SlotTile* tiles, ShareOf share_of) {
    __shared__ int of_warp[kWarps];  // tiles
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, position = threadIdx.x;
    unsigned const before = (1u << lane) - 1;
    int expert = route.experts, rank = 0, rows = 0, first_tile = 0;
    if (warp < kWarps) {
      if (position < route.positions()) expert = expert_of(route, position);
      unsigned const same = __match_any_sync(~0u, expert);
      if (expert < route.experts && !(same & before))
        reinterpret_cast<uint8_t*>(counts + expert)[warp] = uint8_t(__popc(same));
      rank = __popc(same & before);
    }
    bool const exists = expert < route.experts;
    __syncthreads();
    if (warp < kWarps) {
      uint2 const count = exists ? counts[expert] : make_uint2(0, 0);
      // The bytes of the first warps.
      auto const sum_of_first = [&](int warps) {
        uint64_t const bytes = count.x | uint64_t(count.y) << 32,
                       kept = warps < kWarps ? bytes & ((uint64_t(1) << warps * 8) - 1) : bytes;
        return int(
            __dp4a(uint32_t(kept), 0x01010101u, __dp4a(uint32_t(kept >> 32), 0x01010101u, 0u)));
      };
      rank += sum_of_first(warp), rows = sum_of_first(kWarps);
      int const mine = exists && rank == 0 ? (rows + kSlotRows - 1) / kSlotRows : 0;
      int all = mine;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        int const theirs = __shfl_up_sync(~0u, all, distance);
        if (lane >= distance) all += theirs;
      }
      first_tile = all - mine;
      if (lane == 31) of_warp[warp] = all;
    }
    __syncthreads();
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) first_tile += of_warp[i];
      count += of_warp[i];
    }
    if (exists && rank == 0) counts[expert].x = first_tile;
    int2 const share = share_of(count);
    __syncthreads();
    if (exists) {
      int const tile = int(counts[expert].x) + rank / kSlotRows - share.x, row = rank % kSlotRows;
      if (unsigned(tile) < unsigned(share.y)) {
        tiles[tile].slots[row] = position;
        if (row == 0) tiles[tile].expert = expert, tiles[tile].rows = min(kSlotRows, rows - rank);
      }
    }
  }
};

// The row of x of an expert's slot.
__device__ __forceinline__ int row_of_slot(Groups const& groups, int slot) {
  int const position = groups.positions ? groups.positions[slot] : slot;
  return groups.top ? position / groups.top : position;
}

// x whose rows are read through an index, in pieces of 16 bytes.
struct RowPieces {
  uint8_t const* x;
  int stride;  // pieces from a row to the next
  int bytes;   // of a row; zeros follow

  explicit RowPieces(GroupedGemm const& gemm) {
    int const element = gemm.x_codes == ActQuant::kNone ? 2 : 1;
    x = static_cast<uint8_t const*>(gemm.x), stride = int(gemm.x_stride * element / 16);
    bytes = int(element == 2 ? gemm.weight.k * 2 : padded_k(gemm.weight.k));
  }
  RowPieces() = default;
};

// The epilogue of four neighbouring features, from n on, of a row of the tile.
__device__ __forceinline__ void finish_group(float (&v)[4], int x_row, int n, SlotTile const& tile,
                                             Groups const& groups, EpilogueParams const& p) {
  if (x_row >= tile.rows || n >= p.n) return;
#pragma unroll
  for (float& x : v) x = nan_unless_finite(x);
  if (groups.bias) {
    int64_t const row = int64_t(tile.expert) * groups.row_panels * kRowsPerPanel + n;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += load_float(groups.bias, groups.bias_type, row + i);
  }
  store_finished(v, tile.slots[x_row], n, p);
}

// A warp's sums of 16 rows of an expert from `row` on, gate's and up's of eight features, and eight
// rows of x from `first` of the tile's on, in the order of wgmma's accumulators, to 16-bit outputs.
// `row_scales`: of the rows of x, or null.
__device__ __forceinline__ void finish_gated(float (&v)[4], float const* row_scales, int first,
                                             int row, SlotTile const& tile, Groups const& groups,
                                             EpilogueParams const& p) {
  int const lane = threadIdx.x % 32;
  if (row_scales) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const x_row = first + lane % 4 * 2 + i;
      float const scale =
          x_row < tile.rows ? row_scales[row_of_slot(groups, tile.slots[x_row])] : 0.0f;
      v[i] *= scale, v[2 + i] *= scale;
    }
  }
#pragma unroll
  for (float& x : v) x = nan_unless_finite(x);
  if (groups.bias) {
    int64_t const bias_row =
        int64_t(tile.expert) * groups.row_panels * kRowsPerPanel + row + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const bias = load_float(groups.bias, groups.bias_type, bias_row + h * 8);
      v[2 * h] += bias, v[2 * h + 1] += bias;
    }
  }
  activate_or_gate(v, groups.activation, groups.bounds, true);
  int const x_row = first + lane / 4;
  store_gated_pairs(v, x_row < tile.rows ? tile.slots[x_row] : -1, row / 2, p);
}

}  // namespace cutlass_ops
