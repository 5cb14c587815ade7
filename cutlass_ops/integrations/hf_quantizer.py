"""Packed models through ``from_pretrained``: importing this module registers ``quant_method``
"cutlass_ops".

It is imported as soon as both packages are (see ``registration.py``); a user need not.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from ..checkpoints.gguf_models import exceeds_fp16
from ..checkpoints.safetensors_files import opened
from ..files.packed_config import (
    GUARD,
    GUARD_KEY,
    QUANT_METHOD,
    WeightFormat,
    experts_format,
    has_plain_rows,
    weight_format,
)
from ..files.packed_file import experts_metadata, kernels_metadata, packed_problem, weights_metadata
from ..nn.architecture import Architecture, Conversions, features
from ..nn.buffers import marked
from ..nn.conv import MixedConv
from ..nn.embedding import MixedEmbedding, TiedEmbedding, in_memory
from ..nn.experts import MixedExperts
from ..nn.linear import FusedPart, MixedLinear
from ..nn.model_embeddings import packed_embedding
from ..nn.model_experts import PRODUCTS
from ..nn.quantize_model import quantize_model
from ..weights.packed_experts import PackedExperts
from ..weights.weight import PARTS
from .hf_config import CutlassOpsConfig, PackedModelConfig
from .hf_on_load import OnLoad
from .packed_model import (
    describe,
    experts_without_values,
    packed_layers,
    put_floats,
    without_values,
)

#: The oldest transformers that is supported, as in the extra ``hf``.
OLDEST = "5.20"
#: How many names an error lists.
_MOST_NAMES = 8
#: Layers with a packed weight in a loaded model.
_PACKED = (MixedLinear, MixedConv, MixedEmbedding)
_EMBEDDINGS = (MixedEmbedding, TiedEmbedding)


register_quantization_config(QUANT_METHOD)(CutlassOpsConfig)


def _guarded(to_json_string: Callable[..., str]) -> Callable[..., str]:
    """``PreTrainedConfig.to_json_string`` with the guard that keeps transformers without
    cutlass_ops from loading a packed directory.

    An attribute would not suffice: transformers removes the key from every configuration that it
    saves.
    """

    @functools.wraps(to_json_string)
    def guarded(self: PreTrainedConfig, *args: Any, **kwargs: Any) -> str:
        text = to_json_string(self, *args, **kwargs)
        quantization = getattr(self, "quantization_config", None) or {}
        fields = quantization if isinstance(quantization, dict) else vars(quantization)
        if fields.get("quant_method") != QUANT_METHOD:
            return text
        return json.dumps({**json.loads(text), GUARD_KEY: GUARD}, indent=2, sort_keys=True) + "\n"

    return guarded


PreTrainedConfig.to_json_string = _guarded(  # type: ignore[method-assign]
    PreTrainedConfig.to_json_string
)


@functools.cache
def _guard_heads() -> None:
    """Let ``resize_token_embeddings`` refuse a model whose head or embedding is packed before
    it resizes either.

    Called where the first model is packed: the class does not exist yet when this module is
        imported.
    """
    base = _pretrained_model()
    resize = base.resize_token_embeddings

    @functools.wraps(resize)
    def guarded(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        embeddings, head = self.get_input_embeddings(), self.get_output_embeddings()
        if not isinstance(head, MixedLinear) and not isinstance(embeddings, _EMBEDDINGS):
            return resize(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)
        rows: int = (
            embeddings.num_embeddings
            if isinstance(embeddings, _EMBEDDINGS)
            else len(embeddings.weight)
        )
        wanted = rows if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted == rows:
            return embeddings
        raise ValueError(
            f"the {'output head' if isinstance(head, MixedLinear) else 'embedding'} is packed and "
            f"has {rows} rows; "
            f"{wanted} are requested: "
            "resize the float model and pack it then, or make this one float first "
            "(model.dequantize())"
        )

    base.resize_token_embeddings = guarded


@functools.cache
def _keep_experts() -> None:
    """Let ``save_pretrained`` write packed experts under the model's names, which its conversions
    of floats would change.

    Called where the first model with packed experts is saved: the function does not exist yet when
    this module is imported.
    """
    utils: Any = import_module("transformers.modeling_utils")
    revert = utils.revert_weight_conversion

    @functools.wraps(revert)
    def kept(model: Any, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        names = tuple(
            f"{name}." for name, module in model.named_modules() if isinstance(module, MixedExperts)
        )
        own = {name: tensor for name, tensor in state_dict.items() if name.startswith(names)}
        others = {name: tensor for name, tensor in state_dict.items() if name not in own}
        return {**revert(model, others, *args, **kwargs), **own}

    utils.revert_weight_conversion = kept


def _pretrained_model() -> Any:
    return import_module("transformers.modeling_utils").PreTrainedModel


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of a model and of the models inside it."""
    return [module.config for module in model.modules() if isinstance(module, _pretrained_model())]


