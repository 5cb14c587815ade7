"""Models of transformers with packed experts: in memory, in files, through both doors, and trained."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors import safe_open
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.packed_file import packed_info
from cutlass_ops.verify import diff_packed, verify_packed

transformers = import_or_skip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

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
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
#: Options of configurations, and the modules of experts.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Qwen3Moe": (
        {"head_dim": 16, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2},
        ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"),
    ),
    "Mixtral": ({"num_local_experts": 4}, ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")),
    "DeepseekV3": ({**SHARED, **LATENT, "num_key_value_heads": 4}, ("model.layers.1.mlp.experts",)),
    "Glm4Moe": ({**SHARED, "head_dim": 16}, ("model.layers.1.mlp.experts",)),
    "GraniteMoe": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ("model.layers.0.block_sparse_moe.experts", "model.layers.1.block_sparse_moe.experts"),
    ),
}


def tiny(family: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family][0], **options})
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=TOKENS).logits.float()
    return result


def experts_of(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, co.nn.MixedExperts)}


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
            assert all(torch.equal(parts[part], others[part]) and parts[part].dtype == others[part].dtype for part in parts)


# ---- saved and loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_experts_are_saved_and_loaded_bit_for_bit(family: str, tmp_path: Path) -> None:
    names = FAMILIES[family][1]
    model = co.quantize_model(tiny(family), 4, 32, act_quant="block")
    assert experts_of(model).keys() == set(names)
    expected = logits(model)
    model.save_pretrained(tmp_path / "a")
    for loaded in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a"),
        co.load_model(tmp_path / "a", fuse=False),
    ):
        assert_same_experts(loaded, model)
        assert torch.equal(logits(loaded), expected)
        loaded.save_pretrained(tmp_path / "b")
        found = diff_packed(tmp_path / "a", tmp_path / "b")
        assert (found.changed, found.only_first, found.only_second) == ({}, [], [])
    # Experts have the model's names in files, whatever those of a float checkpoint are.
    info = packed_info(tmp_path / "a")
    assert info.experts.keys() == {f"{name}.{product}" for name in names for product in ("gate_up_proj", "down_proj")}
    assert verify_packed(tmp_path / "a").problems == []


def test_experts_of_some_layers_are_packed_and_others_are_not(tmp_path: Path) -> None:
    """transformers converts the names and values of the float ones when it saves and loads them."""
    model = co.quantize_model(tiny("Mixtral"), 8, 32, skip=("lm_head", "layers.0.mlp"))
    assert experts_of(model).keys() == {"model.layers.1.mlp.experts"}
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names
    assert "model.layers.1.mlp.experts.gate_up_proj.codes" in names
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_experts(loaded, model)
    assert torch.equal(logits(loaded), logits(model))


def test_experts_are_saved_in_several_files(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32)
    model.save_pretrained(tmp_path, max_shard_size="30kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert verify_packed(tmp_path).problems == []
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_a_model_with_packed_experts_alone_is_saved(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32, skip=("lm_head", "self_attn"))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(module, co.MixedLinear) for module in loaded.modules())
    assert torch.equal(logits(loaded), logits(model))


def test_load_model_chooses_how_experts_quantise_activations(tmp_path: Path) -> None:
    co.quantize_model(tiny("Qwen3Moe"), 4, 32).save_pretrained(tmp_path)
    loaded = co.load_model(tmp_path, act_quant="token", act_symmetric=False)
    assert {(layer.act_quant, layer.act_symmetric) for layer in experts_of(loaded).values()} == {("token", False)}


def changed(path: Path, change: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"]["modules"])
    (path / "config.json").write_text(json.dumps(config))


def test_experts_that_the_configuration_does_not_describe_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    co.quantize_model(tiny("Qwen3Moe"), 4, 32).save_pretrained(tmp_path)
    changed(tmp_path, lambda modules: modules.pop(name))
    with pytest.raises(ValueError, match=rf"{name} \(quantization_config does not name it\)"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    changed(tmp_path, lambda modules: modules.update({name: {"bits": 3, "group_size": 32, "tensors": {}}}))
    with pytest.raises(ValueError, match="bits is 3"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tensors = {"scales": "float32", "offsets": "float32"}
    changed(tmp_path, lambda modules: modules.update({name: {"bits": 4, "group_size": 32, "tensors": tensors}}))
    with pytest.raises(ValueError, match=rf"tensor '{name}\.offsets' is not in the model's files, or is of another size"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_experts_of_which_one_product_is_packed_are_refused(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32)
    experts = {f"{name}.gate_up_proj": layer.gate_up_proj.packed for name, layer in experts_of(model).items()}
    co.save_packed(tmp_path / "half.safetensors", experts)
    with pytest.raises(ValueError, match=r"0\.mlp\.experts\.gate_up_proj' are packed experts, and '.*down_proj' is not packed"):
        co.load_model(tmp_path / "half.safetensors", config=tiny("Qwen3Moe").config)
    with pytest.raises(ValueError, match=r"gate_up_proj' is \[4, 80, 64\]; the model's experts are \[4, 96, 64\]"):
        co.load_model(tmp_path / "half.safetensors", config=tiny("Qwen3Moe", moe_intermediate_size=48).config)


def test_experts_that_transformers_converts_on_loading_are_not_saved(tmp_path: Path) -> None:
    text = {**SIZES, **FAMILIES["Qwen3Moe"][0], "num_hidden_layers": 1}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # type: ignore[dict-item]
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    model = co.quantize_model(transformers.Qwen3VLMoeForConditionalGeneration(config), 4, 32, skip=("visual", "lm_head"))
    with pytest.raises(
        ValueError, match=r"experts of Qwen3VLMoe.* cannot be saved, since transformers converts .*gate_up_proj"
    ):
        model.save_pretrained(tmp_path)


def test_saved_experts_become_float_again(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Mixtral"), 4, 32)
    expected = logits(copy.deepcopy(model).dequantize())
    model.save_pretrained(tmp_path / "packed")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    loaded.dequantize().save_pretrained(tmp_path / "float")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    assert not experts_of(again)
    assert torch.equal(logits(again), expected)
