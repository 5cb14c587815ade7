// Packs an int4 weight on the host, copies it to the GPU, multiplies 16 rows of fp16 by it, and
// checks the result. tests/cpp/consumer builds it with CMake; without CMake, where DIR is the
// folder of the installed C++ package and CUDA that of the toolkit:
//
//   c++ -std=c++17 multiply.cpp -I DIR/include -I CUDA/include -L DIR/lib -lcutlass_ops \
//       -L CUDA/lib64 -lcudart_static -ldl -lrt -lpthread
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cutlass_ops/ops.h"
#include "cutlass_ops/weight.h"

// A copy on the device, which lives as long as the process. Addresses of cudaMalloc are multiples
// of 256, more than any argument needs.
template <class T>
T* on_device(std::vector<T> const& host) {
  void* copy = nullptr;
  cudaMalloc(&copy, host.size() * sizeof(T));
  cudaMemcpy(copy, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
  return static_cast<T*>(copy);
}

// Chooses a kernel for the problem, allocates its workspace, and launches it on the default stream.
cutlass_ops::Status multiply(cutlass_ops::GemmProblem const& problem) {
  cutlass_ops::Device device;
  if (cutlass_ops::Status status = cutlass_ops::current_device(&device); !status.ok())
    return status;
  cutlass_ops::Plan plan;
  if (cutlass_ops::Status status = cutlass_ops::plan(problem, device, &plan); !status.ok())
    return status;
  for (char const* kernel : cutlass_ops::launches(plan)) std::printf("launches %s\n", kernel);
  cutlass_ops::Workspace workspace{nullptr, plan.workspace};
  if (plan.workspace) cudaMalloc(&workspace.data, plan.workspace);
  cutlass_ops::Status const status = cutlass_ops::mixed_gemm(problem, plan, workspace, nullptr);
  cudaFree(workspace.data);  // waits for the kernels
  return status;
}

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no GPU is here");
    return 77;  // ctest: skipped
  }

  constexpr int m = 16, n = 192, k = 576, group_size = 32, groups = k / group_size;
  uint16_t const one = 0x3c00;  // 1.0 in fp16
  std::vector<uint8_t> codes(n * k);
  for (int i = 0; i < n * k; ++i) codes[i] = i * 7 % 16;
  std::vector<uint16_t> const scales(n * groups, one);
  cutlass_ops::CanonicalWeight weight;
  weight.n = n, weight.k = k;
  weight.format = cutlass_ops::Format::kInt4, weight.group_size = group_size;
  weight.codes = codes.data(), weight.scales = scales.data();
  std::vector<std::max_align_t> packed(
      cutlass_ops::weight_bytes(weight) / sizeof(std::max_align_t) + 1);
  if (cutlass_ops::Status const status = cutlass_ops::pack_weight(weight, packed.data());
      !status.ok())
    return std::puts(status.text.c_str()), 1;

  cutlass_ops::GemmProblem problem;
  problem.weight = cutlass_ops::make_weight(weight, on_device(packed));
  problem.m = m;
  problem.x = on_device(std::vector<uint16_t>(m * k, one)), problem.x_stride = k;
  float* const out = on_device(std::vector<float>(m * n));
  problem.out = out, problem.out_type = cutlass_ops::DataType::kFloat32;
  if (cutlass_ops::Status const status = multiply(problem); !status.ok())
    return std::puts(status.text.c_str()), 1;

  std::vector<float> y(m * n);
  if (cudaMemcpy(y.data(), out, y.size() * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess)
    return std::puts(cudaGetErrorString(cudaGetLastError())), 1;
  for (int row = 0; row < m; ++row) {
    for (int feature = 0; feature < n; ++feature) {
      int expected = 0;
      for (int column = 0; column < k; ++column) expected += codes[feature * k + column] - 8;
      if (y[row * n + feature] != expected)
        return std::printf("y[%d][%d] is wrong\n", row, feature), 1;
    }
  }
  return std::puts("y is x @ W^T"), 0;
}
