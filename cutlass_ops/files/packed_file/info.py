"""The headers of a packed file, or of a directory of packed files."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...checkpoints.safetensors_files import INDEX, json_object, opened, placement, read_header
from ...weights import formats
from ...weights.specs import Spec, packed_specs
from ...weights.weight import PARTS, CheckpointError
from .layout import Slices


@dataclass(frozen=True)
class PackedInfo:
    """The content of a packed file's header, checked against the file's size; tensors are not read.

    Attributes:
        weights: ``(n, k, bits, group_size)`` by name.
        experts: E, N and whether they are gated of the weights that are experts packed as one, by
            name; their n is E * N rounded up to 64.
        kernels: extents of the kernels of the weights that are convolutions', by name.
        gated: N of the weights that are gated, by name; their n is 2 * N.
        parts: dtype and shape of a weight's tensors ("codes", "scales", ...), by name.
        tensors: dtype and shape of the other tensors, by name.
        layout: its name and version.
        saved_elsewhere: whether transformers wrote the files.
        rounded: weights of which N or K may be rounded up, since no metadata gives them.
        tied, sources, tool: as in the module's table.
        options: as in the module's table.
        config: as in the module's table; {} where there is none.
        slices: which part of the model this is, or None for all of it.
        places: the file that holds each stored tensor, by its name in there ("m.codes"); of a
            directory, one of its shards.
        checksums: sha256 of each stored tensor as the header has it, or None for files without
            checksums.
    """

    path: Path
    layout: tuple[str, str]
    weights: Mapping[str, tuple[int, int, int, int]]
    parts: Mapping[str, Mapping[str, Spec]]
    tensors: Mapping[str, Spec]
    tied: Mapping[str, str]
    sources: Mapping[str, str]
    tool: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    slices: Slices | None
    places: Mapping[str, Path]
    checksums: Mapping[str, str] | None
    saved_elsewhere: bool = False
    rounded: tuple[str, ...] = ()
    experts: Mapping[str, tuple[int, int, bool]] = field(default_factory=dict)
    kernels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    gated: Mapping[str, int] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """The files that hold it."""
        return sorted(set(self.places.values())) or [self.path]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights and of the other tensors."""
        return (*self.weights, *self.tensors)


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Whether a file, or the first shard of a directory, claims to be packed by this package, in
    whatever version.

    Raises:
        CheckpointError: a file that is no safetensors, or JSON that is not readable.
    """
    path = Path(path)
    if path.is_dir():
        path = min(
            (*path.glob("*.safetensors"), *path.glob("rank-0-of-*/*.safetensors")), default=path
        )
    if not path.is_file() or path.suffix != ".safetensors":
        return False
    with opened(path) as file:
        layout = (file.metadata() or {}).get("layout")
    return bool(_saved_config(path)) if layout is None else layout.startswith("cutlass_ops.")


def _saved_config(path: Path) -> dict[str, Any] | None:
    """The ``quantization_config`` beside a file, if it is ours."""
    config = json_object(path.parent / "config.json").get("quantization_config")
    return (
        config
        if isinstance(config, dict) and config.get("quant_method") == formats.QUANT_METHOD
        else None
    )


def packed_info(path: str | os.PathLike[str]) -> PackedInfo:
    """Read and check the header of a packed file, or those of a directory's shards.

    Raises:
        CheckpointError: not a packed file, one of another layout or version, one whose header is
            wrong, or a directory that is not whole.
    """
    path = Path(path)
    if path.is_dir():
        return _directory_info(path)
    metadata, specs = read_header(path)
    if "layout" not in metadata and (config := _saved_config(path)) is not None:
        return _saved_info(path, [path], config)
    return _file_info(path, metadata, specs)


def _file_info(path: Path, metadata: Mapping[str, str], specs: dict[str, Spec]) -> PackedInfo:
    layout, version = metadata.get("layout"), metadata.get("layout_version")
    if layout is None:
        raise CheckpointError(
            path, "not a packed file: its metadata names no layout; cutlass-ops reorder makes one"
        )
    try:
        formats.check_layout(layout, version)
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error
    checksums = _strings(path, metadata, "checksums") if version != "1" else None
    places = dict.fromkeys(specs, path)
    weights = {
        name: _weight_fields(path, name, value)
        for name, value in _json_object(path, metadata, "weights").items()
    }
    experts, kernels = _experts(path, metadata, weights), _kernels(path, metadata, weights)
    parts = {
        name: _weight_parts(path, name, fields, specs, experts, kernels)
        for name, fields in weights.items()
    }
    tied = _strings(path, metadata, "tied")
    for name in tied:
        if name not in weights:
            raise CheckpointError(
                path, f"the metadata ties {name!r}, which is no weight of this file"
            )
    return PackedInfo(
        path=path,
        layout=(layout, str(version)),
        weights=weights,
        parts=parts,
        tensors=specs,
        tied=tied,
        sources=_strings(path, metadata, "sources"),
        tool=metadata.get("tool", ""),
        options=_json_object(path, metadata, "options"),
        config=_json_object(path, metadata, "config"),
        slices=_slices(path, metadata),
        places=places,
        checksums=checksums,
        experts=experts,
        kernels=kernels,
        gated=_gated(path, metadata, weights, {*experts, *kernels}),
    )


def _gated(
    path: Path,
    metadata: Mapping[str, str],
    weights: Mapping[str, tuple[int, int, int, int]],
    others: Collection[str],
) -> dict[str, int]:
    """N of the gated weights, which must not be among ``others``."""
    found = _json_object(path, metadata, "gated")
    for name, n in found.items():
        # type() and not isinstance(): True is no size.
        if type(n) is not int or n < 1 or n % formats.GATED_ROWS:
            raise CheckpointError(
                path,
                f"'gated' says {reprlib.repr(n)}; a multiple of {formats.GATED_ROWS} is expected",
                name,
            )
        if name not in weights or weights[name][0] != 2 * n or name in others:
            rows = weights[name][0] if name in weights else "no"
            raise CheckpointError(
                path, f"'gated' says {n} outputs of a matrix; the weight has {rows} rows", name
            )
    return found


def _kernels(
    path: Path, metadata: Mapping[str, str], weights: Mapping[str, tuple[int, int, int, int]]
) -> dict[str, tuple[int, ...]]:
    """Kernels' extents of the weights that are convolutions'."""
    found = {}
    for name, value in _json_object(path, metadata, "kernels").items():
        if name not in weights or not isinstance(value, list) or not value:
            raise CheckpointError(
                path,
                f"'kernels' says {reprlib.repr(value)}; a list of extents, of a weight of this "
                "file, is expected",
                name,
            )
        try:
            found[name] = formats.check_kernel_size(value, weights[name][1])
        except ValueError as error:
            raise CheckpointError(path, str(error), name) from error
    return found


def _experts(
    path: Path, metadata: Mapping[str, str], weights: Mapping[str, tuple[int, int, int, int]]
) -> dict[str, tuple[int, int, bool]]:
    """E and N of the weights that are experts, and whether their rows are of gate
    and up in eights.
    """
    found = {}
    for name, value in _json_object(path, metadata, "experts").items():
        e, n = (value.get(key) if isinstance(value, dict) else None for key in ("experts", "n"))
        gated = isinstance(value, dict) and value.get("gated", False)
        # type() and not isinstance(): True is no size.
        if (
            type(e) is not int
            or type(n) is not int
            or e < 1
            or n < 1
            or type(gated) is not bool
            or (gated and n % 2)
        ):
            raise CheckpointError(
                path,
                f"'experts' says {reprlib.repr(value)}; experts and n of at least 1, n even where "
                "gated is true, are expected",
                name,
            )
        if name not in weights or weights[name][0] != e * formats.padded_rows(n):
            rows = weights[name][0] if name in weights else "no"
            raise CheckpointError(
                path, f"'experts' says {e} experts of {n} rows; the weight has {rows} rows", name
            )
        found[name] = e, n, gated
    return found


def _weight_parts(
    path: Path,
    name: str,
    weight: tuple[int, int, int, int],
    specs: dict[str, Spec],
    experts: Mapping[str, tuple[int, int, bool]],
    kernels: Mapping[str, tuple[int, ...]],
) -> dict[str, Spec]:
    """The tensors of a weight, taken out of ``specs``; their shapes are checked."""
    n, k, bits, group_size = weight
    found = {part: specs.pop(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in specs}
    for part in ("codes", "scales"):
        if part not in found:
            raise CheckpointError(
                path, f"is named by the metadata, but {name}.{part} is not in the file", name
            )
    dtypes = {part: dtype for part, (dtype, _) in found.items()}
    count = experts[name][0] if name in experts else None
    expected = packed_specs(n, k, bits, group_size, dtypes, count, kernels.get(name, ()))
    for part, (_, shape) in found.items():
        if shape != expected[part][1]:
            raise CheckpointError(
                path,
                f"has shape {list(shape)}; n={n}, k={k}, bits={bits}, "
                f"group_size={group_size} make it "
                f"{list(expected[part][1])}",
                f"{name}.{part}",
            )
    return found


def _saved_info(path: Path, files: Sequence[Path], config: Mapping[str, Any]) -> PackedInfo:
    """The content of files that transformers wrote, without our metadata; a weight may be in two
    shards.
    """
    try:
        formats.check_layout(config.get("layout"), config.get("layout_version"))
    except ValueError as error:
        raise CheckpointError(path, f"quantization_config: {error}") from error
    specs: dict[str, Spec] = {}
    places: dict[str, Path] = {}
    stated: dict[str, Any] = {}
    first: Mapping[str, str] = {}
    for file in files:
        metadata, held = read_header(file)
        first = first or metadata  # each shard says the same of the whole model
        stated |= _json_object(file, metadata, "weights")
        for name, spec in held.items():
            if name in specs:
                raise CheckpointError(file, f"stands in {places[name].name} too", name)
            specs[name], places[name] = spec, file
    modules = config.get("modules", {})
    if not isinstance(modules, dict):
        raise CheckpointError(
            path, f"quantization_config: modules is {modules!r:.100}; an object is expected"
        )
    weights: dict[str, tuple[int, int, int, int]] = {}
    parts: dict[str, dict[str, Spec]] = {}
    rounded: list[str] = []
    for name in dict.fromkeys(
        [*stated, *(name.removesuffix(".codes") for name in specs if name.endswith(".codes"))]
    ):
        if (fields := stated.get(name)) is None:
            form = modules.get(name, config)
            fields = (
                {key: form.get(key) for key in ("bits", "group_size")}
                if isinstance(form, dict)
                else {}
            )
            fields |= _saved_sizes(path, name, specs, fields.get("bits"))
            rounded += [name] if not {f"{name}.bias", f"{name}.perm"} <= specs.keys() else []
        weights[name] = _weight_fields(path, name, fields)
    experts, kernels = _experts(path, first, weights), _kernels(path, first, weights)
    for name, weight in weights.items():
        parts[name] = _weight_parts(path, name, weight, specs, experts, kernels)
    return PackedInfo(
        path=path,
        layout=(formats.LAYOUT_NAME, str(config.get("layout_version"))),
        weights=weights,
        parts=parts,
        tensors=specs,
        tied={},
        sources={},
        tool="",
        config={},
        options={},
        slices=None,
        places=places,
        checksums=None,
        saved_elsewhere=True,
        rounded=tuple(rounded),
        experts=experts,
        kernels=kernels,
    )


def _saved_sizes(path: Path, name: str, specs: Mapping[str, Spec], bits: Any) -> dict[str, int]:
    """N and K by a weight's tensors; rounded up where neither bias nor act order gives them."""
    codes, scales = specs[f"{name}.codes"][1], specs.get(f"{name}.scales", (None, ()))[1]
    if len(codes) != 1 or len(scales) != 2 or 0 in (*codes, *scales) or bits not in formats.BITS:
        raise CheckpointError(
            path,
            f"has codes {list(codes)}, scales {list(scales)} and bits {bits!r:.100}, which "
            "make no packed weight",
            name,
        )
    n, k = scales[1], codes[0] * 8 // bits // scales[1]
    for part, padded, pad in (("bias", n, formats.padded_rows), ("perm", k, formats.padded_k)):
        shape = specs.get(f"{name}.{part}", (None, ()))[1]
        if len(shape) == 1 and pad(shape[0]) == padded:
            n, k = (shape[0], k) if part == "bias" else (n, shape[0])
    return {"n": n, "k": k}


