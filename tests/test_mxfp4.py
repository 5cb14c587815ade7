"""MXFP4: values by the table of the standard, and the files that transformers writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops import CheckpointError, cli
from cutlass_ops.weights import formats

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


def e2m1(code: int) -> float:
    """Section 5.3.3 of OCP's Microscaling Formats: a sign, 2 bits of exponent of bias 1, 1
    bit of mantissa.
    """
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return math.copysign(value, -1.0 if sign else 1.0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


def test_all_codes() -> None:
    # -0.0 is not 0.0
    assert [str(value) for value in formats.E2M1] == [str(e2m1(code)) for code in range(16)]
    scales = (2.0**-127, 1.0, 2.0**125)
    qw = co.QuantizedWeight(
        torch.arange(16, dtype=torch.uint8).repeat(3, 2),
        torch.tensor(scales)[:, None].to(BFLOAT),
        group_size=32,
        book=torch.tensor(formats.E2M1),
    )
    want = torch.tensor(
        [[s * e2m1(code) for code in range(16)] * 2 for s in scales], dtype=torch.float64
    )
    assert torch.equal(co.dequantize(qw, FLOAT).double(), want)
    packed = co.reorder(qw)
    assert torch.equal(co.dequantize(packed, FLOAT).double(), want)
    for dtype in (HALF, BFLOAT):  # which hold each value
        assert torch.equal(co.dequantize(packed, dtype)[1].double(), want[1])


# ---- files


def write(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def values(codes: Tensor, exponents: Tensor) -> Tensor:
    """Value by value: ``[N, K]`` codes and ``[N, K / 32]`` biased exponents."""
    n, k = codes.shape
    rows = [
        [math.ldexp(e2m1(int(codes[i, j])), int(exponents[i, j // 32]) - 127) for j in range(k)]
        for i in range(n)
    ]
    return torch.tensor(rows)


def pairs(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def check(path: Path, dialect: str, want: Tensor, tmp_path: Path) -> co.QuantizedWeight:
    checkpoint = co.load_checkpoint(path)
    assert checkpoint.dialect == dialect
    assert list(checkpoint) == ["m"]
    weight, entry = checkpoint["m"], checkpoint.entries["m"]
    assert torch.equal(co.dequantize(weight, FLOAT), want)
    assert torch.equal(entry.values(), want)
    assert entry.quantized is not None
    parts = ("scales", "zeros", "bias", "perm", "book")
    assert dict(entry.quantized.dtypes) == {
        p: getattr(weight, p).dtype for p in parts if getattr(weight, p) is not None
    }
    out = tmp_path / "packed.safetensors"
    for arguments in (
        ["reorder", path, "-o", out],
        ["verify", out],
        ["verify", out, "--against", path],
        ["inspect", out],
    ):
        done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
    assert "code book" in done.output
    return weight


@pytest.mark.parametrize(("n", "k"), [(5, 32), (40, 96), (64, 320)])
def test_transformers_mxfp4(tmp_path: Path, n: int, k: int) -> None:
    codes, exponents = randint(16, n, k), randint(10, n, k // 32, seed=1) + 115
    exponents[0, 0], exponents[-1, -1] = 0, 250
    tensors = {
        "m_blocks": pairs(codes).view(n, k // 32, 16),
        "m_scales": exponents,
        "norm.weight": torch.ones(3),
    }
    path = write(
        tmp_path / "source",
        tensors,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )
    weight = check(path, "mxfp4", values(codes, exponents), tmp_path)
    assert torch.equal(weight.codes, codes)
    assert weight.scales.dtype == BFLOAT


def test_the_weight_of_a_linear_layer(tmp_path: Path) -> None:
    """Its blocks are named after the parameter, and the module is what is packed, with its bias."""
    codes, exponents, bias = randint(16, 40, 96), randint(10, 40, 3, seed=1) + 115, randn(40)
    tensors = {
        "m.weight_blocks": pairs(codes).view(40, 3, 16),
        "m.weight_scales": exponents,
        "m.bias": bias,
    }
    path = write(tmp_path / "source", tensors, {"quant_method": "mxfp4"})
    weight = check(path, "mxfp4", values(codes, exponents), tmp_path)
    assert weight.bias is not None
    assert torch.equal(weight.bias, bias)
    assert list(co.load_packed(tmp_path / "packed.safetensors")) == ["m"]


@pytest.mark.parametrize("biases", [True, False])
def test_stacked_experts_of_no_model_are_given_as_values(tmp_path: Path, biases: bool) -> None:
    name = "mlp.experts.down_proj"
    codes, exponents = randint(16, 3 * 8, 64), randint(252, 3 * 8, 2, seed=1)
    exponents[0] = 0
    tensors = {
        f"{name}_blocks": pairs(codes).view(3, 8, 2, 16),
        f"{name}_scales": exponents.view(3, 8, 2),
    }
    tensors |= {f"{name}_bias": randn(3, 8)} if biases else {}
    checkpoint = co.load_checkpoint(write(tmp_path, tensors, {"quant_method": "mxfp4"}))
    entry = checkpoint.entries[name]
    assert list(checkpoint) == []
    assert (entry.shape, entry.dtype) == ((3, 64, 8), BFLOAT)
    assert torch.equal(
        entry.values().float(), values(codes, exponents).view(3, 8, 64).transpose(1, 2)
    )
    inspected = CliRunner().invoke(cli.app, ["inspect", str(tmp_path)])
    assert "it stacks experts, which are packed in models whose experts" in " ".join(
        inspected.output.split()
    )
    done = CliRunner().invoke(
        cli.app, ["reorder", str(tmp_path), "-o", str(tmp_path / "out.safetensors")]
    )
    assert done.exit_code == 2
    assert "it stacks experts, which are packed in models whose experts" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize("exponent", [254, 255])
def test_stacked_experts_beyond_bf16_are_refused(tmp_path: Path, exponent: int) -> None:
    tensors = {
        "m_blocks": randint(255, 2, 4, 1, 16) | 7,
        "m_scales": torch.full((2, 4, 1), exponent, dtype=torch.uint8),
    }
    entry = co.load_checkpoint(write(tmp_path, tensors, {"quant_method": "mxfp4"})).entries["m"]
    with pytest.raises(
        CheckpointError,
        match="'m_scales': holds scales of expert 0 that are no numbers, or too large",
    ):
        entry.values()


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"m_blocks": randint(9, 4, 2, 16)}, "'m_scales': is missing"),
        ({"m_blocks": randint(9, 4, 2, 8), "m_scales": randint(9, 4, 2)}, r"is \[4, 2, 8\]"),
        ({"m_blocks": randint(9, 4, 32), "m_scales": randint(9, 4, 2)}, r"is \[4, 32\]"),
        (
            {"m_blocks": randint(9, 4, 2, 16), "m_scales": randint(9, 4, 3)},
            r"uint8 \[4, 2\] is expected",
        ),
        ({"m_blocks": randn(4, 2, 16), "m_scales": randint(9, 4, 2)}, "uint8 is expected"),
        (
            {"m_blocks": randint(9, 4, 2, 16), "m_scales": randint(1, 4, 2) + 255},
            r"scales\[0, 0\] is nan",
        ),
        (
            {"m_blocks": randint(9, 4, 2, 16), "m_scales": randint(9, 4, 2), "m_bias": randn(4)},
            "is a matrix with biases",
        ),
    ],
)
def test_mxfp4_files_that_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], match: str
) -> None:
    path = write(tmp_path, tensors, {"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=match):
        co.load_checkpoint(path)["m"]
