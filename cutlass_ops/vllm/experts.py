"""vLLM's mixture-of-experts layers over :func:`cutlass_ops.mixed_moe`.

vLLM has no list of kernels for experts that a plugin could extend. ``get_quant_method`` of its
configurations is therefore wrapped: the method of a layer of experts that we take gets another
``process_weights_after_loading`` and ``apply``. Router, parameters and their loaders stay vLLM's.
What the wrapper returns for linear layers goes through ``awq.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..engines.layers import changed, extended, stored_weight
from ..nn.experts import MixedExperts
from ..ops.expert_packing import WeightsOnDemand, reorder_experts
from ..ops.experts import mixed_moe
from ..weights import formats
from ..weights.weight import QuantizedWeight
from .awq import taken
from .linear import MISSING, logger, reason_against_all, settings

if MISSING is None:
    from vllm import envs
    from vllm.platforms import current_platform

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_CONFIGS = (
    (f"{_QUANTIZATION}.compressed_tensors.compressed_tensors", "CompressedTensorsConfig"),
    (f"{_QUANTIZATION}.auto_awq", "AutoAWQConfig"),
    (f"{_QUANTIZATION}.auto_gptq", "AutoGPTQConfig"),
)
#: How the methods of vLLM store experts.
_METHODS = {
    "CompressedTensorsWNA16MoEMethod": "ct",
    "CompressedTensorsWNA16MarlinMoEMethod": "ct",
    "AutoAWQMoEMethod": "awq",
    "AutoGPTQMoEMethod": "gptq",
}
_CODES = {"ct": "weight_packed", "awq": "qweight", "gptq": "qweight"}
_SCALES = {"ct": "weight_scale", "awq": "scales", "gptq": "scales"}
_ZEROS = {"ct": "weight_zero_point", "awq": "qzeros", "gptq": None}
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_MODULE = "cutlass_ops_experts"
#: What VLLM_DISABLED_KERNELS may hold.
_NAME = "CutlassOpsExperts"


def take_experts() -> None:
    """Wrap ``get_quant_method`` of vLLM's configurations; one line in the log for each it lacks."""
    for module, name in _CONFIGS:
        try:
            config = getattr(import_module(module), name)
            original = config.get_quant_method
        except (ImportError, AttributeError) as error:
            logger.warning("cutlass_ops leaves the experts of %s to vLLM: %s", name, error)
            continue
        if not hasattr(original, "of_cutlass_ops"):
            config.get_quant_method = _wrapped(original)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        method = original(self, layer, prefix)
        if type(method).__name__ in _METHODS:
            if reason := _reason_against(method, layer):
                _log_left(reason)
            else:
                kind: Any = type(method)
                return changed(method, extended(kind, _Experts))
        return taken(method)

    get_quant_method.of_cutlass_ops = True  # type: ignore[attr-defined]
    return get_quant_method


def _log_left(reason: str) -> None:
    logger.info_once("cutlass_ops leaves layers of experts to vLLM's kernels: %s", reason)


def _form(method: Any) -> tuple[int, int, bool]:
    """Bits, group size and whether there are zero points."""
    if _METHODS[type(method).__name__] == "ct":
        quant = method.weight_quant
        return quant.num_bits, quant.group_size or -1, not quant.symmetric
    quant = method.quant_config
    if _METHODS[type(method).__name__] == "awq":
        return quant.weight_bits, quant.group_size, True
    return quant.quant_type.size_bits, quant.group_size, not getattr(quant, "is_sym", True)


def _reason_against(method: Any, layer: Any) -> str | None:
    """Why we do not take a layer of experts; None if we do."""
    try:
        return reason_against_all() or _reason(method, layer)
    except AttributeError as error:
        return f"this version of vLLM describes it otherwise ({error})"


