"""Models that ``cutlass-ops reorder`` packed, in SGLang: linear layers are loaded as
they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..engines.directory import PackedConfig, PackedLinear
from ..engines.fused import FusedLinear
from ..engines.layers import MODULE
from ..files.packed_config import weight_format
from ..nn.linear import SHARED_INPUT
from ..ops.embedding import embedding as look_up
from ..weights.packed_weight import PackedWeight
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
        """The same as the constructor, with what SGLang adds: the model's configuration and
        its fused layers.
        """
        fields = {
            name: value
            for name, value in config.items()
            if name not in ("packed_modules_mapping", "hf_config")
        }
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
            ValueError: packed experts, a linear layer without a name, or an embedding without a
                name where several are packed.
        """
        if isinstance(layer, FusedMoE):
            return self.check_experts(prefix)
        is_head = isinstance(layer, ParallelLMHead)
        if isinstance(layer, VocabParallelEmbedding) and not is_head:
            return self._embedding_method(prefix)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        if not prefix:
            raise ValueError(
                "SGLang makes a linear layer of the model without its name, by which its "
                "format would be known"
            )
        forms = self.formats_of(prefix)
        if len(forms) > 1:
            return FusedLinearMethod(forms, prefix, self.fields)
        form = forms[0]
        if form is None:
            return UnquantizedEmbeddingMethod() if is_head else UnquantizedLinearMethod()
        return PackedLinearMethod(form, prefix, self.fields)

    def _embedding_method(self, prefix: str) -> Any:
        embeddings: dict[str, str] = self.fields.get("embeddings", {})
        if not prefix and embeddings:
            if len(embeddings) > 1:
                raise ValueError(
                    "SGLang does not say which of the packed embeddings "
                    f"{', '.join(embeddings)} it makes"
                )
            prefix = next(iter(embeddings))
        holder = embeddings.get(prefix)
        if holder is None or (form := weight_format(self.fields, holder)) is None:
            return None
        return PackedEmbeddingMethod(form, holder, self.fields)


def named_as_the_model(
    model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]], *args: Any
) -> tuple[tuple[Any, ...], Any]:
    """The arguments of SGLang's ``load_weights_only``, with weights under the names
    that the model has.

    An embedding that is tied to the output head gets the head's tensors too; in SGLang it
    often is the head.

    A model gets SGLang's configuration and may still make layers without it. For their packed
    weights SGLang would only log that no parameter has such a name.
    """
    return (model, _checked(model, weights), *args), {}


def _checked(
    model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The same weights.

    Raises:
        ValueError: packed codes of a layer that the model has with a weight of floats.
    """
    tied = {
        method.prefix: (name, module)
        for name, module in model.named_modules()
        if isinstance(method := getattr(module, "quant_method", None), PackedEmbeddingMethod)
        and method.prefix != name
    }
    for name, tensor in weights:
        layer, _, part = name.rpartition(".")
        if layer in tied and part in tied[layer][1]._parameters:
            embedding, module = tied[layer]
            yield f"{embedding}.{part}", tensor
            if getattr(model, layer, module) is module:
                continue
        if part == "codes" and _is_float(model, layer):
            raise ValueError(
                f"{layer} is packed, but SGLang's {type(model).__name__} makes it without "
                "the configuration"
            )
        yield name, tensor


def _is_float(model: torch.nn.Module, name: str) -> bool:
    """Whether the model has the layer, or the layer that it is fused into, as floats."""
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


class PackedEmbeddingMethod(PackedLinearMethod):
    """A word embedding of SGLang whose weight is stored in the kernels' order, by its own name or
    the output head's.
    """

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the parameters that SGLang loads into.

        Raises:
            ValueError: a package without kernels.
        """
        self.dtype = params_dtype
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)

    def embedding(self, layer: torch.nn.Module, ids: Tensor) -> Tensor:
        """The rows of the rank's part of the weight, ``[*ids.shape, K]`` of the model's dtype."""
        packed: PackedWeight = getattr(layer, MODULE).packed
        return look_up(ids, packed, self.dtype)


class FusedLinearMethod(FusedLinear, LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A linear layer that SGLang fused of layers in different formats."""

    linear = PackedLinearMethod
