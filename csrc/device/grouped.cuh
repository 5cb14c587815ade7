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

  // Reads a tile that `route` stored, by a warp.
  __device__ __forceinline__ void load(Groups const& groups, int index) {
    // No __ldg(): the compiler may move one before pdl_wait(), and the kernel before writes these.
    int4 const stored = reinterpret_cast<int4 const*>(groups.tiles)[index];
    int const lane = threadIdx.x % 32, before = (index - stored.w) * kSlotRows;
    if (lane < kSlotRows) slots[lane] = stored.y + before + lane;
    if (lane == 0) expert = stored.x, rows = min(kSlotRows, stored.z - before);
  }
};

// The tiles of at most kMostFoundPositions positions, which are slots then, found by a warp from
// their ids: in the order of the positions of their first rows, and rows in that of theirs.
class FoundTiles {
  static constexpr int kRounds = kMostFoundPositions / 32;

  int positions_, none_, experts_[kRounds], ranks_[kRounds];  // ranks: among the expert's rows
  int count_ = 0;

  // Whether this lane's position of a round is the first of a tile.
  __device__ __forceinline__ bool starts(int round) const {
    return experts_[round] < none_ && ranks_[round] % kSlotRows == 0;
  }

 public:
  // `counts`: room for a byte an expert, in whole 16.
  __device__ __forceinline__ FoundTiles(RouteProblem const& route, uint8_t* counts)
      : positions_(route.positions()), none_(route.experts) {
    int const lane = threadIdx.x % 32;
    unsigned const lanes_before = (1u << lane) - 1;
    load_experts<32>(route, lane, positions_, experts_);
    for (int i = lane * 16; i < route.experts; i += 32 * 16)
      *reinterpret_cast<uint4*>(counts + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i * 32 >= positions_) break;
      bool const exists = experts_[i] < none_;
      unsigned const same = __match_any_sync(~0u, experts_[i]);
      // totals of all rounds need not fit in a byte: they are not read
      int const earlier = exists ? counts[experts_[i]] : 0;
      ranks_[i] = earlier + __popc(same & lanes_before);
      __syncwarp();
      if (exists && !(same & lanes_before)) counts[experts_[i]] = uint8_t(earlier + __popc(same));
      __syncwarp();
      count_ += __popc(__ballot_sync(~0u, starts(i)));
    }
  }

  __device__ __forceinline__ int count() const { return count_; }

  __device__ __forceinline__ void store(int index, SlotTile& tile) const {
    int const lane = threadIdx.x % 32;
    int tiles = 0, expert = -1, first = 0;  // first: the rank of the tile's first row
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i * 32 >= positions_) break;
      unsigned const starting = __ballot_sync(~0u, starts(i));
      int const lanes_before = __popc(starting & ((1u << lane) - 1));
      unsigned const here = __ballot_sync(~0u, starts(i) && tiles + lanes_before == index);
      tiles += __popc(starting);
      if (here)
        expert = __shfl_sync(~0u, experts_[i], __ffs(here) - 1),
        first = __shfl_sync(~0u, ranks_[i], __ffs(here) - 1);
    }
    int rows = 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i * 32 >= positions_) break;
      int const row = ranks_[i] - first;
      bool const mine = experts_[i] == expert && row >= 0 && row < kSlotRows;
      if (mine) tile.slots[row] = i * 32 + lane;
      rows += __popc(__ballot_sync(~0u, mine));
    }
    if (lane == 0) tile.expert = expert, tile.rows = rows;
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

// Four sums of neighbouring features from n on to outputs of a row of the tile.
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
    int64_t const at = int64_t(tile.expert) * groups.row_panels * kRowsPerPanel + row + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const bias = load_float(groups.bias, groups.bias_type, at + h * 8);
      v[2 * h] += bias, v[2 * h + 1] += bias;
    }
  }
  activate_or_gate(v, groups.activation, groups.bounds, true);
  // Exchanges two rows of x of a feature for two features of a row of x.
  uint32_t pair = to_half_bits(v[0], v[1], p.out_type == DataType::kBFloat16);
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(pair) : "r"(pair));
  int const x_row = first + lane / 4, n = row / 2 + lane % 4 * 2;
  if (x_row < tile.rows && n < p.n)
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + int64_t(tile.slots[x_row]) * p.n +
                                 n) = pair;
}

}  // namespace cutlass_ops
