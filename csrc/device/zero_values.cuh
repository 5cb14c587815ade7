// Zero values of activations (zero_compensation.h): zero points times scales as two fp16 numbers
// each, by a power of two that those of a zero row share.
#pragma once

#include <cuda_fp16.h>

#include "cutlass_ops/problem.h"
#include "cutlass_ops/zero_compensation.h"

namespace cutlass_ops {

// The power of two for the largest magnitude of a zero row: it brings values below 2^14, and then
// the second parts of all relevant values are normal numbers.
struct ZeroScale {
  float scale, inverse;
  __device__ __forceinline__ explicit ZeroScale(float largest) {
    int const exponent = max(int(__float_as_uint(largest) >> 23) - 127 - 13, -126);
    scale = __uint_as_float(uint32_t(exponent + 127) << 23),
    inverse = __uint_as_float(uint32_t(127 - exponent) << 23);
  }
};

struct ZeroParts {
  __half first, second;
  __device__ __forceinline__ ZeroParts(float value, ZeroScale const& by) {
    float const scaled = value * by.inverse;
    first = __float2half_rn(scaled), second = __float2half_rn(scaled - __half2float(first));
  }
};

// The position of the first part of a tile's zero value of a row of x, the tile being one of
// kTilesPerZeroRow; the second part is 16 further.
__device__ __forceinline__ __half* zero_value_of(QuantizedActivations const& x, int x_row, int rows,
                                                 int row, int tile) {
  return static_cast<__half*>(x.zero_values) + (int64_t(x_row) * rows + row) * kZeroRow +
         tile / 16 * 32 + tile % 16;
}

}  // namespace cutlass_ops
