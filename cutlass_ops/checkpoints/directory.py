"""Safetensors of a checkpoint: one file, an index with its shards, or a directory that holds
either, and the JSON beside them.

The tensors have no meaning here yet: the readers of the dialects get a :class:`Source`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError
from .checkpoint import FLOAT_TYPES, Checkpoint, Entry
from .safetensors_files import (
    INDEX,
    SETTINGS,
    TYPES,
    json_object,
    mapped,
    opened,
    placement,
    tensor_names,
)

#: Scales of a quantised KV cache, in the places where other tools keep them.
_KV_CACHE = re.compile(
    r"(^|\.)(self_attn|self_attention|attention|attn|mixer)(\.[a-z]{1,3}_proj|\.attn)?\.(q|k|v|kv|"
    r"prob)_(scale|zero_point)$"
)
#: Ends of the names of codes, by the formats of all readers.
CODES = (".weight", ".qweight", ".weight_packed", ".W_q", "._weight_qdata", "_blocks")
_PACKED = "is a packed model already; cutlass_ops.load_packed reads it"


@dataclass(frozen=True)
class Source:
    """Safetensors whose headers are checked, before a dialect gives the tensors a meaning.

    Attributes:
        path: as it was given.
        files: those that hold the tensors.
        tensors: every tensor as a plain one, by its name, in the order of the files.
        header: ``__metadata__`` of the files.
        config: what ``config.json`` beside them holds, or {}.
        quantization: its "quantization_config" (also looked for in "text_config", and under the
            older name "compression_config"), else what ``quantize_config.json`` or
            ``quant_config.json`` holds, or {}.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, Entry]
    header: Mapping[str, str]
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]

    def modules(self, *parts: str) -> list[str]:
        """The modules that have a tensor ``<module>.<part>`` for any of the parts, each once."""
        split = (name.rpartition(".") for name in self.tensors)
        return list(dict.fromkeys(module for module, _, part in split if module and part in parts))

    def checkpoint(
        self,
        dialect: str,
        weights: Iterable[Entry],
        facts: Mapping[str, str] | None = None,
        parts: Collection[str] = (),
    ) -> Checkpoint:
        """The checkpoint with ``weights`` in place of their parts; the other tensors are plain.

        A float ``<module>.bias`` of the right length becomes part of the quantised weight
        ``<module>``. No other tensor may belong to it: an unknown part may change the values. Codes
        of another format become entries with a problem. Scales of a KV cache, which is kept in
        floats here, are left out.

        Args:
            dialect: its name.
            weights: quantised weights, or what cannot become one, with ``parts``.
            facts: for :attr:`Checkpoint.metadata`.
            parts: ends of names that only parts of quantised weights have.

        Raises:
            CheckpointError: a tensor that belongs to two weights, or two entries of one name; a
                part of a quantised weight that the reader did not take.
        """
        owners: dict[str, Entry] = {}
        for entry in weights:
            entry = self._with_bias(entry)
            for part in entry.parts:
                if part in owners:
                    raise CheckpointError(
                        self.path, f"belongs to {owners[part].name!r} and to {entry.name!r}", part
                    )
                owners[part] = entry
        quantized = {entry.name for entry in owners.values() if entry.quantized is not None}
        entries: dict[str, Entry] = {}
        unused = []
        for name, tensor in self.tensors.items():
            module, _, part = name.rpartition(".")
            if owners and name not in owners and _KV_CACHE.search(name):
                unused.append(name)
                continue
            if (
                owners
                and name not in owners
                and name.endswith(CODES)
                and tensor.dtype not in _PLAIN
                and len(tensor.shape) > 1
            ):
                tensor = _unread(self.path, tensor, dialect)
            if name not in owners and part in parts:
                raise CheckpointError(
                    self.path,
                    f"belongs to no quantised weight; {dialect} has such tensors only there",
                    name,
                )
            if (
                name not in owners
                and part != "weight"
                and module.removesuffix(".weight") in quantized
            ):
                raise CheckpointError(
                    self.path,
                    f"is {tensor.kind} {list(tensor.shape)}, no part of a quantised weight "
                    "that is known",
                    name,
                )
            entry = owners.get(name, tensor)
            if entries.setdefault(entry.name, entry) is not entry:
                raise CheckpointError(
                    self.path, f"has the same name as a module that is quantised: {name!r}", name
                )
        return Checkpoint(
            path=self.path,
            dialect=dialect,
            files=self.files,
            entries=entries,
            metadata={**self.header, **(facts or {})},
            config=self.config,
            warnings=(_UNUSED.format(len(unused), unused[0]),) if unused else (),
        )

    def _with_bias(self, entry: Entry) -> Entry:
        bias = self.tensors.get(f"{entry.name}.bias")
        weight = entry.quantized
        if (
            weight is None
            or bias is None
            or bias.dtype not in FLOAT_TYPES
            or bias.shape != entry.shape[:1]
        ):
            return entry
        return replace(
            entry,
            parts=(*entry.parts, bias.name),
            nbytes=entry.nbytes + bias.nbytes,
            quantized=weight.with_bias(bias),
        )


#: dtypes that the values of a matrix may have.
_PLAIN = (*FLOAT_TYPES, torch.float64)
_UNUSED = "{} scales of a quantised KV cache ({}, ...) are not used: the cache is kept in floats"


