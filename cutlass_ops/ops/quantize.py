"""Float weights to quantised ones, by rounding to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..weights import formats
from ..weights.weight import QuantizedWeight

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)

#: Weights quantised at a time on a GPU. The fp32 temporaries of one piece are small beside a large
#: layer.
_PIECE_ON_GPU = 1 << 24
#: On a CPU, and with a search: the passes are made over what stays in the cache.
_PIECE_IN_CACHE = 1 << 19


def check_options(bits: int, group_size: int, book: str | Tensor | None, clip: str | None) -> None:
    """Check the options of :func:`quantize` before there is a weight.

    Raises:
        TypeError, ValueError: an option that is not supported, or two that contradict each other.
    """
    formats.check_bits(bits)
    formats.check_group_size(group_size)
    if clip not in (None, "mse"):
        raise ValueError(f"clip is {clip!r}; None and 'mse' are accepted")
    if book is None:
        return
    if isinstance(book, Tensor):
        if not reference.code_book("", book).isfinite().all():
            raise ValueError(f"book has values that are not finite: {book.tolist()}")
    elif isinstance(book, str):
        if book not in formats.BOOKS:
            known = ", ".join(map(repr, formats.BOOKS))
            raise ValueError(f"book is {book!r}; supported are {known}, and a tensor of 16 values")
        if book == "mxfp4" and group_size != formats.MXFP4_GROUP:
            raise ValueError(
                f"group_size is {group_size}; mxfp4 has groups of {formats.MXFP4_GROUP}"
            )
    else:
        raise TypeError(
            f"book is a {type(book).__name__}; a name or a tensor of 16 values is expected"
        )
    what, values = (
        (repr(book), formats.BOOKS[book]) if isinstance(book, str) else ("a code book", book)
    )
    if len(values) != 1 << bits:
        raise ValueError(f"bits is {bits}; {what} has {len(values)} values")
    if clip is not None:
        raise ValueError(
            f"both book and clip are given ({book!r}, {clip!r}); a code book spans the "
            "whole range of a group"
        )


def quantize(
    weight: Tensor,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    book: str | Tensor | None = None,
    clip: str | None = None,
) -> QuantizedWeight:
    """Quantise a float weight by rounding to nearest, as ``reference.quantize_weight`` defines it.

    Args:
        weight: fp16, bf16 or fp32 ``[N, K]``, or a convolution's, ``[N, C, *kernel]`` of 3 to 5
            dimensions; scales are stored in its dtype.
        bits: 2, 4 or 8.
        group_size: 16, 32, 64, a multiple of 128, or -1 (one group for all of K). The last group
            may be short: one size for layers of any K, beyond it too. Groups of a convolution's
            weight are of channels of one tap.
        symmetric: whether codes are centred on ``2**(bits-1)``; otherwise each group has an integer
            zero point. With 2 bits a symmetric weight is -1, 0 or 1 times its scale.
        book: a code book of 4-bit codes, "nf4", "fp4" or an fp32 tensor ``[16]`` in any order: each
            weight gets the code of the nearest value (``reference.quantize_book``), the scale of a
            group being its largest magnitude. Or "mxfp4", in groups of 32, whose scales are powers
            of two, stored as bf16 (``reference.quantize_mxfp4``). Or "e4m3", floats of 8 bits, with
            ``bits=8`` (``reference.quantize_e4m3``). ``symmetric`` has no meaning then.
        clip: "mse" searches for each group the range, from all of it to half, at which the squared
            error is smallest: some twenty times the work. None takes the whole range.

    Returns:
        The weight in canonical form, on the same device.

    Raises:
        TypeError: weight or book is of another type or dtype.
        ValueError: weight has another number of dimensions, holds NaN or inf, or bits, group_size,
            book or clip is not supported.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight is a {type(weight).__name__}; a torch.Tensor is expected")
    if weight.dtype not in FLOAT_TYPES:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise TypeError(f"weight has dtype {dtype}; supported are float16, bfloat16, float32")
    if not 2 <= weight.dim() <= 5 or 0 in weight.shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; [N, K] or [N, C, *kernel], none "
            "empty, is expected"
        )
    check_options(bits, group_size, book, clip)
    # A copy: weights of a model that shared the tensor could not be saved.
    quant_type, code = (
        ("", book.to(weight.device, copy=True)) if isinstance(book, Tensor) else (book, None)
    )
    n, kernel_size = weight.shape[0], tuple(weight.shape[2:])
    if kernel_size:
        weight = weight.movedim(1, -1)
        # No group goes on from one tap to the next: each tap is a separate row.
        weight = weight.reshape(n, -1) if group_size == -1 else weight.reshape(-1, weight.shape[-1])
    in_cache = clip is not None or weight.device.type == "cpu"
    rows = max(1, (_PIECE_IN_CACHE if in_cache else _PIECE_ON_GPU) // weight.shape[1])
    pieces = [
        reference.quantize_weight(piece, bits, group_size, symmetric, clip)
        if quant_type is None
        else reference.quantize_weight_book(piece, group_size, quant_type, code)
        for piece in torch.split(weight.detach(), rows)
    ]
    scales = torch.cat([piece.scales for piece in pieces]).view(n, -1)
    if not scales.isfinite().all():
        row, group = (~scales.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"weight has NaN, inf or a range beyond fp32 in row {row}, group {group}")
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return QuantizedWeight(
        codes=torch.cat([piece.codes for piece in pieces]).view(n, -1),
        scales=scales,
        zeros=torch.cat(zeros).view(n, -1) if zeros else None,
        bits=bits,
        group_size=group_size,
        book=pieces[0].book,
        kernel_size=kernel_size,
    )
