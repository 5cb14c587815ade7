"""Small model directories."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cutlass_ops.files.conversion_plan import Options

LINEARS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (192, 128),
    "mlp.up_proj": (192, 128),
    "mlp.down_proj": (128, 192),
}

CONFIG = {
    "architectures": ["ToyForCausalLM"],  # a class that transformers does not have
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "quantization_config": {},
}


def float_tensors(layers: int = 2, bias: bool = True) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    tensors = {"model.embed_tokens.weight": torch.randn(96, 128, generator=random).half()}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = torch.randn(128, generator=random).half()
        for name, shape in LINEARS.items():
            tensors[f"{prefix}.{name}.weight"] = torch.randn(*shape, generator=random).half()
            if bias and name in ("self_attn.q_proj", "self_attn.o_proj"):
                tensors[f"{prefix}.{name}.bias"] = torch.randn(shape[0], generator=random).half()
    return tensors


def save_model(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A model's directory in two shards, with what usually lies beside them."""
    path.mkdir()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[: len(names) // 2]}
    halves["model-00002-of-00002.safetensors"] = names[len(names) // 2 :]
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, path / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name in (
        "tokenizer.json",
        "generation_config.json",
        "quantize_config.json",
        "pytorch_model.bin",
        ".hidden",
    ):
        (path / name).write_text("{}")
    (path / "original").mkdir()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(tmp_path / "source", float_tensors())


OPTIONS = Options(bits=4, group_size=32, symmetric=False, exclude="layers.1.*up_proj")


def listing(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def flip(path: Path, tensor: str, position: int = 0) -> None:
    """Flip the lowest bit of one byte of a tensor."""
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    begin = json.loads(content[8 : 8 + length])[tensor]["data_offsets"][0]
    content[8 + length + begin + position] ^= 1
    path.write_bytes(content)


Q0, DOWN0 = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
