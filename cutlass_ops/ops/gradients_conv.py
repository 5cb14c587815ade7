"""The gradient of mixed convolutions: that of torch's convolution with the packed weight's values.

As in ``gradients.py`` the backward pass is an operator, so that torch.compile records it; importing
this module registers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import arguments, conv, library, products
from .conv import OF_CONV
from .gradients import through_activation

#: Which of mixed_conv's arguments may require a gradient, besides x.
_BIAS, _RESIDUAL = OF_CONV.place("bias"), OF_CONV.place("residual")


def _backward_op(grad: Tensor, x: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    """Gradients of x and, fp32, of the bias; an empty tensor where one is not wanted."""
    (*fields, dtype, shape, wanted), call = OF_CONV.split(args)
    weight, geometry = conv.packed_weight(fields)
    compute = torch.float32 if grad.is_cpu else torch.promote_types(dtype, grad.dtype)
    of_x, of_bias = grad.new_empty(0, dtype=dtype), grad.new_empty(0, dtype=torch.float32)
    with arguments.without_autocast(grad.device):
        if x is not None:
            z = conv.run_conv(x, weight, geometry, call.before_activation())
            grad = through_activation(grad.float(), z, call)
        if wanted[1]:
            of_bias = grad.float().sum([0, *range(2, grad.dim())])
        if wanted[0]:
            values = products.run_dequantize(weight, compute)
            like = values.new_empty(1).expand(shape)
            stride, padding, dilation, groups = geometry
            still = [0] * len(stride)
            of_x, *_ = torch.ops.aten.convolution_backward(
                grad.to(compute),
                like,
                values,
                None,
                stride,
                padding,
                dilation,
                False,
                still,
                groups,
                [True, False, False],
            )
            of_x = of_x.to(dtype).movedim(1, -1).contiguous().movedim(-1, 1)
    return of_x, of_bias


def _backward_fake(grad: Tensor, x: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    (*fields, dtype, (b, c, *space), wanted), _ = OF_CONV.split(args)
    images = grad.new_empty((b, *space, c), dtype=dtype).movedim(-1, 1)
    return (
        images if wanted[0] else grad.new_empty(0, dtype=dtype),
        grad.new_empty(fields[6] if wanted[1] else 0, dtype=torch.float32),
    )


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    (x, *fields), call = OF_CONV.split(inputs)
    again = call.activation is not None
    tensors = (field if isinstance(field, Tensor) else None for field in fields)
    ctx.save_for_backward(x if again else None, call.bias if again else None, *tensors)
    ctx.fields = [None if isinstance(field, Tensor) else field for field in fields]
    ctx.call = call.without_tensors()
    ctx.of_x = x.dtype, list(x.shape)
    ctx.dtypes = (
        None if call.bias is None else call.bias.dtype,
        None if call.residual is None else call.residual.dtype,
    )


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, *tensors = ctx.saved_tensors
    fields = [
        field if tensor is None else tensor
        for field, tensor in zip(ctx.fields, tensors, strict=True)
    ]
    bias_dtype, residual_dtype = ctx.dtypes
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[_BIAS]]
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if any(wanted):
        call = OF_CONV.values(ctx.call._replace(bias=bias))
        of_x, of_bias = torch.ops.cutlass_ops.mixed_conv_backward(
            grad, x, *fields, *ctx.of_x, wanted, *call
        )
        result[0] = of_x if wanted[0] else None
        result[_BIAS] = of_bias.to(bias_dtype) if wanted[1] else None
    if ctx.needs_input_grad[_RESIDUAL]:
        result[_RESIDUAL] = grad.to(residual_dtype)
    return tuple(result)


def _no_second_gradient(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "mixed convolutions have no gradient of their gradient: packed weights support first "
        "derivatives only"
    )


library.register(
    f"mixed_conv_backward(Tensor grad, Tensor? x, {conv.CONV_SCHEMA}, ScalarType dtype, SymInt[] "
    "shape, bool[2] wanted, "
    f"{OF_CONV.text}) -> (Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
torch.library.register_autograd("cutlass_ops::mixed_conv", _backward, setup_context=_setup_context)
torch.library.register_autograd("cutlass_ops::mixed_conv_backward", _no_second_gradient)
