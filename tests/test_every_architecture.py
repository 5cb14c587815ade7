"""quantize_model on every causal model that transformers has, in a tiny configuration."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from imports import import_or_skip
from torch import Tensor

import cutlass_ops as co

transformers = import_or_skip("transformers")
# Parts of transformers and torch warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
#: Values of configurations by the names that models have for them.
SIZES: dict[int, str] = {
    64: "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size "
    "emb_dim lru_width "
    "max_position_embeddings n_positions n_ctx",
    128: "intermediate_size ffn_dim d_ff n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
    "expert_ffn_hidden_size "
    "block_ff_dim dim_ff d_inner intermediate_size_mlp shared_intermediate_size "
    "attention_hidden_size mamba_d_ssm",
    160: "vocab_size vocab_size_per_layer_input",
    32: "moe_intermediate_size kv_lora_rank q_lora_rank",
    16: "head_dim v_head_dim qk_nope_head_dim global_head_dim swa_head_dim kv_channels d_kv "
    "mamba_d_head mamba_head_dim "
    "index_head_dim linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input",
    8: "qk_rope_head_dim state_size mamba_d_state ssm_state_size time_step_rank mamba_dt_rank "
    "laurel_rank mamba_n_heads "
    "mamba_num_heads",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts conv_kernel sliding_window "
    "attention_window_size "
    "chunk_size mamba_chunk_size linear_num_value_heads index_n_heads index_topk",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks "
    "num_key_value_heads "
    "num_experts_per_tok moe_topk moe_k top_k attn_layer_period expert_layer_period "
    "linear_num_key_heads expand "
    "mamba_expand eos_token_id",
    1: "n_group topk_group n_shared_experts first_k_dense_replace moe_num_shared_experts "
    "attn_layer_offset "
    "expert_layer_offset bos_token_id mamba_n_groups n_groups n_mamba_heads",
    0: "pad_token_id num_kv_shared_layers",
}
NAMES: dict[str, Any] = {
    name: value for value, names in SIZES.items() for name in names.split()
} | {"is_decoder": True}
#: Changes to what :func:`settings` makes, for models whose sizes depend on each other.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"layer_types": None},
    {"sliding_window": None},
    {"rotary_dim": 8},
    {"num_experts_per_tok": 1},
    {"num_heads": 8, "head_dim": 16},
    {"attention_hidden_size": 64},
)
#: The share of the architectures that a tiny configuration is found for at least: 165 of 196 in
#: transformers 5.24.
FEWEST = 0.8


def settings(cls: Any) -> dict[str, Any]:
    base = cls()
    fields = base.to_dict()
    found: dict[str, Any] = {}
    for name, value in NAMES.items():
        old = fields.get(name)
        if type(old) in (int, bool, float) and not (old == 0 and "experts" in name):
            found[name] = value
    layers = 2
    if isinstance(types := fields.get("layer_types"), list) and types:
        kinds = list(dict.fromkeys(types))
        found["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        layers = len(found["layer_types"])
        found["num_hidden_layers"] = layers
    for name in ("mlp_layer_types", "layers_block_type", "block_types"):
        if isinstance(types := fields.get(name), list) and types:
            found[name] = (list(dict.fromkeys(types)) * layers)[:layers]
    for name in getattr(cls, "sub_configs", {}):
        if isinstance(part := getattr(base, name, None), transformers.PreTrainedConfig):
            found[name] = settings(type(part))
    return found


def tiny(config_class: Any, model_class: Any) -> Any:
    """A random model of a class; the first error if no configuration makes one that runs."""
    first: Exception | None = None
    for change in VARIANTS:
        try:
            given = {**settings(config_class), **change}
            config = config_class(
                **{name: value for name, value in given.items() if value is not None}
            )
            if model_class.config_class is config.sub_configs.get("text_config"):
                config = config.get_text_config()
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            if size > 60_000_000:
                raise ValueError(f"{size} parameters")
            torch.manual_seed(0)
            model = model_class(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.nan_to_num_()  # some are made without values
            logits(model)
            return model
        except Exception as error:  # of many kinds, as the sizes do not fit
            first = first or error
    assert first is not None
    raise first


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=TOKENS).logits.float()
    return result


@pytest.mark.slow
def test_every_causal_model_runs_when_it_is_packed() -> None:
    ran = 0
    wrong: dict[str, str] = {}
    not_made: dict[str, str] = {}
    for config_class, model_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.items():
        try:
            model = tiny(config_class, model_class)
        except Exception as error:
            not_made[model_class.__name__] = f"{type(error).__name__}: {error}"
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of layers that stay
                co.quantize_model(model, 8, 32, embeddings=True)
            found = logits(model)
            exact = logits(copy.deepcopy(model).dequantize())
            error = float((found - exact).norm() / exact.norm())
            ran += 1
            if not error < 1e-3:
                wrong[model_class.__name__] = f"error {error}"
        except Exception as error:
            wrong[model_class.__name__] = f"{type(error).__name__}: {error}"
    assert not wrong
    assert ran >= FEWEST * (ran + len(not_made)), not_made
