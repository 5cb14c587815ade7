"""Checkpoints that an engine does not read, for engines that read packed directories.

The engine is given a directory that describes the packed model and has no weights, and gets the
weights one by one, packed as they are read.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..checkpoints.safetensors_files import json_object
from ..files.checkpoint_experts import StackedWeight
from ..files.conversion_plan import Options
from ..files.model_directory import plan_model, write_description
from ..files.packed_config import QUANT_METHOD
from ..version import __version__
from ..weights.reorder import reorder


def is_checkpoint(path: Path) -> bool:
    """Whether there are files of a model at ``path``, other than a packed directory."""
    if not path.exists():
        return False
    quantization = (
        json_object(path / "config.json").get("quantization_config") if path.is_dir() else None
    )
    return not (isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD)


def described(checkpoint: Checkpoint, cache: Path) -> tuple[Path, list[str]]:
    """A directory with the configuration and the tokenizer of the packed model, for the same files
    always the same.

    Args:
        checkpoint: its quantised weights are packed.
        cache: where such directories are kept; made if it is not there.

    Returns:
        The directory, and warnings for the user if it was made now.

    Raises:
        CheckpointError: a tensor that cannot be packed or that the model has no place for, or one
            of the model that the checkpoint lacks.
        ValueError: nothing to pack.
        OSError: a file cannot be written.
    """
    key = hashlib.sha256(__version__.encode())
    for file in checkpoint.files:
        status = file.stat()
        key.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    directory = cache / key.hexdigest()[:32]
    if directory.is_dir():
        return directory, []
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        notes = write_description(checkpoint, made)
        try:
            made.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was faster
                raise
    return directory, notes


def packed_tensors(checkpoint: Checkpoint, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the packed model, under the names of its files; weights are
    packed on ``device``.

    Raises:
        CheckpointError, ValueError: as in :func:`described`.
    """
    for step in plan_model(checkpoint, Options())[1].steps:
        if step.weight is None:
            yield step.name, step.entry.values()
            continue
        weight = step.weight
        packed = (
            weight.pack()
            if isinstance(weight, StackedWeight)
            else reorder(weight.read().to(device))
        )
        for part, tensor in packed.tensors().items():
            yield f"{step.name}.{part}", tensor
