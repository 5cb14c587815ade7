"""Small float models to quantise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import cutlass_ops as co


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(96, 70), nn.GELU(), nn.LayerNorm(70), nn.Linear(70, 33, bias=False)
    ).to(dtype)


def packed_names(model: nn.Module) -> list[str]:
    kinds = (co.MixedLinear, co.nn.MixedExperts)
    return [name for name, layer in model.named_modules() if isinstance(layer, kinds)]


def fail(error: type[Exception]) -> Any:
    raise error("full")
