"""The products of a mixture of experts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from .. import _C, reference
from ..reference import experts as reference_experts
from ..weights.eights import gated_order
from ..weights.packed_experts import EIGHTS_PARTS, PackedExperts, in_eights
from ..weights.packed_weight import stream_of
from ..weights.weight import PARTS
from . import arguments, gemm, kept, library, native, products
from .call import Call, CallSchema
from .routing import Routing, check_ids, check_route, route_problem

_WEIGHT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_experts(name: str, experts: Any) -> None:
    if not isinstance(experts, PackedExperts):
        raise TypeError(
            f"{name} is a {type(experts).__name__}; PackedExperts (see "
            "cutlass_ops.reorder_experts) are expected"
        )
    if is_grad_enabled():
        arguments.check_frozen(experts.weight)


def check_down(down: PackedExperts) -> None:
    """Raise ``ValueError`` for a second product whose rows are packed as those of gate and up."""
    if down.gated:
        raise ValueError("down was packed with gated=True, which is for weights of gate and up")


_PLAIN_ROWS = "gate_up was packed without gated=True"


def _gated(gate_up: PackedExperts, direct: bool) -> PackedExperts:
    """``gate_up`` with its rows in eights: the weight itself, or a kept conversion of it, which
    eager calls make.

    torch.compile may run operators in the memory pool of a CUDA graph, where kept tensors must not
    be allocated.
    """
    if gate_up.gated:
        return gate_up
    weight = gate_up.weight

    def make() -> tuple[Tensor, ...]:
        if not direct or kept.captures(weight):
            raise RuntimeError(
                f"{_PLAIN_ROWS}, and its rows are brought into another order in eager calls alone, "
                "not while a CUDA graph is "
                "captured or under torch.compile; reorder_experts(gate_up.unpack(), gated=True) "
                "packs it in that order"
            )
        cost = "at every call, as torch records no changes of inference tensors"
        if kept.keeps(weight, EIGHTS_PARTS):
            cost = "which takes as much memory again, and host time at every call"
        warnings.warn(
            f"{_PLAIN_ROWS}: its rows are brought into another order, {cost}; reorder_experts(..., "
            "gated=True) avoids it",
            stacklevel=5,
        )
        with torch.inference_mode(False), torch.no_grad():  # later calls may record a gradient
            tensors = in_eights(gate_up).weight.tensors()
        return tuple(tensors[part] for part in parts)

    parts = [part for part in weight.tensors() if part in ("codes", *EIGHTS_PARTS)]
    made = kept.form(weight, EIGHTS_PARTS, ("in eights", *gate_up.shape), make)
    changed: dict[str, Any] = dict(zip(parts, made, strict=True))
    return replace(gate_up, weight=replace(weight, **changed), gated=True)


def _check_options(weights: Sequence[PackedExperts], act_quant: str) -> None:
    """What products and their activations have in common, checked."""
    if act_quant not in native.ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    if act_quant != "none" and any(experts.weight.book is not None for experts in weights):
        raise ValueError(f"{reference.BOOK_NEEDS_FLOATS}; act_quant is {act_quant!r}")


def _check_x(x: Any, device: torch.device, k: int) -> None:
    arguments.check_float("x", x, device)
    arguments.check_device(device)
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}; [M, {k}] is expected")


def _autocast(x: Any) -> Any:
    """x in the dtype in which torch.autocast has products computed."""
    if (
        isinstance(x, Tensor)
        and x.dtype is torch.float32
        and torch.is_autocast_enabled(x.device.type)
    ):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _check_recordable(name: str, direct: bool, *tensors: Any) -> None:
    arguments.check_transforms(name, *tensors)
    if not direct and is_grad_enabled() and any(map(arguments.requires_grad, tensors)):
        raise RuntimeError(
            f"{name} has a gradient in eager calls only, and an input requires one; call "
            "it under torch.no_grad()"
        )


def _check_capture(name: str, x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} waits for the GPU to count each expert's rows, and cannot be captured "
            "in a CUDA graph"
        )


def _bias(experts: PackedExperts, bias: Tensor) -> Tensor:
    """A call's bias ``[E, N]`` in the order of the packed rows."""
    return bias[:, gated_order(experts.n, experts.device)] if experts.gated else bias


