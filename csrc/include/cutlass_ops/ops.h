// The operators on a GPU. Every call returns at once, works on the stream it is given and
// on the current device, allocates nothing and never synchronises; errors come back as a
// Status with a text.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cutlass_ops/plan.h"
#include "cutlass_ops/problem.h"

namespace cutlass_ops {

struct [[nodiscard]] Status {
  enum Code { kOk = 0, kUnsupported, kInvalid, kCuda };
  Code code = kOk;
  std::string text;

  bool ok() const { return code == kOk; }
};

// The current device's properties; read once.
Status current_device(Device* device);

// Makes a device the current one as long as it lives, if status() is ok.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

  // CUDA's answer: nothing may be launched unless it is ok.
  Status const& status() const { return status_; }

 private:
  Status status_;
  int previous_ = -1;  // to go back to, or -1
};

// On Hopper the kernels are launched with programmatic stream serialization and read the weight
// before they wait for earlier kernels of the stream: a kernel that writes a weight must have
// ended (the stream synchronised) before a product of it is launched. x, bias and residual are
// read after the wait.

// Choose a kernel, for memory of which nothing is read: alignment and strides decide. Needs no GPU:
// `device` may describe an absent one. `out` may still be null.
Status plan(GemmProblem const& problem, Device const& device, Plan* plan);

// The kernels that a plan's product starts, in order: files of csrc/kernels.
std::vector<char const*> launches(Plan const& plan);

// y = epilogue(x @ W^T), quantising the activations first where problem.act_quant says so. `plan`
// is what plan() chose for this problem on the current device; without it, mixed_gemm calls plan().
Status mixed_gemm(GemmProblem const& problem, Plan const& plan, Workspace workspace, Stream stream);
Status mixed_gemm(GemmProblem const& problem, Workspace workspace, Stream stream);

// A depthwise convolution, y = epilogue(sums) with fp32 sums of x times the values of the weight:
// each of the convolution's groups has one input channel, so that problem.image.channels is 1,
// weight.k is the number of taps, and x_stride is the number of input channels, of which weight.n
// is a multiple. x is of any float type, and act_quant none. `taps`: the weight's values, [taps][n
// rounded up to kTapVector], on the device, from an address that is a multiple of 16.
constexpr int kTapVector = 8;
Status depthwise_conv(GemmProblem const& problem, float const* taps, Stream stream);

// y = epilogue(sums) of sums [m][weight.n] that were made elsewhere and rounded to x_type, fp16 or
// bf16; they may be in `out`.
Status finish_sums(GemmProblem const& problem, void const* sums, Stream stream);

// Floats to int8 codes in kernel order with their scales (and zero points).
Status quantize_activations(QuantizeProblem const& problem, Stream stream);

// The values that codes of floats stand for, scale * (code - zero point), each rounded once, in the
// order of the floats: what quantize_activations' codes would be multiplied as.
struct QuantizedValues {
  void const* x = nullptr;  // [rows][columns] of x_type, contiguous
  DataType x_type = DataType::kFloat16;
  void* out = nullptr;  // [rows][columns] of out_type; it may be x, if that has the same type
  DataType out_type = DataType::kFloat16;
  int64_t rows = 0;
  int columns = 0;
  int block = -1;  // columns with one scale: 32, 64, 128, the last of a row may have
                   // fewer; or -1: a row
  bool symmetric = true;
  uint32_t* range = nullptr;  // [2] on the device, where the range of x goes that has one scale;
                              // null: each block has its own
};
Status quantized_values(QuantizedValues const& problem, Stream stream);

// The column sums of a weight (zero_compensation.h), colsum_bytes(weight) bytes from an address
// that is a multiple of 16, which place_colsums() then attaches to the weight, so that products
// need not compute them. The weight has groups of 128 or more, no offsets, no code book, and no
// zero points at 8 bits.
Status weight_colsum(PackedWeight const& weight, void* colsums, Stream stream);

// Codes to the order of layout.h, all of packed_bytes(n, k, bits) written and padding zero, and
// back. The bits are those of pack.h's functions on the host.
Status pack(PackProblem const& problem, Stream stream);
Status unpack(PackProblem const& problem, Stream stream);

// Packed codes to floats.
Status dequantize(DequantizeProblem const& problem, Stream stream);

}  // namespace cutlass_ops
