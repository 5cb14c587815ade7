"""Safetensors on the disk: headers, shards and their index, JSON; files written tensor by tensor,
with checksums.

The format: u64 length of a JSON header, the header
(``{name: {dtype, shape, data_offsets}, "__metadata__": {...}}``), the data without holes.
https://github.com/huggingface/safetensors. Its library checks every size and offset of the header.
The index is ``{"weight_map": {name: file of the same directory}}``.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..weights.specs import Spec
from ..weights.weight import CheckpointError

INDEX = "model.safetensors.index.json"
#: Files beside ``config.json`` that older tools left their settings in.
SETTINGS = ("quantize_config.json", "quant_config.json")

_MAX_JSON_BYTES = 100_000_000  # the library's own limit on a header
_MAX_TENSORS = 500_000  # the experts of Kimi K2 in GPTQ's form have 280,000
_MAX_DEPTH = 100  # of JSON: other libraries walk through it by recursion
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000  # above it, the safetensors library refuses a file
_BYTES_AT_A_TIME = 1 << 20  # hashed, then written: few enough to stay in the cache
_NO_SUM = "0" * 64  # in the place of a sha256 that is not known yet

#: What the format calls torch's dtypes.
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """A context in which an OSError without a file name, such as that of a full disk, gets this
    name.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """``safe_open`` with torch tensors; errors of the library become a CheckpointError."""
    if not path.is_file():
        raise CheckpointError(path, "not a file" if path.exists() else "no such file")
    try:
        # The library reports any file that it cannot open as missing.
        path.open("rb").close()
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(path, f"not a valid safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(path, error.strerror or str(error)) from error


def mapped(file: BinaryIO, start: int, size: int, alignment: int) -> Tensor:
    """A part of a file, uint8 ``[size]``, over a separate map, which is unmapped with it; at least
    1 byte, all in the file.

    Files do not align tensors, but torch needs it: a part that does not start at a multiple of
    ``alignment`` is copied.
    """
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    # A copy on write, as torch has no tensors that are read-only.
    data = mmap.mmap(file.fileno(), start + size - first, access=mmap.ACCESS_COPY, offset=first)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start - first)
    return raw if start % alignment == 0 else raw.clone()


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Spec]]:
    """A file's metadata, and its tensors in their order."""
    with opened(path) as file:
        specs: dict[str, Spec] = {}
        for name in tensor_names(path, file):
            part = file.get_slice(name)
            if part.get_dtype() not in TYPES:
                raise CheckpointError(
                    path, f"has type {part.get_dtype()}; known are {', '.join(TYPES)}", name
                )
            specs[name] = (TYPES[part.get_dtype()], tuple(part.get_shape()))
        return file.metadata() or {}, specs


def tensor_names(path: Path, file: Any) -> list[str]:
    """The tensors of an open file, in their order."""
    names: list[str] = file.offset_keys()
    _check_count(path, len(names))
    return names


def _check_count(path: Path, count: int) -> None:
    """Refuse more tensors than any model has: each takes 2 kB and 50 us."""
    if count > _MAX_TENSORS:
        raise CheckpointError(path, f"has {count} tensors; at most {_MAX_TENSORS} are read")


