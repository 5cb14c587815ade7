// What the operators take, whichever kernel runs: limits, and a status that names the argument
// that does not fit.
#pragma once

#include <initializer_list>

#include "cutlass_ops/awq.h"
#include "cutlass_ops/flat_4bit.h"
#include "cutlass_ops/ops.h"

namespace cutlass_ops {

constexpr int kMaxM = 1 << 24;
constexpr int kMaxNormK = 1 << 22;  // the sums of 512 columns each take 32 KB of shared memory
constexpr double kLeastNormEps = 1e-15;
// Quantised rows up to which they have memory for whole tiles: zeros for rows that are not there
// come slowly, some 8 bytes a clock. Among many tiles that is nothing, and takes less power.
constexpr int kPaddedRows = 512;

bool is_float(DataType type);

Status unsupported(std::string text);
Status invalid(std::string text);

constexpr int kLoadBytes = 16;  // that kernels load at a time: where most of what they read starts
constexpr int kWorkspaceBytes = 256;  // that the parts of a workspace start on

// A pointer of a problem: where it must start, and whether it may be null.
struct Address {
  char const* name;
  void const* pointer;
  int alignment;
  bool required = true;
};
Status check_addresses(std::initializer_list<Address> addresses);
// Of `rows` rows, which lie `stride` elements apart; one row lies anywhere.
Status check_stride(char const* name, int64_t stride, int64_t columns, int64_t rows);
// Of all activations, or of those that are clamps.
std::string activation_names(bool clamps_only);
// That the epilogues know the activation, and that a clamp has bounds in order.
Status check_activation(Activation activation, float clamp_low, float clamp_high);
Status check_act_quant(ActQuant act_quant, bool of_image = false);

Status check_weight(PackedWeight const& weight);
// That a weight is not gated, for an operation without gated outputs.
Status check_plain_rows(PackedWeight const& weight, char const* operation);
// A product, anywhere and on a GPU.
Status check_product(GemmProblem const& problem);
Status check_gemm(GemmProblem const& problem, Device const& device);
// What a plan does not say: the result's memory and the workspace, of one row or more.
Status check_launch(GemmProblem const& problem, Plan const& plan, Workspace workspace);
Status check_depthwise(GemmProblem const& problem, float const* taps);
Status check_finish(GemmProblem const& problem, void const* sums);
Status check_quantize(QuantizeProblem const& problem);
Status check_quantized_values(QuantizedValues const& problem);
Status check_sums(PackedWeight const& weight, void const* colsums);
Status check_dequantize(DequantizeProblem const& problem);
Status check_flat(FlatProblem const& problem, bool quantizes);
Status check_awq(AwqWeight const& weight, void const* out);
Status check_awq_gemm(AwqWeight const& weight, void const* x, int64_t x_stride, int m,
                      void const* out);
Status check_pack(PackProblem const& problem);

}  // namespace cutlass_ops
