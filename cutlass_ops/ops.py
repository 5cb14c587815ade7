"""The public operators: they check their arguments, allocate results, and call the kernels (CUDA) or the reference (CPU).

Each is also registered with ``torch.library`` under ``torch.ops.cutlass_ops``, on plain tensors, with a fake implementation,
so that ``torch.compile(fullgraph=True)`` traces through. Eager calls skip the dispatcher, which costs more host time than
all the rest of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

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
_MAX_M = 1 << 24
#: Rows beyond which a product with a code book's values takes less time through :func:`dequantize` (measured on an H200).
_MOST_BOOK_ROWS = 192

#: Architecture -> multiprocessors and largest shared memory of a block, of a GPU that is not there (CUDA C++ Programming Guide,
#: "Technical Specifications per Compute Capability"; multiprocessors of A100, RTX 3090, RTX 4090, H100/H200, B200, RTX 5090).
_KNOWN_DEVICES = {
    80: (108, 166912),
    86: (82, 101376),
    89: (128, 101376),
    90: (132, 232448),
    100: (148, 232448),
    120: (170, 101376),
}


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """int8 activations in kernel order, made by :func:`quantize_activations`.

    Attributes:
        codes: int8 ``[M, k_pad]``, K padded to 128 with each block's zero point; inside each 16 columns in the order
            0, 8, 1, 9, ..., 7, 15.
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


def _direct(*tensors: Tensor | None) -> bool:
    """Whether to call the implementation without torch's dispatcher: nothing is traced and no tensor is of a subclass."""
    if torch.compiler.is_compiling():
        return False
    return all(t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)


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
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which ``device`` is the current one."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


# ---- quantise activations


