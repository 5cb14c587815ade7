"""Experts, their operands and products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cutlass_ops as co

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "group_size": 32, "symmetric": True},
    "int4 with zero points": {"bits": 4, "group_size": 128, "symmetric": False},
    "int8": {"bits": 8, "group_size": -1, "symmetric": True},
    "int2": {"bits": 2, "group_size": 64, "symmetric": False},
    "nf4": {"bits": 4, "group_size": 64, "book": "nf4"},
}


def weights(
    experts: int, n: int, k: int, seed: int = 0, **options: Any
) -> list[co.QuantizedWeight]:
    random = torch.Generator().manual_seed(seed)
    options = options or FORMATS["int4"]
    return [
        co.quantize(torch.randn(n, k, generator=random) / k**0.5, **options) for _ in range(experts)
    ]


def both(
    gate_up: list[co.QuantizedWeight], down: list[co.QuantizedWeight]
) -> tuple[co.PackedExperts, co.PackedExperts]:
    """Operands of mixed_moe."""
    return co.reorder_experts(gate_up, gated=True), co.reorder_experts(down)


def problem(
    m: int,
    top: int,
    experts: int = 5,
    hidden: int = 96,
    intermediate: int = 40,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[co.QuantizedWeight], list[co.QuantizedWeight], Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(m)
    gate_up = weights(experts, 2 * intermediate, hidden, 1, **options)
    down = weights(experts, hidden, intermediate, 2, **options)
    x = torch.randn(m, hidden, generator=random).to(dtype)
    ids = torch.randint(-1, experts, (m, top), generator=random)
    return gate_up, down, x, ids, torch.rand(m, top, generator=random)


def check(found: Tensor, expected: Tensor) -> None:
    """Every element against the fp64 result of an oracle."""
    rms = float(expected.square().mean().sqrt())
    # A rounding of act(gate) * up to 16 bits may fall to the other side in fp64.
    relative, absolute = {
        torch.float32: (0, 1e-5),
        torch.bfloat16: (2**-8, 2e-3),
        torch.float16: (2**-10, 6e-4),
    }[found.dtype]
    assert bool(
        (
            (found.double() - expected).abs() <= relative * expected.abs() + absolute * rms + 1e-30
        ).all()
    )
