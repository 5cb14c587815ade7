"""Packed models through ``from_pretrained``: importing this module tells transformers of ``quant_method`` "cutlass_ops".

It is imported as soon as both packages are (see ``hf.py``); a user need not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .model_directory import QUANT_METHOD, WeightFormat, weight_format
from .nn import FusedPart, MixedLinear
from .reorder import packed_problem, packed_specs, weights_metadata
from .weight import PARTS, PackedWeight


@register_quantization_config(QUANT_METHOD)
class CutlassOpsConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a packed model, as ``model_directory.py`` describes it: each key an attribute.

    Raises:
        ValueError: a layout that is not known, a format that means nothing, or another value of a wrong kind.
    """

    def __init__(self, **fields: Any) -> None:
        for key, kind in (("modules", dict), ("modules_to_not_convert", list), ("act_symmetric", bool), ("act_quant", str)):
            if not isinstance(fields.get(key, kind()), kind):
                raise ValueError(f"quantization_config: {key} is {fields[key]!r:.100}; a {kind.__name__} is expected")
        weight_format({**fields, "modules_to_not_convert": []}, "")
        self.__dict__.update(fields)
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]


def _without_values(linear: nn.Linear, form: WeightFormat) -> PackedWeight:
    """A packed weight in place of a layer's, of tensors that have shapes and dtypes alone."""
    dtypes = dict(form.tensors)
    if linear.bias is not None:
        dtypes.setdefault("bias", linear.bias.dtype)
    if unknown := dtypes.keys() - set(PARTS):
        raise ValueError(f"tensors names {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    n, k = linear.out_features, linear.in_features
    parts: dict[str, Any] = dict.fromkeys(PARTS)
    for part, (dtype, shape) in packed_specs(n, k, form.bits, form.group_size, dtypes).items():
        parts[part] = torch.empty(shape, dtype=dtype, device="meta")
    return PackedWeight(**parts, n=n, k=k, bits=form.bits, group_size=form.group_size)


@register_quantizer(QUANT_METHOD)
class CutlassOpsQuantizer(HfQuantizer):
    """Makes :class:`cutlass_ops.MixedLinear` layers for the tensors of a packed model, and checks what was loaded.

    Models are packed by ``cutlass-ops reorder``, never on the way. The ``dtype`` of ``from_pretrained`` is that of x, norms
    and embeddings; scales and zero points keep the checkpoint's.
    """

    requires_calibration = True  # so that transformers refuses a model that is not packed

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to leave weights on the disk.

        Raises:
            ValueError: a ``device_map`` with "disk".
        """
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map has 'disk'; packed weights can be on 'cpu' and CUDA devices")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config.to_dict()
        if part := config.get("tensor_parallel"):
            raise ValueError(f"the files hold one rank of a model that was split ({part!r:.22} ...); reorder it unsplit")
        named = config.get("modules", {}).keys() | set(config.get("modules_to_not_convert", ()))
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            # A model without its head knows its modules by shorter names than the file does.
            whole = f"{model.base_model_prefix}.{name}"
            form = weight_format(config, whole if name not in named and whole in named else name)
            if form is None:
                continue
            try:
                weight = _without_values(module, form)
            except (TypeError, ValueError) as error:
                raise ValueError(f"quantization_config of {name!r}: {error}") from error
            layer = MixedLinear(weight, config.get("act_quant", "none"), config.get("act_symmetric", True))
            model.set_submodule(name, layer)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, layer in model.named_modules():
            if not isinstance(layer, MixedLinear):
                continue
            for part, tensor in layer.named_buffers():
                # The mark that transformers gives to what it loaded. Memory that nothing was loaded into holds anything.
                if not getattr(tensor, "_is_hf_initialized", False):
                    raise ValueError(f"tensor {f'{name}.{part}'!r} is not in the model's files, or is of another size")
            layer.view_buffers()
            if problem := packed_problem(layer.packed):
                raise ValueError(f"tensor {f'{name}.{problem[0]}'!r} {problem[1]}")
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        """The model's own ``state_dict`` is saved, and the sizes of its packed weights as metadata of each file.

        Raises:
            ValueError: layers of the model were fused.
        """
        if any(isinstance(module, FusedPart) for module in model.modules()):
            raise ValueError("layers of the model are fused (cutlass_ops.fuse_linears); save it before that")
        layers = {name: module.packed for name, module in model.named_modules() if isinstance(module, MixedLinear)}
        return None, {"weights": weights_metadata({name: (w.n, w.k, w.bits, w.group_size) for name, w in layers.items()})}

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether gradients flow: no."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` traces through: yes."""
        return True
