"""The gradient of :func:`cutlass_ops.mixed_gemm`: ``dx = (dy * act'(z)) @ W`` with the packed weight's values.

The operator's autograd formula is registered here, and its backward is an operator too, so that torch.compile records both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import reference
from ..weights.packed_weight import PackedWeight
from . import arguments, library, native, products
from . import gemm_library as gemm_library  # defines the operators that get gradients here

#: Positions of mixed_gemm's arguments behind x, the weight's and the epilogue's: those that may require a gradient.
_BIAS = 1 + library.WEIGHT_FIELDS
_RESIDUAL = _BIAS + 4
#: Whether torch has products of 16-bit matrices with fp32 results (torch 2.8).
_FP32_RESULTS = hasattr(torch.ops.aten.mm, "dtype")


def _times_weight(grad: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """``grad @ W`` for a ``grad`` of ``[M, N]``, rounded once to ``dtype``.

    W has the dtype of ``grad``, a panel of its rows at a time; where there are several, their products are added in fp32.
    """
    if products.panel_rows(weight) == weight.n:
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


def through_activation(grad: Tensor, z: Tensor, activation: str | None, low: float, high: float) -> Tensor:
    """``grad * act'(z)``, with torch's own derivative of each function; ``ValueError`` if there is no such activation."""
    reference.check_activation(native.named_activation(activation, low, high))
    aten: Any = torch.ops.aten
    of_activation: dict[str | None, Callable[[], Tensor]] = {
        None: lambda: grad,
        "relu": lambda: aten.threshold_backward(grad, z, 0.0),
        "relu6": lambda: aten.hardtanh_backward(grad, z, 0.0, 6.0),
        "gelu": lambda: aten.gelu_backward(grad, z),
        "silu": lambda: aten.silu_backward(grad, z),
        "clamp": lambda: torch.where((z >= low) & (z <= high), grad, 0.0),
    }
    return of_activation[activation]()


def _backward_op(grad: Tensor, x: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(grad, x, PackedWeight(*args[: library.WEIGHT_FIELDS]), *args[library.WEIGHT_FIELDS :])


def _gradients(grad: Tensor, x: Tensor | None, weight: PackedWeight, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the bias (fp32) and of the residual; an empty tensor where one is not wanted."""
    bias, activation, low, high, residual, saturate, dtype, act_quant, act_symmetric, *choice, wanted = args
    # Of 16 bits where x and the result are of the same; the CPU computes in fp32, as the reference does.
    compute = torch.float32 if grad.is_cpu else torch.promote_types(dtype, grad.dtype)
    of_residual = grad
    with arguments.without_autocast(grad.device):
        if x is not None:
            end = cast(products.End, (bias, None, 0.0, 0.0, None, torch.float32, False, *choice))
            shape = (x.shape[0], weight.n)
            z = products.gemm_floats(x, x.shape[0], weight, act_quant, act_symmetric, shape, end)
            if saturate:
                y = reference.epilogue(z, None, native.named_activation(activation, low, high), residual)
                of_residual = torch.where(y.abs() <= torch.finfo(grad.dtype).max, grad, 0.0)
            grad = through_activation(of_residual.float(), z, activation, low, high)
        return (
            _times_weight(grad.to(compute), weight, dtype) if wanted[0] else grad.new_empty(0, dtype=dtype),
            grad.sum(0, dtype=torch.float32) if wanted[1] else grad.new_empty(0, dtype=torch.float32),
            of_residual.clone() if wanted[2] else of_residual.new_empty(0),
        )


