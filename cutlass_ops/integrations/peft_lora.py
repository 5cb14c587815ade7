"""Adapters of PEFT on packed layers: importing this module registers MixedLinear and FusedPart with
peft.

It is imported as soon as both packages are (see ``registration.py``); a user need not.
``target_modules`` by name and "all-linear" then find packed layers as they find
``torch.nn.Linear``, for LoRA and DoRA, IA3, MiSS, OFT and VeRA. DoRA dequantises the weight
in every call. The packed weight stays as it is: adapters cannot be merged into it. Packed
experts have no adapters: PEFT adds the adapters of parameters (``target_parameters``) to the float
values, which packed experts do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from peft.tuners import tuners_utils
from peft.tuners.ia3 import layer as ia3_layer
from peft.tuners.ia3 import model as ia3_model
from peft.tuners.lora import dora, variants
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.layer import Linear
from peft.utils import quantization_utils
from torch import Tensor, nn

from ..nn.buffers import PackedState
from ..nn.embedding import TiedEmbedding
from ..nn.experts import ExpertWeights, MixedExperts
from ..nn.linear import FusedPart, MixedLinear
from ..nn.model_experts import PRODUCTS
from ..ops.gemm import dequantize

#: Methods of PEFT that look for a backend and need nothing else for a packed layer.
_MODULES = [
    f"peft.tuners.{method}.{part}"
    for method in ("miss", "oft", "vera")
    for part in ("layer", "model")
]


def _refuse_merging() -> None:
    raise RuntimeError(
        "adapters cannot be merged into a packed weight: its codes would have to be rounded again. "
        "Keep the adapter beside it, or merge it into float weights and quantise those: "
        "a model of transformers becomes float with model.dequantize(), before the adapter "
        "is loaded into it"
    )


# peft is not typed, for mypy.
class PackedBackend(quantization_utils.QuantizationBackend):  # type: ignore[misc]
    """The interface to a packed layer that PEFT's methods need."""

    layer_type = "linear"
    backend_name = "cutlass_ops"

    def get_base_weight(self, base_layer: nn.Module) -> Tensor:
        """The values of the weight, fp32 ``[N, K]``."""
        return _values(base_layer)

    def set_base_weight(self, peft_layer: Any, weight_data: Tensor) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        _refuse_merging()


def _values(layer: Any) -> Tensor:
    return dequantize(layer.packed, dtype=torch.float32)


class _PackedDora(dora.DoraLinearLayer):  # type: ignore[misc]
    """The magnitudes of a packed layer's rows, trained; the weight is dequantised for their
    norms in every call.
    """

    def update_layer(
        self, *, base_layer: nn.Module, lora_A: Tensor, lora_B: Tensor, scaling: float
    ) -> None:
        """Begin with the norms of the weight's rows, ``[N]``."""
        norms = self.get_weight_norm(_values(base_layer), lora_B @ lora_A, scaling)
        self.weight = nn.Parameter(norms.detach())

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Module,
        lora_B: nn.Module,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """The term that is added to the layer's result; ``base_result`` is that result, unless
        dropout changed x.
        """
        values = _values(base_layer)
        adapter = self.get_lora_weight(lora_A=lora_A, lora_B=lora_B, adapter_name=adapter_name)
        norms = self.get_weight_norm(
            values, adapter.detach(), scaling, adapter_name=adapter_name
        ).detach()
        scale = self.weight / norms  # the paper's section 4.3 takes the norm as a constant
        bias = base_layer.packed.bias
        if base_result is None:
            base_result = nn.functional.linear(x, values.to(x.dtype))
        elif bias is not None:
            base_result = base_result - bias
        result: Tensor = (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling
        return result


class _DoraVariant(variants.DoraLinearVariant):  # type: ignore[misc]
    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        if not module.lora_magnitude_vector:  # the first adapter of this kind
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        layer = _PackedDora(fan_in_fan_out=False)
        factors = {
            name: getattr(module, name)[adapter_name].weight for name in ("lora_A", "lora_B")
        }
        layer.update_layer(
            base_layer=module.get_base_layer(), scaling=module.scaling[adapter_name], **factors
        )
        module.lora_magnitude_vector[adapter_name] = layer


class PackedLoraLinear(Linear):  # type: ignore[misc]
    """A low-rank adapter beside a packed layer; adapters are fp32, and the result has the dtype of
    the packed layer's.

    Raises:
        ValueError: a variant of LoRA other than DoRA, or an initialisation, that reads or writes
            the weight; a layer that is not called.
    """

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any
    ) -> None:
        """Add an adapter."""
        if config.init_lora_weights not in (True, False, "gaussian"):
            raise ValueError(
                f"init_lora_weights is {config.init_lora_weights!r}, which needs the "
                "weight's values; on a "
                f"{type(self.get_base_layer()).__name__} True, False and 'gaussian' are supported"
            )
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[Any, Any]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Only plain LoRA and DoRA: other variants read or write the weight."""
        return {(): None, ("use_dora",): _DoraVariant}

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        _refuse_merging()

    def unmerge(self) -> None:
        """Refuse, as :meth:`merge` does."""
        self.merge()


class PackedIA3Linear(ia3_layer.Linear):  # type: ignore[misc]
    """A learnt factor for each output of a packed layer, or each input of a feed-forward one."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: Any,
        is_feedforward: bool = False,
        **kwargs: Any,
    ) -> None:
        nn.Module.__init__(self)
        # The same as in the base class, which recognises layers by their types.
        self.base_layer = base_layer
        self.ia3_l = nn.ParameterDict()
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.is_feedforward = is_feedforward
        layer = self.get_base_layer()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.fan_in_fan_out = self.is_target_conv_1d_layer = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config=config)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        _refuse_merging()

    def unmerge(self) -> None:
        """Refuse, as :meth:`merge` does."""
        _refuse_merging()


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module, MixedLinear | FusedPart)


