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
#include "cutlass_ops/experts.h"
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
                   DataType scale_type, DataType offset_type, Pointer bias, DataType bias_type,
                   py::object device, int gpu) {
  return {
      {as<uint8_t>(codes), as<void>(scales), as<int8_t>(zeros), as<void>(offsets),
       as<int32_t>(perm), as<float>(codebook), n, k, format, group_size, scale_type, offset_type},
      as<void>(bias),
      bias_type,
      std::move(device),
      gpu};
}

QuantizedActivations make_quantized(Pointer codes, Pointer scales, Pointer zeros, int block,
                                    int stride, int rows) {
  return {as<int8_t>(codes), as<float>(scales), as<int8_t>(zeros), block, stride, rows};
}

// ---- mixed_gemm: reads tensors' attributes itself, with CPython's calling convention.
// Python code around it, and pybind11's unpacking of as many arguments, take longer than
// everything but the launch.

py::object checked(PyObject* result) {
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

struct Name {
  PyObject* const text;  // never freed: creating it takes as long as the call
  explicit Name(char const* name) : text(PyUnicode_InternFromString(name)) {}
};

py::object call(py::handle object, Name const& method) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), method.text));
}

Pointer data_ptr(py::handle tensor) {
  static Name const name("data_ptr");
  return call(tensor, name).cast<Pointer>();
}

// An uninitialised tensor on the device of `like`, of another dtype if one is given. By the
// tensor's method, of numbers: half the time of torch.empty.
py::object new_empty(py::handle like, py::handle shape, py::handle dtype) {
  static Name const name("new_empty");
  static py::handle const keyword = py::make_tuple("dtype").release();
  size_t const dimensions = PyTuple_GET_SIZE(shape.ptr());
  std::vector<PyObject*> arguments(1 + dimensions + 1);
  arguments.front() = like.ptr();
  for (size_t i = 0; i < dimensions; ++i) arguments[1 + i] = PyTuple_GET_ITEM(shape.ptr(), i);
  arguments.back() = dtype.ptr();
  return checked(PyObject_VectorcallMethod(name.text, arguments.data(), 1 + dimensions,
                                           dtype ? keyword.ptr() : nullptr));
}

// At least so many bytes, as a tensor of the same dtype: another dtype takes longer.
py::object new_scratch(py::handle like, size_t bytes) {
  static Name const name("itemsize");
  auto const size = checked(PyObject_GetAttr(like.ptr(), name.text)).cast<size_t>();
  return new_empty(like, py::make_tuple((bytes + size - 1) / size), {});
}

// Choose a kernel and launch it, with a workspace on the device of `like`.
void run(GemmProblem const& problem, py::handle like, Pointer stream) {
  Device device;
  Plan chosen;
  check(current_device(&device));
  check(plan(problem, device, &chosen));
  Workspace workspace;
  // Freed at once: torch's allocator reuses it only on this stream, after the kernels.
  py::object scratch;
  if (chosen.workspace) {
    scratch = new_scratch(like, chosen.workspace);
    workspace = {as<void>(data_ptr(scratch)), chosen.workspace};
  }
  check(mixed_gemm(problem, chosen, workspace, as<void>(stream)));
}

py::object mixed_gemm(PyObject* const* arguments) {
  auto const next = [&] { return py::handle(*arguments++); };
  GemmProblem problem;
  problem.weight = next().cast<Weight const&>();
  py::object x = py::reinterpret_borrow<py::object>(next());
  py::handle const quantized = next();
  problem.m = next().cast<int>();
  problem.x_type = next().cast<DataType>();
  problem.act_quant = next().cast<ActQuant>();
  problem.act_symmetric = next().cast<bool>();
  py::handle const epilogue = next(), shape = next(), dtype = next();
  problem.out_type = next().cast<DataType>();
  problem.batch_invariant = next().cast<bool>();
  problem.architecture = next().cast<int>();
  problem.exact = next().cast<bool>();
  DeviceGuard guard(next().cast<int>());
  check(guard.status());
  auto const stream = next().cast<Pointer>();

  if (quantized.is_none()) {
    static Name const stride("stride"), contiguous("contiguous");
    py::object const strides = call(x, stride);
    problem.x_stride = py::handle(PyTuple_GET_ITEM(strides.ptr(), 0)).cast<std::int64_t>();
    bool const gaps = problem.weight.k > 1 &&
                      py::handle(PyTuple_GET_ITEM(strides.ptr(), 1)).cast<std::int64_t>() != 1;
    // rows of an expanded tensor lie on one another
    if (gaps || (problem.m > 1 && problem.x_stride < problem.weight.k)) {
      x = call(x, contiguous);
      problem.x_stride = problem.weight.k;
    }
    problem.x = as<void>(data_ptr(x));
  } else {
    problem.quantized = quantized.cast<QuantizedActivations const&>();
  }
  if (!epilogue.is_none()) epilogue.cast<Epilogue const&>().set(problem);
  bool const same_type = quantized.is_none() && problem.out_type == problem.x_type;
  py::object out = new_empty(x, shape, same_type ? py::handle() : dtype);
  problem.out = as<void>(data_ptr(out));

  run(problem, x, stream);
  return out;
}

