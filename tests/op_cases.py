"""Operands of mixed_gemm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.reference import dequantize_weight

NAN, INF = math.nan, math.inf

N, K = 40, 200


def weight(
    bits: int = 4,
    kind: str = "symmetric",
    group_size: int = 64,
    n: int = N,
    k: int = K,
    bias: bool = False,
    perm: bool = False,
) -> co.QuantizedWeight:
    """Random codes; scales, offsets and bias are multiples of 1/4, so that products of small
    integers are exact in fp32.
    """
    random = torch.Generator().manual_seed(bits * 1000 + group_size)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    groups = 1 if group_size == -1 else -(-k // group_size)
    return co.QuantizedWeight(
        codes=integers(0, 1 << bits, n, k).to(torch.uint8),
        scales=2.0 ** integers(-2, 2, n, groups) * (1 - 2 * integers(0, 2, n, groups)),
        zeros=integers(0, 1 << bits, n, groups).to(torch.uint8) if kind == "zeros" else None,
        offsets=integers(-8, 9, n, groups) / 4 if kind == "offsets" else None,
        bits=bits,
        group_size=group_size,
        bias=integers(-8, 9, n) / 4 if bias else None,
        perm=torch.randperm(k, generator=random) if perm else None,
    )


def sized(n: int, k: int, bits: int) -> co.PackedWeight:
    """A weight of which only the sizes are looked at; n and k are multiples of 64 and 128."""
    codes, scales = (
        torch.empty(n * k * bits // 8, dtype=torch.uint8),
        torch.empty(k // 128, n, dtype=torch.float16),
    )
    return co.PackedWeight(codes, scales, None, None, None, None, n, k, bits, 128)


def activations(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Integers from -5 to 5: exact in every float type."""
    return torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        dtype
    )


def product(x: Tensor, qw: co.QuantizedWeight) -> Tensor:
    """x times the weight's values, in fp64."""
    return x.double() @ dequantize_weight(qw, torch.float64).t()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and value, NaN equal to NaN."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


Change = dict[str, Any]
