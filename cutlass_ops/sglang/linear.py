"""SGLang's linear layers of AWQ, GPTQ and compressed-tensors checkpoints over
:func:`cutlass_ops.mixed_gemm`.

SGLang's configurations make a method for each layer. The method makes parameters as they are in the
files and, after loading, changes them for one of SGLang's kernels. A hook on ``get_quant_method``
gives the method another class: parameters and their loaders stay SGLang's, and the layer is packed
and multiplied by our kernels.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..engines.layers import (
    changed,
    extended,
    input_order,
    int8_weight,
    reason_of_package,
    stored_weight,
    unpacked,
)
from ..engines.stored import Form, StoredLinear, awq_form
from ..weights import formats
from ..weights.weight import QuantizedWeight
from .engine import ENGINE, MISSING, logger, settings

if MISSING is None:
    from sglang.srt.utils import cpu_has_amx_support, is_cpu, is_cuda

    from .engine import HookRegistry, HookType

_QUANTIZATION = "sglang.srt.layers.quantization"
_CONFIGS = (
    f"{_QUANTIZATION}.awq.awq.AWQConfig",
    f"{_QUANTIZATION}.awq.awq.AWQCPUConfig",
    f"{_QUANTIZATION}.awq.awq.AWQMarlinConfig",
    f"{_QUANTIZATION}.gptq.gptq.CPUGPTQConfig",
    f"{_QUANTIZATION}.gptq.gptq.GPTQMarlinConfig",
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig",
)


def take_layers() -> None:
    """Hook ``get_quant_method`` of SGLang's configurations; one line in the log
    for each it lacks.
    """
    for config in _CONFIGS:
        target = f"{config}.get_quant_method"
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            logger.warning(
                "cutlass_ops leaves the layers of %s to SGLang: %s",
                config.rpartition(".")[2],
                error,
            )
            continue
        HookRegistry.register(target, taken, HookType.AFTER)


def taken(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Our method in place of a linear layer's; other methods are unchanged."""
    if type(method).__name__ in _FORMS and not isinstance(method, _Linear):
        kind: Any = type(method)
        return changed(method, extended(kind, _Linear))
    return method


class _Linear(StoredLinear):
    """Overrides of one of SGLang's methods for linear layers."""

    engine = ENGINE

    def form_of(self, layer: Any) -> Form | str:
        """How the layer's weight is stored, or why we do not take the layer."""
        return _FORMS[type(self).__name__](self, layer)

    def reason_against(self, form: Form) -> str | None:
        """Why SGLang keeps such a layer; None if it does not.

        Raises:
            TypeError, ValueError: wrong settings, whatever the layers are.
        """
        act_quant = settings().get("act_quant", "none")
        if not (is_cpu() or is_cuda()):
            return "the device is neither an NVIDIA GPU nor a CPU"
        if (reason := reason_of_package(is_cpu())) is not None:
            return reason
        if is_cpu() and cpu_has_amx_support() and form.amx and act_quant == "none":
            return "SGLang's kernels use AMX on this CPU, and are not compared with cutlass_ops"
        return None


def _awq(method: Any, layer: Any) -> Form | str:
    return awq_form(layer, method.quant_config.weight_bits, method.quant_config.group_size)


def _gptq(method: Any, layer: Any) -> Form | str:
    config = method.quant_config
    bits: int = config.weight_bits
    if bits not in (4, 8):
        return f"GPTQ codes have {bits} bits; supported are 4 and 8"

    def read() -> QuantizedWeight:
        parts = (layer.qweight.data, layer.scales.data, None)
        weight = stored_weight(*parts, bits, config.group_size, columns_first=True)
        # Only GPTQ's configuration with Marlin says that weights are symmetric; it accepts no
        # others.
        zeros = (
            None
            if hasattr(config, "is_sym")
            else _gptq_zeros(layer.qzeros.data, bits, config.checkpoint_format)
        )
        perm = (
            input_order(layer.g_idx.data, config.group_size, weight.n) if config.desc_act else None
        )
        codes = weight.codes if perm is None else weight.codes[:, perm]
        return replace(weight, codes=codes, zeros=zeros, perm=perm)

    return Form(
        config.group_size, config.desc_act, ("qweight", "scales", "qzeros", "g_idx"), read, amx=True
    )


def _gptq_zeros(words: Tensor, bits: int, version: str) -> Tensor | None:
    """The zero points ``[N, G]``; None if all are in the middle."""
    if version != "gptq_v2":  # stored less one, word by word
        words = words + ((1 << 32) - 1) // ((1 << bits) - 1)
    zeros = unpacked(words, 1, bits).t()
    return None if bool((zeros == formats.midpoint(bits)).all()) else zeros


def _compressed_tensors(method: Any, layer: Any) -> Form | str:
    scheme = layer.scheme
    kind = type(scheme).__name__
    if kind == "CompressedTensorsW8A8Int8":
        if scheme.is_static_input_scheme:
            return "x has one scale that the checkpoint fixes"

        def read_int8() -> QuantizedWeight:
            widths = None if len(layer.weight_scale) == len(layer.weight) else layer.logical_widths
            return int8_weight(layer.weight.data, layer.weight_scale.data, widths)

        return Form(
            -1, False, ("weight", "weight_scale"), read_int8, "token", scheme.input_symmetric
        )
    if kind != "CompressedTensorsWNA16":
        return f"the scheme of compressed-tensors is {kind}"
    bits: int = 32 // scheme.pack_factor

    def read() -> QuantizedWeight:
        zeros = None if scheme.symmetric else layer.weight_zero_point.data
        weight = stored_weight(
            layer.weight_packed.data, layer.weight_scale.data, zeros, bits, scheme.group_size
        )
        if not scheme.has_g_idx:
            return weight
        perm = input_order(layer.weight_g_idx.data, scheme.group_size, weight.n)
        return replace(weight, codes=weight.codes[:, perm], perm=perm)

    names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    return Form(scheme.group_size, scheme.has_g_idx, names, read)


#: By the names of SGLang's methods: how a layer's weight is stored, or why we do not take the
#: layer.
_FORMS: dict[str, Callable[[Any, Any], Form | str]] = {
    "AWQLinearMethod": _awq,
    "GPTQLinearMethod": _gptq,
    "GPTQMarlinLinearMethod": _gptq,
    "CompressedTensorsLinearMethod": _compressed_tensors,
}
