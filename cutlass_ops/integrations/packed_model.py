"""Packed layers in the models of other libraries: described for their configurations, made without
values, made float again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..files.packed_config import WeightFormat, quantization_config
from ..nn.architecture import features
from ..nn.conv import CONVOLUTIONS, MixedConv, mixed_conv
from ..nn.embedding import MixedEmbedding, TiedEmbedding
from ..nn.experts import ExpertWeights, MixedExperts
from ..nn.gated_mlp import GatedMLP
from ..nn.linear import FusedPart, MixedLinear
from ..nn.model_embeddings import packed_embedding, restore_scale
from ..nn.model_experts import GATE_UP, PRODUCTS, experts_form
from ..ops import gemm
from ..weights import formats
from ..weights.packed_experts import PackedExperts
from ..weights.packed_weight import PackedWeight
from ..weights.specs import packed_specs
from ..weights.weight import PARTS


def describe(model: nn.Module) -> dict[str, Any]:
    """The ``quantization_config`` of a model's packed layers, with fused layers as separate ones.

    Raises:
        ValueError: no packed layer, layers with an activation, or with different treatment of x:
            neither is stored; or an embedding tied to a layer that the model does not have.
    """
    modules = dict(model.named_modules())
    shared = {id(module.shared) for module in modules.values() if isinstance(module, FusedPart)}
    weights: dict[str, WeightFormat] = {}
    experts = []
    treatments: dict[tuple[str, bool], str] = {}
    names = {module: name for name, module in modules.items()}
    embeddings: dict[str, str] = {}
    for name, module in modules.items():
        if isinstance(module, TiedEmbedding):
            if module.layer not in names:
                raise ValueError(f"{name!r} is tied to a layer that the model does not have")
            embeddings[name] = names[module.layer]
        if isinstance(module, MixedEmbedding):
            embeddings[name] = name
            weights[name] = _format(module.packed)
        if (
            not isinstance(module, MixedLinear | FusedPart | MixedConv | MixedExperts)
            or id(module) in shared
        ):
            continue
        layer: Any = module.shared if isinstance(module, FusedPart) else module
        treatments[layer.act_quant, layer.act_quant == "none" or layer.act_symmetric] = name
        if isinstance(module, MixedExperts):  # their activation is the model's
            products = {
                f"{name}.{product}": getattr(module, product).packed for product in PRODUCTS
            }
            weights |= {product: _format(packed, {"codes"}) for product, packed in products.items()}
            experts += list(products)
            continue
        if layer.packed.gated and layer is module:
            raise ValueError(
                f"{name!r} has a gated weight, which is not stored; fuse_linears makes such layers "
                "of gate and up, which are stored apart"
            )
        if layer.activation is not None and not layer.packed.gated:  # else it is the parent's
            raise ValueError(f"{name!r} has activation {layer.activation!r}, which is not stored")
        with_bias = not isinstance(module, FusedPart) or module.has_bias
        weights[name] = _format(layer.packed, {"codes"} if with_bias else {"codes", "bias"})
    if not weights:
        raise ValueError(f"{type(model).__name__} has no packed layer")
    if len(treatments) > 1:
        listed = ", ".join(
            f"{name!r} has {act_quant!r}, {sym}" for (act_quant, sym), name in treatments.items()
        )
        raise ValueError(
            f"act_quant and act_symmetric differ between layers ({listed}); a model is "
            "stored with one of each"
        )
    plain = [
        name
        for name, module in modules.items()
        if features(module) is not None or isinstance(module, CONVOLUTIONS)
    ]
    return quantization_config(
        weights, plain, *next(iter(treatments), ("none", True)), experts, embeddings
    )


def packed_layers(
    model: nn.Module,
) -> dict[str, MixedLinear | MixedConv | MixedEmbedding | ExpertWeights]:
    """The modules of a model that hold the tensors of packed weights, by their names."""
    kinds = MixedLinear | MixedConv | MixedEmbedding | ExpertWeights
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _format(
    packed: PackedWeight | PackedExperts, left_out: Collection[str] = ("codes",)
) -> WeightFormat:
    parts = sorted(packed.tensors().items())
    return WeightFormat(
        packed.bits,
        packed.group_size,
        tuple((part, t.dtype) for part, t in parts if part not in left_out),
    )


def without_values(
    layer: nn.Module, form: WeightFormat, act_quant: str, act_symmetric: bool
) -> MixedLinear | MixedConv | MixedEmbedding | TiedEmbedding:
    """The packed layer in place of a linear layer, a convolution or a word embedding; its tensors
    have shapes and dtypes but no values.

    Raises:
        ValueError: a format with tensors that no packed weight has, or a layer that
            cannot be packed.
    """
    weight = _weight_without_values(layer, form)
    if isinstance(layer, nn.Embedding):
        return packed_embedding(layer, weight)
    if isinstance(layer, CONVOLUTIONS):
        return mixed_conv(layer, weight, act_quant, act_symmetric)
    return MixedLinear(weight, act_quant, act_symmetric)


def _weight_without_values(layer: Any, form: WeightFormat) -> PackedWeight:
    dtypes = _dtypes(form)
    if getattr(layer, "bias", None) is not None:
        dtypes.setdefault("bias", layer.bias.dtype)
    kernel_size: tuple[int, ...] = ()
    if isinstance(layer, CONVOLUTIONS):
        n, kernel_size = layer.out_channels, tuple(layer.kernel_size)
        k = layer.in_channels // layer.groups * math.prod(kernel_size)
    else:
        n, k = features(layer) or (layer.num_embeddings, layer.embedding_dim)
    parts: dict[str, Any] = dict.fromkeys(PARTS)
    for part, (dtype, shape) in packed_specs(
        n, k, form.bits, form.group_size, dtypes, kernel_size=kernel_size
    ).items():
        parts[part] = torch.empty(shape, dtype=dtype, device="meta")
    return PackedWeight(
        **parts, n=n, k=k, bits=form.bits, group_size=form.group_size, kernel_size=kernel_size
    )


def experts_without_values(
    layer: nn.Module, forms: Mapping[str, WeightFormat], act_quant: str, act_symmetric: bool
) -> MixedExperts:
    """The same in place of an experts module, with the formats of its products.

    Raises:
        ValueError: as above, or biases where the module has none, or none where it has biases.
    """
    own = experts_form(layer)
    if own is None:
        raise ValueError(f"{type(layer).__name__} computes something else than packed experts")

    def weight(product: str) -> PackedExperts:
        form, (experts, n, k) = forms[product], own.shape(product)
        if ("bias" in dict(form.tensors)) != own.biased:
            stated, has = ("no biases", "biases") if own.biased else ("biases", "no biases")
            raise ValueError(f"{product} is said to have {stated}; the model's experts have {has}")
        specs = packed_specs(
            experts * formats.padded_rows(n), k, form.bits, form.group_size, _dtypes(form), experts
        )
        parts = {
            part: torch.empty(shape, dtype=dtype, device="meta")
            for part, (dtype, shape) in specs.items()
        }
        # Rows in the order of earlier versions are reordered once they are loaded.
        return PackedExperts.of_parts(
            parts, experts, n, k, form.bits, form.group_size, gated=product == GATE_UP
        )

    gate_up, down = map(weight, PRODUCTS)
    return MixedExperts(gate_up, down, own.activation, act_quant, act_symmetric)


def _dtypes(form: WeightFormat) -> dict[str, torch.dtype]:
    dtypes = dict(form.tensors)
    if unknown := dtypes.keys() - set(PARTS):
        raise ValueError(
            f"tensors names {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}"
        )
    return dtypes


def put_floats(model: nn.Module, plain: nn.Module, dtype: torch.dtype) -> None:
    """Replace the packed layers of a model by float layers with their values.

    Layers that were fused become the separate layers that they were.

    Args:
        model: changed in place, one layer after another.
        plain: the model as its class makes it, on the meta device; its layers are taken.
        dtype: of the weights and biases.

    Raises:
        ValueError: a layer whose tensors are offloaded; nothing was changed.
    """
    packed = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(
            module,
            MixedLinear | FusedPart | MixedExperts | MixedConv | MixedEmbedding | TiedEmbedding,
        )
    }
    for name, module in packed.items():
        if not module.has_values():
            raise ValueError(
                f"{name!r} is offloaded: its tensors are not in memory; load the model "
                "without offloading"
            )
        if isinstance(module, MixedLinear) and module.packed.gated and not module.shared_by:
            raise ValueError(f"{name!r} has a gated weight, the product of two float layers")
    made: dict[nn.Module, nn.Module] = {}
    for name, module in packed.items():
        parent, _, child = name.rpartition(".")
        if getattr(module, "shared_by", ()):  # its parts become layers
            delattr(model.get_submodule(parent), child)
            continue
        if module not in made:
            made[module] = _float_layer(module, _plain_layer(plain, name), dtype)
        setattr(model.get_submodule(parent), child, made[module])
    for mlp in model.modules():
        if isinstance(mlp, GatedMLP):
            mlp.restore()


def _plain_layer(plain: nn.Module, name: str) -> nn.Module | None:
    try:
        return plain.get_submodule(name)
    except AttributeError:  # a layer that was put into the model, or wrapped
        return None


def _float_experts(
    module: MixedExperts, layer: nn.Module, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """The parameters of an experts module."""
    form = experts_form(layer)
    if form is None:
        raise ValueError(
            f"packed experts are in the place of a {type(layer).__name__}, which computes "
            "something else"
        )
    values: dict[str, Tensor | None] = {}
    for product in PRODUCTS:
        packed = getattr(module, product).packed
        experts = [packed.expert(e) for e in range(packed.experts)]

        def parameter(
            of_experts: Iterable[Tensor], product: str = product, packed: PackedExperts = packed
        ) -> Tensor:
            return torch.stack(
                [form.to_parameter(product, packed.in_order(values)) for values in of_experts]
            )

        values[product] = parameter(gemm.dequantize(expert, dtype) for expert in experts)
        if form.biased:
            values[f"{product}_bias"] = parameter(expert.bias for expert in experts)
    return values


def _float_layer(module: Any, layer: Any, dtype: torch.dtype) -> nn.Module:
    if layer is None and isinstance(module, MixedLinear | FusedPart):
        layer = nn.Linear(module.in_features, module.out_features, device="meta")
    if layer is None and isinstance(module, MixedEmbedding | TiedEmbedding) and module.scale == 1:
        layer = nn.Embedding(
            module.num_embeddings, module.embedding_dim, module.padding_idx, device="meta"
        )
    if layer is None:
        raise ValueError(
            f"a {type(module).__name__} is in the place of a module that the model's class "
            "does not make"
        )
    if isinstance(module, MixedExperts):
        values = _float_experts(module, layer, dtype)
    elif isinstance(module, MixedEmbedding | TiedEmbedding):
        values = {"weight": module.dequantize(dtype)}
        restore_scale(layer, module.packed.device)
    else:
        packed = module.packed
        weight = gemm.dequantize(packed, dtype)
        if not isinstance(module, MixedConv) and not isinstance(layer, nn.Linear):
            weight = weight.t()  # transformers' Conv1D
        values = {"weight": weight.contiguous(), "bias": packed.bias}
    for part, value in values.items():
        layer.register_parameter(part, None if value is None else nn.Parameter(value.to(dtype)))
    layer.train(module.training)
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(layer, module._hf_hook)
    moved: nn.Module = layer
    return moved
