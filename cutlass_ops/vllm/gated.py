"""MLPs of vLLM whose layer of gate and up is followed by their activation alone: the layer's
product makes the activated outputs, so that no kernel reads and writes the two factors again.

A layer of vLLM does not know what follows it. The function of vLLM in which all layers pack their
weights is therefore wrapped: before it, layers that we may pack with gate and up in eights get the
activation's name; after it, an identity takes the activation's place where that was done.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..engines.layers import ACTIVATION, MODULE
from ..nn.gated_mlp import graph_of_calls, is_wrapped
from ..weights import formats
from .linear import MISSING, logger

if MISSING is None:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform


@dataclass(frozen=True)
class _MLP:
    """``function``: the name of the module's child that activates what ``layer`` computes."""

    module: nn.Module
    layer: nn.Module
    function: str
    activation: str


def take_gated_mlps() -> None:
    """Wrap the function of vLLM's loaders; one line in the log if this version has another."""
    try:
        from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear
        from vllm.model_executor.model_loader import base_loader

        original = base_loader.process_weights_after_loading
    except (ImportError, AttributeError) as error:
        logger.warning("cutlass_ops leaves activations to this version of vLLM: %s", error)
        return

    def activation_of(function: nn.Module) -> str | None:
        if type(function) is SiluAndMul:
            return "silu"
        if type(function) is GeluAndMul:
            return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(function.approximate))
        return None

    def is_gate_and_up(layer: Any) -> bool:
        if type(layer) is not MergedColumnParallelLinear or is_wrapped(layer):
            return False
        sizes = layer.output_partition_sizes
        # The engine gives a bias gate first; in the order of the weight it would be a copy a call.
        return (
            len(sizes) == 2
            and sizes[0] == sizes[1]
            and sizes[0] % formats.GATED_ROWS == 0
            and layer.bias is None
        )

    @functools.wraps(original)
    def process_weights_after_loading(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        found = list(_gated_mlps(model, is_gate_and_up, activation_of))
        if found and (reason := _reason_against_all()):
            logger.info_once("cutlass_ops leaves activations to vLLM's kernels: %s", reason)
            found = []
        for mlp in found:
            setattr(mlp.layer, ACTIVATION, mlp.activation)
        original(model, *args, **kwargs)
        for mlp in found:
            linear: Any = getattr(mlp.layer, MODULE, None)
            if linear is not None and linear.packed.gated:
                setattr(mlp.module, mlp.function, nn.Identity())
                logger.info_once("Using cutlass_ops for activations of gate and up")

    if not hasattr(original, "of_cutlass_ops"):
        process_weights_after_loading.of_cutlass_ops = True  # type: ignore[attr-defined]
        base_loader.process_weights_after_loading = process_weights_after_loading


def _reason_against_all() -> str | None:
    """Why activations stay vLLM's in every model; None if they need not."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return "it is not known whether there are adapters"
    if config.lora_config is not None:
        return "adapters add to what gate and up compute"
    return _reason_of_device()


def _reason_of_device() -> str | None:
    if not current_platform.is_cuda():
        return "a CPU multiplies many rows faster by weights whose gate and up are apart"
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        return f"on a GPU of compute capability {capability} a kernel would follow the product, too"
    return None


def _gated_mlps(
    model: nn.Module,
    is_gate_and_up: Callable[[nn.Module], bool],
    activation_of: Callable[[nn.Module], str | None],
) -> Iterator[_MLP]:
    """The modules of a model that give the result of such a layer to an activation and to nothing
    else.
    """
    parents = Counter(layer for module in model.modules() for layer in module.children())
    for module in model.modules():
        children = dict(module.named_children())
        layers = {n for n, child in children.items() if is_gate_and_up(child)}
        functions = {n: activation_of(child) for n, child in children.items()}
        if not layers or not any(functions.values()):
            continue
        for layer, function in _pairs(module):
            activation = functions.get(function)
            if layer not in layers or activation is None or is_wrapped(children[function]):
                continue
            if parents[children[layer]] == 1:
                yield _MLP(module, children[layer], function, activation)


def _pairs(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of children: the first's result is a pair, whose first part the second alone is given,
    and whose second is not used. Each is called once.
    """
    nodes = graph_of_calls(module) or []
    calls = Counter(node.target for node in nodes if node.op == "call_module")
    for node in nodes:
        if node.op != "call_module":
            continue
        parts = {_index(user): user for user in node.users}
        used = [part for part in node.users if part.users]
        if len(parts) != len(node.users) or parts.keys() - {0, 1} or used != [parts.get(0)]:
            continue
        user, *others = used[0].users
        if others or user.op != "call_module" or user.args != (used[0],) or user.kwargs:
            continue
        if calls[node.target] == calls[user.target] == 1:
            yield str(node.target), str(user.target)


def _index(node: fx.Node) -> Any:
    """Which part of its argument a node takes; None for other operations."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        return node.args[1]
    return None
