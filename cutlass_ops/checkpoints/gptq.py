"""GPTQ, as AutoGPTQ and GPTQModel write it: codes of 2, 3, 4 or 8 bits in groups along K, in act
order or not.

Source: ``gptqmodel/utils/model.py`` (``convert_gptq_v1_to_v2_format_module``) of GPTQModel, the
packing of AutoGPTQ, and vLLM's ``auto_gptq.py``.

===============  ==========================  =======================================================
tensor           dtype, shape                holds
===============  ==========================  =======================================================
``<m>.qweight``  int32 ``[K * b / 32, N]``   codes along K, the first in the lowest bits
``<m>.qzeros``   int32 ``[G, N * b / 32]``   zero points along N; version 1 stores them less one
``<m>.scales``   float ``[G, N]``            value = scale * (code - zero)
``<m>.g_idx``    int32 ``[K]``               the group of each input, k // group_size without act
                                             order; optional, but with several groups and
                                             ``desc_act`` (act order)
===============  ==========================  =======================================================

Version 1 subtracts one from every zero point by subtracting 0x11111111 (0x01010101 at 8 bits) from
the whole word, so that a zero point of 0 borrows from the next. It is undone in the same way, by an
addition with carry. (At 3 bits, where codes straddle words, each code is less one by itself, modulo
8.) AutoGPTQ itself subtracted before it packed: a zero point of 0 became -1, whose ones overwrote
the codes above it in the word. A word that ends in two codes of all ones shows it. Such a module is
refused unless the user gives ``zero_offset=1``, which reads the word as if it had been written
correctly.

Which version a file has is its ``checkpoint_format`` ("gptq" or nothing: 1, "gptq_v2": 2), but some
are wrong. A symmetric module shows it: all its zero points are 8 (at 4 bits), stored as 7 in
version 1. So where every stored value is 7, or every one is 8, that is believed before the
metadata, unless the config says that the weights are not symmetric.

Settings: ``bits``, ``group_size`` (-1 is all of K), ``sym``, ``desc_act``, ``checkpoint_format`` or
``format``, ``dynamic`` (overrides by regular expressions); in ``config.json`` or
``quantize_config.json``. AutoRound writes the same tensors, and its overrides as ``extra_config``;
its ``packing_format`` says the version: "auto_round:auto_gptq" is 1, "auto_round" and
"auto_round:gptqmodel" are 2. Which of the bits and group sizes in there a module has follows from
the shapes of its tensors; the expressions are not evaluated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError
from . import grouped
from .checkpoint import Checkpoint, Entry
from .directory import Source
from .grouped import Stored
from .words import unpack_along_k

_BITS = (4, 8, 3, 2)
#: For words of b-bit codes, the bit at which the last but one code that a word holds begins; one
#: number for each word in turn.
_LAST_TWO = {2: (28,), 3: (27, 28, 26), 4: (24,), 8: (16,)}
_OFFSETS = {None: 1, "gptq": 1, "gptq_v2": 0}
#: The same by AutoRound's names of the formats.
_AUTO_ROUND = {"auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class _Settings:
    """What the metadata says of all modules.

    Attributes:
        bits, sizes: of codes and of groups, the most usual first.
        symmetric: None if it does not say.
        act_order: whether every module has an index of groups.
        offset: what to add to stored zero points.
        forced: whether the user gave the offset.
    """

    bits: tuple[int, ...]
    sizes: tuple[int, ...]
    symmetric: bool | None
    act_order: bool
    offset: int
    forced: bool


def recognise(source: Source) -> bool:
    """Whether the config says so or, if it says nothing, the tensors are GPTQ's."""
    if (method := source.quantization.get("quant_method")) is not None:
        return method == "gptq" or (
            method == "auto-round" and str(source.quantization.get("packing_format")) in _AUTO_ROUND
        )
    for module in source.modules("qweight"):
        codes, scales = source.tensors[f"{module}.qweight"], source.tensors.get(f"{module}.scales")
        if (
            scales is not None
            and len(scales.shape) == len(codes.shape) == 2
            and scales.shape[1] == codes.shape[1]
        ):
            return f"{module}.qzeros" in source.tensors
    return False


