"""The specification: every number that a kernel may produce, in plain torch, on any device.

Codes and scales of activations are normative bit for bit. Products are normative bit for bit on CPUs, whose kernels take
fp32 sums in the order that is defined here, and up to that order on GPUs. ``compute_dtype=torch.float64`` turns the products
into an oracle for tests.

Everything rounds half to even. Every fp32 product, quotient and difference of the quantisers is rounded by
itself: a kernel must not fuse them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from . import formats
from .weight import QuantizedWeight

#: ``None``, ``"relu"``, ``"relu6"``, ``"gelu"`` (the erf form), ``"silu"`` or ``("clamp", lo, hi)``.
Activation: TypeAlias = "str | tuple[str, float, float] | None"

#: Below this, the range of a block or group counts as zero: its reciprocal could overflow.
SMALLEST_RANGE = 2.0**-100

#: By which the range of a group of weights may be clipped.
CLIP_FACTORS = tuple(i / 40 for i in range(40, 19, -1))

#: fp32 holds every integer up to this.
_EXACT_IN_FP32 = 2**24

#: Why a product of a code book's values with quantised activations is refused.
BOOK_NEEDS_FLOATS = "a weight with a code book is multiplied by floats (act_quant='none')"

#: Why a product with a convolution's weight is refused.
CONVOLUTION = "the weight is a convolution's, with a kernel of {}; a matrix is expected"

_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)

#: Elements of a temporary tensor: 4 MB of fp32 stay in the cache, several times as fast as
#: one pass over all rows.
_CHUNK = 1 << 20


# ---- blocks along K


def _blocks(x: Tensor, size: int) -> Tensor:
    """``[R, K]`` as ``[R, B, size]``, zeros after K; size -1 is one block."""
    k = x.shape[1]
    size = k if size == -1 else size
    count = formats.group_count(k, size)
    missing = count * size - k
    return (F.pad(x, (0, missing)) if missing else x).reshape(x.shape[0], count, size)


def _row_chunks(rows: int, elements_per_row: int, least: int = 64) -> Iterator[slice]:
    """Slices of the rows whose temporaries have about ``_CHUNK`` elements, of at least ``least`` rows."""
    step = max(least, _CHUNK // elements_per_row)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _check_block(block: int) -> None:
    if block != -1 and block < 1:
        raise ValueError(f"block is {block!r}; a number of columns, or -1 (one block a row), is expected")


def _check_matrix(name: str, x: Tensor, types: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in types:
        accepted = ", ".join(str(t).removeprefix("torch.") for t in types)
        raise TypeError(f"{name} has dtype {str(x.dtype).removeprefix('torch.')}; supported are {accepted}")
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; a matrix with columns is expected")


# ---- quantisers


def _quotient(a: float | Tensor, b: float | Tensor, like: Tensor) -> Tensor:
    """``a / b``, rounded once.

    torch computes ``number / tensor`` as ``reciprocal(tensor) * number`` and, on CUDA, ``tensor / number`` as
    ``tensor * (1 / number)``: two roundings, other codes. With tensors on both sides it divides.
    """
    numerator = a if isinstance(a, Tensor) else like.new_full((), a)
    denominator = b if isinstance(b, Tensor) else like.new_full((), b)
    return torch.div(numerator, denominator)


def quantize_activations(x: Tensor, block: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise activations to int8, one scale (and zero point) for each row and block of K.

    All of it in fp32, each operation rounded by itself; amax, lo and hi are those of the block.

    - symmetric: ``s = amax / 127``, ``r = 127 / amax``, ``q = clamp(rint(x * r), -127, 127)``;
    - asymmetric: ``lo = min(0, x)``, ``hi = max(0, x)``, ``s = (hi - lo) / 255``, ``r = 255 / (hi - lo)``,
      ``z = clamp(rint(-128 - lo * r), -128, 127)``, ``q = clamp(rint(x * r) + z, -128, 127)``.

    A block whose range (amax or hi - lo) is below 2^-100 has s = 1, q = z = 0. A block whose range is not
    finite (it holds NaN or inf, or hi - lo overflows) has s = NaN, q = z = 0, so that every product with it
    is NaN.

    Args:
        x: fp16, bf16 or fp32 ``[M, K]``.
        block: columns that share a scale; the last block may be short. -1: one block a row.
        symmetric: whether there are no zero points.

    Returns:
        codes int8 ``[M, K]``, scales fp32 ``[M, B]`` and zeros int8 ``[M, B]``, or None if symmetric. The
        value of a code is ``scale * (code - zero)``.

    Raises:
        TypeError, ValueError: x is not such a matrix, or block means nothing.
    """
    _check_matrix("x", x, _FLOAT_TYPES)
    _check_block(block)
    k = x.shape[1]
    values = _blocks(x.float(), block)
    lo = values.amin(-1).clamp(max=0)
    hi = values.amax(-1).clamp(min=0)
    # NaN goes through amin, amax and maximum. The zeros that fill a short block move neither amax nor lo
    # nor hi.
    span = torch.maximum(hi, -lo) if symmetric else hi - lo
    steps = 127.0 if symmetric else 255.0
    regular = span.isfinite() & (span >= SMALLEST_RANGE)
    scales = torch.where(regular, _quotient(span, steps, span), 1.0)
    scales = torch.where(span.isfinite(), scales, torch.nan)
    reciprocal = _quotient(steps, span, span)
    codes = (values * reciprocal[..., None]).round()
    if symmetric:
        zeros = None
        codes = codes.clamp(-127, 127)
    else:
        zeros = (-128.0 - lo * reciprocal).round().clamp(-128, 127)
        zeros = torch.where(regular, zeros, 0.0)
        codes = (codes + zeros[..., None]).clamp(-128, 127)
        zeros = zeros.to(torch.int8)
    codes = torch.where(regular[..., None], codes, 0.0).to(torch.int8)
    return codes.flatten(1)[:, :k].contiguous(), scales, zeros


