// A packed weight -> PackedWeight::sums, sum_scales and row_sums (corrections.h), once in a weight's life. A block takes a slab of 64 rows, a warp 16 of these, and reads
// them twice: for each row's scale, and for the sums.
#include <cuda_fp16.h>

#include "cutlass_ops/corrections.h"
#include "device/decode.cuh"
#include "device/launch.cuh"
#include "device/scalar.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 128;

struct Params {
  PackedWeight weight;
  uint8_t* sums;
  void* sum_scales;
  float* row_sums;
  int tiles, windows, group_tiles, n_pad;  // group_tiles: tiles of K that share a scale
};

// Minus the sums of a tile's 128 weights of rows g and g + 8, times 16 where the decoder's codes are; the same in the four lanes of a row.
template <int kBits, bool kZeros>
__device__ __forceinline__ void sum_tile(Params const& p, int slab, int tile, float (&sums)[2]) {
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t const* from =
      p.weight.codes + (int64_t(slab) * p.tiles + tile) * chunk_bytes(kBits) + warp * (kBits / 2) * kUnitBytes;
  int64_t const row = int64_t(tile / p.group_tiles) * p.n_pad + slab * kRowsPerSlab + lane / 4 * 8 + warp * 2;
  int totals[2] = {};
#pragma unroll
  for (int unit = 0; unit < kBits / 2; ++unit) {
    uint4 const v = *reinterpret_cast<uint4 const*>(from + unit * kUnitBytes + lane * kLaneBytes);
    uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int piece = 0; piece < (kBits == 4 ? 2 : 1); ++piece) {
      uint32_t a[4];
      if constexpr (kBits == 8) {
        decode::Int8Int8::fragment(words, a);
      } else if constexpr (kZeros) {
        auto const zeros = decode::Int4MinusZeroInt8::zero_constants(p.weight.zeros[row], p.weight.zeros[row + 1]);
        decode::Int4MinusZeroInt8::fragment(words + piece * 2, zeros, a);
      } else {
        decode::Int4Int8::fragment(words + piece * 2, a);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) totals[i % 2] = __dp4a(int(a[i]), int(0xffffffff), totals[i % 2]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    totals[h] += __shfl_xor_sync(0xffffffffu, totals[h], 1);
    totals[h] += __shfl_xor_sync(0xffffffffu, totals[h], 2);
    sums[h] = float(totals[h]) * load_float(p.weight.scales, p.weight.scale_type, row + h);
  }
}

template <int kBits, bool kZeros>
__global__ void __launch_bounds__(kThreads) sum_slab(__grid_constant__ Params const p) {
  constexpr int kWindow = correction_window(kBits), kSixteens = kWindow / 16;
  int const slab = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  wait_for_predecessor();
  float largest[2] = {};
  double totals[2] = {};
  for (int tile = 0; tile < p.tiles; ++tile) {
    float sums[2];
    sum_tile<kBits, kZeros>(p, slab, tile, sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = fmaxf(largest[h], fabsf(sums[h])), totals[h] -= sums[h];
  }
  // Powers of two that scale_type holds, by which sums come below 2^14 (2^16 beside the largest fp16 scales).
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    bool const half = p.weight.scale_type == DataType::kFloat16;
    int const wanted = int(__float_as_uint(largest[h]) >> 23) - 127 - 13;
    int const exponent = min(max(wanted, half ? -24 : -126), half ? 15 : 126);
    inverse[h] = exp2f(float(-exponent));
    int const position = slab * kRowsPerSlab + lane / 4 * 8 + warp * 2 + h;
    if (t != 0) continue;
    store_float(p.sum_scales, p.weight.scale_type, position, exp2f(float(exponent)));
    p.row_sums[position] = float(totals[h] / (kBits == 4 && !kZeros ? decode::Int4Int8::kScale : 1));
  }
  for (int sixteen = 0; sixteen < p.windows * kSixteens; ++sixteen) {
    // Of tiles 2t, 2t + 1, 2t + 8 and 2t + 9.
    float values[2][4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (sixteen * 16 + i >= p.tiles) break;
      float sums[2];
      sum_tile<kBits, kZeros>(p, slab, sixteen * 16 + i, sums);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (i % 8 / 2 == t) values[h][i / 8 * 2 + i % 2] = sums[h] * inverse[h];
      }
    }
    uint32_t parts[2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float const low = values[r % 2][r / 2 * 2], high = values[r % 2][r / 2 * 2 + 1];
      __half2 const first = __floats2half2_rn(low, high);
      __half2 const second = __floats2half2_rn(low - __low2float(first), high - __high2float(first));
      parts[0][r] = reinterpret_cast<uint32_t const&>(first), parts[1][r] = reinterpret_cast<uint32_t const&>(second);
    }
    int const window = sixteen / kSixteens;
    uint8_t* to = p.sums + (int64_t(slab) * p.windows + window) * chunk_bytes(kBits) + warp * (kBits / 2) * kUnitBytes +
                  sixteen % kSixteens * 2 * kUnitBytes + lane * kLaneBytes;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      *reinterpret_cast<uint4*>(to + part * kUnitBytes) =
          make_uint4(parts[part][0], parts[part][1], parts[part][2], parts[part][3]);
    }
  }
}

}  // namespace

Status launch_sum_weights(PackedWeight const& weight, uint8_t* sums, void* sum_scales, float* row_sums, Stream stream) {
  int const tiles = int(padded_k(weight.k) / kKPerTile), n_pad = int(padded_rows(weight.n));
  Params const p{weight,
                 sums,
                 sum_scales,
                 row_sums,
                 tiles,
                 correction_windows(tiles, weight.bits),
                 weight.group_size == -1 ? tiles : weight.group_size / kKPerTile,
                 n_pad};
  void (*kernel)(Params) = sum_slab<8, false>;
  if (weight.bits == 4) kernel = weight.zeros ? sum_slab<4, true> : sum_slab<4, false>;
  return launch(kernel, dim3(unsigned(n_pad / kRowsPerSlab)), kThreads, 0, stream, p);
}

}  // namespace cutlass_ops
