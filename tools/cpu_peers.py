"""Products of one int4 weight on a CPU, by this package and by others that are installed.

tools/bench_cpu.py times them. A peer's ``make`` takes copies of the weight with which a pass
multiplies x in turn, so that no copy is found in a cache, and a number of threads. It prepares them
as the peer's users do and imports the peer's package, which nothing else needs. A name says what
happens to x: A8 is x quantised to int8 in blocks of columns, A16 is x as it is, with arithmetic in
fp32 or, where the name has it, in bf16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cutlass_ops as co

#: Multiplies by every copy: a list of ``[M, N]``, arrays or tensors.
Pass = Callable[[], list[Any]]
#: Takes an x, fp32 ``[M, K]``, and gives the pass of it.
Prepared = Callable[[torch.Tensor], Pass]
Weights = list[co.QuantizedWeight]

#: Relative errors up to which a product is right, by its arithmetic.
FP32, BF16, INT8 = 1e-5, 0.005, 0.01


class Peer(NamedTuple):
    """A way to multiply."""

    make: Callable[[Weights, int], Prepared]
    tolerance: float  #: of the relative error
    bits: int = 4  #: of a value of the prepared weight
    package: str | None = None  #: whose version results have
    group_size: int | None = None  #: the only one that the peer has


def ours(weights: Weights, threads: int, dtype: torch.dtype, act_quant: str) -> Prepared:
    """This package's, for an x of a dtype."""
    packed = [co.reorder(weight) for weight in weights]

    def prepare(x: torch.Tensor) -> Pass:
        x = x.to(dtype)
        return lambda: [co.mixed_gemm(x, weight, act_quant=act_quant) for weight in packed]

    return prepare


def dense(weights: Weights, threads: int, dtype: torch.dtype) -> Prepared:
    """torch's product of the dequantised weight."""
    values = [co.dequantize(weight, dtype) for weight in weights]

    def prepare(x: torch.Tensor) -> Pass:
        x = x.to(dtype)
        return lambda: [torch.nn.functional.linear(x, weight) for weight in values]

    return prepare


