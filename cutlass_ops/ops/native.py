"""Arguments of the operators as the extension takes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor

from .. import _C, reference
from ..reference.experts import CLAMPED_SWIGLU

DATA_TYPES = {
    torch.float32: _C.DataType.float32,
    torch.float16: _C.DataType.float16,
    torch.bfloat16: _C.DataType.bfloat16,
}
ACT_QUANT = {"none": _C.ActQuant.none, "token": _C.ActQuant.token, "block": _C.ActQuant.block}
CONV_ACT_QUANT = {**ACT_QUANT, "tensor": _C.ActQuant.tensor}
ACTIVATIONS: dict[str | None, _C.Activation] = {
    None: _C.Activation.none,
    **{
        name: getattr(_C.Activation, name)
        for name in (*reference.ACTIVATIONS, "clamp", CLAMPED_SWIGLU)
    },
}
#: The value of torch.cuda.current_stream(index).cuda_stream, read in a tenth of the time. None in a
#: torch without CUDA.
current_stream = cast("Callable[[int], int]", getattr(torch._C, "_cuda_getCurrentRawStream", None))


def pointer(tensor: Tensor | None) -> int:
    """The address of the data; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def data_type(tensor: Tensor | None) -> _C.DataType:
    """The dtype as the extension's enumeration."""
    return _C.DataType.none if tensor is None else DATA_TYPES[tensor.dtype]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which ``device`` is the current one."""
    return (
        nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)
    )


def has_rows(x: Tensor) -> bool:
    """Whether the rows of a matrix are contiguous and do not overlap, as those of an
    expanded tensor do.
    """
    rows, columns = x.shape
    return (columns == 1 or x.stride(1) == 1) and (rows <= 1 or x.stride(0) >= columns)


def row_matrix(x: Tensor) -> Tensor:
    """``x`` as a matrix that :func:`has_rows`; copied only if it must be."""
    if x.is_neg():  # a view of numbers with the other sign, as x.conj().imag is
        x = x.resolve_neg()
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if has_rows(x) else x.contiguous()


def split_activation(
    activation: reference.Activation,
    check: Callable[[reference.Activation], None] = reference.check_activation,
) -> tuple[str | None, float, float]:
    """An activation as operators take it; ``check`` raises ``ValueError`` if it does not exist."""
    if activation is None:
        return None, 0.0, 0.0
    check(activation)
    if isinstance(activation, tuple):
        return activation[0], float(activation[1]), float(activation[2])
    return activation, 0.0, 0.0


def named_activation(activation: str | None, low: float, high: float) -> reference.Activation:
    """The inverse."""
    return (activation, low, high) if activation in ("clamp", CLAMPED_SWIGLU) else activation
