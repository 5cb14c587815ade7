"""Models that ``cutlass-ops reorder`` packed, in an engine: layers are loaded as
they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _C
from ..files.packed_config import QUANT_METHOD, WeightFormat, weight_format
from ..files.packed_file import packed_problem
from ..files.tensor_parallel import ACT_ORDER, sliced_format
from ..nn import MixedLinear
from ..weights.reorder import reorder
from ..weights.specs import packed_specs
from .layers import ACTIVATION, MODULE, Engine, packed_linear, product
from .shards import LayerPart, Shards, part_of


class PackedConfig:
    """The ``quantization_config`` of a packed directory, as ``packed_config.py`` describes it.

    Raises:
        ValueError: a layout that is not known, or files that hold one rank of a split model.
    """

    engine: ClassVar[Engine]
    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        if fields.get("tensor_parallel"):
            raise ValueError(
                "the files hold one rank of a model that was split; reorder it unsplit"
            )
        weight_format({**fields, "modules_to_not_convert": []}, "")
        self.fields = dict(fields)

    @classmethod
    def get_name(cls) -> str:
        """The name that ``quant_method`` gives."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The dtypes of x."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that the kernels run on, as engines count: 80 is sm_80."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: ``config.json`` is sufficient."""
        return []

    def rename(self, mapper: Any) -> None:
        """Take the engine's names of modules in place of the checkpoint's; ``mapper``
        is the engine's.
        """
        modules = mapper.apply_dict(self.fields.get("modules", {}))
        left = mapper.apply_list(list(self.fields.get("modules_to_not_convert", ())))
        embeddings = mapper.apply_dict(self.fields.get("embeddings", {}))
        holders = mapper.apply_list(list(embeddings.values()))
        embeddings = dict(zip(embeddings, holders, strict=True))
        self.fields |= {
            "modules": modules,
            "modules_to_not_convert": left,
            "embeddings": embeddings,
        }

    def formats_of(self, prefix: str) -> list[WeightFormat | None]:
        """The format of the layers that the engine has as ``prefix``, or of each if they differ;
        None if not packed.
        """
        parent, _, last = prefix.rpartition(".")
        names = self.packed_modules_mapping.get(last, [last])
        stored = [f"{parent}.{name}" if parent else name for name in names]
        found = [weight_format(self.fields, name) for name in stored]
        return found if len({_without_bias(form) for form in found}) > 1 else found[:1]

    def check_experts(self, prefix: str) -> None:
        """Raise ``ValueError`` for experts that are packed."""
        # Experts that are not packed are named; those with the most common format are not.
        named = {*self.fields.get("modules", {}), *self.fields.get("modules_to_not_convert", ())}
        names = [f"{prefix}.0.{name}_proj" for name in ("gate", "up", "down")]
        if any(name not in named or weight_format(self.fields, name) for name in names):
            raise ValueError(
                f"{prefix}: packed experts are not loaded in {self.engine.name} yet; serve the "
                "checkpoint itself, if it can "
                "read it, or a directory of cutlass-ops reorder --exclude experts, which "
                "keeps them as floats"
            )


def _without_bias(form: WeightFormat | None) -> Any:
    """A base for layers that an engine fuses: a bias is a parameter of the engine."""
    return form and (form.bits, form.group_size, _dtypes(form))


def _dtypes(form: WeightFormat) -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((part, dtype) for part, dtype in form.tensors if part != "bias")


class PackedLinear:
    """A linear layer of an engine whose weight is stored in the kernels' order.

    Args:
        form, prefix: the weight's format, and the layer's name.
        fields: of the ``quantization_config``.
        tied: the embeddings that get this layer's weight after loading.
    """

    engine: ClassVar[Engine]

    def __init__(
        self,
        form: WeightFormat,
        prefix: str,
        fields: dict[str, Any],
        tied: Sequence[torch.nn.Module] = (),
    ) -> None:
        super().__init__()
        self.tied = tied
        self.form = form
        self.prefix = prefix
        self.fields = fields
        self.batch_invariant = self.engine.batch_invariant()

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
        """Make the parameters that the engine loads into.

        Raises:
            ValueError: a weight that cannot be split in that way, or a package without kernels.
        """
        if self.engine.is_cuda() and not _C.built_with_cuda:
            raise ValueError("cutlass_ops was built without CUDA, and has no kernels for the model")
        part = part_of(
            self.engine,
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
        )
        self.make_parameters(layer, part)

    def make_parameters(self, layer: torch.nn.Module, part: LayerPart) -> None:
        """The same for a given part of the layer."""
        columns = part.columns.stop - part.columns.start
        ranks = part.k // columns
        dtypes = dict(_dtypes(self.form))
        if ranks > 1 and "perm" in dtypes:
            raise ValueError(f"{self.prefix} cannot be split over {ranks} ranks: {ACT_ORDER}")
        size = self.form.group_size
        own = sliced_format(sum(part.sizes), part.k, size, "rowwise", ranks)[2]
        shards = Shards(part, self.form.bits, (size, own), getattr(layer, "org_vocab_size", None))
        rows = shards.padded(len(part.sizes) - 1).stop
        specs = packed_specs(rows, columns, self.form.bits, own, dtypes)
        for name, (dtype, shape) in specs.items():
            # None is the default device: engines make layers under that of their parameters.
            parameter = Parameter(torch.zeros(shape, dtype=dtype, device=None), requires_grad=False)
            parameter.weight_loader = partial(shards.load, name)  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)
        if "perm" in specs:  # dummy weights leave integers as they are
            perm = layer.get_parameter("perm").data
            perm.copy_(torch.arange(columns, device=perm.device))
        self.shards = shards
        self.parts = list(specs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Make the packed weight of the parameters and keep it.

        Raises:
            ValueError: a tensor that the files lack, or values that kernels cannot handle.
        """
        if not hasattr(self, "shards"):
            return  # engines may call it again
        shards = self.shards
        wanted = {(part, i) for part in self.parts for i in range(len(shards.part.sizes))}
        if (missing := wanted - shards.loaded) and not self.engine.random_weights():
            part, index = min(missing)
            raise ValueError(f"{self.prefix}: the files lack {part!r} of its part {index}")
        tensors = {part: getattr(layer, part).data for part in self.parts}
        for part in self.parts:
            delattr(layer, part)
        weights = list(shards.weights(tensors))
        packed = weights[0] if len(weights) == 1 else reorder([w.unpack() for w in weights])
        if problem := packed_problem(packed):
            raise ValueError(f"{self.prefix}.{problem[0]} {problem[1]}")
        act_quant = self.engine.settings().get("act_quant", self.fields.get("act_quant", "none"))
        symmetric = self.fields.get("act_symmetric", True)
        if hasattr(layer, ACTIVATION):
            linear = packed_linear(layer, packed.unpack(), act_quant, symmetric)
        else:
            linear = MixedLinear(packed, act_quant, symmetric)
        layer.register_module(MODULE, linear)
        for embedding in self.tied:
            if embedding.num_embeddings_per_partition != packed.n:
                raise ValueError(
                    f"{self.prefix} has {packed.n} rows on this rank; the embedding tied to it has "
                    f"{embedding.num_embeddings_per_partition}"
                )
            embedding.register_module(MODULE, linear)
        # Engines' LoRA layers look for the device here.
        layer.register_parameter("qweight", Parameter(linear.codes, requires_grad=False))
        self.engine.logger.info_once("Using cutlass_ops for packed linear layers")
        del self.shards

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x ``[..., K]`` times the layer's weight, plus bias: ``[..., N]`` of x's dtype."""
        return product(layer, x, bias, self.batch_invariant)
