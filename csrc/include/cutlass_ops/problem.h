// The problems of the operators as plain data: pointers, sizes and types, all owned by the caller.
//
// The product is y[M, N] = act(x[M, K] @ W[N, K]^T + bias[N]) + residual[M, N]. N, K and the
// weight's format belong to the weight; M to the activations. A gated weight has the rows of two
// weights, gate and up, and its product is
//   y[M, N / 2] = act(x @ gate^T + bias of gate) * (x @ up^T + bias of up) + residual[M, N / 2].
#pragma once

#include <cstddef>
#include <cstdint>

#include "cutlass_ops/activation.h"
#include "cutlass_ops/format.h"

namespace cutlass_ops {

enum class DataType : int8_t { kNone = 0, kFloat32, kFloat16, kBFloat16, kInt8 };

// How the activations reach the tensor cores.
enum class ActQuant : int8_t {
  kNone = 0,  // as they are: fp16 or bf16
  kToken,     // int8, one scale a row
  kBlock,     // int8, one scale a row and block of min(group_size, 128) columns
  kTensor,    // int8, one scale for all of x: of images alone
};

// A CUDA stream; cudaStream_t converts to it. The header needs no CUDA toolkit.
using Stream = void*;

// A weight in the packed order (layout.h), on the device that the operator runs on. All pointers
// are aligned to 16 bytes.
struct PackedWeight {
  uint8_t const* codes = nullptr;  // centred codes, packed_bytes(n, k, info(format).bits)
  void const* scales = nullptr;    // [groups][n_pad] of scale_type
  int8_t const* zeros = nullptr;   // [groups][n_pad], zero point - 2^(bits - 1), or null; of
                                   // integers alone
  void const* offsets = nullptr;   // [groups][n_pad] of offset_type, or null; of integers alone,
                                   // and never together with zeros
  int32_t const* perm = nullptr;   // [k]: packed column j multiplies input feature perm[j]; or null
  float const* codebook = nullptr;  // [16]: values by code (not centred) where the format is
                                    // kCodebook; null otherwise
  int n = 0;
  int k = 0;
  Format format = Format::kInt4;
  int group_size = 128;  // 16, 32, 64, a multiple of 128, or -1
  DataType scale_type = DataType::kFloat16;
  DataType offset_type = DataType::kNone;
  bool gated = false;  // n is a multiple of 16, and the rows are eight of gate's, then the eight of
                       // up's for the same outputs, and so on

  // Zero-point terms, for products with int8 activations where either side has zero points
  // (zero_compensation.h): each row's sums of 128 weights, or its zero points of 8 bits, the
  // scales of these, and the sums of all. Null: mixed_gemm computes them in its workspace, with
  // the same bits, where a product needs them. Given ones must belong to the codes, scales and
  // zeros as they are now.
  uint8_t const* sums = nullptr;
  void const* sum_scales = nullptr;     // [n_pad] of scale_type
  float const* total_colsum = nullptr;  // [n_pad]: all of a row's weights
};

// int8 activations in kernel order: codes [m][k_pad] (activation_position inside each 16), scales
// and zeros [blocks][stride] with the rows of x of one block adjacent. Written by
// quantize_activations.
struct QuantizedActivations {
  int8_t* codes = nullptr;
  float* scales = nullptr;
  int8_t* zeros = nullptr;  // null when symmetric
  int block = 128;          // columns a scale covers: 16, 32, 64, 128, or -1 for the whole row
  int stride = 0;           // elements from one block's scales to the next's; a multiple of 16
  int rows = 0;             // allocated rows of codes, if more than m: a kernel may read them all

  // The range of all x, [2] on the device, for a kernel that quantises x with one scale.
  uint32_t* range = nullptr;

  // The values of x in 16 bits, [m][k_pad] in the order of columns, for a kernel that multiplies
  // floats. mixed_gemm computes them from the codes, or in place of codes.
  void* upcast = nullptr;
  DataType upcast_type = DataType::kNone;  // kFloat16 or kBFloat16
  bool upcast_row_scales = false;  // they include a row's one scale, too, which is otherwise
                                   // left to its sums

  // The operand with which a kernel compensates zero points of many blocks at once
  // (zero_compensation.h). mixed_gemm computes it from the zero points, or without these from sums
  // of codes.
  void* zero_values = nullptr;
  float* zero_scales = nullptr;
};

// Quantises x, silu(x) * up, or the rms norm of x or of x + residual. All matrices are of x_type.
struct QuantizeProblem {
  void const* x = nullptr;  // [m][k] of x_type, rows x_stride elements apart
  DataType x_type = DataType::kFloat16;
  int64_t x_stride = 0;
  int m = 0;
  int k = 0;
  int32_t const* perm = nullptr;  // [k]: column j of the result is column perm[j] of x; or null
  QuantizedActivations out;
  uint32_t* range = nullptr;  // [2] on the device, where the range of x goes that is every block's;
                              // null: each has its own

