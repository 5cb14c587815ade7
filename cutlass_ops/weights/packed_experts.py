"""The weights of a layer's experts, packed one after another as one weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from . import formats
from .eights import gated_order
from .packed_weight import PackedWeight, group_vector_positions, pack_codes, unpack_codes
from .weight import PARTS, QuantizedWeight, check_part, rows_of


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """E weights ``[N, K]`` of one format in the kernels' order; made by
    :func:`cutlass_ops.reorder_experts`.

    Row panels of 64 are the outermost order of a packed weight, so that the experts, each
    of N rounded up to 64 rows, are the row panels of one weight: expert e begins at its
    row ``e * n_pad``.

    Attributes:
        weight: ``[E * n_pad, K]``, without an act order. Its bias, if there is one, is zero in the
            rows of padding.
        experts: E.
        n: N, the output features of one expert.
        perm: int32 ``[E, K]``, the act order of each expert (as in
            :class:`cutlass_ops.QuantizedWeight`), or None.
        gated: whether the first half of an expert's features is gate's and the second up's, and the
            packed rows are eight of gate's, then the eight of up's for the same features, and so
            on: both are then in the same thread of a kernel.

    Raises:
        TypeError, ValueError: parts that do not fit each other.
    """

    weight: PackedWeight
    experts: int
    n: int
    perm: Tensor | None = None
    gated: bool = False
    n_pad: int = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.weight, PackedWeight):
            raise TypeError(f"weight is a {type(self.weight).__name__}; a PackedWeight is expected")
        self.weight.check_plain("a layer of experts")
        for name, number in (("experts", self.experts), ("n", self.n)):
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} is {number!r}; an integer of at least 1 is expected")
        if self.gated and self.n % 2:
            raise ValueError(
                f"n is {self.n}; an even number is expected, as many features of gate as of up"
            )
        object.__setattr__(self, "n_pad", formats.padded_rows(self.n))
        if self.weight.n != self.experts * self.n_pad:
            raise ValueError(
                f"the weight has {self.weight.n} rows; {self.experts} experts of {self.n} "
                f"features, padded to {self.n_pad}, "
                f"have {self.experts * self.n_pad}"
            )
        if self.weight.perm is not None:
            raise ValueError(
                "the weight has an act order; those of experts are given as perm, [E, K]"
            )
        if self.perm is not None:
            check_part(
                "perm", self.perm, (self.experts, self.weight.k), (torch.int32,), self.weight.device
            )

    @classmethod
    def of_parts(
        cls,
        parts: Mapping[str, Any],
        experts: int,
        n: int,
        k: int,
        bits: int,
        group_size: int,
        gated: bool = False,
    ) -> PackedExperts:
        """The inverse of :meth:`tensors`; parts that are None or missing are not there."""
        tensors: dict[str, Any] = {part: parts.get(part) for part in PARTS if part != "perm"}
        rows = experts * formats.padded_rows(n)
        weight = PackedWeight(**tensors, perm=None, n=rows, k=k, bits=bits, group_size=group_size)
        return cls(weight, experts, n, parts.get("perm"), gated)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by the names that a packed weight's have;
        ``perm`` is ``[E, K]``.
        """
        named = self.weight.tensors()
        return named if self.perm is None else {**named, "perm": self.perm}

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, N, K)``."""
        return self.experts, self.n, self.weight.k

    @property
    def k(self) -> int:
        """Input features."""
        return self.weight.k

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.weight.bits

    @property
    def group_size(self) -> int:
        """As in :class:`cutlass_ops.QuantizedWeight`."""
        return self.weight.group_size

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.weight.device

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def to(self, device: torch.device | str) -> PackedExperts:
        """The same weights on ``device``; itself if they are there already."""
        if self.device == torch.device(device):
            return self
        perm = None if self.perm is None else self.perm.to(device)
        return PackedExperts(self.weight.to(device), self.experts, self.n, perm, self.gated)

    def expert(self, e: int) -> PackedWeight:
        """Expert e, ``[N, K]``: a view of the codes, bias and act order; its scales, zeros and
        offsets are copied.

        With :attr:`gated` its rows are in eights; :meth:`in_order` brings the features of products
        into their order.

        Raises:
            IndexError: no such expert.
        """
        if not 0 <= e < self.experts:
            raise IndexError(f"expert {e} of {self.experts}")
        weight = self.weight.row_panels(e * self.n_pad, e * self.n_pad + self.n)
        return weight if self.perm is None else replace(weight, perm=self.perm[e])

    def in_order(self, features: Tensor, dim: int = 0) -> Tensor:
        """Values of an expert's features along ``dim``, which are in the order of packed rows, with
        gate's before up's.
        """
        return (
            features.index_select(dim, gated_order(self.n, features.device).argsort())
            if self.gated
            else features
        )

    def unpack_expert(self, e: int) -> QuantizedWeight:
        """The canonical weight that expert e was packed from, on the same device; exact.

        Raises:
            IndexError: no such expert.
        """
        weight = self.expert(e).unpack()
        return rows_of(weight, gated_order(self.n, self.device).argsort()) if self.gated else weight

    def unpack(self) -> list[QuantizedWeight]:
        """:meth:`unpack_expert` of all."""
        return [self.unpack_expert(e) for e in range(self.experts)]


#: What :func:`in_eights` changes in addition to the codes.
EIGHTS_PARTS = ("scales", "zeros", "offsets", "bias")


def in_eights(experts: PackedExperts) -> PackedExperts:
    """The same weights with :attr:`PackedExperts.gated`, on the same device and exact; act order
    and code book are shared.

    The codes of one expert at a time are held as bytes. Weights without values, on the meta
    device, stay without.

    Args:
        experts: of gate and up, with an even N, packed without ``gated``.
    """
    weight, device = experts.weight, experts.device
    if device.type == "meta":
        return replace(experts, gated=True)
    order = gated_order(experts.n, device)
    rows = torch.arange(weight.n, device=device).view(experts.experts, experts.n_pad)
    rows[:, : experts.n] = rows[:, order]  # those of padding stay
    position, from_rows = group_vector_positions(weight.n, device), rows.flatten()
    from_positions = torch.empty_like(position)
    from_positions[position] = position[from_rows]
    changed: dict[str, Any] = {}
    for part in EIGHTS_PARTS:
        if (values := getattr(weight, part)) is not None:
            changed[part] = values.index_select(
                values.dim() - 1, from_rows if part == "bias" else from_positions
            )
    codes = torch.empty_like(weight.codes)
    for own, made in zip(
        weight.codes.view(experts.experts, -1), codes.view(experts.experts, -1), strict=True
    ):
        natural = unpack_codes(own, experts.n, weight.k, weight.bits)
        made.copy_(pack_codes(natural.index_select(0, order), weight.bits))
    return replace(experts, weight=replace(weight, codes=codes, **changed), gated=True)
