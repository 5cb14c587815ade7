"""The specification of convolutions, in plain torch, on any device.

Mixed convolutions are products of the pixels under the kernel, gathered tap by tap, with the matrix ``[N, taps * C]``: their
sums are those of ``reference.py``, whose rules hold. Static int8 convolutions are sums of integers, scaled once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import formats, reference
from .weight import QuantizedWeight

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True)
class Geometry:
    """How a kernel goes over x: one number of each for each dimension of space.

    Attributes:
        stride, padding, dilation: as torch has them.
        groups: into how many the channels of x and the output features are split.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def out(self, space: Sequence[int], kernel_size: Sequence[int]) -> tuple[int, ...]:
        """Extents of the result."""
        extents = zip(space, kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return tuple((size + 2 * pad - dilation * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, dilation in extents)


def gather_taps(x: Tensor, kernel_size: Sequence[int], geometry: Geometry, missing: float = 0) -> Tensor:
    """The pixels under the kernel at each of its places, ``[B, *out, taps, C]``, of x ``[B, C, *space]``.

    Args:
        x: of any dtype.
        kernel_size: extents of the kernel.
        geometry: of the convolution; its groups mean nothing here.
        missing: what stands where there are no pixels.
    """
    dims = len(kernel_size)
    x = F.pad(x, [pad for extent in reversed(geometry.padding) for pad in (extent, extent)], value=missing)
    for dim in range(dims):
        span = geometry.dilation[dim] * (kernel_size[dim] - 1) + 1
        x = x.unfold(2 + dim, span, geometry.stride[dim])[..., :: geometry.dilation[dim]]
    # [B, C, *out, *kernel]
    order = (0, *range(2, 2 + 2 * dims), 1)
    return x.permute(order).flatten(1 + dims, 2 * dims)


def _matrix(qw: QuantizedWeight, rows: slice, channels: int) -> QuantizedWeight:
    """Some rows of a convolution's weight as a matrix, the channels of each tap padded with codes of value zero."""
    c = qw.k // qw.taps
    codes = qw.codes[rows].view(-1, qw.taps, c)
    vectors = {name: getattr(qw, name) for name in ("scales", "zeros", "offsets", "bias")}
    changed: dict[str, Any] = {name: vector[rows] for name, vector in vectors.items() if vector is not None}
    # What the codes of padding stand for means nothing: x is zero there.
    changed["codes"] = F.pad(codes, (0, channels - c)).flatten(1)
    return replace(qw, kernel_size=(), **changed)


def _quantized_taps(
    x: Tensor, geometry: Geometry, qw: QuantizedWeight, act_quant: str, symmetric: bool, channels: int, group: int
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Codes, scales and zeros of the pixels under the kernel, rows of a matrix, and the block that they are quantised in.

    ``group`` says which of the convolution's groups; codes are padded to ``channels`` a tap.
    """
    c = qw.k // qw.taps
    pixels = x.movedim(1, -1)
    own = pixels[..., group * c : (group + 1) * c]
    if act_quant == "block":
        block = formats.activation_block(qw.group_size)
        codes, scales, zeros = reference.quantize_activations(own.reshape(-1, c), block, symmetric)
        # Of the padding behind the channels, too.
        scales = F.pad(scales, (0, channels // block - scales.shape[1]), value=1.0)
        zeros = None if zeros is None else F.pad(zeros, (0, channels // block - zeros.shape[1]))
    else:
        block = channels
        rows = pixels.reshape(-1, x.shape[1]) if act_quant == "token" else pixels.reshape(1, -1)
        if rows.shape[1] == 0:
            codes, scales, zeros = rows.to(torch.int8), rows.new_ones(1, 1, dtype=torch.float32), None
        else:
            codes, scales, zeros = reference.quantize_activations(rows, -1, symmetric)
        codes = codes.view(*pixels.shape)[..., group * c : (group + 1) * c].reshape(-1, c)
        scales = scales.expand(len(codes), -1)
        zeros = None if zeros is None else zeros.expand(len(codes), -1)

    def taps(rows: Tensor, missing: float = 0) -> Tensor:
        image = rows.reshape(*pixels.shape[:-1], rows.shape[1]).movedim(-1, 1)
        return gather_taps(image, qw.kernel_size, geometry, missing).flatten(0, -3)

    gathered, gathered_zeros = taps(codes), None if zeros is None else taps(zeros)
    padded = F.pad(gathered, (0, channels - c))
    if gathered_zeros is not None:
        # Codes of value zero in the padding.
        padded[..., c:] = gathered_zeros.repeat_interleave(block, -1)[..., c:]
    return (
        padded.flatten(1),
        taps(scales, 1.0).flatten(1),
        None if gathered_zeros is None else gathered_zeros.flatten(1),
        block,
    )


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
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``activation(conv(x, W) + bias) + residual``, ``[B, *out, N]``.

    Args:
        x: fp16, bf16 or fp32 ``[B, C * groups, *space]``.
        qw: the weight ``[N, C, *kernel]``; its bias is added.
        geometry: stride, padding, dilation, groups. Where a pixel is missing, x is zero, exactly.
        act_quant: "none": x as it is, by :func:`reference.mixed_gemm`. Else :func:`reference.quantize_activations` gives
            int8 codes and :func:`reference.gemm_quantized` the product, with one scale (and zero point) for all of x
            ("tensor"), for each pixel over the channels of all groups ("token"), or for each pixel and
            :func:`cutlass_ops.formats.activation_block` channels of a group ("block").
        act_symmetric: whether there are no zero points.
        bias, activation, residual: see :func:`reference.epilogue`; residual is ``[B, *out, N]``.
        out_dtype: dtype of the result; x's if None.
        compute_dtype: fp32, or fp64 for an oracle.
    """
    c, n = qw.k // qw.taps, qw.n // geometry.groups
    space = geometry.out(x.shape[2:], qw.kernel_size)
    # A multiple of blocks and of groups: then no tap shares one with the next.
    step = 1 if act_quant != "block" and qw.group_size == -1 else max(formats.activation_block(qw.group_size), qw.group_size)
    channels = -(-c // step) * step
    out_dtype = x.dtype if out_dtype is None else out_dtype
    y = torch.empty(*(x.shape[0], *space), qw.n, dtype=out_dtype, device=x.device)
    for group in range(geometry.groups):
        rows = slice(group * n, (group + 1) * n)
        weight = _matrix(qw, rows, channels)
        end: dict[str, Any] = {
            "bias": None if bias is None else bias[rows],
            "activation": activation,
            "residual": None if residual is None else residual[..., rows].reshape(-1, n),
            "out_dtype": out_dtype,
            "compute_dtype": compute_dtype,
        }
        if act_quant == "none":
            own = x[:, group * c : (group + 1) * c]
            taps = F.pad(gather_taps(own, qw.kernel_size, geometry), (0, channels - c)).flatten(-2).flatten(0, -2)
            part = reference.mixed_gemm(taps, weight, **end)
        else:
            quantized = _quantized_taps(x, geometry, qw, act_quant, act_symmetric, channels, group)
            part = reference.gemm_quantized(*quantized[:3], quantized[3], weight, **end)
        y[..., rows] = part.view(x.shape[0], *space, n)
    return y


# ---- static int8


def requantize_scales(x_scale: float, w_scales: Tensor, y_scale: float) -> Tensor:
    """``fl32(fl32(x_scale * w_scale) / y_scale)``, fp32 ``[N]``; the numbers are first rounded to fp32."""
    product = w_scales.float() * w_scales.new_full((), x_scale, dtype=torch.float32)
    return torch.div(product, product.new_full((), y_scale))


def round_bias(bias: Tensor, x_scale: float, w_scales: Tensor) -> Tensor:
    """A float bias as int32: ``rint(fl32(bias / fl32(x_scale * w_scale)))``, saturated, NaN as 0."""
    steps = torch.div(bias.float(), requantize_scales(x_scale, w_scales, 1.0))
    return steps.nan_to_num(0.0).round().double().clamp(INT32.min, INT32.max).to(torch.int32)


def conv_int8(
    x: Tensor,
    qw: QuantizedWeight,
    geometry: Geometry,
    *,
    x_zero_point: int,
    bias: Tensor | None,
    scales: Tensor | None,
    y_zero_point: int,
    low: int,
    high: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """A convolution of integers with static scales, ``[B, *out, N]``; without dimensions of space, a product ``[B, N]``.

    ``acc = sum over the taps that lie inside of (x - zx) * w + bias``, int32 (sums beyond it wrap), and
    ``y = clamp(rint(fl32(float(acc) * m)) + zy, low, high)``: one product, rounded half to even, then the sum of integers.
    A product that is NaN counts as 0.

    Args:
        x: int8 or uint8 ``[B, C * groups, *space]``.
        qw: 8 bits, symmetric, one scale a row: codes ``w + 128``.
        geometry: stride, padding, dilation, groups.
        x_zero_point: zx.
        bias: int32 ``[N]`` or None.
        scales: m, fp32 ``[N]``; None returns acc.
        y_zero_point, low, high: zy and the limits of y.
        out_dtype: int8, uint8 or int32.
    """
    integers = x.double() - x_zero_point
    codes = qw.codes.double() - formats.midpoint(qw.bits)
    if qw.kernel_size:
        weight = codes.view(qw.n, *qw.kernel_size, -1).movedim(-1, 1).contiguous()
        convolve: Any = _CONVOLUTIONS[len(qw.kernel_size)]
        # fp64 holds these sums exactly, in whatever order they are taken.
        sums = convolve(integers, weight, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        sums = sums.movedim(1, -1)
    else:
        sums = integers @ codes.t()
    acc = sums.to(torch.int64)
    if bias is not None:
        acc = acc + bias
    acc = acc.to(torch.int32)
    if scales is None:
        return acc.to(out_dtype)
    scaled = (acc.float() * scales).nan_to_num(0.0).round().double() + y_zero_point
    return scaled.clamp(low, high).to(out_dtype)


def quantized_limits(
    activation: reference.Activation, y_scale: float, y_zero_point: int, out_dtype: torch.dtype
) -> tuple[int, int]:
    """The limits of y that an activation leaves of those of its dtype: a bound b is ``rint(fl32(b / y_scale)) + zy``."""
    info = torch.iinfo(out_dtype)
    bounds = {None: (-math.inf, math.inf), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
    low, high = activation[1:] if isinstance(activation, tuple) else bounds[activation]
    steps = torch.div(torch.tensor([low, high], dtype=torch.float32), torch.tensor(y_scale, dtype=torch.float32))
    limits = (steps.round().double() + y_zero_point).clamp(info.min, info.max)
    return int(limits[0]), int(limits[1])
