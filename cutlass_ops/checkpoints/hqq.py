"""HQQ: half-quadratic quantisation, 1 to 8 bits in groups along K, each with a real zero point.

Source: ``hqq/core/quantize.py`` and ``bitpack.py`` of the ``hqq`` package, whose state dict is
stored as it is.

========================  ============  ============================================================
tensor                    dtype         holds
========================  ============  ============================================================
``<m>.W_q``               uint8 or      codes of W, reshaped to [R, group_size] (axis 1).
                          int32, or     4 bits: row r of the first R/2 rows in the high half of byte
                          any viewed    row r, row r + R/2 in the low half; 1 and 2 bits in the same
                          as bytes      way, of eighths and quarters of R. 3 bits: tenths of R, of
                                        which the last may have rows of padding, in 30 bits of an
                                        int32, the first in the highest. 5, 6 and 8 bits: one a
                                        byte
``<m>.scale``, ``.zero``  float, R      value = (code - zero) * scale
``<m>.nbits``,            integers      scalars; ``shape`` is [N, K]
``.axis``, ``.shape``,
``.group_size``
``<m>.packing`` and       uint8         more of its state: texts one character a byte, booleans.
others                                  Only ``packing`` and ``quant_scale``, ``quant_zero`` are
                                        read
========================  ============  ============================================================

The zero points are real: the weight becomes one with offsets ``scale * (2^(b-1) - zero)``, in fp32,
each operation rounded once. Codes and scales are kept; codes of 1, 3, 5 and 6 bits become codes of
2, 4 and 8 around another midpoint.

With ``axis = 0`` a group runs down a column of W reshaped to [group_size, -1], across output
features: no scale along K gives that, so such a weight is refused unless one scale serves all of
it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import CheckpointError, QuantizedWeight
from .checkpoint import FLOAT_TYPES, Checkpoint, Entry, Quantized, read_weight
from .directory import Source
from .words import unpack_bytes

#: How codes of each width are packed, by the package's names.
_PACKINGS = {
    1: "1bit_u8",
    2: "2bit_u8",
    3: "3bit_32",
    4: "4bit_u8",
    5: "8bit_u8",
    6: "8bit_u8",
    8: "8bit_u8",
}
#: Every name that the package gives to a part of a module's state but "bias".
_STATE = (
    "W_q",
    "scale",
    "zero",
    "nbits",
    "group_size",
    "shape",
    "axis",
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "compute_dtype",
    "quant_scale",
    "quant_zero",
    "channel_wise",
    "optimize",
    "round_zero",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
)

#: The parts whose names no other module has.
_OWN = ("W_q", "nbits", "group_size", "axis", "packing", "quant_scale", "quant_zero", "zero")


def recognise(source: Source) -> bool:
    """Whether the config says so, or a module has the package's names of parts."""
    if (method := source.quantization.get("quant_method")) is not None:
        return bool(method == "hqq")
    return any(
        {f"{m}.scale", f"{m}.zero", f"{m}.nbits"} <= source.tensors.keys()
        for m in source.modules("W_q")
    )


def read(source: Source) -> Checkpoint:
    """The quantised modules, from the scalars of each; codes, scales and zero points are read at
    their first use.

    Raises:
        CheckpointError: a module whose state is incomplete or contradicts itself.
    """
    entries = [_entry(source, module) for module in source.modules("W_q", "nbits")]
    return source.checkpoint("hqq", entries, parts=_OWN)


