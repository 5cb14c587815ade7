// int8 activations as fp16 integers, for wgmma_gemm_a16: codes less zero points, |q - za| <= 255, in the order of columns. Products with weights less
// their zero points are exact, and so are their fp32 sums over up to 128 columns, |I| <= 255 * 255 * 128 < 2^23: what int8 instructions would give, at
// half their rate, but without conversions to float in the promotion, and with any zero points for nothing.
//
// Where a step along K has a scale of its own, or the weight has offsets, two factors of each token and step come with them: its scale, and its scale
// times the sum of q - za, by which the weight's offset is multiplied. They lie as the accumulators want them (hopper_gemm.cuh):
//   factors [tile of 128 columns][16 tokens][step in the tile][2][place],   token 8j + 2t + e of the 16 at place 4t + 2j + e
#pragma once

#include <cuda_fp16.h>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

// 16 columns' codes in kernel order to fp16, stored as piece `piece` of all rows'. Returns the sum of what is stored.
__device__ __forceinline__ int store_wide(QuantizedActivations const& out, int64_t piece, uint4 const& codes, int zero) {
  uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
  // 0x64 above a byte is 1024 + byte; a code's inverted sign adds 128 (decode.cuh).
  __half2 const less = __half2half2(__ushort_as_half(uint16_t(0x6480 + zero)));
  uint32_t wide[8];
  int sum = -16 * zero;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t const code = words[i] ^ 0x80808080u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // columns 2i, 2i + 1; 2i + 8, 2i + 9
      uint32_t const pair = __byte_perm(code, 0x64646464u, half ? 0x4341 : 0x4240);
      __half2 const value = __hsub2(reinterpret_cast<__half2 const&>(pair), less);
      wide[half * 4 + i] = reinterpret_cast<uint32_t const&>(value);
    }
    sum = __dp4a(int(words[i]), 0x01010101, sum);
  }
  uint4* to = static_cast<uint4*>(out.wide) + piece * 2;
  to[0] = make_uint4(wide[0], wide[1], wide[2], wide[3]), to[1] = make_uint4(wide[4], wide[5], wide[6], wide[7]);
  return sum;
}

// The sum of a step's pieces, which neighbouring lanes hold. `lanes` come here, or have ended.
__device__ __forceinline__ int sum_of_step(QuantizedActivations const& out, int sum, uint32_t lanes = ~0u) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    int const other = __shfl_xor_sync(lanes, sum, distance);
    if (distance * 16 < out.step) sum += other;
  }
  return sum;
}

// Where the scale of a row in the step of piece `piece` goes; its other factor is 16 further, the next row's, of an even one, behind it.
__device__ __forceinline__ float* factors_of(QuantizedActivations const& out, int row, int piece) {
  constexpr int kTilePieces = kKPerTile / 16;
  int64_t const tile = int64_t(piece / kTilePieces) * (out.stride / 16) + row / 16;
  int const step = piece % kTilePieces * 16 / out.step;
  return out.factors + (tile * (kKPerTile / out.step) + step) * 32 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
}

}  // namespace cutlass_ops
