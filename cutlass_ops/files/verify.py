"""Check packed files: alone, against a checkpoint, against another packed file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .. import reference
from ..checkpoints import Checkpoint, Entry
from ..checkpoints.checkpoint import FLOAT_TYPES
from ..checkpoints.safetensors_files import (
    checksum,
    header_is_intact,
    json_object,
    opened,
    spec_bytes,
)
from ..nn.architecture import architecture_of
from ..nn.model_experts import PRODUCTS
from ..weights.packed_experts import PackedExperts
from ..weights.packed_weight import PackedWeight
from ..weights.reorder import reorder
from ..weights.weight import PARTS, CheckpointError, QuantizedWeight, not_finite
from .checkpoint_experts import ExpertsLayer, layers_of
from .conversion_plan import (
    TRANSPOSED,
    Progress,
    Step,
    as_tensors,
    as_transposed,
    misfits,
    sha256,
    stacked_weight,
    to_quantize,
)
from .packed_config import weight_format
from .packed_file import PackedInfo, packed_info, read_packed_weight
from .tensor_parallel import slice_tensor, slice_weight


@dataclass
class Verified:
    """The result of :func:`verify_packed`.

    Attributes:
        weights, tensors: how many were checked.
        problems: one line each; empty if all is well.
        notes: what could not be checked, one line each.
        same_source: whether the checkpoint's files have the sha256 in the packed file; None if none
            was given.
        largest_difference: of a quantised weight's values, as they are stored, from the
            checkpoint's own (for a float checkpoint: the error of quantising); None
            without a checkpoint.
        largest_at: the weight that has it.
    """

    weights: int = 0
    tensors: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    same_source: bool | None = None
    largest_difference: float | None = None
    largest_at: str = ""


def verify_packed(
    path: str | os.PathLike[str],
    against: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check every bit of a packed file or directory, and compare it with the checkpoint that it was
    made from.

    Without a checkpoint: the structure, the checksums of the header and of each tensor, that
    scales, offsets and code books are finite (a bias may hold infinities), that padding is zero,
    and that a directory's ``config.json`` describes the weights that its files hold. With one, too:
    codes, scales, zero points, offsets, biases and copied tensors must be equal bit for bit (float
    weights are quantised again with the file's own options, and split as it is split), and nothing
    may be missing or extra.

    Files of layout version 1, and those that ``save_pretrained`` of transformers wrote, have no
    checksums: a bit that turns one code into another is seen only with the checkpoint.

    Args:
        path: a file, a directory, or one that holds the directories of several ranks, all of which
            are checked.
        against: the checkpoint.
        progress: called for every finished tensor.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    path = Path(path)
    found = Verified()
    ranks = rank_directories(path)
    for rank, directory in enumerate(ranks):
        if directory.is_dir():
            begin = len(found.problems)
            _verify_one(found, directory, against, progress)
            found.problems[begin:] = [
                f"{directory.name}: {problem}" for problem in found.problems[begin:]
            ]
            slices = packed_info(directory).slices
            if slices is None or (slices.rank, slices.size) != (rank, len(ranks)):
                held = "no rank" if slices is None else f"rank {slices.rank} of {slices.size}"
                found.problems.append(f"{directory.name}: holds {held}")
        else:
            found.problems.append(f"{directory.name}: is not there")
    if not ranks:
        _verify_one(found, path, against, progress)
    return found


def rank_directories(path: Path) -> list[Path]:
    """The directories of all ranks, rank 0 first; none if a model is not split over ranks."""
    found = sorted(path.glob("rank-*-of-*")) if path.is_dir() else []
    sizes = {
        int(match[1])
        for name in found
        if (match := re.fullmatch(r"rank-\d{1,6}-of-(\d{1,6})", name.name))
    }
    if len(sizes) > 1:
        raise CheckpointError(path, f"holds ranks of {' and of '.join(map(str, sorted(sizes)))}")
    return [path / f"rank-{rank}-of-{size}" for size in sizes for rank in range(size)]


def _verify_one(
    found: Verified, path: Path, against: Checkpoint | None, progress: Progress | None
) -> None:
    info = packed_info(path)
    left = set(info.names)
    if info.saved_elsewhere:
        found.notes.append(f"{path}: was written by save_pretrained, which keeps no checksums")
        if info.rounded:
            found.notes.append(
                f"{path}: keeps no N and K of {len(info.rounded)} weights; "
                "their padding cannot be distinguished from their values"
            )
    elif info.checksums is None:
        found.notes.append(f"{path}: has layout version {info.layout[1]}, which has no checksums")
    else:
        changed = [file.name for file in info.files if not header_is_intact(file)]
        found.problems += [f"{file}: the header does not have its checksum" for file in changed]
        found.problems += [
            f"{name}: has a checksum, and is not there"
            for name in sorted(info.checksums.keys() - info.places)
        ]
    if path.is_dir():
        _compare_config(found, info)
    for name in info.weights:
        weight = _weight(info, name)
        for part, tensor in weight.tensors().items():
            _compare_sum(found, info, name, f"{name}.{part}", tensor)
        for title, matrix in _matrices(name, weight):
            unpacked = matrix.unpack()
            if problem := not_finite(unpacked):
                found.problems.append(f"{title}: {problem}")
            else:
                _compare(
                    found,
                    title,
                    reorder(unpacked).tensors(),
                    matrix.tensors(),
                    "has padding that is not zero",
                )
        if isinstance(weight, PackedExperts):
            bias = weight.tensors().get("bias")
            if bias is not None and bool(
                bias.view(weight.experts, weight.n_pad)[:, weight.n :].any()
            ):
                found.problems.append(f"{name}: bias has padding that is not zero")
        found.weights += 1
        if progress is not None:
            progress(name, weight.nbytes)
    for name, spec in info.tensors.items():
        if info.checksums is not None:
            _compare_sum(found, info, name, name, _tensor(info, name))
        found.tensors += 1
        if progress is not None:
            progress(name, spec_bytes(spec))
    if against is not None:
        sources = {source.name: sha256(source) for source in against.files}
        found.same_source = sources == info.sources and found.same_source is not False
        layers = _experts_of(info, against)
        members = {entry.name for layer in layers for entry in layer.entries}
        for layer in layers:
            left -= _verify_experts(found, info, against, layer)
        for entry in against.entries.values():
            if entry.name not in members:
                left -= _verify_entry(found, info, against, entry)
            if progress is not None:
                progress(entry.name, entry.nbytes)
        found.problems += [f"{name}: not in the checkpoint" for name in sorted(left)]
        if path.is_dir():
            linears = info.weights.keys() - info.experts.keys()
            stored = [f"{name}.weight" for name in (*linears, *info.tied.values())] + list(
                info.experts
            )
            biased = [name for name in info.weights if "bias" in info.parts[name]]
            stored += [
                f"{name}_bias" if name in info.experts else f"{name}.bias" for name in biased
            ]
            found.problems += misfits(architecture_of(against.config), [*stored, *info.tensors])
        found.notes += [f"{against.path}: {warning}" for warning in against.warnings]


def _matrices(
    name: str, weight: PackedWeight | PackedExperts
) -> Iterator[tuple[str, PackedWeight]]:
    """The rows of a weight, or of each of several experts, as they are packed, with a name."""
    if isinstance(weight, PackedWeight):
        yield name, weight.eights
    else:
        for e in range(weight.experts):
            yield f"{name}[{e}]", weight.expert(e)


def _unpacked(
    name: str, weight: PackedWeight | PackedExperts
) -> Iterator[tuple[str, QuantizedWeight]]:
    """The weight, or each expert, unpacked, with its name."""
    if isinstance(weight, PackedWeight):
        yield name, weight.unpack()
    else:
        for e in range(weight.experts):
            yield f"{name}[{e}]", weight.unpack_expert(e)


def _weight(info: PackedInfo, name: str) -> PackedWeight | PackedExperts:
    # Opened again for each, so that no more than one of them is held.
    with ExitStack() as stack:
        files = {info.places[f"{name}.{part}"] for part in info.parts[name]}
        return read_packed_weight(
            info, name, {file: stack.enter_context(opened(file)) for file in files}
        )


def _tensor(info: PackedInfo, name: str) -> Tensor:
    with opened(info.places[name]) as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _compare_sum(found: Verified, info: PackedInfo, name: str, stored: str, tensor: Tensor) -> None:
    if info.checksums is not None and checksum(tensor) != info.checksums.get(stored):
        part = stored.removeprefix(name).removeprefix(".") or "the tensor"
        found.problems.append(f"{name}: {part} does not have its checksum")


def _compare_config(found: Verified, info: PackedInfo) -> None:
    """Whether ``config.json`` describes the weights of the files."""
    config = json_object(info.path / "config.json").get("quantization_config")
    if not isinstance(config, dict):
        found.problems.append("config.json: has no quantization_config")
        return
    for name, (_, _, bits, group_size) in info.weights.items():
        try:
            form = weight_format(config, name)
        except (TypeError, ValueError, AttributeError) as error:
            found.problems.append(f"config.json: {name}: {error}")
            continue
        dtypes = {part: dtype for part, (dtype, _) in info.parts[name].items() if part != "codes"}
        stated = {} if form is None else dict(form.tensors)
        if "bias" in dtypes:  # the model's own configuration may say that a layer has a bias
            stated.setdefault("bias", dtypes["bias"])
        if form is None or (form.bits, form.group_size, stated) != (bits, group_size, dtypes):
            found.problems.append(f"config.json: does not describe {name} as the files have it")


def _compare(
    found: Verified,
    name: str,
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    problem: str,
) -> None:
    for part in (*expected, *(part for part in actual if part not in expected)):
        a, b = expected.get(part), actual.get(part)
        if a is None or b is None:
            found.problems.append(
                f"{name}: {part} {'should not be there' if a is None else 'is missing'}"
            )
        elif not _same_bits(a, b):
            found.problems.append(f"{name}: {part} {problem}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def _verify_entry(
    found: Verified, info: PackedInfo, checkpoint: Checkpoint, entry: Entry
) -> set[str]:
    """Compare the result of one entry; returns the names in the packed file that belong to it."""
    module = entry.name.removesuffix(".weight")
    if module in info.options.get(TRANSPOSED, ()):
        entry = as_transposed(entry)
    packed = module if module in info.weights and entry.name != f"{module}.bias" else None
    if packed is not None and not entry.problem and len(entry.shape) >= 2:
        stored = _weight(info, packed)
        if isinstance(stored, PackedExperts):
            found.problems.append(
                f"{packed}: holds {stored.experts} experts; the checkpoint has one matrix"
            )
            return {packed}
        if stored.gated:
            found.problems.append(
                f"{packed}: holds gate and up packed as one; the checkpoint has one matrix"
            )
            return {packed}
        weight = stored.unpack()
        expected = _expected(info, checkpoint, entry, weight)
        _compare(
            found, packed, _tensors(expected), _tensors(weight), "differs from the checkpoint's"
        )
        if (weight.shape, weight.kernel_size) == (expected.shape, expected.kernel_size):
            values = _sliced(info, packed, entry.values().float())
            _note_difference(
                found, packed, reference.dequantize_weight(weight, torch.float32), values
            )
        table = f"{entry.tied_to}.weight" if entry.tied_to else ""
        if table not in info.tensors:
            return {packed}
        _compare_values(found, info, table, entry.values())
        return {packed, table}
    if entry.quantized is None and not entry.problem:
        steps = [Step(entry, entry.name, None)]
        owner = entry.name.removesuffix(".bias")
        if owner != entry.name and owner in info.weights and "bias" in info.parts[owner]:
            _compare(
                found,
                owner,
                {"bias": _sliced(info, owner, entry.values())},
                {"bias": _tensor(info, f"{owner}.bias")},
                "differs from the checkpoint's",
            )
            return set()
    else:
        steps = as_tensors(checkpoint.path, entry)
    for step in steps:
        if step.name not in info.tensors:
            found.problems.append(
                f"{step.name}: in the checkpoint ({entry.source}), not in the packed file"
            )
        elif entry.quantized is not None or entry.problem:
            _compare_values(found, info, step.name, step.entry.values())
        elif not _same_bits(
            _sliced(info, step.name, step.entry.values()), _tensor(info, step.name)
        ):
            found.problems.append(f"{step.name}: differs from the checkpoint's")
    return {step.name for step in steps}


def _experts_of(info: PackedInfo, checkpoint: Checkpoint) -> list[ExpertsLayer]:
    """The layers of experts in a checkpoint that the packed file has packed."""
    if not info.experts:
        return []
    layers = layers_of(checkpoint.entries.values(), architecture_of(checkpoint.config))
    return [
        layer
        for layer in layers
        if layer.matrices and all(f"{layer.name}.{p}" in info.experts for p in PRODUCTS)
    ]


def _verify_experts(
    found: Verified, info: PackedInfo, checkpoint: Checkpoint, layer: ExpertsLayer
) -> set[str]:
    """Compare the result of a layer of experts; returns the names in the packed file that belong to
    it.
    """
    names = {product: f"{layer.name}.{product}" for product in PRODUCTS}
    for product, name in names.items():
        stored = _weight(info, name)
        _, _, bits, group_size = info.weights[name]
        symmetric, clip = "zeros" not in info.parts[name], info.options.get("clip")
        group_size = info.options.get("group_size", group_size)
        weight = stacked_weight(checkpoint.path, layer, product, bits, group_size, symmetric, clip)
        rank, size = (0, 1) if info.slices is None else (info.slices.rank, info.slices.size)
        style = "replicate" if info.slices is None else info.slices.styles.get(name, "replicate")
        expected = weight.read(style, rank, size)
        count = stored.experts if isinstance(stored, PackedExperts) else 1
        if count != len(expected):
            found.problems.append(
                f"{name}: holds {count} experts; the checkpoint has {len(expected)}"
            )
            continue
        for e, (title, unpacked) in enumerate(_unpacked(name, stored)):
            exact = expected[e]
            _compare(
                found, title, _tensors(exact), _tensors(unpacked), "differs from the checkpoint's"
            )
            if unpacked.shape == exact.shape:
                parts = [
                    slice_tensor(entry.values().float(), style, rank, size)
                    for entry, _ in layer.matrices[product][e]
                ]
                _note_difference(
                    found,
                    title,
                    reference.dequantize_weight(unpacked, torch.float32),
                    torch.cat(parts),
                )
    return set(names.values())


def _compare_values(found: Verified, info: PackedInfo, name: str, values: Tensor) -> None:
    """Compare a plain tensor with the values of a quantised weight, rounded to its dtype."""
    stored, expected = _tensor(info, name), _sliced(info, name, values)
    if stored.dtype not in FLOAT_TYPES or not _same_bits(expected.to(stored.dtype), stored):
        found.problems.append(f"{name}: differs from the checkpoint's")
    else:
        _note_difference(found, name, stored.float(), expected.float())


def _note_difference(found: Verified, name: str, values: Tensor, expected: Tensor) -> None:
    difference, largest = float((values - expected).abs().max()), found.largest_difference
    if largest is None or not (difference <= largest or math.isnan(largest)):  # the first NaN stays
        found.largest_difference, found.largest_at = difference, name


def _expected(
    info: PackedInfo, checkpoint: Checkpoint, entry: Entry, packed: QuantizedWeight
) -> QuantizedWeight:
    if entry.quantized is not None:
        weight = entry.quantized.read()
    else:
        module = entry.name.removesuffix(".weight")
        bias = checkpoint.entries.get(f"{module}.bias") if packed.bias is not None else None
        # A slice may have shorter groups than the matrix was quantised in.
        group_size = info.options.get("group_size", packed.group_size)
        clip = info.options.get("clip")
        weight = to_quantize(
            checkpoint.path, entry, bias, packed.bits, group_size, packed.symmetric, clip
        ).read()
    slices = info.slices
    if slices is None:
        return weight
    style = slices.styles.get(entry.name.removesuffix(".weight"), "replicate")
    return slice_weight(weight, style, slices.rank, slices.size)


def _sliced(info: PackedInfo, name: str, values: Tensor) -> Tensor:
    if info.slices is None:
        return values
    return slice_tensor(
        values, info.slices.styles.get(name, "replicate"), info.slices.rank, info.slices.size
    )


def _tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    named = {part: getattr(weight, part) for part in PARTS}
    return {part: tensor for part, tensor in named.items() if tensor is not None}


# ---- two packed files


@dataclass
class Differences:
    """The result of :func:`diff_packed`.

    Attributes:
        same: how many weights and tensors are equal bit for bit.
        only_first, only_second: names that only one has.
        changed: by name, what differs.
    """

    same: int = 0
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    changed: dict[str, list[str]] = field(default_factory=dict)


def diff_packed(
    first: str | os.PathLike[str], second: str | os.PathLike[str], progress: Progress | None = None
) -> Differences:
    """Compare two packed files or directories, weight by weight, however they are cut into shards.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    a, b = packed_info(first), packed_info(second)
    in_a, in_b = set(a.names), set(b.names)
    found = Differences()
    for name in dict.fromkeys((*a.names, *b.names)):
        if name not in in_b:
            found.only_first.append(name)
        elif name not in in_a:
            found.only_second.append(name)
        elif changes := _changes(a, b, name):
            found.changed[name] = changes
        else:
            found.same += 1
        if progress is not None:
            progress(
                name,
                sum(_nbytes(info, name) for info, names in ((a, in_a), (b, in_b)) if name in names),
            )
    return found


