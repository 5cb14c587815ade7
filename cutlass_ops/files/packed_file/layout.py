"""Names in a packed file, and the rank whose part of a model it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ...weights.weight import PARTS


@dataclass(frozen=True)
class Slices:
    """The rank whose part of a model a file holds (see ``tensor_parallel.py``).

    Attributes:
        rank, size: which of how many.
        styles: how each layer that is split is split, by its name.
    """

    rank: int
    size: int
    styles: Mapping[str, str]


def check_names(weights: Collection[str], tensors: Iterable[str]) -> None:
    """Refuse a tensor that a reader would take for a part of a weight, or for another tensor."""
    taken = {"__metadata__", *(f"{weight}.{part}" for weight in weights for part in PARTS)}
    for name in tensors:
        if name in taken:
            raise ValueError(
                f"tensor {name!r} cannot keep its name: in the packed file it means something else"
            )
        taken.add(name)
