"""GGUF, the file format of llama.cpp, version 2 and 3.

:mod:`.gguf_header` has the layout of the file, :mod:`.gguf_blocks` the quantised types.

A model may be split into files, ``NAME-00001-of-00003.gguf`` and so on: each has its own header and
tensors, with the keys ``split.count`` and ``split.no``; the first has the keys of the model. Any of
them, or their directory, opens the whole model.

Names: for the architectures of ``gguf_models.py`` tensors are renamed as ``transformers`` names
them, and the changes that llama.cpp's converter made to their values are undone; other names stay
as they are. The converter permutes the rows of llama's attn_q and attn_k (its rope takes
neighbours, Hugging Face's takes halves) and of bloom's attn_qkv; that is undone on codes, scales
and offsets, so nothing is rounded. It adds 1 to gemma's norms, which are plain tensors.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..weights.weight import CheckpointError, QuantizedWeight
from . import directory
from .checkpoint import Checkpoint, Entry, Quantized, read_weight
from .gguf_blocks import BLOCK_TYPES, convert_blocks
from .gguf_header import ADDS_BOS, TensorInfo, read_header
from .gguf_models import (
    ARCHITECTURES,
    MAX_ROPE_FACTORS,
    Architecture,
    ConfigError,
    model_config,
    rope_tensors,
)

_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


#: The name of a part of a split model: the model's, the part's number, how many there are.
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


@dataclass(frozen=True)
class _File:
    """A file, its header checked; ``data`` maps it."""

    path: Path
    data: mmap.mmap
    keys: dict[str, Any]
    tensors: list[TensorInfo]


def recognise(path: Path) -> bool:
    """Whether the file starts as GGUF does, or says by its name that it would be one; or the
    directory holds such files, and no safetensors.
    """
    if path.is_dir():
        return any(path.glob("*.gguf")) and not directory.recognise(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def read(path: Path) -> Checkpoint:
    """Check the whole header, or those of all parts of a split model, and list the tensors.

    Raises:
        CheckpointError: a header that is truncated, inconsistent, or of an unknown version; a part
            that is not there.
        OSError: a file cannot be read.
    """
    files = _parts(_one_model(path) if path.is_dir() else path)
    keys = files[0].keys
    name = str(keys.get("general.architecture", ""))
    architecture = ARCHITECTURES.get(name)
    try:
        config, config_problem = _model_config(files, name, keys), ""
    except ConfigError as error:
        config, config_problem = {}, str(error)
    # A tensor whose values are in the configuration is no tensor of the model.
    skipped = rope_tensors(name) if config else ()
    found = [
        _entry(file, info, architecture, keys)
        for file in files
        for info in file.tensors
        if info.name not in skipped
    ]
    if architecture is not None and all(entry.source != "output.weight" for entry in found):
        found = [
            _as_head(entry) if entry.source == "token_embd.weight" else entry for entry in found
        ]
    entries: dict[str, Entry] = {}
    for entry in _with_biases(found):
        if entry.name in entries:
            other = entries[entry.name].source
            raise CheckpointError(
                path, f"has the same name as {other!r}: {entry.name!r}", entry.source
            )
        entries[entry.name] = entry
    return Checkpoint(
        path=path,
        dialect="gguf",
        files=tuple(file.path for file in files),
        entries=entries,
        metadata={
            k: str(v)
            for k, v in keys.items()
            if k == ADDS_BOS or (not k.startswith("tokenizer.") and len(str(v)) <= 200)
        },
        config=config,
        config_problem=config_problem,
    )


def _one_model(path: Path) -> Path:
    """A file of the only model in a directory."""
    models: dict[tuple[str, ...], Path] = {}
    for file in sorted(path.glob("*.gguf")):
        match = _PART.fullmatch(file.name)
        models.setdefault((file.name,) if match is None else (match[1], match[3]), file)
    if len(models) > 1:
        names = ", ".join(file.name for file in list(models.values())[:4])
        raise CheckpointError(path, f"holds {len(models)} GGUF models; name one of them: {names}")
    return next(iter(models.values()))


def _parts(path: Path) -> list[_File]:
    """The file or, where it is a part of a split model, all parts in their order."""
    named = _file(path)
    count = named.keys.get("split.count", 1)
    if type(count) is not int or count < 1:
        raise CheckpointError(
            path, f"key split.count is {count!r:.100}; a count of at least 1 is expected"
        )
    if count == 1:
        return [named]
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            path,
            f"is one of {count} parts of a model, which are found by their names: "
            f"NAME-00001-of-{count:05}.gguf",
        )
    paths = [
        path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    if missing := [other.name for other in paths if not other.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            path,
            f"is one of {count} parts of a model; beside it there is no "
            f"{', '.join(missing[:3])}{more}",
        )
    parts = [named if other == path else _file(other) for other in paths]
    for number, part in enumerate(parts):
        stated = part.keys.get("split.no"), part.keys.get("split.count")
        if stated != (number, count):
            raise CheckpointError(
                part.path,
                f"keys split.no and split.count are {stated[0]!r:.50} and {stated[1]!r:.50}; "
                f"by its name {number} and {count} are expected",
            )
    held, total = sum(len(part.tensors) for part in parts), parts[0].keys.get("split.tensors.count")
    if total is not None and total != held:
        raise CheckpointError(
            path,
            f"key split.tensors.count is {total!r:.100}; the {count} parts have {held} tensors",
        )
    return parts


def _file(path: Path) -> _File:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            raise CheckpointError(path, "the file is empty")
        # A copy on write, as torch has no tensors that are read-only. Nothing writes.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return _File(path, data, *read_header(path, data))


def _model_config(
    files: Sequence[_File], architecture: str, keys: dict[str, Any]
) -> dict[str, Any]:
    tensors = [(file, info) for file in files for info in file.tensors]
    shapes = {info.name: info.shape for _, info in tensors}
    kinds = {info.kind.name for _, info in tensors if len(info.shape) == 2}
    factors = {
        info.name: _tensor(_bytes(file.data, info)).view(torch.float32).tolist()
        for file, info in tensors
        if info.name in rope_tensors(architecture)
        and info.kind.name == "F32"
        and len(info.shape) == 1
        and info.shape[0] <= MAX_ROPE_FACTORS
    }
    return model_config(architecture, keys, shapes, kinds, factors)


def _head_rows(
    path: Path, info: TensorInfo, architecture: Architecture | None, keys: dict[str, Any]
) -> npt.NDArray[np.int64] | None:
    """The file's row at each row of the Hugging Face weight, where llama.cpp's converter permuted
    them; else None.

    ``permute`` in convert_hf_to_gguf.py reshapes rows of llama's attn_q and attn_k to
    [heads, 2, d, ...] and swaps the middle axes; bloom's attn_qkv goes from [heads, 3, d, ...] to
    [3, heads, d, ...].
    """
    match = re.fullmatch(r"blk\.\d+\.(attn_(?:q|k|qkv))\.(weight|bias)", info.name, re.ASCII)
    if architecture is None or match is None or match[1] not in architecture.permuted:
        return None
    prefix = f"{keys.get('general.architecture')}.attention"
    heads = keys.get(f"{prefix}.head_count")
    if match[1] == "attn_k":
        heads = keys.get(f"{prefix}.head_count_kv", heads)
    rows = info.shape[0]
    parts = 3 if match[1] == "attn_qkv" else 2
    if type(heads) is not int or heads < 1 or rows % (parts * heads):
        raise CheckpointError(
            path,
            f"its {rows} rows cannot be put back in order: the file gives {heads!r} heads "
            "of attention",
            info.name,
        )
    shape = (parts, heads, -1) if parts == 3 else (heads, -1, parts)
    axes = (0, 1) if parts == 3 else (1, 2)
    order: npt.NDArray[np.int64] = np.arange(rows).reshape(shape).swapaxes(*axes).reshape(rows)
    return order


def _as_head(embedding: Entry) -> Entry:
    """A tied word embedding: packed as the output head if it is quantised, left alone otherwise."""
    if embedding.quantized is None and not embedding.problem:
        return embedding
    return replace(embedding, name="lm_head", tied_to=embedding.name)


def _with_biases(entries: list[Entry]) -> list[Entry]:
    """Give a quantised weight the bias that the file has for it."""
    by_source = {entry.source: entry for entry in entries}
    taken = set()
    result = []
    for entry in entries:
        bias = by_source.get(entry.source.removesuffix(".weight") + ".bias")
        if (
            entry.quantized is not None
            and bias is not None
            and bias.kind in ("F32", "F16", "BF16")
            and bias.shape == entry.shape[:1]
        ):
            taken.add(bias.source)
            quantized = replace(
                entry.quantized,
                dtypes={**entry.quantized.dtypes, "bias": bias.dtype},
                read=partial(_read_with_bias, entry.quantized, bias),
            )
            entry = replace(entry, quantized=quantized)
        result.append(entry)
    return [entry for entry in result if entry.source not in taken]


def _read_with_bias(weight: Quantized, bias: Entry) -> QuantizedWeight:
    return replace(weight.read(), bias=bias.values())


def _entry(
    file: _File, info: TensorInfo, architecture: Architecture | None, keys: dict[str, Any]
) -> Entry:
    path, data = file.path, file.data
    name = info.name if architecture is None else architecture.rename(info.name) or info.name
    rows = _head_rows(path, info, architecture, keys)
    kind = info.kind.name
    entry = Entry(
        name=name,
        source=info.name,
        kind=kind,
        shape=info.shape,
        nbytes=info.nbytes,
        dtype=_PLAIN.get(kind, torch.float32),
        values=partial(_values, path, data, info, rows),
    )
    if kind in _PLAIN:
        return entry if architecture is None else _undone(entry, architecture)
    entry = replace(entry, name=name.removesuffix(".weight"))
    if kind not in BLOCK_TYPES:
        problem = f"has type {kind}; of the quantised types, {', '.join(BLOCK_TYPES)} are supported"
        return replace(entry, problem=problem, has_values=_is_decoded(info))
    if len(info.shape) != 2:
        return replace(
            entry, problem=f"has shape {list(info.shape)}; a quantised weight has two dimensions"
        )
    into = BLOCK_TYPES[kind]
    dtypes = {"scales": into.scales} | ({} if into.offsets is None else {"offsets": into.offsets})
    read = partial(_weight, path, data, info, rows)
    quantized = Quantized(bits=into.bits, group_size=into.group_size, dtypes=dtypes, read=read)
    return replace(entry, quantized=quantized)


def _is_decoded(info: TensorInfo) -> bool:
    """Whether the gguf package dequantises a tensor's type: tried on a block."""
    import gguf

    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[info.kind][1]), np.uint8), info.kind)
    except NotImplementedError:
        return False
    return True