def _packed_names(files: Sequence[str]) -> list[str]:
    """The weights that are packed in a model's files."""
    names: list[str] = []
    for file in files:
        with opened(Path(file)) as tensors:
            stored: list[str] = tensors.keys()
            names += [name.removesuffix(".codes") for name in stored if name.endswith(".codes")]
    return names


def _listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


@register_quantizer(QUANT_METHOD)
class CutlassOpsQuantizer(HfQuantizer):
    """Makes :class:`cutlass_ops.MixedLinear` layers, packed convolutions and
    :class:`cutlass_ops.nn.MixedExperts` for the tensors of a packed model, and checks the loaded
    model.

    A float model is loaded as it is and then quantised, by :class:`cutlass_ops.CutlassOpsConfig`.

    The ``dtype`` of ``from_pretrained`` applies to x, norms and embeddings; scales and zero points
    of a packed model keep the checkpoint's. With a ``device_map`` that has "cpu" or "disk", weights
    of a packed model stay on the other devices unless ``offload_buffers=True`` is given: they are
    buffers.
    """

    def __init__(
        self, quantization_config: CutlassOpsConfig | PackedModelConfig, pre_quantized: bool = True
    ) -> None:
        super().__init__(quantization_config, pre_quantized=pre_quantized)
        if pre_quantized and self._on_load is not None:
            raise ValueError(
                "the model's quantization_config says how to quantise it, and not what is "
                "packed in its files"
            )
        self._moved: dict[str, str] = {}
        self._early: OnLoad | None = None
        self._places: set[str] = set()

    @property
    def _on_load(self) -> CutlassOpsConfig | None:
        """How a float model is quantised once it is loaded; None where a packed one is loaded."""
        return (
            self.quantization_config
            if isinstance(self.quantization_config, CutlassOpsConfig)
            else None
        )

    @property
    def requires_calibration(self) -> bool:  # type: ignore[override, unused-ignore]
        """Whether transformers shall refuse a model that is not packed."""
        return self._on_load is None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to quantise weights that are offloaded, of which the model has no values.

        Raises:
            ValueError: a ``device_map`` that offloads.
        """
        # transformers calls this again with the map that it makes for "auto".
        self._places = places = (
            set(map(str, device_map.values())) if isinstance(device_map, Mapping) else set()
        )
        if self._on_load is not None and (
            "disk" in places or ("cpu" in places and len(places) > 1)
        ):
            raise ValueError(
                f"device_map has {', '.join(sorted(places))}: weights that are offloaded cannot be "
                "quantised; load the model "
                "to the CPU or to GPUs alone, or load a packed directory (cutlass-ops reorder)"
            )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor is quantised when it is read; accelerate spreads float layers alone over
        several devices.
        """
        return self._early is not None and len(self._places) < 2 and self._early.takes(param_name)

    def get_quantize_ops(self) -> Any:
        """The operation that quantises such a tensor."""
        return self._early

    def update_tp_plan(self, config: Any) -> Any:
        """Say which transformers reads packed directories: older ones have this hook, but not the
        next, and would look for a file named ``packed_config.GUARD``.
        """
        knows_next = hasattr(HfQuantizer, "update_attn_implementation")
        if not knows_next and getattr(config, GUARD_KEY, None) == GUARD:
            raise ImportError(
                f"transformers {transformers.__version__} is installed; packed models need "
                f"{OLDEST} or later"
            )
        return config

    def update_attn_implementation(self, config: Any) -> Any:
        """Take ``packed_config.GUARD`` out of the configuration."""
        # transformers has no other hook between reading the configuration and looking for the
        # files.
        if getattr(config, GUARD_KEY, None) == GUARD:
            delattr(config, GUARD_KEY)
        return config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if (getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1) > 1:
            raise ValueError(
                "tp_plan and tp_size split parameters, and packed weights are buffers in the order "
                "of the kernels, which "
                "transformers cannot split: spread layers over GPUs with device_map, or serve the "
                "model in vLLM or SGLang"
            )
        if (on_load := self._on_load) is not None:
            self._early = OnLoad(model, on_load)
            self._keep_sizes(model)
            return model
        config = self.quantization_config.to_dict()
        if part := config.get("tensor_parallel"):
            raise ValueError(
                f"the files hold one rank of a model that was split ({part!r:.22} ...); "
                "reorder it unsplit"
            )
        if model.dtype is torch.float16 and exceeds_fp16(model.config.model_type):
            warnings.warn(
                f"{type(model).__name__} exceeds the range of float16 and may give NaN; load it "
                "with dtype=torch.bfloat16",
                stacklevel=2,
            )
        treatment = config.get("act_quant", "none"), config.get("act_symmetric", True)
        architecture = Architecture(model)
        layers, experts = self._packed_layers(
            model, config, kwargs.get("checkpoint_files"), architecture
        )
        tied = self._tied(model, config, layers, architecture)
        for name in (*layers, *experts):
            module = model.get_submodule(name)
            try:
                if name in layers:
                    layer: nn.Module = without_values(module, layers[name], *treatment)
                else:
                    layer = experts_without_values(module, experts[name], *treatment)
            except (TypeError, ValueError) as error:
                raise ValueError(f"quantization_config of {name!r}: {error}") from error
            model.set_submodule(name, layer)
        for name, holder in tied.items():
            model.set_submodule(
                name, packed_embedding(model.get_submodule(name), model.get_submodule(holder))
            )
        for name in (*layers, *experts, *tied):
            parent = model.get_submodule(name.rpartition(".")[0])
            # transformers initialises modules that it did not load, and their parents, some of
            # which access the layer's weight.
            if not parent._non_persistent_buffers_set:
                parent._is_hf_initialized = True
        _untie(model)
        self._watch(model)
        return model

    def _packed_layers(
        self,
        model: Any,
        config: Mapping[str, Any],
        files: Sequence[str] | None,
        architecture: Architecture,
    ) -> tuple[dict[str, WeightFormat], dict[str, dict[str, WeightFormat]]]:
        """Formats of the layers to replace, by the model's names of them, and of experts' products.

        Raises:
            ValueError: a packed weight of which the model cannot make a layer.
        """
        experts: dict[str, dict[str, WeightFormat]] = {}
        if files is None:  # a state_dict that load_model made, with the model's own names
            layers = [
                name for name, module in model.named_modules() if features(module) is not None
            ]
            layers += [
                name for name, holder in config.get("embeddings", {}).items() if name == holder
            ]
            for name in architecture.experts:
                for product in PRODUCTS:
                    if (form := experts_format(config, f"{name}.{product}")) is not None:
                        experts.setdefault(name, {})[product] = form
            return {
                name: form for name in layers if (form := weight_format(config, name)) is not None
            }, experts
        named = config.get("modules", {}).keys() | set(config.get("modules_to_not_convert", ()))
        found: dict[str, WeightFormat] = {}
        wrong: dict[str, str] = {}
        for stored in _packed_names(files):
            if (place := architecture.place_experts(stored)) is not None:
                form = experts_format(config, ".".join(place)) or experts_format(config, stored)
                if form is None:
                    wrong[stored] = "quantization_config does not name it"
                else:
                    experts.setdefault(place[0], {})[place[1]] = form
                continue
            name, reason = architecture.place(stored, convolutions=True)
            # save_pretrained has the model's names in the configuration, and the checkpoint's in
            # the files.
            form = weight_format(config, name if stored not in named and name in named else stored)
            if form is None:
                wrong[stored] = "modules_to_not_convert names it"
            elif reason:
                wrong[stored] = reason
            elif name:
                found[name] = form
        for name, products in experts.items():
            if lacking := [product for product in PRODUCTS if product not in products]:
                wrong[name] = f"{lacking[0]} of its experts is not packed"
        if wrong:
            raise ValueError(
                f"{Path(files[0]).parent}: packed, but not linear layers or experts of "
                f"{type(model).__name__}: "
                + _listed([f"{name} ({reason})" for name, reason in wrong.items()])
                + "; reorder the checkpoint with this version of cutlass_ops"
            )
        return found, experts

    def _tied(
        self,
        model: Any,
        config: Mapping[str, Any],
        layers: dict[str, WeightFormat],
        architecture: Architecture,
    ) -> dict[str, str]:
        """The layers whose weights the embeddings share, by the model's names of both.

        A model without the head, such as AutoModel makes, gets the head's weight as its
        embedding's, in ``layers`` too.

        Raises:
            ValueError: embeddings that cannot share it.
        """

        def own_name(stored: str) -> str:
            return architecture.place(stored)[0] or (stored if stored in modules else "")

        modules = dict(model.named_modules())
        tied = {}
        for stored, stored_holder in config.get("embeddings", {}).items():
            name, holder = own_name(stored), own_name(stored_holder)
            if stored == stored_holder or not name:
                continue
            if not isinstance(modules[name], nn.Embedding) or (holder and holder not in layers):
                raise ValueError(
                    f"quantization_config: embeddings ties {stored!r} to "
                    f"{stored_holder!r}, which cannot be"
                )
            holder = holder or self._moved.get(stored_holder, "")
            if holder:
                tied[name] = holder
            elif (form := weight_format(config, stored_holder)) is not None:
                layers[name] = form
                self._moved[stored_holder] = name
        return tied

    def get_weight_conversions(self) -> list[Any]:
        """The names of a head's tensors where the model has no head and its
        embedding takes them.
        """
        renaming = import_module("transformers.core_model_loading").WeightRenaming
        self._renamings = [
            renaming(rf"^{re.escape(head)}\.{part}$", f"{name}.{part}")
            for head, name in self._moved.items()
            for part in PARTS
        ]
        return self._renamings

    def _watch(self, model: Any) -> None:
        """Keep the missing and unexpected tensors that transformers finds and only logs, and the
        sizes.
        """
        adjust = model._adjust_missing_and_unexpected_keys
        self._found = None
        self._keep_sizes(model)

        def keep(info: Any) -> None:
            adjust(info)
            self._found = info

        model._adjust_missing_and_unexpected_keys = keep

    def _keep_sizes(self, model: Any) -> None:
        """Keep the sizes of parameters, which transformers does not compare with the files'
        before version 5.23.
        """
        self._sizes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def _check_sizes(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.shape != (size := self._sizes.get(name, parameter.shape)):
                raise ValueError(
                    f"tensor {name!r} is {list(parameter.shape)}; the model's is {list(size)}"
                )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if (on_load := self._on_load) is not None:
            assert self._early is not None
            self._check_sizes(model)
            self._early.finish()
            del model.hf_quantizer  # quantize_model attaches the one of a packed model
            return quantize_model(model, **on_load.options())
        del model._adjust_missing_and_unexpected_keys
        found, self._found = self._found, None
        # save_pretrained would undo them, and the configuration then has the embedding's own name.
        model._weight_conversions = [
            c for c in model._weight_conversions if all(c is not own for own in self._renamings)
        ]
        if found is None:
            raise RuntimeError(
                "this version of transformers does not say which tensors of the files it loaded"
            )
        self._check_found(model, found)
        self._check_sizes(model)
        for name, layer in packed_layers(model).items():
            with in_memory(layer):
                layer.view_buffers()
                problem = packed_problem(layer.packed)
            layer.view_buffers()
            if problem:
                raise ValueError(f"tensor {f'{name}.{problem[0]}'!r} {problem[1]}")
        self._put_in_eights(model)
        return model

    def _put_in_eights(self, model: Any) -> None:
        """Bring the experts' rows of gate and up, as earlier versions packed them, into the
        order of ``gated``.
        """
        for name, module in model.named_modules():
            if isinstance(module, MixedExperts) and has_plain_rows(
                self.quantization_config.to_dict()
            ):
                if not module.has_values():
                    raise ValueError(
                        f"{name!r} is offloaded and was packed by an earlier version of "
                        "cutlass_ops, in another order of rows: "
                        "load the model without offloading and save it (save_pretrained), or "
                        "reorder its checkpoint again"
                    )
                module.gate_up_proj.put_in_eights()

    def _check_found(self, model: Any, found: Any) -> None:
        """Refuse a model with uninitialised parts, and files with unused tensors.

        As in transformers, the body of a model may be loaded without its head or with a new, random
        one.
        """
        parts = {f"{name}.{part}" for name in packed_layers(model) for part in PARTS}
        if lost := sorted(parts & found.missing_and_mismatched()):
            raise ValueError(
                f"tensor {lost[0]!r} is not in the model's files, or is of another size"
            )
        tied = getattr(model, "all_tied_weights_keys", {})
        missing = {name for name in found.missing_keys if name not in tied}
        unexpected = set(found.unexpected_keys)
        headless = model.base_model is model
        saved = getattr(model.config, "architectures", None) or [type(model).__name__]
        if headless or type(model).__name__ not in saved:
            body = f"{model.base_model_prefix}."
            missing = {name for name in missing if headless or name.startswith(body)}
            children = dict(model.named_children())
            unexpected = {
                name
                for name in unexpected
                if name.startswith(body) or name.partition(".")[0] in children
            }
        if unexpected:
            raise ValueError(f"the model has no place for {_listed(sorted(unexpected))}")
        if missing:
            raise ValueError(f"the file lacks {_listed(sorted(missing))}")

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """The tensors that ``save_pretrained`` writes: fused layers are saved as separate ones.

        The configuration is brought up to date with the layers that the model has now.

        Raises:
            ValueError: packed layers that a configuration cannot describe (see :func:`describe`),
                or experts whose tensors transformers would convert.
        """
        if getattr(model, "_hf_peft_config_loaded", False):  # adapters alone are saved
            return None, {}
        experts = _products(model)
        attach(model)
        parts = {
            name: module for name, module in model.named_modules() if isinstance(module, FusedPart)
        }
        shared = {id(part.shared) for part in parts.values()}
        modules = dict(model.named_modules())
        fused = {name for name, module in modules.items() if id(module) in shared}
        layers = {
            name: m.packed
            for name, m in modules.items()
            if isinstance(m, _PACKED) and name not in fused
        }
        layers.update({name: part.packed for name, part in parts.items()})
        layers.update({name: packed.weight for name, packed in experts.items()})
        metadata = {
            "weights": weights_metadata(
                {name: (w.n, w.k, w.bits, w.group_size) for name, w in sorted(layers.items())}
            )
        }
        metadata |= kernels_metadata({name: w.kernel_size for name, w in sorted(layers.items())})
        if experts:
            metadata["experts"] = experts_metadata(
                {name: (p.experts, p.n, p.gated) for name, p in experts.items()}
            )
        prefixes = tuple(f"{name}." for name in fused)
        state = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if not name.startswith(prefixes)
        }
        for name in marked(state):
            del state[name]
        for name, part in parts.items():
            # Parts may share an act order and a code book, and transformers saves no memory twice.
            tensors = part.packed.tensors().items()
            state.update(
                {
                    f"{name}.{key}": tensor.clone() if key in ("perm", "book") else tensor
                    for key, tensor in tensors
                }
            )
        return state, metadata

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Replace the packed layers by float layers of the same values."""
        if isinstance(dtype, str):  # the configuration's, after save_pretrained wrote it
            dtype = getattr(torch, dtype)
        with torch.device("meta"):
            plain = type(model)(copy.deepcopy(model.config))
        put_floats(model, plain, dtype or model.dtype)
        for config in _configs(model):
            vars(config).pop("_is_quantized", None)
        model.model_tags = [tag for tag in model.model_tags or () if tag != QUANT_METHOD]
        return model

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: yes, by PEFT's LoRA; packed weights are frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` traces through: yes."""
        return True


