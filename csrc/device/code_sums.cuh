// QuantizedActivations::sums: the codes of 128 columns less their zero points, for products with 8-bit weights that have zero points. Integers below 2^15, exact
// in fp32.
#pragma once

#include "cutlass_ops/layout.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

// Eight neighbouring lanes come here, with the codes of 16 columns each: pieces from a multiple of eight on of one row.
__device__ __forceinline__ void store_code_sum(QuantizedActivations const& x, int row, int piece, uint4 codes, int zero) {
  constexpr int kPieces = kKPerTile / 16;
  uint32_t const lanes = 0xffu << (threadIdx.y * blockDim.x + threadIdx.x) % 32 / kPieces * kPieces;
  int sum = __dp4a(int(codes.x), 0x01010101, __dp4a(int(codes.y), 0x01010101, 0));
  sum = __dp4a(int(codes.z), 0x01010101, __dp4a(int(codes.w), 0x01010101, sum));
#pragma unroll
  for (int distance = 1; distance < kPieces; distance *= 2) sum += __shfl_xor_sync(lanes, sum, distance);
  if (piece % kPieces == 0) x.sums[int64_t(piece / kPieces) * x.stride + row] = float(sum - kKPerTile * zero);
}

}  // namespace cutlass_ops