def _entry(source: Source, module: str) -> Entry:
    n, k = _integers(source, f"{module}.shape", 2)
    if n < 1 or k < 1:
        raise CheckpointError(
            source.path, f"is {[n, k]}; [N, K], both at least 1, is expected", f"{module}.shape"
        )
    (axis,) = _integers(source, f"{module}.axis", 1)
    if axis not in (0, 1):
        raise CheckpointError(source.path, f"is {axis}; 0 and 1 are known", f"{module}.axis")
    parts = [
        source.tensors[name] for part in _STATE if (name := f"{module}.{part}") in source.tensors
    ]
    bits = _part(source, f"{module}.nbits").values().reshape(-1).tolist()[:2]
    entry = Entry(
        name=module,
        source=f"{module}.W_q",
        kind=f"HQQ, {', '.join(map(str, bits))} bits",
        shape=(n, k),
        nbytes=sum(part.nbytes for part in parts),
        dtype=torch.float32,
        values=partial(_refuse, source, module),
        has_values=False,
        parts=tuple(part.name for part in parts),
    )
    if len(bits) != 1 or bits[0] not in _PACKINGS:
        return replace(
            entry,
            problem=f"has codes of {bits} bits; HQQ's {', '.join(map(str, _PACKINGS))} bits are "
            "supported",
        )
    for flag in ("quant_scale", "quant_zero"):
        if f"{module}.{flag}" in source.tensors and _integers(source, f"{module}.{flag}", 1) != (
            0,
        ):
            return replace(
                entry,
                problem="has scales or zero points that are quantised themselves; that is not "
                "supported",
            )
    width = int(bits[0])  # a model with 1.58 bits has floats here
    name = f"{module}.packing"
    packing = bytes(_part(source, name).values().reshape(-1)[:16].to(torch.uint8).tolist()).decode(
        errors="replace"
    )
    if packing != _PACKINGS[width]:
        return replace(
            entry,
            problem=f"is packed as {packing!r}; {width} bits are expected as {_PACKINGS[width]!r}",
        )
    # Without a size the package divides the weight into its rows or, with axis 0, its columns.
    group = k if axis == 1 else n
    if f"{module}.group_size" in source.tensors:
        (group,) = _integers(source, f"{module}.group_size", 1)
    if group < 1 or n * k % group:
        raise CheckpointError(
            source.path,
            f"is {group}, which does not divide {n} x {k} weights",
            f"{module}.group_size",
        )
    codes, scale, zero = (_part(source, f"{module}.{part}") for part in ("W_q", "scale", "zero"))
    # W is packed as [R, group_size], or with axis 0 as [group_size, R].
    rows = n * k // group if axis == 1 else group
    expected = -(-rows // 10) * (n * k // rows) * 4 if width == 3 else n * k * _stored(width) // 8
    if codes.nbytes != expected:
        raise CheckpointError(
            source.path,
            f"has {codes.nbytes} bytes; {n} x {k} codes of {_stored(width)} bits take {expected}",
            codes.name,
        )
    for part in (scale, zero):
        if part.dtype not in FLOAT_TYPES or math.prod(part.shape) not in (1, n * k // group):
            raise CheckpointError(
                source.path,
                f"is {part.kind} {list(part.shape)}; {n * k // group} floats, one for each group "
                f"of {group}, are expected",
                part.name,
            )
    whole = math.prod(scale.shape) == math.prod(zero.shape) == 1
    entry = replace(
        entry, values=partial(_values, source, module, (n, k), width, group, axis), has_values=True
    )
    if axis == 0 and not whole:
        return replace(
            entry,
            problem="has groups that run across output features (axis 0); groups of input features "
            "(axis 1) are supported",
        )
    if whole or group == k:
        group = -1
    elif k % group:
        return replace(
            entry, problem=f"has groups of {group} that go on from one row of {k} to the next"
        )
    try:
        formats.check_group_size(group)
    except ValueError as error:
        return replace(entry, problem=str(error))
    return replace(
        entry,
        quantized=Quantized(
            bits=formats.width_of(width),
            group_size=group,
            dtypes={"scales": scale.dtype, "offsets": torch.float32},
            read=partial(_weight, source, module, (n, k), width, group),
        ),
    )


def _stored(bits: int) -> int:
    """The bits that a code of so many takes in a file; of 3 it is a tenth of 32."""
    return bits if bits <= 4 else 8


def _part(source: Source, name: str) -> Entry:
    if name not in source.tensors:
        raise CheckpointError(
            source.path, "is missing; every module that HQQ quantised has one", name
        )
    return source.tensors[name]


def _integers(source: Source, name: str, count: int) -> tuple[int, ...]:
    part = _part(source, name)
    if part.dtype.is_floating_point or part.dtype.is_complex or math.prod(part.shape) != count:
        raise CheckpointError(
            source.path, f"is {part.kind} {list(part.shape)}; {count} integers are expected", name
        )
    return tuple(int(value) for value in part.values().reshape(-1).tolist())


def _codes(source: Source, module: str, bits: int, count: int) -> Tensor:
    """The codes in W's own order, one a byte: uint8 ``[count]``."""
    packed = source.tensors[f"{module}.W_q"].values().reshape(-1).view(torch.uint8)
    if bits == 4:
        return unpack_bytes(packed[None], len(packed), in_turn=False, high_first=True)
    if bits == 3:
        words = packed.clone().view(torch.int32)  # at an address that fits
        return torch.cat([words >> shift & 7 for shift in range(27, -1, -3)])[:count].byte()
    if bits < 4:
        shifts = range(8 - bits, -1, -bits)
        return torch.cat([packed >> shift & (1 << bits) - 1 for shift in shifts])
    if bits < 8 and (largest := int(packed.max())) >> bits:
        raise CheckpointError(
            source.path,
            f"holds {largest}; with {bits} bits the largest is {(1 << bits) - 1}",
            f"{module}.W_q",
        )
    return packed


def _weight(
    source: Source, module: str, shape: tuple[int, int], bits: int, group: int
) -> QuantizedWeight:
    n, k = shape
    groups = formats.group_count(k, group)
    scale, zero = (
        source.tensors[f"{module}.{part}"].values().reshape(-1).expand(n * groups)
        for part in ("scale", "zero")
    )
    offsets = scale.float() * (formats.midpoint(bits) - zero.float())
    codes = _codes(source, module, bits, n * k).view(shape)
    width = formats.width_of(bits)
    if bits != width:
        codes = codes + (formats.midpoint(width) - formats.midpoint(bits))
    return read_weight(
        source.path,
        f"{module}.W_q",
        lambda: QuantizedWeight(
            codes,
            scale.reshape(n, groups),
            offsets=offsets.view(n, groups),
            bits=width,
            group_size=group,
        ),
    )


def _refuse(source: Source, module: str) -> Tensor:
    raise CheckpointError(source.path, "is of a kind whose values are not read", f"{module}.W_q")


def _values(
    source: Source, module: str, shape: tuple[int, int], bits: int, group: int, axis: int
) -> Tensor:
    values = _codes(source, module, bits, math.prod(shape)).float()
    values = values.view(-1, group) if axis == 1 else values.view(group, -1)
    scale, zero = (
        source.tensors[f"{module}.{part}"].values().float() for part in ("scale", "zero")
    )
    across = (-1, 1) if axis == 1 else (1, -1)
    return values.sub_(zero.reshape(across)).mul_(scale.reshape(across)).view(shape)
