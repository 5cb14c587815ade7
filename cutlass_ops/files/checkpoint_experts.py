"""The experts of a model's layers among the tensors of a checkpoint, which has a matrix for each
expert or a stack of all.

For each of a layer's two products the checkpoint gives the matrices of every expert: those of gate
and up, whose rows are joined, or the one of down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from .. import reference
from ..checkpoints import Entry, Quantized
from ..nn.architecture import Architecture, ExpertTensor
from ..nn.model_experts import GATE_UP, PRODUCTS, ExpertsForm
from ..ops.expert_packing import WeightsOnDemand, reorder_experts
from ..weights.packed_experts import PackedExperts
from ..weights.reorder import one_weight
from ..weights.weight import FLOAT_TYPES, CheckpointError, QuantizedWeight, rows_of
from .tensor_parallel import slice_weight

_Made = TypeVar("_Made")
#: A matrix ``[N, K]`` and its bias ``[N]``, if it has one.
Matrix: TypeAlias = "tuple[Entry, Entry | None]"


@dataclass(frozen=True)
class ExpertsLayer:
    """The experts of one layer.

    Attributes:
        name: of the model's module.
        form: what the module computes.
        members: the entries that their weights are made of, by product.
        biases: the entry of the biases of all experts, by product, where they have biases.
        matrices: by product, for each expert, entries ``[N, K]`` and those of their biases: gate's
            and up's, or down's. Empty where there is a problem.
        problem: why they cannot be packed, or "".
    """

    name: str
    form: ExpertsForm
    members: Mapping[str, Sequence[Entry]]
    biases: Mapping[str, Entry]
    matrices: Mapping[str, Sequence[Sequence[Matrix]]]
    problem: str = ""

    @property
    def entries(self) -> list[Entry]:
        """All that the checkpoint has of the layer."""
        return [
            *(entry for product in self.members.values() for entry in product),
            *self.biases.values(),
        ]


@dataclass(frozen=True)
class StackedWeight:
    """The weights of one product of a layer's experts, described without reading them, as Quantized
    describes one matrix.

    Attributes:
        name: of the product, "model.layers.0.mlp.experts.down_proj".
        path: the checkpoint.
        shape: ``[E, N, K]``.
        matrices: for each expert those whose rows are joined; all of one format.
    """

    name: str
    path: Path
    shape: tuple[int, int, int]
    matrices: Sequence[Sequence[Quantized]]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.matrices[0][0].bits

    @property
    def group_size(self) -> int:
        """As in :class:`cutlass_ops.QuantizedWeight`."""
        return self.matrices[0][0].group_size

    @property
    def gated(self) -> bool:
        """Whether the rows are those of gate and up."""
        return self.name.rpartition(".")[2] == GATE_UP

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """As in :class:`Quantized`."""
        return self.matrices[0][0].dtypes

    def read(self, style: str = "replicate", rank: int = 0, size: int = 1) -> WeightsOnDemand:
        """The weights ``[N, K]`` of the experts, or the parts that ``rank`` of ``size`` holds; each
        is read when it is used.

        Raises:
            CheckpointError: when one is read whose matrices cannot be joined, or by their ``read``.
        """

        def expert(e: int) -> QuantizedWeight:
            parts = [slice_weight(matrix.read(), style, rank, size) for matrix in self.matrices[e]]
            return (
                parts[0]
                if len(parts) == 1
                else self._checked(lambda: one_weight(parts), f"expert {e}: ")
            )

        return WeightsOnDemand(self.shape[0], expert)

    def pack(self, style: str = "replicate", rank: int = 0, size: int = 1) -> PackedExperts:
        """The same, packed.

        Raises:
            CheckpointError: as in :meth:`read`, or experts that differ in a field that they must
                share.
        """
        return self._checked(lambda: reorder_experts(self.read(style, rank, size), self.gated))

    def _checked(self, make: Callable[[], _Made], where: str = "") -> _Made:
        try:
            return make()
        except CheckpointError:
            raise
        except ValueError as error:
            hint = "to store their values as floats, leave them out (--exclude)"
            raise CheckpointError(self.path, f"{where}{error}; {hint}", self.name) from error


def layers_of(entries: Iterable[Entry], architecture: Architecture) -> list[ExpertsLayer]:
    """The layers of experts that the model has in :attr:`Architecture.experts`, as far as the
    entries are parts of them.
    """
    found: dict[str, dict[str, list[tuple[ExpertTensor, Entry]]]] = {}
    if architecture.experts:
        for entry in entries:
            # A quantised weight has the name of a module.
            places = (
                architecture.expert_tensor(name) for name in (entry.name, f"{entry.name}.weight")
            )
            if (place := next(filter(None, places), None)) is not None:
                found.setdefault(place.module, {}).setdefault(place.parameter, []).append(
                    (place, entry)
                )
    return [
        _layer(name, architecture.experts[name], parameters) for name, parameters in found.items()
    ]


def _layer(
    name: str, form: ExpertsForm, parameters: Mapping[str, Sequence[tuple[ExpertTensor, Entry]]]
) -> ExpertsLayer:
    found = {product: parameters.get(product, ()) for product in PRODUCTS}
    members = {product: [entry for _, entry in found[product]] for product in PRODUCTS}
    biases = {
        product: entry for product in PRODUCTS for _, entry in parameters.get(f"{product}_bias", ())
    }
    try:
        matrices = {
            product: _with_biases(
                form, product, _matrices(form, product, found[product]), biases.get(product)
            )
            for product in PRODUCTS
        }
    except ValueError as error:
        return ExpertsLayer(name, form, members, biases, {}, str(error))
    return ExpertsLayer(name, form, members, biases, matrices)


def _matrices(
    form: ExpertsForm, product: str, found: Sequence[tuple[ExpertTensor, Entry]]
) -> list[list[Entry]]:
    """The matrices of each expert; ValueError if they are not all there, each once, or
    not of one format.
    """
    experts, n, k = form.shape(product)
    rows = form.rows(product)
    numbers, parts = range(experts), range(len(rows))
    entries = {(place.expert, place.part): entry for place, entry in found}
    shapes: dict[frozenset[tuple[int | None, int | None]], tuple[int, ...]] = {
        frozenset({(None, None)}): form.parameter_shape(product),
        frozenset((e, None) for e in numbers): (n, k),
        frozenset((e, part) for e in numbers for part in parts): (n // len(rows), k),
    }
    shape = shapes.get(frozenset(entries))
    if shape is None or len(entries) < len(found):
        raise ValueError(
            f"{len(found)} tensors of {product} are there, which are not those of {experts} experts"
        )
    for entry in entries.values():
        if entry.problem:
            raise ValueError(f"{entry.name} {entry.problem}")
        if entry.shape != shape:
            raise ValueError(f"{entry.name} is {list(entry.shape)}; {list(shape)} is expected")
    if (stack := entries.get((None, None))) is not None:
        matrices = [[_of_stack(stack, form, e, part) for part in rows] for e in numbers]
    elif (0, None) in entries:
        matrices = [[_rows_of(entries[e, None], part) for part in rows] for e in numbers]
    else:
        matrices = [[entries[e, part] for part in parts] for e in numbers]
    formats = set()
    for entry in (entry for joined in matrices for entry in joined):
        weight = entry.quantized
        formats.add(
            (entry.dtype,)
            if weight is None
            else (weight.bits, weight.group_size, *sorted(weight.dtypes.items()))
        )
    if len(formats) > 1:
        raise ValueError(f"the formats of {product} differ between experts")
    return matrices


def _with_biases(
    form: ExpertsForm, product: str, matrices: Sequence[Sequence[Entry]], biases: Entry | None
) -> list[list[Matrix]]:
    """The matrices of each expert with their biases; ValueError if these are not what
    the experts have.
    """
    expected = list(form.shape(product)[:2])
    if form.biased and (
        biases is None or list(biases.shape) != expected or biases.dtype not in FLOAT_TYPES
    ):
        found = "missing" if biases is None else f"{biases.kind} {list(biases.shape)}"
        raise ValueError(f"{product}_bias is {found}; floats {expected} are expected")
    if any(
        entry.quantized is not None and "bias" in entry.quantized.dtypes
        for parts in matrices
        for entry in parts
    ):
        raise ValueError(f"matrices of {product} have biases, which those of the model have not")

    def bias(e: int, rows: slice) -> Entry | None:
        return None if biases is None else replace(biases, values=lambda: biases.values()[e][rows])

    rows = form.rows(product)
    return [
        [(entry, bias(e, part)) for entry, part in zip(parts, rows, strict=True)]
        for e, parts in enumerate(matrices)
    ]


def _of_stack(stack: Entry, form: ExpertsForm, e: int, rows: slice) -> Entry:
    """Rows of one expert of a stack."""
    if not stack.experts:
        return _rows_of(replace(stack, values=lambda: form.matrix(stack.values()[e])), rows)
    weight = stack.experts[e]
    values = partial(_values, weight)
    return _rows_of(replace(stack, values=values, quantized=weight), rows)


def _values(weight: Quantized) -> Tensor:
    return reference.dequantize_weight(weight.read(), torch.float32)


def _rows_of(entry: Entry, rows: slice) -> Entry:
    """Some rows of a matrix."""
    weight = entry.quantized
    part = None if weight is None else replace(weight, read=lambda: rows_of(weight.read(), rows))
    return replace(entry, values=lambda: entry.values()[rows], quantized=part)
