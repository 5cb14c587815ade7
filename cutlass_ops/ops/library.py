"""Operators of torch.library: schemas of a packed weight, and their registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..weights.packed_weight import PackedWeight
from .arguments import NO_TANGENTS

WEIGHT_SCHEMA = (
    "Tensor codes, Tensor scales, Tensor? zeros, Tensor? offsets, Tensor? weight_bias, "
    "Tensor? perm, "
    "int n, int k, int bits, int group_size, Tensor? book, bool gated"
)
#: How many of an operator's arguments they are.
WEIGHT_FIELDS = 12


def weight_fields(weight: PackedWeight) -> tuple[Any, ...]:
    """A weight as :data:`WEIGHT_SCHEMA` lists it; a convolution's kernel is an argument more."""
    return (
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.offsets,
        weight.bias,
        weight.perm,
        weight.n,
        weight.k,
        weight.bits,
        weight.group_size,
        weight.book,
        weight.gated,
    )


def with_empty(run: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """``run`` with an empty tensor for each None that it returns: operators
    return tensors alone.
    """

    def with_empty(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(0) if t is None else t for t in run(x, *args))

    return with_empty


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator, what it runs on CPUs and GPUs, and its shapes."""
    short = schema.split("(")[0]
    name = "cutlass_ops::" + short

    def run_checked(*args: Any) -> Any:
        # A compiled graph calls operators, which see no tangent: torch's dispatcher would drop
        # it without a word.
        if forward_ad._current_level >= 0:
            raise RuntimeError(
                f"{NO_TANGENTS.format(short)}; compiled, it is refused inside of dual_level()"
            )
        return run(*args)

    torch.library.define(name, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, ("CPU", "CUDA"), run_checked)
    torch.library.register_fake(name, fake)
