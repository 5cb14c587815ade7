"""The specification of mixture-of-experts layers, in plain torch; it runs on every device.

A token's row of x is multiplied by each of its experts. ``products`` are functions of rows
``[R, K]`` that return fp32 ``[R, N]``: ``reference.mixed_gemm`` or a GPU's kernels. Everything else
is defined here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from .. import reference
from .blocks import of_each

#: What :func:`gated` takes besides activations of gate: ``("clamped_swiglu", alpha, limit)``.
CLAMPED_SWIGLU = "clamped_swiglu"

#: Number of an expert and its rows ``[R, K]`` -> ``[R, N]``.
Product: TypeAlias = "Callable[[int, Tensor], Tensor]"


def route(
    topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Positions of ``topk_ids``, flattened, by expert.

    Args:
        topk_ids: integers of any shape; what is not in 0 .. num_experts - 1 (or, with a map, in the
            map) is no expert.
        num_experts: E.
        expert_map: integers: the expert of each id, or -1.

    Returns:
        int32 ``[E + 1]``, where each expert's positions begin, the last being the number of
        positions that have an expert; and int32 ``[positions]``: they themselves, sorted stably by
        expert, those without one last.
    """
    ids = topk_ids.reshape(-1).to(torch.int64)
    if expert_map is not None:
        mapped = expert_map.to(torch.int64)
        inside = (ids >= 0) & (ids < len(mapped))
        # An empty map has nothing to look up.
        found = mapped[ids.where(inside, 0)] if len(mapped) else torch.full_like(ids, -1)
        ids = found.where(inside, -1)
    key = ids.where((ids >= 0) & (ids < num_experts), num_experts)
    sorted_key, order = key.sort(stable=True)
    first = torch.arange(num_experts + 1, device=ids.device)
    return torch.searchsorted(sorted_key, first, out_int32=True), order.to(torch.int32)


def grouped_gemm(
    rows: Tensor, counts: list[int], n: int, product: Product, out_dtype: torch.dtype
) -> Tensor:
    """Rows, sorted by expert, each times its expert: ``[R, n]``; rows behind those of the last
    expert are zeros.

    Args:
        rows: ``[R, K]``.
        counts: rows of each expert.
        n: columns of the products.
        product: as above, of ``out_dtype``.
        out_dtype: of the result.
    """
    parts, begin = [], 0
    for expert, count in enumerate(counts):
        if count:
            parts.append(product(expert, rows[begin : begin + count]))
            begin += count
    parts.append(torch.zeros(rows.shape[0] - begin, n, dtype=out_dtype, device=rows.device))
    return torch.cat(parts)


def check_gate(activation: reference.Activation) -> None:
    """Raise ``ValueError`` if :func:`gated` does not support ``activation``."""
    if not isinstance(activation, tuple) or len(activation) != 3 or activation[0] != CLAMPED_SWIGLU:
        reference.check_activation(activation)
    elif not (math.isfinite(activation[1]) and activation[2] > 0):
        raise ValueError(
            f"activation is {activation!r}; {CLAMPED_SWIGLU} takes a finite alpha and a "
            "limit above 0"
        )


def gated(gate_up: Tensor, activation: reference.Activation, dtype: torch.dtype) -> Tensor:
    """``act(gate) * up`` of fp32 ``[R, 2 * I]``, gate first: in fp32, rounded once to ``dtype``.

    ``("clamped_swiglu", alpha, limit)`` is gpt-oss's function of both, with
    ``g = min(gate, limit)`` and u = up clamped to ``-limit .. limit``:
    ``(u + 1) * g * sigmoid(alpha * g)``.
    """
    check_gate(activation)
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, tuple) and activation[0] == CLAMPED_SWIGLU:
        _, alpha, limit = activation
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + 1) * (gate * of_each(torch.sigmoid, gate * alpha))).to(dtype)
    return (reference.activate(gate, activation) * up).to(dtype)


def weighted_sum(
    outputs: Tensor, order: Tensor, routed: Tensor, topk_weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """``sum over j of topk_weights[t, j] * outputs of (t, j)`` in fp32, in the order of j, rounded
    once to ``dtype``.

    Each product is rounded to fp32 before it is added.

    Args:
        outputs: fp32 ``[M * top, N]``, sorted by expert.
        order: as :func:`route` returns it.
        routed: how many positions have an expert, a tensor; the others add nothing, whatever
            their weight is.
        topk_weights: floating ``[M, top]``.
        dtype: of the result.
    """
    m, top = topk_weights.shape
    total = torch.zeros(m, outputs.shape[1], dtype=torch.float32, device=outputs.device)
    place = torch.empty_like(order, dtype=torch.int64)
    place[order.long()] = torch.arange(len(order), device=order.device)
    place = place.view(m, top)
    for j in range(top):
        weight = topk_weights[:, j, None].to(torch.float32)
        product = weight * outputs[place[:, j]]
        total = total + product.where(place[:, j, None] < routed, 0.0)
    return total.to(dtype)


def mixed_moe(
    x: Tensor,
    gate_up: Product,
    down: Product,
    intermediate: int,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: reference.Activation,
    num_experts: int,
    expert_map: Tensor | None = None,
) -> Tensor:
    """``y[t] = sum over j of topk_weights[t, j] * down_e(act(gate_e x_t) * (up_e x_t))``,
    ``e = topk_ids[t, j]``.

    Products are fp32. ``act(gate) * up`` is rounded once to x's dtype, as an operand of the next
    product; an expert's output is not rounded, and neither is their sum before the last.

    Args:
        x: ``[M, H]``.
        gate_up, down: products of ``[R, H]`` with 2 * intermediate columns, and of
            ``[R, intermediate]`` with H.
        intermediate: I.
        topk_ids, topk_weights: ``[M, top]``.
        activation: as :func:`gated` takes it.
        num_experts, expert_map: as in :func:`route`.

    Returns:
        ``[M, H]`` of x's dtype.
    """
    offsets, order = route(topk_ids, num_experts, expert_map)
    counts = offsets.diff().tolist()
    rows = x[order.long() // max(topk_ids.shape[1], 1)]
    hidden = gated(
        grouped_gemm(rows, counts, 2 * intermediate, gate_up, torch.float32), activation, x.dtype
    )
    outputs = grouped_gemm(hidden, counts, x.shape[1], down, torch.float32)
    return weighted_sum(outputs, order, offsets[-1], topk_weights, x.dtype)