  void const* up = nullptr;  // [m][k], or null; never together with norm_weight
  int64_t up_stride = 0;

  void const* norm_weight = nullptr;  // [k], or null
  float norm_eps = 0.0f;
  void const* residual = nullptr;  // [m][k], or null
  int64_t residual_stride = 0;
  void* sum = nullptr;  // [m][k], contiguous: where x + residual is written; null if residual is
};

// An image [batch, depth, height, width, channels] in the place of x: row m holds, tap by tap, the
// channels of the pixels under a kernel at the m-th place of the result [batch, *out], which go
// fastest along the width. Missing pixels are zeros. A tap has padded_k(channels) columns of the
// weight, whose k is that of all taps.
struct ImageRows {
  int batch = 0;  // 0: x is a matrix
  int channels = 0;
  // Depth, height and width; an image of fewer dimensions has 1 in front.
  int size[3] = {1, 1, 1}, taps[3] = {1, 1, 1}, out[3] = {1, 1, 1};
  int stride[3] = {1, 1, 1}, padding[3] = {0, 0, 0}, dilation[3] = {1, 1, 1};
};

struct GemmProblem {
  int m = 0;
  PackedWeight weight;

  // Activations: either floats, which act_quant may quantise in the call, or codes that are
  // quantised already.
  void const* x = nullptr;  // [m][k] of x_type, rows x_stride elements apart, at least k; null if
                            // `quantized` is given
  DataType x_type = DataType::kFloat16;  // of what was quantised, too
  int64_t x_stride = 0;
  ActQuant act_quant = ActQuant::kNone;
  bool act_symmetric = true;
  QuantizedActivations quantized;
  ImageRows image;  // x is its pixels [pixels][channels], x_stride elements apart,
                    // where it has a batch

  // Epilogue: sum -> + bias -> activation (of gate's, times up's) -> + residual -> out. A gated
  // weight has n / 2 outputs, and n biases in the order of its rows.
  void* out = nullptr;  // [m][outputs] of out_type, contiguous
  DataType out_type = DataType::kFloat16;
  void const* bias = nullptr;
  DataType bias_type = DataType::kNone;
  void const* residual = nullptr;  // [m][outputs], rows residual_stride elements apart
  DataType residual_type = DataType::kNone;
  int64_t residual_stride = 0;
  Activation activation = Activation::kNone;
  float clamp_low = 0.0f;
  float clamp_high = 0.0f;
  bool saturate = false;  // fp16 results beyond 65504 become 65504 instead of inf
  bool exact = false;     // weights, and activations that are quantised, are not rounded to 16 bits

  // Choice of a kernel.
  // The bits of a row of the result depend neither on m nor on the other rows; for floats among
  // calls whose rows of x all start on 16 bytes, or none of whose do (x and x_stride).
  bool batch_invariant = false;
  // Kernels of this architecture (10 * major + minor) or before it alone, as far as the device runs
  // them; 0: the device's.
  int architecture = 0;
};

struct DequantizeProblem {
  PackedWeight weight;
  void* out = nullptr;  // [rows][k] of out_type, contiguous
  DataType out_type = DataType::kFloat16;
  int first_row = 0;  // of the weight; a multiple of 64
  int rows = -1;      // -1: all from there on
  // For a convolution's weight: the channels of a tap, so that its padding is left out and out is
  // [rows][taps][tap_channels]; 0: nothing is left out.
  int tap_channels = 0;
};

// Codes of a weight, one a byte, and packed, on a GPU. Code (row, column) is at codes[row *
// n_stride + column * k_stride].
struct PackProblem {
  uint8_t* codes = nullptr;   // [n, k], each below 2^bits, which nothing checks here; read by
                              // pack(), written by unpack()
  uint8_t* packed = nullptr;  // packed_bytes(n, k, bits), from an address that is a multiple of 16
  int64_t n_stride = 0, k_stride = 1;
  int n = 0, k = 0;
  int bits = 4;  // 2, 4 or 8
};

// Scratch memory of the caller's, aligned to 256 bytes, of at least Plan::workspace bytes.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// The GPU as far as the choice of a kernel goes. Times of kernels were measured on several cards; a
// device counts as the one of the nearest memory bandwidth, which is that of memory clock and bus
// width, as current_device() has it: 3352 for an H100 SXM, 4916 for an H200. 0, not known, is
// nearest to the slowest card.
struct Device {
  int architecture = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int shared_memory = 0;     // bytes a block may have
  int memory_bandwidth = 0;  // GB/s
};

}  // namespace cutlass_ops
