// Before and after products of experts: assigns rows to experts ("slots", device/grouped.cuh),
// copies x in that order, and computes the weighted sums of the outputs.
#include <algorithm>

#include "cutlass_ops/layout.h"
#include "device/grouped.cuh"
#include "device/launch.cuh"
#include "dispatch/problem.h"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

// ---- route: a CTA has a chunk of the positions, each of its warps a part of it. A position's rank
// among its expert's is what chunks, warps and lanes before it have of the expert.

struct RouteParams {
  RouteProblem problem;
  Routing routing;
  RowSlots slots;
  int chunk;  // positions of a CTA
};

// The counts of each chunk's positions by expert, the last of them those of no expert.
__global__ void __launch_bounds__(1024) count_positions(__grid_constant__ RouteParams const p) {
  extern __shared__ int counts[];
  int const experts = p.problem.experts + 1, first = blockIdx.x * p.chunk,
            end = min(first + p.chunk, p.problem.positions());
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  pdl_wait_and_launch_dependents();
  __syncthreads();
  for (int i = first + threadIdx.x; i < end; i += blockDim.x)
    atomicAdd(counts + expert_of(p.problem, i), 1);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x)
    p.slots.counts[blockIdx.x * experts + e] = counts[e];
}

// Positions, slots and tiles of each table: of an expert, or of several.
struct RouteCounts {
  int positions = 0, slots = 0, tiles[2] = {};

  RouteCounts() = default;
  __device__ __forceinline__ RouteCounts(int count, RowSlots const& of)
      : positions(count), slots((count + kSlotRows - 1) / kSlotRows * kSlotRows) {
#pragma unroll
    for (int t = 0; t < 2; ++t) tiles[t] = (count + of.tables[t].height - 1) / of.tables[t].height;
  }
  template <class F>
  __device__ __forceinline__ void update(RouteCounts const& other, F const& f) {
    f(positions, other.positions), f(slots, other.slots);
#pragma unroll
    for (int t = 0; t < 2; ++t) f(tiles[t], other.tiles[t]);
  }
  __device__ __forceinline__ void add(RouteCounts const& other) {
    update(other, [](int& mine, int theirs) { mine += theirs; });
  }
  __device__ __forceinline__ void subtract(RouteCounts const& other) {
    update(other, [](int& mine, int theirs) { mine -= theirs; });
  }
  __device__ __forceinline__ RouteCounts of_lane(int lane) const {
    RouteCounts other;
    other.update(*this, [&](int& theirs, int own) { theirs = __shfl_sync(~0u, own, lane); });
    return other;
  }
  // The sums of the warp's lanes up to this one.
  __device__ __forceinline__ void sum_lanes() {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      RouteCounts const other = of_lane(max(lane - distance, 0));
      if (lane >= distance) add(other);
    }
  }
};

// Of an expert, in shared memory: its first position in the order, slot and tiles.
struct RoutedExpert {
  RouteCounts first;
  int count;  // its positions
};

