// The Python module cutlass_ops._C: pointers, sizes and the stream come as integers. The checks are made in Python, before
// the call; this file knows no torch.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/pack.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.attr("built_with_cuda") = static_cast<bool>(CUTLASS_OPS_CUDA);
  m.attr("cuda_architectures") = CUTLASS_OPS_ARCHITECTURES;

  m.def("packed_bytes", &cutlass_ops::packed_bytes, py::arg("n"), py::arg("k"), py::arg("bits"),
        "Bytes of the packed codes of an [n, k] weight.");
  m.def(
      "pack",
      [](std::uintptr_t codes, std::uintptr_t out, std::int64_t n, std::int64_t k, int bits) {
        py::gil_scoped_release release;
        cutlass_ops::pack(reinterpret_cast<std::uint8_t const*>(codes), reinterpret_cast<std::uint8_t*>(out), n, k, bits);
      },
      py::arg("codes_ptr"), py::arg("out_ptr"), py::arg("n"), py::arg("k"), py::arg("bits"),
      "Pack codes [n, k] (uint8, row-major, host memory) into packed_bytes(n, k, bits) bytes.");
  m.def(
      "unpack",
      [](std::uintptr_t packed, std::uintptr_t out, std::int64_t n, std::int64_t k, int bits) {
        py::gil_scoped_release release;
        cutlass_ops::unpack(reinterpret_cast<std::uint8_t const*>(packed), reinterpret_cast<std::uint8_t*>(out), n, k, bits);
      },
      py::arg("packed_ptr"), py::arg("out_ptr"), py::arg("n"), py::arg("k"), py::arg("bits"),
      "Undo pack: write codes [n, k] (uint8, row-major, host memory).");
}
