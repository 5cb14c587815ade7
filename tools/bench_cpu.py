"""Time a model or products on a CPU, with the packages beside this one that are installed.

    tools/bench_cpu.py --out results/cpu_smollm2-135m.json
                       [--llama-python /path/to/a/venv/bin/python]
    tools/bench_cpu.py --products --out results/cpu-products-MACHINE.json
    tools/bench_cpu.py --layers --out results/cpu-layers-MACHINE.json

The model is the demo's, SmolLM2-135M-Instruct from a GGUF file: once with the file's own codes
(Q4_1: 4 bits, groups of 32, offsets), otherwise with its dequantised weights quantised again. The
output head, which is the embedding, has 8 bits where layers are packed, as in the file. Results are
tokens a second of fp32 and of packed weights, and llama.cpp's. Times are the least of some runs;
one thread's are its CPU time, as other processes may use the machine.

--products times one int4 weight, with the peers of tools/cpu_peers.py that are installed (pip
install ".[bench]"; llama-cpp-python is compiled when it is installed). A time is the median over
rounds, in each of which every peer multiplies in turn, after a rest, by copies of the weight that
together exceed twice the last cache. Every product is compared with that of the dequantised weight
before it is timed. One thread's time is the CPU time of the process, several threads' is elapsed.

--layers times the layers of tools/cpu_layers.py in the same way, but that torch's dense fp32 is the
only peer.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cpu_layers
import cpu_peers
import torch

import cutlass_ops as co
from cutlass_ops.cli import run_demo
from cutlass_ops.files.packing import reorder_checkpoint

#: Weights: name, bits, group size, symmetric. None is the file's own codes.
WEIGHTS: dict[str, tuple[int, int, bool] | None] = {
    "Q4_1": None,
    "int4 g32 zeros": (4, 32, False),
    "int4 g128": (4, 128, True),
    "int8 g128": (8, 128, True),
}
#: Treatments of x: name, act_quant, act_symmetric.
MODES = (("A16", "none", True), ("A8", "block", True), ("A8 zeros", "block", False))

#: Instructions that products are written for, as Linux calls them.
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16")
#: Before a peer's pass: as long as threads of the one before wait for more work.
REST_SECONDS = 0.01

#: Run by a Python that has llama_cpp: path, threads, tokens of the prompt, tokens to make, runs.
#: Prints two least times.
LLAMA = """
import json, sys, time
import llama_cpp
path, threads, prompt, tokens, runs = sys.argv[1], *map(int, sys.argv[2:])
sizes = {"n_ctx": 2 * prompt, "n_batch": prompt, "n_ubatch": prompt}
clock = time.thread_time if threads == 1 else time.perf_counter
model = llama_cpp.Llama(path, n_threads=threads, n_threads_batch=threads, verbose=False, **sizes)
asked = [1 + i % 40000 for i in range(prompt)]
best = [9e9, 9e9]
for _ in range(runs):
    model.reset()
    begin = clock()
    model.eval(asked)
    best[0] = min(best[0], clock() - begin)
    model.reset()
    model.eval(asked[:16])
    for token in asked[:tokens]:
        begin = clock()
        model.eval([token])
        best[1] = min(best[1], clock() - begin)