def _rounded_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive finite fp32 scales as the nearest values of ``dtype`` that are not smaller."""
    nearest = scales.to(dtype)
    if dtype == torch.float32:
        return nearest
    # The bits of positive floats are ordered as integers, so the next larger value is the next integer.
    above = (nearest.view(torch.int16) + 1).view(dtype)
    return torch.where(nearest.float() < scales, above, nearest)


def quantize_weight(weight: Tensor, bits: int, group_size: int, symmetric: bool, clip: str | None = None) -> QuantizedWeight:
    """Quantise a weight by rounding to nearest, one scale (and zero point) for each row and group of K.

    In fp32; amax, lo = min(0, w) and hi = max(0, w) are those of the group.

    - symmetric: ``s = amax / (2^(b-1) - 1)``, codes ``rint(w / s) + 2^(b-1)``; code 0 is never used, so
      that w and -w have mirrored codes;
    - asymmetric: ``s = (hi - lo) / (2^b - 1)``, ``z = rint(-lo / s)``, codes
      ``clamp(rint(w / s) + z, 0, 2^b - 1)``.

    Scales are stored in the weight's dtype and codes are computed with the stored ones. s is rounded up to
    that dtype, never down: then no scale becomes 0 in fp16, the largest weight of a group still has a code,
    and every weight is within s / 2 of its value. (s is at most 2/7 of the largest weight, so it does not
    overflow.)

    A group whose range (amax or hi - lo) is below 2^-100 has scale 1 and codes of value 0. One whose range
    is not finite has a NaN scale and codes of value 0.

    With ``clip="mse"`` the range of each group shrinks by the one of ``CLIP_FACTORS`` (amax, or lo and hi, times it) at
    which the sum of ``(w - s * (q - z))^2`` is smallest (the terms in fp32, the sum in fp64); of equal ones by the first.
    Weights outside of it get the outermost codes.

    Args:
        weight: fp16, bf16 or fp32 ``[N, K]``.
        bits: 4 or 8.
        group_size: 32, 64, a multiple of 128, or -1; the last group may be short.
        symmetric: whether there are no zero points.
        clip: None or "mse".

    Raises:
        TypeError, ValueError: weight is not such a matrix, or bits, group_size or clip is not supported.
    """
    _check_matrix("weight", weight, _FLOAT_TYPES)
    formats.check_bits(bits)
    formats.check_group_size(group_size)
    if clip not in (None, "mse"):
        raise ValueError(f"clip is {clip!r}; None and 'mse' are accepted")
    k = weight.shape[1]
    values = _blocks(weight.float(), group_size)
    lo = values.amin(-1).clamp(max=0)
    hi = values.amax(-1).clamp(min=0)
    span = torch.maximum(hi, -lo) if symmetric else hi - lo
    regular = span.isfinite() & (span >= SMALLEST_RANGE)
    codes, scales, zeros = _weight_codes(values, lo, hi, regular, bits, symmetric, weight.dtype)
    if clip is not None:
        error = _squared_error(values, codes, scales, zeros)
        for factor in CLIP_FACTORS[1:]:
            clipped = _weight_codes(values, lo * factor, hi * factor, regular, bits, symmetric, weight.dtype)
            clipped_error = _squared_error(values, *clipped)
            better = clipped_error < error  # never where one of them is NaN
            error = torch.where(better, clipped_error, error)
            codes = torch.where(better[..., None], clipped[0], codes)
            scales, zeros = torch.where(better, clipped[1], scales), torch.where(better, clipped[2], zeros)
    return QuantizedWeight(
        codes=codes.to(torch.uint8).flatten(1)[:, :k].contiguous(),
        scales=torch.where(span.isfinite(), scales, torch.nan),
        zeros=None if symmetric else zeros.to(torch.uint8),
        bits=bits,
        group_size=group_size,
    )


def _weight_codes(
    values: Tensor, lo: Tensor, hi: Tensor, regular: Tensor, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and zero points of :func:`quantize_weight`, integers in fp32, and its scales, for blocks with these ranges."""
    middle, largest = formats.midpoint(bits), 2**bits - 1
    span, steps = (torch.maximum(hi, -lo), middle - 1) if symmetric else (hi - lo, largest)
    scales = _rounded_up(torch.where(regular, _quotient(span, steps, span), 1.0), dtype)
    codes = torch.where(regular[..., None], _quotient(values, scales.float()[..., None], values).round(), 0.0)
    if symmetric:
        return codes.clamp(1 - middle, middle - 1) + middle, scales, torch.full_like(lo, middle)
    zeros = torch.where(regular, _quotient(-lo, scales.float(), lo).round(), 0.0)
    return (codes + zeros[..., None]).clamp(0, largest), scales, zeros


