// Weight codes [N, K], one a byte, to the order of layout.h and back. Each lane owns the 16 bytes
// that the layout gives it, so packed codes move in coalesced 512-byte units; canonical ones move
// 16 codes a lane, in whole sectors of 32 bytes or more.
//
// A warp has 16 rows x 128 columns. For each unit, the four lanes of a group hold 16 codes of a row
// each (at 4 bits of two rows, g and g+8, in one byte each, at 2 bits also of columns 64 further).
// Word t of those is for lane t: a 4 x 4 transposition by shuffles.
#include "cutlass_ops/layout.h"
#include "device/launch.cuh"
#include "dispatch/launchers.h"
#include "formats/width.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 16;  // codes of a row that a lane moves at once
constexpr int kBlocks = kRowsPerPanel / kRowsPerBlock;

// Stored codes are centred: the top bit is inverted.
template <int kBits>
constexpr uint32_t kFlip = 0x01010101u << (kBits - 1);

// Columns 0 .. 15 of a row to words t = 0 .. 3 of columns 2t, 2t+8, 2t+1, 2t+9, and back.
__device__ __forceinline__ uint4 interleave(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5140), __byte_perm(v.x, v.z, 0x7362),
                    __byte_perm(v.y, v.w, 0x5140), __byte_perm(v.y, v.w, 0x7362));
}
__device__ __forceinline__ uint4 deinterleave(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420),
                    __byte_perm(v.x, v.y, 0x7531), __byte_perm(v.z, v.w, 0x7531));
}

// Word j of lane i of each four becomes word i of lane j.
__device__ __forceinline__ uint4 transpose(uint4 v, int lane) {
  bool const odd = lane & 1, upper = lane & 2;
  uint32_t first = __shfl_xor_sync(~0u, odd ? v.x : v.y, 1),
           second = __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);
  if (odd) {
    v.x = first, v.z = second;
  } else {
    v.y = first, v.w = second;
  }
  first = __shfl_xor_sync(~0u, upper ? v.x : v.z, 2),
  second = __shfl_xor_sync(~0u, upper ? v.y : v.w, 2);
  if (upper) {
    v.x = first, v.y = second;
  } else {
    v.z = first, v.w = second;
  }
  return v;
}

__device__ __forceinline__ uint4 exclusive_or(uint4 v, uint32_t word) {
  return make_uint4(v.x ^ word, v.y ^ word, v.z ^ word, v.w ^ word);
}

__device__ __forceinline__ uint4 or_shifted(uint4 v, uint4 other, int left) {
  return make_uint4(v.x | other.x << left, v.y | other.y << left, v.z | other.z << left,
                    v.w | other.w << left);
}
__device__ __forceinline__ uint4 and_shifted(uint4 v, int right, uint32_t mask) {
  return make_uint4(v.x >> right & mask, v.y >> right & mask, v.z >> right & mask,
                    v.w >> right & mask);
}

__device__ __forceinline__ bool is_vector(PackProblem const& p, uint8_t const* address,
                                          int column) {
  return p.k_stride == 1 && column + kColumns <= p.k &&
         reinterpret_cast<uintptr_t>(address) % kColumns == 0;
}

// Sixteen codes; those of value zero where the matrix has none.
template <int kBits>
__device__ __forceinline__ uint4 load_codes(PackProblem const& p, int row, int column) {
  if (row >= p.n || column >= p.k)
    return make_uint4(kFlip<kBits>, kFlip<kBits>, kFlip<kBits>, kFlip<kBits>);
  uint8_t const* from = p.codes + row * p.n_stride + column * p.k_stride;
  if (is_vector(p, from, column)) return __ldcs(reinterpret_cast<uint4 const*>(from));
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    uint32_t const code = column + i < p.k ? from[i * p.k_stride] : kFlip<kBits> & 0xff;
    words[i / 4] |= code << i % 4 * 8;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <int kBits>
__device__ __forceinline__ void store_codes(PackProblem const& p, int row, int column,
                                            uint4 centred) {
  if (row >= p.n || column >= p.k) return;
  uint4 const v = exclusive_or(centred, kFlip<kBits>);
  uint8_t* to = p.codes + row * p.n_stride + column * p.k_stride;
  if (is_vector(p, to, column)) return __stcs(reinterpret_cast<uint4*>(to), v);
  uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (column + i < p.k) to[i * p.k_stride] = uint8_t(words[i / 4] >> i % 4 * 8);
  }
}

// The position of a warp and its lanes.
template <int kBits>
struct Coordinates {
  static constexpr int kUnits = kBits / 2;                 // of 16 rows x 128 columns
  static constexpr int kUnitColumns = kKPerTile / kUnits;  // 128 | 64 | 32
  static constexpr int kWords = words_of_16_k(kBits);
  static constexpr bool kSharesBytes = byte_rows(kBits) == 2;  // rows g and g + 8
  static constexpr int kColumnsOfNibble = nibble_columns(kBits);
  static constexpr int kLoads = kUnits * kColumnsOfNibble;
  static constexpr int kLoadColumns = kUnitColumns / kColumnsOfNibble;
  int lane, row, column;  // of the lane in unit 0; at 4 bits it has row + 8, too
  int64_t packed;         // the lane's byte in unit 0

