// Starting a kernel: shared memory beyond 48 KB, programmatic dependent launch, and
// errors as a Status.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "cutlass_ops/ops.h"

namespace cutlass_ops {

inline Status cuda_error(char const* call, cudaError_t error) {
  return {Status::kCuda, std::string(call) + ": " + cudaGetErrorName(error) + " (" +
                             cudaGetErrorString(error) + ")"};
}

// The binary logarithm of a power of two.
constexpr int log2_of(int value) {
  int log = 0;
  while (1 << log < value) ++log;
  return log;
}

// Allow a kernel this much dynamic shared memory on the current device. The runtime is called once,
// or when the size grows: the call takes longer than a launch.
inline Status allow_shared_memory(void const* kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, void const*>, int> allowed;  // device, kernel -> bytes
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
    return cuda_error("cudaGetDevice", error);
  std::lock_guard<std::mutex> lock(mutex);
  int& known = allowed[{device, kernel}];
  if (bytes <= known) return {};
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return cuda_error("cudaFuncSetAttribute", error);
  known = bytes;
  return {};
}

struct LaunchShape {
  dim3 grid, threads;
  int cluster = 1, shared_bytes = 0;
  bool overlaps = true;  // see launch_shape()
};

// If it overlaps, on sm_90 and later the kernel may start while its predecessor in the stream still
// runs: everything but weights is read, and anything is written, only after
// pdl_wait_and_launch_dependents().
template <class... Params, class... Args>
Status launch_shape(void (*kernel)(Params...), LaunchShape const& shape, Stream stream,
                    Args&&... args) {
  // 48 KB need no attribute, and a kernel's own variables take some of it.
  constexpr int kMostOfVariables = 8 * 1024;
  if (shape.shared_bytes > 48 * 1024 - kMostOfVariables) {
    Status status = allow_shared_memory(reinterpret_cast<void const*>(kernel), shape.shared_bytes);
    if (!status.ok()) return status;
  }
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = size_t(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[3];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = shape.overlaps;
  // All kernels request the same carve-out, however little they need: an SM changes its split
  // between cache and shared memory only when it is idle, so a kernel with another split would
  // overlap neither with its predecessor nor with its successor.
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  attributes[2].id = cudaLaunchAttributeClusterDimension;
  attributes[2].val.clusterDim.x = unsigned(shape.cluster);
  attributes[2].val.clusterDim.y = attributes[2].val.clusterDim.z = 1;
  config.attrs = attributes;
  // Clusters of one CTA, too: without the attribute compute-sanitizer's synccheck takes a cluster's
  // barriers for the CTA's.
  config.numAttrs = device.architecture < 90 ? 0 : 3;
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears the launch's error, so that the next call does not report it
    return cuda_error("cudaLaunchKernelEx", error);
  }
  return {};
}

// Launches a kernel with the grid, cluster and overlap of a plan, `threads` threads a CTA and at
// least `shared_bytes` of shared memory.
template <class... Params, class... Args>
Status launch_plan(void (*kernel)(Params...), Plan const& plan, int threads, int shared_bytes,
                   Stream stream, Args&&... args) {
  if (plan.threads != threads || plan.shared_bytes < shared_bytes) {
    return {Status::kInvalid, std::string("the plan of ") + plan.kernel + " has " +
                                  std::to_string(plan.threads) + " threads and " +
                                  std::to_string(plan.shared_bytes) +
                                  " bytes of shared memory; the kernel wants " +
                                  std::to_string(threads) + " and " + std::to_string(shared_bytes)};
  }
  dim3 const grid(unsigned(plan.grid_x), unsigned(plan.grid_y));
  return launch_shape(kernel, {grid, dim3(threads), plan.cluster_size, plan.shared_bytes}, stream,
                      std::forward<Args>(args)...);
}

// Calls `launch` with the one of kHeights that is `block_m`, rows of x of a CTA, as a constant.
template <int... kHeights, class Launch>
Status launch_height(Plan const& plan, int block_m, Launch const& launch) {
  Status status;
  bool const found =
      ((block_m == kHeights && (status = launch(std::integral_constant<int, kHeights>()), true)) ||
       ...);
  if (found) return status;
  return {Status::kInvalid,
          std::string(plan.kernel) + " has no tile of " + std::to_string(block_m) + " rows of x"};
}

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), dim3 grid, dim3 threads, int shared_bytes, Stream stream,
              Args&&... args) {
  return launch_shape(kernel, {grid, threads, 1, shared_bytes}, stream,
                      std::forward<Args>(args)...);
}

// Let the next kernel in the stream start.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until all that earlier kernels in the stream wrote can be seen; for kernels that call
// pdl_launch_dependents() themselves.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Waits for the kernels before, then lets the next kernel start.
__device__ __forceinline__ void pdl_wait_and_launch_dependents() {
  pdl_wait();
  pdl_launch_dependents();
}

}  // namespace cutlass_ops