__global__ void __launch_bounds__(1024) route(__grid_constant__ RouteParams const p) {
  extern __shared__ RoutedExpert routed[];
  RouteProblem const& r = p.problem;
  int const experts = r.experts + 1, threads = blockDim.x, warps = threads / 32,
            warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = gridDim.x;
  // By warp and expert: how many positions are counted, then the rank of the next one.
  int* const ranks = reinterpret_cast<int*>(routed + experts);
  __shared__ RouteCounts of_warps[32];
  for (int i = threadIdx.x; i < warps * experts; i += threads) ranks[i] = 0;
  pdl_wait_and_launch_dependents();
  for (int i = blockIdx.x * threads + threadIdx.x; i < p.slots.arrived_count; i += chunks * threads)
    p.slots.arrived[i] = 0;
  int const share = (p.chunk + threads - 1) / threads * 32,  // of a warp
      chunk_end = min((int(blockIdx.x) + 1) * p.chunk, r.positions()),
            first = int(blockIdx.x) * p.chunk + warp * share, end = min(first + share, chunk_end);
  __syncthreads();
  int* const own = ranks + warp * experts;
  for (int i = first + lane; i < end; i += 32) atomicAdd(own + expert_of(r, i), 1);
  __syncthreads();

  RouteCounts before_all;  // of the rounds before
  for (int round = 0; round < experts; round += threads) {
    int const e = round + threadIdx.x;
    int before = 0, all = 0;  // of the expert's positions: in the chunks before, in all
    if (e < experts) {
      if (chunks > 1) {
#pragma unroll 8
        for (int chunk = 0; chunk < chunks; ++chunk) {
          int const count = p.slots.counts[chunk * experts + e];
          all += count;
          if (chunk < int(blockIdx.x)) before += count;
        }
      }
      constexpr int kTogether = 8;  // loads in flight
      for (int w = 0; w < warps; w += kTogether) {
        int counts[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          counts[i] = w + i < warps ? ranks[(w + i) * experts + e] : 0;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (w + i < warps) ranks[(w + i) * experts + e] = before;
          before += counts[i];
        }
      }
      if (chunks == 1) all = before;
    }
    // Positions of no expert have no slots.
    RouteCounts const mine = e < r.experts ? RouteCounts(all, p.slots) : RouteCounts();
    RouteCounts upto = mine;
    upto.sum_lanes();
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
    RouteCounts before_warp = lane < warps ? of_warps[lane] : RouteCounts();
    before_warp.sum_lanes();
    RouteCounts at = before_all;
    if (warp > 0) at.add(before_warp.of_lane(warp - 1));
    before_all.add(before_warp.of_lane(31));
    at.add(upto), at.subtract(mine);
    if (e < experts) routed[e] = {at, all};
    __syncthreads();
  }

  // The tables of experts, which are CTAs' in turn, and within a CTA those of kSlotRows lanes.
  int const part = threadIdx.x % kSlotRows, parts = threads / kSlotRows;
  for (int e = threadIdx.x / kSlotRows * chunks + blockIdx.x; e < experts; e += parts * chunks) {
    RoutedExpert const of = routed[e];
    if (part == 0) p.routing.offsets[e] = of.first.positions;
    if (!p.slots.used) continue;
    if (e == r.experts) {
      if (part == 0) *p.slots.used = of.first.slots;
      if (part < 2 && p.slots.tables[part].tiles)
        *p.slots.tables[part].count = of.first.tiles[part];
      continue;
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      TileTable const& table = p.slots.tables[t];
      for (int i = part; table.tiles && i * table.height < of.count; i += kSlotRows)
        table.tiles[of.first.tiles[t] + i] = {e, of.first.slots, of.count, of.first.tiles[t]};
    }
    if (of.count % kSlotRows > 0 && part >= of.count % kSlotRows)
      p.slots.position[of.first.slots + of.count / kSlotRows * kSlotRows + part] = -1;
  }

  for (int round = first; round < end; round += 32) {
    int const position = round + lane, e = position < end ? expert_of(r, position) : -1;
    unsigned const same = __match_any_sync(~0u, e), before = same & ((1u << lane) - 1);
    int const rank = e >= 0 ? own[e] + __popc(before) : 0;
    __syncwarp();
    if (e >= 0 && !before) own[e] = rank + __popc(same);
    __syncwarp();
    if (e < 0) continue;
    RouteCounts const& of = routed[e].first;
    p.routing.order[of.positions + rank] = position;
    if (!p.slots.used) continue;
    bool const expert = e < r.experts;
    p.slots.of_position[position] = expert ? of.slots + rank : -1;
    if (expert) p.slots.position[of.slots + rank] = position;
  }
}

// ---- gather_rows: a warp copies a row of x to its slot

struct GatherParams {
  RouteProblem route;
  RowSlots slots;
  GatherProblem problem;
  bool whole_pieces;  // rows are of 16-byte vectors that start on 16 bytes
};

constexpr int kGatherWarps = 8;

