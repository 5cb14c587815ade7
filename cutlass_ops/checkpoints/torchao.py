"""torchao: integer weights in safetensors, as its tensor subclasses are flattened.

A weight ``<m>.weight`` is several tensors ``<m>._weight_<part>``, and the file's metadata has,
under its name, JSON
``{"_type": class, "_data": {"block_size": [1, group], ...}, "_tensor_data_names": [part, ...]}``.
The parts that are named there, where it names any, must be those of the file.
Sources: ``torchao/prototype/safetensors``, ``torchao/quantization/quantize_/workflows`` and
PyTorch's ``aten/src/ATen/native/cuda/int4mm.cu``.

========================  ==========================================  ==============================
class                     parts                                       value
========================  ==========================================  ==============================
Int4Tensor                qdata int8 [N, K/2], even k in the low      q s + z: an offset
                          half, signed; scale, zero_point [K/g, N]
Int4TilePackedTo4dTensor  qdata int32 [N'/8, K'/128, 32, 4], below;   (q - 8) s + z: an offset
                          scale_and_zero [K'/g, N', 2]
Int8Tensor                qdata int8 [N, K]; scale, zero_point int8   (q - z) s
                          [N, K/g], the latter optional
IntxUnpackedToInt8Tensor  as Int8Tensor, of "target_dtype" int1 to    (q - z) s; float zero points
                                                                      become offsets
                          int8; zero_point int8 or float              -s z, in fp32
========================  ==========================================  ==============================

Word [a, b, 4 r + t, j] of the tile-packed order has row n = 8 a + r and the columns k = 128 b + 32
j + 2 t plus 0, 8, 16, 24, 1, 9, 17, 25 in its nibbles, from the lowest. N' and K' are N and K
rounded up to 8 and 1024.

Codes and scales are kept, and so are offsets and integer zero points. Other classes, weights of
three dimensions and those with an ``act_pre_scale`` (a scale of the activations) are listed and not
read. Pickles are never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError, QuantizedWeight
from .checkpoint import FLOAT_TYPES, Checkpoint, Entry, Quantized, read_weight
from .directory import Source
from .words import unpack_bytes, unpack_tiles

_QDATA = "_qdata"
_NAMES = "tensor_names"


@dataclass(frozen=True)
class _Stored:
    """A weight as the metadata describes it.

    Attributes:
        path: of the checkpoint.
        name: "<m>.weight".
        kind: the class.
        data: its other attributes.
        parts: its tensors, by part.
    """

    source: Source
    name: str
    kind: str
    data: Mapping[str, Any]
    parts: Mapping[str, Entry]

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(self.source.path, f"{self.kind}: {message}", self.name)

    def sizes(self, key: str) -> tuple[int, ...]:
        """A list of sizes in the metadata."""
        value = self.data.get(key)
        if not isinstance(value, list) or not all(
            type(size) is int and 0 < size < 1 << 40 for size in value
        ):
            raise self.error(f"{key} is {value!r:.100}; a list of sizes is expected")
        return tuple(value)

    def part(self, name: str, shape: tuple[int, ...], types: tuple[torch.dtype, ...]) -> Entry:
        """One of the tensors, which must have this shape and one of these types."""
        if name not in self.parts:
            raise self.error(f"has no tensor {name!r}")
        entry = self.parts[name]
        if entry.shape != shape or entry.dtype not in types:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
            raise self.error(
                f"{name} is {entry.kind} {list(entry.shape)}; {expected} {list(shape)} is expected"
            )
        return entry


@dataclass(frozen=True)
class _Form:
    """How the parts make a weight.

    Attributes:
        shape: (N, K).
        bits, group_size: of the codes; the size may be one that is not supported.
        dtypes: as in :class:`Quantized`.
        tensors: reads codes uint8 [N, K], scales [N, G], zeros uint8 [N, G] or None, offsets [N, G]
            or None.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int
    dtypes: Mapping[str, torch.dtype]
    tensors: Callable[[], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]


def recognise(source: Source) -> bool:
    """Whether the config says so, or the metadata describes tensors as torchao does."""
    if (method := source.quantization.get("quant_method")) is not None:
        return bool(method == "torchao")
    return _NAMES in source.header and any(name.endswith(_QDATA) for name in source.tensors)


def read(source: Source) -> Checkpoint:
    """The weights that the metadata describes.

    Raises:
        CheckpointError: metadata that is missing or contradicts the tensors.
    """
    entries = []
    described = {_NAMES}
    for tensor in source.tensors:
        module, _, part = tensor.rpartition(".")
        found = (
            re.fullmatch(r"_\w+?_(scale|zero_point|scale_and_zero|act_\w+)", part)
            if module
            else None
        )
        if found and (codes := f"{tensor.removesuffix(found[1])}qdata") not in source.tensors:
            raise CheckpointError(source.path, f"is missing; {tensor!r} belongs to it", codes)
        if module and part.startswith("_") and part.endswith(_QDATA):
            name = f"{module}.{part[1:].removesuffix(_QDATA)}"
            entries.append(_entry(_stored(source, name, f"{module}.{part.removesuffix('qdata')}")))
        described.add(tensor)
    described |= {f"{entry.name}.weight" for entry in entries} | {entry.name for entry in entries}
    # The rest of the header is short facts for people.
    facts = {key: value for key, value in source.header.items() if key not in described}
    return replace(source, header=facts).checkpoint("torchao", entries)


