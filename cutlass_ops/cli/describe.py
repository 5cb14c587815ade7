"""The report of inspect on a checkpoint or a packed model, as JSON."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..checkpoints import Checkpoint
from ..checkpoints.safetensors_files import spec_bytes
from ..files.packed_file import PackedInfo
from ..ops.explain import explain
from ..weights import formats
from ..weights.packed_weight import PackedWeight
from ..weights.specs import PACKED_DTYPES, empty_packed
from .common import dtype_name


def _note(bits: int, group_size: int, parts: dict[str, str]) -> str:
    group = "one group a row" if group_size == -1 else f"groups of {group_size}"
    kind = next((text for part, text in _KINDS.items() if part in parts), "symmetric")
    if "book" in parts:
        kind = " or ".join(known.text for known in formats.formats_of(bits, has_book=True))
    words = [f"{bits} bits in {group}", kind, f"scales {parts['scales']}"]
    words += [text for part, text in (("bias", "bias"), ("perm", "act order")) if part in parts]
    return ", ".join(words)


#: How values are made of codes, by the tensor whose presence shows it.
_KINDS = {"zeros": "zero points", "offsets": "offsets"}


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Facts of a checkpoint and of each of its tensors."""
    tensors = []
    for entry in checkpoint.entries.values():
        weight, note, described = entry.quantized, entry.problem, _PLAIN
        if weight is not None:
            parts = {
                part: dtype_name(PACKED_DTYPES.get(part, dtype))
                for part, dtype in weight.dtypes.items()
            }
            described = _quantized_fields(weight.bits, weight.group_size, parts)
            note = _note(weight.bits, weight.group_size, parts)
        note += f"; {entry.decoded}" if entry.decoded else ""
        if entry.tied_to:
            note += f"; is also {entry.tied_to}"
        tensors.append(
            {
                "name": entry.name,
                "source": entry.source,
                "type": entry.kind,
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "packable": weight is not None,
                "note": note,
                **described,
            }
        )
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.dialect,
        "bytes": sum(file.stat().st_size for file in checkpoint.files),
        "files": [str(file) for file in checkpoint.files],
        "metadata": dict(checkpoint.metadata),
        "warnings": list(checkpoint.warnings),
        "tensors": tensors,
    }


_PLAIN = {"bits": None, "group_size": None, "symmetric": None, "act_order": None, "parts": None}


def _quantized_fields(bits: int, group_size: int, parts: dict[str, str]) -> dict[str, Any]:
    symmetric = not any(part in parts for part in _KINDS)
    return {
        "bits": bits,
        "group_size": group_size,
        "symmetric": symmetric,
        "act_order": "perm" in parts,
        "parts": parts,
    }


def describe_packed(info: PackedInfo) -> dict[str, Any]:
    """Describe a packed file or directory."""
    tensors = []
    for name, (n, k, bits, group_size) in info.weights.items():
        parts = {part: dtype_name(dtype) for part, (dtype, _) in info.parts[name].items()}
        kernel = list(info.kernels.get(name, ()))
        note = _note(bits, group_size, parts) + (
            f", kernel {'x'.join(map(str, kernel))}" if kernel else ""
        )
        note += ", gated" if name in info.gated else ""
        tensors.append(
            {
                "name": name,
                "type": "packed",
                "shape": [*info.experts[name][:2], k]
                if name in info.experts
                else [n, k // math.prod(kernel), *kernel],
                "bytes": sum(map(spec_bytes, info.parts[name].values())),
                "note": note,
                "kernel_size": kernel,
                **_quantized_fields(bits, group_size, parts),
            }
        )
    for name, (dtype, shape) in info.tensors.items():
        tensors.append(
            {
                "name": name,
                "type": dtype_name(dtype),
                "shape": list(shape),
                "bytes": spec_bytes((dtype, shape)),
                "note": "",
                **_PLAIN,
            }
        )
    return {
        "path": str(info.path),
        "kind": "packed",
        "bytes": sum(file.stat().st_size for file in info.files),
        "files": [str(file) for file in info.files],
        "layout": f"{info.layout[0]} version {info.layout[1]}",
        "tool": info.tool,
        "rank": None if info.slices is None else f"{info.slices.rank} of {info.slices.size}",
        "tied": dict(info.tied),
        "sources": dict(info.sources),
        "tensors": tensors,
    }


#: Tokens for which inspect names the kernels: one as a model generates, many as it reads a prompt.
ROWS_OF_X = (1, 4096)


def add_kernels(tensors: list[dict[str, Any]], gpus: list[str], act_quant: str) -> None:
    """Give each tensor ``kernels``: by GPU and number of rows of x, or {} if it is no packed
    weight.
    """
    # A problem that every kernel takes: if it fails, the user's options are wrong.
    for name in gpus:
        explain(
            1,
            empty_packed(64, 128, 4, 128, {"scales": torch.float16}),
            act_quant=act_quant,
            device=name,
        )
    known: dict[tuple[Any, ...], dict[str, dict[str, str]]] = {}
    for tensor in tensors:
        tensor["kernels"] = {}
        if tensor["parts"] is None or tensor.get("kernel_size"):
            continue
        shape, bits, group_size, parts = (
            tensor["shape"],
            tensor["bits"],
            tensor["group_size"],
            tensor["parts"],
        )
        key = (*shape, bits, group_size, *parts.items())
        if key not in known:
            dtypes = {
                part: getattr(torch, dtype) for part, dtype in parts.items() if part != "codes"
            }
            # one of the experts
            weight = empty_packed(shape[-2], shape[-1], bits, group_size, dtypes)
            known[key] = {
                name: {str(m): _kernel(m, weight, act_quant, name) for m in ROWS_OF_X}
                for name in gpus
            }
        tensor["kernels"] = known[key]


def _kernel(m: int, weight: PackedWeight, act_quant: str, device: str) -> str:
    try:
        return explain(m, weight, act_quant=act_quant, device=device).kernel
    except ValueError as error:
        return f"none: {error}"
