"""The layers that an engine fuses, and a rank's part of each, of a packed directory's tensors.

A parameter holds the tensors of the layers that were fused one after another, each padded to row
panels of 64. A rank's rows and columns are cut from the packed order. Where the parts end inside
row panels, the fused layer is unpacked and packed once more after loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..weights import formats
from ..weights.packed_weight import PackedWeight
from ..weights.specs import packed_specs
from ..weights.weight import PARTS
from .layers import Engine
from .slices import cut


@dataclass(frozen=True)
class LayerPart:
    """A rank's part of a layer, which an engine may have fused of several.

    Attributes:
        sizes: rows of each of the fused layers on this rank.
        places: which part of each layer's rows that is, and of how many.
        k: input features of the whole weight.
        columns: those that this rank has.
    """

    sizes: list[int]
    places: list[tuple[int, int]]
    k: int
    columns: slice

    def rows(self, index: int) -> tuple[slice, int]:
        """Rows of the stored layer ``index`` that this rank has, and how many it has in all."""
        size, (part, parts) = self.sizes[index], self.places[index]
        return slice(part * size, (part + 1) * size), parts * size


def part_of(
    engine: Engine, layer: torch.nn.Module, k: int, sizes: list[int], whole_k: int, whole_n: int
) -> LayerPart:
    """This rank's part of an engine's layer.

    Args:
        engine, layer: the engine's.
        k, sizes: input features, and output features of each of the fused layers, on this rank.
        whole_k, whole_n: of the layer.
    """
    rank, ranks = engine.rank(layer), whole_n // sum(sizes)
    start = rank * k if whole_k > k else 0
    first = (rank, ranks) if ranks > 1 else (0, 1)
    others = engine.kv_place(layer, *first) if ranks > 1 else first
    return LayerPart(
        list(sizes), [first, *(others for _ in sizes[1:])], whole_k, slice(start, start + k)
    )


@dataclass
class Shards:
    """The layers that an engine has fused into one, with one rank's part of each.

    Attributes:
        part: what that is.
        bits: of a code.
        group_sizes: of the whole weight and of the rank's columns.
        vocabulary: rows of an output head or a word embedding in the files; engines pad them so
            that each rank has the same number. None for other layers.
        loaded: which parts of which shards came from the files.
    """

    part: LayerPart
    bits: int
    group_sizes: tuple[int, int]
    vocabulary: int | None = None
    loaded: set[tuple[str, int]] = field(default_factory=set)

    def padded(self, index: int) -> slice:
        """The rows of shard ``index`` among those of all shards, each padded to row panels."""
        start = sum(map(formats.padded_rows, self.part.sizes[:index]))
        return slice(start, start + formats.padded_rows(self.part.sizes[index]))

    def rows(self, index: int) -> tuple[slice, int]:
        """Rows of the stored layer ``index`` that this rank has, and how many it has in all."""
        own, stored = self.part.rows(index)
        if self.vocabulary is not None:
            stored = self.vocabulary
        return slice(min(own.start, stored), min(own.stop, stored)), stored

    def load(
        self, part: str, parameter: Parameter, tensor: Tensor, shard: str | int | None = None
    ) -> None:
        """Copy this rank's part of a stored tensor; the weight loader of a parameter.

        Raises:
            ValueError: a tensor of another size or dtype, or shards that are not supported.
        """
        if isinstance(shard, tuple):
            raise ValueError(f"{part}: several of the fused layers in one tensor ({shard})")
        if shard is None and len(self.part.sizes) > 1:  # they are fused in the files already
            stored = [self.rows(index)[1] for index in range(len(self.part.sizes))]
            offsets = [sum(stored[:index]) for index in range(len(stored))]
            for index, offset in enumerate(offsets):
                own, _ = self.rows(index)
                rows = slice(offset + own.start, offset + own.stop)
                self._copy(part, parameter, tensor, index, rows, sum(stored))
            return
        index = "qkv".index(shard) if isinstance(shard, str) else shard or 0
        self._copy(part, parameter, tensor, index, *self.rows(index))

    def _copy(
        self, part: str, parameter: Parameter, tensor: Tensor, index: int, rows: slice, n: int
    ) -> None:
        whole = {part: parameter.dtype}
        _, expected = packed_specs(n, self.part.k, self.bits, self.group_sizes[0], whole)[part]
        if tensor.dtype != parameter.dtype or tuple(tensor.shape) != expected:
            found, wanted = (tensor.dtype, tuple(tensor.shape)), (parameter.dtype, expected)
            raise ValueError(
                f"{part} is {found[0]} {found[1]}; {wanted[0]} {wanted[1]} is expected of "
                f"{n} x {self.part.k}"
            )
        if rows.start < rows.stop:
            shape = (n, self.part.k)
            options = (self.bits, self.group_sizes, rows, self.part.columns, parameter.device)
            self._put(part, parameter, cut(part, tensor, shape, *options), index)
        self.loaded.add((part, index))

    def _put(self, part: str, parameter: Parameter, values: Tensor, index: int) -> None:
        if part in ("perm", "book"):
            if self.loaded & {(part, other) for other in range(len(self.part.sizes))} and not (
                torch.equal(parameter.data, values.to(parameter.device))
            ):
                raise ValueError(f"{part}: layers that are fused have different ones")
            parameter.data.copy_(values)
            return
        padded = self.padded(index)
        if part == "codes":
            row_bytes = parameter.numel() // self.padded(len(self.part.sizes) - 1).stop
            start = padded.start * row_bytes
            parameter.data[start : start + values.numel()].copy_(values)
        else:
            stop = padded.start + values.shape[1]
            parameter.data[:, padded.start : stop].copy_(values)

    def weights(self, parts: dict[str, Tensor]) -> Iterator[PackedWeight]:
        """The packed weight of all, or those of each, if some end inside a row panel."""
        columns = self.part.columns.stop - self.part.columns.start
        form = {"k": columns, "bits": self.bits, "group_size": self.group_sizes[1]}
        stored: dict[str, Any] = {part: parts.get(part) for part in PARTS}
        if not any(size % formats.ROWS_PER_PANEL for size in self.part.sizes[:-1]):
            yield PackedWeight(**stored, n=sum(self.part.sizes), **form)
            return
        rows = self.padded(len(self.part.sizes) - 1).stop
        whole = PackedWeight(**stored, n=rows, **form)
        for index, size in enumerate(self.part.sizes):
            start = self.padded(index).start
            one = whole.row_panels(start, self.padded(index).stop)
            yield PackedWeight(**{p: getattr(one, p) for p in PARTS}, n=size, **form)
