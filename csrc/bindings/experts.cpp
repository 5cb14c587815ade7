// The part of cutlass_ops._C that is mixtures of experts.
#include "cutlass_ops/experts.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

namespace py = pybind11;

void register_experts(py::module_& m) {
  py::class_<RouteProblem>(m, "RouteProblem", "Ids of experts, whose tensor must outlive it.")
      .def(py::init([](Pointer ids, bool wide, int tokens, int top, int experts, Pointer map,
                       int map_size) {
             return RouteProblem{as<void>(ids),    wide,    tokens, top, experts,
                                 as<int32_t>(map), map_size};
           }),
           py::arg("ids_ptr"), py::arg("wide"), py::arg("tokens"), py::arg("top"),
           py::arg("experts"), py::arg("map_ptr"), py::arg("map_size"));
  m.def(
      "route",
      [](RouteProblem const& problem, Pointer offsets, Pointer order, int device_index,
         Pointer stream) {
        DeviceGuard guard(device_index);
        check(guard.status());
        check(route(problem, {as<int32_t>(offsets), as<int32_t>(order)}, as<void>(stream)));
      },
      py::arg("problem"), py::arg("offsets_ptr"), py::arg("order_ptr"), py::arg("device_index"),
      py::arg("stream"), "Sort positions by expert.");
  py::class_<MoePlan>(m, "MoePlan", "How the products of experts would be launched.")
      .def_readonly("kernel", &MoePlan::kernel)
      .def_readonly("slots", &MoePlan::slots)
      .def_readonly("gate_up", &MoePlan::gate_up)
      .def_readonly("down", &MoePlan::down)
      .def_readonly("workspace", &MoePlan::workspace);
  py::class_<MoeProblem>(m, "MoeProblem", "A layer of experts; the tensors must outlive it.")
      .def(py::init([](RouteProblem const& route, Pointer x, DataType type, std::int64_t stride,
                       Weight const& gate_up, Pointer gate_up_perm, Weight const& down,
                       Pointer down_perm, int hidden, ActQuant act_quant, bool symmetric,
                       Activation activation, float low, float high, Pointer weights,
                       DataType weight_type, Pointer out, int architecture) {
             MoeProblem problem;
             problem.route = route;
             problem.x = as<void>(x), problem.x_type = type, problem.x_stride = stride;
             problem.gate_up = {gate_up,      route.experts,
                                2 * down.k,   as<int32_t>(gate_up_perm),
                                gate_up.bias, gate_up.bias_type};
             problem.down = {down,      route.experts, hidden, as<int32_t>(down_perm),
                             down.bias, down.bias_type};
             problem.act_quant = act_quant, problem.act_symmetric = symmetric;
             problem.activation = activation, problem.clamp_low = low, problem.clamp_high = high;
             problem.topk_weights = as<void>(weights), problem.weight_type = weight_type,
             problem.out = as<void>(out), problem.architecture = architecture;
             return problem;
           }),
           py::arg("route"), py::arg("x_ptr"), py::arg("x_type"), py::arg("x_stride"),
           py::arg("gate_up"), py::arg("gate_up_perm_ptr"), py::arg("down"),
           py::arg("down_perm_ptr"), py::arg("hidden"), py::arg("act_quant"), py::arg("symmetric"),
           py::arg("activation"), py::arg("low"), py::arg("high"), py::arg("weights_ptr"),
           py::arg("weight_type"), py::arg("out_ptr"), py::arg("architecture"))
      .def(
          "plan",
          [](MoeProblem const& problem, Device const& device) {
            MoePlan plan;
            check(plan_moe(problem, device, &plan));
            return plan;
          },
          py::arg("device"), "How mixed_moe would launch it.");
  m.def(
      "mixed_moe",
      [](MoeProblem const& problem, MoePlan const& plan, Pointer workspace, int device_index,
         Pointer stream) {
        DeviceGuard guard(device_index);
        check(guard.status());
        check(mixed_moe(problem, plan, {as<void>(workspace), plan.workspace}, as<void>(stream)));
      },
      py::arg("problem"), py::arg("plan"), py::arg("workspace_ptr"), py::arg("device_index"),
      py::arg("stream"), "Write the layer's result, as `plan` says, in a workspace of its size.");
  m.def(
      "experts_take", [](Weight const& w) { return fits_fold16(w); }, py::arg("weight"),
      "Whether kernels of experts take the weight's groups.");
  m.attr("most_experts") = kMostExperts;
  m.attr("most_positions") = kMostPositions;
}

}  // namespace cutlass_ops
