"""Model directories split for several ranks."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_directories import DOWN0, OPTIONS, Q0, source

from cutlass_ops import (
    CheckpointError,
    PackedWeight,
    dequantize,
    load_checkpoint,
    load_packed,
    quantize,
    reorder,
)
from cutlass_ops.checkpoints.safetensors_files import opened
from cutlass_ops.files import model_directory
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_file import is_packed, packed_info
from cutlass_ops.files.tensor_parallel import (
    check_heads,
    parse_overrides,
    slice_tensor,
    slice_weight,
    sliced_format,
    split_style,
)
from cutlass_ops.files.verify import verify_packed
from cutlass_ops.weights import formats

__all__ = ["source"]


def test_how_each_layer_is_split() -> None:
    for name, style in (
        ("model.layers.0.self_attn.q_proj", "colwise"),
        ("model.layers.0.mlp.experts.7.gate_proj", "colwise"),
        ("block_sparse_moe.experts.0.w2", "rowwise"),
        ("model.layers.0.mlp.down_proj", "rowwise"),
        ("lm_head", "replicate"),
        ("model.layers.0.mlp.gate", "replicate"),
    ):
        assert split_style(name) == style
    overrides = parse_overrides(["lm_head=colwise", "layers.0=replicate"])
    assert split_style("lm_head", overrides) == "colwise"
    assert split_style("model.layers.0.mlp.down_proj", overrides) == "replicate"
    assert split_style("model.layers.1.mlp.down_proj", overrides) == "rowwise"
    with pytest.raises(ValueError, match="several layers in one"):
        split_style("h.0.qkv_proj")
    assert split_style("h.0.qkv_proj", parse_overrides(["qkv=replicate"])) == "replicate"
    for text, match in (
        ("lm_head", "REGEX=STYLE"),
        ("a=rows", "REGEX=STYLE"),
        ("(=colwise", "no regular expression"),
    ):
        with pytest.raises(ValueError, match=match):
            parse_overrides([text])


@pytest.mark.parametrize(
    ("k", "group_size", "size", "expected"),
    [
        (512, 128, 2, 128),
        (576, 128, 2, 32),
        (11008, 128, 4, 64),
        (1024, 256, 8, 128),
        (96, -1, 3, -1),
        (384, 384, 1, 384),
        (1152, 384, 2, 64),  # 192 divides 384 and 576, and is no size of a group
        (768, 384, 4, 64),
        (3072, 384, 4, 384),
        (1536, 768, 4, 384),
        (640, 640, 2, 64),
        (480, 480, 3, 32),
        (608, 128, 2, 16),
    ],
)
def test_groups_at_the_border_of_two_ranks(
    k: int, group_size: int, size: int, expected: int
) -> None:
    formats.check_group_size(expected)
    assert sliced_format(8, k, group_size, "rowwise", size) == (8, k // size, expected)


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "book"])
@pytest.mark.parametrize(("k", "group_size"), [(192, 32), (576, 128), (320, -1), (1152, 384)])
def test_slices_are_slices_of_the_values(kind: str, k: int, group_size: int) -> None:
    random = torch.Generator().manual_seed(k)
    weight = quantize(
        torch.randn(24, k, generator=random), 4, group_size, symmetric=kind != "zeros"
    )
    extras: dict[str, Any] = {"bias": torch.randn(24, generator=random)}
    if kind == "offsets":
        extras["offsets"] = torch.randn(weight.scales.shape, generator=random)
    if kind == "book":
        extras["book"] = torch.randn(16, generator=random)
    weight = type(weight)(
        **{**{f: getattr(weight, f) for f in weight.__dataclass_fields__}, **extras}
    )
    values, bias = dequantize(weight, torch.float32), weight.bias
    assert bias is not None
    rows = [slice_weight(weight, "colwise", rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([dequantize(part, torch.float32) for part in rows]), values)
    assert torch.equal(torch.cat([part.bias for part in rows]), bias)
    columns = [slice_weight(weight, "rowwise", rank, 2) for rank in range(2)]
    assert torch.equal(
        torch.cat([dequantize(part, torch.float32) for part in columns], dim=1), values
    )
    assert torch.equal(sum(part.bias for part in columns), bias)
    for part in (*rows, *columns):
        assert torch.equal(reorder(part).unpack().codes, part.codes)


def test_biases_of_float_layers_are_split_with_them(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    done = reorder_model(
        checkpoint, out, Options(bits=4, group_size=32, exclude="q_proj|o_proj"), ranks=2
    )
    parts = [load_packed(out / f"rank-{rank}-of-2") for rank in range(2)]
    plain = dict(checkpoint.plain())
    o0 = "model.layers.0.self_attn.o_proj"
    assert (done.styles[f"{Q0}.bias"], done.styles[f"{o0}.bias"]) == ("colwise", "rowwise")
    assert torch.equal(torch.cat([part[f"{Q0}.bias"] for part in parts]), plain[f"{Q0}.bias"])
    assert torch.equal(parts[0][f"{o0}.bias"], plain[f"{o0}.bias"])
    assert not parts[1][f"{o0}.bias"].any()
    assert verify_packed(out, checkpoint).problems == []


def test_no_rank_has_a_part_of_an_attention_head() -> None:
    config = {"num_attention_heads": 12, "num_key_value_heads": 4}
    for name, key in (
        ("q_proj", "num_attention_heads 12"),
        ("k_proj", "num_key_value_heads 4"),
        ("v_proj", "num_key_value_heads 4"),
    ):
        heads = int(key.split()[1])
        for size in range(1, 13):
            if heads % size == 0:
                check_heads(f"layers.0.{name}", config, size)
                continue
            with pytest.raises(
                ValueError, match=f"over {size} ranks: config.json has {key}; .*=replicate'"
            ):
                check_heads(f"layers.0.{name}", config, size)
    check_heads("layers.0.o_proj", config, 5)
    check_heads("layers.0.q_proj", {"num_attention_heads": "12"}, 5)


def test_the_bias_of_a_rowwise_layer_is_added_once_with_its_sign() -> None:
    """-0.0 changes no sum, and 0.0 would turn a bias of -0.0 into 0.0."""
    bias = torch.tensor([-0.0, 0.0, 1.5, -2.0])
    weight = replace(quantize(torch.randn(4, 96), 4, 32), bias=bias)
    slices = [slice_weight(weight, "rowwise", rank, 3).bias for rank in range(3)]
    floats = [slice_tensor(bias, "rowwise", rank, 3) for rank in range(3)]
    for parts in (slices, floats):
        total = parts[0] + parts[1] + parts[2]
        assert torch.equal(total.view(torch.int32), bias.view(torch.int32))
        assert torch.equal(parts[0], bias)
        assert [part.tolist() for part in parts[1:]] == [[0.0] * 4] * 2


def test_ranks_hold_slices_of_the_unsplit_model(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    reorder_model(checkpoint, tmp_path / "whole", OPTIONS)
    done = reorder_model(checkpoint, out, OPTIONS, ranks=2, splits=(("k_proj", "replicate"),))
    assert is_packed(out)
    with pytest.raises(CheckpointError, match=r"name one: rank-0-of-2, rank-1-of-2"):
        load_packed(out)
    whole = load_packed(tmp_path / "whole")
    parts = [load_packed(out / f"rank-{rank}-of-2") for rank in range(2)]
    kept = 0
    for name, value in whole.items():
        a, b = (part[name] for part in parts)
        if isinstance(value, PackedWeight):
            assert isinstance(a, PackedWeight)
            assert isinstance(b, PackedWeight)
            x, y = dequantize(a, torch.float32), dequantize(b, torch.float32)
            value, bias = dequantize(value, torch.float32), value.bias
            row = name.endswith(("o_proj", "down_proj"))
            if bias is not None:
                assert a.bias is not None
                assert b.bias is not None
                assert torch.equal(a.bias + b.bias if row else torch.cat([a.bias, b.bias]), bias)
        else:
            assert isinstance(a, torch.Tensor)
            assert isinstance(b, torch.Tensor)
            x, y, row = a, b, False
        if name.endswith(("k_proj", "norm.weight", "embed_tokens.weight")):
            assert torch.equal(x, value)
            assert torch.equal(y, value)
            kept += 1
        else:
            assert torch.equal(torch.cat([x, y], dim=1 if row else 0), value)
            style = "rowwise" if row else "colwise"
            assert done.styles[name] == style
    assert kept == 5  # two k_proj, two norms, the embedding
    assert whole["model.layers.1.mlp.up_proj.weight"].shape == (192, 128)
    assert parts[0]["model.layers.1.mlp.up_proj.weight"].shape == (96, 128)  # floats are split too
    assert parts[0][DOWN0].group_size == 32
    for rank in range(2):
        config = json.loads((out / f"rank-{rank}-of-2" / "config.json").read_text())[
            "quantization_config"
        ]
        assert config["tensor_parallel"] == {"rank": rank, "size": 2, "styles": dict(done.styles)}
        slices = packed_info(out / f"rank-{rank}-of-2").slices
        assert slices is not None
        assert (slices.rank, slices.size, slices.styles) == (rank, 2, done.styles)
        assert (out / f"rank-{rank}-of-2" / "tokenizer.json").is_file()


def test_the_advice_to_replicate_holds(source: Path, tmp_path: Path) -> None:
    checkpoint, splits, advice = load_checkpoint(source), [], []
    for _ in range(3):
        try:
            reorder_model(
                checkpoint,
                tmp_path / "out",
                OPTIONS,
                ranks=4,
                splits=parse_overrides(splits),
                dry_run=True,
            )
            break
        except ValueError as error:
            advice += re.findall(r"--tp-split '(.*?)'", str(error))
            splits = [*advice, "down=replicate"]
    else:
        pytest.fail(str(advice))
    assert advice == ["k_proj|v_proj=replicate"]
    with pytest.raises(ValueError, match="--tp-split 'qkv_proj=replicate'"):
        split_style("h.0.qkv_proj")
    with pytest.raises(ValueError, match="--tp-split 'q_proj=replicate'"):
        check_heads("q_proj", {"num_attention_heads": 3}, 2)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_full_disk_is_named(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    if name == "config.json":
        monkeypatch.setattr(
            model_directory, "_config", lambda *_: monkeypatch.setattr(os, "fsync", full) or {}
        )
    else:
        monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{out / name}'"):
        reorder_model(load_checkpoint(source), out, OPTIONS)


def test_a_file_that_may_not_be_read_is_said_to_be_there(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    shard = min(source.glob("*.safetensors"))
    monkeypatch.setattr(Path, "open", refuse)  # tests may run as root, whom no mode keeps out
    with pytest.raises(CheckpointError, match=rf"{shard}: Permission denied"), opened(shard):
        pass


def test_weights_that_cannot_be_split_are_refused(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    with pytest.raises(
        ValueError,
        match=r"k_proj' cannot be split over 3 ranks: config\.json has num_key_value_heads 2",
    ):
        reorder_model(checkpoint, out, OPTIONS, ranks=3)
    with pytest.raises(ValueError, match="num_key_value_heads 2"):
        reorder_model(checkpoint, out, OPTIONS, ranks=4, splits=(("down", "replicate"),))
    with pytest.raises(ValueError, match=r"down_proj' cannot be rowwise: .* groups of 8"):
        reorder_model(checkpoint, out, OPTIONS, ranks=8, splits=(("_attn|gate|up", "replicate"),))
    with pytest.raises(ValueError, match="5 ranks"):
        reorder_model(checkpoint, out, OPTIONS, ranks=5, splits=(("_attn", "replicate"),))
    assert not out.exists()
    weight = quantize(torch.randn(8, 64), 4, 32)
    ordered = type(weight)(weight.codes, weight.scales, group_size=32, perm=torch.randperm(64))
    with pytest.raises(ValueError, match="act order"):
        slice_weight(ordered, "rowwise", 0, 2)
    assert slice_weight(ordered, "colwise", 1, 2).perm is ordered.perm
