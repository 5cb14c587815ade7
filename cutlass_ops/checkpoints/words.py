"""Codes that a checkpoint packs into 32-bit words or into bytes, as one code a byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import _C

_ROWS = 256


def _strides(words: Tensor) -> tuple[int, int]:
    if (
        words.dtype not in (torch.int32, torch.uint32)
        or words.dim() != 2
        or words.device.type != "cpu"
    ):
        raise TypeError(
            f"words are {words.dtype} {list(words.shape)} on {words.device}; an int32 matrix on "
            "the CPU is expected"
        )
    return words.stride(0), words.stride(1)


def unpack_along_k(words: Tensor, k: int, bits: int) -> Tensor:
    """Codes of words that hold them densely along K, the first in the lowest bits.

    Code j of a row is bits ``j * bits`` and up of the row's words taken together: 3-bit codes may
    lie in two of them.

    Args:
        words: int32 ``[N, ceil(k * bits / 32)]``; any strides, so that GPTQ's ``[K / 8, N]`` comes
            as ``words.t()``.
        k: codes in a row.
        bits: 1 to 8; 4 and 8 are fast.

    Returns:
        uint8 ``[N, k]``.

    Raises:
        TypeError: another dtype than int32, another rank or device.
        ValueError: a row of another length.
    """
    n_stride, k_stride = _strides(words)
    n, columns = words.shape
    if columns != -(-k * bits // 32):
        raise ValueError(
            f"words are {[n, columns]}; {k} codes of {bits} bits take {-(-k * bits // 32)} "
            "words a row"
        )
    codes = torch.empty(n, k, dtype=torch.uint8, device="cpu")
    if bits not in (4, 8):
        for begin in range(0, n, _ROWS):  # a byte for each bit is a lot
            raw = words[begin : begin + _ROWS].contiguous().numpy().view(np.uint8)
            ones = np.unpackbits(raw, axis=1, count=k * bits, bitorder="little").reshape(
                -1, k, bits
            )
            codes[begin : begin + _ROWS] = torch.from_numpy(
                np.packbits(ones, axis=2, bitorder="little")[..., 0]
            )
        return codes
    _C.unpack_along_k(words.data_ptr(), n_stride, k_stride, codes.data_ptr(), n, k, bits)
    return codes


def unpack_along_n(words: Tensor, order: Sequence[int]) -> Tensor:
    """Codes of words that hold eight of 4 bits along N.

    Args:
        words: int32 ``[K, N / 8]``; any strides.
        order: the place among its eight of each nibble, from the lowest bits: AWQ's is 0, 2, 4, 6,
            1, 3, 5, 7.

    Returns:
        uint8 ``[N, K]``.

    Raises:
        TypeError: another dtype than int32, another rank or device.
        ValueError: an order that is no permutation.
    """
    k_stride, n_stride = _strides(words)
    k, n = words.shape[0], 8 * words.shape[1]
    codes = torch.empty(n, k, dtype=torch.uint8, device="cpu")
    _C.unpack_along_n(words.data_ptr(), n_stride, k_stride, order, codes.data_ptr(), n, k)
    return codes


def unpack_tiles(words: Tensor) -> Tensor:
    """Codes of words in PyTorch's int4 order for tensor cores (see
    ``csrc/include/cutlass_ops/words.h``).

    Args:
        words: int32 ``[N / 8, K / 128, 32, 4]``, contiguous.

    Returns:
        uint8 ``[N, K]``.

    Raises:
        TypeError: another dtype, shape, device or stride.
    """
    if (
        words.dtype != torch.int32
        or words.dim() != 4
        or tuple(words.shape[2:]) != (32, 4)
        or 0 in words.shape
        or not words.is_contiguous()
        or words.device.type != "cpu"
    ):
        raise TypeError(
            f"words are {words.dtype} {list(words.shape)} on {words.device}; contiguous int32 [n, "
            "k, 32, 4] is expected"
        )
    n, k = 8 * words.shape[0], 128 * words.shape[1]
    codes = torch.empty(n, k, dtype=torch.uint8, device="cpu")
    _C.unpack_tiles(words.data_ptr(), codes.data_ptr(), n, k)
    return codes


def unpack_bytes(packed: Tensor, run: int, *, in_turn: bool, high_first: bool) -> Tensor:
    """Codes of bytes that hold two of 4 bits.

    Args:
        packed: uint8 ``[B, S]``, on the CPU; rows may be further apart than their length.
        run: bytes of a row that belong together; it divides S.
        in_turn: whether byte i of a run holds its codes ``2 i`` and ``2 i + 1``, and not ``i`` and
            ``run + i``.
        high_first: whether the first of the two is in the high half.

    Returns:
        uint8 ``[B, 2 S]``.

    Raises:
        TypeError: another dtype, rank, device or stride inside rows.
        ValueError: a run that does not divide S.
    """
    if (
        packed.dtype != torch.uint8
        or packed.dim() != 2
        or packed.device.type != "cpu"
        or packed.stride(1) != 1
    ):
        raise TypeError(
            f"packed is {packed.dtype} {list(packed.shape)} on {packed.device}, strides "
            f"{packed.stride()}; "
            "a uint8 matrix on the CPU with rows in one piece is expected"
        )
    blocks, size = packed.shape
    if run < 1 or size % run:
        raise ValueError(f"run is {run}, which does not divide rows of {size} bytes")
    codes = torch.empty(blocks, 2 * size, dtype=torch.uint8, device="cpu")
    stride = max(packed.stride(0), size)  # irrelevant for a single row
    if codes.numel():
        _C.unpack_bytes(
            packed.data_ptr(), blocks, stride, size, run, in_turn, high_first, codes.data_ptr()
        )
    return codes


def permute_columns(codes: Tensor, perm: Tensor) -> Tensor:
    """Codes whose column j is column ``perm[j]`` of ``codes``.

    Args:
        codes: uint8 ``[N, K]``, contiguous.
        perm: ``[K]``, each below K; checked by the caller.

    Returns:
        uint8 ``[N, K]``.
    """
    permuted = torch.empty_like(codes)
    order = perm.to(torch.int32).contiguous()
    _C.permute_columns(
        codes.data_ptr(), permuted.data_ptr(), codes.shape[0], codes.shape[1], order.data_ptr()
    )
    return permuted