def _products(model: Any) -> dict[str, PackedExperts]:
    """The packed products of a model's experts, by name, which a file can hold from then on.

    Raises:
        ValueError: transformers would convert their tensors when it loads them.
    """
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, MixedExperts)
    }
    if not layers:
        return {}
    _keep_experts()
    products = {
        f"{name}.{product}": getattr(layer, product).packed
        for name, layer in layers.items()
        for product in PRODUCTS
    }
    conversions = Conversions(model)
    if names := [name for name in products if not conversions.keep(f"{name}.codes")]:
        raise ValueError(
            f"packed experts of {type(model).__name__} cannot be saved, since transformers "
            "converts tensors of these names "
            f"when it loads them: {_listed(names)}; save the float model (model.dequantize())"
        )
    return products


# ---- models that were packed in memory


def check_method(model: Any) -> None:
    """Raise ValueError for a model that another method quantised: a model is saved by one."""
    other = getattr(model, "hf_quantizer", None)
    if other is None or isinstance(other, CutlassOpsQuantizer):
        return
    method = getattr(
        other.quantization_config.quant_method, "value", other.quantization_config.quant_method
    )
    # transformers leaves the quantizer in a model whose GGUF weights it dequantised; weights that
    # it did not dequantise are bytes.
    if method != "gguf" or not all(
        parameter.is_floating_point() for parameter in model.parameters()
    ):
        raise ValueError(
            f"the model is quantised by {method} already; its layers cannot be packed in place: "
            "reorder its checkpoint"
        )


