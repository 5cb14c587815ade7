"""GGUF, the file format of llama.cpp, version 2 and 3.

:mod:`.gguf_header` has the layout of the file, :mod:`.gguf_blocks` the quantised types.

Names: for the architectures of ``gguf_models.py`` tensors are renamed as ``transformers`` names
them, and the changes that llama.cpp's converter made to their values are undone; other names stay
as they are. The converter permutes the rows of llama's attn_q and attn_k (its rope takes
neighbours, Hugging Face's takes halves) and of bloom's attn_qkv; that is undone on codes, scales
and offsets alike, so nothing is rounded. It adds 1 to gemma's norms, which are plain tensors.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..weight import CheckpointError, QuantizedWeight
from .checkpoint import Checkpoint, Entry, Quantized, read_weight
from .gguf_blocks import BLOCK_TYPES, GROUP_SIZE, convert_blocks
from .gguf_header import TensorInfo, read_header
from .gguf_models import ARCHITECTURES, MAX_ROPE_FACTORS, Architecture, ConfigError, model_config, rope_tensors

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


def recognise(path: Path) -> bool:
    """Whether the file starts as GGUF does, or says by its name that it would be one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def read(path: Path) -> Checkpoint:
    """Check the whole header and list the tensors.

    Raises:
        CheckpointError: a header that is truncated, inconsistent, or of an unknown version.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            raise CheckpointError(path, "the file is empty")
        # A copy on write, as torch has no tensors that are read-only. Nothing writes.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    keys, tensors = read_header(path, data)
    name = str(keys.get("general.architecture", ""))
    architecture = ARCHITECTURES.get(name)
    try:
        config, config_problem = _model_config(data, tensors, name, keys), ""
    except ConfigError as error:
        config, config_problem = {}, str(error)
    # What the configuration says is no tensor of the model.
    skipped = rope_tensors(name) if config else ()
    found = [_entry(path, data, tensor, architecture, keys) for tensor in tensors if tensor.name not in skipped]
    if architecture is not None and all(tensor.name != "output.weight" for tensor in tensors):
        found = [_as_head(entry) if entry.source == "token_embd.weight" else entry for entry in found]
    entries: dict[str, Entry] = {}
    for entry in _with_biases(found):
        if entry.name in entries:
            other = entries[entry.name].source
            raise CheckpointError(path, f"has the same name as {other!r}: {entry.name!r}", entry.source)
        entries[entry.name] = entry
    return Checkpoint(
        path=path,
        dialect="gguf",
        files=(path,),
        entries=entries,
        metadata={k: str(v) for k, v in keys.items() if not k.startswith("tokenizer.") and len(str(v)) <= 200},
        config=config,
        config_problem=config_problem,
    )


def _model_config(data: mmap.mmap, tensors: list[TensorInfo], architecture: str, keys: dict[str, Any]) -> dict[str, Any]:
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    kinds = {tensor.kind.name for tensor in tensors if len(tensor.shape) == 2}
    factors = {
        tensor.name: _tensor(_bytes(data, tensor)).view(torch.float32).tolist()
        for tensor in tensors
        if tensor.name in rope_tensors(architecture)
        and tensor.kind.name == "F32"
        and len(tensor.shape) == 1
        and tensor.shape[0] <= MAX_ROPE_FACTORS
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
            f"its {rows} rows cannot be put back in order: the file gives {heads!r} heads of attention",
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
    """Give a quantised weight the bias that stands beside it in the file."""
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


def _entry(path: Path, data: mmap.mmap, info: TensorInfo, architecture: Architecture | None, keys: dict[str, Any]) -> Entry:
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
        return replace(entry, problem=f"has type {kind}; of the quantised types, {', '.join(BLOCK_TYPES)} are supported")
    if len(info.shape) != 2:
        return replace(entry, problem=f"has shape {list(info.shape)}; a quantised weight has two dimensions")
    into = BLOCK_TYPES[kind]
    dtypes = {"scales": into.scales} | ({} if into.offsets is None else {"offsets": into.offsets})
    read = partial(_weight, path, data, info, rows)
    return replace(entry, quantized=Quantized(bits=into.bits, group_size=GROUP_SIZE, dtypes=dtypes, read=read))


def _undone(entry: Entry, architecture: Architecture) -> Entry:
    """A plain tensor with what llama.cpp's converter did to its values or shape undone."""
    read = entry.values
    if architecture.norms_plus_one and entry.source.endswith("norm.weight"):
        return replace(entry, dtype=torch.float32, values=lambda: read().float() - 1)
    if entry.source.endswith(architecture.squeezed) and len(entry.shape) == 2:
        return replace(entry, shape=(entry.shape[0], 1, entry.shape[1]), values=lambda: read().unsqueeze(1))
    return entry


def _bytes(data: mmap.mmap, info: TensorInfo) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8, info.nbytes, info.start)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """A copy as a tensor, aligned as torch aligns its tensors."""
    return torch.from_numpy(np.array(array, order="C"))


def _weight(path: Path, data: mmap.mmap, info: TensorInfo, rows: npt.NDArray[np.int64] | None) -> QuantizedWeight:
    n, k = info.shape
    raw = _bytes(data, info).reshape(n, -1)
    if rows is not None:
        raw = raw[rows]
    codes, scales, offsets = convert_blocks(raw, info.kind)
    return read_weight(
        path,
        info.name,
        lambda: QuantizedWeight(
            codes.view(n, k),
            scales.view(n, -1),
            offsets=None if offsets is None else offsets.view(n, -1),
            bits=BLOCK_TYPES[info.kind.name].bits,
            group_size=GROUP_SIZE,
        ),
    )


def _values(path: Path, data: mmap.mmap, info: TensorInfo, rows: npt.NDArray[np.int64] | None) -> Tensor:
    import gguf

    raw = _bytes(data, info)
    if (dtype := _PLAIN.get(info.kind.name)) is not None:
        values = _tensor(raw).view(dtype).view(info.shape)
    else:
        try:
            with np.errstate(all="ignore"):  # numpy warns of NaN and infinity, which a plain tensor may hold
                values = _tensor(gguf.dequantize(raw.reshape(*info.shape[:-1], -1), info.kind))
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(path, f"type {info.kind.name} cannot be dequantised: {error}", info.name) from error
        values = values.view(info.shape)
    return values if rows is None else values[torch.from_numpy(rows)]
