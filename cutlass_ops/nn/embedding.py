"""Word embeddings over packed weights; an output head may have the tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..ops import gemm
from ..ops.embedding import embedding
from ..ops.native import DATA_TYPES
from ..weights.packed_weight import PackedWeight
from .buffers import PackedState, WeightBuffers


class _Lookup(PackedState):
    """The common base of :class:`MixedEmbedding` and :class:`TiedEmbedding`, which differ in where
    the weight is.

    Attributes:
        num_embeddings, embedding_dim: N and K.
        padding_idx: the padding row, as in ``torch.nn.Embedding``: it is looked up like others.
        dtype: of the result. ``.half()``, ``.to(dtype)`` and their like change it, and not
            the packed tensors.
        scale: what the rows are multiplied by, rounded to ``dtype``, as in Gemma 3.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    dtype: torch.dtype
    scale: float

    def _set(
        self, packed: PackedWeight, dtype: torch.dtype, padding_idx: int | None, scale: float
    ) -> None:
        if packed.kernel_size:
            raise ValueError(reference.CONVOLUTION.format(packed.kernel_size))
        packed.check_plain(type(self).__name__)
        if dtype not in DATA_TYPES:
            raise TypeError(f"dtype is {dtype!r}; supported are float16, bfloat16 and float32")
        self.num_embeddings, self.embedding_dim = packed.shape
        self.dtype, self.padding_idx, self.scale = dtype, padding_idx, scale

    def _rows(self, ids: Tensor, packed: PackedWeight) -> Tensor:
        rows = embedding(ids, packed, self.dtype)
        return rows if self.scale == 1 else rows * rows.new_full((), self.scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        module: Any = super()  # torch has no types here
        module._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self

    def extra_repr(self) -> str:
        """Sizes, as ``print(model)`` shows them."""
        parts = [
            f"{self.num_embeddings}, {self.embedding_dim}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}"
        ]
        parts += [f"padding_idx={self.padding_idx}"] if self.padding_idx is not None else []
        parts += [f"scale={self.scale:g}"] if self.scale != 1 else []
        return ", ".join(parts)


class MixedEmbedding(_Lookup, WeightBuffers):
    """``torch.nn.Embedding`` over a packed weight: :func:`cutlass_ops.embedding` as a module.

    The packed tensors are buffers as in :class:`cutlass_ops.MixedLinear`: they move with the
    module, keep their dtypes and are frozen. There is no ``weight`` attribute; :meth:`dequantize`
    returns its values, without the scale. An output head that shares the weight is best the layer
    that has the tensors, with a :class:`TiedEmbedding` beside it.

    Attributes:
        num_embeddings, embedding_dim, padding_idx, dtype, scale: as the arguments.

    Args:
        packed: ``[N, K]``: N rows to look up.
        dtype: of the result: fp16, bf16 or fp32.
        padding_idx: as in ``torch.nn.Embedding``; it changes nothing, as the weight is frozen.
        scale: what the rows are multiplied by.

    Raises:
        TypeError: a weight that is not packed, or another dtype.
        ValueError: a convolution's weight.
    """

    def __init__(
        self,
        packed: PackedWeight,
        dtype: torch.dtype = torch.float16,
        padding_idx: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(packed)
        self._set(packed, dtype, padding_idx, scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up rows; ids int64 or int32 of any shape, the result ``[*ids.shape, K]``.

        Raises:
            IndexError, TypeError, ValueError, RuntimeError: as in :func:`cutlass_ops.embedding`.
        """
        return self._rows(ids, self.packed)

    def extra_repr(self) -> str:
        """Sizes and format, as ``print(model)`` shows them."""
        kind = next(
            (name for name in ("zeros", "offsets", "book") if getattr(self, name) is not None),
            "symmetric",
        )
        return (
            f"{super().extra_repr()}, bits={self._packed.bits}, "
            f"group_size={self._packed.group_size}, {kind}"
        )


class TiedEmbedding(_Lookup):
    """A :class:`MixedEmbedding` whose rows are those of another layer's weight, which alone
    has the tensors.

    That layer is part of the same model, which moves, saves and loads the tensors once. If it is on
    another device than the ids, the rows are looked up there and their values are moved.

    Attributes:
        num_embeddings, embedding_dim, padding_idx, dtype, scale: as in :class:`MixedEmbedding`.

    Args:
        layer: a :class:`cutlass_ops.MixedLinear`, such as the output head, or a MixedEmbedding.
        dtype, padding_idx, scale: as in :class:`MixedEmbedding`.

    Raises:
        TypeError: another layer, or a dtype that is not supported.
    """

    def __init__(
        self,
        layer: WeightBuffers,
        dtype: torch.dtype = torch.float16,
        padding_idx: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(layer, WeightBuffers):
            raise TypeError(
                f"layer is a {type(layer).__name__}; a MixedLinear or a MixedEmbedding is expected"
            )
        # no submodule: the model has the layer, once, for moves and state_dict
        self._layer = (layer,)
        self._set(layer.packed, dtype, padding_idx, scale)

    @property
    def layer(self) -> WeightBuffers:
        """The layer that has the tensors."""
        return self._layer[0]

    @property
    def packed(self) -> PackedWeight:
        """That layer's weight."""
        return self.layer.packed

    def dequantize(self, dtype: torch.dtype = torch.float16) -> Tensor:
        """As in :class:`MixedEmbedding`."""
        return gemm.dequantize(self.packed, dtype)

    def has_values(self) -> bool:
        """Whether that layer has its tensors in memory."""
        return self.layer.has_values()

    def marks(self) -> dict[str, dict[str, Any]]:
        """One mark: that of the other layer's weight, which says that it is stored there."""
        return {"weight": {**self.layer.state_format(), "tied": True}}

    def forward(self, ids: Tensor) -> Tensor:
        """As in :class:`MixedEmbedding`."""
        with in_memory(self.layer):
            packed = self.packed
            return self._rows(ids.to(packed.device), packed).to(ids.device)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "TiedEmbedding has no 'weight': its values are packed; dequantize() returns them"
            )
        return super().__getattr__(name)


def in_memory(layer: nn.Module) -> AbstractContextManager[None]:
    """A context in which a layer has its tensors, wherever accelerate keeps them."""
    if not hasattr(layer, "_hf_hook"):
        return nullcontext()
    aligned: AbstractContextManager[None] = import_module("accelerate.utils").align_module_device(
        layer
    )
    return aligned
