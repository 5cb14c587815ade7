"""Pack the entries of a checkpoint, for one rank or several, and write them tensor by tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..checkpoints import Checkpoint, Quantized
from ..checkpoints.safetensors_files import spec_bytes, stream_safetensors
from ..weights import formats
from ..weights.packed_experts import PackedExperts
from ..weights.packed_weight import PackedWeight
from ..weights.reorder import reorder
from ..weights.specs import PACKED_DTYPES, Spec, packed_specs
from ..weights.weight import CheckpointError
from .checkpoint_experts import StackedWeight
from .conversion_plan import TRANSPOSED, Options, Plan, Progress, Step, plan, sha256
from .packed_config import ACTIVATIONS, plain_config
from .packed_file import Slices, check_names, packed_metadata
from .tensor_parallel import (
    ACT_ORDER,
    check_heads,
    slice_shape,
    slice_tensor,
    slice_weight,
    sliced_format,
    split_style,
)


@dataclass(frozen=True)
class Item:
    """The result of one entry of the checkpoint; its sizes are the same on each rank.

    Attributes:
        step: the step of the plan.
        style: how it is split.
        ranks: over how many.
        weight: N, K, bits and group size of a rank's weight, or None for a plain tensor.
        kernel_size: of a convolution's weight.
        experts: E and N of a rank's experts, and whether they are gated.
        specs: dtype and shape of a rank's tensors, by their names.
    """

    step: Step
    style: str
    ranks: int
    weight: tuple[int, int, int, int] | None
    specs: Mapping[str, Spec]
    kernel_size: tuple[int, ...] = ()
    experts: tuple[int, int, bool] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on a rank."""
        return sum(map(spec_bytes, self.specs.values()))

    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """Each rank's tensors, by their names. The checkpoint's tensors are read once, those of
        experts once for each rank.
        """
        if self.step.weight is None:
            values = self.step.entry.values()
            for rank in range(self.ranks):
                yield {self.step.name: slice_tensor(values, self.style, rank, self.ranks)}
        elif isinstance(self.step.weight, StackedWeight):
            for rank in range(self.ranks):
                yield self._parts(self.step.weight.pack(self.style, rank, self.ranks))
        else:
            weight = self.step.weight.read()
            for rank in range(self.ranks):
                yield self._parts(reorder(slice_weight(weight, self.style, rank, self.ranks)))

    def _parts(self, packed: PackedWeight | PackedExperts) -> dict[str, Tensor]:
        return {f"{self.step.name}.{part}": tensor for part, tensor in packed.tensors().items()}


def items_of(
    checkpoint: Checkpoint,
    steps: Sequence[Step],
    ranks: int = 1,
    splits: Sequence[tuple[str, str]] = (),
) -> list[Item]:
    """The items of the steps, split over ranks; ``splits`` override the table of styles."""
    try:
        check_names(
            [step.name for step in steps if step.weight],
            [step.name for step in steps if not step.weight],
        )
    except ValueError as error:
        raise CheckpointError(checkpoint.path, str(error)) from error
    matrices = {step.name.removesuffix(".weight") for step in steps if len(step.entry.shape) == 2}
    items = []
    for step in steps:
        module, _, part = (step.name, "", "") if step.weight else step.name.rpartition(".")
        linear = step.weight is not None or (part in ("weight", "bias") and module in matrices)
        experts = isinstance(step.weight, StackedWeight)
        style = split_style(module, splits, experts) if linear and ranks > 1 else "replicate"
        if style != "replicate" and step.weight is not None and step.entry.tied_to:
            raise ValueError(
                f"{step.name!r} cannot be {style}: every rank looks up rows of "
                f"{step.entry.tied_to!r} in it"
            )
        if style == "colwise":
            check_heads(module, checkpoint.config, ranks)
        try:
            items.append(
                _weight_item(step, step.weight, style, ranks)
                if step.weight
                else _tensor_item(step, style, ranks)
            )
        except ValueError as error:
            raise ValueError(f"{step.name!r} cannot be {style}: {error}") from error
    return items


