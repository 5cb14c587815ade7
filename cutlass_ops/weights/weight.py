"""Quantised weights in canonical form: one code a byte, row-major."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import formats

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: The tensors of a weight.
PARTS = ("codes", "scales", "zeros", "offsets", "bias", "perm", "book")


class CheckpointError(ValueError):
    """A file that is not what it claims to be.

    Attributes:
        path: the file.
        tensor: the tensor at fault, or None if the fault is in the file as a whole.
    """

    def __init__(
        self, path: str | os.PathLike[str], message: str, tensor: str | None = None
    ) -> None:
        where = f"{os.fspath(path)}: tensor {tensor!r}" if tensor is not None else os.fspath(path)
        super().__init__(f"{where}: {message}")
        self.path = os.fspath(path)
        self.tensor = tensor
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are copied and pickled by their constructor's arguments, which are not
        # those of ValueError.
        return CheckpointError, (self.path, self._message, self.tensor)


def _names(types: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(t).removeprefix("torch.") for t in types)


def check_part(
    name: str,
    value: Any,
    shape: tuple[int, ...],
    types: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise unless a tensor of a weight has this shape, one of these dtypes and this device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
    if value.dtype not in types:
        raise TypeError(f"{name} has dtype {_names((value.dtype,))}; supported are {_names(types)}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; {shape} is expected")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; the codes are on {device}")


def check_book(book: Any, bits: int, zeros: Any, offsets: Any, device: torch.device) -> None:
    """Raise unless ``book`` is None, or a code book of this weight."""
    if book is None:
        return
    if zeros is not None or offsets is not None:
        name = "zeros" if zeros is not None else "offsets"
        raise ValueError(
            f"both book and {name} are given; values from a code book have neither zero "
            "points nor offsets"
        )
    formats.formats_of(bits, has_book=True)
    check_part("book", book, (1 << bits,), (torch.float32,), device)


def check_order(perm: Tensor | None, kernel_size: tuple[int, ...]) -> None:
    """Raise if a convolution's weight has an act order."""
    if perm is not None and kernel_size:
        raise ValueError(
            f"both perm and kernel_size {kernel_size} are given; weights of convolutions "
            "have no act order"
        )


def _holds(book: Tensor, values: tuple[float, ...]) -> bool:
    return torch.equal(book, torch.tensor(values, dtype=torch.float32, device=book.device))


def wrong_book(bits: int, book: Tensor | None) -> str | None:
    """What is wrong with the values of a code book: some formats have only one."""
    known = formats.formats_of(bits, book is not None)
    if book is None or any(kind.book is None or _holds(book, kind.book) for kind in known):
        return None
    names = " and ".join(kind.name for kind in known)
    return f"has other values than those of {names}, which codes of {bits} bits may have"


def format_of(bits: int, book: Tensor | None) -> formats.Format:
    """The format of codes of so many bits; where several have a code book, by its values, for which
    the host waits if they are on a GPU.

    Raises:
        ValueError: no format has that book.
    """
    known = formats.formats_of(bits, book is not None)
    if book is None or len(known) == 1:
        return known[0]
    for kind in known:
        if kind.book is not None and _holds(book, kind.book):
            return kind
    raise ValueError(f"book {wrong_book(bits, book)}")


def rows_of(weight: QuantizedWeight, rows: slice | Tensor) -> QuantizedWeight:
    """Some rows of a weight; views, if they are a slice."""
    parts = {
        name: getattr(weight, name) for name in ("codes", "scales", "zeros", "offsets", "bias")
    }
    return replace(weight, **{name: part[rows] for name, part in parts.items() if part is not None})


def not_finite(weight: QuantizedWeight) -> str | None:
    """Which scale, offset, value of a code book or code is NaN or infinite, as
    "scales[3, 0] is nan"; None if all are numbers.

    A bias may hold infinities: some models mask outputs with it.
    """
    for name, values in (
        ("scales", weight.scales),
        ("offsets", weight.offsets),
        ("book", weight.book),
    ):
        if values is not None and not bool((finite := values.isfinite()).all()):
            place = [int(i) for i in (~finite).nonzero()[0]]
            return f"{name}{place} is {float(values[tuple(place)])}"
    kind = format_of(weight.bits, weight.book)
    if kind.nan is not None and bool((nan := weight.codes & 0x7F >= kind.nan).any()):
        place = [int(i) for i in nan.nonzero()[0]]
        return f"codes{place} is {int(weight.codes[tuple(place)]):#x}, the NaN of {kind.name}"
    return None


