"""AWQ's linear layers in vLLM on a GPU with ``VLLM_BATCH_INVARIANT=1``, over
:func:`cutlass_ops.mixed_gemm`.

vLLM then gives them a method that dequantises the weight in every forward, and chooses no kernel
from its lists; the layers of GPTQ and compressed-tensors still come by the lists (``linear.py``).
"""

from __future__ import annotations

from typing import Any

from ..engines.layers import changed, extended
from ..engines.stored import Form, StoredLinear, awq_form
from .directory import ENGINE
from .linear import MISSING, reason_against_all

if MISSING is None:
    from vllm import envs


def taken(method: Any) -> Any:
    """Our method in place of vLLM's; other methods are unchanged."""
    if type(method).__name__ == "AutoAWQLinearMethod" and envs.VLLM_BATCH_INVARIANT:
        kind: Any = type(method)
        return changed(method, extended(kind, _Linear))
    return method


class _Linear(StoredLinear):
    """Overrides of vLLM's method."""

    engine = ENGINE

    def form_of(self, layer: Any) -> Form | str:
        """How the layer's weight is stored, or why we do not take the layer."""
        config: Any = self.quant_config  # type: ignore[attr-defined]
        return awq_form(layer, config.weight_bits, config.group_size)

    def reason_against(self, form: Form) -> str | None:
        """Why vLLM keeps such a layer; None if it does not."""
        return reason_against_all()