def _backward_fake(grad: Tensor, x: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    n, k, dtype, wanted = args[6], args[7], args[library.WEIGHT_FIELDS + 6], args[-1]
    rows = grad.shape[0]
    return (
        grad.new_empty((rows, k) if wanted[0] else (0,), dtype=dtype),
        grad.new_empty((n,) if wanted[1] else (0,), dtype=torch.float32),
        grad.new_empty((rows, n) if wanted[2] else (0,)),
    )


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, weight, (bias, activation, low, high, residual, _, saturate) = inputs[0], inputs[1:_BIAS], inputs[_BIAS : _BIAS + 7]
    # What only the value before the activation needs is not kept where the gradient does not depend on that.
    again = activation is not None or saturate
    ctx.save_for_backward(
        x if again else None, *weight[:6], weight[10], bias if again else None, residual if saturate else None
    )
    ctx.sizes = weight[6:10]
    ctx.epilogue = activation, low, high, saturate
    ctx.choice = inputs[_BIAS + 7 :]
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, *weight, book, bias, residual = ctx.saved_tensors
    activation, low, high, saturate = ctx.epilogue
    dtype, bias_dtype, residual_dtype = ctx.dtypes
    wants_x, wants_bias, wants_residual = (ctx.needs_input_grad[i] for i in (0, _BIAS, _RESIDUAL))
    of_x: Tensor | None = None
    of_bias: Tensor | None = None
    of_residual = grad
    wanted = [wants_x, wants_bias, wants_residual and saturate]
    if any(wanted):
        end = (bias, activation, low, high, residual, saturate, dtype, *ctx.choice, wanted)
        of_x, of_bias, masked = torch.ops.cutlass_ops.mixed_gemm_backward(grad, x, *weight, *ctx.sizes, book, *end)
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
    """The same for eager calls: torch's recording of an operator takes half a millisecond of host time, this a tenth of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: PackedWeight, call: tuple[Any, ...]
    ) -> Tensor:
        act_quant, act_symmetric, (activation, low, high, out_dtype, saturate, *choice) = call
        again = activation is not None or saturate
        # The weight's tensors are saved so that torch notices when one is written to before the backward pass.
        ctx.save_for_backward(
            x if again else None, bias if again else None, residual if saturate else None, *weight.tensors().values()
        )
        ctx.weight, ctx.call = weight, call
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype
        end = cast(products.End, (bias, activation, low, high, residual, out_dtype, saturate, *choice))
        return products.gemm_floats(x, x.shape[0], weight, act_quant, act_symmetric, (x.shape[0], weight.n), end)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, residual, *_ = ctx.saved_tensors
        act_quant, act_symmetric, (activation, low, high, _, saturate, *choice) = ctx.call
        dtype, bias_dtype, residual_dtype = ctx.dtypes
        wants_x, wants_bias, wants_residual = ctx.needs_input_grad[:3]
        wanted = [wants_x, wants_bias, wants_residual and saturate]
        end = (bias, activation, low, high, residual, saturate, dtype, act_quant, act_symmetric, *choice, wanted)
        if torch.is_grad_enabled():  # the operator says that there is no gradient of a gradient
            of_x, of_bias, masked = torch.ops.cutlass_ops.mixed_gemm_backward(grad, x, *library.weight_fields(ctx.weight), *end)
        else:
            of_x, of_bias, masked = _gradients(grad, x, ctx.weight, *end)
        of_residual = masked if wanted[2] else grad
        return (
            of_x if wants_x else None,
            of_bias.to(bias_dtype) if wants_bias else None,
            of_residual.to(residual_dtype) if wants_residual else None,
            None,
            None,
        )


#: mixed_gemm's eager product with a gradient: x, bias, residual, the weight, and the other arguments.
record: Callable[..., Tensor] = _Recorded.apply


def _no_second_gradient(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("mixed_gemm has no gradient of its gradient: packed weights support first derivatives only")


library.register(
    f"mixed_gemm_backward(Tensor grad, Tensor? x, {library.WEIGHT_SCHEMA}, Tensor? bias, str? activation, float low, "
    "float high, Tensor? residual, bool saturate, ScalarType dtype, str act_quant, bool act_symmetric, bool batch_invariant, "
    "int architecture, bool exact, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
torch.library.register_autograd("cutlass_ops::mixed_gemm", _backward, setup_context=_setup_context)
torch.library.register_autograd("cutlass_ops::mixed_gemm_backward", _no_second_gradient)
