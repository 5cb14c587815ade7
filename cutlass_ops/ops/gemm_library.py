"""The operators of :mod:`cutlass_ops.ops.gemm` in torch.library: the same on plain tensors,
with shapes alone.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from ..weights.packed_weight import PackedWeight
from .activations import (
    QuantizedActivations,
    empty_quantized,
    run_quantize,
    run_rms_norm_quantize,
    run_silu_mul_quantize,
)
from .call import CallSchema
from .library import WEIGHT_FIELDS, WEIGHT_SCHEMA, register, with_empty
from .products import all_values, gemm_floats, gemm_quantized

#: The call of a product of floats, and of one of quantised activations.
OF_FLOATS = CallSchema()
OF_QUANTIZED = CallSchema("act_quant", "act_symmetric")


def _mixed_gemm_op(x: Tensor, *args: Any) -> Tensor:
    fields, call = OF_FLOATS.split(args)
    weight, m = PackedWeight(*fields), x.shape[0]
    return gemm_floats(x, m, weight, (m, weight.n), call)


def _mixed_gemm_fake(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty((x.shape[0], args[6]), dtype=OF_FLOATS.split(args)[1].out_dtype)


def _gemm_quantized_op(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype, *args: Any
) -> Tensor:
    fields, call = OF_QUANTIZED.split(args)
    weight = PackedWeight(*fields)
    shape = torch.Size((codes.shape[0], weight.k))
    x = QuantizedActivations(codes, scales, zeros, block, weight.k, shape, dtype, weight.perm)
    return gemm_quantized(x, weight, (codes.shape[0], weight.n), call)


def _gemm_quantized_fake(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype, *args: Any
) -> Tensor:
    return codes.new_empty((codes.shape[0], args[6]), dtype=OF_QUANTIZED.split(args)[1].out_dtype)


def _quantize_activations_fake(
    x: Tensor, perm: Tensor | None, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    return empty_quantized(x, block, symmetric)


def _rms_norm_quantize_fake(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    perm: Tensor | None,
    block: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return *empty_quantized(x, block, symmetric), None if residual is None else x.new_empty(x.shape)


def _silu_mul_quantize_fake(
    gate: Tensor, up: Tensor, perm: Tensor | None, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    return empty_quantized(gate, block, symmetric)


def _dequantize_op(*args: Any) -> Tensor:
    # The dispatcher leaves out arguments that equal the schema's defaults.
    return all_values(
        PackedWeight(*args[:WEIGHT_FIELDS], *map(tuple, args[WEIGHT_FIELDS + 1 :])),
        args[WEIGHT_FIELDS],
    )


def _dequantize_fake(*args: Any) -> Tensor:
    n, k, kernel_size = (
        args[6] * (2 if args[11] else 1),
        args[7],
        [extent for sizes in args[WEIGHT_FIELDS + 1 :] for extent in sizes],
    )
    return cast(
        Tensor,
        args[0].new_empty(
            (n, k // math.prod(kernel_size), *kernel_size), dtype=args[WEIGHT_FIELDS]
        ),
    )


register(
    f"mixed_gemm(Tensor x, {WEIGHT_SCHEMA}, {OF_FLOATS.text}) -> Tensor",
    _mixed_gemm_op,
    _mixed_gemm_fake,
)
register(
    "gemm_quantized(Tensor x_codes, Tensor x_scales, Tensor? x_zeros, int block, ScalarType "
    f"x_dtype, {WEIGHT_SCHEMA}, "
    f"{OF_QUANTIZED.text}) -> Tensor",
    _gemm_quantized_op,
    _gemm_quantized_fake,
)
register(
    "quantize_activations(Tensor x, Tensor? perm, int block, bool symmetric) -> (Tensor, "
    "Tensor, Tensor)",
    with_empty(run_quantize),
    with_empty(_quantize_activations_fake),
)
register(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor? perm, int "
    "block, bool symmetric)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    with_empty(run_rms_norm_quantize),
    with_empty(_rms_norm_quantize_fake),
)
register(
    "silu_mul_quantize(Tensor gate, Tensor up, Tensor? perm, int block, bool symmetric) -> "
    "(Tensor, Tensor, Tensor)",
    with_empty(run_silu_mul_quantize),
    with_empty(_silu_mul_quantize_fake),
)
register(
    f"dequantize({WEIGHT_SCHEMA}, ScalarType dtype, int[] kernel_size=[]) -> Tensor",
    _dequantize_op,
    _dequantize_fake,
)
