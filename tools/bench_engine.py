#!/usr/bin/env python3
"""Time models in vLLM with its own kernels and with those of cutlass_ops.

    tools/bench_engine.py --quant compressed-tensors awq --kernel stock marlin ours --json FILE

Neither a checkpoint nor a network is needed: a model is its configuration, and its weights are
random (tools/bench_engine_weights.py), so that tokens mean nothing but are the same for all
kernels, as far as their rounding is. Every model, kind of checkpoint and kernel is a run in a
separate process, with an empty compile cache and a limit of time; its log stays in --logs.

`stock` is vLLM's choice without plugins, `marlin`, `machete` and `humming` name its kernel, and
`ours`, `ours-token` and `ours-block` are the plugin with the three kinds of act_quant. A run
fails if another kernel takes the linear layers than the one that was named.

With --at-once several engines start together, as that takes far longer than to time them, and are
timed one after another when all have started. Their times to start are then those of engines that
share the processors.

The file holds a row a run. Rows that it has are kept, except those of the same run, so that
several calls, also at the same time on different GPUs (CUDA_VISIBLE_DEVICES), share a file.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

Config = dict[str, Any]

_LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
#: Names of models, and their config.json.
MODELS: dict[str, tuple[str, Config]] = {
    "llama-3.1-8b": (
        "Llama-3.1-8B",
        _LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "llama-3.1-70b": (
        "Llama-3.1-70B",
        _LLAMA
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3-30B-A3B",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "rope_theta": 1000000.0,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "tiny": (
        "two layers for a CPU",
        _LLAMA
        | {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}
#: Kinds of checkpoints: how the tables call them, and the quantization_config of config.json.
QUANTS: dict[str, tuple[str, Config]] = {
    "compressed-tensors": (
        "compressed-tensors int4, groups of 128",
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": 128,
                        "dynamic": False,
                    },
                }
            },
        },
    ),
    "awq": (
        "AWQ int4, groups of 128, zero points",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "gptq": (
        "GPTQ int4, groups of 128",
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            # Without this list vLLM reads the headers of the checkpoint's files.
            "modules_in_block_to_quantize": [
                ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                ["self_attn.o_proj"],
                ["mlp.gate_proj", "mlp.up_proj"],
                ["mlp.down_proj"],
                ["mlp.experts"],
            ],
        },
    ),
}
#: Kernels, and the class that vLLM's log must name; None: any of vLLM's.
KERNELS = {
    "stock": None,
    "marlin": "MarlinLinearKernel",
    "machete": "MacheteLinearKernel",
    "humming": "HummingLinearKernel",
    "ours": "CutlassOpsLinearKernel",
    "ours-token": "CutlassOpsLinearKernel",
    "ours-block": "CutlassOpsLinearKernel",
}
#: Expressions for vLLM's log of a run.
LOG = {
    "linear_kernel": re.compile(r"Using (\w+LinearKernel\w*) for"),
    "experts_kernel": re.compile(
        r"Using '?([\w.]+)'? (?:for \w*MoEMethod|(?:WNA16|Unquantized|\w+) MoE backend)"
    ),
    "attention": re.compile(r"Using (\w+) (?:attention )?backend"),
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "weights_s": re.compile(r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds"),
    "compile_s": re.compile(r"torch\.compile (?:takes|took) ([\d.]+) s"),
    "graphs_s": re.compile(r"Graph capturing finished in (\d+) sec"),
}
MARK = "bench_engine: "
#: Files in a run's folder: its engine has started, it is its turn to be timed, and it was.
_STARTED, _TURN, _DONE = "started", "turn", "done"
#: Bytes of keys and values where engines share a GPU: enough for 64 prompts and their answers.
_CACHE_BYTES = 12 << 30
#: The options that identify a run.
KEYS = ("model", "checkpoint", "kernel", "tensor_parallel", "layers")


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Write the config.json of a run's model."""
    config = dict(MODELS[options.model][1])
    quantization = dict(QUANTS[options.quant][1])
    if "num_experts" in config and options.quant == "awq":
        # A part of names: in other models "mlp.gate" would be one of "mlp.gate_up_proj", too.
        quantization["modules_to_not_convert"] = ["lm_head", "mlp.gate"]
    config |= {"dtype": "bfloat16", "quantization_config": quantization}
    if options.layers:
        config["num_hidden_layers"] = options.layers
    (folder / "config.json").write_text(json.dumps(config))


