"""Quantised weights to packed ones, and the files that hold those: write, read.

A packed file is safetensors. Weight ``w`` is kept as ``w.codes``, ``w.scales`` and whichever of ``w.zeros``,
``w.offsets``, ``w.bias``, ``w.perm`` and ``w.book`` it has, shaped as in :class:`cutlass_ops.PackedWeight`; every other
tensor stands under its own name.
``__metadata__`` (all of it strings):

==================  ======================================================================================
``format``          "pt", as other tools expect
``layout``          "cutlass_ops.slab64"
``layout_version``  "2"; in version 1 the last two lines of this table are missing
``weights``         JSON: ``{name: {"n": N, "k": K, "bits": 4 or 8, "group_size": g}}``
``kernels``         JSON, if there are weights of convolutions: ``{name: [R, S]}``, the extents of their kernels; K of
                    ``weights`` is then R * S * C, and each tap's C channels are padded to 128
``experts``         JSON, if a layer's experts are packed as one: ``{name: {"experts": E, "n": N}}``; N of ``weights``
                    is then E * N rounded up to 64, and ``perm`` is ``[E, K]``
``tied``            JSON: ``{name: other}``: weight ``name`` is also module ``other``'s, not stored again
``sources``         JSON: ``{file name: sha256}`` of the checkpoint's files
``tool``            "cutlass_ops <version>"
``options``         JSON: how the checkpoint was read and its float matrices quantised
``config``          JSON, in a file of its own where it is known: the model's ``config.json``
``tensor_parallel``  JSON, if the file holds one rank's part: ``{"rank": r, "size": R, "styles": {module: style}}``
``checksums``       JSON: ``{tensor: sha256}`` of the data of each tensor in the file, hexadecimal
``header_sha256``   of all bytes before the data, with 64 zeros in the place of these 64 digits
==================  ======================================================================================

``verify`` checks them; who loads a file does not read all of it. The writer knows them last, so it writes the header last:
its length does not depend on them.

Files that ``save_pretrained`` of transformers wrote are recognised by the ``config.json`` beside them. Of the table they have
``format`` and ``weights``, the latter of the whole model in each shard. Where they lack that, ``config.json`` has bits and
group size, and N and K are those of ``bias`` and ``perm`` or, without them, those of the padded matrix.

A tied word embedding that its checkpoint quantised is packed once, as ``lm_head``, with ``tied`` naming
``model.embed_tokens``; a loader dequantises it for the table. (A model directory stores the table as a tensor and ties
nothing.) A quantised weight that the user leaves out (``--exclude``) is stored as a tensor of the fp32 values that its file
gives it, a tied embedding then as ``model.embed_tokens.weight``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import formats
from .checkpoints.directory import INDEX, TYPES, json_object, opened, placement
from .packed_experts import PackedExperts
from .weight import (
    PARTS,
    CheckpointError,
    PackedWeight,
    QuantizedWeight,
    group_vector_positions,
    is_known_book,
    not_finite,
    pack_codes,
)

#: dtype and shape of a tensor that is not there yet.
Spec: TypeAlias = "tuple[torch.dtype, tuple[int, ...]]"

_TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Dtypes of a packed weight's tensors where they are not the canonical weight's.
PACKED_DTYPES = {"zeros": torch.int8, "perm": torch.int32}
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000  # above it, the safetensors library refuses a file
_PIECE = 1 << 20  # bytes that are summed and written at a time: the second finds them in the cache
_NO_SUM = "0" * 64  # in the place of a sha256 that is not known yet


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
    if any(weight.kernel_size for weight in weights):
        raise ValueError("weights of convolutions are packed one by one; a sequence of matrices is expected")
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

    ``reorder(w).unpack()`` is w again, bit for bit. A weight on a GPU is packed there, on that device's current
    stream: of its codes no copy is made, whatever their strides (those of several weights are first copied into one tensor).
    Whether all values are finite is asked before, which waits for the GPU; nothing else does. Other weights, and those that
    a package built without kernels gets, are packed by the host's cores.

    Weights that multiply the same x (query, key and value; gate and up) may be given as a sequence: they are packed as
    one, their rows one after another, so that one launch serves all. The products part by plain slicing,

        q, k, v = mixed_gemm(x, reorder([wq, wk, wv])).split([wq.n, wk.n, wv.n], dim=-1)

    Args:
        weight: any quantised weight ``[N, K]``, or a convolution's, or several matrices with the same K, device, format
            (bits, group size, zero points or offsets or neither, code book), act order, and dtypes of scales, offsets and
            biases. Where only some have a
            bias, the others get one of -0.0, which changes no sum.

    Returns:
        The packed weight, on the same device; N is the sum of the parts'. The bias of a single weight is its own tensor.

    Raises:
        TypeError: not QuantizedWeights.
        ValueError: none, or weights that differ in what they must share; the message says in what. Scales, offsets,
            a code book or codes that are not finite.
    """
    if isinstance(weight, Sequence):
        weight = _one_below_another(weight)
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; a QuantizedWeight, or several in a sequence, is expected")
    if problem := not_finite(weight):
        raise ValueError(f"the weight cannot be packed: {problem}")
    n, k, bits, device = weight.n, weight.k, weight.bits, weight.device
    n_pad, taps = formats.padded_rows(n), weight.taps
    position = group_vector_positions(n, device)
    codes = weight.codes
    if taps > 1:
        by_tap = codes.new_full((n, taps, formats.padded_k(k, taps) // taps), formats.midpoint(bits))
        by_tap[:, :, : k // taps] = codes.view(n, taps, -1)
        codes = by_tap.flatten(1)
    grouped_taps = 1 if weight.group_size == -1 else taps

    def vector(rows: Tensor) -> Tensor:
        out = rows.new_zeros(grouped_taps, formats.padded_groups(k, weight.group_size, taps) // grouped_taps, n_pad)
        by_tap = rows.t().view(grouped_taps, -1, n)
        out[:, : by_tap.shape[1], position] = by_tap
        return out.flatten(0, 1)

    zeros = None
    if weight.zeros is not None:
        zeros = vector((weight.zeros.to(torch.int16) - formats.midpoint(bits)).to(torch.int8))
    return PackedWeight(
        codes=pack_codes(codes, bits),
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
        kernel_size=weight.kernel_size,
    )


# ---- writing


@dataclass(frozen=True)
class Slices:
    """That a file holds what one rank of several holds of a model (see ``tensor_parallel.py``).

    Attributes:
        rank, size: which of how many.
        styles: how each layer that is split is split, by its name.
    """

    rank: int
    size: int
    styles: Mapping[str, str]


@contextmanager
def stream_safetensors(
    path: str | os.PathLike[str], specs: Mapping[str, Spec], metadata: Mapping[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a safetensors file tensor by tensor, holding none of them, with checksums.

    The file has a temporary name beside ``path`` until it is whole and on the disk. If the block is left by
    an exception, or the machine stops, what ``path`` named before is untouched.

    Args:
        path: the file to make or replace.
        specs: dtype and shape of every tensor to come.
        metadata: strings for the header; ``checksums`` and ``header_sha256`` are added.

    Yields:
        ``write(name, tensor)``, to be called once for each name of ``specs``, in any order, on any thread.

    Raises:
        ValueError: a tensor that was not announced so, twice, or never; a dtype that the format lacks.
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
            file.truncate(size)

            def write(name: str, tensor: Tensor) -> None:
                if name not in missing:
                    raise ValueError(f"tensor {name!r} was {'written before' if name in specs else 'not announced'}")
                if (tensor.dtype, tuple(tensor.shape)) != specs[name]:
                    raise ValueError(f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; announced was {specs[name]}")
                missing.remove(name)
                # One after another, so that a GPU's tensor has one copy on the host at a time.
                data, digest = _bytes(tensor), hashlib.sha256()
                for first in range(0, len(data), _PIECE):
                    piece = data[first : first + _PIECE]
                    digest.update(piece)
                    _write_all(file.fileno(), piece, begins[name] + first)
                sums[name] = digest.hexdigest()

            yield write
            if missing:
                raise ValueError(f"tensors announced and never written: {', '.join(sorted(missing))}")
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
    """All before the data of a safetensors file, where each of its tensors begins, and the file's size.

    What ``sums`` lacks is zeros in ``checksums``: the length is the same.
    """
    # Largest power of two in the size first: then every tensor starts at a multiple of its own elements'
    # size, without the holes that the format forbids.
    sizes = {name: spec_bytes(spec) for name, spec in specs.items()}
    begins: dict[str, int] = {}
    checksums = json.dumps({name: sums.get(name, _NO_SUM) for name in specs})
    header: dict[str, Any] = {"__metadata__": {**metadata, "checksums": checksums, "header_sha256": _NO_SUM}}
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
    start = 8 + len(text)
    head = len(text).to_bytes(8, "little") + text
    head = head.replace(_sum_field(_NO_SUM), _sum_field(hashlib.sha256(head).hexdigest()), 1)
    return head, {name: start + begin for name, begin in begins.items()}, start + end


def _sum_field(value: str) -> bytes:
    # Inside of JSON's strings quotes are escaped: this stands nowhere else.
    return f'"header_sha256":"{value}"'.encode()


def header_is_intact(path: Path) -> bool:
    """Whether the header of a file with checksums has its own."""
    recorded = _read_header(path)[0].get("header_sha256", "")
    with path.open("rb") as file:
        length = file.read(8)
        head = length + file.read(int.from_bytes(length, "little"))
    return hashlib.sha256(head.replace(_sum_field(recorded), _sum_field(_NO_SUM), 1)).hexdigest() == recorded


def is_written(path: str | os.PathLike[str], specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> bool:
    """Whether :func:`stream_safetensors` has written a file of this header: it is whole if it is there.

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


def spec_bytes(spec: Spec) -> int:
    """Bytes of a tensor."""
    dtype, shape = spec
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def packed_specs(
    n: int,
    k: int,
    bits: int,
    group_size: int,
    dtypes: Mapping[str, torch.dtype],
    experts: int | None = None,
    kernel_size: Sequence[int] = (),
) -> dict[str, Spec]:
    """What :func:`reorder` will return for a weight with tensors of these dtypes.

    For experts that are packed as one, n is E * N rounded up to 64.
    """
    n_pad, taps = formats.padded_rows(n), math.prod(kernel_size)
    vector = (formats.padded_groups(k, group_size, taps), n_pad)
    shapes: dict[str, tuple[int, ...]] = {
        "scales": vector,
        "zeros": vector,
        "offsets": vector,
        "bias": (n,),
        "perm": (k,) if experts is None else (experts, k),
        "book": (1 << bits,),
    }
    shapes["codes"] = (n_pad * formats.padded_k(k, taps) * bits // 8,)
    return {part: (dtype, shapes[part]) for part, dtype in {"codes": torch.uint8, **dtypes}.items()}


def empty_packed(
    n: int, k: int, bits: int, group_size: int, dtypes: Mapping[str, torch.dtype], device: torch.device | str = "cpu"
) -> PackedWeight:
    """A packed weight whose tensors have memory and no values yet.

    Args:
        n, k, bits, group_size: as in :class:`cutlass_ops.PackedWeight`.
        dtypes: of its tensors beside the codes.
        device: "meta" takes no memory.
    """
    specs = packed_specs(n, k, bits, group_size, dtypes)
    tensors: dict[str, Any] = dict.fromkeys(PARTS)
    tensors.update({part: torch.empty(shape, dtype=dtype, device=device) for part, (dtype, shape) in specs.items()})
    return PackedWeight(**tensors, n=n, k=k, bits=bits, group_size=group_size)


def weights_metadata(weights: Mapping[str, tuple[int, int, int, int]]) -> str:
    """``weights`` of the table above, of ``(n, k, bits, group_size)`` by name."""
    fields = ("n", "k", "bits", "group_size")
    return json.dumps({name: dict(zip(fields, values, strict=True)) for name, values in weights.items()})


def experts_metadata(experts: Mapping[str, tuple[int, int]]) -> str:
    """``experts`` of the table above, of E and N by name."""
    return json.dumps({name: {"experts": e, "n": n} for name, (e, n) in experts.items()})


def packed_metadata(
    weights: Mapping[str, tuple[int, int, int, int]],
    tied: Mapping[str, str],
    sources: Mapping[str, str],
    options: Mapping[str, Any],
    slices: Slices | None = None,
    experts: Mapping[str, tuple[int, int]] | None = None,
    kernels: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, str]:
    """``__metadata__`` of a packed file, as in the table above.

    ``experts`` has E and N, ``kernels`` the kernels' extents by name.
    """
    from . import __version__

    metadata = {
        "format": "pt",
        "layout": formats.LAYOUT_NAME,
        "layout_version": str(formats.LAYOUT_VERSION),
        "weights": weights_metadata(weights),
        "tied": json.dumps(dict(tied)),
        "sources": json.dumps(dict(sources)),
        "tool": f"cutlass_ops {__version__}",
        "options": json.dumps(dict(options)),
    }
    if experts:
        metadata["experts"] = experts_metadata(experts)
    if kernels:
        metadata["kernels"] = json.dumps(dict(kernels))
    if slices is not None:
        metadata["tensor_parallel"] = json.dumps({"rank": slices.rank, "size": slices.size, "styles": dict(slices.styles)})
    return metadata


def save_packed(
    path: str | os.PathLike[str],
    tensors: Mapping[str, PackedWeight | PackedExperts | Tensor],
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
        TypeError: a value that is neither a PackedWeight, nor PackedExperts, nor a Tensor.
        ValueError: names that clash in the file, or a tensor of a dtype that the format lacks.
        OSError: the file cannot be written.
    """
    parts: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, PackedWeight | PackedExperts):
            named = {f"{name}.{part}": tensor for part, tensor in value.tensors().items()}
        elif isinstance(value, Tensor):
            named = {name: value}
        else:
            raise TypeError(
                f"{name!r} is a {type(value).__name__}; a PackedWeight, PackedExperts or a torch.Tensor is expected"
            )
        parts.update(named)
    experts = {name: (value.experts, value.n) for name, value in tensors.items() if isinstance(value, PackedExperts)}
    packed = {name: value for name, value in tensors.items() if isinstance(value, PackedWeight)}
    packed |= {name: value.weight for name, value in tensors.items() if isinstance(value, PackedExperts)}
    check_names(packed, [name for name in tensors if name not in packed])
    for name in tied or {}:
        if name not in packed:
            raise ValueError(f"tied names {name!r}, which is no weight of this file")
    weights = {name: (w.n, w.k, w.bits, w.group_size) for name, w in packed.items()}
    specs: dict[str, Spec] = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts.items()}
    kernels = {name: w.kernel_size for name, w in packed.items() if w.kernel_size}
    metadata = packed_metadata(weights, tied or {}, sources or {}, {}, experts=experts, kernels=kernels)
    with stream_safetensors(path, specs, metadata) as write:
        for name, tensor in parts.items():
            write(name, tensor)


def check_names(weights: Collection[str], tensors: Iterable[str]) -> None:
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
        experts: E and N of the weights that are experts packed as one, by name; their n is E * N rounded up to 64.
        kernels: extents of the kernels of the weights that are convolutions', by name.
        parts: dtype and shape of a weight's tensors ("codes", "scales", ...), by name.
        tensors: dtype and shape of the other tensors, by name.
        layout: its name and version.
        saved_elsewhere: whether transformers wrote the files.
        rounded: weights of which N or K may be rounded up, since no metadata has them.
        tied, sources, tool: as in the module's table.
        options: as in the module's table.
        config: as in the module's table; {} where there is none.
        slices: which part of the model this is, or None for all of it.
        places: the file that holds each stored tensor, by its name in there ("m.codes"); of a directory, one of its shards.
        checksums: sha256 of each stored tensor as the header has it, or None for files without checksums.
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
    experts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    kernels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """The files that hold it."""
        return sorted(set(self.places.values())) or [self.path]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights and of the other tensors."""
        return (*self.weights, *self.tensors)


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Whether a file, or the first shard of a directory, claims to be packed by this package, in whatever version.

    Raises:
        CheckpointError: a file that is no safetensors, or JSON that is not readable.
    """
    path = Path(path)
    if path.is_dir():
        path = min((*path.glob("*.safetensors"), *path.glob("rank-0-of-*/*.safetensors")), default=path)
    if not path.is_file() or path.suffix != ".safetensors":
        return False
    with opened(path) as file:
        layout = (file.metadata() or {}).get("layout")
    return bool(_saved_config(path)) if layout is None else layout.startswith("cutlass_ops.")


def _saved_config(path: Path) -> dict[str, Any] | None:
    """The ``quantization_config`` beside a file, if it is ours."""
    config = json_object(path.parent / "config.json").get("quantization_config")
    return config if isinstance(config, dict) and config.get("quant_method") == formats.QUANT_METHOD else None


def packed_info(path: str | os.PathLike[str]) -> PackedInfo:
    """Read and check the header of a packed file, or those of a directory's shards.

    Raises:
        CheckpointError: not a packed file, one of another layout or version, one whose header lies, or a directory that
            is not whole.
    """
    path = Path(path)
    if path.is_dir():
        return _directory_info(path)
    metadata, specs = _read_header(path)
    if "layout" not in metadata and (config := _saved_config(path)) is not None:
        return _saved_info(path, [path], config)
    return _file_info(path, metadata, specs)


def _read_header(path: Path) -> tuple[dict[str, str], dict[str, Spec]]:
    """A file's metadata, and its tensors in their order."""
    with opened(path) as file:
        specs: dict[str, Spec] = {}
        for name in file.offset_keys():
            part = file.get_slice(name)
            if part.get_dtype() not in TYPES:
                raise CheckpointError(path, f"has type {part.get_dtype()}; known are {', '.join(TYPES)}", name)
            specs[name] = (TYPES[part.get_dtype()], tuple(part.get_shape()))
        return file.metadata() or {}, specs


def _file_info(path: Path, metadata: Mapping[str, str], specs: dict[str, Spec]) -> PackedInfo:
    layout, version = metadata.get("layout"), metadata.get("layout_version")
    if layout is None:
        raise CheckpointError(path, "not a packed file: its metadata names no layout; cutlass-ops reorder makes one")
    try:
        formats.check_layout(layout, version)
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error
    checksums = _strings(path, metadata, "checksums") if version != "1" else None
    places = dict.fromkeys(specs, path)
    weights = {name: _weight_fields(path, name, value) for name, value in _json_object(path, metadata, "weights").items()}
    experts, kernels = _experts(path, metadata, weights), _kernels(path, metadata, weights)
    parts = {name: _weight_parts(path, name, fields, specs, experts, kernels) for name, fields in weights.items()}
    tied = _strings(path, metadata, "tied")
    for name in tied:
        if name not in weights:
            raise CheckpointError(path, f"the metadata ties {name!r}, which is no weight of this file")
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
    )


def _kernels(
    path: Path, metadata: Mapping[str, str], weights: Mapping[str, tuple[int, int, int, int]]
) -> dict[str, tuple[int, ...]]:
    """Kernels' extents of the weights that are convolutions'."""
    found = {}
    for name, value in _json_object(path, metadata, "kernels").items():
        if name not in weights or not isinstance(value, list) or not value:
            raise CheckpointError(
                path, f"'kernels' says {reprlib.repr(value)}; a list of extents, of a weight of this file, is expected", name
            )
        try:
            found[name] = formats.check_kernel_size(value, weights[name][1])
        except ValueError as error:
            raise CheckpointError(path, str(error), name) from error
    return found


def _experts(
    path: Path, metadata: Mapping[str, str], weights: Mapping[str, tuple[int, int, int, int]]
) -> dict[str, tuple[int, int]]:
    """E and N of the weights that are experts."""
    found = {}
    for name, value in _json_object(path, metadata, "experts").items():
        e, n = (value.get(key) if isinstance(value, dict) else None for key in ("experts", "n"))
        # type() and not isinstance(): True is no size.
        if type(e) is not int or type(n) is not int or e < 1 or n < 1:
            raise CheckpointError(path, f"'experts' says {reprlib.repr(value)}; experts and n of at least 1 are expected", name)
        if name not in weights or weights[name][0] != e * formats.padded_rows(n):
            rows = weights[name][0] if name in weights else "no"
            raise CheckpointError(path, f"'experts' says {e} experts of {n} rows; the weight has {rows} rows", name)
        found[name] = e, n
    return found


def _weight_parts(
    path: Path,
    name: str,
    weight: tuple[int, int, int, int],
    specs: dict[str, Spec],
    experts: Mapping[str, tuple[int, int]],
    kernels: Mapping[str, tuple[int, ...]],
) -> dict[str, Spec]:
    """The tensors of a weight, taken out of ``specs``; their shapes are checked."""
    n, k, bits, group_size = weight
    found = {part: specs.pop(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in specs}
    for part in ("codes", "scales"):
        if part not in found:
            raise CheckpointError(path, f"is named by the metadata, but {name}.{part} is not in the file", name)
    dtypes = {part: dtype for part, (dtype, _) in found.items()}
    count = experts[name][0] if name in experts else None
    expected = packed_specs(n, k, bits, group_size, dtypes, count, kernels.get(name, ()))
    for part, (_, shape) in found.items():
        if shape != expected[part][1]:
            raise CheckpointError(
                path,
                f"has shape {list(shape)}; n={n}, k={k}, bits={bits}, group_size={group_size} make it "
                f"{list(expected[part][1])}",
                f"{name}.{part}",
            )
    return found


def _saved_info(path: Path, files: Sequence[Path], config: Mapping[str, Any]) -> PackedInfo:
    """What transformers wrote: files without our metadata, which may have parts of one weight in two shards."""
    try:
        formats.check_layout(config.get("layout"), config.get("layout_version"))
    except ValueError as error:
        raise CheckpointError(path, f"quantization_config: {error}") from error
    specs: dict[str, Spec] = {}
    places: dict[str, Path] = {}
    stated: dict[str, Any] = {}
    first: Mapping[str, str] = {}
    for file in files:
        metadata, held = _read_header(file)
        first = first or metadata  # each shard says the same of the whole model
        stated |= _json_object(file, metadata, "weights")
        for name, spec in held.items():
            if name in specs:
                raise CheckpointError(file, f"stands in {places[name].name} too", name)
            specs[name], places[name] = spec, file
    modules = config.get("modules", {})
    if not isinstance(modules, dict):
        raise CheckpointError(path, f"quantization_config: modules is {modules!r:.100}; an object is expected")
    weights: dict[str, tuple[int, int, int, int]] = {}
    parts: dict[str, dict[str, Spec]] = {}
    rounded: list[str] = []
    for name in dict.fromkeys([*stated, *(name.removesuffix(".codes") for name in specs if name.endswith(".codes"))]):
        if (fields := stated.get(name)) is None:
            form = modules.get(name, config)
            fields = {key: form.get(key) for key in ("bits", "group_size")} if isinstance(form, dict) else {}
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
    """N and K of a weight by its tensors' shapes; both rounded up where neither a bias nor an act order tells them."""
    codes, scales = specs[f"{name}.codes"][1], specs.get(f"{name}.scales", (None, ()))[1]
    if len(codes) != 1 or len(scales) != 2 or 0 in (*codes, *scales) or bits not in formats.BITS:
        raise CheckpointError(
            path, f"has codes {list(codes)}, scales {list(scales)} and bits {bits!r:.100}, which make no packed weight", name
        )
    n, k = scales[1], codes[0] * 8 // bits // scales[1]
    for part, padded, pad in (("bias", n, formats.padded_rows), ("perm", k, formats.padded_k)):
        shape = specs.get(f"{name}.{part}", (None, ()))[1]
        if len(shape) == 1 and shape[0] > 0 and pad(shape[0]) == padded:
            n, k = (shape[0], k) if part == "bias" else (n, shape[0])
    return {"n": n, "k": k}


def _directory_info(directory: Path) -> PackedInfo:
    if ranks := sorted(path.name for path in directory.glob("rank-*-of-*")):
        raise CheckpointError(directory, f"holds the directories of several ranks; name one: {', '.join(ranks)}")
    # It is written last.
    if not (directory / "config.json").is_file():
        raise CheckpointError(directory, "has no config.json: not a packed model, or one whose reordering was interrupted")
    index = directory / INDEX
    placed = placement(index) if index.is_file() else {}
    files = sorted({directory / name for name in placed.values()} if index.is_file() else {directory / "model.safetensors"})
    if not files:
        raise CheckpointError(index, "names no file")
    config = _saved_config(files[0])
    if config is not None and "layout" not in _read_header(files[0])[0]:
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
    experts: dict[str, tuple[int, int]] = {}
    kernels: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        if (shard.sources, shard.options, shard.slices) != (first.sources, first.options, first.slices):
            raise CheckpointError(shard.path, f"was not written with {first.path.name}: the sources, options or slices differ")
        for name in shard.places:
            if name in places:
                raise CheckpointError(shard.path, f"stands in {places[name].name} too", name)
        weights.update(shard.weights)
        parts.update(shard.parts)
        experts.update(shard.experts)
        kernels.update(shard.kernels)
        tensors.update(shard.tensors)
        tied.update(shard.tied)
        places.update(shard.places)
        checksums.update(shard.checksums or {})
    _check_placement(index, placed, places)
    return replace(
        first,
        path=directory,
        weights=weights,
        parts=parts,
        tensors=tensors,
        tied=tied,
        places=places,
        checksums=checksums if all(shard.checksums is not None for shard in shards) else None,
        experts=experts,
        kernels=kernels,
    )


def _check_placement(index: Path, placed: Mapping[str, str], places: Mapping[str, Path]) -> None:
    if not index.is_file():
        return
    found = {name: file.name for name, file in places.items()}
    if found != placed:
        name = min(name for name in {*found, *placed} if found.get(name) != placed.get(name))
        raise CheckpointError(index, f"is placed in {placed.get(name)!r}; it is in {found.get(name)!r}", name)


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
            f"'tensor_parallel' is {reprlib.repr(value)}; a rank below size and colwise or rowwise styles are expected",
        )
    return Slices(rank, size, styles)


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


def load_packed(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> dict[str, PackedWeight | PackedExperts | Tensor]:
    """Read a packed file, or a directory of them.

    On the CPU the tensors are windows of the file, read from the disk when they are first used; they stay
    valid if the file is replaced.

    Args:
        path: a file that :func:`save_packed` or ``cutlass-ops reorder`` wrote, or a directory that the latter wrote.
        device: where to put the tensors.

    Returns:
        Weights, experts and other tensors by name.

    Raises:
        CheckpointError: not a packed file, one of another layout or version, or one that lies.
    """
    info = packed_info(path)
    result: dict[str, PackedWeight | PackedExperts | Tensor] = {}
    with ExitStack() as stack:
        files = {file: stack.enter_context(opened(file)) for file in info.files}
        for name in info.names:
            if name in info.weights:
                result[name] = read_packed_weight(info, name, files).to(device)
            else:
                result[name] = files[info.places[name]].get_tensor(name).to(device)
    return result


def read_packed_weight(info: PackedInfo, name: str, files: Mapping[Path, Any]) -> PackedWeight | PackedExperts:
    """A weight of the open files that hold it, checked but for what every value would have to be read for."""
    n, k, bits, group_size = info.weights[name]
    path = info.places[f"{name}.codes"]
    parts: dict[str, Any] = dict.fromkeys(PARTS)
    for part in info.parts[name]:
        parts[part] = files[info.places[f"{name}.{part}"]].get_tensor(f"{name}.{part}")
    weight: PackedWeight | PackedExperts
    try:
        if name in info.experts:
            weight = PackedExperts.of_parts(parts, *info.experts[name], k, bits, group_size)
        else:
            kernel_size = info.kernels.get(name, ())
            weight = PackedWeight(**parts, n=n, k=k, bits=bits, group_size=group_size, kernel_size=kernel_size)
    except (TypeError, ValueError) as error:
        raise CheckpointError(path, str(error), name) from error
    if problem := packed_problem(weight):
        raise CheckpointError(path, problem[1], f"{name}.{problem[0]}")
    return weight


def packed_problem(weight: PackedWeight | PackedExperts) -> tuple[str, str] | None:
    """What is wrong with the values of a weight that came from a file: a tensor's name and the fault, or None."""
    # A kernel gathers by it: an index outside of 0 .. K-1 would read someone else's memory.
    if weight.perm is not None:
        features = torch.arange(weight.k, dtype=torch.int32, device=weight.device)
        if not bool((weight.perm.sort().values == features).all()):
            return "perm", f"is not a permutation of 0 .. {weight.k - 1}"
    book = weight.tensors().get("book")
    if book is not None and not is_known_book(book):
        return "book", "has other values than those of e4m3, the code book that 8-bit codes may have"
    zeros = weight.tensors().get("zeros")
    if weight.bits == 4 and zeros is not None and not -8 <= int(zeros.min()) <= int(zeros.max()) <= 7:
        return "zeros", "holds values outside of -8 .. 7, the zero points of 4 bits"
    return None
