"""Codes with a scale for each group along K, with zero points or a code book: what AWQ, GPTQ and
compressed-tensors share.

Their groups need not be the kernels'. The group of each input feature is written out once, ``[K]``.
Columns keep their order where a supported group size cuts K into runs of one group (with the
groups' scales repeated or reordered), else with the columns sorted by group and the order kept in
``perm`` (GPTQ's act order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError, QuantizedWeight
from .checkpoint import FLOAT_TYPES, Entry, Quantized, dequantize, read_weight
from .directory import Source
from .words import permute_columns


@dataclass(frozen=True)
class Stored:
    """A weight as its file has it.

    Attributes:
        codes: uint8 ``[N, K]``, each below ``2**bits``, columns in the order of the input features.
        scales: floats ``[N, G]``.
        zeros: uint8 ``[N, G]``, or None for ``2**(bits-1)`` everywhere.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def group_size(k: int, groups: int, stated: Iterable[int | None]) -> int | None:
    """Inputs in a group, when ``k`` of them have ``groups`` groups.

    Args:
        k: inputs.
        groups: those that the tensors have.
        stated: sizes that the metadata gives, -1 for all of K, None where it gives none.

    Returns:
        The first stated size that makes so many groups, at most k. If none is stated,
        ``k / groups``, if that is an integer. Else None.
    """
    sizes = [k if size == -1 else size for size in stated if size is not None]
    for size in sizes:
        if size > 0 and -(-k // size) == groups:
            return min(size, k)
    return k // groups if not sizes and groups > 0 and k % groups == 0 else None


def uniform(k: int, size: int) -> Tensor:
    """Int64 ``[k]``: the group of each input when every group but the last has ``size``."""
    return torch.arange(k, device="cpu") // size


def group_index(source: Source, name: str, k: int, groups: int) -> Tensor:
    """Int64 ``[k]``: the group of each input, as a tensor of the file has it.

    Raises:
        CheckpointError: another shape or dtype than int32 ``[k]``, or a group that does not exist.
    """
    index = checked(source, name, (torch.int32, torch.int64), (k,)).values().long()
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise CheckpointError(
            source.path,
            f"holds groups {int(index.min())} to {int(index.max())}; there are {groups} of them",
            name,
        )
    return index


def checked(
    source: Source, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None
) -> Entry:
    """A tensor of the file.

    Raises:
        CheckpointError: it is missing, or has another dtype or shape.
    """
    entry = source.tensors.get(name)
    if entry is None:
        raise CheckpointError(source.path, "is missing", name)
    if entry.dtype not in dtypes or (shape is not None and entry.shape != shape):
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            source.path,
            f"is {entry.kind} {list(entry.shape)}; "
            f"{accepted}{'' if shape is None else f' {list(shape)}'} is expected",
            name,
        )
    return entry


def entry(
    source: Source,
    module: str,
    kind: str,
    shape: tuple[int, int],
    bits: int,
    size: int,
    parts: Iterable[str],
    *,
    scales: torch.dtype,
    has_zeros: bool,
    read: Callable[[], Stored],
    index: Callable[[], Tensor] | None = None,
    book: tuple[float, ...] | None = None,
) -> Entry:
    """The entry of a weight of codes.

    Args:
        source: the checkpoint.
        module: the weight's name; the first of ``parts`` is its source.
        kind: the dialect's own name of it.
        shape: ``(N, K)``.
        bits: 1 to 8; codes of 1, 3, 5, 6 and 7 become such of 2, 4 and 8, around another midpoint.
        size: inputs in a group.
        parts: names of the tensors it is made of.
        scales: dtype of the scales.
        has_zeros: whether ``read`` returns zero points.
        read: reads the tensors; raises CheckpointError.
        index: reads the group of each input, int64 ``[K]``; None where every group is a run of
            ``size``.
        book: the values of the codes; None of integers.
    """
    parts = tuple(parts)
    size = min(size, shape[1])
    known = partial(uniform, shape[1], size) if index is None else index
    found = Entry(
        name=module,
        source=parts[0],
        kind=kind,
        shape=shape,
        nbytes=sum(source.tensors[part].nbytes for part in parts),
        dtype=torch.float32,
        values=partial(_values, bits, known, read, book),
        parts=parts,
    )
    order = express(known(), size)
    if order is None:
        what = (
            f"has groups of {size}"
            if index is None
            else f"has groups of inputs that are not multiples of {formats.SHORT_GROUPS[0]}"
        )
        return replace(found, problem=f"{what}; supported are {formats.GROUP_SIZES}")
    dtypes = {"scales": scales}
    if has_zeros:
        dtypes["zeros"] = torch.uint8
    if order.perm is not None:
        dtypes["perm"] = torch.int64
    if book is not None:
        dtypes["book"] = torch.float32
    return replace(
        found,
        quantized=Quantized(
            bits=formats.width_of(bits),
            group_size=order.group_size,
            dtypes=dtypes,
            read=partial(_weight, source, parts[0], bits, size, known, read, book),
        ),
    )


