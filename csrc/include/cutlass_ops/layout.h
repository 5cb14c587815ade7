// THE order of packed weights: "slab64". One index formula, used by the host packer and by every
// kernel. It is the same in packed files of every layout version below, whose metadata differs.
//
// Weights are operand A of every matrix instruction (rows of W are the instruction's M), so that a
// lane's fragment of weights goes from memory to registers by one 16-byte load, without shared
// memory, and the tile of x can have any N of the instruction.
//
//   packed = [n_pad / 64 row panels][k_pad / 128 K tiles][block]
//   block  = 64 rows x 128 k      = [4 row blocks][1 unit at 2 bits | 2 at 4 | 4 at 8]: 2048 |
//                                   4096 | 8192 B
//   unit   = 16 rows x 128 | 64 | 32 k = [32 lanes][16 B]: one coalesced 16-byte load of a warp
//
//                  k 0            16           32           48          63
//   4-bit unit       +------------+------------+------------+------------+   a lane's 16 bytes
//   (16 x 64)  row 0 |   word 0   |   word 1   |   word 2   |   word 3   |   are 4 words, one for
//                    |   of all   |   of all   |   of all   |   of all   |   each 16 k
//             row 15 |  32 lanes  |  32 lanes  |  32 lanes  |  32 lanes  |
//                    +------------+------------+------------+------------+
//
//   lane = 4*g + t holds, in word j, rows g and g+8 and four k of that column:
//        nibble p   7     6     5     4     3     2     1     0
//        row       g+8    g    g+8    g    g+8    g    g+8    g
//        k - 16j   2t+9  2t+9  2t+1  2t+1  2t+8  2t+8   2t    2t
//
//   2-bit unit (16 x 128): two codes a nibble, of row and column as at 4 bits in the lower two bits
//   and 64 columns further in the upper two
//
//                  k 0                   16                  31
//   8-bit unit       +-------------------+-------------------+   lane = 4*g + t: words 0, 2 are
//   (16 x 32)  rows  |      word 0       |      word 2       |   row g, words 1, 3 row g+8;
//              0..7  |                   |                   |   byte e is k = 2t + {0, 8, 1, 9}[e]
//                    +-------------------+-------------------+   of the word's 16
//              rows  |      word 1       |      word 3       |
//              8..15 |                   |                   |
//                    +-------------------+-------------------+
//
// The reason of each order:
//   - Row panels outermost: one wgmma (or four mma.sync) covers 64 rows, so a CTA can compute one
//     row panel, and N is padded to 64 only.
//   - K tiles (128 columns) next: a CTA that advances along K reads one contiguous stream, one
//     bulk copy a tile.
//   - Row blocks before k: warp w of a warpgroup owns rows 16w .. 16w+15 of a wgmma fragment, hence
//     one contiguous quarter of the K tile.
//   - Lane = 4*g + t with rows g and g+8: the A fragment of mma.sync and of wgmma, fp16 and int8
//     alike (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "Register Fragments for wgmma").
//   - The k 2t, 2t+1, 2t+8, 2t+9: what that lane holds of a 16 x 16 fp16 fragment. An int8 fragment
//     needs 4t .. 4t+3 of each 16. It gets the same bytes, because the int8 activations are stored
//     in that order too (activation_position): the order of k does not change an integer sum as
//     long as both operands share it. So one order serves fp16, bf16 and int8 activations.
//   - Rows interleaved inside a byte, g low and g+8 high: w & 0xf0f0f0f0 is row g+8 and
//     (w << 4) & 0xf0f0f0f0 row g, both as int8 bytes 16 * c. And 2t+8 stands between 2t and 2t+1,
//     which so lie sixteen bits apart: one AND makes a half2 of them (formats/decode.cuh).
//   - Columns 64 apart in a nibble of 2-bit codes: a word shifted by two bits is a word of the
//     unit's other half, and both are decoded as words of nibbles are.
//
// Codes are stored centred, c = q - 2^(bits-1), in two's complement: padding is zero bytes, and
// 8-bit words are int8 fragments as they stand.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CUTLASS_OPS_HD __host__ __device__
#else
#define CUTLASS_OPS_HD
#endif

