"""Static int8 convolutions and products: sums, scales, rounding and limits."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conv_int8_cases import INT8, codes, packed
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops.ops import conv_int8, library, natural_weight


def sums(
    x: Tensor, w: Tensor, zero: int, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """int64 ``[B, N, H', W']``, tap by tap."""
    (b, _, h, width), (n, c, r, s) = x.shape, w.shape
    image = torch.zeros(
        b, groups * c, h + 2 * padding[0], width + 2 * padding[1], dtype=torch.int64
    )
    image[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + width] = x.long() - zero
    high = (image.shape[2] - dilation[0] * (r - 1) - 1) // stride[0] + 1
    wide = (image.shape[3] - dilation[1] * (s - 1) - 1) // stride[1] + 1
    total = torch.zeros(b, groups, n // groups, high, wide, dtype=torch.int64)
    for i, j in itertools.product(range(r), range(s)):
        top, left = i * dilation[0], j * dilation[1]
        seen = image[
            :,
            :,
            top : top + high * stride[0] : stride[0],
            left : left + wide * stride[1] : stride[1],
        ][..., :high, :wide]
        parts = (
            seen.reshape(b, groups, c, high, wide),
            w[:, :, i, j].long().view(groups, n // groups, c),
        )
        total += (parts[0][:, :, None] * parts[1][None, ..., None, None]).sum(3)
    return total.flatten(1, 2)


def requantised(
    acc: Tensor,
    x_scale: float,
    scales: Tensor,
    y_scale: float,
    zero: int,
    dtype: torch.dtype,
    low: int | None = None,
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
    [
        (None, torch.int8),
        (None, torch.int32),
        (torch.int8, torch.uint8),
        (torch.uint8, torch.int8),
        (torch.uint8, torch.int32),
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize(
    "geometry",
    [((1, 1), (0, 0), (1, 1)), ((2, 1), (1, 3), (1, 2)), ((1, 3), (2, 2), (2, 1))],
    ids=str,
)
def test_sums_and_scales(
    x_dtype: torch.dtype,
    w_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    groups: int,
    geometry: Any,
) -> None:
    """Without zero points of w, and with those of int8 and uint8 weights."""
    w, x = codes(w_dtype or torch.int8, 24, 36 // groups, 3, 2), codes(x_dtype, 2, 36, 9, 8, seed=1)
    zeros = None if w_dtype is None else codes(w_dtype, 24, seed=4)
    zero, y_zero = (
        int(codes(x_dtype, 1, seed=2)),
        0 if out_dtype == torch.int32 else int(codes(out_dtype, 1, seed=3)),
    )
    scales, bias = (
        torch.rand(24) * 0.01 + 1e-3,
        torch.randint(-9000, 9000, (24,), dtype=torch.int32),
    )
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
    expected = (
        acc.int()
        if out_dtype == torch.int32
        else requantised(acc, 0.031, scales, 0.7, y_zero, out_dtype)
    )
    assert y.dtype == out_dtype
    assert torch.equal(y, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_sums_that_fp32_does_not_hold() -> None:
    """The largest ones of 4,608 taps and channels, and one less."""
    x, w = (
        torch.full((1, 512, 3, 3), 255, dtype=torch.uint8),
        torch.full((2, 512, 3, 3), -128, dtype=torch.int8),
    )
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
    y = co.linear_int8(
        x,
        packed(torch.ones(1, 1, dtype=torch.int8), torch.ones(1)),
        x_scale=1,
        y_scale=2.0,
        y_zero_point=zero,
    )
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
    quotient = (bias.double() / (torch.tensor(0.05) * scales).double()).float()
    steps = quotient.double().round().clamp(-(2**31), 2**31 - 1).to(torch.int32)
    y = co.conv2d_int8(x, packed(w, scales), bias, **options)
    assert torch.equal(y, co.conv2d_int8(x, packed(w, scales), steps, **options))
    assert torch.equal(y, co.conv2d_int8(x, packed(w, scales, bias), **options))


def test_a_factor_beyond_fp32_saturates_and_leaves_zero() -> None:
    weight = packed(torch.ones(1, 1, dtype=torch.int8), torch.ones(1))
    x = torch.tensor([[-2], [0], [2]], dtype=torch.int8)
    # 0 x infinity counts as 0
    y = co.linear_int8(x, weight, x_scale=1e38, y_scale=1.2e-38, y_zero_point=3)
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
    y = co.linear_int8(
        x,
        packed(w, scales),
        x_scale=0.02,
        x_zero_point=77,
        y_scale=0.3,
        y_zero_point=9,
        out_dtype=torch.uint8,
    )
    expected = requantised(acc.flatten(0, 1), 0.02, scales, 0.3, 9, torch.uint8)
    assert torch.equal(y, expected.view(2, 3, 33))
    assert co.linear_int8(x[:0], packed(w, scales), x_scale=1.0, y_scale=1.0).shape == (0, 3, 33)


def test_invalid_arguments_are_refused_with_their_values() -> None:
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
        (
            {"weight": co.reorder(co.quantize(floats, bits=4, group_size=-1))},
            ValueError,
            "the weight has bits=4",
        ),
        (
            {"weight": co.reorder(co.quantize(floats, bits=8, group_size=32))},
            ValueError,
            "group_size=32",
        ),
        (
            {"weight": co.reorder(offsets)},
            ValueError,
            "scales, offsets; static int8 takes 8 bits, .* and zero points",
        ),
        (
            {"weight": co.reorder(co.quantize(floats[:, :, 0], bits=8, group_size=-1))},
            ValueError,
            r"a kernel of \(3,\)",
        ),
        ({"x_scale": 0.0}, ValueError, "x_scale is 0.0"),
        (
            {"x_scale": 1.17549e-38},
            ValueError,
            r"x_scale is 1\.17549e-38; a number from 1\.17549e-38 to 3\.40282e\+38",
        ),
        ({"x_scale": 3.5e38}, ValueError, r"x_scale is 3\.5e\+38"),
        ({"y_scale": 1e-45}, ValueError, "y_scale is 1e-45"),
        ({"x_scale": float("nan")}, ValueError, "x_scale is nan"),
        ({"x_scale": torch.ones(1)}, TypeError, "x_scale is a Tensor"),
        ({"x_zero_point": 128}, ValueError, "x_zero_point is 128; an integer from -128 to 127"),
        ({"x_zero_point": 0.0}, ValueError, r"x_zero_point is 0\.0"),
        ({"y_scale": None}, ValueError, "y_scale is None"),
        ({"y_scale": -1.0}, ValueError, "y_scale is -1.0"),
        (
            {"y_zero_point": -1, "out_dtype": torch.uint8},
            ValueError,
            "y_zero_point is -1; an integer from 0 to 255",
        ),
        ({"activation": "silu"}, ValueError, "activation is 'silu'"),
        ({"activation": "relu", "out_dtype": torch.int32}, ValueError, "the sums themselves"),
        ({"out_dtype": torch.float32}, TypeError, "out_dtype is torch.float32"),
        ({"bias": torch.zeros(5, dtype=torch.int32)}, ValueError, r"bias has shape \(5,\)"),
        (
            {"bias": torch.zeros(6, dtype=torch.int64)},
            TypeError,
            "bias has dtype int64; supported are int32, float",
        ),
        ({"bias": torch.zeros(6, dtype=torch.int32, device="meta")}, ValueError, "bias is on meta"),
        (
            {"bias": torch.zeros(6), "weight": packed(w, torch.ones(6), torch.ones(6))},
            ValueError,
            "has one already",
        ),
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
    end = (0.1, 3, 2.5, -4, None, "relu", 0.0, 0.0, torch.uint8)
    args = (x, *library.weight_fields(weight), [3, 3], [2, 1], [1, 0], [1, 1], 1, *end)
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


@pytest.mark.parametrize("groups", [1, 24])
def test_zero_points_in_files(groups: int, tmp_path: Path) -> None:
    w, x = codes(torch.uint8, 24, 24 // groups, 3, 3), codes(torch.uint8, 2, 24, 9, 8, seed=1)
    weight = packed(w, torch.rand(24) + 0.1, zeros=codes(torch.uint8, 24, seed=2))
    co.save_packed(tmp_path / "net.safetensors", {"conv": weight})
    loaded = co.load_packed(tmp_path / "net.safetensors")["conv"]
    options: dict[str, Any] = {
        "groups": groups,
        "x_scale": 0.1,
        "x_zero_point": 9,
        "y_scale": 300.0,
    }
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


@pytest.mark.parametrize(
    ("channels", "n", "groups"), [(20, 17, 1), (3, 17, 1), (1, 12, 12), (1, 24, 12), (5, 24, 4)]
)
@pytest.mark.parametrize("fits", [True, False])
def test_kernels_multiply_by_codes_minus_zero_points(
    channels: int, n: int, groups: int, fits: bool
) -> None:
    """In each of the three orders: codes that fit int8, and the remainder of a zero point with
    which they do not.
    """
    w, zeros = codes(torch.uint8, n, channels, 3, 2), codes(torch.uint8, n, seed=1)
    if fits:
        w = (
            (zeros.short()[:, None, None, None] + codes(torch.int8, *w.shape, seed=2))
            .clamp(0, 255)
            .byte()
        )
    weight = packed(w, torch.ones(n), zeros=zeros)
    *differences, rest = natural_weight.without_zeros(weight, groups)
    operand = natural_weight.Natural(*differences)
    ones = natural_weight.ones(weight, groups)
    assert bool(rest.any()) != fits

    def natural(of: natural_weight.Natural, n: int) -> Tensor:
        order, parts = _C.conv_order(n, channels, 6, groups), of.codes
        if order == _C.ConvOrder.by_taps:
            return parts.permute(2, 0, 1, 3).reshape(n, 1, 3, 4)[..., :2]
        by_tap = (
            parts[:, : 6 * channels].view(n, 3, 2, channels)
            if order == _C.ConvOrder.flat
            else parts[..., :channels]
        )
        return by_tap.movedim(-1, 1)

    assert torch.equal(
        natural(operand, n) - rest.view(-1, 1, 1, 1), w.int() - zeros.view(-1, 1, 1, 1)
    )
    assert torch.equal(natural(ones, groups), torch.ones(groups, channels, 3, 2, dtype=torch.int8))
    assert operand.sums.tolist() == natural(operand, n).sum((1, 2, 3)).tolist()
    assert ones.sums.tolist() == [6 * channels] * groups


def test_operands_are_kept_until_codes_or_zero_points_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturing = [False]
    monkeypatch.setattr("cutlass_ops.ops.kept.captures", lambda weight: capturing[0])
    zeros = codes(torch.uint8, 64, seed=1)
    fit = (zeros.short()[:, None] + codes(torch.int8, 64, 48, seed=2)).clamp(0, 255).byte()
    unfit = fit.clone()
    unfit[:, 0], unfit[:, 1] = 0, 255
    weight, other = (packed(w, torch.ones(64), zeros=zeros) for w in (fit, unfit))

    def check(w: Tensor, fits: bool) -> natural_weight.Operand:
        operand = natural_weight.operand(weight, 1)
        assert (operand.rest is None) == (operand.ones is None) == fits
        rest = torch.zeros(64, dtype=torch.int32) if operand.rest is None else operand.rest
        assert torch.equal(
            operand.weight.codes.view(64, -1)[:, :48] - rest[:, None], w.int() - zeros[:, None]
        )
        return operand

    capturing[0] = True  # nothing waits, nor is kept
    captured = check(fit, False)
    capturing[0] = False
    with torch.inference_mode():  # what it keeps is written outside of it, too
        first = check(fit, True)
    assert captured.weight.codes.data_ptr() != first.weight.codes.data_ptr()
    assert check(fit, True).weight.codes.data_ptr() == first.weight.codes.data_ptr()
    # in the memory that CUDA graphs read
    for w, fits in ((unfit, False), (fit, True), (unfit, False)):
        weight.codes.copy_((packed(fit, torch.ones(64), zeros=zeros) if fits else other).codes)
        operand = check(w, fits)
        assert operand.weight.codes.data_ptr() == first.weight.codes.data_ptr()
    with torch.inference_mode():
        weight = packed(fit, torch.ones(64), zeros=zeros)
        check(fit, False)


@pytest.mark.parametrize("groups", [1, 4])
def test_sums_of_windows_compensate_the_rest_of_zero_points(groups: int) -> None:
    w, x, rest = (
        codes(torch.int8, 12, 8 // groups, 3, 3),
        codes(torch.uint8, 2, 8, 7, 6, seed=1),
        codes(torch.int8, 12, seed=2),
    )
    geometry = ((2, 1), (1, 2), (1, 1), groups)
    ones = torch.ones(groups, 8 // groups, 3, 3, dtype=torch.int8)
    acc, windows = (
        sums(x, weight, 77, *geometry).movedim(1, -1).int().contiguous() for weight in (w, ones)
    )
    acc[0, 0, 0, 0] += 2**31 - 1 - acc[0, 0, 0, 0]  # the compensated one may wrap
    expected = sums(x, w.short() - rest.view(-1, 1, 1, 1), 77, *geometry).movedim(1, -1)
    expected[0, 0, 0, 0] = 2**31 - 1 - int(rest[0]) * int(windows[0, 0, 0, 0])
    conv_int8._compensate(acc, windows, rest.int())
    assert torch.equal(acc, expected.int())