def read(source: Source, zero_offset: int | None = None) -> Checkpoint:
    """The modules that have codes or zero points; their zero points and groups are looked at, their
    codes are not.

    Args:
        source: the checkpoint.
        zero_offset: what to add to the stored zero points: 0 or 1; None derives it from metadata
            and values.

    Raises:
        CheckpointError: settings or shapes that are not GPTQ's.
    """
    settings = _settings(source, zero_offset)
    entries = []
    offsets: Counter[str] = Counter()
    for module in source.modules("qweight", "qzeros"):
        entry, offset = _entry(source, module, settings)
        entries.append(entry)
        offsets[
            f"{offset}"
            if offset == settings.offset
            else f"{offset} by their values (metadata: {settings.offset})"
        ] += 1
    facts = {
        "zero_offset": ", ".join(
            f"{offset} in {count} modules" for offset, count in offsets.items()
        )
    }
    return source.checkpoint("gptq", entries, facts, _PARTS)


def _settings(source: Source, zero_offset: int | None) -> _Settings:
    settings = source.quantization
    kind = next(
        (
            settings[name]
            for name in ("checkpoint_format", "format")
            if settings.get(name) is not None
        ),
        None,
    )
    if not isinstance(kind, (str, type(None))) or kind not in _OFFSETS:
        known = ", ".join(repr(name) for name in _OFFSETS if name)
        raise CheckpointError(
            source.path, f"GPTQ's checkpoint_format is {kind!r:.100}; known are {known}"
        )
    stated = _OFFSETS[kind]
    if settings.get("quant_method") == "auto-round":
        stated = _AUTO_ROUND[settings["packing_format"]]
    for name in ("sym", "desc_act"):
        if (value := settings.get(name)) is not None and type(value) is not bool:
            raise CheckpointError(
                source.path, f"{name} is {value!r:.100}; true or false is expected"
            )
    places = [settings, *_overrides(source)]
    bits = [grouped.setting(source, place, ("bits",), None) for place in places]
    sizes = [grouped.setting(source, place, ("group_size",), None) for place in places]
    return _Settings(
        bits=_distinct(bits) or _BITS,
        sizes=_distinct(sizes),
        symmetric=settings.get("sym"),
        act_order=settings.get("desc_act") is True,
        offset=stated if zero_offset is None else zero_offset,
        forced=zero_offset is not None,
    )


def _overrides(source: Source) -> Iterator[dict[str, Any]]:
    """Settings of some modules only: GPTQModel's ``dynamic``, AutoRound's ``extra_config``."""
    for name in ("dynamic", "extra_config"):
        overrides = source.quantization.get(name) or {}
        if not isinstance(overrides, dict):
            raise CheckpointError(
                source.path, f"{name} is {overrides!r:.100}; an object is expected"
            )
        for pattern, values in overrides.items():
            # "-:pattern" leaves modules as they are; its value is unused.
            if not pattern.startswith("-:"):
                if not isinstance(values, dict):
                    raise CheckpointError(
                        source.path,
                        f"{name} has {values!r:.100} for {pattern!r:.100}; an object is expected",
                    )
                yield values


def _distinct(values: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for value in values if value is not None))


