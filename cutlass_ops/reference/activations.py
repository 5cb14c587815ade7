"""Activations: their quantisation, and what decoders compute between two products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import formats
from .blocks import FLOAT_TYPES, check_block, check_matrix, in_blocks, of_each, quotient

#: Below this, the range of a block or group counts as zero: its reciprocal could overflow.
SMALLEST_RANGE = 2.0**-100


def quantize_activations(
    x: Tensor, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise activations to int8, one scale (and zero point) for each row and block of K.

    Everything is computed in fp32, each operation rounded separately; amax, lo and hi are taken
    over the block.

    - symmetric: ``s = amax / 127``, ``r = 127 / amax``, ``q = clamp(rint(x * r), -127, 127)``;
    - asymmetric: ``lo = min(0, x)``, ``hi = max(0, x)``, ``s = (hi - lo) / 255``,
      ``r = 255 / (hi - lo)``, ``z = clamp(rint(-128 - lo * r), -128, 127)``,
      ``q = clamp(rint(x * r) + z, -128, 127)``.

    A block whose range (amax or hi - lo) is below 2^-100 has s = 1, q = z = 0. A block whose range
    is not finite (it holds NaN or inf, or hi - lo overflows) has s = NaN, q = z = 0, so that every
    product with it is NaN.

    Args:
        x: fp16, bf16 or fp32 ``[M, K]``.
        block: columns that share a scale; the last block may be short. -1: one block a row.
        symmetric: whether there are no zero points.

    Returns:
        codes int8 ``[M, K]``, scales fp32 ``[M, B]`` and zeros int8 ``[M, B]``, or None if
        symmetric. The value of a code is ``scale * (code - zero)``.

    Raises:
        TypeError, ValueError: x is not such a matrix, or block is not a number of columns or -1.
    """
    check_matrix("x", x, FLOAT_TYPES)
    check_block(block)
    k = x.shape[1]
    values = in_blocks(x.float(), block)
    lo = values.amin(-1).clamp(max=0)
    hi = values.amax(-1).clamp(min=0)
    # NaN goes through amin, amax and maximum. The zeros that fill a short block move neither
    # amax nor lo nor hi.
    span = torch.maximum(hi, -lo) if symmetric else hi - lo
    steps = 127.0 if symmetric else 255.0
    regular = span.isfinite() & (span >= SMALLEST_RANGE)
    scales = torch.where(regular, quotient(span, steps, span), 1.0)
    scales = torch.where(span.isfinite(), scales, torch.nan)
    reciprocal = quotient(steps, span, span)
    codes = (values * reciprocal[..., None]).round()
    if symmetric:
        zeros = None
        codes = codes.clamp(-127, 127)
    else:
        zeros = (-128.0 - lo * reciprocal).round().clamp(-128, 127)
        zeros = torch.where(regular, zeros, 0.0)
        codes = (codes + zeros[..., None]).clamp(-128, 127)
        zeros = zeros.to(torch.int8)
    codes = torch.where(regular[..., None], codes, 0.0).to(torch.int8)
    return codes.flatten(1)[:, :k].contiguous(), scales, zeros


def centred_activations(
    codes: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype
) -> Tensor:
    """The integers ``q - z`` ``[M, K]``."""
    if zeros is None:
        return codes.to(dtype)
    return (in_blocks(codes.to(dtype), block) - zeros.to(dtype)[..., None]).flatten(1)[
        :, : codes.shape[1]
    ]


