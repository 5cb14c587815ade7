// The Python module cutlass_ops._C: pointers, sizes and the stream come as integers. The checks are
// made in Python, before the call; this file is built without torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/cpu_ops.h"
#include "cutlass_ops/awq.h"
#include "cutlass_ops/experts.h"
#include "cutlass_ops/flat_4bit.h"
#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "cutlass_ops/pack.h"
#include "cutlass_ops/words.h"
#include "cutlass_ops/zero_compensation.h"
#include "dispatch/checks.h"
#include "dispatch/problem.h"
#include "formats/formats.h"

namespace py = pybind11;
using namespace cutlass_ops;

namespace {

Weight make_weight(Pointer codes, Pointer scales, Pointer zeros, Pointer offsets, Pointer perm,
                   Pointer codebook, int n, int k, Format format, int group_size,
                   DataType scale_type, DataType offset_type, bool gated, Pointer bias,
                   DataType bias_type, py::object device, int gpu, py::object const& parts) {
  Weight::Parts kept;
  std::vector<py::object> floats;
  std::vector<std::pair<py::object, Pointer>> addresses;
  for (auto const& [name, value] : parts.cast<py::dict>()) {
    auto const tensor = py::reinterpret_borrow<py::object>(value);
    kept.emplace_back(py::reinterpret_borrow<py::object>(name), tensor);
    if (tensor.is_none()) continue;
    addresses.emplace_back(tensor, tensor.attr("data_ptr")().cast<Pointer>());
    if (tensor.attr("is_floating_point")().cast<bool>()) floats.push_back(tensor);
  }
  bool const on_cpu = !device.is_none() && device.attr("type").cast<std::string>() == "cpu";
  return {{as<uint8_t>(codes), as<void>(scales), as<int8_t>(zeros), as<void>(offsets),
           as<int32_t>(perm), as<float>(codebook), n, k, format, group_size, scale_type,
           offset_type, gated},
          as<void>(bias),
          bias_type,
          std::move(device),
          gpu,
          on_cpu,
          std::move(kept),
          std::move(floats),
          std::move(addresses)};
}

QuantizedActivations make_quantized(Pointer codes, Pointer scales, Pointer zeros, int block,
                                    int stride, int rows) {
  return {as<int8_t>(codes), as<float>(scales), as<int8_t>(zeros), block, stride, rows};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("built_with_cuda") = static_cast<bool>(CUTLASS_OPS_CUDA);
  m.attr("cuda_architectures") = CUTLASS_OPS_ARCHITECTURES;
  m.attr("cutlass_version") = CUTLASS_OPS_CUTLASS_VERSION;

  register_packing(m);

  py::enum_<DataType>(m, "DataType")
      .value("none", DataType::kNone)
      .value("float32", DataType::kFloat32)
      .value("float16", DataType::kFloat16)
      .value("bfloat16", DataType::kBFloat16);
  py::enum_<Format> format(m, "Format");
  for_each_format([&](auto f) { format.value(f.kName, f.kFormat); });
  py::enum_<ActQuant>(m, "ActQuant")
      .value("none", ActQuant::kNone)
      .value("token", ActQuant::kToken)
      .value("block", ActQuant::kBlock)
      .value("tensor", ActQuant::kTensor);
  py::enum_<Activation> activations(m, "Activation");
  for (ActivationInfo const& info : kActivations) activations.value(info.name, info.activation);

  py::class_<Weight>(
      m, "PackedWeight",
      "Pointers and sizes of a packed weight. It keeps the tensors among its parts; the "
      "caller keeps the other tensors that are pointed to.")
      .def(py::init(&make_weight), py::arg("codes_ptr"), py::arg("scales_ptr"),
           py::arg("zeros_ptr"), py::arg("offsets_ptr"), py::arg("perm_ptr"),
           py::arg("codebook_ptr"), py::arg("n"), py::arg("k"), py::arg("format"),
           py::arg("group_size"), py::arg("scale_type"), py::arg("offset_type"), py::arg("gated"),
           py::arg("bias_ptr"), py::arg("bias_type"), py::arg("device"), py::arg("gpu"),
           py::arg("parts"))
      .def("is_current", &Weight::is_current, "Whether the parts' tensors still lie there.")
      .def(
          "set_sums",
          [](Weight& weight, Pointer colsums) {
            weight.sums = nullptr, weight.sum_scales = nullptr, weight.total_colsum = nullptr;
            if (colsums) place_colsums(&weight, as<void>(colsums));
          },
          py::arg("colsums_ptr"), "Attach the output of weight_colsum; 0: products compute it.");

  py::class_<QuantizedActivations>(m, "QuantizedActivations",
                                   "int8 activations in kernel order; the tensors must outlive it.")
      .def(py::init(&make_quantized), py::arg("codes_ptr"), py::arg("scales_ptr"),
           py::arg("zeros_ptr"), py::arg("block"), py::arg("stride"), py::arg("rows"));
  py::class_<Epilogue>(m, "Epilogue",
                       "What happens to a sum on its way out; the tensors must outlive it.")
      .def(py::init([](Pointer bias, DataType bias_type, Pointer residual, DataType residual_type,
                       std::int64_t residual_stride, Activation activation, float low, float high,
                       bool saturate) {
             return Epilogue{as<void>(bias),
                             bias_type,
                             as<void>(residual),
                             residual_type,
                             residual_stride,
                             activation,
                             low,
                             high,
                             saturate};
           }),
           py::arg("bias_ptr"), py::arg("bias_type"), py::arg("residual_ptr"),
           py::arg("residual_type"), py::arg("residual_stride"), py::arg("activation"),
           py::arg("low"), py::arg("high"), py::arg("saturate"));
  register_products(m);

  m.def(
      "colsum_bytes", [](Weight const& weight) { return colsum_bytes(weight); }, py::arg("weight"),
      "Bytes that weight_colsum writes.");
  m.def(
      "weight_colsum",
      [](Weight const& weight, Pointer colsums, Pointer stream) {
        DeviceGuard guard(weight.gpu);
        check(guard.status());
        check(weight_colsum(weight, as<void>(colsums), as<void>(stream)));
      },
      py::arg("weight"), py::arg("colsums_ptr"), py::arg("stream"),
      "The weight's column sums (zero_compensation.h).");
  m.def(
      "quantize_activations",
      [](Pointer x, DataType type, std::int64_t x_stride, int rows, int k, Pointer perm,
         Pointer codes, Pointer scales, Pointer zeros, int block, int stride, int device_index,
         Pointer stream, Pointer up, std::int64_t up_stride, Pointer norm_weight, float norm_eps,
         Pointer residual, std::int64_t residual_stride, Pointer sum) {
        QuantizeProblem problem{as<void>(x), type, x_stride, rows, k, as<int32_t>(perm), {}};
        problem.out = make_quantized(codes, scales, zeros, block, stride, rows);
        problem.up = as<void>(up), problem.up_stride = up_stride;
        problem.norm_weight = as<void>(norm_weight), problem.norm_eps = norm_eps;
        problem.residual = as<void>(residual), problem.residual_stride = residual_stride,
        problem.sum = as<void>(sum);
        DeviceGuard guard(device_index);
        check(guard.status());
        check(quantize_activations(problem, as<void>(stream)));
      },
      py::arg("x_ptr"), py::arg("type"), py::arg("x_stride"), py::arg("m"), py::arg("k"),
      py::arg("perm_ptr"), py::arg("codes_ptr"), py::arg("scales_ptr"), py::arg("zeros_ptr"),
      py::arg("block"), py::arg("stride"), py::arg("device_index"), py::arg("stream"),
      py::arg("up_ptr") = 0, py::arg("up_stride") = 0, py::arg("norm_weight_ptr") = 0,
      py::arg("norm_eps") = 0.0f, py::arg("residual_ptr") = 0, py::arg("residual_stride") = 0,
      py::arg("sum_ptr") = 0,
      "Quantise [m, k] floats, or a function of them (QuantizeProblem), to int8 in kernel order.");
  m.def("cpu_instruction_sets", &cpu_instruction_sets,
        "Those that CPU kernels are chosen from here, the fastest first.");
  m.def("use_cpu_instruction_set", &use_cpu_instruction_set, py::arg("name"),
        "Choose another, for tests; the bits are the same, unless cpu_fuses or cpu_uses_bfloat16.");
  m.def("cpu_multiplies_bfloat16", &cpu_multiplies_bfloat16,
        "Whether this machine has instructions for products of bf16.");
  m.def("cpu_fuses", &cpu_fuses, py::arg("m"), py::arg("exact"),
        "Whether a CPU adds products of floats in one rounding each, in another order.");
  m.attr("cpu_fused_rows") = kCpuFusedRows;
  m.attr("cpu_panel_rows") = kCpuPanelRows;
  m.attr("cpu_panel_rows_of_bfloat16") = kCpuPanelRowsOfBfloat16;
  auto const def_of_product = [&](char const* name, auto whether, char const* text) {
    m.def(
        name,
        [whether](Weight const& weight, int rows, DataType x_type, bool exact) {
          return whether(weight, rows, x_type, exact);
        },
        py::arg("weight"), py::arg("m"), py::arg("x_type"), py::arg("exact"), text);
  };
  def_of_product("cpu_uses_bfloat16", cpu_uses_bfloat16,
                 "Whether a CPU multiplies floats by a kernel for bf16, whose sums have another "
                 "order.");
  def_of_product("cpu_rounds_weight", cpu_rounds_weight,
                 "Whether that kernel rounds the weight's values to bf16.");
  m.def("cpu_kernel", &cpu_kernel, "The name of the kernels that compute on a CPU.");
  m.def(
      "cpu_quantize_activations",
      [](Pointer x, DataType type, std::int64_t x_stride, int rows, int k, Pointer perm,
         QuantizedActivations const& out, int threads) {
        py::gil_scoped_release release;
        cpu_quantize_activations({as<void>(x), type, x_stride, rows, k, as<int32_t>(perm), out},
                                 threads);
      },
      py::arg("x_ptr"), py::arg("type"), py::arg("x_stride"), py::arg("m"), py::arg("k"),
      py::arg("perm_ptr"), py::arg("out"), py::arg("threads"),
      "quantize_activations in host memory.");
  m.def(
      "cpu_mixed_gemm",
      [](Weight const& weight, int rows, DataType x_type, Pointer x, std::int64_t x_stride,
         ActQuant act_quant, bool symmetric, py::object const& quantized, Pointer bias,
         DataType bias_type, Pointer out, DataType out_type, bool exact, int threads) {
        GemmProblem problem;
        problem.weight = weight;
        problem.m = rows, problem.exact = exact;
        problem.x = as<void>(x), problem.x_type = x_type, problem.x_stride = x_stride;
        problem.act_quant = act_quant, problem.act_symmetric = symmetric;
        if (!quantized.is_none()) problem.quantized = quantized.cast<QuantizedActivations const&>();
        problem.bias = as<void>(bias), problem.bias_type = bias_type;
        problem.out = as<void>(out), problem.out_type = out_type;
        py::gil_scoped_release release;
        cpu_mixed_gemm(problem, threads);
      },
      py::arg("weight"), py::arg("m"), py::arg("x_type"), py::arg("x_ptr"), py::arg("x_stride"),
      py::arg("act_quant"), py::arg("symmetric"), py::arg("quantized"), py::arg("bias_ptr"),
      py::arg("bias_type"), py::arg("out_ptr"), py::arg("out_type"), py::arg("exact"),
      py::arg("threads"),
      "x @ W^T + bias in host memory, of floats or, if given, quantized codes.");
  m.def(
      "cpu_grouped_gemm",
      [](Weight const& weight, int n, std::vector<std::array<int, 3>> const& groups,
         DataType x_type, Pointer x, std::int64_t x_stride, ActQuant act_quant, bool symmetric,
         Pointer perms, Pointer bias, DataType bias_type, Pointer out, DataType out_type,
         bool exact, int threads) {
        GemmProblem problem;
        problem.weight = weight, problem.exact = exact;
        problem.x = as<void>(x), problem.x_type = x_type, problem.x_stride = x_stride;
        problem.act_quant = act_quant, problem.act_symmetric = symmetric;
        problem.bias = as<void>(bias), problem.bias_type = bias_type;
        problem.out = as<void>(out), problem.out_type = out_type;
        std::vector<ExpertRows> rows;
        for (auto const& [expert, first, count] : groups) rows.push_back({expert, first, count});
        py::gil_scoped_release release;
        cpu_grouped_gemm(problem, n, rows, as<int32_t>(perms), threads);
      },
      py::arg("weight"), py::arg("n"), py::arg("groups"), py::arg("x_type"), py::arg("x_ptr"),
      py::arg("x_stride"), py::arg("act_quant"), py::arg("symmetric"), py::arg("perms_ptr"),
      py::arg("bias_ptr"), py::arg("bias_type"), py::arg("out_ptr"), py::arg("out_type"),
      py::arg("exact"), py::arg("threads"),
      "The products of experts in host memory; groups: expert, first row and number of rows.");
  m.def(
      "cpu_dequantize",
      [](Weight const& weight, Pointer out, DataType type, int first_row, int rows, int threads) {
        py::gil_scoped_release release;
        cpu_dequantize({weight, as<void>(out), type, first_row, rows}, threads);
      },
      py::arg("weight"), py::arg("out_ptr"), py::arg("type"), py::arg("first_row"), py::arg("rows"),
      py::arg("threads"), "dequantize in host memory.");
  m.def(
      "dequantize",
      [](Weight const& weight, Pointer out, DataType type, Pointer stream, int first_row, int rows,
         int tap_channels) {
        check(dequantize({weight, as<void>(out), type, first_row, rows, tap_channels},
                         as<void>(stream)));
      },
      py::arg("weight"), py::arg("out_ptr"), py::arg("type"), py::arg("stream"),
      py::arg("first_row") = 0, py::arg("rows") = -1, py::arg("tap_channels") = 0,
      "Write the values [rows, k] of the weight's rows from first_row, a multiple of 64, to "
      "out_ptr; or [rows, taps, "
      "tap_channels], without what pads taps.");

  m.def(
      "quantize_flat",
      [](Pointer x, DataType type, std::int64_t count, int blocksize, Pointer cuts, Pointer codes,
         bool magnitudes, Pointer packed, Pointer absmax, Pointer stream) {
        FlatProblem problem;
        problem.count = count, problem.blocksize = blocksize, problem.floats = as<void>(x),
        problem.type = type;
        problem.packed = as<uint8_t>(packed), problem.absmax = as<float>(absmax);
        problem.cuts = as<float>(cuts), problem.codes = as<uint8_t>(codes),
        problem.magnitudes = magnitudes;
        check(quantize_flat(problem, as<void>(stream)));
      },
      py::arg("x_ptr"), py::arg("type"), py::arg("count"), py::arg("blocksize"),
      py::arg("cuts_ptr"), py::arg("codes_ptr"), py::arg("magnitudes"), py::arg("packed_ptr"),
      py::arg("absmax_ptr"), py::arg("stream"), "Quantise floats to 4-bit codes in flat blocks.");
  m.def(
      "dequantize_flat",
      [](Pointer packed, Pointer absmax, Pointer nested_codes, Pointer nested_book,
         Pointer nested_offset, std::int64_t count, int blocksize, Pointer book, Pointer out,
         DataType type, Pointer stream) {
        FlatProblem problem;
        problem.count = count, problem.blocksize = blocksize, problem.floats = as<void>(out),
        problem.type = type;
        problem.packed = as<uint8_t>(packed), problem.book = as<float>(book);
        problem.nested_codes = as<uint8_t>(nested_codes),
        problem.nested_book = as<float>(nested_book);
        problem.nested_offset = as<float>(nested_offset);
        if (nested_codes) {
          problem.nested_absmax = as<float>(absmax);
        } else {
          problem.absmax = as<float>(absmax);
        }
        check(dequantize_flat(problem, as<void>(stream)));
      },
      py::arg("packed_ptr"), py::arg("absmax_ptr"), py::arg("nested_codes_ptr"),
      py::arg("nested_book_ptr"), py::arg("nested_offset_ptr"), py::arg("count"),
      py::arg("blocksize"), py::arg("book_ptr"), py::arg("out_ptr"), py::arg("type"),
      py::arg("stream"), "Write the values of 4-bit codes in flat blocks.");

  py::class_<AwqWeight>(
      m, "AwqWeight",
      "Pointers and sizes of a weight in AutoAWQ's storage; the tensors must outlive it.")
      .def(py::init([](Pointer codes, Pointer scales, Pointer zeros, int n, int k, int groups,
                       DataType type) {
             return AwqWeight{
                 as<uint32_t>(codes), as<void>(scales), as<uint32_t>(zeros), n, k, groups, type};
           }),
           py::arg("codes_ptr"), py::arg("scales_ptr"), py::arg("zeros_ptr"), py::arg("n"),
           py::arg("k"), py::arg("groups"), py::arg("type"));
  m.def(
      "dequantize_awq",
      [](AwqWeight const& weight, Pointer out, Pointer stream) {
        check(dequantize_awq(weight, as<void>(out), as<void>(stream)));
      },
      py::arg("weight"), py::arg("out_ptr"), py::arg("stream"),
      "Write an AWQ weight's values [k, n].");
  m.def(
      "awq_gemm",
      [](AwqWeight const& weight, Pointer x, std::int64_t x_stride, int rows, Pointer out,
         Pointer stream) {
        check(awq_gemm(weight, as<void>(x), x_stride, rows, as<void>(out), as<void>(stream)));
      },
      py::arg("weight"), py::arg("x_ptr"), py::arg("x_stride"), py::arg("m"), py::arg("out_ptr"),
      py::arg("stream"), "Write x times an AWQ weight, [m, n], m up to max_awq_rows.");
  m.attr("max_awq_rows") = kMaxAwqRows;

  register_plan(m);
  register_experts(m);
  register_conv(m);

  m.attr("layout_name") = kLayoutName;
  m.attr("layout_version") = kLayoutVersion;
  m.attr("gated_experts_layout_version") = kGatedExpertsLayoutVersion;
  m.attr("gated_layout_version") = kGatedLayoutVersion;
  m.attr("max_m") = kMaxM;
  m.attr("max_norm_k") = kMaxNormK;
  m.attr("padded_rows") = kPaddedRows;
  m.attr("least_norm_eps") = kLeastNormEps;
}