__global__ void __launch_bounds__(32 * kGatherWarps)
    gather_rows(__grid_constant__ GatherParams const p) {
  pdl_wait_and_launch_dependents();
  int const slot = blockIdx.x * kGatherWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (slot >= (p.slots.used ? *p.slots.used : p.route.positions())) return;
  int const position = p.slots.position ? p.slots.position[slot] : slot;
  if (position < 0) return;
  GatherProblem const& g = p.problem;
  int const row = g.in_slots ? slot : position / p.route.top;
  uint16_t const* const from = static_cast<uint16_t const*>(g.x) + row * g.x_stride;
  uint16_t* const to = static_cast<uint16_t*>(g.out) + slot * g.out_stride;
  if (g.scales) {
    for (int block = lane; block < g.blocks; block += 32)
      g.out_scales[int64_t(block) * g.out_scale_stride + slot] =
          g.scales[int64_t(block) * g.scale_stride + row];
  }
  if (g.perm) {
    int const expert = expert_of(p.route, position);
    if (expert == p.route.experts) return;  // slots are positions
    int32_t const* const perm = g.perm + int64_t(expert) * g.k;
    for (int i = lane; i < g.k; i += 32) to[i] = from[__ldg(perm + i)];
  } else if (!p.whole_pieces) {
    for (int i = lane; i < g.k; i += 32) to[i] = from[i];
  } else {
#pragma unroll 4
    for (int i = lane; i < g.k / 8; i += 32)
      reinterpret_cast<uint4*>(to)[i] = __ldg(reinterpret_cast<uint4 const*>(from) + i);
  }
}

// ---- sum_experts: a warp adds up 512 bytes' columns of all of a token's rows

struct SumParams {
  RouteProblem route;
  int const* of_position;  // null, where rows are fp32: they are those of positions
  void const* rows;        // [slots][n] of fp32, or of row_type; n is a multiple of 8
  DataType row_type;
  int n, slices;  // slices: of a row, of a warp each
  void const* weights;
  DataType weight_type;
  void* out;
  DataType out_type;
};

constexpr int kSumWarps = 4;

template <bool kFloatRows>
__global__ void __launch_bounds__(32 * kSumWarps) sum_experts(__grid_constant__ SumParams const p) {
  constexpr int kColumns = kFloatRows ? 4 : 8;  // of a lane: 16 bytes
  pdl_wait_and_launch_dependents();
  // A token's slices follow each other, so that whole rows are in flight together, not a piece of a
  // row on each page of DRAM.
  int const unit = blockIdx.x * kSumWarps + threadIdx.x / 32, lane = threadIdx.x % 32,
            top = p.route.top;
  int const token = unit / p.slices, column = ((unit - token * p.slices) * 32 + lane) * kColumns;
  if (token >= p.route.tokens || column >= p.n) return;
  auto const* const rows = static_cast<uint4 const*>(p.rows) + column / kColumns;
  bool const half_rows = p.row_type == DataType::kFloat16;
  float sums[kColumns] = {};
  int first = 0;
  // Loads for this many experts are in flight together. There are too few predicates to skip
  // missing ones, which load an arbitrary row instead.
  auto const add = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    int const position = token * top + first;
    int slots[kCount];
    float weights[kCount];
    uint4 values[kCount];
    auto const load = [&](int j, int row) {
      values[j] = __ldcs(rows + int64_t(row) * (p.n / kColumns));
    };
    if (!kFloatRows || p.of_position) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) slots[j] = p.of_position[position + j];
#pragma unroll
      for (int j = 0; j < kCount; ++j) load(j, max(slots[j], 0));
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) load(j, position + j);
      load_experts<1>(p.route, position, position + kCount, slots);
