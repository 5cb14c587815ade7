"""Causal models of transformers with packed weights: :func:`load_model`."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints import load_checkpoint
from ..checkpoints.gguf_models import exceeds_fp16
from ..checkpoints.hub import local_path
from ..checkpoints.safetensors_files import INDEX, json_object
from ..files.checkpoint_experts import StackedWeight
from ..files.conversion_plan import Options, Step, plan
from ..files.packed_config import ACTIVATIONS, QUANT_METHOD, WeightFormat, quantization_config
from ..files.packed_file import is_packed, load_packed, packed_info
from ..nn.architecture import Architecture, check_layers, features
from ..nn.experts import MixedExperts
from ..nn.linear import MixedLinear, fuse_linears
from ..nn.model_experts import GATE_UP, PRODUCTS
from ..ops import gemm
from ..weights.packed_experts import PackedExperts, in_eights
from ..weights.packed_weight import PackedWeight
from ..weights.reorder import reorder
from ..weights.weight import CheckpointError

_MISMATCH = "{}: tensor {!r} is {}; the model's is {}"


def load_model(
    path: str | os.PathLike[str],
    *,
    config: Any = None,
    options: Options | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    act_quant: str | None = None,
    act_symmetric: bool | None = None,
    fuse: bool = True,
) -> nn.Module:
    """Load a causal model of transformers, its linear layers and quantised word embeddings packed.

    Args:
        path: a directory that ``cutlass-ops reorder`` wrote, or a packed file; or any checkpoint
            that :func:`cutlass_ops.load_checkpoint` reads, which is packed in memory; or the id of
            a model of the Hub with safetensors files, "organisation/model".
        config: transformers' configuration; None takes the one that a GGUF file's keys give, else
            the one beside the file, else the one in a packed file's metadata.
        options: :class:`cutlass_ops.files.Options`, which parts of a checkpoint to pack, and how
            its float matrices are quantised; None packs only quantised weights.
        dtype: of x, and so of norms and embeddings; None takes the configuration's, but bfloat16 in
            place of a float16 whose range the model exceeds.
        device: the model's device.
        act_quant, act_symmetric: as in :class:`cutlass_ops.MixedLinear`; None takes what the
            directory, packed file or checkpoint says, else "none" and True.
        fuse: whether layers that multiply the same x are fused (:func:`cutlass_ops.fuse_linears`);
            layers that cannot be stay as they are.

    Returns:
        The model, in evaluation mode. Its packed weights are frozen; gradients flow through them,
        to adapters of PEFT for example (:func:`cutlass_ops.mixed_gemm` says how).

    Raises:
        ModuleNotFoundError: transformers is not installed.
        CheckpointError: a file that is not what it claims to be, or no such file.
        ValueError: a tensor of the file that has no place in the model, one of the model that is
            not in the file, other shapes, nothing to pack, or a configuration that transformers has
            no causal language model for.
    """
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; load_model needs it: pip install 'cutlass_ops[hf]'"
        ) from error
    # registers "cutlass_ops" where the import hook is left out
    import_module("cutlass_ops.integrations.hf_quantizer")
    path = local_path(path)
    config = _config(transformers, path) if config is None else copy.deepcopy(config)
    if dtype is None:
        dtype = getattr(config, "dtype", None) or torch.float32
        if dtype is torch.float16 and exceeds_fp16(config.model_type):
            dtype = torch.bfloat16
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    check_layers(config.to_dict())
    other = _other_class(transformers, config)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{path}: transformers has no causal language model for {type(config).__name__}{other}"
        )
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    composite = model_class.config_class is config.sub_configs.get("text_config")
    if composite:
        # Images and text, with a causal class for the text alone, which transformers'
        # AutoModelForCausalLM makes as well.
        config = config.get_text_config()
        if quantization:
            config.quantization_config = quantization
    if path.is_dir() and quantization.get("quant_method") == QUANT_METHOD:
        if (path / INDEX).is_file() and not isinstance(
            json_object(path / INDEX).get("metadata"), dict
        ):
            raise CheckpointError(
                path / INDEX, 'has no object "metadata", which transformers expects'
            )
        source: dict[str, Any] = {"pretrained_model_name_or_path": path}
    else:
        with torch.device("meta"):
            model = model_class(config)
        state = _state(path, config, model, options, dtype)
        # Checked before transformers allocates memory: sizes of a damaged header may have any
        # magnitude.
        for name, parameter in model.named_parameters():
            if name in state and state[name].shape != parameter.shape:
                raise ValueError(
                    _MISMATCH.format(path, name, list(state[name].shape), list(parameter.shape))
                )
        source = {"pretrained_model_name_or_path": None, "state_dict": state}
    try:
        # from_pretrained would take the default device; the model goes to ``device``
        # when it is complete.
        with torch.device("cpu"):
            model, found = model_class.from_pretrained(
                **source,
                config=config,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}{other}") from error
    for name, shape, expected in sorted(found["mismatched_keys"]):
        raise ValueError(_MISMATCH.format(path, name, list(shape), list(expected)))
    unexpected = found["unexpected_keys"]
    if composite:
        own = {model.base_model_prefix, *dict(model.named_children())}
        unexpected = {name for name in unexpected if name.partition(".")[0] in own}
    if unexpected:
        raise ValueError(
            f"{path}: the model has no place for {', '.join(sorted(unexpected))}{other}"
        )
    if found["missing_keys"]:
        raise ValueError(
            f"{path}: the file lacks {', '.join(sorted(found['missing_keys']))}{other}"
        )
    generation = path / "generation_config.json"
    if generation.is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    for module in model.modules():
        if isinstance(module, MixedLinear | MixedExperts):
            module.act_quant = module.act_quant if act_quant is None else act_quant
            module.act_symmetric = module.act_symmetric if act_symmetric is None else act_symmetric
    loaded: nn.Module = model.to(device).eval()
    if fuse:
        fuse_linears(loaded)  # there, where a GPU packs them
    return loaded


def _other_class(transformers: ModuleType, config: Any) -> str:
    """Advice for a model that is no causal language model by its configuration; "" if it may be
    one.
    """
    names = getattr(config, "architectures", None) or ()
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for name in names:
        if getattr(causal, "__name__", None) != name and hasattr(transformers, name):
            return (
                f"; the configuration names a {name}, and load_model makes causal language models: "
                f"transformers.{name}.from_pretrained loads a directory that cutlass-ops "
                "reorder wrote"
            )
    return ""


def _config(transformers: ModuleType, path: Path) -> Any:
    """The configuration of a directory, a GGUF file, or a file's directory.

    Code that comes with a checkpoint is never run.
    """
    directory = path if path.is_dir() else path.parent
    fields: Mapping[str, Any] = {}
    problem = f"there is no config.json in {directory}, and no config is given"
    in_keys = path.is_dir() and any(path.glob("*.gguf")) and not (path / "config.json").is_file()
    if in_keys or (path.is_file() and path.suffix == ".gguf"):
        checkpoint = load_checkpoint(path)
        fields, problem = checkpoint.config, f"{checkpoint.config_problem}; config can be given"
    elif (directory / "config.json").is_file():
        stored = json_object(directory / "config.json")
        quantization = stored.get("quantization_config")
        if not isinstance(quantization, (dict, type(None))):
            raise CheckpointError(
                directory / "config.json",
                f"quantization_config is {quantization!r:.100}; an object is expected",
            )
        kind = stored.get("model_type")
        if "auto_map" in stored and kind not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"{directory}: models of type {kind!r} are code of the checkpoint, which "
                "load_model does not run; "
                "AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True) runs it, "
                "on a directory that cutlass-ops reorder wrote"
            )
        return transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    elif path.is_file() and is_packed(path):
        fields = packed_info(path).config
    if not isinstance(fields.get("model_type"), str):
        raise CheckpointError(path, problem)
    return transformers.AutoConfig.for_model(**fields)


def _tensors(
    path: Path, architecture: Architecture, options: Options | None, dtype: torch.dtype
) -> tuple[
    Iterator[tuple[str, PackedWeight | PackedExperts | Tensor]],
    Mapping[str, str],
    tuple[str, bool] | None,
]:
    """The contents of a file or directory.

    Returns:
        Packed weights and other tensors by name; the embeddings whose rows a weight has as well;
        and the ``act_quant`` and ``act_symmetric`` that it was made for, if it says so.
    """
    if is_packed(path):
        info = packed_info(path)
        stated = info.options.get(ACTIVATIONS)
        return (
            iter(load_packed(path).items()),
            info.tied,
            tuple(stated) if isinstance(stated, list) else None,
        )
    checkpoint = load_checkpoint(path)
    steps = plan(checkpoint, options or Options(), architecture, dtype=dtype, or_floats=True).steps
    for warning in checkpoint.warnings:
        warnings.warn(f"{path}: {warning}", stacklevel=4)
    tied = {
        step.name: step.entry.tied_to
        for step in steps
        if step.weight is not None and step.entry.tied_to
    }
    return ((step.name, _value(step)) for step in steps), tied, checkpoint.activations


def _value(step: Step) -> PackedWeight | PackedExperts | Tensor:
    if step.weight is None:
        return step.entry.values()
    return (
        step.weight.pack()
        if isinstance(step.weight, StackedWeight)
        else reorder(step.weight.read())
    )


def _state(
    path: Path, config: Any, model: nn.Module, options: Options | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The state_dict for a model; its packed weights are added to ``config``."""
    state: dict[str, Tensor] = {}
    weights: dict[str, WeightFormat] = {}
    experts: set[str] = set()
    embeddings: dict[str, str] = {}
    architecture = Architecture(model)
    tensors, tied, activations = _tensors(path, architecture, options, dtype)
    for name, value in tensors:
        if isinstance(value, Tensor):
            state[name] = value
            continue
        if isinstance(value, PackedExperts):
            layer, value = _experts_place(path, name, value, architecture)
            experts.add(layer)
            weights[layer] = _add(state, layer, value)
            continue
        if value.gated:
            raise ValueError(
                f"{path}: {name!r} is a gated weight, which takes no layer's place: store gate and "
                "up apart (reorder(weight.unpack()) has the rows of both); load_model packs them so"
            )
        layer, reason = architecture.place(name)
        if architecture.is_embedding(name):
            reason = architecture.reason_to_keep(name)
        # A weight of another module, such as an expert, becomes a tensor of its values.
        if reason or not layer:
            state[f"{name}.weight"] = gemm.dequantize(value, dtype=dtype)
            continue
        if (embedding := tied.get(name)) is not None:
            if architecture.reason_against_rows(embedding):
                state[f"{embedding}.weight"] = gemm.dequantize(value, dtype=dtype)
            else:
                embeddings[architecture.place(embedding)[0]] = layer
        linear: Any = model.get_submodule(layer)
        if isinstance(linear, nn.Embedding):
            embeddings[layer] = layer
        if (
            shape := features(linear) or (linear.num_embeddings, linear.embedding_dim)
        ) != value.shape:
            raise ValueError(f"{path}: {name!r} is {list(value.shape)}; the layer is {list(shape)}")
        weights[layer] = _add(state, layer, value)
        if linear is model.get_output_embeddings():  # type: ignore[operator, unused-ignore]
            config.tie_word_embeddings = False  # the head has separate tensors
    for layer in sorted(experts):
        module = layer.rpartition(".")[0]
        if lacking := {f"{module}.{product}" for product in PRODUCTS} - experts:
            raise ValueError(
                f"{path}: {layer!r} are packed experts, and {min(lacking)!r} is not packed"
            )
    linears = [name for name, module in model.named_modules() if features(module) is not None]
    not_converted = [name for name in linears if name not in weights]
    if not weights:
        what = (
            "none of its quantised weights is a linear layer or an embedding of "
            f"{type(model).__name__}"
        )
        warnings.warn(f"{path}: {what}: their values are loaded as {dtype}", stacklevel=3)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return state
    treatment = activations or ("none", True)
    config.quantization_config = quantization_config(
        weights, not_converted, *treatment, experts, embeddings
    )
    return state


