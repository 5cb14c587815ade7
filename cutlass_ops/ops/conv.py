"""Convolutions of floats, or of activations that are quantised in the call, with packed weights.

``conv_gpu.py`` computes on a GPU, ``conv_cpu.py`` on a CPU; ``conv_torch.py`` has torch compute the
convolutions that neither takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .. import reference
from ..reference.conv import Geometry
from ..weights.packed_weight import PackedWeight
from . import activations, arguments, conv_cpu, conv_gpu, conv_torch, library, native
from .call import Call, CallSchema

__all__ = ["mixed_conv1d", "mixed_conv2d", "mixed_conv3d"]

#: One number for all dimensions of space, or one for each.
Extents: TypeAlias = "int | Sequence[int]"

ACT_QUANT = ("none", "token", "block", "tensor")


# ---- arguments


def check_extents(name: str, value: Any, dims: int, least: int) -> tuple[int, ...]:
    """``value`` for each of ``dims`` dimensions of space.

    Raises:
        ValueError: it is no integer of at least ``least``, nor ``dims`` of them.
    """
    extents = (
        tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    )
    extents = extents * dims if len(extents) == 1 else extents
    # type(), not isinstance(): True must not count as a number of pixels.
    if len(extents) != dims or any(type(extent) is not int or extent < least for extent in extents):
        raise ValueError(
            f"{name} is {value!r:.100}; an integer of at least {least}, or {dims} of them, "
            "is expected"
        )
    return extents


def check_weight(weight: Any, dims: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` if it is no packed weight whose kernel has ``dims``
    dimensions; 0 is a matrix.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"weight is a {type(weight).__name__}; a PackedWeight (see "
            "cutlass_ops.reorder) is expected"
        )
    if len(weight.kernel_size) != dims:
        has = f"a kernel of {weight.kernel_size}" if weight.kernel_size else "no kernel"
        expected = f"one of {dims} dimensions" if dims else "a matrix"
        raise ValueError(
            f"the weight of shape {list(weight.shape)} has {has}; {expected} is expected"
        )
    weight.check_plain("linear_int8")  # the only caller with matrices


def check_geometry(
    kernel_size: tuple[int, ...],
    n: int,
    stride: Extents,
    padding: Extents,
    dilation: Extents,
    groups: int,
) -> Geometry:
    """The arguments of torch's convolutions as numbers for each dimension.

    Raises:
        ValueError: an argument that does not fit the weight's kernel or number of output channels;
            the message has its value.
    """
    dims = len(kernel_size)
    if type(groups) is not int or groups < 1 or n % groups:
        raise ValueError(
            f"groups is {groups!r}; a divisor of the weight's {n} output channels is expected"
        )
    return Geometry(
        check_extents("stride", stride, dims, 1),
        check_extents("padding", padding, dims, 0),
        check_extents("dilation", dilation, dims, 1),
        groups,
    )


def check_image(
    shape: Sequence[int], kernel_size: tuple[int, ...], channels: int, n: int, geometry: Geometry
) -> tuple[int, ...]:
    """The shape of the result.

    Args:
        shape: of x.
        kernel_size, channels, n: of the weight: the channels of a group, and those of the result.
        geometry: of the convolution.

    Raises:
        ValueError: x has other dimensions or channels than the weight takes, or fewer pixels
            than the kernel.
    """
    dims, size = len(kernel_size), tuple(shape[2:])
    if len(shape) != dims + 2 or shape[1] != channels * geometry.groups:
        space = ("L", "H, W", "D, H, W")[dims - 1]
        raise ValueError(
            f"x has shape {tuple(shape)}; [B, {channels * geometry.groups}, {space}] is expected, "
            "for a weight of "
            f"{channels} channels and groups={geometry.groups}"
        )
    padded = [extent + 2 * pad for extent, pad in zip(size, geometry.padding, strict=True)]
    spans = geometry.spans(kernel_size)
    if any(extent < 1 for extent in size) or any(
        extent < span for extent, span in zip(padded, spans, strict=True)
    ):
        raise ValueError(
            f"x has {size} pixels, {tuple(padded)} with padding={geometry.padding}; the kernel "
            f"{kernel_size} with dilation={geometry.dilation} takes at least {tuple(spans)}"
        )
    return shape[0], n, *geometry.out(size, kernel_size)


def check_convolution(
    shape: Sequence[int],
    kernel_size: tuple[int, ...],
    channels: int,
    n: int,
    stride: Extents,
    padding: Extents,
    dilation: Extents,
    groups: int,
) -> tuple[Geometry, tuple[int, ...]]:
    """:func:`check_geometry`, and :func:`check_image`."""
    geometry = check_geometry(kernel_size, n, stride, padding, dilation, groups)
    return geometry, check_image(shape, kernel_size, channels, n, geometry)


#: The checks take longer than the launch of a small convolution.
known_convolution = functools.lru_cache(maxsize=4096, typed=True)(check_convolution)


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
    """:func:`mixed_conv2d` in one dimension of space: x ``[B, groups * C, L]``, the weight
    ``[N, C, kernel]``.
    """
    geometry = (stride, padding, dilation, groups)
    return _mixed_conv(
        1, x, weight, bias, geometry, activation, act_quant, act_symmetric, residual, out_dtype
    )


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

    Sums are fp32, whatever the types; the result is rounded once. On a CPU integer kernels multiply
    quantised activations of many channels, and torch convolves everything else in fp32. On a GPU
    the kernels of products take the pixels under each tap straight from x. torch's convolution of
    the dequantised operands is used where x is fp32 and not quantised, where the number of output
    channels of a group is no multiple of 64, and where few channels would leave much of the
    kernels' tiles empty (large results of x's dtype). There sums are rounded to x's dtype before
    bias, activation and residual, and an infinite sum stays infinite if none of them follows.
    Weights and quantised activations may be rounded once to x's dtype where the result has it too,
    as in :func:`cutlass_ops.mixed_gemm`. Depthwise convolutions (one input channel a group) round
    only the result. The first call with a depthwise weight dequantises it to fp32, and the first
    with ``act_quant="tensor"`` and an int8 weight of ``group_size=-1`` unpacks it (a byte a code);
    both keep that as long as ``weight.codes`` lives, and wait for the GPU; later calls do not wait.
    The next call sees writes to the weight's tensors, but those through ``.data``, which torch does
    not count; captured CUDA graphs do not. Under ``torch.autocast`` an fp32 x is cast to the
    autocast dtype first.

    Training: the result is differentiable in x, bias and residual; the weight is frozen. The
    gradient is that of ``torch.nn.functional.conv2d`` with :func:`cutlass_ops.dequantize`'s values,
    which the backward pass computes and does not keep; activations that ``act_quant`` quantises
    pass it straight through. There are no gradients of gradients.

    Args:
        x: fp16, bf16 or fp32 ``[B, groups * C, H, W]`` on the weight's device, in any memory
            format.
        weight: what :func:`cutlass_ops.reorder` returned for a weight ``[N, C, R, S]``.
        bias: fp16, bf16 or fp32 ``[N]``, if the weight has none.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``: a number, or one
            for each dimension. Pixels of the padding are exact zeros, with zero points too.
        activation: as in :func:`cutlass_ops.mixed_gemm`.
        act_quant: "none" multiplies x as it is. The others quantise it to int8: "token" with one
            scale for each pixel over its channels, "block" for each pixel and min(group_size, 128)
            channels, "tensor" for all of x.
        act_symmetric: whether quantised activations have no zero point.
        residual: fp16, bf16 or fp32, of the result's shape, added last.
        out_dtype: fp16, bf16 or fp32; x's dtype if None.

    Returns:
        ``[B, N, H', W']`` of ``out_dtype``; in memory the channels are last.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is computed; the
            message has its value.
        RuntimeError: the weight requires a gradient; or torch.jit.trace, forward-mode
            differentiation or a transform of torch.func is active.
    """
    geometry = (stride, padding, dilation, groups)
    return _mixed_conv(
        2, x, weight, bias, geometry, activation, act_quant, act_symmetric, residual, out_dtype
    )


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
    """:func:`mixed_conv2d` in three dimensions of space: x ``[B, groups * C, D, H, W]``, the weight
    ``[N, C, T, R, S]``.
    """
    geometry = (stride, padding, dilation, groups)
    return _mixed_conv(
        3, x, weight, bias, geometry, activation, act_quant, act_symmetric, residual, out_dtype
    )


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
    check_weight(weight, dims)
    key = None
    if weight.gpu >= 0 and residual is None and not is_dynamo_compiling():
        # Types too, since 1, 1.0 and True are one key.
        described = (dims, *geometry, *map(type, geometry), activation, act_quant, act_symmetric)
        y, key = conv_gpu.repeat(x, weight, bias, (*described, out_dtype))
        if y is not None:
            return _channels_second(y)
    arguments.check_float("x", x, weight.device)
    arguments.check_device(weight.device)
    arguments.check_transforms(f"mixed_conv{dims}d", x, bias, residual)
    differentiable = is_grad_enabled() and any(map(arguments.requires_grad, (x, bias, residual)))
    if is_grad_enabled():
        arguments.check_frozen(weight)
    if x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    directly = not differentiable and arguments.runs_directly(x, bias, residual)
    check = known_convolution if directly else check_convolution
    stride, padding, dilation = (
        tuple(value) if isinstance(value, list) else value for value in geometry[:3]
    )
    checked, shape = check(
        x.shape,
        weight.kernel_size,
        weight.k // weight.taps,
        weight.n,
        stride,
        padding,
        dilation,
        geometry[3],
    )
    if act_quant not in ACT_QUANT:
        raise ValueError(
            f"act_quant is {act_quant!r}; supported are {', '.join(map(repr, ACT_QUANT))}"
        )
    if weight.book is not None and act_quant != "none":
        raise ValueError(f"{reference.BOOK_NEEDS_FLOATS}; act_quant is {act_quant!r}")
    named = native.split_activation(activation)
    if bias is not None:
        arguments.check_bias(bias, weight)
    if residual is not None:
        arguments.check_residual(residual, weight, shape)
    if out_dtype is not None and out_dtype not in native.DATA_TYPES:
        raise TypeError(
            f"out_dtype is {out_dtype!r}; supported are {arguments.dtype_names(native.DATA_TYPES)}"
        )
    if x.is_cuda and math.prod(shape) // weight.n > activations.MAX_M:
        raise ValueError(
            f"the result has shape {shape}; at most {activations.MAX_M} pixels of all "
            "images are supported"
        )
    dtype = x.dtype if out_dtype is None else out_dtype
    call = Call(bias, *named, residual, dtype, act_quant=act_quant, act_symmetric=act_symmetric)
    if directly:
        return run_conv(x, weight, checked, call, key)
    fields = (*library.weight_fields(weight), weight.kernel_size, *checked)
    return cast(Tensor, torch.ops.cutlass_ops.mixed_conv(x, *fields, *OF_CONV.values(call)))


