"""Experts modules of transformers: what they compute, and how their parameters hold an expert's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from . import reference
from .weight import FLOAT_TYPES

#: The products of a layer of experts, by the names that transformers has for their parameters.
PRODUCTS = ("gate_up_proj", "down_proj")

#: Activations of gate that experts of transformers have, by their classes, as :func:`cutlass_ops.mixed_moe` names them.
_GATES = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "transformers.activations.GELUActivation": "gelu",
}
#: What transformers 5 says of experts modules that compute ``down(act(gate(x)) * up(x))``, of matrices ``[out, in]`` and gate's
#: before up's.
_PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}


@dataclass(frozen=True)
class ExpertsForm:
    """An experts module of transformers that :class:`cutlass_ops.nn.MixedExperts` takes the place of.

    Attributes:
        activation: of gate, as in :func:`cutlass_ops.mixed_moe`.
        sizes: E, H and I.
    """

    activation: reference.Activation
    sizes: tuple[int, int, int]

    def shape(self, product: str) -> tuple[int, int, int]:
        """``[E, N, K]`` of a product's weights, gate's rows before up's."""
        experts, hidden, intermediate = self.sizes
        return (experts, 2 * intermediate, hidden) if product == "gate_up_proj" else (experts, hidden, intermediate)

    def rows(self, product: str) -> tuple[slice, ...]:
        """Which rows of a product's weights are gate's and which up's; or down's."""
        intermediate = self.sizes[2]
        return (slice(intermediate), slice(intermediate, None)) if product == "gate_up_proj" else (slice(None),)


def experts_form(module: Any) -> ExpertsForm | None:
    """What an experts module of transformers computes; None for other modules, and for experts of another formula."""
    if any(getattr(module, name, None) is not value for name, value in _PLAIN.items()):
        return None
    # Of a transformers that has no such function nothing is known.
    default = getattr(import_module("transformers.integrations.moe"), "_default_apply_gate", None)
    if default is None or getattr(type(module), "_apply_gate", None) is not default:
        return None
    activation = _GATES.get(_qualified(type(getattr(module, "act_fn", None))))
    parameters: Mapping[str, Any] = module._parameters
    plain = all(type(p) is nn.Parameter and p.dim() == 3 and p.dtype in FLOAT_TYPES for p in parameters.values())
    if activation is None or parameters.keys() != set(PRODUCTS) or not plain or any(module.buffers()):
        return None
    experts, hidden, intermediate = parameters["down_proj"].shape
    form = ExpertsForm(activation, (experts, hidden, intermediate))
    return form if all(tuple(parameters[product].shape) == form.shape(product) for product in PRODUCTS) else None


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
