"""SGLang's settings, its device, and the ranks that share a layer."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from ..engines.layers import Engine, checked_settings

try:
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.quantization import (
        CPU_QUANTIZATION_METHODS as CPU_QUANTIZATION_METHODS,
    )
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS as QUANTIZATION_METHODS
    from sglang.srt.plugins.hook_registry import HookRegistry as HookRegistry
    from sglang.srt.plugins.hook_registry import HookType as HookType
    from sglang.srt.runtime_context import get_exec, get_model
    from sglang.srt.utils import is_cuda

    MISSING: ImportError | None = None
except ImportError as error:
    MISSING = error

#: ``info_once`` is a method that transformers adds.
logger: Any = logging.getLogger("sglang.srt.cutlass_ops")


def settings() -> dict[str, Any]:
    """The plugin's part of the arguments that override the model's configuration.

    Raises:
        TypeError, ValueError: a setting that does not exist, or a value that it does not take.
    """
    overrides = json.loads(get_model().json_model_override_args)
    return checked_settings(overrides.get("cutlass_ops", {}), "json_model_override_args")


def _rank(layer: torch.nn.Module) -> int:
    rank: int = get_group_rank_size(layer.tp_group)[0]
    return rank


def _kv_place(layer: torch.nn.Module, rank: int, ranks: int) -> tuple[int, int]:
    if not hasattr(layer, "kv_tp_group"):
        return rank, ranks
    rank, ranks = get_group_rank_size(layer.kv_tp_group)
    sharing: Any = layer.num_kv_head_replicas
    return rank // sharing, ranks // sharing


ENGINE = Engine(
    name="SGLang",
    logger=logger,
    settings=settings,
    is_cuda=lambda: is_cuda(),
    batch_invariant=lambda: get_exec().deterministic.enable_deterministic_inference,
    random_weights=lambda: get_model().load_format == "dummy",
    rank=_rank,
    kv_place=_kv_place,
)
