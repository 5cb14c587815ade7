"""Blocks of GGUF's quantised types, and their conversion to a QuantizedWeight.

Sources: src/ggml-common.h of ggml-org/ggml, quants.py of the ``gguf`` package.

=====  =====  =====  ==============================  =============================================
type   block  bytes  a block                         value, and as a QuantizedWeight
=====  =====  =====  ==============================  =============================================
Q4_0   32     18     fp16 d, 16 bytes                d (q - 8): symmetric, d may be negative
Q4_1   32     20     fp16 d, fp16 m, 16 bytes        d q + m: offset m + 8 d, in fp32
Q5_0   32     22     fp16 d, u32 of fifth bits,      d (q - 16): symmetric, code q + 112 of 8 bits
                     16 bytes
Q5_1   32     24     fp16 d, fp16 m, u32 of fifth    d q + m: offset m, code q + 128 of 8 bits
                     bits, 16 bytes
Q8_0   32     34     fp16 d, 32 int8                 d q: symmetric, code q + 128
Q2_K   256    84     16 bytes of 4 bits each of sc   (d sc) q - dmin mn: scale d sc and offset
                     and mn, 64 bytes of q, fp16 d,  2 d sc - dmin mn, in fp32, code q of 2 bits
                     fp16 dmin
Q3_K   256    110    32 bytes of third bits, 64 of   (d (sc - 32)) (q - 4): scale d (sc - 32) in
                     low bits, 16 sc of 6 bits in    fp32, code q + 4
                     12 bytes, fp16 d
Q4_K   256    144    fp16 d, fp16 dmin, 8 scales     (d sc) q - dmin mn: scale d sc and offset
                     sc and 8 minima mn of 6 bits    8 d sc - dmin mn, in fp32
                     in 12 bytes, 128 bytes
Q5_K   256    176    as Q4_K, 32 bytes of fifth      (d sc) q - dmin mn: scale d sc and offset
                     bits before the 128             -dmin mn, in fp32, code q + 128 of 8 bits
Q6_K   256    210    128 bytes of low halves, 64 of  (d sc) (q - 32), each sc for 16 weights: scale
                     high bits, 16 int8 sc, fp16 d   d sc in fp32, code q + 96 of 8 bits
=====  =====  =====  ==============================  =============================================

Byte i of 16 holds element i in its low half and element i + 16 in its high half; of Q4_K's and
Q5_K's 128, each 32 hold two groups of 32 in that way. Each 32 of Q2_K's and Q3_K's 64 hold four
runs of 32 elements, the first in their lowest two bits. Q2_K, Q3_K and Q6_K become groups of 16,
the others groups of 32. All of that is exact (Q6_K's d sc has at most 18 bits, and with q - 32 23),
but for the offsets of Q2_K, Q4_1 and Q4_K, which are rounded to fp32, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .words import unpack_bytes

if TYPE_CHECKING:
    import gguf

#: Bytes of blocks that are converted at a time: few enough for the cache, and many enough that
#: parallel readers seldom wait for Python's lock.
_BYTES_AT_A_TIME = 1 << 21

_Bytes: TypeAlias = "npt.NDArray[np.uint8]"

_Array: TypeAlias = "npt.NDArray[Any]"


def convert_blocks(
    rows: _Bytes, kind: gguf.GGMLQuantizationType
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes ``[B, elements]``, and scales and offsets ``[B, groups]``, of B blocks."""
    import gguf

    block_type = BLOCK_TYPES[kind.name]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(-1, nbytes)
    start, stop, run = block_type.halves
    if run:
        codes = unpack_bytes(
            torch.from_numpy(blocks)[:, start:stop], run, in_turn=False, high_first=False
        )
    else:
        codes = torch.empty(len(blocks), size, dtype=torch.uint8, device="cpu")
    groups = (len(blocks), size // block_type.group_size)
    scales = torch.empty(groups, dtype=block_type.scales, device="cpu")
    offsets = (
        None
        if block_type.offsets is None
        else torch.empty(groups, dtype=block_type.offsets, device="cpu")
    )
    step = max(1, _BYTES_AT_A_TIME // nbytes)
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        # read_weight refuses scales and offsets that are not finite
        with np.errstate(all="ignore"):
            block_type.convert(
                blocks[part],
                codes[part].numpy(),
                scales[part].numpy(),
                np.empty(0) if offsets is None else offsets[part].numpy(),
            )
    return codes, scales, offsets


# Each of these converts blocks [B, bytes] into codes [B, elements] and, one for each group, scales
# and offsets [B, groups], which it fills. Codes come with the low bits that
# ``BlockType.halves`` describes already unpacked.


def _q4_0(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)


def _q4_1(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)
    offsets[:] = _number(blocks, 2).astype(np.float32) + np.float32(8) * scales.astype(np.float32)


def _q5_0(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)
    codes += _fifth_bits(blocks[:, 2:6]) + np.uint8(112)


def _q5_1(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)
    offsets[:] = _number(blocks, 2)
    codes += _fifth_bits(blocks[:, 4:8]) + np.uint8(128)


def _q8_0(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)
    run = np.dtype((np.void, 32))
    codes.view(run)[:] = blocks[:, 2:].view(run)
    codes ^= np.uint8(0x80)


def _q2_k(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    both, d, dmin = blocks[:, :16], _number(blocks, 80), _number(blocks, 82)
    np.multiply(both & np.uint8(15), d, out=scales, dtype=np.float32)
    np.multiply(both >> np.uint8(4), -dmin, out=offsets, dtype=np.float32)
    offsets += np.float32(2) * scales
    codes[:] = _low_pairs(blocks[:, 16:80])


def _q3_k(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    six = np.concatenate((low & np.uint8(15), low >> np.uint8(4)), axis=1)
    for quarter in range(4):
        bits = high >> np.uint8(2 * quarter) & np.uint8(3)
        six[:, 4 * quarter : 4 * quarter + 4] |= bits << np.uint8(4)
    np.multiply(
        six.astype(np.int8) - np.int8(32), _number(blocks, 108), out=scales, dtype=np.float32
    )
    third = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little")
    codes[:] = _low_pairs(blocks[:, 32:96])
    codes += third.reshape(codes.shape) << np.uint8(2)
    codes += np.uint8(4)


def _q4_k(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    _k_scales(blocks, scales, offsets)
    offsets += np.float32(8) * scales


def _q5_k(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    _k_scales(blocks, scales, offsets)
    run = np.dtype((np.void, 32))
    packed = blocks[:, 16:48].view(run).copy().view(np.uint8)
    fifth = np.empty_like(codes)
    for group in range(8):  # bit g of byte i belongs to element i of group g
        fifth.view(run)[:, group : group + 1] = (
            (packed >> np.uint8(group) & np.uint8(1)) << np.uint8(4)
        ).view(run)
    codes += fifth
    codes += np.uint8(128)


def _k_scales(blocks: _Bytes, scales: _Array, minima: _Array) -> None:
    """Q4_K's and Q5_K's d sc and -dmin mn, both exact in fp32: 11 bits times 6.

    Bytes 0 .. 3 of the 12 hold sc of groups 0 .. 3 in their low six bits, bytes 4 .. 7 mn in
    theirs, and bytes 8 .. 11 the low four bits of sc and mn of groups 4 .. 7, whose high two are
    those of the first eight bytes.
    """
    low, middle, high = blocks[:, 4:16].view(np.dtype((np.void, 12))).copy().view(np.uint32).T
    six, four, two = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    both = np.empty((2, len(blocks), 2), np.uint32)
    both[0, :, 0], both[0, :, 1] = low & six, high & four | low >> np.uint32(2) & two
    both[1, :, 0], both[1, :, 1] = (
        middle & six,
        high >> np.uint32(4) & four | middle >> np.uint32(2) & two,
    )
    d, dmin = (np.repeat(_number(blocks, start).astype(np.float32), 8, axis=1) for start in (0, 2))
    np.multiply(both[0].view(np.uint8), d, out=scales)
    np.multiply(both[1].view(np.uint8), -dmin, out=minima)


def _q6_k(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    of_16 = blocks[:, 192:208].view(np.dtype((np.void, 16))).copy().view(np.int8)
    np.multiply(of_16, _number(blocks, 208), out=scales, dtype=np.float32)
    run = np.dtype((np.void, 32))
    packed = blocks[:, 128:192].view(np.dtype((np.void, 64))).copy().view(np.uint8)
    high = np.empty_like(codes)
    for quarter in range(4):  # of each 128 elements, whose high bits are 32 bytes
        bits = (packed >> np.uint8(2 * quarter) & np.uint8(3)) << np.uint8(4)
        high.view(run)[:, quarter::4] = bits.view(run)
    codes += high
    codes += np.uint8(96)


def _number(blocks: _Bytes, start: int) -> npt.NDArray[np.float16]:
    """The fp16 number at byte ``start`` of each block, ``[B, 1]``."""
    numbers: npt.NDArray[np.float16] = blocks[:, start : start + 2].view("<f2").copy()
    return numbers


def _low_pairs(packed: _Bytes) -> _Bytes:
    """Numbers of two bits of ``[B, 64]`` bytes: ``[B, 256]``."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    pairs: _Bytes = packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    return pairs.reshape(-1, 256)


def _fifth_bits(packed: _Bytes) -> _Bytes:
    """Bits of ``[B, 4]`` bytes, the low ones first, as 0 or 16: ``[B, 32]``."""
    run = np.dtype((np.void, 4))
    bits: _Bytes = np.unpackbits(packed.view(run).copy().view(np.uint8), axis=1, bitorder="little")
    bits <<= np.uint8(4)
    return bits


@dataclass(frozen=True)
class BlockType:
    """The conversion of a type of blocks.

    Attributes:
        bits: of the codes.
        scales, offsets: their dtypes.
        halves: first byte, end and run: bytes of a block of which each has the low four bits of two
            codes, ``run`` low halves before ``run`` high ones; (0, 0, 0) if it has none.
        convert: computes the rest.
        group_size: weights that share a scale.
    """

    bits: int
    scales: torch.dtype
    offsets: torch.dtype | None
    halves: tuple[int, int, int]
    convert: Callable[[_Bytes, _Bytes, _Array, _Array], None]
    group_size: int = 32


BLOCK_TYPES = {
    "Q4_0": BlockType(4, torch.float16, None, (2, 18, 16), _q4_0),
    "Q4_1": BlockType(4, torch.float16, torch.float32, (4, 20, 16), _q4_1),
    "Q5_0": BlockType(8, torch.float16, None, (6, 22, 16), _q5_0),
    "Q5_1": BlockType(8, torch.float16, torch.float16, (8, 24, 16), _q5_1),
    "Q8_0": BlockType(8, torch.float16, None, (0, 0, 0), _q8_0),
    "Q2_K": BlockType(2, torch.float32, torch.float32, (0, 0, 0), _q2_k, group_size=16),
    "Q3_K": BlockType(4, torch.float32, None, (0, 0, 0), _q3_k, group_size=16),
    "Q4_K": BlockType(4, torch.float32, torch.float32, (16, 144, 32), _q4_k),
    "Q5_K": BlockType(8, torch.float32, torch.float32, (48, 176, 32), _q5_k),
    "Q6_K": BlockType(8, torch.float32, None, (0, 128, 64), _q6_k, group_size=16),
}