def _directory_info(directory: Path) -> PackedInfo:
    if ranks := sorted(path.name for path in directory.glob("rank-*-of-*")):
        raise CheckpointError(
            directory, f"holds the directories of several ranks; name one: {', '.join(ranks)}"
        )
    # It is written last.
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            directory,
            "has no config.json: not a packed model, or one whose reordering was interrupted",
        )
    index = directory / INDEX
    placed = placement(index) if index.is_file() else {}
    files = sorted(
        {directory / name for name in placed.values()}
        if index.is_file()
        else {directory / "model.safetensors"}
    )
    if not files:
        raise CheckpointError(index, "names no file")
    config = _saved_config(files[0])
    if config is not None and "layout" not in read_header(files[0])[0]:
        info = _saved_info(directory, files, config)
        _check_placement(index, placed, info.places)
        return info
    shards = [packed_info(file) for file in files]
    first = shards[0]
    weights: dict[str, tuple[int, int, int, int]] = {}
    parts: dict[str, Mapping[str, Spec]] = {}
    tensors: dict[str, Spec] = {}
    tied: dict[str, str] = {}
    places: dict[str, Path] = {}
    checksums: dict[str, str] = {}
    experts: dict[str, tuple[int, int, bool]] = {}
    kernels: dict[str, tuple[int, ...]] = {}
    gated: dict[str, int] = {}
    for shard in shards:
        if (shard.sources, shard.options, shard.slices) != (
            first.sources,
            first.options,
            first.slices,
        ):
            raise CheckpointError(
                shard.path,
                f"was not written with {first.path.name}: the sources, options or slices differ",
            )
        for name in shard.places:
            if name in places:
                raise CheckpointError(shard.path, f"stands in {places[name].name} too", name)
        weights.update(shard.weights)
        parts.update(shard.parts)
        experts.update(shard.experts)
        kernels.update(shard.kernels)
        gated.update(shard.gated)
        tensors.update(shard.tensors)
        tied.update(shard.tied)
        places.update(shard.places)
        checksums.update(shard.checksums or {})
    _check_placement(index, placed, places)
    return replace(
        first,
        path=directory,
        layout=min(shard.layout for shard in shards),  # the oldest: what all of them have
        weights=weights,
        parts=parts,
        tensors=tensors,
        tied=tied,
        places=places,
        checksums=checksums if all(shard.checksums is not None for shard in shards) else None,
        experts=experts,
        kernels=kernels,
        gated=gated,
    )


