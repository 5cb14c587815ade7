"""Convolutions and products of int8 with scales that are known beforehand.

On a CPU they are the reference. Kernels take weights in natural order, which are made once and kept beside the packed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from . import _C, arguments, kept, library, native, reference
from .conv import (
    BEHIND,
    GEOMETRY_SCHEMA,
    Extents,
    check_geometry,
    check_image,
    check_weight,
    out_extents,
    packed_weight,
)
from .packed_weight import PackedWeight
from .reference import conv as reference_conv
from .reference.conv import Geometry

__all__ = ["conv2d_int8", "linear_int8"]

_INT8 = (torch.int8, torch.uint8)
_NO_GEOMETRY = Geometry((), (), (), 1)
_OUTPUTS = {torch.int8: _C.ConvOutput.int8, torch.uint8: _C.ConvOutput.uint8, torch.int32: _C.ConvOutput.int32}
#: fp32's smallest normal number and its largest.
_SCALES = torch.finfo(torch.float32)


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
    itself, ``rint`` half to even; bit for bit what ONNX Runtime's QLinearConv computes.

    On a GPU the first call with a weight keeps its codes in another order, a byte each, as long as ``weight.codes`` lives, and
    waits for that; later ones do not wait. What is written to the codes is noticed by the next call, not by CUDA graphs.

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
    check_weight(weight, 2)
    geometry = check_geometry(weight, stride, padding, dilation, groups)
    numbers = _check_static("conv2d_int8", x, weight, bias, x_scale, x_zero_point, y_scale, y_zero_point, activation, out_dtype)
    check_image(x, weight, geometry)
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
    check_weight(weight, 0)
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
        raise TypeError(f"x has dtype {arguments.dtype_names((x.dtype,))}; supported are {arguments.dtype_names(_INT8)}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}; the weight is on {weight.device}")
    arguments.check_device(x.device)
    plain = weight.bits == 8 and weight.group_size == -1 and weight.perm is None
    if not plain or any(t is not None for t in (weight.zeros, weight.offsets, weight.book)):
        parts = ", ".join(part for part in weight.tensors() if part not in ("codes", "bias"))
        raise ValueError(
            f"the weight has bits={weight.bits}, group_size={weight.group_size} and {parts}; static int8 takes 8 bits, "
            "group_size=-1 and scales only"
        )
    if bias is not None:
        _check_static_bias(bias, weight)
    arguments.check_no_gradient(name, bias)
    if is_grad_enabled():
        arguments.check_frozen(weight)
    if out_dtype not in (*_INT8, torch.int32):
        raise TypeError(f"out_dtype is {out_dtype}; supported are {arguments.dtype_names((*_INT8, torch.int32))}")
    reference_conv.check_static_activation(activation)
    call = native.split_activation(activation)
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
        arguments.check_bias(bias, weight)
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
    if arguments.runs_directly(x, bias):
        return _run_static(x, weight, bias, *numbers, *geometry)
    fields = library.weight_fields(weight)
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
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    if weight.gpu >= 0:
        numbers = (x_scale, x_zero_point, y_scale, y_zero_point, native.ACTIVATIONS[activation], low, high)
        return launch(x, weight, bias, numbers, out_dtype, geometry)
    with arguments.without_autocast(x.device):
        y = reference_conv.conv_int8(
            x,
            weight.unpack(),
            geometry,
            x_scale=x_scale,
            x_zero_point=x_zero_point,
            bias=bias,
            y_scale=y_scale,
            y_zero_point=y_zero_point,
            activation=native.named_activation(activation, low, high),
            out_dtype=out_dtype,
        )
    return y.contiguous()


# ---- on a GPU


def _make_natural(weight: PackedWeight, taps: tuple[int, ...], order: _C.ConvOrder) -> tuple[Tensor, Tensor]:
    """A weight as ``conv.h`` describes it: int8 codes in one of its orders, and int32 ``[N]`` sums of each channel's codes."""
    if order == _C.ConvOrder.flat:
        taps = (1, 1)
    codes = (weight.unpack().codes ^ 0x80).view(torch.int8).view(weight.n, *taps, -1)
    sums = codes.sum((1, 2, 3), dtype=torch.int32)
    if order == _C.ConvOrder.by_taps:
        words = F.pad(codes[..., 0], (0, -taps[1] % 4)).view(weight.n, taps[0], -1, 4)
        return words.permute(1, 2, 0, 3).contiguous(), sums
    return F.pad(codes, (0, _C.stored_channels(codes.shape[3]) - codes.shape[3])).contiguous(), sums


def launch(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    numbers: tuple[Any, ...],
    out_dtype: torch.dtype,
    geometry: Geometry,
    choose: Callable[[_C.ConvProblem], _C.ConvPlan] | None = None,
) -> Tensor:
    """The result, as ``choose`` plans it or, without that, as it is planned for the GPU that x is on.

    Args:
        x, weight, bias, out_dtype, geometry: as in :func:`conv2d_int8`.
        numbers: scales and zero points of x and y, and the activation.
    """
    image = x.movedim(1, -1).contiguous()
    shape = (*x.shape[:1], *geometry.out(x.shape[2:], weight.kernel_size), weight.n)
    y = torch.empty(shape, dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    taps = weight.kernel_size or (1, 1)
    channels, groups = weight.k // weight.taps, geometry.groups
    order = _C.conv_order(weight.n, channels, weight.taps, groups)
    bias = weight.bias if bias is None else bias
    bias = None if bias is None else bias.contiguous()
    with torch.cuda.device(x.device):
        name = ("natural", weight.n, taps, order)
        codes, sums = kept.form(weight, (), name, lambda: _make_natural(weight, taps, order))
        conv_weight = _C.ConvWeight(
            codes.data_ptr(),
            order,
            sums.data_ptr(),
            weight.scales.data_ptr(),
            native.DATA_TYPES[weight.scales.dtype],
            weight.n,
            taps,
            channels,
        )
        problem = _C.ConvProblem(
            conv_weight,
            image.data_ptr(),
            x.dtype is torch.uint8,
            tuple(image.shape) if weight.kernel_size else (1, 1, *image.shape),
            geometry.stride or (1, 1),
            geometry.padding or (0, 0),
            geometry.dilation or (1, 1),
            groups,
            native.pointer(bias),
            bias is not None and bias.dtype is torch.int32,
            _C.DataType.none if bias is None or bias.dtype is torch.int32 else native.DATA_TYPES[bias.dtype],
            y.data_ptr(),
            _OUTPUTS[out_dtype],
            *numbers,
        )
        plan = problem.plan(_C.current_device()) if choose is None else choose(problem)
        workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=x.device)
        _C.conv_int8(problem, plan, workspace.data_ptr(), native.current_stream(weight.gpu))
    return y


# ---- torch.library


def _conv_int8_op(x: Tensor, *args: Any) -> Tensor:
    return _run_static(x, packed_weight(args), *args[BEHIND:])


def _conv_int8_fake(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty((x.shape[0], *out_extents(x, args, args[BEHIND + 9 :]), args[6]), dtype=args[BEHIND + 8])


library.register(
    f"conv_int8(Tensor x, {library.WEIGHT_SCHEMA}, int[] kernel_size, Tensor? bias, float x_scale, int x_zero_point, "
    f"float y_scale, int y_zero_point, str? activation, float low, float high, ScalarType out_dtype, {GEOMETRY_SCHEMA}) "
    "-> Tensor",
    _conv_int8_op,
    _conv_int8_fake,
)
