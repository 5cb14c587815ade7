"""Which rows belong to which expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from ..reference import experts as reference_experts
from ..weights.packed_weight import stream_of
from . import arguments

_ID_TYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
)


class Routing(NamedTuple):
    """Which rows belong to which expert; made by :func:`route`.

    Attributes:
        offsets: int32 ``[E + 1]``: the positions of expert e are
            ``order[offsets[e] : offsets[e + 1]]``.
        order: int32 ``[M * top]``: positions in the flattened ``[M, top]`` ids, sorted stably by
            expert; those that have no expert come last, from ``offsets[E]`` on.
        top: ids of a token; position p belongs to token ``p // top``.
    """

    offsets: Tensor
    order: Tensor
    top: int


def route(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None) -> Routing:
    """Sort the experts' rows, on the tensors' device and without waiting for it.

    Args:
        topk_ids: integers ``[M, top]``, any M from 0: each token's experts; -1 is none.
        num_experts: E, from 1.
        expert_map: integers ``[ids]``: the expert of each id, or -1 for one that is not here; ids
            are the experts themselves if None.

    Raises:
        TypeError, ValueError: an argument that does not fit. Ids, or values of the map, below -1 or
            too large are refused on a CPU, in eager calls; on a GPU, which they would have to be
            read from, they are no expert.
    """
    check_route(
        topk_ids, num_experts, expert_map, topk_ids.device if isinstance(topk_ids, Tensor) else None
    )
    direct = arguments.runs_directly(topk_ids, expert_map)
    if direct:
        check_ids(topk_ids, num_experts, expert_map)
    if direct and topk_ids.is_cuda and _C.built_with_cuda and num_experts <= _C.most_experts:
        offsets = topk_ids.new_empty(num_experts + 1, dtype=torch.int32)
        order = topk_ids.new_empty(topk_ids.numel(), dtype=torch.int32)
        problem, held = route_problem(topk_ids, num_experts, expert_map)
        _C.route(problem, offsets.data_ptr(), order.data_ptr(), *stream_of(topk_ids))
        del held
    else:
        offsets, order = reference_experts.route(topk_ids, num_experts, expert_map)
    return Routing(offsets, order, topk_ids.shape[1])


def route_problem(
    topk_ids: Tensor, num_experts: int, expert_map: Tensor | None
) -> tuple[_C.RouteProblem, tuple[Tensor | None, ...]]:
    """What kernels take, and the tensors that it points to."""
    ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int64)
    ids = ids.contiguous()
    if expert_map is not None:
        if expert_map.dtype is not torch.int32:  # larger numbers are no expert
            expert_map = expert_map.to(torch.int64).clamp(-1, (1 << 31) - 1).to(torch.int32)
        expert_map = expert_map.contiguous()
    tokens, top = ids.shape
    pointer, size = (0, 0) if expert_map is None else (expert_map.data_ptr(), len(expert_map))
    problem = _C.RouteProblem(
        ids.data_ptr(), ids.dtype is torch.int64, tokens, top, num_experts, pointer, size
    )
    return problem, (ids, expert_map)


def check_route(ids: Any, num_experts: Any, expert_map: Any, device: torch.device | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what :func:`route` does not take, by types and
    shapes; ids may be anything.
    """
    for name, value, dim in (("topk_ids", ids, 2), ("expert_map", expert_map, 1)):
        if name == "expert_map" and value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
        if value.dtype not in _ID_TYPES:
            raise TypeError(
                f"{name} has dtype {arguments.dtype_names((value.dtype,))}; supported are "
                f"{arguments.dtype_names(_ID_TYPES)}"
            )
        if value.dim() != dim:
            shape = "[M, top]" if dim == 2 else "[ids]"
            raise ValueError(f"{name} has shape {tuple(value.shape)}; {shape} is expected")
        if value.device != device:
            raise ValueError(f"{name} is on {value.device}; {device} is expected")
    # a tensor without elements has no address
    if expert_map is not None and len(expert_map) == 0:
        raise ValueError("expert_map has no elements; one for each id is expected")
    if type(num_experts) is not int or num_experts < 1:
        raise ValueError(f"num_experts is {num_experts!r}; an integer of at least 1 is expected")
    if ids.shape[0] * ids.shape[1] >= 1 << 31:
        raise ValueError(
            f"topk_ids has shape {tuple(ids.shape)}; fewer than 2**31 elements are supported"
        )


def check_ids(ids: Tensor, num_experts: int, expert_map: Tensor | None) -> None:
    """Refuse numbers of no expert, where reading them costs no synchronisation."""
    if not ids.is_cpu:
        return
    known = num_experts if expert_map is None else len(expert_map)
    for name, value, limit in (("topk_ids", ids, known), ("expert_map", expert_map, num_experts)):
        if value is not None and value.numel():
            low, high = (int(bound) for bound in value.to(torch.int64).aminmax())
            if low < -1 or high >= limit:
                raise ValueError(
                    f"{name} holds {low if low < -1 else high}; -1 to {limit - 1} are expected"
                )
