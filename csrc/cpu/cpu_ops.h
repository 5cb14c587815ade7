// The operators on the host, whose bits are those of cutlass_ops/reference/: weights stay packed,
// and fp32 sums are taken in the order that the reference defines, whatever the instruction set and
// the number of threads.
#pragma once

#include <string>
#include <vector>

#include "cutlass_ops/problem.h"

namespace cutlass_ops {

// Floats to int8 codes in kernel order, with scales (and zero points). All of `out` is written.
void cpu_quantize_activations(QuantizeProblem const& problem, int threads);

// Rows of bf16 x from which on torch's product with dequantised panels of the weight is faster,
// where the instruction set has products of bf16 and no kernel rounds the weight:
// kCpuPanelRowsOfBfloat16 where the alternative is avx512_bf16.cpp's kernel for codes of 4 bits,
// kCpuPanelRows where it is another kernel.
constexpr int kCpuPanelRows = 16, kCpuPanelRowsOfBfloat16 = 32;

// Whether m rows of floats are multiplied by vector kernels that use fused multiply-adds, unless
// `exact`: the sums have another order than the reference's.
constexpr int kCpuFusedRows = 5;  // fewer are multiplied by other kernels
bool cpu_fuses(int m, bool exact);

// Whether m rows of floats are multiplied by a kernel for bf16, where the instruction set has
// products of bf16, unless `exact`: the sums have another order than the reference's. And whether
// that kernel rounds the weight's values to bf16.
bool cpu_uses_bfloat16(PackedWeight const& weight, int m, DataType x_type, bool exact);
bool cpu_rounds_weight(PackedWeight const& weight, int m, DataType x_type, bool exact);

// y = x @ W^T + bias, with the reference's bits unless cpu_uses_bfloat16() or cpu_fuses(). The
// activations are quantised first where the problem says so. The problem has no activation, no
// residual, and does not saturate; the weight is not gated.
void cpu_mixed_gemm(GemmProblem const& problem, int threads);

// Rows of x that an expert multiplies: first .. first + rows - 1, at least one.
struct ExpertRows {
  int expert, first, rows;
};

// The products of experts, each with cpu_mixed_gemm's bits, in the same rows of out as of x; other
// rows of out are left as they are. The weight and the bias have padded_rows(n) rows for each
// expert, of which n are outputs; perms: [experts][k], or null. m and the weight's n, k and act
// order are those of all experts together.
void cpu_grouped_gemm(GemmProblem const& problem, int n, std::vector<ExpertRows> const& groups,
                      int32_t const* perms, int threads);

// The weight's values, act order undone: fp32 arithmetic, rounded once.
void cpu_dequantize(DequantizeProblem const& problem, int threads);

// The instruction sets of this machine that have kernels, the fastest first, and the choice of one
// of them.
std::vector<std::string> cpu_instruction_sets();
void use_cpu_instruction_set(std::string const& name);

// Whether this machine has instructions for products of bf16 (every CPU with AMX has
// AVX-512's, too).
bool cpu_multiplies_bfloat16();

// The name of the kernels that are chosen.
std::string cpu_kernel();

}  // namespace cutlass_ops
