"""Activations that are quantised online: by themselves, or after a norm or a gated SiLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from .. import _C, reference
from ..weights import formats
from .arguments import (
    check_device,
    check_float,
    check_like,
    check_no_gradient,
    dtype_names,
    runs_directly,
)
from .native import DATA_TYPES, current_stream, pointer, row_matrix

MAX_M, _MAX_NORM_K = _C.max_m, _C.max_norm_k
_LEAST_NORM_EPS = _C.least_norm_eps
#: Up to this many rows, quantised activations have memory for the next power of two of rows.
_MOST_PADDED_ROWS = _C.padded_rows


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """int8 activations in kernel order, made by :func:`quantize_activations`.

    Attributes:
        codes: int8 ``[M, k_pad]``, K padded to 128 with each block's zero point; inside each 16
            columns in the order 0, 8, 1, 9, ..., 7, 15. A product may read memory behind the last
            row, and ignores it.
        scales: fp32 ``[B, stride]``, the M rows of x side by side in each block, stride being M
            rounded up to 16.
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
        """Codes int8 ``[M, K]``, scales fp32 ``[M, B]`` and zeros int8 ``[M, B]``
        in natural order.
        """
        m = self.codes.shape[0]
        blocks = formats.group_count(self.k, self.block)
        zeros = None if self.zeros is None else self.zeros[:blocks, :m].t().contiguous()
        return (
            reference.natural_order(self.codes, self.k),
            self.scales[:blocks, :m].t().contiguous(),
            zeros,
        )

    def dequantize(self) -> Tensor:
        """The values the codes stand for, fp32, of x's shape; columns as gathered by ``perm``."""
        codes, scales, zeros = self.natural()
        return reference.dequantize_activations(codes, scales, zeros, self.block).view(self.shape)


