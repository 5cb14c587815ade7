// Packed codes -> floats [N][K], for looking at a weight and for those who want the matrix itself.
//
// A block takes 64 rows x 256 columns: its lanes put the codes of their fragments in rows in shared memory, and then take eight neighbours
// of a row each to 16-byte stores. The arithmetic is the reference's: (q - z) * s, c * s + o or book[q] * s, each operation rounded to fp32 by
// itself, then one rounding to the output's type.
#include "cutlass_ops/layout.h"
#include "device/launch.cuh"
#include "device/scalar.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kTiles = 2;  // of K, a block
constexpr int kColumns = kTiles * kKPerTile;
constexpr int kStride = kColumns + 8;  // bytes of a row in shared memory: neighbours start on other banks

struct Params {
  DequantizeProblem problem;
  int k_tiles, n_pad;
  bool vector_stores;  // rows of the output start on 16 bytes, and columns keep their order
};

// The codes of a chunk, centred, a byte each, to rows of shared memory.
template <int kBits>
__device__ __forceinline__ void spread_chunk(uint4 const* chunk, int8_t* rows) {
  constexpr int kUnits = chunk_bytes(kBits) / kUnitBytes / 4, kUnitColumns = kKPerTile / kUnits;
  for (int i = threadIdx.x; i < chunk_bytes(kBits) / kLaneBytes; i += kThreads) {
    int unit = i / 32, g = i % 32 / 4, t = i % 4;
    int8_t* to = rows + (unit / kUnits * 16 + g) * kStride + unit % kUnits * kUnitColumns + 2 * t;
    uint4 q = __ldcs(chunk + i);
    uint32_t const words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int pair = 0; pair < 8 * 8 / kBits; ++pair) {
      // Of the lane's record: word, row (g or g + 8) and pair of columns (2t, 2t + 1, or eight further).
      int word = kBits == 4 ? pair / 4 : pair / 2, half = kBits == 4 ? pair % 2 : word % 2;
      int eight = kBits == 4 ? pair / 2 % 2 : pair % 2, column16 = kBits == 4 ? word : word / 2;
      int low_shift = kBits == 4 ? 4 * (2 * eight + half) : 8 * eight, high_shift = low_shift + 16;
      int low = int(words[word] << (32 - kBits - low_shift)) >> (32 - kBits);
      int high = int(words[word] << (32 - kBits - high_shift)) >> (32 - kBits);
      *reinterpret_cast<uint16_t*>(to + 8 * half * kStride + 16 * column16 + 8 * eight) =
          uint16_t((low & 0xff) | (high & 0xff) << 8);
    }
  }
}

__device__ __forceinline__ void store_value(void* out, DataType type, int64_t index, float v) {
  if (type == DataType::kFloat32) {
    static_cast<float*>(out)[index] = v;
  } else if (type == DataType::kFloat16) {
    static_cast<__half*>(out)[index] = __float2half_rn(v);
  } else {
    static_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16_rn(v);
  }
}

// Eight neighbours; index is a multiple of 8.
__device__ __forceinline__ void store_eight(void* out, DataType type, int64_t index, float const (&v)[8]) {
  if (type == DataType::kFloat32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(out) + index);
    __stcs(to, make_float4(v[0], v[1], v[2], v[3]));
    __stcs(to + 1, make_float4(v[4], v[5], v[6], v[7]));
    return;
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (type == DataType::kFloat16) {
      __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
      words[i] = reinterpret_cast<uint32_t const&>(pair);
    } else {
      __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      words[i] = reinterpret_cast<uint32_t const&>(pair);
    }
  }
  __stcs(reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + index), make_uint4(words[0], words[1], words[2], words[3]));
}

template <int kBits>
__global__ void __launch_bounds__(kThreads, 5) dequantize_chunks(__grid_constant__ Params const p) {
  __shared__ __align__(16) int8_t rows[kRowsPerSlab * kStride];
  __shared__ float book[16];
  wait_for_predecessor();
  PackedWeight const& w = p.problem.weight;
  int slab = blockIdx.y, first_tile = blockIdx.x * kTiles;
  if (w.book && threadIdx.x < 16) book[threadIdx.x] = w.book[threadIdx.x ^ 8];  // by the centred code's four bits
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (first_tile + tile >= p.k_tiles) break;
    int64_t chunk = int64_t(slab) * p.k_tiles + first_tile + tile;
    spread_chunk<kBits>(reinterpret_cast<uint4 const*>(w.codes + chunk * chunk_bytes(kBits)), rows + tile * kKPerTile);
  }
  __syncthreads();
#pragma unroll 2
  for (int i = threadIdx.x; i < kRowsPerSlab * kColumns / 8; i += kThreads) {
    int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8, n = slab * kRowsPerSlab + row;
    int k = first_tile * kKPerTile + column;
    if (n >= w.n || k >= w.k) continue;
    uint2 codes = *reinterpret_cast<uint2 const*>(rows + row * kStride + column);
    int group = w.group_size == -1 ? 0 : k / w.group_size;  // of all eight
    int64_t at = int64_t(group) * p.n_pad + slab * kRowsPerSlab + group_row(row);
    float scale = load_float(w.scales, w.scale_type, at), offset = w.offsets ? load_float(w.offsets, w.offset_type, at) : 0.0f;
    int zero = w.zeros ? w.zeros[at] : 0;
    float v[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      int code = int8_t((e < 4 ? codes.x : codes.y) >> e % 4 * 8);
      v[e] = __fmul_rn(w.book ? book[code & 15] : float(code - zero), scale);
      if (w.offsets) v[e] = __fadd_rn(v[e], offset);
    }
    int64_t index = int64_t(n) * w.k;
    if (p.vector_stores) {
      store_eight(p.problem.out, p.problem.out_type, index + k, v);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (k + e < w.k) store_value(p.problem.out, p.problem.out_type, index + (w.perm ? w.perm[k + e] : k + e), v[e]);
    }
  }
}

}  // namespace

Status launch_dequantize(DequantizeProblem const& problem, Stream stream) {
  PackedWeight const& w = problem.weight;
  bool aligned = reinterpret_cast<uintptr_t>(problem.out) % 16 == 0 && w.k % 8 == 0;
  Params p{problem, int(padded_k(w.k) / kKPerTile), int(padded_rows(w.n)), aligned && !w.perm};
  dim3 grid((p.k_tiles + kTiles - 1) / kTiles, p.n_pad / kRowsPerSlab);
  return w.bits == 4 ? launch(dequantize_chunks<4>, grid, kThreads, 0, stream, p)
                     : launch(dequantize_chunks<8>, grid, kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
