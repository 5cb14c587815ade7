// AutoAWQ's storage, on a GPU.
#pragma once

#include <cstdint>

#include "cutlass_ops/ops.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

// A weight in AutoAWQ's storage ("gemm"), W[K, N] by its transposed: nibble i of a word is column
// [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight.
struct AwqWeight {
  uint32_t const* codes = nullptr;  // [k][n / 8]
  void const* scales = nullptr;     // [groups][n] of type
  uint32_t const* zeros = nullptr;  // [groups][n / 8]
  int n = 0;                        // a multiple of 8
  int k = 0;
  int groups = 0;  // a divisor of k
  DataType type = DataType::kFloat16;
};

// (code - zero) * scale, [k][n] of the scales' type.
Status dequantize_awq(AwqWeight const& weight, void* out, Stream stream);

// x [m][k] of the scales' type, rows x_stride elements apart, each from an address of a multiple of
// 16 bytes, times the weight, [m][n]: up to kMaxAwqRows rows, groups of a multiple of 32.
constexpr int kMaxAwqRows = 64;
Status awq_gemm(AwqWeight const& weight, void const* x, int64_t x_stride, int m, void* out,
                Stream stream);

}  // namespace cutlass_ops
