"""The reader of torchao's safetensors, against the package's own files and dequantiser, and against
words written by hand.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import save_file

from cutlass_ops import CheckpointError, load_checkpoint, load_packed, reference
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed

RANDOM = torch.Generator().manual_seed(11)


@pytest.fixture(scope="module")
def torchao() -> Any:
    logging.disable(logging.WARNING)  # it tells which of its GPU libraries do not load
    try:
        return import_or_skip("torchao")
    finally:
        logging.disable(logging.NOTSET)


def save_flat(path: Path, tensors: dict[str, Any]) -> Path:
    """By the package's own flattening."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    flat, metadata = flatten_tensor_state_dict(tensors)
    save_file({name: value.contiguous() for name, value in flat.items()}, path, metadata)
    return path


def described(kind: str, parts: list[str], **data: Any) -> str:
    return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": parts})


def save_by_hand(path: Path, parts: dict[str, torch.Tensor], kind: str, **data: Any) -> Path:
    metadata = {
        "m.weight": described(kind, list(parts), **data),
        "tensor_names": '["m.weight"]',
        "note": "short",
    }
    save_file({f"m._weight_{name}": value for name, value in parts.items()}, path, metadata)
    return path


def tile_packed(codes: torch.Tensor) -> torch.Tensor:
    """int32 [N/8, K/128, 32, 4] of codes [N, K], word by word as PyTorch's
    int4mm.cu describes it.
    """
    n, k = codes.shape
    words = torch.zeros(n // 8, k // 128, 32, 4, dtype=torch.int64)
    lane = torch.arange(32)
    for j in range(4):
        for place, column in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
            columns = 32 * j + 2 * (lane % 4) + column
            # [32, n / 8, k / 128]
            chosen = codes.view(n // 8, 8, k // 128, 128)[:, lane // 4, :, columns]
            words[..., j] |= chosen.permute(1, 2, 0).long() << 4 * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def test_golden_words(tmp_path: Path) -> None:
    codes = torch.zeros(8, 1024, dtype=torch.uint8)
    codes[0, [0, 1, 8, 9, 16, 17, 24, 25]] = torch.arange(8, dtype=torch.uint8)
    assert tile_packed(codes)[0, 0, 0, 0] == 0x75316420
    words = torch.zeros(1, 8, 32, 4, dtype=torch.int32)
    words[0, 2, 4 * 3 + 1, 2] = 0x75316420  # row 3, columns from 2 * 128 + 2 * 32 + 2 * 1
    both = torch.tensor([0.5, 3.0]).bfloat16().repeat(4, 8, 1)
    path = save_by_hand(
        tmp_path / "m.safetensors",
        {"qdata": words, "scale_and_zero": both},
        "Int4TilePackedTo4dTensor",
        block_size=[1, 256],
        shape=[8, 1024],
    )
    weight = load_checkpoint(path)["m"]
    expected = torch.zeros(8, 1024, dtype=torch.uint8)
    expected[3, [256 + 66 + c for c in (0, 1, 8, 9, 16, 17, 24, 25)]] = torch.arange(
        8, dtype=torch.uint8
    )
    assert torch.equal(weight.codes, expected)
    assert reference.dequantize_weight(weight, torch.float32).unique().tolist() == [
        (q - 8) * 0.5 + 3 for q in range(8)
    ]
    assert load_checkpoint(path).metadata == {"note": "short"}


def test_plain_bytes_by_hand(tmp_path: Path) -> None:
    qdata = torch.tensor([[0x10] * 16, [0x8F] * 16], dtype=torch.uint8).view(torch.int8)
    path = save_by_hand(
        tmp_path / "m.safetensors",
        {
            "qdata": qdata,
            "scale": torch.tensor([[0.5, 2.0]]),
            "zero_point": torch.tensor([[1.0, -1.0]]).bfloat16(),
        },
        "Int4Tensor",
        block_size=[1, 32],
        shape=[2, 32],
    )
    weight = load_checkpoint(path)["m"]
    assert weight.offsets is not None
    assert weight.offsets.dtype == torch.bfloat16
    assert weight.group_size == -1
    values = [[0 * 0.5 + 1, 1 * 0.5 + 1] * 16, [-1 * 2.0 - 1, -8 * 2.0 - 1] * 16]
    assert reference.dequantize_weight(weight, torch.float32).tolist() == values


@pytest.mark.parametrize(
    ("n", "k", "group"),
    [(8, 1024, 32), (20, 1088, 64), (192, 576, 128), (9, 2048, 256), (3, 100, 128)],
)
def test_tile_packed_weights(tmp_path: Path, torchao: Any, n: int, k: int, group: int) -> None:
    from torchao.quantization import Int4TilePackedTo4dTensor
    from torchao.quantization.quant_primitives import (
        MappingType,
        _choose_qparams_affine_tinygemm,
        _dequantize_affine_tinygemm,
        _quantize_affine_tinygemm,
    )
    from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

    padded = torch.zeros(-(-n // 8) * 8, -(-k // 1024) * 1024, dtype=torch.bfloat16)
    padded[:n, :k] = torch.randn(n, k, generator=RANDOM)
    size = (1, group)
    scale, zero = _choose_qparams_affine_tinygemm(
        padded,
        MappingType.ASYMMETRIC,
        size,
        torch.int32,
        0,
        15,
        scale_dtype=torch.bfloat16,
        zero_point_dtype=torch.bfloat16,
    )
    codes = _quantize_affine_tinygemm(padded, size, scale, zero, torch.int32, 0, 15)
    theirs = _dequantize_affine_tinygemm(
        codes, size, scale, zero, torch.int32, 0, 15, output_dtype=torch.float32
    )[:n, :k]
    scale, zero = scale.reshape(len(padded), -1), zero.reshape(len(padded), -1)
    tensor = Int4TilePackedTo4dTensor(
        tile_packed(codes.to(torch.uint8)),
        pack_tinygemm_scales_and_zeros(scale, zero, torch.bfloat16),
        list(size),
        torch.Size((n, k)),
    )
    checkpoint = load_checkpoint(save_flat(tmp_path / "m.safetensors", {"a.b.weight": tensor}))
    weight = checkpoint["a.b"]
    assert torch.equal(weight.codes, codes[:n, :k].to(torch.uint8))
    assert weight.group_size == (-1 if group >= k else group)
    assert torch.equal(reference.dequantize_weight(weight, torch.float32), theirs)
    assert torch.equal(checkpoint.entries["a.b"].values(), theirs)


@pytest.mark.parametrize("symmetric", [True, False])
def test_plain_int4_weights(tmp_path: Path, torchao: Any, symmetric: bool) -> None:
    from torchao.quantization import Int4Tensor

    codes = torch.randint(-8, 8, (24, 192), generator=RANDOM)
    scale, zero = torch.randn(2, 3, 24, generator=RANDOM).bfloat16()
    if symmetric:
        zero = torch.zeros_like(zero)
    qdata = ((codes[:, ::2] & 15) | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    tensor = Int4Tensor(qdata, scale, zero, [1, 64], torch.Size((24, 192)))
    checkpoint = load_checkpoint(
        save_flat(tmp_path / "m.safetensors", {"m.weight": tensor, "m.bias": torch.ones(24)})
    )
    expected = codes.float() * scale.t().float().repeat_interleave(
        64, 1
    ) + zero.t().float().repeat_interleave(64, 1)
    assert torch.equal(reference.dequantize_weight(checkpoint["m"], torch.float32), expected)
    assert torch.equal(checkpoint.entries["m"].values(), expected)
    assert checkpoint["m"].bias is not None
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    assert set(load_packed(tmp_path / "p.safetensors")) == {"m"}
    assert verify_packed(tmp_path / "p.safetensors", checkpoint).problems == []


def quantised(torchao: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(256, 24), "b": torch.nn.Linear(128, 8, bias=False)}
    ).to(dtype)
    torchao.quantization.quantize_(model, config)
    return model


def int8_config(torchao: Any, name: str) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, MappingType
    from torchao.quantization.granularity import PerAxis, PerGroup

    return {
        "int8 rows": lambda: Int8WeightOnlyConfig(version=2),
        "int4 groups": lambda: IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(32)
        ),
        "int4 asymmetric": lambda: IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(64), mapping_type=MappingType.ASYMMETRIC
        ),
        "int3 groups": lambda: IntxWeightOnlyConfig(
            weight_dtype=torch.int3, granularity=PerGroup(128)
        ),
        "int6 asymmetric": lambda: IntxWeightOnlyConfig(
            weight_dtype=torch.int6, granularity=PerGroup(128), mapping_type=MappingType.ASYMMETRIC
        ),
        "int8 asymmetric rows": lambda: IntxWeightOnlyConfig(
            weight_dtype=torch.int8, granularity=PerAxis(0), mapping_type=MappingType.ASYMMETRIC
        ),
    }[name]()


@pytest.mark.parametrize(
    "name",
    [
        "int8 rows",
        "int4 groups",
        "int4 asymmetric",
        "int3 groups",
        "int6 asymmetric",
        "int8 asymmetric rows",
    ],
)
def test_files_of_the_package(tmp_path: Path, torchao: Any, name: str) -> None:
    model = quantised(torchao, int8_config(torchao, name), torch.float32)
    checkpoint = load_checkpoint(save_flat(tmp_path / "m.safetensors", model.state_dict()))
    assert checkpoint.dialect == "torchao"
    assert list(checkpoint) == ["a", "b"]
    assert not checkpoint.others
    for module in ("a", "b"):
        theirs = model[module].weight.dequantize()
        weight = checkpoint[module]
        assert weight.bits == (8 if name[3] in "68" else 4)
        # b is one group wide
        assert weight.symmetric == (
            name == "int8 rows" or (name == "int3 groups" and module == "b")
        )
        assert torch.equal(reference.dequantize_weight(weight, torch.float32), theirs)
        assert torch.equal(checkpoint.entries[module].values(), theirs)
        quantized = checkpoint.entries[module].quantized
        assert quantized is not None
        parts = {
            "scales": weight.scales,
            "zeros": weight.zeros,
            "offsets": weight.offsets,
            "bias": weight.bias,
        }
        assert quantized.dtypes == {
            part: value.dtype for part, value in parts.items() if value is not None
        }


def test_float_zero_points(tmp_path: Path, torchao: Any) -> None:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    qdata = torch.randint(-8, 8, (5, 96), generator=RANDOM).to(torch.int8)
    scale, zero = torch.randn(2, 5, 3, generator=RANDOM)
    tensor = IntxUnpackedToInt8Tensor(qdata, scale, zero, torch.int4, (1, 32), torch.float32, None)
    checkpoint = load_checkpoint(save_flat(tmp_path / "m.safetensors", {"m.weight": tensor}))
    ours = reference.dequantize_weight(checkpoint["m"], torch.float32)
    theirs = tensor.dequantize()
    limit = scale.abs().repeat_interleave(32, 1) * 2.0**-18  # three roundings of at most 12 scales
    assert bool(((ours - theirs).abs() <= limit).all())


def test_one_scale_for_a_tensor(tmp_path: Path, torchao: Any) -> None:
    from torchao.quantization import Int8Tensor
    from torchao.quantization.granularity import PerTensor

    tensor = Int8Tensor.from_hp(torch.randn(6, 128, generator=RANDOM), PerTensor())
    weight = load_checkpoint(save_flat(tmp_path / "m.safetensors", {"m.weight": tensor}))["m"]
    assert weight.scales.shape == (6, 1)
    assert torch.equal(reference.dequantize_weight(weight, torch.float32), tensor.dequantize())


def test_each_shard_has_its_metadata(tmp_path: Path, torchao: Any) -> None:
    model = quantised(torchao, int8_config(torchao, "int4 groups"), torch.bfloat16)
    state = model.state_dict()
    weight_map = {}
    for shard, module in (("model-1.safetensors", "a"), ("model-2.safetensors", "b")):
        save_flat(
            tmp_path / shard,
            {name: value for name, value in state.items() if name.startswith(module)},
        )
        whole = load_checkpoint(tmp_path / shard)
        weight_map.update(
            {
                part: shard
                for entry in whole.entries.values()
                for part in entry.parts or (entry.name,)
            }
        )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = load_checkpoint(tmp_path)
    assert list(checkpoint) == ["a", "b"]
    for module in ("a", "b"):
        ours = reference.dequantize_weight(checkpoint[module], torch.bfloat16)
        theirs = model[module].weight.dequantize().float()
        # Their product is rounded to bf16, as ours is, but the scale's product is
        # taken in bf16 too.
        torch.testing.assert_close(ours.float(), theirs, rtol=2.0**-7, atol=0)


PLAIN = {
    "qdata": torch.zeros(4, 64, dtype=torch.int8),
    "scale": torch.ones(4, 2),
    "zero_point": torch.zeros(4, 2).char(),
}
INT8 = {"block_size": [1, 32], "dtype": {"_type": "torch.dtype", "_data": "float32"}}


@pytest.mark.parametrize(
    ("kind", "parts", "data", "match"),
    [
        ("Float8Tensor", {}, {}, "is a Float8Tensor; Int4Tensor, "),
        ("Int8Tensor", {"act_pre_scale": torch.ones(64)}, INT8, "has an act_pre_scale"),
        ("Int8Tensor", {}, {"block_size": [1, 1, 32]}, "more than two dimensions"),
        (
            "Int8Tensor",
            {"scale": torch.ones(4, 8), "zero_point": torch.zeros(4, 8).char()},
            {"block_size": [1, 8]},
            "is 8",
        ),
    ],
)
def test_tensors_that_cannot_be_packed_are_refused(
    tmp_path: Path, kind: str, parts: dict[str, torch.Tensor], data: dict[str, Any], match: str
) -> None:
    checkpoint = load_checkpoint(
        save_by_hand(tmp_path / "m.safetensors", {**PLAIN, **parts}, kind, **data)
    )
    with pytest.raises(CheckpointError, match=rf"tensor 'm\.weight': .*{match}"):
        checkpoint["m"]


def change(**parts: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**PLAIN, **parts}


@pytest.mark.parametrize(
    ("kind", "parts", "data", "match"),
    [
        ("Int8Tensor", PLAIN, {"block_size": [1, "32"]}, "block_size is"),
        ("Int8Tensor", PLAIN, {"block_size": [1, 0]}, "block_size is"),
        ("Int8Tensor", PLAIN, {"block_size": [1, True]}, "block_size is"),
        ("Int8Tensor", PLAIN, {"block_size": [1, 48]}, r"a divisor of 64"),
        ("Int8Tensor", PLAIN, {"block_size": [2, 32]}, r"block_size is \[2, 32\]"),
        ("Int8Tensor", PLAIN, {"block_size": [1, 64]}, r"scale is F32 \[4, 2\]"),
        ("Int8Tensor", change(scale=torch.ones(4, 2).int()), INT8, "scale is I32"),
        ("Int8Tensor", change(zero_point=torch.ones(4, 1)), INT8, "zero_point is F32"),
        ("Int8Tensor", change(qdata=torch.zeros(4, 64)), INT8, "qdata is F32"),
        ("Int8Tensor", change(qdata=torch.zeros(4).char()), INT8, r"qdata has shape \[4\]"),
        ("Int8Tensor", change(qdata=torch.zeros(0, 64).char()), INT8, r"qdata has shape \[0, 64\]"),
        ("IntxUnpackedToInt8Tensor", PLAIN, INT8, "target_dtype is None"),
        ("Int4Tensor", PLAIN, {**INT8, "shape": [4, 128, 1]}, r"shape is \[4, 128, 1\]"),
        ("Int4Tensor", PLAIN, {**INT8, "shape": [4, 64]}, r"qdata is I8 \[4, 64\]; .* \[4, 32\]"),
        ("Int4Tensor", PLAIN, {**INT8, "shape": [1 << 39, 1 << 39]}, "qdata is I8"),
        (
            "Int4TilePackedTo4dTensor",
            PLAIN,
            {**INT8, "shape": [4, 64]},
            r"qdata is I8 \[4, 64\]; int32 \[1, 8, 32, 4\]",
        ),
        (
            "Int4TilePackedTo4dTensor",
            PLAIN,
            {"block_size": [1, 96], "shape": [4, 64]},
            "a divisor of 1024",
        ),
        (
            "Int4Tensor",
            {"qdata": PLAIN["qdata"]},
            {**INT8, "shape": [4, 128]},
            "has no tensor 'scale'",
        ),
    ],
)
def test_metadata_that_contradicts_the_tensors(
    tmp_path: Path, kind: str, parts: dict[str, torch.Tensor], data: dict[str, Any], match: str
) -> None:
    path = save_by_hand(tmp_path / "m.safetensors", parts, kind, **data)
    with pytest.raises(CheckpointError, match=rf"tensor 'm\.weight': {kind}: .*{match}"):
        load_checkpoint(path)


@pytest.mark.parametrize("part", ["scale", "zero_point", "scale_and_zero"])
def test_parts_without_codes(tmp_path: Path, part: str) -> None:
    path = save_by_hand(
        tmp_path / "m.safetensors",
        {part: torch.ones(4, 2)},
        "Int4Tensor",
        block_size=[1, 32],
        shape=[4, 64],
    )
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(CheckpointError, match=r"'m\._weight_qdata': is missing"):
        load_checkpoint(path)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("part", ["qdata", "zero_point"])
def test_values_reach_the_limits_of_their_bits_and_no_further(
    tmp_path: Path, part: str, bits: int
) -> None:
    limit = 1 << (bits - 1)
    for value in (-limit, limit - 1, -limit - 1, limit):
        if not -128 <= value <= 127:
            continue
        parts = {**PLAIN, part: PLAIN[part].clone()}
        parts[part][1, 1] = value
        target = {"_type": "torch.dtype", "_data": f"int{bits}"}
        path = save_by_hand(
            tmp_path / "m.safetensors",
            parts,
            "IntxUnpackedToInt8Tensor",
            target_dtype=target,
            **INT8,
        )
        entry = load_checkpoint(path).entries["m"]
        if -limit <= value < limit:
            expected = torch.zeros(4, 64)
            if part == "qdata":
                expected[1, 1] = value
            else:
                expected[1, 32:] = -value
            assert torch.equal(entry.values(), expected)
            assert torch.equal(
                reference.dequantize_weight(load_checkpoint(path)["m"], torch.float32), expected
            )
            continue
        with pytest.raises(
            CheckpointError,
            match=rf"{part} has values from .*; with {bits} bits -{limit} \.\. {limit - 1} ",
        ):
            entry.values()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "does not describe it"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "are expected"),
        ('{"_type": 3, "_data": {}}', "are expected"),
        ('{"_type": "Int8Tensor", "_data": []}', "are expected"),
    ],
)
def test_metadata_that_is_none(tmp_path: Path, text: str | None, match: str) -> None:
    metadata = {"tensor_names": "[]"} | ({} if text is None else {"m.weight": text})
    save_file(
        {f"m._weight_{name}": value for name, value in PLAIN.items()},
        tmp_path / "m.safetensors",
        metadata,
    )
    with pytest.raises(CheckpointError, match=match) as raised:
        load_checkpoint(tmp_path / "m.safetensors")
    assert len(str(raised.value)) < 1000
