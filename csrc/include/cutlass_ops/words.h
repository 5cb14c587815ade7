// Codes as checkpoints store them, several in a 32-bit word or two in a byte, to one code a byte.
#pragma once

#include <cstdint>

namespace cutlass_ops {

// Word (n, j) of `words`, at n * n_stride + j * k_stride, holds codes (n, j * 32 / bits) and those
// that follow it along K, the first in its lowest bits: compressed-tensors' and GPTQ's order, and
// AWQ's for GEMV. codes: n * k bytes, row-major, all written; a row has ceil(k * bits / 32) words.
// bits: 4 or 8. threads: how many to use at most, 0 for every core. Throws std::invalid_argument
// for other bits, sizes below 1 or above 2^31 - 129, and negative thread counts.
void unpack_along_k(uint32_t const* words, int64_t n_stride, int64_t k_stride, uint8_t* codes,
                    int64_t n, int64_t k, int bits, int threads = 0);

// Word (i, k), at i * n_stride + k * k_stride, holds eight codes of 4 bits along N: bits 4p .. 4p+3
// are code (8 * i + order[p], k). AWQ's order for GEMM has `order` 0, 2, 4, 6, 1, 3, 5, 7. n is a
// multiple of 8; the rest as above, and `order` a permutation of 0 .. 7.
void unpack_along_n(uint32_t const* words, int64_t n_stride, int64_t k_stride,
                    int const (&order)[8], uint8_t* codes, int64_t n, int64_t k, int threads = 0);

// Where the low and the high 4 bits of byte i of a run of bytes go: to places 2 i and 2 i + 1 (in
// turn), or to i and run + i.
enum class ByteOrder { low_high_in_turn, high_low_in_turn, low_then_high, high_then_low };

// Block b of `bytes`, at b * stride, holds `size` bytes of codes in runs of `run`, which divides
// it. codes: blocks * size * 2 bytes, all written. The rest as above; throws for sizes below 1, a
// `run` that does not divide, or a code count above 2^62.
void unpack_bytes(uint8_t const* bytes, int64_t blocks, int64_t stride, int64_t size, int64_t run,
                  ByteOrder order, uint8_t* codes, int threads = 0);

// PyTorch's int4 order for tensor cores (_convert_weight_to_int4pack, inner_k_tiles = 8). Word [a,
// b, 4 r + t, j] of `words`, [n / 8, k / 128, 32, 4], has codes of row 8 a + r: bits 4p .. 4p+3 are
// column 128 b + 32 j + 2 t + c, where c is 0, 8, 16, 24, 1, 9, 17, 25 for p = 0 .. 7. n is a
// multiple of 8 and k of 128; the rest as above.
void unpack_tiles(uint32_t const* words, uint8_t* codes, int64_t n, int64_t k, int threads = 0);

// Column j of `permuted` is column perm[j] of `codes`; both are n * k bytes, row-major, and do not
// overlap. The k elements of perm are 0 .. k-1.
void permute_columns(uint8_t const* codes, uint8_t* permuted, int64_t n, int64_t k,
                     int32_t const* perm, int threads = 0);

}  // namespace cutlass_ops
