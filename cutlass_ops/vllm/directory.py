"""Models that ``cutlass-ops reorder`` packed, in vLLM: linear layers are loaded as they are stored.

A parameter holds the tensors of the layers that vLLM fused one after another, each padded to row
panels of 64. A rank's rows and columns are cut from the packed order. Where the parts end inside
row panels, the fused layer is unpacked and packed once more after loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _C, formats
from ..embedding import embedding as look_up
from ..nn import MixedLinear
from ..packed_config import QUANT_METHOD, WeightFormat, weight_format
from ..packed_file import packed_problem, packed_specs
from ..packed_weight import PackedWeight
from ..reorder import reorder
from ..tensor_parallel import ACT_ORDER, sliced_format
from ..weight import PARTS
from .linear import MISSING, MODULE, logger, product, settings
from .slices import cut

if MISSING is None:
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


class CutlassOpsConfig(QuantizationConfig):  # type: ignore[misc, unused-ignore]
    """The ``quantization_config`` of a packed directory, as ``packed_config.py`` describes it.

    Raises:
        ValueError: a layout that is not known, or files that hold one rank of a split model.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        if fields.get("tensor_parallel"):
            raise ValueError("the files hold one rank of a model that was split; reorder it unsplit")
        weight_format({**fields, "modules_to_not_convert": []}, "")
        self.fields = dict(fields)
        #: The embeddings that share a layer's weight, by the layer's name.
        self.tied: dict[str, list[torch.nn.Module]] = {}

    @classmethod
    def get_name(cls) -> str:
        """As ``quant_method`` has it."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Of x."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that the kernels run on, as vLLM counts: 80 is sm_80."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: ``config.json`` says it all."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CutlassOpsConfig:
        """The same as the constructor."""
        return cls(config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take vLLM's names of modules in place of the checkpoint's."""
        modules = hf_to_vllm_mapper.apply_dict(self.fields.get("modules", {}))
        left = hf_to_vllm_mapper.apply_list(list(self.fields.get("modules_to_not_convert", ())))
        embeddings = hf_to_vllm_mapper.apply_dict(self.fields.get("embeddings", {}))
        holders = hf_to_vllm_mapper.apply_list(list(embeddings.values()))
        embeddings = dict(zip(embeddings, holders, strict=True))
        self.fields |= {"modules": modules, "modules_to_not_convert": left, "embeddings": embeddings}

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Ours for packed layers, vLLM's own for others.

        Raises:
            ValueError: layers that vLLM fuses and that are stored in different formats, packed
                experts, or an embedding without a name where several are packed.
        """
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            return self._embedding_method(layer, prefix)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        parent, _, last = prefix.rpartition(".")
        names = self.packed_modules_mapping.get(last, [last])
        stored = [f"{parent}.{name}" if parent else name for name in names]
        found = {name: weight_format(self.fields, name) for name in stored}
        if len({_without_bias(form) for form in found.values()}) > 1:
            raise ValueError(
                f"vLLM has {', '.join(stored)} as one layer, but their formats differ: "
                + ", ".join("not packed" if f is None else str(f.to_json()) for f in found.values())
            )
        form = next(iter(found.values()))
        if form is None:
            is_head = isinstance(layer, ParallelLMHead)
            return UnquantizedEmbeddingMethod() if is_head else UnquantizedLinearMethod()
        return PackedLinearMethod(form, prefix, self.fields, self.tied.setdefault(prefix, []))

    def _embedding_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        embeddings: dict[str, str] = self.fields.get("embeddings", {})
        if not prefix and embeddings:  # vLLM's Llama and others leave it out
            if len(embeddings) > 1:
                raise ValueError(f"vLLM does not say which of the packed embeddings {', '.join(embeddings)} it makes")
            prefix = next(iter(embeddings))
        holder = embeddings.get(prefix)
        if holder is None or (form := weight_format(self.fields, holder)) is None:
            return UnquantizedEmbeddingMethod()
        if holder == prefix:
            return PackedEmbeddingMethod(form, prefix, self.fields)
        self.tied.setdefault(holder, []).append(layer)
        return TiedEmbeddingMethod(form, prefix, self.fields)

    def _experts_method(self, layer: torch.nn.Module, prefix: str) -> None:
        # Experts that are not packed are named; those with the most common format are not.
        named = {*self.fields.get("modules", {}), *self.fields.get("modules_to_not_convert", ())}
        names = [f"{prefix}.0.{name}_proj" for name in ("gate", "up", "down")]
        if any(name not in named or weight_format(self.fields, name) for name in names):
            raise ValueError(
                f"{prefix}: packed experts are not loaded in vLLM yet; serve the checkpoint that the directory was made from, "
                "or one that was reordered with --exclude experts, which keeps them as floats"
            )


def _without_bias(form: WeightFormat | None) -> Any:
    """What layers that vLLM fuses share: a bias is a parameter of vLLM's own."""
    return form and (form.bits, form.group_size, _dtypes(form))


def _dtypes(form: WeightFormat) -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((part, dtype) for part, dtype in form.tensors if part != "bias")


