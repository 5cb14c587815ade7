"""The arguments of a product besides x and the weight, as one record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C, reference
from ..weights.packed_weight import PackedWeight
from .native import ACTIVATIONS, data_type, named_activation, pointer


class Call(NamedTuple):
    """How a product, a convolution or a layer of experts was called; the arguments are
    checked, and named as those of :func:`cutlass_ops.mixed_gemm`. Those that an operator
    lacks have their defaults.

    Attributes:
        activation: the name alone; :attr:`named_activation` is what users write.
        low, high: the numbers of an activation that has two.
    """

    bias: Tensor | None = None
    activation: str | None = None
    low: float = 0.0
    high: float = 0.0
    residual: Tensor | None = None
    out_dtype: torch.dtype = torch.float32
    saturate: bool = False
    act_quant: str = "none"
    act_symmetric: bool = True
    batch_invariant: bool = False
    architecture: int = 0
    exact: bool = False

    @property
    def named_activation(self) -> reference.Activation:
        """The activation as the reference takes it."""
        return named_activation(self.activation, self.low, self.high)

    def bias_of(self, weight: PackedWeight) -> Tensor | None:
        """The bias, which the call or the weight has."""
        return weight.bias if self.bias is None else self.bias

    def epilogue(self, bias: Tensor | None, residual: Tensor | None) -> _C.Epilogue | None:
        """Bias, activation and residual for the sums, or None if the sums are only rounded.

        residual is a matrix whose rows are contiguous.
        """
        if bias is None and residual is None and self.activation is None and not self.saturate:
            return None
        return _C.Epilogue(
            pointer(bias),
            data_type(bias),
            pointer(residual),
            data_type(residual),
            0 if residual is None else residual.stride(0),
            ACTIVATIONS[self.activation],
            self.low,
            self.high,
            self.saturate,
        )

    def without_tensors(self) -> Call:
        """The call without bias and residual."""
        return (
            self
            if self.bias is None and self.residual is None
            else self._replace(bias=None, residual=None)
        )

    def before_activation(self) -> Call:
        """The call whose result is this one's before its activation, in fp32."""
        return self._replace(
            activation=None,
            low=0.0,
            high=0.0,
            residual=None,
            out_dtype=torch.float32,
            saturate=False,
        )


_TYPES = {
    "bias": "Tensor?",
    "activation": "str?",
    "low": "float",
    "high": "float",
    "residual": "Tensor?",
    "out_dtype": "ScalarType",
    "saturate": "bool",
    "act_quant": "str",
    "act_symmetric": "bool",
    "batch_invariant": "bool",
    "architecture": "int",
    "exact": "bool",
}


class CallSchema:
    """A :class:`Call` as the last arguments of an operator of torch.library, which lacks the
    fields ``without``.

    Attributes:
        text: the arguments in the operator's schema.
    """

    def __init__(self, *without: str) -> None:
        self._names = [name for name in Call._fields if name not in without]
        self.text = ", ".join(f"{_TYPES[name]} {name}" for name in self._names)

    def values(self, call: Call) -> list[Any]:
        """The arguments."""
        return [getattr(call, name) for name in self._names]

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Call]:
        """The operator's arguments before those of the call, and the call."""
        before = len(args) - len(self._names)
        return args[:before], Call(**dict(zip(self._names, args[before:], strict=True)))

    def place(self, name: str) -> int:
        """The index of a field in the operator's arguments, from the end."""
        return self._names.index(name) - len(self._names)