def _check_placement(index: Path, placed: Mapping[str, str], places: Mapping[str, Path]) -> None:
    if not index.is_file():
        return
    found = {name: file.name for name, file in places.items()}
    if found != placed:
        name = min(name for name in {*found, *placed} if found.get(name) != placed.get(name))
        raise CheckpointError(
            index, f"is placed in {placed.get(name)!r}; it is in {found.get(name)!r}", name
        )


def _slices(path: Path, metadata: Mapping[str, str]) -> Slices | None:
    if "tensor_parallel" not in metadata:
        return None
    value = _json_object(path, metadata, "tensor_parallel")
    rank: Any = value.get("rank")
    size: Any = value.get("size")
    styles: Any = value.get("styles")
    fits = type(rank) is int and type(size) is int and 0 <= rank < size and isinstance(styles, dict)
    if not fits or any(style not in ("colwise", "rowwise") for style in styles.values()):
        raise CheckpointError(
            path,
            f"'tensor_parallel' is {reprlib.repr(value)}; a rank below size and colwise or rowwise "
            "styles are expected",
        )
    return Slices(rank, size, styles)


def _json_object(path: Path, metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        value = json.loads(metadata.get(key, "{}"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"metadata {key!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            path, f"metadata {key!r} is a JSON {type(value).__name__}; an object is expected"
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _strings(path: Path, metadata: Mapping[str, str], key: str) -> dict[str, str]:
    value = _json_object(path, metadata, key)
    for name, text in value.items():
        if not isinstance(text, str):
            raise CheckpointError(
                path,
                f"metadata {key!r} has {reprlib.repr(text)} for {name!r}; a string is expected",
            )
    return value


def _weight_fields(path: Path, name: str, value: Any) -> tuple[int, int, int, int]:
    fields = ("n", "k", "bits", "group_size")
    # type() and not isinstance(): True is no size.
    if not isinstance(value, dict) or any(type(value.get(key)) is not int for key in fields):
        raise CheckpointError(
            path,
            f"the metadata says {reprlib.repr(value)}; integers {', '.join(fields)} are expected",
            name,
        )
    n, k, bits, group_size = (value[key] for key in fields)
    try:
        formats.check_bits(bits)
        formats.check_group_size(group_size)
    except ValueError as error:
        raise CheckpointError(path, str(error), name) from error
    if n < 1 or k < 1:
        raise CheckpointError(path, f"the metadata says n={n}, k={k}; both are at least 1", name)
    return n, k, bits, group_size
