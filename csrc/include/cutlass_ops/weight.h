// Conversion of a weight as quantisers produce it, in the host's memory, to a PackedWeight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cutlass_ops/ops.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

// Codes [n][k], one a byte and not centred, and scales, zero points and offsets [n][groups], where
// groups is 1 with a group_size of -1, otherwise k / group_size rounded up. A weight with an act
// order has its columns in that order here, and its PackedWeight::perm is the caller's to set.
struct CanonicalWeight {
  int n = 0, k = 0;
  Format format = Format::kInt4;
  int group_size = 128;  // as PackedWeight::group_size
  uint8_t const* codes = nullptr;
  void const* scales = nullptr;     // of scale_type
  uint8_t const* zeros = nullptr;   // or null; of integers alone
  void const* offsets = nullptr;    // of offset_type, or null; never together with zeros
  float const* codebook = nullptr;  // [16], with Format::kCodebook; null otherwise
  DataType scale_type = DataType::kFloat16;
  DataType offset_type = DataType::kNone;
};

// Bytes of the buffer that holds all of a packed weight; 0 where there is no such format, n, k or
// group_size. The weight's pointers are not followed: which are null counts.
size_t weight_bytes(CanonicalWeight const& weight);

// The packed weight in a buffer of weight_bytes, padding included, by up to so many threads (0:
// every core). A Status other than kOk names the field: a null pointer, sizes and types that do not
// fit each other, or a code or zero point that is not below 2^bits.
Status pack_weight(CanonicalWeight const& weight, void* buffer, int threads = 0);

// Pointers into such a buffer, or into a copy of it that starts at a multiple of 16 bytes: of
// cudaMalloc, for instance.
PackedWeight make_weight(CanonicalWeight const& weight, void const* buffer);

}  // namespace cutlass_ops
