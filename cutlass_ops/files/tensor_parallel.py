"""One model's weights split over several GPUs: which linear layer is split how, and its slices.

The words are transformers' and Megatron's (arXiv 1909.08053, section 3): a "colwise" layer computes
a part of the output features, so its rows ``[N / size, K]`` are split; a "rowwise" layer takes a
part of the input features, ``[N, K / size]``, and the products of all ranks are summed. Everything
else is on every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..weights import formats
from ..weights.weight import QuantizedWeight, rows_of

STYLES = ("colwise", "rowwise", "replicate")

#: Linear layers by the last part of their name; the rest is replicated.
_DEFAULT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), "rowwise"),
}
#: Several layers in one weight: a contiguous part of its rows is not the same part of each layer.
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "gate_up_proj")

_HEADS = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
}


def split_style(
    module: str, overrides: Sequence[tuple[str, str]] = (), experts: bool = False
) -> str:
    """How linear layer ``module`` is split: one of ``STYLES``.

    Args:
        module: its name.
        overrides: pairs of a regular expression, searched in the name, and a style; the first that
            matches holds.
        experts: whether it is a product of experts, whose gate and up are split one by one.

    Raises:
        ValueError: several layers in one, which a table of names cannot split.
    """
    for pattern, style in overrides:
        if re.search(pattern, module):
            return style
    last = module.rpartition(".")[2]
    if experts:
        return "colwise" if last == "gate_up_proj" else "rowwise"
    if last in _FUSED:
        raise ValueError(
            f"{module!r} is several layers in one, whose rows cannot be split as one layer's; "
            f"to have all of it on every rank: {_replicated(last)}"
        )
    return _DEFAULT.get(last, "replicate")


def parse_overrides(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """``REGEX=STYLE`` of the command line, as :func:`split_style` takes them.

    Raises:
        ValueError: another form, another style, or not a regular expression.
    """
    overrides = []
    for text in texts:
        pattern, equals, style = text.rpartition("=")
        if not equals or style not in STYLES:
            raise ValueError(
                f"a split is {text!r}; REGEX=STYLE is expected, STYLE being {', '.join(STYLES)}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"a split is {text!r}, which has no regular expression: {error}"
            ) from error
        overrides.append((pattern, style))
    return tuple(overrides)


def check_heads(module: str, config: Mapping[str, Any], size: int) -> None:
    """Refuse to cut an attention head in two.

    Raises:
        ValueError: the model's config gives a number of heads that ``size`` does not divide.
    """
    key = _HEADS.get(module.rpartition(".")[2])
    heads = config.get(key) if key else None
    if type(heads) is int and heads % size:
        layers = [name for name, other in _HEADS.items() if other == key]
        raise ValueError(
            f"{module!r} cannot be split over {size} ranks: config.json has {key} {heads}; "
            f"to have all of them on every rank: {_replicated(*layers)}"
        )


def _replicated(*layers: str) -> str:
    """The option by which layers are not split."""
    return f"--tp-split '{'|'.join(layers)}=replicate'"


def sliced_format(n: int, k: int, group_size: int, style: str, size: int) -> tuple[int, int, int]:
    """N, K and group size of each rank's slice of a weight.

    Where a rank's columns end inside a group, groups become shorter (64, 32 or 16) and repeat their
    scales: the values are the same.

    Raises:
        ValueError: ``size`` does not divide it, or a boundary lies inside a run of 16 columns.
    """
    if style == "colwise":
        if n % size:
            raise ValueError(f"{n} output features cannot be split over {size} ranks")
        return n // size, k, group_size
    if style == "rowwise":
        if k % size:
            raise ValueError(f"{k} input features cannot be split over {size} ranks")
        if group_size != -1 and size > 1:
            common = math.gcd(k // size, group_size)
            group = common if common % 128 == 0 else math.gcd(common, 64)
            if group < formats.SHORT_GROUPS[0]:
                raise ValueError(
                    f"{k} input features in groups of {group_size} cannot be split over "
                    f"{size} ranks: "
                    f"the parts of {k // size} would share groups of {group}; at least "
                    f"{formats.SHORT_GROUPS[0]} are supported"
                )
            group_size = group
        return n, k // size, group_size
    return n, k, group_size


def slice_weight(weight: QuantizedWeight, style: str, rank: int, size: int) -> QuantizedWeight:
    """The part of a weight that ``rank`` of ``size`` holds; views where possible.

    The bias of a rowwise layer is on rank 0; the others have -0.0, so that the sum over ranks adds
    it once.

    Raises:
        ValueError: it cannot be split so (see :func:`sliced_format`), or along an act order.
    """
    n, k, group_size = sliced_format(weight.n, weight.k, weight.group_size, style, size)
    if size == 1 or style == "replicate":
        return weight
    if style == "colwise":
        return rows_of(weight, slice(rank * n, (rank + 1) * n))
    if weight.perm is not None:
        raise ValueError(ACT_ORDER)
    first = rank * k
    step = k if group_size == -1 else group_size
    groups = torch.arange(first, first + k, step, device=weight.device)
    groups = torch.zeros_like(groups) if weight.group_size == -1 else groups // weight.group_size
    parts = {name: getattr(weight, name) for name in ("scales", "zeros", "offsets")}
    changed: dict[str, Any] = {
        name: part[:, groups] for name, part in parts.items() if part is not None
    }
    if weight.bias is not None:
        changed["bias"] = _rowwise_bias(weight.bias, rank)
    return replace(
        weight, codes=weight.codes[:, first : first + k], group_size=group_size, **changed
    )


#: Why a weight with act order is not split along K.
ACT_ORDER = (
    "it has an act order: the groups of its sorted columns are spread over all input features, so "
    "no rank's columns "
    "are whole groups; replicate it with --tp-split 'NAME=replicate' (its input has then "
    "to be gathered), "
    "or take a checkpoint without act order"
)


def slice_shape(shape: tuple[int, ...], style: str, size: int) -> tuple[int, ...]:
    """Shape of a rank's part of a weight ``[N, K]`` or bias ``[N]``; ValueError as above."""
    n, k, _ = sliced_format(shape[0], shape[1] if len(shape) == 2 else size, -1, style, size)
    return (n, k) if len(shape) == 2 else (n,)


def slice_tensor(tensor: Tensor, style: str, rank: int, size: int) -> Tensor:
    """A rank's part of a float layer's weight ``[N, K]`` or bias ``[N]``."""
    if size == 1 or style == "replicate":
        return tensor
    if style == "rowwise" and tensor.dim() == 1:
        return _rowwise_bias(tensor, rank)
    return tensor.chunk(size, dim=0 if style == "colwise" else 1)[rank]


def _rowwise_bias(bias: Tensor, rank: int) -> Tensor:
    return bias if rank == 0 else torch.full_like(bias, -0.0)