// ---- product: the same without optional arguments, for layers. It checks its arguments itself: in
// Python that takes longer than everything here but the launch.

// Objects of torch, never freed.
struct Torch {
  PyObject *current_stream, *none, *token, *block;
  std::array<std::pair<PyObject*, DataType>, 3> types;

  Torch() {
    py::module_ const torch = py::module_::import("torch");
    auto const keep = [](py::object object) { return object.release().ptr(); };
    current_stream = keep(torch.attr("_C").attr("_cuda_getCurrentRawStream"));
    none = keep(py::str("none")), token = keep(py::str("token")), block = keep(py::str("block"));
    types = {{{keep(torch.attr("float16")), DataType::kFloat16},
              {keep(torch.attr("bfloat16")), DataType::kBFloat16},
              {keep(torch.attr("float32")), DataType::kFloat32}}};
  }

  DataType type(py::handle dtype) const {
    for (auto const& [object, type] : types)
      if (dtype.ptr() == object) return type;
    return DataType::kNone;
  }
  // Whether act_quant is valid.
  bool find(PyObject* act_quant, ActQuant* found) const {
    if (!PyUnicode_Check(act_quant)) return false;
    for (auto const& [text, mode] :
         {std::pair(none, ActQuant::kNone), std::pair(token, ActQuant::kToken),
          std::pair(block, ActQuant::kBlock)})
      if (PyUnicode_Compare(act_quant, text) == 0) return *found = mode, true;
    return false;
  }
};

// x [..., k] as rows that do not overlap: how many, and from one to the next. 0 if x is no such
// tensor, or would have to be copied.
struct Rows {
  std::int64_t count = 0, stride = 0;

  Rows(py::handle shape, py::handle strides, int k) {
    Py_ssize_t const last = PyTuple_GET_SIZE(shape.ptr()) - 1;
    // -1: a symbol, while something is traced.
    auto const at = [](py::handle tuple, Py_ssize_t i) -> std::int64_t {
      PyObject* const item = PyTuple_GET_ITEM(tuple.ptr(), i);
      return PyLong_CheckExact(item) ? PyLong_AsLongLong(item) : -1;
    };
    if (last < 0 || at(shape, last) != k || (k > 1 && at(strides, last) != 1)) return;
    std::int64_t rows = 1;
    // A single row has the stride of a matrix.
    stride = last > 0 ? at(strides, last - 1) : k;
    for (Py_ssize_t i = last; i-- > 0;) {
      std::int64_t const size = at(shape, i);
      if (size == 1) continue;
      if (rows == 1) stride = at(strides, i);
      if (size < 1 || at(strides, i) != stride * rows) return;
      rows *= size;
    }
    if (rows > 1 && stride < k) return;
    count = rows;
  }
};

// From so many rows on, host time does not matter.
constexpr std::int64_t kMostRows = 1 << 20;

py::object product(PyObject* const* arguments) {
  if (!CUTLASS_OPS_CUDA) return py::none();
  static Torch const torch;
  static Name const dtype("dtype"), device("device"), shape("shape"), stride("stride");
  auto const& weight = py::handle(arguments[0]).cast<Weight const&>();
  py::handle const x = arguments[1], symmetric = arguments[3];
  GemmProblem problem;
  if (weight.gpu < 0 || !torch.find(arguments[2], &problem.act_quant) ||
      !PyBool_Check(symmetric.ptr()))
    return py::none();
  auto const get = [&](Name const& name) { return checked(PyObject_GetAttr(x.ptr(), name.text)); };
  problem.x_type = problem.out_type = torch.type(get(dtype));
  bool const quantizes = problem.act_quant != ActQuant::kNone;
  if (problem.x_type == DataType::kNone || (problem.x_type == DataType::kFloat32 && !quantizes) ||
      (!has_integer_codes(weight) && quantizes))
    return py::none();
  if (!get(device).equal(weight.device)) return py::none();
  py::object const sizes = get(shape);
  Rows const rows(sizes, call(x, stride), weight.k);
  if (rows.count < 1 || rows.count > kMostRows) return py::none();

  problem.weight = weight;
  problem.m = int(rows.count), problem.x_stride = rows.stride;
  problem.x = as<void>(data_ptr(x));
  problem.act_symmetric = symmetric.ptr() == Py_True;
  problem.bias = weight.bias, problem.bias_type = weight.bias_type;
  py::tuple out_shape(PyTuple_GET_SIZE(sizes.ptr()));
  for (size_t i = 0; i + 1 < out_shape.size(); ++i)
    out_shape[i] = py::handle(PyTuple_GET_ITEM(sizes.ptr(), i));
  out_shape[out_shape.size() - 1] = weight.n;
  DeviceGuard guard(weight.gpu);
  check(guard.status());
  py::object out = new_empty(x, out_shape, {});
  problem.out = as<void>(data_ptr(out));
  run(problem, x,
      checked(PyObject_CallOneArg(torch.current_stream, py::int_(weight.gpu).ptr()))
          .cast<Pointer>());
  return out;
}

