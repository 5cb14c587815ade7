"""Time mixed_gemm on a CPU against torch's fp32 linear: the products of one token of SmolLM2-135M.

    tools/bench_cpu.py --threads 1 --json results/cpu.json

Weights are rotated as in a model, so that they come from memory. The least of several runs is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import cutlass_ops as co
from cutlass_ops import _C

#: N, K and how many of them a token has: q and o, k and v, gate and up, down, head.
SHAPES = [(576, 576, 60), (192, 576, 60), (1536, 576, 60), (576, 1536, 30), (49152, 576, 1)]
#: Bytes of fp32 weights to rotate: more than a cache holds.
ROTATED = 128 << 20

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "W4A16": ({}, {}),
    "W4A16 zeros": ({"symmetric": False}, {}),
    "W4A8": ({}, {"act_quant": "block"}),
    "W4A8 zeros": ({"symmetric": False}, {"act_quant": "block"}),
    "W4A8 act zeros": ({}, {"act_quant": "block", "act_symmetric": False}),
    "W8A16": ({"bits": 8}, {}),
    "W8A8": ({"bits": 8}, {"act_quant": "block"}),
}


def least(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some runs."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def measure(n: int, k: int, count: int, m: int, group_size: int, repeats: int) -> dict[str, float]:
    """Microseconds of one product in each mode."""
    copies = max(1, min(count, ROTATED // (4 * n * k)))
    weights = [torch.randn(n, k) for _ in range(copies)]
    x = torch.randn(m, k)
    found = {"fp32": least(lambda: [F.linear(x, w) for w in weights], repeats)}
    for name, (form, call) in MODES.items():
        packed = [co.reorder(co.quantize(w, **({"bits": 4, "symmetric": True} | form), group_size=group_size)) for w in weights]
        found[name] = least(lambda packed=packed, call=call: [co.mixed_gemm(x, p, **call) for p in packed], repeats)  # type: ignore[misc]
    return {name: 1e6 * seconds / copies for name, seconds in found.items()}


def main() -> None:
    """Measure, print and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--m", type=int, default=1, help="rows of x")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    totals: dict[str, float] = {}
    rows = []
    for n, k, count in SHAPES:
        times = measure(n, k, count, args.m, args.group_size, args.repeats)
        rows.append({"n": n, "k": k, "count": count, "us": {name: round(t, 1) for name, t in times.items()}})
        for name, t in times.items():
            totals[name] = totals.get(name, 0.0) + count * t / 1000
        print(f"{n:6d} x {k:5d}  " + "  ".join(f"{name} {t:.1f}" for name, t in times.items()), "us", flush=True)
    for name, t in totals.items():
        print(f"{name:16s} {t:7.2f} ms a token, {totals['fp32'] / t:5.2f} times as fast as fp32")
    if args.json:
        about = {"threads": args.threads, "m": args.m, "group_size": args.group_size, "machine": platform.machine()}
        about |= {"instruction_set": _C.cpu_instruction_sets()[0], "torch": torch.__version__, "version": co.__version__}
        args.json.write_text(
            json.dumps(about | {"ms": {name: round(t, 2) for name, t in totals.items()}, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
