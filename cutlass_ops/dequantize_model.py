"""Packed layers of a model as float layers again, for ``model.dequantize()`` of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .nn import FusedPart, MixedLinear
from .nn_conv import MixedConv
from .nn_experts import MixedExperts


def put_floats(model: nn.Module, plain: nn.Module, dtype: torch.dtype) -> None:
    """Replace the packed layers of a model by float layers with their values.

    Layers that were fused become the separate layers that they were.

    Args:
        model: changed in place, one layer after another.
        plain: the model as its class makes it, on the meta device; its layers are taken.
        dtype: of the weights and biases.

    Raises:
        ValueError: a layer whose tensors are offloaded; nothing was changed.
    """
    packed = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, MixedLinear | FusedPart | MixedExperts | MixedConv)
    }
    for name, module in packed.items():
        if any(buffer.is_meta for buffer in module.buffers()):
            raise ValueError(f"{name!r} is offloaded: its tensors are not in memory; load the model without offloading")
    made: dict[nn.Module, nn.Module] = {}
    for name, module in packed.items():
        parent, _, child = name.rpartition(".")
        if getattr(module, "shared_by", ()):  # its parts become layers
            delattr(model.get_submodule(parent), child)
            continue
        if module not in made:
            made[module] = _float_layer(module, _plain_layer(plain, name), dtype)
        setattr(model.get_submodule(parent), child, made[module])


def _plain_layer(plain: nn.Module, name: str) -> nn.Module | None:
    try:
        return plain.get_submodule(name)
    except AttributeError:  # a layer that was put into the model, or wrapped
        return None


def _float_layer(module: Any, layer: Any, dtype: torch.dtype) -> nn.Module:
    if layer is None and isinstance(module, MixedLinear | FusedPart):
        layer = nn.Linear(module.in_features, module.out_features, device="meta")
    if layer is None:
        raise ValueError(f"a {type(module).__name__} is in the place of a module that the model's class does not make")
    if isinstance(module, MixedExperts):
        products = (("gate_up_proj", module.gate_up_proj), ("down_proj", module.down_proj))
        values: dict[str, Tensor | None] = {
            part: torch.stack([ops.dequantize(weight, dtype) for weight in product.packed.unpack()])
            for part, product in products
        }
    else:
        packed = module.packed
        weight = ops.dequantize(packed, dtype)
        if not isinstance(module, MixedConv) and not isinstance(layer, nn.Linear):
            weight = weight.t().contiguous()  # transformers' Conv1D
        values = {"weight": weight, "bias": packed.bias}
    for part, value in values.items():
        layer.register_parameter(part, None if value is None else nn.Parameter(value.to(dtype)))
    layer.train(module.training)
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(layer, module._hf_hook)
    moved: nn.Module = layer
    return moved
