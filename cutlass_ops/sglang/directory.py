"""Models that ``cutlass-ops reorder`` packed, in SGLang: linear layers are loaded as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..engines.directory import PackedConfig, PackedLinear
from ..engines.fused import FusedLinear
from ..nn import SHARED_INPUT
from .engine import ENGINE, MISSING

if MISSING is None:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedLinearMethod,
    )
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
else:
    LinearMethodBase = QuantizationConfig = object


class CutlassOpsConfig(PackedConfig, QuantizationConfig):  # type: ignore[misc, unused-ignore]
    """The ``quantization_config`` of a packed directory in SGLang."""

    engine = ENGINE

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CutlassOpsConfig:
        """The same as the constructor, with what SGLang adds: the model's configuration and its fused layers."""
        fields = {name: value for name, value in config.items() if name not in ("packed_modules_mapping", "hf_config")}
        found = cls(fields)
        # Most of SGLang's models do not say which layers they fuse, and fuse these.
        usual = {name: list(parts) for name, parts in SHARED_INPUT.items()}
        found.packed_modules_mapping = usual | config.get("packed_modules_mapping", {})
        return found

    def get_scaled_act_names(self) -> list[str]:
        """None: no activation function has scales."""
        return []

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Take SGLang's names of modules in place of the checkpoint's."""
        self.rename(hf_to_sglang_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Ours for packed layers, SGLang's own for others.

        Raises:
            ValueError: packed experts or embeddings, or a linear layer without a name.
        """
        if isinstance(layer, FusedMoE):
            return self.check_experts(prefix)
        is_head = isinstance(layer, ParallelLMHead)
        if isinstance(layer, VocabParallelEmbedding) and not is_head:
            if embeddings := self.fields.get("embeddings"):
                raise ValueError(f"packed embeddings ({', '.join(embeddings)}) are not loaded in SGLang yet")
            return None
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        if not prefix:
            raise ValueError("SGLang makes a linear layer of the model without its name, by which its format would be known")
        forms = self.formats_of(prefix)
        if len(forms) > 1:
            return FusedLinearMethod(forms, prefix, self.fields)
        form = forms[0]
        if form is None:
            return UnquantizedEmbeddingMethod() if is_head else UnquantizedLinearMethod()
        return PackedLinearMethod(form, prefix, self.fields)


def refuse_unread(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]], *args: Any) -> tuple[tuple[Any, ...], Any]:
    """The arguments of SGLang's ``load_weights_only``, with names that are looked at before the model sees them.

    SGLang gives its configuration to a model, which may make layers without it. Of their packed
    weights SGLang's log would only say that no parameter has such a name.
    """
    return (model, _checked(model, weights), *args), {}


def _checked(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights.

    Raises:
        ValueError: packed codes of a layer that the model has with a weight of floats.
    """
    for name, tensor in weights:
        layer, _, part = name.rpartition(".")
        if part == "codes" and _is_float(model, layer):
            raise ValueError(f"{layer} is packed, but SGLang's {type(model).__name__} makes it without the configuration")
        yield name, tensor


def _is_float(model: torch.nn.Module, name: str) -> bool:
    """Whether the model has the layer, or one that it is fused into, and not packed."""
    parent, _, last = name.rpartition(".")
    for one in (last, *(fused for fused, parts in SHARED_INPUT.items() if last in parts)):
        try:
            layer = model.get_submodule(f"{parent}.{one}" if parent else one)
        except AttributeError:
            continue  # it has another name in SGLang, or is another rank's
        if "weight" in layer._parameters and "codes" not in layer._parameters:
            return True
    return False


class PackedLinearMethod(PackedLinear, LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A linear layer of SGLang whose weight is stored in the kernels' order."""

    engine = ENGINE


class FusedLinearMethod(FusedLinear, LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A linear layer that SGLang fused of layers in different formats."""

    linear = PackedLinearMethod