def _entry(source: Source, module: str, settings: _Settings) -> tuple[Entry, int]:
    """The module's entry, and what has to be added to its stored zero points."""
    codes = grouped.checked(source, f"{module}.qweight", (torch.int32,))
    zeros = grouped.checked(source, f"{module}.qzeros", (torch.int32,))
    scales = grouped.float_scales(source, f"{module}.scales")
    parts = [codes.name, zeros.name, scales.name]
    index = source.tensors.get(f"{module}.g_idx")
    shape = _shape(codes, zeros, scales, index, settings.bits)
    if shape is None:
        shapes = ", ".join(
            f"{part.name.rpartition('.')[2]} {list(part.shape)}" for part in (codes, zeros, scales)
        )
        known = " or ".join(map(str, settings.bits))
        raise CheckpointError(
            source.path, f"has {shapes}, which do not fit each other at {known} bits", codes.name
        )
    n, k, bits = shape
    groups = scales.shape[0]
    size = grouped.group_size(k, groups, settings.sizes)
    if index is None and settings.act_order and groups > 1:
        raise CheckpointError(
            source.path, "is missing; the config says desc_act, which needs it", f"{module}.g_idx"
        )
    if index is not None:
        parts.append(index.name)
        if size is None:  # groups of any lengths: the size is only preferred
            size = settings.sizes[0] if settings.sizes else -(-k // groups)
    if size is None:
        raise CheckpointError(
            source.path,
            f"has scales {list(scales.shape)} for K = {k}; no known size of groups fits",
            codes.name,
        )

    raw = unpack_along_k(zeros.values(), n, bits)
    offset = _offset(raw, bits, settings)
    lost = _lost(zeros.values(), bits) if offset == 1 and not settings.forced else 0
    has_zeros = not _all(_zeros(zeros, n, bits, offset), formats.midpoint(bits))
    entry = grouped.entry(
        source,
        module,
        f"GPTQ {bits} bits",
        (n, k),
        bits,
        size,
        parts,
        scales=scales.dtype,
        has_zeros=has_zeros,
        read=partial(_read, codes, zeros, scales, (n, k), bits, offset, has_zeros),
        index=None
        if index is None
        else partial(grouped.group_index, source, index.name, k, groups),
    )
    if lost:
        problem = (
            f"{lost} words of qzeros end in two codes of all ones, as AutoGPTQ leaves them when it "
            "overwrites zero points; "
            "if another tool made the file, zero_offset=1 (--zero-offset 1) reads them"
        )
        refuse = partial(_refuse, source, zeros.name, problem)
        entry = replace(entry, quantized=None, problem=problem, values=refuse, has_values=False)
    return entry, offset


def _shape(
    codes: Entry, zeros: Entry, scales: Entry, index: Entry | None, bits: Iterable[int]
) -> tuple[int, int, int] | None:
    """N, K and bits by which the shapes fit each other."""
    if any(len(part.shape) != 2 or 0 in part.shape for part in (codes, zeros, scales)):
        return None
    (words, n), groups = codes.shape, scales.shape[0]
    if scales.shape[1] != n or zeros.shape[0] != groups:
        return None
    for b in bits:
        k = words * 32 // b if b in _BITS else 0
        if index is not None and len(index.shape) == 1:
            k = index.shape[0]
        if b in _BITS and -(-k * b // 32) == words and -(-n * b // 32) == zeros.shape[1] and k > 0:
            return n, k, b
    return None


def _all(values: Tensor, value: int) -> bool:
    return bool((values == value).all())


def _offset(raw: Tensor, bits: int, settings: _Settings) -> int:
    """What to add to zero points that are stored as ``raw``."""
    if not settings.forced and settings.symmetric is not False:
        middle = formats.midpoint(bits)
        if _all(raw, middle - 1):
            return 1
        if _all(raw, middle):
            return 0
    return settings.offset


def _lost(words: Tensor, bits: int) -> int:
    """How many words end, at their high bits, in two codes of all ones."""
    begins = _LAST_TWO[bits]
    return sum(
        int(((words[:, i :: len(begins)] >> begin) == -1).sum()) for i, begin in enumerate(begins)
    )


def _zeros(zeros: Entry, n: int, bits: int, offset: int) -> Tensor:
    """The zero points, uint8 ``[G, N]``."""
    words = zeros.values()
    if bits == 3:
        return (unpack_along_k(words, n, bits) + offset) & 7
    # 0x11111111 at 4 bits; the carry out of a word is dropped.
    return unpack_along_k(words + offset * (((1 << 32) - 1) // ((1 << bits) - 1)), n, bits)


def _read(
    codes: Entry,
    zeros: Entry,
    scales: Entry,
    shape: tuple[int, int],
    bits: int,
    offset: int,
    has_zeros: bool,
) -> Stored:
    n, k = shape
    return Stored(
        unpack_along_k(codes.values().t(), k, bits),
        scales.values().t(),
        _zeros(zeros, n, bits, offset).t() if has_zeros else None,
    )


def _refuse(source: Source, name: str, problem: str) -> Tensor:
    raise CheckpointError(source.path, problem, name)