namespace cutlass_ops {

// What packed files call the order and its version. A file has the version of what it holds: plain
// weights, experts whose rows of gate and up are in eights, or other gated weights. Version 1 is
// kLayoutVersion without checksums.
inline constexpr char kLayoutName[] = "cutlass_ops.slab64";
inline constexpr int kLayoutVersion = 2, kGatedExpertsLayoutVersion = 3, kGatedLayoutVersion = 4;

inline constexpr int kRowsPerPanel = 64;
inline constexpr int kKPerTile = 128;
inline constexpr int kRowsPerBlock = 16;
inline constexpr int kLaneBytes = 16;
inline constexpr int kUnitBytes = 32 * kLaneBytes;

// Bytes of one row panel's K tile, 64 rows x 128 k: 2048 for 2 bits, 4096 for 4, 8192 for 8.
CUTLASS_OPS_HD constexpr int k_tile_bytes(int bits) { return kRowsPerPanel * kKPerTile * bits / 8; }

CUTLASS_OPS_HD constexpr int64_t padded_rows(int64_t n) {
  return (n + kRowsPerPanel - 1) / kRowsPerPanel * kRowsPerPanel;
}

CUTLASS_OPS_HD constexpr int64_t padded_k(int64_t k) {
  return (k + kKPerTile - 1) / kKPerTile * kKPerTile;
}

// Bytes of a packed [n, k] weight, padding included.
CUTLASS_OPS_HD constexpr int64_t packed_bytes(int64_t n, int64_t k, int bits) {
  return padded_rows(n) * padded_k(k) / 8 * bits;
}

// How codes of 2, 4 or 8 bits lie in a unit: rows of W in a byte, columns of a row in a nibble, k
// of the unit, and words of a lane that hold 16 k (those of a nibble's first column).
CUTLASS_OPS_HD constexpr int byte_rows(int bits) { return bits == 8 ? 1 : 2; }
CUTLASS_OPS_HD constexpr int nibble_columns(int bits) { return bits == 2 ? 2 : 1; }
CUTLASS_OPS_HD constexpr int unit_k(int bits) { return 8 * kUnitBytes / bits / kRowsPerBlock; }
CUTLASS_OPS_HD constexpr int words_of_16_k(int bits) { return bits == 8 ? 2 : 1; }
// Columns from a nibble's first to its second.
inline constexpr int kNibbleDistance = 64;

// Where a code lives: bits [shift, shift + bits) of the byte at offset `byte`.
struct CodePosition {
  int64_t byte;
  int shift;
};

// The position of the code of row n, column k. `k_pad` is padded_k(K); `bits` is 2, 4 or 8.
CUTLASS_OPS_HD constexpr CodePosition code_position(int n, int k, int k_pad, int bits) {
  int const row = n % kRowsPerBlock;          // inside the 16-row block
  int const g = row % 8, half = row / 8;      // lane group; 0: row g, 1: row g + 8
  int const kk = k % 16;                      // inside the 16 k of one word
  int const t = kk % 8 / 2;                   // lane inside its group
  int const element = kk / 8 + 2 * (kk % 2);  // 2t, 2t+8, 2t+1, 2t+9 are elements 0, 1, 2, 3
  int const k_per_unit = unit_k(bits);
  int const unit = k % kKPerTile / k_per_unit;
  int const of_nibble = k % k_per_unit / kNibbleDistance;    // 1: the second column
  int const column = k % k_per_unit % kNibbleDistance / 16;  // which 16 k of the unit

  int64_t const chunk = int64_t(n / kRowsPerPanel) * (k_pad / kKPerTile) + k / kKPerTile;
  int const block = n % kRowsPerPanel / kRowsPerBlock;
  int const units_per_block = kKPerTile / k_per_unit;
  int64_t const unit_start =
      chunk * k_tile_bytes(bits) + (block * units_per_block + unit) * kUnitBytes;
  int const lane_start = (4 * g + t) * kLaneBytes;
  int const words = words_of_16_k(bits), word = words * column + half % words;
  return {unit_start + lane_start + 4 * word + element, half / words * 4 + of_nibble * bits};
}

// Position of a row inside its row panel in the group vectors (scales, zeros, offsets): an 8 x 8
// transposition. Row 16*i + 8*h + g stands at 8*g + 2*i + h, so that the eight rows of a lane group
// g are adjacent: one 16-byte load of fp16 scales, one 8-byte load of int8 zeros. And warp i of a
// warpgroup takes its two rows, g and g+8, by one 4-byte load.
CUTLASS_OPS_HD constexpr int group_row(int row) { return 8 * (row % 8) + row % kRowsPerPanel / 8; }

// Position of column k inside its 16 of the int8 activations: 0 .. 15 are stored as 0, 8, 1, 9,
// ..., 7, 15. Then bytes 4t .. 4t+3, which the int8 instructions hand to lane t, are k = 2t, 2t+8,
// 2t+1, 2t+9: the k whose weights that lane holds.
CUTLASS_OPS_HD constexpr int activation_position(int k) { return 2 * (k % 8) + k % 16 / 8; }

}  // namespace cutlass_ops
