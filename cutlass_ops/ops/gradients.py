"""The gradient of :func:`cutlass_ops.mixed_gemm`: ``dx = (dy * act'(z)) @ W`` with the packed
weight's values.

The operator's autograd formula is registered here, and its backward is an operator too, so that
torch.compile records both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..weights import formats
from ..weights.eights import gate_first
from ..weights.packed_weight import PackedWeight
from . import arguments, library, products
from .call import Call
from .gemm_library import OF_FLOATS

#: Which of mixed_gemm's arguments may require a gradient, besides x.
_BIAS, _RESIDUAL = OF_FLOATS.place("bias"), OF_FLOATS.place("residual")
#: Whether torch has products of 16-bit matrices with fp32 results (torch 2.8).
_FP32_RESULTS = hasattr(torch.ops.aten.mm, "dtype")


def _times_weight(grad: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """``grad @ W`` for a ``grad`` of ``[M, rows]``, rounded once to ``dtype``.

    W has the dtype of ``grad``, a panel of its rows at a time; where there are several, their
    products are added in fp32.
    """
    if products.panel_rows(weight) == weight.rows:
        return (grad @ products.run_dequantize(weight, grad.dtype)).to(dtype)
    if not _FP32_RESULTS:
        grad = grad.float()
    total = torch.zeros(grad.shape[0], weight.k, dtype=torch.float32, device=grad.device)
    for rows, panel in products.panels(weight, grad.dtype):
        if grad.dtype == torch.float32:
            total.addmm_(grad[:, rows], panel)
        else:
            total += torch.mm(grad[:, rows], panel, out_dtype=torch.float32)
    return total.to(dtype)


def through_activation(grad: Tensor, z: Tensor, call: Call) -> Tensor:
    """``grad * act'(z)``, with torch's own derivative of each function but a clamp's, which passes
    at its bounds; ``ValueError`` if there is no such activation.
    """
    reference.check_activation(call.named_activation)
    aten: Any = torch.ops.aten
    of_activation: dict[str | None, Callable[[], Tensor]] = {
        None: lambda: grad,
        "relu": lambda: aten.threshold_backward(grad, z, 0.0),
        "relu6": lambda: aten.hardtanh_backward(grad, z, 0.0, 6.0),
        "gelu": lambda: aten.gelu_backward(grad, z),
        "silu": lambda: aten.silu_backward(grad, z),
        "gelu_tanh": lambda: aten.gelu_backward(grad, z, approximate="tanh"),
        "clamp": lambda: torch.where((z >= call.low) & (z <= call.high), grad, 0.0),
    }
    return of_activation[call.activation]()


def _through_gate(grad: Tensor, z: Tensor, call: Call) -> Tensor:
    """The gradient of z ``[M, rows]``, in the order of a gated weight, by that of ``[M, N]``."""
    eights = z.shape[1] // (2 * formats.GATED_ROWS)
    gate, up = z.view(len(z), eights, 2, formats.GATED_ROWS).unbind(2)
    grad = grad.view(gate.shape)
    of_gate = through_activation(grad * up, gate, call)
    of_up = grad * reference.activate(gate, call.named_activation)
    return torch.stack((of_gate, of_up), 2).view(z.shape)


def _backward_op(grad: Tensor, x: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    (*fields, dtype, wanted), call = OF_FLOATS.split(args)
    return _gradients(grad, x, PackedWeight(*fields), dtype, wanted, call)


def _gradients(
    grad: Tensor,
    x: Tensor | None,
    weight: PackedWeight,
    dtype: torch.dtype,
    wanted: Sequence[bool],
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the bias (fp32) and of the residual; an empty tensor where
    one is not wanted.
    """
    # 16 bits where x and the result have the same dtype of 16 bits; the CPU computes in fp32, as
    # the reference does.
    compute = torch.float32 if grad.is_cpu else torch.promote_types(dtype, grad.dtype)
    of_residual = grad
    with arguments.without_autocast(grad.device):
        if x is not None:
            z = products.biased_sums(x, weight, call)
            if call.saturate:
                gated = weight.gated
                total = gate_first(z, 1) if gated else z
                y = reference.epilogue(
                    total, None, call.named_activation, call.residual, gated=gated
                )
                of_residual = torch.where(y.abs() <= torch.finfo(grad.dtype).max, grad, 0.0)
            through = _through_gate if weight.gated else through_activation
            grad = through(of_residual.float(), z, call)
        return (
            _times_weight(grad.to(compute), weight, dtype)
            if wanted[0]
            else grad.new_empty(0, dtype=dtype),
            grad.sum(0, dtype=torch.float32)
            if wanted[1]
            else grad.new_empty(0, dtype=torch.float32),
            of_residual.clone() if wanted[2] else of_residual.new_empty(0),
        )


