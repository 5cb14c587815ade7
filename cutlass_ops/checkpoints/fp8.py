"""FP8 as DeepSeek writes it ("quant_method": "fp8"): e4m3 floats with a scale for each block of
rows and columns, or for all.

=========================  =========================================================================
tensor                     holds
=========================  =========================================================================
``<m>.weight``             F8_E4M3 ``[N, K]``; of modules that are not quantised, floats
``<m>.weight_scale_inv``   floats ``[ceil(N / R), ceil(K / C)]``: value = scale * float, in spite of
                           the name; or F8_E8M0, powers of two, shaped alike
``<m>.weight_scale``       floats ``[]`` or ``[1]``: one for all, or ``[N]`` or ``[N, 1]``: one a
                           row
=========================  =========================================================================

R and C are the config's "weight_block_size". Each row has the scales of its block. Which modules
are quantised is seen from the tensors. Scales for static activations (``input_scale``) are not
used.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError
from . import grouped
from .checkpoint import FLOAT_TYPES, Checkpoint, Entry
from .directory import Source
from .grouped import Stored

_SCALES = ("weight_scale_inv", "weight_scale")
_STATIC = ("input_scale", "activation_scale")


def recognise(source: Source) -> bool:
    """Whether the config says so."""
    return source.quantization.get("quant_method") == "fp8"


def read(source: Source) -> Checkpoint:
    """The modules with 8-bit floats.

    Raises:
        CheckpointError: floats without scales, or shapes that are not the format's.
    """
    if (kind := source.quantization.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(source.path, f"fmt is {kind!r:.100}; e4m3 is supported")
    floats = [
        name for name, tensor in source.tensors.items() if tensor.dtype == torch.float8_e4m3fn
    ]
    for name in floats:
        if not name.endswith(".weight"):
            raise CheckpointError(
                source.path,
                "is F8_E4M3, and no <module>.weight; stacked experts are not supported",
                name,
            )
    entries = [_entry(source, name.removesuffix(".weight")) for name in floats]
    unused = sum(name.rpartition(".")[2] in _STATIC for entry in entries for name in entry.parts)
    facts = {"static activations": f"input_scale of {unused} modules is not used"} if unused else {}
    return source.checkpoint("fp8", entries, facts, (*_SCALES, *_STATIC))


def _entry(source: Source, module: str) -> Entry:
    codes = source.tensors[f"{module}.weight"]
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise CheckpointError(
            source.path, f"is {list(codes.shape)}; a linear weight is [N, K]", codes.name
        )
    held = [name for part in _SCALES if (name := f"{module}.{part}") in source.tensors]
    if len(held) != 1:
        what = (
            "has two kinds of scales"
            if held
            else "has no weight_scale_inv or weight_scale beside it"
        )
        raise CheckpointError(source.path, what, codes.name)
    scales = grouped.checked(source, held[0], (*FLOAT_TYPES, torch.float8_e8m0fnu))
    others = [name for part in _STATIC if (name := f"{module}.{part}") in source.tensors]
    block = _block(source, scales, codes.shape)
    return grouped.entry(
        source,
        module,
        "fp8",
        (codes.shape[0], codes.shape[1]),
        8,
        block[1],
        [codes.name, scales.name, *others],
        scales=torch.bfloat16 if scales.dtype == torch.float8_e8m0fnu else scales.dtype,
        has_zeros=False,
        read=partial(_read, codes, scales, block),
        book=formats.E4M3,
    )


def _block(source: Source, scales: Entry, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    n, k = shape
    if scales.name.endswith("weight_scale"):
        if scales.shape in ((), (1,), (1, 1)):
            return n, k
        if scales.shape in ((n,), (n, 1)):
            return 1, k
        raise CheckpointError(
            source.path, f"is {list(scales.shape)}; one scale, or {n} are expected", scales.name
        )
    block = source.quantization.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise CheckpointError(
            source.path,
            f"weight_block_size is {block!r:.100}; rows and columns of a block are expected",
        )
    rows, columns = min(block[0], n), min(block[1], k)
    grouped.checked(source, scales.name, (scales.dtype,), (-(-n // rows), -(-k // columns)))
    return rows, columns


def _read(codes: Entry, scales: Entry, block: tuple[int, int]) -> Stored:
    n, k = codes.shape
    values: Tensor = scales.values()
    if values.dtype == torch.float8_e8m0fnu:
        values = values.to(torch.bfloat16)
    rows = values.reshape(-(-n // block[0]), -(-k // block[1])).repeat_interleave(block[0], 0)[:n]
    return Stored(codes.values().view(torch.uint8), rows, None)