def _weight_item(step: Step, weight: Quantized | StackedWeight, style: str, ranks: int) -> Item:
    if style == "rowwise" and "perm" in weight.dtypes:
        raise ValueError(ACT_ORDER)
    dtypes = {part: PACKED_DTYPES.get(part, dtype) for part, dtype in weight.dtypes.items()}
    if isinstance(weight, StackedWeight):
        e, n, k = weight.shape
        joined = len(weight.matrices[0])
        n, k, group_size = sliced_format(n // joined, k, weight.group_size, style, ranks)
        n *= joined
        rows = e * formats.padded_rows(n)
        parts = packed_specs(rows, k, weight.bits, group_size, dtypes, e)
        specs = {f"{step.name}.{part}": spec for part, spec in parts.items()}
        return Item(
            step,
            style,
            ranks,
            (rows, k, weight.bits, group_size),
            specs,
            experts=(e, n, weight.gated),
        )
    # Only a file of weights has convolutions, and that is not split over ranks.
    n, channels, *kernel_size = step.entry.shape
    n, k, group_size = sliced_format(
        n, channels * math.prod(kernel_size), weight.group_size, style, ranks
    )
    parts = packed_specs(n, k, weight.bits, group_size, dtypes, kernel_size=kernel_size)
    specs = {f"{step.name}.{part}": spec for part, spec in parts.items()}
    return Item(step, style, ranks, (n, k, weight.bits, group_size), specs, tuple(kernel_size))


def _tensor_item(step: Step, style: str, ranks: int) -> Item:
    shape = (
        step.entry.shape if style == "replicate" else slice_shape(step.entry.shape, style, ranks)
    )
    return Item(step, style, ranks, None, {step.name: (step.entry.dtype, shape)})


def write_shard(
    paths: Sequence[Path],
    contents: Sequence[tuple[Mapping[str, Spec], Mapping[str, str]]],
    items: Sequence[Item],
    jobs: int,
    progress: Progress | None,
) -> None:
    """Write one shard: a file for each rank, whose specs and metadata ``contents`` has. At most
    ``jobs`` tensors are held.
    """
    with ExitStack() as stack:
        writers = [
            stack.enter_context(stream_safetensors(path, specs, metadata))
            for path, (specs, metadata) in zip(paths, contents, strict=True)
        ]

        def run(item: Item) -> None:
            for write, tensors in zip(writers, item.tensors(), strict=True):
                for name, tensor in tensors.items():
                    write(name, tensor)

        def done(item: Item, _: None) -> None:
            if progress is not None:
                progress(item.step.name, item.step.entry.nbytes)

        _each(run, items, jobs, done)


_T = TypeVar("_T")
_R = TypeVar("_R")


def _each(
    run: Callable[[_T], _R], items: Sequence[_T], jobs: int, done: Callable[[_T, _R], None]
) -> None:
    """``run`` each item on ``jobs`` threads; ``done`` is called on this one. The first error stops
    all of them.
    """
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


def shard_contents(
    items: Sequence[Item],
    sources: Mapping[str, str],
    options: Mapping[str, Any],
    slices: Slices | None,
) -> tuple[dict[str, Spec], dict[str, str]]:
    """Specs and metadata of a file with these items."""
    specs = {name: spec for item in items for name, spec in item.specs.items()}
    weights = {item.step.name: item.weight for item in items if item.weight is not None}
    tied = {
        name: item.step.entry.tied_to
        for item in items
        if (name := item.step.name) in weights and item.step.entry.tied_to
    }
    kernels = {item.step.name: item.kernel_size for item in items if item.kernel_size}
    experts = {item.step.name: item.experts for item in items if item.experts is not None}
    return specs, packed_metadata(weights, tied, sources, options, slices, experts, kernels)


def source_checksums(
    checkpoint: Checkpoint, jobs: int, progress: Progress | None
) -> dict[str, str]:
    """The SHA-256 of each file of the checkpoint, by its name."""
    digests: dict[str, str] = {}

    def done(file: Path, digest: str) -> None:
        digests[file.name] = digest
        if progress is not None:
            progress(file.name, file.stat().st_size)

    _each(sha256, checkpoint.files, jobs, done)
    return {file.name: digests[file.name] for file in checkpoint.files}


def options_metadata(options: Options, checkpoint: Checkpoint, planned: Plan) -> dict[str, Any]:
    """How the files were made, as their metadata says it."""
    how = {**asdict(options), **checkpoint.options}
    return {**how, TRANSPOSED: planned.transposed} if planned.transposed else how


def summary_of(checkpoint: Checkpoint, items: Sequence[Item], planned: Plan) -> dict[str, Any]:
    """Fields of :class:`Reordered` that follow from the items."""
    return {
        "weights": {
            item.step.name: (*_whole(item), item.step.weight.bits, item.step.weight.group_size)
            for item in items
            if item.step.weight is not None
        },
        "tensors": tuple(item.step.name for item in items if item.weight is None),
        "source_bytes": sum(file.stat().st_size for file in checkpoint.files),
        "styles": {item.step.name: item.style for item in items if item.style != "replicate"},
        "kept": planned.kept,
        "warnings": (*checkpoint.warnings, *planned.warnings),
        "rounded": {
            item.step.name: item.step.entry.rounded for item in items if item.step.entry.rounded
        },
    }


def _whole(item: Item) -> tuple[int, int]:
    """N and K of a weight, all ranks' parts; of experts, as packed files have N."""
    shape = item.step.entry.shape
    if item.experts is not None:
        return shape[0] * formats.padded_rows(shape[1]), shape[2]
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True)
class Reordered:
    """The result of :func:`reorder_checkpoint` or :func:`reorder_model`.

    Attributes:
        path: the file or directory written.
        weights: packed ones, by name: ``(n, k, bits, group_size)``; of the whole model, where ranks
            have slices. For experts n is E * N, each N rounded up to 64.
        tensors: names of the copied ones.
        source_bytes, packed_bytes: sizes of the checkpoint's files and of the written ones.
        files: the packed files, all ranks'.
        found: how many of those were there already, from a run that was interrupted.
        copied: names of the other files that were copied or, of a GGUF file, made from what it
            holds.
        warnings: for the user: unused parts of the checkpoint, an ``exclude`` that no layer's name
            has, and why there is no tokenizer.
        styles: how the layers that are split over ranks are split, by name.
        kept: why matrices that the options choose were not packed, by module name.
        rounded: how the stored tensors of quantised weights differ from their values, by name,
            where they do.
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
    rounded: Mapping[str, str] = field(default_factory=dict)


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

    :func:`cutlass_ops.files.conversion_plan.plan` decides what is packed.

    Args:
        checkpoint: from :func:`cutlass_ops.load_checkpoint`.
        path: the file to write.
        bits, group_size, symmetric, include, exclude, clip: as in
            :class:`cutlass_ops.files.conversion_plan.Options`.
        jobs: tensors that are processed, and held in memory, at a time.
        dry_run: plan and write nothing.
        progress: called for every file of the checkpoint that is read for its sha256, and for every
            finished tensor.

    Raises:
        CheckpointError: a tensor that cannot be packed.
        ValueError: nothing to pack, an option out of range, or not a regular expression.
        OSError: the file cannot be written.
    """
    path = Path(path)
    options = Options(bits, group_size, symmetric, include, exclude, clip)
    planned = plan(checkpoint, options, for_model=False)
    items = items_of(checkpoint, planned.steps)
    for file in checkpoint.files:
        if path.exists() and file.samefile(path):
            raise ValueError(
                f"{path} is a file of the checkpoint itself; give the packed file another name"
            )
    if not dry_run:
        how = options_metadata(options, checkpoint, planned)
        if checkpoint.activations is not None:
            how[ACTIVATIONS] = list(checkpoint.activations)
        specs, metadata = shard_contents(
            items, source_checksums(checkpoint, jobs, progress), how, None
        )
        if checkpoint.config:
            metadata["config"] = json.dumps(plain_config(checkpoint.config))
        contents = specs, metadata
        write_shard([path], [contents], items, jobs, progress)
    return Reordered(
        **summary_of(checkpoint, items, planned),
        path=path,
        packed_bytes=sum(item.nbytes for item in items) if dry_run else path.stat().st_size,
        files=(path,),
    )
