"""GGUF files of several architectures: to a packed directory or file, and from there to a model of transformers."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn

import cutlass_ops as co
from cutlass_ops.checkpoints.gguf_models import ARCHITECTURES
from cutlass_ops.model_directory import reorder_checkpoint, reorder_model
from cutlass_ops.verify import verify_packed

# Python's own parts of transformers, torch and gguf warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers, which makes the models, is not installed")

TOKENS = torch.arange(24).view(2, 12) * 7 % 150
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "▁a", "ab", "▁ab", "<|user|>"]

SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
HEAD = {"head_dim": 32}
GEMMA = {**HEAD, "query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True}
BLOOM = {"n_layer": 2, "n_head": 4, "tie_word_embeddings": True}
ROPE = {"rope_theta": 20000.0, "rope_type": "default"}
FACTORS = [1.0, 1.5, 2.0, 4.0, 4.5, 5.0, 6.0, 8.0]
#: transformers' configuration of each architecture, and keys of the file beside the common ones.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": ROPE}, {}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True, **HEAD}, {"attention.key_length": 32, "rope.dimension_count": 32}),
    "llama linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32
            }
        },
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen2": ("Qwen2Config", {"rope_parameters": ROPE}, {}),
    "qwen3": ("Qwen3Config", HEAD, {"attention.key_length": 32}),
    "phi3": ("Phi3Config", {"sliding_window": 5}, {"attention.sliding_window": 5}),
    "gemma": ("GemmaConfig", {**HEAD, "tie_word_embeddings": True}, {"attention.key_length": 32}),
    "gemma2": (
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {
            "attention.key_length": 32,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        {
            "attention.key_length": 32,
            "attention.sliding_window": 8,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base": 1e6,
        },
    ),
    "starcoder2": ("Starcoder2Config", {}, {}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}, {"rope.dimension_count": 4}),
    "nemotron": ("NemotronConfig", {}, {"rope.dimension_count": 8}),
    "bloom": ("BloomConfig", BLOOM, {}),
    "falcon": ("FalconConfig", {"tie_word_embeddings": True}, {"attention.head_count_kv": 1}),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
        {"shortconv.l_cache": 3},
    ),
}  # fmt: skip


def convert(architecture: str, name: str, data: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """What llama.cpp's convert_hf_to_gguf.py does to values; ``name`` is the file's."""
    heads = config.num_attention_heads
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = heads if ".attn_q." in name else config.num_key_value_heads
        data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    elif architecture == "bloom" and "attn_qkv" in name:
        data = data.reshape(heads, 3, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)
    elif architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        data = data + 1
    elif name.endswith("shortconv.conv.weight"):
        data = data[:, 0]
    return np.ascontiguousarray(data)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([float(-index) for index in range(len(WORDS))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 7, 3])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")


def write_model(path: Path, case: str, tokenizer: bool = True, extra: dict[str, Any] | None = None) -> Any:
    """A file of a random model with a quantised embedding; the model that has the file's values."""
    architecture = case.split()[0]
    config_class, options, keys = MODELS[case]
    config = getattr(transformers, config_class)(**{**SIZES, **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(256 if architecture in ("bloom", "falcon") else 96)
    writer.add_head_count(4)
    writer.add_head_count_kv([0, 2] if architecture == "lfm2" else keys.get("attention.head_count_kv", 2))
    eps = getattr(config, ARCHITECTURES[architecture].eps)
    (writer.add_layer_norm_eps if ARCHITECTURES[architecture].layer_norm else writer.add_layer_norm_rms_eps)(eps)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope.freq_base" not in keys and "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    for key, value in keys.items():
        if key != "attention.head_count_kv":
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{architecture}.{key}", value)
    if tokenizer:
        add_tokenizer(writer)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5 * name.endswith("norm.weight"))
            theirs = names.get_name(name, (".weight", ".bias"))
            assert theirs is not None, name
            data, kind = parameter.detach().numpy(), Type.F32
            if data.ndim == 2:
                kind = Type.Q4_1 if "ffn" in theirs else Type.Q8_0
                raw = gguf.quants.quantize(data, kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))
                data = raw
            writer.add_tensor(theirs, convert(architecture, theirs, data, config), raw_dtype=kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, np.array(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=TOKENS).logits.float()
    return result


def assert_same_logits(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    a, b = logits(found), logits(expected)
    assert (a - b).abs().max() <= tolerance * b.square().mean().sqrt()


def mixed(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, co.MixedLinear)}


@pytest.mark.parametrize("case", MODELS)
def test_every_architecture(case: str, tmp_path: Path) -> None:
    source = tmp_path / "source" / "model.gguf"
    source.parent.mkdir()
    expected = write_model(source, case)
    checkpoint = co.load_checkpoint(source)
    done = reorder_model(checkpoint, tmp_path / "packed")
    assert done.warnings == ()
    linears = {name for name, module in expected.named_modules() if isinstance(module, nn.Linear)}
    tied = expected.config.tie_word_embeddings
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert mixed(model) == (linears - {"lm_head"} if tied else linears)
    assert_same_logits(model, expected)
    assert_same_logits(co.load_model(tmp_path / "packed", dtype=torch.float32), expected)
    assert_same_logits(co.load_model(source, dtype=torch.float32), expected)
    reorder_checkpoint(checkpoint, tmp_path / "packed.safetensors")
    assert_same_logits(co.load_model(tmp_path / "packed.safetensors", dtype=torch.float32), expected)
    assert verify_packed(tmp_path / "packed", checkpoint).problems == []
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "packed")
    assert tokenizer("ab c").input_ids[0] == 1
    assert tokenizer.decode(tokenizer("ab c").input_ids, skip_special_tokens=True) == "ab c"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<|user|>ab"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert model.generation_config.eos_token_id == 2
