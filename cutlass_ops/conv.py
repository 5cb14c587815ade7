"""Convolutions with packed weights: of floats or quantised activations, and of static int8.

On a CPU they are the reference. On a GPU mixed convolutions gather the pixels under the kernel and call the kernels of
:func:`cutlass_ops.mixed_gemm`; static int8 is the reference there, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from . import formats, ops, reference, reference_conv
from .reference_conv import Geometry
from .weight import PackedWeight

__all__ = ["conv2d_int8", "linear_int8", "mixed_conv1d", "mixed_conv2d", "mixed_conv3d"]

#: One number for all dimensions of space, or one for each.
Extents: TypeAlias = "int | Sequence[int]"

ACT_QUANT = ("none", "token", "block", "tensor")
_INT8 = (torch.int8, torch.uint8)
_NO_GEOMETRY = Geometry((), (), (), 1)
#: fp32's smallest normal number and its largest.
_SCALES = torch.finfo(torch.float32)


# ---- arguments


def check_extents(name: str, value: Any, dims: int, least: int) -> tuple[int, ...]:
    """``value`` for each of ``dims`` dimensions of space.

    Raises:
        ValueError: it is no integer of at least ``least``, nor ``dims`` of them.
    """
    extents = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * dims
    # type() and not isinstance(): True is no number of pixels.
    if len(extents) != dims or any(type(extent) is not int or extent < least for extent in extents):
        raise ValueError(f"{name} is {value!r}; an integer of at least {least}, or {dims} of them, is expected")
    return extents


def _check_weight(weight: Any, dims: int) -> None:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; a PackedWeight (see cutlass_ops.reorder) is expected")
    if len(weight.kernel_size) != dims:
        has = f"a kernel of {weight.kernel_size}" if weight.kernel_size else "no kernel"
        raise ValueError(f"the weight of shape {list(weight.shape)} has {has}; one of {dims} dimensions is expected")


def check_geometry(weight: PackedWeight, stride: Extents, padding: Extents, dilation: Extents, groups: int) -> Geometry:
    """The arguments of torch's convolutions as numbers for each dimension.

    Raises:
        ValueError: one that means nothing for this weight; the message has its value.
    """
    dims = len(weight.kernel_size)
    if type(groups) is not int or groups < 1 or weight.n % groups:
        raise ValueError(f"groups is {groups!r}; a divisor of the weight's {weight.n} output channels is expected")
    return Geometry(
        check_extents("stride", stride, dims, 1),
        check_extents("padding", padding, dims, 0),
        check_extents("dilation", dilation, dims, 1),
        groups,
    )


def _check_image(x: Tensor, weight: PackedWeight, geometry: Geometry) -> tuple[int, ...]:
    """The shape of the result."""
    dims, channels = len(weight.kernel_size), weight.k // weight.taps * geometry.groups
    if x.dim() != dims + 2 or x.shape[1] != channels:
        space = ("L", "H, W", "D, H, W")[dims - 1]
        raise ValueError(
            f"x has shape {tuple(x.shape)}; [B, {channels}, {space}] is expected, for a weight of "
            f"{weight.k // weight.taps} channels and groups={geometry.groups}"
        )
    padded = [size + 2 * pad for size, pad in zip(x.shape[2:], geometry.padding, strict=True)]
    spans = geometry.spans(weight.kernel_size)
    if any(size < 1 for size in x.shape[2:]) or any(size < span for size, span in zip(padded, spans, strict=True)):
        raise ValueError(
            f"x has {tuple(x.shape[2:])} pixels, {tuple(padded)} with padding={geometry.padding}; the kernel "
            f"{weight.kernel_size} with dilation={geometry.dilation} takes at least {tuple(spans)}"
        )
    return x.shape[0], weight.n, *geometry.out(x.shape[2:], weight.kernel_size)


def _split(activation: reference.Activation) -> tuple[str | None, float, float]:
    """An activation as operators take it, after a check."""
    reference.check_activation(activation)
    if isinstance(activation, tuple):
        return activation[0], float(activation[1]), float(activation[2])
    return activation, 0.0, 0.0


# ---- mixed convolutions


def mixed_conv1d(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    stride: Extents = 1,
    padding: Extents = 0,
    dilation: Extents = 1,
    groups: int = 1,
    *,
    activation: reference.Activation = None,
    act_quant: str = "none",
    act_symmetric: bool = True,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`mixed_conv2d` in one dimension of space: x ``[B, groups * C, L]``, the weight ``[N, C, kernel]``."""
    geometry = (stride, padding, dilation, groups)
    return _mixed_conv(1, x, weight, bias, geometry, activation, act_quant, act_symmetric, residual, out_dtype)


