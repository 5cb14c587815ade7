"""Safetensors with plain numbers: one file, an index with its shards, or a directory that holds either.

The format: u64 length of a JSON header, the header (``{name: {dtype, shape, data_offsets}, "__metadata__":
{...}}``), the data without holes. https://github.com/huggingface/safetensors. Its library checks every size
and offset of the header. The index is ``{"weight_map": {name: file of the same directory}}``.

All tensors come out plain; which of them are linear layers, and how they are quantised, is for the caller to
say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..weight import CheckpointError
from .checkpoint import Checkpoint, Entry

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 100_000_000  # the library's own limit on a header

#: What the format calls torch's dtypes.
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def recognise(path: Path) -> bool:
    """Whether the name is that of a safetensors file or index, or the directory holds one."""
    if path.is_dir():
        return (path / _INDEX).is_file() or any(path.glob("*.safetensors"))
    return path.is_file() and path.name.endswith((".safetensors", ".safetensors.index.json"))


def read(path: Path) -> Checkpoint:
    """Check the headers and list the tensors.

    Raises:
        CheckpointError: a header or an index that lies, or a packed file, which is no checkpoint.
        OSError: a file cannot be read.
    """
    source = path
    if path.is_dir():
        single = sorted(path.glob("*.safetensors"))
        if (path / _INDEX).is_file():
            source = path / _INDEX
        elif len(single) == 1:
            source = single[0]
        else:
            raise CheckpointError(path, f"holds {len(single)} safetensors files and no {_INDEX}; name one of them")
    if source.name.endswith(".json"):
        return _read_index(path, source)
    entries, metadata = _read_file(source)
    return Checkpoint(path, "safetensors", (source,), entries, metadata)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """``safe_open`` with torch tensors; what the library raises becomes a CheckpointError."""
    if not path.is_file():
        raise CheckpointError(path, "not a file" if path.exists() else "no such file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(path, f"not a valid safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(path, error.strerror or str(error)) from error


def _read_file(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    with opened(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("layout", "").startswith("cutlass_ops."):
            raise CheckpointError(path, "is a packed file already; cutlass_ops.load_packed reads it")
        return {name: _entry(path, name, file.get_slice(name)) for name in file.offset_keys()}, metadata


def _entry(path: Path, name: str, header: Any) -> Entry:
    kind, shape = header.get_dtype(), tuple(header.get_shape())
    if kind not in TYPES:
        raise CheckpointError(path, f"has type {kind}; known are {', '.join(TYPES)}", name)
    dtype = TYPES[kind]
    elements = 1
    for size in shape:
        elements *= size
    return Entry(
        name=name,
        source=name,
        kind=kind,
        shape=shape,
        nbytes=elements * dtype.itemsize,
        dtype=dtype,
        values=partial(_values, path, name, dtype, shape),
    )


def _values(path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # Opened again for each tensor, so that no more than one of them is held.
    with opened(path) as file:
        if name not in file.keys():  # noqa: SIM118 (a method of the library, not a mapping's)
            raise CheckpointError(path, "has gone: the file changed while it was read", name)
        values: Tensor = file.get_tensor(name)
    if values.dtype != dtype or tuple(values.shape) != shape:
        raise CheckpointError(path, "has another type or shape now: the file changed while it was read", name)
    return values


def _read_index(path: Path, index: Path) -> Checkpoint:
    weight_map = _weight_map(index)
    entries: dict[str, Entry] = {}
    files = []
    for name in sorted(set(weight_map.values())):
        file = index.parent / name
        if not file.is_file():
            raise CheckpointError(index, f"names the file {name!r}, which is not there")
        files.append(file)
        found, _ = _read_file(file)
        for tensor, entry in found.items():
            if weight_map.get(tensor) == name:
                entries[tensor] = entry
            elif tensor in weight_map:
                raise CheckpointError(file, f"the index places it in {weight_map[tensor]!r}", tensor)
            else:
                raise CheckpointError(file, "the index does not name it", tensor)
    for tensor, name in weight_map.items():
        if tensor not in entries:
            raise CheckpointError(index, f"is not in {name!r}, where the index places it", tensor)
    return Checkpoint(path, "safetensors", tuple(files), entries)


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise CheckpointError(index, f"has {index.stat().st_size} bytes; an index has at most {_MAX_INDEX_BYTES}")
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(index, f"not JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(index, 'has no "weight_map" from tensors to files')
    for tensor, name in weight_map.items():
        # A shard lies beside its index: a name must not lead to another directory.
        if not name.endswith(".safetensors") or name != Path(name).name or "\0" in name:
            raise CheckpointError(
                index,
                f"is placed in {name!r}; a *.safetensors file of the same directory is expected",
                tensor,
            )
    return weight_map
