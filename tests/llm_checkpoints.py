"""Tensors and configurations of AWQ, GPTQ and compressed-tensors directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cutlass_ops import QuantizedWeight
from cutlass_ops.checkpoints import Checkpoint
from cutlass_ops.reference import dequantize_weight
from cutlass_ops.weights.reorder import reorder

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Integers ``[R, C]`` to int32 words along the last axis, each row one long run of bits."""
    rows, columns = codes.shape
    count = -(-columns * bits // 32)
    places = (
        range(columns)
        if order is None
        else [column // 8 * 8 + order[column % 8] for column in range(columns)]
    )
    runs = [
        sum(row[place] << (bits * i) for i, place in enumerate(places)) for row in codes.tolist()
    ]
    out = [[run >> (32 * word) & 0xFFFFFFFF for word in range(count)] for run in runs]
    return torch.tensor(out, dtype=torch.int64).view(rows, count).to(torch.int32)


def save(
    folder: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any] | None,
    name: str = "config.json",
) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    if config is not None:
        (folder / name).write_text(
            json.dumps({"quantization_config": config} if name == "config.json" else config)
        )
    return folder


def expected(codes: Tensor, scales: Tensor, zeros: Tensor | int, group: Tensor | int) -> Tensor:
    """Value by value: ``[N, K]`` codes, ``[N, G]`` scales and zero points, the group of each
    k or their size.
    """
    index = torch.arange(codes.shape[1]) // group if isinstance(group, int) else group
    z = zeros[:, index] if isinstance(zeros, Tensor) else zeros
    return (codes - z).float() * scales.float()[:, index]


def check(checkpoint: Checkpoint, name: str, values: Tensor) -> QuantizedWeight:
    """The weight, whose values are these bit for bit, by the reference and by the entry, and which
    is as announced.
    """
    weight, entry = checkpoint[name], checkpoint.entries[name]
    assert torch.equal(dequantize_weight(weight, torch.float32), values)
    assert torch.equal(entry.values(), values)
    assert entry.shape == weight.shape == tuple(values.shape)
    assert entry.quantized is not None
    assert (entry.quantized.bits, entry.quantized.group_size) == (weight.bits, weight.group_size)
    parts = ("scales", "zeros", "offsets", "bias", "perm", "book")
    assert dict(entry.quantized.dtypes) == {
        p: getattr(weight, p).dtype for p in parts if getattr(weight, p) is not None
    }
    unpacked = reorder(weight).unpack()
    assert torch.equal(unpacked.codes, weight.codes)
    assert torch.equal(unpacked.scales, weight.scales)
    return weight


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {
        "m.qweight": words(codes.t(), 4, AWQ),
        "m.qzeros": words(zeros.t(), 4, AWQ),
        "m.scales": scales.t(),
        "norm.weight": torch.ones(3),
    }


AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
}


def gptq_zeros(zeros: Tensor, bits: int, version: int) -> Tensor:
    """Zero points ``[N, G]`` as GPTQModel stores them: version 1 is one less in each code,
    subtracted from the word.
    """
    if bits == 3:
        return words((zeros.t() - (2 - version)) % 8, 3)
    packed = words(zeros.t(), bits).long()
    ones = sum(1 << bit for bit in range(0, 32, bits))
    return (packed - ones if version == 1 else packed).to(torch.int32)


def gptq(
    codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, version: int
) -> dict[str, Tensor]:
    return {
        "m.qweight": words(codes, bits).t(),
        "m.qzeros": gptq_zeros(zeros, bits, version),
        "m.scales": scales.t(),
    }


def gptq_config(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    return config | {"checkpoint_format": "gptq"} | changes


def carried(folder: Path, word: int, **config: Any) -> Path:
    tensors = {
        "m.qweight": words(randint(16, 8, 32), 4).t(),
        "m.qzeros": torch.tensor([[word]], dtype=torch.int64).to(torch.int32),
        "m.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    return save(folder, tensors, gptq_config(sym=False, **config))


def ct_weights(**changes: Any) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    } | changes


def ct_config(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
    }
    config["config_groups"] = {
        f"group_{i}": {"targets": ["Linear"]} | group for i, group in enumerate(groups)
    }
    return config | changes
