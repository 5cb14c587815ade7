"""vLLM's linear layers over our kernels, packed from the parameters of its checkpoints."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..engines.layers import (
    checked_settings,
    input_order,
    int8_weight,
    keep,
    product,
    reason_of_format,
    reason_of_package,
    unpacked,
)
from ..weights import formats
from ..weights.weight import QuantizedWeight

try:
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none
    from vllm.logger import init_logger
    from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel
    from vllm.platforms import current_platform

    MISSING: ImportError | None = None
    logger: Any = init_logger("vllm.cutlass_ops")
except ImportError as error:
    MISSING = error
    logger = logging.getLogger(__name__)
    Int8ScaledMMLinearKernel = MPLinearKernel = object

#: vLLM's names of weight types, and their bits. Those with "b" have their zero point in the middle,
#: those without are unsigned with zero points that are stored, and int4 is signed, one code a byte,
#: in checkpoints with 8-bit activations.
_BITS = {"uint4": 4, "uint4b8": 4, "uint8": 8, "uint8b128": 8, "int4": 4}
_SIGNED = ("int4",)
#: Weight types for which vLLM has CPU kernels that are not far slower than ours.
_CPU_TYPES = ("uint4", "uint4b8")


def settings() -> dict[str, Any]:
    """The plugin's part of vLLM's additional configuration.

    Raises:
        TypeError, ValueError: a setting that does not exist, or a value that it does not take.
    """
    config = get_current_vllm_config_or_none()
    additional = None if config is None else config.additional_config
    found = additional.get("cutlass_ops", {}) if isinstance(additional, dict) else {}
    return checked_settings(found, "additional_config")


def reason_against_all() -> str | None:
    """Why we take no layer of vLLM's checkpoints; None if we may take some.

    Raises:
        TypeError, ValueError: wrong settings, whatever the layers are.
    """
    settings()
    return reason_of_package(current_platform.is_cpu())


def _reason_against(c: Any) -> str | None:
    """Why we do not take a layer; None if we do."""
    if (reason := reason_against_all()) is not None:
        return reason
    k = c.partition_weight_shape[0]
    if str(c.weight_type) not in _BITS:
        return f"weights are {c.weight_type}; supported are {', '.join(_BITS)}"
    whole_k, order = c.full_weight_shape[0], getattr(c, "has_g_idx", False)
    reason = reason_of_format(k, whole_k, c.group_size, order, c.act_type)
    if reason is None and current_platform.is_cpu():
        reason = _reason_of_cpu(c)
    return reason


def _reason_of_cpu(c: Any) -> str | None:
    """Why we do not take a layer on this CPU that we take on others."""
    if str(c.weight_type) not in _CPU_TYPES or settings().get("act_quant", "none") != "none":
        return None
    # zentorch quantises x to int8 for these weights alone, and does not multiply fp16 on AMD CPUs.
    # That is slower for one token and faster from 4 on (tools/bench_vllm_cpu.py).
    symmetric = str(c.weight_type) == "uint4b8" and c.act_type is torch.bfloat16
    if symmetric and current_platform.is_zen_cpu():
        return "zentorch's kernel, which quantises x to int8, is faster on this CPU"
    # Not compared: vLLM quantises x to int8 for AMX.
    if c.act_type is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return "vLLM's kernels use AMX on this CPU, and are not compared with cutlass_ops"
    return None


def _reason_against_int8(c: Any) -> str | None:
    """Why we do not take layers with 8-bit activations; None if we do."""
    if (reason := reason_against_all()) is not None:
        return reason
    if c.is_static_input_scheme:
        return "x has one scale that the checkpoint fixes"
    if current_platform.is_cpu():  # for 2 to 128 tokens: tools/bench_vllm_cpu.py
        return "vLLM's kernel is faster on a CPU"
    return None


class CutlassOpsLinearKernel(MPLinearKernel):  # type: ignore[misc, unused-ignore]
    """A linear layer of vLLM over :func:`cutlass_ops.mixed_gemm`."""

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that the kernels run on, as vLLM counts: 80 is sm_80."""
        return 80

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Whether we take the layer of configuration ``c``, or else the reason, which is logged
        once.
        """
        reason = _reason_against(c)
        if reason is not None:
            k, n = c.partition_weight_shape
            logger.info_once(
                "cutlass_ops leaves linear layers of %d x %d to vLLM's kernels: %s", n, k, reason
            )
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the layer's parameters on their device, and free them.

        Raises:
            ValueError: values that cannot be packed; the message says which.
        """
        self.batch_invariant: bool = envs.VLLM_BATCH_INVARIANT
        default = "token" if str(self.config.weight_type) in _SIGNED else "none"
        act_quant = settings().get("act_quant", default)
        symmetric = getattr(getattr(layer, "scheme", None), "input_symmetric", True) is not False
        names = (self.w_q_name, self.w_s_name, self.w_zp_name, getattr(self, "w_gidx_name", None))
        keep(layer, filter(None, names), self._quantized_weight(layer), act_quant, symmetric)

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """x ``[..., K]`` times the layer's weight, plus bias: ``[..., N]`` of x's dtype."""
        return product(layer, x, bias, self.batch_invariant)

    def _quantized_weight(self, layer: torch.nn.Module) -> QuantizedWeight:
        c = self.config
        kind = str(c.weight_type)
        bits = _BITS[kind]
        k, n = c.partition_weight_shape
        stored = getattr(layer, self.w_q_name)
        if kind in _SIGNED:
            codes = (stored.data + formats.midpoint(bits)).to(torch.uint8)
        else:
            codes = unpacked(stored.data, stored.packed_dim, bits)
        if stored.output_dim == 1:
            codes = codes.t()
        scales = _by_rows(getattr(layer, self.w_s_name))
        zeros = None
        if c.zero_points:
            points = getattr(layer, self.w_zp_name)
            zeros = unpacked(points.data, points.packed_dim, bits)
            zeros = (zeros if points.output_dim == 0 else zeros.t())[:n]
        perm = None
        if getattr(c, "has_g_idx", False):
            perm = input_order(getattr(layer, self.w_gidx_name).data, c.group_size, n)
            codes = codes[:, perm]
        return QuantizedWeight(
            codes=codes[:n, :k],
            scales=scales,
            zeros=zeros,
            bits=bits,
            group_size=-1 if scales.shape[1] == 1 else c.group_size,
            perm=perm,
        )


