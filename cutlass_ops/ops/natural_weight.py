"""Weights of 8 bits in natural order, for the kernels that read them so: made once, and kept
together with the packed ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _C
from ..weights.packed_weight import PackedWeight
from . import kept, native

#: Names of forms that are kept: the codes that x is multiplied by, a weight of ones, and codes for
#: activations that are quantised in the call.
_CODES, _ONES, _MIXED = "static int8", "static int8, ones", "int8, in the order of activations"


class Natural(NamedTuple):
    """A weight as ``conv.h`` describes it.

    Attributes:
        codes: int8 ``[N, ...]``, in one of the orders of ``conv.h``.
        sums: int32 ``[N]``, of the codes of each channel.
    """

    codes: Tensor
    sums: Tensor


class Operand(NamedTuple):
    """The integers that kernels multiply x by, and the remainder of the zero points.

    ``w - zw = code - rest``, so the sums are those of the codes minus ``rest`` times the sum of
    ``x - zx`` over the window, which is a convolution with ones.

    Attributes:
        weight: ``[N]`` channels.
        rest: int32 ``[N]``; None if it is zero.
        ones: a weight of ones, a channel for each of the convolution's groups; None if ``rest`` is.
    """

    weight: Natural
    rest: Tensor | None = None
    ones: Natural | None = None


def natural_order(n: int, weight: PackedWeight, groups: int) -> _C.ConvOrder:
    """The order of ``n`` channels of the weight."""
    return _C.conv_order(n, weight.k // weight.taps, weight.taps, groups)


def in_order(codes: Tensor, order: _C.ConvOrder) -> Natural:
    """int8 ``[N, height, width, channels]``."""
    sums = codes.sum((1, 2, 3), dtype=torch.int32)
    if order == _C.ConvOrder.by_taps:
        words = F.pad(codes[..., 0], (0, -codes.shape[2] % 4)).view(*codes.shape[:2], -1, 4)
        return Natural(words.permute(1, 2, 0, 3).contiguous(), sums)
    if order == _C.ConvOrder.flat:
        codes = codes.flatten(1)
    return Natural(
        F.pad(codes, (0, _C.stored_channels(codes.shape[-1]) - codes.shape[-1])).contiguous(), sums
    )


def kernel_shape(weight: PackedWeight) -> tuple[int, ...]:
    """``(height, width, channels)`` of a group."""
    taps = weight.kernel_size or (1, 1)
    return (*((1,) * (2 - len(taps))), *taps, weight.k // weight.taps)


def without_zeros(weight: PackedWeight, groups: int) -> tuple[Tensor, ...]:
    """The tensors of ``Operand.weight`` and, of a weight with zero points, ``Operand.rest`` even
    if that is zero.
    """
    qw, order = weight.unpack(), natural_order(weight.n, weight, groups)
    if qw.zeros is None:
        return in_order(
            (qw.codes ^ 0x80).view(torch.int8).view(weight.n, *kernel_shape(weight)), order
        )
    # For each row the point nearest to its zero point from which the distance to all codes fits
    # int8.
    zeros, codes = qw.zeros.short(), qw.codes
    near = zeros.clamp(
        codes.amax(1, keepdim=True).short() - 127, codes.amin(1, keepdim=True).short() + 128
    )
    natural = (codes - near.byte()).view(torch.int8).view(weight.n, *kernel_shape(weight))
    return (*in_order(natural, order), (zeros - near)[:, 0].int())


def ones(weight: PackedWeight, groups: int) -> Natural:
    """``Operand.ones``."""
    codes = torch.ones(groups, *kernel_shape(weight), dtype=torch.int8, device=weight.device)
    return in_order(codes, natural_order(groups, weight, groups))


def operand(weight: PackedWeight, groups: int) -> Operand:
    """What is kept, if codes and zero points are still those that it was made of."""
    sizes, parts = (weight.n, weight.kernel_size, groups), ("zeros",)

    def make() -> tuple[Tensor, ...]:
        made = without_zeros(weight, groups)
        if len(made) == 2:
            return made
        # Whether the remainder is not zero, on the CPU. Reading it waits for the GPU, so it is read
        # only where the answer is kept.
        counts = (
            made[2].any().cpu()
            if kept.keeps(weight, parts)
            else torch.ones((), dtype=torch.bool, device="cpu")
        )
        return (*made, counts)

    codes, sums, *left = kept.form(weight, parts, (_CODES, *sizes), make)
    natural = Natural(codes, sums)
    if not left or not left[1]:
        return Operand(natural)
    windows = kept.form(weight, (), (_ONES, *sizes), lambda: ones(weight, groups))
    return Operand(natural, left[0], Natural(*windows))


def in_activation_order(weight: PackedWeight) -> Natural:
    """A weight without zero points, by channels, of which each 16 are in the order of quantised
    activations.
    """

    def make() -> Natural:
        codes, sums = without_zeros(weight, 1)
        halves = codes.view(*codes.shape[:-1], -1, 2, 8)
        return Natural(halves.transpose(-1, -2).reshape(codes.shape), sums)

    return Natural(*kept.form(weight, (), (_MIXED, weight.n, weight.kernel_size), make))


def conv_weight(
    natural: Natural | None, weight: PackedWeight, n: int, groups: int
) -> _C.ConvWeight:
    """``natural``, of ``n`` channels, with the scales of the weight that it is made of; None for a
    plan, which reads nothing.
    """
    height, width, channels = kernel_shape(weight)
    codes, sums = natural or (weight.codes, weight.codes)
    return _C.ConvWeight(
        codes.data_ptr(),
        natural_order(n, weight, groups),
        sums.data_ptr(),
        weight.scales.data_ptr(),
        native.DATA_TYPES[weight.scales.dtype],
        n,
        (height, width),
        channels,
    )
