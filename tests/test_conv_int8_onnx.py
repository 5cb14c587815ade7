"""Static int8 convolutions and products against ONNX Runtime's results and ONNX's node tests."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conv_int8_cases import INT8, codes, packed
from imports import import_or_skip
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C

# ---- ONNX Runtime


def onnx_codes(dtype: torch.dtype, n: int, seed: int) -> Tensor:
    """Zero points of a weight of x's dtype ``[N]``, of even seeds those of symmetric quantisation.

    w is uint8 where x is: ONNX Runtime adds up pairs of products of uint8 and int8 in 16 bits,
    which saturate, on CPUs that have AVX2 without VNNI.
    """
    middle = torch.full((n,), 128 if dtype == torch.uint8 else 0, dtype=dtype)
    return codes(dtype, n, seed=seed) if seed % 2 else middle


def run_onnx(
    operator: str, inputs: dict[str, np.ndarray], attributes: dict[str, Any]
) -> np.ndarray:
    """The result of a model of one operator, whose first input is its own; the others are
    constants.
    """
    onnx = import_or_skip("onnx")
    runtime = import_or_skip("onnxruntime")
    helper = onnx.helper
    (name, x), *constants = inputs.items()
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    y_kind = onnx.TensorProto.INT32 if operator.endswith("Integer") else kind
    graph = helper.make_graph(
        [helper.make_node(operator, list(inputs), ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info(name, kind, x.shape)],
        [helper.make_tensor_value_info("y", y_kind, None)],
        [onnx.numpy_helper.from_array(np.asarray(value), key) for key, value in constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {name: x})
    return np.asarray(y)


@pytest.mark.parametrize("dtype", INT8)
def test_convolutions_are_those_of_onnx_runtime(dtype: torch.dtype) -> None:
    """200,000 outputs of kernels, strides, paddings, dilations and groups by
    chance: none differs.
    """
    chance, outputs, seed = random.Random(int(dtype == torch.uint8)), 0, 0
    while outputs < 200_000:
        seed += 1
        torch.manual_seed(seed)
        groups = chance.choice([1, 1, 2, 4, 8])
        c, n = (
            (1, groups * chance.choice([1, 2]))
            if chance.random() < 0.3
            else (chance.randint(1, 40), groups * chance.randint(1, 9))
        )
        kernel, stride, padding, dilation = (
            tuple(chance.randint(least, most) for _ in range(2))
            for least, most in ((1, 5), (1, 3), (0, 3), (1, 3))
        )
        least = [d * (k - 1) + 1 - 2 * p for k, p, d in zip(kernel, padding, dilation, strict=True)]
        space = [max(extent, 1) + chance.randint(0, 24) for extent in least]
        x, w = (
            codes(dtype, chance.randint(1, 3), groups * c, *space, seed=seed),
            codes(dtype, n, c, *kernel, seed=seed + 7),
        )
        w_zeros = onnx_codes(dtype, 1, seed).expand(n)  # ONNX Runtime takes one for all channels
        weight = packed(w, scales := torch.rand(n) * 0.02 + 1e-4, zeros=w_zeros)
        zero, y_zero = (int(code) for code in codes(dtype, 2, seed=seed + 1))
        x_scale = chance.uniform(1e-3, 0.1)
        acc = co.conv2d_int8(
            x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups,
            x_scale=x_scale, x_zero_point=zero, out_dtype=torch.int32,
        )  # fmt: skip
        # Most of the results are inside of the limits.
        y_scale = float((acc * scales[:, None, None] * x_scale).abs().float().mean() / 40) + 1e-6
        bias = torch.randint(-3000, 3000, (n,), dtype=torch.int32)
        y = co.conv2d_int8(
            x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups,
            x_scale=x_scale, x_zero_point=zero, y_scale=y_scale, y_zero_point=y_zero,
            out_dtype=dtype,
        )  # fmt: skip
        inputs = {
            "x": x.numpy(),
            "x_scale": np.float32(x_scale),
            "x_zero": np.array(zero, x.numpy().dtype),
            "w": w.numpy(),
            "w_scale": scales.numpy(),
            "w_zero": w_zeros.numpy(),
            "y_scale": np.float32(y_scale),
            "y_zero": np.array(y_zero, x.numpy().dtype),
            "bias": bias.numpy(),
        }
        attributes = {
            "strides": stride,
            "pads": padding * 2,
            "dilations": dilation,
            "group": groups,
            "kernel_shape": kernel,
        }
        expected = run_onnx("QLinearConv", inputs, attributes)
        assert np.array_equal(y.numpy(), expected), (x.shape, w.shape, attributes)
        outputs += y.numel()


@pytest.mark.parametrize("dtype", INT8)
def test_products_are_those_of_onnx_runtime(dtype: torch.dtype) -> None:
    for seed, (m, k, n) in enumerate([(1, 1, 1), (7, 33, 65), (300, 700, 130), (65, 4097, 48)]):
        torch.manual_seed(seed)
        x, w, scales = (
            codes(dtype, m, k, seed=seed),
            codes(dtype, n, k, seed=seed + 9),
            torch.rand(n) * 0.02 + 1e-4,
        )
        w_zeros = onnx_codes(dtype, n, seed)
        zero, y_zero = (int(code) for code in codes(dtype, 2, seed=seed + 1))
        y_scale = 0.02 * k**0.5
        y = co.linear_int8(
            x, packed(w, scales, zeros=w_zeros), x_scale=0.03, x_zero_point=zero, y_scale=y_scale,
            y_zero_point=y_zero,
            out_dtype=dtype,
        )  # fmt: skip
        inputs = {
            "x": x.numpy(),
            "x_scale": np.float32(0.03),
            "x_zero": np.array(zero, x.numpy().dtype),
            "w": np.ascontiguousarray(w.numpy().T),
            "w_scale": scales.numpy(),
            "w_zero": w_zeros.numpy(),
            "y_scale": np.float32(y_scale),
            "y_zero": np.array(y_zero, x.numpy().dtype),
        }
        assert np.array_equal(y.numpy(), run_onnx("QLinearMatMul", inputs, {}))


# ---- ONNX's node tests


def node_tests() -> Iterator[tuple[str, str, dict[str, np.ndarray], dict[str, Any], np.ndarray]]:
    """Those of the package onnx: name, operator, inputs by their places' names, attributes, the
    output that is expected.

    ``collect_testcases`` makes those of all operators, which takes half a minute.
    """
    onnx = import_or_skip("onnx")
    found: list[tuple[str, str, dict[str, np.ndarray], dict[str, Any], np.ndarray]] = []

    def expect(node: Any, inputs: list[np.ndarray], outputs: list[np.ndarray], name: str) -> None:
        attributes = {
            attribute.name: onnx.helper.get_attribute_value(attribute)
            for attribute in node.attribute
        }
        places = [of.name for of in onnx.defs.get_schema(node.op_type).inputs]
        given = {place: np.asarray(value) for place, value in zip(places, inputs, strict=False)}
        found.append((name, node.op_type, given, attributes, outputs[0]))

    for operator in ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"):
        module = importlib.import_module(f"onnx.backend.test.case.node.{operator.lower()}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "expect", expect)
            for name, export in vars(getattr(module, operator)).items():
                if name.startswith("export"):
                    export.__func__()
    yield from found


def by_row(value: np.ndarray | None, n: int, default: Tensor) -> Tensor:
    """A number that ONNX gives once or for each output channel, as ``[N]``."""
    return (default if value is None else torch.from_numpy(np.array(value)).reshape(-1)).expand(n)


def computed(operator: str, given: dict[str, np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
    """An operator of ONNX by conv2d_int8 and linear_int8; of its padding, what the
    node tests have.
    """
    convolution = operator in ("QLinearConv", "ConvInteger")
    quantised = operator in ("QLinearConv", "QLinearMatMul")
    names = {"x": ("x", "a", "A"), "w": ("w", "b", "B")}

    def part(of: str, suffix: str = "") -> np.ndarray | None:
        return next(
            (given[name + suffix] for name in names.get(of, (of,)) if name + suffix in given), None
        )

    x, w = (torch.from_numpy(np.array(part(of))) for of in "xw")
    no_zero, options = (
        torch.zeros(1, dtype=w.dtype),
        {"x_zero_point": int(by_row(part("x", "_zero_point"), 1, torch.zeros(1)))},
    )
    if quantised:
        assert part("y", "_zero_point") is not None
        options |= {"y_zero_point": int(given["y_zero_point"].item()), "out_dtype": x.dtype}
        options |= {of + "_scale": float(np.asarray(part(of, "_scale")).item()) for of in "xy"}
    else:
        options |= {"x_scale": 1.0, "out_dtype": torch.int32}

    def weight(w: Tensor) -> co.PackedWeight:
        scales = by_row(part("w", "_scale"), len(w), torch.ones(1))
        return packed(w, scales, zeros=by_row(part("w", "_zero_point"), len(w), no_zero))

    if convolution:
        pads = attributes.get("pads", [0, 0, 0, 0])
        assert pads[:2] == pads[2:]
        return co.conv2d_int8(x, weight(w), padding=tuple(pads[:2]), **options).numpy()
    if w.dim() == 2:
        return co.linear_int8(x, weight(w.t()), **options).numpy()
    return np.stack(
        [co.linear_int8(a, weight(b.t()), **options).numpy() for a, b in zip(x, w, strict=True)]
    )


def test_node_tests_of_onnx() -> None:
    """Their outputs, which are ONNX Runtime's too where it takes the inputs: no fp16 scales, no
    zero points by channel in ConvInteger.
    """
    names = set()
    for name, operator, given, attributes, expected in node_tests():
        y = computed(operator, given, attributes)
        assert y.dtype == expected.dtype, name
        assert np.array_equal(y, expected), name
        if "float16" not in name and name != "test_convinteger_with_padding":
            assert np.array_equal(run_onnx(operator, given, attributes), expected), name
        names.add(name)
    assert {"test_qlinearconv", "test_convinteger_with_padding", "test_matmulinteger"} <= names
    assert {
        f"test_qlinearmatmul_{d}D_{kind}_float32" for d in (2, 3) for kind in ("int8", "uint8")
    } <= names


H200 = _C.Device(90, 132, 232448)

A100 = _C.Device(80, 108, 166912)


def plans(
    channels: int,
    n: int,
    groups: int = 1,
    kernel: int = 3,
    zero: int = 0,
    padding: int = 1,
    device: _C.Device = H200,
    size: int = 14,
    out: _C.ConvOutput = _C.ConvOutput.uint8,
    y: int = 4096,
) -> list[_C.ConvPlan]:
    """The plans of a convolution of two images of ``size`` x ``size`` pixels, to the address ``y``;
    nothing is read.
    """
    order = _C.conv_order(n, channels, kernel**2, groups)
    weight = _C.ConvWeight(
        4096, order, 4096, 4096, _C.DataType.float32, n, (kernel, kernel), channels
    )
    problem = _C.ConvProblem(
        weight,
        4096,
        True,
        _C.DataType.none,
        True,
        (2, size, size, groups * channels),
        (1, 1),
        (padding, padding),
        (1, 1),
        groups,
        0,
        False,
        _C.DataType.none,
        y,
        out,
        1.0,
        zero,
        1.0,
        0,
        _C.Activation.none,
        0.0,
        0.0,
    )
    return problem.plans(device)


def kernels(found: list[_C.ConvPlan]) -> list[str]:
    """In their order, each once."""
    return list(dict.fromkeys(plan.kernel for plan in found))


@pytest.mark.parametrize("channels", [1, 5, 8, 20, 40])
def test_groups_that_begin_within_a_vector_are_read_bytewise(channels: int) -> None:
    """TMA's im2col boxes that begin there are an illegal instruction, and copies of 16
    bytes are misaligned.
    """
    (plan,) = plans(channels, 6, 3)
    assert (plan.kernel, plan.stages, plan.copied_channels) == ("conv_int8_implicit_gemm", 2, 0)
    found = plans(32, 6, 3)
    assert kernels(found) == ["conv_int8_wgmma", "conv_int8_implicit_gemm"]
    assert all(plan.stages > 2 for plan in found)


def test_kernels_of_more_taps_than_iterators_have_masks_for_are_read_bytewise() -> None:
    for kernel, stages in ((32, {3, 4, 6}), (33, {2})):
        found = plans(16, 64, kernel=kernel, padding=16, device=A100)
        assert {plan.stages for plan in found} == stages
        assert kernels(found) == ["conv_int8_implicit_gemm"]


def test_geometries_that_need_a_copy_of_x() -> None:
    pixels = 2 * 14 * 14
    for zero in (0, 3):
        for plan in plans(64, 64, zero=zero):
            assert (plan.copied_channels, plan.workspace) == (0, 0)
        for plan in plans(20, 64, zero=zero):
            assert (plan.copied_channels, plan.workspace) == (32, 32 * pixels)
        stem, *others = plans(3, 64, zero=zero)
        assert (stem.kernel, stem.copied_channels, stem.workspace) == ("conv_int8_stem", 0, 0)
        for plan in others:  # 27 codes of each pixel of the result
            assert (plan.copied_channels, plan.workspace) == (32, 32 * pixels)
        (plan,) = plans(5, 6, 3, zero=zero)
        assert (plan.copied_channels, plan.workspace) == (0, 0)


def test_kernels_of_an_architecture() -> None:
    assert kernels(plans(64, 64, device=A100)) == ["conv_int8_implicit_gemm"]
    assert kernels(plans(1, 64, 64, device=A100)) == ["conv_int8_depthwise"]
    assert kernels(plans(1, 64, 64)) == ["conv_int8_depthwise"]
    assert kernels(plans(320, 320)) == ["conv_int8_wgmma", "conv_int8_implicit_gemm"]


def test_tiles_of_stems_are_what_shared_memory_holds() -> None:
    def stem(channels: int, kernel: int, size: int) -> _C.ConvPlan | None:
        plan = plans(channels, 72, kernel=kernel, padding=kernel // 2, size=size)[0]
        return plan if plan.kernel == "conv_int8_stem" else None

    few, wide = stem(3, 7, 14), stem(3, 7, 300)
    assert few is not None
    assert wide is not None
    assert (few.block_m, few.grid) == (14 * 8, 2 * 2 * 2)  # images, tiles of lines and of outputs
    assert (wide.block_m, wide.grid) == (100 * 8, 2 * 3 * 38 * 2)  # and of columns
    large = stem(8, 11, 300)
    assert large is not None
    assert large.block_m == 100
    assert stem(8, 31, 300) is None


def test_depthwise_strips_have_as_many_lines_as_leave_work_for_all_sms() -> None:
    one_sm = _C.Device(90, 1, 232448)

    def lines(kernel: int, size: int, device: _C.Device = H200) -> int:
        (plan,) = plans(1, 128, 128, kernel=kernel, padding=kernel // 2, size=size, device=device)
        segments = 2 * -(-size // 4)
        assert plan.block_m % 4 == 0
        strips = -(-size // (plan.block_m // 4))
        assert plan.grid == -(-segments * strips * 128 // 4 // 128)
        return plan.block_m // 4

    assert lines(3, 14) == 1
    assert lines(3, 112) == 4
    assert lines(3, 112, one_sm) == 56
    assert (lines(5, 112), lines(7, 112, one_sm)) == (4, 4)  # as registers hold the sums of
    assert (lines(1, 15, one_sm), lines(9, 14, one_sm)) == (1, 1)


def test_products_are_given_to_collectives_where_rows_of_the_result_are_whole_vectors() -> None:
    every = ["conv_int8_wgmma", "gemm_int8_collective", "conv_int8_implicit_gemm"]
    without = [kernel for kernel in every if kernel != "gemm_int8_collective"]
    product: dict[str, Any] = {"kernel": 1, "padding": 0}
    assert sorted(kernels(plans(70, 64, **product))) == sorted(every)
    # of the taps that were gathered
    assert sorted(kernels(plans(3, 64))) == sorted(["conv_int8_stem", *every])
    for n, other in (
        (72, {}),
        (64, {"out": _C.ConvOutput.int32}),
        (64, {"y": 4104}),
        (64, {"padding": 1}),
    ):
        assert kernels(plans(70, n, **(product | other))) == without
    assert kernels(plans(70, 64, **product, device=A100)) == without[1:]
    tiles = [
        (p.block_m, p.block_n, p.cluster_size, p.grid)
        for p in plans(70, 256, **product)
        if p.kernel == every[1]
    ]
    assert sorted(tiles) == [(64, 64, 1, 28), (128, 128, 2, 8), (128, 256, 2, 4)]
    few = plans(70, 256, **product, device=_C.Device(90, 3, 232448))
    assert sorted(plan.grid for plan in few if plan.kernel == every[1]) == [2, 2, 3]


def test_a_product_gets_the_plan_of_least_predicted_time() -> None:
    """As they were measured for 4096 x 4096: slices of K for few rows, collectives for more."""
    chosen = {}
    for size in (1, 8, 11, 45):  # of two images
        ordered = plans(4096, 4096, kernel=1, padding=0, size=size)
        predicted = [p.predicted_clocks for p in ordered if p.kernel != "conv_int8_implicit_gemm"]
        assert predicted == sorted(predicted)
        chosen[size] = (ordered[0].kernel, ordered[0].block_n, ordered[0].slices > 1)
    assert chosen[1] == ("conv_int8_wgmma", 64, True)
    assert chosen[8] == ("gemm_int8_collective", 64, False)
    assert chosen[11] == ("conv_int8_wgmma", 64, False)
    assert chosen[45] == ("gemm_int8_collective", 128, False)


def test_tiles_of_implicit_gemms_are_small_where_there_are_few() -> None:
    assert plans(256, 64, device=A100)[0].block_m == 64
    assert plans(256, 256, device=A100, size=112)[0].block_m == 256
    assert plans(256, 256, device=A100, size=112)[0].grid == 2 * 112 * 112 // 256 * 2


def test_tiles_that_span_more_than_32_bits_are_refused() -> None:
    """CUTLASS's iterators multiply in 32 bits. TMA does not."""
    wide: dict[str, Any] = {"kernel": 1, "padding": 0, "size": 2}
    without = ["conv_int8_wgmma", "gemm_int8_collective"]
    assert sorted(kernels(plans(2**21 + 2**20, 16, **wide))) == [
        "conv_int8_implicit_gemm",
        *without,
    ]
    assert sorted(kernels(plans(2**23, 16, **wide))) == without
    with pytest.raises(ValueError, match=r"a tile reads more than 2\^31 bytes"):
        plans(2**23, 16, **wide, device=A100)
