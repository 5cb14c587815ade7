"""bitsandbytes: 4 bits with a code book (NF4, FP4), and 8 bits with a scale for each row
(LLM.int8).

Source: ``bitsandbytes/functional.py`` (``QuantState``), ``nn/modules.py`` and ``utils.py``.

4 bits. W is flattened, row by row, and cut into blocks of ``blocksize`` elements, whatever its rows
are.

==========================================  ========================================================
tensor                                      holds
==========================================  ========================================================
``<m>.weight``                              two codes a byte, element 2 i in the high half; uint8,
                                            or any other type of the same bytes ("quant_storage"),
                                            of any shape
``<m>.weight.quant_map``                    float [16]: the code book
``<m>.weight.absmax``                       float [blocks]: value = quant_map[code] * absmax[block];
                                            or uint8 (nested)
``<m>.weight.nested_absmax``,               of nested absmax, in separate blocks:
``<m>.weight.nested_quant_map``             absmax = nested_quant_map[code] * nested_absmax[block] +
                                            nested_offset
``<m>.weight.quant_state.bitsandbytes__t``  JSON in uint8; t is nf4 or fp4: blocksize, shape [N, K],
                                            dtype; of nested absmax nested_blocksize and
                                            nested_offset
==========================================  ========================================================

A block that straddles rows gives its absmax to a group in each of them: nothing is rounded. Where
such a group would be shorter than 16 the weight is refused. The code book is the one in the file.

A file that the config says is quantised has no ``<m>.weight`` of integers without these.

8 bits. ``<m>.weight`` int8 [N, K], ``<m>.SCB`` float [N], and perhaps ``<m>.weight_format``, of
which only 0 (rows) is known. value = code * SCB / 127. (Columns that the library keeps in fp16 are
columns of activations, not of W.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError, QuantizedWeight, flat_group_size
from .checkpoint import FLOAT_TYPES, Checkpoint, Entry, Quantized, read_weight
from .directory import Source
from .words import unpack_bytes

_STATE = "quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1_000_000
_NESTED = ("nested_absmax", "nested_quant_map")
_PARTS = ("absmax", "quant_map", *_NESTED)
_INTEGERS = (torch.int8, torch.uint8)
#: Elements that are dequantised at a time: a multiple of every block size.
_CODES_AT_A_TIME = 1 << 20


def recognise(source: Source) -> bool:
    """Whether the config says so, or a tensor has the library's quant_state."""
    if (method := source.quantization.get("quant_method")) is not None:
        return bool(method == "bitsandbytes")
    return any(f".weight.{_STATE}" in name for name in source.tensors) or bool(_rows(source))


def read(source: Source) -> Checkpoint:
    """The weights of 4 and of 8 bits.

    Raises:
        CheckpointError: a state that is missing or contradicts its tensors.
    """
    modules = dict.fromkeys(
        name.removesuffix(".weight") for name in source.modules(*_PARTS) if name.endswith(".weight")
    )
    modules |= dict.fromkeys(
        name.split(f".weight.{_STATE}")[0] for name in source.tensors if f".weight.{_STATE}" in name
    )
    for module in source.modules("weight"):
        if module not in modules and source.tensors[f"{module}.weight"].dtype in _INTEGERS:
            _part(source, f"{module}.SCB", FLOAT_TYPES)
    entries = [_four_bits(source, module) for module in modules]
    entries += [_eight_bits(source, module) for module in _rows(source)]
    return source.checkpoint("bitsandbytes", entries, parts=(*_PARTS, "SCB", "weight_format"))


def _part(
    source: Source, name: str, types: tuple[torch.dtype, ...], count: int | None = None
) -> Entry:
    """A tensor of ``count`` elements of one of these types."""
    entry = source.tensors.get(name)
    if entry is None:
        raise CheckpointError(source.path, "is missing", name)
    if entry.dtype not in types or (count is not None and math.prod(entry.shape) != count):
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
        numbers = "" if count is None else f", {count} of them,"
        raise CheckpointError(
            source.path,
            f"is {entry.kind} {list(entry.shape)}; {expected}{numbers} is expected",
            name,
        )
    return entry


# ---- 4 bits


