"""Model directories in the packed order, as ``cutlass-ops reorder`` writes them for a whole model.

::

    config.json          the model's, with ``quantization_config``; written last
    model.safetensors    or model-00001-of-00003.safetensors ... and model.safetensors.index.json;
                         each is a packed file by itself (see :mod:`cutlass_ops.files.packed_file`)
    README.md            a model card: the base model, the formats, how to load it; the source's
                         card below
    tokenizer.json, ...  copied; of a GGUF file, made from what it holds

Weight ``model.layers.0.mlp.up_proj`` is in the shards as ``model.layers.0.mlp.up_proj.codes``,
``.scales`` and whichever of ``.zeros``, ``.offsets``, ``.bias`` and ``.perm`` it has, every other
tensor under its own name. A quantised word embedding is packed as well, as the output head where it
is tied to it; if the model's class does more with it than look up rows, it is stored as a table of
its values in the model's dtype.

:mod:`cutlass_ops.files.packed_config` describes ``quantization_config``.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ..checkpoints import Checkpoint
from ..checkpoints.gguf_header import ADDS_BOS
from ..checkpoints.safetensors_files import INDEX, SETTINGS, errors_name, is_written, spec_bytes
from ..nn.architecture import Architecture, architecture_of
from ..weights.specs import Spec
from ..weights.weight import CheckpointError
from .conversion_plan import Options, Plan, Progress, misfits, plan
from .model_card import CARD, model_card
from .packed_config import (
    GUARD,
    GUARD_KEY,
    WeightFormat,
    model_dtype,
    plain_config,
    quantization_config,
)
from .packed_file import Slices
from .packing import (
    Item,
    Reordered,
    items_of,
    options_metadata,
    shard_contents,
    source_checksums,
    summary_of,
    write_shard,
)

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
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5",
    ".msgpack", ".npz",
)  # fmt: skip


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
    """Make a directory of a whole model: packed weights, everything else copied, ``config.json``
    rewritten.

    Shards are complete or absent, and ``config.json`` is written last. After an interruption the
    same call keeps the shards that were finished. A directory with packed files of other contents
    is refused.

    Args:
        checkpoint: from :func:`cutlass_ops.load_checkpoint`. Where it has no ``config.json``, the
            written one holds our part alone. A GGUF file's configuration is made from its keys, and
            its tokenizer by transformers.
        path: the directory; made if it is not there.
        options: what to pack, and how float matrices are quantised; None packs what is quantised.
        ranks: above 1, the layers are split for that many GPUs, each with a directory
            ``rank-R-of-RANKS`` inside.
        splits: layers that are split differently from the table of ``tensor_parallel.py``, as
            :func:`split_style` takes them.
        act_quant, act_symmetric: as in :class:`cutlass_ops.MixedLinear`; what loaders take by
            default. None takes what the checkpoint says that it was made for, else "none" and True.
        jobs: tensors that are processed, and held in memory, at a time.
        shard_bytes: the most that the tensors of one file take, except where one tensor takes more.
        dry_run: plan and write nothing.
        progress: called for every file of the checkpoint that is read for its sha256, and for every
            finished tensor.

    Raises:
        CheckpointError: a tensor that cannot be packed or that the model has no place for, one of
            the model that the checkpoint lacks, or a GGUF file of a model that transformers could
            not load from the result.
        ValueError: nothing to pack, an option out of range, a layer that cannot be split in that
            way, a directory that is the checkpoint's own or holds other packed files, or that
            another process writes.
        OSError: a file cannot be written.
    """
    path = Path(path)
    for name, number in (("ranks", ranks), ("jobs", jobs), ("shard_bytes", shard_bytes)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} is {number!r}; integers of at least 1 are accepted")
    stated = _activations(checkpoint)
    act_quant = stated[0] if act_quant is None else act_quant
    act_symmetric = stated[1] if act_symmetric is None else act_symmetric
    if act_quant not in _ACT_QUANT:
        raise ValueError(
            f"act_quant is {act_quant!r}; supported are {', '.join(map(repr, _ACT_QUANT))}"
        )
    options = options or Options()
    source = checkpoint.files[0].parent
    if path.exists() and path.samefile(source):
        raise ValueError(
            f"{path} is the directory of the checkpoint itself; give the packed model another"
        )
    architecture, planned = plan_model(checkpoint, options)
    items = items_of(checkpoint, planned.steps, ranks, splits)
    summary = summary_of(checkpoint, items, planned)
    shards = _shards(items, shard_bytes)
    directories = (
        [path] if ranks == 1 else [path / f"rank-{rank}-of-{ranks}" for rank in range(ranks)]
    )
    names = _shard_names(len(shards))
    result = Reordered(
        **summary,
        path=path,
        packed_bytes=ranks * sum(item.nbytes for item in items),
        files=tuple(directory / name for directory in directories for name in names),
    )
    if dry_run:
        return replace(result, copied=tuple(_small_files(checkpoint, ranks)))
    small_files, problem = _files_beside(checkpoint, ranks)
    result = replace(
        result,
        copied=tuple(small_files),
        warnings=(*result.warnings, *([problem] if problem else [])),
    )
    path.mkdir(exist_ok=True)
    with _locked(path):
        if others := {*path.glob("rank-*-of-*"), *path.glob("*.safetensors")} - {
            *directories,
            *result.files,
        }:
            raise ValueError(_FOREIGN.format(min(others)))
        for directory in directories:
            directory.mkdir(exist_ok=True)
            # of a run that was killed
            for partial in directory.glob(".model*.safetensors.*.partial"):
                partial.unlink()
        sources = source_checksums(checkpoint, jobs, progress)
        how = options_metadata(options, checkpoint, planned)
        slices = (
            [None]
            if ranks == 1
            else [Slices(rank, ranks, summary["styles"]) for rank in range(ranks)]
        )
        contents = [
            [shard_contents(shard, sources, how, part) for part in slices] for shard in shards
        ]
        finished = _finished(directories, names, contents)
        if not all(finished):
            for directory in directories:
                for name in ("config.json", INDEX):
                    (directory / name).unlink(missing_ok=True)
        for shard, name, content, is_there in zip(shards, names, contents, finished, strict=True):
            if not is_there:
                write_shard(
                    [directory / name for directory in directories], content, shard, jobs, progress
                )
            elif progress is not None:
                for item in shard:
                    progress(item.step.name, item.step.entry.nbytes)
        for rank, (directory, part) in enumerate(zip(directories, slices, strict=True)):
            _write_files(directory, small_files)
            if len(shards) > 1:
                _replace(
                    directory / INDEX,
                    _json(_index(names, [content[rank][0] for content in contents])),
                )
            if part is None:
                _replace(
                    directory / CARD, model_card(checkpoint, summary["weights"], act_quant).encode()
                )
            _replace(
                directory / "config.json",
                _json(_config(checkpoint, items, architecture, act_quant, act_symmetric, part)),
            )
    return replace(
        result,
        packed_bytes=sum(file.stat().st_size for file in result.files),
        found=ranks * sum(finished),
    )


def plan_model(checkpoint: Checkpoint, options: Options) -> tuple[Architecture, Plan]:
    """The model of a checkpoint, and the plan of its tensors.

    Raises:
        CheckpointError, ValueError: as in :func:`reorder_model`.
    """
    if checkpoint.config_problem:
        raise CheckpointError(
            checkpoint.path, f"cannot become a model directory: {checkpoint.config_problem}"
        )
    architecture = architecture_of(checkpoint.config)
    planned = plan(checkpoint, options, architecture, dtype=model_dtype(checkpoint.config))
    if problems := misfits(architecture, (name for step in planned.steps for name in step.tensors)):
        raise CheckpointError(checkpoint.path, "; ".join(problems))
    return architecture, planned


def write_description(checkpoint: Checkpoint, directory: Path) -> list[str]:
    """Write what :func:`reorder_model` writes for a quantised checkpoint, without weights and card;
    returns warnings for the user.

    Raises:
        CheckpointError, ValueError, OSError: as in :func:`reorder_model`.
    """
    architecture, planned = plan_model(checkpoint, Options())
    items = items_of(checkpoint, planned.steps)
    files, problem = _files_beside(checkpoint, 1)
    _write_files(directory, files)
    _replace(
        directory / "config.json",
        _json(_config(checkpoint, items, architecture, *_activations(checkpoint), None)),
    )
    return [*checkpoint.warnings, *([problem] if problem else [])]


def _activations(checkpoint: Checkpoint) -> tuple[str, bool]:
    """The ``act_quant`` and ``act_symmetric`` that the checkpoint was made for."""
    return checkpoint.activations or ("none", True)


def _shards(items: Sequence[Item], shard_bytes: int) -> list[list[Item]]:
    shards: list[list[Item]] = [[]]
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
    "{} is of another checkpoint, other options or another version; remove it, or give the packed "
    "model another directory"
)


def _finished(
    directories: Sequence[Path],
    names: Sequence[str],
    contents: Sequence[Sequence[tuple[Mapping[str, Spec], Mapping[str, str]]]],
) -> list[bool]:
    """Which shards all ranks have; ValueError for packed files that this run would not write."""
    finished = [True] * len(names)
    for rank, directory in enumerate(directories):
        for file in directory.glob("*.safetensors"):
            if file.name not in names or not is_written(
                file, *contents[names.index(file.name)][rank]
            ):
                raise ValueError(_FOREIGN.format(file))
        for index, name in enumerate(names):
            finished[index] &= (directory / name).is_file()
    return finished


def _config(
    checkpoint: Checkpoint,
    items: Sequence[Item],
    architecture: Architecture,
    act_quant: str,
    act_symmetric: bool,
    slices: Slices | None,
) -> dict[str, Any]:
    """``config.json`` of one rank's directory."""
    formats = {
        item.step.name: _format(item.weight, item) for item in items if item.weight is not None
    }
    experts = [item.step.name for item in items if item.experts is not None]
    embeddings = {
        item.step.entry.tied_to: item.step.name for item in items if item.weight is not None
    }
    embeddings.pop("", None)
    embeddings |= {name: name for name in formats if architecture.is_embedding(name)}
    quantization = quantization_config(
        formats, _not_converted(items), act_quant, act_symmetric, experts, embeddings
    )
    if slices is not None:
        quantization["tensor_parallel"] = {
            "rank": slices.rank,
            "size": slices.size,
            "styles": slices.styles,
        }
    config = {**plain_config(checkpoint.config), "quantization_config": quantization}
    if any(name.rpartition(".")[2] in _HEADS for name in formats):
        _untie(config)
    config[GUARD_KEY] = GUARD
    return config