def int4pack(weights: Weights, threads: int) -> Prepared:
    """torch's int4 product, of bf16: a value is (code - 8) * scale + zero."""
    aten = torch.ops.aten
    codes = [
        aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)  # 1: no tiles of K on a CPU
        for weight in weights
    ]
    scales = [
        torch.stack([weight.scales.t(), torch.zeros_like(weight.scales.t())], -1).bfloat16()
        for weight in weights
    ]
    multiply = aten._weight_int4pack_mm_for_cpu
    group_size = weights[0].group_size

    def prepare(x: torch.Tensor) -> Pass:
        x = x.bfloat16()
        return lambda: [
            multiply(x, packed, group_size, scale)
            for packed, scale in zip(codes, scales, strict=True)
        ]

    return prepare


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes ``[..., 2 i]`` -> bytes ``[..., i]``, the first code of two in the low bits."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def onnx_runtime(weights: Weights, threads: int, accuracy_level: int) -> Prepared:
    """ONNX Runtime's MatMulNBits: a model with a node for each copy.

    The operator's accuracy level 4 quantises x to int8, 0 multiplies in x's type, fp32.
    """
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    n, k = weights[0].codes.shape
    sizes = {"N": n, "K": k, "bits": 4, "block_size": weights[0].group_size}
    names = [str(i) for i in range(len(weights))]
    nodes, tensors = [], []
    for name, weight in zip(names, weights, strict=True):
        inputs = ["x", f"codes{name}", f"scales{name}"]
        nodes.append(
            helper.make_node(
                *("MatMulNBits", inputs, [name]),
                domain="com.microsoft",
                accuracy_level=accuracy_level,
                **sizes,
            )
        )
        codes = nibbles(weight.codes).view(n, -1, weight.group_size // 2)
        tensors += [
            numpy_helper.from_array(codes.numpy(), inputs[1]),
            numpy_helper.from_array(weight.scales.float().numpy(), inputs[2]),
        ]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", k])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["M", n]) for name in names],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Threads that wait for the next run would take the other peers' cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def prepare(x: torch.Tensor) -> Pass:
        feed = {"x": x.numpy()}
        return lambda: session.run(None, feed)

    return prepare


def openvino(weights: Weights, threads: int, quantize: bool) -> Prepared:
    """OpenVINO's product of a compressed weight in bf16, or of an x that it quantises to int8 in
    the weight's groups: a model with a node for each copy.
    """
    import openvino as ov
    from openvino import opset13

    n, k = weights[0].codes.shape
    group_size = weights[0].group_size
    x = opset13.parameter([-1, k], ov.Type.f32)
    products = []
    for weight in weights:
        grouped = ov.Shape([n, k // group_size, group_size])
        signed = nibbles((weight.codes - 8) & 15).flatten()  # two's complement
        stored = ov.Tensor(ov.Type.i4, grouped)
        stored.data[:] = signed.view(torch.int8).numpy()
        codes = opset13.constant(stored)
        values = opset13.multiply(
            opset13.convert(codes, ov.Type.f16),
            opset13.constant(weight.scales.half().unsqueeze(-1).numpy()),
        )
        matrix = opset13.convert(opset13.reshape(values, [n, k], False), ov.Type.f32)
        products.append(opset13.matmul(x, matrix, False, True))
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": ov.Type.f32 if quantize else ov.Type.bf16,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_size if quantize else 0,
    }
    request = ov.compile_model(ov.Model(products, [x]), "CPU", settings).create_infer_request()

    def prepare(x: torch.Tensor) -> Pass:
        values = x.numpy()
        return lambda: list(request.infer([values], True, True).values())

    return prepare


def llama_cpp(weights: Weights, threads: int) -> Prepared:
    """The product of llama.cpp's Q4_0, from the libraries of llama-cpp-python: a graph with a node
    for each copy, whose weights are reordered as for a model.

    Q4_0 has groups of 32 and fp16 scales, and multiplies an x of int8 in blocks of 32. Nothing is
    freed, as the process ends after its measurements.
    """
    ggml = load_ggml()
    n, k = weights[0].codes.shape
    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, threads)
    # Memory in which weights are reordered as they are stored; the first kind is the best.
    find = ggml.ggml_backend_reg_get_proc_address(
        ggml.ggml_backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts"
    )
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(find)(None)
    kind = kinds[0] or ggml.ggml_backend_cpu_buffer_type()

    def context() -> int:
        size = ggml.ggml_graph_overhead() + 8 * len(weights) * ggml.ggml_tensor_overhead()
        made: int = ggml.ggml_init(GgmlParameters(size, None, True))
        return made

    stored = context()
    matrices = [ggml.ggml_new_tensor_2d(stored, GGML_Q4_0, k, n) for _ in weights]
    ggml.ggml_backend_alloc_ctx_tensors_from_buft(stored, kind)
    for matrix, weight in zip(matrices, weights, strict=True):
        blocks = q4_0(weight)
        ggml.ggml_backend_tensor_set(matrix, blocks.data_ptr(), 0, blocks.numel())

    def prepare(x: torch.Tensor) -> Pass:
        m = x.shape[0]
        made = context()
        graph = ggml.ggml_new_graph(made)
        operand = ggml.ggml_new_tensor_2d(made, GGML_F32, k, m)
        products = [ggml.ggml_mul_mat(made, matrix, operand) for matrix in matrices]
        for product in products:
            ggml.ggml_build_forward_expand(graph, product)
        ggml.ggml_backend_alloc_ctx_tensors(made, backend)
        ggml.ggml_backend_tensor_set(operand, x.data_ptr(), 0, x.nbytes)
        addresses = [ggml.ggml_get_data(product) for product in products]
        outputs = [
            torch.frombuffer((ctypes.c_float * (m * n)).from_address(address), dtype=torch.float32)
            for address in addresses
        ]

        def run() -> list[torch.Tensor]:
            if status := ggml.ggml_backend_graph_compute(backend, graph):
                raise RuntimeError(f"ggml_backend_graph_compute has status {status}")
            return [output.view(m, n) for output in outputs]

        return run

    return prepare


GGML_F32, GGML_Q4_0 = 0, 2  # enum ggml_type


class GgmlParameters(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def q4_0(weight: co.QuantizedWeight) -> torch.Tensor:
    """A weight in groups of 32 as Q4_0, uint8 ``[N, K / 32, 18]``: the scale in fp16, then
    16 bytes with code i in the low bits and code i + 16 in the high bits of byte i.
    """
    low, high = weight.codes.unflatten(-1, (-1, 2, 16)).unbind(-2)
    scales = weight.scales.half().unsqueeze(-1).view(torch.uint8)
    return torch.cat([scales, low | high << 4], -1)


def load_ggml() -> Any:
    """ggml's functions as llama-cpp-python installs them, without the package's import of the rest.

    Raises:
        ModuleNotFoundError: llama-cpp-python is not installed.
    """
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'")
    folder = Path(spec.origin).parent / "lib"
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    functions: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_cpu_init": (pointer, []),
        "ggml_backend_cpu_set_n_threads": (None, [pointer, number]),
        "ggml_backend_cpu_reg": (pointer, []),
        "ggml_backend_cpu_buffer_type": (pointer, []),
        "ggml_backend_reg_get_proc_address": (pointer, [pointer, ctypes.c_char_p]),
        "ggml_backend_alloc_ctx_tensors": (pointer, [pointer, pointer]),
        "ggml_backend_alloc_ctx_tensors_from_buft": (pointer, [pointer, pointer]),
        "ggml_backend_tensor_set": (None, [pointer, pointer, size, size]),
        "ggml_backend_graph_compute": (number, [pointer, pointer]),
        "ggml_graph_overhead": (size, []),
        "ggml_tensor_overhead": (size, []),
        "ggml_init": (pointer, [GgmlParameters]),
        "ggml_new_graph": (pointer, [pointer]),
        "ggml_new_tensor_2d": (pointer, [pointer, number, ctypes.c_int64, ctypes.c_int64]),
        "ggml_mul_mat": (pointer, [pointer, pointer, pointer]),
        "ggml_build_forward_expand": (None, [pointer, pointer]),
        "ggml_get_data": (pointer, [pointer]),
    }
    libraries = [ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml-cpu")]

    class Functions:
        """ggml's functions."""

    for name, (result, arguments) in functions.items():
        function = next(getattr(library, name) for library in libraries if hasattr(library, name))
        function.restype, function.argtypes = result, arguments
        setattr(Functions, name, staticmethod(function))
    return Functions


PEERS = {
    "ours A8": Peer(partial(ours, dtype=torch.float32, act_quant="block"), INT8),
    "ours A16": Peer(partial(ours, dtype=torch.float32, act_quant="none"), FP32),
    "ours A16 bf16": Peer(partial(ours, dtype=torch.bfloat16, act_quant="none"), BF16),
    "ONNX Runtime A8": Peer(partial(onnx_runtime, accuracy_level=4), INT8, 4, "onnxruntime"),
    "ONNX Runtime A16": Peer(partial(onnx_runtime, accuracy_level=0), FP32, 4, "onnxruntime"),
    "OpenVINO A8": Peer(partial(openvino, quantize=True), INT8, 4, "openvino"),
    "OpenVINO A16 bf16": Peer(partial(openvino, quantize=False), BF16, 4, "openvino"),
    "llama.cpp Q4_0 A8": Peer(llama_cpp, INT8, 4, "llama-cpp-python", group_size=32),
    "torch int4pack A16 bf16": Peer(int4pack, BF16),
    "torch dense A16": Peer(partial(dense, dtype=torch.float32), FP32, 32),
    "torch dense A16 bf16": Peer(partial(dense, dtype=torch.bfloat16), BF16, 16),
}


def random_weight(n: int, k: int, group_size: int) -> co.QuantizedWeight:
    """A symmetric int4 weight of normal values, whose fp16 scales bf16 has too."""
    found = co.quantize(torch.randn(n, k) / k**0.5, 4, group_size)
    scales = found.scales.bfloat16().half()
    return co.QuantizedWeight(found.codes, scales, bits=4, group_size=group_size)


def copies(weight: co.QuantizedWeight, count: int) -> Weights:
    """Weights with other rows first: graphs of copies that are equal would be simplified."""
    return [
        co.QuantizedWeight(
            weight.codes.roll(i, 0),
            weight.scales.roll(i, 0),
            bits=4,
            group_size=weight.group_size,
        )
        for i in range(count)
    ]


def installed(
    weight: co.QuantizedWeight, threads: int, cold_bytes: int
) -> dict[str, tuple[Prepared, int]]:
    """The peers that can be imported and have the weight's groups, prepared, and their numbers of
    copies, which exceed ``cold_bytes``; the others are named in a line each.
    """
    found = {}
    for name, peer in PEERS.items():
        if peer.group_size not in (None, weight.group_size):
            continue
        count = max(2, -(-8 * cold_bytes // (weight.codes.numel() * peer.bits)))
        try:
            found[name] = peer.make(copies(weight, count), threads), count
        except (ImportError, OSError) as error:  # OSError: a library
            print(f"{name} is left out: {error}", flush=True)
    return found


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of the packages of peers."""
    packages = dict.fromkeys(PEERS[name].package for name in names)
    return {package: version(package) for package in packages if package is not None}


def check(name: str, run: Pass, expected: torch.Tensor) -> None:
    """Compare a pass over :func:`copies` with the first copy's product, fp32 ``[M, N]``.

    Raises:
        ValueError: a product is wrong.
    """
    for i, product in enumerate(run()):
        right = expected.roll(i, 1)
        error = float((torch.as_tensor(product).float() - right).norm() / right.norm())
        if not error < PEERS[name].tolerance:
            raise ValueError(
                f"{name} has a relative error of {error:.2g} in copy {i} for M = {len(right)}, "
                f"over {PEERS[name].tolerance}"
            )
