"""Model directories in the packed order: what ``cutlass-ops reorder`` makes of a whole model, and others load.

::

    config.json                      the model's own, with ``quantization_config`` as below; written last
    model.safetensors                or model-00001-of-00003.safetensors ... and model.safetensors.index.json;
                                     each is a packed file by itself (see :mod:`cutlass_ops.packed_file`)
    README.md                        a model card: the base model, the formats, how to load it; the source's card below
    tokenizer.json, ...              copied; of a GGUF file, made from what it holds

Weight ``model.layers.0.mlp.up_proj`` stands in the shards as ``model.layers.0.mlp.up_proj.codes``, ``.scales`` and
whichever of ``.zeros``, ``.offsets``, ``.bias`` and ``.perm`` it has, every other tensor under its own name. A quantised
word embedding is a table of its fp32 values, which a tied head shares.

``quantization_config`` says enough to make the modules before any tensor is read:

========================  ================================================================================
``quant_method``          "cutlass_ops"
``layout``                "cutlass_ops.slab64"
``layout_version``        2, or 1 in directories that older versions wrote
``bits``, ``group_size``  of most weights
``tensors``               dtypes of most weights' tensors beside the codes: ``{"scales": "float16", ...}``
``modules``               ``{name: {"bits", "group_size", "tensors"}}`` of the weights that differ from those
``modules_to_not_convert``  names of the linear layers that are not packed; all others are
``act_quant``             how activations are quantised unless the user says otherwise: "none"
``act_symmetric``         whether quantised activations have no zero point: true
``tensor_parallel``       where layers are split over ranks: ``{"rank", "size", "styles": {module: style}}``
========================  ================================================================================

``transformers_weights`` of ``config.json`` holds a sentence in place of a file's name (``GUARD``), so that transformers
refuses the directory where cutlass_ops was not imported.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import formats
from .checkpoints import Checkpoint, Quantized
from .checkpoints.directory import SETTINGS
from .packed_file import PACKED_DTYPES, Slices, check_names, packed_metadata, packed_specs
from .plan import TRANSPOSED, Options, Plan, Progress, Step, plan, sha256
from .reorder import reorder
from .safetensors_files import INDEX, Spec, is_written, spec_bytes, stream_safetensors
from .tensor_parallel import ACT_ORDER, check_heads, slice_shape, slice_tensor, slice_weight, sliced_format, split_style
from .weight import CheckpointError

QUANT_METHOD = formats.QUANT_METHOD
#: A key of ``config.json`` by which transformers finds the weights' file, and what stands there in a packed directory:
#: transformers refuses it, with this text, unless cutlass_ops takes it out again (see ``hf_quantizer.py``). Without it,
#: transformers alone would only warn of a quantisation that it does not know, and load random weights.
GUARD_KEY = "transformers_weights"
GUARD = "this model is packed by cutlass_ops: install it and import cutlass_ops before from_pretrained"
#: Where the options of a packed file say which ``act_quant`` and ``act_symmetric`` its checkpoint was made for.
ACTIVATIONS = "activations"
#: The model card's file.
CARD = "README.md"
#: What output heads are called.
_HEADS = ("lm_head", "embed_out")
#: The most that a file's tensors take: some tools read no larger ones.
SHARD_BYTES = 5_000_000_000

_ACT_QUANT = ("none", "token", "block")
_MAX_COPIED_BYTES = 100_000_000
#: Shows whether two tokenizers agree.
_SAMPLE = " ab  c\n\tIt's 12345 <s>naïve 你好; (x_1 == y)!"
#: Ends of the names of files that hold weights, or say where they are.
_WEIGHT_FILES = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz",
)  # fmt: skip


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
    formats.check_layout(config.get("layout"), config.get("layout_version"))
    if module in config.get("modules_to_not_convert", ()):
        return None
    return WeightFormat.from_json(config.get("modules", {}).get(module, config))


# ---- what is written


@dataclass(frozen=True)
class _Item:
    """What becomes of one entry of the checkpoint; of the same sizes on each rank.

    Attributes:
        step: what it is.
        style: how it is split.
        ranks: over how many.
        weight: N, K, bits and group size of a rank's weight, or None for a plain tensor.
        kernel_size: of a convolution's weight.
        specs: dtype and shape of a rank's tensors, by their names.
    """

    step: Step
    style: str
    ranks: int
    weight: tuple[int, int, int, int] | None
    specs: Mapping[str, Spec]
    kernel_size: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes on a rank."""
        return sum(map(spec_bytes, self.specs.values()))

    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """Each rank's tensors, by their names; the checkpoint's are read once."""
        if self.step.weight is None:
            values = self.step.entry.values()
            for rank in range(self.ranks):
                yield {self.step.name: slice_tensor(values, self.style, rank, self.ranks)}
        else:
            weight = self.step.weight.read()
            for rank in range(self.ranks):
                packed = reorder(slice_weight(weight, self.style, rank, self.ranks))
                yield {f"{self.step.name}.{part}": tensor for part, tensor in packed.tensors().items()}


