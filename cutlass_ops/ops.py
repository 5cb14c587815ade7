"""The public operators: they check their arguments, allocate results, and call the kernels (CUDA) or those of the host (CPU).

Each is also registered with ``torch.library`` under ``torch.ops.cutlass_ops``, on plain tensors, with a fake implementation,
so that ``torch.compile(fullgraph=True)`` traces through. Eager calls skip the dispatcher, which costs more host time than
all the rest of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from . import _C, formats, reference
from .weight import PackedWeight, QuantizedWeight

_TYPES = {torch.float32: _C.DataType.float32, torch.float16: _C.DataType.float16, torch.bfloat16: _C.DataType.bfloat16}
_ACT_QUANT = {"none": _C.ActQuant.none, "token": _C.ActQuant.token, "block": _C.ActQuant.block}
_ACTIVATIONS = {
    None: _C.Activation.none,
    "relu": _C.Activation.relu,
    "relu6": _C.Activation.relu6,
    "gelu": _C.Activation.gelu,
    "silu": _C.Activation.silu,
    "clamp": _C.Activation.clamp,
}
#: Classes of tensors, or of none, that need no dispatcher of torch's.
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_PLAIN = _TENSORS | {type(None)}
#: What torch.cuda.current_stream(index).cuda_stream is, in a tenth of the time; torch without CUDA has it not.
_stream = cast("Callable[[int], int]", getattr(torch._C, "_cuda_getCurrentRawStream", None))
#: Whether torch.jit.trace, a transform of torch.func or torch.autocast is at work, in a third of the time of torch's public
#: functions.
_jit_state = cast("Callable[[], object]", torch._C._get_tracing_state)
_func_transforms = torch._C._are_functorch_transforms_active
_any_autocast = torch._C._is_any_autocast_enabled
_NO_TANGENTS = "{} has neither forward-mode derivatives nor rules for the transforms of torch.func (grad, jvp, vmap)"
_MAX_M, _MAX_NORM_K = _C.max_m, _C.max_norm_k
_LEAST_NORM_EPS = _C.least_norm_eps
#: Rows up to which quantised ones have memory for a power of two of them.
_MOST_PADDED_ROWS = _C.padded_rows


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """int8 activations in kernel order, made by :func:`quantize_activations`.

    Attributes:
        codes: int8 ``[M, k_pad]``, K padded to 128 with each block's zero point; inside each 16 columns in the order
            0, 8, 1, 9, ..., 7, 15. A product may read, and ignores, what the storage holds behind the last row.
        scales: fp32 ``[B, stride]``, the M tokens of a block side by side, stride being M rounded up to 16.
        zeros: int8 ``[B, stride]``, or None if symmetric.
        block: columns a scale covers; -1 for the whole row.
        k: columns of x.
        shape: shape of x.
        dtype: dtype of x, and of a product that names no other.
        perm: the act order that x's columns were gathered in, or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    block: int
    k: int
    shape: torch.Size
    dtype: torch.dtype
    perm: Tensor | None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.codes.device

    def natural(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes int8 ``[M, K]``, scales fp32 ``[M, B]`` and zeros int8 ``[M, B]`` as the reference has them."""
        m = self.codes.shape[0]
        blocks = formats.group_count(self.k, self.block)
        zeros = None if self.zeros is None else self.zeros[:blocks, :m].t().contiguous()
        return reference.natural_order(self.codes, self.k), self.scales[:blocks, :m].t().contiguous(), zeros

    def dequantize(self) -> Tensor:
        """The values the codes stand for, fp32, of x's shape; columns as gathered by ``perm``."""
        codes, scales, zeros = self.natural()
        return reference.dequantize_activations(codes, scales, zeros, self.block).view(self.shape)


def _direct(a: Tensor, b: Tensor | None = None, c: Tensor | None = None, d: Tensor | None = None) -> bool:
    """Whether to call the implementation without torch's dispatcher: nothing is traced and no tensor is of a subclass."""
    if is_dynamo_compiling():  # other tracers bring tensors of subclasses
        return False
    return type(a) in _PLAIN and type(b) in _PLAIN and type(c) in _PLAIN and type(d) in _PLAIN


def _requires_grad(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.requires_grad


def _check_transforms(name: str, *tensors: Any) -> None:
    """Raise ``RuntimeError`` where the result would be a constant to what computes with it.

    Kernels and the reference see values alone: torch.jit.trace would record the result as a constant, and forward-mode
    derivatives and the transforms of torch.func would lose theirs.
    """
    if is_dynamo_compiling():
        return
    if _jit_state() is not None:
        raise RuntimeError(f"{name} cannot be recorded by torch.jit.trace; torch.compile and torch.export record it")
    if forward_ad._current_level < 0 and not _func_transforms():
        return
    unpack_dual: Any = forward_ad.unpack_dual  # torch has no types here
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (
            torch._C._functorch.is_functorch_wrapped_tensor(tensor) or unpack_dual(tensor).tangent is not None
        ):
            raise RuntimeError(_NO_TANGENTS.format(name))


def _check_no_gradient(name: str, *tensors: Any) -> None:
    """Raise ``RuntimeError`` if a derivative is asked for of an operator that has none."""
    _check_transforms(name, *tensors)
    if is_grad_enabled() and any(map(_requires_grad, tensors)):
        raise RuntimeError(
            f"{name} has no gradient, and an input requires one; call it under torch.no_grad(), or with .detach() of the input"
        )


def _check_frozen(weight: PackedWeight) -> None:
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


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch's own products compute in the dtypes of their arguments."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _ptr(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _type(tensor: Tensor | None) -> _C.DataType:
    return _C.DataType.none if tensor is None else _TYPES[tensor.dtype]


def _names(types: Any) -> str:
    return ", ".join(str(t).removeprefix("torch.") for t in types)


def _check_float(name: str, value: Any, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
    if value.dtype not in _TYPES:
        raise TypeError(f"{name} has dtype {_names((value.dtype,))}; supported are {_names(_TYPES)}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; the weight is on {device}")


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and not _C.built_with_cuda:
        raise RuntimeError("this build of cutlass_ops has no CUDA kernels: it was compiled without nvcc")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the tensors are on {device}; supported are cpu and cuda")


def _rows(x: Tensor) -> Tensor:
    """``x`` as a matrix whose rows are contiguous; copied only if it must be."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which ``device`` is the current one."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


# ---- quantise activations


def _empty_quantized(x: Tensor, block: int, symmetric: bool, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, with memory for ``rows`` of them, scales and zeros of an x ``[M, K]``."""
    m, k_pad = x.shape[0], formats.padded_k(x.shape[1])
    stride = -(-m // 16) * 16
    blocks = 1 if block == -1 else k_pad // block
    device = x.device
    codes = torch.empty((m if rows is None else rows, k_pad), dtype=torch.int8, device=device)
    if rows is not None:
        codes.resize_(m, k_pad)
    scales = torch.empty((blocks, stride), dtype=torch.float32, device=device)
    return codes, scales, None if symmetric else torch.empty((blocks, stride), dtype=torch.int8, device=device)


def _quantize(
    x: Tensor, perm: Tensor | None, block: int, symmetric: bool, **function: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x ``[M, K]`` -> codes, scales, zeros (None if symmetric) in kernel order.

    On a GPU ``function`` has the arguments of ``_C.quantize_activations`` that say which function of x is quantised.
    """
    m, k = x.shape
    # Memory for whole tiles of few rows: products read what lies there sooner than they get zeros for rows that are not there.
    rows = 1 << max(0, m - 1).bit_length()
    codes, scales, zeros = _empty_quantized(x, block, symmetric, rows if m < rows <= _MOST_PADDED_ROWS else None)
    x = _rows(x)
    if x.is_cpu:
        out = _C.QuantizedActivations(codes.data_ptr(), scales.data_ptr(), _ptr(zeros), block, scales.shape[1], m)
        perm = None if perm is None else perm.contiguous()
        _C.cpu_quantize_activations(x.data_ptr(), _TYPES[x.dtype], x.stride(0), m, k, _ptr(perm), out, torch.get_num_threads())
        return codes, scales, zeros
    index = x.get_device()
    _C.quantize_activations(
        x.data_ptr(),
        _TYPES[x.dtype],
        x.stride(0),
        m,
        k,
        _ptr(perm),
        codes.data_ptr(),
        scales.data_ptr(),
        _ptr(zeros),
        block,
        scales.shape[1],
        index,
        _stream(index),
        **function,
    )
    return codes, scales, zeros


def _rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, perm: Tensor | None, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes, scales, zeros and ``x + residual``."""
    if x.is_cpu:
        y, total = reference.rms_norm(x.detach(), weight.detach(), eps, None if residual is None else residual.detach())
        return *_quantize(y, perm, block, symmetric), None if residual is None else total
    norm = {"norm_weight_ptr": weight.data_ptr(), "norm_eps": eps}
    if residual is None:
        return *_quantize(x, perm, block, symmetric, **norm), None
    residual = _rows(residual)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm |= {"residual_ptr": residual.data_ptr(), "residual_stride": residual.stride(0), "sum_ptr": total.data_ptr()}
    return *_quantize(x, perm, block, symmetric, **norm), total


def _silu_mul_quantize(
    gate: Tensor, up: Tensor, perm: Tensor | None, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    if gate.is_cpu:
        return _quantize(reference.silu_mul(gate.detach(), up.detach()), perm, block, symmetric)
    up = _rows(up)
    return _quantize(gate, perm, block, symmetric, up_ptr=up.data_ptr(), up_stride=up.stride(0))


def _check_quantize(x: Tensor, block: int, perm: Tensor | None) -> Tensor:
    """x as a matrix."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is expected")
    _check_float("x", x, x.device)
    _check_device(x.device)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; [..., K] with K at least 1 is expected")
    if block not in (32, 64, 128, -1):
        raise ValueError(f"block is {block!r}; supported are 32, 64, 128 and -1 (the whole row)")
    if perm is not None and not isinstance(perm, Tensor):
        raise TypeError(f"perm is a {type(perm).__name__}; a torch.Tensor or None is expected")
    if perm is not None and (perm.dtype != torch.int32 or tuple(perm.shape) != (x.shape[-1],) or perm.device != x.device):
        raise ValueError(
            f"perm is {_names((perm.dtype,))} {tuple(perm.shape)} on {perm.device}; "
            f"int32 {(x.shape[-1],)} on {x.device} is expected"
        )
    matrix = x.reshape(-1, x.shape[-1])
    if matrix.shape[0] > _MAX_M:
        raise ValueError(f"x has {matrix.shape[0]} rows; at most {_MAX_M} are supported")
    return matrix


def _check_like(name: str, value: Any, x: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
    if value.dtype != x.dtype or value.device != x.device:
        raise TypeError(f"{name} is {_names((value.dtype,))} on {value.device}; x is {_names((x.dtype,))} on {x.device}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; {shape} is expected")


def quantize_activations(
    x: Tensor, block: int = 128, symmetric: bool = True, perm: Tensor | None = None
) -> QuantizedActivations:
    """Quantise activations to int8, one scale (and zero point) for each row and block of K.

    The formulas are :func:`cutlass_ops.reference.quantize_activations`; every device finds the same codes and scales.
    The codes have no gradient: to train through quantised activations, pass floats and ``act_quant`` to
    :func:`mixed_gemm`.

    Args:
        x: fp16, bf16 or fp32 ``[..., K]``.
        block: 32, 64 or 128 columns, or -1 for one block a row. A product wants
            :func:`cutlass_ops.formats.activation_block` of its weight's group size, or -1.
        symmetric: whether there are no zero points.
        perm: int32 ``[K]``, the act order of the weight that is to be multiplied (``PackedWeight.perm``), or None.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: x requires a gradient.
    """
    matrix = _check_quantize(x, block, perm)
    _check_no_gradient("quantize_activations", x)
    run = _quantize if _direct(x, perm) else torch.ops.cutlass_ops.quantize_activations
    codes, scales, zeros = run(matrix, perm, block, symmetric)
    return QuantizedActivations(codes, scales, None if symmetric else zeros, block, x.shape[-1], x.shape, x.dtype, perm)


@overload
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    residual: None = ...,
    block: int = ...,
    symmetric: bool = ...,
    perm: Tensor | None = ...,
) -> QuantizedActivations: ...
@overload
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor,
    block: int = ...,
    symmetric: bool = ...,
    perm: Tensor | None = ...,
) -> tuple[QuantizedActivations, Tensor]: ...
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    block: int = 128,
    symmetric: bool = True,
    perm: Tensor | None = None,
) -> QuantizedActivations | tuple[QuantizedActivations, Tensor]:
    """:func:`quantize_activations` of the root mean square norm of x, or of x + residual, without a way through memory.

    The results are those of :func:`cutlass_ops.reference.rms_norm` and then :func:`quantize_activations`, bit for bit, on every
    device.

    Args:
        x: fp16, bf16 or fp32 ``[..., K]``.
        weight: of the norm, ``[K]``, of x's dtype.
        eps: added to the mean square, 1e-15 to 1.
        residual: of x's dtype and shape, added to x first, or None.
        block, symmetric, perm: as in :func:`quantize_activations`; the norm knows no act order.

    Returns:
        The quantised norm; with a residual also ``x + residual``, rounded to x's dtype: the residual of the next layer.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: x, weight or residual requires a gradient.
    """
    matrix = _check_quantize(x, block, perm)
    _check_no_gradient("rms_norm_quantize", x, weight, residual)
    k = matrix.shape[1]
    _check_like("weight", weight, x, (k,))
    if k > _MAX_NORM_K:
        raise ValueError(f"x has {k} columns; a norm of at most {_MAX_NORM_K} is supported")
    if not _LEAST_NORM_EPS <= eps <= 1.0:
        raise ValueError(f"eps is {eps!r}; {_LEAST_NORM_EPS:g} to 1 is supported")
    if residual is not None:
        _check_like("residual", residual, x, tuple(x.shape))
    rows = None if residual is None else residual.reshape(-1, k)
    run = _rms_norm_quantize if _direct(x, weight, residual, perm) else torch.ops.cutlass_ops.rms_norm_quantize
    codes, scales, zeros, total = run(matrix, weight.contiguous(), eps, rows, perm, block, symmetric)
    quantized = QuantizedActivations(codes, scales, None if symmetric else zeros, block, k, x.shape, x.dtype, perm)
    return quantized if residual is None or total is None else (quantized, total.view(x.shape))


def silu_mul_quantize(
    gate: Tensor, up: Tensor, block: int = 128, symmetric: bool = True, perm: Tensor | None = None
) -> QuantizedActivations:
    """:func:`quantize_activations` of ``silu(gate) * up``, without a way through memory.

    The results are those of :func:`cutlass_ops.reference.silu_mul` on the same device and then
    :func:`quantize_activations`, bit for bit. gate and up may be the halves of one product
    (``mixed_gemm(x, reorder([gate, up])).chunk(2, -1)``).

    Args:
        gate: fp16, bf16 or fp32 ``[..., K]``.
        up: of gate's dtype and shape.
        block, symmetric, perm: as in :func:`quantize_activations`.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: gate or up requires a gradient.
    """
    matrix = _check_quantize(gate, block, perm)
    _check_no_gradient("silu_mul_quantize", gate, up)
    _check_like("up", up, gate, tuple(gate.shape))
    run = _silu_mul_quantize if _direct(gate, up, perm) else torch.ops.cutlass_ops.silu_mul_quantize
    codes, scales, zeros = run(matrix, up.reshape(-1, up.shape[-1]), perm, block, symmetric)
    k = matrix.shape[1]
    return QuantizedActivations(codes, scales, None if symmetric else zeros, block, k, gate.shape, gate.dtype, perm)


# ---- the product

#: What a product ends with, and the choice of its kernel: bias, activation, its low and high, residual, dtype, saturate,
#: batch_invariant, architecture, exact. One tuple, since each argument that is passed on takes host time.
_End = tuple[Tensor | None, str | None, float, float, Tensor | None, torch.dtype, bool, bool, int, bool]


def _launch(
    weight: PackedWeight,
    x: Tensor,
    quantized: _C.QuantizedActivations | None,
    m: int,
    x_type: _C.DataType,
    act_quant: _C.ActQuant,
    act_symmetric: bool,
    shape: tuple[int, ...],
    end: _End,
) -> Tensor:
    """The product in a new tensor of this shape; x is a matrix of floats, or the codes of ``quantized``."""
    bias, activation, low, high, residual, out_dtype, saturate, batch_invariant, architecture, exact = end
    if bias is None:
        bias = weight.bias
    epilogue = None
    if bias is not None or residual is not None or activation is not None or saturate:
        if residual is not None:
            residual = _rows(residual)
        epilogue = _C.Epilogue(
            _ptr(bias),
            _type(bias),
            _ptr(residual),
            _type(residual),
            0 if residual is None else residual.stride(0),
            _ACTIVATIONS[activation],
            low,
            high,
            saturate,
        )
    y: Tensor = _C.mixed_gemm(
        weight.native,
        x,
        quantized,
        m,
        x_type,
        act_quant,
        act_symmetric,
        epilogue,
        shape,
        out_dtype,
        _TYPES[out_dtype],
        batch_invariant,
        architecture,
        exact,
        weight.gpu,
        _stream(weight.gpu),
    )
    return y


def _split_activation(activation: reference.Activation) -> tuple[str | None, float, float]:
    """An activation as operators take it; ``ValueError`` if it does not exist."""
    reference.check_activation(activation)
    if isinstance(activation, tuple):
        return activation[0], float(activation[1]), float(activation[2])
    return activation, 0.0, 0.0


def _named_activation(activation: str | None, low: float, high: float) -> reference.Activation:
    """The inverse."""
    return ("clamp", low, high) if activation == "clamp" else activation


def _cpu_gemm(
    x: Tensor,
    quantized: _C.QuantizedActivations | None,
    m: int,
    weight: PackedWeight,
    act_quant: _C.ActQuant,
    act_symmetric: bool,
    shape: tuple[int, ...],
    end: _End,
) -> Tensor:
    """The product in host memory; x is a matrix of floats, or the codes of ``quantized``.

    A row has the same bits whatever M and the number of threads are.
    """
    bias, activation, low, high, residual, out_dtype, saturate, *_ = end
    if bias is None:
        bias = weight.bias
    plain = activation is None and residual is None and not saturate
    y = torch.empty(shape, dtype=out_dtype if plain else torch.float32)
    first = bias if plain else None
    _C.cpu_mixed_gemm(
        weight.native,
        m,
        _type(x) if quantized is None else _C.DataType.none,
        x.data_ptr(),
        x.stride(0),
        act_quant,
        act_symmetric,
        quantized,
        _ptr(first),
        _type(first),
        y.data_ptr(),
        _TYPES[y.dtype],
        torch.get_num_threads(),
    )
    if plain:
        return y
    rows = None if residual is None else residual.view(shape)
    return reference.epilogue(y, bias, _named_activation(activation, low, high), rows, out_dtype, saturate)


def _gemm_floats(
    x: Tensor, m: int, weight: PackedWeight, act_quant: str, act_symmetric: bool, shape: tuple[int, ...], end: _End
) -> Tensor:
    """x ``[M, K]`` of floats -> ``[M, N]``, seen as ``shape``."""
    if weight.gpu < 0:
        return _cpu_gemm(_rows(x), None, m, weight, _ACT_QUANT[act_quant], act_symmetric, shape, end)
    batch_invariant = end[7]
    if batch_invariant:
        # Rows that start on 16 bytes are read by other kernels than those that do not.
        x = x.contiguous().as_strided((m, weight.k), (weight.k, 1))
        if x.data_ptr() % 16:
            x = x.clone()
    x_type, mode = _TYPES[x.dtype], _ACT_QUANT[act_quant]
    return _launch(weight, x, None, m, x_type, mode, act_symmetric, shape, end)


def _native_quantized(x: QuantizedActivations) -> _C.QuantizedActivations:
    codes = x.codes
    rows = (codes.untyped_storage().nbytes() - codes.storage_offset()) // codes.shape[1]
    return _C.QuantizedActivations(codes.data_ptr(), x.scales.data_ptr(), _ptr(x.zeros), x.block, x.scales.shape[1], rows)


def _gemm_quantized(x: QuantizedActivations, weight: PackedWeight, shape: tuple[int, ...], end: _End) -> Tensor:
    """Quantised activations -> ``[M, N]``, seen as ``shape``."""
    m = x.codes.shape[0]
    quantized = _native_quantized(x)
    if weight.gpu < 0:
        return _cpu_gemm(x.codes, quantized, m, weight, _C.ActQuant.none, True, shape, end)
    # Tensors without elements have no address: no rows look like floats, which fp32 ones must not be.
    x_type = _TYPES[x.dtype if m else torch.float16]
    return _launch(weight, x.codes, quantized, m, x_type, _C.ActQuant.none, True, shape, end)


def record(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: PackedWeight, call: tuple[Any, ...]) -> Tensor:
    """An eager product with a gradient; gradients.py takes the place of this."""
    raise RuntimeError("mixed_gemm has a gradient once cutlass_ops.gradients is imported")


def _check_quantized(x: QuantizedActivations, weight: PackedWeight) -> int:
    """Raise ``ValueError`` if x does not fit the weight; returns x's columns."""
    if not isinstance(x, QuantizedActivations):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is expected")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}; the weight is on {weight.device}")
    # Two comparisons: torch.compile does not find a size that it made symbolic in a tuple.
    if x.block != -1 and x.block != formats.activation_block(weight.group_size):
        raise ValueError(
            f"x is quantised in blocks of {x.block}; beside weights in groups of {weight.group_size} they must be of "
            f"{formats.activation_block(weight.group_size)}, or -1 (the whole row)"
        )
    # Under torch.compile one tensor may be two objects.
    same_order = x.perm is weight.perm or (is_compiling() and x.perm is not None and weight.perm is not None)
    if not same_order:
        raise ValueError("x was not quantised in the weight's act order: pass the weight's perm to quantize_activations")
    return x.k


def _check_bias(bias: Tensor, weight: PackedWeight) -> None:
    _check_float("bias", bias, weight.device)
    if weight.bias is not None:
        raise ValueError("a bias is given, but the weight has one already")
    if tuple(bias.shape) != (weight.n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; {(weight.n,)} is expected")


def _check_residual(residual: Tensor, weight: PackedWeight, out_shape: tuple[int, ...]) -> None:
    _check_float("residual", residual, weight.device)
    if tuple(residual.shape) != out_shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}; {out_shape} is expected")


def mixed_gemm(
    x: Tensor | QuantizedActivations,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: reference.Activation = None,
    act_quant: str = "none",
    act_symmetric: bool = True,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    saturate: bool = False,
    batch_invariant: bool = False,
    architecture: int = 0,
    exact: bool = False,
) -> Tensor:
    """``activation(x @ W^T + bias) + residual`` with a packed weight.

    Sums are fp32, whatever the types; the result is rounded once. On a GPU the same input gives the same bits every time.
    On Hopper weights in groups of 32 and 64, with offsets, with a code book or with scales of another dtype than x's may be
    rounded once to x's dtype if the result has it too; so may the values of int8 activations with weights of groups of 32 and
    64, offsets or 8-bit zero points.
    ``exact=True`` keeps integers whole. :func:`explain` names the kernel, and whether it rounds.
    Zero points of activations leave the integers of each group; but on Hopper, from 129 rows on, a result of 16 bits is
    corrected for those of many blocks, or of a row, at once, as far as fp32 sums go. Such a product reads sums of the weight's
    codes, which :meth:`PackedWeight.sum_codes` makes and keeps, or makes them itself: the bits are the same.
    A NaN or infinity in a row of x makes that row of the result NaN (torch's product leaves infinities where they come out).

    Kernels read the weight ahead: they start while kernels that were launched before them still run (programmatic dependent
    launch), and wait for those before they read x, bias or residual, but not before they read the weight's codes, scales, zero
    points and offsets. After something on the GPU has written to a packed weight's tensors, synchronise the stream once before
    the next product, and call :meth:`PackedWeight.sum_codes` before CUDA graphs that were captured with sums it kept.

    Training: the result is differentiable in x, bias and residual; the weight is frozen. The gradient of x is that of
    ``torch.nn.functional.linear`` with :func:`dequantize`'s values, which the backward pass computes in panels of rows, at most
    128 MB of 16-bit values at a time, and does not keep. Activations that ``act_quant`` quantises pass their gradient straight
    through, as if they were not rounded. An element that the activation clamps or ``saturate`` limits has gradient 0. There
    are no gradients of gradients.
    Under ``torch.autocast`` an fp32 x is cast to the autocast dtype first, as ``torch.nn.Linear`` does it; fp16 and bf16 stay
    as they are.

    Args:
        x: fp16, bf16 or fp32 ``[..., K]`` on the weight's device (on a GPU fp32 takes an ``act_quant``), or what
            :func:`quantize_activations` returned, with the weight's ``perm`` and a fitting block.
        weight: what :func:`cutlass_ops.reorder` returned, ``[N, K]``.
        bias: fp16, bf16 or fp32 ``[N]``, if the weight has none of its own.
        activation: None, "relu", "relu6", "gelu" (the erf form), "silu" or ``("clamp", lo, hi)``.
        act_quant: "none" multiplies x as it is; "block" quantises it to int8 with one scale for each row and block of
            min(group_size, 128) columns, "token" with one scale a row.
        act_symmetric: whether quantised activations have no zero point.
        residual: fp16, bf16 or fp32 ``[..., N]``, added last.
        out_dtype: fp16, bf16 or fp32; x's dtype if None.
        saturate: results beyond the largest number of ``out_dtype`` become that number instead of infinity.
        batch_invariant: a row of the result has the same bits whatever M and the other rows are. The kernel and the parts that
            K is cut into are then those for 128 rows, whatever M is, and never decode_gemm's. Measured on an H200: 28672 x 4096
            with int4 weights takes 2 to 3.5 times as long at M = 1 and 1.4 to 2 times at 16 (int8: 1.3 to 1.8 and 1.2 to 1.5),
            up to 1.06 times from 64 on; 4096 x 4096 takes 1.7 to 3 times as long at M = 1, 1.3 to 1.6 at 16, and 1.1 to 1.5
            from 64 on. (Symmetric blocks of x beside int4 weights, which have the tile of 128 rows then, were not timed so.)
            Where K is cut, its parts' fp32 sums take parts x M x N x 4 bytes of scratch memory.
        architecture: run kernels for this architecture (80 for sm_80) or earlier ones, where the GPU has faster ones of its
            own; 0 for the GPU's. For tests and comparisons; unused on a CPU.
        exact: round neither weights nor quantised activations to 16 bits, at the price of slower kernels for some formats; a
            CPU never does.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is launched; the message has its value.
        RuntimeError: CUDA refused a launch; the message has the call, the error and the problem's shape. Or a gradient is
            asked for that does not exist: of the weight, or with an x that is quantised already; or torch.jit.trace,
            forward-mode differentiation or a transform of torch.func is at work.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; a PackedWeight (see cutlass_ops.reorder) is expected")
    if weight.kernel_size:
        raise ValueError(reference.CONVOLUTION.format(weight.kernel_size))
    dynamo = is_dynamo_compiling()
    if not dynamo and (_jit_state() is not None or forward_ad._current_level >= 0 or _func_transforms()):
        _check_transforms("mixed_gemm", x, bias, residual)
    differentiable = False
    if is_grad_enabled():
        _check_frozen(weight)
        differentiable = getattr(x, "requires_grad", False)
        if bias is not None or residual is not None:
            differentiable = differentiable or _requires_grad(bias) or _requires_grad(residual)
    if _any_autocast() and isinstance(x, Tensor) and x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if not dynamo:
        weight.check_sums()
    plain = bias is None and activation is None and residual is None and out_dtype is None
    plain = plain and not (differentiable or saturate or batch_invariant or architecture or exact or dynamo)
    if plain and type(x) in _TENSORS and weight.gpu >= 0:
        # What layers ask for. The module sees to it in less time than the checks below take, or leaves it to them.
        product: Tensor | None = _C.product(weight.native, x, act_quant, act_symmetric)
        if product is not None:
            return product
    device, n, k = weight.device, weight.n, weight.k
    if isinstance(x, Tensor):
        dtype, shape = x.dtype, x.shape
        if dtype not in _TYPES or x.device != device:
            _check_float("x", x, device)
        columns = shape[-1] if shape else 0
    else:
        columns = _check_quantized(x, weight)
        shape, dtype = x.shape, x.dtype
    if columns != k:
        raise ValueError(f"x has shape {tuple(shape)}; [..., {k}] is expected, for a weight of shape {[n, k]}")
    is_matrix = len(shape) == 2
    out_shape = (shape[0], n) if is_matrix else (*shape[:-1], n)
    if act_quant not in _ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    activation, low, high = _split_activation(activation)
    if weight.book is not None and (act_quant != "none" or isinstance(x, QuantizedActivations)):
        raise ValueError(f"{reference.BOOK_NEEDS_FLOATS}; act_quant is {act_quant!r} and x a {type(x).__name__}")
    if bias is not None:
        _check_bias(bias, weight)
        bias = bias.contiguous()
    if residual is not None:
        _check_residual(residual, weight, out_shape)
        residual = residual.reshape(-1, n)
    if out_dtype is None:
        out_dtype = dtype
    elif out_dtype not in _TYPES:
        raise TypeError(f"out_dtype is {out_dtype}; supported are {_names(_TYPES)}")
    if weight.gpu < 0 or not _C.built_with_cuda:
        _check_device(device)
    elif dtype is torch.float32 and act_quant == "none" and isinstance(x, Tensor):
        raise TypeError(
            "x is float32 with act_quant='none'; on a GPU that takes float16 or bfloat16 (float32 with 'token' or 'block')"
        )

    end = (bias, activation, low, high, residual, out_dtype, saturate, batch_invariant, architecture, exact)
    if isinstance(x, QuantizedActivations):
        if differentiable:
            _check_no_gradient("mixed_gemm of quantised activations", bias, residual)
        if _direct(x.codes, bias, residual):
            return _gemm_quantized(x, weight, out_shape, end)
        quantized = (x.codes, x.scales, x.zeros, x.block, x.dtype)
        y = torch.ops.cutlass_ops.gemm_quantized(*quantized, *_fields(weight), *end)
        return cast(Tensor, y.view(out_shape))
    matrix = x if is_matrix else x.reshape(-1, k)
    if _direct(x, bias, residual):
        m = shape[0] if is_matrix else matrix.shape[0]
        if m > _MAX_M:
            raise ValueError(f"x has {m} rows; at most {_MAX_M} are supported")
        if differentiable:
            call = (act_quant, act_symmetric, (activation, low, high, *end[5:]))
            return record(matrix, bias, residual, weight, call).view(out_shape)
        return _gemm_floats(matrix, m, weight, act_quant, act_symmetric, out_shape, end)
    floats = (act_quant, act_symmetric)
    y = torch.ops.cutlass_ops.mixed_gemm(matrix, *_fields(weight), *end[:7], *floats, *end[7:])
    return cast(Tensor, y.view(out_shape))


# ---- dequantise


def dequantize(weight: PackedWeight | QuantizedWeight, dtype: torch.dtype = torch.float16) -> Tensor:
    """The weight's values, ``[N, K]``, act order undone, or a convolution's ``[N, C, *kernel]``, on the weight's device.

    Args:
        weight: canonical or packed.
        dtype: fp16, bf16 or fp32. The arithmetic is fp32, rounded once.

    Raises:
        TypeError: another weight or dtype.
        RuntimeError: a tensor of the packed weight requires a gradient.
    """
    if dtype not in _TYPES:
        raise TypeError(f"dtype is {dtype}; supported are {_names(_TYPES)}")
    if isinstance(weight, QuantizedWeight):
        return reference.dequantize_weight(weight, dtype)
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; a PackedWeight or a QuantizedWeight is expected")
    _check_device(weight.device)
    _check_transforms("dequantize", *weight.tensors().values())
    if is_grad_enabled():
        _check_frozen(weight)
    if _direct(weight.codes):
        return _dequantize(weight, dtype)
    return cast(Tensor, torch.ops.cutlass_ops.dequantize(*_fields(weight), dtype, weight.kernel_size))


def _dequantize(weight: PackedWeight, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows ``start``, a multiple of 64, to ``stop``."""
    stop = weight.n if stop is None else stop
    if weight.gpu < 0:
        return reference.dequantize_weight(weight.row_panels(start, stop).unpack(), dtype)
    if weight.kernel_size:
        taps = _dequantize(weight.matrix, dtype, start, stop).view(stop - start, *weight.kernel_size, -1)
        return taps[..., : weight.k // weight.taps].movedim(-1, 1).contiguous()
    out = torch.empty(stop - start, weight.k, dtype=dtype, device=weight.device)
    with _on(weight.device):
        _C.dequantize(weight.native, out.data_ptr(), _TYPES[dtype], _stream(weight.gpu), start, stop - start)
    return out


# ---- torch.library: the same on plain tensors

_WEIGHT_SCHEMA = (
    "Tensor codes, Tensor scales, Tensor? zeros, Tensor? offsets, Tensor? weight_bias, Tensor? perm, "
    "int n, int k, int bits, int group_size, Tensor? book"
)
#: How many of an operator's arguments they are.
_WEIGHT = 11
_EPILOGUE_SCHEMA = "Tensor? bias, str? activation, float low, float high, Tensor? residual, ScalarType out_dtype, bool saturate"
_CHOICE_SCHEMA = "bool batch_invariant, int architecture, bool exact"


def _fields(weight: PackedWeight) -> tuple[Any, ...]:
    """A weight as :data:`_WEIGHT_SCHEMA` lists it; a convolution's kernel is an argument more."""
    return (
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.offsets,
        weight.bias,
        weight.perm,
        weight.n,
        weight.k,
        weight.bits,
        weight.group_size,
        weight.book,
    )


def _mixed_gemm_op(x: Tensor, *args: Any) -> Tensor:
    weight = PackedWeight(*args[:_WEIGHT])
    *end, act_quant, act_symmetric, batch_invariant, architecture, exact = args[_WEIGHT:]
    m = x.shape[0]
    return _gemm_floats(
        x, m, weight, act_quant, act_symmetric, (m, weight.n), cast(_End, (*end, batch_invariant, architecture, exact))
    )


def _mixed_gemm_fake(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty((x.shape[0], args[6]), dtype=args[_WEIGHT + 5])


def _gemm_quantized_op(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype, *args: Any
) -> Tensor:
    weight = PackedWeight(*args[:_WEIGHT])
    shape = torch.Size((codes.shape[0], weight.k))
    x = QuantizedActivations(codes, scales, zeros, block, weight.k, shape, dtype, weight.perm)
    return _gemm_quantized(x, weight, (codes.shape[0], weight.n), cast(_End, args[_WEIGHT:]))


def _gemm_quantized_fake(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype, *args: Any
) -> Tensor:
    return codes.new_empty((codes.shape[0], args[6]), dtype=args[_WEIGHT + 5])


def _with_empty(run: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """``run`` with an empty tensor for each None that it returns: operators return tensors alone."""

    def with_empty(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(0) if t is None else t for t in run(x, *args))

    return with_empty


def _quantize_activations_fake(
    x: Tensor, perm: Tensor | None, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    return _empty_quantized(x, block, symmetric)


def _rms_norm_quantize_fake(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, perm: Tensor | None, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return *_empty_quantized(x, block, symmetric), None if residual is None else x.new_empty(x.shape)


def _silu_mul_quantize_fake(
    gate: Tensor, up: Tensor, perm: Tensor | None, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    return _empty_quantized(gate, block, symmetric)


def _dequantize_op(*args: Any) -> Tensor:
    # The dispatcher leaves out what is the schema's default.
    return _dequantize(PackedWeight(*args[:_WEIGHT], *map(tuple, args[_WEIGHT + 1 :])), args[_WEIGHT])


def _dequantize_fake(*args: Any) -> Tensor:
    n, k, kernel_size = args[6], args[7], [extent for sizes in args[_WEIGHT + 1 :] for extent in sizes]
    return cast(Tensor, args[0].new_empty((n, k // math.prod(kernel_size), *kernel_size), dtype=args[_WEIGHT]))


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    short = schema.split("(")[0]
    name = "cutlass_ops::" + short

    def run_checked(*args: Any) -> Any:
        # A compiled graph calls operators, which see no tangent: torch's dispatcher would drop it without a word.
        if forward_ad._current_level >= 0:
            raise RuntimeError(f"{_NO_TANGENTS.format(short)}; compiled, it is refused inside of dual_level()")
        return run(*args)

    torch.library.define(name, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, ("CPU", "CUDA"), run_checked)
    torch.library.register_fake(name, fake)


_register(
    f"mixed_gemm(Tensor x, {_WEIGHT_SCHEMA}, {_EPILOGUE_SCHEMA}, str act_quant, bool act_symmetric, "
    f"{_CHOICE_SCHEMA}) -> Tensor",
    _mixed_gemm_op,
    _mixed_gemm_fake,
)
_register(
    f"gemm_quantized(Tensor x_codes, Tensor x_scales, Tensor? x_zeros, int block, ScalarType x_dtype, {_WEIGHT_SCHEMA}, "
    f"{_EPILOGUE_SCHEMA}, "
    f"{_CHOICE_SCHEMA}) -> Tensor",
    _gemm_quantized_op,
    _gemm_quantized_fake,
)
_register(
    "quantize_activations(Tensor x, Tensor? perm, int block, bool symmetric) -> (Tensor, Tensor, Tensor)",
    _with_empty(_quantize),
    _with_empty(_quantize_activations_fake),
)
_register(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor? perm, int block, bool symmetric)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _with_empty(_rms_norm_quantize),
    _with_empty(_rms_norm_quantize_fake),
)
_register(
    "silu_mul_quantize(Tensor gate, Tensor up, Tensor? perm, int block, bool symmetric) -> (Tensor, Tensor, Tensor)",
    _with_empty(_silu_mul_quantize),
    _with_empty(_silu_mul_quantize_fake),
)
_register(f"dequantize({_WEIGHT_SCHEMA}, ScalarType dtype, int[] kernel_size=[]) -> Tensor", _dequantize_op, _dequantize_fake)
