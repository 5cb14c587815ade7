"""The order of gated weights: eight rows of gate, then the eight of up for the same outputs, and so
on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats


def gated_order(n: int, device: torch.device) -> Tensor:
    """The rows, gate's before up's, in the order in which they are packed: int64 ``[n]``; fewer
    than eight come last.
    """
    rows = torch.arange(n, device=device)
    features = rows % (n // 2)
    return (features // 8 * 16 + rows // (n // 2) * 8 + features % 8).argsort()


def in_eights(values: Tensor) -> Tensor:
    """Values of the rows of gate and then of up, ``[rows]``, in the order of a gated weight."""
    return values.view(2, -1, formats.GATED_ROWS).transpose(0, 1).reshape(-1)


def gate_first(values: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`in_eights` along a dimension that is not negative."""
    before, rows, after = values.shape[:dim], values.shape[dim], values.shape[dim + 1 :]
    eights = values.reshape(
        *before, rows // (2 * formats.GATED_ROWS), 2, formats.GATED_ROWS, *after
    )
    return eights.transpose(dim, dim + 1).reshape(*before, rows, *after)


def join_codes(gate: Tensor, up: Tensor, n: int, bits: int) -> Tensor:
    """The packed codes of a gated weight, made of the packed codes of gate and up, which have n
    rows each.

    A block of 16 rows of ``layout.h`` has two eights: at 2 and 4 bits in the low and in the high
    nibbles, at 8 bits in alternating runs of four bytes. Two blocks of gate and two of up make four
    blocks of the result.
    """
    panels = formats.padded_rows(n) // formats.ROWS_PER_PANEL
    size = formats.ROWS_PER_PANEL * formats.K_PER_TILE * bits // 8 // 4  # bytes of a block
    # [panels, halves of a panel, K tiles, blocks, ...]: a half of each is a panel of the result.
    a, b = (codes.view(panels, -1, 2, 2, size).transpose(1, 2) for codes in (gate, up))
    joined = gate.new_empty(*a.shape[:4], 2, size)
    if bits < 8:
        torch.bitwise_or(a & 15, b << 4, out=joined[..., 0, :])
        torch.bitwise_or(a >> 4, b & 240, out=joined[..., 1, :])
    else:
        bytes_of_eights = joined.view(*a.shape[:4], 2, -1, 2, 4)
        for of_result, codes in enumerate((a, b)):
            eights = codes.view(*codes.shape[:-1], -1, 2, 4).transpose(-3, -2)
            bytes_of_eights[..., of_result, :].copy_(eights)
    panels_of_both = formats.padded_rows(2 * n) // formats.ROWS_PER_PANEL
    return joined.view(2 * panels, -1)[:panels_of_both].flatten()


def join_vectors(gate: Tensor, up: Tensor, n: int) -> Tensor:
    """The same of group vectors, ``[groups, n_pad]``, whose rows lie as
    :func:`cutlass_ops.weights.packed_weight.positions_of_rows` has it.
    """
    groups = len(gate)
    # [groups, panels, g, two panels, their blocks, gate and up]
    eights = torch.stack((gate, up), -1).view(groups, -1, 8, 2, 4, 2)
    return eights.transpose(2, 3).reshape(groups, -1)[:, : formats.padded_rows(2 * n)].contiguous()