def _items(
    checkpoint: Checkpoint, steps: Sequence[Step], ranks: int = 1, splits: Sequence[tuple[str, str]] = ()
) -> list[_Item]:
    try:
        check_names([step.name for step in steps if step.weight], [step.name for step in steps if not step.weight])
    except ValueError as error:
        raise CheckpointError(checkpoint.path, str(error)) from error
    matrices = {step.name.removesuffix(".weight") for step in steps if len(step.entry.shape) == 2}
    items = []
    for step in steps:
        module, _, part = (step.name, "", "") if step.weight else step.name.rpartition(".")
        linear = step.weight is not None or (part in ("weight", "bias") and module in matrices)
        style = split_style(module, splits) if linear and ranks > 1 else "replicate"
        if style == "colwise":
            check_heads(module, checkpoint.config, ranks)
        try:
            items.append(_weight_item(step, step.weight, style, ranks) if step.weight else _tensor_item(step, style, ranks))
        except ValueError as error:
            raise ValueError(f"{step.name!r} cannot be {style}: {error}") from error
    return items


def _weight_item(step: Step, weight: Quantized, style: str, ranks: int) -> _Item:
    if style == "rowwise" and "perm" in weight.dtypes:
        raise ValueError(ACT_ORDER)
    # Only a file of weights has convolutions, and that is not split over ranks.
    n, channels, *kernel_size = step.entry.shape
    n, k, group_size = sliced_format(n, channels * math.prod(kernel_size), weight.group_size, style, ranks)
    dtypes = {part: PACKED_DTYPES.get(part, dtype) for part, dtype in weight.dtypes.items()}
    parts = packed_specs(n, k, weight.bits, group_size, dtypes, kernel_size=kernel_size)
    specs = {f"{step.name}.{part}": spec for part, spec in parts.items()}
    return _Item(step, style, ranks, (n, k, weight.bits, group_size), specs, tuple(kernel_size))


def _tensor_item(step: Step, style: str, ranks: int) -> _Item:
    shape = step.entry.shape if style == "replicate" else slice_shape(step.entry.shape, style, ranks)
    return _Item(step, style, ranks, None, {step.name: (step.entry.dtype, shape)})


def _write(
    paths: Sequence[Path],
    contents: Sequence[tuple[Mapping[str, Spec], Mapping[str, str]]],
    items: Sequence[_Item],
    jobs: int,
    progress: Progress | None,
) -> None:
    """Write one shard: a file for each rank, whose specs and metadata ``contents`` has. At most ``jobs`` tensors are held."""
    with ExitStack() as stack:
        writers = [
            stack.enter_context(stream_safetensors(path, specs, metadata))
            for path, (specs, metadata) in zip(paths, contents, strict=True)
        ]

        def run(item: _Item) -> None:
            for write, tensors in zip(writers, item.tensors(), strict=True):
                for name, tensor in tensors.items():
                    write(name, tensor)

        def done(item: _Item, _: None) -> None:
            if progress is not None:
                progress(item.step.name, item.step.entry.nbytes)

        _each(run, items, jobs, done)


_T = TypeVar("_T")
_R = TypeVar("_R")