class CutlassOpsInt8LinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc, unused-ignore]
    """A linear layer of vLLM with 8-bit weights and x quantised for each token, over
    :func:`cutlass_ops.mixed_gemm`.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether the kernels run on a device of this capability (80 is sm_80), or else why not."""
        if compute_capability is not None and compute_capability < 80:
            return False, f"the device has capability {compute_capability}; 80 or later is needed"
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Whether we take layers of configuration ``c``, or else why not, which is logged once."""
        reason = _reason_against_int8(c)
        if reason is not None:
            logger.info_once(
                "cutlass_ops leaves linear layers with 8-bit activations to vLLM's kernels: %s",
                reason,
            )
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the layer's parameters on their device, and free them.

        Raises:
            ValueError: values that cannot be packed; the message says which.
        """
        self.batch_invariant: bool = envs.VLLM_BATCH_INVARIANT
        names = self.layer_param_names[:2]
        stored, scales = (getattr(layer, name).data for name in names)
        widths: Any = None if self.config.is_channelwise else layer.logical_widths
        weight = int8_weight(stored, scales, widths)
        del stored
        keep(
            layer, names, weight, settings().get("act_quant", "token"), self.config.input_symmetric
        )

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """x ``[..., K]`` times the layer's weight, plus bias: ``[..., N]`` of x's dtype."""
        return product(layer, x, bias, self.batch_invariant)


def _by_rows(scales: Any) -> Tensor:
    """A parameter of scales as ``[N, G]``."""
    values: Tensor = scales.data
    return values if scales.output_dim == 0 else values.t()
