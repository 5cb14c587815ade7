"""Layers of a float model of transformers that are packed as soon as their tensors are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..nn.quantize_model import Layer, check_skip, layers_to_quantize, packed_layer
from .hf_config import CutlassOpsConfig


class OnLoad:
    """A receiver of the tensors of a float model, which transformers' loader passes one after
    another.

    A layer is packed when it has all its tensors, which are dropped then. The packed layers are put
    into the model by :meth:`finish`, since transformers initialises and moves float layers until
    all is loaded. Layers that are not packed here load as they do without quantisation, and
    :func:`cutlass_ops.quantize_model` quantises them later: layers with tied weights, and layers
    whose tensors do not have the shapes and dtypes that the model expects.

    Args:
        model: the model, on the meta device.
        config: how its layers are quantised.

    Raises:
        ValueError: ``skip`` has names that the model lacks.
    """

    def __init__(self, model: Any, config: CutlassOpsConfig) -> None:
        self.options = config.options()
        check_skip(model, config.skip or ())
        chosen, _ = layers_to_quantize(
            model, config.skip, config.bits, config.convs, config.embeddings
        )
        ties = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        self.layers = {layer.name: layer for layer in chosen if _loads_alone(layer, ties)}
        self.packed: list[tuple[Layer, nn.Module]] = []

    def takes(self, tensor: str) -> bool:
        """Whether a tensor of the model is one of a layer that is packed when it is read."""
        return tensor.rpartition(".")[0] in self.layers

    def convert(
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Take the tensors of layers to pack; returns the others."""
        others: dict[str, Any] = {}
        for name, values in input_dict.items():
            value = values[0] if isinstance(values, list) else values
            path, _, part = name.rpartition(".")
            layer = self.layers.get(path)
            if layer is None or not _expected(value, layer.module._parameters.get(part)):
                self.layers.pop(path, None)
                others[name] = values
                continue
            layer.module._parameters[part] = _parameter(value)
            if missing_keys is not None:
                missing_keys.discard(name)
            if not any(parameter.is_meta for parameter in _parameters(layer).values()):
                self.packed.append((layer, packed_layer(layer.module, **self.options)))
                for other, parameter in _parameters(layer).items():
                    layer.module._parameters[other] = _parameter(
                        torch.empty_like(parameter, device="meta")
                    )
        return others

    def finish(self) -> None:
        """Put the packed layers into the model."""
        for layer, packed in self.packed:
            packed.train(layer.module.training)
            layer.put(packed)


def _loads_alone(layer: Layer, ties: set[str]) -> bool:
    """Whether a layer's tensors are its own, and of the dtype in which the model is loaded."""
    own = (
        len(layer.places) == 1
        and not layer.tied
        and not ties & {f"{layer.name}.{part}" for part in _parameters(layer)}
    )
    return own and all(
        parameter.dtype == torch.get_default_dtype() for parameter in _parameters(layer).values()
    )


def _parameters(layer: Layer) -> dict[str, nn.Parameter]:
    return {part: value for part, value in layer.module._parameters.items() if value is not None}


def _expected(value: Tensor, parameter: Tensor | None) -> bool:
    """Whether a tensor of the files can be quantised. quantize_model, or transformers,
    says why it cannot.
    """
    return (
        parameter is not None
        and value.shape == parameter.shape
        and all(b.isfinite() for b in value.aminmax())
    )


def _parameter(value: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value, requires_grad=False)
    # transformers then leaves its values as they are.
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter
