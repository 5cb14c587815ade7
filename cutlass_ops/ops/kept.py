"""Other orders of packed weights that products read: made once and kept as long as the
packed codes live.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..weights.packed_weight import PackedWeight


class _Form(NamedTuple):
    """What was made of a weight.

    Attributes:
        others: the other tensors that it was made of, without the codes; while they live, no others
            lie at their addresses.
        versions: of the codes and the others, when it was made.
        made: the tensors in the other order.
    """

    others: tuple[Tensor, ...]
    versions: tuple[int, ...]
    made: tuple[Tensor, ...]


#: By the packed codes, then by a form's name and where the other tensors lie.
_FORMS: Any = WeakTensorKeyDictionary()


def _others(weight: PackedWeight, parts: tuple[str, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor for part, tensor in weight.tensors().items() if part in parts)


def _recorded(tensors: tuple[Tensor, ...]) -> bool:
    """Whether torch records what is written to them."""
    return not any(tensor.is_inference() for tensor in tensors)


def captures(weight: PackedWeight) -> bool:
    """Whether a CUDA graph is being captured that would record what is made of the weight."""
    return weight.gpu >= 0 and torch.cuda.is_current_stream_capturing()


def keeps(weight: PackedWeight, parts: tuple[str, ...]) -> bool:
    """Whether ``form`` would keep now what is made of the codes and of these parts."""
    return _recorded((weight.codes, *_others(weight, parts))) and not captures(weight)


def form(
    weight: PackedWeight,
    parts: tuple[str, ...],
    name: tuple[Hashable, ...],
    make: Callable[[], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """What ``make`` returns, on the current device and stream; what is kept, if the weight is still
    what that was made of.

    To keep it waits for the GPU. Nothing is kept while a CUDA graph is captured, nor of inference
    tensors: torch does not record what is written to these.

    Args:
        weight: on any device.
        parts: its tensors that ``make`` reads, in addition to the codes.
        name: what tells this form from others of the same tensors, their sizes included.
        make: returns tensors that nothing else writes to.
    """
    others = _others(weight, parts)
    if not _recorded((weight.codes, *others)):
        return make()
    forms = _FORMS.setdefault(weight.codes, {})
    key = (name, *((tensor.data_ptr(), tensor.dtype) for tensor in others))
    versions = tuple(tensor._version for tensor in (weight.codes, *others))
    known = cast("_Form | None", forms.get(key))
    if known is not None and known.versions == versions:
        return known.made
    with torch.inference_mode(False):  # calls outside of it write what is kept, too
        made = make()
    if captures(weight):
        return made
    if known is not None:  # CUDA graphs read that memory
        for to, tensor in zip(known.made, made, strict=True):
            to.copy_(tensor)
        made = known.made
    if weight.gpu >= 0:
        torch.cuda.current_stream(weight.device).synchronize()  # other streams may read it
    forms[key] = _Form(others, versions, made)
    return made
