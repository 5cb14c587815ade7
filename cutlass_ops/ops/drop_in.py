"""Operators on other libraries' tensors without packing: replacements for functions of these
libraries.

4-bit code books (NF4, FP4) in flat blocks are bitsandbytes' storage, byte for byte; AWQ weights are
AutoAWQ's. None of these operators has a gradient: each raises where one would be recorded.
:func:`cutlass_ops.mixed_gemm` has one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import _C, reference
from ..weights import formats
from . import arguments, library, native

_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def _check_tensor(name: str, value: Tensor, types: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
    if value.dtype not in types:
        accepted = ", ".join(str(t).removeprefix("torch.") for t in types)
        raise TypeError(
            f"{name} has dtype {str(value.dtype).removeprefix('torch.')}; supported are {accepted}"
        )


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
            raise ValueError(
                f"absmax has shape {tuple(absmax.shape)}; at least one value is expected"
            )
        return cls(*reference.quantize_absmax(absmax.reshape(-1)))

    def dequantize(self) -> Tensor:
        """The absmax values, fp32 ``[B]``.

        Raises:
            TypeError, ValueError: tensors that do not fit together.
        """
        self.check()
        return reference.dequantize_absmax(
            self.codes, self.absmax.reshape(-1), self.code, self.offset
        )

    def check(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` if the tensors do not fit together."""
        _check_tensor("codes", self.codes, (torch.uint8,))
        count, device = self.codes.numel(), self.codes.device
        for name, value, size in (
            ("absmax", self.absmax, -(-count // formats.NESTED_BLOCK_SIZE)),
            ("code", self.code, 256),
            ("offset", self.offset, 1),
        ):
            _check_tensor(name, value, (torch.float32,))
            _check_size(name, value, size, device, f"double quantisation of {count} values")


def quantize_4bit(
    x: Tensor, blocksize: int = 64, quant_type: str = "nf4", *, code: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise to 4-bit codes of a code book in flat blocks, as
    ``reference.quantize_4bit`` defines it.

    Args:
        x: fp16, bf16 or fp32 of any shape.
        blocksize: elements of the flattened x that share an absmax: 32, 64, 128, 256, 512, 1024,
            2048 or 4096. The last block may be short.
        quant_type: "nf4" or "fp4".
        code: another book, fp32 ``[16]`` in any order, in place of ``quant_type``'s.

    Returns:
        Codes, uint8 ``[ceil(numel / 2), 1]``, the even element's in the high nibble; absmax, fp32
        ``[ceil(numel / blocksize)]``.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: x requires a gradient.
    """
    _check_tensor("x", x, _FLOAT_TYPES)
    formats.check_flat_block_size(blocksize)
    formats.check_quant_type(quant_type)
    _check_code(code, x.device)
    arguments.check_device(x.device)
    arguments.check_no_gradient("quantize_4bit", x, code)
    run = (
        _quantize_4bit if arguments.runs_directly(x, code) else torch.ops.cutlass_ops.quantize_4bit
    )
    packed, absmax = run(x, blocksize, quant_type, code)
    return packed, absmax


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
    """The values of :func:`quantize_4bit`'s codes: ``book[q] * absmax`` in fp32, rounded
    once to ``dtype``.

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
        RuntimeError: absmax requires a gradient.
    """
    _check_tensor("packed", packed, (torch.uint8,))
    formats.check_flat_block_size(blocksize)
    formats.check_quant_type(quant_type)
    _check_code(code, packed.device)
    if dtype not in _FLOAT_TYPES:
        raise TypeError(f"dtype is {dtype!r}; supported are float16, bfloat16, float32")
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape is {tuple(shape)}; extents of at least 0 are expected")
    count = math.prod(shape)
    if packed.numel() != -(-count // 2):
        _check_size(
            "packed", packed, -(-count // 2), packed.device, f"a tensor of shape {tuple(shape)}"
        )
    blocks = -(-count // blocksize)
    if isinstance(absmax, NestedAbsmax):
        absmax.check()
        values, first = absmax.absmax, absmax.codes
        nested: tuple[Tensor | None, Tensor | None, Tensor | None] = (
            absmax.codes,
            absmax.code,
            absmax.offset,
        )
    else:
        _check_tensor("absmax", absmax, (torch.float32,))
        values = first = absmax
        nested = (None, None, None)
    if first.numel() != blocks or first.device != packed.device:
        _check_size(
            "absmax",
            first,
            blocks,
            packed.device,
            f"a tensor of shape {tuple(shape)} in blocks of {blocksize}",
        )
    arguments.check_device(packed.device)
    arguments.check_no_gradient("dequantize_4bit", values, *nested, code)
    run = (
        _dequantize_4bit
        if arguments.runs_directly(packed, values, code)
        else torch.ops.cutlass_ops.dequantize_4bit
    )
    return cast(Tensor, run(packed, values, *nested, shape, blocksize, quant_type, dtype, code))


@functools.lru_cache
def _tables(quant_type: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Book, cuts and codes of a named book on a device; made once."""
    return reference.code_book(quant_type, device=device), *reference.book_cuts(
        quant_type, device=device
    )


def _aligned(x: Tensor) -> Tensor:
    """``x`` contiguous, on a 16-byte boundary."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _quantize_4bit(
    x: Tensor, blocksize: int, quant_type: str, code: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = x.detach()
    if x.device.type == "cpu":
        return reference.quantize_4bit(x, blocksize, quant_type, code)
    packed, absmax = _quantize_4bit_fake(x, blocksize, quant_type, code)
    if code is None:
        _, cuts, codes = _tables(quant_type, x.device)
    else:
        cuts, codes = reference.book_cuts(quant_type, code.contiguous())
    x = _aligned(x)
    with native.on_device(x.device):
        _C.quantize_flat(
            x.data_ptr(),
            native.DATA_TYPES[x.dtype],
            x.numel(),
            blocksize,
            cuts.data_ptr(),
            codes.data_ptr(),
            codes.numel() == 8,
            packed.data_ptr(),
            absmax.data_ptr(),
            native.current_stream(x.get_device()),
        )
    return packed, absmax


def _quantize_4bit_fake(
    x: Tensor, blocksize: int, quant_type: str, code: Tensor | None
) -> tuple[Tensor, Tensor]:
    count = x.numel()
    packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=x.device)
    return packed, torch.empty(
        (count + blocksize - 1) // blocksize, dtype=torch.float32, device=x.device
    )


def _dequantize_4bit(
    packed: Tensor,
    absmax: Tensor,
    nested_codes: Tensor | None,
    nested_code: Tensor | None,
    nested_offset: Tensor | None,
    shape: Sequence[int],
    blocksize: int,
    quant_type: str,
    dtype: torch.dtype,
    code: Tensor | None,
) -> Tensor:
    if packed.device.type == "cpu":
        values = absmax.reshape(-1)
        if nested_codes is not None and nested_code is not None and nested_offset is not None:
            values = reference.dequantize_absmax(nested_codes, values, nested_code, nested_offset)
        return reference.dequantize_4bit(
            packed, values, tuple(shape), blocksize, quant_type, dtype, code
        )
    book = _tables(quant_type, packed.device)[0] if code is None else code.contiguous()
    out = torch.empty(tuple(shape), dtype=dtype, device=packed.device)
    packed, absmax = _aligned(packed), absmax.contiguous()
    codes, nested_book, offset = (
        None if t is None else t.contiguous() for t in (nested_codes, nested_code, nested_offset)
    )
    with native.on_device(packed.device):
        _C.dequantize_flat(
            packed.data_ptr(),
            absmax.data_ptr(),
            native.pointer(codes),
            native.pointer(nested_book),
            native.pointer(offset),
            out.numel(),
            blocksize,
            book.data_ptr(),
            out.data_ptr(),
            native.DATA_TYPES[dtype],
            native.current_stream(packed.get_device()),
        )
    return out


def _dequantize_4bit_fake(packed: Tensor, *args: Any) -> Tensor:
    return packed.new_empty(args[4], dtype=args[7])


# ---- AWQ


def awq_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """The values of an AWQ weight as AutoAWQ stores it ("gemm"), as
    ``reference.awq_dequantize`` defines them.

    Args:
        qweight: int32 ``[K, N / 8]``.
        scales: fp16 or bf16 ``[G, N]``, K being a multiple of G.
        qzeros: int32 ``[G, N / 8]``.

    Returns:
        ``[K, N]`` of the scales' dtype.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: scales requires a gradient.
    """
    _check_awq(qweight, scales, qzeros)
    arguments.check_no_gradient("awq_dequantize", scales)
    run = (
        _awq_dequantize
        if arguments.runs_directly(qweight, scales, qzeros)
        else torch.ops.cutlass_ops.awq_dequantize
    )
    return cast(Tensor, run(qweight, scales, qzeros))


def awq_gemm(x: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """``x @ W`` with an AWQ weight as AutoAWQ stores it ("gemm"), not reordered.

    On a GPU up to 32 rows (64 with weights of 2**25 elements or more) are multiplied in one launch
    that rounds once, at the end; more rows, or groups that are no multiple of 32, by torch's
    product with :func:`awq_dequantize`'s values, as on the CPU.

    Args:
        x: of the scales' dtype, ``[..., K]``.
        qweight, scales, qzeros: as in :func:`awq_dequantize`.

    Returns:
        ``[..., N]`` of x's dtype.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: x or scales requires a gradient.
    """
    _check_awq(qweight, scales, qzeros)
    _check_tensor("x", x, (scales.dtype,))
    if x.dim() < 1 or x.shape[-1] != qweight.shape[0]:
        raise ValueError(f"x has shape {tuple(x.shape)}; [..., {qweight.shape[0]}] is expected")
    if x.device != qweight.device:
        raise ValueError(f"x is on {x.device}; the weight is on {qweight.device}")
    arguments.check_no_gradient("awq_gemm", x, scales)
    run = (
        _awq_gemm
        if arguments.runs_directly(x, qweight, scales, qzeros)
        else torch.ops.cutlass_ops.awq_gemm
    )
    y = cast(Tensor, run(x.reshape(-1, x.shape[-1]), qweight, scales, qzeros))
    return y.view(*x.shape[:-1], scales.shape[1])


def _check_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> None:
    _check_tensor("qweight", qweight, (torch.int32,))
    _check_tensor("scales", scales, (torch.float16, torch.bfloat16))
    _check_tensor("qzeros", qzeros, (torch.int32,))
    if qweight.dim() != 2 or 0 in qweight.shape:
        raise ValueError(
            f"qweight has shape {tuple(qweight.shape)}; [K, N / 8], neither empty, is expected"
        )
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    groups = scales.shape[0] if scales.dim() == 2 else 0
    if groups == 0 or scales.shape[1] != n or k % groups:
        raise ValueError(
            f"scales has shape {tuple(scales.shape)}; [G, {n}] is expected, G a divisor of {k}"
        )
    if tuple(qzeros.shape) != (groups, n // 8):
        raise ValueError(f"qzeros has shape {tuple(qzeros.shape)}; {(groups, n // 8)} is expected")
    for name, value in (("scales", scales), ("qzeros", qzeros)):
        if value.device != qweight.device:
            raise ValueError(f"{name} is on {value.device}; qweight is on {qweight.device}")
    arguments.check_device(qweight.device)


def _awq_weight(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> _C.AwqWeight:
    return _C.AwqWeight(
        qweight.data_ptr(),
        scales.data_ptr(),
        qzeros.data_ptr(),
        scales.shape[1],
        qweight.shape[0],
        scales.shape[0],
        native.DATA_TYPES[scales.dtype],
    )


def _awq_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    qweight, scales, qzeros = qweight.detach(), scales.detach(), qzeros.detach()
    if qweight.device.type == "cpu":
        return reference.awq_dequantize(qweight, scales, qzeros)
    qweight, scales, qzeros = _aligned(qweight), _aligned(scales), _aligned(qzeros)
    out = _awq_dequantize_fake(qweight, scales, qzeros)
    with native.on_device(qweight.device):
        _C.dequantize_awq(
            _awq_weight(qweight, scales, qzeros),
            out.data_ptr(),
            native.current_stream(qweight.get_device()),
        )
    return out


def _awq_dequantize_fake(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    return scales.new_empty(qweight.shape[0], scales.shape[1])


def _awq_gemm(x: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    x = x.detach()
    group = qweight.shape[0] // scales.shape[0]
    # The values of small weights are still in the L2 cache when torch's product reads them.
    most = _C.max_awq_rows if qweight.numel() * 8 >= 1 << 25 else _C.max_awq_rows // 2
    if x.device.type == "cpu" or x.shape[0] > most or group % 32:
        with arguments.without_autocast(x.device):
            return x @ _awq_dequantize(qweight, scales, qzeros)
    qweight, scales, qzeros = (
        _aligned(qweight.detach()),
        _aligned(scales.detach()),
        _aligned(qzeros.detach()),
    )
    m, k = x.shape
    if not native.has_rows(x) or (m > 1 and x.stride(0) % 8) or x.data_ptr() % 16:
        x = _aligned(x)
    out = _awq_gemm_fake(x, qweight, scales, qzeros)
    with native.on_device(x.device):
        weight = _awq_weight(qweight, scales, qzeros)
        _C.awq_gemm(
            weight,
            x.data_ptr(),
            x.stride(0) if m > 1 else k,
            m,
            out.data_ptr(),
            native.current_stream(x.get_device()),
        )
    return out


def _awq_gemm_fake(x: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])


library.register(
    "quantize_4bit(Tensor x, int blocksize, str quant_type, Tensor? code) -> (Tensor, Tensor)",
    _quantize_4bit,
    _quantize_4bit_fake,
)
library.register(
    "dequantize_4bit(Tensor packed, Tensor absmax, Tensor? nested_codes, Tensor? nested_code, "
    "Tensor? nested_offset, "
    "SymInt[] shape, int blocksize, str quant_type, ScalarType dtype, Tensor? code) -> Tensor",
    _dequantize_4bit,
    _dequantize_4bit_fake,
)
library.register(
    "awq_dequantize(Tensor qweight, Tensor scales, Tensor qzeros) -> Tensor",
    _awq_dequantize,
    _awq_dequantize_fake,
)
library.register(
    "awq_gemm(Tensor x, Tensor qweight, Tensor scales, Tensor qzeros) -> Tensor",
    _awq_gemm,
    _awq_gemm_fake,
)


def _check_code(code: Tensor | None, device: torch.device) -> None:
    if code is not None:
        _check_tensor("code", code, (torch.float32,))
        _check_size("code", code, 16, device, "a code book")
