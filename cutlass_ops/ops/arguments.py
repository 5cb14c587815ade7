"""Checks that the operators share: types, devices, gradients and torch's modes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import _C
from ..weights.packed_weight import PackedWeight
from .native import DATA_TYPES

#: Types of arguments that need no dispatch by torch.
TENSORS = frozenset((Tensor, torch.nn.Parameter))
_PLAIN = TENSORS | {type(None)}
#: Whether torch.jit.trace, a transform of torch.func, a mode that sees operators or torch.autocast
#: is active. These private functions take a third of the time of torch's public ones.
jit_state = cast("Callable[[], object]", torch._C._get_tracing_state)
func_transforms = torch._C._are_functorch_transforms_active
dispatch_modes = torch._C._len_torch_dispatch_stack
any_autocast = torch._C._is_any_autocast_enabled
NO_TANGENTS = (
    "{} has neither forward-mode derivatives nor rules for the transforms of torch.func "
    "(grad, jvp, vmap)"
)


def modes_are_active() -> bool:
    """Whether torch.jit.trace, forward-mode differentiation or a transform of torch.func is
    active.
    """
    return jit_state() is not None or forward_ad._current_level >= 0 or func_transforms()


def runs_directly(
    a: Tensor, b: Tensor | None = None, c: Tensor | None = None, d: Tensor | None = None
) -> bool:
    """Whether to call the implementation without torch's dispatcher: nothing is traced, no mode
    sees operators (make_fx, a FlopCounterMode) and no tensor is of a subclass.
    """
    if is_dynamo_compiling() or dispatch_modes():
        return False
    return type(a) in _PLAIN and type(b) in _PLAIN and type(c) in _PLAIN and type(d) in _PLAIN


def requires_grad(tensor: Any) -> bool:
    """Whether it is a tensor that requires a gradient."""
    return isinstance(tensor, Tensor) and tensor.requires_grad


def check_transforms(name: str, *tensors: Any) -> None:
    """Raise ``RuntimeError`` where a tracer or transform would treat the result as a constant.

    Kernels and the reference see values alone: torch.jit.trace would record the result as a
    constant, and forward-mode derivatives and the transforms of torch.func would lose theirs.
    """
    if is_dynamo_compiling():
        return
    if jit_state() is not None:
        raise RuntimeError(
            f"{name} cannot be recorded by torch.jit.trace; torch.compile and torch.export "
            "record it"
        )
    if forward_ad._current_level < 0 and not func_transforms():
        return
    unpack_dual: Any = forward_ad.unpack_dual  # torch has no types here
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (
            torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            or unpack_dual(tensor).tangent is not None
        ):
            raise RuntimeError(NO_TANGENTS.format(name))


def check_no_gradient(name: str, *tensors: Any) -> None:
    """Raise ``RuntimeError`` if an operator without a derivative would be recorded for one."""
    check_transforms(name, *tensors)
    if is_grad_enabled() and any(map(requires_grad, tensors)):
        raise RuntimeError(
            f"{name} has no gradient, and an input requires one; call it under torch.no_grad(), or "
            "with .detach() of the input"
        )


def check_frozen(weight: PackedWeight) -> None:
    """Raise ``RuntimeError`` if a tensor of the weight requires a gradient."""
    scales, offsets, bias, book = weight.scales, weight.offsets, weight.bias, weight.book
    if (
        scales.requires_grad
        or (bias is not None and bias.requires_grad)
        or (offsets is not None and offsets.requires_grad)
        or (book is not None and book.requires_grad)
    ):
        name = next(name for name, tensor in weight.tensors().items() if tensor.requires_grad)
        raise RuntimeError(
            f"{name} of the packed weight requires a gradient; packed weights are frozen: "
            "call requires_grad_(False) on it, or multiply under torch.no_grad()"
        )


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch's own products compute in the dtypes of their arguments."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def dtype_names(types: Any) -> str:
    """``float16, bfloat16`` and the like."""
    return ", ".join(str(t).removeprefix("torch.") for t in types)


def check_float(
    name: str, value: Any, device: torch.device, types: Collection[torch.dtype] = DATA_TYPES
) -> None:
    """Raise unless ``value`` is a floating-point tensor, or one of ``types``, on ``device``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
    if value.dtype not in types:
        raise TypeError(
            f"{name} has dtype {dtype_names((value.dtype,))}; supported are {dtype_names(types)}"
        )
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; the weight is on {device}")


def check_device(device: torch.device) -> None:
    """Raise unless the package computes on ``device``."""
    kind = device.type
    if kind == "cuda" and not _C.built_with_cuda:
        raise RuntimeError(
            "this build of cutlass_ops has no CUDA kernels: it was compiled without nvcc"
        )
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"the tensors are on {device}; supported are cpu and cuda")


def check_like(name: str, value: Any, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless ``value`` has ``shape``, and x's dtype and device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
    if value.dtype != x.dtype or value.device != x.device:
        raise TypeError(
            f"{name} is {dtype_names((value.dtype,))} on {value.device}; x is "
            f"{dtype_names((x.dtype,))} on {x.device}"
        )
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; {shape} is expected")


def check_bias(
    bias: Tensor, weight: PackedWeight, types: Collection[torch.dtype] = DATA_TYPES
) -> None:
    """Raise unless ``bias`` fits the weight's rows, and the weight has none."""
    check_float("bias", bias, weight.device, types)
    if weight.bias is not None:
        raise ValueError("a bias is given, but the weight has one already")
    if bias.shape != (weight.rows,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; {(weight.rows,)} is expected")


def check_residual(residual: Tensor, weight: PackedWeight, out_shape: tuple[int, ...]) -> None:
    """Raise unless ``residual`` has the result's shape."""
    check_float("residual", residual, weight.device)
    if tuple(residual.shape) != out_shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}; {out_shape} is expected")