@dataclass
class _Shards:
    """The layers that are fused into one of vLLM's, with what one rank holds of each.

    Attributes:
        layer: vLLM's.
        sizes: their rows on this rank.
        shape: N, on this rank, of all of them, and K of the whole weight.
        columns: those that this rank has.
        row_rank, row_ranks: which part of their rows, and of how many; of keys and values, which
            several ranks may share, ``_rows`` says more.
        group_sizes: of the whole weight and of the rank's columns.
        loaded: which parts of which shards came from the files.
    """

    layer: Any
    sizes: list[int]
    k: int
    columns: slice
    row_rank: int
    row_ranks: int
    bits: int
    group_sizes: tuple[int, int]
    loaded: set[tuple[str, int]] = field(default_factory=set)

    def padded(self, index: int) -> slice:
        """Where shard ``index`` stands among the rows of all, each padded to row panels."""
        start = sum(map(formats.padded_rows, self.sizes[:index]))
        return slice(start, start + formats.padded_rows(self.sizes[index]))

    def rows(self, index: int) -> tuple[slice, int]:
        """Rows of the stored layer ``index`` that this rank has, and how many it has in all."""
        size, sharing = self.sizes[index], 1
        if index and self.row_ranks > 1:
            sharing = getattr(self.layer, "num_kv_head_replicas", 1)
        start = self.row_rank // sharing * size
        stored = size * self.row_ranks // sharing
        if (vocabulary := getattr(self.layer, "org_vocab_size", None)) is not None:
            stored = vocabulary  # vLLM pads it, for each rank to have as many rows
        return slice(min(start, stored), min(start + size, stored)), stored

    def load(self, part: str, parameter: Parameter, tensor: Tensor, shard: str | int | None = None) -> None:
        """Copy this rank's part of a stored tensor; vLLM's weight loader of a parameter.

        Raises:
            ValueError: a tensor of another size or dtype, or shards that are not supported.
        """
        if isinstance(shard, tuple):
            raise ValueError(f"{part}: several of vLLM's fused layers in one tensor ({shard})")
        if shard is None and len(self.sizes) > 1:  # they are fused in the files already
            stored = [self.rows(index)[1] for index in range(len(self.sizes))]
            offsets = [sum(stored[:index]) for index in range(len(stored))]
            for index, offset in enumerate(offsets):
                own, _ = self.rows(index)
                rows = slice(offset + own.start, offset + own.stop)
                self._copy(part, parameter, tensor, index, rows, sum(stored))
            return
        index = "qkv".index(shard) if isinstance(shard, str) else shard or 0
        self._copy(part, parameter, tensor, index, *self.rows(index))

    def _copy(self, part: str, parameter: Parameter, tensor: Tensor, index: int, rows: slice, n: int) -> None:
        whole = {part: parameter.dtype}
        _, expected = packed_specs(n, self.k, self.bits, self.group_sizes[0], whole)[part]
        if tensor.dtype != parameter.dtype or tuple(tensor.shape) != expected:
            raise ValueError(
                f"{part} is {tensor.dtype} {tuple(tensor.shape)}; {parameter.dtype} {expected} is expected of {n} x {self.k}"
            )
        if rows.start < rows.stop:
            shape = (n, self.k)
            options = (self.bits, self.group_sizes, rows, self.columns, parameter.device)
            self._put(part, parameter, cut(part, tensor, shape, *options), index)
        self.loaded.add((part, index))

    def _put(self, part: str, parameter: Parameter, values: Tensor, index: int) -> None:
        if part in ("perm", "book"):
            if self.loaded & {(part, other) for other in range(len(self.sizes))} and not (
                torch.equal(parameter.data, values.to(parameter.device))
            ):
                raise ValueError(f"{part}: layers that vLLM fuses have different ones")
            parameter.data.copy_(values)
            return
        padded = self.padded(index)
        if part == "codes":
            row_bytes = parameter.numel() // self.padded(len(self.sizes) - 1).stop
            start = padded.start * row_bytes
            parameter.data[start : start + values.numel()].copy_(values)
        else:
            stop = padded.start + values.shape[1]
            parameter.data[:, padded.start : stop].copy_(values)

    def weights(self, parts: dict[str, Tensor]) -> Iterator[PackedWeight]:
        """The packed weight of all, or those of each, if some end inside a row panel."""
        columns = self.columns.stop - self.columns.start
        form = {"k": columns, "bits": self.bits, "group_size": self.group_sizes[1]}
        stored: dict[str, Any] = {part: parts.get(part) for part in PARTS}
        if not any(size % formats.ROWS_PER_SLAB for size in self.sizes[:-1]):
            yield PackedWeight(**stored, n=sum(self.sizes), **form)
            return
        rows = self.padded(len(self.sizes) - 1).stop
        whole = PackedWeight(**stored, n=rows, **form)
        for index, size in enumerate(self.sizes):
            start = self.padded(index).start
            one = whole.row_panels(start, self.padded(index).stop)
            yield PackedWeight(**{p: getattr(one, p) for p in PARTS}, n=size, **form)


