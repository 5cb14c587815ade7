// int8 activations as 16-bit floats, for wgmma_fold16, in the order of columns: scale * (code -
// zero point), rounded once; or, where a row of x has one scale, code - zero point, which is exact:
// the scale is applied to the sums.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/scalar.cuh"

namespace cutlass_ops {

// The values of 16 columns' codes in kernel order, stored as piece `piece` of all rows'.
template <class Element>
__device__ __forceinline__ void store_upcast(void* to, int64_t piece, uint4 const& codes,
                                             float zero, float scale) {
  uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    auto const value = [&](int byte) {
      return scale * (float(int8_t(words[i] >> 8 * byte)) - zero);
    };
    // Bytes 0 and 2 are columns 2i and 2i + 1, bytes 1 and 3 are 2i + 8 and 2i + 9.
    pairs[i] = pack_pair<Element>(value(0), value(2)),
    pairs[4 + i] = pack_pair<Element>(value(1), value(3));
  }
  uint4* out = static_cast<uint4*>(to) + piece * 2;
  out[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]),
  out[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

__device__ __forceinline__ void store_upcast(QuantizedActivations const& out, int64_t piece,
                                             uint4 const& codes, float zero, float scale) {
  // that of a row with NaN or infinity is NaN
  if (out.block == -1 && !out.upcast_row_scales && scale == scale) scale = 1.0f;
  if (out.upcast_type == DataType::kFloat16) {
    store_upcast<__half>(out.upcast, piece, codes, zero, scale);
  } else {
    store_upcast<__nv_bfloat16>(out.upcast, piece, codes, zero, scale);
  }
}

}  // namespace cutlass_ops
