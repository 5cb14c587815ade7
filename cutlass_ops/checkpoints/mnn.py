"""MNN: the per-block weights of an exported model, from ``<model>.mnn.json`` and
``<model>.mnn.weight``.

The LLM exporter leaves both beside ``<model>.mnn``;
``MNNConvert -f MNN --modelFile M.mnn --JsonFile M.mnn.json`` writes the first for any model that
keeps its weights outside (``--saveExternalData``). A ``.mnn`` file itself is not read.
Sources: ``source/core/ConvolutionCommon.cpp``, ``schema/default/CaffeOp.fbs`` (IDSTQuan) and
``transformers/llm/export/utils`` of alibaba/MNN. The rules for the offset were checked against MNN
3.6.1.

An operator of type "Convolution" with a kernel of 1 x 1 is a linear layer [N, K]. Its ``external``
is the position of its data and the sizes of the parts, one after the other:

============  ======================================================================================
part          holds
============  ======================================================================================
weight        u8 dimensions, their sizes (u16, or u32 with ``shapeInt32``), u8 count (0 means 256),
              count int8 values, and for each weight, row after row, the index of its value q: 4 or
              8 bits, the first in the high half
alpha         float (fp16 with ``scaleStorage`` "FP16"): scale [N, K/g] or, with ``readType`` not 0,
              (offset, scale) [N, K/g, 2]
bias          float [N], if its size is not 0
============  ======================================================================================

A fifth part, the index of a sparse weight, is refused.

The values are sorted before use; mostly they are -2^(b-1) .. 2^(b-1) - 1. W = q scale or, with an
offset, W = (q - c) scale + offset, where c is 0 for ``aMin`` > 0 (what the exporter writes), -128
for 0, and ``aMin`` itself below. ``quantScale`` multiplies scale and offset. ``quanParameter`` of
type 3 means fp16 weights, and none means fp32.

Codes and scales are kept, and offsets where c is 0; otherwise ``offset - c scale`` is rounded to
fp32, once or twice. Names "/layers.i/a/b/Linear" and "/lm/lm_head/Linear" become
"model.layers.i.a.b" and "lm_head". Weights of layer norms come under "<name>.gamma" and
"<name>.beta"; other data of the file is not listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError, QuantizedWeight
from .checkpoint import Checkpoint, Entry, Quantized, read_weight
from .safetensors_files import json_object, mapped
from .words import unpack_bytes

_JSON, _WEIGHT = ".mnn.json", ".mnn.weight"
#: Bytes of the count of dimensions, their sizes, and 256 values.
_MAX_HEADER = 1 + 4 * 4 + 1 + 256


def recognise(path: Path) -> bool:
    """Whether the name is that of an exported model, or the directory holds one
    and no safetensors.
    """
    if path.is_dir():
        return any(path.glob(f"*{_JSON}")) and not any(path.glob("*.safetensors"))
    return path.is_file() and path.name.endswith((_JSON, _WEIGHT, ".mnn"))


def read(path: Path) -> Checkpoint:
    """Check the positions of all parts, and the head of each quantised weight.

    Raises:
        CheckpointError: no such pair of files, or JSON that contradicts the data.
        OSError: a file cannot be read.
    """
    if path.is_dir():
        found = sorted(path.glob(f"*{_JSON}"))
        if len(found) != 1:
            raise CheckpointError(path, f"holds {len(found)} {_JSON} files; name one of them")
        graph = found[0]
    else:
        graph = path.with_name(re.sub(r"\.mnn(\.json|\.weight)?$", _JSON, path.name))
    data = graph.with_name(graph.name.removesuffix(_JSON) + _WEIGHT)
    for file, hint in (
        (graph, "; MNNConvert -f MNN --modelFile M.mnn --JsonFile M.mnn.json writes it"),
        (data, ""),
    ):
        if not file.is_file():
            raise CheckpointError(file, f"no such file{hint}")
    content = json_object(graph)
    blob = _Blob(data, data.stat().st_size)
    entries: dict[str, Entry] = {}
    for operator in _operators(graph, content):
        for entry in _entries(graph, blob, operator):
            if entry.name in entries:
                raise CheckpointError(graph, "appears twice", entry.name)
            entries[entry.name] = entry
    facts: dict[str, str] = {
        key: str(content[key])[:100]
        for key in ("bizCode", "mnn_uuid", "sourceType")
        if key in content
    }
    return Checkpoint(path, "mnn", (graph, data), entries, facts)


@dataclass(frozen=True)
class _Blob:
    """The file of weights and its size when it was opened."""

    path: Path
    size: int

    def read(self, name: str, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` numbers."""
        size = count * dtype.itemsize
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) != self.size:
                    raise CheckpointError(self.path, "the file changed while it was read", name)
                if size == 0:
                    return torch.empty(0, dtype=dtype, device="cpu")
                return mapped(file, start, size, dtype.itemsize).view(dtype)
        except OSError as error:
            raise CheckpointError(self.path, error.strerror or str(error), name) from error