def _format(weight: tuple[int, int, int, int], item: Item) -> WeightFormat:
    _, _, bits, group_size = weight
    prefix = f"{item.step.name}."
    tensors = {name.removeprefix(prefix): dtype for name, (dtype, _) in item.specs.items()}
    return WeightFormat(
        bits,
        group_size,
        tuple(sorted((name, dtype) for name, dtype in tensors.items() if name != "codes")),
    )


def _not_converted(items: Sequence[Item]) -> list[str]:
    names = {item.step.name for item in items}
    matrices = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    plain = {
        item.step.name.removesuffix(".weight")
        for item in items
        if item.weight is None and len(item.step.entry.shape) == 2
    }
    # A head that shares the embedding's weight has no separate tensor.
    return sorted(plain.intersection(matrices) | ({"lm_head"} - names))


def _untie(config: dict[str, Any]) -> None:
    """Say that the head, which is packed, does not share the embedding's weight."""
    config["tie_word_embeddings"] = False
    if isinstance(inner := config.get("text_config"), dict):
        config["text_config"] = {**inner, "tie_word_embeddings": False}


def _index(names: Sequence[str], shards: Sequence[Mapping[str, Spec]]) -> dict[str, Any]:
    total = sum(spec_bytes(spec) for shard in shards for spec in shard.values())
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _files_beside(checkpoint: Checkpoint, ranks: int) -> tuple[Mapping[str, Path | bytes], str]:
    """The files of a model besides weights, configuration and card, by name; and why its tokenizer
    is missing or differs.
    """
    return (
        _gguf_files(checkpoint)
        if checkpoint.dialect == "gguf"
        else (_small_files(checkpoint, ranks), "")
    )


