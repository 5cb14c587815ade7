"""Weights: their quantisation in groups, and the values of their codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import QuantizedWeight
from .activations import SMALLEST_RANGE
from .blocks import FLOAT_TYPES, check_matrix, in_blocks, quotient, rounded_up, row_chunks
from .codebooks import code_book, quantize_book, quantize_e4m3, quantize_mxfp4

#: Factors by which the range of a group of weights may be clipped.
CLIP_FACTORS = tuple(i / 40 for i in range(40, 19, -1))


def quantize_weight(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, clip: str | None = None
) -> QuantizedWeight:
    """Quantise a weight by rounding to nearest, one scale (and zero point) for each
    row and group of K.

    In fp32; amax, lo = min(0, w) and hi = max(0, w) are those of the group.

    - symmetric: ``s = amax / (2^(b-1) - 1)``, codes ``rint(w / s) + 2^(b-1)``; code 0 is never
      used, so that w and -w have mirrored codes (of 2 bits -1, 0 and 1);
    - asymmetric: ``s = (hi - lo) / (2^b - 1)``, ``z = rint(-lo / s)``, codes
      ``clamp(rint(w / s) + z, 0, 2^b - 1)``.

    Scales are stored in the weight's dtype and codes are computed with the stored ones. s is
    rounded up to that dtype, never down: then no scale becomes 0 in fp16, the largest weight of a
    group still has a code, and every weight is within s / 2 of its value. (s is at most the largest
    weight, so it does not overflow.)

    A group whose range (amax or hi - lo) is below 2^-100 has scale 1 and codes of value 0. One
    whose range is not finite has a NaN scale and codes of value 0.

    With ``clip="mse"`` the range of each group shrinks by the one of ``CLIP_FACTORS`` (amax, or lo
    and hi, times it) at which the sum of ``(w - s * (q - z))^2`` is smallest (the terms in fp32,
    the sum in fp64); of equal ones by the first. Weights outside of it get the outermost codes.

    Args:
        weight: fp16, bf16 or fp32 ``[N, K]``.
        bits: 2, 4 or 8.
        group_size: 16, 32, 64, a multiple of 128, or -1; the last group may be short.
        symmetric: whether there are no zero points.
        clip: None or "mse".

    Raises:
        TypeError, ValueError: weight is not such a matrix, or bits, group_size or clip
            is not supported.
    """
    check_matrix("weight", weight, FLOAT_TYPES)
    formats.check_bits(bits)
    formats.check_group_size(group_size)
    if clip not in (None, "mse"):
        raise ValueError(f"clip is {clip!r}; None and 'mse' are accepted")
    k = weight.shape[1]
    values = in_blocks(weight.float(), group_size)
    lo = values.amin(-1).clamp(max=0)
    hi = values.amax(-1).clamp(min=0)
    span = torch.maximum(hi, -lo) if symmetric else hi - lo
    regular = span.isfinite() & (span >= SMALLEST_RANGE)
    codes, scales, zeros = _weight_codes(values, lo, hi, regular, bits, symmetric, weight.dtype)
    if clip is not None:
        error = _squared_error(values, codes, scales, zeros)
        for factor in CLIP_FACTORS[1:]:
            clipped = _weight_codes(
                values, lo * factor, hi * factor, regular, bits, symmetric, weight.dtype
            )
            clipped_error = _squared_error(values, *clipped)
            better = clipped_error < error  # never where one of them is NaN
            error = torch.where(better, clipped_error, error)
            codes = torch.where(better[..., None], clipped[0], codes)
            scales, zeros = (
                torch.where(better, clipped[1], scales),
                torch.where(better, clipped[2], zeros),
            )
    return QuantizedWeight(
        codes=codes.to(torch.uint8).flatten(1)[:, :k].contiguous(),
        scales=torch.where(span.isfinite(), scales, torch.nan),
        zeros=None if symmetric else zeros.to(torch.uint8),
        bits=bits,
        group_size=group_size,
    )


def _weight_codes(
    values: Tensor,
    lo: Tensor,
    hi: Tensor,
    regular: Tensor,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and zero points of :func:`quantize_weight`, integers in fp32, and its scales, for
    blocks with these ranges.
    """
    middle, largest = formats.midpoint(bits), 2**bits - 1
    span, steps = (torch.maximum(hi, -lo), middle - 1) if symmetric else (hi - lo, largest)
    scales = rounded_up(torch.where(regular, quotient(span, steps, span), 1.0), dtype)
    codes = torch.where(
        regular[..., None], quotient(values, scales.float()[..., None], values).round(), 0.0
    )
    if symmetric:
        return codes.clamp(1 - middle, middle - 1) + middle, scales, torch.full_like(lo, middle)
    zeros = torch.where(regular, quotient(-lo, scales.float(), lo).round(), 0.0)
    return (codes + zeros[..., None]).clamp(0, largest), scales, zeros


