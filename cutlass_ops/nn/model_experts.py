"""Experts modules of transformers: what they compute, and how their parameters hold an
expert's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..reference.experts import CLAMPED_SWIGLU
from ..weights.weight import FLOAT_TYPES

#: The products of a layer of experts, by the names that transformers has for their parameters.
PRODUCTS = (GATE_UP, DOWN) = ("gate_up_proj", "down_proj")

#: Activations of gate that experts and MLPs of transformers have, by their classes, as
#: :func:`cutlass_ops.mixed_gemm` names them.
GATES = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
}
#: Classes of experts that compute ``("clamped_swiglu", alpha, limit)``, of matrices ``[in, out]``
#: with biases, whose columns of gate and up alternate.
_CLAMPED = ("transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts",)
#: What transformers 5 says of experts modules that compute ``down(act(gate(x)) * up(x))``, of
#: matrices ``[out, in]`` and gate's before up's.
_PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
_CLAMPED_SAYS = {**_PLAIN, "has_bias": True, "is_transposed": True, "is_concatenated": False}


@dataclass(frozen=True)
class ExpertsForm:
    """An experts module of transformers that :class:`cutlass_ops.nn.MixedExperts`
    takes the place of.

    Attributes:
        activation: as in :func:`cutlass_ops.mixed_moe`.
        sizes: E, H and I.
        transposed: whether parameters are ``[E, K, N]``.
        interleaved: whether features of gate and up alternate in parameters; otherwise
            gate's come first.
        biased: whether there are parameters ``gate_up_proj_bias`` and
            ``down_proj_bias``, ``[E, N]``.
    """

    activation: reference.Activation
    sizes: tuple[int, int, int]
    transposed: bool = False
    interleaved: bool = False
    biased: bool = False

    def shape(self, product: str) -> tuple[int, int, int]:
        """``[E, N, K]`` of a product's weights, gate's rows before up's."""
        experts, hidden, intermediate = self.sizes
        return (
            (experts, 2 * intermediate, hidden)
            if product == GATE_UP
            else (experts, hidden, intermediate)
        )

    def rows(self, product: str) -> tuple[slice, ...]:
        """Which features of a product's parameters are gate's and which up's; or down's."""
        if product == DOWN:
            return (slice(None),)
        if self.interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(self.sizes[2]), slice(self.sizes[2], None)

    def parameter_shape(self, product: str) -> tuple[int, int, int]:
        """The shape of a product's parameter."""
        experts, n, k = self.shape(product)
        return (experts, k, n) if self.transposed else (experts, n, k)

    def matrix(self, values: Tensor) -> Tensor:
        """One expert's part of a parameter as ``[N, K]``, features in the parameter's order; a
        view.
        """
        return values.t() if self.transposed else values

    def from_parameter(self, product: str, values: Tensor) -> Tensor:
        """An expert's weight ``[N, K]`` or bias ``[N]``, gate's rows before up's, from its part of
        the parameter; a copy.
        """
        values = self.matrix(values) if values.dim() == 2 else values
        return torch.cat([values[rows] for rows in self.rows(product)])

    def to_parameter(self, product: str, values: Tensor) -> Tensor:
        """The inverse."""
        if product == GATE_UP and self.interleaved:
            values = torch.stack(values.chunk(2), 1).flatten(0, 1)
        return self.matrix(values) if values.dim() == 2 else values


def experts_form(module: Any) -> ExpertsForm | None:
    """What an experts module of transformers computes; None for other modules, and for experts of
    another formula.
    """
    clamped = qualified(type(module)) in _CLAMPED
    stated = _CLAMPED_SAYS if clamped else _PLAIN
    if any(getattr(module, name, None) is not value for name, value in stated.items()):
        return None
    activation: reference.Activation = None
    if clamped:
        activation = (CLAMPED_SWIGLU, float(module.alpha), float(module.limit))
    elif (activation := _activation_of_gate(module)) is None:
        return None
    parameters: Mapping[str, Any] = module._parameters
    if not all(
        type(p) is nn.Parameter and p.dtype in FLOAT_TYPES for p in parameters.values()
    ) or any(module.buffers()):
        return None
    if (down := parameters.get("down_proj")) is None or down.dim() != 3:
        return None
    experts, *sizes = down.shape
    hidden, intermediate = reversed(sizes) if clamped else sizes
    form = ExpertsForm(activation, (experts, hidden, intermediate), clamped, clamped, clamped)
    shapes = {product: form.parameter_shape(product) for product in PRODUCTS}
    biases = {f"{product}_bias": form.shape(product)[:2] for product in PRODUCTS if form.biased}
    return (
        form
        if {name: tuple(p.shape) for name, p in parameters.items()} == {**shapes, **biases}
        else None
    )


def _activation_of_gate(module: Any) -> str | None:
    # Without that function of transformers the formula is unknown.
    default = getattr(import_module("transformers.integrations.moe"), "_default_apply_gate", None)
    if default is None or getattr(type(module), "_apply_gate", None) is not default:
        return None
    return GATES.get(qualified(type(getattr(module, "act_fn", None))))


def qualified(kind: type) -> str:
    """A class's name with its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"