  __device__ __forceinline__ Coordinates(PackProblem const& p, int64_t warp) {
    lane = threadIdx.x % 32;
    int const tiles = int(padded_k(p.k) / kKPerTile), block = int(warp % kBlocks), word = lane % 4;
    int64_t const chunk = warp / kBlocks;
    row = int(chunk / tiles) * kRowsPerPanel + block * kRowsPerBlock + lane / 4 + word % kWords * 8;
    column = int(chunk % tiles) * kKPerTile + word / kWords * kColumns;
    packed = warp * (kUnits * kUnitBytes) + lane * kLaneBytes;
  }
};

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    pack_codes(__grid_constant__ PackProblem const p, int64_t warps) {
  pdl_wait();  // the next kernel may read a packed weight before it waits
  int64_t const warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (warp >= warps) return;
  using C = Coordinates<kBits>;
  C const coord(p, warp);
  uint4 low[C::kLoads], high[C::kLoads];
#pragma unroll
  for (int i = 0; i < C::kLoads; ++i) {  // all loads are issued before the first is used
    low[i] = load_codes<kBits>(p, coord.row, coord.column + i * C::kLoadColumns);
    if constexpr (C::kSharesBytes)
      high[i] = load_codes<kBits>(p, coord.row + 8, coord.column + i * C::kLoadColumns);
  }
#pragma unroll
  for (int u = 0; u < C::kUnits; ++u) {
    uint4 v = exclusive_or(low[u * C::kColumnsOfNibble], kFlip<kBits>);
    if constexpr (C::kColumnsOfNibble == 2)
      v = or_shifted(v, exclusive_or(low[u * 2 + 1], kFlip<kBits>), 2);
    if constexpr (C::kSharesBytes)
      v = or_shifted(v, exclusive_or(high[u * C::kColumnsOfNibble], kFlip<kBits>), 4);
    if constexpr (C::kColumnsOfNibble == 2)
      v = or_shifted(v, exclusive_or(high[u * 2 + 1], kFlip<kBits>), 6);
    __stcs(reinterpret_cast<uint4*>(p.packed + coord.packed + u * kUnitBytes),
           transpose(interleave(v), coord.lane));
  }
}

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    unpack_codes(__grid_constant__ PackProblem const p, int64_t warps) {
  pdl_wait();  // the next kernel may read a packed weight before it waits
  int64_t const warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (warp >= warps) return;
  using C = Coordinates<kBits>;
  C const coord(p, warp);
  uint4 units[C::kUnits];
#pragma unroll
  for (int u = 0; u < C::kUnits; ++u) {
    units[u] = __ldcs(reinterpret_cast<uint4 const*>(p.packed + coord.packed + u * kUnitBytes));
  }
#pragma unroll
  for (int u = 0; u < C::kUnits; ++u) {
    uint4 const v = deinterleave(transpose(units[u], coord.lane));
    int const column = coord.column + u * C::kUnitColumns;
    if constexpr (C::kSharesBytes) {
      constexpr uint32_t kMask = 0x01010101u * ((1 << kBits) - 1);
#pragma unroll
      for (int i = 0; i < C::kColumnsOfNibble; ++i) {
        int const at = column + i * C::kLoadColumns;
        store_codes<kBits>(p, coord.row, at, and_shifted(v, i * kBits, kMask));
        store_codes<kBits>(p, coord.row + 8, at, and_shifted(v, 4 + i * kBits, kMask));
      }
    } else {
      store_codes<kBits>(p, coord.row, column, v);
    }
  }
}

Status launch_warps(void (*kernel)(PackProblem, int64_t), PackProblem const& problem,
                    Stream stream) {
  int64_t const warps = padded_rows(problem.n) / kRowsPerBlock * (padded_k(problem.k) / kKPerTile);
  int64_t const blocks = (warps * 32 + kThreads - 1) / kThreads;
  return launch(kernel, dim3(unsigned(blocks)), kThreads, 0, stream, problem, warps);
}

}  // namespace

Status launch_pack(PackProblem const& problem, Stream stream) {
  return with_width(problem.bits, [&](auto width) {
    return launch_warps(pack_codes<decltype(width)::kBits>, problem, stream);
  });
}

Status launch_unpack(PackProblem const& problem, Stream stream) {
  return with_width(problem.bits, [&](auto width) {
    return launch_warps(unpack_codes<decltype(width)::kBits>, problem, stream);
  });
}

}  // namespace cutlass_ops
