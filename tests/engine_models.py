"""Tiny models with random weights, as checkpoints and packed directories, for the
tests of engines.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.weights import formats

HIDDEN, INNER, VOCABULARY, LAYERS, GROUP = 128, 256, 256, 2, 32
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
LINEARS = {
    "self_attn.q_proj": (128, HIDDEN),
    "self_attn.k_proj": (64, HIDDEN),
    "self_attn.v_proj": (64, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 128),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
EXPERTS = 4
MOE_CONFIG = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def ct(
    form: str, bits: int, symmetric: bool, activations: bool, group: int | None = GROUP
) -> dict[str, object]:
    """compressed-tensors' quantisation config."""
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    scheme |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": inputs if activations else None,
                "weights": scheme,
            }
        },
    }


CONFIGS: dict[str, dict[str, object]] = {
    "ct": ct("pack-quantized", 4, True, False),
    "ct-asymmetric": ct("pack-quantized", 8, False, False),
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    },
    "w4a8": ct("int-quantized", 4, True, True),
    "w8a8": ct("int-quantized", 8, True, True, None),
}


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """Codes along the last dimension in int32 words, the first in the lowest bits."""
    parts = codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


def stored(kind: str, weight: co.QuantizedWeight) -> dict[str, Tensor]:
    codes, scales, bits = weight.codes, weight.scales, weight.bits
    if kind in ("w4a8", "w8a8"):
        return {"weight": (codes.short() - 2 ** (bits - 1)).to(torch.int8), "weight_scale": scales}
    if kind.startswith("ct"):
        parts = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if weight.zeros is not None:
            parts["weight_zero_point"] = words(weight.zeros.t(), bits).t()
    elif kind == "gptq":
        # the middle less one, as the format has it
        zeros = torch.full_like(scales.t(), 7, dtype=torch.uint8)
        order = torch.arange(weight.k, dtype=torch.int32) // GROUP
        parts = {
            "qweight": words(codes).t(),
            "qzeros": words(zeros),
            "scales": scales.t(),
            "g_idx": order,
        }
    else:
        assert weight.zeros is not None
        turned = [
            part.t().unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)
            for part in (codes, weight.zeros)
        ]
        parts = {"qweight": words(turned[0]), "qzeros": words(turned[1]), "scales": scales.t()}
    return {name: part.contiguous() for name, part in parts.items()}


def linears(experts: bool) -> dict[str, tuple[int, int]]:
    if not experts:
        return LINEARS
    attention = {name: shape for name, shape in LINEARS.items() if name.startswith("self_attn")}
    for e in range(EXPERTS):
        attention[f"mlp.experts.{e}.gate_proj"] = (128, HIDDEN)
        attention[f"mlp.experts.{e}.up_proj"] = (128, HIDDEN)
        attention[f"mlp.experts.{e}.down_proj"] = (HIDDEN, 128)
    return attention


