"""Packed weights: the order in which the kernels read them."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import formats
from .eights import gated_order
from .weight import (
    FLOAT_TYPES,
    PARTS,
    QuantizedWeight,
    check_book,
    check_order,
    check_part,
    format_of,
    rows_of,
)

_NATIVE_TYPES = {
    None: _C.DataType.none,
    torch.float16: _C.DataType.float16,
    torch.bfloat16: _C.DataType.bfloat16,
    torch.float32: _C.DataType.float32,
}


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes in the order of ``layout.h``, padding included.

    On a GPU this is one kernel on the device's current stream, and the host does not wait for it.

    Args:
        codes: uint8 ``[N, K]`` of any strides, each below ``2**bits``.
        bits: 2, 4 or 8.

    Returns:
        uint8 ``[n_pad * k_pad * bits / 8]`` on the same device.
    """
    n, k = codes.shape
    if not _on_gpu(codes):
        host = codes.cpu().contiguous()
        packed = torch.empty(_C.packed_bytes(n, k, bits), dtype=torch.uint8, device="cpu")
        _C.pack(host.data_ptr(), packed.data_ptr(), n, k, bits)
        return packed.to(codes.device)
    packed = codes.new_empty(_C.packed_bytes(n, k, bits))
    _C.pack_cuda(
        codes.data_ptr(),
        codes.stride(0),
        codes.stride(1),
        packed.data_ptr(),
        n,
        k,
        bits,
        *stream_of(codes),
    )
    return packed


def unpack_codes(packed: Tensor, n: int, k: int, bits: int) -> Tensor:
    """Undo :func:`pack_codes`: uint8 ``[N, K]``, on the same device."""
    if not _on_gpu(packed):
        host = packed.cpu()
        codes = torch.empty(n, k, dtype=torch.uint8, device="cpu")
        _C.unpack(host.data_ptr(), codes.data_ptr(), n, k, bits)
        return codes.to(packed.device)
    if packed.data_ptr() % 16:  # a view into a file's bytes
        packed = packed.clone()
    codes = packed.new_empty(n, k)
    _C.unpack_cuda(
        codes.data_ptr(),
        codes.stride(0),
        codes.stride(1),
        packed.data_ptr(),
        n,
        k,
        bits,
        *stream_of(packed),
    )
    return codes


def _on_gpu(tensor: Tensor) -> bool:
    """Whether there are kernels for a tensor; a package built without CUDA packs on the host."""
    return tensor.is_cuda and _C.built_with_cuda


def stream_of(tensor: Tensor) -> tuple[int, int]:
    """A tensor's GPU and its current stream."""
    return tensor.get_device(), torch.cuda.current_stream(tensor.device).cuda_stream


