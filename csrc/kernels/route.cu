// Before and after products of experts: assigns rows to experts ("slots", device/grouped.cuh),
// copies x in that order, and computes the weighted sums of the outputs.
#include <algorithm>

#include "cutlass_ops/layout.h"
#include "device/grouped.cuh"
#include "device/launch.cuh"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

// The sum of all threads' values, for all of them. `scratch`: one a warp.
__device__ __forceinline__ int sum_of_threads(int value, int* scratch) {
  value = __reduce_add_sync(~0u, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  int total = 0;
  for (int warp = 0; warp < int(blockDim.x / 32); ++warp) total += scratch[warp];
  return total;
}

// ---- route: a CTA for each expert, and one for positions of no expert, counts all experts'
// positions, so that it knows how many come before its own, and writes its own in their order

struct RouteParams {
  RouteProblem problem;
  Routing routing;
};

constexpr int kEach = 8;  // positions of a thread at a time

__global__ void __launch_bounds__(1024) route(__grid_constant__ RouteParams const p) {
  extern __shared__ int counts[];  // of each expert's positions
  __shared__ int scratch[32];
  RouteProblem const& r = p.problem;
  int const mine = blockIdx.x, positions = r.positions(), threads = blockDim.x;
  for (int e = threadIdx.x; e <= r.experts; e += threads) counts[e] = 0;
  pdl_wait_and_launch_dependents();
  __syncthreads();
#pragma unroll kEach
  for (int i = threadIdx.x; i < positions; i += threads) atomicAdd(counts + expert_of(r, i), 1);
  __syncthreads();
  int first = 0;
  for (int e = threadIdx.x; e < mine; e += threads) first += counts[e];
  first = sum_of_threads(first, scratch);
  if (threadIdx.x == 0) p.routing.offsets[mine] = first;
  // A thread has consecutive positions, which rank behind the positions of the threads before it.
  int before = 0;
  for (int round = 0; counts[mine] > 0 && round < positions; round += threads * kEach) {
    int const start = round + threadIdx.x * kEach, lane = threadIdx.x % 32;
    unsigned taken = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (start + i < positions && expert_of(r, start + i) == mine) taken |= 1u << i;
    int const own = __popc(taken);
    int upto = own;  // of the warp's lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      int const theirs = __shfl_up_sync(~0u, upto, distance);
      if (lane >= distance) upto += theirs;
    }
    __syncthreads();
    if (lane == 31) scratch[threadIdx.x / 32] = upto;
    __syncthreads();
    int const of_warp = lane < threads / 32 ? scratch[lane] : 0, warp = threadIdx.x / 32;
    int rank = before + upto - own + __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
    before += __reduce_add_sync(~0u, of_warp);
    for (; taken; taken &= taken - 1, ++rank)
      p.routing.order[first + rank] = start + __ffs(taken) - 1;
  }
}

// ---- assign_slots: sorts positions by expert for a layer, in any order within an expert. A CTA
// has a chunk of the positions; with several CTAs, count_positions runs first

struct SlotParams {
  RouteProblem problem;
  RowSlots slots;
  int chunk;  // positions of a CTA
};

// Counts a chunk's positions by expert; the last of `counts` is for positions of no expert. A
// position's number among its expert's positions is stored where its slot will be.
__device__ __forceinline__ void count_chunk(SlotParams const& p, int* counts) {
  int const first = blockIdx.x * p.chunk, end = min(first + p.chunk, p.problem.positions());
  for (int i = first + threadIdx.x; i < end; i += blockDim.x)
    p.slots.of_position[i] = atomicAdd(counts + expert_of(p.problem, i), 1);
}

__global__ void __launch_bounds__(1024) count_positions(__grid_constant__ SlotParams const p) {
  extern __shared__ int counts[];
  int const experts = p.problem.experts + 1;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  pdl_wait_and_launch_dependents();
  __syncthreads();
  count_chunk(p, counts);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x)
    p.slots.counts[blockIdx.x * experts + e] = counts[e];
}

// Slots and tiles of each table: of an expert, or of several.
struct SlotCounts {
  int slots = 0, tiles[2] = {};

  SlotCounts() = default;
  __device__ __forceinline__ SlotCounts(int positions, RowSlots const& of)
      : slots((positions + kSlotRows - 1) / kSlotRows * kSlotRows) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
      tiles[t] = (positions + of.tables[t].height - 1) / of.tables[t].height;
  }
  template <class F>
  __device__ __forceinline__ void update(SlotCounts const& other, F const& f) {
    f(slots, other.slots);
#pragma unroll
    for (int t = 0; t < 2; ++t) f(tiles[t], other.tiles[t]);
  }
  __device__ __forceinline__ void add(SlotCounts const& other) {
    update(other, [](int& mine, int theirs) { mine += theirs; });
  }
  __device__ __forceinline__ void subtract(SlotCounts const& other) {
    update(other, [](int& mine, int theirs) { mine -= theirs; });
  }
  __device__ __forceinline__ SlotCounts of_lane(int lane) const {
    SlotCounts other;
    other.update(*this, [&](int& theirs, int own) { theirs = __shfl_sync(~0u, own, lane); });
    return other;
  }
  // The sums of the warp's lanes up to this one.
  __device__ __forceinline__ void sum_lanes() {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      SlotCounts const other = of_lane(max(lane - distance, 0));
      if (lane >= distance) add(other);
    }
  }
};

