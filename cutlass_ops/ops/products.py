"""Products with a packed weight, and its values: the arguments are checked, and no
gradient is recorded.

Kernels compute them on a GPU and C++ functions on a CPU; torch multiplies dequantised panels of the
weight where neither do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _C, reference
from ..weights import formats
from ..weights.eights import gate_first
from ..weights.packed_weight import PackedWeight
from .activations import QuantizedActivations
from .arguments import without_autocast
from .call import Call
from .native import (
    ACT_QUANT,
    DATA_TYPES,
    current_stream,
    data_type,
    on_device,
    pointer,
    row_matrix,
)

#: Values of a weight that are dequantised at a time: 128 MB of 16-bit ones, so that a layer of
#: 14336 x 4096 is one panel.
_PANEL_VALUES = 1 << 26

#: And on a CPU, where they stay in a core's cache: so many a thread.
_CPU_PANEL_VALUES = 1 << 20


def _launch(
    weight: PackedWeight,
    x: Tensor,
    quantized: _C.QuantizedActivations | None,
    m: int,
    x_type: _C.DataType,
    shape: tuple[int, ...],
    call: Call,
) -> Tensor:
    """The product in a new tensor of this shape; x is a matrix of floats, or the codes
    of ``quantized``.
    """
    residual = None if call.residual is None else row_matrix(call.residual)
    y: Tensor = _C.mixed_gemm(
        weight.native,
        x,
        quantized,
        m,
        x_type,
        ACT_QUANT[call.act_quant] if quantized is None else _C.ActQuant.none,
        call.act_symmetric or quantized is not None,
        call.epilogue(call.bias_of(weight), residual),
        shape,
        call.out_dtype,
        DATA_TYPES[call.out_dtype],
        call.batch_invariant,
        call.architecture,
        call.exact,
        weight.gpu,
        current_stream(weight.gpu),
    )
    return y


def _cpu_gemm(
    x: Tensor,
    quantized: _C.QuantizedActivations | None,
    m: int,
    weight: PackedWeight,
    shape: tuple[int, ...],
    call: Call,
) -> Tensor:
    """The product in host memory; x is a matrix of floats, or the codes of ``quantized``.

    A row has the same bits whatever M and the number of threads are, but by a kernel for bf16
    (:func:`uses_bfloat16_on_cpu`).
    """
    bias = call.bias_of(weight)
    plain = call.activation is None and call.residual is None and not call.saturate
    y = torch.empty(shape, dtype=call.out_dtype if plain else torch.float32, device="cpu")
    first = bias if plain else None
    _C.cpu_mixed_gemm(
        weight.native,
        m,
        data_type(x) if quantized is None else _C.DataType.none,
        x.data_ptr(),
        x.stride(0),
        ACT_QUANT[call.act_quant] if quantized is None else _C.ActQuant.none,
        call.act_symmetric or quantized is not None,
        quantized,
        pointer(first),
        data_type(first),
        y.data_ptr(),
        DATA_TYPES[y.dtype],
        call.exact or call.batch_invariant,
        torch.get_num_threads(),
    )
    return y if plain else finish(y, bias, call)


def finish(sums: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Bias, activation and residual for fp32 sums of the result's shape."""
    residual = None if call.residual is None else call.residual.view(sums.shape)
    return reference.epilogue(
        sums, bias, call.named_activation, residual, call.out_dtype, call.saturate
    )


def _gate(sums: Tensor, shape: tuple[int, ...], call: Call) -> Tensor:
    """A gated weight's outputs of :func:`biased_sums`."""
    total = gate_first(sums, 1)
    return reference.epilogue(
        total, None, call.named_activation, call.residual, call.out_dtype, call.saturate, gated=True
    ).view(shape)


def biased_sums(x: Tensor, weight: PackedWeight, call: Call) -> Tensor:
    """x ``[M, K]`` of floats -> fp32 ``[M, rows]``: what the activation is applied to, in the order
    of the packed rows.
    """
    m, matrix = x.shape[0], weight.eights
    return gemm_floats(x, m, matrix, (m, matrix.n), call.before_activation())