def dequantize_activations(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values ``s * (q - z)``, rounded to fp32 or fp64, ``[M, K]``, of what
    :func:`quantize_activations` returns.
    """
    check_activations(codes, scales, zeros, block)
    integers = in_blocks(centred_activations(codes, zeros, block, dtype), block)
    return (integers * scales.to(dtype)[..., None]).flatten(1)[:, : codes.shape[1]].contiguous()


def check_activations(
    codes: Tensor, scales: Tensor | None, zeros: Tensor | None, block: int
) -> None:
    """Raise unless these are codes, scales and zero points of one quantisation."""
    check_matrix("codes", codes, (torch.int8,))
    check_block(block)
    shape = (codes.shape[0], formats.group_count(codes.shape[1], block))
    for name, value, dtype in (("scales", scales, torch.float32), ("zeros", zeros, torch.int8)):
        if value is not None:
            check_matrix(name, value, (dtype,))
            if tuple(value.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; {shape} is expected")


def _sum_of_squares(x: Tensor) -> Tensor:
    """Sums over the rows of fp32 ``[M, K]``, in an order that suits a GPU.

    The squares of each 512 columns are added in pairs, neighbours first; of these sums, those 32
    apart are added in the order of K, and the 32 that are left in pairs.
    """

    def in_pairs(values: Tensor) -> Tensor:
        while values.shape[-1] > 1:
            values = values[..., 0::2] + values[..., 1::2]
        return values[..., 0]

    def in_whole(values: Tensor, size: int) -> Tensor:
        rows, columns = values.shape
        return F.pad(values, (0, -columns % size)).view(rows, -(-columns // size), size)

    runs = in_pairs(in_whole(x * x, 512))
    rounds = in_whole(runs, 32).unbind(1)
    total = rounds[0]
    for further in rounds[1:]:
        total = total + further
    return in_pairs(total)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Root mean square norm of the rows of ``x``, or of ``s = x + residual``.

    ``y = (s * r) * weight`` with ``r = 1 / sqrt(mean of s^2 + eps)``. Every operation is rounded to
    fp32, and s, the product in parentheses and y once more to x's dtype. The squares are added in
    an order that is part of the specification.

    Args:
        x: fp16, bf16 or fp32 ``[M, K]``.
        weight: ``[K]`` of x's dtype.
        eps: 1e-15 to 1; rounded to fp32.
        residual: ``[M, K]`` of x's dtype, or None.

    Returns:
        y and s, ``[M, K]`` of x's dtype.
    """
    check_matrix("x", x, FLOAT_TYPES)
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = total.float()
    mean = quotient(_sum_of_squares(values), float(x.shape[1]), values)
    # Computed in fp64, whose root rounds to the nearest fp32: torch's fp32 root on CPUs does not.
    root = (mean + values.new_full((), eps)).double().sqrt().float()
    factor = quotient(1.0, root, values)
    y = (values * factor[:, None]).to(x.dtype).float() * weight.float()
    return y.to(x.dtype), total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` with ``silu(v) = v / (1 + exp(-v))``, of gate's dtype.

    Every operation is rounded to fp32, and silu and the result once more to gate's dtype. The
    device computes the exponential: CPUs and GPUs may differ in its last place.
    """
    values = gate.float()
    activated = quotient(values, 1.0 + of_each(torch.exp, -values), values).to(gate.dtype)
    return (activated.float() * up.float()).to(gate.dtype)


def activation_order(codes: Tensor, zeros: Tensor | None, block: int) -> Tensor:
    """Codes ``[M, K]`` in kernel order, int8 ``[M, k_pad]``, K padded to 128.

    Inside each 16 columns, position ``2 * (k % 8) + (k % 16) // 8`` holds column k. A padding
    column holds the zero point of its block, or 0 where there are no zero points or where no column
    of its block is real.
    """
    check_activations(codes, None, zeros, block)
    m, k = codes.shape
    k_pad = formats.padded_k(k)
    padded = F.pad(codes, (0, k_pad - k))
    if zeros is not None:
        end = k_pad if block == -1 else min(k_pad, zeros.shape[1] * block)
        padded[:, k:end] = zeros[:, -1:]
    return padded.view(m, k_pad // 16, 2, 8).transpose(2, 3).reshape(m, k_pad)


def natural_order(ordered: Tensor, k: int) -> Tensor:
    """The inverse of :func:`activation_order`: int8 ``[M, k_pad]`` to ``[M, K]``,
    padding dropped.
    """
    check_matrix("ordered", ordered, (torch.int8,))
    if ordered.shape[1] != formats.padded_k(k):
        raise ValueError(
            f"ordered has {ordered.shape[1]} columns; K = {k} is padded to {formats.padded_k(k)}"
        )
    m, k_pad = ordered.shape
    return ordered.view(m, k_pad // 16, 8, 2).transpose(2, 3).reshape(m, k_pad)[:, :k].contiguous()
