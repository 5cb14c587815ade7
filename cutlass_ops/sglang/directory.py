"""Models that ``cutlass-ops reorder`` packed, in SGLang: linear layers are loaded as they are stored."""

from __future__ import annotations

from typing import Any

import torch

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


class PackedLinearMethod(PackedLinear, LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A linear layer of SGLang whose weight is stored in the kernels' order."""

    engine = ENGINE


class FusedLinearMethod(FusedLinear, LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A linear layer that SGLang fused of layers in different formats."""

    linear = PackedLinearMethod
