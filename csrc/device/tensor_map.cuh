// Tensor maps of TMA, made by the driver.
#pragma once

#include <cudaTypedefs.h>

#include "cutlass_ops/ops.h"
#include "device/launch.cuh"

namespace cutlass_ops::hopper {

// The driver's function that makes tensor maps, or why there is none; looked up once.
struct Encoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  Status status;

  Encoder() {
    constexpr char const* kCall = "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)";
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) {
      status = cuda_error(kCall, error);
    } else if (found != cudaDriverEntryPointSuccess || !function) {
      status = {Status::kCuda, std::string(kCall) + ": the driver has no such function (" + std::to_string(int(found)) +
                                   "); one of CUDA 12.0 or later is needed"};
    } else {
      encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }
  }
};
inline Encoder const& tensor_map_encoder() {
  static Encoder const encoder;
  return encoder;
}

// A tensor map of boxes, innermost dimension first; strides are bytes. Loads bring zeros from beyond the dimensions, stores
// write nothing there.
template <int kRank>
Status encode(CUtensorMapDataType type, void const* data, cuuint64_t const (&dims)[kRank],
              cuuint64_t const (&strides)[kRank - 1], cuuint32_t const (&box)[kRank], CUtensorMapSwizzle swizzle,
              CUtensorMapL2promotion promotion, CUtensorMap* map) {
  Encoder const& encoder = tensor_map_encoder();
  if (!encoder.status.ok()) return encoder.status;
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  CUresult result = encoder.encode(map, type, kRank, const_cast<void*>(data), dims, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {Status::kCuda, "cuTensorMapEncodeTiled: error " + std::to_string(int(result))};
  return {};
}

// Of rows of x [m][columns], rows `stride_bytes` apart, in boxes of 128 bytes x box_x_rows and the 128-byte swizzle.
inline Status encode_x_rows(void const* x, int element_bytes, int m, int columns, int64_t stride_bytes, int box_x_rows,
                            CUtensorMap* map) {
  return encode<2>(element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, x,
                   {cuuint64_t(columns), cuuint64_t(m)}, {cuuint64_t(stride_bytes)},
                   {cuuint32_t(128 / element_bytes), cuuint32_t(box_x_rows)}, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
}

}  // namespace cutlass_ops::hopper
