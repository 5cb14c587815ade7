"""Is a packed file what it should be: by itself, against its checkpoint, against another packed file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import reference
from .checkpoints import Checkpoint, Entry
from .checkpoints.directory import opened
from .plan import Progress, Step, as_tensors, sha256, to_quantize
from .reorder import PackedInfo, packed_info, read_packed_weight, reorder
from .weight import PARTS, QuantizedWeight


@dataclass
class Verified:
    """What :func:`verify_packed` found.

    Attributes:
        weights, tensors: how many were checked.
        problems: one line each; empty if all is well.
        same_source: whether the checkpoint's files have the sha256 in the packed file; None if none was
            given.
        largest_difference: of a weight's values, packed against the checkpoint's own (for a float checkpoint:
            the error of quantising); None without a checkpoint.
        largest_at: the weight that has it.
    """

    weights: int = 0
    tensors: int = 0
    problems: list[str] = field(default_factory=list)
    same_source: bool | None = None
    largest_difference: float | None = None
    largest_at: str = ""


def verify_packed(
    path: str | os.PathLike[str], against: Checkpoint | None = None, progress: Progress | None = None
) -> Verified:
    """Check every byte of a packed file, and compare it with the checkpoint that it was made from.

    Without a checkpoint: the structure, and that padding is zero. With one: codes, scales, zero points,
    offsets, biases and copied tensors must be equal bit for bit (float weights are quantised again with the
    file's own options), and nothing may be missing or extra.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    info = packed_info(path)
    found = Verified()
    left = {*info.weights, *info.tensors}
    with opened(info.path) as file:
        for name in info.weights:
            weight = read_packed_weight(info, name, file)
            _compare(
                found,
                name,
                reorder(weight.unpack()).tensors(),
                weight.tensors(),
                "has padding that is not zero",
            )
            found.weights += 1
            if progress is not None:
                progress(name, weight.nbytes)
        found.tensors = len(info.tensors)
        if against is not None:
            sources = {source.name: sha256(source) for source in against.files}
            found.same_source = sources == info.sources
            for entry in against.entries.values():
                left -= _verify_entry(found, info, file, against, entry)
                if progress is not None:
                    progress(entry.name, entry.nbytes)
            found.problems += [f"{name}: not in the checkpoint" for name in sorted(left)]
    return found


def _compare(found: Verified, name: str, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], problem: str) -> None:
    for part in (*expected, *(part for part in actual if part not in expected)):
        a, b = expected.get(part), actual.get(part)
        if a is None or b is None:
            found.problems.append(f"{name}: {part} {'should not be there' if a is None else 'is missing'}")
        elif not _same_bits(a, b):
            found.problems.append(f"{name}: {part} {problem}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _verify_entry(found: Verified, info: PackedInfo, file: Any, checkpoint: Checkpoint, entry: Entry) -> set[str]:
    """Compare what became of one entry; the names in the packed file that it accounts for."""
    module = entry.name.removesuffix(".weight")
    packed = module if module in info.weights and entry.name != f"{module}.bias" else None
    if packed is not None and not entry.problem and len(entry.shape) == 2:
        weight = read_packed_weight(info, packed, file).unpack()
        expected = _expected(checkpoint, entry, weight)
        _compare(found, packed, _tensors(expected), _tensors(weight), "differs from the checkpoint's")
        if weight.shape == entry.shape:
            values = entry.values().float()
            difference = float((reference.dequantize_weight(weight, torch.float32) - values).abs().max())
            largest = found.largest_difference
            if largest is None or not (difference <= largest or math.isnan(largest)):  # the first NaN stays
                found.largest_difference, found.largest_at = difference, packed
        return {packed}
    if entry.quantized is None and not entry.problem:
        steps = [Step(entry, entry.name, None)]
        owner = entry.name.removesuffix(".bias")
        if owner != entry.name and owner in info.weights and "bias" in info.parts[owner]:
            _compare(
                found,
                owner,
                {"bias": entry.values()},
                {"bias": file.get_tensor(f"{owner}.bias")},
                "differs from the checkpoint's",
            )
            return set()
    else:
        steps = as_tensors(entry)
    for step in steps:
        if step.name not in info.tensors:
            found.problems.append(f"{step.name}: in the checkpoint ({entry.source}), not in the packed file")
        elif not _same_bits(step.entry.values(), file.get_tensor(step.name)):
            found.problems.append(f"{step.name}: differs from the checkpoint's")
    return {step.name for step in steps}


def _expected(checkpoint: Checkpoint, entry: Entry, packed: QuantizedWeight) -> QuantizedWeight:
    if entry.quantized is not None:
        return entry.quantized.read()
    bias = checkpoint.entries.get(f"{entry.name.removesuffix('.weight')}.bias") if packed.bias is not None else None
    return to_quantize(checkpoint.path, entry, bias, packed.bits, packed.group_size, symmetric=packed.symmetric).read()


def _tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    named = {part: getattr(weight, part) for part in PARTS}
    return {part: tensor for part, tensor in named.items() if tensor is not None}
