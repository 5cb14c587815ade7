// The formats of a weight: what its codes mean.
#pragma once

namespace cutlass_ops {

// A weight is scale * value(code), plus an offset where codes are integers and it has any.
enum class Format {
  kInt4 = 0,  // value = code - zero point, 4 bits
  kInt8,      // value = code - zero point, 8 bits
  kCodebook,  // value = PackedWeight::codebook[code], 4 bits: NF4, FP4, MXFP4 and others
  kE4m3,      // value = the float whose bits the code is: a sign, 4 bits of exponent, 3 of mantissa
  kInt2,      // value = code - zero point, 2 bits
};

struct FormatInfo {
  char const* codes;    // in messages: "4-bit integers"
  int bits;             // of a code
  bool integers;        // there may be zero points or offsets, and int8 activations
  bool zeros_fit_int8;  // integers less their zero points are int8
  bool decodes;     // Hopper's kernels of exact products take it: those for few rows of 16-bit x
  bool exact;       // and all others
  bool codebook;    // values are PackedWeight::codebook's
  int table_bytes;  // of the kernels' look-up table in shared memory; 0: they have none
};

// What csrc/formats/ says of a format, or null if no format has this number.
FormatInfo const* find_format(Format format);
// find_format() for a format that is known to exist.
FormatInfo const& info(Format format);

}  // namespace cutlass_ops
