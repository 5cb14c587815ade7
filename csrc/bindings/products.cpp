// The part of cutlass_ops._C that multiplies tensors. It reads tensors' attributes itself, with
// CPython's calling convention: a Python wrapper, and pybind11's unpacking of this many arguments,
// would take longer than everything but the launch.
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "cpu/cpu_ops.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

namespace py = pybind11;

namespace {

py::object checked(PyObject* result) {
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

struct Name {
  PyObject* const text;  // never freed: creating it takes as long as the call
  explicit Name(char const* name) : text(PyUnicode_InternFromString(name)) {}
};

py::object get(py::handle object, Name const& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.text));
}

py::object call(py::handle object, Name const& method) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), method.text));
}

Pointer data_ptr(py::handle tensor) {
  static Name const name("data_ptr");
  return call(tensor, name).cast<Pointer>();
}

}  // namespace

bool Weight::is_current() const {
  for (auto const& [tensor, address] : addresses)
    if (data_ptr(tensor) != address) return false;
  return true;
}

namespace {

// The sizes of a tensor, for the most dimensions that torch's tensors have.
class Shape {
 public:
  static constexpr Py_ssize_t kMost = 64;

  explicit Shape(py::handle tuple) : count_(PyTuple_GET_SIZE(tuple.ptr())) {
    if (count_ > kMost) throw std::invalid_argument("a tensor has more than 64 dimensions");
    for (Py_ssize_t i = 0; i < count_; ++i) arguments_[1 + i] = PyTuple_GET_ITEM(tuple.ptr(), i);
  }
  explicit Shape(py::int_ const& size) : count_(1) { arguments_[1] = size.ptr(); }

  Py_ssize_t count() const { return count_; }
  PyObject*& last() { return arguments_[count_]; }

  // An uninitialised tensor of this shape on the device of `like`, of another dtype if one is
  // given. Made by the tensor's method with sizes as numbers: half the time of torch.empty.
  py::object new_empty(py::handle like, py::handle dtype = {}) {
    static Name const name("new_empty");
    static py::handle const keyword = py::make_tuple("dtype").release();
    arguments_[0] = like.ptr(), arguments_[1 + count_] = dtype.ptr();
    return checked(PyObject_VectorcallMethod(name.text, arguments_, size_t(1 + count_),
                                             dtype ? keyword.ptr() : nullptr));
  }

 private:
  Py_ssize_t count_;
  PyObject* arguments_[1 + kMost + 1];  // the tensor, sizes, the dtype
};

// Launch by the plan of a call like this one, or a new one, with a workspace on the device of
// `like`, a tensor of elements of so many bytes.
void run(Weight& weight, GemmProblem const& problem, py::handle like, size_t element_bytes,
         Pointer stream) {
  Device device;
  Plan plan;
  check(current_device(&device));
  check(weight.plans.find(problem, device, &plan));
  Workspace workspace;
  // Freed at once: torch's allocator reuses it only on this stream, after the kernels. It has the
  // same dtype, because another one takes longer.
  py::object scratch;
  if (plan.workspace) {
    py::int_ const size((plan.workspace + element_bytes - 1) / element_bytes);
    scratch = Shape(size).new_empty(like);
    workspace = {as<void>(data_ptr(scratch)), plan.workspace};
  }
  check(mixed_gemm(problem, plan, workspace, as<void>(stream)));
}

py::object mixed_gemm(PyObject* const* arguments) {
  auto const next = [&] { return py::handle(*arguments++); };
  GemmProblem problem;
  Weight& weight = next().cast<Weight&>();
  problem.weight = weight;
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
    // rows of an expanded tensor share memory
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
  py::object out = Shape(shape).new_empty(x, same_type ? py::handle() : dtype);
  problem.out = as<void>(data_ptr(out));

  run(weight, problem, x, quantized.is_none() ? bytes_of(problem.x_type) : 1, stream);
  return out;
}

// ---- product: the same without optional arguments, for layers, also on CPUs. The arguments are
// checked here: in Python that takes longer than everything in this function but the launch.

// Objects of torch, never freed.
struct Torch {
  PyObject *tensor, *parameter, *forward_ad, *transforms_active, *dispatch_modes, *grad_enabled,
      *any_autocast, *threads, *current_stream, *none, *token, *block;
  std::array<std::pair<PyObject*, DataType>, 3> types;

