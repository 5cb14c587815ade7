// Declarations shared by the files of the Python module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cutlass_ops/ops.h"
#include "dispatch/plan_cache.h"

namespace cutlass_ops {

using Pointer = std::uintptr_t;  // 0 is null

template <class T>
T* as(Pointer pointer) {
  return reinterpret_cast<T*>(pointer);
}

inline void check(Status const& status) {
  if (status.ok()) return;
  if (status.code == Status::kCuda) throw std::runtime_error(status.text);
  throw std::invalid_argument(status.text);  // ValueError
}

// A weight with the other facts that `product` needs.
struct Weight : PackedWeight {
  using Parts = std::vector<std::pair<pybind11::object, pybind11::object>>;

  void const* bias;
  DataType bias_type;
  pybind11::object device;  // a torch.device
  int gpu;                  // its index, or -1
  bool on_cpu;
  Parts parts;                           // tensors of the pointers, or None, by name
  std::vector<pybind11::object> floats;  // of those, which may require a gradient
  std::vector<std::pair<pybind11::object, Pointer>> addresses;  // of the tensors
  PlanCache plans = {};

  // Whether the tensors still lie there: torch moves one to shared memory when it is sent to
  // another process, or is given other memory (`tensor.data = other`).
  bool is_current() const;
};

// The epilogue's fields of GemmProblem.
struct Epilogue {
  void const* bias;
  DataType bias_type;
  void const* residual;
  DataType residual_type;
  std::int64_t residual_stride;
  Activation activation;
  float low, high;
  bool saturate;

  void set(GemmProblem& problem) const {
    problem.bias = bias, problem.bias_type = bias_type;
    problem.residual = residual, problem.residual_type = residual_type,
    problem.residual_stride = residual_stride;
    problem.activation = activation, problem.clamp_low = low, problem.clamp_high = high;
    problem.saturate = saturate;
  }
};

// Each is defined in the file of that name.
void register_packing(pybind11::module_& m);
void register_plan(pybind11::module_& m);
void register_products(pybind11::module_& m);
void register_experts(pybind11::module_& m);
void register_conv(pybind11::module_& m);

}  // namespace cutlass_ops
