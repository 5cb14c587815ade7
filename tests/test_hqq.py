"""The reader of HQQ, against the ``hqq`` package's own files and dequantiser, and against bytes
written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import save_file

from cutlass_ops import CheckpointError, load_checkpoint, load_packed, reference
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed


@pytest.fixture(scope="module")
def hqq() -> Any:
    return import_or_skip("hqq.core.quantize")


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def state(
    codes: torch.Tensor | None,
    scale: torch.Tensor,
    zero: torch.Tensor,
    shape: tuple[int, int],
    **other: Any,
) -> dict[str, Any]:
    """A module's state by hand, 4 bits along rows unless ``other`` says something else; None
    takes a part away.
    """
    made = {
        "W_q": codes,
        "scale": scale,
        "zero": zero,
        "nbits": torch.tensor(4, dtype=torch.int32),
        "group_size": torch.tensor(32, dtype=torch.int32),
        "shape": torch.tensor(shape),
        "axis": torch.tensor(1, dtype=torch.int32),
        "packing": text("4bit_u8"),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
        "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
        **other,
    }
    return {f"m.{name}": value for name, value in made.items() if value is not None}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "hqq"}})
    )
    return folder


# W [2, 64] in groups of 32: four rows of codes, of which rows 0 and 1 lie in the high halves, 2
# and 3 in the low.
BY_HAND = {
    "codes": torch.arange(64, dtype=torch.uint8).view(2, 32),
    "scale": torch.tensor([[0.5], [1.0], [-2.0], [0.25]]),
    "zero": torch.tensor([[0.0], [7.5], [8.0], [-1.0]]),
    "shape": (2, 64),
}


def test_codes_scales_and_offsets_by_hand(tmp_path: Path) -> None:
    weight = load_checkpoint(write(tmp_path, state(**BY_HAND)))["m"]
    codes = [[i >> 4 for i in range(64)], [i & 15 for i in range(64)]]
    assert weight.codes.tolist() == codes
    assert weight.scales.tolist() == [[0.5, 1.0], [-2.0, 0.25]]
    assert weight.offsets is not None
    assert weight.offsets.tolist() == [[4.0, 0.5], [0.0, 2.25]]
    zeros = [[0.0, 7.5], [8.0, -1.0]]
    scales = [[0.5, 1.0], [-2.0, 0.25]]
    values = [
        [(codes[n][k] - zeros[n][k // 32]) * scales[n][k // 32] for k in range(64)]
        for n in range(2)
    ]
    assert reference.dequantize_weight(weight, torch.float32).tolist() == values
    assert load_checkpoint(tmp_path).entries["m"].values().tolist() == values


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128, None])
def test_files_of_the_package(tmp_path: Path, hqq: Any, bits: int, group: int | None) -> None:
    torch.manual_seed(bits)
    layers = {}
    for name, n, k in (("a.q", 48, 384), ("b", 6 if bits > 3 else 8, 128)):
        linear = torch.nn.Linear(k, n, bias=name == "b")
        config = hqq.BaseQuantizeConfig(
            nbits=bits, group_size=group, axis=1, view_as_float=name == "b" and bits == 4
        )
        layers[name] = hqq.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    tensors = {
        f"{name}.{key}": value
        for name, layer in layers.items()
        for key, value in layer.state_dict().items()
    }
    save_file({key: value.clone() for key, value in tensors.items()}, tmp_path / "m.safetensors")
    checkpoint = load_checkpoint(tmp_path / "m.safetensors")
    assert checkpoint.dialect == "hqq"
    assert list(checkpoint) == list(layers)
    assert not checkpoint.others
    for name, layer in layers.items():
        theirs = layer.dequantize()
        assert torch.equal(checkpoint.entries[name].values(), theirs)
        weight = checkpoint[name]
        assert weight.bits == {1: 2, 2: 2, 3: 4, 4: 4}.get(bits, 8)
        assert weight.group_size == (-1 if group in (None, theirs.shape[1]) else group)
        assert (weight.bias is None) == (layer.bias is None)
        assert weight.bias is None or torch.equal(weight.bias, layer.bias)
        # The offset, the product and the sum are each rounded to fp32, and are at most
        # 2^bits scales in size.
        limit = weight.scales.abs().repeat_interleave(
            theirs.shape[1] // weight.groups, 1
        ) * 2.0 ** (bits + 1 - 23)
        assert bool(
            ((reference.dequantize_weight(weight, torch.float32) - theirs).abs() <= limit).all()
        )
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    assert set(load_packed(tmp_path / "p.safetensors")) == set(layers)
    assert verify_packed(tmp_path / "p.safetensors", checkpoint).problems == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_scales_are_kept(tmp_path: Path, hqq: Any, dtype: torch.dtype) -> None:
    config = hqq.BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    layer = hqq.HQQLinear(torch.nn.Linear(128, 16), config, compute_dtype=dtype, device="cpu")
    save_file(
        {f"m.{key}": value for key, value in layer.state_dict().items()}, tmp_path / "m.safetensors"
    )
    weight = load_checkpoint(tmp_path / "m.safetensors")["m"]
    assert weight.scales.dtype == dtype
    assert torch.equal(weight.scales, layer.meta["scale"].view(16, 2))
    codes = hqq.Quantizer.unpack["4bit_u8"](layer.W_q).view(16, 128)
    assert torch.equal(weight.codes, codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("group", "stored"), [(32, True), (None, True), (None, False)])
def test_groups_across_output_features(
    tmp_path: Path, hqq: Any, group: int | None, stored: bool, bits: int
) -> None:
    config = hqq.BaseQuantizeConfig(nbits=bits, group_size=group, axis=0)
    layer = hqq.HQQLinear(
        torch.nn.Linear(64, 32, bias=False), config, compute_dtype=torch.float32, device="cpu"
    )
    tensors = {
        f"m.{key}": value
        for key, value in layer.state_dict().items()
        if stored or key != "group_size"
    }
    save_file(tensors, tmp_path / "m.safetensors")
    checkpoint = load_checkpoint(tmp_path / "m.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'm\.W_q': has groups that run across output features \(axis 0\)",
    ):
        checkpoint["m"]
    assert torch.equal(checkpoint.entries["m"].values(), layer.dequantize())
    reorder_error = r"leave it out \(--exclude\)"
    with pytest.raises(CheckpointError, match=reorder_error):
        reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")


@pytest.mark.parametrize("axis", [0, 1])
def test_one_scale_for_all(tmp_path: Path, axis: int) -> None:
    one = {"scale": torch.tensor([[0.5]]), "zero": torch.tensor([[2.5]])}
    other = {"axis": torch.tensor(axis), "channel_wise": torch.tensor(0, dtype=torch.uint8)}
    weight = load_checkpoint(write(tmp_path, state(**{**BY_HAND, **one}, **other)))["m"]
    assert weight.group_size == -1
    assert weight.scales.tolist() == [[0.5], [0.5]]
    values = [
        [(i >> 4) * 0.5 - 1.25 for i in range(64)],
        [(i & 15) * 0.5 - 1.25 for i in range(64)],
    ]
    assert reference.dequantize_weight(weight, torch.float32).tolist() == values
    assert load_checkpoint(tmp_path).entries["m"].values().tolist() == values


def scalar(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"shape": (1, 128), "group_size": scalar(32), "axis": scalar(0)},
            "across output features",
        ),
        (
            {
                "shape": (4, 32),
                "group_size": scalar(64),
                "scale": torch.ones(2),
                "zero": torch.ones(2),
            },
            "go on from one row of 32",
        ),
        (
            {"group_size": scalar(8), "scale": torch.ones(16), "zero": torch.ones(16)},
            "group_size is 8",
        ),
        ({"nbits": scalar(7)}, r"codes of \[7\] bits"),
        ({"nbits": scalar(3)}, "3 bits are expected as '3bit_32'"),
        ({"nbits": torch.tensor(1.58)}, r"codes of \[1\.5"),
        ({"packing": text("3bit_32")}, "packed as '3bit_32'"),
        ({"quant_scale": torch.tensor(1, dtype=torch.uint8)}, "quantised themselves"),
    ],
)
def test_tensors_that_cannot_be_packed_are_refused(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    checkpoint = load_checkpoint(write(tmp_path, state(**{**BY_HAND, **change})))
    with pytest.raises(CheckpointError, match=rf"tensor 'm\.W_q': .*{match}"):
        checkpoint["m"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"codes": None}, r"'m\.W_q': is missing"),
        ({"zero": None}, r"'m\.zero': is missing"),
        ({"packing": None}, r"'m\.packing': is missing"),
        ({"shape": (2, 32)}, r"'m\.W_q': has 64 bytes; 2 x 32 codes of 4 bits take 32"),
        ({"shape": (0, 64)}, r"'m\.shape': is \[0, 64\]"),
        ({"shape": (1 << 62, 64)}, r"'m\.W_q': has 64 bytes"),
        ({"shape": (2, 32, 2)}, r"'m\.shape': is I64 \[3\]; 2 integers"),
        ({"axis": scalar(2)}, r"'m\.axis': is 2"),
        ({"axis": torch.tensor(1.0)}, r"'m\.axis': is F32"),
        ({"group_size": scalar(0)}, r"'m\.group_size': is 0"),
        ({"group_size": scalar(48)}, r"'m\.group_size': is 48, which does not divide 2 x 64"),
        ({"scale": torch.ones(3)}, r"'m\.scale': is F32 \[3\]; 4 floats"),
        ({"zero": torch.ones(4, dtype=torch.int32)}, r"'m\.zero': is I32"),
    ],
)
def test_a_state_that_contradicts_itself(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(write(tmp_path, state(**{**BY_HAND, **change})))


def test_codes_beyond_their_bits(tmp_path: Path) -> None:
    codes = torch.full((2, 64), 31, dtype=torch.uint8)
    path = write(
        tmp_path, state(**{**BY_HAND, "codes": codes}, nbits=scalar(5), packing=text("8bit_u8"))
    )
    assert load_checkpoint(path)["m"].codes.unique().tolist() == [31 + 128 - 16]
    codes[1, 3] = 32
    write(tmp_path, state(**{**BY_HAND, "codes": codes}, nbits=scalar(5), packing=text("8bit_u8")))
    with pytest.raises(CheckpointError, match="holds 32; with 5 bits the largest is 31"):
        load_checkpoint(path)["m"]


@pytest.mark.parametrize("bits", [4.0, 5.0])
def test_bits_stored_as_a_float_are_those_of_the_integer(tmp_path: Path, bits: float) -> None:
    codes = (
        torch.arange(int(128 * (4 if bits == 4 else 8) / 8), dtype=torch.uint8).view(-1, 32) % 32
    )
    packing = text("4bit_u8" if bits == 4 else "8bit_u8")
    weights = []
    for stored in (scalar(int(bits)), torch.tensor(bits, dtype=torch.float16)):
        made = state(**{**BY_HAND, "codes": codes}, nbits=stored, packing=packing)
        checkpoint = load_checkpoint(write(tmp_path, made))
        weights.append((checkpoint["m"], checkpoint.entries["m"].values()))
    (found, values), (expected, expected_values) = weights
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(values, expected_values)
