"""Readers of checkpoints: one file a dialect, each with ``recognise(path)`` and ``read(path)``.

Weights come under the names of Hugging Face's modules where the dialect's names can be translated. A word
embedding that is also the output head (a "tied" one) and quantised in the file appears once, as ``lm_head``,
with
``Entry.tied_to == "model.embed_tokens"``.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..weight import CheckpointError
from . import dense, gguf
from .checkpoint import Checkpoint, Entry, Quantized

__all__ = ["Checkpoint", "CheckpointError", "Entry", "Quantized", "load_checkpoint"]

_DIALECTS = {
    "GGUF (*.gguf)": (gguf.recognise, gguf.read),
    "safetensors (*.safetensors, model.safetensors.index.json, or a directory with one)": (
        dense.recognise,
        dense.read,
    ),
}


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint; nothing but its header is read.

    Args:
        path: a GGUF file, a safetensors file or index, or a directory that holds safetensors.

    Returns:
        A lazy mapping from module name to :class:`cutlass_ops.QuantizedWeight`.

    Raises:
        CheckpointError: no such file, a file of another kind, or one whose header lies.
    """
    path = Path(path)
    for recognise, read in _DIALECTS.values():
        try:
            if recognise(path):
                return read(path)
        except OSError as error:
            raise CheckpointError(path, error.strerror or str(error)) from error
    if not path.exists():
        raise CheckpointError(path, "no such file or directory")
    raise CheckpointError(path, f"not a checkpoint of a known kind; known are {', '.join(_DIALECTS)}")