def panel_type(
    m: int, weight: PackedWeight, on_gpu: bool, dtype: torch.dtype, call: Call
) -> torch.dtype | None:
    """The dtype in which :func:`panel_gemm` computes a product of m rows of floats; None where
    kernels compute it.

    On a GPU no kernel multiplies fp32 as it is. A CPU without a kernel that rounds the weight's
    values multiplies many rows of bf16 faster by torch, where it has instructions for that and
    nothing but a bias of bf16 comes after the sums, which oneDNN then rounds once.
    """
    if call.act_quant != "none":
        return None
    if on_gpu:
        return torch.float32 if dtype is torch.float32 else None
    if call.batch_invariant or call.exact or m < _C.cpu_panel_rows:
        return None
    if uses_bfloat16_on_cpu(m, weight, dtype, call) and (
        m < _C.cpu_panel_rows_of_bfloat16 or rounds_weight_on_cpu(m, weight, dtype, call)
    ):
        return None
    bias = call.bias_of(weight)
    rounds_once = call.activation is None and call.residual is None and not call.saturate
    rounds_once = rounds_once and not weight.gated and (bias is None or bias.dtype is dtype)
    in_bfloat16 = (
        dtype is call.out_dtype is torch.bfloat16 and rounds_once and _C.cpu_multiplies_bfloat16()
    )
    return torch.bfloat16 if in_bfloat16 else None


def uses_bfloat16_on_cpu(m: int, weight: PackedWeight, dtype: torch.dtype, call: Call) -> bool:
    """Whether a CPU multiplies m rows of floats by a kernel for bf16."""
    return _whether(_C.cpu_uses_bfloat16, m, weight, dtype, call)


def rounds_weight_on_cpu(m: int, weight: PackedWeight, dtype: torch.dtype, call: Call) -> bool:
    """Whether that kernel rounds the weight's values to bf16."""
    return _whether(_C.cpu_rounds_weight, m, weight, dtype, call)


def _whether(
    question: Callable[[_C.PackedWeight, int, _C.DataType, bool], bool],
    m: int,
    weight: PackedWeight,
    dtype: torch.dtype,
    call: Call,
) -> bool:
    exact = call.exact or call.batch_invariant
    return call.act_quant == "none" and question(weight.native, m, DATA_TYPES[dtype], exact)


def check_panels(batch_invariant: bool) -> None:
    """Raise ``ValueError`` for ``batch_invariant``, which :func:`panel_gemm` is not."""
    if batch_invariant:
        raise ValueError(
            "batch_invariant is True and x is float32 with act_quant='none', which torch's product "
            "takes on a GPU, and the "
            "bits of that depend on M; float16 and bfloat16, and 'token' and 'block', are supported"
        )


def panel_values(on_gpu: bool) -> int:
    """Values of a panel of a product."""
    return _PANEL_VALUES if on_gpu else _CPU_PANEL_VALUES * torch.get_num_threads()