def _backward_fake(grad: Tensor, x: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    (*fields, dtype, wanted), _ = OF_FLOATS.split(args)
    n, k, gated, rows = fields[6], fields[7], fields[11], grad.shape[0]
    return (
        grad.new_empty((rows, k) if wanted[0] else (0,), dtype=dtype),
        grad.new_empty((2 * n if gated else n,) if wanted[1] else (0,), dtype=torch.float32),
        grad.new_empty((rows, n) if wanted[2] else (0,)),
    )


def _of_call(
    ctx: Any, x: Tensor, call: Call, gated: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Note the call; returns x, bias and residual where the gradient depends on
    them, to be saved.
    """
    again = call.activation is not None or call.saturate or gated
    ctx.call = call.without_tensors()
    ctx.dtypes = (
        x.dtype,
        None if call.bias is None else call.bias.dtype,
        None if call.residual is None else call.residual.dtype,
    )
    return (
        x if again else None,
        call.bias if again else None,
        call.residual if call.saturate else None,
    )


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    (x, *weight), call = OF_FLOATS.split(inputs)
    ctx.gated = weight[11]
    ctx.save_for_backward(*_of_call(ctx, x, call, ctx.gated), *weight[:6], weight[10])
    ctx.sizes = weight[6:10]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, residual, *weight, book = ctx.saved_tensors
    wants_x, wants_bias, wants_residual = (ctx.needs_input_grad[i] for i in (0, _BIAS, _RESIDUAL))
    dtype, bias_dtype, residual_dtype = ctx.dtypes
    of_x: Tensor | None = None
    of_bias: Tensor | None = None
    of_residual = grad
    call = ctx.call._replace(bias=bias, residual=residual)
    wanted = [wants_x, wants_bias, wants_residual and call.saturate]
    if any(wanted):
        args = (*weight, *ctx.sizes, book, ctx.gated, dtype, wanted, *OF_FLOATS.values(call))
        of_x, of_bias, masked = torch.ops.cutlass_ops.mixed_gemm_backward(grad, x, *args)
        of_residual = masked if wanted[2] else grad
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if wants_x:
        result[0] = of_x
    if wants_bias and of_bias is not None:
        result[_BIAS] = of_bias.to(bias_dtype)
    if wants_residual:
        result[_RESIDUAL] = of_residual.to(residual_dtype)
    return tuple(result)


class _Recorded(torch.autograd.Function):
    """The same for eager calls: torch's recording of an operator takes half a millisecond of host
    time, this a tenth of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        weight: PackedWeight,
        call: Call,
    ) -> Tensor:
        # The weight's tensors are saved so that torch notices when one is written to before
        # the backward pass.
        ctx.save_for_backward(*_of_call(ctx, x, call, weight.gated), *weight.tensors().values())
        ctx.weight = weight
        return products.gemm_floats(x, x.shape[0], weight, (x.shape[0], weight.n), call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, residual, *_ = ctx.saved_tensors
        dtype, bias_dtype, residual_dtype = ctx.dtypes
        wants_x, wants_bias, wants_residual = ctx.needs_input_grad[:3]
        call = ctx.call._replace(bias=bias, residual=residual)
        wanted = [wants_x, wants_bias, wants_residual and call.saturate]
        if torch.is_grad_enabled():  # the operator says that there is no gradient of a gradient
            args = (*library.weight_fields(ctx.weight), dtype, wanted, *OF_FLOATS.values(call))
            of_x, of_bias, masked = torch.ops.cutlass_ops.mixed_gemm_backward(grad, x, *args)
        else:
            of_x, of_bias, masked = _gradients(grad, x, ctx.weight, dtype, wanted, call)
        of_residual = masked if wanted[2] else grad
        return (
            of_x if wants_x else None,
            of_bias.to(bias_dtype) if wants_bias else None,
            of_residual.to(residual_dtype) if wants_residual else None,
            None,
            None,
        )


def record(x: Tensor, weight: PackedWeight, call: Call) -> Tensor:
    """mixed_gemm's eager product with a gradient, ``[M, N]``."""
    apply: Callable[..., Tensor] = _Recorded.apply
    return apply(x, call.bias, call.residual, weight, call)


def _no_second_gradient(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "mixed_gemm has no gradient of its gradient: packed weights support first derivatives only"
    )


library.register(
    f"mixed_gemm_backward(Tensor grad, Tensor? x, {library.WEIGHT_SCHEMA}, ScalarType dtype, "
    "bool[3] wanted, "
    f"{OF_FLOATS.text}) -> (Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
torch.library.register_autograd("cutlass_ops::mixed_gemm", _backward, setup_context=_setup_context)
torch.library.register_autograd("cutlass_ops::mixed_gemm_backward", _no_second_gradient)
