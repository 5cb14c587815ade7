"""load_model of models that are more than a causal language model, or another one, or code
beside a checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import save_file
from sizes import DECODER

import cutlass_ops as co
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model

transformers = import_or_skip("transformers")
# Python's own parts of transformers and torch warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
TEXT: dict[str, Any] = {**DECODER, "vocab_size": 96}
#: Models of images and text: their class, their configuration, and settings of its text part and
#: its vision part.
COMPOSITE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "image_size": 28,
        },
    ),
}


@pytest.mark.parametrize("name", COMPOSITE)
def test_the_text_part_of_a_composite_model_is_loaded(name: str, tmp_path: Path) -> None:
    cls, config_class, text, vision = COMPOSITE[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        text_config={**TEXT, **text}, vision_config=vision, dtype="float32"
    )
    getattr(transformers, cls)(config).eval().save_pretrained(tmp_path / "float")
    options = Options(8, 32)
    reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", options)
    with torch.inference_mode():
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")(
            TOKENS
        ).logits
        for model in (
            co.load_model(tmp_path / "packed", fuse=False),
            co.load_model(tmp_path / "float", options=options, fuse=False),
        ):
            assert type(model).__name__.endswith("ForCausalLM")
            assert any(isinstance(module, co.MixedLinear) for module in model.modules())
            torch.testing.assert_close(model(TOKENS).logits, expected)


ENCODER = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
#: Models that transformers has a causal class for, which is not their class.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": (
        "BertForSequenceClassification",
        "BertConfig",
        {k: v for k, v in TEXT.items() if k not in ("head_dim", "num_key_value_heads")},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **ENCODER,
            "d_model": 64,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "vocab_size": 96,
            "forced_eos_token_id": None,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **ENCODER,
            "d_model": 64,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "vocab_size": 96,
            "pad_token_id": 0,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_ff": 96, "num_layers": 1, "vocab_size": 96},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_class_is_refused_with_what_loads_it(name: str, tmp_path: Path) -> None:
    cls, config_class, sizes = OTHERS[name]
    model = getattr(transformers, cls)(getattr(transformers, config_class)(**sizes)).eval()
    model.save_pretrained(tmp_path / "float")
    reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(8, 32))
    hint = (
        f"names a {cls}, and load_model makes causal language models: "
        f"transformers.{cls}.from_pretrained loads a directory"
    )
    with pytest.raises(ValueError, match=hint):
        co.load_model(tmp_path / "float", options=Options(8, 32))
    with pytest.raises(ValueError, match=hint):
        co.load_model(tmp_path / "packed")
    packed = getattr(transformers, cls).from_pretrained(tmp_path / "packed")
    assert any(isinstance(module, co.MixedLinear) for module in packed.modules())


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    """A checkpoint whose configuration is code that stands beside it."""
    (tmp_path / "configuration_my.py").write_text(
        "print('THE CODE OF THE CHECKPOINT RAN')\nfrom transformers import LlamaConfig\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'my'\n"
    )
    config = {"model_type": "my", "auto_map": {"AutoConfig": "configuration_my.MyConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"m.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    return tmp_path


def test_code_of_a_checkpoint_is_not_run_and_no_prompt_is_shown(custom: Path) -> None:
    code = (
        f"import cutlass_ops as co; co.load_model({str(custom)!r}, options=co.files.Options(8, 32))"
    )
    run = subprocess.run([sys.executable, "-c", code], input="y\n", capture_output=True, text=True)
    assert run.returncode == 1
    assert "RAN" not in run.stdout
    assert "Do you wish" not in run.stdout + run.stderr
    assert (
        "models of type 'my' are code of the checkpoint, which load_model does not run"
        in run.stderr
    )


def test_a_model_that_transformers_knows_is_loaded_without_the_code_beside_it(custom: Path) -> None:
    config = transformers.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"])
    config.auto_map = {"AutoConfig": "configuration_my.MyConfig"}
    transformers.LlamaForCausalLM(config).save_pretrained(custom)
    assert "auto_map" in json.loads((custom / "config.json").read_text())
    assert type(co.load_model(custom, options=Options(8, 32))).__name__ == "LlamaForCausalLM"
