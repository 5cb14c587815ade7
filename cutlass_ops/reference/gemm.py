"""The product, and the order of its fp32 sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import formats
from ..weights.weight import QuantizedWeight
from .activations import centred_activations, check_activations, quantize_activations
from .blocks import FLOAT_TYPES, check_matrix, in_blocks, of_each, row_chunks
from .weights import centred_weight, weight_rows

#: fp32 holds every integer up to this.
_EXACT_IN_FP32 = 2**24
#: ``None``, a name of :data:`ACTIVATIONS` or ``("clamp", lo, hi)``.
Activation: TypeAlias = "str | tuple[str, float, float] | None"
#: Activations that clamp, with their bounds.
CLAMPS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
#: Activations without parameters; "gelu" is the erf form, "gelu_tanh" its approximation
#: ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: partial(torch.clamp, min=low, max=high) for name, (low, high) in CLAMPS.items()},
    "gelu": F.gelu,
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
#: Why a product of a code book's values with quantised activations is refused.
BOOK_NEEDS_FLOATS = "a weight with a code book is multiplied by floats (act_quant='none')"
#: Why a product with a convolution's weight is refused.
CONVOLUTION = "the weight is a convolution's, with a kernel of {}; a matrix is expected"


def check_activation(activation: Activation) -> None:
    """Raise ``ValueError`` if :func:`activate` does not support ``activation``."""
    if activation is None or (isinstance(activation, str) and activation in ACTIVATIONS):
        return
    if isinstance(activation, tuple) and len(activation) == 3 and activation[0] == "clamp":
        if activation[1] <= activation[2]:
            return
        raise ValueError(f"activation is {activation!r}; clamp takes bounds lo <= hi")
    names = ", ".join(map(repr, ACTIVATIONS))
    raise ValueError(
        f"activation is {activation!r}; supported are None, {names} and ('clamp', lo, hi)"
    )


def activate(y: Tensor, activation: Activation) -> Tensor:
    """The activation of each element, in the dtype of y; ``ValueError`` if it does not exist."""
    check_activation(activation)
    if activation is None:
        return y
    if isinstance(activation, str):
        function = ACTIVATIONS[activation]
        return function(y) if activation in CLAMPS else of_each(function, y)
    return y.clamp(float(activation[1]), float(activation[2]))


def finite_or_nan(sums: Tensor) -> Tensor:
    """Sums, with NaN for those that are not finite."""
    return sums - (sums - sums)  # faster than isfinite(): infinity - infinity is NaN


def epilogue(
    total: Tensor,
    bias: Tensor | None = None,
    activation: Activation = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    saturate: bool = False,
    gated: bool = False,
) -> Tensor:
    """``activation(total + bias) + residual`` in total's dtype, rounded once to ``out_dtype``.

    If ``gated``, ``activation(gate) * up + residual`` of the two halves of ``total + bias``.

    A total that is not finite becomes NaN first, and NaN goes through every activation.
    What overflows ``out_dtype`` becomes inf, or its largest finite value if ``saturate``
    (NaN stays NaN).

    Args:
        total: sums, fp32 (fp64 for an oracle) ``[M, N]``, or ``[M, 2 * N]`` if ``gated``.
        bias: floating, an element for each column of total.
        activation: see :data:`Activation`.
        residual: floating ``[M, N]``.
        out_dtype: dtype of the result.
        saturate: clamp instead of overflowing.
        gated: total has the sums of gate and then those of up.
    """
    y = finite_or_nan(total)
    if bias is not None:
        y = y + bias.to(y.dtype)
    if gated:
        # Contiguous: torch's functions have other bits of strided tensors.
        gate, up = (half.contiguous() for half in y.chunk(2, -1))
        y = activate(gate, activation) * up
    else:
        y = activate(y, activation)
    if residual is not None:
        y = y + residual.to(y.dtype)
    if saturate:
        limits = torch.finfo(out_dtype)
        y = y.clamp(limits.min, limits.max)
    return y.to(out_dtype)


def _check_product(
    k: int, m: int, qw: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor | None:
    """The bias that applies, after checking shapes."""
    if gated and qw.n % 2:
        raise ValueError(f"gated is True and the weight {qw.shape}; an even N is expected")
    if qw.kernel_size:
        raise ValueError(CONVOLUTION.format(qw.kernel_size))
    if k != qw.k:
        raise ValueError(f"the activations have {k} columns; the weight {qw.shape} takes {qw.k}")
    if bias is not None and qw.bias is not None:
        raise ValueError("a bias is given, but the weight has one already")
    if bias is not None and tuple(bias.shape) != (qw.n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; {(qw.n,)} is expected")
    expected = (m, qw.n // 2 if gated else qw.n)
    if residual is not None and tuple(residual.shape) != expected:
        raise ValueError(f"residual has shape {tuple(residual.shape)}; {expected} is expected")
    return qw.bias if bias is None else bias


def gemm_quantized(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    block: int,
    qw: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: Activation = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    saturate: bool = False,
    gated: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The product of quantised activations and a quantised weight, ``[M, N]``.

    A step b along K is the smaller of block and group. With ``I[m, n, b]`` the sum over b of
    ``(qa - za) * (qw - zw)`` (exact) and ``S[m, b]`` the sum over b of ``sa * (qa - za)``,

        y[m, n] = sum over b of sa[m, b] * sw[n, b] * I[m, n, b]  +  sum over b of o[n, b] * S[m, b]

    in ``compute_dtype``, steps added in turn. The second term is summed separately and only if the
    weight has offsets.

    Args:
        codes, scales, zeros, block: as :func:`quantize_activations` takes and returns them. Column
            j of the codes belongs to column j of the weight's codes: with act order,
            ``x[:, qw.perm]`` was quantised.
        qw: the weight; its bias is added.
        bias, activation, residual, out_dtype, saturate, gated: see :func:`epilogue`.
        compute_dtype: fp32, or fp64 for an oracle.

    Raises:
        ValueError: shapes that do not fit, a block and a group of which neither divides the other,
            two biases, or a weight with a code book.
    """
    check_activations(codes, scales, zeros, block)
    if qw.book is not None:
        raise ValueError(BOOK_NEEDS_FLOATS)
    m, k = codes.shape
    bias = _check_product(k, m, qw, bias, residual, gated)
    sizes = [size for size in (block, qw.group_size) if size != -1]
    step = min(sizes, default=k)
    if max(sizes, default=k) % step:
        raise ValueError(
            f"block is {block} and group_size is {qw.group_size}; one must divide the other"
        )
    step = min(step, formats.padded_k(k))

    # Both factors are integers of at most 8 bits, so that fp32, and even TF32 and bf16 if torch's
    # matmul is set to them, holds them exactly. Every partial sum of a step is an integer no larger
    # than this bound: below 2^24 fp32 adds without rounding, in any order and with or without fused
    # multiply-add. fp64 does up to 2^53.
    largest_a = 128 if zeros is None else 255
    largest_w = formats.midpoint(qw.bits) if qw.zeros is None else 2**qw.bits - 1
    exact = torch.float64 if step * largest_a * largest_w > _EXACT_IN_FP32 else torch.float32

    steps = formats.group_count(k, step)
    start = torch.arange(steps, device=codes.device) * step
    # [steps, M, step]
    a = in_blocks(centred_activations(codes, zeros, block, exact), step).transpose(0, 1)
    scale_a = scales.to(compute_dtype)[:, start // (k if block == -1 else block)]  # [M, steps]
    group = start // (k if qw.group_size == -1 else qw.group_size)
    sums = scale_a * a.sum(-1).t().to(compute_dtype)  # [M, steps]

    total = torch.empty(m, qw.n, dtype=compute_dtype, device=codes.device)
    for rows in row_chunks(qw.n, k + 2 * m * steps):
        w = in_blocks(centred_weight(qw, rows, exact).flatten(1)[:, :k], step)
        integers = (a @ w.permute(1, 2, 0)).to(compute_dtype)  # [steps, M, rows]
        scale_w = qw.scales[rows].to(compute_dtype)[:, group]
        factors = scale_a.t()[:, :, None] * scale_w.t()[:, None, :]
        total[:, rows] = _in_turn(integers * factors, 0)
        if qw.offsets is not None:
            offsets = qw.offsets[rows].to(compute_dtype)[:, group]
            total[:, rows] += _in_turn(sums[:, None] * offsets, -1)
    return epilogue(total, bias, activation, residual, out_dtype, saturate, gated)


def mixed_gemm(
    x: Tensor,
    qw: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: Activation = None,
    act_quant: str = "none",
    act_symmetric: bool = True,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    saturate: bool = False,
    gated: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``activation(x @ W^T + bias) + residual``, ``[M, N]``; if ``gated``, ``[M, N / 2]``.

    Args:
        x: fp16, bf16 or fp32 ``[M, K]``. Act order gathers its columns before anything else.
        qw: the weight; its bias is added.
        act_quant: "none": x as it is, times :func:`dequantize_weight` in ``compute_dtype``; the
            values of a code book are first rounded to x's dtype (they are an operand of the tensor
            cores; scales never are). In fp32 the products of a group are summed
            (:func:`_group_sums`) before its scale multiplies them, then groups in turn; offsets
            times the sums of x are summed separately and added last. "token" or "block": x goes
            through :func:`quantize_activations`, with one block a row or blocks of
            :func:`cutlass_ops.weights.formats.activation_block`, and on to :func:`gemm_quantized`.
        act_symmetric: whether quantised activations have no zero points.
        bias, activation, residual, saturate, gated: see :func:`epilogue`; the first half of the
            weight's rows is gate's, the second up's.
        out_dtype: dtype of the result; x's if None.
        compute_dtype: fp32, or fp64 for an oracle.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
    """
    check_matrix("x", x, FLOAT_TYPES)
    if act_quant not in ("none", "token", "block"):
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    m, k = x.shape
    added_bias = _check_product(k, m, qw, bias, residual, gated)
    if out_dtype is None:
        out_dtype = x.dtype
    if qw.perm is not None:
        x = x[:, qw.perm.long()]
    if act_quant != "none":
        block = -1 if act_quant == "token" else formats.activation_block(qw.group_size)
        codes, scales, zeros = quantize_activations(x, block, act_symmetric)
        return gemm_quantized(
            codes,
            scales,
            zeros,
            block,
            qw,
            bias=bias,
            activation=activation,
            residual=residual,
            out_dtype=out_dtype,
            saturate=saturate,
            gated=gated,
            compute_dtype=compute_dtype,
        )
    book = None if qw.book is None else qw.book.to(x.dtype)
    x = x.to(compute_dtype)
    total = torch.empty(m, qw.n, dtype=compute_dtype, device=x.device)
    for rows in row_chunks(qw.n, k):
        if compute_dtype == torch.float64:
            total[:, rows] = x @ weight_rows(qw, rows, compute_dtype, book).t()
        else:
            _sum_products(x, qw, rows, book, total)
    return epilogue(total, added_bias, activation, residual, out_dtype, saturate, gated)


def _in_turn(values: Tensor, dim: int) -> Tensor:
    """Sums over ``dim``, one value added after the other."""
    total: Tensor | None = None
    for value in values.unbind(dim):
        total = value + 0.0 if total is None else total + value
    assert total is not None
    return total


def _run_sums(values: Tensor) -> Tensor:
    """Sums over the last dimension, a run of 16, 32, 64 or 128 columns, in an order that suits a
    CPU's vector registers.

    Each 64 columns, seen as ``[4, 2, 2, 2, 2]`` (j, b, h, t, c), are added to eight lanes (t, j),
    in the order of h, c, b, those of the second 64 after those of the first. Lanes j = 0 and 1 are
    added, and 2 and 3; of these, those of t = 0 and 1; and then the two sums that are left. A run
    of 32 columns has j = 0 and 1 alone, one of 16 has j = 0.
    """
    run = values.shape[-1]
    lead = values.shape[:-1]
    js = min(run, 64) // 16
    split = values.reshape(*lead, max(run // 64, 1), js, 2, 2, 2, 2)
    base = len(lead)
    order = [base + i for i in (0, 3, 5, 2, 4, 1)]
    lanes = _in_turn(split.permute(*range(base), *order).reshape(*lead, -1, 2, js), -3)
    pairs = lanes if js == 1 else lanes[..., 0::2] + lanes[..., 1::2]
    halves = pairs[..., 0, :] + pairs[..., 1, :]
    return halves[..., 0] + halves[..., 1] if js == 4 else halves[..., 0]


def _group_sums(values: Tensor) -> Tensor:
    """Sums over the last dimension, a group: of runs of at most 128 columns, and then
    of these in turn.
    """
    size = values.shape[-1]
    run = min(size, formats.K_PER_TILE)
    return _in_turn(_run_sums(values.reshape(*values.shape[:-1], size // run, run)), -1)


def _sum_products(
    x: Tensor, qw: QuantizedWeight, rows: slice, book: Tensor | None, total: Tensor
) -> None:
    """Some columns of x times the weight, both fp32, in the order that
    :func:`mixed_gemm` defines.
    """
    k = x.shape[1]
    size = formats.padded_k(k) if qw.group_size == -1 else qw.group_size
    looked_up = None if book is None else book.float()[qw.codes[rows].int()]
    values = (
        centred_weight(qw, rows, torch.float32).flatten(1)[:, :k]
        if looked_up is None
        else looked_up
    )
    values = in_blocks(values, size)
    scales = qw.scales[rows].float()
    for some in row_chunks(x.shape[0], values.numel(), 1):
        groups = in_blocks(x[some], size)
        sums = _in_turn(_group_sums(groups[:, None] * values) * scales, -1)
        if qw.offsets is not None:
            sums = sums + _in_turn(_group_sums(groups)[:, None] * qw.offsets[rows].float(), -1)
        total[some, rows] = sums