def _nbytes(info: PackedInfo, name: str) -> int:
    return sum(
        map(spec_bytes, info.parts[name].values() if name in info.weights else [info.tensors[name]])
    )


def _changes(a: PackedInfo, b: PackedInfo, name: str) -> list[str]:
    if (name in a.weights) != (name in b.weights):
        return ["packed in one, a tensor in the other"]
    if name not in a.weights:
        return _part_changes("values", _tensor(a, name), _tensor(b, name))
    fields = zip(("n", "k", "bits", "group_size"), a.weights[name], b.weights[name], strict=True)
    if changes := [f"{key} is {x} and {y}" for key, x, y in fields if x != y]:
        return changes
    if (first := a.experts.get(name)) != (second := b.experts.get(name)):
        return [f"experts, their rows and whether they are gated are {first} and {second}"]
    if a.kernels.get(name, ()) != b.kernels.get(name, ()):
        return [f"kernel_size is {a.kernels.get(name, ())} and {b.kernels.get(name, ())}"]
    if (name in a.gated) != (name in b.gated):
        return [f"gated is {name in a.gated} and {name in b.gated}"]
    x, y = _weight(a, name), _weight(b, name)
    # Codes in the order of the matrix; the padding is compared as it is stored.
    changes = []
    for (title, one), (_, other) in zip(_unpacked("", x), _unpacked("", y), strict=True):
        prefix = f"{title} " if title else ""
        parts, others = _tensors(one), _tensors(other)
        for part in PARTS:
            if (part in parts) != (part in others):
                changes.append(
                    f"{prefix}{part} "
                    f"{'only in the first' if part in parts else 'only in the second'}"
                )
            elif part in parts:
                changes += [
                    f"{prefix}{change}" for change in _part_changes(part, parts[part], others[part])
                ]
    same = all(
        _same_bits(tensor, y.tensors()[part])
        for part, tensor in x.tensors().items()
        if part in y.tensors()
    )
    return changes or ([] if same else ["the padding differs"])


def _part_changes(part: str, a: Tensor, b: Tensor) -> list[str]:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return [f"{part} are {_spec(a)} and {_spec(b)}"]
    if _same_bits(a, b):
        return []
    # Flat first: a dimension of one element may keep another stride than views need.
    x, y = (t.reshape(-1).view(torch.uint8).reshape(t.numel(), -1) for t in (a, b))
    wrong = (x != y).any(1)
    place = [int(i) for i in torch.unravel_index(wrong.int().argmax(), a.shape)]
    return [f"{part}: {int(wrong.sum())} of {wrong.numel()} differ, the first at {place}"]


def _spec(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
