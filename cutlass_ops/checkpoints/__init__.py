"""Readers of checkpoints: one file a dialect.

A dialect is recognised in one of two places. A file format other than safetensors (GGUF) has
``recognise(path)`` and ``read(path)``, and a line in ``_FILES``. A dialect in safetensors has
``recognise(source)`` and ``read(source, **options)``, both given the :class:`directory.Source` with
its headers checked, and a line in ``_DIALECTS``; ``read`` returns
``source.checkpoint(dialect, entries)``.

Weights come under the names of Hugging Face's modules where the dialect's names can be translated.
A word embedding that is also the output head (a "tied" one) and quantised in the file appears once,
as ``lm_head``, with ``Entry.tied_to == "model.embed_tokens"``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from ..weights.weight import CheckpointError
from . import directory
from .checkpoint import Checkpoint, Entry, Quantized
from .directory import Source

__all__ = ["Checkpoint", "CheckpointError", "Entry", "Quantized", "load_checkpoint"]

#: File formats other than safetensors, by their names in error messages: the modules that read
#: them, which are imported when a checkpoint is opened.
_FILES = {"GGUF (*.gguf)": "gguf", "MNN (*.mnn.json beside *.mnn.weight)": "mnn"}
_SAFETENSORS = "safetensors (*.safetensors, model.safetensors.index.json, or a directory with one)"
#: Endings of the names of files of torch.save.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: What safetensors hold, by the ``quant_method`` of Hugging Face's config: the module that
#: recognises and reads it, and the options of :func:`load_checkpoint` that it takes. The first that
#: is recognised reads.
_DIALECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "awq": ("awq", ()),
    "bitsandbytes": ("bitsandbytes", ()),
    "compressed-tensors": ("compressed_tensors", ()),
    "fp8": ("fp8", ()),
    "gptq": ("gptq", ("zero_offset",)),
    "hqq": ("hqq", ()),
    "mxfp4": ("mxfp4", ()),
    "torchao": ("torchao", ()),
}


def _reader(module: str) -> ModuleType:
    return import_module(f".{module}", __name__)


def load_checkpoint(
    path: str | os.PathLike[str], *, zero_offset: Literal["auto", 0, 1] = "auto"
) -> Checkpoint:
    """Open a checkpoint; at most a few small tensors of its data are read.

    Args:
        path: a GGUF file, a safetensors file or index, or a directory that holds safetensors, or
            one GGUF model; of a model that is split into several GGUF files, any of them. A dialect
            is recognised by ``config.json`` beside them, and by the tensors themselves.
        zero_offset: for GPTQ only: what to add to the stored zero points, if not what the file's
            metadata and values say.

    Returns:
        A lazy mapping from module name to :class:`cutlass_ops.QuantizedWeight`.

    Raises:
        CheckpointError: no such file, a file of another kind, or one whose header is wrong.
        ValueError: an option that is out of range, or that the file's dialect does not have.
    """
    path = Path(path)
    if zero_offset not in ("auto", 0, 1) or isinstance(zero_offset, bool):
        raise ValueError(f"zero_offset is {zero_offset!r}; 'auto', 0 and 1 are accepted")
    options = {} if zero_offset == "auto" else {"zero_offset": zero_offset}
    try:
        for module in _FILES.values():
            reader = _reader(module)
            if reader.recognise(path):
                _check_options(path, options, "a file of this kind", ())
                return cast(Checkpoint, reader.read(path))
        if directory.recognise(path):
            return _read(directory.read(path), options)
    except OSError as error:
        raise CheckpointError(error.filename or path, error.strerror or str(error)) from error
    if not path.exists():
        raise CheckpointError(path, "no such file or directory")
    pickles = path.suffix in _PICKLES or (
        path.is_dir() and any(file.suffix in _PICKLES for file in path.iterdir())
    )
    hint = (
        "; pickles run code when they are opened, and never are: save the model as safetensors"
        if pickles
        else ""
    )
    raise CheckpointError(
        path,
        f"not a checkpoint of a known kind; known are {', '.join((*_FILES, _SAFETENSORS))}{hint}",
    )


def _read(source: Source, options: dict[str, Any]) -> Checkpoint:
    for dialect, (module, taken) in _DIALECTS.items():
        reader = _reader(module)
        if reader.recognise(source):
            _check_options(source.path, options, f"the dialect {dialect!r}", taken)
            return replace(cast(Checkpoint, reader.read(source, **options)), options=options)
    _check_options(source.path, options, "a checkpoint that is not quantised", ())
    if (method := source.quantization.get("quant_method")) is not None:
        packing = source.quantization.get("packing_format")
        which = "" if packing is None else f" in the packing_format {packing!r:.100}"
        raise CheckpointError(
            source.path, f"is quantised by {method!r:.100}{which}; known are {', '.join(_DIALECTS)}"
        )
    return source.checkpoint("safetensors", ())


def _check_options(path: Path, options: dict[str, Any], what: str, taken: tuple[str, ...]) -> None:
    for name, value in options.items():
        if name not in taken:
            raise ValueError(f"{path}: {name} is {value!r}; {what} has no such option")
