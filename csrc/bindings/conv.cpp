// The part of cutlass_ops._C that is convolutions: products whose rows of x are an image's pixels,
// and those of int8.
#include "cutlass_ops/conv.h"

#include <pybind11/stl.h>

#include <array>
#include <optional>

#include "bindings/bindings.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

namespace py = pybind11;

namespace {

using Triple = std::array<int, 3>;

GemmProblem make_problem(Weight const& weight, Pointer x, DataType x_type, std::int64_t x_stride,
                         int batch, int channels, Triple const& size, Triple const& taps,
                         Triple const& out_size, Triple const& stride, Triple const& padding,
                         Triple const& dilation, ActQuant act_quant, bool symmetric,
                         py::object const& epilogue, Pointer out, DataType out_type) {
  GemmProblem p;
  p.weight = weight;
  p.x = as<void>(x), p.x_type = x_type, p.x_stride = x_stride;
  p.act_quant = act_quant, p.act_symmetric = symmetric;
  p.image.batch = batch, p.image.channels = channels, p.m = batch;
  for (int axis = 0; axis < 3; ++axis) {
    p.image.size[axis] = size[axis], p.image.taps[axis] = taps[axis],
    p.image.out[axis] = out_size[axis];
    p.image.stride[axis] = stride[axis], p.image.padding[axis] = padding[axis],
    p.image.dilation[axis] = dilation[axis];
    p.m *= out_size[axis];
  }
  if (!epilogue.is_none()) epilogue.cast<Epilogue const&>().set(p);
  p.out = as<void>(out), p.out_type = out_type;
  return p;
}

// Whether x is a matrix in fact: a kernel of one pixel. (Not for depthwise_conv(), whose K is the
// taps.)
bool is_matrix(GemmProblem const& p) {
  ImageRows const& image = p.image;
  if (!is_image(p) || image.channels == 1 || p.act_quant == ActQuant::kTensor) return false;
  for (int axis = 0; axis < 3; ++axis)
    if (image.taps[axis] != 1 || image.stride[axis] != 1 || image.padding[axis] != 0) return false;
  return true;
}

}  // namespace

