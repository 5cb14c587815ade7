// A program of a user's: packs a weight, unpacks it, and asks which kernel would multiply
// by it on an H200.
#include <cstdio>
#include <numeric>
#include <vector>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "cutlass_ops/pack.h"

int main() {
  constexpr int n = 192, k = 576;
  constexpr auto format = cutlass_ops::Format::kInt4;
  int const bits = cutlass_ops::info(format).bits;
  std::vector<uint8_t> codes(n * k);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = i * 7 % 16;
  std::vector<uint8_t> packed(cutlass_ops::packed_bytes(n, k, bits)), unpacked(codes.size());
  cutlass_ops::pack(codes.data(), packed.data(), n, k, bits);
  cutlass_ops::unpack(packed.data(), unpacked.data(), n, k, bits);
  if (unpacked != codes) return std::puts("unpack(pack(codes)) differs from the codes"), 1;

  // The kernel depends on where memory starts and how far apart rows are, not on what is there.
  constexpr int m = 16;
  std::vector<uint16_t> x(m * k), scales((k + 127) / 128 * n);
  cutlass_ops::GemmProblem problem;
  problem.m = m;
  problem.x = x.data(), problem.x_stride = k;
  problem.weight.codes = packed.data(), problem.weight.scales = scales.data();
  problem.weight.n = n;
  problem.weight.k = k;
  problem.weight.format = format;
  cutlass_ops::Device const h200{90, 132, 227 * 1024};
  cutlass_ops::Plan plan;
  cutlass_ops::Status const status = cutlass_ops::plan(problem, h200, &plan);
  std::printf("%s\n", status.ok() ? plan.kernel : status.text.c_str());
  return 0;
}
