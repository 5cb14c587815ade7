"""Models of the Hugging Face Hub as local directories."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..weights.weight import CheckpointError

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FILE_SUFFIXES = (".bin", ".gguf", ".json", ".mnn", ".pt", ".pth", ".safetensors")
#: Configuration, tokenizer and weights. Repositories often hold the weights in other formats as
#: well.
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def local_path(source: str | os.PathLike[str]) -> Path:
    """The path that ``source`` names, or where the files of the Hub model of that id are.

    Anything that exists is a path. What does not exist and reads "organisation/model" is an id: the
    model's configuration, tokenizer and safetensors files are taken from the Hub's cache on this
    machine, or downloaded into it, as transformers does (``HF_HOME`` and ``HF_HUB_OFFLINE`` have
    their meaning).

    Raises:
        CheckpointError: an id whose files cannot be found or downloaded.
    """
    path = Path(source)
    name = os.fspath(source)
    if path.exists() or not _HUB_ID.fullmatch(name) or path.suffix in _FILE_SUFFIXES:
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise CheckpointError(
            path, "there is no such directory; a model of the Hub takes pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED)))
    # not found, not reachable, offline or not allowed
    except (OSError, ValueError) as error:
        raise CheckpointError(
            path, f"there is no such directory, and the Hub gives no model of that name: {error}"
        ) from error
