"""Layers of experts and 3x3 convolutions on a CPU, of packed weights and of torch's dense fp32.

tools/bench_cpu.py times them. The layer of experts is Qwen3-30B-A3B's, and torch's is written as
transformers writes it: for each expert that has tokens, their rows are gathered and multiplied, and
the results are added.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

import cutlass_ops as co

#: Runs a layer once; each run takes another of some inputs or weights.
Run = Callable[[], torch.Tensor]

EXPERTS, TOP, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
#: Output channels, channels, extents of a 3x3 convolution of one image.
CONVOLUTIONS = ((64, 64, 56), (256, 256, 14))
#: Treatments of x: a layer's name, act_quant.
MODES = {"A16": "none", "A8 token": "token", "A8 block": "block"}
#: Weights of convolutions: name, bits, group size.
WEIGHTS = (("W4 g64", 4, 64), ("W8 g64", 8, 64), ("W8 one group", 8, -1))


class Layer(NamedTuple):
    """A layer, and how it is computed: "torch", or a name of this package's ways."""

    name: str
    runs: dict[str, Run]


def check(runs: dict[str, Run], cycle: int) -> None:
    """Compare every way's result with torch's, for each of so many inputs.

    Raises:
        ValueError: a result is wrong.
    """
    for _ in range(cycle):
        results = {name: run() for name, run in runs.items()}
        expected = results["torch"]
        for name, found in results.items():
            error = float((found - expected).norm() / expected.norm())
            if not error < (0.03 if "A8" in name else 1e-5):
                raise ValueError(f"the relative error of {name} is {error}")


def dense_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The layer in torch."""
    out = torch.zeros_like(x)
    chosen = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for e in chosen.sum((-1, -2)).nonzero().flatten():
        place, token = torch.where(chosen[e])
        gate, up = F.linear(x[token], gate_up[e]).chunk(2, -1)
        found = F.linear(F.silu(gate) * up, down[e]) * weights[token, place, None]
        out.index_add_(0, token, found)
    return out


def experts(ms: list[int], inputs: int = 8) -> Iterator[Layer]:
    """Layers of int4 experts in groups of 128, for each number of tokens."""

    def packed(n: int, k: int, gated: bool) -> tuple[co.PackedExperts, torch.Tensor]:
        made = [co.quantize(torch.randn(n, k) * k**-0.5, 4, 128, True) for _ in range(EXPERTS)]
        values = torch.stack([co.dequantize(weight, torch.float32) for weight in made])
        return co.reorder_experts(made, gated), values

    first, gate_up = packed(2 * INTERMEDIATE, HIDDEN, True)
    second, down = packed(HIDDEN, INTERMEDIATE, False)
    for m in ms:
        given = []
        for _ in range(inputs):
            weights, ids = torch.randn(m, EXPERTS).softmax(-1).topk(TOP)
            given.append((torch.randn(m, HIDDEN), ids, weights))

        def run(layer: Callable[..., torch.Tensor], given: list[tuple[torch.Tensor, ...]]) -> Run:
            turn = itertools.cycle(given)
            return lambda: layer(*next(turn))

        ways = {"torch": partial(dense_experts, gate_up, down)}
        for name, act_quant in MODES.items():
            call = partial(co.mixed_moe, activation="silu", act_quant=act_quant)
            ways[f"W4 g128 {name}"] = lambda x, *routing, call=call: call(
                x, first, second, *routing
            )
        runs = {name: run(way, given) for name, way in ways.items()}
        check(runs, inputs)
        yield Layer(f"experts, M = {m}", runs)


def convolutions(cold_bytes: int) -> Iterator[Layer]:
    """3x3 convolutions; torch's weights and images are channels_last or not, the faster counts.
    Copies of a dense weight exceed ``cold_bytes``; of packed ones there are as many.
    """
    for n, c, size in CONVOLUTIONS:
        values = torch.randn(n, c, 3, 3) * (9 * c) ** -0.5
        x = torch.randn(1, c, size, size)
        last = x.to(memory_format=torch.channels_last)
        count = math.ceil(cold_bytes / (4 * values.numel()))
        for name, bits, group_size in WEIGHTS:
            weight = co.quantize(values, bits, group_size, True)
            dense = co.dequantize(weight, torch.float32).contiguous()

            def run(convolve: Callable[[object], torch.Tensor], weights: list[object]) -> Run:
                turn = itertools.cycle(weights)
                return lambda: convolve(next(turn))

            lasts = [dense.clone(memory_format=torch.channels_last) for _ in range(count)]
            packed: list[object] = [co.reorder(weight) for _ in range(count)]
            runs = {
                "torch": run(
                    lambda w, x=x: F.conv2d(x, w, None, 1, 1), [dense.clone() for _ in range(count)]
                ),
                "torch channels_last": run(lambda w, x=last: F.conv2d(x, w, None, 1, 1), lasts),
            }
            for mode, act_quant in MODES.items():
                call = partial(co.mixed_conv2d, padding=1, act_quant=act_quant)
                runs[f"{name} {mode}"] = run(lambda w, call=call, x=last: call(x, w), packed)
            check(runs, 1)
            yield Layer(f"3x3 convolution, {c} to {n}, {size} x {size}", runs)
