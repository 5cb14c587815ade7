#!/usr/bin/env python3
"""Time text generation on a GPU by models of random weights: in fp16, and with packed linear
layers, in one process.

    tools/generate.py              Llama 3.2 1B and 3.1 8B, batches of 1 and 16
    tools/generate.py --compile    norms, rotations and gates as one kernel each
    tools/generate.py --models llama-3.2-1b --batches 1 --formats w4a16 --out results.json

The models have the published shapes and weights drawn from a normal distribution, as transformers
initialises them: the time of a token does not depend on trained ones. As
`cutlass-ops reorder --bits` does, the linear layers but the output head are quantised in groups of
128 and packed; query, key and value, and gate and up, become one product each.

A step makes a token of each text. Its time is the median over those of
`cutlass_ops.cli.run_demo.generate`, which replays a CUDA graph, and includes the wait for the
tokens. Without the graph the same tokens must come out. floor: the bytes of all weights that a step
reads over the bandwidth at which this process read memory.

As transformers runs them, a layer's small operations between the products are some forty kernels of
one or two microseconds, which hide what a product saves. With --compile torch.compile makes one
kernel of each norm, rotary embedding and gated activation, for fp16 and packed weights alike.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from bench import FORMATS, heading, read_bandwidth
from transformers.models.llama import modeling_llama

import cutlass_ops as co
from cutlass_ops.cli.run_demo import generate
from cutlass_ops.files.conversion_plan import DEFAULT_EXCLUDE

#: What ``pack`` makes: symmetric weights.
SYMMETRIC = {name: form for name, form in FORMATS.items() if not form.shift and not form.book}
#: As in the models' config.json, published by Meta.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
}
FLOATS = "fp16"


def random_model(name: str) -> torch.nn.Module:
    """A model in fp16 on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**MODELS[name]), dtype=torch.float16
        )
    return model.eval()


def pack(model: torch.nn.Module, bits: int, group_size: int) -> None:
    """Quantise and pack the linear layers but the output head."""
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    chosen = {
        name: module.weight.detach()
        for name, module in linears.items()
        if not re.search(DEFAULT_EXCLUDE, name)
    }
    co.replace_linears(
        model,
        {
            name: co.reorder(co.quantize(weight, bits, group_size))
            for name, weight in chosen.items()
        },
    )
    co.fuse_linears(model)


def compile_small_operations() -> None:
    """Compile what Llama's layers do between the products, of models made before and after."""
    module = modeling_llama
    # Every number of texts and every size of a model is a compilation of each.
    torch._dynamo.config.recompile_limit = 64
    compiled = partial(torch.compile, dynamic=False, fullgraph=True)
    module.LlamaRMSNorm.forward = compiled(module.LlamaRMSNorm.forward)
    module.apply_rotary_pos_emb = compiled(module.apply_rotary_pos_emb)
    gated = compiled(lambda gate, up: torch.nn.functional.silu(gate) * up)
    module.LlamaMLP.forward = lambda self, x: self.down_proj(
        gated(self.gate_proj(x), self.up_proj(x))
    )


def bytes_read(model: torch.nn.Module) -> int:
    """Bytes of the weights that one step reads: all but the embedding, of which it reads a row,
    unless it is the head too.
    """
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(t.nbytes for t in tensors.values()) - (
        embedding.nbytes if embedding is not head else 0
    )


def measure(
    model: torch.nn.Module, batch: int, prompt: int, tokens: int, bandwidth: float
) -> dict[str, Any]:
    """How fast a model generates, and that a CUDA graph changes no token.

    Raises:
        RuntimeError: it does.
    """
    generator = torch.Generator().manual_seed(batch)
    asked = torch.randint(
        MODELS["llama-3.2-1b"]["vocab_size"], (batch, prompt), generator=generator
    ).cuda()
    made, seconds = generate(model, asked, tokens)
    few = min(tokens, 16)  # with caches of another length torch's attention rounds differently
    replayed, _ = generate(model, asked, few)
    plain, plain_seconds = generate(model, asked, few, cuda_graph=False)
    if not torch.equal(replayed, plain):
        raise RuntimeError(
            f"a CUDA graph changes {int((replayed != plain).sum())} of {plain.numel()} tokens"
        )
    step, plain_step = statistics.median(seconds[1:]), statistics.median(plain_seconds[1:])
    return {
        "batch": batch,
        "tokens_per_s": round(batch / step, 1),
        "ms_per_step": round(step * 1e3, 3),
        "floor_ms": round(bytes_read(model) / bandwidth * 1e3, 3),
        "prompt_ms": round(seconds[0] * 1e3, 2),
        "ms_per_step_without_graph": round(plain_step * 1e3, 3),
        "different_tokens": len(made.unique()),
    }


def main() -> None:
    """Run the measurements that the arguments select and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help=", ".join(MODELS))
    parser.add_argument(
        "--formats",
        default="w4a16,w8a16,w4a8-block,w8a8-block",
        help=f"in addition to {FLOATS}: {', '.join(SYMMETRIC)}",
    )
    parser.add_argument("--batches", default="1,16", help="texts at a time")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each text at first")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate of each")
    parser.add_argument(
        "--compile", action="store_true", help="compile the small operations between the products"
    )
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    for kind, known in (("models", MODELS), ("formats", SYMMETRIC)):
        if unknown := set(getattr(arguments, kind).split(",")) - set(known):
            parser.error(
                f"unknown {kind}: {', '.join(sorted(unknown))}; known are {', '.join(known)}"
            )
    if arguments.compile:
        compile_small_operations()
    bandwidth = read_bandwidth()
    result = heading(bandwidth) | {
        "transformers": transformers.__version__,
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "compiled": arguments.compile,
        "rows": [],
    }
    for name in arguments.models.split(","):
        model, packed = random_model(name), None
        floats: dict[int, float] = {}
        for form in (
            FLOATS,
            *sorted(arguments.formats.split(","), key=lambda form: SYMMETRIC[form][:2]),
        ):
            if form != FLOATS:
                bits, group_size, options = SYMMETRIC[form][:3]
                if packed != (bits, group_size):
                    if packed:
                        model = random_model(name)
                    pack(model, bits, group_size)
                    packed = bits, group_size
                co.set_activations(model, **options)
            for batch in map(int, arguments.batches.split(",")):
                row = measure(model, batch, arguments.prompt, arguments.tokens, bandwidth)
                versus = row["tokens_per_s"] / floats.setdefault(batch, row["tokens_per_s"])
                result["rows"].append({"model": name, "format": form} | row)
                print(
                    f"{name}  {form:12s} batch {batch:3d}  {row['tokens_per_s']:8.1f} tokens/s  "
                    f"{versus:4.2f} x {FLOATS}  "
                    f"{row['ms_per_step']:7.3f} ms a step, floor {row['floor_ms']:6.3f}, "
                    "without graph "
                    f"{row['ms_per_step_without_graph']:7.2f}; prompt {row['prompt_ms']:7.2f} ms",
                    flush=True,
                )
                if arguments.out:
                    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