def _squared_error(values: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The squared error of each block: differences and squares in fp32, their sum in fp64, so that
    the order of the sum does not matter.
    """
    return (
        (values - scales.float()[..., None] * (codes - zeros[..., None]))
        .square()
        .sum(-1, dtype=torch.float64)
    )


def quantize_weight_book(
    weight: Tensor, group_size: int, quant_type: str, code: Tensor | None = None
) -> QuantizedWeight:
    """Quantise a weight by a code book, one absmax for each row and group of K, stored in the
    weight's dtype (exactly).

    Args:
        weight: fp16, bf16 or fp32 ``[N, K]``.
        group_size: 16, 32, 64, a multiple of 128, or -1; the last group may be short.
        quant_type, code: as in :func:`quantize_book`; or "mxfp4", of groups of 32
            (:func:`quantize_mxfp4`); or "e4m3" (:func:`quantize_e4m3`).
    """
    check_matrix("weight", weight, FLOAT_TYPES)
    formats.check_group_size(group_size)
    blocks = in_blocks(weight, group_size)
    if code is None and quant_type == "mxfp4":
        codes, scales = quantize_mxfp4(blocks)
        book = torch.tensor(formats.E2M1, dtype=torch.float32, device=weight.device)
    elif code is None and quant_type == "e4m3":
        codes, scales = quantize_e4m3(blocks, weight.dtype)
        book = torch.tensor(formats.E4M3, dtype=torch.float32, device=weight.device)
    else:
        codes, absmax = quantize_book(blocks, quant_type, code)
        scales, book = absmax.to(weight.dtype), code_book(quant_type, code, weight.device)
    return QuantizedWeight(
        codes=codes.flatten(1)[:, : weight.shape[1]].contiguous(),
        scales=scales,
        bits=4 if len(book) == 16 else 8,
        group_size=group_size,
        book=book,
    )


def centred_weight(qw: QuantizedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    """The integers ``q - z`` of some rows, ``[rows, G, group]``; values behind K are undefined and
    unused.
    """
    codes = in_blocks(qw.codes[rows], qw.group_size).to(dtype)
    if qw.zeros is None:
        return codes.sub_(formats.midpoint(qw.bits))
    return codes.sub_(qw.zeros[rows].to(dtype)[..., None])


def weight_rows(
    qw: QuantizedWeight, rows: slice, dtype: torch.dtype, book: Tensor | None = None
) -> Tensor:
    """The values of some rows, ``[rows, K]``, columns in the order of the codes; ``book`` in place
    of the weight's own.
    """
    if qw.book is None:
        values = centred_weight(qw, rows, dtype)
    else:
        values = (qw.book if book is None else book).to(dtype)[
            in_blocks(qw.codes[rows], qw.group_size).int()
        ]
    values = values.mul_(qw.scales[rows].to(dtype)[..., None])
    if qw.offsets is not None:
        values.add_(qw.offsets[rows].to(dtype)[..., None])
    return values.flatten(1)[:, : qw.k]


def taps_as_rows(qw: QuantizedWeight) -> QuantizedWeight:
    """A convolution's weight as a matrix whose groups lie within a row: one row for each tap, if
    there are groups.
    """
    if qw.group_size == -1:
        return replace(qw, kernel_size=(), bias=None)
    rows = qw.n * qw.taps
    vectors = {name: getattr(qw, name) for name in ("codes", "scales", "zeros", "offsets")}
    by_tap: dict[str, Any] = {
        name: v.reshape(rows, -1) for name, v in vectors.items() if v is not None
    }
    return replace(qw, kernel_size=(), bias=None, **by_tap)


def dequantize_weight(qw: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight's values ``[N, K]``, columns in the order of the input features (act order
    undone); ``[N, C, *kernel]``.

    ``s * (q - z)``, ``s * (q - 2^(b-1)) + o``, or ``s * book[q]``: product and sum are rounded to
    fp32 (for float64: to float64), the result once more to ``dtype``.
    """
    if qw.kernel_size:
        values = dequantize_weight(taps_as_rows(qw), dtype).view(qw.n, *qw.kernel_size, -1)
        return values.movedim(-1, 1).contiguous()
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty(qw.shape, dtype=dtype, device=qw.device)
    columns = slice(None) if qw.perm is None else qw.perm.long()
    for rows in row_chunks(qw.n, qw.k):
        out[rows, columns] = weight_rows(qw, rows, compute).to(dtype)
    return out
