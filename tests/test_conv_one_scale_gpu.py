"""Convolutions of floats that get one scale, by the kernels of int8 convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops.ops import conv_gpu
from cutlass_ops.reference import conv as reference_conv
from cutlass_ops.reference.conv import Geometry

pytestmark = pytest.mark.gpu

# Channels, output channels; kernel, stride, padding, dilation; image.
CONVOLUTIONS: dict[str, tuple[tuple[int, int], Any, Any, Any, Any, tuple[int, ...]]] = {
    "64 channels": ((64, 64), (3, 3), (1, 1), (1, 1), (1, 1), (28, 27)),
    "320 channels": ((320, 320), (3, 3), (1, 1), (1, 1), (1, 1), (32, 31)),
    "steps": ((96, 128), (3, 3), (2, 2), (1, 1), (1, 1), (28, 27)),
    "odd channels": ((20, 72), (3, 3), (1, 1), (1, 1), (1, 1), (9, 8)),
    "9 channels": ((9, 8), (3, 2), (1, 2), (2, 1), (1, 2), (13, 11)),
    "1 x 1": ((64, 256), (1, 1), (1, 1), (0, 0), (1, 1), (30, 30)),
    "slices of channels": ((600, 72), (3, 3), (1, 1), (1, 1), (1, 1), (9, 8)),
    "a line": ((80, 48), (3,), (2,), (1,), (1,), (300,)),
    "dilated": ((48, 40), (3, 3), (1, 1), (4, 6), (4, 3), (12, 13)),
    "padding beyond the image": ((16, 24), (3, 3), (1, 2), (5, 2), (3, 2), (2, 1)),
    "an image of one pixel": ((32, 64), (3, 3), (1, 1), (3, 3), (1, 1), (1, 1)),
}
DEVICES = {"own": None, "of 3 SMs": (90, 3, 232448)}


def exact(
    x: Tensor,
    w: Tensor,
    scales: Tensor,
    geometry: Geometry,
    bias: Tensor | None,
    symmetric: bool,
) -> Tensor:
    """The sums scaled, plus the bias, in fp64; integers by torch's convolution of fp64."""
    x, levels = x.float(), 127 if symmetric else 255
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    span = x.abs().amax() if symmetric else high - low
    scale, reciprocal = span / levels, levels / span
    zero = 0.0 if symmetric else float((-128 - low * reciprocal).round().clamp(-128, 127))
    least = -127 if symmetric else -128
    codes = ((x * reciprocal).round() + zero).clamp(least, 127) - zero
    convolve = {1: torch.conv1d, 2: torch.conv2d}[len(geometry.stride)]
    sums = convolve(codes.double(), w.double(), None, *geometry[:3])
    shape = (1, -1, *[1] * len(geometry.stride))
    y = sums * (scale * scales.float()).double().view(shape)
    return y if bias is None else y + bias.double().view(shape)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_every_plan_rounds_the_exact_sums_once(
    kind: str,
    dtype: torch.dtype,
    symmetric: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (c, n), kernel, stride, padding, dilation, space = CONVOLUTIONS[kind]
    torch.manual_seed(0)
    quantized = co.quantize(torch.randn(n, c, *kernel) / 30, bits=8, group_size=-1)
    packed = co.reorder(quantized).to("cuda")
    convolve = co.mixed_conv1d if len(kernel) == 1 else co.mixed_conv2d
    x = (torch.randn(3, c, *space, device="cuda") + 0.7).to(dtype)
    w = (quantized.codes.int() - 128).view(n, *kernel, c).movedim(-1, 1).cuda()
    scales = quantized.scales[:, 0].cuda()
    known, plans = DEVICES[device], _C.ConvProblem.supported_plans
    counts: list[int] = []

    def one(problem: _C.ConvProblem, own: _C.Device) -> list[_C.ConvPlan]:
        found = plans(problem, own if known is None else _C.Device(*known))
        counts.append(len(found))
        return found[index : index + 1]

    monkeypatch.setattr(_C.ConvProblem, "supported_plans", one)
    monkeypatch.setattr(conv_gpu, "_is_faster_by_int8", lambda *_: True)
    monkeypatch.setattr(conv_gpu, "_by_products", None)
    geometry = Geometry(stride, padding, dilation, 1)
    for bias, activation in (
        (None, None),
        (torch.randn(n, device="cuda"), "relu"),
        (torch.randn(n, device="cuda").to(dtype), ("clamp", -0.5, 0.75)),
    ):
        expected = exact(x, w, scales, geometry, bias, symmetric)
        if activation is not None:
            limits = (0.0, None) if activation == "relu" else activation[1:]
            expected = expected.clamp(*limits)
        index = 0
        while True:
            packed.conv_launches.clear()
            y = convolve(
                x, packed, bias, *geometry, activation=activation,
                act_quant="tensor", act_symmetric=symmetric,
            )  # fmt: skip
            assert y.dtype == dtype
            # Half a unit of the result's type, and fp32's rounding of sums, scale and bias.
            error, top = (y.double() - expected).abs(), expected.abs()
            half = torch.finfo(dtype).eps / 2
            assert (error <= half * top + 1e-6 * top.max()).all(), (index, error.max())
            index += 1
            if index == counts[-1]:
                break
    assert counts[-1] >= 2


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_values_are_the_references(symmetric: bool) -> None:
    """By the reference itself, which the test above does not call."""
    torch.manual_seed(0)
    quantized = co.quantize(torch.randn(64, 40, 3, 3) / 30, bits=8, group_size=-1)
    x, geometry = torch.randn(2, 40, 9, 8).half(), Geometry((1, 1), (1, 1), (1, 1), 1)
    options: dict[str, Any] = {"act_quant": "tensor", "act_symmetric": symmetric}
    y = co.mixed_conv2d(x.cuda(), co.reorder(quantized).to("cuda"), padding=1, **options)
    expected = reference_conv.mixed_conv(x, quantized, geometry, **options).movedim(-1, 1)
    torch.testing.assert_close(y.cpu(), expected.half(), rtol=1e-3, atol=1e-5)


def test_codes_that_are_written_to_are_seen() -> None:
    first, second = (
        co.reorder(co.quantize(torch.randn(64, 64, 3, 3), bits=8, group_size=-1)).to("cuda")
        for _ in range(2)
    )
    x = torch.randn(2, 64, 9, 8, device="cuda").half().to(memory_format=torch.channels_last)

    def convolve(weight: co.PackedWeight) -> Tensor:
        return co.mixed_conv2d(x, weight, padding=1, act_quant="tensor")

    before, expected = convolve(first), convolve(second)
    assert len(first.conv_launches) == 1
    assert torch.equal(convolve(first), before)
    first.codes.copy_(second.codes)
    first.scales.copy_(second.scales)
    assert torch.equal(convolve(first), expected)


def test_a_pixel_that_is_not_finite_makes_all_results_nan() -> None:
    """All pixels share its scale."""
    packed = co.reorder(co.quantize(torch.randn(64, 64, 3, 3), bits=8, group_size=-1)).to("cuda")
    for bad in (torch.inf, torch.nan):
        for symmetric in (True, False):
            x = torch.randn(1, 64, 20, 20, device="cuda").half()
            x[0, 5, 2, 4] = bad
            y = co.mixed_conv2d(
                x, packed, padding=1, activation="relu", act_quant="tensor", act_symmetric=symmetric
            )
            assert y.isnan().all()
    zeros = torch.zeros(1, 64, 20, 20, device="cuda").half()
    assert not co.mixed_conv2d(zeros, packed, padding=1, act_quant="tensor").any()
