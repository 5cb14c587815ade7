"""The public operators: they check their arguments, allocate results, and call the kernels (CUDA)
or those of the host (CPU).

Each is also registered with ``torch.library`` under ``torch.ops.cutlass_ops``, on plain tensors,
with a fake implementation, so that ``torch.compile(fullgraph=True)`` traces through. Eager calls
skip the dispatcher, which costs more host time than all the rest of a call.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from .. import _C, reference
from ..weights import formats
from ..weights.eights import in_eights
from ..weights.packed_weight import PackedWeight
from ..weights.weight import QuantizedWeight
from .activations import MAX_M, QuantizedActivations
from .arguments import (
    any_autocast,
    check_bias,
    check_device,
    check_float,
    check_frozen,
    check_no_gradient,
    check_residual,
    check_transforms,
    dtype_names,
    modes_are_active,
    requires_grad,
    runs_directly,
)
from .call import Call
from .gemm_library import OF_FLOATS, OF_QUANTIZED
from .gradients import record
from .library import weight_fields
from .native import ACT_QUANT, DATA_TYPES, split_activation
from .products import all_values, check_panels, gemm_floats, gemm_quantized


def check_quantized(x: QuantizedActivations, weight: PackedWeight) -> int:
    """Raise ``ValueError`` if x does not fit the weight; returns x's columns."""
    if not isinstance(x, QuantizedActivations):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is expected")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}; the weight is on {weight.device}")
    # Two comparisons: torch.compile does not find a size that it made symbolic in a tuple.
    if x.block != -1 and x.block != formats.activation_block(weight.group_size):
        raise ValueError(
            f"x is quantised in blocks of {x.block}; beside weights in groups of "
            f"{weight.group_size} they must be of "
            f"{formats.activation_block(weight.group_size)}, or -1 (the whole row)"
        )
    # Under torch.compile one tensor may be two objects.
    same_order = x.perm is weight.perm or (
        is_compiling() and x.perm is not None and weight.perm is not None
    )
    if not same_order:
        raise ValueError(
            "x was not quantised in the weight's act order: pass the weight's perm to "
            "quantize_activations"
        )
    return x.k


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

    With a gated weight (``reorder([gate, up], gated=True)``) it is ``activation(x @ gate^T +
    bias_gate) * (x @ up^T + bias_up) + residual``, whose factors are not rounded before they are
    multiplied. Kernels then store fp32 sums, M x 2N x 4 bytes of workspace, that another kernel
    (``gate_sums``) multiplies.

    Sums are fp32, whatever the types; the result is rounded once. On a GPU the same input gives
    the same bits every time. On Hopper weights in groups of 16, 32 and 64, with offsets, with a
    code book or with scales of another dtype than x's may be rounded once to x's dtype if the
    result has it too; so may the values of int8 activations with weights of groups of 16, 32 and
    64, offsets or 8-bit zero points.
    ``exact=True`` keeps integers whole. :func:`explain` names the kernel, and whether it rounds.
    Zero points of activations are subtracted from the integer sums of each group. On Hopper, from
    129 rows on and with a result of 16 bits, they are compensated in fp32 instead, for many
    blocks or a whole row at once. Such a product needs column sums of the weight's codes:
    :meth:`PackedWeight.sum_codes` computes and keeps them, otherwise each call computes them,
    with the same bits.
    A NaN or infinity in a row of x makes that row of the result NaN (torch's product leaves
    infinities where they come out).

    A CPU has the reference's bits with any number of threads, but for an x that is not quantised:
    kernels for AVX2 and AVX-512 multiply five rows and more of it in fused multiply-adds. In
    bf16, where the CPU has products of that (AVX512_BF16), a kernel multiplies up to 31 rows by
    codes of 4 bits, and scales sums in fp32. From 32 rows on (16 with 8 bits) torch multiplies the
    weight's values, which are dequantised in panels and rounded once to bf16. All of these sum in
    another order. ``exact=True`` and ``batch_invariant=True`` keep the reference's bits.

    On a GPU no kernel multiplies an fp32 x as it is (``act_quant="none"``): the weight is
    dequantised in panels of rows, at most 256 MB of fp32 values at a time, and multiplied by torch,
    in TF32 only where ``torch.backends.cuda.matmul.allow_tf32`` is set, which torch does not do by
    itself. That takes many times as long as fp16 or bf16.

    Kernels read the weight ahead: they start while kernels that were launched before them still
    run (programmatic dependent launch), and wait for those before they read x, bias or residual,
    but not before they read the weight's codes, scales, zero points and offsets. After something
    on the GPU has written to a packed weight's tensors, synchronise the stream once before the
    next product, and call :meth:`PackedWeight.sum_codes` before CUDA graphs that were captured
    with sums it kept.

    Training: the result is differentiable in x, bias and residual; the weight is frozen. The
    gradient of x is that of ``torch.nn.functional.linear`` with :func:`dequantize`'s values, which
    the backward pass computes in panels of rows, at most 128 MB of 16-bit values at a time, and
    does not keep. Activations that ``act_quant`` quantises pass their gradient straight through, as
    if they were not rounded. An element that the activation clamps or ``saturate`` limits has
    gradient 0. There are no gradients of gradients.
    Under ``torch.autocast`` an fp32 x is cast to the autocast dtype first, as ``torch.nn.Linear``
    does it; fp16 and bf16 stay as they are.

    Args:
        x: fp16, bf16 or fp32 ``[..., K]`` on the weight's device, or what
            :func:`quantize_activations` returned, with the weight's ``perm`` and a fitting block.
        weight: what :func:`cutlass_ops.reorder` returned, ``[N, K]``.
        bias: fp16, bf16 or fp32 ``[N]``, if the weight has none; ``[2 * N]``, that of gate first,
            with a gated weight.
        activation: None, "relu", "relu6", "gelu" (the erf form), "gelu_tanh" (its approximation by
            tanh), "silu" or ``("clamp", lo, hi)``.
        act_quant: "none" multiplies x as it is; "block" quantises it to int8 with one scale for
            each row and block of min(group_size, 128) columns, "token" with one scale a row.
        act_symmetric: whether quantised activations have no zero point.
        residual: fp16, bf16 or fp32 ``[..., N]``, added last.
        out_dtype: fp16, bf16 or fp32; x's dtype if None.
        saturate: results beyond the largest number of ``out_dtype`` become that number
            instead of infinity.
        batch_invariant: a row of the result has the same bits whatever M and the other rows are.
            The kernel and the parts that K is cut into are then those for 128 rows, whatever M is;
            few rows are decoded by a kernel with the same bits, except where x has blocks with
            zero points, or one scale a row and K is cut or each row of the weight has one.
            Measured on an H100: 28672 x 4096 in groups of 128 takes 0.84 to 1.13 times as long up
            to 16 rows, 1.0 at 64, and 1.0 to 1.29 beyond; 4096 x 4096 with int4 weights 1.23 to
            1.28 times up to 16 rows, 1.26 to 1.62 beyond. Split-K takes slices x M x N x 4 bytes
            of workspace. On a GPU not with an fp32 x and ``act_quant="none"``.
        architecture: run kernels for this architecture (80 for sm_80) or earlier ones, where the
            GPU has faster ones; 0 for those of the GPU. For tests and comparisons; unused on a CPU.
        exact: round neither weights nor quantised activations to 16 bits, at the price of slower
            kernels for some formats; on a CPU, have the reference's bits.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is launched; the
            message has its value.
        RuntimeError: CUDA refused a launch; the message has the call, the error and the problem's
            shape. Or a gradient is required that does not exist: of the weight, or with an x that
            is quantised already; or torch.jit.trace, forward-mode differentiation or a transform of
            torch.func is active.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"weight is a {type(weight).__name__}; a PackedWeight (see "
            "cutlass_ops.reorder) is expected"
        )
    if weight.kernel_size:
        raise ValueError(reference.CONVOLUTION.format(weight.kernel_size))
    dynamo = is_dynamo_compiling()
    plain = bias is None and activation is None and residual is None and out_dtype is None
    if plain and not (saturate or batch_invariant or architecture or exact or dynamo):
        # The native module checks these arguments and torch's modes itself, in less time than the
        # checks below take. It returns None where they are unusual or wrong.
        if not act_symmetric:
            weight.check_sums()
        product: Tensor | None = _C.product(weight, x, act_quant, act_symmetric, None)
        if product is not None:
            return product
    if not dynamo and modes_are_active():
        check_transforms("mixed_gemm", x, bias, residual)
    differentiable = False
    if is_grad_enabled():
        check_frozen(weight)
        differentiable = getattr(x, "requires_grad", False)
        if bias is not None or residual is not None:
            differentiable = differentiable or requires_grad(bias) or requires_grad(residual)
    if (
        any_autocast()
        and isinstance(x, Tensor)
        and x.dtype is torch.float32
        and torch.is_autocast_enabled(x.device.type)
    ):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if not dynamo:
        weight.check_sums()
    device, n, k = weight.device, weight.n, weight.k
    if isinstance(x, Tensor):
        x = x.resolve_neg()
        dtype, shape = x.dtype, x.shape
        if dtype not in DATA_TYPES or x.device != device:
            check_float("x", x, device)
        columns = shape[-1] if shape else 0
    else:
        columns = check_quantized(x, weight)
        shape, dtype = x.shape, x.dtype
    if columns != k:
        raise ValueError(
            f"x has shape {tuple(shape)}; [..., {k}] is expected, for a weight of shape {[n, k]}"
        )
    is_matrix = len(shape) == 2
    out_shape = (shape[0], n) if is_matrix else (*shape[:-1], n)
    if act_quant not in ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    activation, low, high = split_activation(activation)
    if weight.book is not None and (act_quant != "none" or isinstance(x, QuantizedActivations)):
        raise ValueError(
            f"{reference.BOOK_NEEDS_FLOATS}; act_quant is {act_quant!r} and x a {type(x).__name__}"
        )
    if bias is not None:
        check_bias(bias, weight)
        bias = in_eights(bias) if weight.gated else bias.contiguous()
    if residual is not None:
        check_residual(residual, weight, out_shape)
        residual = residual.reshape(-1, n)
    if out_dtype is None:
        out_dtype = dtype
    elif out_dtype not in DATA_TYPES:
        raise TypeError(f"out_dtype is {out_dtype!r}; supported are {dtype_names(DATA_TYPES)}")
    if weight.gpu < 0 or not _C.built_with_cuda:
        check_device(device)
    elif dtype is torch.float32 and act_quant == "none" and isinstance(x, Tensor):
        check_panels(batch_invariant)
    values = (
        bias,
        activation,
        low,
        high,
        residual,
        out_dtype,
        saturate,
        act_quant,
        act_symmetric,
        batch_invariant,
        architecture,
        exact,
    )
    call = tuple.__new__(Call, values)  # in half the time of Call(...)
    if isinstance(x, QuantizedActivations):
        if differentiable:
            check_no_gradient("mixed_gemm of quantised activations", bias, residual)
        if runs_directly(x.codes, bias, residual):
            return gemm_quantized(x, weight, out_shape, call)
        quantized = (x.codes, x.scales, x.zeros, x.block, x.dtype)
        y = torch.ops.cutlass_ops.gemm_quantized(
            *quantized, *weight_fields(weight), *OF_QUANTIZED.values(call)
        )
        return cast(Tensor, y.view(out_shape))
    matrix = x if is_matrix else x.reshape(-1, k)
    if runs_directly(x, bias, residual):
        m = shape[0] if is_matrix else matrix.shape[0]
        if m > MAX_M:
            raise ValueError(f"x has {m} rows; at most {MAX_M} are supported")
        if differentiable:
            return record(matrix, weight, call).view(out_shape)
        return gemm_floats(matrix, m, weight, out_shape, call)
    y = torch.ops.cutlass_ops.mixed_gemm(matrix, *weight_fields(weight), *OF_FLOATS.values(call))
    return cast(Tensor, y.view(out_shape))


