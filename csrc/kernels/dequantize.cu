// Packed codes -> floats [N][K], for looking at a weight and for those who want the matrix itself.
//
// A block takes a chunk of 64 rows x 128 columns: its lanes decode what they would hold in a product, and the values leave through shared
// memory so that every row is stored in whole lines. The arithmetic is the reference's: (q - z) * s or c * s + o, each operation rounded to
// fp32 by itself, then one rounding to the output's type.
#include "cutlass_ops/layout.h"
#include "device/launch.cuh"
#include "device/scalar.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;

struct Params {
  DequantizeProblem problem;
  int k_tiles, n_pad;
};

// The value of one centred code.
__device__ __forceinline__ float value(PackedWeight const& w, int code, int64_t index) {
  float scale = load_float(w.scales, w.scale_type, index);
  if (w.book) return __fmul_rn(w.book[code + 8], scale);
  if (w.zeros) code -= w.zeros[index];
  float v = __fmul_rn(float(code), scale);
  return w.offsets ? __fadd_rn(v, load_float(w.offsets, w.offset_type, index)) : v;
}

template <int kBits>
__global__ void __launch_bounds__(kThreads) dequantize_chunk(__grid_constant__ Params const p) {
  wait_for_predecessor();
  constexpr int kStride = kKPerTile + 2;
  __shared__ float tile[kRowsPerSlab * kStride];
  PackedWeight const& w = p.problem.weight;
  int slab = blockIdx.y, k_tile = blockIdx.x;
  uint4 const* chunk = reinterpret_cast<uint4 const*>(w.codes + (int64_t(slab) * p.k_tiles + k_tile) * chunk_bytes(kBits));
  constexpr int kUnits = chunk_bytes(kBits) / kUnitBytes / 4, kUnitColumns = kKPerTile / kUnits;
  for (int i = threadIdx.x; i < chunk_bytes(kBits) / kLaneBytes; i += kThreads) {
    int unit = i / 32, g = i % 32 / 4, t = i % 4;
    int first_row = unit / kUnits * 16 + g, first_column = unit % kUnits * kUnitColumns + 2 * t;
    uint4 q = chunk[i];
    uint32_t const words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int e = 0; e < 16 * 8 / kBits; ++e) {
      // Of the lane's record: word j, and inside it element 0..3 for k 2t, 2t+8, 2t+1, 2t+9 of one of two rows.
      int word = e / (32 / kBits), element = kBits == 4 ? e % 8 / 2 : e % 4, half = kBits == 4 ? e % 2 : word % 2;
      int column16 = kBits == 4 ? word : word / 2;
      int shift = kBits == 4 ? 4 * (e % 8) : 8 * element;
      int code = int(words[word] << (32 - kBits - shift)) >> (32 - kBits);
      int row = first_row + 8 * half, column = first_column + 16 * column16 + element / 2 + 8 * (element % 2);
      tile[row * kStride + column] = float(code);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRowsPerSlab * kKPerTile; i += kThreads) {
    int row = i / kKPerTile, n = slab * kRowsPerSlab + row, k = k_tile * kKPerTile + i % kKPerTile;
    if (n >= w.n || k >= w.k) continue;
    int group = w.group_size == -1 ? 0 : k / w.group_size;
    float v =
        value(w, int(tile[row * kStride + i % kKPerTile]), int64_t(group) * p.n_pad + slab * kRowsPerSlab + group_row(row));
    int64_t index = int64_t(n) * w.k + (w.perm ? w.perm[k] : k);
    if (p.problem.out_type == DataType::kFloat32) {
      static_cast<float*>(p.problem.out)[index] = v;
    } else if (p.problem.out_type == DataType::kFloat16) {
      static_cast<__half*>(p.problem.out)[index] = __float2half_rn(v);
    } else {
      static_cast<__nv_bfloat16*>(p.problem.out)[index] = __float2bfloat16_rn(v);
    }
  }
}

}  // namespace

Status launch_dequantize(DequantizeProblem const& problem, Stream stream) {
  PackedWeight const& w = problem.weight;
  Params p{problem, int(padded_k(w.k) / kKPerTile), int(padded_rows(w.n))};
  dim3 grid(p.k_tiles, p.n_pad / kRowsPerSlab);
  return w.bits == 4 ? launch(dequantize_chunk<4>, grid, kThreads, 0, stream, p)
                     : launch(dequantize_chunk<8>, grid, kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