def _reason(method: Any, layer: Any) -> str | None:
    if type(layer).__name__ != "RoutedExperts":  # those of some models load or compute otherwise
        return f"the layer is a {type(layer).__name__}"
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    bits, group_size, has_zeros = _form(method)
    hidden, inner = moe.hidden_dim, moe.intermediate_size_per_partition
    kind = _METHODS[type(method).__name__]
    order = method.weight_quant.actorder == "group" if kind == "ct" else False
    if kind == "gptq":
        order = method.quant_config.desc_act
    activation = getattr(layer.activation, "value", layer.activation)
    checks = (
        (envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT is set"),
        (_NAME in envs.VLLM_DISABLED_KERNELS, f"VLLM_DISABLED_KERNELS has {_NAME}"),
        (moe.moe_backend != "auto", f"the user chose moe_backend {moe.moe_backend!r}"),
        (bits not in (4, 8), f"codes have {bits} bits; supported are 4 and 8"),
        (order, "the weights have an act order"),
        (kind == "gptq" and has_zeros, "GPTQ experts with zero points are not supported"),
        (
            group_size == formats.SHORT_GROUPS[0] and has_zeros,
            f"group_size is {group_size}, which kernels of experts take without zero points alone",
        ),
        (activation not in _ACTIVATIONS, f"the activation is {activation}"),
        (getattr(layer, "swiglu_limit", None) is not None, "the activation is clamped"),
        (layer.apply_router_weight_on_input, "router weights are applied to x"),
        (parallel.use_ep or parallel.dp_size > 1, "experts or data are split over ranks"),
        (parallel.enable_eplb, "experts are balanced over ranks"),
        (moe.has_bias, "experts have biases"),
        (moe.is_lora_enabled, "LoRA is enabled"),
        (moe.in_dtype not in (torch.float16, torch.bfloat16), f"x is {moe.in_dtype}"),
        (moe.num_experts > _C.most_experts, f"there are more than {_C.most_experts} experts"),
    )
    for wrong, reason in checks:
        if wrong:
            return reason
    if group_size != -1:
        try:
            formats.check_group_size(group_size)
        except ValueError as error:
            return str(error)
        if hidden % group_size or inner % group_size:
            return f"{hidden} and {inner} input features are not whole groups of {group_size}"
    return _reason_of_device(inner)


def _reason_of_device(inner: int) -> str | None:
    """Where no kernels take the whole layer, whose call CUDA graphs could not hold."""
    if current_platform.is_cpu():
        return "experts have kernels for GPUs alone"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability != (9, 0):
            return f"the GPU has compute capability {capability}; experts have kernels for (9, 0)"
        if inner % 8:
            return f"a rank's {inner} inner features are no multiple of 8"
    return None


class _Experts:
    """Overrides of one of vLLM's methods for layers of experts."""

    original: Any

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """The sizes unchanged: our kernels pad themselves."""
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer's parameters on their device, and free them.

        Raises:
            ValueError: values that cannot be packed; the message says which.
        """
        if _MODULE in layer._modules:
            return
        for name in ("w13_bias", "w2_bias"):
            bias = getattr(layer, name, None)
            if bias is not None and bool(bias.any()):
                _log_left("experts have biases")
                method = changed(self, self.original)
                layer._replace_quant_method(method)
                method.process_weights_after_loading(layer)
                return
        packed: list[Any] = []
        for name in ("w13", "w2"):
            packed.append(reorder_experts(_stored(self, layer, name), gated=name == "w13"))
            for parameter in [n for n in layer._parameters if n.startswith(f"{name}_")]:
                delattr(layer, parameter)
        activation = getattr(layer.activation, "value", layer.activation)
        act_quant = settings().get("act_quant", "none")
        experts = MixedExperts(packed[0], packed[1], activation, act_quant)
        layer.register_module(_MODULE, experts)
        logger.info_once("Using cutlass_ops.mixed_moe for %s", self.original.__name__)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: it describes the weights to vLLM's kernels."""

    def maybe_make_prepare_finalize(self, *args: Any, **kwargs: Any) -> None:
        """None: experts are not split over ranks."""

    def select_gemm_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Not called, as there is no ``prepare_finalize``."""
        raise NotImplementedError("experts of cutlass_ops are not one of vLLM's modular kernels")

    @property
    def is_monolithic(self) -> bool:
        """False: vLLM's router chooses the experts."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """False: experts do not move."""
        return False

    def apply(
        self,
        layer: torch.nn.Module,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Experts' outputs by their weights, summed: ``[M, H]`` of x's dtype."""
        experts: Any = getattr(layer, _MODULE)
        weights = (experts.gate_up_proj.packed, experts.down_proj.packed)
        options = (experts.activation, experts.act_quant, experts.act_symmetric)
        return mixed_moe(x, *weights, topk_ids, topk_weights, *options)


def _stored(method: Any, layer: Any, name: str) -> WeightsOnDemand:
    """The experts of one of vLLM's parameters."""
    kind = _METHODS[type(method).__name__]
    bits, group_size, has_zeros = _form(method)
    words = getattr(layer, f"{name}_{_CODES[kind]}")
    scales = getattr(layer, f"{name}_{_SCALES[kind]}")
    zeros = _ZEROS[kind]
    points = getattr(layer, f"{name}_{zeros}") if zeros and has_zeros else None
    columns_first = kind != "ct" or words.is_transposed

    def several(first: int, count: int) -> QuantizedWeight:
        def rows(stack: Any) -> Any:
            some = stack.data[first : first + count]
            return some.transpose(0, 1).flatten(1) if columns_first else some.flatten(0, 1)

        return stored_weight(
            rows(words),
            rows(scales),
            None if points is None else rows(points),
            bits,
            group_size,
            columns_first,
            kind == "awq",
        )

    return WeightsOnDemand(len(words), lambda e: several(e, 1), several)
