"""A linear layer over a packed weight, and the replacement of a model's linear layers by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .weight import PARTS, PackedWeight

_ACT_QUANT = ("none", "token", "block")


class MixedLinear(nn.Module):
    """``y = act(x @ W.T + bias)`` with ``W`` packed: :func:`cutlass_ops.mixed_gemm` as a module.

    The packed tensors are buffers, so ``state_dict``, ``.to(device)`` and ``.cuda()`` treat them as any other. They
    keep their dtypes under ``.half()`` and ``.to(dtype)``: scales are part of the checkpoint, not of the computation.
    No gradient flows through this layer.

    Attributes:
        in_features, out_features: K and N.
        act_quant: how x is quantised: "none", "token" or "block".
        act_symmetric: whether quantised activations have no zero point. Unused with "none".
        activation: None, "relu", "relu6", "gelu", "silu" or ``("clamp", lo, hi)``; applied after the bias.

    Raises:
        ValueError: an ``act_quant`` that does not exist.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    bias: Tensor | None
    perm: Tensor | None
    book: Tensor | None

    def __init__(
        self,
        packed: PackedWeight,
        act_quant: str = "none",
        act_symmetric: bool = True,
        activation: str | tuple[str, float, float] | None = None,
    ) -> None:
        super().__init__()
        if act_quant not in _ACT_QUANT:
            raise ValueError(f"act_quant is {act_quant!r}; supported are {', '.join(map(repr, _ACT_QUANT))}")
        self.out_features, self.in_features = packed.shape
        self.act_quant = act_quant
        self.act_symmetric = act_symmetric
        self.activation = activation
        for name in PARTS:
            self.register_buffer(name, getattr(packed, name))
        self._packed = packed

    @property
    def packed(self) -> PackedWeight:
        """The weight as this layer's buffers hold it now; it shares their memory."""
        return self._packed

    def _view_buffers(self) -> None:
        # Checked once here rather than at every forward, which has microseconds to spare, not tens of them.
        self._packed = replace(self._packed, **{name: getattr(self, name) for name in PARTS})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MixedLinear:
        module: Any = super()  # torch has no types here
        # Seen as bytes, tensors follow every move and escape every change of dtype.
        module._apply(lambda t: fn(t.view(torch.uint8)).view(t.dtype), recurse)
        self._view_buffers()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # load_state_dict(assign=True) puts other tensors in the buffers' places.
        self._view_buffers()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x ``[..., K]`` by the weight; returns ``[..., N]`` of x's dtype."""
        return ops.mixed_gemm(
            x,
            self._packed,
            activation=self.activation,
            act_quant=self.act_quant,
            act_symmetric=self.act_symmetric,
        )

    def extra_repr(self) -> str:
        """Sizes, format and activation mode, as ``print(model)`` shows them."""
        kind = next((name for name in ("zeros", "offsets", "book") if getattr(self, name) is not None), "symmetric")
        parts = [
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}",
            f"bits={self._packed.bits}, group_size={self._packed.group_size}, {kind}, act_quant={self.act_quant!r}",
        ]
        if self.act_quant != "none":
            parts.append(f"act_symmetric={self.act_symmetric}")
        if self.activation is not None:
            parts.append(f"activation={self.activation!r}")
        return ", ".join(parts)


def replace_linears(
    model: nn.Module,
    packed: Mapping[str, PackedWeight],
    act_quant: str = "none",
    act_symmetric: bool = True,
) -> list[str]:
    """Put a :class:`MixedLinear` in the place of each linear layer that ``packed`` names.

    A layer's own bias is kept where the packed weight has none. Every name is checked before the first layer is
    replaced, so that an error leaves the model as it was. A packed weight stays on its device; move the model after.

    Args:
        model: any module; changed in place.
        packed: weights by the layer's qualified name, as in ``model.named_modules()``: "model.layers.0.mlp.up_proj".
        act_quant, act_symmetric: as in :class:`MixedLinear`.

    Returns:
        The replaced names, in the order of ``packed``.

    Raises:
        ValueError: a name that the model does not have, or a weight of another shape than the layer's.
        TypeError: a named module that is not ``torch.nn.Linear``, or a value that is not a PackedWeight.
    """
    modules = dict(model.named_modules())
    layers: dict[str, MixedLinear] = {}
    for name, weight in packed.items():
        if not isinstance(weight, PackedWeight):
            raise TypeError(f"{name!r}: the weight is a {type(weight).__name__}; a PackedWeight is expected")
        linear = modules.get(name)
        if not name or linear is None:
            raise ValueError(f"{name!r}: the model has no module of that name inside it")
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{name!r}: the module is a {type(linear).__name__}; torch.nn.Linear is expected")
        shape = (linear.out_features, linear.in_features)
        if weight.shape != shape:
            raise ValueError(f"{name!r}: the packed weight is {list(weight.shape)}; the layer is {list(shape)}")
        if weight.bias is None and linear.bias is not None:
            weight = replace(weight, bias=linear.bias.detach().to(weight.device))
        layers[name] = MixedLinear(weight, act_quant, act_symmetric)
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        layer.train(modules[name].training)
        setattr(modules[parent], child, layer)
    return list(layers)
