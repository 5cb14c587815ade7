"""Convolutions and products of int8 with scales that are known beforehand.

On a CPU the reference computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, is_grad_enabled

from .. import _C, reference
from ..reference import conv as reference_conv
from ..reference.conv import Geometry
from ..weights.packed_weight import PackedWeight, group_vector_positions
from . import arguments, library, native, natural_weight
from .call import Call, CallSchema
from .conv import (
    CONV_SCHEMA,
    Extents,
    check_geometry,
    check_image,
    check_weight,
    out_extents,
    packed_weight,
)
from .natural_weight import Natural

__all__ = ["conv2d_int8", "linear_int8"]

_INT8 = (torch.int8, torch.uint8)
_NO_GEOMETRY = Geometry((), (), (), 1)
_OUTPUTS = {
    torch.int8: _C.ConvOutput.int8,
    torch.uint8: _C.ConvOutput.uint8,
    torch.int32: _C.ConvOutput.int32,
}
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

    ``acc`` is the int32 sum of ``(x - x_zero_point) * (w - w_zero_point)`` over the taps that lie
    inside of x, plus the bias. The result is ``clamp(rint(float(acc) * m) + y_zero_point)`` with
    ``m = x_scale * w_scale / y_scale``, each operation rounded to fp32 separately, ``rint`` half to
    even; bit for bit what ONNX Runtime's QLinearConv computes.

    ``weight`` has the codes and zero points of ONNX's uint8 weights as they are, and those of int8
    weights plus 128. Scales and zero points that ONNX gives once for all output channels are
    repeated in each row.

    On a GPU the first call with a weight stores its codes in another order, a byte each, keeps them
    as long as ``weight.codes`` lives, and waits for the GPU; later calls do not wait. The next call
    sees writes to codes and zero points; captured CUDA graphs do not. Zero points cost nothing if
    the differences ``w - w_zero_point`` of each row fit int8. Otherwise the sums go through memory
    in int32, together with the sums of x over each window, which compensate the part of the zero
    points that does not fit. CUDA graphs must be captured again after zero points were written that
    do not fit.

    Args:
        x: int8 or uint8 ``[B, groups * C, H, W]`` on the weight's device.
        weight: packed, ``[N, C, R, S]``, 8 bits, one scale a row (``group_size=-1``), with or
            without zero points.
        bias: int32 ``[N]``, in steps of ``x_scale * w_scale``; or floating, as the weight's own
            bias is, which is rounded to that.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``.
        x_scale, x_zero_point: what codes of x mean: ``x_scale * (code - x_zero_point)``.
        y_scale, y_zero_point: the same for codes of the result; unused if the result is int32.
        activation: None, "relu", "relu6" or ``("clamp", lo, hi)``; bounds are rounded to
            codes of the result.
        out_dtype: torch.int8, torch.uint8, or torch.int32 for ``acc`` itself, without an
            activation.

    Returns:
        ``[B, N, H', W']`` of ``out_dtype``; in memory the channels are last.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is computed; the
            message has its value.
        RuntimeError: bias requires a gradient.
    """
    check_weight(weight, 2)
    geometry = check_geometry(weight.kernel_size, weight.n, stride, padding, dilation, groups)
    static = _check_static(
        "conv2d_int8",
        x,
        weight,
        bias,
        x_scale,
        x_zero_point,
        y_scale,
        y_zero_point,
        activation,
        out_dtype,
    )
    check_image(x.shape, weight.kernel_size, weight.k // weight.taps, weight.n, geometry)
    return _static(x, weight, geometry, *static).movedim(-1, 1)


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
        weight: packed, ``[N, K]``, 8 bits, one scale a row (``group_size=-1``), with or without
            zero points, no act order.
        bias, x_scale, x_zero_point, y_scale, y_zero_point, activation, out_dtype: as in
            :func:`conv2d_int8`.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        TypeError, ValueError, RuntimeError: as in :func:`conv2d_int8`.
    """
    check_weight(weight, 0)
    static = _check_static(
        "linear_int8",
        x,
        weight,
        bias,
        x_scale,
        x_zero_point,
        y_scale,
        y_zero_point,
        activation,
        out_dtype,
    )
    if x.dim() < 1 or x.shape[-1] != weight.k:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; [..., {weight.k}] is expected, for a weight of "
            f"{list(weight.shape)}"
        )
    y = _static(x.reshape(-1, weight.k), weight, _NO_GEOMETRY, *static)
    return y.view(*x.shape[:-1], weight.n)


class Scales(NamedTuple):
    """What codes of x and of the result mean: ``scale * (code - zero_point)``."""

    x_scale: float
    x_zero_point: int
    y_scale: float = 1.0
    y_zero_point: int = 0


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
) -> tuple[Scales, Call]:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is expected")
    if x.dtype not in _INT8:
        raise TypeError(
            f"x has dtype {arguments.dtype_names((x.dtype,))}; supported are "
            f"{arguments.dtype_names(_INT8)}"
        )
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}; the weight is on {weight.device}")
    arguments.check_device(x.device)
    plain = weight.bits == 8 and weight.group_size == -1 and weight.perm is None
    if not plain or weight.offsets is not None or weight.book is not None:
        parts = ", ".join(part for part in weight.tensors() if part not in ("codes", "bias"))
        raise ValueError(
            f"the weight has bits={weight.bits}, group_size={weight.group_size} and {parts}; "
            "static int8 takes 8 bits, "
            "group_size=-1, scales and zero points, nothing else"
        )
    if bias is not None:
        arguments.check_bias(bias, weight, (torch.int32, *native.DATA_TYPES))
    arguments.check_no_gradient(name, bias)
    if is_grad_enabled():
        arguments.check_frozen(weight)
    if out_dtype not in (*_INT8, torch.int32):
        raise TypeError(
            f"out_dtype is {out_dtype!r}; supported are "
            f"{arguments.dtype_names((*_INT8, torch.int32))}"
        )
    reference_conv.check_static_activation(activation)
    call = Call(bias, *native.split_activation(activation), out_dtype=out_dtype)
    _check_scale("x_scale", x_scale)
    _check_zero_point("x_zero_point", x_zero_point, x.dtype)
    if out_dtype == torch.int32:
        if activation is not None:
            raise ValueError(
                f"activation is {activation!r} with out_dtype=torch.int32, which is the "
                "sums themselves"
            )
        return Scales(float(x_scale), x_zero_point), call
    if y_scale is None:
        raise ValueError(f"y_scale is None; a number is expected with out_dtype={out_dtype}")
    _check_scale("y_scale", y_scale)
    _check_zero_point("y_zero_point", y_zero_point, out_dtype)
    return Scales(float(x_scale), x_zero_point, float(y_scale), y_zero_point), call


def _check_scale(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a {type(value).__name__}; a number is expected")
    if not _SCALES.tiny <= value <= _SCALES.max:
        raise ValueError(
            f"{name} is {value!r}; a number from {_SCALES.tiny:g} to {_SCALES.max:g} is expected"
        )


def _check_zero_point(name: str, value: Any, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    if type(value) is not int or not info.min <= value <= info.max:
        raise ValueError(
            f"{name} is {value!r}; an integer from {info.min} to {info.max} is expected"
        )


def _static(
    x: Tensor, weight: PackedWeight, geometry: Geometry, scales: Scales, call: Call
) -> Tensor:
    """``[B, *out, N]``."""
    if arguments.runs_directly(x, call.bias):
        return _run_static(x, weight, geometry, scales, call)
    fields = (*library.weight_fields(weight), weight.kernel_size, *geometry)
    return cast(
        Tensor, torch.ops.cutlass_ops.conv_int8(x, *fields, *scales, *_OF_STATIC.values(call))
    )


def _run_static(
    x: Tensor, weight: PackedWeight, geometry: Geometry, scales: Scales, call: Call
) -> Tensor:
    if weight.gpu >= 0:
        return launch(x, weight, geometry, scales, call)
    with arguments.without_autocast(x.device):
        y = reference_conv.conv_int8(
            x,
            weight.unpack(),
            geometry,
            bias=call.bias,
            activation=call.named_activation,
            out_dtype=call.out_dtype,
            **scales._asdict(),
        )
    return y.contiguous()


# ---- on a GPU


def launch(
    x: Tensor,
    weight: PackedWeight,
    geometry: Geometry,
    scales: Scales,
    call: Call,
    choose: Callable[[_C.ConvProblem], _C.ConvPlan] | None = None,
) -> Tensor:
    """The result, as ``choose`` plans it or, without that, as it is planned for the
    GPU that x is on.

    Args:
        x, weight, geometry: as in :func:`conv2d_int8`.
        choose: the plan of the product with the weight.
    """
    image = x.movedim(1, -1).contiguous()
    shape = (*x.shape[:1], *geometry.out(x.shape[2:], weight.kernel_size), weight.n)
    if 0 in shape:
        return x.new_empty(shape, dtype=call.out_dtype)
    bias = call.bias_of(weight)
    call = call._replace(bias=None if bias is None else bias.contiguous())
    with torch.cuda.device(x.device):
        operand = natural_weight.operand(weight, geometry.groups)
        if operand.rest is None or operand.ones is None:
            y = torch.empty(shape, dtype=call.out_dtype, device=x.device)
            _multiply(y, image, weight, operand.weight, geometry, scales, call, choose)
            return y
        of_sums = Scales(scales.x_scale, scales.x_zero_point)
        acc = torch.empty(shape, dtype=torch.int32, device=x.device)
        _multiply(acc, image, weight, operand.weight, geometry, of_sums, Call(call.bias), choose)
        windows = acc.new_empty(*shape[:-1], geometry.groups)
        _multiply(windows, image, weight, operand.ones, geometry, of_sums, Call(), None)
        _compensate(acc, windows, operand.rest)
        if call.out_dtype == torch.int32:
            return acc
        of_rows = weight.scales[0, group_vector_positions(weight.n, x.device)]
        of_y = (scales.x_scale, scales.y_scale, scales.y_zero_point)
        return reference_conv.requantize(acc, of_rows, *of_y, call.named_activation, call.out_dtype)


def _compensate(acc: Tensor, windows: Tensor, rest: Tensor) -> None:
    """Subtract ``rest`` times the sums of x over windows ``[..., groups]`` from the sums
    ``[..., N]``; they wrap.
    """
    groups = windows.shape[-1]
    acc.view(-1, groups, len(rest) // groups).addcmul_(
        windows.view(-1, groups, 1), rest.view(groups, -1), value=-1
    )


def _multiply(
    y: Tensor,
    image: Tensor,
    weight: PackedWeight,
    natural: Natural,
    geometry: Geometry,
    scales: Scales,
    call: Call,
    choose: Callable[[_C.ConvProblem], _C.ConvPlan] | None,
) -> None:
    """Write the product of an image with the channels last to y, by one kernel; ``natural`` has as
    many channels as y.
    """
    bias, groups = call.bias, geometry.groups
    problem = _C.ConvProblem(
        natural_weight.conv_weight(natural, weight, y.shape[-1], groups),
        image.data_ptr(),
        image.dtype is torch.uint8,
        _C.DataType.none,
        True,
        tuple(image.shape) if weight.kernel_size else (1, 1, *image.shape),
        geometry.stride or (1, 1),
        geometry.padding or (0, 0),
        geometry.dilation or (1, 1),
        groups,
        native.pointer(bias),
        bias is not None and bias.dtype is torch.int32,
        _C.DataType.none
        if bias is None or bias.dtype is torch.int32
        else native.DATA_TYPES[bias.dtype],
        y.data_ptr(),
        _OUTPUTS[y.dtype],
        *scales,
        native.ACTIVATIONS[call.activation],
        call.low,
        call.high,
    )
    plan = problem.plan(_C.current_device()) if choose is None else choose(problem)
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=y.device)
    _C.conv_int8(
        problem,
        plan,
        image.data_ptr(),
        native.pointer(bias),
        y.data_ptr(),
        workspace.data_ptr(),
        native.current_stream(weight.gpu),
    )


# ---- torch.library

_OF_STATIC = CallSchema(
    "residual", "saturate", "act_quant", "act_symmetric", "batch_invariant", "architecture", "exact"
)
_SCALES_SCHEMA = "float x_scale, int x_zero_point, float y_scale, int y_zero_point"


def _conv_int8_op(x: Tensor, *args: Any) -> Tensor:
    (*fields, x_scale, x_zero_point, y_scale, y_zero_point), call = _OF_STATIC.split(args)
    return _run_static(
        x, *packed_weight(fields), Scales(x_scale, x_zero_point, y_scale, y_zero_point), call
    )


def _conv_int8_fake(x: Tensor, *args: Any) -> Tensor:
    (*fields, _, _, _, _), call = _OF_STATIC.split(args)
    return x.new_empty((x.shape[0], *out_extents(x, fields), fields[6]), dtype=call.out_dtype)


library.register(
    f"conv_int8(Tensor x, {CONV_SCHEMA}, {_SCALES_SCHEMA}, {_OF_STATIC.text}) -> Tensor",
    _conv_int8_op,
    _conv_int8_fake,
)
