// The operators: choose a kernel, lay out the workspace, launch. Host code; without CUDA
// every call says so.
#include "cutlass_ops/ops.h"

#include "cutlass_ops/awq.h"
#include "cutlass_ops/flat_4bit.h"
#include "cutlass_ops/layout.h"
#include "cutlass_ops/zero_compensation.h"
#include "dispatch/checks.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"

#if CUTLASS_OPS_CUDA
#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#endif

namespace cutlass_ops {

#if CUTLASS_OPS_CUDA
namespace {

constexpr int kMaxDevices = 64;

Status cuda_status(char const* call, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {Status::kCuda, std::string(call) + ": " + cudaGetErrorName(error) + " (" +
                             cudaGetErrorString(error) + ")"};
}

std::string shape(GemmProblem const& problem) {
  return " [m=" + std::to_string(problem.m) + ", n=" + std::to_string(problem.weight.n) +
         ", k=" + std::to_string(problem.weight.k) + ", " + info(problem.weight.format).codes +
         ", group_size=" + std::to_string(problem.weight.group_size) + "]";
}

}  // namespace

Status current_device(Device* device) {
  static Device known[kMaxDevices];
  static std::atomic<bool> is_known[kMaxDevices];
  static std::mutex writing;
  int id = 0;
  if (Status status = cuda_status("cudaGetDevice", cudaGetDevice(&id)); !status.ok()) return status;
  if (id < kMaxDevices && is_known[id].load(std::memory_order_acquire)) {
    *device = known[id];
    return {};
  }
  int major = 0, minor = 0, memory_khz = 0, memory_bits = 0;
  Device found;
  struct {
    int* value;
    cudaDeviceAttr attribute;
  } const wanted[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                      {&minor, cudaDevAttrComputeCapabilityMinor},
                      {&found.multiprocessors, cudaDevAttrMultiProcessorCount},
                      {&found.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                      {&memory_khz, cudaDevAttrMemoryClockRate},
                      {&memory_bits, cudaDevAttrGlobalMemoryBusWidth}};
  for (auto const& w : wanted) {
    Status status =
        cuda_status("cudaDeviceGetAttribute", cudaDeviceGetAttribute(w.value, w.attribute, id));
    if (!status.ok()) return status;
  }
  found.architecture = 10 * major + minor;
  // Two transfers a clock.
  found.memory_bandwidth = int(int64_t(memory_khz) * 2 * memory_bits / 8 / 1000000);
  if (id < kMaxDevices) {
    std::lock_guard<std::mutex> lock(writing);
    if (!is_known[id]) known[id] = found;
    is_known[id].store(true, std::memory_order_release);
  }
  *device = found;
  return {};
}

DeviceGuard::DeviceGuard(int device) {
  int current = device;
  status_ = cuda_status("cudaGetDevice", cudaGetDevice(&current));
  if (!status_.ok() || current == device) return;
  status_ = cuda_status("cudaSetDevice", cudaSetDevice(device));
  if (status_.ok()) previous_ = current;
}
DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

Status mixed_gemm(GemmProblem const& problem, Workspace workspace, Stream stream) {
  Device device;
  Plan chosen;
  if (Status status = current_device(&device); !status.ok()) return status;
  if (Status status = plan(problem, device, &chosen); !status.ok()) return status;
  return mixed_gemm(problem, chosen, workspace, stream);
}

Status mixed_gemm(GemmProblem const& problem, Plan const& chosen, Workspace workspace,
                  Stream stream) {
  if (!chosen.spec) return {Status::kInvalid, "the plan is empty; plan() fills it"};
  if (problem.m == 0) return {};
  if (Status status = check_launch(problem, chosen, workspace); !status.ok())
    return {status.code, status.text + shape(problem)};
  WorkspaceLayout const& layout = chosen.layout;
  auto* base = static_cast<uint8_t*>(workspace.data);
  GemmProblem ready = problem;
  if (layout.block) {
    ready.quantized = {
        reinterpret_cast<int8_t*>(base + layout.codes),
        reinterpret_cast<float*>(base + layout.scales),
        problem.act_symmetric ? nullptr : reinterpret_cast<int8_t*>(base + layout.zeros),
        layout.block,
        layout.stride,
        layout.rows};
  }
  if (layout.upcasts) {
    ready.quantized.upcast = base + layout.upcast, ready.quantized.upcast_type = problem.x_type;
    ready.quantized.upcast_row_scales = is_image(problem);  // another one under each tap
  }
  if (layout.ranges) ready.quantized.range = reinterpret_cast<uint32_t*>(base + layout.range);
  if (layout.compensates) {
    ready.quantized.zero_values = base + layout.zero_values;
    ready.quantized.zero_scales = reinterpret_cast<float*>(base + layout.zero_scales);
  }
  Status status;
  if (layout.sums) place_colsums(&ready.weight, base + layout.colsums);
  if (status.ok() && (layout.block || layout.ranges)) {
    QuantizeProblem const quantize{problem.x,
                                   problem.x_type,
                                   problem.x_stride,
                                   int(stored_rows(problem)),
                                   stored_columns(problem),
                                   problem.weight.perm,
                                   ready.quantized,
                                   ready.quantized.range};
    if (layout.ranges) status = launch_find_range(quantize, problem.act_symmetric, stream);
    if (status.ok() && layout.block)
      status = launch_quantize_activations(
          quantize, stream, {chosen.quantizer_starts_early, chosen.quantizer_spreads});
  } else if (status.ok() && layout.upcasts) {
    status = launch_upcast_activations(ready, stream);
  }
  if (layout.upcasts) {
    ready.x = ready.quantized.upcast, ready.x_type = ready.quantized.upcast_type;
    ready.x_stride = padded_k(stored_columns(problem)), ready.image.channels = int(ready.x_stride);
    // the values include them
    if (ready.quantized.block != -1 || is_image(problem)) ready.quantized.scales = nullptr;
  }
  if (status.ok() && layout.compensates && !layout.block)
    status = launch_compensate_zeros(ready, stream);
  if (status.ok() && layout.sums) {
    bool const follows = layout.block || layout.compensates;
    status = launch_weight_colsum(problem.weight, compensates_weight_zeros(problem), follows,
                                  base + layout.colsums, stream);
  }
  if (layout.gates) {
    // The kernel's result is all rows' sums.
    ready.weight.gated = false;
    ready.out = base + layout.gate_sums, ready.out_type = DataType::kFloat32;
    ready.bias = ready.residual = nullptr, ready.activation = Activation::kNone;
    ready.saturate = false;
  }
  float* splitk_workspace =
      chosen.slices > 1 ? reinterpret_cast<float*>(base + layout.splitk_workspace) : nullptr;
  if (status.ok()) status = chosen.spec->launch(ready, chosen, splitk_workspace, stream);
  bool const stored_slices = splitk_workspace && chosen.tail_tiles == 0;
  if (status.ok() && layout.gates) {
    status = stored_slices
                 ? launch_gate_sums(problem, chosen.slices, int(padded_rows(problem.weight.n)),
                                    splitk_workspace, stream)
                 : launch_gate_sums(problem, 1, problem.weight.n,
                                    static_cast<float const*>(ready.out), stream);
  } else if (status.ok() && stored_slices) {
    status = launch_splitk_reduce(ready, chosen.slices, splitk_workspace, stream);
  }
  if (!status.ok()) status.text += shape(problem);
  return status;
}

Status depthwise_conv(GemmProblem const& problem, float const* taps, Stream stream) {
  if (Status status = check_depthwise(problem, taps); !status.ok() || problem.m == 0) return status;
  return launch_conv_depthwise(problem, taps, stream);
}

Status finish_sums(GemmProblem const& problem, void const* sums, Stream stream) {
  if (Status status = check_finish(problem, sums); !status.ok() || problem.m == 0) return status;
  return launch_finish_sums(problem, sums, stream);
}

Status quantize_activations(QuantizeProblem const& problem, Stream stream) {
  if (Status status = check_quantize(problem); !status.ok() || problem.m == 0) return status;
  return launch_quantize_activations(problem, stream);
}

Status quantized_values(QuantizedValues const& problem, Stream stream) {
  if (Status status = check_quantized_values(problem); !status.ok() || problem.rows == 0)
    return status;
  if (problem.range) {
    QuantizeProblem all;
    all.x = problem.x, all.x_type = problem.x_type;
    all.m = int(problem.rows), all.k = problem.columns, all.x_stride = problem.columns;
    all.range = problem.range;
    if (Status status = launch_find_range(all, problem.symmetric, stream); !status.ok())
      return status;
  }
  return launch_quantized_values(problem, stream);
}

Status weight_colsum(PackedWeight const& weight, void* colsums, Stream stream) {
  if (Status status = check_sums(weight, colsums); !status.ok()) return status;
  return launch_weight_colsum(weight, false, false, colsums, stream);
}

Status pack(PackProblem const& problem, Stream stream) {
  if (Status status = check_pack(problem); !status.ok()) return status;
  return launch_pack(problem, stream);
}

Status unpack(PackProblem const& problem, Stream stream) {
  if (Status status = check_pack(problem); !status.ok()) return status;
  return launch_unpack(problem, stream);
}

Status dequantize(DequantizeProblem const& problem, Stream stream) {
  if (Status status = check_dequantize(problem); !status.ok()) return status;
  return launch_dequantize(problem, stream);
}

Status quantize_flat(FlatProblem const& problem, Stream stream) {
  if (Status status = check_flat(problem, true); !status.ok() || problem.count == 0) return status;
  return launch_quantize_flat(problem, stream);
}

Status dequantize_flat(FlatProblem const& problem, Stream stream) {
  if (Status status = check_flat(problem, false); !status.ok() || problem.count == 0) return status;
  return launch_dequantize_flat(problem, stream);
}

Status dequantize_awq(AwqWeight const& weight, void* out, Stream stream) {
  if (Status status = check_awq(weight, out); !status.ok()) return status;
  return launch_dequantize_awq(weight, out, stream);
}

Status awq_gemm(AwqWeight const& weight, void const* x, int64_t x_stride, int m, void* out,
                Stream stream) {
  if (Status status = check_awq_gemm(weight, x, x_stride, m, out); !status.ok() || m == 0)
    return status;
  return launch_awq_gemm(weight, x, x_stride, m, out, stream);
}

#else

namespace {
Status no_cuda() {
  return {Status::kUnsupported,
          "this build of cutlass_ops has no CUDA kernels; it was compiled without nvcc"};
}
}  // namespace

Status current_device(Device*) { return no_cuda(); }
DeviceGuard::DeviceGuard(int) : status_(no_cuda()) {}
DeviceGuard::~DeviceGuard() = default;
Status mixed_gemm(GemmProblem const&, Plan const&, Workspace, Stream) { return no_cuda(); }
Status mixed_gemm(GemmProblem const&, Workspace, Stream) { return no_cuda(); }
Status depthwise_conv(GemmProblem const&, float const*, Stream) { return no_cuda(); }
Status finish_sums(GemmProblem const&, void const*, Stream) { return no_cuda(); }
Status quantize_activations(QuantizeProblem const&, Stream) { return no_cuda(); }
Status quantized_values(QuantizedValues const&, Stream) { return no_cuda(); }
Status weight_colsum(PackedWeight const&, void*, Stream) { return no_cuda(); }
Status pack(PackProblem const&, Stream) { return no_cuda(); }
Status unpack(PackProblem const&, Stream) { return no_cuda(); }
Status dequantize(DequantizeProblem const&, Stream) { return no_cuda(); }
Status quantize_flat(FlatProblem const&, Stream) { return no_cuda(); }
Status dequantize_flat(FlatProblem const&, Stream) { return no_cuda(); }
Status dequantize_awq(AwqWeight const&, void*, Stream) { return no_cuda(); }
Status awq_gemm(AwqWeight const&, void const*, int64_t, int, void*, Stream) { return no_cuda(); }

#endif

}  // namespace cutlass_ops