print(json.dumps({"version": llama_cpp.__version__, "best": best}))
"""


def float_model(path: Path) -> torch.nn.Module:
    """The dequantised model, as one that was never quantised."""
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: torch.nn.Module = type(read)(config).eval()
    model.load_state_dict(read.state_dict())
    return model


def packed_model(
    floats: torch.nn.Module, form: tuple[int, int, bool] | None, path: Path
) -> torch.nn.Module:
    """The model with packed layers; ``path`` is the file for its own codes."""
    if form is None:
        packed = path.with_suffix(".packed.safetensors")
        reorder_checkpoint(co.load_checkpoint(path), packed)
        return co.load_model(packed, dtype=torch.float32)
    bits, group_size, symmetric = form
    model = copy.deepcopy(floats)
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    chosen = {
        name: co.quantize(
            module.weight.detach(), 8 if name == "lm_head" else bits, group_size, symmetric
        )
        for name, module in linears.items()
    }
    co.replace_linears(model, {name: co.reorder(weight) for name, weight in chosen.items()})
    co.fuse_linears(model)
    return model


def least(run: Callable[[], object], runs: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    run()
    times = []
    for _ in range(runs):
        begin = clock()
        run()
        times.append(clock() - begin)
    return min(times)


@torch.inference_mode()
def measure(
    model: torch.nn.Module, prompt: int, tokens: int, runs: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Tokens a second: of a prompt, and made one after the other, by the fastest step."""
    asked = torch.arange(1, prompt + 1)[None]
    seconds = least(lambda: model(input_ids=asked, use_cache=True, logits_to_keep=1), runs, clock)
    cache = model(input_ids=asked[:, :16], use_cache=True, logits_to_keep=1).past_key_values
    step = least(
        lambda: model(input_ids=asked[:, :1], past_key_values=cache, use_cache=True), tokens, clock
    )
    return rates(prompt, seconds, step)


def rates(prompt: int, seconds: float, step: float) -> dict[str, float]:
    """Tokens a second from the time of a prompt and of one step."""
    return {"prompt_tokens_per_s": round(prompt / seconds, 1), "tokens_per_s": round(1 / step, 1)}