def run_conv(
    x: Tensor, weight: PackedWeight, geometry: Geometry, call: Call, key: Any = None
) -> Tensor:
    """The result of :func:`mixed_conv2d`, of any number of dimensions. `key`: of
    :func:`conv_gpu.repeat`.
    """
    call = call if call.residual is None else call._replace(residual=call.residual.movedim(1, -1))
    with arguments.without_autocast(x.device):
        x, y = x.detach(), None
        if weight.gpu >= 0:
            y = conv_gpu.convolve(x, weight, geometry, call, key)
        elif conv_cpu.takes(x.shape, weight, geometry, call.act_quant):
            y = conv_cpu.convolve(x, weight, geometry, call)
        if y is None:
            y = conv_torch.convolve(x, weight, geometry, call)
    return _channels_second(y.contiguous())


def _channels_second(y: Tensor) -> Tensor:
    """A result ``[B, *out, N]`` in torch's order of dimensions."""
    return y.permute(0, -1, *range(1, y.dim() - 1))


# ---- torch.library

#: A weight and the geometry of its convolution.
CONV_SCHEMA = (
    f"{library.WEIGHT_SCHEMA}, int[] kernel_size, int[] stride, int[] padding, int[] "
    "dilation, int groups"
)
#: A convolution's call.
OF_CONV = CallSchema("saturate", "batch_invariant", "architecture", "exact")


