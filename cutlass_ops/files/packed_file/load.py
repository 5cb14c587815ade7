"""Packed weights from their files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.safetensors_files import opened
from ...weights import formats
from ...weights.packed_experts import PackedExperts
from ...weights.packed_weight import PackedWeight
from ...weights.weight import PARTS, CheckpointError, wrong_book
from .info import PackedInfo, packed_info


def load_packed(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> dict[str, PackedWeight | PackedExperts | Tensor]:
    """Read a packed file, or a directory of them.

    On the CPU the tensors are memory maps of the file, read from the disk at their first use; they
    stay valid if the file is replaced.

    Args:
        path: a file that :func:`save_packed` or ``cutlass-ops reorder`` wrote, or a directory that
            the latter wrote.
        device: where to put the tensors.

    Returns:
        Weights, experts and other tensors by name.

    Raises:
        CheckpointError: not a packed file, one of another layout or version, or one whose contents
            contradict each other.
    """
    info = packed_info(path)
    result: dict[str, PackedWeight | PackedExperts | Tensor] = {}
    with ExitStack() as stack:
        files = {file: stack.enter_context(opened(file)) for file in info.files}
        for name in info.names:
            if name in info.weights:
                result[name] = read_packed_weight(info, name, files).to(device)
            else:
                result[name] = files[info.places[name]].get_tensor(name).to(device)
    return result


def read_packed_weight(
    info: PackedInfo, name: str, files: Mapping[Path, Any]
) -> PackedWeight | PackedExperts:
    """A weight of the open files that hold it; its values are checked in part."""
    n, k, bits, group_size = info.weights[name]
    path = info.places[f"{name}.codes"]
    parts: dict[str, Any] = dict.fromkeys(PARTS)
    for part in info.parts[name]:
        parts[part] = files[info.places[f"{name}.{part}"]].get_tensor(f"{name}.{part}")
    weight: PackedWeight | PackedExperts
    try:
        if name in info.experts:
            e, n, gated = info.experts[name]
            weight = PackedExperts.of_parts(parts, e, n, k, bits, group_size, gated)
        else:
            weight = PackedWeight(
                **parts,
                n=info.gated.get(name, n),
                k=k,
                bits=bits,
                group_size=group_size,
                gated=name in info.gated,
                kernel_size=info.kernels.get(name, ()),
            )
    except (TypeError, ValueError) as error:
        raise CheckpointError(path, str(error), name) from error
    if problem := packed_problem(weight):
        raise CheckpointError(path, problem[1], f"{name}.{problem[0]}")
    return weight


def packed_problem(weight: PackedWeight | PackedExperts) -> tuple[str, str] | None:
    """A tensor with wrong values in a weight of a file, and what is wrong; None if none is."""
    # A kernel gathers by it: an index outside of 0 .. K-1 would read someone else's memory.
    if weight.perm is not None:
        features = torch.arange(weight.k, dtype=torch.int32, device=weight.device)
        if not bool((weight.perm.sort().values == features).all()):
            return "perm", f"is not a permutation of 0 .. {weight.k - 1}"
    packed = weight.weight if isinstance(weight, PackedExperts) else weight
    if problem := wrong_book(packed.bits, packed.book):
        return "book", problem
    zeros = weight.tensors().get("zeros")
    middle = formats.midpoint(weight.bits)
    if (
        weight.bits < 8
        and zeros is not None
        and not -middle <= int(zeros.min()) <= int(zeros.max()) < middle
    ):
        outside = f"holds values outside of -{middle} .. {middle - 1}"
        return "zeros", f"{outside}, the zero points of {weight.bits} bits"
    return None
