"""Weights, comparisons and a fixture of the tests of convolutions on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.ops import conv_gpu, conv_torch
from cutlass_ops.reference import conv as reference_conv
from cutlass_ops.reference.conv import Geometry

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "group_size": 128},
    "int4 with zero points": {"bits": 4, "group_size": 32, "symmetric": False},
    "int4 in long groups": {"bits": 4, "group_size": 256, "symmetric": False},
    "int2": {"bits": 2, "group_size": 64, "symmetric": False},
    "int8": {"bits": 8, "group_size": -1},
    "int8 in groups of 16": {"bits": 8, "group_size": 16},
    "int8 with zero points": {"bits": 8, "group_size": 64, "symmetric": False},
}
CONVOLUTIONS = {1: co.mixed_conv1d, 2: co.mixed_conv2d, 3: co.mixed_conv3d}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test starts from the same random numbers."""
    torch.manual_seed(0)


def check(
    quantized: co.QuantizedWeight, x: torch.Tensor, geometry: Geometry, **options: Any
) -> None:
    """Two runs with fp32 results, each element within the rounding of fp32 sums."""
    convolve, packed = CONVOLUTIONS[len(quantized.kernel_size)], co.reorder(quantized).to("cuda")
    y = convolve(x.cuda(), packed, None, *geometry, out_dtype=torch.float32, **options)
    assert torch.equal(
        y, convolve(x.cuda(), packed, None, *geometry, out_dtype=torch.float32, **options)
    )
    assert y.movedim(1, -1).is_contiguous()
    expected = (
        reference_conv.mixed_conv(x.float(), quantized, geometry, **options).movedim(-1, 1).double()
    )
    error, rms = (y.cpu().double() - expected).abs(), expected.square().mean().sqrt()
    assert error.norm() <= 1e-6 * expected.norm()
    # If the result is not of x's type, torch computes groups with one scale for all channels, and
    # blocks of 16, in its own order of sums.
    act_quant = options.get("act_quant")
    by_torch = geometry.groups > 1 and act_quant in ("token", "tensor")
    by_torch |= quantized.group_size == 16 and act_quant == "block"
    assert (error <= (4e-5 if by_torch else 1e-5) * rms).all()


#: The error that weights rounded once to x's type leave: (of |y|, of y's rms).
ROUNDED = {torch.float16: (2.0**-10, 1.2e-3), torch.bfloat16: (2.0**-7, 1e-2)}


def check_rounded(
    quantized: co.QuantizedWeight,
    x: torch.Tensor,
    geometry: Geometry,
    *,
    rounds_sums: bool = False,
    **options: Any,
) -> None:
    """A result of x's 16-bit type within the bounds of operands rounded once to it; the same bits
    in a second run.

    `rounds_sums`: the sums are rounded, too, before bias, activation and residual.
    """
    convolve, packed = CONVOLUTIONS[len(quantized.kernel_size)], co.reorder(quantized).to("cuda")
    bias = options.pop("bias", None)
    y = convolve(x.cuda(), packed, bias, *geometry, **options)
    assert torch.equal(y, convolve(x.cuda(), packed, bias, *geometry, **options))
    options["bias"] = bias
    options = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    if "residual" in options:
        options["residual"] = options["residual"].movedim(1, -1)
    expected = reference_conv.mixed_conv(
        x, quantized, geometry, out_dtype=torch.float32, **options
    ).movedim(-1, 1)
    relative, absolute = ROUNDED[x.dtype]
    if options.get("act_quant", "none") != "none":
        absolute *= 2  # the values of x are rounded, too
    # The rms of the sums, not of the outputs: an activation may make these small.
    sums = reference_conv.mixed_conv(x, quantized, geometry, out_dtype=torch.float32)
    error = (y.cpu().float() - expected).abs()
    bound = relative * expected.abs() + absolute * sums.square().mean().sqrt()
    if rounds_sums:
        bound += relative * sums.movedim(-1, 1).abs()
    assert (error <= bound).all()


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take the convolution; torch's would be an error."""

    def refuse(*args: Any) -> torch.Tensor:
        raise AssertionError("no kernel took it")

    monkeypatch.setattr(conv_torch, "convolve", refuse)
    monkeypatch.setattr(conv_gpu, "LEAST_TORCH_PRODUCTS", 10**18)