def _add(state: dict[str, Tensor], layer: str, value: PackedWeight | PackedExperts) -> WeightFormat:
    """Put a packed weight into a state_dict; returns its entry for the configuration."""
    parts = value.tensors()
    state.update({f"{layer}.{part}": tensor for part, tensor in parts.items()})
    dtypes = {part: tensor.dtype for part, tensor in sorted(parts.items()) if part != "codes"}
    return WeightFormat(value.bits, value.group_size, tuple(dtypes.items()))


def _experts_place(
    path: Path, name: str, value: PackedExperts, architecture: Architecture
) -> tuple[str, PackedExperts]:
    """The model's name of the product of packed experts, and these experts with gate's and up's
    rows in eights.
    """
    place = architecture.place_experts(name)
    if place is None:
        raise ValueError(
            f"{path}: {name!r} are packed experts; {type(architecture.model).__name__} has "
            "none of that name"
        )
    if value.shape != (expected := architecture.experts[place[0]].shape(place[1])):
        raise ValueError(
            f"{path}: {name!r} is {list(value.shape)}; the model's experts are {list(expected)}"
        )
    gate_up = place[1] == GATE_UP
    if value.gated and not gate_up:
        raise ValueError(
            f"{path}: {name!r} was packed with gated=True, which is for weights of gate and up"
        )
    return ".".join(place), in_eights(value) if gate_up and not value.gated else value
