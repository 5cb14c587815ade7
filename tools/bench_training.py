#!/usr/bin/env python3
"""Time one QLoRA step of a Llama-shaped model on packed weights and on bitsandbytes'
NF4, in one process.

    tools/bench_training.py --out results/training_h200.json
    tools/bench_training.py --small --device cpu           a smoke test without a GPU

A step is forward, backward and AdamW on adapters (PEFT's LoRA, rank 16, on all linear layers but
the head), under bf16 autocast with gradient checkpointing. Weights are random. The models have the
same float weights and the same adapters; the NF4 ones have the same codes and scales. They take
turns; a time is the median, by CUDA events. Peak memory is what the model, its adapters and its
optimizer hold, and what a step allocates beyond that.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import torch
import transformers
from bench import heading, read_bandwidth
from torch import nn

import cutlass_ops as co

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
SMALL_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}
RANK = 16


def bitsandbytes_nf4(linear: nn.Linear, device: str) -> nn.Module:
    """The layer in bitsandbytes' NF4, blocks of 64, absmax in fp32."""
    layer = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        compress_statistics=False,
        quant_type="nf4",
    )
    values = linear.weight.data.cpu()
    layer.weight = bnb.nn.Params4bit(
        values, requires_grad=False, compress_statistics=False, quant_type="nf4"
    )
    moved: nn.Module = layer.to(device)
    return moved


def packed_nf4(linear: nn.Linear, device: str) -> nn.Module:
    """The same codes and scales, packed."""
    weight: Any = bitsandbytes_nf4(linear, device).weight
    state = weight.quant_state
    shape = (linear.out_features, linear.in_features)
    flat = co.QuantizedWeight.from_flat(
        weight.data.cpu(), state.absmax.cpu(), shape, state.blocksize, state.code.cpu()
    )
    return co.MixedLinear(co.reorder(flat).to(device))


def packed_int4(linear: nn.Linear, device: str) -> nn.Module:
    """4 bits with zero points, in groups of 128."""
    return co.MixedLinear(co.reorder(co.quantize(linear.weight.data, 4, 128, False).to(device)))


VARIANTS: dict[str, Callable[[nn.Linear, str], nn.Module]] = {
    "bitsandbytes nf4": bitsandbytes_nf4,
    "cutlass_ops nf4": packed_nf4,
    "cutlass_ops int4": packed_int4,
}


class Training:
    """A model with adapters, its optimizer, and one step of both."""

    def __init__(
        self,
        convert: Callable[[nn.Linear, str], nn.Module],
        sizes: dict[str, int],
        tokens: int,
        device: str,
    ) -> None:
        before = self.allocated(device)
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(
                torch.bfloat16
            )
        linears = [
            (n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"
        ]
        for name, linear in linears:
            model.set_submodule(name, convert(linear, device))
        del linears
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model: Any = peft.get_peft_model(model, config)
        self.model.enable_input_require_grads()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            (p for p in self.model.parameters() if p.requires_grad), lr=1e-4
        )
        self.device = device
        self.tokens = torch.randint(
            0, sizes["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(2)
        ).to(device)
        self.first_loss = float(self.step())  # makes the optimizer's state
        self.held = self.allocated(device) - before
        self.milliseconds: list[float] = []
        self.peak = 0

    @staticmethod
    def allocated(device: str) -> int:
        """Bytes that live on a GPU; 0 on a CPU."""
        gc.collect()
        return torch.cuda.memory_allocated() if device == "cuda" else 0

    def step(self) -> torch.Tensor:
        """One step; returns the loss."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        detached: torch.Tensor = loss.detach()
        return detached

    def measure(self) -> None:
        """One more step, timed."""
        if self.device == "cpu":
            start = time.perf_counter()
            self.step()
            self.milliseconds.append(1e3 * (time.perf_counter() - start))
            return
        before = self.allocated(self.device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.step()
        end.record()
        torch.cuda.synchronize()
        self.milliseconds.append(begin.elapsed_time(end))
        self.peak = max(self.peak, self.held + torch.cuda.max_memory_allocated() - before)

    def row(self, name: str) -> dict[str, Any]:
        """The environment of the results."""
        return {
            "name": name,
            "ms": round(statistics.median(self.milliseconds), 3),
            "ms_all": [round(t, 3) for t in self.milliseconds],
            "held_mb": round(self.held / 2**20, 1),
            "peak_mb": round(self.peak / 2**20, 1),
            "first_loss": self.first_loss,
        }


def main() -> None:
    """Run the measurements that the arguments select and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="a model of a few hundred thousand parameters"
    )
    parser.add_argument("--tokens", type=int, help="2048; 32 if --small")
    parser.add_argument("--rounds", type=int, help="steps of each model; 20, or 2 if --small")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of these")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu is for smoke tests")
    names = arguments.variants.split(",")
    if unknown := set(names) - VARIANTS.keys():
        parser.error(
            f"unknown variants: {', '.join(sorted(unknown))}; known are {', '.join(VARIANTS)}"
        )
    sizes = SMALL_SIZES if arguments.small else SIZES
    tokens = arguments.tokens or (32 if arguments.small else 2048)
    rounds = arguments.rounds or (2 if arguments.small else 20)

    result = (
        heading(read_bandwidth())
        if arguments.device == "cuda"
        else {"device": "cpu", "torch": torch.__version__}
    )
    result |= {package: version(package) for package in ("bitsandbytes", "peft", "transformers")}
    result |= {"sizes": sizes, "tokens": tokens, "rank": RANK}
    models = {name: Training(VARIANTS[name], sizes, tokens, arguments.device) for name in names}
    for training in models.values():  # once more: the first step of all warmed libraries up
        training.step()
    for _ in range(rounds):
        for training in models.values():
            training.measure()
    result["rows"] = [training.row(name) for name, training in models.items()]
    for row in result["rows"]:
        print(
            f"{row['name']:<20} {row['ms']:9.2f} ms a step, peak {row['peak_mb']:9.1f} MB, "
            f"held {row['held_mb']:9.1f} MB, first loss {row['first_loss']:.4f}"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
