"""Mixed convolutions by torch: it convolves the dequantised x with the dequantised weight. A CPU
uses it for an x that is not quantised, and both CPU and GPU for what no kernel implements or would
fill few of a kernel's tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference import conv as reference_conv
from ..reference.conv import Geometry
from ..weights.packed_weight import PackedWeight
from . import conv_gpu, products
from .call import Call


def convolve(
    x: Tensor,
    weight: PackedWeight,
    geometry: Geometry,
    call: Call,
) -> Tensor:
    """What :func:`reference_conv.mixed_conv` computes, ``[B, *out, N]``; the call's residual is
    ``[B, *out, N]``.

    Operands are fp32, or x's 16-bit type on a GPU if the result has it too. oneDNN sums fp32 in
    blocks: sums of 11,520 products differ from fp64's by 2.5e-7 of the result's norm.
    """
    weight = products.rounded_book(weight, x.dtype)
    compute = x.dtype if x.is_cuda and x.dtype == call.out_dtype else torch.float32
    values = x
    if call.act_quant != "none" and x.is_cuda:
        values = conv_gpu.dequantized_pixels(x, weight, geometry.groups, call, compute)
    elif call.act_quant != "none":
        quantized = (weight.group_size, geometry.groups, call.act_quant, call.act_symmetric)
        values = reference_conv.dequantized_pixels(x, *quantized, torch.float32)
    convolution: Any = torch._convolution
    # Without TensorFloat-32, which rounds fp32 operands to 11 bits, and with a deterministic
    # algorithm.
    total = convolution(
        values.to(compute),
        products.channels_last(weight, compute),
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        [0] * len(geometry.stride),
        geometry.groups,
        benchmark=False,
        deterministic=True,
        cudnn_enabled=True,
        allow_tf32=False,
    )
    sums: Tensor = total.movedim(1, -1).contiguous()
    if compute is torch.float32:
        return products.finish(sums, call.bias_of(weight), call)
    conv_gpu.finish(sums, weight, call)
    return sums