def _empty_quantized(x: Tensor, block: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    m, k_pad = x.shape[0], formats.padded_k(x.shape[1])
    stride = -(-m // 16) * 16
    blocks = 1 if block == -1 else k_pad // block
    codes = torch.empty(m, k_pad, dtype=torch.int8, device=x.device)
    scales = torch.empty(blocks, stride, dtype=torch.float32, device=x.device)
    zeros = torch.empty(0 if symmetric else blocks, stride, dtype=torch.int8, device=x.device)
    return codes, scales, zeros


def _quantize_activations(x: Tensor, perm: Tensor | None, block: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x ``[M, K]`` -> codes, scales, zeros (empty if symmetric) in kernel order."""
    m, k = x.shape
    codes, scales, zeros = _empty_quantized(x, block, symmetric)
    if x.device.type == "cpu":
        gathered = (x if perm is None else x[:, perm.long()]).detach()
        plain, scale, zero = reference.quantize_activations(gathered, block, symmetric)
        codes.copy_(reference.activation_order(plain, zero, block))
        scales.fill_(1.0)[: scale.shape[1], :m] = scale.t()
        if zero is not None:
            zeros.zero_()[: zero.shape[1], :m] = zero.t()
        return codes, scales, zeros
    x = _rows(x)
    with _on(x.device):
        _C.quantize_activations(
            x.data_ptr(),
            _TYPES[x.dtype],
            x.stride(0),
            m,
            k,
            _ptr(perm),
            codes.data_ptr(),
            scales.data_ptr(),
            0 if symmetric else zeros.data_ptr(),
            block,
            scales.shape[1],
            _stream(x.device),
        )
    return codes, scales, zeros


def quantize_activations(
    x: Tensor, block: int = 128, symmetric: bool = True, perm: Tensor | None = None
) -> QuantizedActivations:
    """Quantise activations to int8, one scale (and zero point) for each row and block of K.

    The formulas are :func:`cutlass_ops.reference.quantize_activations`; every device finds the same codes and scales.

    Args:
        x: fp16, bf16 or fp32 ``[..., K]``.
        block: 32, 64 or 128 columns, or -1 for one block a row. A product wants
            :func:`cutlass_ops.formats.activation_block` of its weight's group size, or -1.
        symmetric: whether there are no zero points.
        perm: int32 ``[K]``, the act order of the weight that is to be multiplied (``PackedWeight.perm``), or None.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
    """
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
    run = _quantize_activations if _direct(x, perm) else torch.ops.cutlass_ops.quantize_activations
    codes, scales, zeros = run(matrix, perm, block, symmetric)
    return QuantizedActivations(codes, scales, None if symmetric else zeros, block, x.shape[-1], x.shape, x.dtype, perm)


# ---- the product


def _problem(
    weight: _C.PackedWeight,
    m: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    activation: str | None,
    low: float,
    high: float,
    residual: Tensor | None,
    saturate: bool,
) -> _C.GemmProblem:
    problem = _C.GemmProblem(weight, m, _TYPES[out_dtype])
    if bias is not None or residual is not None or activation is not None or saturate:
        problem.set_epilogue(
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
    return problem


def _launch(problem: _C.GemmProblem, m: int, n: int, out_dtype: torch.dtype, device: torch.device) -> Tensor:
    out = torch.empty(m, n, dtype=out_dtype, device=device)
    with _on(device):
        size = problem.workspace_bytes()
        # Handed back to torch's allocator at once, which keeps it for this stream until the kernels are done with it.
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        _C.mixed_gemm(problem, out.data_ptr(), _ptr(workspace), size, _stream(device))
    return out


def _named_activation(activation: str | None, low: float, high: float) -> reference.Activation:
    return ("clamp", low, high) if activation == "clamp" else activation


def _gemm_floats(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    low: float,
    high: float,
    act_quant: str,
    act_symmetric: bool,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    saturate: bool,
) -> Tensor:
    """x ``[M, K]`` of floats -> ``[M, N]``."""
    if x.device.type == "cpu":
        return reference.mixed_gemm(
            x,
            weight.unpack(),
            bias=bias,
            activation=_named_activation(activation, low, high),
            act_quant=act_quant,
            act_symmetric=act_symmetric,
            residual=residual,
            out_dtype=out_dtype,
            saturate=saturate,
        ).detach()
    x = _rows(x)
    residual = None if residual is None else _rows(residual)
    bias = weight.bias if bias is None else bias
    plain = bias is None and activation is None and residual is None and out_dtype == x.dtype and not saturate
    if weight.book is not None and plain and x.shape[0] > _MOST_BOOK_ROWS:
        return x.detach() @ _dequantize(weight, x.dtype).t()
    problem = _problem(weight.native, x.shape[0], out_dtype, bias, activation, low, high, residual, saturate)
    problem.set_floats(x.data_ptr(), _TYPES[x.dtype], x.stride(0), _ACT_QUANT[act_quant], act_symmetric)
    return _launch(problem, x.shape[0], weight.n, out_dtype, x.device)


def _gemm_quantized(
    x: QuantizedActivations,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    low: float,
    high: float,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    saturate: bool,
) -> Tensor:
    """Quantised activations -> ``[M, N]``."""
    if x.device.type == "cpu":
        codes, scales, zeros = x.natural()
        return reference.gemm_quantized(
            codes,
            scales,
            zeros,
            x.block,
            weight.unpack(),
            bias=bias,
            activation=_named_activation(activation, low, high),
            residual=residual,
            out_dtype=out_dtype,
            saturate=saturate,
        ).detach()
    residual = None if residual is None else _rows(residual)
    bias = weight.bias if bias is None else bias
    m = x.codes.shape[0]
    problem = _problem(weight.native, m, out_dtype, bias, activation, low, high, residual, saturate)
    problem.set_quantized(x.codes.data_ptr(), x.scales.data_ptr(), _ptr(x.zeros), x.block, x.scales.shape[1])
    return _launch(problem, m, weight.n, out_dtype, x.device)


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
) -> Tensor:
    """``activation(x @ W^T + bias) + residual`` with a packed weight.

    Sums are fp32, whatever the types; the result is rounded once. On a GPU the same input gives the same bits every time.
    There more than 192 rows times a code book's weight, with nothing but the product asked for, are torch's product with
    :func:`dequantize`'s values: each weight is rounded to x's dtype, as bitsandbytes has it.
    A NaN or infinity in a row of x makes that row of the result NaN. No gradient flows through it.

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

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is launched; the message has its value.
        RuntimeError: CUDA refused a launch; the message has the call, the error and the problem's shape.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; a PackedWeight (see cutlass_ops.reorder) is expected")
    device = weight.device
    n, k = weight.n, weight.k
    if isinstance(x, QuantizedActivations):
        if x.device != device:
            raise ValueError(f"x is on {x.device}; the weight is on {device}")
        # Two comparisons: torch.compile does not find a size that it made symbolic in a tuple.
        if x.block != -1 and x.block != formats.activation_block(weight.group_size):
            raise ValueError(
                f"x is quantised in blocks of {x.block}; beside weights in groups of {weight.group_size} they must be of "
                f"{formats.activation_block(weight.group_size)}, or -1 (the whole row)"
            )
        # Under torch.compile one tensor may be two objects.
        same_order = x.perm is weight.perm or (torch.compiler.is_compiling() and x.perm is not None and weight.perm is not None)
        if not same_order:
            raise ValueError("x was not quantised in the weight's act order: pass the weight's perm to quantize_activations")
        columns = x.k
    else:
        _check_float("x", x, device)
        columns = x.shape[-1] if x.dim() else 0
    if columns != k:
        raise ValueError(f"x has shape {tuple(x.shape)}; [..., {k}] is expected, for a weight of shape {[n, k]}")
    out_shape = (*x.shape[:-1], n)
    if act_quant not in _ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    low = high = 0.0
    if activation is not None:
        reference.check_activation(activation)
        if isinstance(activation, tuple):
            activation, low, high = activation[0], float(activation[1]), float(activation[2])
    if weight.book is not None and (act_quant != "none" or isinstance(x, QuantizedActivations)):
        raise ValueError(f"{reference.BOOK_NEEDS_FLOATS}; act_quant is {act_quant!r} and x a {type(x).__name__}")
    if bias is not None:
        _check_float("bias", bias, device)
        if weight.bias is not None:
            raise ValueError("a bias is given, but the weight has one already")
        if tuple(bias.shape) != (n,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; {(n,)} is expected")
        bias = bias.contiguous()
    if residual is not None:
        _check_float("residual", residual, device)
        if tuple(residual.shape) != out_shape:
            raise ValueError(f"residual has shape {tuple(residual.shape)}; {out_shape} is expected")
        residual = residual.reshape(-1, n)
    if out_dtype is None:
        out_dtype = x.dtype
    elif out_dtype not in _TYPES:
        raise TypeError(f"out_dtype is {out_dtype}; supported are {_names(_TYPES)}")
    if device.type != "cpu":
        _check_device(device)
        if isinstance(x, Tensor) and act_quant == "none" and x.dtype == torch.float32:
            raise TypeError(
                "x is float32 with act_quant='none'; on a GPU that takes float16 or bfloat16 (float32 with 'token' or 'block')"
            )

    if isinstance(x, QuantizedActivations):
        if _direct(x.codes, bias, residual):
            y = _gemm_quantized(x, weight, bias, activation, low, high, residual, out_dtype, saturate)
        else:
            y = torch.ops.cutlass_ops.gemm_quantized(
                x.codes,
                x.scales,
                x.zeros,
                x.block,
                *_fields(weight),
                bias,
                activation,
                low,
                high,
                residual,
                out_dtype,
                saturate,
            )
        return y.view(out_shape)
    matrix = x.reshape(-1, k)
    if _direct(x, bias, residual):
        if matrix.shape[0] > _MAX_M:
            raise ValueError(f"x has {matrix.shape[0]} rows; at most {_MAX_M} are supported")
        y = _gemm_floats(matrix, weight, bias, activation, low, high, act_quant, act_symmetric, residual, out_dtype, saturate)
    else:
        y = torch.ops.cutlass_ops.mixed_gemm(
            matrix, *_fields(weight), bias, activation, low, high, act_quant, act_symmetric, residual, out_dtype, saturate
        )
    return y.view(out_shape)


# ---- dequantise


def dequantize(weight: PackedWeight | QuantizedWeight, dtype: torch.dtype = torch.float16) -> Tensor:
    """The weight's values, ``[N, K]``, act order undone, on the weight's device.

    Args:
        weight: canonical or packed.
        dtype: fp16, bf16 or fp32. The arithmetic is fp32, rounded once.

    Raises:
        TypeError: another weight or dtype.
    """
    if dtype not in _TYPES:
        raise TypeError(f"dtype is {dtype}; supported are {_names(_TYPES)}")
    if isinstance(weight, QuantizedWeight):
        return reference.dequantize_weight(weight, dtype)
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; a PackedWeight or a QuantizedWeight is expected")
    _check_device(weight.device)
    if _direct(weight.codes):
        return _dequantize(weight, dtype)
    return cast(Tensor, torch.ops.cutlass_ops.dequantize(*_fields(weight), dtype))


def _dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    if weight.device.type == "cpu":
        return reference.dequantize_weight(weight.unpack(), dtype)
    out = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.device)
    with _on(weight.device):
        _C.dequantize(weight.native, out.data_ptr(), _TYPES[dtype], _stream(weight.device))
    return out


# ---- what would run


@dataclass(frozen=True)
class Explanation:
    """The dispatch row that a product would take.

    Attributes:
        device: "cpu" or the GPU's architecture, "sm_90".
        kernel: name of the kernel, ``csrc/kernels/<kernel>.cu``; "reference" on the CPU.
        quantizer: the kernel that quantises the activations first; None where they stay floats or `kernel` does it.
        tile: output features and tokens a block computes.
        stages: tiles of K in flight.
        splits: parts that K is cut into.
        workspace: bytes of scratch memory.
        why: the reason for the row.
    """

    device: str
    kernel: str
    quantizer: str | None
    tile: tuple[int, int]
    stages: int
    splits: int
    workspace: int
    why: str

    def __str__(self) -> str:
        if self.kernel == "reference":
            return f"{self.device}: reference ({self.why})"
        first = f"{self.quantizer}, then " if self.quantizer else ""
        return (
            f"{self.device}: {first}{self.kernel}, tile {self.tile[0]} features x {self.tile[1]} tokens, {self.stages} stages, "
            f"K in {self.splits} part{'s' if self.splits > 1 else ''} ({self.why})"
        )


def _device(device: torch.device | str) -> _C.Device | None:
    """The GPU that ``device`` names; None for the CPU."""
    if isinstance(device, str) and device.startswith("sm_"):
        number = device.removeprefix("sm_").rstrip("a")
        if not number.isdigit() or int(number) not in _KNOWN_DEVICES:
            known = ", ".join(f"sm_{a}" for a in _KNOWN_DEVICES)
            raise ValueError(f"device is {device!r}; of GPUs that are not there, {known} are known")
        return _C.Device(int(number), *_KNOWN_DEVICES[int(number)])
    device = torch.device(device)
    if device.type == "cpu":
        return None
    _check_device(device)
    with torch.cuda.device(device):
        return _C.current_device()


def explain(
    m: int,
    weight: PackedWeight,
    act_quant: str = "none",
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    act_symmetric: bool = True,
) -> Explanation:
    """Say which kernel :func:`mixed_gemm` would run, without running it.

    Args:
        m: rows of x.
        weight: the weight; only its sizes and format matter.
        act_quant, act_symmetric: as in :func:`mixed_gemm`.
        dtype: dtype of x.
        device: "cpu", a GPU of this machine, or "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120" for one that need not be
            there. The weight's own device if None.

    Raises:
        ValueError: no kernel takes this problem; the message names the field and what is supported.
    """
    if act_quant not in _ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    if dtype not in _TYPES:
        raise TypeError(f"dtype is {dtype}; supported are {_names(_TYPES)}")
    gpu = _device(weight.device if device is None else device)
    if gpu is None:
        return Explanation("cpu", "reference", None, (0, 0), 0, 1, 0, "the specification in plain torch")
    if weight.book is not None and act_quant == "none" and m > _MOST_BOOK_ROWS:
        why = "then torch's product: with many rows, values are looked up once; what else is asked for goes to mma_gemm_a16"
        return Explanation(f"sm_{gpu.architecture}", "dequantize", None, (64, 256), 1, 1, weight.n * weight.k * 2, why)
    problem = _problem(weight.native, m, dtype, None, None, 0.0, 0.0, None, False)
    problem.set_floats(0, _TYPES[dtype], weight.k, _ACT_QUANT[act_quant], act_symmetric)
    plan = _C.plan(problem, gpu)
    quantizer = None if act_quant == "none" or plan.quantizes else "quantize_activations"
    tile = (plan.tile_rows, plan.tile_tokens)
    return Explanation(
        f"sm_{gpu.architecture}", plan.kernel, quantizer, tile, plan.stages, plan.splits, plan.workspace, plan.why
    )


# ---- torch.library: the same on plain tensors

_WEIGHT_SCHEMA = (
    "Tensor codes, Tensor scales, Tensor? zeros, Tensor? offsets, Tensor? weight_bias, Tensor? perm, "
    "int n, int k, int bits, int group_size, Tensor? book"
)
#: How many of an operator's arguments they are.
_WEIGHT = 11
_EPILOGUE_SCHEMA = "Tensor? bias, str? activation, float low, float high"


def _fields(weight: PackedWeight) -> tuple[Any, ...]:
    """A weight as :data:`_WEIGHT_SCHEMA` lists it."""
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
    return _gemm_floats(x, PackedWeight(*args[:_WEIGHT]), *args[_WEIGHT:])


def _mixed_gemm_fake(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty((x.shape[0], args[6]), dtype=args[_WEIGHT + 7])


def _gemm_quantized_op(codes: Tensor, scales: Tensor, zeros: Tensor | None, block: int, *args: Any) -> Tensor:
    weight = PackedWeight(*args[:_WEIGHT])
    shape = torch.Size((codes.shape[0], weight.k))
    x = QuantizedActivations(codes, scales, zeros, block, weight.k, shape, torch.float32, weight.perm)
    return _gemm_quantized(x, weight, *args[_WEIGHT:])


def _gemm_quantized_fake(codes: Tensor, scales: Tensor, zeros: Tensor | None, block: int, *args: Any) -> Tensor:
    return codes.new_empty((codes.shape[0], args[6]), dtype=args[_WEIGHT + 5])


def _quantize_activations_fake(x: Tensor, perm: Tensor | None, block: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_quantized(x, block, symmetric)


def _dequantize_op(*args: Any) -> Tensor:
    return _dequantize(PackedWeight(*args[:_WEIGHT]), args[_WEIGHT])


def _dequantize_fake(*args: Any) -> Tensor:
    return cast(Tensor, args[0].new_empty((args[6], args[7]), dtype=args[_WEIGHT]))


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = "cutlass_ops::" + schema.split("(")[0]
    torch.library.define(name, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, ("CPU", "CUDA"), run)
    torch.library.register_fake(name, fake)


_register(
    f"mixed_gemm(Tensor x, {_WEIGHT_SCHEMA}, {_EPILOGUE_SCHEMA}, str act_quant, bool act_symmetric, Tensor? residual, "
    "ScalarType out_dtype, bool saturate) -> Tensor",
    _mixed_gemm_op,
    _mixed_gemm_fake,
)
_register(
    f"gemm_quantized(Tensor x_codes, Tensor x_scales, Tensor? x_zeros, int block, {_WEIGHT_SCHEMA}, {_EPILOGUE_SCHEMA}, "
    "Tensor? residual, ScalarType out_dtype, bool saturate) -> Tensor",
    _gemm_quantized_op,
    _gemm_quantized_fake,
)
_register(
    "quantize_activations(Tensor x, Tensor? perm, int block, bool symmetric) -> (Tensor, Tensor, Tensor)",
    _quantize_activations,
    _quantize_activations_fake,
)
_register(f"dequantize({_WEIGHT_SCHEMA}, ScalarType dtype) -> Tensor", _dequantize_op, _dequantize_fake)
