"""Models of transformers with packed weights: :func:`load_model`, and the registration that ``from_pretrained`` needs.

transformers finds quantisation methods only by name in its own tables, and has no entry points for packages to add to them.
So ``import cutlass_ops`` watches for the import of the module that holds those tables, before or after, and adds the method
"cutlass_ops" then: ``AutoModelForCausalLM.from_pretrained`` takes a directory that ``cutlass-ops reorder`` wrote, and neither
package makes the import of the other slower.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .checkpoints import load_checkpoint
from .model_directory import QUANT_METHOD, WeightFormat, quantization_config
from .nn import MixedLinear, fuse_linears
from .plan import Options, plan
from .reorder import is_packed, load_packed, packed_info, reorder
from .weight import CheckpointError, PackedWeight

# ---- registration

_TABLES = "transformers.quantizers.auto"


def _register() -> None:
    try:
        import_module("cutlass_ops.hf_quantizer")
    except (ImportError, AttributeError) as error:
        # Someone imports transformers and may not want packed models at all.
        warnings.warn(f"this transformers cannot load packed models of cutlass_ops: {error}", stacklevel=2)


class _Watch(MetaPathFinder):
    """Finds nothing itself; lets :func:`_register` run right after the module with transformers' tables did."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TABLES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Register with transformers now, if its tables are imported already, or as soon as they are."""
    if _TABLES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Watch())


# ---- loading


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
    """Load a causal model of transformers, its linear layers packed.

    Args:
        path: a directory that ``cutlass-ops reorder`` wrote, or a packed file; or any checkpoint that
            :func:`cutlass_ops.load_checkpoint` reads, which is packed in memory.
        config: transformers' configuration; None takes the one that a GGUF file's keys give, else the one beside the file,
            else the one in a packed file's metadata.
        options: what of a checkpoint to pack, and how its float matrices are quantised; None packs what is quantised.
        dtype: of x, and so of norms and embeddings; None takes the configuration's.
        device: where the model shall be.
        act_quant, act_symmetric: as in :class:`cutlass_ops.MixedLinear`; None takes what the directory says, else "none"
            and True.
        fuse: whether layers that multiply the same x are made one (:func:`cutlass_ops.fuse_linears`); layers that cannot be
            stay as they are.

    Returns:
        The model, in evaluation mode.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        CheckpointError: a file that is not what it claims to be, or no such file.
        ValueError: the file's names or shapes are not those of the model, or there is nothing to pack.
    """
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; load_model needs it: pip install 'cutlass_ops[hf]'") from error
    path = Path(path)
    config = _config(transformers, path) if config is None else copy.deepcopy(config)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if path.is_dir() and quantization.get("quant_method") == QUANT_METHOD:
        source: dict[str, Any] = {"pretrained_model_name_or_path": path}
    else:
        with torch.device("meta"):
            modules = dict(model_class(config).named_modules())
        state = _state(path, config, modules, options, dtype)
        source = {"pretrained_model_name_or_path": None, "state_dict": state}
    model, found = model_class.from_pretrained(
        **source, config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
    )
    for name, shape, expected in sorted(found["mismatched_keys"]):
        raise ValueError(f"{path}: tensor {name!r} is {list(shape)}; the model's is {list(expected)}")
    if found["unexpected_keys"]:
        raise ValueError(f"{path}: the model has no place for {', '.join(sorted(found['unexpected_keys']))}")
    if found["missing_keys"]:
        raise ValueError(f"{path}: the file lacks {', '.join(sorted(found['missing_keys']))}")
    generation = path / "generation_config.json"
    if generation.is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    for module in model.modules():
        if isinstance(module, MixedLinear):
            module.act_quant = module.act_quant if act_quant is None else act_quant
            module.act_symmetric = module.act_symmetric if act_symmetric is None else act_symmetric
    if fuse:
        fuse_linears(model)
    loaded: nn.Module = model.to(device).eval()
    return loaded


def _config(transformers: ModuleType, path: Path) -> Any:
    """The configuration of the model in a directory, of a GGUF file, or of the directory that a file is in."""
    directory = path if path.is_dir() else path.parent
    fields: Mapping[str, Any] = {}
    problem = f"there is no config.json in {directory}, and no config is given"
    if path.is_file() and path.suffix == ".gguf":
        checkpoint = load_checkpoint(path)
        fields, problem = checkpoint.config, f"{checkpoint.config_problem}; config can be given"
    elif (directory / "config.json").is_file():
        return transformers.AutoConfig.from_pretrained(directory)
    elif path.is_file() and is_packed(path):
        fields = packed_info(path).config
    if not isinstance(fields.get("model_type"), str):
        raise CheckpointError(path, problem)
    return transformers.AutoConfig.for_model(**fields)


def _tensors(path: Path, options: Options | None) -> tuple[Iterator[tuple[str, PackedWeight | Tensor]], Mapping[str, str]]:
    """Packed weights and other tensors of any file by name, and the names of modules that a weight serves as well."""
    if is_packed(path):
        return iter(load_packed(path).items()), packed_info(path).tied
    steps = plan(load_checkpoint(path), options or Options())
    tied = {step.name: step.entry.tied_to for step in steps if step.weight is not None and step.entry.tied_to}
    return ((s.name, s.entry.values() if s.weight is None else reorder(s.weight.read())) for s in steps), tied


def _state(
    path: Path, config: Any, modules: Mapping[str, nn.Module], options: Options | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What a model's state_dict shall be; ``config`` is told of the weights in it."""
    state: dict[str, Tensor] = {}
    weights: dict[str, WeightFormat] = {}
    tensors, tied = _tensors(path, options)
    for name, value in tensors:
        if isinstance(value, Tensor):
            state[name] = value
            continue
        module = modules.get(name)
        # An embedding is no product: it becomes the table of its values.
        table = name if isinstance(module, nn.Embedding) else tied.get(name)
        if table is not None:
            state[f"{table}.weight"] = ops.dequantize(value, dtype=dtype)
        if table == name:
            continue
        if not isinstance(module, nn.Linear):
            kind = "" if module is None else f", a {type(module).__name__}"
            raise ValueError(f"{path}: the model has no linear layer for {name}{kind}")
        if (shape := (module.out_features, module.in_features)) != value.shape:
            raise ValueError(f"{path}: {name!r} is {list(value.shape)}; the layer is {list(shape)}")
        parts = value.tensors()
        state.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
        dtypes = {part: tensor.dtype for part, tensor in sorted(parts.items()) if part != "codes"}
        weights[name] = WeightFormat(value.bits, value.group_size, tuple(dtypes.items()))
        if name in tied:
            config.tie_word_embeddings = False  # the head has tensors of its own
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    config.quantization_config = quantization_config(weights, [name for name in linears if name not in weights])
    return state
