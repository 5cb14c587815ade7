// The part of cutlass_ops._C that is the choice of a kernel.
#include "cutlass_ops/plan.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace cutlass_ops {

namespace py = pybind11;

namespace {

// A plan depends on addresses, not on contents. The tensors described here may be in host memory,
// which has other alignments, or may not exist yet.
alignas(256) char somewhere[256];

template <class T>
T* aligned(T* pointer) {
  return pointer ? reinterpret_cast<T*>(somewhere) : nullptr;
}

PackedWeight aligned(PackedWeight w) {
  w.codes = aligned(w.codes), w.scales = aligned(w.scales), w.zeros = aligned(w.zeros),
  w.offsets = aligned(w.offsets);
  w.perm = aligned(w.perm), w.codebook = aligned(w.codebook), w.sums = aligned(w.sums);
  return w;
}

QuantizedActivations aligned(QuantizedActivations q) {
  q.codes = aligned(q.codes), q.scales = aligned(q.scales), q.zeros = aligned(q.zeros);
  return q;
}

}  // namespace

void register_plan(py::module_& m) {
  py::class_<Device>(m, "Device",
                     "A GPU as far as the choice of a kernel goes; it need not be there.")
      .def(py::init(
               [](int architecture, int multiprocessors, int shared_memory, int memory_bandwidth) {
                 return Device{architecture, multiprocessors, shared_memory, memory_bandwidth};
               }),
           py::arg("architecture"), py::arg("multiprocessors"), py::arg("shared_memory"),
           py::arg("memory_bandwidth") = 0)
      .def_readonly("architecture", &Device::architecture)
      .def_readonly("multiprocessors", &Device::multiprocessors)
      .def_readonly("shared_memory", &Device::shared_memory)
      .def_readonly("memory_bandwidth", &Device::memory_bandwidth);
  py::class_<Plan>(m, "Plan", "How a product would be launched.")
      .def_readonly("kernel", &Plan::kernel)
      .def_readonly("why", &Plan::why)
      .def_readonly("block_n", &Plan::block_n)
      .def_readonly("block_m", &Plan::block_m)
      .def_property_readonly("grid", [](Plan const& p) { return std::pair(p.grid_x, p.grid_y); })
      .def_readonly("cluster_size", &Plan::cluster_size)
      .def_readonly("threads", &Plan::threads)
      .def_readonly("shared_bytes", &Plan::shared_bytes)
      .def_readonly("stages", &Plan::stages)
      .def_readonly("slices", &Plan::slices)
      .def_readonly("tail_tiles", &Plan::tail_tiles)
      .def_readonly("rounds", &Plan::rounds)
      .def_readonly("quantizes", &Plan::quantizes)
      .def_readonly("compensates", &Plan::compensates)
      .def_property_readonly("launches", &launches)
      .def_readonly("workspace", &Plan::workspace);
  m.def(
      "current_device",
      [] {
        Device device;
        check(current_device(&device));
        return device;
      },
      "The current device's properties.");
  m.def(
      "plan",
      [](Weight const& weight, int rows, DataType out_type, Pointer x, DataType type,
         std::int64_t stride, py::object const& quantized, ActQuant act_quant, bool symmetric,
         bool batch_invariant, int architecture, bool exact, Device const& device, bool residual) {
        GemmProblem problem;
        problem.m = rows;
        problem.weight = aligned(PackedWeight(weight));
        problem.out_type = out_type;
        problem.x = x ? as<void>(x) : somewhere, problem.x_type = type, problem.x_stride = stride;
        if (!quantized.is_none())
          problem.quantized = aligned(quantized.cast<QuantizedActivations const&>());
        problem.act_quant = act_quant, problem.act_symmetric = symmetric;
        problem.batch_invariant = batch_invariant, problem.architecture = architecture,
        problem.exact = exact;
        if (residual)
          problem.residual = somewhere, problem.residual_type = DataType::kFloat32,
          problem.residual_stride = problem.weight.n;
        Plan chosen;
        check(plan(problem, device, &chosen));
        return chosen;
      },
      py::arg("weight"), py::arg("m"), py::arg("out_type"), py::arg("x_ptr"), py::arg("x_type"),
      py::arg("x_stride"), py::arg("quantized"), py::arg("act_quant"), py::arg("symmetric"),
      py::arg("batch_invariant"), py::arg("architecture"), py::arg("exact"), py::arg("device"),
      py::arg("residual") = false,
      "How mixed_gemm would be launched; pointers may be null, and quantized None.");
}

}  // namespace cutlass_ops
