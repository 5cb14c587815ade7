"""Word embeddings of models: what they compute, and their packed replacements."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..weights.packed_weight import PackedWeight
from .buffers import WeightBuffers
from .embedding import MixedEmbedding, TiedEmbedding

#: Where embeddings of transformers that scale their rows have the factor as a number.
_SCALE = "scalar_embed_scale"


def embedding_scale(module: nn.Embedding) -> float | None:
    """What a word embedding multiplies its rows by, rounded to their dtype; None if it
    computes something else.
    """
    if module.max_norm is not None:  # its forward writes to the weight
        return None
    kind = type(module)
    if kind.forward is nn.Embedding.forward:
        return 1.0
    scale = getattr(module, _SCALE, None)
    return (
        float(scale)
        if isinstance(scale, int | float) and _multiplies(cast(Hashable, kind))
        else None
    )


@cache
def _multiplies(kind: Any) -> bool:
    """Whether a class of embeddings multiplies its rows by the factor in its dtype, and does
    nothing else: tried on a small one.
    """
    # from_pretrained makes models in the context of the meta device, and under
    # another default dtype
    weight = torch.randn(
        5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).bfloat16()
    scale, ids = 1.2345, torch.tensor([3, 0, 3], dtype=torch.int64, device="cpu")
    layer: Any = nn.Embedding(5, 3, _weight=weight)
    layer.__class__ = kind
    setattr(layer, _SCALE, scale)
    layer.register_buffer("embed_scale", torch.tensor(scale, dtype=torch.float32, device="cpu"))
    with torch.no_grad():
        try:
            rows = layer(ids)
        except Exception:  # it needs attributes that its constructor sets
            return False
    return isinstance(rows, Tensor) and torch.equal(rows, weight[ids] * weight.new_full((), scale))


def reason_against_embedding(module: nn.Embedding) -> str:
    """Why a word embedding cannot be packed, whatever is around it; "" if it can."""
    if embedding_scale(module) is None:
        return f"its class {type(module).__name__} computes something else than nn.Embedding does"
    return ""


def packed_embedding(
    module: nn.Embedding, weight: PackedWeight | WeightBuffers
) -> MixedEmbedding | TiedEmbedding:
    """The packed layer in the place of a word embedding: of this weight, or tied to the
    layer that has it.

    Raises:
        ValueError: a weight of another shape, or an embedding that cannot be packed.
    """
    if reason := reason_against_embedding(module):
        raise ValueError(reason)
    packed = weight if isinstance(weight, PackedWeight) else weight.packed
    if packed.shape != (module.num_embeddings, module.embedding_dim):
        raise ValueError(
            f"the packed weight is {list(packed.shape)}; the embedding is "
            f"{[module.num_embeddings, module.embedding_dim]}"
        )
    scale = embedding_scale(module)
    assert scale is not None
    options = (module.weight.dtype, module.padding_idx, scale)
    layer: MixedEmbedding | TiedEmbedding
    layer = (
        MixedEmbedding(weight, *options)
        if isinstance(weight, PackedWeight)
        else TiedEmbedding(weight, *options)
    )
    layer.train(module.training)
    return layer


def restore_scale(module: nn.Embedding, device: torch.device) -> None:
    """Give an embedding that was made on the meta device the values of its factor."""
    scale = module._buffers.get("embed_scale")
    if scale is not None and scale.is_meta:
        module._buffers["embed_scale"] = torch.full(
            (), getattr(module, _SCALE), dtype=scale.dtype, device=device
        )