class PackedLinearMethod(LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """A linear layer of vLLM whose weight is stored in the kernels' order.

    Args:
        form, prefix: the weight's format, and the layer's name.
        fields: of the ``quantization_config``.
        tied: the embeddings that get this layer's weight after loading.
    """

    def __init__(self, form: WeightFormat, prefix: str, fields: dict[str, Any], tied: Sequence[torch.nn.Module] = ()) -> None:
        super().__init__()
        self.tied = tied
        self.form = form
        self.prefix = prefix
        self.fields = fields

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
        """Make the parameters that vLLM loads into.

        Raises:
            ValueError: a weight that cannot be split so, or a package without kernels.
        """
        if current_platform.is_cuda() and not _C.built_with_cuda:
            raise ValueError("cutlass_ops was built without CUDA, and has no kernels for the model")
        ranks = input_size // input_size_per_partition
        dtypes = dict(_dtypes(self.form))
        if ranks > 1 and "perm" in dtypes:
            raise ValueError(f"{self.prefix} cannot be split over {ranks} ranks: {ACT_ORDER}")
        n, size = sum(output_partition_sizes), self.form.group_size
        own = sliced_format(n, input_size, size, "rowwise", ranks)[2]
        rank = get_tensor_model_parallel_rank()
        start = rank * input_size_per_partition if ranks > 1 else 0
        row_ranks = output_size // n
        shards = _Shards(
            layer=layer,
            sizes=list(output_partition_sizes),
            k=input_size,
            columns=slice(start, start + input_size_per_partition),
            row_rank=rank if row_ranks > 1 else 0,
            row_ranks=row_ranks,
            bits=self.form.bits,
            group_sizes=(size, own),
        )
        rows = shards.padded(len(shards.sizes) - 1).stop
        specs = packed_specs(rows, input_size_per_partition, self.form.bits, own, dtypes)
        for part, (dtype, shape) in specs.items():
            # None is the default device: vLLM makes layers under that of their parameters.
            parameter = Parameter(torch.zeros(shape, dtype=dtype, device=None), requires_grad=False)
            parameter.weight_loader = partial(shards.load, part)  # type: ignore[attr-defined]
            layer.register_parameter(part, parameter)
        if "perm" in specs:  # vLLM's dummy weights leave integers as they are
            perm = layer.get_parameter("perm").data
            perm.copy_(torch.arange(input_size_per_partition, device=perm.device))
        self.shards = shards
        self.parts = list(specs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Make the packed weight of the parameters, which it keeps.

        Raises:
            ValueError: a tensor that the files lack, or values that no kernel may see.
        """
        if not hasattr(self, "shards"):
            return  # vLLM may call it again
        shards = self.shards
        wanted = {(part, i) for part in self.parts for i in range(len(shards.sizes))}
        if shards.loaded and (missing := wanted - shards.loaded):
            part, index = min(missing)
            raise ValueError(f"{self.prefix}: the files lack {part!r} of its part {index}")
        tensors = {part: getattr(layer, part).data for part in self.parts}
        for part in self.parts:
            delattr(layer, part)
        weights = list(shards.weights(tensors))
        packed = weights[0] if len(weights) == 1 else reorder([w.unpack() for w in weights])
        if problem := packed_problem(packed):
            raise ValueError(f"{self.prefix}.{problem[0]} {problem[1]}")
        act_quant = settings().get("act_quant", self.fields.get("act_quant", "none"))
        linear = MixedLinear(packed, act_quant, self.fields.get("act_symmetric", True))
        layer.register_module(MODULE, linear)
        for embedding in self.tied:
            if embedding.num_embeddings_per_partition != packed.n:
                raise ValueError(
                    f"{self.prefix} has {packed.n} rows on this rank; the embedding tied to it has "
                    f"{embedding.num_embeddings_per_partition}"
                )
            embedding.register_module(MODULE, linear)
        # vLLM's LoRA layers look for the device here.
        layer.register_parameter("qweight", Parameter(linear.codes, requires_grad=False))
        logger.info_once("Using cutlass_ops for packed linear layers")
        del self.shards

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x ``[..., K]`` times the layer's weight, plus bias: ``[..., N]`` of x's dtype."""
        return product(layer, x, bias)


class PackedEmbeddingMethod(PackedLinearMethod):
    """A word embedding of vLLM whose weight is stored in the kernels' order."""

    def embedding(self, layer: torch.nn.Module, ids: Tensor) -> Tensor:
        """The rows of the rank's part of the weight, ``[*ids.shape, K]`` of the model's dtype.

        Raises:
            ValueError: an embedding that is tied to a layer which this rank does not have.
        """
        if MODULE not in layer._modules:
            raise ValueError(f"{self.prefix} is tied to the output head, which another rank of the pipeline has")
        packed: PackedWeight = getattr(layer, MODULE).packed
        return look_up(ids, packed, layer.params_dtype)  # type: ignore[arg-type]


class TiedEmbeddingMethod(PackedEmbeddingMethod):
    """A word embedding that has the weight of a packed output head."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Make nothing: the head brings the weight."""