// How CPython calls a function of `count` arguments, all by position.
template <py::object (*kFunction)(PyObject* const*), Py_ssize_t kCount>
PyObject* call_by_position(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  try {
    if (count != kCount) {
      throw py::type_error("the function takes " + std::to_string(kCount) +
                           " arguments, by position; " + std::to_string(count) + " are given");
    }
    return kFunction(arguments).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (py::builtin_exception const& error) {
    error.set_error();
  } catch (std::invalid_argument const& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (std::exception const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef kMethods[] = {
    {"mixed_gemm", as_method(call_by_position<mixed_gemm, 16>), METH_FASTCALL,
     "mixed_gemm(weight: PackedWeight, x: object, quantized: object, m: int, x_type: DataType, "
     "act_quant: ActQuant, "
     "symmetric: bool, epilogue: object, shape: tuple[int, ...], dtype: object, out_type: "
     "DataType, batch_invariant: bool, "
     "architecture: int, exact: bool, device_index: int, stream: int) -> Any\n\n"
     "The product [m, n] in a new tensor of this shape and dtype, on a stream of a device. x is a "
     "tensor [m, k] of x_type, or "
     "the codes that quantized points to."},
    {"product", as_method(call_by_position<product, 4>), METH_FASTCALL,
     "product(weight: PackedWeight, x: object, act_quant: str, symmetric: bool) -> Any\n\n"
     "x [..., k], a tensor of floats, times the weight, plus its bias, in a new tensor of x's "
     "dtype. None where anything "
     "about the arguments is unusual or wrong: the caller checks them."}};

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
  py::enum_<Activation>(m, "Activation")
      .value("none", Activation::kNone)
      .value("relu", Activation::kRelu)
      .value("relu6", Activation::kRelu6)
      .value("gelu", Activation::kGelu)
      .value("silu", Activation::kSilu)
      .value("clamp", Activation::kClamp);

  py::class_<Weight>(m, "PackedWeight",
                     "Pointers and sizes of a packed weight; the tensors must outlive it.")
      .def(py::init(&make_weight), py::arg("codes_ptr"), py::arg("scales_ptr"),
           py::arg("zeros_ptr"), py::arg("offsets_ptr"), py::arg("perm_ptr"),
           py::arg("codebook_ptr"), py::arg("n"), py::arg("k"), py::arg("format"),
           py::arg("group_size"), py::arg("scale_type"), py::arg("offset_type"),
           py::arg("bias_ptr"), py::arg("bias_type"), py::arg("device"), py::arg("gpu"))
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
  for (PyMethodDef& method : kMethods)
    m.add_object(method.ml_name,
                 py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));

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
        "Choose another, for tests; the bits are the same.");
  m.def("cpu_multiplies_bfloat16", &cpu_multiplies_bfloat16,
        "Whether this machine has instructions for products of bf16.");
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
         DataType bias_type, Pointer out, DataType out_type, int threads) {
        GemmProblem problem;
        problem.weight = weight;
        problem.m = rows;
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
      py::arg("bias_type"), py::arg("out_ptr"), py::arg("out_type"), py::arg("threads"),
      "x @ W^T + bias in host memory, of floats or, if given, quantized codes.");
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

  m.def(
      "rows_of",
      [](py::object const& shape, py::object const& strides, int k) {
        Rows const rows(shape, strides, k);
        return std::pair(rows.count <= kMostRows ? rows.count : 0, rows.stride);
      },
      py::arg("shape"), py::arg("strides"), py::arg("k"),
      "How many rows `product` sees in a tensor [..., k], and the stride from one to the next; 0 "
      "rows if it leaves it to "
      "others.");
  m.attr("max_m") = kMaxM;
  m.attr("max_norm_k") = kMaxNormK;
  m.attr("padded_rows") = kPaddedRows;
  m.attr("least_norm_eps") = kLeastNormEps;
}
