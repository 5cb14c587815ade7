// Before and after products of experts: assigns rows to experts ("slots", device/grouped.cuh),
// copies x in that order, and computes the weighted sums of the outputs.
#include "cutlass_ops/layout.h"
#include "device/grouped.cuh"
#include "device/launch.cuh"
#include "dispatch/problem.h"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

// ---- route: a CTA for each expert, and one for positions of no expert, counts all experts'
// positions, so that it knows how many come before its own

struct RouteParams {
  RouteProblem problem;
  Routing routing;
  RowSlots slots;
  int height;  // of tiles
};

constexpr int kEach = 8;  // positions of a thread at a time

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

__global__ void __launch_bounds__(1024) route(__grid_constant__ RouteParams const p) {
  extern __shared__ int counts[];  // of each expert's positions
  __shared__ int scratch[32];
  RouteProblem const& r = p.problem;
  int const mine = blockIdx.x, positions = r.tokens * r.top, threads = blockDim.x;
  for (int e = threadIdx.x; e <= r.experts; e += threads) counts[e] = 0;
  pdl_wait_and_launch_dependents();
  for (int i = blockIdx.x * threads + threadIdx.x; i < p.slots.arrived_count;
       i += gridDim.x * threads)
    p.slots.arrived[i] = 0;
  __syncthreads();
#pragma unroll kEach
  for (int i = threadIdx.x; i < positions; i += threads) atomicAdd(counts + expert_of(r, i), 1);
  __syncthreads();
  int first = 0, slot = 0, tile = 0;
  for (int e = threadIdx.x; e < mine; e += threads) {
    first += counts[e];
    slot += (counts[e] + kSlotRows - 1) / kSlotRows * kSlotRows;
    tile += (counts[e] + p.height - 1) / p.height;
  }
  first = sum_of_threads(first, scratch), slot = sum_of_threads(slot, scratch),
  tile = sum_of_threads(tile, scratch);
  int const count = counts[mine], padded = (count + kSlotRows - 1) / kSlotRows * kSlotRows;
  bool const expert = mine < r.experts;
  if (threadIdx.x == 0) {
    p.routing.offsets[mine] = first;
    if (!expert && p.slots.tiles) *p.slots.used = slot, *p.slots.tile_count = tile;
  }
  if (expert && p.slots.tiles) {
    for (int i = threadIdx.x; i * p.height < count; i += threads)
      p.slots.tiles[tile + i] = {mine, slot, count, tile};
    for (int i = count + threadIdx.x; i < padded; i += threads) p.slots.position[slot + i] = -1;
  }
  // Positions in their order: a thread has some that follow each other, and ranks behind those of
  // the threads before it.
  int before = 0;
  for (int round = 0; count > 0 && round < positions; round += threads * kEach) {
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
    for (; taken; taken &= taken - 1, ++rank) {
      int const position = start + __ffs(taken) - 1;
      p.routing.order[first + rank] = position;
      if (!p.slots.tiles) continue;
      p.slots.of_position[position] = expert ? slot + rank : -1;
      if (expert) p.slots.position[slot + rank] = position;
    }
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
                    int height, Stream stream) {
  int const threads = problem.positions() > 1024 ? 1024 : 256;
  return launch(route, dim3(unsigned(problem.experts + 1)), threads,
                (problem.experts + 1) * int(sizeof(int)), stream,
                RouteParams{problem, routing, slots, height});
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
