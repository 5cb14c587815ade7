"""The specification: every number that a kernel may produce, in plain torch, on any device.

Codes and scales of activations are normative bit for bit. Products are normative bit for bit on
CPUs, whose kernels take fp32 sums in the order that is defined here, and up to that order on GPUs.
``compute_dtype=torch.float64`` turns the products into an oracle for tests.

Everything rounds half to even. Every fp32 product, quotient and difference of the quantisers is
rounded separately: a kernel must not fuse them.
"""

from .activations import (
    SMALLEST_RANGE,
    activation_order,
    dequantize_activations,
    natural_order,
    quantize_activations,
    rms_norm,
    silu_mul,
)
from .codebooks import book_cuts, code_book, quantize_book, quantize_e4m3, quantize_mxfp4
from .flat import (
    awq_dequantize,
    awq_unpack,
    dequantize_4bit,
    dequantize_absmax,
    dynamic_map,
    quantize_4bit,
    quantize_absmax,
)
from .gemm import (
    ACTIVATIONS,
    BOOK_NEEDS_FLOATS,
    CLAMPS,
    CONVOLUTION,
    Activation,
    activate,
    check_activation,
    epilogue,
    finite_or_nan,
    gemm_quantized,
    mixed_gemm,
)
from .weights import (
    CLIP_FACTORS,
    dequantize_weight,
    quantize_weight,
    quantize_weight_book,
    taps_as_rows,
)

__all__ = [
    "ACTIVATIONS",
    "BOOK_NEEDS_FLOATS",
    "CLAMPS",
    "CLIP_FACTORS",
    "CONVOLUTION",
    "SMALLEST_RANGE",
    "Activation",
    "activate",
    "activation_order",
    "awq_dequantize",
    "awq_unpack",
    "book_cuts",
    "check_activation",
    "code_book",
    "dequantize_4bit",
    "dequantize_absmax",
    "dequantize_activations",
    "dequantize_weight",
    "dynamic_map",
    "epilogue",
    "finite_or_nan",
    "gemm_quantized",
    "mixed_gemm",
    "natural_order",
    "quantize_4bit",
    "quantize_absmax",
    "quantize_activations",
    "quantize_book",
    "quantize_e4m3",
    "quantize_mxfp4",
    "quantize_weight",
    "quantize_weight_book",
    "rms_norm",
    "silu_mul",
    "taps_as_rows",
]
