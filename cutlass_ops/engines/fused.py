"""Layers that an engine has fused into one, of a packed directory that stores them in
different formats.

GGUF files that mix types (Q4_K_M) store query, key and value in this way. Each is packed
separately, and x is multiplied by one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..files.packed_config import WeightFormat
from .directory import PackedLinear
from .layers import MODULE, product
from .shards import LayerPart, part_of

#: The name of the submodule that holds the layers.
_MODULE = "cutlass_ops_shards"


class FusedLinear:
    """A linear layer of an engine whose parts are stored in different formats, or not packed.

    Args:
        forms: of each part; None for floats.
        prefix: the layer's name.
        fields: of the ``quantization_config``.
    """

    #: The engine's method for one part.
    linear: ClassVar[Callable[..., PackedLinear]]

    def __init__(
        self, forms: Sequence[WeightFormat | None], prefix: str, fields: dict[str, Any]
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.methods = [
            None if form is None else self.linear(form, f"{prefix}[{i}]", fields)
            for i, form in enumerate(forms)
        ]

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
        """Make the parameters of each part, and for each name one through which the engine loads
        all parts.

        Raises:
            ValueError: a weight that cannot be split in that way, a package without kernels, or
                floats in batch-invariant mode.
        """
        engine = next(method.engine for method in self.methods if method)
        whole = part_of(
            engine, layer, input_size_per_partition, output_partition_sizes, input_size, output_size
        )
        if len(whole.sizes) != len(self.methods):
            raise ValueError(
                f"{self.prefix} has {len(whole.sizes)} parts in {engine.name}; its files have "
                f"{len(self.methods)}"
            )
        parts = torch.nn.ModuleList()
        for size, place, method in zip(whole.sizes, whole.places, self.methods, strict=True):
            module, part = torch.nn.Module(), LayerPart([size], [place], whole.k, whole.columns)
            if method:
                method.make_parameters(module, part)
            elif engine.batch_invariant():
                raise ValueError(
                    f"{self.prefix} is packed only in part, and products of floats are not "
                    "batch invariant"
                )
            else:
                # On the default device: the engine sets it for its layers.
                zeros = torch.zeros(size, input_size_per_partition, dtype=params_dtype, device=None)
                weight = Parameter(zeros, requires_grad=False)
                weight.weight_loader = partial(_load, part)  # type: ignore[attr-defined]
                module.register_parameter("weight", weight)
            parts.append(module)
        layer.register_module(_MODULE, parts)
        self.missing = {i for i, method in enumerate(self.methods) if not method}
        self.random_weights = engine.random_weights
        self.names = dict.fromkeys(name for module in parts for name in module._parameters)
        for name in self.names:
            every = Parameter(torch.empty(0, dtype=params_dtype, device=None), requires_grad=False)
            every.weight_loader = partial(self._load, name, parts)  # type: ignore[attr-defined]
            layer.register_parameter(name, every)

    def _load(
        self,
        name: str,
        parts: torch.nn.ModuleList,
        every: Parameter,
        tensor: Tensor,
        shard: str | int | None = None,
    ) -> None:
        if not isinstance(shard, str | int):
            raise ValueError(
                f"{self.prefix}.{name}: several of the fused layers in one tensor ({shard})"
            )
        index = "qkv".index(shard) if isinstance(shard, str) else shard
        parameter: Any = parts[index]._parameters.get(name)
        if parameter is None:
            raise ValueError(
                f"{self.prefix}.{name} is there for its part {index}, whose format has no "
                "such tensor"
            )
        parameter.weight_loader(parameter, tensor)
        if name == "weight":
            self.missing.discard(index)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Make the packed weight of each part.

        Raises:
            ValueError: a tensor that the files lack, or values that kernels cannot handle.
        """
        if not self.names:
            return  # engines may call it again
        if self.missing and not self.random_weights():
            raise ValueError(
                f"{self.prefix}: the files lack 'weight' of its part {min(self.missing)}"
            )
        for name in self.names:
            delattr(layer, name)
        self.names = {}
        parts: Any = getattr(layer, _MODULE)
        for module, method in zip(parts, self.methods, strict=True):
            if method:
                method.process_weights_after_loading(module)
        # Engines' LoRA layers look for the device here.
        first = next(iter(parts[0].parameters()))
        layer.register_parameter("qweight", Parameter(first, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x ``[..., K]`` times the weights of all parts, plus bias: ``[..., N]`` of x's dtype."""
        parts: Any = getattr(layer, _MODULE)
        outputs: list[Tensor] = []
        start = 0
        for module, method in zip(parts, self.methods, strict=True):
            size: int = getattr(module, MODULE).packed.n if method else len(module.weight)
            own = None if bias is None else bias[start : start + size]
            if method:
                outputs.append(product(module, x, own, method.batch_invariant))
            else:
                outputs.append(torch.nn.functional.linear(x, module.weight, own))
            start += size
        return torch.cat(outputs, dim=-1)


def _load(part: LayerPart, parameter: Parameter, tensor: Tensor) -> None:
    rows, n = part.rows(0)
    if tuple(tensor.shape) != (n, part.k):
        raise ValueError(f"weight is {tuple(tensor.shape)}; {(n, part.k)} is expected")
    parameter.data.copy_(tensor[rows, part.columns])