def gather_codes(packed: Tensor, rows: Tensor, k: int, bits: int) -> Tensor:
    """The codes of some rows, as :func:`unpack_codes` returns them, and the columns of the padding.

    Its temporary tensors are as large as its result, and the rest of the weight is not read.

    Args:
        packed: codes in the order of ``layout.h``.
        rows: int64 ``[R]`` on the same device, in any order; an index outside of the padded weight
            raises torch's IndexError on a CPU, and fails an assertion of torch's kernels on a GPU.
        k, bits: of the weight.

    Returns:
        uint8 ``[R, k_pad]``.
    """
    inside = rows % 16
    block, half, g = rows % formats.ROWS_PER_PANEL // 16, inside // 8, inside % 8
    tiles = formats.padded_k(k) // formats.K_PER_TILE
    # [row panels, K tiles, row blocks, units, g, t, words' columns, (half,) k % 2,
    # k // 8 of the 16]
    if bits == 8:
        view = packed.view(-1, tiles, 4, 4, 8, 4, 2, 2, 2, 2)
        found = view[rows // formats.ROWS_PER_PANEL, :, block, :, g, :, :, half]
    else:
        view = packed.view(-1, tiles, 4, bits // 2, 8, 4, 4, 2, 2)
        found = view[rows // formats.ROWS_PER_PANEL, :, block, :, g]
    # from units, t, columns, k % 2, k // 8
    columns = formats.K_PER_TILE // (2 if bits == 2 else 1)
    codes = found.permute(0, 1, 2, 4, 6, 3, 5).reshape(len(rows), tiles, columns)
    if bits < 8:
        codes = codes.bitwise_right_shift_((4 * half).to(torch.uint8)[:, None, None])
    if bits == 2:  # columns 64 further are in the upper two bits
        codes = torch.cat((codes, codes >> 2), -1)
    codes = codes.bitwise_and_((1 << bits) - 1).bitwise_xor_(formats.midpoint(bits))
    return codes.view(len(rows), formats.padded_k(k))


def group_vector_positions(n: int, device: torch.device) -> Tensor:
    """:func:`positions_of_rows` of all rows, int64 ``[n]``. Made on the device: a copy from the
    host would wait for it.
    """
    return positions_of_rows(torch.arange(n, device=device))


def positions_of_rows(rows: Tensor) -> Tensor:
    """The positions of some rows of the weight in a packed group vector.

    Inside each row panel of 64, position ``g * 8 + i * 2 + h`` holds row
    ``16 * i + 8 * h + g``: the eight rows that one lane of a tensor-core fragment owns are
    neighbours, one 16-byte load for fp16.
    """
    inside = rows % formats.ROWS_PER_PANEL
    return rows - inside + 8 * (inside % 8) + inside // 8


class ColumnSums:
    """What :meth:`PackedWeight.sum_codes` keeps: the column sums of some codes with their scales
    and zero points.

    It keeps a reference to those tensors, so that no other tensors get their addresses, which are
    its key.

    Attributes:
        memory: uint8, in the order of ``zero_compensation.h``.
        parts: codes, scales and, if there are any, zero points.
        versions: theirs, when they were summed.
    """

    def __init__(self, memory: Tensor, parts: tuple[Tensor, ...]) -> None:
        self.memory = memory
        self.parts = parts
        self.versions: tuple[int, ...] = ()

    def now(self) -> tuple[int, ...]:
        """The versions of the tensors: torch counts the writes to each, except to inference
        tensors.
        """
        return tuple(t._version for t in self.parts)

    def current(self) -> bool:
        """Whether these are the sums of the tensors' present values."""
        return self.versions == self.now()


#: The column sums that are kept, by the weight that they are of (:meth:`PackedWeight._key`).
_COLUMN_SUMS: weakref.WeakValueDictionary[tuple[Any, ...], ColumnSums] = (
    weakref.WeakValueDictionary()
)


#: Vectors of a weight's groups.
_VECTORS = ("scales", "zeros", "offsets")


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in the order in which tensor-core lanes read it; made by
    :func:`cutlass_ops.reorder`.

    ``n_pad`` is the number of rows rounded up to 64 and ``k_pad`` is K rounded up to 128. In a
    convolution's weight the channels of each tap are rounded up to 128, so that a tile has one tap.

    Attributes:
        codes: uint8 ``[n_pad * k_pad * bits / 8]``, centred codes in the order of ``layout.h``.
        scales: ``[groups, n_pad]``, the checkpoint's values and dtype, rows at their
            :func:`group_vector_positions`.
        zeros: int8 ``[groups, n_pad]``, zero points minus ``2**(bits-1)``, or None.
        offsets: ``[groups, n_pad]``, or None.
        bias: ``[rows]``, or None.
        perm: int32 ``[K]``, or None.
        book: fp32 ``[16]``, or ``[256]`` of ``formats.E4M3``, by code (not centred), or None.
        n, k, bits, group_size, kernel_size: as in :class:`QuantizedWeight`.
        gated: whether the weight is two, gate and up of ``[N, K]`` each, for products
            ``activation(gate) * up`` of N outputs. Its 2 * N rows, and elements of its bias, are
            eight of gate's, then the eight of up's for the same outputs, and so on.
        device: where the tensors are.
        gpu: index of that device if it is a GPU, otherwise -1.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    bias: Tensor | None
    perm: Tensor | None
    n: int
    k: int
    bits: int
    group_size: int
    book: Tensor | None = None
    gated: bool = False
    kernel_size: tuple[int, ...] = ()
    # Kept, since reading it from a tensor takes a tenth of a product's host time.
    device: torch.device = field(init=False, repr=False)
    gpu: int = field(init=False, repr=False)
    #: The column sums that :meth:`sum_codes` made, of this weight or of another with the same
    #: tensors, and whether products read them.
    _sums: ColumnSums | None = field(init=False, default=None, repr=False)
    _reads_sums: bool = field(init=False, default=False, repr=False)
    #: The versions of the vectors that matrices have copies of; None if they have none.
    _copied: tuple[int, ...] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        formats.check_bits(self.bits)
        formats.check_group_size(self.group_size)
        if self.n < 1 or self.k < 1:
            raise ValueError(
                f"the weight's shape is {(self.n, self.k)}; N and K must be at least 1"
            )
        object.__setattr__(self, "kernel_size", formats.check_kernel_size(self.kernel_size, self.k))
        if self.gated and (self.n % formats.GATED_ROWS or self.kernel_size):
            raise ValueError(
                f"gated is True, n is {self.n} and kernel_size {self.kernel_size}; gated weights "
                f"are matrices of a multiple of {formats.GATED_ROWS} outputs"
            )
        n_pad, k_pad = formats.padded_rows(self.rows), formats.padded_k(self.k, self.taps)
        if not isinstance(self.codes, Tensor):
            raise TypeError(f"codes is a {type(self.codes).__name__}; a torch.Tensor is expected")
        self._find_device()
        device = self.device
        vector = (formats.padded_groups(self.k, self.group_size, self.taps), n_pad)
        check_part("codes", self.codes, (n_pad * k_pad * self.bits // 8,), (torch.uint8,), device)
        check_part("scales", self.scales, vector, FLOAT_TYPES, device)
        if self.zeros is not None and self.offsets is not None:
            raise ValueError(
                "both zeros and offsets are given; a weight has integer zero points or real "
                "offsets, not both"
            )
        for name, value, shape, types in (
            ("zeros", self.zeros, vector, (torch.int8,)),
            ("offsets", self.offsets, vector, FLOAT_TYPES),
            ("bias", self.bias, (self.rows,), FLOAT_TYPES),
            ("perm", self.perm, (self.k,), (torch.int32,)),
        ):
            if value is not None:
                check_part(name, value, shape, types, device)
        check_order(self.perm, self.kernel_size)
        check_book(self.book, self.bits, self.zeros, self.offsets, device)
        for name, value in self.tensors().items():
            if not value.is_contiguous():
                raise ValueError(
                    f"{name} has strides {value.stride()}; a contiguous tensor is expected"
                )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by attribute name."""
        named = {name: getattr(self, name) for name in PARTS}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.n, self.k

    @property
    def rows(self) -> int:
        """Rows of the matrix: N, or 2 * N of a gated weight."""
        return 2 * self.n if self.gated else self.n

    @cached_property
    def eights(self) -> PackedWeight:
        """The matrix ``[rows, K]`` as it is packed, as a weight that is not gated; the tensors are
        shared.
        """
        return replace(self, n=self.rows, gated=False) if self.gated else self

    def check_plain(self, taker: str) -> None:
        """Raise ``ValueError`` if the weight is gated, which ``taker`` does not take."""
        if self.gated:
            raise ValueError(
                f"the weight is gated, gate and up packed as one, which {taker} does not take; "
                "reorder(weight.unpack()) is a plain weight of the rows of both"
            )

    @property
    def taps(self) -> int:
        """As in :class:`QuantizedWeight`."""
        return math.prod(self.kernel_size)

    @property
    def matrix(self) -> PackedWeight:
        """A convolution's weight as the matrix ``[N, taps * padded channels]`` that its tiles hold;
        the codes are shared.

        The columns behind a tap's channels have codes of value zero but undefined zero points and
        offsets: x must be zero there.
        """
        return self.group_matrices(1)[0]

    def group_matrices(self, groups: int) -> tuple[PackedWeight, ...]:
        """:attr:`matrix` for each group of the convolution, whose output channels are a multiple
        of 64; made once, except during the capture of a CUDA graph and of tensors whose writes
        torch does not count.
        """
        self.update_copies()
        if groups in self._matrices:
            return self._matrices[groups]
        made, versions = self._make_matrices(groups), self._versions()
        own = self._vectors().values()
        copies = any(all(v is not t for t in own) for m in made for v in m._vectors().values())
        if not copies or (versions is not None and not self._is_captured()):
            self._matrices[groups] = made
            object.__setattr__(self, "_copied", versions if copies else self._copied)
        return made

    def _make_matrices(self, groups: int) -> tuple[PackedWeight, ...]:
        """What :meth:`group_matrices` returns, of the present tensors."""
        with torch.inference_mode(False):  # calls outside of it write the copies, too
            whole, n = self._as_matrix(), self.n // groups
            if groups == 1:
                return (whole,)
            return tuple(whole.row_panels(i * n, i * n + n) for i in range(groups))

    def _as_matrix(self) -> PackedWeight:
        """What :attr:`matrix` is, of the present tensors."""
        if self.taps == 1:
            return replace(self, kernel_size=())
        columns = formats.padded_k(self.k, self.taps)
        if self.group_size == -1:
            return replace(self, k=columns, kernel_size=())
        # A tap's last group may end inside of a tile, and the matrix has no short
        # groups but the last.
        group_size = math.gcd(columns // self.taps, self.group_size)
        changed: dict[str, Any] = {}
        if group_size != self.group_size:
            by_tap = (
                torch.arange(0, columns // self.taps, group_size, device=self.device)
                // self.group_size
            )
            taps = torch.arange(self.taps, device=self.device)[:, None] * (
                len(self.scales) // self.taps
            )
            groups = (taps + by_tap).flatten()
            changed = {name: vector[groups] for name, vector in self._vectors().items()}
        return replace(self, k=columns, kernel_size=(), group_size=group_size, **changed)

    def update_copies(self) -> None:
        """Bring what :attr:`matrix` and :meth:`group_matrices` copied of the scales, zero points
        and offsets up to date after a write to these; waits for the GPU then.
        """
        if self._copied is None or (versions := self._versions()) == self._copied:
            return
        for groups, matrices in self._matrices.items():
            for old, new in zip(matrices, self._make_matrices(groups), strict=True):
                for name, vector in new._vectors().items():
                    old._vectors()[name].copy_(vector)
        if self._is_captured():  # the copies are written when the CUDA graph runs
            return
        if self.gpu >= 0:
            torch.cuda.current_stream(self.device).synchronize()  # other streams may read them
        object.__setattr__(self, "_copied", versions)

    def _vectors(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors().items() if name in _VECTORS}

    def _versions(self) -> tuple[int, ...] | None:
        """How often torch saw the vectors written; None where it does not count."""
        vectors = self._vectors().values()
        if any(t.is_inference() for t in vectors):
            return None
        return tuple(t._version for t in vectors)

    def _is_captured(self) -> bool:
        return self.gpu >= 0 and torch.cuda.is_current_stream_capturing()

    @cached_property
    def _matrices(self) -> dict[int, tuple[PackedWeight, ...]]:
        """What :meth:`group_matrices` made, by the number of groups."""
        return {}

    @cached_property
    def conv_launches(self) -> dict[Any, Any]:
        """What a GPU launches for convolutions with this weight, by how they were called: made by
        :mod:`cutlass_ops.ops.conv_gpu`.
        """
        return {}

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the tensors take."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def native(self) -> _C.PackedWeight:
        """The pointers and sizes that kernels take; made again only where torch moved a tensor."""
        found: _C.PackedWeight | None = self.__dict__.get("_native")
        if found is None or not found.is_current():
            found = self.__dict__["_native"] = self._make_native()
        return found

    def _make_native(self) -> _C.PackedWeight:
        for name, value in self.tensors().items():
            if value.device.type == "cuda" and name != "bias" and value.data_ptr() % 16:
                raise ValueError(
                    f"{name} starts at an address that is no multiple of 16 bytes; kernels "
                    "load 16 at a time"
                )
        kind = format_of(self.bits, self.book)
        pointers = {name: value.data_ptr() for name, value in self.tensors().items()}
        native = _C.PackedWeight(
            pointers["codes"],
            pointers["scales"],
            pointers.get("zeros", 0),
            pointers.get("offsets", 0),
            pointers.get("perm", 0),
            pointers["book"] if kind.has_book and kind.book is None else 0,
            self.rows,
            self.k,
            getattr(_C.Format, kind.name),
            # kernels count in 32 bits
            -1 if self.group_size > formats.padded_k(self.k) else self.group_size,
            _NATIVE_TYPES[self.scales.dtype],
            _NATIVE_TYPES[None if self.offsets is None else self.offsets.dtype],
            self.gated,
            pointers.get("bias", 0),
            _NATIVE_TYPES[None if self.bias is None else self.bias.dtype],
            self.device,
            self.gpu,
            {name: getattr(self, name) for name in PARTS},
        )
        if self._sums is None and _COLUMN_SUMS:
            object.__setattr__(self, "_sums", _COLUMN_SUMS.get(self._key()))
        if self._sums is not None and self._sums.current():
            native.set_sums(self._sums.memory.data_ptr())
            object.__setattr__(self, "_reads_sums", True)
        return native

    @cached_property
    def takes_sums(self) -> bool:
        """Whether :meth:`sum_codes` does anything: only kernels for Hopper read column sums, and
        only of 4 or 8 bits in groups of 128 or more without offsets.

        Sums of tensors that were made under ``torch.inference_mode`` are not kept: torch does not
        count the writes to them.
        """
        plain = not self.kernel_size and self.offsets is None and self.book is None
        plain = plain and self.bits > 2 and (self.zeros is None or self.bits == 4)
        groups = self.group_size == -1 or self.group_size % 128 == 0
        if not (
            plain
            and groups
            and self.gpu >= 0
            and torch.cuda.get_device_capability(self.gpu) == (9, 0)
        ):
            return False
        # A tracer's placeholders have no memory to sum.
        return all(
            type(t) in (Tensor, torch.nn.Parameter) and not t.is_inference() for t in self._summed()
        )

    def sum_codes(self) -> None:
        """Sum every 128 codes of each row on the weight's GPU, and keep the sums: some 4 bytes for
        128 weights.

        Products of 129 rows or more of int8 activations with zero points read these column sums,
        and make them in their own scratch memory where none are kept: the results have the same
        bits. Making them takes a kernel that reads the whole weight, which such products then save.
        A :class:`cutlass_ops.MixedLinear` whose activations have zero points calls it when it is
        made, moved or loaded.

        It waits for the GPU, and does nothing while a CUDA graph is captured. After a write to the
        weight's tensors, products notice it and make the sums themselves until this is called
        again. Captured CUDA graphs whose products read kept sums do not notice it: call this again
        before they are replayed, which writes the new sums to the same memory.
        """
        if not self.takes_sums or torch.cuda.is_current_stream_capturing():
            return
        native = self.native  # finds what is kept for the same tensors
        sums = self._sums
        if sums is None:
            sums = ColumnSums(self.codes.new_empty(_C.colsum_bytes(native)), self._summed())
        if not sums.current():
            versions = sums.now()
            stream = torch.cuda.current_stream(self.device)
            _C.weight_colsum(native, sums.memory.data_ptr(), stream.cuda_stream)
            stream.synchronize()  # other streams may read them
            sums.versions = versions
        _COLUMN_SUMS[self._key()] = sums
        object.__setattr__(self, "_sums", sums)
        self.check_sums()

    def share_sums(self, other: PackedWeight) -> None:
        """Keep what ``other`` keeps, if it has the same codes, scales and zero points."""
        if self.codes is other.codes and self.scales is other.scales and self.zeros is other.zeros:
            object.__setattr__(self, "_sums", other._sums)

    def check_sums(self) -> None:
        """Have products read the kept sums if they belong to the tensors' present values, and not
        otherwise.
        """
        if self._sums is not None and (current := self._sums.current()) != self._reads_sums:
            self.native.set_sums(self._sums.memory.data_ptr() if current else 0)
            object.__setattr__(self, "_reads_sums", current)

    def _summed(self) -> tuple[Tensor, ...]:
        return (
            (self.codes, self.scales)
            if self.zeros is None
            else (self.codes, self.scales, self.zeros)
        )

    def _key(self) -> tuple[Any, ...]:
        addresses = tuple(t.data_ptr() for t in self._summed())
        return addresses, self.rows, self.k, self.bits, self.group_size, self.scales.dtype

    def _find_device(self) -> None:
        object.__setattr__(self, "device", self.codes.device)
        object.__setattr__(self, "gpu", self.codes.get_device() if self.codes.is_cuda else -1)

    def __getstate__(self) -> dict[str, Any]:
        # The state of copies and pickles: their tensors are others, and may be on another device.
        derived = (
            "_native",
            "device",
            "gpu",
            "_sums",
            "_reads_sums",
            "takes_sums",
            "_matrices",
            "_copied",
            "conv_launches",
            "eights",
        )
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _sums=None, _reads_sums=False, _copied=None)
        self._find_device()

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on ``device``; itself if it is there already."""
        if self.device == torch.device(device):
            return self
        moved: dict[str, Any] = dict.fromkeys(PARTS)
        moved.update({name: value.to(device) for name, value in self.tensors().items()})
        moved.update(
            n=self.n,
            k=self.k,
            bits=self.bits,
            group_size=self.group_size,
            kernel_size=self.kernel_size,
            gated=self.gated,
        )
        return PackedWeight(**moved)

    def row_panels(self, start: int, stop: int) -> PackedWeight:
        """Rows ``start`` to ``stop`` as a weight; ``start`` is a multiple of 64, ``stop`` one or N.

        Row panels of 64 are the outermost order of the codes, which are shared; group
        vectors are copied. For a gated weight see ``eights.row_panels``.
        """
        self.check_plain("row_panels")
        panel_bytes = self.codes.numel() // formats.padded_rows(self.n)
        end = formats.padded_rows(stop)
        changed: dict[str, Any] = {
            part: None
            if (vectors := getattr(self, part)) is None
            else vectors[:, start:end].contiguous()
            for part in _VECTORS
        }
        changed["bias"] = None if self.bias is None else self.bias[start:stop]
        return replace(
            self,
            codes=self.codes[start * panel_bytes : end * panel_bytes],
            n=stop - start,
            **changed,
        )

    def unpack(self) -> QuantizedWeight:
        """The canonical weight this was packed from, on the same device; exact. For a gated weight
        it is ``[2 * N, K]``, with gate's rows before up's.

        A weight on a GPU is unpacked there, on its current stream. :class:`QuantizedWeight` checks
        its values, which waits for the GPU.
        """
        if self.gated:
            return rows_of(self.eights.unpack(), gated_order(self.rows, self.device).argsort())
        taps, k_pad = self.taps, formats.padded_k(self.k, self.taps)
        codes = unpack_codes(self.codes, self.n, self.k if taps == 1 else k_pad, self.bits)
        if taps > 1:
            codes = codes.view(self.n, taps, k_pad // taps)[:, :, : self.k // taps].flatten(1)
        grouped_taps = 1 if self.group_size == -1 else taps
        groups = formats.group_count(self.k, self.group_size, taps) // grouped_taps
        position = group_vector_positions(self.n, self.device)

        def rows(vector: Tensor) -> Tensor:
            by_tap = vector.view(grouped_taps, -1, vector.shape[1])[:, :groups]
            return by_tap.flatten(0, 1)[:, position].t().contiguous()

        zeros = None
        if self.zeros is not None:
            zeros = (rows(self.zeros).to(torch.int16) + formats.midpoint(self.bits)).to(torch.uint8)
        return QuantizedWeight(
            codes=codes,
            scales=rows(self.scales),
            zeros=zeros,
            offsets=None if self.offsets is None else rows(self.offsets),
            bits=self.bits,
            group_size=self.group_size,
            bias=self.bias,
            perm=None if self.perm is None else self.perm.long(),
            book=self.book,
            kernel_size=self.kernel_size,
        )
