"""MXFP4 as transformers writes it ("quant_method": "mxfp4"), the format of gpt-oss.

==============  ==================================================================================
tensor          holds
==============  ==================================================================================
``<m>_blocks``  uint8 ``[N, K / 32, 16]``: e2m1 codes of 32 inputs, the even one of two in the low
                half of a byte
``<m>_scales``  uint8 ``[N, K / 32]``: value = 2^(scale - 127) * e2m1 value; 255 is not a number
==============  ==================================================================================

gpt-oss stacks its experts: both tensors have a first axis of experts, and biases are ``<m>_bias``,
``[experts, N]``. A stack is given as the weight of each expert and as the plain tensor ``<m>``,
``[experts, K, N]`` as transformers has it, of its values in bf16, which is exact. Which modules are
quantised is seen from the tensors.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError
from . import grouped
from .checkpoint import Checkpoint, Entry, Quantized
from .directory import Source
from .grouped import Stored
from .words import unpack_bytes

_SIZE = formats.MXFP4_GROUP


def recognise(source: Source) -> bool:
    """Whether the config says so."""
    return source.quantization.get("quant_method") == "mxfp4"


def read(source: Source) -> Checkpoint:
    """The modules with blocks of codes.

    Raises:
        CheckpointError: blocks without scales, or shapes that are not the format's.
    """
    blocks = [entry for name, entry in source.tensors.items() if name.endswith("_blocks")]
    return source.checkpoint("mxfp4", [_entry(source, entry) for entry in blocks])


def _entry(source: Source, blocks: Entry) -> Entry:
    module = blocks.name.removesuffix("_blocks")
    grouped.checked(source, blocks.name, (torch.uint8,))
    *leading, groups, size = blocks.shape if len(blocks.shape) in (3, 4) else (0, 0, 0)
    if 0 in blocks.shape or size != _SIZE // 2:
        what = (
            f"is {list(blocks.shape)}; [N, K / {_SIZE}, {_SIZE // 2}], or experts of "
            "these, is expected"
        )
        raise CheckpointError(source.path, what, blocks.name)
    scales = grouped.checked(source, f"{module}_scales", (torch.uint8,), (*leading, groups))
    parts = [blocks.name, scales.name]
    if len(leading) > 1:
        return Entry(
            name=module,
            source=blocks.name,
            kind="mxfp4",
            shape=(leading[0], groups * _SIZE, leading[1]),
            nbytes=blocks.nbytes + scales.nbytes,
            dtype=torch.bfloat16,
            values=partial(_stack, source, blocks, scales),
            experts=tuple(_quantized(source, module, blocks, scales, e) for e in range(leading[0])),
            decoded="it stacks experts, which are packed in models whose experts transformers "
            "describes",
            parts=tuple(parts),
        )
    if f"{module}_bias" in source.tensors:
        return _unsupported(source, module, (*leading, groups * _SIZE), parts)
    # A linear layer's name: ``X.weight_blocks``.
    return _matrix(source, module.removesuffix(".weight"), blocks, scales)


def _matrix(
    source: Source, module: str, blocks: Entry, scales: Entry, expert: int | None = None
) -> Entry:
    """A matrix of the file, or that of one expert."""
    n, groups, _ = blocks.shape[-3:]
    shape = n, groups * _SIZE
    return grouped.entry(
        source,
        module,
        "mxfp4",
        shape,
        4,
        _SIZE,
        [blocks.name, scales.name],
        scales=torch.bfloat16,
        has_zeros=False,
        read=partial(_read, blocks, scales, shape, expert),
        book=formats.E2M1,
    )


def _quantized(source: Source, module: str, blocks: Entry, scales: Entry, expert: int) -> Quantized:
    weight = _matrix(source, f"{module}[{expert}]", blocks, scales, expert).quantized
    assert weight is not None
    return weight


def _read(blocks: Entry, scales: Entry, shape: tuple[int, int], expert: int | None) -> Stored:
    stored, exponents = blocks.values(), scales.values()
    if expert is not None:
        stored, exponents = stored[expert], exponents[expert]
    codes = unpack_bytes(
        stored.reshape(shape[0], -1), shape[1] // 2, in_turn=True, high_first=False
    )
    return Stored(codes, grouped.powers_of_two(exponents), None)


def _stack(source: Source, blocks: Entry, scales: Entry) -> Tensor:
    """Values of stacked experts, bf16 ``[experts, K, N]``."""
    codes, exponents = blocks.values(), scales.values()
    experts, n, groups, _ = codes.shape
    values = torch.empty(experts, groups * _SIZE, n, dtype=torch.bfloat16, device="cpu")
    book = torch.tensor(formats.E2M1, dtype=torch.bfloat16, device="cpu")
    for e in range(experts):  # one at a time, for the copies that each takes
        unpacked = unpack_bytes(
            codes[e].reshape(n, -1), groups * _SIZE // 2, in_turn=True, high_first=False
        )
        matrix = (
            book[unpacked.int()].view(n, groups, _SIZE)
            * grouped.powers_of_two(exponents[e])[..., None]
        )
        if not bool(matrix.isfinite().all()):
            raise CheckpointError(
                source.path,
                f"holds scales of expert {e} that are no numbers, or too large",
                scales.name,
            )
        values[e] = matrix.view(n, -1).t()
    return values


def _unsupported(source: Source, module: str, shape: tuple[int, ...], parts: list[str]) -> Entry:
    problem = f"is a matrix with biases ({module}_bias); matrices [N, K] without them are supported"

    def values() -> Tensor:
        raise CheckpointError(source.path, problem, parts[0])

    return Entry(
        name=module,
        source=parts[0],
        kind="mxfp4",
        shape=shape,
        nbytes=sum(source.tensors[part].nbytes for part in parts),
        dtype=torch.float32,
        values=values,
        problem=problem,
        has_values=False,
        parts=tuple(parts),
    )