def _undone(entry: Entry, architecture: Architecture) -> Entry:
    """A plain tensor with what llama.cpp's converter did to its values or shape undone."""
    read = entry.values
    if architecture.norms_plus_one and entry.source.endswith("norm.weight"):
        return replace(entry, dtype=torch.float32, values=lambda: read().float() - 1)
    if entry.source.endswith(architecture.squeezed) and len(entry.shape) == 2:
        return replace(
            entry, shape=(entry.shape[0], 1, entry.shape[1]), values=lambda: read().unsqueeze(1)
        )
    return entry


def _bytes(data: mmap.mmap, info: TensorInfo) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8, info.nbytes, info.start)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """A copy as a tensor, aligned as torch aligns its tensors."""
    return torch.from_numpy(np.array(array, order="C"))


def _weight(
    path: Path, data: mmap.mmap, info: TensorInfo, rows: npt.NDArray[np.int64] | None
) -> QuantizedWeight:
    n, k = info.shape
    raw = _bytes(data, info).reshape(n, -1)
    if rows is not None:
        raw = raw[rows]
    codes, scales, offsets = convert_blocks(raw, info.kind)
    into = BLOCK_TYPES[info.kind.name]
    return read_weight(
        path,
        info.name,
        lambda: QuantizedWeight(
            codes.view(n, k),
            scales.view(n, -1),
            offsets=None if offsets is None else offsets.view(n, -1),
            bits=into.bits,
            group_size=into.group_size,
        ),
    )


def _values(
    path: Path, data: mmap.mmap, info: TensorInfo, rows: npt.NDArray[np.int64] | None
) -> Tensor:
    import gguf

    raw = _bytes(data, info)
    if (dtype := _PLAIN.get(info.kind.name)) is not None:
        values = _tensor(raw).view(dtype).view(info.shape)
    else:
        try:
            # numpy warns of NaN and infinity, which a plain tensor may hold
            with np.errstate(all="ignore"):
                values = _tensor(gguf.dequantize(raw.reshape(*info.shape[:-1], -1), info.kind))
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                path, f"type {info.kind.name} cannot be dequantised: {error}", info.name
            ) from error
        values = values.view(info.shape)
    return values if rows is None else values[torch.from_numpy(rows)]
