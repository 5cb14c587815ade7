"""What a stored code means, and the sizes the packed layout is made of.

A code ``q`` is an unsigned integer of ``bits`` bits. With a scale ``s`` it stands for
``s * (q - z)`` (an integer zero point ``z``), ``s * (q - 2**(bits - 1)) + o`` (a real offset ``o``)
or, with neither, ``s * (q - 2**(bits - 1))``. With a code book, 16 real values for codes of 4 bits
or :data:`E4M3` for those of 8, a code stands for ``s * book[q]``; s may be the largest magnitude of
its group ("absmax").
The sizes below are those of ``csrc/include/cutlass_ops/layout.h``, which holds the
index formula itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .. import _C

BITS = (2, 4, 8)

#: What ``config.json`` calls a packed model's quantisation.
QUANT_METHOD = "cutlass_ops"

#: Name of the packed order, and versions of the files that hold it, of ``layout.h``: version 1 has
#: no checksums; version 3 is 2 with experts whose rows of gate and up are in eights, and version 4
#: with gated matrices; each is written where there are any.
LAYOUT_NAME = _C.layout_name
LAYOUT_VERSION = _C.layout_version
GATED_EXPERTS_VERSION = _C.gated_experts_layout_version
GATED_VERSION = _C.gated_layout_version
LAYOUT_VERSIONS = (1, LAYOUT_VERSION, GATED_EXPERTS_VERSION, GATED_VERSION)

#: NormalFloat4: 16 quantiles of the normal distribution (QLoRA, arXiv 2305.14314), the values
#: of bitsandbytes.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

#: bitsandbytes' FP4: a sign (8), and eight magnitudes of which the largest is 1.
_FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
FP4 = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))

#: Magnitudes between which an FP4 code changes, rounded as in the kernels that write its
#: checkpoints (not quite midpoints), and the codes of the eight ranges in that order.
FP4_CUTS = (0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333)
FP4_ORDER = (0, 1, 6, 7, 4, 5, 2, 3)

CODE_BOOKS = {"nf4": NF4, "fp4": FP4}

#: E2M1, the 4-bit floats of MXFP4: a sign (8), two bits of exponent and one of mantissa (OCP
#: Microscaling Formats 1.0, 5.3.3).
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES))
#: Exponent of E2M1's largest value, and columns that share a scale in MXFP4: a power of two from
#: 2^-127 to 2^127 (E8M0).
E2M1_LARGEST_EXPONENT = 2
MXFP4_GROUP = 32


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa / 512 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return -value if code & 0x80 else value


#: Floats of a sign, 4 bits of exponent and 3 of mantissa, by their bits (torch.float8_e4m3fn): the
#: one code book of 8 bits. Codes 0x7f and 0xff are NaN; no weight may contain those codes, and this
#: table has 480 and -480 for them.
E4M3 = tuple(_e4m3(code) for code in range(256))
E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Format:
    """What codes are, as ``csrc/include/cutlass_ops/format.h`` lists it.

    Attributes:
        name: of the enumerator, in ``_C.Format``.
        text: what ``cutlass-ops inspect`` calls it where codes are no integers.
        bits: of a code.
        has_book: a code stands for a value of a book, and not for an integer.
        book: the only code book of the format, whose values are built into kernels; None: any.
        nan: the smallest code, without the sign bit, from which on codes are NaN. None: every code
            is a number.
    """

    name: str
    text: str
    bits: int
    has_book: bool = False
    book: tuple[float, ...] | None = None
    nan: int | None = None


FORMATS = (
    Format("int4", "", 4),
    Format("int8", "", 8),
    Format("codebook", "code book", 4, has_book=True),
    Format("e4m3", "e4m3 floats", 8, has_book=True, book=E4M3, nan=0x7F),
    Format("int2", "", 2),
)


def formats_of(bits: int, has_book: bool) -> tuple[Format, ...]:
    """The formats of codes of so many bits, or raise ``ValueError``. Where there are several, each
    has its own book.
    """
    found = tuple(known for known in FORMATS if (known.bits, known.has_book) == (bits, has_book))
    if not found:
        raise ValueError(f"codes of {bits} bits have no code book")
    return found


#: What :func:`cutlass_ops.quantize` knows by name.
BOOKS = CODE_BOOKS | {"mxfp4": E2M1, "e4m3": E4M3}

#: Elements that share an absmax in a flat tensor of 4-bit codes.
FLAT_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
#: Absmax values that share one second-level absmax in double quantisation.
NESTED_BLOCK_SIZE = 256

ROWS_PER_PANEL = 64
#: Rows of gate, and of up, that are adjacent in a gated weight.
GATED_ROWS = 8
K_PER_TILE = 128
#: Group sizes of which several fit in a tile.
SHORT_GROUPS = (16, 32, 64)
#: What group sizes there are, for messages.
GROUP_SIZES = f"{', '.join(map(str, SHORT_GROUPS))}, multiples of {K_PER_TILE} and -1 (all of K)"
#: The longest run of K that shares one activation scale in block mode.
MAX_ACTIVATION_BLOCK = 128


def check_layout(name: object, version: object) -> None:
    """Raise ``ValueError`` for the layout of a file, by its name and version, that this
    package does not read.

    A file's header gives the version as text, ``config.json`` as a number.
    """
    known = (*LAYOUT_VERSIONS, *map(str, LAYOUT_VERSIONS))
    if name != LAYOUT_NAME or isinstance(version, (bool, float)) or version not in known:
        versions = f"versions 1 to {LAYOUT_VERSIONS[-1]}"
        raise ValueError(
            f"layout {name!r:.100}, version {version!r:.100}; known is {LAYOUT_NAME!r}, {versions}"
        )


def check_bits(bits: int) -> int:
    """Return ``bits``, or raise ``ValueError`` if no format has that many."""
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"bits is {bits!r:.100}; supported are {', '.join(map(str, BITS))}")
    return bits


def width_of(bits: int) -> int:
    """The least width of packed codes for codes of 1 to 8 bits."""
    return next(width for width in BITS if bits <= width)


def check_group_size(group_size: int) -> int:
    """Return ``group_size``, or raise ``ValueError``.

    Groups of 16, 32 and 64 divide a tile's 128 columns and longer ones are made of whole tiles, so
    that no step of a kernel ever straddles two groups. -1 is one group for all of K.
    """
    if type(group_size) is int and (
        group_size in (-1, *SHORT_GROUPS) or (group_size > 0 and group_size % K_PER_TILE == 0)
    ):
        return group_size
    raise ValueError(f"group_size is {group_size!r:.100}; supported are {GROUP_SIZES}")


def check_kernel_size(kernel_size: Sequence[int], k: int) -> tuple[int, ...]:
    """Return the extents of a convolution's kernel, () for a matrix, or raise ``ValueError`` if K
    is not made of such taps.
    """
    size = tuple(kernel_size) if isinstance(kernel_size, Sequence) else (kernel_size,)
    # type(), not isinstance(): True must not count as a size.
    if len(size) > 3 or any(type(extent) is not int or extent < 1 for extent in size):
        raise ValueError(
            f"kernel_size is {kernel_size!r:.100}; at most three integers of at least 1 "
            "are expected"
        )
    if k % math.prod(size):
        raise ValueError(
            f"kernel_size is {size!r:.100}; the product of its extents does not divide K = {k}"
        )
    return size


def check_flat_block_size(blocksize: int) -> int:
    """Return ``blocksize``, or raise ``ValueError`` if no flat block has so many elements."""
    if type(blocksize) is int and blocksize in FLAT_BLOCK_SIZES:
        return blocksize
    raise ValueError(
        f"blocksize is {blocksize!r:.100}; supported are {', '.join(map(str, FLAT_BLOCK_SIZES))}"
    )


def check_quant_type(quant_type: str) -> str:
    """Return ``quant_type``, or raise ``ValueError`` if no code book has that name."""
    if quant_type in CODE_BOOKS:
        return quant_type
    raise ValueError(
        f"quant_type is {quant_type!r:.100}; supported are {', '.join(map(repr, CODE_BOOKS))}"
    )


def midpoint(bits: int) -> int:
    """The code that stands for zero in a symmetric format: 2, 8 or 128."""
    return 1 << (bits - 1)


def group_count(k: int, group_size: int, taps: int = 1) -> int:
    """Groups along K input features; the last one, of each of a convolution's
    taps, may be short.
    """
    return 1 if group_size == -1 else taps * -(-k // taps // group_size)


def padded_rows(n: int) -> int:
    """N rounded up to whole row panels of 64."""
    return -(-n // ROWS_PER_PANEL) * ROWS_PER_PANEL


def padded_k(k: int, taps: int = 1) -> int:
    """K, or each of a convolution's taps, rounded up to whole tiles of 128 columns."""
    return taps * -(-k // taps // K_PER_TILE) * K_PER_TILE


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of the packed codes of a weight ``[N, K]``, or of a convolution's ``[N, C, *kernel]``,
    each tap of it padded.
    """
    n, channels, *kernel = shape
    taps = math.prod(kernel)
    return padded_rows(n) * padded_k(taps * channels, taps) * bits // 8


def padded_groups(k: int, group_size: int, taps: int = 1) -> int:
    """Groups in a packed group vector: the groups of the padded K where several fit in a tile."""
    if group_size in SHORT_GROUPS:
        return padded_k(k, taps) // group_size
    return group_count(k, group_size, taps)


def activation_block(group_size: int) -> int:
    """The activation block that ``act_quant="block"`` uses with weights in groups of
    ``group_size``.
    """
    return MAX_ACTIVATION_BLOCK if group_size == -1 else min(group_size, MAX_ACTIVATION_BLOCK)
