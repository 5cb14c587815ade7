#!/usr/bin/env python3
"""Write the tables and pictures of the documentation from results/*.json.

    tools/figures.py             the tables in README.md and docs/*.md, and results/*.svg, in place
    tools/figures.py --tables    the tables alone

A table is in a page between two comments, ``<!-- results: NAME -->`` and ``<!-- end -->``, and NAME
is a function here. MkDocs calls this file as a hook, which fills and draws again: the site has the
results' numbers whatever the pages hold.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import flowchart
import heatmap
import plot

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
#: A commit in a results file.
COMMIT = re.compile("[0-9a-f]{7,40}")
Row = dict[str, Any]

#: The formats of products as README and the pages call them, in the order of the tables.
FORMATS = {
    "w4a16": "W4A16",
    "w8a16": "W8A16",
    "w4a8-block": "W4A8, scales for blocks",
    "w8a8-block": "W8A8, scales for blocks",
    "w4a8-token": "W4A8, scales for rows of x",
    "w8a8-token": "W8A8, scales for rows of x",
    "w8a8-channel": "W8A8, scales for rows of x and W",
    "w4a8-block-asym": "W4A8, scales and zero points for blocks",
    "w8a8-block-asym": "W8A8, scales and zero points for blocks",
    "nf4": "NF4",
    "q4_k": "Q4_K (int4, groups of 32, offsets)",
    "q6_k": "Q6_K (int8, groups of 16)",
}
#: README's formats, with one row of x, as in a chat of one user.
ONE_ROW = ("w4a16", "w8a16", "w4a8-block", "w8a8-block", "nf4")
ONE_ROW_SHAPE = 28672, 4096, 1
#: Their names where groups are not of 128.
ONE_ROW_NAMES = FORMATS | {"nf4": "NF4, groups of 64"}
#: Bits, activations, group size and code book of these formats in results/accuracy.json.
QUALITY = {
    "w4a16": (4, "16", 128, None),
    "w8a16": (8, "16", 128, None),
    "w4a8-block": (4, "8 block", 128, None),
    "w8a8-block": (8, "8 block", 128, None),
    "nf4": (4, "16", 64, "nf4"),
}
EXPERTS = {
    "qwen3-30b": "Qwen3-30B-A3B",
    "qwen3-235b-tp4": "Qwen3-235B-A22B, a quarter",
    "deepseek-v3-tp8": "DeepSeek-V3, an eighth",
    "kimi-k2-tp8": "Kimi K2, an eighth, groups of 32",
    "glm-4.5-air-tp2": "GLM-4.5-Air, a half, groups of 64",
    "mixtral-8x7b": "Mixtral 8x7B",
}
#: Format and peer of the rows of a results file.
EXPERT_MODES = {
    "W4A16": ("w4a16", "ours"),
    "W4A8 block": ("w4a8", "ours-block"),
    "W4A8 token": ("w4a8", "ours-tok"),
    "W8A8 block": ("w8a8", "ours-block"),
    "W8A8 token": ("w8a8", "ours-tok"),
}


#: README's selection.
README_EXPERTS = ("Qwen3-30B-A3B", "Kimi K2, an eighth, groups of 32")
README_MS = (1, 32, 4096)
README_CONVOLUTIONS = ("sdxl 640", "vae 256 at 512")
README_MODEL = ("Llama-3.1-8B", "compressed-tensors int4, groups of 128")


def commits(part: object) -> set[str]:
    """Every commit that a results file names, shortened: in its header, its rows and below."""
    if isinstance(part, list):
        return {commit for entry in part for commit in commits(entry)}
    if not isinstance(part, dict):
        return set()
    named = {str(value) for key, value in part.items() if key.endswith("commit")}
    found = {name[:7] if COMMIT.fullmatch(name) else name for name in named}
    return found.union(*map(commits, part.values()))


def read(name: str) -> dict[str, Any]:
    """Return a results file.

    Raises:
        ValueError: the file names no commit, several, or something else in its place.
    """
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    found = commits(result)
    if "commit" not in result and not all("commit" in row for row in result["rows"]):
        found.add("None")
    if len(found) != 1 or not COMMIT.fullmatch(min(found)):
        names = ", ".join(sorted(found))
        raise ValueError(f"results/{name} is of {names}; every results file is of one commit")
    return result


def digits(value: float) -> str:
    """Return a time or a rate in three or more digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value: float) -> str:
    """A ratio with three digits."""
    return f"{100 * value:#.3g} %"


