"""Every architecture from a tiny random model to logits: reordered, through from_pretrained, and
through load_model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed
from cutlass_ops.nn.architecture import architecture_of

transformers = import_or_skip("transformers")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 16}
#: Configurations, the layers that are packed by the end of their names, and some that stay plain
#: with the reason.
CASES: dict[str, tuple[str, dict[str, Any], set[str], dict[str, str]]] = {
    "llama": (
        "LlamaConfig",
        GROUPED,
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {},
    ),
    "mistral": (
        "MistralConfig",
        GROUPED,
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {},
    ),
    "qwen2": (
        "Qwen2Config",
        GROUPED,
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {},
    ),
    "qwen3": (
        "Qwen3Config",
        GROUPED,
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {},
    ),
    "phi3": (
        "Phi3Config",
        {**GROUPED, "sliding_window": 4},
        {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
        {},
    ),
    "mixtral": (
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {
            "model.layers.0.block_sparse_moe.gate": "a parameter of MixtralTopKRouter",
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {
            "model.layers.0.mlp.gate": "a parameter of Qwen3MoeTopKRouter",
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **COMMON,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        {
            *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        },
        {
            "model.layers.1.mlp.gate": "a parameter of DeepseekV3TopkRouter",
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {"model.layers.0.mlp.router": "a parameter of GptOssTopKRouter"},
    ),
    "mamba": (
        "MambaConfig",
        {**COMMON, "state_size": 8, "conv_kernel": 4, "time_step_rank": 8},
        {"in_proj", "x_proj", "out_proj"},
        {"backbone.layers.0.mixer.dt_proj": "MambaMixer reads its weight itself"},
    ),
    "bloom": (
        "BloomConfig",
        COMMON,
        {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
        {},
    ),
    "falcon": (
        "FalconConfig",
        COMMON,
        {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
        {},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        COMMON,
        {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
        {},
    ),
    "gpt2": ("GPT2Config", COMMON, {"c_attn", "c_proj", "c_fc"}, {}),
    "opt": (
        "OPTConfig",
        {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 32},
        {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "project_in", "project_out"},
        {},
    ),
}


def tiny(name: str) -> Any:
    """A random model whose every parameter matters."""
    torch.manual_seed(0)
    config = getattr(transformers, CASES[name][0])(**CASES[name][1])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in parameter_name:
                parameter.add_(0.1 * torch.rand_like(parameter))
    return model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=TOKENS).logits.float()
    return result


def ends(model: nn.Module) -> set[str]:
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, co.MixedLinear)
    }


@pytest.mark.parametrize("name", CASES)
def test_an_architecture(name: str, tmp_path: Path) -> None:
    _, _, packed, kept = CASES[name]
    model = tiny(name)
    model.save_pretrained(tmp_path / "float")
    expected = logits(model)
    done = reorder_model(
        co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(8, 32)
    )
    for module, reason in kept.items():
        assert reason in done.kept[module]
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", output_loading_info=True
    )
    assert not any(info.values())
    assert ends(loaded) == packed
    loaded_models = {
        "from_pretrained": loaded,
        "load_model": co.load_model(tmp_path / "packed"),
        "load_model of floats": co.load_model(tmp_path / "float", options=Options(8, 32)),
    }
    for name, found in loaded_models.items():
        error = float((logits(found) - expected).norm() / expected.norm())
        assert 1e-5 < error < 0.03, name
    assert verify_packed(tmp_path / "packed", co.load_checkpoint(tmp_path / "float")).problems == []
    loaded_models["load_model"].save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(co.load_model(tmp_path / "saved", fuse=False)))


def test_a_conv1d_is_replaced(tmp_path: Path) -> None:
    model = tiny("gpt2")
    expected = logits(model)
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]
    weights = {name: model.get_submodule(name).weight.detach().t().contiguous() for name in names}
    assert (
        co.replace_linears(
            model, {name: co.reorder(co.quantize(w, 8, 32)) for name, w in weights.items()}
        )
        == names
    )
    found = logits(model)
    assert 1e-5 < (found - expected).norm() / expected.norm() < 0.03
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(co.load_model(tmp_path, fuse=False)), found)


def test_a_quantised_checkpoint_of_conv1d_is_refused(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = tensors[name].to(torch.int8)
    tensors[f"{name}_scale"] = torch.ones(tensors[name].shape[0], 1)
    del tensors["transformer.h.0.attn.c_attn.bias"]  # of another length, which is refused as well
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
        "ignore": ["re:.*mlp.*", "re:.*c_proj"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for options in (Options(), Options(exclude="c_attn")):
        with pytest.raises(co.CheckpointError, match="is quantised, and a Conv1D of its model"):
            reorder_model(co.load_checkpoint(tmp_path), tmp_path / "packed", options)
    # A file of weights is no model: it holds the matrix that the checkpoint has.
    done = reorder_checkpoint(co.load_checkpoint(tmp_path), tmp_path / "weights.safetensors")
    assert list(done.weights) == [name.removesuffix(".weight")]


def test_a_linear_layer_that_computes_something_else_is_kept() -> None:
    sizes = {**GROUPED, "intermediate_size_mlp": 96, "num_local_experts": 2}
    config = transformers.Llama4TextConfig(**{**sizes, "num_hidden_layers": 1}).to_dict()
    architecture = architecture_of({**config, "architectures": ["Llama4ForCausalLM"]})
    reason = architecture.reason_to_keep("model.layers.0.feed_forward.router")
    assert reason == "its class Llama4Router computes something else than nn.Linear does"
    assert architecture.reason_to_keep("model.layers.0.self_attn.q_proj") == ""


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "unheard_of"}, {"model_type": "mixtral", "hidden_size": "wide"}]
)
def test_names_decide_where_the_model_cannot_be_asked(config: dict[str, Any]) -> None:
    architecture = architecture_of(config)
    assert architecture.place("model.layers.0.mlp.experts.0.up_proj") == ("", "")
    for module, reason in {
        "model.layers.0.mlp.experts.0.up_proj": "its name is that of an expert",
        "model.layers.0.block_sparse_moe.gate": "its name is that of a router",
        "backbone.layers.0.mixer.dt_proj": "its name is that of a layer of a state-space model",
    }.items():
        assert architecture.reason_to_keep(module).startswith(reason)
    for module in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.shared_experts.up_proj"):
        assert architecture.reason_to_keep(module) == ""
    assert (
        architecture_of({"model_type": "gpt2", "n_embd": "wide"})
        .reason_to_keep("h.0.attn.c_attn")
        .endswith("transposed")
    )
