"""Products of floats on a CPU whose sums have another order than the reference's."""

from __future__ import annotations

from dataclasses import replace

import torch
from packed_cases import random_weight
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference


def weight(
    n: int, k: int, kind: str, group_size: int, dtype: torch.dtype, bits: int = 4
) -> co.QuantizedWeight:
    if kind in ("nf4", "mxfp4"):
        w = torch.randn(n, k, generator=torch.Generator().manual_seed(k)).to(dtype)
        return reference.quantize_weight_book(w, 32 if kind == "mxfp4" else group_size, kind)
    return random_weight(n, k, bits, group_size, kind, dtype)


def check(x: Tensor, qw: co.QuantizedWeight) -> None:
    """Every element, in every dtype of the result: fp32 sums of codes and zero points in any order,
    no weight rounded. The values of a code book are those of x's dtype.
    """
    packed = co.reorder(qw)
    chosen = co.explain(x, packed)
    assert chosen.exact
    assert "another order" in chosen.why
    if qw.book is not None:
        qw = replace(qw, book=qw.book.to(x.dtype).float())
    w = reference.dequantize_weight(qw, torch.float32).double()
    largest = 2**qw.bits * qw.scales.double().abs().amax(1)
    error = 5e-7 * (x.double().abs() @ w.abs().T + x.double().abs().sum(1, keepdim=True) * largest)
    close(x, packed, w, error, qw.bias)


def close(
    x: Tensor, packed: co.PackedWeight, w: Tensor, error: Tensor, bias: Tensor | None
) -> None:
    """Every element, in every dtype of the result, is that of x and the values w ``[N, K]`` in
    double precision, up to ``error [M, N]`` and a rounding.
    """
    total = x.double() @ w.T
    if bias is not None:
        total = total + bias.double()
    for dtype, half in (
        (torch.float32, 2.0**-24),
        (torch.bfloat16, 2.0**-8),
        (torch.float16, 2.0**-11),
    ):
        y = co.mixed_gemm(x, packed, out_dtype=dtype)
        assert y.dtype == dtype
        assert bool(((y.double() - total).abs() <= error + half * total.abs() * 1.01).all())