// The slots of an expert, in shared memory: its first slot and tiles, its first slot in the CTA's
// chunk, and its number of positions.
struct ExpertSlots {
  SlotCounts first;
  int of_chunk, count;
};

__global__ void __launch_bounds__(1024) assign_slots(__grid_constant__ SlotParams const p) {
  extern __shared__ ExpertSlots routed[];
  __shared__ SlotCounts of_warps[32];
  RouteProblem const& r = p.problem;
  int const experts = r.experts + 1, threads = blockDim.x, warp = threadIdx.x / 32,
            lane = threadIdx.x % 32, chunks = gridDim.x, mine = blockIdx.x;
  int* const counts = reinterpret_cast<int*>(routed + experts);  // of the only chunk
  for (int e = threadIdx.x; chunks == 1 && e < experts; e += threads) counts[e] = 0;
  pdl_wait_and_launch_dependents();
  for (int i = mine * threads + threadIdx.x; i < p.slots.arrived_count; i += chunks * threads)
    p.slots.arrived[i] = 0;
  __syncthreads();
  if (chunks == 1) {
    count_chunk(p, counts);
    __syncthreads();
  }

  SlotCounts before_all;  // of the rounds before
  for (int round = 0; round < experts; round += threads) {
    int const e = round + threadIdx.x;
    int before = 0, all = 0;  // of the expert's positions: in the chunks before, in all
    if (e < experts && chunks == 1) {
      all = counts[e];
    } else if (e < experts) {
#pragma unroll 16
      for (int chunk = 0; chunk < chunks; ++chunk) {
        int const count = p.slots.counts[chunk * experts + e];
        all += count;
        if (chunk < mine) before += count;
      }
    }
    // Positions of no expert have no slots.
    SlotCounts const own = e < r.experts ? SlotCounts(all, p.slots) : SlotCounts();
    SlotCounts upto = own;
    upto.sum_lanes();
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
    SlotCounts before_warp = lane < threads / 32 ? of_warps[lane] : SlotCounts();
    before_warp.sum_lanes();
    SlotCounts first = before_all;
    if (warp > 0) first.add(before_warp.of_lane(warp - 1));
    before_all.add(before_warp.of_lane(31));
    first.add(upto), first.subtract(own);
    if (e < experts) routed[e] = {first, first.slots + before, all};
    __syncthreads();
  }

  for (int i = mine * p.chunk + threadIdx.x, end = min((mine + 1) * p.chunk, r.positions());
       i < end; i += threads) {
    int const e = expert_of(r, i), slot = routed[e].of_chunk + p.slots.of_position[i];
    bool const expert = e < r.experts;
    p.slots.of_position[i] = expert ? slot : -1;
    if (expert) p.slots.position[slot] = i;
  }
  // The tile tables. CTAs take experts in turn, and kSlotRows threads of a CTA write the tables of
  // one expert.
  int const part = threadIdx.x % kSlotRows, parts = threads / kSlotRows;
  for (int e = threadIdx.x / kSlotRows * chunks + mine; e < experts; e += parts * chunks) {
    ExpertSlots const of = routed[e];
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
    // One branch on the weights' type, before all loads.
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

Status launch_route(RouteProblem const& problem, Routing const& routing, Stream stream) {
  int const threads = problem.positions() > 1024 ? 1024 : 256;
  return launch(route, dim3(unsigned(problem.experts + 1)), threads,
                (problem.experts + 1) * int(sizeof(int)), stream, RouteParams{problem, routing});
}

Status launch_assign_slots(RouteProblem const& problem, RowSlots const& slots, Stream stream) {
  int const chunks = slots.chunks, chunk = int(ceil_div(problem.positions(), chunks));
  int const counts = (problem.experts + 1) * int(sizeof(int)),
            table = (problem.experts + 1) * int(sizeof(ExpertSlots));
  int const threads = std::clamp(int(ceil_div(chunk, 32)) * 32, 256, 1024);
  SlotParams const params{problem, slots, chunk};
  if (chunks == 1) return launch(assign_slots, dim3(1), threads, table + counts, stream, params);
  Status status = launch(count_positions, dim3(unsigned(chunks)), threads, counts, stream, params);
  return status.ok() ? launch(assign_slots, dim3(unsigned(chunks)), threads, table, stream, params)
                     : status;
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