def cold_bytes() -> int:
    """Twice the size of the last cache."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kilobytes = [int(size.read_text().strip().removesuffix("K")) for size in sizes]
    return 2 * 1024 * max(kilobytes, default=32 << 10)


def medians(
    passes: dict[str, cpu_peers.Pass], rounds: int, clock: Callable[[], float], rest: float
) -> dict[str, float]:
    """Median seconds of each pass; a round runs all of them, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, run in passes.items():
            time.sleep(rest)
            begin = clock()
            run()
            times[name].append(clock() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_products(
    weight: co.QuantizedWeight, threads: int, ms: list[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each M: microseconds of a product by name.

    Raises:
        ValueError: a product is wrong.
    """
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    values = co.dequantize(weight, torch.float32)
    peers = cpu_peers.installed(weight, threads, cold_bytes())
    for m in ms:
        x = torch.randn(m, weight.codes.shape[1])
        passes = {name: prepare(x) for name, (prepare, _) in peers.items()}
        for name, run in passes.items():
            cpu_peers.check(name, run, x @ values.t())
        found = medians(passes, rounds, clock, REST_SECONDS)
        us = {name: round(1e6 * time / peers[name][1], 1) for name, time in found.items()}
        yield {"group_size": weight.group_size, "threads": threads, "m": m, "us": us}


def heading() -> dict[str, Any]:
    """The machine and the versions of the results."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    about: dict[str, str] = {}  # of the first CPU
    with open("/proc/cpuinfo") as lines:
        for name, _, value in (line.partition(":") for line in lines):
            about.setdefault(name.strip(), value.strip())
    flags = about.get("flags", "").split()
    return {
        "machine": about.get("model name", platform.machine()),
        "flags": " ".join(flag for flag in FLAGS if flag in flags),
        "cores": os.cpu_count(),
        "kernels": co.explain(1, co.reorder(co.quantize(torch.ones(64, 128)))).kernel,
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "cutlass_ops": co.__version__,
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
    }


def integers(text: str) -> list[int]:
    """The numbers of an argument such as 1,8,128."""
    return list(map(int, text.split(",")))


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the results so far."""
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


@torch.inference_mode()
def time_products(arguments: argparse.Namespace) -> None:
    """Print and write the results of products."""
    n, k = arguments.shape
    torch.manual_seed(0)
    result = heading() | {"n": n, "k": k, "rows": []}
    print(", ".join(f"{name} {value}" for name, value in result.items() if name != "rows"))
    for group_size in arguments.groups:
        weight = cpu_peers.random_weight(n, k, group_size)
        for threads in arguments.threads:
            for row in measure_products(weight, threads, arguments.ms, arguments.rounds):
                result["rows"].append(row)
                print(f"groups of {group_size}, M = {row['m']}, {threads} threads, us:")
                for name, us in row["us"].items():
                    print(f"  {name:24s} {us:10.1f}", flush=True)
                result |= cpu_peers.versions(row["us"])
                write(arguments.out, result)


@torch.inference_mode()
def time_layers(arguments: argparse.Namespace) -> None:
    """Print and write the results of layers of experts and of convolutions."""
    result = heading() | {"rows": []}
    print(", ".join(f"{name} {value}" for name, value in result.items() if name != "rows"))
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        clock = time.process_time if threads == 1 else time.perf_counter
        layers = (cpu_layers.experts(arguments.ms), cpu_layers.convolutions(cold_bytes()))
        for layer in itertools.chain(*layers):
            found = medians(layer.runs, arguments.rounds, clock, REST_SECONDS)
            us = {name: round(1e6 * seconds, 1) for name, seconds in found.items()}
            result["rows"].append({"layer": layer.name, "threads": threads, "us": us})
            print(f"{layer.name}, {threads} threads, us:")
            best = min(time for name, time in us.items() if name.startswith("torch"))
            for name, time_us in us.items():
                print(f"  {name:24s} {time_us:10.1f} {time_us / best:6.2f}", flush=True)
            write(arguments.out, result)


def time_model(arguments: argparse.Namespace) -> None:
    """Print and write the results of the demo's model."""
    path = run_demo.fetch_model(run_demo.default_folder())
    result = heading() | {"transformers": version("transformers")}
    result |= {"model": path.name, "prompt": arguments.prompt, "rows": []}
    print(", ".join(f"{name} {value}" for name, value in result.items() if name != "rows"))

    def report(threads: int, name: str, found: dict[str, float]) -> None:
        result["rows"].append({"threads": threads, "name": name} | found)
        print(
            f"{threads} threads  {name:24s}"
            + "".join(f"  {value:8.1f} {key}" for key, value in found.items()),
            flush=True,
        )
        write(arguments.out, result)

    floats = float_model(path)
    sizes = arguments.prompt, arguments.tokens, arguments.runs
    models = {name: packed_model(floats, form, path) for name, form in WEIGHTS.items()}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        report(threads, "torch fp32", measure(floats, *sizes, clock))
        for name, model in models.items():
            for mode, act_quant, symmetric in MODES:
                co.set_activations(model, act_quant, symmetric)
                report(threads, f"{name} {mode}", measure(model, *sizes, clock))
        if arguments.llama_python:
            command = [arguments.llama_python, "-c", LLAMA, path, str(threads), *map(str, sizes)]
            seen = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            report(
                threads,
                f"llama.cpp Q4_1 ({seen['version']})",
                rates(arguments.prompt, *seen["best"]),
            )


def main() -> None:
    """Run the selected measurements; print and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=integers, default=[1, 2], help="numbers of threads")
    parser.add_argument("--out", type=Path, help="a JSON file")
    model = parser.add_argument_group("the demo's model")
    model.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    model.add_argument("--tokens", type=int, default=48, help="tokens to make")
    model.add_argument("--runs", type=int, default=3)
    model.add_argument("--llama-python", type=Path, help="a Python that has llama_cpp")
    products = parser.add_argument_group("products")
    products.add_argument("--products", action="store_true", help="time products, not the model")
    products.add_argument("--shape", type=integers, default=[4096, 4096], help="N,K")
    products.add_argument("--groups", type=integers, default=[32, 128], help="group sizes")
    products.add_argument("--ms", type=integers, default=[1, 8, 128], help="rows of x")
    products.add_argument("--rounds", type=int, default=15)
    products.add_argument("--layers", action="store_true", help="time layers, not the model")
    arguments = parser.parse_args()
    if arguments.layers:
        time_layers(arguments)
    elif arguments.products:
        time_products(arguments)
    else:
        time_model(arguments)


if __name__ == "__main__":
    main()