def mixed_conv2d(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    stride: Extents = 1,
    padding: Extents = 0,
    dilation: Extents = 1,
    groups: int = 1,
    *,
    activation: reference.Activation = None,
    act_quant: str = "none",
    act_symmetric: bool = True,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(conv2d(x, W) + bias) + residual`` with a packed weight.

    Sums are fp32, on a CPU fp64, whatever the types; the result is rounded once. On a GPU x's channels are gathered for each
    tap, in memory of taps times the result's pixels times x's channels, and multiplied by :func:`cutlass_ops.mixed_gemm`;
    convolutions of groups of which each has a number of output channels that is no multiple of 64 are the reference there,
    which waits for the GPU. Under ``torch.autocast`` an fp32 x is cast to the autocast dtype first.

    Training: the result is differentiable in x, bias and residual; the weight is frozen. The gradient is that of
    ``torch.nn.functional.conv2d`` with :func:`cutlass_ops.dequantize`'s values, which the backward pass computes and does not
    keep; activations that ``act_quant`` quantises pass it straight through. There are no gradients of gradients.

    Args:
        x: fp16, bf16 or fp32 ``[B, groups * C, H, W]`` on the weight's device (on a GPU fp32 takes an ``act_quant``), in any
            memory format.
        weight: what :func:`cutlass_ops.reorder` returned for a weight ``[N, C, R, S]``.
        bias: fp16, bf16 or fp32 ``[N]``, if the weight has none of its own.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``: a number, or one for each dimension. Pixels of
            the padding are exact zeros, with zero points too.
        activation: as in :func:`cutlass_ops.mixed_gemm`.
        act_quant: "none" multiplies x as it is. The others quantise it to int8: "token" with one scale for each pixel over its
            channels, "block" for each pixel and min(group_size, 128) channels, "tensor" for all of x.
        act_symmetric: whether quantised activations have no zero point.
        residual: fp16, bf16 or fp32, of the result's shape, added last.
        out_dtype: fp16, bf16 or fp32; x's dtype if None.

    Returns:
        ``[B, N, H', W']`` of ``out_dtype``; in memory the channels are last.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is computed; the message has its value.
        RuntimeError: a gradient of the weight is asked for; or torch.jit.trace, forward-mode differentiation or a transform of
            torch.func is at work.
    """
    geometry = (stride, padding, dilation, groups)
    return _mixed_conv(2, x, weight, bias, geometry, activation, act_quant, act_symmetric, residual, out_dtype)


def mixed_conv3d(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    stride: Extents = 1,
    padding: Extents = 0,
    dilation: Extents = 1,
    groups: int = 1,
    *,
    activation: reference.Activation = None,
    act_quant: str = "none",
    act_symmetric: bool = True,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`mixed_conv2d` in three dimensions of space: x ``[B, groups * C, D, H, W]``, the weight ``[N, C, T, R, S]``."""
    geometry = (stride, padding, dilation, groups)
    return _mixed_conv(3, x, weight, bias, geometry, activation, act_quant, act_symmetric, residual, out_dtype)


def _mixed_conv(
    dims: int,
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    geometry: tuple[Extents, Extents, Extents, int],
    activation: reference.Activation,
    act_quant: str,
    act_symmetric: bool,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    _check_weight(weight, dims)
    checked = check_geometry(weight, *geometry)
    ops._check_float("x", x, weight.device)
    ops._check_device(weight.device)
    ops._check_transforms(f"mixed_conv{dims}d", x, bias, residual)
    differentiable = is_grad_enabled() and any(map(ops._requires_grad, (x, bias, residual)))
    if is_grad_enabled():
        ops._check_frozen(weight)
    if x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    shape = _check_image(x, weight, checked)
    if act_quant not in ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are {', '.join(map(repr, ACT_QUANT))}")
    if weight.book is not None and act_quant != "none":
        raise ValueError(f"{reference.BOOK_NEEDS_FLOATS}; act_quant is {act_quant!r}")
    call = _split(activation)
    if bias is not None:
        ops._check_bias(bias, weight)
    if residual is not None:
        ops._check_residual(residual, weight, shape)
    if out_dtype is not None and out_dtype not in ops._TYPES:
        raise TypeError(f"out_dtype is {out_dtype}; supported are {ops._names(ops._TYPES)}")
    if x.is_cuda and x.dtype is torch.float32 and act_quant == "none":
        raise TypeError(
            "x is float32 with act_quant='none'; on a GPU that takes float16 or bfloat16 (float32 with a quantised x)"
        )
    if x.is_cuda and math.prod(shape) // weight.n > ops._MAX_M:
        raise ValueError(f"the result has shape {shape}; at most {ops._MAX_M} pixels of all images are supported")
    end = (bias, *call, residual, x.dtype if out_dtype is None else out_dtype, *checked, act_quant, act_symmetric)
    if not differentiable and ops._direct(x, bias, residual):
        return _run(x, weight, *end)
    return cast(Tensor, torch.ops.cutlass_ops.mixed_conv(x, *ops._fields(weight), weight.kernel_size, *end))


def _run(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    low: float,
    high: float,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    act_quant: str,
    act_symmetric: bool,
) -> Tensor:
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    options: dict[str, Any] = {
        "bias": bias,
        "activation": ops._named_activation(activation, low, high),
        "act_quant": act_quant,
        "act_symmetric": act_symmetric,
        "residual": None if residual is None else residual.movedim(1, -1),
        "out_dtype": out_dtype,
    }
    with ops._without_autocast(x.device):
        if weight.gpu >= 0 and (groups == 1 or weight.n // groups % formats.ROWS_PER_SLAB == 0):
            y = by_products(x, weight, geometry, **options)
        else:
            y = reference_conv.mixed_conv(x.detach(), weight.unpack(), geometry, **options)
    return y.contiguous().movedim(-1, 1)


# ---- by products of gathered pixels


def _gather_taps(images: Tensor, kernel_size: Sequence[int], geometry: Geometry, missing: float = 0) -> Tensor:
    """The pixels under the kernel at each of its places, ``[pixels of the result, taps, C]``, of images ``[B, *space, C]``.

    ``missing`` stands where there are no pixels.
    """
    dims = len(kernel_size)
    edges = [pad for extent in reversed(geometry.padding) for pad in (extent, extent)]
    images = F.pad(images, [0, 0, *edges], value=missing)
    for dim, span in enumerate(geometry.spans(kernel_size)):
        images = images.unfold(1 + dim, span, geometry.stride[dim])[..., :: geometry.dilation[dim]]
    # [B, *out, C, *kernel]
    taps = images.movedim(1 + dims, -1)
    return taps.flatten(1 + dims, 2 * dims).flatten(0, dims)


def _gather_quantized(
    x: Tensor, weight: PackedWeight, geometry: Geometry, act_quant: str, act_symmetric: bool
) -> list[ops.QuantizedActivations]:
    """x, quantised, as rows that :attr:`PackedWeight.matrix` can be multiplied by, for each group of the convolution."""
    columns = weight.matrix.k // weight.taps
    block = formats.activation_block(weight.group_size)
    codes, scales, zeros = reference_conv.quantize_pixels(x, geometry.groups, act_quant, act_symmetric, block)

    def blocks(vectors: Tensor, filling: float) -> Tensor:
        """A vector for each block of the padded channels."""
        if act_quant != "block":
            return vectors.expand(*vectors.shape[:2], columns // block)
        return F.pad(vectors, (0, columns // block - vectors.shape[2]), value=filling)

    def rows(pixels: Tensor, group: int, missing: float = 0) -> Tensor:
        images = pixels[:, group].view(x.shape[0], *x.shape[2:], -1)
        return _gather_taps(images, weight.kernel_size, geometry, missing).flatten(1)

    scales = blocks(scales, 1.0)
    padded = F.pad(codes, (0, columns - codes.shape[2]))
    if zeros is not None:
        zeros = blocks(zeros, 0)
        # The padding's codes stand for zero.
        padded[..., codes.shape[2] :] = zeros.repeat_interleave(block, 2)[..., codes.shape[2] :]
    return [
        _in_kernel_order(
            rows(padded, group), rows(scales, group, 1.0), None if zeros is None else rows(zeros, group), block, x.dtype
        )
        for group in range(geometry.groups)
    ]


def _in_kernel_order(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype
) -> ops.QuantizedActivations:
    """The inverse of :meth:`ops.QuantizedActivations.natural`."""
    m, k = codes.shape

    def ordered(vectors: Tensor) -> Tensor:
        return F.pad(vectors.t(), (0, -m % 16)).contiguous()

    return ops.QuantizedActivations(
        codes=reference.activation_order(codes, zeros, block),
        scales=ordered(scales),
        zeros=None if zeros is None else ordered(zeros),
        block=block,
        k=k,
        shape=codes.shape,
        dtype=dtype,
        perm=None,
    )


def by_products(
    x: Tensor,
    weight: PackedWeight,
    geometry: Geometry,
    *,
    bias: Tensor | None,
    activation: reference.Activation,
    act_quant: str,
    act_symmetric: bool,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """What :func:`reference_conv.mixed_conv` computes, by :func:`cutlass_ops.mixed_gemm`.

    The output channels of each of the convolution's groups are a multiple of 64, or there is one group.
    """
    n, c = weight.n // geometry.groups, weight.k // weight.taps
    y = torch.empty(x.shape[0], *geometry.out(x.shape[2:], weight.kernel_size), weight.n, dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    matrix = weight.matrix
    quantized = None if act_quant == "none" else _gather_quantized(x, weight, geometry, act_quant, act_symmetric)
    for group in range(geometry.groups):
        rows = slice(group * n, (group + 1) * n)
        if quantized is None:
            images = x[:, group * c : (group + 1) * c].movedim(1, -1)
            taps = _gather_taps(images, weight.kernel_size, geometry)
            gathered: Any = F.pad(taps, (0, matrix.k // weight.taps - c)).flatten(1)
        else:
            gathered = quantized[group]
        part = ops.mixed_gemm(
            gathered,
            matrix if geometry.groups == 1 else matrix.row_panels(rows.start, rows.stop),
            None if bias is None else bias[rows],
            activation,
            residual=None if residual is None else residual[..., rows].reshape(-1, n),
            out_dtype=out_dtype,
        )
        y[..., rows] = part.view(*y.shape[:-1], n)
    return y


# ---- static int8


def conv2d_int8(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    stride: Extents = 1,
    padding: Extents = 0,
    dilation: Extents = 1,
    groups: int = 1,
    x_scale: float,
    x_zero_point: int = 0,
    y_scale: float | None = None,
    y_zero_point: int = 0,
    activation: reference.Activation = None,
    out_dtype: torch.dtype = torch.int8,
) -> Tensor:
    """A convolution of integers with scales that are known beforehand, as ONNX's QLinearConv.

    ``acc`` is the int32 sum of ``(x - x_zero_point) * w`` over the taps that lie inside of x, plus the bias. The result is
    ``clamp(rint(float(acc) * m) + y_zero_point)`` with ``m = x_scale * w_scale / y_scale``, each operation rounded to fp32 by
    itself, ``rint`` half to even; bit for bit what ONNX Runtime's QLinearConv computes. On a GPU this is computed in fp64, and
    waits for the GPU.

    Args:
        x: int8 or uint8 ``[B, groups * C, H, W]`` on the weight's device.
        weight: packed, ``[N, C, R, S]``, 8 bits, symmetric, one scale a row (``group_size=-1``).
        bias: int32 ``[N]``, in steps of ``x_scale * w_scale``; or floating, as the weight's own bias is, which is rounded to
            that.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``.
        x_scale, x_zero_point: what codes of x mean: ``x_scale * (code - x_zero_point)``.
        y_scale, y_zero_point: the same of the result; unused if it is int32.
        activation: None, "relu", "relu6" or ``("clamp", lo, hi)``; bounds are rounded to codes of the result.
        out_dtype: torch.int8, torch.uint8, or torch.int32 for ``acc`` itself, without an activation.

    Returns:
        ``[B, N, H', W']`` of ``out_dtype``; in memory the channels are last.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is computed; the message has its value.
        RuntimeError: bias requires a gradient.
    """
    _check_weight(weight, 2)
    geometry = check_geometry(weight, stride, padding, dilation, groups)
    numbers = _check_static("conv2d_int8", x, weight, bias, x_scale, x_zero_point, y_scale, y_zero_point, activation, out_dtype)
    _check_image(x, weight, geometry)
    return _static(x, weight, bias, *numbers, out_dtype, geometry).movedim(-1, 1)


def linear_int8(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    x_scale: float,
    x_zero_point: int = 0,
    y_scale: float | None = None,
    y_zero_point: int = 0,
    activation: reference.Activation = None,
    out_dtype: torch.dtype = torch.int8,
) -> Tensor:
    """A product of integers with scales that are known beforehand, as ONNX's QLinearMatMul.

    Args:
        x: int8 or uint8 ``[..., K]`` on the weight's device.
        weight: packed, ``[N, K]``, 8 bits, symmetric, one scale a row (``group_size=-1``), no act order.
        bias, x_scale, x_zero_point, y_scale, y_zero_point, activation, out_dtype: as in :func:`conv2d_int8`.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        TypeError, ValueError, RuntimeError: as in :func:`conv2d_int8`.
    """
    _check_weight(weight, 0)
    numbers = _check_static("linear_int8", x, weight, bias, x_scale, x_zero_point, y_scale, y_zero_point, activation, out_dtype)
    if x.dim() < 1 or x.shape[-1] != weight.k:
        raise ValueError(f"x has shape {tuple(x.shape)}; [..., {weight.k}] is expected, for a weight of {list(weight.shape)}")
    y = _static(x.reshape(-1, weight.k), weight, bias, *numbers, out_dtype, _NO_GEOMETRY)
    return y.view(*x.shape[:-1], weight.n)


def _check_static(
    name: str,
    x: Any,
    weight: PackedWeight,
    bias: Any,
    x_scale: Any,
    x_zero_point: Any,
    y_scale: Any,
    y_zero_point: Any,
    activation: reference.Activation,
    out_dtype: Any,
) -> tuple[float, int, float, int, str | None, float, float]:
    """The numbers as the operator takes them."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is expected")
    if x.dtype not in _INT8:
        raise TypeError(f"x has dtype {ops._names((x.dtype,))}; supported are {ops._names(_INT8)}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}; the weight is on {weight.device}")
    ops._check_device(x.device)
    plain = weight.bits == 8 and weight.group_size == -1 and weight.perm is None
    if not plain or any(t is not None for t in (weight.zeros, weight.offsets, weight.book)):
        parts = ", ".join(part for part in weight.tensors() if part not in ("codes", "bias"))
        raise ValueError(
            f"the weight has bits={weight.bits}, group_size={weight.group_size} and {parts}; static int8 takes 8 bits, "
            "group_size=-1 and scales alone"
        )
    if bias is not None:
        _check_static_bias(bias, weight)
    ops._check_no_gradient(name, bias)
    if is_grad_enabled():
        ops._check_frozen(weight)
    if out_dtype not in (*_INT8, torch.int32):
        raise TypeError(f"out_dtype is {out_dtype}; supported are {ops._names((*_INT8, torch.int32))}")
    call = _split(activation)
    if call[0] in ("gelu", "silu"):
        raise ValueError(f"activation is {activation!r}; static int8 takes None, 'relu', 'relu6' and ('clamp', lo, hi)")
    _check_scale("x_scale", x_scale)
    _check_zero_point("x_zero_point", x_zero_point, x.dtype)
    if out_dtype == torch.int32:
        if activation is not None:
            raise ValueError(f"activation is {activation!r} with out_dtype=torch.int32, which is the sums themselves")
        return float(x_scale), x_zero_point, 1.0, 0, *call
    if y_scale is None:
        raise ValueError(f"y_scale is None; a number is expected with out_dtype={out_dtype}")
    _check_scale("y_scale", y_scale)
    _check_zero_point("y_zero_point", y_zero_point, out_dtype)
    return float(x_scale), x_zero_point, float(y_scale), y_zero_point, *call


def _check_static_bias(bias: Any, weight: PackedWeight) -> None:
    if not isinstance(bias, Tensor) or bias.dtype != torch.int32:
        ops._check_bias(bias, weight)
        return
    if bias.device != weight.device:
        raise ValueError(f"bias is on {bias.device}; the weight is on {weight.device}")
    if weight.bias is not None:
        raise ValueError("a bias is given, but the weight has one already")
    if tuple(bias.shape) != (weight.n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; {(weight.n,)} is expected")


def _check_scale(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a {type(value).__name__}; a number is expected")
    if not _SCALES.tiny <= value <= _SCALES.max:
        raise ValueError(f"{name} is {value!r}; a number from {_SCALES.tiny:g} to {_SCALES.max:g} is expected")


def _check_zero_point(name: str, value: Any, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    if type(value) is not int or not info.min <= value <= info.max:
        raise ValueError(f"{name} is {value!r}; an integer from {info.min} to {info.max} is expected")


def _static(x: Tensor, weight: PackedWeight, bias: Tensor | None, *end: Any) -> Tensor:
    """``[B, *out, N]``."""
    *numbers, geometry = end
    if ops._direct(x, bias):
        return _run_static(x, weight, bias, *numbers, *geometry)
    fields = ops._fields(weight)
    return cast(Tensor, torch.ops.cutlass_ops.conv_int8(x, *fields, weight.kernel_size, bias, *numbers, *geometry))


def _run_static(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    x_scale: float,
    x_zero_point: int,
    y_scale: float,
    y_zero_point: int,
    activation: str | None,
    low: float,
    high: float,
    out_dtype: torch.dtype,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    with ops._without_autocast(x.device):
        y = reference_conv.conv_int8(
            x,
            weight.unpack(),
            Geometry(tuple(stride), tuple(padding), tuple(dilation), groups),
            x_scale=x_scale,
            x_zero_point=x_zero_point,
            bias=bias,
            y_scale=y_scale,
            y_zero_point=y_zero_point,
            activation=ops._named_activation(activation, low, high),
            out_dtype=out_dtype,
        )
    return y.contiguous()


# ---- torch.library

_GEOMETRY_SCHEMA = "int[] stride, int[] padding, int[] dilation, int groups"
#: Where the arguments behind x, the weight and its kernel begin.
_BEHIND = ops._WEIGHT + 1


def _packed(args: Sequence[Any]) -> PackedWeight:
    return PackedWeight(*args[: ops._WEIGHT], kernel_size=tuple(args[ops._WEIGHT]))  # type: ignore[misc]


def _out(x: Tensor, args: Sequence[Any], geometry: Sequence[Any]) -> list[int]:
    stride, padding, dilation, groups = geometry
    return Geometry(stride, padding, dilation, groups).out(x.shape[2:], args[ops._WEIGHT])


def _mixed_conv_op(x: Tensor, *args: Any) -> Tensor:
    return _run(x, _packed(args), *args[_BEHIND:])


def _mixed_conv_fake(x: Tensor, *args: Any) -> Tensor:
    out = _out(x, args, args[_BEHIND + 6 : _BEHIND + 10])
    return x.new_empty((x.shape[0], *out, args[6]), dtype=args[_BEHIND + 5]).movedim(-1, 1)


def _conv_int8_op(x: Tensor, *args: Any) -> Tensor:
    return _run_static(x, _packed(args), *args[_BEHIND:])


def _conv_int8_fake(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty((x.shape[0], *_out(x, args, args[_BEHIND + 9 :]), args[6]), dtype=args[_BEHIND + 8])


ops._register(
    f"mixed_conv(Tensor x, {ops._WEIGHT_SCHEMA}, int[] kernel_size, Tensor? bias, str? activation, float low, float high, "
    f"Tensor? residual, ScalarType out_dtype, {_GEOMETRY_SCHEMA}, str act_quant, bool act_symmetric) -> Tensor",
    _mixed_conv_op,
    _mixed_conv_fake,
)
ops._register(
    f"conv_int8(Tensor x, {ops._WEIGHT_SCHEMA}, int[] kernel_size, Tensor? bias, float x_scale, int x_zero_point, "
    f"float y_scale, int y_zero_point, str? activation, float low, float high, ScalarType out_dtype, {_GEOMETRY_SCHEMA}) "
    "-> Tensor",
    _conv_int8_op,
    _conv_int8_fake,
)