def _stored(source: Source, name: str, prefix: str) -> _Stored:
    parts = {
        tensor.removeprefix(prefix): entry
        for tensor, entry in source.tensors.items()
        if tensor.startswith(prefix)
    }
    text = source.header.get(name)
    if text is None:
        raise CheckpointError(
            source.path,
            f"the file's metadata does not describe it; {prefix}* are its tensors",
            name,
        )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(source.path, f"its metadata is not JSON: {error}", name) from error
    kind = content.get("_type") if isinstance(content, dict) else None
    data = content.get("_data") if isinstance(content, dict) else None
    if not isinstance(kind, str) or not isinstance(data, dict):
        raise CheckpointError(
            source.path, f'its metadata is {text:.100}; "_type" and "_data" are expected', name
        )
    named = content.get("_tensor_data_names")
    if named is not None and (
        not isinstance(named, list) or sorted(map(str, named)) != sorted(parts)
    ):
        raise CheckpointError(
            source.path,
            f"its metadata names the parts {named!r:.200}; the file has {', '.join(sorted(parts))}",
            name,
        )
    return _Stored(source, name, kind, data, parts)


def _entry(stored: _Stored) -> Entry:
    qdata = stored.parts["qdata"]
    module = stored.name.removesuffix(".weight")
    entry = Entry(
        name=module,
        source=stored.name,
        kind=stored.kind,
        shape=qdata.shape,
        nbytes=sum(part.nbytes for part in stored.parts.values()),
        dtype=torch.float32,
        values=partial(_refuse, stored),
        has_values=False,
        parts=tuple(part.name for part in stored.parts.values()),
    )
    if stored.kind not in _KINDS:
        return replace(entry, problem=f"is a {stored.kind:.50}; {', '.join(_KINDS)} are supported")
    if "act_pre_scale" in stored.parts:
        return replace(
            entry,
            problem="has an act_pre_scale, by which activations are multiplied; that is not "
            "supported",
        )
    if len(stored.sizes("block_size")) != 2:
        return replace(entry, problem="is of more than two dimensions; a quantised weight has two")
    form = _KINDS[stored.kind](stored)
    entry = replace(entry, shape=form.shape, values=partial(_values, form), has_values=True)
    if unknown := stored.parts.keys() - _READ[stored.kind]:
        return replace(entry, problem=f"has a part {min(unknown)!r}, which is not known")
    try:
        formats.check_group_size(form.group_size)
    except ValueError as error:
        return replace(entry, problem=str(error))
    quantized = Quantized(form.bits, form.group_size, form.dtypes, partial(_weight, stored, form))
    return replace(entry, quantized=quantized)


def _refuse(stored: _Stored) -> Tensor:
    raise stored.error("its values are not read")


def _weight(stored: _Stored, form: _Form) -> QuantizedWeight:
    codes, scales, zeros, offsets = form.tensors()
    return read_weight(
        stored.source.path,
        stored.name,
        lambda: QuantizedWeight(
            codes, scales, zeros, offsets, bits=form.bits, group_size=form.group_size
        ),
    )


def _values(form: _Form) -> Tensor:
    codes, scales, zeros, offsets = form.tensors()
    k = codes.shape[1]
    group = torch.arange(k, device="cpu") // (k if form.group_size == -1 else form.group_size)
    values = codes.float()
    values -= formats.midpoint(form.bits) if zeros is None else zeros.float()[:, group]
    values *= scales.float()[:, group]
    return values if offsets is None else values.add_(offsets.float()[:, group])


# ---- the classes


def _group(stored: _Stored, k: int) -> int:
    rows, size = stored.sizes("block_size")
    if rows != 1:
        raise stored.error(f"block_size is {[rows, size]}; one row is expected")
    return -1 if size == k else size


