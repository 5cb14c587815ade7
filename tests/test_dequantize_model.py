"""Packed models of transformers as float models again, and the sizes of their heads."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model

transformers = import_or_skip("transformers")
# Python's own parts of transformers and torch warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": SIZES,
    "GPT2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "Mixtral": {**SIZES, "num_local_experts": 4},
    "Jamba": {
        **SIZES,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
}


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=TOKENS).logits.float()
    return result


def is_packed(model: nn.Module) -> bool:
    kinds = (co.MixedLinear, co.nn.FusedPart, co.nn.MixedExperts)
    return any(isinstance(module, kinds) for module in model.modules())


def quantize(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that stay
        return co.quantize_model(model, bits=8, group_size=32, **options)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_becomes_float_again(family: str, fuse: bool, tmp_path: Path) -> None:
    model = tiny(family)
    kinds = {name: type(module) for name, module in model.named_modules()}
    keys = model.state_dict().keys()
    quantize(model)
    if fuse:
        co.nn.fuse_linears(model)
    expected = logits(model)
    assert is_packed(model)
    assert model.dequantize() is model
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (logits(model) - expected).abs().max() <= 2e-5 * expected.square().mean().sqrt()
    assert model.state_dict().keys() == keys
    model.save_pretrained(tmp_path)
    assert "cutlass_ops" not in (tmp_path / "config.json").read_text()
    assert torch.equal(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model)
    )
    quantize(model)  # as any float model
    assert is_packed(model)


def test_a_directory_that_was_loaded_becomes_float(tmp_path: Path) -> None:
    tiny("Qwen2").save_pretrained(tmp_path / "float")
    reorder_model(
        co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(4, 32, False)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", dtype=torch.bfloat16
    )
    packed = copy.deepcopy(model)
    model.dequantize()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    found = model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(found, packed.model.layers[0].mlp.up_proj.dequantize(torch.bfloat16))


def test_attributes_that_mark_a_packed_model_are_not_saved(tmp_path: Path) -> None:
    model = quantize(tiny("Qwen2"))
    assert model.config._is_quantized
    model.save_pretrained(tmp_path)
    assert "_is_quantized" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({"new_num_tokens": 100}, 100),
        ({"new_num_tokens": 90}, 90),
        ({"pad_to_multiple_of": 64}, 128),
    ],
)
def test_a_packed_head_is_not_resized(change: dict[str, int], rows: int) -> None:
    model = quantize(tiny("Qwen2"), skip=())
    with pytest.raises(
        ValueError, match=f"the output head is packed and has 96 rows; {rows} are requested"
    ):
        model.resize_token_embeddings(**change)
    assert (
        len(model.get_input_embeddings().weight)
        == model.config.vocab_size
        == logits(model).shape[-1]
        == 96
    )
    model.dequantize()
    model.resize_token_embeddings(**change)
    assert (
        len(model.get_input_embeddings().weight)
        == model.config.vocab_size
        == logits(model).shape[-1]
        == rows
    )


def test_a_size_that_a_packed_head_has_is_no_change() -> None:
    model = quantize(tiny("Qwen2"), skip=())
    expected = logits(model)
    for change in ({}, {"new_num_tokens": 96}, {"pad_to_multiple_of": 32}):
        assert model.resize_token_embeddings(**change) is model.get_input_embeddings()
    assert torch.equal(logits(model), expected)


def test_a_float_head_is_resized() -> None:
    model = quantize(tiny("Qwen2"))
    model.resize_token_embeddings(100)
    assert logits(model).shape[-1] == 100