@dataclass(frozen=True)
class Order:
    """How groups of one size are made of inputs in any groups.

    Attributes:
        group_size: as in QuantizedWeight.
        groups: int64: the file's group at each group of the weight.
        perm: int64 ``[K]``, or None: the input feature at each column.
    """

    group_size: int
    groups: Tensor
    perm: Tensor | None


def express(index: Tensor, size: int) -> Order | None:
    """The order in which every group of the weight has inputs of one group of the file, or None if
    no supported size allows it.

    Args:
        index: int64 ``[K]``: the group of each input.
        size: the preferred size.
    """
    if order := _in_runs(index, size):
        return order
    # Stable, so that inputs of one group keep their order.
    by_group, perm = torch.sort(index, stable=True)
    order = _in_runs(by_group, size)
    return None if order is None else replace(order, perm=perm)


def _in_runs(index: Tensor, size: int) -> Order | None:
    k = len(index)
    for candidate in (size, -1, formats.K_PER_TILE, *reversed(formats.SHORT_GROUPS)):
        try:
            run = k if formats.check_group_size(candidate) == -1 else candidate
        except ValueError:
            continue
        first = index[::run]
        if torch.equal(first.repeat_interleave(run)[:k], index):
            return Order(candidate, first, None)
    return None


def _weight(
    source: Source,
    name: str,
    bits: int,
    size: int,
    index: Callable[[], Tensor],
    read: Callable[[], Stored],
    book: tuple[float, ...] | None,
) -> QuantizedWeight:
    stored = read()
    order = express(index(), size)
    if order is None:
        raise CheckpointError(source.path, "the file changed while it was read", name)
    scales, zeros, codes = stored.scales, stored.zeros, stored.codes
    if not torch.equal(order.groups, torch.arange(scales.shape[1], device=scales.device)):
        scales = scales[:, order.groups]
        zeros = None if zeros is None else zeros[:, order.groups]
    if order.perm is not None:
        codes = permute_columns(codes, order.perm)
    if shift := formats.midpoint(formats.width_of(bits)) - formats.midpoint(bits):
        codes = codes + shift
        zeros = None if zeros is None else zeros + shift
    return read_weight(
        source.path,
        name,
        lambda: QuantizedWeight(
            codes,
            scales.contiguous(),
            zeros=None if zeros is None else zeros.contiguous(),
            bits=formats.width_of(bits),
            group_size=order.group_size,
            perm=order.perm,
            book=None
            if book is None
            else torch.tensor(book, dtype=torch.float32, device=codes.device),
        ),
    )


def _values(
    bits: int,
    index: Callable[[], Tensor],
    read: Callable[[], Stored],
    book: tuple[float, ...] | None,
) -> Tensor:
    stored = read()
    if book is not None:
        return torch.tensor(book, dtype=torch.float32, device="cpu")[stored.codes.int()].mul_(
            stored.scales.float()[:, index()]
        )
    return dequantize(
        stored.codes,
        stored.scales,
        formats.midpoint(bits) if stored.zeros is None else stored.zeros,
        index(),
    )


def float_scales(source: Source, name: str, shape: tuple[int, ...] | None = None) -> Entry:
    """The scales of a module, checked to be floats."""
    return checked(source, name, FLOAT_TYPES, shape)


def powers_of_two(exponents: Tensor) -> Tensor:
    """bf16 ``2^(e - 127)`` of each uint8 e: OCP's Microscaling scales; NaN of 255."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16)


def setting(
    source: Source, settings: Mapping[str, object], names: tuple[str, ...], default: int | None
) -> int | None:
    """An integer of the quantisation's settings, under the first of ``names`` that is there.

    Raises:
        CheckpointError: something else than an integer or null.
    """
    for name in names:
        if (value := settings.get(name)) is not None:
            if type(value) is not int:
                raise CheckpointError(
                    source.path, f"{name} is {value!r:.100}; an integer is expected"
                )
            return value
    return default
