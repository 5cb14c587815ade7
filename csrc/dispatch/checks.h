// Checks of the operators' arguments, independent of the kernel: limits, and a status that names
// the argument that does not fit.
#pragma once

#include <initializer_list>

#include "cutlass_ops/awq.h"
#include "cutlass_ops/flat_4bit.h"
#include "cutlass_ops/ops.h"

namespace cutlass_ops {

constexpr int kMaxM = 1 << 24;
constexpr int kMaxNormK = 1 << 22;  // the sums of 512 columns each take 32 KB of shared memory
constexpr double kLeastNormEps = 1e-15;
// Up to this many quantised rows have memory for whole tiles: TMA fills rows that are out of bounds
// with zeros slowly, some 8 bytes a clock. With many tiles that does not matter, and zeros take
// less power.
constexpr int kPaddedRows = 512;

bool is_float(DataType type);

Status unsupported(std::string text);
Status invalid(std::string text);

constexpr int kLoadBytes = 16;        // that kernels load at a time: most alignments
constexpr int kWorkspaceBytes = 256;  // that the parts of a workspace start on

// A pointer of a problem: where it must start, and whether it may be null.
struct Address {
  char const* name;
  void const* pointer;
  int alignment;
  bool required = true;
};
Status check_addresses(std::initializer_list<Address> addresses);
// For `rows` rows that are `stride` elements apart; a single row has no stride.
Status check_stride(char const* name, int64_t stride, int64_t columns, int64_t rows);
// The names of all activations, or of the clamps, for messages. of_experts: also the names of
// activations of gate and up.
std::string activation_names(bool clamps_only, bool of_experts = false);
// Checks that the epilogues have the activation, and that its numbers are in order.
Status check_activation(Activation activation, float clamp_low, float clamp_high,
                        bool of_experts = false);
Status check_act_quant(ActQuant act_quant, bool of_image = false);

Status check_weight(PackedWeight const& weight);
// Checks that a weight is not gated, for an operation without gated outputs.
Status check_plain_rows(PackedWeight const& weight, char const* operation);
// Checks of a product on any device, and on a GPU.
Status check_product(GemmProblem const& problem);
Status check_gemm(GemmProblem const& problem, Device const& device);
Status check_device(Device const& device);
// Whether the device runs kernels of the architecture; 0: its own. Checks the device, too.
Status check_architecture(int architecture, Device const& device);
// Checks of the result's memory and the workspace, which a plan does not cover, for one row or
// more.
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