def empty_quantized(
    x: Tensor, block: int, symmetric: bool, rows: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, with memory for ``rows`` of them, scales and zeros of an x ``[M, K]``."""
    m, k_pad = x.shape[0], formats.padded_k(x.shape[1])
    stride = -(-m // 16) * 16
    blocks = 1 if block == -1 else k_pad // block
    device = x.device
    codes = torch.empty((m if rows is None else rows, k_pad), dtype=torch.int8, device=device)
    if rows is not None:
        codes.resize_(m, k_pad)
    scales = torch.empty((blocks, stride), dtype=torch.float32, device=device)
    return (
        codes,
        scales,
        None if symmetric else torch.empty((blocks, stride), dtype=torch.int8, device=device),
    )


def run_quantize(
    x: Tensor, perm: Tensor | None, block: int, symmetric: bool, **function: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x ``[M, K]`` -> codes, scales, zeros (None if symmetric) in kernel order.

    On a GPU ``function`` has the arguments of ``_C.quantize_activations`` that say which function
    of x is quantised.
    """
    m, k = x.shape
    # Few rows have memory for whole tiles: TMA reads existing rows faster than it fills rows that
    # are out of bounds with zeros.
    rows = 1 << max(0, m - 1).bit_length()
    codes, scales, zeros = empty_quantized(
        x, block, symmetric, rows if m < rows <= _MOST_PADDED_ROWS else None
    )
    x = row_matrix(x)
    if x.is_cpu:
        out = _C.QuantizedActivations(
            codes.data_ptr(), scales.data_ptr(), pointer(zeros), block, scales.shape[1], m
        )
        perm = None if perm is None else perm.contiguous()
        _C.cpu_quantize_activations(
            x.data_ptr(),
            DATA_TYPES[x.dtype],
            x.stride(0),
            m,
            k,
            pointer(perm),
            out,
            torch.get_num_threads(),
        )
        return codes, scales, zeros
    index = x.get_device()
    _C.quantize_activations(
        x.data_ptr(),
        DATA_TYPES[x.dtype],
        x.stride(0),
        m,
        k,
        pointer(perm),
        codes.data_ptr(),
        scales.data_ptr(),
        pointer(zeros),
        block,
        scales.shape[1],
        index,
        current_stream(index),
        **function,
    )
    return codes, scales, zeros


def run_rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    perm: Tensor | None,
    block: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes, scales, zeros and ``x + residual``."""
    if x.is_cpu:
        y, total = reference.rms_norm(
            x.detach(), weight.detach(), eps, None if residual is None else residual.detach()
        )
        return *run_quantize(y, perm, block, symmetric), None if residual is None else total
    norm = {"norm_weight_ptr": weight.data_ptr(), "norm_eps": eps}
    if residual is None:
        return *run_quantize(x, perm, block, symmetric, **norm), None
    residual = row_matrix(residual)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm |= {
        "residual_ptr": residual.data_ptr(),
        "residual_stride": residual.stride(0),
        "sum_ptr": total.data_ptr(),
    }
    return *run_quantize(x, perm, block, symmetric, **norm), total


def run_silu_mul_quantize(
    gate: Tensor, up: Tensor, perm: Tensor | None, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What :func:`silu_mul_quantize` does, with checked arguments, on tensors alone."""
    if gate.is_cpu:
        return run_quantize(reference.silu_mul(gate.detach(), up.detach()), perm, block, symmetric)
    up = row_matrix(up)
    return run_quantize(gate, perm, block, symmetric, up_ptr=up.data_ptr(), up_stride=up.stride(0))


def _check_quantize(x: Tensor, block: int, perm: Tensor | None) -> Tensor:
    """x as a matrix."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is expected")
    check_float("x", x, x.device)
    check_device(x.device)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; [..., K] with K at least 1 is expected")
    if block not in (*formats.SHORT_GROUPS, formats.MAX_ACTIVATION_BLOCK, -1):
        sizes = ", ".join(map(str, formats.SHORT_GROUPS))
        raise ValueError(
            f"block is {block!r}; supported are {sizes}, {formats.MAX_ACTIVATION_BLOCK} and -1 "
            "(the whole row)"
        )
    if perm is not None and not isinstance(perm, Tensor):
        raise TypeError(f"perm is a {type(perm).__name__}; a torch.Tensor or None is expected")
    if perm is not None and (
        perm.dtype != torch.int32 or tuple(perm.shape) != (x.shape[-1],) or perm.device != x.device
    ):
        raise ValueError(
            f"perm is {dtype_names((perm.dtype,))} {tuple(perm.shape)} on {perm.device}; "
            f"int32 {(x.shape[-1],)} on {x.device} is expected"
        )
    matrix = x.reshape(-1, x.shape[-1])
    if matrix.shape[0] > MAX_M:
        raise ValueError(f"x has {matrix.shape[0]} rows; at most {MAX_M} are supported")
    return matrix


def quantize_activations(
    x: Tensor, block: int = 128, symmetric: bool = True, perm: Tensor | None = None
) -> QuantizedActivations:
    """Quantise activations to int8, one scale (and zero point) for each row and block of K.

    The formulas are :func:`cutlass_ops.reference.quantize_activations`; every device finds the same
    codes and scales. The codes have no gradient: to train through quantised activations, pass
    floats and ``act_quant`` to :func:`mixed_gemm`.

    Args:
        x: fp16, bf16 or fp32 ``[..., K]``.
        block: 16, 32, 64 or 128 columns, or -1 for one block a row. A product wants
            :func:`cutlass_ops.weights.formats.activation_block` of its weight's group size, or -1.
        symmetric: whether there are no zero points.
        perm: int32 ``[K]``, the act order of the weight that is to be multiplied
            (``PackedWeight.perm``), or None.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: x requires a gradient.
    """
    matrix = _check_quantize(x, block, perm)
    check_no_gradient("quantize_activations", x)
    run = run_quantize if runs_directly(x, perm) else torch.ops.cutlass_ops.quantize_activations
    codes, scales, zeros = run(matrix, perm, block, symmetric)
    return QuantizedActivations(
        codes, scales, None if symmetric else zeros, block, x.shape[-1], x.shape, x.dtype, perm
    )


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
    """:func:`quantize_activations` of the root mean square norm of x, or of x + residual, without
    storing the norm.

    The results are those of :func:`cutlass_ops.reference.rms_norm` and then
    :func:`quantize_activations`, bit for bit, on every device.

    Args:
        x: fp16, bf16 or fp32 ``[..., K]``.
        weight: of the norm, ``[K]``, of x's dtype.
        eps: added to the mean square, 1e-15 to 1.
        residual: of x's dtype and shape, added to x first, or None.
        block, symmetric, perm: as in :func:`quantize_activations`; the norm itself has no
            act order.

    Returns:
        The quantised norm; with a residual also ``x + residual``, rounded to x's dtype: the
        residual of the next layer.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: x, weight or residual requires a gradient.
    """
    matrix = _check_quantize(x, block, perm)
    check_no_gradient("rms_norm_quantize", x, weight, residual)
    k = matrix.shape[1]
    check_like("weight", weight, x, (k,))
    if k > _MAX_NORM_K:
        raise ValueError(f"x has {k} columns; a norm of at most {_MAX_NORM_K} is supported")
    if not _LEAST_NORM_EPS <= eps <= 1.0:
        raise ValueError(f"eps is {eps!r}; {_LEAST_NORM_EPS:g} to 1 is supported")
    if residual is not None:
        check_like("residual", residual, x, tuple(x.shape))
    rows = None if residual is None else residual.reshape(-1, k)
    run = (
        run_rms_norm_quantize
        if runs_directly(x, weight, residual, perm)
        else torch.ops.cutlass_ops.rms_norm_quantize
    )
    codes, scales, zeros, total = run(
        matrix, weight.contiguous(), eps, rows, perm, block, symmetric
    )
    quantized = QuantizedActivations(
        codes, scales, None if symmetric else zeros, block, k, x.shape, x.dtype, perm
    )
    return quantized if residual is None or total is None else (quantized, total.view(x.shape))


def silu_mul_quantize(
    gate: Tensor, up: Tensor, block: int = 128, symmetric: bool = True, perm: Tensor | None = None
) -> QuantizedActivations:
    """:func:`quantize_activations` of ``silu(gate) * up``, without storing the product.

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
    check_no_gradient("silu_mul_quantize", gate, up)
    check_like("up", up, gate, tuple(gate.shape))
    run = (
        run_silu_mul_quantize
        if runs_directly(gate, up, perm)
        else torch.ops.cutlass_ops.silu_mul_quantize
    )
    codes, scales, zeros = run(matrix, up.reshape(-1, up.shape[-1]), perm, block, symmetric)
    k = matrix.shape[1]
    return QuantizedActivations(
        codes, scales, None if symmetric else zeros, block, k, gate.shape, gate.dtype, perm
    )
