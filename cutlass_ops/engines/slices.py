"""A rank's part of a packed weight, tensor by tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..weights import formats
from ..weights.packed_weight import group_vector_positions, pack_codes, unpack_codes

_PANEL, _TILE = formats.ROWS_PER_PANEL, formats.K_PER_TILE


def cut(
    part: str,
    tensor: Tensor,
    shape: tuple[int, int],
    bits: int,
    group_sizes: tuple[int, int],
    rows: slice,
    columns: slice,
    device: torch.device | str,
) -> Tensor:
    """The tensor ``part`` of the packed weight of some rows and columns of a packed weight.

    Codes are a view of the file's tensor where the rows are whole row panels of 64 and the columns
    whole tiles of 128 (both may end with the weight); other codes are unpacked, cut and packed.

    Args:
        part: "codes", "scales", "zeros" or "offsets"; "perm" and "book" are whole.
        tensor: of the whole weight.
        shape: N and K of the whole weight.
        bits: of a code.
        group_sizes: of the whole weight and of the part (see ``tensor_parallel.sliced_format``).
        rows, columns: of the weight, with bounds and without steps.
        device: where codes that are not whole panels and tiles are unpacked and packed.
    """
    n, k = shape
    if part in ("perm", "book"):
        return tensor
    if part != "codes":
        return _cut_vector(tensor, n, group_sizes, rows, columns)
    whole_rows = rows.start % _PANEL == 0 and (rows.stop % _PANEL == 0 or rows.stop == n)
    whole_columns = columns.start % _TILE == 0 and (columns.stop % _TILE == 0 or columns.stop == k)
    if not (whole_rows and whole_columns):
        codes = unpack_codes(tensor.to(device), n, k, bits)[rows, columns]
        return pack_codes(codes, bits)
    panels = tensor.view(formats.padded_rows(n) // _PANEL, formats.padded_k(k) // _TILE, -1)
    first, last = columns.start // _TILE, -(-columns.stop // _TILE)
    return panels[rows.start // _PANEL : -(-rows.stop // _PANEL), first:last].flatten()


def _cut_vector(
    vectors: Tensor,
    n: int,
    group_sizes: tuple[int, int],
    rows: slice,
    columns: slice,
) -> Tensor:
    whole, own = group_sizes
    count = columns.stop - columns.start
    first = torch.arange(
        columns.start, columns.stop, count if own == -1 else own, device=vectors.device
    )
    groups = torch.zeros_like(first) if whole == -1 else first // whole
    size = rows.stop - rows.start
    out = vectors.new_zeros(formats.padded_groups(count, own), formats.padded_rows(size))
    source = group_vector_positions(n, vectors.device)[rows]
    out[: len(groups), group_vector_positions(size, vectors.device)] = vectors[groups][:, source]
    return out
