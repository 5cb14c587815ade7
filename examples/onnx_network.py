"""Run a quantised ONNX network (uint8 activations and weights with zero points) in static int8,
with ONNX Runtime's bits.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

import cutlass_ops as co

random = np.random.default_rng(0)
constants: dict[str, np.ndarray] = {}
nodes: list[onnx.NodeProto] = []


def quantised(name: str, scale: float, zero: int) -> str:
    """A QuantizeLinear and a DequantizeLinear behind the tensor ``name``."""
    constants[name + "_scale"], constants[name + "_zero"] = np.float32(scale), np.uint8(zero)
    parameters = [name + "_scale", name + "_zero"]
    nodes.append(helper.make_node("QuantizeLinear", [name, *parameters], [name + "_q"]))
    nodes.append(helper.make_node("DequantizeLinear", [name + "_q", *parameters], [name + "_dq"]))
    return name + "_dq"


def layer(
    operator: str, x: str, y: str, shape: tuple[int, ...], zeros: np.ndarray, **attributes: object
) -> None:
    """A layer with random uint8 weights, a scale and a zero point for each output channel,
    and an int32 bias.
    """
    n = shape[0]
    scales = random.uniform(0.002, 0.006, n).astype(np.float32)
    constants[y + "_w"], constants[y + "_w_scale"] = (
        random.integers(0, 256, shape, dtype=np.uint8),
        scales,
    )
    constants[y + "_w_zero"] = np.broadcast_to(zeros.astype(np.uint8), n)
    constants[y + "_b"] = random.integers(-2000, 2000, n, dtype=np.int32)
    constants[y + "_b_scale"] = constants[x.removesuffix("_dq") + "_scale"] * scales
    constants[y + "_b_zero"] = np.zeros(n, np.int32)
    for part in ("_w", "_b"):
        name = y + part
        nodes.append(
            helper.make_node(
                "DequantizeLinear", [name, name + "_scale", name + "_zero"], [name + "_dq"], axis=0
            )
        )
    nodes.append(helper.make_node(operator, [x, y + "_w_dq", y + "_b_dq"], [y], **attributes))


# Three convolutions (the second is depthwise, the third has a ReLU), the largest of each four
# pixels, and a product.
image = quantised("image", 0.02, 121)
layer(
    "Conv",
    image,
    "first",
    (16, 3, 3, 3),
    np.array(140),
    kernel_shape=[3, 3],
    strides=[2, 2],
    pads=[1, 1, 1, 1],
)
first = quantised("first", 0.05, 112)
layer(
    "Conv",
    first,
    "second",
    (16, 1, 3, 3),
    np.array(97),
    kernel_shape=[3, 3],
    pads=[1, 1, 1, 1],
    group=16,
)
second = quantised("second", 0.06, 130)
layer("Conv", second, "sum", (24, 16, 1, 1), np.array(128), kernel_shape=[1, 1])
nodes.append(helper.make_node("Relu", ["sum"], ["third"]))
third = quantised("third", 0.08, 0)
nodes.append(helper.make_node("MaxPool", [third], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]))
pooled = quantised("pooled", 0.08, 0)
nodes.append(helper.make_node("Flatten", [pooled], ["rows"]))
rows = quantised("rows", 0.08, 0)
layer("Gemm", rows, "scores", (10, 24 * 4 * 4), np.array(133), transB=1)
scores = quantised("scores", 0.25, 119)

graph = helper.make_graph(
    nodes,
    "network",
    [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["batch", 3, 16, 16])],
    [helper.make_tensor_value_info("scores_dq", onnx.TensorProto.FLOAT, ["batch", 10])],
    [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
onnx.checker.check_model(model)

x = random.normal(0, 1, (8, 3, 16, 16)).astype(np.float32)
session = onnxruntime.InferenceSession(
    model.SerializeToString(), providers=["CPUExecutionProvider"]
)
(expected,) = session.run(None, {"image": x})


# ---- the same network by conv2d_int8 and linear_int8


def tensor(name: str) -> torch.Tensor:
    """A constant of the network."""
    return torch.from_numpy(np.array(constants[name]))


def packed(y: str) -> co.PackedWeight:
    """The weight of the layer ``y``: ONNX's uint8 codes and zero points are the package's."""
    w = tensor(y + "_w")
    weight = co.QuantizedWeight(
        w.movedim(1, -1).flatten(1),
        tensor(y + "_w_scale")[:, None],
        zeros=tensor(y + "_w_zero")[:, None],
        bits=8,
        group_size=-1,
        kernel_size=tuple(w.shape[2:]),
    )
    return co.reorder(weight)


def steps(x: str, y: str) -> dict[str, object]:
    """What the codes of x and y mean, as arguments."""
    return {
        "x_scale": float(tensor(x + "_scale")),
        "x_zero_point": int(tensor(x + "_zero")),
        "y_scale": float(tensor(y + "_scale")),
        "y_zero_point": int(tensor(y + "_zero")),
        "out_dtype": torch.uint8,
    }


scale, zero = tensor("image_scale"), int(tensor("image_zero"))
codes = ((torch.from_numpy(x) / scale).round() + zero).clamp(0, 255).to(torch.uint8)
codes = co.conv2d_int8(
    codes, packed("first"), tensor("first_b"), stride=2, padding=1, **steps("image", "first")
)
codes = co.conv2d_int8(
    codes, packed("second"), tensor("second_b"), padding=1, groups=16, **steps("first", "second")
)
codes = co.conv2d_int8(
    codes, packed("sum"), tensor("sum_b"), activation="relu", **steps("second", "third")
)
codes = F.max_pool2d(codes.float(), 2).to(torch.uint8)
codes = co.linear_int8(
    codes.flatten(1), packed("scores"), tensor("scores_b"), **steps("rows", "scores")
)
y = (codes.int() - int(tensor("scores_zero"))).float() * tensor("scores_scale")

differ = int((y.numpy() != expected).sum())
print(f"{codes.numel()} scores of {len(x)} images, {len(codes.unique())} different codes")
print(f"{differ} of them differ from those of ONNX Runtime {onnxruntime.__version__}")
assert differ == 0