void register_conv(py::module_& m) {
  py::class_<GemmProblem>(
      m, "ImageProblem",
      "A product whose rows of x are an image's pixels; the tensors must outlive it.")
      .def(py::init(&make_problem), py::arg("weight"), py::arg("x_ptr"), py::arg("x_type"),
           py::arg("x_stride"), py::arg("batch"), py::arg("channels"), py::arg("size"),
           py::arg("taps"), py::arg("out_size"), py::arg("stride"), py::arg("padding"),
           py::arg("dilation"), py::arg("act_quant"), py::arg("symmetric"), py::arg("epilogue"),
           py::arg("out_ptr"), py::arg("out_type"))
      .def(
          "plan",
          [](GemmProblem& problem, Device const& device) -> std::optional<Plan> {
            // All kernels take matrices.
            if (is_matrix(problem) && !is_faster_as_image(problem, device)) problem.image = {};
            Plan found;
            Status const status = plan(problem, device, &found);
            if (status.code == Status::kUnsupported) return {};
            check(status);
            return found;
          },
          py::arg("device"), "How it would be launched; None where no kernel takes it.");
  m.def(
      "mixed_conv",
      [](GemmProblem problem, Plan const& plan, Pointer x, Pointer bias, Pointer out,
         Pointer workspace, Pointer stream) {
        problem.x = as<void>(x), problem.bias = as<void>(bias), problem.out = as<void>(out);
        check(mixed_gemm(problem, plan, {as<void>(workspace), plan.workspace}, as<void>(stream)));
      },
      py::arg("problem"), py::arg("plan"), py::arg("x_ptr"), py::arg("bias_ptr"),
      py::arg("out_ptr"), py::arg("workspace_ptr"), py::arg("stream"),
      "Write the result of the problem, with these pointers for its own, as `plan` says, in a "
      "workspace of its size, on the current device. x starts on 16 bytes if the problem's does.");
  m.attr("tap_vector") = kTapVector;
  m.def(
      "depthwise_conv",
      [](GemmProblem const& problem, Pointer taps, Pointer stream) {
        check(depthwise_conv(problem, as<float>(taps), as<void>(stream)));
      },
      py::arg("problem"), py::arg("taps_ptr"), py::arg("stream"),
      "Write the result of a problem with one input channel a group, by the weight's values, fp32 "
      "[taps][n rounded up to "
      "tap_vector], on the current device.");

  m.def(
      "finish_sums",
      [](GemmProblem const& problem, Pointer sums, Pointer stream) {
        check(finish_sums(problem, as<void>(sums), as<void>(stream)));
      },
      py::arg("problem"), py::arg("sums_ptr"), py::arg("stream"),
      "Write the epilogue of sums [m, n] of x's 16-bit type, which may lie where the result goes, "
      "on the current device.");

  m.def(
      "quantized_values",
      [](Pointer x, Pointer out, DataType x_type, DataType out_type, int64_t rows, int columns,
         int block, bool symmetric, Pointer range, Pointer stream) {
        QuantizedValues const problem{as<void>(x), x_type, as<void>(out), out_type,           rows,
                                      columns,     block,  symmetric,     as<uint32_t>(range)};
        check(quantized_values(problem, as<void>(stream)));
      },
      py::arg("x_ptr"), py::arg("out_ptr"), py::arg("x_type"), py::arg("out_type"), py::arg("rows"),
      py::arg("columns"), py::arg("block"), py::arg("symmetric"), py::arg("range_ptr"),
      py::arg("stream"),
      "Write the values that codes of x [rows, columns] stand for, one scale for `block` columns "
      "or, with -1, for a row; or "
      "for all of x, whose range goes to range_ptr, on the current device.");

  using Pair = std::array<int, 2>;
  py::enum_<ConvOutput>(m, "ConvOutput")
      .value("int8", ConvOutput::kInt8)
      .value("uint8", ConvOutput::kUInt8)
      .value("int32", ConvOutput::kInt32)
      .value("float16", ConvOutput::kFloat16)
      .value("bfloat16", ConvOutput::kBFloat16);
  py::enum_<ConvOrder>(m, "ConvOrder")
      .value("by_channels", ConvOrder::kByChannels)
      .value("by_taps", ConvOrder::kByTaps)
      .value("flat", ConvOrder::kFlat);
  py::class_<ConvWeight>(m, "ConvWeight",
                         "Pointers and sizes of an int8 weight; the tensors must outlive it.")
      .def(py::init([](Pointer codes, ConvOrder order, Pointer sums, Pointer scales,
                       DataType scale_type, int n, Pair taps, int channels) {
             ConvWeight w;
             w.codes = as<int8_t>(codes), w.order = order, w.sums = as<int32_t>(sums);
             w.scales = as<void>(scales), w.scale_type = scale_type;
             w.n = n, w.height = taps[0], w.width = taps[1], w.channels = channels;
             return w;
           }),
           py::arg("codes_ptr"), py::arg("order"), py::arg("sums_ptr"), py::arg("scales_ptr"),
           py::arg("scale_type"), py::arg("n"), py::arg("taps"), py::arg("channels"));
  py::class_<ConvPlan>(m, "ConvPlan", "How a convolution of int8 would be launched.")
      .def_readonly("kernel", &ConvPlan::kernel)
      .def_readonly("block_m", &ConvPlan::block_m)
      .def_readonly("block_n", &ConvPlan::block_n)
      .def_readonly("cluster_size", &ConvPlan::cluster_size)
      .def_readonly("slices", &ConvPlan::slices)
      .def_readonly("turns", &ConvPlan::turns)
      .def_readonly("windows", &ConvPlan::windows)
      .def_readonly("overlaps", &ConvPlan::overlaps)
      .def_readonly("ctas_per_sm", &ConvPlan::ctas_per_sm)
      .def_readonly("stages", &ConvPlan::stages)
      .def_readonly("grid", &ConvPlan::grid)
      .def_readonly("copied_channels", &ConvPlan::copied_channels)
      .def_readonly("workspace", &ConvPlan::workspace)
      .def_readonly("predicted_clocks", &ConvPlan::predicted_clocks);
  py::class_<ConvProblem>(m, "ConvProblem", "A convolution of int8; the tensors must outlive it.")
      .def(py::init([](ConvWeight const& weight, Pointer x, bool x_unsigned, DataType x_type,
                       bool x_symmetric, std::array<int, 4> const& shape, Pair stride, Pair padding,
                       Pair dilation, int groups, Pointer bias, bool bias_int32, DataType bias_type,
                       Pointer out, ConvOutput out_type, float x_scale, int x_zero_point,
                       float y_scale, int y_zero_point, Activation activation, float low,
                       float high) {
             ConvProblem p;
             p.weight = weight;
             p.x = as<void>(x), p.x_unsigned = x_unsigned;
             p.x_type = x_type, p.x_symmetric = x_symmetric;
             p.batch = shape[0], p.height = shape[1], p.width = shape[2], p.channels = shape[3];
             for (int axis : {0, 1})
               p.stride[axis] = stride[axis], p.padding[axis] = padding[axis],
               p.dilation[axis] = dilation[axis];
             p.groups = groups;
             p.bias = as<void>(bias), p.bias_int32 = bias_int32, p.bias_type = bias_type;
             p.x_scale = x_scale, p.x_zero_point = x_zero_point, p.y_scale = y_scale,
             p.y_zero_point = y_zero_point;
             p.activation = activation, p.clamp_low = low, p.clamp_high = high;
             p.out = as<void>(out), p.out_type = out_type;
             return p;
           }),
           py::arg("weight"), py::arg("x_ptr"), py::arg("x_unsigned"), py::arg("x_type"),
           py::arg("x_symmetric"), py::arg("shape"), py::arg("stride"), py::arg("padding"),
           py::arg("dilation"), py::arg("groups"), py::arg("bias_ptr"), py::arg("bias_int32"),
           py::arg("bias_type"), py::arg("out_ptr"), py::arg("out_type"), py::arg("x_scale"),
           py::arg("x_zero_point"), py::arg("y_scale"), py::arg("y_zero_point"),
           py::arg("activation"), py::arg("low"), py::arg("high"))
      .def(
          "plan",
          [](ConvProblem const& problem, Device const& device) {
            ConvPlan plan;
            check(plan_conv_int8(problem, device, &plan));
            return plan;
          },
          py::arg("device"), "How conv_int8 would launch it.")
      .def(
          "plans",
          [](ConvProblem const& problem, Device const& device) {
            std::vector<ConvPlan> plans;
            check(plans_conv_int8(problem, device, &plans));
            return plans;
          },
          py::arg("device"), "All ways to launch it, that of `plan` first.")
      .def(
          "supported_plans",
          [](ConvProblem const& problem, Device const& device) {
            std::vector<ConvPlan> plans;
            Status const status = plans_conv_int8(problem, device, &plans);
            if (status.code == Status::kUnsupported) return std::vector<ConvPlan>();
            check(status);
            return plans;
          },
          py::arg("device"), "`plans`; empty where no kernel takes it.");
  m.def(
      "conv_int8",
      [](ConvProblem problem, ConvPlan const& plan, Pointer x, Pointer bias, Pointer out,
         Pointer workspace, Pointer stream) {
        problem.x = as<void>(x), problem.bias = as<void>(bias), problem.out = as<void>(out);
        check(conv_int8(problem, plan, {as<void>(workspace), plan.workspace}, as<void>(stream)));
      },
      py::arg("problem"), py::arg("plan"), py::arg("x_ptr"), py::arg("bias_ptr"),
      py::arg("out_ptr"), py::arg("workspace_ptr"), py::arg("stream"),
      "Write the result of the problem, with these pointers for its own, as `plan` says, in a "
      "workspace of its size, on the current device.");
  m.def("conv_order", &conv_order, py::arg("n"), py::arg("channels"), py::arg("taps"),
        py::arg("groups"), "The order of the weight's codes that the kernels read.");
  m.def("stored_channels", &stored_channels, py::arg("channels"),
        "Channels of a tap, padded, as kernels take them.");
}

}  // namespace cutlass_ops
