"""LoRA of PEFT on packed layers: importing this module makes peft's LoRA know MixedLinear and FusedPart.

It is imported as soon as both packages are (see ``registration.py``); a user need not.
``target_modules`` by name and "all-linear" then find packed layers as they find
``torch.nn.Linear``. The packed weight stays as it is: adapters cannot be merged into it. Packed
experts have no adapters: PEFT adds those of parameters (``target_parameters``) to the values, which
are not there.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import tuners_utils
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.layer import Linear
from torch import nn

from ..nn.experts import ExpertWeights, MixedExperts
from ..nn.linear import FusedPart, MixedLinear
from ..nn.model_experts import PRODUCTS


class PackedLoraLinear(Linear):  # type: ignore[misc]  # peft has no types
    """A low-rank adapter beside a packed layer; adapters are fp32, and the result has the dtype of the packed layer's.

    Raises:
        ValueError: a variant of LoRA, or an initialisation, that reads or writes the weight; a layer that is not called.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> None:
        layer = base_layer.get_base_layer() if isinstance(base_layer, tuners_utils.BaseTunerLayer) else base_layer
        if names := getattr(layer, "shared_by", ()):
            raise ValueError(
                f"the layer is called by {', '.join(names)} alone, whose results it computes: "
                "name those in target_modules, or do not fuse layers"
            )
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter."""
        if config.init_lora_weights not in (True, False, "gaussian"):
            raise ValueError(
                f"init_lora_weights is {config.init_lora_weights!r}, which needs the weight's values; on a "
                f"{type(self.get_base_layer()).__name__} True, False and 'gaussian' are supported"
            )
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA alone: others read the weight."""
        return {(): None}

    def _get_in_out_features(self, module: nn.Module) -> tuple[Any, Any]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, None]:
        # A packed weight's dtypes are not those of x.
        layer: Any = base_layer._shared.layer if isinstance(base_layer, FusedPart) else base_layer
        return layer.codes.device, None

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "LoRA weights cannot be merged into a packed weight: its codes would have to be rounded again. "
            "Keep the adapter beside it, or merge it into float weights and quantise those: "
            "a model of transformers becomes float with model.dequantize(), before the adapter is loaded into it"
        )

    def unmerge(self) -> None:
        """Refuse, as :meth:`merge` does."""
        self.merge()


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module, MixedLinear | FusedPart)


def _refuse_experts(name: str) -> None:
    raise ValueError(
        f"{name!r} is of packed experts, whose weights have no values that LoRA could be added to: name other layers in "
        "target_modules, as ['q_proj', 'k_proj', 'v_proj', 'o_proj'], whose gradients flow through packed experts (where PEFT "
        "takes gate_proj, up_proj and down_proj, or 'all-linear', for those of experts too); or keep experts as floats "
        "(quantize_model(model, skip=('lm_head', 'experts')), reorder --exclude experts, model.dequantize())"
    )


def _register() -> None:
    dispatch = lora_model.dispatch_default
    inject_parameters = tuners_utils.BaseTuner._inject_parameters
    replace_module = lora_model.LoraModel._replace_module
    include_all_linear = tuners_utils._maybe_include_all_linear_layers

    def dispatch_packed(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
        base = target.get_base_layer() if isinstance(target, tuners_utils.BaseTunerLayer) else target
        if isinstance(base, MixedExperts | ExpertWeights):
            _refuse_experts(str(kwargs.get("current_key") or type(base).__name__))
        if not _is_packed(base) or kwargs.get("parameter_name") is not None:
            return dispatch(target, adapter_name, config=config, **kwargs)  # type: ignore[no-any-return]
        return PackedLoraLinear(target, adapter_name, config, **kwargs)

    def replace_packed(self: Any, parent: nn.Module, name: str, new_module: nn.Module, child: nn.Module) -> None:
        # peft moves adapters to where the first parameter is; a packed layer has none, and its adapters are there already.
        if isinstance(new_module, PackedLoraLinear):
            setattr(parent, name, new_module)
        else:
            replace_module(self, parent, name, new_module, child)

    def include_packed(config: Any, model: nn.Module) -> Any:
        everything = str(getattr(config, "target_modules", "")).lower() == tuners_utils.INCLUDE_LINEAR_LAYERS_SHORTHAND
        config = include_all_linear(config, model)
        if everything:
            output_embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
            head = output_embeddings()
            inside = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, tuners_utils.BaseTunerLayer))
            config.target_modules |= {
                name
                for name, module in model.named_modules()
                if _is_packed(module)
                and module is not head
                and not getattr(module, "shared_by", ())
                and not name.startswith(inside)
            }
        return config

    def inject_float(self: Any, peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            for parameter in PRODUCTS if isinstance(module, MixedExperts) else ():
                key = f"{name}.{parameter}"
                if any(f".{key}".endswith(f".{target}") for target in peft_config.target_parameters):
                    _refuse_experts(key)
        return inject_parameters(self, peft_config, model, *args, **kwargs)

    tuners_utils.BaseTuner._inject_parameters = inject_float
    lora_model.dispatch_default = dispatch_packed
    lora_model.LoraModel._replace_module = replace_packed
    tuners_utils._maybe_include_all_linear_layers = include_packed


_register()