def _each(run: Callable[[_T], _R], items: Sequence[_T], jobs: int, done: Callable[[_T, _R], None]) -> None:
    """``run`` each item on ``jobs`` threads; ``done`` is called on this one. The first error ends it all."""
    if jobs == 1:
        for item in items:
            done(item, run(item))
        return
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, item): item for item in items}
        try:
            for future in as_completed(running):
                done(running[future], future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _contents(
    items: Sequence[_Item],
    sources: Mapping[str, str],
    options: Mapping[str, Any],
    slices: Slices | None,
) -> tuple[dict[str, Spec], dict[str, str]]:
    specs = {name: spec for item in items for name, spec in item.specs.items()}
    weights = {item.step.name: item.weight for item in items if item.weight is not None}
    tied = {name: item.step.entry.tied_to for item in items if (name := item.step.name) in weights and item.step.entry.tied_to}
    kernels = {item.step.name: item.kernel_size for item in items if item.kernel_size}
    return specs, packed_metadata(weights, tied, sources, options, slices, kernels=kernels)


def _sources(checkpoint: Checkpoint, jobs: int, progress: Progress | None) -> dict[str, str]:
    digests: dict[str, str] = {}

    def done(file: Path, digest: str) -> None:
        digests[file.name] = digest
        if progress is not None:
            progress(file.name, file.stat().st_size)

    _each(sha256, checkpoint.files, jobs, done)
    return {file.name: digests[file.name] for file in checkpoint.files}


# ---- one packed file


@dataclass(frozen=True)
class Reordered:
    """What :func:`reorder_checkpoint` or :func:`reorder_model` did.

    Attributes:
        path: the file or directory written.
        weights: packed ones, by name: ``(n, k, bits, group_size)``; of the whole model, where ranks have slices.
        tensors: names of the copied ones.
        source_bytes, packed_bytes: sizes of the checkpoint's files and of the written ones.
        files: the packed files, all ranks'.
        found: how many of those were there already, from a run that was interrupted.
        copied: names of the other files that were copied or, of a GGUF file, made from what it holds.
        warnings: what a user should know: that there is no tokenizer, and why.
        styles: how the layers that are split over ranks are split, by name.
        kept: why matrices that the options choose were not packed, by module name.
    """

    path: Path
    weights: Mapping[str, tuple[int, int, int, int]]
    tensors: tuple[str, ...]
    source_bytes: int
    packed_bytes: int
    files: tuple[Path, ...]
    found: int = 0
    copied: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    styles: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)


