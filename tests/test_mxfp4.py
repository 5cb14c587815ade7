"""MXFP4: values by the table of the standard, quantised weights by a plain loop, and the files that hold it."""

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
from cutlass_ops import CheckpointError, cli, formats, reference

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


def e2m1(code: int) -> float:
    """Section 5.3.3 of OCP's Microscaling Formats: a sign, 2 bits of exponent of bias 1, 1 bit of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return math.copysign(value, -1.0 if sign else 1.0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_all_codes() -> None:
    assert [str(value) for value in formats.E2M1] == [str(e2m1(code)) for code in range(16)]  # -0.0 is not 0.0
    scales = (2.0**-127, 1.0, 2.0**125)
    qw = co.QuantizedWeight(
        torch.arange(16, dtype=torch.uint8).repeat(3, 2),
        torch.tensor(scales)[:, None].to(BFLOAT),
        group_size=32,
        book=torch.tensor(formats.E2M1),
    )
    want = torch.tensor([[s * e2m1(code) for code in range(16)] * 2 for s in scales], dtype=torch.float64)
    assert torch.equal(co.dequantize(qw, FLOAT).double(), want)
    packed = co.reorder(qw)
    assert torch.equal(co.dequantize(packed, FLOAT).double(), want)
    for dtype in (HALF, BFLOAT):  # which hold each value
        assert torch.equal(co.dequantize(packed, dtype)[1].double(), want[1])


def nearest(value: float) -> int:
    """The code of a magnitude, by a loop over the table: the nearest, of two the even one."""
    return min(range(8), key=lambda code: (abs(e2m1(code) - value), code % 2))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize(("n", "k"), [(3, 32), (5, 100), (2, 576)])
def test_quantise(n: int, k: int, dtype: torch.dtype) -> None:
    weight = (randn(n, k) * torch.logspace(-3, 3, n)[:, None]).to(dtype)
    weight[0, :32] = 0.0
    weight[0, :9] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -7.5, -0.125]).to(dtype) * 2**-6
    qw = co.quantize(weight, group_size=32, book="mxfp4")
    assert (qw.bits, qw.group_size, qw.scales.dtype) == (4, 32, BFLOAT)
    assert qw.book is not None
    assert qw.book.tolist() == list(formats.E2M1)
    assert qw.codes[0, :9].tolist() == [0, 2, 2, 4, 4, 6, 6, 15, 8]
    for row, group in ((r, g) for r in range(n) for g in range(-(-k // 32))):
        block = weight[row, 32 * group : 32 * group + 32].double()
        scale = 2.0 ** (math.floor(math.log2(float(block.abs().max()))) - 2)
        assert float(qw.scales[row, group]) == scale
        want = [nearest(abs(v) / scale) + 8 * (v < 0) for v in block.tolist()]
        assert qw.codes[row, 32 * group : 32 * group + 32].tolist() == want


def test_quantising_what_is_exact_changes_nothing_and_zeros_stay() -> None:
    codes = randint(16, 6, 96)
    codes[:, ::32] = 7  # the largest of each group
    scales = (2.0 ** torch.arange(-60.0, -42.0).view(6, 3)).to(BFLOAT)
    qw = co.QuantizedWeight(codes, scales, group_size=32, book=torch.tensor(formats.E2M1))
    again = co.quantize(co.dequantize(qw, FLOAT), group_size=32, book="mxfp4")
    assert torch.equal(again.scales, scales)
    assert torch.equal(again.codes, torch.where(codes == 8, 0, codes))  # -0 is not below zero
    empty = co.quantize(torch.zeros(2, 40), group_size=32, book="mxfp4")
    assert not empty.codes.any()
    assert (empty.scales == 1).all()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size is 128; 'mxfp4' has groups of 32"):
        co.quantize(randn(4, 64), book="mxfp4")
    with pytest.raises(ValueError, match="bits is 8; a code book has values for 4"):
        co.quantize(randn(4, 64), bits=8, group_size=32, book="mxfp4")
    bad = randn(4, 64)
    bad[2, 40] = math.inf
    with pytest.raises(ValueError, match="NaN, inf or a range beyond fp32 in row 2, group 1"):
        co.quantize(bad, group_size=32, book="mxfp4")
    packed = co.reorder(co.quantize(randn(4, 64), group_size=32, book="mxfp4"))
    with pytest.raises(ValueError, match="act_quant is 'token'"):
        co.mixed_gemm(randn(4, 64), packed, act_quant="token")


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
def test_products_and_packed_files(tmp_path: Path, dtype: torch.dtype) -> None:
    qw = co.quantize(randn(70, 200, seed=3), group_size=32, book="mxfp4")
    co.save_packed(tmp_path / "w.safetensors", {"w": co.reorder(qw)})
    packed = co.load_packed(tmp_path / "w.safetensors")["w"]
    assert isinstance(packed, co.PackedWeight)
    assert torch.equal(packed.unpack().codes, qw.codes)
    x = randn(9, 200, seed=4).to(dtype)
    y = co.mixed_gemm(x, packed, out_dtype=FLOAT)
    want = x.double() @ reference.dequantize_weight(qw, torch.float64).t()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)


# ---- files


def write(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def values(codes: Tensor, exponents: Tensor) -> Tensor:
    """Value by value: ``[N, K]`` codes and ``[N, K / 32]`` biased exponents."""
    n, k = codes.shape
    rows = [[math.ldexp(e2m1(int(codes[i, j])), int(exponents[i, j // 32]) - 127) for j in range(k)] for i in range(n)]
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
    assert dict(entry.quantized.dtypes) == {p: getattr(weight, p).dtype for p in parts if getattr(weight, p) is not None}
    out = tmp_path / "packed.safetensors"
    for arguments in (["reorder", path, "-o", out], ["verify", out], ["verify", out, "--against", path], ["inspect", out]):
        done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
    assert "code book" in done.output
    return weight


@pytest.mark.parametrize(("n", "k"), [(5, 32), (40, 96), (64, 320)])
def test_transformers_mxfp4(tmp_path: Path, n: int, k: int) -> None:
    codes, exponents = randint(16, n, k), randint(10, n, k // 32, seed=1) + 115
    exponents[0, 0], exponents[-1, -1] = 0, 250
    tensors = {"m_blocks": pairs(codes).view(n, k // 32, 16), "m_scales": exponents, "norm.weight": torch.ones(3)}
    path = write(tmp_path / "source", tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    weight = check(path, "mxfp4", values(codes, exponents), tmp_path)
    assert torch.equal(weight.codes, codes)
    assert weight.scales.dtype == BFLOAT


@pytest.mark.parametrize("biases", [True, False])
def test_stacked_experts_are_named_and_refused(tmp_path: Path, biases: bool) -> None:
    name = "mlp.experts.down_proj"
    tensors = {f"{name}_blocks": randint(255, 4, 64, 2, 16), f"{name}_scales": randint(200, 4, 64, 2)}
    match = "stack of 4 experts; matrices"
    if biases:
        tensors[f"{name}_bias"] = randn(4, 64)
        match = r"stack of 4 experts with biases \(mlp.experts.down_proj_bias\)"
    checkpoint = co.load_checkpoint(write(tmp_path, tensors, {"quant_method": "mxfp4"}))
    assert list(checkpoint) == []
    assert checkpoint.entries[name].shape == (4, 64, 64)
    for read in (lambda: checkpoint[name], checkpoint.entries[name].values):
        with pytest.raises(CheckpointError, match=match):
            read()
    done = CliRunner().invoke(cli.app, ["reorder", str(tmp_path), "-o", str(tmp_path / "out.safetensors")])
    assert done.exit_code == 2
    assert "stack of 4 experts" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"m_blocks": randint(9, 4, 2, 16)}, "'m_scales': is missing"),
        ({"m_blocks": randint(9, 4, 2, 8), "m_scales": randint(9, 4, 2)}, r"is \[4, 2, 8\]"),
        ({"m_blocks": randint(9, 4, 32), "m_scales": randint(9, 4, 2)}, r"is \[4, 32\]"),
        ({"m_blocks": randint(9, 4, 2, 16), "m_scales": randint(9, 4, 3)}, r"uint8 \[4, 2\] is expected"),
        ({"m_blocks": randn(4, 2, 16), "m_scales": randint(9, 4, 2)}, "uint8 is expected"),
        ({"m_blocks": randint(9, 4, 2, 16), "m_scales": randint(1, 4, 2) + 255}, r"scales\[0, 0\] is nan"),
        ({"m_blocks": randint(9, 4, 2, 16), "m_scales": randint(9, 4, 2), "m_bias": randn(4)}, "is a matrix with biases"),
    ],
)
def test_mxfp4_files_that_are_refused(tmp_path: Path, tensors: dict[str, Tensor], match: str) -> None:
    path = write(tmp_path, tensors, {"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=match):
        co.load_checkpoint(path)["m"]


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}


@pytest.mark.parametrize(("n", "k"), [(5, 32), (40, 96), (7, 50)])
def test_compressed_tensors(tmp_path: Path, n: int, k: int) -> None:
    codes, exponents = randint(16, n, k), randint(10, n, -(-k // 32), seed=1) + 115
    tensors = {"m.weight_packed": pairs(codes), "m.weight_scale": exponents, "m.bias": randn(n).to(BFLOAT)}
    weight = check(write(tmp_path / "source", tensors, COMPRESSED), "compressed-tensors", values(codes, exponents), tmp_path)
    assert torch.equal(weight.codes, codes)
    assert weight.bias is not None


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"m.weight_scale": randint(9, 4, 3)}, r"uint8 \[4, 2\] is expected"),
        ({"m.weight_scale": randn(4, 4).to(torch.float8_e4m3fn)}, "not those of mxfp4"),
        ({"m.weight_global_scale": randn(1)}, "not those of mxfp4"),
        ({"m.weight_zero_point": torch.zeros(4, 2, dtype=torch.int8)}, "which have none"),
        ({"m.weight_scale": randint(1, 4, 2) + 255}, r"scales\[0, 0\] is nan"),
    ],
)
def test_compressed_tensors_that_are_refused(tmp_path: Path, extra: dict[str, Tensor], match: str) -> None:
    tensors = {"m.weight_packed": randint(255, 4, 32), "m.weight_scale": randint(9, 4, 2) + 120} | extra
    path = write(tmp_path, tensors, COMPRESSED)
    with pytest.raises(CheckpointError, match=match):
        co.load_checkpoint(path)["m"]
