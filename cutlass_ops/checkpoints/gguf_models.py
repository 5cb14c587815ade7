"""GGUF architectures in transformers: names of tensors, and the configuration.

The tables follow constants.py and tensor_mapping.py of the ``gguf`` package, llama.cpp's
convert_hf_to_gguf.py (what it does to values) and src/llama-model.cpp (what it assumes where the
file says nothing), and transformers' own tables for GGUF. Architectures that cannot be packed
exactly are not in them:

- gpt2: its weights are those of a Conv1D, transposed;
- mamba: its model reads weights without calling the layers that hold them;
- qwen2moe, qwen3moe, gpt-oss, minimax-m2: experts are stacked in tensors of three dimensions;
- qwen35: its out_proj has permuted columns, across groups;
- t5: is no causal model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: More rotary frequencies than any model has.
MAX_ROPE_FACTORS = 4096
#: Modules of the whole model; all others belong to a layer.
_GLOBAL = ("token_embd", "token_embd_norm", "output_norm", "output")

_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PHI3 = {
    **{
        name: module
        for name, module in _LLAMA.items()
        if name not in ("attn_q", "attn_k", "attn_v", "ffn_gate")
    },
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_GEMMA2 = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_STARCODER2 = {**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_STABLELM = {
    name: module for name, module in _LLAMA.items() if name not in ("attn_q_norm", "attn_k_norm")
}
_BLOOM = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON = {
    name: module for name, module in _BLOOM.items() if name not in ("token_embd_norm", "ffn_norm")
}
_LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures that transformers has.

    Attributes:
        model_type, model_class: transformers' names.
        names: modules of the file and of transformers, those of a layer without its prefix.
        layers: the prefix of layers.
        eps: transformers' key of the norms' epsilon.
        layer_norm: whether norms subtract the mean; their epsilon then has another key in the file.
        permuted: modules whose rows llama.cpp's converter permuted.
        norms_plus_one: whether it added 1 to the weights of norms.
        squeezed: ends of the names of tensors ``[N, 1, K]`` that it made ``[N, K]``.
        optional: transformers' key of each key that the file may have (after the architecture's
            name).
        sliding: whether the model has a sliding window where the file gives one.
        fixed: of the configuration, whatever the file says.
    """

    model_type: str
    model_class: str
    names: Mapping[str, str]
    layers: str = "model.layers"
    eps: str = "rms_norm_eps"
    layer_norm: bool = False
    permuted: Collection[str] = ()
    norms_plus_one: bool = False
    squeezed: tuple[str, ...] = ()
    optional: Mapping[str, str] = field(default_factory=dict)
    sliding: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def rename(self, name: str) -> str | None:
        """transformers' name of a tensor, or None where it has none."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+)\.(weight|bias)", name, re.ASCII)
        if match is None:
            return None
        layer, module, suffix = match.groups()
        if module not in self.names or (module in _GLOBAL) != (layer is None):
            return None
        prefix = "" if layer is None else f"{self.layers}.{layer}."
        return f"{prefix}{self.names[module]}.{suffix}"


_HEAD_DIM = {"attention.key_length": "head_dim"}
_QK = ("attn_q", "attn_k")

#: By ``general.architecture``.
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, permuted=_QK, optional=_HEAD_DIM),
    "mistral": Architecture("mistral", "MistralForCausalLM", _LLAMA, permuted=_QK,
                            optional=_HEAD_DIM, sliding=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA, optional=_HEAD_DIM),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3, sliding=True),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _LLAMA, norms_plus_one=True,
                          optional=_HEAD_DIM),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA2,
        norms_plus_one=True,
        optional={
            **_HEAD_DIM,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        sliding=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA2,
        norms_plus_one=True,
        optional={**_HEAD_DIM, "final_logit_softcapping": "final_logit_softcapping"},
        sliding=True,
    ),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _STARCODER2, eps="norm_epsilon", layer_norm=True,
        sliding=True
    ),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", _STABLELM, eps="layer_norm_eps",
                             layer_norm=True),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        _LLAMA,
        eps="norm_eps",
        layer_norm=True,
        norms_plus_one=True,
        optional=_HEAD_DIM,
    ),
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        _BLOOM,
        layers="transformer.h",
        eps="layer_norm_epsilon",
        layer_norm=True,
        permuted=("attn_qkv",),
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        _FALCON,
        layers="transformer.h",
        eps="layer_norm_epsilon",
        layer_norm=True,
        fixed={"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
               "alibi": False},
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        _LFM2,
        eps="norm_eps",
        squeezed=("shortconv.conv.weight",),
        fixed={"block_auto_adjust_ff_dim": False},
    ),
}  # fmt: skip


class ConfigError(ValueError):
    """The file does not give a configuration; the message says why."""


def rope_tensors(architecture: str) -> tuple[str, ...]:
    """Names of tensors that hold divisors of the rotary frequencies, for short and long texts."""
    if architecture == "phi3":
        return ("rope_factors_short.weight", "rope_factors_long.weight")
    return ("rope_freqs.weight",)


class _Keys:
    """Numbers of a file, below its architecture's name."""

    def __init__(self, architecture: str, keys: Mapping[str, Any]) -> None:
        self.architecture = architecture
        self.keys = keys

    def get(self, key: str) -> Any:
        return self.keys.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            raise ConfigError(
                f"key {self.architecture}.{key} is {value!r:.100}; a number above 0 is expected"
            )
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = default if self.get(key) is None else self.get(key)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ConfigError(
                f"key {self.architecture}.{key} is {value!r:.100}; a count of at least 1 "
                "is expected"
            )
        return value


