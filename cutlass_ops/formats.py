"""What a stored code means, and the sizes the packed layout is made of.

A code ``q`` is an unsigned integer of ``bits`` bits. With a scale ``s`` it stands for ``s * (q - z)`` (an integer zero
point ``z``), ``s * (q - 2**(bits - 1)) + o`` (a real offset ``o``) or, with neither, ``s * (q - 2**(bits - 1))``.
The sizes below are those of ``csrc/include/cutlass_ops/layout.h``, which holds the index formula itself.
"""

from __future__ import annotations

BITS = (4, 8)

#: Name and version of the packed order; a file that carries another pair is refused.
LAYOUT_NAME = "cutlass_ops.slab64"
LAYOUT_VERSION = 1

ROWS_PER_SLAB = 64
K_PER_TILE = 128
#: The longest run of K that shares one activation scale in block mode.
MAX_ACTIVATION_BLOCK = 128


def check_bits(bits: int) -> int:
    """Return ``bits``, or raise ``ValueError`` if no format has that many."""
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"bits is {bits!r}; supported are {', '.join(map(str, BITS))}")
    return bits


def check_group_size(group_size: int) -> int:
    """Return ``group_size``, or raise ``ValueError``.

    Groups of 32 and 64 divide a tile's 128 columns and longer ones are made of whole tiles, so that no step of a
    kernel ever straddles two groups. -1 is one group for all of K.
    """
    if type(group_size) is int and (group_size in (-1, 32, 64) or (group_size > 0 and group_size % K_PER_TILE == 0)):
        return group_size
    raise ValueError(f"group_size is {group_size!r}; supported are 32, 64, multiples of 128, and -1 (all of K)")


def midpoint(bits: int) -> int:
    """The code that stands for zero in a symmetric format: 8 or 128."""
    return 1 << (bits - 1)


def group_count(k: int, group_size: int) -> int:
    """Groups along K input features; the last one may be short."""
    return 1 if group_size == -1 else -(-k // group_size)


def padded_rows(n: int) -> int:
    """N rounded up to whole slabs of 64 rows."""
    return -(-n // ROWS_PER_SLAB) * ROWS_PER_SLAB


def padded_k(k: int) -> int:
    """K rounded up to whole tiles of 128 columns."""
    return -(-k // K_PER_TILE) * K_PER_TILE


def padded_groups(k: int, group_size: int) -> int:
    """Groups in a packed group vector: those of the padded K where several share a tile."""
    if group_size in (32, 64):
        return padded_k(k) // group_size
    return group_count(k, group_size)


def activation_block(group_size: int) -> int:
    """The activation block that ``act_quant="block"`` uses beside weights in groups of ``group_size``."""
    return MAX_ACTIVATION_BLOCK if group_size == -1 else min(group_size, MAX_ACTIVATION_BLOCK)