def dequantize(
    weight: PackedWeight | QuantizedWeight, dtype: torch.dtype = torch.float16
) -> Tensor:
    """The weight's values, ``[N, K]``, act order undone, or a convolution's ``[N, C, *kernel]``, on
    the weight's device; those of a gated weight are ``[2 * N, K]``, gate's before up's.

    Args:
        weight: canonical or packed.
        dtype: fp16, bf16 or fp32. The arithmetic is fp32, rounded once.

    Raises:
        TypeError: another weight or dtype.
        RuntimeError: a tensor of the packed weight requires a gradient.
    """
    if dtype not in DATA_TYPES:
        raise TypeError(f"dtype is {dtype!r}; supported are {dtype_names(DATA_TYPES)}")
    if isinstance(weight, QuantizedWeight):
        return reference.dequantize_weight(weight, dtype)
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"weight is a {type(weight).__name__}; a PackedWeight or a QuantizedWeight is expected"
        )
    check_device(weight.device)
    check_transforms("dequantize", *weight.tensors().values())
    if is_grad_enabled():
        check_frozen(weight)
    if runs_directly(weight.codes):
        return all_values(weight, dtype)
    return cast(
        Tensor, torch.ops.cutlass_ops.dequantize(*weight_fields(weight), dtype, weight.kernel_size)
    )