def _operators(path: Path, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The operators of the model and of its subgraphs (experts)."""
    graphs = content.get("subgraphs", [])
    for nodes in (
        content.get("oplists"),
        *(graph.get("nodes") for graph in _objects(path, "subgraphs", graphs)),
    ):
        yield from _objects(path, "oplists", nodes)


def _objects(path: Path, what: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise CheckpointError(path, f"{what} is {value!r:.100}; a list of objects is expected")
    return value


def _entries(path: Path, blob: _Blob, operator: Mapping[str, Any]) -> list[Entry]:
    kind, main, name = operator.get("type"), operator.get("main"), operator.get("name")
    if (
        kind not in ("Convolution", "LayerNorm")
        or not isinstance(main, dict)
        or "external" not in main
    ):
        return []
    if not isinstance(name, str) or not name:
        raise CheckpointError(path, f"a {kind} has the name {name!r:.100}; a text is expected")
    external = main["external"]
    if (
        not isinstance(external, list)
        or not 3 <= len(external) <= 8
        or not all(type(size) is int and 0 <= size <= blob.size for size in external)
        or sum(external) > blob.size
    ):
        raise CheckpointError(
            path,
            f"external is {external!r:.100}; a position and two sizes or more, within {blob.size} "
            "bytes, are expected",
            name,
        )
    if kind == "LayerNorm":
        first, gamma, beta, *_ = external
        parts = (("gamma", first, gamma), ("beta", first + gamma, beta))
        return [
            _floats(path, blob, f"{name}.{part}", name, offset, (size // 4,), size, 4)
            for part, offset, size in parts
            if size
        ]
    return _linear(path, blob, name, main, external)


def _floats(
    path: Path,
    blob: _Blob,
    name: str,
    source: str,
    offset: int,
    shape: tuple[int, ...],
    size: int,
    each: int,
) -> Entry:
    """A tensor of fp32 or fp16 (``each`` is 4 or 2 bytes)."""
    if math.prod(shape) * each != size:
        raise CheckpointError(
            path,
            f"has {size} bytes; {list(shape)} of {each} bytes take {math.prod(shape) * each}",
            source,
        )
    dtype = torch.float32 if each == 4 else torch.float16
    return Entry(
        name=name,
        source=source,
        kind="F32" if each == 4 else "F16",
        shape=shape,
        nbytes=size,
        dtype=dtype,
        values=lambda: blob.read(source, offset, math.prod(shape), dtype).view(shape),
    )


# ---- linear layers


@dataclass(frozen=True)
class _Linear:
    """A quantised layer.

    Attributes:
        blob, name: where it is, and its name in errors.
        shape: (N, K).
        codes: position of the indices.
        index_bits: 4 or 8.
        values: what indices stand for, in order.
        alpha: position.
        alpha_type: fp32 or fp16.
        blocks: along K.
        low: c of the module's text; None without offsets.
        factor: quantScale.
        bias: position, or None.
    """

    blob: _Blob
    name: str
    shape: tuple[int, int]
    codes: int
    index_bits: int
    values: tuple[int, ...]
    alpha: int
    alpha_type: torch.dtype
    blocks: int
    low: int | None
    factor: float
    bias: int | None

    @property
    def bits(self) -> int:
        """Bits of the codes that the values make: 4 where they fit."""
        return 4 if self.values[0] >= -8 and self.values[-1] <= 7 else 8

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """As in :class:`Quantized`."""
        scales = self.alpha_type if self.factor == 1 else torch.float32
        dtypes = {"scales": scales}
        if self.low is not None:
            dtypes["offsets"] = scales if self.low == 0 else torch.float32
        return dtypes | ({} if self.bias is None else {"bias": torch.float32})

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes uint8 [N, K], scales and offsets [N, blocks]."""
        n, k = self.shape
        count = n * k
        packed = self.blob.read(
            self.name, self.codes, (count * self.index_bits + 7) // 8, torch.uint8
        )
        if self.index_bits == 4:
            packed = unpack_bytes(packed[None], len(packed), in_turn=True, high_first=True)[
                0, :count
            ]
        first = formats.midpoint(self.bits) + self.values[0]
        if self.values != tuple(range(self.values[0], self.values[0] + len(self.values))):
            table = torch.zeros(256, dtype=torch.uint8, device="cpu")
            table[: len(self.values)] = torch.tensor(
                self.values, dtype=torch.int64, device="cpu"
            ) + formats.midpoint(self.bits)
        else:
            table = None
        if len(self.values) < 1 << self.index_bits and (largest := int(packed.max())) >= len(
            self.values
        ):
            raise CheckpointError(
                self.blob.path, f"holds index {largest} of {len(self.values)} values", self.name
            )
        codes = table[packed.int()] if table is not None else packed + first if first else packed
        parts = 1 if self.low is None else 2
        alpha = self.blob.read(
            self.name, self.alpha, n * self.blocks * parts, self.alpha_type
        ).view(n, self.blocks, parts)
        if self.factor != 1:
            alpha = alpha.float() * torch.tensor(self.factor, dtype=torch.float32, device="cpu")
        scales = alpha[..., -1].contiguous()
        if self.low is None:
            return codes.view(n, k), scales, None
        offsets = alpha[..., 0].contiguous()
        return (
            codes.view(n, k),
            scales,
            offsets if self.low == 0 else offsets.float() - self.low * scales.float(),
        )

    def weight(self) -> QuantizedWeight:
        """The weight with its bias."""
        codes, scales, offsets = self.tensors()
        bias = (
            None
            if self.bias is None
            else self.blob.read(self.name, self.bias, self.shape[0], torch.float32)
        )
        return read_weight(
            self.blob.path,
            self.name,
            lambda: QuantizedWeight(
                codes,
                scales,
                offsets=offsets,
                bits=self.bits,
                group_size=_group_size(self),
                bias=bias,
            ),
        )

    def floats(self) -> Tensor:
        """The values [N, K]."""
        codes, scales, offsets = self.tensors()
        values = (
            codes.float()
            .sub_(formats.midpoint(self.bits))
            .view(self.shape[0], self.blocks, -1)
            .mul_(scales.float()[..., None])
        )
        return (values if offsets is None else values.add_(offsets.float()[..., None])).view(
            self.shape
        )


def _group_size(linear: _Linear) -> int:
    return -1 if linear.blocks == 1 else linear.shape[1] // linear.blocks


def _linear(
    path: Path, blob: _Blob, name: str, main: Mapping[str, Any], external: list[int]
) -> list[Entry]:
    common, quan = main.get("common"), main.get("quanParameter")
    if not isinstance(common, dict) or not (quan is None or isinstance(quan, dict)):
        raise CheckpointError(
            path, "has no common parameters, or a quanParameter that is no object", name
        )
    n, k, x, y, group = (
        _integer(path, name, common, key, default)
        for key, default in (
            ("outputCount", 0),
            ("inputCount", 0),
            ("kernelX", 1),
            ("kernelY", 1),
            ("group", 1),
        )
    )
    if min(n, k, x, y, group) < 1:
        raise CheckpointError(
            path, f"has {n} outputs, {k} inputs, a kernel of {x} x {y} and {group} groups", name
        )
    module = _module(name)
    if x * y * group != 1:
        if quan is None:
            return []
        shape = (n, k // group * x * y)
        problem = f"is a convolution ({x} x {y}, {group} groups); linear layers are supported"
        return [_refused(blob, module, name, shape, external, problem)]
    kind = 0 if quan is None else _integer(path, name, quan, "type", 0)
    if quan is None or kind == 3:
        # Without quanParameter there is no alpha: position, weight, bias.
        bias_size = (
            external[2] if quan is None else external[2] + (external[3] if len(external) > 3 else 0)
        )
        found = [
            _floats(
                path,
                blob,
                f"{module}.weight",
                name,
                external[0],
                (n, k),
                external[1],
                4 if quan is None else 2,
            )
        ]
        if bias_size:
            found.append(
                _floats(
                    path,
                    blob,
                    f"{module}.bias",
                    name,
                    external[0] + external[1],
                    (n,),
                    bias_size,
                    4,
                )
            )
        return found
    if kind != 1:
        return [
            _refused(
                blob,
                module,
                name,
                (n, k),
                external,
                f"has a quanParameter of type {kind}; 1 and 3 are supported",
            )
        ]
    if len(external) < 4:
        raise CheckpointError(
            path, f"external is {external}; a position and three sizes are expected", name
        )
    first, weight_size, alpha_size, bias_size, *more = external
    if any(more):
        raise CheckpointError(
            path,
            f"external is {external}; sparse weights, which have a fifth part, are not supported",
            name,
        )
    index_bits, values, head = _head(
        path, blob, name, first, weight_size, (n, k), quan.get("shapeInt32") is True
    )
    factor = quan.get("quantScale", 0.0)
    if (
        not isinstance(factor, (int, float))
        or isinstance(factor, bool)
        or not 0 < abs(factor) < 1e38
    ):
        raise CheckpointError(
            path, f"quantScale is {factor!r:.100}; a number that is not 0 is expected", name
        )
    if quan.get("has_scaleInt") is True:
        factor = 1.0
    storage = quan.get("scaleStorage", "FP32")
    if storage not in ("FP32", "FP16", 0, 1):
        raise CheckpointError(
            path, f"scaleStorage is {storage!r:.100}; FP32 and FP16 are known", name
        )
    alpha_type = torch.float16 if storage in ("FP16", 1) else torch.float32
    parts = 1 if _integer(path, name, quan, "readType", 0) == 0 else 2
    blocks, rest = divmod(alpha_size, n * parts * alpha_type.itemsize)
    if blocks < 1 or rest or k % blocks:
        raise CheckpointError(
            path,
            f"has {alpha_size} bytes of alpha, which are not {n} x blocks x {parts} {alpha_type} "
            f"with blocks that divide {k}",
            name,
        )
    if bias_size not in (0, 4 * n):
        raise CheckpointError(path, f"has {bias_size} bytes of bias; {n} floats take {4 * n}", name)
    minimum = _integer(path, name, quan, "aMin", 0)
    linear = _Linear(
        blob=blob,
        name=name,
        shape=(n, k),
        codes=first + head,
        index_bits=index_bits,
        values=values,
        alpha=first + weight_size,
        alpha_type=alpha_type,
        blocks=blocks,
        low=None if parts == 1 else 0 if minimum > 0 else -128 if minimum == 0 else minimum,
        factor=float(factor),
        bias=first + weight_size + alpha_size if bias_size else None,
    )
    entry = Entry(
        name=module,
        source=name,
        kind=f"{linear.bits} bits",
        shape=(n, k),
        nbytes=sum(external[1:]),
        dtype=torch.float32,
        values=linear.floats,
    )
    try:
        formats.check_group_size(_group_size(linear))
    except ValueError as error:
        return [replace(entry, problem=str(error))]
    return [
        replace(
            entry,
            quantized=Quantized(linear.bits, _group_size(linear), linear.dtypes, linear.weight),
        )
    ]


def _refused(
    blob: _Blob, module: str, name: str, shape: tuple[int, int], external: list[int], problem: str
) -> Entry:
    def values() -> Tensor:
        raise CheckpointError(blob.path, "its values are not read", name)

    return Entry(
        module,
        name,
        "MNN",
        shape,
        sum(external[1:]),
        torch.float32,
        values,
        problem=problem,
        has_values=False,
    )


def _head(
    path: Path, blob: _Blob, name: str, first: int, size: int, shape: tuple[int, int], fp32: bool
) -> tuple[int, tuple[int, ...], int]:
    """Bits of an index, the sorted values, and the bytes before the indices."""
    head = bytes(blob.read(name, first, min(size, _MAX_HEADER), torch.uint8).tolist())
    each = 4 if fp32 else 2
    dimensions = head[0] if head else 0
    values_at = 1 + dimensions * each
    if not 1 <= dimensions <= 4 or values_at >= len(head):
        raise CheckpointError(
            path,
            f"its weight has {dimensions} dimensions in {len(head)} bytes; 1 to 4 are possible",
            name,
        )
    sizes = [
        int.from_bytes(head[start : start + each], "little") for start in range(1, values_at, each)
    ]
    if sizes[0] != shape[0] or math.prod(sizes) != math.prod(shape):
        raise CheckpointError(path, f"its weight says {sizes}, its layer {list(shape)}", name)
    count = head[values_at] or 256
    values = sorted(
        value - 256 * (value > 127) for value in head[values_at + 1 : values_at + 1 + count]
    )
    bits = (count - 1).bit_length()
    end = values_at + 1 + count
    if len(values) != count or bits not in (4, 8):
        raise CheckpointError(
            path,
            f"its weight has {count} values; 9 to 16 (4 bits) and 129 to 256 (8 bits) are "
            "supported",
            name,
        )
    if end + (math.prod(shape) * bits + 7) // 8 != size:
        raise CheckpointError(
            path,
            f"its weight takes {size} bytes; {list(shape)} of {bits} bits take "
            f"{end + (math.prod(shape) * bits + 7) // 8}",
            name,
        )
    return bits, tuple(values), end


def _integer(path: Path, name: str, holder: Mapping[str, Any], key: str, default: int) -> int:
    value = holder.get(key, default)
    if type(value) is not int or abs(value) >= 1 << 31:
        raise CheckpointError(path, f"{key} is {value!r:.100}; an integer is expected", name)
    return value


def _module(name: str) -> str:
    """The name that transformers gives to a layer of an exported language model, or its own."""
    if match := re.fullmatch(r"/layers\.(\d+)/([\w/]+)/Linear", name, re.ASCII):
        return f"model.layers.{match[1]}.{match[2].replace('/', '.')}"
    return "lm_head" if name == "/lm/lm_head/Linear" else name