def flat_group_size(n: int, k: int, blocksize: int) -> int:
    """The group size at which a matrix ``[n, k]`` has one scale a group, if blocks of its
    flattened elements have.

    Raises:
        ValueError: blocks that straddle rows in pieces shorter than 16.
    """
    if n > 1 and blocksize % k == 0:
        return -1
    group_size = blocksize if n == 1 else math.gcd(k, blocksize)
    if group_size < formats.SHORT_GROUPS[0]:
        raise ValueError(
            f"shape is {(n, k)} and blocksize {blocksize}: blocks straddle rows in pieces of "
            f"{group_size} columns; "
            f"groups of at least {formats.SHORT_GROUPS[0]} are supported"
        )
    return group_size


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight ``W[N, K]`` in its canonical form: what every checkpoint is read into
    and what is packed.

    The value of code ``q`` in row n and group j is ``scales[n, j] * (q - zeros[n, j])``,
    ``scales[n, j] * (q - 2**(bits-1)) + offsets[n, j]``, or, with neither zeros nor offsets,
    ``scales[n, j] * (q - 2**(bits-1))``. With a code book it is ``scales[n, j] * book[q]``.

    The weight of a convolution ``[N, C, *kernel_size]`` (C channels of one of its groups) is the
    matrix ``[N, taps * C]``, channels innermost. Its groups are ``group_size`` channels of one tap,
    or the whole row.

    Attributes:
        codes: uint8 ``[N, K]``, each below ``2**bits``.
        scales: fp16, bf16 or fp32 ``[N, G]``; may be negative. Kept exactly.
        zeros: uint8 ``[N, G]`` below ``2**bits``, or None.
        offsets: fp16, bf16 or fp32 ``[N, G]``, or None. At most one of zeros and offsets is given.
        bits: 2, 4 or 8.
        group_size: 16, 32, 64, a multiple of 128, or -1 (one group). ``G = ceil(K /
            group_size)``, or ``taps * ceil(C / group_size)``; the last, of each tap, may be short.
        bias: fp16, bf16 or fp32 ``[N]``, or None; added by every product with this weight.
        perm: integer ``[K]``, a permutation, or None: column j of the codes multiplies input
            feature ``perm[j]`` (GPTQ's act order, with columns already sorted by group).
        book: fp32 ``[16]``, the values of 4-bit codes (``formats.NF4``, ``formats.FP4``,
            ``formats.E2M1`` or others), or ``[256]``, those of ``formats.E4M3``, with 8 bits; or
            None; never beside zeros or offsets.
        kernel_size: extents of a convolution's kernel, one to three; () for a matrix.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an invalid shape, range or combination; the message has the value.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    bits: int = 4
    group_size: int = 128
    bias: Tensor | None = None
    perm: Tensor | None = None
    book: Tensor | None = None
    kernel_size: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        formats.check_bits(self.bits)
        formats.check_group_size(self.group_size)
        if not isinstance(self.codes, Tensor):
            raise TypeError(f"codes is a {type(self.codes).__name__}; a torch.Tensor is expected")
        if self.codes.dim() != 2 or 0 in self.codes.shape:
            raise ValueError(
                f"codes has shape {tuple(self.codes.shape)}; [N, K] with N and K at least "
                "1 is expected"
            )
        n, k = self.codes.shape
        device = self.codes.device
        check_part("codes", self.codes, (n, k), (torch.uint8,), device)
        object.__setattr__(self, "kernel_size", formats.check_kernel_size(self.kernel_size, k))
        vector = (n, formats.group_count(k, self.group_size, self.taps))
        check_part("scales", self.scales, vector, FLOAT_TYPES, device)
        if self.zeros is not None and self.offsets is not None:
            raise ValueError(
                "both zeros and offsets are given; a weight has integer zero points or real "
                "offsets, not both"
            )
        if self.zeros is not None:
            check_part("zeros", self.zeros, vector, (torch.uint8,), device)
        if self.offsets is not None:
            check_part("offsets", self.offsets, vector, FLOAT_TYPES, device)
        if self.bias is not None:
            check_part("bias", self.bias, (n,), FLOAT_TYPES, device)
        if self.bits < 8:
            for name, value in (("codes", self.codes), ("zeros", self.zeros)):
                if value is not None and (largest := int(value.max())) >= 1 << self.bits:
                    raise ValueError(
                        f"{name} holds {largest}; with bits={self.bits} the largest is "
                        f"{(1 << self.bits) - 1}"
                    )
        check_order(self.perm, self.kernel_size)
        if self.perm is not None:
            check_part("perm", self.perm, (k,), (torch.int32, torch.int64), device)
            if not torch.equal(self.perm.long().sort().values, torch.arange(k, device=device)):
                raise ValueError(f"perm is not a permutation of 0 .. {k - 1}")
        check_book(self.book, self.bits, self.zeros, self.offsets, device)
        if problem := wrong_book(self.bits, self.book):
            raise ValueError(f"book {problem}")

    @classmethod
    def from_flat(
        cls,
        packed: Tensor,
        absmax: Tensor,
        shape: tuple[int, int],
        blocksize: int,
        book: Tensor,
        bias: Tensor | None = None,
    ) -> QuantizedWeight:
        """A weight from bitsandbytes' 4-bit storage, whose blocks run over the flattened matrix.

        Nothing is rounded: each group has the absmax of the flat block that it lies in. Where
        blocks end inside rows, groups are the longest that lie in one block each: the greatest
        common divisor of K and the block size.

        Args:
            packed: uint8 of any shape, two codes a byte, the even one in the high nibble;
                ``ceil(N * K / 2)`` bytes.
            absmax: fp16, bf16 or fp32, ``ceil(N * K / blocksize)`` values.
            shape: ``(N, K)``.
            blocksize: one of ``formats.FLAT_BLOCK_SIZES``.
            book: fp32 ``[16]``.
            bias: as in the constructor.

        Raises:
            TypeError: an argument of the wrong dtype.
            ValueError: sizes that do not fit, or blocks that straddle rows in pieces
                shorter than 16.
        """
        n, k = shape
        formats.check_flat_block_size(blocksize)
        if n < 1 or k < 1:
            raise ValueError(f"shape is {tuple(shape)}; N and K of at least 1 are expected")
        packed, absmax = packed.reshape(-1), absmax.reshape(-1)
        check_part("packed", packed, (-(-n * k // 2),), (torch.uint8,), packed.device)
        check_part("absmax", absmax, (-(-n * k // blocksize),), FLOAT_TYPES, packed.device)
        group_size = flat_group_size(n, k, blocksize)
        if group_size == blocksize:  # blocks do not go on from one row to the next
            scales = absmax.view(n, -1)
        else:
            first = torch.arange(0, k, k if group_size == -1 else group_size, device=packed.device)
            scales = absmax[
                (torch.arange(n, device=packed.device)[:, None] * k + first) // blocksize
            ]
        if packed.device.type == "cpu":
            packed = packed.contiguous()
            flat = torch.empty(2 * len(packed), dtype=torch.uint8, device="cpu")
            _C.unpack_bytes(
                packed.data_ptr(),
                1,
                len(packed),
                len(packed),
                len(packed),
                True,
                True,
                flat.data_ptr(),
            )
        else:
            flat = torch.stack((packed >> 4, packed & 15), dim=1).reshape(-1)
        codes = flat[: n * k].view(n, k)
        return cls(codes=codes, scales=scales, bits=4, group_size=group_size, bias=bias, book=book)

    @property
    def n(self) -> int:
        """Output features."""
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        """Input features."""
        return self.codes.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.n, self.k

    @property
    def taps(self) -> int:
        """Pixels that the kernel of a convolution sees; 1 for a matrix."""
        return math.prod(self.kernel_size)

    @property
    def groups(self) -> int:
        """Groups along K."""
        return self.scales.shape[1]

    @property
    def symmetric(self) -> bool:
        """Whether neither zero points nor offsets nor a code book are stored."""
        return self.zeros is None and self.offsets is None and self.book is None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.codes.device

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on ``device``."""
        return QuantizedWeight(
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            offsets=None if self.offsets is None else self.offsets.to(device),
            bits=self.bits,
            group_size=self.group_size,
            bias=None if self.bias is None else self.bias.to(device),
            perm=None if self.perm is None else self.perm.to(device),
            book=None if self.book is None else self.book.to(device),
            kernel_size=self.kernel_size,
        )
