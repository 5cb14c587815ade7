"""Static int8 convolutions and products: sums, scales, rounding, limits, and ONNX Runtime's results."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imports import import_or_skip
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops.ops import conv_int8, library

INT8 = (torch.int8, torch.uint8)


def codes(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def packed(w: Tensor, scales: Tensor, bias: Tensor | None = None, zeros: Tensor | None = None) -> co.PackedWeight:
    """int8 or uint8 ``[N, C, *kernel]``, or a matrix, with one scale a row, and zero points of w's dtype, one a row."""

    def as_codes(values: Tensor) -> Tensor:
        return values if values.dtype == torch.uint8 else (values.int() + 128).to(torch.uint8)

    weight = co.QuantizedWeight(
        as_codes(w.movedim(1, -1).flatten(1)),
        scales[:, None],
        zeros=None if zeros is None else as_codes(zeros[:, None]),
        bits=8,
        group_size=-1,
        bias=bias,
        kernel_size=tuple(w.shape[2:]),
    )
    return co.reorder(weight)


def sums(x: Tensor, w: Tensor, zero: int, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """int64 ``[B, N, H', W']``, tap by tap."""
    (b, _, h, width), (n, c, r, s) = x.shape, w.shape
    image = torch.zeros(b, groups * c, h + 2 * padding[0], width + 2 * padding[1], dtype=torch.int64)
    image[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + width] = x.long() - zero
    high = (image.shape[2] - dilation[0] * (r - 1) - 1) // stride[0] + 1
    wide = (image.shape[3] - dilation[1] * (s - 1) - 1) // stride[1] + 1
    total = torch.zeros(b, groups, n // groups, high, wide, dtype=torch.int64)
    for i, j in itertools.product(range(r), range(s)):
        top, left = i * dilation[0], j * dilation[1]
        seen = image[:, :, top : top + high * stride[0] : stride[0], left : left + wide * stride[1] : stride[1]][
            ..., :high, :wide
        ]
        parts = seen.reshape(b, groups, c, high, wide), w[:, :, i, j].long().view(groups, n // groups, c)
        total += (parts[0][:, :, None] * parts[1][None, ..., None, None]).sum(3)
    return total.flatten(1, 2)


def requantised(
    acc: Tensor, x_scale: float, scales: Tensor, y_scale: float, zero: int, dtype: torch.dtype, low: int | None = None
) -> Tensor:
    """Step by step in numpy's fp32; acc is ``[B, N, ...]``."""
    factors = np.float32(x_scale) * scales.numpy() / np.float32(y_scale)
    assert factors.dtype == np.float32
    product = acc.int().numpy().astype(np.float32) * factors.reshape(-1, *[1] * (acc.dim() - 2))
    info = torch.iinfo(dtype)
    rounded = np.rint(product).astype(np.float64) + zero
    return torch.from_numpy(np.clip(rounded, info.min if low is None else low, info.max)).to(dtype)


@pytest.mark.parametrize("x_dtype", INT8)
@pytest.mark.parametrize(
    ("w_dtype", "out_dtype"),
    [(None, torch.int8), (None, torch.int32), (torch.int8, torch.uint8), (torch.uint8, torch.int8), (torch.uint8, torch.int32)],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("geometry", [((1, 1), (0, 0), (1, 1)), ((2, 1), (1, 3), (1, 2)), ((1, 3), (2, 2), (2, 1))], ids=str)
def test_sums_and_scales(
    x_dtype: torch.dtype, w_dtype: torch.dtype | None, out_dtype: torch.dtype, groups: int, geometry: Any
) -> None:
    """Without zero points of w, and with those of int8 and uint8 weights."""
    w, x = codes(w_dtype or torch.int8, 24, 36 // groups, 3, 2), codes(x_dtype, 2, 36, 9, 8, seed=1)
    zeros = None if w_dtype is None else codes(w_dtype, 24, seed=4)
    zero, y_zero = int(codes(x_dtype, 1, seed=2)), 0 if out_dtype == torch.int32 else int(codes(out_dtype, 1, seed=3))
    scales, bias = torch.rand(24) * 0.01 + 1e-3, torch.randint(-9000, 9000, (24,), dtype=torch.int32)
    centred = w if zeros is None else w.short() - zeros.view(-1, 1, 1, 1)
    acc = sums(x, centred, zero, *geometry, groups) + bias[:, None, None]
    stride, padding, dilation = geometry
    y = co.conv2d_int8(
        x,
        packed(w, scales, zeros=zeros),
        bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        x_scale=0.031,
        x_zero_point=zero,
        y_scale=0.7,
        y_zero_point=y_zero,
        out_dtype=out_dtype,
    )
    expected = acc.int() if out_dtype == torch.int32 else requantised(acc, 0.031, scales, 0.7, y_zero, out_dtype)
    assert y.dtype == out_dtype
    assert torch.equal(y, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_sums_that_fp32_does_not_hold() -> None:
    """The largest ones of 4,608 taps and channels, and one less."""
    x, w = torch.full((1, 512, 3, 3), 255, dtype=torch.uint8), torch.full((2, 512, 3, 3), -128, dtype=torch.int8)
    w[1, 0, 0, 0] = -127
    weight = packed(w, torch.ones(2))
    acc = co.conv2d_int8(x, weight, x_scale=1.0, out_dtype=torch.int32).flatten()
    assert acc.tolist() == [-255 * 128 * 4608, -255 * 128 * 4608 + 255]
    # A bias may take the sums out of int32: they wrap.
    bias = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    acc = co.conv2d_int8(x, weight, bias, x_scale=1.0, out_dtype=torch.int32).flatten()
    assert acc.tolist() == [2**31 - 255 * 128 * 4608, 2**31 - 1 - 255 * 128 * 4608 + 255]
    weight = packed(w, torch.ones(2), zeros=torch.full((2,), 127, dtype=torch.int8))
    acc = co.conv2d_int8(x, weight, x_scale=1.0, out_dtype=torch.int32).flatten()
    assert acc.tolist() == [-255 * 255 * 4608, -255 * 255 * 4608 + 255]


@pytest.mark.parametrize("zero", [0, 1, -1, 2])
def test_halves_are_rounded_to_even_before_the_zero_point_is_added(zero: int) -> None:
    x = torch.arange(-9, 10, dtype=torch.int8).view(-1, 1)
    y = co.linear_int8(x, packed(torch.ones(1, 1, dtype=torch.int8), torch.ones(1)), x_scale=1, y_scale=2.0, y_zero_point=zero)
    assert y.flatten().tolist() == [round(i / 2) + zero for i in range(-9, 10)]


def test_codes_end_where_their_dtype_and_the_activation_end() -> None:
    weight = packed(torch.ones(1, 1, dtype=torch.int8), torch.ones(1))
    x = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(-1, 1)

    def limits(**options: Any) -> tuple[int, int]:
        y = co.linear_int8(x, weight, **{"x_scale": 1.0, "y_scale": 0.25, **options})
        return int(y.min()), int(y.max())

    assert limits() == (-128, 127)
    assert limits(out_dtype=torch.uint8, y_zero_point=100) == (0, 255)
    assert limits(activation="relu", y_zero_point=-20) == (-20, 127)
    assert limits(activation="relu6", y_zero_point=-20) == (-20, 4)
    assert limits(activation=("clamp", -1.0, 1.5), y_zero_point=3) == (-1, 9)
    assert limits(activation=("clamp", -1e30, 1e30)) == (-128, 127)
    assert limits(activation=("clamp", 1.5, 1.5), y_zero_point=3) == (9, 9)
    # Bounds between two codes are at the nearest one, halfway at the even one.
    assert limits(activation=("clamp", -1.1, 1.1)) == (-4, 4)
    assert limits(activation=("clamp", -1.2, 1.2), y_zero_point=1) == (-4, 6)
    assert limits(activation=("clamp", -0.625, 0.875), y_zero_point=1) == (-1, 5)
    assert limits(activation="relu6", y_scale=0.45) == (0, 13)
    # Products beyond every integer.
    assert limits(y_scale=1e-30) == (-128, 127)


@pytest.mark.parametrize("scale", [torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max])
def test_scales_are_all_normal_numbers_of_fp32(scale: float) -> None:
    x = torch.arange(-9, 10, dtype=torch.int8).view(-1, 1)
    weight = packed(torch.ones(1, 1, dtype=torch.int8), torch.ones(1))
    assert torch.equal(co.linear_int8(x, weight, x_scale=scale, y_scale=scale), x)


def test_a_bias_in_floats_is_rounded_to_steps_of_the_sums() -> None:
    w, x = codes(torch.int8, 5, 7, 3, 3), codes(torch.int8, 1, 7, 6, 6, seed=1)
    scales, bias = torch.rand(5) * 0.01 + 1e-3, torch.randn(5) * 30
    bias[4] = 1e30
    options: dict[str, Any] = {"x_scale": 0.05, "x_zero_point": -3, "out_dtype": torch.int32}
    exact = bias.double() / (torch.tensor(0.05).float() * scales).double()
    steps = exact.round().clamp(-(2**31), 2**31 - 1).to(torch.int32)
    y = co.conv2d_int8(x, packed(w, scales), bias, **options)
    assert torch.equal(y, co.conv2d_int8(x, packed(w, scales), steps, **options))
    assert torch.equal(y, co.conv2d_int8(x, packed(w, scales, bias), **options))


def test_a_factor_beyond_fp32_saturates_and_leaves_zero() -> None:
    weight = packed(torch.ones(1, 1, dtype=torch.int8), torch.ones(1))
    x = torch.tensor([[-2], [0], [2]], dtype=torch.int8)
    y = co.linear_int8(x, weight, x_scale=1e38, y_scale=1.2e-38, y_zero_point=3)  # 0 x infinity counts as 0
    assert y.flatten().tolist() == [-128, 3, 127]


def test_biases_without_a_number_of_steps() -> None:
    x = torch.zeros(1, 1, dtype=torch.int8)
    bias = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    for scale in (1.0, 1e-30):  # the steps of the second are 0 in fp32
        weight = packed(torch.ones(5, 1, dtype=torch.int8), torch.full((5,), scale))
        y = co.linear_int8(x, weight, bias, x_scale=scale, out_dtype=torch.int32)
        assert y.tolist() == [[0, 2**31 - 1, -(2**31), 0, 0]]


def test_a_product_of_any_shape() -> None:
    w, x = codes(torch.int8, 33, 70), codes(torch.uint8, 2, 3, 70, seed=1)
    scales = torch.rand(33) * 0.01 + 1e-3
    acc = (x.long() - 77) @ w.long().t()
    y = co.linear_int8(x, packed(w, scales), x_scale=0.02, x_zero_point=77, y_scale=0.3, y_zero_point=9, out_dtype=torch.uint8)
    expected = requantised(acc.flatten(0, 1), 0.02, scales, 0.3, 9, torch.uint8)
    assert torch.equal(y, expected.view(2, 3, 33))
    assert co.linear_int8(x[:0], packed(w, scales), x_scale=1.0, y_scale=1.0).shape == (0, 3, 33)


def test_what_does_not_fit_is_refused_with_its_value() -> None:
    w = codes(torch.int8, 6, 4, 3, 3)
    x, weight = codes(torch.int8, 1, 4, 8, 8), packed(w, torch.ones(6))
    floats = torch.randn(6, 4, 3, 3)
    symmetric = co.quantize(floats, bits=8, group_size=-1)
    offsets = dataclasses.replace(symmetric, offsets=torch.zeros(6, 1))
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"x": x.float()}, TypeError, "x has dtype float32; supported are int8, uint8"),
        ({"x": 3}, TypeError, "x is a int"),
        ({"x": x.to("meta")}, ValueError, "x is on meta; the weight is on cpu"),
        ({"x": x[:, :3]}, ValueError, r"x has shape \(1, 3, 8, 8\); \[B, 4, H, W\]"),
        ({"stride": 0}, ValueError, "stride is 0"),
        ({"x": x[..., :2]}, ValueError, r"x has \(8, 2\) pixels"),
        ({"weight": co.reorder(co.quantize(floats, bits=4, group_size=-1))}, ValueError, "the weight has bits=4"),
        ({"weight": co.reorder(co.quantize(floats, bits=8, group_size=32))}, ValueError, "group_size=32"),
        ({"weight": co.reorder(offsets)}, ValueError, "scales, offsets; static int8 takes 8 bits, .* and zero points"),
        ({"weight": co.reorder(co.quantize(floats[:, :, 0], bits=8, group_size=-1))}, ValueError, r"a kernel of \(3,\)"),
        ({"x_scale": 0.0}, ValueError, "x_scale is 0.0"),
        ({"x_scale": 1.17549e-38}, ValueError, r"x_scale is 1\.17549e-38; a number from 1\.17549e-38 to 3\.40282e\+38"),
        ({"x_scale": 3.5e38}, ValueError, r"x_scale is 3\.5e\+38"),
        ({"y_scale": 1e-45}, ValueError, "y_scale is 1e-45"),
        ({"x_scale": float("nan")}, ValueError, "x_scale is nan"),
        ({"x_scale": torch.ones(1)}, TypeError, "x_scale is a Tensor"),
        ({"x_zero_point": 128}, ValueError, "x_zero_point is 128; an integer from -128 to 127"),
        ({"x_zero_point": 0.0}, ValueError, r"x_zero_point is 0\.0"),
        ({"y_scale": None}, ValueError, "y_scale is None"),
        ({"y_scale": -1.0}, ValueError, "y_scale is -1.0"),
        ({"y_zero_point": -1, "out_dtype": torch.uint8}, ValueError, "y_zero_point is -1; an integer from 0 to 255"),
        ({"activation": "silu"}, ValueError, "activation is 'silu'"),
        ({"activation": "relu", "out_dtype": torch.int32}, ValueError, "the sums themselves"),
        ({"out_dtype": torch.float32}, TypeError, "out_dtype is torch.float32"),
        ({"bias": torch.zeros(5, dtype=torch.int32)}, ValueError, r"bias has shape \(5,\)"),
        ({"bias": torch.zeros(6, dtype=torch.int64)}, TypeError, "bias has dtype int64"),
        ({"bias": torch.zeros(6, dtype=torch.int32, device="meta")}, ValueError, "bias is on meta"),
        ({"bias": torch.zeros(6), "weight": packed(w, torch.ones(6), torch.ones(6))}, ValueError, "has one already"),
    ]
    for changed, error, message in refused:
        with pytest.raises(error, match=message):
            co.conv2d_int8(**{"x": x, "weight": weight, "x_scale": 1.0, "y_scale": 1.0, **changed})
    matrix = packed(w[:, :, 0, 0], torch.ones(6))
    with pytest.raises(ValueError, match=r"x has shape \(1, 4, 8, 8\); \[..., 4\]"):
        co.linear_int8(x, matrix, x_scale=1.0, y_scale=1.0)
    with pytest.raises(ValueError, match=r"has a kernel of \(3, 3\); a matrix is expected"):
        co.linear_int8(x, weight, x_scale=1.0, y_scale=1.0)


def test_operators() -> None:
    w = codes(torch.int8, 6, 4, 3, 3)
    x, weight = codes(torch.int8, 2, 4, 8, 8), packed(w, torch.rand(6) + 0.1)
    numbers = (0.1, 3, 2.5, -4, "relu", 0.0, 0.0, torch.uint8)
    args = (x, *library.weight_fields(weight), [3, 3], None, *numbers, [2, 1], [1, 0], [1, 1], 1)
    torch.library.opcheck(torch.ops.cutlass_ops.conv_int8.default, args)

    matrix = packed(codes(torch.int8, 6, 6), torch.rand(6) + 0.1)

    def layers(x: Tensor) -> Tensor:
        y = co.conv2d_int8(x, weight, x_scale=0.1, x_zero_point=3, y_scale=2.0, padding=1)
        return co.linear_int8(y.movedim(1, -1), matrix, x_scale=2.0, y_scale=3.0, activation="relu")

    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (8, 5, 11):
        image = codes(torch.int8, 2, 4, size, size + 1)
        assert torch.equal(compiled(image), layers(image))


# ---- weights with zero points


@pytest.mark.parametrize("groups", [1, 24])
def test_zero_points_in_files(groups: int, tmp_path: Path) -> None:
    w, x = codes(torch.uint8, 24, 24 // groups, 3, 3), codes(torch.uint8, 2, 24, 9, 8, seed=1)
    weight = packed(w, torch.rand(24) + 0.1, zeros=codes(torch.uint8, 24, seed=2))
    co.save_packed(tmp_path / "net.safetensors", {"conv": weight})
    loaded = co.load_packed(tmp_path / "net.safetensors")["conv"]
    options: dict[str, Any] = {"groups": groups, "x_scale": 0.1, "x_zero_point": 9, "y_scale": 300.0}
    assert torch.equal(co.conv2d_int8(x, loaded, **options), co.conv2d_int8(x, weight, **options))


def test_asymmetric_quantisation_is_better_where_weights_are_of_one_sign() -> None:
    torch.manual_seed(0)
    w, x = torch.rand(16, 8, 3, 3) + 0.5, codes(torch.int8, 1, 8, 9, 9)
    exact = torch.nn.functional.conv2d(x.double() * 0.1, w.double())
    errors = []
    for symmetric in (True, False):
        weight = co.reorder(co.quantize(w, bits=8, group_size=-1, symmetric=symmetric))
        acc = co.conv2d_int8(x, weight, x_scale=0.1, out_dtype=torch.int32)
        values = acc * 0.1 * weight.unpack().scales[:, 0].double()[:, None, None]
        errors.append(float((values - exact).norm() / exact.norm()))
    assert errors[1] < 0.7 * errors[0] < 0.02, errors


@pytest.mark.parametrize(("channels", "n", "groups"), [(20, 17, 1), (3, 17, 1), (1, 12, 12), (1, 24, 12), (5, 24, 4)])
@pytest.mark.parametrize("fits", [True, False])
def test_what_kernels_multiply_by_is_the_weight_without_its_zero_points(channels: int, n: int, groups: int, fits: bool) -> None:
    """In each of the three orders: codes that fit int8, and what is left of a zero point from which they do not."""
    w, zeros = codes(torch.uint8, n, channels, 3, 2), codes(torch.uint8, n, seed=1)
    if fits:
        w = (zeros.short()[:, None, None, None] + codes(torch.int8, *w.shape, seed=2)).clamp(0, 255).byte()
    weight = packed(w, torch.ones(n), zeros=zeros)
    *differences, rest = conv_int8._without_zeros(weight, groups)
    operand = conv_int8._Natural(*differences)
    ones = conv_int8._ones(weight, groups)
    assert bool(rest.any()) != fits

    def natural(of: conv_int8._Natural, n: int) -> Tensor:
        order, parts = _C.conv_order(n, channels, 6, groups), of.codes
        if order == _C.ConvOrder.by_taps:
            return parts.permute(2, 0, 1, 3).reshape(n, 1, 3, 4)[..., :2]
        by_tap = parts[:, : 6 * channels].view(n, 3, 2, channels) if order == _C.ConvOrder.flat else parts[..., :channels]
        return by_tap.movedim(-1, 1)

    assert torch.equal(natural(operand, n) - rest.view(-1, 1, 1, 1), w.int() - zeros.view(-1, 1, 1, 1))
    assert torch.equal(natural(ones, groups), torch.ones(groups, channels, 3, 2, dtype=torch.int8))
    assert operand.sums.tolist() == natural(operand, n).sum((1, 2, 3)).tolist()
    assert ones.sums.tolist() == [6 * channels] * groups


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "space"),
    [
        ((3, 3), (1, 1), (1, 1), (1, 1), (5, 4)),
        ((3, 2), (2, 1), (2, 1), (1, 2), (5, 6)),
        ((3, 3), (1, 2), (4, 6), (3, 2), (1, 2)),
        ((2, 5), (3, 1), (0, 3), (2, 1), (6, 1)),
    ],
)
def test_cut_sums_make_zeros_outside_of_x_its_zero_point(
    groups: int, kernel: Any, stride: Any, padding: Any, dilation: Any, space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums that kernels find, with zeros outside of x, and what they make of them by the border class of each pixel."""
    w, x = codes(torch.int8, 15, 12 // groups, *kernel), codes(torch.uint8, 2, 12, *space, seed=1)
    geometry, zero = conv_int8.Geometry(stride, padding, dilation, groups), 77
    weight = packed(w, torch.ones(15))
    natural = conv_int8._in_order(w.movedim(1, -1), _C.ConvOrder.by_channels)
    most = [_C.most_cut(*axis) for axis in zip(kernel, padding, dilation, strict=True)]
    table = conv_int8._cut_sums(natural, groups, most)[..., : 15 // groups].flatten(1)
    assert not table[0].any()
    with_zeros = sums(x, w, 0, stride, padding, dilation, groups)
    expected = sums(x, w, zero, stride, padding, dilation, groups)
    ends = []
    for axis, out in enumerate(expected.shape[2:]):
        begin = torch.arange(out)[:, None] * stride[axis] - padding[axis] + torch.arange(kernel[axis]) * dilation[axis]
        ends.append(((begin < 0).sum(1), (begin >= space[axis]).sum(1)))
    (top, bottom), (left, right) = ends
    rows, columns = top * (most[0] + 1) + bottom, left * (most[1] + 1) + right
    classes = rows[:, None] * (most[1] + 1) ** 2 + columns
    assert int(classes.max()) < len(table) == (most[0] + 1) ** 2 * (most[1] + 1) ** 2
    cut = table[classes].movedim(-1, 0)
    assert torch.equal(with_zeros - zero * natural.sums.view(-1, 1, 1) + zero * cut, expected)
    monkeypatch.setattr("cutlass_ops.ops.kept.captures", lambda weight: True)
    found = conv_int8._kept_cut_sums(weight, natural, "", (), zero, geometry)
    assert (found is None) == (len(table) > _C.most_border_classes)
    assert conv_int8._kept_cut_sums(weight, natural, "", (), 0, geometry) is None


def test_operands_are_kept_until_codes_or_zero_points_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    monkeypatch.setattr("cutlass_ops.ops.kept.captures", lambda weight: capturing[0])
    zeros = codes(torch.uint8, 64, seed=1)
    fit = (zeros.short()[:, None] + codes(torch.int8, 64, 48, seed=2)).clamp(0, 255).byte()
    unfit = fit.clone()
    unfit[:, 0], unfit[:, 1] = 0, 255
    weight, other = (packed(w, torch.ones(64), zeros=zeros) for w in (fit, unfit))

    def check(w: Tensor, fits: bool) -> conv_int8._Operand:
        operand = conv_int8._operand(weight, 1)
        assert (operand.rest is None) == (operand.ones is None) == fits
        rest = torch.zeros(64, dtype=torch.int32) if operand.rest is None else operand.rest
        assert torch.equal(operand.weight.codes.view(64, -1)[:, :48] - rest[:, None], w.int() - zeros[:, None])
        return operand

    capturing[0] = True  # nothing waits, nor is kept
    captured = check(fit, False)
    capturing[0] = False
    first = check(fit, True)
    assert captured.weight.codes.data_ptr() != first.weight.codes.data_ptr()
    assert check(fit, True).weight.codes.data_ptr() == first.weight.codes.data_ptr()
    for w, fits in ((unfit, False), (fit, True), (unfit, False)):  # in the memory that CUDA graphs read
        weight.codes.copy_((packed(fit, torch.ones(64), zeros=zeros) if fits else other).codes)
        operand = check(w, fits)
        assert operand.weight.codes.data_ptr() == first.weight.codes.data_ptr()
    with torch.inference_mode():
        weight = packed(fit, torch.ones(64), zeros=zeros)
        check(fit, False)


@pytest.mark.parametrize("groups", [1, 4])
def test_sums_of_windows_compensate_the_rest_of_zero_points(groups: int) -> None:
    w, x, rest = codes(torch.int8, 12, 8 // groups, 3, 3), codes(torch.uint8, 2, 8, 7, 6, seed=1), codes(torch.int8, 12, seed=2)
    geometry = ((2, 1), (1, 2), (1, 1), groups)
    ones = torch.ones(groups, 8 // groups, 3, 3, dtype=torch.int8)
    acc, windows = (sums(x, weight, 77, *geometry).movedim(1, -1).int().contiguous() for weight in (w, ones))
    acc[0, 0, 0, 0] += 2**31 - 1 - acc[0, 0, 0, 0]  # the compensated one may wrap
    expected = sums(x, w.short() - rest.view(-1, 1, 1, 1), 77, *geometry).movedim(1, -1)
    expected[0, 0, 0, 0] = 2**31 - 1 - int(rest[0]) * int(windows[0, 0, 0, 0])
    conv_int8._compensate(acc, windows, rest.int())
    assert torch.equal(acc, expected.int())


# ---- ONNX Runtime


def onnx_codes(dtype: torch.dtype, n: int, seed: int) -> Tensor:
    """Zero points of a weight of x's dtype ``[N]``, of even seeds those of symmetric quantisation.

    w is uint8 where x is: ONNX Runtime adds up pairs of products of uint8 and int8 in 16 bits, which saturate, on CPUs that
    have AVX2 without VNNI.
    """
    middle = torch.full((n,), 128 if dtype == torch.uint8 else 0, dtype=dtype)
    return codes(dtype, n, seed=seed) if seed % 2 else middle


def run_onnx(operator: str, inputs: dict[str, np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
    """The result of a model of one operator, whose first input is its own; the others are constants."""
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
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {name: x})
    return np.asarray(y)


@pytest.mark.parametrize("dtype", INT8)
def test_convolutions_are_those_of_onnx_runtime(dtype: torch.dtype) -> None:
    """200,000 outputs of kernels, strides, paddings, dilations and groups by chance: none differs."""
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
            tuple(chance.randint(least, most) for _ in range(2)) for least, most in ((1, 5), (1, 3), (0, 3), (1, 3))
        )
        least = [d * (k - 1) + 1 - 2 * p for k, p, d in zip(kernel, padding, dilation, strict=True)]
        space = [max(extent, 1) + chance.randint(0, 24) for extent in least]
        x, w = codes(dtype, chance.randint(1, 3), groups * c, *space, seed=seed), codes(dtype, n, c, *kernel, seed=seed + 7)
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
            x_scale=x_scale, x_zero_point=zero, y_scale=y_scale, y_zero_point=y_zero, out_dtype=dtype,
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
        attributes = {"strides": stride, "pads": padding * 2, "dilations": dilation, "group": groups, "kernel_shape": kernel}
        expected = run_onnx("QLinearConv", inputs, attributes)
        assert np.array_equal(y.numpy(), expected), (x.shape, w.shape, attributes)
        outputs += y.numel()


@pytest.mark.parametrize("dtype", INT8)
def test_products_are_those_of_onnx_runtime(dtype: torch.dtype) -> None:
    for seed, (m, k, n) in enumerate([(1, 1, 1), (7, 33, 65), (300, 700, 130), (65, 4097, 48)]):
        torch.manual_seed(seed)
        x, w, scales = codes(dtype, m, k, seed=seed), codes(dtype, n, k, seed=seed + 9), torch.rand(n) * 0.02 + 1e-4
        w_zeros = onnx_codes(dtype, n, seed)
        zero, y_zero = (int(code) for code in codes(dtype, 2, seed=seed + 1))
        y_scale = 0.02 * k**0.5
        y = co.linear_int8(
            x, packed(w, scales, zeros=w_zeros), x_scale=0.03, x_zero_point=zero, y_scale=y_scale, y_zero_point=y_zero,
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
    """Those of the package onnx: name, operator, inputs by their places' names, attributes, the output that is expected.

    ``collect_testcases`` makes those of all operators, which takes half a minute.
    """
    onnx = import_or_skip("onnx")
    found: list[tuple[str, str, dict[str, np.ndarray], dict[str, Any], np.ndarray]] = []

    def expect(node: Any, inputs: list[np.ndarray], outputs: list[np.ndarray], name: str) -> None:
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
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
    """What ONNX gives once or for each output channel, ``[N]``."""
    return (default if value is None else torch.from_numpy(np.array(value)).reshape(-1)).expand(n)


def computed(operator: str, given: dict[str, np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
    """An operator of ONNX by conv2d_int8 and linear_int8; of its padding, what the node tests have."""
    convolution = operator in ("QLinearConv", "ConvInteger")
    quantised = operator in ("QLinearConv", "QLinearMatMul")
    names = {"x": ("x", "a", "A"), "w": ("w", "b", "B")}

    def part(of: str, suffix: str = "") -> np.ndarray | None:
        return next((given[name + suffix] for name in names.get(of, (of,)) if name + suffix in given), None)

    x, w = (torch.from_numpy(np.array(part(of))) for of in "xw")
    no_zero, options = torch.zeros(1, dtype=w.dtype), {"x_zero_point": int(by_row(part("x", "_zero_point"), 1, torch.zeros(1)))}
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
    return np.stack([co.linear_int8(a, weight(b.t()), **options).numpy() for a, b in zip(x, w, strict=True)])


def test_node_tests_of_onnx() -> None:
    """Their outputs, which are ONNX Runtime's too where it takes the inputs: no fp16 scales, no zero points by channel in
    ConvInteger.
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
    assert {f"test_qlinearmatmul_{d}D_{kind}_float32" for d in (2, 3) for kind in ("int8", "uint8")} <= names


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
    cut_sums: int = 0,
) -> list[_C.ConvPlan]:
    """Of a convolution of two images of ``size`` x ``size`` pixels, to the address ``y``; nothing is read."""
    order = _C.conv_order(n, channels, kernel**2, groups)
    weight = _C.ConvWeight(4096, order, 4096, cut_sums, 4096, _C.DataType.float32, n, (kernel, kernel), channels)
    problem = _C.ConvProblem(
        weight,
        4096,
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
    """TMA's im2col boxes that begin there are an illegal instruction, and copies of 16 bytes are misaligned."""
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


def test_what_x_is_copied_for() -> None:
    pixels = 2 * 14 * 14
    for plan in plans(64, 64):
        assert (plan.copied_channels, plan.pads, plan.workspace) == (0, False, 0)
    for plan in plans(20, 64):
        assert (plan.copied_channels, plan.pads, plan.workspace) == (32, False, 32 * pixels)
    for plan in plans(64, 64, zero=3):
        assert (plan.copied_channels, plan.pads, plan.workspace) == (64, True, 64 * 2 * 16 * 16)
    for plan in plans(64, 64, zero=3, padding=0) + plans(64, 64, zero=3, cut_sums=4096):
        assert (plan.copied_channels, plan.pads, plan.workspace) == (0, False, 0)
    for plan in plans(20, 64, zero=3, cut_sums=4096):
        assert (plan.copied_channels, plan.pads, plan.workspace) == (32, False, 32 * pixels)
    stem, *others = plans(3, 64, zero=3)
    assert (stem.kernel, stem.copied_channels, stem.pads, stem.workspace) == ("conv_int8_stem", 0, False, 0)
    for plan in others:  # 27 codes of each pixel of the result
        assert (plan.copied_channels, plan.pads, plan.workspace) == (32, False, 32 * pixels)
    (plan,) = plans(5, 6, 3, zero=3)  # groups of odd channels, one after another in the copy
    assert (plan.copied_channels, plan.pads, plan.workspace) == (16, True, 16 * 2 * 16 * 16)


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
    assert sorted(kernels(plans(3, 64))) == sorted(["conv_int8_stem", *every])  # of the taps that were gathered
    for n, other in ((72, {}), (64, {"out": _C.ConvOutput.int32}), (64, {"y": 4104}), (64, {"padding": 1})):
        assert kernels(plans(70, n, **(product | other))) == without
    assert kernels(plans(70, 64, **product, device=A100)) == without[1:]
    tiles = [(p.block_m, p.block_n, p.cluster_size, p.grid) for p in plans(70, 256, **product) if p.kernel == every[1]]
    assert sorted(tiles) == [(64, 64, 1, 28), (128, 128, 2, 8), (128, 256, 2, 4)]
    few = plans(70, 256, **product, device=_C.Device(90, 3, 232448))
    assert sorted(plan.grid for plan in few if plan.kernel == every[1]) == [2, 2, 3]


def test_a_product_gets_the_plan_of_least_predicted_time() -> None:
    """As they were measured for 4096 x 4096: collectives for few rows and for many."""
    chosen = {}
    for size in (1, 8, 12, 45):  # of two images
        ordered = plans(4096, 4096, kernel=1, padding=0, size=size)
        predicted = [p.predicted_clocks for p in ordered if p.kernel != "conv_int8_implicit_gemm"]
        assert predicted == sorted(predicted)
        chosen[size] = (ordered[0].kernel, ordered[0].block_m, ordered[0].block_n)
    assert chosen[1] == chosen[8] == ("gemm_int8_collective", 64, 64)
    assert chosen[12][0] == "conv_int8_wgmma"
    assert chosen[45] == ("gemm_int8_collective", 128, 128)


def test_tiles_of_implicit_gemms_are_small_where_there_are_few() -> None:
    assert plans(256, 64, device=A100)[0].block_m == 64
    assert plans(256, 256, device=A100, size=112)[0].block_m == 256
    assert plans(256, 256, device=A100, size=112)[0].grid == 2 * 112 * 112 // 256 * 2


def test_tiles_that_span_more_than_32_bits_are_refused() -> None:
    """CUTLASS's iterators multiply in 32 bits. TMA does not."""
    wide: dict[str, Any] = {"kernel": 1, "padding": 0, "size": 2}
    without = ["conv_int8_wgmma", "gemm_int8_collective"]
    assert sorted(kernels(plans(2**21 + 2**20, 16, **wide))) == ["conv_int8_implicit_gemm", *without]
    assert sorted(kernels(plans(2**23, 16, **wide))) == without
    with pytest.raises(ValueError, match=r"a tile reads more than 2\^31 bytes"):
        plans(2**23, 16, **wide, device=A100)
