"""The gradient of mixed convolutions: that of torch's convolution with the packed weight's values.

As in ``gradients.py`` the backward pass is an operator, so that torch.compile records it; importing this module registers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import arguments, conv, library, products
from .gradients import through_activation

#: Positions of mixed_conv's arguments behind x and the weight: those that may require a gradient, and the geometry.
_BIAS = 1 + conv.BEHIND
_RESIDUAL = _BIAS + 4
_GEOMETRY = _RESIDUAL + 2


def _backward_op(grad: Tensor, x: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    """Gradients of x and, fp32, of the bias; an empty tensor where one is not wanted."""
    weight, (bias, activation, low, high, *call, dtype, shape, wanted) = conv.packed_weight(args), args[conv.BEHIND :]
    stride, padding, dilation, groups = call[:4]
    compute = torch.float32 if grad.is_cpu else torch.promote_types(dtype, grad.dtype)
    of_x, of_bias = grad.new_empty(0, dtype=dtype), grad.new_empty(0, dtype=torch.float32)
    with arguments.without_autocast(grad.device):
        if x is not None:
            z = conv.run_conv(x, weight, bias, None, 0.0, 0.0, None, torch.float32, *call)
            grad = through_activation(grad.float(), z, activation, low, high)
        if wanted[1]:
            of_bias = grad.float().sum([0, *range(2, grad.dim())])
        if wanted[0]:
            values = products.run_dequantize(weight, compute)
            like = values.new_empty(1).expand(shape)
            still = [0] * len(stride)
            of_x, *_ = torch.ops.aten.convolution_backward(
                grad.to(compute), like, values, None, stride, padding, dilation, False, still, groups, [True, False, False]
            )
            of_x = of_x.to(dtype).movedim(1, -1).contiguous().movedim(-1, 1)
    return of_x, of_bias


def _backward_fake(grad: Tensor, x: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    dtype, (b, c, *space), wanted = args[-3:]
    images = grad.new_empty((b, *space, c), dtype=dtype).movedim(-1, 1)
    return (
        images if wanted[0] else grad.new_empty(0, dtype=dtype),
        grad.new_empty(args[6] if wanted[1] else 0, dtype=torch.float32),
    )


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, weight, (bias, *activation, residual, _) = inputs[0], inputs[1:_BIAS], inputs[_BIAS:_GEOMETRY]
    again = activation[0] is not None
    tensors = (field if isinstance(field, Tensor) else None for field in weight)
    ctx.save_for_backward(x if again else None, bias if again else None, *tensors)
    ctx.weight = [None if isinstance(field, Tensor) else field for field in weight]
    ctx.call = (*activation, *inputs[_GEOMETRY:], x.dtype, list(x.shape))
    ctx.dtypes = None if bias is None else bias.dtype, None if residual is None else residual.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, *tensors = ctx.saved_tensors
    weight = [field if tensor is None else tensor for field, tensor in zip(ctx.weight, tensors, strict=True)]
    bias_dtype, residual_dtype = ctx.dtypes
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[_BIAS]]
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if any(wanted):
        of_x, of_bias = torch.ops.cutlass_ops.mixed_conv_backward(grad, x, *weight, bias, *ctx.call, wanted)
        result[0] = of_x if wanted[0] else None
        result[_BIAS] = of_bias.to(bias_dtype) if wanted[1] else None
    if ctx.needs_input_grad[_RESIDUAL]:
        result[_RESIDUAL] = grad.to(residual_dtype)
    return tuple(result)


def _no_second_gradient(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("mixed convolutions have no gradient of their gradient: packed weights support first derivatives only")


library.register(
    f"mixed_conv_backward(Tensor grad, Tensor? x, {library.WEIGHT_SCHEMA}, int[] kernel_size, Tensor? bias, str? activation, "
    f"float low, float high, {conv.GEOMETRY_SCHEMA}, str act_quant, bool act_symmetric, ScalarType dtype, SymInt[] shape, "
    "bool[2] wanted) -> (Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
torch.library.register_autograd("cutlass_ops::mixed_conv", _backward, setup_context=_setup_context)
torch.library.register_autograd("cutlass_ops::mixed_conv_backward", _no_second_gradient)