def _product(experts: PackedExperts, call: Call) -> reference_experts.Product:
    """The product of rows with one of the experts, its features in the order of the packed rows;
    the call's bias is ``[E, N]``.
    """
    biases = None if call.bias is None else _bias(experts, call.bias)
    options = (call.named_activation, call.act_quant, call.act_symmetric)

    def product(e: int, rows: Tensor) -> Tensor:
        bias = None if biases is None else biases[e]
        return gemm.mixed_gemm(rows, experts.expert(e), bias, *options, out_dtype=call.out_dtype)

    return product


def _products(rows: Tensor, counts: list[int], experts: PackedExperts, call: Call) -> Tensor:
    """Rows, sorted by expert, each times its expert, as :func:`reference_experts.grouped_gemm`."""
    records = is_grad_enabled() and (rows.requires_grad or arguments.requires_grad(call.bias))
    if rows.is_cpu and call.activation is None and not records:
        found = _cpu_products(rows, counts, experts, call)
    else:
        found = reference_experts.grouped_gemm(
            rows, counts, experts.n, _product(experts, call), call.out_dtype
        )
    return experts.in_order(found, 1)


def _cpu_products(rows: Tensor, counts: list[int], experts: PackedExperts, call: Call) -> Tensor:
    """The same in host memory, before the features are brought into order: one call computes the
    products of all experts, but those of so many rows that torch multiplies them.
    """
    weight, rows = experts.weight, native.row_matrix(rows)
    bias = weight.bias
    if call.bias is not None:
        bias = F.pad(_bias(experts, call.bias), (0, experts.n_pad - experts.n)).contiguous()
    out = torch.empty(rows.shape[0], experts.n, dtype=call.out_dtype, device="cpu")
    product, groups, begin = _product(experts, call), [], 0
    for e, count in enumerate(counts):
        if not count:
            continue
        if products.panel_type(count, weight, False, rows.dtype, call) is None:
            groups.append((e, begin, count))
        else:
            out[begin : begin + count] = product(e, rows[begin : begin + count])
        begin += count
    out[begin:] = 0
    if groups:
        _C.cpu_grouped_gemm(
            weight.native,
            experts.n,
            groups,
            native.data_type(rows),
            rows.data_ptr(),
            rows.stride(0),
            native.ACT_QUANT[call.act_quant],
            call.act_symmetric,
            native.pointer(experts.perm),
            native.pointer(bias),
            native.data_type(bias),
            out.data_ptr(),
            native.DATA_TYPES[call.out_dtype],
            call.exact or call.batch_invariant,
            torch.get_num_threads(),
        )
    return out


def grouped_gemm(
    x: Tensor,
    experts: PackedExperts,
    routing: Routing,
    bias: Tensor | None = None,
    activation: reference.Activation = None,
    act_quant: str = "none",
    act_symmetric: bool = True,
    out_dtype: torch.dtype | None = None,
    *,
    gathered: bool = False,
) -> Tensor:
    """The rows of x that a routing gathers, each times its expert:
    ``activation(x[token] @ W_e^T + bias_e)``.

    On a GPU this waits until it knows how many rows each expert has, and launches a product for
    each; it cannot be captured in a CUDA graph. Products, gradients and ``act_quant`` are those of
    :func:`cutlass_ops.mixed_gemm`; gradients are recorded in eager calls.

    Args:
        x: fp16, bf16 or fp32 ``[M, K]`` on the weights' device.
        experts: what :func:`reorder_experts` returned, ``[E, N, K]``.
        routing: what :func:`route` returned for ids of x's rows.
        bias: fp16, bf16 or fp32 ``[E, N]``, if the experts have none.
        activation, act_quant, act_symmetric, out_dtype: as in :func:`cutlass_ops.mixed_gemm`.
        gathered: x is ``[M * top, K]`` in the routing's order already, as this function returns it.

    Returns:
        ``[M * top, N]``, row i for position ``routing.order[i]``; positions without an expert
        have rows of zeros.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message has its value.
        RuntimeError: a CUDA graph is captured; or a gradient is required where it is not recorded.
    """
    _check_experts("experts", experts)
    _check_options([experts], act_quant)
    named = native.split_activation(activation)
    x = _autocast(x)
    _check_x(x, experts.device, experts.k)
    _check_routing(routing, experts, x.shape[0], gathered)
    if out_dtype is not None and out_dtype not in native.DATA_TYPES:
        raise TypeError(
            f"out_dtype is {out_dtype!r}; supported are {arguments.dtype_names(native.DATA_TYPES)}"
        )
    if bias is not None:
        arguments.check_float("bias", bias, experts.device)
        if experts.weight.bias is not None:
            raise ValueError("a bias is given, but the experts have theirs already")
        if tuple(bias.shape) != (experts.experts, experts.n):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}; {(experts.experts, experts.n)} is expected"
            )
    direct = arguments.runs_directly(x, bias, routing.order)
    _check_recordable("grouped_gemm", direct, x, bias)
    call = Call(
        bias,
        *named,
        out_dtype=out_dtype or x.dtype,
        act_quant=act_quant,
        act_symmetric=act_symmetric,
    )
    if direct:
        return _grouped_gemm(x, experts, routing, gathered, call)
    fields = (*_fields(experts), *routing, gathered)
    return cast(Tensor, torch.ops.cutlass_ops.grouped_gemm(x, *fields, *_OF_GROUPS.values(call)))


