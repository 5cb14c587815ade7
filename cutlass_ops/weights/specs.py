"""Dtypes and shapes of a packed weight's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from . import formats
from .packed_weight import PackedWeight
from .weight import PARTS

#: A tensor's dtype and shape.
Spec: TypeAlias = "tuple[torch.dtype, tuple[int, ...]]"
#: Dtypes of a packed weight's tensors where they are not the canonical weight's.
PACKED_DTYPES = {"zeros": torch.int8, "perm": torch.int32}


def packed_specs(
    n: int,
    k: int,
    bits: int,
    group_size: int,
    dtypes: Mapping[str, torch.dtype],
    experts: int | None = None,
    kernel_size: Sequence[int] = (),
) -> dict[str, Spec]:
    """What :func:`reorder` will return for a weight with tensors of these dtypes.

    For experts that are packed as one, n is E * N rounded up to 64.
    """
    n_pad, taps = formats.padded_rows(n), math.prod(kernel_size)
    vector = (formats.padded_groups(k, group_size, taps), n_pad)
    shapes: dict[str, tuple[int, ...]] = {
        "scales": vector,
        "zeros": vector,
        "offsets": vector,
        "bias": (n,),
        "perm": (k,) if experts is None else (experts, k),
        "book": (1 << bits,),
    }
    shapes["codes"] = (n_pad * formats.padded_k(k, taps) * bits // 8,)
    return {part: (dtype, shapes[part]) for part, dtype in {"codes": torch.uint8, **dtypes}.items()}


def empty_packed(
    n: int,
    k: int,
    bits: int,
    group_size: int,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device | str = "cpu",
) -> PackedWeight:
    """A packed weight whose tensors have memory and no values yet.

    Args:
        n, k, bits, group_size: as in :class:`cutlass_ops.PackedWeight`.
        dtypes: of its tensors beside the codes.
        device: "meta" takes no memory.
    """
    specs = packed_specs(n, k, bits, group_size, dtypes)
    tensors: dict[str, Any] = dict.fromkeys(PARTS)
    tensors.update(
        {
            part: torch.empty(shape, dtype=dtype, device=device)
            for part, (dtype, shape) in specs.items()
        }
    )
    return PackedWeight(**tensors, n=n, k=k, bits=bits, group_size=group_size)
