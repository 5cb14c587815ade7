"""Convolutions on a GPU: the reference's values, static int8 bit for bit, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.reference import conv as reference_conv
from cutlass_ops.reference.conv import Geometry

pytestmark = pytest.mark.gpu

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "group_size": 128},
    "int4 with zero points": {"bits": 4, "group_size": 32, "symmetric": False},
    "int4 in long groups": {"bits": 4, "group_size": 256, "symmetric": False},
    "int8": {"bits": 8, "group_size": -1},
    "int8 with zero points": {"bits": 8, "group_size": 64, "symmetric": False},
}
KERNELS = {1: (4,), 2: (3, 2), 3: (2, 3, 1)}
CONVOLUTIONS = {1: co.mixed_conv1d, 2: co.mixed_conv2d, 3: co.mixed_conv3d}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(quantized: co.QuantizedWeight, x: torch.Tensor, geometry: Geometry, **options: Any) -> None:
    """Two runs with fp32 results, each element within the rounding of fp32 sums."""
    convolve, packed = CONVOLUTIONS[len(quantized.kernel_size)], co.reorder(quantized).to("cuda")
    y = convolve(x.cuda(), packed, None, *geometry, out_dtype=torch.float32, **options)
    assert torch.equal(y, convolve(x.cuda(), packed, None, *geometry, out_dtype=torch.float32, **options))
    assert y.movedim(1, -1).is_contiguous()
    expected = reference_conv.mixed_conv(x.float(), quantized, geometry, **options).movedim(-1, 1).double()
    error, rms = (y.cpu().double() - expected).abs(), expected.square().mean().sqrt()
    assert error.norm() <= 1e-6 * expected.norm()
    assert (error <= 1e-5 * rms).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("act_quant", ["none", "token", "block", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_values_are_the_references(kind: str, dims: int, groups: int, act_quant: str, symmetric: bool) -> None:
    if act_quant == "none" and not symmetric:
        return
    quantized = co.quantize(torch.randn(128, 140, *KERNELS[dims]) / 30, **FORMATS[kind])
    geometry = Geometry((2, 1, 3)[:dims], (1, 0, 2)[:dims], (1, 2, 1)[:dims], groups)
    x = (torch.randn(2, 140 * groups, *(9, 8, 7)[:dims]) + 0.3).half()
    check(quantized, x, geometry, act_quant=act_quant, act_symmetric=symmetric, activation="silu")


@pytest.mark.parametrize("act_quant", ["none", "token"])
@pytest.mark.parametrize(("n", "groups"), [(54, 27), (96, 3)])
def test_groups_of_few_output_channels(act_quant: str, n: int, groups: int) -> None:
    quantized = co.quantize(torch.randn(n, 54 // groups, 3, 3), bits=8, group_size=-1)
    check(quantized, torch.randn(2, 54, 9, 8).half(), Geometry((2, 2), (1, 1), (1, 1), groups), act_quant=act_quant)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("groups", [1, 2])
def test_fp32_as_it_is(kind: str, groups: int) -> None:
    quantized = co.quantize(torch.randn(128, 140, 3, 2) / 30, **FORMATS[kind])
    geometry = Geometry((2, 1), (1, 0), (1, 2), groups)
    check(quantized, torch.randn(2, 140 * groups, 9, 8) + 0.3, geometry, activation="silu")


def test_many_pixels() -> None:
    quantized = co.quantize(torch.randn(192, 64, 3, 3) / 24, bits=4, group_size=64)
    check(quantized, torch.randn(3, 64, 40, 41).half(), Geometry((1, 1), (1, 1), (1, 1), 1), act_quant="block")


@pytest.mark.parametrize("kind", FORMATS)
def test_dequantize(kind: str) -> None:
    quantized = co.quantize(torch.randn(70, 140, 3, 2), **FORMATS[kind])
    packed = co.reorder(quantized).to("cuda")
    assert torch.equal(co.dequantize(packed).cpu(), co.dequantize(quantized))
    assert torch.equal(packed.unpack().codes.cpu(), quantized.codes)


@pytest.mark.parametrize("out_dtype", [torch.int8, torch.uint8, torch.int32])
def test_static_int8(out_dtype: torch.dtype) -> None:
    x = torch.randint(0, 256, (2, 36, 19, 18), dtype=torch.uint8)
    bias = torch.randint(-9000, 9000, (24,), dtype=torch.int32)
    numbers: dict[str, Any] = {"x_scale": 0.03, "x_zero_point": 77, "y_scale": 1.3, "y_zero_point": 5, "out_dtype": out_dtype}
    for groups in (1, 3, 12):
        packed = co.reorder(co.quantize(torch.randn(24, 36 // groups, 3, 2), bits=8, group_size=-1))
        geometry: dict[str, Any] = {"stride": (1, 2), "padding": (2, 1), "dilation": (1, 2), "groups": groups}
        y = co.conv2d_int8(x.cuda(), packed.to("cuda"), bias.cuda(), **geometry, **numbers)
        assert torch.equal(y.cpu(), co.conv2d_int8(x, packed, bias, **geometry, **numbers))
    packed = co.reorder(co.quantize(torch.randn(24, 18), bits=8, group_size=-1))
    y = co.linear_int8(x.cuda(), packed.to("cuda"), bias.cuda(), **numbers)
    assert torch.equal(y.cpu(), co.linear_int8(x, packed, bias, **numbers))


def test_gradients() -> None:
    packed = co.reorder(co.quantize(torch.randn(64, 40, 3, 3) / 20, bits=4, group_size=32))
    x = torch.randn(2, 40, 9, 8).half()
    grad = torch.randn(2, 64, 9, 8).half()
    found = []
    for device in ("cuda", "cpu"):
        own = x.to(device).requires_grad_()
        y = co.mixed_conv2d(own, packed.to(device), padding=1, activation="silu")
        found.append(torch.autograd.grad(y, own, grad.to(device))[0].float().cpu())
    assert (found[0] - found[1]).norm() <= 2e-3 * found[1].norm()


def test_a_layer_moves() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(40, 64, 3))
    packed = co.reorder(co.quantize(model[0].weight.detach(), bits=8, group_size=32))  # type: ignore[arg-type]
    co.replace_convs(model, {"0": packed})
    x = torch.randn(1, 40, 9, 8).half()
    with torch.no_grad():
        expected = model(x).float()
        y = model.cuda()(x.cuda()).float().cpu()
    assert (y - expected).norm() <= 2e-3 * expected.norm()


def test_refusals() -> None:
    packed = co.reorder(co.quantize(torch.randn(64, 40, 3, 3), bits=8, group_size=-1))
    x = torch.randn(1, 40, 9, 8)
    with pytest.raises(ValueError, match="x is on cuda:0; the weight is on cpu"):
        co.mixed_conv2d(x.half().cuda(), packed)
    with pytest.raises(ValueError, match="x is on cpu; the weight is on cuda:0"):
        co.conv2d_int8(x.to(torch.int8), packed.to("cuda"), x_scale=1.0, y_scale=1.0)
