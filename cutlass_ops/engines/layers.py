"""Packed weights in place of an engine's linear layers, and the conditions for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..nn import MixedLinear
from ..ops import gemm
from ..weights import formats
from ..weights.reorder import reorder
from ..weights.weight import QuantizedWeight, rows_of

_ACT_QUANT = ("none", "token", "block")
_SETTINGS = ("act_quant",)
#: The name of the submodule that holds a layer's packed weight.
MODULE = "cutlass_ops_linear"
#: The name of an attribute of layers that are to be packed with gate and up in eights: the
#: activation of their products.
ACTIVATION = "cutlass_ops_activation"
#: The columns, of eight, of the nibbles of an AWQ word, from the lowest nibble on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Engine:
    """The properties of an engine.

    Attributes:
        name: as messages have it.
        logger: with ``info_once``.
        settings: the user's, as :func:`checked_settings` returns them.
        is_cuda: whether the model runs on a GPU.
        batch_invariant: whether a row of a product must have the same bits in any batch.
        random_weights: whether it makes random weights and loads none.
        rank: of this process among those that share a layer.
        kv_place: which part of the keys and values of a layer a rank has, and of how many, by the
            layer, the rank and the number of ranks.
    """

    name: str
    logger: Any
    settings: Callable[[], dict[str, Any]]
    is_cuda: Callable[[], bool]
    batch_invariant: Callable[[], bool]
    random_weights: Callable[[], bool]
    rank: Callable[[torch.nn.Module], int]
    kv_place: Callable[[torch.nn.Module, int, int], tuple[int, int]]


def checked_settings(found: Any, source: str) -> dict[str, Any]:
    """The plugin's settings, which ``source`` has for the key "cutlass_ops".

    Raises:
        TypeError, ValueError: a setting that does not exist, or a value that it does not take.
    """
    if not isinstance(found, dict):
        raise TypeError(f"{source} has {found!r:.100} for cutlass_ops; an object is expected")
    for name in found:
        if name not in _SETTINGS:
            raise ValueError(
                f"{source} has {name!r:.100} for cutlass_ops; known are {', '.join(_SETTINGS)}"
            )
    if (mode := found.get("act_quant", "none")) not in _ACT_QUANT:
        raise ValueError(
            f"cutlass_ops' act_quant is {mode!r:.100}; supported are "
            f"{', '.join(map(repr, _ACT_QUANT))}"
        )
    return found


def reason_of_package(on_cpu: bool) -> str | None:
    """Why the package has no kernels for any layer; None if it has."""
    if on_cpu:
        if len(_C.cpu_instruction_sets()) == 1:  # the portable kernels, which are always there
            return "the package has no fast kernels for this CPU"
    elif not _C.built_with_cuda:
        return "the package was built without CUDA"
    return None


def reason_of_format(
    k: int, whole_k: int, group_size: int, act_order: bool, act_type: torch.dtype
) -> str | None:
    """Why a layer cannot be packed; None if it can.

    Args:
        k, whole_k: input features on this rank, and of the layer.
        group_size, act_order: of the weight.
        act_type: the dtype of x.
    """
    if act_type not in (torch.float16, torch.bfloat16):
        return f"activations are {act_type}; supported are float16 and bfloat16"
    if group_size not in (-1, k):
        try:
            formats.check_group_size(group_size)
        except ValueError as error:
            return str(error)
        if k % group_size:
            return f"a rank's {k} input features are not whole groups of {group_size}"
    if act_order and whole_k != k:
        return "the weight has an act order and its input features are split over ranks"
    return None


def keep(
    layer: torch.nn.Module,
    names: Iterable[str],
    weight: QuantizedWeight,
    act_quant: str,
    symmetric: bool,
) -> None:
    """Pack ``weight`` in place of the layer's parameters ``names``, the first of
    which has the codes.

    The packed codes stay under the codes' name, where engines' LoRA layers look for the device.
    """
    names = list(names)
    originals = [getattr(layer, name, None) for name in names]
    for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
        if any(parameter is original for original in originals):
            delattr(layer, name)
    del originals, parameter
    linear = packed_linear(layer, weight, act_quant, symmetric)
    layer.register_module(MODULE, linear)
    layer.register_parameter(names[0], torch.nn.Parameter(linear.codes, requires_grad=False))


def packed_linear(
    layer: torch.nn.Module, weight: QuantizedWeight, act_quant: str, symmetric: bool
) -> MixedLinear:
    """The packed weight of a layer, with gate and up in eights if the layer is to activate them."""
    activation = getattr(layer, ACTIVATION, None)
    if activation is None:
        return MixedLinear(reorder(weight), act_quant, symmetric)
    half = weight.n // 2
    both = [rows_of(weight, slice(half)), rows_of(weight, slice(half, None))]
    return MixedLinear(reorder(both, gated=True), act_quant, symmetric, activation)


@functools.cache
def extended(kind: type[Any], part: type[Any]) -> type[Any]:
    """A class of an engine with what ``part`` replaces, and ``original``.

    It has the same name, because engines choose a layer's loader by that name.
    """
    return type(kind.__name__, (part, kind), {"original": kind})


def changed(method: Any, kind: type[Any]) -> Any:
    """An object of class ``kind`` with the attributes of ``method``."""
    other = object.__new__(kind)
    other.__dict__.update(method.__dict__)
    return other


def product(
    layer: torch.nn.Module, x: Tensor, bias: Tensor | None, batch_invariant: bool
) -> Tensor:
    """x times the packed weight that a layer keeps, plus bias; activated if gate and up are in
    eights.
    """
    linear: Any = getattr(layer, MODULE)
    options = (linear.activation, linear.act_quant, linear.act_symmetric)
    return gemm.mixed_gemm(x, linear.packed, bias, *options, batch_invariant=batch_invariant)


def stored_weight(
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_size: int,
    columns_first: bool = False,
    awq: bool = False,
) -> QuantizedWeight:
    """A weight as the checkpoints of compressed-tensors, GPTQ and AWQ store it.

    Args:
        words: int32 ``[N, K * bits / 32]``; with ``columns_first`` ``[K * bits / 32, N]``, or
            AWQ's ``[K, N * bits / 32]``.
        scales: ``[N, G]``, or ``[G, N]`` with ``columns_first``.
        zeros: int32 ``[N * bits / 32, G]``, or ``[G, N * bits / 32]`` with ``columns_first``.
        bits, group_size: as in :class:`cutlass_ops.QuantizedWeight`.
        columns_first: K is the first dimension.
        awq: codes and zero points of a word are in AWQ's order, along N.
    """
    if awq:
        codes = _in_order(unpacked(words, 1, bits)).t()
    else:
        codes = unpacked(words, 0, bits).t() if columns_first else unpacked(words, 1, bits)
    points = None
    if zeros is not None:
        points = unpacked(zeros, 1 if columns_first else 0, bits)
        points = _in_order(points) if awq else points
        points = points.t() if columns_first else points
    return QuantizedWeight(
        codes=codes,
        scales=scales.t() if columns_first else scales,
        zeros=points,
        bits=bits,
        group_size=group_size,
    )


def _in_order(codes: Tensor) -> Tensor:
    eight = (codes.shape[0], -1, 8)
    out = torch.empty_like(codes)
    out.view(eight)[..., list(_AWQ_ORDER)] = codes.view(eight)
    return out


def int8_weight(stored: Tensor, scales: Tensor, widths: Iterable[int] | None) -> QuantizedWeight:
    """Signed 8-bit codes ``[N, K]`` with a scale for each row, or for each layer that
    an engine fused.

    Args:
        stored: int8.
        scales: one a row, or one for each of ``widths``.
        widths: rows of the fused layers; None if there is a scale for each row.
    """
    if widths is not None:
        counts = torch.tensor(list(widths), dtype=torch.int64, device=scales.device)
        scales = scales.reshape(-1).repeat_interleave(counts)
    codes = stored.view(torch.uint8) ^ 128  # the code is the signed value plus 128
    return QuantizedWeight(codes=codes, scales=scales.reshape(-1, 1), bits=8, group_size=-1)


def input_order(groups: Tensor, group_size: int, n: int) -> Tensor:
    """The act order by the group of each input feature.

    Args:
        groups: integers ``[K]``.
        group_size: input features of a group; -1 is all.
        n: output features, for the message.

    Raises:
        ValueError: groups of other sizes.
    """
    groups = groups.long()
    k = len(groups)
    perm = torch.argsort(groups, stable=True)
    size = k if group_size == -1 else group_size
    if not torch.equal(groups[perm], torch.arange(k, device=groups.device) // size):
        raise ValueError(
            f"the act order of a layer of {n} x {k} does not have groups of {size} input "
            "features each"
        )
    return perm


def unpacked(words: Tensor, dim: int, bits: int) -> Tensor:
    """Codes of int32 words that hold ``32 / bits`` of them along ``dim``, the first in the
    lowest bits; uint8.
    """
    count = 32 // bits
    rows, columns = words.shape
    out = words.new_empty(
        (rows, count, columns) if dim == 0 else (rows, columns, count), dtype=torch.uint8
    )
    # one code of each word at a time: all of them would take eight times the weight's bytes
    for i in range(count):
        out.select(1 if dim == 0 else 2, i).copy_((words >> (bits * i)) & ((1 << bits) - 1))
    return out.view((rows * count, columns) if dim == 0 else (rows, columns * count))