def markdown(head: Iterable[object], rows: Iterable[Iterable[object]], words: int = 1) -> str:
    """Return a table whose first columns are words and whose others are numbers."""
    head = [str(cell) for cell in head]
    lines = [
        head,
        [*["---"] * words, *["---:"] * (len(head) - words)],
        *([str(cell) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def about(name: str) -> str:
    """Say which file has the numbers, and what its header says of machine, versions and commit."""
    result = read(name)
    facts = [result["device"] + (f" at {result['clock_mhz']} MHz" if "clock_mhz" in result else "")]
    facts += [
        f"{name} {result[name]}"
        for name in ("vllm", "torch", "transformers", "bitsandbytes", "peft")
        if name in result
    ]
    facts += [result["peers"]] if "peers" in result else []
    return f"`results/{name}`: {', '.join(facts)}, {commit_of(result)}."


def commit_of(result: dict[str, Any]) -> str:
    """Say which commit a results file is of."""
    (commit,) = commits(result)
    return f"commit `{commit}`"


# --- products


def peer_of_format(row: Row) -> tuple[str, float] | None:
    """Name and microseconds of the fastest peer that multiplies the same format: torch
    has none of them.
    """
    best = plot.best_peer(row)
    return None if best is None or best[0].startswith("torch ") else best


def cell(row: Row) -> str:
    """Microseconds, and those of the best peer in brackets."""
    peer = peer_of_format(row)
    return digits(row["us"]) + (f" ({digits(peer[1])})" if peer else "")


def products() -> str:
    """Every format over M, a table a shape, with torch's products at the end."""
    parts = [about("h200.json")]
    for (n, k), formats in plot.panels(read("h200.json")["rows"]).items():
        if (n, k) == (576, 576):
            continue
        ms = [1, 16, 64, 256, 1024, 4096]
        times = {
            name: {row["m"]: row for row in rows}
            for name, rows in formats.items()
            if name in FORMATS
        }
        lines = [
            [FORMATS[name], *(cell(times[name][m]) if m in times[name] else "" for m in ms)]
            for name in FORMATS
            if times.get(name, {}).keys() & set(ms)
        ]
        for name in ("torch fp16", "torch int8"):
            # Every row of this M has torch's time; the first one is taken.
            found = [
                [
                    rows[m]["peers_us"][name]
                    for rows in times.values()
                    if m in rows and name in rows[m]["peers_us"]
                ]
                for m in ms
            ]
            lines.append(
                [f"{name} weight", *(digits(times[0]) if times else "" for times in found)]
            )
        parts.append(f"{n} x {k}, microseconds:\n\n" + markdown(["format, M =", *ms], lines))
    return "\n\n".join(parts)


def behind() -> str:
    """Where a peer was faster."""
    rows = [row for row in read("h200.json")["rows"] if row["m"] and row["format"] in FORMATS]
    with_peer = [(row, peer) for row in rows if (peer := peer_of_format(row))]
    lost = [(row, *peer) for row, peer in with_peer if peer[1] < row["us"]]
    text = (
        f"A peer multiplies the same format in {len(with_peer)} rows of the file, and was faster "
        f"in {len(lost)} of them"
    )
    for i, (row, name, us) in enumerate(lost):
        place = f"{FORMATS[row['format']]}, {row['n']} x {row['k']}, M = {row['m']}"
        text += f"{'; ' if i else ': '}{name} in {place} ({percent(1 - us / row['us'])})"
    places: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for name, us in row["peers_us"].items():
            if name.startswith("torch ") and us is not None and us < row["us"]:
                place = (FORMATS[row["format"]], f"{row['n']} x {row['k']}", name)
                places.setdefault(place, []).append(f"{row['m']} ({percent(1 - us / row['us'])})")
    table = markdown(
        ["format", "weight", "torch's product", "M"],
        ([*place, ", ".join(ms)] for place, ms in places.items()),
    )
    return f"{text}.\n\n{table.replace('---:', '---')}"


def copies() -> str:
    """What only moves data, and AWQ's product, which takes tensors as AutoAWQ stores them."""
    lines = []
    for row in read("h200.json")["rows"]:
        if row["m"] == 0 or row["format"] == "awq-gemm":
            peer = peer_of_format(row)
            name = row["format"] + (f", M = {row['m']}" if row["m"] else "")
            lines.append(
                [name, f"{row['n']} x {row['k']}", digits(row["us"]), digits(row["floor_us"])]
            )
            lines[-1] += [f"{digits(peer[1])} ({peer[0]})" if peer else ""]
    return markdown(["operation", "weight", "us", "floor", "peer"], lines, words=2)


def host() -> str:
    """CPU time of eager calls."""
    times: dict[str, dict[int, float]] = {}
    for row in read("h200-host.json")["rows"]:
        times.setdefault(row["call"], {})[row["m"]] = row["host_us"]
    ms = sorted({m for by_m in times.values() for m in by_m})
    table = markdown(
        ["call, M =", *ms], ([call, *(digits(by_m[m]) for m in ms)] for call, by_m in times.items())
    )
    return f"{about('h200-host.json')}\n\n{table}"


def rows_of_one() -> list[Row]:
    """The rows of README's numbers."""
    rows = {(row["format"], row["n"], row["k"], row["m"]): row for row in read("h200.json")["rows"]}
    return [rows[(name, *ONE_ROW_SHAPE)] for name in ONE_ROW]


def one_row() -> str:
    """README's numbers, with the best peer's, and the perplexity of a small model."""
    (model,) = (model for model in models() if model["compared"] == "logits")
    quality = {
        (row["bits"], row["activations"], row["group_size"], row.get("book")): row["perplexity"]
        for row in model["rows"]
        if "clip" not in row and (row.get("symmetric") or "book" in row)
    }
    (fp32,) = (row["perplexity"] for row in model["rows"] if row["activations"] == "fp32")
    lines = []
    for row in rows_of_one():
        name, us = peer_of_format(row) or ("", 0.0)
        lines.append(
            [
                ONE_ROW_NAMES[row["format"]],
                digits(row["us"]),
                f"{digits(us)} ({name})",
                f"{us / row['us']:.2f}",
                f"{quality[QUALITY[row['format']]]:.1f}",
            ]
        )
    heads = ["format", "us", "best peer", "times as fast", f"perplexity (fp32: {fp32:.1f})"]
    return markdown(heads, lines)


#: Weights in the files that costs are fitted to, with scales of x's type and of fp32.
SCALE_TYPES = {
    "int4, groups of 128": ("w4a16", "w4a16-wide"),
    "int8, groups of 128": ("w8a16", "w8a16-wide"),
    "int4, groups of 32": ("w4a16-g32", "w4a16-g32-wide"),
    "int8, groups of 32": ("w8a16-g32", "w8a16-g32-wide"),
    "NF4, groups of 64": ("nf4", "nf4-wide"),
}
#: The most rows of x in a column.
SCALE_TYPE_ROWS = {"1 to 8": 8, "9 to 16": 16, "17 to 64": 64, "65 to 255": 255, "more": math.inf}


def scale_types() -> str:
    """The time of a 16-bit x with scales of fp32 over that with scales of its type: of the fastest
    candidates of a product.
    """
    files = [read(f"h100-{kind}-costs.json") for kind in ("decode", "tile")]
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for file in files:
        us = file["candidate_columns"].index("us")
        for values in file["rows"]:
            row = dict(zip(file["columns"], values, strict=True))
            of_product = times.setdefault((row["n"], row["k"], row["m"]), {})
            of_product[row["format"]] = min(candidate[us] for candidate in row["candidates"])
    lines = []
    for name, (own, wide) in SCALE_TYPES.items():
        ratios: dict[str, list[float]] = {column: [] for column in SCALE_TYPE_ROWS}
        for (_, _, m), found in times.items():
            if own in found and wide in found:
                column = next(name for name, last in SCALE_TYPE_ROWS.items() if m <= last)
                ratios[column].append(found[wide] / found[own])
        cells = [f"{statistics.median(some):.2f} ({max(some):.2f})" for some in ratios.values()]
        lines.append([name, *cells])
    heads = ["weights, M =", *SCALE_TYPE_ROWS]
    named = ", ".join(f"`results/h100-{kind}-costs.json`" for kind in ("decode", "tile"))
    about_both = f"{named}: {files[0]['device']}, commit `{files[0]['commit'][:7]}`."
    return f"{about_both} The median, and in brackets the greatest:\n\n{markdown(heads, lines)}"


def whole_layers() -> str:
    """README's numbers of experts, convolutions and an engine."""
    layers = expert_layers()
    lines = [
        [
            f"{name}, W4A16, M = {m}",
            digits(by_m[m][0]),
            digits(by_m[m][1]),
            f"{by_m[m][1] / by_m[m][0]:.2f}",
        ]
        for name in README_EXPERTS
        for by_m in [layers[f"{name}, W4A16"]]
        for m in README_MS
    ]
    rows = {row["layer"]: row for row in read("mixed_convolutions_h200.json")["rows"]}
    lines += [
        [
            f"{layer}, {mode}",
            digits(row["us"][mode]),
            digits(row["torch_fp16_us"]),
            f"{row['torch_fp16_us'] / row['us'][mode]:.2f}",
        ]
        for layer in README_CONVOLUTIONS
        for row in [rows[layer]]
        for mode in ("W4A16", "W8A8 token")
    ]
    tokens = {
        row["kernel"]: row["decode_ms"]["1"] * 1e3
        for row in read("h200-vllm.json")["rows"]
        if (engine_model(row), row["checkpoint"]) == README_MODEL
    }
    lines.append(
        [
            f"{README_MODEL[0]} in vLLM, a token",
            digits(tokens["ours"]),
            digits(tokens["stock"]),
            f"{tokens['stock'] / tokens['ours']:.2f}",
        ]
    )
    return markdown(["layer", "us", "beside", "times as fast"], lines)


# --- models


def generation() -> str:
    """Tokens a second."""
    result = read("h200-generate.json")
    speeds: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in result["rows"]:
        place = (row["model"], row["format"], "yes" if row["compiled"] else "no")
        speeds.setdefault(place, {})[row["batch"]] = row["tokens_per_s"]
    batches = sorted({batch for by_batch in speeds.values() for batch in by_batch})
    lines = (
        [*place, *(digits(by_batch[batch]) for batch in batches)]
        for place, by_batch in speeds.items()
    )
    table = markdown(["model", "format", "compiled, texts =", *batches], lines, words=3)
    return f"{about('h200-generate.json')} Tokens a second:\n\n{table}"


def training() -> str:
    """A step of QLoRA."""
    rows = read("training_h200.json")["rows"]
    lines = ([row["name"], f"{row['ms']:.1f}", f"{row['peak_mb']:.0f}"] for row in rows)
    table = markdown(["weights", "ms a step", "peak memory, MB"], lines)
    return f"{about('training_h200.json')}\n\n{table}"


def expert_layers() -> dict[str, dict[int, tuple[float, float]]]:
    """Microseconds of whole layers of experts by M: ours, and the least of the peers that
    multiply the same format.

    Only for numbers of rows with which all layers were timed.
    """
    rows = read("experts_h200.json")["rows"]
    us = {(row["shape"], row["format"], row["m"], row["peer"]): row["us"] for row in rows}
    cells = [(shape, form, own) for shape in EXPERTS for form, own in EXPERT_MODES.values()]
    ms = [
        m
        for m in sorted({row["m"] for row in rows})
        if all((s, f, m, own) in us for s, f, own in cells)
    ]
    layers: dict[str, dict[int, tuple[float, float]]] = {}
    for shape, name in EXPERTS.items():
        for mode, (form, own) in EXPERT_MODES.items():
            for m in ms:
                peers = [
                    value
                    for (*key, peer), value in us.items()
                    if key == [shape, form, m] and not peer.startswith("ours")
                ]
                layers.setdefault(f"{name}, {mode}", {})[m] = us[shape, form, m, own], min(peers)
    return layers


def experts() -> str:
    """Whole layers of experts, and the best peer of each."""
    layers = expert_layers()
    cells = [cell for by_m in layers.values() for cell in by_m.values()]
    ahead = sum(ours < peer for ours, peer in cells)
    text = (
        f"{about('experts_h200.json')} Microseconds; ahead in {ahead} of {len(cells)} cells, in "
        "brackets the best peer:"
    )
    table = markdown(
        ["layer, M =", *next(iter(layers.values()))],
        (
            [name, *(f"{digits(ours)} ({digits(peer)})" for ours, peer in by_m.values())]
            for name, by_m in layers.items()
        ),
    )
    return f"{text}\n\n{table}"


def static_convolutions() -> str:
    """Static int8 layers by the chosen plan and by the best, beside torch's fp16 and int8 peers."""
    rows = read("convolutions_h200.json")["rows"]
    compared = [row for row in rows if row["peers_us"] and not row["zero_point"]]
    ratios = [row["us"] / min(row["peers_us"].values()) for row in compared]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    lines = []
    for row in rows:
        best = min(row["plans"], key=lambda plan: plan["us"])
        peer = min(row["peers_us"].items(), key=lambda item: item[1], default=None)
        zero = f", zero point {row['zero_point']}" if row["zero_point"] else ""
        lines.append(
            [
                row["layer"] + zero,
                digits(row["us"]),
                f"{digits(best['us'])} (`{best['kernel']}`)",
                digits(row["torch_fp16_us"]),
                f"{digits(peer[1])} ({peer[0]})" if peer else "",
            ]
        )
    text = (
        f"{about('convolutions_h200.json')} Microseconds, int8 to int8 with bias and relu; ahead "
        f"of the best int8 peer in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} layers, "
        f"{mean:.2f} of its time in the geometric mean."
    )
    heads = ["layer", "chosen plan", "best plan", "torch fp16", "best int8 peer"]
    return f"{text}\n\n{markdown(heads, lines)}"


def mixed_convolutions() -> str:
    """Mixed convolutions in every mode, beside torch's in fp16."""
    rows = read("mixed_convolutions_h200.json")["rows"]
    modes = list(rows[0]["us"])
    lines = [
        [
            row["layer"],
            digits(row["torch_fp16_us"]),
            *(
                f"{row['us'][m] / row['torch_fp16_us']:.2f}" if m in row["us"] else ""
                for m in modes
            ),
        ]
        for row in rows
    ]
    table = markdown(["layer", "torch fp16, us", *modes], lines)
    return f"{about('mixed_convolutions_h200.json')}\n\n{table}"


def engine_files() -> dict[str, dict[str, Any]]:
    """What tools/bench_engine.py wrote, by the names of the files."""
    return {path.name: read(path.name) for path in sorted(RESULTS.glob("*-vllm.json"))}


def engine_model(row: Row) -> str:
    """The model of a run, with its number of layers or GPUs if these are not the usual ones."""
    layers = f", {row['layers']} layers" if row["layers"] else ""
    gpus = f", {row['tensor_parallel']} GPUs" if row["tensor_parallel"] > 1 else ""
    return f"{row['model']}{layers}{gpus}"


def engine_kernels(row: Row) -> str:
    """The kernels of a run, and whether vLLM chose them."""
    if row["kernels"] == "cutlass_ops":
        return f"cutlass_ops, act_quant {row['act_quant']}"
    experts = f", experts {row['experts_kernel']}" if "experts_kernel" in row else ""
    choice = " (vLLM's choice)" if row["kernel"] == "stock" else ""
    return f"{row['linear_kernel']}{experts}{choice}"


def engine_batches(rows: Iterable[Row]) -> list[str]:
    """The batches that any of the rows has."""
    return sorted({batch for row in rows for batch in row["decode_ms"]}, key=int)


def engines() -> str:
    """Models in vLLM: a table for each file."""
    parts = []
    for name, result in engine_files().items():
        batches = engine_batches(result["rows"])
        lines = [
            [
                engine_model(row),
                row["checkpoint"],
                engine_kernels(row),
                *(digits(row["decode_ms"][b]) if b in row["decode_ms"] else "" for b in batches),
                f"{row['prefill_tokens_per_s']:,}",
                digits(row["weights_s"]) if "weights_s" in row else "",
                f"{digits(row['start_s'])} ({row['engines_started_together']})",
            ]
            for row in result["rows"]
        ]
        first, *others = (f"batch {batch}" for batch in batches)
        heads = ["model", "checkpoint", "kernels", f"{first}, ms a token", *others]
        heads += ["prompts, tokens a second", "weights, s", "start, s"]
        parts.append(f"{about(name)}\n\n{markdown(heads, lines, words=3)}")
    return "\n\n".join(parts)


def engine_ratios() -> list[tuple[str, Row, dict[str, float]]]:
    """Device, row and ratios of every row of cutlass_ops whose model and checkpoint ran on vLLM's
    kernels, too: the time of a token by batch and of "prompts", over the least of those kernels.
    """

    def times(row: Row) -> dict[str, float]:
        return {**row["decode_ms"], "prompts": 1 / row["prefill_tokens_per_s"]}

    found = []
    for result in engine_files().values():
        for row in result["rows"]:
            peers = [
                times(peer)
                for peer in result["rows"]
                if peer["kernels"] == "vLLM"
                and (engine_model(peer), peer["checkpoint"])
                == (engine_model(row), row["checkpoint"])
            ]
            if row["kernels"] == "cutlass_ops" and peers:
                ratios = {
                    name: time / min(peer[name] for peer in peers if name in peer)
                    for name, time in times(row).items()
                    if any(name in peer for peer in peers)
                }
                found.append((result["device"], row, ratios))
    return found


def engine_speed() -> str:
    """Tokens a second of models in vLLM, over those of the fastest of its kernels."""
    found: dict[str, tuple[list[float], list[int]]] = {}
    for device, row, ratios in engine_ratios():
        if row["act_quant"] == "none":
            speeds, batches = found.setdefault(f"{engine_model(row)} on {device}", ([], []))
            speeds += [1 / ratio for name, ratio in ratios.items() if name != "prompts"]
            batches += [int(name) for name in ratios if name != "prompts"]
    return "\n".join(
        f"- {name}: {min(speeds):.2f} to {max(speeds):.2f} times, batches of {min(batches)} to "
        f"{max(batches)}"
        for name, (speeds, batches) in found.items()
    )


def cpu() -> str:
    """Tokens a second of a model on a CPU: a table for each file of tools/bench_cpu.py."""
    parts = []
    for path in sorted(RESULTS.glob("cpu_*.json")):
        result = read(path.name)
        facts = (
            f"{result['model']}, a prompt of {result['prompt']} tokens; {result['machine']}, "
            f"{result['cores']} cores"
        )
        facts += f" (load {result['load_average']}), {result['kernels']}, torch {result['torch']}"
        facts += f", {commit_of(result)}"
        lines = [
            [
                row["name"],
                row["threads"],
                digits(row["prompt_tokens_per_s"]),
                digits(row["tokens_per_s"]),
            ]
            for row in result["rows"]
        ]
        heads = ["weights, activations", "threads", "prompt, tokens a second", "decoding"]
        parts.append(f"`results/{path.name}`: {facts}.\n\n{markdown(heads, lines)}")
    return "\n\n".join(parts) or "Not in `results/` yet."


def cpu_layers() -> str:
    """Layers on a CPU over torch's dense fp32: a table for each file of bench_cpu.py --layers."""
    parts = []
    for path in sorted(RESULTS.glob("cpu-layers-*.json")):
        result = read(path.name)
        lines = []
        for row in result["rows"]:
            dense = min(us for name, us in row["us"].items() if name.startswith("torch"))
            own = {name: us for name, us in row["us"].items() if not name.startswith("torch")}
            (weight,) = {name.partition(" A")[0] for name in own}
            cells = (f"{digits(us)} ({us / dense:.2f})" for us in own.values())
            lines.append([row["layer"], weight, row["threads"], digits(dense), *cells])
        heads = ["layer", "weights", "threads", "torch fp32, dense", "A16", "A8 token", "A8 block"]
        parts.append(
            f"`results/{path.name}`: {result['machine']} ({result['flags']}), load "
            f"{result['load_average']}, {result['kernels']}, torch {result['torch']}, "
            f"{commit_of(result)}. Microseconds, of CPU time with one thread, in parentheses over "
            f"torch's, slower above 1:\n\n{markdown(heads, lines, words=2)}"
        )
    return "\n\n".join(parts)


def cpu_products() -> str:
    """Microseconds of products on a CPU: tables for each file of tools/bench_cpu.py --products."""
    parts = []
    for path in sorted(RESULTS.glob("cpu-products-*.json")):
        result = read(path.name)
        packages = ("torch", "onnxruntime", "openvino", "llama-cpp-python")
        facts = (
            f"{result['n']} x {result['k']}; {result['machine']} ({result['flags']}), load "
            f"{result['load_average']}, {result['kernels']}, "
        )
        facts += ", ".join(f"{name} {result[name]}" for name in packages if name in result)
        parts.append(f"`results/{path.name}`: {facts}, {commit_of(result)}.")
        for threads in dict.fromkeys(row["threads"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["threads"] == threads]
            heads = [f"g{row['group_size']}, M = {row['m']}" for row in rows]
            names = dict.fromkeys(name for row in rows for name in row["us"])
            lines = [
                [name, *(digits(row["us"][name]) if name in row["us"] else "" for row in rows)]
                for name in names
            ]
            ratios = [
                [own.removeprefix("ours "), *(over_best_peer(row["us"], own) for row in rows)]
                for own in names
                if own.startswith("ours ")
            ]
            text = "One thread, microseconds of CPU time"
            if threads > 1:
                text = f"{threads} threads, microseconds"
            parts += [
                f"{text}:",
                markdown(["product", *heads], lines),
                "Times over the best peer's in the same arithmetic, slower above 1:",
                markdown(["x", *heads], ratios),
            ]
    return "\n\n".join(parts) or "Not in `results/` yet."


def over_best_peer(us: dict[str, float], own: str) -> str:
    """A time of tools/cpu_peers.py over the least time of peers with the same treatment of x, and
    that peer's name.
    """
    ending = own.removeprefix("ours")
    peers = {
        name.removesuffix(ending): time
        for name, time in us.items()
        if name.endswith(ending) and name != own
    }
    if not peers:
        return ""
    best = min(peers, key=lambda name: peers[name])
    return f"{us[own] / peers[best]:.2f} ({best})"


# --- accuracy


def label(row: Row) -> str:
    """The weights of a row of tools/accuracy.py in words."""
    if "bits" not in row:
        return str(row["weights"])
    if "book" in row:
        return f"{row['book'].upper()}, groups of {row['group_size']}"
    symmetric = "symmetric" if row["symmetric"] else "asymmetric"
    return (
        f"{row['bits']} bits, {symmetric}, {'searched range, ' if 'clip' in row else ''}groups of "
        f"{row['group_size']}"
    )


def models() -> list[dict[str, Any]]:
    """The models of results/accuracy.json."""
    found: list[dict[str, Any]] = read("accuracy.json")["models"]
    return found


def accuracy() -> str:
    """Perplexity and error of a whole causal model, a line for each kind of weights."""
    parts = [about("accuracy.json")]
    for model in models():
        if model["compared"] != "logits":
            continue
        cells: dict[str, dict[str, str]] = {}
        for row in model["rows"]:
            way, _, asymmetric = row["activations"].partition(", ")
            name = label(row) + (", x asymmetric" if asymmetric and "bits" not in row else "")
            cells.setdefault(name, {})[way] = f"{row['perplexity']:.3f} ({percent(row['error'])})"
        (plain,) = cells.pop("fp32").values()
        lines = (
            [name, *(found.get(way, "") for way in ("16", "8 token", "8 block"))]
            for name, found in cells.items()
        )
        tokens = model["windows"] * model["tokens_a_window"]
        text = f"{model['model']}, {tokens} tokens, {model['layers']} layers; in fp32 {plain}:"
        table = markdown(["weights", "x as it is", "x int8, token", "x int8, block"], lines)
        parts.append(f"{text}\n\n{table}")
    return "\n\n".join(parts)


def four_bits() -> str:
    """KL divergence from fp32 of the ways to store 4 bits, x as it is."""
    (model,) = (model for model in models() if model["compared"] == "logits")
    found: dict[str, dict[int, float]] = {}
    for row in model["rows"]:
        if row.get("bits") == 4 and row["activations"] == "16":
            found.setdefault(label(row).rpartition(", groups of ")[0], {})[row["group_size"]] = row[
                "divergence"
            ]
    groups = sorted({group for by_group in found.values() for group in by_group})
    lines = (
        [name, *(f"{by_group[group]:.2f}" for group in groups)] for name, by_group in found.items()
    )
    return markdown(["weights, groups of", *groups], lines)


def layers() -> str:
    """The error of each kind of layer by int8 activations alone."""
    parts = []
    for model in models():
        ways = [way for way in model["kinds"][0]["errors"] if way.startswith("x ")]
        lines = (
            [
                kind["kind"],
                digits(kind["median_peak_over_rms"]),
                *(percent(kind["errors"][way]) for way in ways),
            ]
            for kind in model["kinds"]
        )
        heads = [way.removeprefix("x ") for way in ways]
        parts.append(f"{model['model']}:\n\n{markdown(['layers', 'peak / rms', *heads], lines)}")
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        products,
        behind,
        copies,
        host,
        one_row,
        scale_types,
        whole_layers,
        generation,
        training,
        experts,
        static_convolutions,
        mixed_convolutions,
        engines,
        engine_speed,
        cpu,
        cpu_products,
        cpu_layers,
        accuracy,
        four_bits,
        layers,
    )
}


def fill(text: str) -> str:
    """Return a page with the tables of what results/ holds now."""

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"there is no table {match[2]!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"

    return BLOCK.sub(table, text)


# --- pictures

#: Formats as labels of the heat map; a phone shows it without scrolling.
LABELS = {
    "w4a16": "W4A16",
    "w8a16": "W8A16",
    "nf4": "NF4",
    "q4_k": "Q4_K",
    "q6_k": "Q6_K",
    "w4a8-block": "W4A8 block",
    "w8a8-block": "W8A8 block",
    "w4a8-token": "W4A8 row",
    "w8a8-channel": "W8A8 row",
    "w4a8-block-asym": "W4A8 zeros",
    "w8a8-block-asym": "W8A8 zeros",
}
HEAT_MS = (1, 16, 64, 256, 1024, 4096)
ACTIVATIONS = {"none": "x as it is", "token": "x int8", "block": "x int8 blocks"}
MIXED_MODES = {"W4A16": "W4A16", "W8A16": "W8A16", "W4A8 block": "W4A8", "W8A8 block": "W8A8"}


def mean_ratio(ratios: list[float]) -> float | None:
    """Geometric mean; None for an empty list."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None


def draw_products(path: Path) -> None:
    """Formats over M: the mean over the weights of the time over the fastest other product, torch's
    in fp16 included.
    """
    ratios: dict[tuple[str, int], list[float]] = {}
    for (n, k), formats in plot.panels(read("h200.json")["rows"]).items():
        if (n, k) == (576, 576):
            continue
        fp16 = {
            r["m"]: r["peers_us"]["torch fp16"]
            for rows in formats.values()
            for r in rows
            if "torch fp16" in r["peers_us"]
        }
        for name, rows in formats.items():
            for row in rows:
                others = [
                    us
                    for peer, us in row["peers_us"].items()
                    if peer != "torch int8" and us is not None
                ]
                others += [fp16[row["m"]]] if row["m"] in fp16 else []
                if others:
                    ratios.setdefault((name, row["m"]), []).append(row["us"] / min(others))
    rows_of = [
        (label, [mean_ratio(ratios.get((name, m), [])) for m in HEAT_MS])
        for name, label in LABELS.items()
    ]
    heatmap.draw([str(m) for m in HEAT_MS], rows_of, path)


def under_headings(rows: Iterable[tuple[str, str, list[float | None]]]) -> list[heatmap.Row]:
    """Rows of a heat map from headings, labels and ratios; a heading stands once."""
    found: list[heatmap.Row] = []
    last = None
    for heading, label, ratios in rows:
        if heading != last:
            found.append((heading, ()))
        found.append((label, ratios))
        last = heading
    return found


def draw_experts(path: Path) -> None:
    """Layers of experts over M."""
    layers = expert_layers()
    rows = [
        (*name.rpartition(", ")[::2], [ours / peer for ours, peer in by_m.values()])
        for name, by_m in layers.items()
    ]
    heatmap.draw([str(m) for m in next(iter(layers.values()))], under_headings(rows), path)


def draw_convolutions(path: Path) -> None:
    """Layers over modes; the last mode is static int8."""
    static = {
        row["layer"]: row["us"] / row["torch_fp16_us"]
        for row in read("convolutions_h200.json")["rows"]
        if not row["zero_point"]
    }
    rows = []
    for row in read("mixed_convolutions_h200.json")["rows"]:
        ratios = [
            row["us"][mode] / row["torch_fp16_us"] if mode in row["us"] else None
            for mode in MIXED_MODES
        ]
        rows.append((row["layer"], [*ratios, static.get(row["layer"])]))
    heatmap.draw([*MIXED_MODES.values(), "static"], rows, path)


def draw_engines(path: Path) -> None:
    """Models in vLLM over the fastest of its kernels: a token by batch, and prompts."""
    found = engine_ratios()
    batches = engine_batches(row for _, row, _ in found)
    rows = [
        (
            f"{device.removeprefix('NVIDIA ').split()[0]}: {engine_model(row)}",
            f"{row['checkpoint'].split()[0]}, {ACTIVATIONS[row['act_quant']]}",
            [ratios.get(name) for name in (*batches, "prompts")],
        )
        for device, row, ratios in found
    ]
    columns = ["1 text" if b == "1" else b for b in batches] + ["prompts"]
    heatmap.draw(columns, under_headings(rows), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "heat_products.svg": draw_products,
    "heat_experts.svg": draw_experts,
    "heat_convolutions.svg": draw_convolutions,
    "heat_engines.svg": draw_engines,
    "h200.svg": lambda path: plot.draw(read("h200.json"), path),
    "one_row.svg": lambda path: plot.draw_bars(
        [
            (ONE_ROW_NAMES[row["format"]], row["us"], peer_of_format(row) or ("", 0.0))
            for row in rows_of_one()
        ],
        "{}, {} x {}, M = {}: microseconds of one call".format(
            read("h200.json")["device"], *ONE_ROW_SHAPE
        ),
        path,
    ),
    "accuracy.svg": lambda path: plot.draw_accuracy(read("accuracy.json"), path),
    **{
        f"kernel_{name}.svg": functools.partial(flowchart.draw, chart)
        for name, chart in flowchart.CHARTS.items()
    },
}


# --- MkDocs


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill a page of the site."""
    return fill(markdown)


def on_post_build(config: dict[str, Any], **_: object) -> None:
    """Draw the site's pictures."""
    for name, draw in PICTURES.items():
        draw(Path(config["site_dir"]) / "results" / name)


def main() -> None:
    """Write the tables and pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="draw no pictures")
    arguments = parser.parse_args()
    for page in PAGES:
        page.write_text(fill(page.read_text()))
    for name, draw in {} if arguments.tables else PICTURES.items():
        draw(RESULTS / name)


if __name__ == "__main__":
    main()
