// The part of cutlass_ops._C that is the packed layout, and codes in other packages' words.
#include "cpu/cpu_ops.h"
#include "cutlass_ops/layout.h"
#include "cutlass_ops/pack.h"
#include "cutlass_ops/words.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace cutlass_ops {

namespace py = pybind11;

void register_packing(py::module_& m) {
  m.def("packed_bytes", &packed_bytes, py::arg("n"), py::arg("k"), py::arg("bits"),
        "Bytes of the packed codes of an [n, k] weight.");
  m.def(
      "pack",
      [](Pointer codes, Pointer out, std::int64_t n, std::int64_t k, int bits) {
        py::gil_scoped_release release;
        pack(as<uint8_t const>(codes), as<uint8_t>(out), n, k, bits);
      },
      py::arg("codes_ptr"), py::arg("out_ptr"), py::arg("n"), py::arg("k"), py::arg("bits"),
      "Pack codes [n, k] (uint8, row-major, host memory) into packed_bytes(n, k, bits) bytes.");
  m.def(
      "unpack",
      [](Pointer packed, Pointer out, std::int64_t n, std::int64_t k, int bits) {
        py::gil_scoped_release release;
        unpack(as<uint8_t const>(packed), as<uint8_t>(out), n, k, bits);
      },
      py::arg("packed_ptr"), py::arg("out_ptr"), py::arg("n"), py::arg("k"), py::arg("bits"),
      "Undo pack: write codes [n, k] (uint8, row-major, host memory).");

  m.def(
      "pack_cuda",
      [](Pointer codes, std::int64_t n_stride, std::int64_t k_stride, Pointer packed, int n, int k,
         int bits, int device_index, Pointer stream) {
        DeviceGuard guard(device_index);
        check(guard.status());
        check(pack({as<uint8_t>(codes), as<uint8_t>(packed), n_stride, k_stride, n, k, bits},
                   as<void>(stream)));
      },
      py::arg("codes_ptr"), py::arg("n_stride"), py::arg("k_stride"), py::arg("packed_ptr"),
      py::arg("n"), py::arg("k"), py::arg("bits"), py::arg("device_index"), py::arg("stream"),
      "Pack codes [n, k] on a GPU, with strides in elements, into packed_bytes(n, k, bits) bytes.");
  m.def(
      "unpack_cuda",
      [](Pointer codes, std::int64_t n_stride, std::int64_t k_stride, Pointer packed, int n, int k,
         int bits, int device_index, Pointer stream) {
        DeviceGuard guard(device_index);
        check(guard.status());
        check(unpack({as<uint8_t>(codes), as<uint8_t>(packed), n_stride, k_stride, n, k, bits},
                     as<void>(stream)));
      },
      py::arg("codes_ptr"), py::arg("n_stride"), py::arg("k_stride"), py::arg("packed_ptr"),
      py::arg("n"), py::arg("k"), py::arg("bits"), py::arg("device_index"), py::arg("stream"),
      "Undo pack_cuda: write codes [n, k] on a GPU.");
  m.def(
      "unpack_along_k",
      [](Pointer words, std::int64_t n_stride, std::int64_t k_stride, Pointer out, std::int64_t n,
         std::int64_t k, int bits) {
        py::gil_scoped_release release;
        unpack_along_k(as<uint32_t const>(words), n_stride, k_stride, as<uint8_t>(out), n, k, bits);
      },
      py::arg("words_ptr"), py::arg("n_stride"), py::arg("k_stride"), py::arg("out_ptr"),
      py::arg("n"), py::arg("k"), py::arg("bits"),
      "Write codes [n, k] (uint8) of 32-bit words that hold 32 / bits codes along K, strides in "
      "words.");
  m.def(
      "unpack_along_n",
      [](Pointer words, std::int64_t n_stride, std::int64_t k_stride,
         std::array<int, 8> const& order, Pointer out, std::int64_t n, std::int64_t k) {
        py::gil_scoped_release release;
        int places[8];
        std::copy(order.begin(), order.end(), places);
        unpack_along_n(as<uint32_t const>(words), n_stride, k_stride, places, as<uint8_t>(out), n,
                       k);
      },
      py::arg("words_ptr"), py::arg("n_stride"), py::arg("k_stride"), py::arg("order"),
      py::arg("out_ptr"), py::arg("n"), py::arg("k"),
      "Write codes [n, k] (uint8) of 32-bit words that hold 8 codes of 4 bits along N, in this "
      "order.");
  m.def(
      "permute_columns",
      [](Pointer codes, Pointer out, std::int64_t n, std::int64_t k, Pointer perm) {
        py::gil_scoped_release release;
        permute_columns(as<uint8_t const>(codes), as<uint8_t>(out), n, k,
                        as<std::int32_t const>(perm));
      },
      py::arg("codes_ptr"), py::arg("out_ptr"), py::arg("n"), py::arg("k"), py::arg("perm_ptr"),
      "Write codes [n, k] (uint8) with column perm[j] (int32, a permutation) at column j.");

  m.def(
      "unpack_tiles",
      [](Pointer words, Pointer out, std::int64_t n, std::int64_t k) {
        py::gil_scoped_release release;
        unpack_tiles(as<uint32_t const>(words), as<uint8_t>(out), n, k);
      },
      py::arg("words_ptr"), py::arg("out_ptr"), py::arg("n"), py::arg("k"),
      "Write codes [n, k] (uint8) of words [n / 8, k / 128, 32, 4] in PyTorch's int4 order for "
      "tensor cores.");
  m.def(
      "unpack_bytes",
      [](Pointer bytes, std::int64_t blocks, std::int64_t stride, std::int64_t size,
         std::int64_t run, bool in_turn, bool high_first, Pointer out) {
        py::gil_scoped_release release;
        ByteOrder const order =
            in_turn ? (high_first ? ByteOrder::high_low_in_turn : ByteOrder::low_high_in_turn)
                    : (high_first ? ByteOrder::high_then_low : ByteOrder::low_then_high);
        unpack_bytes(as<uint8_t const>(bytes), blocks, stride, size, run, order, as<uint8_t>(out));
      },
      py::arg("bytes_ptr"), py::arg("blocks"), py::arg("stride"), py::arg("size"), py::arg("run"),
      py::arg("in_turn"), py::arg("high_first"), py::arg("out_ptr"),
      "Write the codes of 4 bits (uint8) of blocks of bytes that hold two, low and high in turn or "
      "a run's one after the "
      "other.");
}

}  // namespace cutlass_ops
