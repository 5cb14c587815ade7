"""Operators on other libraries' tensors as they are, not reordered: drop-ins for code that has them.

4-bit code books (NF4, FP4) in flat blocks are bitsandbytes' storage, byte for byte.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import formats, reference

_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def _check_tensor(name: str, value: Tensor, types: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
    if value.dtype not in types:
        accepted = ", ".join(str(t).removeprefix("torch.") for t in types)
        raise TypeError(f"{name} has dtype {str(value.dtype).removeprefix('torch.')}; supported are {accepted}")


def _check_size(name: str, value: Tensor, count: int, device: torch.device, of: str) -> None:
    if value.numel() != count:
        raise ValueError(f"{name} has {value.numel()} elements; {of} takes {count}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; {device} is expected")


class NestedAbsmax(NamedTuple):
    """Absmax values that are quantised themselves ("double quantisation").

    Attributes:
        codes: uint8 ``[B]``.
        absmax: fp32 ``[ceil(B / 256)]``.
        code: fp32 ``[256]``, the values of the codes, ascending.
        offset: fp32 ``[]``, added last.
    """

    codes: Tensor
    absmax: Tensor
    code: Tensor
    offset: Tensor

    @classmethod
    def quantize(cls, absmax: Tensor) -> NestedAbsmax:
        """Quantise absmax values, fp32 ``[B]``, as ``reference.quantize_absmax`` defines it.

        Raises:
            TypeError, ValueError: absmax is not such a tensor, or has no element.
        """
        _check_tensor("absmax", absmax, (torch.float32,))
        if absmax.numel() == 0:
            raise ValueError(f"absmax has shape {tuple(absmax.shape)}; at least one value is expected")
        return cls(*reference.quantize_absmax(absmax.reshape(-1)))

    def dequantize(self) -> Tensor:
        """The absmax values, fp32 ``[B]``.

        Raises:
            TypeError, ValueError: tensors that do not fit together.
        """
        _check_tensor("codes", self.codes, (torch.uint8,))
        count, device = self.codes.numel(), self.codes.device
        for name, value, size in (
            ("absmax", self.absmax, -(-count // formats.NESTED_BLOCK_SIZE)),
            ("code", self.code, 256),
            ("offset", self.offset, 1),
        ):
            _check_tensor(name, value, (torch.float32,))
            _check_size(name, value, size, device, f"double quantisation of {count} values")
        return reference.dequantize_absmax(self.codes, self.absmax.reshape(-1), self.code, self.offset)


def quantize_4bit(
    x: Tensor, blocksize: int = 64, quant_type: str = "nf4", *, code: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise to 4-bit codes of a code book in flat blocks, as ``reference.quantize_4bit`` defines it.

    Args:
        x: fp16, bf16 or fp32 of any shape.
        blocksize: elements of the flattened x that share an absmax: 32, 64, 128, 256, 512, 1024, 2048 or 4096. The last
            block may be short.
        quant_type: "nf4" or "fp4".
        code: another book, fp32 ``[16]`` in any order, in place of ``quant_type``'s.

    Returns:
        Codes, uint8 ``[ceil(numel / 2), 1]``, the even element's in the high nibble; absmax, fp32
        ``[ceil(numel / blocksize)]``.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
    """
    _check_tensor("x", x, _FLOAT_TYPES)
    formats.check_flat_block_size(blocksize)
    formats.check_quant_type(quant_type)
    _check_code(code, x.device)
    return reference.quantize_4bit(x.detach(), blocksize, quant_type, code)


def dequantize_4bit(
    packed: Tensor,
    absmax: Tensor | NestedAbsmax,
    shape: tuple[int, ...],
    blocksize: int = 64,
    quant_type: str = "nf4",
    dtype: torch.dtype = torch.float16,
    *,
    code: Tensor | None = None,
) -> Tensor:
    """The values of :func:`quantize_4bit`'s codes: ``book[q] * absmax`` in fp32, rounded once to ``dtype``.

    Args:
        packed: uint8 of any shape, ``ceil(numel / 2)`` bytes.
        absmax: fp32, ``ceil(numel / blocksize)`` values, or those quantised.
        shape: of the result.
        blocksize, quant_type, code: as they were quantised.
        dtype: fp16, bf16 or fp32.

    Returns:
        ``shape`` of ``dtype``.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
    """
    _check_tensor("packed", packed, (torch.uint8,))
    formats.check_flat_block_size(blocksize)
    formats.check_quant_type(quant_type)
    _check_code(code, packed.device)
    if dtype not in _FLOAT_TYPES:
        raise TypeError(f"dtype is {dtype}; supported are float16, bfloat16, float32")
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape is {tuple(shape)}; extents of at least 0 are expected")
    count = math.prod(shape)
    values = absmax.dequantize() if isinstance(absmax, NestedAbsmax) else absmax
    _check_tensor("absmax", values, (torch.float32,))
    _check_size("packed", packed, -(-count // 2), packed.device, f"a tensor of shape {tuple(shape)}")
    _check_size(
        "absmax", values, -(-count // blocksize), packed.device, f"a tensor of shape {tuple(shape)} in blocks of {blocksize}"
    )
    return reference.dequantize_4bit(packed, values.reshape(-1), tuple(shape), blocksize, quant_type, dtype, code)


def _check_code(code: Tensor | None, device: torch.device) -> None:
    if code is not None:
        _check_tensor("code", code, (torch.float32,))
        _check_size("code", code, 16, device, "a code book")
