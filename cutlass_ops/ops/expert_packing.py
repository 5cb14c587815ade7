"""The packing of a layer's experts as one weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..weights import formats
from ..weights.eights import gated_order
from ..weights.packed_experts import PackedExperts
from ..weights.packed_weight import PackedWeight
from ..weights.reorder import common_form, reorder
from ..weights.specs import empty_packed
from ..weights.weight import QuantizedWeight, rows_of

_CODES_AT_ONCE = 1 << 26  # that are read by WeightsOnDemand.several, a byte each


@dataclass(frozen=True)
class WeightsOnDemand(Sequence[QuantizedWeight]):
    """The weights of experts, each made when it is indexed and not kept.

    Attributes:
        experts: their number.
        read: the weight of an expert.
        several: the rows of so many experts from the first of them on, as one weight
            ``[count * N, K]`` without an act order: it is packed in as many launches as one
            expert's. None if they cannot be read at once.
    """

    experts: int
    read: Callable[[int], QuantizedWeight]
    several: Callable[[int, int], QuantizedWeight] | None = None

    def __len__(self) -> int:
        return self.experts

    def __getitem__(self, e: Any) -> Any:
        if not 0 <= e < self.experts:  # ends a loop over the sequence
            raise IndexError(f"expert {e} of {self.experts}")
        return self.read(e)


def _in_turn(
    weights: Sequence[QuantizedWeight],
) -> Iterator[tuple[int, int, QuantizedWeight]]:
    """The first of the experts that are packed at once, their number, and their rows."""
    several = weights.several if isinstance(weights, WeightsOnDemand) else None
    at_once = 1
    if several is not None:
        n, k = weights[0].shape
        if n == formats.padded_rows(n):
            at_once = max(1, _CODES_AT_ONCE // (n * k))
    for e in range(0, len(weights), at_once):
        count = min(at_once, len(weights) - e)
        yield e, count, weights[e] if several is None else several(e, count)


def reorder_experts(weights: Sequence[QuantizedWeight], gated: bool = False) -> PackedExperts:
    """Pack the weights of a layer's experts as one.

    ``reorder_experts(ws).unpack()`` are the same weights, bit for bit. The sequence is indexed once
    for each expert, in order, and an expert is packed before the next is read: a sequence that
    makes its weights when they are read holds one of them at a time.

    Args:
        weights: of one shape ``[N, K]``, device and format (bits, group size, kinds and dtypes of
            tensors, code book); each may have a separate act order.
        gated: the first half of the rows is gate's and the second up's, of a layer that
            :func:`mixed_moe` multiplies; they are packed in eights (:attr:`PackedExperts.gated`),
            as its kernels read them.

    Raises:
        TypeError: an element that is no QuantizedWeight.
        ValueError: no weights, or weights that differ in a field that they must share, which the
            message names; an odd number of rows of gate and up; scales, offsets or a code book that
            are not finite.
    """
    if isinstance(weights, QuantizedWeight) or not isinstance(weights, Sequence):
        raise TypeError(
            f"weights is a {type(weights).__name__}; a sequence of QuantizedWeights is expected"
        )
    experts = len(weights)
    if not experts:
        raise ValueError("no weight is given; at least one is expected")
    first: PackedWeight | None = None
    form: dict[str, Any] = {}
    for e, count, weight in _in_turn(weights):
        if not isinstance(weight, QuantizedWeight):
            raise TypeError(
                f"weights[{e}] is a {type(weight).__name__}; a QuantizedWeight is expected"
            )
        if weight.kernel_size:
            raise ValueError(f"weights[{e}]: {reference.CONVOLUTION.format(weight.kernel_size)}")
        n = weight.n // count
        # Tensors last, so that an error names a different group size rather than a different shape
        # of scales.
        names = sorted(
            (f.name for f in fields(weight)),
            key=lambda name: isinstance(getattr(weight, name), Tensor),
        )
        found = {
            "shape": [n, weight.k],
            **{name: common_form(getattr(weight, name)) for name in names},
        }
        form = form or found
        for name, value in found.items():
            if value != form[name]:
                raise ValueError(
                    f"weights[{e}] and weights[0] cannot be packed as one: {name} is "
                    f"{value} and {form[name]}"
                )
        if gated and n % 2:
            raise ValueError(
                f"weights[{e}] is {list(weight.shape)}; as many rows of gate as of up are expected"
            )
        if gated:
            order = gated_order(n, weight.device)
            of_each = torch.arange(0, weight.n, n, device=weight.device)
            weight = rows_of(weight, (of_each[:, None] + order).flatten())
        packed = reorder(weight)
        if first is None:
            first = packed
            n_pad = formats.padded_rows(n)
            dtypes = {part: t.dtype for part, t in first.tensors().items() if part != "perm"}
            stack = empty_packed(
                experts * n_pad, first.k, first.bits, first.group_size, dtypes, first.device
            )
            if stack.bias is not None:
                stack.bias.zero_()
            if stack.book is not None and first.book is not None:
                stack.book.copy_(first.book)
            perm = None if first.perm is None else first.perm.new_empty(experts, first.k)
        if (
            first.book is not None
            and packed.book is not None
            and not torch.equal(first.book, packed.book)
        ):
            raise ValueError(
                f"weights[{e}] and weights[0] cannot be packed as one: their code books differ"
            )
        size = packed.codes.numel()
        stack.codes[e * (size // count) :][:size] = packed.codes
        for part in ("scales", "zeros", "offsets"):
            if (vectors := getattr(packed, part)) is not None:
                getattr(stack, part)[:, e * n_pad : (e + count) * n_pad] = vectors
        if stack.bias is not None and packed.bias is not None:
            stack.bias[e * n_pad : e * n_pad + packed.n] = packed.bias
        if perm is not None and packed.perm is not None:
            perm[e] = packed.perm
    assert first is not None
    return PackedExperts(stack, experts, n, perm, gated)