def reorder_checkpoint(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    bits: int | None = None,
    group_size: int = 128,
    symmetric: bool = True,
    include: str | None = None,
    exclude: str | None = None,
    clip: str | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Reordered:
    """Pack a checkpoint's linear layers into one file and copy its other tensors.

    What is packed, :func:`cutlass_ops.plan.plan` says.

    Args:
        checkpoint: from :func:`cutlass_ops.load_checkpoint`.
        path: the file to write.
        bits, group_size, symmetric, include, exclude, clip: as in :class:`cutlass_ops.plan.Options`.
        jobs: tensors that are worked on, and held in memory, at a time.
        dry_run: plan and write nothing.
        progress: told of every file of the checkpoint that is read for its sha256, and of every tensor that is done.

    Raises:
        CheckpointError: a tensor that cannot be packed.
        ValueError: nothing to pack, an option out of range, or not a regular expression.
        OSError: the file cannot be written.
    """
    path = Path(path)
    options = Options(bits, group_size, symmetric, include, exclude, clip)
    planned = plan(checkpoint, options, for_model=False)
    items = _items(checkpoint, planned.steps)
    for file in checkpoint.files:
        if path.exists() and file.samefile(path):
            raise ValueError(f"{path} is a file of the checkpoint itself; give the packed file another name")
    if not dry_run:
        how = _how(options, checkpoint, planned)
        if checkpoint.activations is not None:
            how[ACTIVATIONS] = list(checkpoint.activations)
        specs, metadata = _contents(items, _sources(checkpoint, jobs, progress), how, None)
        if checkpoint.config:
            metadata["config"] = json.dumps(_plain_config(checkpoint.config))
        contents = specs, metadata
        _write([path], [contents], items, jobs, progress)
    return Reordered(
        **_summary(checkpoint, items, planned),
        path=path,
        packed_bytes=sum(item.nbytes for item in items) if dry_run else path.stat().st_size,
        files=(path,),
    )


def _how(options: Options, checkpoint: Checkpoint, planned: Plan) -> dict[str, Any]:
    """How the files were made, as their metadata says it."""
    how = {**asdict(options), **checkpoint.options}
    return {**how, TRANSPOSED: planned.transposed} if planned.transposed else how


def _summary(checkpoint: Checkpoint, items: Sequence[_Item], planned: Plan) -> dict[str, Any]:
    return {
        "weights": {
            item.step.name: (
                item.step.entry.shape[0],
                math.prod(item.step.entry.shape[1:]),
                item.step.weight.bits,
                item.step.weight.group_size,
            )
            for item in items
            if item.step.weight is not None
        },
        "tensors": tuple(item.step.name for item in items if item.weight is None),
        "source_bytes": sum(file.stat().st_size for file in checkpoint.files),
        "styles": {item.step.name: item.style for item in items if item.style != "replicate"},
        "kept": planned.kept,
    }


# ---- a directory


def reorder_model(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    options: Options | None = None,
    *,
    ranks: int = 1,
    splits: Sequence[tuple[str, str]] = (),
    act_quant: str | None = None,
    act_symmetric: bool | None = None,
    jobs: int = 1,
    shard_bytes: int = SHARD_BYTES,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Reordered:
    """Make a directory of a whole model: packed weights, everything else copied, ``config.json`` rewritten.

    Shards are complete or absent, and ``config.json`` is written last. After an interruption the same call keeps the
    shards that were finished. A directory with packed files of other contents is refused.

    Args:
        checkpoint: from :func:`cutlass_ops.load_checkpoint`. Where it has no ``config.json``, the written one holds our
            part alone. A GGUF file's configuration is made from its keys, and its tokenizer by transformers.
        path: the directory; made if it is not there.
        options: what to pack, and how float matrices are quantised; None packs what is quantised.
        ranks: above 1, the layers are split for that many GPUs, each with a directory ``rank-R-of-RANKS`` inside.
        splits: layers split otherwise than by the table of ``tensor_parallel.py``, as :func:`split_style` takes them.
        act_quant, act_symmetric: as in :class:`cutlass_ops.MixedLinear`; what loaders take by default. None takes what the
            checkpoint says that it was made for, else "none" and True.
        jobs: tensors that are worked on, and held in memory, at a time.
        shard_bytes: the most that the tensors of one file take, except where one tensor takes more.
        dry_run: plan and write nothing.
        progress: told of every file of the checkpoint that is read for its sha256, and of every tensor that is done.

    Raises:
        CheckpointError: a tensor that cannot be packed, or a GGUF file of a model that transformers could not load so.
        ValueError: nothing to pack, an option out of range, a layer that cannot be split so, a directory that is the
            checkpoint's own or holds other packed files, or that another process writes.
        OSError: a file cannot be written.
    """
    path = Path(path)
    for name, number in (("ranks", ranks), ("jobs", jobs), ("shard_bytes", shard_bytes)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} is {number!r}; integers of at least 1 are accepted")
    stated = checkpoint.activations or ("none", True)
    act_quant = stated[0] if act_quant is None else act_quant
    act_symmetric = stated[1] if act_symmetric is None else act_symmetric
    if act_quant not in _ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are {', '.join(map(repr, _ACT_QUANT))}")
    options = options or Options()
    source = checkpoint.files[0].parent
    if path.exists() and path.samefile(source):
        raise ValueError(f"{path} is the directory of the checkpoint itself; give the packed model another")
    if checkpoint.config_problem:
        raise CheckpointError(checkpoint.path, f"cannot become a model directory: {checkpoint.config_problem}")
    planned = plan(checkpoint, options)
    items = _items(checkpoint, planned.steps, ranks, splits)
    summary = _summary(checkpoint, items, planned)
    shards = _shards(items, shard_bytes)
    directories = [path] if ranks == 1 else [path / f"rank-{rank}-of-{ranks}" for rank in range(ranks)]
    names = _shard_names(len(shards))
    result = Reordered(
        **summary,
        path=path,
        packed_bytes=ranks * sum(item.nbytes for item in items),
        files=tuple(directory / name for directory in directories for name in names),
    )
    if dry_run:
        return replace(result, copied=tuple(_small_files(checkpoint, ranks)))
    small_files, problem = _gguf_files(checkpoint) if checkpoint.dialect == "gguf" else (_small_files(checkpoint, ranks), "")
    result = replace(result, copied=tuple(small_files), warnings=(problem,) if problem else ())
    path.mkdir(exist_ok=True)
    with _locked(path):
        if others := {*path.glob("rank-*-of-*"), *path.glob("*.safetensors")} - {*directories, *result.files}:
            raise ValueError(_FOREIGN.format(min(others)))
        for directory in directories:
            directory.mkdir(exist_ok=True)
            for partial in directory.glob(".model*.safetensors.*.partial"):  # of a run that was killed
                partial.unlink()
        sources = _sources(checkpoint, jobs, progress)
        how = _how(options, checkpoint, planned)
        slices = [None] if ranks == 1 else [Slices(rank, ranks, summary["styles"]) for rank in range(ranks)]
        contents = [[_contents(shard, sources, how, part) for part in slices] for shard in shards]
        finished = _finished(directories, names, contents)
        if not all(finished):
            for directory in directories:
                for name in ("config.json", INDEX):
                    (directory / name).unlink(missing_ok=True)
        for shard, name, content, is_there in zip(shards, names, contents, finished, strict=True):
            if not is_there:
                _write([directory / name for directory in directories], content, shard, jobs, progress)
            elif progress is not None:
                for item in shard:
                    progress(item.step.name, item.step.entry.nbytes)
        for rank, directory in enumerate(directories):
            for name, small in small_files.items():
                _replace(directory / name, small.read_bytes() if isinstance(small, Path) else small)
            if len(shards) > 1:
                _replace(directory / INDEX, _json(_index(names, [content[rank][0] for content in contents])))
            quantization = quantization_config(
                {item.step.name: _format(item.weight, item) for item in items if item.weight is not None},
                _not_converted(items),
                act_quant,
                act_symmetric,
            )
            if ranks > 1:
                quantization["tensor_parallel"] = {"rank": rank, "size": ranks, "styles": summary["styles"]}
            config = {**_plain_config(checkpoint.config), "quantization_config": quantization}
            if any(name.rpartition(".")[2] in _HEADS for name in summary["weights"]):
                _untie(config)
            config[GUARD_KEY] = GUARD
            if ranks == 1:
                _replace(directory / CARD, _card(checkpoint, summary["weights"], act_quant).encode())
            _replace(directory / "config.json", _json(config))
    return replace(result, packed_bytes=sum(file.stat().st_size for file in result.files), found=ranks * sum(finished))


def _shards(items: Sequence[_Item], shard_bytes: int) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    held = 0
    for item in items:
        if shards[-1] and held + item.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(item)
        held += item.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


_FOREIGN = (
    "{} is of another checkpoint, other options or another version; remove it, or give the packed model another directory"
)


def _finished(
    directories: Sequence[Path],
    names: Sequence[str],
    contents: Sequence[Sequence[tuple[Mapping[str, Spec], Mapping[str, str]]]],
) -> list[bool]:
    """Which shards all ranks have; ValueError if there are packed files that this run would not write."""
    finished = [True] * len(names)
    for rank, directory in enumerate(directories):
        for file in directory.glob("*.safetensors"):
            if file.name not in names or not is_written(file, *contents[names.index(file.name)][rank]):
                raise ValueError(_FOREIGN.format(file))
        for index, name in enumerate(names):
            finished[index] &= (directory / name).is_file()
    return finished


def _format(weight: tuple[int, int, int, int], item: _Item) -> WeightFormat:
    _, _, bits, group_size = weight
    prefix = f"{item.step.name}."
    tensors = {name.removeprefix(prefix): dtype for name, (dtype, _) in item.specs.items()}
    return WeightFormat(bits, group_size, tuple(sorted((name, dtype) for name, dtype in tensors.items() if name != "codes")))


def _not_converted(items: Sequence[_Item]) -> list[str]:
    names = {item.step.name for item in items}
    matrices = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    plain = {
        item.step.name.removesuffix(".weight") for item in items if item.weight is None and len(item.step.entry.shape) == 2
    }
    # A head that shares the embedding's weight has no tensor of its own.
    return sorted(plain.intersection(matrices) | ({"lm_head"} - names))


def _untie(config: dict[str, Any]) -> None:
    """Say that the head, which is packed, has a weight of its own."""
    config["tie_word_embeddings"] = False
    if isinstance(inner := config.get("text_config"), dict):
        config["text_config"] = {**inner, "tie_word_embeddings": False}


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` without what it says of the checkpoint's own quantisation and file names."""
    left_out = ("quantization_config", "compression_config", GUARD_KEY)
    plain = {key: value for key, value in config.items() if key not in left_out}
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = _plain_config(inner)
    return plain


def _card(checkpoint: Checkpoint, weights: Mapping[str, tuple[int, int, int, int]], act_quant: str) -> str:
    """The model card of a directory: what it was made from, its formats, how to load it, and the source's own card."""
    source = checkpoint.files[0].parent
    base = _hub_name(source, checkpoint.config)
    name = base or (source.resolve().name if checkpoint.config else checkpoint.path.name)
    readme = source / CARD
    theirs = readme.read_text(encoding="utf-8", errors="replace") if checkpoint.config and readme.is_file() else ""
    front = re.match(r"---\n(.*?)\n---\n", theirs, re.DOTALL)
    facts = [f"base_model: {base}", "base_model_relation: quantized"] if base else []
    facts += ["library_name: transformers", "tags:", "- cutlass_ops"]
    if front:
        facts += [line for line in front[1].splitlines() if re.match(r"license\w*: ", line)]
    counts = Counter((bits, group_size) for _, _, bits, group_size in weights.values())
    listed = ", ".join(
        f"{count} of {bits} bits in {'one group a row' if group_size == -1 else f'groups of {group_size}'}"
        for (bits, group_size), count in counts.most_common()
    )
    activations = "not quantised" if act_quant == "none" else f'quantised to int8, one scale a {act_quant} ("{act_quant}")'
    head = "\n".join(facts)
    text = f"""---
{head}
---

# {name}, packed by cutlass_ops

The linear layers of {name} ({listed}), in the order in which the kernels of cutlass_ops read them. Activations are
{activations} unless the loader is asked for something else.

```python
import cutlass_ops  # before from_pretrained: transformers alone refuses these files
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "..."  # this directory, or the name of this repository
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)
```

`cutlass_ops.load_model(path)` of a local directory also lets one kernel serve layers that multiply the same activations.
"""
    body = theirs[front.end() :] if front else theirs
    return f"{text}\n## Card of the base model\n\n{body.lstrip()}" if body.strip() else text


def _hub_name(source: Path, config: Mapping[str, Any]) -> str:
    """The name on the Hugging Face hub of a model in the hub's cache, or that its configuration gives; else ""."""
    for part in source.absolute().parts:
        if match := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", part):
            return f"{match[1]}/{match[2]}"
    named = config.get("_name_or_path")
    return named if isinstance(named, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", named) else ""


def _index(names: Sequence[str], shards: Sequence[Mapping[str, Spec]]) -> dict[str, Any]:
    total = sum(spec_bytes(spec) for shard in shards for spec in shard.values())
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _small_files(checkpoint: Checkpoint, ranks: int) -> dict[str, Path]:
    """What is copied besides weights and configuration: the tokenizer and the like; a whole model has a card of its own."""
    if not checkpoint.config or checkpoint.dialect == "gguf":
        return {}
    return {
        file.name: file
        for file in sorted(checkpoint.files[0].parent.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and not file.name.endswith(_WEIGHT_FILES)
        and file.name not in ("config.json", *SETTINGS, *((CARD,) if ranks == 1 else ()))
        and file.stat().st_size <= _MAX_COPIED_BYTES
    }


def _gguf_files(checkpoint: Checkpoint) -> tuple[dict[str, bytes], str]:
    """The same of a GGUF file, made from what it holds; and why its tokenizer is missing or differs, or ""."""
    tokens = {name: checkpoint.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokens = {name: token for name, token in tokens.items() if token is not None}
    files = {"generation_config.json": _json(tokens)} if tokens else {}
    problem = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers = import_module("transformers")
            with tempfile.TemporaryDirectory() as scratch:
                # Alone in a directory: transformers would read settings that stand beside it.
                (Path(scratch) / "model.gguf").symlink_to(checkpoint.path.resolve())
                # Not AutoTokenizer, which takes the architecture's class; some files have a tokenizer of another.
                tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(scratch, gguf_file="model.gguf")
                saved = Path(scratch) / "saved"
                tokenizer.save_pretrained(saved)
                files |= {file.name: file.read_bytes() for file in sorted(saved.iterdir())}
                (saved / "config.json").write_bytes(_json(checkpoint.config))
                found = transformers.AutoTokenizer.from_pretrained(saved)
                if tokenizer(_SAMPLE).input_ids != found(_SAMPLE).input_ids:
                    # For some model types AutoTokenizer takes a class of its own, whatever the files say.
                    problem = (
                        f"the tokenizer differs from what AutoTokenizer makes of it ({type(found).__name__}); "
                        f"load it with transformers.PreTrainedTokenizerFast"
                    )
    except Exception as error:  # of many kinds, as transformers checks little of what the file says
        return files, f"no tokenizer was written: {type(error).__name__}: {error}"
    return files, problem


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other processes from writing the same directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{directory} is being written by another process") from None
        yield
    finally:
        os.close(descriptor)
