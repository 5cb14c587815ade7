// How decode_gemm brings x into shared memory: as rows of 16-bit floats, or quantised to int8
// there.
#pragma once

#include "kernels/decode_gemm_config.cuh"

namespace cutlass_ops {
namespace {

// Global to shared memory by the bulk copy engine; with 32-bit shared-memory addresses.
__device__ __forceinline__ void copy_bulk(uint32_t to, void const* from, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Makes the block's barriers and requests rows of 16-bit floats by bulk copies, by one thread. It
// alone waits for the previous kernel at once: requested behind the weights, x arrives when these
// do. Blocks begin at different rows, because they read the same lines at the same time.
// (Waiting for copies by threads would also wait for the weights.)
template <class C>
__device__ __forceinline__ void request_x(uint8_t* shared, Params const& p, Part const& part,
                                          Barriers& barriers) {
  int const m = p.epilogue.m, first = part.first_tile * kKPerTile,
            bytes = min(p.x.k - first, part.tiles * kKPerTile) * 2;
  TransactionBarrier::init(&barriers.x, 1);
  TransactionBarrier::init(&barriers.ranges, 1);
  TransactionBarrier::init(&barriers.sums, 1);
  cutlass::arch::fence_barrier_init();
  TransactionBarrier::arrive_and_expect_tx(&barriers.ranges, uint32_t(m * (p.symmetric ? 4 : 8))
                                                                 << p.log_cluster);
  TransactionBarrier::arrive_and_expect_tx(&barriers.sums,
                                           uint32_t(part.row_panels * m * kRowsPerPanel * 4));
  if (!p.vector_x) return;
  TransactionBarrier::arrive_and_expect_tx(&barriers.x, uint32_t(m * bytes));
  uint32_t const to = cute::cast_smem_ptr_to_uint(shared + p.memory.x),
                 barrier = cute::cast_smem_ptr_to_uint(&barriers.x);
  uint16_t const* const from = static_cast<uint16_t const*>(p.x.x) + first;
  int x_row = Quotient(int(blockIdx.x), m).remainder;
  pdl_wait();
#pragma unroll 1
  for (int i = 0; i < m; ++i, x_row = x_row + 1 == m ? 0 : x_row + 1)
    copy_bulk(to + x_row * p.memory.x_row, from + x_row * p.x.x_stride, bytes, barrier);
}

// Copies x by threads, for any x. Columns beyond K are zeros.
template <class C>
__device__ __forceinline__ void stage_floats(uint8_t* shared, Params const& p, int first,
                                             int columns) {
  uint16_t const* x = static_cast<uint16_t const*>(p.x.x);
  for (int x_row = 0; x_row < p.epilogue.m; ++x_row, x += p.x.x_stride) {
#pragma unroll 4
    for (int k = threadIdx.x; k < columns; k += C::kThreads) {
      bool inside = first + k < p.x.k;
      int column = inside && p.x.perm ? __ldg(p.x.perm + first + k) : first + k;
      *reinterpret_cast<uint16_t*>(shared + p.memory.x + x_row * p.memory.x_row + k * 2) =
          inside ? x[column] : uint16_t(0);
    }
  }
}

// A warp's tiles of its block's slice of x, [x_row][tile]. Computed before the kernel waits.
struct TileWalk {
  int tiles, x_row, tile, x_row_step, tile_step, count;
  __device__ __forceinline__ TileWalk(int tiles_, int m, int warps) : tiles(tiles_) {
    int const warp = threadIdx.x / 32;
    Quotient begin(warp, tiles), step(warps, tiles);
    x_row = begin.quotient, tile = begin.remainder;
    x_row_step = step.quotient, tile_step = step.remainder;
    count = (m * tiles - warp + warps - 1) / warps;
  }
  __device__ __forceinline__ void next() {
    x_row += x_row_step, tile += tile_step;
    if (tile >= tiles) tile -= tiles, ++x_row;
  }
};

constexpr int kFour = kKPerTile / 32;  // columns of a tile, a lane's

// A lane's columns of a tile as floats: from the stage, or fp32 from global memory.
template <bool kFloat32>
__device__ __forceinline__ void load_floats(uint8_t const* staged, Params const& p, int x_row,
                                            int column, float (&v)[kFour]) {
  if constexpr (kFloat32) {
    float const* x = static_cast<float const*>(p.x.x) + x_row * p.x.x_stride;
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      int k = column + i;
      v[i] = k < p.x.k ? x[p.x.perm ? p.x.perm[k] : k] : 0.0f;
    }
  } else {
    uint2 pair = *reinterpret_cast<uint2 const*>(staged);
    float2 low = floats_of(pair.x, p.x.x_type), high = floats_of(pair.y, p.x.x_type);
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
}

// A lane's integers of a tile and their scale.
template <class C>
__device__ __forceinline__ void store_integers(uint8_t* shared, uint8_t* staged, Params const& p,
                                               int x_row, int column, float const (&v)[kFour],
                                               float scale) {
  *reinterpret_cast<uint2*>(staged) =
      make_uint2(pack_pair<__half>(v[0], v[1]), pack_pair<__half>(v[2], v[3]));
  if (column % C::kStepColumns == 0)
    reinterpret_cast<float*>(
        shared + p.memory.scales)[column / C::kStepColumns * C::kBlockM + x_row] = scale;
}

// Largest absolute values by integer comparison: NaN is larger than all.
__device__ __forceinline__ uint32_t ordered(float v) { return __float_as_uint(fabsf(v)); }

// The range of each row of x, as bits that order integers do: [below, above zero].
template <class C>
struct RangePartition {
  uint32_t own[2][C::kBlockM], all[C::kInt8 ? 8 : 1][2][C::kBlockM];
};

// The range of a warp's values: bits as above.
template <bool kSymmetric>
__device__ __forceinline__ uint2 warp_range(float const (&v)[kFour]) {
  Range<kSymmetric> range = range_of<kSymmetric>(v);
  return make_uint2(kSymmetric ? 0 : __reduce_max_sync(~0u, ordered(range.low)),
                    __reduce_max_sync(~0u, ordered(range.high)));
}

// The range of each whole row of x: every block receives the ranges of all blocks.
template <class C, bool kSymmetric, bool kFloat32>
__device__ __forceinline__ void find_ranges(uint8_t* shared, Params const& p, int first,
                                            TileWalk walk, RangePartition<C>& partition,
                                            Barriers& barriers) {
  int const m = p.epilogue.m;
#pragma unroll 1
  for (int i = 0; i < walk.count; ++i, walk.next()) {
    int const column = walk.tile * kKPerTile + threadIdx.x % 32 * kFour;
    float v[kFour];
    load_floats<kFloat32>(shared + p.memory.x + walk.x_row * p.memory.x_row + column * 2, p,
                          walk.x_row, first + column, v);
    uint2 range = warp_range<kSymmetric>(v);
    if (threadIdx.x % 32 == 0) {
      atomicMax(&partition.own[1][walk.x_row], range.y);
      if (!kSymmetric) atomicMax(&partition.own[0][walk.x_row], range.x);
    }
  }
  __syncthreads();
  if (p.cluster == 1) return;
  int rank = blockIdx.x & (p.cluster - 1), count = m * (kSymmetric ? 1 : 2);
#pragma unroll 1
  for (int i = threadIdx.x; i < count << p.log_cluster; i += C::kThreads) {
    int bound = (i >> p.log_cluster) < m, x_row = (i >> p.log_cluster) - (bound ? 0 : m);
    store_remote(&partition.all[rank][bound][x_row], partition.own[bound][x_row], &barriers.ranges,
                 i & (p.cluster - 1));
  }
  TransactionBarrier::wait(&barriers.ranges, 0);
}

// Integers and their scales overwrite the floats they are made of. Two tiles at a time, because
// each instruction depends on the previous one.
template <class C, bool kSymmetric, bool kBlocks, bool kFloat32>
__device__ __forceinline__ void stage_integers(uint8_t* shared, Params const& p, int first,
                                               TileWalk walk, RangePartition<C>& partition) {
  constexpr int kAtOnce = kFloat32 ? 1 : 2, kBlock = C::kShortGroups ? C::kStepColumns : kKPerTile;
  int const lane_column = threadIdx.x % 32 * kFour;
#pragma unroll 1
  for (int left = walk.count; left > 0; left -= kAtOnce) {
    int x_row[kAtOnce], column[kAtOnce];
    uint8_t* staged[kAtOnce];
    float v[kAtOnce][kFour];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (j > 0 && j < left) walk.next();  // or the same again
      x_row[j] = walk.x_row, column[j] = walk.tile * kKPerTile + lane_column;
      staged[j] = shared + p.memory.x + x_row[j] * p.memory.x_row + column[j] * 2;
      load_floats<kFloat32>(staged[j], p, x_row[j], first + column[j], v[j]);
    }
    walk.next();
    uint2 bits[kAtOnce];
    Range<kSymmetric> range[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!kBlocks) {
        bits[j] = make_uint2(0, 0);
#pragma unroll 1
        for (int rank = 0; rank < p.cluster; ++rank) {
          uint32_t const(&theirs)[2][C::kBlockM] =
              p.cluster > 1 ? partition.all[rank] : partition.own;
          bits[j].y = max(bits[j].y, theirs[1][x_row[j]]);
          if (!kSymmetric) bits[j].x = max(bits[j].x, theirs[0][x_row[j]]);
        }
      } else if (kBlock == kKPerTile) {
        bits[j] = warp_range<kSymmetric>(v[j]);
      }
      if (!kBlocks || kBlock == kKPerTile) {
        range[j] = Range<kSymmetric>{-__uint_as_float(bits[j].x), __uint_as_float(bits[j].y)};
      } else {
        range[j] = range_of<kSymmetric>(v[j]);
        range[j].share(kBlock / kFour);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      Quantizer<kSymmetric> quantizer(range[j]);
#pragma unroll
      for (float& x : v[j]) x = quantizer.value(x);
      store_integers<C>(shared, staged[j], p, x_row[j], column[j], v[j], quantizer.scale);
    }
  }
}

// stage_integers() for at least kManyTiles tiles of symmetric blocks, by fewer instructions: eight
// lanes take a tile, two tiles at a time.
constexpr int kManyTiles = 64;
template <class C>
__device__ __forceinline__ void stage_many(uint8_t* shared, Params const& p, int tiles, int count) {
  constexpr int kLanes = kKPerTile / kLaneColumns, kWarpTiles = 32 / kLanes, kAtOnce = 2,
                kStep = C::kWarps * kWarpTiles;
  int const lane = threadIdx.x % 32, lane_column = lane % kLanes * kLaneColumns;
#pragma unroll 1
  for (int begin = threadIdx.x / 32 * kWarpTiles; begin < count; begin += kAtOnce * kStep) {
    uint8_t* staged[kAtOnce];
    float* scale[kAtOnce];
    float v[kAtOnce][kLaneColumns];
    Range<true> range[kAtOnce];
    bool there[kAtOnce];  // lanes without a tile execute the same shuffles
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      int const tile = begin + j * kStep + lane / kLanes;
      there[j] = tile < count;
      Quotient place(there[j] ? tile : 0, tiles);
      int const x_row = place.quotient, column = place.remainder * kKPerTile + lane_column;
      staged[j] = shared + p.memory.x + x_row * p.memory.x_row + column * 2;
      scale[j] = reinterpret_cast<float*>(shared + p.memory.scales) +
                 column / C::kStepColumns * C::kBlockM + x_row;
      uint4 const low = there[j] ? reinterpret_cast<uint4 const*>(staged[j])[0] : uint4{};
      uint4 const high = there[j] ? reinterpret_cast<uint4 const*>(staged[j])[1] : uint4{};
      uint32_t const words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      to_floats(words, p.x.x_type, v[j]);
      range[j] = range_of<true>(v[j]);
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
#pragma unroll
      for (Range<true>& of : range)
        of.add(Range<true>{0.0f, __shfl_xor_sync(~0u, of.high, distance)});
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      Quantizer<true> quantizer(range[j]);
      uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        words[i] =
            pack_pair<__half>(quantizer.value(v[j][2 * i]), quantizer.value(v[j][2 * i + 1]));
      if (!there[j]) continue;
      reinterpret_cast<uint4*>(staged[j])[0] = make_uint4(words[0], words[1], words[2], words[3]);
      reinterpret_cast<uint4*>(staged[j])[1] = make_uint4(words[4], words[5], words[6], words[7]);
      if (lane_column % C::kStepColumns == 0) *scale[j] = quantizer.scale;
    }
  }
}

template <class C, bool kSymmetric, bool kFloat32>
__device__ __forceinline__ void stage_floats_as_integers(uint8_t* shared, Params const& p,
                                                         int first, TileWalk const& walk,
                                                         RangePartition<C>& partition,
                                                         Barriers& barriers) {
  if (p.source == Source::kBlocks) {
    if constexpr (C::kStagesMany && kSymmetric && !kFloat32) {
      int const count = p.epilogue.m * walk.tiles;
      if (count >= kManyTiles) return stage_many<C>(shared, p, walk.tiles, count);
    }
    stage_integers<C, kSymmetric, true, kFloat32>(shared, p, first, walk, partition);
  } else {
    find_ranges<C, kSymmetric, kFloat32>(shared, p, first, walk, partition, barriers);
    stage_integers<C, kSymmetric, false, kFloat32>(shared, p, first, walk, partition);
  }
}

// stage_integers() for an x that is quantised already.
template <class C>
__device__ __forceinline__ void stage_codes(uint8_t* shared, Params const& p, int first,
                                            TileWalk walk) {
  QuantizedActivations const& q = p.quantized;
#pragma unroll 1
  for (int i = 0; i < walk.count; ++i, walk.next()) {
    int const column = walk.tile * kKPerTile + threadIdx.x % 32 * kFour;
    // In each 16 columns, eight bytes hold columns 0, 8, 1, 9, 2, 10, 3, 11, and eight bytes the
    // others (activation_position).
    uint2 codes =
        *reinterpret_cast<uint2 const*>(q.codes + int64_t(walk.x_row) * p.k_tiles * kKPerTile +
                                        first + column / 16 * 16 + column % 8 * 2);
    int64_t index =
        (q.block == -1 ? 0 : int64_t(unsigned(first + column) / unsigned(q.block)) * q.stride) +
        walk.x_row;
    int zero = q.zeros ? q.zeros[index] : 0, odd = column % 16 / 8;
    float v[kFour];
#pragma unroll
    for (int j = 0; j < kFour; ++j)
      v[j] = float(int(int8_t((j < 2 ? codes.x : codes.y) >> (j % 2 * 16 + odd * 8))) - zero);
    store_integers<C>(shared, shared + p.memory.x + walk.x_row * p.memory.x_row + column * 2, p,
                      walk.x_row, column, v, q.scales[index]);
  }
}

// The sums of x over each step, in the decoder's units: four lanes sum a step of a row, two one of
// 16 columns.
template <class C>
__device__ __forceinline__ void sum_steps(uint8_t* shared, Params const& p, int columns) {
  using E = CodeBias<typename C::Decode>;
  constexpr int kLanes = C::kStepColumns < 32 ? 2 : 4,
                kPieces = C::kStepColumns / (8 * kLanes),  // of 16 bytes, a lane
      kWarpSteps = 32 / kLanes;
  int const steps = columns / C::kStepColumns, count = p.epilogue.m * steps;
#pragma unroll 2
  // whole warps
  for (int item = threadIdx.x / kLanes; item < (count + kWarpSteps - 1) / kWarpSteps * kWarpSteps;
       item += C::kThreads / kLanes) {
    Quotient place(min(item, count - 1), steps);
    uint8_t const* row = shared + p.memory.x + place.quotient * p.memory.x_row +
                         place.remainder * (C::kStepColumns * 2);
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint4 v = *reinterpret_cast<uint4 const*>(row + (i * kLanes + threadIdx.x % kLanes) * 16);
      uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 pair = floats_of(words[j], C::kElementType);
        sums[j] += pair.x + pair.y;
      }
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (kLanes == 4) sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % kLanes == 0 && item < count)
      reinterpret_cast<float*>(
          shared + p.memory.sums)[place.remainder * C::kBlockM + place.quotient] = sum * E::kUnit;
  }
}

// Operand B of eight rows of x and 32 columns. Missing rows of x repeat the last row: their sums
// are not stored.
template <class C>
__device__ __forceinline__ uint32_t x_row_of_thread(uint8_t const* shared, Params const& p,
                                                    int m_block) {
  int lane = threadIdx.x % 32, x_row = min(m_block * 8 + lane % C::kBlockColumns, p.epilogue.m - 1);
  return cute::cast_smem_ptr_to_uint(shared + p.memory.x + x_row * p.memory.x_row + lane / 8 * 16);
}
__device__ __forceinline__ void load_operand_b(uint32_t row, uint32_t (&b)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(row)
               : "memory");
}

}  // namespace
}  // namespace cutlass_ops
