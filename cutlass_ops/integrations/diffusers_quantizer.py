"""Packed models of diffusers: importing this module registers ``quant_method`` "cutlass_ops" there.

It is imported as soon as both packages are (see ``registration.py``); a user need not.
``save_pretrained`` of a model whose linear layers :func:`cutlass_ops.quantize_model` packed, or its
convolutions :func:`cutlass_ops.replace_convs`, then writes a ``quantization_config``, as
``packed_config.py`` describes it, from which ``from_pretrained`` makes the packed layers again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from ..files.packed_config import QUANT_METHOD, weight_format
from ..files.packed_file import kernels_metadata, packed_problem, weights_metadata
from ..nn.architecture import features
from ..nn.buffers import marked
from ..nn.conv import CONVOLUTIONS, MixedConv
from ..nn.embedding import MixedEmbedding, TiedEmbedding
from ..nn.linear import MixedLinear
from .packed_model import describe, put_floats, without_values

_PACKED = (MixedLinear, MixedConv, MixedEmbedding)


class _Method(str, enum.Enum):
    CUTLASS_OPS = QUANT_METHOD  # diffusers reads its .value


# diffusers is not typed, for mypy.
class CutlassOpsDiffusersConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` of a packed model, as ``packed_config.py`` describes it: each
    key an attribute.

    Raises:
        ValueError: an unknown layout or an invalid format.
    """

    def __init__(self, **fields: Any) -> None:
        weight_format({**fields, "modules_to_not_convert": []}, "")
        self.__dict__.update(fields)
        self.quant_method = _Method.CUTLASS_OPS

    def to_diff_dict(self) -> dict[str, Any]:
        """What ``repr`` shows: all keys."""
        fields: dict[str, Any] = self.to_dict()
        return fields


class CutlassOpsDiffusersQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Makes packed layers for the tensors of a packed model, and checks what was loaded."""

    requires_calibration = True  # so that diffusers refuses a model that is not packed

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to keep weights on the disk.

        Raises:
            ValueError: a ``device_map`` that does.
        """
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map has 'disk', where diffusers would convert the scales of packed weights"
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config.to_dict()
        treatment = config.get("act_quant", "none"), config.get("act_symmetric", True)
        for name, module in list(model.named_modules()):
            packed_embedding = name in config.get("embeddings", {}) and isinstance(
                module, nn.Embedding
            )
            if packed_embedding or isinstance(module, CONVOLUTIONS) or features(module) is not None:
                form = weight_format(config, name)
                if form is not None:
                    model.set_submodule(name, without_values(module, form, *treatment))
        model.register_to_config(quantization_config=self.quantization_config)

    def update_missing_keys(self, model: Any, missing_keys: list[str], prefix: str) -> list[str]:
        """The tensors that the files lack.

        Raises:
            ValueError: some of a packed layer.
        """
        if lost := sorted(name for name in missing_keys if _packed_layer(model, name) is not None):
            raise ValueError(f"the model's files lack {', '.join(lost[:8])}, of packed layers")
        return missing_keys

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, state_dict: Any, **kwargs: Any
    ) -> bool:
        """Whether a tensor is one of a packed layer."""
        return _packed_layer(model, param_name) is not None

    def check_quantized_param_shape(
        self, param_name: str, current_param: Tensor, loaded_param: Tensor
    ) -> bool:
        """Refuse: this is called where shapes differ.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"tensor {param_name!r} is {list(loaded_param.shape)}; the layer's is "
            f"{list(current_param.shape)}"
        )

    def create_quantized_param(
        self,
        model: Any,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        state_dict: Mapping[str, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Put a tensor of the file into its layer; it keeps its dtype, whatever the model's dtype
        is.
        """
        layer = _packed_layer(model, param_name)
        assert layer is not None
        layer._buffers[param_name.rpartition(".")[2]] = state_dict[param_name].to(target_device)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for name, layer in model.named_modules():
            if isinstance(layer, _PACKED):
                layer.view_buffers()
                if problem := packed_problem(layer.packed):
                    raise ValueError(f"tensor {f'{name}.{problem[0]}'!r} {problem[1]}")

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Tensor], safe_serialization: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors that ``save_pretrained`` writes: those of packed layers, without the marks.

        Raises:
            ValueError: packed layers that the configuration does not describe.
        """
        config = self.quantization_config.to_dict()
        marks = marked(state_dict)
        for key, form in marks.items():
            name, _, part = key.rpartition(".")
            if "fused_rows" in form or part != "weight" or weight_format(config, name) is None:
                raise ValueError(
                    f"{key!r} is packed, and the model's configuration does not say so: "
                    "layers are saved that "
                    "quantize_model, replace_linears or replace_convs of the whole model packed, "
                    "before they are fused"
                )
        forms = {key.rpartition(".")[0]: form for key, form in marks.items()}
        weights = {
            name: (*form["shape"], form["bits"], form["group_size"]) for name, form in forms.items()
        }
        kernels = kernels_metadata({name: form["kernel_size"] for name, form in forms.items()})
        stored = {name: tensor for name, tensor in state_dict.items() if name not in marks}
        return stored, {"weights": weights_metadata(weights), **kernels}

    def _dequantize(self, model: Any) -> Any:
        with torch.device("meta"):
            plain = type(model).from_config(model.config)
        put_floats(model, plain, model.dtype)
        model._internal_dict = FrozenDict(
            {k: v for k, v in model.config.items() if k != "quantization_config"}
        )
        return model

    @property
    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether packed weights are trained: no, they are frozen; gradients flow through them."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` traces through: yes."""
        return True


def _packed_layer(model: nn.Module, tensor: str) -> MixedLinear | MixedConv | MixedEmbedding | None:
    layer = model.get_submodule(tensor.rpartition(".")[0])
    return layer if isinstance(layer, _PACKED) else None


def check_method(model: Any) -> None:
    """Raise ValueError for a model that another method quantised: a model is saved by one."""
    other = getattr(model, "hf_quantizer", None)
    if other is not None and not isinstance(other, CutlassOpsDiffusersQuantizer):
        raise ValueError(
            f"the model is quantised by {other.quantization_config.quant_method.value!s} already"
        )


def attach(model: Any) -> None:
    """Let a model's configuration describe its packed layers, so that ``save_pretrained`` and
    similar methods handle them.

    Raises:
        ValueError: as :func:`describe`; and embeddings that are tied to other layers.
    """
    if names := [
        name for name, module in model.named_modules() if isinstance(module, TiedEmbedding)
    ]:
        raise ValueError(
            f"tied embeddings are not saved in models of diffusers: {', '.join(names)}"
        )
    config = CutlassOpsDiffusersConfig(**describe(model))
    model.hf_quantizer = CutlassOpsDiffusersQuantizer(config)
    model.is_quantized = True
    model.quantization_method = config.quant_method
    model.register_to_config(quantization_config=config)


auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = CutlassOpsDiffusersQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = CutlassOpsDiffusersConfig
