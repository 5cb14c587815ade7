"""Model directories in the packed order: what ``cutlass-ops reorder`` makes of a whole model, and others load.

::

    config.json                      the model's own, with ``quantization_config`` as below; written last
    model.safetensors                or model-00001-of-00003.safetensors ... and model.safetensors.index.json;
                                     each is a packed file by itself (see ``reorder.py``)
    tokenizer.json, ...              copied

Weight ``model.layers.0.mlp.up_proj`` stands in the shards as ``model.layers.0.mlp.up_proj.codes``, ``.scales`` and
whichever of ``.zeros``, ``.offsets``, ``.bias`` and ``.perm`` it has, every other tensor under its own name.

``quantization_config`` says enough to make the modules before any tensor is read:

========================  ================================================================================
``quant_method``          "cutlass_ops"
``layout``                "cutlass_ops.slab64"
``layout_version``        1
``bits``, ``group_size``  of most weights
``tensors``               dtypes of most weights' tensors beside the codes: ``{"scales": "float16", ...}``
``modules``               ``{name: {"bits", "group_size", "tensors"}}`` of the weights that differ from those
``modules_to_not_convert``  names of the linear layers that are not packed; all others are
``act_quant``             how activations are quantised unless the user says otherwise: "none"
``act_symmetric``         whether quantised activations have no zero point: true
========================  ================================================================================
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import formats
from .checkpoints import Checkpoint
from .plan import Options, Progress, plan, sha256
from .reorder import PACKED_DTYPES, Spec, check_names, packed_metadata, packed_specs, reorder, stream_safetensors
from .weight import CheckpointError

QUANT_METHOD = "cutlass_ops"


@dataclass(frozen=True)
class WeightFormat:
    """What the tensors of a packed weight are, whatever its N and K.

    Attributes:
        bits, group_size: as in :class:`cutlass_ops.PackedWeight`.
        tensors: names and dtypes of its tensors, without the codes, sorted: ``(("scales", torch.float16), ...)``.
    """

    bits: int
    group_size: int
    tensors: tuple[tuple[str, torch.dtype], ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands in ``config.json``."""
        tensors = {name: str(dtype).removeprefix("torch.") for name, dtype in self.tensors}
        return {"bits": self.bits, "group_size": self.group_size, "tensors": tensors}

    @classmethod
    def from_json(cls, value: Any) -> WeightFormat:
        """The inverse of :meth:`to_json`; other keys are ignored.

        Raises:
            ValueError: something else; the message says what.
        """
        if (
            not isinstance(value, dict)
            or not {"bits", "group_size"} <= value.keys()
            or not isinstance(value.get("tensors"), dict)
        ):
            raise ValueError(f"{value!r} is no weight's format: bits, group_size and tensors are expected")
        tensors = []
        for name, text in sorted(value["tensors"].items()):
            dtype = getattr(torch, text, None) if isinstance(text, str) else None
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"tensor {name!r} has dtype {text!r}; a name like 'float16' is expected")
            tensors.append((name, dtype))
        bits, group_size = formats.check_bits(value["bits"]), formats.check_group_size(value["group_size"])
        return cls(bits, group_size, tuple(tensors))


def quantization_config(
    weights: Mapping[str, WeightFormat],
    not_converted: Iterable[str] = (),
    act_quant: str = "none",
    act_symmetric: bool = True,
) -> dict[str, Any]:
    """The ``quantization_config`` of a directory with these packed weights, by module name.

    Args:
        weights: at least one.
        not_converted: names of the linear layers that stay as they are.
        act_quant, act_symmetric: what a loader takes if its user names nothing else.
    """
    common = Counter(weights.values()).most_common(1)[0][0]
    return {
        "quant_method": QUANT_METHOD,
        "layout": formats.LAYOUT_NAME,
        "layout_version": formats.LAYOUT_VERSION,
        **common.to_json(),
        "modules": {name: weight.to_json() for name, weight in weights.items() if weight != common},
        "modules_to_not_convert": sorted(not_converted),
        "act_quant": act_quant,
        "act_symmetric": act_symmetric,
    }


