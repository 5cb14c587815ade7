"""Code books: NF4, FP4, MXFP4, e4m3 and any other."""

from __future__ import annotations

import torch
from torch import Tensor

from ..weights import formats
from .activations import SMALLEST_RANGE
from .blocks import quotient, rounded_up


def code_book(
    quant_type: str, code: Tensor | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """The values of 4-bit codes, fp32 ``[16]``: ``code`` if given, else the book of that name.

    Raises:
        TypeError, ValueError: a name that does not exist, or a ``code`` that is not 16
            finite fp32 values.
    """
    if code is None:
        return torch.tensor(
            formats.CODE_BOOKS[formats.check_quant_type(quant_type)],
            dtype=torch.float32,
            device=device,
        )
    if code.dtype != torch.float32:
        raise TypeError(
            f"code has dtype {str(code.dtype).removeprefix('torch.')}; supported is float32"
        )
    if tuple(code.shape) != (16,):
        raise ValueError(f"code has shape {tuple(code.shape)}; (16,) is expected")
    return code


def book_cuts(
    quant_type: str, code: Tensor | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Where the code of ``v = x / absmax`` changes: limits, ascending, fp32, and the codes of the
    ranges between, uint8.

    A value is in the range above every limit that is smaller than it. For "fp4" these are the
    magnitudes', 7 limits and 8 codes; for other books there are 15 and 16.
    """
    if code is None and formats.check_quant_type(quant_type) == "fp4":
        cuts = torch.tensor(formats.FP4_CUTS, dtype=torch.float32, device=device)
        return cuts, torch.tensor(formats.FP4_ORDER, dtype=torch.uint8, device=device)
    ascending, order = code_book(quant_type, code, device).sort(stable=True)
    return (ascending[:-1] + ascending[1:]) / 2, order.to(torch.uint8)


def _count_below(cuts: Tensor, values: Tensor) -> Tensor:
    """How many cuts are below each value, uint8; 0 for NaN. On a CPU it takes half the time of
    torch.bucketize.
    """
    count = torch.zeros_like(values, dtype=torch.uint8)
    for cut in cuts:
        count += values > cut
    return count


def quantize_book(
    values: Tensor, quant_type: str, code: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise blocks by a code book.

    In fp32: ``absmax = max |x|``, ``r = 1 / max(absmax, 1e-38)``, ``v = x * r``. The code is the
    one whose value is nearest to v; halfway between two (the midpoint rounded to fp32), the smaller
    value's. For "fp4" the limits between magnitudes are ``formats.FP4_CUTS``, the sign is that of
    v, and -0 counts as 0. These are the codes that bitsandbytes' CUDA kernels write (its CPU path
    has other FP4 limits in the last place, and -0 codes elsewhere).

    A block of zeros has absmax 0 and codes of value 0. The absmax of a block with NaN is NaN, with
    an infinity it is infinity.

    Args:
        values: floating ``[..., block]``.
        quant_type: "nf4" or "fp4"; unused if ``code`` is given.
        code: another book, fp32 ``[16]`` in any order, or None.

    Returns:
        codes uint8 ``[..., block]``, absmax fp32 ``[...]``.
    """
    values = values.float()
    absmax = values.abs().amax(-1)
    scaled = values * quotient(1.0, absmax.clamp(min=1e-38), absmax)[..., None]
    cuts, codes = book_cuts(quant_type, code, values.device)
    magnitudes = len(codes) == 8
    above = _count_below(cuts, scaled.abs() if magnitudes else scaled)
    return torch.take(codes, above.long()) + 8 * (magnitudes & (scaled < 0)).to(torch.uint8), absmax


def quantize_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise blocks to MXFP4 (OCP Microscaling Formats 1.0, section 6.3).

    In fp32: the scale is 2^(floor(log2(max |x|)) - 2); the code is that of the E2M1 value nearest
    to x / scale, at most 6; ties go to the value with an even mantissa. A block whose
    largest magnitude is below 2^-100 has scale 1 and codes of 0.

    Args:
        values: floating ``[..., 32]``.

    Returns:
        codes uint8 ``[..., 32]``, scales bf16 ``[...]``, which holds every power of two that a
        scale may be. A block with NaN or an infinity has the scale NaN.
    """
    values = values.float()
    largest = values.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - formats.E2M1_LARGEST_EXPONENT
    exponent = torch.where((largest < 2.0**-100) | ~largest.isfinite(), 0, exponent)

    # 2^e by its bits: torch.ldexp multiplies by a pow() that a GPU rounds
    def power(e: Tensor) -> Tensor:
        return (e.int() + 127 << 23).view(torch.float32)

    scales = torch.where(largest.isfinite(), power(exponent), torch.nan)
    magnitudes = torch.tensor(formats.E2M1[:8], dtype=torch.float32, device=values.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    # A tie goes to the even code: the midpoint above an odd code belongs to the next one.
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    scaled = values * power(-exponent)[..., None]
    codes = _count_below(middles, scaled.abs())
    return codes + 8 * (scaled < 0).to(torch.uint8), scales.bfloat16()


def quantize_e4m3(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise blocks to 8-bit floats.

    In fp32: ``s = max |x| / 448``, rounded up to ``dtype``, and the float nearest to
    ``x / s``; halfway between two, the even one. A block whose largest magnitude is below
    2^-100 has scale 1 and zeros.

    Args:
        values: floating ``[..., block]``.
        dtype: fp16, bf16 or fp32.

    Returns:
        codes uint8 ``[..., block]``, scales ``[...]`` of ``dtype``. A block with NaN or an infinity
        has the scale NaN.
    """
    values = values.float()
    largest = values.abs().amax(-1)
    regular = largest.isfinite() & (largest >= SMALLEST_RANGE)
    scales = rounded_up(
        torch.where(regular, quotient(largest, formats.E4M3_LARGEST, largest), 1.0), dtype
    )
    scaled = torch.where(
        regular[..., None], quotient(values, scales.float()[..., None], values), 0.0
    )
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales
