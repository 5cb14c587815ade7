"""Small models as GGUF files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from imports import import_or_skip

from cutlass_ops.checkpoints.gguf_models import ARCHITECTURES

transformers = import_or_skip("transformers")

WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "c",
    "▁a",
    "ab",
    "▁ab",
    "<|user|>",
]

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

#: transformers' configuration of each architecture, and keys of the file in addition to
#: the common ones.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": ROPE}, {}),
    "llama tied": (
        "LlamaConfig",
        {"tie_word_embeddings": True, **HEAD},
        {"attention.key_length": 32, "rope.dimension_count": 32},
    ),
    "llama linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 32
            }
        },
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 32},
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
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
         "tie_word_embeddings": True},
        {"shortconv.l_cache": 3},
    ),
}  # fmt: skip


def convert(
    architecture: str, name: str, data: np.ndarray[Any, Any], config: Any
) -> np.ndarray[Any, Any]:
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


def write_model(
    path: Path,
    case: str,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    extra: dict[str, Any] | None = None,
) -> Any:
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
    writer.add_head_count_kv(
        [0, 2] if architecture == "lfm2" else keys.get("attention.head_count_kv", 2)
    )
    eps = getattr(config, ARCHITECTURES[architecture].eps)
    (
        writer.add_layer_norm_eps
        if ARCHITECTURES[architecture].layer_norm
        else writer.add_layer_norm_rms_eps
    )(eps)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope.freq_base" not in keys and "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    for key, value in keys.items():
        if key != "attention.head_count_kv":
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
                type(value)
            ]
            add(f"{architecture}.{key}", value)
    if tokenizer is not None:
        tokenizer(writer)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5 * name.endswith("norm.weight"))
            ours = (name, name.removeprefix("transformer."))  # bloom's are known without it
            theirs = next(
                filter(None, (names.get_name(each, (".weight", ".bias")) for each in ours)), None
            )
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