def _int4(stored: _Stored) -> _Form:
    shape = stored.sizes("shape")
    if len(shape) != 2 or shape[1] % 2:
        raise stored.error(f"shape is {list(shape)}; [N, K] with an even K is expected")
    n, k = shape
    size = _group(stored, k)
    groups = (formats.group_count(k, size), n)
    qdata = stored.part("qdata", (n, k // 2), (torch.int8, torch.uint8))
    scale, zero = (stored.part(name, groups, FLOAT_TYPES) for name in ("scale", "zero_point"))

    def tensors() -> tuple[Tensor, Tensor, None, Tensor]:
        codes = unpack_bytes(
            qdata.values().view(torch.uint8), k // 2, in_turn=True, high_first=False
        )
        codes ^= 8  # signed: -8 .. 7 become 0 .. 15
        return codes, scale.values().t().contiguous(), None, zero.values().t().contiguous()

    return _Form((n, k), 4, size, {"scales": scale.dtype, "offsets": zero.dtype}, tensors)


def _tile_packed(stored: _Stored) -> _Form:
    shape = stored.sizes("shape")
    if len(shape) != 2:
        raise stored.error(f"shape is {list(shape)}; [N, K] is expected")
    n, k = shape
    n_pad, k_pad = -(-n // 8) * 8, -(-k // 1024) * 1024
    rows, size = stored.sizes("block_size")
    if rows != 1 or k_pad % size:
        raise stored.error(
            f"block_size is {[rows, size]}; one row and a divisor of {k_pad} are expected"
        )
    qdata = stored.part("qdata", (n_pad // 8, k_pad // 128, 32, 4), (torch.int32,))
    both = stored.part("scale_and_zero", (k_pad // size, n_pad, 2), FLOAT_TYPES)
    group = -1 if size >= k else size
    groups = formats.group_count(k, group)

    def tensors() -> tuple[Tensor, Tensor, None, Tensor]:
        scale, zero = both.values()[:groups, :n].permute(2, 1, 0).contiguous()
        return unpack_tiles(qdata.values())[:n, :k].contiguous(), scale, None, zero

    return _Form((n, k), 4, group, {"scales": both.dtype, "offsets": both.dtype}, tensors)


def _int8(stored: _Stored) -> _Form:
    return _plain(stored, 8, 8)


def _intx(stored: _Stored) -> _Form:
    target = stored.data.get("target_dtype")
    text = target.get("_data") if isinstance(target, dict) else None
    if text not in [f"int{bits}" for bits in range(1, 9)]:
        raise stored.error(f"target_dtype is {target!r:.100}; int1 to int8 are known")
    bits = int(text[3:])
    return _plain(stored, formats.width_of(bits), bits)


def _plain(stored: _Stored, bits: int, used: int) -> _Form:
    """Codes of ``used`` bits, one a byte, as codes of ``bits``."""
    if len(stored.parts["qdata"].shape) != 2:
        raise stored.error(
            f"qdata has shape {list(stored.parts['qdata'].shape)}; [N, K] is expected"
        )
    n, k = stored.parts["qdata"].shape
    if n < 1 or k < 1:
        raise stored.error(f"qdata has shape {[n, k]}; sizes of at least 1 are expected")
    qdata = stored.part("qdata", (n, k), (torch.int8,))
    rows, size = stored.sizes("block_size")
    if (rows, size) not in ((1, size), (n, k)) or k % size:
        raise stored.error(
            f"block_size is {[rows, size]}; one row and a divisor of {k}, or all of "
            f"{[n, k]}, is expected"
        )
    shape = (n // rows, k // size)
    scale = stored.part("scale", shape, FLOAT_TYPES)
    zero = (
        stored.part("zero_point", shape, (torch.int8, *FLOAT_TYPES))
        if "zero_point" in stored.parts
        else None
    )
    # The package writes zeros for a symmetric weight. With one a row they are few enough to be
    # checked.
    if zero is not None and zero.dtype == torch.int8 and shape[1] == 1 and not zero.values().any():
        zero = None
    middle, limit = formats.midpoint(bits), 1 << (used - 1)
    dtypes = {"scales": scale.dtype}
    if zero is not None:
        dtypes["zeros" if zero.dtype == torch.int8 else "offsets"] = (
            torch.uint8 if zero.dtype == torch.int8 else torch.float32
        )

    def shifted(values: Tensor, name: str) -> Tensor:
        low, high = (int(bound) for bound in values.aminmax())
        if low < -limit or high >= limit:
            raise stored.error(
                f"{name} has values from {low} to {high}; with {used} bits -{limit} .. "
                f"{limit - 1} are possible"
            )
        return (values.view(torch.uint8) + middle) & ((1 << bits) - 1)

    def tensors() -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        codes = shifted(qdata.values(), "qdata")
        scales = scale.values().expand(n, -1).contiguous()
        zeros = offsets = None
        if zero is not None and zero.dtype == torch.int8:
            zeros = shifted(zero.values().expand(n, -1).contiguous(), "zero_point")
        elif zero is not None:
            offsets = scales.float() * -zero.values().float().expand(n, -1)
        return codes, scales, zeros, offsets

    return _Form((n, k), bits, -1 if size == k else size, dtypes, tensors)


_KINDS: dict[str, Callable[[_Stored], _Form]] = {
    "Int4Tensor": _int4,
    "Int4TilePackedTo4dTensor": _tile_packed,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
}

#: The parts that each class may have. Scales of static activations are not used: they are quantised
#: online.
_READ: dict[str, set[str]] = {
    "Int4Tensor": {"qdata", "scale", "zero_point"},
    "Int4TilePackedTo4dTensor": {"qdata", "scale_and_zero"},
    "Int8Tensor": {"qdata", "scale", "zero_point", "act_quant_scale", "act_quant_zero_point"},
    "IntxUnpackedToInt8Tensor": {"qdata", "scale", "zero_point"},
}
