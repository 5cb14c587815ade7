// Tensor maps of TMA, made by the driver.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "device/launch.cuh"
#include "dispatch/grouped.h"
#include "dispatch/problem.h"

namespace cutlass_ops::hopper {

// The driver's function that makes tensor maps, or the reason why it is missing.
template <class Function>
struct Encoder {
  Function encode = nullptr;
  Status status;

  explicit Encoder(char const* name) {
    std::string const call = std::string("cudaGetDriverEntryPointByVersion(") + name + ")";
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) {
      status = cuda_error(call.c_str(), error);
    } else if (found != cudaDriverEntryPointSuccess || !function) {
      status = {Status::kCuda, call + ": the driver has no such function (" +
                                   std::to_string(int(found)) +
                                   "); one of CUDA 12.0 or later is needed"};
    } else {
      encode = reinterpret_cast<Function>(function);
    }
  }

  // The driver needs the thread's context; a thread that has not used the runtime, such as
  // autograd's, has none.
  template <class... Arguments>
  CUresult operator()(Arguments... arguments) const {
    static thread_local bool const bound = [] {
      int device = 0;
      return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
    }();
    return bound ? encode(arguments...) : CUDA_ERROR_INVALID_CONTEXT;
  }
};

// A tensor map of boxes, innermost dimension first; strides are bytes. Loads bring zeros from
// beyond the dimensions, stores write nothing there.
template <int kRank>
Status encode(CUtensorMapDataType type, void const* data, cuuint64_t const (&dims)[kRank],
              cuuint64_t const (&strides)[kRank - 1], cuuint32_t const (&box)[kRank],
              CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMap* map) {
  // looked up once
  static Encoder<PFN_cuTensorMapEncodeTiled_v12000> const encoder("cuTensorMapEncodeTiled");
  if (!encoder.status.ok()) return encoder.status;
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  CUresult result =
      encoder(map, type, kRank, const_cast<void*>(data), dims, strides, box, steps,
              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return {Status::kCuda, "cuTensorMapEncodeTiled: error " + std::to_string(int(result))};
  return {};
}

// The swizzle of lines of 64 or 128 bytes.
inline CUtensorMapSwizzle swizzle_of(int line_bytes) {
  return line_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
}

// Tensor map of rows of x [m][columns], rows `stride_bytes` apart, in boxes of 128 bytes x
// box_x_rows and the 128-byte swizzle.
inline Status encode_x_rows(void const* x, int element_bytes, int m, int columns,
                            int64_t stride_bytes, int box_x_rows, CUtensorMap* map) {
  return encode<2>(
      element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, x,
      {cuuint64_t(columns), cuuint64_t(m)}, {cuuint64_t(stride_bytes)},
      {cuuint32_t(128 / element_bytes), cuuint32_t(box_x_rows)}, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
}

// Tensor map of 16-bit outputs [m][columns] of a gated weight, 32 for each row panel: boxes of 32
// outputs x box_rows rows, in the 64-byte swizzle.
inline Status encode_gated_rows(void* out, int m, int columns, int box_rows, CUtensorMap* map) {
  return encode<2>(CU_TENSOR_MAP_DATA_TYPE_UINT16, out, {cuuint64_t(columns), cuuint64_t(m)},
                   {cuuint64_t(columns) * 2}, {kRowsPerPanel / 2, cuuint32_t(box_rows)},
                   CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
}

// Tensor map of the pixels of an image under one tap of a kernel, for each place of the kernel, in
// boxes of `line_bytes` of a pixel's `channels` x `box_pixels`. Pixels are `pixel_bytes` apart. The
// image is one that im2col_rank() takes.
inline Status encode_pixels(void const* x, int element_bytes, int channels, int64_t pixel_bytes,
                            ImageRows const& image, int box_pixels, CUtensorMap* map,
                            int line_bytes = 128) {
  static Encoder<PFN_cuTensorMapEncodeIm2col_v12000> const encoder("cuTensorMapEncodeIm2col");
  if (!encoder.status.ok()) return encoder.status;
  int const rank = im2col_rank(image);
  // Innermost first: channels, width, height, with rank 5 depth, and images.
  cuuint64_t dims[5] = {cuuint64_t(channels)}, strides[4] = {cuuint64_t(pixel_bytes)};
  cuuint32_t steps[5] = {1};
  int lower[3], upper[3];  // where the first tap is, from the first place to the last
  for (int i = 0; i < rank - 2; ++i) {
    int const axis = 2 - i;
    dims[1 + i] = cuuint64_t(image.size[axis]), steps[1 + i] = cuuint32_t(image.stride[axis]);
    strides[1 + i] = strides[i] * dims[1 + i];
    lower[i] = -image.padding[axis],
    upper[i] = image.padding[axis] - image.dilation[axis] * (image.taps[axis] - 1);
  }
  dims[rank - 1] = cuuint64_t(image.batch), steps[rank - 1] = 1;
  CUresult const result = encoder(
      map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
      cuuint32_t(rank), const_cast<void*>(x), dims, strides, lower, upper,
      cuuint32_t(line_bytes / element_bytes), cuuint32_t(box_pixels), steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(line_bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return {Status::kCuda, "cuTensorMapEncodeIm2col: error " + std::to_string(int(result))};
  return {};
}

// Tensor maps of a product's 16-bit x, and of its codes.
inline Status encode_x(GemmProblem const& p, int box_x_rows, CUtensorMap* map) {
  if (is_image(p))
    return encode_pixels(p.x, 2, p.image.channels, p.x_stride * 2, p.image, box_x_rows, map);
  return encode_x_rows(p.x, 2, p.m, p.weight.k, p.x_stride * 2, box_x_rows, map);
}
inline Status encode_codes(GemmProblem const& p, int box_x_rows, CUtensorMap* map) {
  int const columns = int(padded_k(stored_columns(p)));
  if (is_image(p))
    return encode_pixels(p.quantized.codes, 1, columns, columns, p.image, box_x_rows, map);
  return encode_x_rows(p.quantized.codes, 1, std::max(p.m, p.quantized.rows), columns, columns,
                       box_x_rows, map);
}

}  // namespace cutlass_ops::hopper
