"""Storage of other packages: bitsandbytes' flat blocks with nested absmax, and AWQ's words."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import formats
from .blocks import CHUNK, in_blocks, quotient, row_chunks
from .codebooks import code_book, quantize_book


def quantize_4bit(
    x: Tensor, blocksize: int, quant_type: str = "nf4", code: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise a tensor of any shape in flat blocks, as bitsandbytes stores it; see
    :func:`quantize_book`.

    Args:
        x: fp16, bf16 or fp32.
        blocksize: one of ``formats.FLAT_BLOCK_SIZES``; the last block may be short.
        quant_type, code: as in :func:`quantize_book`.

    Returns:
        uint8 ``[ceil(numel / 2), 1]``, the even element's code in the high nibble (an odd last
        element is followed by the code of 0), and absmax fp32 ``[ceil(numel / blocksize)]``.
    """
    formats.check_flat_block_size(blocksize)
    flat = x.reshape(-1)
    count = flat.numel()
    blocks = -(-count // blocksize)
    codes = torch.zeros(blocks, blocksize, dtype=torch.uint8, device=x.device)
    absmax = torch.zeros(blocks, dtype=torch.float32, device=x.device)
    padded = F.pad(flat, (0, blocks * blocksize - count)).view(blocks, blocksize)
    for rows in row_chunks(blocks, blocksize):
        codes[rows], absmax[rows] = quantize_book(padded[rows], quant_type, code)
    # block sizes are even: the padding's code is there
    pairs = codes.reshape(-1)[: count + count % 2].view(-1, 2)
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
    """The values ``book[q] * absmax`` of :func:`quantize_4bit`'s codes: rounded to fp32,
    then to ``dtype``.

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
    step = max(blocksize, CHUNK)
    for start in range(0, count, step):
        stop = min(start + step, count)
        part = packed[start // 2 : (stop + 1) // 2]
        codes = torch.stack((part >> 4, part & 15), dim=1).reshape(-1)[: stop - start]
        block = torch.arange(start, stop, device=packed.device) // blocksize
        out[start:stop] = (book[codes.int()] * absmax[block]).to(dtype)
    return out.view(shape)


def dynamic_map() -> Tensor:
    """The 256 values of bitsandbytes' signed dynamic 8-bit type, ascending, fp32 (arXiv
    2110.02861, section 1.3).

    For each power of ten 10^-6 .. 10^0, 2^i values (i = 0 .. 6) between a tenth of it and itself,
    the middles of equal parts, of both signs; and 0 and 1.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        middles = (10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles + [-value for value in middles]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Double quantisation: absmax values to 8 bits, in blocks of ``formats.NESTED_BLOCK_SIZE``.

    ``offset = mean(absmax)``; the differences from it, over the largest of their block, take the
    nearest code of :func:`dynamic_map` (halfway: the smaller value's).

    Args:
        absmax: fp32 ``[B]``.

    Returns:
        codes uint8 ``[B]``, absmax of the differences fp32 ``[ceil(B / 256)]``, the map fp32
        ``[256]``, offset fp32 ``[]``.
    """
    offset = absmax.mean()
    values = in_blocks((absmax - offset)[None], formats.NESTED_BLOCK_SIZE)[0]
    largest = values.abs().amax(-1)
    scaled = values * quotient(1.0, largest.clamp(min=1e-38), largest)[:, None]
    book = dynamic_map().to(absmax.device)
    codes = torch.bucketize(scaled, (book[:-1] + book[1:]) / 2, out_int32=True).to(torch.uint8)
    return codes.reshape(-1)[: absmax.numel()], largest, book, offset


def dequantize_absmax(codes: Tensor, absmax: Tensor, book: Tensor, offset: Tensor) -> Tensor:
    """The inverse of :func:`quantize_absmax`: ``book[q] * absmax + offset``, each rounded to
    fp32; fp32 ``[B]``.
    """
    block = torch.arange(codes.numel(), device=codes.device) // formats.NESTED_BLOCK_SIZE
    return book[codes.reshape(-1).int()] * absmax[block] + offset


def awq_unpack(words: Tensor) -> Tensor:
    """AutoAWQ's words, int32 ``[R, N / 8]``, to codes, uint8 ``[R, N]``: column j of eight is
    nibble 0, 4, 1, 5, 2, 6, 3, 7.
    """
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def awq_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """The values ``(q - z) * s`` of an AWQ weight, ``[K, N]`` of the scales' dtype: rounded
    once, zero always +0.

    Args:
        qweight: int32 ``[K, N / 8]``.
        scales: fp16 or bf16 ``[G, N]``, K being a multiple of G.
        qzeros: int32 ``[G, N / 8]``.
    """
    k, n = qweight.shape[0], scales.shape[1]
    group = torch.arange(k, device=qweight.device) // (k // scales.shape[0])
    out = torch.empty(k, n, dtype=scales.dtype, device=qweight.device)
    zeros = awq_unpack(qzeros).float()
    for rows in row_chunks(k, n):
        integers = awq_unpack(qweight[rows]).float() - zeros[group[rows]]
        out[rows] = (integers * scales.float()[group[rows]] + 0.0).to(scales.dtype)
    return out