def packed_weight(fields: Sequence[Any]) -> tuple[PackedWeight, Geometry]:
    """What :data:`CONV_SCHEMA` lists."""
    *parts, kernel_size, stride, padding, dilation, groups = fields
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    return PackedWeight(*parts, kernel_size=tuple(kernel_size)), geometry  # type: ignore[misc]


def out_extents(x: Tensor, fields: Sequence[Any]) -> list[int]:
    """The result's, of fields as :data:`CONV_SCHEMA` lists them."""
    *_, kernel_size, stride, padding, dilation, groups = fields
    return Geometry(stride, padding, dilation, groups).out(x.shape[2:], kernel_size)


def _mixed_conv_op(x: Tensor, *args: Any) -> Tensor:
    fields, call = OF_CONV.split(args)
    return run_conv(x, *packed_weight(fields), call)


def _mixed_conv_fake(x: Tensor, *args: Any) -> Tensor:
    fields, call = OF_CONV.split(args)
    return x.new_empty(
        (x.shape[0], *out_extents(x, fields), fields[6]), dtype=call.out_dtype
    ).movedim(-1, 1)


library.register(
    f"mixed_conv(Tensor x, {CONV_SCHEMA}, {OF_CONV.text}) -> Tensor",
    _mixed_conv_op,
    _mixed_conv_fake,
)
