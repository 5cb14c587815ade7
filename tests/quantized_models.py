"""Small float models to quantise, and options of small models of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import cutlass_ops as co

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

GPT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

#: Models of transformers: options, how many layers are packed, and what is said of the others.
FAMILIES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "Llama": (LLAMA, 14, ()),
    "GPT2": (
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
        8,
        (),
    ),
    "Bloom": ({"hidden_size": 64, "n_layer": 2, "n_head": 4}, 8, ()),
    "Falcon": (GPT, 8, ()),
    "GPTNeo": (
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        12,
        (),
    ),
    "Mamba": (
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        2,
        (
            "MambaMixer reads the weight itself: backbone.layers.0.mixer.x_proj, "
            "backbone.layers.0.mixer.dt_proj",
            "backbone.layers.1.mixer.out_proj",
        ),
    ),
    # Two layers of experts each.
    "Mixtral": ({**LLAMA, "num_local_experts": 4}, 10, ()),
    "Qwen3Moe": (
        {
            **LLAMA,
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
        10,
        (),
    ),
    "GptOss": ({**LLAMA, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, 10, ()),
    # A list of experts, each with its activation.
    "Llama4Text": (
        {
            **LLAMA,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 1,
        },
        14,
        ("stacked weights of no linear layer: ",),
    ),
}


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(96, 70), nn.GELU(), nn.LayerNorm(70), nn.Linear(70, 33, bias=False)
    ).to(dtype)


def packed_names(model: nn.Module) -> list[str]:
    kinds = (co.MixedLinear, co.nn.MixedExperts)
    return [name for name, layer in model.named_modules() if isinstance(layer, kinds)]


def fail(error: type[Exception]) -> Any:
    raise error("full")
