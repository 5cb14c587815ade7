"""quantize_model of models of transformers."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from quantized_models import FAMILIES, fail, packed_names
from torch import Tensor, nn
from warned import said

import cutlass_ops as co
from cutlass_ops.nn import quantize_model as module

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def tiny(family: str, **options: Any) -> Any:
    transformers = import_or_skip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}Config")(
            **{
                "vocab_size": 96,
                "bos_token_id": 0,
                "eos_token_id": 0,
                **FAMILIES[family][0],
                **options,
            }
        )
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=TOKENS).logits.float()
    return result


def with_values(model: Any, quantised: Any) -> Any:
    """The model with the values of another's packed layers."""
    with torch.no_grad():
        for name in packed_names(quantised):
            linear = model.get_submodule(name)
            packed = quantised.get_submodule(name)
            if isinstance(packed, co.nn.MixedExperts):
                for part in ("gate_up_proj", "down_proj"):
                    weights = torch.stack(
                        [
                            co.dequantize(w, torch.float32)
                            for w in getattr(packed, part).packed.unpack()
                        ]
                    )
                    if linear.is_transposed:  # gpt-oss, whose gate and up alternate
                        weights = (
                            torch.stack(weights.chunk(2, 1), 2).flatten(1, 2)
                            if part == "gate_up_proj"
                            else weights
                        )
                        weights = weights.transpose(1, 2)
                    getattr(linear, part).copy_(weights)
                continue
            values = co.dequantize(quantised.get_submodule(name).packed, torch.float32)
            linear.weight.copy_(values if isinstance(linear, nn.Linear) else values.t())
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family: str) -> None:
    _, count, messages = FAMILIES[family]
    model = tiny(family)
    before = copy.deepcopy(model)
    with said(*messages):
        co.quantize_model(model, 8, 32)
    names = packed_names(model)
    assert len(names) == count
    assert "lm_head" not in names
    found, expected = logits(model), logits(before)
    assert (found - expected).norm() <= 0.03 * expected.norm()
    exact = logits(with_values(before, model))
    assert (found - exact).abs().max() <= 2e-5 * exact.square().mean().sqrt()


@pytest.mark.parametrize("family", ["Llama", "Mamba", "Bloom", "Falcon", "GPT2", "Qwen3Moe"])
def test_models_are_saved_and_loaded(family: str, tmp_path: Path) -> None:
    transformers = import_or_skip("transformers")
    model = tiny(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        co.quantize_model(model, 4, 64, act_quant="token")
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert packed_names(loaded) == packed_names(model)
    assert torch.equal(logits(loaded), logits(model))


def test_a_model_that_was_quantised_in_part_before_an_error_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = import_or_skip("transformers")
    model = tiny("Llama")
    layers = iter(range(14))
    monkeypatch.setattr(
        module,
        "reorder",
        lambda weight: co.reorder(weight) if next(layers) < 5 else fail(MemoryError),
    )
    with pytest.raises(MemoryError, match="5 of 14 layers were quantised before it"):
        co.quantize_model(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(packed_names(loaded)) == 5
    assert torch.equal(logits(loaded), logits(model))


def test_activations_that_cannot_be_saved_together_are_refused() -> None:
    model = co.quantize_model(tiny("Llama"), skip=("lm_head", "mlp"))
    with pytest.raises(
        ValueError, match="q_proj' is packed with act_quant 'none', and 'token' is requested"
    ):
        co.quantize_model(model, act_quant="token")
    assert len(packed_names(co.quantize_model(model, 8))) == 14


def test_optional_reads_of_bloom() -> None:
    with said(
        "BloomAttention reads the weight itself: transformer.h.0.self_attention.dense, "
        "transformer.h.1",
        "BloomMLP",
    ):
        model = co.quantize_model(tiny("Bloom", pretraining_tp=2, slow_but_exact=True), 8, 32)
    assert len(packed_names(model)) == 4


def test_tied_weights_stay() -> None:
    model = tiny("Llama", tie_word_embeddings=True)
    with said("the weight is also another module's: lm_head"):
        co.quantize_model(model, 8, 32, skip=())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with said():
        assert "lm_head" in packed_names(
            co.quantize_model(tiny("Llama", tie_word_embeddings=False), 8, 32, skip=())
        )
