"""Weights of convolutions: quantised, packed, saved, loaded, inspected, and back."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops.checkpoints.safetensors_files import read_header
from cutlass_ops.cli import app
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.weights import formats
from cutlass_ops.weights.weight import PARTS

SHAPES = [(5, 40, 3), (70, 130, 3, 2), (64, 128, 1, 1), (3, 300, 2, 1, 3), (8, 1, 3, 3)]


def values_by_tap(weight: torch.Tensor, **options: Any) -> torch.Tensor:
    """Each tap quantised as a separate matrix."""
    flat = weight.flatten(2)
    taps = [
        co.dequantize(co.quantize(flat[:, :, tap].contiguous(), **options), torch.float32)
        for tap in range(flat.shape[2])
    ]
    return torch.stack(taps, 2).view(weight.shape)


def assert_same(a: co.QuantizedWeight, b: co.QuantizedWeight) -> None:
    assert (a.bits, a.group_size, a.kernel_size) == (b.bits, b.group_size, b.kernel_size)
    for part in PARTS:
        x, y = getattr(a, part), getattr(b, part)
        assert (x is None) == (y is None)
        assert x is None or (x.dtype == y.dtype and torch.equal(x, y))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2, "group_size": 64, "symmetric": False},
        {"bits": 4, "group_size": 32},
        {"bits": 4, "group_size": 64, "symmetric": False},
        {"bits": 8, "group_size": 128},
        {"bits": 8, "group_size": 256, "symmetric": False},
        {"bits": 4, "group_size": 64, "book": "nf4"},
        {"bits": 4, "group_size": 32, "book": "mxfp4"},
        {"bits": 8, "group_size": 128, "book": "e4m3"},
    ],
    ids=str,
)
def test_each_tap_is_quantised_separately(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    weight = torch.randn(shape)
    quantized = co.quantize(weight, **options)
    assert quantized.kernel_size == shape[2:]
    assert torch.equal(co.dequantize(quantized, torch.float32), values_by_tap(weight, **options))
    packed = co.reorder(quantized)
    assert_same(packed.unpack(), quantized)
    assert torch.equal(
        co.dequantize(packed, torch.float32), co.dequantize(quantized, torch.float32)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_group_is_the_whole_row(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    quantized = co.quantize(weight, bits=8, group_size=-1)
    assert quantized.scales.shape == (shape[0], 1)
    assert torch.equal(
        co.dequantize(quantized, torch.float32).flatten(1),
        co.dequantize(co.quantize(weight.flatten(1), bits=8, group_size=-1), torch.float32),
    )
    assert_same(co.reorder(quantized).unpack(), quantized)


def test_a_tile_of_k_has_one_tap() -> None:
    """The packed codes are those of a matrix whose taps are padded with codes of value zero."""
    quantized = co.quantize(torch.randn(20, 130, 3, 3), bits=4, group_size=64)
    by_tap = torch.full((20, 9, 256), formats.midpoint(4), dtype=torch.uint8)
    by_tap[:, :, :130] = quantized.codes.view(20, 9, 130)
    scales = torch.zeros(20, 9, 4)
    scales[:, :, :3] = quantized.scales.view(20, 9, 3)
    matrix = co.QuantizedWeight(by_tap.flatten(1), scales.flatten(1), bits=4, group_size=64)
    packed, expected = co.reorder(quantized), co.reorder(matrix)
    assert torch.equal(packed.codes, expected.codes)
    assert torch.equal(packed.scales, expected.scales)
    assert_same(packed.matrix.unpack(), matrix)


@pytest.mark.parametrize("group_size", [16, 32, 128, 256, 384, 512, -1])
@pytest.mark.parametrize("channels", [100, 128, 300, 600])
def test_the_matrix_has_the_values_of_the_convolution(channels: int, group_size: int) -> None:
    packed = co.reorder(
        co.quantize(torch.randn(6, channels, 3), bits=8, group_size=group_size, symmetric=False)
    )
    matrix = (
        co.dequantize(packed.matrix, torch.float32).view(6, 3, -1)[:, :, :channels].movedim(2, 1)
    )
    assert torch.equal(matrix, co.dequantize(packed, torch.float32))
    assert packed.matrix.codes.data_ptr() == packed.codes.data_ptr()


@pytest.mark.parametrize("part", ["zeros", "offsets", None])
def test_files_keep_every_bit(tmp_path: Path, part: str | None) -> None:
    quantized = co.quantize(
        torch.randn(33, 70, 3, 3), bits=4, group_size=32, symmetric=part != "zeros"
    )
    if part == "offsets":
        offsets = torch.randn_like(quantized.scales)
        quantized = co.QuantizedWeight(
            quantized.codes,
            quantized.scales,
            offsets=offsets,
            group_size=32,
            bias=torch.randn(33),
            kernel_size=(3, 3),
        )
    linear = co.reorder(co.quantize(torch.randn(5, 64)))
    co.save_packed(tmp_path / "w.safetensors", {"conv": co.reorder(quantized), "linear": linear})
    loaded = co.load_packed(tmp_path / "w.safetensors")
    assert_same(loaded["conv"].unpack(), quantized)
    assert loaded["linear"].kernel_size == ()


@pytest.mark.parametrize(
    "kernels", [{"conv": [2, 2]}, {"conv": []}, {"conv": [3, 0]}, {"conv": 9}, {"other": [3, 3]}]
)
def test_a_file_with_a_false_kernel_size_is_refused(tmp_path: Path, kernels: Any) -> None:
    path = tmp_path / "w.safetensors"
    packed = co.reorder(co.quantize(torch.randn(4, 35, 3, 3)))
    co.save_packed(path, {"conv": packed})
    metadata, tensors = read_header(path)[0], packed.tensors()
    metadata["kernels"] = json.dumps(kernels)
    save_file({f"conv.{name}": tensor for name, tensor in tensors.items()}, path, metadata)
    with pytest.raises(co.CheckpointError, match="kernel"):
        co.load_packed(path)


@pytest.mark.parametrize("kernel_size", [(2,), (0, 3), (1, 1, 1, 1), (3.0,), (True,)])
def test_invalid_kernel_sizes_are_refused(kernel_size: Any) -> None:
    with pytest.raises(ValueError, match="kernel_size is"):
        co.QuantizedWeight(
            torch.zeros(4, 27, dtype=torch.uint8),
            torch.ones(4, 1),
            bits=8,
            group_size=-1,
            kernel_size=kernel_size,
        )


def test_the_row_of_a_value_that_is_not_finite_is_named() -> None:
    weight = torch.randn(4, 40, 3, 3)
    weight[2, 35, 1, 1] = torch.inf
    with pytest.raises(ValueError, match="in row 2, group 9"):  # the second of the fifth tap
        co.quantize(weight, group_size=32)


def test_products_and_layers_refuse_the_weight_of_a_convolution() -> None:
    quantized = co.quantize(torch.randn(8, 64, 3))
    packed = co.reorder(quantized)
    for refused in (
        lambda: co.mixed_gemm(torch.randn(2, 192), packed),
        lambda: co.MixedLinear(packed),
        lambda: co.reorder([quantized, quantized]),
        lambda: co.reorder_experts([quantized]),
        lambda: co.explain(1, packed),
    ):
        with pytest.raises(ValueError, match="convolution"):
            refused()
    perm = torch.arange(192)
    with pytest.raises(ValueError, match="act order"):
        co.QuantizedWeight(quantized.codes, quantized.scales, kernel_size=(3,), perm=perm)


def test_the_command_line_packs_and_shows_convolutions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "conv.weight": torch.randn(32, 80, 3, 3),
        "conv.bias": torch.randn(32),
        "depthwise.weight": torch.randn(64, 1, 3, 3),
        "fc.weight": torch.randn(10, 32),
    }
    source, packed = tmp_path / "source.safetensors", tmp_path / "packed.safetensors"
    save_file(state, source)
    run = CliRunner().invoke
    result = run(
        app, ["reorder", str(source), "-o", str(packed), "--bits", "8", "--group-size", "64"]
    )
    assert result.exit_code == 0, result.output
    loaded = co.load_packed(packed)
    expected = co.quantize(state["conv.weight"], bits=8, group_size=64)
    assert torch.equal(
        co.dequantize(loaded["conv"], torch.float32), co.dequantize(expected, torch.float32)
    )
    assert torch.equal(loaded["conv"].bias, state["conv.bias"])
    # 128 columns a tap for one channel are no gain, but --include accepts them.
    assert torch.equal(loaded["depthwise.weight"], state["depthwise.weight"])
    asked = [
        "reorder",
        str(source),
        "-o",
        str(tmp_path / "all.safetensors"),
        "--bits",
        "8",
        "--include",
        ".",
    ]
    assert run(app, asked).exit_code == 0
    assert co.load_packed(tmp_path / "all.safetensors")["depthwise"].kernel_size == (3, 3)
    shown = json.loads(run(app, ["inspect", str(packed), "--json"]).output)
    tensor = next(tensor for tensor in shown["tensors"] if tensor["name"] == "conv")
    assert (tensor["shape"], tensor["kernel_size"]) == ([32, 80, 3, 3], [3, 3])
    assert "kernel 3x3" in tensor["note"]
    assert "kernel 3x3" in " ".join(run(app, ["inspect", str(packed)]).output.split())
    checked = run(app, ["verify", str(packed), "--against", str(source)])
    assert checked.exit_code == 0, checked.output


def test_a_convolution_is_packed_where_that_is_smaller(tmp_path: Path) -> None:
    """A tap of 64 channels is padded to 128 codes: at 8 bits as many bytes as fp16 has,
    and so it stays.
    """
    kernels = {
        f"c{channels}.weight": torch.randn(64, channels, 3, 3).half() for channels in (63, 64, 65)
    }
    save_file(kernels, tmp_path / "m.safetensors")
    done = reorder_checkpoint(
        co.load_checkpoint(tmp_path / "m.safetensors"),
        tmp_path / "p.safetensors",
        bits=8,
        group_size=-1,
    )
    assert list(done.weights) == ["c65"]
    assert list(done.kept) == ["c63", "c64"]
    assert (
        done.kept["c64"]
        == "its 9 taps of 64 channels take 73728 bytes packed, and 73728 as they are"
    )


def test_dequantize_compiles() -> None:
    packed = co.reorder(co.quantize(torch.randn(5, 40, 3, 2), bits=8, group_size=32))
    compiled = torch.compile(
        lambda: co.dequantize(packed, torch.float32), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(), co.dequantize(packed, torch.float32))


def test_copies_and_files_that_differ_in_their_kernels(tmp_path: Path) -> None:
    quantized = co.quantize(torch.randn(5, 40, 3, 1), bits=8, group_size=32)
    packed = co.reorder(quantized)
    assert packed.matrix.kernel_size == ()
    for other in (
        copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
        packed.to("meta"),
        quantized.to("meta"),
    ):
        assert other.kernel_size == (3, 1)
    assert_same(copy.deepcopy(packed).unpack(), quantized)
    turned = co.QuantizedWeight(
        quantized.codes, quantized.scales, bits=8, group_size=32, kernel_size=(1, 3)
    )
    for name, weight in (("a", packed), ("b", co.reorder(turned))):
        co.save_packed(tmp_path / f"{name}.safetensors", {"conv": weight})
    result = CliRunner().invoke(
        app, ["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    )
    assert result.exit_code == 1
    assert "kernel_size is (3, 1) and (1, 3)" in " ".join(result.output.split())


def test_inspect_names_no_kernel_of_products_for_a_convolution(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    co.save_packed(
        path,
        {
            "conv": co.reorder(co.quantize(torch.randn(5, 40, 3, 3))),
            "fc": co.reorder(co.quantize(torch.randn(5, 40))),
        },
    )
    result = CliRunner().invoke(app, ["inspect", str(path), "--gpu", "sm_90", "--json"])
    assert result.exit_code == 0, result.output
    kernels = {tensor["name"]: tensor["kernels"] for tensor in json.loads(result.output)["tensors"]}
    assert kernels["conv"] == {}
    assert kernels["fc"] != {}
    assert CliRunner().invoke(app, ["inspect", str(path), "--gpu", "sm_90"]).exit_code == 0
