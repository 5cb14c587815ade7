"""Quantised weights to packed ones, and the files that hold those: write, read, verify.

A packed file is safetensors. Weight ``w`` is kept as ``w.codes``, ``w.scales`` and whichever of ``w.zeros``,
``w.offsets``, ``w.bias``, ``w.perm`` and ``w.book`` it has, shaped as in :class:`cutlass_ops.PackedWeight`; every other
tensor stands under its own name.
``__metadata__`` (all of it strings):

==================  ======================================================================================
``format``          "pt", as other tools expect
``layout``          "cutlass_ops.slab64"
``layout_version``  "1"
``weights``         JSON: ``{name: {"n": N, "k": K, "bits": 4 or 8, "group_size": g}}``
``tied``            JSON: ``{name: other}``: weight ``name`` is also module ``other``'s, not stored again
``sources``         JSON: ``{file name: sha256}`` of the checkpoint's files
``tool``            "cutlass_ops <version>"
==================  ======================================================================================

A tied word embedding that its checkpoint quantised is packed once, as ``lm_head``, with ``tied`` naming
``model.embed_tokens``; a loader dequantises it for the table. A quantised weight that the user leaves out
(``--exclude``) is stored as a tensor of the fp32 values that its file gives it, a tied embedding then as
``model.embed_tokens.weight``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import reprlib
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import formats, reference
from .checkpoints import Checkpoint, Entry, Quantized
from .checkpoints.directory import TYPES, opened
from .quantize import quantize
from .weight import PARTS, CheckpointError, PackedWeight, QuantizedWeight, group_vector_rows

#: dtype and shape of a tensor that is not there yet.
Spec: TypeAlias = "tuple[torch.dtype, tuple[int, ...]]"
#: Called with a tensor's name and the bytes of the source that are done with it.
Progress: TypeAlias = "Callable[[str, int], None]"

_TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_PACKED_DTYPES = {"zeros": torch.int8, "perm": torch.int32}
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000  # above it, the safetensors library refuses a file

#: Float matrices that are no linear layers, or that suffer most from few bits, by a part of their name.
DEFAULT_EXCLUDE = r"(^|\.)(lm_head|wte|wpe|shared|ln_[^.]*|[^.]*norm[^.]*|[^.]*embed[^.]*|[^.]*_embd)(\.|$)|^output(\.|$)"


# ---- one weight


def _one_below_another(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight with the rows of all."""
    for i, weight in enumerate(weights):
        if not isinstance(weight, QuantizedWeight):
            raise TypeError(f"weights[{i}] is a {type(weight).__name__}; a QuantizedWeight is expected")
    if not weights:
        raise ValueError("no weight is given; at least one is expected")
    first = weights[0]
    whole: dict[str, Any] = {}
    # Tensors last: weights with other groups are to be told so, rather than that their scales have another shape.
    for name in sorted((f.name for f in fields(first)), key=lambda name: isinstance(getattr(first, name), Tensor)):
        parts = [getattr(weight, name) for weight in weights]
        if name == "bias" and any(part is not None for part in parts):
            dtype = next(part.dtype for part in parts if part is not None)
            parts = [w.scales.new_full((w.n,), -0.0, dtype=dtype) if w.bias is None else w.bias for w in weights]
        for i, (weight, part) in enumerate(zip(weights, parts, strict=True)):
            if _shared(part) != _shared(parts[0]):
                raise ValueError(
                    f"weights[{i}] ({list(weight.shape)}) and weights[0] ({list(first.shape)}) cannot be packed as one: "
                    f"{name} is {_shared(part)} and {_shared(parts[0])}"
                )
            if name == "perm" and part is not None and not torch.equal(part.long(), parts[0].long()):
                raise ValueError(f"weights[{i}] and weights[0] cannot be packed as one: their act orders (perm) differ")
            if name == "book" and part is not None and not torch.equal(part, parts[0]):
                raise ValueError(f"weights[{i}] and weights[0] cannot be packed as one: their code books differ")
        if isinstance(parts[0], Tensor) and name not in ("perm", "book"):
            whole[name] = torch.cat(parts)
    return replace(first, **whole)


