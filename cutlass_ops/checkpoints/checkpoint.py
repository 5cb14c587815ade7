"""What every reader of a checkpoint returns: a list of tensors, each read at its first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..weights.weight import CheckpointError, QuantizedWeight, not_finite

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Quantized:
    """A tensor whose codes the file holds, described without reading them.

    Attributes:
        bits, group_size: as in :class:`cutlass_ops.QuantizedWeight`.
        dtypes: of "scales", and of those of "zeros", "offsets", "bias" and "perm" that the weight
            has.
        read: returns the weight; raises CheckpointError.
    """

    bits: int
    group_size: int
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[], QuantizedWeight]

    def with_bias(self, bias: Entry) -> Quantized:
        """The entry with a bias that the file has in another tensor."""
        read = self.read
        return replace(
            self,
            dtypes={**self.dtypes, "bias": bias.dtype},
            read=lambda: replace(read(), bias=bias.values()),
        )


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint.

    A bias that belongs to a quantised weight is part of it and has no entry.

    Attributes:
        name: of the weight as a module ("model.layers.0.mlp.down_proj") if it is quantised, else of
            the tensor ("model.norm.weight").
        source: its name in the file.
        kind: the file's own name of its type: "Q4_1", "BF16".
        shape: as torch has it: ``[N, K]`` for a matrix.
        nbytes: what it takes in the file.
        dtype: of what ``values`` returns.
        values: returns the values that the file gives to the tensor, in its own dtype or, if it is
            quantised, in fp32; raises CheckpointError.
        quantized: None if the file holds plain numbers.
        problem: why this quantised tensor cannot become a QuantizedWeight, or "".
        has_values: whether ``values`` works; False only where there is a ``problem``.
        rounded: how ``values`` were rounded, where they are of codes and stored in another dtype,
            or "".
        experts: each expert's weight ``[N, K]``, where a tensor of codes stacks those of a layer.
        decoded: why ``values`` are of codes, and the tensor is a plain one all the same, or "".
        tied_to: the other module that uses the same weight, or "".
        parts: names in the file of the tensors that a quantised weight is made of, where it is more
            than one.
    """

    name: str
    source: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    dtype: torch.dtype
    values: Callable[[], Tensor]
    quantized: Quantized | None = None
    problem: str = ""
    has_values: bool = True
    rounded: str = ""
    experts: tuple[Quantized, ...] = ()
    decoded: str = ""
    tied_to: str = ""
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, QuantizedWeight]):
    """A checked file. As a mapping, its quantised weights by module name, read (and checked) at
    each access.

    The tensors that are no quantised weights (norms, embeddings, float matrices) come from
    :meth:`plain`.

    Attributes:
        path: as it was given.
        dialect: the reader's name: "gguf", "awq", ...; "safetensors" if nothing is quantised.
        files: those that hold the tensors.
        entries: every tensor, by :attr:`Entry.name`, in the order of the file.
        metadata: short facts from the header, for people.
        config: what the model's ``config.json`` holds, or would hold by the keys of a GGUF file; {}
            where there is none.
        config_problem: why a file whose keys should give the configuration does not give it, or "".
        options: those of :func:`load_checkpoint` that it was read with.
        warnings: what of the file is not used, one line each.
        activations: the ``act_quant`` and ``act_symmetric`` for which the checkpoint says that it
            was made, or None.
    """

    path: Path
    dialect: str
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    config_problem: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    activations: tuple[str, bool] | None = None

    def __getitem__(self, name: str) -> QuantizedWeight:
        """The weight of module ``name``.

        Raises:
            KeyError: the file has no such quantised weight.
            CheckpointError: it has, but of a type that is not supported, or its tensors make no
                weight.
        """
        entry = self.entries[name]
        if entry.problem:
            raise CheckpointError(self.path, entry.problem, entry.source)
        if entry.quantized is None:
            raise KeyError(name)
        return entry.quantized.read()

    def __iter__(self) -> Iterator[str]:
        return (name for name, entry in self.entries.items() if entry.quantized is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def others(self) -> dict[str, Entry]:
        """The tensors that are not quantised, by name; ``values()`` reads one."""
        return {
            name: entry
            for name, entry in self.entries.items()
            if entry.quantized is None and not entry.problem
        }

    def plain(self) -> Iterator[tuple[str, Tensor]]:
        """Name and values of :attr:`others`, read one by one."""
        for name, entry in self.others.items():
            yield name, entry.values()


def read_weight(path: Path, source: str, build: Callable[[], QuantizedWeight]) -> QuantizedWeight:
    """What ``build`` returns.

    Raises:
        CheckpointError: the tensors of the file make no weight, or scales, offsets, codes or a code
            book hold NaN or infinity.
    """
    try:
        weight = build()
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(path, str(error), source) from error
    if problem := not_finite(weight):
        raise CheckpointError(path, problem, source)
    return weight


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor | int, group: Tensor) -> Tensor:
    """``scales * (codes - zeros)`` in fp32, product rounded once.

    Args:
        codes: integers ``[N, K]``.
        scales: ``[N, G]``.
        zeros: integers ``[N, G]``, or one for all.
        group: int64 ``[K]``: the group of each column.

    Returns:
        fp32 ``[N, K]``.
    """
    values = codes.float()
    if isinstance(zeros, Tensor):
        values -= zeros.float()[:, group]
    else:
        values -= zeros
    return values.mul_(scales.float()[:, group])
