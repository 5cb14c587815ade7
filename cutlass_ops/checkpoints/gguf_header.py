"""The header of a GGUF file, checked.

Layout: "GGUF", u32 version, u64 tensors, u64 keys; the keys (name, u32 type, value); for each
tensor its name, u32 dimensions, u64 sizes (the fastest first, so K before N), u32 type, u64 offset;
then, aligned, the data. Little-endian.
Source: docs/gguf.md of ggml-org/ggml.

The header is walked here, every count and offset against the file's size, and not by
``gguf.GGUFReader``, which trusts them and makes several objects of each of a tokenizer's words: 4 s
and 160 MB for a model of 135M parameters whose header this file reads in a tenth of a second. The
package gives the table of types and dequantises.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..weights.weight import CheckpointError

if TYPE_CHECKING:
    import gguf

#: The key that says whether a tokenizer begins a text with the token bos.
ADDS_BOS = "tokenizer.ggml.add_bos_token"
_MAX_DIMENSIONS = 4
_MAX_COUNT = 500_000  # of tensors and keys: more than any model has

#: Values of keys by type id: format of ``struct``. 8 is a string and 9 an array.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

_STRING, _ARRAY = 8, 9


def read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Keys and tensors of a file.

    Raises:
        CheckpointError: a header that is truncated, inconsistent, or of an unknown version.
    """
    return _Header(path, data).read()


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the checked header describes it; ``start`` is its place in the file."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _Header:
    """A reader that checks every size against the end of the file before it uses it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def number(self, form: str, what: str) -> Any:
        size = struct.calcsize(form)
        if size > len(self.data) - self.position:
            raise CheckpointError(
                self.path, f"the file ends at byte {len(self.data)}, inside {what}"
            )
        (value,) = struct.unpack_from(form, self.data, self.position)
        self.position += size
        return value

    def skip(self, size: int, what: str) -> int:
        """Advance by ``size`` bytes; returns the position before."""
        if size > len(self.data) - self.position:
            raise CheckpointError(
                self.path,
                f"{what} takes {size} bytes, of which the file has "
                f"{len(self.data) - self.position}",
            )
        before = self.position
        self.position += size
        return before

    def text(self, what: str) -> str:
        size = self.number("<Q", what)
        start = self.skip(size, what)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(self.path, f"{what} is not UTF-8: {error}") from error

    def value(self, kind: int, what: str) -> Any:
        """The value of a key; of an array only "N values", as tokenizers have long ones."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise CheckpointError(self.path, f"{what} has type {kind}; types 0 to 12 are known")
        item, count = self.number("<I", what), self.number("<Q", what)
        if item in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[item]), what)
        elif item == _STRING:
            self.skip_texts(count, what)
        else:
            raise CheckpointError(
                self.path,
                f"{what} is an array of type {item}; arrays of numbers and strings are known",
            )
        return f"{count} values"

    def skip_texts(self, count: int, what: str) -> None:
        # Every string takes 8 bytes at least, so a count that fits bounds the loop.
        if count > (len(self.data) - self.position) // 8:
            raise CheckpointError(
                self.path, f"{what} has {count} strings, more than the rest of the file can hold"
            )
        position, end, size = self.position, len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > end:
                raise CheckpointError(self.path, f"the file ends at byte {end}, inside {what}")
            position += 8 + size(self.data, position)[0]
        if position > end:
            raise CheckpointError(self.path, f"the file ends at byte {end}, inside {what}")
        self.position = position

    def read(self) -> tuple[dict[str, Any], list[TensorInfo]]:
        import gguf

        if self.data[:4] != b"GGUF":
            raise CheckpointError(
                self.path, f"starts with {self.data[:4]!r}; a GGUF file starts with b'GGUF'"
            )
        self.position = 4
        version = self.number("<I", "the version")
        if version not in (2, 3):
            swapped = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(
                self.path,
                f"GGUF version {version}{swapped}; versions 2 and 3, little-endian, are known",
            )
        tensor_count = self.number("<Q", "the number of tensors")
        key_count = self.number("<Q", "the number of keys")
        # The shortest key takes 13 bytes and the shortest tensor 32: no list can outgrow the file.
        for count, size, what in ((key_count, 13, "keys"), (tensor_count, 32, "tensors")):
            if count * size > len(self.data):
                raise CheckpointError(
                    self.path,
                    f"claims {count} {what}, more than its {len(self.data)} bytes can hold",
                )
            if count > _MAX_COUNT:
                raise CheckpointError(
                    self.path, f"has {count} {what}; at most {_MAX_COUNT} are read"
                )
        keys: dict[str, Any] = {}
        for index in range(key_count):
            name = self.text(f"the name of key {index}")
            if name in keys:
                raise CheckpointError(self.path, f"key {name!r} appears twice")
            keys[name] = self.value(self.number("<I", f"key {name!r}"), f"key {name!r}")
        alignment = keys.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                self.path, f"general.alignment is {alignment!r}; a power of two is expected"
            )
        tensors: dict[str, TensorInfo] = {}
        for index in range(tensor_count):
            info = self.tensor(index, alignment)
            if info.name in tensors:
                raise CheckpointError(self.path, "appears twice", info.name)
            tensors[info.name] = info
        return keys, list(self.placed(tensors, -(-self.position // alignment) * alignment))

    def tensor(self, index: int, alignment: int) -> TensorInfo:
        """One tensor's description; ``start`` still counts from the beginning of the data."""
        import gguf

        name = self.text(f"the name of tensor {index}")
        what = f"the description of tensor {name!r}"
        dimensions = self.number("<I", what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(
                self.path, f"has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible", name
            )
        shape = tuple(reversed([self.number("<Q", what) for _ in range(dimensions)]))
        number = self.number("<I", what)
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(
                self.path, f"has type {number}, which this version of gguf does not know", name
            ) from None
        offset = self.number("<Q", what)
        if offset % alignment:
            raise CheckpointError(
                self.path, f"starts at {offset}, which is no multiple of {alignment}", name
            )
        elements = 1
        for size in shape:
            elements *= size
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if elements == 0 or shape[-1] % block:
            raise CheckpointError(
                self.path,
                f"has shape {list(shape)}; {kind.name} needs rows of a multiple of "
                f"{block}, none empty",
                name,
            )
        return TensorInfo(name, kind, shape, offset, elements // block * block_bytes)

    def placed(self, tensors: dict[str, TensorInfo], data_start: int) -> Iterator[TensorInfo]:
        """The tensors with ``start`` in the file; all of them inside it, none over another."""
        end = len(self.data)
        previous: TensorInfo | None = None
        for info in sorted(tensors.values(), key=lambda info: info.start):
            if info.start + info.nbytes > end - data_start:
                raise CheckpointError(
                    self.path,
                    f"{info.kind.name} {list(info.shape)} takes {info.nbytes} bytes from "
                    f"{data_start + info.start}; the file ends at {end}",
                    info.name,
                )
            if previous is not None and info.start < previous.start + previous.nbytes:
                raise CheckpointError(self.path, f"overlaps tensor {previous.name!r}", info.name)
            previous = info
        return (replace(info, start=data_start + info.start) for info in tensors.values())
