// bitsandbytes' 4-bit storage, on a GPU.
#pragma once

#include <cstdint>

#include "cutlass_ops/ops.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

// Floats and their 4-bit codes in flat blocks, bitsandbytes' storage: value = book[code] *
// absmax[element / blocksize]. Floats and packed codes start on 16 bytes.
struct FlatProblem {
  int64_t count = 0;   // elements
  int blocksize = 64;  // 32, 64, ..., 4096
  void* floats = nullptr;
  DataType type = DataType::kFloat16;
  uint8_t* packed = nullptr;  // (count + 1) / 2 bytes, the even element's code in the high nibble
  float* absmax = nullptr;    // one a block

  // To quantise: v = x / absmax takes codes[number of cuts below it]. With `magnitudes`, |v| does,
  // by 7 cuts, and negative v have 8 added.
  float const* cuts = nullptr;  // ascending
  uint8_t const* codes = nullptr;
  bool magnitudes = false;

  // To dequantise. With nested_codes, absmax = nested_book[nested_codes] * nested_absmax[block /
  // 256] + *nested_offset.
  float const* book = nullptr;  // [16]
  uint8_t const* nested_codes = nullptr;
  float const* nested_absmax = nullptr;
  float const* nested_book = nullptr;  // [256]
  float const* nested_offset = nullptr;
};

// Floats to 4-bit codes in flat blocks, and back.
Status quantize_flat(FlatProblem const& problem, Stream stream);
Status dequantize_flat(FlatProblem const& problem, Stream stream);

}  // namespace cutlass_ops
