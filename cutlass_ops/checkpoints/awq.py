"""AWQ, as AutoAWQ writes it: 4-bit codes in groups along K, each with an integer zero point.

Source: ``awq/modules/linear/gemm.py``, ``gemv.py`` and ``awq/utils/packing_utils.py`` of AutoAWQ.

=======  ==============  ============================  =============================================
version  tensor          dtype, shape                  holds
=======  ==============  ============================  =============================================
gemm     ``<m>.qweight``  int32 ``[K, N / 8]``          word j of a row: columns 8j + 0, 2, 4, 6, 1,
                                                       3, 5, 7
         ``<m>.qzeros``   int32 ``[G, N / 8]``          zero points, in the same order
         ``<m>.scales``   float ``[G, N]``              value = scale * (code - zero)
gemv     ``<m>.qweight``  int32 ``[N, K / 8]``          codes along K
         ``<m>.qzeros``   int32 ``[N, Z]``              zero points along the groups
         ``<m>.scales``   float ``[N, 8 * Z]``          columns from G on are padding
=======  ==============  ============================  =============================================

A stored zero point is the zero point; 0 is one as any other. Z is ceil(G / 8), rounded up to a
multiple of 2 for groups of 64 and of 4 for groups of 32.

Settings: ``bits`` or ``w_bit``, ``group_size`` or ``q_group_size`` (-1 is all of K), ``version`` or
``format``; in ``config.json``, or in the ``quant_config.json`` of older files. Missing settings
follow from the shapes of the tensors.
"""

from __future__ import annotations

from functools import partial

import torch

from ..weights.weight import CheckpointError
from . import grouped
from .checkpoint import Checkpoint, Entry
from .directory import Source
from .grouped import Stored
from .words import unpack_along_k, unpack_along_n

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_VERSIONS = ("gemm", "gemv")
_PARTS = ("qweight", "qzeros", "scales")


def recognise(source: Source) -> bool:
    """Whether the config says so or, if it says nothing, the tensors are AWQ's."""
    if (method := source.quantization.get("quant_method")) is not None:
        # AutoRound writes the same tensors.
        packing = source.quantization.get("packing_format")
        return method == "awq" or (method == "auto-round" and packing == "auto_round:auto_awq")
    return any(_layout(source, module) is not None for module in source.modules("qweight"))


def read(source: Source) -> Checkpoint:
    """The modules that have codes or zero points.

    Raises:
        CheckpointError: settings or shapes that are not AWQ's.
    """
    settings = source.quantization
    version = next(
        (settings[name] for name in ("version", "format") if settings.get(name) is not None), None
    )
    if version is not None and str(version).lower() not in _VERSIONS:
        raise CheckpointError(
            source.path, f"AWQ's version is {version!r:.100}; supported are {', '.join(_VERSIONS)}"
        )
    if (bits := grouped.setting(source, settings, ("bits", "w_bit"), 4)) != 4:
        raise CheckpointError(source.path, f"AWQ with {bits} bits; 4 are supported")
    size = grouped.setting(source, settings, ("group_size", "q_group_size"), None)
    stated = None if version is None else str(version).lower()
    entries = [
        _entry(source, module, stated, size) for module in source.modules("qweight", "qzeros")
    ]
    return source.checkpoint("awq", entries, parts=_PARTS)


def _layout(source: Source, module: str) -> str | None:
    """The version that a module's shapes belong to; None if they fit neither."""
    tensors = [source.tensors.get(f"{module}.{part}") for part in _PARTS]
    if (
        any(tensor is None or len(tensor.shape) != 2 for tensor in tensors)
        or f"{module}.g_idx" in source.tensors
    ):
        return None
    (rows, words), zeros, (first, second) = (
        tensor.shape for tensor in tensors if tensor is not None
    )
    if second == 8 * words and zeros == (first, words):
        return "gemm"
    if first == rows and zeros[0] == rows and second == 8 * zeros[1]:
        return "gemv"
    return None


def _entry(source: Source, module: str, version: str | None, stated: int | None) -> Entry:
    codes = grouped.checked(source, f"{module}.qweight", (torch.int32,))
    zeros = grouped.checked(source, f"{module}.qzeros", (torch.int32,))
    scales = grouped.float_scales(source, f"{module}.scales")
    layout = _layout(source, module)
    if layout is None or layout != (version or layout):
        shapes = ", ".join(
            f"{part.name.rpartition('.')[2]} {list(part.shape)}" for part in (codes, zeros, scales)
        )
        raise CheckpointError(
            source.path, f"has {shapes}, not the shapes of {version or 'gemm or gemv'}", codes.name
        )
    size: int | None
    if layout == "gemm":
        k, n = codes.shape[0], scales.shape[1]
        size = grouped.group_size(k, scales.shape[0], (stated,))
    else:
        n, k = codes.shape[0], 8 * codes.shape[1]
        # The width of padded groups does not give their number.
        sizes = (128, 64, 32) if stated is None else (k if stated == -1 else stated,)
        size = next(
            (
                size
                for size in sizes
                if size > 0 and _gemv_width(-(-k // size), size) == zeros.shape[1]
            ),
            None,
        )
    if size is None or 0 in (n, k):
        raise CheckpointError(
            source.path,
            f"is {list(scales.shape)} for {[n, k]} codes in groups of {stated}",
            scales.name,
        )
    return grouped.entry(
        source,
        module,
        f"AWQ {layout}",
        (n, k),
        4,
        min(size, k),
        (codes.name, zeros.name, scales.name),
        scales=scales.dtype,
        has_zeros=True,
        read=partial(_gemm if layout == "gemm" else _gemv, codes, zeros, scales, -(-k // size)),
    )


def _gemv_width(groups: int, size: int) -> int:
    words = (groups + 7) // 8
    multiple = 1 if size >= 128 else 2 if size == 64 else 4
    return (words + multiple - 1) // multiple * multiple


def _gemm(codes: Entry, zeros: Entry, scales: Entry, groups: int) -> Stored:
    return Stored(
        unpack_along_n(codes.values(), _ORDER),
        scales.values().t(),
        unpack_along_n(zeros.values(), _ORDER),
    )


def _gemv(codes: Entry, zeros: Entry, scales: Entry, groups: int) -> Stored:
    words = codes.values()
    return Stored(
        unpack_along_k(words, 8 * words.shape[1], 4),
        scales.values()[:, :groups],
        unpack_along_k(zeros.values(), 8 * zeros.shape[1], 4)[:, :groups],
    )
