"""GGUF files and checkpoints of bitsandbytes and others in vLLM: packed while they are loaded.

vLLM's parsers of configurations are given no files. ``EngineArgs.create_engine_config`` is
therefore wrapped: where ``quantization`` or ``load_format`` is "cutlass_ops" and the model is no
packed directory, the model becomes a directory in vLLM's cache that describes the packed one, and
the weights come from the checkpoint by a loader of the name "cutlass_ops".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import load_checkpoint
from ..engines.checkpoint import described, is_checkpoint, packed_tensors
from .linear import MISSING, logger

if MISSING is None:
    from vllm import envs

_NAME = "cutlass_ops"
_FORMATS = ("auto", _NAME, "dummy")
#: The key of the loader's configuration for the path of the checkpoint.
_KEY = "checkpoint"


def take_checkpoints() -> None:
    """Let vLLM serve checkpoints that it does not read; one line in the log if this
    version of it cannot.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

        original = EngineArgs.create_engine_config
    except (ImportError, AttributeError) as error:
        logger.warning("cutlass_ops packs no checkpoints in this version of vLLM: %s", error)
        return
    if not hasattr(original, "of_cutlass_ops"):
        EngineArgs.create_engine_config = _wrapped(original)
        register_model_loader(_NAME)(type("CutlassOpsLoader", (_Loader, BaseModelLoader), {}))


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _NAME in (self.quantization, self.load_format) and is_checkpoint(Path(self.model)):
            _describe(self)
        return original(self, *args, **kwargs)

    create_engine_config.of_cutlass_ops = True  # type: ignore[attr-defined]
    return create_engine_config


def _describe(args: Any) -> None:
    """Change vLLM's arguments to those of a packed model whose weights are in a checkpoint.

    Raises:
        CheckpointError, ValueError: a checkpoint that cannot be packed, or arguments that
            contradict this.
    """
    if args.load_format not in _FORMATS or args.quantization not in (None, _NAME):
        raise ValueError(
            f"load_format is {args.load_format!r} and quantization {args.quantization!r}; "
            f"cutlass_ops packs {args.model} with quantization={_NAME!r} and load_format "
            f"{', '.join(map(repr, _FORMATS))}"
        )
    path = Path(args.model).resolve()
    directory, notes = described(load_checkpoint(path), Path(envs.VLLM_CACHE_ROOT) / _NAME)
    for note in notes:
        logger.warning("%s: %s", path, note)
    if args.served_model_name is None:
        args.served_model_name = [args.model]
    args.model = str(directory)
    if args.load_format != "dummy":
        args.load_format = _NAME
        args.model_loader_extra_config = {_KEY: str(path)}


class _Loader:
    """The methods that vLLM's base class of loaders lacks."""

    load_config: Any

    def download_model(self, model_config: Any) -> None:
        """Nothing: the checkpoint is on this machine."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Pack the checkpoint's weights on the model's device, and give them to the model.

        Raises:
            CheckpointError: a file that changed, or values that cannot be packed.
            ValueError: no checkpoint to load.
        """
        path = (self.load_config.model_loader_extra_config or {}).get(_KEY)
        if path is None:
            raise ValueError(
                f"load_format {_NAME!r} is for checkpoints on this machine that are not packed; "
                f"this is {model_config.model}"
            )
        device: torch.device = next(model.parameters()).device
        model.load_weights(packed_tensors(load_checkpoint(path), device))
        logger.info_once("Using cutlass_ops for the weights of %s", path)