#pragma unroll
      for (int& slot : slots) slot = slot < p.route.experts ? slot : -1;
    }
    // One branch by their type, before all of them.
    auto const load_weights = [&](DataType type) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) weights[j] = load_float(p.weights, type, position + j);
    };
    if (p.weight_type == DataType::kFloat32) {
      load_weights(DataType::kFloat32);
    } else if (p.weight_type == DataType::kFloat16) {
      load_weights(DataType::kFloat16);
    } else {
      load_weights(DataType::kBFloat16);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      uint32_t const words[4] = {values[j].x, values[j].y, values[j].z, values[j].w};
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        float value;
        if constexpr (kFloatRows) {
          value = __uint_as_float(words[i]);
        } else {
          uint32_t const word = words[i / 2];
          float2 const pair = __half22float2(reinterpret_cast<__half2 const&>(word));
          value = half_rows ? (i % 2 ? pair.y : pair.x)
                            : __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
        }
        if (slots[j] >= 0) sums[i] = __fadd_rn(sums[i], __fmul_rn(weights[j], value));
      }
    }
    first += kCount;
  };
  while (top - first >= 8) add(std::integral_constant<int, 8>());
  if ((top - first) & 4) add(std::integral_constant<int, 4>());
  if ((top - first) & 2) add(std::integral_constant<int, 2>());
  if ((top - first) & 1) add(std::integral_constant<int, 1>());
  uint16_t* const out = static_cast<uint16_t*>(p.out) + int64_t(token) * p.n + column;
  uint32_t pairs[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    pairs[i] = to_half_bits(sums[2 * i], sums[2 * i + 1], p.out_type == DataType::kBFloat16);
  if (reinterpret_cast<uintptr_t>(p.out) % 16) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = uint16_t(pairs[i / 2] >> 16 * (i % 2));
  } else if constexpr (kFloatRows) {
    *reinterpret_cast<uint2*>(out) = make_uint2(pairs[0], pairs[1]);
  } else {
    *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace

Status launch_route(RouteProblem const& problem, Routing const& routing, RowSlots const& slots,
                    Stream stream) {
  int const experts = problem.experts + 1, chunks = slots.chunks;
  int const chunk = int(ceil_div(problem.positions(), chunks));
  // As many warps as have work and as shared memory holds the ranks of.
  constexpr int kMostBytes = 96 * 1024;
  int const ranks = experts * int(sizeof(int)), table = experts * int(sizeof(RoutedExpert)),
            warps = std::max(1, std::min({32, int(ceil_div(std::max(chunk, experts), 32)),
                                          (kMostBytes - table) / ranks}));
  RouteParams const params{problem, routing, slots, chunk};
  if (chunks > 1) {
    Status status = launch(count_positions, dim3(unsigned(chunks)), 1024, ranks, stream, params);
    if (!status.ok()) return status;
  }
  return launch(route, dim3(unsigned(chunks)), 32 * warps, table + warps * ranks, stream, params);
}

Status launch_gather_rows(RouteProblem const& route, RowSlots const& slots,
                          GatherProblem const& problem, int rows, Stream stream) {
  bool const whole = problem.k % 8 == 0 && problem.x_stride % 8 == 0 &&
                     reinterpret_cast<uintptr_t>(problem.x) % 16 == 0;
  return launch(gather_rows, dim3(unsigned(ceil_div(rows, kGatherWarps))), 32 * kGatherWarps, 0,
                stream, GatherParams{route, slots, problem, whole});
}

Status launch_sum_experts(RouteProblem const& route, RowSlots const& slots, void const* rows,
                          DataType row_type, int n, void const* weights, DataType weight_type,
                          void* out, DataType out_type, Stream stream) {
  bool const float_rows = row_type == DataType::kFloat32;
  int const slices = int(ceil_div(n, 32 * (float_rows ? 4 : 8)));
  dim3 const grid(unsigned(ceil_div(int64_t(route.tokens) * slices, kSumWarps)));
  return launch(float_rows ? sum_experts<true> : sum_experts<false>, grid, 32 * kSumWarps, 0,
                stream,
                SumParams{route, slots.of_position, rows, row_type, n, slices, weights, weight_type,
                          out, out_type});
}

}  // namespace cutlass_ops