def write_models(folder: Path, kind: str, experts: bool = False) -> None:
    """A quantised model, and the same with its weights dequantised."""
    generator = torch.Generator().manual_seed(1)
    common = {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        common[name] = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    quantised, dense = {}, {}
    quantization = CONFIGS[kind]
    if experts:
        quantization = {**quantization, "ignore": ["lm_head", "re:.*mlp[.]gate$"]}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            common[f"{prefix}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            common[f"{prefix}self_attn.{name}.weight"] = torch.ones(32, dtype=torch.bfloat16)
        if experts:
            gate = torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16()
            common[f"{prefix}mlp.gate.weight"] = gate
        for name, (n, k) in linears(experts).items():
            values = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
            form = {
                "bits": 8 if kind in ("w8a8", "ct-asymmetric") else 4,
                "group_size": -1 if kind == "w8a8" else GROUP,
            }
            weight = co.quantize(values, symmetric=kind not in ("awq", "ct-asymmetric"), **form)
            # Scales that are powers of two: the dequantised weight is then exact in bf16.
            scales = (2 ** weight.scales.float().log2().round()).to(
                torch.float32 if kind == "w8a8" else torch.bfloat16
            )
            weight = co.QuantizedWeight(weight.codes, scales, weight.zeros, **form)
            quantised |= {
                f"{prefix}{name}.{part}": tensor for part, tensor in stored(kind, weight).items()
            }
            dense[f"{prefix}{name}.weight"] = co.dequantize(weight, torch.bfloat16)
    for name, tensors, config in (
        ("quantised", quantised, {"quantization_config": quantization}),
        ("dense", dense, {}),
    ):
        (folder / name).mkdir(parents=True)
        save_file(common | tensors, folder / name / "model.safetensors", {"format": "pt"})
        (folder / name / "config.json").write_text(
            json.dumps((MOE_CONFIG if experts else CONFIG) | config)
        )


def write_embedding(folder: Path, source: Path, tied: bool) -> None:
    """A model that was packed in memory with its embedding, tied to the head or alone; and the
    same, dequantised.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    weight = co.quantize(
        torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2)), 8, GROUP
    )
    # Scales that are powers of two: the dequantised weight is then exact in bf16.
    packed = co.reorder(
        co.QuantizedWeight(
            weight.codes, 2 ** weight.scales.log2().round(), bits=8, group_size=GROUP
        )
    )
    if tied:
        co.replace_linears(model, {"lm_head": packed})
        model.model.embed_tokens = co.nn.TiedEmbedding(model.lm_head, torch.bfloat16)
    else:
        co.quantize_model(model, 8, GROUP, skip=("lm_head", "layers"), embeddings=True)
        model.model.embed_tokens = co.nn.MixedEmbedding(packed, torch.bfloat16)
    model.save_pretrained(folder / "directory")
    model.dequantize().save_pretrained(folder / "dense")


def write_mixed(folder: Path, source: Path) -> None:
    """A packed model whose fused layers have parts in different formats, some of them floats; and
    the same, dequantised.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    forms = {
        "q_proj": (4, 64, False),
        "k_proj": (8, 32, True),
        "up_proj": (4, 128, True),
        "o_proj": (4, 32, True),
    }
    packed = {}
    for name, module in model.named_modules():
        if (form := forms.get(name.rpartition(".")[2])) is not None:
            bits, group_size, symmetric = form
            weight = co.quantize(module.weight.data, bits, group_size, symmetric=symmetric)
            # Scales that are powers of two: the dequantised weight is then exact in bf16.
            scales = 2 ** weight.scales.float().log2().round()
            packed[name] = co.reorder(
                co.QuantizedWeight(
                    weight.codes, scales, weight.zeros, bits=bits, group_size=group_size
                )
            )
    co.replace_linears(model, packed)
    model.save_pretrained(folder / "directory")
    model.dequantize().save_pretrained(folder / "dense")


#: Names in a GGUF file, and the types of its matrices.
GGUF_NAMES = {
    "self_attn.q_proj": ("attn_q", "Q4_0"),
    "self_attn.k_proj": ("attn_k", "Q8_0"),
    "self_attn.v_proj": ("attn_v", "Q8_0"),
    "self_attn.o_proj": ("attn_output", "Q4_0"),
    "mlp.gate_proj": ("ffn_gate", "Q4_0"),
    "mlp.up_proj": ("ffn_up", "Q4_0"),
    "mlp.down_proj": ("ffn_down", "Q8_0"),
}


def write_gguf(folder: Path, tied: bool) -> None:
    """A GGUF file that mixes types, its embedding quantised too and perhaps tied to the head; and
    the same, dequantised.
    """
    import gguf

    generator = torch.Generator().manual_seed(3)
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3")
    for add, value in (
        (writer.add_block_count, LAYERS),
        (writer.add_context_length, 256),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, INNER),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_key_length, 32),
        (writer.add_value_length, 32),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 10000.0),
    ):
        add(value)

    def matrix(name: str, kind: str, n: int, k: int) -> None:
        most = 8 if kind == "Q4_0" else 127
        codes = torch.randint(1 - most, most, (n, k), generator=generator)
        # The scales are then powers of two, and the values exact in bf16.
        codes[:, ::32] = most * (2 * torch.randint(2, (n, k // 32), generator=generator) - 1)
        values = codes / (64 if kind == "Q4_0" else 1024)
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(
            f"{name}.weight", gguf.quants.quantize(values.numpy(), number), raw_dtype=number
        )

    def vector(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", torch.ones(size).numpy())

    matrix("token_embd", "Q8_0", VOCABULARY, HIDDEN)
    if not tied:
        matrix("output", "Q8_0", VOCABULARY, HIDDEN)
    vector("output_norm", HIDDEN)
    for i in range(LAYERS):
        for name, size in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q_norm", 32),
            ("attn_k_norm", 32),
        ):
            vector(f"blk.{i}.{name}", size)
        for name, shape in LINEARS.items():
            matrix(f"blk.{i}.{GGUF_NAMES[name][0]}", GGUF_NAMES[name][1], *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model: Any = co.load_model(folder / "model.gguf", dtype=torch.bfloat16, fuse=False)
    model.dequantize().save_pretrained(folder / "dense")


def write_bitsandbytes(folder: Path, dense: Path) -> None:
    """A directory of bitsandbytes, NF4 and LLM.int8, of another's floats; and the
    same, dequantised.
    """
    tensors = load_file(dense / "model.safetensors")
    book = torch.tensor(formats.CODE_BOOKS["nf4"]).bfloat16().float()
    generator = torch.Generator().manual_seed(4)
    for i in range(LAYERS):
        for name, (n, k) in LINEARS.items():
            weight = f"model.layers.{i}.{name}.weight"
            if "mlp" in name:
                tensors[weight] = torch.randint(
                    -127, 128, (n, k), generator=generator, dtype=torch.int8
                )
                tensors[weight.removesuffix("weight") + "SCB"] = torch.full((n,), 127 / 1024)
                continue
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
            tensors[weight] = torch.randint(
                0, 256, (n * k // 2, 1), generator=generator, dtype=torch.uint8
            )
            tensors[f"{weight}.quant_map"] = book.clone()
            tensors[f"{weight}.absmax"] = 2.0 ** -torch.randint(
                2, 4, (n * k // 64,), generator=generator
            )
            tensors[f"{weight}.quant_state.bitsandbytes__nf4"] = torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            )
    (folder / "quantised").mkdir(parents=True)
    save_file(tensors, folder / "quantised" / "model.safetensors", {"format": "pt"})
    quantization = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
    (folder / "quantised" / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": quantization})
    )
    model: Any = co.load_model(folder / "quantised", dtype=torch.bfloat16, fuse=False)
    model.dequantize().save_pretrained(folder / "dense")


def reorder(checkpoint: Path, directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "cutlass_ops",
        "reorder",
        str(checkpoint),
        "-o",
        str(directory),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
