"""Convolutions of quantised activations on a CPU, as products of rows of pixels.

A row holds, tap by tap, the codes of the pixels under the kernel at one place of the result. Some
rows at a time are gathered, so many as a cache holds, and multiplied by the kernels of
``mixed_gemm``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference.conv import Geometry
from ..weights import formats
from ..weights.packed_weight import PackedWeight
from . import products
from .activations import QuantizedActivations, run_quantize
from .call import Call

#: Bytes of the codes that are gathered at a time. The bits of an activation may depend on them, so
#: that they must not depend on the number of threads.
_GATHERED_BYTES = 1 << 20
#: Rows of a chunk are a multiple of this, as scales have such a stride.
_ROWS = 16
#: With fewer output channels in a group, gathering takes longer than the products save: by the bits
#: of a weight.
_LEAST_OUTPUTS = {2: 128, 4: 128, 8: 256}
#: Places of the result up to which torch takes longer to dequantise a weight of 8 bits than its
#: faster product saves.
_MOST_PLACES_OF_BYTES = 256


def takes(shape: Sequence[int], weight: PackedWeight, geometry: Geometry, act_quant: str) -> bool:
    """Whether products are faster than torch's fp32 convolution of an x of this shape, and exist:
    quantised activations with many output channels, and channels that fill most of a tap's columns.
    """
    if act_quant == "none":
        return False
    groups = geometry.groups
    places = shape[0] * math.prod(geometry.out(shape[2:], weight.kernel_size))
    channels, columns = weight.k // weight.taps, formats.padded_k(weight.k, weight.taps)
    columns //= weight.taps
    # Codes of several groups, and of "tensor", lie side by side without padding.
    padded = channels != columns and (groups > 1 or act_quant == "tensor")
    outputs = weight.n // groups
    return (
        not padded
        and (weight.bits < 8 or places <= _MOST_PLACES_OF_BYTES)
        and 4 * channels >= 3 * columns
        and outputs >= _LEAST_OUTPUTS[weight.bits]
        and (groups == 1 or outputs % formats.ROWS_PER_PANEL == 0)
    )


def convolve(x: Tensor, weight: PackedWeight, geometry: Geometry, call: Call) -> Tensor:
    """What :func:`conv_torch.convolve` computes, for a call that :func:`takes` allows.

    The sums are those of :func:`reference.gemm_quantized` with the rows above and
    ``weight.matrix``.
    """
    space, groups, matrix = x.shape[2:], geometry.groups, weight.matrix
    shape = (x.shape[0], *geometry.out(space, weight.kernel_size), weight.n)
    block = formats.activation_block(weight.group_size)
    codes, scales, zeros = _quantize(x, block, call)
    columns = formats.padded_k(weight.k, weight.taps) // weight.taps
    outputs, m = weight.n // groups, math.prod(shape[:-1])
    y = torch.empty(m, weight.n, dtype=call.out_dtype, device="cpu")
    step = max(_GATHERED_BYTES // matrix.k // _ROWS, 1) * _ROWS
    residual = None if call.residual is None else call.residual.reshape(m, weight.n)
    bias = call.bias_of(weight)
    for start in range(0, m, step):
        stop = min(start + step, m)
        pixels = _pixels(start, -(-stop // _ROWS) * _ROWS, m, shape, space, weight, geometry)
        for group, part in enumerate(weight.group_matrices(groups)):
            features = slice(group * outputs, (group + 1) * outputs)
            own = slice(group * columns, (group + 1) * columns)
            blocks = slice(group * columns // block, (group + 1) * columns // block)
            rows = QuantizedActivations(
                codes[:, own]
                .index_select(0, pixels.view(-1))
                .view(len(pixels), -1)[: stop - start],
                _of_taps(scales[blocks], pixels),
                None if zeros is None else _of_taps(zeros[blocks], pixels),
                block,
                matrix.k,
                torch.Size((stop - start, matrix.k)),
                x.dtype,
                None,
            )
            of_part = call._replace(
                bias=None if bias is None else bias[features],
                residual=None if residual is None else residual[start:stop, features],
            )
            y[start:stop, features] = products.gemm_quantized(
                rows, part, (stop - start, outputs), of_part
            )
    return y.view(shape)


def _quantize(x: Tensor, block: int, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """x as codes of pixels and of a last one that is zero, for missing ones: ``[P + 1, columns]``,
    and scales (and zero points) of blocks ``[columns / block, >= P + 1]``.
    """
    pixels = x.shape[0] * math.prod(x.shape[2:])
    rows = x.new_zeros(pixels + 1, x.shape[1])
    rows[:-1] = x.movedim(1, -1).reshape(pixels, x.shape[1])
    if call.act_quant == "tensor":
        found = run_quantize(rows.view(1, -1), None, -1, call.act_symmetric)
        codes = found[0][0, : rows.numel()].view(rows.shape)
    else:
        size = block if call.act_quant == "block" else -1
        found = run_quantize(rows, None, size, call.act_symmetric)
        codes = found[0]
    if call.act_quant == "block":
        return codes, found[1], found[2]
    count = codes.shape[1] // block

    def of_blocks(vectors: Tensor) -> Tensor:
        vectors = vectors[:, :1] if call.act_quant == "tensor" else vectors[:, : len(rows)]
        return vectors.expand(count, len(rows))

    return codes, of_blocks(found[1]), None if found[2] is None else of_blocks(found[2])


def _of_taps(vectors: Tensor, pixels: Tensor) -> Tensor:
    """Vectors ``[blocks, pixels]`` of pixels ``[rows, taps]``: ``[taps * blocks, rows]``."""
    rows, taps = pixels.shape
    found = vectors.index_select(1, pixels.t().reshape(-1)).view(-1, taps, rows)
    return found.transpose(0, 1).reshape(-1, rows)


def _pixels(
    start: int,
    stop: int,
    m: int,
    shape: Sequence[int],
    space: Sequence[int],
    weight: PackedWeight,
    geometry: Geometry,
) -> Tensor:
    """The pixels under each tap at the places ``start`` to ``stop`` of the result, int64
    ``[rows, taps]``; where one is missing, and from place m on, the number of pixels.
    """
    rest = torch.arange(start, stop, device="cpu")
    outside = (rest >= m)[:, None]
    found, scale = torch.zeros(stop - start, 1, dtype=torch.int64, device="cpu"), 1
    for i in reversed(range(len(space))):
        taps = torch.arange(weight.kernel_size[i], device="cpu") * geometry.dilation[i]
        position = (rest % shape[1 + i] * geometry.stride[i] - geometry.padding[i])[:, None] + taps
        rest = rest // shape[1 + i]
        missing = (position < 0) | (position >= space[i])
        found = (position[:, :, None] * scale + found[:, None]).flatten(1)
        outside = (missing[:, :, None] | outside[:, None]).flatten(1)
        scale *= space[i]
    found = found + rest[:, None] * scale
    return found.masked_fill_(outside, shape[0] * scale)