def _four_bits(source: Source, module: str) -> Entry:
    name = f"{module}.weight"
    states = [
        f"{name}.{_STATE}{kind}"
        for kind in formats.CODE_BOOKS
        if f"{name}.{_STATE}{kind}" in source.tensors
    ]
    if len(states) != 1:
        kinds = " or ".join(formats.CODE_BOOKS)
        raise CheckpointError(
            source.path, f"has {len(states)} tensors {_STATE}* of {kinds}; one is expected", name
        )
    if name not in source.tensors:
        raise CheckpointError(source.path, "is missing", name)
    state = _json(source, states[0])
    shape = state.get("shape")
    if not isinstance(shape, list) or not all(
        type(size) is int and 0 < size < 1 << 40 for size in shape
    ):
        raise CheckpointError(
            source.path, f"shape is {shape!r:.100}; a list of sizes is expected", states[0]
        )
    blocksize = _one_of(source, states[0], state, "blocksize", formats.FLAT_BLOCK_SIZES)
    count = math.prod(shape)
    if source.tensors[name].nbytes != (count + 1) // 2:
        found = source.tensors[name].nbytes
        raise CheckpointError(
            source.path, f"has {found} bytes; {shape} codes of 4 bits take {(count + 1) // 2}", name
        )
    blocks = -(-count // blocksize)
    _part(source, f"{name}.quant_map", FLOAT_TYPES, 16)
    absmax = _part(source, f"{name}.absmax", (torch.uint8, *FLOAT_TYPES), blocks)
    nested = None
    if absmax.dtype == torch.uint8:
        inner = _one_of(source, states[0], state, "nested_blocksize", range(1, 1 << 20))
        offset = state.get("nested_offset")
        if not isinstance(offset, float) and not (type(offset) is int and abs(offset) < 1 << 64):
            raise CheckpointError(
                source.path, f"nested_offset is {offset!r:.100}; a number is expected", states[0]
            )
        _part(source, f"{name}.nested_quant_map", FLOAT_TYPES, 256)
        _part(source, f"{name}.nested_absmax", FLOAT_TYPES, -(-blocks // inner))
        nested = (inner, float(offset))
    elif unused := [part for part in _NESTED if f"{name}.{part}" in source.tensors]:
        raise CheckpointError(
            source.path, f"belongs to absmax of 8 bits; it is {absmax.kind}", f"{name}.{unused[0]}"
        )
    elif state.get("nested_blocksize") is not None:
        raise CheckpointError(
            source.path,
            f"nested_blocksize is stated; absmax is {absmax.kind}, not of 8 bits",
            states[0],
        )
    parts = (
        name,
        *(f"{name}.{part}" for part in _PARTS if f"{name}.{part}" in source.tensors),
        states[0],
    )
    kind = states[0].rpartition("_")[2].upper()
    entry = Entry(
        name=module,
        source=name,
        kind=kind if nested is None else f"{kind}, nested",
        shape=tuple(shape),
        nbytes=sum(source.tensors[part].nbytes for part in parts),
        dtype=torch.float32,
        values=partial(_values, source, name, tuple(shape), blocksize, nested),
        parts=parts,
    )
    if len(shape) != 2:
        return replace(entry, problem=f"has shape {shape}; a quantised weight has two dimensions")
    n, k = shape
    try:
        group_size = flat_group_size(n, k, blocksize)
    except ValueError as error:
        return replace(entry, problem=str(error))
    dtypes = {"scales": torch.float32 if nested else absmax.dtype, "book": torch.float32}
    read = partial(_flat_weight, source, name, (n, k), blocksize, nested)
    return replace(
        entry, quantized=Quantized(bits=4, group_size=group_size, dtypes=dtypes, read=read)
    )


def _json(source: Source, name: str) -> dict[str, Any]:
    entry = source.tensors[name]
    if entry.dtype != torch.uint8 or entry.nbytes > _MAX_STATE_BYTES:
        raise CheckpointError(
            source.path,
            f"is {entry.kind} of {entry.nbytes} bytes; U8 of {_MAX_STATE_BYTES} at most is "
            "expected",
            name,
        )
    try:
        state = json.loads(bytes(entry.values().reshape(-1).numpy()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(source.path, f"not JSON: {error}", name) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            source.path, f"is a JSON {type(state).__name__}; an object is expected", name
        )
    return state


def _one_of(
    source: Source, name: str, state: Mapping[str, Any], key: str, accepted: Collection[int]
) -> int:
    value = state.get(key)
    if type(value) is not int or value not in accepted:
        listed = (
            f"{accepted[0]} to {accepted[-1]}"
            if isinstance(accepted, range)
            else ", ".join(map(str, accepted))
        )
        raise CheckpointError(source.path, f"{key} is {value!r:.100}; accepted: {listed}", name)
    return value


def _packed(source: Source, name: str) -> Tensor:
    return source.tensors[name].values().reshape(-1).view(torch.uint8)


def _absmax(source: Source, name: str, nested: tuple[int, float] | None) -> Tensor:
    """Absmax of each block; ``nested`` is block size and offset where it is quantised itself."""
    absmax = source.tensors[f"{name}.absmax"].values().reshape(-1)
    if nested is None:
        return absmax
    book, outer = (
        source.tensors[f"{name}.{part}"].values().reshape(-1).float()
        for part in ("nested_quant_map", "nested_absmax")
    )
    blocksize, offset = nested
    values = book[absmax.int()]
    whole = len(values) // blocksize * blocksize  # all blocks but a short last one
    values[:whole].view(-1, blocksize).mul_(outer[: whole // blocksize, None])
    values[whole:].mul_(outer[-1])
    return values.add_(torch.tensor(offset, dtype=torch.float32, device="cpu"))


def _book(source: Source, name: str) -> Tensor:
    return source.tensors[f"{name}.quant_map"].values().reshape(16).float()


def _flat_weight(
    source: Source,
    name: str,
    shape: tuple[int, int],
    blocksize: int,
    nested: tuple[int, float] | None,
) -> QuantizedWeight:
    packed, absmax, book = _packed(source, name), _absmax(source, name, nested), _book(source, name)
    return read_weight(
        source.path, name, lambda: QuantizedWeight.from_flat(packed, absmax, shape, blocksize, book)
    )


def _values(
    source: Source,
    name: str,
    shape: tuple[int, ...],
    blocksize: int,
    nested: tuple[int, float] | None,
) -> Tensor:
    count = math.prod(shape)
    packed, absmax, book = (
        _packed(source, name),
        _absmax(source, name, nested).float(),
        _book(source, name),
    )
    values = torch.empty(count, dtype=torch.float32, device="cpu")
    for first in range(0, count, _CODES_AT_A_TIME):
        part = packed[first // 2 : (first + _CODES_AT_A_TIME) // 2]
        codes = unpack_bytes(part[None], len(part), in_turn=True, high_first=True)[
            0, : count - first
        ]
        scales = absmax[
            first // blocksize : (first + _CODES_AT_A_TIME) // blocksize
        ].repeat_interleave(blocksize)
        values[first : first + _CODES_AT_A_TIME] = book[codes.int()].mul_(scales[: len(codes)])
    return values.view(shape)


# ---- 8 bits


def _rows(source: Source) -> list[str]:
    """The modules of 8 bits, and those that lack their codes."""
    weights = ((module, source.tensors.get(f"{module}.weight")) for module in source.modules("SCB"))
    return [module for module, weight in weights if weight is None or weight.dtype in _INTEGERS]


def _eight_bits(source: Source, module: str) -> Entry:
    weight = _part(source, f"{module}.weight", (torch.int8,))
    _part(source, f"{module}.SCB", FLOAT_TYPES, weight.shape[0] if weight.shape else 1)
    parts = [
        name
        for part in ("weight", "SCB", "weight_format")
        if (name := f"{module}.{part}") in source.tensors
    ]
    entry = Entry(
        name=module,
        source=weight.name,
        kind="LLM.int8",
        shape=weight.shape,
        nbytes=sum(source.tensors[part].nbytes for part in parts),
        dtype=torch.float32,
        values=partial(_row_values, source, module),
        parts=tuple(parts),
    )
    if len(weight.shape) != 2:
        return replace(
            entry, problem=f"has shape {list(weight.shape)}; a quantised weight has two dimensions"
        )
    if f"{module}.weight_format" in source.tensors:
        layout = (
            _part(source, f"{module}.weight_format", (torch.uint8, torch.int32, torch.int64), 1)
            .values()
            .item()
        )
        if layout != 0:
            return replace(
                entry,
                problem=f"has weight_format {layout}, an order of older GPUs; 0 (rows) is "
                "supported",
            )
    read = partial(_row_weight, source, module)
    return replace(
        entry,
        quantized=Quantized(bits=8, group_size=-1, dtypes={"scales": torch.float32}, read=read),
    )


def _row_weight(source: Source, module: str) -> QuantizedWeight:
    codes, scale = (
        source.tensors[f"{module}.weight"].values(),
        source.tensors[f"{module}.SCB"].values(),
    )
    return read_weight(
        source.path,
        f"{module}.weight",
        lambda: QuantizedWeight(
            codes.view(torch.uint8) ^ 128, scale.float().reshape(-1, 1) / 127, bits=8, group_size=-1
        ),
    )


def _row_values(source: Source, module: str) -> Tensor:
    codes, scale = (
        source.tensors[f"{module}.weight"].values(),
        source.tensors[f"{module}.SCB"].values(),
    )
    # As the library multiplies.
    return codes.float().mul_(scale.float().reshape(-1, *[1] * (codes.dim() - 1))).mul_(1 / 127)
