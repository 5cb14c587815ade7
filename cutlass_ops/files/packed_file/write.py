"""Packed files: their metadata, and how they are written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...checkpoints.safetensors_files import stream_safetensors
from ...version import __version__
from ...weights import formats
from ...weights.packed_experts import PackedExperts
from ...weights.packed_weight import PackedWeight
from ...weights.specs import Spec
from .layout import Slices, check_names


def weights_metadata(weights: Mapping[str, tuple[int, int, int, int]]) -> str:
    """``weights`` of the metadata, of ``(n, k, bits, group_size)`` by name."""
    fields = ("n", "k", "bits", "group_size")
    return json.dumps(
        {name: dict(zip(fields, values, strict=True)) for name, values in weights.items()}
    )


def experts_metadata(experts: Mapping[str, tuple[int, int, bool]]) -> str:
    """``experts`` of the table in :mod:`cutlass_ops.files.packed_file`, of E, N and whether they
    are gated by name.
    """
    return json.dumps(
        {name: {"experts": e, "n": n, "gated": gated} for name, (e, n, gated) in experts.items()}
    )


def kernels_metadata(kernels: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """``kernels`` of that table as an entry of the metadata, by name; without convolutions,
    which have (), none.
    """
    kernels = {name: kernel for name, kernel in kernels.items() if kernel}
    return {"kernels": json.dumps(kernels)} if kernels else {}


def packed_metadata(
    weights: Mapping[str, tuple[int, int, int, int]],
    tied: Mapping[str, str],
    sources: Mapping[str, str],
    options: Mapping[str, Any],
    slices: Slices | None = None,
    experts: Mapping[str, tuple[int, int, bool]] | None = None,
    kernels: Mapping[str, Sequence[int]] | None = None,
    gated: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """``__metadata__`` of a packed file, as in the table of :mod:`cutlass_ops.files.packed_file`.

    ``experts`` has E, N and whether they are gated, ``kernels`` the kernels' extents, ``gated`` N
    of the gated weights, by name.
    """
    if gated:
        version = formats.GATED_VERSION
    elif any(of_gated for _, _, of_gated in (experts or {}).values()):
        version = formats.GATED_EXPERTS_VERSION
    else:
        version = formats.LAYOUT_VERSION
    metadata = {
        "format": "pt",
        "layout": formats.LAYOUT_NAME,
        "layout_version": str(version),
        "weights": weights_metadata(weights),
        "tied": json.dumps(dict(tied)),
        "sources": json.dumps(dict(sources)),
        "tool": f"cutlass_ops {__version__}",
        "options": json.dumps(dict(options)),
    }
    if experts:
        metadata["experts"] = experts_metadata(experts)
    metadata |= kernels_metadata(kernels or {})
    if gated:
        metadata["gated"] = json.dumps(dict(gated))
    if slices is not None:
        metadata["tensor_parallel"] = json.dumps(
            {"rank": slices.rank, "size": slices.size, "styles": dict(slices.styles)}
        )
    return metadata


def save_packed(
    path: str | os.PathLike[str],
    tensors: Mapping[str, PackedWeight | PackedExperts | Tensor],
    *,
    tied: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
) -> None:
    """Write packed weights and other tensors into one file.

    A file of that name is replaced when the new one is complete.

    Args:
        path: the file, by custom ``*.safetensors``.
        tensors: by name, on any device.
        tied: ``{name: other}``: weight ``name`` is also that of module ``other``.
        sources: sha256 of the files they were made from.

    Raises:
        TypeError: a value that is neither a PackedWeight, nor PackedExperts, nor a Tensor.
        ValueError: names that clash in the file, or a tensor of a dtype that the format lacks.
        OSError: the file cannot be written.
    """
    parts: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, PackedWeight | PackedExperts):
            named = {f"{name}.{part}": tensor for part, tensor in value.tensors().items()}
        elif isinstance(value, Tensor):
            named = {name: value}
        else:
            raise TypeError(
                f"{name!r} is a {type(value).__name__}; a PackedWeight, PackedExperts or a "
                "torch.Tensor is expected"
            )
        parts.update(named)
    experts = {
        name: (v.experts, v.n, v.gated)
        for name, v in tensors.items()
        if isinstance(v, PackedExperts)
    }
    packed = {name: value for name, value in tensors.items() if isinstance(value, PackedWeight)}
    packed |= {
        name: value.weight for name, value in tensors.items() if isinstance(value, PackedExperts)
    }
    check_names(packed, [name for name in tensors if name not in packed])
    for name in tied or {}:
        if name not in packed:
            raise ValueError(f"tied names {name!r}, which is no weight of this file")
    weights = {name: (w.rows, w.k, w.bits, w.group_size) for name, w in packed.items()}
    specs: dict[str, Spec] = {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts.items()
    }
    kernels = {name: w.kernel_size for name, w in packed.items() if w.kernel_size}
    gated = {name: w.n for name, w in packed.items() if w.gated}
    metadata = packed_metadata(
        weights, tied or {}, sources or {}, {}, experts=experts, kernels=kernels, gated=gated
    )
    with stream_safetensors(path, specs, metadata) as write:
        for name, tensor in parts.items():
            write(name, tensor)