def panel_rows(weight: PackedWeight, values: int | None = None) -> int:
    """Rows of a weight that are dequantised at a time, with at most so many values or else the
    fewest rows there can be.
    """
    values = _PANEL_VALUES if values is None else values
    rows = max(values // weight.k // formats.ROWS_PER_PANEL, 1) * formats.ROWS_PER_PANEL
    return min(rows, weight.rows)


def panels(
    weight: PackedWeight, dtype: torch.dtype, values: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The weight's values, :func:`panel_rows` at a time: which, and ``[rows, K]``."""
    step = panel_rows(weight, values)
    for start in range(0, weight.rows, step):
        stop = min(start + step, weight.rows)
        yield slice(start, stop), run_dequantize(weight, dtype, start, stop)


def rounded_book(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """The weight whose values a product with an x of ``dtype`` has: those of a code book are
    rounded to it first.
    """
    return weight if weight.book is None else replace(weight, book=weight.book.to(dtype).float())


def panel_gemm(
    x: Tensor, weight: PackedWeight, shape: tuple[int, ...], call: Call, compute: torch.dtype
) -> Tensor:
    """x ``[M, K]`` -> ``[M, N]``, seen as ``shape``: torch's product, in a dtype of
    :func:`panel_type`, with :func:`panels`.
    """
    check_panels(call.batch_invariant)
    total = torch.empty(x.shape[0], weight.n, dtype=compute, device=x.device)
    bias = call.bias_of(weight)
    added = None if compute is torch.float32 else bias
    weight, x = rounded_book(weight, x.dtype), x.to(compute)
    with without_autocast(x.device):
        for rows, values in panels(weight, compute, panel_values(x.is_cuda)):
            total[:, rows] = F.linear(x, values, None if added is None else added[rows])
    if compute is not torch.float32:
        return reference.finite_or_nan(total).view(shape)
    return finish(total.view(shape), bias, call)


def gemm_floats(
    x: Tensor, m: int, weight: PackedWeight, shape: tuple[int, ...], call: Call
) -> Tensor:
    """x ``[M, K]`` of floats -> ``[M, N]``, seen as ``shape``."""
    on_gpu, dtype = weight.gpu >= 0, x.dtype
    if not on_gpu or dtype is torch.float32:
        compute = panel_type(m, weight, on_gpu, dtype, call)
        if weight.gated and (compute is not None or not on_gpu):
            return _gate(biased_sums(x, weight, call), shape, call)
        if compute is not None:
            return panel_gemm(x, weight, shape, call, compute)
    if not on_gpu:
        return _cpu_gemm(row_matrix(x), None, m, weight, shape, call)
    if call.batch_invariant:
        # Rows that start on 16 bytes are read by other kernels than those that do not.
        x = x.contiguous().as_strided((m, weight.k), (weight.k, 1))
        if x.data_ptr() % 16:
            x = x.clone()
    return _launch(weight, x, None, m, DATA_TYPES[dtype], shape, call)


def native_quantized(x: QuantizedActivations) -> _C.QuantizedActivations:
    """Quantised activations as the extension takes them."""
    codes = x.codes
    rows = (codes.untyped_storage().nbytes() - codes.storage_offset()) // codes.shape[1]
    return _C.QuantizedActivations(
        codes.data_ptr(), x.scales.data_ptr(), pointer(x.zeros), x.block, x.scales.shape[1], rows
    )


def gemm_quantized(
    x: QuantizedActivations, weight: PackedWeight, shape: tuple[int, ...], call: Call
) -> Tensor:
    """Quantised activations -> ``[M, N]``, seen as ``shape``."""
    m = x.codes.shape[0]
    quantized = native_quantized(x)
    if weight.gpu < 0 and weight.gated:
        sums = gemm_quantized(x, weight.eights, (m, weight.rows), call.before_activation())
        return _gate(sums, shape, call)
    if weight.gpu < 0:
        return _cpu_gemm(x.codes, quantized, m, weight, shape, call)
    # Tensors without elements have no address: no rows look like floats, which fp32
    # ones must not be.
    x_type = DATA_TYPES[x.dtype if m else torch.float16]
    return _launch(weight, x.codes, quantized, m, x_type, shape, call)


def channels_last(
    weight: PackedWeight, dtype: torch.dtype, start: int = 0, stop: int | None = None
) -> Tensor:
    """Values ``[N, C, *kernel]`` of a convolution's weight, in the packed order of columns: taps,
    and the channels of each.
    """
    channels = weight.k // weight.taps
    if weight.gpu < 0:
        rows = run_dequantize(weight.matrix, dtype, start, stop)
        return rows.view(rows.shape[0], *weight.kernel_size, -1)[..., :channels].movedim(-1, 1)
    count = (weight.n if stop is None else stop) - start
    taps = torch.empty(count, *weight.kernel_size, channels, dtype=dtype, device=weight.device)
    padded = channels if weight.taps > 1 else 0  # one tap is the whole row
    end = (taps.data_ptr(), DATA_TYPES[dtype], current_stream(weight.gpu), start, count, padded)
    with on_device(weight.device):
        _C.dequantize(weight.matrix.native, *end)
    return taps.movedim(-1, 1)


def run_dequantize(
    weight: PackedWeight, dtype: torch.dtype, start: int = 0, stop: int | None = None
) -> Tensor:
    """Packed rows ``start``, a multiple of 64, to ``stop``."""
    stop = weight.rows if stop is None else stop
    if weight.kernel_size:
        return channels_last(weight, dtype, start, stop).contiguous()
    out = torch.empty(stop - start, weight.k, dtype=dtype, device=weight.device)
    if weight.gpu < 0:
        threads = torch.get_num_threads()
        _C.cpu_dequantize(
            weight.native, out.data_ptr(), DATA_TYPES[dtype], start, stop - start, threads
        )
        return out
    with on_device(weight.device):
        _C.dequantize(
            weight.native,
            out.data_ptr(),
            DATA_TYPES[dtype],
            current_stream(weight.gpu),
            start,
            stop - start,
        )
    return out


def all_values(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """All values of a weight; those of a gated one ``[2 * N, K]``, gate's before up's."""
    values = run_dequantize(weight, dtype)
    return gate_first(values, 0) if weight.gated else values
