"""Models that ``cutlass-ops reorder`` packed, in vLLM: linear layers and word embeddings are loaded
as they are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engines.directory import PackedConfig, PackedLinear
from ..engines.fused import FusedLinear
from ..engines.layers import MODULE, Engine
from ..files.packed_config import weight_format
from ..ops.embedding import embedding as look_up
from ..weights.packed_weight import PackedWeight
from .linear import MISSING, logger, settings

if MISSING is None:
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.platforms import current_platform
else:
    LinearMethodBase = QuantizationConfig = object


def _kv_place(layer: torch.nn.Module, rank: int, ranks: int) -> tuple[int, int]:
    sharing = getattr(layer, "num_kv_head_replicas", 1)
    return rank // sharing, ranks // sharing


def _random_weights() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


ENGINE = Engine(
    name="vLLM",
    logger=logger,
    settings=settings,
    is_cuda=lambda: current_platform.is_cuda(),
    batch_invariant=lambda: envs.VLLM_BATCH_INVARIANT,
    random_weights=_random_weights,
    rank=lambda layer: get_tensor_model_parallel_rank(),
    kv_place=_kv_place,
)


class CutlassOpsConfig(PackedConfig, QuantizationConfig):  # type: ignore[misc, unused-ignore]
    """The ``quantization_config`` of a packed directory in vLLM."""

    engine = ENGINE

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        #: The embeddings that share a layer's weight, by the layer's name.
        self.tied: dict[str, list[torch.nn.Module]] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CutlassOpsConfig:
        """The same as the constructor."""
        return cls(config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take vLLM's names of modules in place of the checkpoint's."""
        self.rename(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Ours for packed layers, vLLM's own for others.

        Raises:
            ValueError: packed experts, or an embedding without a name where several are packed.
        """
        if isinstance(layer, RoutedExperts):
            return self.check_experts(prefix)
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            return self._embedding_method(layer, prefix)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        forms = self.formats_of(prefix)
        if len(forms) > 1:
            return FusedLinearMethod(forms, prefix, self.fields)
        form = forms[0]
        if form is None:
            is_head = isinstance(layer, ParallelLMHead)
            return UnquantizedEmbeddingMethod() if is_head else UnquantizedLinearMethod()
        return PackedLinearMethod(form, prefix, self.fields, self.tied.setdefault(prefix, []))

    def _embedding_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        embeddings: dict[str, str] = self.fields.get("embeddings", {})
        if not prefix and embeddings:  # vLLM's Llama and others leave it out
            if len(embeddings) > 1:
                raise ValueError(
                    "vLLM does not say which of the packed embeddings "
                    f"{', '.join(embeddings)} it makes"
                )
            prefix = next(iter(embeddings))
        holder = embeddings.get(prefix)
        if holder is None or (form := weight_format(self.fields, holder)) is None:
            return UnquantizedEmbeddingMethod()
        if holder == prefix:
            return PackedEmbeddingMethod(form, prefix, self.fields)
        self.tied.setdefault(holder, []).append(layer)
        return TiedEmbeddingMethod(form, prefix, self.fields)


class PackedLinearMethod(PackedLinear, LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A linear layer of vLLM whose weight is stored in the kernels' order."""

    engine = ENGINE


class FusedLinearMethod(FusedLinear, LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A linear layer that vLLM fused of layers in different formats."""

    linear = PackedLinearMethod


class PackedEmbeddingMethod(PackedLinearMethod):
    """A word embedding of vLLM whose weight is stored in the kernels' order."""

    def embedding(self, layer: torch.nn.Module, ids: Tensor) -> Tensor:
        """The rows of the rank's part of the weight, ``[*ids.shape, K]`` of the model's dtype.

        Raises:
            ValueError: an embedding that is tied to a layer which this rank does not have.
        """
        if MODULE not in layer._modules:
            raise ValueError(
                f"{self.prefix} is tied to the output head, which another rank of the pipeline has"
            )
        packed: PackedWeight = getattr(layer, MODULE).packed
        return look_up(ids, packed, layer.params_dtype)  # type: ignore[arg-type]


class TiedEmbeddingMethod(PackedEmbeddingMethod):
    """A word embedding that has the weight of a packed output head."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Make nothing: the head brings the weight."""