def _shared(part: Any) -> Any:
    """What must be the same of a field of weights that are packed as one: of a tensor all but its rows and values."""
    if not isinstance(part, Tensor):
        return part
    columns = f" of {part.shape[1]} columns" if part.dim() == 2 else ""
    return f"{str(part.dtype).removeprefix('torch.')}{columns} on {part.device}"


def reorder(weight: QuantizedWeight | Sequence[QuantizedWeight]) -> PackedWeight:
    """Put a weight into the order in which the kernels read it.

    ``reorder(w).unpack()`` is w again, bit for bit. The host's cores do it, wherever the weight is.

    Weights that multiply the same x (query, key and value; gate and up) may be given as a sequence: they are packed as
    one, their rows one after another, so that one launch serves all. The products part by plain slicing,

        q, k, v = mixed_gemm(x, reorder([wq, wk, wv])).split([wq.n, wk.n, wv.n], dim=-1)

    Args:
        weight: any quantised weight ``[N, K]``, or several with the same K, device, format (bits, group size, zero points
            or offsets or neither, code book), act order, and dtypes of scales, offsets and biases. Where only some have a
            bias, the others get one of -0.0, which changes no sum.

    Returns:
        The packed weight, on the same device; N is the sum of the parts'. The bias of a single weight is its own tensor.

    Raises:
        TypeError: not QuantizedWeights.
        ValueError: none, or weights that differ in what they must share; the message says in what.
    """
    from . import _C

    if isinstance(weight, Sequence):
        weight = _one_below_another(weight)
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; a QuantizedWeight, or several in a sequence, is expected")
    n, k, bits, device = weight.n, weight.k, weight.bits, weight.device
    codes = weight.codes.cpu().contiguous()
    packed = torch.empty(_C.packed_bytes(n, k, bits), dtype=torch.uint8)
    _C.pack(codes.data_ptr(), packed.data_ptr(), n, k, bits)
    n_pad = formats.padded_rows(n)
    position = torch.argsort(group_vector_rows(n_pad))[:n].to(device)

    def vector(rows: Tensor) -> Tensor:
        out = rows.new_zeros(formats.padded_groups(k, weight.group_size), n_pad)
        out[: rows.shape[1], position] = rows.t()
        return out

    zeros = None
    if weight.zeros is not None:
        zeros = vector((weight.zeros.to(torch.int16) - formats.midpoint(bits)).to(torch.int8))
    return PackedWeight(
        codes=packed.to(device),
        scales=vector(weight.scales),
        zeros=zeros,
        offsets=None if weight.offsets is None else vector(weight.offsets),
        bias=None if weight.bias is None else weight.bias.contiguous(),
        perm=None if weight.perm is None else weight.perm.to(torch.int32).contiguous(),
        book=None if weight.book is None else weight.book.contiguous(),
        n=n,
        k=k,
        bits=bits,
        group_size=weight.group_size,
    )


# ---- writing