def attach(model: Any) -> None:
    """Let a model's configuration describe its packed layers, so that ``save_pretrained`` and
    similar methods handle them.

    Raises:
        ValueError: as :func:`describe`.
    """
    config = PackedModelConfig(**describe(model))
    if not isinstance(getattr(model, "hf_quantizer", None), CutlassOpsQuantizer):
        model.hf_quantizer = CutlassOpsQuantizer(config)
        model.is_quantized = True
        model.quantization_method = QUANT_METHOD
        for inner in _configs(model):
            inner._is_quantized = True  # some models then read no weights of linear layers
    model.add_model_tags(QUANT_METHOD)  # of the card that push_to_hub writes
    model.hf_quantizer.quantization_config = config
    model.config.quantization_config = config
    _untie(model)


def _input_embeddings(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _untie(model: Any) -> None:
    """Let packed layers share no weight with others: their tensors are separate."""
    layers = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, (MixedLinear, *_EMBEDDINGS))
    }
    if isinstance(model.get_output_embeddings(), MixedLinear) or isinstance(
        _input_embeddings(model), _EMBEDDINGS
    ):
        _guard_heads()
        model.config.tie_word_embeddings = False
    ties = model.all_tied_weights_keys.items()
    model.all_tied_weights_keys = {
        target: source for target, source in ties if not layers & {target, source}
    }