def model_config(
    architecture: str,
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Collection[str],
    factors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """The ``config.json`` of a file's model.

    Args:
        architecture: ``general.architecture``.
        keys: the file's, arrays as text.
        shapes: of its tensors, by their names in the file.
        kinds: types of its matrices.
        factors: values of :func:`rope_tensors`.

    Raises:
        ConfigError: an architecture that is not known, a tensor it does not have, or a key that is
            missing or out of range.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise ConfigError(
            f"architecture {architecture!r:.100} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    for name in shapes:
        if "_exps." in name or "ffn_gate_inp." in name:
            raise ConfigError(
                f"tensor {name!r:.100} belongs to a mixture of experts, which is not supported"
            )
        if known.rename(name) is None and name not in factors:
            raise ConfigError(
                f"tensor {name!r:.100} has no place in a model of architecture {architecture!r}"
            )
    if len(table := shapes.get("token_embd.weight", ())) != 2:
        raise ConfigError("the file has no matrix token_embd.weight")
    has = _Keys(architecture, keys)
    layers, heads, hidden = (
        has.count(key) for key in ("block_count", "attention.head_count", "embedding_length")
    )
    found = {
        int(match[1]) for name in shapes if (match := re.match(r"blk\.(\d{1,9})\.", name, re.ASCII))
    }
    if len(found) != layers or found != set(range(layers)):
        raise ConfigError(
            f"key {architecture}.block_count is {layers}; the file has tensors of "
            f"{len(found)} layers"
        )
    config: dict[str, Any] = {
        "model_type": known.model_type,
        "architectures": [known.model_class],
        "dtype": _dtype(architecture, kinds),
        "vocab_size": table[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_size": hidden,
        known.eps: has.number(f"attention.layer_norm_{'' if known.layer_norm else 'rms_'}epsilon"),
        **known.fixed,
    }
    for name in ("bos", "eos", "pad"):
        token = keys.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")
        # transformers' own defaults are ids of one model's vocabulary.
        config[f"{name}_token_id"] = token if type(token) is int and 0 <= token < table[0] else None
    for key, name in known.optional.items():
        if has.get(key) is not None:
            config[name] = has.count(key) if name == "head_dim" else has.number(key)
    if architecture == "bloom":
        if has.count("feed_forward_length", 4 * hidden) != 4 * hidden:
            raise ConfigError(
                f"key bloom.feed_forward_length is {has.get('feed_forward_length')}; "
                f"{4 * hidden} is expected"
            )
        return {**config, "n_layer": layers, "n_head": heads}
    config["num_hidden_layers"] = layers
    config["num_attention_heads"] = heads
    config["max_position_embeddings"] = has.count("context_length")
    head_dim = config.get("head_dim") or hidden // heads
    if architecture == "falcon":
        if (kv := has.count("attention.head_count_kv", heads)) != 1:
            raise ConfigError(f"a falcon model of {kv} key heads is not supported; 1 is")
        config["ffn_hidden_size"] = has.count("feed_forward_length", 4 * hidden)
        config["bias"] = "blk.0.attn_qkv.bias" in shapes
    else:
        config["intermediate_size"] = has.count("feed_forward_length")
        if architecture == "lfm2":  # one number a layer, 0 for those without attention
            attention = [shapes.get(f"blk.{layer}.attn_k.weight") for layer in range(layers)]
            config["layer_types"] = [
                "conv" if shape is None else "full_attention" for shape in attention
            ]
            config["num_key_value_heads"] = max(
                (shape[0] // head_dim for shape in attention if shape), default=heads
            )
            config["conv_L_cache"] = has.count("shortconv.l_cache")
            config["conv_bias"] = "blk.0.shortconv.in_proj.bias" in shapes
        else:
            config["num_key_value_heads"] = has.count("attention.head_count_kv", heads)
    config.update(_parts(architecture, shapes))
    if known.sliding:
        window = has.get("attention.sliding_window") or None
        if window or architecture not in ("gemma2", "gemma3"):  # those two have one in any case
            config["sliding_window"] = (
                None if window is None else has.count("attention.sliding_window")
            )
    if architecture in ("gemma2", "gemma3"):
        # The models of 27B scale by another value than the size of a head; llama.cpp recognises
        # them by their layers.
        large = layers == {"gemma2": 46, "gemma3": 62}[architecture]
        config["query_pre_attn_scalar"] = hidden // heads if large else head_dim
    return {**config, **_rope(has, head_dim, factors)}


def exceeds_fp16(model: str) -> bool:
    """Whether a model's activations exceed the range of fp16, by transformers' or the file's name
    of its architecture.

    Sums of gemma's residual stream do, from the first layers on: they become infinite, then NaN.
    """
    return model.startswith("gemma")


def _dtype(architecture: str, kinds: Collection[str]) -> str:
    """Dtype of x: that of matrices that are not quantised, where it has the range, else fp16."""
    return "bfloat16" if "BF16" in kinds or exceeds_fp16(architecture) else "float16"


def _parts(architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Settings that follow from the presence of tensors."""

    def has(module: str) -> bool:
        return f"blk.0.{module}" in shapes

    if architecture == "stablelm":
        return {
            "use_qkv_bias": has("attn_q.bias"),
            "use_parallel_residual": not has("ffn_norm.weight"),
        }
    if architecture == "starcoder2":
        return {"use_bias": has("attn_q.bias")}
    if architecture in ("llama", "nemotron"):
        return {"attention_bias": has("attn_q.bias"), "mlp_bias": has("ffn_up.bias")}
    if architecture in ("qwen3", "gemma", "gemma3"):
        return {"attention_bias": has("attn_q.bias")}
    return {}


def _rope(has: _Keys, head_dim: int, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The rotary settings."""
    theta = has.number("rope.freq_base", 10000.0)
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    turned = has.count("rope.dimension_count", head_dim)
    if has.architecture in ("phi3", "nemotron", "stablelm"):
        settings["partial_rotary_factor"] = turned / head_dim
    elif turned != head_dim:
        raise ConfigError(
            f"key {has.architecture}.rope.dimension_count is {turned}; {head_dim}, the size of a "
            "head, is expected"
        )
    kind = has.get("rope.scaling.type") or ("linear" if has.get("rope.scaling.factor") else "none")
    context = has.count("context_length")
    if factors:
        values = list(factors.values())
        short = factors.get("rope_factors_short.weight", values[0])
        long = factors.get("rope_factors_long.weight", values[0])
        if any(len(part) != turned // 2 for part in values):
            raise ConfigError(
                f"{', '.join(factors)}: {[len(part) for part in values]} values; "
                f"{turned // 2} are expected"
            )
        settings["rope_type"] = "longrope"
        settings |= {"short_factor": list(short), "long_factor": list(long)}
        settings["original_max_position_embeddings"] = has.count(
            "rope.scaling.original_context_length", context
        )
        settings["attention_factor"] = has.number("rope.scaling.attn_factor", 1.0)
        # transformers divides them where the configuration has both
        settings["factor"] = context / settings["original_max_position_embeddings"]
        if not all(0 < value < float("inf") for part in values for value in part):
            raise ConfigError(f"{', '.join(factors)}: values are not all finite and above 0")
    elif kind == "linear":
        settings |= {"rope_type": "linear", "factor": has.number("rope.scaling.factor", 1.0)}
    elif kind == "yarn":
        settings |= {"rope_type": "yarn", "factor": has.number("rope.scaling.factor")}
        settings["original_max_position_embeddings"] = has.count(
            "rope.scaling.original_context_length"
        )
    elif kind != "none":
        raise ConfigError(
            f"key {has.architecture}.rope.scaling.type is {kind!r:.100}; linear and yarn "
            "are supported"
        )
    if has.architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": has.number("rope.freq_base_swa", 10000.0)}
        return {"rope_parameters": {"full_attention": settings, "sliding_attention": local}}
    return {"rope_parameters": settings}
