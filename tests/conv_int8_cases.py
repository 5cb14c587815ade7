"""Operands of static int8 convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

import cutlass_ops as co

INT8 = (torch.int8, torch.uint8)


def codes(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(
        info.min, info.max + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )


def packed(
    w: Tensor, scales: Tensor, bias: Tensor | None = None, zeros: Tensor | None = None
) -> co.PackedWeight:
    """int8 or uint8 ``[N, C, *kernel]``, or a matrix, with one scale a row, and zero points of w's
    dtype, one a row.
    """

    def as_codes(values: Tensor) -> Tensor:
        return values if values.dtype == torch.uint8 else (values.int() + 128).to(torch.uint8)

    weight = co.QuantizedWeight(
        as_codes(w.movedim(1, -1).flatten(1)),
        scales[:, None],
        zeros=None if zeros is None else as_codes(zeros[:, None]),
        bits=8,
        group_size=-1,
        bias=bias,
        kernel_size=tuple(w.shape[2:]),
    )
    return co.reorder(weight)