def weight_format(config: Mapping[str, Any], module: str) -> WeightFormat | None:
    """The format of linear layer ``module`` by a ``quantization_config``; None if it is not packed.

    Raises:
        ValueError: a layout that is not known, or a format that means nothing; the message names it.
    """
    layout = (config.get("layout"), config.get("layout_version"))
    if layout != (known := (formats.LAYOUT_NAME, formats.LAYOUT_VERSION)):
        raise ValueError(f"layout {layout[0]!r}, version {layout[1]!r}; known is {known[0]!r}, version {known[1]}")
    if module in config.get("modules_to_not_convert", ()):
        return None
    return WeightFormat.from_json(config.get("modules", {}).get(module, config))


# ---- one packed file


@dataclass(frozen=True)
class Reordered:
    """What :func:`reorder_checkpoint` did.

    Attributes:
        path: the file written.
        weights: packed ones, by name: ``(n, k, bits, group_size)``.
        tensors: names of the copied ones.
        source_bytes, packed_bytes: sizes of the checkpoint's files and of the written one.
    """

    path: Path
    weights: Mapping[str, tuple[int, int, int, int]]
    tensors: tuple[str, ...]
    source_bytes: int
    packed_bytes: int


def reorder_checkpoint(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    bits: int | None = None,
    group_size: int = 128,
    symmetric: bool = True,
    include: str | None = None,
    exclude: str | None = None,
    progress: Progress | None = None,
) -> Reordered:
    """Pack a checkpoint's linear layers into one file and copy its other tensors.

    Weights that the checkpoint quantised are packed as they are. Float matrices are quantised first, if
    ``bits`` is given: those of two dimensions named ``*.weight``, without embeddings, norms and the output
    head (``DEFAULT_EXCLUDE``). A bias goes with its weight. One tensor is in memory at a time.

    Args:
        checkpoint: from :func:`cutlass_ops.load_checkpoint`.
        path: the file to write.
        bits: of the float matrices' codes, as in :func:`cutlass_ops.quantize`; None leaves them floats.
        group_size: of float matrices.
        symmetric: of float matrices.
        include: a regular expression, searched in module names: only these are packed; replaces
            ``DEFAULT_EXCLUDE``.
        exclude: a regular expression: these are not packed but stored as tensors.
        progress: told of every tensor that is done.

    Raises:
        CheckpointError: a tensor that cannot be packed.
        ValueError: nothing to pack, an option out of range, or not a regular expression.
        OSError: the file cannot be written.
    """
    options = Options(bits, group_size, symmetric, include, exclude)
    for file in checkpoint.files:
        if Path(path).exists() and file.samefile(path):
            raise ValueError(f"{path} is a file of the checkpoint itself; give the packed file another name")
    steps = plan(checkpoint, options)
    specs: dict[str, Spec] = {}
    weights = {}
    for step in steps:
        if step.weight is None:
            specs[step.name] = (step.entry.dtype, step.entry.shape)
            continue
        n, k = step.entry.shape
        weights[step.name] = (n, k, step.weight.bits, step.weight.group_size)
        dtypes = {part: PACKED_DTYPES.get(part, dtype) for part, dtype in step.weight.dtypes.items()}
        parts = packed_specs(n, k, step.weight.bits, step.weight.group_size, dtypes)
        specs.update({f"{step.name}.{part}": spec for part, spec in parts.items()})
    try:
        check_names(weights, [step.name for step in steps if step.weight is None])
    except ValueError as error:
        raise CheckpointError(checkpoint.path, str(error)) from error
    tied = {step.name: step.entry.tied_to for step in steps if step.weight is not None and step.entry.tied_to}
    sources = {file.name: sha256(file) for file in checkpoint.files}
    with stream_safetensors(path, specs, packed_metadata(weights, tied, sources)) as write:
        for step in steps:
            if step.weight is None:
                write(step.name, step.entry.values())
            else:
                for part, tensor in reorder(step.weight.read()).tensors().items():
                    write(f"{step.name}.{part}", tensor)
            if progress is not None:
                progress(step.name, step.entry.nbytes)
    return Reordered(
        path=Path(path),
        weights=weights,
        tensors=tuple(step.name for step in steps if step.weight is None),
        source_bytes=sum(file.stat().st_size for file in checkpoint.files),
        packed_bytes=Path(path).stat().st_size,
    )
