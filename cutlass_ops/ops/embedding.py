"""Rows of a packed weight, looked up: the operator behind packed word embeddings."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled

from .. import reference
from ..reference.blocks import in_blocks
from ..weights import formats
from ..weights.packed_weight import PackedWeight, gather_codes, positions_of_rows
from . import library
from .arguments import check_device, check_frozen, check_transforms, dtype_names, runs_directly
from .native import DATA_TYPES

_ID_TYPES = (torch.int64, torch.int32)


def embedding(ids: Tensor, weight: PackedWeight, dtype: torch.dtype = torch.float16) -> Tensor:
    """Rows of a packed weight: ``dequantize(weight, dtype)[ids]``, bit for bit, of which only these
    rows are computed.

    It allocates a few times the size of the result, whatever the weight's size. It never
    synchronises and can be captured in a CUDA graph. The result has no gradient: packed weights are
    frozen. A bias of the weight is not added.

    Args:
        ids: int64 or int32 of any shape, on the weight's device.
        weight: a matrix ``[N, K]``.
        dtype: fp16, bf16 or fp32. The arithmetic is fp32, rounded once.

    Returns:
        ``[*ids.shape, K]`` of ``dtype``.

    Raises:
        IndexError: an id outside of 0 .. N-1, on a CPU. On a GPU it fails an assertion of torch's
            kernels, as in ``torch.nn.functional.embedding``.
        TypeError: ids, weight or dtype is of another type.
        ValueError: ids on another device, or a convolution's or a gated weight.
        RuntimeError: a tensor of the weight requires a gradient.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids is a {type(ids).__name__}; a torch.Tensor is expected")
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"weight is a {type(weight).__name__}; a PackedWeight (see "
            "cutlass_ops.reorder) is expected"
        )
    if ids.dtype not in _ID_TYPES:
        raise TypeError(
            f"ids has dtype {dtype_names((ids.dtype,))}; supported are {dtype_names(_ID_TYPES)}"
        )
    if dtype not in DATA_TYPES:
        raise TypeError(f"dtype is {dtype!r}; supported are {dtype_names(DATA_TYPES)}")
    if weight.kernel_size:
        raise ValueError(reference.CONVOLUTION.format(weight.kernel_size))
    weight.check_plain("embedding")
    if ids.device != weight.device:
        raise ValueError(f"ids is on {ids.device}; the weight is on {weight.device}")
    check_device(weight.device)
    check_transforms("embedding", ids, *weight.tensors().values())
    if is_grad_enabled():
        check_frozen(weight)
    if runs_directly(ids, weight.codes):
        return _look_up(ids, weight, dtype)
    return cast(Tensor, torch.ops.cutlass_ops.embedding(ids, *library.weight_fields(weight), dtype))


def _look_up(ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    rows = ids.reshape(-1).long()
    inside = (rows >= 0) & (rows < weight.n)
    if weight.gpu < 0:
        if not bool(inside.all()):
            raise IndexError(
                f"ids holds {int(rows[~inside][0])}; the weight has rows 0 to {weight.n - 1}"
            )
    else:
        # torch's kernels accept negative indices, and the padding has rows: neither may be taken
        # for a row of the weight.
        rows = rows.where(inside, formats.padded_rows(weight.n))
    positions = positions_of_rows(rows)

    codes = in_blocks(
        gather_codes(weight.codes, rows, weight.k, weight.bits)[:, : weight.k], weight.group_size
    )
    groups = codes.shape[1]

    def by_group(vectors: Tensor) -> Tensor:
        return vectors[:groups, positions].t().float()[..., None]

    # Each operation is rounded separately, as in reference.dequantize_weight.
    values = (
        codes.float().sub_(formats.midpoint(weight.bits))
        if weight.book is None
        else weight.book[codes.int()]
    )
    if weight.zeros is not None:
        values.sub_(by_group(weight.zeros))
    values.mul_(by_group(weight.scales))
    if weight.offsets is not None:
        values.add_(by_group(weight.offsets))
    columns = values.flatten(1)[:, : weight.k].to(dtype)
    if weight.perm is not None:
        in_order = torch.empty_like(columns)
        in_order[:, weight.perm.long()] = columns
        columns = in_order
    return columns.reshape(*ids.shape, weight.k)


# ---- torch.library


def _embedding_op(ids: Tensor, *args: Any) -> Tensor:
    return _look_up(ids, PackedWeight(*args[: library.WEIGHT_FIELDS]), args[library.WEIGHT_FIELDS])


def _embedding_fake(ids: Tensor, *args: Any) -> Tensor:
    return ids.new_empty((*ids.shape, args[7]), dtype=args[library.WEIGHT_FIELDS])


library.register(
    f"embedding(Tensor ids, {library.WEIGHT_SCHEMA}, ScalarType dtype) -> Tensor",
    _embedding_op,
    _embedding_fake,
)
