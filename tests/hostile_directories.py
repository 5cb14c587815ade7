"""Small directories of quantised weights, and what readers may do with damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_cases import JSON
from hypothesis import strategies as st
from llm_checkpoints import (
    AWQ_CONFIG,
    awq,
    ct_config,
    ct_weights,
    gptq,
    gptq_config,
    randint,
    randn,
    words,
)
from safetensors.torch import save as to_safetensors
from torch import Tensor

from cutlass_ops import CheckpointError, QuantizedWeight, load_checkpoint
from cutlass_ops.checkpoints import _DIALECTS
from cutlass_ops.reference import dequantize_weight

Model = tuple[dict[str, Tensor], dict[str, Any]]


def models() -> dict[str, Model]:
    """An undamaged model in each dialect: module ``m`` in groups of 32 with a bias, and a norm."""
    n, k = 8, 64
    codes, zeros, scales = randint(16, n, k), randint(14, n, 2, seed=2), randn(n, 2).half()
    other = {"m.bias": randn(n), "norm.weight": torch.ones(2)}
    order = torch.arange(k)[torch.randperm(k, generator=torch.Generator().manual_seed(3))] // 32
    override = {"dynamic": {"m": {"bits": 4, "group_size": 32}}}
    packed = {
        "m.weight_packed": words(codes, 4),
        "m.weight_shape": torch.tensor([n, k]),
        "m.weight_scale": scales,
    }
    gemv = {
        "m.qweight": words(codes, 4),
        "m.qzeros": torch.zeros(n, 4, dtype=torch.int32),
        "m.scales": torch.ones(n, 32).half(),
    }
    eight = {"m.weight": randint(256, n, k).sub(128).to(torch.int8), "m.weight_scale": randn(n, 1)}
    weights = ct_weights(num_bits=8, strategy="channel", group_size=None)
    found: dict[str, Model] = {
        "awq gemm": (awq(codes, zeros, scales), AWQ_CONFIG),
        "awq gemv": (gemv, AWQ_CONFIG | {"version": "gemv"}),
        "gptq": (gptq(codes, torch.full((n, 2), 8), scales, 4, 1), gptq_config()),
        "gptq act order": (
            gptq(codes, zeros, scales, 4, 2) | {"m.g_idx": order.int()},
            gptq_config(sym=False, desc_act=True, checkpoint_format="gptq_v2") | override,
        ),
        "ct packed": (
            packed
            | {"m.weight_zero_point": words(zeros.t(), 4).t(), "m.weight_g_idx": order.int()},
            ct_config({"weights": ct_weights(symmetric=False)}),
        ),
        "ct int": (
            eight
            | {
                "m.weight_zero_point": torch.zeros(n, 1, dtype=torch.int8),
                "m.input_scale": torch.ones(1),
            },
            ct_config(
                {"targets": ["re:.*n$"], "weights": ct_weights()},
                {"targets": ["re:m+"], "weights": weights},
            ),
        ),
    }
    return {
        name: ({key: t.contiguous() for key, t in (held | other).items()}, config)
        for name, (held, config) in found.items()
    }


MODELS = models()

FILES = {name: to_safetensors(tensors) for name, (tensors, _) in MODELS.items()}


def write(folder: Path, content: bytes | dict[str, Tensor], config: object) -> Path:
    if not isinstance(content, bytes):
        content = to_safetensors({name: tensor.contiguous() for name, tensor in content.items()})
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(
        config if isinstance(config, str) else json.dumps({"quantization_config": config})
    )
    return folder


def equal(weight: QuantizedWeight, values: Tensor) -> bool:
    return torch.equal(dequantize_weight(weight, torch.float32).nan_to_num(), values.nan_to_num())


def read_all(path: Path, agree: Callable[[QuantizedWeight, Tensor], bool] = equal) -> int:
    """Read every tensor in every way; both ways to the values of a weight must agree. How many
    quantised weights there were.
    """
    checkpoint = load_checkpoint(path)
    for name, entry in checkpoint.entries.items():
        if entry.problem:
            with pytest.raises(CheckpointError):
                _ = checkpoint[name]
            continue
        values = entry.values()
        assert tuple(values.shape) == entry.shape
        assert values.dtype == entry.dtype
        if entry.quantized is not None:
            weight = checkpoint[name]
            assert weight.shape == entry.shape
            assert (weight.bits, weight.group_size) == (
                entry.quantized.bits,
                entry.quantized.group_size,
            )
            parts = {
                part: getattr(weight, part)
                for part in ("scales", "zeros", "offsets", "bias", "perm", "book")
            }
            assert {
                part: t.dtype for part, t in parts.items() if t is not None
            } == entry.quantized.dtypes
            assert agree(weight, values)
    return len(checkpoint)


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(inner for key, item in items for inner in paths(item, (*path, key)))]


VALUES = st.one_of(
    JSON,
    st.integers(-2, 300),
    st.sampled_from(
        [
            0,
            1,
            2,
            3,
            8,
            16,
            48,
            64,
            128,
            -1,
            1 << 31,
            1 << 64,
            10**400,
            0.5,
            "",
            "4",
            "re:m",
            "re:(m+)+$",
            "re:[",
            True,
            None,
        ]
    ),
    st.sampled_from([*_DIALECTS, "gptq_v2", "gemm", "gemv"]),
)
