"""The specification of convolutions, in plain torch, on any device.

A mixed convolution is torch's convolution of the dequantised x with the dequantised weight. A
static int8 convolution is a sum of integers, scaled and rounded once. Both are computed in fp64:
torch's fp32 convolutions add thousands of products one after another, which loses more precision
than a kernel may, and cuDNN may use transforms such as Winograd's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..weights import formats
from ..weights.weight import QuantizedWeight

_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
INT32 = torch.iinfo(torch.int32)


class Geometry(NamedTuple):
    """How a kernel moves over x: stride, padding and dilation of each dimension of space, and the
    convolution's groups.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def spans(self, kernel_size: Sequence[int]) -> list[int]:
        """Pixels from the first tap to the last, in each dimension."""
        return [
            dilation * (extent - 1) + 1
            for dilation, extent in zip(self.dilation, kernel_size, strict=True)
        ]

    def out(self, space: Sequence[int], kernel_size: Sequence[int]) -> list[int]:
        """Extents of the result."""
        extents = zip(space, self.spans(kernel_size), self.stride, self.padding, strict=True)
        return [(size + 2 * pad - span) // step + 1 for size, span, step, pad in extents]


def quantize_pixels(
    x: Tensor, groups: int, act_quant: str, symmetric: bool, block: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise a non-empty x ``[B, groups * C, *space]``, by
    :func:`reference.quantize_activations`.

    Args:
        x: fp16, bf16 or fp32.
        groups: of the convolution.
        act_quant: "token": one scale (and zero point) for each pixel; "block": for each pixel
            and ``block`` channels of a group, the last block of each group may be short;
            "tensor": for all of x.
        symmetric: whether there are no zero points.
        block: channels.

    Returns:
        codes int8 ``[pixels, groups, C]``, scales fp32 and zeros int8 ``[pixels, groups, blocks]``;
        one block if ``act_quant`` is not "block".
    """
    pixels = x.movedim(1, -1).reshape(-1, groups, x.shape[1] // groups)
    if act_quant == "block":
        rows = pixels.flatten(0, 1)
    else:
        rows, block = (pixels.flatten(1) if act_quant == "token" else pixels.reshape(1, -1)), -1
    codes, scales, zeros = reference.quantize_activations(rows, block, symmetric)

    def vectors(found: Tensor) -> Tensor:
        if act_quant == "block":
            return found.view(*pixels.shape[:2], -1)
        return found[:, None].expand(*pixels.shape[:2], 1)

    return codes.view(pixels.shape), vectors(scales), None if zeros is None else vectors(zeros)


def dequantized_pixels(
    x: Tensor, group_size: int, groups: int, act_quant: str, symmetric: bool, dtype: torch.dtype
) -> Tensor:
    """x, quantised as for weights in groups of ``group_size``, and dequantised."""
    if act_quant == "none" or x.numel() == 0:
        return x.to(dtype)
    block = formats.activation_block(group_size) if act_quant == "block" else -1
    block = -1 if x.shape[1] // groups <= block else block  # the same, without padding
    codes, scales, zeros = quantize_pixels(x, groups, act_quant, symmetric, block)
    zeros = None if zeros is None else zeros.flatten(0, 1)
    values = reference.dequantize_activations(
        codes.flatten(0, 1), scales.flatten(0, 1), zeros, block, dtype
    )
    return values.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


def _convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """torch's convolution, in fp64, with the channels last: ``[B, *out, N]``."""
    stride, padding, dilation, groups = geometry
    y: Tensor = _CONVOLUTIONS[x.dim() - 2](x, weight, None, stride, padding, dilation, groups)
    return y.movedim(1, -1)


def mixed_conv(
    x: Tensor,
    qw: QuantizedWeight,
    geometry: Geometry,
    *,
    bias: Tensor | None = None,
    activation: reference.Activation = None,
    act_quant: str = "none",
    act_symmetric: bool = True,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(conv(x, W) + bias) + residual``, ``[B, *out, N]``.

    The sums are rounded to fp32 before bias, activation and residual.

    Args:
        x: fp16, bf16 or fp32 ``[B, groups * C, *space]``.
        qw: the weight ``[N, C, *kernel]``; its bias is added. The values of a code book are first
            rounded to x's dtype.
        geometry: stride, padding, dilation, groups. Where a pixel is missing, x is zero, exactly.
        act_quant: "none": x as it is. Else the values that :func:`quantize_pixels`' codes stand
            for, with blocks of :func:`cutlass_ops.weights.formats.activation_block` channels.
        act_symmetric: whether quantised activations have no zero points.
        bias, activation, residual: see :func:`reference.epilogue`; residual is ``[B, *out, N]``.
        out_dtype: dtype of the result; x's if None.
    """
    if qw.book is not None:
        qw = replace(qw, book=qw.book.to(x.dtype).float())
    values = dequantized_pixels(
        x, qw.group_size, geometry.groups, act_quant, act_symmetric, torch.float64
    )
    total = _convolve(values, reference.dequantize_weight(qw, torch.float64), geometry).float()
    bias = qw.bias if bias is None else bias
    return reference.epilogue(
        total, bias, activation, residual, x.dtype if out_dtype is None else out_dtype
    )


# ---- static int8


def requantize_scales(x_scale: float, w_scales: Tensor, y_scale: float) -> Tensor:
    """``fl32(fl32(x_scale * w_scale) / y_scale)``, fp32 ``[N]``; each number is first
    rounded to fp32.
    """
    w_scales = w_scales.float()
    return torch.div(w_scales * w_scales.new_full((), x_scale), w_scales.new_full((), y_scale))


def round_bias(bias: Tensor, x_scale: float, w_scales: Tensor) -> Tensor:
    """A float bias as int32: ``rint(fl32(bias / fl32(x_scale * w_scale)))``,
    saturated, NaN as 0.
    """
    steps = torch.div(bias.float(), requantize_scales(x_scale, w_scales, 1.0))
    return steps.nan_to_num(0.0).round().double().clamp(INT32.min, INT32.max).to(torch.int32)


def check_static_activation(activation: reference.Activation) -> None:
    """Raise ``ValueError`` if :func:`limits` does not support ``activation``."""
    reference.check_activation(activation)
    if not isinstance(activation, tuple) and activation not in (None, *reference.CLAMPS):
        names = ", ".join(map(repr, reference.CLAMPS))
        raise ValueError(
            f"activation is {activation!r}; static int8 takes None, {names} and ('clamp', lo, hi)"
        )


def limits(
    activation: reference.Activation, y_scale: float, y_zero_point: int, out_dtype: torch.dtype
) -> tuple[int, int]:
    """The smallest and largest y that its dtype and the activation allow: a bound b is at
    ``rint(fl32(b / y_scale)) + zy``.

    Args:
        activation: None, "relu", "relu6" or ``("clamp", lo, hi)``.
        y_scale, y_zero_point: of y.
        out_dtype: int8 or uint8.
    """
    info = torch.iinfo(out_dtype)
    check_static_activation(activation)
    if activation is None:
        low, high = -math.inf, math.inf
    else:
        low, high = (
            activation[1:] if isinstance(activation, tuple) else reference.CLAMPS[activation]
        )
    limits_fp32 = torch.tensor([low, high], dtype=torch.float32, device="cpu")
    steps = torch.div(limits_fp32, limits_fp32.new_full((), y_scale))
    found = (steps.round().double() + y_zero_point).clamp(info.min, info.max)
    return int(found[0]), int(found[1])


def requantize(
    acc: Tensor,
    w_scales: Tensor,
    x_scale: float,
    y_scale: float,
    y_zero_point: int,
    activation: reference.Activation,
    out_dtype: torch.dtype,
) -> Tensor:
    """Requantise int32 sums ``[..., N]``:
    ``clamp(rint(fl32(float(acc) * m)) + zy, low, high)``.

    m is :func:`requantize_scales`, low and high are :func:`limits`. A product that is
    NaN counts as 0.

    Args:
        acc: int32 ``[..., N]``.
        w_scales: ``[N]``.
        x_scale, y_scale, y_zero_point, activation, out_dtype: as in
            :func:`conv_int8`; int8 or uint8.
    """
    low, high = limits(activation, y_scale, y_zero_point, out_dtype)
    scaled = acc.float().mul_(requantize_scales(x_scale, w_scales, y_scale))
    # fp32 holds the sum with zy, because the bounds come first.
    rounded = scaled.nan_to_num_(0.0).round_().clamp_(low - y_zero_point, high - y_zero_point)
    return rounded.add_(y_zero_point).to(out_dtype)


def conv_int8(
    x: Tensor,
    qw: QuantizedWeight,
    geometry: Geometry,
    *,
    x_scale: float,
    x_zero_point: int = 0,
    bias: Tensor | None = None,
    y_scale: float = 1.0,
    y_zero_point: int = 0,
    activation: reference.Activation = None,
    out_dtype: torch.dtype = torch.int8,
) -> Tensor:
    """A convolution of integers with static scales, ``[B, *out, N]``; without dimensions of space a
    product, ``[B, N]``.

    ``acc = sum over the taps that lie inside of (x - zx) * (w - zw) + bias``, int32 (sums beyond it
    wrap), and ``y = clamp(rint(fl32(float(acc) * m)) + zy, low, high)``, :func:`requantize`: one
    product, rounded half to even, then the sum of integers.

    Args:
        x: int8 or uint8 ``[B, groups * C, *space]``.
        qw: 8 bits, one scale and at most one zero point a row; its bias is added. ``w - zw`` is a
            code minus its row's zero point or, without zero points, minus 128.
        geometry: stride, padding, dilation, groups.
        x_scale, x_zero_point: zx and what one step of x means.
        bias: int32 ``[N]``, or floating (:func:`round_bias`).
        y_scale, y_zero_point, activation: of y; unused if ``out_dtype`` is int32.
        out_dtype: int8, uint8, or int32: acc itself.
    """
    # fp64 adds these without rounding, in any order.
    integers = x.double() - x_zero_point
    codes = qw.codes.double() - (
        formats.midpoint(qw.bits) if qw.zeros is None else qw.zeros.double()
    )
    if qw.kernel_size:
        weight = codes.view(qw.n, *qw.kernel_size, -1).movedim(-1, 1).contiguous()
        sums = _convolve(integers, weight, geometry)
    else:
        sums = integers @ codes.t()
    acc, scales = sums.to(torch.int64), qw.scales[:, 0]
    bias = qw.bias if bias is None else bias
    if bias is not None:
        acc = acc + (round_bias(bias, x_scale, scales) if bias.is_floating_point() else bias)
    acc = acc.to(torch.int32)
    if out_dtype == torch.int32:
        return acc
    return requantize(acc, scales, x_scale, y_scale, y_zero_point, activation, out_dtype)