def _write_files(directory: Path, files: Mapping[str, Path | bytes]) -> None:
    for name, content in files.items():
        _replace(directory / name, content.read_bytes() if isinstance(content, Path) else content)


def _small_files(checkpoint: Checkpoint, ranks: int) -> dict[str, Path]:
    """Files to copy besides weights and configuration; a whole model gets a new card."""
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
    """The same, made of a GGUF file; and why its tokenizer is missing or differs."""
    tokens = {
        name: checkpoint.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    tokens = {name: token for name, token in tokens.items() if token is not None}
    files = {"generation_config.json": _json(tokens)} if tokens else {}
    problem = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers = import_module("transformers")
            with tempfile.TemporaryDirectory() as scratch:
                # In an otherwise empty directory: transformers would read settings from files
                # beside it.
                (Path(scratch) / "model.gguf").symlink_to(checkpoint.files[0].resolve())
                # Not AutoTokenizer, which takes the architecture's class; some files have a
                # tokenizer of another. Before transformers 5.23 it ignored this key.
                begins = (
                    {"add_bos_token": True} if checkpoint.metadata.get(ADDS_BOS) == "True" else {}
                )
                tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                    scratch, gguf_file="model.gguf", **begins
                )
                saved = Path(scratch) / "saved"
                tokenizer.save_pretrained(saved)
                files |= {file.name: file.read_bytes() for file in sorted(saved.iterdir())}
                (saved / "config.json").write_bytes(_json(checkpoint.config))
                found = transformers.AutoTokenizer.from_pretrained(saved)
                if tokenizer(_SAMPLE).input_ids != found(_SAMPLE).input_ids:
                    # For some model types AutoTokenizer takes a fixed class, whatever the files
                    # say.
                    problem = (
                        "the tokenizer differs from what AutoTokenizer makes of it "
                        f"({type(found).__name__}); "
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
    with errors_name(path), temporary.open("wb") as file:
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