def _check_routing(routing: Any, experts: PackedExperts, rows: int, gathered: bool) -> None:
    if not isinstance(routing, Routing):
        raise TypeError(
            f"routing is a {type(routing).__name__}; a Routing (see cutlass_ops.route) is expected"
        )
    if routing.order.device != experts.device:
        raise ValueError(
            f"routing is on {routing.order.device}; the experts are on {experts.device}"
        )
    if len(routing.offsets) != experts.experts + 1:
        raise ValueError(
            f"routing is for {len(routing.offsets) - 1} experts; there are {experts.experts}"
        )
    if len(routing.order) != (rows if gathered else rows * routing.top):
        tokens = len(routing.order) if gathered else len(routing.order) // max(routing.top, 1)
        raise ValueError(
            f"x has {rows} rows; {tokens} are expected by the routing, with gathered={gathered}"
        )


def _grouped_gemm(
    x: Tensor, experts: PackedExperts, routing: Routing, gathered: bool, call: Call
) -> Tensor:
    _check_capture("grouped_gemm", x)
    rows = x if gathered else x[routing.order.long() // max(routing.top, 1)]
    counts = routing.offsets.diff().tolist()
    return _products(rows, counts, experts, call)


def mixed_moe(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: reference.Activation = "silu",
    act_quant: str = "none",
    act_symmetric: bool = True,
    expert_map: Tensor | None = None,
    architecture: int = 0,
) -> Tensor:
    """A layer of experts: ``y[t] = sum over j of topk_weights[t, j] * down_e(act(gate_e
    x_t) * (up_e x_t))``.

    e is ``topk_ids[t, j]``. ``act(gate) * up`` is computed in fp32 and rounded once to x's dtype;
    outputs of experts and their weighted sum are fp32, the sum in the order of j, rounded once. The
    same input gives the same bits every time.

    On a GPU since sm_80 with fp16 or bf16 x nothing waits for the GPU, so that the call can be
    captured in a CUDA graph and replayed with other routings. On Hopper weights are rounded to x's
    dtype, but not integers in groups of 128 or more where experts have more than some 24 rows on
    average, or 4 bits and scales of x's dtype. Outputs of experts that have many rows are rounded
    to it, too. Values of quantised activations are rounded as those of
    :func:`cutlass_ops.mixed_gemm`, but multiplied as int8 where x has no zero points and both
    weights are integers in groups of 128 or more without offsets, those of 8 bits without zero
    points. On Hopper experts of few rows need scales of x's dtype for it, and weights in groups of
    64 and 32 are multiplied as int8, too, where that is faster. For an fp32 x, for I that is no
    multiple of 8 and where a gradient is recorded, a GPU is asked how many rows each expert has,
    two products are launched for each expert that has any, and a capture is refused.

    Training: in eager calls the result is differentiable in x and ``topk_weights``, as
    :func:`cutlass_ops.mixed_gemm` is in x; the experts are frozen. Under ``torch.autocast`` an
    fp32 x is cast to the autocast dtype first.

    Args:
        x: fp16, bf16 or fp32 ``[M, H]``, any M from 0, on the weights' device.
        gate_up: ``[E, 2 * I, H]``, best packed with ``gated=True``. Otherwise the first eager call
            brings its rows into that order, warns, and keeps the result as long as the codes live,
            which takes as much memory again and some host time at every call (of inference tensors
            nothing is kept: every call converts them). Biases are added to the products.
        down: ``[E, H, I]``; of any format, whatever that of ``gate_up`` is.
        topk_ids: integers ``[M, top]``: each token's experts; -1 adds nothing.
        topk_weights: floating ``[M, top]``.
        activation: as in :func:`cutlass_ops.mixed_gemm`, of gate; or gpt-oss's
            ``("clamped_swiglu", alpha, limit)`` of both: ``(u + 1) * g * sigmoid(alpha * g)``,
            where g is gate, at most limit, and u is up, clamped to -limit .. limit.
        act_quant, act_symmetric: of both products, as in :func:`cutlass_ops.mixed_gemm`.
        expert_map: integers ``[ids]``, as in :func:`route`; ids that it sends to -1 add nothing.
        architecture: as in :func:`cutlass_ops.mixed_gemm`.

    Returns:
        ``[M, H]`` of x's dtype.

    Raises:
        TypeError, ValueError: an argument that does not fit, as in :func:`route` and
            :func:`cutlass_ops.mixed_gemm`.
        RuntimeError: a CUDA graph is captured; ``gate_up`` was packed without ``gated=True`` and no
            eager call has brought its rows into order before a capture or torch.compile; or a
            gradient is required under torch.compile, in forward mode or of a weight.
    """
    _check_experts("gate_up", gate_up)
    _check_experts("down", down)
    _check_options([gate_up, down], act_quant)
    named = native.split_activation(activation, reference_experts.check_gate)
    x = _autocast(x)
    _check_x(x, gate_up.device, gate_up.k)
    if (
        gate_up.n % 2
        or down.shape != (gate_up.experts, gate_up.k, gate_up.n // 2)
        or down.device != gate_up.device
    ):
        raise ValueError(
            f"gate_up is {list(gate_up.shape)} on {gate_up.device} and down "
            f"{list(down.shape)} on {down.device}; "
            "[E, 2 * I, H] and [E, H, I] on one device are expected"
        )
    check_down(down)
    check_route(topk_ids, gate_up.experts, expert_map, gate_up.device)
    if not isinstance(topk_weights, Tensor):
        raise TypeError(
            f"topk_weights is a {type(topk_weights).__name__}; a torch.Tensor is expected"
        )
    if topk_weights.dtype not in _WEIGHT_TYPES or topk_weights.device != gate_up.device:
        raise TypeError(
            f"topk_weights is {arguments.dtype_names((topk_weights.dtype,))} on "
            f"{topk_weights.device}; "
            f"{arguments.dtype_names(_WEIGHT_TYPES)} on {gate_up.device} are supported"
        )
    expected = (x.shape[0], topk_ids.shape[1])
    for name, value in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if value.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; {expected} is expected, for "
                f"{x.shape[0]} rows of x"
            )
    direct = arguments.runs_directly(x, topk_ids, topk_weights, expert_map)
    _check_recordable("mixed_moe", direct, x, topk_weights)
    call = Call(
        None, *named, act_quant=act_quant, act_symmetric=act_symmetric, architecture=architecture
    )
    of_ids = (topk_ids, topk_weights, expert_map)
    if direct:
        return _mixed_moe(x, _gated(gate_up, direct=True), down, *of_ids, call)
    fields = (*_fields(gate_up), *_fields(down), *of_ids)
    return cast(Tensor, torch.ops.cutlass_ops.mixed_moe(x, *fields, *_OF_LAYER.values(call)))


def _has_kernels(
    x: Tensor, gate_up: PackedExperts, down: PackedExperts, topk_ids: Tensor, topk_weights: Tensor
) -> bool:
    """Whether kernels take the whole layer; otherwise, and where a gradient is recorded, there is a
    product for each expert.
    """
    return (
        x.is_cuda
        and _C.built_with_cuda
        and x.dtype is not torch.float32
        and 0 < topk_ids.numel() <= _C.most_positions
        and gate_up.experts <= _C.most_experts
        and down.k % 8 == 0
        and down.n % 8 == 0
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and _C.experts_take(gate_up.weight.native)
        and _C.experts_take(down.weight.native)
        and not (is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad))
    )


