"""GGUF, the file format of llama.cpp, version 2 and 3.

Layout: "GGUF", u32 version, u64 tensors, u64 keys; the keys (name, u32 type, value); for each tensor its
name, u32 dimensions, u64 sizes (the fastest first, so K before N), u32 type, u64 offset; then, aligned, the
data. Little-endian.
Sources: docs/gguf.md and src/ggml-common.h of ggml-org/ggml, constants.py and quants.py of the ``gguf``
package.

=====  =====  =====  ==============================  =============================================
type   block  bytes  a block                         value, and as a QuantizedWeight in groups of 32
=====  =====  =====  ==============================  =============================================
Q4_0   32     18     fp16 d, 16 bytes                d (q - 8): symmetric, d may be negative
Q4_1   32     20     fp16 d, fp16 m, 16 bytes        d q + m: offset m + 8 d, in fp32
Q5_0   32     22     fp16 d, u32 of fifth bits,      d (q - 16): symmetric, code q + 112 of 8 bits
                     16 bytes
Q5_1   32     24     fp16 d, fp16 m, u32 of fifth    d q + m: offset m, code q + 128 of 8 bits
                     bits, 16 bytes
Q8_0   32     34     fp16 d, 32 int8                 d q: symmetric, code q + 128
Q4_K   256    144    fp16 d, fp16 dmin, 8 scales     (d sc) q - dmin mn: scale d sc and offset
                     sc and 8 minima mn of 6 bits    8 d sc - dmin mn, in fp32
                     in 12 bytes, 128 bytes
Q5_K   256    176    as Q4_K, 32 bytes of fifth      (d sc) q - dmin mn: scale d sc and offset
                     bits before the 128             -dmin mn, in fp32, code q + 128 of 8 bits
Q6_K   256    210    128 bytes of low halves, 64 of  (d sc) (q - 32), each sc for 16 weights: two of
                     high bits, 16 int8 sc, fp16 d   them share a group's scale, see ``_q6_k``
=====  =====  =====  ==============================  =============================================

Byte i of 16 holds element i in its low half and element i + 16 in its high half; of Q4_K's and Q5_K's 128,
each 32 hold two groups of 32 in that way.
All of that is exact, with two exceptions: the offsets of Q4_1 and Q4_K are rounded to fp32, once; and Q6_K is
rounded to codes of 8 bits, where its pairs of scales do not allow them exactly, by at most an eighth of its
own step.

The header is walked here, every count and offset against the file's size, and not by ``gguf.GGUFReader``,
which trusts them and makes several objects of each of a tokenizer's words: 4 s and 160 MB for a model of 135M
parameters whose header this file reads in a tenth of a second. The package gives the table of types and
dequantises.

Names: for the architectures of ``gguf_models.py`` tensors are renamed as ``transformers`` names them, and the
changes that llama.cpp's converter made to their values are undone; other names stay as they are. The converter
permutes the rows of llama's attn_q and attn_k (its rope takes neighbours, Hugging Face's takes halves) and of
bloom's attn_qkv; that is undone on codes, scales and offsets alike, so nothing is rounded. It adds 1 to gemma's
norms, which are plain tensors.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..weight import CheckpointError, QuantizedWeight
from .checkpoint import Checkpoint, Entry, Quantized, read_weight
from .gguf_models import ARCHITECTURES, MAX_ROPE_FACTORS, Architecture, ConfigError, model_config, rope_tensors
from .words import unpack_bytes

if TYPE_CHECKING:
    import gguf

_GROUP = 32
#: Bytes of blocks that are converted at a time: few enough for the cache, and so many that readers side by side seldom wait
#: for Python's lock.
_PIECE = 1 << 21
_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_MAX_DIMENSIONS = 4

_Bytes: TypeAlias = "npt.NDArray[np.uint8]"
_Array: TypeAlias = "npt.NDArray[Any]"

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


def recognise(path: Path) -> bool:
    """Whether the file starts as GGUF does, or says by its name that it would be one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def read(path: Path) -> Checkpoint:
    """Check the whole header and list the tensors.

    Raises:
        CheckpointError: a header that is truncated, lies, or has a version that is not known.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            raise CheckpointError(path, "the file is empty")
        # A copy on write, as torch has no tensors that are read-only. Nothing writes.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    keys, tensors = _Header(path, data).read()
    name = str(keys.get("general.architecture", ""))
    architecture = ARCHITECTURES.get(name)
    try:
        config, config_problem = _model_config(data, tensors, name, keys), ""
    except ConfigError as error:
        config, config_problem = {}, str(error)
    # What the configuration says is no tensor of the model.
    skipped = rope_tensors(name) if config else ()
    found = [_entry(path, data, tensor, architecture, keys) for tensor in tensors if tensor.name not in skipped]
    if architecture is not None and all(tensor.name != "output.weight" for tensor in tensors):
        found = [_as_head(entry) if entry.source == "token_embd.weight" else entry for entry in found]
    entries: dict[str, Entry] = {}
    for entry in _with_biases(found):
        if entry.name in entries:
            other = entries[entry.name].source
            raise CheckpointError(path, f"has the same name as {other!r}: {entry.name!r}", entry.source)
        entries[entry.name] = entry
    return Checkpoint(
        path=path,
        dialect="gguf",
        files=(path,),
        entries=entries,
        metadata={k: str(v) for k, v in keys.items() if not k.startswith("tokenizer.") and len(str(v)) <= 200},
        config=config,
        config_problem=config_problem,
    )


def _model_config(data: mmap.mmap, tensors: list[_Info], architecture: str, keys: dict[str, Any]) -> dict[str, Any]:
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    kinds = {tensor.kind.name for tensor in tensors if len(tensor.shape) == 2}
    factors = {
        tensor.name: _tensor(_bytes(data, tensor)).view(torch.float32).tolist()
        for tensor in tensors
        if tensor.name in rope_tensors(architecture)
        and tensor.kind.name == "F32"
        and len(tensor.shape) == 1
        and tensor.shape[0] <= MAX_ROPE_FACTORS
    }
    return model_config(architecture, keys, shapes, kinds, factors)


# ---- the header


@dataclass(frozen=True)
class _Info:
    """A tensor as the header describes it, checked: ``shape`` as torch has it, ``start`` in the file."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _Header:
    """A walk over the header. Every step is checked against the end of the file, so a lie costs no memory."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def number(self, form: str, what: str) -> Any:
        size = struct.calcsize(form)
        if size > len(self.data) - self.at:
            raise CheckpointError(self.path, f"the file ends at byte {len(self.data)}, inside {what}")
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return value

    def skip(self, size: int, what: str) -> int:
        """Go ``size`` bytes on; the position before."""
        if size > len(self.data) - self.at:
            raise CheckpointError(self.path, f"{what} takes {size} bytes, of which the file has {len(self.data) - self.at}")
        before = self.at
        self.at += size
        return before

    def text(self, what: str) -> str:
        size = self.number("<Q", what)
        start = self.skip(size, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(self.path, f"{what} is not UTF-8: {error}") from error

    def value(self, kind: int, what: str) -> Any:
        """The value of a key; of an array only "N values", for a tokenizer's has a hundred thousand."""
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
            raise CheckpointError(self.path, f"{what} is an array of type {item}; arrays of numbers and strings are known")
        return f"{count} values"

    def skip_texts(self, count: int, what: str) -> None:
        # Every string takes 8 bytes at least, so a count that fits bounds the loop.
        if count > (len(self.data) - self.at) // 8:
            raise CheckpointError(self.path, f"{what} has {count} strings, more than the rest of the file can hold")
        at, end, size = self.at, len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise CheckpointError(self.path, f"the file ends at byte {end}, inside {what}")
            at += 8 + size(self.data, at)[0]
        if at > end:
            raise CheckpointError(self.path, f"the file ends at byte {end}, inside {what}")
        self.at = at

    def read(self) -> tuple[dict[str, Any], list[_Info]]:
        import gguf

        if self.data[:4] != b"GGUF":
            raise CheckpointError(self.path, f"starts with {self.data[:4]!r}; a GGUF file starts with b'GGUF'")
        self.at = 4
        version = self.number("<I", "the version")
        if version not in (2, 3):
            swapped = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(self.path, f"GGUF version {version}{swapped}; versions 2 and 3, little-endian, are known")
        tensor_count = self.number("<Q", "the number of tensors")
        key_count = self.number("<Q", "the number of keys")
        # The shortest key takes 13 bytes and the shortest tensor 32: no list can outgrow the file.
        for count, size, what in ((key_count, 13, "keys"), (tensor_count, 32, "tensors")):
            if count * size > len(self.data):
                raise CheckpointError(self.path, f"claims {count} {what}, more than its {len(self.data)} bytes can hold")
        keys: dict[str, Any] = {}
        for index in range(key_count):
            name = self.text(f"the name of key {index}")
            if name in keys:
                raise CheckpointError(self.path, f"key {name!r} appears twice")
            keys[name] = self.value(self.number("<I", f"key {name!r}"), f"key {name!r}")
        alignment = keys.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(self.path, f"general.alignment is {alignment!r}; a power of two is expected")
        tensors: dict[str, _Info] = {}
        for index in range(tensor_count):
            info = self.tensor(index, alignment)
            if info.name in tensors:
                raise CheckpointError(self.path, "appears twice", info.name)
            tensors[info.name] = info
        return keys, list(self.placed(tensors, -(-self.at // alignment) * alignment))

    def tensor(self, index: int, alignment: int) -> _Info:
        """One tensor's description; ``start`` still counts from the beginning of the data."""
        import gguf

        name = self.text(f"the name of tensor {index}")
        what = f"the description of tensor {name!r}"
        dimensions = self.number("<I", what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(self.path, f"has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible", name)
        shape = tuple(reversed([self.number("<Q", what) for _ in range(dimensions)]))
        number = self.number("<I", what)
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(self.path, f"has type {number}, which this version of gguf does not know", name) from None
        offset = self.number("<Q", what)
        if offset % alignment:
            raise CheckpointError(self.path, f"starts at {offset}, which is no multiple of {alignment}", name)
        elements = 1
        for size in shape:
            elements *= size
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if elements == 0 or shape[-1] % block:
            raise CheckpointError(
                self.path,
                f"has shape {list(shape)}; {kind.name} needs rows of a multiple of {block}, none empty",
                name,
            )
        return _Info(name, kind, shape, offset, elements // block * block_bytes)

    def placed(self, tensors: dict[str, _Info], data_start: int) -> Iterator[_Info]:
        """The tensors with ``start`` in the file; all of them inside it, none over another."""
        end = len(self.data)
        previous: _Info | None = None
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


# ---- names


def _head_rows(
    path: Path, info: _Info, architecture: Architecture | None, keys: dict[str, Any]
) -> npt.NDArray[np.int64] | None:
    """The file's row at each row of the Hugging Face weight, where llama.cpp's converter permuted them; else None.

    ``permute`` in convert_hf_to_gguf.py reshapes rows of llama's attn_q and attn_k to [heads, 2, d, ...] and swaps
    the middle axes; bloom's attn_qkv goes from [heads, 3, d, ...] to [3, heads, d, ...].
    """
    match = re.fullmatch(r"blk\.\d+\.(attn_(?:q|k|qkv))\.(weight|bias)", info.name, re.ASCII)
    if architecture is None or match is None or match[1] not in architecture.permuted:
        return None
    prefix = f"{keys.get('general.architecture')}.attention"
    heads = keys.get(f"{prefix}.head_count")
    if match[1] == "attn_k":
        heads = keys.get(f"{prefix}.head_count_kv", heads)
    rows = info.shape[0]
    parts = 3 if match[1] == "attn_qkv" else 2
    if type(heads) is not int or heads < 1 or rows % (parts * heads):
        raise CheckpointError(
            path,
            f"its {rows} rows cannot be put back in order: the file gives {heads!r} heads of attention",
            info.name,
        )
    shape = (parts, heads, -1) if parts == 3 else (heads, -1, parts)
    axes = (0, 1) if parts == 3 else (1, 2)
    order: npt.NDArray[np.int64] = np.arange(rows).reshape(shape).swapaxes(*axes).reshape(rows)
    return order


def _as_head(embedding: Entry) -> Entry:
    """A tied word embedding: packed as the output head if it is quantised, left alone otherwise."""
    if embedding.quantized is None and not embedding.problem:
        return embedding
    return replace(embedding, name="lm_head", tied_to=embedding.name)


def _with_biases(entries: list[Entry]) -> list[Entry]:
    """Give a quantised weight the bias that stands beside it in the file."""
    by_source = {entry.source: entry for entry in entries}
    taken = set()
    result = []
    for entry in entries:
        bias = by_source.get(entry.source.removesuffix(".weight") + ".bias")
        if (
            entry.quantized is not None
            and bias is not None
            and bias.kind in ("F32", "F16", "BF16")
            and bias.shape == entry.shape[:1]
        ):
            taken.add(bias.source)
            quantized = replace(
                entry.quantized,
                dtypes={**entry.quantized.dtypes, "bias": bias.dtype},
                read=partial(_read_with_bias, entry.quantized, bias),
            )
            entry = replace(entry, quantized=quantized)
        result.append(entry)
    return [entry for entry in result if entry.source not in taken]


def _read_with_bias(weight: Quantized, bias: Entry) -> QuantizedWeight:
    return replace(weight.read(), bias=bias.values())


# ---- the data


def _entry(path: Path, data: mmap.mmap, info: _Info, architecture: Architecture | None, keys: dict[str, Any]) -> Entry:
    name = info.name if architecture is None else architecture.rename(info.name) or info.name
    rows = _head_rows(path, info, architecture, keys)
    kind = info.kind.name
    entry = Entry(
        name=name,
        source=info.name,
        kind=kind,
        shape=info.shape,
        nbytes=info.nbytes,
        dtype=_PLAIN.get(kind, torch.float32),
        values=partial(_values, path, data, info, rows),
    )
    if kind in _PLAIN:
        return entry if architecture is None else _undone(entry, architecture)
    entry = replace(entry, name=name.removesuffix(".weight"))
    if kind not in _KINDS:
        return replace(entry, problem=f"has type {kind}; of the quantised types, {', '.join(_KINDS)} are supported")
    if len(info.shape) != 2:
        return replace(entry, problem=f"has shape {list(info.shape)}; a quantised weight has two dimensions")
    into = _KINDS[kind]
    dtypes = {"scales": into.scales} | ({} if into.offsets is None else {"offsets": into.offsets})
    read = partial(_weight, path, data, info, rows)
    return replace(entry, quantized=Quantized(bits=into.bits, group_size=_GROUP, dtypes=dtypes, read=read))


def _undone(entry: Entry, architecture: Architecture) -> Entry:
    """A plain tensor with what llama.cpp's converter did to its values or shape undone."""
    read = entry.values
    if architecture.norms_plus_one and entry.source.endswith("norm.weight"):
        return replace(entry, dtype=torch.float32, values=lambda: read().float() - 1)
    if entry.source.endswith(architecture.squeezed) and len(entry.shape) == 2:
        return replace(entry, shape=(entry.shape[0], 1, entry.shape[1]), values=lambda: read().unsqueeze(1))
    return entry


def _bytes(data: mmap.mmap, info: _Info) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8, info.nbytes, info.start)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """A tensor of its own memory, which starts where torch's tensors do."""
    return torch.from_numpy(np.array(array, order="C"))


def _weight(path: Path, data: mmap.mmap, info: _Info, rows: npt.NDArray[np.int64] | None) -> QuantizedWeight:
    import gguf

    n, k = info.shape
    kind = _KINDS[info.kind.name]
    size, nbytes = gguf.GGML_QUANT_SIZES[info.kind]
    raw = _bytes(data, info).reshape(n, -1)
    if rows is not None:
        raw = raw[rows]
    blocks = raw.reshape(-1, nbytes)
    start, stop, run = kind.halves
    if run:
        codes = unpack_bytes(torch.from_numpy(blocks)[:, start:stop], run, in_turn=False, high_first=False)
    else:
        codes = torch.empty(len(blocks), size, dtype=torch.uint8)
    groups = (len(blocks), size // _GROUP)
    scales = torch.empty(groups, dtype=kind.scales)
    offsets = None if kind.offsets is None else torch.empty(groups, dtype=kind.offsets)
    step = max(1, _PIECE // nbytes)
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        with np.errstate(all="ignore"):  # read_weight refuses scales and offsets that are not finite
            kind.convert(
                blocks[part],
                codes[part].numpy(),
                scales[part].numpy(),
                np.empty(0) if offsets is None else offsets[part].numpy(),
            )
    return read_weight(
        path,
        info.name,
        lambda: QuantizedWeight(
            codes.view(n, k),
            scales.view(n, -1),
            offsets=None if offsets is None else offsets.view(n, -1),
            bits=kind.bits,
            group_size=_GROUP,
        ),
    )


# Each of these turns blocks [B, bytes] into codes [B, elements] and, one for each 32 elements, scales and
# offsets [B, elements / 32], which it is given to fill. In codes it finds what ``_Kind.halves`` speaks of.


def _q4_0(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)


def _q4_1(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)
    offsets[:] = _number(blocks, 2).astype(np.float32) + np.float32(8) * scales.astype(np.float32)


def _q5_0(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)
    codes += _fifth_bits(blocks[:, 2:6]) + np.uint8(112)


def _q5_1(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)
    offsets[:] = _number(blocks, 2)
    codes += _fifth_bits(blocks[:, 4:8]) + np.uint8(128)


def _q8_0(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    scales[:] = _number(blocks, 0)
    run = np.dtype((np.void, 32))
    codes.view(run)[:] = blocks[:, 2:].view(run)
    codes ^= np.uint8(0x80)


def _q4_k(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    _k_scales(blocks, scales, offsets)
    offsets += np.float32(8) * scales


def _q5_k(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    _k_scales(blocks, scales, offsets)
    run = np.dtype((np.void, 32))
    packed = blocks[:, 16:48].view(run).copy().view(np.uint8)
    fifth = np.empty_like(codes)
    for group in range(8):  # bit g of byte i belongs to element i of group g
        fifth.view(run)[:, group : group + 1] = ((packed >> np.uint8(group) & np.uint8(1)) << np.uint8(4)).view(run)
    codes += fifth
    codes += np.uint8(128)


def _k_scales(blocks: _Bytes, scales: _Array, minima: _Array) -> None:
    """Q4_K's and Q5_K's d sc and -dmin mn, both exact in fp32: 11 bits times 6.

    Bytes 0 .. 3 of the 12 hold sc of groups 0 .. 3 in their low six bits, bytes 4 .. 7 mn in theirs, and bytes
    8 .. 11 the low four bits of sc and mn of groups 4 .. 7, whose high two are those of the first eight bytes.
    """
    low, middle, high = blocks[:, 4:16].view(np.dtype((np.void, 12))).copy().view(np.uint32).T
    six, four, two = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    both = np.empty((2, len(blocks), 2), np.uint32)
    both[0, :, 0], both[0, :, 1] = low & six, high & four | low >> np.uint32(2) & two
    both[1, :, 0], both[1, :, 1] = middle & six, high >> np.uint32(4) & four | middle >> np.uint32(2) & two
    d, dmin = (np.repeat(_number(blocks, start).astype(np.float32), 8, axis=1) for start in (0, 2))
    np.multiply(both[0].view(np.uint8), d, out=scales)
    np.multiply(both[1].view(np.uint8), -dmin, out=minima)


def _q6_k(blocks: _Bytes, codes: _Bytes, scales: _Array, offsets: _Array) -> None:
    """Two scales d sc and d sc', of 16 weights each, become one.

    With g their greatest common divisor, the group's scale is d g and codes are (q - 32) sc / g + 128: exact, if
    that fits into 8 bits for every q. If not, with m the larger of abs(sc) and abs(sc'), it is d m 32/127 and
    codes are rint((q - 32) (sc / m 127/32)) + 128, each step in fp32.
    """
    of_16 = blocks[:, 192:208].view(np.dtype((np.void, 16))).copy().view(np.int8).astype(np.int16)
    first, second = of_16[:, ::2], of_16[:, 1::2]
    divisor = np.maximum(np.gcd(first, second), 1)
    most = np.maximum(np.abs(first), np.abs(second)).astype(np.float32)
    # q - 32 is -32 .. 31, and -128 .. 127 are there for (q - 32) sc / g.
    exact = (most <= 4 * divisor) & (np.minimum(first, second) >= -3 * divisor)
    np.multiply(np.where(exact, divisor, most * np.float32(32 / 127)), _number(blocks, 208), out=scales)
    unit = np.where(exact, divisor, np.maximum(most, 1)).astype(np.float32)
    factors = of_16 / np.repeat(unit, 2, axis=1)
    factors *= np.repeat(np.where(exact, np.float32(1), np.float32(127 / 32)), 2, axis=1)
    ratio = np.repeat(factors, 16, axis=1)

    run = np.dtype((np.void, 32))
    packed = blocks[:, 128:192].view(np.dtype((np.void, 64))).copy().view(np.uint8)
    high = np.empty_like(codes)
    for quarter in range(4):  # of each 128 elements, whose high bits are 32 bytes
        bits = (packed >> np.uint8(2 * quarter) & np.uint8(3)) << np.uint8(4)
        high.view(run)[:, quarter::4] = bits.view(run)
    codes += high
    codes -= np.uint8(32)
    values = np.multiply(codes.view(np.int8), ratio, out=ratio)
    np.copyto(codes.view(np.int8), np.rint(values, out=values), casting="unsafe")
    codes ^= np.uint8(0x80)


def _number(blocks: _Bytes, start: int) -> npt.NDArray[np.float16]:
    """The fp16 number at byte ``start`` of each block, ``[B, 1]``."""
    numbers: npt.NDArray[np.float16] = blocks[:, start : start + 2].view("<f2").copy()
    return numbers


def _fifth_bits(packed: _Bytes) -> _Bytes:
    """Bits of ``[B, 4]`` bytes, the low ones first, as 0 or 16: ``[B, 32]``."""
    run = np.dtype((np.void, 4))
    bits: _Bytes = np.unpackbits(packed.view(run).copy().view(np.uint8), axis=1, bitorder="little")
    bits <<= np.uint8(4)
    return bits


@dataclass(frozen=True)
class _Kind:
    """What a type of blocks becomes.

    Attributes:
        bits: of the codes.
        scales, offsets: their dtypes.
        halves: first byte, end and run: bytes of a block of which each has the low four bits of two codes, ``run`` low
            halves before ``run`` high ones; (0, 0, 0) if it has none.
        convert: does the rest.
    """

    bits: int
    scales: torch.dtype
    offsets: torch.dtype | None
    halves: tuple[int, int, int]
    convert: Callable[[_Bytes, _Bytes, _Array, _Array], None]


_KINDS = {
    "Q4_0": _Kind(4, torch.float16, None, (2, 18, 16), _q4_0),
    "Q4_1": _Kind(4, torch.float16, torch.float32, (4, 20, 16), _q4_1),
    "Q5_0": _Kind(8, torch.float16, None, (6, 22, 16), _q5_0),
    "Q5_1": _Kind(8, torch.float16, torch.float16, (8, 24, 16), _q5_1),
    "Q8_0": _Kind(8, torch.float16, None, (0, 0, 0), _q8_0),
    "Q4_K": _Kind(4, torch.float32, torch.float32, (16, 144, 32), _q4_k),
    "Q5_K": _Kind(8, torch.float32, torch.float32, (48, 176, 32), _q5_k),
    "Q6_K": _Kind(8, torch.float32, None, (0, 128, 64), _q6_k),
}


def _values(path: Path, data: mmap.mmap, info: _Info, rows: npt.NDArray[np.int64] | None) -> Tensor:
    import gguf

    raw = _bytes(data, info)
    if (dtype := _PLAIN.get(info.kind.name)) is not None:
        values = _tensor(raw).view(dtype).view(info.shape)
    else:
        try:
            # As above.
            with np.errstate(all="ignore"):
                values = _tensor(gguf.dequantize(raw.reshape(*info.shape[:-1], -1), info.kind))
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(path, f"type {info.kind.name} cannot be dequantised: {error}", info.name) from error
        values = values.view(info.shape)
    return values if rows is None else values[torch.from_numpy(rows)]