def placement(index: Path) -> dict[str, str]:
    """The file of each tensor by an index; each name is checked to be one of the
    index's directory.
    """
    weight_map = json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise CheckpointError(index, 'has no "weight_map" from tensors to files')
    _check_count(index, len(weight_map))
    for tensor, name in weight_map.items():
        # A shard is in the directory of its index: a name must not lead to another one.
        if not name.endswith(".safetensors") or name != Path(name).name or "\0" in name:
            raise CheckpointError(
                index,
                f"is placed in {name!r}; a *.safetensors file of the same directory is expected",
                tensor,
            )
    return weight_map


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file."""
    if not path.is_file():
        return {}
    if (size := path.stat().st_size) > _MAX_JSON_BYTES:
        raise CheckpointError(path, f"has {size} bytes; at most {_MAX_JSON_BYTES} are read")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(path, f"is a JSON {type(content).__name__}; an object is expected")
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    if level:
        raise CheckpointError(
            path, f"has objects and lists in each other, more than {_MAX_DEPTH} deep"
        )
    return content


def spec_bytes(spec: Spec) -> int:
    """Bytes of a tensor."""
    dtype, shape = spec
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


@contextmanager
def stream_safetensors(
    path: str | os.PathLike[str], specs: Mapping[str, Spec], metadata: Mapping[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a safetensors file tensor by tensor, holding none of them, with checksums.

    The file has a temporary name beside ``path`` until it is whole and on the disk. If the block is
    left by an exception, or the machine stops, what ``path`` named before is untouched.

    Args:
        path: the file to make or replace.
        specs: dtype and shape of every tensor to come.
        metadata: strings for the header; ``checksums`` and ``header_sha256`` are added.

    Yields:
        ``write(name, tensor)``, to be called once for each name of ``specs``, in any order, on any
        thread.

    Raises:
        ValueError: a tensor that was not announced so, twice, or never; a dtype that the format
            lacks.
        OSError: the file cannot be written.
    """
    _, begins, size = _header(specs, metadata, {})
    missing = set(specs)
    sums: dict[str, str] = {}
    target = Path(os.path.realpath(path))  # replace what a link leads to, not the link
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    # The mode that open() gives a new file; tempfile's is private.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            with errors_name(target):
                file.truncate(size)

            def write(name: str, tensor: Tensor) -> None:
                if name not in missing:
                    raise ValueError(
                        f"tensor {name!r} was "
                        f"{'written before' if name in specs else 'not announced'}"
                    )
                if (tensor.dtype, tuple(tensor.shape)) != specs[name]:
                    raise ValueError(
                        f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; "
                        f"announced was {specs[name]}"
                    )
                missing.remove(name)
                # One after another, so that a GPU's tensor has one copy on the host at a time.
                data, digest = _bytes(tensor), hashlib.sha256()
                for first in range(0, len(data), _BYTES_AT_A_TIME):
                    part = data[first : first + _BYTES_AT_A_TIME]
                    digest.update(part)
                    with errors_name(target):
                        _write_all(file.fileno(), part, begins[name] + first)
                sums[name] = digest.hexdigest()

            yield write
            if missing:
                raise ValueError(
                    f"tensors announced and never written: {', '.join(sorted(missing))}"
                )
            with errors_name(target):
                _write_all(file.fileno(), _header(specs, metadata, sums)[0], 0)
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _bytes(tensor: Tensor) -> Any:
    """A tensor's data as a file has it, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(tensor: Tensor) -> str:
    """The sha256 of a tensor's data, as ``checksums`` has it."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _header(
    specs: Mapping[str, Spec], metadata: Mapping[str, str], sums: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """All before the data of a safetensors file, where each of its tensors begins, and the file's
    size.

    Tensors that ``sums`` lacks have zeros in ``checksums``: the length is the same.
    """
    # Largest power of two in the size first: then every tensor starts at a multiple of its
    # elements' size, without the holes that the format forbids.
    sizes = {name: spec_bytes(spec) for name, spec in specs.items()}
    begins: dict[str, int] = {}
    checksums = json.dumps({name: sums.get(name, _NO_SUM) for name in specs})
    header: dict[str, Any] = {
        "__metadata__": {**metadata, "checksums": checksums, "header_sha256": _NO_SUM}
    }
    end = 0
    for name in sorted(
        sizes, key=lambda name: sizes[name] & -sizes[name] or math.inf, reverse=True
    ):
        dtype, shape = specs[name]
        if dtype not in _TYPE_NAMES:
            raise ValueError(
                f"tensor {name!r} has dtype {dtype}; supported are "
                f"{', '.join(map(str, _TYPE_NAMES))}"
            )
        begins[name], end = end, end + sizes[name]
        header[name] = {
            "dtype": _TYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"the header takes {len(text)} bytes; safetensors allows {_MAX_HEADER_BYTES}"
        )
    start = 8 + len(text)
    head = len(text).to_bytes(8, "little") + text
    head = head.replace(_sum_field(_NO_SUM), _sum_field(hashlib.sha256(head).hexdigest()), 1)
    return head, {name: start + begin for name, begin in begins.items()}, start + end


def _sum_field(value: str) -> bytes:
    # Inside of JSON's strings quotes are escaped: this stands nowhere else.
    return f'"header_sha256":"{value}"'.encode()


def header_is_intact(path: Path) -> bool:
    """Whether the header of a file with checksums has its own."""
    recorded = read_header(path)[0].get("header_sha256", "")
    with path.open("rb") as file:
        length = file.read(8)
        head = length + file.read(int.from_bytes(length, "little"))
    return (
        hashlib.sha256(head.replace(_sum_field(recorded), _sum_field(_NO_SUM), 1)).hexdigest()
        == recorded
    )


def is_written(
    path: str | os.PathLike[str], specs: Mapping[str, Spec], metadata: Mapping[str, str]
) -> bool:
    """Whether :func:`stream_safetensors` has written a file of this header: it is whole if it is
    there.

    Its checksums may be any: the data are not read.
    """
    header, _, size = _header(specs, metadata, {})
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return False
            found = file.read(len(header))
    except FileNotFoundError:
        return False
    try:
        sums = json.loads(json.loads(found[8:])["__metadata__"]["checksums"])
        return isinstance(sums, dict) and found == _header(specs, metadata, sums)[0]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _write_all(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
