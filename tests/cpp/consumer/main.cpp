// A program of a user's: packs a weight, multiplies by it on the host, and asks which kernel would
// multiply by it on an H200.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cutlass_ops/cpu.h"
#include "cutlass_ops/ops.h"
#include "cutlass_ops/weight.h"

int main() {
  constexpr int m = 16, n = 192, k = 576, group_size = 64, groups = k / group_size;
  std::vector<uint8_t> codes(n * k);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = i * 7 % 16;
  std::vector<uint16_t> const scales(n * groups, 0x3800), x(m * k, 0x3c00);  // 0.5 and 1 in fp16
  cutlass_ops::CanonicalWeight weight;
  weight.n = n, weight.k = k, weight.group_size = group_size;
  weight.codes = codes.data(), weight.scales = scales.data();
  std::vector<std::max_align_t> packed(
      cutlass_ops::weight_bytes(weight) / sizeof(std::max_align_t) + 1);
  if (cutlass_ops::Status const status = cutlass_ops::pack_weight(weight, packed.data());
      !status.ok())
    return std::puts(status.text.c_str()), 1;

  std::vector<float> y(m * n);
  cutlass_ops::GemmProblem problem;
  problem.m = m, problem.weight = cutlass_ops::make_weight(weight, packed.data());
  problem.x = x.data(), problem.x_stride = k;
  problem.out = y.data(), problem.out_type = cutlass_ops::DataType::kFloat32;
  if (cutlass_ops::Status const status = cutlass_ops::cpu_gemm(problem); !status.ok())
    return std::puts(status.text.c_str()), 1;
  for (int feature = 0; feature < n; ++feature) {
    float sum = 0;
    for (int column = 0; column < k; ++column) sum += 0.5f * (codes[feature * k + column] - 8);
    for (int row = 0; row < m; ++row)
      if (y[row * n + feature] != sum) return std::printf("y[%d][%d] is wrong\n", row, feature), 1;
  }

  // The kernel depends on where memory starts and how far apart rows are, not on what is there.
  cutlass_ops::Device const h200{90, 132, 227 * 1024, 4916};
  cutlass_ops::Plan plan;
  cutlass_ops::Status const status = cutlass_ops::plan(problem, h200, &plan);
  std::printf("%s\n", status.ok() ? plan.kernel : status.text.c_str());
  return 0;
}