  Torch() {
    py::module_ const torch = py::module_::import("torch");
    py::object const core = torch.attr("_C");
    auto const keep = [](py::object object) { return object.release().ptr(); };
    tensor = keep(torch.attr("Tensor")), parameter = keep(torch.attr("nn").attr("Parameter"));
    forward_ad = keep(py::module_::import("torch.autograd.forward_ad"));
    transforms_active = keep(core.attr("_are_functorch_transforms_active"));
    dispatch_modes = keep(core.attr("_len_torch_dispatch_stack"));
    grad_enabled = keep(core.attr("is_grad_enabled"));
    any_autocast = keep(core.attr("_is_any_autocast_enabled"));
    threads = keep(core.attr("get_num_threads"));
    // a torch without CUDA has none
    current_stream = keep(py::getattr(core, "_cuda_getCurrentRawStream", py::none()));
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
      if (act_quant == text || PyUnicode_Compare(act_quant, text) == 0) return *found = mode, true;
    return false;
  }
  // Whether forward-mode differentiation, a transform of torch.func or a mode that sees operators
  // is active. While torch.jit.trace records, sizes are not numbers (Rows).
  bool modes() const {
    static Name const level("_current_level");
    return says(transforms_active) || PyLong_AsLong(get(forward_ad, level).ptr()) >= 0 ||
           PyLong_AsLong(checked(PyObject_CallNoArgs(dispatch_modes)).ptr()) > 0;
  }
  // The result of a function that reads torch's state.
  static bool says(PyObject* function) {
    PyObject* const answer = checked(PyObject_CallNoArgs(function)).ptr();
    return answer != Py_False && answer != Py_None;
  }
};

// What cutlass_ops.PackedWeight.native keeps, or null if it was not made yet: a tracer's
// placeholder tensors have no addresses.
Weight* native_of(PyObject* weight) {
  static Name const native("_native");
  py::object const attributes = checked(PyObject_GenericGetDict(weight, nullptr));
  PyObject* const found = PyDict_GetItemWithError(attributes.ptr(), native.text);
  return found ? &py::handle(found).cast<Weight&>() : nullptr;
}

// Whether a gradient is recorded for x, or required of the weight.
bool requires_grad(Torch const& torch, Weight const& weight, py::handle x) {
  static Name const name("requires_grad");
  if (!torch.says(torch.grad_enabled)) return false;
  auto const required = [](py::handle tensor) { return get(tensor, name).ptr() == Py_True; };
  if (required(x)) return true;
  for (py::object const& part : weight.floats)
    if (required(part)) return true;
  return false;
}

// Whether these are the buffers of a layer that has the weight's tensors.
bool has_parts(py::handle buffers, Weight const& weight) {
  for (auto const& [name, tensor] : weight.parts)
    if (PyDict_GetItemWithError(buffers.ptr(), name.ptr()) != tensor.ptr()) {
      PyErr_Clear();
      return false;
    }
  return true;
}

// x [..., k] as rows that do not overlap: their number and stride. 0 if x is no such tensor, or
// would have to be copied.
struct Rows {
  std::int64_t count = 0, stride = 0;

