"""Small models with experts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from imports import import_or_skip
from torch import Tensor

import cutlass_ops as co

transformers = import_or_skip("transformers")


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}

SHARED = {
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

#: Options of configurations, and the modules of experts.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Qwen3Moe": (
        {"head_dim": 16, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2},
        ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"),
    ),
    "Mixtral": (
        {"num_local_experts": 4},
        ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"),
    ),
    "DeepseekV3": ({**SHARED, **LATENT, "num_key_value_heads": 4}, ("model.layers.1.mlp.experts",)),
    "Glm4Moe": ({**SHARED, "head_dim": 16}, ("model.layers.1.mlp.experts",)),
    "GptOss": (
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.5},
        ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"),
    ),
    "GraniteMoe": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ("model.layers.0.block_sparse_moe.experts", "model.layers.1.block_sparse_moe.experts"),
    ),
}


def tiny(family: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}Config")(
            **{**SIZES, **FAMILIES[family][0], **options}
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_bias"):
                    parameter.normal_()
        return model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=TOKENS).logits.float()
    return result


def experts_of(model: Any) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, co.nn.MixedExperts)
    }


def assert_same_experts(found: Any, expected: Any) -> None:
    assert experts_of(found).keys() == experts_of(expected).keys() != set()
    for name, layer in experts_of(expected).items():
        other = experts_of(found)[name]
        assert (other.activation, other.act_quant, other.act_symmetric) == (
            layer.activation,
            layer.act_quant,
            layer.act_symmetric,
        )
        for product in ("gate_up_proj", "down_proj"):
            parts, others = (getattr(m, product).packed.tensors() for m in (layer, other))
            assert parts.keys() == others.keys()
            assert all(
                torch.equal(parts[part], others[part]) and parts[part].dtype == others[part].dtype
                for part in parts
            )


def changed(path: Path, change: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"]["modules"])
    (path / "config.json").write_text(json.dumps(config))