def _base(target: Any) -> Any:
    return target.get_base_layer() if isinstance(target, tuners_utils.BaseTunerLayer) else target


def _check_called(layer: nn.Module) -> None:
    if names := getattr(layer, "shared_by", ()):
        raise ValueError(
            f"the layer is called by {', '.join(names)} alone, whose results it computes: "
            "name those in target_modules, or do not fuse layers"
        )
    if isinstance(layer, MixedLinear) and layer.packed.gated:
        raise ValueError(
            "the layer has a gated weight, gate and up as one: make layers of gate and up apart, "
            "which fuse_linears joins, and name those in target_modules"
        )


def _device(layer: Any) -> torch.device:
    device: torch.device = (layer.shared if isinstance(layer, FusedPart) else layer).codes.device
    return device


def _replace(name: str, home: Any, replacement: Callable[[Any], Any]) -> None:
    """Replace a function of PEFT by ``replacement`` of it, in its module and in the modules of the
    methods that import it.
    """
    original = getattr(home, name)
    new = replacement(original)
    for module in (home, *map(import_module, _MODULES)):
        if vars(module).get(name) is original:  # PEFT 0.20 has no backends for OFT
            setattr(module, name, new)


def _refuse_experts(name: str) -> None:
    raise ValueError(
        f"{name!r} is of packed experts, whose weights have no values that LoRA could be added to: "
        "name other layers in "
        "target_modules, as ['q_proj', 'k_proj', 'v_proj', 'o_proj'], whose gradients flow through "
        "packed experts (where PEFT "
        "takes gate_proj, up_proj and down_proj, or 'all-linear', for those of experts too); or "
        "keep experts as floats "
        "(quantize_model(model, skip=('lm_head', 'experts')), reorder --exclude experts, "
        "model.dequantize())"
    )


def _has_bias(layer: Any) -> bool:
    return (isinstance(layer, FusedPart) and layer.has_bias) or any(
        "bias" in name for name, _ in layer.named_buffers(recurse=False)
    )


def _check_trained(config: Any, model: nn.Module) -> None:
    """Refuse a configuration that trains tensors of packed layers, beside their adapters.

    Raises:
        ValueError: it names them.
    """
    packed = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PackedState | TiedEmbedding)
    }
    for saved in getattr(config, "modules_to_save", None) or ():
        for name, module in packed.items():
            if name.endswith(saved):
                skip = tuple(dict.fromkeys(("lm_head", saved)))
                raise ValueError(
                    f"modules_to_save has {saved!r}, and {name} is packed "
                    f"({type(module).__name__}): packed weights are not trained. Keep it as "
                    f"floats (quantize_model(model, skip={skip!r}), reorder --exclude, "
                    "model.dequantize()), or leave it out"
                )
    bias, targets = getattr(config, "bias", "none"), getattr(config, "target_modules", None)
    if not isinstance(bias, str) or bias == "none":
        return
    for name, layer in packed.items():
        adapted = bias == "all" or (
            targets is None
            or targets == tuners_utils.INCLUDE_LINEAR_LAYERS_SHORTHAND
            or tuners_utils.check_target_module_exists(config, name)
        )
        if adapted and _has_bias(layer):
            raise ValueError(
                f"bias is {bias!r}, and the bias of {name} is a buffer of a packed layer, which is "
                "not trained; bias='none' is supported on packed layers with biases"
            )


def _sizes(original: Any) -> Any:
    def sizes(module: Any) -> Any:
        return (module.in_features, module.out_features) if _is_packed(module) else original(module)

    return sizes


