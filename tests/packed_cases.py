"""Random weights and their packed files."""

from __future__ import annotations

import torch

from cutlass_ops import (
    QuantizedWeight,
)
from cutlass_ops.weights import formats


def random_weight(
    n: int,
    k: int,
    bits: int = 4,
    group_size: int = 32,
    kind: str = "symmetric",
    dtype: torch.dtype = torch.float16,
    extras: bool = False,
    seed: int = 0,
) -> QuantizedWeight:
    random = torch.Generator().manual_seed(seed)
    groups = formats.group_count(k, group_size)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << bits, shape, generator=random, dtype=torch.uint8)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    return QuantizedWeight(
        codes=codes(n, k),
        scales=floats(n, groups),
        zeros=codes(n, groups) if kind == "zeros" else None,
        offsets=floats(n, groups).float() if kind == "offsets" else None,
        bits=bits,
        group_size=group_size,
        bias=floats(n) if extras else None,
        perm=torch.randperm(k, generator=random) if extras else None,
    )
