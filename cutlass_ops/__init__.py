"""Mixed-precision GEMM for quantised weights, built on CUTLASS.

A checkpoint is read into :class:`QuantizedWeight`, reordered once into
:class:`PackedWeight`, and multiplied by :func:`mixed_gemm` on a GPU (kernels) or a CPU (the
reference, which is the specification).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checkpoints import load_checkpoint
from .files.packed_file import load_packed, save_packed
from .integrations.hf import load_model
from .integrations.registration import register_when_imported
from .nn.conv import replace_convs
from .nn.linear import MixedLinear, fuse_linears, replace_linears, set_activations
from .nn.quantize_model import quantize_model
from .ops import gradients_conv as gradients_conv  # the gradient of mixed convolutions
from .ops.activations import (
    QuantizedActivations,
    quantize_activations,
    rms_norm_quantize,
    silu_mul_quantize,
)
from .ops.conv import mixed_conv1d, mixed_conv2d, mixed_conv3d
from .ops.conv_int8 import conv2d_int8, linear_int8
from .ops.drop_in import NestedAbsmax, awq_dequantize, awq_gemm, dequantize_4bit, quantize_4bit
from .ops.embedding import embedding
from .ops.expert_packing import reorder_experts
from .ops.experts import grouped_gemm, mixed_moe
from .ops.explain import Explanation, explain
from .ops.gemm import dequantize, mixed_gemm
from .ops.quantize import quantize
from .ops.routing import Routing, route
from .version import __version__ as __version__
from .weights.packed_experts import PackedExperts
from .weights.packed_weight import PackedWeight
from .weights.reorder import reorder
from .weights.weight import CheckpointError, QuantizedWeight

if TYPE_CHECKING:
    from .integrations.hf_config import CutlassOpsConfig as CutlassOpsConfig

__all__ = [
    "CheckpointError",
    "Explanation",
    "MixedLinear",
    "NestedAbsmax",
    "PackedExperts",
    "PackedWeight",
    "QuantizedActivations",
    "QuantizedWeight",
    "Routing",
    "awq_dequantize",
    "awq_gemm",
    "conv2d_int8",
    "dequantize",
    "dequantize_4bit",
    "embedding",
    "explain",
    "fuse_linears",
    "grouped_gemm",
    "linear_int8",
    "load_checkpoint",
    "load_model",
    "load_packed",
    "mixed_conv1d",
    "mixed_conv2d",
    "mixed_conv3d",
    "mixed_gemm",
    "mixed_moe",
    "quantize",
    "quantize_4bit",
    "quantize_activations",
    "quantize_model",
    "reorder",
    "reorder_experts",
    "replace_convs",
    "replace_linears",
    "rms_norm_quantize",
    "route",
    "save_packed",
    "set_activations",
    "silu_mul_quantize",
]

register_when_imported()


def __getattr__(name: str) -> Any:
    """``CutlassOpsConfig``, which needs transformers, is imported on first use; ``__all__``
    lacks it therefore.
    """
    if name != "CutlassOpsConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"{__name__}.integrations.hf_config").CutlassOpsConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; {name} needs it: pip install 'cutlass_ops[hf]'"
        ) from error