def _backend(original: Any) -> Any:
    def backend(base_layer: nn.Module, **kwargs: Any) -> Any:
        if _is_packed(base_layer):
            _check_called(base_layer)
            return PackedBackend()
        return original(base_layer, **kwargs)

    return backend


def _all_linear(original: Any) -> Any:
    def all_linear(config: Any, model: nn.Module) -> Any:
        everything = (
            str(getattr(config, "target_modules", "")).lower()
            == tuners_utils.INCLUDE_LINEAR_LAYERS_SHORTHAND
        )
        config = original(config, model)
        if everything:
            output_embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
            head = output_embeddings()
            inside = tuple(
                f"{n}."
                for n, m in model.named_modules()
                if isinstance(m, tuners_utils.BaseTunerLayer)
            )
            config.target_modules |= {
                name
                for name, module in model.named_modules()
                if _is_packed(module)
                and module is not head
                and not getattr(module, "shared_by", ())
                and not name.startswith(inside)
            }
        return config

    return all_linear


def _replacing(original: Any) -> Any:
    def replace_module(
        self: Any, parent: nn.Module, name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        # peft moves adapters to the device of the first parameter; a packed layer has no parameter,
        # and its adapters are already on its device.
        if isinstance(new_module, tuners_utils.BaseTunerLayer) and _is_packed(
            new_module.get_base_layer()
        ):
            setattr(parent, name, new_module)
        else:
            original(self, parent, name, new_module, child)

    return replace_module


def _register() -> None:
    dispatch = lora_model.dispatch_default
    create_ia3 = ia3_model.IA3Model._create_new_module
    inject_parameters = tuners_utils.BaseTuner._inject_parameters
    device_and_dtype = tuners_utils.BaseTunerLayer._get_base_layer_device_and_dtype
    inject, check_merge = (
        tuners_utils.BaseTuner.inject_adapter,
        tuners_utils.BaseTuner._check_merge_allowed,
    )

    def inject_checked(
        self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        _check_trained(self.peft_config[adapter_name], model)
        return inject(self, model, adapter_name, *args, **kwargs)

    def check_merge_of_floats(self: Any) -> None:
        # before the first layer is merged
        if any(
            isinstance(module, tuners_utils.BaseTunerLayer) and _is_packed(module.get_base_layer())
            for module in self.model.modules()
        ):
            _refuse_merging()
        check_merge(self)

    def dispatch_packed(
        target: nn.Module, adapter_name: str, config: Any, **kwargs: Any
    ) -> nn.Module | None:
        base = _base(target)
        if isinstance(base, MixedExperts | ExpertWeights):
            _refuse_experts(str(kwargs.get("current_key") or type(base).__name__))
        if not _is_packed(base) or kwargs.get("parameter_name") is not None:
            layer: nn.Module | None = dispatch(target, adapter_name, config=config, **kwargs)
            return layer
        _check_called(base)
        return PackedLoraLinear(target, adapter_name, config, **kwargs)

    def create_packed_ia3(
        config: Any, adapter_name: str, target: nn.Module, **kwargs: Any
    ) -> nn.Module:
        base = _base(target)
        if not _is_packed(base):
            return create_ia3(config, adapter_name, target, **kwargs)  # type: ignore[no-any-return]
        _check_called(base)
        return PackedIA3Linear(target, adapter_name, config, **kwargs)

    def packed_device_and_dtype(self: Any, base_layer: Any) -> Any:
        # A packed weight's dtypes are not those of x.
        return (
            (_device(base_layer), None)
            if _is_packed(base_layer)
            else device_and_dtype(self, base_layer)
        )

    def inject_float(
        self: Any, peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        for name, module in model.named_modules():
            for parameter in PRODUCTS if isinstance(module, MixedExperts) else ():
                key = f"{name}.{parameter}"
                if any(
                    f".{key}".endswith(f".{target}") for target in peft_config.target_parameters
                ):
                    _refuse_experts(key)
        return inject_parameters(self, peft_config, model, *args, **kwargs)

    tuners_utils.BaseTuner.inject_adapter = inject_checked
    tuners_utils.BaseTuner._check_merge_allowed = check_merge_of_floats
    tuners_utils.BaseTuner._inject_parameters = inject_float
    tuners_utils.BaseTunerLayer._get_base_layer_device_and_dtype = packed_device_and_dtype
    lora_model.dispatch_default = dispatch_packed
    ia3_model.IA3Model._create_new_module = staticmethod(create_packed_ia3)
    for tuner in (tuners_utils.BaseTuner, lora_model.LoraModel):
        tuner._replace_module = _replacing(tuner._replace_module)
    _replace("_get_in_out_features", tuners_utils, _sizes)
    _replace("_maybe_include_all_linear_layers", tuners_utils, _all_linear)
    _replace("resolve_quantization_backend", quantization_utils, _backend)


_register()
