"""FP8 weights (e4m3): every float, quantised weights against torch's own type, and the
files that hold them.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops import CheckpointError, cli, reference
from cutlass_ops.weights import formats

HALF, BFLOAT, FLOAT, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
#: Every code but the two that are no numbers.
NUMBERS = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
BOOK = torch.tensor(formats.E4M3)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_codes(*shape: int, seed: int = 0) -> Tensor:
    return NUMBERS[
        torch.randint(0, len(NUMBERS), shape, generator=torch.Generator().manual_seed(seed))
    ]


def test_all_codes() -> None:
    floats = NUMBERS.view(E4M3).float()
    assert torch.equal(BOOK[NUMBERS.int()].view(torch.int32), floats.view(torch.int32))  # -0 too
    scales = (2.0**-9, 1.0, 3.0)
    codes = NUMBERS.repeat(3, 1)
    qw = co.QuantizedWeight(codes, torch.tensor(scales)[:, None], bits=8, group_size=-1, book=BOOK)
    want = floats * torch.tensor(scales)[:, None]
    packed = co.reorder(qw)
    assert torch.equal(packed.unpack().codes, codes)
    assert torch.equal(co.dequantize(packed, FLOAT), want)
    for dtype in (HALF, BFLOAT):  # which hold each float
        assert torch.equal(co.dequantize(packed, dtype)[1].float(), floats)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(3, 128, 128), (5, 100, 32), (2, 576, 128), (33, 300, -1)]
)
def test_quantise(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    weight = (randn(n, k) * torch.logspace(-3, 2, n)[:, None]).to(dtype)
    weight[-1] = 0
    qw = co.quantize(weight, bits=8, group_size=group_size, book="e4m3")
    assert (qw.bits, qw.group_size, qw.scales.dtype) == (8, group_size, dtype)
    size = k if group_size == -1 else group_size
    for row, group in ((r, g) for r in range(n) for g in range(-(-k // size))):
        block = weight[row, size * group : size * group + size].double()
        scale = float(qw.scales[row, group])
        if not block.any():
            assert scale == 1
        else:  # the smallest of its type at which the largest weight has a float
            below = torch.nextafter(qw.scales[row, group], torch.zeros((), dtype=dtype)).double()
            assert below * 448 < block.abs().max() * (1 + 2.0**-23)
            assert scale * 448 >= block.abs().max() * (1 - 2.0**-23)
        codes = qw.codes[row, size * group : size * group + size]
        floats = NUMBERS.view(E4M3).double()
        error = ((block / scale)[:, None] - floats).abs().amin(1)
        assert torch.allclose(
            (block / scale - codes.view(E4M3).double()).abs(), error, rtol=0, atol=1e-4
        )
    assert not qw.codes[-1].any()


def test_quantising_what_is_exact_changes_nothing() -> None:
    codes = random_codes(6, 384)
    codes[:, ::128] = 0x7E  # the largest of each group
    scales = 2.0 ** torch.arange(-60.0, -42.0).view(6, 3)
    qw = co.QuantizedWeight(codes, scales, bits=8, group_size=128, book=BOOK)
    again = co.quantize(co.dequantize(qw, FLOAT), bits=8, group_size=128, book="e4m3")
    assert torch.equal(again.scales, scales)
    assert torch.equal(again.codes, codes)


def test_invalid_arguments_are_refused() -> None:
    weight = co.quantize(randn(4, 64), bits=8, group_size=64, book="e4m3")
    with pytest.raises(ValueError, match="bits is 4; 'e4m3' has 256 values"):
        co.quantize(randn(4, 64), group_size=64, book="e4m3")
    with pytest.raises(ValueError, match="bits is 8; a code book has 16 values"):
        co.quantize(randn(4, 64), bits=8, book=torch.zeros(16))
    with pytest.raises(ValueError, match=r"other values than those of e4m3"):
        replace(weight, book=torch.arange(256.0))
    with pytest.raises(ValueError, match="both book and zeros"):
        replace(weight, zeros=torch.zeros(4, 1, dtype=torch.uint8))
    bad = randn(4, 64)
    bad[2, 40] = math.nan
    with pytest.raises(ValueError, match="NaN, inf or a range beyond fp32 in row 2, group 0"):
        co.quantize(bad, bits=8, group_size=-1, book="e4m3")
    for act_quant in ("token", "block"):
        with pytest.raises(ValueError, match=f"act_quant is '{act_quant}'"):
            co.mixed_gemm(randn(4, 64), co.reorder(weight), act_quant=act_quant)
    for code in (0x7F, 0xFF):
        codes = weight.codes.clone()
        codes[3, 7] = code
        with pytest.raises(ValueError, match=rf"codes\[3, 7\] is {code:#x}, the NaN of e4m3"):
            co.reorder(replace(weight, codes=codes))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("group_size", [16, 32, 128, -1])
def test_products_of_a_loaded_packed_file(
    tmp_path: Path, group_size: int, dtype: torch.dtype
) -> None:
    qw = co.quantize(randn(70, 200, seed=3), bits=8, group_size=group_size, book="e4m3")
    co.save_packed(tmp_path / "w.safetensors", {"w": co.reorder(qw)})
    packed = co.load_packed(tmp_path / "w.safetensors")["w"]
    assert isinstance(packed, co.PackedWeight)
    assert torch.equal(packed.unpack().codes, qw.codes)
    x = randn(9, 200, seed=4).to(dtype)
    y = co.mixed_gemm(x, packed, out_dtype=FLOAT)
    want = x.double() @ reference.dequantize_weight(qw, torch.float64).t()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)


def test_packed_files_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    packed = co.reorder(co.quantize(randn(64, 128), bits=8, book="e4m3"))
    packed.codes[5] = 0x7F ^ 0x80  # stored with its sign bit inverted
    co.save_packed(path, {"w": packed})
    done = CliRunner().invoke(cli.app, ["verify", str(path)])
    assert done.exit_code == 1
    assert "the NaN of e4m3" in " ".join(done.output.split())
    assert packed.book is not None
    packed.book[3] = 7.0
    co.save_packed(path, {"w": packed})
    with pytest.raises(CheckpointError, match=r"w\.book.*other values than those of e4m3"):
        co.load_packed(path)
    tensors = load_file(path)
    assert tensors["w.book"].shape == (256,)


def test_plans() -> None:
    packed = co.reorder(co.quantize(randn(64, 256), bits=8, book="e4m3").to("cpu"))
    for m, dtype, device, kernel in (
        (1, HALF, "sm_90", "wgmma_decode_fold16"),
        (16, BFLOAT, "sm_90", "wgmma_decode_fold16"),
        (300, HALF, "sm_90", "wgmma_fold16"),
        (300, HALF, "sm_80", "mma_gemm_a16"),
    ):
        assert co.explain(m, packed, dtype=dtype, device=device).kernel == kernel
    assert (
        co.explain(300, packed, dtype=HALF, out_dtype=FLOAT, device="sm_90").kernel
        == "mma_gemm_a16"
    )
    with pytest.raises(ValueError, match="multiplied by floats"):
        co.explain(1, packed, act_quant="token", device="sm_90")


# ---- files


def write(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def check(path: Path, dialect: str, want: Tensor, tmp_path: Path) -> co.QuantizedWeight:
    checkpoint = co.load_checkpoint(path)
    assert checkpoint.dialect == dialect
    assert list(checkpoint) == ["m"]
    weight, entry = checkpoint["m"], checkpoint.entries["m"]
    assert torch.equal(co.dequantize(weight, FLOAT), want)
    assert torch.equal(entry.values(), want)
    assert entry.quantized is not None
    assert (entry.quantized.bits, entry.quantized.group_size) == (weight.bits, weight.group_size)
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
    assert "e4m3 floats" in done.output
    return weight


def expected(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Value by value, each with the scale of its block."""
    n, k = codes.shape
    floats = codes.view(E4M3).float()
    return torch.stack(
        [floats[i] * scales.float()[i // rows, torch.arange(k) // columns] for i in range(n)]
    )


DEEPSEEK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("n", "k", "block"), [(256, 384, 128), (200, 300, 128), (40, 64, 128), (96, 160, 32)]
)
def test_deepseek(tmp_path: Path, n: int, k: int, block: int, dtype: torch.dtype) -> None:
    codes, scales = random_codes(n, k), 2.0 ** randn(-(-n // block), -(-k // block)).round()
    if dtype != torch.float8_e8m0fnu:
        scales *= 1.25
    tensors = {
        "m.weight": codes.view(E4M3),
        "m.weight_scale_inv": scales.to(dtype),
        "m.bias": randn(n).to(BFLOAT),
        "norm.weight": torch.ones(3),
    }
    path = write(tmp_path / "source", tensors, DEEPSEEK | {"weight_block_size": [block, block]})
    weight = check(path, "fp8", expected(codes, scales, block, block), tmp_path)
    assert torch.equal(weight.codes, codes)
    assert weight.scales.dtype == (BFLOAT if dtype == torch.float8_e8m0fnu else dtype)
    assert weight.bias is not None
    assert list(co.load_checkpoint(path).others) == ["norm.weight"]


@pytest.mark.parametrize("block", [[1 << 40, 128], [24, 128], [1, 1 << 40], [1 << 40, 1 << 40]])
def test_blocks_beyond_the_matrix_end_with_it(tmp_path: Path, block: list[int]) -> None:
    rows, columns = min(block[0], 24), min(block[1], 256)
    codes, scales = random_codes(24, 256), randn(24 // rows, 256 // columns).abs()
    tensors = {"m.weight": codes.view(E4M3), "m.weight_scale_inv": scales}
    path = write(tmp_path / "source", tensors, DEEPSEEK | {"weight_block_size": block})
    check(path, "fp8", expected(codes, scales, rows, columns), tmp_path)


@pytest.mark.parametrize("shape", [(), (1,), (24,), (24, 1)])
def test_one_scale_for_all_or_for_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    codes, scales = random_codes(24, 100), randn(24, 1).abs() if 24 in shape else randn(1, 1).abs()
    tensors = {
        "m.weight": codes.view(E4M3),
        "m.weight_scale": scales.reshape(shape),
        "m.input_scale": torch.ones(1),
    }
    path = write(
        tmp_path / "source", tensors, {"quant_method": "fp8", "activation_scheme": "static"}
    )
    weight = check(path, "fp8", expected(codes, scales, 1 if 24 in shape else 24, 100), tmp_path)
    assert weight.group_size == -1
    assert (
        co.load_checkpoint(path).metadata["static activations"]
        == "input_scale of 1 modules is not used"
    )


def fp8(**extra: Tensor | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {
        "weight": random_codes(8, 256).view(E4M3),
        "weight_scale_inv": torch.ones(1, 2),
    }
    return {f"m.{name}": value for name, value in {**tensors, **extra}.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "config", "match"),
    [
        (fp8(weight_scale_inv=None), {}, "no weight_scale_inv or weight_scale"),
        (fp8(weight_scale=torch.ones(1)), {}, "two kinds of scales"),
        (fp8(weight_scale_inv=torch.ones(2, 2)), {}, r"float16 or .*|\[1, 2\] is expected"),
        (fp8(weight_scale_inv=torch.ones(1, 2, dtype=torch.int32)), {}, "is expected"),
        (fp8(weight_scale_inv=torch.tensor([[1.0, math.nan]])), {}, r"scales\[0, 1\] is nan"),
        (fp8(weight_scale_inv=None, weight_scale=torch.ones(7)), {}, r"is \[7\]; one scale, or 8"),
        (
            fp8(weight=torch.full((8, 256), 0x7F, dtype=torch.uint8).view(E4M3)),
            {},
            r"codes\[0, 0\] is 0x7f, the NaN",
        ),
        (fp8(weight=random_codes(2, 8, 256).view(E4M3)), {}, r"is \[2, 8, 256\]"),
        (fp8(weight=torch.ones(8, 256)), {}, "weight_scale_inv.*belongs to no quantised weight"),
        (
            fp8(gate_up_proj=random_codes(2, 8, 256).view(E4M3)),
            {},
            "stacked experts are not supported",
        ),
        (fp8(), {"weight_block_size": None}, "weight_block_size is None"),
        (fp8(), {"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        (
            fp8(weight_scale_inv=torch.ones(1, 11)),
            {"weight_block_size": [128, 24]},
            "has groups of 24",
        ),
        (fp8(), {"fmt": "e5m2"}, "fmt is 'e5m2'"),
    ],
)
def test_fp8_files_that_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], match: str
) -> None:
    path = write(tmp_path, tensors, DEEPSEEK | config)
    with pytest.raises(CheckpointError, match=match):
        co.load_checkpoint(path)["m"]


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    described = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    } | weights
    group = {
        "targets": ["Linear"],
        "weights": described,
        "input_activations": {**described, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


@pytest.mark.parametrize(
    ("strategy", "shape", "rows", "columns", "extra"),
    [
        ("channel", (200, 1), 1, 320, {}),
        ("tensor", (1,), 200, 320, {}),
        ("group", (200, 5), 1, 64, {"group_size": 64}),
        ("block", (2, 3), 128, 128, {"block_structure": [128, 128]}),
    ],
)
@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT])
def test_compressed_tensors(
    tmp_path: Path,
    strategy: str,
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    extra: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    codes, scales = random_codes(200, 320), randn(*shape).abs().to(dtype)
    tensors = {"m.weight": codes.view(E4M3), "m.weight_scale": scales}
    path = write(tmp_path / "source", tensors, compressed(strategy, **extra))
    want = expected(codes, scales.view(-1, 1) if scales.dim() == 1 else scales, rows, columns)
    weight = check(path, "compressed-tensors", want, tmp_path)
    assert torch.equal(weight.codes, codes)
    assert co.load_checkpoint(path).activations is None  # of 8-bit floats


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"m.weight_zero_point": torch.zeros(8, 1, dtype=torch.int8)}, "which have none"),
        ({"m.weight_scale": torch.ones(7, 1)}, r"\[N, G\] or \[1\] is expected"),
        ({"m.weight_scale": None}, "is missing"),
        (
            {"m.weight": torch.full((8, 64), 0xFF, dtype=torch.uint8).view(E4M3)},
            r"codes\[0, 0\] is 0xff, the NaN",
        ),
    ],
)
def test_compressed_tensors_that_are_refused(
    tmp_path: Path, extra: dict[str, Tensor | None], match: str
) -> None:
    held: dict[str, Tensor | None] = {
        "m.weight": random_codes(8, 64).view(E4M3),
        "m.weight_scale": torch.ones(8, 1),
    }
    tensors = {name: value for name, value in {**held, **extra}.items() if value is not None}
    with pytest.raises(CheckpointError, match=match):
        co.load_checkpoint(write(tmp_path, tensors, compressed("channel")))["m"]
