// Packing and unpacking of weight codes on the host, in the order of layout.h. ops.h
// has those on a GPU.
#pragma once

#include <cstdint>

namespace cutlass_ops {

// codes: n * k bytes, row-major, one unsigned code below 2^bits each. packed: packed_bytes(n, k,
// bits) bytes, all of them written, padding with codes of value zero (zero bytes). bits: 2, 4 or 8.
// threads: how many to use at most, 0 for every core. A few kilobytes a thread are the only memory
// taken. Throws std::invalid_argument for other bits, sizes below 1 or above 2^31 - 129, null
// pointers, negative thread counts, and a code that is not below 2^bits.
void pack(uint8_t const* codes, uint8_t* packed, int64_t n, int64_t k, int bits, int threads = 0);

// The inverse: packed_bytes(n, k, bits) bytes to n * k codes. Padding is not read.
void unpack(uint8_t const* packed, uint8_t* codes, int64_t n, int64_t k, int bits, int threads = 0);

}  // namespace cutlass_ops