def _squared_error(values: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Of each block: differences and squares in fp32, their sum in fp64, so that its order decides nothing."""
    return (values - scales.float()[..., None] * (codes - zeros[..., None])).square().sum(-1, dtype=torch.float64)


# ---- code books


def code_book(quant_type: str, code: Tensor | None = None, device: torch.device | None = None) -> Tensor:
    """The values of 4-bit codes, fp32 ``[16]``: ``code`` if given, else the book of that name.

    Raises:
        TypeError, ValueError: a name that does not exist, or a ``code`` that is not 16 finite fp32 values.
    """
    if code is None:
        return torch.tensor(formats.CODE_BOOKS[formats.check_quant_type(quant_type)], dtype=torch.float32, device=device)
    if code.dtype != torch.float32:
        raise TypeError(f"code has dtype {str(code.dtype).removeprefix('torch.')}; supported is float32")
    if tuple(code.shape) != (16,):
        raise ValueError(f"code has shape {tuple(code.shape)}; (16,) is expected")
    return code


def book_cuts(quant_type: str, code: Tensor | None = None, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Where the code of ``v = x / absmax`` changes: limits, ascending, fp32, and the codes of the ranges between, uint8.

    A value is in the range above every limit that is smaller than it. For "fp4" these are the magnitudes', 7 limits and 8
    codes; for other books there are 15 and 16.
    """
    if code is None and formats.check_quant_type(quant_type) == "fp4":
        cuts = torch.tensor(formats.FP4_CUTS, dtype=torch.float32, device=device)
        return cuts, torch.tensor(formats.FP4_ORDER, dtype=torch.uint8, device=device)
    ascending, order = code_book(quant_type, code, device).sort(stable=True)
    return (ascending[:-1] + ascending[1:]) / 2, order.to(torch.uint8)


def quantize_book(values: Tensor, quant_type: str, code: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise blocks by a code book.

    In fp32: ``absmax = max |x|``, ``r = 1 / max(absmax, 1e-38)``, ``v = x * r``. The code is the one whose value is
    nearest to v; halfway between two (the midpoint rounded to fp32), the smaller value's. For "fp4" the limits between
    magnitudes are ``formats.FP4_CUTS``, the sign is that of v, and -0 counts as 0. These are the codes that bitsandbytes'
    CUDA kernels write (its CPU path has other FP4 limits in the last place, and -0 codes elsewhere).

    A block of zeros has absmax 0 and codes of value 0. One with NaN has absmax NaN, one with an infinity infinity.

    Args:
        values: floating ``[..., block]``.
        quant_type: "nf4" or "fp4"; unused if ``code`` is given.
        code: another book, fp32 ``[16]`` in any order, or None.

    Returns:
        codes uint8 ``[..., block]``, absmax fp32 ``[...]``.
    """
    values = values.float()
    absmax = values.abs().amax(-1)
    scaled = values * _quotient(1.0, absmax.clamp(min=1e-38), absmax)[..., None]
    cuts, codes = book_cuts(quant_type, code, values.device)
    magnitudes = len(codes) == 8
    above = torch.bucketize(torch.where(scaled.isnan(), -torch.inf, scaled.abs() if magnitudes else scaled), cuts)
    return codes[above] + 8 * (magnitudes & (scaled < 0)).to(torch.uint8), absmax


def quantize_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise blocks to MXFP4 (OCP Microscaling Formats 1.0, section 6.3).

    In fp32: the scale is 2^(floor(log2(max |x|)) - 2); the code is that of the E2M1 value nearest to x / scale, halfway between
    two the one with an even mantissa, at most 6. A block whose largest magnitude is below 2^-100 has scale 1 and codes of 0.

    Args:
        values: floating ``[..., 32]``.

    Returns:
        codes uint8 ``[..., 32]``, scales bf16 ``[...]``, which holds every power of two that a scale may be. A block with NaN
        or an infinity has the scale NaN.
    """
    values = values.float()
    largest = values.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - formats.E2M1_LARGEST_EXPONENT
    exponent = torch.where((largest < 2.0**-100) | ~largest.isfinite(), 0, exponent)

    def power(e: Tensor) -> Tensor:  # 2^e by its bits: torch.ldexp multiplies by a pow() that a GPU rounds
        return (e.int() + 127 << 23).view(torch.float32)

    scales = torch.where(largest.isfinite(), power(exponent), torch.nan)
    magnitudes = torch.tensor(formats.E2M1[:8], device=values.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    # Of two codes the even one: a middle above an odd code belongs to the next.
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    scaled = values * power(-exponent)[..., None]
    codes = torch.bucketize(torch.where(scaled.isnan(), 0.0, scaled.abs()), middles)
    return (codes + 8 * (scaled < 0)).to(torch.uint8), scales.bfloat16()


def quantize_e4m3(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise blocks to 8-bit floats.

    In fp32: ``s = max |x| / 448``, rounded up to ``dtype``, and the float nearest to ``x / s``; halfway between two, the even
    one. A block whose largest magnitude is below 2^-100 has scale 1 and zeros.

    Args:
        values: floating ``[..., block]``.
        dtype: fp16, bf16 or fp32.

    Returns:
        codes uint8 ``[..., block]``, scales ``[...]`` of ``dtype``. A block with NaN or an infinity has the scale NaN.
    """
    values = values.float()
    largest = values.abs().amax(-1)
    regular = largest.isfinite() & (largest >= SMALLEST_RANGE)
    scales = _rounded_up(torch.where(regular, _quotient(largest, formats.E4M3_LARGEST, largest), 1.0), dtype)
    scaled = torch.where(regular[..., None], _quotient(values, scales.float()[..., None], values), 0.0)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def quantize_weight_book(weight: Tensor, group_size: int, quant_type: str, code: Tensor | None = None) -> QuantizedWeight:
    """Quantise a weight by a code book, one absmax for each row and group of K, stored in the weight's dtype (exactly).

    Args:
        weight: fp16, bf16 or fp32 ``[N, K]``.
        group_size: 32, 64, a multiple of 128, or -1; the last group may be short.
        quant_type, code: as in :func:`quantize_book`; or "mxfp4", of groups of 32 (:func:`quantize_mxfp4`); or
            "e4m3" (:func:`quantize_e4m3`).
    """
    _check_matrix("weight", weight, _FLOAT_TYPES)
    formats.check_group_size(group_size)
    blocks = _blocks(weight, group_size)
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


def quantize_4bit(x: Tensor, blocksize: int, quant_type: str = "nf4", code: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise a tensor of any shape in flat blocks, as bitsandbytes stores it; see :func:`quantize_book`.

    Args:
        x: fp16, bf16 or fp32.
        blocksize: one of ``formats.FLAT_BLOCK_SIZES``; the last block may be short.
        quant_type, code: as in :func:`quantize_book`.

    Returns:
        uint8 ``[ceil(numel / 2), 1]``, the even element's code in the high nibble (an odd last element is followed by
        the code of 0), and absmax fp32 ``[ceil(numel / blocksize)]``.
    """
    formats.check_flat_block_size(blocksize)
    flat = x.reshape(-1)
    count = flat.numel()
    blocks = -(-count // blocksize)
    codes = torch.zeros(blocks, blocksize, dtype=torch.uint8, device=x.device)
    absmax = torch.zeros(blocks, dtype=torch.float32, device=x.device)
    padded = F.pad(flat, (0, blocks * blocksize - count)).view(blocks, blocksize)
    for rows in _row_chunks(blocks, blocksize):
        codes[rows], absmax[rows] = quantize_book(padded[rows], quant_type, code)
    pairs = codes.reshape(-1)[: count + count % 2].view(-1, 2)  # block sizes are even: the padding's code is there
    return (pairs[:, :1] << 4) | pairs[:, 1:], absmax


def dequantize_4bit(
    packed: Tensor,
    absmax: Tensor,
    shape: tuple[int, ...],
    blocksize: int,
    quant_type: str = "nf4",
    dtype: torch.dtype = torch.float16,
    code: Tensor | None = None,
) -> Tensor:
    """The values ``book[q] * absmax`` of :func:`quantize_4bit`'s codes: rounded to fp32, then to ``dtype``.

    Args:
        packed: uint8, ``ceil(numel / 2)`` bytes.
        absmax: fp32, ``ceil(numel / blocksize)`` values.
        shape: of the result.
        blocksize, quant_type, code: as they were quantised.
        dtype: fp16, bf16 or fp32.
    """
    formats.check_flat_block_size(blocksize)
    book = code_book(quant_type, code, packed.device)
    count = math.prod(shape)
    packed = packed.reshape(-1)
    out = torch.empty(count, dtype=dtype, device=packed.device)
    step = max(blocksize, _CHUNK)
    for start in range(0, count, step):
        stop = min(start + step, count)
        part = packed[start // 2 : (stop + 1) // 2]
        codes = torch.stack((part >> 4, part & 15), dim=1).reshape(-1)[: stop - start]
        block = torch.arange(start, stop, device=packed.device) // blocksize
        out[start:stop] = (book[codes.int()] * absmax[block]).to(dtype)
    return out.view(shape)


def dynamic_map() -> Tensor:
    """The 256 values of bitsandbytes' signed dynamic 8-bit type, ascending, fp32 (arXiv 2110.02861, section 1.3).

    For each power of ten 10^-6 .. 10^0, 2^i values (i = 0 .. 6) between a tenth of it and itself, the middles of equal
    parts, of both signs; and 0 and 1.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        middles = (10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles + [-value for value in middles]
    return torch.tensor(sorted(values), dtype=torch.float32)


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Double quantisation: absmax values to 8 bits, in blocks of ``formats.NESTED_BLOCK_SIZE``.

    ``offset = mean(absmax)``; the differences from it, over the largest of their block, take the nearest code of
    :func:`dynamic_map` (halfway: the smaller value's).

    Args:
        absmax: fp32 ``[B]``.

    Returns:
        codes uint8 ``[B]``, absmax of the differences fp32 ``[ceil(B / 256)]``, the map fp32 ``[256]``, offset fp32 ``[]``.
    """
    offset = absmax.mean()
    values = _blocks((absmax - offset)[None], formats.NESTED_BLOCK_SIZE)[0]
    largest = values.abs().amax(-1)
    scaled = values * _quotient(1.0, largest.clamp(min=1e-38), largest)[:, None]
    book = dynamic_map().to(absmax.device)
    codes = torch.bucketize(scaled, (book[:-1] + book[1:]) / 2, out_int32=True).to(torch.uint8)
    return codes.reshape(-1)[: absmax.numel()], largest, book, offset


def dequantize_absmax(codes: Tensor, absmax: Tensor, book: Tensor, offset: Tensor) -> Tensor:
    """The inverse of :func:`quantize_absmax`: ``book[q] * absmax + offset``, each rounded to fp32; fp32 ``[B]``."""
    block = torch.arange(codes.numel(), device=codes.device) // formats.NESTED_BLOCK_SIZE
    return book[codes.reshape(-1).int()] * absmax[block] + offset


# ---- AWQ's own storage


def awq_unpack(words: Tensor) -> Tensor:
    """AutoAWQ's words, int32 ``[R, N / 8]``, to codes, uint8 ``[R, N]``: column j of eight is nibble 0, 4, 1, 5, 2, 6, 3, 7."""
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def awq_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """The values ``(q - z) * s`` of an AWQ weight, ``[K, N]`` of the scales' dtype: rounded once, zero always +0.

    Args:
        qweight: int32 ``[K, N / 8]``.
        scales: fp16 or bf16 ``[G, N]``, K being a multiple of G.
        qzeros: int32 ``[G, N / 8]``.
    """
    k, n = qweight.shape[0], scales.shape[1]
    group = torch.arange(k, device=qweight.device) // (k // scales.shape[0])
    out = torch.empty(k, n, dtype=scales.dtype, device=qweight.device)
    zeros = awq_unpack(qzeros).float()
    for rows in _row_chunks(k, n):
        integers = awq_unpack(qweight[rows]).float() - zeros[group[rows]]
        out[rows] = (integers * scales.float()[group[rows]] + 0.0).to(scales.dtype)
    return out


# ---- dequantisers


def _centred_weight(qw: QuantizedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    """The integers ``q - z`` of some rows, ``[rows, G, group]``; after K, whatever: nothing there is used."""
    codes = _blocks(qw.codes[rows], qw.group_size).to(dtype)
    if qw.zeros is None:
        return codes.sub_(formats.midpoint(qw.bits))
    return codes.sub_(qw.zeros[rows].to(dtype)[..., None])


def _weight_rows(qw: QuantizedWeight, rows: slice, dtype: torch.dtype, book: Tensor | None = None) -> Tensor:
    """The values of some rows, ``[rows, K]``, columns in the order of the codes; ``book`` in place of the weight's own."""
    if qw.book is None:
        values = _centred_weight(qw, rows, dtype)
    else:
        values = (qw.book if book is None else book).to(dtype)[_blocks(qw.codes[rows], qw.group_size).int()]
    values = values.mul_(qw.scales[rows].to(dtype)[..., None])
    if qw.offsets is not None:
        values.add_(qw.offsets[rows].to(dtype)[..., None])
    return values.flatten(1)[:, : qw.k]


def taps_as_rows(qw: QuantizedWeight) -> QuantizedWeight:
    """A convolution's weight as a matrix in which groups know of no taps: one row for each tap, if there are groups."""
    if qw.group_size == -1:
        return replace(qw, kernel_size=(), bias=None)
    rows = qw.n * qw.taps
    vectors = {name: getattr(qw, name) for name in ("codes", "scales", "zeros", "offsets")}
    by_tap: dict[str, Any] = {name: v.reshape(rows, -1) for name, v in vectors.items() if v is not None}
    return replace(qw, kernel_size=(), bias=None, **by_tap)


def dequantize_weight(qw: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight's values ``[N, K]``, columns in the order of the input features (act order undone); ``[N, C, *kernel]``.

    ``s * (q - z)``, ``s * (q - 2^(b-1)) + o``, or ``s * book[q]``: product and sum are rounded to fp32 (for float64: to
    float64), the result once more to ``dtype``.
    """
    if qw.kernel_size:
        values = dequantize_weight(taps_as_rows(qw), dtype).view(qw.n, *qw.kernel_size, -1)
        return values.movedim(-1, 1).contiguous()
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty(qw.shape, dtype=dtype, device=qw.device)
    columns = slice(None) if qw.perm is None else qw.perm.long()
    for rows in _row_chunks(qw.n, qw.k):
        out[rows, columns] = _weight_rows(qw, rows, compute).to(dtype)
    return out


def _centred_activations(codes: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype) -> Tensor:
    """The integers ``q - z`` ``[M, K]``."""
    if zeros is None:
        return codes.to(dtype)
    return (_blocks(codes.to(dtype), block) - zeros.to(dtype)[..., None]).flatten(1)[:, : codes.shape[1]]


def dequantize_activations(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values ``s * (q - z)``, rounded to fp32 or fp64, ``[M, K]``, of what :func:`quantize_activations` returns."""
    _check_activations(codes, scales, zeros, block)
    integers = _blocks(_centred_activations(codes, zeros, block, dtype), block)
    return (integers * scales.to(dtype)[..., None]).flatten(1)[:, : codes.shape[1]].contiguous()


def _check_activations(codes: Tensor, scales: Tensor | None, zeros: Tensor | None, block: int) -> None:
    _check_matrix("codes", codes, (torch.int8,))
    _check_block(block)
    shape = (codes.shape[0], formats.group_count(codes.shape[1], block))
    for name, value, dtype in (("scales", scales, torch.float32), ("zeros", zeros, torch.int8)):
        if value is not None:
            _check_matrix(name, value, (dtype,))
            if tuple(value.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; {shape} is expected")


# ---- what decoders compute between two products


def _sum_of_squares(x: Tensor) -> Tensor:
    """Sums over the rows of fp32 ``[M, K]``, in an order that a GPU can keep to.

    The squares of each 512 columns are added in pairs, neighbours first; of these sums, those 32 apart are added in the
    order of K, and the 32 that are left in pairs.
    """

    def in_pairs(values: Tensor) -> Tensor:
        while values.shape[-1] > 1:
            values = values[..., 0::2] + values[..., 1::2]
        return values[..., 0]

    runs = in_pairs(_blocks(x * x, 512))
    rounds = _blocks(runs, 32).unbind(1)
    total = rounds[0]
    for further in rounds[1:]:
        total = total + further
    return in_pairs(total)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Root mean square norm of the rows of ``x``, or of ``s = x + residual``.

    ``y = (s * r) * weight`` with ``r = 1 / sqrt(mean of s^2 + eps)``. Every operation is rounded to fp32, and s, the product
    in parentheses and y once more to x's dtype. The squares are added in an order that is part of the specification.

    Args:
        x: fp16, bf16 or fp32 ``[M, K]``.
        weight: ``[K]`` of x's dtype.
        eps: 1e-15 to 1; rounded to fp32.
        residual: ``[M, K]`` of x's dtype, or None.

    Returns:
        y and s, ``[M, K]`` of x's dtype.
    """
    _check_matrix("x", x, _FLOAT_TYPES)
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = total.float()
    mean = _quotient(_sum_of_squares(values), float(x.shape[1]), values)
    # By way of fp64, whose root is near enough to be rounded to the right fp32: torch's fp32 root on CPUs is not the nearest.
    root = (mean + values.new_full((), eps)).double().sqrt().float()
    factor = _quotient(1.0, root, values)
    y = (values * factor[:, None]).to(x.dtype).float() * weight.float()
    return y.to(x.dtype), total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` with ``silu(v) = v / (1 + exp(-v))``, of gate's dtype.

    Every operation is rounded to fp32, and silu and the result once more to gate's dtype. The exponential is that of the
    device: CPUs and GPUs may differ in its last place.
    """
    values = gate.float()
    activated = _quotient(values, 1.0 + torch.exp(-values), values).to(gate.dtype)
    return (activated.float() * up.float()).to(gate.dtype)


# ---- the order in which kernels read activations


def activation_order(codes: Tensor, zeros: Tensor | None, block: int) -> Tensor:
    """Codes ``[M, K]`` in kernel order, int8 ``[M, k_pad]``, K padded to 128.

    Inside each 16 columns, position ``2 * (k % 8) + (k % 16) // 8`` holds column k. A padding column holds
    the zero point of its block, or 0 where there are no zero points or where no column of its block is
    real.
    """
    _check_activations(codes, None, zeros, block)
    m, k = codes.shape
    k_pad = formats.padded_k(k)
    padded = F.pad(codes, (0, k_pad - k))
    if zeros is not None:
        end = k_pad if block == -1 else min(k_pad, zeros.shape[1] * block)
        padded[:, k:end] = zeros[:, -1:]
    return padded.view(m, k_pad // 16, 2, 8).transpose(2, 3).reshape(m, k_pad)


def natural_order(ordered: Tensor, k: int) -> Tensor:
    """The inverse of :func:`activation_order`: int8 ``[M, k_pad]`` to ``[M, K]``, padding dropped."""
    _check_matrix("ordered", ordered, (torch.int8,))
    if ordered.shape[1] != formats.padded_k(k):
        raise ValueError(f"ordered has {ordered.shape[1]} columns; K = {k} is padded to {formats.padded_k(k)}")
    m, k_pad = ordered.shape
    return ordered.view(m, k_pad // 16, 8, 2).transpose(2, 3).reshape(m, k_pad)[:, :k].contiguous()


# ---- products


def check_activation(activation: Activation) -> None:
    """Raise ``ValueError`` if ``activation`` is none of those that :func:`epilogue` knows."""
    if activation is None or activation in ("relu", "relu6", "gelu", "silu"):
        return
    if isinstance(activation, tuple) and len(activation) == 3 and activation[0] == "clamp":
        if activation[1] <= activation[2]:
            return
        raise ValueError(f"activation is {activation!r}; clamp takes bounds lo <= hi")
    raise ValueError(f"activation is {activation!r}; supported are None, 'relu', 'relu6', 'gelu', 'silu' and ('clamp', lo, hi)")


def _activate(y: Tensor, activation: Activation) -> Tensor:
    if activation is None:
        return y
    if activation == "relu":
        return y.clamp(min=0)
    if activation == "relu6":
        return y.clamp(0, 6)
    if activation == "gelu":
        return F.gelu(y)
    if activation == "silu":
        return F.silu(y)
    return y.clamp(float(activation[1]), float(activation[2]))


def epilogue(
    total: Tensor,
    bias: Tensor | None = None,
    activation: Activation = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    saturate: bool = False,
) -> Tensor:
    """``activation(total + bias) + residual`` in total's dtype, rounded once to ``out_dtype``.

    A total that is not finite becomes NaN first, and NaN goes through every activation. What overflows
    ``out_dtype`` becomes inf, or its largest finite value if ``saturate`` (NaN stays NaN).

    Args:
        total: sums, fp32 (fp64 for an oracle) ``[M, N]``.
        bias: floating ``[N]``.
        activation: see :data:`Activation`.
        residual: floating ``[M, N]``.
        out_dtype: dtype of the result.
        saturate: clamp instead of overflowing.
    """
    check_activation(activation)
    y = torch.where(total.isfinite(), total, torch.nan)
    if bias is not None:
        y = y + bias.to(y.dtype)
    y = _activate(y, activation)
    if residual is not None:
        y = y + residual.to(y.dtype)
    if saturate:
        limits = torch.finfo(out_dtype)
        y = y.clamp(limits.min, limits.max)
    return y.to(out_dtype)


def _check_product(k: int, m: int, qw: QuantizedWeight, bias: Tensor | None, residual: Tensor | None) -> Tensor | None:
    """The bias that applies, after checking shapes."""
    if qw.kernel_size:
        raise ValueError(CONVOLUTION.format(qw.kernel_size))
    if k != qw.k:
        raise ValueError(f"the activations have {k} columns; the weight {qw.shape} takes {qw.k}")
    if bias is not None and qw.bias is not None:
        raise ValueError("a bias is given, but the weight has one already")
    if bias is not None and tuple(bias.shape) != (qw.n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; {(qw.n,)} is expected")
    if residual is not None and tuple(residual.shape) != (m, qw.n):
        raise ValueError(f"residual has shape {tuple(residual.shape)}; {(m, qw.n)} is expected")
    return qw.bias if bias is None else bias


def gemm_quantized(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    block: int,
    qw: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: Activation = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    saturate: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The product of quantised activations and a quantised weight, ``[M, N]``.

    A step b along K is the smaller of block and group. With ``I[m, n, b]`` the sum over b of
    ``(qa - za) * (qw - zw)`` (exact) and ``S[m, b]`` the sum over b of ``sa * (qa - za)``,

        y[m, n] = sum over b of sa[m, b] * sw[n, b] * I[m, n, b]  +  sum over b of o[n, b] * S[m, b]

    in ``compute_dtype``, steps added in turn; the second term, a sum by itself, only if the weight has offsets.

    Args:
        codes, scales, zeros, block: as :func:`quantize_activations` takes and returns them. Column j of the
            codes belongs to column j of the weight's codes: with act order, ``x[:, qw.perm]`` was
            quantised.
        qw: the weight; its bias is added.
        bias, activation, residual, out_dtype, saturate: see :func:`epilogue`.
        compute_dtype: fp32, or fp64 for an oracle.

    Raises:
        ValueError: shapes that do not fit, a block and a group of which neither divides the other, two
        biases, or a weight with a code book.
    """
    _check_activations(codes, scales, zeros, block)
    if qw.book is not None:
        raise ValueError(BOOK_NEEDS_FLOATS)
    m, k = codes.shape
    bias = _check_product(k, m, qw, bias, residual)
    sizes = [size for size in (block, qw.group_size) if size != -1]
    step = min(sizes, default=k)
    if max(sizes, default=k) % step:
        raise ValueError(f"block is {block} and group_size is {qw.group_size}; one must divide the other")

    # Both factors are integers of at most 8 bits, so that fp32, and even TF32 and bf16 if torch's matmul is
    # set to them, holds them exactly. Every partial sum of a step is an integer no larger than this bound:
    # below 2^24 fp32 adds without rounding, in any order and with or without fused multiply-add. fp64 does
    # up to 2^53.
    largest_a = 128 if zeros is None else 255
    largest_w = formats.midpoint(qw.bits) if qw.zeros is None else 2**qw.bits - 1
    exact = torch.float64 if step * largest_a * largest_w > _EXACT_IN_FP32 else torch.float32

    steps = formats.group_count(k, step)
    start = torch.arange(steps, device=codes.device) * step
    a = _blocks(_centred_activations(codes, zeros, block, exact), step).transpose(0, 1)  # [steps, M, step]
    scale_a = scales.to(compute_dtype)[:, start // (k if block == -1 else block)]  # [M, steps]
    group = start // (k if qw.group_size == -1 else qw.group_size)
    sums = scale_a * a.sum(-1).t().to(compute_dtype)  # [M, steps]

    total = torch.empty(m, qw.n, dtype=compute_dtype, device=codes.device)
    for rows in _row_chunks(qw.n, k + 2 * m * steps):
        w = _blocks(_centred_weight(qw, rows, exact).flatten(1)[:, :k], step)
        integers = (a @ w.permute(1, 2, 0)).to(compute_dtype)  # [steps, M, rows]
        scale_w = qw.scales[rows].to(compute_dtype)[:, group]
        factors = scale_a.t()[:, :, None] * scale_w.t()[:, None, :]
        total[:, rows] = _in_turn(integers * factors, 0)
        if qw.offsets is not None:
            offsets = qw.offsets[rows].to(compute_dtype)[:, group]
            total[:, rows] += _in_turn(sums[:, None] * offsets, -1)
    return epilogue(total, bias, activation, residual, out_dtype, saturate)


def mixed_gemm(
    x: Tensor,
    qw: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: Activation = None,
    act_quant: str = "none",
    act_symmetric: bool = True,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    saturate: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``activation(x @ W^T + bias) + residual``, ``[M, N]``.

    Args:
        x: fp16, bf16 or fp32 ``[M, K]``. Act order gathers its columns before anything else.
        qw: the weight; its bias is added.
        act_quant: "none": x as it is, times :func:`dequantize_weight` in ``compute_dtype``; the values of a code book
            are first rounded to x's dtype (they are an operand of the tensor cores; scales never are). In fp32 the products
            of a group are summed (:func:`_group_sums`) before its scale multiplies them, then groups in turn; offsets times
            the sums of x are a sum by itself, added last. "token" or
            "block": x goes through :func:`quantize_activations`, with one block a row or blocks of
            :func:`cutlass_ops.formats.activation_block`, and on to :func:`gemm_quantized`.
        act_symmetric: whether quantised activations have no zero points.
        bias, activation, residual, saturate: see :func:`epilogue`.
        out_dtype: dtype of the result; x's if None.
        compute_dtype: fp32, or fp64 for an oracle.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
    """
    _check_matrix("x", x, _FLOAT_TYPES)
    if act_quant not in ("none", "token", "block"):
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    m, k = x.shape
    added_bias = _check_product(k, m, qw, bias, residual)
    if out_dtype is None:
        out_dtype = x.dtype
    if qw.perm is not None:
        x = x[:, qw.perm.long()]
    if act_quant != "none":
        block = -1 if act_quant == "token" else formats.activation_block(qw.group_size)
        codes, scales, zeros = quantize_activations(x, block, act_symmetric)
        return gemm_quantized(
            codes,
            scales,
            zeros,
            block,
            qw,
            bias=bias,
            activation=activation,
            residual=residual,
            out_dtype=out_dtype,
            saturate=saturate,
            compute_dtype=compute_dtype,
        )
    book = None if qw.book is None else qw.book.to(x.dtype)
    x = x.to(compute_dtype)
    total = torch.empty(m, qw.n, dtype=compute_dtype, device=x.device)
    for rows in _row_chunks(qw.n, k):
        if compute_dtype == torch.float64:
            total[:, rows] = x @ _weight_rows(qw, rows, compute_dtype, book).t()
        else:
            _sum_products(x, qw, rows, book, total)
    return epilogue(total, added_bias, activation, residual, out_dtype, saturate)


# ---- the order of fp32 sums


def _in_turn(values: Tensor, dim: int) -> Tensor:
    """Sums over ``dim``, one value added after the other."""
    total: Tensor | None = None
    for value in values.unbind(dim):
        total = value + 0.0 if total is None else total + value
    assert total is not None
    return total


def _run_sums(values: Tensor) -> Tensor:
    """Sums over the last dimension, a run of 32, 64 or 128 columns, in an order that vectors of a CPU can keep to.

    Each 64 columns, seen as ``[4, 2, 2, 2, 2]`` (j, b, h, t, c), are added to eight lanes (t, j), in the order of h, c, b,
    those of the second 64 after those of the first. Lanes j = 0 and 1 are added, and 2 and 3; of these, those of t = 0 and 1;
    and then the two sums that are left. A run of 32 columns has j = 0 and 1 alone.
    """
    run = values.shape[-1]
    lead = values.shape[:-1]
    js = min(run, 64) // 16
    split = values.reshape(*lead, max(run // 64, 1), js, 2, 2, 2, 2)
    base = len(lead)
    order = [base + i for i in (0, 3, 5, 2, 4, 1)]
    lanes = _in_turn(split.permute(*range(base), *order).reshape(*lead, -1, 2, js), -3)
    pairs = lanes[..., 0::2] + lanes[..., 1::2]
    halves = pairs[..., 0, :] + pairs[..., 1, :]
    return halves[..., 0] if js == 2 else halves[..., 0] + halves[..., 1]


def _group_sums(values: Tensor) -> Tensor:
    """Sums over the last dimension, a group: of runs of at most 128 columns, and then of these in turn."""
    size = values.shape[-1]
    run = min(size, formats.K_PER_TILE)
    return _in_turn(_run_sums(values.reshape(*values.shape[:-1], size // run, run)), -1)


def _sum_products(x: Tensor, qw: QuantizedWeight, rows: slice, book: Tensor | None, total: Tensor) -> None:
    """Some columns of x times the weight, both fp32, in the order that :func:`mixed_gemm` defines."""
    k = x.shape[1]
    size = formats.padded_k(k) if qw.group_size == -1 else qw.group_size
    if book is None:
        integers = _centred_weight(qw, rows, torch.float32).flatten(1)[:, :k]
    else:
        integers = book.float()[qw.codes[rows].int()]
    values = _blocks(integers, size)
    scales = qw.scales[rows].float()
    for some in _row_chunks(x.shape[0], values.numel(), 1):
        groups = _blocks(x[some], size)
        sums = _in_turn(_group_sums(groups[:, None] * values) * scales, -1)
        if qw.offsets is not None:
            sums = sums + _in_turn(_group_sums(groups)[:, None] * qw.offsets[rows].float(), -1)
        total[some, rows] = sums
