"""compressed-tensors, the format of llm-compressor: integer codes per tensor, channel, group or
block, MXFP4, NVFP4 and FP8.

Source: ``compressors/pack_quantized``, ``naive_quantized``, ``mxfp4`` and ``nvfp4`` of the package
``compressed-tensors``. Codes and zero points are signed; here both have ``2^(b-1)`` added, which
changes no value.

=========================  =========================================================================
tensor                     holds
=========================  =========================================================================
pack-quantized
``<m>.weight_packed``      int32 ``[N, ceil(K * b / 32)]``: code + 2^(b-1), dense along K, the first
                           in the lowest bits
``<m>.weight_shape``       integers ``[2]``: N and K, which need not fill the last word
``<m>.weight_scale``       floats ``[N, G]``, ``[N, 1]`` or ``[1]``: value = scale * (code - zero)
``<m>.weight_zero_point``  int32 ``[ceil(N * b / 32), G]``, packed along N; int8 ``[1]`` for a whole
                           tensor; absent if symmetric
``<m>.weight_g_idx``       int32 ``[K]``: the group of each input; of files written before 2026-08;
                           -1 means none
int-quantized
``<m>.weight``             int8 ``[N, K]``: the codes, of 8 bits (W8A8) or fewer (W4A8)
``<m>.weight_scale``       as above, or a scale for each block of rows and columns
``<m>.weight_zero_point``  int8, shaped as the scales; absent if symmetric
float-quantized
``<m>.weight``             F8_E4M3 ``[N, K]``
``<m>.weight_scale``       as of integers
mxfp4-pack-quantized
``<m>.weight_packed``      uint8 ``[N, K / 2]``: two E2M1 codes, the first in the low nibble
``<m>.weight_scale``       uint8 ``[N, K / 32]``, E8M0: the scale is 2^(e - 127); 255 is NaN
nvfp4-pack-quantized
``<m>.weight_packed``      as above
``<m>.weight_scale``       F8_E4M3 ``[N, K / 16]``: the scale is this over
                           ``<m>.weight_global_scale``, fp32 ``[1]``, rounded to fp32
=========================  =========================================================================

Which modules are quantised is seen from the tensors, which no list of targets or modules to ignore
contradicts. So are shapes and groups; the config gives the bits of int-quantized codes and settles
the rest. Where it says that weights are not symmetric, or are in act order ("group"), there must be
zero points, or groups of inputs. Scales for static activations (``input_scale`` and the like) are
not used, which ``Checkpoint.metadata`` says: activations stay floats, or are quantised online.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..weights import formats
from ..weights.weight import CheckpointError, QuantizedWeight
from . import grouped
from .checkpoint import Checkpoint, Entry, Quantized, read_weight
from .directory import Source
from .grouped import Stored
from .words import unpack_along_k, unpack_bytes

_INTEGERS = (torch.int64, torch.int32)
_CODES = (torch.int8, torch.float8_e4m3fn)
#: The most ways of an expression, as :func:`_ways` counts them: about a second of matching.
_MOST_WAYS = 26
_NVFP4_GROUP = 16
_STATIC = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
)
_PARTS = (
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
)


@dataclass(frozen=True)
class _Group:
    """One of ``config_groups``.

    Attributes:
        targets: names, "re:" with a regular expression, or classes.
        bits: of the weights; None if they stay floats.
        size: inputs in a group; None unless the strategy is "group".
        block: rows and columns of a block; None unless the strategy is "block".
        symmetric: whether there are no zero points.
        act_order: whether an index gives each input's group.
    """

    targets: tuple[str, ...]
    bits: int | None
    size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    act_order: bool


def recognise(source: Source) -> bool:
    """Whether the config says so or, where it says nothing, a module has the names
    of packed codes.
    """
    settings = source.quantization
    if settings.get("quant_method") is not None or "config_groups" in settings:
        return bool(settings.get("quant_method", "compressed-tensors") == "compressed-tensors")
    return any(
        {f"{m}.weight_scale", f"{m}.weight_shape"} <= source.tensors.keys()
        for m in source.modules("weight_packed")
    )


def read(source: Source) -> Checkpoint:
    """The modules with packed codes, and those with integer weights and a scale.

    Raises:
        CheckpointError: settings or shapes that are not the format's.
    """
    settings = source.quantization
    for name, kind in (
        ("sparsity_config", "sparse weights"),
        ("transform_config", "rotated activations"),
    ):
        held = settings.get(name)
        if held and not (
            isinstance(held, dict)
            and (held.get("format") == "dense" or held.get("config_groups") == {})
        ):
            raise CheckpointError(source.path, f"has a {name}: {kind} are not supported")
    groups = tuple(_groups(source))
    # A file's regular expressions may be made to take exponential time.
    deadline = time.monotonic() + 10
    entries = [
        _packed(source, module, groups, deadline)
        for module in source.modules("weight_packed", "weight_shape")
    ]
    for module in source.modules("weight"):
        if (
            f"{module}.weight_scale" in source.tensors
            or source.tensors[f"{module}.weight"].dtype in _CODES
        ):
            entries.append(_plain(source, module, groups, deadline))
    unused = sum(
        name.rpartition(".")[2] == "input_scale" for entry in entries for name in entry.parts
    )
    facts = {"static activations": f"input_scale of {unused} modules is not used"} if unused else {}
    found = source.checkpoint("compressed-tensors", entries, facts, (*_PARTS, *_STATIC))
    return replace(found, activations=_activations(source))


# ---- the config


def _groups(source: Source) -> Iterator[_Group]:
    groups = source.quantization.get("config_groups", {})
    if not isinstance(groups, dict):
        raise CheckpointError(
            source.path, f"config_groups is {groups!r:.100}; an object is expected"
        )
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, dict) else None
        weights = group.get("weights") if isinstance(group, dict) else None
        if (
            not isinstance(targets, list)
            or not all(isinstance(target, str) for target in targets)
            or not isinstance(weights, (dict, type(None)))
        ):
            raise CheckpointError(
                source.path,
                f"config group {name!r:.100} has no list of targets, or weights that are no object",
            )
        weights = weights or {}
        block = weights.get("block_structure")
        if weights.get("strategy") != "block" or not _is_block(block):
            block = None
        yield _Group(
            targets=tuple(targets),
            bits=grouped.setting(source, weights, ("num_bits",), None)
            if weights.get("type", "int") == "int"
            else None,
            size=grouped.setting(source, weights, ("group_size",), None),
            block=None if block is None else (block[0], block[1]),
            symmetric=_flag(source, weights, "symmetric", True),
            act_order=weights.get("actorder") in (True, "group"),
        )


def _flag(source: Source, settings: dict[str, Any], name: str, default: bool) -> bool:
    if (value := settings.get(name)) is None:
        return default
    if type(value) is not bool:
        raise CheckpointError(source.path, f"{name} is {value!r:.100}; true or false is expected")
    return value


def _check_promises(
    source: Source,
    module: str,
    groups: tuple[_Group, ...],
    deadline: float,
    counted: int,
    zeros: Entry | None,
    index: bool,
) -> None:
    """Refuse a module without the zero points or the act order that its config group states."""
    if all(group.symmetric and not group.act_order for group in groups):
        return
    scheme = _scheme(source, module, groups, deadline)
    if scheme is None:
        return
    if not scheme.symmetric and zeros is None:
        name = f"{module}.weight_zero_point"
        raise CheckpointError(
            source.path, "is missing; the config says that the weights are not symmetric", name
        )
    if scheme.act_order and not index and counted > 1:
        name = f"{module}.weight_g_idx"
        raise CheckpointError(
            source.path, 'is missing; the config says actorder "group", which needs it', name
        )


def _activations(source: Source) -> tuple[str, bool] | None:
    """Act_quant and act_symmetric by all config groups; None unless int8 with online scales."""
    found = set()
    for group in source.quantization.get("config_groups", {}).values():
        settings = group.get("input_activations")
        if not isinstance(settings, dict):
            return None
        online = (
            settings.get("dynamic") is True
            and settings.get("num_bits") == 8
            and settings.get("type", "int") == "int"
        )
        strategy = settings.get("strategy")
        mode = (
            {"token": "token", "group": "block"}.get(strategy)
            if isinstance(strategy, str) and online
            else None
        )
        found.add(None if mode is None else (mode, settings.get("symmetric", True) is not False))
    return found.pop() if len(found) == 1 else None


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )


def _scheme(
    source: Source, module: str, groups: tuple[_Group, ...], deadline: float
) -> _Group | None:
    """The config group of a module: by its name, an expression, its class, or the only one."""
    if len(groups) == 1:
        return groups[0]
    for kind in (_by_name, _by_expression, _by_class):
        for group in groups:
            for target in group.targets:
                if time.monotonic() > deadline:
                    raise CheckpointError(source.path, "its regular expressions take too long")
                if kind(source, module, target):
                    return group
    return None


def _by_name(source: Source, module: str, target: str) -> bool:
    return module == target


def _by_expression(source: Source, module: str, target: str) -> bool:
    if not target.startswith("re:"):
        return False
    expression = target.removeprefix("re:")
    if len(module) > 256 or len(expression) > 1000 or _ways(expression, len(module)) > _MOST_WAYS:
        raise CheckpointError(
            source.path,
            f"the target {target!r:.100} is an expression that may take too long on "
            f"{module!r:.100}",
        )
    try:
        return re.match(expression, module) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            source.path, f"the target {target!r:.100} is no regular expression: {error}"
        ) from error


def _ways(expression: str, length: int) -> float:
    """The binary logarithm of the ways in which ``re`` may try to match so many characters, at
    most: it tries one after the other.

    Repetitions share the characters; each "?" has two ways, a group those of its alternatives. A
    repeated group has no bound, nor have expressions with the flag "x", which can hide one.
    """
    bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", expression, flags=re.DOTALL)
    if re.search(r"\)[*+{]|\(\?[a-zA-Z-]*x", bare):
        return math.inf
    bare = bare.replace("(?", "(")
    repeated = len(re.findall(r"[*+{]", bare))
    ways = math.log2(math.comb(length + repeated, repeated)) + bare.count("?")
    alternatives = [1]
    for character in bare:
        if character == "(":
            alternatives.append(1)
        elif character == "|":
            alternatives[-1] += 1
        elif character == ")" and len(alternatives) > 1:
            ways += math.log2(alternatives.pop())
    return ways + sum(map(math.log2, alternatives))


def _by_class(source: Source, module: str, target: str) -> bool:
    return target == "Linear"


# ---- modules


def _packed(source: Source, module: str, groups: tuple[_Group, ...], deadline: float) -> Entry:
    codes = grouped.checked(source, f"{module}.weight_packed", (torch.int32, torch.uint8))
    if codes.dtype == torch.uint8:
        return _fp4(source, codes, module)
    if len(codes.shape) != 2:
        return _unsupported(
            source,
            codes,
            module,
            codes.shape,
            f"has {len(codes.shape)} dimensions; a linear weight has two",
        )
    shape = grouped.checked(source, f"{module}.weight_shape", _INTEGERS, (2,))
    n, k = (int(size) for size in shape.values().tolist())
    if n < 1 or k < 1 or n != codes.shape[0]:
        raise CheckpointError(
            source.path, f"is {[n, k]}; the codes are {list(codes.shape)}", shape.name
        )
    bits = _packed_bits(source, codes, module, k, groups, deadline)
    scales = grouped.float_scales(source, f"{module}.weight_scale")
    vector = _vector(source, scales, n, k, None)
    zeros = source.tensors.get(f"{module}.weight_zero_point")
    if zeros is not None:
        if zeros.dtype == torch.int32 and scales.shape != (1,):
            grouped.checked(source, zeros.name, (torch.int32,), (-(-n * bits // 32), vector[1]))
        else:
            grouped.checked(source, zeros.name, (torch.int8,), scales.shape)
    parts = [codes.name, scales.name, shape.name]
    index = None
    if (name := f"{module}.weight_g_idx") in source.tensors:
        parts.append(name)
        if bool((grouped.checked(source, name, _INTEGERS, (k,)).values() != -1).any()):
            index = partial(grouped.group_index, source, name, k, vector[1])
    _check_promises(
        source,
        module,
        groups,
        deadline,
        vector[1],
        zeros,
        f"{module}.weight_g_idx" in source.tensors,
    )
    return _entry(
        source,
        module,
        "pack-quantized",
        (n, k),
        bits,
        parts,
        scales,
        zeros,
        partial(_read_packed, codes, scales, zeros, (n, k), bits),
        _size(source, scales, k, vector[1], groups, index is not None),
        index,
    )


def _fp4(source: Source, codes: Entry, module: str) -> Entry:
    """MXFP4, or NVFP4 where there is a global scale."""
    if f"{module}.weight_zero_point" in source.tensors:
        what = "holds floats of 4 bits with zero points, which is not supported"
        return _unsupported(source, codes, module, codes.shape, what)
    if len(codes.shape) != 2 or 0 in codes.shape:
        return _unsupported(
            source,
            codes,
            module,
            codes.shape,
            f"is {list(codes.shape)}; a linear weight is [N, K / 2]",
        )
    n, k = codes.shape[0], 2 * codes.shape[1]
    has_global = f"{module}.weight_global_scale" in source.tensors
    size = _NVFP4_GROUP if has_global else formats.MXFP4_GROUP
    scales = grouped.checked(
        source,
        f"{module}.weight_scale",
        (torch.float8_e4m3fn if has_global else torch.uint8,),
        (n, formats.group_count(k, size)),
    )
    whole = (
        grouped.checked(source, f"{module}.weight_global_scale", (torch.float32,), (1,))
        if has_global
        else None
    )
    parts = (
        codes.name,
        scales.name,
        *(() if whole is None else (whole.name,)),
        *(name for part in _STATIC if (name := f"{module}.{part}") in source.tensors),
    )
    dtypes = {
        "scales": torch.bfloat16 if whole is None else torch.float32,
        "book": torch.float32,
    }
    read = partial(_read_fp4, source, codes, scales, whole, size)
    return Entry(
        name=module,
        source=codes.name,
        kind=f"{'mxfp4' if whole is None else 'nvfp4'}-pack-quantized",
        shape=(n, k),
        nbytes=sum(source.tensors[part].nbytes for part in parts),
        dtype=torch.float32,
        values=lambda: reference.dequantize_weight(read(), torch.float32),
        parts=parts,
        quantized=Quantized(bits=4, group_size=size, dtypes=dtypes, read=read),
    )


def _read_fp4(
    source: Source, codes: Entry, scales: Entry, whole: Entry | None, size: int
) -> QuantizedWeight:
    if whole is None:
        exponents = scales.values()
        if bool((exponents == 255).any()):
            row, group = (exponents == 255).nonzero()[0].tolist()
            raise CheckpointError(
                source.path, f"[{row}, {group}] is 255, which is NaN", scales.name
            )
        factors = grouped.powers_of_two(exponents)
    else:
        divisor = whole.values()
        if not 0 < abs(float(divisor)) < math.inf:
            raise CheckpointError(
                source.path, f"is {float(divisor)}; a number other than 0 is expected", whole.name
            )
        factors = scales.values().float() / divisor
    unpacked = unpack_bytes(codes.values(), codes.shape[1], in_turn=True, high_first=False)
    book = torch.tensor(formats.E2M1, dtype=torch.float32, device="cpu")
    return read_weight(
        source.path,
        codes.name,
        lambda: QuantizedWeight(unpacked, factors, bits=4, group_size=size, book=book),
    )


def _packed_bits(
    source: Source, codes: Entry, module: str, k: int, groups: tuple[_Group, ...], deadline: float
) -> int:
    """The bits by which k codes fill the words, if the config has such."""
    fitting = {bits for bits in range(1, 9) if -(-k * bits // 32) == codes.shape[1]}
    stated = (
        {group.bits for group in groups if group.bits in fitting} if groups else fitting & {4, 8}
    )
    if len(stated) > 1:
        scheme = _scheme(source, module, groups, deadline)
        stated &= {scheme.bits if scheme else None}
    if len(stated) != 1:
        known = ", ".join(str(group.bits) for group in groups) or "none"
        raise CheckpointError(
            source.path,
            f"has {codes.shape[1]} words for {k} codes, which fits no bits of its config ({known})",
            codes.name,
        )
    return stated.pop() or 0


def _plain(source: Source, module: str, groups: tuple[_Group, ...], deadline: float) -> Entry:
    codes = source.tensors[f"{module}.weight"]
    if codes.dtype not in _CODES:
        what = f"holds {codes.kind} beside a scale; int8 and F8_E4M3 are supported"
        return _unsupported(source, codes, module, codes.shape, what)
    if len(codes.shape) != 2 or 0 in codes.shape:
        return _unsupported(
            source, codes, module, codes.shape, f"is {list(codes.shape)}; a linear weight is [N, K]"
        )
    n, k = codes.shape
    floats = codes.dtype == torch.float8_e4m3fn
    bits = set() if floats else {group.bits for group in groups if group.bits is not None}
    scheme = (
        _scheme(source, module, groups, deadline)
        if len(bits) > 1 or any(group.block for group in groups)
        else None
    )
    if len(bits) > 1:
        bits = {scheme.bits if scheme and scheme.bits else 8}
    b = bits.pop() if bits else 8
    if not 1 <= b <= 8:
        return _unsupported(source, codes, module, codes.shape, f"has codes of {b} bits")
    scales = grouped.float_scales(source, f"{module}.weight_scale")
    block = (min(scheme.block[0], n), min(scheme.block[1], k)) if scheme and scheme.block else None
    if block and scales.shape != (-(-n // block[0]), -(-k // block[1])):
        block = None
    vector = _vector(source, scales, n, k, block)
    zeros = source.tensors.get(f"{module}.weight_zero_point")
    size = block[1] if block else _size(source, scales, k, vector[1], groups, False)
    if floats:
        if zeros is not None:
            raise CheckpointError(
                source.path, "belongs to floats of 8 bits, which have none", zeros.name
            )
        return _entry(
            source,
            module,
            "float-quantized",
            (n, k),
            8,
            [codes.name, scales.name],
            scales,
            None,
            lambda: Stored(
                codes.values().view(torch.uint8), _spread(scales.values(), n, block), None
            ),
            size,
            None,
            formats.E4M3,
        )
    if zeros is not None:
        grouped.checked(source, zeros.name, (torch.int8,), scales.shape)
    _check_promises(source, module, groups, deadline, 1, zeros, False)
    return _entry(
        source,
        module,
        "int-quantized",
        (n, k),
        b,
        [codes.name, scales.name],
        scales,
        zeros,
        partial(_read_plain, source, codes, scales, zeros, b, block),
        size,
        None,
    )


def _entry(
    source: Source,
    module: str,
    kind: str,
    shape: tuple[int, int],
    bits: int,
    parts: list[str],
    scales: Entry,
    zeros: Entry | None,
    read: Callable[[], Stored],
    size: int,
    index: Callable[[], Tensor] | None,
    book: tuple[float, ...] | None = None,
) -> Entry:
    others = [name for part in _STATIC if (name := f"{module}.{part}") in source.tensors]
    return grouped.entry(
        source,
        module,
        f"{kind} {bits} bits",
        shape,
        bits,
        size,
        (*parts, *([zeros.name] if zeros else ()), *others),
        scales=scales.dtype,
        has_zeros=zeros is not None,
        read=read,
        index=index,
        book=book,
    )


def _unsupported(
    source: Source, codes: Entry, module: str, shape: tuple[int, ...], what: str
) -> Entry:
    def values() -> Tensor:
        raise CheckpointError(source.path, what, codes.name)

    parts = [
        name
        for name in source.tensors
        if name.rpartition(".")[0] == module and name != f"{module}.bias"
    ]
    return Entry(
        name=module,
        source=codes.name,
        kind=codes.kind,
        shape=shape,
        nbytes=codes.nbytes,
        dtype=torch.float32,
        values=values,
        problem=what,
        has_values=False,
        parts=tuple(parts),
    )


def _vector(
    source: Source, scales: Entry, n: int, k: int, block: tuple[int, int] | None
) -> tuple[int, int]:
    """The shape of the scales after they are repeated for all rows."""
    if block:
        return n, scales.shape[1]
    if scales.shape in ((), (1,), (1, 1)):
        return n, 1
    if len(scales.shape) == 2 and scales.shape[0] == n and 1 <= scales.shape[1] <= k:
        return n, scales.shape[1]
    raise CheckpointError(
        source.path,
        f"is {list(scales.shape)}; for {[n, k]} codes [N, G] or [1] is expected",
        scales.name,
    )


def _size(
    source: Source,
    scales: Entry,
    k: int,
    groups: int,
    stated: tuple[_Group, ...],
    any_lengths: bool,
) -> int:
    sizes = [group.size or -1 for group in stated]
    size = grouped.group_size(k, groups, sizes)
    if size is None and any_lengths:
        return next((size for size in sizes if size > 0), -(-k // groups))
    if size is None:
        raise CheckpointError(
            source.path,
            f"is {list(scales.shape)} for K = {k}; no known size of groups fits",
            scales.name,
        )
    return size


def _spread(values: Tensor, n: int, block: tuple[int, int] | None) -> Tensor:
    if block:
        return values.repeat_interleave(block[0], 0)[:n]
    return (values if values.dim() == 2 else values.view(1, 1)).expand(n, -1)


def _read_packed(
    codes: Entry, scales: Entry, zeros: Entry | None, shape: tuple[int, int], bits: int
) -> Stored:
    n, k = shape
    spread = _spread(scales.values(), n, None)
    z = None
    if zeros is not None and zeros.dtype == torch.int32:
        z = unpack_along_k(zeros.values().t(), n, bits).t()
    elif zeros is not None:
        z = _unsigned(_spread(zeros.values(), n, None), bits)
    return Stored(unpack_along_k(codes.values(), k, bits), spread, z)


def _read_plain(
    source: Source,
    codes: Entry,
    scales: Entry,
    zeros: Entry | None,
    bits: int,
    block: tuple[int, int] | None,
) -> Stored:
    values = codes.values()
    half = formats.midpoint(bits)
    if bits < 8 and not -half <= int(values.min()) <= int(values.max()) < half:
        raise CheckpointError(
            source.path,
            f"holds {int(values.min())} to {int(values.max())}; {bits} bits are {-half} to "
            f"{half - 1}",
            codes.name,
        )
    n = codes.shape[0]
    z = None if zeros is None else _unsigned(_spread(zeros.values(), n, block), bits)
    return Stored(_unsigned(values, bits), _spread(scales.values(), n, block), z)


def _unsigned(values: Tensor, bits: int) -> Tensor:
    # Modulo 256, so that codes of 8 bits wrap.
    return values.view(torch.uint8) + formats.midpoint(bits)