def _unread(path: Path, tensor: Entry, dialect: str) -> Entry:
    """Codes of other formats, which the dialect does not read."""
    problem = (
        f"is {tensor.kind} {list(tensor.shape)}: codes of another format than {dialect}, which one "
        "checkpoint cannot mix"
    )

    def values() -> Tensor:
        raise CheckpointError(path, problem, tensor.name)

    return replace(tensor, problem=problem, has_values=False, values=values, parts=(tensor.name,))


def recognise(path: Path) -> bool:
    """Whether the name is that of a safetensors file or index, or the directory holds one."""
    if path.is_dir():
        return any(path.glob("*.safetensors.index.json")) or any(path.glob("*.safetensors"))
    return path.is_file() and path.name.endswith((".safetensors", ".safetensors.index.json"))


def read(path: Path) -> Source:
    """Check the headers, list the tensors, and read the JSON beside them.

    Raises:
        CheckpointError: a wrong header or index, or a packed file, which is no checkpoint.
        OSError: a file cannot be read.
    """
    main = _main_file(path) if path.is_dir() else path
    if main.name.endswith(".json"):
        files, tensors, header = _read_index(main)
    else:
        files = (main,)
        tensors, header = _read_file(main)
    directory = main.parent
    config = json_object(directory / "config.json")
    quantization = _quantization(directory, config)
    if quantization.get("quant_method") == formats.QUANT_METHOD:
        raise CheckpointError(path, _PACKED)
    return Source(path, files, tensors, header, config, quantization)


def _main_file(directory: Path) -> Path:
    for found in (
        sorted(directory.glob("*.safetensors.index.json")),
        sorted(directory.glob("*.safetensors")),
    ):
        usual = directory / (
            INDEX if found and found[0].name.endswith(".json") else "model.safetensors"
        )
        if usual in found:
            return usual
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(
                directory,
                f"holds {len(found)} {found[0].suffix[1:]} files and no {usual.name}; name "
                "one of them",
            )
    raise CheckpointError(directory, "holds no safetensors file")


# ---- tensors


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_file(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    with opened(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("layout", "").startswith("cutlass_ops."):
            raise CheckpointError(path, _PACKED)
        headers = {name: file.get_slice(name) for name in tensor_names(path, file)}
        # The library does not give the offsets of tensors.
        with path.open("rb") as raw:
            identity = _identity(os.fstat(raw.fileno()))
            begin = 8 + int.from_bytes(raw.read(8), "little")
            offsets = json.loads(raw.read(begin - 8))
        return {
            name: _entry(path, name, headers[name], offsets.get(name), begin, identity)
            for name in headers
        }, metadata


def _entry(
    path: Path, name: str, header: Any, place: Any, begin: int, identity: tuple[int, ...]
) -> Entry:
    kind, shape = header.get_dtype(), tuple(header.get_shape())
    if kind not in TYPES:
        raise CheckpointError(path, f"has type {kind}; known are {', '.join(TYPES)}", name)
    dtype = TYPES[kind]
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if not isinstance(place, dict) or place["data_offsets"][1] - place["data_offsets"][0] != nbytes:
        raise CheckpointError(path, "the file changed while it was read", name)
    return Entry(
        name=name,
        source=name,
        kind=kind,
        shape=shape,
        nbytes=nbytes,
        dtype=dtype,
        values=partial(
            _values, path, name, dtype, shape, begin + place["data_offsets"][0], nbytes, identity
        ),
    )


def _values(
    path: Path,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    start: int,
    nbytes: int,
    identity: tuple[int, ...],
) -> Tensor:
    """The tensor over a map of its part of the file, which is unmapped with the tensor."""
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        with path.open("rb") as file:
            if _identity(os.fstat(file.fileno())) != identity:
                raise CheckpointError(path, "the file changed while it was read", name)
            raw = mapped(file, start, nbytes, dtype.itemsize)
    except OSError as error:
        raise CheckpointError(path, error.strerror or str(error), name) from error
    return raw.view(dtype).view(shape)


# ---- the index


def _read_index(index: Path) -> tuple[tuple[Path, ...], dict[str, Entry], dict[str, str]]:
    weight_map = placement(index)
    tensors: dict[str, Entry] = {}
    header: dict[str, str] = {}
    files = []
    for name in sorted(set(weight_map.values())):
        file = index.parent / name
        if not file.is_file():
            raise CheckpointError(index, f"names the file {name!r}, which is not there")
        files.append(file)
        found, metadata = _read_file(file)
        header |= metadata
        for tensor, entry in found.items():
            if weight_map.get(tensor) == name:
                tensors[tensor] = entry
            elif tensor in weight_map:
                raise CheckpointError(
                    file, f"the index places it in {weight_map[tensor]!r}", tensor
                )
            else:
                raise CheckpointError(file, "the index does not name it", tensor)
    for tensor, name in weight_map.items():
        if tensor not in tensors:
            raise CheckpointError(index, f"is not in {name!r}, where the index places it", tensor)
    return tuple(files), tensors, header


# ---- JSON


def _quantization(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    for holder in (config, inner if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if (found := holder.get(key)) is not None:
                if not isinstance(found, dict):
                    raise CheckpointError(
                        directory / "config.json", f"{key} is {found!r:.100}; an object is expected"
                    )
                return found
    for name in SETTINGS:
        if found := json_object(directory / name):
            return found
    return {}