def engine_arguments(options: argparse.Namespace, folder: Path) -> Config:
    """The arguments of vLLM's LLM."""
    arguments: Config = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "random",
        "worker_extension_cls": "bench_engine_weights.Extension",
        "tensor_parallel_size": options.tensor_parallel,
        "max_model_len": options.prefill_tokens + 2048,
        "max_num_seqs": max(*options.batches, options.prefill_prompts),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "generation_config": "vllm",
        "compilation_config": {
            "cudagraph_capture_sizes": sorted({1, 2, 4, 8, *options.batches}),
        },
    }
    if KERNELS[options.kernel] and not options.kernel.startswith("ours"):
        arguments["linear_backend"] = options.kernel
        if "num_experts" in MODELS[options.model][1] and options.kernel != "machete":
            arguments["moe_backend"] = options.kernel
    if options.at_once > 1:
        # vLLM measures what is free, which the other engines change meanwhile.
        arguments["gpu_memory_utilization"] /= options.at_once
        arguments["kv_cache_memory_bytes"] = _CACHE_BYTES
    act_quant = options.kernel.partition("-")[2]
    if act_quant:
        arguments["additional_config"] = {"cutlass_ops": {"act_quant": act_quant}}
    return arguments


def measure(options: argparse.Namespace) -> None:
    """Start the engine of one run and time it; prints the results so far as a line of JSON."""
    folder = Path(options.child)
    write_model(folder, options)
    import torch
    import transformers
    import vllm
    from vllm.platforms import current_platform

    began = time.perf_counter()
    engine = vllm.LLM(**engine_arguments(options, folder))
    found: Config = {
        "start_s": round(time.perf_counter() - began, 2),
        "device": current_platform.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "decode_ms": {},
    }
    (folder / _STARTED).touch()
    while not (folder / _TURN).exists():
        time.sleep(0.1)
    draw = random.Random(1)

    def generate(prompts: int, length: int, tokens: int) -> tuple[float, list[Any]]:
        vocabulary = MODELS[options.model][1]["vocab_size"] - 10
        texts = [
            {"prompt_token_ids": [draw.randrange(10, vocabulary) for _ in range(length)]}
            for _ in range(prompts)
        ]
        sampling = vllm.SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        answers = engine.generate(texts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        made = {len(answer.outputs[0].token_ids) for answer in answers}
        if made != {tokens}:
            raise RuntimeError(f"{tokens} tokens were requested and {sorted(made)} made")
        return seconds, answers

    def say() -> None:
        print("\n" + MARK + json.dumps(found), flush=True)

    # One token from the products of a prompt and one from those of a batch, of 16 texts.
    _, answers = generate(16, options.prompt, 2)
    found["sample_tokens"] = [list(answer.outputs[0].token_ids) for answer in answers]
    generate(max(options.batches), 64, 16)
    for batch in options.batches:
        generate(batch, options.prompt, 8)
        times = []
        for _ in range(options.repeats):
            _, answers = generate(batch, options.prompt, options.tokens)
            # From the first token of the request that has it last, all requests decode.
            last = max((a.metrics for a in answers), key=lambda m: m.first_token_ts)
            times.append((last.last_token_ts - last.first_token_ts) / (options.tokens - 1))
        found["decode_ms"][str(batch)] = round(1e3 * statistics.median(times), 3)
        say()
    prompts, length = options.prefill_prompts, options.prefill_tokens
    generate(prompts, length, 1)
    seconds = statistics.median(generate(prompts, length, 1)[0] for _ in range(options.repeats))
    found["prefill_tokens_per_s"] = round(prompts * length / seconds)
    say()
    (folder / _DONE).touch()
    # The parent ends its processes: vLLM takes seconds to, and what an engine frees would disturb
    # the next one's times.
    signal.pause()


def environment(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The environment of a run."""
    here = str(Path(__file__).parent)
    plugins = "cutlass_ops" if options.kernel.startswith("ours") else ""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_PLUGINS": plugins,
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }


def from_log(text: str) -> Config:
    """The results of a run, from vLLM's log and the run's own lines."""
    found: Config = {}
    for name, pattern in LOG.items():
        values = list(dict.fromkeys(pattern.findall(text)))
        if values:
            found[name] = float(values[0]) if name[-2:] in ("_s", "ib") else ", ".join(values)
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    return found | (json.loads(lines[-1].removeprefix(MARK)) if lines else {})


def wrong_kernel(options: argparse.Namespace, text: str) -> str | None:
    """Why a log is that of another kernel; None if it is not."""
    found = sorted(set(LOG["linear_kernel"].findall(text)))
    expected = KERNELS[options.kernel]
    if expected and found != [expected]:
        return f"linear layers ran on {found}, and not on {expected} alone"
    ours = bool(re.search(r"CutlassOps\w*Kernel for|Using cutlass_ops", text))
    if ours != options.kernel.startswith("ours"):
        return f"cutlass_ops took {'some' if ours else 'no'} layers"
    has_experts = "num_experts" in MODELS[options.model][1]
    if ours and has_experts and "Using cutlass_ops.mixed_moe" not in text:
        return "experts ran on vLLM's kernels"
    return None


class Run:
    """One run in a separate process, whose log is a file."""

    def __init__(self, options: argparse.Namespace, log: Path) -> None:
        self.options, self.log = options, log
        self.folder = tempfile.TemporaryDirectory()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--child", self.folder.name, *arguments_of(options)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(options, Path(self.folder.name)),
                start_new_session=True,
            )
        self.end = time.perf_counter() + options.limit

    def wait(self, file: str) -> bool:
        """Wait for a file of the run, until it ends or its time is over; whether the file is
        there.
        """
        path = Path(self.folder.name) / file
        while not path.exists():
            if self.process.poll() is not None or time.perf_counter() > self.end:
                return False
            time.sleep(0.1)
        return True

    def stop(self) -> None:
        """End the run and the processes that it started: the engine and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()

    def results(self) -> Config:
        """Time the engine; its results, with "error" if the run failed."""
        (Path(self.folder.name) / _TURN).touch()
        error = None
        if not self.wait(_DONE):
            code = self.process.poll()
            limit = f"not done after {self.options.limit} s"
            error = limit if code is None else f"exit status {code}"
            self.stop()
        text = self.log.read_text(errors="replace")
        found = from_log(text)
        error = error or wrong_kernel(self.options, text)
        if error:
            found["error"] = error
            found["lines"] = [
                line[:300] for line in text.splitlines() if re.search(r"Error\b|error:", line)
            ][-8:]
        return found


def arguments_of(options: argparse.Namespace) -> list[str]:
    """The arguments that give a run its options."""
    names = (
        *("model", "quant", "kernel", "tensor_parallel", "layers", "batches", "prompt", "tokens"),
        *("prefill_prompts", "prefill_tokens", "repeats", "at_once"),
    )
    pairs = {name: getattr(options, name) for name in names}
    pairs["batches"] = ",".join(map(str, pairs["batches"]))
    return [
        word
        for name, value in pairs.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def row_of(options: argparse.Namespace, found: Config, commit: str | None) -> Config:
    """A run's row."""
    ours = options.kernel.startswith("ours")
    head = {
        "model": MODELS[options.model][0],
        "checkpoint": QUANTS[options.quant][0],
        "kernel": options.kernel,
        "kernels": "cutlass_ops" if ours else "vLLM",
        "act_quant": options.kernel.partition("-")[2] or "none",
        "tensor_parallel": options.tensor_parallel,
        "layers": options.layers,
        "engines_started_together": options.at_once,
        "commit": commit,
    }
    versions = ("device", "vllm", "torch", "transformers")
    values = {name: value for name, value in found.items() if name not in versions}
    return {name: value for name, value in head.items() if value or name in KEYS} | values


def add(path: Path, heading: Config, row: Config) -> None:
    """Put a row into the file.

    Raises:
        ValueError: the file's other rows are of another device or other versions.
    """
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        result = json.loads(text) if text else heading | {"rows": []}
        differ = [name for name in heading if result.get(name) != heading[name]]
        if differ:
            raise ValueError(
                f"{path} has "
                + ", ".join(f"{name} {result.get(name)}, not {heading[name]}" for name in differ)
            )
        kept = [r for r in result["rows"] if any(r.get(key) != row[key] for key in KEYS)]
        result["rows"] = [*kept, row]
        file.truncate(0)
        file.write(json.dumps(result, indent=1) + "\n")


def heading_of(options: argparse.Namespace, found: Config) -> Config:
    """The heading of a file, which all its rows share."""
    names = ("device", "vllm", "torch", "transformers")
    return {name: found[name] for name in names} | {
        "cutlass_ops": version("cutlass_ops"),
        "workload": {
            "prompt": options.prompt,
            "tokens": options.tokens,
            "prefill": f"{options.prefill_prompts} prompts of {options.prefill_tokens} tokens",
            "dtype": "bfloat16",
            "engine": "torch.compile and CUDA graphs, vLLM's defaults",
        },
    }


def commit_of(given: str | None) -> str | None:
    """The commit that is measured: the given one, or that of the checkout."""
    if given:
        return given
    told = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return told.stdout.strip() if told.returncode == 0 else None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; those with several values are lists."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: Config = {"nargs": "+"}
    parser.add_argument("--model", choices=MODELS, default=["llama-3.1-8b"], **several)
    parser.add_argument("--quant", choices=QUANTS, default=["compressed-tensors"], **several)
    parser.add_argument("--kernel", choices=KERNELS, default=["stock", "ours"], **several)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of a run")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model's, for a trial")
    parser.add_argument(
        "--batches", type=lambda text: [int(word) for word in text.split(",")], default=[1, 16, 64]
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens before those of --tokens")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to make")
    parser.add_argument("--prefill-prompts", type=int, default=8)
    parser.add_argument("--prefill-tokens", type=int, default=2048, help="tokens of each of them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="engines that start together")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a run")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds, after which no run starts"
    )
    parser.add_argument("--commit", help="of cutlass_ops, where there is no checkout")
    parser.add_argument("--logs", type=Path, default=Path("build/bench_engine"))
    parser.add_argument("--json", type=Path, help="the file of results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Time every combination of the options; exits with 1 if one failed."""
    options = parse()
    runs = [
        argparse.Namespace(
            **vars(options) | dict(zip(("model", "quant", "kernel"), names, strict=True))
        )
        for names in itertools.product(options.model, options.quant, options.kernel)
    ]
    if options.child:
        measure(runs[0])
    plugins = [entry.name for entry in entry_points(group="vllm.general_plugins")]
    if "cutlass_ops" not in plugins:
        sys.exit(f"vLLM finds the plugins {plugins}, and cutlass_ops is not installed")
    options.logs.mkdir(parents=True, exist_ok=True)
    commit = commit_of(options.commit)
    began, failed = time.perf_counter(), False
    for first in range(0, len(runs), options.at_once):
        group = runs[first : first + options.at_once]
        names = [
            f"{one.model} {one.quant} {one.kernel}, {one.tensor_parallel} GPU" for one in group
        ]
        if time.perf_counter() - began > options.budget:
            print(*(f"{name}: not started" for name in names), sep="\n", flush=True)
            failed = True
            continue
        with contextlib.ExitStack() as stack:
            started = []
            for one in group:
                words = (one.model, one.quant, one.kernel, f"tp{one.tensor_parallel}")
                started.append(Run(one, options.logs / f"{'-'.join(words)}.log"))
                stack.callback(started[-1].stop)
            for run in started:
                run.wait(_STARTED)
            for name, one, run in zip(names, group, started, strict=True):
                found = run.results()
                print(f"{name}: {json.dumps(found)}", flush=True)
                if "error" in found:
                    failed = True
                elif options.json:
                    add(options.json, heading_of(one, found), row_of(one, found, commit))
    sys.exit(failed)


if __name__ == "__main__":
    main()