def _launch_moe(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    call: Call,
) -> Tensor:
    x = native.row_matrix(x)
    weights = (
        topk_weights.contiguous()
        if topk_weights.dtype in native.DATA_TYPES
        else topk_weights.float().contiguous()
    )
    route, held = route_problem(topk_ids, gate_up.experts, expert_map)
    y = x.new_empty(x.shape)
    perms = [0 if experts.perm is None else experts.perm.data_ptr() for experts in (gate_up, down)]
    problem = _C.MoeProblem(
        route,
        x.data_ptr(),
        native.DATA_TYPES[x.dtype],
        x.stride(0),
        gate_up.weight.native,
        perms[0],
        down.weight.native,
        perms[1],
        down.n,
        native.ACT_QUANT[call.act_quant],
        call.act_symmetric,
        native.ACTIVATIONS[call.activation],
        call.low,
        call.high,
        weights.data_ptr(),
        native.DATA_TYPES[weights.dtype],
        y.data_ptr(),
        call.architecture,
    )
    with torch.cuda.device(x.device):
        plan = problem.plan(_C.current_device())
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=x.device)
    _C.mixed_moe(problem, plan, workspace.data_ptr(), *stream_of(x))
    del held
    return y


def _mixed_moe(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    call: Call,
) -> Tensor:
    check_ids(topk_ids, gate_up.experts, expert_map)
    if _has_kernels(x, gate_up, down, topk_ids, topk_weights):
        return _launch_moe(x, gate_up, down, topk_ids, topk_weights, expert_map, call)
    _check_capture("mixed_moe", x)
    of_sums = call.before_activation()
    offsets, order = reference_experts.route(topk_ids, gate_up.experts, expert_map)
    counts = offsets.diff().tolist()
    rows = x[order.long() // max(topk_ids.shape[1], 1)]
    sums = _products(rows, counts, gate_up, of_sums)
    hidden = reference_experts.gated(sums, call.named_activation, x.dtype)
    outputs = _products(hidden, counts, down, of_sums)
    return reference_experts.weighted_sum(outputs, order, offsets[-1], topk_weights, x.dtype)


# ---- torch.library


def _schema(name: str) -> str:
    """The arguments of one PackedExperts, as :func:`_fields` lists them."""
    tensors = ", ".join(
        f"Tensor{'' if part in ('codes', 'scales') else '?'} {name}_{part}" for part in PARTS
    )
    sizes = ", ".join(f"int {name}_{size}" for size in ("experts", "n", "k", "bits", "group_size"))
    return f"{tensors}, {sizes}, bool {name}_gated"


#: How many arguments they are, and which of them is N.
_FIELDS = len(PARTS) + 6
_N = len(PARTS) + 1


def _fields(experts: PackedExperts) -> tuple[Any, ...]:
    weight = experts.weight
    tensors = (
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.offsets,
        weight.bias,
        experts.perm,
        weight.book,
    )
    return (
        *tensors,
        experts.experts,
        experts.n,
        weight.k,
        weight.bits,
        weight.group_size,
        experts.gated,
    )


def _experts(fields: Sequence[Any]) -> PackedExperts:
    """The inverse."""
    parts = dict(zip(PARTS, fields, strict=False))
    return PackedExperts.of_parts(parts, *fields[len(PARTS) :])


_OF_GROUPS = CallSchema("residual", "saturate", "batch_invariant", "architecture", "exact")
_OF_LAYER = CallSchema("bias", "residual", "out_dtype", "saturate", "batch_invariant", "exact")


def _mixed_moe_op(x: Tensor, *args: Any) -> Tensor:
    (*fields, topk_ids, topk_weights, expert_map), call = _OF_LAYER.split(args)
    gate_up, down = _gated(_experts(fields[:_FIELDS]), direct=False), _experts(fields[_FIELDS:])
    return _mixed_moe(x, gate_up, down, topk_ids, topk_weights, expert_map, call)


def _mixed_moe_fake(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


def _grouped_gemm_op(x: Tensor, *args: Any) -> Tensor:
    (*fields, offsets, order, top, gathered), call = _OF_GROUPS.split(args)
    return _grouped_gemm(x, _experts(fields), Routing(offsets, order, top), gathered, call)


def _grouped_gemm_fake(x: Tensor, *args: Any) -> Tensor:
    (*fields, _, order, _, _), call = _OF_GROUPS.split(args)
    return x.new_empty((order.shape[0], fields[_N]), dtype=call.out_dtype)


library.register(
    f"grouped_gemm(Tensor x, {_schema('weight')}, Tensor offsets, Tensor order, int top, "
    "bool gathered, "
    f"{_OF_GROUPS.text}) -> Tensor",
    _grouped_gemm_op,
    _grouped_gemm_fake,
)
library.register(
    f"mixed_moe(Tensor x, {_schema('gate_up')}, {_schema('down')}, Tensor topk_ids, Tensor "
    "topk_weights, Tensor? expert_map, "
    f"{_OF_LAYER.text}) -> Tensor",
    _mixed_moe_op,
    _mixed_moe_fake,
)