@contextmanager
def stream_safetensors(
    path: str | os.PathLike[str], specs: Mapping[str, Spec], metadata: Mapping[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a safetensors file tensor by tensor, holding none of them.

    The file has a temporary name beside ``path`` until it is whole and on the disk. If the block is left by
    an exception, or the machine stops, what ``path`` named before is untouched.

    Args:
        path: the file to make or replace.
        specs: dtype and shape of every tensor to come.
        metadata: strings for the header.

    Yields:
        ``write(name, tensor)``, to be called once for each name of ``specs``, in any order.

    Raises:
        ValueError: a tensor that was not announced so, twice, or never; a dtype that the format lacks.
        OSError: the file cannot be written.
    """
    # Largest power of two in the size first: then every tensor starts at a multiple of its own elements'
    # size, without the holes that the format forbids.
    sizes = {name: _nbytes(spec) for name, spec in specs.items()}
    begins: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(sizes, key=lambda name: sizes[name] & -sizes[name] or math.inf, reverse=True):
        dtype, shape = specs[name]
        if dtype not in _TYPE_NAMES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}; supported are {', '.join(map(str, _TYPE_NAMES))}")
        begins[name], end = end, end + sizes[name]
        header[name] = {
            "dtype": _TYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"the header takes {len(text)} bytes; safetensors allows {_MAX_HEADER_BYTES}")
    missing = set(specs)
    target = Path(os.path.realpath(path))  # replace what a link leads to, not the link
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    # The mode that open() gives a new file; tempfile's is private.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            _write_all(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
            file.truncate(8 + len(text) + end)

            def write(name: str, tensor: Tensor) -> None:
                if name not in missing:
                    raise ValueError(f"tensor {name!r} was {'written before' if name in specs else 'not announced'}")
                if (tensor.dtype, tuple(tensor.shape)) != specs[name]:
                    raise ValueError(f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; announced was {specs[name]}")
                missing.remove(name)
                # One after another, so that a GPU's tensor has one copy on the host at a time.
                values = tensor.detach().cpu().contiguous().reshape(-1)
                _write_all(file.fileno(), values.view(torch.uint8).numpy(), 8 + len(text) + begins[name])

            yield write
            if missing:
                raise ValueError(f"tensors announced and never written: {', '.join(sorted(missing))}")
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


def _write_all(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _nbytes(spec: Spec) -> int:
    dtype, shape = spec
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def _packed_specs(n: int, k: int, bits: int, group_size: int, dtypes: Mapping[str, torch.dtype]) -> dict[str, Spec]:
    """What :func:`reorder` will return for a weight with tensors of these dtypes."""
    n_pad = formats.padded_rows(n)
    vector = (formats.padded_groups(k, group_size), n_pad)
    shapes: dict[str, tuple[int, ...]] = {
        "scales": vector,
        "zeros": vector,
        "offsets": vector,
        "bias": (n,),
        "perm": (k,),
        "book": (16,),
    }
    shapes["codes"] = (n_pad * formats.padded_k(k) * bits // 8,)
    return {part: (dtype, shapes[part]) for part, dtype in {"codes": torch.uint8, **dtypes}.items()}


def _metadata(
    weights: Mapping[str, tuple[int, int, int, int]], tied: Mapping[str, str], sources: Mapping[str, str]
) -> dict[str, str]:
    from . import __version__

    fields = ("n", "k", "bits", "group_size")
    return {
        "format": "pt",
        "layout": formats.LAYOUT_NAME,
        "layout_version": str(formats.LAYOUT_VERSION),
        "weights": json.dumps({name: dict(zip(fields, values, strict=True)) for name, values in weights.items()}),
        "tied": json.dumps(dict(tied)),
        "sources": json.dumps(dict(sources)),
        "tool": f"cutlass_ops {__version__}",
    }


def save_packed(
    path: str | os.PathLike[str],
    tensors: Mapping[str, PackedWeight | Tensor],
    *,
    tied: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
) -> None:
    """Write packed weights and other tensors into one file.

    A file of that name is replaced when the new one is complete.

    Args:
        path: the file, by custom ``*.safetensors``.
        tensors: by name, on any device.
        tied: ``{name: other}``: weight ``name`` is also that of module ``other``.
        sources: sha256 of the files they were made from.

    Raises:
        TypeError: a value that is neither a PackedWeight nor a Tensor.
        ValueError: names that clash in the file, or a tensor of a dtype that the format lacks.
        OSError: the file cannot be written.
    """
    parts: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, PackedWeight):
            named = {f"{name}.{part}": tensor for part, tensor in value.tensors().items()}
        elif isinstance(value, Tensor):
            named = {name: value}
        else:
            raise TypeError(f"{name!r} is a {type(value).__name__}; a PackedWeight or a torch.Tensor is expected")
        parts.update(named)
    packed = {name: value for name, value in tensors.items() if isinstance(value, PackedWeight)}
    _check_names(packed, [name for name in tensors if name not in packed])
    for name in tied or {}:
        if name not in packed:
            raise ValueError(f"tied names {name!r}, which is no weight of this file")
    weights = {name: (w.n, w.k, w.bits, w.group_size) for name, w in packed.items()}
    specs: dict[str, Spec] = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts.items()}
    with stream_safetensors(path, specs, _metadata(weights, tied or {}, sources or {})) as write:
        for name, tensor in parts.items():
            write(name, tensor)


def _check_names(weights: Collection[str], tensors: Iterable[str]) -> None:
    """Refuse a tensor that a reader would take for a part of a weight, or for another tensor."""
    taken = {"__metadata__", *(f"{weight}.{part}" for weight in weights for part in PARTS)}
    for name in tensors:
        if name in taken:
            raise ValueError(f"tensor {name!r} cannot keep its name: in the packed file it means something else")
        taken.add(name)


# ---- reading


@dataclass(frozen=True)
class PackedInfo:
    """What the header of a packed file says; checked against the file's size, its values not read.

    Attributes:
        weights: ``(n, k, bits, group_size)`` by name.
        parts: dtype and shape of a weight's tensors ("codes", "scales", ...), by name.
        tensors: dtype and shape of the other tensors, by name.
        layout: its name and version.
        tied, sources, tool: as in the module's table.
    """

    path: Path
    layout: tuple[str, str]
    weights: Mapping[str, tuple[int, int, int, int]]
    parts: Mapping[str, Mapping[str, Spec]]
    tensors: Mapping[str, Spec]
    tied: Mapping[str, str]
    sources: Mapping[str, str]
    tool: str


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Whether a file claims to be packed by this package, in whatever version."""
    path = Path(path)
    if not path.is_file() or path.suffix != ".safetensors":
        return False
    with opened(path) as file:
        return bool((file.metadata() or {}).get("layout", "").startswith("cutlass_ops."))


def packed_info(path: str | os.PathLike[str]) -> PackedInfo:
    """Read and check the header of a packed file.

    Raises:
        CheckpointError: not a packed file, one of another layout or version, or one whose header lies.
    """
    path = Path(path)
    with opened(path) as file:
        metadata = file.metadata() or {}
        specs = {}
        for name in file.offset_keys():
            part = file.get_slice(name)
            if part.get_dtype() not in TYPES:
                raise CheckpointError(path, f"has type {part.get_dtype()}; known are {', '.join(TYPES)}", name)
            specs[name] = (TYPES[part.get_dtype()], tuple(part.get_shape()))
    layout, version = metadata.get("layout"), metadata.get("layout_version")
    known = (formats.LAYOUT_NAME, str(formats.LAYOUT_VERSION))
    if layout is None:
        raise CheckpointError(path, "not a packed file: its metadata names no layout; cutlass-ops reorder makes one")
    if (layout, version) != known:
        raise CheckpointError(path, f"layout {layout!r}, version {version!r}; known is {known[0]!r}, version {known[1]!r}")
    weights = {name: _weight_fields(path, name, value) for name, value in _json_object(path, metadata, "weights").items()}
    parts: dict[str, dict[str, Spec]] = {}
    for name, (n, k, bits, group_size) in weights.items():
        found = {part: specs.pop(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in specs}
        for part in ("codes", "scales"):
            if part not in found:
                raise CheckpointError(path, f"is named by the metadata, but {name}.{part} is not in the file", name)
        expected = _packed_specs(n, k, bits, group_size, {part: dtype for part, (dtype, _) in found.items()})
        for part, (_, shape) in found.items():
            if shape != expected[part][1]:
                raise CheckpointError(
                    path,
                    f"has shape {list(shape)}; n={n}, k={k}, bits={bits}, group_size={group_size} make it "
                    f"{list(expected[part][1])}",
                    f"{name}.{part}",
                )
        parts[name] = found
    tied = _strings(path, metadata, "tied")
    for name in tied:
        if name not in weights:
            raise CheckpointError(path, f"the metadata ties {name!r}, which is no weight of this file")
    return PackedInfo(path, known, weights, parts, specs, tied, _strings(path, metadata, "sources"), metadata.get("tool", ""))


def _json_object(path: Path, metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        value = json.loads(metadata.get(key, "{}"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"metadata {key!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, f"metadata {key!r} is a JSON {type(value).__name__}; an object is expected")
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
            raise CheckpointError(path, f"metadata {key!r} has {reprlib.repr(text)} for {name!r}; a string is expected")
    return value


def _weight_fields(path: Path, name: str, value: Any) -> tuple[int, int, int, int]:
    fields = ("n", "k", "bits", "group_size")
    # type() and not isinstance(): True is no size.
    if not isinstance(value, dict) or any(type(value.get(key)) is not int for key in fields):
        raise CheckpointError(path, f"the metadata says {reprlib.repr(value)}; integers {', '.join(fields)} are expected", name)
    n, k, bits, group_size = (value[key] for key in fields)
    try:
        formats.check_bits(bits)
        formats.check_group_size(group_size)
    except ValueError as error:
        raise CheckpointError(path, str(error), name) from error
    if n < 1 or k < 1:
        raise CheckpointError(path, f"the metadata says n={n}, k={k}; both are at least 1", name)
    return n, k, bits, group_size


def load_packed(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, PackedWeight | Tensor]:
    """Read a packed file.

    On the CPU the tensors are windows of the file, read from the disk when they are first used; they stay
    valid if the file is replaced.

    Args:
        path: a file that :func:`save_packed` or ``cutlass-ops reorder`` wrote.
        device: where to put the tensors.

    Returns:
        Weights and other tensors by name.

    Raises:
        CheckpointError: not a packed file, one of another layout or version, or one that lies.
    """
    info = packed_info(path)
    result: dict[str, PackedWeight | Tensor] = {}
    with opened(info.path) as file:
        for name in info.weights:
            result[name] = _read_weight(info, name, file).to(device)
        for name in info.tensors:
            result[name] = file.get_tensor(name).to(device)
    return result


def _read_weight(info: PackedInfo, name: str, file: Any) -> PackedWeight:
    n, k, bits, group_size = info.weights[name]
    parts: dict[str, Any] = {part: file.get_tensor(f"{name}.{part}") if part in info.parts[name] else None for part in PARTS}
    perm = parts["perm"]
    try:
        weight = PackedWeight(**parts, n=n, k=k, bits=bits, group_size=group_size)
    except (TypeError, ValueError) as error:
        raise CheckpointError(info.path, str(error), name) from error
    # A kernel gathers by it: an index outside of 0 .. K-1 would read someone else's memory.
    if perm is not None and not torch.equal(perm.sort().values, torch.arange(k, dtype=torch.int32)):
        raise CheckpointError(info.path, f"is not a permutation of 0 .. {k - 1}", f"{name}.perm")
    if bits == 4 and parts["zeros"] is not None and not -8 <= int(parts["zeros"].min()) <= int(parts["zeros"].max()) <= 7:
        raise CheckpointError(info.path, "holds values outside of -8 .. 7, the zero points of 4 bits", f"{name}.zeros")
    return weight


# ---- a whole checkpoint


@dataclass(frozen=True)
class _Step:
    """What becomes of one entry: a packed weight (``weight`` is set) or a copied tensor, under ``name``."""

    entry: Entry
    name: str
    weight: Quantized | None


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
    if bits is not None:
        formats.check_bits(bits)
        formats.check_group_size(group_size)
    for file in checkpoint.files:
        if Path(path).exists() and file.samefile(path):
            raise ValueError(f"{path} is a file of the checkpoint itself; give the packed file another name")
    steps = _plan(checkpoint, bits, group_size, symmetric, _pattern("include", include), _pattern("exclude", exclude))
    specs: dict[str, Spec] = {}
    weights = {}
    for step in steps:
        if step.weight is None:
            specs[step.name] = (step.entry.dtype, step.entry.shape)
            continue
        n, k = step.entry.shape
        weights[step.name] = (n, k, step.weight.bits, step.weight.group_size)
        dtypes = {part: _PACKED_DTYPES.get(part, dtype) for part, dtype in step.weight.dtypes.items()}
        parts = _packed_specs(n, k, step.weight.bits, step.weight.group_size, dtypes)
        specs.update({f"{step.name}.{part}": spec for part, spec in parts.items()})
    try:
        _check_names(weights, [step.name for step in steps if step.weight is None])
    except ValueError as error:
        raise CheckpointError(checkpoint.path, str(error)) from error
    if not weights:
        floats = bits is None and any(_is_linear(entry) for entry in checkpoint.entries.values())
        hint = "; its weights are floats: give bits (--bits 4 or --bits 8) to quantise them" if floats else ""
        raise ValueError(f"{checkpoint.path}: there is no weight to pack{hint}")
    tied = {step.name: step.entry.tied_to for step in steps if step.weight is not None and step.entry.tied_to}
    sources = {file.name: sha256(file) for file in checkpoint.files}
    with stream_safetensors(path, specs, _metadata(weights, tied, sources)) as write:
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


def _pattern(option: str, text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{option} is {text!r}, which is not a regular expression: {error}") from error


def _plan(
    checkpoint: Checkpoint,
    bits: int | None,
    group_size: int,
    symmetric: bool,
    include: re.Pattern[str] | None,
    exclude: re.Pattern[str] | None,
) -> list[_Step]:
    default = re.compile(DEFAULT_EXCLUDE)
    steps = []
    biases = set()
    for entry in checkpoint.entries.values():
        module = entry.name.removesuffix(".weight")
        chosen = (include is None or include.search(module)) and not (exclude is not None and exclude.search(module))
        if entry.quantized is not None or entry.problem:
            if not chosen:
                steps += _as_tensors(entry)
            elif entry.problem:
                raise CheckpointError(
                    checkpoint.path,
                    f"{entry.problem}; to store its values as floats, leave it out (--exclude)",
                    entry.source,
                )
            else:
                steps.append(_Step(entry, entry.name, entry.quantized))
        elif bits is not None and chosen and _is_linear(entry) and (include is not None or not default.search(module)):
            bias = checkpoint.entries.get(f"{module}.bias")
            if bias is None or bias.dtype not in _FLOAT_TYPES or bias.shape != entry.shape[:1]:
                bias = None
            else:
                biases.add(bias.name)
            steps.append(_Step(entry, module, _to_quantize(checkpoint.path, entry, bias, bits, group_size, symmetric)))
        else:
            steps.append(_Step(entry, entry.name, None))
    return [step for step in steps if step.weight is not None or step.name not in biases]


def _is_linear(entry: Entry) -> bool:
    matrix = not (entry.quantized or entry.problem) and len(entry.shape) == 2 and 0 not in entry.shape
    return matrix and entry.name.endswith(".weight") and entry.dtype in _FLOAT_TYPES


def _as_tensors(entry: Entry) -> list[_Step]:
    """A quantised weight that is not packed: the values that its file gives it, and its bias."""
    name = entry.tied_to or entry.name
    steps = [_Step(entry, f"{name}.weight", None)]
    if entry.quantized is not None and "bias" in entry.quantized.dtypes:
        read, dtype = entry.quantized.read, entry.quantized.dtypes["bias"]

        def bias() -> Tensor:
            value = read().bias
            return torch.zeros(entry.shape[0], dtype=dtype) if value is None else value

        steps.append(
            _Step(
                replace(entry, shape=entry.shape[:1], dtype=dtype, nbytes=0, values=bias),
                f"{name}.bias",
                None,
            )
        )
    return steps


def _to_quantize(path: Path, entry: Entry, bias: Entry | None, bits: int, group_size: int, symmetric: bool) -> Quantized:
    def read() -> QuantizedWeight:
        try:
            weight = quantize(entry.values(), bits, group_size, symmetric)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(path, str(error), entry.source) from error
        return weight if bias is None else replace(weight, bias=bias.values())

    dtypes = {"scales": entry.dtype}
    if not symmetric:
        dtypes["zeros"] = torch.uint8
    if bias is not None:
        dtypes["bias"] = bias.dtype
    return Quantized(bits=bits, group_size=group_size, dtypes=dtypes, read=read)


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


# ---- verifying


@dataclass
class Verified:
    """What :func:`verify_packed` found.

    Attributes:
        weights, tensors: how many were checked.
        problems: one line each; empty if all is well.
        same_source: whether the checkpoint's files have the sha256 in the packed file; None if none was
            given.
        largest_difference: of a weight's values, packed against the checkpoint's own (for a float checkpoint:
            the error of quantising); None without a checkpoint.
        largest_at: the weight that has it.
    """

    weights: int = 0
    tensors: int = 0
    problems: list[str] = field(default_factory=list)
    same_source: bool | None = None
    largest_difference: float | None = None
    largest_at: str = ""


def verify_packed(
    path: str | os.PathLike[str], against: Checkpoint | None = None, progress: Progress | None = None
) -> Verified:
    """Check every byte of a packed file, and compare it with the checkpoint that it was made from.

    Without a checkpoint: the structure, and that padding is zero. With one: codes, scales, zero points,
    offsets, biases and copied tensors must be equal bit for bit (float weights are quantised again with the
    file's own options), and nothing may be missing or extra.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    info = packed_info(path)
    found = Verified()
    left = {*info.weights, *info.tensors}
    with opened(info.path) as file:
        for name in info.weights:
            weight = _read_weight(info, name, file)
            _compare(
                found,
                name,
                reorder(weight.unpack()).tensors(),
                weight.tensors(),
                "has padding that is not zero",
            )
            found.weights += 1
            if progress is not None:
                progress(name, weight.nbytes)
        found.tensors = len(info.tensors)
        if against is not None:
            sources = {source.name: sha256(source) for source in against.files}
            found.same_source = sources == info.sources
            for entry in against.entries.values():
                left -= _verify_entry(found, info, file, against, entry)
                if progress is not None:
                    progress(entry.name, entry.nbytes)
            found.problems += [f"{name}: not in the checkpoint" for name in sorted(left)]
    return found


def _compare(found: Verified, name: str, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], problem: str) -> None:
    for part in (*expected, *(part for part in actual if part not in expected)):
        a, b = expected.get(part), actual.get(part)
        if a is None or b is None:
            found.problems.append(f"{name}: {part} {'should not be there' if a is None else 'is missing'}")
        elif not _same_bits(a, b):
            found.problems.append(f"{name}: {part} {problem}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _verify_entry(found: Verified, info: PackedInfo, file: Any, checkpoint: Checkpoint, entry: Entry) -> set[str]:
    """Compare what became of one entry; the names in the packed file that it accounts for."""
    module = entry.name.removesuffix(".weight")
    packed = module if module in info.weights and entry.name != f"{module}.bias" else None
    if packed is not None and not entry.problem and len(entry.shape) == 2:
        weight = _read_weight(info, packed, file).unpack()
        expected = _expected(checkpoint, entry, weight)
        _compare(found, packed, _tensors(expected), _tensors(weight), "differs from the checkpoint's")
        if weight.shape == entry.shape:
            values = entry.values().float()
            difference = float((reference.dequantize_weight(weight, torch.float32) - values).abs().max())
            largest = found.largest_difference
            if largest is None or not (difference <= largest or math.isnan(largest)):  # the first NaN stays
                found.largest_difference, found.largest_at = difference, packed
        return {packed}
    if entry.quantized is None and not entry.problem:
        steps = [_Step(entry, entry.name, None)]
        owner = entry.name.removesuffix(".bias")
        if owner != entry.name and owner in info.weights and "bias" in info.parts[owner]:
            _compare(
                found,
                owner,
                {"bias": entry.values()},
                {"bias": file.get_tensor(f"{owner}.bias")},
                "differs from the checkpoint's",
            )
            return set()
    else:
        steps = _as_tensors(entry)
    for step in steps:
        if step.name not in info.tensors:
            found.problems.append(f"{step.name}: in the checkpoint ({entry.source}), not in the packed file")
        elif not _same_bits(step.entry.values(), file.get_tensor(step.name)):
            found.problems.append(f"{step.name}: differs from the checkpoint's")
    return {step.name for step in steps}


def _expected(checkpoint: Checkpoint, entry: Entry, packed: QuantizedWeight) -> QuantizedWeight:
    if entry.quantized is not None:
        return entry.quantized.read()
    bias = checkpoint.entries.get(f"{entry.name.removesuffix('.weight')}.bias") if packed.bias is not None else None
    return _to_quantize(checkpoint.path, entry, bias, packed.bits, packed.group_size, symmetric=packed.symmetric).read()


def _tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    named = {part: getattr(weight, part) for part in PARTS}
    return {part: tensor for part, tensor in named.items() if tensor is not None}