  Rows(py::handle shape, py::handle strides, int k) {
    Py_ssize_t const last = PyTuple_GET_SIZE(shape.ptr()) - 1;
    // -1: a tensor or a symbol, while something is traced.
    auto const extent = [](py::handle tuple, Py_ssize_t i) -> std::int64_t {
      PyObject* const item = PyTuple_GET_ITEM(tuple.ptr(), i);
      return PyLong_CheckExact(item) ? PyLong_AsLongLong(item) : -1;
    };
    if (last < 0 || extent(shape, last) != k || (k > 1 && extent(strides, last) != 1)) return;
    std::int64_t rows = 1;
    // A single row has the stride of a matrix.
    stride = last > 0 ? extent(strides, last - 1) : k;
    for (Py_ssize_t i = last; i-- > 0;) {
      std::int64_t const size = extent(shape, i);
      if (size == 1) continue;
      if (rows == 1) stride = extent(strides, i);
      if (size < 1 || extent(strides, i) != stride * rows) return;
      rows *= size;
    }
    if (rows > 1 && stride < k) return;
    count = rows;
  }
};

// With this many rows or more, host time does not matter.
constexpr std::int64_t kMostRows = 1 << 20;

py::object product(PyObject* const* arguments) {
  static Torch const torch;
  static Name const dtype("dtype"), device("device"), shape("shape"), stride("stride"),
      is_neg("is_neg");
  Weight* const known = native_of(arguments[0]);
  if (!known || known->gated || !known->is_current()) return py::none();
  Weight& weight = *known;
  py::handle const x = arguments[1], symmetric = arguments[3], buffers = arguments[4];
  bool const on_gpu = weight.gpu >= 0;
  auto const* const type = reinterpret_cast<PyObject*>(Py_TYPE(x.ptr()));
  GemmProblem problem;
  if (!(on_gpu ? CUTLASS_OPS_CUDA : weight.on_cpu) ||
      (type != torch.tensor && type != torch.parameter) ||
      !torch.find(arguments[2], &problem.act_quant) || !PyBool_Check(symmetric.ptr()) ||
      (!buffers.is_none() && !has_parts(buffers, weight)) || torch.modes() ||
      requires_grad(torch, weight, x))
    return py::none();
  problem.x_type = problem.out_type = torch.type(get(x, dtype));
  bool const quantizes = problem.act_quant != ActQuant::kNone,
             wide = problem.x_type == DataType::kFloat32;
  if (problem.x_type == DataType::kNone || (quantizes && !has_integer_codes(weight)) ||
      (wide && on_gpu && !quantizes) || (wide && torch.says(torch.any_autocast)))
    return py::none();
  if (!get(x, device).equal(weight.device) || call(x, is_neg).ptr() == Py_True) return py::none();
  py::object const sizes = get(x, shape);
  Rows const rows(sizes, call(x, stride), weight.k);
  if (rows.count < 1 || rows.count > kMostRows) return py::none();
  if (!on_gpu && !quantizes && rows.count >= kCpuPanelRows) return py::none();

  problem.weight = weight;
  problem.m = int(rows.count), problem.x_stride = rows.stride;
  problem.x = as<void>(data_ptr(x));
  problem.act_symmetric = symmetric.ptr() == Py_True;
  problem.bias = weight.bias, problem.bias_type = weight.bias_type;
  Shape out_shape(sizes);
  py::int_ const n(weight.n);
  out_shape.last() = n.ptr();
  py::object out = out_shape.new_empty(x);
  problem.out = as<void>(data_ptr(out));
  if (on_gpu) {
    DeviceGuard guard(weight.gpu);
    check(guard.status());
    py::int_ const gpu(weight.gpu);
    run(weight, problem, x, bytes_of(problem.x_type),
        checked(PyObject_CallOneArg(torch.current_stream, gpu.ptr())).cast<Pointer>());
  } else {
    int const threads = checked(PyObject_CallNoArgs(torch.threads)).cast<int>();
    py::gil_scoped_release release;
    cpu_mixed_gemm(problem, threads);
  }
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
  } catch (std::bad_alloc const&) {
    PyErr_NoMemory();
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
    {"product", as_method(call_by_position<product, 5>), METH_FASTCALL,
     "product(weight: object, x: object, act_quant: str, symmetric: bool, buffers: object) -> Any"
     "\n\n"
     "x [..., k], a tensor of floats, times a cutlass_ops.PackedWeight, plus its bias, in a new "
     "tensor of x's dtype. None where anything about the arguments or torch's modes is unusual or "
     "wrong, a gradient is recorded, the weight is gated, its native is not made yet, or the dict "
     "of buffers, if there is one, does not hold the weight's tensors: the caller checks them."}};

}  // namespace

void register_products(py::module_& m) {
  for (PyMethodDef& method : kMethods)
    m.add_object(method.ml_name,
                 py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
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
}

}  // namespace cutlass_ops
